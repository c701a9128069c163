"""
grpo.py (tests/test_grpo_run.py): PARA-GRPO on top of an SFT checkpoint, with a rollout engine
inside every rank.

  R_task_i = R_acc + w_tool R_tool + w_win IoU - c calls        of rollout i of G: rewards.score
  R_i      = R_task_i + w_fmt R_fmt_i      --tool-reward, window_weight, call_cost
  sigma    = std of R in the group, at least 1e-3; if it is 0 the group is skipped and counted
  A_task_i = (R_task_i - mean) / sigma
  A_fmt_i  = w_fmt (R_fmt_i - mean) / sigma                  w_fmt: format_weight
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
and stops the run if the gap is too large: then they see other frames, positions or temperatures.
Weights that are a few updates old do not show in the gap (2e-4 nats after four at a rate of 2e-6),
so engine.py compares the engine's tensors with those that were sent. f_tau in the log is R_fmt by
the paper's terms, a common ruler; `fmt` is the term that this run pays for.

Reads:  --ckpt, --data (task JSONL), --val.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last and --out/best (links),
        --out/log.jsonl, --out/args.json, --out/judge.jsonl (--judge-url),
        --out/rollouts/*.jsonl (tools/replay.py trains on them again)
The same command again goes on from the newest whole checkpoint: tasks, K and sampling seeds depend
on (seed, step) alone.

CPU toy:  torchrun --nproc_per_node 2 grpo.py --preset toy --ckpt sft_out --data toy/rl.jsonl
1 GPU:    python grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
8 GPUs:   torchrun --nproc_per_node 8 grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
Adapters: with --lora-rank 64 the 8B trains on one GPU of 80 GB
"""
import argparse
import contextlib
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import model
import rewards
import rollout
import video
from engine import EngineLoop
from plumbing import arguments, caches, checkpoint, data, metrics, runs, tracker
from plumbing.data import subtitle_files
from plumbing.judge import add_judge_arguments, open_judge

# ------------------------------------------------------------------------------------------------
# Advantages and trees


def group_by_prompt(episodes):
    """Episodes -> groups that share one prompt, samples in order, without episodes in which no
    token was sampled. A video that was replaced meanwhile is another prompt."""
    groups = {}
    # Sort by sample, not by time of completion: sums of floats are then the same in every run.
    for episode in sorted(episodes, key=lambda e: e.sample):
        trained = episode.status in ("ok", "context")  # else the machine failed, not the policy
        if trained and episode.context is not None and 1 in episode.context.mask:
            prompt = episode.group, episode.context.items[0].key  # the overview
            groups.setdefault(prompt, []).append(episode)
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


def token_advantages(episode, credit):
    """-> list over context.ids: A_task, plus A_fmt at tokens that carry format credit; 0 at tokens
    that the policy did not sample. credit: --format-credit."""
    task, fmt = episode.advantage["task"], episode.advantage["fmt"]
    # Prompt, tool responses and forced tokens keep 0. Their mask is 0 too, so no loss reads them.
    out = [0.0] * len(episode.context.ids)
    sampled = [t for t, one in enumerate(episode.context.mask) if one]
    for t in sampled:
        out[t] = task
    # "struct": Selective Anchoring. "sequence": plain GRPO, every token. "none": the format reward
    # trains no token.
    for t in {"struct": episode.struct, "sequence": sampled, "none": ()}[credit]:
        out[t] += fmt  # A_it of the header
    return out


