"""
evaluation/frame_sources.py (tests/test_protocols.py): where the frames of an evaluation come from.

  overview_grid   "centres": ours, the centres of equal segments, see video.py
                  "qwen": the reader of most publishers, windows too, see qwen_vl_sampling.py
                  "start": VideoZoomer's, from the first frame on, evenly; above its limit from the
                  first to the last

A server resizes the frames that it gets once more, by the bounds of the checkpoint's own processor.
The engine in this process does not, so `VideoSource` does: both engines then see the same pixels.

Reads videos and subtitles. Writes no file.
"""

import io
from dataclasses import dataclass

import numpy as np

import launch
import rollout
import video
from evaluation import qwen_vl_sampling
from evaluation.endpoint import jpeg_bytes
from plumbing.data import written_lines


@dataclass
class ServerVideo(video.Frames):
    """Frames that go to the model as one video. An endpoint gets the path and reads the file."""

    path: str = ""


@dataclass
class PublisherSource(rollout.VideoSource):
    """A rollout.VideoSource whose frames are those of a publisher's reader."""

    overview_fps: float = 0.0  # frames per second, K at most; 0 = always K
    total_pixels: int = 0  # of the overview, all frames together; 0 = no bound
    overview_grid: str = "centres"  # see above
    patch: int = 14  # of "qwen": pixels; sides of frames are multiples of two patches
    crop_min_pixels: int = 0  # pixels of a window's frame at least; 0 = min_pixels
    grounding_as_video: bool = False  # the server reads videos of grounding tasks itself
    short_is_blind: bool = False  # too few frames: none are shown, as in the paper's driver
    written_lines: bool = False  # subtitles are all lines of the file as written, repeats too
    crop_fps: float = 1.0  # frames per second of a window
    crop_frames: int = 16  # frames of a window, at most
    jpeg: int = 0  # quality at which frames reach the processor; 0 = as decoded
    processor: tuple = ()  # (min, max) pixels of the checkpoint's processor; () = no resize
    show: str = "real"  # "blank", "shuffled": see apply_show; others change no frame

    def overview_spec(self, task, num_frames):
        spec = super().overview_spec(task, num_frames)
        as_video = self.grounding_as_video and task["type"] == "grounding"
        return {**spec, "as_video": True} if as_video else spec

    def load_overview(self, spec, task):
        frames, seconds, subtitles = super().load_overview(spec, task)
        if self.subtitles and self.written_lines and task.get("subtitles"):
            subtitles = written_lines(video.resolve(task["subtitles"], self.root))
        return frames, seconds, subtitles

    def load(self, spec):
        if spec.get("frames") == 0:  # text alone; the video must open, as prompts tell lengths
            return empty_frames()
        if self.overview_grid == "qwen":
            return self.apply_show(self.load_qwen(spec), spec)
        if self.overview_grid == "start" and spec.get("num_frames"):
            return self.apply_show(self.load_zoom(spec), spec)
        if "frames" not in spec:
            return self.apply_show(super().load(spec), spec)
        num_frames, max_pixels = spec["frames"], self.max_pixels
        if self.overview_fps:  # half a frame counts as one
            num_frames = max(1, min(int(self.duration(spec) * self.overview_fps + 0.5), num_frames))
        if self.total_pixels:
            # Two frames make one grid of patches, which the publishers' reader counts once. The
            # reader leaves 5% above the least, so that a shape still fits between both bounds.
            max_pixels = min(max_pixels, max(2 * self.total_pixels // num_frames,
                                             int(1.05 * self.min_pixels)))
        load_spec = {**spec, "frames": num_frames}
        if self.overview_grid == "start":
            load_spec = {"video": spec["video"], "times": self.times_from_start(spec, num_frames)}
        frames = video.load(load_spec, self.root, self.cache, self.min_pixels, max_pixels)
        return self.apply_show(frames, spec)

    def load_qwen(self, spec):
        """Frames of "qwen", or a ServerVideo. Raises ValueError for a window without two frames,
        and VideoError for a video without the frames of an overview."""
        path = video.resolve(spec["video"], self.root)
        starts, info = self.cache.index(path)
        shape = len(starts), info.height, info.width
        if spec.get("as_video"):
            indices, size = qwen_vl_sampling.vllm_video(*shape, self.max_pixels)
            return ServerVideo(**vars(self.cache.frames(path, indices, 0, 0, size)), path=path)
        ele = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        if "start" in spec:
            ele = {"fps": spec["fps"], "min_frames": 1, "max_frames": spec["max_frames"],
                   "video_start": spec["start"], "video_end": spec["end"],
                   "min_pixels": self.crop_min_pixels or self.min_pixels,
                   "max_pixels": self.crop_pixels or self.max_pixels}
        elif self.overview_fps:
            ele.update(fps=self.overview_fps, max_frames=spec["frames"])
        else:
            ele.update(nframes=spec["frames"])
        if self.total_pixels and "frames" in spec:
            ele.update(total_pixels=self.total_pixels)
        try:
            indices, size = qwen_vl_sampling.qwen(ele, shape[0], info.fps, *shape[1:], self.patch)
        except ValueError as error:
            if "start" in spec:
                raise
            if self.short_is_blind:
                return empty_frames()
            raise video.VideoError(path, f"too short for this system: {error}") from None
        return self.process_frames(self.cache.frames(path, indices, 0, 0, size))

    def load_zoom(self, spec):
        """Frames of a window as VideoZoomer takes them: evenly, the first and the last included.
        Raises ValueError for a window after the end."""
        path = video.resolve(spec["video"], self.root)
        starts, info = self.cache.index(path)
        if spec["start"] >= info.duration:
            raise ValueError(f"the window begins after the end of the video, {info.duration:.1f}s")
        first, last = (min(int(spec[end] * info.fps), len(starts) - 1) for end in ("start", "end"))
        indices = np.linspace(max(0, first), last, spec["num_frames"]).astype(int)
        return self.cache.frames(path, sorted(set(indices.tolist())), self.min_pixels,
                                 self.crop_pixels or self.max_pixels)

    def process_frames(self, frames):
        """Frames as a server's processor would hand them to the model."""
        if not (self.jpeg or self.processor):
            return frames
        from PIL import Image

        images, (height, width) = [*map(Image.fromarray, frames.images)], frames.images.shape[1:3]
        if self.jpeg:
            images = [Image.open(io.BytesIO(jpeg_bytes(rgb, self.jpeg))) for rgb in frames.images]
        if self.processor:
            height, width = qwen_vl_sampling.sides(height, width, 32, *self.processor)
            # PIL copies an image that has this size already.
            images = [image.resize((width, height), Image.Resampling.BICUBIC) for image in images]
        name = f"jpeg{self.jpeg}-{height}x{width}-"
        return video.Frames(np.stack(images), frames.seconds, name + frames.key,
                            [name + key for key in frames.frame_keys])

    def apply_show(self, frames, spec):
        """Frames as --show wants them. Times stay, so a prompt has the same tokens."""
        if self.show == "blank":
            order = np.arange(len(frames.seconds))
            images = np.broadcast_to(np.uint8(127), frames.images.shape)
        elif self.show == "shuffled" and "frames" in spec:
            order = np.argsort([launch.stable_hash("show", spec["video"], len(frames.seconds), i)
                                for i in range(len(frames.seconds))])
            images = frames.images[order]
        else:
            return frames
        # Keys name pictures: caches of the engine must not take these for the real ones. No
        # ServerVideo, because an endpoint would read the file.
        keys = [f"{self.show}{frames.frame_keys[i]}" for i in order]
        return video.Frames(images, frames.seconds, self.show + frames.key, keys)

    def times_from_start(self, overview_spec, num_frames):
        """-> seconds of `num_frames` frames at most, as VideoZoomer takes them."""
        starts, info = self.cache.index(video.resolve(overview_spec["video"], self.root))
        indices = [int(i * (len(starts) - 1) / max(1, num_frames - 1)) for i in range(num_frames)]
        step = max(1, round(len(starts) / info.duration / self.overview_fps))  # in frames
        if len(starts) <= step * overview_spec["frames"]:
            indices = range(0, len(starts), step)
        # A video with fewer frames shows no frame twice.
        return [float(starts[index]) for index in dict.fromkeys(indices)]


def empty_frames():
    return video.Frames(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0), "none", [])
