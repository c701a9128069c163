"""Tests of grpo.py. The oracle of the loss is a second implementation below: one plain transformers
forward per sequence, the formulas of the docstring written out, autograd. Run: pytest
tests/test_grpo.py"""
import concurrent.futures
import copy
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_script
from reference import ReferenceEngine, load_policy

import chat
import checkpoint
import data
import grpo
import launch
import metrics
import model
import rewards
import rollout
import video
from tools import replay

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>",
        "<answer>", "</answer>")
CALL = ('I need a closer look.\n</think>\n<tool_call>\n'
        '{"name": "crop_video", "arguments": {"start_time": 8, "end_time": 16}}\n</tool_call>')


# ------------------------------------------------------------------------------------------------
# Hand-made episodes


def sub_record(codec, source, task, text):
    """The record of one executed call, with the sub-agent's own context."""
    window = {"start": 8.0, "end": 16.0, "fps": 1.0, "max_frames": 4}
    spec = {"video": task["video"], **window}
    context = rollout.open_context(codec, rollout.sub_messages(task, window), [spec],
                                   [source.load(spec)])
    ids = chat.encode(codec, text) + [codec.eos]
    context.sampled(ids, [-1.0] * len(ids))
    return {"turn": 0, "start": 8.0, "end": 16.0, "num_frames": None, "parseable": True,
            "status": "ok", "summary": text, "sub_tokens": len(ids),
            "sub": {"ids": context.ids, "mask": context.mask, "logps": context.logps,
                    "vision": [vars(item) for item in context.items]}}


def make_episode(codec, source, task, sample, turns, summaries=(), step=0, frames=4, cut=False):
    """An Episode as rollout.py leaves it: `turns` are sampled texts, each call of the first turn is
    answered by a summary."""
    spec = {"video": task["video"], "frames": frames}
    context = rollout.open_context(codec, rollout.main_messages(task, frames), [spec],
                                   [source.load(spec)], rollout.tool_schema())
    episode = rollout.Episode(task, f"{step}/{task['id']}", sample, frames, step, context=context,
                              think_open=True, timing={"decode_s": 0.01})
    for number, text in enumerate(turns):
        context.insert(chat.think_prefix_ids(codec, context.ids))
        last = number == len(turns) - 1
        ids = chat.encode(codec, text) + ([] if cut and last else [codec.eos])
        episode.spans.append([len(context.ids), len(context.ids) + len(ids)])
        episode.struct += rollout.struct_places(chat.pieces_of(codec, ids), len(context.ids))
        context.sampled(ids, [-1.0] * len(ids))
        episode.turns.append(text)
        episode.finish.append("length" if cut and last else "stop")
        if not last:
            episode.calls = [sub_record(codec, source, task, text) for text in summaries]
            replies = [{"role": "tool", "content": text} for text in summaries]
            context.insert(chat.glue_ids(codec, replies, True))
    return episode


def reward(acc, fmt, tool, weight=1.0):
    return {"acc": acc, "fmt": fmt, "tool": tool, "paid_task": acc + tool, "paid_fmt": weight * fmt,
            "total": acc + weight * fmt + tool}


@pytest.fixture(scope="module")
def tasks(toy):
    """RL tasks with several colours first: naming one of them is neither right nor wrong."""
    return sorted(data.read_tasks(str(toy / "rl.jsonl")),
                  key=lambda t: -len(t["answer"].split()))


def make_group(codec, source, task, step=0, frames=4):
    """Four rollouts of one prompt: two turns with a call, a short answer, a thought that never
    closes, a turn cut off."""
    some = task["answer"].split(",")[0]
    group = [make_episode(codec, source, task, 0,
                          [CALL, f"I saw {some}.\n</think>\n<answer>{some}</answer>"],
                          ["a red square"], step, frames),
             make_episode(codec, source, task, 1,
                          [f"It was {some} I think.\n</think>\n<answer>{some}</answer>"], (), step,
                          frames),
             make_episode(codec, source, task, 2, ["I saw red.\n<answer>red</answer>"], (), step,
                          frames),
             make_episode(codec, source, task, 3, ["I saw white. I saw"], (), step, frames,
                          cut=True)]
    for e, r in zip(group, [reward(0.5, 1.0, 0.8), reward(0.5, 0.9, 0.0), reward(0.2, 0.35, 0.0),
                            reward(0.0, 0.1, 0.0)]):
        e.reward = r
    return group


@pytest.fixture
def groups(codec, source, tasks):
    return [make_group(codec, source, tasks[0]), make_group(codec, source, tasks[1])[:3]]


# ------------------------------------------------------------------------------------------------
# The oracle


@pytest.fixture
def plain(toy):
    """The same checkpoint as plain transformers, nothing of model.py in its forward."""
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32,
                                                         attn_implementation="eager")
    hf.model.visual.requires_grad_(False)
    return hf


def plain_logps(hf, codec, source, ids, specs, temperature):
    """Log-probs [L - 1] of ids[1:], under the distribution that was sampled from, by one unpadded
    forward."""
    from PIL import Image

    images = [Image.fromarray(image) for spec in specs for image in source.load(spec).images]
    vision = codec.processor.image_processor(images=images, do_resize=False, return_tensors="pt")
    row = torch.tensor([ids])
    logits = hf(input_ids=row, pixel_values=vision["pixel_values"],
                image_grid_thw=vision["image_grid_thw"],
                mm_token_type_ids=(row == codec.image_pad).int()).logits[0]
    never = torch.zeros(logits.shape[-1])
    never[list(codec.banned)] = -100.0
    return ((logits + never) / temperature).log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]


def sampled_positions(mask):
    return [t for t, m in enumerate(mask) if m]


def plain_struct(codec, episode):
    """Positions of tag tokens and turn ends, by looking for each literal in the decoded turn."""
    out = set()
    for start, end in episode.spans:
        text, owner = "", []
        for t in range(start, end):
            piece = codec.pieces[episode.context.ids[t]].decode()
            text += piece
            owner += [t] * len(piece)
        for tag in TAGS:
            at = text.find(tag)
            while at >= 0:
                out |= set(owner[at:at + len(tag)])
                at = text.find(tag, at + 1)
        out.add(end - 1)
    return out


def plain_advantages(codec, group, weight=1.0, credit="struct"):
    """-> per episode a dict position -> advantage, from the reward terms alone."""
    total = [e.reward["acc"] + e.reward["tool"] + weight * e.reward["fmt"] for e in group]
    sigma = statistics.pstdev(total)
    task = [e.reward["acc"] + e.reward["tool"] for e in group]
    out = []
    for e, t in zip(group, task):
        a = (t - statistics.mean(task)) / sigma
        f = weight * (e.reward["fmt"] - statistics.mean(x.reward["fmt"] for x in group)) / sigma
        marked = {"struct": plain_struct(codec, e),
                  "sequence": set(sampled_positions(e.context.mask)), "none": set()}[credit]
        out.append({t: a + (f if t in marked else 0.0) for t in sampled_positions(e.context.mask)})
    return out


def plain_loss(hf, codec, source, parts, n, temperature, eps, cap, beta, reference=None, old=None):
    """Docstring of grpo.py, sequence by sequence. parts: (ids, positions, rollout logps,
    advantages, specs)."""
    loss, clipped, truncated = 0.0, 0, 0
    for index, (ids, positions, sampler, advantage, specs) in enumerate(parts):
        at = torch.tensor(positions) - 1
        logp = plain_logps(hf, codec, source, ids, specs, temperature)[at]
        before = logp.detach() if old is None else old[index]
        sampler, advantage = torch.tensor(sampler), torch.tensor(advantage)
        weight = torch.minimum(torch.exp(before - sampler), torch.tensor(cap))
        rho = torch.exp(logp - before)
        surrogate = torch.minimum(rho * advantage, torch.clamp(rho, 1 - eps, 1 + eps) * advantage)
        loss = loss - (weight * surrogate).sum() / n
        clipped += int(((rho < 1 - eps) | (rho > 1 + eps)).sum())
        truncated += int((torch.exp(before - sampler) > cap).sum())
        if reference is not None:
            with torch.no_grad():
                ref = plain_logps(reference, codec, source, ids, specs, temperature)[at]
            loss = loss + beta * (torch.exp(ref - logp) - (ref - logp) - 1).sum() / n
    return loss, clipped, truncated


def plain_parts(codec, group, weight=1.0, credit="struct"):
    out = []
    for e, advantage in zip(group, plain_advantages(codec, group, weight, credit)):
        at = sampled_positions(e.context.mask)
        out.append((e.context.ids, at, [e.context.logps[t] for t in at], [advantage[t] for t in at],
                    [i.spec for i in e.context.items]))
    return out


