"""
Tests of the endpoint client, OpenAIEngine in evaluation/endpoint.py: python -m pytest
tests/test_endpoint.py -q

Against an endpoint that speaks from a script; test_server.py asks a real server.
"""
import argparse
import asyncio
import base64
import io
import json
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from scripted import AGENT, ANSWER, Server, calls, play, play_one

import eval as evaluation
import launch
import rollout
import video
from evaluation import costs, endpoint, episodes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_pause(monkeypatch):
    pauses = []

    async def pause(self, seconds):
        pauses.append(seconds)

    monkeypatch.setattr(endpoint.OpenAIEngine, "pause", pause)
    return pauses


def ask(server, tasks, source, agent=AGENT, **more):
    engine = endpoint.OpenAIEngine(server.url, "some-model", **more)
    engine.codec = None
    try:
        return play_one(engine, tasks, source, agent)
    finally:
        engine.close()


def test_endpoint_gets_frames_after_their_times_and_one_user_turn_of_responses(tasks, frames_of):
    def reply(body):
        if "short window" in body["messages"][0]["content"]:
            return "a red square"
        return "<think>\n" + (calls((0, 8), (9, 5), (8, 16)) if len(body["messages"]) < 4
                              else ANSWER)

    with Server(reply) as server:
        episode = ask(server, tasks, frames_of, prefill=True)
    assert episode.status == "ok" and episode.executed() == 2 and episode.context.ids == []
    assert episode.reward["fmt"] == 1.0
    # without the prefix, which was forced
    assert episode.turns == [calls((0, 8), (9, 5), (8, 16)), ANSWER]
    first, last = server.asked[0], server.asked[-1]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("some-model", 512, 0.7)
    parts = first["messages"][1]["content"]
    assert [p["type"] for p in parts] == ["text", "image_url"] * 4 + ["text"]
    assert [p["text"] for p in parts[:8:2]] == [
        "<8.0 seconds>", "<24.0 seconds>", "<40.0 seconds>", "<56.0 seconds>"]
    from PIL import Image

    head, data = parts[1]["image_url"]["url"].split(",")
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), float)
    exact = video.load({"video": tasks[0]["video"], "frames": 4}, frames_of.root).images[0]
    assert head == "data:image/jpeg;base64" and np.abs(image - exact).mean() < 8
    # The forced start of the thought goes as the begun assistant turn, and the server is told to
    # continue it.
    assert first["messages"][2:] == [{"role": "assistant", "content": "<think>\n"}]
    assert first["continue_final_message"] is True and first["add_generation_prompt"] is False
    assert [m["role"] for m in last["messages"]] == [
        "system", "user", "assistant", "user", "assistant"]
    assert last["messages"][2]["content"] == "<think>\n" + calls((0, 8), (9, 5), (8, 16))
    answers = last["messages"][3]["content"].split("\n</tool_response>\n<tool_response>\n")
    assert len(answers) == 3 and answers[0] == "<tool_response>\na red square"
    assert "reversed" in answers[1]
    sub = next(body for body in server.asked if "short window" in body["messages"][0]["content"])
    assert "continue_final_message" not in sub and len(sub["messages"]) == 2


def test_what_endpoints_differ_in_is_a_flag(tasks, frames_of):
    """Images are capped evenly over the whole request, times with them; the limit's name and the
    temperature are settable."""
    with Server(ANSWER) as server:
        ask(server, tasks, frames_of, replace(AGENT, think_prefix=False), image_cap=2,
            tokens_field="max_completion_tokens", send_temperature=False)
        ask(server, tasks, frames_of, replace(AGENT, think_prefix=False, tools=False))
    capped, plain = server.asked
    assert [p["text"] for p in capped["messages"][1]["content"]
            if p["type"] == "text"][:2] == ["<24.0 seconds>", "<56.0 seconds>"]
    assert sum(p["type"] == "image_url" for p in capped["messages"][1]["content"]) == 2
    assert capped["max_completion_tokens"] == 512
    assert not {"max_tokens", "temperature", "seed"} & set(capped)
    assert capped["tools"] == rollout.tool_schema() and capped["tool_choice"] == "none"
    assert "tools" not in plain
    assert plain["max_tokens"] == 512 and plain["temperature"] == 0.7
    assert sum(p["type"] == "image_url" for p in plain["messages"][1]["content"]) == 4


