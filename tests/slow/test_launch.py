"""
More of launch.py: ranks, GPUs, the allocator: python -m pytest tests/slow/test_launch.py -q
"""
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import launch

# ------------------------------------------------------------------------------------------------
# How a script begins and ends


@pytest.mark.parametrize("sign", ["nvidia-smi", "cuda build"])
def test_a_gpu_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, capsys, sign):
    """Nothing is trained on the CPU of a GPU machine by mistake."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.use_gpu() is False  # no sign of a GPU: the CPU is meant
    if sign == "nvidia-smi":
        (tmp_path / sign).write_text("#!/bin/sh")
        (tmp_path / sign).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    else:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(SystemExit) as end:
        launch.run_main(launch.start_process_group)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "make venv GPU=1" in said


@pytest.mark.parametrize("number, ends", [(signal.SIGTERM, False), (signal.SIGUSR1, False),
                                          (signal.SIGHUP, False), (signal.SIGINT, True)])
def test_a_second_ctrl_c_ends_the_process_at_once(number, ends):
    """torchrun passes a signal on to ranks that may have got it already. Ctrl-C twice is meant."""
    script = (f"import launch, os, signal\nsignal.signal({number}, signal.SIG_DFL)\n"  # of nohup
              f"asked = launch.stop_on_signal()\nos.kill(os.getpid(), {number})\n"
              f"assert asked()\nos.kill(os.getpid(), {number})\nprint('lives')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -number * ends and ("lives" in done.stdout) == (not ends)


@pytest.mark.parametrize("rank, saves", [({}, False), ({"RANK": "0"}, True)])  # torchrun's
def test_nohup_shields_a_process_alone_and_not_the_ranks_of_a_torchrun_that_ends(rank, saves):
    """torchrun ends at SIGHUP also under nohup, and passes it on."""
    script = ("import launch, os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
              "asked = launch.stop_on_signal()\nos.kill(os.getpid(), signal.SIGHUP)\n"
              "print(asked())")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **rank})
    assert done.stdout == f"{saves}\n", done.stderr
