"""
Tests of inputs that no reader expects: python -m pytest tests/test_edges.py -q

Each ends in one line and exit code 2, or is a counted outcome: no traceback, and nothing waits.
"""
import json
import os
import shutil

import pytest
from conftest import run_script


def one_line(done):
    """The line on stderr that a refused run ends with."""
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("script", ["rollout", "eval", "grpo"])
def test_a_context_beyond_the_positions_of_the_checkpoint_is_refused(toy, tmp_path, script):
    """The paper's --context on the toy's checkpoint: --preset toy was forgotten. vLLM would say so
    in 35 lines, after it has loaded."""
    data = {"rollout": "eval", "eval": "eval", "grpo": "rl"}[script]
    flags = ("--ckpt", toy / "init", "--data", toy / f"{data}.jsonl", "--out", tmp_path / "out")
    said = one_line(run_script(f"{script}.py", *flags, timeout=100))
    assert "--context 32768" in said and "4096 positions" in said and "--preset toy" in said
