"""
Tests of a step of grpo.py: python -m pytest tests/test_grpo.py -q. The script: test_grpo_run.py.

The oracle of the loss is a second implementation below: one plain transformers forward per
sequence, the formulas of the docstring written out, autograd.
"""
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from handmade import make_group, plain_logps, record_logps, reward, sampled_positions
from reference import load_policy

import chat
import grpo
import launch
import model
import rollout


@pytest.fixture(autouse=True)
def unclipped(monkeypatch):
    """The oracle's gradients are not clipped to a norm."""
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 0.0)


# ------------------------------------------------------------------------------------------------
# The oracle


def plain_advantages(group, weight=1.0, credit="struct"):
    """-> per episode a dict position -> advantage, from the reward terms alone."""
    total = [e.reward["acc"] + e.reward["tool"] + weight * e.reward["fmt"] for e in group]
    sigma, task = statistics.pstdev(total), [e.reward["acc"] + e.reward["tool"] for e in group]
    fmt = [e.reward["fmt"] for e in group]
    out = []
    for e, t, one in zip(group, task, fmt):
        a = (t - statistics.mean(task)) / sigma
        f = weight * (one - statistics.mean(fmt)) / sigma
        everywhere = set(sampled_positions(e.context.mask))
        marked = {"none": set(), "sequence": everywhere}.get(credit, e.struct)
        # handmade.reward: R_base pays 0.6 of what the format pays
        plain = 0.6 * f if credit == "anchor" else 0.0
        out.append({t: a + plain + (f - plain if t in marked else 0.0) for t in everywhere})
    return out


def plain_loss(hf, codec, source, parts, n, temperature, eps, cap, beta, reference=None):
    """Docstring of grpo.py, sequence by sequence. parts: (ids, positions, rollout logps,
    advantages, specs)."""
    loss, num_capped = 0.0, 0
    for ids, positions, sampler, advantage, specs in parts:
        at = torch.tensor(positions) - 1
        logp = plain_logps(hf, codec, source, ids, specs, temperature)[at]
        before = logp.detach()
        sampler, advantage = torch.tensor(sampler), torch.tensor(advantage)
        weight = torch.minimum(torch.exp(before - sampler), torch.tensor(cap))
        rho = torch.exp(logp - before)
        surrogate = torch.minimum(rho * advantage, torch.clamp(rho, 1 - eps, 1 + eps) * advantage)
        loss = loss - (weight * surrogate).sum() / n
        num_capped += int((torch.exp(before - sampler) > cap).sum())
        if reference is not None:
            with torch.no_grad():
                ref = plain_logps(reference, codec, source, ids, specs, temperature)[at]
            loss = loss + beta * (torch.exp(ref - logp) - (ref - logp) - 1).sum() / n
    return loss, num_capped


def plain_parts(group, credit):
    out = []
    for e, advantage in zip(group, plain_advantages(group, credit=credit)):
        at = sampled_positions(e.context.mask)
        out.append((e.context.ids, at, [e.context.logps[t] for t in at], [advantage[t] for t in at],
                    [i.spec for i in e.context.items]))
    return out


class Recorder:
    """An optimizer that keeps the gradients and moves nothing."""

    def __init__(self, policy):
        self.policy = policy

    def step(self):
        self.grads = {n.removeprefix("hf."): p.grad.clone()
                      for n, p in self.policy.named_parameters() if p.grad is not None}

    def zero_grad(self, set_to_none=True):
        self.policy.zero_grad(set_to_none)


def settings(**changes):
    """The flags of grpo.py, at their defaults unless the oracle's formulas have another number."""
    defaults = vars(grpo.build_parser().parse_args(["--ckpt", "c"]))
    ours = dict(pack_tokens=4096, temperature=1.0, beta=0.0)
    return SimpleNamespace(**{**defaults, **ours, **changes})


def run_update(policy, vision, codec, groups, args, reference=None):
    """-> (gradients, stats)"""
    recorder = Recorder(policy)
    trees, tokens = grpo.build_trees(groups, args.format_credit)
    for each in (policy, reference or policy):
        each.features = vision
    stats = grpo.update(policy, reference, recorder, trees, tokens, args)
    return recorder.grads, stats


def distance(found, wanted):
    """Relative L2 distance of two gradients, all parameters as one vector."""
    assert set(found) == set(wanted) and len(wanted) > 10
    gap = math.sqrt(sum(((found[n] - wanted[n]) ** 2).sum().item() for n in wanted))
    return gap / math.sqrt(sum((wanted[n] ** 2).sum().item() for n in wanted))


# ------------------------------------------------------------------------------------------------
# Credit


