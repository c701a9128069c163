"""
serve.py (tests/test_serve.py): the agent behind an OpenAI-compatible endpoint, with a page to
ask a video.

All clients share one engine and one pump, so their questions run in one batch. An episode is that
of tools/ask.py, and at temperature 0 so is the answer. Frames as images are refused: without their
times every window would be wrong.

  POST /v1/chat/completions   the answer is `content`; the way to it is `trace` (events of ask.py)
                              and, as text, `reasoning_content`. "stream": true sends both as they
                              come, the answer last
  GET  /v1/models             GET / is the page; PUT /videos takes a video that is dropped there

The last user message is the question, and the video is the last one of the request:
  {"type": "video_url", "video_url": {"url": U}}   U: a path or a file: URL below --video-root, a
                              data: URL, or the URL that PUT /videos gave. Nothing is fetched from a
                              network
Options are lines of the text, "A. .."; a text after them replaces our line on how to answer.
Fields beside `messages` and `stream`: temperature, seed, frames (K of the overview), answer_type
(open, list, grounding; default: --type). System messages and other fields are not read: max_tokens
would cut thoughts, since harnesses ask for 16.

For people who trust each other: requests have no bounds of size, number or time. A --host other
than this machine needs a key, and a proxy in front for TLS.

Reads: a checkpoint folder, videos below --video-root. Writes nothing that outlives the server.

CPU toy:  python tools/serve.py --preset toy --ckpt out/demo/grpo --video-root out/demo/toy/videos
1 GPU:    python tools/serve.py --ckpt grpo_out --video-root VIDEOS
"""
import asyncio
import base64
import contextlib
import hashlib
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import unquote

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

import launch
import rollout
import video
from engine import EngineLoop
from tools import ask

LOCAL = ["127.0.0.1", "localhost"]
# What the page may load: its own style and script, and videos of this server.
PAGE_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
               "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
               "frame-ancestors 'none'")


class Item(BaseModel):
    """A piece of a message."""

    type: Literal["text", "video_url"]
    text: str = ""
    video_url: dict[str, str] = {}


class Message(BaseModel):
    role: str
    content: str | list[Item] | None = None


class Question(BaseModel):
    """The fields of a request that count."""

    messages: list[Message]
    stream: bool | None = None
    temperature: float | None = None
    seed: int | None = None
    frames: int | None = Field(None, ge=1)
    answer_type: Literal["open", "list", "grounding"] | None = None


@dataclass
class Agent:
    """The agent with the videos of one server."""

    worker: rollout.RolloutWorker
    name: str  # of the model
    frames: int  # K of the overview, unless a question asks for fewer
    type: str  # of questions that say nothing of their answer
    uploads: str  # folder of the videos that clients send

    async def events(self, task, root, num_frames, **settings):
        """Plays an episode -> asynchronous iterator of the events of ask.py."""
        source = replace(self.worker.source, root=root)
        agent = replace(self.worker.agent, **settings)
        # A name of its own for each question: names of requests come from it. Seeds do not.
        episode = rollout.Episode(task, f"0/{task['id']}", 0, num_frames, 0)
        async for event in ask.run_events(episode, replace(self.worker, agent=agent,
                                                           source=source)):
            if event["event"] == "answer":
                masks = [episode.context.mask]
                masks += [call["sub"]["mask"] for call in episode.calls if "sub" in call]
                sampled, tokens = sum(map(sum, masks)), sum(map(len, masks))
                event["usage"] = {"prompt_tokens": tokens - sampled, "total_tokens": tokens,
                                  "completion_tokens": sampled}
                if event["error"]:  # without the path of this machine
                    event["error"] = event["error"].replace(root, "")
            yield event

    def find_video(self, url):
        """URL of a request -> (folder, path in it)."""
        root = self.worker.source.root
        if url.startswith("data:"):  # data:video/webm;codecs=vp8,opus;base64,..
            try:
                content = base64.b64decode(url.partition(";base64,")[2], validate=True)
            except ValueError:
                raise HTTPException(400, "a data: URL that is not base64") from None
            url = "video:" + self.save_upload(content)
        path = url
        if url.startswith("video:"):
            root, path = self.uploads, url.removeprefix("video:")
        elif url.startswith("file:"):
            path = unquote(url.removeprefix("file:").removeprefix("//"))
        if os.path.isabs(path):
            path = os.path.relpath(path, root)
        try:
            # Raises if the path leads out of the folder, or to a file that is no video.
            self.worker.source.cache.table(video.resolve(path, root))
        except (video.VideoError, OSError, ValueError):
            # One line for all, so that no client learns which files lie elsewhere.
            raise HTTPException(404, "no such video below --video-root") from None
        return root, os.path.normpath(path)

    def save_upload(self, content):
        """Bytes of a video -> its name in `uploads`."""
        name = hashlib.sha256(content).hexdigest()
        with open(os.path.join(self.uploads, name), "wb") as file:
            file.write(content)
        return name


