"""
bench/speed.py: this code beside the usual alternatives, each as a ratio of medians in one run.

  update    one optimiser step over one group: TRL's GRPOTrainer | grpo.update on the shared prompt
  step      generation and that update: TRL with transformers' generate | rollout.py with vLLM,
            grpo.update, and the new weights into the engine
  overview  64 frames of a video: fetch_video of qwen-vl-utils, decord | video.py
  crops     five windows of 10 s, spread over the video, 1 frame a second: the same two | video.py

A ratio above 1 means that this code is faster. The sides take turns, and the first round only warms
up. All frames are decoded anew in each round; video.py decodes in processes, as in training.

update, step: both sides train the same checkpoint in fp32 with AdamW and without a KL. The prompt
has --images pictures (32 x 32 pixels, one vision token each). A group has --group responses of
exactly --response tokens, because the end of turn is forbidden.
overview, crops: all sides return equally many frames of equal size. decord reads the frames that
video.py chose and resizes them itself. fetch_video has its own rule for times, and its default
reader.

A row whose peer is not installed is left out, and a line names the package. Peers: trl 1.16.0,
qwen-vl-utils 0.0.14, decord 0.6.0. A folder of `pip install --target` will do:

  pip install --target peers --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 dill \\
      multiprocess xxhash pandas python-dateutil pytz tzdata six aiohttp qwen-vl-utils==0.0.14
  python bench/speed.py --ckpt out/demo/toy/init --peers peers
"""
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch

import chat
import grpo
import launch
import model
import rollout
import video
from engine import EngineConfig, VllmEngine
from plumbing import arguments, checkpoint


def installed(module, package, rows):
    """Whether a peer can be imported; if not, prints which package to install."""
    if importlib.util.find_spec(module):
        return True
    print(f"{rows}: left out, {module} is not installed (pip install {package}, see the header)")
    return False


def alternate(sides, rounds):
    """{name: function without arguments} -> {name: median seconds}, after one round more."""
    seconds = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:  # take turns to go first
            began = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def print_ratios(row, seconds):
    """seconds: {side: median}, ours under the name "ours"."""
    for peer in seconds:
        if peer != "ours":
            print(f"{row:<8}  {peer:<11}  {seconds[peer] / seconds['ours']:6.2f}  "
                  f"{seconds[peer]:.3f} s, ours {seconds['ours']:.3f} s", flush=True)


# ------------------------------------------------------------------------------------------------
# update, step


def pictures(count):
    """[N, 32, 32, 3]: the images in the prompt of both sides."""
    return np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def filler_text(codec, args):
    """-> words that fill a prompt with --images pictures up to about --prompt tokens."""
    word = len(chat.encode(codec, "frame " * 400)) / 400  # tokens
    picture = len(chat.encode(codec, "<12.0 seconds>")) + 3
    return "frame " * max(1, int((args.prompt - picture * args.images) / word))


class Stills(rollout.VideoSource):
    """A VideoSource whose root is the Frames of every task."""

    def load(self, spec):
        return self.root

    def load_overview(self, spec, task):
        return self.root, float(len(self.root.seconds)), ""


def make_step(args, policy, codec, filler):
    """-> a function of the step's number that samples one group, trains on it and moves the weights
    into the engine -> seconds of (update, step)."""
    # Without an end of turn every response has the full length.
    codec = replace(codec, suppress_tokens=(*codec.suppress_tokens, codec.eos))
    keys, times = [f"still{i}" for i in range(args.images)], np.arange(float(args.images))
    source = Stills(video.Frames(pictures(args.images), times, "stills", keys), None)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, torch.device("cpu"))
    context = args.prompt + args.response + 64
    engine = VllmEngine(args.ckpt, codec, EngineConfig(context, args.images, max_seqs=args.group))
    agent = rollout.AgentConfig(temperature=1.0, max_new_tokens=args.response,
                                max_model_len=context, tools=False, think_prefix=False)
    sampler = rollout.RolloutWorker(engine, codec, source, agent)
    task = {"id": "t", "video": "stills", "question": filler, "answer": "x", "type": "open"}
    flags = "--ckpt none --data none --temperature 1 --beta 0 --pack-tokens 1000000"
    settings = grpo.build_parser().parse_args(flags.split())

    def step(number):
        clock = [time.perf_counter()]
        episodes = list(rollout.run(sampler, [task], args.images, args.group, number))
        clock.append(time.perf_counter())
        for i, episode in enumerate(episodes):
            episode.advantage = {"task": float(i % 3) - 1.0, "fmt": 0.0}
        tree = grpo.group_tree(episodes, "none")
        tokens = sum(sum(episode.context.mask) for episode in episodes)
        assert tokens == args.group * args.response, f"{tokens} tokens were sampled"
        policy.features.cache.clear()  # a new prompt every step, as in training
        grpo.update(policy, None, optimizer, [tree], tokens, settings)
        clock.append(time.perf_counter())
        engine.wake(checkpoint.full_weights(policy))  # TRL's generate has them already
        clock.append(time.perf_counter())
        return clock[2] - clock[1], clock[3] - clock[0]

    return step


