"""
Tests of folders of frames: python -m pytest tests/slow/test_frame_folders.py -q
"""
import numpy as np
import pytest
from PIL import Image
from test_video import NATIVE, ffmpeg, shown_by, write  # noqa: F401

import video
from video import FrameCache


@pytest.mark.parametrize("name, options, clock", [
    ("b-frames.mp4", {"bf": 3, "g": 40, "rate": 25}, "fps"),
    ("intra.mp4", {"g": 1, "rate": 25}, "fps"),
    ("varying.mkv", {"milliseconds": [340 + 40 * n + 360 * (n // 7) for n in range(60)]},
     "times.txt"), ("late.ts", {"rate": 25}, "times.txt")])
def test_a_film_and_the_folder_of_its_frames_give_the_same(tmp_path, ffmpeg, name, options, clock):
    """The frames are those of ffmpeg, without loss, and so are the times. Tolerance: none."""
    path, frames = write(tmp_path / name, 60, size=(128, 64), **options), tmp_path / "frames"
    frames.mkdir()
    ffmpeg("-i", path, "-fps_mode", "passthrough", frames / "%06d.png")
    times = shown_by(ffmpeg, path)[0]
    (frames / clock).write_text("25\n" if clock == "fps" else "".join(f"{t:.6f}\n" for t in times))
    cache = FrameCache(0)
    (starts, info), (again, also) = cache.index(path), cache.index(str(frames))
    assert np.array_equal(starts, again) and info == also
    looks = [lambda p, k=k: video.overview(p, k, cache=cache) for k in (1, 3, 8, 100)]
    looks += [lambda p, w=w: video.crop(p, *w, fps=7.3, max_frames=99, cache=cache, **NATIVE)
              for w in ((-1, 0.5), (0.7, 1.9), (1, 99))]
    looks += [lambda p: video.load({"video": p, "times": [0.1, 0.5, 1.2]}, cache=cache)]
    for look in looks:
        one, other = look(path), look(str(frames))
        assert np.array_equal(one.seconds, other.seconds)
        assert np.array_equal(one.images, other.images)


def test_transparent_parts_are_white(tmp_path):
    """As vLLM and Qwen's reader show them, not in the colour below (black)."""
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[16:48, 16:48] = (200, 30, 30, 255)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    Image.fromarray(pixels).convert("LA").save(tmp_path / "2.png")
    (tmp_path / "times.txt").write_text("5\n7.5\n")
    frames = video.overview(str(tmp_path), 2, max_pixels=64 * 64)
    assert frames.seconds.tolist() == [5, 7.5]
    assert frames.images[:, 2, 2].tolist() == [[255] * 3] * 2
    assert frames.images[0, 32, 32].tolist() == [200, 30, 30]


def test_an_image_that_goes_is_no_broken_image(tmp_path):
    for n in range(8):
        Image.new("RGB", (32, 32), (30 * n,) * 3).save(tmp_path / f"{n}.png")
    (tmp_path / "fps").write_text("1")
    (tmp_path / "3.png").write_bytes(b"no image")
    with pytest.raises(video.VideoError, match="3.png: "):
        video.load({"video": str(tmp_path), "times": [3]})
    (tmp_path / "3.png").unlink()
    (tmp_path / "3.png").symlink_to(tmp_path / "not-there.png")
    pytest.raises(FileNotFoundError, video.load, {"video": str(tmp_path), "times": [3]})
