"""
rewards.py (tests/test_rewards.py): from the text that a policy wrote to the reward, and to the
tokens that carry credit.

  R_task = R_acc + w_tool R_tool + w_win IoU - c calls
  R      = R_task + w_fmt R_fmt                             one number per rollout  score
  R_acc  = [letter == gold] | IoU of times | F1 | share     from <answer> alone     accuracy
  R_fmt  = clip(R_base + lambda R_anchor, 0, 1)             <= 0.5, tags misused    format_reward
  R_tool = 0 | 0.1 parseable | 0.3 executed | +0.5 if executed and R_acc > 0        tool_term
  IoU    = of the union of executed windows with the evidence; w_win = 0            window_scores
  A_task = (R_task - mean) / sigma                          every sampled token     group_advantages
  A_fmt  = w_fmt (R_fmt - mean) / sigma                     tokens in struct(o)     structural_mask
  sigma  = population std of R over the rollouts of one prompt; at least 1e-3 as a divisor, where
           TRL adds 1e-4: a difference of 1e-5 in R is no signal of size 2.6

Departures from the ParaVT paper and the authors' code, and why:
  - The forced "<think>\\n" counts as part of a turn when the turn is scored. Otherwise closing the
    thought would earn nothing, and writing a second <think> would pay.
  - Misused tags cap R_fmt, R_fmt stays in [0, 1], and an empty tag pair earns nothing. Otherwise
    garbage would cost nothing.
  - The episode counts executed calls. They are never read from the text, because a model can write
    <tool_response> by itself.
  - The bonus for a right answer needs an executed call. A call that only parses is not enough.
  - Only the last non-empty <answer> of the last turn, outside thought, is graded. Drafts and stray
    letters do not count.
  - Letters and spans are extracted without seeing the gold answer. An ambiguous answer is none.

A training step passes through the part above the ruled line. The part below has numbers for the
log, and reads calls, answers, letters and times. Standard library only; no file is read or written;
no text raises an error.

    >>> turns = ["Look.</think><tool_call>{}</tool_call>", "A dog.</think><answer>B</answer>"]
    >>> task = {"type": "mcq", "answer": "B", "options": ["cat", "dog"]}
    >>> result = score(turns, task, calls=[])
    >>> [round(result[key], 2) for key in ("acc", "fmt", "tool", "total")]
    [1.0, 0.95, 0.0, 1.95]
"""

import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------
# Rewards of one episode


@dataclass(frozen=True)
class RewardConfig:
    """The terms that a rollout is paid by, set by flags of grpo.py. Defaults: the paper's."""

    answer_suffix: bool = True  # R_base pays 0.3 + 0.2 for an <answer> block; else 0.2 + 0.1
    anchor: float = 0.5  # lambda: weight of R_anchor in R_fmt
    gamma: float = 0.3  # penalty inside R_anchor of a thought that never closes
    format_weight: float = 1.0  # w_fmt
    tool_weight: float = 1.0  # w_tool, flag --tool-reward
    window_weight: float = 0.0  # w_win
    call_cost: float = 0.0  # c: price of each executed call, taken from the task part


def score(turns: list[str], task: dict, calls=(), think_open=True, pay: RewardConfig | None = None,
          tokens: int = 0, verdict: bool | None = None) -> dict:
    """
    All reward terms of one rollout. R is composed HERE and only here, for the log and the gradient.

    turns: sampled text of each main turn, special tokens removed. task: {"type", "answer",
    "options"?, "evidence"?}, see accuracy and window_scores. calls: the episode's records of calls,
    in which "parseable", "status", "start" and "end" count. think_open: every turn began inside a
    thought whose <think> is not in the text. tokens: sampled tokens of the main agent. No term uses
    them, but a length penalty would.
    verdict: of a judge on the answer, which R_acc then is; None: R_acc is `accuracy`.

    -> {"acc", "fmt", "tool": R_acc, R_fmt, R_tool; "paid_task", "paid_fmt": the two weighted parts,
    from which the advantages are made; "total": R, the sum of the two; "windows": window_scores of
    the executed calls, if the task has evidence}
    """
    pay, answer = pay or RewardConfig(), final_answer(turns, think_open)
    acc = accuracy(answer, task["type"], task["answer"], task.get("options"))
    acc = acc if verdict is None else float(verdict)
    form = format_reward(turns, think_open, pay)
    fmt = form["total"]
    # Count the calls that the episode ran. A model can write <tool_response> by itself.
    executed = [call for call in calls if call["status"] == "ok"]
    tool = tool_term(sum(call["parseable"] for call in calls), len(executed), acc)
    # A term added here reaches the log and the gradient alike. The task part is credited at every
    # sampled token, the format part at the tokens that --format-credit names.
    paid_task = acc + pay.tool_weight * tool - pay.call_cost * len(executed)
    paid_fmt = pay.format_weight * fmt
    extra = {}
    if evidence := task.get("evidence"):
        extra["windows"] = window_scores([(c["start"], c["end"]) for c in executed], evidence)
        # The IoU: recall would pay for the whole video, and a sum over windows for copies of one.
        paid_task += pay.window_weight * (extra["windows"]["iou"] or 0.0)
    # For --format-credit anchor: R_base as it is paid, and what R_anchor adds to it.
    paid_base = pay.format_weight * form["paid_base"]
    return {"acc": acc, "fmt": fmt, "tool": tool, "paid_task": paid_task, "paid_fmt": paid_fmt,
            "paid_base": paid_base, "paid_anchor": paid_fmt - paid_base,
            "total": paid_task + paid_fmt, **extra}


def accuracy(response, task_type, gold, options=None):
    """R_acc in [0, 1] of an answer body (None: no answer, 0.0). gold: the label, in the form that
    `task_types` names. Raises KeyError for another task_type."""
    kind = task_types()[task_type]
    return 0.0 if response is None else kind.score(kind.read(response, options), gold)


