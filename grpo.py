"""
grpo.py (tests/test_grpo.py, tests/test_grpo_run.py): PARA-GRPO on top of an SFT checkpoint, with a
rollout engine inside every rank.

  R_task_i = R_acc + w_tool R_tool                 of rollout i of G: rewards.score; --tool-reward
  R_i      = R_task_i + w_fmt R_fmt_i
  sigma    = std of R in the group, at least 1e-3; if it is 0 the group has no signal
  A_task_i = (R_task_i - mean) / sigma
  A_fmt_i  = w_fmt (R_fmt_i - mean) / sigma
  A_it     = A_task_i + A_fmt_i [t in struct(o_i)]     struct: tag tokens and the end of each turn
  rho_t    = exp(logp_t - old_t)                       old: this trainer before the batch
  w_t      = min(exp(old_t - sampling_t), 5)           sampling: the engine, which rounds otherwise
  L        = -(1/N) sum_t [ w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) - beta k3_t ]
  k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1      ref: the checkpoint of --ckpt
             N = sampled tokens of the whole batch, over ALL ranks
  gap      = mean |old_t - sampling_t|; gap_sub: of one sub-agent's context a step and rank

--format-credit: struct, as above (Selective Anchoring). sequence: A_fmt at every token, which is
exactly GRPO on the summed reward. none: A_fmt nowhere. anchor: R_base counts in R_task, and A_fmt
is made of w_fmt (R_fmt - R_base), which is what R_anchor adds.

Three parts of PARA-GRPO, each with its flag: Exploration Anchoring (--think-prefix forces
`<think>\\n`, --answer-suffix pays for a final answer block, --anchor pays for closed thoughts),
Selective Anchoring (--format-credit struct), nFrames Gating (--frames gated: K ~ U{4,8,16,32,64}
per prompt, the same for the whole group). --vanilla turns all three off: the plain GRPO that the
authors released.

Departs from upstream: the KL is in the loss, not mixed into rewards. Advantages are normalised
once. A batch takes one optimizer step, so old = logp and needs no forward of its own. A gap beyond
rounding ends the run: engine and trainer then see other inputs. (Stale weights are too small to
show there; engine.py compares the weights themselves.)

Crash-only: a video that does not decode and a gradient that is not finite are counted, the latter
three times in a row at most. Everything else ends the run with one line. The same command goes on
from the newest whole checkpoint, exactly: tasks, K and seeds depend on (seed, step) alone.

Reads:  --ckpt, --data (task JSONL), --val; with --rollouts the JSONL of rollout.py or of a run's
        rollouts/ in the place of an engine: one update, whose rewards are composed anew.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last and --out/best (links),
        --out/log.jsonl, --out/args.json, --out/judge.jsonl (--judge-url), --out/rollouts/*.jsonl

CPU toy:  torchrun --nproc_per_node 2 grpo.py --preset toy --ckpt sft_out --data toy/rl.jsonl
1 GPU:    python grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
8 GPUs:   torchrun --nproc_per_node 8 grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
Adapters: with --lora-rank 64 the 8B trains on one GPU of 80 GB
"""
import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import model
import rewards
import rollout
import video
from engine import EngineLoop
from plumbing import checkpoint, data
from plumbing.judge import add_judge_arguments, open_judge
from plumbing.log import TRACKERS, Log, check_tracker, episode_row, summarise

CLIP_EPS = 0.2  # of the surrogate; one step per batch never meets it
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm; 0: never
TURN_BINS = 16  # of the gap per turn; the last one holds all later turns
SHOW_EVERY = 20  # steps between printed episodes
SHOWN = "total acc fmt kappa not_ok gap gap_sub grad_norm signal_groups rollout_s train_s sync_s"

# -----------------------------------------------------------------------------
# Arguments


