"""
grpo.py: PARA-GRPO on top of an SFT checkpoint, with a rollout engine inside every rank.

  R_i      = R_acc + w_fmt R_fmt + R_tool                           one per rollout i of a group of G        rewards.py
  sigma    = std of R in the group;  a group with sigma = 0 teaches nothing, is skipped and counted
  A_task_i = ((R_acc + R_tool)_i - mean) / sigma
  A_fmt_i  = w_fmt (R_fmt_i - mean) / sigma
  A_it     = A_task_i + A_fmt_i [t in struct(o_i)]                  struct: tag tokens and the end of each turn
  rho_t    = exp(logp_t - old_t)                                    old: this trainer before the step
  w_t      = min(exp(old_t - rollout_t), 5)                         the engine is not quite the trainer
  L        = -(1/N) sum_t [ w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) - beta k3_t ]
  k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1             N = sampled tokens of the whole batch, over ALL ranks

Three parts of PARA-GRPO, each with its flag: Exploration Anchoring (--think-prefix forces `<think>\\n`, --answer-suffix pays for a
final answer block, --anchor and --gamma pay for closed thoughts), Selective Anchoring (--format-credit struct), nFrames Gating
(--frames gated: K ~ U{4,8,16,32,64} per prompt, the same for its whole group). --vanilla turns them and R_tool off: plain GRPO.
With --format-credit sequence, A_task + A_fmt is exactly GRPO's advantage of the summed reward. For comparison only: smaller masks
(--format-credit tags, closing), each advantage over its own std (--normalise separate), K drawn where calling pays (--frames adaptive),
answers paid without their tag (--answer-from line, as the authors' release does).

f_tau in the log is R_fmt by the paper preset's terms whatever a run is paid for: one ruler for all runs. `fmt` is what it is paid.

Departs from upstream: KL is in the loss, not mixed into rewards; advantages are normalised once; one optimizer step per batch, so
old = logp and needs no forward of its own. The log-prob gap between engine and trainer is measured on every sampled token of
every step, and a gap beyond --probe-tolerance stops the run: stale weights fail silently everywhere else.

Reads:  --ckpt, --data (task JSONL), or --rollouts (rollout JSONL: one update from it, no engine).
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last, --out/log.jsonl, --out/args.json, --out/rollouts/*.jsonl
The same command again goes on from the newest whole checkpoint: tasks, K and sampling seeds are functions of (seed, step).

CPU toy:  torchrun --nproc_per_node 2 grpo.py --preset toy --ckpt sft_out --data toy/rl.jsonl --out grpo_out
1 GPU:    python grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
8 GPUs:   torchrun --nproc_per_node 8 grpo.py --ckpt sft_out --data rl.jsonl --out grpo_out
"""
import argparse
import contextlib
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import model
import rewards
import rollout
import video


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, yes_no = parser.add_argument, argparse.BooleanOptionalAction
    # what to read and write
    add("--ckpt", required=True, help="checkpoint folder to start from; also the reference of the KL")
    add("--data", default=None, help="task JSONL")
    add("--rollouts", nargs="+", default=None, help="rollout JSONL files: take one update from them, without an engine")
    add("--out", default="grpo_out", help="run folder")
    add("--preset", nargs="+", choices=["paper", "toy", "best"], default=["paper"], help="toy: numbers for the world of toy.py; best: what won in "
        "bench/ablation.md; `toy best` is both")
    add("--vanilla", action="store_true", help="plain GRPO: no prefix, no suffix, no anchor, no gating, no tool reward")
    add("--resume", action=yes_no, default=None, help="go on from the newest checkpoint of --out; default: if it is of the same settings; no: begin anew")
    # batch
    add("--steps", type=int, default=300, help="optimiser steps")
    add("--prompts", type=int, default=32, help="prompts per step, over all ranks")
    add("--group", type=int, default=8, help="rollouts per prompt (G)")
    add("--frames", type=frames_argument, default="gated", help="overview frames K; 'gated': K ~ U{4,8,16,32,64}; 'adaptive': more often where calling pays")
    add("--minibatches", type=int, default=1, help="optimiser steps per batch; above 1 costs one more forward")
    add("--pack-tokens", type=int, default=32768, help="tokens per pack (one forward)")
    # reward and credit
    add("--format-weight", type=float, default=1.0, help="w_fmt")
    add("--format-credit", choices=["struct", "tags", "closing", "sequence", "none"], default="struct", help="tokens that the format advantage reaches")
    add("--normalise", choices=["shared", "separate"], default="shared", help="A_task and A_fmt over the std of their sum, or each over its own")
    add("--answer-suffix", action=yes_no, default=True, help="pay 0.3 + 0.2 for a final <answer> block")
    add("--anchor", type=float, default=0.5, help="lambda: weight of the anchor term; 0 = off")
    add("--gamma", type=float, default=0.3, help="penalty of a thought that is never closed; 0 = off")
    add("--tool-reward", type=float, default=1.0, help="factor on R_tool; 0 = off")
    add("--open-metric", choices=["f1", "exact"], default="f1", help="R_acc of open questions")
    add("--answer-from", choices=["tag", "line"], default="tag", help="R_acc reads <answer> alone; or also the last line, as the authors' release")
    add("--train-subagents", action="store_true", help="train sub-agent samples with their episode's A_task")
    # loss and optimiser
    add("--clip-eps", type=float, default=0.2, help="eps of the clipped surrogate")
    add("--kl", type=float, default=0.01, help="beta; 0 = no reference model is loaded")
    add("--tis-cap", type=float, default=5.0, help="cap of the engine-trainer importance weight")
    add("--lr", type=float, default=2e-6, help="AdamW, constant")
    add("--weight-decay", type=float, default=0.01, help="AdamW, matrices only")
    add("--clip", type=float, default=1.0, help="gradient norm; 0 = no clipping")
    # engine
    add("--engine", choices=["auto", "vllm", "transformers"], default="auto", help="who samples")
    add("--probe-tolerance", type=float, default=0.0, help="mean |log-prob gap| engine-trainer, nats, that stops the run; 0 = by precision: 0.001 in fp32 (CPU), 0.1 in bf16 (GPU)")
    # looking and saving
    add("--save-every", type=int, default=50, help="steps between checkpoints; 0 = only at the end")
    add("--keep", type=int, default=2, help="newest checkpoints kept besides `last`; 0 = all")
    add("--max-bad-steps", type=int, default=3, help="updates in a row without a finite gradient, each skipped, that stop the run")
    add("--show-every", type=int, default=20, help="steps between printed rollouts; 0 = never")
    model.add_memory_arguments(parser)
    model.add_log_arguments(parser)
    rollout.add_agent_arguments(parser)
    return parser


