"""
Texts that a model or a user may write: python -m pytest tests/slow/test_protocols.py -q
"""
import json
import os

import pytest
from conftest import run_script
from scripted import Server

from evaluation import systems


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