def record_logps(hf, codec, source, episodes, temperature=1.0, shift=lambda n: 0.0):
    """Overwrite the sampled log-probs by the true ones plus shift(n-th sampled token): an engine
    that is nearly the trainer."""
    for e in episodes:
        contexts = [(e.context.ids, e.context.mask, e.context.logps,
                     [i.spec for i in e.context.items])]
        contexts += [(c["sub"]["ids"], c["sub"]["mask"], c["sub"]["logps"],
                      [v["spec"] for v in c["sub"]["vision"]]) for c in e.calls]
        for ids, mask, logps, specs in contexts:
            with torch.no_grad():
                true = plain_logps(hf, codec, source, ids, specs, temperature)
            for n, t in enumerate(sampled_positions(mask)):
                logps[t] = true[t - 1].item() + shift(n)


class Recorder:
    """An optimizer that keeps the gradients of every step and then does plain gradient descent."""

    def __init__(self, policy, lr=0.0):
        self.policy, self.lr, self.grads = policy, lr, []

    def step(self):
        named = [(n.removeprefix("hf."), p) for n, p in self.policy.named_parameters()
                 if p.grad is not None]
        self.grads.append({n: p.grad.clone() for n, p in named})
        with torch.no_grad():
            for _, p in named:
                p -= self.lr * p.grad

    def zero_grad(self, set_to_none=True):
        for p in self.policy.parameters():
            p.grad = None


def settings(**changes):
    """The flags of grpo.py, at their defaults where the oracle's formulas have no other number."""
    defaults = vars(grpo.build_parser().parse_args(["--ckpt", "c", "--data", "d"]))
    ours = dict(pack_tokens=4096, temperature=1.0, kl=0.0, clip=0.0)
    return SimpleNamespace(**{**defaults, **ours, **changes})


def credited(groups):
    """Groups with their advantages, as the loop of grpo.py sets them."""
    for group in groups:
        grpo.set_advantages(group)
    return groups


def run_update(policy, vision, codec, groups, args, reference=None, lr=0.0):
    """-> (gradients of each optimiser step, stats)"""
    recorder = Recorder(policy, lr)
    trees, tokens, _ = grpo.training_trees(credited(groups), args.format_credit)
    policy.features = vision
    if reference is not None:
        reference.features = vision
    stats = grpo.update(policy, reference, recorder, trees, tokens, args)
    return recorder.grads, stats


def plain_grads(hf):
    return {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}


def distance(found, wanted):
    """Relative L2 distance of two gradients, all parameters as one vector."""
    assert set(found) == set(wanted) and len(wanted) > 10
    gap = math.sqrt(sum(((found[n] - wanted[n]) ** 2).sum().item() for n in wanted))
    return gap / math.sqrt(sum((wanted[n] ** 2).sum().item() for n in wanted))


def perturb(hf, scale=0.3):
    """Another policy: every trained weight moved, the same way each time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in hf.parameters():
            if p.requires_grad:
                p += scale * p.std().nan_to_num(0.0) * torch.randn(p.shape, generator=generator)
    return hf


# ------------------------------------------------------------------------------------------------
# Credit


def test_credit_everywhere_is_plain_grpo_on_the_summed_reward(codec, groups):
    """The property that makes every ablation of the format credit comparable with GRPO."""
    for group in groups:
        credited([group])
        totals = [e.reward["total"] for e in group]
        for e in group:
            found = grpo.token_advantages(e, "sequence")
            wanted = (e.reward["total"] - statistics.mean(totals)) / statistics.pstdev(totals)
            credit = [found[t] for t in sampled_positions(e.context.mask)]
            assert credit == pytest.approx([wanted] * sum(e.context.mask), abs=1e-12)


@pytest.mark.parametrize("credit", ["struct", "sequence", "none"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_format_credit_reaches_exactly_the_tokens_it_names(codec, groups, credit, weight):
    for group in groups:
        for e in group:
            e.reward = reward(*(e.reward[name] for name in ("acc", "fmt", "tool")), weight)
        credited([group])
        for e, wanted in zip(group, plain_advantages(codec, group, weight, credit)):
            found = grpo.token_advantages(e, credit)
            assert {t: found[t] for t in wanted} == pytest.approx(wanted, abs=1e-9)
            assert all(found[t] == 0 for t in range(len(found)) if t not in wanted)


def test_struct_holds_tags_and_turn_ends_and_leaves_most_tokens_out(codec, groups):
    """Guards the oracle itself: a mask of everything or of nothing would agree with itself."""
    e = groups[0][0]
    marked = plain_struct(codec, e)
    text = b"".join(codec.pieces[e.context.ids[t]] for t in sorted(marked)).decode()
    assert text == "</think><tool_call></tool_call><|im_end|></think><answer></answer><|im_end|>"
    assert 2 * len(marked) < 1.4 * sum(e.context.mask)


def test_the_forced_prefix_and_tool_responses_earn_no_credit(codec, groups):
    e = groups[0][0]
    credited(groups[:1])
    advantage = grpo.token_advantages(e, "sequence")
    forced = e.spans[0][0]
    assert chat.decode(codec, e.context.ids[:forced]).endswith("<think>\n")
    assert not any(advantage[:forced]) and not any(advantage[e.spans[0][1]:e.spans[1][0]])
    assert e.spans[1][0] - e.spans[0][1] > 5


def test_a_group_with_different_prompts_is_refused(codec, source, tasks):
    """Sharing a prompt that is not shared would train on another video's frames without a sign."""
    mixed = make_group(codec, source, tasks[0])[:1] + make_group(codec, source, tasks[1])[1:2]
    credited([mixed])
    with pytest.raises(ValueError, match="prompts of one group differ"):
        grpo.group_tree(mixed, "struct")


# ------------------------------------------------------------------------------------------------
# Loss


def test_policy_loss_by_hand():
    """Four tokens: inside the clip, above it with A > 0, below it with A < 0, an importance weight
    over the cap."""
    logp = torch.log(torch.tensor([0.5, 0.9, 0.1, 0.5], dtype=torch.float64)).requires_grad_()
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64))
    sampler = torch.log(torch.tensor([0.25, 0.5, 0.5, 0.05], dtype=torch.float64))
    advantage = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=torch.float64)
    loss, stats = grpo.policy_loss(logp, old, sampler, None, advantage, 0.2, 0.0)
    assert loss.tolist() == pytest.approx([-2.0, -2.4, 0.8, -15.0])
    assert stats["clipped"].tolist() == [0, 1, 1, 0] and stats["truncated"].tolist() == [0, 0, 0, 1]
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, -15.0])


def test_policy_loss_keeps_the_gradient_where_the_clip_does_not_bind():
    """Above 1 + eps with A < 0, and below 1 - eps with A > 0, the minimum is the unclipped term."""
    logp = torch.log(torch.tensor([0.9, 0.1], dtype=torch.float64)).requires_grad_()
    old = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    loss, _ = grpo.policy_loss(logp, old, old, None, torch.tensor([-1.0, 1.0], dtype=torch.float64),
                               0.2, 0.0)
    assert loss.tolist() == pytest.approx([1.8, -0.2])
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1.8, -0.2])


def test_kl_term_is_k3_with_its_own_gradient():
    logp = torch.log(torch.tensor([0.2, 0.4], dtype=torch.float64)).requires_grad_()
    ref = torch.log(torch.tensor([0.4, 0.4], dtype=torch.float64))
    loss, stats = grpo.policy_loss(logp, logp.detach(), logp.detach(), ref,
                                   torch.zeros(2, dtype=torch.float64), 0.2, 0.1)
    assert stats["kl"].tolist() == pytest.approx([2 - math.log(2) - 1, 0.0])
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.1 * (1 - 2), 0.0])


