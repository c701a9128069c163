"""
The folder of videos goes away during a training, and comes back:
python -m pytest tests/slow/test_outage.py -q
"""
import contextlib
import json
import os
import shutil
import threading

import pytest
from fixtures import rows_of, write_rows
from test_grpo_run import LIVE, read_rollouts, tasks  # noqa: F401  (a fixture)
from test_sft import small_rows

import chat
import grpo
import launch
import rollout
import sft
import video
from plumbing import metrics, runs


@pytest.fixture
def absent(toy, tmp_path):
    """absent(away, name, read) -> read(), during which the videos are away if `away` holds the
    name."""
    shutil.copytree(toy / "videos", tmp_path / "videos")

    def absent(away, name, read):
        if name in away:
            os.rename(tmp_path / "videos", tmp_path / "elsewhere")
        try:
            return read()
        finally:
            if name in away:
                os.rename(tmp_path / "elsewhere", tmp_path / "videos")

    return absent


@pytest.fixture
def asked(monkeypatch):
    """SIGTERM comes in the first step without videos; the event is what the scripts wait for."""
    asked, real = threading.Event(), launch.stop_on_signal
    monkeypatch.setattr(launch, "stop_on_signal", lambda: real() and asked)
    monkeypatch.setattr(runs, "check_run", lambda step, bad, *_: bad and asked.set())
    return asked


# ------------------------------------------------------------------------------------------------
# grpo.py


@pytest.fixture
def train_grpo(absent, monkeypatch, run_grpo, toy, tmp_path):
    """train_grpo(away, *flags): grpo.py, whose videos are away during the steps in `away`."""
    real = grpo.sample_batch

    def train(away, *flags):
        monkeypatch.setattr(grpo, "sample_batch", lambda sampler, tasks, step, *more: absent(
            away, step, lambda: real(sampler, tasks, step, *more)))
        return run_grpo("--data", toy / "rl.jsonl", "--video-root", tmp_path, *LIVE, "--frames", 4,
                        *flags)

    return train


def test_sigterm_in_a_step_without_videos_saves_the_steps_before_it_and_no_step_0(
        train_grpo, asked, tmp_path):
    for away, saved in ({0}, []), ({1}, ["step_000001"]):
        asked.clear()
        with pytest.raises(SystemExit, match="1"):
            train_grpo(away, "--steps", 3)
        assert [path.name for path in (tmp_path / "run").glob("step_*")] == saved
        assert os.path.lexists(tmp_path / "run" / "last") == bool(saved)


@pytest.mark.parametrize("disk, error", [("away", "the machine: error 5"), ("there", "is empty")])
def test_windows_alone_that_cannot_be_read_teach_no_policy_to_do_without(
        monkeypatch, run_grpo, hard_tasks, varied_rewards, disk, error):
    """Overviews come from the cache, so the rollouts without calls are well; after an outage they
    would be all that is trained on. If one film alone is broken, they are."""
    real_run, real_ask, gone = rollout.run, video.Decoders.ask, threading.Event()

    def run(sampler, tasks, frames, group, step, **more):
        if step:
            gone.set()
        for episode in real_run(sampler, tasks, frames, group, step, **more):
            if step and episode.sample == 0:
                episode.fail("video_error", f"a call: {error}")
            yield episode

    def ask(self, request):
        if gone.is_set() and disk == "away":
            raise video.VideoError(request[0], "the machine: error 5")
        return real_ask(self, request)

    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(video.Decoders, "ask", ask)
    flags = ("--data", hard_tasks, *LIVE, "--frames", 4, "--steps", 4, "--save-every", 1)
    if disk == "away":
        with pytest.raises(launch.RunError, match="^step 4: videos could not be read for 3 steps; "
                           "is the disk there.*step_000001$"):
            run_grpo(*flags)
    else:
        _, last, _ = run_grpo(*flags)
        assert last["step"] == 4 and last["groups"] == 2 and not last["skipped_update"]


