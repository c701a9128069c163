"""
More of the pages in docs/:
python -m pytest tests/slow/test_docs.py -q
"""
import os
import re
import subprocess
from pathlib import Path

from conftest import ROOT

import grpo


def test_the_slurm_file_starts_a_run_that_all_parsers_take(tmp_path):
    """With stubs for SLURM and torchrun; the flags go to the parsers of torchrun and grpo.py."""
    from torch.distributed.run import get_args_parser

    (text,) = re.findall(r"^```bash\n(#!.*?)^```", (Path(ROOT) / "docs" / "recipe.md").read_text(),
                         re.M | re.S)
    assert len(text.splitlines()) == 10
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    path = tmp_path / "path"
    path.mkdir()
    for name, body in (("srun", 'shift; exec "$@"'), ("scontrol", "echo node7; echo node8"),
                       ("torchrun", 'printf "%s\\n" "$@"')):
        (path / name).write_text(f"#!/bin/sh\n{body}\n")
        (path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "SLURM_NNODES": "4",
           "SLURM_JOB_NODELIST": "node[7-8]"}
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    launcher = get_args_parser().parse_args(done.stdout.splitlines())
    assert (launcher.nnodes, launcher.nproc_per_node, launcher.rdzv_endpoint) == (
        "4", "8", "node7:29500")
    assert launcher.shutdown_timeout == 900 and launcher.training_script == "grpo.py"
    flags = grpo.build_parser().parse_args(launcher.training_script_args)
    assert (flags.steps, flags.save_every, flags.replicas) == (54, 10, 4)
