"""
gpu_check.py: does the trainer compute on this machine's GPU what it computes on CPU in fp32? A script, not a test file.

It writes a toy checkpoint, draws toy frames in memory (no video file, no decoder), and checks:
  paths       log-probs and gradients of packed, shared-prefix and chunked forwards on CPU fp32, each against one forward a sequence
  kernels     every attention kernel that is here (sdpa, flash, varlen, flex) on the GPU under bf16, against sdpa, and against fp32
  steps       one SFT step and one GRPO step as the scripts run them (sharded, bf16 compute, fp32 weights): finite, the loss falls
  rollouts    vLLM when installed, else the transformers engine: log-probs against the trainer, tokens/s; once more after sleep, new weights
              and wake; peak memory
  geometries  packed SFT and a GRPO update at the size of 2B and 4B with random weights: tokens/s, share of the card's own measured
              matrix-product ceiling (MFU), waits of the host for the GPU, peak memory against model.py's ledger. On CPU: the toy's geometry, to see that it runs

A row says what was compared, the number, its bound, and ok, FAIL or why it was skipped. Exit code 1 when a check fails.
Without a GPU the CPU rows run and the others say so.

Run:  python tests/gpu_check.py [--out result.json]
"""
import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# toy.py needs no decoder either way: only its drawing, its texts and its tokenizer are used here.
import numpy as np
import torch

import grpo
import model
import rollout
import toy
import video

BF16_LOGP = 0.06  # nats, mean over tokens: bf16 keeps 8 bits, and a log-prob of a random model is near -6
BF16_GRAD = 0.05  # relative L2 distance of a bf16 gradient
FP32_LOGP, FP32_GRAD = 1e-5, 1e-5


class DrawnSource:
    """Stands in for rollout.Source: overviews and crops of videos that were drawn in memory, one frame a second."""

    def __init__(self, videos):
        self.videos = videos  # name -> [T, H, W, 3]

    def load(self, spec):
        images = self.videos[spec["video"]]
        total = len(images)
        if "frames" in spec:  # centres of K equal segments, as video.py does
            count, first, last = min(spec["frames"], total), 0.0, float(total)
        else:
            first, last = max(0.0, spec["start"]), min(float(total), spec["end"])
            if not first < last:
                raise ValueError("the window holds nothing of the video")
            count = spec.get("num_frames") or max(1, round((last - first) * spec["fps"]))
            count = min(count, spec["max_frames"])
        at = sorted({int(first + (k + 0.5) * (last - first) / count) for k in range(count)})
        keys = [f"{spec['video']}@{i}" for i in at]
        return video.Frames(images[at], np.array(at, dtype=float), "/".join(keys), keys)

    def load_overview(self, spec):
        return self.load(spec), float(len(self.videos[spec["video"]]))

    def load_window(self, spec):
        return {**spec, "start": max(0.0, spec["start"]), "end": min(spec["end"], float(len(self.videos[spec["video"]])))}, self.load(spec)


