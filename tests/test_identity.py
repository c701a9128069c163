"""
Tests of identity: python -m pytest tests/test_identity.py -q

Everything that is read and is no flag is changed between two starts of the same command. Each start
then says so in a line, or ends with exit code 2 and one line. Then ids, films that are replaced
while they are read, records that no rollout.py wrote, and weights that are no numbers.
"""
import shutil
import sys

import pytest
from fixtures import rows_of, write_rows
from reference import make_engine
from safetensors.torch import load_file, save_file
from scripted import ANSWER, Scripted, Server

import eval as evaluation
import grpo
import launch
import rollout
import sft
from plumbing import data
from tools import pick

SCRIPTS = {m.__name__.split(".")[-1]: m for m in (sft, grpo, rollout, evaluation, pick)}
SAID = {"id": "said", "video": "videos/rl-0000.mp4", "question": "Which?", "answer": "crimson",
        "options": None, "type": "open", "subtitles": "said.srt"}
SRT = "1\n00:00:00,000 --> 00:01:00,000\nRed it is\n"


@pytest.fixture
def start(start, monkeypatch, codec):
    """start(name, *flags) -> (exit code, what it printed). vLLM is the reference engine, or the
    scripted one in eval.py."""
    def engine(ckpt, codec_, args, *more, **named):
        if sys.argv[0].startswith("eval"):
            return Scripted(codec, [ANSWER], at_once=True)
        return make_engine(ckpt, codec_, args)

    monkeypatch.setattr(rollout, "make_engine", engine)
    def by_name(name, *flags):
        code, out, err = start(SCRIPTS[name], *flags)
        assert code == 0 or len(err.splitlines()) == 1, err
        return code, out + err

    return by_name


# ------------------------------------------------------------------------------------------------
# Changed between two starts


def flags_of(script, world):
    """The command of a stage in a world."""
    common = ("--preset", "toy", "--ckpt", world / "run", "--out", world / script)
    rl = ("--data", world / "rl.jsonl", "--frames", 4)
    return {
        "sft": (*common, "--data", world / "sft.jsonl", "--val", world / "val.jsonl",
                "--batch-size", 2, "--steps", 1),
        "grpo": (*common, *rl, "--val", world / "held.jsonl", "--steps", 1, "--prompts", 2,
                 "--num-generations", 2, "--max-new-tokens", 4),
        "rollout": (*common[:4], *rl, "--max-new-tokens", 4, "--out", world / "rollout.jsonl"),
        "eval": (*common, *rl)}[script]


def judge_flags(server):
    return ("--judge-url", server.url, "--judge-model", "m")


@pytest.fixture
def server():
    with Server("no") as server:
        yield server


@pytest.fixture(scope="module")
def world(toy, tmp_path_factory):
    """Folder of all that the stages read: small files, and a run folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("identity") / "world"
    shutil.copytree(toy / "videos", folder / "videos")
    step = folder / "run" / "step_000001"
    shutil.copytree(toy / "init", step)
    (folder / "run" / "last").symlink_to(step.name)
    short = [r for r in rows_of(toy / "sft.jsonl") if r["id"].endswith("-4") or "-sub-" in r["id"]]
    write_rows(folder / "sft.jsonl", short[:5])
    write_rows(folder / "val.jsonl", short[5:7])
    tasks = rows_of(toy / "rl.jsonl")
    write_rows(folder / "rl.jsonl", [SAID, *tasks[:3]])
    write_rows(folder / "held.jsonl", tasks[3:4])
    (folder / "said.srt").write_text(SRT)
    (folder / "prompt.txt").write_text("Look, then answer between <answer> and </answer>.")
    return folder


def newer(world):
    """The run behind --ckpt has saved again."""
    step = shutil.copytree(world / "run" / "step_000001", world / "run" / "step_000002")
    weights = {k: w + 0.01 for k, w in load_file(step / "model.safetensors").items()}
    save_file(weights, step / "model.safetensors", {"format": "pt"})
    (world / "run" / "last").unlink()
    (world / "run" / "last").symlink_to(step.name)


@pytest.fixture
def ended(world, start, server, tmp_path):
    """ended(stage) -> a copy of the world in which the stage has ended, and its flags there."""
    def ended(stage):
        copied = shutil.copytree(world, tmp_path / "world", symlinks=True)
        judge = judge_flags(server) if stage != "sft" else ()
        flags = (*flags_of(stage, copied), *judge)
        code, said = start(stage, *flags)
        assert code == 0, said
        return copied, flags

    return ended


@pytest.mark.process  # two runs
@pytest.mark.parametrize("stage", ["sft", "grpo", "rollout", "eval"])
def test_a_second_start_of_an_unchanged_world_goes_on(ended, start, stage):
    _, flags = ended(stage)
    code, said = start(stage, *flags)
    assert code == 0, said
    assert ("nothing to do" in said) == (stage != "eval")


def test_another_checkpoint_below_ckpt_is_named(ended, start):
    world, flags = ended("grpo")
    newer(world)
    code, said = start("grpo", *flags)
    assert code == 2 and "run/step_000002" in said and "run/step_000001" in said
    assert "--resume" in said


# ------------------------------------------------------------------------------------------------
# Ids


def task(name, **more):
    return {"id": name, "video": "videos/rl-0000.mp4", "question": "Which?", "options": None,
            "answer": "0 red", "type": "list", **more}


def test_ids_are_counted_as_strings(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [task(7), task("a"), task("7")])
    with pytest.raises(launch.UserError, match="t.jsonl:3: .* not unique: 7 is there twice"):
        data.read_tasks(str(path))
