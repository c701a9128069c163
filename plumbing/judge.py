"""
plumbing/judge.py (tests/test_judge_reward.py): the judge of open answers: a chat endpoint that says
whether an answer says what the reference answer says.

  judge  question, reference answer, given answer -> yes, no, or no verdict; one prompt and one
         parser for evaluation and for rewards

Asks an endpoint; keeps its verdicts in a file. Used by rollout.py, grpo.py, eval.py,
tools/draft.py and evaluation/endpoint.py.
"""
import asyncio
import contextlib
import errno
import json
import os
import re
import sys
from concurrent.futures import Future

import launch
from plumbing.endpoint import Client, Reply, base_url, error_line, is_retryable, message_text

# The question of the start: a judge that has no verdict on these texts has none on others.
PROBE = "Which colour is a clear sky by day?", "blue", "It is blue."


def add_judge_arguments(parser, when, name="the judge's name"):
    """Flags of the judge. when: about what, or when, it is asked. name: help of --judge-model."""
    add = parser.add_argument_group("judge of open answers").add_argument
    add("--judge-url", type=base_url, help=f"chat endpoint, asked {when}; default: none")
    add("--judge-model", help=name)
    parser.add_setting("judge_tokens", "of a judge's reply, its thought included", 2048)
    parser.add_setting("judge_key_env", "environment variable that holds the judge's key", type=str)


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
    both = r"(yes|no)\b(?:\W+(?:(?:and|or|but)\W+)?(yes|no)(?=\s*(?:[^\w\s]|$)))?"
    match = re.match(lead + both, text)
    return match[1] == "yes" if match and match[2] in (None, match[1]) else None


def read_verdicts(path, model):
    """JSONL of a Judge -> {(question, reference answer, given answer): verdict of this model}."""
    content, verdicts = b"", {}
    with contextlib.suppress(FileNotFoundError):
        content = launch.read_file(path or "")
    for line in content.split(b"\n"):
        # A kill may cut a line off. Its texts are then asked about again.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = launch.parse_json(line)
            if row["model"] == model and row["verdict"] in (True, False):
                verdicts[row["question"], row["gold"], row["answer"]] = row["verdict"]
    return verdicts


def append_row(path, row):
    """Appends a row to JSONL of several threads and ranks, whole or not at all. Raises RunError if
    the disk does not take it."""
    line = json.dumps(row).encode() + b"\n"
    try:
        with open(path, "ab", buffering=0) as f:  # one write, so a kill leaves no half line
            if (size := f.write(line)) < len(line):  # a full disk takes a part, without an error
                f.truncate(f.tell() - size)
                raise OSError(errno.ENOSPC, "the disk is full")
    except OSError as error:
        raise launch.RunError(f"{path}: {launch.why(error)}; the same command goes on") from None


def rewrite_files(paths):
    """Writes finished JSONL anew. A disk that was full for a while may have taken rows into memory
    alone, where they are read as if they were on it."""
    for path in filter(launch.is_file, paths):
        launch.write_atomic(path, launch.read_file(path))


class Judge(Client):
    """A chat endpoint that decides open answers while rollouts go on. Equal texts are asked about
    once, and verdicts are kept in a file for a run that goes on."""

    def __init__(self, args, path=None):
        """args: the judge's flags. path: JSONL of verdicts, read and appended to; None: no file.
        Raises UserError if no server answers, if it refuses, or if its answer is no verdict."""
        self.path, self.model, self.tokens = path, args.judge_model, args.judge_tokens
        self.url = args.judge_url.rstrip("/") + "/chat/completions"
        super().__init__(args.judge_key_env)
        self.room = asyncio.Semaphore(16)  # requests at once
        # Answers that wait; tries in a row that no server answered; answers without a reply so
        # far; whether the user knows.
        self.waiting, self.failed, self.lost, self.told = 0, 0, 0, False
        if os.environ.get("RANK", "0") == "0":  # for all ranks: one probe, one line if it fails
            reply = self.run(self.post_with_retries(judge_messages(*PROBE))).result()
            if reply.error:
                raise launch.UserError(error_line(self.url, self.model, reply, "judge-"))
            text = reply_text(reply)
            if read_verdict(text) is None:
                reason = f"neither yes nor no within judge_tokens {self.tokens}: {text[-100:]!r}"
                raise launch.UserError(f"{self.url}: --judge-model {self.model} gives no verdict "
                                       f"({reason}); a model that thinks needs more tokens")
        self.known = {}  # (question, reference answer, given answer) -> Future of its verdict
        for texts, verdict in read_verdicts(path, self.model).items():
            self.known[texts] = Future()
            self.known[texts].set_result(verdict)

    def ask(self, question, gold, answer):
        """-> (Future of True, False, or None after a failure; whether these texts were asked about
        before). Returns at once. A failure is not kept: the next ask tries again."""
        texts = question, gold, answer
        before = self.known.get(texts)
        if before is not None and not (before.done() and before.result() is None):
            return before, True
        self.known[texts] = self.run(self.judge_answer(texts))
        return self.known[texts], False

    async def post_with_retries(self, messages):
        """Posts up to five times, within about 15 s -> Reply."""
        body = json.dumps({"model": self.model, "messages": messages,
                           "max_tokens": self.tokens, "temperature": 0.0, "seed": 0}).encode()
        for attempt in range(5):
            # A server that is away: the answers that wait are paid by rule, those of the next step
            # are asked about again.
            if self.ending or self.failed > 4:
                return Reply(0, error="the judge is away")
            reply = await self.post(self.url, body, 300.0)  # a thought takes minutes on a slow card
            again = bool(reply.error) and is_retryable(reply.status)
            self.failed = self.failed + 1 if again and reply.status != 429 else 0  # 429: it is up
            if not again or attempt == 4:
                return reply
            await self.pause(max(2.0**attempt, min(reply.wait, 60.0)))

    async def judge_answer(self, texts):
        """-> verdict, see ask."""
        self.failed *= self.waiting > 0
        self.waiting += 1
        async with self.room:
            reply = await self.post_with_retries(judge_messages(*texts))
        self.waiting -= 1
        text = reply_text(reply)
        verdict = read_verdict(text)
        self.lost += bool(reply.error) and reply.status not in (400, 413, 422)  # of this answer
        if verdict is None and not self.told:
            self.told = True  # once a run: judge_failed counts all of them
            reason = reply.error or f"neither yes nor no: {str(text)[:100]!r}"
            print(launch.printable(f"no verdict of the judge ({reason}); such answers keep the "
                                   "score of the rule"), file=sys.stderr, flush=True)
        if verdict is not None and self.path:
            row = dict(zip(("question", "gold", "answer"), texts), model=self.model)
            append_row(self.path, {**row, "verdict": verdict})
        return verdict


def reply_text(reply):
    return "" if reply.error else message_text(reply.answer["choices"][0]["message"])


def open_judge(args, path=None):
    """Flags -> Judge, or None without --judge-url. Raises as Judge does. path: see Judge."""
    if bool(args.judge_url) != bool(args.judge_model):
        raise launch.UserError("--judge-url and --judge-model belong together")
    return Judge(args, path) if args.judge_url else None
