"""
Tests of --track, which sends the numbers of a run to a tracker: python -m pytest
tests/all/test_track.py -q

Against a stand-in for each package, and against the real packages where they are installed.
"""
import argparse
import importlib
import os
import subprocess
import sys

import pytest
from conftest import ROOT

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


# ------------------------------------------------------------------------------------------------
# The real packages

RUN = """
import argparse, sys
import launch
name, out = sys.argv[1:]
for start, steps in ((0, (1, 2)), (2, (3,))):
    log = metrics.Log(out, start, argparse.Namespace(track=name, project="mine", seed=3))
    for step in steps:
        log.write({"step": step, "acc": step / 8, "by_K": {"4": {"acc": 0.5}}, "val": None}, "")
    log.close(3, 3)
    assert not log.warned
if name == "trackio":
    from trackio.sqlite_storage import SQLiteStorage
    (run,) = SQLiteStorage.get_runs("mine")
    rows = SQLiteStorage.get_logs("mine", run)
    assert [(row["step"], row["acc"]) for row in rows] == [(1, 0.125), (2, 0.25), (3, 0.375)], rows
    assert rows[0]["by_K/4/acc"] == 0.5
"""


@pytest.mark.parametrize("name, files", [
    ("trackio", None), ("wandb", "wandb/offline-run-*/run-*.wandb"),
    ("swanlab", "swanlog/run-*/run-*.swanlab")])
def test_the_numbers_arrive_in_the_real_package(name, files, tmp_path):
    """Without an account or a network. A run that goes on is the same run."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    out = tmp_path / "run"
    out.mkdir()
    env = {**os.environ, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline",
           "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path),
           "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", RUN, name, str(out)], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if files:
        parts = sorted(out.glob(files))
        written = [part.read_bytes() for part in parts]
        assert len(parts) == 2 and len({part.name for part in parts}) == 1
        assert all(b"by_K/4/acc" in content for content in written)
