"""
gpu_check.py: does the trainer compute the same on this machine's GPU as on CPU in fp32?

The checks use a toy checkpoint and toy frames drawn in memory (no video file, no decoder):
  forwards    Log-probs and gradients of packed, shared-prefix and chunked forwards, compared with
              one forward per sequence on CPU in fp32. They run on CPU, on the GPU in bf16 by
              FlexAttention, and by flash-attn if installed.
  steps       SFT steps and a GRPO update, as the scripts take them. The loss must fall, the weights
              must be finite and must move.
  rollouts    The engine's log-probs against the trainer's, and again after sleep, new weights and
              wake: vLLM on the GPU, the reference engine of the tests on CPU.
  geometries  Packed SFT and a GRPO update at the sizes of 2B and 4B, random weights: tokens/s,
              MFU (relative to the card's own measured matrix product), waits of the host for the
              GPU, peak memory against tools/plan.py. On CPU one toy size runs, to try the code.

Each row has a name, the measured number, its bound, and ok, FAIL or the reason why the check was
skipped. Without a GPU only the CPU rows run. The exit code is 1 if a check fails.

  python tools/gpu_check.py [--out result.json]
"""
import gc
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "tests"))  # for the reference engine
import numpy as np
import torch

import chat
import checkpoint
import grpo
import launch
import model
import rollout
import sft
import toy
import video
from engine import Limits, VllmEngine
from tools import plan

# (nats, mean over tokens; relative L2 distance of the gradient)
FP32 = (1e-5, 1e-5)
BF16 = (0.06, 0.05)  # 8 bits of mantissa, and a log-prob of a random model is near -6


class Drawn(rollout.Source):
    """A Source whose root is {name: uint8 [T, H, W, 3]}: videos in memory, one frame a second."""

    def duration(self, spec):
        return float(len(self.root[spec["video"]]))

    def clusters(self, specs):
        return [range(len(specs))]

    def preload(self, specs):
        """Does not decode: all frames are in memory."""

    def load(self, spec):
        images = self.root[spec["video"]]  # [T, H, W, 3]
        starts = np.arange(len(images), dtype=float)  # [T] seconds
        if "frames" in spec:
            at = video.overview_indices(starts, self.duration(spec), spec["frames"])  # [K]
        else:
            at = video.crop_indices(starts, self.duration(spec), spec["start"], spec["end"],
                                    spec.get("num_frames"), spec["fps"], spec["max_frames"])
        keys = [f"{spec['video']}@{i}" for i in at]  # the same frame in two looks: the same key
        return video.Frames(images[at], starts[at], "/".join(keys), keys)


def make_world(folder, seed=0):
    """Writes a random toy checkpoint to `folder` -> (four tasks, Drawn)."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    tasks, videos = [], {}  # videos: name -> uint8 [64, 32, 32, 3]
    for i in range(4):
        events = toy.make_timeline(rng)
        tasks.append(toy.make_task(f"v{i}", events))
        videos[tasks[-1]["video"]] = toy.draw_frames(events, noise)
    toy.build_init(folder, rng, seed)
    return tasks, Drawn(videos, None)


class Table:
    """Rows of (what, value, bound, verdict, note), printed as they come."""

    def __init__(self):
        self.rows = []

    def add(self, what, value, bound=None, note=""):
        """A check passes if value <= bound; a row without a bound is a measurement."""
        verdict = ""
        if bound is not None:
            verdict = "ok" if value <= bound else "FAIL"  # NaN fails
        self.row(what, value, bound, verdict, note)

    def skip(self, what, why):
        self.row(what, None, None, "skipped", why)

    def row(self, what, value, bound, verdict, note):
        self.rows.append({"what": what, "value": value, "bound": bound, "verdict": verdict,
                          "note": note})
        number = "-" if value is None else f"{value:.4g}"
        limit = "" if bound is None else f"<= {bound:g}"
        print(f"{what:58s} {number:>10s} {limit:>10s} {verdict:8s}{note}", flush=True)

    def run(self, check, *args):
        """Runs check(self, *args). An error becomes one failed row; the other checks still run."""
        try:
            check(self, *args)
        except Exception as error:
            traceback.print_exc()
            self.add(check.__name__, math.nan, 0.0, f"{type(error).__name__}: {error}"[:100])


def place(device):
    return "GPU" if device.type == "cuda" else "CPU"


# ------------------------------------------------------------------------------------------------
# Forwards


def make_trees(codec, tasks, source):
    """One GRPO group per task: a prompt of 8 or 16 frames, four responses of different lengths."""
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
            branches.append(model.Span(ids, [1] * len(ids), {"advantage": advantage}))
        trees.append(model.Tree(untrained(prompt), [item], branches))
    return trees


def untrained(ids):
    """A prompt's Span: mask 0, no advantage, no sampler."""
    nothing = [0.0] * len(ids)
    return model.Span(ids, [0] * len(ids), {"advantage": nothing, "sampler": nothing})


