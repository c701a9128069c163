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
from scripted import Server

import launch
import rewards
import rollout
from plumbing import judge as client


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


def pay(judge, *episodes):
    async def score_all():
        await asyncio.gather(*(rollout.score_episode(e, judge=judge) for e in episodes))

    asyncio.run(score_all())
    return [e.reward for e in episodes]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """judge(server, model) -> Judge with its file in tmp_path; closed at the end."""
    monkeypatch.setenv("JUDGE_API_KEY", "k-7\n")
    made = []

    def judge(server, judge_model="j"):
        args = argparse.Namespace(judge_url=server.url, judge_model=judge_model)
        made.append(client.open_judge(args, str(tmp_path / "judge.jsonl")))
        return made[-1]

    yield judge
    for one in made:
        one.close()


def test_a_text_is_asked_about_once_and_a_run_that_goes_on_reads_the_file(judge, tmp_path):
    with Server(table({"scarlet": "yes"})) as server:
        one, group = judge(server), [said("scarlet", n) for n in range(8)] + [said("blue", 8)]
        assert [r["acc"] for r in pay(one, *group)] == [1.0] * 8 + [0.0]
        assert sorted(map(given, server.asked)) == ["blue", "scarlet"]
        assert server.headers[0][1]["authorization"] == "Bearer k-7"
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


def test_a_judge_that_gives_no_verdict_is_refused_at_the_start(judge):
    with Server(probe="maybe") as server:
        pytest.raises(launch.UserError, judge, server).match("gives no verdict")


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
