"""
Tests of what the project promises about its own size: python -m pytest tests/test_size.py -q

A GRPO step is read in five files, each down to its ruled line. What stands below is for those who
change loading, saving or reading of answers, not for those who want to know how a step works.
"""
import ast
import os
import re

import pytest
from conftest import ROOT

import grpo

STEP = ("grpo.py", "rollout.py", "video.py", "rewards.py", "model.py")


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def above(name):
    """Lines of a script above its ruled line."""
    lines = read(name).splitlines()
    (ruled,) = [n for n, line in enumerate(lines) if line.startswith("# ---- below: ")]
    return ruled


def test_a_step_is_read_in_five_files_and_2500_lines():
    assert sum(map(above, STEP)) <= 2500


@pytest.mark.parametrize("name", STEP)
def test_the_readme_says_how_far_to_read(name):
    row = rf"^\| \d \| \[`{name}`\]\({name}\) \| 1-(\d+) \|"
    (last,) = re.findall(row, read("README.md"), re.M)
    assert int(last) == above(name)


def test_the_loop_is_read_at_a_glance():
    functions = {node.name: node for node in ast.parse(read("grpo.py")).body
                 if isinstance(node, ast.FunctionDef)}
    main = functions["main"]
    assert main.end_lineno - main.lineno < 90
    nested = [inner.name for node in functions.values() for inner in ast.walk(node)
              if isinstance(inner, ast.FunctionDef) and inner is not node]
    assert nested == []


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 200


def test_the_version_is_one():
    cited = re.search(r'^version: "?([\d.]+)"?$', read("CITATION.cff"), re.M)[1]
    assert cited == re.search(r"^## \[?([\d.]+)", read("CHANGELOG.md"), re.M)[1]


def test_flags_stay_few():
    """Each has to earn its place."""
    assert len(grpo.build_parser()._actions) - 1 <= 54  # one is --help