def alone(trees):
    """The same sequences without shared prompts: one tree per sequence, in branch order."""
    out = []
    for tree in trees:
        prompt = tree.prefix
        for branch in tree.branches:
            # Only the branches get the sampler's log-probs, later.
            values = {name: prompt.values[name] + of for name, of in branch.values.items()}
            span = model.Span(prompt.ids + branch.ids, prompt.mask + branch.mask, values)
            out.append(model.Tree(span, tree.items))
    return out


def measure(policy, packs, chunk=1024):
    """Packs -> (log-probs of all trained tokens [N], gradient of their advantage-weighted sum [P]),
    fp64 in host memory."""
    logps = []
    for pack in packs:  # gradients add up over packs
        logp, _ = policy(pack, chunk=chunk)  # [n]
        advantage = model.to_device(pack.values["advantage"], logp.device)  # [n]
        (-(logp * advantage).sum()).backward()
        logps.append(logp.detach().double().cpu())
    parameters = model.trained_parameters(policy)
    gradient = flat([p.grad for p in parameters])
    for p in parameters:
        p.grad = None
    return torch.cat(logps), gradient


def flat(shards):
    """Shards of this one rank -> one fp64 vector in host memory."""
    return torch.cat([checkpoint.whole_tensor(x.detach()).double().cpu().flatten() for x in shards])


def compare(table, what, found, wanted, bounds):
    logp, gradient = wanted
    distance = (found[1] - gradient).norm() / gradient.norm()
    table.add(f"{what}: log-probs", (found[0] - logp).abs().mean().item(), bounds[0], "nats, mean")
    table.add(f"{what}: gradient", distance.item(), bounds[1], "relative")


def check_forms(table, name, policy, trees, wanted, bounds):
    """Packed, shared-prefix and chunked forms of the same sequences."""
    plain = model.pack_trees(policy.codec, alone(trees))
    shared = model.pack_trees(policy.codec, trees)
    compare(table, f"{name} packed", measure(policy, [plain]), wanted, bounds)
    compare(table, f"{name} shared prefix", measure(policy, [shared]), wanted, bounds)
    chunked = measure(policy, [shared], chunk=7)  # the last chunk is ragged
    compare(table, f"{name} vocabulary in chunks of 7", chunked, wanted, bounds)


def check_forwards(table, ckpt, codec, trees, source, gpu):
    # The oracle runs in fp32 without packing: one forward per sequence.
    policy = checkpoint.load_sharded(ckpt, codec, torch.device("cpu"))
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    wanted = measure(policy, [model.pack_trees(codec, [tree]) for tree in alone(trees)])
    check_forms(table, "CPU fp32", policy, trees, wanted, FP32)

    # The checks above must be able to fail: other frames must move the log-probs far beyond the
    # bound.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec,
                                           lambda spec: backwards(source.load(spec)))
    found = measure(policy, [model.pack_trees(codec, trees)])
    moved = (found[0] - wanted[0]).abs().mean().item()
    table.add("CPU fp32 sensitivity: bound / effect of other frames", FP32[0] / max(moved, 1e-12),
              0.1, f"{moved:.4f} nats")

    if not gpu:
        table.skip("GPU attention kernels (flex, flash)", "no GPU on this machine")
        return
    policy = checkpoint.load_sharded(ckpt, codec, torch.device("cuda", 0))  # computes in bf16
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    with mock.patch.object(model, "attention_plan", flex_plan):
        check_forms(table, "GPU bf16 flex", policy, trees, wanted, BF16)
    if importlib.util.find_spec("flash_attn_2_cuda"):  # then plain packs use flash-attn
        found = measure(policy, [model.pack_trees(codec, alone(trees))])
        compare(table, "GPU bf16 flash packed", found, wanted, BF16)
    else:
        table.skip("GPU bf16 flash packed", "flash-attn is not installed")