@pytest.mark.parametrize("case", ["plain", "kl", "warm kl", "capped", "warm", "sequence"])
def test_gradient_of_an_update_is_that_of_separate_sequences(
        process_group, codec, source, groups, policy, vision, plain, toy, case, monkeypatch):
    """Packing, shared prompts, vision tokens, chunked log-probs and the loss, all at once, against
    the oracle."""
    temperature = 0.7 if "warm" in case else 1.0
    cap, beta = (1.05 if case == "capped" else 5.0), (0.3 if "kl" in case else 0.0)
    credit = "sequence" if case == "sequence" else "struct"
    shift = ((lambda n: -0.3 if n % 3 == 0 else 0.1) if case == "capped"
             else (lambda n: 0.02 * (n % 5 - 2)))
    record_logps(plain, codec, source, [e for g in groups for e in g], temperature, shift)
    reference = other = None
    if "kl" in case:  # a reference that is not the policy, else its gradient would be zero
        from transformers import Qwen3VLForConditionalGeneration

        reference = load_policy(str(toy / "init"), codec).requires_grad_(True)
        reference.hf.model.visual.requires_grad_(False)
        perturb(reference.hf)
        other = Qwen3VLForConditionalGeneration.from_pretrained(
            str(toy / "init"), dtype=torch.float32)
        other.load_state_dict(reference.hf.state_dict())
    if case == "capped":
        monkeypatch.setattr(grpo, "policy_loss", functools.partial(grpo.policy_loss, tis_cap=cap))
    args = settings(temperature=temperature, kl=beta, format_credit=credit)
    (found,), stats = run_update(policy, vision, codec, groups, args, reference)
    n = sum(sum(e.context.mask) for g in groups for e in g)
    parts = [p for g in groups for p in plain_parts(codec, g, 1.0, credit)]
    loss, clipped, truncated = plain_loss(plain, codec, source, parts, n, temperature, 0.2, cap,
                                          beta, other)
    loss.backward()
    wanted = plain_grads(plain)
    assert distance(found, wanted) < 1e-5
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert stats["tokens"] == n and clipped == 0 and stats["skipped_update"] == 0
    assert stats["truncated"] == pytest.approx(truncated / n)
    assert (truncated > 0) == (case == "capped")
    assert (stats["kl"] > 1e-4) == ("kl" in case)
    norm = math.sqrt(sum((g**2).sum().item() for g in wanted.values()))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_second_minibatch_is_clipped_against_the_policy_before_the_step(
        process_group, codec, source, groups, policy, vision, plain):
    """Two minibatches: the ratio's old log-probs are those from before the first step, and some
    ratios leave the clip range."""
    lr = 2.0  # at some rates a token lies on the edge of the clip range: either side is right
    record_logps(plain, codec, source, [e for g in groups for e in g])
    (first, second), stats = run_update(policy, vision, codec, groups, settings(minibatches=2),
                                        lr=lr)
    n = sum(sum(e.context.mask) for g in groups for e in g) / 2
    old = []
    for ids, at, _, _, specs in plain_parts(codec, groups[1]):
        with torch.no_grad():
            old.append(plain_logps(plain, codec, source, ids, specs, 1.0)[torch.tensor(at) - 1])
    loss, _, _ = plain_loss(plain, codec, source, plain_parts(codec, groups[0]), n, 1.0, 0.2, 5.0,
                            0.0)
    loss.backward()
    assert distance(first, plain_grads(plain)) < 1e-5
    with torch.no_grad():
        for p in plain.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None
    loss, clipped, _ = plain_loss(plain, codec, source, plain_parts(codec, groups[1]), n, 1.0, 0.2,
                                  5.0, 0.0, old=old)
    loss.backward()
    assert clipped > 0 and stats["clipped"] > 0
    # the first step's rounding is carried through a large step
    assert distance(second, plain_grads(plain)) < 1e-4


@pytest.mark.parametrize("pack_tokens", [1, 300])
def test_the_budget_of_a_pack_does_not_change_the_gradient(process_group, codec, source, groups,
                                                           policy, vision, plain, pack_tokens):
    """One pack of everything, or one per response: the same sum, divided by the same global
    count."""
    record_logps(plain, codec, source, [e for g in groups for e in g])
    (one,), _ = run_update(policy, vision, codec, groups, settings())
    trees, _, _ = grpo.training_trees(credited(groups), "struct")
    assert len(model.fill_packs(trees, pack_tokens)) > len(model.fill_packs(trees, 4096))
    (many,), _ = run_update(policy, vision, codec, groups, settings(pack_tokens=pack_tokens))
    assert distance(many, one) < 1e-5


# ------------------------------------------------------------------------------------------------
# Groups without signal


def test_a_group_of_equal_rewards_only_enlarges_the_count(process_group, codec, source, groups,
                                                          policy, vision, plain):
    """Dynamic sampling would drop it; here it counts as advantage zero, so the gradient shrinks and
    keeps its direction."""
    record_logps(plain, codec, source, [e for g in groups for e in g])
    for e in groups[1]:
        e.reward = reward(0.5, 0.4, 0.0)
    (alone,), _ = run_update(policy, vision, codec, groups[:1], settings())
    (both,), stats = run_update(policy, vision, codec, groups, settings())
    mine, all_of_them = (sum(sum(e.context.mask) for g in part for e in g)
                         for part in (groups[:1], groups))
    assert distance({n: g * (all_of_them / mine) for n, g in both.items()}, alone) < 1e-5
    assert grpo.training_trees(credited(groups), "struct")[1:] == (all_of_them, 1)
    assert stats["tokens"] == mine  # the means of the log are over tokens that were trained


def test_rewards_that_differ_by_rounding_alone_are_no_signal(codec, groups):
    """1.0 + 0.9 and 1.1 + 0.8: sigma is 1e-16, and every advantage 0."""
    for n, e in enumerate(groups[0]):
        e.reward = reward(*((1.0, 0.9, 0.0), (1.1, 0.8, 0.0))[n % 2])
    credited(groups[:1])
    assert groups[0][0].advantage["sigma"] > 0
    assert grpo.training_trees(groups[:1], "struct")[::2] == ([], 1)


def test_without_any_signal_the_weights_stay_bit_identical(process_group, codec, groups, policy,
                                                           vision):
    for e in groups[0]:
        e.reward = reward(0.5, 0.4, 0.0)
    before = copy.deepcopy(policy.state_dict())
    optimizer = torch.optim.AdamW(model.trained_parameters(policy), lr=1.0, weight_decay=1.0)
    trees, tokens, skipped = grpo.training_trees(credited(groups[:1]), "struct")
    stats = grpo.update(policy, None, optimizer, trees, tokens, settings())
    assert (stats["skipped_update"], skipped, trees) == (1, 1, [])
    assert all(torch.equal(before[n], v) for n, v in policy.state_dict().items())


# ------------------------------------------------------------------------------------------------
# Metrics


def row(k, acc, executed, group="p", **changes):
    base = {"K": k, "group": f"{group}/{k}", "status": "ok",
            "type": "mcq", "chance": None, "acc": acc, "f_tau": 0.6,
            "reward": {"total": acc + 0.5, "acc": acc, "fmt": 0.5, "tool": 0.0, "new": 2 * acc},
            "well_formed": executed > 0,
            "closure": {t: [0, 0] for t in rewards.KINDS},
            "written": executed, "parseable": executed, "executed": executed,
            "length": 10, "turns": 1, "cut": 0,
            "sub_tokens": 0, "decode_s": 0.0, "windows": None}
    return {**base, **changes}


def test_summary_by_hand():
    """Two budgets; calling paid at K = 4 and cost at K = 64."""
    def closure(*pairs):
        return dict(zip(rewards.KINDS, pairs, strict=True))

    rows = [row(4, 1.0, 2, closure=closure([2, 1], [2, 2], [2, 1], [1, 1]), written=3, turns=2,
                cut=1),
            row(4, 0.0, 0, closure=closure([1, 1], [0, 0], [0, 0], [1, 0])),
            row(64, 0.5, 1, type="open", chance=0.25, sub_tokens=8),
            row(64, 1.0, 0, type="open", chance=0.5)]
    m = metrics.summarise(rows)
    assert m["kappa"] == 0.75 and m["valid_calls"] == 0.75 and m["written_calls"] == 1.0
    assert m["called"] == 0.5
    assert m["acc"] == 0.625 and m["total"] == 1.125 and m["fmt"] == 0.5 and m["f_tau"] == 0.6
    assert m["new"] == 1.25  # a term that only rewards.score knows
    assert m["well_formed"] == 0.5 and m["sub_tokens"] == 2
    assert m["closure"] == closure(pytest.approx(2 / 3), 1.0, 0.5, 0.5)
    assert m["cut_turns"] == pytest.approx(1 / 5) and m["not_ok"] == 0
    assert m["call_minus_skip"] == pytest.approx((1.0 - 0.5) / 2)
    assert m["by_K"]["4"] == {"n": 2, "acc": 0.5, "f_tau": 0.6, "well_formed": 0.5, "kappa": 1.0,
                              "call_minus_skip": 1.0}
    assert m["by_K"]["64"]["call_minus_skip"] == -0.5 and list(m["by_K"]) == ["4", "64"]
    assert m["by_type"]["open"] == {**m["by_K"]["64"], "chance": 0.375}
    assert m["by_type"]["mcq"] == {**m["by_K"]["4"], "chance": None}
    # Rollouts that failed have no accuracy, no format and no calls. They are counted, not averaged.
    failed = [row(4, 0.0, 0, status=status, f_tau=0.0, turns=0)
              for status in ("video_error", "engine_error")]
    assert metrics.summarise(rows + failed) == {**m, "not_ok": 2}


