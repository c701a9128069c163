"""
Tests of tools/view.py: python -m pytest tests/test_view.py -q

tests/slow/test_page.py opens its page in a browser.
"""
import base64
import io
import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from fixtures import write_rows
from PIL import Image

sys.path.insert(0, ROOT)
import toy as toy_world
import video
from tools import view

EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'>"
TURNS = ("I look.\n</think>\n<tool_call>\n{}\n</tool_call>", "So.\n</think>\n<answer>red</answer>")


def episode(sample=0, turns=TURNS, **more):
    """A record as rollout.py writes it. Each turn is two tokens, its text and its end."""
    task = {"id": "t0", "video": "film.mp4", "question": "Which?", "options": None, "answer": "red",
            "type": "open", "evidence": [[3, 9]]}
    call = {"turn": 0, "start": 4.01, "end": 19.77, "status": "ok", "summary": "a red square"}
    spans = [[0, 2], [2, 4]][:len(turns)]
    item = {"spec": {}, "key": "k", "frames": 4, "height": 32, "width": 32,
            "seconds": [2.5, 7.5, 12.5, 17.5]}
    return {
        "task": task, "group": "0/t0", "sample": sample, "K": 4, "policy_step": 0, "status": "ok",
        "error": None, "vision": [item], "think_open": True, "subtitles": "",
        "turns": list(turns), "pieces": [[text, ""] for text in turns], "spans": spans,
        "struct": [end - 1 for _, end in spans], "ids": [1] * 4, "mask": [1] * 4, "logps": [1] * 4,
        "finish": ["stop"] * len(turns), "calls": [call],
        "reward": {"total": 2.8, "acc": 1.0, "fmt": 1.0, "tool": 0.8},
        "advantage": {"task": 0.5, "fmt": 0.25}, "timing": {"video_s": 20.0}, **more}


def page_of(folder, row, half_written=""):
    """The page of a rollout JSONL that holds a record."""
    (folder / "r.jsonl").write_text(json.dumps(row) + "\n" + half_written)
    return view.build_page([str(folder / "r.jsonl")])[0]


def test_a_window_shows_the_frames_that_its_sub_agent_saw(tmp_path):
    """A film of 30 frames a second, in which each frame has a grey of its own."""
    greys = 20 + np.arange(600) * 37 % 200
    frames = np.broadcast_to(greys[:, None, None, None], (600, 32, 32, 3))
    toy_world.write_video(tmp_path / "film.mp4", frames.astype(np.uint8), fps=30)
    seen = video.crop(str(tmp_path / "film.mp4"), 4.01, 19.77)
    rounded = [round(float(second), 3) for second in seen.seconds]  # 4.5 5.467 ..: thirtieths
    row = episode()
    row["calls"][0]["seconds_seen"] = rounded  # as rollout.py and eval.py record them
    page = page_of(tmp_path, row)
    window = page[page.index('class="call"'):]
    assert "4 of 16 frames" in window
    shown = re.findall(r'base64,([^"]+)">([\d.]+) s', window)
    assert len(shown) == 4
    for jpeg, second in shown:
        assert float(second) in rounded
        grey = np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg))).convert("L")).mean()
        frame = seen.images[rounded.index(float(second))]
        assert abs(grey - frame.mean()) < 3  # neighbours differ by 37


def test_the_credit_of_a_token_is_the_one_that_grpo_gave_it():
    row = episode()
    assert view.credits_of(row, 0) == [(TURNS[0], 0.5), ("", 0.75)]
    del row["advantage"]  # of an evaluation
    assert view.credits_of(row, 0) == [(TURNS[0], 0.0)]


def test_texts_are_never_markup_and_a_half_written_line_is_left_out(tmp_path):
    row = episode(turns=[EVIL], finish=["length"], error=EVIL)
    row["task"].update(question=EVIL, answer=EVIL, options=[EVIL], id=EVIL)
    row["calls"][0].update(summary=EVIL, status=EVIL)
    page = page_of(tmp_path, row, '{"task": {')
    assert EVIL[:16] not in page and "<img src=x" not in page and "<script" not in page
    assert "cut off" in page and "film.mp4" in page  # the video is not there: the page says so


def test_a_run_and_an_evaluation(tmp_path, start):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run, evaluation = tmp_path / "grpo", tmp_path / "eval"
    (run / "rollouts").mkdir(parents=True)
    evaluation.mkdir()
    (run / "args.json").write_text(json.dumps({"data": str(tmp_path / "rl.jsonl")}))
    write_rows(run / "log.jsonl", [{"step": n, "total": n / 2, "by_K": {"4": {"acc": 0.5}},
                                    "gap": None} for n in (1, 2)])
    for step in range(40):
        rows = [episode(n, group=f"{step}/t0", reward={"acc": n % 2}) for n in range(8)]
        write_rows(run / "rollouts" / f"step_{step:06d}.rank0.jsonl", rows)
    (evaluation / "summary.json").write_text(json.dumps(
        {"results": [{"bench": "lvb", "K": 4, "headline": 0.25, "interval": [0.125, 0.5]}]}))
    flags = ("--out", tmp_path / "p.html", "--prompts", 10, "--wrong")
    assert start(view, run, evaluation, *flags)[0] == 0
    page = (tmp_path / "p.html").read_text()
    # Two plots have lines of two points: the reward, and accuracy by K.
    assert page.count("<svg") == 2 and "by_K/4" in page and "[0.125, 0.5]" in page
    assert "0 of 4 right" in page and not re.search(r"[1-9] of \d right", page)
    assert re.search(r"<h2>(\d+) episodes", page)[1] == "40"
    assert start(view, tmp_path / "none", "--out", tmp_path / "q.html")[0] == 2
