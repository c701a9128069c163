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
  gain_c   = log p(answer turn of a right sibling | all responses) - log p(the same | that to c is
             empty)      c: a call; --window-gain records it, nothing is trained on it
  gap      = mean |old_t - sampling_t|; gap_sub: of one sub-agent's context a step and rank;
             gap_by_turn: of the tokens of each main turn

--format-credit: struct, as above (Selective Anchoring). anchor: what R_base pays is credited at
every token, and only what R_anchor adds at struct(o). sequence: A_fmt at every token, which is
exactly GRPO on the summed reward. none: A_fmt nowhere. The paper's page applies "the targeted
format reward only at the structural-token positions", which can be read as struct or as anchor.
struct is the default, because R_base pays for tags too, and no reasoning token writes a tag.

Three parts of PARA-GRPO, each with its flag: Exploration Anchoring (--think-prefix forces
`<think>\\n`, R_fmt pays for a final answer block, --anchor pays for closed thoughts), Selective
Anchoring (--format-credit struct), nFrames Gating (--frames gated: K ~ U{4,8,16,32,64} per prompt,
the same for the whole group). --vanilla turns all three off: the plain GRPO that the authors
released.

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
import asyncio
import itertools
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import model
import rewards
import rollout
import video
from plumbing import checkpoint, data
from plumbing.judge import add_judge_arguments, open_judge
from plumbing.log import TRACKERS, Log, episode_numbers

CLIP_EPS = 0.2  # of the surrogate; one step per batch never meets it
WEIGHT_CAP = 5.0  # of the importance weight w_t
MAX_TURNS = 100  # more than an episode has
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm; 0: never
NUMBERS = ("tokens", "gap", "loss", "entropy", "kl")  # of each sampled token, for the log
SHOWN = "total acc fmt kappa not_ok gap gap_sub grad_norm signal_groups rollout_s train_s"

# -----------------------------------------------------------------------------
# Arguments


def build_parser():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    # Input and output
    add("--ckpt", required=True, help="checkpoint to start from; also the reference of the KL")
    add("--data", default="rl.jsonl", help="task JSONL")
    add("--val", help="held-out task JSONL: accuracy, and `best`")
    add("--rollouts", metavar="JSONL", help="train once on these; their --video-root")
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
    add("--anchor", type=float, default=0.5, help="lambda: weight of R_anchor in R_fmt; 0: off")
    add("--gamma", type=float, default=0.3, help="penalty of a thought that never closes; 0: off")
    add("--tool-reward", type=float, default=1.0, help="w_tool; 0: off")
    add("--beta", type=launch.amount, default=0.01, help="weight of the KL; 0: no reference")
    # Optimizer
    add("--lr", type=launch.amount, help="of AdamW, constant; default 2e-6, of adapters 2e-5")
    # Above one context: else a group with a long prompt is split, and each part computes it again.
    add("--pack-tokens", type=launch.positive, default=49152, help="tokens per pack (one forward)")
    add("--lora-rank", type=launch.amount, default=0, help="of adapters; 0: all is trained")
    add("--dp-replicate", type=launch.amount, default=1,
        help="HSDP: groups of ranks that each hold the whole model; 0: all do")
    # Looking and saving
    add("--save-every", type=launch.amount, default=20,
        help="steps between checkpoints, and uses of --val; 0: at the end")
    add("--window-gain", action="store_true", help="record what each window was worth, in nats")
    add("--track", choices=TRACKERS, help="send the numbers of log.jsonl there too")
    rollout.add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says; pays 1 or 0")
    parser.set_defaults(answer_suffix=True)  # no flag: --vanilla alone does not pay for it
    return parser


