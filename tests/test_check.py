"""
Tests of --check of grpo.py and sft.py: python -m pytest tests/test_check.py -q
"""
import json
import re

from conftest import run_script
from scripted import AGENT

import data
import rollout
import video


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks_of(toy):
    rows = [json.loads(line) for line in (toy / "rl.jsonl").read_text().splitlines()]
    return [{**row, "video": str(toy / row["video"])} for row in rows]


def test_sound_data_has_no_fault(toy, tmp_path):
    out = tmp_path / "run"
    done = run_script("grpo.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      toy / "rl.jsonl", "--val", toy / "eval.jsonl", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "10 tasks: 10 list" in done.stdout and "no fault in" in done.stdout
    done = run_script("sft.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      toy / "sft.jsonl", "--out", out)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ chats, the longest has \d+ tokens, of --max-len 2048; \d+ trained",
                     done.stdout)
    assert not out.exists(), "--check writes nothing"


def test_the_largest_prompt_is_counted_to_the_token(codec, toy, capsys):
    """The count stands for frames that were never decoded: it must equal the real prompt."""
    source = rollout.Source(str(toy), video.FrameCache())
    tasks = data.read_tasks(str(toy / "rl.jsonl"))
    assert rollout.preflight(codec, tasks, AGENT, source, "gated") == []
    said = int(re.search(r"has (\d+) tokens with 64", capsys.readouterr().out)[1])
    real = []
    for task in tasks:
        spec = source.overview_spec(task, 64)
        messages = rollout.main_messages(task, 64, True)
        real.append(len(rollout.open_context(codec, messages, [spec], [source.load(spec)],
                                             rollout.tool_schema()).ids))
    assert said == max(real)
    small = rollout.Agent(context=max(real) + 31)
    faults = rollout.preflight(codec, tasks, small, source, "gated")
    assert len(faults) == real.count(max(real)) and "--context" in faults[0]


def test_each_fault_is_a_line(toy, tmp_path):
    good, *rest = tasks_of(toy)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    rows = [{**good, "video": "a.mp4"}, {**rest[0], "video": "broken.mp4"},
            {**rest[1], "video": "missing.mp4"},
            {**rest[2], "video": "a.mp4", "type": "grounding", "answer": [900, 990]}]
    (tmp_path / "a.mp4").write_bytes((toy / "videos" / "rl-0000.mp4").read_bytes())
    data = write(tmp_path / "tasks.jsonl", rows)
    done = run_script("grpo.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      data)
    assert done.returncode == 2 and "--check: 3 faults in" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("task ")]
    assert [line.split(":")[0] for line in lines] == [f"task {row['id']}" for row in rows[1:]]
    assert "beyond the end" in lines[2]


def test_faults_of_chats(toy, tmp_path):
    rows = [json.loads(line) for line in (toy / "sft.jsonl").read_text().splitlines()][:3]
    rows[1]["messages"][1]["content"][0]["video"] = "missing.mp4"
    rows[2]["messages"][-1]["content"] = "word " * 3000
    data = write(tmp_path / "chats.jsonl", rows)
    done = run_script("sft.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      data, "--video-root", toy)
    assert done.returncode == 2 and "--check: 2 faults in" in done.stderr, done.stderr
    assert f"chat {rows[1]['id']} would be skipped" in done.stdout
    assert f"chat {rows[2]['id']} has" in done.stdout and "--max-len is 2048" in done.stdout


def test_rows_that_are_wrong_in_form_are_lines_too(toy, tmp_path):
    """All of them, beside the faults of videos: who repairs a file wants to do it once."""
    (tmp_path / "a.mp4").write_bytes((toy / "videos" / "rl-0000.mp4").read_bytes())
    good, other, third = ({**row, "video": "a.mp4"} for row in tasks_of(toy)[:3])
    data = write(tmp_path / "tasks.jsonl", [
        {**other, "answer": ""}, good, {**third, "type": "quiz"}, {**third, "video": "gone.mp4"},
        {"id": "x"}, good])
    with open(data, "a") as f:
        f.write("{not json\n")
    done = run_script("grpo.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      data)
    assert done.returncode == 2 and "--check: 6 faults in" in done.stderr, done.stderr
    where = [line for line in done.stdout.splitlines() if line.startswith((str(data), "task "))]
    marks = [f"{data}:1: ", f"{data}:3: ", f"{data}:5: ", f"{data}:7: ", f"{data}: task ids",
             f"task {third['id']}: "]
    assert [line[:len(mark)] for line, mark in zip(where, marks, strict=True)] == marks
    # A run stops at the first of them.
    done = run_script("grpo.py", "--preset", "toy", "--ckpt", toy / "init", "--data", data, "--out",
                      tmp_path / "run")
    assert done.returncode == 2 and f"{data}:1: " in done.stderr


def test_a_file_of_nothing_but_faults(toy, tmp_path):
    data = write(tmp_path / "tasks.jsonl", [{"id": "x"}, {"id": "y"}])
    done = run_script("grpo.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      data)
    assert done.returncode == 2 and "--check: 2 faults in" in done.stderr, done.stderr


def test_chats_that_are_wrong_in_form_are_lines_too(toy, tmp_path):
    rows = [json.loads(line) for line in (toy / "sft.jsonl").read_text().splitlines()][:4]
    rows[0]["messages"] = rows[0]["messages"][:1]
    rows[2]["messages"][-1]["content"] = "word " * 3000
    del rows[3]["id"]
    data = write(tmp_path / "chats.jsonl", rows)
    done = run_script("sft.py", "--preset", "toy", "--check", "--ckpt", toy / "init", "--data",
                      data, "--video-root", toy)
    assert done.returncode == 2 and "--check: 3 faults in" in done.stderr, done.stderr
    for found in (f"{data}:1: no assistant message", f"{data}:4: missing 'id'",
                  f"{data}: chat {rows[2]['id']} has"):
        assert found in done.stdout
