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
from plumbing import checkpoint, hub, metrics, runs

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
    text = ("Which colours appear between 16 and 24?<|im_end|>\n"
            "<answer>red</answer> 日本 <12.0 seconds>")
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


# ------------------------------------------------------------------------------------------------
# Folders of a run


def test_an_atomic_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "ckpt"
    with pytest.raises(RuntimeError), runs.atomic_folder(str(target)) as temp:
        Path(temp, "half").write_text("x")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    for text in ("old", "new"):
        with runs.atomic_folder(str(target)) as temp:
            # the old one stands until the new one is whole
            assert not target.exists() or (target / "w").read_text() == "old"
            Path(temp, "w").write_text(text)
            if text == "new":
                Path(temp, "more").write_text("x")
    assert os.listdir(tmp_path) == ["ckpt"] and sorted(os.listdir(target)) == ["more", "w"]
    assert (target / "w").read_text() == "new"


def test_pruning_spares_what_last_and_best_point_to(tmp_path):
    for n in range(1, 6):
        (tmp_path / f"step_{n:06d}").mkdir()
        (tmp_path / f"step_{n:06d}" / "state.json").write_text('{"files": {}}')
    runs.symlink(str(tmp_path / "best"), str(tmp_path / "step_000002"))
    runs.symlink(str(tmp_path / "last"), str(tmp_path / "step_000005"))
    runs.prune_checkpoints(str(tmp_path / "step_000005"), 2)
    kept = ["step_000002", "step_000004", "step_000005"]
    assert sorted(n for n in os.listdir(tmp_path) if n.startswith("step")) == kept


def saved_at(out, name, weights="w" * 10, **state):
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    content = {"step": int(name[5:11]), **state, "files": {"model.safetensors": 10}}
    (folder / "state.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("damage", [
    lambda f: (f / "model.safetensors").write_text("w" * 9),
    lambda f: (f / "model.safetensors").unlink(), lambda f: (f / "state.json").unlink(),
    lambda f: (f / "state.json").write_text('{"step": 2, "fil'),
    lambda f: (f / "state.json").write_text("[]"), lambda f: (f / "state.json").write_text("")])
def test_a_torn_checkpoint_is_passed_over(tmp_path, damage):
    first, second = saved_at(tmp_path, "step_000001"), saved_at(tmp_path, "step_000002")
    assert runs.newest_checkpoint(str(tmp_path)) == str(second)
    damage(second)
    assert not runs.is_complete(str(second))
    assert runs.newest_checkpoint(str(tmp_path)) == str(first)
    damage(first)
    assert runs.newest_checkpoint(str(tmp_path)) is None


def test_what_killed_runs_left_half_written_is_dropped(tmp_path):
    saved_at(tmp_path, "step_000003")
    (tmp_path / ".step_000004.abc").mkdir()
    (tmp_path / "rollouts").mkdir()
    for name in ("args.json.tmp123", "rollouts/step_000004.rank0.jsonl.tmp77",
                 "rollouts/step_000003.rank1.jsonl", "rollouts/step_000002.rank0.jsonl"):
        (tmp_path / name).write_text("{")
    runs.clean_run(str(tmp_path), start=3)
    assert sorted(os.listdir(tmp_path)) == ["rollouts", "step_000003"]
    # Those of the fourth step, which this run takes again, perhaps on fewer ranks, are gone.
    assert os.listdir(tmp_path / "rollouts") == ["step_000002.rank0.jsonl"]


def arguments(**flags):
    return argparse.Namespace(**{"lr": 1.0, "steps": 4, "resume": None, "out": "o", "ckpt": "c",
                                 "frame_cache_dir": None, "frame_cache_dir_gb": 50.0,
                                 "dp_replicate": 1, **flags})


