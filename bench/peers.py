"""
peers.py: compares our code in one run with the usual alternatives, TRL's GRPOTrainer and
qwen-vl-utils' fetch_video.

Each row names their side | our side:
  update    one optimiser step over one group: TRL's training_step after its generation |
            grpo.update on the shared-prefix tree
  step      generation of the group and that update: TRL with transformers' generate | rollout.py
            with vLLM, grpo.update, and the sync of weights to the engine
  rollouts  the generation alone
  video     64 overview frames of a file, five crops spread over the file, five crops that overlap:
            fetch_video with the default reader, one crop after the other | video.py with the
            decoders of one rank of a training run, and the crops as rollout.py asks for them. Both
            sides return equally many frames of equal size, but their rules choose different times
            (ours: centres of segments). snapped: our side takes key frames
  floor     the matrix products alone of a plain forward and backward over that group, each token
            once, without the vision tower, at the rate of a large matrix product on this machine

Both sides train the same checkpoint on one prompt of --images pictures (32 x 32 pixels, one vision
token each) and --prompt tokens. A group has --group responses of exactly --response sampled tokens,
because the end of turn is forbidden. Both use AdamW, no KL, fp32 and all cores. This script makes
a separate environment for TRL (--peers DIR, kept for the next run). Before each step TRL waits for
a line of input, so that the sides alternate. The script prints medians as one line of JSON.

--lora RANK: both sides train only adapters, on the same matrices; TRL uses peft.

Peers: trl 1.16.0 (with accelerate 1.15.0, datasets 5.2.0, peft 0.21.2), qwen-vl-utils 0.0.14.

  python bench/peers.py --ckpt out/demo/toy/init --peers peers_out
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch

import chat
import checkpoint
import grpo
import launch
import model
import rollout
import video
from bench import step_model
from engine import Limits, VllmEngine
from tools import plan


def pictures(count):
    """[N, 32, 32, 3]: the prompt of both sides."""
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


# ------------------------------------------------------------------------------------------------
# TRL's side, in a separate process


def train_trl(args):
    """Trains with TRL, one step for every line on standard input. Prints a JSON line per step:
    seconds of the generation, of the update, of the whole step."""
    launch.import_shim()
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    images = [Image.fromarray(image) for image in pictures(args.images)]
    content = []
    for i in range(args.images):
        content += [{"type": "text", "text": f"<{i}.0 seconds>"}, {"type": "image"}]
    content.append({"type": "text", "text": args.filler})
    row = {"prompt": [{"role": "user", "content": content}], "images": images}  # in every step
    seen = {}  # numbers of the current step

    class Waiting(GRPOTrainer):
        def _generate_and_score_completions(self, *given, **named):
            began = time.perf_counter()
            out = super()._generate_and_score_completions(*given, **named)
            seen["generate_s"] = time.perf_counter() - began
            seen["tokens"] = int(out["completion_mask"].sum())
            seen["prompt"] = int(out["prompt_mask"].sum() / len(out["prompt_mask"]))
            return out

        def training_step(self, *given, **named):
            sys.stdin.readline()
            began = time.perf_counter()
            out = super().training_step(*given, **named)
            seen["step_s"] = time.perf_counter() - began
            return out

    class Clock(TrainerCallback):  # the optimiser steps after training_step
        def on_pre_optimizer_step(self, *_, **__):
            self.began = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            seen["step_s"] += time.perf_counter() - self.began
            seen["update_s"] = seen["step_s"] - seen["generate_s"]
            print("STEP " + json.dumps(seen), flush=True)

    def reward(completions, **_):
        return [float(i % 3) for i in range(len(completions))]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, per_device_train_batch_size=args.group, num_generations=args.group,
            max_completion_length=args.response, max_steps=args.repeats + 1, temperature=1.0,
            generation_kwargs={"min_new_tokens": args.response}, beta=0.0, learning_rate=1e-6,
            use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True)
        policy = Qwen3VLForConditionalGeneration.from_pretrained(args.ckpt, dtype=torch.float32)
        adapters = None
        if args.lora:
            from peft import LoraConfig

            names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()  # no tower's
            adapters = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=names)
        Waiting(model=policy, peft_config=adapters, reward_funcs=reward, args=config,
                callbacks=[Clock()], train_dataset=Dataset.from_list([row] * 64),
                processing_class=AutoProcessor.from_pretrained(
                    args.ckpt, trust_remote_code=False)).train()


def make_peers(folder):
    """Makes an environment that sees the packages of this one and adds the peers -> its python."""
    python = os.path.join(folder, "bin", "python")
    ready = os.path.join(folder, "ready")
    if not os.path.exists(ready):
        import site

        venv.create(folder, with_pip=True)
        with open(os.path.join(packages(folder), "ours.pth"), "w") as f:
            f.write(site.getsitepackages()[0] + "\n")
        # --no-deps keeps torch and transformers of this environment.
        wanted = ["trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "qwen-vl-utils==0.0.14",
                  "peft==0.21.2", "dill", "multiprocess", "xxhash", "pandas", "python-dateutil",
                  "pytz", "tzdata", "six", "aiohttp", "pyarrow", "psutil", "httpx"]
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *wanted], check=True)
        open(ready, "w").close()
    return python


def packages(folder):
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return os.path.join(folder, "lib", version, "site-packages")


# ------------------------------------------------------------------------------------------------
# Our side


class Stills(rollout.Source):
    """A Source whose root is the Frames of every task."""

    def load(self, spec):
        return self.root

    def duration(self, spec):
        return float(len(self.root.seconds))

    def film(self, spec):
        return None


def our_step(args):
    """-> a function of the step's number that runs generation, update and weight sync of one group
    with the same settings as TRL."""
    _, _, device = launch.start_process_group()
    codec = chat.load_codec(args.ckpt)
    codec = replace(codec, banned=(*codec.banned, codec.eos))  # every response has the full length
    seconds = np.arange(args.images, dtype=float)
    keys = [f"still{i}" for i in range(args.images)]
    source = Stills(video.Frames(pictures(args.images), seconds, "stills", keys), None)
    policy = checkpoint.load_sharded(args.ckpt, codec, device, lora=args.lora)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, device)
    context = args.prompt + args.response + 64
    engine = VllmEngine(args.ckpt, codec, Limits(context, args.images, max_seqs=args.group))
    agent = rollout.Agent(temperature=1.0, max_new_tokens=args.response, context=context,
                          tools=False, think_prefix=False)
    sampler = rollout.Sampler(engine, codec, source, agent)
    task = {"id": "t", "video": "stills", "question": args.filler, "answer": "x", "type": "open"}
    flags = "--ckpt none --data none --temperature 1 --kl 0 --pack-tokens 1000000"
    settings = grpo.build_parser().parse_args(flags.split())

    def step(number):
        clock = [time.perf_counter()]
        episodes = list(rollout.run(sampler, [task], args.images, args.group, number))
        clock.append(time.perf_counter())
        for i, episode in enumerate(episodes):
            episode.advantage = {"task": float(i % 3) - 1.0, "fmt": 0.0}
        tree = grpo.group_tree(episodes, "none")
        tokens = sum(sum(episode.context.mask) for episode in episodes)
        policy.features.cache.clear()  # a new prompt every step, as in training
        grpo.update(policy, None, optimizer, [tree], tokens, settings)
        clock.append(time.perf_counter())
        engine.wake(checkpoint.full_weights(policy))  # TRL's generate has them already
        clock.append(time.perf_counter())
        return {"step_s": clock[3] - clock[0], "generate_s": clock[1] - clock[0],
                "update_s": clock[2] - clock[1], "tokens": tokens,
                "prompt": episodes[0].spans[0][0]}

    return step


def compare_trainers(args):
    """TRL and grpo.py in turns -> ratios of medians."""
    words = [make_peers(args.peers), os.path.abspath(__file__), "--role", "trl"]
    for name in ("ckpt", "filler", "images", "prompt", "response", "group", "repeats", "lora"):
        words += [f"--{name}", str(getattr(args, name))]
    step = our_step(args)
    # TRL's start-up shares the cores with our first round, which is dropped.
    trl = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows = {"trl": [], "ours": []}
    for repeat in range(args.repeats + 1):
        trl.stdin.write("go\n")
        trl.stdin.flush()
        line = next((line for line in trl.stdout if line.startswith("STEP ")), None)
        if line is None:
            sys.exit(f"TRL ended with {trl.wait()} before its step {repeat}")
        rows["trl"].append(json.loads(line[5:]))
        rows["ours"].append(step(repeat))
        print(f"round {repeat}: {rows['trl'][-1]} | {rows['ours'][-1]}", file=sys.stderr)
    trl.stdin.close()
    trl.wait()
    median = {side: {name: statistics.median(row[name] for row in found[1:]) for name in found[0]}
              for side, found in rows.items()}  # the first round warms up
    ratio = {of: round(median["trl"][name] / median["ours"][name], 2) for of, name in
             (("update", "update_s"), ("step", "step_s"), ("rollouts", "generate_s"))}
    prompt, tokens = round(median["ours"]["prompt"]), round(median["ours"]["tokens"])
    if not args.lora:  # frozen weights have no gradient
        median["floor"] = {"update_s": floor_seconds(args.ckpt, prompt, tokens // args.group,
                                                     args.group)}
    return {**ratio, **median}


def floor_seconds(ckpt, prompt, response, group):
    """`floor` of the header, in seconds; lengths in tokens."""
    config = plan.read_config(ckpt)
    flops = step_model.training_flops(
        config.text_config, plan.parameter_counts(config)["layers"], prompt + group * response,
        group * response, step_model.tree_pairs(prompt, [response] * group))
    return flops / ceiling()


def ceiling(size=1024):
    """FLOP/s of a large matrix product in fp32."""
    a = torch.randn(size, size)
    took = []
    for _ in range(22):
        began = time.perf_counter()
        a @ a
        took.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(took[2:])  # the first two warm up


def make_checkpoint(ckpt, folder):
    """A copy with room for long contexts -> its folder."""
    copy = shutil.copytree(checkpoint.resolve_checkpoint(ckpt), os.path.join(folder, "ckpt"))
    path = os.path.join(copy, "config.json")
    with open(path) as f:
        config = json.load(f)
    for part in (config, config["text_config"]):
        part["max_position_embeddings"] = 32768
    launch.write_atomic(path, json.dumps(config, indent=2))
    return copy


def filler(ckpt, prompt, images):
    """-> words that fill a prompt with so many pictures up to about `prompt` tokens. The lengths of
    a word and of a picture with a time are counted with this checkpoint's tokenizer."""
    codec = chat.load_codec(ckpt)
    word = len(chat.encode(codec, "frame " * 400)) / 400  # tokens
    picture = len(chat.encode(codec, "<12.0 seconds>")) + 3
    return "frame " * max(1, int((prompt - picture * images) / word))


