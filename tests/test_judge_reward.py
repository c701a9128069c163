"""
Tests of the judge as a reward, --judge-url of grpo.py and rollout.py: python -m pytest
tests/test_judge_reward.py -q

Against an endpoint that speaks from a script. The judge of evaluations, which has the same prompt,
is tested in test_eval.py.
"""
import argparse
import asyncio
import json
import re

import pytest
from fixtures import rows_of, write_rows
from scripted import Scripted, Server

import grpo
import launch
import rewards
import rollout
from plumbing import judge as client

pytestmark = pytest.mark.usefixtures("one_thread")


def said(words, sample=0, answer="red"):
    """An episode that ended with these words, of a task with this answer."""
    task = {"id": "t", "video": "v.mp4", "question": "Which colour?", "options": None,
            "answer": answer, "type": "open"}
    text = f"I saw it.\n</think>\n<answer>{words}</answer>"
    return rollout.Episode(task, "0/t", sample, 4, 0, turns=[text], think_open=True)


def given(body):
    return re.search(r"Given answer: (.*)\nDoes", body["messages"][0]["content"])[1]


def table(replies):
    """-> a reply of the Server by the given answer: "no" if the table has none."""
    return lambda body: replies.get(given(body), "no")


def flags(server, **more):
    return argparse.Namespace(**{"judge_url": server.url, "judge_model": "j", **more})


def pay(judge, *episodes):
    async def score_all():
        pay = rewards.RewardConfig()
        await asyncio.gather(*(rollout.score_episode(e, pay, judge) for e in episodes))

    asyncio.run(score_all())
    return [e.reward for e in episodes]


@pytest.fixture
def judge(tmp_path):
    """judge(server, **flags) -> Judge with its file in tmp_path; closed at the end."""
    made = []

    def judge(server, **more):
        made.append(client.open_judge(flags(server, **more), str(tmp_path / "judge.jsonl")))
        return made[-1]

    yield judge
    for one in made:
        one.close()


def test_a_text_is_asked_about_once_and_a_run_that_goes_on_reads_the_file(judge, tmp_path):
    with Server(table({"scarlet": "yes"})) as server:
        one, group = judge(server), [said("scarlet", n) for n in range(8)] + [said("blue", 8)]
        assert [r["acc"] for r in pay(one, *group)] == [1.0] * 8 + [0.0]
        assert sorted(map(given, server.asked)) == ["blue", "scarlet"]
        (again,) = pay(one, said("scarlet"))  # the next step
        assert again["judge"] is True and len(server.asked) == 2
        file = tmp_path / "judge.jsonl"
        lines = file.read_bytes().strip().splitlines()
        file.write_bytes(b"\n" + lines[0] + b"\n" + lines[1][:-9])  # a kill has torn the second
        kept, two = json.loads(lines[0])["answer"], judge(server)
        pay(two, said(kept))
        assert len(server.asked) == 2
        pay(two, said("scarlet"), said("blue"), said("green"))
        assert len(server.asked) == 4
        pay(judge(server), said("scarlet"), said("blue"), said("green"))
        assert len(server.asked) == 4
        # Another judge, question or reference answer: another verdict.
        pay(judge(server, judge_model="k"), said("scarlet"))
        pay(one, said("scarlet", answer="blood red"))
        assert [(b["model"], b["temperature"]) for b in server.asked[4:]] == [("k", 0), ("j", 0)]
    row = {"question": "Which colour?", "gold": "blood red", "answer": "scarlet", "model": "j"}
    assert json.loads(file.read_bytes().splitlines()[-1]) == {**row, "verdict": True}


@pytest.mark.parametrize("reply", ["yes and no", 400, None])
def test_an_answer_without_a_verdict_is_paid_by_token_f1(reply, judge, tmp_path):
    with Server(reply) as server:
        (first,) = pay(judge(server), said("dark red"))
    assert len(server.asked) == 1 and not (tmp_path / "judge.jsonl").exists()
    assert first["judge"] == "fallback"
    assert first["acc"] == rewards.grade_words("dark red", "red") > 0


