"""
evaluation/endpoint.py (tests/test_endpoint.py): OpenAI-compatible endpoints as an engine, and a
judge's verdicts on the open answers of an evaluation.

Endpoints take messages and return text, without ids and log-probs, so they serve evaluation alone.
A failure becomes the outcome of its episode, never a text that would be graded.

Asks endpoints; writes the verdicts of a judge. Used by eval.py and evaluation/results.py.
"""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import queue
import sys
import time
from dataclasses import dataclass, replace

import chat
import launch
from engine import Completion, Request
from plumbing.endpoint import (
    PROBE,
    Client,
    Reply,
    base_url,
    error_line,
    is_retryable,
    message_text,
)
from plumbing.judge import open_judge, read_verdicts

NO_TEXT = "the answer was cut off before its first word: give more --max-new-tokens"

# ------------------------------------------------------------------------------------------------
# Flags


def add_arguments(parser):
    """Flags of endpoints and of sampling."""
    add = parser.add_argument_group("endpoint: --engine openai").add_argument
    add("--base-url", nargs="+", metavar="URL", type=base_url,
        help="for example http://127.0.0.1:8000/v1; several: the least busy is asked")
    add("--model", help="name of the model")
    add("--api-key-env", help="environment variable that holds the key")
    parser.add_setting("image_cap", "images of a request at most; 0 = no cap", 0)
    parser.add_setting("video_item", "the overview as one video (vLLM; docs/evaluation.md), not as "
                       "images", False)
    parser.add_setting("tokens_field", "name of the limit at this endpoint", "max_tokens",
                       choices=["max_tokens", "max_completion_tokens"])
    parser.add_setting("send_temperature", "false: sends no temperature or seed", True)
    parser.add_setting("request_timeout", "seconds of a whole request", 300.0)
    parser.add_setting("retries", "after 429, 5xx or a timeout, 1, 2, 4, .. seconds later", 3)
    parser.add_setting("workers", "parallel requests to each endpoint", 8)
    parser.add_setting("give_up", "failed tries in a row, over all endpoints, after which the run "
                       "waits for a server; 0 = never", 3)
    parser.add_setting("server_wait", "seconds of that wait, and of a server's Retry-After, at "
                       "most; then the run ends", 120.0)

    # These are for the engine in this process too.
    add = parser.add_setting  # an endpoint gets the fields that are set
    add("top_p", "tokens of this much probability; 1 = all", type=float)
    add("top_k", "the k likeliest tokens; 0 = all; endpoints: vLLM and SGLang", type=int)
    add("presence_penalty", "taken off the logit of tokens generated before; 0 = off", type=float)


def sampling_settings(args):
    """-> {field: value} of the flags that are set: names of vLLM's SamplingParams, and of the
    fields of a request."""
    names = ("top_p", "top_k", "presence_penalty")
    # An unset flag is no field: a hosted endpoint may not know top_k.
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def flag_checks(args):
    """-> [(whether the flags of an endpoint or of sampling contradict each other, why)]."""
    return [
        # Chained comparisons, because they refuse NaN too.
        (args.top_p is not None and not 0 < args.top_p <= 1, "top_p must be above 0, at most 1"),
        (args.top_k is not None and args.top_k < 0, "top_k may not be negative; 0 = all tokens"),
        (args.presence_penalty is not None and not -2 <= args.presence_penalty <= 2,
         "presence_penalty must lie between -2 and 2"),
        (args.image_cap < 0, "image_cap may not be negative"),
        (args.engine == "openai" and not (args.base_url and args.model),
         "--engine openai needs --base-url and --model"),
        (args.workers < 1 or args.retries < 0 or not 0 < args.request_timeout < 1e6,
         "workers and request_timeout must be above 0, retries may not be negative"),
        (args.give_up < 0 or not 0 <= args.server_wait < 1e6,
         "give_up and server_wait may not be negative")]


# ------------------------------------------------------------------------------------------------
# Endpoints


@dataclass
class ChatRequest(Request):
    """A Request with the same contents as a chat, for endpoints without ids."""

    messages: list = None
    prefill: str = ""  # forced start of the turn, already part of ids
    tools: list = None  # schema, already part of ids
    stop: tuple = ()  # strings that end the turn and stay in it