def group_tree(group, credit, first=0):
    """Rollouts of one group, with advantages -> Tree [shared prompt | o^1 | .. | o^G]. A token
    carries its advantage, the engine's log-prob, and the number of its rollout, counted from
    `first`. credit: --format-credit."""
    def prompt_of(context):
        cut = context.mask.index(1)  # all ids before the first sampled token
        return context.ids[:cut], context.items[0].key

    shared, branches = prompt_of(group[0].context), []
    cut = len(shared[0])
    for number, e in enumerate(group, first):
        c = e.context
        # One wrong id in a shared prompt would train all G rollouts on a prompt that none of them
        # saw, so this is checked although one function built all of them.
        if prompt_of(c) != shared:
            raise ValueError(f"{e.group}: the prompts of one group differ")
        # All ids after the prompt: turns, glue and tool responses. The mask marks the sampled ones.
        branch_len = len(c.ids) - cut
        values = {"advantage": token_advantages(e, credit)[cut:], "sampler": c.logps[cut:],
                  "rollout": [number] * branch_len}
        branches.append(model.TokenSpan(c.ids[cut:], c.mask[cut:], values, c.items[1:]))
    nothing = {name: [0.0] * cut for name in branches[0].values}
    prompt = model.TokenSpan(shared[0], [0] * cut, nothing)  # mask 0: not read
    return model.Tree(prompt, group[0].context.items[:1], branches)


def training_trees(groups, args):
    """Groups of this rank, with advantages -> (trees of the groups with a signal, sampled tokens of
    ALL groups, number of skipped groups). The tokens of a skipped group count in N: they have
    advantage 0."""
    # Rollouts are numbered through all groups of the rank, see group_tree.
    trees, tokens, skipped, rollouts = [], 0, 0, 0
    for group in groups:
        tokens += sum(sum(e.context.mask) for e in group)
        # A group whose advantages are all 0 adds nothing to the gradient. Test the advantages, not
        # sigma: rounding can leave sigma at 1e-16.
        if any(e.advantage["task"] or e.advantage["fmt"] for e in group):
            trees.append(group_tree(group, args.format_credit, rollouts))
        else:
            skipped += 1
        rollouts += len(group)
    return trees, tokens, skipped


# ------------------------------------------------------------------------------------------------
# Loss and update


def policy_loss(logp, old_logps, sampling_logps, ref_logps, advantage, clip_eps, beta, tis_cap=5.0):
    """
    Per-token loss of the header, before the division by N.

    logp, old_logps, sampling_logps, ref_logps: log-prob [n] of each token under the policy now, the
    policy before this batch, the engine, the reference (None: no KL). advantage [n].
    -> (loss [n], {"clipped", "truncated", "kl": [n]})

    Example: with logp = old_logps = sampling_logps, loss = -advantage, and its gradient with
    respect to logp is -advantage.
    """
    import torch

    # n is the number of sampled tokens in a pack, flat. There is no padding, so there is no mask.
    ratio = torch.exp(logp - old_logps)  # rho [n]
    # Truncated importance weight: corrects for an engine that samples from almost this policy.
    # w_t before its cap [n]; a constant, no gradient flows
    weight = torch.exp(old_logps - sampling_logps)
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    # The minimum is pessimistic: a token that moved too far in the good direction has no gradient.
    loss = -weight.clamp(max=tis_cap) * torch.minimum(ratio * advantage, clipped * advantage)
    stats = {"clipped": ((ratio - 1).abs() > clip_eps).float(),
             "truncated": (weight > tis_cap).float(), "kl": torch.zeros_like(logp.detach())}
    if ref_logps is not None:
        # The KL is a term of the loss, per token. The reward does not contain it.
        gap = ref_logps - logp  # [n]
        k3 = torch.exp(gap) - gap - 1  # an unbiased estimate of KL(policy || reference), >= 0
        loss = loss + beta * k3
        stats["kl"] = k3.detach()
    return loss, stats


