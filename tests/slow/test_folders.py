"""
Tests of run folders: python -m pytest tests/slow/test_folders.py -q

Nothing is overwritten: the checkpoint that a run starts from, a folder that another run writes to,
a checkpoint with damaged bytes, a filesystem that lacks links or locks.
"""
import argparse
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_script
from reference import make_engine
from scripted import LIVE

import eval as evaluation
import grpo
import launch
import rollout
import sft
from plumbing import checkpoint, runs
from tools import view


def command(script, toy, ckpt, out, *flags):
    """Words of a short run on the toy world."""
    data = {"grpo": ("--data", toy / "rl.jsonl", *LIVE),
            "sft": ("--data", toy / "sft.jsonl", "--batch-size", 4)}[script]
    return [f"{script}.py", "--preset", "toy", "--ckpt", ckpt, "--out", out, "--video-root", toy,
            "--save-every", 1, "--steps", 1, *data, *flags]


@pytest.fixture
def refused(monkeypatch, toy):
    """refused(script, ckpt, out, *flags) -> the line that main() ends with."""
    def refused(script, *given):
        monkeypatch.setattr(sys, "argv", list(map(str, command(script, toy, *given))))
        with pytest.raises(launch.UserError) as error:
            {"grpo": grpo, "sft": sft}[script].main()
        return str(error.value)

    return refused


def begun(toy, out, **args):
    """A run folder with a whole checkpoint in it, as a stage leaves it."""
    folder = out / "step_000001"
    shutil.copytree(toy / "init", folder)
    sums = runs.checksums(str(folder), runs.files_in(folder))
    runs.mark_complete(str(folder), {"step": 1, "args": args}, sums)
    runs.replace_link(str(out / "last"), str(folder))
    return folder


# ------------------------------------------------------------------------------------------------
# The checkpoint that a run starts from


@pytest.mark.parametrize("script, given, resume", [
    ("grpo", "", ()), ("sft", "step_000001", ("--resume",)), ("sft", "../alias", ("--no-resume",)),
    ("grpo", "last", ("--no-resume",)), ("sft", "", ("--resume",)), ("sft", "", ("--no-resume",)),
    ("sft", "last", ("--no-resume",)), ("sft", "../alias/last", ()), ("sft", "", ())], ids=str)
def test_a_run_does_not_delete_the_checkpoint_it_starts_from(
        refused, toy, tmp_path, script, given, resume):
    folder = begun(toy, tmp_path / "run", ckpt="elsewhere")
    (tmp_path / "alias").symlink_to("run")
    why = refused(script, os.path.join(tmp_path, "run", given), tmp_path / "run", *resume)
    assert "--ckpt" in why and "lies in --out" in why and "another --out" in why
    assert "--no-resume" not in why and "\n" not in why and runs.is_complete(str(folder))
    assert set(os.listdir(folder.parent)) - {"rollouts", ".lock"} == {"last", "step_000001"}


def test_a_run_that_began_from_a_checkpoint_in_its_folder_goes_on(toy, tmp_path):
    """Versions before the refusal let it begin. At a first start it is refused."""
    start = str(shutil.copytree(toy / "init", tmp_path / "run" / "start"))
    args = SimpleNamespace(ckpt=start)
    with pytest.raises(launch.UserError, match="lies in --out"):
        runs.resume_point(str(tmp_path / "run"), args, None)
    folder = begun(toy, tmp_path / "run", ckpt=start)
    assert runs.resume_point(str(tmp_path / "run"), args, None)[0] == str(folder)
    with pytest.raises(launch.UserError, match="lies in --out"):
        runs.resume_point(str(tmp_path / "run"), args, False)


# ------------------------------------------------------------------------------------------------
# A folder that another run writes to


HOLDER = """
import os, sys, time
import launch
launch.lock({out!r})
if os.fork() == 0:  # as a decode worker or an engine is: it outlives the run
    os.close(1)
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """-> the process of a run that holds tmp_path/run; its forked child outlives it."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDER.format(out=str(tmp_path / "run"))],
                               stdout=subprocess.PIPE, text=True, cwd=ROOT, process_group=0)
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_run_in_one_folder_is_refused_and_told_who_is_there(holder, start, toy, tmp_path):
    out, told = tmp_path / "run", f"pid {holder.pid} on {socket.gethostname()} since "
    for script in (grpo, sft):
        code, _, err = start(script, *command(script.__name__, toy, toy / "init", out)[1:])
        assert code == 2 and told in err and err.count("\n") == 1, err
    words = command("sft", toy, toy / "init", out)
    done = run_script(*words, ranks=2, timeout=60)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1
    assert "step_000001" not in os.listdir(out)
    holder.kill()
    holder.wait()
    done = run_script(*words, ranks=2)  # it works with two ranks, and the lock ends with the run
    assert done.returncode == 0, done.stderr
    launch.lock(str(out))
    launch.unlock()


