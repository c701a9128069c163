"""
Tests of plumbing/checkpoint.py: python -m pytest tests/test_checkpoint.py -q

What is saved is loaded again by plain transformers; what several ranks load is what from_pretrained
loads. Then folders as they lie about: torn downloads, other formats, other architectures, damaged
files, code of their own. Each is one line on stderr with exit code 2, by every script, or it works;
and a run that is refused leaves no folder.
"""
import argparse
import functools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from album import logprobs, response
from safetensors.torch import save_file

import launch
from model import TokenSpan, Tree
from plumbing import checkpoint, hub, runs

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# Saving


def test_a_saved_checkpoint_is_the_same_model_in_plain_transformers(saved, codec, source):
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
    assert json.loads((folder / "state.json").read_text())["step"] == 1
    assert runs.is_complete(str(folder))
    assert sorted(os.listdir(folder.parent)) == ["step_000001"]  # no temporary folder is left


def test_every_tensor_enters_the_digest_of_a_checkpoint(tmp_path):
    """An adapter that was merged into one matrix leaves all others as they were."""
    tensors = {f"layer{i}": torch.full((64, 256), float(i)) for i in range(5)}
    (tmp_path / "config.json").write_text("{}")
    found = set()
    for name in [None, *tensors]:
        changed = {k: v + 1 if k == name else v for k, v in tensors.items()}
        save_file(changed, tmp_path / "model.safetensors")
        found.add(runs.content_digest(str(tmp_path)))
    assert len(found) == 6
    (tmp_path / "config.json").write_text("{ }")
    assert runs.content_digest(str(tmp_path)) not in found


# ------------------------------------------------------------------------------------------------
# Loading in shards, several replicas


def test_replicas_have_to_divide_the_ranks(toy, codec, process_group):
    with pytest.raises(launch.UserError, match="dp_replicate=3: 1 ranks"):
        checkpoint.load_sharded(str(toy / "init"), codec, CPU, replicas=3)


def test_a_run_folder_stands_for_its_last_checkpoint(toy, tmp_path):
    whole = shutil.copytree(toy / "init", tmp_path / "run" / "step_000003")
    # as transformers 4 names it
    (whole / "processor_config.json").rename(whole / "preprocessor_config.json")
    runs.replace_link(str(tmp_path / "run" / "last"), str(whole))
    assert checkpoint.resolve_checkpoint(str(whole)) == str(whole)
    assert checkpoint.resolve_checkpoint(str(tmp_path / "run")) == str(whole)
    (whole / "preprocessor_config.json").rename(whole / "processor_config.json")  # transformers 5
    assert checkpoint.resolve_checkpoint(str(whole)) == str(whole)


# ------------------------------------------------------------------------------------------------
# Names on the Hub


COMMIT = "1" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, in an empty folder, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.fetch_ckpt, "folders", {})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def test_a_name_on_the_hub_is_a_checkpoint(toy, cache, capsys, monkeypatch):
    """By huggingface_hub itself, from a cache as it leaves one. A folder of that name wins."""
    (cache / "models--me--toy" / "refs").mkdir(parents=True)
    (cache / "models--me--toy" / "refs" / "main").write_text(COMMIT)
    folder = shutil.copytree(toy / "init", cache / "models--me--toy" / "snapshots" / COMMIT)
    assert checkpoint.resolve_checkpoint("me/toy") == str(folder)
    assert checkpoint.adapter_rank("me/toy", 4) == 4
    assert f"me/toy: {folder} (an older one, if the Hub was away)\n" == capsys.readouterr().out
    runs.write_args("args.json", argparse.Namespace(ckpt="me/toy"))
    assert json.loads(Path("args.json").read_text())["hub"] == {"me/toy": str(folder)}
    assert hub.name_of(str(folder)) == {"base_model_name_or_path": "me/toy", "revision": COMMIT}
    commits = map(lambda text: argparse.Namespace(stdout=text), ["c0ffee\n"])  # read once
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: next(commits))
    monkeypatch.setattr(hub, "our_commit", functools.cache(hub.our_commit.__wrapped__))
    for ckpt in ("me/toy", "out/sft"):  # a model card names no model of somebody else
        args = {"ckpt": ckpt, "data": "/data/mine/a.jsonl", "out": "my/run/", "lr": 1.0}
        hub.write_card(".", ".", {"step": 3, "args": args})
        text = Path("README.md").read_text()
        assert ('"step": 3' in text, "base_model: me/toy\n" in text) == (True, ckpt == "me/toy")
        assert text.count("base_model") == (ckpt == "me/toy")
        assert text.count("```json") == 1 and "log" not in text  # of a run without a log
        written = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
        assert written["settings"] == {  # of local paths the base names
            "ckpt": ckpt.removeprefix("out/"), "data": "a.jsonl", "out": "run", "lr": 1.0}
        assert "out/" not in text and written["commit"] == "c0ffee"
    shutil.copytree(toy / "init", "me/toy")
    assert checkpoint.resolve_checkpoint("me/toy") == os.path.realpath("me/toy")


def test_a_download_takes_what_is_loaded_and_no_more(toy, cache, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda *names, **more: asked.append((names, more)) or str(toy / "init"))
    for _ in range(2):
        assert checkpoint.resolve_checkpoint("me/toy") == str(toy / "init")
    ((names, more),) = asked
    assert names == ("me/toy",) and more["ignore_patterns"] == ["*/*"]
    assert more["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "*.txt"]


@pytest.mark.parametrize("name, says", [
    ("me/toy", r"me/toy\), and nothing from the Hub .*OFFLINE"), ("made/toy", r"made/toy\)$"),
    ("ParaVT-8B", "ParaVT/ParaVT-8B"), ("a/b/c", "no such folder")])
def test_a_name_that_is_nowhere_is_one_line(cache, name, says):
    os.mkdir("made")
    with pytest.raises(launch.UserError, match=says):
        checkpoint.resolve_checkpoint(name)


# ------------------------------------------------------------------------------------------------
# Folders as they lie about


@pytest.mark.parametrize("shape, rows", [((2**11, 2**9), slice(1000, None)), ((9, 9), 5)])
def test_no_number_far_down_in_a_matrix_is_refused(tmp_path, shape, rows):
    """Of a small one any row, of a large one a tenth of the rows."""
    weights, weights[rows] = torch.ones(shape), float("nan")
    save_file({"w": weights}, tmp_path / "model.safetensors")
    pytest.raises(launch.UserError, checkpoint.stored_shapes, str(tmp_path)).match("no number")


def test_weights_are_trained_in_fp32_whatever_dtype_the_configuration_names(
        toy, codec, process_group, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "ckpt")
    config = (folder / "config.json").read_text().replace("float32", "bfloat16")
    (folder / "config.json").write_text(config)
    policy = checkpoint.load_sharded(str(folder), codec, CPU)
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and "bfloat16" in config


def test_a_saved_configuration_names_the_dtype_of_its_weights(tmp_path):
    files = {"config.json": b'{"dtype": "bfloat16"}'}
    checkpoint.save_whole(files, str(tmp_path), {"w": torch.ones(2, 2)})
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "float32"}


def test_code_of_a_checkpoint_is_never_run(toy, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "ckpt")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["auto_map"] = {"AutoModel": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(launch.UserError, match="asks for code of its own"):
        checkpoint.resolve_checkpoint(str(folder))