def tool_term(parseable: int, executed: int, acc: float) -> float:
    """R_tool: 0 without a parseable call, 0.1 with one, 0.3 if one was run, 0.8 if also acc > 0."""
    # A call that parses but did not run is worth 0.1, even if the answer is right.
    if parseable <= 0 or executed <= 0:
        return 0.1 if parseable > 0 else 0.0
    return 0.8 if acc > 0 else 0.3


def format_reward(turns: list[str], think_open=True, pay: RewardConfig | None = None) -> dict:
    """
    R_fmt of one episode, with its parts and the conditions for them.

    turns, think_open, pay: see score.

    R_base: with the Answer Suffix, without it
      think             last turn's thought, closed, >= 10 characters beside tags     0.2   0.3
      answer_opened     last turn has a non-empty <answer> body outside thought       0.3   0.2
      answer_closed     and that body is closed                                       0.2   0.1
      think_before_call a turn with a valid call closed its thought before any call   0.3   0.3
      balanced          every turn's tags pair up, if anything above scored           0.1   0.1
    R_anchor
      think_closed      every turn opens one thought, closes it and has a word in it  0.4
      flow              think_closed, and the last turn is think, answer, in order    0.3
      never_closed      a turn ends inside a thought                                  -gamma

    total = clip(R_base + pay.anchor * R_anchor, 0, 1), at most 0.5 if `capped`: a tag is
    unbalanced, nested or opened again, or the model wrote a tool response. "anchor" in the result:
    R_anchor before the weight. `well_formed`: the flow holds and the reward is not capped.
    """
    pay = pay or RewardConfig()
    # With the forced <think> put back, so that the thought counts as opened.
    texts = ["<think>\n" * think_open + turn for turn in turns]
    thoughts = [closed_thought(text) for text in texts]
    orders = ["".join(tag[0] for tag in TAG.finditer(text)) for text in texts]  # tags of a turn
    body, is_closed = last_answer(turns[-1], think_open) if turns else (None, False)
    think_before_call = False  # a valid call, and a thought with a word closed before any call
    for turn, thought in zip(turns, thoughts):
        # A call tag before the end of the thought, even in a draft: the thought was not first.
        draft = any(f"<{kind}>" in turn.partition("</think>")[0] for kind in CALLS)
        valid = any(call.error is None for call in parse_tool_calls(turn, think_open))
        think_before_call |= valid and not draft and thought != ""
    checks = {
        "think": bool(turns) and len(thoughts[-1]) >= 10,
        "answer_opened": body is not None,
        "answer_closed": is_closed,
        "think_before_call": think_before_call,
        "balanced": all(BALANCED.fullmatch(tags) for tags in orders),
        "think_closed": bool(turns) and all(thoughts),
        "never_closed": any(never_closed(turn, think_open) for turn in turns),
    }
    # The flow is strict about the order of the tags, and any text may stand between them.
    ordered = orders[-1:] == ["<think></think><answer></answer>"]
    checks["flow"] = checks["think_closed"] and checks["answer_closed"] and ordered
    # If a tool response were paid, the model would learn to answer its own calls.
    faked = any(re.search("</?tool_response>", turn) for turn in turns)
    checks["capped"] = faked or not checks["balanced"]
    checks["well_formed"] = checks["flow"] and not checks["capped"]

    # Without the Answer Suffix (the authors' plain GRPO) a thought earns more than an answer.
    think, start, end = (0.2, 0.3, 0.2) if pay.answer_suffix else (0.3, 0.2, 0.1)
    base = think * checks["think"] + start * checks["answer_opened"] + end * checks["answer_closed"]
    base += 0.3 * checks["think_before_call"]
    base += 0.1 * (checks["balanced"] and base > 0)  # no credit for having no tags at all
    anchor = 0.4 * checks["think_closed"] + 0.3 * checks["flow"]
    anchor -= pay.gamma * checks["never_closed"]
    limit = 0.5 if checks["capped"] else 1.0
    total = min(max(base + pay.anchor * anchor, 0.0), limit)
    paid_base = min(base, limit)  # what the reward would be without R_anchor
    return {"base": base, "anchor": anchor, "total": total, "paid_base": paid_base, **checks}


# ------------------------------------------------------------------------------------------------
# Tags and thoughts

# The structural tag pairs; a call has two dialects. All other angle brackets are text. Balance,
# closure, parsing and credit all follow from the next three lines.
CALLS = ("tool_call", "tool_code")
KINDS = ("think", *CALLS, "answer")
TAG = re.compile(rf"<(/?)({'|'.join(KINDS)})>")  # lower case, no attributes: as SFT teaches
ANY_TAG = re.compile(r"<(?![0-9])[^<>]*>")  # but "<12.5 seconds>", a frame's stamp, is text


def without_thoughts(text, think_open=False):
    """The text of one turn with every closed thought replaced by a newline. An unclosed thought is
    not removed: its calls are answered and its <answer> is graded. The format reward punishes it
    instead. think_open: the turn began inside a thought. A turn whose first think tag is a closing
    one is treated the same."""
    head, closing, tail = text.rpartition("</think>")
    if closing and (think_open or "</think>" in text.partition("<think>")[0]):
        head = "<think>" + head
    # The tail is not searched, because an unclosed opening tag would make the search quadratic.
    # A newline, because with "" the text "<ans<think>x</think>wer>" would become a tag.
    return re.sub("(?s)<think>.*?</think>", "\n", head + closing) + tail


def never_closed(text, think_open=False):
    """Whether a turn ends inside a thought. think_open: the turn began inside a thought."""
    reopened = text.rfind("</think>") < text.rfind("<think>")
    return reopened or (think_open and "</think>" not in text)


def has_word(text):
    """Whether a letter or digit is left without the tags: <answer><b></b></answer> is empty."""
    return any(char.isalnum() for char in ANY_TAG.sub("", text))


# The tags of a turn pair up without nesting. Only calls may come twice.
BALANCED = re.compile(r"(?!.*<(think|answer)>.*<\1>)(?:<(\w+)></\2>)*")