# ------------------------------------------------------------------------------------------------
# What clients send


def read_messages(messages):
    """Messages -> (URL of the video, the question): the last ones that a user has sent."""
    url, question = None, ""
    for message in messages:
        if message.role != "user":
            continue
        items = message.content or []
        if isinstance(items, str):
            items = [Item(type="text", text=items)]
        texts = []
        for item in items:
            url = item.video_url.get("url", url)
            texts.append(item.text)
        question = "\n".join(filter(None, texts)).strip() or question
    if not question:
        raise HTTPException(400, "there is no question: no text in a user message")
    if not url:
        raise HTTPException(400, "there is no video: send a video_url")
    return url, question


def question_task(text, kind):
    """The text of a question -> fields of a task. `style`, the text after options in the text,
    replaces our line on how to answer. kind: of a question without options."""
    question, options, style = ask.split_options(text)
    task = {"question": question, "options": options, "answer": None, "type": kind}
    if options:
        task["type"] = "mcq"
    if style:
        task["style"] = style
    return task


# ------------------------------------------------------------------------------------------------
# What clients get


async def stream_lines(head, events):
    """Events -> lines of a stream."""
    def line(delta, finish=None, **fields):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice], **fields}
        return f"data: {json.dumps(chunk)}\n\n"

    async for event in events:
        yield line({"reasoning_content": ask.line_of(event) + "\n"}, trace=[event])
    if event["status"] != "ok":
        yield f"data: {json.dumps({'error': {'message': ask.line_of(event), 'code': 400}})}\n\n"
    else:
        yield line({"content": event["text"] or ""}, "stop", usage=event["usage"])
    yield "data: [DONE]\n\n"


async def whole_answer(head, events):
    """Events -> the answer of a request that does not stream."""
    trace = [event async for event in events]
    if trace[-1]["status"] != "ok":
        raise HTTPException(400, ask.line_of(trace[-1]))
    message = {"role": "assistant", "content": trace[-1]["text"] or "",
               "reasoning_content": "\n".join(map(ask.line_of, trace))}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**head, "object": "chat.completion", "choices": [choice],
            "usage": trace[-1]["usage"], "trace": trace}


# ------------------------------------------------------------------------------------------------
# The application


