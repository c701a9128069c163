"""
rewards.py: from the text a policy wrote to its reward, and to the tokens that carry it.

    R       = R_acc + w_format * R_fmt + tool_weight * R_tool     one scalar per episode     score
    R_acc   = [letter == gold] | temporal IoU | token F1          from <answer> alone        accuracy
    R_fmt   = clip(R_base + anchor * R_anchor, 0, 1)              <= 0.5 if a tag is misused format_reward
    R_tool  = 0 | 0.1 parseable | 0.3 executed | +0.5 if executed and R_acc > 0              tool_reward
    A_task  = (R_acc + R_tool - mean) / sigma                     every sampled token        group_advantages
    A_fmt   = w_format * (R_fmt - mean) / sigma                   tokens in struct(o)        structural_mask
    sigma   = population std of R over the rollouts of one prompt

Where this departs from the ParaVT paper and its code, and why:
  - The forced "<think>\\n" counts as present when a turn is scored; else closing the thought would
    earn nothing and writing a second <think> would.
  - Misused tags cap R_fmt, R_fmt never leaves [0, 1], and an empty tag pair earns nothing:
    otherwise garbage is free.
  - "Executed" is a count from the episode, never a string: a model can write <tool_response> itself.
  - The bonus for a correct answer needs an executed call; a call that only parses must not unlock it.
  - Only the last non-empty <answer> of the last turn, outside thought, is graded: no draft and no
    stray letter counts (answer_from="line" also reads the last line, as the authors' release does).
  - Letters and spans are extracted without seeing the gold answer; what is ambiguous is no answer.

Above the ruled line: what a training step passes through. Below it: how calls, answers, letters and
times are read out of text. Standard library only; reads and writes no file; no text can make a
function here raise. Copy it alone.

    >>> turns = ["Look closer.</think><tool_call>{}</tool_call>", "A dog.</think><answer>B</answer>"]
    >>> result = score(turns, "mcq", "B", options=["cat", "dog"], num_parseable=0, num_executed=0)
    >>> [round(result[key], 2) for key in ("acc", "fmt", "tool", "total")]
    [1.0, 0.9, 0.0, 1.9]
"""

import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------
# Rewards of one episode


def score(turns, task_type, gold, options=None, num_parseable=0, num_executed=0, think_prefix=True,
          answer_suffix=True, anchor=0.5, gamma=0.3, w_format=1.0, tool_weight=1.0,
          open_metric="f1", answer_from="tag"):  # fmt: skip
    """
    All reward terms of one episode: {"acc", "fmt", "tool", "total", "closure"}; terms unweighted.

    turns: the sampled text of each main-agent turn, special tokens removed. think_prefix: every turn
    began inside a thought that is not in its text. task_type, gold, options, open_metric: see
    accuracy. answer_suffix, anchor, gamma: see format_reward. num_parseable, num_executed: calls
    without an error, and calls that were run. answer_from: "tag" | "line" (see stated_answer).
    """
    read = {"tag": final_answer, "line": stated_answer}[answer_from]
    acc = accuracy(read(turns, think_prefix), task_type, gold, options, open_metric)
    fmt = format_reward(turns, think_prefix, answer_suffix, anchor, gamma)["total"]
    tool = tool_reward(num_parseable, num_executed, acc)
    # The terms stay unweighted in the record, so that a rollout can be replayed under other weights.
    total = acc + w_format * fmt + tool_weight * tool
    closure = closure_counts(turns, think_prefix)
    return {"acc": acc, "fmt": fmt, "tool": tool, "total": total, "closure": closure}


def accuracy(response, task_type, gold, options=None, open_metric="f1"):
    """
    R_acc in [0, 1] of an answer body (None: no answer, 0.0).

    gold: a letter for "mcq", a text for "open", (start, end) seconds for "grounding".
    open_metric: "f1" or "exact". Raises ValueError for another task_type or open_metric: that is the
    caller's error, never the model's.
    """
    if task_type not in ("mcq", "open", "grounding"):
        raise ValueError(f"task_type {task_type!r}: expected mcq, open or grounding")
    if open_metric not in ("f1", "exact"):
        raise ValueError(f"open_metric {open_metric!r}: expected f1 or exact")
    if response is None:
        return 0.0
    if task_type == "mcq":
        return float(extract_letter(response, options) == gold.strip().upper())
    if task_type == "grounding":
        return temporal_iou(extract_span(response), gold)
    if open_metric == "exact":
        return float(match_open(response, gold))
    return token_f1(response, gold)


def tool_reward(num_parseable, num_executed, acc):
    """
    R_tool in [0, 0.8]: 0 without a parseable call, 0.1 with one, 0.3 if one was executed, +0.5 more
    if acc > 0.

    num_executed is what the episode ran, and the bonus needs it: a call that only looks right must
    not be worth 0.6.
    """
    if num_parseable <= 0:
        return 0.0
    if num_executed <= 0:
        return 0.1
    return 0.8 if acc > 0 else 0.3


