"""
More of the endpoint client: several servers, servers that go away and come back:
python -m pytest tests/all/test_endpoint_rest.py -q
"""
import argparse
import asyncio
import base64
import contextlib
import io
import json
import threading
from dataclasses import replace

import av
import pytest
from scripted import AGENT, ANSWER, Server, calls, play, play_one
from test_endpoint import (
    ask,
    error,
    no_pause,  # noqa: F401
)

import launch
import rollout
from evaluation import costs, endpoint, protocol_loop, results

pytestmark = pytest.mark.usefixtures("one_thread")


def test_of_several_endpoints_the_least_busy_is_asked(tasks, frames_of, no_pause):
    """Two at once go to two servers; one that is down is passed over, and named at the start."""
    both = threading.Barrier(2, timeout=20)  # broken where one server gets both requests

    def reply(body):
        both.wait()
        return ANSWER

    with Server(reply) as one, Server(reply) as two:
        engine = endpoint.OpenAIEngine([one.url, two.url + "/"], "m", workers=2)
        engine.codec = None
        engine.knock()
        assert engine.max_seqs == 4
        agent = replace(AGENT, think_prefix=False, tools=False)
        found = play(engine, tasks[:1], frames_of, agent, group=2)
        assert [e.status for e in found] == ["ok"] * 2
        assert (len(one.asked), len(two.asked)) == (1, 1)
        assert set(engine.busy.values()) == {0}
    with Server(ANSWER) as one:
        pass
    with Server(ANSWER) as two:
        engine = endpoint.OpenAIEngine([one.url, two.url], "m", retries=1)
        engine.codec = None
        found = play(engine, tasks[:1], frames_of, agent, group=6)
        assert [e.status for e in found] == ["ok"] * 6 and len(two.asked) == 6
        with pytest.raises(launch.UserError, match="no server answers"):
            engine.knock()


def test_what_an_endpoint_counts_is_kept(tasks, frames_of):
    def reply(body):
        return json.dumps({"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}],
                           "usage": {"prompt_tokens": 700, "completion_tokens": 9}}).encode()

    agent = replace(AGENT, think_prefix=False)
    for answer, counts in ((reply, (700, 9)), (ANSWER, (None, None))):
        with Server(answer) as server:
            meter = costs.Meter(endpoint.OpenAIEngine(server.url, "m"))
            meter.engine.codec = None
            episode = play_one(meter, tasks, frames_of, agent)
        cost = costs.of(episode, meter.taken)
        assert (cost["prompt_tokens"], cost["sampled_tokens"]) == counts and not meter.taken
        assert cost["frames"] == 4 and cost["sub_prompt_tokens"] == 0


@pytest.mark.parametrize("read, refused", [
    ("thirty-two", None), ("two a second", "--media-io-kwargs"), ("none", "must be a folder above"),
    ("no count", None)])
def test_a_server_that_reads_films_otherwise_is_refused(read, refused, tmp_path):
    """Asked about the first film of the run, which may be a link, and about two made-up ones."""
    (tmp_path / "elsewhere.mp4").write_bytes(b"")
    (tmp_path / "link.mp4").symlink_to("elsewhere.mp4")
    lengths = []

    def reply(body):
        (part, _) = body["messages"][0]["content"]
        kind, _, content = part["video_url"]["url"].partition(",")
        if kind.startswith("file:"):
            assert kind == f"file://{tmp_path}/elsewhere.mp4"
            return 400 if read == "none" else "yes"
        with av.open(io.BytesIO(base64.b64decode(content))) as container:
            lengths.append(sum(1 for _ in container.decode(video=0)))
        frames = {"thirty-two": 32, "two a second": 2 * lengths[-1]}.get(read)
        usage = frames and {"prompt_tokens": 20 + 4 * frames, "completion_tokens": 1}
        return 200, {"choices": [{"message": {"content": "x"}}], "usage": usage}, {}

    with Server(reply) as server:
        engine = endpoint.OpenAIEngine(server.url, "m", retries=0)
        with (pytest.raises(launch.UserError, match=refused) if refused
              else contextlib.nullcontext()):
            engine.knock(film=str(tmp_path / "link.mp4"))
        engine.close()
    assert lengths == ([] if read == "none" else [40, 80])


def test_a_slow_endpoint_is_given_up_after_its_timeout(tasks, frames_of, no_pause):
    with Server(lambda body: threading.Event().wait(1.0) or ANSWER) as server:
        assert ask(server, tasks, frames_of, timeout=0.2, retries=1).status == "engine_error"
        assert no_pause == [1.0]
        assert ask(server, tasks, frames_of, timeout=30).status == "ok"


@pytest.mark.parametrize("after, pause", [
    ("7", 7.0), ("0", 1.0), ("9999", 50.0), ("soon", 1.0), ("-3", 1.0), ("nan", 1.0)])
