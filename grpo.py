"""
grpo.py: PARA-GRPO on top of an SFT checkpoint, with a rollout engine inside every rank.

  R_i      = R_acc + w_tool R_tool - c calls + w_fmt R_fmt      of rollout i of G: rewards.score
  sigma    = std of R in the group; if it is 0 the group is skipped and counted
  A_task_i = ((R_acc + w_tool R_tool - c calls)_i - mean) / sigma   --tool-reward, --call-cost
  A_fmt_i  = w_fmt (R_fmt_i - mean) / sigma                  w_fmt: --format-weight
  A_it     = A_task_i + A_fmt_i [t in struct(o_i)]     struct: tag tokens and the end of each turn
  rho_t    = exp(logp_t - old_t)                       old: this trainer before the step
  w_t      = min(exp(old_t - sampler_t), 5)            sampler: the engine, which rounds otherwise
  L        = -(1/N) sum_t [ w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) - beta k3_t ]
  k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1      ref: the checkpoint of --ckpt
             N = sampled tokens of the whole batch, over ALL ranks

Three parts of PARA-GRPO, each with its flag: Exploration Anchoring (--think-prefix forces
`<think>\\n`, --answer-suffix pays for a final answer block, --anchor pays for closed thoughts),
Selective Anchoring (--format-credit struct), nFrames Gating (--frames gated: K ~ U{4,8,16,32,64}
per prompt, the same for the whole group). --vanilla turns all three off: the plain GRPO that the
authors released. With --format-credit sequence, A_task + A_fmt is exactly
GRPO's advantage of the summed reward.

Departs from upstream: the KL is in the loss, not mixed into rewards. Advantages are normalised
once. A batch takes one optimizer step, so old = logp and needs no forward of its own. Each step
measures the log-prob gap between engine and trainer on the sampled tokens of groups with a signal,
and stops the run if the gap is too large, because stale weights show nowhere else. f_tau in the log
is R_fmt by the paper's terms, a common ruler; `fmt` is the term that this run pays for.

Reads:  --ckpt, --data (task JSONL), or --rollouts: rollout JSONL, which is scored anew by the flags
        of this run and gives one update without an engine.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last, --out/log.jsonl,
        --out/args.json, --out/rollouts/*.jsonl, --out/judge.jsonl (--judge-url)
The same command again goes on from the newest whole checkpoint: tasks, K and sampling seeds depend
on (seed, step) alone.

CPU toy:  torchrun --nproc_per_node 2 grpo.py --preset toy --ckpt sft_out --data toy/rl.jsonl
1 GPU:    python grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
8 GPUs:   torchrun --nproc_per_node 8 grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
Adapters: with --lora 64 the 8B trains on one GPU of 80 GB
"""
import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import chat
import checkpoint
import launch
import model
import rewards
import rollout
import video
from engine import add_judge_arguments, open_judge

# ------------------------------------------------------------------------------------------------
# Advantages and trees


def group_by_prompt(episodes):
    """Episodes -> groups that share one prompt, samples in order, without episodes in which no
    token was sampled."""
    groups = {}
    # Sort by sample, not by time of completion: sums of floats are then the same in every run.
    for episode in sorted(episodes, key=lambda e: e.sample):
        if episode.context is not None and episode.spans:
            groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def set_advantages(group):
    """Sets Episode.advantage = {"task", "fmt", "sigma"} from the two parts that rewards.score
    paid."""
    # R is composed in rewards.score alone. A term that is added there arrives here by itself.
    task = [e.reward["paid_task"] for e in group]  # [G] credited at every sampled token
    fmt = [e.reward["paid_fmt"] for e in group]  # [G] credited at the tags
    a_task, a_fmt, sigma = rewards.group_advantages(task, fmt)
    for e, t, f in zip(group, a_task, a_fmt):
        e.advantage = {"task": t, "fmt": f, "sigma": sigma}


def token_advantages(episode, codec, credit):
    """-> list over context.ids: A_task, plus A_fmt at tokens that carry format credit; 0 at tokens
    that the policy did not sample. credit: --format-credit."""
    task, fmt = episode.advantage["task"], episode.advantage["fmt"]
    # Prompt, tool responses and forced tokens keep 0. Their mask is 0 too, so no loss reads them.
    out = [0.0] * len(episode.context.ids)
    for start, end in episode.spans:  # one turn of the main agent each
        # Selective Anchoring. Tags are searched in bytes: `<answer>` spans several tokens.
        if credit == "struct":
            pieces = chat.pieces_of(codec, episode.context.ids[start:end])
            credited = rewards.structural_mask(pieces)
        else:
            # "sequence": plain GRPO, every token. "none": the format reward trains no token.
            credited = [credit == "sequence"] * (end - start)
        out[start:end] = [task + fmt * c for c in credited]  # A_it of the header
    return out


def group_tree(group, codec, credit, first=0):
    """One group -> [shared prompt | o^1 | .. | o^G]. Each token carries its advantage, the engine's
    log-prob, and the number of its rollout, counted from `first`."""
    cut = group[0].spans[0][0]  # first sampled token: the whole group shares the ids before it
    prompt = group[0].context.ids[:cut]
    branches = []
    for number, e in enumerate(group, first):
        c = e.context
        # One wrong id in a shared prompt would train all G rollouts on a prompt that none of them
        # saw, so this is checked although one function built all of them.
        if c.ids[:cut] != prompt:
            raise ValueError(f"{e.group}: the prompts of one group differ")
        advantage = token_advantages(e, codec, credit)
        # All ids after the prompt: turns, glue and tool responses. The mask marks the sampled ones.
        values = {"advantage": advantage[cut:], "sampler": c.logps[cut:],
                  "rollout": [number] * (len(c.ids) - cut)}
        branches.append(model.Span(c.ids[cut:], c.mask[cut:], values))
    nothing = dict.fromkeys(("advantage", "sampler", "rollout"), [0.0] * cut)  # mask 0: not read
    return model.Tree(model.Span(prompt, [0] * cut, nothing), group[0].context.items, branches)


