"""
plumbing/judge.py (tests/test_judge_reward.py): chat endpoints, asked by openai's own client, and
the judge of open answers.

  judge  question, reference answer, given answer -> yes, no, or no verdict; one prompt and one
         parser for evaluation and for rewards

  counted           the server says no to one text (400, 413, 422): Refused
  asked once more   by openai's client, ten times: no connection, a time-out, 408, 409, 429, 5xx
  the end           all else, and the tenth time: RunError. The same command goes on.

Asks endpoints; keeps the judge's verdicts in a file.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import ssl
import threading

import launch

# A judge that has no verdict on these texts has none on others: (question, reference, answer).
PROBE = "Which colour is a clear sky by day?", "blue", "It is blue."
REPLY_TOKENS = 4096  # of a verdict at most, with the judge's thought
VERDICT = ("question", "gold", "answer", "model", "verdict")  # a line of the file of verdicts


# ------------------------------------------------------------------------------------------------
# The client


class Refused(Exception):
    """The server says no to this one text, and would say no to it again."""


class ChatClient:
    """Chat endpoints, asked by openai's client in a thread of its own."""

    retries = 10  # after 0.5, 1, 2, .. 8, 8 seconds, or as the server says

    def __init__(self, urls, model, key_variable=None, seconds=300.0, workers=16):
        """urls: bases that take turns, http://127.0.0.1:8000/v1. key_variable: environment variable
        of the key, which is never printed or stored. seconds: of one try. workers: requests at
        once. Raises UserError for a variable without a key."""
        import openai  # a second, which --help need not wait for

        self.model, self.key = model, "no-key"
        if key_variable:
            # A file that was read into the variable often ends in a newline.
            self.key = os.environ.get(key_variable, "").strip()
            if not self.key or not self.key.isprintable():
                raise launch.UserError(f"the variable {key_variable} holds no key of one line")
        # No redirect and no proxy carries the key, or the frames, to another host. Headers that
        # openai's client takes from OPENAI_* variables are left out.
        headers = {"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()}
        http = openai.DefaultAsyncHttpxClient(
            follow_redirects=False, trust_env=False, verify=ssl.create_default_context())
        self.clients = [
            openai.AsyncOpenAI(base_url=url, api_key=self.key, timeout=seconds, http_client=http,
                               max_retries=self.retries, default_headers=headers) for url in urls]
        self.turns = itertools.cycle(self.clients)
        self.slots = asyncio.Semaphore(workers)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work):
        """A coroutine -> Future of its result, from the thread of the requests."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def chat(self, body, client=None):
        """Fields of a request -> (answer, its first choice, whose content is a text). client: one
        of self.clients; default: the next. Raises Refused, RunError."""
        import openai

        client = client or next(self.turns)
        try:
            async with self.slots:
                answer = await client.chat.completions.create(
                    model=self.model, messages=body["messages"], extra_body=body)
            choice = answer.choices[0]
            text = choice.message.content or ""
            if isinstance(text, list):  # of parts: thoughts and texts
                text = "".join(part["text"] for part in text if part["type"] == "text")
            choice.message.content = text
            fault = getattr(answer, "error", None) or getattr(choice, "error", None)  # gateways'
            if fault or choice.finish_reason in ("error", "abort"):
                raise ValueError(f"half an answer: {fault or choice.finish_reason}")
            return answer, choice
        # The last four: the answer is no JSON, or not of the promised form.
        except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = self.in_one_line(error.__cause__ or error)
            if getattr(error, "status_code", None) in (400, 413, 422):
                raise Refused(reason) from None
        raise launch.RunError(f"{client.base_url}, model {self.model}: {reason}; the same command "
                              "goes on")

    def in_one_line(self, error):
        """An error -> its kind and text, without the key, which some servers repeat."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return launch.printable(text.replace(self.key, "***"))[:300]

    def check(self, body):
        """Asks every endpoint once at a start -> their first choices. Raises UserError if one does
        not answer, or refuses."""
        choices = []
        for client in self.clients:
            try:  # without retries: a wrong address is told at once
                request = self.chat(body, client.with_options(max_retries=0))
                choices.append(self.run(request).result()[1])
            except (Refused, launch.RunError) as error:
                raise launch.UserError(
                    f"{client.base_url}, model {self.model}, does not answer: {error}; see the "
                    "server's log, the name of the model, the variable of the key, the /v1 of the "
                    "address") from None
        return choices

    def close(self, code=0):
        """Returns at once. code: as of VllmEngine.close, has no effect."""
        self.loop.call_soon_threadsafe(self.loop.stop)


def base_url(text):
    """A URL as a flag's value. Raises ArgumentTypeError if it holds a user, a password or a query
    (?key=..): settings are written to files and sent to trackers."""
    if "@" in text or "?" in text:
        raise argparse.ArgumentTypeError("the address names a user or has a query; give it without,"
                                         " and the key in an environment variable")
    return text