def test_windows_are_judged_per_budget_over_the_rollouts_that_looked():
    good, poor = (dict(zip(("recall", "precision", "iou", "hit"), numbers))
                  for numbers in ((1.0, 0.5, 0.5, 1.0), (0.0, 0.0, 0.0, 0.0)))
    m = metrics.summarise([row(4, 1.0, 1, windows=good), row(4, 0.0, 1, windows=poor),
                           row(4, 0.0, 0), row(64, 1.0, 2, windows=good), row(8, 0.0, 0)])
    assert [m["by_K"][k].get("window_recall") for k in ("4", "8", "64")] == [0.5, None, 1.0]
    assert (m["by_K"]["4"]["window_precision"], m["by_K"]["4"]["window_iou"]) == (0.25, 0.25)
    assert m["window_hit"] == pytest.approx(2 / 3)
    assert not any(name.startswith("window") for name in metrics.summarise([row(4, 1.0, 1)]))


def test_a_step_line_says_how_many_failed_and_shows_no_number_that_was_not_measured():
    m = {**metrics.summarise([row(4, 0.0, 0, status="video_error")] * 10), "step": 3, "gap": None,
         "grad_norm": None, "zero_variance": 0, "groups": 0, "rollout_s": 1.0, "train_s": 0.0}
    line = metrics.step_line(m, 9, 60.0)
    assert "| not ok 10 |" in line and "R - acc - f_tau - kappa -" in line
    assert "gap - gn - zero 0/0" in line
    fine = {**m, **metrics.summarise([row(4, 1.0, 1)]), "gap": 2e-4, "grad_norm": 0.5, "groups": 1}
    line = metrics.step_line(fine, 9, 60.0)
    assert "not ok" not in line and "gap 2e-04 gn 0.50" in line


# ------------------------------------------------------------------------------------------------
# Signs of a dead run


def logged(steps, **changes):
    """Rows of the log of a healthy run, changed: a list gives one value a step."""
    rows = []
    for i in range(steps):
        now = {name: value[i] if isinstance(value, list) else value
               for name, value in changes.items()}
        kinds = now.pop("kinds", {"list": (0.5 + 0.02 * (i % 3), 0.1)})
        by_type = {kind: {"n": 8, "acc": acc, "chance": chance}
                   for kind, (acc, chance) in kinds.items()}
        rows.append({"step": i + 1, "f_tau": 0.8 + 0.01 * i, "entropy": 1.0, "cut_turns": 0.02,
                     "acc": 0.5, "not_ok": 0, "groups": 8, "zero_variance": 3,
                     "closure": dict.fromkeys(rewards.KINDS, 0.9), "by_type": by_type, **now})
        rows.append({"step": i + 1, "val": {"acc": 0.5}})  # held-out accuracy, a row of its own
    return rows[:-1]


def test_a_healthy_run_shows_no_sign_of_death():
    for steps in range(1, 12):
        assert metrics.signs(logged(steps)) == {}
    # A type that comes in few steps, a step that failed whole, a tag that nothing opened.
    rare = [{"list": (0.5, 0.1), "mcq": (0.0, 0.2)} if i == 4 else {"list": (0.5, 0.1)}
            for i in range(9)]
    closure = {**dict.fromkeys(rewards.KINDS, 0.9), "tool_code": None}
    assert metrics.signs(logged(9, kinds=rare, closure=closure)) == {}
    gone = [0.9] * 8 + [None]
    assert metrics.signs(logged(9, f_tau=gone, entropy=gone, cut_turns=gone, groups=[8] * 8 + [0],
                             zero_variance=[0] * 9)) == {}


@pytest.mark.parametrize("name, word, changes, since", [
    # A learning rate x 100: all zeros after one update.
    ("f_tau", "--lr", {"f_tau": [0.9] + [0.0] * 8}, 2),
    ("entropy", "--lr", {"entropy": [1.0] * 5 + [0.4] * 4}, 6),
    ("signal", "all rollouts of a prompt earn the same", {"zero_variance": [3] + [8] * 8}, 4),
    # Answers that are always wrong, of one type among two.
    ("type mcq", "type mcq", {"kinds": {"list": (0.5, 0.1), "mcq": (0.0, 0.0)}}, 3),
    # Labels shuffled between rows: an answer fits any label as well as its own.
    ("chance list", "mixed up between rows",
     {"kinds": [{"list": (0.2 + 0.02 * (i % 2), 0.21)} for i in range(9)]}, 5),
    # Tags that never close.
    ("open think", "<think>", {"closure": {**dict.fromkeys(rewards.KINDS, 0.9), "think": 0.1}}, 3),
    # Every video is gone: there is nothing to average.
    ("failed", "--video-root", {"not_ok": 64, "groups": 0, "zero_variance": 0, "kinds": {},
                                "f_tau": None, "entropy": None, "cut_turns": None, "acc": None,
                                "closure": dict.fromkeys(rewards.KINDS)}, 3),
    ("cut", "--max-new-tokens", {"cut_turns": [0.1, 0.6] + [0.7] * 7}, 2),
], ids=lambda value: value if isinstance(value, str) else "")
def test_each_way_to_die_is_named_from_the_step_on_at_which_it_shows(name, word, changes, since):
    rows = logged(9, **changes)
    found = [metrics.signs(rows[:2 * step - 1]) for step in range(1, 10)]
    assert set().union(*found) == {name}  # and nothing else is blamed
    assert next(step for step, signs in enumerate(found, 1) if signs) == since
    assert word in found[since - 1][name]


def test_noise_of_few_prompts_is_no_sign():
    """Two options and few prompts: right answers beat other labels by little, and unsteadily."""
    apart = [0.3, -0.05, 0.25, 0.1, -0.1, 0.2, 0.3, 0.0, 0.15]
    rows = logged(9, kinds=[{"mcq": (0.5 + gap, 0.5)} for gap in apart], groups=2,
                  zero_variance=[2, 2, 2, 2, 1, 2, 2, 2, 2])
    assert [metrics.signs(rows[:2 * step - 1]) for step in range(1, 10)] == [{}] * 9


def test_a_collapsed_run_is_warned_of_once(run_grpo, given_rollouts, hard_tasks, monkeypatch,
                                           capsys):
    """Further signs follow from the first one, and would name other causes."""
    signs = iter([{}, {"f_tau": "fell", "cut": "cut"}, {"cut": "cut", "type list": "wrong"}])
    monkeypatch.setattr(metrics, "signs", lambda _: next(signs))
    run_grpo("--data", hard_tasks, "--steps", 3, "--prompts", 2, "--group", 4)
    printed = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert printed == ["WARNING step 2: fell"]


def test_what_a_call_is_worth_is_measured_within_prompts():
    """An easy prompt where all skipped and a hard one where all called say nothing of calling."""
    rows = [row(8, 1.0, 0, "easy"), row(8, 1.0, 0, "easy"), row(8, 0.0, 1, "hard"),
            row(8, 0.0, 2, "hard")]
    assert metrics.call_minus_skip(rows) is None
    both = [row(8, 1.0, 1, "both"), row(8, 0.5, 1, "both"), row(8, 0.25, 0, "both")]
    assert metrics.call_minus_skip(rows + both) == pytest.approx(0.5)
    # A call that was written and then lost is a part of what calling costs.
    lost = row(8, 0.0, 0, "both", closure={**row(8, 0, 0)["closure"], "tool_code": [1, 0]})
    refused = row(8, 0.0, 0, "both", written=1)
    assert metrics.call_minus_skip(rows + both + [lost]) == pytest.approx(0.25)
    assert metrics.call_minus_skip(rows + both + [refused]) == pytest.approx(0.25)


def test_what_cannot_be_compared_is_none_and_not_zero():
    """All called or none: there is no other side, and a zero would read as "calling is worth
    nothing"."""
    m = metrics.summarise([row(8, 1.0, 1), row(8, 0.0, 2)])
    assert m["call_minus_skip"] is None and m["by_K"]["8"]["call_minus_skip"] is None
    assert m["closure"]["answer"] is None


# ------------------------------------------------------------------------------------------------
# K


def test_gated_frames_is_a_function_of_seed_step_and_task_in_any_process():
    """Python's own hash of a string would differ from process to process."""
    keys = [(seed, step, f"task-{i}") for seed in (0, 1) for step in (0, 1, 2) for i in range(20)]
    here = [rollout.gated_frames(*key) for key in keys]
    code = f"import rollout, json; print(json.dumps([rollout.gated_frames(*k) for k in {keys!r}]))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                           env=environment, timeout=120)
    assert json.loads(there.stdout) == here
    assert set(here) == {4, 8, 16, 32, 64}
    assert here[:20] != here[20:40] and here[:20] != here[60:80]