def training_trees(groups, codec, args):
    """Groups of this rank, with advantages -> (trees of the groups with a signal, sampled tokens of
    ALL groups, number of skipped groups). The tokens of a skipped group count in N: they have
    advantage 0."""
    trees = []
    tokens = 0
    skipped = 0
    rollouts = 0  # numbered through all groups of the rank, see group_tree
    for group in groups:
        tokens += sum(sum(e.context.mask) for e in group)
        # A group whose advantages are all 0 adds nothing to the gradient. Test the advantages, not
        # sigma: rounding can leave sigma at 1e-16.
        if any(e.advantage["task"] or e.advantage["fmt"] for e in group):
            trees.append(group_tree(group, codec, args.format_credit, rollouts))
        else:
            skipped += 1
        rollouts += len(group)
    return trees, tokens, skipped


# ------------------------------------------------------------------------------------------------
# Loss and update


def policy_loss(logp, old, sampler, ref, advantage, clip_eps, kl, tis_cap=5.0):
    """
    Per-token loss of the header, before the division by N.

    logp, old, sampler, ref: log-prob [n] of each token under the policy now, the policy before this
    batch, the engine, the reference (None: no KL). advantage [n].
    -> (loss [n], {"clipped", "truncated", "kl": [n]})

    Example: with logp = old = sampler, loss = -advantage, and its gradient with respect to logp is
    -advantage.
    """
    import torch

    # n is the number of sampled tokens in a pack, flat. There is no padding, so there is no mask.
    ratio = torch.exp(logp - old)  # rho [n]
    # Truncated importance weight: corrects for an engine that samples from almost this policy.
    weight = torch.exp(old - sampler)  # w_t before its cap [n]; a constant, no gradient flows
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    # The minimum is pessimistic: a token that moved too far in the good direction has no gradient.
    loss = -weight.clamp(max=tis_cap) * torch.minimum(ratio * advantage, clipped * advantage)
    stats = {"clipped": ((ratio - 1).abs() > clip_eps).float(),
             "truncated": (weight > tis_cap).float(),
             "kl": torch.zeros_like(logp.detach())}
    if ref is not None:
        # The KL is a term of the loss, per token. The reward does not contain it.
        gap = ref - logp  # [n]
        k3 = torch.exp(gap) - gap - 1  # an unbiased estimate of KL(policy || reference), >= 0
        loss = loss + kl * k3
        stats["kl"] = k3.detach()
    return loss, stats


def update(policy, reference, optimizer, trees, tokens, args):
    """
    Trains on one batch in args.minibatches optimizer steps -> means over the sampled tokens of all
    groups with a signal, on all ranks: {"loss", "gap", ..}; "tokens": the number of these tokens.

    trees: this rank's groups as [prompt | o^1 | .. | o^G]. tokens: sampled tokens of this rank,
    with those of groups without a signal. Collective: all ranks run equally many forwards.
    """
    import torch
    import torch.distributed as dist

    world, device = dist.get_world_size(), next(policy.parameters()).device
    # N of the header, counted over ALL ranks before any backward: then the gradient does not depend
    # on the number of ranks or packs. Summed in host memory, so the host does not wait for a GPU.
    total = torch.tensor([tokens, len(trees)], dtype=torch.float64)
    dist.all_reduce(total)
    sampled_everywhere, trees_everywhere = total.tolist()
    names = ("loss", "tokens", "gap", "entropy", "kl", "clipped", "truncated")
    if trees_everywhere == 0:  # no group of any rank has a signal, so the weights stay
        # None: no forward ran, so there is no gap, entropy or norm to report.
        return {**dict.fromkeys((*names, "grad_norm", "gap_max")), "tokens": 0,
                "skipped_update": 1, "bad_updates": 0}
    # With several minibatches each of them divides by its even part of N.
    n = max(1.0, sampled_everywhere / args.minibatches)

    # A pack holds as many trees as fit into --pack-tokens, and takes one forward. Ranks may have
    # different numbers of packs, but FSDP gathers weights in every forward, with all ranks. So
    # ranks with fewer packs add spare ones (real = False) that carry no gradient.
    minibatches = []  # [[(pack, real)]]
    for i in range(args.minibatches):
        filled = model.fill_packs(trees[i::args.minibatches], args.pack_tokens)
        packs = [model.pack_trees(policy.codec, members) for members in filled]
        minibatches.append(model.even_packs(policy.codec, packs))

    # old_t: the policy before the FIRST step of this batch. With one step old = logp. With more,
    # later minibatches meet a policy that has moved, so all of them are scored beforehand.
    old_logps = {}
    if args.minibatches > 1:
        with torch.no_grad():
            for pack in (pack for packs in minibatches for pack, _ in packs):
                old_logps[id(pack)] = policy(pack, args.temperature)[0]

    # Sums stay on the device until the end, so that no pack waits for a copy to the host.
    sums = torch.zeros(len(names), device=device, dtype=torch.float64)
    worst_gap = torch.zeros((), device=device, dtype=torch.float64)
    norms = []
    for packs in minibatches:  # one optimizer step each
        for pack, real in packs:
            ref = None
            if reference is not None:
                with torch.no_grad():
                    ref, _ = reference(pack, args.temperature)  # [n]
            # All log-probs are at the sampling temperature: the engine's are, too.
            logp, entropy = policy(pack, args.temperature)  # [n] each
            old = old_logps.get(id(pack), logp.detach())  # [n] a constant
            if real:
                advantage = model.to_device(pack.values["advantage"], device)  # [n]
                sampler = model.to_device(pack.values["sampler"], device)  # [n]
            else:  # a spare pack: advantage 0, and an engine that agrees with the trainer
                advantage, sampler = torch.zeros_like(old), old
            loss, stats = policy_loss(logp, old, sampler, ref, advantage, args.clip_eps, args.kl)

            # FSDP averages gradients over ranks. Each rank holds a part of the sum over N, so it
            # multiplies by the number of ranks.
            (real * world * loss.sum() / n).backward()

            # Numbers for the log. Spare packs do not count.
            if real:
                gap = (old - sampler).abs()  # [n] engine against trainer: only rounding is allowed
                seen = (loss.detach(), torch.ones_like(gap), gap, entropy,
                        stats["kl"], stats["clipped"], stats["truncated"])  # fmt: skip
                sums += torch.stack([values.double().sum() for values in seen])
                worst_gap = torch.maximum(worst_gap, gap.max().double())

        norms.append(model.clip_gradients(policy, args.clip))
        # The norm covers the gradients of all ranks, so all of them step or none does.
        if math.isfinite(norms[-1]):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # Every rank gets the same means, so every rank comes to the same decision on check_gap.
    dist.all_reduce(sums)
    dist.all_reduce(worst_gap, op=dist.ReduceOp.MAX)
    means = dict(zip(names, (sums / sums[1].clamp(min=1)).tolist()))
    return {**means, "tokens": sums[1].item(), "grad_norm": max(norms),
            "gap_max": worst_gap.item(), "skipped_update": 0,
            "bad_updates": sum(not math.isfinite(norm) for norm in norms)}


