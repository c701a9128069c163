"""
Tests of evaluation/paper.py, readers.py, sources.py, checkouts.py and verify.py:
    python -m pytest tests/all/test_paper.py -q

The publishers' own code is the oracle if a copy of it is at hand: CHECKOUTS names a folder with
clones in it (ParaVT). Elsewhere these tests are skipped. torch and transformers are always there.
"""
import importlib.util
import json
import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import eval as evaluation
from evaluation import checkouts, endpoint, paper, readers, sources, systems, verify

CHECKOUT = os.path.join(os.environ.get("CHECKOUTS", ""), "ParaVT")


@pytest.fixture
def driver():
    if not os.path.isdir(CHECKOUT):
        pytest.skip("no clone of ParaVT: set CHECKOUTS to the folder that holds it")
    return CHECKOUT


def test_frames_lie_where_torch_puts_them():
    import torch

    draw = random.Random(0)
    for _ in range(3000):
        first = draw.randrange(300_000)
        last, count = first + draw.randrange(1, 300_000), 2 * draw.randrange(1, 40)
        wanted = torch.linspace(first, last, count).round().long().tolist()
        assert readers.spread(first, last, count) == wanted


def test_sizes_are_those_of_the_processors():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_film

    draw = random.Random(1)
    for _ in range(2000):
        height, width = draw.randrange(40, 2200), draw.randrange(40, 2200)
        for factor, least, most in ((28, 100352, 602112), (28, 784, 50176), (32, 65536, 16777216)):
            wanted = smart_resize(height, width, factor, least, most)
            assert readers.sides(height, width, factor, least, most) == wanted
        assert readers.film(900, height, width, 25165824)[1] == of_film(
            32, height, width, 2, 32, 4096, 25165824)
    places, _ = readers.film(901, 480, 640, 25165824)
    assert places == np.linspace(0, 900, 32, dtype=int).tolist()


def test_a_window_has_an_even_number_of_frames():
    """At 25 frames a second, 720p: 77 tokens a frame after the processor of the checkpoint."""
    def asked(start, end):
        places, size = readers.qwen({"fps": 1, "min_frames": 1, "max_frames": 16, "min_pixels": 784,
                                     "max_pixels": 50176, "video_start": start, "video_end": end},
                                    2500, 25.0, 720, 1280)
        height, width = readers.sides(*size, 32, 65536, 16777216)
        assert height * width // 1024 == 77
        return len(places)

    assert [asked(0, n) for n in (1, 2, 3, 5, 7.9, 16, 90)] == [2, 2, 2, 4, 6, 16, 16]
    for window in ((5, 5), (9, 2), (200, 300)):
        with pytest.raises(ValueError):
            asked(*window)


def test_a_marked_picture_shows_its_number():
    for number in (0, 1, 77, 4097, 65535):
        for height, width in ((28, 28), (168, 280), (641, 97)):
            image = readers.marked(number, height, width)
            for quality in (5, 85):
                assert readers.number_of(sources.reencoded(image, quality)) == number


@pytest.mark.parametrize("text, wanted", [
    (verify.crop(3, 5), [(3, 5)]), (f"<think>{verify.crop(3, 5)}", [(3, 5)]),
    (verify.crop(3, 5).removesuffix("</tool_call>"), []),
    ("<tool_call>{broken}</tool_call>", []), (verify.crop(3, name="search"), [(3, 13)]),
    (verify.crop(9, 2), [(9, 2)]), (verify.crop("1:02", "00:01:10"), [(62, 70)]),
    (verify.crop("soon", None), [(0, 10)]), ("<tool_call>[1]</tool_call>", None),
    ('<tool_call>{"arguments": "x"}</tool_call>', None), ("<tool_call>" * 50_000, []),
    ("<tool_call>" + " " * 100_000, []),
    ("<tool_code>crop_video(start_time=5.0, end_time='9')</tool_code>", [(5, 9)]),
    ("<tool_code>crop_video(5, 9)</tool_code>", [])])
def test_calls_are_read_as_the_driver_reads_them(text, wanted):
    read = paper.read_calls(text)
    assert (read if read is None else [(call.start, call.end) for call in read]) == wanted
    assert (paper.final([text]) is None) or wanted is not None


def test_the_driver_reads_the_same_calls(driver, tmp_path):
    """Of every kind of turn: windows that were run, and answers to them, in whole requests."""
    some = [case for case in verify.cases("paper") if case.frames]
    shape = checkouts.write_video(str(tmp_path / "made-up.mp4"), *verify.FILMS["small"])
    items = [{**checkouts.item_of(case.task, case.said, str(tmp_path / "made-up.mp4"), shape),
              "frames": 4} for case in some]
    sent, _ = checkouts.asked("paper", driver, items)
    for case, theirs in zip(some, sent):
        said = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"]
                for m in theirs["requests"][-1]["messages"]][3:]
        read = paper.read_calls(case.said[0])
        assert (theirs["failed"] is not None) == (read is None), case.name
        for text, call in zip(said, (read or [])[:5]):
            assert f"{call.start:.1f}s" in text and f"{call.end:.1f}s" in text, case.name
        assert len(said) == len((read or [])[:5]), case.name