def closed_thought(text):
    """The text of a turn's only thought; "" unless one opens, closes and holds a word."""
    parts = re.split("(</?think>)", text)  # text, tag, text, ..
    one = parts[1::2] == ["<think>", "</think>"] and has_word(parts[2])
    return ANY_TAG.sub("", parts[2]).strip() if one else ""


def tag_blocks(text, kinds):
    """[(kind, body, closed)] of every opening tag of these kinds; the next tag ends a body."""
    # One scan for all tags. A search for each closing tag is quadratic on "<answer>" * 1e5.
    parts = re.split(rf"<(/?(?:{kinds}))>", text)  # text, tag, text, ..
    return [(tag, body, after == "/" + tag)
            for tag, body, after in zip(parts[1::2], parts[2::2], [*parts[3::2], None])
            if tag[0] != "/"]


def last_answer(text, think_open=False):
    """(body, closed) of the last non-empty <answer> of a turn outside thought, or (None, False)."""
    for _, body, closed in reversed(tag_blocks(without_thoughts(text, think_open), "answer")):
        if has_word(body):
            return body.strip(), closed
    return None, False


def final_answer(turns, think_open=False):
    """The answer that training grades: last_answer of the last turn, None without an <answer>."""
    return last_answer(turns[-1], think_open)[0] if turns else None


# ------------------------------------------------------------------------------------------------
# Credit

TAG_BYTES = re.compile(TAG.pattern.encode())
LETTER_BYTES = re.compile(rb"[0-9A-Za-z\x80-\xff]")  # ASCII, or part of any other character


def structural_mask(pieces):
    """
    struct(o) of ONE turn: which sampled tokens carry format credit.

    pieces: the bytes of each sampled token; a piece may be empty and may cut a tag or a UTF-8
    character anywhere. A token is in if one of its bytes lies in a literal tag (think, tool_call,
    tool_code, answer; opening or closing). The last token of the turn is in too: if a tag is
    missing, ending there was the decision.

    A token that also holds a letter or a digit outside the tag is not in. In Qwen's vocabulary
    "<answer>B" ends in the single token ">B". If ">B" were credited, a lost tag (A_fmt = -1) would
    cancel the reward of the right letter (A_task = +1). The other tokens of the tag keep credit.

        [b"hm", b"</think>", b" <an", b"swer>", b"B", b"<|im_end|>"] -> [F, T, T, T, F, T]
        [b"<", b"answer", b">B", b"</", b"answer", b">", b"<|im_end|>"] -> [T, T, F, T, T, T, T]
    """
    # Bytes, not ids or decoded text: <think> is one token in Qwen3, <answer> is several.
    # The bytes of tags become zeros, so a token that overlaps a tag differs from its blanked bytes.
    blanked, mask = TAG_BYTES.sub(lambda tag: bytes(len(tag[0])), b"".join(pieces)), []
    at = 0  # offset in bytes of the next token
    for piece in pieces:
        outside = blanked[at : at + len(piece)]
        mask.append(outside != piece and not LETTER_BYTES.search(outside))
        at += len(piece)
    return [*mask[:-1], True] if mask else []


def group_advantages(task: list[float], fmt: list[float]) -> tuple:
    """
    The two paid parts of each rollout of a prompt -> (A_task, A_fmt, sigma), in the same order.

    A_task + A_fmt is GRPO's advantage of R = task + fmt. sigma: population std of R; below 1e-6 all
    advantages are 0, because the group has no signal, and below 1e-3 they are divided by 1e-3.
    Raises ValueError if the lengths differ.
    """
    reward = [t + f for t, f in zip(task, fmt, strict=True)]  # R of each rollout
    size = len(reward) or 1  # an empty group has no signal either
    # Means of the parts add up to the mean of the sum, so the two advantages add up to GRPO's.
    # Both parts share sigma. With a sigma of its own, a part that hardly varies would be blown up.
    mean, mean_task, mean_fmt = (math.fsum(values) / size for values in (reward, task, fmt))
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in reward) / size)
    if sigma < 1e-6:
        return [0.0] * len(reward), [0.0] * len(reward), sigma
    divisor = max(sigma, 1e-3)  # smaller differences stay small; other groups are as without it
    a_task = [(value - mean_task) / divisor for value in task]
    return a_task, [(value - mean_fmt) / divisor for value in fmt], sigma


# ------------------------------------------------------------------------------------------------
# Tool calls

@dataclass
class ToolCall:
    """One call as written. start, end: seconds, None if unreadable. error None: it may run."""
    name: str = ""
    start: float | None = None
    end: float | None = None
    num_frames: int | None = None
    error: str | None = None


def parse_tool_calls(text, think_open=False):
    """Every tool call of one turn, good or bad, in the order written; linear time. think_open: the
    turn began inside a thought. A call inside a closed thought is left out, inside an unclosed one
    it counts. Dialects: JSON in <tool_call>, or `<function=..>` as in Qwen3.5; Python-like calls in
    <tool_code> (never evaluated). Aliases: start, end. video_path and unknown arguments are
    ignored."""
    calls = []
    for kind, body, closed in tag_blocks(without_thoughts(text, think_open), "|".join(CALLS)):
        if len(body) > MAX_CALL_CHARS:
            calls.append(ToolCall(error="the call is too long, expected one short call"))
        elif kind == "tool_code":
            calls += parse_code_calls(body)
        else:
            is_xml = body.lstrip().startswith("<function=")
            calls.append((parse_xml_call if is_xml else parse_json_call)(body, closed))
    return calls


# ---- below: numbers for the log, how text is read (a reader of the step may stop here) ----------


def closure_counts(turns, think_open=True):
    """{kind: [opened, closed]} over all turns. A stray closing tag is not counted."""
    texts = ["<think>\n" * think_open + turn for turn in turns]
    # Each kind alone, nesting ignored. The newline keeps a pair from spanning two turns.
    tags = {kind: "\n".join("".join(re.findall(f"</?{kind}>", t)) for t in texts) for kind in KINDS}
    return {kind: [order.count(f"<{kind}>"), order.count(f"<{kind}></{kind}>")]
            for kind, order in tags.items()}


