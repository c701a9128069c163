"""
What the parts of a GPU day share: the checkpoint of the 2B's geometry, the batch, peaks, result files.

Everything is random: weights, pictures, responses. Speed depends on sizes alone. --dry is the same code
on a CPU with a tiny geometry: it shows that a script runs, its numbers mean nothing.
"""
import argparse
import faulthandler
import gc
import inspect
import json
import os
import random
import shutil
import statistics
import sys
import time
from types import SimpleNamespace

sys.path.insert(0, os.environ.get("REPO") or os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if "--dry" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: launch.use_gpu and the engine then take the CPU
import chat  # noqa: F401  (first: it says if torch is missing)
import numpy as np
import torch

import grpo
import launch
import model
import rollout
import toy
import video
from plumbing import checkpoint  # noqa: F401  (the parts take it from here)

if "recompile_limit" not in inspect.signature(torch.compile).parameters:  # torch 2.11: a setting, no argument
    import torch._dynamo

    torch._dynamo.config.recompile_limit, torch_compile = 64, torch.compile
    # For model.compiled_flex.
    torch.compile = lambda *given, recompile_limit=None, **named: torch_compile(*given, **named)

HERE = os.path.dirname(os.path.abspath(__file__))
CARD = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
PEAK = 989e12  # H100 SXM and H200 by their datasheets: dense bf16 FLOP/s
BANDWIDTH = 4.8e12 if "H200" in CARD else 3.35e12  # bytes/s; H200, H100
PUBLISHED_2B = {  # the sizes in config.json of Qwen/Qwen3-VL-2B-Instruct
    "tie_word_embeddings": True,
    "text_config": dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16,
                        num_key_value_heads=8, head_dim=128, intermediate_size=6144),
    "vision_config": dict(depth=24, hidden_size=1024, num_heads=16, intermediate_size=4096, in_channels=3,
                          deepstack_visual_indexes=[5, 11, 17], num_position_embeddings=2304, out_hidden_size=2048,
                          patch_size=16, temporal_patch_size=2, spatial_merge_size=2)}
TINY = {  # 2B's shape in small: GQA, three deepstack levels, tied
    "tie_word_embeddings": True,
    "text_config": dict(vocab_size=2048, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=32, intermediate_size=128),
    "vision_config": dict(depth=3, hidden_size=32, num_heads=2, intermediate_size=64, in_channels=3,
                          deepstack_visual_indexes=[0, 1, 2], num_position_embeddings=64, out_hidden_size=64,
                          patch_size=16, temporal_patch_size=2, spatial_merge_size=2)}


class Result:
    """Rows of one part, written to OUT/part.json after each row: a part may be ended at its limit."""

    def __init__(self, args, part):
        os.makedirs(args.out, exist_ok=True)
        self.path, self.began = os.path.join(args.out, f"{part}.json"), time.time()
        self.rows = {"device": CARD, "torch": torch.__version__, "dry": args.dry, "argv": sys.argv[1:]}
        for name in ("transformers", "triton", "vllm", "trl"):
            try:
                from importlib import metadata

                self.rows[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                pass
        faulthandler.dump_traceback_later(args.limit, exit=True)

    def add(self, name, value):
        value = round(value, 5) if isinstance(value, float) else value
        self.rows[name] = value
        self.rows["at_s"] = round(time.time() - self.began, 1)
        launch.write_atomic(self.path, json.dumps(self.rows, indent=1) + "\n")
        print(f"[{self.rows['at_s']:6.1f} s] {name}: {json.dumps(value) if isinstance(value, dict) else value}",
              flush=True)


def parser(doc, limit):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    p.add_argument("--out", default=os.environ.get("OUT", "gpu_day_out"))
    p.add_argument("--limit", type=float, default=limit, help="seconds after which the part ends itself")
    p.add_argument("--work", default=None, help="folder of the random checkpoint; default: the roomiest of "
                   "/dev/shm and /tmp")
    p.add_argument("--prompts", type=int, default=4)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--frames", type=int, default=64)
    p.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    p.add_argument("--response", type=int, default=300, help="sampled tokens of a rollout")
    p.add_argument("--rounds", type=int, default=3)
    return p


def parse(p):
    args = p.parse_args()
    if args.dry:
        args.frames, args.prompt, args.response, args.group = min(args.frames, 4), 256, 24, 3
        args.prompts, args.rounds = 2, 1
    args.side = 64 if args.dry else 224  # pixels of a frame: 49 tokens, 196 patches
    if args.work is None:
        room = {p: shutil.disk_usage(p).free for p in ("/dev/shm", "/tmp") if os.path.isdir(p)}
        args.work = os.path.join("/dev/shm" if room.get("/dev/shm", 0) > 12e9 else "/tmp", "gpu_day")
    os.makedirs(args.work, exist_ok=True)
    return args


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device, function):
    sync(device)
    began = time.perf_counter()
    out = function()
    sync(device)
    return time.perf_counter() - began, out


