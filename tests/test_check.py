"""
Tests of --check of grpo.py and sft.py: python -m pytest tests/test_check.py -q
"""
import re

import pytest
from fixtures import rows_of, write_rows

import grpo
import sft


@pytest.fixture
def check(start, toy):
    """check(script, file, *flags) -> (exit code, stdout, stderr) of the script with --check."""
    def check(script, file, *flags):
        return start(script, "--preset", "toy", "--check", "--ckpt", toy / "init", "--data", file,
                     "--video-root", toy, *flags)

    return check


@pytest.mark.process  # two starts
def test_sound_data_has_no_fault(check, toy, tmp_path):
    out = tmp_path / "run"
    code, said, _ = check(grpo, toy / "rl.jsonl", "--val", toy / "eval.jsonl", "--out", out)
    assert code == 0 and "no fault in" in said
    code, said, _ = check(sft, toy / "sft.jsonl", "--out", out)
    assert code == 0 and re.search(r"\d+ chats, the longest has \d+ tokens, of --max-len 20", said)
    assert not out.exists(), "--check writes nothing"


def test_each_fault_is_a_line(check, toy, tmp_path):
    """Faults of videos and of rows that are wrong in form: who repairs a file wants to do it once.
    A run stops at the first of them."""
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    (tmp_path / "a.mp4").write_bytes((toy / "videos" / "rl-0000.mp4").read_bytes())
    rows = [{**row, "video": str(tmp_path / "a.mp4")} for row in rows_of(toy / "rl.jsonl")]
    (good, other, third, fourth, fifth, sixth), windows = rows[:6], ([63.9, 90], 7, [64, 65])
    file = write_rows(tmp_path / "tasks.jsonl", [
        {**other, "answer": ""}, good, {**third, "type": "quiz"},
        {**sixth, "video": str(tmp_path / "gone.mp4")}, {"id": "x"}, good,
        {**fourth, "video": str(tmp_path / "broken.mp4")},
        {**fifth, "type": "grounding", "answer": [900, 990]},
        *({**good, "id": f"e{n}", "evidence": [[9, 20], w]} for n, w in enumerate(windows))])
    with open(file, "a") as f:
        f.write("{not json\n")
    code, out, err = check(grpo, file, "--video-root", tmp_path)
    assert code == 2 and "--check: 10 faults in" in err, err
    where = [line for line in out.splitlines() if line.startswith((str(file), "task "))]
    marks = [f"{file}:1: ", f"{file}:3: ", f"{file}:5: ", f"{file}:6: ", f"{file}:10: evidence",
             f"{file}:12: ", *(f"task {row['id']}: " for row in (sixth, fourth, fifth)),
             "task e2: [64, 65] s lies beyond the video"]
    assert [line[:len(mark)] for line, mark in zip(where, marks, strict=True)] == marks
    assert "beyond the video" in where[-2] and where[-1].endswith("video, which has 64 s")


def test_a_run_stops_at_the_first_fault(start, toy, tmp_path):
    file = write_rows(tmp_path / "tasks.jsonl", [{"id": "x"}, {"id": "y"}])
    words = ("--preset", "toy", "--ckpt", toy / "init", "--data", file)
    for script in (grpo, sft):
        code, _, err = start(script, *words, "--out", tmp_path / "run")
        assert code == 2 and f"{file}:1: missing" in err and err.count("\n") == 1
    sound = ("--preset", "toy", "--ckpt", toy / "init", "--data", toy / "rl.jsonl")
    code, out, err = start(grpo, *sound, "--val", file, "--check")
    assert code == 2 and "--check: 2 faults in" in err and f"{file}:1: missing" in out


def test_faults_of_chats(check, toy, tmp_path):
    rows = rows_of(toy / "sft.jsonl")[:6]
    rows[0]["messages"] = rows[0]["messages"][:1]
    rows[1]["messages"][1]["content"][0]["video"] = "missing.mp4"
    rows[2]["messages"][-1]["content"] = "word " * 5000
    del rows[3]["id"]
    file = write_rows(tmp_path / "chats.jsonl", rows)
    code, out, err = check(sft, file)
    assert code == 2 and "--check: 4 faults in" in err, err
    assert f"{file}:1: roles in the order" in out and f"{file}:4: missing 'id'" in out
    assert f"chat {rows[1]['id']}: " in out
    assert re.search(rf"chat {rows[2]['id']} has .*--max-len is 2048", out)