def window_scores(windows, evidence) -> dict[str, float | None]:
    """
    How well windows meet the evidence, both lists of (start, end) in seconds. Only the unions
    count, so copies of a window change nothing.

    -> {"recall": share of the evidence that is looked at, "precision": share of the seconds looked
    at that are evidence (None without windows), "iou": of the two unions, "hit": 1.0 if any window
    meets the evidence}. All None if the evidence is empty.
    """
    cuts = sorted({t for span in (*windows, *evidence) for t in span})
    looked = gold = overlap = 0.0  # seconds
    for a, b in zip(cuts, cuts[1:]):  # no span starts or ends between two cuts
        covered, right = (any(s <= a and b <= e for s, e in spans) for spans in (windows, evidence))
        looked += (b - a) * covered
        gold += (b - a) * right
        overlap += (b - a) * (covered and right)
    if not gold:
        return dict.fromkeys(("recall", "precision", "iou", "hit"))
    return {"recall": overlap / gold, "precision": overlap / looked if looked else None,
            "iou": overlap / (looked + gold - overlap), "hit": float(overlap > 0)}


# ------------------------------------------------------------------------------------------------
# Calls

MAX_CALL_CHARS = 4000  # a usual call has 100; JSON nested deeper than this allows would raise
# SS.f with a sign, or [H:]MM:SS[.f]: 90:00 is fine, 1:75 is not. [0-9] instead of \d, which matches
# digits of other scripts too.
SECONDS_OR_CLOCK = re.compile(
    r"(?:[0-9]{1,9}(?::[0-5]?[0-9])?:[0-5]?[0-9]|[+-]?(?=\.?[0-9])[0-9]{0,9})(?:\.[0-9]{0,20})?")
XML_PARAMETER = re.compile("<parameter=([^<>]*)>([^<]*)</parameter>")
XML_CALL = re.compile(rf"<function=([^<>]+)>((?:\s*{XML_PARAMETER.pattern})*)\s*</function>")
# A name and its brackets with no call inside: of print(crop_video(..)) the inner call.
CODE_CALL = re.compile(r"""(?<![\w.])([\w.]+)\s*\(((?:"[^"\n]*"|'[^'\n]*'|[^()"'])*)\)""")
CODE_ARGUMENT = re.compile(r"""(?:(\w+)\s*=\s*)?("[^"\n]*"|'[^'\n]*'|[^\s,="'][^,="']*)""")


def to_seconds(value):
    """Seconds as float from a number, "12.5", "MM:SS" or "H:MM:SS(.f)"; else None."""
    if not isinstance(value, str):
        # bool is an int in Python, so true would be second 1. No NaN; float(10**400) raises.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and abs(value) < 1e9 else None
    if not SECONDS_OR_CLOCK.fullmatch(value.strip()):
        return None
    hours, minutes, seconds = map(float, ["0", "0", *value.split(":")][-3:])
    return 3600.0 * hours + 60.0 * minutes + seconds


def make_call(name, arguments):
    """A ToolCall from a name and an argument dict, whichever dialect they came from."""
    name = name.strip() if isinstance(name, str) else ""
    if not name:
        return ToolCall(error='the call has no tool name, expected "name": "crop_video"')
    if name != "crop_video":
        # Of a name that the model wrote: printable ASCII, no < or >, thus no tag.
        name = re.sub(r"[^ -;=?-~]", "", name[:400])[:40]
        return ToolCall(name, error=f"unknown tool '{name}', the only tool is crop_video")
    if not isinstance(arguments, dict):
        return ToolCall(name, error="arguments must be an object with start_time and end_time")
    start = to_seconds(arguments.get("start_time", arguments.get("start")))
    end = to_seconds(arguments.get("end_time", arguments.get("end")))
    frames = arguments.get("num_frames")  # 8, 8.0 or "8"; "1:00" is a time, not a count
    number = None if isinstance(frames, str) and ":" in frames else to_seconds(frames)
    count, error = int(number) if number and number >= 1 and number.is_integer() else None, None
    if start is None or end is None:
        key = "start" if start is None else "end"
        fault = "not a time" if {key, f"{key}_time"} & {*arguments} else "missing"
        error = f'{key}_time is {fault}, expected seconds or "MM:SS"'
    # A negative start is no error here, because the episode clamps windows to the video.
    elif end <= start:
        error = "the window is empty or reversed, end_time must be greater than start_time"
    elif frames is not None and count is None:
        error = "num_frames must be a whole number of at least 1"
    return ToolCall(name, start, end, count, error)


def parse_json_call(body, closed):
    """The ToolCall of one <tool_call> body. closed: the closing tag was written."""
    try:
        # A closed body must be one object alone. In an unclosed one, the rest is ignored.
        call = json.loads(body) if closed else json.JSONDecoder().raw_decode(body.lstrip())[0]
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])  # quoted twice by some templates
    except (ValueError, RecursionError):  # ValueError also for an integer of thousands of digits
        return ToolCall(error='not valid JSON, expected {"name": "crop_video", "arguments": {...}}')
    if not isinstance(call, dict):
        return ToolCall(error="a call must be one JSON object with name and arguments")
    return make_call(call.get("name"), call.get("arguments"))


def parse_xml_call(body, closed):
    """The ToolCall of a <tool_call> body that holds <function=name>, one <parameter=name> value
    </parameter> after another, </function>. closed: as in parse_json_call."""
    call = (XML_CALL.fullmatch if closed else XML_CALL.match)(body.strip())
    if not call:
        return ToolCall(error="not a whole call, expected <function=crop_video> with "
                        "<parameter=start_time> and <parameter=end_time>, each closed")
    pairs = XML_PARAMETER.findall(call[2])
    return make_call(call[1], {key.strip(): value.strip() for key, value in pairs})


