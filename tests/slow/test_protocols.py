"""
Systems of the paper's table, each played by a script:
python -m pytest tests/slow/test_protocols.py -q
"""
import json
import os
import sys

import pytest
from conftest import run_script
from scripted import Scripted, Server
from test_protocols import TASK
from test_video import write

import eval as evaluation
import rollout
from evaluation import results, systems


@pytest.fixture
def play(toy, source, codec, monkeypatch):
    """play(flags, *script) -> episode, requests, graded record."""
    def play(flags, *script, task=TASK, ids=False):
        given = ["eval.py", "--data", str(toy / "eval.jsonl"), "--engine", "openai", "--base-url",
                 "http://x", "--model", "m", "--max-pixels", "4096", "--set", "min_pixels=1024",
                 *flags.split()]
        monkeypatch.setattr(sys, "argv", given)
        args = evaluation.parse_args()
        modes, args.tools = args.tools, True
        agent, _ = rollout.agent_settings(args, str(toy / "eval.jsonl"))
        agent.tools = modes == ["on"]
        source.min_pixels, source.max_pixels = args.min_pixels, args.max_pixels
        system, _ = systems.make_system(args)
        engine = Scripted(codec if ids else None, list(script), "seen at 00:00:10", at_once=True)
        worker = rollout.RolloutWorker(engine, engine.codec, systems.source_of(source, args), agent)
        (episode,) = systems.run(worker, [task], system, args.frames[0])
        record = results.record_of(episode, "d", args.frames[0], "on", args)
        return episode, engine.requests, record

    return play


# ------------------------------------------------------------------------------------------------
# All of them


@pytest.mark.parametrize("file, text, wanted", [
    ("t.json", "\n", "t.json: "),  # its disk was full
    ("t.json", '{"User": "{question}"}', "has the texts user"),
    ("t.json", '{"user": "Question: {options}"}', "does not hold its question"),
    ("t.json", '{"user": "{question} {options} Put it in \\\\boxed{answer}, as {}."}', None)])
def test_a_publishers_text_without_the_question_is_refused(toy, tmp_path, file, text, wanted):
    """Sent, it would get answers to no question, and a headline."""
    (tmp_path / file.partition(":")[0]).write_text(text)
    task = {"id": "q", "video": "videos/" + os.listdir(toy / "videos")[0], "type": "mcq",
            "question": "What {place} is it?", "options": ["Fire", "Rain"], "answer": "B"}
    (tmp_path / "d.jsonl").write_text(json.dumps(task) + "\n")
    with Server("<answer>B</answer>") as server:
        done = run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "m",
                          "--data", tmp_path / "d.jsonl", "--video-root", toy, "--frames", 2,
                          "--protocol", "rewatch-r1", "--prompts", tmp_path / file,
                          "--out", tmp_path / "out")
    if wanted:
        assert done.returncode == 2 and wanted in done.stderr and not server.asked
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0 and "Rain" in json.dumps(server.asked), done.stderr


def test_settings_of_the_overview_and_of_the_user_turn(play, source, tmp_path):
    source.root = str(tmp_path)
    write(tmp_path / "v.mp4", 4, size=(64, 64))
    (tmp_path / "u.json").write_text('{"user": "Look: {question} {options}"}')
    seen = {}
    for setting in ("--set top_p=1", f"--prompts {tmp_path}/u.json"):
        _, (request,), _ = play(f"--protocol direct --frames 2 {setting}",
                                "<answer>B</answer>", task={**TASK, "video": "v.mp4"})
        (item, words), height = request.messages[-1]["content"], request.frames[0].images.shape[1]
        seen[setting.split()[0]] = item["stamp"], height, words["text"][:5]
    assert seen == {"--set": (None, 64, "Which"), "--prompts": (None, 64, "Look:")}


# ------------------------------------------------------------------------------------------------
# Parsers, and disks that go away


@pytest.mark.parametrize("parse", [systems.zoom_call, systems.conan_calls])
@pytest.mark.parametrize("text", ["<clip>" * 30000, "<video_zoom>" * 30000 + "</video_zoom>",
                                  "</clip><clip>", "\0",
                                  '<video_zoom>{"segment": [NaN, Infinity], "fps": 1e999}'
                                  "</video_zoom>", "<clip>99999999999:1-2,-,--</clip>"])
def test_no_text_makes_a_parser_raise_or_hang(parse, text):
    for call in parse(text):
        assert call.error or call.name
