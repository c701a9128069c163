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
from fixtures import rows_of
from handmade import colourful

import grpo
import launch
import rollout
from plumbing import checkpoint


@pytest.fixture(scope="module")
def tasks(toy):
    return colourful(toy)


# ------------------------------------------------------------------------------------------------
# Given rollouts


@pytest.mark.process  # seven runs
def test_every_flag_of_the_reward_changes_its_term(run_grpo, given_rollouts, hard_tasks):
    """Values by hand: sample 1 has a whole thought and answer, sample 2 never closes its thought,
    sample 0 called and answered."""
    def rewards_of(out, *flags):
        _, _, folder = run_grpo("--data", hard_tasks, "--steps", 1, "--prompts", 1, "--lr", 0,
                                "--num-generations", 4, *flags, out=out)
        return [row["reward"] for row in rows_of(folder / "rollouts" / "step_000000.rank0.jsonl")]

    plain = rewards_of("plain")
    for n, (flags, term, sample, change) in enumerate([
            (("--no-answer-suffix",), "fmt", 2, -0.2), (("--anchor", 0), "fmt", 1, -0.2),
            (("--set", "gamma=0"), "fmt", 2, 0.15), (("--tool-reward", 0), "total", 0, -0.8),
            (("--set", "format_weight=0.5"), "total", 1, -0.5),
            (("--set", "call_cost=0.25"), "total", 0, -0.25)]):
        other = rewards_of(f"run{n}", *flags)
        assert other[sample][term] - plain[sample][term] == pytest.approx(change), flags


def test_a_step_of_broken_videos_only_is_logged_and_changes_nothing(
        run_grpo, given_rollouts, monkeypatch, hard_tasks, base):
    """Nothing was sampled: no group, no update, no crash. Unless it is the last step: a run that
    ends so is not done."""
    given = rollout.run

    def broken(sampler, batch, frames, group, step, pump=None, done=()):
        if step != at:
            yield from given(sampler, batch, frames, group, step, pump)
            return
        for task in batch:
            e = rollout.Episode(task, f"{step}/{task['id']}", 0, 4, step, "video_error", "gone")
            e.reward = rollout.compute_reward(e, sampler.pay)
            yield e

    monkeypatch.setattr(rollout, "run", broken)
    ahead, at = [], 0
    monkeypatch.setattr(grpo, "prefetch_overviews", lambda p, t, step, *_: ahead.append(step))
    flags = ("--data", hard_tasks, "--steps", 2, "--prompts", 2, "--num-generations", 2, "--lr", 0)
    weights, _, folder = run_grpo(*flags)
    m = json.loads((folder / "log.jsonl").read_text().splitlines()[0])
    assert (m["not_ok"], m["groups"], m["skipped_update"], m["tokens"]) == (2, 0, 1, 0)
    assert ahead == [1]  # frames of the next step, while this one is sampled
    assert all(torch.equal(weights[n], base[n]) for n in base)
    at = 1
    with pytest.raises(launch.RunError, match="^step 2: videos could not be read for 1 step"):
        run_grpo(*flags, out="last")


# ------------------------------------------------------------------------------------------------
# Real rollouts, by the reference engine


LIVE = ("--prompts", 2, "--num-generations", 3, "--max-new-tokens", 10)


def read_rollouts(folder):
    names = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for name in names for line in name.read_text().splitlines()]


def test_held_out_accuracy_is_logged_per_k_and_type_and_changes_no_weight(
        run_grpo, toy, monkeypatch, varied_rewards, capsys, tmp_path):
    """Two steps with --val and without: the same samples and weights to the bit. The rows are the
    episodes of rollout.run with tools and without, and `best` links to the best of them."""
    rows = rows_of(toy / "rl.jsonl")
    (tmp_path / "held").mkdir()
    for row, kind in zip(rows, ("open", "mcq")):
        row.update(type=kind, answer="A", options=["a", "b"] if kind == "mcq" else None,
                   video=str((toy / row["video"]).relative_to(toy)))
    held, rows[2]["video"] = tmp_path / "held" / "val.jsonl", "gone.mp4"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    flags = ("--data", toy / "rl.jsonl", "--steps", 2, "--missing-videos", 0.34, *LIVE)
    plain, _, folder = run_grpo(*flags, out="plain")

    tools, real_run = [], rollout.run
    monkeypatch.setattr(rollout, "run", lambda sampler, mine, *given, **named: tools.append(
        (sampler.agent.tools, len(mine), *given[1:])) or real_run(sampler, mine, *given, **named))
    weights, _, other = run_grpo(*flags, "--val", held, "--eval-every", 1, out="held")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    ids = [[row["ids"] for row in read_rollouts(run)] for run in (folder, other)]
    assert ids[0] == ids[1]
    # Before the first step and after each: without tools and with, one rollout, seeds of step 0.
    both = [(False, 3, 1, 0), (True, 3, 1, 0)]
    assert tools == both + [(True, 2, 3, 0)] + both + [(True, 2, 3, 1)] + both

    log = rows_of(other / "log.jsonl")
    values = {row["step"]: row["val"] for row in log if "val" in row}
    assert sorted(values) == [0, 1, 2] and [row["step"] for row in log] == [0, 1, 1, 2, 2]
    for val in values.values():
        assert (val["n"], val["not_ok"]) == (2, 2)
        assert {kind: cell["n"] for kind, cell in val["by_type"].items()} == {"open": 1, "mcq": 1}
        assert sum(cell["n"] for cell in val["by_K"].values()) == 2
        mean = statistics.mean(cell["acc"] for cell in val["by_type"].values())
        assert val["acc"] == pytest.approx(mean) and val["acc_without_tools"] is not None
    best = max((1, 2), key=lambda step: (values[step]["acc"], -step))
    assert (other / "best").resolve().name == f"step_{best:06d}"
    printed = capsys.readouterr().out
    assert f"step 0002 | held-out acc {values[2]['acc']:.2f} no tools" in printed
    assert "| not ok 2" in printed and f"held-out task {rows[2]['id']}: " in printed


