"""
Tests of the endpoint client, OpenAIEngine in evaluation/endpoint.py: python -m pytest
tests/test_endpoint.py -q

Against an endpoint that speaks from a script.
"""
import argparse
import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from scripted import AGENT, ANSWER, Server, calls, play, play_one

import launch
import rollout
import video
from evaluation import endpoint
from plumbing import judge


@pytest.fixture
def no_retries(monkeypatch):
    monkeypatch.setattr(endpoint.OpenAIEngine, "retries", 0)


def ask(server, tasks, source, agent=AGENT, **more):
    engine, engine.codec = endpoint.OpenAIEngine([server.url], "some-model", **more), None
    try:
        return play_one(engine, tasks, source, agent)
    finally:
        engine.close()


def test_endpoint_gets_frames_after_their_times_and_one_user_turn_of_responses(tasks, frames_of):
    def reply(body):
        if "short window" in body["messages"][0]["content"]:
            return "a red square"
        return "<think>\n" + (ANSWER if body["messages"][3:] else calls((0, 8), (9, 5), (8, 16)))

    with Server(reply) as server:
        episode = ask(server, tasks, frames_of, prefill=True)
    assert episode.status == "ok" and episode.executed() == 2 and episode.context.ids == []
    assert episode.reward["fmt"] == 1.0
    # without the prefix, which was forced
    assert episode.turns == [calls((0, 8), (9, 5), (8, 16)), ANSWER]
    first, last = server.asked[0], server.asked[-1]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("some-model", 512, 0.7)
    parts = first["messages"][1]["content"]
    from PIL import Image

    head, data = parts[1]["image_url"]["url"].split(",")
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))), float)
    exact = video.load({"video": tasks[0]["video"], "frames": 4}, frames_of.root).images[0]
    assert head == "data:image/jpeg;base64" and np.abs(image - exact).mean() < 8
    # The forced start of the thought goes as the begun assistant turn, and the server is told to
    # continue it. The texts of messages: test_protocols.py.
    assert first["messages"][2:] == [{"role": "assistant", "content": "<think>\n"}]
    assert first["continue_final_message"] is True and first["add_generation_prompt"] is False
    assert last["messages"][2]["content"] == "<think>\n" + calls((0, 8), (9, 5), (8, 16))
    assert last["messages"][3]["content"].count("<tool_response>") == 3
    sub = next(body for body in server.asked if "short window" in body["messages"][0]["content"])
    assert "continue_final_message" not in sub and len(sub["messages"]) == 2


def test_fields_of_every_request_are_the_users(tasks, frames_of):
    with Server(ANSWER) as server:
        ask(server, tasks, frames_of, replace(AGENT, think_prefix=False),
            fields={"max_completion_tokens": 9, "max_tokens": None, "top_k": 20})
        ask(server, tasks, frames_of, replace(AGENT, think_prefix=False, tools=False))
    given, plain = server.asked
    assert given["max_completion_tokens"] == 9 and given["top_k"] == 20
    assert "max_tokens" not in given
    assert given["tools"] == rollout.tool_schema() and given["tool_choice"] == "none"
    assert "tools" not in plain and plain["max_tokens"] == 512 and plain["temperature"] == 0.7
    assert sum(p["type"] == "image_url" for p in plain["messages"][1]["content"]) == 4


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_is_refused_is_counted_and_never_an_answer(status, tasks, frames_of):
    """An error text that was graded could be a correct letter."""
    with Server(status) as server:
        episode = ask(server, tasks, frames_of)
    assert episode.status == "engine_error" and str(status) in episode.error
    assert not episode.turns and episode.reward["acc"] == 0.0 and len(server.asked) == 1


@pytest.mark.parametrize("reply", [
    401, 500, b"not json", b'{"choices": []}', b'{"choices": [{"message": {"content": [1]}}]}',
    b'{"choices": [{"finish_reason": "error", "message": {"content": "A"}}]}',
    b'{"error": "busy", "choices": [{"finish_reason": "stop", "message": {"content": "A"}}]}'])
def test_whatever_else_a_server_says_ends_the_run(reply, tasks, frames_of, no_retries):
    with Server(reply) as server, pytest.raises(launch.RunError, match="the same command goes on"):
        ask(server, tasks, frames_of)


def test_the_key_comes_from_the_named_variable_and_goes_nowhere_else(
        tasks, frames_of, monkeypatch, no_retries):
    monkeypatch.setenv("SOME_KEY", "s3cret-value\n")
    for name in ("API_KEY", "ORG_ID", "PROJECT_ID", "ADMIN_KEY"):
        monkeypatch.setenv(f"OPENAI_{name}", "not-this-one")
    with Server(ANSWER) as thief, Server(ANSWER) as server:
        monkeypatch.setenv("http_proxy", thief.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        good = ask(server, tasks, frames_of, key_variable="SOME_KEY")
        ask(server, tasks, frames_of)
        assert not thief.asked
    (path, headers), (_, others) = server.headers
    assert path == "/v1/chat/completions" and "Bearer s3cret-value" in headers.values()
    assert "Bearer no-key" in others.values() and "not-this-one" not in str(server.headers)
    with Server(ANSWER) as thief, Server((307, "", {"Location": thief.url})) as server:
        pytest.raises(launch.RunError, ask, server, tasks, frames_of, key_variable="SOME_KEY")
        assert not thief.asked
    echo = 401, {"error": {"message": "Incorrect key: s3cret-value."}}, {}
    with Server(echo) as server, pytest.raises(launch.RunError) as refused:
        ask(server, tasks, frames_of, key_variable="SOME_KEY")
    assert "s3cret" not in json.dumps([good.to_dict(), str(refused.value), server.asked])
    assert "***" in str(refused.value)


@pytest.mark.parametrize("reply", [(401, {"error": "Unauthorized"}), (503, "loading")])
def test_a_server_that_refuses_is_found_before_the_run(reply):
    with Server(ANSWER, probe=(*reply, {})) as server:
        engine = endpoint.OpenAIEngine([server.url], "m")
        with pytest.raises(launch.UserError, match=f"{server.url}.* {reply[0]}") as refused:
            engine.check_servers()
        assert "\n" not in str(refused.value) and not server.asked


def test_several_endpoints_take_turns(tasks, frames_of):
    """One of them answers with a list of parts, of which the text counts."""
    parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": ANSWER}]
    reply = {"choices": [{"finish_reason": "stop", "message": {"content": parts}}]}
    with Server(json.dumps(reply).encode()) as one, Server(ANSWER) as two:
        engine, engine.codec = endpoint.OpenAIEngine([one.url, two.url], "m", workers=2), None
        found = play(engine, tasks[:1], frames_of, replace(AGENT, tools=False), group=4)
        engine.close()
    assert [(e.status, e.turns) for e in found] == [("ok", [ANSWER])] * 4
    assert (len(one.asked), len(two.asked)) == (2, 2)


@pytest.mark.parametrize("url", ["me:pa55@host/v1", "https://host/v1?key=pa55"])
def test_an_address_with_a_password_is_refused_without_repeating_it(url):
    with pytest.raises(argparse.ArgumentTypeError, match="names a user") as refused:
        judge.base_url(url)
    assert "pa55" not in str(refused.value)