@pytest.mark.parametrize("flags, sent", [
    ("", {}), ("--top-p 0.8", {"top_p": 0.8}), ("--top-k 20", {"top_k": 20}),
    ("--presence-penalty 1.5 --no-send-temperature", {"presence_penalty": 1.5}),
    ("--top-p 1 --top-k 0 --presence-penalty 0",
     {"top_p": 1.0, "top_k": 0, "presence_penalty": 0.0}),
])  # fmt: skip
def test_settings_of_sampling_are_sent_only_if_they_are_set(
        flags, sent, tasks, frames_of, monkeypatch):
    """A hosted endpoint may refuse top_k, and a server has defaults of its own."""
    with Server(ANSWER) as server:
        given = f"eval.py --engine openai --base-url {server.url} --model m --data d {flags}"
        monkeypatch.setattr(sys, "argv", given.split())
        args = evaluation.parse_args()
        engine = endpoint.make_engine(args, prefill=False)
        engine.codec = None
        play_one(engine, tasks, frames_of, replace(AGENT, tools=False))
        engine.close()
    (body,) = server.asked
    fields = ("top_p", "top_k", "presence_penalty")
    assert {name: body[name] for name in fields if name in body} == sent
    assert ("temperature" in body) == ("--no-send-temperature" not in flags)


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


def test_a_slow_endpoint_is_given_up_after_its_timeout(tasks, frames_of, no_pause):
    with Server(lambda body: threading.Event().wait(1.0) or ANSWER) as server:
        assert ask(server, tasks, frames_of, timeout=0.2, retries=1).status == "engine_error"
        assert no_pause == [1.0]
        assert ask(server, tasks, frames_of, timeout=30).status == "ok"


