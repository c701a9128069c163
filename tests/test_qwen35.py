"""
Tests of the second base, Qwen3.5: python -m pytest tests/test_qwen35.py -q

The oracle is transformers' own model on each sequence alone, which knows nothing of packs.
"""
import random

import pytest
import torch
from conftest import run_script

import chat
import model
import rewards
from plumbing import data


@pytest.fixture(scope="module")
def world35(tmp_path_factory):
    """A small toy world on a random Qwen3.5."""
    out = tmp_path_factory.mktemp("qwen35") / "toy"
    done = run_script("toy.py", "--base", "qwen3.5",
                      "--out", out, "--base-videos", "4", "--sft-videos", "2", "--rl-videos", "3",
                      "--eval-videos", "2")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def codec35(world35):
    return chat.load_codec(str(world35 / "init"))


def loaded(world, dtype=torch.float32):
    """transformers' own model, with weights that are not those of a start: a decay of 1 and a gate
    of 0 would hide faults."""
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(world / "init", dtype=dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if ".linear_attn." in name:
                p.add_(torch.randn_like(p) * (0.3 if p.ndim != 2 else 0.01))
    return hf


def random_trees(codec, seed, sizes):
    """Trees of random text ids: [(prefix length, [branch lengths])]; all branch tokens trained."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(300, 500) for _ in range(n)]

    return [model.Tree(model.Span(ids(p), [0] * p), [],
                       [model.Span(ids(n), [1] * n) for n in branches]) for p, branches in sizes]


def alone(hf, codec, trees, temperature=1.0):
    """Log-probs of the trained tokens by transformers, each [prefix | branch] a sequence."""
    bias = torch.zeros(hf.lm_head.weight.shape[0], dtype=hf.dtype)
    bias[list(codec.suppress_tokens)] = -100.0
    found = []
    for tree in trees:
        for branch in tree.branches:
            ids = torch.tensor([tree.prefix.ids + branch.ids])
            logits = (hf(input_ids=ids).logits[0] + bias) / temperature
            logp = logits.log_softmax(-1)[len(tree.prefix.ids) - 1:-1]
            found.append(logp.gather(1, torch.tensor(branch.ids)[:, None])[:, 0])
    return torch.cat(found)


LAYOUTS = {
    "one tree": [(9, [3, 1, 5])],
    "shorter than the convolution": [(1, [1, 2]), (2, [1])],
    "two trees": [(70, [3, 64, 65]), (5, [128, 2])],
    "around a chunk": [(63, [1]), (64, [1, 64]), (65, [63, 63])],
    "equal prefixes": [(20, [4, 4]), (20, [4]), (21, [])],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_packs_equal_separate_sequences(world35, codec35, name):
    """Log-probs and every gradient, in fp64 so that no rounding can hide a fault."""
    trees = random_trees(codec35, name, LAYOUTS[name])
    hf = loaded(world35, torch.float64)
    expected = alone(hf, codec35, trees, temperature=0.7)
    weight = torch.rand(len(expected), dtype=torch.float64)
    (expected * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad()
    policy = model.as_policy(hf, codec35, torch.device("cpu"), "none")
    logp, _ = policy(model.pack_trees(codec35, trees), 0.7)
    # transformers' rule and our logits compute in fp32 inside, whatever the weights are.
    assert (logp - expected).abs().max() < 2e-5
    (logp * weight).sum().backward()
    scale = max(g.abs().max() for g in gradients.values())
    seen = 0
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
    task = data.read_tasks(str(world35 / "rl.jsonl"))[0]
    source = rollout.Source(str(world35), video.FrameCache())
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
        policy = model.as_policy(hf, codec35, torch.device("cpu"), "none")
        policy.features = model.VisionFeatures(hf.model.visual, codec35, source.load)
        tree = model.Tree(model.Span(context.ids, [0] * len(context.ids)), context.items,
                          [model.Span(answer, [1] * len(answer))])
        logp, _ = policy(model.pack_trees(codec35, [tree]))
    assert np.isfinite(logp.numpy()).all()
    assert (logp - wanted).abs().max() < 1e-4


# ---- calls in XML ----

CALL = ("<tool_call>\n<function=crop_video>\n<parameter=start_time>\n{}\n</parameter>\n"
        "<parameter=end_time>\n{}\n</parameter>\n</function>\n</tool_call>")


@pytest.mark.parametrize("body, wanted", [
    (CALL.format(8, 16), (8.0, 16.0)),
    (CALL.format("0:08", "1:00.5"), (8.0, 60.5)),
    (CALL.format(8, 16).replace("\n", ""), (8.0, 16.0)),
    (CALL.format(8, 16).removesuffix("\n</tool_call>"), (8.0, 16.0)),
    (CALL.format(8, 16).replace("start_time", "start").replace("end_time", "end"), (8.0, 16.0)),
])
def test_calls_in_xml(body, wanted):
    (call,) = rewards.parse_tool_calls("ok</think>\n" + body, True)
    assert call.error is None and (call.start, call.end) == wanted


def test_tags_of_a_call_carry_credit(codec35):
    text = "ok\n</think>\n" + CALL.format(8, 16)
    ids = chat.encode(codec35, text) + [codec35.eos]
    pieces = chat.pieces_of(codec35, ids)
    marked = [p for p, m in zip(pieces, rewards.structural_mask(pieces)) if m]
    assert marked == [b"</think>", b"<tool_call>", b"</tool_call>", b"<|im_end|>"]


# ---- checkpoints ----


