"""
Tests of plumbing/log.py: python -m pytest tests/test_log.py -q
"""
import argparse
import json
import sys
from types import SimpleNamespace

import pytest
from fixtures import rows_of

import rewards
import rollout
from plumbing import log

# -----------------------------------------------------------------------------
# The numbers of a step


def row(k, acc, executed, group="p", **changes):
    base = {"status": "ok", "group": f"{group}/{k}", "K": k, "type": "mcq", "kappa": executed,
            "written_calls": executed, "called": executed > 0, "acc": acc, "total": acc + 0.5,
            "length": 10}
    return {**base, **changes}


def test_summary_by_hand():
    """Two budgets; calling paid at K = 4 and cost at K = 64."""
    rows = [row(4, 1.0, 2, closed_think=0.5, written_calls=3), row(4, 0.0, 0, closed_think=1.0),
            row(64, 0.5, 1, type="open", windows={"iou": 0.5}), row(64, 1.0, 0, type="open")]
    m = log.summarise(rows)
    assert (m["n"], m["not_ok"], m["kappa"], m["written_calls"]) == (4, 0, 0.75, 1.0)
    assert (m["called"], m["acc"], m["total"], m["length"]) == (0.5, 0.625, 1.125, 10)
    # A mean is over the rollouts that have the number.
    assert m["closed_think"] == 0.75 and m["windows/iou"] == 0.5
    assert m["call_minus_skip"] == pytest.approx((1.0 - 0.5) / 2)
    assert list(m["by_K"]) == [4, 64] and m["by_K"][4]["call_minus_skip"] == 1.0
    assert (m["by_K"][4]["n"], m["by_K"][4]["acc"], m["by_K"][4]["kappa"]) == (2, 0.5, 1.0)
    assert m["by_type"]["open"] == m["by_K"][64] and m["by_type"]["mcq"] == m["by_K"][4]
    # Rollouts that failed have no accuracy, no format and no calls. They are counted, not averaged.
    # A full context is the policy's own failure.
    failed = [row(8, 0.0, 0, status=status) for status in ("video_error", "engine_error")]
    assert log.summarise(rows + failed) == {**m, "not_ok": 2}
    full = log.summarise(rows + [row(8, 0.0, 0, status="context")])
    assert (full["n"], full["not_ok"], full["acc"]) == (5, 1, 0.5)


def test_the_row_of_an_episode(codec, groups):
    called, skipped, unclosed, cut = groups[0]
    first, other = map(log.episode_row, (called, skipped))
    assert first["kappa"] == first["written_calls"] == 1 and first["called"] and not other["called"]
    assert first["length"] == sum(called.context.mask) and first["sub_tokens"] > 0
    assert first["closed_think"] == first["closed_tool_call"] == first["closed_answer"] == 1.0
    assert first["total"] == called.reward["total"] and "judge_failed" not in first
    # One ruler, whatever the run pays for.
    called.reward["fmt"] = 0.1
    paper = rewards.format_reward(called.turns, called.calls, called.think_open)[0]
    assert log.episode_row(called)["f_tau"] == paper > 0.1
    assert log.episode_row(unclosed)["closed_think"] == 0.0  # the forced prefix opened it
    assert (log.episode_row(cut)["cut_turns"], first["cut_turns"]) == (1.0, 0.0)
    assert "closed_answer" not in log.episode_row(cut)  # none was opened
    called.reward["judge"] = "fallback"
    assert log.episode_row(called)["judge_failed"]
    lost = rollout.Episode({"type": "mcq"}, "0/t", 0, 4, 0, "video_error")
    assert "length" not in log.episode_row(lost)


def test_what_a_call_is_worth_is_measured_within_prompts():
    """An easy prompt where all skipped and a hard one where all called say nothing of calling."""
    rows = [row(8, 1, 0, "easy"), row(8, 1, 0, "easy"), row(8, 0, 1, "hard"), row(8, 0, 2, "hard")]
    assert log.call_minus_skip(rows) is None
    both = [row(8, 1.0, 1, "both"), row(8, 0.5, 1, "both"), row(8, 0.25, 0, "both")]
    assert log.call_minus_skip(rows + both) == pytest.approx(0.5)
    # A call that was written and not run is a part of what calling costs.
    refused = row(8, 0.0, 0, "both", written_calls=1)
    assert log.call_minus_skip(rows + both + [refused]) == pytest.approx(0.25)


# -----------------------------------------------------------------------------
# Warnings


def history(steps, **changes):
    """Rows of the log of a healthy run, changed: a list gives one value a step. Beside them a row
    of held-out numbers."""
    rows = [{"step": 0, "val": {"called": 0.9, "gap": 1.0}}]
    for i in range(steps):
        now = {name: v[i] if isinstance(v, list) else v for name, v in changes.items()}
        rows.append({"step": i + 1, "called": 0.8 - 0.02 * i, "gap": 3e-7 * (1 + i % 2),
                     "closed_think": 0.9, "closed_answer": 0.95, **now})
    return rows


@pytest.mark.parametrize("name, changes, since", [
    ("gap", {"gap": [9e-4] * 6 + [1e-2] + [9e-4] * 2}, 7),
    ("calls", {"called": [0.8, 0.8, 0.4, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]}, 6),
    ("think", {"closed_think": [0.9, 0.4, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]}, 4),
    ("tool_call", {"closed_tool_call": 0.2}, 3)])
def test_each_way_to_die_is_named_from_the_step_on_at_which_it_shows(name, changes, since):
    found = [log.signs(history(9, **changes)[:n + 1]) for n in range(1, 10)]
    assert set().union(*found) == {name}  # and nothing else is blamed
    assert next(step for step, signs in enumerate(found, 1) if signs) == since


# -----------------------------------------------------------------------------
# The log


def test_the_log_holds_no_step_twice_and_no_torn_line(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    old = [*({"step": n, "closed_think": 0} for n in (1, 2)), {"step": 2, "val_loss": 1}]
    path.write_text("\n".join(map(json.dumps, old)) + '\n{"step": 3}\n{"step": 4, "lo')
    run = log.Log(str(tmp_path), 2, 5, argparse.Namespace(track=None, lr=1.0))
    run.began -= 600  # the next step ends ten minutes after the start
    new = {"step": 3, "gap": 0.00125, "loss": None, "by_K": {"4": 1}, "closed_think": 0}
    run.write(new, "gap loss acc by_K/4")
    run.close(3)
    assert rows_of(path) == [*old, new] and run.file.closed
    printed = capsys.readouterr().out
    assert "step 0003/0005 | gap 0.00125 | by_K/4 1 | eta 20.0 min" in printed
    assert "WARNING step 3: most <think> tags stay open" in printed
    assert "stopped after step 3; the same command goes on" in printed
    assert json.loads((tmp_path / "args.json").read_text()) == {"track": None, "lr": 1.0}


def test_a_tracker_gets_the_numbers(tmp_path, monkeypatch):
    begun, sent = [], []
    tracker = SimpleNamespace(init=lambda **given: begun.append(given), finish=lambda: None,
                              log=lambda numbers, step: sent.append((step, numbers)))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    run = log.Log(str(tmp_path), 0, 9, argparse.Namespace(track="wandb"))
    run.write({"step": 1, "acc": 0.5, "by_K": {4: {"acc": None, "n": 1}}}, "acc")
    run.close(9)
    assert sent[0] == (1, {"step": 1, "acc": 0.5, "by_K/4/n": 1})
    assert begun == [{"project": "paravt", "name": tmp_path.name, "config": {"track": "wandb"}}]