def parse_code_calls(body):
    """The ToolCalls of a <tool_code> body: crop_video(1, end_time=2), or print(crop_video(..)).
    By place: start_time, end_time, num_frames, after an optional quoted path."""
    calls = []
    for name, arguments in CODE_CALL.findall(body):
        named, positional = {}, []
        for key, written in CODE_ARGUMENT.findall(arguments):
            value = written.strip(" \n\t\"'")
            if key:
                named[key] = value
            elif positional or written[0] not in "\"'" or to_seconds(value) is not None:
                positional.append(value)  # else: the path, which stands first
        by_place = dict(zip(("start_time", "end_time", "num_frames"), positional))
        calls.append(make_call(name, by_place | named))
    # A last call that was cut off has no closing bracket.
    if not calls or re.search(r"\([^()]*$", body):
        calls += [ToolCall(error="not a whole call, expected crop_video(start_time=1, end_time=2)")]
    return calls


# ------------------------------------------------------------------------------------------------
# Types of tasks


@dataclass(frozen=True)
class TaskType:
    """How tasks of one type are asked, read and paid, and which labels they may have."""

    prompt_suffix: str  # the end of the question, which asks for a form that `read` can read
    read: callable  # (answer body, options) -> what the answer says
    score: callable  # (what the answer says, label) -> R_acc in [0, 1]
    render_label: callable  # (label, options) -> the answer that says it; None: no such label
    label_format: str  # of a label, for messages
    judged: bool = False  # a judge, if a run has one, pays instead
    within: callable = lambda label, seconds: True  # whether a video of this length can show it


def task_types():
    """{"type" of a task: TaskType}. Another type is one more entry here."""
    def text(label, options):
        return label if isinstance(label, str) and label.strip() else None

    return {
        "mcq": TaskType("Answer with the letter of one option.", extract_letter,
                        lambda letter, gold: float(letter == gold.strip().upper()),
                        lambda label, options: text(label, None) if options else None,
                        "the letter of one of the task's options"),
        "open": TaskType("Answer with a few words.", answer_text, token_f1, text,
                         "a text with a letter or a digit, and no tags", judged=True),
        "list": TaskType("Answer with a list, in order, separated by commas.", answer_text,
                         list_share, text, "items in order, commas between, a letter or a digit"),
        "grounding": TaskType(
            "Answer with the start and the end in seconds, for example: 12.5 - 20.0",
            lambda answer, options: extract_span(answer), temporal_iou, span_text,
            "[start, end] in seconds, 0 <= start < end",
            # Half of the span may lie beyond: annotators round, and end a span a little late.
            within=lambda gold, end: min(gold[1], end) - gold[0] >= (gold[1] - gold[0]) / 2),
    }


# ------------------------------------------------------------------------------------------------
# Answers

MAX_ANSWER_CHARS = 50_000  # longer is no answer. Bounds the work below: NFKC may grow a text 18x
# A block is no answer, and its numbers are no span. One that never closes takes all text after it,
# so no second search runs to the end.
BLOCK = re.compile(r"(?s)<(tool_[a-z]+|action|observation|score|clip)>(?:.*?</\1>|.*)")


def answer_or_tail(turns, think_open=False):
    """The text that evaluation grades: the final answer, else the last turn after the thought."""
    answer = final_answer(turns, think_open)
    # An unclosed thought has no tail. Reading an answer out of reasoning would grade drafts.
    if answer is not None or not turns or never_closed(turns[-1], think_open):
        return answer
    text = BLOCK.sub("\n", turns[-1].rpartition("</think>")[2])
    return text.strip() if has_word(text) else None


def nfkc(text):
    """NFKC: full-width characters to ASCII. But 10² becomes 10^2, which NFKC would make 102."""
    text = unicodedata.normalize("NFKC", re.sub("(?<=[0-9])[⁻⁰¹²³⁴-⁹ⁿ]+", r"^\g<0>", text))
    return text.replace("。", ". ").replace("’", "'")


def answer_lines(response, blank=False):
    """The lines of a response that are graded: of an answer body all, of a turn those after the
    thought. blank: keep empty lines."""
    text = answer_or_tail([response]) or ""
    if len(text) > MAX_ANSWER_CHARS:
        return []
    # A LaTeX box declares the answer. The last box counts.
    text = re.sub(r"\\(?:text|math)[a-z]{0,6} ?\{([^{}]*)\}", r"\1", text)
    text = nfkc([text, *re.findall(r"\\boxed ?\{([^{}]*)\}", text)][-1])
    # Single spaces also keep the patterns below from backtracking over long blanks.
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line or blank]


def answer_text(response, options=None):
    """The part of a response that is graded, on one line. options: of a TaskType, not read."""
    return " ".join(answer_lines(response))


# ------------------------------------------------------------------------------------------------
# Open answers

UNITS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
         "fifteen sixteen seventeen eighteen nineteen").split()  # fmt: skip
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SPELLED = dict(zip(UNITS, range(20))) | dict(zip(TENS, range(20, 100, 10))) | {"%": "percent"}
COMPOUND = re.compile(rf"\b({'|'.join(TENS)})[ -]({'|'.join(UNITS[1:10])})\b")  # twenty-one
# Of texts in which all but word characters and these signs are blanks: a number that stands alone,
# with sign and point; percent; a word.
WORD = re.compile(
    r"(?<![^\s.%+#-])-?(?:[0-9]+\.[0-9]+|\.[0-9]+)(?![^\s.%+#-])|(?<![^\s.%+#-])-[0-9]+|%|"
    r"[^\s.%+#-]+[+#]*")
# Chinese characters and kana: texts without blanks between words.
IDEOGRAPH = "\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
NEGATIONS = ("not no never neither nor cannot cant isnt wasnt arent dont doesnt didnt except wrong "
             "incorrect").split()  # fmt: skip


