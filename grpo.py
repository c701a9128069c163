"""
grpo.py: PARA-GRPO on top of an SFT checkpoint, with a rollout engine inside every rank.

  R_i      = R_acc + w_tool R_tool + w_fmt R_fmt       of rollout i in a group of G: rewards.score
  sigma    = std of R in the group; if it is 0 the group is skipped and counted
  A_task_i = ((R_acc + w_tool R_tool)_i - mean) / sigma      w_tool: --tool-reward
  A_fmt_i  = w_fmt (R_fmt_i - mean) / sigma                  w_fmt: --format-weight
  A_it     = A_task_i + A_fmt_i [t in struct(o_i)]     struct: tag tokens and the end of each turn
  rho_t    = exp(logp_t - old_t)                       old: this trainer before the step
  w_t      = min(exp(old_t - sampler_t), 5)            sampler: the engine, which rounds otherwise
  L        = -(1/N) sum_t [ w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) - beta k3_t ]
  k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1      ref: the checkpoint of --ckpt
             N = sampled tokens of the whole batch, over ALL ranks

Three parts of PARA-GRPO, each with its flag: Exploration Anchoring (--think-prefix forces
`<think>\\n`, --answer-suffix pays for a final answer block, --anchor and --gamma pay for closed
thoughts), Selective Anchoring (--format-credit struct), nFrames Gating (--frames gated: K ~
U{4,8,16,32,64} per prompt, the same for its whole group). --vanilla turns them off, which gives
plain GRPO as the authors released it. With --format-credit sequence, A_task + A_fmt is exactly
GRPO's advantage of the summed reward.

Departs from upstream: the KL is in the loss, not mixed into rewards. Advantages are normalised
once. A batch takes one optimizer step, so old = logp and needs no forward of its own. Each step
measures the log-prob gap between engine and trainer on every sampled token and stops the run if
the gap is too large, because stale weights show nowhere else. f_tau in the log is R_fmt by the
paper's terms, a common ruler for all runs; `fmt` is the term that this run pays for.

Reads:  --ckpt, --data (task JSONL), or --rollouts: rollout JSONL, which is scored anew by the flags
        of this run and gives one update without an engine.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last, --out/log.jsonl,
        --out/args.json, --out/rollouts/*.jsonl
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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import chat
import checkpoint
import launch
import model
import rewards
import rollout

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
    task = [e.reward["paid_task"] for e in group]  # [G]
    fmt = [e.reward["paid_fmt"] for e in group]  # [G]
    a_task, a_fmt, sigma = rewards.group_advantages(task, fmt)
    for e, t, f in zip(group, a_task, a_fmt):
        e.advantage = {"task": t, "fmt": f, "sigma": sigma}


def token_advantages(episode, codec, credit):
    """-> list over context.ids: A_task, plus A_fmt at tokens that carry format credit; 0 at tokens
    that the policy did not sample. credit: --format-credit."""
    task, fmt = episode.advantage["task"], episode.advantage["fmt"]
    out = [0.0] * len(episode.context.ids)
    for start, end in episode.spans:
        # Selective Anchoring. Tags are searched in bytes: `<answer>` spans several tokens.
        if credit == "struct":
            pieces = chat.pieces_of(codec, episode.context.ids[start:end])
            credited = rewards.structural_mask(pieces)
        else:
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
    rollouts = 0
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
        gap = ref - logp  # [n]
        k3 = torch.exp(gap) - gap - 1  # an unbiased estimate of KL(policy || reference), >= 0
        loss = loss + kl * k3
        stats["kl"] = k3.detach()
    return loss, stats


def update(policy, reference, optimizer, trees, tokens, args):
    """
    Trains on one batch in --minibatches optimizer steps -> means over the sampled tokens of all
    ranks: {"loss", "gap", "entropy", "kl", ..}.

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
        return {**dict.fromkeys(names, 0.0), "grad_norm": 0.0, "gap_max": 0.0, "skipped_update": 1,
                "bad_updates": 0}
    n = max(1.0, sampled_everywhere / args.minibatches)

    # Spare packs (real = False) make all ranks run equally many forwards.
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

    sums = torch.zeros(len(names), device=device, dtype=torch.float64)
    worst_gap = torch.zeros((), device=device, dtype=torch.float64)
    norms = []
    for packs in minibatches:  # one optimizer step each
        for pack, real in packs:
            ref = None
            if reference is not None:
                with torch.no_grad():
                    ref, _ = reference(pack, args.temperature)  # [n]
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
        name = f"{step}/{task['id']}"
        order.setdefault(name, len(order))
        frames[name] = rollout.overview_frames(args.frames, args.seed, step, task["id"])
    # Balance ranks by K, the only cost of a group that is known before sampling.
    mine = launch.deal(order, frames.get, rank, world)
    return [t for t in batch if f"{step}/{t['id']}" in mine], order


