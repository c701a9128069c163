"""
evaluation/frame_sources.py (tests/test_protocols.py): which frames a system is shown.

  grid  "centres"  ours: the centres of equal segments, see video.py
        "qwen"     qwen_vl_utils 0.0.14, which most publishers use: an even number of frames, from
                   the first to the last one of the video or of a window

Reads videos and subtitles. Writes no file.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

import launch
import rollout
import video


def written_lines(path):
    """Text of an SRT file as the paper's driver shows it: every line, repeats too."""
    with open(path, encoding="utf-8", errors="ignore") as file:
        blocks = re.split(r"\n\s*\n", file.read().strip())
    lines = []
    for block in blocks:
        # Number and times are the first two lines of a block.
        for line in block.strip().split("\n")[2:]:
            line = re.sub("<[^>]+>", "", line).strip()
            if line:
                lines.append(line)
    return "\n".join(lines)


@dataclass
class ServerVideo(video.Frames):
    """A video that the endpoint reads itself, from this path. Which frames it takes is not known
    here."""

    path: str = ""


@dataclass
class PublisherSource(rollout.VideoSource):
    """A VideoSource with the frames of a publisher's reader."""

    grid: str = "centres"
    fps: float = 0.0  # frames per second of the overview, K at most; 0 = always K
    total_pixels: int = 0  # of the overview, all frames together; 0 = its own bound
    patch: int = 14  # "qwen": sides of frames are multiples of two patches
    crop_min_pixels: int = 0  # of a window's frame; 0 = min_pixels
    crop_pixels: int = 0  # the same at most; 0 = max_pixels
    grounding_as_video: bool = False  # the server reads videos of grounding tasks itself
    short_is_blind: bool = False  # a video with too few frames is asked about without any
    written_lines: bool = False  # subtitles are all lines of the file, repeats too

    def overview_spec(self, task, num_frames):
        spec = super().overview_spec(task, num_frames)
        if self.grounding_as_video and task["type"] == "grounding":
            spec["as_video"] = True
        return spec

    def load_overview(self, spec, task):
        frames, seconds, subtitles = super().load_overview(spec, task)
        if self.subtitles and self.written_lines and task.get("subtitles"):
            subtitles = written_lines(video.resolve(task["subtitles"], self.root))
        return frames, seconds, subtitles

    def load(self, spec):
        if spec.get("frames") == 0:  # text alone
            return no_frames()
        if spec.get("as_video"):
            path = video.resolve(spec["video"], self.root)
            return ServerVideo(**vars(no_frames()), path=path)
        if self.grid == "qwen":
            return self.load_qwen(spec)
        if "frames" in spec and self.fps:  # half a frame counts as one
            num_frames = int(self.duration(spec) * self.fps + 0.5)
            spec = {**spec, "frames": max(1, min(num_frames, spec["frames"]))}
        return super().load(spec)

    def load_qwen(self, spec):
        """Frames as qwen_vl_utils reads them. Raises ValueError for a window without two frames,
        and VideoError for a video without the frames of an overview."""
        launch.import_shim()
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        path = video.resolve(spec["video"], self.root)
        starts, info = self.cache.index(path)
        factor = 2 * self.patch
        min_pixels, max_pixels = self.min_pixels, self.max_pixels
        if "start" in spec:
            min_pixels = self.crop_min_pixels or min_pixels
            max_pixels = self.crop_pixels or max_pixels
        try:
            indices = qwen_indices(spec, len(starts), info.fps, self.fps)
            # Two frames make one grid of patches, which this reader counts once.
            total_pixels = self.total_pixels or 128_000 * factor**2 * 0.9
            bound = min(768 * factor**2, total_pixels / len(indices) * 2)
            max_pixels = min(max(bound, int(min_pixels * 1.05)), max_pixels)
            size = smart_resize(info.height, info.width, factor, min_pixels, max_pixels)
        except ValueError as error:
            if "start" in spec:
                raise
            if self.short_is_blind:
                return no_frames()
            raise video.VideoError(path, f"not readable for this system: {error}") from None
        return self.cache.frames(path, indices, 0, 0, size)


def qwen_indices(spec, total, rate, fps):
    """
    -> indices of the frames that qwen_vl_utils takes of a video with `total` frames, `rate` a
    second. spec: see VideoSource.load. fps: frames per second of an overview; 0 = always
    spec["frames"]. Raises ValueError if there are too few.

    >>> qwen_indices({"start": 8, "end": 12, "fps": 1, "max_frames": 16}, 6000, 25.0, 0)
    [200, 233, 267, 300]
    """
    import torch  # takes seconds, and --help need not wait

    first, last, min_frames = 0, total - 1, 4
    count = spec.get("frames") or spec["max_frames"]
    if "start" in spec:
        fps, min_frames = spec["fps"], 2
        first = math.ceil(max(0.0, min(spec["start"], total / rate)) * rate)
        last = min(math.floor(max(0.0, min(spec["end"], total / rate)) * rate), last)
        if first >= last:
            raise ValueError(f"the window {spec['start']:g}-{spec['end']:g} s holds less than two "
                             "frames")
    available = last - first + 1
    if fps:
        max_frames = count // 2 * 2
        count = min(max(available / rate * fps, min_frames), max_frames, available)
        count = 2 * math.floor(count / 2)
    else:
        count = 2 * round(count / 2)
    if not 2 <= count <= available:
        raise ValueError(f"{count} frames of a video or window of {available}")
    # Not numpy's: in a long video another rounding of the sums takes other frames.
    return torch.linspace(first, last, count).round().long().tolist()


def no_frames():
    return video.Frames(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0), "none", [])


def frame_starts(source, name):
    """-> seconds at which the frames of a video come on display."""
    starts, info = source.cache.index(video.resolve(name, source.root))
    return [float(start) for start in starts if 0 <= start < info.duration]
