"""
serve.py (tests/slow/test_serve.py): the agent behind an OpenAI-compatible endpoint, with a page to
ask a video.

All clients share one engine and one pump, so their questions run in one batch. An episode is that
of tools/ask.py, and at temperature 0 so is the answer.

  POST /v1/chat/completions   the answer is `content`; the way to it is `trace` (events of ask.py)
                              and, as text, `reasoning_content`. "stream": true sends both as they
                              come, the answer last
  GET  /v1/models, /health    GET / is the page; PUT /videos takes a video that is dropped there

The last user message is the question, and the video is the last one of the request:
  {"type": "video_url", "video_url": {"url": U}}   U: a path or a file: URL below --video-root, a
                              data: URL, or the URL that PUT /videos gave
  {"type": "image_url", ..}   frames as data: URLs, each after a text like "<12.5 seconds>", or with
                              the field "fps". Frames without times are refused, because every
                              window would be wrong
A request without a video is refused. Nothing is fetched from a network.

Fields beside `messages`: model, stream, temperature, seed, max_tokens or max_completion_tokens
(bounds the answer that is sent, never a thought: clients send 16), options ["..", ..], answer_type
(open, list, grounding; default: --type), frames (K of the overview), fps (as many a second; of
frames as images: their times). Options in the text, "A. .." one a line, are options too, and a text
after them replaces our line on how to answer. Only `n` 1 and no `tools` are taken. Other fields are
not read.

Reads: a checkpoint folder, videos below --video-root. Writes nothing that outlives the server.

CPU toy:  python tools/serve.py --preset toy --ckpt out/demo/grpo --video-root out/demo/toy/videos
1 GPU:    python tools/serve.py --ckpt grpo_out --video-root VIDEOS
"""
import asyncio
import base64
import collections
import contextlib
import hashlib
import itertools
import json
import mimetypes
import os
import re
import secrets
import shutil
import signal
import socket
import string
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urlsplit

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import agent_tools
import chat
import launch
import rollout
import video
from engine import EngineLoop
from plumbing import arguments
from tools import ask

# ------------------------------------------------------------------------------------------------
# What clients send


class Refused(Exception):
    """A request that gets an error as its answer. status: of HTTP."""

    def __init__(self, status, line):
        super().__init__(line)
        self.status = status


STAMP = re.compile(r"\s*<(\d{1,6}(?:\.\d+)?) seconds?>\s*")  # as chat.py writes times before frames
LABEL = re.compile(r"\s*\(?([A-Z])[.):]\s+(\S.*)")  # of a line
MAX_TEXT, MAX_ITEMS = 65_536, 2_000  # characters of a question; messages, and items in them
MAX_MARKS = 100_000  # of [ { and , in a JSON body: parsing takes time and memory for each


def parse_chat(messages: list[dict]) -> tuple[str | None, list, str]:
    """Messages -> (URL of a video or None, [(second or None, URL of an image)], the question)."""
    video_url, frames, question, system, count = None, [], "", [], 0
    for message in messages:
        role, content = message.get("role"), message.get("content")
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role not in ("system", "developer", "user") or not isinstance(items, list):
            continue  # answers of earlier questions: every question is asked anew
        texts, second, images = [], None, []
        count += len(items)
        if count > MAX_ITEMS:
            raise Refused(400, f"a request has {MAX_ITEMS:,} texts, videos and frames at most")
        for item in items:
            kind = item.get("type") if isinstance(item, dict) else None
            value = item.get(kind) if kind in ("text", "video_url", "image_url") else None
            value = value.get("url") if isinstance(value, dict) else value
            if not isinstance(value, str) or not value and kind != "text":
                raise Refused(400, "content holds items of type text, video_url and image_url, "
                              "each with its text or URL")
            if kind == "video_url":
                video_url, frames, images = value, [], []
            elif kind == "image_url":
                images.append((second, value))
                video_url = second = None
            elif stamp := STAMP.fullmatch(value):
                second = float(stamp[1])
            else:
                texts.append(value)
        text, frames = "\n".join(texts).strip(), images or frames  # of the last message with some
        if role == "user":
            question = text or question
        elif text:
            system.append(text)
    if not question:
        raise Refused(400, "there is no question: no text in a user message")
    question = "\n".join([*system, question])
    if len(question) > MAX_TEXT:
        raise Refused(400, f"a question has {MAX_TEXT:,} characters at most")
    return video_url, frames, question


