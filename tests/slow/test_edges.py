"""
Tests of inputs that no reader expects: python -m pytest tests/slow/test_edges.py -q

Each ends in one line and exit code 2, or is a counted outcome: no traceback, and nothing waits.
"""
import argparse

import pytest

import launch
from evaluation import benchmarks, folders
from plumbing import checkpoint, data, runs

DEEP = "[" * 100_000 + "]" * 100_000


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


