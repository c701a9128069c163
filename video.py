"""video.py: a video file -> frames with timestamps, for overviews and crops, cached so that no look is paid twice.

Legend: T frames of H x W pixels; s_i = start of frame i in seconds, s_0 = 0; D = end of the last frame = duration.
  frame on display at t   = the last i with s_i <= t
  overview(K)             = frames on display at (k + 0.5) D / K, k = 0..K-1         centres of K equal segments
  crop(a, b)              = a, b clamped to [0, D];  n = clip(round((b - a) fps), 1, max_frames);
                            frames on display at a + (k + 0.5)(b - a) / n, k = 0..n-1       same rule, on the window
  Both drop repeats, so a file with few frames yields few. A frame's time is its start s_i, not the time of the look.
  Worked example, 64 frames at 1 fps: overview(4) -> 8, 24, 40, 56; crop(16, 24) -> 16..23;
  crop(16, 24, num_frames=2) -> 18, 22.

Departures from the usual loaders, and why:
  s_i is the container's clock, never i / fps, which is wrong as soon as the frame rate varies.
  Frames are resized once, here, to multiples of 32 (patch 16 x merge 2), so that no processor resizes them again.
  decord is asked first; PyAV (optional) takes what decord refuses or gets wrong in silence, see `_open_decord`.
  Not handled: non-square pixels; cover art of music files (counts as a video of one frame); H.264 with B-frames inside
  AVI, which has no place for times, so neighbouring frames may be swapped.

Reads: one video file. Writes: nothing.
  python video.py FILE --frames 8                     what the file holds, and the overview's frames
  python video.py FILE --frames 8 --start 12 --end 20
"""

import argparse
import bisect
import contextlib
import hashlib
import math
import os
import re
import stat
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

# decord, av and PIL are imported where they are used: the pure functions below work, and are tested, without them.


class VideoError(Exception):
    """This file cannot be used: `.path` says which, `.why` says what is wrong with it; str() is "path: why"."""

    def __init__(self, path, why):
        super().__init__(str(path), why)  # both as they came: an exception is pickled by its arguments
        self.path, self.why = str(path), why

    def __str__(self):
        return f"{self.path}: {self.why}"


@dataclass(frozen=True)
class VideoInfo:
    duration: float  # seconds, from the start of the first frame to the end of the last
    num_frames: int
    fps: float  # num_frames / duration: an average, frames need not be evenly spaced
    width: int  # pixels, as displayed (rotation applied)
    height: int


@dataclass
class Frames:
    """T frames of one file. Arrays are read-only: a cache hands the same ones to every caller; copy to write."""

    images: np.ndarray  # [T, H, W, 3] uint8 RGB
    seconds: np.ndarray  # [T] float64, start of each frame on the video's clock
    key: str  # names this set of frames: same file, same frames, same size <=> same key
    frame_keys: list[str]  # [T] one name per frame: equal in every set that holds this frame at this size


# ---------------------------------------------------------------------------------------------------------------------
# Which frames, how large: pure functions


