"""
Tests of adapters (--lora): python -m pytest tests/test_lora.py -q

Against the dense model: the same function at the start, the gradients of W + 2 B A, the same
log-probs once merged; peft reads the files as the same model. Through both scripts: files, going
on, a second stage that goes on with the adapters of the first.
"""
import json
import os
import random
import shutil
import sys
import threading
from unittest import mock

import pytest
import torch
from conftest import run_script
from reference import load_policy, make_engine
from safetensors.torch import load_file, save_file

import chat
import checkpoint
import grpo
import launch
import model
import rewards
import rollout
import sft
from engine import Limits, VllmEngine
from tools import merge

CPU = torch.device("cpu")
RANK = 3


@pytest.fixture
def adapted(toy, codec, process_group):
    return checkpoint.load_sharded(str(toy / "init"), codec, CPU, lora=RANK)


def moved(policy, scale=0.3):
    """The policy with B no longer zero."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if name.endswith(".lora_B"):
                p.copy_(checkpoint.own_rows(p, torch.randn(p.shape, generator=draw) * scale))
    return policy


def pack_of(codec):
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(10, 250, (n,), generator=draw).tolist() for n in (20, 9, 7)]
    branches = [model.Span(i, [1] * len(i)) for i in ids[1:]]
    return model.pack_trees(codec, [model.Tree(model.Span(ids[0], [0] * 20), [], branches)])


def merged_dense(policy, ckpt, codec):
    """A plain policy that holds W + 2 B A."""
    dense = load_policy(ckpt, codec)
    own = dense.hf.state_dict()
    with torch.no_grad():
        for name, tensor in checkpoint.full_weights(policy):
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
    assert {p.dtype for p in model.trained_parameters(adapted)} == {torch.float32}
    assert sum(p.numel() for p in model.trained_parameters(adapted)) == RANK * sum(
        sum(m.weight.shape) for m in matrices)


def test_the_reference_is_the_policy_as_it_started_and_leaves_it_as_it_is(adapted, toy, codec):
    pack = pack_of(codec)
    reference = checkpoint.AdapterReference(adapted)
    with torch.no_grad():
        base = adapted(pack)[0]
        own = moved(adapted)(pack)[0]
        assert (own - base).abs().max() > 1e-3
        assert torch.equal(reference(pack)[0], base)
        assert torch.equal(adapted(pack)[0], own)
        later = checkpoint.AdapterReference(adapted)  # of a stage that was given adapters
        moved(adapted, 0.9)
        assert torch.equal(later(pack)[0], own)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_are_those_of_the_dense_model_of_the_same_matrices(toy, codec, process_group,
                                                                     recompute):
    """L(W + 2 B A): dL/dB = 2 dL/dW A', dL/dA = 2 B' dL/dW. A forward of the reference stands
    before."""
    policy = checkpoint.load_sharded(str(toy / "init"), codec, CPU, recompute, lora=RANK)
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
    folder = tmp_path / "saved"
    checkpoint.save_checkpoint(moved(adapted), codec, str(folder), {"step": 1})
    return folder


def test_a_folder_has_the_layout_of_peft(saved, toy):
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 2 * RANK)
    assert config["base_model_name_or_path"] == str(toy / "init")
    tensors = load_file(saved / "adapter_model.safetensors")
    base = load_file(toy / "init" / "model.safetensors")
    assert not (saved / "model.safetensors").exists()
    for key, tensor in tensors.items():
        stem, letter = key.removesuffix(".weight").rsplit(".lora_", 1)
        rows, columns = base[stem.removeprefix("base_model.model.") + ".weight"].shape
        assert list(tensor.shape) == ([RANK, columns] if letter == "A" else [rows, RANK])
        assert stem.split(".")[-1] in config["target_modules"]


def test_peft_reads_it_as_the_same_model(saved, toy, codec, adapted):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(hf, str(saved)).merge_and_unload().state_dict()
    for name, tensor in checkpoint.full_weights(adapted):
        assert (whole[name] - tensor).abs().max() < 1e-6, name


def test_the_base_trained_on_is_the_base_used(saved, toy, tmp_path):
    assert checkpoint.base_of(str(saved)) == str(toy / "init")
    settings = saved / "adapter_config.json"
    config = json.loads(settings.read_text())
    other = tmp_path / "other"
    shutil.copytree(toy / "init", other)
    (other / "more.json").write_text("{}")
    for base, why in (("nowhere", "base nowhere is missing"), (str(other), "content differs"),
                      (str(saved), "holds adapters itself")):
        settings.write_text(json.dumps({**config, "base_model_name_or_path": base}))
        with pytest.raises(launch.UserError, match=why):
            checkpoint.resolve_checkpoint(str(saved))


def test_a_base_may_move(saved, toy, tmp_path):
    """Where a base lies is no content: only the folder that names it has to be told."""
    before = checkpoint.content_digest(str(saved))
    shutil.copytree(toy / "init", tmp_path / "elsewhere")
    settings = saved / "adapter_config.json"
    config = json.loads(settings.read_text())
    moved = {**config, "base_model_name_or_path": str(tmp_path / "elsewhere")}
    settings.write_text(json.dumps(moved))
    assert checkpoint.content_digest(str(saved)) == before
    assert checkpoint.resolve_checkpoint(str(saved)) == os.path.realpath(saved)
    settings.write_text(json.dumps({**moved, "r": 1}))
    assert checkpoint.content_digest(str(saved)) != before


@pytest.mark.parametrize("damage", ["cut", "no B", "another rank", "another model"])
def test_damaged_adapters_are_refused_in_one_line(saved, damage):
    path = saved / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if ".lora_B." in name)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        tensor = tensors.pop(first)
        if damage == "another rank":
            tensors[first] = tensor[:, 1:].contiguous()
        if damage == "another model":
            tensors[first.replace("layers.0", "layers.9")] = tensor
            stem = first.replace(".lora_B.", ".lora_A.")
            tensors[stem.replace("layers.0", "layers.9")] = tensors.pop(stem)
        save_file(tensors, path)
    with pytest.raises(launch.UserError, match=str(saved)):
        checkpoint.resolve_checkpoint(str(saved))


def test_a_folder_of_adapters_ends_where_its_base_does(saved, toy):
    """And other tools' adapters, which may hold more than two matrices, are not half read."""
    assert chat.end_ids(str(saved)) == chat.end_ids(str(toy / "init")) != set()
    settings = saved / "adapter_config.json"
    config = json.loads(settings.read_text())
    del config["base_digest"]
    settings.write_text(json.dumps(config))
    with pytest.raises(launch.UserError, match="not saved by sft.py or grpo.py"):
        checkpoint.resolve_checkpoint(str(saved))


