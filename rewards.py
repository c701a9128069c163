"""
rewards.py (tests/test_rewards.py): from the text that a policy wrote to the reward, and to the
tokens that carry credit.

  R_task = R_acc + w_tool R_tool
  R      = R_task + w_fmt R_fmt                             one number per rollout  score
  R_acc  = [letter == gold] | F1 of words | share of list items | IoU of times      accuracy
  R_fmt  = clip(R_base + lambda R_anchor, 0, 1)             <= 0.5, tags misused    format_reward
  R_tool = 0 | 0.1 a call parses | 0.3 one was run | +0.5 if one was run and R_acc > 0
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
    <tool_response> by itself. The bonus for a right answer needs an executed call.
  - Only the last non-empty <answer> of the last turn, outside thought, is graded, by one plain rule
    for each type of task. evaluation/answers.py reads answers out of the prose of other models.

Standard library only; reads and writes no file; no text raises an error.

    >>> turns = ["Look.</think><tool_call>{}</tool_call>", "A dog.</think><answer>B</answer>"]
    >>> result = score(turns, {"type": "mcq", "answer": "B"}, calls=[])
    >>> [round(result[key], 2) for key in ("acc", "fmt", "tool", "total")]
    [1.0, 0.95, 0.0, 1.95]
"""
import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

# A tool_call holds JSON, or XML as Qwen3.5 writes it; a tool_code, which some models write by
# themselves, holds code. All other angle brackets are text. Lower case, no attributes: as the cold
# start teaches.
TAG = re.compile("</?(?:think|tool_call|tool_code|answer)>")

# -----------------------------------------------------------------------------
# Reward


@dataclass(frozen=True)
class RewardConfig:
    """The terms that a rollout is paid by. Defaults: the paper's."""

    answer_suffix: bool = True  # R_base pays 0.3 + 0.2 for an <answer> block; else 0.2 + 0.1
    anchor: float = 0.5  # lambda: weight of R_anchor in R_fmt
    gamma: float = 0.3  # penalty inside R_anchor of a thought that never closes
    format_weight: float = 1.0  # w_fmt
    tool_weight: float = 1.0  # w_tool


PAPER = RewardConfig()


def score(turns, task, calls, think_open=True, pay=PAPER, verdict=None):
    """
    All reward terms of one rollout. R is composed HERE and only here, for the log and the gradient.

    turns: sampled text of each main turn, special tokens removed. task: {"type", "answer",
    "evidence"?}. calls: the episode's records of calls, in which "turn", "parseable", "status",
    "start" and "end" count. think_open: every turn began inside a thought whose <think> is not in
    the text. verdict: of a judge on the answer; None: the rule of the task's type.

    -> {"acc", "fmt", "tool": R_acc, R_fmt, R_tool; "paid_task", "paid_fmt": the two weighted parts,
    from which the advantages are made; "paid_base": the part of paid_fmt that R_base alone would
    earn; "total": R;
    "windows": window_scores of the executed calls, if the task has evidence}
    """
    answer = final_answer(turns, think_open)
    acc = accuracy(answer, task) if verdict is None else float(verdict)
    fmt, base = format_reward(turns, calls, think_open, pay)
    executed = [call for call in calls if call["status"] == "ok"]
    parseable = sum(call["parseable"] for call in calls)
    if executed:
        tool = 0.8 if acc > 0 else 0.3
    else:
        # A call that parses but did not run is worth 0.1, even if the answer is right.
        tool = 0.1 if parseable > 0 else 0.0
    # A term added here reaches the log and the gradient alike. The task part is credited at every
    # sampled token, the format part at the tokens that --format-credit names.
    paid_task = acc + pay.tool_weight * tool
    paid_fmt = pay.format_weight * fmt
    result = {
        "acc": acc,
        "fmt": fmt,
        "tool": tool,
        "paid_task": paid_task,
        "paid_fmt": paid_fmt,
        "paid_base": pay.format_weight * base,
        "total": paid_task + paid_fmt,
    }
    if task.get("evidence"):
        # A tool that does not look at the video has no window.
        windows = [(c["start"], c["end"]) for c in executed if c["start"] is not None]
        result["windows"] = window_scores(windows, task["evidence"])
    return result


