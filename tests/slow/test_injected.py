"""
Tests of what a wrong trainer looks like: python -m pytest tests/slow/test_injected.py -q

Each fault of the table in docs/faults.md is injected, by one line, into a real run of grpo.py of
two steps on a cold-started toy. The table says what happened.
"""
import re
from pathlib import Path

import numpy as np
import pytest
import reference
from conftest import ROOT, run_script
from fixtures import rows_of
from reference import ReferenceEngine
from test_engine import broken

import grpo
import launch
import model
import rewards
import rollout
from plumbing import checkpoint

# ------------------------------------------------------------------------------------------------
# Parts of the trainer alone: the engine, which uses the same code, keeps the right ones


class Fault:
    """replace(owner, name, wrong): wrong(real, *given) in the place of a function, but not while
    the engine samples."""

    def __init__(self, patch):
        self.patch, self.sampling = patch, False
        real_poll = ReferenceEngine.poll

        def poll(engine):
            self.sampling = True
            try:
                return real_poll(engine)
            finally:
                self.sampling = False

        patch.setattr(ReferenceEngine, "poll", poll)

    def replace(self, owner, name, wrong):
        real = getattr(owner, name)

        def function(*given, **named):
            if self.sampling:
                return real(*given, **named)
            return wrong(real, *given, **named)

        self.patch.setattr(owner, name, function)

    def frames(self, change):
        """change(images [T, H, W, 3]) -> those that the trainer sees."""
        self.replace(model.VisionFeatures, "load_images",
                     lambda real, *given: change(real(*given).copy()))

    def positions(self, change):
        """change(positions [3, L]) -> those that the trainer uses."""
        def wrong(real, *given):
            positions, end = real(*given)
            return change(positions.copy()), end

        self.replace(model, "rope_positions", wrong)


def swapped(images):
    images[[0, -1]] = images[[-1, 0]]
    return images


def dark_end(images):
    images[-1] = 0
    return images


def restarted(positions):
    """Positions begin anew in the middle, as after a window."""
    middle = positions.shape[1] // 2
    positions[:, middle:] -= positions[:, middle:].min()
    return positions


def scored(context, ids, compact=None):
    """Tokens that no one sampled, with the mask of sampled ones: the short ones, forced starts."""
    forced = len(ids) < 4
    context.ids += ids
    context.compact += ids if compact is None else compact
    context.mask += [int(forced) for _ in ids]
    context.logps += [0.0 for _ in ids]


def swapped_responses(real, codec, records, windows, *given):
    """The responses of a turn in the wrong order: each call reads another one's."""
    return real(codec, records[::-1], windows[::-1], *given)


def shifted(real, context, ids, logps):
    return real(context, ids, [*logps[1:], logps[0]])


FAULTS = {
    "none": lambda fault: None,
    "frames dark": lambda fault: fault.frames(np.zeros_like),
    "RGB as BGR": lambda fault: fault.frames(lambda images: images[..., ::-1].copy()),
    "frames late by one": lambda fault: fault.frames(lambda images: np.roll(images, 1, 0)),
    "two frames swapped": lambda fault: fault.frames(swapped),
    "last frame dark": lambda fault: fault.frames(dark_end),
    "height and width of M-RoPE lost": lambda fault: fault.positions(
        lambda positions: np.repeat(positions[:1], 3, 0)),
    "positions restart after a window": lambda fault: fault.positions(restarted),
    "trainer at 0.9 times the temperature": lambda fault: fault.replace(
        model.Policy, "forward",
        lambda real, policy, pack, heat=1.0: real(policy, pack, 0.9 * heat)),
    "weights one step old": lambda fault: fault.patch.setattr(
        ReferenceEngine, "wake", lambda *_: None),
    "two layers swapped on the way": lambda fault: fault.patch.setattr(
        ReferenceEngine, "wake", lambda engine, weights: engine.sync(
            broken(weights, "two layers swapped"))),
    "log-probs of the next token": lambda fault: fault.replace(
        rollout.Context, "add_sampled", shifted),
    "a forced prefix that is scored": lambda fault: fault.patch.setattr(
        rollout.Context, "add_masked", scored),
    "a stale prefix cache": lambda fault: fault.patch.setattr(
        "vllm.v1.engine.llm_engine.LLMEngine.reset_prefix_cache", lambda *_: None),
    "adapters not merged": lambda fault: fault.patch.setattr(
        checkpoint, "with_adapters", lambda name, weight, adapters: weight),
    "responses of a turn swapped": lambda fault: fault.replace(
        rollout, "response_context", swapped_responses),
    "advantages of the wrong sign": lambda fault: fault.replace(
        rewards, "group_advantages", lambda real, *given: real(*[
            [-value for value in values] for values in given])),
}


def table():
    """docs/faults.md -> {fault: the step that the gap ends}."""
    page = (Path(ROOT) / "docs" / "faults.md").read_text()
    section = page.partition("## A wrong trainer")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.M))


@pytest.fixture(scope="module")
def cold(toy, tmp_path_factory):
    """A toy that has learned to call."""
    out = tmp_path_factory.mktemp("cold")
    done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "sft.jsonl", "--steps", 150, "--batch-size", 12, "--out", out)
    assert done.returncode == 0, done.stderr
    return out / "last"


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_looks_like(toy, cold, name, monkeypatch, tmp_path, capsys):
    if name != "a stale prefix cache":  # the reference engine has none
        monkeypatch.setattr(rollout, "make_engine", reference.make_engine)
    words = ["grpo.py", "--preset", "toy", "--ckpt", cold, "--data", toy / "rl.jsonl", "--steps", 2,
             "--prompts", 3, "--num-generations", 4, "--frames", 8, "--out", tmp_path]
    if name == "a stale prefix cache":  # the same prompts in both steps, longer than a block
        lines = (toy / "rl.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "three.jsonl").write_text("".join(lines[:3]))
        words += ["--data", tmp_path / "three.jsonl", "--video-root", toy, "--frames", 64]
    if name == "adapters not merged":
        words += ["--lora-rank", 8]
    if name == "responses of a turn swapped":
        words += ["--frames", 16]  # of more scenes the policy asks for several at once
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    FAULTS[name](Fault(monkeypatch))
    try:
        grpo.main()
        rows = rows_of(tmp_path / "log.jsonl")
        seen = "no step"
        if "WARNING" in capsys.readouterr().out:
            seen = "a warning"
        print([(row.get("gap"), row.get("gap_sub")) for row in rows])
    except launch.RunError as error:
        print(error)
        (seen,) = re.match(r"(step \d): gap,", str(error)).groups()
    launch.lock.cache_clear()
    assert seen == table()[name].strip()
    if name == "responses of a turn swapped":  # there were turns with two calls
        rows = [rows_of(path) for path in (tmp_path / "rollouts").iterdir()]
        assert max(len(row["calls"]) for row in sum(rows, [])) > 1
