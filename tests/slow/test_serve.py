"""
Tests of tools/serve.py: python -m pytest tests/slow/test_serve.py -q

The agent is a scripted engine behind a real server on this machine. Clients are httpx and, where
they are installed, openai and lmms-eval. `make test-page` runs the tests of its page.
"""
import base64
import io
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scripted import AGENT, Scripted, calls, turn_of

import chat
import rollout
import video
from evaluation import answers
from tools import ask, serve

httpx = pytest.importorskip("httpx", reason="httpx is not installed; vLLM brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; vLLM brings it")

FILM, QUESTION = "videos/rl-0000.mp4", "Which colours appear?"


class Running:
    """serve.py's application on a free port of this machine, with a scripted engine."""

    def __init__(self, codec, root, engine=None, key=None, **flags):
        defaults = dict(host="127.0.0.1", name="toy", type="open", frames=4, live=8, waiting=16,
                        seconds=60.0, max_mb=4.0)
        self.args = SimpleNamespace(**{**defaults, **flags})
        engine = self.engine = engine or Scripted(codec, answered)
        self.engine.close, source = lambda: None, rollout.VideoSource(str(root), video.FrameCache())
        self.store = serve.VideoStore(str(root), 2**24)
        self.agents = serve.Agents(rollout.RolloutWorker(engine, codec, source, AGENT), self.args)
        self.guard = serve.make_app(self.agents, self.store, self.args, key)
        self.server = serve.http_server(self.guard, self.agents, port=0, log_level="error")
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join()
        self.agents.close()
        shutil.rmtree(self.store.sent)

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


def asked_in_terminal(codec, toy):
    """The answer of tools/ask.py."""
    source = rollout.VideoSource(str(toy), video.FrameCache())
    sampler = rollout.RolloutWorker(Scripted(codec, answered), codec, source, AGENT)
    task = {"id": "q", "video": FILM, "question": QUESTION, "options": None, "answer": None,
            "type": "open"}
    (row,) = ask.ask(sampler, [task], 4)
    return row


# ---- answers


def test_answers_equal_those_of_the_terminal_for_every_way_to_name_a_film(running, codec, toy):
    server, wanted = running(), asked_in_terminal(codec, toy)
    ways = [FILM, "./" + FILM, f"file://{toy}/{FILM}", str(toy / FILM), as_data(toy / FILM)]
    kept = server.http.put("/videos", content=(toy / FILM).read_bytes()).json()["url"]
    for way in [*ways, kept]:
        response = server.post(film(way), text())
        assert content_of(response).split()[0] == "red"
        turns = [e["text"] for e in response.json()["trace"] if e["event"] == "turn"]
        assert turns[0] == wanted["turns"][0]
    # The file below --video-root has the same identity in both, so the frames have the same key.
    assert content_of(server.post(film(FILM), text())) == answers.answer_or_tail(
        wanted["turns"], True)
    names = {r.items[0].spec["video"] for r in server.engine.mains() if r.items}
    assert sum(len(name) == 64 for name in names) == 1, "a film that is sent twice is kept once"


def test_the_preset_sets_the_type_of_a_question_that_names_none(running, codec, toy, monkeypatch):
    """The toy answers with lists: asked for an open answer, it babbles."""
    monkeypatch.setattr(sys, "argv", f"serve.py --preset toy --ckpt {toy}/init --port 0".split())
    args = serve.parse_args()
    args.socket.close()
    server = running(type=args.type)
    for fields, kind in (({}, "list"), ({"answer_type": "grounding"}, "grounding"),
                         ({"options": ["red", "blue"]}, "mcq")):
        assert server.post(**fields).is_success
        asked = chat.decode(codec, server.engine.mains()[-1].ids)
        assert rollout.ANSWER_STYLES[kind] in asked
    assert serve.question_task(QUESTION)["type"] == "open"


def test_a_type_with_commas_in_a_data_url():
    """A browser writes both codecs of a recording with sound."""
    content = base64.b64encode(b"any").decode()
    for kind in ("video/webm", "video/webm;codecs=vp8", "video/webm;codecs=vp8,opus"):
        assert serve.data_of(f"data:{kind};base64,{content}") == b"any"


# ---- bad requests


def test_a_question_sets_the_frames_of_its_overview(running):
    server = running()
    for fields, times in (({}, 4), ({"frames": 9}, 9), ({"fps": 0.25}, 16), ({"fps": 0.001}, 1)):
        assert len(server.post(**fields).json()["trace"][0]["times"]) == times
    server.agents.sampler = replace(server.agents.sampler, agent=replace(AGENT, max_model_len=64))
    response = server.post()
    assert response.status_code == 400 and "ask with fewer frames" in response.text


def test_frames_as_images_options_and_stream_null(running):
    server, words = running(), QUESTION + "\n(A) red\n(B) blue: dark\nAnswer with the letter."
    times = [part for n in range(2) for part in (text(f"<{n + 1.5} seconds>"), image(jpeg(n)))]
    for content, more, seconds in ((times, {}, [1.5, 2.5]),
                                   (times[1::2], {"fps": 0.5}, [0.0, 2.0])):
        response = server.post(*content, text(words), stream=None, tools=[], **more)
        assert content_of(response).startswith("red")
        assert response.json()["trace"][0]["times"] == seconds
    assert serve.question_task(words) == {"question": QUESTION, "options": ["red", "blue: dark"],
        "answer": None, "type": "mcq", "style": "Answer with the letter."}


