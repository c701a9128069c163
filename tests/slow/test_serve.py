"""
More of tools/serve.py: bad requests, doors, many clients:
python -m pytest tests/slow/test_serve.py -q
"""
import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import Scripted
from test_serve import (
    answered,
    asked_in_terminal,
    body_of,
    content_of,
    film,
    httpx,
    running,  # noqa: F401
    text,
)

import rollout
from tools import serve


def held(codec):
    """An engine that answers nothing until .go is set."""
    engine = Scripted(codec, answered)
    engine.go = threading.Event()
    engine.hold = lambda request: not engine.go.is_set()
    return engine


# ---- answers


def test_eight_clients_of_openai_at_once(running, codec, toy):
    openai = pytest.importorskip("openai", reason="openai is not installed; vLLM brings it")
    server = running()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0,
                           http_client=httpx.Client(trust_env=False))
    assert [m.id for m in client.models.list()] == ["toy"]

    def one(n):
        name = f"videos/rl-000{n % 6}.mp4"
        said = client.chat.completions.create(
            model="toy", messages=body_of(film(name), text())["messages"], max_tokens=16)
        return name, said.choices[0].message.content, said.usage.total_tokens

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(one, range(16)))
    for name, said, tokens in got:
        row = asked_in_terminal(codec, toy, name)
        assert said == rollout.rewards.answer_or_tail(row["turns"], True)
        used = [row["ids"], *(c["sub"]["ids"] for c in row["calls"] if "sub" in c)]
        assert tokens == sum(map(len, used))


# ---- frames as images


def jpeg(value):
    import io

    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 96, 3), value, np.uint8)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


# ---- bad requests


def bad_bodies():
    user = {"role": "user"}
    return {
        "no messages": {},
        "messages empty": {"messages": []},
        "no user": {"messages": [{"role": "assistant", "content": "x"}]},
        "content a number": {"messages": [{**user, "content": 7}]},
        "question empty": body_of(film(), text("  ")),
        "item of another type": body_of(film(), text(), {"type": "input_audio", "input_audio": {}}),
        "surrogate": body_of(film(), text("\ud800")),
        "another model": body_of(model="gpt"),
        "temperature": body_of(temperature=3),
        "temperature NaN": '{"temperature": NaN, "messages": [{"role":"user","content":"x"}]}',
        "n 2": body_of(n=2),
        "seed too large": body_of(seed=2**70),
        "tools": body_of(tools=[{"type": "function"}]),
        "27 options": body_of(options=["x"] * 27),
        "fps 0": body_of(image(jpeg(0)), text(), fps=0),
        "film outside": body_of(film("../../etc/passwd"), text()),
        "film outside, escaped": body_of(film("file:%2e%2e/%2e%2e/etc/passwd"), text()),
        "film of a network": body_of(film("http://127.0.0.1:9/x.mp4"), text()),
        "film missing": body_of(film("videos/none.mp4"), text()),
        "film with a zero byte": body_of(film("a\0b"), text()),
        "film no video": body_of(film("tasks.jsonl"), text()),
        "film not base64": body_of(film("data:video/mp4;base64,@@@"), text()),
        "image not base64": body_of(text("<1.0 seconds>"), image("data:image/png;base64,@"),
                                    text()),
        "times that fall": body_of(text("<5.0 seconds>"), image(jpeg(1)), text("<2.0 seconds>"),
                                   image(jpeg(2)), text()),
        "no JSON": "{",
        "JSON nested too deep": "[" * 100_000,
        "not UTF-8": b'{"messages": "\xff\xfe"}',
    }


def test_every_bad_request_is_refused_in_one_line_and_the_next_one_answered(running, toy):
    server = running()
    wrong = {}
    for name, body in bad_bodies().items():
        given = json.dumps(body) if isinstance(body, dict) else body
        response = server.http.post("/v1/chat/completions", content=given,
                                    headers={"Content-Type": "application/json"})
        try:
            line = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            line = None
        good = (response.status_code in (400, 404, 413) and line and "\n" not in line
                and len(line) < 400 and str(toy) not in line and "films-" not in line)
        if not good:
            wrong[name] = response.status_code, response.text[:200]
    assert not wrong
    assert server.agents.taken == 0 and not +server.films.used
    assert content_of(server.post())


