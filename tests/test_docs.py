"""
Tests of what the pages in docs/ tell a reader to run: python -m pytest tests/test_docs.py -q
"""
import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import data
import rollout
import video


def block(page, holds):
    """The one Python block of a page that holds this text."""
    with open(os.path.join(ROOT, "docs", page)) as file:
        blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)
    (found,) = [text for text in blocks if holds in text]
    return found


def test_the_ten_films_are_tasks_that_can_be_trained_on(tmp_path, codec):
    done = subprocess.run([sys.executable, "-c", block("your-own-data.md", "films/")],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tasks = data.read_tasks(str(tmp_path / "tasks.jsonl"))
    assert collections.Counter(task["type"] for task in tasks) == {
        "mcq": 10, "list": 10, "grounding": 10}
    source = rollout.Source(str(tmp_path), video.FrameCache())
    agent = rollout.Agent(**{**rollout.toy_lengths(), "context": 4096})
    assert rollout.preflight(codec, tasks, agent, source, "gated") == []
    if not shutil.which("ffprobe"):
        pytest.skip("ffprobe is not installed: the films' lengths are not compared with its own")
    lengths = {subprocess.run(["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of",
                               "csv=p=0", tmp_path / "films" / f"{n}.mp4"], capture_output=True,
                              text=True).stdout for n in range(10)}
    assert lengths == {"64.000000\n"}


def test_the_question_from_python_is_answered(toy, tmp_path, monkeypatch, capsys):
    """As written, but for the folders of the demo."""
    text = block("hacking.md", "import checkpoint, chat, rollout, video")
    assert len(text.splitlines()) < 15
    text = text.replace("out/demo/grpo", str(toy / "init")).replace("out/demo/toy", str(toy))
    names = {}
    exec(compile(text.replace("engine.close()", ""), "hacking.md", "exec"), names)
    try:
        assert names["episode"].status == "ok" and names["episode"].turns
        assert capsys.readouterr().out.startswith("[")
    finally:
        names["engine"].close()


def test_the_changes_of_the_guide_fit_the_scripts():
    """docs/hacking.md shows each change as a diff: every line that it takes away or keeps stands in
    the script, in that order and together."""
    text = (Path(ROOT) / "docs" / "hacking.md").read_text()
    hunks = 0
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^(?=# \w+\.py$)", diff, flags=re.MULTILINE)[1:]:
            name, _, rest = part.removeprefix("# ").partition("\n")
            script = (Path(ROOT) / name).read_text()
            for hunk in re.split(r"^@@.*\n", rest, flags=re.MULTILINE)[1:]:
                old = "\n".join(line[1:] for line in hunk.strip("\n").split("\n")
                                if not line.startswith("+"))
                assert old in script, f"{name}:\n{old}"
                hunks += 1
    assert hunks >= 10