def test_all_texts_are_taken_from_a_checkout(driver):
    texts = dict(zip(paper.AGENT, checkouts.texts("paper", driver)))
    assert texts["lvbench"].startswith("{published}\n") and "{labelled}" in texts["videomme"]
    assert "{spoken}" in texts["videomme_wsub"] and "{event}" in texts["charades"]
    assert texts["system"] != texts["grounding"] and '"crop_video"' in texts["grounding"]
    assert texts["path"].endswith("{video}") and "{frames}" in texts["reply"]


def test_one_edit_of_a_request_is_a_difference():
    """Every part of a request reaches the lines that are compared."""
    picture = endpoint.jpeg_url(readers.marked(7, 96, 128), 85)
    request = {"model": "m", "temperature": 0, "max_tokens": 64, "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}},
                                     {"type": "text", "text": "Which?"}]}]}
    lines = verify.lines_of([request])
    assert "<data:image/jpeg;base64 128x96 quality 85 frame 7 rgb>" in lines
    grey = np.repeat(readers.marked(7, 96, 128).mean(2, keepdims=True).astype(np.uint8), 3, 2)
    for old, new in (('"temperature": 0', '"temperature": 0.7'), ("Which?", "Which"),
                     ('"user"', '"tool"'), ('"max_tokens": 64', '"max_tokens": 64, "top_p": 0.9'),
                     (picture, endpoint.jpeg_url(readers.marked(7, 96, 128), 5)),
                     (picture, endpoint.jpeg_url(readers.marked(8, 96, 128), 85)),
                     (picture, endpoint.jpeg_url(readers.marked(7, 112, 112), 85)),
                     (picture, endpoint.jpeg_url(grey, 85)),
                     ("image_url", "video_url")):
        assert verify.lines_of([json.loads(json.dumps(request).replace(old, new))]) != lines, new
    assert verify.lines_of([{**request, "model": "other", "seed": 3}]) == lines


def test_the_papers_prompts_name_the_split(monkeypatch):
    """Two labels in Video-MME, options twice in MLVU, one text of the publisher in LVBench."""
    monkeypatch.setattr(sys, "argv", "eval.py --protocol paper --data d --ckpt c".split())
    protocol, _ = systems.make_protocol(evaluation.parse_args())

    def asked(split, **more):
        task = verify.question(split, **more)
        return protocol.opening(task, 64, None, "a line", 60.0)[1]["content"][1]["text"]

    assert "A. A. a red kite\nB. B. a blue {kite}" in asked("videomme")
    assert asked("mlvu").count("two kites") == 2 and asked("lvbench").count("two kites") == 1
    assert "\nOptions:" not in asked("lvbench") and "(A) a red kite" in asked("lvbench")
    assert "a line" in asked("videomme_wsub") and "a line" not in asked("longvideobench")
    assert '"a kite flies up."' in asked("charades")
    assert asked("videomme").count("made-up.mp4") == 1
    assert "made-up.mp4" not in asked("videomme", question="Which video path?")


def test_written_lines_repeat_as_they_do_in_the_file(tmp_path):
    path = tmp_path / "lines.srt"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\n<i>A</i> kite.\nIt flies.\n\n"
                    "2\n00:00:02,000 --> 00:00:03,000\nIt flies.\n\n3\n00:00:03,000\n")
    assert sources.written_lines(str(path)) == "A kite.\nIt flies.\nIt flies."
    assert sources.written_lines(str(tmp_path / "none.srt")) == ""


def test_a_film_goes_to_an_endpoint_by_its_path():
    images = np.zeros((4, 32, 32, 3), np.uint8)
    film = sources.Film(images, np.arange(4.0), "k", ["k"] * 4, "/v.mp4")
    request = SimpleNamespace(frames=[film], messages=[
        {"role": "user", "content": [{"type": "video", "video": "v.mp4", "stamp": "none"},
                                     {"type": "text", "text": "When?"}]}])
    wire = endpoint.OpenAIEngine("http://127.0.0.1:9", "m")
    (message,) = wire.wire(request)
    wire.close()
    assert message["content"][0] == {"type": "video_url", "video_url": {"url": "file:///v.mp4"}}


@pytest.mark.skipif(importlib.util.find_spec("qwen_vl_utils") is None,
                    reason="qwen_vl_utils is not installed")
def test_windows_are_those_of_qwen_vl_utils(tmp_path):
    from qwen_vl_utils.vision_process import fetch_video

    path = str(tmp_path / "v.mp4")
    shape = checkouts.write_video(path, 300, 25, 120, 200)
    for start, end in ((0, 1), (0.3, 3.1), (2, 9.7), (11, 40), (0, 12), (5.01, 5.2)):
        asked = {"fps": 1, "min_frames": 1, "max_frames": 16, "min_pixels": 784,
                 "max_pixels": 50176, "video_start": start, "video_end": end}
        theirs = fetch_video({"type": "video", "video": path, **asked})
        places, size = readers.qwen(asked, *shape)
        assert [readers.number_of(f.permute(1, 2, 0).numpy()) for f in theirs] == places
        assert tuple(theirs.shape[2:]) == size