@pytest.mark.parametrize("method, path, headers, status", [
    ("POST", "/v1/chat/completions", {"Host": "example.org"}, 403),
    ("GET", "/", {"Host": "example.org:80"}, 403),
    ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
    ("POST", "/v1/chat/completions", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ("POST", "/v1/embeddings", {"Content-Type": "application/json"}, 404),
    ("GET", "/v1/chat/completions", {}, 405),
    ("GET", "/films/../../etc/passwd", {}, 404),
    ("GET", "/films/%2e%2e/%2e%2e/etc/passwd", {}, 404),
    ("GET", "/films/videos", {}, 404),
    ("GET", "/episodes/none", {}, 404),
    ("PUT", "/films", {}, 400),
])
def test_the_door_is_guarded(running, method, path, headers, status):
    server = running()
    request = httpx.Request(method, server.url, headers=headers)
    # The path as it is: a client would tidy it up.
    request.url = httpx.URL(server.url).copy_with(raw_path=path.encode())
    response = server.http.send(request)
    assert response.status_code == status and "error" in response.json()


# ---- places, clients that leave, time


def test_a_server_that_ends_tells_its_clients(running, codec, capfd):
    import signal

    server = running(held(codec))
    with ThreadPoolExecutor(4) as pool:
        got = [pool.submit(server.post, stream=n % 2 == 0) for n in range(4)]
        server.until(lambda: len(server.engine.waiting) == 4)
        server.server.handle_exit(signal.SIGTERM, None)
        told = [done.result() for done in got]
    assert [response.status_code for response in told] == [200, 503, 200, 503]
    assert all("the server ends" in response.text for response in told)
    server.thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_an_engine_that_dies_answers_503_to_all(running, codec, capsys):
    engine = held(codec)
    server = running(engine)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.post) for _ in range(3)]
        server.until(lambda: len(engine.waiting) == 3)

        def poll():
            raise RuntimeError("out of memory at /home/somebody")

        engine.poll = poll
        got = [done.result() for done in waiting]
    assert [response.status_code for response in got] == [503] * 3
    assert server.post().status_code == server.http.get("/health").status_code == 503
    assert "/home" not in server.post().text


# ---- films of clients


# ---- the command


def test_flags_that_let_others_in_need_a_key(monkeypatch):
    import launch

    def flags(*given):
        monkeypatch.setattr("sys.argv", ["serve.py", "--ckpt", "c", "--port", "0", *given])
        return serve.parse_args()

    assert flags().host == "127.0.0.1" and flags().temperature == 0
    with pytest.raises(launch.UserError, match="--api-key-env"):
        flags("--host", "0.0.0.0")
    with pytest.raises(launch.UserError, match="not set"):
        flags("--api-key-env", "NO_SUCH_KEY")
    monkeypatch.setenv("A_KEY", "x")
    assert flags("--host", "0.0.0.0", "--api-key-env", "A_KEY").api_key_env == "A_KEY"
    # A port that cannot be had is told of before the engine is loaded, also if the other server is
    # loading its engine.
    with flags().socket as taken:
        with pytest.raises(launch.UserError, match="in use"):
            flags("--port", str(taken.getsockname()[1]))
    with pytest.raises(launch.UserError, match="0-65535"):
        flags("--port", "99999")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_episode(running, codec, stream):
    server = running(held(codec), waiting=3)
    with pytest.raises(httpx.ReadTimeout):
        with httpx.stream("POST", server.url + "/v1/chat/completions", trust_env=False,
                          json=body_of(stream=stream), timeout=0.5) as response:
            for _ in response.iter_raw():
                pass
    server.until(lambda: server.agents.taken == 0 and not server.agents.jobs)
    assert not server.agents.pump.waiting, "the engine still has its request"
    assert not +server.films.used
    server.engine.go.set()
    assert content_of(server.post())
