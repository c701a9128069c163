"""
Oracles of the statistics of evaluation/scores.py, and rarer tables:
python -m pytest tests/all/test_scores_rest.py -q
"""
from dataclasses import replace

import numpy as np
import pytest
from test_scores import command, compared, made, table  # noqa: F401

from evaluation import benchmarks, scores, windows


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
    a = worlds(rng, videos, bench)
    effect = 0.25 if exact else 0.08
    b = [{**r, "score": r["score"] + effect + rng.normal(0, 0.4)} for r in a]
    both = {0: {}, 1: {}}
    for system, records in enumerate((a, b)):
        for r in records:
            both[system].setdefault(r["task"]["video"], []).append(r)
    lists = [both[system][v + 1] for system in (0, 1) for v in range(videos)]

    def difference(first, second):  # of places in `lists`
        one, two = ([r for place in places for r in lists[int(place)]]
                    for places in (first, second))
        return plain_headline(two, bench) - plain_headline(one, bench)

    places = np.arange(videos), np.arange(videos, 2 * videos)
    found = stats.permutation_test(
        places, difference, permutation_type="samples", vectorized=False,
        n_resamples=np.inf if exact else 999, random_state=np.random.default_rng(0))
    own, other = ({r["task"]["id"]: r for r in records} for records in (a, b))
    records = scores.paired(own, other)
    assert scores.resampled(records, bench)[0] == pytest.approx(found.statistic)
    p = scores.sign_flip_p(records, bench)
    assert 0.01 < p < 0.9
    if exact:
        assert p == pytest.approx(found.pvalue, abs=1e-12)
    else:
        error = 4 * np.sqrt(p * (1 - p) / 999)
        assert p == pytest.approx(found.pvalue, abs=error)
        assert p == scores.sign_flip_p(records, bench)  # the seed is fixed


def test_exact_p_values_by_hand():
    """Three videos with shares 1, 1, 1: two of eight patterns are as large. A video in which both
    systems are the same changes no p-value."""
    three = [record(i, 1.0) for i in "abc"]
    assert scores.sign_flip_p(three, None) == 0.25
    assert scores.sign_flip_p([*three, record("d", 0.0)], None) == 0.25
    assert scores.sign_flip_p([record("a", 0.0), record("b", 0.0)], None) == 1.0
    # Ten shares of 0.1 are 1, added in one order, and 0.9999999999999999 in another.
    assert scores.sign_flip_p([record(i, 1.0) for i in range(10)], None) == 2 / 2**10
    assert scores.sign_flip_p([record(i, 1.0) for i in range(20)], None) == 2 / 2**20
    many = scores.sign_flip_p([record(i, 1.0) for i in range(21)], None)
    assert many == 1 / 20001  # at random: of 20,000 none, and the observed one


@pytest.mark.parametrize("bench", [None, "mlvu"])
def test_the_test_has_its_size_although_answers_about_a_video_err_together(bench):
    """200 worlds without a difference. If every item stood alone, p would be too small."""
    rng = np.random.default_rng(1)
    small, naive = 0, 0
    for _ in range(200):
        records = worlds(rng, 30, bench)
        small += scores.sign_flip_p(records, bench, draws=1000) < 0.05
        alone = [{**r, "task": {**r["task"], "video": r["task"]["id"]}} for r in records]
        naive += scores.sign_flip_p(alone, bench, draws=1000) < 0.05
    assert 0.015 <= small / 200 <= 0.095  # 3 standard errors around 0.05
    assert naive / 200 > 0.15


# ------------------------------------------------------------------------------------------------
# Comparisons


def looked(name, spans, evidence=((10, 20),), score=1.0, **more):
    """A record whose calls looked at `spans` of a film of 100 seconds."""
    calls = [{"status": "ok", "start": a, "end": b} for a, b in spans]
    task = {"id": name, "video": name, "type": "mcq", "evidence": [*map(list, evidence)]}
    return {"task": task, "sample": 0, "status": "ok", "score": score, "extracted": "A",
            "finish": ["stop"], "calls": calls, "reward": {"fmt": 1.0},
            "timing": {"video_s": 100.0}, **more}


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
    head, line = scores.comparison(compared).splitlines()[:2]
    assert head.split()[-4:] == [*wanted] and line.split()[-4:] == "0.80 0.75 1.00 0.67".split()
    # One frame of the window, at 12 s, misses the flash. No episode is left for the later steps.
    short = one("f", 1.0, there)
    short["calls"][0]["frames_seen"] = 1
    row = {**scores.summarise([short]), "K": 4, "tools": "on"}
    assert "called 1.000, found 0.000, told -, right -" in scores.table([row])
    assert "called" not in scores.summarise([looked("a", [(10, 20)])])["windows"]