def parse_args():
    parser = build_parser()
    # Read twice: --preset and --vanilla change defaults, which any flag still overrides.
    early = parser.parse_args()
    # A folder of adapters goes on training these adapters, with their rank.
    rank = checkpoint.adapter_rank(early.ckpt, early.lora_rank)
    lr = 2e-6
    if early.preset == "toy":
        lr = 3e-4  # a toy of a million parameters takes large steps
        parser.set_defaults(prompts=16, steps=18, pack_tokens=4096, save_every=0, beta=0.0,
                            dp_replicate=0, temperature=1.0, **rollout.toy_defaults())
    if rank > 0:
        lr *= 10  # adapters start at zero
    parser.set_defaults(lr=lr, lora_rank=rank)
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence",
                            anchor=0.0, frames=64)
    args = parser.parse_args()
    if args.rollouts:
        args.steps = 1
    if args.num_generations < 2:
        raise launch.UserError("--num-generations must be at least 2: a rollout alone has no "
                               "advantage")
    if args.window_gain and args.crop_response == "frames":
        raise launch.UserError("--window-gain measures summaries, not --crop-response frames")
    return args


# -----------------------------------------------------------------------------
# Groups, advantages, trees


def group_by_prompt(episodes):
    """Episodes, sorted by sample -> lists of rollouts of one prompt, without those in which nothing
    was sampled."""
    groups = {}
    for episode in episodes:
        # A broken video says nothing of the policy.
        if episode.status in ("ok", "context") and 1 in episode.context.mask:
            groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def prompt_tree(group):
    """Rollouts of one prompt -> Tree of the prompt, without branches."""
    first = group[0].context
    cut = first.mask.index(1)
    # Values count at sampled tokens alone, so the prompt needs none.
    return model.Tree(model.TokenSpan(first.ids[:cut], first.mask[:cut]), first.items[:1])


def group_tree(group):
    """Rollouts of one prompt, with advantages -> Tree [shared prompt | o^1 | .. | o^G]."""
    tree = prompt_tree(group)
    cut = len(tree)
    for episode in group:
        context = episode.context
        # One wrong id in a shared prompt would train all G rollouts on a prompt that none of them
        # saw, so this is checked although one function built all of them.
        assert context.ids[:cut] == tree.prefix.ids, episode.group
        mask = context.mask[cut:]  # 1 at the sampled tokens among turns, glue and tool responses
        # Turns are numbered from 1: each begins with a sampled token after one that was not.
        begins = [b > a for a, b in zip([0, *mask], mask)]
        values = {
            "advantage": rewards.token_advantages(episode)[cut:],
            "sampling": context.logps[cut:],
            "turn": list(itertools.accumulate(begins)),
        }
        windows = context.items[1:]  # --crop-response frames
        tree.branches.append(model.TokenSpan(context.ids[cut:], mask, values, windows))
    return tree


def sub_agent_trees(episodes):
    """-> [one sub-agent's context as a Tree], or []. Sub-agents are not trained, so only the gap of
    their tokens shows whether their frames are right."""
    for episode in episodes:
        for call in episode.calls:
            if "sub" in call:
                context = rollout.context_of(call["sub"])
                nothing = [0 for _ in context.ids]
                values = {"advantage": nothing, "turn": nothing, "sampling": context.logps}
                span = model.TokenSpan(context.ids, context.mask, values)
                return [model.Tree(span, context.items)]
    return []


def build_trees(groups, credit):
    """Groups of this rank -> (trees of the groups with a signal, sampled tokens of ALL groups).
    Sets Episode.advantage = {"task": credited at every sampled token, "fmt": at struct(o) as well,
    "sigma"}."""
    trees, num_tokens = [], 0
    for group in groups:
        # R is composed in rewards.score alone. A term that is added there arrives here by itself.
        task, fmt = [], []  # [G] each
        for episode in group:
            reward = episode.reward
            everywhere = 0.0  # the part of R_fmt that is credited like the task, at every token
            if credit == "anchor":
                everywhere = reward["paid_base"]
            elif credit == "sequence":  # plain GRPO
                everywhere = reward["paid_fmt"]
            task.append(reward["paid_task"] + everywhere)
            fmt.append(reward["paid_fmt"] - everywhere)
        a_task, a_fmt, sigma = rewards.group_advantages(task, fmt)
        if credit == "none":  # R_fmt counts in sigma alone
            a_fmt = [0.0 for _ in fmt]
        for i, episode in enumerate(group):
            episode.advantage = {"task": a_task[i], "fmt": a_fmt[i], "sigma": sigma}
            num_tokens += sum(episode.context.mask)  # without a signal too: the advantage is 0
        # Test the advantages, not sigma: rounding can leave sigma at 1e-16.
        if any(a_task) or any(a_fmt):
            trees.append(group_tree(group))
    return trees, num_tokens


