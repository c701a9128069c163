"""
plumbing/endpoint.py (tests/test_endpoint.py): the client of an OpenAI-compatible chat endpoint: one
POST that never raises.

  post   JSON -> Reply: the answer, or why there is none

Keys come from an environment variable and are never printed or stored; no redirect and no proxy
carries them elsewhere.

Asks endpoints; writes nothing. Used by plumbing/judge.py, and by evaluation/endpoint.py, whose
engine asks whole episodes.
"""
import argparse
import asyncio
import contextlib
import json
import os
import re
import ssl
import threading
from dataclasses import dataclass

import launch

MAX_REPLY = 16 * 2**20  # bytes of an answer
# Finish reasons of half an answer: network_error, insufficient_system_resource, not_finished, ..
BROKEN = re.compile("error|abort|cancel|time.?out|interrupt|insufficient|not.finished", re.I)
PROBE = [{"role": "user", "content": "Reply with yes."}]  # messages that any model answers


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
        if key_variable and not (self.key() and self.key().isascii() and self.key().isprintable()):
            raise launch.UserError(f"the variable {key_variable} holds no key, or one with a line "
                                   "break or a character that is not ASCII; set it again")
        self.ending = None  # why no request is sent any more
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

        headers = {"Content-Type": "application/json"}
        if self.key():
            headers["Authorization"] = f"Bearer {self.key()}"
        content = b""
        try:
            async with (asyncio.timeout(seconds),
                        self.http.stream("POST", url, content=body, headers=headers) as reply):
                async for part in reply.aiter_bytes():
                    content += part
                    if len(content) > MAX_REPLY:
                        break
        except TimeoutError:
            return Reply(0, error=f"no whole answer within {seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # refused, cut off halfway, no address
            return Reply(0, error=mask_key(f"{type(error).__name__}: {error}", self.key()))
        status = reply.status_code
        if len(content) > MAX_REPLY:
            return Reply(status, error=f"bad answer: more than {MAX_REPLY >> 20} MiB")
        if not 200 <= status < 300:  # a redirect too, as the key goes to no other host
            after = reply.headers.get("Retry-After", "")  # seconds; a date is passed over
            wait = float(after) if is_retryable(status) and after.isdecimal() else 0.0
            message = f"HTTP {status}: {message_of(content, self.key())}"
            return Reply(status, error=message.rstrip(": "), wait=wait)
        try:
            broken = why_broken(answer := mask_key(launch.parse_json(content), self.key()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # Cut off, a proxy's page, or not the promised JSON.
            return Reply(0, error=f"bad answer: {type(error).__name__}")
        return Reply(0, error=f"the server broke off: {broken}") if broken else Reply(200, answer)

    async def pause(self, seconds):
        await asyncio.sleep(seconds)

    def end(self, reason):
        """No request is sent any more. From any thread."""
        self.ending = self.ending or reason

    def close(self, code=0):
        """Returns at once. Requests that are left are cancelled, and the thread ends after them.
        code: as of VllmEngine.close, has no effect."""
        self.end("the run is over")
        self.run(self.leave())

    async def leave(self):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.http.aclose()
        self.loop.stop()


def why_broken(answer):
    """JSON of status 200 -> why it holds half an answer, or none; "" for a whole one."""
    choice, usage = answer["choices"][0], answer.get("usage")
    message, finish = choice["message"], str(choice.get("finish_reason")).lower()
    fault = answer.get("error") or choice.get("error") or BROKEN.search(finish) and finish
    others = map(message.get, ("reasoning_content", "reasoning", "tool_calls"))
    # A model that says nothing says its end.
    silent = not (message_text(message).strip() or any(others))
    lost = finish == "none" or isinstance(usage, dict) and usage.get("completion_tokens") == 0
    return str(fault or (silent and lost and finish) or "")[:200]


def message_text(message):
    """A message of an answer -> its text; of a list of parts the texts, without the thoughts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    return content


def is_retryable(status):
    """Whether another try may succeed. status: of a Reply."""
    # 424: an engine of TGI fell over. 409, 423, 425: it is still loading. 499: a gateway gave up.
    return status in (0, 408, 409, 423, 424, 425, 429, 499) or status >= 500


def mask_key(text, key):
    """Text or JSON of a server -> the same without the key, which some servers repeat."""
    # In JSON no escape hides the key. A word of a few letters (EMPTY, for a server that needs no
    # key) is no secret, and answers may hold it.
    text, key = json.dumps(text), json.dumps(key)[1:-1]
    return json.loads(text.replace(key, "***") if len(key) > 5 else text)


def message_of(content, key):
    """The body of an error -> its message in one line, 200 characters at most, without the key."""
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError):  # not JSON: the text itself
        parsed = launch.parse_json(text)
        # {"error": {"message": ..}} or {"error": ..}, and {"detail": ..} of some frameworks
        for name in ("error", "message", "detail"):
            if isinstance(parsed, dict) and parsed.get(name):
                parsed = parsed[name]
        text = parsed if isinstance(parsed, str) else json.dumps(parsed)
    if text.lstrip().startswith("<"):  # the page of a proxy
        text = re.sub(r"<[^>]*>", " ", text)
    return launch.printable(" ".join(mask_key(text, key).split()))[:200]


def base_url(text):
    """A URL as a flag's value. Raises ArgumentTypeError if it holds a user, a password or a query
    (?key=..): settings are written to files and sent to trackers."""
    if "@" in text or "?" in text:
        raise argparse.ArgumentTypeError("the address names a user or has a query; give it without,"
                                         " and the key in an environment variable")
    return text


def error_line(url, model, reply, flag=""):
    """The line for a server that sent no completion. flag: "judge-", or "" for the one to
    evaluate."""
    if not reply.status:
        return f"no server answers at {url} ({reply.error}); expected an OpenAI-compatible endpoint"
    return (f"{url} refuses a request ({reply.error}); see the server's log, --{flag}model "
            f"{model}, {'--set judge_key_env' if flag else '--api-key-env'}, the /v1 of the URL")