def smart_size(height, width, min_pixels, max_pixels, multiple=32):
    """(height, width) in pixels -> (h, w) to resize to.

    Both are multiples of `multiple`, at least one multiple each; min_pixels <= h * w <= max_pixels wherever such a pair
    exists, else h * w <= max_pixels, else (multiple, multiple). Among those pairs: the one nearest, in log h and log w,
    to the exact rescaling, so aspect ratio and area are both kept as well as the grid allows.
    Raises ValueError if a side is not positive or min_pixels > max_pixels.
    """
    if min(height, width, multiple) < 1 or min_pixels > max_pixels:
        raise ValueError(f"cannot fit {height}x{width} into {min_pixels}..{max_pixels} pixels by {multiple}")
    # Exact answer in units of `multiple`, before rounding to whole units.
    area = min(max(height * width, min_pixels), max_pixels)  # as filmed if that is in budget, else its nearer end
    tall = math.sqrt(area * height / width) / multiple
    wide = math.sqrt(area * width / height) / multiple
    lowest, most = -(-min_pixels // multiple**2), max_pixels // multiple**2  # whole cells: ceil and floor
    best = (math.inf, 1, 1)
    # Second round: no product of two whole numbers lies in the range (13.2..13.8 cells, say); give up the lower bound.
    for least in (lowest, 1):
        for a in range(1, most + 1):
            if a > tall and math.log(a / tall) > best[0]:
                break  # only worse from here on; without this a budget of 10^9 pixels would loop a million times
            low, high = max(1, -(-least // a)), most // a  # b range that keeps a * b within the budget
            for b in {min(max(side, low), high) for side in (math.floor(wide), math.ceil(wide))}:
                if low <= b <= high:
                    # Rounded: both roundings of a tie must compare equal, then the smaller a wins on every machine.
                    cost = round(abs(math.log(a / tall)) + abs(math.log(b / wide)), 9)
                    best = min(best, (cost, a, b))
        if best[0] < math.inf:
            break
    return best[1] * multiple, best[2] * multiple


def _on_display(starts, looks):
    """Frame start times [N], look times [L] (seconds) -> sorted unique indices of the frames seen."""
    # One millisecond of grace: a look at exactly 16.04 must see the frame that starts there, though decord holds that
    # start as the 32-bit float 16.0400009. Frames closer than this do not occur below 1000 fps.
    seen = np.searchsorted(starts, np.asarray(looks) + 1e-3, side="right") - 1  # [L]
    return np.unique(np.maximum(seen, 0))  # [<=L]


def overview_indices(starts, duration, num_frames):
    """Frame start times [N] in seconds -> sorted unique indices of at most `num_frames` frames over the whole video.

    Raises ValueError if num_frames < 1.
    """
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, not {num_frames}")
    looks = (np.arange(num_frames) + 0.5) * duration / num_frames  # [K] centres of K equal segments
    return _on_display(starts, looks)


def crop_indices(starts, duration, start, end, num_frames=None, fps=1.0, max_frames=16):
    """Frame start times [N] -> sorted unique indices of the frames seen in the window [start, end] (all in seconds).

    `fps` looks per second, or `num_frames` looks when given; either way at least 1 and at most `max_frames`.
    Raises ValueError when nothing is left of the window inside [0, duration] (reversed, beyond the end, NaN), or when
    fps or max_frames is not positive.
    """
    if not fps > 0 or max_frames < 1:
        raise ValueError(f"fps and max_frames must be positive, not {fps} and {max_frames}")
    low, high = np.clip([start, end], 0.0, duration)  # NaN stays NaN and fails the comparison below
    if not low < high:
        raise ValueError(f"window {start:g}-{end:g} s holds nothing of the video, which runs from 0 to {duration:g} s")
    wanted = (high - low) * fps if num_frames is None else num_frames
    n = int(min(max(math.floor(wanted + 0.5), 1), max_frames))  # halves round up; round() would send 2.5 to 2
    return _on_display(starts, low + (np.arange(n) + 0.5) * (high - low) / n)  # centres of n equal segments


# ---------------------------------------------------------------------------------------------------------------------
# Paths and files, looked at before any decoder is


def resolve(video, root=None):
    """Path of `video` as written in a data file -> real path. With `root`, paths are relative to it and stay inside it.

    Raises VideoError for a path that leaves root: through `..`, by being absolute, or through a symbolic link.
    (root itself may be a link, and an absolute path that points into root does not leave it.) Existence is not checked.
    """
    if not isinstance(video, (str, os.PathLike)) or "\0" in os.fspath(video):
        raise VideoError(repr(video), "is not a path")
    if root is None:
        return os.path.realpath(video)
    base = os.path.realpath(root)
    path = os.path.realpath(os.path.join(base, video))  # an absolute `video` replaces base here
    if os.path.commonpath([base, path]) != base:  # whole names: /data2 does not start with /data here
        raise VideoError(video, f"lies outside the video folder {base}")
    return path


def _identity(path):
    """Path -> (real path, bytes, mtime in ns): changes whenever the file does. Raises VideoError if it is no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise VideoError(path, "no such file" if isinstance(error, FileNotFoundError) else str(error)) from error
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise VideoError(path, "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
    if status.st_size == 0:
        raise VideoError(path, "is empty (0 bytes)")
    return os.path.realpath(path), status.st_size, status.st_mtime_ns


def _vint(data):
    """Matroska's variable-length number at the front of `data` -> (value, or None for "unknown"; length in bytes)."""
    length = 9 - data[0].bit_length()  # leading zero bits of the first byte + 1
    if length > 8:
        return None, 1
    value = int.from_bytes(data[:length], "big") & ((1 << 7 * length) - 1)
    return (None if value == (1 << 7 * length) - 1 else value), length


def _check_whole(path, size):
    """Raises VideoError if the container's own header promises more bytes than the file has (a broken download).

    Decoders do not tell: an mp4 with its index in front opens well at any length, and ends where the bytes end.
    Knows mp4/mov, Matroska/WebM and AVI; other formats (MPEG-TS, ...) state no length and simply get shorter.
    """
    promised, what = 0, ""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:4] == b"\x1aE\xdf\xa3" and len(head) == 64:  # Matroska: EBML header, then one Segment
                skip, length = _vint(head[4:])  # bytes of the EBML header to skip
                at = 4 + length + (skip or 0)  # where the Segment starts
                if head[at : at + 4] == b"\x18\x53\x80\x67" and at + 12 <= len(head):
                    content, length = _vint(head[at + 4 :])
                    promised, what = at + 4 + length + (content or 0), "Segment"  # None: streamed, length unknown
            elif head[:4] == b"RIFF" and head[8:12] == b"AVI ":
                promised, what = 8 + struct.unpack("<I", head[4:8])[0], "RIFF"  # 0 in files never finished: no claim
            else:  # mp4: a chain of [size, type] boxes; stop at the first type that none of them has
                at, known = 0, b"ftyp moov mdat moof free skip wide uuid styp sidx mfra udta".split()
                while promised <= size:
                    file.seek(at)
                    box, kind = struct.unpack(">I4s", file.read(8).ljust(8, b"\0"))
                    if box == 1:  # 1: the true size follows in 8 bytes
                        box = struct.unpack(">Q", file.read(8).ljust(8, b"\0"))[0]
                    if kind not in known or box < 8:  # 0: "to the end of the file"
                        break
                    at += box
                    if kind in (b"moov", b"mdat", b"moof"):  # padding may be cut without harm
                        promised, what = at, kind.decode()
    except OSError as error:
        raise VideoError(path, str(error)) from error
    if promised > size:
        raise VideoError(path, f"is truncated: its {what} ends at byte {promised}, the file at byte {size}")


# ---------------------------------------------------------------------------------------------------------------------
# Decoders. A source is one opened file; `_open_*` makes it, `_read_*` yields its frames in the order asked.


@dataclass
class Source:
    file: tuple  # _identity of the file
    backend: str  # "decord" or "av"
    reader: object  # decord.VideoReader; None for PyAV, which opens a container per read
    starts: np.ndarray  # [N] float64 seconds, strictly increasing, first one 0.0
    duration: float
    width: int = 0
    height: int = 0
    pts: list | None = None  # PyAV only: [N] presentation times in stream ticks; None: the file carries no usable ones
    key_pts: list = field(default_factory=list)  # PyAV only: those of the key frames, where a seek can land


@contextlib.contextmanager
def _decord_errors(path):
    """What decord was seen to raise -> VideoError."""
    import decord
    from decord._ffi.base import DECORDLimitReachedError  # not a DECORDError, and not exported

    try:
        yield
    except (decord.DECORDError, DECORDLimitReachedError, RuntimeError, OSError, AssertionError, StopIteration) as error:
        # RuntimeError: not opened. AssertionError: no frames. StopIteration: the stream ended early.
        lines = str(error).splitlines() or [type(error).__name__]
        why = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", lines[0])  # time and C++ source line
        if "cannot find video stream" in why:
            why = "no video stream that it can decode"  # a codec it does not know (AV1) gives the same message
        elif why.startswith("Error reading"):
            why = "cannot open it"
        raise VideoError(path, "decord: " + why.replace(f"[{path}]", "").strip()) from error


def _open_decord(path, num_threads):
    """Path -> Source. Raises VideoError, also where decord would go on but was measured to be wrong (0.6.0):

    - mp4 edit lists that hide packets at the front: every frame is shifted, shown by negative start times;
      hidden packets at the end: the last visible frame is repeated, shown by the fault counter (`fault_tol`);
    - AVI and MPEG-PS with B-frames: packets without times, so starts of -1e14 and less;
    - MPEG-TS: fails at the end of the file only, hence the last frames are decoded on opening;
    - last frame "ends where it starts" in FLV and fragmented mp4: see `_end`.
    Correct were: variable frame rates, a first time that is not 0, B-frames, long and open GOPs, rotation.
    """
    import decord

    with _decord_errors(path):
        decord.logging.set_level(decord.logging.QUIET)  # FFmpeg's stderr; decord's own one-liner on opening stays
        # fault_tol as a fraction of all frames, below 1/N: raise for the second frame that is a copy of its neighbour.
        reader = decord.VideoReader(str(path), num_threads=num_threads, fault_tol=1e-9)
        spans = reader.get_frame_timestamp(range(len(reader))).astype(np.float64)  # [N, 2] start and end, seconds
        starts = spans[:, 0]
        # decord counts from the stream's first visible frame, so anything but 0 means frames that are not to be seen.
        if abs(starts[0]) > 1e-3 or not (np.diff(starts) > 0).all():
            raise VideoError(path, f"decord: unusable timestamps (the first is {starts[0]:g} s)")
        for i in range(max(len(reader) - 2, 0), len(reader)):  # two, since the fault counter forgives the first
            height, width, _ = reader[i].shape  # [H, W, 3]
    # 4 decimals: finer than any clock tick that matters, and 0.04 instead of a 32-bit 0.03999999910593033.
    starts = np.round(starts, 4)
    return Source(_identity(path), "decord", reader, starts, _end(starts, spans[-1, 1]), width, height)


def _read_decord(source, indices):
    """Source, ascending indices -> iterator of images [H, W, 3] uint8. One at a time: a batch of full-size frames of a
    4K file would be gigabytes. decord skips forward by itself and seeks only past a key frame."""
    with _decord_errors(source.file[0]):
        for i in indices:
            yield source.reader[int(i)].asnumpy()  # [H, W, 3]


@contextlib.contextmanager
def _av_errors(path):
    """What PyAV was seen to raise -> VideoError."""
    import av

    try:
        yield
    except (av.FFmpegError, OSError, RuntimeError, IndexError) as error:  # the last: a stream that is announced halfway (MPEG-TS)
        raise VideoError(path, f"PyAV: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _av_stream(path, num_threads=1):
    """Path -> (container, first video stream), closed at the end."""
    import av

    with av.open(str(path), metadata_errors="ignore") as container:  # tags need not be UTF-8
        if not container.streams.video:
            raise VideoError(path, "no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise VideoError(path, "no decoder for its video stream")
        # As for decord, a fixed number: the default takes every core, once per file that is open.
        stream.codec_context.thread_count = num_threads
        yield container, stream


def _open_av(path, num_threads):
    """Path -> Source, by demultiplexing once: no frame is decoded but the last, unless packets carry no times."""
    with _av_errors(path):
        with _av_stream(path, num_threads) as (container, stream):
            tick, rate = stream.time_base, stream.average_rate or 25
            # Packets come in decoding order. Empty: the flush at the end. Discard: hidden by an edit list.
            packets = [
                (p.pts, p.is_keyframe, p.duration or 0)
                for p in container.demux(stream)
                if p.size and not p.is_discard
            ]
        if not packets:
            raise VideoError(path, "PyAV: holds no video frames")
        if all(pts is not None for pts, _, _ in packets):
            packets.sort()  # into display order
            pts = sorted({pts for pts, _, _ in packets})  # two packets of one time are one frame
            keys = [pts for pts, key, _ in packets if key]
            ticks, last = pts, packets[-1][2]
        else:
            # AVI with B-frames: only decoding tells the order. Then the times, or failing that an even spacing.
            with _av_stream(path, num_threads) as (container, stream):
                ticks = [frame.pts if frame.pts is not None else frame.dts for frame in container.decode(stream)]
            pts, keys, last = None, [], 0
            if not ticks:
                raise VideoError(path, "PyAV: no frame decodes")
            if None in ticks or sorted(set(ticks)) != ticks:
                ticks = [i / rate / tick for i in range(len(ticks))]
        starts = np.array([round(float((t - ticks[0]) * tick), 4) for t in ticks])  # [N]
        end = _end(starts, starts[-1] + float(last * tick))
        source = Source(_identity(path), "av", None, starts, end, pts=pts, key_pts=keys)
        # Proves that the file decodes up to its end, and tells the size after rotation.
        for image in _read_av(source, [len(starts) - 1], num_threads):
            source.height, source.width, _ = image.shape  # [H, W, 3]
    return source


def _read_av(source, indices, num_threads=1):
    """Source, ascending indices -> iterator of images [H, W, 3] uint8, decoding from the nearest key frame on."""
    path = source.file[0]
    with _av_errors(path), contextlib.ExitStack() as opened:
        frames, at = None, 0  # the running decoder, and the index of the frame it gave last
        for i in indices:
            frame = None
            if source.pts is None:  # no times: count frames from the start
                if frames is None:
                    container, stream = opened.enter_context(_av_stream(path, num_threads))
                    frames = enumerate(container.decode(stream))
                frame = next((f for n, f in frames if n == i), None)
            else:
                want = source.pts[i]
                # Last key frame not after it. A file cut out of a longer one may have none before its first frames.
                key = source.key_pts[max(bisect.bisect_right(source.key_pts, want) - 1, 0)] if source.key_pts else want
                if frames is None:
                    container, stream = opened.enter_context(_av_stream(path, num_threads))
                if frames is None or key > source.pts[at]:  # a key frame lies between: jump to it
                    if key > source.pts[0]:  # a fresh container stands at the first one already
                        container.seek(key, stream=stream)
                    frames = container.decode(stream)
                frame = next((f for f in frames if f.pts is not None and f.pts >= want), None)
                if frame is None or frame.pts != want:
                    # The seek landed too late, as it may without an index (MPEG-TS): once more from the beginning.
                    container, stream = opened.enter_context(_av_stream(path, num_threads))
                    frames = container.decode(stream)
                    frame = next((f for f in frames if f.pts == want), None)
            if frame is None:
                raise VideoError(path, f"PyAV: frame {i} at {source.starts[i]:g} s does not decode")
            at = i
            image = frame.to_ndarray(format="rgb24")  # [H, W, 3] as stored
            # Phones store portrait as landscape plus an angle. decord turns the picture, PyAV reports degrees.
            yield np.rot90(image, round(frame.rotation / 90) % 4)  # [H, W, 3] as displayed


def _end(starts, end):
    """End of the last frame in seconds; where the container does not know, the last frame lasts as long as is usual."""
    if end > starts[-1]:
        return round(float(end), 4)
    usual = float(np.median(np.diff(starts))) if len(starts) > 1 else 1.0  # a still picture: one second
    return round(float(starts[-1]) + usual, 4)


def _open(path, held, num_threads, backends=("decord", "av")):
    """Path -> Source from the first backend that takes it. `held` is a dict that keeps the last source open.

    Opening costs a walk over all packets of the file (2 microseconds each), more than the decoding of a short crop.
    """
    file = _identity(path)
    source = held.get("source")
    if source is not None and source.file == file and source.backend in backends:
        return source
    held.clear()  # before opening: two open 4K files need twice the memory
    _check_whole(path, file[1])
    reasons = []
    for backend in backends:
        try:
            held["source"] = (_open_decord if backend == "decord" else _open_av)(path, num_threads)
            return held["source"]
        except VideoError as error:
            reasons.append(error.why)
        except ImportError:
            reasons.append(f"{backend} is not installed")
    if all(reason.endswith("is not installed") for reason in reasons):  # the environment is broken, not the file
        raise ImportError("; ".join(reasons) + ": pip install decord, or av")
    # PyAV's word on this is final, and clearer than the pair.
    raise VideoError(path, reasons[-1] if reasons[-1] == "no video stream" else "; ".join(reasons))


def _decode(path, indices, height, width, held, num_threads):
    """Path, ascending indices -> images [T, height, width, 3] uint8, each resized as soon as it is decoded."""
    from PIL import Image

    source = _open(path, held, num_threads)
    images = np.empty((len(indices), height, width, 3), np.uint8)  # [T, H, W, 3]
    while True:  # at most twice: decord, then PyAV for a file whose middle decord cannot decode
        read = _read_decord(source, indices) if source.backend == "decord" else _read_av(source, indices, num_threads)
        try:
            for n, image in enumerate(read):
                if image.shape[:2] != (height, width):  # bicubic over bytes at the target size would not change them
                    full = Image.fromarray(np.ascontiguousarray(image))  # rotated ones are strided views
                    image = full.resize((width, height), Image.Resampling.BICUBIC)
                images[n] = image
            return images
        except VideoError as error:
            held.clear()  # a reader that failed once is not asked again
            if source.backend == "av":
                raise
            starts = source.starts
            try:
                source = _open(path, held, num_threads, ("av",))
            except (VideoError, ImportError) as second:
                # An ImportError has no `why`; its own text says which package is missing.
                raise VideoError(path, f"{error.why}; {getattr(second, 'why', second)}") from error
            # The indices were chosen from decord's table: they mean the same frames only if PyAV's table agrees.
            if len(source.starts) != len(starts) or np.abs(source.starts - starts).max() > 1e-2:
                raise VideoError(path, f"{error.why}; PyAV counts other frames") from error


# ---------------------------------------------------------------------------------------------------------------------
# Decoding once: the cache, and decoders that may die


def _answer(request, held):
    """One request -> plain values, in this process. ("index", path, threads) or ("frames", path, threads, ...)."""
    kind, path, num_threads = request[:3]
    if kind == "frames":
        return _decode(path, *request[3:], held, num_threads)
    source = _open(path, held, num_threads)
    count, duration = len(source.starts), source.duration
    return source.starts, asdict(VideoInfo(duration, count, count / duration, source.width, source.height))


def _serve(fd):
    """A child's life: answer requests until the parent closes the pipe. Answers are plain, so that pickling never
    depends on the name under which this file was imported."""
    pipe, held = Connection(fd), {}
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            request = pipe.recv()
            try:
                pipe.send(("ok", _answer(request, held)))
            except VideoError as error:
                pipe.send(("bad", error.why))
            except (ImportError, MemoryError) as error:  # not the file's fault: the parent raises it as it is
                pipe.send(("raise", error))


class Decoder:
    """Serves one request at a time and keeps its last file open; in this process, or (with a timeout) in a child."""

    def __init__(self, timeout):
        self.timeout, self.held, self.path, self.process, self.pipe = timeout, {}, None, None, None

    def ask(self, path, request):
        """Raises VideoError also for a file on which two children died, or one stayed silent for `timeout` seconds; the next
        request then starts a new child. (One death may be anybody's: the kernel's, short of memory, or a user's.)"""
        self.path = path
        if self.timeout is None:
            return _answer(request, self.held)
        status, value = self._try(path, request) or self._try(path, request) or ("bad", "the decoder process died, twice")
        # A request that failed in good order leaves its child alive.
        if status == "raise":
            raise value
        if status == "bad":
            raise VideoError(path, value)
        return value

    def _try(self, path, request):
        """-> the child's answer, None when it died."""
        if self.process is None:
            # Not multiprocessing: its spawn would import the caller's main script, with torch, in every child.
            self.pipe, theirs = Pipe()
            command = [sys.executable, os.path.abspath(__file__), "--serve", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()  # only the child's copy is left, so its death is seen as an end of file
        answered = False
        try:
            self.pipe.send(request)
            if not self.pipe.poll(self.timeout):
                raise VideoError(path, f"no answer within {self.timeout:g} s")
            answer = self.pipe.recv()
            answered = True
            return answer
        except (EOFError, OSError):
            return None
        finally:
            if not answered:  # for whatever reason, Ctrl-C too: a late answer must never serve the next request
                self.close()

    def close(self):
        self.held.clear()
        if self.process is not None:
            self.process.kill()  # not terminate: a decoder stuck in C code never gets to a handler
            self.process.wait()  # or it stays a zombie until this process ends
            self.pipe.close()
            self.process = None


class FrameCache:
    """Frames and frame tables already read, shared by threads; least recently used ones go when `max_bytes` is full.

    max_bytes:   bound on what is kept; a single entry above it is returned but not kept. 0 keeps nothing.
    num_threads: decoding threads per file. 1 suits many files at once.
    workers:     decoders that share one large set of frames (8 frames each at least), every one with the file open and a part of
                 the video to itself: sooner done where one file is waited for. 1 suits many files at once.
    timeout:     None decodes in this process. Seconds: in child processes, one per thread that asks at the same time,
                 so that a file which hangs or crashes its decoder costs a VideoError and one child, never the run.
    Threads that want the same thing at the same time wait for the first of them. If it fails, all of them get its
    error, and the error is then forgotten: a later call tries again, since a file may have been mended or finished.
    Counters: decodes = frame sets decoded, hits = frame sets served without decoding, indexed = files opened for their
    table of times; bytes = what is kept now.
    """

    def __init__(self, max_bytes=4 * 2**30, num_threads=1, timeout=None, workers=1):
        self.max_bytes, self.num_threads, self.timeout, self.workers = max_bytes, num_threads, timeout, workers
        self.bytes = self.decodes = self.indexed = self.hits = 0
        self._lock = threading.Lock()
        self._kept = OrderedDict()  # key -> (value, bytes), least recently used first
        self._pending = {}  # key -> Future that the waiting threads wait for
        self._idle = []  # decoders nobody is using, most recent last

    def index(self, path):
        """Path -> (starts [N] float64 seconds, VideoInfo), read once per state of the file."""
        file = _identity(path)

        def read():
            starts, info = self._ask(file[0], ("index", file[0], self.num_threads))  # [N], dict
            starts.flags.writeable = False
            with self._lock:
                self.indexed += 1
            return (starts, VideoInfo(**info)), starts.nbytes

        return self._once(file, read)

    def frames(self, path, indices, min_pixels, max_pixels):
        """Path, ascending frame indices -> Frames, resized to smart_size, decoded once per (file, frames, size)."""
        file = _identity(path)
        starts, info = self.index(path)
        # The size before decoding: it is part of the key, and a hit must not open the file.
        height, width = smart_size(info.height, info.width, min_pixels, max_pixels)
        # A digest of plain values: hash() of strings differs from one process to the next.
        frame_keys = [hashlib.sha256(repr((file, int(i), height, width)).encode()).hexdigest()[:32] for i in indices]
        key = hashlib.sha256("".join(frame_keys).encode()).hexdigest()[:32]

        def part(some):
            return self._ask(file[0], ("frames", file[0], self.num_threads, [int(i) for i in some], height, width))  # [t, H, W, 3]

        def read():
            parts, seconds = min(self.workers, max(1, len(indices) // 8)), starts[indices]  # [T]
            if parts == 1:
                images = part(indices)  # [T, H, W, 3]
            else:
                with ThreadPoolExecutor(parts) as pool:
                    images = np.concatenate(list(pool.map(part, np.array_split(indices, parts))))
            images.flags.writeable = seconds.flags.writeable = False
            with self._lock:
                self.decodes += 1
            return Frames(images, seconds, key, frame_keys), images.nbytes

        return self._once(key, read, counted=True)

    def close(self):
        """Ends the children and closes the files. The cache stays usable."""
        with self._lock:
            idle, self._idle = self._idle, []
        for decoder in idle:
            decoder.close()

    def _ask(self, path, request):
        """Has an idle decoder, rather the one that holds this file open, answer the request."""
        with self._lock:
            same = [d for d in self._idle if d.path == path]
            decoder = (same or self._idle or [Decoder(self.timeout)])[-1]
            if decoder in self._idle:
                self._idle.remove(decoder)
        try:
            return decoder.ask(path, request)  # outside the lock: other threads decode meanwhile
        finally:
            with self._lock:
                self._idle.append(decoder)

    def _once(self, key, read, counted=False):
        """Value of `key`: kept, or being read by another thread, or read() -> (value, bytes) now; `counted` in hits."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.hits += counted
                return self._kept[key][0]
            pending = self._pending.get(key)
            if pending is None:
                mine = self._pending[key] = Future()
            else:
                self.hits += counted
        if pending is not None:  # outside the lock, which the reading thread needs to finish
            return pending.result()  # or raises what the other thread raised
        try:
            value, size = read()
        except BaseException as error:  # all of them, and raised again: whoever waits must not wait for ever
            with self._lock:
                del self._pending[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._kept[key] = (value, size)
            self.bytes += size
            while self.bytes > self.max_bytes:  # ends: with nothing kept, bytes is 0
                self.bytes -= self._kept.popitem(last=False)[1][1]
        mine.set_result(value)
        return value


# ---------------------------------------------------------------------------------------------------------------------
# What the other scripts call


def probe(path, cache=None):
    """Path -> VideoInfo (seconds, pixels). Raises VideoError."""
    return (cache or FrameCache(0)).index(path)[1]


def overview(path, num_frames, min_pixels=1024, max_pixels=50176, cache=None):
    """Path -> Frames: at most `num_frames` over the whole video, images [T, H, W, 3] uint8, seconds [T].

    Raises VideoError for the file, ValueError for num_frames < 1.
    """
    cache = cache or FrameCache(0)
    starts, info = cache.index(path)
    return cache.frames(path, overview_indices(starts, info.duration, num_frames), min_pixels, max_pixels)


def crop(path, start, end, num_frames=None, fps=1.0, max_frames=16, min_pixels=1024, max_pixels=50176, cache=None):
    """Path, window in seconds -> Frames of the window: images [T, H, W, 3] uint8, seconds [T] on the video's clock.

    Takes `fps` looks per second, or `num_frames` in all when given, at least 1 and at most `max_frames`.
    The first frame may start before `start`: it is the one on display there.
    Raises VideoError for the file, ValueError for a window that holds nothing of the video.
    """
    cache = cache or FrameCache(0)
    starts, info = cache.index(path)
    indices = crop_indices(starts, info.duration, start, end, num_frames, fps, max_frames)
    return cache.frames(path, indices, min_pixels, max_pixels)


def at(path, times, min_pixels=1024, max_pixels=50176, cache=None):
    """Path, times in seconds -> Frames on display then, each frame once: images [T, H, W, 3] uint8, seconds [T].

    Raises VideoError for the file, ValueError when no time lies within the video.
    """
    cache = cache or FrameCache(0)
    starts, info = cache.index(path)
    inside = [t for t in times if 0 <= t < info.duration]
    if not inside:
        raise ValueError(f"none of the {len(times)} times lies within the video, which runs from 0 to {info.duration:g} s")
    return cache.frames(path, _on_display(starts, inside), min_pixels, max_pixels)


def load(spec, root=None, cache=None, min_pixels=1024, max_pixels=50176):
    """A message's video item -> Frames. {"video", "frames": K} is an overview; {"video", "start", "end"}, with "fps",
    "max_frames" and "num_frames" as they are given, is a crop; {"video", "times": [..]} are single frames. Paths are relative to
    `root`, see `resolve`.

    Raises VideoError, ValueError as above, and KeyError for an item that is none of these.
    """
    path = resolve(spec["video"], root)
    size = {"min_pixels": min_pixels, "max_pixels": max_pixels, "cache": cache}
    if "frames" in spec:
        return overview(path, spec["frames"], **size)
    if "times" in spec:
        return at(path, spec["times"], **size)
    # An item may leave out, or set to null, what has a default in `crop`.
    given = {name: spec[name] for name in ("num_frames", "fps", "max_frames") if spec.get(name) is not None}
    return crop(path, spec["start"], spec["end"], **given, **size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a video file holds, and the frames sampled from it.")
    parser.add_argument("file", nargs="?", help="video file")
    parser.add_argument("--frames", type=int, help="number of frames (default: 8 of the whole file, 1 fps of a window)")
    parser.add_argument("--start", type=float, help="seconds; start of a window")
    parser.add_argument("--end", type=float, help="seconds; end of a window")
    parser.add_argument("--min-pixels", type=int, default=1024, help="least height x width after resizing")
    parser.add_argument("--max-pixels", type=int, default=50176, help="most height x width after resizing")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # pipe of a parent FrameCache
    args = parser.parse_args()
    if args.serve is not None:
        sys.exit(_serve(args.serve))
    if args.file is None:
        parser.error("which file?")

    cache, pixels = FrameCache(), {"min_pixels": args.min_pixels, "max_pixels": args.max_pixels}
    try:
        info = probe(args.file, cache)
        print(f"{info.duration:g} s | {info.num_frames} frames | {info.fps:.3f} fps | {info.width}x{info.height}")
        if args.start is None and args.end is None:
            frames = overview(args.file, args.frames or 8, cache=cache, **pixels)
        else:
            window = (args.start or 0.0, info.duration if args.end is None else args.end)
            frames = crop(args.file, *window, num_frames=args.frames, cache=cache, **pixels)
    except (VideoError, ValueError) as error:
        sys.exit(str(error))
    print(f"images {list(frames.images.shape)} | seconds " + " ".join(f"{t:g}" for t in frames.seconds))