# ------------------------------------------------------------------------------------------------
# The script, in this process


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_prompts_and_frames_about_evenly(world):
    """Equally many prompts each; their frames, all that is known of their cost, differ by one
    overview at most."""
    tasks = [{"id": f"t{i}"} for i in range(48)]  # three steps an epoch
    args = SimpleNamespace(prompts=16, frames="gated", seed=0)
    for step in range(5):
        shares = [grpo.share(tasks, step, args, rank, world) for rank in range(world)]
        everybody = [f"{step}/{task['id']}" for mine, _ in shares for task in mine]
        assert sorted(everybody) == sorted(shares[0][1]) and len(set(everybody)) == 16
        assert all(order == shares[0][1] and len(mine) == 16 // world for mine, order in shares)
        frames = [sum(rollout.gated_frames(0, step, task["id"]) for task in mine)
                  for mine, _ in shares]
        assert max(frames) - min(frames) <= 60


@pytest.fixture
def run_grpo(monkeypatch, toy, tmp_path):
    """-> function that runs grpo.main(), or replay.main() if it is given --rollouts -> (weights,
    last row of log.jsonl, run folder)."""
    from safetensors.torch import load_file

    monkeypatch.setattr(rollout, "make_engine", lambda ckpt, codec, args, *_,
                        **__: ReferenceEngine(ckpt, codec, args.max_seqs))

    def run(*flags, out="run"):
        folder = tmp_path / out
        script = replay if "--rollouts" in flags else grpo
        words = [f"{script.__name__}.py", "--preset", "toy", "--ckpt", toy / "init", "--out",
                 folder, "--video-root", toy, *flags]
        words += () if script is replay else ("--show-every", 0) * ("--show-every" not in flags)
        monkeypatch.setattr(sys, "argv", [str(w) for w in words])
        script.main()
        weights = load_file(folder / "last" / "model.safetensors")
        return weights, json.loads((folder / "log.jsonl").read_text().splitlines()[-1]), folder

    return run


@pytest.fixture
def any_gap(monkeypatch):
    """Recorded log-probs that are not this run's own: the probe would stop it."""
    monkeypatch.setattr(grpo, "gap_tolerance", lambda *_: 99)


@pytest.fixture(scope="module")
def recorded(toy, codec, tasks, tmp_path_factory):
    """A rollout JSONL of three hand-made groups with the base checkpoint's own log-probs at
    temperature 1."""
    from transformers import Qwen3VLForConditionalGeneration

    import video

    source = rollout.Source(str(toy), video.FrameCache())
    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32)
    episodes = [e for task, k in zip(tasks[:3], (4, 8, 4))
                for e in make_group(codec, source, task, frames=k)]
    record_logps(hf, codec, source, episodes)
    path = tmp_path_factory.mktemp("recorded") / "r.jsonl"
    path.write_text("".join(json.dumps(e.to_json()) + "\n" for e in episodes))
    return path


def moved(weights, base):
    """The update as one vector."""
    return torch.cat([(weights[n] - base[n]).flatten() for n in sorted(base)])


def same_update(a, b, base, tolerance=2e-3):
    """Adam's first step is lr * sign(g) for all but tiny g, so rounding shows up magnified where
    the gradient vanishes."""
    return (moved(a, base) - moved(b, base)).norm() < tolerance * moved(a, base).norm()


@pytest.fixture(scope="module")
def base(toy):
    from safetensors.torch import load_file

    return load_file(toy / "init" / "model.safetensors")


@pytest.mark.parametrize("flag", [
    ("--lr", 1e-4), ("--clip", 1e-3), ("--temperature", 0.5), ("--format-credit", "sequence"),
    ("--format-credit", "none"),
    ("--set", "minibatches=2"), ("--kl", 5.0, "--set", "minibatches=2", "--lr", 1e-2),
    ("--clip-eps", 1e-4, "--set", "minibatches=2")],
                         ids=lambda f: " ".join(map(str, f)))
def test_every_flag_of_the_update_changes_the_update(run_grpo, any_gap, recorded, base, flag):
    """A knob that does nothing, quietly, is the worst kind; one run with it against one without."""
    loose = ("--rollouts", recorded, "--clip", 0)
    # the flag alone makes the difference, not what it needs to act
    without = () if len(flag) < 4 else flag[2:]
    a, _, _ = run_grpo(*loose, *without, out="a")
    b, m, _ = run_grpo(*loose, *flag, out="b")
    assert not torch.equal(moved(a, base), torch.zeros_like(moved(a, base)))
    # under --clip 1e-3 Adam's eps is no longer small beside the gradient
    assert not same_update(a, b, base)
    if flag[0] == "--clip":  # the norm is logged before clipping
        norm = json.loads((run_grpo(*loose, out="c")[2] / "log.jsonl").read_text())["grad_norm"]
        assert m["grad_norm"] == pytest.approx(norm, rel=1e-6) and norm > 1e-3


def test_learning_rate_sets_the_size_of_the_step(run_grpo, recorded, base):
    """Adam's first step is as long as the learning rate, per weight."""
    weights, m, _ = run_grpo("--rollouts", recorded, "--lr", 1e-4)
    assert moved(weights, base).abs().max().item() == pytest.approx(1e-4, rel=2e-2)
    assert m["gap"] < 1e-4 and m["tokens"] > 50


def test_a_recorded_gap_beyond_the_tolerance_stops_the_run(run_grpo, recorded, tmp_path,
                                                           monkeypatch):
    """Rollouts of other weights: every log-prob is off by 0.15 nats."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    for r in rows:
        r["logps"] = [lp + 0.15 * m for lp, m in zip(r["logps"], r["mask"])]
    shifted = tmp_path / "shifted.jsonl"
    shifted.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(launch.RunError,
                       match="between engine and trainer is 0.150 nats, tolerance 0.1"):
        run_grpo("--rollouts", shifted)
    assert not (tmp_path / "run" / "last").exists()
    assert grpo.gap_tolerance(torch.float32) == 1e-3  # with an engine in the same precision
    monkeypatch.setattr(grpo, "gap_tolerance", lambda *_: 0.16)
    run_grpo("--rollouts", shifted)


def test_log_probs_that_are_no_numbers_stop_the_run(run_grpo, recorded, tmp_path):
    """nan > tolerance is false: a naive comparison would let exactly the worst case pass."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    rows[0]["logps"][rows[0]["spans"][0][0]] = float("nan")
    broken = tmp_path / "nan.jsonl"
    broken.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(launch.RunError, match="between engine and trainer is nan"):
        run_grpo("--rollouts", broken)


def test_groups_without_signal_leave_the_checkpoint_as_it_was(run_grpo, recorded, tmp_path, base):
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    for r in rows:
        r.update(turns=rows[0]["turns"], calls=rows[0]["calls"])  # a replay is scored anew
    flat = tmp_path / "flat.jsonl"
    flat.write_text("".join(json.dumps(r) + "\n" for r in rows))
    weights, m, _ = run_grpo("--rollouts", flat)
    assert all(torch.equal(weights[n], base[n]) for n in base)
    assert (m["skipped_update"], m["zero_variance"], m["groups"]) == (1, 3, 3)


def test_a_film_that_is_gone_costs_a_replay_its_group_and_is_counted(
        run_grpo, recorded, tmp_path, capsys):
    """The others are trained as if that group had never been there: N counts them alone."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    first = [r for r in rows if r["group"] == rows[0]["group"]]
    others = [r for r in rows if r["group"] != rows[0]["group"]]
    for name, some in (("others", others), ("all", rows)):
        if some is rows:
            for r in first:
                r["vision"][0]["spec"]["video"] = "gone.mp4"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    found = [run_grpo("--rollouts", tmp_path / f"{name}.jsonl", "--temperature", 1, out=name)
             for name in ("others", "all")]
    assert all(torch.equal(w, found[1][0][n]) for n, w in found[0][0].items())
    assert [m["not_ok"] for _, m, _ in found] == [0, len(first)]
    assert [m["groups"] for _, m, _ in found] == [2, 2]
    assert capsys.readouterr().out.count(f"skipped task {first[0]['task']['id']}: ") == 1


class SilentEngine:
    """Stands in for an engine where the rollouts are given."""

    def sleep(self):
        pass

    def wake(self, weights):
        assert len(list(weights)) > 10

    def close(self):
        pass


@pytest.fixture
def given_rollouts(monkeypatch, codec, source, tasks, any_gap):
    """Rollouts of grpo.main() are the hand-made group, scored by the real rewards -> list of the
    calls of rollout.run."""
    seen = []

    def fake_run(sampler, batch, frames, group, step, pump):
        agent, pay = sampler.agent, sampler.pay
        seen.append({"agent": agent, "frames": frames, "group": group, "step": step,
                     "pay": pay, "tasks": [t["id"] for t in batch]})
        for task in batch:
            for e in make_group(codec, source, task, step):
                e.think_open = agent.think_prefix
                e.reward = rollout.scored(e, pay)
                yield e

    monkeypatch.setattr(rollout, "run", fake_run)
    monkeypatch.setattr(rollout, "make_engine", lambda *_, **__: SilentEngine())
    return seen


@pytest.fixture
def hard_tasks(tasks, tmp_path):
    """Task JSONL of the two tasks with the most colours."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in tasks[:2]))
    return path


