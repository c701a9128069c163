"""
Tests of which module imports which: python -m pytest tests/slow/test_imports.py -q

Imports run downwards only, at the top of a file and inside of functions alike; those that answer
--help or open a page at once load no torch.
"""
import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

ORDER = ("launch rewards agent_tools video "
         "chat model engine plumbing.subtitles plumbing.data plumbing.endpoint plumbing.judge "
         "plumbing.qwen35 plumbing.checkpoint plumbing.log "
         "rollout toy sft grpo evaluation.answers evaluation.benchmarks "
         "evaluation.endpoint evaluation.frame_sources "
         "evaluation.protocol_loop evaluation.systems evaluation.scores "
         "evaluation.results eval tools.ask tools.pick tools bench").split()
FILES = sorted(path for folder in (".", "plumbing", "evaluation", "tools", "bench")
               for path in Path(ROOT, folder).glob("*.py"))


def place(name):
    """Dotted name -> its place in ORDER, None of what is not ours. Tools are one place:
    none imports another but those that ORDER names."""
    folder = name.partition(".")[0]
    found = [n for n in (name, folder) if n in ORDER]
    return ORDER.index(found[0]) if found else None


def imported(source):
    """Python text -> dotted names that it imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if place(name) is not None else node.module for name in whole}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert place(name) is not None, "a new file: where does it stand in ORDER?"
    upwards = {other for other in imported(path.read_text(encoding="utf-8"))
               if place(other) is not None and place(other) >= place(name)}
    assert not upwards


HELP = ("import runpy, sys, contextlib, io; sys.argv = [{0!r}, '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:\n"
        "    runpy.run_path({0!r}, run_name='__main__')\n"
        "assert '(default: ' in said.getvalue(), said.getvalue()")


@pytest.mark.process
@pytest.mark.parametrize("code", [
    "import launch", "import chat", "import engine", "import rollout",
    HELP.format("rollout.py"), HELP.format("eval.py")],
    ids=["launch", "chat", "engine", "rollout", "rollout --help", "eval --help"])  # fmt: skip
def test_quick_ones_load_no_torch(code):
    """Torch takes seconds to import, a help text is wanted now."""
    heavy = {"torch", "vllm", "transformers", "torchvision", "PIL", "av"}
    code += f"\nimport sys\nprint(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
