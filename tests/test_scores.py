"""
Tests of evaluation/scores.py and of the commands on finished folders: python -m pytest
tests/test_scores.py -q

The folders are made up, so that every number can be worked out by hand.
"""
import functools
import json

import pytest

import eval as evaluation
from evaluation import scores


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
        args = {"frames": [64], "tools": ["on"], "samples": 1, "protocol": "paravt", "ckpt": "c"}
        (leaf / "args.json").write_text(json.dumps(args))
        for file, lines in (("tasks", [r["task"] for r in rows]), ("records.rank0", rows)):
            (leaf / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        code, _, err = command("--rescore", out)
        assert code == (1 if fail else 0), err
        return out

    return made


def compared(command, tmp_path, *words):
    """-> (lines of --compare, its summary.json)."""
    code, out, err = command("--compare", *words, "--out", tmp_path / "compared")
    assert code == 0, err
    lines = out.splitlines()
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
# Comparisons


def test_differences_are_paired(made, command, tmp_path):
    """Of nine items, one each in a video, B has 6 right that A has wrong."""
    a, b = made("a", [0] * 9), made("b", [1] * 6 + [0] * 3)
    lines, kept = compared(command, tmp_path, a, b)
    (row,) = kept["differences"]
    assert row["difference"] == pytest.approx(6 / 9) and row["n"] == 9
    assert row["interval"] == pytest.approx([1 / 3, 1])
    assert lines[-1].split()[-3:] == ["0.667", "[0.333,", "1.000]"]


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
    assert row["difference"] == difference and row["n"] == 8


def test_numbers_come_from_the_records_and_not_from_the_summary(made, command, tmp_path):
    """A summary that an older grader wrote is computed again; of other records it is refused."""
    out = made("a", [1, 0, 1, 1], bench="lvbench")
    path = out / "summary.json"
    kept = json.loads(path.read_text())
    kept["results"][0].update(headline=0.1, interval=[0.1, 0.1])
    path.write_text(json.dumps(kept))
    lines, _ = compared(command, tmp_path, out)
    assert lines[1].split()[5] == "0.750"
    rows, _ = table(command, out)
    assert rows["a, K 64, tools on (measured)"][3].startswith("75.0 [")
    records = out / "lvbench" / "records.rank0.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    code, _, err = command("--table", out)
    assert code == 2 and "1 items have no record yet" in err and "--rescore" in err


# ------------------------------------------------------------------------------------------------
# Tables for papers


def test_a_table_names_failed_items(made, command):
    rows, _ = table(command, made("bad", [1, 1, 1], bench="mlvu", fail=[1]))
    assert rows["bad, K 64, tools on (measured)"][4].endswith("n 3 of 2174, 1 failed")


# ------------------------------------------------------------------------------------------------
# Windows


def looked(name, spans, evidence=((10, 20),), score=1.0, **more):
    """A record whose calls looked at `spans` of a film of 100 seconds."""
    calls = [{"status": "ok", "start": a, "end": b} for a, b in spans]
    task = {"id": name, "video": name, "type": "mcq", "evidence": [*map(list, evidence)]}
    return {"task": task, "sample": 0, "status": "ok", "score": score, "extracted": "A",
            "finish": ["stop"], "calls": calls, "reward": {"fmt": 1.0},
            "timing": {"video_s": 100.0}, **more}


def test_windows_by_hand():
    """The evidence is 10 to 20 s."""
    records = [looked("a", [(17, 20)]), looked("b", [(10, 15)]), looked("c", [])]
    row = scores.summarise(records)["windows"]
    assert row["n"] == 2 and row["recall"] == pytest.approx(0.4) and row["hit"] == 1.0
    assert row["precision"] == 1.0 and row["iou"] == pytest.approx(0.4)
