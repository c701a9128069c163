"""
Tests of tools/replay.py, and with it of the update of grpo.py as flags set it: python -m pytest
tests/test_replay.py -q
"""
import json
import os
import shutil

import pytest
import torch
from conftest import run_script
from fixtures import rows_of, write_rows
from handmade import colourful, make_group, record_logps
from safetensors.torch import load_file

import grpo
import launch
import rewards
import rollout
import video
from tools import replay


@pytest.fixture(scope="module")
def tasks(toy):
    return colourful(toy)


@pytest.fixture(scope="module")
def recorded(toy, codec, tasks, tmp_path_factory):
    """A rollout JSONL of three hand-made groups with the base checkpoint's own log-probs at
    temperature 1."""
    from transformers import Qwen3VLForConditionalGeneration

    source = rollout.VideoSource(str(toy), video.FrameCache())
    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32)
    episodes = [e for task, k in zip(tasks[:3], (4, 8, 4))
                for e in make_group(codec, source, task, frames=k)]
    record_logps(hf, codec, source, episodes)
    rows = [{**e.to_dict(), "fingerprint": [os.path.getsize(toy / e.task["video"]), 0]}
            for e in episodes]
    return write_rows(tmp_path_factory.mktemp("made") / "r.jsonl", rows)


def moved(weights, base):
    """The update as one vector."""
    return torch.cat([(weights[n] - base[n]).flatten() for n in sorted(base)])


def same_update(a, b, base, tolerance=2e-3):
    """Adam's first step is lr * sign(g) for all but tiny g, so rounding shows up magnified where
    the gradient vanishes."""
    return (moved(a, base) - moved(b, base)).norm() < tolerance * moved(a, base).norm()


@pytest.mark.parametrize("flag", [
    ("--beta", 5.0, "--set", "minibatches=2", "--lr", 1e-2), ("--set", "max_grad_norm=1e-3"),
    ("--format-credit", "none"), ("--set", "minibatches=2"), ("--temperature", 0.5), ("--lr", 1e-4),
    ("--set", "clip_eps=1e-4", "--set", "minibatches=2"), ("--format-credit", "sequence")],
                         ids=lambda f: " ".join(map(str, f)))
def test_every_flag_of_the_update_changes_the_update(run_grpo, any_gap, recorded, base, flag):
    """A knob that does nothing, quietly, is the worst kind; one run with it against one without."""
    loose = ("--rollouts", recorded, "--set", "max_grad_norm=0")
    # the flag alone makes the difference, not what it needs to act
    a, _, _ = run_grpo(*loose, *flag[2:] * (len(flag) > 3), out="a")
    b, _, _ = run_grpo(*loose, *flag, out="b")
    assert not torch.equal(moved(a, base), torch.zeros_like(moved(a, base)))
    assert not same_update(a, b, base)


def test_a_recorded_gap_beyond_the_tolerance_stops_the_run(run_grpo, recorded, tmp_path):
    """Rollouts of other weights: every log-prob is off by 0.15 nats."""
    rows = rows_of(recorded)
    for r in rows:
        r["logps"] = [lp + 0.15 * m for lp, m in zip(r["logps"], r["mask"])]
    shifted = write_rows(tmp_path / "shifted.jsonl", rows)
    with pytest.raises(launch.RunError,
                       match="between engine and trainer is 0.150 nats, tolerance 0.1"):
        run_grpo("--rollouts", shifted)
    assert not (tmp_path / "run" / "last").exists()
    assert grpo.gap_tolerance(torch.float32) == 1e-3  # with an engine in the same precision


def test_rollouts_of_which_no_video_can_be_read_are_no_update(run_grpo, any_gap, recorded, toy,
                                                              tmp_path):
    """Else the command would say from then on that the update is done. One film may be another."""
    shutil.copytree(toy / "videos", tmp_path / "world" / "videos")
    films = sorted({json.loads(line)["task"]["video"] for line in recorded.open()})
    flags = ("--rollouts", recorded, "--video-root", tmp_path / "world")
    os.rename(tmp_path / "world" / "videos", tmp_path / "away")
    with pytest.raises(launch.UserError, match="3 of 3 videos are not below"):
        run_grpo(*flags)
    with pytest.raises(launch.RunError, match="^--rollouts: no video can be read; is the disk"):
        run_grpo(*flags, "--missing-videos", 1)
    assert not (tmp_path / "run" / "last").exists()
    os.rename(tmp_path / "away", tmp_path / "world" / "videos")
    os.truncate(tmp_path / "world" / films[0], 99_999)  # another film of the same length
    _, m, _ = run_grpo(*flags)
    assert 0 < m["groups"] < 3 and m["not_ok"] and not m["skipped_update"]


