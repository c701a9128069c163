"""
Tests of what models and data sets may write: python -m pytest tests/slow/test_hostile.py -q

Ten thousand completions, mutated from real ones, through whole episodes; files that try to be more
than text.
"""
import copy
import json
import math
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import CALL, Scripted
from test_video import write

import chat
import rollout
import video
from evaluation import results, systems
from plumbing import data as data_py

REAL = ["I need a closer look.\n</think>\n" + CALL, "I saw it.\n</think>\n<answer>red</answer>",
        "Two parts.\n</think>\n" + CALL + "\n" + CALL.replace("8,", "24,").replace("16", "32"),
        "<think>\nhm\n</think>\nIt is red.\n<answer>red, blue</answer>", "</think>B", "",
        "ok</think><tool_code>\ncrop_video(start_time=1, end_time=\"0:09\")\n</tool_code>"]
PIECES = ['"name": "crop_video", "name": "rm"', "video_path=/etc/passwd, ", "<|im_start|>system\n",
          "<tool_call><tool_call>", "</answer></answer>", '"arguments": "{}"', "</tool_response>",
          "<|vision_start|>", "crop_video(1, 2)", "<answer><answer>", "../../etc/passwd", "<think>",
          "<tool_response>", "<|image_pad|>", "</tool_call>", "</tool_code>", "<tool_call>", "null",
          "<tool_code>", "<|im_end|>", '{"a":' * 40, "</answer>", "</think>", "<answer>", "[" * 200,
          "Infinity", "\x1b[31m", "9" * 400, CALL * 3, "-1e309", "\u202e", "\ufeff", "\ud7ff", CALL,
          "\n" * 5, "1e309", "é" * 9, "\x00", "NaN", "１６", "\\", "٣", "🙂", "<", ">"]


def mutated(rng):
    """A completion made from a real one by up to eight cuts, copies, insertions and swaps."""
    text = rng.choice(REAL)
    for _ in range(rng.randrange(9)):
        (a, b), kind = sorted(rng.randrange(len(text) + 1) for _ in range(2)), rng.randrange(4)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:b] + text[a:b] * rng.randrange(1, 4) + text[b:]
        elif kind == 2:
            text = text[:a] + rng.choice(PIECES) + text[a:]
        else:
            text = text[:a] + rng.choice(PIECES) + text[b:]
    return text[:20_000]


def talker(say):
    """An endpoint that says whatever `say` draws; no ids."""
    engine = Scripted(None, lambda request: say(), lambda request: say(), at_once=True)
    engine.max_seqs = 32
    return engine


def check(episode, agent):
    """Calls and responses pair up, nothing outside the video was looked at, the reward lies within
    its bounds, the record is JSON."""
    assert episode.status == "ok", episode.error
    assert len(episode.turns) <= agent.max_turns + 1
    roles, answered = [m["role"] for m in episode.context.messages], len(episode.turns) - 1
    assert roles.count("tool") == sum(c["turn"] < answered for c in episode.calls)
    for n in range(answered):
        executed = sum(c["status"] == "ok" for c in episode.calls if c["turn"] == n)
        assert executed <= agent.max_parallel
    for c in episode.calls:
        if c["status"] == "ok":
            assert 0 <= c["start"] < c["end"] <= 64.0
    r = episode.reward
    assert 0 <= r["acc"] <= 1 and 0 <= r["fmt"] <= 1 and 0 <= r["tool"] <= 0.8
    assert math.isclose(r["total"], r["acc"] + r["fmt"] + r["tool"])
    # a response that the model wrote by itself is no executed call
    assert r["tool"] < 0.3 or episode.executed() > 0
    json.dumps(episode.to_dict(), allow_nan=False)


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_completions_break_nothing(seed, toy, source):
    """2,500 completions a seed, three kinds of task, with and without the forced thought."""
    tasks = [{**data_py.read_tasks(str(toy / "rl.jsonl"))[0], **more} for more in (
        {"id": "open"}, {"id": "mcq", "type": "mcq", "options": ["red", "blue"],
                         "answer": "A"}, {"id": "span", "type": "grounding", "answer": [8, 16]})]
    rng, said = random.Random(seed), Counter()

    def say():
        said["texts"] += 1
        return mutated(rng)

    agent, step = rollout.AgentConfig(max_turns=2, think_prefix=seed % 2 == 0), 0
    while said["texts"] < 2500:
        sampler = rollout.RolloutWorker(talker(say), None, source, replace(agent, seed=step))
        for episode in systems.run(sampler, tasks, systems.all_systems()["paravt"], 4, group=40):
            check(episode, agent)
            said[min(len(episode.calls), 3)] += 1
            record = results.grade_record({"status": "ok", "turns": episode.turns,
                                    "think_open": episode.think_open, "task": episode.task},
                                          systems.all_systems()["paravt"])
            assert 0 <= record["score"] <= 1
        step += 1
    assert min(said[n] for n in (0, 1, 2, 3)) > 20  # all kinds of episodes were met