# ------------------------------------------------------------------------------------------------
# Videos


def make_clip(path, codec, width, height):
    """Encodes 20 seconds that are as hard to decode as a film: a camera pans over a picture with
    the spectrum of natural pictures, and every frame has other grain. 24 frames a second, a key
    frame every ten seconds, preset `medium`."""
    import av

    rng = np.random.default_rng(0)
    shape = (height + 64, width + 64)
    rows, columns = np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None]
    fall = np.maximum(np.hypot(rows, columns), 1 / max(shape)) ** -0.9  # amplitude by frequency
    waves = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) * fall, shape)
             for _ in range(3)]
    picture = np.stack([128 + 40 * wave / wave.std() for wave in waves], -1)
    grain = rng.standard_normal((*shape, 1)) * 2.5
    options = {"g": "240", "preset": "medium", "x265-params": "log-level=none"}
    with av.open(path, "w") as container:
        stream = container.add_stream(f"lib{codec}", rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(480):
            down, right = int(32 + 31 * np.sin(i / 40)), int(32 + 31 * np.sin(i / 70))
            y, x = rng.integers(64, size=2)
            seen = picture[down:down + height, right:right + width]
            seen = np.clip(seen + grain[y:y + height, x:x + width], 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(seen, format="rgb24")))
        container.mux(stream.encode())