def test_rec_and_acc_at_iou_by_hand():
    """The evidence is 0 to 10 s. IoUs 0.3, 0.5, 1 and 0 lie above 2, 4, 5 and 0 of the five levels
    0.1 to 0.5: a level that is met exactly does not count. acc@IoU counts right answers alone."""
    evidence = [(0, 10)]
    records = [looked("a", [(7, 10)], evidence), looked("b", [(0, 5)], evidence, score=0.0),
               looked("c", [(0, 10)], evidence), looked("d", [], evidence)]
    row = scores.summarise(records)["windows"]
    assert row["miou"] == pytest.approx((0.3 + 0.5 + 1 + 0) / 4)
    assert row["rec@iou"] == pytest.approx((2 + 4 + 5 + 0) / 5 / 4)
    assert row["acc@iou"] == pytest.approx((2 + 5) / 5 / 4)


@pytest.mark.parametrize("spans, evidence", [([(0, 10)], [(40, 60)]), ([(5, 25), (30, 40)],
                                                                       [(0, 10), (70, 100)])])
def test_windows_at_random_find_what_integration_says(spans, evidence):
    """P(a second is seen) by the share of starts with which a window of that length holds it."""
    chance, film = windows.at_random(spans, evidence, 100.0, draws=4000), 100.0
    seconds = np.arange(0.005, film, 0.01)
    missed = np.ones(len(seconds))
    for start, end in spans:
        long, free = end - start, film - (end - start)
        missed *= 1 - np.clip(np.minimum(seconds, free) - np.maximum(seconds - long, 0), 0,
                              None) / free
    gold = np.any([(a <= seconds) & (seconds < b) for a, b in evidence], axis=0)
    assert chance["recall"] == pytest.approx((1 - missed)[gold].mean(), abs=0.02)


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


def test_runs_of_one_system_are_pooled(made, command, tmp_path):
    """Seeds are averaged within an item, and videos are drawn. A has 1/2, 1/2, 0, 0 and B has 1, 1,
    1/2, 0. Names with a comma or an equals sign are folders like others."""
    runs = [made(name, right) for name, right in (
        ("a,1", [1, 0, 0, 0]), ("a=2=", [0, 1, 0, 0]), ("b1", [1, 1, 1, 0]), ("b2", [1, 1, 0, 0]))]
    words = ["old=", runs[0], f"{runs[1]}/", "new=", *runs[2:]]
    lines, kept = compared(command, tmp_path, *words)
    assert [(row["name"], row["acc_tools"], row["n"]) for row in kept["rows"]] == [
        ("old", 0.25, 4), ("new", 0.625, 4)]
    assert [row["headlines"] for row in kept["seeds"]] == [[0.25, 0.25], [0.75, 0.5]]
    at = next(i for i, line in enumerate(lines) if line.startswith("spread between"))
    assert lines[at + 1].split() == ["old", "64", "on", "0.000:", "0.250", "0.250"]
    assert lines[at + 2].split() == ["new", "64", "on", "0.177:", "0.750", "0.500"]
    (row,) = kept["differences"]
    assert row["difference"] == 0.375 and row["videos"] == 4
    means = [record(f"v{i}", score) for i, score in enumerate([0.5, 0.5, 0.5, 0.0])]
    # Runs are drawn, too: two runs of "new" lie far apart, so nothing is known.
    low, high = scores.interval(scores.resampled(means, None)[1])
    assert row["interval"][0] < low < high < row["interval"][1]
    assert row["p"] > 0.24  # three videos that differ, all for B
    rows, _ = table(command, *words)
    assert {"old, K 64, tools on (measured)", "new, K 64, tools on (measured)"} <= set(rows)
    # A folder before the first group stands alone.
    _, kept = compared(command, tmp_path, runs[0], "new=", *runs[2:])
    assert [row["name"] for row in kept["rows"]] == ["a,1", "new"] and len(kept["seeds"]) == 1


