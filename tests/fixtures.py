"""
fixtures.py: what many test files share on top of conftest.py's toy world: codecs, policies,
sources of frames, and the main() of a script in the process of the test.
"""
import contextlib
import json
import sys

import pytest

import chat
import launch
import rewards
from plumbing import data


@pytest.fixture(scope="session")
def codec(toy):
    return chat.load_codec(str(toy / "init"))


@pytest.fixture
def opened(monkeypatch):
    """The video files that this process opened from now on: one entry for the times of a file, one
    for each set of frames that was decoded."""
    import av

    names, real = [], av.open

    def spy(file, mode=None, **more):
        if mode is None:
            names.append(str(file))
        return real(file, mode, **more)

    monkeypatch.setattr(av, "open", spy)
    return names


@pytest.fixture
def process_group():
    """A process group of one, which FSDP and the lockstep helpers need. Made if there is none,
    because closing a vLLM engine ends it."""
    launch.start_process_group()


@pytest.fixture
def policy(toy, codec):
    from reference import load_policy

    return load_policy(str(toy / "init"), codec)


def enliven(policy, noise=0.0):
    """A policy with larger weights: fresh ones give a flat distribution, in which little can go
    wrong. noise: added to each weight."""
    import torch

    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in policy.hf.model.language_model.named_parameters():
            scale = 10 if "embed_tokens" in name else 3
            p.mul_(scale if p.ndim > 1 else 1).add_(noise * torch.randn_like(p))
    return policy


@pytest.fixture
def lively(policy):
    return enliven(policy)


@pytest.fixture(scope="module")
def saved(toy, codec, tmp_path_factory):
    """A changed policy and the checkpoint it was saved to."""
    import model
    from plumbing import checkpoint

    device = launch.start_process_group()
    policy = enliven(checkpoint.load_policy(str(toy / "init"), codec, device), 0.01)
    out = tmp_path_factory.mktemp("saved")
    optimizer = model.adamw(model.trained_parameters(policy), 0.1, 0.9, device)
    checkpoint.save_run(policy, optimizer, str(out), 1, {"settings": {}})
    return policy.eval(), out / "step_000001"


@pytest.fixture
def album():
    from album import Album

    return Album()


@pytest.fixture(scope="module")
def tasks(toy):
    return data.read_tasks(str(toy / "rl.jsonl"))


@pytest.fixture
def groups(codec, source, tasks):
    """Scripted rollouts of two prompts, four and three of them."""
    from handmade import make_group

    return [make_group(codec, source, tasks[0]), make_group(codec, source, tasks[1])[:3]]


@pytest.fixture(scope="module")
def frames_of(toy):
    """A source that the tests of a file share, so that each frame set is decoded once."""
    import video

    return video.VideoSource(str(toy), video.FrameCache())


@pytest.fixture
def source(toy):
    import video

    return video.VideoSource(str(toy), video.FrameCache())


@pytest.fixture
def plain(toy):
    """The same checkpoint as plain transformers, nothing of model.py in its forward."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32,
                                                         attn_implementation="eager")
    hf.model.visual.requires_grad_(False)
    return hf


@pytest.fixture
def vision(policy, codec, source):
    import model

    return model.VisionFeatures(policy, source.load)


# ------------------------------------------------------------------------------------------------
# JSONL files


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------------------------
# Scripts in this process


@pytest.fixture
def start(monkeypatch, capsys):
    """start(script, *words) -> (exit code, stdout, stderr) of the main() of a script in this
    process, given as its module."""
    def start(script, *words):
        name = script.__name__.rpartition(".")[2]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        capsys.readouterr()
        try:
            launch.run_main(script.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return start


@pytest.fixture(scope="module")
def base(toy):
    """The weights of the random checkpoint."""
    from safetensors.torch import load_file

    return load_file(toy / "init" / "model.safetensors")


@pytest.fixture
def varied_rewards(monkeypatch):
    """A random base earns zero everywhere; this reward depends on what was sampled, so that there
    is something to learn."""
    from handmade import reward

    def score(turns, *_, **__):
        value = sum(map(ord, "".join(turns))) % 7 / 7
        return reward(value, 0.5 * value * value, 0.0)

    monkeypatch.setattr(rewards, "score", score)


@pytest.fixture
def train(monkeypatch, toy, tmp_path):
    """train("grpo" | "sft", *flags) -> run folder, with the reference engine."""
    import reference
    from scripted import LIVE

    import grpo
    import rollout
    import sft

    monkeypatch.setattr(rollout, "make_engine", reference.make_engine)

    def train(script, *flags, out="run", stopped=False):
        given = ("rl.jsonl", *LIVE) if script == "grpo" else ("sft.jsonl", "--batch-size", 4)
        words = [f"{script}.py", "--preset", "toy", "--ckpt", toy / "init", "--out", tmp_path / out,
                 "--video-root", toy, "--data", toy / given[0], *given[1:], *flags]
        monkeypatch.setattr(sys, "argv", [str(w) for w in words])
        with pytest.raises(SystemExit, match="^1$") if stopped else contextlib.nullcontext():
            {"grpo": grpo, "sft": sft}[script].main()
        return tmp_path / out

    return train
