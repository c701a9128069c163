"""
Tests of plumbing/metrics.py: python -m pytest tests/test_metrics.py -q
"""
import argparse
from math import inf, nan

import pytest

import rewards
import rollout
from plumbing import metrics

# ------------------------------------------------------------------------------------------------
# The numbers of a step


def row(k, acc, executed, group="p", **changes):
    base = {"K": k, "group": f"{group}/{k}", "status": "ok", "type": "mcq", "acc": acc,
            "reward": {"total": acc + 0.5, "acc": acc, "fmt": 0.5, "tool": 0.0, "new": 2 * acc},
            "well_formed": executed > 0, "closure": {t: [0, 0] for t in rewards.KINDS}, "turns": 1,
            "written": executed, "parseable": executed, "executed": executed, "length": 10,
            "f_tau": 0.6, "cut": 0, "sub_tokens": 0, "decode_s": 0.0, "windows": None}
    return {**base, **changes}


def test_summary_by_hand():
    """Two budgets; calling paid at K = 4 and cost at K = 64."""
    def closure(*pairs):
        return dict(zip(rewards.KINDS, pairs, strict=True))

    rows = [row(4, 1.0, 2, closure=closure([2, 1], [2, 2], [2, 1], [1, 1]), written=3, turns=2,
                cut=1),
            row(4, 0.0, 0, closure=closure([1, 1], [0, 0], [0, 0], [1, 0])),
            row(64, 0.5, 1, type="open", sub_tokens=8), row(64, 1.0, 0, type="open")]
    m = metrics.summarise(rows)
    assert m["kappa"] == 0.75 and m["valid_calls"] == 0.75 and m["written_calls"] == 1.0
    assert m["called"] == 0.5
    assert m["acc"] == 0.625 and m["total"] == 1.125 and m["fmt"] == 0.5 and m["f_tau"] == 0.6
    assert m["new"] == 1.25  # a term that only rewards.score knows
    assert m["well_formed"] == 0.5 and m["sub_tokens"] == 2
    assert m["closure"] == closure(pytest.approx(2 / 3), 1.0, 0.5, 0.5)
    assert m["cut_turns"] == pytest.approx(1 / 5) and m["not_ok"] == 0
    assert m["call_minus_skip"] == pytest.approx((1.0 - 0.5) / 2)
    assert m["by_K"]["4"] == {"n": 2, "acc": 0.5, "f_tau": 0.6, "well_formed": 0.5, "kappa": 1.0,
                              "call_minus_skip": 1.0}
    assert m["by_K"]["64"]["call_minus_skip"] == -0.5 and list(m["by_K"]) == ["4", "64"]
    assert m["by_type"]["open"] == m["by_K"]["64"] and m["by_type"]["mcq"] == m["by_K"]["4"]
    # Rollouts that failed have no accuracy, no format and no calls. They are counted, not averaged.
    failed = [row(4, 0.0, 0, status=status, f_tau=0.0, turns=0)
              for status in ("video_error", "engine_error")]
    assert metrics.summarise(rows + failed) == {**m, "not_ok": 2}
    lost = rollout.Episode({"type": "mcq"}, "0/t", 0, 4, 0, "video_error")
    assert metrics.episode_row(lost)["length"] == 0


def test_windows_are_judged_per_budget_over_the_rollouts_that_looked():
    good, poor = (dict(zip(("recall", "precision", "iou", "hit"), numbers))
                  for numbers in ((1.0, 0.5, 0.5, 1.0), (0.0, 0.0, 0.0, 0.0)))
    m = metrics.summarise([row(4, 1.0, 1, windows=good), row(4, 0.0, 1, windows=poor),
                           row(4, 0.0, 0), row(64, 1.0, 2, windows=good), row(8, 0.0, 0)])
    assert [m["by_K"][k].get("window_recall") for k in ("4", "8", "64")] == [0.5, None, 1.0]
    assert (m["by_K"]["4"]["window_precision"], m["by_K"]["4"]["window_iou"]) == (0.25, 0.25)
    assert m["window_hit"] == pytest.approx(2 / 3)
    assert not any(name.startswith("window") for name in metrics.summarise([row(4, 1.0, 1)]))


