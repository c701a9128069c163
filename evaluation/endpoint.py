"""
evaluation/endpoint.py: flags of OpenAI-compatible endpoints, which engine.py asks, and a judge's
verdicts on the open answers of an evaluation.

Endpoints take messages and return text, without ids and log-probs, so they serve evaluation alone.
A failure becomes the outcome of its episode, never a text that would be graded.

Asks endpoints; writes the verdicts of a judge. Used by eval.py and evaluation/folders.py.
"""

import argparse
import json

import launch
from engine import OpenAIEngine, add_judge_arguments, judge_request, read_verdict

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

    add_judge_arguments(parser, "if the rule says wrong",
                        "the judge's name; without --judge-url earlier verdicts count")


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
        engine.submit(judge_request(str(number), task["question"], task["answer"],
                                    record["extracted"]))
    left = len(records)
    with tqdm(total=left, desc="judge", disable=args.quiet or None) as bar:
        while left:
            for done in engine.poll():
                left -= 1
                bar.update()
                record = records[int(done.id)]
                yield {"id": record["task"]["id"], "said": record["said"],
                       "model": args.judge_model, "text": done.text, "error": done.error,
                       "verdict": read_verdict(done.text)}
    engine.close()
