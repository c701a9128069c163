"""
Tests of tools/serve.py: python -m pytest tests/test_serve.py -q

The agent is a scripted engine behind a real server on this machine. Clients are httpx and, where
they are installed, openai and lmms-eval. `make test-page` runs the tests of its page.
"""
import base64
import json
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from scripted import AGENT, Scripted, calls, turn_of

import rollout
import video
from tools import ask, serve

httpx = pytest.importorskip("httpx", reason="httpx is not installed; vLLM brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; vLLM brings it")

FILM = "videos/rl-0000.mp4"
QUESTION = "Which colours appear?"


class Running:
    """serve.py's application on a free port of this machine, with a scripted engine."""

    def __init__(self, codec, root, engine=None, key=None, **flags):
        defaults = dict(host="127.0.0.1", name="toy", frames=4, live=8, waiting=16, seconds=60.0,
                        max_mb=4.0)
        self.args = SimpleNamespace(**{**defaults, **flags})
        self.engine = engine or Scripted(codec, answered)
        self.engine.close = lambda: None
        source = rollout.Source(str(root), video.FrameCache())
        self.films = serve.Films(str(root), 2**24)
        self.agents = serve.Agents(rollout.Sampler(self.engine, codec, source, AGENT), self.args)
        self.guard = serve.make_app(self.agents, self.films, self.args, key)
        self.server = serve.http_server(self.guard, self.agents, port=0, log_level="error")
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join()
        self.agents.close()
        shutil.rmtree(self.films.sent)

    def post(self, *content, **fields):
        return self.http.post("/v1/chat/completions", json=body_of(*content, **fields))

    def until(self, holds, seconds=20):
        """Waits until holds() is true."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)


def answered(request):
    """Two windows in the first turn, then an answer that tells the film's frames apart."""
    if turn_of(request) == 0:
        return calls((0, 8), (16, 24))
    return f"Seen.\n</think>\n<answer>red {request.items[0].key[:6]}</answer>"


def film(url=FILM):
    return {"type": "video_url", "video_url": {"url": url}}


def text(words=QUESTION):
    return {"type": "text", "text": words}


def body_of(*content, **fields):
    return {"messages": [{"role": "user", "content": list(content) or [film(), text()]}], **fields}


def content_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def as_data(path):
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def running(codec, toy):
    started = []

    def start(engine=None, **more):
        started.append(Running(codec, toy, engine, **more))
        return started[-1]

    yield start
    for server in started:
        server.close()


def asked_in_terminal(codec, toy, name=FILM, question=QUESTION, options=None):
    """The answer of tools/ask.py."""
    source = rollout.Source(str(toy), video.FrameCache())
    sampler = rollout.Sampler(Scripted(codec, answered), codec, source, AGENT)
    task = {"id": "q", "video": name, "question": question, "options": options, "answer": None,
            "type": "mcq" if options else "open"}
    (row,) = ask.ask(sampler, [task], 4)
    return row


# ---- answers


def test_answers_equal_those_of_the_terminal_for_every_way_to_name_a_film(running, codec, toy):
    server = running()
    wanted = asked_in_terminal(codec, toy)
    ways = [FILM, "./" + FILM, f"file://{toy}/{FILM}", str(toy / FILM), as_data(toy / FILM)]
    kept = server.http.put("/films", content=(toy / FILM).read_bytes()).json()["url"]
    for way in [*ways, kept]:
        response = server.post(film(way), text())
        assert content_of(response).split()[0] == "red"
        turns = [e["text"] for e in response.json()["trace"] if e["event"] == "turn"]
        assert turns[0] == wanted["turns"][0]
    # The file below --video-root has the same identity in both, so the frames have the same key.
    assert content_of(server.post(film(FILM), text())) == rollout.rewards.answer_or_tail(
        wanted["turns"], True)
    names = {r.items[0].spec["video"] for r in server.engine.mains() if r.items}
    digests = {name for name in names if len(name) == 64}
    assert len(digests) == 1, "a film that is sent twice is kept once"