def make_video(path, clip, seconds):
    """Repeats the packets of a clip of 20 seconds, because to encode an hour would take hours."""
    import av

    with av.open(clip) as source, av.open(path, "w") as target:
        stream = source.streams.video[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        times = [(packet.pts, packet.dts) for packet in packets]
        copy = target.add_stream_from_template(stream)
        for n in range(seconds // 20):
            shift = int(n * 20 / stream.time_base)
            for packet, (pts, dts) in zip(packets, times):
                packet.stream, packet.time_base = copy, stream.time_base
                packet.pts, packet.dts = pts + shift, dts + shift
                target.mux(packet)


def windows(kind, seconds):
    """Five crops of ten seconds: spread over a film, or around the middle, as if a model asked
    again."""
    first, last = (5, seconds - 15) if kind == "crops" else (seconds / 2 - 8, seconds / 2 + 8)
    return [(start, start + 10.0) for start in np.linspace(first, last, 5)]


def fetch(path, kind, seconds):
    """qwen-vl-utils' side -> [frames [T, 3, H, W]], one entry per look."""
    from qwen_vl_utils.vision_process import fetch_video

    looks = [{"nframes": 64}]
    if kind in ("crops", "overlapping"):
        looks = [{"video_start": a, "video_end": b, "fps": 1.0, "min_frames": 4}
                 for a, b in windows(kind, seconds)]
    size = {"min_pixels": 1024, "max_pixels": 50176, "total_pixels": 64 * 50176 * 2}
    return [fetch_video({"video": path, **look, **size}, image_patch_size=16) for look in looks]


def read(path, kind, seconds):
    """Our side -> [frames [T, H, W, 3]], one entry per look, with the settings of training."""
    threads = video.decode_threads()
    # A new cache knows no frame of the file. Decoders are processes, which live on in training.
    cache = video.FrameCache(timeout=60.0, workers=threads)
    cache.decoders.idle = read.children
    if kind in ("overview", "snapped"):
        return [video.overview(path, 64, cache=cache, snap=kind == "snapped").images]
    specs = [{"video": path, "start": a, "end": b} for a, b in windows(kind, seconds)]
    with ThreadPoolExecutor(threads) as pool:  # as rollout.py asks for them
        return [frames.images for frames in pool.map(partial(video.load, cache=cache), specs)]


read.children = []


def compare_videos(args):
    """Runs fetch_video and video.py in turns on each kind of film -> {film: {kind: ratio, ...}}."""
    make_peers(args.peers)
    sys.path.append(packages(args.peers))
    launch.import_shim()
    from qwen_vl_utils.vision_process import get_video_reader_backend

    out = {"reader": get_video_reader_backend(), "seconds": args.video_seconds}
    for film in args.films:
        codec, size = film.split(":")
        clip = os.path.join(args.peers, f"{codec}_{size}.mp4")
        if not os.path.exists(clip):
            make_clip(clip + ".part.mp4", codec, *map(int, size.split("x")))
            os.replace(clip + ".part.mp4", clip)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "film.mp4")
            make_video(path, clip, args.video_seconds)
            out[film] = {kind: compare_looks(path, kind, args)
                         for kind in ("overview", "snapped", "crops", "overlapping")}
        print(f"{film}: {out[film]}", file=sys.stderr)
    return out


def compare_looks(path, kind, args):
    """One file and kind of look -> ratio of medians, medians, frames and sizes of both sides."""
    seconds, shapes = {fetch: [], read: []}, {}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for side in (fetch, read)[:: 1 if repeat % 2 else -1]:
            began = time.perf_counter()
            frames = side(path, kind, args.video_seconds)
            seconds[side].append(time.perf_counter() - began)
            shapes[side] = [len(x) for x in frames] + [list(frames[0].shape[1:])]
    theirs, ours = (statistics.median(seconds[side][1:]) for side in (fetch, read))
    return {"ratio": round(theirs / ours, 2), "fetch_video_s": round(theirs, 3),
            "video_py_s": round(ours, 3), "fetch_video": shapes[fetch], "video_py": shapes[read]}


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--ckpt", help="toy checkpoint; not for --only video")
    add("--peers", default="peers_out", help="folder of the peers' environment, made if missing")
    add("--only", choices=["trainer", "video"], default=None, help="one part; default: both")
    add("--images", type=int, default=64, help="pictures of the prompt")
    add("--prompt", type=int, default=4000, help="approximate tokens of the prompt")
    add("--response", type=int, default=800, help="sampled tokens of each response")
    add("--group", type=int, default=8, help="responses")
    add("--lora", type=int, default=0, help="rank of adapters on both sides; 0 = whole models")
    add("--repeats", type=int, default=3, help="measured rounds; medians are reported")
    add("--video-seconds", type=int, default=600, help="length of the films")
    add("--films", nargs="+", default=["x264:1280x720", "x264:1920x1080", "x265:1280x720"],
        help="encoder and size of each")
    add("--role", choices=["trl"], default=None, help=argparse.SUPPRESS)
    add("--filler", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.ckpt and args.only != "video":
        parser.error("--ckpt: a toy checkpoint, for all but --only video")
    if args.role == "trl":
        train_trl(args)
        return
    out = {"bench": "peers", "cores": len(os.sched_getaffinity(0)),
           "load": round(os.getloadavg()[0], 2)}
    if args.only != "video":
        with tempfile.TemporaryDirectory() as folder:
            args.ckpt = make_checkpoint(args.ckpt, folder)
            args.filler = filler(args.ckpt, args.prompt, args.images)
            out["trainer"] = compare_trainers(args)
    if args.only != "trainer":
        out["video"] = compare_videos(args)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