# -----------------------------------------------------------------------------
# What each window was worth (--window-gain)


def answers_without(episode, answer, args, codec):
    """Ids of an answer -> [(TokenSpan, call)]: for each turn with calls, the answer after the turn
    and all responses (call: None), then the same without the response to one call."""
    context = episode.context
    tools = rollout.tool_schema(args.crop_response)
    branches = []
    for turn, (_, end) in enumerate(episode.spans[:-1]):
        calls = [call for call in episode.calls if call["turn"] == turn]
        for hidden in [None, *calls]:
            replies = []
            for call in calls:
                text = call["summary"]
                if call is hidden:
                    text = rollout.EMPTY_SUMMARY  # as if its sub-agent had seen nothing
                replies.append({"role": "tool", "content": text})
            ended = episode.finish[turn] == "stop"
            given = context.ids[context.mask.index(1):end]
            given += chat.tool_response_ids(codec, replies, ended, (), tools)
            if args.think_prefix:
                given += chat.think_prefix_ids(codec, given)
            mask = [0 for _ in given] + [1 for _ in answer]
            branches.append((model.TokenSpan(given + answer, mask), hidden))
    return branches


def measure_windows(policy, groups, args):
    """
    Sets "window_gain" of calls, in nats: log p(last turn of a right sibling | all
    responses) - log p(the same | the response to this call is empty).

    Needs neither labels nor samples. Without another right rollout in its group a call gets none.
    Collective.
    """
    import torch

    trees, calls = [], []  # calls: of each branch
    for group in groups:
        tree = prompt_tree(group)
        right = [e for e in group if e.reward["acc"] > 0.999 and len(e.turns) > 1]
        for episode in group:
            # Another rollout's words: after its own the episode would be its own judge.
            siblings = [sibling for sibling in right if sibling is not episode]
            for sibling in siblings[:1]:
                answer = sibling.context.ids[slice(*sibling.spans[-1])]
                for span, call in answers_without(episode, answer, args, policy.codec):
                    span.values["row"] = [len(calls) for _ in span.ids]
                    tree.branches.append(span)
                    calls.append(call)
        if tree.branches:
            trees.append(tree)
    packs = model.make_packs(policy.codec, trees, args.pack_tokens)
    totals = torch.zeros(len(calls), dtype=torch.float64)  # log-prob of each branch's answer
    for pack, is_real in model.pad_packs_over_ranks(policy.codec, packs):
        with torch.no_grad():
            logp, _ = policy(pack, args.temperature)  # [n]
        if is_real:
            totals.index_add_(0, pack.values["row"].long(), logp.double().cpu())
    for call, total in zip(calls, totals.tolist()):
        if call is None:
            with_all = total  # the branches after it leave one response out
        else:
            call["window_gain"] = with_all - total


# -----------------------------------------------------------------------------
# Loss


