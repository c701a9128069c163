"""
Oracles of the statistics of evaluation/scores.py, and rarer tables:
python -m pytest tests/slow/test_scores.py -q
"""

import numpy as np
import pytest
from test_scores import command, compared, looked, made, table  # noqa: F401

from evaluation import scores


def record(name, score, video=None, **task):
    return {"task": {"id": name, "video": video or name, "type": "mcq", **task}, "score": score}


# ------------------------------------------------------------------------------------------------
# Intervals and p-values


def worlds(rng, videos, bench=None, effect=0.0, spread=0.3):
    """Paired records of a made-up pair of systems: videos with 1 to 6 items, a common error of the
    items of a video, half of the items in a second part of MLVU, a quarter open."""
    records = []
    for v in range(videos):
        common = rng.normal(0, spread)
        for i in range(rng.integers(1, 7)):
            task = {"tags": {"task": "ab"[i % 2]}, "type": "open" if i % 4 == 3 else "mcq"}
            records.append(record(f"{v}/{i}", effect + common + rng.normal(0, 0.3), v + 1, **task))
    return records


def plain_headline(records, bench):
    """The headline, written out once more."""
    if bench == "mmvu":
        records = [r for r in records if r["task"]["type"] == "mcq"]
    parts = {}
    for r in records:
        parts.setdefault(r["task"]["tags"]["task"] if bench == "mlvu" else "", []).append(r)
    return np.mean([np.mean([r["score"] for r in some]) for some in parts.values()])