def look_ahead(pool, source, tasks, step, args):
    """Decodes, in the threads of `pool`, the overviews that step `step` will need. The futures are
    not read: a broken video is counted when its episode comes."""
    for task in tasks:
        k = rollout.overview_frames(args.frames, args.seed, step, task["id"])
        pool.submit(source.load, source.overview_spec(task, k))


def sample_batch(engine, tasks, agent, codec, source, step, args, rank, world):
    """Rollouts of this rank -> (episodes in batch order, seconds the engine waited for frames).
    Without a collective: ranks finish at different times and meet at the update."""
    mine, order = share(tasks, step, args, rank, world)
    sampler = rollout.Sampler(engine, codec, source, agent, pay_of(args))
    episodes = list(rollout.run(sampler, mine, args.frames, args.group, step))
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
    ckpt = checkpoint.resolve_checkpoint(args.ckpt)
    tasks = rollout.read_tasks(args.data) if args.data else []
    recorded = read_rollouts(args.rollouts or [], pay_of(args))
    agent, source = rollout.agent_settings(args, args.data or args.rollouts[0])
    launch.make_out(os.path.join(args.out, "rollouts"))
    launch.lock(args.out)
    checkpoint.try_save(args.out)
    rank, world, device = launch.start_process_group(args.patience)
    launch.beat(args.patience)
    folder, state = checkpoint.resume_point(args.out, args, args.resume)
    start, steps = state.get("step", 0), 1 if args.rollouts else args.steps
    if start >= steps:
        launch.say(f"nothing to do: {args.out} has {start} steps of {steps}")
        launch.end_process_group()
        return
    launch.say(f"{args.ckpt} -> {args.out}: loading the checkpoint, then the engine")
    codec = chat.load_codec(ckpt, args.channel)
    check_frames(recorded, codec)
    if tasks:
        rollout.check_context(codec, tasks, agent, source, args.frames)
    policy, reference, optimizer, engine = set_up(args, ckpt, codec, source, device, folder)
    wire = model.compute_dtype(device)  # dtype in which weights travel to the engine
    log = open_run(args, policy, start, rank, world)
    ahead = ThreadPoolExecutor(4, thread_name_prefix="ahead")
    asked = launch.stop_on_sigterm()
    bad = 0  # steps in a row without a finite gradient

    # beat() after each phase: a rank that hangs longer than --patience prints its stacks and exits.
    for step in range(start, steps):
        # 1. Rollouts, groups, advantages. The engine holds the weights of this step, so its samples
        # are on policy, but for rounding.
        clock, waited = time.monotonic(), 0.0
        if args.rollouts:
            # A rank takes whole groups, because sigma needs all rollouts of a group.
            groups = group_by_prompt(recorded)[rank::world]
            episodes = [e for group in groups for e in group]
        else:
            episodes, waited = sample_batch(engine, tasks, agent, codec, source, step, args, rank,
                                            world)
            groups = group_by_prompt(episodes)
        for group in groups:
            set_advantages(group)
        rollout_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 2. Update. The trees hold every sampled token once and every prompt once per group. The
        # engine sleeps meanwhile, so the trainer has its memory; threads decode the next overviews.
        clock = time.monotonic()
        if engine:
            engine.sleep()
        if step + 1 < steps and not args.rollouts:
            look_ahead(ahead, source, share(tasks, step + 1, args, rank, world)[0], step + 1, args)
        trees, tokens, skipped = training_trees(groups, codec, args)
        stats = update(policy, reference, optimizer, trees, tokens, args)
        # Two faults end the run, on all ranks alike: NaN, and an engine that is another policy.
        bad = bad + 1 if stats["bad_updates"] else 0
        checkpoint.check_run(step, bad, args.out)
        check_gap(step, stats["gap"], gap_tolerance(wire, engine))
        train_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 3. New weights into the engine, which drops all prefixes and features of the old ones.
        clock = time.monotonic()
        if engine and step + 1 < steps:
            engine.wake(checkpoint.full_weights(policy, wire))
        sync_s = time.monotonic() - clock
        launch.beat(args.patience)

        # 4. Record, save, go on. SIGTERM on any rank saves and stops all of them.
        if not args.rollouts:
            write_rollouts(args.out, step, rank, episodes)
        log_step(log, step, steps, episodes, stats, {
            "skipped": skipped, "groups": len(groups), "packed": sum(map(len, trees)),
            "decode_s": waited, "rollout_s": rollout_s, "train_s": train_s, "sync_s": sync_s})
        stopping = launch.any_rank(asked.is_set())
        due = args.save_every and (step + 1) % args.save_every == 0
        if stopping or due or step + 1 == steps:
            checkpoint.save_run(policy, codec, optimizer, args.out, step + 1, {"args": vars(args)})
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
    launch.end_process_group()