def policy_loss(logp, old_logps, sampling_logps, ref_logps, advantage, beta):
    """
    Per-token loss of the header, before the division by N.

    logp, old_logps, sampling_logps, ref_logps: log-prob [n] of each token under the policy now, the
    policy before this batch, the engine, the reference (None: no KL). advantage [n].
    -> (loss [n], kl [n])
    """
    import torch

    # n is the number of sampled tokens in a pack, flat. There is no padding, so there is no mask.
    ratio = torch.exp(logp - old_logps)  # rho [n]
    clipped = ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS)
    # Truncated importance weight: corrects for an engine that samples from almost this policy. A
    # constant, no gradient flows. [n]
    weight = torch.exp(old_logps - sampling_logps).clamp(max=WEIGHT_CAP)
    # The minimum is pessimistic: a token that moved too far in the good direction has no gradient.
    loss = -weight * torch.minimum(ratio * advantage, clipped * advantage)
    kl = torch.zeros_like(loss)
    if ref_logps is not None:
        # The KL is a term of the loss, per token. The reward does not contain it.
        diff = ref_logps - logp  # [n]
        kl = torch.exp(diff) - diff - 1  # k3, an unbiased estimate of KL(policy || reference), >= 0
        loss = loss + beta * kl
    return loss, kl


# -----------------------------------------------------------------------------
# Update


def update(policy, reference, optimizer, trees, num_tokens, args, sub_trees=()):
    """
    One optimizer step on one batch -> numbers for the log, the same on every rank: means over the
    sampled tokens of all groups with a signal.

    trees: this rank's groups as [prompt | o^1 | .. | o^G]. num_tokens: sampled tokens of this rank,
    with those of groups without a signal. sub_trees: of sub_agent_trees, not trained. Collective:
    all ranks run equally many forwards.
    """
    import torch

    world, device = launch.rank_and_world()[1], next(policy.parameters()).device
    # N is counted over ALL ranks before any backward: then the gradient does not depend on the
    # number of ranks or packs.
    n = launch.sum_over_ranks(num_tokens)
    num_trees = launch.sum_over_ranks(len(trees))
    if num_trees == 0:  # no group of any rank has a signal, so the weights stay
        return {"signal_groups": 0, "grad_norm": 0.0}
    # A pack holds as many trees as fit into --pack-tokens, and takes one forward.
    packs = model.make_packs(policy.codec, trees, args.pack_tokens)
    packs += model.make_packs(policy.codec, sub_trees, args.pack_tokens)
    # Sums over the sampled tokens of each turn. Turn 0 is a sub-agent's. [turns, 5]
    sums = torch.zeros(MAX_TURNS, len(NUMBERS), dtype=torch.float64, device=device)
    # FSDP gathers weights in every forward, with all ranks. So ranks with fewer packs add spare
    # ones, which carry no gradient.
    for pack, is_real in model.pad_packs_over_ranks(policy.codec, packs):
        # All log-probs are at the sampling temperature, as the engine's are. [n] each
        ref_logps = None
        if reference:  # first: with adapters it is the policy, adapters changed
            with torch.no_grad():
                ref_logps, _ = reference(pack, args.temperature)
        logp, entropy = policy(pack, args.temperature)
        if not is_real:  # it runs for its collectives alone
            (0.0 * logp.sum()).backward()
            continue
        old = logp.detach()  # one step per batch
        values = {name: model.to_device(x, device) for name, x in pack.values.items()}  # [n] each
        sampling, advantage = values["sampling"], values["advantage"]
        loss, kl = policy_loss(logp, old, sampling, ref_logps, advantage, args.beta)
        turns = values["turn"].long()  # [n]
        is_trained = turns > 0
        # FSDP averages gradients over ranks. Each rank holds a part of the sum over N, so it
        # multiplies by the number of ranks.
        (world * (loss * is_trained).sum() / n).backward()
        gap = (old - sampling).abs()  # only rounding is allowed [n]
        numbers = torch.stack([torch.ones_like(gap), gap, loss, entropy, kl], 1)  # [n, 5]
        sums.index_add_(0, turns, numbers.detach().double())

    norm = model.reduce_and_clip(policy, MAX_GRAD_NORM)
    # The norm covers the gradients of all ranks, so all of them step or none does.
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return {**means_over_tokens(sums), "signal_groups": num_trees, "grad_norm": norm}