@dataclass
class OpenAIEngine(Client):
    """Any OpenAI-compatible chat endpoint, as an engine of rollout.py. For evaluation alone,
    because endpoints return text without ids and log-probs."""

    takes_messages = True  # a request needs messages, ids are not sent
    base_url: object  # http://127.0.0.1:8000/v1, or a list: the least busy is asked
    model_name: str
    key_variable: str = None  # environment variable of the key, which is never printed or stored
    workers: int = 8  # requests at once, of each endpoint
    timeout: float = 300.0  # seconds of one request
    retries: int = 3
    prefill: bool = False  # a turn's forced start goes as a begun turn (vLLM and SGLang take it)
    image_cap: int = 0  # images of one request at most, evenly kept; 0 = no cap
    video_item: bool = False  # the overview as one video_url, which vLLM takes
    jpeg: int = 90  # quality of images
    # Hosted endpoints differ in the name of the limit, and some take no temperature.
    tokens_field: str = "max_tokens"
    send_temperature: bool = True
    sampling: dict = None  # more fields of every request: top_p, .. (see sampling_settings)
    give_up: int = 3  # failed tries in a row, after which all requests wait; 0 = never
    server_wait: float = 120.0  # seconds of that wait, and of Retry-After, at most

    def __post_init__(self):
        super().__init__(self.key_variable)
        base_urls = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        urls = [url.rstrip("/") + "/chat/completions" for url in base_urls]
        self.busy = dict.fromkeys(urls, 0)  # url -> requests under way
        self.retry_at = dict.fromkeys(urls, 0.0)  # url -> when it is asked again after an error
        self.failed = 0  # tries in a row that no server answered
        self.awake = asyncio.Event()  # cleared while all requests wait for a server
        self.awake.set()
        self.max_seqs = self.workers * len(self.busy)
        self.slots = asyncio.Semaphore(self.max_seqs)
        self.served = set()  # names of the models that answered
        self.calls = {}  # request id -> Future of its Completion
        self.usage = {}  # request id -> (prompt tokens, sampled tokens), as the endpoint counts
        self.done = queue.SimpleQueue()  # futures of Completions

    async def probe(self, url, seconds, tools=None):
        """Asks one server for a few tokens of text, or for a call of `tools` -> (Completion,
        status, seconds to wait), as `post` does."""
        request = ChatRequest("probe", [], [], [], [], 64 if tools else 16, 0.0, 0,
                              tool_probe() if tools else PROBE, tools=tools)
        body = json.dumps(self.body(request)).encode()
        done, *rest = await self.complete(url, request, body, seconds)
        if done.error == NO_TEXT:  # a thought is longer than a probe
            done = replace(done, error=None)
        return done, *rest

    def check_servers(self, tools=None, video_path=None):
        """Asks every server for a few tokens, for a call if `tools` are offered, and about the file
        video_path. Raises UserError if one does not answer, refuses, keeps the call, or reads
        videos otherwise, before any video is decoded and every episode fails after its retries."""
        self.run(self.check_all_servers(tools, video_path)).result()

    async def check_all_servers(self, tools=None, video_path=None):
        for url in self.busy:
            for attempt in range(self.retries + 1):
                done, status, after = await self.probe(url, self.timeout)
                # A server that is busy or still loading is asked again. An address without a
                # server is more often a mistake.
                if (not done.error or not is_retryable(status) or status == 0
                        or attempt == self.retries):
                    break
                await self.pause(max(2.0**attempt, after))
            if done.error:
                reply = Reply(status, error=done.error)
                raise launch.UserError(error_line(url, self.model_name, reply))
            if tools:
                done, status, _ = await self.probe(url, self.timeout, tools)
                # Some parsers keep the call and return nothing at all.
                if status == 200 and (done.error or not (done.text or done.reasoning)):
                    reason = done.error or "it answered a request to write a call with no text"
                    raise launch.UserError(f"{url}: {reason}")
            if video_path:
                await self.check_video(url, os.path.realpath(video_path))

    async def check_video(self, url, video_path):
        """Raises UserError if the server may not read this file, or reads more frames of a longer
        video: the authors' server took 32 of any, vLLM has since changed its default."""
        counts = []
        for source in (f"file://{video_path}", grey_video_url(40), grey_video_url(80)):
            content = [{"type": "video_url", "video_url": {"url": source}}, text_part("Which?")]
            reply = await self.post(url, json.dumps({
                "model": self.model_name, "messages": [{"role": "user", "content": content}],
                self.tokens_field: 1}).encode(), self.timeout)
            if reply.error:
                raise launch.UserError(
                    f"{url} does not read {video_path} ({reply.error}); --allowed-local-media-path "
                    "must be a folder above the file itself, to which links lead")
            usage = reply.answer.get("usage") if isinstance(reply.answer, dict) else None
            counts.append((usage or {}).get("prompt_tokens") or 0)
        if counts[2] > 1.3 * counts[1]:
            raise launch.UserError(
                f"{url} reads more frames of longer videos, this protocol 32 of any: start it with "
                """--media-io-kwargs '{"video": {"video_backend": "opencv", "num_frames": 32}}'""")

    def submit(self, request):
        self.calls[request.id] = self.run(self.call(request))
        self.calls[request.id].add_done_callback(self.done.put)

    def abort(self, name):
        """Ends the connection of a request that nobody waits for any longer."""
        if call := self.calls.pop(name, None):
            call.cancel()

    def poll(self):
        """-> Completions that have arrived. Waits 20 ms for the first, so that no core spins.
        Raises UserError if no server answers any more, or if one refuses the key or the model."""
        arrived, finished = [], []
        with contextlib.suppress(queue.Empty):
            arrived.append(self.done.get(timeout=0.02))
        while not self.done.empty():
            arrived.append(self.done.get())
        for call in arrived:
            # A request that was given up has no entry, or a later request has that name.
            if not call.cancelled() and self.calls.get(call.result().id) is call:
                finished.append(self.calls.pop(call.result().id).result())
        # Looked at last: requests that end with the run would be records of failed items.
        if self.ending:
            raise launch.UserError(f"{self.ending}. Finished records are kept: start the server or "
                                   "give the right flags, and go on with the same command")
        return finished

    def body(self, request):
        """Request -> JSON to post."""
        body = {"model": self.model_name, "messages": self.chat_messages(request)}
        body[self.tokens_field] = request.max_tokens
        if self.send_temperature:
            body.update(temperature=request.temperature, seed=request.seed)
        body.update(self.sampling or {})
        if request.tools:
            # For the template alone: our own parser reads calls from the text.
            body.update(tools=request.tools, tool_choice="none")
        if request.stop:
            body.update(stop=list(request.stop), include_stop_str_in_output=True)
        clip = self.overview_clip(request)
        if clip:
            body.update(media_io_kwargs={"video": clip_kwargs(clip)})
        if self.prefill and request.prefill:  # the server is told to go on with our turn
            body["messages"].append({"role": "assistant", "content": request.prefill})
            body.update(add_generation_prompt=False, continue_final_message=True)
        return body

    def pick_url(self):
        """-> the endpoint with the fewest requests under way. An endpoint that has failed rests for
        30 seconds, because a server that is down would always be the least busy."""
        now = time.monotonic()
        awake = [url for url in self.busy if self.retry_at[url] <= now] or list(self.busy)
        return min(awake, key=self.busy.get)

    async def call(self, request):
        """Posts a request, again after 1, 2, 4, .. seconds or as the server says, if that may help
        -> Completion. A failure becomes the Completion's error, never its text, which would be
        graded."""
        async with self.slots:
            # In a thread: the JPEGs of a request take a tenth of a second.
            body = await asyncio.to_thread(lambda: json.dumps(self.body(request)).encode())
            for attempt in range(self.retries + 1):
                await self.awake.wait()
                if self.ending:
                    return Completion(request.id, error=self.ending)
                url = self.pick_url()
                self.busy[url] += 1
                try:
                    done, status, after = await self.complete(url, request, body, self.timeout)
                finally:  # also if the request is given up
                    self.busy[url] -= 1
                # These four say no to one text. A gateway that restarts sends others. At a start
                # those mean a wrong address, or key.
                passing = not 0 < status < 300 and status not in (400, 403, 413, 422)
                fails = done.error is not None and passing
                self.retry_at[url] = time.monotonic() + 30 if fails else 0.0
                # A wrong key would fail every item. Some endpoints answer 403 for one text alone.
                if status in (401, 402, 403, 404):
                    plain, status, _ = await self.probe(url, self.timeout)
                    if status in (401, 402, 403, 404):
                        self.end(error_line(url, self.model_name, Reply(status, error=plain.error)))
                self.failed = self.failed + 1 if fails else 0
                # After `give_up` failed tries in a row all requests wait for a server.
                if 0 < self.give_up <= self.failed and self.awake.is_set() and not self.ending:
                    self.awake.clear()
                    try:
                        await self.wait_for_server(after)
                    finally:  # given up: the next request that fails waits for a server
                        self.awake.set()
                if not fails or self.ending or attempt == self.retries:
                    return replace(done, error=launch.MACHINE + done.error) if fails else done
                await self.pause(max(2.0**attempt, after))

    async def wait_for_server(self, pause):
        """Probes all servers, with growing pauses, until one answers. Ends the run if none has
        answered after `server_wait` seconds. pause: seconds before the first probe."""
        until = time.monotonic() + self.server_wait
        for attempt in itertools.count():
            if pause:
                await self.pause(min(pause, max(0.0, until - time.monotonic())))
            if self.ending:
                return
            for url in self.busy:
                done, status, after = await self.probe(url, min(30.0, self.timeout))
                if not is_retryable(status):  # an answer, also if it is no text
                    self.failed, self.retry_at[url] = 0, 0.0
                    return
            if time.monotonic() >= until:
                return self.end(f"no server has answered for {self.server_wait:g} s, at last {url} "
                                f"({done.error})")
            if not attempt:  # once: a pause without a word looks like a hang
                print(f"\n{url}: {launch.printable(done.error)}; waiting at most "
                      f"{self.server_wait:g} s for a server", file=sys.stderr, flush=True)
            pause = max(min(2.0**attempt, 15.0), after)

    async def complete(self, url, request, body, seconds):
        """-> (Completion, HTTP status or 0 without a whole answer, seconds that the server asks to
        wait)."""
        reply = await self.post(url, body, seconds)
        wait = min(reply.wait, self.server_wait)
        if reply.error:
            return Completion(request.id, error=reply.error), reply.status, wait
        answer, choice = reply.answer, reply.answer["choices"][0]
        # A hosted name may stand for another model tomorrow.
        self.served.add(str(answer.get("model")))
        message = choice["message"]
        # Some endpoints repeat the begun turn.
        text = message_text(message).removeprefix(request.prefill)
        # A server with a reasoning parser takes the thought out of the content.
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        # Gateways name the end of an answer in many ways, and a limit in three.
        finish = str(choice.get("finish_reason")).lower()
        ended = finish not in ("length", "max_tokens", "model_length")
        usage = answer["usage"] if isinstance(answer.get("usage"), dict) else {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        self.usage |= {request.id: counts} if [*map(type, counts)] == [int, int] else {}
        done = Completion(request.id, text=text, ended=ended, reasoning=str(thought))
        # An empty text would be graded as an answer that says nothing.
        if message.get("tool_calls") or (finish == "tool_calls" and not text):
            done = Completion(request.id, error="start the server without --tool-call-parser")
        elif finish == "content_filter" and not text:
            done = Completion(request.id, error="the server's filter kept the answer back")
        elif not text and not ended:
            done = Completion(request.id, error=NO_TEXT, reasoning=str(thought))
        return done, reply.status, wait

    def overview_clip(self, request):
        """-> Frames of the overview if they go as one video, else None. Windows stay images,
        because a request carries the times of one video alone. So do frames with other stamps."""
        contents = [m["content"] for m in request.messages if isinstance(m["content"], list)]
        videos = [item for content in contents for item in content if item["type"] == "video"]
        if not self.video_item or not videos or videos[0].get("stamp") not in (None, "none"):
            return None
        clip = request.frames[0]
        return clip if len(clip.images) > 1 else None  # processors refuse a video of one frame

    def chat_messages(self, request):
        """Request -> chat messages with frames as JPEGs after their times. Consecutive tool
        messages become one user turn, as in the chat template of the policy."""
        clip = self.overview_clip(request)
        total = sum(len(frames.images) for frames in request.frames
                    if frames is not clip and not hasattr(frames, "path"))
        count = min(self.image_cap or total, total)
        selected = {int((i + 0.5) * total / count) for i in range(count)}  # numbers of images
        numbers = itertools.count()
        frames = iter(request.frames)  # in the order of the messages' videos
        turns = []  # [role, parts, holds tool responses]
        for message in request.messages:
            parts = content_parts(message["content"], frames, numbers, selected, clip, self.jpeg)
            if message["role"] != "tool":
                turns.append([message["role"], parts, False])
                continue
            follows = turns[-1][2]
            head = "\n<tool_response>\n" if follows else "<tool_response>\n"
            if not follows:
                turns.append(["user", [], True])
            turns[-1][1] += [text_part(head), *parts, text_part("\n</tool_response>")]
        # A message without images is a plain string: some endpoints take no parts.
        messages = []
        for role, parts, _ in turns:
            if all(part["type"] == "text" for part in parts):
                parts = "".join(part["text"] for part in parts)
            messages.append({"role": role, "content": parts})
        return messages


def text_part(text):
    return {"type": "text", "text": text}


def content_parts(content, frames, numbers, selected, clip=None, jpeg=90):
    """
    A message's content -> parts of an OpenAI message.

    frames: iterator of video.Frames, one for each video. numbers: iterator of the numbers of the
    request's images; images in `selected` are sent. clip: the Frames that go as one video.
    """
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for piece in content:
        if piece["type"] == "text":
            parts.append(text_part(piece["text"]))
            continue
        video = next(frames)
        # frame_sources.ServerVideo: the server reads the file
        url = f"file://{video.path}" if hasattr(video, "path") else ""
        if video is clip:
            jpegs = [jpeg_url(image, jpeg).partition(",")[2] for image in video.images]
            url = "data:video/jpeg;base64," + ",".join(jpegs)
        if url:
            parts.append({"type": "video_url", "video_url": {"url": url}})
            continue
        for index, (image, seconds) in enumerate(zip(video.images, video.seconds)):
            if next(numbers) not in selected:  # without its time too
                continue
            stamp = chat.stamp_text(seconds, index, piece.get("stamp"))
            if stamp:
                parts.append(text_part(stamp))
            parts.append({"type": "image_url", "image_url": {"url": jpeg_url(image, jpeg)}})
    return parts


def clip_kwargs(clip):
    """Frames -> media_io_kwargs, so that vLLM takes all frames (by default 32) and their times:
    indices at 1000 frames a second are milliseconds."""
    times = [round(1000 * float(second)) for second in clip.seconds]
    # As long as the video: from the first to the last, and half a gap on either side.
    total = round((times[-1] - times[0]) * len(times) / (len(times) - 1))
    total = max(total, times[-1] + 1)
    return {"num_frames": -1, "fps": 1000.0, "frames_indices": times, "total_num_frames": total,
            "duration": total / 1000.0}


def jpeg_url(image, quality):
    """uint8 [H, W, 3] -> data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg_bytes(image, quality)).decode()


def jpeg_bytes(image, quality):
    """uint8 [H, W, 3] -> JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def grey_video_url(seconds):
    """A made-up grey video with a frame a second -> data URL."""
    import av
    from PIL import Image

    buffer, frame = io.BytesIO(), av.VideoFrame.from_image(Image.new("RGB", (64, 64), "grey"))
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=1, width=64, height=64)
        for second in range(seconds):
            frame.pts = second
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return "data:video/mp4;base64," + base64.b64encode(buffer.getvalue()).decode()