def gap_tolerance(dtype, engine=True):
    """The largest mean gap in nats that rounding explains, far below the gap of stale weights.
    Recorded rollouts (engine None) may come from an engine of any precision."""
    return 1e-3 if engine and dtype.itemsize == 4 else 0.1


def set_up(args, ckpt, codec, source, device, folder):
    """-> (policy, reference or None, optimizer, engine or None). folder: the checkpoint from which
    the run goes on, or None. Collective. Raises UserError if the ranks cannot share the prompts."""
    import torch.distributed as dist

    world = dist.get_world_size()
    if not args.rollouts and args.prompts % world:
        raise launch.UserError(f"--prompts {args.prompts} is not a multiple of the {world} ranks")
    policy = checkpoint.load_sharded(ckpt, codec, device, args.recompute, args.replicas,
                                     lora=args.lora)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = engine = None
    if args.kl > 0 and args.lora:
        reference = checkpoint.AdapterReference(policy)
    elif args.kl > 0:
        reference = checkpoint.load_sharded(ckpt, codec, device, replicas=args.replicas,
                                            frozen=True)
        reference.features = policy.features  # both read the features of one tower
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    if not args.rollouts:
        engine = rollout.make_engine(ckpt, codec, args, sleeping=True)
        if folder:  # the engine has read --ckpt, but the resumed weights are newer
            engine.sync(checkpoint.full_weights(policy, model.compute_dtype(device)))
    return policy, reference, optimizer, engine


def check_gap(step, gap, tolerance):
    """Raises RunError, on all ranks alike, if engine and trainer are not the same policy."""
    if not gap <= tolerance:  # NaN fails this comparison too
        raise launch.RunError(
            f"step {step}: mean |log-prob gap| between engine and trainer is {gap:.3f} nats, "
            f"tolerance {tolerance}: the engine samples from other weights or other inputs")


def open_run(args, policy, start, rank, world):
    """On rank 0: writes the settings beside the outputs, prints the size of the run -> Log. None on
    other ranks."""
    if rank:
        return None
    launch.write_atomic(os.path.join(args.out, "args.json"), json.dumps(vars(args), indent=1))
    checkpoint.clean_run(args.out, start)
    device = next(policy.parameters()).device.type
    print(f"{args.prompts} prompts x {args.group} rollouts = {args.prompts * args.group} a step on "
          f"{world} rank{'s' if world > 1 else ''} ({device}) | K {args.frames} | format credit "
          f"{args.format_credit} | {checkpoint.weights_line(policy)}", flush=True)
    return launch.Log(args.out, start, args)


# ---- below: numbers of a step, the table of arguments (a reader of the step may stop here) ------
# What each number means: docs/metrics.md.


def pay_of(args):
    """Flags -> rewards.Pay, whose fields they are."""
    return rewards.Pay(**{f.name: getattr(args, f.name) for f in fields(rewards.Pay)})


