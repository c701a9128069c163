"""
Tests of plumbing/runs.py: python -m pytest tests/test_runs.py -q

Folders of a run with files of a few bytes. Kills between two operations: slow/test_survival.py.
"""
import argparse
import json
import os
import shutil
from pathlib import Path

import pytest
from fixtures import SHORT

import launch
from plumbing import metrics, runs


def saved_at(out, name, weights="w" * 10, **state):
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    content = {"step": int(name[5:11]), **state, "files": {"model.safetensors": 10}}
    content["own_crc32"] = runs.state_crc32(content)
    (folder / "state.json").write_text(json.dumps(content))
    return folder


def test_an_atomic_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "ckpt"
    with pytest.raises(RuntimeError), runs.atomic_folder(str(target)) as temp:
        Path(temp, "half").write_text("x")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    for text in ("old", "new"):
        with runs.atomic_folder(str(target)) as temp:
            # the old one stands until the new one is whole
            assert not target.exists() or os.listdir(target) == ["old"]
            Path(temp, text).write_text("x")
    assert os.listdir(tmp_path) == ["ckpt"] and os.listdir(target) == ["new"]


def test_pruning_spares_two_the_best_and_what_last_and_best_point_to(tmp_path):
    for n in range(1, 7):
        saved_at(tmp_path, f"step_{n:06d}", best_step=1)
    runs.replace_link(str(tmp_path / "best"), str(tmp_path / "step_000002"))
    runs.replace_link(str(tmp_path / "last"), str(tmp_path / "step_000005"))
    for newest, left in ((7, "123456"), (5, "12456")):  # 6 is newer, so it is damaged
        runs.prune_checkpoints(str(tmp_path / f"step_{newest:06d}"))
        assert [n[-1] for n in sorted(os.listdir(tmp_path)) if n.startswith("step")] == [*left]


def test_a_state_with_another_byte_is_noticed(tmp_path, capsys):
    first, second = [saved_at(tmp_path, f"step_00000{n}", best_step=1) for n in (1, 2)]
    assert runs.undamaged_checkpoint(str(tmp_path))[0] == str(second)
    text = (second / "state.json").read_text()
    (second / "state.json").write_text(text.replace('"best_step": 1', '"best_step": 2'))
    assert runs.undamaged_checkpoint(str(tmp_path))[0] == str(first)
    assert "step_000002: state.json gone or changed" in capsys.readouterr().out
    (first / "model.safetensors").write_text("short")  # a copy that is not finished
    assert runs.undamaged_checkpoint(str(tmp_path)) == (None, {})
    assert "step_000001: file gone or changed" in capsys.readouterr().out


def test_files_count_by_content_and_by_name_but_not_by_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("ax", "by", "cx", "in/ax"):
        (tmp_path / name).write_text(name[-1])
    named = [runs.digest_of([(tmp_path, name)]) for name in ("ax", "by", "cx")]
    pytest.raises(FileNotFoundError, runs.digest_of, [(tmp_path, "gone")])
    assert len({*named}) == 3 and named[0] == runs.digest_of([(tmp_path / "in", "ax")])


def test_ranks_that_have_read_other_rows_or_checkpoints_are_refused(monkeypatch, tmp_path):
    """A file may be replaced after one rank has read it: the rows count, and not their name."""
    read = {"--data": ("a.jsonl", [{"id": 1}]), "--val": (None, [])}
    own = runs.input_identities({}, read)
    other = {"--data": [own["--data"][0], "elsewhere"]}  # of a second rank on this machine
    monkeypatch.setattr(launch, "gather_rows", lambda rows: [*rows, other])
    assert runs.input_identities({}, read) == own and own["--val"][1] == "none"
    with pytest.raises(launch.UserError, match="^--data: another rank"):
        runs.input_identities({}, {"--data": ("a.jsonl", [{"id": 2}])})
    monkeypatch.setenv("LOCAL_RANK", "1")  # on the same machine: `last` may have moved
    other["--ckpt"] = ["of its files", "run/step_000002"]
    with pytest.raises(launch.UserError, match="^--ckpt: another rank"):
        runs.input_identities({"--ckpt": str(tmp_path)}, read)


def test_three_bad_steps_in_a_row_end_a_run_and_a_blind_last_one(tmp_path):
    runs.check_run(9, 2, str(tmp_path), True, False)
    runs.check_run(9, 2, str(tmp_path), False, True)
    for bad, blind, last in ((3, False, False), (3, True, False), (1, True, True)):
        with pytest.raises(launch.RunError, match=f"10: {'vid' if blind else 'no fin'}.*{bad}"):
            runs.check_run(9, bad, str(tmp_path), blind, last)