def format_reward(turns, think_prefix=True, answer_suffix=True, anchor=0.5, gamma=0.3):
    """
    R_fmt of one episode, its parts and the conditions they came from.

    turns, think_prefix: see score. anchor: weight of R_anchor. gamma: penalty inside it.

    R_base: with the Answer Suffix, without it
      think             last turn's thought, closed, >= 10 characters beside tags     0.2   0.3
      answer_opened     last turn has a non-empty <answer> body outside thought       0.3   -
      answer_closed     and that body is closed                                       0.2   -
      think_before_call a turn with a valid call closed its thought before any call   0.3   0.2
      balanced          every turn's tags pair up, if anything above scored           0.1   0.1
    R_anchor
      think_closed      every turn opens one thought, closes it and has a word in it  0.4
      flow              think_closed, and the last turn is think, answer, in order    0.3
      never_closed      a turn ends inside a thought                                  -gamma

    total = clip(R_base + anchor * R_anchor, 0, 1), at most 0.5 when `capped`: a tag that is
    unbalanced, nested or opened again, or a tool response written by the model. "anchor" in the
    result is R_anchor before its weight; `well_formed`: the flow holds and nothing is capped, the
    strictest reading of the protocol.
    """
    # The forced <think> is put back before tags are read: it counts as opened.
    parsed = [turn_tags(turn, think_prefix) for turn in turns]
    thoughts = [closed_thought(tags, text) for tags, text in parsed]
    body, closed = last_answer(turns[-1], think_prefix) if turns else (None, False)

    on = {
        "think": bool(turns) and len(thoughts[-1]) >= 10,
        "answer_opened": body is not None,
        "answer_closed": body is not None and closed,
        "think_before_call": any(thinks_before_call(turn, think_prefix) for turn in turns),
        "balanced": all(is_balanced(tags) for tags, _ in parsed),
        "think_closed": bool(turns) and all(thoughts),
        "never_closed": any(never_closed(turn, think_prefix) for turn in turns),
    }
    # The flow is strict about the order of the tags and lenient about text between them.
    order = [(closing, kind) for closing, kind, *_ in parsed[-1][0]] if turns else []
    pairs = [(False, "think"), (True, "think"), (False, "answer"), (True, "answer")]
    on["flow"] = on["think_closed"] and on["answer_closed"] and order == pairs
    # A response that the model wrote itself: paid, it would learn to answer its own calls.
    forged = ("<tool_response>", "</tool_response>")
    on["tool_response"] = any(tag in turn for turn in turns for tag in forged)
    on["capped"] = on["tool_response"] or not on["balanced"]
    on["well_formed"] = on["flow"] and not on["capped"]

    if answer_suffix:
        base = 0.2 * on["think"] + 0.3 * on["think_before_call"]
        base += 0.3 * on["answer_opened"] + 0.2 * on["answer_closed"]
    else:
        # Without the Answer Suffix the answer block earns nothing and thinking a little more.
        base = 0.3 * on["think"] + 0.2 * on["think_before_call"]
    base += 0.1 * (on["balanced"] and base > 0)  # no credit for having no tags at all
    pull = 0.4 * on["think_closed"] + 0.3 * on["flow"] - gamma * on["never_closed"]
    total = min(max(base + anchor * pull, 0.0), 0.5 if on["capped"] else 1.0)
    return {"base": base, "anchor": pull, "total": total, **on}


def closure_counts(turns, think_prefix=True):
    """{kind: [opened, closed]} over all turns; the forced <think> counts as opened, a stray closing
    tag as nothing."""
    counts = {kind: [0, 0] for kind in KINDS}
    for turn in turns:
        is_open = dict.fromkeys(KINDS, False)
        for closing, kind, *_ in turn_tags(turn, think_prefix)[0]:
            # Each kind on its own, nesting ignored: was what was opened also closed?
            counts[kind][1] += closing and is_open[kind]
            counts[kind][0] += not closing
            is_open[kind] = not closing
    return counts


# ------------------------------------------------------------------------------------------------
# Tags and thoughts

KINDS = ("think", "tool_call", "answer")  # the structural pairs; other angle brackets are text
TAG = re.compile(r"<(/?)(think|tool_call|answer)>")  # lower case, no attributes: as it is taught
ANY_TAG = re.compile(r"<[^<>]*>")


def visible(text, think_open=False):
    """
    The text of one turn with every closed thought replaced by a newline.

    A thought that never closes hides nothing: its calls were written and must be answered, its
    <answer> is read (the format reward punishes it instead). A newline, not "", so that
    "<ans<think>x</think>wer>" cannot become a tag. think_open: the turn began inside a thought. It is
    also taken to, when its first think tag is a closing one.
    """
    tags = [tag for tag in TAG.finditer(text) if tag[2] == "think"]
    inside = think_open or bool(tags and tags[0][1])
    parts = []
    at = 0  # end of what was copied or skipped
    opened = 0  # where the thought began
    for tag in tags:
        if tag[1] and inside:  # a closing tag ends the thought whatever was nested in it
            parts.append(text[at:opened])
            at, inside = tag.end(), False
        elif not tag[1] and not inside:
            opened, inside = tag.start(), True
    return "\n".join([*parts, text[at:]])


def never_closed(text, think_open=False):
    """Whether a turn ends inside a thought. think_open: it began inside one."""
    reopened = text.rfind("</think>") < text.rfind("<think>")
    return reopened or (think_open and "</think>" not in text)