def build_parser():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    # Input and output
    add("--ckpt", required=True, help="checkpoint to start from; also the reference of the KL")
    add("--data", default="rl.jsonl", help="task JSONL")
    add("--val", help="held-out task JSONL: accuracy with and without tools, and `best`")
    add("--rollouts", nargs="+", metavar="JSONL", help="train once on these instead of sampling")
    add("--out", default="grpo_out", help="run folder")
    add("--resume", action="store_true", help="go on although settings or rows have changed")
    add("--check", action="store_true", help="only look at the data: labels, videos, subtitles")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: numbers for toy.py")
    add("--vanilla", action="store_true", help="plain GRPO: no prefix, suffix, anchor, gating")
    # Batches
    add("--steps", type=launch.positive, default=300, help="batches of rollouts")
    add("--prompts", type=launch.positive, default=32, help="prompts per step, over all ranks")
    add("--num-generations", type=launch.positive, default=8,
        help="rollouts per prompt (G), at least 2")
    add("--frames", type=rollout.frames_argument, default="gated", help="K; gated: U{4,8,16,32,64}")
    # Reward and loss
    add("--format-credit", choices=["struct", "anchor", "sequence", "none"], default="struct",
        help="tokens at which A_fmt is credited")
    add("--answer-suffix", action=argparse.BooleanOptionalAction, default=True,
        help="pay for an <answer> block")
    add("--anchor", type=float, default=0.5, help="lambda: weight of R_anchor in R_fmt; 0: off")
    add("--tool-reward", type=float, default=1.0, help="w_tool; 0: off")
    add("--beta", type=float, default=0.01, help="weight of the KL; 0: no reference is loaded")
    # Optimizer
    add("--lr", type=float, help="of AdamW, constant; default 2e-6, of adapters 2e-5")
    add("--minibatches", type=launch.positive, default=1,
        help="optimizer steps per batch; above 1 each batch takes one more forward")
    # Above one context: else a group with a long prompt is split, and each part computes it again.
    add("--pack-tokens", type=launch.positive, default=49152, help="tokens per pack (one forward)")
    add("--lora-rank", type=int, default=0, help="rank of adapters, the rest is frozen; 0: off")
    add("--dp-replicate", type=int, default=1,
        help="HSDP: groups of ranks that each hold the whole model; 0: all do")
    # Looking and saving
    add("--save-every", type=int, default=20, help="steps between checkpoints; 0: at the end")
    add("--eval-every", type=int, default=50, help="steps between uses of --val; 0: at the end")
    add("--patience", type=float, default=1800.0,
        help="seconds a phase may take before the run ends and prints its stacks; 0 = for ever")
    add("--track", choices=TRACKERS, help="send the numbers of log.jsonl there too")
    rollout.add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says; pays 1 or 0")
    return parser


def parse_args():
    parser = build_parser()
    # Read twice: a preset changes defaults, which any flag still overrides.
    early = parser.parse_args()
    lr = 2e-6
    if early.preset == "toy":
        lr = 2e-4  # a toy of a million parameters takes large steps
        parser.set_defaults(prompts=16, steps=40, pack_tokens=4096, save_every=0, beta=0.0,
                            dp_replicate=0, temperature=1.0, **rollout.toy_defaults())
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence",
                            anchor=0.0, frames=64)
    args = parser.parse_args()
    # A folder of adapters goes on training these adapters, with their rank.
    args.lora_rank = checkpoint.adapter_rank(args.ckpt, args.lora_rank)
    if args.lr is None:
        args.lr = 10 * lr if args.lora_rank else lr  # adapters start at zero
    if args.rollouts:
        args.steps = 1
    if args.num_generations < 2 or not args.temperature > 0:
        raise launch.UserError("--num-generations must be at least 2 and --temperature above 0: "
                               "rollouts that are all the same have no advantage")
    if args.track:
        check_tracker(args.track)
    return args


# -----------------------------------------------------------------------------
# Groups, advantages, trees


def group_by_prompt(episodes):
    """Episodes -> lists of rollouts of one prompt, without those in which nothing was sampled."""
    groups = {}
    # Sort by sample, not by time of completion: sums of floats are then the same in every run.
    for episode in sorted(episodes, key=lambda e: e.sample):
        trained = episode.status in ("ok", "context")  # a broken video says nothing of the policy
        if trained and 1 in episode.context.mask:
            groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def set_advantages(group, credit):
    """Sets Episode.advantage = {"task": credited at every sampled token, "fmt": at the tokens that
    `credit` names, "sigma"}. credit: --format-credit."""
    # R is composed in rewards.score alone. A term that is added there arrives here by itself.
    everywhere = [e.reward["paid_task"] for e in group]  # [G]
    at_tags = [e.reward["paid_fmt"] for e in group]  # [G]
    if credit == "anchor":
        everywhere = [e.reward["paid_task"] + e.reward["paid_base"] for e in group]
        at_tags = [e.reward["paid_fmt"] - e.reward["paid_base"] for e in group]
    a_task, a_fmt, sigma = rewards.group_advantages(everywhere, at_tags)
    for e, task, fmt in zip(group, a_task, a_fmt):
        e.advantage = {"task": task, "fmt": fmt, "sigma": sigma}


