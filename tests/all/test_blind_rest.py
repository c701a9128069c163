"""
More of evaluations without their video: python -m pytest tests/all/test_blind_rest.py -q
"""
import json
import string
import sys

import numpy as np
import pytest
from conftest import run_script
from scripted import Server
from test_blind import (
    OVERVIEW,
    TASK,
    WINDOW,
    ask,
    data,  # noqa: F401
    shown,
)

import eval as evaluation
from evaluation import protocol_loop


def test_shuffled_frames_are_the_same_at_each_others_times(toy):
    real, shuffled = shown(toy, "real").load(OVERVIEW), shown(toy, "shuffled").load(OVERVIEW)
    assert (shuffled.seconds == real.seconds).all()
    assert sorted(map(bytes, shuffled.images)) == sorted(map(bytes, real.images))
    moved = [n for n, (a, b) in enumerate(zip(shuffled.frame_keys, real.frame_keys))
             if a != f"shuffled{b}"]
    assert len(moved) > 48
    picture = {f"shuffled{key}": bytes(image) for key, image in zip(real.frame_keys, real.images)}
    # A key names its own picture: a cache of the engine goes by keys.
    assert [picture[key] for key in shuffled.frame_keys] == list(map(bytes, shuffled.images))
    again = shown(toy, "shuffled").load(OVERVIEW)
    assert again.frame_keys == shuffled.frame_keys and again.key == shuffled.key
    window = shown(toy, "shuffled").load(WINDOW)
    assert window.frame_keys == shown(toy, "real").load(WINDOW).frame_keys


def test_shuffled_options_keep_the_right_answer():
    orders = set()
    for n in range(60):
        for place, letter in enumerate("ABC"):
            task = {**TASK, "id": f"q{n}", "answer": letter}
            new = protocol_loop.reordered(task)
            assert sorted(new["options"]) == sorted(task["options"])
            assert new["options"][string.ascii_uppercase.index(new["answer"])] == (
                task["options"][place])
            assert [task["options"][i] for i in new["order"]] == new["options"]
            assert protocol_loop.reordered(task) == new
        orders.add(tuple(new["order"]))
    assert len(orders) == 6, "every order of three options comes up"
    labelled = protocol_loop.reordered({**TASK, "options": ["A. red", "B. blue", "C. green"]})
    assert sorted(labelled["options"]) == ["blue", "green", "red"]
    grounding = {**TASK, "type": "grounding", "options": None, "answer": [1.0, 2.0]}
    assert protocol_loop.reordered(grounding) == grounding


@pytest.mark.parametrize("name", ["paravt", "direct", "video-r1", "time-r1", "qwen3-vl"])
def test_an_endpoint_gets_text_alone(toy, tmp_path, name):
    (tmp_path / "d.jsonl").write_text(json.dumps(TASK) + "\n")
    with Server("<answer>B</answer>") as server:
        done = run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "m",
                          "--data", tmp_path / "d.jsonl", "--video-root", toy, "--frames", 0,
                          "--tools", "off", "--protocol", name, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "image" not in json.dumps(server.asked) and "Which is first?" in json.dumps(server.asked)
    (row,) = json.loads((tmp_path / "out" / "summary.json").read_text())["results"]
    assert (row["K"], row["acc"], row["cost"]["frames"]) == (0, 1.0, 0)


def test_moved_options_are_in_the_record(toy, data, tmp_path):
    with Server("<answer>B</answer>") as server:
        done = ask(server, tmp_path / "out", "--frames", 0, "--tools", "off", "--show", "options",
                   data=data, toy=toy)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "records.rank0.jsonl").read_text().splitlines()
    moved = 0
    for record in map(json.loads, lines):
        task, order = record["task"], record["task"].get("order")
        if order is None:  # "all of the above" stays the last
            assert task["options"][2] == "all of the above"
            continue
        moved += order != [0, 1, 2]
        assert task["options"] == [TASK["options"][i] for i in order]
        assert record["score"] == (task["answer"] == "B") and record["show"] == "options"
    assert moved


def test_subtitles_of_the_whole_video_stay_without_frames(toy, tmp_path):
    """Lines aligned to frames go with the frames."""
    (tmp_path / "s.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nspoken words\n")
    task = {**TASK, "video": str(toy / TASK["video"]), "subtitles": str(tmp_path / "s.srt")}
    (tmp_path / "d.jsonl").write_text(json.dumps(task) + "\n")
    told = {}
    for which in ("full", "aligned", "none"):
        with Server("<answer>B</answer>") as server:
            done = ask(server, tmp_path / which, "--frames", 0, "--tools", "off", "--subtitles",
                       which, data=tmp_path / "d.jsonl", toy="/")
            assert done.returncode == 0, done.stderr
            told[which] = "spoken words" in json.dumps(server.asked)
    assert told == {"full": True, "aligned": False, "none": False}


def test_options_that_speak_of_others_stay():
    for text in ("All of the above", "none of these", "Both A and B", "A, and C", "both the above",
                 "any of the other options", "(A) and (C)", "Neither A nor B", "A/B", "A, B, C",
                 "A & B", "Only A", "only (B) is right", "Options A to C", "A or (B)"):
        assert protocol_loop.names_others(text), text
    for text in ("a red car and a bus", "both hands", "above the door", "Vitamin B", "all blue",
                 "only a dog", "a/the dog", "an option a man has", "Plan B", "A dog and a cat"):
        assert not protocol_loop.names_others(text), text


@pytest.mark.parametrize("flags, why", [
    (("--frames", "0"), "give --tools off"),
    (("--frames", "0", "--tools", "off", "--show", "blank"), "no frames for --show")])
def test_flags_that_do_not_fit_together(monkeypatch, flags, why):
    monkeypatch.setattr(sys, "argv", ["eval.py", "--data", "d", "--ckpt", "c", *flags])
    with pytest.raises(evaluation.launch.UserError, match=why):
        evaluation.parse_args()
    assert evaluation.frames_argument("0") == 0 and evaluation.frames_argument("8") == 8


def test_blank_frames_are_sent_as_grey_pictures(toy, tmp_path):
    """As bytes that reach a server."""
    import base64
    import io

    from PIL import Image

    (tmp_path / "d.jsonl").write_text(json.dumps(TASK) + "\n")
    with Server("<answer>B</answer>") as server:
        run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "m",
                   "--data", tmp_path / "d.jsonl", "--video-root", toy, "--frames", 4, "--show",
                   "blank", "--tools", "off", "--protocol", "direct", "--out", tmp_path / "out")
    urls = [part["image_url"]["url"] for part in server.asked[-1]["messages"][-1]["content"]
            if part["type"] == "image_url"]
    assert len(urls) == 4
    for url in urls:
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
        assert abs(picture.astype(int) - 127).max() <= 1