@pytest.mark.parametrize("credit", ["struct", "anchor", "sequence", "none"])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_format_credit_reaches_exactly_the_tokens_it_names(codec, groups, credit, weight):
    """None of the forced prefix and of tool responses. Everywhere, it is GRPO on the summed
    reward."""
    for group in groups:
        for e in group:
            e.reward = reward(*(e.reward[name] for name in ("acc", "fmt", "tool")), weight)
        grpo.build_trees([group], credit)
        for e, wanted in zip(group, plain_advantages(group, weight, credit)):
            found = grpo.rewards.token_advantages(e)
            assert {t: found[t] for t in wanted} == pytest.approx(wanted, abs=1e-9)
            assert all(found[t] == 0 for t in range(len(found)) if t not in wanted)


# ------------------------------------------------------------------------------------------------
# Loss


def test_policy_loss_by_hand():
    """Six tokens: inside the clip, above it with A > 0, below it with A < 0, an importance weight
    over the cap; then two for which the clip does not bind, above with A < 0 and below with
    A > 0."""
    logp = torch.tensor([0.5, 0.9, 0.1, 0.5, 0.9, 0.1], dtype=torch.float64).log().requires_grad_()
    old = torch.full((6,), 0.5, dtype=torch.float64).log()
    sampler = torch.tensor([0.25, 0.5, 0.5, 0.05, 0.5, 0.5], dtype=torch.float64).log()
    advantage = torch.tensor([1.0, 2.0, -1.0, 3.0, -1.0, 1.0], dtype=torch.float64)
    loss, _ = grpo.policy_loss(logp, old, sampler, None, advantage, 0.0)
    assert loss.tolist() == pytest.approx([-2.0, -2.4, 0.8, -15.0, 1.8, -0.2])
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, -15.0, 1.8, -0.2])
    # The KL is k3, with its own gradient.
    logp = torch.log(torch.tensor([0.2, 0.4], dtype=torch.float64)).requires_grad_()
    ref, same = torch.log(torch.tensor([0.4, 0.4], dtype=torch.float64)), logp.detach()
    loss, kl = grpo.policy_loss(logp, same, same, ref, torch.zeros(2, dtype=torch.float64), 0.1)
    assert kl.tolist() == pytest.approx([2 - math.log(2) - 1, 0.0])
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.1 * (1 - 2), 0.0])


@pytest.mark.parametrize("case", ["plain", "kl", "warm kl", "capped", "sequence", "frames",
                                  "a pack a response", "small packs"])
def test_gradient_of_an_update_is_that_of_separate_sequences(
        process_group, codec, source, groups, policy, vision, plain, toy, case, monkeypatch):
    """Packing, shared prompts, vision tokens, chunked log-probs and the loss, all at once, against
    the oracle."""
    temperature = 0.7 if "warm" in case else 1.0
    cap, beta = (1.05 if case == "capped" else 5.0), (0.3 if "kl" in case else 0.0)
    credit = "sequence" if case == "sequence" else "struct"
    shift = ((lambda n: -0.3 if n % 3 == 0 else 0.1) if case == "capped"
             else (lambda n: 0.02 * (n % 5 - 2)))
    if case == "frames":  # one rollout of each group was shown two windows
        groups = [make_group(codec, source, group[0].task, windows=((8, 12), (30, 31)),
                             response="frames") for group in groups]
    record_logps(plain, codec, source, [e for g in groups for e in g], temperature, shift)
    reference = other = None
    if "kl" in case:  # a reference that is not the policy, else its gradient would be zero
        from transformers import Qwen3VLForConditionalGeneration

        reference = load_policy(str(toy / "init"), codec).requires_grad_(True)
        reference.hf.model.visual.requires_grad_(False)
        with torch.no_grad():
            for p in model.trained_parameters(reference):
                p.mul_(1.2)
        other = Qwen3VLForConditionalGeneration.from_pretrained(toy / "init", dtype=torch.float32)
        other.load_state_dict(reference.hf.state_dict())
    if case == "capped":
        monkeypatch.setattr(grpo, "WEIGHT_CAP", cap)
    pack_tokens = {"a pack a response": 1, "small packs": 300}.get(case, 4096)
    args = settings(temperature=temperature, beta=beta, format_credit=credit,
                    pack_tokens=pack_tokens)
    found, stats = run_update(policy, vision, codec, groups, args, reference)
    n = sum(sum(e.context.mask) for g in groups for e in g)
    parts = [p for g in groups for p in plain_parts(g, credit)]
    loss, num_capped = plain_loss(plain, codec, source, parts, n, temperature, 0.2, cap, beta,
                                  other)
    loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert distance(found, wanted) < 1e-5
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert stats["tokens"] == n and stats["signal_groups"] == 2
    assert (num_capped > 0) == (case == "capped") and (stats["kl"] > 1e-4) == ("kl" in case)
    norm = math.sqrt(sum((g**2).sum().item() for g in wanted.values()))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)