def test_merged_it_is_a_checkpoint_of_whole_weights(saved, adapted, codec, toy, tmp_path,
                                                    monkeypatch, capsys):
    out = tmp_path / "merged"
    monkeypatch.setattr(sys, "argv", ["merge.py", str(saved), "--out", str(out)])
    merge.main()
    pack = pack_of(codec)
    with torch.no_grad():
        off = load_policy(str(out), codec)(pack)[0] - adapted(pack)[0]
    assert off.abs().max() < 1e-5
    assert str(toy / "init") in capsys.readouterr().out
    with pytest.raises(launch.UserError, match="exists"):
        merge.main()
    monkeypatch.setattr(sys, "argv", ["merge.py", str(out), "--out", str(tmp_path / "again")])
    with pytest.raises(launch.UserError, match="holds whole weights already"):
        merge.main()


def test_a_stage_goes_on_with_the_adapters_it_is_given(saved, adapted, codec, toy, process_group,
                                                       tmp_path):
    """The same weights are trained on, and saved again on the same base: no chain."""
    pack = pack_of(codec)
    assert checkpoint.adapter_rank(str(saved), 0) == RANK == checkpoint.adapter_rank(
        str(saved), RANK)
    with pytest.raises(launch.UserError, match="holds adapters of rank 3"):
        checkpoint.adapter_rank(str(saved), 2)
    policy = checkpoint.load_sharded(str(saved), codec, CPU, lora=RANK)
    with torch.no_grad():
        assert torch.equal(policy(pack)[0], adapted(pack)[0])
    for a, b in zip(model.trained_parameters(policy), model.trained_parameters(adapted)):
        assert torch.equal(a, b)
    second = tmp_path / "second"
    checkpoint.save_checkpoint(policy, codec, str(second), {"step": 1})
    assert checkpoint.base_of(str(second)) == str(toy / "init")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (second / name).read_bytes() == (saved / name).read_bytes()


# ------------------------------------------------------------------------------------------------
# The scripts


@pytest.fixture
def run(monkeypatch, toy, tmp_path):
    """run("grpo" | "sft", *flags) -> run folder, with the reference engine."""
    monkeypatch.setattr(rollout, "make_engine", make_engine)
    monkeypatch.setattr(launch, "stop_on_sigterm", threading.Event)
    real = rewards.score  # a random checkpoint earns nothing: let the reward vary
    monkeypatch.setattr(rewards, "score", lambda turns, *a, **k: {
        **real(turns, *a, **k), "paid_fmt": random.Random(turns[0]).random()})

    def run(script, *flags, out="run", ckpt=None):
        common = {"grpo": ("--data", toy / "rl.jsonl", "--frames", 4, "--show-every", 0,
                           "--prompts", 2, "--group", 3, "--max-new-tokens", 6, "--kl", 0.1),
                  "sft": ("--data", toy / "sft.jsonl", "--batch-size", 4)}
        words = [f"{script}.py", "--preset", "toy", "--ckpt", ckpt or toy / "init", "--out",
                 tmp_path / out, "--video-root", toy, *common[script], *flags]
        monkeypatch.setattr(sys, "argv", [str(w) for w in words])
        {"grpo": grpo, "sft": sft}[script].main()
        return tmp_path / out

    return run


