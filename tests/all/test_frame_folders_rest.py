"""
More of folders of frames: python -m pytest tests/all/test_frame_folders_rest.py -q
"""
import os

import numpy as np
import pytest
from PIL import Image, ImageOps
from scripted import AGENT
from test_frame_folders import (
    ffmpeg,  # noqa: F401
    folder_of,
)
from test_video import NATIVE, paint, seen

import rollout
import video
from evaluation import benchmarks
from tools import ask
from video import FrameCache, VideoError


def test_a_damaged_image_costs_only_looks_that_hold_it(tmp_path):
    path = folder_of(tmp_path / "film", 8)
    whole = (tmp_path / "film" / "6.png").read_bytes()
    (tmp_path / "film" / "6.png").write_bytes(whole[: len(whole) * 2 // 3])
    assert video.crop(path, 0, 5).seconds.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(VideoError, match=r"film: 6.png: "):
        video.crop(path, 5, 8)
    source = rollout.Source(str(tmp_path), FrameCache())
    with pytest.raises(VideoError, match="6.png"):  # a counted outcome, see run_episode
        source.load({"video": "film", "frames": 8})


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


def test_images_of_another_size_are_scaled_to_the_first(tmp_path):
    folder_of(tmp_path / "film", 4)
    Image.fromarray(paint(2, 128, 96)).save(tmp_path / "film" / "3.png")
    frames = video.overview(str(tmp_path / "film"), 4, **NATIVE)
    assert frames.images.shape == (4, 32, 64, 3) and seen(frames.images) == [0, 1, 2, 3]


def test_an_image_that_is_replaced_makes_another_video(tmp_path):
    path, kept = folder_of(tmp_path / "film", 4), str(tmp_path / "kept")
    cache = FrameCache(timeout=60.0, folder=kept)
    first = video.overview(path, 4, cache=cache, **NATIVE)
    assert seen(first.images) == [0, 1, 2, 3]
    assert video.overview(path, 4, cache=cache, **NATIVE) is first
    before = os.stat(tmp_path / "film" / "2.png")
    Image.fromarray(paint(9, 64, 32)).save(tmp_path / "film" / "2.png")
    os.utime(tmp_path / "film" / "2.png", ns=(0, before.st_mtime_ns + 1))
    video._folders.clear()  # what some seconds would do
    other = video.overview(path, 4, cache=cache, **NATIVE)
    assert seen(other.images) == [0, 9, 2, 3] and not {*first.frame_keys} & {*other.frame_keys}
    (tmp_path / "film" / "fps").write_text("2")
    video._folders.clear()
    assert video.overview(path, 4, cache=cache, **NATIVE).seconds.tolist() == [0, 0.5, 1, 1.5]
    cache.close()
    # Another process finds the frames on disk: no image is opened.
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(video, "_picture")
        again = video.overview(path, 4, cache=FrameCache(folder=kept), **NATIVE)
    assert seen(again.images) == [0, 9, 2, 3]
    os.unlink(tmp_path / "film" / "4.png")
    video._folders.clear()
    assert video.probe(path, cache).num_frames == 3


def test_several_decoders_and_windows_decoded_together_give_the_same(tmp_path):
    path = folder_of(tmp_path / "film", 40)
    plain = video.overview(path, 40, **NATIVE)
    cache = FrameCache(timeout=60.0, workers=2)
    shared = video.overview(path, 40, cache=cache, **NATIVE)
    assert np.array_equal(plain.images, shared.images) and shared.key == plain.key
    specs = [{"video": "film", "start": 3, "end": end} for end in (6, 9)]
    assert [seen(video.load(s, str(tmp_path), cache, **NATIVE).images) for s in specs] == [
        [3, 4, 5], [3, 4, 5, 6, 7, 8]]
    cache.close()


def test_whoever_takes_a_video_takes_a_folder(toy, codec, tmp_path, monkeypatch, capsys):
    root = tmp_path / "data"
    folder_of(root / "videos" / "film", 8)
    task = {"id": "q", "video": "videos/film", "question": "Which?", "options": None,
            "answer": "red", "type": "open"}
    source = rollout.Source(str(root), FrameCache())
    assert rollout.preflight(codec, [task], AGENT, source, 4) == []
    assert "1 videos" in capsys.readouterr().out
    rollout.check_context(codec, [task], AGENT, source, 4)
    # A benchmark names a file; its owner ships the frames.
    assert benchmarks.locate(str(root), ("videos", ""), "film.mp4") == "videos/film"
    assert benchmarks.locate(str(root), ("videos", ""), "film") == "videos/film"
    assert benchmarks.locate(str(root), ("videos",), "film.srt") is None
    benchmarks.check_videos("b", [task], str(root))
    monkeypatch.setattr("sys.argv", ["tools/ask.py", "--ckpt", "c", "--video",
                                     str(root / "videos" / "film") + "/"])
    args = ask.parse_args()
    _, source = rollout.agent_settings(args, args.video)
    film = ask.film_task(args)["video"]
    assert seen(source.load({"video": film, "frames": 2}).images) == [2, 6]