def token_advantages(episode, credit):
    """-> A_it of the header, over context.ids; 0 at tokens that the policy did not sample."""
    mask = episode.context.mask
    # The prompt, tool responses and forced tokens have mask 0.
    out = [episode.advantage["task"] * sampled for sampled in mask]
    if credit == "sequence":  # plain GRPO
        credited = [t for t, sampled in enumerate(mask) if sampled]
    elif credit == "none":
        credited = []
    else:
        credited = episode.struct
    for t in credited:
        out[t] += episode.advantage["fmt"]
    return out


def turn_numbers(episode):
    """-> the turn of each token of context.ids; tool responses count to the turn after them."""
    out = []
    for number, (_, end) in enumerate(episode.spans):
        out += [min(number, TURN_BINS - 1) for _ in range(len(out), end)]
    return out


def group_tree(group, credit):
    """Rollouts of one prompt, with advantages -> Tree [shared prompt | o^1 | .. | o^G]."""
    first = group[0].context
    cut = first.mask.index(1)  # length of the prompt
    branches = []
    for episode in group:
        context = episode.context
        # One wrong id in a shared prompt would train all G rollouts on a prompt that none of them
        # saw, so this is checked although one function built all of them.
        same_frames = context.items[0].key == first.items[0].key
        assert context.ids[:cut] == first.ids[:cut] and same_frames, episode.group
        values = {
            "advantage": token_advantages(episode, credit)[cut:],
            "sampling": context.logps[cut:],
            "turn": turn_numbers(episode)[cut:],
        }
        # All ids after the prompt: turns, glue and tool responses. The mask marks the sampled ones.
        branches.append(model.TokenSpan(context.ids[cut:], context.mask[cut:], values,
                                        context.items[1:]))
    zeros = [0 for _ in range(cut)]
    prompt = model.TokenSpan(first.ids[:cut], zeros, dict.fromkeys(values, zeros))
    return model.Tree(prompt, first.items[:1], branches)


def build_trees(groups, credit):
    """Groups of this rank -> (trees of the groups with a signal, sampled tokens of ALL groups).
    Sets advantages. The tokens of a group without a signal count in N: they have advantage 0."""
    trees, num_tokens = [], 0
    for group in groups:
        set_advantages(group, credit)
        num_tokens += sum(sum(e.context.mask) for e in group)
        # Test the advantages, not sigma: rounding can leave sigma at 1e-16.
        if any(e.advantage["task"] or e.advantage["fmt"] for e in group):
            trees.append(group_tree(group, credit))
    return trees, num_tokens


# -----------------------------------------------------------------------------
# Loss


def policy_loss(logp, old_logps, sampling_logps, ref_logps, advantage, beta, clip_eps=CLIP_EPS,
                cap=5.0):
    """
    Per-token loss of the header, before the division by N.

    logp, old_logps, sampling_logps, ref_logps: log-prob [n] of each token under the policy now, the
    policy before this batch, the engine, the reference (None: no KL). advantage [n].
    -> (loss [n], numbers for the log: kl, and whether a token is clipped, truncated [n] each)
    """
    import torch

    # n is the number of sampled tokens in a pack, flat. There is no padding, so there is no mask.
    ratio = torch.exp(logp - old_logps)  # rho [n]
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    # Truncated importance weight: corrects for an engine that samples from almost this policy. A
    # constant, no gradient flows. [n]
    weight = torch.exp(old_logps - sampling_logps)
    # The minimum is pessimistic: a token that moved too far in the good direction has no gradient.
    loss = -weight.clamp(max=cap) * torch.minimum(ratio * advantage, clipped * advantage)
    kl = torch.zeros_like(loss)
    if ref_logps is not None:
        # The KL is a term of the loss, per token. The reward does not contain it.
        diff = ref_logps - logp  # [n]
        kl = torch.exp(diff) - diff - 1  # k3, an unbiased estimate of KL(policy || reference), >= 0
        loss = loss + beta * kl
    is_clipped = ((ratio - 1).abs() > clip_eps).float()
    return loss, [kl.detach(), is_clipped, (weight > cap).float()]


