"""
bench_scaling.py: how cost grows. Time and memory of one step against frames, group, length of a video, windows and ranks; toy model, random weights.

  exponent = slope of log(seconds) over log(value) on the upper half of the values: 1 is linear

Every point runs in a process of its own (its peak memory is the process's, less what stood before the work). Writes bench/scaling.md, prints
one JSON line.

  frames   one update of a group of 8 x 100 tokens behind a prompt of K frames of 224 x 224 (49 tokens each); tower included, as features of a new
           prompt are
  group    one update of G x 100 tokens behind a prompt of 1000 tokens
  minutes  64 overview frames of a file of that length, 24 frames a second, opened anew
  windows  n sub-agents of 8 frames, 16 tokens each, in the reference engine
  ranks    one step of sft.py on 24 chats, one thread a rank

  python tests/bench_scaling.py --ckpt out/demo/toy/init --data out/demo/toy/sft.jsonl
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.join(ROOT, "tests"))


def axes():
    return {"frames": (4, 8, 16, 32, 64, 128, 256), "group": (2, 4, 8, 16, 32), "minutes": (1, 4, 15, 60, 120), "windows": (1, 2, 4, 8, 16), "ranks": (1, 2)}


def update_of(args, frames, text, group, response):
    """-> function that takes one update of one group behind a prompt of `frames` frames and `text` tokens."""
    import numpy as np

    import grpo
    import model
    import video

    _, world, device = model.start_process_group()
    codec = model.load_codec(args.ckpt)
    policy = model.load_sharded(args.ckpt, codec, device)
    rng, seconds = np.random.default_rng(0), np.arange(frames, dtype=float)
    stills = video.Frames(rng.integers(0, 256, (frames, 224, 224, 3), dtype=np.uint8), seconds, "noise", [])
    item = model.VisionItem({"video": "noise"}, "noise", frames, 224, 224, seconds.tolist())
    vision = model.VisionFeatures(policy.hf.model.visual, codec, lambda spec: stills)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.0, 0.999, device)
    ids = [codec.image_pad] * (frames * model.tokens_per_item(codec, item)) + rng.integers(0, 256, text).tolist()
    branches = [model.Span(rng.integers(0, 256, response).tolist(), [1] * response, {"advantage": [(-1.0) ** i] * response, "rollout": [-6.0] * response}) for i in range(group)]
    tree = model.Tree(model.Span(ids, [0] * len(ids), {"advantage": [0.0] * len(ids), "rollout": [0.0] * len(ids)}), [item] if frames else [], branches)
    settings = SimpleNamespace(minibatches=1, pack_tokens=10**6, temperature=1.0, clip_eps=0.2, tis_cap=5.0, kl=0.0, clip=1.0)

    def step():
        vision.cache.clear()
        grpo.update(policy, None, vision, optimizer, [tree], group * response, codec, settings, world, device)

    return step


def overview_of(args, minutes):
    """-> function that opens a file of so many minutes and decodes 64 frames of it."""
    import av
    import numpy as np

    import video

    path = os.path.join(args.folder, f"film{minutes}.mp4")
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"g": "240", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for i in range(minutes * 60 * 24):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, i // 24, 1) if i % 24 == 0 or i == 0 else picture, format="rgb24")))
        container.mux(stream.encode())
    return lambda: video.overview(path, 64, cache=video.FrameCache(0))


def windows_of(args, count):
    """-> function that serves so many windows at once."""
    from bench_peers import Stills

    import model
    import rollout

    _, _, device = model.start_process_group()
    codec = model.load_codec(args.ckpt)
    engine, source = rollout.TransformersEngine(args.ckpt, codec, device), Stills(8)
    task = {"video": "stills", "question": "What is there?"}
    spec = {"video": "stills", "start": 0.0, "end": 8.0}

    def serve():
        for n in range(count):
            context = rollout.open_context(codec, rollout.sub_messages(task, spec), [spec], [source.frames])
            engine.submit(rollout.Request(f"{n:03d}", context.compact, context.ids, context.items, context.frames, context.messages, 16, 1.0, n))
        done = 0
        while done < count:
            done += len(engine.poll())

    return serve


def resident(name):
    """A line of this process's status, in KiB."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name))


