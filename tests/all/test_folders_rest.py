"""
More of run folders: filesystems that lack something, runs that come and go:
python -m pytest tests/all/test_folders_rest.py -q
"""
import os
import stat
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT
from test_folders import (
    refused,  # noqa: F401
    )

import launch
from plumbing import runs

# ------------------------------------------------------------------------------------------------
# A folder that another run writes to


def test_runs_that_come_and_go_never_hold_a_folder_together(tmp_path):
    """The file stays at the end of a run, and the next one locks the same file."""
    script = f"""
import os, launch
launch.time.sleep = print
turns = 0
while turns < 60:
    try:
        launch.lock({str(tmp_path)!r})
    except launch.UserError:
        continue
    # Fails if another run is inside.
    inside = os.open({str(tmp_path / "inside")!r}, os.O_CREAT | os.O_EXCL)
    os.close(inside)
    os.remove({str(tmp_path / 'inside')!r})
    launch.unlock()
    turns += 1
"""
    running = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE,
                                stdout=subprocess.DEVNULL, text=True) for _ in range(3)]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert os.listdir(tmp_path) == [".lock"]


# ------------------------------------------------------------------------------------------------
# Filesystems that lack links, modes, or the fsync of a folder


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002, 0o077], ids=oct)
def test_files_of_a_checkpoint_have_the_modes_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with runs.atomic_folder(str(tmp_path / "c")) as folder:
            handle, _ = tempfile.mkstemp(dir=folder)  # 0600, as safetensors writes
            os.close(handle)
            os.mkdir(os.path.join(folder, "train_state"))
            open(os.path.join(folder, "train_state", "x"), "w").close()
    finally:
        os.umask(before)
    for path in (tmp_path / "c", *(tmp_path / "c").rglob("*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_rollouts_of_a_run_are_not_deleted_by_an_update_from_them(toy, tmp_path):
    record = tmp_path / "run" / "rollouts" / "step_000000.rank0.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    with pytest.raises(launch.UserError, match="rank0.jsonl would be replaced, but it is an input"):
        runs.claim_run(str(tmp_path / "run"), [str(record)])
