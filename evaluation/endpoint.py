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

    def __post_init__(self):
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        urls = [url.rstrip("/") + "/chat/completions" for url in given]
        self.busy = dict.fromkeys(urls, 0)  # url -> requests under way
        self.rests = dict.fromkeys(urls, 0.0)  # url -> when it is asked again after an error
        self.lock = threading.Lock()
        self.max_seqs = self.workers * len(self.busy)
        self.served = set()  # names of the models that answered
        self.usage = {}  # request id -> (prompt tokens, sampled tokens), as the endpoint counts
        self.pool = ThreadPoolExecutor(self.max_seqs)
        self.done = queue.SimpleQueue()  # futures of Completions

    def knock(self):
        """Raises UserError if a server does not answer, before every episode fails after its
        retries."""
        import socket

        for url in self.busy:
            try:
                socket.create_connection(address(url)[:2], min(10.0, self.timeout)).close()
            except (OSError, ValueError) as error:
                why = f"({error}); expected an OpenAI-compatible endpoint"
                raise launch.UserError(f"no server answers at {url} {why}") from None

    def submit(self, request):
        # A thread waits for the answer. The loop goes on with other episodes.
        self.pool.submit(self.call, request).add_done_callback(self.done.put)

    def poll(self):
        """-> Completions that have arrived. Waits 20 ms for the first, so that no core spins."""
        try:
            finished = [self.done.get(timeout=0.02).result()]
        except queue.Empty:
            return []
        while not self.done.empty():
            finished.append(self.done.get().result())
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
        """Posts a request, again after 1, 2, 4, .. seconds if that may help -> Completion. A
        failure becomes the Completion's error, never its text, which would be graded."""
        body = json.dumps(self.body(request)).encode()
        for attempt in range(self.retries + 1):
            url = self.take()
            done, passing = self.post(url, request, body)
            self.give_back(url, failed=passing)
            if not done.error or not passing or attempt == self.retries:
                return done
            time.sleep(2.0**attempt)

    def post(self, url, request, body):
        """-> (Completion, whether another try may succeed)."""
        import http.client

        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if key:
            headers["Authorization"] = f"Bearer {key}"
        began = time.monotonic()
        try:
            status, content = fetch(url, body, headers, self.timeout)
            if not 200 <= status < 300:  # a redirect too, as the key goes to no other host
                passing = status == 429 or status >= 500
                return Completion(request.id, error=f"HTTP {status}"), passing
            answer = json.loads(content)
            choice = answer["choices"][0]
            # A hosted name may stand for another model tomorrow.
            self.served.add(str(answer.get("model")))
            # Some endpoints repeat the begun turn.
            text = (choice["message"].get("content") or "").removeprefix(request.prefill)
            ended = choice.get("finish_reason") == "stop"
            self.note_usage(request.id, answer.get("usage"))
            return Completion(request.id, text=text, ended=ended), False
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError,
                AttributeError, RecursionError) as error:
            if time.monotonic() - began >= self.timeout:
                why = f"no whole answer within {self.timeout:g} s"
                return Completion(request.id, error=why), True
            if isinstance(error, (OSError, http.client.HTTPException)):  # refused, cut off halfway
                return Completion(request.id, error=f"{type(error).__name__}: {error}"), True
            why = f"bad answer: {type(error).__name__}"  # not the promised JSON
            return Completion(request.id, error=why), False

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


def fetch(url, body, headers, seconds):
    """POSTs to this host alone: no redirect and no proxy may carry the key elsewhere. -> (status,
    content). Raises OSError or HTTPException; both if the whole takes longer than `seconds`."""
    import http.client
    import socket
    import ssl

    host, port, path, secure = address(url)
    # The time-out of a socket bounds each read alone, so a server that drips would never meet it.
    # The timer shuts the connection, by a second handle, since TLS takes over the first.
    sock = socket.create_connection((host, port), seconds)
    with sock.dup() as handle:
        timer = threading.Timer(seconds, shut, [handle])
        timer.start()
        try:
            if secure:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(host, port)
            connection.sock = sock
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            timer.cancel()
            sock.close()


def shut(sock):
    """Ends every read and write on a connection, in whatever thread."""
    import socket

    with contextlib.suppress(OSError):  # the server has left
        sock.shutdown(socket.SHUT_RDWR)


def make_engine(args, prefill):
    """Flags -> OpenAIEngine. Raises UserError if no server answers.
    prefill: the protocol forces the start of every turn."""
    engine = OpenAIEngine(
        args.base_url, args.model, key_variable=args.api_key_env, workers=args.workers,
        timeout=args.request_timeout, retries=args.retries, image_cap=args.image_cap,
        video_item=args.video_item,
        prefill=args.think_prefix or prefill,
        tokens_field=args.tokens_field, send_temperature=args.send_temperature,
        sampling=sampling_settings(args))
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
    only known verdicts count. Raises UserError if no server answers.
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


def ask_judge(records, args):
    """Records -> iterator of {"id", "said", "model", "text", "error", "verdict"} as they come.
    verdict: True, False, or None if the request failed or the reply was neither yes nor no."""
    from tqdm import tqdm

    engine = OpenAIEngine(args.judge_url, args.judge_model, key_variable=args.judge_key_env,
                          workers=args.workers, timeout=args.request_timeout, retries=args.retries)
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