@pytest.mark.parametrize("bench", [None, "mlvu", "mmvu"])
@pytest.mark.parametrize("videos, exact", [(7, True), (40, False)])
def test_p_values_are_those_of_scipy(bench, videos, exact):
    """scipy exchanges whole videos of two systems and computes the headlines of both anew."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(3)
    a, effect = worlds(rng, videos, bench), 0.25 if exact else 0.08
    b, both = [{**r, "score": r["score"] + effect + rng.normal(0, 0.4)} for r in a], {0: {}, 1: {}}
    for system, records in enumerate((a, b)):
        for r in records:
            both[system].setdefault(r["task"]["video"], []).append(r)
    lists = [both[system][v + 1] for system in (0, 1) for v in range(videos)]

    def difference(first, second):  # of places in `lists`
        one, two = ([r for n in places for r in lists[int(n)]] for places in (first, second))
        return plain_headline(two, bench) - plain_headline(one, bench)

    places = np.arange(videos), np.arange(videos, 2 * videos)
    found = stats.permutation_test(places, difference, permutation_type="samples", vectorized=False,
        n_resamples=np.inf if exact else 999, random_state=np.random.default_rng(0))
    own, other = ({r["task"]["id"]: r for r in records} for records in (a, b))
    records = scores.paired_differences(own, other)
    assert scores.bootstrap(records, bench)[0] == pytest.approx(found.statistic)
    p = scores.sign_flip_p(records, bench)
    assert 0.01 < p < 0.9
    if exact:
        assert p == pytest.approx(found.pvalue, abs=1e-12)
    else:
        error = 4 * np.sqrt(p * (1 - p) / 999)
        assert p == pytest.approx(found.pvalue, abs=error)
        assert p == scores.sign_flip_p(records, bench)  # the seed is fixed


# ------------------------------------------------------------------------------------------------
# Comparisons


def test_windows_are_judged_over_the_episodes_that_called():
    failed = looked("d", [(10, 20)], status="engine_error")
    records = [looked("a", [(10, 20)]), looked("b", [(15, 25), (90, 120)], score=0.0),
               looked("c", []), failed, looked("e", [(30, 30)], score=0.0)]
    found = scores.summarise(records)["windows"]
    assert found["n"] == 3 and found["recall"] == 0.5 and found["hit"] == pytest.approx(2 / 3)
    assert found["precision"] == pytest.approx((1 + 0.25) / 2)  # an instant has none
    assert found["iou"] == pytest.approx((1 + 0.2) / 3)  # a window is cut at the end of the film
    assert (found["acc_hit"], found["acc_miss"]) == (0.5, 0.0)
    assert found["miou"] == pytest.approx((1 + 0.2) / 4)  # over all that have evidence
    low, high = found["intervals"]["recall"]
    assert 0 <= low < found["recall"] < high <= 1
    text = scores.table([{**scores.summarise(records), "K": 64, "tools": "on"}])
    assert "windows of 3 episodes that called: recall 0.500 [" in text and "at random 0." in text
    assert "windows" not in scores.summarise([looked("a", [])])


def test_the_way_to_an_answer_is_taken_apart_by_hand():
    """One flash, in the seconds 9 and 10. A step counts only after the steps before it."""
    def one(name, score, *calls):
        found = looked(name, [(a, b) for a, b, _ in calls], [(8, 16)], score)
        found["task"]["events"] = [{"start": 9, "end": 11, "colour": "red", "window": (8, 16)}]
        for call, (a, b, text) in zip(found["calls"], calls):
            call.update(summary=text, frames_seen=b - a)
        return found

    there, elsewhere = (8, 16, "8 red"), (16, 24, "16 red")
    records = [one("a", 1.0, there), one("b", 0.0, there), one("c", 1.0, elsewhere), one("d", 0.0),
               one("e", 1.0, elsewhere, (8, 16, "8 blue"))]
    row = {**scores.summarise(records), "K": 4, "tools": "on"}
    # Called 4 of 5, found 3 of 4, told 3 of 3 (one by another window), right 2 of 3.
    wanted = {"called": 0.8, "found": 0.75, "told": 1.0, "right": pytest.approx(2 / 3)}
    assert {name: row["windows"][name] for name in wanted} == wanted
    assert "called 0.800, found 0.750, told 1.000, right 0.667" in scores.table([row])
    compared = scores.compare([("sft", {"results": [row]}, {})])
    head, line = scores.comparison_table(compared).splitlines()[:2]
    assert head.split()[-4:] == [*wanted] and line.split()[-4:] == "0.80 0.75 1.00 0.67".split()
    # One frame of the window, at 12 s, misses the flash. No episode is left for the later steps.
    short, short["calls"][0]["frames_seen"] = one("f", 1.0, there), 1
    row = {**scores.summarise([short]), "K": 4, "tools": "on"}
    assert "called 1.000, found 0.000, told -, right -" in scores.table([row])
    assert "called" not in scores.summarise([looked("a", [(10, 20)])])["windows"]


def test_p_of_pooled_runs_is_that_of_welch(monkeypatch):
    """Two equal methods whose runs lie 4 points apart: one variance for videos, one for the runs of
    each method, and Satterthwaite's degrees of freedom, of another's code."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng, worlds, pairs = np.random.default_rng(5), 40, []
    for _ in range(worlds):
        sides = 0.5 + rng.normal(0, 0.04, (2, 3))[:, :, None] + rng.normal(0, 0.1, (2, 3, 60))
        records = [{**record(f"v{v}", float(np.diff(sides[::-1].mean(1), axis=0)[0, v]), v),
                    "sides": sides[::-1, :, v].tolist()} for v in range(60)]
        gap = sides[0].mean(0) - sides[1].mean(0)
        parts = [(gap.var(ddof=1) / 60, 59), *((side.mean(1).var(ddof=1) / 3, 2) for side in sides)]
        total = sum(v for v, _ in parts)
        freedom = total**2 / sum(v * v / number for v, number in parts)
        welch = 2 * stats.t.sf(abs(gap.mean()) / total**0.5, freedom)
        pairs.append((scores.sign_flip_p(records, None), welch))
    ours, theirs = np.array(pairs).T
    assert np.abs(ours - theirs).max() < 0.05 and np.abs(ours - theirs).mean() < 0.015
    assert (ours < 0.05).mean() <= 0.15