def format_reward(turns, calls, think_open=True, pay=PAPER):
    """
    R_fmt of one episode -> (R_fmt, what it would be without R_anchor). turns, calls, think_open,
    pay: see score.

    R_base: with the Answer Suffix, without it
      the last turn's thought is closed and has 10 characters or more            0.2   0.3
      the last turn has a non-empty <answer> body outside thought                0.3   0.2
      and that body is closed                                                    0.2   0.1
      a turn with a call that parses closed its thought before any call          0.3   0.3
      every turn's tags pair up, if anything above scored                        0.1   0.1
    R_anchor
      every turn opens one thought, closes it and has a word in it               0.4
      and the last turn is thought, answer, in this order                        0.3
      a turn ends inside a thought                                               -gamma

    R_fmt = clip(R_base + pay.anchor * R_anchor, 0, 1), at most 0.5 if a tag is unbalanced, nested
    or opened again, or if the model wrote a tool response.
    """
    if not turns:
        return 0.0, 0.0
    texts = [with_forced_start(turn, think_open) for turn in turns]
    orders = ["".join(TAG.findall(text)) for text in texts]  # the tags of each turn
    thoughts = [closed_thought(text) for text in texts]
    answer, answer_closed = last_answer(texts[-1])
    # The calls were parsed once, when they were run: what is run and what is paid cannot differ.
    think_before_call = False
    for call in calls:
        # A tag before the end of the thought, even in a draft: the thought was not first.
        thought_first = orders[call["turn"]].startswith("<think></think>")
        if call["parseable"] and thoughts[call["turn"]] and thought_first:
            think_before_call = True
    # Tags pair up without nesting; calls alone may come twice.
    pairs = r"(?!.*<(think|answer)>.*<\1>)(<(\w+)></\3>)*"
    balanced = all(re.fullmatch(pairs, order) for order in orders)
    all_closed = all(thoughts)
    flow = all_closed and answer_closed and orders[-1] == "<think></think><answer></answer>"
    never_closed = any(text.rfind("</think>") < text.rfind("<think>") for text in texts)
    # If a tool response were paid, the model would learn to answer its own calls.
    faked = re.search("</?tool_response>", "\n".join(turns)) is not None

    # Without the Answer Suffix (the authors' plain GRPO) a thought earns more than an answer.
    think, opened, closed = (0.2, 0.3, 0.2) if pay.answer_suffix else (0.3, 0.2, 0.1)
    base = 0.0
    if len(thoughts[-1]) >= 10:
        base += think
    if answer is not None:
        base += opened
    if answer_closed:
        base += closed
    if think_before_call:
        base += 0.3
    if balanced and base > 0:  # no credit for having no tags at all
        base += 0.1
    anchor = 0.0
    if all_closed:
        anchor += 0.4
    if flow:
        anchor += 0.3
    if never_closed:
        anchor -= pay.gamma
    limit = 0.5 if faked or not balanced else 1.0
    total = min(max(base + pay.anchor * anchor, 0.0), limit)
    return total, min(base, limit)


def window_scores(windows, evidence):
    """
    How well windows meet the evidence, both lists of (start, end) in seconds. Only the unions
    count, so copies of a window change nothing.

    -> {"recall": share of the evidence that is looked at, "precision": share of the seconds looked
    at that are evidence (None without windows), "iou": of the two unions, "hit": 1.0 if any window
    meets the evidence}.
    """
    looked = union_seconds(windows)
    gold = union_seconds(evidence)
    either = union_seconds([*windows, *evidence])
    overlap = looked + gold - either
    return {
        "recall": overlap / gold,
        "precision": overlap / looked if looked > 0 else None,
        "iou": overlap / either,
        "hit": float(overlap > 1e-6),  # a microsecond: sums of floats are not exact
    }


def union_seconds(spans):
    """Seconds that lie in at least one of these (start, end)."""
    seconds = 0.0
    covered = -math.inf  # everything before this time is counted
    for start, end in sorted(map(tuple, spans)):  # JSON has lists
        seconds += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return seconds