def test_a_pooled_run_says_its_spread_in_the_table(made, command):
    one = made("one", [1, 0, 0, 0], bench="lvbench")
    two = made("two", [1, 1, 0, 0], bench="lvbench")
    rows, _ = table(command, "ours=", one, two)
    cell = rows["ours, K 64, tools on (measured)"][3]
    assert cell.startswith("37.5 [") and cell.endswith("n 4 of 1549, sd 17.7 of 2 runs")


def test_wrong_groups_are_one_line(made, command, tmp_path):
    a, b = made("a", [1, 0]), made("b", [1, 0], bench="lvbench")
    for words, why in (((a, "x="), "name the folders"), (("x=", a, a), "stands twice"),
                       (("=", a), "name of its own"), (("x=", a, "x=", a), "name of its own"),
                       (("x=", a, b), "at K 64, tools on is not in all"),
                       (("x=", a, tmp_path / "none"), "summary.json")):
        code, _, err = command("--compare", *words, "--out", tmp_path / "o")
        assert code == 2 and why in err and err.count("\n") == 1, err


# ------------------------------------------------------------------------------------------------
# Tables for papers


def test_a_part_of_a_benchmark_is_marked_and_never_the_best(made, command, monkeypatch):
    part = made("part", [1, 1, 1], bench="lvbench")
    known = benchmarks.splits()
    rows, _ = table(command, part)
    assert rows["part, K 64, tools on (measured)"][3] == (
        "100.0 [100.0, 100.0]! n 3 of 1549")
    assert rows["ParaVT-8B (the paper's)"][3] == "**39.8**"
    assert rows["Gemini 1.5 Pro (the paper's)"][0] == "**75.0**"
    small = {**known, "lvbench": replace(known["lvbench"], items=3)}
    monkeypatch.setattr(benchmarks, "splits", lambda: small)
    rows, _ = table(command, part)
    assert rows["part, K 64, tools on (measured)"][3] == "**100.0 [100.0, 100.0]! n 3**"
    assert rows["ParaVT-8B (the paper's)"][3] == "39.8"


def test_n_is_that_of_the_headline(made, command):
    """MMVU's headline leaves the open questions out."""
    more = [{}] * 3 + [{"type": "open", "answer": "B", "options": None}] * 2
    rows, _ = table(command, made("m", [1, 0, 1, 1, 1], bench="mmvu", more=more))
    assert rows["m, K 64, tools on (measured)"][5].endswith(
        "n 3 (5 of 1000 items), over items 40.0")


def test_departures_are_numbered_footnotes(made, command):
    one = made("one", [1, 0], bench="mlvu", summary={"departures": ["own prompts", "50% | JPEG"]})
    two = made("two", [1, 0], bench="mlvu", summary={"departures": ["50% | JPEG"]})
    rows, below = table(command, one, two)
    assert "one, K 64, tools on (measured) [1, 2]" in rows
    assert "two, K 64, tools on (measured) [2]" in rows
    assert below == ["1. own prompts", "2. 50% \\| JPEG"]


def test_one_video_or_none_gives_no_interval(made, command, tmp_path):
    """In every table; a p-value needs two videos as well."""
    alone = [record(i, i % 2, video="v") for i in range(6)]
    value, draws = scores.resampled(alone, None)
    assert value == 0.5 and scores.interval(draws) is None
    assert scores.resampled([], None)[0] is None and scores.interval([]) is None
    # A second video without an item of the headline does not help.
    mixed = [*alone, record("open", 1.0, type="open")]
    assert len(scores.resampled(mixed, "mmvu")[1]) == 0
    assert len(scores.resampled(mixed, None)[1]) == 2000
    assert scores.sign_flip_p(alone, None) is None
    one = made("one", [1, 1, 0], bench="mlvu", videos=[0, 0, 0])
    two = made("two", [1, 0, 0], bench="mlvu", videos=[0, 0, 0])
    _, printed, _ = command("--rescore", one)
    assert "0.667 [-]" in printed and "[0.667" not in printed
    lines, kept = compared(command, tmp_path, one, two)
    assert lines[1].split()[:5] == ["one", "64", "3", "0.667", "[-]"]
    assert lines[-1].split() == ["two", "-", "one", "64", "on", "-0.333", "[-]", "-", "-", "1", "3",
                                 "-", "-", "mlvu"]
    assert kept["differences"][0]["interval"] is kept["differences"][0]["p_holm"] is None
    rows, _ = table(command, one)
    cell = rows["one, K 64, tools on (measured)"][4]
    assert cell == "66.7 [-] n 3 of 2174, over items 66.7"
