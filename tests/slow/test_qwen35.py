"""
Tests of the second base, Qwen3.5: python -m pytest tests/slow/test_qwen35.py -q

The oracle is transformers' own model on each sequence alone, which knows nothing of packs.
"""
import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_script

import chat
import model
import rewards
from agent_tools import TOOLS
from plumbing import checkpoint, data, qwen35


def test_value_heads_share_key_heads_as_in_transformers():
    """In a gated-delta layer. The toy has one key head."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    torch.manual_seed(0)
    layer = modeling.Qwen3_5GatedDeltaNet(modeling.Qwen3_5TextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8), 0)
    states, plan = torch.randn(1, 9, 32), model.AttentionPlan("parts", [(0, 9, [])])
    assert (qwen35.packed_delta(layer, states, plan=plan) - layer(states)).abs().max() < 1e-5


@pytest.fixture(scope="module")
def world35(tmp_path_factory):
    """A small toy world on a random Qwen3.5."""
    out = tmp_path_factory.mktemp("qwen35") / "toy"
    done = run_script("toy.py", "--base", "qwen3_5", "--out", out, "--base-videos", "4",
                      "--sft-videos", "2", "--rl-videos", "3", "--eval-videos", "2")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def codec35(world35):
    return chat.load_codec(str(world35 / "init"))


def loaded(world):
    """transformers' own model, with weights that are not those of a start: a decay of 1 and a gate
    of 0 would hide faults."""
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(world / "init", dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if ".linear_attn." in name:
                p.add_(torch.randn_like(p) * (0.3 if p.ndim != 2 else 0.01))
    return hf


def untied(world, folder):
    """With a head of its own, as transformers saves it: text_config still says tied."""
    hf, folder = loaded(world), shutil.copytree(world / "init", folder)
    hf.config.tie_word_embeddings = False
    hf.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(hf.lm_head.weight))
    hf.save_pretrained(folder)
    return folder


def random_trees(codec, seed, sizes):
    """Trees of random text ids: [(prefix length, [branch lengths])]; all branch tokens trained."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(300, 500) for _ in range(n)]

    return [model.Tree(model.TokenSpan(ids(p), [0] * p), [], [model.TokenSpan(ids(n),
            [1] * n) for n in branches]) for p, branches in sizes]


def alone(hf, codec, trees, temperature=1.0):
    """Log-probs of the trained tokens by transformers, each [prefix | branch] a sequence."""
    bias = torch.zeros(hf.lm_head.weight.shape[0], dtype=hf.dtype)
    bias[list(codec.suppress_tokens)], found = -100.0, []
    for tree in trees:
        for branch in tree.branches:
            ids = torch.tensor([tree.prefix.ids + branch.ids])
            logits = (hf(input_ids=ids).logits[0] + bias) / temperature
            logp = logits.log_softmax(-1)[len(tree.prefix.ids) - 1:-1]
            found.append(logp.gather(1, torch.tensor(branch.ids)[:, None])[:, 0])
    return torch.cat(found)