# -----------------------------------------------------------------------------
# Update


def make_minibatches(codec, trees, args):
    """Trees of this rank -> the packs of each optimizer step, [[(Pack, whether it is real)]]."""
    minibatches = []
    for i in range(args.minibatches):
        # A pack holds as many trees as fit into --pack-tokens, and takes one forward.
        filled = model.fill_packs(trees[i::args.minibatches], args.pack_tokens)
        packs = [model.pack_trees(codec, members) for members in filled]
        # FSDP gathers weights in every forward, with all ranks. So ranks with fewer packs add
        # spare ones, which carry no gradient.
        minibatches.append(model.pad_packs_over_ranks(codec, packs))
    return minibatches


def score_beforehand(policy, minibatches, temperature):
    """-> {id of a pack: its log-probs [n] before the FIRST step of this batch}; {} with one step,
    where old = logp. With more, later steps meet a policy that has moved."""
    import torch

    old_of_pack = {}
    for packs in minibatches:
        for pack, _ in packs:
            if len(minibatches) > 1:
                with torch.no_grad():
                    old_of_pack[id(pack)], _ = policy(pack, temperature)
    return old_of_pack


def update(policy, reference, optimizer, trees, num_tokens, args):
    """
    Trains on one batch in args.minibatches optimizer steps -> numbers for the log, the same on
    every rank: means over the sampled tokens of all groups with a signal.

    trees: this rank's groups as [prompt | o^1 | .. | o^G]. num_tokens: sampled tokens of this rank,
    with those of groups without a signal. Collective: all ranks run equally many forwards.
    """
    import torch
    import torch.distributed as dist

    world, device = dist.get_world_size(), next(policy.parameters()).device
    # N is counted over ALL ranks before any backward: then the gradient does not depend on the
    # number of ranks or packs. In host memory, so the host does not wait for a GPU.
    total = torch.tensor([num_tokens, len(trees)], dtype=torch.float64)
    dist.all_reduce(total)
    n, num_trees = total.tolist()
    if num_trees == 0:  # no group of any rank has a signal, so the weights stay
        return {"signal_groups": 0, "bad_updates": 0}
    n = max(1.0, n / args.minibatches)  # each step divides by its even part of N
    minibatches = make_minibatches(policy.codec, trees, args)

    old_of_pack = score_beforehand(policy, minibatches, args.temperature)

    measured = []  # TOKEN_NUMBERS [8, n] of each pack, on the device
    norms = []
    for packs in minibatches:  # one optimizer step each
        for pack, is_real in packs:
            # All log-probs are at the sampling temperature: the engine's are, too.
            ref_logps = None
            if reference is not None:  # first: with adapters it is the policy, adapters changed
                with torch.no_grad():
                    ref_logps, _ = reference(pack, args.temperature)  # [n]
            logp, entropy = policy(pack, args.temperature)  # [n] each
            if not is_real:  # it runs for its collectives alone
                (0.0 * logp.sum()).backward()
                continue
            old_logps = old_of_pack.get(id(pack), logp.detach())
            advantage, sampling_logps, turn = [
                model.to_device(pack.values[name], device)
                for name in ("advantage", "sampling", "turn")]  # [n] each
            loss, stats = policy_loss(logp, old_logps, sampling_logps, ref_logps, advantage,
                                      args.beta)
            # FSDP averages gradients over ranks. Each rank holds a part of the sum over N, so it
            # multiplies by the number of ranks.
            (world * loss.sum() / n).backward()
            gap = (old_logps - sampling_logps).abs()  # only rounding is allowed [n]
            numbers = [turn, torch.ones_like(gap), gap, loss.detach(), entropy, *stats]
            measured.append(torch.stack(numbers))

        norms.append(model.reduce_and_clip(policy, MAX_GRAD_NORM))
        # The norm covers the gradients of all ranks, so all of them step or none does.
        if math.isfinite(norms[-1]):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {
        **token_numbers(measured),
        "signal_groups": int(num_trees),
        "grad_norm": max(norms),  # of the minibatches
        "bad_updates": sum(not math.isfinite(norm) for norm in norms),
    }


