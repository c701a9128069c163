"""
evaluation/endpoint.py: asks OpenAI-compatible endpoints, as an engine of rollout.py, and asks one
about open answers.

Endpoints take messages and return text, without ids and log-probs, so they serve evaluation alone.
A failure becomes the outcome of its episode, never a text that would be graded. Keys come from an
environment variable and are never printed or stored.

Asks endpoints; writes the verdicts of a judge. Used by eval.py and evaluation/systems.py.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import chat
import launch
from engine import Completion, Request

# ------------------------------------------------------------------------------------------------
# Flags


def add_arguments(parser):
    """Flags of endpoints and the judge."""
    yes_no = argparse.BooleanOptionalAction

    add = parser.add_argument_group("endpoint: --engine openai").add_argument
    add("--base-url", nargs="+", metavar="URL",
        help="for example http://127.0.0.1:8000/v1; several: the least busy is asked")
    add("--model", help="name of the model")
    add("--api-key-env", help="environment variable that holds the key")
    add("--image-cap", type=int, default=0, help="most images of a request; 0 = no cap")
    add("--video-item", action=yes_no, default=False,
        help="the overview as one video (vLLM; docs/evaluation.md), not as images")
    add("--tokens-field", choices=["max_tokens", "max_completion_tokens"], default="max_tokens",
        help="name of the limit at this endpoint")
    add("--send-temperature", action=yes_no, default=True, help="off: sends no temperature or seed")
    add("--request-timeout", type=float, default=300.0,
        help="seconds of a whole request; for the judge too")
    add("--retries", type=int, default=3,
        help="after 429, 5xx or a timeout, 1, 2, 4, .. seconds later; for the judge too")
    add("--workers", type=int, default=8,
        help="parallel requests to each endpoint; for the judge too")
    add("--give-up", type=int, default=3, metavar="N",
        help="failed tries in a row, over all endpoints, after which the run waits for a server; "
        "0 = never; for the judge too")
    add("--server-wait", type=float, default=120.0,
        help="seconds of that wait, and of a server's Retry-After, at most; then the run ends")

    add = parser.add_argument_group("judge of open answers").add_argument
    add("--judge-url", help="chat endpoint, asked if the rule says wrong; default: none")
    add("--judge-model", help="the judge's name; without --judge-url earlier verdicts count")
    add("--judge-key-env", help="environment variable that holds the judge's key")


def add_sampling_arguments(parser):
    """Flags of sampling, for the engine in this process and for endpoints."""
    add = parser.add_argument_group("sampling; endpoints get the fields that are set").add_argument
    add("--top-p", type=float, help="tokens of this much probability; 1 = all")
    add("--top-k", type=int, help="the k likeliest tokens; 0 = all; endpoints: vLLM and SGLang")
    add("--presence-penalty", type=float, help="taken off the logit of tokens said before; 0 = off")


def sampling_settings(args):
    """-> {field: value} of the flags that are set: names of vLLM's SamplingParams, and of the
    fields of a request."""
    names = ("top_p", "top_k", "presence_penalty")
    # An unset flag is no field: a hosted endpoint may not know top_k.
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def faults(args):
    """-> [(whether the flags of an endpoint or of sampling contradict each other, why)]."""
    return [
        # Chained comparisons, because they refuse NaN too.
        (args.top_p is not None and not 0 < args.top_p <= 1, "--top-p must be above 0, at most 1"),
        (args.top_k is not None and args.top_k < 0, "--top-k may not be negative; 0 = all tokens"),
        (args.presence_penalty is not None and not -2 <= args.presence_penalty <= 2,
         "--presence-penalty must lie between -2 and 2"),
        (args.image_cap < 0, "--image-cap may not be negative"),
        (args.engine == "openai" and not (args.base_url and args.model),
         "--engine openai needs --base-url and --model"),
        (args.workers < 1 or args.retries < 0 or not 0 < args.request_timeout < 1e6,
         "--workers and --request-timeout must be above 0, --retries may not be negative"),
        (args.give_up < 0 or not 0 <= args.server_wait < 1e6,
         "--give-up and --server-wait may not be negative"),
    ]


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
class OpenAIEngine:
    """Any OpenAI-compatible chat endpoint, as an engine of rollout.py. For evaluation only, because
    endpoints return text without ids and log-probs."""

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
    # Hosted endpoints differ in the name of the limit, and some take no temperature.
    tokens_field: str = "max_tokens"
    send_temperature: bool = True
    sampling: dict = None  # more fields of every request: top_p, .. (see sampling_settings)
    give_up: int = 3  # failed tries in a row, after which all requests wait; 0 = never
    server_wait: float = 120.0  # seconds of that wait, and of Retry-After, at most
    is_judge: bool = False  # error lines then name the flags of the judge

    def __post_init__(self):
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        urls = [url.rstrip("/") + "/chat/completions" for url in given]
        self.busy = dict.fromkeys(urls, 0)  # url -> requests under way
        self.rests = dict.fromkeys(urls, 0.0)  # url -> when it is asked again after an error
        self.lock = threading.Lock()
        self.failed = 0  # tries in a row that no server answered
        self.awake = threading.Event()  # cleared while all requests wait for a server
        self.awake.set()
        self.over = threading.Event()  # set when the run must end, for the reason in `ending`
        self.ending = None
        self.handles = set()  # of open connections
        self.max_seqs = self.workers * len(self.busy)
        self.served = set()  # names of the models that answered
        self.usage = {}  # request id -> (prompt tokens, sampled tokens), as the endpoint counts
        self.pool = ThreadPoolExecutor(self.max_seqs)
        self.done = queue.SimpleQueue()  # futures of Completions

    def key(self):
        """The key, or an empty text."""
        # A file that was read into the variable often ends in a newline.
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    def probe(self, url, seconds):
        """Asks one server for a few tokens of text -> (Completion, status, seconds to wait), as
        `post` does."""
        request = ChatRequest("probe", [], [], [], [], 16, 0.0, 0, probe_messages())
        return self.post(url, request, json.dumps(self.body(request)).encode(), seconds)

    def knock(self):
        """Asks every server for a few tokens. Raises UserError if one does not answer or refuses,
        before any video is decoded and every episode fails after its retries."""
        for url in self.busy:
            try:
                address(url)
            except ValueError as error:
                raise launch.UserError(self.no_server(url, error)) from None
            for attempt in range(self.retries + 1):
                done, status, after = self.probe(url, self.timeout)
                # A server that is busy or still loading is asked again. An address without a
                # server is more often a mistake.
                if not done.error or not passing(status) or status == 0 or attempt == self.retries:
                    break
                self.pause(max(2.0**attempt, after))
            if done.error:
                raise launch.UserError(self.no_server(url, done.error) if status == 0
                                       else self.refusal(url, done.error, status))

    def no_server(self, url, error):
        return f"no server answers at {url} ({error}); expected an OpenAI-compatible endpoint"

    def refusal(self, url, error, status):
        """The line for a server that answers, but not with a completion."""
        judge = "judge-" if self.is_judge else ""
        key = f"--{judge}key-env" if judge else "--api-key-env"
        # Servers answer 404 for an unknown model, too.
        advice = {401: f"is the key in {key} right?", 403: f"may the key in {key} ask this model?",
                  402: "is the account of this key empty?",
                  404: f"is --{judge}model {self.model_name} right, and does the address end in "
                       "/v1?"}.get(status, "see the server's log, or other flags of the endpoint")
        return f"{url} refuses a request ({error}); {advice}"

    def submit(self, request):
        # A thread waits for the answer. The loop goes on with other episodes.
        self.pool.submit(self.call, request).add_done_callback(self.done.put)

    def poll(self):
        """-> Completions that have arrived. Waits 20 ms for the first, so that no core spins.
        Raises UserError if no server answers any more, or if one refuses the key or the model."""
        finished = []
        with contextlib.suppress(queue.Empty):
            finished.append(self.done.get(timeout=0.02).result())
        while not self.done.empty():
            finished.append(self.done.get().result())
        # Looked at last: requests that end with the run would be records of failed items.
        if self.over.is_set():
            raise launch.UserError(self.ending)
        return finished

    def close(self):
        self.pool.shutdown()

    def body(self, request):
        """Request -> JSON to post."""
        body = {"model": self.model_name, "messages": self.wire(request)}
        body[self.tokens_field] = request.max_tokens
        if self.send_temperature:
            body.update(temperature=request.temperature, seed=request.seed)
        body.update(self.sampling or {})
        if request.tools:
            # For the template alone: our own parser reads calls from the text.
            body.update(tools=request.tools, tool_choice="none")
        if request.stop:
            body.update(stop=list(request.stop), include_stop_str_in_output=True)
        clip = self.joined(request)
        if clip:
            body.update(media_io_kwargs={"video": clip_times(clip)})
        if self.prefill and request.prefill:  # the server is told to go on with our turn
            body["messages"].append({"role": "assistant", "content": request.prefill})
            body.update(add_generation_prompt=False, continue_final_message=True)
        return body

    def take(self):
        """-> the endpoint with the fewest requests under way. An endpoint that has failed rests for
        30 seconds, because a server that is down would always be the least busy."""
        with self.lock:
            now = time.monotonic()
            awake = [url for url in self.busy if self.rests[url] <= now] or list(self.busy)
            url = min(awake, key=self.busy.get)
            self.busy[url] += 1
        return url

    def give_back(self, url, failed):
        with self.lock:
            self.busy[url] -= 1
            self.rests[url] = time.monotonic() + 30 if failed else 0.0

    def call(self, request):
        """Posts a request, again after 1, 2, 4, .. seconds or as the server says, if that may help
        -> Completion. A failure becomes the Completion's error, never its text, which would be
        graded."""
        body = json.dumps(self.body(request)).encode()
        for attempt in range(self.retries + 1):
            self.awake.wait()
            if self.over.is_set():
                return Completion(request.id, error=self.ending)
            url = self.take()
            done, status, after = self.post(url, request, body, self.timeout)
            fails = done.error is not None and passing(status)
            self.give_back(url, failed=fails)
            if status in (401, 402, 403, 404):
                self.check_refusal(url)
            self.count(fails, after)
            if not fails or attempt == self.retries:
                return done
            self.pause(max(2.0**attempt, after))

    def check_refusal(self, url):
        """Ends the run if the server refuses a plain request, too: a wrong key would fail every
        item. Some endpoints answer 403 for one text alone."""
        done, status, _ = self.probe(url, self.timeout)
        if status in (401, 402, 403, 404):
            self.end(self.refusal(url, done.error, status))

    def count(self, fails, after):
        """Counts failed tries in a row. After `give_up` of them all requests wait for a server."""
        with self.lock:
            self.failed = self.failed + 1 if fails else 0
            waits = 0 < self.give_up <= self.failed and self.awake.is_set()
            waits = waits and not self.over.is_set()
            if waits:
                self.awake.clear()
        if waits:
            self.wait_for_server(after)

    def wait_for_server(self, pause):
        """Probes all servers, with growing pauses, until one answers. Ends the run if none has
        answered after `server_wait` seconds. pause: seconds before the first probe."""
        until = time.monotonic() + self.server_wait
        said = False
        for attempt in itertools.count():
            if pause:
                self.pause(min(pause, max(0.0, until - time.monotonic())))
            if self.over.is_set():
                return self.awake.set()
            for url in self.busy:
                done, status, after = self.probe(url, min(30.0, self.timeout))
                if not passing(status):  # an answer, also if it is no text
                    with self.lock:
                        self.failed, self.rests[url] = 0, 0.0
                    self.awake.set()
                    return
            if time.monotonic() >= until:
                return self.end(f"no server has answered for {self.server_wait:g} s, at last {url} "
                                f"({done.error})")
            if not said:  # once: a pause without a word looks like a hang
                said = True
                print(f"\n{url}: {launch.printable(done.error)}; waiting at most "
                      f"{self.server_wait:g} s for a server", file=sys.stderr, flush=True)
            pause = max(min(2.0**attempt, 15.0), after)

    def end(self, why):
        """Lets poll() raise UserError, and ends every wait and every open connection."""
        with self.lock:
            self.ending = self.ending or f"{why}. Finished records are kept: start the server or " \
                "give the right flags, and go on with the same command"
        self.over.set()
        self.awake.set()
        for handle in list(self.handles):
            shut(handle)

    def pause(self, seconds):
        self.over.wait(seconds)

    def post(self, url, request, body, seconds):
        """-> (Completion, HTTP status or 0 without a whole answer, seconds that the server asks to
        wait)."""
        import http.client

        headers = {"Content-Type": "application/json"}
        if self.key():
            headers["Authorization"] = f"Bearer {self.key()}"
        began = time.monotonic()
        status = 0
        try:
            status, content, after = fetch(url, body, headers, seconds, self.handles)
            if not 200 <= status < 300:  # a redirect too, as the key goes to no other host
                said = message_of(content, self.key())
                error = f"HTTP {status}" + (f": {said}" if said else "")
                wait = min(waiting_time(after), self.server_wait) if passing(status) else 0.0
                return Completion(request.id, error=error), status, wait
            answer = json.loads(content)
            choice = answer["choices"][0]
            # A hosted name may stand for another model tomorrow.
            self.served.add(str(answer.get("model")))
            said = choice["message"]
            # Some endpoints repeat the begun turn.
            text = (said.get("content") or "").removeprefix(request.prefill)
            # A server with a reasoning parser takes the thought out of the content.
            thought = said.get("reasoning_content") or said.get("reasoning") or ""
            ended = choice.get("finish_reason") == "stop"
            self.note_usage(request.id, answer.get("usage"))
            return Completion(request.id, text=text, ended=ended, reasoning=str(thought)), status, 0
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError,
                AttributeError, RecursionError) as error:
            if time.monotonic() - began >= seconds:
                why = f"no whole answer within {seconds:g} s"
                return Completion(request.id, error=why), 0, 0
            if isinstance(error, (OSError, http.client.HTTPException)):  # refused, cut off halfway
                return Completion(request.id, error=f"{type(error).__name__}: {error}"), 0, 0
            why = f"bad answer: {type(error).__name__}"  # not the promised JSON
            return Completion(request.id, error=why), status or 200, 0

    def note_usage(self, name, usage):
        """Keeps the token counts of a request, if the endpoint reports them."""
        usage = usage if isinstance(usage, dict) else {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if all(type(count) is int for count in counts):
            self.usage[name] = counts

    def joined(self, request):
        """-> Frames of the overview if they go as one video, else None. Windows stay images,
        because a request carries the times of one video alone. So do frames with other stamps."""
        contents = [m["content"] for m in request.messages if isinstance(m["content"], list)]
        videos = [item for content in contents for item in content if item["type"] == "video"]
        if not self.video_item or not videos or videos[0].get("stamp") not in (None, "none"):
            return None
        clip = request.frames[0]
        return clip if len(clip.images) > 1 else None  # processors refuse a video of one frame

    def wire(self, request):
        """Request -> chat messages with frames as JPEGs after their times. Consecutive tool
        messages become one user turn, as in the chat template of the policy."""
        clip = self.joined(request)
        total = sum(len(frames.images) for frames in request.frames if frames is not clip)
        kept = set(evenly(range(total), self.image_cap or total))  # numbers of images
        numbers = itertools.count()
        frames = iter(request.frames)  # in the order of the messages' videos
        turns = []  # [role, parts, holds tool responses]
        for message in request.messages:
            parts = content_parts(message["content"], frames, numbers, kept, clip)
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


def address(url):
    """-> (host, port, path, whether over TLS). Raises ValueError."""
    from urllib.parse import urlsplit

    place = urlsplit(url)
    secure = place.scheme == "https"
    if not place.hostname or not (secure or place.scheme == "http"):
        raise ValueError("an address begins with http:// or https:// and a host")
    path = place.path + (f"?{place.query}" if place.query else "")
    return place.hostname, place.port or (443 if secure else 80), path, secure


def passing(status):
    """Whether another try may succeed. status: as in OpenAIEngine.post."""
    return status in (0, 429) or status >= 500


def probe_messages():
    return [{"role": "user", "content": "Reply with yes."}]


def message_of(content, key):
    """The body of an error -> its message in one line, 200 characters at most, without the key."""
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the text itself
        found = json.loads(text)
        # {"error": {"message": ..}} or {"error": ..}, and {"detail": ..} of some frameworks
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        text = found if isinstance(found, str) else json.dumps(found)
    if text.lstrip().startswith("<"):  # the page of a proxy
        text = re.sub(r"<[^>]*>", " ", text)
    text = text.replace(key, "***") if key else text
    return launch.printable(" ".join(text.split()))[:200]


def waiting_time(after):
    """The header Retry-After, seconds or an HTTP date -> seconds from now; 0 without a number."""
    import datetime
    import email.utils

    try:
        if after.strip().isdigit():
            return float(after)
        then = email.utils.parsedate_to_datetime(after)
        # A date without a zone is in UTC.
        then = then if then.tzinfo else then.replace(tzinfo=datetime.UTC)
        return max(0.0, then.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # no such header, or neither of the two
        return 0.0


def fetch(url, body, headers, seconds, handles):
    """POSTs to this host alone: no redirect and no proxy may carry the key elsewhere. -> (status,
    content, Retry-After or ""). Raises OSError or HTTPException; both if the whole takes longer
    than `seconds`. handles: set that holds a handle of the connection while it is open."""
    import http.client
    import socket
    import ssl

    host, port, path, secure = address(url)
    until = time.monotonic() + seconds
    # A host that is there takes a connection at once, if it takes one at all.
    sock = socket.create_connection((host, port), min(30.0, seconds))
    # The time-out of a socket bounds each read alone, so a server that drips would never meet it.
    # The timer shuts the connection, by a second handle, since TLS takes over the first.
    left = max(0.001, until - time.monotonic())
    sock.settimeout(left)
    with sock.dup() as handle:
        timer = threading.Timer(left, shut, [handle])
        timer.daemon = True
        timer.start()
        handles.add(handle)
        try:
            if secure:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(host, port)
            connection.sock = sock
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            # A body without a length ends where the timer shuts it, and might pass for whole.
            if time.monotonic() >= until:
                raise TimeoutError("timed out")
            return answer.status, content, answer.getheader("Retry-After", "")
        finally:
            handles.discard(handle)
            timer.cancel()
            sock.close()


def shut(sock):
    """Ends every read and write on a connection, in whatever thread."""
    import socket

    with contextlib.suppress(OSError):  # the server has left
        sock.shutdown(socket.SHUT_RDWR)


def make_engine(args, prefill):
    """Flags -> OpenAIEngine. Raises UserError if a server does not answer, or refuses.
    prefill: the protocol forces the start of every turn."""
    engine = OpenAIEngine(
        args.base_url, args.model, key_variable=args.api_key_env, workers=args.workers,
        timeout=args.request_timeout, retries=args.retries, image_cap=args.image_cap,
        video_item=args.video_item,
        prefill=args.think_prefix or prefill,
        tokens_field=args.tokens_field, send_temperature=args.send_temperature,
        sampling=sampling_settings(args), give_up=args.give_up, server_wait=args.server_wait)
    engine.knock()
    return engine


def text_part(text):
    return {"type": "text", "text": text}


def content_parts(content, frames, numbers, kept, clip=None):
    """
    A message's content -> parts of an OpenAI message.

    frames: iterator of video.Frames, one for each video. numbers: iterator of the numbers of the
    request's images; images in `kept` are sent. clip: the Frames that go as one video.
    """
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for item in content:
        if item["type"] == "text":
            parts.append(text_part(item["text"]))
            continue
        shown = next(frames)
        if shown is clip:
            pieces = [jpeg_url(image).partition(",")[2] for image in shown.images]
            url = "data:video/jpeg;base64," + ",".join(pieces)
            parts.append({"type": "video_url", "video_url": {"url": url}})
            continue
        for place, (image, seconds) in enumerate(zip(shown.images, shown.seconds)):
            if next(numbers) not in kept:  # without its time too
                continue
            stamp = chat.stamp_text(seconds, place, item.get("stamp"))
            if stamp:
                parts.append(text_part(stamp))
            parts.append({"type": "image_url", "image_url": {"url": jpeg_url(image)}})
    return parts


def clip_times(clip):
    """Frames -> media_io_kwargs, so that vLLM takes all frames (by default 32) and their times:
    indices at 1000 frames a second are milliseconds."""
    times = [round(1000 * float(second)) for second in clip.seconds]
    # As long as the video: from the first to the last, and half a gap on either side.
    total = round((times[-1] - times[0]) * len(times) / (len(times) - 1))
    total = max(total, times[-1] + 1)
    return {"num_frames": -1, "fps": 1000.0, "frames_indices": times, "total_num_frames": total,
            "duration": total / 1000.0}


def evenly(items, n):
    """n of the items, evenly spread; all if there are fewer."""
    if not 0 < n < len(items):
        return items[: max(n, 0)]
    return [items[int((i + 0.5) * len(items) / n)] for i in range(n)]


def jpeg_url(image):
    """uint8 [H, W, 3] -> data URL."""
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# ------------------------------------------------------------------------------------------------
# The judge of open answers


def judge(records, verdicts, args):
    """
    Lets a chat endpoint decide open answers that the rule calls wrong. A yes makes the score 1.

    verdicts: file, read and appended to; failed requests are asked again. records get "judge": a
    verdict, or None, and then the rule's score stays. args: the judge's flags; without judge_url
    only known verdicts count. Raises UserError if no server answers, or if it refuses.
    """
    doubtful = []  # answers that the rule calls wrong; a record without an answer stays wrong
    for record in records:
        if record["task"]["type"] == "open" and record["score"] == 0:
            if record["extracted"] is not None:
                doubtful.append(record)
    known = {}  # (task id, answer, judge) -> verdict
    verdicts.seek(0)  # the file is open for appending
    for number, line in enumerate(verdicts, 1):
        try:
            verdict = launch.parse_json(line)
            name = verdict["id"], verdict["said"], verdict["model"]
            if verdict["verdict"] is not None:
                known[name] = verdict
        except (ValueError, KeyError, TypeError):
            raise launch.UserError(f"{verdicts.name}:{number}: not JSON, or no verdict; delete the "
                                   "line") from None
    todo = {}  # equal answers of several samples are judged once
    for record in doubtful if args.judge_url else []:
        name = record["task"]["id"], record["said"], args.judge_model
        if name not in known:
            todo[name] = record
    for verdict in ask_judge(list(todo.values()), args) if todo else []:
        known[verdict["id"], verdict["said"], verdict["model"]] = verdict
        verdicts.write(json.dumps(verdict) + "\n")
        verdicts.flush()  # a crash loses no verdict that was paid for
    for record in doubtful:
        record["judge"] = known.get((record["task"]["id"], record["said"], args.judge_model))
        if record["judge"] and record["judge"]["verdict"]:
            record["score"] = 1.0


def judge_engine(args):
    """Flags -> OpenAIEngine of the judge."""
    return OpenAIEngine(args.judge_url, args.judge_model, key_variable=args.judge_key_env,
                        workers=args.workers, timeout=args.request_timeout, retries=args.retries,
                        give_up=args.give_up, server_wait=args.server_wait, is_judge=True)


def ask_judge(records, args):
    """Records -> iterator of {"id", "said", "model", "text", "error", "verdict"} as they come.
    verdict: True, False, or None if the request failed or the reply was neither yes nor no."""
    from tqdm import tqdm

    engine = judge_engine(args)
    engine.knock()
    for number, record in enumerate(records):
        task = record["task"]
        text = (f"Question: {task['question']}\nReference answer: {task['answer']}\n"
                f"Given answer: {record['extracted']}\nDoes the given answer say the same as the "
                "reference answer? Reply with yes or no.")
        messages = [{"role": "user", "content": text}]
        engine.submit(ChatRequest(str(number), [], [], [], [], 16, 0.0, 0, messages))
    left = len(records)
    with tqdm(total=left, desc="judge", disable=args.quiet or None) as bar:
        while left:
            for done in engine.poll():
                left -= 1
                bar.update()
                record = records[int(done.id)]
                said = re.match(r"\W*(yes|no)\b", done.text or "", re.IGNORECASE)
                yield {"id": record["task"]["id"], "said": record["said"],
                       "model": args.judge_model, "text": done.text, "error": done.error,
                       "verdict": said[1].lower() == "yes" if said else None}
    engine.close()
