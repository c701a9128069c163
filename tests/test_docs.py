"""
Tests of the changes that docs/hacking.md shows: python -m pytest tests/test_docs.py -q

Its diffs are applied to the scripts as they stand.
"""
import os
import re

import pytest
from conftest import ROOT


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
