"""
scaling.py: how time and memory of one step grow, with a toy model of random weights.

  frames   an update of a group of 8 x 100 tokens after a prompt of K frames of 224 x 224 (49
           tokens each), with the vision tower, because a new prompt needs new features
  group    an update of G x 100 tokens after a prompt of 1000 tokens
  minutes  64 overview frames of a file of that length, 24 frames a second, opened anew
  windows  n sub-agents of 8 frames, 16 tokens each, in the reference engine of the tests
  ranks    a step of sft.py on 24 chats, one core and one thread a rank

  exponent = slope of log(seconds) over log(value) on the upper half of the values: 1 is linear

Every point runs in a separate process. The memory of a point is the peak of that process minus the
memory in use before the work. The script writes bench/scaling.md and prints one line of JSON.

  python bench/scaling.py --ckpt out/demo/toy/init --data out/demo/toy/sft.jsonl
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "tests"))  # for the reference engine
import numpy as np

import chat
import checkpoint
import grpo
import launch
import model
import rollout
import video

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def axes():
    return {"frames": (4, 8, 16, 32, 64, 128, 256), "group": (2, 4, 8, 16, 32),
            "minutes": (1, 4, 15, 60, 120), "windows": (1, 2, 4, 8, 16), "ranks": (1, 2)}


# ------------------------------------------------------------------------------------------------
# The work of one point: preparation, and a function that is timed


def update_work(ckpt, frames, text, group, response=100):
    """-> a function: an update of one group after a prompt of `frames` frames and `text` tokens."""
    _, _, device = launch.start_process_group()
    codec = chat.load_codec(ckpt)
    policy = checkpoint.load_sharded(ckpt, codec, device)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, device)
    rng = np.random.default_rng(0)
    stills = still_frames(frames, 224)  # 49 tokens each
    items = []
    ids = rng.integers(0, 256, text).tolist()
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, lambda spec: stills)
    if frames:  # one placeholder per vision token, then the text
        items = [chat.vision_item({"video": "stills"}, stills)]
        ids = [codec.image_pad] * (frames * chat.tokens_per_item(codec, items[0])) + ids
    branches = []
    for i in range(group):
        values = {"advantage": [(-1.0) ** i] * response, "sampler": [-6.0] * response}
        said = rng.integers(0, 256, response).tolist()
        branches.append(model.Span(said, [1] * response, values))
    nothing = [0.0] * len(ids)
    prompt = model.Span(ids, [0] * len(ids), {"advantage": nothing, "sampler": nothing})
    tree = model.Tree(prompt, items, branches)
    flags = "--ckpt none --data none --temperature 1 --kl 0 --pack-tokens 1000000"
    settings = grpo.build_parser().parse_args(flags.split())

    def work():
        policy.features.cache.clear()  # a new prompt every step
        grpo.update(policy, None, optimizer, [tree], group * response, settings)

    return work


def still_frames(count, size):
    """-> `count` frames of noise, one per second."""
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    keys = [f"still{i}" for i in range(count)]
    return video.Frames(images, np.arange(count, dtype=float), "stills", keys)


def overview_work(path, minutes):
    """-> a function that takes 64 overview frames of a file of so many minutes."""
    import av

    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with av.open(path, "w") as container:
        options = {"g": "240", "preset": "ultrafast"}  # a key frame every ten seconds
        stream = container.add_stream("libx264", rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(minutes * 60 * 24):
            image = np.roll(picture, i // 24, 1) if i % 24 == 0 else picture
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return lambda: video.overview(path, 64, cache=video.FrameCache(0))  # 0: keeps no frames


def windows_work(ckpt, count):
    """-> a function that runs `count` sub-agents at once."""
    from reference import ReferenceEngine

    codec = chat.load_codec(ckpt)
    engine, stills = ReferenceEngine(ckpt, codec), still_frames(8, 32)
    spec = {"video": "stills", "start": 0.0, "end": 8.0}
    messages = rollout.sub_messages({"video": "stills", "question": "What is there?"}, spec)

    def work():
        for n in range(count):
            context = rollout.open_context(codec, messages, [spec], [stills])
            engine.submit(context.request(f"{n:03d}", max_tokens=16, temperature=1.0, seed=n))
        finished = 0
        while finished < count:
            finished += len(engine.poll())

    return work


def sft_seconds(args, ranks):
    """Median seconds of a step with so many ranks."""
    out = os.path.join(args.folder, f"ranks{ranks}")
    # As many cores as ranks, so that ranks are compared, not threads.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:ranks]))
    words = ["taskset", "-c", cores, sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc_per_node", str(ranks), os.path.join(ROOT, "sft.py"), "--preset", "toy",
             "--ckpt", args.ckpt, "--data", args.data, "--out", out, "--steps", "8"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})
    with open(os.path.join(out, "log.jsonl")) as f:
        rows = [json.loads(line) for line in f]
    return statistics.median(row["step_s"] for row in rows[2:])  # two warm up


# ------------------------------------------------------------------------------------------------
# Measuring


def resident(name):
    """The value of one line of this process's status, in KiB."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name))


