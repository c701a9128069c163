"""
Tests of bench/speed.py: python -m pytest tests/all/test_speed.py -q
"""
import importlib.util

import numpy as np
import pytest

import video
from bench import speed


def test_a_ratio_is_that_of_medians_and_the_first_round_only_warms_up(monkeypatch, capsys):
    clock, order = [0.0], []
    seconds = {"ours": iter([90.0, 1.0, 2.0, 30.0]), "TRL": iter([50.0, 6.0, 5.0, 7.0])}
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def run(side):
        order.append(side)
        clock[0] += next(seconds[side])

    found = speed.alternate({side: lambda side=side: run(side) for side in seconds}, 3)
    assert found == {"ours": 2.0, "TRL": 6.0}
    assert order == ["TRL", "ours", "ours", "TRL"] * 2  # each is first as often as the other
    speed.print_ratios("update", found)
    assert capsys.readouterr().out.split() == "update TRL 3.00 6.000 s, ours 2.000 s".split()


def test_prompts_are_compared_and_a_missing_peer_is_named(toy, start, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in
                        ("trl", "qwen_vl_utils", "decord") else there(name, *more))
    code, out, err = start(speed, "--ckpt", toy / "init", "--prompt", 30, "--response", 6,
                           "--group", 2, "--rounds", 1)
    head, *lines = out.splitlines()
    assert code == 0 and head.endswith("a ratio above 1: ours is faster"), err
    assert [line.partition(" is not installed (")[2].split(",")[0] for line in lines] == [
        "pip install qwen-vl-utils", "pip install decord", "", "pip install trl"]
    assert lines[2].split()[:2] == ["shared", "repeated"] and float(lines[2].split()[2]) > 0
    code, _, err = start(speed, "--only", "video", "shared")
    assert code == 2 and "--ckpt" in err


def test_decord_reads_the_frames_that_we_chose(toy):
    pytest.importorskip("decord", reason="decord is not installed")
    path = str(next((toy / "videos").iterdir()))
    frames = video.overview(path, 16)
    (theirs,) = speed.by_decord(path, [frames])
    assert theirs.shape == frames.images.shape
    assert np.abs(theirs.astype(float) - frames.images).mean() < 3  # of 255: other conversions