def means_over_tokens(sums):
    """This rank's sums of NUMBERS [turns, 5] -> their means over the tokens of all ranks, and the
    gap of each turn: if it begins with the second turn, tool responses differ. Collective."""
    import torch.distributed as dist

    dist.all_reduce(sums)
    totals = sums[1:].sum(0)  # [5]
    means = dict(zip(NUMBERS, (totals / totals[0]).tolist()))
    rows = enumerate(sums.tolist())
    by_turn = {turn: gap / tokens for turn, (tokens, gap, *_) in rows if tokens > 0}
    return {**means, "tokens": totals[0].item(), "gap_sub": by_turn.pop(0, None),
            "gap_by_turn": by_turn}


def gap_tolerance(policy):
    """The largest mean gap in nats that rounding explains. The engine's dtype decides: the trainer
    computes in no coarser one."""
    dtype = model.engine_dtype(policy.codec, next(policy.parameters()).device)
    if dtype.itemsize == 4:
        return 1e-3  # fp32; healthy: below 1e-6
    return 0.03  # healthy, on GPUs in bf16 and with adapters: below 1e-3


def check_gap(step, stats, policy):
    """Raises RunError, on all ranks alike, if engine and trainer are not the same policy."""
    tolerance = gap_tolerance(policy)
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
    """-> [(task, its K)] of this rank in a step. Every rank draws the same batch, then takes its
    part."""
    picked = launch.batch_indices(step, args.prompts, len(tasks), args.seed)
    # Index of a task -> K. A batch across two epochs may draw a task twice, which then counts once.
    num_frames = {
        i: rollout.draw_num_frames(args.frames, args.seed, step, tasks[i]["id"]) for i in picked
    }
    # Dealt out by K, the only cost that is known before sampling.
    rank, world = launch.rank_and_world()
    dealt = sorted(num_frames, key=num_frames.get)[rank::world]
    return [(tasks[i], k) for i, k in num_frames.items() if i in dealt]


def sample_batch(worker, decoders, tasks, step, args):
    """Iterator of this rank's rollouts. Without a collective: ranks finish at different times and
    meet at the update."""
    from tqdm import tqdm

    # Each rank samples whole groups with its own engine, and fans out to sub-agents by itself. The
    # engine holds the weights of this step, so its samples are on policy, but for rounding.
    mine = [task for task, _ in rank_tasks(tasks, step, args)]
    episodes = rollout.run(worker, mine, args.frames, args.num_generations, step)
    # disable=None: no bar where stderr is a file. Under torchrun each rank has its own.
    yield from tqdm(episodes, f"rollouts of step {step + 1}", len(mine) * args.num_generations,
                    leave=False, disable=None)
    worker.engine.sleep()  # so the trainer has its memory
    # While the trainer works, other threads decode the overviews of the next step. Nobody reads the
    # futures: a broken video is counted when its episode comes.
    for task, num_frames in rank_tasks(tasks, step + 1, args):
        decoders.submit(worker.source.load, worker.source.overview_spec(task, num_frames))


def recorded_batch(worker, rows):
    """Rows of --rollouts -> iterator of this rank's episodes, rewarded as this run pays."""
    rank, world = launch.rank_and_world()
    groups = sorted({row["group"] for row in rows})[rank::world]  # whole ones, as sigma needs them
    for row in rows:
        if row["group"] in groups:
            episode = rollout.from_dict(row)
            yield asyncio.run(rollout.score_episode(episode, worker.pay, worker.judge))


def collect(worker, decoders, tasks, step, args):
    """-> this rank's episodes of a step, from the engine or from --rollouts."""
    if args.rollouts:
        episodes = recorded_batch(worker, tasks)
    else:
        episodes = sample_batch(worker, decoders, tasks, step, args)
    # Episodes come as they finish. Sums and files must not depend on that order.
    return sorted(episodes, key=lambda e: (e.group, e.sample))


def evaluate(worker, tasks, step, log, args):
    """Logs the accuracy on --val, per K and type, and returns it. K, seeds and so the noise of a
    task are the same in every evaluation. Collective."""
    rank, world = launch.rank_and_world()
    source = replace(worker.source, root=video.root_of(args, args.val))
    # Step 0 enters seeds and draws of K. The weights are those of `step`.
    episodes = rollout.run(replace(worker, source=source), tasks[rank::world], args.frames)
    val = episode_numbers(list(episodes))
    log.write({"step": step, "val": val}, "val/acc val/not_ok")
    return val.get("acc", -1.0)  # no video of --val decodes: no `best`


