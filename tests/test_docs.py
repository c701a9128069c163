"""
Tests of the changes that docs/hacking.md shows: python -m pytest tests/test_docs.py -q

Its diffs are applied to the scripts as they stand.
"""
import json
import os
import re
import sys
from types import ModuleType

import pytest
from conftest import ROOT
from scripted import ANSWER, Scripted, call, play_one, text_of

import rollout
import video


def changed(section):
    """Section of docs/hacking.md -> {script: its text after the diffs of the section}."""
    guide = open(os.path.join(ROOT, "docs", "hacking.md"), encoding="utf-8").read()
    (text,) = [part for part in guide.split("\n## ") if part.startswith(section)]
    scripts = {}
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        name = diff.partition("\n")[0].removeprefix("# ")
        script = scripts.get(name) or open(os.path.join(ROOT, name), encoding="utf-8").read()
        for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
            lines = hunk.strip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            assert script.count(old) == 1, f"{name}:\n{old}"
            script = script.replace(old, new)
        scripts[name] = script
    return scripts


@pytest.mark.parametrize("section, names", [
    ("A new reward", ["rewards.py"]), ("RLOO", ["rewards.py"]),
    ("A second tool", ["agent_tools.py", "video.py"])], ids=lambda value: value[:9])
def test_the_changes_of_the_guide_fit_the_scripts(section, names):
    scripts = changed(section)
    assert list(scripts) == names
    for name, text in scripts.items():
        assert compile(text, name, "exec") and max(map(len, text.split("\n"))) <= 100


def test_a_second_tool_is_one_class_and_one_function(codec, tasks, source, monkeypatch):
    """zoom_frame, played: declared, parsed, its picture in the main context, recorded, paid."""
    for name, text in changed("A second tool").items():
        module = ModuleType(f"changed {name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
        module.__file__ = os.path.join(ROOT, name)
        exec(compile(text, name, "exec"), vars(module))
    monkeypatch.setattr(video, "load", sys.modules["changed video.py"].load)
    monkeypatch.setattr(rollout, "TOOLS", sys.modules["changed agent_tools.py"].TOOLS)

    def zoom(**arguments):
        body = json.dumps({"name": "zoom_frame", "arguments": arguments})
        return f"<tool_call>{body}</tool_call>"

    text = "Look.\n</think>\n" + call(0, 8) + zoom(time="0:10", x=500, y=250)
    engine = Scripted(codec, [text + zoom(time=99, x=0, y=0) + zoom(time=1, x=2000, y=0), ANSWER])
    episode = play_one(engine, tasks, source)
    opening = text_of(codec, episode.context.ids[:episode.spans[0][0]])
    assert '"name": "zoom_frame"' in opening
    assert [c["status"] for c in episode.calls] == ["ok", "ok", "error", "error"]
    # The window was summarised by a sub-agent; the zoomed picture stands in the main context.
    assert len(engine.subs()) == 1 and len(episode.context.items) == 2
    item = episode.context.items[1]
    assert item.seconds == [10.0] and item.spec["zoom"] == [500, 250]
    whole = source.load({"video": tasks[0]["video"], "times": [10.0]})
    frames = source.load(item.spec)
    assert frames.images.shape == whole.images.shape and frames.key != whole.key
    assert episode.reward["tool"] >= 0.3