def question_task(text: str, options=None, kind="open") -> dict:
    """The text of a question -> fields of a task. Options in the text are read. `style`, the text
    after them, replaces our line on how to answer. kind: of a question without options."""
    task, lines = {"question": text, "options": options, "answer": None}, text.split("\n")
    labels = [LABEL.fullmatch(line) for line in lines]
    names = "".join(label[1] if label else " " for label in labels)
    first = names.find("AB")  # lines A, B, C, .. one after the other, below the question
    if first > 0 and not options:
        last = first + len(os.path.commonprefix([names[first:], string.ascii_uppercase]))
        task.update(question="\n".join(lines[:first]).strip(),
                    options=[label[2].strip() for label in labels[first:last]])
        if after := "\n".join(lines[last:]).strip():
            task["style"] = after
    return {**task, "type": "mcq" if task["options"] else kind}


def data_of(url: str) -> bytes:
    """A data: URL in base64 -> its bytes."""
    # A type may hold commas, as data:video/webm;codecs=vp8,opus;base64,..
    head, marker, text = url.partition(";base64,")
    if not (head.startswith("data:") and marker):
        raise Refused(400, "videos and frames in a request are data: URLs in base64; nothing is "
                      "fetched from a network")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Refused(400, "a data: URL that is not base64") from None