# -----------------------------------------------------------------------------
# Thoughts and answers of a turn


def with_forced_start(turn, think_open):
    """The turn with the <think> that it began in, if that is not part of its text."""
    return "<think>\n" + turn if think_open else turn


def without_tags(text):
    """The text without tags of any name. The time of a frame, "<12.5 seconds>", is no tag."""
    return re.sub(r"<(?![0-9])[^<>]*>", "", text)


def has_word(text):
    """Whether a letter or digit is left without the tags: <answer><b></b></answer> is empty."""
    return any(char.isalnum() for char in without_tags(text))


def closed_thought(text):
    """The text of a turn's only thought; "" unless one opens, closes and holds a word."""
    parts = re.split("(</?think>)", text)  # text, tag, text, ..
    if parts[1::2] == ["<think>", "</think>"] and has_word(parts[2]):
        return without_tags(parts[2]).strip()
    return ""


def without_thoughts(text):
    """A turn without its closed thoughts. One that never closes stays: its calls are answered and
    its <answer> is graded. The format reward punishes it instead."""
    head, closing, tail = text.rpartition("</think>")
    # The tail is not searched: an opening tag without its end would make that quadratic.
    # A newline, because with "" the text "<ans<think>x</think>wer>" would become a tag.
    return re.sub("(?s)<think>.*?</think>", "\n", head + closing) + tail


def last_answer(text):
    """(body, closed) of the last non-empty <answer> of a turn outside thought, or (None, False)."""
    blocks = without_thoughts(text).split("<answer>")[1:]
    for block in reversed(blocks):
        body, closing, _ = block.partition("</answer>")
        if has_word(body):
            return body.strip(), closing != ""
    return None, False


def final_answer(turns, think_open):
    """The answer that training grades: of the last turn; None without an <answer>."""
    if not turns:
        return None
    return last_answer(with_forced_start(turns[-1], think_open))[0]


# -----------------------------------------------------------------------------
# Credit


def structural_mask(pieces):
    """
    struct(o) of ONE turn: which sampled tokens carry format credit.

    pieces: the bytes of each sampled token; a piece may be empty and may cut a tag or a UTF-8
    character anywhere. A token is in if one of its bytes lies in a tag, opening or closing. The
    last token of the turn is in too: if a tag is missing, ending there was the decision.

    A token that also holds a letter or a digit outside the tag is not in. In Qwen's vocabulary
    "<answer>B" ends in the single token ">B". If ">B" were credited, a lost tag (A_fmt = -1) would
    cancel the reward of the right letter (A_task = +1). The other tokens of the tag keep credit.

        [b"hm", b"</think>", b" <an", b"swer>", b"B", b"<|im_end|>"] -> [F, T, T, T, F, T]
        [b"<", b"answer", b">B", b"</", b"answer", b">", b"<|im_end|>"] -> [T, T, F, T, T, T, T]
    """
    # Bytes, not ids or decoded text: <think> is one token in Qwen3, <answer> is several.
    text = b"".join(pieces)
    in_tag = set()  # offsets of the bytes that lie in a tag
    for tag in re.finditer(TAG.pattern.encode(), text):
        in_tag.update(range(*tag.span()))
    mask = []
    offset = 0  # offset in bytes of the next token
    for piece in pieces:
        token_range = range(offset, offset + len(piece))
        outside = bytes(text[i] for i in token_range if i not in in_tag)
        # Part of a word: ASCII, or part of any other character.
        holds_word = re.search(rb"[0-9A-Za-z\x80-\xff]", outside) is not None
        mask.append(not in_tag.isdisjoint(token_range) and not holds_word)
        offset += len(piece)
    if mask:
        mask[-1] = True
    return mask


