"""
Tests of grpo.py as a script: flags, loop, resuming, ranks: python -m pytest tests/test_grpo_run.py
-q. The step itself: test_grpo.py.
"""
import importlib.util
import json
import statistics
import sys

import pytest
import torch
from conftest import run_script
from fixtures import rows_of, write_rows
from handmade import make_group, record_logps
from safetensors.torch import load_file

import grpo
import launch
import rollout
import sft
import video
from plumbing import checkpoint


@pytest.fixture
def run_grpo(train):
    """-> function that runs grpo.main() -> (weights, last row of log.jsonl, run folder)."""
    def run(*flags, out="run"):
        folder = train("grpo", *flags, out=out)
        weights = load_file(folder / "last" / "model.safetensors")
        return weights, rows_of(folder / "log.jsonl")[-1], folder

    return run


# ------------------------------------------------------------------------------------------------
# --rollouts


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
    return write_rows(tmp_path_factory.mktemp("made") / "r.jsonl", [e.to_dict() for e in episodes])


def moved(weights, base):
    """The update as one vector."""
    return torch.cat([(weights[n] - base[n]).flatten() for n in sorted(base)])


@pytest.mark.parametrize("name", ["gap", "gap_sub"])
def test_a_gap_beyond_the_tolerance_stops_the_run(run_grpo, recorded, tmp_path, name):
    """Rollouts of other weights, or windows of other frames: log-probs are off by 0.05 nats."""
    rows = rows_of(recorded)
    for row in rows:
        contexts = [row] if name == "gap" else [call["sub"] for call in row["calls"]]
        for context in contexts:
            context["logps"] = [a + 0.05 * b for a, b in zip(context["logps"], context["mask"])]
    shifted = write_rows(tmp_path / "shifted.jsonl", rows)
    with pytest.raises(launch.RunError, match=f"^step 1: {name}, .* is 0.050 nats, tolerance"):
        run_grpo("--rollouts", shifted)
    assert not (tmp_path / "run" / "last").exists()


def test_recorded_rollouts_of_a_step_give_the_step_again(run_grpo, varied_rewards, base):
    """The JSONL is enough to train on: engine and frames are not needed again."""
    live, m, folder = run_grpo("--steps", 1, out="live")
    assert m["signal_groups"] == 2 and m["gap"] < 1e-4 and m["grad_norm"] > 0
    again, n, _ = run_grpo("--rollouts", *sorted((folder / "rollouts").iterdir()), out="again")
    assert moved(live, base).abs().max() > 1e-4
    assert (moved(live, base) - moved(again, base)).abs().max() < 1e-6
    assert (n["grad_norm"], n["tokens"]) == (pytest.approx(m["grad_norm"], rel=1e-5), m["tokens"])
    assert n["total"] == pytest.approx(m["total"]) and n["by_K"] == m["by_K"]


@pytest.mark.process
def test_one_rank_and_two_make_the_same_update(toy, recorded, base, tmp_path):
    """Three groups on two ranks: unequal packs, unequal token counts, one spare pack, one global
    normaliser. Two ranks hold FSDP2's shards; the KL is the default one."""
    logs, found = [], []
    for ranks in (1, 2):
        out = tmp_path / f"ranks{ranks}"
        done = run_script("grpo.py", "--preset", "toy", "--ckpt", toy / "init", "--rollouts",
                          recorded, "--video-root", toy, "--out", out, "--beta", 0.01,
                          "--dp-replicate", 1, "--pack-tokens", 600, ranks=ranks)
        assert done.returncode == 0, done.stderr
        logs.append(json.loads((out / "log.jsonl").read_text()))
        found.append(load_file(out / "last" / "model.safetensors"))
    a, b = logs
    one, two = (moved(weights, base) for weights in found)
    # Adam's first step is lr * sign(g) for all but tiny g: rounding shows up magnified.
    assert (one - two).norm() < 2e-3 * one.norm()
    for key in ("grad_norm", "tokens", "total", "loss", "gap", "entropy", "kappa", "kl"):
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), key
    assert a["tokens"] > 50 and a["grad_norm"] > 0 and b["gap_sub"] < 1e-4


# ------------------------------------------------------------------------------------------------
# Real rollouts, by the reference engine


def read_rollouts(folder):
    names = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for name in names for line in name.read_text().splitlines()]


def test_held_out_accuracy_is_logged_per_k_and_type_and_changes_no_weight(
        run_grpo, toy, monkeypatch, varied_rewards, capsys, tmp_path):
    """Two steps with --val and without: the same samples and weights to the bit. The numbers are of
    the episodes of rollout.run, and `best` links to the best of them."""
    rows = rows_of(toy / "rl.jsonl")
    (tmp_path / "held").mkdir()
    for row, kind in zip(rows, ("open", "mcq")):
        row.update(type=kind, answer="A", options=["a", "b"] if kind == "mcq" else None,
                   video=str((toy / row["video"]).relative_to(toy)))
    held, rows[2]["video"] = tmp_path / "held" / "val.jsonl", "gone.mp4"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    monkeypatch.setattr(video, "MISSING_SHARE", 0.34)
    plain, _, folder = run_grpo("--steps", 2, out="plain")

    weights, _, other = run_grpo("--steps", 2, "--val", held, "--save-every", 1, out="held")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    ids = [[row["ids"] for row in read_rollouts(run)] for run in (folder, other)]
    assert ids[0] == ids[1]
    log = rows_of(other / "log.jsonl")
    values = {row["step"]: row["val"] for row in log if "val" in row}
    assert sorted(values) == [0, 1, 2] and [row["step"] for row in log] == [0, 1, 1, 2, 2]
    for val in values.values():
        assert (val["n"], val["not_ok"]) == (2, 1)
        assert {kind: cell["n"] for kind, cell in val["by_type"].items()} == {"open": 1, "mcq": 1}
        assert sum(cell["n"] for cell in val["by_K"].values()) == 2
        mean = statistics.mean(cell["acc"] for cell in val["by_type"].values())
        assert val["acc"] == pytest.approx(mean)
    best = max((1, 2), key=lambda step: (values[step]["acc"], -step))
    assert (other / "best").resolve().name == f"step_{best:06d}"
    assert f"val/acc {values[2]['acc']:.4g} | val/not_ok" in capsys.readouterr().out