@pytest.mark.parametrize("status", [429, 503])
def test_a_server_says_when_to_ask_again(after, pause, status, tasks, frames_of, no_pause):
    """In seconds; --server-wait bounds it."""
    with Server(error(status, "busy", **{"Retry-After": after}), ANSWER) as server:
        assert ask(server, tasks, frames_of, server_wait=50.0).status == "ok"
    assert no_pause == [pause]


def failing_server(answers):
    """-> a Server that answers only while answers["up"] is set, to probes too."""
    def reply(body):
        return ANSWER if answers["up"] else 503
    return Server(reply, probe=reply)


def test_all_requests_wait_for_a_server_that_comes_back(tasks, frames_of, monkeypatch):
    """After --give-up failed tries nothing but probes is asked; no episode is lost."""
    answers = {"up": False}
    monkeypatch.setattr(endpoint.OpenAIEngine, "pause", lambda self, s: asyncio.sleep(0.02))
    with failing_server(answers) as server:
        engine = endpoint.OpenAIEngine(server.url, "m", workers=2, give_up=3, server_wait=60)
        engine.codec = None
        threading.Timer(1.0, answers.update, [{"up": True}]).start()
        found = play(engine, tasks[:1], frames_of, replace(AGENT, tools=False), group=6)
        assert [e.status for e in found] == ["ok"] * 6
        # 3 failed tries, and one more if two were under way
        assert 9 <= len(server.asked) <= 10 and server.probes > 5
        engine.close()


@pytest.mark.parametrize("give_up", [0, 2, 5])
def test_a_server_that_stays_away_ends_the_run(give_up, tasks, frames_of, monkeypatch, capsys):
    monkeypatch.setattr(endpoint.OpenAIEngine, "pause", lambda self, s: asyncio.sleep(0.02))
    with failing_server({"up": False}) as server:
        engine = endpoint.OpenAIEngine(server.url, "m", workers=1, give_up=give_up, server_wait=0.5)
        engine.codec = None
        agent = replace(AGENT, tools=False)
        if not give_up:  # every item fails after its tries
            found = play(engine, tasks[:1], frames_of, agent, group=2)
            assert [e.status for e in found] == ["engine_error"] * 2 and len(server.asked) == 8
            return
        found, sampler = [], rollout.Sampler(engine, None, frames_of, agent)
        with pytest.raises(launch.UserError, match="no server has answered for 0.5 s") as ended:
            for episode in protocol_loop.run(sampler, tasks[:1], protocol_loop.Protocol(), 4, 6):
                found.append(episode)
        assert not found if give_up < 5 else len(found) <= 1  # no try is lost in the wait
        assert "HTTP 503" in str(ended.value) and "the same command" in str(ended.value)
        assert len(server.asked) == give_up and server.probes > 2
        assert capsys.readouterr().err.count("waiting at most 0.5 s") == 1
        engine.close()  # no thread waits for ever


def test_a_text_that_one_server_cannot_take_ends_no_run(tasks, frames_of, no_pause):
    """Every real request fails, but probes are answered: these are failed items."""
    with Server(500) as server:
        found = ask_group(server, tasks, frames_of, retries=1)
    assert [e.status for e in found] == ["engine_error"] * 4 and server.probes >= 1
    assert len(server.asked) == 8


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_in_the_middle_ends_the_run_at_once(
        status, tasks, frames_of, no_pause):
    with Server(ANSWER, status, probe=status) as server:
        with pytest.raises(launch.UserError, match=f"HTTP {status}.*--api-key-env"):
            ask_group(server, tasks, frames_of)
        assert len(server.asked) <= 4 and server.probes >= 1 and not no_pause
    with Server(ANSWER, status, ANSWER) as server:  # of one text, as moderation does
        found = ask_group(server, tasks, frames_of)
        assert sorted(e.status for e in found) == ["engine_error", "ok", "ok", "ok"]


def ask_group(server, tasks, source, **more):
    engine = endpoint.OpenAIEngine(server.url, "some-model", workers=1, **more)
    engine.codec = None
    try:
        return play(engine, tasks[:1], source, replace(AGENT, tools=False), group=4)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_apart_is_kept_but_is_no_part_of_the_turn(name, tasks, frames_of):
    """An answer or a call in it would be graded or run, though the server took it for a thought."""
    thought = calls((0, 8)) + "<answer>blue</answer>"
    choice = {"message": {"content": "<answer>red</answer>", name: thought},
              "finish_reason": "stop"}
    with Server(json.dumps({"choices": [choice]}).encode()) as server:
        episode = ask(server, tasks, frames_of)
    assert episode.turns == ["<answer>red</answer>"] and not episode.calls
    args = argparse.Namespace(protocol="paravt")
    assert results.record_of(episode, "d", 4, "on", args)["reasoning"] == [thought]
    with Server(ANSWER) as server:
        plain = ask(server, tasks, frames_of)
    assert "reasoning" not in results.record_of(plain, "d", 4, "on", args)