def group_advantages(task, fmt):
    """
    The two paid parts of each rollout of a prompt -> (A_task, A_fmt, sigma), in the same order.

    A_task + A_fmt is GRPO's advantage of R = task + fmt. sigma: population std of R; below 1e-6 all
    advantages are 0, because the group has no signal, and below 1e-3 they are divided by 1e-3.
    """
    size = len(task)
    reward = [t + f for t, f in zip(task, fmt)]  # R of each rollout
    # Means of the parts add up to the mean of the sum, so the two advantages add up to GRPO's.
    mean = math.fsum(reward) / size
    mean_task = math.fsum(task) / size
    mean_fmt = math.fsum(fmt) / size
    sigma = math.sqrt(math.fsum((r - mean) ** 2 for r in reward) / size)
    if sigma < 1e-6:
        return [0.0 for _ in task], [0.0 for _ in fmt], sigma
    # Both parts share sigma. With a sigma of its own, a part that hardly varies would be blown up.
    divisor = max(sigma, 1e-3)  # smaller differences stay small; other groups are as without it
    a_task = [(t - mean_task) / divisor for t in task]
    a_fmt = [(f - mean_fmt) / divisor for f in fmt]
    return a_task, a_fmt, sigma


def token_advantages(episode):
    """-> A_it of grpo.py, over context.ids; 0 at tokens that the policy did not sample."""
    # The prompt, tool responses and forced tokens have mask 0.
    out = [episode.advantage["task"] * sampled for sampled in episode.context.mask]
    for t in episode.struct:  # Selective Anchoring
        out[t] += episode.advantage["fmt"]
    return out


# -----------------------------------------------------------------------------
# Tool calls


@dataclass
class ToolCall:
    """One call as written."""

    name: str = ""
    arguments: dict | None = None  # as the tool's parse returns them; None: it cannot be run
    error: str | None = None  # why not, for the model


def parse_tool_calls(text, tools, think_open):
    """
    Every call of one turn, good or bad, in the order written -> [ToolCall]; never raises.

    tools: {name: tool}. tool.parse(arguments) returns a dict, or raises ValueError with a text for
    the model. think_open: see score. A call inside a closed thought is left out, inside an unclosed
    one it counts; a call whose closing tag was cut off counts if nothing follows it.
    """
    text = without_thoughts(with_forced_start(text, think_open))
    # A body ends at the next tag of a call. Last, Qwen3.5's XML without any tag around it: were it
    # no call, the turn would count as the answer, and the model would never be told.
    pattern = r"(?s)<tool_(call|code)>(.*?)(?=</?tool_(?:call|code)>|\Z)|<function="
    return [parse_call(*match.groups(), tools) for match in re.finditer(pattern, text)]


def parse_call(kind, body, tools):
    """The body of a tag, kind "call" or "code" -> ToolCall. kind None: a call without a tag."""
    call = ToolCall()
    try:
        if kind is None:
            raise ValueError("a call must stand between <tool_call> and </tool_call>")
        read = read_code_call if kind == "code" else read_call
        name, arguments = read(body.strip(), next(iter(tools)))
        call.name = name[:40]
        if name not in tools:
            raise ValueError(f"unknown tool {call.name!r}, expected {' or '.join(tools)}")
        call.arguments = tools[name].parse(arguments)
    except ValueError as error:
        call.error = str(error)
    return call


def read_call(body, example):
    """The body of a <tool_call> -> (name, arguments). Raises ValueError. example: name of a tool,
    for the model."""
    if body.startswith("<function="):  # Qwen3.5's XML
        name, _, rest = body.removeprefix("<function=").partition(">")
        pairs = re.findall(r"<parameter=([^<>]+)>([^<]*)</parameter>", rest)
        return name.strip(), {key.strip(): value.strip() for key, value in pairs}
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)  # quoted twice by some templates
    except (ValueError, LookupError, TypeError, RecursionError):  # a thousand brackets: the last
        name = arguments = None
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise ValueError(f'not valid JSON, expected {{"name": "{example}", "arguments": {{...}}}}')
    return name, arguments


def read_code_call(body, example):
    """The body of a <tool_code>, as print(crop_video(start_time=1, end_time='0:09')) -> as
    read_call. Arguments are given by name, and nothing is evaluated."""
    match = re.fullmatch(r"(?:print\()?(\w+)\s*\(([^()]*)\)+", body)
    if match is None:
        raise ValueError(f"not one whole call, expected {example}(name=value, ..)")
    pairs = re.findall(r"(\w+)\s*=\s*([^,]+)", match[2])
    return match[1], {key: value.strip(" \n\t\"'") for key, value in pairs}


