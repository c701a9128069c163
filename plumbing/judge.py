"""
plumbing/judge.py (tests/test_judge_reward.py): an OpenAI-compatible chat endpoint: one POST that
never raises, and the judge of open answers.

  post   JSON -> Reply: the answer, or why there is none
  judge  question, reference answer, given answer -> yes, no, or no verdict; one prompt and one
         parser for evaluation and for rewards

Keys come from an environment variable and are never printed or stored; no redirect and no proxy
carries them elsewhere. The judge keeps its verdicts in a file. Used by rollout.py, grpo.py and
evaluation/endpoint.py, whose engine asks whole episodes.
"""
import argparse
import asyncio
import contextlib
import json
import os
import re
import ssl
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import launch

MAX_REPLY = 16 * 2**20  # bytes of an answer


@dataclass
class Reply:
    """What came back from a POST."""

    status: int  # of HTTP; 0 without a whole answer
    answer: object = None  # JSON, if the status is a success
    error: str = None  # in one line
    wait: float = 0.0  # seconds that the server asks to wait


class Client:
    """POSTs to chat endpoints. All requests wait in one thread of their own, so counters need no
    lock."""

    def __init__(self, key_variable=None):
        """key_variable: environment variable of the key, which is never printed or stored."""
        import httpx  # half a second, which --help need not wait for

        self.key_variable = key_variable
        # A header cannot hold it, and the error would: two lines of a file, or a pasted ellipsis.
        if not (self.key().isascii() and self.key().isprintable()):
            raise launch.UserError(f"the key in {key_variable} holds a line break, or a character "
                                   "that is not ASCII; set it again")
        self.ending = None  # why no request is sent any more
        self.over = asyncio.Event()  # set with it: ends every pause
        self.clocks = set()  # time-outs of the requests under way
        self.loop = asyncio.new_event_loop()
        # No time-out of httpx: that bounds each read alone, and a server that drips never meets it.
        self.http = httpx.AsyncClient(trust_env=False, timeout=None, follow_redirects=False,
                                      verify=ssl.create_default_context())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work):
        """A coroutine -> Future of its result, from the thread of the requests."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def key(self):
        """The key, or an empty text."""
        # A file that was read into the variable often ends in a newline.
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    async def post(self, url, body, seconds):
        """bytes of JSON -> Reply, within `seconds` in all."""
        import httpx

        try:
            async with asyncio.timeout(seconds) as clock:
                self.clocks.add(clock)
                try:
                    status, headers, content = await self.receive(url, body)
                finally:
                    self.clocks.discard(clock)
        except TimeoutError:
            return Reply(0, error=f"no whole answer within {seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # refused, cut off halfway, no address
            return Reply(0, error=masked(f"{type(error).__name__}: {error}", self.key()))
        if len(content) > MAX_REPLY:
            return Reply(status, error=f"bad answer: more than {MAX_REPLY >> 20} MiB")
        if not 200 <= status < 300:  # a redirect too, as the key goes to no other host
            said = message_of(content, self.key())
            after = headers.get("Retry-After", "")  # seconds; a date, which is rare, is passed over
            wait = float(after) if passing(status) and after.isdecimal() else 0.0
            return Reply(status, error=f"HTTP {status}" + (f": {said}" if said else ""), wait=wait)
        try:
            return Reply(status, masked(launch.parse_json(content), self.key()))
        except ValueError as error:
            return Reply(status, error=f"bad answer: {type(error).__name__}")

    async def receive(self, url, body):
        """-> (status, headers, content) of a POST. The content ends soon after MAX_REPLY."""
        headers = {"Content-Type": "application/json"}
        if self.key():
            headers["Authorization"] = f"Bearer {self.key()}"
        async with self.http.stream("POST", url, content=body, headers=headers) as reply:
            content = b""
            async for part in reply.aiter_bytes():
                content += part
                if len(content) > MAX_REPLY:
                    break
            return reply.status_code, reply.headers, content

    async def pause(self, seconds):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)

    def end(self, why):
        """Ends every wait and every request. From any thread."""
        self.ending = self.ending or why
        self.loop.call_soon_threadsafe(self.end_waits)

    def end_waits(self):
        self.over.set()
        for clock in self.clocks:
            clock.reschedule(0.0)

    def close(self):
        """Returns at once. Requests that are left fail, and the thread ends after them."""
        self.end("the run is over")
        self.run(self.leave())

    async def leave(self):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self.http.aclose()
        self.loop.stop()


def passing(status):
    """Whether another try may succeed. status: as in OpenAIEngine.post."""
    return status in (0, 429) or status >= 500


def probe_messages():
    return [{"role": "user", "content": "Reply with yes."}]


def masked(said, key):
    """Text or JSON of a server -> the same without the key, which some servers repeat."""
    # In JSON no escape hides the key. A word of a few letters (EMPTY, for a server that needs no
    # key) is no secret, and answers may hold it.
    said, key = json.dumps(said), json.dumps(key)[1:-1]
    return json.loads(said.replace(key, "***") if len(key) > 5 else said)


def message_of(content, key):
    """The body of an error -> its message in one line, 200 characters at most, without the key."""
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError):  # not JSON: the text itself
        found = launch.parse_json(text)
        # {"error": {"message": ..}} or {"error": ..}, and {"detail": ..} of some frameworks
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        text = found if isinstance(found, str) else json.dumps(found)
    if text.lstrip().startswith("<"):  # the page of a proxy
        text = re.sub(r"<[^>]*>", " ", text)
    return launch.printable(" ".join(masked(text, key).split()))[:200]


def address(text):
    """A URL as a flag's value. Raises ArgumentTypeError if it holds a user, a password or a query
    (?key=..): settings are written to files and sent to trackers."""
    if "@" in text or "?" in text:
        raise argparse.ArgumentTypeError("the address names a user or has a query; give it without,"
                                         " and the key in an environment variable")
    return text


def refusal(url, model, reply, flag=""):
    """The line for a server that sent no completion. flag: "judge-", or "" for the one to
    evaluate."""
    if not reply.status:
        return f"no server answers at {url} ({reply.error}); expected an OpenAI-compatible endpoint"
    return (f"{url} refuses a request ({reply.error}); see the server's log, the key in "
            f"--{flag or 'api-'}key-env, --{flag}model {model}, and if the address ends in /v1")


# ------------------------------------------------------------------------------------------------
# The judge of open answers


def add_judge_arguments(parser, when, name="the judge's name"):
    """Flags of the judge. when: what it is asked about. name: help of --judge-model."""
    add = parser.add_argument_group("judge of open answers").add_argument
    add("--judge-url", type=address, help=f"chat endpoint, asked {when}; default: none")
    add("--judge-model", help=name)
    add("--judge-key-env", help="environment variable that holds the judge's key")


def judge_messages(question, gold, answer):
    """A question, its reference answer and a given answer -> messages."""
    text = (f"Question: {question}\nReference answer: {gold}\nGiven answer: {answer}\n"
            "Does the given answer say the same as the reference answer? Reply with yes or no.")
    return [{"role": "user", "content": text}]


def read_verdict(text):
    """A judge's reply -> True, False, or None if it is neither yes nor no, or both."""
    # The second word of "yes and no" counts if a sentence ends with it: "Yes, no doubt" is a yes.
    said = re.match(r"\W*(yes|no)\b(?:\W+(?:(?:and|or|but)\W+)?(yes|no)(?=\s*(?:[^\w\s]|$)))?",
                    (text or "").lower())
    return said[1] == "yes" if said and said[2] in (None, said[1]) else None