@pytest.mark.parametrize("flags,term,sample,change", [
    (("--no-answer-suffix",), "fmt", 2, -0.2), (("--anchor", 0), "fmt", 1, -0.2),
    (("--set", "gamma=0"), "fmt", 2, 0.15),
    (("--tool-reward", 0), "total", 0, -0.8), (("--format-weight", 0.5), "total", 1, -0.5),
    (("--call-cost", 0.25), "total", 0, -0.25)],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "")
def test_every_flag_of_the_reward_changes_its_term(run_grpo, given_rollouts, hard_tasks, flags,
                                                   term, sample, change):
    """Values by hand: sample 1 has a whole thought and answer, sample 2 never closes its thought,
    sample 0 called and answered."""
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 1, "--group", 4, "--lr", 0)
    found = []
    for name, extra in (("a", ()), ("b", flags)):
        _, _, folder = run_grpo(*common, *extra, out=name)
        record = (folder / "rollouts" / "step_000000.rank0.jsonl").read_text()
        rows = [json.loads(line) for line in record.splitlines()]
        found.append(rows[sample]["reward"][term])
    assert found[1] - found[0] == pytest.approx(change)


def test_answer_from_line_pays_an_answer_without_its_tag(run_grpo, given_rollouts, hard_tasks):
    """The hand-made sample 2 says the answer and never closes its thought or opens an answer."""
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 1, "--group", 4, "--lr", 0)
    for name, flags in (("tag", ()), ("line", ("--set", "answer_from=line"))):
        run_grpo(*common, *flags, out=name)
    assert [call["pay"].answer_from for call in given_rollouts] == ["tag", "line"]


def test_f_tau_is_one_ruler_for_runs_that_are_paid_differently(
        run_grpo, given_rollouts, hard_tasks):
    """Without suffix and anchor the reward is smaller; the compliance that it is reported with is
    not."""
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 1, "--group", 4, "--lr", 0)
    less = ("--no-answer-suffix", "--anchor", 0, "--set", "gamma=0")
    full, plain = (run_grpo(*common, *flags, out=name)[1]
                   for name, flags in (("a", ()), ("b", less)))
    assert full["f_tau"] == full["fmt"] == plain["f_tau"] and plain["fmt"] < full["fmt"]
    assert 0 < full["well_formed"] == plain["well_formed"] < 1


def test_agent_flags_reach_the_rollouts(run_grpo, given_rollouts, hard_tasks):
    common = ("--data", hard_tasks, "--steps", 2, "--prompts", 1)
    run_grpo(*common, "--group", 4, "--frames", 16, "--temperature", 0.5, "--no-think-prefix",
             "--seed", 9, "--max-parallel", 2, "--set", "sub_fps=0.25", "dispatch=sequential")
    first, second = given_rollouts
    agent = first["agent"]
    assert (agent.temperature, agent.sub_fps) == (0.5, 0.25)
    assert (agent.think_prefix, agent.seed) == (False, 9)
    assert (agent.max_parallel, agent.dispatch) == (2, "sequential")
    assert (first["frames"], first["group"]) == (16, 4)
    assert (first["step"], second["step"]) == (0, 1) and first["tasks"] != second["tasks"]


def test_log_row_and_log_line_carry_what_is_promised(run_grpo, given_rollouts, hard_tasks, capsys):
    _, m, folder = run_grpo("--data", hard_tasks, "--steps", 2, "--prompts", 2, "--group", 4,
                            "--show-every", 1)
    numbers = ("step total acc fmt tool f_tau kappa valid_calls written_calls entropy gap gap_max "
               "clipped truncated grad_norm length kl loss rollout_tokens_per_s "
               "train_tokens_per_s rollout_s decode_s train_s sync_s zero_variance groups "
               "packed_tokens skipped_update").split()
    assert [n for n in numbers if not isinstance(m.get(n), (int, float))] == []
    assert set(m["closure"]) == set(rewards.KINDS) and set(m["by_K"]) == {"4"}
    assert {"n", "acc", "call_minus_skip"} <= set(m["by_K"]["4"]) and m["by_K"]["4"]["n"] == 8
    assert m["kappa"] == 0.25 and m["closure"]["think"] == pytest.approx(6 / 10)
    assert m["entropy"] > 1 and m["step"] == 2
    record = (folder / "rollouts" / "step_000001.rank0.jsonl").read_text()
    lengths = [sum(json.loads(x)["mask"]) for x in record.splitlines()]
    assert m["length"] == pytest.approx(sum(lengths) / 8)
    printed = capsys.readouterr().out
    for word in ("step 0002/0002", "| R ", "acc", "kappa 0.25", "gap", "gn", "zero 0/2", "roll",
                 "train", "eta", "== rl-"):
        assert word in printed
    assert all(len(line) <= 120 for line in printed.splitlines() if line.startswith("step "))
    assert json.loads((folder / "args.json").read_text())["group"] == 4


def test_a_film_that_vanishes_between_rollout_and_update_changes_nothing(
        run_grpo, given_rollouts, monkeypatch, hard_tasks):
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 2, "--group", 4)
    wanted = run_grpo(*common, out="straight")[0]
    real = grpo.training_trees

    def vanish(*given):
        monkeypatch.setattr(video, "load", lambda spec, *_, **__: video.probe("gone.mp4"))
        return real(*given)

    monkeypatch.setattr(grpo, "training_trees", vanish)
    found, m, _ = run_grpo(*common, out="vanished")
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert m["not_ok"] == 0 and m["loss"] is not None


def test_a_step_of_broken_videos_only_is_logged_and_changes_nothing(
        run_grpo, given_rollouts, monkeypatch, hard_tasks, base):
    """Nothing was sampled: no group, no update, no crash."""
    def broken(sampler, batch, frames, group, step, pump):
        for task in batch:
            e = rollout.Episode(task, f"{step}/{task['id']}", 0, 4, step, status="video_error",
                                error="gone")
            e.reward = rollout.scored(e, sampler.pay)
            yield e

    monkeypatch.setattr(rollout, "run", broken)
    weights, m, _ = run_grpo("--data", hard_tasks, "--steps", 1, "--prompts", 2, "--group", 2)
    assert (m["not_ok"], m["groups"], m["skipped_update"]) == (2, 0, 1)
    assert all(torch.equal(weights[n], base[n]) for n in base)


# ------------------------------------------------------------------------------------------------
# Real rollouts, by the reference engine


LIVE = ("--prompts", 2, "--group", 3, "--max-new-tokens", 10)


@pytest.fixture
def varied_rewards(monkeypatch):
    """A random base earns zero everywhere; this reward depends on what was sampled, so that there
    is something to learn."""
    def score(turns, *_, **__):
        value = sum(map(ord, "".join(turns))) % 7 / 7
        return reward(value, 0.5 * value * value, 0.0)

    monkeypatch.setattr(rewards, "score", score)


def read_rollouts(folder):
    names = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for name in names for line in name.read_text().splitlines()]


def test_recorded_rollouts_of_a_step_give_the_step_again(run_grpo, toy, varied_rewards, base,
                                                         capsys):
    """The JSONL is enough to train on: engine, frames and rewards are not needed again."""
    live, m, folder = run_grpo("--data", toy / "rl.jsonl", "--steps", 1, "--frames", 4, *LIVE,
                               out="live")
    assert m["skipped_update"] == 0 and m["gap"] < 1e-4 and m["grad_norm"] > 0
    files = sorted((folder / "rollouts").iterdir())
    capsys.readouterr()
    again, n, _ = run_grpo("--rollouts", *files, out="again")
    printed = capsys.readouterr().out
    assert "one update from the rollouts of 1 files |" in printed and "engine" not in printed
    assert moved(live, base).abs().max() > 1e-4
    assert (moved(live, base) - moved(again, base)).abs().max() < 1e-6
    assert (n["grad_norm"], n["tokens"]) == (pytest.approx(m["grad_norm"], rel=1e-5), m["tokens"])
    assert n["total"] == pytest.approx(m["total"]) and n["by_K"] == m["by_K"]


