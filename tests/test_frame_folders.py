"""
Tests of folders of frames, which are videos too: python -m pytest tests/test_frame_folders.py -q
"""
import os
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageOps
from scripted import AGENT
from test_video import NATIVE, paint, seen, shown_by, write

import rollout
import video
from evaluation import benchmarks
from tools import ask
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


def test_numbers_order_the_images_and_either_clock_times_them(tmp_path):
    path = folder_of(tmp_path / "a", 12, ("fps", " 0.5\n"), "shot2_{}.png")
    assert video.probe(path) == video.VideoInfo(24.0, 12, 0.5, 64, 32)
    frames = video.overview(path, 12, **NATIVE)
    assert seen(frames.images) == list(range(12)) and frames.seconds.tolist() == [*range(0, 24, 2)]
    # The first time is 0, and the last image lasts as long as the median one: 2 s of 1, 2, 2, 5.
    path = folder_of(tmp_path / "b", 5, ("times.txt", "\ufeff10\n11\n13\n15\n20\n\n"), "{:04}.WebP")
    assert video.probe(path).duration == 12
    assert video.crop(path, 3, 12, num_frames=9).seconds.tolist() == [3, 5, 10]
    (tmp_path / "b" / "Thumbs.db").write_text("not an image")
    (tmp_path / "b" / "._0001.webp").write_text("not an image, but hidden")
    assert video.probe(path).num_frames == 5
    # With times, numbers may have gaps.
    (tmp_path / "b" / "0003.WebP").rename(tmp_path / "b" / "0033.WebP")
    assert seen(video.overview(path, 99, **NATIVE).images) == [0, 1, 3, 4, 2]
    assert video.probe(folder_of(tmp_path / "c", 1, ("times.txt", "7"))).duration == 1  # a still


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
])
def test_a_folder_that_is_no_video_says_so_in_one_line(tmp_path, change, why):
    path = folder_of(tmp_path / "film")
    change(tmp_path / "film")
    for cache in (FrameCache(0), FrameCache(0, timeout=60.0)):
        with pytest.raises(VideoError, match=why) as caught:
            video.overview(path, 4, cache=cache)
        cache.close()
        assert caught.value.path == path and "\n" not in str(caught.value)


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