def tool_probe():
    """The probe of a server that is offered tools."""
    call = '{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
    return [{"role": "user", "content": f"Copy this: <tool_call>\n{call}\n</tool_call>"}]


def make_engine(args, prefill, jpeg=90, tools=None, video_path=None):
    """Flags -> OpenAIEngine. Raises UserError if a server does not answer, or refuses.
    prefill: the protocol forces the start of every turn. jpeg: quality of images. tools: declared
    to the chat template. video_path: a video that the server will have to read."""
    same = ("workers", "retries", "image_cap", "video_item", "tokens_field", "send_temperature",
            "give_up", "server_wait")
    engine = OpenAIEngine(args.base_url, args.model, args.api_key_env, jpeg=jpeg,
                          timeout=args.request_timeout, prefill=args.think_prefix or prefill,
                          sampling=sampling_settings(args),
                          **{name: getattr(args, name) for name in same})
    engine.check_servers(tools, video_path)
    return engine


# ------------------------------------------------------------------------------------------------
# The judge of open answers


def judge(records, path, args):
    """
    Lets a chat endpoint decide open answers that the rule calls wrong. A yes makes the score 1.

    path: file of verdicts, see plumbing.judge.Judge; failed requests are asked again. records get
    "judge": True, False, or None after a failure, and then the rule's score stays. args: the
    judge's flags; without judge_url only known verdicts count. Raises UserError if no server
    answers, or if it refuses.
    """
    from tqdm import tqdm

    # A record without an answer stays wrong.
    doubtful = [r for r in records if r["task"]["type"] == "open" and r["score"] == 0
                and r["extracted"] is not None]
    inputs = [(r["task"]["question"], r["task"]["answer"], r["extracted"]) for r in doubtful]
    verdicts, lost = read_verdicts(path, args.judge_model), 0
    if args.judge_url and not verdicts.keys() >= set(inputs):
        client = open_judge(args, path)
        futures = [client.ask(*texts)[0] for texts in inputs]
        bar = tqdm(futures, desc="judge", disable=args.quiet or None)
        verdicts = dict(zip(inputs, [future.result() for future in bar]))
        client.close()
        lost = client.lost
    for record, texts in zip(doubtful, inputs):
        record["judge"] = verdicts.get(texts)
        record["score"] = float(record["judge"] is True)
        if lost and record["judge"] is None:  # for the run's end; no file holds it
            record["error"] = f"{launch.MACHINE}no answer of the judge"