@pytest.mark.process  # not in one of its own, but three runs
def test_a_resumed_run_samples_and_learns_what_the_straight_one_does(run_grpo, varied_rewards):
    """2 steps, resume to 4, against 4 steps: the same tasks, K, seeds (the same ids), and
    weights."""
    flags = ("--frames", "gated")
    straight, m, folder = run_grpo(*flags, "--steps", 4, "--save-every", 3, out="straight")
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000003", "step_000004"]
    _, _, other = run_grpo(*flags, "--steps", 2, out="parts")
    stale = other / "rollouts" / "step_000002.rank7.jsonl"  # of more ranks, before a kill
    stale.write_text("{}")
    parts, n, other = run_grpo(*flags, "--steps", 4, "--resume", out="parts")
    assert not stale.exists()
    a, b = read_rollouts(folder), read_rollouts(other)
    for key in ("task", "K", "group", "sample", "policy_step", "ids"):
        assert [r[key] for r in a] == [r[key] for r in b]
    assert len(a) == 24 and len({r["group"] for r in a}) == 8
    # two straight runs differ by 4e-6
    assert max((straight[w] - parts[w]).abs().max().item() for w in straight) < 2e-5
    log = (other / "log.jsonl").read_text()
    assert [json.loads(x)["step"] for x in log.splitlines()] == [1, 2, 3, 4]
    assert n["grad_norm"] == pytest.approx(m["grad_norm"], rel=1e-3)


# ------------------------------------------------------------------------------------------------
# Flags


def parse(monkeypatch, *flags, stage=grpo):
    monkeypatch.setattr(sys, "argv", ["a.py", "--ckpt", "c", *map(str, flags)])
    monkeypatch.setattr(checkpoint, "adapter_rank", lambda ckpt, rank: rank)
    return vars(stage.parse_args())


def test_vanilla_sets_exactly_its_flags_and_explicit_flags_win(monkeypatch):
    default, vanilla = parse(monkeypatch), parse(monkeypatch, "--vanilla")
    changed = {k: v for k, v in vanilla.items() if v != default[k]}
    assert changed == {"vanilla": True, "think_prefix": False, "answer_suffix": False,
                       "format_credit": "sequence", "anchor": 0.0, "frames": 64}
    mixed = parse(monkeypatch, "--vanilla", "--think-prefix", "--frames", "gated", "--anchor", 0.5,
                  "--format-credit", "none")
    assert (mixed["think_prefix"], mixed["frames"]) == (True, "gated")
    assert (mixed["anchor"], mixed["format_credit"]) == (0.5, "none")
    assert parse(monkeypatch, "--lora-rank", 4)["lr"] == pytest.approx(10 * default["lr"])
    assert parse(monkeypatch, "--lora-rank", 4, stage=sft)["lr"] == 1e-4
    assert mixed["tool_reward"] == 1.0  # every released recipe pays for calls


@pytest.mark.parametrize("flags,word", [
    (("--num-generations", 1), "--num-generations"), (("--rollouts", "none.jsonl"), "none.jsonl"),
    (("--val", "gone.jsonl"), "gone.jsonl"), (("--frames", "many"), "--frames"),
    (("--ckpt", "nowhere"), "nowhere"), (("--data", "gone.jsonl"), "gone.jsonl")],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "")
def test_bad_values_and_missing_files_are_one_line(monkeypatch, start, toy, tmp_path, flags, word):
    """Told before any model is loaded, with exit code 2, naming the flag or the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "load_policy",
                        lambda *_: pytest.fail("a model was loaded before the flags were checked"))
    code, _, err = start(grpo, "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--out",
                         tmp_path / "o", *flags)
    lines = err.strip().splitlines()
    assert code == 2 and word in lines[-1]
    assert len(lines) == 1 or lines[0].startswith("usage:")


# ------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.process
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_two_ranks_with_vllm_end_to_end(toy, tmp_path):
    """What the README shows first: torchrun, two engines, two steps, weights synced between them, a
    checkpoint that opens."""
    done = run_script("grpo.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "rl.jsonl", "--out", tmp_path / "out", "--steps", 2, "--prompts", 2,
                      "--num-generations", 2, "--max-new-tokens", 12, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    log = rows_of(tmp_path / "out" / "log.jsonl")
    assert [m["step"] for m in log] == [1, 2] and all(m["n"] == 4 for m in log)
    rows = read_rollouts(tmp_path / "out")
    assert len(rows) == 8 and len(list((tmp_path / "out" / "rollouts").iterdir())) == 4
    assert all(len(r["ids"]) == len(r["mask"]) == len(r["logps"]) and any(r["mask"]) for r in rows)
