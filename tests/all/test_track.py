"""
Tests of --track, which sends the numbers of a run to a tracker: python -m pytest
tests/all/test_track.py -q

Against a stand-in for each package, and against the real packages where they are installed.
"""
import argparse
import importlib
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import launch
from plumbing import metrics
from plumbing import tracker as tracker_py

TRACKERS = ["trackio", "wandb", "swanlab"]
ROW = {"acc": 0.25, "n": 3, "val": None, "why": "text", "by_K": {"4": {"acc": 0.5, "tau": None}}}
SENT = {"acc": 0.25, "n": 3, "by_K/4/acc": 0.5}
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


def test_the_numbers_of_the_log_are_sent_and_a_run_goes_on(tracker, tmp_path):
    out = tmp_path / "some run"
    tracker_py.check_tracker(flags(tracker.__name__))
    log(out, 0, 1, 2, name=tracker.__name__)
    log(out, 2, 3, name=tracker.__name__)
    (_, first), (_, second) = tracker.calls[0], tracker.calls[4]
    assert tracker.calls == [("init", first), (1, SENT), (2, SENT), "finish",
                             ("init", second), (3, SENT), "finish"]
    assert first == second and first["project"] == "mine" and first["resume"] == "allow"
    assert first["config"]["seed"] == 3 and first["name"].startswith("some run-")
    assert ("id" in first) == (tracker.__name__ != "trackio")
    log(out, 0, 1, name=tracker.__name__)  # begun anew in the same folder: another run
    (_, third) = tracker.calls[7]
    for key in {"name", "id"} & set(first):
        assert third[key] != first[key]
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, **ROW}]


def test_a_tracker_that_fails_stops_no_run_and_is_told_of_once(tracker, tmp_path, capsys):
    tracker.broken |= {"log", "finish"}
    log(tmp_path / "run", 0, 1, 2, 3, name=tracker.__name__)
    said = capsys.readouterr()
    assert said.err.startswith("--track: OSError: no network; the run goes on")
    assert said.err.count("\n") == 1 and said.out.count("line of step") == 3
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_refuses_ends_the_run_before_its_first_step(tracker, tmp_path, capsys):
    tracker.broken.add("init")
    with pytest.raises(SystemExit) as ended:
        launch.run_main(lambda: log(tmp_path / "run", 0, 1, name=tracker.__name__))
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and not said.out
    assert f"--track {tracker.__name__}: RuntimeError: no login: log in first" in said.err


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_package_is_one_line(name, folder, tmp_path, monkeypatch):
    """A folder of its runs, which has the same name, is not the package."""
    if folder:
        (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(launch.UserError, match=f"--track {name}: the package is not installed: pip "
                       f"install {name}"):
        tracker_py.check_tracker(flags(name))
    tracker_py.check_tracker(flags(None))


def test_without_the_flag_nothing_is_sent_or_written(tmp_path):
    assert log(tmp_path / "run", 0, 1, name=None).tracker is None
    assert os.listdir(tmp_path / "run") == ["log.jsonl"]


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
