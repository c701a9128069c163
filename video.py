"""
video.py (tests/test_video.py): a video, a file or a folder of frames -> frames with timestamps,
cached; and VideoSource, where the frames of a task come from.

T frames of H x W pixels; s_i = start of frame i in seconds, s_0 = 0; D = duration.
  frame on display at t   = the last i with s_i <= t; the frame's time is s_i, not t
  overview(K)             = frames on display at (k + 0.5) D / K, k = 0..K-1
  crop(a, b)              = frames on display at a + (k + 0.5)(b - a) / n, k = 0..n-1, with
                            a, b clamped to [0, D] and n = clip(round((b - a) fps), 1, max_frames)
All drop repeats. 64 frames at 1 fps: overview(4) -> 8, 24, 40, 56; crop(16, 19) -> 16, 17, 18.

A file is read in one of two ways, see `read_table`:
  fast   mp4, mov, mkv, webm of H.264, HEVC, VP9, AV1 without oddities: seek to the key frame before
         a wanted frame, decode forward, take the frame with its time
  slow   all others: decode from the first frame on, for every look, at the times that ffmpeg shows

Departures: s_i is the container's clock, never i / fps, which is wrong as soon as the rate varies.
Frames are resized once, here, to multiples of 32 (patch 16 x merge 2), and by no processor again.
A file whose bytes do not decode is a VideoError; a read that the disk refuses is an OSError, which
ends the run. docs/your-own-data.md tells which files are read, and how.

Reads one video; writes nothing.
"""

import contextlib
import functools
import io
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter

import cachetools
import numpy as np  # av and PIL are imported in the functions that decode; sampling needs neither

import launch


class VideoError(launch.UserError):
    """This file cannot be used: `.path` says which, `.reason` what is wrong; str() is
    "path: reason"."""

    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class VideoInfo:
    duration: float  # seconds, from the start of the first frame to the end of the last
    num_frames: int
    fps: float  # num_frames / duration: an average, frames need not be evenly spaced
    width: int  # pixels, as displayed (rotation applied)
    height: int


@dataclass
class Frames:
    images: np.ndarray  # [T, H, W, 3] uint8 RGB; read-only because a cache shares them
    seconds: np.ndarray  # [T] float64, start of each frame on the video's clock; read-only
    key: str  # names this set of frames: same file, same frames, same size <=> same key
    frame_keys: list[str]  # [T] equal in every set that holds this frame at this size


# ------------------------------------------------------------------------------------------------
# Which frames, and how large


