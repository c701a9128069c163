"""
bench_peers.py: what people would use instead, side by side in one run: TRL's GRPOTrainer, qwen-vl-utils' fetch_video. Prints ONE line of JSON.

  update    one optimiser step over one group: TRL's training_step behind its generation | grpo.update on the shared-prefix tree
  step      generation of the group and that update: TRL with transformers' generate | rollout.py with --engine, grpo.update
  rollouts  the generation alone, as rollouts per second
  video     overview of 64 frames of one file, and five crops of it: fetch_video, one after the other | video.py, all cores, the crops at
            once as rollout.py asks for them. Both give as many frames of the same size; which ones differs by rule (centres of segments here)

Both sides: the same checkpoint, one prompt of --images pictures (32 x 32 pixels, one vision token each) and --prompt tokens, a group of
--group, exactly --response sampled tokens each (the end of turn is forbidden), AdamW, no KL, fp32, all cores. TRL runs in an environment
of its own, which this script makes (--peers DIR, kept for the next run); it waits at each step for a word, so that the sides alternate.

Peers: trl 1.16.0 (with accelerate 1.15.0, datasets 5.2.0), qwen-vl-utils 0.0.14.

  python tests/bench_peers.py --ckpt out/demo/toy/init --peers peers_out
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
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


def pictures(count):
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)  # [N, 32, 32, 3]


# ---------------------------------------------------------------------------------------------------------------------
# TRL's side, in its own process


def peer(args):
    """Train with TRL, one step for every line on standard input; a JSON line for each: seconds of generation and of the whole step."""
    import model

    model.import_shim()
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
    from trl import GRPOConfig, GRPOTrainer

    images = [Image.fromarray(image) for image in pictures(args.images)]
    parts = [part for i in range(args.images) for part in ({"type": "text", "text": f"<{i}.0 seconds>"}, {"type": "image"})]
    rows = [{"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": args.filler}]}], "images": images} for _ in range(64)]
    processor = AutoProcessor.from_pretrained(args.ckpt)
    policy = Qwen3VLForConditionalGeneration.from_pretrained(args.ckpt, dtype=torch.float32)
    marks, real = {}, GRPOTrainer._generate_and_score_completions

    def generate(trainer, *given, **named):
        began = time.perf_counter()
        out = real(trainer, *given, **named)
        marks["generate_s"], marks["tokens"] = time.perf_counter() - began, int(out["completion_mask"].sum())
        marks["prompt"] = int(out["prompt_mask"].sum() / len(out["prompt_mask"]))
        return out

    def step(trainer, *given, **named):
        sys.stdin.readline()
        began = time.perf_counter()
        out = GRPOTrainer.training_step(trainer, *given, **named)
        marks["backward"] = time.perf_counter() - began
        return out

    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # the optimiser's step comes behind training_step
        def on_pre_optimizer_step(self, *_, **__):
            self.began = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            seconds = marks["backward"] + time.perf_counter() - self.began
            print("STEP " + json.dumps({"step_s": seconds, "generate_s": marks["generate_s"], "update_s": seconds - marks["generate_s"], "tokens": marks["tokens"],
                                        "prompt": marks["prompt"]}), flush=True)

    trainer_class = type("Waiting", (GRPOTrainer,), {"_generate_and_score_completions": generate, "training_step": step})
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(output_dir=out, per_device_train_batch_size=args.group, num_generations=args.group, max_completion_length=args.response,
                            max_steps=args.repeats + 1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, beta=0.0, learning_rate=1e-6, logging_strategy="no",
                            gradient_checkpointing=False, generation_kwargs={"min_new_tokens": args.response}, temperature=1.0, disable_tqdm=True)
        trainer_class(model=policy, reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))], args=config,
                      train_dataset=Dataset.from_list(rows), processing_class=processor, callbacks=[Clock()]).train()


def make_peers(folder):
    """An environment that sees this one's packages and has the peers besides -> its python."""
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(os.path.join(folder, "ready")):
        import site

        venv.create(folder, with_pip=True)
        where = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True).stdout.strip()
        with open(os.path.join(where, "ours.pth"), "w") as f:
            f.write(site.getsitepackages()[0] + "\n")
        # --no-deps: torch and transformers are to be those of this environment.
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "qwen-vl-utils==0.0.14", "dill", "multiprocess",
                        "xxhash", "pandas", "python-dateutil", "pytz", "tzdata", "six", "aiohttp", "pyarrow", "psutil", "httpx"], check=True)
        open(os.path.join(folder, "ready"), "w").close()
    return python


# ---------------------------------------------------------------------------------------------------------------------
# Our side