def parse_args():
    parser = build_parser()
    early = parser.parse_known_args()[0]
    if "toy" in early.preset:
        parser.set_defaults(lr=2e-4, prompts=16, steps=40, pack_tokens=4096, save_every=0, recompute="none", temperature=1.0, kl=0.0,
                            **rollout.toy_lengths())
    if "best" in early.preset:
        parser.set_defaults(minibatches=2)
    if early.vanilla:
        parser.set_defaults(think_prefix=False, answer_suffix=False, format_credit="sequence", anchor=0.0, gamma=0.0, tool_reward=0.0,
                            frames=64)
    args = parser.parse_args()
    for name in ("prompts", "group", "steps", "minibatches", "pack_tokens", "max_bad_steps", "replicas"):
        if getattr(args, name) < 1:
            raise model.UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.data and not args.rollouts:
        raise model.UserError("give --data (task JSONL) or --rollouts (rollout JSONL)")
    for name in ("lr", "weight_decay", "clip", "clip_eps", "kl", "probe_tolerance"):
        if not getattr(args, name) >= 0:
            raise model.UserError(f"--{name.replace('_', '-')} may not be negative, got {getattr(args, name)}")
    if not args.tis_cap > 0:
        raise model.UserError(f"--tis-cap must be above 0, got {args.tis_cap}: a cap of 0 would erase every gradient")
    if args.temperature <= 0:
        raise model.UserError("--temperature must be above 0: greedy samples have no gradient")
    model.check_log_arguments(args)
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Advantages and trees