def test_a_stream_tells_the_events_and_ends_on_the_answer(running):
    server = running()
    whole = server.post(stream=None).json()  # as OpenAI allows
    with server.http.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    events = [event for chunk in chunks for event in chunk.get("trace", [])]
    kinds = [event["event"] for event in events]
    # Two episodes: which of two windows is decoded first is a matter of chance.
    assert sorted(kinds) == sorted(event["event"] for event in whole["trace"])
    assert sorted(set(kinds)) == ["answer", "call", "overview", "summary", "turn", "window"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = whole["choices"][0]["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_text_without_a_film_is_answered_by_the_same_weights(running, codec):
    server = running(Scripted(codec, lambda request: "hm</think> hello"))
    server.engine.main = lambda request: "hm</think> hello"
    response = server.post(text("Hello?"), max_tokens=100)
    assert content_of(response) == "hello"
    assert not server.engine.requests[0].frames


# ---- bad requests


def test_a_request_has_bounds_on_its_texts_and_items(running):
    server = running(max_mb=8.0)
    image = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}
    bounds = {
        "text": (body_of(text("red blue " * 8_000)), 400, "65,536"),
        "text of several messages": ({"messages": [{"role": role, "content": "x" * 40_000}
                                                   for role in ("system", "user")]}, 400, "65,536"),
        "options": (body_of(film(), text(), options=["x" * 40_000] * 2), 400, "65,536"),
        "items": (body_of(*[image] * 2_000, text(), fps=1), 400, "2,000"),
        "messages": ({"messages": [{"role": "user", "content": "x"}] * 2_001}, 400, "2000"),
        "lists beside": (body_of(text(), x=[[]] * 60_000), 413, "100,000"),
    }
    for name, (body, status, why) in bounds.items():
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == status and why in response.text, (name, response.text[:300])
    assert not server.engine.requests


def test_bodies_that_are_here_at_once_are_bounded(running):
    """Three requests of which two fit; then the memory is free again."""
    server = running(max_mb=0.1)
    guard = server.guard
    guard.in_flight = 2 * guard.most - 1_000  # of other requests
    long = {"messages": [{"role": "assistant", "content": "x" * 5_000}, *body_of()["messages"]]}
    refused = server.http.post("/v1/chat/completions", json=long)
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "2"
    assert guard.in_flight == 2 * guard.most - 1_000
    guard.in_flight = 0
    assert content_of(server.http.post("/v1/chat/completions", json=long))
    assert server.http.put("/films", content=b"x" * 1_000).status_code == 200
    server.until(lambda: guard.in_flight == 0)


def test_a_body_that_does_not_come_in_time_is_given_up(running):
    import socket

    server = running(seconds=0.3)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(b"PUT /films HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        client.settimeout(20)
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
    server.until(lambda: server.guard.in_flight == 0)


def test_a_server_ends_while_a_body_is_half_sent(running, capfd):
    import signal
    import socket

    server = running()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(b"PUT /films HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        server.until(lambda: server.guard.in_flight == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        server.until(lambda: not server.thread.is_alive())
    assert server.guard.in_flight == 0 and "Traceback" not in capfd.readouterr().err


def test_a_film_is_never_a_page(running, toy, tmp_path):
    """A film may be named evil.html and hold a script beside its frames."""
    server = running()
    server.films.root = str(tmp_path)
    for name, kind in (("evil.html", "video/mp4"), ("a.svg", "video/mp4"), ("b", "video/mp4"),
                       ("a.mp4", "video/mp4"), ("a.webm", "video/webm")):
        shutil.copy(toy / FILM, tmp_path / name)
        headers = server.http.get(f"/films/{name}").headers
        assert headers["Content-Type"] == kind
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == "sandbox"


def test_a_key_is_asked_for(running):
    server = running(key=b"secret", host="0.0.0.0")
    assert server.post().status_code == 401
    for given in ("Bearer wrong", "Bearer \xe4", "secret2"):
        response = server.http.get("/v1/models", headers={"Authorization": given.encode("latin-1")})
        assert response.status_code == 401 and "secret" not in response.text
    assert server.http.get("/v1/models",
                           headers={"Authorization": "Bearer secret"}).status_code == 200
    assert server.http.get("/health").status_code == server.http.get("/").status_code == 200


# ---- places, clients that leave, time


# ---- the command


def test_the_page_holds_the_parts_of_the_other_page():
    page, policy = serve.page_text()
    assert "/*STYLE*/" not in page and "function make(" in page and "--accent" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "'none'" in policy