# ------------------------------------------------------------------------------------------------
# The judge


def add_judge_arguments(parser, when, name="the judge's name"):
    """Flags of the judge. when: about what, or when, it is asked. name: help of --judge-model."""
    add = parser.add_argument_group(
        "judge of open answers (its key, if any, in the variable JUDGE_API_KEY)").add_argument
    add("--judge-url", type=base_url, help=f"chat endpoint, asked {when}; default: none")
    add("--judge-model", help=name)


def judge_messages(question, gold, answer):
    """A question, its reference answer and a given answer -> messages."""
    text = (f"Question: {question}\nReference answer: {gold}\nGiven answer: {answer}\n"
            "Does the given answer say the same as the reference answer? Reply with yes or no.")
    return [{"role": "user", "content": text}]


def read_verdict(text):
    """A judge's reply -> True, False, or None if it is neither yes nor no, or both. A thought is
    left out; one that never ended leaves no verdict."""
    text = text.lower().rpartition("</think>")[2]
    lead = r"\W*(?:(?:the |my )?(?:final )?(?:answer|verdict)\W+(?:is\W+)?)?"
    # The second word of "yes and no" counts if a sentence ends with it: "Yes, no doubt" is a yes.
    verdict_words = r"(yes|no)\b(?:\W+(?:(?:and|or|but)\W+)?(yes|no)(?=\s*(?:[^\w\s]|$)))?"
    match = re.match(lead + verdict_words, text)
    return match[1] == "yes" if match and match[2] in (None, match[1]) else None


def read_verdicts(path, model):
    """JSONL of a Judge -> {(question, reference answer, given answer): verdict of this model}."""
    verdicts = {}
    if path and os.path.exists(path):
        # A kill may cut a line off. Its texts are then asked about again.
        for row in launch.read_jsonl(path, VERDICT, faults=["a line that a kill has torn"]):
            if row["model"] == model:
                verdicts[row["question"], row["gold"], row["answer"]] = row["verdict"]
    return verdicts


def append_row(path, row):
    """Appends a row to JSONL of several threads and ranks."""
    # The newline in front ends a line that a kill or a full disk has torn. One write, so that rows
    # of several ranks do not mix.
    with open(path, "ab", buffering=0) as file:
        file.write(b"\n" + json.dumps(row).encode())


class Judge(ChatClient):
    """A chat endpoint that decides open answers while rollouts go on. Equal texts are asked about
    once, and verdicts are kept in a file for a run that goes on."""

    def __init__(self, args, path=None):
        """args: the judge's flags. path: JSONL of verdicts, read and appended to; None: no file.
        Raises UserError if the judge does not answer, refuses, or has no verdict on PROBE."""
        key_variable = "JUDGE_API_KEY" if "JUDGE_API_KEY" in os.environ else None
        super().__init__([args.judge_url], args.judge_model, key_variable)
        self.path = path
        self.earlier = read_verdicts(path, self.model)
        self.verdicts = {}  # (question, reference answer, given answer) -> Future of its verdict
        if os.environ.get("RANK", "0") == "0":  # for all ranks: one probe, one line if it fails
            [choice] = self.check(self.body(*PROBE))
            reply = choice.message.content
            if read_verdict(reply) is None:
                raise launch.UserError(
                    f"--judge-model {self.model} gives no verdict (neither yes nor no within "
                    f"{REPLY_TOKENS} tokens: {reply[-100:]!r})")

    def body(self, *texts):
        return {"messages": judge_messages(*texts), "max_tokens": REPLY_TOKENS,
                "temperature": 0.0, "seed": 0}

    def ask(self, *texts):
        """Question, reference answer, given answer -> Future of True, False, or None for a reply
        without a verdict. Returns at once. The Future raises RunError if the judge does not
        answer."""
        if texts not in self.verdicts:
            self.verdicts[texts] = self.run(self.verdict_on(texts))
        return self.verdicts[texts]

    async def verdict_on(self, texts):
        if texts in self.earlier:
            return self.earlier[texts]
        try:
            _, choice = await self.chat(self.body(*texts))
        except Refused:
            return None
        verdict = read_verdict(choice.message.content)
        if verdict is not None and self.path:
            append_row(self.path, dict(zip(VERDICT, (*texts, self.model, verdict))))
        return verdict


def open_judge(args, path=None):
    """Flags -> Judge, or None without --judge-url. Raises as Judge does. path: see Judge."""
    if bool(args.judge_url) != bool(args.judge_model):
        raise launch.UserError("--judge-url and --judge-model belong together")
    return Judge(args, path) if args.judge_url else None