@pytest.mark.parametrize("damage", [
    lambda f: (f / "model.safetensors").write_text("w" * 9),
    lambda f: (f / "model.safetensors").unlink(), lambda f: (f / "state.json").unlink(),
    lambda f: (f / "state.json").write_text('{"step": 2, "fil'),
    lambda f: (f / "state.json").write_text("[]"), lambda f: (f / "state.json").write_text("")])
def test_a_torn_checkpoint_is_passed_over(tmp_path, damage):
    first, second = saved_at(tmp_path, "step_000001"), saved_at(tmp_path, "step_000002")
    assert runs.newest_checkpoint(str(tmp_path)) == str(second)
    damage(second)
    assert not runs.is_complete(str(second)) and runs.newest_checkpoint(str(tmp_path)) == str(first)
    damage(first)
    assert runs.newest_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize("name, fault", [("model.safetensors", "model.safetensors"),
                                         ("state.json", "state.json"), ("state.json", SHORT)])
def test_a_fault_of_the_disk_does_not_go_on_from_an_older_checkpoint(tmp_path, name, fault):
    _, second = saved_at(tmp_path, "step_000001"), saved_at(tmp_path, "step_000002")
    (second / name).unlink()
    (second / name).symlink_to(fault)  # reading fails, or ends before the file
    with pytest.raises(OSError):
        runs.undamaged_checkpoint(str(tmp_path))


def test_what_killed_runs_left_half_written_is_dropped(tmp_path):
    saved_at(tmp_path, "step_000003")
    (tmp_path / ".step_000004.abc").mkdir()
    (tmp_path / "rollouts").mkdir()
    for name in ("args.json.tmp123", "rollouts/step_000004.rank0.jsonl.tmp77",
                 "rollouts/step_000003.rank1.jsonl", "rollouts/step_000002.rank0.jsonl"):
        (tmp_path / name).write_text("{")
    runs.clean_run(str(tmp_path), start=3)
    assert sorted(os.listdir(tmp_path)) == ["rollouts", "step_000003"]
    # Those of the fourth step, which this run takes again, perhaps on fewer ranks, are gone.
    assert os.listdir(tmp_path / "rollouts") == ["step_000002.rank0.jsonl"]


def arguments(**flags):
    return argparse.Namespace(**{"lr": 1.0, "steps": 4, "resume": None, "out": "o", "ckpt": "c",
                                 "frame_cache_dir": None, "frame_cache_dir_gb": 50.0,
                                 "dp_replicate": 1, **flags})


def test_a_run_goes_on_by_itself_only_where_its_settings_are_the_same(tmp_path, capsys):
    assert runs.resume_point(str(tmp_path), arguments(), None) == (None, {})
    assert runs.resume_point(str(tmp_path), arguments(), True) == (None, {})
    folder = saved_at(tmp_path, "step_000002", args=vars(arguments()))
    for changed in ({}, {"steps": 9}, {"out": "elsewhere"}, {"frame_cache_dir": "kept"},
                    {"frame_cache_dir_gb": 1.0}, {"dp_replicate": 0}):
        assert runs.resume_point(str(tmp_path), arguments(**changed), None)[0] == str(folder)
    with pytest.raises(launch.UserError, match=r"other settings: lr 1.0 \(now 2.0\)"):
        runs.resume_point(str(tmp_path), arguments(lr=2.0), None)
    assert runs.resume_point(str(tmp_path), arguments(lr=2.0), True)[1]["step"] == 2
    assert capsys.readouterr().out == f"{folder}: lr 1.0 (now 2.0)\n"
    assert runs.resume_point(str(tmp_path), arguments(lr=2.0), False) == (None, {})
    shutil.rmtree(folder)
    saved_at(tmp_path, "step_000002", args={**vars(arguments()), "kl": 0.0})
    with pytest.raises(launch.UserError, match=r"other settings: kl 0.0 \(now gone: "):
        runs.resume_point(str(tmp_path), arguments(), None)
    (folder / "state.json").unlink()
    for resume in (True, None):  # damaged later, perhaps, and not ours to delete unasked
        with pytest.raises(launch.UserError, match="step_000002 is not whole.*--no-resume"):
            runs.resume_point(str(tmp_path), arguments(), resume)
    assert runs.resume_point(str(tmp_path), arguments(), False) == (None, {})


def test_beginning_anew_deletes_what_was_there(tmp_path):
    runs.replace_link(str(tmp_path / "last"), str(saved_at(tmp_path, "step_000002")))
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    runs.clean_run(str(tmp_path), start=0)
    assert os.listdir(tmp_path) == ["log.jsonl"]
    metrics.Log(str(tmp_path), 0, argparse.Namespace(track=None)).close(0, 0)
    assert (tmp_path / "log.jsonl").read_text() == ""
