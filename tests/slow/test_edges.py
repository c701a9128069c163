"""
Tests of inputs that no reader expects: python -m pytest tests/slow/test_edges.py -q

Each ends in one line and exit code 2, or is a counted outcome: no traceback, and nothing waits.
"""
import argparse
import os

import pytest
from conftest import run_script

import launch
from evaluation import benchmarks, folders
from plumbing import checkpoint, data, runs

DEEP = "[" * 100_000 + "]" * 100_000


def one_line(done):
    """The line on stderr that a refused run ends with."""
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("script", ["rollout", "eval", "grpo"])
def test_a_context_beyond_the_positions_of_the_checkpoint_is_refused(toy, tmp_path, script):
    """The paper's --context on the toy's checkpoint: --preset toy was forgotten. vLLM would say so
    in 35 lines, after it has loaded."""
    data = {"rollout": "eval", "eval": "eval", "grpo": "rl"}[script]
    flags = ("--ckpt", toy / "init", "--data", toy / f"{data}.jsonl",
             "--out", tmp_path / "out.jsonl")
    said = one_line(run_script(f"{script}.py", *flags, timeout=100))
    assert "--context 32768" in said and "4096 positions" in said and "--preset toy" in said


@pytest.mark.parametrize("text", [DEEP, "[" * 100_000, '{"a":' * 100_000],
                         ids=["deep", "open", "objects"])
def test_json_that_is_nested_too_deep_is_refused_by_every_reader(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": ' + text + "}\n")
    with pytest.raises(launch.UserError, match=r"rows.jsonl:2: not JSON \(nested too deep"):
        launch.read_jsonl(str(path), ("id",))
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(launch.UserError, match="rows.json: "):
        benchmarks.read_rows(str(tmp_path / "rows.json"))
    with pytest.raises(ValueError, match="unreadable subtitles"):
        data.read_subtitles(str(tmp_path / "rows.json"))
    for name in ("config.json", "summary.json", "args.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(launch.UserError):
        checkpoint.resolve_checkpoint(str(tmp_path))
    with pytest.raises(launch.UserError, match="summary.json"):
        folders.read_summary(str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "records.rank0.jsonl").write_text(text + "\n")
    with pytest.raises(launch.UserError, match="records.rank0.jsonl:1: not JSON"):
        folders.read_records(str(tmp_path))
    with pytest.raises(launch.UserError, match="args.json"):
        flags = argparse.Namespace(out=str(tmp_path))
        folders.rescore([str(tmp_path)], flags)
    step = tmp_path / "run" / "step_000001"
    step.mkdir(parents=True)
    (step / "state.json").write_text(text)
    assert runs.newest_checkpoint(str(tmp_path / "run")) is None


def test_a_subtitle_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "words.srt")
    with pytest.raises(ValueError, match="words.srt: unreadable subtitles"):
        data.read_subtitles(str(tmp_path / "words.srt"))


