"""
Tests of --frames 0, --show and --shuffle-options of eval.py: python -m pytest tests/test_blind.py
"""
import json
import string
import sys

import numpy as np
import pytest
from conftest import run_script
from scripted import AGENT, Scripted, Server

import eval as evaluation
import rollout
import video
from evaluation import systems

TASK = {"id": "q", "video": "videos/eval-0000.mp4", "question": "Which is first?", "type": "mcq",
        "options": ["red", "blue", "green"], "answer": "B"}


def shown(toy, show, **more):
    """-> Source of eval.py that shows frames in this way."""
    source = rollout.Source(str(toy), video.FrameCache())
    return systems.Source(**vars(source), show=show, **more)


OVERVIEW = {"video": "videos/eval-0000.mp4", "frames": 64}
WINDOW = {"video": "videos/eval-0000.mp4", "start": 0.0, "end": 8.0, "fps": 1.0, "max_frames": 16}


@pytest.mark.parametrize("spec", [OVERVIEW, WINDOW])
def test_blank_frames_hold_nothing_and_take_the_same_tokens(toy, codec, spec):
    real, blank = shown(toy, "real").load(spec), shown(toy, "blank").load(spec)
    assert (blank.images == 127).all() and not (real.images == 127).all()
    assert blank.images.shape == real.images.shape and (blank.seconds == real.seconds).all()
    assert not set(blank.frame_keys) & set(real.frame_keys) and blank.key != real.key
    prompts = [rollout.open_context(codec, rollout.main_messages(TASK, 64), [spec], [frames]).ids
               for frames in (real, blank)]
    assert prompts[0] == prompts[1]


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
            new = systems.reordered(task)
            assert sorted(new["options"]) == sorted(task["options"])
            assert new["options"][string.ascii_uppercase.index(new["answer"])] == (
                task["options"][place])
            assert [task["options"][i] for i in new["order"]] == new["options"]
            assert systems.reordered(task) == new
        orders.add(tuple(new["order"]))
    assert len(orders) == 6, "every order of three options comes up"
    labelled = systems.reordered({**TASK, "options": ["A. red", "B. blue", "C. green"]})
    assert sorted(labelled["options"]) == ["blue", "green", "red"]
    grounding = {**TASK, "type": "grounding", "options": None, "answer": [1.0, 2.0]}
    assert systems.reordered(grounding) == grounding


def test_without_frames_nothing_is_decoded_and_no_image_is_sent(toy, codec, monkeypatch):
    def refuse(*_):
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr(video.FrameCache, "_decode", refuse)
    agent = rollout.Agent(**{**vars(AGENT), "tools": False, "max_turns": 0})
    engine = Scripted(codec, ["</think><answer>B</answer>"])
    sampler = rollout.Sampler(engine, codec, shown(toy, "real"), agent)
    (episode,) = systems.run(sampler, [TASK], systems.Protocol(), frames=0)
    assert episode.status == "ok" and episode.num_frames == 0 and episode.duration == 64.0
    (request,) = engine.requests
    assert not request.items and not request.frames and codec.image_pad not in request.expanded
    assert "Which is first?" in codec.tokenizer.decode(request.expanded)
    (broken,) = systems.run(sampler, [{**TASK, "video": "gone.mp4"}], systems.Protocol(), frames=0)
    assert broken.status == "video_error"


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


def test_modes_have_folders_of_their_own_and_are_compared_in_pairs(toy, tmp_path):
    """Records of two modes never mix; --compare pairs them by item."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({**TASK, "id": f"q{n}", "video": f"videos/eval-000{n}.mp4"})
                            + "\n" for n in range(4)))
    modes = {"real": (), "blank": ("--show", "blank"), "shuffled": ("--show", "shuffled"),
             "options": ("--shuffle-options",)}
    with Server("<answer>B</answer>") as server:
        def run(out, *flags):
            return run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model",
                              "m", "--data", data, "--video-root", toy, "--frames", 4, "--tools",
                              "off", "--protocol", "direct", "--out", tmp_path / out, *flags)

        for name, flags in modes.items():
            done = run(name, *flags)
            assert done.returncode == 0, done.stderr
        mixed = run("real", "--show", "blank")
        assert mixed.returncode == 2 and "other settings" in mixed.stderr
    acc = {name: json.loads((tmp_path / name / "summary.json").read_text())["results"][0]["acc"]
           for name in modes}
    right = [systems.reordered({**TASK, "id": f"q{n}"})["answer"] == "B" for n in range(4)]
    assert acc == {"real": 1.0, "blank": 1.0, "shuffled": 1.0, "options": sum(right) / 4}
    done = run_script("eval.py", "--compare", *(tmp_path / name for name in modes), "--out",
                      tmp_path / "compared")
    assert done.returncode == 0 and "options - real" in done.stdout, done.stderr
    record = json.loads((tmp_path / "options" / "records.rank0.jsonl").read_text().splitlines()[0])
    assert record["task"]["options"] == [TASK["options"][i] for i in record["task"]["order"]]


@pytest.mark.parametrize("flags, why", [
    (("--frames", "0"), "give --tools off"),
    (("--frames", "0", "--tools", "off", "--estimate"), "--estimate needs")])
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