TOKEN_NUMBERS = ("turn", "tokens", "gap", "loss", "entropy", "kl", "clipped", "truncated")


def token_numbers(measured):
    """TOKEN_NUMBERS of each pack [columns, n] -> means over the tokens of all ranks, and the gap of
    each turn. Collective."""
    import torch
    import torch.distributed as dist

    sums = torch.zeros(TURN_BINS, len(TOKEN_NUMBERS), dtype=torch.float64)
    for columns in measured:
        sums.index_add_(0, columns[0].long().cpu(), columns.T.cpu().double())
    dist.all_reduce(sums)
    total = sums.sum(0)  # [columns]
    means = dict(zip(TOKEN_NUMBERS, (total / total[1]).tolist()))
    gap_by_turn = {t: row[2] / row[1] for t, row in enumerate(sums.tolist()) if row[1] > 0}
    return {**means, "tokens": total[1].item(), "gap_by_turn": gap_by_turn}


def sub_agent_gap(policy, episodes, step, temperature):
    """Mean gap of one sub-agent's context of each rank, in nats; None if no sub-agent was asked. No
    gradient: sub-agents are not trained, so only this shows whether their frames are right.
    Collective, before the weights move."""
    import torch

    contexts = [call["sub"] for e in episodes for call in e.calls if "sub" in call]
    packs, gaps = [], []
    for context in contexts[step % max(1, len(contexts)):][:1]:  # another place in each step
        items = [chat.VisionItem(**item) for item in context["vision"]]
        span = model.TokenSpan(context["ids"], context["mask"], {"sampling": context["logps"]})
        packs.append(model.pack_trees(policy.codec, [model.Tree(span, items)]))
    for pack, is_real in model.pad_packs_over_ranks(policy.codec, packs):
        with torch.no_grad():
            logp, _ = policy(pack, temperature)  # [n]
        if is_real:
            gaps += (logp.cpu() - pack.values["sampling"]).abs().tolist()
    gaps = launch.gather_rows(gaps)
    return statistics.fmean(gaps) if gaps else None


def gap_tolerance(dtype=None):
    """The largest mean gap in nats that rounding explains. dtype: of the engine's weights; None:
    recorded rollouts, of an engine of any precision."""
    if dtype is not None and dtype.itemsize == 4:
        return 1e-3  # fp32; healthy: below 1e-6
    return 0.03  # healthy, on GPUs in bf16 and with adapters: below 1e-3


def check_gap(step, stats, tolerance):
    """Raises RunError, on all ranks alike, if engine and trainer are not the same policy."""
    for name in ("gap", "gap_sub"):
        gap = stats.get(name)
        if gap is not None and not gap <= tolerance:  # NaN fails this comparison too
            raise launch.RunError(
                f"step {step}: {name}, the mean |log-prob gap| between engine and trainer, is "
                f"{gap:.3f} nats, tolerance {tolerance}: the engine samples from other weights or "
                "other inputs, or at another --temperature")


# -----------------------------------------------------------------------------
# Batches of episodes


def rank_tasks(tasks, step, args):
    """Tasks of this rank in a step. Every rank draws the same batch, then takes its own part."""
    batch = [tasks[i] for i in launch.batch_indices(step, args.prompts, len(tasks), args.seed)]
    costs = {}  # a batch across two epochs may hold a task twice, as one larger group
    for task in batch:
        # K is the only cost that is known before sampling. 1000: equally many prompts a rank.
        num_frames = rollout.draw_num_frames(args.frames, args.seed, step, task["id"])
        costs[task["id"]] = costs.get(task["id"], 0) + 1000 + num_frames
    ids = data.balance_over_ranks(list(costs), costs.get, *launch.rank_and_world())
    return [task for task in batch if task["id"] in ids]


