"""Rare files, and the cache of video.py: python -m pytest tests/slow/test_video.py -q"""
import base64
import functools
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from test_video import av, ffmpeg, images, long_gop, shown_by, write  # noqa: F401  # isort: skip

import video
from video import FrameCache


def assert_as_shown_by(ffmpeg, path, exact=True):
    """Every frame and every time, in one go and each of some alone. exact: else the conversion to
    RGB differs, of fields and of more than 8 bits: it is the frame that ffmpeg's is nearest to."""
    (times, pictures), (starts, info) = shown_by(ffmpeg, path), FrameCache(0).index(path)
    assert len(starts) == info.num_frames == len(times)
    sure = ~np.isnan(times)
    np.testing.assert_allclose(starts[sure], times[sure], atol=1.1e-3)  # some units are 1 ms
    assert (info.height, info.width) == pictures.shape[1:3]
    got = images(path, range(len(times))).astype(int)
    for i, image in enumerate(got):
        gaps = {j: np.abs(image - pictures[j]).mean()
                for j in ([i] if exact else range(max(0, i - 3), min(len(times), i + 4)))}
        assert gaps[i] < 0.5 if exact else min(gaps, key=gaps.get) == i, (i, gaps)
    for i in np.random.default_rng(0).choice(len(times), min(6, len(times)), replace=False):
        assert np.array_equal(images(path, [i])[0], got[i])


# ---- the right frames come out of real files


def patched(source, path, box, offset, layout, *values):
    """Copy of an mp4 with numbers overwritten `offset` bytes after the name of its box."""
    data = bytearray(Path(source).read_bytes())
    struct.pack_into(layout, data, data.index(box) + offset, *values)
    Path(path).write_bytes(data)
    return str(path)


def with_matrix(source, path, a, b, c, d):
    """Copy of an mp4 whose pixels x, y are displayed at a x + c y, b x + d y."""
    matrix = [round(value * 0x10000) for value in (a, b, 0, c, d, 0, 0, 0)]
    return patched(source, path, b"tkhd", 44, ">9i", *matrix, 0x40000000)


@pytest.mark.parametrize("matrix", [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0),
                                    (-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)])
def test_files_cropped_and_turned_are_displayed_as_ffmpeg_does(tmp_path, ffmpeg, matrix):
    """Cropped by six pixels on the left, which are no aligned address."""
    whole, cropped = write(tmp_path / "v.mp4", 4, size=(102, 64)), tmp_path / "cropped.mp4"
    ffmpeg("-i", whole, "-c", "copy", "-bsf:v", "h264_metadata=crop_left=6", cropped)
    assert_as_shown_by(ffmpeg, with_matrix(cropped, tmp_path / "turned.mp4", *matrix))


def h264(params):
    """With B-frames, which noise alone would not be worth; a key frame every 20."""
    return {"x264_params": "keyint=20:scenecut=0:b-adapt=0:bframes=3:" + params}


def hevc(params):
    return {"codec": "libx265", "x265_params": "keyint=20:scenecut=0:log-level=none:" + params}


GAPS = np.random.default_rng(5).integers(4, 900, 48)
VARYING = {"milliseconds": (3000 + np.cumsum(GAPS)).tolist(), **h264("")}
CODINGS = {
    "plain.mp4": h264(""), "transport.ts": h264(""),
    "pyramid.mp4": h264("b-pyramid=normal:bframes=8:ref=6"),
    "strict.mkv": h264("b-pyramid=strict:bframes=5"), "open.mp4": h264("open-gop=1"),
    "refresh.mp4": h264("intra-refresh=1"),  # no whole key frames: late seeks
    "fields.mp4": h264("tff=1:interlaced=1"), "ten.mp4": {"pixels": "yuv420p10le", **h264("")},
    "varying.mp4": VARYING, "varying.mkv": VARYING, "varying.ts": VARYING, "varying.flv": VARYING,
    "hevc.mp4": hevc("bframes=8"),  # open GOPs, with leading pictures
    "radl.mkv": hevc("no-open-gop=1:radl=2:bframes=3"),
    "layers.mp4": hevc("temporal-layers=3:bframes=7"),
    "vp8.webm": {"codec": "libvpx", "auto_alt_ref": 1, "lag_in_frames": 16, "g": 20},
    "vp9.webm": {"codec": "libvpx-vp9", "auto_alt_ref": 1, "lag_in_frames": 16, "g": 20,
                 "deadline": "realtime", "cpu_used": 8},
    "av1.mp4": {"codec": "libsvtav1", "preset": "10", "g": 20},
    "mpeg4.avi": {"codec": "mpeg4", "bf": 2, "g": 20}}