class VideoStore:
    """Videos below --video-root, and videos of clients: files in a folder of this server, under a
    digest of their bytes, so that a video that is sent again is decoded once."""

    def __init__(self, root: str, max_bytes: int):
        """max_bytes: bytes of clients' videos that are kept; the longest unused go first."""
        self.root, self.max_bytes, self.sent = root, max_bytes, tempfile.mkdtemp(prefix="videos-")
        self.lock = threading.Lock()  # uploads come from several threads
        self.used = collections.Counter()  # name -> questions that look at the video now

    def acquire_video(self, url: str | None, frames: list, fps: float | None) -> tuple[str, str]:
        """-> (folder, path in it) of a request's video. A video of a client counts as used until
        `release_video`."""
        if url and url.startswith("data:"):
            return self.sent, self.keep_upload({"": data_of(url)}, True)
        if url and (sent := re.fullmatch("video:([0-9a-f]{64})", url)):
            return self.acquire_upload(sent[1])
        if url:
            with contextlib.suppress(ValueError):  # "http://[" is no address at all
                parts = urlsplit(url)
                if parts.scheme in ("", "file") and parts.netloc in ("", "localhost"):
                    return self.root, self.path_below(unquote(parts.path) if parts.scheme else url)
            raise Refused(400, "a video is a path or a file: URL below --video-root, or a data: "
                          "URL; nothing is fetched from a network: download the video first")
        if not frames:
            raise Refused(400, "there is no video: send a video_url, or frames as image_url")
        times = [second for second, _ in frames]
        if None in times and fps is None:
            raise Refused(400, 'frames need times: a text like "<12.5 seconds>" before each, or '
                          'the field "fps"')
        if None in times:
            times = [n / fps for n in range(len(frames))]
        files = {f"{n:06d}.jpg": data_of(url) for n, (_, url) in enumerate(frames, 1)}
        files["times.txt"] = "\n".join(map(str, times)).encode()
        return self.sent, self.keep_upload(files, True)

    def path_below(self, path: str) -> str:
        """A path as a client writes it -> the path below --video-root."""
        with contextlib.suppress(video.VideoError, ValueError):
            if launch.is_file(video.resolve(path, self.root), folders=True):
                return os.path.relpath(os.path.join(self.root, path), self.root)
        # One line for both, so that no client learns which files lie elsewhere.
        raise Refused(404, "no such video below --video-root")

    def acquire_upload(self, name: str) -> tuple[str, str]:
        """The video that PUT /videos has taken earlier."""
        with self.lock:
            if not os.path.exists(os.path.join(self.sent, name)):
                raise Refused(404, "this video is no longer kept here: send it again")
            self.used[name] += 1
        return self.sent, name

    def keep_upload(self, files: dict[str, bytes], used: bool = False) -> str:
        """{name: bytes} of a folder of frames, or {"": bytes} of a video -> its name in `sent`."""
        digest = hashlib.sha256()
        for file, data in files.items():
            digest.update(f"{file} {len(data)} ".encode())
            digest.update(data)
        name = digest.hexdigest()
        path = os.path.join(self.sent, name)
        with self.lock:
            try:
                if not os.path.exists(path):
                    with tempfile.TemporaryDirectory(dir=self.sent, prefix=".",
                                                     ignore_cleanup_errors=True) as part:
                        for file, data in files.items():
                            with open(os.path.join(part, file or "video"), "wb") as f:
                                f.write(data)
                        os.rename(part if len(files) > 1 else os.path.join(part, "video"), path)
                os.utime(path)
            except OSError as error:  # the disk is full, say
                raise Refused(507, f"the video cannot be kept: {error.strerror}") from None
            self.used[name] += used
            self.make_room(name)
        return name

    def make_room(self, newest):
        """Deletes clients' videos that have not been used for the longest, above `max_bytes`."""
        def size(path):
            inner = os.listdir(path) if os.path.isdir(path) else [""]
            return sum(os.path.getsize(os.path.join(path, name).rstrip("/")) for name in inner)

        entries = sorted(os.scandir(self.sent), key=lambda entry: entry.stat().st_mtime)
        total = sum(size(entry.path) for entry in entries)
        for entry in entries:
            if total > self.max_bytes and entry.name != newest and not self.used[entry.name]:
                total -= size(entry.path)
                shutil.rmtree(entry.path) if entry.is_dir() else os.remove(entry.path)

    def release_video(self, root: str, name: str) -> None:
        """A question about this video has ended."""
        if root == self.sent:
            with self.lock:
                self.used[name] -= 1
                with contextlib.suppress(FileNotFoundError):
                    os.utime(os.path.join(root, name))


# ------------------------------------------------------------------------------------------------
# One engine for all clients


class RunningQuestion:
    """One question under way: a coroutine in the engine's thread, whose events are read in the loop
    of HTTP."""

    def __init__(self, agents, work, ended=lambda: None):
        """work: function of tell(event) -> coroutine. ended: called once, however it ends. Raises
        Refused if too many questions are under way, or if the engine has failed."""
        self.agents, self.ended = agents, ended
        if agents.fault:
            raise Refused(503, agents.fault)
        if agents.taken >= agents.args.waiting:
            raise Refused(429, f"{agents.taken} questions are under way; ask again later")
        agents.taken += 1
        self.news, loop = asyncio.Queue(), asyncio.get_running_loop()

        def tell(event):
            with contextlib.suppress(RuntimeError):  # the loop of HTTP has ended
                loop.call_soon_threadsafe(self.news.put_nowait, event)

        self.job = asyncio.run_coroutine_threadsafe(agents.limited(work, tell), agents.loop)
        self.job.add_done_callback(lambda _: tell(None))

    async def events(self):
        while (event := await self.news.get()) is not None:
            yield event
        if self.job.cancelled():
            raise Refused(503, self.agents.fault or "the server ends")
        self.job.result()  # raises what the coroutine raised

    def close(self):
        """Ends the coroutine if it still runs: nobody reads its events any more."""
        self.job.cancel()
        self.agents.taken -= 1
        self.ended()