def has_word(text):
    """Whether a letter or digit is left once tags are out: <answer><b></b></answer> is empty."""
    return any(char.isalnum() for char in ANY_TAG.sub("", text))


def turn_tags(text, think_prefix):
    """[(closing?, kind, start, end)] of the structural tags of one turn, and the text they index,
    forced prefix included."""
    text = "<think>\n" + text if think_prefix else text
    return [(bool(tag[1]), tag[2], tag.start(), tag.end()) for tag in TAG.finditer(text)], text


def is_balanced(tags):
    """Whether the tags of a turn pair up without nesting. Only tool_call may come twice."""
    current = None  # the kind that is open
    seen = set()
    for closing, kind, *_ in tags:
        if closing:
            if current != kind:
                return False
            current = None
        else:
            if current or (kind in seen and kind != "tool_call"):
                return False
            current = kind
            seen.add(kind)
    return current is None


def closed_thought(tags, text):
    """The text of a turn's one thought; "" unless it opens once, closes once and holds a word."""
    thinks = [tag for tag in tags if tag[1] == "think"]
    if [closing for closing, *_ in thinks] != [False, True]:
        return ""
    body = text[thinks[0][3] : thinks[1][2]]
    return ANY_TAG.sub("", body).strip() if has_word(body) else ""


def thinks_before_call(turn, think_prefix):
    """Whether a turn holds a valid call, and a thought with a word in it was closed before any."""
    tags, text = turn_tags(turn, think_prefix)
    # Any call tag before the end of the thought, even a draft in it: thinking did not come first.
    before = text.partition("</think>")[0]
    draft = any(not tag[1] for tag in CALL_TAG.finditer(before))
    valid = any(call.error is None for call in parse_tool_calls(turn, think_prefix))
    return valid and not draft and closed_thought(tags, text) != ""


def last_answer(text, think_open=False):
    """(body, closed) of the last non-empty <answer> of one turn outside thought; (None, False) if
    there is none."""
    text = visible(text, think_open)
    tags = [tag for tag in TAG.finditer(text) if tag[2] == "answer"]
    found = (None, False)
    for i, tag in enumerate(tags):
        if tag[1]:
            continue
        after = tags[i + 1] if i + 1 < len(tags) else None
        body = text[tag.end() : after.start() if after else len(text)]  # cut off: to the turn's end
        if has_word(body):
            found = (body.strip(), bool(after and after[1]))
    return found


def final_answer(turns, think_open=False):
    """The answer that training grades: last_answer of the last turn. No tag, no credit: None."""
    return last_answer(turns[-1], think_open)[0] if turns else None


# ------------------------------------------------------------------------------------------------
# Credit

TAG_BYTES = re.compile(TAG.pattern.encode())
LETTER_BYTES = re.compile(rb"[0-9A-Za-z\x80-\xff]")  # ASCII, or part of any other character


def structural_mask(pieces):
    """
    struct(o) of ONE turn: which sampled tokens carry format credit.

    pieces: the bytes of each sampled token; may be empty, may cut a tag or a UTF-8 character
    anywhere. A token is in if a byte of it lies in a literal <think> </think> <tool_call>
    </tool_call> <answer> </answer>, or if it is the last one of the turn: ending there is where a
    missing tag was decided.

    A token that also holds a letter or a digit outside the tag is not in. In Qwen's vocabulary
    "<answer>B" ends in the one token ">B": credited, a lost tag (A_fmt = -1) would cancel what the
    right letter earned (A_task = +1). The tag keeps the credit of its other tokens, where it was
    begun.

        [b"hm", b"</think>", b" <an", b"swer>", b"B", b"<|im_end|>"] -> [F, T, T, T, F, T]
        [b"<", b"answer", b">B", b"</", b"answer", b">", b"<|im_end|>"] -> [T, T, F, T, T, T, T]
    """
    # Bytes, not ids or decoded text: <think> is one token in Qwen3, <answer> is several.
    joined = b"".join(pieces)
    in_tag = bytearray(len(joined))  # 1 where a byte belongs to a tag
    for tag in TAG_BYTES.finditer(joined):
        in_tag[tag.start() : tag.end()] = b"\x01" * (tag.end() - tag.start())
    mask = []
    at = 0  # byte where the token begins
    for piece in pieces:
        inside = in_tag[at : at + len(piece)]
        outside = bytes(byte for byte, tag in zip(piece, inside) if not tag)
        mask.append(1 in inside and not LETTER_BYTES.search(outside))
        at += len(piece)
    if mask:
        mask[-1] = True
    return mask


def group_advantages(acc_tool, fmt, w_format=1.0):
    """
    (A_task, A_fmt, sigma) of the rollouts of one prompt; A_task + A_fmt is GRPO's advantage of the
    summed reward.

    acc_tool: R_acc + R_tool of each rollout; fmt: R_fmt. sigma is the population std of
    acc_tool + w_format * fmt, and both parts share it, so that neither is blown up when it alone
    hardly varies. sigma < 1e-6: all zeros, no signal. Raises ValueError when the lists differ in
    length.
    """
    reward = [task + w_format * form for task, form in zip(acc_tool, fmt, strict=True)]
    if not reward:
        return [], [], 0.0
    size = len(reward)
    # Means of the parts add up to the mean of the sum, hence the two advantages add up to GRPO's.
    mean, mean_task, mean_fmt = (math.fsum(values) / size for values in (reward, acc_tool, fmt))
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in reward) / size)
    if sigma < 1e-6:
        return [0.0] * size, [0.0] * size, sigma
    a_task = [(value - mean_task) / sigma for value in acc_tool]
    a_fmt = [w_format * (value - mean_fmt) / sigma for value in fmt]
    return a_task, a_fmt, sigma