def adapters(folder):
    return load_file(folder / "last" / "adapter_model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_a_run_goes_on_as_if_it_had_not_stopped(run, script):
    flags = ("--lora", RANK, "--lr", 1e-2)
    first = ("--steps", 1, "--warmup", 0, "--min-lr", 1) if script == "sft" else ("--steps", 1)
    both = (*first[2:], "--steps", 2)
    straight = run(script, *flags, *both, out="straight")
    halves = run(script, *flags, *first, out="halves")
    before = adapters(halves)
    assert not equal(before, adapters(straight))
    assert equal(adapters(run(script, *flags, *both, out="halves")), adapters(straight))


def test_going_on_with_something_else_is_refused(run, toy):
    flags = ("--steps", 1, "--lr", 1e-2)
    folder = run("sft", "--lora", RANK, *flags)
    for other, why in (((), "trained with --lora 3, not 0"),
                       (("--lora", 2), "trained with --lora 3, not 2")):
        with pytest.raises(launch.UserError, match=why):
            run("sft", *other, "--steps", 2, "--lr", 1e-2, "--resume")
    other = toy.parent / "other base"
    shutil.copytree(toy / "init", other, dirs_exist_ok=True)
    (other / "more.json").write_text("{}")
    with pytest.raises(launch.UserError, match="adapters on another base"):
        run("sft", "--lora", RANK, "--steps", 2, "--lr", 1e-2, "--resume", ckpt=other)
    with pytest.raises(launch.UserError, match="holds adapters of rank 3"):
        run("grpo", "--lora", 2, *flags, out="second", ckpt=folder)


def test_both_stages_by_adapters_alone(run, codec, toy):
    """The second begins where the first ended, without a word about adapters: its engine and its
    trainer agree, and its reference is the first stage's model."""
    first = run("sft", "--lora", RANK, "--steps", 2, "--lr", 1e-2, out="first")
    second = run("grpo", "--steps", 2, "--lr", 1e-2, out="second", ckpt=first)
    log = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    assert all(row["gap"] < 1e-5 for row in log)
    assert log[0]["kl"] == 0 and log[1]["kl"] > 0  # at the start, then of moved adapters
    assert not equal(adapters(first), adapters(second))
    ckpt = checkpoint.resolve_checkpoint(str(second))
    assert checkpoint.base_of(ckpt) == os.path.realpath(toy / "init")
    rows = json.loads((second / "args.json").read_text())
    assert rows["lora"] == RANK


def test_two_ranks_train_the_adapters_that_one_trains(toy, tmp_path):
    for ranks in (1, 2):
        done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                          toy / "sft.jsonl", "--lora", RANK, "--steps", 2, "--batch-size", 4,
                          "--lr", 1e-2, "--out", tmp_path / f"ranks{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (adapters(tmp_path / f"ranks{n}") for n in (1, 2))
    assert max((one[n] - two[n]).abs().max() for n in one) < 1e-5
    assert any(one[n].abs().max() > 1e-3 for n in one if ".lora_B." in n)


@pytest.mark.parametrize("words, why", [
    (("sft", "--lora", "4", "--optimizer", "muon"), "--lora goes with --optimizer adamw"),
    (("sft", "--lora", "-1"), "--lora must be at least 0"),
    (("grpo", "--lora", "-1"), "--lora must be at least 0")])
def test_flags_that_cannot_be_are_refused(run, words, why):
    with pytest.raises(launch.UserError, match=why):
        run(*words)


@pytest.mark.parametrize("script, dense, adapted", [(sft, 1e-5, 1e-4), (grpo, 2e-6, 2e-5)])
def test_the_learning_rate_follows(monkeypatch, script, dense, adapted):
    for flags, lr in (((), dense), (("--lora", "8"), adapted), (("--lora", "8", "--lr", "3"), 3.0)):
        words = ["x.py", "--ckpt", "c", "--data", "d", *flags]
        monkeypatch.setattr(sys, "argv", words)
        assert script.parse_args().lr == lr


def test_vllm_reads_it_as_the_same_model(toy, codec, adapted, tmp_path, process_group):
    """vLLM's own reader of adapters, on our base, against our forward."""
    vllm = pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.lora.request import LoRARequest

    folder = tmp_path / "adapters"
    checkpoint.save_checkpoint(moved(adapted), codec, str(folder), {"step": 1})
    ids = list(range(20, 60))
    tree = model.Tree(model.Span(ids, [0] + [1] * (len(ids) - 1)))
    with torch.no_grad():
        ours = adapted(model.pack_trees(codec, [tree]))[0]
    real = vllm.LLM
    with mock.patch.object(vllm, "LLM", lambda *given, **named: real(
            *given, **named, enable_lora=True, max_lora_rank=8)):
        engine = VllmEngine(str(toy / "init"), codec, Limits(context=256, max_frames=4, max_seqs=2))
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for adapter in (None, LoRARequest("ours", 1, str(folder))):
        (out,) = engine.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False,
                                     lora_request=adapter)
        found.append(torch.tensor([entry[i].logprob for i, entry in
                                   zip(ids[1:], out.prompt_logprobs[1:])]))
    engine.close()
    base, theirs = found
    # vLLM computes the adapters' part in bf16; the adapters move log-probs by some nats.
    assert (theirs - ours).abs().max() < 0.1 < (base - ours).abs().max() / 5
