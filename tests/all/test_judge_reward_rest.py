"""
More of the judge as a reward: python -m pytest tests/all/test_judge_reward_rest.py -q
"""
import argparse
import functools
import threading
import time
from types import SimpleNamespace

import pytest
from scripted import Scripted, Server, play
from test_judge_reward import (  # noqa: F401
    flags,
    given,
    judge,
    judged_by,
    no_pause,
    open_tasks,
    pay,
    rows_of,
    run,
    said,
    say,
    table,
    task,
)

import launch
import rewards
import rollout
from plumbing import data
from plumbing import judge as client
from tools import pick, replay
from video import FrameCache

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_judge_that_goes_away_stops_no_run_and_is_asked_when_it_is_back(
        judge, no_pause, capsys):
    """No server within the wait: the answers that are left fall back at once. The next step looks
    again."""
    up = {"up": True}

    def reply(body):
        return "yes" if up["up"] else 503

    with Server(reply, probe=reply) as server:
        one = judge(server)
        up["up"] = False
        down = pay(one, *[said(f"{n} red", n) for n in range(9)])
        assert [r["judge"] for r in down] == ["fallback"] * 9 and len(server.asked) < 27
        up["up"] = True
        assert [r["judge"] for r in pay(one, said("0 red"))] == [True]
    assert capsys.readouterr().err.count("no verdict of the judge (") == 1


def test_episodes_go_on_while_the_judge_thinks(judge):
    """The judge answers only after the last episode has been played."""
    over = threading.Event()

    async def play(episode, sampler):
        done = said("A" if episode.sample == 5 else f"colour {episode.sample}", episode.sample)
        if episode.sample == 5:
            done.task = task(kind="mcq", answer="A", options=["red", "blue"])
            over.set()
        return done

    with Server(lambda body: "yes" if over.wait(20) else 500) as server:
        sampler = rollout.Sampler(SimpleNamespace(max_seqs=1), None, None, rollout.Agent(),
                                  judge=judge(server))
        scored = list(rollout.run(sampler, [task()], 4, 6, play=play))
    assert scored[0].sample == 5  # the others wait for their verdicts, and it does not
    assert sorted((e.sample, e.reward.get("judge")) for e in scored) == [
        *((n, True) for n in range(5)), (5, None)]


# ------------------------------------------------------------------------------------------------
# The scripts


def test_flags_of_the_judge_belong_together(tmp_path):
    for more in ({"judge_model": None}, {"judge_url": None}):
        with pytest.raises(launch.UserError, match="--judge-url and --judge-model belong together"):
            client.open_judge(flags("http://127.0.0.1:9/v1", **more))
    assert client.open_judge(flags("x", judge_url=None, judge_model=None)) is None


def test_recorded_rollouts_are_scored_by_the_judge_of_their_own_run(run, tmp_path):
    """rollout.py --out, then replay.py: the same rewards with the same judge."""
    replies = table({"crimson": "yes"})
    with Server(replies) as server:
        run("rollout", "--out", tmp_path / "r.jsonl", *judged_by(server))
        rows = rows_of(tmp_path / "r.jsonl")
        assert [r["reward"].get("judge") for r in rows] == [False, True, False, None] * 2
        assert len(server.asked) == 3 == len(rows_of(tmp_path / "judge.jsonl"))
        plain = argparse.Namespace(judge_url=None, judge_model=None)
        assert [e.reward["acc"] for e in replay.read_rollouts(
            [tmp_path / "r.jsonl"], rewards.RewardConfig())
                ] == [1.0, 0.0, 0.0, 0.0] * 2 and client.open_judge(plain) is None
        run("replay", "--out", tmp_path / "out", "--rollouts", tmp_path / "r.jsonl",
            *judged_by(server))
        (row,) = rows_of(tmp_path / "out" / "log.jsonl")
        assert row["acc"] == 0.25 and row["judged"] == 6 and row["judge_cached"] == 3
        assert len(server.asked) == 6
    ((first, *_), _) = pick.groups([str(tmp_path / "r.jsonl")])
    assert first.reward["acc"] == 0.0  # by the verdict in the record, which F1 contradicts
    run("replay", "--out", tmp_path / "plain", "--rollouts", tmp_path / "r.jsonl")
    one, two = ((tmp_path / name / "last" / "model.safetensors").read_bytes()
                for name in ("out", "plain"))
    assert one != two  # other verdicts, other gradients


def test_a_judge_that_refuses_ends_the_run_before_it_begins(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_KEY", "s3cret-value")
    monkeypatch.setattr(rollout, "make_engine", None)  # never reached
    with Server("yes", probe=401) as server:
        for script, out in (("grpo", tmp_path / "new"), ("rollout", tmp_path / "new" / "r.jsonl")):
            with pytest.raises(SystemExit) as ended:
                launch.run_main(functools.partial(run, script, "--out", out, *judged_by(server),
                                                  "--judge-key-env", "SOME_KEY"))
            said = capsys.readouterr().err
            assert ended.value.code == 2 and said.count("\n") == 1 and "--judge-key-env" in said
            assert "401" in said and "s3cret" not in said
        assert server.probes == 2 and not server.asked


def test_the_held_out_accuracy_is_the_judges(run, tmp_path, open_tasks):
    with Server(table({"deep red": "no"})) as server:
        run("grpo", "--out", tmp_path / "out", "--steps", 1, "--val", open_tasks, "--group", 2,
            *judged_by(server))
    first = rows_of(tmp_path / "out" / "log.jsonl")[0]
    assert first["val"]["acc"] == 0.0 and first["val"]["n"] == 2


def test_the_engine_samples_on_while_the_judge_reads(codec, toy, open_tasks, judge):
    """rollout.run: no verdict comes before the whole batch is sampled."""
    tasks, source = data.read_tasks(str(open_tasks)), rollout.Source(str(toy), FrameCache())
    scripted = Scripted(codec, say)

    def reply(body):
        for _ in range(4000):
            if len(scripted.answered) == 8:
                return "yes"
            time.sleep(0.005)
        return 400

    with Server(reply) as server:
        found = play(scripted, tasks, source, group=4, judge=judge(server))
    assert [e.reward.get("judge") for e in found] == [True, True, True, None] * 2
