"""
Tests of questions about one video, tools/ask.py: python -m pytest tests/test_ask.py -q
"""
import json
import re

import pytest
from conftest import run_script
from scripted import AGENT, ANSWER, Scripted, calls

import rollout
import video
from tools import ask

TASK = {"id": "q", "video": "videos/rl-0000.mp4", "question": "Which?", "options": None,
        "answer": None, "type": "open"}


def test_turns_calls_summaries_and_the_answer_are_printed_in_order(codec, toy, capsys):
    engine = Scripted(codec, [calls((0, 8), (90, 80), (16, 24)), ANSWER],
                      sub=lambda request: f"saw {request.items[0].frames}")
    worker = rollout.RolloutWorker(engine, codec, video.VideoSource(toy, video.FrameCache()), AGENT)
    (row,), said = ask.ask(worker, [TASK], 4), capsys.readouterr().out
    steps = [r"\[turn 1\]", "crop_video", r"\[call 1, 0\.0 to 8\.0 s, 8 frames: ok\] saw 8",
             r"\[turn 2\]", r"answer: red   \(4 frames, 2 windows\)"]
    assert re.search("(?s)" + ".*".join(steps), said), said
    assert "[call 2, no window: error] error: " in said
    assert row["reward"] == {} and row["turns"] and len(row["calls"]) == 3


@pytest.mark.process
def test_the_command_asks_a_video_and_writes_the_episode(toy, tmp_path):
    out, path = tmp_path / "asked.jsonl", toy / "videos" / "rl-0000.mp4"
    done = run_script("tools/ask.py", "--preset", "toy", "--ckpt", toy / "init", "--video", path,
                      "--question", "Which?", "--frames", 4, "--out", out, reference=True)
    assert done.returncode == 0, done.stderr
    assert "[turn 1] " in done.stdout and "answer: " in done.stdout
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["task"]["video"] == "rl-0000.mp4" and row["reward"] == {}