def read_verdicts(path, model):
    """JSONL of a Judge -> {(question, reference answer, given answer): verdict of this model}."""
    content, verdicts = b"", {}
    if path and os.path.exists(path):
        with open(path, "rb") as f:
            content = f.read()
    for line in content.split(b"\n"):
        # A kill may cut a line off. Its texts are then asked about again.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = launch.parse_json(line)
            if row["model"] == model and row["verdict"] in (True, False):
                texts = row["question"], row["gold"], row["answer"]
                verdicts[texts] = row["verdict"]
    return verdicts


class Judge:
    """A chat endpoint that decides open answers while rollouts go on. Equal texts are asked about
    once, and verdicts are kept in a file for a run that goes on."""

    def __init__(self, args, path=None):
        """args: the judge's flags. path: JSONL of verdicts, read and appended to; None: no file.
        Raises UserError if no server answers, or if it refuses a plain request."""
        self.path, self.model = path, args.judge_model
        self.url = args.judge_url.rstrip("/") + "/chat/completions"
        self.client = Client(args.judge_key_env)
        self.room = asyncio.Semaphore(16)  # requests at once
        self.waiting = self.failed = 0  # answers that wait; tries in a row that no server answered
        self.told = False  # of a failure
        if os.environ.get("RANK", "0") == "0":  # for all ranks: one probe, one line if it fails
            reply = self.client.run(self.tries(probe_messages())).result()
            if reply.error:
                raise launch.UserError(refusal(self.url, self.model, reply, "judge-"))
            self.failed = 0
        self.known = {}  # (question, reference answer, given answer) -> Future of its verdict
        for texts, verdict in read_verdicts(path, self.model).items():
            self.known[texts] = Future()
            self.known[texts].set_result(verdict)
        if path and os.path.exists(path) and os.path.getsize(path):
            with open(path, "rb") as f:
                f.seek(-1, os.SEEK_END)
                torn = f.read() != b"\n"
            self.append(b"\n" * torn)  # else the next line would become a part of the torn one

    def ask(self, question, gold, answer):
        """-> (Future of True, False, or None after a failure; whether these texts were asked about
        before). Returns at once. A failure is not kept: the next ask tries again."""
        texts = question, gold, answer
        before = self.known.get(texts)
        if before is not None and not (before.done() and before.result() is None):
            return before, True
        self.known[texts] = self.client.run(self.decide(texts))
        return self.known[texts], False

    async def tries(self, messages):
        """Posts up to five times, within about 15 s -> Reply."""
        body = json.dumps({"model": self.model, "messages": messages, "max_tokens": 16,
                           "temperature": 0.0, "seed": 0}).encode()
        for attempt in range(5):
            # A server that is away: the answers that wait are paid by rule, those of the next step
            # are asked about again.
            if self.client.ending or self.failed > 4:
                return Reply(0, error="the judge is away")
            reply = await self.client.post(self.url, body, 60.0)
            self.failed = self.failed + 1 if reply.error and passing(reply.status) else 0
            if not self.failed or attempt == 4:
                return reply
            await self.client.pause(max(2.0**attempt, min(reply.wait, 60.0)))

    async def decide(self, texts):
        """-> verdict, see ask."""
        self.failed *= self.waiting > 0
        self.waiting += 1
        async with self.room:
            reply = await self.tries(judge_messages(*texts))
        self.waiting -= 1
        verdict, text = None, ""
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            text = reply.answer["choices"][0]["message"]["content"]
            verdict = read_verdict(text)
        if verdict is None and not self.told:
            self.told = True  # once a run: judge_failed counts all of them
            why = reply.error or f"neither yes nor no: {str(text)[:100]!r}"
            print(launch.printable(f"no verdict of the judge ({why}); such answers keep the "
                                   "score of the rule"), file=sys.stderr, flush=True)
        if verdict is not None and self.path:
            row = dict(zip(("question", "gold", "answer"), texts), model=self.model,
                       verdict=verdict)
            self.append(json.dumps(row).encode() + b"\n")
        return verdict

    def append(self, line):
        # One write to the end of the file, so lines of several threads and ranks stay apart.
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as f:
            f.write(line)  # a full disk loses what is kept, not the verdict

    def close(self):
        # Nothing is cancelled: what is queued fails at once, and its episodes read that.
        self.client.close()


def open_judge(args, path=None):
    """Flags -> Judge, or None without --judge-url. Raises as Judge does. path: see Judge."""
    if bool(args.judge_url) != bool(args.judge_model):
        raise launch.UserError("--judge-url and --judge-model belong together")
    return Judge(args, path) if args.judge_url else None