def frames_argument(text):
    """--frames of training: what rollout.py takes, or "adaptive"."""
    return text if text == "adaptive" else rollout.frames_argument(text)


def adaptive_weights(necessity, floor=0.5):
    """{K: measured call-minus-skip advantage, None = not known} -> weights of the draw of K, the sum of which is 1.

    Half of the draws stay uniform, so that no K is forgotten; the rest goes by exp(necessity), unknown ones counting as the largest.
    Example: nothing known -> [0.2] * 5.
    """
    known = [v for v in necessity.values() if v is not None]
    heights = [math.exp(v if v is not None else max(known, default=0.0)) for v in necessity.values()]
    return [floor / len(heights) + (1 - floor) * h / sum(heights) for h in heights]


def group_by_prompt(episodes):
    """Episodes -> lists that share one prompt, in order of first appearance, samples in order. Unsampled ones are left out."""
    groups = {}
    for episode in sorted(episodes, key=lambda e: e.sample):
        if episode.context is not None and episode.spans:
            groups.setdefault(episode.group, []).append(episode)
    return list(groups.values())


def assign_advantages(group, format_weight, tool_weight=1.0, separate=False):
    """Fill .advantage of each episode of one group -> True if the group has any signal. Composed from the unweighted terms, so
    that a recorded rollout can be replayed under other weights."""
    task = [e.reward["acc"] + tool_weight * e.reward["tool"] for e in group]
    a_task, a_fmt, sigma = rewards.group_advantages(task, [e.reward["fmt"] for e in group], format_weight, separate)
    for episode, t, f in zip(group, a_task, a_fmt):
        episode.advantage = {"task": t, "fmt": f, "sigma": sigma}
    return any(a_task) or any(a_fmt)


def token_advantages(episode, codec, credit):
    """-> list over context.ids: A_task + A_fmt where the format is credited; 0 on tokens nobody sampled."""
    out = [0.0] * len(episode.context.ids)
    for start, end in episode.spans:
        pieces = model.pieces_of(codec, episode.context.ids[start:end])
        flat = {"sequence": True, "none": False}
        credited = [flat[credit]] * len(pieces) if credit in flat else rewards.structural_mask(pieces, credit)
        out[start:end] = [episode.advantage["task"] + episode.advantage["fmt"] * c for c in credited]
    return out


def group_tree(group, codec, credit):
    """One group -> [shared prompt | o^1 | .. | o^G] with per-token advantages and the engine's log-probs."""
    cut = group[0].spans[0][0]  # the first sampled token: all before it is the same for the whole group
    prompt = group[0].context.ids[:cut]
    branches = []
    for e in group:
        c = e.context
        if c.ids[:cut] != prompt:
            raise ValueError(f"{e.group}: the prompts of one group differ")
        values = {"advantage": token_advantages(e, codec, credit)[cut:], "rollout": c.logps[cut:]}
        branches.append(model.Span(c.ids[cut:], c.mask[cut:], values))
    return model.Tree(model.Span(prompt, [0] * cut, {"advantage": [0.0] * cut, "rollout": [0.0] * cut}), group[0].context.items, branches)


def subagent_trees(group):
    """Sub-agent samples of one group as sequences of their own, credited with the main episode's A_task."""
    trees = []
    for e in group:
        for sub in (c["sub"] for c in e.calls if c.get("sub")):
            values = {"advantage": [e.advantage["task"]] * len(sub["ids"]), "rollout": sub["logps"]}
            trees.append(model.Tree(model.Span(sub["ids"], sub["mask"], values), [model.VisionItem(**v) for v in sub["vision"]]))
    return trees


