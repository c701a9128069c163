"""
Tests of folders of frames, which are videos too: python -m pytest tests/test_frame_folders.py -q
"""
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageOps
from test_video import NATIVE, shown_by, write

import video
from video import FrameCache


@pytest.fixture(scope="module")
def ffmpeg():
    package = pytest.importorskip("imageio_ffmpeg")

    def run(*arguments):
        command = [package.get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-nostats", "-y"]
        return subprocess.run([*command, *map(str, arguments)], capture_output=True, check=True)

    return run


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


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"])
@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_every_kind_of_image_becomes_upright_rgb(tmp_path, ffmpeg, mode, ending):
    """As ffmpeg decodes an image, to 3 of 255 for JPEG and 1 for 16 bits, else to the bit; turned
    as its EXIF says. PIL alone would cut off 16 bits of grey at 255."""
    y, x = np.mgrid[0:64, 0:96]
    drawn = np.stack([x * 2, y * 3, 255 - x - y], -1).astype(np.uint8)
    image = Image.fromarray(drawn).convert("RGB" if mode == "I;16" else mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(drawn[..., 0]))
    if mode == "I;16":
        image = Image.fromarray((y * 600 + x * 250).astype(np.uint16))
    exif, folder = Image.Exif(), tmp_path / "film"
    exif[0x0112] = 6  # the camera was turned: show it clockwise by 90 degrees
    folder.mkdir()
    (folder / "fps").write_text("1")
    more = {"lossless": True} if ending == "webp" else {"quality": 95, "subsampling": 0}
    try:
        image.save(tmp_path / f"plain.{ending}", **more)
        image.save(folder / f"1.{ending}", **more, exif=exif)
    except (OSError, ValueError):
        pytest.skip(f"{ending} does not hold {mode}")
    done = ffmpeg("-i", tmp_path / f"plain.{ending}", "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    theirs = np.rot90(np.frombuffer(done.stdout, np.uint8).reshape(64, 96, 3), -1)
    (mine,) = video.overview(str(folder), 1, **NATIVE).images
    assert mine.shape == (96, 64, 3) and mine.dtype == np.uint8
    most = 3 if ending == "jpg" else mode == "I;16"
    assert np.abs(mine.astype(int) - theirs).max() <= most
    with Image.open(folder / f"1.{ending}") as same:
        if mode != "I;16":
            assert np.array_equal(mine, np.asarray(ImageOps.exif_transpose(same).convert("RGB")))