def word_characters(text):
    """The text with a blank in place of each character that is no letter, mark, digit or one of the
    signs . - % + #, and without the vowel points of Hebrew, Arabic and Syriac."""
    kept = [" "]
    for char in text:
        # Points (Unicode's classes 10 to 36) are usually left out; the last makes an emoji of "1".
        if 10 <= unicodedata.combining(char) <= 36 or char == "\ufe0f":
            continue
        kind = unicodedata.category(char)
        # Hindi, Bengali and Thai write vowels as combining marks, which \w does not match: without
        # them other words become equal. A mark after a blank is part of a picture.
        in_word = kind[0] in "LN" or kind in ("Mn", "Mc") and kept[-1] != " "
        kept.append(char if in_word or char in ".-%+#" else " ")
    return "".join(kept)


def normalise(text):
    """The tokens by which open answers are compared. Case, articles, punctuation, hyphens and
    thousands commas are removed. The exponent of a letter joins the letter, number words become
    digits. A minus sign, a decimal point, % and C++ stay, because they change the meaning."""
    text = nfkc(text).casefold()
    text = re.sub(r"(?<=[^\W\d_])\^\{?(?=[0-9])", "", text)  # n^2, n^{2} -> n2, as NFKC has n²
    text = re.sub("['`]", "", text).replace("−", "-")  # don't -> dont
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # 1,000 -> 1000
    text = COMPOUND.sub(lambda match: f" {SPELLED[match[1]] + SPELLED[match[2]]}", text)
    tokens = []
    for word in WORD.findall(word_characters(text)):
        # 05 -> 5, 5.0 -> 5, .5 -> 0.5. As text: int() refuses thousands of digits. Without the
        # possessive repeats a long row of zeros would take quadratic time.
        if number := re.fullmatch(r"(-?)0*+([0-9]*+)(\.[0-9]+)?", word):
            word = number[1] + (number[2] or "0") + (number[3] or "").rstrip("0").rstrip(".")
        tokens.append(str(SPELLED.get(word, word)))
    # If only articles are left, keep them. Otherwise gold "A" would equal "the", and both ".".
    return [token for token in tokens if token not in ("a", "an", "the")] or tokens


def token_f1(answer, gold):
    """F1 in [0, 1] of two token multisets: a repeated word counts as often as both have it. A part
    of the answer earns a part: a slope to climb. Chinese and Japanese count by characters."""
    bags = []
    for text in (answer, gold):
        bag = Counter()
        for token in normalise(text):
            bag.update(re.findall(f"[{IDEOGRAPH}]|[^{IDEOGRAPH}]+", token))
        bags.append(bag)
    tokens, wanted = bags
    return 2.0 * (tokens & wanted).total() / max(1, (tokens + wanted).total())


def list_share(answer, gold):
    """Share in [0, 1] of the places of the longer list that hold the same item in both lists.
    Unlike token F1, this pays nothing for a wrong order. A piece without a word is no item."""
    items, wanted = ([" ".join(normalise(item)) for item in text.split(",") if has_word(item)]
                     for text in (answer, gold))
    return sum(a == b for a, b in zip(items, wanted)) / max(len(items), len(wanted), 1)


# ------------------------------------------------------------------------------------------------
# Option letters

# Each pattern sees single spaces and newlines. None has two open-ended repeats in a row, so all
# take linear time. Of brackets they see round ones alone, see strip_markdown. A table of the tests
# has a reply for each alternative.
OPTION = r"(?:option )?\(?"
END = r"(?![-']?\w|\+\+|#|\.\w\.)"  # alone: not Apples, A's, B-roll, C++, C#, A.M.
IS = r" (?:is|(?:would|should|must) be)(?: most)?(?: \w{1,9}ly)?"
DECLARED = re.compile(  # "answer: B", "correct option is B", "it's B", "I choose B", "B is correct"
    rf"(?i)\b(?:answer(?:{IS})?|(?:option|choice|it)(?:{IS}|:|'s)|I(?:'d|'ll| would| will)? "
    rf"(?:choose|select|pick|go with))[ \n:=→-]{{0,8}}{OPTION}([a-z]){END}|"
    r"([a-z])\)? is(?: \w{1,9}ly)?(?: the)?(?: best)? (?:correct|answer|option|choice)")
LEADING = re.compile(rf"(?i)\A{OPTION}([a-z]){END}(?!\)? (?:is|has))")
CAPITAL = re.compile(rf"(?<![\w.°])([A-Z]|(?<=ption )[a-z]){END}")
LABEL = re.compile(r"\(?([A-Za-z])(?:[):.]+(?: |$)|$)")  # "B. ", "(B)", "B"
# The start of a line: "Option ", "The correct answer is: "
STARTER = re.compile(r"(?i)\A(?:the )?(?:\w{4,7} )?(?:answer|option)(?: is)?:? ")
# "or C" after a stated letter; after a comma or a space only if the text says no more of C.
ALTERNATIVE = re.compile(
    r"(?i)(?:\)?\.?,? \(?(?:or|and|as well as)(?: possibly)? |\)? ?[/&] ?|"
    rf"((?:\)?,)? (?=(?:option )?\(?[A-Z]\)?(?:[,.;\n]|$)))){OPTION}([A-Z]){END}")
JOINT = re.compile(r",? ?(?:and|n?or|[/&])? ?")  # from "A" to "B" in "A and B"
NOT_BEFORE = re.compile(
    r"(?i)(?:not|never|neither|rather than|instead of|ruled out|doubt|anything but|unlikely|n't|"
    r"不[是选])(?: option| answer| it| is| be| choose| pick| think| believe| that| it's| to|"
    r" happen| from| between| (?:[A-Z]|[0-9][0-9.: s–-]{0,16}) n?or)*[ (]*$")
NOT_AFTER = re.compile(  # "is wrong", "and B are wrong", "has been eliminated"
    r"(?i)\)?(?:(?:,? (?:and )?\(?[A-Z]\)?)+(?= are))? (?:is|are|can|does|seems|has been)(?: be)? ?"
    r"(?:not|n?'t|(?:\w{1,9}ly )?(?:wrong|incorrect|ruled out|excluded|eliminated|unlikely))")