def written_once(folder, codings, ending, frames, **more):
    """-> function: name of a coding -> a film in it."""
    @functools.cache
    def path(name):
        if codings[name].get("codec", "libx264") not in av.codecs_available:
            pytest.skip("this PyAV cannot write it")
        return write(folder / (name + ending), frames, **more, **codings[name])

    return path


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    return written_once(tmp_path_factory.mktemp("coded"), CODINGS, "", 48, size=(128, 64))


@pytest.mark.parametrize("name", CODINGS)
def test_every_frame_is_that_of_ffmpeg(coded, ffmpeg, name):
    assert_as_shown_by(ffmpeg, coded(name), exact=name not in ("ten.mp4", "fields.mp4"))


HRD = "bitrate=400:vbv-maxrate=400:vbv-bufsize=400:nal-hrd=vbr:"  # with messages of timing


@pytest.mark.parametrize("params, keys", [("intra-refresh=1:keyint=48", 1), (HRD + "keyint=15", 6),
                                          (HRD + "intra-refresh=1:keyint=48", 1)])
@pytest.mark.parametrize("ending", ["ts", "mp4"])
def test_frames_that_renew_a_part_are_no_key_frames(tmp_path, ffmpeg, params, keys, ending):
    ffmpeg(*"-f lavfi -i testsrc2=s=128x96:r=15:d=6 -c:v libx264 -x264-params".split(),
           params + ":bframes=0", path := tmp_path / f"v.{ending}")
    assert_as_shown_by(ffmpeg, path)
    # MPEG-TS, and a film that renews its picture, are decoded in a row.
    in_a_row = ending == "ts" or keys == 1
    assert len(video.FrameCache(0).table(str(path)).keys) == (0 if in_a_row else keys)


# ---- files that were cut, joined and edited


FILMS = {  # none has a key frame every second
    "long": {"bf": 3},
    "open": {"x264_params": "keyint=48:open-gop=1:scenecut=0:b-adapt=0:bframes=3"},
    "plain": {"x264_params": "keyint=60:scenecut=0:bframes=0"},
    "hevc": {"codec": "libx265", "x265_params": "keyint=60:scenecut=0:log-level=none"},
    "mpeg4": {"codec": "mpeg4", "bf": 2, "g": 60},
    "av1": {"codec": "libsvtav1", "preset": "10", "g": 60},
    "vp9": {"codec": "libvpx-vp9", "g": 60, "deadline": "realtime", "cpu_used": 8}}


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    return written_once(tmp_path_factory.mktemp("films"), FILMS, ".mp4", 300)  # at 25 fps


CUTS = [(0.5, 6, "mp4"), (0, 3.3, "mp4"), (7.3, 2, "mov"), (11.5, 9, "mp4"), (4.77, 0.1, "mp4")]


@pytest.mark.parametrize("name", FILMS)
@pytest.mark.parametrize("start, length, ending", CUTS)
def test_a_clip_cut_without_decoding_is_that_of_ffmpeg(tmp_path, film, ffmpeg, name, start, length,
                                                       ending):
    """Its edit list hides what lies between the key frame before the cut and the cut."""
    clip = tmp_path / f"clip.{'mp4' if name in ('av1', 'vp9') else ending}"  # not in QuickTime's
    ffmpeg("-ss", start, "-i", film(name), "-t", length, "-c", "copy", clip)
    assert_as_shown_by(ffmpeg, clip)