# ------------------------------------------------------------------------------------------------
# Videos


def damaged(folder, rng):
    """(name, bytes) of hundreds of damaged files: cut, flipped, with other headers, holes, and
    lying sizes and counts; of twelve formats."""
    bases = {name: Path(write(folder / name, 50, **options)).read_bytes() for name, options in {
        "front.mp4": {"g": 10, "mux": {"movflags": "faststart"}}, "444.mp4": {"pixels": "yuv444p"},
        "pieces.mp4": {"g": 10, "mux": {"movflags": "frag_keyframe+empty_moov"}}, "a.ts": {"g": 10},
        "gray.mkv": {"codec": "ffv1", "pixels": "gray"}, "ten.mp4": {"pixels": "yuv420p10le"},
        "a.mkv": {"g": 10}, "a.webm": {"codec": "libvpx"}, "a.avi": {"codec": "mpeg4"},
        "a.flv": {"g": 10}, "a.mov": {"codec": "mpeg4"}, "back.mp4": {"g": 10},
        "vfr.mp4": {"milliseconds": [i * 40 + i % 7 * 5 for i in range(50)]}}.items()}
    for name, data in bases.items():
        n = len(data)
        for part in (0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
            yield f"cut {part} {name}", data[: max(1, int(n * part))]
        for count, upto in ((1, n), (10, n), (100, n), (1000, n), (1, 600), (5, 600), (20, 600),
                            (60, 2000)):
            flipped = bytearray(data)
            for _ in range(count):
                flipped[rng.randrange(min(upto, n))] ^= 1 << rng.randrange(8)
            yield f"{count} bits of the first {upto} {name}", bytes(flipped)
        yield f"head of {name}", bases["a.mkv" if name != "a.mkv" else "back.mp4"][:64] + data[64:]
        yield f"no head {name}", bytes(64) + data[64:]
        yield f"tail {name}", data + rng.randbytes(5000)
        yield f"twice {name}", data + data
        yield f"hole {name}", data[: n // 3] + bytes(n // 3) + data[n // 3 * 2:]
        for box in (b"moov", b"mdat", b"stsz", b"stts", b"stco", b"avc1", b"mp4v", b"tkhd", b"mdhd",
                    b"stsc", b"elst", b"avcC"):
            at = data.find(box)
            if at < 4:
                continue
            for place, value in ((at - 4, b"\xff" * 4), (at - 4, bytes(4)),  # the size of the box
                                 (at + 8, b"\x00\xff\xff\xff" * 2), (at + 16, b"\xff" * 12)):
                yield (f"{box.decode()} {place - at} {value[:2].hex()} {name}",
                       data[:place] + value + data[place + len(value):])


def test_hundreds_of_damaged_videos_give_frames_or_a_video_error(tmp_path):
    outcomes = Counter()
    for name, data in damaged(tmp_path, random.Random(0)):
        path = tmp_path / f"damaged{os.path.splitext(name)[1]}"
        path.write_bytes(data)
        try:
            frames = video.overview(path, 8)
            assert frames.images.shape[1] % 32 == 0 and 0 <= frames.seconds[0], name
            assert (frames.seconds[1:] > frames.seconds[:-1]).all(), name
            video.crop(path, 0.0, 0.6)
            outcomes["frames"] += 1
        except video.VideoError:
            outcomes["error"] += 1
        except Exception as error:
            error.add_note(name)
            raise
    assert sum(outcomes.values()) >= 300 and min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("name, text", [
    ("a.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\n{secret}\n#EXT-X-ENDLIST\n"),
    ("a.mp4", "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\n{secret}\n#EXT-X-ENDLIST\n"),
    ("a.ffconcat", "ffconcat version 1.0\nfile '{secret}'\n"),
    ("a.txt", "the password is red\n" * 9), ("a.ans", "\x1b[31mthe password is red\n" * 9)])
def test_files_that_name_others_or_are_text_are_no_videos(tmp_path, name, text):
    """A playlist inside the video folder could show what lies outside it, and a text becomes frames
    that show it."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / name).write_text(text.format(secret=write(tmp_path / "secret.ts", 50)))
    with pytest.raises(video.VideoError, match="Invalid"):
        video.load({"video": name, "frames": 4}, str(tmp_path / "root"))


# ------------------------------------------------------------------------------------------------
# Data


def test_special_tokens_of_any_spelling_stay_text_in_a_question(toy, codec, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "ckpt")
    (tokenizer := copy.deepcopy(codec.tokenizer)).add_special_tokens({"sep_token": "[SEP]"})
    tokenizer.save_pretrained(folder)
    ours = chat.load_codec(str(folder))
    ids = chat.encode(ours, chat.escape_special_tokens(ours, "before [SEP] after"))
    assert chat.decode(ours, ids) == "before [SEP] after"
    assert tokenizer.convert_tokens_to_ids("[SEP]") not in ids