def test_held_out_accuracy_is_logged_per_k_and_type_and_changes_no_weight(
        run_grpo, toy, monkeypatch, varied_rewards, capsys, tmp_path):
    """Two steps with --val and without: the same samples and weights to the bit. The rows are the
    episodes of rollout.run with tools and without, and `best` links to the best of them."""
    rows = [json.loads(line) for line in (toy / "rl.jsonl").read_text().splitlines()]
    (tmp_path / "held").mkdir()
    for row, kind in zip(rows, ("open", "mcq")):
        row.update(type=kind, answer="A", options=["a", "b"] if kind == "mcq" else None,
                   video=str((toy / row["video"]).relative_to(toy)))
    held = tmp_path / "held" / "val.jsonl"
    rows[2]["video"] = "gone.mp4"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    flags = ("--data", toy / "rl.jsonl", "--steps", 2, *LIVE)
    plain, _, folder = run_grpo(*flags, out="plain")

    tools, real_run = [], rollout.run
    monkeypatch.setattr(rollout, "run", lambda sampler, mine, *given, **named: tools.append(
        (sampler.agent.tools, len(mine), *given[1:])) or real_run(sampler, mine, *given, **named))
    weights, _, other = run_grpo(*flags, "--val", held, "--eval-every", 1, out="held")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    ids = [[row["ids"] for row in read_rollouts(run)] for run in (folder, other)]
    assert ids[0] == ids[1]
    # Before the first step and after each: with tools and without, one rollout, seeds of step 0.
    both = [(True, 3, 1, 0), (False, 3, 1, 0)]
    assert tools == both + [(True, 2, 3, 0)] + both + [(True, 2, 3, 1)] + both

    log = [json.loads(line) for line in (other / "log.jsonl").read_text().splitlines()]
    values = {row["step"]: row["val"] for row in log if "val" in row}
    assert sorted(values) == [0, 1, 2] and [row["step"] for row in log] == [0, 1, 1, 2, 2]
    for val in values.values():
        assert (val["n"], val["not_ok"]) == (2, 2)
        assert {kind: cell["n"] for kind, cell in val["by_type"].items()} == {"open": 1, "mcq": 1}
        assert sum(cell["n"] for cell in val["by_K"].values()) == 2
        mean = statistics.mean(cell["acc"] for cell in val["by_type"].values())
        assert val["acc"] == pytest.approx(mean) and val["acc_without_tools"] is not None
    best = max((1, 2), key=lambda step: (values[step]["acc"], -step))
    assert (other / "best").resolve().name == f"step_{best:06d}"
    printed = capsys.readouterr().out
    assert f"step 0002 | held-out acc {values[2]['acc']:.2f} no tools" in printed
    assert "| not ok 2" in printed


def test_an_answer_is_compared_with_the_label_of_another_task(codec, source, tasks):
    """The yardstick of mixed-up labels: never the task's own label, always one of its type."""
    own, other = {**tasks[0], "id": "a"}, {**tasks[0], "id": "b"}
    e = make_group(codec, source, own)[0]
    for turn in ("<answer>red</answer>", "<answer>blue</answer>", "no answer"):
        e.turns = [turn]
        for kind in ("open", "list"):
            e.task = {**own, "type": kind, "answer": "red"}
            labels = metrics.labels_by_type([e.task, {**other, "type": kind, "answer": "blue"},
                                          {**other, "id": "c", "type": "mcq", "answer": "A"}])
            e.think_open = False
            assert metrics.by_chance(e, labels) == float("blue" in turn)
    e.task = {**own, "type": "mcq", "answer": "A", "options": ["red", "blue"]}
    assert metrics.by_chance(e, metrics.labels_by_type([e.task])) is None


def test_gated_frames_reach_the_decoder_and_the_prompt(run_grpo, toy, codec, monkeypatch,
                                                       varied_rewards):
    """K is drawn per prompt and step, is the same in its group, and is the number of frames that
    were decoded and encoded."""
    asked, load = [], rollout.Source.load
    monkeypatch.setattr(rollout.Source, "load", lambda self, spec: asked.append(spec)
                        or load(self, spec))
    _, m, folder = run_grpo("--data", toy / "rl.jsonl", "--steps", 3, *LIVE, "--max-new-tokens", 2)
    rows = read_rollouts(folder)
    budgets = {}
    for r in rows:
        assert r["K"] == rollout.gated_frames(0, r["version"], r["task"]["id"])
        assert [v["frames"] for v in r["vision"][:1]] == [r["K"]]
        assert r["ids"].count(codec.image_pad) == r["K"]
        budgets.setdefault(r["group"], set()).add(r["K"])
    assert len(budgets) == 6 and all(len(ks) == 1 for ks in budgets.values())
    assert len(set.union(*budgets.values())) > 1
    loaded = {(s["video"], s["frames"]) for s in asked if "frames" in s}
    assert {(r["task"]["video"], r["K"]) for r in rows} <= loaded
    assert set(m["by_K"]) <= {"4", "8", "16", "32", "64"}


@pytest.mark.parametrize("frames", [4, "gated"])
def test_the_next_steps_overviews_are_decoded_while_this_one_trains(
        run_grpo, toy, monkeypatch, varied_rewards, frames):
    """When the rollouts of a step begin, its overviews are in the cache."""
    real_run, real_update, sources, misses = rollout.run, grpo.update, [], []
    asked, real_ask = [], video.ChildDecoder.ask
    monkeypatch.setattr(video.ChildDecoder, "ask", lambda decoder, request: asked.append(request)
                        or real_ask(decoder, request))

    def run(sampler, mine, budget, group, step, pump):
        source = sampler.source
        sources.append(source)
        if len(sources) > 1:
            specs = [{"video": t["video"], "frames": budget if isinstance(budget, int)
                      else rollout.gated_frames(0, step, t["id"])} for t in mine]
            before = len(asked)
            for spec in specs:
                source.load(spec)
            misses.append(len(asked) - before)
        return real_run(sampler, mine, budget, group, step, pump=pump)

    class Pool(grpo.ThreadPoolExecutor):
        def submit(self, *given):
            futures.append(super().submit(*given))
            return futures[-1]

    def update(*given):
        # As if the update took long: all decodes that were asked for before it are over.
        concurrent.futures.wait(futures, timeout=60)
        return real_update(*given)

    futures = []
    monkeypatch.setattr(grpo, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(grpo, "update", update)
    # six tasks: three steps see each once
    run_grpo("--data", toy / "rl.jsonl", "--steps", 3, "--frames", frames, *LIVE,
             "--max-new-tokens", 2)
    assert misses == [0, 0] and asked


def test_a_resumed_run_samples_and_learns_what_the_straight_one_does(run_grpo, toy, varied_rewards):
    """2 steps, resume to 4, against 4 steps: the same tasks, K, seeds (the same ids), and
    weights."""
    flags = ("--data", toy / "rl.jsonl", *LIVE, "--frames", "gated")
    straight, m, folder = run_grpo(*flags, "--steps", 4, out="straight")
    run_grpo(*flags, "--steps", 2, out="parts")
    parts, n, other = run_grpo(*flags, "--steps", 4, "--resume", out="parts")
    a, b = read_rollouts(folder), read_rollouts(other)
    for key in ("task", "K", "group", "sample", "version", "ids"):
        assert [r[key] for r in a] == [r[key] for r in b]
    assert len(a) == 24 and len({r["group"] for r in a}) == 8
    # two straight runs differ by 4e-6
    assert max((straight[w] - parts[w]).abs().max().item() for w in straight) < 2e-5
    log = (other / "log.jsonl").read_text()
    assert [json.loads(x)["step"] for x in log.splitlines()] == [1, 2, 3, 4]
    assert n["grad_norm"] == pytest.approx(m["grad_norm"], rel=1e-3)


def test_a_task_is_one_group_even_where_two_epochs_meet_in_a_batch(
        run_grpo, tasks, toy, tmp_path, varied_rewards):
    """Three tasks, two prompts a step: the second batch ends one epoch and begins the next, perhaps
    with the same task. The same seeds would give the same samples twice, under the same request
    ids: the group grows instead."""
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in tasks[:3]))
    seed = next(s for s in range(99) if len(set(launch.batch_indices(1, 2, 3, s))) == 1)
    _, m, folder = run_grpo("--data", path, "--steps", 2, "--frames", 4, *LIVE, "--max-new-tokens",
                            2, "--seed", seed)
    rows = [r for r in read_rollouts(folder) if r["version"] == 1]
    assert m["groups"] == 1 and [r["sample"] for r in rows] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(r["ids"]) for r in rows}) == 6


# ------------------------------------------------------------------------------------------------
# Flags


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--ckpt", "c", "--data", "d", *map(str, flags)])
    return vars(grpo.parse_args())


def test_vanilla_sets_exactly_its_flags_and_explicit_flags_win(monkeypatch):
    default, vanilla = parse(monkeypatch), parse(monkeypatch, "--vanilla")
    changed = {k: v for k, v in vanilla.items() if v != default[k]}
    assert changed == {"vanilla": True, "think_prefix": False, "answer_suffix": False,
                       "format_credit": "sequence", "anchor": 0.0,
                       "gamma": 0.0, "frames": 64}
    mixed = parse(monkeypatch, "--vanilla", "--think-prefix", "--frames", "gated", "--anchor", 0.5,
                  "--format-credit", "none")
    assert (mixed["think_prefix"], mixed["frames"]) == (True, "gated")
    assert (mixed["anchor"], mixed["format_credit"]) == (0.5, "none")
    assert mixed["tool_weight"] == 1.0  # every released recipe pays for calls


