"""
Tests of plumbing/checkpoint.py: python -m pytest tests/test_checkpoint.py -q

What is saved is loaded again by plain transformers. Names on the Hub by huggingface_hub itself,
from a cache as it leaves one. A run goes on from its newest whole checkpoint, and only with the
settings and rows that it had. Kills of whole runs: slow/test_survival.py.
"""
import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from album import logprobs, response
from conftest import ROOT
from safetensors.torch import save_file

import launch
from model import TokenSpan, Tree
from plumbing import checkpoint

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# Saving and loading


def test_a_saved_checkpoint_is_the_same_model_in_plain_transformers(saved, codec, toy):
    """Weights, tied head, processor and tokenizer survive; other stages open the folder with
    from_pretrained alone."""
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    policy, folder = saved
    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32)
    assert torch.equal(hf.lm_head.weight, policy.hf.lm_head.weight)
    assert hf.lm_head.weight is hf.model.language_model.embed_tokens.weight
    ids = torch.tensor([response(1, 20)])
    with torch.no_grad():
        logits = hf(input_ids=ids).logits[0, :-1]
    logits[:, list(codec.suppress_tokens)] -= 100
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    ours = logprobs(policy, codec, None, [Tree(TokenSpan(ids[0].tolist(), [0] + [1] * 19))])
    assert (ours - wanted).abs().max() < 1e-5
    text = "Which colours are there at 16?<|im_end|>\n<answer>red</answer> 日本 <12.0 seconds>"
    again = AutoProcessor.from_pretrained(str(folder))
    assert again.tokenizer(text)["input_ids"] == codec.tokenizer(text)["input_ids"]
    assert again.chat_template == codec.processor.chat_template
    for name, content in checkpoint.small_files(str(toy / "init")).items():
        assert (folder / name).read_bytes() == content
    assert json.loads((folder / "state.json").read_text())["step"] == 1
    names = sorted(name for name in os.listdir(folder.parent) if name != "log.jsonl")
    assert names == ["last", "step_000001"]  # no temporary folder is left


def test_weights_are_trained_in_fp32_whatever_dtype_the_configuration_names(
        toy, codec, process_group, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "ckpt")
    config = (folder / "config.json").read_text().replace("float32", "bfloat16")
    (folder / "config.json").write_text(config)
    policy = checkpoint.load_policy(str(folder), codec, CPU)
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and "bfloat16" in config


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:5000]),  # a download that was cut off
    lambda path: save_file({"a": torch.ones(2)}, path)])
def test_weights_that_do_not_fit_are_one_line(toy, codec, process_group, tmp_path, damage):
    folder = str(shutil.copytree(toy / "init", tmp_path / "ckpt"))
    damage(tmp_path / "ckpt" / "model.safetensors")
    pytest.raises(launch.UserError, checkpoint.load_policy, folder, codec, CPU).match(folder)


# ------------------------------------------------------------------------------------------------
# Names


COMMIT = "1" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, in an empty folder, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def test_a_name_on_the_hub_is_a_checkpoint(toy, cache):
    """A folder of that name wins."""
    (cache / "models--me--toy" / "refs").mkdir(parents=True)
    (cache / "models--me--toy" / "refs" / "main").write_text(COMMIT)
    folder = shutil.copytree(toy / "init", cache / "models--me--toy" / "snapshots" / COMMIT)
    assert checkpoint.resolve("me/toy") == str(folder)
    assert checkpoint.adapter_rank("me/toy", 4) == 4
    shutil.copytree(toy / "init", "me/toy")
    assert checkpoint.resolve("me/toy") == os.path.realpath("me/toy")


@pytest.mark.parametrize("name", ["me/toy", "ParaVT-8B", "a/b/c"])
def test_a_name_that_is_nowhere_is_one_line(cache, name):
    with pytest.raises(launch.UserError, match=f"{name}: no such folder, and nothing from the Hub"):
        checkpoint.resolve(name)


# ------------------------------------------------------------------------------------------------
# The folder of a run


def saved_at(out, step, **state):
    """A checkpoint as save_run leaves it, of files of a few bytes."""
    folder = out / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step, **state}))
    return folder


