"""
Tests of inputs that no reader expects: python -m pytest tests/all/test_edges.py -q

Each ends in one line and exit code 2, or is a counted outcome: no traceback, and nothing waits.
"""
import argparse
import json
import os

import pytest
from conftest import run_script

import launch
import rewards
from evaluation import benchmarks, endpoint, results
from plumbing import checkpoint, metrics, runs, subtitles
from tools import replay

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
        subtitles.read_subtitles(str(tmp_path / "rows.json"))
    for name in ("config.json", "summary.json", "args.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(launch.UserError):
        checkpoint.resolve_checkpoint(str(tmp_path))
    with pytest.raises(launch.UserError, match="summary.json"):
        results.read_summary(str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "records.rank0.jsonl").write_text(text + "\n")
    with pytest.raises(launch.UserError, match="records.rank0.jsonl:1: not JSON"):
        results.read_records(str(tmp_path))
    with pytest.raises(launch.UserError, match="args.json"):
        flags = argparse.Namespace(out=str(tmp_path))
        results.rescore([str(tmp_path)], flags)
    step = tmp_path / "run" / "step_000001"
    step.mkdir(parents=True)
    (step / "state.json").write_text(text)
    assert runs.newest_checkpoint(str(tmp_path / "run")) is None


@pytest.mark.parametrize("body", [DEEP, '{"name": "crop_video", "arguments": ' + DEEP + "}",
                                  json.dumps({"name": "crop_video", "arguments": DEEP})],
                         ids=["whole", "arguments", "quoted"])
def test_a_call_that_is_nested_too_deep_is_a_bad_call(body):
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}",
                 f"<tool_call>{body[:1500]}</tool_call>"):
        assert all(call.error for call in rewards.parse_tool_calls(text, False))


def test_one_invalid_byte_or_odd_line_in_the_log_loses_that_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss\xff": 1}\n{"step": "two"}\n[[\n'
                     + DEEP.encode() + b'\n{"step": 3}\n')
    assert [row["step"] for row in metrics.whole_rows(str(path))] == [1, 2, 3]
    metrics.Log(str(tmp_path), 2, argparse.Namespace(track=None)).close(2, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_subtitle_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "words.srt")
    with pytest.raises(ValueError, match="words.srt: unreadable subtitles"):
        subtitles.read_subtitles(str(tmp_path / "words.srt"))


@pytest.fixture(scope="module")
def recorded(toy, tmp_path_factory):
    """Rows of a rollout JSONL of two episodes."""
    path = tmp_path_factory.mktemp("recorded") / "r.jsonl"
    done = run_script("rollout.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "rl.jsonl", "--frames", 4, "--group", 2, "--limit", 1, "--out", path,
                      reference=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("wrong", [
    5, "x", [5], [{}], [[1]], {"spec": 1}, "more", "height", "text height", "no video", "seconds",
    [], None], ids=str)
def test_a_wrong_vision_field_of_rollouts_is_refused(toy, tmp_path, monkeypatch, recorded, wrong):
    (item,) = recorded[1]["vision"]
    said = {"more": {**item, "extra": 1}, "height": {**item, "height": item["height"] * 2},
            "text height": {**item, "height": "64"}, "no video": {**item, "spec": {"frames": 4}},
            "seconds": {**item, "seconds": item["seconds"][1:]}}
    rows = [recorded[0], {**recorded[1], "vision":
                          [said[wrong]] if isinstance(wrong, str) and wrong in said else wrong}]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.argv", ["replay.py", "--preset", "toy", "--ckpt", str(toy / "init"),
                                     "--rollouts", str(path), "--video-root", str(toy),
                                     "--out", str(tmp_path / "out")])
    with pytest.raises(launch.UserError, match="vision"):
        replay.main()
    launch.end_process_group()


def test_cores_are_counted_without_an_affinity(monkeypatch, process_group):
    """macOS has no os.sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    counts = []
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch.start_process_group()
    for given in ("2", ""):  # a user's number counts, and OpenMP has taken it
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        launch.start_process_group()
    assert counts == [3, 3]


@pytest.mark.parametrize("line", [b"\xff", b"5", b"{}", b'{"task": {"id": 1}}', b"[[", b"null"])
def test_a_line_that_is_no_record_and_no_verdict_is_named(tmp_path, line):
    (tmp_path / "records.rank0.jsonl").write_bytes(line + b"\n")
    with pytest.raises(launch.UserError, match="records.rank0.jsonl:1: not JSON, or no record"):
        results.read_records(str(tmp_path))
    (tmp_path / "judge.jsonl").write_bytes(line + b"\n")
    judge = argparse.Namespace(judge_url=None, judge_model="m")
    endpoint.judge([], str(tmp_path / "judge.jsonl"), judge)  # asked again, as after a kill
