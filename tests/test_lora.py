"""
Tests of adapters (--lora-rank): python -m pytest tests/test_lora.py -q

Against the dense model: the same function at the start, the gradients of W + 2 B A, the same
log-probs once merged; peft reads the files as the same model. Both scripts: slow/test_lora.py.
"""
import sys

import pytest
import torch
from reference import load_policy

import launch
import model
from plumbing import checkpoint
from tools import merge

CPU, RANK = torch.device("cpu"), 3


@pytest.fixture
def adapted(toy, codec, process_group):
    return checkpoint.load_policy(str(toy / "init"), codec, CPU, lora_rank=RANK)


def moved(policy, scale=0.3):
    """The policy with B no longer zero."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if name.endswith(".lora_B"):
                p.copy_(torch.randn(p.shape, generator=draw) * scale)
    return policy


def pack_of(codec):
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(10, 250, (n,), generator=draw).tolist() for n in (20, 9, 7)]
    branches = [model.TokenSpan(i, [1] * len(i)) for i in ids[1:]]
    return model.pack_trees(codec, [model.Tree(model.TokenSpan(ids[0], [0] * 20), [], branches)])


def merged_dense(policy, ckpt, codec):
    """A plain policy that holds W + 2 B A."""
    dense = load_policy(ckpt, codec)
    own = dense.hf.state_dict()
    with torch.no_grad():
        for name, tensor in checkpoint.full_weights(policy, torch.float32):
            own[name].copy_(tensor)
    return dense


def test_fresh_adapters_change_nothing_and_alone_are_trained(adapted, toy, codec):
    pack, whole = pack_of(codec), load_policy(str(toy / "init"), codec)
    with torch.no_grad():
        assert torch.equal(adapted(pack)[0], whole(pack)[0])
    names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    matrices = [m for m in whole.hf.model.language_model.layers.modules()
                if isinstance(m, torch.nn.Linear)]
    assert len(names) == 2 * len(matrices) and all(".lora_" in n for n in names)
    first = next(p for n, p in adapted.named_parameters() if "lora_A" in n)  # [rank, width]
    assert 0.9 < first.abs().max() * first.shape[1] ** 0.5 <= 1
    assert {p.dtype for p in model.trained_parameters(adapted)} == {torch.float32}
    assert sum(p.numel() for p in model.trained_parameters(adapted)) == RANK * sum(
        sum(m.weight.shape) for m in matrices)


def test_the_reference_is_the_policy_as_it_started_and_leaves_it_as_it_is(adapted, toy, codec):
    pack, reference = pack_of(codec), checkpoint.AdapterReference(adapted)
    with torch.no_grad():
        base, own = adapted(pack)[0], moved(adapted)(pack)[0]
        assert (own - base).abs().max() > 1e-3 and torch.equal(reference(pack)[0], base)
        assert torch.equal(adapted(pack)[0], own)
        later = checkpoint.AdapterReference(adapted)  # of a stage that was given adapters
        moved(adapted, 0.9)
        assert torch.equal(later(pack)[0], own)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_dense_model_of_the_same_matrices(toy, codec, process_group,
                                                                     recompute):
    """L(W + 2 B A): dL/dB = 2 dL/dW A', dL/dA = 2 B' dL/dW. A forward of the reference stands
    before."""
    policy = checkpoint.load_policy(str(toy / "init"), codec, CPU, recompute, RANK)
    assert policy.hf.is_gradient_checkpointing == recompute
    reference = checkpoint.AdapterReference(policy)
    moved(policy)
    dense, pack = merged_dense(policy, str(toy / "init"), codec), pack_of(codec)
    with torch.no_grad():
        reference(pack)
    found, wanted = policy(pack)[0], dense(pack)[0]
    assert (found - wanted).abs().max() < 1e-5
    found.square().sum().backward()
    wanted.square().sum().backward()
    layers = dict(dense.named_parameters())
    adapters = {n: p for n, p in policy.named_parameters() if ".lora_" in n}
    for name, a in adapters.items():
        if name.endswith("lora_A"):
            b = adapters[name[:-1] + "B"]
            whole = layers[name.removesuffix("lora_A") + "weight"].grad
            for part, should in ((b, 2 * whole @ checkpoint.whole_tensor(a).T),
                                 (a, 2 * checkpoint.whole_tensor(b).T @ whole)):
                off = (checkpoint.whole_tensor(part.grad) - should).norm() / should.norm()
                assert off < 3e-5, (name, off)  # fp32 rounding: 1.1e-5 seen


# ------------------------------------------------------------------------------------------------
# Files


@pytest.fixture
def saved(adapted, codec, tmp_path):
    optimizer = model.adamw(model.trained_parameters(adapted), 0.1, 0.9, CPU)
    checkpoint.save_run(moved(adapted), optimizer, str(tmp_path), 1, {"settings": {}})
    return tmp_path / "step_000001"


def test_peft_reads_it_as_the_same_model(saved, toy, codec, adapted):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(hf, str(saved)).merge_and_unload().state_dict()
    for name, tensor in checkpoint.full_weights(adapted, torch.float32):
        assert (whole[name] - tensor).abs().max() < 1e-6, name


def test_adapters_of_another_scale_are_refused(saved):
    (saved / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 3}')
    pytest.raises(launch.UserError, checkpoint.adapter_rank, str(saved), 0).match("is not 2 r")


def test_merged_it_is_a_checkpoint_of_whole_weights(saved, adapted, codec, tmp_path, monkeypatch):
    out = tmp_path / "merged"
    monkeypatch.setattr(sys, "argv", ["merge.py", str(saved), "--out", str(out)])
    merge.main()
    pack = pack_of(codec)
    with torch.no_grad():
        off = load_policy(str(out), codec)(pack)[0] - adapted(pack)[0]
    assert off.abs().max() < 1e-5
    pytest.raises(launch.UserError, merge.main).match("exists")