def pack_loss(policy, reference, pack, real, old_logps, args):
    """One forward of each model over a Pack -> (loss [n], {name of a number for the log: [n]}), for
    its n sampled tokens. old_logps: before this batch [n], None for those of this forward."""
    import torch

    # All log-probs are at the sampling temperature: the engine's are, too.
    with torch.no_grad():  # first: with adapters the reference is the policy, adapters changed
        ref_logps = None if reference is None else reference(pack, args.temperature)[0]  # [n]
    logp, entropy = policy(pack, args.temperature)  # [n] each
    old_logps = logp.detach() if old_logps is None else old_logps  # a constant
    if real:
        advantage = model.to_device(pack.values["advantage"], logp.device)  # [n]
        sampling_logps = model.to_device(pack.values["sampler"], logp.device)  # [n]
    else:  # a spare pack: advantage 0, and an engine that agrees with the trainer
        advantage, sampling_logps = torch.zeros_like(old_logps), old_logps
    loss, stats = policy_loss(logp, old_logps, sampling_logps, ref_logps, advantage, args.clip_eps,
                              args.beta)
    gap = (old_logps - sampling_logps).abs()  # engine against trainer: only rounding is allowed
    return loss, {"loss": loss.detach(), "tokens": torch.ones_like(gap), "gap": gap,
                  "entropy": entropy, **stats}


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
    minibatches = []  # the packs of each optimizer step [[(Pack, real)]]
    for i in range(args.minibatches):
        # A pack holds as many trees as fit into --pack-tokens, and takes one forward.
        filled = model.fill_packs(trees[i::args.minibatches], args.pack_tokens)
        packs = [model.pack_trees(policy.codec, members) for members in filled]
        # Ranks may have different numbers of packs, but FSDP gathers weights in every forward, with
        # all ranks. So ranks with fewer packs add spare ones, which carry no gradient (real False).
        minibatches.append(model.pad_packs_over_ranks(policy.codec, packs))

    # old_t: the policy before the FIRST step of this batch. With one step old = logp. With more,
    # later minibatches meet a policy that has moved, so all of them are scored beforehand.
    old_logps = {}
    if args.minibatches > 1:
        with torch.no_grad():
            for pack in (pack for packs in minibatches for pack, _ in packs):
                old_logps[id(pack)] = policy(pack, args.temperature)[0]

    # Sums stay on the device until the end, so that no pack waits for a copy to the host.
    zero = torch.zeros((), device=device, dtype=torch.float64)
    sums, worst_gap, norms = dict.fromkeys(names, zero), zero, []
    for packs in minibatches:  # one optimizer step each
        for pack, real in packs:
            loss, numbers = pack_loss(policy, reference, pack, real, old_logps.get(id(pack)), args)
            # FSDP averages gradients over ranks. Each rank holds a part of the sum over N, so it
            # multiplies by the number of ranks.
            (real * world * loss.sum() / n).backward()
            if not real:  # spare packs do not count in the log
                continue
            sums = {name: sums[name] + numbers[name].double().sum() for name in names}
            worst_gap = torch.maximum(worst_gap, numbers["gap"].max().double())

        norms.append(model.reduce_and_clip(policy, args.max_grad_norm))
        # The norm covers the gradients of all ranks, so all of them step or none does.
        if math.isfinite(norms[-1]):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # Every rank gets the same means, so every rank comes to the same decision on check_gap.
    sums = torch.stack([sums[name] for name in names])
    dist.all_reduce(sums)
    dist.all_reduce(worst_gap, op=dist.ReduceOp.MAX)
    sums = dict(zip(names, sums.tolist()))
    means = {name: value / max(1.0, sums["tokens"]) for name, value in sums.items()}
    return {**means, "tokens": sums["tokens"], "grad_norm": max(norms),
            "gap_max": worst_gap.item(), "skipped_update": 0,
            "bad_updates": sum(not math.isfinite(norm) for norm in norms)}


# ------------------------------------------------------------------------------------------------
# The loop


def tasks_of_rank(tasks, step, args, rank, world):
    """-> (tasks of this rank, {group: place in the batch}). If a batch spans two epochs it may hold
    a task twice; the two are one larger group."""
    # Every rank draws the same batch and then takes its own part of it.
    batch = [tasks[i] for i in launch.batch_indices(step, args.prompts, len(tasks), args.seed)]
    order, costs = {}, {}
    for task in batch:
        # The step is part of the name: a task that comes again later is another group.
        name = launch.join_key(step, task["id"])
        order.setdefault(name, len(order))
        # K is the only cost that is known before sampling. 1000: equally many prompts a rank.
        costs[name] = costs.get(name, 0) + 1000 + rollout.draw_num_frames(
            args.frames, args.seed, step, task["id"])
    rank_groups = data.balance_over_ranks(order, costs.get, rank, world)
    return [t for t in batch if launch.join_key(step, t["id"]) in rank_groups], order