def prefetch_overviews(decoders, tasks, step, args, source, quiet):
    """Decodes the overviews that step `step` will need, in the threads `decoders`. Each begins at a
    moment at which the Event `quiet` is set: no decode of this step waits. The futures are not
    read: a broken video is counted when its episode comes."""
    def decode(spec):
        quiet.wait()
        source.load(spec)

    for task in rank_tasks(tasks, step, args):
        num_frames = rollout.draw_num_frames(args.frames, args.seed, step, task["id"])
        decoders.submit(decode, source.overview_spec(task, num_frames))


def sample_batch(run, step, args):
    """Rollouts of this rank, in the order of its tasks. Without a collective: ranks finish at
    different times and meet at the update."""
    worker = run.worker
    # Each rank samples whole groups with its own engine, and fans out to sub-agents by itself.
    mine = rank_tasks(run.tasks, step, args)
    pump = EngineLoop(worker.engine, video.decode_threads())
    if step + 1 < args.steps:
        prefetch_overviews(run.decoders, run.tasks, step + 1, args, worker.source, pump.quiet)
    try:
        episodes = list(rollout.run(worker, mine, args.frames, args.num_generations, step,
                                    pump=pump))
    finally:
        pump.quiet.set()  # else the threads of `decoders` would outlive an error
    # Episodes come as they finish. Sums and files must not depend on that order.
    ids = [task["id"] for task in mine]
    episodes.sort(key=lambda e: (ids.index(e.task["id"]), e.sample))
    if episodes and step % SHOW_EVERY == 0:
        launch.print0(rollout.episode_text(episodes[0], worker.codec))
    return episodes


def recorded_batch(worker, rows):
    """Rows of --rollouts -> this rank's episodes, rewarded as this run pays."""
    episodes = [rollout.from_dict(row) for row in rows]
    groups = sorted({e.group for e in episodes})  # a rank takes whole groups, sigma needs them
    rank, world = launch.rank_and_world()
    mine = [e for e in episodes if e.group in groups[rank::world]]

    async def score_all():
        await asyncio.gather(*[rollout.score_episode(e, worker.pay, worker.judge) for e in mine])

    asyncio.run(score_all())
    for e in mine:
        if not e.reward:  # a question of tools/ask.py
            raise launch.UserError(f"--rollouts: task {e.task['id']} has no answer to learn from")
    return mine


def evaluate(run, step, args):
    """Logs the accuracy on --val with and without tools, per K and type -> that with tools. K,
    seeds and so the noise of a task are the same in every evaluation. Collective."""
    rank, world = launch.rank_and_world()
    source = replace(run.worker.source, root=video.root_of(args, args.val))
    # Without tools too: the difference is the worth of calling.
    numbers = []
    for tools in (True, False):
        agent = replace(run.worker.agent, tools=tools)
        worker = replace(run.worker, source=source, agent=agent)
        rows = []
        # Step 0 enters seeds and draws of K. The weights are those of `step`.
        for e in rollout.run(worker, run.val_tasks[rank::world], args.frames, 1, 0):
            launch.reset_watchdog(args.patience)  # the whole evaluation may take longer
            row = episode_row(e)
            if e.status == "context":  # a full context is a wrong answer, not a broken video
                row.update(status="ok", acc=0.0)
            rows.append(row)
        numbers.append(summarise(launch.gather_rows(rows)))
    val = {**numbers[0], "acc_without_tools": numbers[1].get("acc")}
    run.log.write({"step": step, "val": val}, "val/acc val/acc_without_tools val/not_ok")
    return val.get("acc", -1.0)  # no video of --val decodes: no `best`


# -----------------------------------------------------------------------------
# The run


def read_data(path, faults=None):
    """A task JSONL -> tasks, [] for None. Raises UserError."""
    if path is None:
        return []
    if not os.path.exists(path):
        raise launch.UserError(
            f'{path}: no such file. --data holds one task a line, {{"id", "video", "question", '
            '"options", "answer", "type"}; tools/convert.py makes it of published data, '
            '`python toy.py --out toy` makes toy/rl.jsonl')
    return data.read_tasks(path, faults)


def check_data(args):
    """--check: looks at every task, prints each fault, and ends."""
    faults = []
    for path in filter(None, (args.data, args.val)):
        _, source = rollout.agent_settings(args, path)
        faults += data.check_tasks(read_data(path, faults), source)
    data.report_check(faults, args.data)


