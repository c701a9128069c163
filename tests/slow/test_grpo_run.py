"""
More of grpo.py as a script: python -m pytest tests/slow/test_grpo_run.py -q
"""
import json
import threading

import pytest
from test_grpo_run import LIVE, tasks  # noqa: F401  (a fixture)

import launch
import rollout
import video


@pytest.mark.parametrize("disk", ["away", "there"])
def test_windows_alone_that_cannot_be_read_teach_no_policy_to_do_without(
        monkeypatch, run_grpo, hard_tasks, varied_rewards, disk):
    """Overviews come from the cache, so the rollouts without calls are well; after an outage they
    would be all that is trained on. If one film alone is broken, they are."""
    real_run, real_ask, gone = rollout.run, video.Decoders.ask, threading.Event()

    def run(sampler, tasks, frames, group, step, **more):
        if step:
            gone.set()
        for episode in real_run(sampler, tasks, frames, group, step, **more):
            if step and episode.sample == 0:
                episode.fail("video_error", "a call: Input/output error")
            yield episode

    def ask(self, request):
        if gone.is_set() and disk == "away":
            raise video.VideoError(request[0], "Input/output error")
        return real_ask(self, request)

    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(video.Decoders, "ask", ask)
    flags = ("--data", hard_tasks, *LIVE, "--frames", 4, "--steps", 4, "--save-every", 1)
    if disk == "away":
        with pytest.raises(launch.RunError, match="^step 4: no video could be read for 3 steps; is "
                           "the disk there.*step_000001$"):
            run_grpo(*flags)
    else:
        _, last, _ = run_grpo(*flags)
        assert last["step"] == 4 and last["groups"] == 2 and not last["skipped_update"]


def test_an_outage_within_an_evaluation_costs_no_row_and_one_that_stays_makes_no_best(
        monkeypatch, run_grpo, toy):
    """What the machine spoilt is tried again at once. If that fails too, the mean of the other rows
    is no `best` while the disk is away."""
    real, spoilt = rollout.run, []

    def run(sampler, tasks, frames, group, *more, **named):
        for episode in real(sampler, tasks, frames, group, *more, **named):
            if group == 1 and len(tasks) in spoilt and episode.task["id"] == tasks[0]["id"]:
                episode.fail("video_error", "Input/output error")
            yield episode

    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(video.FrameCache, "away", lambda self: True)
    val = toy / "val3.jsonl"
    val.write_text("\n".join((toy / "rl.jsonl").read_text().splitlines()[:3]))
    vals, best = [], []
    for out, tries in (("good", []), ("passed", [3]), ("away", [3, 1])):  # by rows of the try
        spoilt[:] = tries
        _, _, folder = run_grpo("--data", toy / "rl.jsonl", "--val", val, "--steps", 1, *LIVE,
                                "--frames", 4, out=out)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        vals.append([row["val"] for row in log if "val" in row])
        best.append((folder / "best").exists())
    assert vals[0] == vals[1] and [val["n"] for val in vals[0]] == [3, 3]
    assert [(val["n"], val["not_ok"], val["acc"] is None) for val in vals[2]] == [(2, 2, False)] * 2
    assert best == [True, True, False]