def to_seconds(value):
    """12.5, "12.5", "MM:SS" or "H:MM:SS" -> seconds. Raises ValueError."""
    seconds = 0.0
    for part in str(value).split(":"):  # str(True) is no number
        seconds = 60 * seconds + float(part)
    if not abs(seconds) < 1e9:  # NaN and infinity, too
        raise ValueError("not a time in any video")
    return seconds


# -----------------------------------------------------------------------------
# Answers


def accuracy(answer, task):
    """R_acc in [0, 1] of an answer body (None: no answer, 0.0). task: {"type", "answer"}, a letter,
    a text, items with commas between, or [start, end] in seconds. Another type: KeyError."""
    graders = {
        "mcq": grade_letter,
        "open": grade_words,
        "list": grade_list,
        "grounding": grade_span,
    }
    grade = graders[task["type"]]
    return 0.0 if answer is None else grade(answer, task["answer"])


def grade_letter(answer, gold):
    """1.0 for the right letter, alone or as a label: "B", "(B)", "B. dog", "B: dog"."""
    label = re.match(r"\W*([A-Za-z])(?:[).:]|\W*\Z)", answer)
    return float(label is not None and label[1].upper() == gold.strip().upper())


def words(text):
    """Lower-case words: runs of letters, marks and digits. Signs that change the meaning stay: 1.5,
    -5, 50%, C++. Articles go, unless nothing else is there."""
    tokens = re.findall(r"(?<!\S)-?[0-9]+\.[0-9]+|(?<!\S)-[0-9]+|[^\s.-]+", word_characters(text))
    return [token for token in tokens if token not in ("a", "an", "the")] or tokens


def word_characters(text):
    """The text in lower case, with a blank in place of each character that is no letter, mark,
    digit or one of the signs . - % + #, and without the vowel points of Hebrew and Arabic."""
    result = ""
    for char in unicodedata.normalize("NFKC", text).casefold():
        if 10 <= unicodedata.combining(char) <= 36:  # points, which are usually left out
            continue
        # Hindi, Bengali and Thai write vowels as marks (M), which \w does not match: without them
        # other words become equal.
        in_word = unicodedata.category(char)[0] in "LNM" or char in ".-%+#"
        result += char if in_word else " "
    return result


def grade_words(answer, gold):
    """F1 of two bags of words. A part of the answer earns a part: a slope to climb."""
    answer_bag, gold_bag = bag_of_words(answer), bag_of_words(gold)
    return 2.0 * (answer_bag & gold_bag).total() / max(1, answer_bag.total() + gold_bag.total())


def bag_of_words(text):
    """Counter of the words; Chinese characters and kana, written without blanks, one by one."""
    ideographs = "\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    bag = Counter()
    for word in words(text):
        bag.update(re.findall(f"[{ideographs}]|[^{ideographs}]+", word))
    return bag


def grade_list(answer, gold):
    """Share of the places of the longer list that hold the same item in both lists. Unlike F1 of
    words, this pays nothing for a wrong order. A piece without a word is no item."""
    answer_items, gold_items = list_items(answer), list_items(gold)
    same = sum(a == b for a, b in zip(answer_items, gold_items))
    return same / max(1, len(answer_items), len(gold_items))


def list_items(text):
    return [words(item) for item in text.split(",") if has_word(item)]


def grade_span(answer, gold):
    """IoU of two spans of seconds: the first two times of the answer, as in "12.5 - 20.0"."""
    times = re.findall(r"[0-9]{1,5}(?::[0-9]{1,5}){0,2}(?:\.[0-9]+)?", answer)
    if len(times) < 2:
        return 0.0
    return temporal_iou((to_seconds(times[0]), to_seconds(times[1])), gold)


def temporal_iou(span, gold):
    """Intersection over union in [0, 1] of two (start, end) in seconds; a reversed span: 0."""
    overlap = min(span[1], gold[1]) - max(span[0], gold[0])
    union = max(span[1], gold[1]) - min(span[0], gold[0])  # the hull: exact for spans that overlap
    return max(0.0, overlap / union)