# ------------------------------------------------------------------------------------------------
# Tool calls

CALL_TAG = re.compile(r"<(/?)(tool_call|tool_code)>")
MAX_CALLS = 64  # calls of one turn that are parsed; the rest get an error without a look inside


@dataclass
class ToolCall:
    """One call as written. start, end in seconds, None if unreadable; error None: it may be run."""

    name: str
    start: float | None
    end: float | None
    num_frames: int | None
    error: str | None


def parse_tool_calls(text, think_open=False):
    """
    Every tool call of one turn, good or bad, in the order written. Never raises, never evaluates,
    linear time.

    text: what the model wrote in one turn. think_open: it began inside a thought. A call inside a
    closed thought is a thought and is left out; inside a thought that never closes it counts.
    Dialects: JSON in <tool_call>, Python-like calls in <tool_code>. Aliases start and end are
    accepted; video_path and unknown arguments are ignored.
    """
    text = visible(text, think_open)
    # One scan for all tags: a search for each closing tag would be quadratic on "<tool_call>" * 1e5.
    tags = list(CALL_TAG.finditer(text))
    calls = []
    for i, tag in enumerate(tags):
        if tag[1]:
            continue
        after = tags[i + 1] if i + 1 < len(tags) else None
        body = text[tag.end() : after.start() if after else len(text)]  # to the next call tag
        closed = bool(after and after[1] and after[2] == tag[2])
        if len(calls) >= MAX_CALLS:
            calls.append(bad_call("too many calls in one turn"))
        elif tag[2] == "tool_call":
            calls.append(parse_json_call(body, closed))
        else:
            calls.extend(parse_code_calls(body))
    return calls


# ---- below: how text is read (a reader of the training step may stop here) -----------------------

# ------------------------------------------------------------------------------------------------
# Calls

MAX_CALL_CHARS = 4000  # a sane call has 100; keeps hostile nesting away from the JSON parser
CLOCK = re.compile(r"(?:(?:([0-9]{1,9}):)?([0-9]{1,9}):)?([0-9]{1,9}(?:\.[0-9]{0,9})?)")  # [[H:]MM:]SS[.f], ASCII only
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,9}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})")
CODE_TOKEN = re.compile(r""""[^"\n]*"|'[^'\n]*'|[(),=]|[^\s"'(),=]+|["']""")


def to_seconds(value):
    """Seconds as float from a number, "12.5", "MM:SS" or "H:MM:SS(.f)"; None for anything else, bool and NaN too."""
    if isinstance(value, bool):  # bool is an int in Python: true would be second 1
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e9 else None  # NaN compares false; huge ints would overflow float()
    if not isinstance(value, str):
        return None
    value = value.strip()
    if NUMBER.fullmatch(value):
        return float(value)
    clock = CLOCK.fullmatch(value)
    if not clock or float(clock[3]) >= 60 or (clock[1] and int(clock[2]) >= 60):  # 90:00 is fine, 1:75 is not
        return None
    return 3600.0 * int(clock[1] or 0) + 60.0 * int(clock[2] or 0) + float(clock[3])


def to_count(value):
    """An int >= 1 from 8, 8.0 or "8"; else None."""
    number = None if isinstance(value, str) and ":" in value else to_seconds(value)  # "1:00" is a time, not a count
    return int(number) if number is not None and number >= 1 and number == int(number) else None


def shown(name):
    """A name the model wrote, safe to show it again: printable ASCII without < and >, at most 40 characters."""
    return re.sub(r"[^ -;=?-~]", "", name[:400])[:40]  # no brackets, so no tag or special token can be smuggled in


def check_call(name, arguments):
    """A ToolCall from a name and an argument dict, whichever dialect they came from."""
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", None, None, None, 'the call has no tool name, expected "name": "crop_video"')
    if name.strip() != "crop_video":
        return ToolCall(shown(name), None, None, None, f"unknown tool '{shown(name)}', the only tool is crop_video")
    if not isinstance(arguments, dict):
        return ToolCall("crop_video", None, None, None, "arguments must be an object with start_time and end_time")
    start = to_seconds(arguments.get("start_time", arguments.get("start")))
    end = to_seconds(arguments.get("end_time", arguments.get("end")))
    frames = arguments.get("num_frames")
    count = to_count(frames)
    error = None
    for key, value in (("start_time", start), ("end_time", end)):
        if value is None:
            present = key in arguments or key.removesuffix("_time") in arguments
            error = error or f'{key} {"is not a time" if present else "is missing"}, expected seconds or "MM:SS"'
    # A negative start is no error here: only the episode knows the clock and clamps to the video.
    if error is None and end <= start:
        error = "the window is empty or reversed, end_time must be greater than start_time"
    if error is None and frames is not None and count is None:
        error = "num_frames must be a whole number of at least 1"
    return ToolCall("crop_video", start, end, count, error)


