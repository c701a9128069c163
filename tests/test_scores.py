"""
Tests of evaluation/scores.py and of the commands on finished folders: python -m pytest
tests/test_scores.py -q

The folders are made up, so that every number can be worked out by hand. scipy, if it is installed,
is the oracle of the p-values.
"""
import functools
import json

import pytest

import eval as evaluation
from evaluation import benchmarks, scores


@pytest.fixture
def command(start):
    """command(*words) -> (exit code, stdout, stderr) of eval.py in this process."""
    return functools.partial(start, evaluation)


@pytest.fixture
def made(tmp_path, command):
    """made(name, right, bench, videos, more) -> a finished folder. right: for each item
    whether its answer is right; videos: for each item its video (default: one of its own)."""
    def made(name, right, bench=None, videos=None, more=(), fail=()):
        out = tmp_path / name
        leaf = out / bench if bench else out
        leaf.mkdir(parents=True)
        rows = []
        for i, good in enumerate(right):
            task = {"id": f"q{i}", "video": f"v{videos[i] if videos else i}", "question": "Which?",
                    "type": "mcq", "options": ["cat", "dog"], "answer": "A",
                    "tags": {}, **(more[i] if more else {})}
            said = f"I saw it.\n</think>\n<answer>{'A' if good else 'B'}</answer>"
            rows.append({
                "task": task, "sample": 0, "budget": "64", "tools": "on", "digest": "d",
                "status": "engine_error" if i in fail else "ok", "turns": [said],
                "think_open": True, "finish": ["stop"], "calls": [], "reward": {"fmt": 1.0},
                "timing": {"total_s": 1.0}, "score": 0.5})  # an older grader's score
        args = {"frames": [64], "tools": ["on"], "samples": 1, "protocol": "paravt", "ckpt": "c",
                "engine": "vllm"}
        (leaf / "args.json").write_text(json.dumps(args))
        for file, lines in (("tasks", [r["task"] for r in rows]), ("records.rank0", rows)):
            (leaf / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        code, _, err = command("--rescore", out)
        assert code == (2 if fail else 0), err
        return out

    return made


def compared(command, tmp_path, *words):
    """-> (lines of --compare, its summary.json)."""
    code, out, err = command("--compare", *words, "--out", tmp_path / "compared")
    assert code == 0, err
    lines = out.splitlines()
    # A benchmark's name comes after the columns.
    assert max(len(line) for line in lines if not line.endswith(tuple(benchmarks.splits()))) <= 100
    return lines, json.loads((tmp_path / "compared" / "summary.json").read_text())


def table(command, *words):
    """-> {system: [cells]} of --table in Markdown, and the lines below the table."""
    code, out, err = command("--table", *words)
    assert code == 0, err
    above, _, below = out.strip().partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in above.split("\n")]
    assert len({len(row) for row in rows if "---" not in row[0]}) == 1
    return {row[0]: row[1:] for row in rows}, below.split("\n") if below else []


# ------------------------------------------------------------------------------------------------
# Intervals and p-values


@pytest.mark.parametrize("values, wanted", [
    ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # Holm-Bonferroni's usual example
    ([0.01, 0.02, 0.03, 0.04, 0.05], [0.05, 0.08, 0.09, 0.09, 0.09]),  # R's p.adjust
    ([0.6, None, 0.7], [1.0, None, 1.0]), ([], [])])
def test_holm(values, wanted):
    assert scores.holm(values) == [p if p is None else pytest.approx(p) for p in wanted]


# ------------------------------------------------------------------------------------------------
# Comparisons


def test_differences_are_paired_and_corrected_over_the_whole_command(made, command, tmp_path):
    """Of nine items, one each in a video, B has 6 right that A has wrong: 2 / 2^6. C has one."""
    a, b = made("a", [0] * 9), made("b", [1] * 6 + [0] * 3)
    lines, kept = compared(command, tmp_path, a, b, made("c", [1] + [0] * 8))
    one, two = kept["differences"]
    assert (one["p"], one["p_holm"]) == (2 / 2**6, 4 / 2**6) and (two["p"], two["p_holm"]) == (1, 1)
    assert lines[-2].split()[:8] == ["b", "-", "a", "64", "on", "+0.667", "[+0.333,", "+1.000]!"]
    assert lines[-2].split()[8:12] == ["0.0312", "0.0625", "9", "9"]
    lines, kept = compared(command, tmp_path, a, b)
    assert kept["differences"][0]["p_holm"] == 2 / 2**6
    assert lines[-3].startswith("difference of the same items") and "over 1" in lines[-3]