@functools.cache
def smart_size(height, width, min_pixels, max_pixels):
    """(height, width) in pixels -> (h, w) to resize to, whole multiples of 32.

    Of all pairs with min_pixels <= h * w <= max_pixels: the one nearest, in log h and log w, to
    the exact rescaling, so shape and area are kept. If there is no such pair, the lower bound is
    given up; (32, 32) may exceed the upper bound too.
    """
    area = min(max(height * width, min_pixels), max_pixels)  # own area, moved into the bounds
    tall = math.sqrt(area * height / width) / 32  # the exact answer, in cells of 32 x 32
    wide = math.sqrt(area * width / height) / 32
    max_cells = max(1, max_pixels // 1024)  # cells of a frame
    min_cells = -(-min_pixels // 1024)
    if not 1 <= min_cells <= max_cells:
        min_cells = 1
    best = (math.inf, 1, 1)  # (distance, cells down, cells across)
    # More than these in one direction only gets worse.
    for down in range(1, max(math.ceil(tall), min_cells) + 1):
        for across in range(1, min(max(math.ceil(wide), min_cells), max_cells // down) + 1):
            distance = abs(math.log(down / tall)) + abs(math.log(across / wide))
            if down * across >= min_cells:
                # Rounded, so that ties compare equal and the smaller one wins on every machine.
                best = min(best, (round(distance, 9), down, across))
    return best[1] * 32, best[2] * 32


def frame_at(starts, looks):
    """Frame starts [N], look times [L] in seconds -> sorted unique indices [<=L] of frames seen."""
    # 1 ms of grace: a look at 16.04 sees the frame that starts there, 16.0400009 as a float32.
    indices = np.searchsorted(starts, np.asarray(looks) + 1e-3, "right") - 1
    return np.unique(np.maximum(indices, 0))


def overview_indices(starts, duration, num_frames):
    """Frame starts [N] in seconds -> indices of at most `num_frames` frames of the whole video."""
    looks = (np.arange(num_frames) + 0.5) * duration / num_frames  # [K] centres of equal segments
    return frame_at(starts, looks)


def crop_indices(starts, duration, start, end, num_frames=None, fps=1.0, max_frames=16):
    """Frame starts [N] -> indices of the frames seen in the window [start, end], all in seconds.

    `fps` looks a second, or `num_frames` in all; at most `max_frames`, and at least 1. ValueError:
    no part of the window lies in [0, duration] (reversed, beyond, NaN).
    """
    low, high = np.clip([start, end], 0.0, duration)  # NaN stays NaN and fails the next test
    if not low < high:
        raise ValueError(f"window {start:g}-{end:g} s holds nothing of the video, which runs from "
                         f"0 to {duration:g} s")
    looks = (high - low) * fps if num_frames is None else num_frames
    # round() would send 2.5 to 2. The minimum comes first, because a huge fps has no whole number.
    n = max(math.floor(min(looks, max_frames) + 0.5), 1)
    return frame_at(starts, low + (np.arange(n) + 0.5) * (high - low) / n)  # as in an overview


# ------------------------------------------------------------------------------------------------
# A path -> frames


def resolve(video, root=None):
    """Path in a data file -> real path; with `root`: relative to root and inside root.

    Raises VideoError for a path whose text leaves root, absolute or by `..`. Links are followed,
    because root's owner made them and a hub snapshot consists of links. Existence is not checked.
    """
    if re.match(r"\w+://", os.fspath(video)):
        raise VideoError(video, "is an address: download the video first")
    if root is None:
        return os.path.realpath(video)
    base = os.path.abspath(root)
    path = os.path.normpath(os.path.join(base, video))  # or `video`, if absolute
    if os.path.commonpath([base, path]) != base:  # by whole names: /data2 is not inside /data
        raise VideoError(video, f"lies outside the video folder {base}")
    return os.path.realpath(path)


def root_of(args, path):
    """The folder that the videos of a data file are relative to: --video-root, or the file's."""
    return args.video_root or os.path.dirname(path) or "."


def load(spec, root=None, cache=None, min_pixels=1024, max_pixels=50176):
    """A message's video item -> Frames. The path goes through `resolve`. Raises VideoError, and
    ValueError for a window or times of which nothing lies in the video.

    {"video", "frames": K}: at most K, which is 1 or more, of the whole video. {"video", "times":
    [..]}: on display at these seconds. {"video", "start", "end", "fps"?, "max_frames"?,
    "num_frames"?}: see `crop_indices`; null: not given. The first frame of a window may start
    before `start`, because it is on display at that time.
    """
    path = resolve(spec["video"], root)
    cache = cache or FrameCache(0)
    starts, info = cache.index(path)  # [N] seconds
    if "frames" in spec:
        indices = overview_indices(starts, info.duration, spec["frames"])  # [T]
    elif "times" in spec:
        times = [t for t in spec["times"] if 0 <= t < info.duration]  # others are left out
        if not times:
            raise ValueError(f"no time lies in the video, which runs from 0 to {info.duration:g} s")
        indices = frame_at(starts, times)
    else:
        names = ("num_frames", "fps", "max_frames")
        options = {name: spec[name] for name in names if spec.get(name) is not None}
        indices = crop_indices(starts, info.duration, spec["start"], spec["end"], **options)
    return cache.frames(path, indices, min_pixels, max_pixels)


def overview(path, num_frames, **how):
    """Path -> at most `num_frames` Frames of the whole video. how: cache, min_pixels, max_pixels.
    """
    return load({"video": path, "frames": num_frames}, **how)


def crop(path, start, end, num_frames=None, fps=1.0, max_frames=16, **how):
    """Path, window in seconds -> Frames, timed on the whole video's clock. how: as of overview."""
    return load({"video": path, "start": start, "end": end, "num_frames": num_frames, "fps": fps,
                 "max_frames": max_frames}, **how)


@dataclass
class VideoSource:
    """Where frames come from: the root folder, size bounds, the cache of this stage."""

    root: str
    cache: "FrameCache"
    min_pixels: int = 1024  # of a frame after resizing
    max_pixels: int = 50176
    subtitles: object = None  # (task, seconds of the frames [K], root) -> text of its file, or ""

    def overview_spec(self, task, num_frames):
        """The overview of a task, as `load` reads it and as a rollout records it."""
        return {"video": task["video"], "frames": num_frames}

    def load(self, spec):
        """{"video", "frames"} or {"video", "start", "end", ..} -> Frames. Raises VideoError, or
        ValueError if a window holds no part of the video."""
        return load(spec, self.root, self.cache, self.min_pixels, self.max_pixels)

    def load_overview(self, spec, task):
        """-> (Frames, seconds of the video, text of the subtitles)."""
        # One call for all, because each reads the disk and this runs in a decoder's thread.
        frames = self.load(spec)
        text = self.subtitles(task, frames.seconds, self.root) if self.subtitles else ""
        return frames, self.duration(spec), text

    def duration(self, spec):
        """Seconds of the video."""
        return self.cache.table(resolve(spec["video"], self.root)).info.duration


# ---- below: reading files, cache (a reader of the training step may stop here) ----


# Formats of a single file whose frames have times. Others name further files, anywhere on the disk
# (playlists), or draw text. Last line: stills, videos of one frame.
FORMATS = ("mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,rm,dv,mxf,nut,ivf,gif,apng,yuv4mpegpipe,"
           "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe")
FAST_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
FAST_CODECS = ("h264", "hevc", "vp9", "av1")


@dataclass(frozen=True)
class VideoTable:
    """When the frames of a video are displayed, and where a decoder can begin."""

    state: tuple  # real path and identity: another state of the file is another video
    starts: np.ndarray  # [N] seconds, ascending, in steps of 0.1 ms, from 0 in a file; read-only
    ticks: np.ndarray  # [N] the same on the stream's own clock; numbers of a folder's images
    keys: np.ndarray  # [K] ticks of key frames; none of a file that is decoded in a row
    info: VideoInfo


def identity(path):
    """Path -> [bytes, mtime in ns]: another video at this path has another identity. Of a folder
    of frames: [files, newest mtime of the folder and of its first and last file]."""
    status = os.stat(path)
    if not os.path.isdir(path):
        return [status.st_size, status.st_mtime_ns]
    names = os.listdir(path)
    sampled_names = ("", min(names, default=""), max(names, default=""))
    return [len(names), max(os.stat(f"{path}/{name}").st_mtime_ns for name in sampled_names)]


class VideoFile(io.FileIO):
    """A file whose reads never fail for libav, which would take a failed read for the end of the
    file, and half a picture for a whole one. `error` keeps the OSError; open_video raises it."""

    error = None

    def read(self, size=-1):
        try:
            return super().read(size)
        except OSError as error:
            self.error = error
            return b""

    def seek(self, offset, whence=os.SEEK_SET):
        try:
            return super().seek(offset, whence)
        except OSError:  # of a damaged file's own numbers; a seek touches no disk
            return -1


@contextlib.contextmanager
def open_video(path):
    """Path -> (container, video stream), closed at exit. libav's errors become a VideoError, and
    the OSError of a read is raised, whatever libav made of it."""
    import av

    # scan_all_pmts, of MPEG-TS: the first seconds tell how frames are reordered, not the first
    # frames alone. metadata_errors: tags need not be UTF-8.
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "", "scan_all_pmts": "1"}
    with VideoFile(path) as file:
        file.name = "video"  # the format is told by the bytes, and no pattern in a name counts
        try:
            with av.open(file, options=options, metadata_errors="ignore") as container:
                stream = choose_stream(path, container)
                stream.codec_context.thread_count = 1  # unset: every core, per open file
                # Else a crop on the left is rounded to an address that suits the processor.
                stream.codec_context.flags |= av.codec.context.Flags.unaligned.value
                # PyAV asks libavformat to invent missing times of display. ffmpeg does not.
                container.flags &= ~av.container.Flags.gen_pts.value
                yield container, stream
        except av.FFmpegError as error:
            raise VideoError(path, f"libav: {error.strerror}") from None
        finally:
            if file.error:
                raise file.error


def choose_stream(path, container):
    """-> the video stream that ffmpeg takes: the one of most pixels, where the default one has five
    million more."""
    import av

    flags = av.stream.Disposition

    def priority(stream):
        bonus = 5_000_000 if stream.disposition & flags.default else 0
        return stream.width * stream.height + bonus

    # No codec_context: no decoder. attached_pic: a cover. dependent: a tile of a phone's picture.
    not_a_video = flags.attached_pic | flags.dependent
    streams = [s for s in container.streams.video
               if s.codec_context and not s.disposition & not_a_video]
    if not streams:
        raise VideoError(path, "no video stream, or no decoder for it")
    return max(streams, key=priority)


def demux(container, *streams):
    """-> iterator of packets. Where a stream begins late PyAV fails, after the last packet."""
    with contextlib.suppress(IndexError):
        yield from container.demux(*streams)


def decode(packet):
    """Packet -> [frames]. As ffmpeg, goes on after a packet that does not decode."""
    import av

    if packet.size == 0 and packet.dts is not None:
        return []  # a dropped frame of AVI; to a decoder no bytes mean the end
    try:
        return packet.decode()
    except av.error.InvalidDataError:
        return []


def read_table(path):
    """Path -> (starts [N], ticks [N], keys [K], (duration, height, width)) of a VideoTable."""
    if os.path.isdir(path):
        return folder_table(path)
    with open_video(path) as (container, stream):
        unit = float(stream.time_base)  # seconds per tick
        stated = (container.duration or 0) / 1e6  # seconds, by the header
        packets, first, sound_end, is_plain = scan_packets(container, stream)
        if not first:
            raise VideoError(path, "holds no video frames")
        height, width, _ = upright(first[0]).shape
    times = regular_times(packets, first) if is_plain else None
    ticks, keys, end = times or times_in_a_row(path)
    begin = float(ticks[0]) * unit
    starts = np.round(ticks * unit - begin, 4)
    duration = last_end(starts, end * unit - begin)
    # The last picture stays while the sound goes on, whose end containers round differently.
    sound_end = round(sound_end - begin, 1)
    if sound_end > duration + 0.1:
        duration = sound_end
    if duration + max(begin, 0) < 0.8 * stated - 0.5:  # Matroska counts from 0, not from the first
        raise VideoError(path, f"truncated: ends at {duration:g} s, its header says {stated:g} s")
    return starts, ticks, keys, (duration, height, width)


def clock_may_jump(container):
    """Whether times of this format may jump (AVFMT_TS_DISCONT), as of MPEG-TS."""
    return bool(container.format.flags & 0x200)


def scan_packets(container, stream):
    """-> packets [P], each (time of display in ticks or None, duration, key frame?, hidden by an
    edit list?); the first 16 decoded frames; seconds at which the sound ends, -inf: no sound;
    whether container, codec and packets are of the kinds that seeks serve well."""
    packets, first, sound_end = [], [], -math.inf
    codec = stream.codec_context
    is_fast_codec = codec.codec.canonical_name in FAST_CODECS
    is_plain = is_fast_codec and container.format.name in FAST_CONTAINERS
    for packet in demux(container, stream, *container.streams.audio):
        length = packet.duration or 0
        if packet.stream.index != stream.index:
            if packet.pts is not None and not clock_may_jump(container):
                sound_end = max(sound_end, float((packet.pts + length) * packet.time_base))
            continue
        if packet.size:  # else: the flush at the end
            packets.append((packet.pts, length, packet.is_keyframe, packet.is_discard))
            is_plain = is_plain and not needs_a_row(codec, packet)
        if len(first) < 16:
            first += decode(packet)
    return packets, first, sound_end, is_plain


def regular_times(packets, first):
    """As of scan_packets -> (ticks [N], ticks of key frames [K], tick of the end), if decoding from
    any key frame on gives what decoding in a row gives; else None."""
    pts, lengths, is_key, hidden = map(np.array, zip(*packets))  # [P]
    # object: a packet without time, None. Two packets of one time: fields, or layers.
    if pts.dtype == object or len(np.unique(pts)) < len(pts):
        return None
    # Decoding can begin at a key frame if no frame in front of it is displayed after it.
    is_late = pts < np.maximum.accumulate(pts)
    if not is_key[0] or is_late[is_key].any():
        return None
    ticks = np.sort(pts[~hidden])
    # The first frames must decode at the times of the packets. Copies that lost the times of
    # display, fields, and frames that a cut left over are told so.
    if [frame.pts for frame in first] != ticks[: len(first)].tolist():
        return None
    return ticks, pts[is_key], ticks[-1] + lengths[pts == ticks[-1]][0]


def times_in_a_row(path):
    """Path -> as regular_times, without key frames, by decoding all."""
    ends = {}  # tick of a frame -> tick of its end
    with open_video(path) as streams:
        for time, frame in timed_frames(path, *streams):
            ends[time] = time + frame.duration
    ticks = np.array(sorted(ends))
    return ticks, ticks[:0], ends[ticks[-1]]


def last_end(starts, end):
    """Starts [N], stated end of the last frame -> its end; if none is stated, one frame more."""
    median_step = np.median(np.diff(starts)) if len(starts) > 1 else 1.0  # a still: one second
    if round(end, 4) <= starts[-1]:
        end = starts[-1] + median_step
    return round(float(end), 4)


def needs_a_row(codec, packet):
    """Whether a packet of H.264 or HEVC tells that decoding may not begin at a key frame: it brings
    parameter sets that the file's header lacks, as after a join of two recordings (a decoder that
    begins later would use the wrong ones, silently), or renews the picture over several frames."""
    if packet.has_sidedata("new_extradata"):
        return True
    if codec.name not in ("h264", "hevc"):
        return False
    header, data = codec.extradata or b"", bytes(packet)
    if header[:1] != b"\1":  # no avcC or hvcC: the units are not told by their lengths
        return True
    is_h264 = codec.name == "h264"
    parameter_set_kinds = (7, 8) if is_h264 else (32, 33, 34)
    width = header[4 if is_h264 else 21] % 4 + 1  # bytes of a length
    offset = 0
    while offset + width + 3 < len(data):
        begin = offset + width
        offset = begin + int.from_bytes(data[offset:begin], "big")
        kind = data[begin] & 31 if is_h264 else data[begin] >> 1 & 63
        if kind in parameter_set_kinds and data[begin:offset].rstrip(b"\0") not in header:
            return True
        # H.264's message that the picture is whole after a number of frames above 0.
        if is_h264 and data[begin:begin + 2] == b"\6\6" and data[begin + 3] < 128:
            return True
    return False


def first_given(*values):
    """-> the first value that is not None, or None."""
    for value in values:
        if value is not None:
            return value


def timed_frames(path, container, stream):
    """-> iterator of all frames in a row, (time in ticks, frame), with the times that ffmpeg shows:
    pts; dts, once the pts have gone back more often than the dts; of a frame with neither, the end
    of the one before."""
    end, pts_back, dts_back = None, 0, 0
    last_pts = last_dts = -math.inf
    longest_silence = 10 if clock_may_jump(container) else math.inf  # seconds without a frame
    for packet in demux(container, stream):
        for frame in decode(packet):
            pts, dts = frame.pts, frame.dts
            pts_back += pts is not None and pts <= last_pts
            dts_back += dts is not None and dts <= last_dts
            last_pts, last_dts = first_given(pts, dts, end), first_given(dts, pts, end)
            if last_pts is None:
                raise VideoError(path, "its first frame has no time: encode it anew")
            time = last_pts
            if pts_back > dts_back:  # no dts: a frame that the decoder held back until the end
                time = first_given(dts, end)
            # Joined files: the frames of both would mix. ffmpeg mends such a clock.
            if end is not None and not -2 < (time - end) * stream.time_base < longest_silence:
                raise VideoError(path, "its clock jumps: remux it, or encode it anew")
            end = time + frame.duration
            yield time, frame


def seek_frames(container, stream, ticks, keys):
    """Ascending ticks [T] of a regular file -> iterator of (tick, frame). Leaves out what does not
    decode, or what a seek has missed."""
    import av

    codec, wanted = stream.codec_context, set(ticks)
    # Frames of H.264 state whether others need them; those of HEVC too, if its header says that it
    # has one temporal layer: a frame of a higher layer may need any.
    can_skip = codec.name == "h264"
    if codec.name == "hevc":
        can_skip = codec.extradata[21] >> 3 & 7 == 1

    def frames_from_here():
        for packet in demux(container, stream):
            if can_skip:
                codec.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            yield from decode(packet)

    frames, decode_start = frames_from_here(), keys[0]  # where decoding has begun
    position = -math.inf  # of the frame that came last
    for tick in ticks:
        key = keys[np.searchsorted(keys, tick, "right") - 1]
        if key > max(decode_start, position):
            try:
                container.seek(int(key), stream=stream)
            except av.FFmpegError:  # an index without key frames
                return
            frames, decode_start = frames_from_here(), key
        for frame in frames:
            position = frame.pts
            if position >= tick:
                break
        if position == tick and not frame.is_corrupt:
            yield tick, frame


def read_frames(path, ticks, keys, height, width):
    """Ascending ticks [T], keys as of a VideoTable -> images [T, height, width, 3] uint8."""
    ticks, images = ticks.tolist(), {}
    if os.path.isdir(path):
        names = image_names(path)
        for tick in ticks:
            images[tick] = resized(read_image(path, names[tick]), height, width)
    if len(keys):
        with open_video(path) as streams:
            for tick, frame in seek_frames(*streams, ticks, keys):
                images[tick] = resized(upright(frame), height, width)
    missing_ticks = [tick for tick in ticks if tick not in images]
    if missing_ticks:  # no regular file, or a seek went wrong: from the first frame on
        with open_video(path) as (container, stream):
            last = missing_ticks[-1] + 2 / stream.time_base  # a clock may go back by less
            for time, frame in timed_frames(path, container, stream):
                if time in missing_ticks:  # of two frames of one time the last counts
                    images[time] = resized(upright(frame), height, width)
                if time > last:
                    break
    if len(images) < len(ticks):
        raise VideoError(path, f"{len(ticks) - len(images)} frames do not decode")
    return np.stack([images[tick] for tick in ticks])


def resized(image, height, width):
    """Image [H, W, 3] -> [height, width, 3] uint8."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(image))  # a turned one is a strided view
    return np.asarray(image.resize((width, height)))


def on_white(image):
    """PIL image -> [H, W, 3] uint8, transparent parts in white: as Qwen's reader and vLLM do."""
    from PIL import Image

    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return np.asarray(white)


def upright(frame):
    """Decoded frame -> image [H, W, 3] uint8 as displayed: turned and mirrored as the file says."""
    from PIL import Image

    how = {"threads": 1, "interpolation": "BICUBIC"}  # as ffmpeg
    if frame.format.has_palette or any(c.is_alpha for c in frame.format.components):
        image = on_white(Image.fromarray(frame.to_ndarray(format="rgba", **how)))
    else:
        image = frame.to_ndarray(format="rgb24", **how)
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not know all kinds of side data, such as a photo's EXIF
        return np.rot90(image, round(frame.rotation / 90) % 4)
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5]  # x' = a x + c y, y' = b x + d y
    if abs(b) > abs(a):  # a quarter turn
        image, a, d = image.swapaxes(0, 1), c, b
    if a < 0:
        image = image[:, ::-1]
    if d < 0:
        image = image[::-1]
    return image


def image_names(folder):
    """Folder of frames -> names of its images, in the order of their numbers."""
    names = [n for n in os.listdir(folder) if re.search(r"(?i)^[^.].*\.(jpe?g|png|webp)$", n)]
    return sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def folder_table(path):
    """Folder of frames -> as read_table. Ticks count the images from 0."""
    names = image_names(path)
    try:
        if os.path.exists(f"{path}/times.txt"):
            times = np.loadtxt(f"{path}/times.txt", ndmin=1)  # [N] seconds, as they are written
        else:
            times = np.arange(len(names)) / np.loadtxt(f"{path}/fps")
    except (FileNotFoundError, ValueError) as error:
        raise VideoError(path, "a folder of frames needs images 000001.jpg, .. and fps, a file of "
                         "one number, or times.txt, one time in seconds a line") from error
    # NaN is never later.
    if not 0 < len(names) == len(times) or not (np.diff(times, prepend=-1e-9) > 0).all():
        raise VideoError(path, f"{len(times)} times for {len(names)} images, or one that is below "
                         "0 or not later than the one before")
    ticks, (height, width) = np.arange(len(names)), read_image(path, names[0]).shape[:2]
    return np.round(times, 4), ticks, ticks[:0], (last_end(times, 0.0), height, width)


def read_image(folder, name):
    """Image of a folder -> [H, W, 3] uint8 RGB, upright as its EXIF says."""
    from PIL import Image, ImageOps

    with open(f"{folder}/{name}", "rb") as file:  # outside of the try: a disk's error stays one
        data = io.BytesIO(file.read())
    try:
        with Image.open(data, formats=["JPEG", "PNG", "WEBP"]) as image:
            return on_white(ImageOps.exif_transpose(image))
    # PIL's errors of a damaged image.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VideoError(folder, f"{name}: {error}") from None


MISSING_SHARE = 0.01  # of the videos of a data file may be missing at a start


class FrameCache:
    """Decoded frames and tables of times in memory. Threads that ask for the same at one time wait
    for the first of them. max_bytes: of the frames. workers: threads that decode; they share the
    frames of one look."""

    def __init__(self, max_bytes=4 * 2**30, workers=1):
        self.memory = cachetools.LRUCache(max_bytes, lambda frames: frames.images.nbytes)
        # An hour takes 3 MB.
        self.tables = cachetools.LRUCache(2**28, lambda table: 3 * table.starts.nbytes)
        self.condition = threading.Condition()  # guards both
        self.workers, self.pool = workers, ThreadPoolExecutor(workers)
        self.missing = None  # real paths of videos that a start has missed; None: none has looked

    def index(self, path):
        """Path -> (starts [N] float64 seconds, VideoInfo), read once per state of the file."""
        table = self.table(path)
        return table.starts, table.info

    def check_present(self, path, rows, root):
        """Raises UserError at a start if more than MISSING_SHARE of the videos of a data file are
        missing. A video that goes later is no VideoError: it ends the run. rows: of the file, with
        a "video" each, below `root`."""
        paths = sorted({resolve(row["video"], root) for row in rows})
        # In threads, because a server of files takes a millisecond for each.
        is_present = self.pool.map(os.path.exists, paths)
        missing = [name for name, present in zip(paths, is_present) if not present]
        if len(missing) > MISSING_SHARE * len(paths):
            raise launch.UserError(
                f"{path}: {len(missing)} of {len(paths)} videos are not below {root}: "
                f"{missing[0]}; give --video-root (eval.py: --root), or drop the rows")
        self.missing = (self.missing or set()).union(missing)

    def table(self, path):
        """Path -> VideoTable."""
        path = os.path.realpath(path)
        try:
            state = (path, *identity(path))
        except (FileNotFoundError, NotADirectoryError):
            if self.missing is not None and path not in self.missing:
                raise  # it was there at the start, so its disk has gone
            raise VideoError(path, "no such file") from None
        return self.table_of(state)

    @cachetools.cachedmethod(attrgetter("tables"), condition=attrgetter("condition"))
    def table_of(self, state):
        """(real path, its identity) -> VideoTable."""
        starts, ticks, keys, (duration, height, width) = read_table(state[0])
        starts.flags.writeable = False  # all callers share it
        info = VideoInfo(duration, len(starts), len(starts) / duration, width, height)
        return VideoTable(state, starts, ticks, keys, info)

    def frames(self, path, indices, min_pixels, max_pixels, size=None):
        """Path, ascending indices [T] -> Frames. size: (height, width) in pixels in place of the
        two bounds."""
        table = self.table(path)
        info, indices = table.info, np.asarray(indices)
        height, width = size or smart_size(info.height, info.width, min_pixels, max_pixels)
        names = [digest((table.state, int(i), height, width)) for i in indices]
        return self.frames_of(digest(names), names, table, indices, height, width)

    @cachetools.cachedmethod(attrgetter("memory"), key=lambda self, key, *rest: key,
                             condition=attrgetter("condition"))
    def frames_of(self, key, names, table, indices, height, width):
        """-> Frames of this key, which stands for all other arguments."""
        images, seconds = self.decode(table, indices, height, width)
        images.flags.writeable = seconds.flags.writeable = False
        return Frames(images, seconds, key, names)

    def decode(self, table, indices, height, width):
        """-> (images [T, height, width, 3], seconds [T]). Each worker decodes one stretch: at
        least 8 of these frames and 256 of the video, as it begins at a key frame before them."""
        path, ticks, num_frames = table.state[0], table.ticks[indices], len(table.ticks)
        if len(ticks) < num_frames <= 2**18 // (3 * height * width):
            # A tiny video is decoded whole, once: opening it takes longer than its frames.
            video = self.frames(path, np.arange(num_frames), 0, 0, (height, width))
            return video.images[indices], video.seconds[indices]
        num_parts = 1
        if len(table.keys):  # else each part would decode from the first frame on
            num_parts = max(1, min(self.workers, len(ticks) // 8, num_frames // 256))
        jobs = [self.pool.submit(read_frames, path, part, table.keys, height, width)
                for part in np.array_split(ticks, num_parts)]
        return np.concatenate([job.result() for job in jobs]), table.starts[indices]


def digest(value):
    """-> 32 hex digits that name texts and numbers."""
    return sha256(repr(value).encode()).hexdigest()[:32]  # hash() is salted


def decode_threads():
    """How many videos a rank decodes at once: one per core, but for one core that feeds the GPU."""
    return min(32, max(2, launch.cores() - 1))  # two: a short window must not wait for a long video