@pytest.mark.process  # not in one of its own, but three runs
def test_a_resumed_run_samples_and_learns_what_the_straight_one_does(run_grpo, toy, varied_rewards):
    """2 steps, resume to 4, against 4 steps: the same tasks, K, seeds (the same ids), and
    weights."""
    flags = ("--data", toy / "rl.jsonl", *LIVE, "--frames", "gated")
    straight, m, folder = run_grpo(*flags, "--steps", 4, "--save-every", 3, out="straight")
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000003", "step_000004"]
    run_grpo(*flags, "--steps", 2, out="parts")
    parts, n, other = run_grpo(*flags, "--steps", 4, "--resume", out="parts")
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


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--ckpt", "c", "--data", "d", *map(str, flags)])
    return vars(grpo.parse_args())


def test_vanilla_sets_exactly_its_flags_and_explicit_flags_win(monkeypatch):
    default, vanilla = parse(monkeypatch), parse(monkeypatch, "--vanilla")
    changed = {k: v for k, v in vanilla.items() if v != default[k]}
    assert changed == {"vanilla": True, "think_prefix": False, "answer_suffix": False,
                       "format_credit": "sequence", "anchor": 0.0, "gamma": 0.0, "frames": 64}
    mixed = parse(monkeypatch, "--vanilla", "--think-prefix", "--frames", "gated", "--anchor", 0.5,
                  "--format-credit", "none")
    assert (mixed["think_prefix"], mixed["frames"]) == (True, "gated")
    assert (mixed["anchor"], mixed["format_credit"]) == (0.5, "none")
    assert mixed["tool_weight"] == 1.0  # every released recipe pays for calls


def test_defaults_are_the_recipe_and_the_toy_preset_yields_to_flags(monkeypatch):
    p = parse(monkeypatch)
    wanted = dict(num_generations=8, clip_eps=0.2, beta=0.01, lr=2e-6, max_grad_norm=1.0,
                  temperature=0.7, max_new_tokens=2048, max_model_len=32768, max_turns=3,
                  max_parallel=5, format_weight=1.0, anchor=0.5, gamma=0.3, frames="gated",
                  minibatches=1, dp_replicate=1, sub_max_new_tokens=512, sub_frames=16, sub_fps=1.0,
                  format_credit="struct", think_prefix=True, answer_suffix=True)
    assert {k: p[k] for k in wanted} == wanted
    assert parse(monkeypatch, "--preset", "toy", "--lr", 1)["lr"] == 1
    assert parse(monkeypatch, "--preset", "toy")["max_model_len"] == 1024


@pytest.mark.parametrize("flags,word", [
    (("--num-generations", 1), "num_generations must be at least 2"), (("--beta", -1), "beta must"),
    (("--set", "format_weight=inf"), "format_weight"), (("--rollouts", "none.jsonl"), "--rollouts"),
    (("--format-credit", "some"), "--format-credit"), (("--set", "minibatches=0"), "minibatches"),
    (("--save-every", -1), "save_every must"), (("--temperature", 0), "--temperature"),
    (("--val", "gone.jsonl"), "gone.jsonl"), (("--anchor", "nan"), "anchor must"),
    (("--prompts", 0), "prompts must"), (("--frames", "many"), "--frames"),
    (("--ckpt", "nowhere"), "nowhere"), (("--preset", "huge"), "--preset"),
    (("--set", "gamma=nan"), "gamma")],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "")
def test_bad_values_and_missing_files_are_one_line(monkeypatch, start, toy, tmp_path, flags, word):
    """Told before any model is loaded, with exit code 2, naming the flag or the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "load_sharded",
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
                      "--num-generations", 2, "--max-new-tokens", 12, "--set", "max_num_seqs=8",
                      ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    log = rows_of(tmp_path / "out" / "log.jsonl")
    assert [m["step"] for m in log] == [1, 2] and all(m["groups"] == 2 for m in log)
    assert all(0 < m["decode_s"] < m["rollout_s"] for m in log)
    rows = read_rollouts(tmp_path / "out")
    assert len(rows) == 8 and len(list((tmp_path / "out" / "rollouts").iterdir())) == 4
    assert all(len(r["ids"]) == len(r["mask"]) == len(r["logps"]) and any(r["mask"]) for r in rows)
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    hf, loading = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "out" / "last", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert AutoProcessor.from_pretrained(tmp_path / "out" / "last").chat_template
    assert hf.config.model_type == "qwen3_vl"