def training_trees(groups, codec, args):
    """Groups of this rank -> (trees of groups with signal, sampled tokens of all groups, skipped groups)."""
    trees, tokens, skipped = [], 0, 0
    for group in groups:
        signal = assign_advantages(group, args.format_weight, args.tool_reward, args.normalise == "separate")
        tokens += sum(sum(e.context.mask) for e in group)
        extra = subagent_trees(group) if args.train_subagents else []
        tokens += sum(sum(t.prefix.mask) for t in extra)
        if not signal:
            skipped += 1
            continue
        trees += [group_tree(group, codec, args.format_credit), *extra]
    return trees, tokens, skipped


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def policy_loss(logp, old, rollout_logp, ref, advantage, clip_eps, tis_cap, kl):
    """Per-token loss of the docstring, before the division by N. All inputs [n]; ref None = no KL.

    -> (loss [n], {"clipped", "truncated", "kl": [n]}). Example: with logp = old = rollout_logp, loss = -advantage and its
    gradient with respect to logp is -advantage.
    """
    import torch

    ratio = torch.exp(logp - old)
    weight = torch.exp(old - rollout_logp).clamp(max=tis_cap)  # no gradient: old is a constant
    loss = -weight * torch.minimum(ratio * advantage, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantage)
    stats = {"clipped": ((ratio - 1).abs() > clip_eps).float(), "truncated": (torch.exp(old - rollout_logp) > tis_cap).float(),
             "kl": torch.zeros_like(logp.detach())}
    if ref is not None:
        gap = ref - logp
        k3 = torch.exp(gap) - gap - 1
        loss, stats["kl"] = loss + kl * k3, k3.detach()
    return loss, stats