def names_in(out):
    return sorted(name for name in os.listdir(out) if not name.startswith("log"))


def test_two_and_the_best_are_kept_and_links_follow(tmp_path):
    for step in range(1, 7):
        saved_at(tmp_path, step)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000001_keep")  # a user's copy
    checkpoint.tidy(str(tmp_path), {"best": (0.5, 2)})
    assert names_in(tmp_path) == ["best", "last", "step_000001_keep", "step_000002", "step_000005",
                                  "step_000006"]
    assert os.readlink(tmp_path / "last") == "step_000006"
    assert os.readlink(tmp_path / "best") == "step_000002"
    assert checkpoint.resolve(str(tmp_path)) == str(tmp_path / "step_000006")


@pytest.mark.parametrize("operation", range(7))
def test_a_kill_between_two_operations_loses_no_checkpoint(tmp_path, monkeypatch, operation):
    """Then the next start finds the newest one, and sets the links right."""
    for step in (1, 2, 3):
        saved_at(tmp_path, step, best=(0.1, 3))

    left = iter(range(operation))

    def counted(real):
        def call(*given, **named):
            next(left)  # StopIteration: the kill
            return real(*given, **named)

        return call

    with monkeypatch.context() as patch, contextlib.suppress(StopIteration):
        for name in ("symlink", "replace", "remove", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        checkpoint.tidy(str(tmp_path), {"best": (0.1, 3)})
    assert checkpoint.step_folders(str(tmp_path))[0] == str(tmp_path / "step_000003")
    checkpoint.tidy(str(tmp_path), {"best": (0.1, 3)})
    assert names_in(tmp_path) == ["best", "last", "step_000002", "step_000003"]


def arguments(toy, out, **flags):
    return argparse.Namespace(**{"lr": 1.0, "steps": 4, "resume": False, "out": str(out),
                                 "ckpt": str(toy / "init"), "dp_replicate": 1, **flags})


def test_a_run_goes_on_only_with_its_settings_and_rows(toy, tmp_path, capsys):
    def start(rows=("a",), **flags):
        return checkpoint.resume_point(arguments(toy, tmp_path, **flags), {"data": rows})

    folder, state = start()
    assert folder is None and state["step"] == 0
    whole = saved_at(tmp_path, 2, settings=state["settings"])
    for flags in ({}, {"steps": 9}, {"dp_replicate": 0}):  # how far and where are free
        folder, state = start(**flags)
        assert folder == str(whole) and state["step"] == 2
    assert os.readlink(tmp_path / "last") == "step_000002"  # a kill may have come before the link
    pytest.raises(launch.UserError, start, lr=2.0).match(r"another lr 1.0 \(now 2.0\).*--resume")
    pytest.raises(launch.UserError, start, rows=["b"]).match("another rows of --data")
    with pytest.raises(launch.UserError, match="another ckpt .*init .*--resume"):
        start(ckpt=str(toy))  # as a link that leads to another checkpoint now
    capsys.readouterr()
    assert start(lr=2.0, resume=True)[1]["settings"]["lr"] == 2.0
    assert f"{whole}: lr 1.0 (now 2.0)" in capsys.readouterr().out


def test_values_on_other_held_out_rows_are_not_compared(toy, tmp_path):
    args = arguments(toy, tmp_path, resume=True)
    _, state = checkpoint.resume_point(args, {"val": ["a"]})
    saved_at(tmp_path, 2, settings=state["settings"], best=(0.1, 2))
    assert checkpoint.resume_point(args, {"val": ["a"]})[1]["best"] == [0.1, 2]
    assert "best" not in checkpoint.resume_point(args, {"val": ["b"]})[1]


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    launch.lock(str(tmp_path))
    code = f"import launch; launch.lock({str(tmp_path)!r})"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "another run writes there" in again.stderr


def test_a_published_folder_appears_whole(tmp_path):
    for text in ("old", "new"):
        (tmp_path / "temp").mkdir()
        (tmp_path / "temp" / text).write_text("x")
        launch.publish_folder(str(tmp_path / "temp"), str(tmp_path / "ckpt"))
    assert os.listdir(tmp_path) == ["ckpt"] and os.listdir(tmp_path / "ckpt") == ["new"]
