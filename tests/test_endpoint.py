"""
Tests of the endpoint client, OpenAIEngine in evaluation/endpoint.py: python -m pytest
tests/test_endpoint.py -q

Against an endpoint that speaks from a script; test_server.py asks a real server.
"""
import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from scripted import AGENT, ANSWER, Server, calls, play_one

import launch
import rollout
import video
from evaluation import endpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_pause(monkeypatch):
    pauses = []

    async def pause(self, seconds):
        pauses.append(seconds)

    monkeypatch.setattr(endpoint.OpenAIEngine, "pause", pause)
    return pauses


def ask(server, tasks, source, agent=AGENT, **more):
    engine, engine.codec = endpoint.OpenAIEngine(server.url, "some-model", **more), None
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
    assert [m["role"] for m in last["messages"]] == "system user assistant user assistant".split()
    assert last["messages"][2]["content"] == "<think>\n" + calls((0, 8), (9, 5), (8, 16))
    answers = last["messages"][3]["content"].split("\n</tool_response>\n<tool_response>\n")
    assert len(answers) == 3 and "reversed" in answers[1] and answers[0].endswith("a red square")
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
    assert "tools" not in plain and plain["max_tokens"] == 512 and plain["temperature"] == 0.7
    assert sum(p["type"] == "image_url" for p in plain["messages"][1]["content"]) == 4


def test_the_text_of_a_list_of_parts_is_the_answer(tasks, frames_of):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "red?"}]}
    message = {"content": [thought, {"type": "text", "text": ANSWER}]}
    reply = {"choices": [{"finish_reason": "stop", "message": message}]}
    with Server(json.dumps(reply).encode()) as server:
        episode = ask(server, tasks, frames_of)
    assert episode.turns == [ANSWER]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_endpoint_errors_that_may_pass_are_tried_again(status, tasks, frames_of, no_pause):
    with Server(status, status, ANSWER) as server:
        episode = ask(server, tasks, frames_of)
    assert episode.status == "ok" and len(server.asked) == 3 and no_pause == [1.0, 2.0]


@pytest.mark.parametrize("reply, times, why", [
    (400, 1, "HTTP 400: Error response"), (403, 1, "HTTP 403"), (500, 3, "HTTP 500"),
    (401, 3, "Message: Unauthorized."),  # a gateway's, while it restarts: the probe is answered
    *((code, 3, f"HTTP {code}") for code in (404, 302, 424, 405, 421)),
    (b"not json", 3, "bad answer"), (b'{"choices": []}', 3, "bad answer"),
    (b'{"choices": [{"message": {"content": [1]}}]}', 3, "bad answer"),
    (b'{"choices": CUT', 3, "RemoteProtocolError"),
    *((b'{"choices": [{"finish_reason": "%b", "message": {"content": "A"}}]}' % reason, 3,
       "broke off") for reason in (b"abort", b"network_error", b"cancelled", b"TIMEOUT")),
    (b'{"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 0}}', 3, "broke"),
    (b'{"choices": [{"message": {"content": ""}}]}', 3, "broke off: none"),  # a gateway's
    (b'{"error": "busy", "choices": [{"message": {"content": "A"}}]}', 3, "broke off: busy")])
def test_endpoint_errors_end_the_episode_and_never_count_as_an_answer(
        reply, times, why, tasks, frames_of, no_pause):
    """An error text that was graded could be a correct letter."""
    with Server(reply) as server:
        episode = ask(server, tasks, frames_of, retries=2)
    assert episode.status == "engine_error" and why in episode.error and len(server.asked) == times
    assert not episode.turns and episode.reward["acc"] == 0.0
    assert (launch.MACHINE in episode.error) == (times > 1)  # asked again: eval.py ends with 1


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
    assert "s3cret" not in json.dumps([good.to_dict(), bad.to_dict(), server.asked])


@pytest.mark.parametrize("reply, wait, why", [
    ((401, {"error": "Unauthorized"}), 0, ("HTTP 401: Unauthorized", "--api-key-env")),
    ((401, {"error": {"message": "Incorrect key: s3cret-value."}}), 0, ("Incorrect key: ***.",)),
    ((404, {"error": {"message": "The model `m` does not exist."}}), 0,
     ("The model `m` does not exist.", "--model m", "/v1")),
    ((400, {"message": "top_k is not known " + "x" * 900}), 0, ("HTTP 400: top_k is not known",)),
    ((503, "loading\x1b[2J"), 2, ("HTTP 503: loading", "server's log"))])
def test_a_server_that_refuses_is_found_before_the_run(reply, wait, why, monkeypatch, no_pause):
    """One line with the address, the server's words and the flag to look at, never the key."""
    monkeypatch.setenv("SOME_KEY", "s3cret-value\n")
    with Server(ANSWER, probe=(*reply, {})) as server:
        engine = endpoint.OpenAIEngine(server.url, "m", key_variable="SOME_KEY", retries=2)
        with pytest.raises(launch.UserError) as refused:
            engine.check_servers()
        said = str(refused.value)
        assert server.url in said and "\n" not in said and len(said) < 450
        assert not any("s3cret" in part or "\x1b" in part for part in said.split())
        for part in why:
            assert part in said
        assert server.probes == 1 + wait and not server.asked and len(no_pause) == wait
    with Server(ANSWER, probe=None) as server:  # content null, as of a model that still thinks
        endpoint.OpenAIEngine(server.url, "m").check_servers()
        assert server.probes == 1
