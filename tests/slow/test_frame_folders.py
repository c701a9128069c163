"""
More of folders of frames: python -m pytest tests/slow/test_frame_folders.py -q
"""

import numpy as np
import pytest
from PIL import Image, ImageOps
from test_frame_folders import (
    ffmpeg,  # noqa: F401
    )
from test_video import NATIVE

import video


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