def update(policy, reference, vision, optimizer, trees, tokens, codec, args, world, device, asked=()):
    """One pass over the batch: --minibatches optimiser steps -> dict of means over sampled tokens (all ranks); None when any rank was
    `asked` to stop before the first of them."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(tokens), float(len(trees))], dtype=torch.float64)  # in host memory: no GPU is waited for
    dist.all_reduce(total)
    n = max(1.0, total[0].item() / args.minibatches)  # sampled tokens of all groups: a skipped group counts as advantage zero
    names = ("loss", "tokens", "gap", "entropy", "kl", "clipped", "truncated")
    sums = torch.zeros(len(names), device=device, dtype=torch.float64)
    worst, norms = torch.zeros((), device=device, dtype=torch.float64), []
    if total[1].item() == 0:
        return {"grad_norm": 0.0, "gap_max": 0.0, "skipped_update": 1, "bad_updates": 0, **dict.fromkeys(names, 0.0)}
    batches = [[model.pack_trees(codec, members) for members in model.fill_packs(trees[i::args.minibatches], args.pack_tokens)]
               for i in range(args.minibatches)]
    batches = [model.even_packs(codec, packs) for packs in batches]
    old = {}
    if args.minibatches > 1:  # later minibatches are scored by a policy that has already moved: keep where it was
        with torch.no_grad():
            old = {(i, j): policy(pack, vision, args.temperature)[0] for i, b in enumerate(batches) for j, (pack, _) in enumerate(b)}
    for i, batch in enumerate(batches):
        for j, (pack, weight) in enumerate(batch):
            if not norms and model.any_rank(asked):
                return None
            logp, entropy = policy(pack, vision, args.temperature)
            before = old.get((i, j), logp.detach())
            ref = None
            if reference is not None:
                with torch.no_grad():
                    ref, _ = reference(pack, vision, args.temperature)
            zeros = torch.zeros_like(before)
            values = {k: model.sent(pack.values[k], device) if k in pack.values else zeros for k in ("advantage", "rollout")}
            loss, stats = policy_loss(logp, before, values["rollout"] if weight else before, ref, values["advantage"], args.clip_eps,
                                      args.tis_cap, args.kl)
            (weight * world * loss.sum() / n).backward()  # FSDP averages gradients over ranks; n is already global
            if weight:
                gap = (before - values["rollout"]).abs()
                parts = [loss.detach(), torch.ones_like(gap), gap, entropy, stats["kl"], stats["clipped"], stats["truncated"]]
                sums += torch.stack([p.double().sum() for p in parts])
                worst = torch.maximum(worst, gap.max().double())
        norm = torch.nn.utils.clip_grad_norm_(model.trained_parameters(policy), args.clip or math.inf)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        if math.isfinite(norms[-1]):  # the norm is of all ranks' gradients: all of them step, or none does
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    out = dict(zip(names, (sums / sums[1].clamp(min=1)).tolist()))
    return {**out, "tokens": sums[1].item(), "grad_norm": max(norms), "gap_max": worst.item(), "skipped_update": 0,
            "bad_updates": sum(not math.isfinite(x) for x in norms)}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def episode_row(e):
    """What the log needs of one episode, small enough to send to rank 0."""
    ruler = rewards.format_reward(e.turns, e.think_open)  # the paper preset's terms, whatever this run is paid for: runs stay comparable
    return {"K": e.frame_budget, "f_tau": ruler["total"], "well_formed": ruler["well_formed"], "status": e.status,
            **{k: e.reward[k] for k in ("total", "acc", "fmt", "tool")},
            "closure": e.reward["closure"], "written": len(e.calls), "parseable": e.parseable(), "executed": e.executed(),
            "a_task": e.advantage.get("task", 0.0), "length": sum(e.context.mask) if e.context else 0, "turns": len(e.turns),
            "cut": sum(f == "length" for f in e.finish), "sub_tokens": sum(c["sub_tokens"] for c in e.calls)}


def summarise(rows):
    """Episode rows of all ranks -> the step's metrics. Defined in the README, by the names used here."""
    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else None

    budgets = sorted({r["K"] for r in rows})
    at = {k: [r for r in rows if r["K"] == k] for k in budgets}

    def necessity(group):  # call-minus-skip advantage: what a call was worth against not calling
        called = [r["a_task"] for r in group if r["executed"]]
        skipped = [r["a_task"] for r in group if not r["executed"]]
        return mean(called) - mean(skipped) if called and skipped else None

    out = {name: mean(r[name] for r in rows) for name in ("total", "acc", "fmt", "tool", "length", "turns")}
    out.update(kappa=mean(r["executed"] for r in rows), f_tau=mean(r["f_tau"] for r in rows),
               well_formed=mean(float(r["well_formed"]) for r in rows), written_calls=mean(r["written"] for r in rows),
               valid_calls=mean(r["parseable"] for r in rows), called=mean(float(r["executed"] > 0) for r in rows),
               cut_turns=sum(r["cut"] for r in rows) / max(1, sum(r["turns"] for r in rows)),
               not_ok=sum(r["status"] != "ok" for r in rows), sub_tokens=mean(r["sub_tokens"] for r in rows),
               call_minus_skip=necessity(rows))
    out["closure"] = {}
    for tag in ("think", "tool_call", "answer"):
        opened, closed = (sum(r["closure"][tag][i] for r in rows) for i in (0, 1))
        out["closure"][tag] = closed / opened if opened else None
    out["by_K"] = {str(k): {"n": len(g), "acc": mean(r["acc"] for r in g), "f_tau": mean(r["f_tau"] for r in g),
                            "well_formed": mean(float(r["well_formed"]) for r in g), "kappa": mean(r["executed"] for r in g),
                            "call_minus_skip": necessity(g)} for k, g in at.items()}
    return out


