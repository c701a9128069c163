"""
Tests of run folders: python -m pytest tests/test_folders.py -q

Nothing is overwritten: the checkpoint that a run starts from, a folder that another run writes to,
a checkpoint with damaged bytes, a filesystem that lacks links, modes or locks.
"""
import json
import os
import shutil
import sys

import pytest
from conftest import run_script

import checkpoint
import grpo
import launch
import sft

LIVE = ("--prompts", 2, "--group", 2, "--max-new-tokens", 6, "--sub-max-new-tokens", 4,
        "--frames", 4, "--show-every", 0)


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
    checkpoint.mark_complete(str(folder), {"step": 1, "args": args})
    checkpoint.symlink(str(out / "last"), str(folder))
    return folder


# ------------------------------------------------------------------------------------------------
# The checkpoint that a run starts from


@pytest.mark.parametrize("script", ["grpo", "sft"])
@pytest.mark.parametrize("given, resume", [
    ("", ()), ("", ("--resume",)), ("", ("--no-resume",)), ("last", ("--no-resume",)),
    ("step_000001", ("--resume",)), ("../alias", ("--no-resume",)), ("../alias/last", ())], ids=str)
def test_a_run_does_not_delete_the_checkpoint_it_starts_from(
        refused, toy, tmp_path, script, given, resume):
    folder = begun(toy, tmp_path / "run", ckpt="elsewhere")
    (tmp_path / "alias").symlink_to("run")
    why = refused(script, os.path.join(tmp_path, "run", given), tmp_path / "run", *resume)
    assert "--ckpt" in why and "lies in --out" in why and "another --out" in why
    assert "--no-resume" not in why and "\n" not in why
    assert checkpoint.is_complete(str(folder))
    assert {"last", "step_000001"} == set(os.listdir(folder.parent)) - {"rollouts"}


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
    state.write_text(state.read_text().replace(json.dumps(str(start)), json.dumps(str(inside))))
    done = run_script(*command("sft", toy, inside, tmp_path / "run", "--steps", 2))
    assert done.returncode == 0, done.stderr
    assert "done: 1 steps" in done.stdout
    again = run_script(*command("sft", toy, inside, tmp_path / "run", "--no-resume"))
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and os.path.isdir(inside)