def test_a_run_goes_on_by_itself_only_where_its_settings_are_the_same(tmp_path):
    assert runs.resume_point(str(tmp_path), arguments(), None) == (None, {})
    assert runs.resume_point(str(tmp_path), arguments(), True) == (None, {})
    folder = saved_at(tmp_path, "step_000002", args=vars(arguments()))
    for changed in ({}, {"steps": 9}, {"out": "elsewhere"}, {"frame_cache_dir": "kept"},
                    {"frame_cache_dir_gb": 1.0}, {"dp_replicate": 0}):
        assert runs.resume_point(str(tmp_path), arguments(**changed), None)[0] == str(folder)
    with pytest.raises(launch.UserError, match=r"other settings: lr 1.0 \(now 2.0\)"):
        runs.resume_point(str(tmp_path), arguments(lr=2.0), None)
    assert runs.resume_point(str(tmp_path), arguments(lr=2.0), True)[1]["step"] == 2
    assert runs.resume_point(str(tmp_path), arguments(lr=2.0), False) == (None, {})
    shutil.rmtree(folder)
    saved_at(tmp_path, "step_000002", args={**vars(arguments()), "kl": 0.0})
    with pytest.raises(launch.UserError, match=r"other settings: kl 0.0 \(now gone: "):
        runs.resume_point(str(tmp_path), arguments(), None)
    (folder / "state.json").unlink()
    for resume in (True, None):  # damaged later, perhaps, and not ours to delete unasked
        with pytest.raises(launch.UserError, match="step_000002 is not whole.*--no-resume"):
            runs.resume_point(str(tmp_path), arguments(), resume)
    assert runs.resume_point(str(tmp_path), arguments(), False) == (None, {})


def test_beginning_anew_deletes_what_was_there(tmp_path):
    folder = saved_at(tmp_path, "step_000002")
    runs.symlink(str(tmp_path / "last"), str(folder))
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    runs.clean_run(str(tmp_path), start=0)
    assert os.listdir(tmp_path) == ["log.jsonl"]
    metrics.Log(str(tmp_path), 0, argparse.Namespace(track=None)).close(0, 0)
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_a_run_folder_stands_for_its_last_checkpoint(toy, tmp_path):
    whole = shutil.copytree(toy / "init", tmp_path / "run" / "step_000003")
    # as transformers 4 names it
    (whole / "processor_config.json").rename(whole / "preprocessor_config.json")
    runs.symlink(str(tmp_path / "run" / "last"), str(whole))
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
    monkeypatch.setattr(hub.fetched, "folders", {})
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
    assert "me/toy: no such folder here, so the Hub is asked\n" == capsys.readouterr().out
    runs.write_args("args.json", argparse.Namespace(ckpt="me/toy"))
    assert json.loads(Path("args.json").read_text())["hub"] == {"me/toy": str(folder)}
    assert hub.name_of(str(folder)) == {"base_model_name_or_path": "me/toy", "revision": COMMIT}
    asked = []
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: asked.append(1)
                        or argparse.Namespace(stdout="c0ffee\n"))
    monkeypatch.setattr(hub, "commit", functools.cache(hub.commit.__wrapped__))
    for ckpt in ("me/toy", "out/sft"):  # a model card names no model of somebody else
        args = {"ckpt": ckpt, "data": "/home/me/a.jsonl", "out": "my/run/", "lr": 1.0}
        hub.write_card(".", ".", {"step": 3, "args": args})
        text = Path("README.md").read_text()
        assert ('"step": 3' in text, "base_model: me/toy\n" in text) == (True, ckpt == "me/toy")
        assert text.count("base_model") == (ckpt == "me/toy")
        written = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
        assert written["settings"] == {  # of local paths the base names
            "ckpt": ckpt.removeprefix("out/"), "data": "a.jsonl", "out": "run", "lr": 1.0}
        assert "out/" not in text and written["commit"] == "c0ffee" and len(asked) == 1
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


def test_no_number_far_down_in_a_large_matrix_is_refused(tmp_path):
    weights = torch.ones(2**11, 2**9)
    weights[1000:] = float("nan")
    save_file({"w": weights}, tmp_path / "model.safetensors")
    with pytest.raises(launch.UserError, match="no number"):
        checkpoint.stored_weights(str(tmp_path))


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