def point(args):
    """One measurement in this process -> seconds (median) and MiB above what stood before."""
    axis, value = args.point[0], int(args.point[1])
    if axis == "ranks":
        out = os.path.join(args.folder, f"ranks{value}")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(value), os.path.join(ROOT, "sft.py"), "--preset", "toy", "--ckpt", args.ckpt,
                 "--data", args.data, "--out", out, "--steps", "8", "--quiet"]
        # One thread a rank in both runs: what is compared is ranks, not threads.
        subprocess.run(["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:value])), *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})
        with open(os.path.join(out, "log.jsonl")) as f:
            return {"seconds": statistics.median(json.loads(line)["step_s"] for line in list(f)[2:]), "mib": None}
    work = {"frames": lambda: update_of(args, value, 200, 8, 100), "group": lambda: update_of(args, 0, 1000, value, 100), "minutes": lambda: overview_of(args, value),
            "windows": lambda: windows_of(args, value)}[axis]()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak begins anew: preparing may have taken more than the work
    before, took = resident("VmRSS"), []
    for _ in range(args.repeats + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return {"seconds": statistics.median(took[1:]), "mib": (resident("VmHWM") - before) / 1024}


def exponent(values, seconds):
    """Least-squares slope of log seconds over log values, on the upper half."""
    half = len(values) // 2 if len(values) > 2 else 0
    x, y = [math.log(v) for v in values[half:]], [math.log(s) for s in seconds[half:]]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def reading(axis, rows):
    """What to know about an axis, with its own numbers."""
    values, seconds = list(rows), [r["seconds"] for r in rows.values()]
    if axis == "frames":
        return (f" Above 1, because the tokens of one prompt attend to each other: of a K + b K^2 through the last two points, the square part is "
                f"{square_share(values, seconds, 64):.0%} at 64 frames, the paper's most, and {square_share(values, seconds, 256):.0%} at 256. Memory is linear.")
    if axis == "ranks":
        return f" {seconds[0] / seconds[1]:.2f} times as fast on two ranks; virtual cores of a shared machine may be threads of one real core."
    return ""


def square_share(values, seconds, at):
    """Share of the square term at one value, of a v + b v^2 through the last two points."""
    (u, v), (s, t) = values[-2:], seconds[-2:]
    b = (t / v - s / u) / (v - u)
    return b * at / (t / v + b * (at - v))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="toy checkpoint")
    parser.add_argument("--data", required=True, help="toy SFT JSONL")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats; medians are reported")
    parser.add_argument("--out", default=os.path.join(ROOT, "bench", "scaling.md"), help="Markdown to write")
    parser.add_argument("--only", nargs="+", choices=list(axes()), default=list(axes()), help="some of the axes")
    parser.add_argument("--point", nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print("POINT " + json.dumps(point(args)))
        return
    import model

    found, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for axis in args.only:
            rows = {}
            for value in axes()[axis]:
                words = [sys.executable, os.path.abspath(__file__), "--ckpt", args.ckpt, "--data", args.data, "--repeats", args.repeats, "--folder", folder, "--point", axis, value]
                done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
                line = next((line for line in done.stdout.splitlines() if line.startswith("POINT ")), None)
                if line is None:
                    sys.exit(f"{axis} {value}: {done.stderr[-1000:]}")
                rows[value] = json.loads(line[6:])
                print(f"{axis} {value}: {rows[value]}", file=sys.stderr, flush=True)
            slope = exponent(list(rows), [r["seconds"] for r in rows.values()])
            found[axis] = {"exponent": round(slope, 2), "points": {v: {k: x if x is None else round(x, 4) for k, x in r.items()} for v, r in rows.items()}}
            lines += [f"| {axis} | " + " | ".join(map(str, rows)) + " |", "|---" * (len(rows) + 1) + "|", "| seconds | " + " | ".join(f"{r['seconds']:.3f}" for r in rows.values()) + " |",
                      "| peak MiB above rest | " + " | ".join("-" if r["mib"] is None else f"{r['mib']:.0f}" for r in rows.values()) + " |", "", f"Exponent of the upper half: {slope:.2f}." + reading(axis, rows), ""]
    docs = __doc__.split("\n\n")
    model.write_atomic(args.out, "\n".join(["# How cost grows", "", f"`python tests/bench_scaling.py`, {time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} cores, no GPU.", "",
                                            "```", docs[3].strip("\n"), "```", "", *lines]))
    print(json.dumps({"bench": "scaling", **found}))


if __name__ == "__main__":
    main()