def prefetch_overviews(decoders, tasks, step, args, source, quiet):
    """Decodes, in the threads `decoders`, the overviews that step `step` will need. Each begins at
    a moment at which the Event `quiet` is set. The futures are not read: a broken video is counted
    when its episode comes."""
    def decode(spec):
        quiet.wait()
        source.load(spec)

    for task in tasks:
        k = rollout.draw_num_frames(args.frames, args.seed, step, task["id"])
        decoders.submit(decode, source.overview_spec(task, k))


def sample_batch(sampler, tasks, step, args, decoders=None):
    """Rollouts of this rank -> (episodes in batch order, seconds the engine waited for frames).
    Without a collective: ranks finish at different times and meet at the update. decoders: threads
    that decode the overviews of the next step meanwhile and during the update."""
    ranks = launch.rank_and_world()
    # Each rank samples whole groups with its own engine, and fans out to sub-agents by itself.
    part, order = tasks_of_rank(tasks, step, args, *ranks)
    pump = EngineLoop(sampler.engine, sampler.threads)
    if decoders:  # they begin as soon as no decode of this step waits
        following, _ = tasks_of_rank(tasks, step + 1, args, *ranks)
        prefetch_overviews(decoders, following, step + 1, args, sampler.source, pump.quiet)
    try:
        episodes = [*rollout.run(sampler, part, args.frames, args.num_generations, step, pump=pump)]
    finally:
        pump.quiet.set()  # else the threads of `decoders` would outlive an error
    for e in episodes:
        # One line per task, not one per sample of its group.
        if e.status in ("video_error", "label_error") and e.sample == 0:
            print(launch.printable(f"skipped task {e.task['id']}: {e.error}"), flush=True)
    # Episodes come as they finish. Sums and files must not depend on that order.
    episodes.sort(key=lambda e: (order[e.group], e.sample))
    if episodes and args.show_every and step % args.show_every == 0 and ranks[0] == 0:
        print(rollout.episode_text(episodes[0], sampler.codec), flush=True)
    return episodes, pump.idle_s


@dataclass
class Run:
    """A run that is set up: what the loop works with. See `setup`."""

    tasks: list
    val_tasks: list
    policy: model.Policy
    reference: object  # of the KL; None without
    optimizer: object
    sampler: rollout.RolloutWorker  # with the engine, where frames come from, and the judge
    engine_dtype: object  # dtype in which weights travel to the engine
    gap_tolerance: float  # nats, see check_gap
    log: metrics.Log  # on rank 0, None on the others
    state: dict  # see checkpoint.resume_point
    start: int  # steps that have been taken


