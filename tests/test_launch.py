"""
Tests of launch.py: python -m pytest tests/test_launch.py -q
"""
import argparse
import faulthandler
import os
import pty
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
import metrics

# ------------------------------------------------------------------------------------------------
# How a script begins and ends


@pytest.mark.parametrize("terminal, rank, wanted", [
    (True, "0", "sft.py: loading torch"), (True, "1", ""), (False, "0", "")])
def test_a_terminal_is_told_what_it_waits_for(tmp_path, terminal, rank, wanted):
    """Before the seconds that torch takes: here it never arrives."""
    (tmp_path / "torch.py").write_text("import os\nos._exit(0)\n")
    ours, theirs = pty.openpty() if terminal else os.pipe()
    subprocess.run([sys.executable, "sft.py"], cwd=ROOT, check=True, stderr=theirs,
                   env={**os.environ, "PYTHONPATH": str(tmp_path), "LOCAL_RANK": rank})
    os.write(theirs, b".")
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as said:
        assert said.read(100).decode().strip("\r\n.") == wanted


def test_the_rank_that_meets_a_bad_chat_says_so(monkeypatch, capsys):
    """A fault seen by all ranks is said once; one that only rank 1 meets must not end the run in
    silence."""
    monkeypatch.setenv("RANK", "1")
    for error, said in ((launch.UserError("all see it"), ""),
                        (launch.RankError("chat x has 9 tokens"), "chat x has 9 tokens")):
        def main(error=error):
            raise error

        with pytest.raises(SystemExit) as end:
            launch.run_main(main)
        assert end.value.code == 2 and said in (printed := capsys.readouterr().err)
        assert bool(printed) == bool(said)


@pytest.mark.parametrize("variable, setting", [
    (None, "expandable_segments:True"), ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
    ("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")])
def test_the_allocator_is_set_before_its_first_use(variable, setting):
    """By torch's own account, also if torch was imported before. A user's setting wins."""
    script = ("import torch, launch; launch.start_process_group();"
              "print(torch._C._accelerator_getAllocatorSettings())")
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env.update({variable: setting} if variable else {})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT,
                          env=env, check=True)
    assert done.stdout.strip() == setting


def test_a_second_signal_ends_the_process_at_once():
    script = ("import model, checkpoint, launch, os, signal, time\nlaunch.stop_on_sigterm()\n"
              "os.kill(os.getpid(), 15)\nprint('alive', flush=True)\n"
              "os.kill(os.getpid(), 15)\nprint('not here')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGTERM and done.stdout == "alive\n"


def test_a_collective_waits_a_minute_longer_than_a_phase_and_patience_zero_for_both(monkeypatch):
    phases, collectives = [], []
    monkeypatch.setattr(faulthandler, "dump_traceback_later",
                        lambda seconds, **_: phases.append(seconds))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group",
                        lambda backend, timeout: collectives.append(timeout.total_seconds()))
    monkeypatch.setenv("RANK", "0")
    for patience in (7, 0):
        launch.start_process_group(patience)
        launch.beat(patience)
    assert phases == [7] and collectives == [67, 30 * 86400]


# ------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("content, wanted", [
    (b'{"id": 1}\n\n{oops\n', ":3: not JSON"), (b'{"id": 1}\n{"x": 2}\n', ":2: missing 'id'"),
    (b"[1]\n", ":1: missing 'id'"), (b"\xff\xfe", ": not UTF-8"), (b"\n", ": no rows"),
    (b'\n{"id": 1}\n\n{"id": 0}\n', ":4: a zero"), (None, ": No such file")])
def test_a_bad_jsonl_is_named_with_its_line(tmp_path, content, wanted):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(launch.UserError) as e:
        launch.read_jsonl(path, ("id",), lambda row: None if row["id"] else "a zero")
    assert str(e.value).startswith(f"{path}{wanted}")


def test_a_good_jsonl_is_read_with_odd_line_separators_inside_strings(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": "a\u2028b"}\r\n\n{"id": 2}', encoding="utf-8")
    assert launch.read_jsonl(str(path), required=("id",)) == [{"id": "a\u2028b"}, {"id": 2}]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1}\n{"id": "\ufeff"}\n', encoding="utf-8-sig")
    assert launch.read_jsonl(str(path)) == [{"id": 1}, {"id": "\ufeff"}]


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(launch.UserError, match="output folder"):
        launch.make_out(str(tmp_path / "file" / "out"))
    launch.make_out(str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "args.json"
    launch.write_atomic(str(path), "old")
    with pytest.raises(TypeError):
        launch.write_atomic(str(path), b"not text")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["args.json"]


def test_the_log_holds_no_step_twice_and_no_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1}\nnot json\n'
                    '{"step": 3}\n{"step": 4, "lo')
    log = metrics.Log(str(tmp_path), 2, argparse.Namespace(track=None))
    log.write({"step": 3, "again": True}, "a line")
    log.close(3, 3)
    assert path.read_text() == ('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1}\n'
                                '{"step": 3, "again": true}\n')


# ------------------------------------------------------------------------------------------------
# Order of the data


@given(rows=st.integers(1, 20), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_epoch_covers_every_row_once(rows, batch, seed):
    """Batches that straddle two epochs included."""
    stream = [i for step in range(2 * rows + 1)
              for i in launch.batch_indices(step, batch, rows, seed)]
    for epoch in range(len(stream) // rows):
        assert sorted(stream[epoch * rows:(epoch + 1) * rows]) == list(range(rows))


def test_the_order_is_a_function_of_step_and_seed_alone():
    """A resumed run and another rank are other processes, with other hash seeds."""
    code = "import launch; print([launch.batch_indices(s, 6, 40, 3) for s in (9, 0, 5)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                           env={**os.environ, "PYTHONHASHSEED": "77"})
    assert other.stdout.strip() == str([launch.batch_indices(s, 6, 40, 3)
                                        for s in (9, 0, 5)]), other.stderr
    assert launch.batch_indices(0, 6, 40, 3) != launch.batch_indices(0, 6, 40, 4)
    # epochs are shuffled anew
    assert launch.batch_indices(0, 40, 40, 3) != launch.batch_indices(1, 40, 40, 3)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(1, 100), max_size=30), world=st.integers(1, 5))
def test_ranks_share_a_batch_without_loss_and_about_evenly(costs, world):
    indices = [100 + i for i in range(len(costs))]
    parts = [launch.deal(indices, lambda i: costs[i - 100], rank, world) for rank in range(world)]
    assert sorted(i for part in parts for i in part) == indices
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    loads = [sum(costs[i - 100] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)