def make_app(agent, local=True, key=""):
    """local: for this machine alone. key: that clients must send; "": none."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        # Steps of the engine and clients take turns in one loop.
        worker = agent.worker
        pump = EngineLoop(worker.engine, video.decode_threads())
        agent.worker = replace(worker, pump=pump)
        steps = asyncio.create_task(pump.steps())
        steps.add_done_callback(end_if_failed)
        yield
        steps.cancel()
        pump.pool.shutdown(cancel_futures=True)

    # FastAPI reads a body only if it is sent as JSON, which a form of another site cannot do.
    app = FastAPI(title="ParaVT", openapi_url=None, lifespan=lifespan,
                  dependencies=[Depends(key_check(key))])
    if local:  # a page of another site could reach this server under a name that leads here
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL)

    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    async def refused(request, error):
        # In OpenAI's form: its clients show this message alone.
        message = getattr(error, "detail", str(error))
        return JSONResponse({"error": {"message": message}}, getattr(error, "status_code", 422))

    @app.get("/")
    def page():
        return FileResponse(f"{os.path.dirname(__file__)}/ask.html",
                            headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/v1/models")
    def models():
        return {"object": "list", "data": [{"id": agent.name, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def completions(question: Question):
        url, text = read_messages(question.messages)
        root, path = await asyncio.to_thread(agent.find_video, url)
        head = {"id": "chatcmpl-" + secrets.token_hex(12), "created": int(time.time()),
                "model": agent.name}
        num_frames = question.frames or agent.frames
        if num_frames > agent.frames:
            raise HTTPException(400, f"at most {agent.frames} frames: serve.py --frames N")
        settings = question.model_dump(include={"temperature", "seed"}, exclude_none=True)
        task = question_task(text, question.answer_type or agent.type)
        events = agent.events({"id": head["id"], "video": path, **task}, root, num_frames,
                              **settings)
        if question.stream:
            return StreamingResponse(stream_lines(head, events), media_type="text/event-stream")
        return await whole_answer(head, events)

    add_videos(app, agent)
    return app


def key_check(key):
    """-> a function that refuses requests without the key, the page aside."""
    def check(request: Request):
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and request.url.path != "/":
            if not secrets.compare_digest(sent.encode(), key.encode()):
                raise HTTPException(401, "wrong key or none: send Authorization: Bearer KEY")

    return check


def add_videos(app, agent):
    """Adds what the page asks for: the names of videos, a video, and a place to send one to."""
    @app.get("/videos")
    def list_videos():
        root = agent.worker.source.root
        return sorted(os.path.relpath(path, root) for path in ask.videos_below(root))

    @app.put("/videos")
    async def upload_video(request: Request):
        return {"url": "video:" + agent.save_upload(await request.body())}

    @app.get("/videos/{path:path}")
    def video_file(path: str):
        root, path = agent.find_video(path)
        # A browser must not take a video for a page of this server, whatever its name is.
        return FileResponse(os.path.join(root, path), media_type="video/mp4",
                            headers={"X-Content-Type-Options": "nosniff",
                                     "Content-Security-Policy": "sandbox"})


def end_if_failed(steps):
    """An engine that has raised answers nobody, so nobody may wait for it."""
    if not steps.cancelled():
        print(f"serve.py: the engine has failed: {steps.exception()!r}", file=sys.stderr)
        os._exit(1)


# ------------------------------------------------------------------------------------------------
# The command line


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="another address lets other machines in: with a key")
    add("--port", type=int, default=8000, help="of HTTP")
    add("--api-key-env", help="environment variable with the key that clients send")
    ask.add_arguments(parser)
    # Videos outside the working folder need --video-root.
    parser.set_defaults(video_root=".")
    args = ask.parse_args(parser)
    args.key = os.environ.get(args.api_key_env or "", "").strip()
    if not args.key and (args.api_key_env or args.host not in LOCAL):
        raise launch.UserError("--api-key-env names no variable with a key: --host lets others in")
    args.video_root = os.path.realpath(args.video_root)
    return args


def main():
    args = parse_args()
    worker = ask.load_worker(args)
    with tempfile.TemporaryDirectory(prefix="videos-") as uploads:
        name = os.path.basename(os.path.realpath(args.ckpt))
        agent = Agent(worker, name, args.frames, args.type, uploads)
        app = make_app(agent, args.host in LOCAL, args.key)
        print(f"http://{args.host}:{args.port}")
        uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    worker.engine.close()


if __name__ == "__main__":
    launch.run_main(main)
