"""
Tests of launch.py: python -m pytest tests/test_launch.py -q
"""
import os
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from plumbing import data

# ------------------------------------------------------------------------------------------------
# How a script begins and ends


@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, "interrupted"),
    (launch.UserError("--lr\x1b[2J"), 2, "--lr\ufffd[2J, sample t7"),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device, sample t7"),
    (OSError(30, "Read-only", "s.json"), 1, "[Errno 30] Read-only: 's.json', sample t7")])
def test_one_line_instead_of_a_traceback(start, error, code, said):
    def main():
        with launch.naming("t7"):
            raise error

    assert start(SimpleNamespace(__name__="a", main=main)) == (code, "", f"a.py: {said}\n")


@pytest.mark.parametrize("words", [
    ["--steps", "0"], ["--lr", "-1"], ["--lr", "nan"], ["--step", "4"], ["--lr", "inf"]])
def test_a_bad_argument_is_one_line(start, words):
    def main():
        parser = launch.parser("what it does")
        parser.add_argument("--steps", type=launch.positive, default=4)
        parser.add_argument("--lr", type=launch.amount, default=1e-5)
        parser.parse_args(words)

    code, _, err = start(SimpleNamespace(__name__="a", main=main))
    assert code == 2 and err.count("\n") == 1 and words[0] in err and "--help" in err


# ------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("content, wanted", [
    (b'{"id": 1}\n\n{oops\n', ":3: not JSON"), (b'{"id": 1}\n{"x": 2}\n', ":2: missing 'id'"),
    (b"[1]\n", ":1: missing 'id'"), (b"\xff\xfe", ": 'utf-8' codec can't decode byte 0xff"),
    (b"id,video\n1,a.mp4\n", ":1: not JSON (Expecting value: line 1 column 1 (char 0)); tools/con"),
    (b"\n", ": no rows"), (b'\n{"id": 1}\n\n{"id": 0}\n', ":4: a zero"),
    (None, ": [Errno 2] No such file")])
def test_a_bad_jsonl_is_named_with_its_line(tmp_path, content, wanted):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(launch.UserError) as e:
        launch.read_jsonl(path, ("id",), lambda row: None if row["id"] else "a zero")
    assert str(e.value).startswith(f"{path}{wanted}")


# ------------------------------------------------------------------------------------------------
# Order of the data


@given(rows=st.integers(1, 20), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_epoch_covers_every_row_once(rows, batch, seed):
    """Batches that straddle two epochs included."""
    stream = [i for s in range(2 * rows + 1) for i in launch.batch_indices(s, batch, rows, seed)]
    for epoch in range(len(stream) // rows):
        assert sorted(stream[epoch * rows:(epoch + 1) * rows]) == list(range(rows))


def test_the_order_is_a_function_of_step_and_seed_alone():
    """A resumed run and another rank are other processes, with other hash seeds."""
    assert launch.batch_indices(9, 6, 40, 3) == [21, 12, 22, 3, 19, 28]
    assert launch.batch_indices(0, 6, 40, 3) != launch.batch_indices(0, 6, 40, 4)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(1, 100), max_size=30), world=st.integers(1, 5))
def test_ranks_share_a_batch_without_loss_and_about_evenly(costs, world):
    indices = [100 + i for i in range(len(costs))]
    parts = [data.balance_over_ranks(indices, lambda i: costs[i - 100], rank,
                                     world) for rank in range(world)]
    assert sorted(i for part in parts for i in part) == indices
    loads = [sum(costs[i - 100] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_ranks_share_the_cores_that_they_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert launch.cores() == 2


def test_the_name_of_a_small_file_is_on_the_disk_before_its_writer_goes_on(tmp_path, monkeypatch):
    """First the bytes, then the folder that holds the name."""
    real, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(
        os.path.isdir(f"/dev/fd/{handle}")) or real(handle))
    launch.write_atomic(str(tmp_path / "a"), "x")
    assert synced == [False, True] and (tmp_path / "a").read_text() == "x"