def make_world(folder, seed=0):
    """-> (tasks, DrawnSource): a base checkpoint in `folder`, four videos with their questions, in memory."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    tasks, videos = [], {}
    for i in range(4):
        events = toy.make_timeline(rng)
        tasks.append({**toy.make_task(f"v{i}", events), "events": events})
        videos[tasks[-1]["video"]] = toy.draw_frames(events, noise)
    toy.build_init(folder, rng, seed)
    return tasks, DrawnSource(videos)


class Table:
    """Rows of (what, value, bound, verdict), printed as they come, aligned."""

    def __init__(self):
        self.rows = []

    def add(self, what, value, bound=None, note=""):
        """A check passes when value <= bound; without a bound it is a measurement."""
        verdict = "" if bound is None else "ok" if value <= bound else "FAIL"  # NaN fails: it is <= nothing
        self.rows.append({"what": what, "value": value, "bound": bound, "verdict": verdict, "note": note})
        print(f"{what:58s} {value:12.4g} {'' if bound is None else f'<= {bound:g}':>12s} {verdict:5s} {note}", flush=True)

    def skip(self, what, why):
        self.rows.append({"what": what, "value": None, "bound": None, "verdict": "skipped", "note": why})
        print(f"{what:58s} {'-':>12s} {'':>12s} {'skip':5s} {why}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The batch every path is tried on


def make_trees(codec, tasks, source):
    """One GRPO group per task: a prompt with 8 or 16 frames and four responses of different lengths -> [Tree]."""
    trees = []
    for n, task in enumerate(tasks):
        spec = {"video": task["video"], "frames": 8 * (1 + n % 2)}
        frames = source.load(spec)
        item = model.vision_item(spec, frames)
        prompt, _, _ = model.encode_prompt(codec, rollout.main_messages(task, 8), [item], rollout.tool_schema())
        rng = random.Random(n)
        texts = [toy.answer_turn("red, blue", rng), toy.answer_turn(task["answer"], rng), toy.call_turn(task["events"], rng), "<think>\nI saw"]
        branches = []
        for i, text in enumerate(texts):
            ids = model.encode(codec, text) + [codec.eos]
            branches.append(model.Span(ids, [1] * len(ids), {"advantage": [(-1.0) ** i] * len(ids)}))
        trees.append(model.Tree(model.Span(prompt, [0] * len(prompt)), [item], branches))
    return trees


def alone(trees):
    """The same sequences without sharing: one tree of one sequence each, in branch order."""
    return [model.Tree(model.Span(t.prefix.ids + b.ids, [0] * len(t.prefix.ids) + b.mask,
                                  {k: [0.0] * len(t.prefix.ids) + v for k, v in b.values.items()}), t.vision)
            for t in trees for b in t.branches]


def measure(policy, vision, packs, chunk=1024):
    """Packs -> (log-probs of all trained tokens, gradient of the advantage-weighted sum, both on CPU in fp64)."""
    for p in policy.parameters():
        p.grad = None
    out = []
    for pack in packs:
        logp, _ = policy(pack, vision, chunk=chunk)
        (-(logp * pack.values["advantage"].to(logp.device)).sum()).backward()
        out.append(logp.detach().double().cpu())
    grads = [p.grad.detach().double().cpu().flatten() for p in model.trained_parameters(policy)]
    return torch.cat(out), torch.cat(grads)


def compare(table, what, found, wanted, logp_bound, grad_bound):
    """Two rows: mean |log-prob difference| in nats, relative L2 distance of the gradients."""
    table.add(f"{what}: log-probs", (found[0] - wanted[0]).abs().mean().item(), logp_bound, "nats, mean")
    table.add(f"{what}: gradient", ((found[1] - wanted[1]).norm() / wanted[1].norm()).item(), grad_bound, "relative")


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_paths(table, codec, policy, vision, trees, device_name, wanted, bounds):
    """Packed, shared-prefix and chunked forms of the same sequences, against `wanted`."""
    whole = [model.pack_trees(codec, alone(trees))]
    shared = [model.pack_trees(codec, trees)]
    compare(table, f"{device_name} packed", measure(policy, vision, whole), wanted, *bounds)
    compare(table, f"{device_name} shared prefix", measure(policy, vision, shared), wanted, *bounds)
    compare(table, f"{device_name} vocabulary in chunks of 7", measure(policy, vision, shared, chunk=7), wanted, *bounds)


def kernels_here():
    """Attention kernels to try on the GPU -> {name: None or why not}. flex serves trees under every name but sdpa."""
    have = {"sdpa": None}
    have["flash"] = None if importlib.util.find_spec("flash_attn") else "flash_attn is not installed"
    have["varlen"] = None if importlib.util.find_spec("torch.nn.attention.varlen") else "this torch has no varlen kernel"
    return have


def check_kernels(table, ckpt, codec, trees, source, wanted):
    """Each kernel on plain packs, and flex on trees; bf16 compute, as training does it."""
    device = torch.device("cuda", 0)
    plain, shared = [model.pack_trees(codec, alone(trees))], [model.pack_trees(codec, trees)]
    results = {}
    for kernel, missing in kernels_here().items():
        for form, packs in (("packed", plain), ("shared prefix", shared)):
            name = f"GPU bf16 {'flex' if form == 'shared prefix' and kernel != 'sdpa' else kernel} ({kernel}), {form}"
            if missing:
                table.skip(name, missing)
                continue
            if form == "shared prefix" and kernel == "flash":
                continue  # flex again: the same code as under varlen
            policy = model.load_policy(ckpt, codec, device, torch.bfloat16, kernel)
            vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
            try:
                results[kernel, form] = measure(policy, vision, packs)
            except (RuntimeError, ImportError) as error:  # a kernel that this card or this build does not have
                table.add(name, float("nan"), 0.0, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
            compare(table, f"{name} against fp32 on CPU", results[kernel, form], wanted, BF16_LOGP, BF16_GRAD)
            if kernel != "sdpa":
                compare(table, f"{name} against sdpa", results[kernel, form], results["sdpa", form], BF16_LOGP, BF16_GRAD)


def check_steps(table, ckpt, codec, trees, source, device):
    """SFT steps and a GRPO step through FSDP2, as sft.py and grpo.py take them."""
    where = "GPU" if device.type == "cuda" else "CPU"
    import sft

    policy = model.load_policy(ckpt, codec, device, torch.float32, recompute="full")
    vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    model.shard(policy, device)
    optimizer = torch.optim.AdamW(model.trained_parameters(policy), lr=1e-3)
    packs = [model.pack_trees(codec, alone(trees))]
    losses = []
    for _ in range(3):  # the same batch three times: the loss must fall
        began = time.time()
        loss, _ = sft.backward(policy, vision, packs, codec, 1, device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
    seconds = time.time() - began
    table.add(f"{where} SFT: loss after two steps / before", losses[-1] / losses[0], 0.999, f"{losses[0]:.3f} -> {losses[-1]:.3f} nats")
    table.add(f"{where} SFT: tokens/s of a step", len(packs[0].ids) / seconds)

    # The sampler's log-probs are the trainer's own, so the importance weight is 1 and the gap must be 0.
    with torch.no_grad():
        logp, _ = policy(model.pack_trees(codec, trees), vision)
    logp = iter(logp.tolist())
    for t in trees:
        for b in t.branches:
            b.values["rollout"] = [next(logp) for _ in b.ids]
        t.prefix.values = {"advantage": [0.0] * len(t.prefix.ids), "rollout": [0.0] * len(t.prefix.ids)}
    args = SimpleNamespace(minibatches=1, pack_tokens=32768, temperature=1.0, clip_eps=0.2, tis_cap=5.0, kl=0.0, clip=1.0)
    tokens = sum(len(b.ids) for t in trees for b in t.branches)
    before = torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().cpu() for p in model.trained_parameters(policy)])
    began = time.time()
    stats = grpo.update(policy, None, vision, optimizer, trees, tokens, codec, args, 1, device)
    table.add(f"{where} GRPO: log-prob gap of a trainer with itself", stats["gap"], 0.01 if device.type == "cuda" else 1e-5, "nats, mean")
    after = torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().cpu() for p in model.trained_parameters(policy)])
    finite = bool(after.isfinite().all()) and stats["grad_norm"] > 0 and not torch.equal(before, after)
    table.add(f"{where} GRPO: weights finite and moved", 0.0 if finite else 1.0, 0.0, f"gradient norm {stats['grad_norm']:.3f}")
    table.add(f"{where} GRPO: packed tokens/s of a step", sum(len(t) for t in trees) / (time.time() - began))


def check_rollouts(table, ckpt, codec, tasks, source, device, group=8):
    """A few episodes; their log-probs are computed again by the trainer."""
    where = "GPU" if device.type == "cuda" else "CPU"
    name = "vllm" if importlib.util.find_spec("vllm") and device.type == "cuda" else "transformers"
    engine = rollout.VllmEngine(ckpt, codec, 1024, max_frames=16, gpu_memory=0.3, sleeping=True) if name == "vllm" else \
        rollout.TransformersEngine(ckpt, codec, device)
    agent = rollout.Agent(**{**rollout.toy_lengths(), "temperature": 1.0, "max_new_tokens": 48})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = model.load_policy(ckpt, codec, device, dtype)
    vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    list(rollout.run(engine, tasks[:1], agent, codec, source, 8, 1, step=99))  # warm-up
    began = time.time()
    episodes = list(rollout.run(engine, tasks, agent, codec, source, 8, group))
    seconds = time.time() - began
    sampled = sum(sum(e.context.mask) + sum(c["sub_tokens"] for c in e.calls) for e in episodes)
    table.add(f"{where} rollouts ({name}): sampled tokens/s", sampled / seconds, None, f"{len(episodes)} episodes, {sampled} tokens")
    broken = sum(e.status != "ok" for e in episodes)
    table.add(f"{where} rollouts ({name}): episodes that failed", broken, 0)

    def gap(episodes):
        """Token in, token out: the trainer scores the very ids, and must find the engine's log-probs."""
        trees = [model.Tree(model.Span(e.context.ids, e.context.mask, {"rollout": e.context.logps}), e.context.items) for e in episodes]
        pack = model.pack_trees(codec, trees)
        with torch.no_grad():
            logp, _ = policy(pack, vision, agent.temperature)
        return (logp.cpu() - pack.values["rollout"]).abs().mean().item()

    bound = 0.05 if device.type == "cuda" else 1e-4
    table.add(f"{where} rollouts ({name}): log-prob gap to the trainer", gap(episodes), bound, "nats, mean")
    engine.sleep()
    with torch.no_grad():
        for p in policy.hf.model.language_model.layers.parameters():
            p.mul_(1.5)
    table.add(f"{where} rollouts ({name}): bound / gap of other weights", bound / max(gap(episodes), 1e-12), 0.5, "the check could fail")
    began = time.time()
    engine.wake(model.full_weights(policy))
    table.add(f"{where} rollouts ({name}): seconds of wake and sync", time.time() - began)
    table.add(f"{where} rollouts ({name}): gap after sleep, new weights, wake", gap(list(rollout.run(engine, tasks, agent, codec, source, 8, group, step=1))), bound, "nats, mean")
    engine.close()


