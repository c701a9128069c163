"""video.py (tests/test_video.py): a video, a file or a folder of frames -> frames with timestamps,
cached; and VideoSource, where the frames of a task come from.

T frames of H x W pixels; s_i = start of frame i in seconds, s_0 = 0; D = duration.
  frame on display at t   = the last i with s_i <= t; the frame's time is s_i, not t
  overview(K)             = frames on display at (k + 0.5) D / K, k = 0..K-1
  crop(a, b)              = frames on display at a + (k + 0.5)(b - a) / n, k = 0..n-1, with
                            a, b clamped to [0, D] and n = clip(round((b - a) fps), 1, max_frames)
  overview(K, snap)       = the same, but the nearest key frame if one starts within D / 2K
All drop repeats. 64 frames at 1 fps: overview(4) -> 8, 24, 40, 56; crop(16, 19) -> 16, 17, 18.

Departures: s_i is the container's clock, never i / fps, which is wrong as soon as the rate varies.
Frames are resized once, here, to multiples of 32 (patch 16 x merge 2), and by no processor again.
PyAV decodes. Frames that were not requested and that no other frame needs are skipped.

A broken or a dangerous file is a VideoError. docs/your-own-data.md tells which files are read,
with which times, and which are refused. A decoder process may use MAX_MEMORY (an hour of 4K HEVC
took 0.5 GiB). Without a timeout this process decodes, and has no such bound.

Reads one video. Writes only the folder of a FrameCache, if the cache has one. As a script this file
is a decoder process, see ChildDecoder.
"""

import contextlib
import functools
import io
import math
import os
import pathlib
import re
import select
import stat
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection, Pipe

import numpy as np  # av and PIL are imported in the functions that decode; sampling needs neither

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import launch
from plumbing import arguments, bitstream, caches

# Formats of a single file whose frames have times. Last line: stills, videos of one frame.
FORMATS = ("mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,rm,dv,mxf,nut,ivf,gif,apng,yuv4mpegpipe,"
           "image2,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe")
MOOF, MATROSKA = rb"moof\0\0\0\x10mfhd", rb"(?s)\x1aE\xdf\xa3.{,60}(webm|matroska)"  # of files
CACHE_VERSION = 25  # raise this if reading changes: older frames on disk are then not used
# Of a frame, two of 8K; bytes of a decoder process, decoded frames included.
MAX_PIXELS, MAX_MEMORY = 2**26, 8 * 2**30


class VideoError(launch.UserError):
    """This file cannot be used: `.path` says which, `.why` what is wrong; str() is "path: why"."""

    def __init__(self, path, reason):
        super().__init__(str(path), reason)  # unchanged: exceptions are pickled by these
        self.path, self.why = self.args

    def __str__(self):
        return f"{self.path}: {self.why}"


@dataclass(frozen=True)
class VideoInfo:
    duration: float  # seconds, from the start of the first frame to the end of the last
    num_frames: int
    fps: float  # num_frames / duration: an average, frames need not be evenly spaced
    width: int  # pixels, as displayed (rotation applied)
    height: int


@dataclass(frozen=True)
class VideoTable:
    """When the frames of a video are displayed, and where a decoder can begin."""

    state: tuple  # real path, identity, CACHE_VERSION: another state of the file is another video
    starts: np.ndarray  # [N] seconds, ascending, in steps of 0.1 ms, the first is 0; read-only
    info: VideoInfo
    ticks: np.ndarray  # [N] the same times in the stream's own unit, or numbers of frames
    keys: np.ndarray  # [K, 2] key frames at which decoding can begin: tick, byte in the file


@dataclass
class Frames:
    images: np.ndarray  # [T, H, W, 3] uint8 RGB; read-only because a cache shares them
    seconds: np.ndarray  # [T] float64, start of each frame on the video's clock; read-only
    key: str  # names this set of frames: same file, same frames, same size <=> same key
    frame_keys: list[str]  # [T] equal in every set that holds this frame at this size


