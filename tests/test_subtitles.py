"""
Tests of subtitles in training and in evaluation: python -m pytest tests/test_subtitles.py -q
"""
import json
import sys

import pytest
from scripted import ANSWER, Scripted, is_sub

import chat
import eval as evaluation
import grpo
import launch
import rollout
from plumbing import data as data_py

# The frames of an overview of 4 stand at 8, 24, 40 and 56 s.
SRT = ("1\n00:00:07,000 --> 00:00:09,500\nHello <i>there</i>\n\n"
       "2\n00:00:20,000 --> 00:00:22,000\nGoodbye\n\n3\n00:00:39,000 --> 00:00:41,000\nAgain\n")


@pytest.fixture
def data(toy, tmp_path):
    """A data folder with films of the toy and one file of subtitles -> path of its tasks."""
    (tmp_path / "videos").symlink_to(toy / "videos")
    (tmp_path / "words.srt").write_text(SRT)
    return write(tmp_path, subtitles="words.srt")


def write(folder, **more):
    row = {"id": "spoken", "video": "videos/rl-0000.mp4", "question": "Which?", "options": None,
           "answer": "red", "type": "open", **more}
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": "mute", "subtitles": None}))
    return path


def words_of(script, toy, data, *flags):
    words = ["--preset", "toy", "--ckpt", toy / "init", "--data", data, "--frames", 4, *flags]
    return [f"{script.__name__}.py", *map(str, words)]


def settings(script, monkeypatch, toy, data, *flags):
    """Flags of a script -> (args, tasks, Agent, VideoSource)."""
    monkeypatch.setattr(sys, "argv", words_of(script, toy, data, *flags))
    args = script.parse_args()
    return args, data_py.read_tasks(args.data), *rollout.agent_settings(args, args.data)


def prompts(engine):
    """-> {task id: ids of its first prompt}"""
    return {r.id.split("/")[-3]: r.ids for r in engine.requests if not is_sub(r)}


@pytest.mark.process  # three runs
def test_a_prompt_of_training_is_that_of_evaluation(toy, codec, data, tmp_path, monkeypatch):
    found = []
    for script in (rollout, grpo):
        args, tasks, agent, source = settings(script, monkeypatch, toy, data)
        engine = Scripted(codec, [ANSWER])
        _, _ = rollout.run(rollout.RolloutWorker(engine, codec, source, agent), tasks, 4)
        found.append(prompts(engine))
    assert found[0] == found[1]
    engine = Scripted(codec, [ANSWER])
    monkeypatch.setattr(rollout, "make_engine", lambda *given, **more: engine)
    argv = words_of(evaluation, toy, data, "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", argv)
    launch.run_main(evaluation.main)
    assert found[0] == prompts(engine)
    said = chat.decode(codec, found[0]["spoken"])
    assert "Hello there" in said and "Again" in said and "Goodbye" not in said
    assert "Subtitles:" not in chat.decode(codec, found[0]["mute"])


@pytest.mark.parametrize("text, wanted", [
    ("if a < b and c > d then stop", "if a < b and c > d then stop"), ("I <3 you", "I <3 you"),
    ("so a <b and c> d", "so a <b and c> d"), ("<me@x.org> wrote", "<me@x.org> wrote"),
    ("<i>one</i> <font color=\"#fff\" size='2'>two</font><br/>", "one two"),
    ("<c.yellow.bg_blue>one</c> <v Roger Bingham>two</v> <lang en>x</lang>", "one two x"),
    ("<00:00:01.500><c>one</c>", "one"), ("{\\an8}One\\NTwo", "One Two"),
    ("{\\pos(1,2)\\i1}One{\\i0}", "One"), ("{sic} C:\\new", "{sic} C:\\new")])
def test_markup_goes_and_text_stays(tmp_path, text, wanted):
    (tmp_path / "a.srt").write_text(f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n")
    assert [row for *_, row in data_py.read_subtitles(str(tmp_path / "a.srt"))] == [wanted]