class Agents:
    """Plays episodes for all clients. The pump runs in a thread with an event loop of its own, so
    that no step of the engine holds up a client and no client holds up a step."""

    def __init__(self, sampler: rollout.RolloutWorker, args):
        self.sampler, self.args = sampler, args
        self.fault = None  # why the engine answers no more
        self.taken = 0  # questions under way or waiting
        self.jobs, self.loop, self.ready = set(), asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=[self.run()])
        self.thread.start()
        self.ready.wait()

    async def run(self):
        """Lives as long as the server."""
        self.pump = EngineLoop(self.sampler.engine, self.sampler.threads)
        self.live = asyncio.Semaphore(self.args.live)
        self.steps = asyncio.create_task(self.pump.steps())
        self.ready.set()
        await asyncio.wait([self.steps])
        # An engine that has raised answers nobody, so nobody may wait for it.
        self.fault = "the server ends"
        if not self.steps.cancelled():
            error = self.steps.exception()
            self.fault = f"the engine has failed ({type(error).__name__}); restart the server"
            print(f"serve.py: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for job in list(self.jobs):
            job.cancel()
        await asyncio.gather(*self.jobs, return_exceptions=True)
        self.pump.pool.shutdown(cancel_futures=True)

    def end(self):
        """Ends all episodes; their clients, and all who ask later, are answered 503."""
        self.loop.call_soon_threadsafe(self.steps.cancel)

    def close(self):
        """Ends all episodes, then the engine."""
        self.end()
        self.thread.join()
        self.sampler.engine.close()

    async def limited(self, work, tell):
        task = asyncio.current_task()
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)
        try:
            async with asyncio.timeout(self.args.seconds), self.live:
                await work(tell)
        except TimeoutError:
            raise Refused(504, f"no answer within {self.args.seconds:g} seconds") from None

    async def play(self, tell, task, num_frames, agent, root):
        """An episode about a video; tells the events of ask.py, the answer with its tokens."""
        source = replace(self.sampler.source, root=root)
        sampler = replace(self.sampler, agent=agent, source=source, pump=self.pump)
        # A name of its own for each question: names of requests come from it. Seeds do not.
        name = f"0/{secrets.token_hex(8)}"
        episode = rollout.Episode(task, name, 0, num_frames, 0)
        async for event in ask.run_events(episode, sampler):
            if event["event"] == "answer":
                masks = [episode.context.mask] if episode.context else []
                masks += [call["sub"]["mask"] for call in episode.calls if "sub" in call]
                sampled, tokens = sum(map(sum, masks)), sum(map(len, masks))  # of all contexts
                event.update(tokens=tokens, cut=episode.finish[-1:] == ["length"], usage={
                    "prompt_tokens": tokens - sampled, "completion_tokens": sampled,
                    "total_tokens": tokens})
                if event["error"]:  # without the path of this machine
                    event["error"] = event["error"].replace(root, "").strip()
            tell(event)


# ------------------------------------------------------------------------------------------------
# Answers in OpenAI's form


def reasoning_line(event: dict) -> str:
    """An event -> its line in `reasoning_content`."""
    if event["event"] == "turn":
        return event["text"].strip() + "\n"
    if event["event"] == "summary":
        window = f"{event['start']} to {event['end']} s" if event["parseable"] else "no window"
        return f"[{window}: {event['status']}] {event['text']}\n"
    return ""


def bounded_answer(codec, event: dict, max_tokens: int | None) -> tuple[str, str]:
    """The answer event -> (content, finish_reason). max_tokens: of the content. Raises Refused if
    the episode failed."""
    if event["status"] != "ok":
        cure = "; ask with fewer frames, or start serve.py with a smaller --max-pixels"
        text = f"{event['status']}: {event['error']}{cure * (event['status'] == 'context')}"
        raise Refused(500 if "engine_error: " in text or launch.MACHINE in text else 400, text)
    text = event["text"] or ""
    ids = chat.encode(codec, text)
    if max_tokens and len(ids) > max_tokens:
        return chat.decode(codec, ids[:max_tokens]).rstrip("\N{REPLACEMENT CHARACTER}"), "length"
    return text, "length" if event["cut"] else "stop"


def error_body(status, line) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": str(line), "type": kind, "param": None, "code": status}}