def with_edits(source, path, *edits):
    """Copy of an mp4 with another edit list: (milliseconds, first second of the film or None)."""
    data = bytearray(Path(source).read_bytes())
    at = data.index(b"elst") - 4
    (old, begin), scale = struct.unpack_from(">I16xi", data, at), data.index(b"mdhd") + 16
    (scale,) = struct.unpack_from(">I", data, scale)  # ticks per second
    rows = [struct.pack(">IiI", length, -1 if first is None else begin + round(first * scale),
                        0x10000) for length, first in edits]
    box = struct.pack(">I4sII", 16 + 12 * len(rows), b"elst", 0, len(rows)) + b"".join(rows)
    data[at : at + old] = box
    for name in (b"edts", b"trak", b"moov"):  # the boxes around it
        size = data.rindex(name, 0, at) - 4
        struct.pack_into(">I", data, size, struct.unpack_from(">I", data, size)[0] + len(box) - old)
    Path(path).write_bytes(data)
    return str(path)


@pytest.mark.parametrize("edits", [
    [(3000, 5.3)], [(700, None), (3000, 5.3)], [(3000, 5.333)], [(2010, 0)],
    [(2000, 1.3), (4000, 6.3)], [(2000, 1.3), (500, None), (2000, 6.3)],
    [(3000, 6.3), (3000, 1.3)], [(2000, 4.3), (2000, 4.3)]])
def test_edit_lists_of_several_parts_are_read_as_by_ffmpeg(tmp_path, film, ffmpeg, edits):
    assert_as_shown_by(ffmpeg, with_edits(film("long"), tmp_path / "v.mp4", *edits))


XVID, DVD = "-c:v libxvid -bf 2 -g 50 xvid.avi", "-c:v mpeg2video -bf 2 -f vob dvd.vob"
AVI, H264 = "-c:v mpeg4 -bf 2 -g 50 old.avi", "-c:v libx264 -bf 3 -pix_fmt yuv420p h264.mp4"
LATE = "-force_key_frames expr:lt(n,12) -pix_fmt yuv420p v.h264 | -i v.h264 -c copy v.mp4"
FIELDS = "-c:v libx264 -flags +ildct+ilme -pix_fmt yuv420p"
COPIES = [  # ffmpeg's options for a test picture of 6 s | those for a copy of the file
    XVID, f"{XVID} | -i xvid.avi -c copy -bsf:v mpeg4_unpack_bframes v.avi",
    f"{H264} | -i h264.mp4 -c copy v.asf",
    DVD, f"{DVD} | -i dvd.vob -c copy v.mp4", f"{DVD} | -ss 2.5 -i dvd.vob -c copy v.mp4",
    f"{DVD} | -i dvd.vob -f lavfi -i sine=d=6 -c:v copy -c:a mp2 sound.vob"
    " | -ss 2.5 -i sound.vob -c copy v.mp4",
    AVI, f"{AVI} | -i old.avi -c copy v.mp4",
    f"{H264} | -i h264.mp4 -c copy v.avi | -i v.avi -c copy v.mp4",
    "-c:v libx264 -bf 3 -pix_fmt yuv420p v.h264 | -i v.h264 -c copy v.mp4",
    "-c:v libx265 -x265-params log-level=none v.h265 | -i v.h265 -c copy v.mp4",
    "-c:v libx264 -bf 0 -pix_fmt yuv420p new.mp4 | -i new.mp4 -c copy v.avi",
    # B-frames come late.
    LATE,
    "-c:v libx264 -bf 0 -pix_fmt yuv420p a.h264 | -i a.h264 -c:v libx264 -bf 3 b.h264"
    " | -i concat:a.h264|b.h264 -c copy v.mp4",
    f"{LATE} | -r 25 -i v.h264 -c copy v.mp4 | -i v.h264 h264.mp4 | -f concat -i l -c copy j.mp4",
    # Encoders other than x264 need not say that they reorder frames.
    "-c:v libx264 -g 48 -pix_fmt yuv420p v.h264 | no VUI | -r 25 -i v.h264 -c copy v.mp4",
    "-c:v rawvideo -pix_fmt pal8 v.avi", "-c:v mpeg4 -bf 2 -g 12 v.ts",
    # Half of the frames went, since the first ones do not say that later ones are reordered.
    f"-t 2 -bf 0 {FIELDS} v.mp4 | -i v.mp4 {FIELDS} h264.mp4 | -f concat -i l -c copy v.ts"]