def test_an_outage_within_an_evaluation_costs_no_row_and_one_that_stays_makes_no_best(
        monkeypatch, run_grpo, toy, tmp_path):
    """What the machine spoilt is tried again at once. If that fails too, the mean of the other rows
    is no `best` while the disk is away."""
    first, spoilt = rows_of(toy / "rl.jsonl")[0]["id"], []
    spoil(monkeypatch, lambda e, rollouts: len(rollouts) in spoilt and e.task["id"] == first)
    monkeypatch.setattr(video.FrameCache, "disk_away", lambda self, errors: bool(errors))
    val = toy / "val3.jsonl"
    val.write_text("\n".join((toy / "rl.jsonl").read_text().splitlines()[:3]))
    vals, best = [], []
    for out, tries in (("good", []), ("passed", [3]), ("away", [3, 1])):  # by rows of the try
        spoilt[:], folder = tries, tmp_path / out
        ends = pytest.raises(launch.RunError, match="the disk .*01; --steps 2 evaluates again$")
        with ends if tries[1:] else contextlib.nullcontext():
            run_grpo("--data", toy / "rl.jsonl", "--val", val, "--steps", 1, *LIVE, "--frames", 4,
                     out=out)
        vals.append([row["val"] for row in rows_of(folder / "log.jsonl") if "val" in row])
        best.append((folder / "best").exists())
    assert vals[0] == vals[1] and [val["n"] for val in vals[0]] == [3, 3]
    assert [(val["n"], val["not_ok"], val["acc"] is None) for val in vals[2]] == [(2, 2, False)] * 2
    assert best == [True, True, False]


def spoil(monkeypatch, is_lost):
    """Episodes for which is_lost(episode, rollouts of this try) lose a window to the disk."""
    def spoilt(sampler, rollouts, *given, real=rollout.play_all):
        for e in real(sampler, rollouts, *given):
            if is_lost(e, rollouts):
                e.fail("video_error", "a call: Input/output error")
            yield e

    monkeypatch.setattr(rollout, "play_all", spoilt)


def test_what_an_outage_spoilt_is_sampled_once_more(run_grpo, start, toy, tmp_path, monkeypatch):
    """The same ones, by their seeds: else the rest would be those that looked at no window."""
    flags = "--data", toy / "rl.jsonl", "--steps", 1, *LIVE
    good = read_rollouts(run_grpo(*flags, out="good")[2])
    spoil(monkeypatch, lambda e, rollouts: e.sample and not all(n for *_, n in rollouts))
    rows = read_rollouts(run_grpo(*flags, out="spoilt")[2])
    assert [(e["status"], e["ids"]) for e in rows] == [("ok", e["ids"]) for e in good]
    code, _, err = start(rollout, "--preset", "toy", "--ckpt", toy / "init", *flags[:2], "--frames",
                         4, "--out", out := tmp_path / "r.jsonl")
    assert code == 0 and {row["status"] for row in rows_of(out)} == {"ok"}, err


# ------------------------------------------------------------------------------------------------
# sft.py


@pytest.fixture
def train_sft(absent, toy, tmp_path, start, monkeypatch):
    """train_sft(away, *flags) -> (exit code, stdout, stderr, rows of log.jsonl), of 9 chats in
    batches of 3. The videos are away while the batches, and the evaluations, in `away` are read; a
    batch is named by its number, an evaluation by "val" and its number, its rows by their range."""
    data = write_rows(tmp_path / "d.jsonl", small_rows(toy, count=9))
    held = write_rows(tmp_path / "val.jsonl", small_rows(toy, "sft_val", 6))
    real = {name: getattr(sft, name) for name in ("batch_packs", "held_out_loss", "read_packs")}

    def train(away, *flags):
        evaluations = iter(range(99))
        monkeypatch.setattr(sft, "batch_packs", lambda chats, step, *more: absent(
            away, step, lambda: real["batch_packs"](chats, step, *more)))
        monkeypatch.setattr(sft, "held_out_loss", lambda *given: absent(
            away, f"val {next(evaluations)}", lambda: real["held_out_loss"](*given)))
        monkeypatch.setattr(sft, "read_packs", lambda chats, rows, codec, size, *again: absent(
            () if again else away, str(rows),
            lambda: real["read_packs"](chats, rows, codec, size, *again)))
        ended = start(sft, "--ckpt", toy / "init", "--data", data, "--val", held, "--out",
                      tmp_path / "out", "--batch-size", 3, "--lr", 1e-3, "--set",
                      "gradient_checkpointing=false", "--eval-every", 0, *flags)
        return *ended, rows_of(tmp_path / "out/log.jsonl")

    return train


