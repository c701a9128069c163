"""
More of plumbing/checkpoint.py, files and links:
python -m pytest tests/all/test_checkpoint_rest.py -q
"""
import hashlib
import json
import os
from pathlib import Path

import torch
from conftest import ROOT
from test_checkpoint import CPU, arguments, saved_at  # noqa: F401

from plumbing import checkpoint, runs


def test_large_checkpoints_are_several_files_and_an_index(toy, monkeypatch, process_group, codec,
                                                          tmp_path):
    """5 GB each in earnest. transformers finds every weight again."""
    import huggingface_hub
    from transformers import Qwen3VLForConditionalGeneration

    real = huggingface_hub.split_torch_state_dict_into_shards
    monkeypatch.setattr(huggingface_hub, "split_torch_state_dict_into_shards",
                        lambda weights: real(weights, max_shard_size="1MB"))
    policy = checkpoint.load_sharded(str(toy / "init"), codec, CPU)
    checkpoint.save_checkpoint(policy, codec, str(tmp_path / "many"), {"step": 1})
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert checkpoint.resolve_checkpoint(str(tmp_path / "many")) == str(tmp_path / "many")
    hf, found = Qwen3VLForConditionalGeneration.from_pretrained(
        str(tmp_path / "many"), dtype=torch.float32, output_loading_info=True)
    own = hf.state_dict()
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert all(torch.equal(own[name], w) for name, w in checkpoint.full_weights(policy))


def test_a_users_copy_of_a_checkpoint_is_neither_gone_on_from_nor_deleted(tmp_path):
    for name in ("step_000002", "step_000004", "step_1000000", "step_keep", "step_000004.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text('{"files": {}}')
    found = [f for f in runs.step_folders(tmp_path) if runs.is_complete(f)]
    assert [os.path.basename(f) for f in found] == ["step_1000000", "step_000004", "step_000002"]
    runs.prune_checkpoints(str(tmp_path / "step_1000000"), keep=1)
    left = ["step_000004.bak", "step_1000000", "step_keep"]
    assert sorted(os.listdir(tmp_path)) == left
    runs.clean_run(str(tmp_path), 0)
    assert sorted(os.listdir(tmp_path)) == ["step_000004.bak", "step_keep"]


def test_the_state_names_the_best_checkpoint_and_every_start_restores_the_links(
        tmp_path, monkeypatch, capsys):
    """As a kill between two links, a failing disk, or a damaged newest checkpoint leave them."""
    for n, best in ((1, 1), (2, 1), (3, 1), (4, 4)):
        saved_at(tmp_path, f"step_00000{n}", best_step=best, args=vars(arguments()))
    for name in ("last", "best"):
        runs.symlink(str(tmp_path / name), str(tmp_path / "step_000003"))

    def links():
        return [os.readlink(tmp_path / name) for name in ("last", "best")]

    runs.resume_point(str(tmp_path), arguments(), None)
    assert links() == ["step_000004"] * 2
    # The best one of the newest but one stays too: the run goes on there if the newest is damaged.
    kept = [n for n in sorted(os.listdir(tmp_path)) if n.startswith("step_")]
    assert kept == ["step_000001", "step_000003", "step_000004"]
    (tmp_path / "step_000004" / "model.safetensors").unlink()
    folder, state = runs.resume_point(str(tmp_path), arguments(), None)
    assert folder.endswith("step_000003") and links() == ["step_000003", "step_000001"]

    for name in ("symlink", "replace", "rename", "fsync"):
        saved_at(tmp_path, "step_000000")  # not kept
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_, **__: os.listdir(tmp_path / "gone"))
            runs.settle(folder, state)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(f"the newest whole checkpoint is {folder}")
        runs.settle(folder, state)
        assert links() == ["step_000003", "step_000001"] and not capsys.readouterr().out


def test_the_settings_of_a_run_hold_digests_of_its_code(tmp_path):
    now = runs.code_digests()
    assert {"grpo.py", "rewards.py", "launch.py"} <= set(now) and "tests" not in now
    digest = hashlib.sha256((Path(ROOT) / "rewards.py").read_bytes()).hexdigest()
    assert digest.startswith(now["rewards.py"]) and len(now["rewards.py"]) == 12
    runs.write_args(str(tmp_path / "args.json"), arguments())
    assert json.loads((tmp_path / "args.json").read_text())["code"] == now