def error_response(status, line, **headers):
    """-> the answer to a request that is refused."""
    from fastapi.responses import JSONResponse

    wait = {"Retry-After": "2"} if status in (429, 503) else {}
    return JSONResponse(error_body(status, line), status, {**headers, **wait})


class Guard:
    """Stands before the application: host, key, content type and size of a request. The body of a
    request goes to the application as scope["body"]."""

    def __init__(self, app, args, key):
        self.app, self.key, self.seconds = app, key, args.seconds
        self.max_bytes = int(args.max_mb * 2**20)
        self.in_flight = 0  # bytes of the bodies that are in memory
        self.local = args.host in ("127.0.0.1", "localhost", "::1")

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        scope.update(body=bytearray(), size=0)
        try:
            if problem := self.fault(scope, headers) or await self.read(scope, receive):
                # The rest of a body may still come: the connection cannot be used again.
                return await error_response(*problem, Connection="close")(scope, receive, send)
            await self.app(scope, receive, send)
        finally:
            self.free(scope)

    def free(self, scope):
        """The body of this request has left the memory."""
        self.in_flight -= scope.pop("size", 0)

    async def read(self, scope, receive):
        """Reads the body -> None, or (status, why). A framework would first keep all of it."""
        body, unread = scope["body"], True
        try:
            async with asyncio.timeout(self.seconds):
                while unread:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return 400, "the client has left"
                    body += message.get("body", b"")
                    self.in_flight += len(body) - scope["size"]
                    scope["size"] = len(body)
                    if len(body) > self.max_bytes:
                        return 413, f"a request has {self.max_bytes} bytes at most"
                    if self.in_flight > 2 * self.max_bytes:
                        return 429, "other requests fill the memory; ask again later"
                    unread = message.get("more_body", False)
        except TimeoutError:
            return 408, f"the request has not come within {self.seconds:g} seconds"
        if scope["method"] == "POST" and sum(map(body.count, (b"[", b"{", b","))) > MAX_MARKS:
            return 413, f"the JSON has more than {MAX_MARKS:,} commas and brackets"
        return None

    def fault(self, scope, headers):
        """-> None, or (status, why)."""
        host = re.sub(r":\d+$", "", headers.get(b"host", ""))
        # A page of another site could reach this server under a name that leads here.
        if self.local and host not in ("127.0.0.1", "localhost", "[::1]"):
            return 403, "this server answers to 127.0.0.1 and localhost alone"
        secret = headers.get(b"authorization", "").removeprefix("Bearer ").encode("latin-1")
        if (self.key and scope["path"] not in ("/", "/health")
                and not secrets.compare_digest(secret, self.key)):
            return 401, "wrong key or none: send Authorization: Bearer KEY"
        # A page of another site may send a form or plain text unasked, but no JSON.
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return 415, "send JSON, with Content-Type: application/json"
        return None