# ------------------------------------------------------------------------------------------------
# Groups without signal


def test_a_group_of_equal_rewards_only_enlarges_the_count(process_group, codec, source, groups,
                                                          policy, vision, plain):
    """Dynamic sampling would drop it; here it counts as advantage zero, so the gradient shrinks and
    keeps its direction."""
    record_logps(plain, codec, source, [e for g in groups for e in g])
    for e in groups[1]:
        e.reward = reward(0.5, 0.4, 0.0)
    alone, _ = run_update(policy, vision, codec, groups[:1], settings())
    both, stats = run_update(policy, vision, codec, groups, settings())
    mine, all_of_them = (sum(sum(e.context.mask) for g in part for e in g)
                         for part in (groups[:1], groups))
    assert distance({n: g * (all_of_them / mine) for n, g in both.items()}, alone) < 1e-5
    trees, num_tokens = grpo.build_trees(groups, "struct")
    assert (len(trees), num_tokens) == (1, all_of_them)
    assert stats["tokens"] == mine  # the means of the log are over tokens that were trained
    groups[1][0].reward = reward(0.7, 0.4, 0.0)  # the format part alone is equal
    assert len(grpo.build_trees(groups, "struct")[0]) == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_the_prompts_of_a_step(world, monkeypatch):
    tasks = [{"id": f"t{i}"} for i in range(48)]  # three steps an epoch
    args = SimpleNamespace(prompts=16, frames="gated", seed=0)
    for step in range(5):
        parts = []
        for rank in range(world):
            monkeypatch.setattr(launch, "rank_and_world", lambda: (rank, world))  # noqa: B023
            parts.append(grpo.rank_tasks(tasks, step, args))
        batch = launch.batch_indices(step, 16, 48, 0)
        dealt = [task["id"] for part in parts for task, _ in part]
        assert sorted(dealt) == sorted(tasks[i]["id"] for i in batch)
        assert {len(part) for part in parts} == {16 // world}
        totals = [sum(num_frames for _, num_frames in part) for part in parts]
        assert max(totals) - min(totals) <= 64  # no rank waits for the long prompts of another


def test_the_gap_of_each_turn(process_group, codec, source, groups, policy, vision, plain):
    """Log-probs of second turns are off by 0.2 nats: the trainer sees other windows."""
    record_logps(plain, codec, source, [e for g in groups for e in g])
    for e in [e for g in groups for e in g if len(e.spans) > 1]:
        start, end = e.spans[1]
        e.context.logps[start:end] = [logp + 0.2 for logp in e.context.logps[start:end]]
    _, stats = run_update(policy, vision, codec, groups, settings())
    assert stats["gap_by_turn"] == pytest.approx({1: 0.0, 2: 0.2}, abs=1e-4)


# ------------------------------------------------------------------------------------------------
# What each window was worth


def test_a_window_is_worth_what_plain_forwards_say(process_group, codec, source, tasks, policy,
                                                   vision, plain):
    task = max(tasks, key=lambda task: len(task["answer"]))  # several colours
    group = [make_group(codec, source, task, windows=((8, 16), (20, 24)))[0] for _ in range(2)]
    group[1].reward = reward(1.0, 1.0, 0.8)  # the one that is right: it has nobody to judge it
    policy.features = vision
    grpo.measure_windows(policy, [group], settings(temperature=0.7))
    first, right = group
    assert not any("window_gain" in call for call in right.calls)
    ids = first.context.ids
    specs = [item.spec for item in first.context.items]
    answer = right.context.ids[slice(*right.spans[-1])]

    def value(given):
        logps = plain_logps(plain, codec, source, given + answer, specs, 0.7)
        return logps[-len(answer):].sum().item()

    shown = ids[:first.spans[1][0]]
    for number, call in enumerate(first.calls):
        summary = chat.encode(codec, call["summary"])
        places = [n for n in range(len(ids)) if ids[n:n + len(summary)] == summary]
        at = places[number]  # both sub-agents say the same
        hidden = shown[:at] + chat.encode(codec, rollout.EMPTY_SUMMARY) + shown[at + len(summary):]
        assert call["window_gain"] == pytest.approx(value(shown) - value(hidden), abs=1e-3)
        assert abs(call["window_gain"]) > 0.01
