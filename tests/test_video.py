"""Tests of video.py. Every test video is made here, and no two frames of it are alike, so a wrong
frame is seen to be wrong, whatever its timestamp says.

  python -m pytest tests/test_video.py
"""

import math
import os
import re
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import video
from video import FrameCache, VideoError

av = pytest.importorskip("av")

# budget that leaves sides alone when they are multiples of 32
NATIVE = {"min_pixels": 1, "max_pixels": 10**9}


def grainy(index, width, height):
    """Noise that no frame shares: every reference counts in every picture."""
    return np.random.default_rng(index).integers(0, 150, (height, width, 3), dtype=np.uint8)


def write(path, num_frames, rate=25, size=(64, 32), milliseconds=None, codec="libx264",
          pixels="yuv420p", mux=None, **options):
    """Writes a video whose frame i comes at milliseconds[i] or else i / rate. Size: (w, h);
    options: the codec's."""
    rate = Fraction(rate).limit_denominator(10**5)
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with av.open(str(path), "w", options=mux or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        (stream.width, stream.height), stream.pix_fmt = size, pixels
        stream.options = {key.replace("_", "-"): str(value) for key, value in options.items()}
        tick = Fraction(1, 1000) if milliseconds else 1 / rate
        stream.codec_context.time_base = tick
        for i in range(num_frames):
            frame = av.VideoFrame.from_ndarray(grainy(i, *size), format="rgb24")
            frame.pts, frame.time_base = (milliseconds[i] if milliseconds else i), tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    # If root runs it, SVT-AV1 makes its caller a real-time process, and all that starts later.
    os.sched_setscheduler(0, *before)
    return str(path)


def images(path, indices):
    """Path -> its frames at these indices, [T, H, W, 3]; sides must be multiples of 32."""
    return FrameCache(0).frames(path, np.array(indices), **NATIVE).images


@pytest.fixture(scope="session")
def ffmpeg():
    """-> function (arguments) that runs ffmpeg and returns its CompletedProcess, in bytes."""
    package = pytest.importorskip("imageio_ffmpeg")

    def run(*arguments):
        command = [package.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-y"]
        return subprocess.run([*command, *map(str, arguments)], capture_output=True, check=True)

    return run


def shown_by(ffmpeg, path, size=None):
    """What ffmpeg decodes of a file -> seconds [N], the first one 0, and pictures [N, H, W, 3].
    In its order; a time that is not between those before and after is NaN, because some copies
    lost their times and ffmpeg guesses. size: width:height to scale to."""
    scale = [f"scale={size}"] if size else []
    done = ffmpeg("-threads", "1", "-i", path, "-map", "0:v:0",  # several mend damage otherwise
                  "-vf", ",".join(["showinfo", *scale]), "-fps_mode", "passthrough", "-f",
                  "rawvideo", "-pix_fmt", "rgb24", "-")
    found = re.findall(rb" pts_time:(\S+) .* s:(\d+)x(\d+) ", done.stderr)
    times = np.array([float(seconds) for seconds, *_ in found])
    width, height = map(int, size.split(":") if size else found[0][1:])
    pictures = np.frombuffer(done.stdout, np.uint8).reshape(len(times), height, width, 3)
    latest = np.maximum.accumulate(np.append(-np.inf, times))[:-1]  # of those before
    earliest = np.minimum.accumulate(np.append(times, np.inf)[::-1])[::-1][1:]  # of those after
    return np.where((latest < times) & (times < earliest), times - times[0], np.nan), pictures


@pytest.fixture(scope="module")
def minute(tmp_path_factory):
    """64 s at 1 fps: frame i is on display during [i, i + 1)."""
    return write(tmp_path_factory.mktemp("minute") / "minute.mp4", 64, rate=1, size=(64, 32))


@pytest.fixture(scope="module")
def long_gop(tmp_path_factory):
    """300 frames at 25 fps with B-frames and a key frame every 120: nearly every look needs a seek
    and a run-up."""
    return write(tmp_path_factory.mktemp("gop") / "gop.mp4", 300, bf=3, g=120, sc_threshold=0)


# ---- which frames


STARTS = np.arange(64.0)


@pytest.mark.parametrize("found, wanted", [
    (video.overview_indices(STARTS, 64.0, 64), range(64)),
    (video.overview_indices(STARTS, 64.0, 4), [8, 24, 40, 56]),
    (video.overview_indices(STARTS, 64.0, 1), [32]),
    *((video.crop_indices(STARTS, 64.0, start, end, **more), wanted)
      for start, end, more, wanted in [
        (16, 24, {}, range(16, 24)), (16, 24, {"num_frames": 2}, [18, 22]),
        (16, 24, {"fps": 0.5}, [17, 19, 21, 23]), (16, 24, {"num_frames": -1}, [20]),
        (0, 64, {"fps": 1e308, "max_frames": 4}, [8, 24, 40, 56]),
        (-5, 2, {}, [0, 1]), (62, 99, {}, [62, 63]),  # clamped
        (10.2, 10.4, {}, [10]), (10.9, 11.3, {}, [11]),  # shorter than one look: still one
        (0, 64, {}, range(2, 64, 4)),  # max_frames
        (0, 2.5, {}, [0, 1, 2])])])  # halves round up
def test_the_frames_of_overviews_and_windows(found, wanted):
    assert found.tolist() == list(wanted)


@pytest.mark.parametrize("start, end", [(5, 5), (9, 3), (64, 70), (-4, 0), (math.nan, 5),
                                        (3, math.nan)])
def test_crop_of_nothing_names_window_and_duration(start, end):
    pytest.raises(ValueError, video.crop_indices, STARTS, 64.0, start, end).match(r"window .* 64 s")


# ---- how large


@pytest.mark.parametrize("least, most", [(1, 60 * 1024), (1024, 50176), (37 * 1024, 37 * 1024),
                                         (13500, 14000), (20000, 90000)])
def test_smart_size_takes_the_nearest_of_all_pairs(least, most):
    """All are listed here."""
    cells = [(a, b) for a in range(1, 100) for b in range(1, most // 1024 // a + 1)
             if least <= a * b * 1024 or not most // 1024 >= -(-least // 1024)]
    for height, width in [(32, 64), (100, 90), (1080, 1920), (7, 3000), (3000, 7), (1, 1)]:
        area = min(max(height * width, least), most)
        tall, wide = ((area * ratio) ** 0.5 / 32 for ratio in (height / width, width / height))
        best = min(cells, key=lambda ab: (
            round(abs(math.log(ab[0] / tall)) + abs(math.log(ab[1] / wide)), 9), ab))
        assert video.smart_size(height, width, least, most) == (best[0] * 32, best[1] * 32)


# ---- beside ffmpeg


def test_seeking_is_exact_with_b_frames_and_long_gops(long_gop, ffmpeg):
    """Forwards, backwards and across key frames."""
    pictures = shown_by(ffmpeg, long_gop)[1].astype(int)
    for wanted in ([299], [0], [119, 120, 121], [118], [5, 130, 250], list(range(0, 300, 37)),
                   [298, 299], [1, 2, 3]):
        assert np.abs(images(long_gop, wanted) - pictures[wanted]).mean((1, 2, 3)).max() < 1


@pytest.mark.parametrize("ending", ["mp4", "ts"])  # the fast way, and in a row
def test_every_frame_and_time_is_that_of_ffmpeg(tmp_path, ffmpeg, ending):
    """B-frames, a varying rate, a first time that is not zero. Codings: slow/test_video.py."""
    times = [700 + 40 * i + 13 * (i % 3) for i in range(30)]
    path = write(tmp_path / f"v.{ending}", 30, milliseconds=times, bf=3, g=12)
    (seconds, pictures), (starts, info) = shown_by(ffmpeg, path), FrameCache(0).index(path)
    np.testing.assert_allclose(starts, seconds, atol=1.1e-3)
    assert info.num_frames == 30 and info.duration == pytest.approx(1.2, abs=0.05)
    assert np.abs(images(path, range(30)) - pictures.astype(int)).mean() < 0.5


# ---- keys


def test_keys_name_frames_across_sets(tmp_path, minute):
    whole, half = video.overview(minute, 64), video.overview(minute, 32)
    part, small = video.crop(minute, 16, 24), video.crop(minute, 16, 24, max_pixels=1024)
    other = video.overview(write(tmp_path / "other.mp4", 64, rate=1), 64)
    assert part.frame_keys == whole.frame_keys[16:24] and half.frame_keys == whole.frame_keys[1::2]
    assert part.key == video.crop(minute, 16.1, 24.1).key  # same frames, same name
    assert len({*whole.frame_keys, *small.frame_keys, *other.frame_keys}) == 64 + 8 + 64
    assert len({x.key for x in (whole, half, part, small, other)}) == 5


# ---- frames in memory


def same(one, other):
    return (np.array_equal(one.images, other.images) and np.array_equal(one.seconds, other.seconds)
            and (one.key, one.frame_keys) == (other.key, other.frame_keys))


def test_a_rewritten_video_is_not_served_from_its_old_file(tmp_path):
    path, cache = write(tmp_path / "v.mp4", 10, rate=1), FrameCache()
    frames = video.overview(path, 64, cache=cache)
    pytest.raises(ValueError, frames.images.fill, 0)  # all callers share them
    write(path, 20, rate=1)
    assert len(video.overview(path, 64, cache=cache).seconds) == 20


# ---- broken files


def test_a_start_refuses_missing_videos_and_one_that_goes_later_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MISSING_SHARE", 0.25)
    cache = FrameCache()
    names = ["a.mp4", "b.mp4", "c.mp4"]
    paths = [write(tmp_path / name, 10) for name in names]
    rows = [{"video": name} for name in ["not.mp4", *names * 2]]
    cache.check_present("d.jsonl", rows, tmp_path)
    os.remove(paths[0])
    pytest.raises(FileNotFoundError, cache.index, paths[0])
    # no start has seen it
    pytest.raises(VideoError, cache.index, tmp_path / "not.mp4").match("no such file")
    with pytest.raises(video.launch.UserError, match="d.jsonl: 2 of 4 .*a.mp4"):
        cache.check_present("d.jsonl", rows, tmp_path)


@pytest.mark.parametrize("name, codec, pixels", [
    ("v.mp4", "libx264", "yuv420p"), ("v.avi", "mjpeg", "yuvj420p")])
def test_a_read_that_fails_is_an_oserror(tmp_path, monkeypatch, name, codec, pixels):
    """Never the end of the file, whose last picture would be half a one, and never a VideoError."""
    path = write(tmp_path / name, 40, codec=codec, pixels=pixels, size=(160, 128))
    whole, real = video.overview(path, 8), video.VideoFile.read
    for end in (os.path.getsize(path) * n // 10 for n in (0, 3, 6, 9)):
        def read(file, size=-1, end=end):
            if file.tell() + size > end:  # from here on reads fail, as those of a folder do
                os.dup2(os.open(tmp_path, os.O_RDONLY), file.fileno())
            return real(file, size)

        monkeypatch.setattr(video.VideoFile, "read", read)
        pytest.raises(OSError, video.overview, path, 8).match("Is a directory")
        monkeypatch.undo()
    assert same(video.overview(path, 8), whole)


@pytest.mark.parametrize("kind, why", [
    ("sound", "no video stream"), ("cut_mkv", "truncated"),
    ("cut_back", "Invalid data"),  # mp4 with its index at the end: gone
    ("cut_front", "truncated")])  # index in front: opens well, and ends early
def test_broken_files_raise_video_error(tmp_path, ffmpeg, kind, why):
    path = tmp_path / f"{kind}.{'mkv' if kind == 'cut_mkv' else 'mp4'}"
    if kind == "sound":
        ffmpeg("-f", "lavfi", "-i", "sine=d=1", path)
    else:
        mux = {"movflags": "faststart"} if kind == "cut_front" else None
        data = Path(write(path, 100, mux=mux, g=20)).read_bytes()
        path.write_bytes(data[: len(data) * 6 // 10])
    with pytest.raises(VideoError, match=why) as caught:
        video.overview(path, 64)
    assert str(caught.value) == f"{path}: {caught.value.reason}"


# ---- what data files say


def test_resolve_stays_inside_root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "alias").symlink_to(root)
    # what lies in the root may be a link, as all of a hub snapshot: its owner put it there
    (root / "folder").symlink_to(tmp_path)
    for path, base, want in ((root / "a", root, root / "a"), ("folder/b", root, tmp_path / "b"),
                             ("a.mp4", tmp_path / "alias", root / "a.mp4"),
                             (tmp_path / "b", None, tmp_path / "b")):  # no root, no fence
        assert video.resolve(path, base) == str(want)
    for path in ("../b", str(tmp_path / "b"), "folder/../../a", "/etc/passwd", "../root2/a"):
        pytest.raises(VideoError, video.resolve, path, root).match("outside")
    pytest.raises(VideoError, video.resolve, "https://x/a", root).match("download the video first")


def test_load_message_items(minute):
    (root, name), whole = os.path.split(minute), video.load({"video": minute, "frames": 64}).images
    window = {"start": 16, "end": 24}
    for how, seconds in (({"frames": 4}, [8, 24, 40, 56]), (window, range(16, 24)),
                         ({**window, "max_frames": 2}, [18, 22]),
                         ({**window, "fps": 0.5}, [17, 19, 21, 23]),
                         ({**window, "num_frames": 1}, [20]), ({"times": [5.5, 99]}, [5]),
                         ({"frames": 1000}, range(64))):  # more than it has
        frames = video.load({"type": "video", "video": name, **how}, root)
        assert frames.seconds.tolist() == list(seconds)
        assert np.array_equal(frames.images, whole[list(seconds)])
    assert video.load({"video": name, "frames": 4}, root, max_pixels=1024).images.shape[2] == 32


def test_frames_are_decoded_once_and_those_of_a_tiny_film_at_once(tmp_path, minute, opened):
    """Frames are those of a decoder that is asked for these alone."""
    looks = [{"frames": 4}, {"start": 3, "end": 9}, {"frames": 64}, {"times": [5.0, 60.0]}]
    tiny = write(tmp_path / "tiny.mp4", 64, rate=1, size=(32, 32))
    long = write(tmp_path / "long.mp4", 520, rate=8)  # 64 frames of it in two parts
    # Once for its times, then for its frames.
    for path, num_opened in ((minute, 5), (tiny, 2), (long, 6)):
        opened.clear()
        cache = FrameCache(workers=2)
        found = [video.load({"video": path, **look}, cache=cache) for look in looks]
        assert video.load({"video": path, **looks[0]}, cache=cache) is found[0]
        assert len(opened) == num_opened
        for look, frames in zip(looks, found):
            assert same(frames, video.load({"video": path, **look}, cache=FrameCache(0)))