# ------------------------------------------------------------------------------------------------
# The loop


def share(tasks, step, args, rank, world):
    """-> (tasks of this rank, {group: place in the batch}). If a batch spans two epochs it may hold
    a task twice; the two are one larger group."""
    # Every rank draws the same batch and then takes its own part of it.
    picked = launch.batch_indices(step, args.prompts, len(tasks), args.seed)
    batch = [tasks[i] for i in picked]
    order, frames = {}, {}
    for task in batch:
        # The step is part of the name: a task that comes again later is another group.
        name = f"{step}/{task['id']}"
        order.setdefault(name, len(order))
        frames[name] = rollout.overview_frames(args.frames, args.seed, step, task["id"])
    # Balance ranks by K, the only cost of a group that is known before sampling.
    mine = launch.deal(order, frames.get, rank, world)
    return [t for t in batch if f"{step}/{t['id']}" in mine], order


def look_ahead(pool, source, tasks, step, args, sampler, over):
    """Decodes, in the threads of `pool`, the overviews that step `step` will need. Until the Event
    `over`, each begins at a moment at which no decode of `sampler` waits or runs. The futures are
    not read: a broken video is counted when its episode comes."""
    def decode(spec):
        while not over.wait(0.02) and (sampler.pump is None or sampler.pump.loading):
            pass
        source.load(spec)

    for task in tasks:
        k = rollout.overview_frames(args.frames, args.seed, step, task["id"])
        pool.submit(decode, source.overview_spec(task, k))


def sample_batch(engine, tasks, agent, codec, source, step, args, rank, world, ahead=None,
                 judge=None):
    """Rollouts of this rank -> (episodes in batch order, seconds the engine waited for frames).
    Without a collective: ranks finish at different times and meet at the update. ahead: pool of
    threads that decode the overviews of the next step meanwhile and during the update."""
    # Each rank samples whole groups with its own engine, and fans out to sub-agents by itself.
    mine, order = share(tasks, step, args, rank, world)
    sampler = rollout.Sampler(engine, codec, source, agent, pay_of(args), judge)
    over = threading.Event()
    if ahead:
        look_ahead(ahead, source, share(tasks, step + 1, args, rank, world)[0], step + 1, args,
                   sampler, over)
    try:
        episodes = list(rollout.run(sampler, mine, args.frames, args.group, step))
    finally:
        over.set()  # else the threads of `ahead` would outlive an error
    for e in episodes:
        # One line per task, not one per sample of its group.
        if e.status in ("video_error", "label_error") and e.sample == 0:
            print(launch.printable(f"skipped task {e.task['id']}: {e.error}"), flush=True)
    # Episodes come as they finish. Sums and files must not depend on that order.
    episodes.sort(key=lambda e: (order[e.group], e.sample))
    if rank == 0 and episodes and args.show_every and step % args.show_every == 0:
        print(rollout.show(episodes[0], codec, sys.stdout.isatty()), flush=True)
    return episodes, sampler.pump.idle_s