def read_rollouts(paths, pay):
    """Rollout JSONL files -> Episodes, scored anew by what this run pays for."""
    keys = rollout.Episode(None, None, 0, 0, 0).to_json()
    rows = [row for path in paths for row in launch.read_jsonl(path, keys, rollout.record_fault)]
    episodes = [rollout.from_json(row) for row in rows]
    for e in episodes:
        e.reward = rollout.scored(e, pay)
    return episodes


def check_frames(episodes, codec):
    """Raises UserError if the frames of a recorded episode are not those of its ids."""
    for e in episodes:
        try:
            model.rope_positions(codec, e.context.ids, e.context.items) if e.context else None
        except (ValueError, IndexError):
            raise launch.UserError(f"--rollouts: {e.group}, sample {e.sample}: its vision field "
                                   "names other frames than its ids hold") from None


def write_rollouts(out, step, rank, episodes):
    """Writes the rollouts of this rank and step, enough to train on them again (--rollouts)."""
    lines = "".join(json.dumps(e.to_json()) + "\n" for e in episodes)
    name = f"step_{step:06d}.rank{rank}.jsonl"
    launch.write_atomic(os.path.join(out, "rollouts", name), lines)


def log_step(log, step, steps, episodes, stats, counts):
    """Writes the metrics of a step. episodes, counts: of this rank; stats: of all ranks.
    Collective."""
    rows = launch.gather_rows([episode_row(e) for e in episodes])
    counts = launch.gather_rows([counts])
    if log:
        m = {**summarise(rows), **stats, **step_counts(rows, counts), "step": step + 1}
        log.write(m, step_line(m, steps, log.eta(step + 1, steps)))


def episode_row(e):
    """The numbers of one episode for the log, small enough to send to rank 0."""
    # f_tau uses the paper's terms, whatever this run pays for: one ruler for all runs.
    ruler = rewards.format_reward(e.turns, e.think_open)
    return {
        "K": e.num_frames, "group": e.group, "status": e.status,
        "f_tau": ruler["total"], "well_formed": ruler["well_formed"],
        "f_released": rewards.released_format(e.turns),
        **{name: e.reward[name] for name in ("total", "acc", "fmt", "tool")},
        "closure": rewards.closure_counts(e.turns, e.think_open),
        "written": len(e.calls), "parseable": e.parseable(), "executed": e.executed(),
        "turns": len(e.turns),
        "length": sum(e.context.mask) if e.context else 0,
        "cut": sum(reason == "length" for reason in e.finish),
        "sub_tokens": sum(call["sub_tokens"] for call in e.calls),
    }


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


def average(rows, name):
    return mean(float(row[name]) for row in rows)


def call_minus_skip(rows):
    """How much R_acc a call was worth, compared within prompts: mean of the rollouts that called
    minus mean of those that did not. R_tool is left out, because it pays for calling. A rollout
    whose calls were written but not run counts on neither side. None if no prompt has both."""
    groups = {}
    for row in rows:
        written = sum(row["closure"][kind][0] for kind in rewards.CALLS)
        if row["executed"] or not written:
            groups.setdefault(row["group"], ([], []))[row["executed"] > 0].append(row["acc"])
    return mean(mean(called) - mean(skipped) for skipped, called in groups.values()
                if called and skipped)


def summarise(rows):
    """Episode rows of all ranks -> the step's metrics."""
    out = {name: average(rows, name) for name in ("total", "acc", "fmt", "tool", "length", "turns",
                                            "f_tau", "f_released", "well_formed", "sub_tokens")}
    out["kappa"] = average(rows, "executed")
    out["written_calls"] = average(rows, "written")
    out["valid_calls"] = average(rows, "parseable")
    out["called"] = mean(float(row["executed"] > 0) for row in rows)
    out["cut_turns"] = sum(row["cut"] for row in rows) / max(1, sum(row["turns"] for row in rows))
    out["not_ok"] = sum(row["status"] != "ok" for row in rows)
    out["call_minus_skip"] = call_minus_skip(rows)
    out["closure"] = {}
    for tag in rewards.KINDS:
        opened, closed = (sum(row["closure"][tag][i] for row in rows) for i in (0, 1))
        out["closure"][tag] = closed / opened if opened else None
    out["by_K"] = {}
    for k in sorted({row["K"] for row in rows}):
        of = [row for row in rows if row["K"] == k]
        out["by_K"][str(k)] = {
            "n": len(of), "acc": average(of, "acc"), "f_tau": average(of, "f_tau"),
            "well_formed": average(of, "well_formed"), "kappa": average(of, "executed"),
            "call_minus_skip": call_minus_skip(of)}  # fmt: skip
    return out


