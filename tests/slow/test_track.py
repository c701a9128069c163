"""
Tests of --track, which sends the numbers of a run to a tracker: python -m pytest
tests/slow/test_track.py -q

Against a stand-in for each package, and against the real packages where they are installed.
"""
import argparse
import importlib
import sys

import pytest

from plumbing import metrics

TRACKERS = ["trackio", "wandb", "swanlab"]
ROW = {"acc": 0.25, "n": 3, "val": None, "why": "text", "by_K": {"4": {"acc": 0.5, "tau": None}}}
STAND_IN = """
calls, broken = [], set()
def init(**given):
    calls.append(("init", given))
    given["config"]["added"] = 1  # as trackio does
    if "init" in broken:
        raise RuntimeError("no login:\\n  log in first")
def log(numbers, step):
    if "log" in broken:
        raise OSError("no network")
    calls.append((step, numbers))
def finish():
    calls.append("finish")
    if "finish" in broken:
        raise SystemError
"""


@pytest.fixture(params=TRACKERS)
def tracker(request, tmp_path, monkeypatch):
    """A module of this name that writes down its calls."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / f"{request.param}.py").write_text(STAND_IN)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param)


def flags(name, **more):
    return argparse.Namespace(track=name, project="mine", seed=3, **more)


def log(out, start, *steps, name):
    out.mkdir(exist_ok=True)
    args = flags(name)
    numbers = metrics.Log(str(out), start, args)
    for step in steps:
        numbers.write({"step": step, **ROW}, f"line of step {step}")
    numbers.close(steps[-1], steps[-1])
    assert not hasattr(args, "added")  # the settings of the run stay its own
    return numbers


def test_a_tracker_that_fails_stops_no_run_and_is_told_of_once(tracker, tmp_path, capsys):
    tracker.broken |= {"log", "finish"}
    log(tmp_path / "run", 0, 1, 2, 3, name=tracker.__name__)
    said = capsys.readouterr()
    assert said.err.startswith("--track: OSError: no network; the run goes on")
    assert said.err.count("\n") == 1 and said.out.count("line of step") == 3
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3
