"""
Tests of tools/serve.py: python -m pytest tests/test_serve.py -q

The agent is a scripted engine behind the real application; the client is openai's own.
tests/slow/test_serve_page.py opens the page in a browser.
"""
import base64
import contextlib
import json
import shutil
import sys
from dataclasses import replace

import openai
import pytest
from fastapi.testclient import TestClient
from scripted import AGENT, Scripted, calls, turn_of

import chat
import rollout
import video
from tools import ask, serve

VIDEO, QUESTION = "videos/rl-0000.mp4", "Which colours appear?"


def answered(request):
    """Two windows in the first turn, then an answer that tells the video's frames apart."""
    if turn_of(request) == 0:
        return calls((0, 8), (16, 24))
    return f"Seen.\n</think>\n<answer>red {request.items[0].key[:6]}</answer>"


def agent_of(codec, root, uploads, engine=None, kind="open"):
    """-> (serve.Agent, its scripted engine)."""
    engine = engine or Scripted(codec, answered)
    source = video.VideoSource(str(root), video.FrameCache())
    worker = rollout.RolloutWorker(engine, codec, source, AGENT)
    return serve.Agent(worker, "toy", 8, kind, str(uploads)), engine


@pytest.fixture
def server(codec, toy, tmp_path):
    """server(root=toy, kind="open", **of make_app) -> (client of HTTP, engine)."""
    (tmp_path / "uploads").mkdir()
    with contextlib.ExitStack() as opened:
        def start(root=toy, kind="open", **more):
            agent, engine = agent_of(codec, root, tmp_path / "uploads", kind=kind)
            client = TestClient(serve.make_app(agent, **more), base_url="http://localhost")
            return opened.enter_context(client), engine

        yield start


def body_of(url=VIDEO, text=QUESTION, **fields):
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": text}]
    return {"model": "toy", "messages": [{"role": "user", "content": content}], **fields}


def post(http, **fields):
    return http.post("/v1/chat/completions", json=body_of(**fields))


def test_answers_equal_those_of_the_terminal_for_every_way_to_name_a_video(server, codec, toy):
    http, engine = server()
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
    task = {"id": "q", **serve.question_task(QUESTION, "open"), "video": VIDEO}
    (wanted,) = ask.ask(agent_of(codec, toy, "none")[0].worker, [task], 8)
    kept = http.put("/videos", content=(toy / VIDEO).read_bytes()).json()["url"]
    # A browser names both codecs of a recording, with a comma between them.
    encoded = base64.b64encode((toy / VIDEO).read_bytes()).decode()
    recorded = f"data:video/webm;codecs=vp8,opus;base64,{encoded}"
    for url in (VIDEO, f"file://{toy}/{VIDEO}", str(toy / VIDEO), recorded, kept):
        reply = client.chat.completions.create(**body_of(url))
        message = reply.choices[0].message
        assert message.content.startswith("red ")
        assert "ok] a red square" in message.reasoning_content
        turns = [event["text"] for event in reply.trace if event["event"] == "turn"]
        assert turns[0] == wanted["turns"][0]
        assert reply.usage.total_tokens == (reply.usage.prompt_tokens
                                            + reply.usage.completion_tokens)
    chunks = list(client.chat.completions.create(**body_of(), stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text in wanted["turns"][-1] and text.startswith("red ")
    events = [event["event"] for chunk in chunks for event in getattr(chunk, "trace", [])]
    assert sorted(events) == sorted(["overview", "turn", "turn", "call", "call", "summary",
                                     "summary", "answer"]) and events[-1] == "answer"
    assert client.models.list().data[0].id == "toy"
    with pytest.raises(openai.BadRequestError, match="there is no question"):
        client.chat.completions.create(**body_of(text=""))


def test_options_and_the_type_of_a_question(server, codec, toy, monkeypatch):
    """The toy answers with lists: asked for an open answer, it babbles."""
    monkeypatch.setattr(sys, "argv", f"serve.py --preset toy --ckpt {toy}/init".split())
    http, engine = server(kind=serve.parse_args().type)
    lines = "Which?\n(A) red\n(B) blue: dark"
    for fields, style in (({}, "list"), ({"answer_type": "grounding"}, "grounding"),
                          ({"text": lines}, "mcq")):
        assert post(http, **fields).status_code == 200
        assert rollout.ANSWER_STYLES[style] in chat.decode(codec, engine.mains()[-1].ids)
    assert serve.question_task(lines + "\nBe brief.", "open")["style"] == "Be brief."


@pytest.mark.parametrize("fields, status", [
    ({"url": "none.mp4"}, 404), ({"url": "file:%2e%2e/%2e%2e/etc/passwd"}, 404),
    ({"url": "video:../../etc/passwd"}, 404), ({"url": "http://127.0.0.1:9/x.mp4"}, 404),
    ({"url": "rl.jsonl"}, 404), ({"url": "data:video/mp4;base64,@@@"}, 400), ({"url": ""}, 400),
    ({"text": " "}, 400), ({"frames": 1025}, 400), ({"frames": 0}, 422), ({"messages": 3}, 422)])
def test_bad_requests_are_refused(server, toy, fields, status):
    http, _ = server()
    body = {**body_of(), **fields} if "messages" in fields else body_of(**fields)
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == status and str(toy) not in response.json()["error"]["message"]
    assert post(http).status_code == 200  # the next question is answered


def test_an_episode_that_fails_says_why(server, monkeypatch):
    monkeypatch.setitem(globals(), "AGENT", replace(AGENT, max_model_len=64))
    http, _ = server()
    response = post(http)
    assert response.status_code == 400 and "leave no room in --max-model-len 64" in response.text
    with http.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as stream:
        assert "leave no room in --max-model-len 64" in stream.read().decode()


def test_the_door_is_guarded(server, toy, tmp_path, start):
    http, _ = server(key="secret")
    response = http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert response.status_code == 401 and "secret" not in response.text
    assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).is_success
    assert http.get("/").is_success
    http, _ = server(root=tmp_path)
    assert http.get("/v1/models", headers={"Host": "example.org"}).status_code == 400
    # What a form of another site may send unasked.
    body = json.dumps(body_of(str(toy / VIDEO)))
    plain = {"Content-Type": "text/plain"}
    assert http.post("/v1/chat/completions", content=body, headers=plain).status_code == 422
    # A video is never a page, whatever its name is; another file is never sent.
    shutil.copy(toy / VIDEO, tmp_path / "evil.html")
    (tmp_path / "page.html").write_text("<script>1</script>")
    response = http.get("/videos/evil.html")
    assert response.headers["content-type"] == "video/mp4"
    assert response.headers["x-content-type-options"] == "nosniff"
    for path in ("page.html", "%2e%2e/%2e%2e/etc/passwd", "none.mp4"):
        assert http.get("/videos/" + path).status_code == 404
    code, _, err = start(serve, *f"--preset toy --ckpt {toy}/init --host 0.0.0.0".split())
    assert code == 2 and "no variable" in err