def geometry(args):
    return TINY if args.dry else PUBLISHED_2B


def make_checkpoint(args, device):
    """-> (folder, {what: seconds}). Random weights made on the device, in bf16; made once."""
    folder, seconds = os.path.join(args.work, "tiny" if args.dry else "2B"), {}
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder, seconds
    launch.import_shim()
    import transformers

    small, temp = os.path.join(HERE, "small"), folder + ".part"
    shutil.rmtree(temp, ignore_errors=True)
    began = time.perf_counter()
    if not os.path.exists(small):  # made on a CPU before the day: it takes seconds, and travels
        world = SimpleNamespace(base="qwen3_vl", seed=0, scenes=4, crop_response="summary", fragile=False)
        toy.build_init(small, random.Random(0), world)  # its tokenizer, template and processor serve
        for name in os.listdir(small):
            if name.endswith(".safetensors"):
                os.remove(os.path.join(small, name))
    seconds["small files"] = time.perf_counter() - began
    marks = json.load(open(os.path.join(small, "config.json")))
    sizes = json.loads(json.dumps(geometry(args)))
    half = sizes["text_config"]["head_dim"] // 2
    section = [half - 2 * (half * 20 // 64), half * 20 // 64, half * 20 // 64]
    sizes["text_config"] |= {"max_position_embeddings": 32768, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": section, "mrope_interleaved": True}}
    ids = {k: v for k, v in marks.items() if k.endswith("_token_id")}
    config = transformers.Qwen3VLConfig(text_config=sizes["text_config"], vision_config=sizes["vision_config"],
                                        tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if args.dry else torch.bfloat16)
    try:
        with device:
            seconds["weights"], hf = timed(device, lambda: transformers.Qwen3VLForConditionalGeneration(config))
    finally:
        torch.set_default_dtype(default)
    # No vector of zeros: a bias that is never read must not look like one that is.
    began = time.perf_counter()
    hf.save_pretrained(temp, max_shard_size="1GB")
    for name in os.listdir(small):
        if not name.endswith(".safetensors") and name not in ("config.json", "README.md"):
            shutil.copy(os.path.join(small, name), temp)
    os.rename(temp, folder)
    seconds["save"] = time.perf_counter() - began
    del hf
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder, {k: round(v, 2) for k, v in seconds.items()}


# ------------------------------------------------------------------------------------------------
# The batch


class Stills(rollout.VideoSource):
    """Random pictures in memory, for overviews and for windows: no decoder takes part."""

    def __init__(self, args):
        super().__init__("", None)
        self.args, self.sets = args, {}

    def load(self, spec):
        name = json.dumps(spec, sort_keys=True)
        if name not in self.sets:
            if "frames" in spec:
                times = np.arange(float(spec["frames"]))
            else:
                times = np.linspace(spec["start"], spec["end"], min(16, self.args.frames), endpoint=False)
            draw = np.random.default_rng(abs(launch.stable_hash(name)) % 2**32)
            side = self.args.side
            images = draw.integers(0, 256, (len(times), side, side, 3), dtype=np.uint8)
            self.sets[name] = video.Frames(images, times, name, [f"{name}/{t:.3f}" for t in times])
        return self.sets[name]

    def load_overview(self, spec, task):
        return self.load(spec), 600.0, ""


def tasks(args, codec):
    """Tasks whose prompts have about args.prompt tokens."""
    rows = [{"id": f"t{i}", "video": f"v{i}", "question": "q", "answer": "x", "type": "open"}
            for i in range(args.prompts)]
    source = Stills(args)
    length = len(prompt_ids(args, codec, rows[0], source)[0])
    word = len(chat.encode(codec, "frame " * 200)) / 200
    for row in rows:
        row["question"] = "frame " * max(1, int((args.prompt - length) / word))
    return rows, source


def prompt_ids(args, codec, task, source):
    spec = source.overview_spec(task, args.frames)
    item = chat.vision_item(spec, source.load(spec))
    ids, _ = chat.encode_prompt(codec, rollout.main_messages(task, args.frames), [item], rollout.tool_schema())
    return ids + chat.think_prefix_ids(codec, ids), item


def batch(args, codec, lengths=None):
    """-> (trees of the groups, their source). Responses are random ids with advantages of sum 0; the engine's
    log-probs are those of a uniform policy, which random weights almost are."""
    rows, source = tasks(args, codec)
    draw, vocab, trees = np.random.default_rng(0), len(codec.token_bytes), []
    banned, uniform = {*codec.suppress_tokens, codec.eos}, -float(np.log(geometry(args)["text_config"]["vocab_size"]))
    allowed = np.array([i for i in range(vocab) if i not in banned])
    for row in rows:
        ids, item = prompt_ids(args, codec, row, source)
        branches = []
        for g in range(args.group):
            n = args.response if lengths is None else lengths[len(trees) * args.group + g]
            values = {"advantage": [2.0 * g / (args.group - 1) - 1.0] * n, "sampling": [uniform] * n, "turn": [1] * n}
            branches.append(model.TokenSpan(draw.choice(allowed, n).tolist(), [1] * n, values))
        trees.append(model.Tree(model.TokenSpan(ids, [0] * len(ids)), [item], branches))
    return trees, source


def settings(*more):
    flags = "--ckpt none --data none --temperature 1 --beta 0 --pack-tokens 49152".split()
    return grpo.build_parser().parse_args([*flags, *map(str, more)])


# ------------------------------------------------------------------------------------------------
# Operations


def sizes(args):
    """-> (parameters of the decoder layers, of the head, of the tower)."""
    text, vision = (SimpleNamespace(**geometry(args)[part]) for part in ("text_config", "vision_config"))
    hidden, d = text.hidden_size, text.head_dim
    # Rows of the matrices of a layer: queries, keys, values, output (as columns), the three of the MLP.
    rows = 2 * text.num_attention_heads * d + 2 * text.num_key_value_heads * d + 3 * text.intermediate_size
    body = text.num_hidden_layers * (hidden * rows + 2 * hidden + 2 * d)  # and four norms
    width, inner = vision.hidden_size, vision.intermediate_size
    merged, out = vision.spatial_merge_size**2 * width, vision.out_hidden_size
    levels = len(vision.deepstack_visual_indexes)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tower = ((patch + 1 + vision.num_position_embeddings + 2) * width + 2 * levels * merged
             + vision.depth * (4 * width * width + 2 * width * inner + 9 * width + inner)
             + (1 + levels) * (merged * merged + merged + merged * out + out))
    return body, text.vocab_size * hidden, tower


def step_flops(args, trees, shared=True):
    """Least operations of a step without recomputation: forward and backward of the decoder, forward of the
    frozen tower. shared: each prompt once, else once per rollout."""
    body, head, tower = sizes(args)
    text = geometry(args)["text_config"]
    width, layers = text["num_attention_heads"] * text["head_dim"], text["num_hidden_layers"]
    tokens = pairs = trained = patches = 0
    for tree in trees:
        p, lengths = len(tree.prefix.ids), [len(b.ids) for b in tree.branches]
        copies = 1 if shared else len(lengths)
        tokens += copies * p + sum(lengths)
        pairs += copies * p * p / 2 + sum(n * p + n * n / 2 for n in lengths)
        trained += sum(lengths)
        patches += copies * sum(i.frames * (i.height // 16) * (i.width // 16) for i in tree.items)
    decoder = 3 * (2 * body * tokens + 2 * head * trained + 4 * pairs * width * layers)
    return decoder + 2 * tower * patches, tokens


def median(values):
    return statistics.median(values)