def test_help_shows_the_defaults_of_the_preset(monkeypatch, capsys):
    for flags, wanted in (((), "(default: 32)"), (("--preset", "toy"), "(default: 16)")):
        with pytest.raises(SystemExit):
            parse(monkeypatch, *flags, "--help")
        shown = " ".join(capsys.readouterr().out.split())
        assert f"prompts per step, over all ranks {wanted}" in shown


def test_defaults_are_the_recipe_and_the_toy_preset_yields_to_flags(monkeypatch):
    p = parse(monkeypatch)
    wanted = dict(group=8, clip_eps=0.2, kl=0.01, lr=2e-6, clip=1.0, temperature=0.7,
                  max_new_tokens=2048,
                  context=32768, max_turns=3, max_parallel=5, format_weight=1.0, anchor=0.5,
                  gamma=0.3, frames="gated", minibatches=1,
                  sub_max_new_tokens=512, sub_frames=16, sub_fps=1.0, format_credit="struct",
                  think_prefix=True, answer_suffix=True)
    assert {k: p[k] for k in wanted} == wanted
    assert parse(monkeypatch, "--preset", "toy", "--lr", 1)["lr"] == 1
    assert parse(monkeypatch, "--preset", "toy")["context"] == 1024


@pytest.mark.parametrize("flags,word", [
    (("--prompts", 0), "--prompts"), (("--group", 0), "--group"), (("--steps", 0), "--steps"),
    (("--set", "minibatches=0"), "minibatches"),
    (("--pack-tokens", 0), "--pack-tokens"), (("--temperature", 0), "--temperature"),
    (("--frames", 0), "--frames"), (("--frames", "many"), "--frames"),
    (("--lr", -1), "--lr"), (("--kl", -1), "--kl"), (("--clip", -1), "--clip"),
    (("--clip-eps", -1), "--clip-eps"),
    (("--anchor", "nan"), "--anchor"), (("--tool-reward", "nan"), "--tool"),
    (("--format-weight", "inf"), "--format-weight"), (("--set", "gamma=nan"), "gamma"),
    (("--set", "sub_fps=inf"), "sub_fps"), (("--save-every", -1), "--save-every"),
    (("--eval-every", -1), "--eval-every"), (("--val", "gone.jsonl"), "gone.jsonl"),
    (("--format-credit", "some"), "--format-credit"), (("--ckpt", "nowhere"), "nowhere"),
    (("--data", "nothing.jsonl"), "nothing.jsonl"), (("--rollouts", "none.jsonl"), "--rollouts"),
    (("--video-root", "nofolder"), "nofolder"),
    (("--max-new-tokens", 0), "--max-new-tokens"), (("--preset", "huge"), "--preset")],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "")
def test_bad_values_and_missing_files_are_one_line(monkeypatch, capsys, toy, tmp_path, flags, word):
    """Told before any model is loaded, with exit code 2, naming the flag or the file."""
    monkeypatch.chdir(tmp_path)
    words = ["grpo.py", "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--out", tmp_path / "o",
             *flags]
    monkeypatch.setattr(sys, "argv", [str(w) for w in words])
    monkeypatch.setattr(checkpoint, "load_sharded",
                        lambda *_: pytest.fail("a model was loaded before the flags were checked"))
    with pytest.raises(SystemExit) as stop:
        launch.run_main(grpo.main)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and word in lines[-1]
    assert len(lines) == 1 or lines[0].startswith("usage:")


@pytest.mark.parametrize("damage,word", [
    (lambda r: r.pop("spans"), "spans"), (lambda r: r.pop("reward"), "reward"),
    (lambda r: r.pop("logps"), "logps"),
    (lambda r: r.pop("vision"), "vision")])
def test_a_damaged_rollout_file_is_one_line(monkeypatch, capsys, toy, recorded, tmp_path, damage,
                                            word):
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    damage(rows[2])
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(sys, "argv", ["replay.py", "--ckpt", str(toy / "init"), "--rollouts",
                                      str(path), "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit) as stop:
        launch.run_main(replay.main)
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == f"replay.py: {path}:3: missing '{word}'"


# ------------------------------------------------------------------------------------------------
# Processes


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "last" / "model.safetensors")


def test_one_rank_and_two_make_the_same_update(toy, recorded, base, tmp_path):
    """Three groups on two ranks: unequal packs, unequal token counts, one spare pack, one global
    normaliser."""
    logs, found = [], []
    for ranks in (1, 2):
        out = tmp_path / f"ranks{ranks}"
        done = run_script("tools/replay.py", "--preset", "toy", "--ckpt", toy / "init",
                          "--rollouts", recorded, "--video-root", toy, "--out", out,
                          "--pack-tokens", 600, "--clip", 0, "--kl", 0.01, ranks=ranks)
        assert done.returncode == 0, done.stderr
        logs.append(json.loads((out / "log.jsonl").read_text()))
        found.append(weights_of(out))
    a, b = logs
    assert same_update(*found, base)
    for key in ("grad_norm", "tokens", "total", "entropy", "gap_max", "groups", "packed_tokens",
                "kappa"):
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), key
    assert a["tokens"] > 50 and a["grad_norm"] > 0


def test_missing_files_leave_no_traceback(tmp_path):
    done = run_script("grpo.py", "--ckpt", tmp_path / "nothing", "--data", "x.jsonl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nothing" in done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_two_ranks_with_vllm_end_to_end(toy, tmp_path):
    """What the README shows first: torchrun, two engines, two steps, weights synced between them, a
    checkpoint that opens."""
    done = run_script("grpo.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "rl.jsonl", "--out", tmp_path / "out", "--steps", 2,
                      "--prompts", 2, "--group", 2, "--max-new-tokens", 12, "--max-seqs", 8,
                      ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [m["step"] for m in log] == [1, 2] and all(m["groups"] == 2 for m in log)
    rows = read_rollouts(tmp_path / "out")
    assert len(rows) == 8 and len(list((tmp_path / "out" / "rollouts").iterdir())) == 4
    assert all(len(r["ids"]) == len(r["mask"]) == len(r["logps"]) and sum(r["mask"]) > 0
               for r in rows)
    launch.import_shim()
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    hf, loading = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "out" / "last", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert AutoProcessor.from_pretrained(tmp_path / "out" / "last").chat_template
    assert hf.config.model_type == "qwen3_vl"


def test_a_replay_is_scored_anew_by_what_its_own_run_pays_for(codec, source, tasks, tmp_path):
    """The recorded reward was composed under the weights of the run that recorded it."""
    group = make_group(codec, source, tasks[0])
    for e in group:
        e.reward = {"total": 99.0, "paid_task": 99.0, "paid_fmt": 0.0}
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(e.to_json()) + "\n" for e in group))
    for pay in (rewards.Pay(), rewards.Pay(tool_weight=0.0, format_weight=2.0)):
        for e, again in zip(group, replay.read_rollouts([path], pay)):
            assert again.reward == rewards.score(e.turns, e.task, e.calls, True, pay)


def test_one_place_composes_the_reward_that_is_logged_and_the_one_that_is_trained(
        process_group, codec, source, tasks, policy, vision, plain, monkeypatch):
    """A term put where R is composed, here a price on length, moves R and the gradient alike."""
    group = make_group(codec, source, tasks[0])
    record_logps(plain, codec, source, group)
    paid = rewards.score
    found = []
    for price in (0.0, 0.05):
        def score(turns, task, calls, think_open, pay, tokens, verdict, price=price):
            r = paid(turns, task, calls, think_open, pay, tokens, verdict)
            task_part = r["paid_task"] - price * tokens
            return {**r, "paid_task": task_part, "total": task_part + r["paid_fmt"]}

        monkeypatch.setattr(rewards, "score", score)
        for e in group:
            e.reward = rollout.scored(e, rewards.Pay())
        (gradient,), _ = run_update(policy, vision, codec, [group], settings())
        found.append(([e.reward["total"] for e in group], gradient))
        for e in group:  # the advantages are those of the logged numbers, to the digit
            totals = [other.reward["total"] for other in group]
            wanted = (e.reward["total"] - statistics.mean(totals)) / statistics.pstdev(totals)
            assert e.advantage["task"] + e.advantage["fmt"] == pytest.approx(wanted, abs=1e-9)
    (totals, gradient), (cheaper, moved_by) = found
    assert all(b < a for a, b in zip(totals, cheaper))
    assert distance(moved_by, gradient) > 0.05


def test_every_trained_token_knows_its_rollout(codec, groups):
    """A ratio of whole sequences (GSPO) needs the sum over the tokens of a rollout."""
    trees, _, _ = grpo.training_trees(credited(groups), "struct")
    pack = model.pack_trees(codec, trees)
    number = pack.values["rollout"].long()
    episodes = [e for group in groups for e in group]
    assert sorted(set(number.tolist())) == list(range(len(episodes)))
    for n, e in enumerate(episodes):
        sampled = [e.context.ids[t] for t in sampled_positions(e.context.mask)]
        assert pack.target[number == n].tolist() == sampled
