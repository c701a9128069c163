"""
Tests of evaluation/scores.py and of the commands on finished folders: python -m pytest
tests/test_scores.py -q

The folders are made up, so that every number can be worked out by hand.
"""
import json

import pytest

import eval as evaluation
from evaluation import scores


@pytest.fixture
def made(tmp_path):
    """made(name, right, bench, more, fail) -> a finished folder. right: for each item whether its
    answer is right."""
    def made(name, right, bench=None, more=(), fail=()):
        out = tmp_path / name
        leaf = out / bench if bench else out
        leaf.mkdir(parents=True)
        rows = []
        for i, (good, fields) in enumerate(zip(right, more or [{} for _ in right])):
            task = {"id": f"q{i}", "video": f"v{i}", "question": "Which?", "type": "mcq",
                    "options": ["cat", "dog"], "answer": "A", "tags": {}, **fields}
            said = f"I saw it.\n</think>\n<answer>{'A' if good else 'B'}</answer>"
            rows.append({
                "task": task, "sample": 0, "budget": "64", "tools": "on", "digest": "d",
                "status": "engine_error" if i in fail else "ok", "turns": [said],
                "think_open": True, "finish": ["stop"], "calls": [], "reward": {"fmt": 1.0},
                "timing": {"total_s": 1.0}, "score": 0.5})  # an older grader's score
        args = {"frames": [64], "tools": ["on"], "samples": 1, "protocol": "paravt"}
        (leaf / "args.json").write_text(json.dumps(args))
        for file, lines in (("tasks", [r["task"] for r in rows]), ("records.rank0", rows)):
            (leaf / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (out / "summary.json").write_text('{"judge_model": null}')
        return out

    return made


@pytest.fixture
def difference(start, tmp_path):
    """difference(a, b) -> what --compare finds between two folders."""
    def difference(a, b):
        code, _, err = start(evaluation, "--compare", a, b, "--out", tmp_path / "compared")
        assert code == 0, err
        (row,) = json.loads((tmp_path / "compared" / "summary.json").read_text())["differences"]
        return row

    return difference


# ------------------------------------------------------------------------------------------------
# Comparisons


def test_differences_are_paired(made, difference):
    """Of nine items, one each in a video, B has 6 right that A has wrong."""
    row = difference(made("a", [0] * 9), made("b", [1] * 6 + [0] * 3))
    assert row["difference"] == pytest.approx(6 / 9) and row["n"] == 9
    assert row["interval"] == pytest.approx([1 / 3, 1])


@pytest.mark.parametrize("bench, more, wanted", [
    ("mlvu", [{"tags": {"task": "a"}}] * 2 + [{"tags": {"task": "b"}}] * 6, 0.25),
    ("mmvu", [{}] * 4 + [{"type": "open", "answer": "B", "options": None}] * 4, 0.25),
    (None, [], 0.125)])
def test_the_difference_is_the_headlines(bench, more, wanted, made, difference):
    """One item of eight. MLVU: half of one of two tasks. MMVU: one of four of multiple choice."""
    a = made("a", [0] * 8, bench=bench, more=more)
    row = difference(a, made("b", [1] + [0] * 7, bench=bench, more=more))
    assert row["difference"] == wanted and row["n"] == 8


def test_numbers_come_from_the_records_and_not_from_the_summary(made, start):
    """Graded anew. Beside the paper's rows failed items are named. A record less is refused."""
    out = made("a", [1, 0, 1, 1], bench="lvbench", fail=[3])
    lines = start(evaluation, "--compare", out)[1].splitlines()
    assert lines[1].split()[5] == "0.500"
    assert any(line.startswith("| ParaVT-8B (the paper's) | 62.1 | 69.4 |") for line in lines)
    cells = lines[-1].split(" | ")
    assert cells[0] == "| a, K 64, tools on (measured)"
    assert cells[4].startswith("50.0 [") and cells[4].endswith("n 4 of 1549, 1 failed")
    records = out / "lvbench" / "records.rank0.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = start(evaluation, "--compare", out)
    assert code == 2 and "1 items have no record yet" in err


def test_one_error_of_a_hundred_is_no_failure():
    for errors, lines in ((1, 0), (2, 1)):
        row = {"bench": None, "K": 4, "tools": "on", "n": 100, "errors": {"video_error": errors}}
        assert len(scores.failed_lines([row])) == lines


# ------------------------------------------------------------------------------------------------
# Windows


def test_windows_by_hand():
    """Calls look at 17 to 20 s, at 10 to 15 s, or nowhere; the evidence is 10 to 20 s."""
    records = []
    for name, spans in (("a", [(17, 20)]), ("b", [(10, 15)]), ("c", [])):
        records.append({
            "task": {"id": name, "video": name, "type": "mcq", "evidence": [[10, 20]]},
            "sample": 0, "status": "ok", "score": 1.0, "extracted": "A", "finish": ["stop"],
            "calls": [{"status": "ok", "start": a, "end": b} for a, b in spans],
            "reward": {"fmt": 1.0}, "timing": {"video_s": 100.0}})
    row = scores.summarise(records)["windows"]
    assert row["n"] == 2 and row["recall"] == pytest.approx(0.4) and row["hit"] == 1.0
    assert row["precision"] == 1.0 and row["iou"] == pytest.approx(0.4)