def backwards(frames):
    return replace(frames, images=frames.images[::-1].copy())


def flex_plan(pack, device):
    """model.attention_plan that chooses FlexAttention even if flash-attn is installed."""
    return model.AttentionPlan("flex", pack.layout, mask=model.block_mask(pack, device))


# ------------------------------------------------------------------------------------------------
# Steps and rollouts


def update_settings(pack_tokens=32768):
    flags = f"--ckpt none --temperature 1 --kl 0 --pack-tokens {pack_tokens}"
    return grpo.build_parser().parse_args(flags.split())


def check_steps(table, ckpt, codec, trees, source, device):
    """SFT steps and a GRPO update through FSDP2, as sft.py and grpo.py take them."""
    policy = checkpoint.load_sharded(ckpt, codec, device, recompute="full")
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-3, 0.999, device)
    packs = [model.pack_trees(codec, alone(trees))]
    losses = []
    for _ in range(3):  # the same batch: the loss must fall
        losses.append(sft.backward(policy, packs)[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    table.add(f"{place(device)} SFT: loss after two steps / before", losses[-1] / losses[0], 0.999,
              f"{losses[0]:.3f} -> {losses[-1]:.3f} nats")

    # Read the weights before the forward: after a forward without backward FSDP leaves the root
    # whole.
    before = flat(model.trained_parameters(policy))  # [P]
    # The trainer's own log-probs serve as the sampler's: the importance weight is 1, the gap 0.
    with torch.no_grad():
        logp, _ = policy(model.pack_trees(codec, trees))
    logp = iter(logp.tolist())  # in the order of trees, branches, tokens
    branches = [branch for tree in trees for branch in tree.branches]
    for branch in branches:
        branch.values["sampler"] = [next(logp) for _ in branch.ids]
    tokens = sum(len(branch.ids) for branch in branches)
    stats = grpo.update(policy, None, optimizer, trees, tokens, update_settings())
    after = flat(model.trained_parameters(policy))
    table.add(f"{place(device)} GRPO: log-prob gap of a trainer with itself", stats["gap"],
              0.01 if device.type == "cuda" else 1e-5, "nats, mean")
    moved = bool(after.isfinite().all()) and not torch.equal(before, after)
    table.add(f"{place(device)} GRPO: weights finite and moved", 0.0 if moved else 1.0, 0.0,
              f"gradient norm {stats['grad_norm']:.3f}")
    if device.type == "cpu":
        table.skip("GPU steps under bf16", "no GPU on this machine")


def check_rollouts(table, ckpt, codec, tasks, source, device):
    """Samples episodes and lets the trainer compute their log-probs again."""
    if device.type == "cpu":
        from reference import ReferenceEngine

        table.skip("GPU rollouts with vLLM", "no GPU on this machine; the reference engine runs")
        engine, bound = ReferenceEngine(ckpt, codec), 1e-4
    elif importlib.util.find_spec("vllm"):
        limits = Limits(context=1024, max_frames=16, gpu_memory=0.3, sleeping=True)
        engine, bound = VllmEngine(ckpt, codec, limits), 0.05
    else:
        table.skip("GPU rollouts with vLLM", "vllm is not installed")
        return
    name = f"{place(device)} rollouts ({type(engine).__name__})"
    agent = rollout.Agent(**{**rollout.toy_lengths(), "max_new_tokens": 48, "temperature": 1.0})
    policy = checkpoint.load_sharded(ckpt, codec, device)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)

    sampler = rollout.Sampler(engine, codec, source, agent)
    list(rollout.run(sampler, tasks[:1], 8, step=99))  # compiles, allocates
    began = time.time()
    episodes = list(rollout.run(sampler, tasks, 8, group=8))
    seconds = time.time() - began
    sampled = sum(sum(e.context.mask) + sum(c["sub_tokens"] for c in e.calls) for e in episodes)
    table.add(f"{name}: sampled tokens/s", sampled / seconds, None, f"{len(episodes)} episodes")
    table.add(f"{name}: failed episodes", sum(e.status != "ok" for e in episodes), 0)
    table.add(f"{name}: log-prob gap", gap(policy, episodes), bound, "nats, mean")

    engine.sleep()
    # Move the weights farther than a step would. After the forward only the layers are in shards.
    with torch.no_grad():
        for p in policy.hf.model.language_model.layers.parameters():
            p.mul_(1.5)
    moved = gap(policy, episodes)
    table.add(f"{name}: bound / gap of other weights", bound / max(moved, 1e-12), 0.5,
              "the check could fail")
    began = time.time()
    engine.wake(checkpoint.full_weights(policy, model.compute_dtype(device)))
    table.add(f"{name}: seconds of wake and sync", time.time() - began)
    # Sample as another step, with other seeds. Stale weights or caches would show in the gap.
    episodes = list(rollout.run(sampler, tasks, 8, group=8, step=1))
    table.add(f"{name}: gap after new weights", gap(policy, episodes), bound,
              "nats, mean")
    engine.close()


@torch.no_grad()
def gap(policy, episodes):
    """Mean |log-prob of the engine - of the trainer| over the sampled ids, in nats."""
    trees = []
    for c in (e.context for e in episodes):
        trees.append(model.Tree(model.Span(c.ids, c.mask, {"sampler": c.logps}), c.items))
    pack = model.pack_trees(policy.codec, trees)
    logp, _ = policy(pack)  # [n]
    return (logp.cpu() - pack.values["sampler"]).abs().mean().item()


# ------------------------------------------------------------------------------------------------
# Speed and memory


def seconds_of(function, device, repeats):
    """Median seconds of a call, after two calls that warm up."""
    took = []
    for _ in range(repeats + 2):
        if device.type == "cuda":  # without this the clock measures launches alone
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def ceiling(device):
    """FLOP/s of a large matrix product: bf16 on a GPU, fp32 on CPU."""
    size = 8192 if device.type == "cuda" else 1024
    # As wide as in a real layer, so that the time of launches does not show.
    a = torch.randn(size, size, device=device, dtype=model.compute_dtype(device))
    return 2 * size**3 / seconds_of(lambda: a @ a, device, 20)


def waits(function):
    """How often the host waits for the GPU during a call, by torch's own debug mode."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        function()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def training_flops(text, layers, tokens, trained, pairs):
    """FLOPs of forward and backward: 6 per token and weight of the layers (`layers` weights), 6 per
    trained token and weight of the head, 12 per visible (query, key) pair, head dimension and
    layer. Recomputed work does not count, and a shared prompt counts once."""
    weights = layers * tokens + text.vocab_size * text.hidden_size * trained
    # 12: two products forward (scores, values), four backward, 2 FLOPs per multiply-add.
    width = text.num_attention_heads * text.head_dim * text.num_hidden_layers
    return 6 * weights + 12 * pairs * width


def tree_pairs(prompt, responses=()):
    """Number of visible (query, key) pairs of one tree; lengths in tokens."""
    return prompt * (prompt + 1) // 2 + sum(r * prompt + r * (r + 1) // 2 for r in responses)


def words(n, rng):
    return [rng.randrange(300, 500) for _ in range(n)]


def random_group(prompt, response, group, rng):
    """A tree of random tokens; lengths in tokens."""
    branches = []
    for i in range(group):
        values = {"advantage": [(-1.0) ** i] * response, "sampler": [-12.0] * response}
        branches.append(model.Span(words(response, rng), [1] * response, values))
    return model.Tree(untrained(words(prompt, rng)), [], branches)


def check_geometry(table, name, config, codec, device, top, chats=8, length=4096, groups=3,
                   prompt=4000, response=800, group=8):  # fmt: skip
    """Times steps of a model with random weights: packed SFT of `chats` chats of `length` tokens,
    an eighth of them trained, and a GRPO update of `groups` groups. top: FLOP/s at which MFU is
    1."""
    from transformers import Qwen3VLForConditionalGeneration

    gc.collect()  # hooks tie the previous model into reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    layers, text = plan.parameter_counts(config)["layers"], config.text_config
    with device:  # fp32, made on the device, so that host memory holds no copy
        hf = Qwen3VLForConditionalGeneration(config)
    policy = checkpoint.shard(model.as_policy(hf, codec, device, "full"), device)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, device)
    rng = random.Random(0)  # the sequences are text: no frames, no tower

    mask = [0] * (length - length // 8) + [1] * (length // 8)
    sequences = [model.Tree(model.Span(words(length, rng), mask)) for _ in range(chats)]
    packs = [model.pack_trees(codec, sequences)]

    def sft_step():
        sft.backward(policy, packs)
        model.clip_gradients(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tokens = chats * length
    flops = training_flops(text, layers, tokens, chats * (length // 8), chats * tree_pairs(length))
    time_step(table, f"{name} packed SFT", sft_step, tokens, flops / top, device)

    trees = [random_group(prompt, response, group, rng) for _ in range(groups)]
    sampled = groups * group * response
    settings = update_settings(pack_tokens=chats * length)  # all groups in one pack

    def grpo_step():
        grpo.update(policy, None, optimizer, trees, sampled, settings)

    tokens, pairs = groups * prompt + sampled, groups * tree_pairs(prompt, [response] * group)
    flops = training_flops(text, layers, tokens, sampled, pairs)
    time_step(table, f"{name} GRPO update", grpo_step, tokens, flops / top, device)

    if device.type == "cuda":
        seen = torch.cuda.max_memory_allocated()
        planned = plan.peak(plan.ledger(config, 1, chats * length, reference=False,
                                        feature_cache_gb=0.0))
        table.add(f"GPU {name}: plan / peak memory, distance from 1", abs(planned / seen - 1), 0.1,
                  f"{planned / 1e9:.1f} GB planned, {seen / 1e9:.1f} GB seen")


def time_step(table, what, step, tokens, ideal, device):
    """Adds the speed of `step`. ideal: seconds that the step would take at the measured ceiling."""
    seconds = seconds_of(step, device, 5)
    table.add(f"{place(device)} {what}: tokens/s", tokens / seconds, None,
              f"{tokens} tokens, {seconds:.2f} s")
    table.add(f"{place(device)} {what}: MFU", ideal / seconds)
    if device.type == "cuda":
        table.add(f"GPU {what}: waits of the host for the GPU", waits(step))


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("--out", default=None, help="also write the JSON line to this file")
    args = parser.parse_args()
    began, table = time.time(), Table()
    _, _, device = launch.start_process_group()
    gpu = device.type == "cuda"
    card = torch.cuda.get_device_name(device) if gpu else None
    print(f"torch {torch.__version__} | {card or 'no GPU'} | {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        ckpt = os.path.join(folder, "init")
        tasks, source = make_world(ckpt)
        codec = chat.load_codec(ckpt)
        trees = make_trees(codec, tasks, source)
        table.run(check_forwards, ckpt, codec, trees, source, gpu)
        table.run(check_steps, ckpt, codec, trees, source, device)
        table.run(check_rollouts, ckpt, codec, tasks, source, device)

        launch.start_process_group()  # closing vLLM has ended the process group
        top = ceiling(device)
        table.add(f"{place(device)} matrix product: TFLOP/s, where MFU is 1", top / 1e12)
        if gpu:
            for size in ("2B", "4B"):
                config = plan.read_config(size)
                table.run(check_geometry, size, config, codec, device, top)
        else:
            config = plan.read_config(ckpt)
            # chats, length, groups, prompt, response, group
            table.run(check_geometry, "toy", config, codec, device, top, 4, 128, 1, 100, 20, 4)
    verdicts = {kind: [row["what"] for row in table.rows if row["verdict"] == kind]
                for kind in ("FAIL", "skipped")}
    rows = [{**row, "value": None if row["value"] != row["value"] else row["value"]}
            for row in table.rows]  # JSON has no NaN
    line = json.dumps({"gpu": card, "torch": torch.__version__, "failed": verdicts["FAIL"],
                       "skipped": verdicts["skipped"], "seconds": round(time.time() - began, 1),
                       "rows": rows})
    print(line)
    if args.out:
        launch.write_atomic(args.out, line + "\n")
    torch.distributed.destroy_process_group()
    sys.exit(1 if verdicts["FAIL"] else 0)


if __name__ == "__main__":
    main()