# An option is named after punctuation or one of these words: "so C", but not "vitamin C". The
# Chinese ones end "answer is", "choose", "or" and "and".
BEFORE = re.compile(
    r"(?i)(?:[^\w ]|[是为选择或和]|\b(?:(option|choice)|answer|choose|select|pick|with|is|be|s|so|"
    r"but|as|thus|hence|say|matches|and|towards|like|leaving|\w{1,9}ly|n?or|neither)) ?$")
# A letter before a word is an article or a stray letter ("A man", "I think"). Exceptions are words
# that no article precedes: "A because", "A The", "A B", a Chinese word.
STRAY = re.compile(r" (?!(?i:because|since|as|n?or|and|is|but|rather than|that|the|this|there|its?|"
                   "in|seems|best|has|[A-Z])\\b(?!-)|[\u2e80-\u9fff])\\w")


def is_letter(text, at):
    """Whether text[at] names an option, so is no article, pronoun, initial or name. One rule serves
    all letters, so that no letter is easier to state than another."""
    before = BEFORE.search("\n" + text[:at] if at < 16 else text[at - 16 : at])
    # The A of "option A depicts .." is no article, whichever word follows.
    return bool(before[1] or not STRAY.match(text, at + 1)) if before else False


def is_denied(text, start, end):
    """Whether a letter or a range at text[start:end] is said not to be the answer."""
    # Short windows of the text, so that each look around a match has a constant cost.
    before, after = text[max(0, start - 40) : start], text[end : end + 30]
    return bool(NOT_BEFORE.search(before) or NOT_AFTER.match(after))


def strip_markdown(text):
    """A line without Markdown, bullets and quotes, all brackets as round ones, with a space
    wherever a Chinese word begins or ends."""
    text = re.sub(r"^[-•>#]+ |[*_`$\"“”【】「」]|(?<!\w)'|'(?!\w)", "", text)
    text = text.translate(str.maketrans("[]{}", "()()"))
    return re.sub("(?<=[!-~])(?=[\u2e80-\u9fff])|(?<=[\u2e80-\u9fff])(?=[!-~])", " ", text)


def lists_options(text, letter, letters):
    """`text` follows the label of an option. -> whether the labels of the next two options follow
    on the same line, as in the question. letters: of all options."""
    labels = re.findall(r" \(?([A-Z])[).:]+ ", text[:2000].partition("\n")[0])
    return letter == "A" and labels != [] and labels[:2] == [*letters[1:3]]


def named_letters(pattern, text, letters):
    """{letter: index after the match} of all letters that a pattern names in text, by last
    mention. Denied letters are left out, and so is a letter that begins a list of the options."""
    named, valid, end = {}, True, 0
    for match in pattern.finditer(text):
        at = match.start(match.lastindex)
        # "labels A and C" names neither.
        valid = is_letter(text, at) and (valid or not JOINT.fullmatch(text, end, at))
        end = match.end()
        if valid and not is_denied(text, *match.span()):
            named.pop(text[at].upper(), None)
            named[text[at].upper()] = end
    # "Answer: A. cat B. dog C. hot dog" repeats the question.
    single = {k: end for k, end in named.items() if not lists_options(text[end:], k, letters)}
    return single if pattern is not CAPITAL or single == named else {}


def stated_letter(pattern, text, letters):
    """{the last letter that a pattern states}, {} if there is none, both letters of "B or C"."""
    # The last one counts: "The answer is A. No, wait: the answer is C."
    for letter, end in reversed(named_letters(pattern, text, letters).items()):
        alternative = ALTERNATIVE.match(text, end)
        two = alternative and (alternative[1] or is_letter(text, alternative.start(2)))
        two = two and not is_denied(text, *alternative.span(2))
        return {letter, alternative[2].upper()} if two else {letter}
    return set()


def letters_by_text(answer, texts, letters):
    """The letters of the options whose text is said and not denied. answer, texts: normalised."""
    # Longer texts first, so that "hot dog" does not name "dog". A lone letter is a label.
    names = {text for text in texts if text.upper() not in {"", *letters}}
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    matched = names & {*re.findall(f"(?<= )(?:{any_name})(?= )", f" {answer} ")}
    # An option's text may hold a "not", so look beside it.
    rest = f" {answer} ".replace(f" {[*matched][0]} ", " ").split() if len(matched) == 1 else []
    matched = matched if set(NEGATIONS).isdisjoint(rest) else set()
    return {letter for letter, text in zip(letters, texts) if text in matched}


def line_letter(line, letters, texts):
    """The letter of a line that holds only an answer: "B", "Option B.", "(B) dog", "Answer: dog".
    "?" if label and text contradict each other. Else None."""
    line = STARTER.sub("", line, count=1)
    label = LABEL.match(line)
    letter = label[1].upper() if label else ""
    statement = " ".join(normalise(line[label.end() if label else 0 :]))
    named, wholly = ([at for at, text in zip(letters, texts) if text == form]
                     for form in (statement, f"{letter.lower()} {statement}".strip()))  # fmt: skip
    if letter and (named or not statement):
        return letter if letter in (named if statement else letters) else "?"
    return wholly[0] if len(wholly) == 1 else None  # no label: an option begins so: "B. B. King"