def test_the_lock_ends_with_its_run_and_not_with_the_children(holder, tmp_path):
    with pytest.raises(launch.UserError, match="another run writes there"):
        launch.lock(str(tmp_path / "run"))
    holder.kill()  # SIGKILL; the forked child still lives
    holder.wait()
    launch.lock(str(tmp_path / "run"))
    launch.lock(str(tmp_path / "run"))  # a second main() of one process
    again = [sys.executable, "-c", f"import launch; launch.lock({str(tmp_path / 'run')!r})"]
    assert subprocess.run(again, cwd=ROOT, capture_output=True).returncode == 1
    launch.unlock()
    assert subprocess.run(again, cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("script, out, words", [
    (evaluation, "tasks.jsonl", "--data tasks.jsonl --out . --frames 2"),
    (evaluation, "log.jsonl", "--data other.jsonl --out . --frames 2"),
    (grpo, "log.jsonl", "--data other.jsonl --val log.jsonl --out ."),
    (rollout, "config.json", "--data other.jsonl --out config.json"),
    (rollout, "tasks.jsonl", "--data tasks.jsonl --out alias.jsonl"),
    (grpo, "rollouts/r.jsonl", "--data rollouts/r.jsonl --out ."),
    (sft, "log.jsonl", "--data log.jsonl --out ."), (view, "r.jsonl", "r.jsonl --out r.jsonl")])
def test_no_script_replaces_a_file_that_it_reads(
        start, toy, tmp_path, monkeypatch, script, out, words):
    monkeypatch.setattr(rollout, "make_engine", make_engine)
    (tmp_path / "rollouts").mkdir()
    for name in {out, "other.jsonl"}:
        shutil.copy(toy / ("sft.jsonl" if script is sft else "eval.jsonl"), tmp_path / name)
    (tmp_path / "alias.jsonl").symlink_to(tmp_path / "tasks.jsonl")
    before = (tmp_path / out).read_bytes()
    words = [w if w.startswith("-") or w == "2" else tmp_path / w for w in words.split()]
    common = ("--preset", "toy", "--ckpt", toy / "init", "--video-root", toy)
    code, _, err = start(script, *words, *common * (script is not view))
    assert code == 2 and err.count("\n") == 1, err
    assert script is not rollout or out == "config.json" or "it is an input" in err
    assert (tmp_path / out).read_bytes() == before


# ------------------------------------------------------------------------------------------------
# A checkpoint with damaged bytes


def flip(path):
    """Flips one bit in the middle of a file, whose size stays."""
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))


def resumed(out, args):
    return runs.resume_point(str(out), argparse.Namespace(**args), None)


def test_a_checkpoint_with_a_flipped_bit_is_passed_over(toy, tmp_path, capsys):
    """Every file of a checkpoint that two ranks have saved, the list of files itself included."""
    words = command("sft", toy, toy / "init", tmp_path / "run", "--steps", 2, "--optimizer",
                    "adamw", "--set", "dp_replicate=1")
    done = run_script(*words, ranks=2)
    assert done.returncode == 0, done.stderr
    older, newer = (tmp_path / "run" / f"step_{n:06d}" for n in (1, 2))
    listed = json.loads((newer / "state.json").read_text())
    assert set(listed["crc32"]) == set(listed["files"]) and len(listed["files"]) > 8
    for name, number in listed["crc32"].items():  # gzip's own sum is the oracle
        packed = subprocess.run(["gzip", "-c"], input=(newer / name).read_bytes(),
                                capture_output=True).stdout
        assert int.from_bytes(packed[-8:-4], "little") == number, name
    assert resumed(tmp_path / "run", listed["args"])[0] == str(newer)
    assert not capsys.readouterr().out
    for name in (*listed["files"], "state.json"):
        whole = (newer / name).read_bytes()
        flip(newer / name)
        assert resumed(tmp_path / "run", listed["args"])[0] == str(older), name
        said = capsys.readouterr().out
        assert name == "state.json" or (said.count("\n") == 1 and f"{newer}: {name}" in said)
        (newer / name).write_bytes(whole)
    flip(newer / "model.safetensors")
    done = run_script(*words, ranks=2)
    assert done.returncode == 0 and "done: 1 steps" in done.stdout, done.stderr
    assert done.stdout.count("step_000002: model.safetensors") == 1
    for folder in (older, newer):
        flip(folder / "train_state" / ".metadata")
    with pytest.raises(launch.UserError, match="nothing else here is"):
        resumed(tmp_path / "run", listed["args"])


# ------------------------------------------------------------------------------------------------
# Filesystems that lack links, modes, or the fsync of a folder


class Lost(io.FileIO):
    def close(self):
        if not self.closed:
            super().close()
            raise OSError(5, "Input/output error")


def test_weights_that_a_network_disk_loses_until_close_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "open", Lost, raising=False)
    with pytest.raises(OSError, match=r"error: '.*model\.safetensors'"):
        checkpoint.save_whole({}, tmp_path, {"weight": torch.zeros(2, 2)})
    assert not list(tmp_path.iterdir())