class Stills:
    """Stands in for rollout.Source: the same pictures for every task, one a second."""

    def __init__(self, count):
        import numpy as np

        import video

        self.frames = video.Frames(pictures(count), np.arange(count, dtype=float), "stills", [f"still{i}" for i in range(count)])

    def load(self, spec):
        return self.frames

    def load_overview(self, spec, task):
        return self.frames, float(len(self.frames.seconds)), ""


def ours(args):
    """-> function that does one step of one group: seconds of generation, of the update, and what was sampled."""
    from dataclasses import replace

    import torch

    import grpo
    import model
    import rollout

    _, world, device = model.start_process_group()
    codec = model.load_codec(args.ckpt)
    codec = replace(codec, banned=(*codec.banned, codec.eos))  # every response has its full length
    source = Stills(args.images)
    policy = model.load_sharded(args.ckpt, codec, device, recompute="none")
    vision = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.0, 0.999, device)
    flags = SimpleNamespace(context=args.prompt + args.response + 64, frames=args.images, sub_frames=1, max_pixels=50176, max_seqs=args.group, engine_share=0.5)
    engine = rollout.make_engine(args.engine, args.ckpt, codec, flags)
    agent = rollout.Agent(temperature=1.0, max_new_tokens=args.response, context=flags.context, tools=False, think_prefix=False)
    task = {"id": "t", "video": "stills", "question": args.filler, "answer": "x", "type": "open"}
    settings = SimpleNamespace(minibatches=1, pack_tokens=10**6, temperature=1.0, clip_eps=0.2, tis_cap=5.0, kl=0.0, clip=1.0)

    def step(number):
        began = time.perf_counter()
        episodes = list(rollout.run(engine, [task], agent, codec, source, args.images, args.group, number))
        generate_s = time.perf_counter() - began
        for i, e in enumerate(episodes):
            e.advantage = {"task": float(i % 3) - 1.0, "fmt": 0.0}
        began = time.perf_counter()
        tree = grpo.group_tree(episodes, codec, "none")
        vision.cache.clear()  # a new prompt every step, as in training
        grpo.update(policy, None, vision, optimizer, [tree], sum(sum(e.context.mask) for e in episodes), codec, settings, world, device)
        update_s = time.perf_counter() - began
        began = time.perf_counter()
        engine.wake(model.full_weights(policy))
        sync_s = time.perf_counter() - began
        return {"step_s": generate_s + update_s + sync_s, "generate_s": generate_s, "update_s": update_s, "tokens": sum(sum(e.context.mask) for e in episodes),
                "prompt": episodes[0].spans[0][0]}

    torch.manual_seed(0)
    return step


# ---------------------------------------------------------------------------------------------------------------------
# Videos


