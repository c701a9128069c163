"""
Tests of toy.py: python -m pytest tests/test_toy.py -q

Everything else is tested on this world, so it must be the same everywhere, and be what its files
say it is.
"""
import hashlib
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import TOY
from fixtures import rows_of

import rewards
import rollout
import toy as toy_world
import video
from agent_tools import TOOLS


def digests(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------------
# The same bytes from the same seed


@pytest.mark.process
def test_one_seed_gives_one_world_to_the_byte(toy_as_made, tmp_path):
    """Videos and weights too: a number measured on one machine can then be checked on another. The
    second one is started apart, so that its strings hash differently."""
    script = os.path.join(os.path.dirname(toy_world.__file__), "toy.py")
    subprocess.run([sys.executable, script, "--out", str(tmp_path), *map(str, TOY)], check=True,
                   env={**os.environ, "PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "1"})
    a, b = digests(toy_as_made), digests(tmp_path)
    # 2 + 12 + 24 + 6 + 4 videos, 5 JSONL files
    assert a == b and len(a) == 48 + 5 + len(list((toy_as_made / "init").iterdir()))


# ------------------------------------------------------------------------------------------------
# Videos and tasks


BORDERS = {"red", "green", "blue", "white"}


def nearest(patch):
    """Name of the colour of pixels, None for grey."""
    names = {**toy_world.COLOURS, None: (128, 128, 128)}
    mean = patch.reshape(-1, 3).astype(float).mean(0)
    return min(names, key=lambda name: np.abs(mean - names[name]).sum())


def seconds_of(film, root):
    """Frames of a film -> [(second, colour of the border, colour inside or None)]."""
    frames = video.load({"video": film, "frames": 64}, str(root))
    return [(int(t), nearest(image[:2]), nearest(image[13:19, 13:19]))
            for t, image in zip(frames.seconds, frames.images)]


def scenes_in(seconds):
    """[(start, end, border, [(second, flash)])]: a scene ends where the border changes."""
    found = []
    for t, border, inside in seconds:
        if not found or found[-1][2] != border:
            found.append([t, t, border, []])
        found[-1][1] = t + 1
        found[-1][3] += [(t, inside)] * (inside is not None)
    return found


def test_the_answer_and_the_evidence_of_a_task_are_in_its_frames(toy):
    """Worked out from the decoded film alone: four scenes with a border, one flash of two seconds
    in each, in colours that no border has."""
    asked_twice = set()
    for name in ("rl.jsonl", "eval.jsonl"):
        for task in rows_of(toy / name):
            scenes = scenes_in(seconds_of(task["video"], toy))
            assert len(scenes) == 4 and scenes[-1][1] == 64
            border = re.fullmatch(r"Which colours flash while the .* (\w+)\?", task["question"])[1]
            hits = [s for s in scenes if s[2] == border]
            assert task["evidence"] == [[a, b] for a, b, *_ in hits] and 1 <= len(hits) <= 2
            assert task["answer"] == ", ".join(flash[0][1] for *_, flash in hits)
            for a, b, edge, flash in scenes:
                (first, colour), (second, again) = flash
                assert second == first + 1 and colour == again and a < first and second < b - 1
                assert colour not in BORDERS and edge in BORDERS and 8 <= b - a <= 24
            asked_twice.add(len(hits))
    assert asked_twice == {1, 2}


# ------------------------------------------------------------------------------------------------
# The SFT mixture


def test_a_wrong_chat_looks_at_other_scenes_than_those_asked_about():
    draw = random.Random(0)
    task = toy_world.make_task("v", *toy_world.make_scenes(draw))
    for share in (0.0, 1.0):
        looks = re.findall(r"look (\d+) to (\d+)", str(toy_world.sample_chats(task, draw, share)))
        asked = [[int(a), int(b)] in task["evidence"] for a, b in looks]
        assert (not share) == any(asked) and asked


def test_the_data_speaks_the_protocol(toy):
    """Its calls parse and name the windows that the thought marks; its turns earn the whole format
    reward."""
    flashes, seen = "|".join(set(toy_world.COLOURS) - BORDERS), set()
    for row in rows_of(toy / "sft.jsonl"):
        (kind,) = re.fullmatch(r"\w+-\d{4}-(direct|call|plain|sub)-\d+", row["id"]).groups()
        texts = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        if kind == "sub":
            start = re.search(r"Window: (\d+)", row["messages"][1]["content"][1]["text"])[1]
            assert texts[0] == rollout.EMPTY_SUMMARY or all(
                re.fullmatch(f"{start} ({flashes})", part) for part in texts[0].split(", "))
            continue
        assert ("tools" in row) == ("crop_video" in str(row["messages"][0])) == (kind != "plain")
        assert all(text.startswith("<think>\n") for text in texts)
        turns = [text.removeprefix("<think>\n") for text in texts]
        parsed = rewards.parse_tool_calls(turns[0], TOOLS, think_open=True)
        calls = [(call.arguments["start"], call.arguments["end"]) for call in parsed]
        records = [{"turn": 0, "parseable": True} for _ in calls]
        assert rewards.format_reward(turns, records)[0] == 1.0
        told = turns[0].partition("I saw ")[2].split(".")[0]
        marked = [(int(a), int(b)) for a, b in re.findall(r"look (\d+) to (\d+)", told)]
        assert calls == (marked if kind == "call" else [])
        summaries = {m["content"] for m in row["messages"] if m["role"] == "tool"}
        seen |= summaries
        for text in summaries - {rollout.EMPTY_SUMMARY}:
            assert re.sub(r"\d+ ", "", text) in texts[-1].partition("<answer>")[2]
    assert len(seen) > 5  # and not EMPTY_SUMMARY alone
