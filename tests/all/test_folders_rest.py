"""
More of run folders: filesystems that lack something, runs that come and go:
python -m pytest tests/all/test_folders_rest.py -q
"""
import errno
import fcntl
import itertools
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

import checkpoint
import launch
import runs
import sft


@pytest.fixture
def poor(monkeypatch):
    """As exFAT, SMB and some FUSE answer: with one error after the other, from call to call."""
    errors = itertools.cycle([errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])

    def refuse(*_, **__):
        number = next(errors)
        raise OSError(number, os.strerror(number))

    real = os.fsync
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fsync", lambda fd: refuse() if stat.S_ISDIR(os.fstat(fd).st_mode)
                        else real(fd))


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


def test_a_run_that_began_from_its_own_folder_goes_on(toy, tmp_path):
    """An older version let a run begin there: the same command must not lose it."""
    start = begun(toy, tmp_path / "begun")
    words = command("sft", toy, start, tmp_path / "run")
    assert run_script(*words).returncode == 0
    inside = shutil.move(start, tmp_path / "run" / "init")
    state = tmp_path / "run" / "last" / "state.json"
    content = json.loads(state.read_text().replace(json.dumps(str(start)), json.dumps(str(inside))))
    del content["own_crc32"]  # older versions wrote none
    state.write_text(json.dumps(content))
    done = run_script(*command("sft", toy, inside, tmp_path / "run", "--steps", 2))
    assert done.returncode == 0, done.stderr
    assert "done: 1 steps" in done.stdout
    again = run_script(*command("sft", toy, inside, tmp_path / "run", "--no-resume"))
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and os.path.isdir(inside)


@pytest.mark.parametrize("link", ["last", "best"])
def test_a_link_that_became_a_folder_is_refused_at_the_start(refused, toy, tmp_path, link):
    """As cp -rL copies a run: the first save could not replace it."""
    begun(toy, tmp_path / "run", ckpt="elsewhere")
    shutil.copytree(tmp_path / "run" / "last", tmp_path / "copy")
    (tmp_path / "run" / "last").unlink()
    shutil.move(tmp_path / "copy", tmp_path / "run" / link)
    why = refused("sft", toy / "init", tmp_path / "run", "--no-resume")
    assert f"run/{link} is a folder" in why and "move it elsewhere" in why
    assert runs.is_complete(str(tmp_path / "run" / link))


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
    """The file is removed at the end of a run: a run that had opened it must not hold a ghost."""
    script = f"""
import os, launch
launch.time.sleep = print
held = 0
while held < 60:
    try:
        launch.lock({str(tmp_path)!r})
    except launch.UserError:
        continue
    # Fails if another run is inside.
    inside = os.open({str(tmp_path / "inside")!r}, os.O_CREAT | os.O_EXCL)
    os.close(inside)
    os.remove({str(tmp_path / 'inside')!r})
    launch.unlock()
    held += 1
"""
    running = [subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE,
                                stdout=subprocess.DEVNULL, text=True) for _ in range(3)]
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert os.listdir(tmp_path) == []


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
    assert done.returncode == 0 and ".s.jsonl.lock" not in os.listdir(tmp_path), done.stderr
    done = run_script("eval.py", *common, "--out", tmp_path, "--shard", "0/2", reference=True)
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


@pytest.mark.parametrize("content", [b"step_000009", b"../x", b"\x00\xff", b"", b"x" * 999])
def test_a_file_that_names_no_checkpoint_is_none(tmp_path, content):
    (tmp_path / "last").write_bytes(content)
    for path in (tmp_path, tmp_path / "last"):
        with pytest.raises(launch.UserError, match="no config.json"):
            checkpoint.resolve_checkpoint(str(path))


def test_rollouts_of_a_run_are_not_deleted_by_an_update_from_them(toy, tmp_path):
    record = tmp_path / "run" / "rollouts" / "step_000000.rank0.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    with pytest.raises(launch.UserError, match="rank0.jsonl would be replaced, but it is an input"):
        runs.claim_run(str(tmp_path / "run"), [str(record)])


def test_a_run_saves_and_goes_on_without_links_and_modes(poor, monkeypatch, toy, tmp_path, capsys):
    out, val = tmp_path / "run", tmp_path / "val.jsonl"
    chats = (toy / "sft_val.jsonl").read_text().splitlines(keepends=True)
    val.write_text("".join(chats[:4]))  # every step evaluates
    for steps in (3, 4):
        words = command("sft", toy, toy / "init", out, "--val", val, "--video-root", toy,
                        "--eval-every", 1, "--lr", 0, "--muon-lr", 0, "--steps", steps)
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        sft.main()
    assert "done: 1 steps" in capsys.readouterr().out
    # At a rate of 0 the first loss stays the best one.
    assert (out / "best").read_text() == "step_000001\n"
    assert (out / "last").read_text() == "step_000004\n"
    kept = {"step_000001", "step_000003", "step_000004"}
    assert kept | {"best", "last"} <= set(os.listdir(out)) and "step_000002" not in os.listdir(out)
    for given, name in (("", 4), ("last", 4), ("best", 1), ("step_000003", 3)):
        found = checkpoint.resolve_checkpoint(os.path.join(out, given))
        assert found == str(out / f"step_{name:06d}")
    with pytest.raises(launch.UserError, match="lies in --out"):
        resumed(out, str(out / "best"))
    runs.clean_run(str(out), 0)
    assert not {"best", "last"} & set(os.listdir(out))
