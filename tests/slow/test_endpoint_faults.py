"""
Tests of the client of OpenAI-compatible endpoints against servers that misbehave:
python -m pytest tests/slow/test_endpoint_faults.py -q
"""
import http.server
import json
import sys
import threading
import time

import pytest

import eval as evaluation
import grpo
import launch
import rollout
from evaluation import endpoint
from evaluation.endpoint import ChatRequest

ANSWER = json.dumps({"model": "m", "choices": [{"finish_reason": "stop",
                                                "message": {"content": "<answer>A</answer>"}}]})


@pytest.fixture
def serve():
    """serve(reply) -> url of a server; reply(handler) writes the answer to a POST. Its
    list .seen holds the headers of all requests."""
    running = []

    def serve(reply):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.body = self.rfile.read(int(self.headers["Content-Length"]))
                server.seen.append(dict(self.headers))
                try:
                    reply(self)
                except OSError:  # the client has left
                    pass

            do_GET = do_POST

            def log_message(self, *_):
                pass

        server, server.seen = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.url = f"http://localhost:{server.server_port}/v1"
        running.append(server)
        return server

    yield serve
    for server in running:
        server.shutdown()
        server.server_close()


def whole(handler, content=None):
    content = ANSWER.encode() if content is None else content
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def drip(handler):
    """A reply that goes on with a byte every 50 ms."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def ask(url, monkeypatch, **more):
    monkeypatch.setenv("SOME_KEY", "secret-of-the-user")
    engine = endpoint.OpenAIEngine(url, "m", key_variable="SOME_KEY", retries=0, **more)
    engine.submit(ChatRequest("1", [], [], [], [], 16, 0.0, 0, [{"role": "user", "content": "?"}]))
    until, found = time.monotonic() + 20, []
    while not found and time.monotonic() < until:
        found = engine.poll()
    assert found, "no completion within 20 s"
    engine.close()
    return found[0]


def test_a_run_ends_if_no_server_answers_for_server_wait(monkeypatch):
    away = "http://127.0.0.1:9/v1"
    with pytest.raises(launch.UserError, match="no server has answered for 0.5 s"):
        ask(away, monkeypatch, give_up=1, server_wait=0.5)
    assert "ConnectError" in ask(away, monkeypatch, give_up=0).error


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect(serve, monkeypatch, status):
    thief = serve(whole)

    def away(handler):
        handler.send_response(status)
        handler.send_header("Location", f"{thief.url}/chat/completions")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server = serve(away)
    done = ask(server.url, monkeypatch)
    assert done.error == f"{launch.MACHINE}HTTP {status}" and not thief.seen
    assert server.seen[0]["Authorization"] == "Bearer secret-of-the-user"


def test_the_key_does_not_go_through_a_proxy_of_the_environment(serve, monkeypatch):
    thief, server = serve(whole), serve(whole)
    monkeypatch.setenv("http_proxy", thief.url.removesuffix("/v1"))
    monkeypatch.delenv("no_proxy", raising=False)
    done = ask(server.url, monkeypatch)
    assert done.text == "<answer>A</answer>" and not done.error
    assert not thief.seen and len(server.seen) == 1


def test_a_server_that_drips_is_left_when_the_time_of_the_request_is_over(serve, monkeypatch):
    began = time.monotonic()
    done = ask(serve(drip).url, monkeypatch, timeout=1.0)
    assert "no whole answer within 1 s" in done.error and time.monotonic() - began < 15


def test_request_timeout_of_the_command_is_that_time(serve, start, toy, tmp_path):
    flags = f"--engine openai --base-url {serve(drip).url} --model m --out {tmp_path}/out"
    code, _, err = start(evaluation, *flags.split(), "--data", toy / "eval.jsonl", "--set",
                         "request_timeout=0.5", "--set", "retries=0")
    assert code == 2 and "no whole answer within 0.5 s" in err


# ------------------------------------------------------------------------------------------------
# Bytes and secrets


def endless(handler):
    """A reply whose body never ends."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**20)
        handler.server.sent = getattr(handler.server, "sent", 0) + 1


def test_the_bytes_of_a_reply_are_bounded(serve, monkeypatch):
    server = serve(endless)
    done = ask(server.url, monkeypatch)
    assert done.error == "bad answer: more than 16 MiB" and not done.text
    assert server.sent < 40  # MiB, those under way in buffers included


def escaped(text):
    return "".join(f"\\u{ord(c):04x}" for c in text)


@pytest.mark.parametrize("where", ["text", "escapes", "thought", "message", "page", "status line"])
def test_a_key_that_a_server_repeats_is_masked(serve, monkeypatch, where):
    def echo(handler):
        key = handler.headers["Authorization"]
        if where == "status line":
            handler.wfile.write(f"{key}\r\n\r\n".encode())
        elif where in ("message", "page"):
            said = f"<p>{key}</p>" if where == "page" else json.dumps({"error": {"message": key}})
            handler.send_response(400)
            handler.end_headers()
            handler.wfile.write(said.encode())
        else:
            name = "reasoning_content" if where == "thought" else "content"
            key = escaped(key) if where == "escapes" else key
            whole(handler, b'{"model": "m", "choices": [{"message": {"%s": "so %s"}}]}'
                  % (name.encode(), key.encode()))

    done = ask(serve(echo).url, monkeypatch)
    assert "secret-of-the-user" not in repr(done) and "Bearer ***" in repr(done)


@pytest.mark.parametrize("url", ["me:pa55@host/v1", "https://host/v1?key=pa55"])
@pytest.mark.parametrize("script, flag", [(grpo, "--judge-url"), (rollout, "--judge-url"),
                                          (evaluation, "--judge-url"), (evaluation, "--base-url")])
def test_an_address_with_a_password_is_refused_without_repeating_it(
        monkeypatch, capsys, script, flag, url):
    monkeypatch.setattr(sys, "argv", ["script.py", "--ckpt", "c", "--data", "d", flag, url])
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"argument {flag}: the address names a user" in said
    assert "pa55" not in said