def make_app(agents: Agents, store: VideoStore, args, key: bytes | None = None):
    """-> the application. key: that clients must send; None: none."""
    from typing import Annotated, Literal

    from fastapi import FastAPI, Request
    from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from pydantic import BaseModel, Field, ValidationError
    from starlette.exceptions import HTTPException

    class Stream(StreamingResponse):
        """Ends the question when the stream ends, also if the client left before its first line."""

        def __init__(self, lines, close):
            super().__init__(lines, media_type="text/event-stream",
                             headers={"Cache-Control": "no-cache"})
            self.close = close

        async def __call__(self, *asgi):
            try:
                await super().__call__(*asgi)
            finally:
                self.close()

    class ChatCompletionRequest(BaseModel):
        """The fields that count. Others (top_p, stop, ..) are ignored, as by most servers."""

        messages: list[dict] = Field(min_length=1, max_length=MAX_ITEMS)
        model: str | None = None
        stream: bool | None = None
        temperature: float | None = Field(None, ge=0, le=2)
        seed: int | None = Field(None, ge=-(2**63), lt=2**63)
        max_tokens: int | None = Field(None, ge=1)
        max_completion_tokens: int | None = Field(None, ge=1)
        n: Literal[1] | None = None
        tools: tuple[()] | None = None  # the agent has its own
        options: list[Annotated[str, Field(max_length=2_500)]] | None = Field(
            None, min_length=2, max_length=26)
        answer_type: Literal["open", "list", "grounding"] | None = None
        fps: float | None = Field(None, ge=0.001, le=1000)
        frames: int | None = Field(None, ge=1)

    app = FastAPI(title="ParaVT", openapi_url=None)
    episodes = collections.OrderedDict()  # id -> what the page shows again, the latest 100

    @app.exception_handler(Refused)
    async def answer_refusal(request, error):
        return error_response(error.status, error)

    @app.exception_handler(launch.UserError)  # the disk with the videos is away
    async def answer_unavailable(request, error):
        return error_response(503, "the videos cannot be read now")

    @app.exception_handler(HTTPException)
    async def answer_http_error(request, error):
        return error_response(error.status_code, error.detail)

    @app.exception_handler(ValidationError)
    async def answer_invalid(request, error):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return error_response(400, launch.printable(f"{field}: {first['msg']}".lstrip(": ")))

    text, policy = page_text()

    @app.get("/")
    async def page():
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health():
        body = {"status": agents.fault or "ok", "questions": agents.taken}
        return JSONResponse(body, 503 if agents.fault else 200)

    @app.get("/v1/models")
    async def models():
        return {"object": "list",
                "data": [{"id": args.name, "object": "model", "created": 0, "owned_by": "local"}]}

    @app.get("/videos")
    def list_videos():  # in a thread, because a large folder takes seconds
        """Videos below --video-root for the page."""
        paths = itertools.islice(ask.videos_below(store.root), 1000)
        names = sorted(os.path.relpath(path, store.root) for path in paths)
        # A name that is no UTF-8 cannot be sent.
        return [name for name in names if not re.search("[\ud800-\udfff]", name)]

    @app.put("/videos")
    async def upload_video(request: Request):
        body = request.scope.pop("body")
        if not body:
            raise Refused(400, "the body is the video, and it is empty")
        return {"url": "video:" + await asyncio.to_thread(store.keep_upload, {"": body})}

    @app.get("/videos/{path:path}")
    async def video_file(path: str):
        """A video for the page's player."""
        path = store.path_below(path)
        file = os.path.join(store.root, path)
        if not os.path.isfile(file):
            raise Refused(404, "a player needs a file, and this is a folder of frames")
        # Other files below --video-root, and those that a link leads to, are not shown.
        await asyncio.to_thread(probe_video, agents.sampler.source, store.root, path)
        # Whatever the name says, a browser must not take a video for a page of this server.
        kind = mimetypes.guess_type(file)[0] or ""
        return FileResponse(file, media_type=kind if kind.startswith("video/") else "video/mp4",
                            headers={"X-Content-Type-Options": "nosniff",
                                     "Content-Security-Policy": "sandbox"})

    @app.get("/episodes/{name}")
    async def kept_episode(name: str):
        if name not in episodes:
            raise Refused(404, "this episode is no longer kept here")
        return episodes[name]

    @app.post("/v1/chat/completions")
    async def completions(request: Request):
        body = ChatCompletionRequest.model_validate_json(request.scope.pop("body"))
        if body.model not in (None, "", args.name):
            raise Refused(404, f"no such model; there is {args.name}")
        video_url, frames, question = parse_chat(body.messages)
        values = {"temperature": body.temperature, "seed": body.seed}
        agent = replace(agents.sampler.agent, **{k: v for k, v in values.items() if v is not None})
        most = max(args.frames, agent_tools.CropVideo.max_frames)  # the engine has room for so many
        if (body.frames or 0) > most:
            raise Refused(400, f"at most {most} frames; more: start serve.py with --frames N")
        root, path = await asyncio.to_thread(store.acquire_video, video_url, frames, body.fps)
        # Videos and frames are files now, and a question may wait for long.
        video_url = None if video_url and video_url.startswith("data:") else video_url
        fps = None if frames else body.fps
        body.messages.clear()
        frames.clear()
        guard.free(request.scope)
        head = {"id": "chatcmpl-" + secrets.token_hex(12), "created": int(time.time()),
                "model": args.name}
        ended = partial(store.release_video, root, path)
        try:
            info = await asyncio.to_thread(probe_video, agents.sampler.source, root, path)
            default = min(max(round(fps * info.duration), 1), most) if fps else args.frames
            task = {"id": head["id"], "video": path,
                    **question_task(question, body.options, body.answer_type or args.type)}
            work = partial(agents.play, task=task, num_frames=body.frames or default, agent=agent,
                           root=root)
            under_way = RunningQuestion(agents, work, ended)
        except Refused:
            ended()
            raise

        async def told():
            """The events of this question, which are kept for the page."""
            trace = []
            async for event in under_way.events():
                trace.append(event)
                yield event
            episodes[head["id"]] = {"question": question, "video": video_url, "events": trace}
            while len(episodes) > 100:
                episodes.popitem(last=False)

        codec, max_tokens = agents.sampler.codec, body.max_completion_tokens or body.max_tokens
        if body.stream:
            return Stream(stream_lines(head, told(), codec, max_tokens), under_way.close)
        answer = asyncio.create_task(completion_body(head, told(), codec, max_tokens))
        watcher = asyncio.create_task(wait_for_disconnect(request))
        try:
            await asyncio.wait([answer, watcher], return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else Response(status_code=499)
        finally:
            under_way.close()
            watcher.cancel()
            answer.cancel()

    guard = Guard(app, args, key)
    return guard


def page_text() -> tuple[str, str]:
    """-> (ask.html with the parts that it shares with page.html, what the page may load)."""
    folder, texts = os.path.dirname(os.path.abspath(__file__)), []
    for name in ("ask.html", "page.html"):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            texts.append(f.read())
    html, shared = texts
    for marker, first, last in (("/*STYLE*/", "<style>\n", "</style>"),
                                ("/*SMALL THINGS*/", "// ---- small things\n", "// ---- tabs")):
        html = html.replace(marker, shared.partition(first)[2].partition(last)[0].strip())
    return html, ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                  "img-src data:; media-src 'self' blob:; connect-src 'self'; "
                  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def probe_video(source, root, path):
    """-> VideoInfo. Raises Refused if a video cannot be opened."""
    try:
        return source.cache.table(video.resolve(path, root)).info
    except video.VideoError as error:  # not str(error): that holds a path of this machine
        reason = f"the video cannot be read: {error.why.replace(root, '')[:200]}"
        raise Refused(500 if launch.MACHINE in reason else 400, reason) from None


def http_server(app, agents, log_level="warning", **config):
    """-> a uvicorn server that ends all questions before it waits for its connections to end."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, *signal):
            agents.end()
            super().handle_exit(*signal)

    return Server(uvicorn.Config(app, timeout_graceful_shutdown=2, log_level=log_level, **config))


async def wait_for_disconnect(request):
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def completion_body(head, events, codec, max_tokens) -> dict:
    """All events -> one answer."""
    trace = [event async for event in events]
    content, finish = bounded_answer(codec, trace[-1], max_tokens)
    message = {"role": "assistant", "content": content,
               "reasoning_content": "".join(map(reasoning_line, trace))}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {**head, "object": "chat.completion", "choices": [choice],
            "usage": trace[-1]["usage"], "trace": trace}


async def stream_lines(head, events, codec, max_tokens):
    """Events -> lines of a stream."""
    def line(delta, finish=None, **fields):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice], **fields}
        return f"data: {json.dumps(chunk)}\n\n"

    try:
        yield line({"role": "assistant", "content": ""})
        async for event in events:
            yield line({"reasoning_content": reasoning_line(event)}, trace=[event])
        content, finish = bounded_answer(codec, event, max_tokens)
        yield line({"content": content}, finish, usage=event["usage"])
    except Refused as error:  # the status has gone out, so the error is a line of its own
        yield f"data: {json.dumps(error_body(error.status, error))}\n\n"
    yield "data: [DONE]\n\n"


# ------------------------------------------------------------------------------------------------
# The command line


def parse_args():
    parser = arguments.parser(__doc__)
    add = parser.add_argument_group("server").add_argument
    add("--ckpt", required=True, help="checkpoint folder")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    add("--frames", type=int, default=64, help="overview frames K; the most a request may ask for")
    add("--host", default="127.0.0.1", help="another address lets other machines in: with a key")
    add("--port", type=int, default=8000, help="of HTTP")
    add("--type", choices=["open", "list", "grounding"], default="open",
        help="of answers, if a question has neither options nor answer_type; the toy: list")
    add("--name", help="of the model, as clients ask for it; default: the folder's name")
    add("--api-key-env", help="environment variable with the key that clients send")
    add("--max-mb", type=float, default=256.0, help="MiB of one request")
    add("--videos-gb", type=float, default=4.0, help="GiB of clients' videos that are kept")
    add("--live", type=int, default=0, help="episodes at once; 0 = twice max_num_seqs")
    add("--waiting", type=int, default=256, help="questions under way or waiting; then 429")
    add("--seconds", type=float, default=600.0, help="for one question, waiting included")
    rollout.add_agent_arguments(parser)
    if arguments.parse_early(parser).preset == "toy":
        parser.set_defaults(**rollout.toy_defaults(), type="list")
    # The same answer each time. Videos outside the working folder need --video-root.
    parser.set_defaults(temperature=0, video_root=".", gpu_memory_utilization=0.9, subtitles="none")
    args = parser.parse_args()
    arguments.require_min(1, args, "frames", "waiting")
    arguments.require_min(0, args, "live")
    for name in ("max_mb", "videos_gb", "seconds"):
        if not 0 < getattr(args, name) < float("inf"):
            raise launch.UserError(f"--{name.replace('_', '-')} must be above 0")
    args.live = args.live or 2 * args.max_num_seqs
    args.name = args.name or os.path.basename(os.path.realpath(args.ckpt))
    if args.host not in ("127.0.0.1", "localhost", "::1") and not args.api_key_env:
        raise launch.UserError(f"--host {args.host} lets other machines in: give --api-key-env")
    if args.api_key_env and not os.environ.get(args.api_key_env, "").strip():
        raise launch.UserError(f"--api-key-env: {args.api_key_env} is not set or empty")
    try:  # now, and kept, because the engine loads for minutes before HTTP begins
        kind = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        args.socket = socket.create_server((args.host, args.port), family=kind)
    except (OSError, OverflowError) as error:
        raise launch.UserError(f"--host {args.host} --port {args.port}: "
                               f"{getattr(error, 'strerror', None) or error}") from None
    args.port = args.socket.getsockname()[1]  # with --port 0 the system has chosen one
    return args


def main():
    from plumbing import checkpoint

    args = parse_args()
    ckpt = checkpoint.resolve(args.ckpt)
    agent, source = rollout.agent_settings(args, None)
    source = replace(source, root=os.path.realpath(source.root))
    key = os.environ[args.api_key_env].strip().encode() if args.api_key_env else None
    launch.print0(f"{args.ckpt}: loading the engine")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    engine = rollout.make_engine(ckpt, codec, args)
    store = VideoStore(source.root, int(args.videos_gb * 2**30))
    agents = Agents(rollout.RolloutWorker(engine, codec, source, agent), args)
    launch.print0(f"http://{args.host}:{args.port}  model {args.name}, videos of {source.root}")
    # uvicorn raises the signal once more after its own end, which would skip the lines below.
    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        http_server(make_app(agents, store, args, key), agents).run([args.socket])
    finally:
        with store.lock:  # not in the middle of an upload
            shutil.rmtree(store.sent, ignore_errors=True)
        agents.close()


if __name__ == "__main__":
    launch.run_main(main)
