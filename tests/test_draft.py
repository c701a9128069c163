"""
Tests of tools/draft.py: python -m pytest tests/test_draft.py -q

A server speaks from a script, by the window that it is shown, so the drafts that are right are
known.
"""
import json
import re
import shutil

import pytest
from fixtures import rows_of
from scripted import Server

from plumbing.data import read_tasks
from tools import draft

OPTIONS = ["red", "green", "blue", "white"]
# What the scripted model writes about each of eight windows; what it answers without and with them.
SCRIPT = [({"question": "Which colour is the hat?", "answer": "blue"}, "A cat?", "blue"),
          ({"question": "Which colour is the car?", "answer": "B. green"}, "red", "It is green."),
          ({"question": "Which colour is grass?", "answer": "green"}, "green", "green"),
          ({"question": "Which colour is the bag?", "answer": "white"}, "red", "red"),
          ({"question": "What is red at 12 s?", "answer": "red"}, "", ""),
          ({"question": "What does this clip show?", "answer": "red"}, "", ""),
          ({"question": "Which colour is it?", "answer": "brown"}, "", ""), (None, "", "")]
REASONS = [None, None, "right without the video", "wrong with the window",
           "names a time or a part", "names a time or a part",
           "not the JSON that was asked for", "not the JSON that was asked for"]


class Model:
    """The script as a server's reply about a video of 64 s. asked: (kind, number of the window)."""

    def __init__(self, fails=()):
        self.fails, self.asked = fails, []

    def __call__(self, body):
        (message,) = body["messages"]
        parts = message["content"]
        text = parts if isinstance(parts, str) else parts[-1]["text"]
        if "Write one question" in text:
            first = float(re.fullmatch("<(.*) seconds>", parts[0]["text"])[1])
            number = int((first + 0.6) // 8)  # a frame on display then; a window in each 8 s
            self.asked.append(("write", number))
            if number in self.fails:
                return 400
            written = SCRIPT[number][0]
            text = "```json\n" + json.dumps({**(written or {}), "options": OPTIONS}) + "\n```"
            return "<think>{}</think> Sure: " + ("nothing" if written is None else text)
        number = next(n for n, (row, *_) in enumerate(SCRIPT) if row and row["question"] in text)
        blind = isinstance(parts, str)
        assert text.startswith(draft.BLIND) == blind
        self.asked.append(("blind" if blind else "seen", number))
        said = SCRIPT[number][1 if blind else 2]
        letter = next((line[0] for line in text.split("\n")  # the options were shuffled
                       if line[1:3] == ". " and line[3:] in said.rstrip(".").split()), said)
        return f"<answer>{letter}</answer>"


@pytest.fixture
def films(toy, tmp_path):
    (tmp_path / "deep").mkdir()
    shutil.copy(sorted((toy / "videos").glob("*.mp4"))[0], tmp_path / "deep" / "a.mp4")
    return tmp_path


@pytest.fixture
def run(films, start):
    """run(url, *flags) -> (exit code, what it printed)"""
    def run(url, *flags):
        code, out, err = start(draft, films, "--base-url", url, "--model", "m", "--out",
                               films / "tasks.jsonl", "--questions", 8, "--seconds", 3, *flags)
        return code, out + err

    return run


def test_only_drafts_that_need_their_window_are_kept(films, run):
    with Server(model := Model()) as server:
        code, out = run(server.url)
        assert code == 0
    asked = {"write": range(8), "blind": range(4), "seen": (0, 1, 3)}
    assert sorted(model.asked) == sorted((kind, n) for kind, ns in asked.items() for n in ns)
    rows = sorted(rows_of(films / "tasks.drafts.jsonl"), key=lambda row: row["id"])
    assert [row["left_out"] for row in rows] == REASONS
    tasks = read_tasks(str(films / "tasks.jsonl"))
    assert [task["id"] for task in tasks] == ["deep/a.mp4/0", "deep/a.mp4/1"]
    for n, row in enumerate(rows):
        ((start, end),) = row["task"]["evidence"]
        assert 8 * n <= start + 0.01 < end <= 8 * n + 8.01 and end - start <= 3.01
    for task, answer in zip(tasks, ("blue", "green")):
        assert task["video"] == "deep/a.mp4" and sorted(task["options"]) == sorted(OPTIONS)
        assert task["options"]["ABCD".index(task["answer"])] == answer
    assert "8 drafts, 2 kept -> " in out and "deep/a.mp4/4: names a time or a part" in out
    page = (films / "tasks.html").read_text()
    assert json.loads(re.search(r'json">(.*?)</script>', page)[1]) == rows


@pytest.mark.process  # two runs
def test_the_same_command_goes_on(films, run):
    """A text that the server refuses is left out for good, and no draft is asked for twice."""
    with Server(Model(fails=(0,))) as server:
        assert run(server.url)[0] == 0
    rows = rows_of(films / "tasks.drafts.jsonl")
    (refused,) = [row for row in rows if row["id"] == "deep/a.mp4/0"]
    assert "400" in refused["left_out"]
    rows.sort(key=lambda row: row["left_out"] is None)  # drafts end in any order
    (films / "tasks.jsonl").unlink()  # as if the stop had come after five drafts
    (films / "tasks.drafts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:5]))
    with Server(model := Model()) as server:
        assert run(server.url)[0] == 0
    assert sorted(rows_of(films / "tasks.drafts.jsonl"), key=str) == sorted(rows, key=str)
    written = [number for kind, number in model.asked if kind == "write"]
    assert sorted(written) == sorted(int(row["id"][-1]) for row in rows[5:])
    with Server(Model()) as server:
        code, said = run(server.url)
    assert code == 2 and "give a new file" in said  # nothing replaces what a person may correct