def test_a_run_that_sees_no_video_for_three_steps_says_so_and_keeps_its_weights(
        train_sft, monkeypatch):
    """A disk that is away burns no more than three steps, and none of them moves a weight or counts
    rows as gone."""
    flags, away = ("--steps", 6, "--save-every", 2, "--eval-every", 1), []
    monkeypatch.setattr(metrics, "update_best", lambda _, v, *__, **sign: away.append(v != v))
    code, _, err, log = train_sft(range(2, 6), *flags)
    assert code == 1 and len(err.splitlines()) == 1, err
    assert "step 5: videos could not be read for 3 steps; is the disk there?" in err
    # Nothing was saved at step 4: the weights there were those of step 2.
    assert err.rstrip().endswith("step_000002") and away == [False, False, True, True]
    code, out, err, log = train_sft((), *flags)  # it is back
    assert code == 0 and "done" in out, err
    assert [row["trained_tokens"] > 0 for row in log if "loss" in row] == [True] * 6


def test_a_start_that_misses_videos_is_refused(train_sft, tmp_path):
    assert train_sft((), "--steps", 2)[0] == 0
    film = chat.videos_in(rows_of(tmp_path / "val.jsonl")[1]["messages"])[0]["video"]
    os.remove(tmp_path / film)
    code, _, err, log = train_sft((), "--steps", 4)
    assert code == 2 and f"1 of 1 videos are not below {tmp_path}: {film}" in err and len(log) == 3
    assert train_sft((), "--steps", 4, "--set", "missing_videos=1")[0] == 1  # it goes on, blindly


def test_a_read_that_fails_once_costs_no_chat(train_sft, monkeypatch):
    real, tried = video.load, set()

    def load(spec, *more, **named):
        if spec["video"] not in tried:
            tried.add(spec["video"])
            raise video.VideoError(spec["video"], f"{launch.MACHINE}error 5")
        return real(spec, *more, **named)

    monkeypatch.setattr(video, "load", load)
    *_, log = train_sft((), "--steps", 2)
    assert [(row["bad_steps"], row["skipped_chats"]) for row in log[:2]] == [(0, 0)] * 2


@pytest.mark.parametrize("away", ["val 0", "range(3, 6)"])
def test_an_outage_that_has_passed_makes_no_best(train_sft, tmp_path, away):
    """Of the only evaluation, or of its second half."""
    code, _, err, log = train_sft((away,), "--steps", 2)
    assert code == 1 and log[-1]["val_loss"] is None and "is the disk there" in err, err
    assert [path.name for path in (tmp_path / "out").glob("*0*")] == ["step_000002"]  # no best
    code, out, err, _ = train_sft((), "--steps", 2)
    assert code == 1 and "nothing to do" in out and "--steps 3 evaluates again" in err
    code, *_, log = train_sft((), "--steps", 3)
    assert code == 0 and log[-1]["val_loss"] and (tmp_path / "out" / "best").exists()


def test_sigterm_in_a_step_without_videos_saves_the_steps_before_it(train_sft, asked, tmp_path):
    code, out, err, _ = train_sft((3,), "--steps", 6)
    assert code == 1 and "stopped after step 4 of 6" in out, err
    assert runs.newest_checkpoint(str(tmp_path / "out")).endswith("step_000003")


def test_a_held_out_film_that_goes_for_good_freezes_no_best(train_sft, tmp_path, monkeypatch):
    """The first evaluation without the film is no `best`, the second one begins anew."""
    real, evaluations = metrics.update_best, []

    def update_best(best, value, *more, **sign):
        evaluations.append(value)
        if len(evaluations) == 1:
            os.remove(tmp_path / "videos" / "other.mp4")
        real(best, value, *more, **sign)

    rows = rows_of(tmp_path / "val.jsonl")
    (item,) = chat.videos_in(rows[0]["messages"])
    shutil.copy(tmp_path / item["video"], tmp_path / "videos" / "other.mp4")
    item["video"] = "videos/other.mp4"
    write_rows(tmp_path / "val.jsonl", rows)
    monkeypatch.setattr(metrics, "update_best", update_best)
    code, out, err, _ = train_sft((), "--steps", 6, "--eval-every", 2)
    assert code == 0 and (tmp_path / "out/step_000002").exists(), err  # the best of its time
    assert out.count("so this is no `best`") == 1 and out.count("so `best` begins anew") == 1
    state = json.loads((tmp_path / "out" / "best" / "state.json").read_text())
    assert state["best_step"] == 6 and state["best_unread"] == [0]
    assert state["last_unread"] == state["best_unread"] and state["best"] == evaluations[-1]


def test_a_batch_without_any_token_is_a_bad_step(train_sft, monkeypatch):
    """Whatever the reason, and whoever is to blame."""
    monkeypatch.setattr(video.FrameCache, "disk_away", lambda self, errors: False)
    code, _, err = train_sft(range(1, 6), "--steps", 6)[:3]
    assert code == 1 and "step 4: videos could not be read for 3 steps" in err