@pytest.mark.parametrize("reply", [b"{", 401, (302, "", {"Location": "http://127.0.0.1:9/v1"})])
def test_a_judge_that_does_not_answer_ends_the_run(reply, judge):
    with Server(reply) as server, pytest.raises(launch.RunError, match="the same command goes on"):
        pay(judge(server), said("dark red"))


@pytest.mark.parametrize("text, verdict", [
    ("Answer: yes", True), ("The answer is no.", False), ("**Yes**", True), ("yes and no", None),
    ("<think>\nBlue is not red.\n</think>\nNo.", False), ("My final verdict: yes", True),
    ("<think>\nyes, it may be; but no", None), ("Yes, no doubt", True), ("answering", None)])
def test_a_verdict_is_read_after_the_thought(text, verdict):
    assert client.read_verdict(text) is verdict


# ------------------------------------------------------------------------------------------------
# The scripts


@pytest.fixture
def open_tasks(toy, tmp_path):
    same = {"type": "open", "question": "Which colour?", "answer": "deep red"}
    return write_rows(tmp_path / "o.jsonl", [row | same for row in rows_of(toy / "rl.jsonl")[:2]])


def say(request):
    """Four answers of a group: the judge likes the second, token F1 likes the first."""
    answer = ["deep red", "crimson", "blue", None][int(request.id.split("/")[2]) % 4]
    return "I saw it.\n</think>\n" + (f"<answer>{answer}</answer>" if answer else "")


@pytest.fixture
def run(monkeypatch, train, open_tasks, codec):
    """run(name of a folder, *flags): grpo.py with scripted answers."""
    class Engine(Scripted):
        def close(self, *_):
            pass

        sleep = wake = sync = close

    monkeypatch.setattr(rollout, "make_engine", lambda *_, **__: Engine(codec, say))
    monkeypatch.setattr(grpo, "check_gap", lambda *_: None)  # its log-probs are a script's
    return lambda out, *flags: train("grpo", "--data", open_tasks, "--num-generations", 4,
                                     "--max-new-tokens", 64, *flags, out=out)


def judged_by(server):
    return "--judge-url", server.url, "--judge-model", "j"


@pytest.mark.process  # three runs
def test_a_run_is_trained_by_its_verdicts_and_counts_them(run, tmp_path, capsys):
    """What is logged is what the advantages are made of. A run that goes on asks nothing again,
    even if the judge has moved."""
    with Server(table({"crimson": "yes", "blue": "hm"})) as server:
        run("out", "--steps", 1, *judged_by(server))
        asked = sorted(map(given, server.asked))
    # Both tasks have the same question and label. Only failures may be asked about again.
    assert asked.count("crimson") == asked.count("deep red") == 1 and 1 <= asked.count("blue") <= 2
    with Server("no") as server:
        run("out", "--steps", 2, *judged_by(server))
        assert set(map(given, server.asked)) == {"blue"}
    first, second = rows_of(tmp_path / "out" / "log.jsonl")
    assert first["judge_failed"] == pytest.approx(2 / 6) and second["judge_failed"] == 0
    assert first["acc"] == second["acc"] == 0.25
    run("plain", "--steps", 1)
    (plain,) = rows_of(tmp_path / "plain" / "log.jsonl")
    assert plain["acc"] == 0.25 and "judge_failed" not in plain
    with_judge, without = (rows_of(tmp_path / name / "rollouts" / "step_000000.rank0.jsonl")
                           for name in ("out", "plain"))
    assert [r["reward"].get("judge") for r in with_judge] == [False, True, "fallback", None] * 2
    assert [r["reward"]["acc"] for r in with_judge] == [0.0, 1.0, 0.0, 0.0] * 2
    assert [r["reward"]["acc"] for r in without] == [1.0, 0.0, 0.0, 0.0] * 2
    for rows, best in ((with_judge, 1), (without, 0)):
        task_part = [row["advantage"]["task"] for row in rows[:4]]
        assert max(task_part) == task_part[best] > 0 and task_part.count(max(task_part)) == 1