def test_endpoint_without_prefill_gets_no_begun_turn(tasks, frames_of):
    with Server(ANSWER) as server:
        ask(server, tasks, frames_of, replace(AGENT, think_prefix=False))
    assert server.asked[0]["messages"][-1]["role"] == "user"
    assert "continue_final_message" not in server.asked[0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_endpoint_errors_that_may_pass_are_tried_again(status, tasks, frames_of, no_pause):
    with Server(status, status, ANSWER) as server:
        episode = ask(server, tasks, frames_of)
    assert episode.status == "ok" and len(server.asked) == 3 and no_pause == [1.0, 2.0]


@pytest.mark.parametrize("reply, times, why", [
    (400, 1, "HTTP 400: Error response"), (401, 1, "Message: Unauthorized."), (500, 3, "HTTP 500"),
    (b"not json", 1, "bad answer"), (b'{"choices": []}', 1, "bad answer"),
    (b'{"choices": [{"message": null}]}', 1, "bad answer"),
    (b'{"choices": [{"message": {"content": [1]}}]}', 1, "bad answer"),
    (b"[]", 1, "bad answer"),
    (b'{"choices": CUT', 3, "RemoteProtocolError"),
])  # fmt: skip
def test_endpoint_errors_end_the_episode_and_never_count_as_an_answer(
        reply, times, why, tasks, frames_of, no_pause):
    """An error text that was graded could be a correct letter."""
    with Server(reply) as server:
        episode = ask(server, tasks, frames_of, retries=2)
    assert episode.status == "engine_error" and why in episode.error and len(server.asked) == times
    assert not episode.turns and episode.reward["acc"] == 0.0


def test_an_endpoint_that_is_not_there_is_an_engine_error(tasks, frames_of, no_pause):
    with Server(ANSWER) as server:
        pass
    assert ask(server, tasks, frames_of, retries=1).status == "engine_error" and no_pause == [1.0]


def test_the_key_comes_from_the_named_variable_and_goes_nowhere_else(
        tasks, frames_of, monkeypatch, no_pause):
    monkeypatch.setenv("SOME_KEY", "s3cret-value")
    monkeypatch.setenv("OPENAI_API_KEY", "not-this-one")
    with Server(ANSWER) as server:
        good = ask(server, tasks, frames_of, key_variable="SOME_KEY")
        ask(server, tasks, frames_of)
    assert server.headers[0][1]["Authorization"] == "Bearer s3cret-value"
    assert "Authorization" not in server.headers[1][1]
    assert server.headers[0][0] == "/v1/chat/completions"
    with Server(401) as server:
        bad = ask(server, tasks, frames_of, key_variable="SOME_KEY")
    assert "s3cret" not in json.dumps([good.to_json(), bad.to_json(), server.asked])


def error(status, body, **headers):
    """-> a reply of an endpoint: status, JSON or text, headers."""
    return status, body, headers


@pytest.mark.parametrize("reply, wait, why", [
    ((401, {"error": "Unauthorized"}), 0, ("HTTP 401: Unauthorized", "--api-key-env")),
    ((401, {"error": {"message": "Incorrect key: s3cret-value."}}), 0, ("Incorrect key: ***.",)),
    ((403, {"detail": "no access"}), 0, ("HTTP 403: no access", "--api-key-env")),
    ((404, {"error": {"message": "The model `m` does not exist."}}), 0,
     ("The model `m` does not exist.", "--model m", "/v1")),
    ((400, {"message": "top_k is not known " + "x" * 900}), 0, ("HTTP 400: top_k is not known",)),
    ((503, "loading\x1b[2J"), 2, ("HTTP 503: loading", "server's log")),
])  # fmt: skip
@pytest.mark.parametrize("judge", [False, True])
def test_a_server_that_refuses_is_found_before_the_run(
        reply, wait, why, judge, monkeypatch, no_pause):
    """One line with the address, the server's words and the flag to look at, never the key."""
    monkeypatch.setenv("SOME_KEY", "s3cret-value\n")
    with Server(ANSWER, probe=error(*reply)) as server:
        engine = endpoint.OpenAIEngine(server.url, "m", key_variable="SOME_KEY", retries=2,
                                       is_judge=judge)
        with pytest.raises(launch.UserError) as refused:
            engine.knock()
        said = str(refused.value)
        assert server.url in said and "\n" not in said and len(said) < 450
        assert not any("s3cret" in part or "\x1b" in part for part in said.split())
        for part in why:
            part = part.replace("--api-key-env", "--judge-key-env") if judge else part
            assert (part.replace("--model", "--judge-model") if judge else part) in said
        assert server.probes == 1 + wait and not server.asked and len(no_pause) == wait
    with Server(ANSWER, probe=None) as server:  # content null, as of a model that still thinks
        endpoint.OpenAIEngine(server.url, "m").knock()
        assert server.probes == 1


@pytest.mark.parametrize("after, pause", [
    ("7", 7.0), ("0", 1.0), ("9999", 50.0), ("soon", 1.0), ("-3", 1.0), ("nan", 1.0),
    ("DATE", 20.0)])
@pytest.mark.parametrize("status", [429, 503])
def test_a_server_says_when_to_ask_again(after, pause, status, tasks, frames_of, no_pause):
    """In seconds or as an HTTP date; --server-wait bounds it."""
    from email.utils import formatdate

    after = formatdate(time.time() + 20, usegmt=True) if after == "DATE" else after
    with Server(error(status, "busy", **{"Retry-After": after}), ANSWER) as server:
        assert ask(server, tasks, frames_of, server_wait=50.0).status == "ok"
    (slept,) = no_pause
    assert slept == pytest.approx(pause, abs=2.0 if pause == 20 else 0)


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
            for episode in episodes.run(sampler, tasks[:1], episodes.Protocol(), 4, 6):
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
    assert evaluation.record_of(episode, "d", 4, "on", args)["reasoning"] == [thought]
    with Server(ANSWER) as server:
        plain = ask(server, tasks, frames_of)
    assert "reasoning" not in evaluation.record_of(plain, "d", 4, "on", args)
