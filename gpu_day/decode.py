"""
Part 5: do 16 cores decode as fast as the GPU eats? Frames a second by video.py, as grpo.py asks for them.

  overviews   64 frames of each of N films at once (prefetch: half of the decoders; rollouts: all)
  windows     10 s at 1 frame a second, five per film

The films are one clip of 20 s (made before the day by --make-clip, so it costs no device time), H.264 1280 x 720 at 24
frames a second, repeated to --seconds; each film is a file of its own name, so no cache knows it. Needed: frames of a
step (prompts x K, rollouts x windows x frames) over the seconds of a step, by --step-seconds or by the results of
parts 1 and 2 in --out.
"""
import json
import os
import shutil
import sys
import time

from common import HERE, Result, launch, np, parse, parser, video
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def make_video(path, seconds, height):
    """Encodes some seconds that are as hard to decode as a video: a camera pans over a picture with the spectrum of
    natural pictures, and every frame has other grain. H.264 at 24 frames a second, a key frame every ten seconds."""
    import av

    rng, width = np.random.default_rng(0), height * 16 // 9
    shape = (height + 64, width + 64)
    rows, columns = np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None]
    fall = np.maximum(np.hypot(rows, columns), 1 / max(shape)) ** -0.9  # amplitude by frequency
    waves = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal(shape)) * fall, shape) for _ in "rgb"]
    picture = np.stack([128 + 40 * wave / wave.std() for wave in waves], -1)
    grain = rng.standard_normal((*shape, 1)) * 2.5
    with av.open(path, "w") as clip:
        stream = clip.add_stream("libx264", rate=24, options={"g": "240", "preset": "medium"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(24 * seconds):
            down, right = int(32 + 31 * np.sin(i / 40)), int(32 + 31 * np.sin(i / 70))
            y, x = rng.integers(64, size=2)
            frame = (picture[down:down + height, right:right + width]
                     + grain[y:y + height, x:x + width]).clip(0, 255).astype(np.uint8)
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        clip.mux(stream.encode())


def repeat(clip, path, seconds):
    """Writes the packets of the clip of 20 s again and again: a longer film without an encoder."""
    import av

    with av.open(clip) as source, av.open(path, "w") as target:
        stream = source.streams.video[0]
        packets = [p for p in source.demux(stream) if p.size]
        times, copy = [(p.pts, p.dts) for p in packets], target.add_stream_from_template(stream)
        for start in range(0, seconds, 20):
            shift = int(start / stream.time_base)
            for packet, (pts, dts) in zip(packets, times):
                packet.stream, packet.time_base = copy, stream.time_base
                packet.pts, packet.dts = pts + shift, dts + shift
                target.mux(packet)


def load_all(cache, specs, threads):
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(partial(video.load, cache=cache), specs)]


def measure(result, name, cache, specs, threads, frames_of=None):
    cpu = sum(os.times()[:4])
    began = time.perf_counter()
    found = load_all(cache, specs, threads)
    seconds, frames = time.perf_counter() - began, sum(len(f.seconds) for f in found)
    rate = frames / seconds
    result.add(name, {"frames": frames, "s": round(seconds, 2), "frames/s": round(rate, 1), "threads": threads,
                      "cpu s of this process": round(sum(os.times()[:4]) - cpu, 1)})
    return rate


def main():
    p = parser(__doc__, 120)
    p.add_argument("--films", type=int, default=32)
    p.add_argument("--seconds", type=int, default=120)
    p.add_argument("--height", type=int, default=720)
    p.add_argument("--step-seconds", type=float, default=None)
    p.add_argument("--make-clip", action="store_true", help="encode the clip beside this script, and end")
    args = parse(p)
    if args.dry:
        args.films, args.seconds, args.height = 2, 20, 360
    result = Result(args, "decode")
    clip = os.path.join(HERE, f"clip{args.height}.mp4")
    if not os.path.exists(clip) or args.make_clip:
        path = os.path.join(args.work, "made.mp4")
        make_video(path, 20, args.height)
        shutil.copy(path, clip)
        if args.make_clip:
            return
    path = os.path.join(args.work, f"film{args.height}_{args.seconds}.mp4")
    began = time.perf_counter()
    repeat(clip, path, args.seconds)
    result.add("film", {"MB": round(os.path.getsize(path) / 1e6, 1), "s to make": round(time.perf_counter() - began, 1),
                        "cores": launch.cores(), "decoders": video.decode_threads()})

    def films(tag):
        names = [os.path.join(args.work, f"{tag}{i}.mp4") for i in range(args.films)]
        for name in names:
            if not os.path.exists(name):
                os.link(path, name)
        return names

    threads, rates = video.decode_threads(), {}
    for tag, count in (("all", threads), ("half", max(2, threads // 2)), ("one", 1)):
        # A film of another name is another film to the cache. Decoders live on, as in training.
        cache = video.FrameCache(workers=threads)
        some = films(tag)[:args.films if tag != "one" else 2]
        rates[tag] = measure(result, f"overviews, {tag}", cache, [{"video": f, "frames": args.frames} for f in some], count)
        if tag == "all":
            spans = np.linspace(1, max(2, args.seconds - 11), 5)
            specs = [{"video": f, "start": s, "end": s + 10.0, "fps": 1.0, "max_frames": 16} for f in some for s in spans]
            rates["windows"] = measure(result, "windows, all", cache, specs, count)
        cache.pool.shutdown()

    step = args.step_seconds
    if step is None:  # what parts 1 and 2 measured, if they ran
        def read(part, *names):
            file = os.path.join(args.out, f"{part}.json")
            rows = json.load(open(file)) if os.path.exists(file) else {}
            return next((rows[n] for n in names if n in rows), None)
        update, rollouts = read("update", "ours: s"), read("rollouts", "pump: s")
        step = (update or 1.0) + (rollouts or 5.0)
        result.add("step by parts 1 and 2, s", {"update": update, "rollouts": rollouts, "step": step})
    # 4 prompts x K 64; 32 rollouts x 3 windows x 11 frames, of which windows that are asked for twice are read once
    overview, windows = args.prompts * args.frames, args.prompts * args.group * 3 * 11
    result.add("needed", {"overview frames a step": overview, "window frames a step": windows, "step s": round(step, 2)})
    busy = overview / rates["half"], windows / rates["windows"]
    result.add("seconds of decoding a step: overviews (prefetched), windows", [round(x, 2) for x in busy])
    result.add("decoding / step (above 1: the GPU waits)", sum(busy) / step)
    result.add("done", True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