def main():
    args = parse_args()
    run = setup(args)
    if run is None:
        return
    policy, val_tasks = run.policy, run.val_tasks
    best = run.state.get("best", (-1.0, 0))  # held-out accuracy, and its step
    engine = run.sampler.engine
    # Decodes frames of the next step, during the rollouts on half of the decoders.
    decoders = ThreadPoolExecutor(max(2, video.decode_threads() // 2), thread_name_prefix="ahead")
    stop_event = launch.stop_on_signal()
    bad_steps = 0  # steps in a row without a finite gradient or a video
    if val_tasks and run.start == 0:  # the accuracy that training starts from
        evaluate(run.log, run.sampler, val_tasks, 0, args)

    for step in range(run.start, args.steps):
        last, seconds = step + 1 == args.steps, {}
        # 1. Rollouts, groups, advantages. The engine holds the weights of this step, so its samples
        # are on policy, but for rounding.
        with timed_phase("rollout_s", seconds, args):
            episodes, seconds["decode_s"] = sample_batch(run.sampler, run.tasks, step, args,
                                                         None if last else decoders)
            # A group lies on one rank, so advantages need no exchange between ranks.
            groups = group_by_prompt(episodes)
            for group in groups:
                set_advantages(group)

        # 2. Update. The trees hold every sampled token once and every prompt once per group. The
        # engine sleeps meanwhile, so the trainer has its memory.
        with timed_phase("train_s", seconds, args):
            errors = [e.error for e in episodes if e.status == "video_error"]
            blind = not launch.any_rank(len(errors) < len(episodes))
            asleep_gb = engine.sleep()
            # The frames that the rollouts saw: an update needs no file, which may have gone.
            frames = {f.key: f for group in groups for e in group for f in e.context.frames}
            policy.features.frames = frames
            trees, tokens, skipped = training_trees([] if blind else groups, args)
            stats = update(policy, run.reference, run.optimizer, trees, tokens, args)
            # On a GPU: memory that an engine does not give back grows from step to step.
            stats |= {"asleep_gb": asleep_gb} if asleep_gb else {}
            # Two faults end the run, on all ranks alike: NaN, and an engine that is another policy.
            # A single step without a finite gradient, or without a video that can be read, is
            # skipped; three in a row end the run.
            bad_steps = bad_steps + 1 if stats["bad_updates"] or blind else 0
            if bad_steps == 3 or (last and blind):
                raise launch.RunError(f"step {step + 1}: no finite gradient, or no video, for "
                                      f"{bad_steps} steps")
            check_gap(step, stats["gap"], run.gap_tolerance)

        # 3. New weights into the engine, which drops all prefixes and features of the old ones.
        eval_due = val_tasks and (last or args.eval_every and (step + 1) % args.eval_every == 0)
        with timed_phase("sync_s", seconds, args):
            if eval_due or not last:
                engine.wake(checkpoint.full_weights(policy, run.engine_dtype))

        # 4. Record, save, go on. SIGTERM on any rank saves and stops all of them.
        # tools/replay.py trains on the rollouts again. A file per rank: they share no file handle.
        name = f"{args.out}/rollouts/step_{step:06d}.rank{launch.rank_and_world()[0]}.jsonl"
        launch.write_atomic(name, "".join(json.dumps(e.to_dict()) + "\n" for e in episodes))
        metrics.log_step(run.log, step, args.steps, episodes, stats, {
            **seconds, "skipped": skipped, "groups": len(groups), "packed": sum(map(len, trees)),
            "judge": run.sampler.judge is not None})
        # `best` links to the checkpoint with the highest held-out accuracy so far. Every rank has
        # the same number, so all of them save or none.
        if eval_due:
            acc, _ = evaluate(run.log, run.sampler, val_tasks, step + 1, args)
            if not blind and acc > best[0]:
                best = acc, step + 1
        # Ranks may get SIGTERM at different times, and must not leave the loop at different steps.
        stopping = launch.any_rank(stop_event.is_set())
        # Not after a bad step: two such saves would push out the checkpoints from before the fault.
        due = args.save_every and (step + 1) % args.save_every == 0 and not bad_steps
        # Bad steps moved no weight: a run that only stops in one takes them again.
        due = due or last or best[1] == step + 1
        done = step + 1 - (0 if due else bad_steps)
        if due or stopping and done > run.start:
            checkpoint.save_run(policy, run.optimizer, args.out, done, {**run.state, "best": best})
            launch.reset_watchdog(args.patience)
        if step % 10 == 9:
            caches.give_back_memory()
        if stopping:
            break

    if run.log:
        run.log.close(step + 1, args.steps)
    decoders.shutdown(cancel_futures=True)
    if run.sampler.judge:
        run.sampler.judge.close()
    launch.end_process_group(engine, int(step + 1 < args.steps))  # 1: so that no next stage begins


@contextlib.contextmanager
def timed_phase(name, seconds, args):
    """A phase of a step: notes its seconds under `name`. A rank that hangs in the next phase longer
    than `patience` prints its stacks and exits."""
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
    launch.reset_watchdog(args.patience)


# ---- below: set-up, held-out tasks, records, flags (a reader of the step may stop here) ------


def setup(args):
    """Flags -> Run; None if there is nothing to do. Everything that can be refused is refused here,
    before a model is built. Collective."""
    # A hub snapshot, a run folder or a checkpoint folder: from here on a folder with weights.
    ckpt = checkpoint.resolve(args.ckpt)
    faults = [] if args.check else None  # --check collects them all; a run stops at the first
    tasks = data.read_tasks(args.data, faults)
    val_tasks = data.read_tasks(args.val, faults) if args.val else []
    agent, source = rollout.agent_settings(args, args.data)
    if args.check:
        if os.environ.get("RANK", "0") == "0":  # under torchrun rank 0 alone looks
            codec = chat.load_codec(ckpt, args.channel, args.chat_template_kwargs)
            rollout.check_positions(codec, agent)
            for path, rows in ((args.data, tasks), (args.val, val_tasks))[: 2 if args.val else 1]:
                faults += data.check_tasks(rows, replace(source, root=video.root_of(args, path)))
            arguments.report_check(faults, " and ".join(filter(None, [args.data, args.val])))
        return None
    launch.make_out(os.path.join(args.out, "rollouts"))
    launch.lock(args.out)
    # Each rank asks about its own rollouts. All append to one file, and read it when they begin.
    judge = open_judge(args, os.path.join(args.out, "judge.jsonl"))
    _, world, device = launch.start_process_group(args.patience, args.cpu)
    launch.reset_watchdog(args.patience)
    if args.prompts % world:
        raise launch.UserError(f"--prompts {args.prompts} is not a multiple of the {world} ranks")
    # The same command again goes on from the newest whole checkpoint in --out.
    subtitle_files(args, (args.data, tasks), (args.val, val_tasks))
    rows = {"--data": (args.data, tasks), "--val": (args.val, val_tasks)}
    newest, state = checkpoint.resume_point(args, {"data": tasks, "val": val_tasks})
    start = state["step"]
    if start >= args.steps:
        launch.print0(f"nothing to do: {args.out} has {start} steps of {args.steps}")
        return launch.end_process_group()
    for path, content in filter(all, rows.values()):
        source.cache.check_present(args, path, content)
    launch.print0(f"{args.ckpt} -> {args.out}: loading the checkpoint, then the engine")
    codec = chat.load_codec(ckpt, args.channel, args.chat_template_kwargs)
    # The largest prompt must fit, which shows before weights are loaded.
    rollout.check_context(codec, tasks + val_tasks, agent, source, args.frames)
    policy, reference, optimizer = load_models(args, ckpt, codec, source, device, newest)
    # On a GPU the engine shares the device with the trainer, so it starts asleep.
    engine = rollout.make_engine(ckpt, codec, args, sleeping=True)
    engine_dtype = model.engine_dtype(codec, device)
    if newest:  # the engine has read --ckpt, but the resumed weights are newer
        engine.sync(checkpoint.full_weights(policy, engine_dtype))
    size = f"{args.prompts} prompts x {args.num_generations} rollouts"
    log = metrics.open_log(args, start, f"{size} a step, K {args.frames} | format credit "
                           f"{args.format_credit}")
    sampler = rollout.RolloutWorker(engine, codec, source, agent, reward_config(args), judge)
    return Run(tasks, val_tasks, policy, reference, optimizer, sampler, engine_dtype,
               gap_tolerance(engine_dtype), log, state, start)


def load_models(args, ckpt, codec, source, device, folder):
    """-> (policy, reference or None, optimizer). folder: the checkpoint from which the run goes on,
    or None. Collective."""
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    policy = checkpoint.load_policy(ckpt, codec, device, args.gradient_checkpointing,
                                    args.lora_rank, replicas=args.dp_replicate)
    # The vision tower is frozen. Features of a frame are computed once and read by all forwards.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = None
    if args.beta > 0 and args.lora_rank:
        reference = checkpoint.AdapterReference(policy)
    elif args.beta > 0:
        reference = checkpoint.load_policy(ckpt, codec, device, frozen=True,
                                           replicas=args.dp_replicate)
        reference.features = policy.features  # both read the features of one tower
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    return policy, reference, optimizer


def gap_tolerance(dtype=None):
    """The largest mean gap in nats that rounding explains; weights that are a few updates old give
    less, see engine.py. dtype: of the engine's weights; None: recorded rollouts, of an engine of
    any precision."""
    return 1e-3 if dtype and dtype.itemsize == 4 else 0.1


def check_gap(step, gap, tolerance):
    """Raises RunError, on all ranks alike, if engine and trainer are not the same policy."""
    if gap is not None and not gap <= tolerance:  # NaN fails this comparison too
        raise launch.RunError(f"step {step}: mean |log-prob gap| between engine and trainer is "
                              f"{gap:.3f} nats, tolerance {tolerance}: the engine samples from "
                              "another policy, from other frames, or at another --temperature")


def reward_config(args):
    """Flags -> rewards.RewardConfig, whose fields they are."""
    config = rewards.RewardConfig
    return config(**{f.name: getattr(args, f.name) for f in fields(config)})


def evaluate(log, sampler, val_tasks, step, args):
    """Logs the held-out accuracy with and without tools, per K and type -> (that with tools, NaN of
    no task, or if the disk or the judge is away; ids of the tasks that failed, which are left out).
    The K, the seeds and so the noise of a task are the same in every evaluation. Collective."""
    source = replace(sampler.source, root=video.root_of(args, args.val))
    (rank, world), rows = launch.rank_and_world(), []
    # Without tools too: the difference is the worth of calling. A policy that calls although no
    # tool is offered shows here.
    for tools in (False, True):
        lost = sampler.judge and sampler.judge.lost
        # Step 0 enters seeds and draws of K. The weights are those of `step`.
        tester = replace(sampler, source=source, agent=replace(sampler.agent, tools=tools))
        for e in rollout.run(tester, val_tasks[rank::world], args.frames, 1, 0):
            # The whole evaluation may take longer than `patience`, one episode may not.
            launch.reset_watchdog(args.patience)
            if e.error and tools and step == 0:
                print(launch.printable(f"held-out task {e.task['id']}: {e.error}"), flush=True)
            rows.append(dict(
                id=str(e.task["id"]), tools=tools, status=e.status, K=e.num_frames,
                acc=e.status == "ok" and e.reward.get("acc"), judge=e.reward.get("judge"),
                type=e.task["type"], ran=e.status not in runs.MACHINE_FAULTS, error=str(e.error)))
    acc, unread = metrics.log_held_out(log, step, rows)
    # An answer that token F1 scored cannot be compared with one that a judge read.
    away = sampler.judge is not None and sampler.judge.lost > lost
    return math.nan if launch.any_rank(away) else acc, unread


# ------------------------------------------------------------------------------------------------
# Arguments


def add_training_arguments(parser):
    """Flags of an update, for grpo.py and tools/replay.py."""
    add = parser.add_argument_group("what to start from and write").add_argument
    add("--ckpt", required=True, help="checkpoint to start from; also the reference of the KL")
    add("--out", default="grpo_out", help="run folder")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: numbers for toy.py")
    add("--vanilla", action="store_true", help="plain GRPO: no prefix, suffix, anchor, gating")
    add = parser.add_argument_group("reward and credit").add_argument
    add("--format-credit", choices=["struct", "sequence", "none"], default="struct", help="A_fmt")
    add("--answer-suffix", action=argparse.BooleanOptionalAction, default=True, help="pay <answer>")
    add("--anchor", type=float, default=0.5, help="lambda: weight of the anchor term; 0 = off")
    add("--tool-reward", dest="tool_weight", type=float, default=1.0, help="w_tool; 0 = off")
    parser.add_setting("format_weight", "w_fmt", 1.0)
    parser.add_setting("window_weight", "w_win; 0 = off", 0.0)
    parser.add_setting("call_cost", "c, price of an executed call; 0 = the paper", 0.0)
    parser.add_setting("gamma", "penalty of a thought that never closes: see rewards.py", 0.3)
    # The rates differ by stage and for adapters, so None stands for "see parse_training_arguments".
    add = parser.add_argument_group("loss and optimiser").add_argument
    add("--beta", type=float, default=0.01, help="of the KL; 0 = no reference model is loaded")
    add("--lr", type=float, default=None, help="AdamW, constant; default 2e-6, of adapters 2e-5")
    # Above one context: else a group with a long prompt is split, and each part computes it again.
    add("--pack-tokens", type=int, default=49152, help="tokens per pack (one forward)")
    add("--lora-rank", type=int, default=0, help="rank of adapters, the rest is frozen; 0 = off")
    parser.add_setting("max_grad_norm", "norm at which gradients are clipped; 0 = never", 1.0)
    parser.add_setting("gradient_checkpointing", "compute decoder layers again in backward", True)
    parser.add_setting("dp_replicate", "groups of ranks that each hold the whole model in shards "
                       "(HSDP): one per node; 0 = every rank holds the whole (toy)", 1)
    add("--resume", action="store_true", help="go on although settings or rows have changed")
    parser.add_setting("minibatches", "optimizer steps per batch; above 1: one more forward", 1)
    parser.add_setting("clip_eps", "of the surrogate; without effect at minibatches=1", 0.2)
    tracker.add_track_arguments(parser, parser.add_argument_group("tracker").add_argument)
    rollout.add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says; pays 1 or 0")


def build_parser():
    parser = arguments.parser(__doc__)
    add_training_arguments(parser)
    add = parser.add_argument_group("tasks and batches").add_argument
    add("--data", required=True, help="task JSONL")
    add("--check", action="store_true", help="only look at the data: labels, videos, tokens")
    add("--steps", type=int, default=300, help="batches of rollouts")
    add("--prompts", type=int, default=32, help="prompts per step, over all ranks")
    add("--num-generations", type=int, default=8, help="rollouts per prompt (G)")
    add("--frames", type=rollout.frames_argument, default="gated", help="K; gated: U{4,8,16,32,64}")
    add = parser.add_argument_group("looking and saving").add_argument
    add("--save-every", type=int, default=50, help="steps between checkpoints; 0 = at the end")
    parser.add_setting("show_every", "steps between printed rollouts; 0 = never", 20)
    add("--val", help="held-out task JSONL: accuracy with and without tools, and `best`")
    add("--eval-every", type=int, default=50, help="steps between uses of --val; 0 = at the end")
    return parser


def parse_training_arguments(parser):
    """Parser with the flags of an update -> flags, checked."""
    # Presets change defaults, and flags override defaults. So presets must be known first.
    early = arguments.parse_early(parser)
    if early.preset == "toy":
        parser.set_defaults(prompts=16, steps=40, pack_tokens=4096, save_every=0, beta=0.0,
                            gradient_checkpointing=False, dp_replicate=0, temperature=1.0,
                            **rollout.toy_defaults())
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence",
                            anchor=0.0, gamma=0.0, frames=64)
    args = parser.parse_args()
    # A folder of adapters goes on training these adapters, with their rank.
    args.lora_rank = checkpoint.adapter_rank(args.ckpt, args.lora_rank)
    if args.lr is None:  # adapters start at nothing and take larger steps
        args.lr = {"paper": (2e-6, 2e-5), "toy": (2e-4, 2e-3)}[args.preset][args.lora_rank > 0]
    arguments.require_min(1, args, "pack_tokens", "minibatches")
    arguments.require_min(0, args, "lr", "max_grad_norm", "clip_eps", "beta", "lora_rank",
                          "dp_replicate", "anchor", "gamma", "format_weight", "tool_weight",
                          "call_cost", "window_weight")
    if args.temperature <= 0:
        raise launch.UserError("--temperature must be above 0: greedy samples have no gradient")
    tracker.check_tracker(args)
    return args


def parse_args():
    args = parse_training_arguments(build_parser())
    arguments.require_min(1, args, "prompts", "steps")
    arguments.require_min(2, args, "num_generations")  # one alone has no advantage
    arguments.require_min(0, args, "eval_every", "save_every", "show_every")
    return args


if __name__ == "__main__":
    launch.run_main(main)