def ceiling(device):
    """FLOPs a second of the largest matrix product tried here: bf16 on a GPU, fp32 on CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device, 20)


def seconds_of(function, device, repeats):
    """Median seconds of a call, after two that warm up."""
    took = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def waits(function):
    """How often the host waits for the GPU while the function runs, as torch's own debug mode sees it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def training_flops(text, layers, tokens, trained, pairs):
    """Forward and backward: 6 a weight of the layers and token, 6 a weight of the head and trained token, 12 a visible (query, key) pair,
    head dimension and layer. What recomputation does again is not counted, nor is a shared prompt counted twice. layers: their parameters."""
    return 6 * (layers * tokens + text.vocab_size * text.hidden_size * trained) + 12 * pairs * text.num_attention_heads * text.head_dim * text.num_hidden_layers


def tree_pairs(prompt, responses=()):
    """Visible (query, key) pairs of one tree, lengths in tokens."""
    return prompt * (prompt + 1) // 2 + sum(r * prompt + r * (r + 1) // 2 for r in responses)


def check_geometry(table, name, config, codec, device, sizes, top, repeats=5):
    """Updates at a real geometry with random weights. sizes: chats, tokens of a chat, groups, prompt, response, responses of a group."""
    from transformers import Qwen3VLForConditionalGeneration

    import sft

    where, text = "GPU" if device.type == "cuda" else "CPU", config.text_config
    chats, long, groups, prompt, response, group = sizes
    gc.collect()  # the model before this one is a knot of hooks
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with device:
        hf = Qwen3VLForConditionalGeneration(config)
    policy = model.shard(model.as_policy(hf, codec, device, "auto", "full"), device)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.0, 0.999, device)
    layers, rng = model.parameter_counts(config)["layers"], random.Random(0)

    def words(n):
        return [rng.randrange(300, 500) for _ in range(n)]

    packs = [model.pack_trees(codec, [model.Tree(model.Span(words(long), [0] * (long - long // 8) + [1] * (long // 8))) for _ in range(chats)])]

    def sft_step():
        sft.backward(policy, None, packs, codec, 1, device)
        torch.nn.utils.clip_grad_norm_(model.trained_parameters(policy), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def tree():
        zeros = {"advantage": [0.0] * prompt, "rollout": [0.0] * prompt}
        branches = [model.Span(words(response), [1] * response, {"advantage": [(-1.0) ** i] * response, "rollout": [-12.0] * response}) for i in range(group)]
        return model.Tree(model.Span(words(prompt), [0] * prompt, zeros), [], branches)

    trees, args = [tree() for _ in range(groups)], SimpleNamespace(minibatches=1, pack_tokens=chats * long, temperature=1.0, clip_eps=0.2, tis_cap=5.0, kl=0.0, clip=1.0)
    tokens = groups * (prompt + group * response)
    work = {"packed SFT": (sft_step, chats * long, training_flops(text, layers, chats * long, chats * (long // 8), chats * tree_pairs(long))),
            "GRPO update": (lambda: grpo.update(policy, None, None, optimizer, trees, groups * group * response, codec, args, 1, device), tokens,
                            training_flops(text, layers, tokens, groups * group * response, groups * tree_pairs(prompt, [response] * group)))}
    for what, (step, count, flops) in work.items():
        seconds = seconds_of(step, device, repeats)
        table.add(f"{where} {name} {what}: tokens/s", count / seconds, None, f"{count} tokens, {seconds:.2f} s")
        table.add(f"{where} {name} {what}: MFU", flops / seconds / top, None, f"of {top / 1e12:.2f} TFLOP/s measured")
        if device.type == "cuda":
            table.add(f"{where} {name} {what}: waits of the host for the GPU", waits(step))
    if device.type == "cuda":
        planned = model.peak(model.ledger(config, 1, chats * long, reference=False, feature_cache_gb=0.0))
        table.add(f"GPU {name}: ledger / peak memory, distance from 1", abs(planned / torch.cuda.max_memory_allocated() - 1), 0.1,
                  f"{planned / 1e9:.1f} GB planned, {torch.cuda.max_memory_allocated() / 1e9:.1f} GB seen")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="write the JSON line here as well")
    args = parser.parse_args()
    began, table = time.time(), Table()
    cpu, gpu = torch.device("cpu"), torch.cuda.is_available()
    model.start_process_group()
    print(f"torch {torch.__version__} | {torch.cuda.get_device_name(0) if gpu else 'no GPU'} | {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        ckpt = os.path.join(folder, "init")
        tasks, source = make_world(ckpt)
        codec = model.load_codec(ckpt)
        trees = make_trees(codec, tasks, source)

        # 1. The reference: one forward a sequence, fp32, CPU.
        policy = model.load_policy(ckpt, codec, cpu, attention="sdpa")
        vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
        wanted = measure(policy, vision, [model.pack_trees(codec, [t]) for t in alone(trees)])
        check_paths(table, codec, policy, vision, trees, "CPU fp32 (sdpa)", wanted, (FP32_LOGP, FP32_GRAD))
        policy.attention = "parts"  # what CPU runs take
        check_paths(table, codec, policy, vision, trees, "CPU fp32 (parts)", wanted, (FP32_LOGP, FP32_GRAD))
        # A check that cannot fail is none: other frames must change the log-probs by far more than the bound.
        swapped = DrawnSource({name: images[::-1].copy() for name, images in source.videos.items()})
        other = model.VisionFeatures(policy.hf.model.visual, codec, swapped.load)
        moved = (measure(policy, other, [model.pack_trees(codec, trees)])[0] - wanted[0]).abs().mean().item()
        table.add("CPU fp32 sensitivity: bound / effect of other frames", FP32_LOGP / max(moved, 1e-12), 0.1, f"{moved:.4f} nats")

        # 2. The same on the GPU.
        if gpu:
            device = torch.device("cuda", 0)
            policy = model.load_policy(ckpt, codec, device, torch.float32, "sdpa")
            vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
            # The frozen tower runs in bf16 on a GPU, hence wider than on CPU.
            check_paths(table, codec, policy, vision, trees, "GPU fp32", wanted, (BF16_LOGP, BF16_GRAD))
            check_kernels(table, ckpt, codec, trees, source, wanted)
        else:
            table.skip("GPU attention kernels (sdpa, flash, varlen, flex)", "no GPU on this machine")

        # 3. Whole steps and rollouts, on the GPU where there is one.
        device = torch.device("cuda", 0) if gpu else cpu
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        check_steps(table, ckpt, codec, trees, source, device)
        if gpu:
            table.add("GPU peak memory of the steps", torch.cuda.max_memory_allocated() / 2**30, None, "GiB")
        else:
            table.skip("GPU steps under bf16, peak memory", "no GPU on this machine")
            table.skip("GPU rollouts with vLLM", "no GPU on this machine; the transformers engine runs instead")
        check_rollouts(table, ckpt, codec, tasks, source, device)
        # 4. Speed and memory at the geometries that people train.
        model.start_process_group()  # vLLM ends the whole process's when it is closed
        top = ceiling(device)
        for name in ("2B", "4B") if gpu else ("toy",):
            config = model.read_config(name if gpu else ckpt)
            check_geometry(table, name, config, codec, device, (8, 4096, 3, 4000, 800, 8) if gpu else (4, 128, 1, 100, 20, 4), top)
        if gpu:
            table.add("GPU peak memory", torch.cuda.max_memory_allocated() / 2**30, None, "GiB, without vLLM's own pool")
    failed = [r["what"] for r in table.rows if r["verdict"] == "FAIL"]
    line = json.dumps({"gpu": torch.cuda.get_device_name(0) if gpu else None, "torch": torch.__version__, "failed": failed,
                       "skipped": [r["what"] for r in table.rows if r["verdict"] == "skipped"], "seconds": round(time.time() - began, 1),
                       "rows": [{**r, "value": None if r["value"] != r["value"] else r["value"]} for r in table.rows]})
    print(line)
    if args.out:
        model.write_atomic(args.out, line + "\n")
    if torch.distributed.is_initialized():  # closing vLLM may have ended it already
        torch.distributed.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