def parse_json_call(body, closed):
    """
    The ToolCall of one <tool_call> body. closed: its closing tag was written.

    Closed, the body must be one JSON object and nothing else. Cut off, the JSON must be whole; what follows is ignored.
    """
    if len(body) > MAX_CALL_CHARS:
        return ToolCall("", None, None, None, "the call is too long, expected one short JSON object")
    try:
        call = json.loads(body) if closed else json.JSONDecoder().raw_decode(body.lstrip())[0]
        arguments = call.get("arguments") if isinstance(call, dict) else None
        if isinstance(arguments, str):  # some templates quote the arguments once more
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):  # ValueError: bad JSON, or an integer of thousands of digits
        return ToolCall("", None, None, None, 'not valid JSON, expected {"name": "crop_video", "arguments": {...}}')
    if not isinstance(call, dict):
        return ToolCall("", None, None, None, "a call must be one JSON object with name and arguments")
    return check_call(call.get("name"), arguments)


def parse_code_calls(body):
    """
    The ToolCalls of one <tool_code> body, e.g. crop_video(start_time=1, end_time=2) or print(crop_video(1, "0:02")).

    Read by a tokeniser of its own in one pass; nothing is evaluated. Positional order: start_time, end_time,
    num_frames, after an optional quoted path.
    """
    if len(body) > MAX_CALL_CHARS:
        return [ToolCall("", None, None, None, "the call is too long, expected crop_video(start_time=1, end_time=2)")]
    calls, name, word, key = [], None, None, None  # name: the call being read; word: the value or name just seen
    for token in CODE_TOKEN.findall(body):
        if token == "(":  # an inner call replaces the wrapper it stands in, as in print(crop_video(..))
            name, word, key = (word or "?").split()[-1], None, None
            named, positional = {}, []
        elif token == "=":
            word, key = None, word
        elif token in ",)":
            if name is not None and word is not None:
                if key is not None:
                    named[key] = word.strip("\"'")
                elif positional or word[0] not in "\"'" or to_seconds(word.strip("\"'")) is not None:
                    positional.append(word.strip("\"'"))  # else it is the path that stands first
            if name is not None and token == ")":
                call = check_call(name, dict(zip(("start_time", "end_time", "num_frames"), positional)) | named)
                if call.error is None and len(positional) > 3:
                    call.error = "too many arguments, expected start_time, end_time, num_frames"
                calls.append(call)
                name = None
            word = key = None
        else:
            word = token if word is None else f"{word} {token}"  # two words are no number: "1 2" stays an error
    if name is not None or not calls:
        calls.append(ToolCall("", None, None, None, "not a whole call, expected crop_video(start_time=1, end_time=2)"))
    return calls


# ------------------------------------------------------------------------------------------------
# Answers

BLOCKS = ("tool_call", "tool_code", "tool_response", "action", "observation", "score", "clip")  # never an answer
MAX_ANSWER_CHARS = 50_000  # longer is no answer: bounds the work below, where NFKC may grow a text 18 times
BOXED = re.compile(r"\\boxed ?\{([^{}]*)\}")


def answer_or_tail(turns, think_open=False):
    """
    What evaluation grades: the final answer, else the text after the last </think> of the last turn; None if empty.

    A thought that never closes has no tail: guessing from reasoning would grade drafts.
    """
    answer = final_answer(turns, think_open)
    if answer is not None or not turns:
        return answer
    text = turns[-1]
    if never_closed(text, think_open):
        return None
    text = text.rpartition("</think>")[2]
    for kind in BLOCKS:  # calls and observations are no answer, and the numbers in them no span
        parts, at = [], 0
        # find and not a lazy regex: that would rescan to the end for each block that is never closed.
        while (start := text.find(f"<{kind}>", at)) >= 0:
            parts.append(text[at:start])
            end = text.find(f"</{kind}>", start)
            at = len(text) if end < 0 else end + len(kind) + 3
        text = "\n".join([*parts, text[at:]])
    return text.strip() if has_word(text) else None


def stated_answer(turns, think_open=False):
    """
    What the authors' release pays R_acc for: the final answer, else the last line of the last turn that holds a word, after
    the thought where one was closed, inside it where not. Credit without a tag: then nothing but R_fmt asks for the tags.
    """
    answer = final_answer(turns, think_open)
    if answer is not None or not turns:
        return answer
    lines = [ANY_TAG.sub("", line).strip() for line in turns[-1].rpartition("</think>")[2].split("\n")]
    return next((line for line in reversed(lines) if has_word(line)), None)


def region(response):
    """The part of a response to grade, on one line: an answer body stays as it is, a whole turn loses its thought."""
    text = answer_or_tail([response]) or ""
    if len(text) > MAX_ANSWER_CHARS:
        return ""
    # A LaTeX box is a declaration of the answer; the last one counts, as everywhere.
    boxed = BOXED.findall(text)
    text = unicodedata.normalize("NFKC", boxed[-1] if boxed else text)  # full-width letters and digits become ASCII
    return " ".join(text.split())  # single spaces also keep the patterns below from backtracking over long blanks