def main():
    # 0. Everything that can be refused is refused here, before a model is built.
    args = parse_args()
    # A hub snapshot, a run folder or a checkpoint folder: from here on a folder with weights.
    ckpt = checkpoint.resolve_checkpoint(args.ckpt)
    faults = [] if args.check else None  # --check collects them all; a run stops at the first
    tasks = rollout.read_tasks(args.data, faults) if args.data else []
    held = rollout.read_tasks(args.val, faults) if args.val else []
    recorded = read_rollouts(args.rollouts or [], pay_of(args))
    agent, source = rollout.agent_settings(args, args.data or args.rollouts[0])
    if args.check:
        codec = chat.load_codec(ckpt, args.channel)
        return check(args, codec, tasks + held, agent, source, faults)
    launch.make_out(os.path.join(args.out, "rollouts"))
    checkpoint.claim_run(args.out, [args.data, args.val, *(args.rollouts or [])])
    # Each rank asks about its own rollouts. All append to one file, and read it when they begin.
    judge = open_judge(args, os.path.join(args.out, "judge.jsonl"))
    rank, world, device = launch.start_process_group(args.patience)
    launch.beat(args.patience)
    # The same command again goes on from the newest whole checkpoint in --out.
    folder, state = checkpoint.resume_point(args.out, args, args.resume)
    start, steps = state.get("step", 0), 1 if args.rollouts else args.steps
    # Held-out accuracy, -1: none yet. Accuracies on other tasks cannot be compared.
    best = state.get("best", -1.0) if state.get("args", {}).get("val") == args.val else -1.0
    if start >= steps:
        launch.say(f"nothing to do: {args.out} has {start} steps of {steps}")
        launch.end_process_group()
        return
    then = "" if args.rollouts else ", then the engine"
    launch.say(f"{args.ckpt} -> {args.out}: loading the checkpoint{then}")
    codec = chat.load_codec(ckpt, args.channel)
    check_frames(recorded, codec)
    # The largest prompt must fit, and some video must open. Both show before weights are loaded.
    if tasks:
        rollout.check_context(codec, tasks + held, agent, source, args.frames)
    policy, reference, optimizer, engine = set_up(args, ckpt, codec, source, device, folder)
    wire = model.engine_dtype(codec, device)  # dtype in which weights travel to the engine
    log = open_run(args, policy, start, rank, world)
    labels = labels_by_type(tasks)
    # Decodes frames of the next step, during the rollouts on half of the decoders.
    ahead = ThreadPoolExecutor(max(2, video.decode_threads() // 2), thread_name_prefix="ahead")
    asked = launch.stop_on_sigterm()
    bad = 0  # steps in a row without a finite gradient
    if held and start == 0:  # the accuracy that training starts from
        evaluate(log, engine, held, agent, codec, source, 0, args, rank, world, judge)

    # beat() after each phase: a rank that hangs longer than --patience prints its stacks and exits.
    for step in range(start, steps):
        last = step + 1 == steps
        # 1. Rollouts, groups, advantages. The engine holds the weights of this step, so its samples
        # are on policy, but for rounding.
        clock, waited = time.monotonic(), 0.0
        if args.rollouts:
            # A rank takes whole groups, because sigma needs all rollouts of a group.
            groups = group_by_prompt(recorded)[rank::world]
            episodes = [e for group in groups for e in group]
            if judge:
                list(rollout.paid(episodes, pay_of(args), judge))
        else:
            episodes, waited = sample_batch(engine, tasks, agent, codec, source, step, args, rank,
                                            world, None if last else ahead, judge)
            groups = group_by_prompt(episodes)
        # A group lies on one rank, so advantages need no exchange between ranks.
        for group in groups:
            set_advantages(group)
        rollout_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 2. Update. The trees hold every sampled token once and every prompt once per group. The
        # engine sleeps meanwhile, so the trainer has its memory.
        clock = time.monotonic()
        if engine:
            engine.sleep()
        trees, tokens, skipped = training_trees(groups, codec, args)
        stats = update(policy, reference, optimizer, trees, tokens, args)
        # Two faults end the run, on all ranks alike: NaN, and an engine that is another policy.
        # A single step without a finite gradient is skipped; three in a row end the run.
        bad = bad + 1 if stats["bad_updates"] else 0
        checkpoint.check_run(step, bad, args.out)
        check_gap(step, stats["gap"], gap_tolerance(wire, engine))
        train_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 3. New weights into the engine, which drops all prefixes and features of the old ones.
        clock = time.monotonic()
        look = held and (last or (args.eval_every and (step + 1) % args.eval_every == 0))
        if engine and (look or not last):
            engine.wake(checkpoint.full_weights(policy, wire))
        sync_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 4. Record, save, go on. SIGTERM on any rank saves and stops all of them.
        if not args.rollouts:
            write_rollouts(args.out, step, rank, episodes)
        log_step(log, step, steps, episodes, labels, stats, {
            "skipped": skipped, "groups": len(groups), "packed": sum(map(len, trees)),
            "judge": judge is not None,
            "decode_s": waited, "rollout_s": rollout_s, "train_s": train_s, "sync_s": sync_s})
        # `best` links to the checkpoint with the highest held-out accuracy so far. Every rank has
        # the same number, so all of them save or none.
        links = ["last"]
        if look:
            acc = evaluate(log, engine, held, agent, codec, source, step + 1, args, rank, world,
                           judge)
            if acc > best:
                best, links = acc, ["last", "best"]
        # Ranks may get SIGTERM at different times, and must not leave the loop at different steps.
        stopping = launch.any_rank(asked.is_set())
        due = last or (args.save_every and (step + 1) % args.save_every == 0)
        if stopping or due or "best" in links:
            state = {"best": best, "args": vars(args)}
            checkpoint.save_run(policy, codec, optimizer, args.out, step + 1, state, links)
            launch.beat(args.patience)
        if step % 10 == 9:  # decoding leaves freed memory in the arenas of its threads
            launch.give_back_memory()
        if stopping:
            break

    if rank == 0:
        log.close(step + 1, steps)
    ahead.shutdown(cancel_futures=True)
    if engine:
        engine.close()
    if judge:
        judge.close()
    launch.end_process_group()


def gap_tolerance(dtype, engine=True):
    """The largest mean gap in nats that rounding explains, far below the gap of stale weights.
    Recorded rollouts (engine None) may come from an engine of any precision."""
    return 1e-3 if engine and dtype.itemsize == 4 else 0.1


def check(args, codec, tasks, agent, source, faults):
    """--check: looks at all data and ends. Raises UserError if there is a fault. faults: lines of
    the rows that are wrong in form, which are not in tasks."""
    if os.environ.get("RANK", "0") != "0":  # under torchrun rank 0 alone looks
        return
    if not (tasks or faults):
        raise launch.UserError("--check looks at tasks: give --data")
    faults = faults + rollout.preflight(codec, tasks, agent, source, args.frames)
    launch.report_check(faults, " and ".join(filter(None, [args.data, args.val])))


def set_up(args, ckpt, codec, source, device, folder):
    """-> (policy, reference or None, optimizer, engine or None). folder: the checkpoint from which
    the run goes on, or None. Collective. Raises UserError if the ranks cannot share the prompts."""
    import torch.distributed as dist

    world = dist.get_world_size()
    if not args.rollouts and args.prompts % world:
        raise launch.UserError(f"--prompts {args.prompts} is not a multiple of the {world} ranks")
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    policy = checkpoint.load_sharded(ckpt, codec, device, args.recompute, args.replicas,
                                     lora=args.lora)
    # The vision tower is frozen. Features of a frame are computed once and read by all forwards.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = engine = None
    # With adapters a second copy of the adapters is enough: the base is frozen.
    if args.kl > 0 and args.lora:
        reference = checkpoint.AdapterReference(policy)
    elif args.kl > 0:
        reference = checkpoint.load_sharded(ckpt, codec, device, replicas=args.replicas,
                                            frozen=True)
        reference.features = policy.features  # both read the features of one tower
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    # On a GPU the engine shares the device with the trainer, so it starts asleep.
    if not args.rollouts:
        engine = rollout.make_engine(ckpt, codec, args, sleeping=True)
        if folder:  # the engine has read --ckpt, but the resumed weights are newer
            engine.sync(checkpoint.full_weights(policy, model.engine_dtype(codec, device)))
    return policy, reference, optimizer, engine


def check_gap(step, gap, tolerance):
    """Raises RunError, on all ranks alike, if engine and trainer are not the same policy."""
    if gap is not None and not gap <= tolerance:  # NaN fails this comparison too
        raise launch.RunError(
            f"step {step}: mean |log-prob gap| between engine and trainer is {gap:.3f} nats, "
            f"tolerance {tolerance}: the engine samples from other weights or other inputs, or "
            "(with --rollouts) at another --temperature")


def open_run(args, policy, start, rank, world):
    """On rank 0: writes the settings beside the outputs, prints the size of the run -> Log. None on
    other ranks."""
    if rank:
        return None
    launch.write_args(args.out, args)
    # Deletes files that a killed run left half-written and, in a new run, older checkpoints.
    checkpoint.clean_run(args.out, start)
    device = next(policy.parameters()).device.type
    size = (f"{args.prompts} prompts x {args.group} rollouts = {args.prompts * args.group} a step, "
            f"K {args.frames}")
    if args.rollouts:
        size = f"one update from the rollouts of {len(args.rollouts)} files"
    print(f"{size} | {world} rank{'s' if world > 1 else ''} ({device}) | format credit "
          f"{args.format_credit} | {checkpoint.weights_line(policy)}", flush=True)
    return launch.Log(args.out, start, args)


# ---- below: numbers of a step, the table of arguments (a reader of the step may stop here) ------
# What each number means: docs/metrics.md.


def pay_of(args):
    """Flags -> rewards.Pay, whose fields they are."""
    return rewards.Pay(**{f.name: getattr(args, f.name) for f in fields(rewards.Pay)})


def read_rollouts(paths, pay):
    """Rollout JSONL files -> Episodes, scored anew by what this run pays for."""
    # An empty episode names the columns that a record must have.
    keys = rollout.Episode(None, None, 0, 0, 0).to_json()
    rows = [row for path in paths for row in launch.read_jsonl(path, keys, rollout.record_fault)]
    episodes = [rollout.from_json(row) for row in rows]
    for e in episodes:
        e.reward = rollout.scored(e, pay)
        if not e.reward:  # a question of rollout.py --video
            raise launch.UserError(f"--rollouts: task {e.task['id']} has no answer to learn from")
    return episodes


def check_frames(episodes, codec):
    """Raises UserError if the frames of a recorded episode are not those of its ids."""
    for e in episodes:
        if e.context is None:
            continue
        # Positions need frames and ids that fit, so an error here means that they do not.
        try:
            model.rope_positions(codec, e.context.ids, e.context.items)
        except (ValueError, IndexError):
            raise launch.UserError(f"--rollouts: {e.group}, sample {e.sample}: its vision field "
                                   "names other frames than its ids hold") from None


def write_rollouts(out, step, rank, episodes):
    """Writes the rollouts of this rank and step, enough to train on them again (--rollouts)."""
    lines = "".join(json.dumps(e.to_json()) + "\n" for e in episodes)
    # One file per rank, because ranks share no file handle.
    name = f"step_{step:06d}.rank{rank}.jsonl"
    launch.write_atomic(os.path.join(out, "rollouts", name), lines)


def log_step(log, step, steps, episodes, labels, stats, counts):
    """Writes the metrics of a step, and warns of signs that the run learns nothing. episodes,
    counts: of this rank; stats: of all ranks. labels: see by_chance. Collective."""
    rows = launch.gather_rows([episode_row(e, labels) for e in episodes])
    counts = launch.gather_rows([counts])
    if log:  # rank 0
        m = {**summarise(rows), **stats, **step_counts(rows, counts), "step": step + 1}
        log.write(m, step_line(m, steps, log.eta(step + 1, steps)))
        found = {name: line for name, line in signs(log.rows).items() if name not in log.warned}
        # Once per run, and one line per step: the first sign is the cause, others follow from it.
        # After a collapse of the whole run every other number looks bad too.
        if found and not log.warned & {"f_tau", "entropy", "failed"}:
            print(f"WARNING step {step + 1}: {next(iter(found.values()))}", flush=True)
        log.warned |= found.keys()


def evaluate(log, engine, held, agent, codec, source, step, args, rank, world, judge=None):
    """Logs the held-out accuracy with and without tools, per K and type -> that with tools. The K,
    the seeds and so the noise of a task are the same in every evaluation. Collective."""
    # Videos of --val lie beside that file, unless --video-root says otherwise.
    root = args.video_root or os.path.dirname(os.path.abspath(args.val))
    source = replace(source, root=root)
    rows = []
    # Without tools too: the difference is the worth of calling. A policy that calls although no
    # tool is offered shows here.
    for tools in (True, False):
        # Step 0 enters seeds and draws of K. The weights are those of `step`.
        sampler = rollout.Sampler(engine, codec, source, replace(agent, tools=tools), pay_of(args),
                                  judge)
        for e in rollout.run(sampler, held[rank::world], args.frames, 1, 0):
            # The whole evaluation may take longer than --patience, one episode may not.
            launch.beat(args.patience)
            if e.error and tools and step == 0:
                print(launch.printable(f"held-out task {e.task['id']}: {e.error}"), flush=True)
            rows.append({"tools": tools, "status": e.status, "acc": e.reward["acc"],
                         "K": e.num_frames, "type": e.task["type"]})
    # A broken video says nothing of the policy. A context that overflowed counts as a wrong answer.
    rows = launch.gather_rows(rows)
    good = [row for row in rows if row["status"] in ("ok", "context")]

    def cell(some):
        with_tools, without = ([row for row in some if row["tools"] is on] for on in (True, False))
        return {"n": len(with_tools), "acc": average(with_tools, "acc"),
                "acc_without_tools": average(without, "acc")}

    # A K or a type may be worse while the mean is better.
    val = {**cell(good), "not_ok": len(rows) - len(good),
           "by_K": by_value(good, "K", cell), "by_type": by_value(good, "type", cell)}
    if log:
        failed = f" | not ok {val['not_ok']}" if val["not_ok"] else ""
        log.write({"step": step, "val": val}, f"step {step:04d} | held-out acc "
                  f"{number(val['acc'])} no tools {number(val['acc_without_tools'])}{failed}")
    return -1.0 if val["acc"] is None else val["acc"]


def labels_by_type(tasks):
    """Tasks -> {type: [(id, answer)]}, for by_chance."""
    labels = {}
    for task in tasks:
        labels.setdefault(task["type"], []).append((task["id"], task["answer"]))
    return labels


def by_chance(e, labels):
    """R_acc that the answer of `e` earns against the label of another task of the same type. Right
    answers earn more against their own labels. None if there is no other task."""
    known = labels.get(e.task["type"], [])
    # A digest, so that the same rollout is compared with the same label in every run.
    at = rollout.stable_number("label", e.group, e.sample) % max(1, len(known))
    # The task itself may be drawn. Its neighbour is another one, because ids are unique.
    others = [answer for name, answer in (known[at:] + known[:at])[:2] if name != e.task["id"]]
    answer = rewards.final_answer(e.turns, e.think_open)
    options = e.task.get("options")
    return rewards.accuracy(answer, e.task["type"], others[0], options) if others else None


def episode_row(e, labels):
    """The numbers of one episode for the log, small enough to send to rank 0."""
    # f_tau uses the paper's terms in every run, so that runs with other terms can be compared.
    ruler = rewards.format_reward(e.turns, e.think_open)
    return {
        "K": e.num_frames, "type": e.task["type"], "group": e.group, "status": e.status,
        "chance": by_chance(e, labels),
        "f_tau": ruler["total"], "well_formed": ruler["well_formed"],
        **{name: e.reward[name] for name in ("total", "acc", "fmt", "tool")},
        # Counts, not shares: shares of rollouts with few tags would weigh as much as those of many.
        "closure": rewards.closure_counts(e.turns, e.think_open),
        "written": len(e.calls), "parseable": e.parseable(), "executed": e.executed(),
        "turns": len(e.turns),
        "length": sum(e.context.mask) if e.context else 0,
        "cut": sum(reason == "length" for reason in e.finish),
        "sub_tokens": sum(call["sub_tokens"] for call in e.calls),
        "judge": e.reward.get("judge"), "judge_cached": e.notes.get("judge_cached", False),
        "evidence": toy_evidence(e),
    }


def toy_evidence(e):
    """(slots that the first thought states as the overview shows them, slots that it states) of a
    task of toy.py. None for other tasks: nobody knows what their frames show."""
    if "events" not in e.task or not e.turns:
        return None
    import toy

    return toy.stated_evidence(e.turns[0], e.task["events"], e.num_frames)


def mean(values):
    """Mean of numbers, None if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None


def average(rows, name):
    """Mean of a column over the rows that have a value, None if none has."""
    return mean(float(row[name]) for row in rows if row[name] is not None)


def by_value(rows, name, cell):
    """{value of a column: cell(rows that have this value)}."""
    return {str(value): cell([row for row in rows if row[name] == value])
            for value in sorted({row[name] for row in rows})}


def call_minus_skip(rows):
    """How much R_acc a call was worth, compared within prompts: mean of the rollouts that wrote a
    call minus mean of those that did not. A call that was written and not run counts: the policy
    decides to write, and what then gets lost is part of the price. R_tool is left out, because it
    pays for calling. None if no prompt has both."""
    # Within prompts, because easy prompts are called less and answered better.
    groups = {}
    for row in rows:
        wrote = row["written"] > 0 or any(row["closure"][kind][0] for kind in rewards.CALLS)
        groups.setdefault(row["group"], ([], []))[wrote].append(row["acc"])
    return mean(mean(called) - mean(skipped) for skipped, called in groups.values()
                if called and skipped)


def summarise(rows):
    """Episode rows of all ranks -> the step's metrics: means over the rollouts that are ok. A
    broken video has no accuracy and no format, so zeros for it would blame the policy."""
    failed = sum(row["status"] != "ok" for row in rows)
    # From here on only rollouts that are ok. None stands for a mean over nothing.
    rows = [row for row in rows if row["status"] == "ok"]
    out = {name: average(rows, name) for name in ("total", "acc", "fmt", "tool", "length", "turns",
                                            "f_tau", "well_formed", "sub_tokens")}
    out["kappa"] = average(rows, "executed")
    out["written_calls"] = average(rows, "written")
    out["valid_calls"] = average(rows, "parseable")
    out["called"] = mean(float(row["executed"] > 0) for row in rows)
    # Of all turns of the step, a rollout of three turns counts three times.
    turns = sum(row["turns"] for row in rows)
    out["cut_turns"] = sum(row["cut"] for row in rows) / turns if turns else None
    out["not_ok"] = failed
    out["call_minus_skip"] = call_minus_skip(rows)
    # Closed / opened over all turns of the step. None: no such tag was opened.
    out["closure"] = {}
    for tag in rewards.KINDS:
        opened, closed = (sum(row["closure"][tag][i] for row in rows) for i in (0, 1))
        out["closure"][tag] = closed / opened if opened else None
    # Rewards can teach a thought to lie about the frames while accuracy rises.
    stated = [row["evidence"] for row in rows if row["evidence"]]
    if stated:
        right, slots = map(sum, zip(*stated))
        out["evidence"] = right / slots if slots else None
    # The Tool Necessity Gap shows per K only: with 64 frames a call is worth little. A dead task
    # type among several shows per type only.
    def cell(some):
        return {"n": len(some), "acc": average(some, "acc"), "f_tau": average(some, "f_tau"),
                "well_formed": average(some, "well_formed"), "kappa": average(some, "executed"),
                "call_minus_skip": call_minus_skip(some)}

    out["by_K"] = by_value(rows, "K", cell)
    out["by_type"] = by_value(rows, "type",
                              lambda some: {**cell(some), "chance": average(some, "chance")})
    return out


def signs(history):
    """Rows of the log -> {name: line}: signs that a run learns nothing, with the likely cause. The
    thresholds are wide, so that healthy runs show none."""
    found = {}
    history = [row for row in history if "by_type" in row]  # the others hold held-out accuracy
    m, three = history[-1], history[-3:]

    def lasting(test, rows):
        return len(rows) == 3 and all(map(test, rows))

    # Both fall slowly in a healthy run. A step that is too long breaks them at once.
    for name in ("f_tau", "entropy"):
        values = [row[name] for row in history[-6:] if row[name] is not None]
        if len(values) > 1 and max(values) > 0.1 and values[-1] < max(values) / 2:
            found[name] = (f"{name} fell from {max(values):.2f} to {values[-1]:.2f} within five "
                           "steps: --lr is probably too high")
    # A turn that is cut has no answer and no closing tag.
    if (m["cut_turns"] or 0) > 0.5:
        found["cut"] = (f"{m['cut_turns']:.0%} of all turns were cut off: --max-new-tokens is too "
                        "small, or the policy does not end its turns")
    # Such a run is paid by another reward than it was started with.
    if m.get("judge_failed", 0) > m.get("judged", 0) / 2:
        found["judge"] = (f"the judge failed on {m['judge_failed']} of {m['judged']} answers, and "
                          "token F1 paid them instead: is its server up?")
    # Nothing was sampled, so no other number moves.
    if lasting(lambda row: row["not_ok"] and row["acc"] is None, three):
        found["failed"] = ("no rollout has been ok for 3 steps: see the lines of skipped tasks; is "
                           "--video-root right?")
    # A tag that nothing opens has no share.
    for kind in rewards.KINDS:
        shares = [row["closure"][kind] for row in three]
        if lasting(lambda share: share is not None and share < 0.5, shares):
            found[f"open {kind}"] = (f"most <{kind}> tags were never closed for 3 steps: the cold "
                                     "start did not teach the format, or --lr is too high")
    for kind, cell in m["by_type"].items():
        cells = [row["by_type"][kind] for row in history if kind in row["by_type"]]
        if lasting(lambda cell: cell["acc"] == 0, cells[-3:]):
            found[f"type {kind}"] = (
                f"no rollout of a task of type {kind} has earned accuracy for 3 steps: see whether "
                "the labels are right and in the form that the answers have (--show-every 1)")
        # Rollouts of one step vary together, so the spread over steps is the measure of noise.
        apart = [c["acc"] - c["chance"] for c in cells[-5:] if c["chance"] is not None]
        if cell["acc"] and len(apart) == 5:
            # Not "no better than noise": few prompts are noisy. Surely hardly better.
            if mean(apart) + 2 * statistics.stdev(apart) / math.sqrt(5) < 0.05:
                found[f"chance {kind}"] = (
                    f"answers to tasks of type {kind} fit their own labels no better than the "
                    "labels of other tasks, for 5 steps: see whether labels are mixed up between "
                    "rows, or the checkpoint cannot do the task yet")
    # Without a signal no weight moves, so the next steps look the same. A few groups may be equal
    # by chance.
    equal = lasting(lambda row: row["groups"] and row["zero_variance"] == row["groups"], three)
    if equal and sum(row["groups"] for row in three) >= 24:
        found["signal"] = ("no group has had a signal for 3 steps, because all rollouts of a prompt"
                           " earn the same: tasks too hard or too easy, --temperature or --group "
                           "too low, or a broken policy")
    return found


def number(value, form=".2f"):
    """A number for the terminal, "-" for None."""
    return "-" if value is None else format(value, form)


def step_line(m, steps, eta):
    """The numbers to watch, on one line of the terminal. log.jsonl has all. eta: seconds."""
    # Only if some failed: a column of zeros would hide the one that matters.
    more = f"not ok {m['not_ok']} | " if m["not_ok"] else ""
    if "judged" in m:
        more += f"judged {m['judged']} failed {m['judge_failed']} cached {m['judge_cached']} | "
    return (f"step {m['step']:04d}/{steps:04d} | R {number(m['total'])} acc {number(m['acc'])} "
            f"f_tau {number(m['f_tau'])} kappa {number(m['kappa'])} | {more}"
            f"gap {number(m['gap'], '.0e')} gn {number(m['grad_norm'])} "
            f"zero {m['zero_variance']}/{m['groups']} | "
            f"roll {m['rollout_s']:.1f}s train {m['train_s']:.1f}s | eta {eta / 60:.1f}m")


def step_counts(rows, counts):
    """Numbers that are summed over ranks instead of averaged over rollouts, and speeds by the clock
    of rank 0."""
    # Seconds are rank 0's, because ranks wait for each other at the update.
    times = {name: counts[0][name] for name in ("rollout_s", "train_s", "sync_s")}
    packed = sum(c["packed"] for c in counts)
    sampled = sum(row["length"] + row["sub_tokens"] for row in rows)
    judged = [row for row in rows if row["judge"] is not None]
    verdicts = [row for row in judged if row["judge"] != "fallback"]
    judge = {"judged": len(judged), "judge_failed": len(judged) - len(verdicts),
             "judge_cached": sum(row["judge_cached"] for row in verdicts)}
    return {**times, **(judge if counts[0]["judge"] else {}),
            "zero_variance": sum(c["skipped"] for c in counts),
            "groups": sum(c["groups"] for c in counts), "packed_tokens": packed,
            "decode_s": max(c["decode_s"] for c in counts),
            "rollout_tokens_per_s": sampled / max(times["rollout_s"], 1e-9),
            "train_tokens_per_s": packed / max(times["train_s"], 1e-9)}


# ------------------------------------------------------------------------------------------------
# Arguments


def build_parser():
    parser, yes_no = launch.parser(__doc__), argparse.BooleanOptionalAction
    add = parser.add_argument_group("what to read and write").add_argument
    add("--ckpt", required=True, help="checkpoint to start from; also the reference of the KL")
    add("--data", default=None, help="task JSONL")
    add("--rollouts", nargs="+", default=None,
        help="rollout JSONL files: take one update from them, without an engine")
    add("--out", default="grpo_out", help="run folder")
    add("--check", action="store_true",
        help="only look at the data: labels, videos, tokens; builds no model, writes nothing")
    add("--preset", choices=["paper", "toy"], default="paper",
        help="toy: numbers for the world of toy.py")
    add("--vanilla", action="store_true",
        help="the release's plain GRPO: no prefix, no suffix, no anchor, no gating")
    add("--resume", action=yes_no, default=None,
        help="go on from --out; default: if it is of the same settings; no: begin anew")
    add = parser.add_argument_group("batch").add_argument
    add("--steps", type=int, default=300, help="batches of rollouts")
    add("--prompts", type=int, default=32, help="prompts per step, over all ranks")
    add("--group", type=int, default=8, help="rollouts per prompt (G)")
    add("--frames", type=rollout.frames_argument, default="gated",
        help="overview frames K; 'gated': K ~ U{4,8,16,32,64}")
    # Above one context: else a group with a long prompt is split, and each part computes it again.
    add("--pack-tokens", type=int, default=49152, help="tokens per pack (one forward)")
    add = parser.add_argument_group("reward and credit").add_argument
    add("--format-weight", type=float, default=1.0, help="w_fmt")
    add("--format-credit", choices=["struct", "sequence", "none"], default="struct",
        help="sampled tokens that the format advantage reaches")
    add("--answer-suffix", action=yes_no, default=True,
        help="pay 0.3 + 0.2 for an <answer> block; off: 0.2 + 0.1, and more for thought")
    add("--anchor", type=float, default=0.5, help="lambda: weight of the anchor term; 0 = off")
    add("--tool-reward", dest="tool_weight", type=float, default=1.0,
        help="w_tool, factor on R_tool; 0 = off")
    add("--call-cost", type=float, default=0.0,
        help="c, price of each executed call; 0 = as in the paper")
    # The rates differ by stage and by --lora, so None stands for "see parse_args".
    add = parser.add_argument_group("loss and optimiser").add_argument
    add("--clip-eps", type=float, default=0.2, help="eps of the clipped surrogate")
    add("--kl", type=float, default=0.01, help="beta; 0 = no reference model is loaded")
    add("--lora", type=int, default=0, help="rank of adapters, the rest is frozen; 0 = off")
    add("--lr", type=float, default=None, help="AdamW, constant; default 2e-6, with --lora 2e-5")
    add("--clip", type=float, default=1.0, help="gradient norm; 0 = no clipping")
    add("--recompute", choices=["full", "none"], default="full", help="decoder layers in backward")
    add("--replicas", type=int, default=1,
        help="groups of ranks that each hold the whole model in shards (HSDP): one per node; "
             "0 = every rank holds the whole (toy)")
    add = parser.add_argument_group("looking and saving").add_argument
    add("--save-every", type=int, default=50, help="steps between checkpoints; 0 = at the end")
    add("--show-every", type=int, default=20, help="steps between printed rollouts; 0 = never")
    add("--val", help="held-out task JSONL: accuracy with and without tools, and `best`")
    add("--eval-every", type=int, default=50, help="steps between them; 0 = at the end")
    launch.add_track_arguments(add)
    rollout.add_agent_arguments(parser, more={
        "gamma": (0.3,),  # penalty of a thought that never closes, see rewards.format_reward
        "answer_from": ("tag", "line"),  # line: R_acc also reads the last line, as the release does
        "minibatches": (1,)})  # optimizer steps per batch; above 1 costs one more forward
    add_judge_arguments(parser, "whether an open answer says what the label says; R_acc is then 1 "
                        "or 0, and token F1 if it fails")
    return parser


def parse_args():
    parser = build_parser()
    # Presets change defaults, and flags override defaults. So presets must be known first.
    early = launch.peek(parser)
    if early.preset == "toy":
        parser.set_defaults(prompts=16, steps=40, pack_tokens=4096, save_every=0, kl=0.0,
                            recompute="none", replicas=0, temperature=1.0, **rollout.toy_lengths())
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence",
                            anchor=0.0, gamma=0.0, frames=64)
    args = parser.parse_args()
    # A folder of adapters goes on training these adapters, with their rank.
    args.lora = checkpoint.adapter_rank(args.ckpt, args.lora)
    if args.lr is None:  # adapters start at nothing and take larger steps
        args.lr = {"paper": (2e-6, 2e-5), "toy": (2e-4, 2e-3)}[args.preset][args.lora > 0]
    launch.at_least(1, args, "prompts", "group", "steps", "pack_tokens")
    launch.at_least(0, args, "lr", "clip", "clip_eps", "kl", "lora", "replicas", "eval_every",
                    "save_every", "show_every", "anchor", "gamma", "format_weight", "tool_weight",
                    "call_cost")
    if args.val and not args.data:
        raise launch.UserError("--val needs --data: with --rollouts there is no engine")
    if args.minibatches < 1:
        raise launch.UserError(f"--set minibatches={args.minibatches}: must be at least 1")
    if not args.data and not args.rollouts:
        raise launch.UserError("give --data (task JSONL) or --rollouts (rollout JSONL)")
    if args.temperature <= 0:
        raise launch.UserError("--temperature must be above 0: greedy samples have no gradient")
    launch.check_tracker(args)
    return args


if __name__ == "__main__":
    launch.run_main(main)