def test_a_film_is_never_a_page(running, toy, tmp_path):
    """A film may be named evil.html and hold a script beside its frames."""
    server, server.store.root = running(), str(tmp_path)
    for name, kind in (("evil.html", "video/mp4"), ("a.svg", "video/mp4"), ("b", "video/mp4"),
                       ("a.mp4", "video/mp4"), ("a.webm", "video/webm")):
        shutil.copy(toy / FILM, tmp_path / name)
        headers = server.http.get(f"/videos/{name}").headers
        assert headers["Content-Type"] == kind
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"] == "sandbox"


def test_a_key_is_asked_for(running):
    server = running(key=b"secret", host="0.0.0.0")
    assert server.post().status_code == 401
    for given in ("Bearer wrong", "Bearer \xe4", "secret2"):
        response = server.http.get("/v1/models", headers={"Authorization": given.encode("latin-1")})
        assert response.status_code == 401 and "secret" not in response.text
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).is_success
    assert server.http.get("/health").status_code == server.http.get("/").status_code == 200


# ---- the command


def held(codec):
    """An engine that answers nothing until .go is set."""
    engine, engine.go = Scripted(codec, answered), threading.Event()
    engine.hold = lambda request: not engine.go.is_set()
    return engine


# ---- answers


def as_jpeg(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def jpeg(value):
    return "data:image/jpeg;base64," + as_jpeg(np.full((64, 96, 3), value, np.uint8))


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


# ---- bad requests


def bad_bodies():
    user = {"role": "user"}
    return {"no messages": {}, "content a number": {"messages": [{**user, "content": 7}]},
        "question empty": body_of(film(), text("  ")), "JSON nested too deep": "[" * 100_000,
        "item of another type": body_of(film(), text(), {"type": "input_audio", "input_audio": {}}),
        "surrogate": body_of(film(), text("\ud800")), "another model": body_of(model="gpt"),
        "temperature": body_of(temperature=3), "film missing": body_of(film("none.mp4"), text()),
        "film outside": body_of(film("../../etc/passwd"), text()), "no film": body_of(text()),
        "film outside, escaped": body_of(film("file:%2e%2e/%2e%2e/etc/passwd"), text()),
        "film of a network": body_of(film("http://127.0.0.1:9/x.mp4"), text()), "no JSON": "{",
        "film no video": body_of(film("tasks.jsonl"), text()), "frames 1025": body_of(frames=1025),
        "film not base64": body_of(film("data:video/mp4;base64,@@@"), text()),
        "no base64": body_of(text("<1.0 seconds>"), image("data:image/png;base64,@"), text())}


def test_every_bad_request_is_refused_in_one_line_and_the_next_one_answered(running, toy):
    server, wrong = running(), {}
    for name, body in bad_bodies().items():
        given = json.dumps(body) if isinstance(body, dict) else body
        response = server.http.post("/v1/chat/completions", content=given,
                                    headers={"Content-Type": "application/json"})
        try:
            line = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            line = None
        good = (response.status_code in (400, 404, 413) and line and "\n" not in line
                and len(line) < 400 and str(toy) not in line and "videos-" not in line)
        if not good:
            wrong[name] = response.status_code, response.text[:200]
    assert not wrong and server.agents.taken == 0 and not +server.store.used
    assert content_of(server.post()) and "at most 16 frames" in server.post(frames=1025).text
    server.store.root += "-away"
    assert server.http.get("/videos").status_code == 503


@pytest.mark.parametrize("method, path, headers, status", [
    ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}, 415),
    ("POST", "/v1/chat/completions", {"Host": "example.org"}, 403), ("PUT", "/videos", {}, 400),
    ("GET", "/videos/%2e%2e/%2e%2e/etc/passwd", {}, 404), ("GET", "/videos/videos", {}, 404),
    ("GET", "/videos/../../etc/passwd", {}, 404), ("GET", "/episodes/none", {}, 404)])
def test_the_door_is_guarded(running, method, path, headers, status):
    server = running()
    request = httpx.Request(method, server.url, headers=headers)
    # The path as it is: a client would tidy it up.
    request.url = httpx.URL(server.url).copy_with(raw_path=path.encode())
    response = server.http.send(request)
    assert response.status_code == status and "error" in response.json()


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


# ---- the command


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
    assert not +server.store.used
    server.engine.go.set()
    assert content_of(server.post())


def test_above_videos_gb_the_video_unused_for_the_longest_goes(toy, start, monkeypatch):
    made = []
    monkeypatch.setattr(rollout, "make_engine", lambda *_: None)
    monkeypatch.setattr(serve, "Agents", lambda *_: sys.exit(5))
    monkeypatch.setattr(serve, "VideoStore", lambda *given: made.append(given))
    start(serve, *f"--preset toy --ckpt {toy}/init --port 0 --videos-gb {20 / 2**30}".split())
    monkeypatch.undo()
    store = serve.VideoStore(*made[0])
    names = [store.keep_upload({"": bytes([n]) * 7}) for n in range(2)]
    for n, name in enumerate(names):
        os.utime(os.path.join(store.sent, name), (n, n))
    store.acquire_upload(names[0])  # a question looks at it
    names.append(store.keep_upload({"": b"new" * 3}))
    assert set(os.listdir(store.sent)) == {names[0], names[2]}
    shutil.rmtree(store.sent)


def test_a_server_ends_while_a_body_is_half_sent(running):
    import signal
    import socket

    server = running()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(b"PUT /videos HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        server.until(lambda: server.guard.in_flight == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        server.until(lambda: not server.thread.is_alive())
    assert server.guard.in_flight == 0
