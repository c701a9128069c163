"""
The words of every protocol, and texts that a model or a user may write:
python -m pytest tests/slow/test_protocols.py -q
"""
import hashlib
import json
import os

import pytest
from conftest import run_script
from scripted import Server
from test_protocols import STORED, set_up, stored

import chat
from evaluation import benchmarks, systems


def tasks_of(split):
    """Made-up tasks of a benchmark, None: of --data."""
    options = ["a red kite", "a blue {kite}", 'no kite: "none"', "two kites", "a kite\\line"]
    same = {"video": "videos/eval-0000.mp4", "question": "Which kite flies?", "answer": "B"}
    if split:
        same["split"] = split
    if split == "charades":
        return [{**same, "event": "a kite flies", "options": None, "answer": [1, 2],
                 "type": "grounding"}]
    found = [{**same, "options": None, "answer": "a kite", "type": "open"}]
    for count in (4, 2, 5):
        task = {**same, "options": options[:count], "type": "mcq"}
        found += [task, {**task, "published": "Which kite flies?\n(A) a red kite\n(B) x",
                         "published_options": [option + " " for option in options[:count]]}]
    return found


# Turns of every form of call, good and bad.
TURNS = ['<tool_call>{"arguments": {"start": 2, "end": 8.4}}</tool_call>',
         '<tool_call>{"name": "crop_video", "arguments": {start: 3}}</tool_call>C',
         '<think>x <tool_call>{"arguments": {"start_time": "12.5", "end_time": "0:20"}}</tool_call>'
         '</think><tool_call>{"arguments": {"start_time": "00:01:10", "end_time": "1:15.5"}}'
         '</tool_call><tool_call>{"arguments":{"start_time":"soon"}}</tool_call>',
         "<tool_code>crop_video(start_time=5.0, end_time='9')</tool_code><tool_code>print(1)"
         "</tool_code><tool_code>crop_video(5, 9)</tool_code>",
         '<tool_call>{"name": "crop_video", "arguments": "{}"}</tool_call>', "",
         '<video_zoom>{"segment": [10, 14], "fps": 1}</video_zoom>',
         '<video_zoom>{"segment": [0, 50], "fps": 1}</video_zoom>',
         '<video_zoom>{"segment": ["a", "b"], "fps": 1}</video_zoom>', "<video_zoom>",
         "<clip>00:00:05-00:00:10, 00:01:05-00:01:20</clip>", "<clip>5-9</clip>",
         "<clip>00:00:10-00:00:05</clip>", "<clip>00:00:05-00:00:10"]


@pytest.mark.parametrize("name", list(systems.all_systems()))
def test_first_messages_calls_and_frames_are_those_that_are_stored(name, toy, monkeypatch):
    """tests/openings.json: a digest for each split, of every kind of task with and without
    subtitles; of the calls that are read; of the frames of the overview and of a window."""
    args, agent, source = set_up(name, toy, monkeypatch)
    system = systems.all_systems()[name]
    found = {}
    for split in (None, *benchmarks.splits()):
        found[str(split)] = [
            [{**message, "content": [
                {key: piece.get(key) for key in ("type", "text", "stamp")}
                for piece in chat.content_of(message)]}
             for message in system.opening(task, args.frames[0], agent, spoken, 200.0)]
            for task in tasks_of(split) for spoken in ("", "Hi you")]
    if system.parse:
        found["calls"] = [[(call.start, call.end, call.num_frames, bool(call.error))
                           for call in system.parse(text)] for text in TURNS]
    video = "videos/eval-0000.mp4"
    window = {"start": 10, "end": 14.5, "fps": 1.0, "num_frames": 4, "max_frames": 16}
    frames = []
    for spec in ({"frames": 8}, {"frames": args.frames[0]}, window):
        shown = source.load({"video": video, **spec})
        frames.append([shown.seconds.round(3).tolist(), shown.images.shape])
    found["frames"] = frames
    found = {key: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
             for key, value in found.items()}
    assert found == stored(STORED.with_name("openings.json"), name, found), "written: is it meant?"


@pytest.mark.process
@pytest.mark.parametrize("text, wanted", [
    ("\n", "t.json: "), ('{"User": "{question}"}', "is no text of"),
    ('{"user": "Question: {options}"}', "lacks the place of the question"),
    ('{"user": "{question} {options} Put it in \\\\boxed{answer}, as {}."}', None)])
def test_a_publishers_text_without_the_question_is_refused(toy, tmp_path, text, wanted):
    """Sent, it would get answers to no question, and a headline."""
    (tmp_path / "t.json").write_text(text)
    task = {"id": "q", "video": "videos/" + os.listdir(toy / "videos")[0], "type": "mcq",
            "question": "What {place} is it?", "options": ["Fire", "Rain"], "answer": "B"}
    (tmp_path / "d.jsonl").write_text(json.dumps(task) + "\n")
    with Server("<answer>B</answer>") as server:
        done = run_script("eval.py", "--base-url", server.url, "--model", "m", "--frames", 2,
                          "--data", tmp_path / "d.jsonl", "--root", toy, "--protocol", "rewatch-r1",
                          "--prompts", tmp_path / "t.json", "--out", tmp_path / "out")
    if wanted:
        assert done.returncode == 2 and wanted in done.stderr and not server.asked
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0 and "Rain" in json.dumps(server.asked), done.stderr


@pytest.mark.parametrize("parse", [systems.zoom_call, systems.conan_calls])
@pytest.mark.parametrize("text", ["<clip>" * 30000, "<video_zoom>" * 30000 + "</video_zoom>",
                                  "</clip><clip>", "\0",
                                  '<video_zoom>{"segment": [NaN, Infinity], "fps": 1e999}'
                                  "</video_zoom>", "<clip>99999999999:1-2,-,--</clip>"])
def test_no_text_makes_a_parser_raise_or_hang(parse, text):
    for call in parse(text):
        assert call.error or call.name