def train_with_trl(args, filler, ours):
    """Trains with TRL, and calls ours(number) after each of its steps -> rounds of {side: seconds
    of (update, step)}."""
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    images, content = [Image.fromarray(image) for image in pictures(args.images)], []
    for i in range(args.images):
        content += [{"type": "text", "text": f"<{i}.0 seconds>"}, {"type": "image"}]
    content.append({"type": "text", "text": filler})
    row = {"prompt": [{"role": "user", "content": content}], "images": images}  # in every step
    generation, rounds = [], []  # seconds; as returned

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, *given, **named):
            began = time.perf_counter()
            out = super()._generate_and_score_completions(*given, **named)
            generation.append(time.perf_counter() - began)
            tokens = int(out["completion_mask"].sum())
            assert tokens == args.group * args.response, f"TRL sampled {tokens} tokens"
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_optimizer_step(self, *_, **__):  # after it
            step = time.perf_counter() - self.began
            rounds.append({"TRL": (step - generation[-1], step), "ours": ours(len(rounds))})

    def reward(completions, **_):
        return [float(i % 3) for i in range(len(completions))]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, per_device_train_batch_size=args.group, num_generations=args.group,
            max_completion_length=args.response, max_steps=args.rounds + 1, temperature=1.0,
            generation_kwargs={"min_new_tokens": args.response}, beta=0.0, learning_rate=1e-6,
            use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True)
        policy = Qwen3VLForConditionalGeneration.from_pretrained(args.ckpt, dtype=torch.float32)
        processor = AutoProcessor.from_pretrained(args.ckpt, trust_remote_code=False)
        Trainer(model=policy, reward_funcs=reward, args=config, callbacks=[Clock()],
                train_dataset=Dataset.from_list([row] * 64), processing_class=processor).train()
    return rounds


def compare_trainers(args, policy, codec):
    filler = filler_text(codec, args)
    rounds = train_with_trl(args, filler, make_step(args, policy, codec, filler))
    for i, row in enumerate(("update", "step")):
        print_ratios(row, {side: statistics.median(times[side][i] for times in rounds[1:])
                           for side in ("TRL", "ours")})


# ------------------------------------------------------------------------------------------------
# overview, crops