def load_models(args, ckpt, codec, device, folder):
    """-> (policy, reference or None, optimizer). folder: the checkpoint from which the run goes on,
    or None. Collective."""
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    policy = checkpoint.load_policy(ckpt, codec, device, args.preset != "toy", args.lora_rank,
                                    replicas=args.dp_replicate)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = None
    if args.beta > 0 and args.lora_rank:
        reference = checkpoint.AdapterReference(policy)  # the base is shared
    elif args.beta > 0:
        reference = checkpoint.load_policy(ckpt, codec, device, frozen=True,
                                           replicas=args.dp_replicate)
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    return policy, reference, optimizer


def drop_rollouts(folder, start):
    """Deletes the rollouts of steps that are taken again, perhaps by fewer ranks."""
    for name in os.listdir(folder):
        if name >= f"step_{start:06d}":
            os.remove(os.path.join(folder, name))


def make_worker(args, ckpt, codec, agent, source, weights):
    """-> RolloutWorker. weights: newer ones than those of ckpt, or None. Collective."""
    engine = None
    if not args.rollouts:
        # On a GPU the engine shares the device with the trainer, so it starts asleep.
        engine = rollout.make_engine(ckpt, codec, args, sleeping=True)
        if weights is not None:
            engine.sync(weights)
    pay = rewards.RewardConfig(args.answer_suffix, args.anchor, tool_weight=args.tool_reward)
    # Each rank asks about its own rollouts. All append to one file, and read it when they begin.
    judge = open_judge(args, os.path.join(args.out, "judge.jsonl"))
    return rollout.RolloutWorker(engine, codec, source, agent, pay, judge)