def step_line(m, steps, eta):
    """Metrics of one step -> its line on the terminal. "-" where a number does not exist (nobody called, nobody skipped)."""
    def number(x, form=".2f"):
        return "-" if x is None else format(x, form)

    by_k = " ".join(f"{k}:{v['acc']:.2f}/{v['kappa']:.1f}/{number(v['call_minus_skip'], '+.1f')}" for k, v in m["by_K"].items())
    closed = " ".join(f"{tag} {number(rate)}" for tag, rate in m["closure"].items())
    return (f"step {m['step']:04d}/{steps:04d} | R {m['total']:.2f} (acc {m['acc']:.2f} fmt {m['fmt']:.2f} tool {m['tool']:.2f}) | "
            f"f_tau {m['f_tau']:.2f} well-formed {m['well_formed']:.2f} | calls {m['written_calls']:.2f} valid {m['valid_calls']:.2f} "
            f"kappa {m['kappa']:.2f} | closed {closed} | K:acc/kappa/call-skip {by_k} | "
            f"len {m['length']:.0f} H {m['entropy']:.2f} gap {m['gap']:.1e} clip {m['clipped']:.2f} tis {m['truncated']:.2f} kl {m['kl']:.3f} "
            f"gn {m['grad_norm']:.2f} zero {m['zero_variance']}/{m['groups']} | roll {m['rollout_s']:.1f}s (decode {m['decode_s']:.1f}s, "
            f"{m['rollout_tokens_per_s']:.0f} tok/s) train {m['train_s']:.1f}s ({m['train_tokens_per_s']:.0f} tok/s) sync {m['sync_s']:.2f}s | eta {eta / 60:.1f}m")


def gather_rows(rows):
    """Rows of every rank, on every rank."""
    import torch.distributed as dist

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


# ---------------------------------------------------------------------------------------------------------------------


