"""
More of run folders: filesystems that lack something, runs that come and go:
python -m pytest tests/all/test_folders_rest.py -q
"""
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT, run_script
from test_folders import (
    HOLDER,
    begun,
    command,
    refused,  # noqa: F401
    resumed,
)

import launch
from plumbing import runs

# ------------------------------------------------------------------------------------------------
# The checkpoint that a run starts from


def test_neither_the_base_of_adapters_nor_a_bare_checkpoint_is_written_to(refused, toy, tmp_path):
    folder = begun(toy, tmp_path / "base_run")
    adapters = tmp_path / "adapters"
    done = run_script(*command("sft", toy, folder, adapters, "--lora", 2))
    assert done.returncode == 0, done.stderr
    assert "lies in --out" in refused("grpo", adapters, tmp_path / "base_run", "--no-resume")
    bare = shutil.copytree(toy / "init", tmp_path / "bare")
    assert "lies in --out" in refused("sft", bare, bare)
    assert "args.json" not in os.listdir(bare)


# ------------------------------------------------------------------------------------------------
# A folder that another run writes to


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_said_once(tmp_path, monkeypatch, capsys, number):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", none)
    launch.lock(str(tmp_path))
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "no locks" in said.err and not said.out


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


def test_two_rollouts_or_evaluations_of_one_name_are_refused(toy, tmp_path):
    """Other names in the folder, and other shards of an evaluation, are other runs."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(out=str(tmp_path)).replace(
            ")\nif", ", '.r.jsonl.lock'); launch.lock(" + repr(str(tmp_path)) + ")\nif", 1)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, process_group=0)
    assert held.stdout.readline() == "held\n"
    common = ("--preset", "toy", "--ckpt", toy / "init", "--data", toy / "eval.jsonl", "--limit", 1,
              "--frames", 4)
    for script, *flags in (("rollout.py", "--out", tmp_path / "r.jsonl"),
                           ("eval.py", "--out", tmp_path, "--quiet")):
        done = run_script(script, *common, *flags, reference=True)
        assert done.returncode == 2 and "another run writes there" in done.stderr, done.stderr
    done = run_script("rollout.py", *common, "--out", tmp_path / "s.jsonl", reference=True)
    assert done.returncode == 0, done.stderr
    os.killpg(held.pid, signal.SIGKILL)
    held.wait()


# ------------------------------------------------------------------------------------------------
# A checkpoint with damaged bytes


def test_a_checkpoint_without_checksums_goes_on(toy, tmp_path):
    """As older versions wrote it."""
    folder = begun(toy, tmp_path / "run", ckpt="c")
    state = json.loads((folder / "state.json").read_text())
    for added in ("crc32", "own_crc32"):
        del state[added]
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    assert resumed(tmp_path / "run")[0] == str(folder)


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


def refused_with(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_filesystem_without_modes_or_the_fsync_of_a_folder_is_enough(monkeypatch, tmp_path):
    """Linux answers EINVAL for a folder that its filesystem cannot sync."""
    real = os.fsync
    monkeypatch.setattr(os, "chmod", refused_with(errno.EPERM))
    monkeypatch.setattr(os, "fsync", lambda fd: refused_with(errno.EINVAL)()
                        if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd))
    with runs.atomic_folder(str(tmp_path / "c")) as folder:
        launch.write_atomic(os.path.join(folder, "x"), "y")
    assert (tmp_path / "c" / "x").read_text() == "y" and os.listdir(tmp_path) == ["c"]
    monkeypatch.setattr(os, "fsync", refused_with(errno.EIO))
    with pytest.raises(OSError), runs.atomic_folder(str(tmp_path / "d")) as folder:
        (tmp_path / "z").write_text("")
        os.link(tmp_path / "z", os.path.join(folder, "z"))
    assert sorted(os.listdir(tmp_path)) == ["c", "z"]