def make_video(path, seconds, height):
    """Encodes 20 seconds that are as hard to decode as a video, and repeats their packets: a camera
    pans over a picture with the spectrum of natural pictures, and every frame has other grain.
    H.264 at 24 frames a second, a key frame every ten seconds."""
    import av

    rng, width = np.random.default_rng(0), height * 16 // 9
    shape = (height + 64, width + 64)
    rows, columns = np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None]
    fall = np.maximum(np.hypot(rows, columns), 1 / max(shape)) ** -0.9  # amplitude by frequency
    waves = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) * fall, shape) for _ in "rgb"]
    picture = np.stack([128 + 40 * wave / wave.std() for wave in waves], -1)
    grain = rng.standard_normal((*shape, 1)) * 2.5
    with av.open(path + ".clip.mp4", "w") as clip:
        stream = clip.add_stream("libx264", rate=24, options={"g": "240", "preset": "medium"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(480):
            down, right = int(32 + 31 * np.sin(i / 40)), int(32 + 31 * np.sin(i / 70))
            y, x = rng.integers(64, size=2)
            frame = (picture[down:down + height, right:right + width]
                     + grain[y:y + height, x:x + width]).clip(0, 255).astype(np.uint8)
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        clip.mux(stream.encode())
    with av.open(path + ".clip.mp4") as clip, av.open(path, "w") as target:
        stream = clip.streams.video[0]
        packets = [packet for packet in clip.demux(stream) if packet.size]
        times = [(packet.pts, packet.dts) for packet in packets]
        copy = target.add_stream_from_template(stream)
        for start in range(0, seconds, 20):
            shift = int(start / stream.time_base)
            for packet, (pts, dts) in zip(packets, times):
                packet.stream, packet.time_base = copy, stream.time_base
                packet.pts, packet.dts = pts + shift, dts + shift
                target.mux(packet)


def by_fetch_video(path, specs):
    """Frames of every spec by qwen-vl-utils -> [[T, 3, H, W]]."""
    from qwen_vl_utils.vision_process import fetch_video

    size = {"min_pixels": 1024, "max_pixels": 50176, "total_pixels": 64 * 50176 * 2}
    ranges = [{"nframes": spec["frames"]} if "frames" in spec else
              {"video_start": spec["start"], "video_end": spec["end"], "fps": 1.0, "min_frames": 4}
              for spec in specs]
    return [fetch_video({"video": path, **span, **size}, image_patch_size=16) for span in ranges]


def by_decord(path, frames):
    """The frames of [Frames] by decord, in their size -> [[T, H, W, 3]]."""
    from decord import VideoReader

    height, width = frames[0].images.shape[1:3]
    reader = VideoReader(path, width=width, height=height)
    rate = reader.get_avg_fps()
    return [reader.get_batch(np.rint(f.seconds * rate).astype(int)).asnumpy() for f in frames]


def by_video_py(specs):
    """Our frames of every spec -> [Frames]."""
    fresh = video.FrameCache(workers=video.decode_threads())  # knows no frame of the video
    with ThreadPoolExecutor(video.decode_threads()) as pool:  # as rollout.py asks for them
        return [*pool.map(partial(video.load, cache=fresh), specs)]


def compare_decoders(args, path):
    """Makes a video at `path`, prints its rows. Checks that fetch_video returns as many frames as
    video.py, of the same size."""
    crops = [{"video": path, "start": start, "end": start + 10.0}
             for start in np.linspace(5, max(20, args.seconds) - 15, 5)]
    qwen = installed("qwen_vl_utils", "qwen-vl-utils", "overview, crops beside fetch_video")
    decord = installed("decord", "decord", "overview, crops beside decord")
    if not (qwen or decord):
        return
    make_video(path, args.seconds, args.height)
    for row, specs in {"overview": [{"video": path, "frames": 64}], "crops": crops}.items():
        frames, sides = by_video_py(specs), {"ours": partial(by_video_py, specs)}
        if qwen:
            sides["fetch_video"] = partial(by_fetch_video, path, specs)
            ours = [(len(f.images), 3, *f.images.shape[1:3]) for f in frames]
            theirs = [tuple(f.shape) for f in by_fetch_video(path, specs)]
            if ours != theirs:
                raise RuntimeError(f"{row}: fetch_video returned {theirs}, video.py {ours}")
        if decord:
            sides["decord"] = partial(by_decord, path, frames)
        print_ratios(row, alternate(sides, args.rounds))


# ------------------------------------------------------------------------------------------------


def main():
    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("--ckpt", help="toy checkpoint, its weights do not matter; not for --only video")
    add("--peers", help="folder of pip install --target with TRL and qwen-vl-utils")
    add("--only", nargs="+", choices=["trainer", "video"], help="default: both",
        default=["trainer", "video"])
    add("--images", type=int, default=64, help="pictures of the prompt, trainer")
    add("--prompt", type=int, default=3000, help="tokens of the prompt, about")
    add("--response", type=int, default=600, help="tokens of each response")
    add("--group", type=int, default=8, help="responses")
    add("--rounds", type=int, default=3, help="measured rounds; medians are printed")
    add("--seconds", type=int, default=120, help="length of the video, in steps of 20")
    add("--height", type=int, choices=[360, 720, 1080], default=720, help="pixels of the video")
    args = parser.parse_args()
    arguments.require_min(1, args, "images", "prompt", "response", "group", "rounds", "seconds")
    if not args.ckpt and "trainer" in args.only:
        raise launch.UserError("--ckpt: a toy checkpoint, for all but --only video")
    if args.peers:
        sys.path.append(args.peers)  # behind this environment's torch and transformers
    launch.import_shim()
    _, _, device = launch.start_process_group(cpu=True)
    print(f"{launch.cores()} cores, load {os.getloadavg()[0]:.1f}; a ratio above 1: ours is faster")
    if "video" in args.only:
        with tempfile.TemporaryDirectory() as folder:
            compare_decoders(args, os.path.join(folder, "video.mp4"))
    if "trainer" in args.only and installed("trl", "trl", "update, step"):
        args.ckpt = checkpoint.resolve(args.ckpt)
        codec = chat.load_codec(args.ckpt)
        compare_trainers(args, checkpoint.load_policy(args.ckpt, codec, device), codec)


if __name__ == "__main__":
    launch.run_main(main)
