"""
More of plumbing/runs.py, files and links:
python -m pytest tests/slow/test_runs.py -q
"""
import os

import pytest
from test_runs import arguments, saved_at

import eval as evaluation
import grpo
import rollout
import sft
from plumbing import runs
from tools import ask, serve


@pytest.mark.parametrize("script, words", [
    (sft, "--data sft.jsonl"), (grpo, "--data rl.jsonl"), (grpo, "--data rl.jsonl --check"),
    (rollout, "--data rl.jsonl"), (evaluation, "--data rl.jsonl"), (serve, "--port 0"),
    (ask, "--video videos/rl-0000.mp4 --question ?")])
def test_names_that_no_template_reads_are_refused_by_every_script(toy, start, tmp_path, monkeypatch,
                                                                  script, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout, "make_engine", None)
    words = [toy / word if (toy / word).exists() else word for word in words.split()]
    code, _, err = start(script, "--preset", "toy", "--ckpt", toy / "init", *words, "--set",
                         'chat_template_kwargs={"enable_thought": false}')
    assert code == 2 and "does not read enable_thought" in err


def test_the_state_names_the_best_checkpoint_and_every_start_restores_the_links(
        tmp_path, monkeypatch, capsys):
    """As a kill between two links, a failing disk, or a damaged newest checkpoint leave them."""
    for n, best in ((1, 1), (2, 1), (3, 1), (4, 4)):
        saved_at(tmp_path, f"step_00000{n}", best_step=best, args=vars(arguments()))
    for name in ("last", "best"):
        runs.replace_link(str(tmp_path / name), str(tmp_path / "step_000003"))

    def links():
        return [os.readlink(tmp_path / name) for name in ("last", "best")]

    runs.resume_point(str(tmp_path), arguments(), None)
    assert links() == ["step_000004"] * 2
    # The best one of the newest but one stays too: the run goes on there if the newest is damaged.
    kept = [n for n in sorted(os.listdir(tmp_path)) if n.startswith("step_")]
    assert kept == ["step_000001", "step_000003", "step_000004"]
    (tmp_path / "step_000004" / "model.safetensors").unlink()
    folder, state = runs.resume_point(str(tmp_path), arguments(), None)
    assert folder.endswith("step_000003") and links() == ["step_000003", "step_000001"]
    assert "step_000004: file gone or changed" in capsys.readouterr().out

    for name in ("symlink", "replace", "rename", "fsync"):
        saved_at(tmp_path, "step_000000")  # not kept
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_, **__: os.listdir(tmp_path / "gone"))
            runs.update_links(folder, state)
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(f"the newest whole checkpoint is {folder}")
        runs.update_links(folder, state)
        assert links() == ["step_000003", "step_000001"] and not capsys.readouterr().out


def test_a_disk_without_links_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "symlink", lambda source, _: os.remove(source))
    with pytest.raises(OSError, match="a symbolic link in"):
        runs.claim_run(str(tmp_path), [])