def test_a_step_line_says_how_many_failed_and_shows_no_number_that_was_not_measured():
    m = {**metrics.summarise([row(4, 0.0, 0, status="video_error")] * 10), "step": 3, "gap": None,
         "grad_norm": None, "zero_variance": 0, "groups": 0, "rollout_s": 1.0, "train_s": 0.0}
    line = metrics.step_line(m, 9, 60.0)
    assert "| not ok 10 |" in line and "R - acc - f_tau - kappa -" in line
    assert "gap - gn - zero 0/0" in line


def test_what_a_call_is_worth_is_measured_within_prompts():
    """An easy prompt where all skipped and a hard one where all called say nothing of calling."""
    rows = [row(8, 1, 0, "easy"), row(8, 1, 0, "easy"), row(8, 0, 1, "hard"), row(8, 0, 2, "hard")]
    assert metrics.call_minus_skip(rows) is None
    both = [row(8, 1.0, 1, "both"), row(8, 0.5, 1, "both"), row(8, 0.25, 0, "both")]
    assert metrics.call_minus_skip(rows + both) == pytest.approx(0.5)
    # A call that was written and then lost is a part of what calling costs.
    lost = row(8, 0.0, 0, "both", closure={**row(8, 0, 0)["closure"], "tool_code": [1, 0]})
    refused = row(8, 0.0, 0, "both", written=1)
    assert metrics.call_minus_skip(rows + both + [lost]) == pytest.approx(0.25)
    assert metrics.call_minus_skip(rows + both + [refused]) == pytest.approx(0.25)


def test_f_tau_is_one_ruler_for_runs_that_are_paid_differently(
        run_grpo, given_rollouts, hard_tasks):
    """Without suffix and anchor the reward is smaller; the compliance that it is reported with is
    not."""
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 1, "--num-generations", 4, "--lr", 0)
    less = ("--no-answer-suffix", "--anchor", 0, "--set", "gamma=0")
    full, plain = (run_grpo(*common, *more, out=n)[1] for n, more in (("a", ()), ("b", less)))
    assert full["f_tau"] == full["fmt"] == plain["f_tau"] and plain["fmt"] < full["fmt"]
    assert 0 < full["well_formed"] == plain["well_formed"] < 1


# ------------------------------------------------------------------------------------------------
# Signs of a dead run


def logged(steps, **changes):
    """Rows of the log of a healthy run, changed: a list gives one value a step."""
    rows = []
    for i in range(steps):
        now = {name: v[i] if isinstance(v, list) else v for name, v in changes.items()}
        kinds = now.pop("kinds", {"list": 0.5 + 0.02 * (i % 3)})
        by_type = {kind: {"n": 8, "acc": acc} for kind, acc in kinds.items()}
        rows.append({"step": i + 1, "f_tau": 0.8 + 0.01 * i, "entropy": 1.0, "cut_turns": 0.02,
                     "acc": 0.5, "not_ok": 0, "groups": 8, "zero_variance": 3,
                     "closure": dict.fromkeys(rewards.KINDS, 0.9), "by_type": by_type, **now})
        rows.append({"step": i + 1, "val": {"acc": 0.5}})  # held-out accuracy, a row of its own
    return rows[:-1]


def test_a_healthy_run_shows_no_sign_of_death():
    for steps in range(1, 12):
        assert metrics.run_warnings(logged(steps)) == {}
    # A type that comes in few steps, a step that failed whole, a tag that nothing opened.
    rare = [{"list": 0.5, "mcq": 0.0} if i == 4 else {"list": 0.5} for i in range(9)]
    closure = {**dict.fromkeys(rewards.KINDS, 0.9), "tool_code": None}
    assert metrics.run_warnings(logged(9, kinds=rare, closure=closure)) == {}
    gone = [0.9] * 8 + [None]
    assert metrics.run_warnings(logged(9, f_tau=gone, entropy=gone, cut_turns=gone,
                                       groups=[8] * 8 + [0], zero_variance=[0] * 9)) == {}