@pytest.mark.parametrize("steps", COPIES)
def test_copies_that_lost_their_times_of_display_are_read_as_by_ffmpeg(tmp_path, ffmpeg, steps,
                                                                       monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l").write_text("file v.mp4\nfile h264.mp4")
    make, *copies = steps.split(" | ")
    for step in [f"-f lavfi -i testsrc2=s=160x96:r=25:d=6 {make}", *copies]:
        if step == "no VUI":
            raw = Path("v.h264").read_bytes()
            Path("v.h264").write_bytes(re.sub(rb"(?s)(\xd9\x42\x8d)\xb0.{,40}?(?=\0{3}\x01h)",
                                              b"\\1\x90", raw))
            continue
        ffmpeg(*step.split())
    path = tmp_path / steps.split()[-1]
    assert_as_shown_by(ffmpeg, path, FIELDS not in steps)
    whole = images(path, range(60))  # two groups of pictures and a part of the next
    for i in range(48, 58):
        assert np.array_equal(images(path, [i])[0], whole[i])


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9", "libsvtav1"])
def test_a_recorder_that_joins_a_call_before_the_next_key_frame(tmp_path, ffmpeg, codec):
    """In its sixth frame."""
    whole = write(tmp_path / "whole.mkv", 50, size=(128, 96), codec=codec, g=20)
    late = tmp_path / "v.mkv"
    ffmpeg("-i", whole, "-c", "copy", "-copyinkf", "-bsf:v", "noise=drop=lt(n\\,5)", late)
    assert_as_shown_by(ffmpeg, late)


# ---- parameter sets that change inside a film


CODERS = ("keyint=10:scenecut=0:bframes=0:cabac=0:ref=1",
          "keyint=10:scenecut=0:bframes=0:8x8dct=1:ref=3:qp=20")


def two_coders(ffmpeg, path, repeat):
    """Two recordings of 25 frames, joined as bytes. Their coders write parameter sets once, or with
    each key frame (repeat)."""
    joined, raw = b"", path.parent / "v.h264"
    for params in CODERS:
        ffmpeg(*"-f lavfi -i testsrc2=s=128x64:r=25:d=1 -pix_fmt yuv420p -c:v libx264".split(),
               "-x264-params", params, raw)
        head, mark, rest = raw.read_bytes().partition(b"\0\0\1\x06")  # behind the first sets
        if not repeat:
            rest = re.sub(rb"(?s)\0\0\0\x01[\x67\x68].*?(?=\0\0\0?\x01)", b"", rest)
        joined += head + mark + rest
    raw.write_bytes(joined)
    ffmpeg("-r", 25, "-i", raw, "-c", "copy", path)


def assert_looks_as_in_a_row(path, count):
    """Every frame in one go, and eleven alone, against PyAV from the first frame on."""
    with av.open(path) as container:
        row = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(row) == video.FrameCache(0).index(path)[1].num_frames == count
    assert all(np.array_equal(a, b) for a, b in zip(images(path, range(count)), row))
    for i in np.linspace(0, count - 1, 11).astype(int):
        assert np.array_equal(images(path, [i])[0], row[i]), i


# Six frames, a P- after a B-frame, each coded in two fields (by the reference encoder, JM).
FIELD_CODED = ("eNpjYGBgTE9h0FjzVFOBAcjO+NHI3A1mxCm4PjoAZtUpuEFYqR2tDOl/XPexiggbPAAJOM6SeGc8swHCNA"
               "qU/Nu+/cD2iasgfKvbPfd90kBsxnmBKS6Kdxsg7MgnMLbjrBAPt3qQpmM2WVCRmFOP7eHaitMQ2qqfIbSV+"
               "kC0vSs7tgIiUnsOrA0ASSdESA==")


@pytest.mark.parametrize("ending", ["mp4", "mkv", "ts"])
def test_a_packet_for_each_field_with_a_time_of_its_own(tmp_path, ffmpeg, ending):
    """As mkvmerge writes it, and broadcasts: the times of second fields show no frame."""
    (raw := tmp_path / "v.h264").write_bytes(zlib.decompress(base64.b64decode(FIELD_CODED)))
    units = raw.read_bytes().split(b"\0\0\0\1")[5:]  # behind the parameter sets
    path = str(tmp_path / f"v.{ending}")
    with av.open(raw) as source, av.open(path, "w") as container:
        copy = container.add_stream_from_template(source.streams.video[0])
        for n, unit in enumerate(units):
            packet = av.Packet(copy.codec_context.extradata * (not n) + b"\0\0\0\1" + unit)
            packet.pts, packet.dts = 4 + 2 * [0, 2, 1, 4, 3, 5][n // 2] + n % 2, n
            packet.stream, packet.is_keyframe, packet.time_base = copy, not n, Fraction(1, 50)
            container.mux(packet)
    assert_as_shown_by(ffmpeg, path)


@pytest.mark.parametrize("ending, repeat", [  # ffmpeg writes no MPEG-TS without repeats
    ("mp4", False), ("mkv", False), ("mp4", True), ("mkv", True), ("ts", True)])
def test_parameter_sets_that_change_inside_a_film(tmp_path, ffmpeg, ending, repeat):
    path = tmp_path / f"v.{ending}"
    two_coders(ffmpeg, path, repeat)
    assert_looks_as_in_a_row(str(path), 50)
    assert len(FrameCache().table(str(path)).keys) == 0  # decoded in a row


# ---- cache


def test_decoded_once_by_eight_threads(long_gop, opened):
    cache, gate = FrameCache(), threading.Barrier(8)
    with ThreadPoolExecutor(8, initializer=gate.wait) as pool:
        looks = [pool.submit(video.overview, long_gop, 32, cache=cache) for _ in range(8)]
    first, *others = [look.result() for look in looks]
    assert all(frames is first for frames in others) and len(opened) == 2


# ---- rarer files


@pytest.mark.parametrize("name, first, kinds", [
    ("cover.mp4", "blue:size=320x240", "attached_pic default"),  # a picture, larger than the film
    ("small.ts", "red:size=48x32", "0 0"), ("small.mp4", "red:size=48x32", "default default"),
    ("chosen.mkv", "red:size=64x32", "default 0"), ("second.mkv", "red:size=320x240", "0 default"),
    ("equal.mkv", "red:size=96x64", "default default")])
def test_of_several_video_streams_ffmpegs_is_read(tmp_path, ffmpeg, name, first, kinds):
    """Without -map it takes the one with the most pixels, where the default one has a bonus."""
    codec, seconds = ("mjpeg", 0.1) if "attached" in kinds else ("libx264", 2)
    path, (one, two) = tmp_path / name, kinds.split()
    ffmpeg("-f", "lavfi", "-i", f"color={first}:rate=10:duration={seconds}", "-f", "lavfi", "-i",
           "testsrc2=size=96x64:rate=10:duration=2", "-map", 0, "-map", 1, "-pix_fmt", "yuv420p",
           "-c:v:0", codec, "-c:v:1", "libx264", "-disposition:v:0", one, "-disposition:v:1", two,
           path)
    shown = ffmpeg("-i", path, "-frames:v", 1, "-f", "rawvideo", "-pix_fmt", "rgb24", "-").stdout
    info, (image,) = video.FrameCache(0).index(path)[1], images(path, [0]).astype(int)
    assert info.num_frames == 20 and image.size == len(shown)
    assert np.abs(image - np.frombuffer(shown, np.uint8).reshape(image.shape)).mean() < 3


@pytest.mark.parametrize("codec, pixels", [("mjpeg", "yuvj420p"), ("libx264", "yuv420p")])
def test_an_avi_whose_index_lacks_frames_is_read_as_in_a_row(tmp_path, codec, pixels):
    """In a row its times count the frames, after a seek the entries of the index."""
    path = Path(write(tmp_path / "v.avi", 60, codec=codec, pixels=pixels, g=5, bf=0))
    head, index = path.read_bytes().split(b"idx1")
    index = index[4:324] + index[484:]  # of 16 bytes a frame, after the length
    path.write_bytes(b"RIFF" + struct.pack("<I", len(head + index)) + head[8:] + b"idx1"
                     + struct.pack("<I", len(index)) + index)
    assert_looks_as_in_a_row(path, 60)


@pytest.mark.parametrize("length", [12, 4])
def test_sound_that_goes_on_lengthens_the_film(tmp_path, ffmpeg, length):
    path = tmp_path / "s.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=size=96x64:rate=10:duration=4", "-f", "lavfi", "-i",
           f"sine=d={length}", "-pix_fmt", "yuv420p", path)
    assert video.FrameCache(0).index(path)[1].duration == pytest.approx(length, abs=0.15)


def test_a_transport_stream_whose_clock_jumps_is_refused(tmp_path, ffmpeg, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, offset in (("a.ts", 0), ("b.ts", 3600)):
        ffmpeg(*f"-f lavfi -i testsrc2=s=96x64:d=2 -output_ts_offset {offset} {name}".split())
    for parts in (("a.ts", "b.ts"), ("b.ts", "a.ts")):
        with pytest.raises(video.VideoError, match="clock jumps"):
            Path("v.ts").write_bytes(b"".join(Path(part).read_bytes() for part in parts))
            video.FrameCache(0).index("v.ts")


@pytest.mark.parametrize("name, coder", [
    ("v.mov", "qtrle -vf format=argb,colorchannelmixer=aa=0.5"), ("v.gif", "gif"),
    ("v.png", "apng -f apng -vf format=rgba,colorchannelmixer=aa=0.3")])
def test_transparent_parts_are_white(tmp_path, ffmpeg, name, coder):
    path = tmp_path / name
    ffmpeg(*"-f lavfi -i testsrc2=s=96x64:r=5:d=1 -c:v".split(), *coder.split(), path)
    rgba = ffmpeg("-i", path, "-f", "rawvideo", "-pix_fmt", "rgba", "-").stdout
    rgba = np.frombuffer(rgba, np.uint8).reshape(5, 64, 96, 4) / 255
    on_white = rgba[..., :3] * rgba[..., 3:] + 1 - rgba[..., 3:]
    assert np.abs(images(path, range(5)) - 255 * on_white).max() < 2


def test_a_clock_that_begins_below_zero_lengthens_no_film(tmp_path, ffmpeg):
    """A clip of MPEG-TS that ends just before its clock of 33 bits begins anew."""
    path, late = tmp_path / "late.ts", ("-itsoffset", 95435, "-f", "lavfi", "-i")
    ffmpeg(*late, "testsrc2=size=96x64:rate=10:duration=2", *late, "sine=d=2", "-c:v", "libx264",
           "-pix_fmt", "yuv420p", "-c:a", "mp2", path)
    assert video.FrameCache(0).index(path)[1].duration == pytest.approx(2, abs=0.15)