def setup(args):
    """Flags -> what the loop works with; None if there is nothing to do. Everything that can be
    refused is refused here, before a model is built. Collective."""
    if args.check:
        return check_data(args)
    ckpt = checkpoint.resolve(args.ckpt)
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    path, tasks, records = args.data, [], []
    for path in args.rollouts or ():  # videos lie beside them, unless --video-root says otherwise
        records += launch.read_jsonl(path, rollout.RECORD_FIELDS)
    if not records:
        tasks = read_data(args.data)
    val_tasks = read_data(args.val)
    folder_of_rollouts = os.path.join(args.out, "rollouts")
    launch.make_out(folder_of_rollouts)
    launch.lock(args.out)
    rank, world, device = launch.start_process_group(args.patience, args.cpu)
    launch.reset_watchdog(args.patience)
    # The same command again goes on from the newest whole checkpoint in --out.
    folder, state = checkpoint.resume_point(args, {"data": tasks + records, "val": val_tasks})
    if state["step"] >= args.steps:
        launch.print0(f"nothing to do: {args.out} has {state['step']} steps of {args.steps}")
        return launch.end_process_group()
    if rank == 0:
        drop_rollouts(folder_of_rollouts, state["step"])
    launch.print0(f"{args.ckpt} -> {args.out}: loading the checkpoint, then the engine; "
                  f"{args.prompts} prompts x {args.num_generations} rollouts a step, {world} ranks")
    agent, source = rollout.agent_settings(args, path)
    for name, rows in ((args.data, tasks), (args.val, val_tasks)):
        if rows:
            source.cache.check_present(args, name, rows)
    policy, reference, optimizer = load_models(args, ckpt, codec, device, folder)
    engine_dtype, weights = model.engine_dtype(codec, device), None
    if folder:  # the engine will read --ckpt, but the resumed weights are newer
        weights = checkpoint.full_weights(policy, engine_dtype)
    return SimpleNamespace(
        tasks=tasks, val_tasks=val_tasks, records=records,
        policy=policy, reference=reference, optimizer=optimizer,
        worker=make_worker(args, ckpt, codec, agent, source, weights),
        # Decodes frames of the next step, during the rollouts on half of the decoders.
        decoders=ThreadPoolExecutor(max(2, video.decode_threads() // 2)),
        engine_dtype=engine_dtype, state=state,
        num_bad=0,  # steps in a row without a finite gradient
        log=Log(args.out, state["step"], args.steps, args))


@contextlib.contextmanager
def timed_phase(name, seconds, args):
    """A phase of a step: notes its seconds under `name`. One that hangs for `patience` seconds ends
    the run with its stacks."""
    launch.reset_watchdog(args.patience)
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


def train_step(run, episodes, step, args):
    """Advantages, sub-agents' gap, update -> numbers for the log. Raises RunError. Collective."""
    # The trees hold every sampled token once and every prompt once per group.
    trees, num_tokens = build_trees(group_by_prompt(episodes), args.format_credit)
    # The frames that the rollouts saw, so that an update reads no file.
    contexts = [e.context for e in episodes]
    frames = {f.key: f for context in contexts for f in context.frames}
    # The vision tower is frozen. Features are computed once a step and read by all its forwards.
    features = model.VisionFeatures(run.policy.hf.model.visual, run.worker.codec,
                                    run.worker.source.load, frames)
    run.policy.features = features
    if run.reference:
        run.reference.features = features
    gap_sub = sub_agent_gap(run.policy, episodes, step, args.temperature)
    stats = update(run.policy, run.reference, run.optimizer, trees, num_tokens, args)
    stats["gap_sub"] = gap_sub
    engine_dtype = None if args.rollouts else run.engine_dtype
    check_gap(step + 1, stats, gap_tolerance(engine_dtype))
    # A single bad step moves no weight. Three of them would go on for ever.
    run.num_bad = run.num_bad + 1 if stats["bad_updates"] else 0
    if run.num_bad == 3:
        raise launch.RunError(f"step {step + 1}: no finite gradient for three steps")
    return stats


def main():
    args = parse_args()
    run = setup(args)
    if run is None:
        return
    state, engine = run.state, run.worker.engine
    stop_event = launch.stop_on_signal()
    best, best_step = state.get("best", (-1.0, 0))  # the highest accuracy on --val, and its step
    if run.val_tasks and state["step"] == 0:  # the accuracy that training starts from
        evaluate(run, 0, args)

    for step in range(state["step"], args.steps):
        last, seconds = step + 1 == args.steps, {}
        # 1. Rollouts. The engine holds the weights of this step, so its samples are on policy, but
        # for rounding.
        with timed_phase("rollout_s", seconds, args):
            if engine:
                episodes = sample_batch(run, step, args)
            else:
                episodes = recorded_batch(run.worker, run.records)

        # 2. Update. A group lies on one rank, so advantages need no exchange between ranks. The
        # engine sleeps meanwhile, so the trainer has its memory.
        with timed_phase("train_s", seconds, args):
            if engine:
                engine.sleep()
            stats = train_step(run, episodes, step, args)

        # 3. New weights into the engine, which drops all prefixes and features of the old ones.
        with timed_phase("sync_s", seconds, args):
            if engine:
                engine.wake(checkpoint.full_weights(run.policy, run.engine_dtype))

        # 4. Record, log, evaluate, save. A file per rank, because ranks share no file handle.
        rank, _ = launch.rank_and_world()
        launch.write_atomic(f"{args.out}/rollouts/step_{step:06d}.rank{rank}.jsonl",
                            "".join(json.dumps(e.to_dict()) + "\n" for e in episodes))
        rows = launch.gather_rows([episode_row(e) for e in episodes])
        run.log.write({"step": step + 1, **summarise(rows), **stats, **seconds}, SHOWN)
        if run.val_tasks and (last or args.eval_every and (step + 1) % args.eval_every == 0):
            acc = evaluate(run, step + 1, args)  # on every rank the same
            if acc > best:
                best, best_step = acc, step + 1
        # A signal on any rank saves and stops all of them: they must leave at the same step.
        stopping = launch.any_rank(stop_event.is_set())
        due = args.save_every and (step + 1) % args.save_every == 0
        if due or last or stopping or best_step == step + 1:
            launch.reset_watchdog(args.patience)
            state["best"] = best, best_step
            checkpoint.save_run(run.policy, run.optimizer, args.out, step + 1, state)
        if stopping:
            break

    run.log.close(step + 1)
    run.decoders.shutdown(cancel_futures=True)
    if run.worker.judge:
        run.worker.judge.close()
    launch.end_process_group(engine, int(not last))  # 1: so that no next stage begins


if __name__ == "__main__":
    launch.run_main(main)
