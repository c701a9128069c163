"""
Tests of folders of frames: python -m pytest tests/slow/test_frame_folders.py -q
"""
import numpy as np
import pytest
from fixtures import SHORT
from PIL import Image
from test_video import NATIVE, ffmpeg, shown_by, write  # noqa: F401

import video
from video import FrameCache


@pytest.mark.parametrize("name, options, clock", [
    ("b-frames.mp4", {"bf": 3, "g": 40, "rate": 25}, "fps"),
    ("intra.mp4", {"g": 1, "rate": 25}, "fps"),
    ("varying.mkv", {"milliseconds": [340 + 40 * n + 360 * (n // 7) for n in range(60)]},
     "times.txt"), ("late.ts", {"rate": 25}, "times.txt")])  # of the last, time 0 is 1.4 s
def test_a_film_and_the_folder_of_its_frames_give_the_same(tmp_path, ffmpeg, name, options, clock):
    """The frames are those of ffmpeg, without loss, and so are the times. Tolerance: none."""
    path, frames = write(tmp_path / name, 60, size=(128, 64), **options), tmp_path / "frames"
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
    looks += [lambda p: video.frames_at(p, [0.1, 0.5, 1.2], cache=cache)]
    looks += [lambda p: video.overview(p, 4, snap=True, cache=cache)] * (name == "intra.mp4")
    for look in looks:
        one, other = look(path), look(str(frames))
        assert np.array_equal(one.seconds, other.seconds)
        assert np.array_equal(one.images, other.images)


def test_an_image_that_is_away_for_a_moment_moves_no_other(tmp_path):
    for n in range(8):
        Image.new("RGB", (32, 32), (30 * n,) * 3).save(tmp_path / f"{n}.png")
    (tmp_path / "fps").write_text("1")
    cache = FrameCache(2**20)
    cache.index(str(tmp_path))
    (tmp_path / "3.png").rename(tmp_path / "away")
    with pytest.raises(video.VideoError, match="images came or went"):
        video.frames_at(str(tmp_path), [1, 5], cache=cache)
    (tmp_path / "away").rename(tmp_path / "3.png")
    assert [*video.frames_at(str(tmp_path), [1, 5], cache=cache).images[:, 0, 0, 0]] == [30, 150]
    (tmp_path / "8.png").symlink_to(SHORT)
    with pytest.raises(video.VideoError, match="the machine: 8.png"):
        video.frames_at(str(tmp_path), [8])