def make_video(path, seconds, size):
    """A file with a moving picture, 24 frames a second, a key frame every ten seconds: what a downloaded film looks like to a decoder."""
    import av
    import numpy as np

    width, height = size
    noise = np.random.default_rng(0).integers(0, 256, (height + 64, width + 64, 3), dtype=np.uint8)
    noise = noise.reshape(height + 64, -1, 3) // 4 + 64
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"g": "240", "preset": "ultrafast", "crf": "30"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(seconds * 24):
            picture = noise[i % 64:i % 64 + height, (i // 3) % 64:(i // 3) % 64 + width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())


def bench_video(args, peers):
    """fetch_video against video.py on one file: 64 overview frames, and five crops of ten seconds at 1 fps."""
    import numpy as np

    import video

    sys.path.insert(0, os.path.join(peers, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages"))
    import model

    model.import_shim()
    os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
    from qwen_vl_utils.vision_process import fetch_video

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "film.mp4")
        make_video(path, args.video_seconds, (1280, 720))
        pixels = {"min_pixels": 1024, "max_pixels": 50176}
        crops = [(s, s + 10.0) for s in np.linspace(5, args.video_seconds - 15, 5)]

        def theirs(kind):
            if kind == "overview":
                return [fetch_video({"video": path, "nframes": 64, **pixels, "total_pixels": 64 * 50176 * 2}, image_patch_size=16)]
            return [fetch_video({"video": path, "video_start": a, "video_end": b, "fps": 1.0, "min_frames": 4, **pixels, "total_pixels": 64 * 50176 * 2}, image_patch_size=16)
                    for a, b in crops]

        def mine(kind):
            cache = video.FrameCache(0, workers=len(os.sched_getaffinity(0)))  # nothing is kept: every look is decoded; all cores, as decord takes them by default
            if kind == "overview":
                return [video.overview(path, 64, cache=cache, **pixels).images]
            with ThreadPoolExecutor(cache.workers) as pool:  # at once, as rollout.py asks for the windows of a turn
                return [frames.images for frames in pool.map(lambda window: video.crop(path, *window, cache=cache, **pixels), crops)]

        found = {}
        for kind in ("overview", "crops"):
            shapes = [[tuple(x.shape) for x in side(kind)] for side in (theirs, mine)]
            seconds = {"theirs": [], "mine": []}
            for repeat in range(args.repeats):
                for name, side in (("theirs", theirs), ("mine", mine))[:: 1 if repeat % 2 else -1]:
                    began = time.perf_counter()
                    side(kind)
                    seconds[name].append(time.perf_counter() - began)
            medians = {name: statistics.median(s) for name, s in seconds.items()}
            found[kind] = {"ratio": round(medians["theirs"] / medians["mine"], 2), "fetch_video_s": round(medians["theirs"], 3), "video_py_s": round(medians["mine"], 3),
                           "frames": [sum(s[0] for s in side) for side in shapes], "size": [shapes[0][0][-2:], shapes[1][0][1:3]]}
    return found


# ---------------------------------------------------------------------------------------------------------------------


def bench_trainer(args, peers):
    """TRL and grpo.py in turns -> ratios of medians."""
    step = ours(args)
    words = [make_peers(peers), os.path.abspath(__file__), "--role", "trl", "--ckpt", os.path.abspath(args.ckpt), "--filler", args.filler]
    words += [w for name in ("images", "prompt", "response", "group", "repeats") for w in (f"--{name}", str(getattr(args, name)))]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    records = {"trl": [], "ours": []}
    for repeat in range(args.repeats + 1):  # the first round warms up and is dropped
        other.stdin.write("go\n")
        other.stdin.flush()
        line = next((line for line in iter(other.stdout.readline, "") if line.startswith("STEP ")), None)
        if line is None:
            sys.exit(f"TRL ended with {other.wait()} before its step {repeat}")
        records["trl"].append(json.loads(line[5:]))
        records["ours"].append(step(repeat))
        print(f"round {repeat}: trl {records['trl'][-1]} | ours {records['ours'][-1]}", file=sys.stderr, flush=True)
    other.stdin.close()
    other.wait()
    median = {who: {k: statistics.median(r[k] for r in rows[1:]) for k in rows[0]} for who, rows in records.items()}
    return {"update": round(median["trl"]["update_s"] / median["ours"]["update_s"], 2), "step": round(median["trl"]["step_s"] / median["ours"]["step_s"], 2),
            "rollouts": round(median["trl"]["generate_s"] / median["ours"]["generate_s"], 2), "trl": median["trl"], "ours": median["ours"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="toy checkpoint")
    parser.add_argument("--peers", default="peers_out", help="folder of the peers' environment, made when it is not there")
    parser.add_argument("--only", choices=["trainer", "video"], default=None, help="one part; default: both")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="who samples on our side")
    parser.add_argument("--images", type=int, default=64, help="pictures of the prompt")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the prompt, about: the rest is filled with words")
    parser.add_argument("--response", type=int, default=800, help="sampled tokens of each response")
    parser.add_argument("--group", type=int, default=8, help="responses")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds; medians are reported")
    parser.add_argument("--video-seconds", type=int, default=600, help="length of the film, 1280 x 720")
    parser.add_argument("--role", choices=["trl"], default=None, help=argparse.SUPPRESS)
    parser.add_argument("--filler", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "trl":
        peer(args)
        return
    import model

    codec = model.load_codec(args.ckpt)
    word = "frame "  # how many tokens a word, or a picture with its time, takes differs between tokenizers: ask this one
    each, stamp = len(model.encode(codec, word * 400)) / 400, len(model.encode(codec, "<12.0 seconds>")) + 3
    args.filler = word * max(1, int((args.prompt - stamp * args.images) / each))
    out = {"bench": "peers", "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}
    if args.only != "video":
        with tempfile.TemporaryDirectory() as folder:  # the same weights for both, with room for long contexts
            args.ckpt = shutil.copytree(args.ckpt, os.path.join(folder, "ckpt"), symlinks=False)
            with open(os.path.join(args.ckpt, "config.json")) as f:
                config = json.load(f)
            config["text_config"]["max_position_embeddings"] = 32768
            model.write_atomic(os.path.join(args.ckpt, "config.json"), json.dumps(config))
            out["trainer"] = bench_trainer(args, args.peers)
    if args.only != "trainer":
        make_peers(args.peers)
        out["video"] = bench_video(args, args.peers)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