def step_line(m, steps, eta):
    """The numbers to watch, on one line of the terminal. log.jsonl has all. eta: seconds."""
    return (f"step {m['step']:04d}/{steps:04d} | R {m['total']:.2f} acc {m['acc']:.2f} "
            f"f_tau {m['f_tau']:.2f} kappa {m['kappa']:.2f} | gap {m['gap']:.0e} "
            f"gn {m['grad_norm']:.2f} zero {m['zero_variance']}/{m['groups']} | "
            f"roll {m['rollout_s']:.1f}s train {m['train_s']:.1f}s | eta {eta / 60:.1f}m")


def step_counts(rows, counts):
    """Numbers that are summed over ranks instead of averaged over rollouts, and speeds by the clock
    of rank 0."""
    times = {name: counts[0][name] for name in ("rollout_s", "train_s", "sync_s")}
    packed = sum(c["packed"] for c in counts)
    sampled = sum(row["length"] + row["sub_tokens"] for row in rows)
    return {**times, "zero_variance": sum(c["skipped"] for c in counts),
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
    add("--minibatches", type=int, default=1,
        help="optimiser steps per batch; above 1 costs one more forward")
    add("--pack-tokens", type=int, default=32768, help="tokens per pack (one forward)")
    add = parser.add_argument_group("reward and credit").add_argument
    add("--format-weight", type=float, default=1.0, help="w_fmt")
    add("--format-credit", choices=["struct", "sequence", "none"], default="struct",
        help="sampled tokens that the format advantage reaches")
    add("--answer-suffix", action=yes_no, default=True,
        help="pay 0.3 + 0.2 for an <answer> block; off: 0.2 + 0.1, and more for thought")
    add("--anchor", type=float, default=0.5, help="lambda: weight of the anchor term; 0 = off")
    add("--gamma", type=float, default=0.3, help="penalty of a thought never closed; 0 = off")
    add("--tool-reward", dest="tool_weight", type=float, default=1.0,
        help="w_tool, factor on R_tool; 0 = off")
    add("--answer-from", choices=["tag", "line"], default="tag",
        help="R_acc reads <answer> alone; or also the last line, as the authors' release")
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
    add("--wandb", nargs="?", const="paravt", default=None, metavar="PROJECT",
        help="send the numbers of log.jsonl there too; needs wandb")
    rollout.add_agent_arguments(parser)
    return parser


def parse_args():
    parser = build_parser()
    early = parser.parse_known_args()[0]
    if early.preset == "toy":
        parser.set_defaults(prompts=16, steps=40, pack_tokens=4096, save_every=0, kl=0.0,
                            recompute="none", replicas=0, temperature=1.0, **rollout.toy_lengths())
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence",
                            anchor=0.0, gamma=0.0, frames=64)
    args = parser.parse_args()
    args.lora = checkpoint.adapter_rank(args.ckpt, args.lora)
    if args.lr is None:  # adapters start at nothing and take larger steps
        args.lr = {"paper": (2e-6, 2e-5), "toy": (2e-4, 2e-3)}[args.preset][args.lora > 0]
    launch.at_least(1, args, "prompts", "group", "steps", "minibatches", "pack_tokens")
    launch.at_least(0, args, "lr", "clip", "clip_eps", "kl", "lora", "replicas")
    if not args.data and not args.rollouts:
        raise launch.UserError("give --data (task JSONL) or --rollouts (rollout JSONL)")
    if args.temperature <= 0:
        raise launch.UserError("--temperature must be above 0: greedy samples have no gradient")
    launch.check_wandb(args)
    return args


if __name__ == "__main__":
    launch.run_main(main)