@pytest.mark.parametrize("bench, more, difference", [
    ("mlvu", [{"tags": {"task": "a"}}] * 2 + [{"tags": {"task": "b"}}] * 6, 0.25),
    ("mmvu", [{}] * 4 + [{"type": "open", "answer": "B", "options": None}] * 4, 0.25),
    (None, [], 0.125)])
def test_the_difference_is_the_headlines(bench, more, difference, made, command, tmp_path):
    """One item of eight. MLVU: half of one of two tasks. MMVU: one of four of multiple choice."""
    a = made("a", [0] * 8, bench=bench, more=more)
    b = made("b", [1] + [0] * 7, bench=bench, more=more)
    _, kept = compared(command, tmp_path, a, b)
    (row,) = kept["differences"]
    assert row["difference"] == difference and row["n"] == (4 if bench == "mmvu" else 8)


def test_numbers_come_from_the_records_and_not_from_the_summary(made, command, tmp_path):
    """A summary that an older grader wrote is computed again; of other records it is refused."""
    out = made("a", [1, 0, 1, 1], bench="lvbench")
    path = out / "summary.json"
    kept = json.loads(path.read_text())
    kept["results"][0].update(headline=0.1, interval=[0.1, 0.1])
    path.write_text(json.dumps(kept))
    lines, _ = compared(command, tmp_path, out)
    assert lines[1].split()[3] == "0.750"
    rows, _ = table(command, out)
    assert rows["a, K 64, tools on (measured)"][3].startswith("75.0 [")
    records = out / "lvbench" / "records.rank0.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = command("--table", out)
    assert code == 2 and "of 4 records, and there are 3" in err and "--rescore" in err


# ------------------------------------------------------------------------------------------------
# Tables for papers


def test_refused_headlines_stay_refused(made, command, tmp_path):
    out = made("bad", [1, 1, 1], bench="mlvu", fail=[1])
    rows, _ = table(command, out)
    assert rows["bad, K 64, tools on (measured)"][4] == "refused"
    rows, _ = table(command, "x=", out)
    assert rows["x, K 64, tools on (measured)"][4] == "refused"
    good = made("good", [1, 0, 1], bench="mlvu")
    for words in ((out, good), (good, out)):
        lines, kept = compared(command, tmp_path, *words)
        assert lines[-1].split()[5:11] == ["refused:", "errors", "-", "-", "3", "3"]
        assert kept["differences"][0]["difference"] is kept["differences"][0]["p_holm"] is None


def test_no_difference_is_taken_from_a_refused_headline():
    """Text alone against the real frames, of which one or the other was refused."""
    good, bad = ([looked(name, [], score=score) for name in "abcdef"] for score in (1.0, 0.0))
    for tasks in (good, bad):
        for record in tasks:
            record["task"]["options"] = ["cat", "dog"]
    here = {(None, k, "off"): {(r["task"]["id"], 0): r for r in records}
            for k, records in (("4", good), ("0", bad))}
    for headlines, difference in (((1.0, 0.0), -1.0), ((None, 0.0), None), ((1.0, None), None)):
        rows = [{"bench": None, "K": k, "tools": "off", "n": 6, "headline": headline}
                for k, headline in zip(("4", "0"), headlines)]
        (row,) = scores.control_tests(rows, here)
        assert (row["difference"], row["against"]) == (difference, "4")


# ------------------------------------------------------------------------------------------------
# Windows


def looked(name, spans, evidence=((10, 20),), score=1.0, **more):
    """A record whose calls looked at `spans` of a film of 100 seconds."""
    calls = [{"status": "ok", "start": a, "end": b} for a, b in spans]
    task = {"id": name, "video": name, "type": "mcq", "evidence": [*map(list, evidence)]}
    return {"task": task, "sample": 0, "status": "ok", "score": score, "extracted": "A",
            "finish": ["stop"], "calls": calls, "reward": {"fmt": 1.0},
            "timing": {"video_s": 100.0}, **more}


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