LAYOUTS = {"one tree": [(9, [3, 1, 5])], "shorter than the convolution": [(1, [1, 2]), (2, [1])],
    "two trees": [(70, [3, 64, 65]), (5, [128, 2])], "around a chunk": [(63, [1]), (64, [1, 64]),
    (65, [63, 63])], "equal prefixes": [(20, [4, 4]), (20, [4]), (21, [])]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_packs_equal_separate_sequences(world35, codec35, name):
    """Log-probs and every gradient."""
    trees, hf = random_trees(codec35, name, LAYOUTS[name]), loaded(world35)
    expected = alone(hf, codec35, trees, temperature=0.7)
    weight = torch.rand(len(expected))
    (expected * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad()
    policy = model.wrap_policy(hf, codec35, torch.device("cpu"), False)
    qwen35.use_packed_layers(hf)
    logp, _ = policy(model.pack_trees(codec35, trees), 0.7)
    assert (logp - expected).abs().max() < 2e-5
    (logp * weight).sum().backward()
    scale, seen = max(g.abs().max() for g in gradients.values()), 0
    for n, p in policy.hf.named_parameters():
        if n in gradients and "visual" not in n:
            seen += 1
            assert (p.grad - gradients[n]).abs().max() < 1e-4 * scale, n
    assert seen > 35


def test_frames_and_text_as_transformers_computes_them(world35, codec35):
    """A prompt with frames: our ids, positions and features against transformers' processor."""
    import numpy as np

    import rollout
    import video

    hf = loaded(world35)
    text, rope = hf.config.text_config, hf.config.text_config.rope_parameters
    assert text.head_dim * rope["partial_rotary_factor"] == 2 * sum(rope["mrope_section"])
    task = data.read_tasks(str(world35 / "rl.jsonl"))[0]
    source = video.VideoSource(str(world35), video.FrameCache())
    spec = source.overview_spec(task, 5)
    frames = source.load(spec)
    context = rollout.open_context(codec35, rollout.main_messages(task, 5), [spec], [frames],
                                   rollout.tool_schema())
    answer = chat.encode(codec35, "I saw 8 red.\n</think>\n<answer>8 red</answer>") + [codec35.eos]
    inputs = codec35.processor.image_processor(
        images=list(frames.images), do_resize=False, return_tensors="pt")
    ids = torch.tensor([context.ids + answer])
    kinds = (ids == codec35.image_pad).long()
    with torch.no_grad():
        logits = hf(input_ids=ids, mm_token_type_ids=kinds, pixel_values=inputs["pixel_values"],
                    image_grid_thw=inputs["image_grid_thw"]).logits[0]
        logits[:, list(codec35.suppress_tokens)] -= 100.0
        wanted = logits.log_softmax(-1)[len(context.ids) - 1:-1]
        wanted = wanted.gather(1, torch.tensor(answer)[:, None])[:, 0]
        policy = model.wrap_policy(hf, codec35, torch.device("cpu"), False)
        qwen35.use_packed_layers(hf)
        policy.features = model.VisionFeatures(policy, source.load)
        tree = model.Tree(model.TokenSpan(context.ids, [0] * len(context.ids)), context.items,
                          [model.TokenSpan(answer, [1] * len(answer))])
        logp, _ = policy(model.pack_trees(codec35, [tree]))
    assert np.isfinite(logp.numpy()).all() and (logp - wanted).abs().max() < 1e-4


# ---- calls in XML ----

CALL = ("<tool_call>\n<function=crop_video>\n<parameter=start_time>\n{}\n</parameter>\n"
        "<parameter=end_time>\n{}\n</parameter>\n</function>\n</tool_call>")


@pytest.mark.parametrize("body, wanted", [
    (CALL.format(8, 16), (8.0, 16.0)), (CALL.format("0:08", "1:00.5"), (8.0, 60.5)),
    (CALL.format(8, 16).replace("\n", ""), (8.0, 16.0)),
    (CALL.format(8, 16).removesuffix("\n</tool_call>"), (8.0, 16.0)),
    (CALL.format(8, 16).replace("start_time", "start").replace("end_time", "end"), (8.0, 16.0))])
def test_calls_in_xml(body, wanted):
    (call,) = rewards.parse_tool_calls("ok</think>\n" + body, TOOLS, True)
    assert call.error is None
    assert (call.arguments["start"], call.arguments["end"]) == wanted


def test_tags_of_a_call_carry_credit(codec35):
    text = "ok\n</think>\n" + CALL.format(8, 16)
    pieces = chat.token_bytes_of(codec35, chat.encode(codec35, text) + [codec35.eos])
    marked = [p for p, m in zip(pieces, rewards.structural_mask(pieces)) if m]
    assert marked == [b"</think>", b"<tool_call>", b"</tool_call>", b"<|im_end|>"]


@pytest.mark.parametrize("body", [
    "<tool_call><function=crop_video>" + "<parameter=a>" * 200 + "</function></tool_call>",
    CALL.format(8, 16).replace("<parameter=start_time>", "start_time="), "<tool_call><function=",
    "<tool_call>" + "<function=crop_video>" * 100_000, CALL.format(16, 8)])
def test_faulty_calls_in_xml_are_one_error_each(body):
    (call,) = rewards.parse_tool_calls("ok</think>\n" + body, TOOLS, True)
    assert call.error and len(call.error) < 200


# ---- stages ----


def trained_weights(folder):
    from safetensors.torch import load_file

    name = "adapter_model.safetensors"
    return load_file(folder / name if (folder / name).exists() else folder / "model.safetensors")


@pytest.mark.parametrize("flags", [(), ("--lora-rank", 3)], ids=["whole", "adapters"])
def test_two_ranks_train_what_one_trains(world35, tmp_path, flags):
    """Shards: a gated-delta layer is three groups of FSDP2, each with its own hooks."""
    for ranks in (1, 2):
        done = run_script("sft.py", "--preset", "toy", "--ckpt", world35 / "init", "--data",
                          world35 / "sft.jsonl", *flags, "--steps", 2, "--batch-size", 4,
                          "--muon-lr", 0, "--lr", 1e-2, "--warmup", 0, "--out",
                          tmp_path / f"ranks{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (trained_weights(tmp_path / f"ranks{n}" / "last") for n in (1, 2))
    start = trained_weights(world35 / "init")
    # Adam's step is the sign of a gradient, also of one near 0, so a few weights may part.
    apart = torch.cat([(one[n] - two[n]).abs().flatten() for n in one])
    assert (apart > 1e-4).float().mean() < 0.01
    names = [n for n in one if ".linear_attn." in n and ".lora_A" not in n]
    assert len(names) >= 10
    for name in names:
        assert not torch.equal(one[name], start.get(name, torch.zeros_like(one[name]))), name


@pytest.mark.parametrize("flags", [(), ("--crop-response", "frames"),
                                   ("--crop-response", "frames", "--lora-rank", 4)])
def test_grpo_with_vllm_end_to_end(world35, tmp_path, flags):
    """Two updates with the engine in this process. The gap is rounding, the engine holds what was
    sent. The checkpoint opens in transformers."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from unittest import mock

    from conftest import Overheard
    from slow.test_bf16 import run, said

    import grpo
    import rollout

    out, engines, real = tmp_path / "out", [], rollout.make_engine
    ckpt = untied(world35, tmp_path / "untied") if flags[1:] == ("frames",) else world35 / "init"

    def make_engine(*args, **more):
        engines.append(Overheard(real(*args, **more), said))
        return engines[0]

    with mock.patch.object(rollout, "make_engine", make_engine):
        try:
            run(grpo, out, "--preset", "toy", "--prompts", 2, "--num-generations", 2, "--frames", 8,
                "--beta", 0.01, "--max-new-tokens", 24,
                "--ckpt", ckpt, "--data", world35 / "rl.jsonl", "--steps", 2, *flags)
        finally:
            for engine in engines:
                with contextlib.suppress(Exception):  # closed by the script, unless it failed
                    engine.close()
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2]
    assert all(0 < row["gap"] < 0.02 and row["kappa"] == 0.5 for row in log), log
    from transformers import AutoModelForImageTextToText

    if "--lora-rank" in flags:
        return
    _, loading = AutoModelForImageTextToText.from_pretrained(out / "last", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_a_load_that_loses_one_update_is_told_of(world35, codec35, monkeypatch, process_group):
    """Layers 0 and 2 are of one kind. A norm hardly moves in bf16, but A_log is held in fp32."""
    from test_engine import LOSES, check_loads, update_at

    from engine import EngineConfig, VllmEngine

    monkeypatch.setitem(LOSES, "one matrix of three fused", "layers.1.mlp.up_proj.weight")
    monkeypatch.setitem(LOSES, "one norm", "layers.0.linear_attn.A_log")
    ckpt = str(world35 / "init")
    policy = checkpoint.load_policy(ckpt, codec35, torch.device("cpu"))
    engine = VllmEngine(ckpt, codec35, EngineConfig(256, 4, max_seqs=2))
    try:
        check_loads(engine, lambda: checkpoint.full_weights(policy, torch.bfloat16),
                    update_at(2e-6, policy), [*LOSES, "two layers swapped"], monkeypatch, other=2)
    finally:
        engine.close()


# ---- kernels ----


def test_the_kernels_of_the_gpu_are_the_rule_of_the_cpu(tmp_path):
    """In Triton's interpreter, in fp32: outputs, states and all gradients."""
    for name in ("triton", "fla"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (pip install flash-linear-attention==0.6.0)")
    command = [sys.executable, os.path.join("tests", "slow", "kernels.py"), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert len(distances) == 8 and max(distances.values()) < 1e-5, distances