@functools.cache
def smart_size(height, width, min_pixels, max_pixels, multiple=32):
    """(height, width) in pixels -> (h, w) to resize to, whole multiples of `multiple`.

    Of all pairs with min_pixels <= h * w <= max_pixels: the one nearest, in log h and log w, to
    the exact rescaling, so shape and area are kept. If there is no such pair, the lower bound is
    given up; (multiple, multiple) may exceed the upper bound too. Raises ValueError: a side < 1,
    min_pixels > max_pixels.
    """
    if min(height, width, multiple) < 1 or min_pixels > max_pixels:
        raise ValueError(f"cannot fit {height}x{width} into {min_pixels} to {max_pixels} pixels")
    area = min(max(height * width, min_pixels), max_pixels)  # own area, moved into the bounds
    tall = math.sqrt(area * height / width) / multiple  # the exact answer, in cells of `multiple`
    wide = math.sqrt(area * width / height) / multiple
    fewest, limit = -(-min_pixels // multiple**2), max(1, max_pixels // multiple**2)  # whole cells
    fewest = fewest if 1 <= fewest <= limit else 1  # no whole number lies between 13.2 and 13.8
    # A column that is taller than the exact one and holds `fewest` cells alone only gets worse.
    down = np.arange(1, min(limit, max(math.ceil(tall), fewest)) + 1)[:, None]  # [N, 1] cells
    low, high = -(-fewest // down), limit // down  # [N, 1] bounds of the cells across
    across = (math.floor(wide) + np.arange(2)).clip(low, high)  # [N, 2] the two nearest widths
    distance = np.abs(np.log(down / tall)) + np.abs(np.log(across / wide))
    # Rounded, so that ties compare equal and the smaller one wins on every machine.
    best = np.where(low <= high, distance.round(9), np.inf).argmin()
    return (int(best) // 2 + 1) * multiple, int(across.flat[best]) * multiple


def _frame_at(starts, looks):
    """Frame starts [N], look times [L] in seconds -> sorted unique indices [<=L] of frames seen."""
    # 1 ms of grace: a look at 16.04 sees the frame that starts there, 16.0400009 as a float32.
    return np.unique(np.maximum(np.searchsorted(starts, np.asarray(looks) + 1e-3, "right") - 1, 0))


def overview_indices(starts, duration, num_frames, keys=()):
    """Frame starts [N] in seconds -> indices of at most `num_frames` frames of the whole video.

    `keys`: indices of key frames. If key frames start in a look's own segment, the nearest one is
    taken, because a decoder reaches a key frame without the frames before.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, not {num_frames}")
    looks = (np.arange(num_frames) + 0.5) * duration / num_frames  # [K] centres of equal segments
    if not len(keys):
        return _frame_at(starts, looks)
    after = np.searchsorted(starts[keys], looks).clip(1, max(1, len(keys) - 1))  # [K]
    pair = keys[np.stack([after - 1, after]).clip(0, len(keys) - 1)]  # [2, K], one on each side
    near = pair[np.abs(starts[pair] - looks).argmin(0), np.arange(num_frames)]  # [K]
    close = np.abs(starts[near] - looks) <= duration / num_frames / 2  # [K]
    return np.union1d(near[close], _frame_at(starts, looks[~close]))


def crop_indices(starts, duration, start, end, num_frames=None, fps=1.0, max_frames=16):
    """Frame starts [N] -> indices of the frames seen in the window [start, end], all in seconds.

    `fps` looks a second, or `num_frames` in all; at least 1 and at most `max_frames`. ValueError:
    fps or max_frames <= 0; no part of the window lies in [0, duration] (reversed, beyond, NaN).
    """
    if not fps > 0 or max_frames < 1:
        raise ValueError(f"fps and max_frames must be positive, not {fps} and {max_frames}")
    low, high = np.clip([start, end], 0.0, duration)  # NaN stays NaN and fails the next test
    if not low < high:
        extent = f"the video, which runs from 0 to {duration:g} s"
        raise ValueError(f"window {start:g}-{end:g} s holds nothing of {extent}")
    wanted = (high - low) * fps if num_frames is None else num_frames  # looks
    # round() would send 2.5 to 2. The minimum comes first, because a huge fps has no whole number.
    n = max(math.floor(min(wanted, max_frames) + 0.5), 1)
    return _frame_at(starts, low + (np.arange(n) + 0.5) * (high - low) / n)  # as in an overview


def resolve(video, root=None):
    """Path in a data file -> real path; with `root`: relative to root and inside root.

    Raises VideoError for a path whose text leaves root, absolute or by `..`. Links are followed,
    because root's owner made them and a hub snapshot consists of links. Existence is not checked.
    """
    if not isinstance(video, (str, os.PathLike)) or "\0" in os.fspath(video):
        raise VideoError(repr(video), "is not a path")
    if re.match(r"\w+://", os.fspath(video)):
        raise VideoError(video, "is an address: download the video first")
    if root is None:
        return os.path.realpath(video)
    path = os.path.normpath(os.path.join(os.path.abspath(root), video))  # or `video`, if absolute
    for base in (os.path.abspath(root), os.path.realpath(root)):  # either name of the folder
        if os.path.commonpath([base, path]) == base:  # by whole names: /data2 is not inside /data
            return os.path.realpath(path)
    raise VideoError(video, f"lies outside the video folder {base}")


def root_of(args, path):
    """The folder that the videos of a data file are relative to: --video-root, or the file's."""
    return args.video_root or os.path.dirname(os.path.abspath(path))


def overview(path, num_frames, min_pixels=1024, max_pixels=50176, cache=None, snap=False):
    """Path -> Frames, at most `num_frames`. snap: take key frames if they are near enough; fast in
    long files. Raises VideoError, ValueError for num_frames < 1."""
    table = (cache := cache or FrameCache(0)).table(path)
    keys = np.flatnonzero(np.isin(table.ticks, table.keys[:, 0])) if snap else ()
    indices = overview_indices(table.starts, table.info.duration, num_frames, keys)  # [T]
    return cache.frames(path, indices, min_pixels, max_pixels)


def crop(path, start, end, num_frames=None, fps=1.0, max_frames=16,
         min_pixels=1024, max_pixels=50176, cache=None):
    """Path, window in seconds -> Frames, timed on the whole video's clock; see `crop_indices`.

    The first frame may start before `start`, because it is on display at that time. Raises
    VideoError also.
    """
    starts, info = (cache := cache or FrameCache(0)).index(path)  # [N] seconds
    indices = crop_indices(starts, info.duration, start, end, num_frames, fps, max_frames)  # [T]
    return cache.frames(path, indices, min_pixels, max_pixels)


def frames_at(path, times, min_pixels=1024, max_pixels=50176, cache=None):
    """Path, times in seconds -> Frames on display at these times. ValueError: all lie outside."""
    starts, info = (cache := cache or FrameCache(0)).index(path)  # [N] seconds
    valid_times = [t for t in times if 0 <= t < info.duration]  # seconds; other times are left out
    if not valid_times:
        raise ValueError(f"no time lies in the video, which runs from 0 to {info.duration:g} s")
    return cache.frames(path, _frame_at(starts, valid_times), min_pixels, max_pixels)


def load(spec, root=None, cache=None, min_pixels=1024, max_pixels=50176):
    """A message's video item -> Frames. The path goes through `resolve`. Raises like these:

    {"video", "frames": K, "snap"?}: overview. {"video", "times": [..]}: at. {"video", "start",
    "end", "fps"?, "max_frames"?, "num_frames"?}: crop; null: not given. Others raise KeyError.
    """
    path = resolve(spec["video"], root)
    size = {"min_pixels": min_pixels, "max_pixels": max_pixels, "cache": cache}
    if "frames" in spec:
        return overview(path, spec["frames"], **size, snap=spec.get("snap", False))
    if "times" in spec:
        return frames_at(path, spec["times"], **size)
    options = {k: spec[k] for k in ("num_frames", "fps", "max_frames") if spec.get(k) is not None}
    return crop(path, spec["start"], spec["end"], **options, **size)


def identity(path):
    """Path -> [bytes, mtime in ns], or for a folder of frames [bytes, digest of these of all its
    files], some seconds old: another video at this path has another identity. Raises VideoError."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return _folder_identity(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise VideoError(path, "is not a regular file")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise VideoError(path, launch.machine_mark(error) + launch.why(error).lower()) from error
    if status.st_size == 0:
        raise VideoError(path, "is empty (0 bytes)")
    return [status.st_size, status.st_mtime_ns]


@dataclass
class VideoSource:
    """Where frames come from: the root folder, size bounds, the cache of this stage."""

    root: str
    cache: "FrameCache"
    min_pixels: int = 1024  # of a frame after resizing
    max_pixels: int = 50176
    crop_pixels: int = 0  # of a window's frame, at most; 0 = max_pixels
    subtitles: object = None  # (task, seconds of the frames [K], root) -> text of its file, or ""
    snap: bool = False  # overviews take nearby key frames, see overview_indices
    check_labels: bool = False  # labels of a user's file are checked, those of a benchmark are not

    def overview_spec(self, task, num_frames):
        """The overview of a task, as `load` reads it and as a rollout records it."""
        # Only if set: records of runs without --set snap=keyframe have no such field.
        return dict(video=task["video"], frames=num_frames) | ({"snap": True} if self.snap else {})

    def load(self, spec: dict) -> Frames:
        """{"video", "frames"} or {"video", "start", "end", ..} -> Frames. Raises VideoError, or
        ValueError if a window holds no part of the video."""
        pixel_limit = self.max_pixels if "frames" in spec else self.crop_pixels or self.max_pixels
        return load(spec, self.root, self.cache, self.min_pixels, pixel_limit)

    def load_overview(self, spec, task):
        """-> (Frames, seconds of the video, text of the subtitles, identity)."""
        # One call for all, because each reads the disk and this runs in a decoder's thread.
        fingerprint = self.cache.identity(resolve(spec["video"], self.root))
        duration, frames = self.duration(spec), self.load_unchanged(spec, fingerprint)
        text = self.subtitles(task, frames.seconds, self.root) if self.subtitles else ""
        return frames, duration, text, fingerprint

    def load_window(self, spec, fingerprint):
        """A crop that the model asked for -> (the same clamped to the video, Frames). fingerprint:
        its identity at the overview. Raises as `load` does, and VideoError for another video."""
        frames = self.load_unchanged(spec, fingerprint)
        # A model may ask for -5 s or for a second after the end. The message to the sub-agent and
        # the record name the part that was shown.
        start, end = max(0.0, spec["start"]), min(spec["end"], self.duration(spec))
        return {**spec, "start": start, "end": end}, frames

    def load_unchanged(self, spec, fingerprint):
        """As `load`; VideoError also for a file of another fingerprint after decoding."""
        try:
            return self.load(spec)
        finally:  # also after the ValueError of a window that lies beyond another video's end
            if self.cache.identity(resolve(spec["video"], self.root)) != fingerprint:
                raise VideoError(spec["video"], f"{launch.MACHINE}changed during the episode")

    def duration(self, spec):
        """Seconds of the video."""
        return self.cache.table(resolve(spec["video"], self.root)).info.duration


# ---- below: decoders, cache (a reader of the training step may stop here) ----


_folders = {}  # folder of frames -> (time in seconds, its identity)


def _files_of(path):
    """Real paths of a video: its own, or of a folder of frames those of two files, maybe links."""
    files = (f for _, f in zip(range(2), os.scandir(path))) if os.path.isdir(path) else [path]
    return [*map(os.path.realpath, files)] or [f"{path}/000001.jpg"]


def _folder_identity(path):
    """identity of a folder of frames."""
    read_at, cached = _folders.get(path, (-math.inf, None))
    # 100,000 images take 2.5 s.
    if time.monotonic() - read_at < 5 and all(map(os.path.exists, _files_of(path))):
        return cached
    files = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns)  # or a link's error
                   for entry in os.scandir(path) if entry.name[0] != "." and not entry.is_dir())
    if not files:
        raise OSError(2, "has no images", f"{path}/000001.jpg")  # ENOENT, as of a missing file
    digest = sha256(repr(files).encode("utf-8", "surrogateescape")).hexdigest()
    _folders[path] = time.monotonic(), [sum(size for _, size, _ in files), digest]
    return _folders[path][1]


def _duration(starts, end):
    """Starts [N], end of the last frame in seconds -> duration; without an end, one frame more."""
    # FLV and fragmented mp4 do not state the end. A still: one second.
    usual, end = np.median(np.diff(starts) if len(starts) > 1 else 1.0), round(float(end), 4)
    return end if end > starts[-1] else round(float(starts[-1] + usual), 4)


def _pictures(folder):
    """Folder of frames -> numbers [N] of its images, ascending, and their names. VideoError."""
    names = [name for name in os.listdir(folder) if name[0] != "."]  # glob would hide errors
    parts = [re.fullmatch(r"(?i)(.*?)([0-9]*)[.](?:jpe?g|png|webp)", name) for name in names]
    numbered = sorted((part[1], int(part[2] or -1), part[0]) for part in parts if part)
    prefixes, numbers, names = zip(*numbered) if numbered else ((), (), ())
    if len(set(prefixes)) > 1 or len(set(numbers)) < len(numbers):
        raise VideoError(folder, f"its images, {names[0]} to {names[-1]}, are not named alike: "
                         "each needs a number of its own, after the same text")
    return numbers, names


def _open_folder(path):
    """Folder of frames -> its table, as of `_open`. Ticks count the images from 0."""
    numbers, names = _pictures(path)
    clock = [n for n in ("fps", "times.txt", "seconds.txt") if launch.is_file(f"{path}/{n}")]
    if not names or len(clock) != 1:
        has = " and ".join(clock) or "neither fps nor times.txt" if names else "no images"
        raise VideoError(path, f"this folder has {has}: add images 000001.jpg, .. and either fps, "
                         "a text file of one number, or times.txt, one time in seconds a line")
    try:
        times = np.array(launch.read_file(f"{path}/{clock[0]}").decode("utf-8-sig").split(), float)
    except (OSError, ValueError) as error:
        raise VideoError(path, f"{launch.machine_mark(error, ())}{clock[0]}: {error}") from error
    gaps, count, end = np.diff(numbers), len(names), 0.0  # 0: the end is unknown
    if clock == ["fps"]:
        if len(times) != 1 or not 1e-6 < times[0] <= 1000:
            raise VideoError(path, "fps must hold one number, above 0 and at most 1000")
        if len(set(gaps)) > 1:  # a lost image would move all that follow
            raise VideoError(path, f"images missing after {names[gaps.argmax()]}: use times.txt")
        times, end = np.arange(count) / times[0], count / times[0]
    if len(times) != count:
        raise VideoError(path, f"{clock[0]} has {len(times)} times for {count} images")
    # Videos begin at 0. seconds.txt (of frames that a client of tools/serve.py sends) counts as it
    # is written, because the client's question may name its times.
    starts = np.round(times if clock == ["seconds.txt"] else times - times[0], 4)
    if not (later := np.diff(starts, prepend=-1e-9) > 0).all():  # NaN is never later
        raise VideoError(path, f"{clock[0]}: time {later.argmin() + 1} is not later, or below 0")
    ticks, (height, width) = np.arange(count), _picture(path, names[0]).shape[:2]
    # All are key frames.
    return starts, _duration(starts, end), height, width, ticks, np.stack([ticks, ticks], 1)


def _picture(folder, name):
    """Image of a folder -> [H, W, 3] uint8 RGB, upright as its EXIF says. VideoError."""
    # By name, because Image.open takes a plugin that a disk did not give for none.
    from PIL import Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401
    try:
        file = io.BytesIO(launch.read_file(os.path.join(folder, name)))
        with Image.open(file, formats=["JPEG", "PNG", "WEBP"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels are too many")
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits of grey, which convert would cut off at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VideoError(folder, f"{launch.machine_mark(error, ())}{name}: {error}") from error


class _VideoSource(io.FileIO):
    """A file that raises the error of a read that failed when it is closed: libavformat takes it
    for the end of the file in some formats, and half a picture for a whole one."""

    error = None

    def __exit__(self, *exception):
        self.close()
        if self.error:
            raise self.error

    def read(self, size=-1):
        try:
            data = os.read(self.fileno(), size)
            if data or self.tell() >= os.fstat(self.fileno()).st_size:
                return data
            self.error = OSError(5, "reads ended before the file")  # EIO: a network disk's
        except (OSError, MemoryError) as error:
            self.error = error  # PyAV would print it
        return b""

    def seek(self, offset, whence=os.SEEK_SET):
        with contextlib.suppress(OSError):  # a number in the file, or libavformat's AVSEEK_SIZE
            return super().seek(offset, whence)
        return -1


@contextlib.contextmanager
def _stream(path):
    """Path -> (container, video stream), closed at exit. VideoError for PyAV's errors, OSError for
    a read that failed, whatever came of it."""
    with _VideoSource(path) as source, _stream_of(path, source) as streams:
        yield streams


@contextlib.contextmanager
def _stream_of(path, source):
    import av
    try:
        part, end, size = bitstream.container_end(source)
        source.seek(0)
        if end > size:  # PyAV does not notice: an mp4 with the index in front opens at any length
            raise VideoError(path, f"truncated: {part} ends at byte {end}, the file at byte {size}")
        # Other formats name further files, anywhere on the disk (playlists), or draw text (tty).
        # pattern_type, of stills: %d in a name means no other files. scan_all_pmts, of MPEG-TS: the
        # first seconds tell how frames are reordered, as in ffmpeg, not the first frames alone.
        options = dict(format_whitelist=FORMATS, protocol_whitelist="file", pattern_type="none",
                       scan_all_pmts="1")
        # Tags need not be UTF-8.
        with av.open(source, options=options, metadata_errors="ignore") as container:
            # ffmpeg's rule: the most pixels, where the default stream has five million more. A
            # cover picture is no video.
            kinds = av.stream.Disposition
            streams = [s for s in container.streams.video if not s.disposition & kinds.attached_pic]
            stream = max(streams, default=None, key=lambda s: s.codec_context and (
                s.width * s.height + 5_000_000 * bool(s.disposition & kinds.default)) or 0)
            if any(s.disposition & kinds.dependent for s in streams):  # a phone's HEIC, AVIF
                raise VideoError(path, "one picture in several tiles: convert it to JPEG")
            # PyAV's wheel swaps the bytes of rgb555be, bgr565be, ..
            if not stream or not stream.codec_context or re.search("[56]5be", f"{stream.pix_fmt}"):
                raise VideoError(path, f"no {'decoder for its ' * bool(stream)}video stream")
            if stream.width * stream.height > MAX_PIXELS:
                raise VideoError(path, f"{stream.width}x{stream.height} pixels are too many")
            stream.codec_context.thread_count = 1  # unset: every core, per open file
            # Else a crop on the left is rounded to an address that suits the processor.
            stream.codec_context.flags |= av.codec.context.Flags.unaligned.value
            # PyAV asks libavformat to invent missing times of display. ffmpeg does not.
            container.flags &= ~av.container.Flags.gen_pts.value
            yield container, stream
    except (av.FFmpegError, RuntimeError) as e:
        # av.open's error for other formats too
        other = isinstance(e, av.ArgumentError) and "damaged, or in no format that is read here"
        raise VideoError(path, f"PyAV: {other or getattr(e, 'strerror', 0) or e}") from e


def _open(path):
    """Path -> its table: starts [N] seconds, duration, height, width, ticks [N], keys [K, 2].

    Starts ascend from 0.0, in steps of 0.1 ms. Ticks are the same times in the stream's own
    unit and clock. keys are the key frames at which decoding can begin: tick, byte in the file.
    They include key frames that an edit list hides; starts do not. Raises VideoError.
    """
    # changed: kinds. sound: its end in seconds, on a clock that may begin below 0; NaN: no sound
    early, packets, changed, sound, dts, repeats = [], [], set(), math.nan, None, False
    with _stream(path) as (container, stream):
        unit, codec = float(stream.time_base), stream.codec_context  # unit: seconds per tick
        # Seconds; a larger gap is a jump of the clock. 0x200 is AVFMT_TS_DISCONT: it may jump.
        max_gap, reorders = 10 if container.format.flags & 0x200 else 30 * 3600, codec.has_b_frames
        # Flags of key frames of other codecs are often false: such a file is decoded in a row.
        sure = codec.codec.intra_only or codec.name in ("h264", "hevc", "vp8", "vp9", "libdav1d")
        likely = sure or codec.name in ("mpeg1video", "mpeg2video", "mpeg4", "wmv3", "theora")
        sure = sure and container.format.name != "mpeg"  # a packet may begin in the frame before
        for packet in bitstream.packets(container, stream, *container.streams.audio):
            if packet.stream.index != stream.index:
                end = float(((packet.pts or 0) + (packet.duration or 0)) * packet.time_base)
                # A clock that jumps ahead tells no length.
                if packet.size and not packet.is_discard and not end > sound + max_gap:
                    sound = max(end, sound)  # in this order: sound may be NaN
                continue
            several = reorders or early and early[0].interlaced_frame
            early += packet.decode() if len(early) < (8 if several else 1) else ()
            if packet.size:  # else: the flush at the end
                units = bitstream.read_units(codec, packet)
                # A repeat is no frame, but the last packet keeps the film's length.
                packets[len(packets) - repeats :], repeats = [], bitstream.is_repeat(codec, units)
                sets = bitstream.parameter_sets(codec, packet, units)
                changed |= {kind for kind, new in sets.items() if new}
                pts = _pts_of(packet, reorders or changed)  # a joined clip may have B-frames
                # Decoding begins at a key frame that brings all that has changed since the header.
                # A seek does not reliably bring a second header again.
                begin = packet.is_keyframe and changed <= sets.keys() - {"header"}
                begin = begin and not bitstream.needs_more(codec, units)
                # Some muxers of MPEG-TS state none: then that of the packet before.
                dts = (dts, pts)[dts is None or max_gap > 10] if packet.dts is None else packet.dts
                packets.append((pts, dts, packet.pos or 0, packet.duration or 0, packet.is_keyframe,
                                packet.is_discard, begin, bitstream.is_b_frame(codec, units)))
    if not early:
        raise VideoError(path, "PyAV: holds no video frames")
    untimed = [n for n, (pts, *_) in enumerate(packets) if pts is None]
    # In decoding order: time of display, time of decoding, byte, length [P] in ticks; four flags.
    pts, dts, places, lengths, flags, hidden, begins, b_frames = np.array(
        [row for row in packets if row[0] is not None], np.int64).reshape(-1, 8).T
    came = [_pts_of(frame, reorders) for frame in early]
    # Frames before the first frame that decodes are left over from a cut and do not count.
    displayed = (hidden == 0) & (came[0] is not None and pts >= came[0])
    ticks, counts = np.unique(pts[displayed], return_counts=True)
    jump = _jump(path, pts * unit, dts * unit, flags, max_gap)
    if counts.max(initial=0) > 8:  # a joined file's clock, which a copy held back
        jump = (ticks[counts.argmax()] - ticks[0]) * unit
    # An edit list of several parts steps back too. That is harmless, unless frames of two parts
    # share a time. Of fragments that were joined out of order, libavformat hides some as well.
    if jump is not None and (not hidden.any() or len(ticks) < sum(counts) or _holds(path, MOOF)):
        raise VideoError(path, f"the clock jumps at {jump:g} s: remux it, or encode it anew")
    # Matroska has no times below zero. In files that were cut, frames of such times follow the
    # first key frame. They depend on frames that are gone, so they neither decode nor count.
    front = untimed and untimed[0] > 0 and untimed[-1] <= len(untimed) < len(packets) - 1
    keys = np.unique(np.stack([pts, places], 1)[begins > 0], axis=0)
    # Clips joined by times that overlap: a frame in front of a key frame is displayed later.
    latest = np.maximum.accumulate(pts)[:-1]
    overlap = np.minimum.accumulate(pts[::-1])[::-1][1:] < latest
    disordered = None in came or came != sorted(came) or (overlap & (flags[1:] > 0)).any()
    # A packet for each field of a frame, with its own time: every other time has a frame.
    has_fields = len(came) > 1 and came == ticks[: 2 * len(came) : 2].tolist()
    lacks_times = untimed and not front or len(ticks) < displayed.sum()
    # A copy that lost its times of display has those of decoding: up to the next key frame none
    # steps back, in spite of B-frames. Other codecs' types of frames are not read. H.264 may not
    # state that it reorders.
    rises = np.append(True, pts[1:] > latest)
    firsts = np.flatnonzero(flags & bool(reorders or changed or codec.name == "h264"))
    shares = np.add.reduceat(b_frames, firsts) / np.diff(np.append(firsts, len(pts)))
    late, groups = np.logical_and.reduceat(rises, firsts) & (shares > 0), np.split(pts, firsts)[1:]
    # So do B-frames that look back alone, and those whose P-frame was lost: eight groups tell, the
    # one with the most other frames first.
    groups = [groups[n] for n in np.argsort(shares) if late[n] and groups[n][0] in keys[:, 0]]
    shown = [*filter(None, (_stated_times(path, g, keys) for g in groups[:: len(groups) // 8 + 1]))]
    copied = any(times != sorted(times) for times in shown) or late.any() and not shown
    # A palette comes once, in front.
    can_seek = len(keys) and codec.pix_fmt != "pal8" and (sure or likely and not flags.all())
    # Then the file is decoded in a row; of what may be a copy, if the times of its frames go back.
    if disordered or lacks_times or has_fields or not can_seek or copied and _display_pts(path)[2]:
        times, end, _ = _display_pts(path)
        starts, back = np.unique(times[::-1], return_index=True)  # [N] the last of one time
        # Numbers of frames in the decoder's order; none at which decoding can begin.
        ticks, keys = len(times) - 1 - back, keys[:0]
    else:
        starts, end = ticks, ticks[-1] + lengths[displayed][pts[displayed].argmax()]
    end, sound = (end - starts[0]) * unit, round(float(sound - starts[0] * unit), 1)
    duration = _duration(starts := np.round((starts - starts[0]) * unit, 4), end)
    # The header may lie. Of two frames of one time the last stays.
    height, width = _upright(path, [f for f in early if f.pts == early[0].pts][-1]).shape[:2]
    # The last picture stays while the sound goes on, whose end containers round differently.
    return starts, (duration, sound)[sound > duration + 0.1], height, width, ticks, keys


def _pts_of(item, reorders):
    """Packet or frame, whether the stream reorders frames -> time of display, None: unknown."""
    return item.dts if item.pts is None and not reorders else item.pts


def _stated_times(path, group, keys):
    """-> the stated times of frames in the decoder's order, nothing if a seek fails. group: the
    times of their packets [P], from a key frame on. keys: as of `_open`."""
    with contextlib.suppress(VideoError), _stream(path) as (container, stream):
        container.seek(int(group[0]), stream=stream)
        return [f.pts or 0 for f in _decode(container, stream, {*group.tolist()}, keys, False)]


def _all_frames(container, stream):
    """-> iterator of the frames in a row. A decoder takes no dropped frame, a sample of 0 bytes."""
    for packet in bitstream.packets(container, stream):
        yield from packet.decode() if packet.size or packet.dts is None else ()


def _display_pts(path):
    """Path -> (time of each frame in the decoder's order, end of the last, in ticks, and how often
    the stated times went back).

    ffmpeg's rule: the stated time of display (pts). If the pts so far went back more often than the
    times of decoding (dts), the dts. If a frame has neither, the end of the frame before. So also
    if such a frame has no dts: a decoder holds the last frames back. ffmpeg takes their pts, and
    its last frames are out of order.
    """
    # disorder, latest: of pts, of dts. dts: of each frame.
    times, dts, length, disorder, latest = [], [], 0, [0, 0], [-math.inf, -math.inf]
    with _stream(path) as (container, stream):
        for frame in _all_frames(container, stream):
            stamps = frame.pts, frame.dts
            for i, tick in enumerate(stamps):
                disorder[i] += tick is not None and tick <= latest[i]
                latest[i] = next(t for t in (tick, stamps[1 - i], latest[i]) if t is not None)
            if not times and stamps == (None, None):
                raise VideoError(path, "its first frames carry no times: encode it anew")
            order = stamps if disorder[0] <= disorder[1] else (frame.dts,)
            before = times[-1] if times else 0
            tick = next(t for t in (*order, before + length) if t is not None)
            step = tick - before if times else 0
            # A length of 1 tick may be the container's guess.
            length = frame.duration if frame.duration > 1 or step <= 2 else step
            times.append(tick)
            dts.append(latest[1])
    for n in reversed(range(len(times) - 1)):
        if dts[n] < times[n + 1] <= times[n]:  # the pts in front of the first that went back
            times[n] = dts[n]
    return times, times[-1] + length, disorder[0]


def _jump(path, pts, dts, flags, max_gap):
    """Path, packets' times in seconds, key flags [P] -> seconds to a jump of the clock, or None.

    A jump back: a key frame is earlier than frames before, by both times, because Matroska states
    no dts and some files call all frames key frames; of MPEG-TS and -PS any frame, as of joined
    recordings. A jump ahead: by more than max_gap, or if files were joined by 10 s. The bounds are
    ffmpeg's, which mends such a clock.
    """
    back = [np.maximum.accumulate(times)[:-1] - times[1:] for times in (pts, dts)]  # [P - 1]
    jumps, steps = ((flags[1:] > 0) | (max_gap == 10)) & (np.minimum(*back) > 0.1), np.diff(dts)
    jumps |= steps > (10 if (steps > 10).any() and _holds(path, MATROSKA) else max_gap)
    return dts[jumps.argmax()] - dts[0] if jumps.any() else None


def _holds(path, header):
    """Path, pattern -> whether it stands in the file behind byte 4: a second header, after cat."""
    header, data = re.compile(header), b""
    with open(path, "rb") as file:
        blocks = iter(functools.partial(file.read, 2**20), b"")
        return any(header.search(data := data[-80:] + block, 4) for block in blocks)


def _upright(path, frame):
    """Decoded frame -> image [H, W, 3] uint8 as displayed: turned and mirrored as the file says."""
    image = frame.to_ndarray(format="rgb24", threads=1, interpolation="BICUBIC")  # as ffmpeg
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not know all kinds of side data, such as a photo's EXIF
        return np.rot90(image, round(frame.rotation / 90) % 4)
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5] / 2**16  # x' = a x + c y, y' = b x + d y
    if min(abs(a) + abs(d), abs(b) + abs(c)) > 0.01:  # 0.3 degrees
        raise VideoError(path, "is turned by an angle that is no multiple of 90 degrees")
    if abs(b) > abs(a):
        image, a, d = image.swapaxes(0, 1), c, b
    return image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def _decode(container, stream, wanted, keys, drop):
    """Set of ticks -> iterator of the frames from here on, up to the last wanted frame. drop: do
    not decode frames that are not wanted and that no other frame needs. No frame, if decoding would
    begin at a key frame that is none of `keys`: seeks may land elsewhere, and the index of an AVI
    may give a packet another time than counting does.
    """
    codec, missing, begun = stream.codec_context, set(wanted), False  # missing: not in the decoder
    # An H.264 frame states for the whole stream whether another one needs it. An HEVC frame states
    # this for one temporal layer, and a frame of a higher layer may need it, so only files of one
    # layer qualify. Other codecs were not examined.
    # extradata: of HEVC in mp4 and Matroska an hvcC record, with numTemporalLayers.
    one_layer = len(head := codec.extradata or b"") > 21 and head[0] == 1 and head[21] >> 3 & 7 == 1
    drop = drop and (codec.name == "h264" or codec.name == "hevc" and one_layer)
    for packet in bitstream.packets(container, stream):
        # A packet without bytes is the flush at the end. A hidden frame may share a time.
        tick = _pts_of(packet, codec.has_b_frames)
        useful = not packet.size or tick in wanted and not packet.is_discard
        if not missing and not useful:  # only now: the fields of a frame may come one by one
            yield from codec.decode(None)  # frames held back to reorder them
            return
        if packet.is_keyframe and not begun and not (keys == [tick, packet.pos or 0]).all(1).any():
            return
        begun = begun or packet.is_keyframe
        # It may have more layers.
        drop = drop and not any(bitstream.parameter_sets(
            codec, packet, bitstream.read_units(codec, packet)).values())
        codec.skip_frame = "NONREF" if drop and not useful else "DEFAULT"
        # Never a hidden frame, or a dropped one.
        yield from packet.decode() if begun and (packet.size or tick is None) else ()
        missing.discard(tick if useful else None)


def _images(path, ticks, keys, drop):
    """Path, ticks [T] and keys of `_open` -> iterator of (tick, image [H, W, 3] uint8). drop:
    as in _decode; None: decode in a row."""
    if pathlib.Path(path).is_dir():
        _, names = _pictures(path)
        if len(names) != len(keys):  # all that follow would move
            raise VideoError(path, f"{launch.MACHINE}images came or went while it was read")
        yield from ((tick, _picture(path, names[tick])) for tick in ticks)
        return
    pending, key_ticks, seeks = ticks.tolist(), keys[:, 0], drop is not None and len(keys) > 0
    # Seeks may land too late (MPEG-TS has no index), or fail (an index without key frames). Then,
    # and without key frames, the file is decoded from its first frame on.
    while pending:
        # torn: a packet lost its end. Some decoders leave the rows out: U and V are 0, as in no
        # colour, if the stream is new, else those of a picture before.
        torn, ended, run = False, False, pending
        with contextlib.suppress(*[VideoError] * seeks), _stream(path) as (container, stream):
            reorders, run = (codec := stream.codec_context).has_b_frames, []
            new = seeks and (codec.name == "vp8" or not drop and codec.codec.intra_only)
            while pending and not (run or ended):
                # Decoded in one go: all before the next key frame.
                run, ended = pending[:], new
                if seeks:
                    after = np.searchsorted(key_ticks, pending[0], side="right")  # of the next one
                    run = pending[: np.searchsorted(pending, np.append(key_ticks, 2**62)[after])]
                    if after > 1 or after and len(pending) < len(ticks):  # else it stands there
                        container.seek(int(key_ticks[after - 1]), stream=stream)
                frames, wanted = (_decode(container, stream, {*run}, keys, drop) if seeks
                                  else _all_frames(container, stream)), {*run}
                for number, frame in enumerate(frames):
                    torn |= new and frame.format.name[:3] == "yuv" and not any(
                        any(memoryview(part)[-part.line_size :]) for part in frame.planes[1:3])
                    tick = _pts_of(frame, reorders) if len(key_ticks) else number
                    if tick in wanted and not torn:  # again, if two frames have one time
                        yield tick, _upright(path, frame)  # first: it may fail
                        run = [t for t in run if t != tick]
                        pending = [t for t in pending if t != tick]
                    elif not run:
                        break
        if pending and (torn or not seeks):
            raise VideoError(path, f"PyAV: the frame of tick {pending[0]} does not decode")
        seeks = seeks and not run


def _read(path, ticks, keys, height, width):
    """Arguments of _images, and a size -> [T, height, width, 3] uint8. Raises VideoError."""
    import av
    from PIL import Image

    # [T, H, W, 3]
    images, size = np.empty((len(ticks), height, width, 3), np.uint8), (width, height)
    av.logging.set_level(av.logging.DEBUG)
    av.logging.set_skip_repeated(False)
    with av.logging.Capture() as logs, contextlib.ExitStack() as stack:
        stack.callback(av.logging.set_level, None)
        for drop in (True, False) if len(keys) else (True,):  # in a row nothing is dropped
            # In place of a lost frame a decoder shows the one before. It must not lack others, too.
            # It mends a damaged key frame from the frame before, too: after a seek there is none.
            # The frame that would miss a lost one loudly may be one that is left out.
            damaged = any("errors in I frame" in text for _, _, text in logs)  # at the level INFO
            if not (drop or damaged or any(n <= 16 or "num gap" in s for n, _, s in logs)):  # ERROR
                break
            # One by one, because 4K frames fill gigabytes.
            for tick, image in _images(path, ticks, keys, None if damaged else drop):
                # rotated: a strided view
                images[ticks == tick] = Image.fromarray(np.ascontiguousarray(image)).resize(size)
    return images


def _dispatch(request):
    """Arguments of _read -> its result; a path alone -> starts, fields of VideoInfo, ticks and
    keys. Whatever is computed about a video is computed here: its errors are VideoErrors."""
    try:
        if len(request) > 1:
            return _read(*request)
        read = _open_folder if pathlib.Path(request[0]).is_dir() else _open
        starts, duration, height, width, *ticks = read(*request)
        return starts, duration, len(starts), len(starts) / duration, width, height, *ticks
    except ImportError:  # not the file's fault
        raise
    except Exception as e:  # of a file that nobody thought of, or of the disk
        # (): who asks has just seen the file.
        kind = "needs too much memory: " * isinstance(e, MemoryError) or launch.machine_mark(e, ())
        why = getattr(e, "why", f"{kind}{type(e).__name__}: {e}")  # of a VideoError
        # Without memory libavformat may call a good file invalid.
        mark = (launch.MACHINE + "short of memory: ") * caches.lacks_memory(MAX_MEMORY)
        raise VideoError(request[0], mark + why) from e


def _core_seconds(process):
    """Seconds in which a process has computed, and has waited for a core, so far [2]; NaN and 0
    where Linux does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/schedstat") as file:
        return np.array(file.read().split()[:2], float) / 1e9  # of its main thread
    return np.array([math.nan, 0.0])


class ChildDecoder:
    """A decoder in a child process. A file that hangs or crashes the child costs a VideoError.
    timeout: seconds to wait for up to 64 frames; for more frames in proportion."""

    def __init__(self, timeout, process=None, pipe=None):  # None: the next request starts one
        self.timeout, self.process, self.pipe = timeout, process, pipe

    def ask(self, request):
        """Like _dispatch. VideoError also if two children died, or if one stayed silent."""
        # Each frame may need a seek; opening a file asks for none.
        patience = self.timeout * max(1.0, len(request[1]) / 64 if len(request) > 1 else 0)
        for _ in range(2):  # a user may have killed the first
            if self.process is None:
                # multiprocessing would import the caller's script, with torch, in each child.
                self.pipe, theirs = Pipe()
                self.process = subprocess.Popen([sys.executable, __file__], stdin=theirs)
                theirs.close()  # then the child's death is an end of file here
            try:
                self.pipe.send(request)
                times = []  # of the child, after each tenth of the patience without an answer
                while not self.pipe.poll(0.1 * patience):
                    times.append(_core_seconds(self.process.pid))
                    # It waits for a core while others keep the machine busy: that does not count.
                    if len(times) - (times[-1] - times[0])[1] / (0.1 * patience) < 9.5:
                        continue
                    # A disk that hangs, or gives little, lets the child wait for it.
                    busy = np.diff(times, axis=0) @ (1, 0.5)  # seconds of each tenth
                    slow = not min(busy[-1], np.median(busy)) < 0.05 * patience  # NaN: unknown
                    why = f"no answer in {patience:g} s" + ": encode it anew, or allow more" * slow
                    raise VideoError(request[0], launch.MACHINE * (not slow) + why)
                error, value = self.pipe.recv()
                break
            except BaseException as failure:  # Ctrl-C too: a late answer must not serve the next
                status = self.close()
                if not isinstance(failure, (EOFError, OSError)):  # else the child died
                    raise
        else:
            # SIGKILL, SIGTERM: there was no memory left. SIGBUS: a disk did not give code.
            # 1: Python itself could not start.
            mark = launch.MACHINE * (status in (-7, -9, -15, 1))
            error = f"{mark}the decoder process died, twice"
        if error is not None:  # the child lives on
            raise VideoError(request[0], error) if isinstance(error, str) else error
        return value

    def close(self):
        """Ends the child -> its exit status."""
        process, self.process = self.process, None  # the next request starts another
        if process is not None:
            process.kill()  # terminate would need a handler, and C code never runs one
            self.pipe.close()
            return process.wait()  # or the child stays a zombie until this process ends


def _serve():
    """The child's main loop: answers requests from its standard input, a pipe, until it closes."""
    import resource

    with contextlib.suppress(ValueError, OSError):  # a lower limit is set; macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))

    def leave_with_parent():  # a kernel's death signal would come when the thread that asks ends
        poll = select.poll()
        poll.register(0, 0)  # only the end of the other side
        poll.poll()
        os._exit(0)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    pipe = Connection(0)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            try:
                pipe.send((None, _dispatch(pipe.recv())))
            except (VideoError, ImportError) as error:
                # A VideoError as text, because here the class belongs to __main__.
                pipe.send((getattr(error, "why", error), None))


class Decoders:
    """Up to `workers` decoders for a set of frames, in child processes that threads share."""

    def __init__(self, timeout, workers):
        self.timeout, self.workers = timeout, workers  # None: the calling thread decodes
        # Unused children; number of decoders at work on sets of frames.
        self.idle, self.busy, self.lock = [], 0, threading.Lock()

    def ask(self, request):
        """_dispatch of an idle or a new child; without a timeout, of this thread."""
        if self.timeout is None:
            return _dispatch(request)
        with self.lock:
            child = self.idle.pop() if self.idle else ChildDecoder(self.timeout)
        try:
            return child.ask(request)  # outside the lock: other threads decode meanwhile
        finally:
            self.idle.append(child)  # also after an error: it can be asked again

    def read(self, path, ticks, *how):
        """As _read. The idle decoders share the frames, if each gets at least 8."""
        with self.lock:  # not more: parts that begin after one key frame decode some frames twice
            count = max(1, min(self.workers - self.busy, len(ticks) // 8))
            self.busy += count
        try:
            requests = [(path, part, *how) for part in np.array_split(ticks, count)]
            if count == 1:
                return self.ask(requests[0])
            with ThreadPoolExecutor(count) as pool:  # each decodes one stretch
                return np.concatenate(list(pool.map(self.ask, requests)))  # map keeps the order
        finally:
            with self.lock:
                self.busy -= count

    def close(self):
        """Ends the idle children. A child in use stays and is idle later."""
        while self.idle:
            self.idle.pop().close()


class FrameCache:
    """Decoded frames and tables of times: from memory, else from a folder, else from decoders."""

    def __init__(self, max_bytes: int = 4 * 2**30, timeout: float | None = None, workers: int = 1,
                 folder: str | None = None, folder_bytes: int = 50 * 2**30):
        self.folder = folder and caches.DiskCache(folder, folder_bytes)
        # present: file of a video that was there at the start -> disk. left: one that went with it.
        self.present, self.left, self.memory = {}, "/", caches.MemoryCache(max_bytes)
        # timeout: seconds, see ChildDecoder. sets: key of a frame -> Frames that hold the frame.
        self.decoders, self.sets = Decoders(timeout, workers), weakref.WeakValueDictionary()

    def index(self, path):
        """Path -> (starts [N] float64 seconds, VideoInfo), read once per state of the file."""
        return (table := self.table(path)).starts, table.info

    def check_present(self, args, path, rows):
        """Raises UserError at a start if more of the videos of a data file are missing than
        missing_videos allows: a disk that is not mounted, or a folder that is not the right one.
        rows: of the file, with a "video" each."""
        def look(name):
            try:
                # A link may lie on another disk than its file.
                files = [*_files_of(resolve(name, root)), os.path.join(resolve("", root), name)]
                self.present.update({file: os.lstat(file).st_dev for file in files})
            except (OSError, VideoError) as error:
                lost.append(f"{name}: {launch.why(error)}")

        root, names, lost = root_of(args, path), {row["video"] for row in rows}, []
        with ThreadPoolExecutor(16) as pool:  # a server of files takes a millisecond for each
            [*pool.map(look, names)]
        if len(lost) > args.missing_videos * len(names):
            raise launch.UserError(
                f"{path}: {len(lost)} of {len(names)} videos are not below {root}: {min(lost)}; is "
                "each disk mounted? Drop the rows of lost ones, or --set missing_videos=SHARE")

    def identity(self, path):
        """As identity. The error of a file that was there at the start has the machine's mark."""
        try:
            return identity(path)
        except VideoError as error:
            missing = isinstance(cause := error.__cause__, FileNotFoundError)
            mark = self.missing_mark(cause.filename) if missing else ""
            raise VideoError(path, mark + error.why) from error

    def missing_mark(self, path):
        """The mark of a missing file, "" if the start missed it. It went with its disk if of the
        start's files none is left there, or, of at least two, below the next folder that exists."""
        path = os.path.realpath(path)
        disks = [self.present[p] for p in self.present if f"{p}/".startswith(f"{path}/")]
        above = ([p for p in self.present if p.startswith(f"{folder}/")]
                 for folder in pathlib.Path(path).parents if os.path.isdir(folder))
        groups = [[p for p in self.present if self.present[p] in disks],
                  next((below for below in above if len(below) > 1), [])]
        gone = [group[-1] for group in groups if group and not any(map(os.path.exists, group[:9]))]
        self.left = gone[0] if gone else self.left
        return f"{launch.MACHINE}a {'disk' if gone else 'file'} left: " * bool(gone or disks)

    def disk_away(self, errors):
        """Whether the machine failed a read, by the texts of the VideoErrors just met, or a disk
        that left is still away. A single file may leave."""
        return not os.path.exists(self.left) or bool(re.search("machine: (?!a file)", f"{errors}"))

    def close(self):
        """Ends the decoders. The cache stays usable."""
        self.decoders.close()

    def load_or_compute(self, name, state, read):
        """-> the values of read(), arrays and numbers, from the folder if they are there. state:
        of the video's VideoTable."""
        values = self.folder.load(name) if self.folder else None
        if values is None:
            values = read()
            if self.identity(state[0]) != list(state[1:3]):  # else another video's key
                raise VideoError(state[0], f"{launch.MACHINE}changed while it was read")
            if self.folder:
                self.folder.store(name, values)
        return values

    def table(self, path):
        """Path -> VideoTable: from memory, or from the folder, or read."""
        state = os.path.realpath(path), *self.identity(path), CACHE_VERSION

        def read():
            starts, *info, ticks, keys = self.load_or_compute(
                _digest(state), state, lambda: self.decoders.ask((state[0],)))
            starts.flags.writeable = False  # all callers share this array
            return VideoTable(state, starts, VideoInfo(*info), ticks, keys), 3 * starts.nbytes

        # last: a look that needs the table comes next.
        return self.memory.get_or_compute(state, read, last=False)

    def frames(self, path, indices, min_pixels, max_pixels, size=None):
        """Path, ascending indices [T] -> Frames: from memory, or from the folder, or decoded. size:
        (height, width) in pixels in place of the two bounds."""
        info = (table := self.table(path)).info
        height, width = size or smart_size(info.height, info.width, min_pixels, max_pixels)
        key = _digest(names := [_digest((table.state, int(i), height, width)) for i in indices])

        def decode():
            sets = [self.sets.get(name) for name in names]
            if None not in sets:  # other sets hold all of them
                return [np.stack([s.images[s.frame_keys.index(n)] for s, n in zip(sets, names)])]
            if len(indices) < len(table.starts) <= 2**18 // (3 * height * width):
                # A tiny video is decoded whole, once: opening it takes longer than its frames.
                with contextlib.suppress(VideoError):
                    tiny = self.frames(path, range(len(table.starts)), min_pixels, max_pixels, size)
                    return [tiny.images[indices]]
            return [self.decoders.read(path, table.ticks[indices], table.keys, height, width)]

        def read():
            (images,) = self.load_or_compute(key, table.state, decode)
            frames = Frames(images, table.starts[indices], key, names)
            # All callers share them.
            images.flags.writeable = frames.seconds.flags.writeable = False
            self.sets.update(dict.fromkeys(names, frames))
            return frames, images.nbytes

        return self.memory.get_or_compute(key, read)


def _digest(value):
    """-> 32 hex digits that name texts and numbers."""
    return sha256(repr(value).encode()).hexdigest()[:32]  # hash() is salted


def decode_threads():
    """How many videos a rank decodes at once: one per core, but for one core that feeds the GPU."""
    # At least two: a short window must not wait for a long video. At most 32 child processes.
    return min(32, max(2, launch.cores() - 1))


def add_arguments(parser):
    """Flags of the frames of a stage: they must be the same in SFT, RL and evaluation."""
    add = parser.add_argument_group("frames").add_argument
    # A path in a data file must not reach other files of the machine.
    add("--video-root", help="folder that holds all videos; default: the JSONL's folder")
    # 50176 = 224 x 224, at most 49 vision tokens: a token stands for 32 x 32 pixels.
    add("--max-pixels", type=int, default=50176, help="of a frame after resizing")
    parser.add_setting("frame_cache_dir", "decoded frames for later runs and other ranks", type=str)
    parser.add_setting("channel", "how frames enter a prompt", "image", choices=["image", "video"])
    parser.add_setting("frame_cache_gb", "GiB of decoded frames kept per rank", 4.0)
    parser.add_setting("frame_cache_dir_gb", "GiB kept in frame_cache_dir", 50.0)
    parser.add_setting("missing_videos", "share of the videos that may be missing at a start", 0.01)
    parser.add_setting("decode_timeout", "seconds that 64 frames may take; 0 = any", 60.0)


def frame_cache(args):
    """The parsed flags -> the FrameCache of a stage. Raises UserError naming the flag."""
    arguments.require_min(0, args, "frame_cache_gb", "frame_cache_dir_gb", "missing_videos")
    # In a child process, if there is a timeout: a decoder that hangs or crashes costs one video.
    return FrameCache(int(args.frame_cache_gb * 2**30), args.decode_timeout or None,
                      decode_threads(), args.frame_cache_dir, int(args.frame_cache_dir_gb * 2**30))


if __name__ == "__main__":
    _serve()