def test_a_short_outage_costs_no_group(run_grpo, any_gap, recorded, monkeypatch):
    """The disk is back before all groups are read: those that failed are read again."""
    real, reads = replay.read_fault, []

    def read_fault(group, *more):
        reads.append(group)
        return "gone" if len(reads) == 2 else real(group, *more)

    monkeypatch.setattr(replay, "read_fault", read_fault)
    _, m, _ = run_grpo("--rollouts", recorded)
    assert m["groups"] == 3 and not m["not_ok"] and len(reads) == 4


def test_a_replay_is_scored_anew_by_what_its_own_run_pays_for(codec, source, tasks, tmp_path):
    """The recorded reward was composed under the weights of the run that recorded it."""
    group = make_group(codec, source, tasks[0])
    for e in group:
        e.reward = {"total": 99.0, "paid_task": 99.0, "paid_fmt": 0.0}
    path = write_rows(tmp_path / "r.jsonl", [e.to_dict() for e in group])
    for pay in (rewards.RewardConfig(), rewards.RewardConfig(tool_weight=0.0, format_weight=2.0)):
        for e, again in zip(group, replay.read_rollouts([path], pay)):
            assert again.reward == rewards.score(e.turns, e.task, e.calls, True, pay)


def test_recorded_rollouts_of_a_step_give_the_step_again(run_grpo, toy, varied_rewards, base,
                                                         capsys):
    """The JSONL is enough to train on: engine, frames and rewards are not needed again."""
    live, m, folder = run_grpo("--data", toy / "rl.jsonl", "--steps", 1, "--frames", 4, "--prompts",
                               2, "--num-generations", 3, "--max-new-tokens", 10, out="live")
    assert m["skipped_update"] == 0 and m["gap"] < 1e-4 and m["grad_norm"] > 0
    files = sorted((folder / "rollouts").iterdir())
    capsys.readouterr()
    (again, n, _), printed = run_grpo("--rollouts", *files, out="again"), capsys.readouterr().out
    assert "one update from the rollouts of 1 files |" in printed and "engine" not in printed
    assert moved(live, base).abs().max() > 1e-4
    assert (moved(live, base) - moved(again, base)).abs().max() < 1e-6
    assert (n["grad_norm"], n["tokens"]) == (pytest.approx(m["grad_norm"], rel=1e-5), m["tokens"])
    assert n["total"] == pytest.approx(m["total"]) and n["by_K"] == m["by_K"]


@pytest.mark.parametrize("word", ["spans", "reward", "vision"])
def test_a_damaged_rollout_file_is_one_line(start, toy, recorded, tmp_path, word):
    rows = rows_of(recorded)
    rows[2].pop(word)
    path = write_rows(tmp_path / "damaged.jsonl", rows)
    code, _, err = start(replay, "--ckpt", toy / "init", "--rollouts", path, "--out", tmp_path)
    assert code == 2 and err == f"replay.py: {path}:3: missing '{word}'\n"


@pytest.mark.process
def test_one_rank_and_two_make_the_same_update(toy, recorded, base, tmp_path):
    """Three groups on two ranks: unequal packs, unequal token counts, one spare pack, one global
    normaliser."""
    logs, found = [], []
    for ranks in (1, 2):
        out = tmp_path / f"ranks{ranks}"
        done = run_script("tools/replay.py", "--preset", "toy", "--ckpt", toy / "init",
                          "--rollouts", recorded, "--video-root", toy, "--out", out, "--beta", 0.01,
                          "--pack-tokens", 600, "--set", "max_grad_norm=0", ranks=ranks)
        assert done.returncode == 0, done.stderr
        logs.append(json.loads((out / "log.jsonl").read_text()))
        found.append(load_file(out / "last" / "model.safetensors"))
    a, b = logs
    assert same_update(*found, base)
    for key in ("grad_norm", "tokens", "total", "entropy", "gap_max", "groups", "packed_tokens",
                "kappa"):
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), key
    assert a["tokens"] > 50 and a["grad_norm"] > 0
