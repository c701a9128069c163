"""
evaluation/qwen_vl_sampling.py (tests/slow/test_paper.py): which frames of a video the publishers'
readers take, and how large.

  qwen        qwen_vl_utils 0.0.14: an even number of frames, from the first to the last one of the
              video or of a window, by linspace; sides are whole multiples of a factor
  vllm_video  vLLM 0.17.1 for a video_url: 32 frames by linspace without rounding; Qwen3-VL's
              processor then chooses the sides

Numbers alone: no video is opened here. Imports nothing of ours, because tests/publishers runs this
file beside a publisher's code. Reads and writes no file.

    >>> qwen({"fps": 1, "min_frames": 1, "max_frames": 16, "video_start": 8, "video_end": 12,
    ...       "min_pixels": 784, "max_pixels": 50176}, 6000, 25.0, 720, 1280)
    ([200, 233, 267, 300], (168, 280))
"""

import math

import numpy as np


def even_count(ele: dict, total: int, rate: float) -> int:
    """The number of frames out of `total`. ele: see `qwen`. rate: frames per second of the video.
    Raises ValueError if there are too few."""
    if "nframes" in ele:
        count = 2 * round(ele["nframes"] / 2)
    else:
        min_frames = 2 * math.ceil(ele.get("min_frames", 4) / 2)
        max_frames = 2 * math.floor(ele.get("max_frames", min(768, total)) / 2)
        target = total / rate * ele.get("fps", 2.0)
        count = 2 * math.floor(min(max(target, min_frames), max_frames, total) / 2)
    if not 2 <= count <= total:
        raise ValueError(f"{count} frames of a video or window of {total}")
    return count


def linspace(first: int, last: int, count: int) -> list[int]:
    """-> indices of frames, both ends among them."""
    import torch  # takes seconds, and --help need not wait

    # Not numpy's: in a long video another rounding of the sums takes other frames.
    return torch.linspace(first, last, count).round().long().tolist()


def window(total: int, rate: float, start: float, end: float) -> tuple[int, int]:
    """First and last frame of a window in seconds. Raises ValueError if these are not two."""
    length = total / rate
    # max and min in this order turn NaN into 0, as theirs do.
    first = math.ceil(max(0.0, min(start, length)) * rate)
    last = min(math.floor(max(0.0, min(end, length)) * rate), total - 1)
    if first >= last:
        raise ValueError(f"the window {start:g}-{end:g} s holds less than two frames")
    return first, last


def sides(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple:
    """(height, width) in multiples of `factor`, with at least `min_pixels` and at most
    `max_pixels`."""
    tall, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if tall * wide > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        tall, wide = (math.floor(side / scale / factor) * factor for side in (height, width))
    elif tall * wide < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return tall, wide


def qwen(ele: dict, total: int, rate: float, height: int, width: int, patch: int = 14) -> tuple:
    """
    What qwen_vl_utils.fetch_video reads -> (indices of frames, (height, width)).

    ele: its argument: "nframes", or "fps" with "min_frames" and "max_frames"; "video_start" and
    "video_end" in seconds; "min_pixels" and "max_pixels" of a frame, "total_pixels" of all. total,
    rate, height, width: of the video. Raises ValueError if it has too few frames there.
    """
    first, last = 0, total - 1
    if "video_start" in ele or "video_end" in ele:
        first, last = window(total, rate, ele.get("video_start", 0.0),
                             ele.get("video_end", total / rate))
    count, factor = even_count(ele, last - first + 1, rate), 2 * patch
    min_pixels = ele.get("min_pixels", 128 * factor**2)
    # Two frames make one grid of patches, which this reader counts once.
    together = ele.get("total_pixels", 128_000 * factor**2 * 0.9) / count * 2
    max_pixels = max(min(768 * factor**2, together), int(min_pixels * 1.05))
    max_pixels = min(max_pixels, ele.get("max_pixels", max_pixels))
    return linspace(first, last, count), sides(height, width, factor, min_pixels, max_pixels)


def vllm_video(total: int, height: int, width: int, total_pixels: float, frames: int = 32) -> tuple:
    """What vLLM reads of a video_url and Qwen3-VL's processor makes of it -> (indices, (height,
    width)). total_pixels: of all frames together."""
    indices = sorted({int(i) for i in np.linspace(0, total - 1, min(frames, total))})
    tall, wide = (round(side / 32) * 32 for side in (height, width))
    if 2 * round(len(indices) / 2) * tall * wide > total_pixels:
        scale = math.sqrt(len(indices) * height * width / total_pixels)
        tall, wide = (math.floor(side / scale / 32) * 32 for side in (height, width))
    return indices, (max(32, tall), max(32, wide))