# -----------------------------------------------------------------------------
# The run


def read_tasks(path, source, args):
    """Task JSONL -> rows; [] without a path. Raises UserError for what can be refused before a
    model is built."""
    if not path:
        return []
    tasks = data.read_tasks(path)
    # Videos lie beside the file, unless --video-root says otherwise.
    source.cache.check_present(path, tasks, video.root_of(args, path))
    return tasks


def read_inputs(args):
    """-> (tasks or rows of --rollouts, tasks of --val, AgentConfig, VideoSource)"""
    agent, source = rollout.agent_settings(args, args.rollouts or args.data)
    if args.rollouts:
        tasks = launch.read_jsonl(args.rollouts, rollout.RECORD_FIELDS)
    else:
        tasks = read_tasks(args.data, source, args)
    return tasks, read_tasks(args.val, source, args), agent, source


def check_data(args):
    """--check: looks at every task of --data and --val, prints each fault, and ends."""
    faults = []
    for path in filter(None, (args.data, args.val)):
        _, source = rollout.agent_settings(args, path)
        faults += data.check_tasks(data.read_tasks(path, faults), source)
    data.report_check(faults, args.data)


def start_run(args, inputs):
    """Takes the folder --out and joins the ranks -> (device, the newest checkpoint of --out if the
    run goes on from one, else None, its state). inputs: as of checkpoint.resume_point."""
    launch.make_out(os.path.join(args.out, "rollouts"))
    launch.lock(args.out)
    device = launch.start_process_group()
    launch.reset_watchdog()  # from here on a phase that hangs ends the run
    return device, *checkpoint.resume_point(args, inputs)


def load_models(ckpt, codec, device, folder, args):
    """-> (policy, reference or None, optimizer). folder: the checkpoint from which the run goes on,
    or None. Collective."""
    launch.print0(f"{args.ckpt} -> {args.out}: loading")
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    recompute = args.preset != "toy"
    policy = checkpoint.load_policy(ckpt, codec, device, recompute, args.lora_rank,
                                    replicas=args.dp_replicate)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = None
    if args.beta > 0 and args.lora_rank:
        reference = checkpoint.AdapterReference(policy)  # the base is shared
    elif args.beta > 0:
        reference = checkpoint.load_policy(ckpt, codec, device, frozen=True,
                                           replicas=args.dp_replicate)
    if folder:  # fp32 weights and moments, not the bf16 weights of the folder
        checkpoint.load_train_state(policy, optimizer, folder)
    return policy, reference, optimizer


def make_worker(ckpt, policy, dtype, folder, agent, source, args):
    """The engine (None with --rollouts), the judge and the rules of an episode -> RolloutWorker.
    dtype: of the engine's weights. folder: as of load_models. Collective."""
    engine = None
    if not args.rollouts:
        # On a GPU the engine shares the device with the trainer, so it starts asleep.
        engine = rollout.make_engine(ckpt, policy.codec, args, sleeping=True)
        if folder:  # it has read --ckpt, but the resumed weights are newer
            engine.sync(checkpoint.full_weights(policy, dtype))
    pay = rewards.RewardConfig(args.answer_suffix, args.anchor, args.gamma,
                               tool_weight=args.tool_reward)
    # Each rank asks about its own rollouts. All append to one file, and read it when they begin.
    judge = open_judge(args, os.path.join(args.out, "judge.jsonl"))
    return rollout.RolloutWorker(engine, policy.codec, source, agent, pay, judge)