# ------------------------------------------------------------------------------------------------
# Open answers

ARTICLES = ("a", "an", "the")
UNITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORD = re.compile(r"(?<![^\W_])-?(?:[0-9]+\.[0-9]+|\.[0-9]+)(?![^\W_])|(?<![^\W_])-[0-9]+|%|[^\W_]+[+#]*")


def normalise(text):
    """
    Text to the list of tokens that open answers are compared by.

    Case, articles, punctuation, hyphens and thousands commas go; super- and subscripts become plain; number words
    become digits. A minus sign, a decimal point, % and C++ stay: they change what is said.
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"['’`]", "", text).replace("−", "-")  # don't -> dont
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # 1,000 -> 1000
    tokens = []
    tens = False  # the last token was a spelled multiple of ten, which a spelled unit completes
    for word in WORD.findall(text):
        if word in UNITS and tens and 1 <= UNITS.index(word) <= 9:
            tokens[-1], tens = str(int(tokens[-1]) + UNITS.index(word)), False
            continue
        tens = word in TENS
        if word in UNITS or tens:
            word = str(UNITS.index(word)) if word in UNITS else str(20 + 10 * TENS.index(word))
        elif word == "%":
            word = "percent"
        elif re.fullmatch(r"-?[0-9]*\.?[0-9]+", word):  # 05 -> 5, 5.0 -> 5, .5 -> 0.5; as text, since ints may be huge
            sign, digits = word[: word[0] == "-"], word.lstrip("-")
            whole, _, part = digits.partition(".")
            part = part.rstrip("0")
            word = sign + (whole.lstrip("0") or "0") + ("." + part if part else "")
        tokens.append(word)
    # Dropping articles must not empty an answer: else gold "A" would equal "the", and both would equal ".".
    return [token for token in tokens if token not in ARTICLES] or tokens


HEDGES = ("maybe", "perhaps", "possibly", "probably", "likely", "might", "may", "could", "or", "either", "unsure", "guess")
PREDICATE = re.compile(r"\b(?:is|are|was|were|it['’]s|that['’]s) (?:(?:an?|the) )?(.+)", re.IGNORECASE)
SMALL_WORDS = ("of", "the", "and", "in", "for", "a", "an", "on", "to")


def is_acronym(short, text):
    """Whether `short` is the initials of `text`: DFS of "Depth-First Search", FDA of "Food and Drug Administration"."""
    letters = re.sub(r"[.\s]", "", short)
    words = re.findall(r"[^\W_]+", text)
    initials = ["".join(word[0] for word in some).upper() for some in (words, [w for w in words if w.lower() not in SMALL_WORDS])]
    return len(letters) > 1 and letters.isalpha() and letters.isupper() and letters in initials


def answer_forms(text):
    """An answer -> the texts it may be given as: itself, and of "Depth-First Search (DFS)" either part, if one is short for the other."""
    both = re.fullmatch(r"([^()]{1,200}?) ?\(([^()]{1,200})\)[. ]*", text.strip())
    if both and (is_acronym(both[1], both[2]) or is_acronym(both[2], both[1])):
        return [text, both[1], both[2]]
    return [text]


def match_open(response, gold):
    """
    Whether a free-form answer says the gold text: equal once both are normalised, its acronym or what that stands for, or the
    predicate of one short sentence ("The sort is bubble sort."). Empty never matches, nothing hedged or negated does, and no part of a text.
    """
    said = region(response)
    tokens = normalise(said)
    if not tokens:
        return False
    golds, given = answer_forms(gold), answer_forms(said)
    predicate = PREDICATE.search(said)
    if predicate and len(tokens) <= 20 and not set(tokens) & {*HEDGES, *NEGATIONS} and not re.search(r"[.;!?] +\w", said):
        given.append(predicate[1])
    # A gold of two letters is the initials of too many answers: "AI" of "any item".
    return any(normalise(a) == normalise(b) or is_acronym(a, b) or (len(b) > 2 and is_acronym(b, a)) for a in given for b in golds if normalise(a))


def token_f1(response, gold):
    """F1 in [0, 1] between the token multisets of answer and gold: a repeated word counts as often as both have it."""
    tokens, wanted = Counter(normalise(region(response))), Counter(normalise(gold))
    common = (tokens & wanted).total()
    return 2.0 * common / (tokens.total() + wanted.total()) if common else 0.0


# ------------------------------------------------------------------------------------------------
# Option letters

# These patterns see one line with single spaces and have no two open-ended repeats in a row: no backtracking to fear.
LABEL = re.compile(r"[(\[\"']*([A-Za-z])(?:[)\]:]+|\.(?=\s|$))[.:]?(?: |$)")  # "B. ", "(B) ", "B) ", "B: "
LINE_LABEL = re.compile(r"^[ \t(\[]*([A-Za-z])[)\].:]+[ \t]", re.MULTILINE)
END = r"(?![-'’]?\w)"  # the letter stands alone: not Apples, not A's, not B-roll
DECLARED = re.compile(
    r"\banswer(?: choice| option)?(?: is| was| would be| should be| must be| will be)? ?[:=]? ?"
    r"(?:clearly |definitely |probably |likely |most likely )?"
    r"(?:option |choice |letter )?[(\[\"']*([a-z])" + END, re.IGNORECASE)  # fmt: skip
CHOSEN = re.compile(
    r"\b(?:option|choice|choose|chose|select|selected|pick|picked|go with|going with)(?: is)? ?[:=]? ?"
    r"(?:option |choice |letter )?[(\[\"']*([a-z])" + END, re.IGNORECASE)  # fmt: skip
# "or C" right behind a declared answer. Capitals only, so that "or a" stays an article.
ALTERNATIVE = re.compile(r"[)\]\"'.]*,? ?(?:or|and|/|&) ?(?:option |choice |letter )?[(\[\"']*([A-Z])" + END)
CAPITAL = re.compile(r"(?<![\w'’])(?<![\w]-)([A-Z])" + END)
NOT_BEFORE = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor|\brather than|\binstead of|\bexcept|\bno)"
                        r"(?: the| an?| option| choice| answer| letter| is| choose| pick| select)*"
                        r"[ (\[\"']*$", re.IGNORECASE)  # fmt: skip
NOT_AFTER = re.compile(r"[)\]\"']* (?:is|was|are|can|could|does|seems) ?(?:not\b|n't|wrong|incorrect|false|ruled out)"
                       r"|[)\]\"']* (?:isn't|wasn't|cannot|can't|doesn't|is clearly wrong)", re.IGNORECASE)  # fmt: skip
NEGATIONS = ("not", "no", "never", "neither", "nor", "cannot", "cant", "isnt", "wasnt", "arent", "dont", "doesnt",
             "didnt", "except", "wrong", "incorrect")  # fmt: skip
# Words that cannot follow an article, so that "A because .." is the letter and "A man .." is not.
AFTER_LETTER = ("because", "since", "as", "or", "and", "is", "was", "which", "based", "due", "given", "but", "not",
                "rather", "instead", "that", "where", "when", "if", "from", "for")  # fmt: skip


def is_letter(text, at):
    """Whether the character text[at] names an option there, and is not an article, a pronoun or a stray letter."""
    letter, bracketed = text[at], at > 0 and text[at - 1] in "([\"'"
    after = re.match(r" (\w+)", text[at + 1 : at + 20])  # the next word
    if bracketed or not after:
        return True
    if letter.islower() or letter == "I":  # "the answer is a dog", "I think"
        return False
    return letter != "A" or after[1].lower() in AFTER_LETTER


def is_negated(text, start, end):
    """Whether what stands at text[start:end] is denied right before or right after it."""
    return bool(NOT_BEFORE.search(text[max(0, start - 40) : start]) or NOT_AFTER.match(text[end : end + 30]))


def named_letters(pattern, text, letters):
    """[(letter, end index)] of the options that a pattern names in text, in order, negated ones left out."""
    return [
        (match[1].upper(), match.end())
        for match in pattern.finditer(text)
        if match[1].upper() in letters
        and is_letter(text, match.start(1))
        and not is_negated(text, match.start(), match.end())
    ]


def extract_letter(response, options):
    """
    The option letter a response settles on, or None. Never sees the gold answer.

    options: option texts, labelled ("A. ..", "(A) ..") or bare; letters beyond them are no answer. Without options
    A to J are allowed. First that applies: the letter alone; a leading label; the last "answer is X"; one "option X"
    or "choose X"; the text of an option, whole or as the only one named; the only standalone capital left. Two
    different letters at the same step, or a label that contradicts what follows it, are no answer.
    """
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options) if options else 10]
    text = region(response).translate({ord(char): None for char in "*_`$"})
    # 1. The letter and nothing else; lower case is fine here, since no word stands beside it.
    alone = re.fullmatch(r"[(\[\"' ]*([A-Za-z])[)\]\"'.:, ]*", text)
    if alone:
        return alone[1].upper() if alone[1].upper() in letters else None

    # Options without their labels, compared as normalised text, so that "3" and "three" name one option.
    # Only a label that fits the option's place is a label: "B. B. King" may be the text of option A.
    bare = [re.sub(rf"^\s*\(?{letter}[).:]+\s+", "", str(option)) for letter, option in zip(letters, options or [])]
    texts = [" ".join(normalise(option)) for option in bare]
    said = " ".join(normalise(text))
    # 2. A declared answer is read first, since it must not contradict a label; the last one counts.
    declared = named_letters(DECLARED, text, letters)[-1:]
    if declared:
        other = ALTERNATIVE.match(text[declared[0][1] : declared[0][1] + 40])
        if other and other[1] in letters and other[1] != declared[0][0]:  # "the answer is B or C"
            return None
    # 3. A leading label. Lines are lost in `text`, so the repeated option list is looked for in the response.
    listed = {label.upper() for label in LINE_LABEL.findall(answer_or_tail([response]) or "")} & set(letters)
    label = LABEL.match(text)
    if label and label[1].upper() in letters and len(listed) < 2:  # two labelled lines are the options repeated
        letter, rest = label[1].upper(), " ".join(normalise(text[label.end() :]))
        if rest in texts and rest != "":
            return letter if texts[letters.index(letter)] == rest else None  # "A. dog" where dog is B
        if said not in texts:  # else it is no label but how an option begins: "B. B. King"
            others = {letter for letter, _ in declared or named_letters(CHOSEN, text, letters)}
            return letter if others <= {letter} else None
    if declared:
        return declared[0][0]
    # 4. "option X", "choose X": several mentions are fine, several letters are not.
    chosen = {letter for letter, _ in named_letters(CHOSEN, text, letters)}
    if chosen:
        return chosen.pop() if len(chosen) == 1 else None

    # 5. The option's text, whole first: an option may hold a "not" or another option's text.
    if said and said in texts:
        return letters[texts.index(said)] if texts.count(said) == 1 else None
    inside = [option for option in texts if option and f" {option} " in f" {said} "]
    shorter = [a for a in inside for b in inside if a != b and f" {a} " in f" {b} "]  # "dog" when "hot dog" is there
    longest = [option for option in inside if option not in shorter]
    if len(longest) > 1:
        return None  # two options named, or two options with one text
    if longest:
        rest = f" {said} ".replace(f" {longest[0]} ", " ").split()
        if not any(word in NEGATIONS for word in rest):
            return letters[texts.index(longest[0])]
    # 6. One capital left over that is no article and no pronoun.
    capitals = {letter for letter, _ in named_letters(CAPITAL, text, letters)}
    return capitals.pop() if len(capitals) == 1 else None


# ------------------------------------------------------------------------------------------------
# Time spans

TIME = r"((?:[0-9]{1,9}:){0,2}[0-9]{1,9}(?:\.[0-9]{1,9})?)(?![0-9:%]|\.[0-9])"  # 1.2.3 and 5% are no times
SECONDS = r"( ?(?:seconds|second|secs|sec|s)\b)?"
PAIR = re.compile(
    rf"([\[(] ?)?(?<![\w.:-]){TIME}{SECONDS} ?(-|–|—|−|~|to|until|till|and|,) ?"
    rf"{TIME}{SECONDS}", re.IGNORECASE)  # fmt: skip
NAMED = re.compile(
    rf"\b(?:start|begin)[a-z_]{{0,8}}[\"' :=]{{0,4}}(?:at |from |is ){{0,1}}{TIME}[^0-9]{{0,24}}?"
    rf"\b(?:end|finish|stop)[a-z_]{{0,8}}[\"' :=]{{0,4}}(?:at |is ){{0,1}}{TIME}", re.IGNORECASE)  # fmt: skip
SHARED_MINUTES = re.compile(r"(?<![\w.:])([0-9]{1,4}) ?(?:-|–|to) ?(?=[0-9]{1,4} ?min)")  # "2 to 3 minutes"
MINUTES = re.compile(r"(?<![\w.:])([0-9]{1,4}(?:\.[0-9]{1,3})?) ?(?:minutes|minute|mins|min)\b"
                     r"(?:,? (?:and )?([0-9]{1,2}(?:\.[0-9]{1,3})?) ?(?:seconds|second|secs|sec|s)\b)?")  # fmt: skip


def extract_span(response):
    """
    (start, end) in seconds of the last time range in a response, or None.

    A range is two times (12.5, MM:SS, H:MM:SS, "1 minute 5 seconds") joined by a dash, "to", "until" or "and", or
    given as start and end; joined by a comma only in brackets, with a unit, or alone. None also when the last range is
    reversed or empty: a swapped pair is a wrong answer, not one to repair. Ranges of frames are no times.
    """
    # Spelled minutes become seconds first, so that one pattern below reads every range.
    text = SHARED_MINUTES.sub(r"\1 min to ", region(response))
    text = MINUTES.sub(lambda found: f"{60 * float(found[1]) + float(found[2] or 0):.3f}s", text)
    found = [(match.start(), match[1], match[2]) for match in NAMED.finditer(text)]
    alone = text.strip(" .\"'")
    for match in PAIR.finditer(text):
        bracket, start, unit, joint, end, _ = match.groups()
        if joint == "," and not bracket and not unit and match[0] != alone:
            continue  # "at 10, 20 people"
        if re.search(r"\bframes? ?(?:from )?$", text[max(0, match.start() - 12) : match.start()], re.IGNORECASE):
            continue
        if re.match(r" frames?\b", text[match.end() : match.end() + 8], re.IGNORECASE):
            continue
        found.append((match.start(), start, end))
    if not found:
        return None
    # The last range written, whichever way: an echoed example or a first guess stands before the answer.
    start, end = (to_seconds(time) for time in max(found)[1:])
    return (start, end) if start is not None and end is not None and start < end else None


def temporal_iou(span, gold):
    """Intersection over union in [0, 1] of two (start, end) in seconds; 0.0 for no span or one that is empty."""
    if span is None or not (span[0] < span[1] and gold[0] < gold[1]):  # written so that NaN gives 0 as well
        return 0.0
    overlap = min(span[1], gold[1]) - max(span[0], gold[0])
    union = max(span[1], gold[1]) - min(span[0], gold[0])  # of spans that overlap; the hull is exact then
    return overlap / union if overlap > 0 and math.isfinite(union) else 0.0