@model.watched
def main(watch):
    args = parse_args()
    ckpt = model.resolve_checkpoint(args.ckpt)
    tasks = rollout.read_tasks(args.data) if args.data else []
    recorded = [model.read_jsonl(path, required=rollout.Episode(None, None, 0, 0, 0).to_json()) for path in args.rollouts or []]
    agent, source = rollout.agent_settings(args, args.data or args.rollouts[0])
    model.make_out(os.path.join(args.out, "rollouts"))
    folder, state = model.resume_point(args.out, args, args.resume)
    start, steps = state.get("step", 0), 1 if args.rollouts else args.steps
    if start >= steps:
        print(f"nothing to do: {args.out} has {start} steps of {steps}")
        return
    import torch
    import torch.distributed as dist

    rank, world, device = model.start_process_group(args.patience)
    watch.begin(args.patience)
    if args.prompts % world:
        raise model.UserError(f"--prompts {args.prompts} is not a multiple of the {world} ranks")
    codec = model.load_codec(ckpt, args.channel)
    if tasks:
        rollout.check_context(codec, tasks, agent, source, args.frames)
    torch.manual_seed(args.seed)
    policy = model.load_sharded(ckpt, codec, device, args.attention, args.recompute, args.replicas)
    vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load, int(args.feature_cache_gb * 2**30))
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, args.weight_decay, 0.999, device)
    reference = None
    if args.kl > 0:
        reference = model.load_sharded(ckpt, codec, device, args.attention, replicas=args.replicas, frozen=True)
    if folder:
        model.load_train_state(policy, optimizer, folder)
    engine, gpu = None, device.type == "cuda"
    wire = torch.bfloat16 if gpu else torch.float32  # what the engine computes in
    tolerance = args.probe_tolerance or (0.1 if gpu else 1e-3)
    if not args.rollouts:
        engine = rollout.make_engine(args.engine, ckpt, codec, args, args.seed + rank, sleeping=gpu, quiet=rank > 0)
        if start:  # the engine has read --ckpt; the resumed weights are newer
            engine.sync(model.full_weights(policy, wire))
    if rank == 0:
        model.write_atomic(os.path.join(args.out, "args.json"), json.dumps(vars(args), indent=1))
        print(f"{args.prompts} prompts x {args.group} rollouts = {args.prompts * args.group} a step on {world} rank{'s' if world > 1 else ''} "
              f"({device.type}, attention {model.choose_attention(device, args.attention)}) | K {args.frames} | format credit {args.format_credit} | {sum(p.numel() for p in model.trained_parameters(policy)) / 1e6:.2f} M "
              f"trained parameters in fp32 (read from {'/'.join(sorted(policy.stored_as))})", flush=True)
        model.warn_of_memory(policy.hf.config, args, device, world, reference=args.kl > 0, engine_share=0 if args.rollouts else args.engine_share)
        model.clean_run(args.out, start)
    log = model.Log(args.out, start, args) if rank == 0 else None
    asked, bad = model.stop_on_sigterm(), 0
    scoring = {"answer_suffix": args.answer_suffix, "anchor": args.anchor, "gamma": args.gamma, "w_format": args.format_weight,
               "tool_weight": args.tool_reward, "open_metric": args.open_metric, "answer_from": args.answer_from}
    necessity = dict.fromkeys(map(str, rollout.gated_budgets()))  # of --frames adaptive: running mean of call_minus_skip at each K
    necessity.update(state.get("necessity", {}))

    saver = model.Saver(policy, codec, args.out, args.keep, start)

    def save(step):
        saver.save(step, {"necessity": dict(necessity), "args": vars(args)}, optimizer)

    def stopped(step):  # a scheduler's warning: what this step has drawn is dropped, and drawn again later as it was
        save(step)
        saver.wait()
        if rank == 0:
            print(f"stopped by SIGTERM after step {step} of {steps}; the same command goes on from {args.out}", flush=True)

    def share(step):
        """Tasks of this rank, and the place of every group in the batch. A task that the seam of two epochs brings twice is one larger group."""
        batch, order = [tasks[i] for i in model.batch_indices(step, args.prompts, len(tasks), args.seed)], {}
        for task in batch:
            order.setdefault(f"{step}/{task['id']}", len(order))
        return [task for task in batch if order[f"{step}/{task['id']}"] % world == rank], order

    def look_ahead(task, step):
        k = args.frames if isinstance(args.frames, int) else rollout.frame_budget(args.seed, step, task["id"])
        with contextlib.suppress(video.VideoError, ValueError):  # counted when its episode comes
            source.load({"video": task["video"], "frames": k})

    ahead = ThreadPoolExecutor(args.decode_threads, thread_name_prefix="ahead")  # the next step's overviews, while this one trains
    began, finished = time.monotonic(), False
    for step in range(start, steps):
        # 1. Rollouts. No collective in here: ranks finish at different times and meet at the update.
        clock, waited = time.monotonic(), {}
        if args.rollouts:
            everything = group_by_prompt([rollout.from_json(row) for rows in recorded for row in rows])
            groups = everything[rank::world]
            episodes = [e for g in groups for e in g]
        else:
            mine, order = share(step)
            frames = args.frames
            if frames == "adaptive":
                weights = adaptive_weights(necessity)
                frames = lambda task, step=step, weights=weights: rollout.frame_budget(args.seed, step, task["id"], weights=weights)  # noqa: E731
            episodes = list(rollout.run(engine, mine, agent, codec, source, frames, args.group, step, step, scoring,
                                        args.decode_threads, clock=waited, stop=lambda: asked))
            for e in episodes:
                if e.status == "video_error" and e.sample == 0:
                    print(model.printable(f"skipped task {e.task['id']}: {e.error}"), flush=True)
            episodes.sort(key=lambda e: (order[e.group], e.sample))
            groups = group_by_prompt(episodes)
        rollout_s = time.monotonic() - clock
        watch.beat()
        if model.any_rank(saver.failed()):  # known on one rank at least: all of them say why, and stop
            saver.wait()
        if model.any_rank(asked):
            stopped(step)
            break
        if engine:
            engine.sleep()
        if not args.rollouts and step + 1 < steps and args.frames != "adaptive":
            for task in share(step + 1)[0]:
                ahead.submit(look_ahead, task, step + 1)

        # 2. Update. The trees hold every sampled token once, and every prompt once per group.
        clock = time.monotonic()
        trees, tokens, skipped = training_trees(groups, codec, args)
        stats = update(policy, reference, vision, optimizer, trees, tokens, codec, args, world, device, asked)
        if stats is None:
            stopped(step)
            break
        watch.beat()
        train_s = time.monotonic() - clock
        bad = bad + 1 if stats["bad_updates"] else 0
        if bad >= args.max_bad_steps:
            saver.wait()
            raise model.RunError(f"step {step}: no finite gradient for {bad} steps in a row (--max-bad-steps); the newest checkpoint is {model.newest_checkpoint(args.out)}")
        if not args.rollouts:
            name = os.path.join(args.out, "rollouts", f"step_{step:06d}.rank{rank}.jsonl")
            model.write_atomic(name, "".join(json.dumps(e.to_json()) + "\n" for e in episodes))
        if not stats["gap"] <= tolerance:  # written so that NaN stops the run as well
            saver.wait()
            raise model.RunError(f"step {step}: mean |log-prob gap| between engine and trainer is {stats['gap']:.3f} nats, tolerance "
                               f"{tolerance}: the engine samples from other weights or other inputs")

        # 3. New weights into the engine, old caches out.
        clock = time.monotonic()
        if engine and step + 1 < steps:
            engine.wake(model.full_weights(policy, wire))
        sync_s = time.monotonic() - clock
        watch.beat()

        # 4. Numbers.
        rows = gather_rows([episode_row(e) for e in episodes])
        counts = gather_rows([{"skipped": skipped, "groups": len(groups), "packed": sum(len(t) for t in trees),
                               "decode_s": waited.get("decode_s", 0.0)}])
        m = summarise(rows)
        for k, cell in m["by_K"].items():  # the same on every rank: the next draw of K depends on it
            if k in necessity and cell["call_minus_skip"] is not None:
                before = necessity[k]
                necessity[k] = cell["call_minus_skip"] if before is None else 0.8 * before + 0.2 * cell["call_minus_skip"]
        if rank == 0:
            sampled = sum(r["length"] + r["sub_tokens"] for r in rows)
            eta = (time.monotonic() - began) / (step + 1 - start) * (steps - step - 1)
            m.update(step=step + 1, **stats, zero_variance=sum(c["skipped"] for c in counts), groups=sum(c["groups"] for c in counts),
                     packed_tokens=sum(c["packed"] for c in counts), rollout_s=rollout_s, train_s=train_s, sync_s=sync_s,
                     decode_s=max(c["decode_s"] for c in counts), rollout_tokens_per_s=sampled / max(rollout_s, 1e-9),
                     train_tokens_per_s=sum(c["packed"] for c in counts) / max(train_s, 1e-9))
            log.write(m, step_line(m, steps, eta))
            if args.show_every and not args.quiet and step % args.show_every == 0 and episodes:
                print(rollout.show(episodes[0], codec, sys.stdout.isatty() and "NO_COLOR" not in os.environ), flush=True)
        if step + 1 == steps or (args.save_every and (step + 1) % args.save_every == 0):
            save(step + 1)
        if step % 10 == 9:
            model.give_back_memory()
        watch.beat()
    else:
        saver.wait()
        finished = True
    if rank == 0 and finished:
        print(f"done: {steps - start} steps in {(time.monotonic() - began) / 60:.1f} min -> {args.out}/last", flush=True)
    ahead.shutdown(cancel_futures=True)
    if log:
        log.close()
    if engine:
        engine.close()
    if dist.is_initialized():  # closing vLLM may have ended it already
        dist.destroy_process_group()


if __name__ == "__main__":
    model.run_main(main)