def point(args, axis, value):
    """One measurement in this process -> median seconds, and MiB above the memory before."""
    if axis == "ranks":
        return {"seconds": sft_seconds(args, value), "mib": None}
    if axis == "frames":
        work = update_work(args.ckpt, frames=value, text=200, group=8)
    elif axis == "group":
        work = update_work(args.ckpt, frames=0, text=1000, group=value)
    elif axis == "minutes":
        work = overview_work(os.path.join(args.folder, f"film{value}.mp4"), value)
    else:
        work = windows_work(args.ckpt, value)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # resets the peak, because the preparation may need more than the work
    before = resident("VmRSS")
    took = []
    for _ in range(args.repeats + 1):  # the first warms up
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return {"seconds": statistics.median(took[1:]), "mib": (resident("VmHWM") - before) / 1024}


def measure(args, axis, value, folder):
    """Runs `point` in a separate process."""
    words = [sys.executable, os.path.abspath(__file__), "--ckpt", args.ckpt, "--data", args.data,
             "--repeats", args.repeats, "--folder", folder, "--point", axis, value]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{axis} {value}: {done.stderr[-1000:]}")
    print(f"{axis} {value}: {done.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def exponent(values, seconds):
    """Least-squares slope of log seconds over log values, on the upper half."""
    half = len(values) // 2 if len(values) > 2 else 0
    return float(np.polyfit(np.log(values[half:]), np.log(seconds[half:]), 1)[0])


def square_share(values, seconds, at):
    """Share of the square term at one value, of a v + b v^2 through the last two points."""
    (u, v), (s, t) = values[-2:], seconds[-2:]
    b = (t / v - s / u) / (v - u)
    return b * at / (t / v + b * (at - v))


def reading(axis, values, seconds):
    """-> a remark on an axis, with the measured numbers."""
    if axis == "frames":
        shares = [f"{square_share(values, seconds, k):.0%}" for k in (64, 256)]
        return (" Above 1, because the tokens of one prompt attend to each other: of a K + b K^2 "
                f"through the last two points, the square part is {shares[0]} at 64 frames, the "
                f"paper's most, and {shares[1]} at 256.")
    if axis == "ranks":
        return (f" {seconds[0] / seconds[1]:.2f} times as fast on two ranks; virtual cores of a "
                "shared machine may be threads of one real core.")
    return ""


def table(axis, rows):
    """{value: point} -> (exponent, lines of Markdown)."""
    values = list(rows)
    seconds = [row["seconds"] for row in rows.values()]
    slope = exponent(values, seconds)
    memory = ["-" if row["mib"] is None else f"{row['mib']:.0f}" for row in rows.values()]
    cells = [[axis, *map(str, values)], ["---"] * (len(values) + 1),
             ["seconds", *(f"{s:.3f}" for s in seconds)], ["peak MiB above rest", *memory]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    text = f"Exponent of the upper half: {slope:.2f}." + reading(axis, values, seconds)
    return slope, [*lines, "", text, ""]


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint")
    add("--data", required=True, help="toy SFT JSONL")
    add("--repeats", type=int, default=5, help="measured repeats; medians are reported")
    add("--out", default=os.path.join(ROOT, "bench", "scaling.md"), help="Markdown to write")
    add("--only", nargs="+", choices=list(axes()), default=list(axes()), help="some of the axes")
    add("--point", nargs=2, default=None, help=argparse.SUPPRESS)
    add("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(point(args, args.point[0], int(args.point[1]))))
        return
    found, lines = {"bench": "scaling"}, []
    with tempfile.TemporaryDirectory() as folder:
        for axis in args.only:
            rows = {value: measure(args, axis, value, folder) for value in axes()[axis]}
            slope, text = table(axis, rows)
            found[axis] = {"exponent": round(slope, 2), "points": rows}
            lines += text
    where = f"{time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} cores, no GPU."
    legend = __doc__.split("\n\n")[1]
    command = f"`python bench/scaling.py --ckpt {args.ckpt} --data {args.data}`"
    head = ["# How cost grows", "", f"{command}, {where}", "", "```", legend, "```"]
    launch.write_atomic(args.out, "\n".join([*head, "", *lines]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