@pytest.mark.parametrize("name, word, changes, since", [
    # A learning rate x 100: all zeros after one update.
    ("f_tau", "--lr", {"f_tau": [0.9] + [0.0] * 8}, 2),
    ("entropy", "--lr", {"entropy": [1.0] * 5 + [0.4] * 4}, 6),
    ("signal", "all rollouts of a prompt earn the same", {"zero_variance": [3] + [8] * 8}, 4),
    # Answers that are always wrong, of one type among two.
    ("type mcq", "type mcq", {"kinds": {"list": 0.5, "mcq": 0.0}}, 3),
    # Tags that never close.
    ("open think", "<think>", {"closure": {**dict.fromkeys(rewards.KINDS, 0.9), "think": 0.1}}, 3),
    # Every video is gone: there is nothing to average.
    ("failed", "skipped tasks", {"not_ok": 64, "groups": 0, "zero_variance": 0, "kinds": {},
                                "f_tau": None, "entropy": None, "cut_turns": None, "acc": None,
                                "closure": dict.fromkeys(rewards.KINDS)}, 3),
    ("cut", "--max-new-tokens", {"cut_turns": [0.1, 0.6] + [0.7] * 7}, 2),
    ("judge", "5 of 8 answers", {"judge_failed": [4] + [5] * 8, "judged": 8}, 2),
], ids=lambda value: value if isinstance(value, str) else "")
def test_each_way_to_die_is_named_from_the_step_on_at_which_it_shows(name, word, changes, since):
    found = [metrics.run_warnings(logged(9, **changes)[:2 * n - 1]) for n in range(1, 10)]
    assert set().union(*found) == {name}  # and nothing else is blamed
    assert next(step for step, signs in enumerate(found, 1) if signs) == since
    assert word in found[since - 1][name]


def test_a_collapsed_run_is_warned_of_once(run_grpo, given_rollouts, hard_tasks, monkeypatch,
                                           capsys):
    """Further signs follow from the first one, and would name other causes."""
    signs = iter([{}, {"f_tau": "fell", "cut": "cut"}, {"cut": "cut", "type list": "wrong"}])
    monkeypatch.setattr(metrics, "run_warnings", lambda _: next(signs))
    run_grpo("--data", hard_tasks, "--steps", 3, "--prompts", 2, "--num-generations", 4)
    printed = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert printed == ["WARNING step 2: fell"]


def test_fewer_held_out_rows_are_no_best_and_more_begin_anew(capsys):
    def is_best(value, best, unread, best_unread, last=None, sign=1):
        state = {"best": best, "best_step": 1, "best_unread": best_unread, "last_unread": last}
        metrics.update_best(state, value, 2, unread, sign)
        return state["best_step"] == 2

    assert is_best(-2.0, -3.0, [], []) and not is_best(-3.0, -3.0, [], [])
    assert is_best(2.0, inf, [], [], sign=-1) and not is_best(4.0, 3.0, [], [], sign=-1)
    assert is_best(-9.0, -inf, [7], None) and is_best(-2.0, -3.0, [7], [7])
    assert not is_best(nan, -inf, [], None) and not capsys.readouterr().out
    # As many rows that are others cannot be compared either.
    for unread, before in (([7], []), ([7], [8]), ([7, 8], [7])):
        assert not is_best(-0.1, -3.0, unread, before)
        assert "no `best`" in capsys.readouterr().out
    assert is_best(-9.0, -3.0, [7], [7, 8]) and "begins anew" in capsys.readouterr().out
    # Twice the same: these have gone for good. A value of no row at all is no best even then.
    assert not any(is_best(-9.0, -3.0, [7], [], last) for last in ([8], []))
    assert is_best(-9.0, -3.0, [7], [], [7]) and "begins anew" in capsys.readouterr().out
    assert not is_best(nan, -3.0, [7], [], [7])


# ------------------------------------------------------------------------------------------------
# The log


def test_the_log_holds_no_step_twice_and_no_torn_line(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1}\nnot json\n{}\n'
                    '{"step": 3}\n{"step": 4, "lo')
    log = metrics.Log(str(tmp_path), 2, argparse.Namespace(track=None))
    log.write({"step": 3, "again": True}, "a line")
    log.began -= 6000  # three steps took so many seconds
    assert log.eta(5, 11) == pytest.approx(12_000, rel=0.1) and len(log.rows) == 4
    log.close(3, 5)
    assert "stopped after step 3 of 5" in capsys.readouterr().out
    assert path.read_text() == ('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1}\n'
                                '{"step": 3, "again": true}\n')
