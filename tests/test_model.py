"""
Tests of model.py: python -m pytest tests/test_model.py -q

Every piece of maths has an oracle outside the file: plain transformers for forwards and positions,
the processor for pixels, log_softmax for log-probs. Frames are random pictures with several vision
tokens each, so that rows, columns and neighbours cannot be mixed up unseen. Run under torchrun,
this file is the worker of the two-rank tests.
"""
import dataclasses
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from album import logprobs, plain_tree, prompt, response, separate_and_packed
from conftest import run_script
from handmade import plain_logps
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import forward
from torch.nn.attention.flex_attention import create_block_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import chat
import launch
import model
import sft
import video
from model import TokenSpan, Tree
from plumbing import checkpoint, data

LEARNING = SimpleNamespace(optimizer="muon", lr=1e-3, muon_lr=1e-2, beta2=0.99)


def gradients(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def relative(a, b):
    """Largest relative distance between two dicts of tensors (or two tensors), by norm."""
    if isinstance(a, dict):
        assert a.keys() == b.keys() and len(a) > 10
        return max(relative(a[n], b[n]) for n in a)
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


# ------------------------------------------------------------------------------------------------
# Who sees whom


def dense_mask(layout):
    """Pack.layout -> [L, L] bool, from the rule alone: a token sees earlier tokens of its own tree
    that stand in the prefix or in its own branch."""
    place = [(number, branch) for number, (_, p, branches) in enumerate(layout)
             for branch, n in enumerate([p, *branches]) for _ in range(n)]
    return np.array([[j <= i and place[i][0] == place[j][0] and place[j][1] in (0, place[i][1])
                      for j in range(len(place))] for i in range(len(place))])


layouts = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), max_size=4)),
                   min_size=1, max_size=4)


@given(layouts, st.sampled_from([1, 3, 4, 8, 16]))
@settings(max_examples=80, deadline=None)
def test_block_masks_show_exactly_the_pairs_of_the_dense_mask(lengths, size):
    """And the lists of blocks are those of torch's own function: FlexAttention computes whole
    blocks without asking, so one in the wrong list would show a branch to its neighbour, or hide a
    prompt, on a GPU alone."""
    trees = [Tree(TokenSpan([5] * p, [0] * p), [], [TokenSpan([6] * n, [1] * n) for n in branches])
             for p, branches in lengths]
    pack = model.pack_trees(None, trees)  # text alone asks the codec for nothing
    wanted = dense_mask(pack.layout)
    tokens = len(wanted)
    blocks = -(-tokens // size)
    padded, padded[:tokens, :tokens] = np.zeros((blocks * size, blocks * size), bool), wanted
    counts = padded.reshape(blocks, size, blocks, size).sum((1, 3))
    assert (model.visible_pairs(pack.layout, tokens, size) == counts).all()

    mask, at = model.block_mask(pack, torch.device("cpu"), size), torch.arange(tokens)
    assert (mask.mask_mod(0, 0, at[:, None], at[None, :]).numpy() == wanted).all()  # [L, L]
    theirs = create_block_mask(mask.mask_mod, None, None, tokens, tokens, "cpu", size)
    for ours, other in ((mask.kv_num_blocks, theirs.kv_num_blocks),
                        (mask.full_kv_num_blocks, theirs.full_kv_num_blocks),
                        (mask.to_dense(), theirs.to_dense())):
        assert torch.equal(ours, other)


# ------------------------------------------------------------------------------------------------
# One forward, many sequences


def test_packed_sequences_and_shared_prefix_trees_equal_separate_sequences(
        lively, codec, album):
    """Packing is only worth its speed when nobody can tell: log-probs and gradients are those of
    each sequence alone."""
    vision = album.features(lively, codec)
    separate, trees = separate_and_packed(codec, album)
    weights = torch.linspace(-1, 2, sum(sum(t.prefix.mask) for t in separate))
    packs = [model.pack_trees(codec, [tree]) for tree in separate]
    alone = torch.cat([forward(lively, pack, vision)[0] for pack in packs])
    wanted = gradients(lively, (alone * weights).sum())
    assert alone.std() > 0.5  # not the flat distribution of a fresh model
    for packing in (separate, trees):
        together, _ = forward(lively, model.pack_trees(codec, packing), vision)
        assert (together - alone).abs().max() < 1e-5
        assert relative(gradients(lively, (together * weights).sum()), wanted) < 1e-5


def test_plain_transformers_gives_the_same_log_probs(lively, codec, album):
    """The outside oracle: pixels, positions and forward are all transformers' own, called as its
    documentation says."""
    items = [album.item(1), album.item(2, frames=4, width=64), album.item(3, frames=1, height=128)]
    ids, _, _ = prompt(codec, "Look: ", items[0], items[1], " and ", items[2], " What is new?")
    answer = response(3, 12)
    ours = logprobs(lively, codec, album.features(lively, codec), [plain_tree(ids, items, answer)],
                    temperature=0.7)
    lively.hf.config.text_config._attn_implementation = "eager"
    lively.hf.config.vision_config._attn_implementation = "eager"
    with torch.no_grad():
        wanted = plain_logps(lively.hf, codec, album, ids + answer, [i.spec for i in items], 0.7)
    wanted = wanted[len(ids) - 1:]
    assert wanted.std() > 0.5 and (ours - wanted).abs().max() < 2e-5


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_log_probs_equal_plain_log_softmax(chunk):
    """The vocabulary projection in pieces must change no value, no entropy and no gradient."""
    torch.manual_seed(0)
    hidden = (0.3 * torch.randn(19, 16)).requires_grad_()
    weight = torch.randn(50, 16, requires_grad=True)
    target, scale = torch.randint(4, 50, (19,)), torch.randn(19)
    logp, entropy = model.token_logprobs(hidden, weight, target, banned=(0, 3), temperature=0.6,
                                         chunk=chunk)
    ours, bias = torch.autograd.grad((logp * scale).sum(), (hidden, weight)), torch.zeros(50)
    bias[[0, 3]] = -100
    table = ((hidden @ weight.T + bias) / 0.6).log_softmax(-1)
    plain = table[torch.arange(19), target]
    wanted = torch.autograd.grad((plain * scale).sum(), (hidden, weight))
    assert torch.allclose(logp, plain, atol=1e-5)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-5)
    assert not entropy.requires_grad and all(relative(a, b) < 1e-5 for a, b in zip(ours, wanted))
    assert table.exp()[:, [0, 3]].max() < 1e-20  # what nobody may sample has no probability


