"""
Tests of tools/draft.py: python -m pytest tests/slow/test_draft.py -q

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
# Question and answer that the scripted model writes about each of eight windows, its answer without
# and with the window, why the draft is left out.
SCRIPT = [("Which colour is the hat?", "blue", "A cat?", "blue", None),
          ("Which colour is the car?", "B. green", "red", "It is green.", None),
          ("Which colour is grass?", "green", "green", "green", "right without the video"),
          ("Which colour is the bag?", "white", "red", "red", "wrong with the window"),
          ("What is red at 12 s?", "red", "", "", "names a time or a part"),
          ("What does this clip show?", "red", "", "", "names a time or a part"),
          ("Which colour is it?", "brown", "", "", "not the JSON that was asked for"),
          ("Which one is it?", "E", "", "", "not the JSON that was asked for")]


class Model:
    """The script as a server's reply about a video of 64 s. asked: (kind, number of the window)."""

    def __init__(self, fails=()):
        self.fails, self.asked = fails, []

    def __call__(self, body):
        parts = body["messages"][0]["content"]
        text = parts if isinstance(parts, str) else parts[-1]["text"]
        if "Write one question" in text:
            first = float(re.fullmatch("<(.*) seconds>", parts[0]["text"])[1])
            number = int((first + 0.6) // 8)  # a frame on display then; a window in each 8 s
            self.asked.append(("write", number))
            if number in self.fails:
                return 400
            question, answer, *_ = SCRIPT[number]
            written = {"question": question, "answer": answer, "options": OPTIONS}
            return f"<think>{{}}</think> Sure: ```json\n{json.dumps(written)}\n```"
        number = next(n for n, row in enumerate(SCRIPT) if row[0] in text)
        blind = isinstance(parts, str)
        assert text.startswith(draft.BLIND) == blind
        self.asked.append(("blind" if blind else "seen", number))
        said = SCRIPT[number][2 if blind else 3]
        letter = next((line[0] for line in text.split("\n")  # the options were shuffled
                       if line[1:3] == ". " and line[3:] in said.rstrip(".").split()), said)
        return f"<answer>{letter}</answer>"


@pytest.fixture
def run(toy, tmp_path, start):
    """run(model) -> (exit code, what it printed), about one video."""
    (tmp_path / "deep").mkdir()
    shutil.copy(sorted((toy / "videos").glob("*.mp4"))[0], tmp_path / "deep" / "a.mp4")

    def run(model):
        with Server(model) as server:
            code, out, err = start(draft, tmp_path, "--base-url", server.url, "--model", "m",
                                   "--out", tmp_path / "tasks.jsonl", "--questions", 8)
        return code, out + err

    return run


def test_only_drafts_that_need_their_window_are_kept(tmp_path, run):
    code, out = run(model := Model())
    assert code == 0 and "8 drafts, 2 kept -> " in out
    asked = {"write": range(8), "blind": range(4), "seen": (0, 1, 3)}
    assert sorted(model.asked) == sorted((kind, n) for kind, ns in asked.items() for n in ns)
    rows = sorted(rows_of(tmp_path / "tasks.drafts.jsonl"), key=lambda row: row["id"])
    assert [row["left_out"] for row in rows] == [row[-1] for row in SCRIPT]
    tasks = read_tasks(str(tmp_path / "tasks.jsonl"))
    assert [task["id"] for task in tasks] == ["deep/a.mp4/0", "deep/a.mp4/1"]
    for n, row in enumerate(rows):
        ((start, end),) = row["task"]["evidence"]
        assert 8 * n <= start + 0.01 < end <= 8 * n + 8.01
    for task, answer in zip(tasks, ("blue", "green")):
        assert task["video"] == "deep/a.mp4" and sorted(task["options"]) == sorted(OPTIONS)
        assert task["options"]["ABCD".index(task["answer"])] == answer


def test_the_same_command_goes_on(tmp_path, run):
    """A text that the server refuses is left out for good, and no draft is asked for twice."""
    drafts = tmp_path / "tasks.drafts.jsonl"
    assert run(Model(fails=(0,)))[0] == 0
    # A refused text first; drafts end in any order.
    rows = sorted(rows_of(drafts), key=lambda row: row["id"])
    assert "400" in rows[0]["left_out"]
    (tmp_path / "tasks.jsonl").unlink()  # as if the stop had come after five drafts
    drafts.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    assert run(model := Model())[0] == 0
    assert sorted(rows_of(drafts), key=lambda row: row["id"]) == rows
    assert sorted(number for kind, number in model.asked if kind == "write") == [5, 6, 7]
    code, said = run(Model())
    assert code == 2 and "give a new file" in said  # nothing replaces what a person may correct
