"""
Tests of folders of frames, which are videos too: python -m pytest tests/test_frame_folders.py -q
"""
import subprocess

import numpy as np
import pytest
from PIL import Image
from test_video import NATIVE, paint, shown_by, write

import video
from video import FrameCache, VideoError


@pytest.fixture(scope="module")
def ffmpeg():
    package = pytest.importorskip("imageio_ffmpeg")

    def run(*arguments):
        command = [package.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-y"]
        return subprocess.run([*command, *map(str, arguments)], capture_output=True, check=True)

    return run


def folder_of(path, count=8, clock=("fps", "1"), names="{}.png", size=(64, 32)):
    """A folder whose image number n (from 1 on) shows n - 1 -> its path."""
    path.mkdir(parents=True)
    for n in range(1, count + 1):
        Image.fromarray(paint(n - 1, *size)).save(path / names.format(n))
    (path / clock[0]).write_text(clock[1])
    return str(path)


@pytest.mark.parametrize("name, options, clock", [
    ("b-frames.mp4", {"bf": 3, "g": 40, "rate": 25}, "fps"),
    ("intra.mp4", {"g": 1, "rate": 25}, "fps"),
    ("varying.mkv", {"milliseconds": [340 + 40 * n + 360 * (n // 7) for n in range(60)]},
     "times.txt"), ("late.ts", {"rate": 25}, "times.txt")])  # of the last, time 0 is 1.4 s
def test_a_film_and_the_folder_of_its_frames_give_the_same(tmp_path, ffmpeg, name, options, clock):
    """The frames are those of ffmpeg, without loss, and so are the times. Tolerance: none."""
    path = write(tmp_path / name, 60, size=(128, 64), **options)
    frames = tmp_path / "frames"
    frames.mkdir()
    ffmpeg("-i", path, "-fps_mode", "passthrough", frames / "%06d.png")
    times = shown_by(ffmpeg, path)[0] + 1.4
    (frames / clock).write_text("25\n" if clock == "fps" else "".join(f"{t:.6f}\n" for t in times))
    cache = FrameCache(0)
    (starts, info), (again, also) = cache.index(path), cache.index(str(frames))
    assert np.array_equal(starts, again) and info == also
    looks = [lambda p, k=k: video.overview(p, k, cache=cache) for k in (1, 3, 8, 100)]
    looks += [lambda p, w=w: video.crop(p, *w, fps=7.3, max_frames=99, cache=cache, **NATIVE)
              for w in ((-1, 0.5), (0.7, 1.9), (1, 99))]
    looks += [lambda p: video.at(p, [0.1, 0.5, 1.2], cache=cache)]
    looks += [lambda p: video.overview(p, 4, snap=True, cache=cache)] * (name == "intra.mp4")
    for look in looks:
        one, other = look(path), look(str(frames))
        assert np.array_equal(one.seconds, other.seconds)
        assert np.array_equal(one.images, other.images)


@pytest.mark.parametrize("change, why", [
    (lambda p: (p / "fps").unlink(), "neither fps nor times.txt: add images .* either fps"),
    (lambda p: (p / "times.txt").write_text("1"), "this folder has fps and times.txt"),
    (lambda p: [f.unlink() for f in p.glob("*.png")], "this folder has no images"),
    (lambda p: (p / "fps").write_text("fast"), "fps: could not convert"),
    (lambda p: (p / "fps").write_text("0"), "fps must hold one number, above 0"),
    (lambda p: (p / "fps").write_text("nan"), "fps must hold one number"),
    (lambda p: (p / "fps").write_text("25 30"), "fps must hold one number"),
    (lambda p: (p / "fps").write_bytes(b"\xff\xfe2"), "fps: .*decode"),
    (lambda p: (p / "4.png").unlink(), "missing after 3.png; with fps"),
    (lambda p: (p / "4.png").rename(p / "04.jpg") and (p / "3.png").rename(p / "4.png"),
     "not named alike"), (lambda p: (p / "8.png").rename(p / "cover.png"), "1.png to cover.png"),
    (lambda p: (p / "8.png").rename(p / "b8.png"), "1.png to b8.png, are not named alike"),
    (lambda p: (p / "1.png").write_text("text"), "1.png: cannot identify"),
    (lambda p: (p / "1.png").write_bytes((p / "2.png").read_bytes()[:60]), "1.png: "),
    (lambda p: Image.new("1", (8193, 8193)).save(p / "1.png"), "1.png: 8193x8193 pixels are"),
    *[(lambda p, t=t: (p / "fps").unlink() or (p / "times.txt").write_text(t), why) for t, why in (
        ("1\n2\n", "times.txt has 2 times for 8 images"),
        ("1 2 3 4 5 6 6 7", "times.txt: time 7 is not later"),
        ("1 2 3 nan 5 6 7 8", "times.txt: time 4 is not later"), ("", "has 0 times"))],
    (lambda p: (p / "fps").unlink() or (p / "seconds.txt").write_text("-1 2 3 4 5 6 7 8"),
     "seconds.txt: time 1 is not later than the last, or below 0"),
])
def test_a_folder_that_is_no_video_says_so_in_one_line(tmp_path, change, why):
    path = folder_of(tmp_path / "film")
    change(tmp_path / "film")
    for cache in (FrameCache(0), FrameCache(0, timeout=60.0)):
        with pytest.raises(VideoError, match=why) as caught:
            video.overview(path, 4, cache=cache)
        cache.close()
        assert caught.value.path == path and "\n" not in str(caught.value)