# ------------------------------------------------------------------------------------------------
# Ranks and micro-batches


def same_step(a, b):
    """AdamW's weights move alike to rounding. torch's Muon orthogonalises in bf16: five iterations
    magnify rounding in small directions by up to 500."""
    muon = {n for n in a if ".layers." in n and a[n].ndim == 2}
    for names, bound in ((a.keys() - muon, 1e-3), (muon, 0.25)):
        assert relative({n: a[n] for n in names}, {n: b[n] for n in names}) < bound


def one_update(toy, pack_tokens, replicas=1):
    """One SFT update of the toy's base on this process group, by the same chats -> loss, N, packs
    of this rank, full gradients, and the way of the weights."""
    device, (rank, world) = launch.start_process_group(), launch.rank_and_world()
    codec = chat.load_codec(str(toy / "init"))
    args = SimpleNamespace(video_root=None, max_pixels=50176, max_len=2048, pack_tokens=pack_tokens)
    chats = sft.Chats(str(toy / "sft.jsonl"), codec, args, video.FrameCache())
    policy = checkpoint.load_policy(str(toy / "init"), codec, device, replicas=replicas)
    vision = model.VisionFeatures(policy, chats.source.load)
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    before = {n: checkpoint.whole_tensor(p.detach()).clone() for n, p in trained.items()}
    rows = [chats.rows[index] for index in (0, 1, 2, 3, 4, 5, 7)]
    packs, _, _ = chats.packs(data.balance_over_ranks(rows, sft.cost, rank, world))
    policy.features = vision
    optimizers = sft.build_optimizers(policy, LEARNING, device)
    loss, count = sft.forward_backward(policy, packs)
    norm = model.reduce_and_clip(policy, 0)
    grads = {n: checkpoint.whole_tensor(p.grad).clone() for n, p in trained.items()}
    for optimizer in optimizers:
        optimizer.step()
    assert norm == pytest.approx(sum(g.square().sum().item() for g in grads.values()) ** 0.5)
    moved = {n: checkpoint.whole_tensor(p.detach()) - before[n] for n, p in trained.items()}
    return {"loss": loss, "count": count, "packs": len(packs), "grads": grads, "moved": moved}


