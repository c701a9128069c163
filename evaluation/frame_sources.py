"""
evaluation/frame_sources.py (tests/test_protocols.py): which frames a system is shown.

  grid  "centres"  ours: the centres of equal segments, see video.py
        "qwen"     the reader of most publishers, windows too, see qwen_vl_sampling.py

Reads videos and subtitles. Writes no file.
"""

import re
from dataclasses import dataclass

import numpy as np

import rollout
import video
from evaluation import qwen_vl_sampling


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
    """Frames of a video that the endpoint reads itself, from this path."""

    path: str = ""


@dataclass
class PublisherSource(rollout.VideoSource):
    """A VideoSource with the frames of a publisher's reader."""

    grid: str = "centres"
    fps: float = 0.0  # frames per second of the overview, K at most; 0 = always K
    total_pixels: int = 0  # of the overview, all frames together; 0 = no bound
    patch: int = 14  # "qwen": sides of frames are multiples of two patches
    crop_min_pixels: int = 0  # of a window's frame; 0 = min_pixels
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
        if self.grid == "qwen":
            return self.load_qwen(spec)
        if "frames" in spec and self.fps:  # half a frame counts as one
            paced = int(self.duration(spec) * self.fps + 0.5)
            spec = {**spec, "frames": max(1, min(paced, spec["frames"]))}
        return super().load(spec)

    def load_qwen(self, spec):
        """Frames as qwen_vl_utils reads them, or a ServerVideo. Raises ValueError for a window
        without two frames, and VideoError for a video without the frames of an overview."""
        path = video.resolve(spec["video"], self.root)
        starts, info = self.cache.index(path)
        if spec.get("as_video"):
            indices, size = qwen_vl_sampling.vllm_video(
                len(starts), info.height, info.width, self.max_pixels)
            frames = self.cache.frames(path, indices, 0, 0, size)
            return ServerVideo(**vars(frames), path=path)
        wanted = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        if "start" in spec:
            wanted.update(fps=spec["fps"], min_frames=1, max_frames=spec["max_frames"],
                          video_start=spec["start"], video_end=spec["end"])
            wanted["min_pixels"] = self.crop_min_pixels or self.min_pixels
            wanted["max_pixels"] = self.crop_pixels or self.max_pixels
        elif self.fps:
            wanted.update(fps=self.fps, max_frames=spec["frames"])
        else:
            wanted.update(nframes=spec["frames"])
        if self.total_pixels and "frames" in spec:
            wanted.update(total_pixels=self.total_pixels)
        try:
            indices, size = qwen_vl_sampling.qwen(
                wanted, len(starts), info.fps, info.height, info.width, self.patch)
        except ValueError as error:
            if "start" in spec:
                raise
            if self.short_is_blind:
                return no_frames()
            raise video.VideoError(path, f"too short for this system: {error}") from None
        return self.cache.frames(path, indices, 0, 0, size)


def no_frames():
    return video.Frames(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0), "none", [])


def frame_starts(source, name):
    """-> seconds at which the frames of a video come on display."""
    starts, info = source.cache.index(video.resolve(name, source.root))
    return [float(start) for start in starts if 0 <= start < info.duration]