def extract_letter(response, options):
    """The option letter that a response settles on, or None. Never sees the gold answer. options:
    texts, labelled ("A. ..", "(A) ..") or bare; without options A to J are allowed. The first step
    that names a letter decides: 1. the last "answer is X"; 2. a letter or an option alone on a
    line, or a letter that leads; 3. the only capital that stands as a letter; 4. the text of one
    option. No answer: two letters in one step, a letter that no option has, a label that
    contradicts its text, a list of the options."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(options) if options else 10]
    lines = [strip_markdown(line) for line in answer_lines(response)] or [""]
    # Keep the line breaks: joined by spaces, the A before "The oven .." would read as an article.
    text = "\n".join(lines)
    declared = stated_letter(DECLARED, text, letters)
    # Two labelled lines repeat the options. Then only a bare letter is an answer.
    listing = len({label[1].upper() for label in map(LABEL.match, lines) if label}) > 1
    # Compared as normalised text, so that "3" and "three" name one option. Only a label that fits
    # the option's place is taken off: "B. B. King" may be the text of option A.
    texts = [" ".join(normalise(re.sub(rf"^\s*\(?{letter}[).:]+\s+", "", strip_markdown(option))))
             for letter, option in zip(letters, map(str, options or [])) if not listing]
    own_lines = [line_letter(line, letters, texts) for line in lines]
    # A letter alone on the last line answers, whatever option the first line begins with.
    leading = set()
    if not (listing or own_lines[0] or own_lines[-1]):
        leading = stated_letter(LEADING, text, letters)
    if declared and len(lines) == len(leading) == 1:
        declared |= leading  # "A. The answer is B" contradicts itself
    steps = (declared, {*filter(None, own_lines)} | leading, named_letters(CAPITAL, text, letters),
             letters_by_text(" ".join(normalise(text)), texts, letters))  # fmt: skip
    # The first step that names a letter decides. A later step never breaks a tie.
    named = [*next(filter(None, steps), "?")]
    return named[0] if len(named) == 1 and named[0] in letters else None


# ------------------------------------------------------------------------------------------------
# Time spans

TIME = r"((?:[0-9]{1,9}:){0,2}[0-9]{1,9}(?:\.[0-9]{1,9})?)(?![0-9:%]|\.[0-9])"  # not 80-90%
SECONDS, ABOUT = r"( ?s(?:ec(?:ond)?s?)?\.?)?", r"(?:about |around |second |t ?= ?)?"
PAIR = re.compile(
    rf"(?i)([\[(] ?)?(?<![\w.:-]){TIME}{SECONDS} ?([-–~,→]|-->|(?:up )?to|through|until|and) ?"
    rf"{ABOUT}{TIME}{SECONDS}")
# "start_time": 1, "Start time: 1", "**Start time (s):** 1", "starts at about 1"
AT = (rf"[a-z_]{{0,8}}(?: time(?:stamp)?)?(?: \(s(?:econds)?\))?[\"' :=]{{0,6}}(?:is |at ){{0,2}}"
      rf"{ABOUT}{TIME}")
NAMED = re.compile(rf"(?i)(?:start|begin){AT}[^0-9]{{0,60}}?(?:end|finish|stop){AT}")
# Words just before or after a pair of numbers that is no time. A newline stands for the pair.
COUNTED = re.compile(r"(?i)(?:frames?|confidence:?)(?: \w{4,7})? ?\n|\n (?:frame|percent|confid)")
MINUTE_RANGE = re.compile(r"\b([0-9]{1,4}) ?(?:[-–]|to) ?(?=[0-9]{1,4} ?min)")
MINUTES = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?) ?m(?:in(?:ute)?s?|(?= ?[0-9]{1,2} ?s))"
                     rf"(?:,? ?(?:and )?([0-9]{{1,2}}(?:\.[0-9]{{1,3}})?){SECONDS})?")


def extract_span(response):
    """(start, end) in seconds of the last time range in a response, or None. A range is two times
    (12.5, MM:SS, H:MM:SS, "1 minute 5 seconds") joined by a dash, "to", "until" or "and", or given
    as start and end; by a comma only in brackets, with a unit, or alone. A reversed last range is
    wrong and gives None. Frame numbers, a confidence and a denied range ("not 3 - 5") are no
    answer."""
    # "<12.5 seconds> - <20.0 seconds>"
    text = re.sub(r"<([0-9][^<>]*)>", r"\1", answer_text(response))
    text = re.sub(r"[*`]|(?<=:[0-9][0-9]) ?min\b", "", text)  # "**10** - **20**", "1:05 min"
    # Minutes ("2 to 3 minutes") become seconds first. Then one pattern reads every range.
    text = MINUTE_RANGE.sub(r"\1 min to ", text)
    text = MINUTES.sub(lambda part: f"{60 * float(part[1]) + float(part[2] or 0):.3f}s", text)
    spans = [(match.span(), match[1], match[2]) for match in NAMED.finditer(text)]
    alone = text.strip(" .\"'")
    for match in PAIR.finditer(text):
        bracket, start, unit, joint, end, _ = match.groups()
        listed = joint == "," and not (bracket or unit or match[0] == alone)  # "at 10, 20 people"
        first, last = match.span()
        around = text[max(0, first - 32) : first] + "\n" + text[last : last + 12]
        # "frames 10-20", "confidence 0.8-0.9"; "frames <12.5 seconds> - <20.0 seconds>" are times.
        if not listed and (unit or not COUNTED.search(around)):
            spans.append((match.span(), start, end))
    # The last range counts, because an echoed example or a first guess stands before the answer.
    stated = [(position, *times) for position, *times in spans if not is_denied(text, *position)]
    start, end = (to_seconds(time) for time in max(stated, default=(0, None, None))[1:])
    return (start, end) if start is not None and end is not None and start < end else None


def span_text(label, options=None):
    """The label [start, end] of a grounding task as an answer; None if it has another form."""
    # Numbers, not texts: to_seconds would read "1:30" too. It returns None for NaN.
    numbers = isinstance(label, list) and not any(isinstance(second, str) for second in label)
    span = [to_seconds(second) for second in label] if numbers else []
    return f"{span[0]:.6f} - {span[1]:.6f}" if len(span) == 2 and None not in span else None


def temporal_iou(span, gold):
    """Intersection over union in [0, 1] of two (start, end) in seconds; no or an empty span: 0."""
    if span is None or not (span[0] < span[1] and gold[0] < gold[1]):  # NaN compares false: 0 too
        return 0.0
    overlap = min(span[1], gold[1]) - max(span[0], gold[0])
    union = max(span[1], gold[1]) - min(span[0], gold[0])  # the hull: exact for spans that overlap
    return overlap / union if overlap > 0 and math.isfinite(union) else 0.0