@pytest.mark.process
def test_two_ranks_give_the_gradient_and_the_step_of_one(toy, tmp_path):
    """Ranks with unequal numbers of packs, in FSDP's shards or each with the whole model, AdamW and
    Muon: the same update. GRPO's: test_grpo_run.py."""
    launch.start_process_group()
    one_pack = one_update(toy, 10**6)
    done = run_script("tests/test_model.py", toy, tmp_path, ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for part in (*ranks[0], *ranks[1]):
        assert part["count"] == one_pack["count"]
        assert part["loss"] == pytest.approx(one_pack["loss"], rel=1e-6)
        assert relative(part["grads"], one_pack["grads"]) < 1e-5
        same_step(part["moved"], one_pack["moved"])
    # The first rank runs a spare pack that counts nothing.
    assert [[part["packs"] for part in parts] for parts in ranks] == [[3, 3], [4, 4]]


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_our_newton_schulz_is_that_of_torch_in_fp64(shape):
    """torch's iterations x (a + b x'x + c (x'x)^2) are the oracle, also of a matrix whose singular
    values fall by six powers of ten."""
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(0, -6, 8, dtype=torch.float64)) @ v
    x = matrix.T if shape[0] > shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    ours = sft.fp32_semi_orthogonal(matrix, coefficients, 5, 1e-7)
    assert torch.allclose(ours, x.T if shape[0] > shape[1] else x, atol=1e-11)


# ------------------------------------------------------------------------------------------------
# Packs


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), max_size=8),
       budget=st.integers(1, 40))
def test_filling_packs_keeps_the_budget_and_loses_nothing(sizes, budget):
    """Every trained token exactly once, also those of a prefix that is repeated because its tree
    had to be split."""
    trees, ids = [], itertools.count()  # trained tokens carry numbers of their own
    for lengths in sizes:
        spans = [TokenSpan([next(ids) for _ in range(n)], [0] + [1] * (n - 1)) for n in lengths]
        trees.append(Tree(spans[0], [], spans[1:]))
    packs = model.fill_packs(trees, budget)
    pieces = [t for members in packs for t in members]
    for members in packs:
        single = len(members) == 1 and len(members[0].branches) <= 1  # cannot be split further
        assert sum(len(t) for t in members) <= budget or single

    def trained(trees):
        return sorted(i for t in trees for s in (t.prefix, *t.branches)
                      for i, m in zip(s.ids, s.mask) if m)

    def branches(trees):  # each after its own context
        return sorted((t.prefix.ids, b.ids) for t in trees for b in t.branches)

    assert trained(pieces) == trained(trees) and branches(pieces) == branches(trees)


# ------------------------------------------------------------------------------------------------
# Vision features


def test_features_are_computed_once_per_frame_set(policy, codec, album):
    vision, items, loads = album.features(policy, codec), [album.item(1), album.item(2)], []
    vision.load = lambda spec: loads.append(spec) or album.load(spec)
    both, again = vision(items), vision([*items, items[0]])
    assert (again == torch.cat([both, both[:3 * 6]])).all() and len(loads) == 2
    assert both.shape == (2 * 3 * 6, 2, 128) and not both.requires_grad
    late = dataclasses.replace(items[0], key="late", seconds=[t + 1 for t in items[0].seconds])
    pytest.raises(ValueError, vision, [late]).match("has changed")
    few = torch.tensor([codec.image_pad, 0])  # placeholders for fewer features than are there
    pytest.raises(ValueError, policy.placeholder_mask, few, both).match("1 vision placeholders, 36")


if __name__ == "__main__":  # the worker of the two-rank test
    world = Path(sys.argv[1])
    found = [one_update(world, 1), one_update(world, 1, replicas=2)]
    torch.save(found, Path(sys.argv[2]) / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