def learn(policy, reference, optimizer, episodes, source, step, args):
    """Episodes of this rank -> one update of the weights; numbers for the log. Raises RunError for
    a gap beyond rounding. Collective."""
    # The frames that the rollouts saw, so that an update reads no file.
    frames = []
    for episode in episodes:
        frames += episode.context.frames
    # The vision tower is frozen: features are computed once a step, for all its forwards.
    policy.features = model.VisionFeatures(policy, source.load, frames)
    if reference:
        reference.features = policy.features
    # A group lies on one rank, so advantages need no exchange between ranks. The trees hold every
    # sampled token once and every prompt once per group.
    groups = group_by_prompt(episodes)
    if args.window_gain:
        measure_windows(policy, groups, args)
    trees, num_tokens = build_trees(groups, args.format_credit)
    stats = update(policy, reference, optimizer, trees, num_tokens, args,
                   sub_agent_trees(episodes))
    check_gap(step, stats, policy)
    return stats


def write_rollouts(out, step, episodes):
    """Writes the episodes of this rank. A file per rank, because ranks share no file handle."""
    rank, _ = launch.rank_and_world()
    path = f"{out}/rollouts/step_{step:06d}.rank{rank}.jsonl"
    launch.write_jsonl(path, [episode.to_dict() for episode in episodes])


def main():
    # 0. Everything that can be refused is refused before a model is built.
    args = parse_args()
    if args.check:
        return check_data(args)
    ckpt = checkpoint.resolve(args.ckpt)
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    tasks, val_tasks, agent, source = read_inputs(args)
    device, folder, state = start_run(args, {"data": tasks, "val": val_tasks})
    start = state["step"]
    if start >= args.steps:
        launch.print0(f"nothing to do: {args.out} has {start} steps of {args.steps}")
        return launch.end_process_group()
    log = Log(args.out, start, args.steps, args)

    policy, reference, optimizer = load_models(ckpt, codec, device, folder, args)
    dtype = model.engine_dtype(codec, device)
    worker = make_worker(ckpt, policy, dtype, folder, agent, source, args)
    decoders = ThreadPoolExecutor(max(2, video.decode_threads() // 2))
    check_signals = launch.stop_on_signal()
    num_bad = 0  # steps in a row without a finite gradient
    if val_tasks and start == 0:  # the accuracy that training starts from
        evaluate(worker, val_tasks, 0, log, args)

    for step in range(start + 1, args.steps + 1):
        # 1. Rollouts. In seeds and records steps count from 0, as the weights' version does.
        began = time.monotonic()
        episodes = collect(worker, decoders, tasks, step - 1, args)

        # 2. Update.
        launch.reset_watchdog()  # rollouts are one phase, the update until its log line another
        sampled = time.monotonic()
        stats = learn(policy, reference, optimizer, episodes, source, step, args)
        # A single bad step moves no weight. Three of them would go on for ever.
        num_bad = 0 if math.isfinite(stats["grad_norm"]) else num_bad + 1
        if num_bad == 3:
            raise launch.RunError(f"step {step}: no finite gradient for three steps")

        # 3. New weights into the engine, which drops all prefixes and features of the old ones.
        if worker.engine:
            worker.engine.wake(checkpoint.full_weights(policy, dtype))

        # 4. Record and log.
        stats.update(rollout_s=sampled - began, train_s=time.monotonic() - sampled)
        write_rollouts(args.out, step - 1, episodes)
        log.write({"step": step, **episode_numbers(episodes), **stats}, SHOWN)

        # 5. Evaluate and save.
        last = step == args.steps
        save = last or (args.save_every and step % args.save_every == 0)
        if save and val_tasks:
            acc = evaluate(worker, val_tasks, step, log, args)  # on every rank the same
            checkpoint.note_best(state, acc, step)
        # A signal on any rank saves and stops all of them: they must leave at the same step.
        stopping = check_signals()
        if save or stopping:
            checkpoint.save_run(policy, optimizer, args.out, step, state)
        if stopping:
            break

    log.close(step)
    decoders.shutdown(cancel_futures=True)
    launch.end_process_group(worker.engine, int(not last))  # 1: so that no next stage begins


if __name__ == "__main__":
    launch.run_main(main)
