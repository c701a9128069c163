"""
plumbing/data.py (tests/test_data.py): rows of tasks and of chats, checked before any long work.

  task       {"id", "video", "question", "options", "answer", "type", "subtitles", ..}, one a line
  chat       {"id", "messages": [{"role", "content"}, ..], "tools"?}, one a line
  fault      a label that earns less than 1 when the model writes that very label; an id twice; two
             turns in a row; a field of another trainer's format; ..

Reads JSONL; writes nothing. Used by sft.py, rollout.py, grpo.py and eval.py.
"""
import re
import string

import launch
import rewards
import video
from plumbing.subtitles import check_subtitles

UNREAD = "videos images audios system documents chat_template_kwargs".split()  # columns of chats
MESSAGE_FIELDS = ("role", "content", "id", "name", "tool_call_id")  # of a chat; ids change nothing

# ------------------------------------------------------------------------------------------------
# Tasks


def bare_options(options: list[str]) -> list[str]:
    """Options without their labels ("A. ", "(A) ", "A) ", "A: ")."""
    patterns = [rf"\s*(?:\({letter}\)|{letter}[.):])\s+" for letter in string.ascii_uppercase]
    labels = [re.match(pattern, text) for pattern, text in zip(patterns, options)]
    # Labels are removed only if every option has its own letter: the text "B. B. King" as the one
    # option with a letter in front is a name.
    if not all(labels):
        return [text.strip() for text in options]
    return [text[label.end():].strip() for text, label in zip(options, labels)]


def answer_letters(answer, options: list[str]) -> tuple[str, str]:
    """A published answer -> (the letter that it is, the letter of the option whose text it is), ""
    for none. The letter may be written "B", "b", "(B)" or "B."; of equal texts the first counts.

    The two differ if options are letters themselves: "c" of the options e, c, a is C, or the text
    of B. Only the file knows, see unclear_labels.
    """
    answer, letters = str(answer).strip(), string.ascii_uppercase[:len(options)]
    label = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", answer)
    by_letter = label[1].upper() if label and label[1].upper() in letters else ""
    by_text = letters[options.index(answer)] if answer in options else ""
    return by_letter, by_text


def unclear_labels(answers: list[tuple[str, str]]) -> list[bool]:
    """Pairs of answer_letters, of one file -> which of them cannot be read: those that are the
    letter of one option and the text of another, if other answers can only be letters. If all other
    answers are texts, the text counts."""
    only_letters = any(by_letter and not by_text for by_letter, by_text in answers)
    return [only_letters and by_letter != by_text and bool(by_letter and by_text)
            for by_letter, by_text in answers]


def read_tasks(path: str, faults: list | None = None, unlabelled: bool = False) -> list[dict]:
    """Task JSONL -> rows, checked before any long work. Raises UserError naming file and line; with
    a list `faults` the line goes there, and the row is left out. unlabelled: an answer may be null.
    """
    ids = set()  # ids name groups, seeds and records: two tasks of one id would be mixed up

    def fault(row):
        if missing := [key for key in ("video", "question", "answer", "type") if key not in row]:
            return (f"missing {', '.join(map(repr, missing))}"
                    + "; a chat, which sft.py trains on" * ("messages" in row))
        if (name := str(row["id"])) in ids:
            return f"task ids are not unique: {name} is there twice"
        if not (problem := task_fault(row, unlabelled)):
            ids.add(name)
        return problem

    return launch.read_jsonl(path, ("id",), fault, faults)


def task_fault(row: dict, unlabelled: bool = False) -> str | None:
    """-> None, or why a task cannot be used. unlabelled: its answer may be null."""
    options = row.get("options") or []
    if not (isinstance(row["id"], (str, int)) and isinstance(row["question"], str)):
        return "id and question must be text"
    if not (isinstance(options, list) and all(isinstance(option, str) for option in options)):
        return "options must be a list of strings, or null"
    if not isinstance(row.get("subtitles") or "", str):
        return "subtitles must be the path of a file, or null"
    if not (isinstance(e := row.get("evidence") or [], list) and all(map(rewards.span_text, e))):
        return "evidence must be a list of windows [start, end] in seconds, or null"
    # The type chooses the reward, so a misspelt one must not pass.
    if row["type"] not in [*rewards.task_types()]:  # a list, since JSON may hold any value
        return f"type is {row['type']!r}; expected {', '.join(rewards.task_types())}"
    if len(options) > 26:  # the rest would have no letter
        return f"{len(options)} options; there are letters for 26"
    letters = [*string.ascii_uppercase]
    labels = re.findall(r"(?:^|\0)\s*\(?([A-Z])[.):]\s", "\0".join(options))
    # Not initials of names, which are seldom all different and of the first letters.
    odd = labels != letters[:len(options)] and {*labels} & {*letters[:len(options) + 2]}
    if odd and len(odd) == len(options) > 1:
        return "options have labels that are not A, B, .. in order"
    if unlabelled and row["answer"] is None:
        return None
    # The label of a task is a letter: "A" of the options C, B, A is the first. But "c" of the
    # options e, c, a was meant as a text, as published rows have it.
    by_letter, by_text = answer_letters(row["answer"], options)
    if row["type"] == "mcq" and by_letter and by_text not in ("", by_letter):
        if row["answer"].strip() != by_letter:
            return f"the answer {row['answer']!r} is the letter of one option, the text of another"
    # A label that earns less than 1 when the model writes that very label misleads training.
    # Graded by the very functions that pay a rollout.
    kind = rewards.task_types()[row["type"]]
    text = kind.render_label(row["answer"], options)
    body = rewards.final_answer([f"<answer>{text}</answer>"])
    if text is None or rewards.accuracy(body, row["type"], row["answer"], options or None) < 0.999:
        return (f"the answer {str(row['answer'])[:80]!r} earns no full reward when the model gives "
                f"it: of type {row['type']} it must be {kind.label_format}")
    return None


def label_fault(task: dict, end: float, evidence=()) -> str | None:
    """-> None, or why the video cannot show the answer, or one of the windows `evidence`, whose end
    may lie beyond. end: seconds of the video."""
    if late := [window for window in evidence if window[0] >= end]:
        return f"evidence {late[0]} begins at no second of the video, which has {end:g} s"
    if task["answer"] is None or rewards.task_types()[task["type"]].within(task["answer"], end):
        return None
    return f"the answer, {task['answer']} s, lies beyond the video, which has {end:g} s"


# ------------------------------------------------------------------------------------------------
# Videos of tasks


def balance_over_ranks(items, cost, rank, world):
    """This rank's part of a batch. Items are dealt out by falling cost, each to the rank with the
    least work so far."""
    totals, parts = [0] * world, [[] for _ in range(world)]
    for item in sorted(items, key=cost, reverse=True):
        lightest = totals.index(min(totals))
        totals[lightest] += cost(item)
        parts[lightest].append(item)
    return parts[rank]


def preflight(tasks: list, source: video.VideoSource, num_frames: int, context: int,
              prompt_tokens) -> list:
    """Opens every video, reads subtitles, and counts the tokens of every first prompt with
    `num_frames`; prints the counts. prompt_tokens: (task, spec, Frames, times, subtitles) ->
    tokens. -> faults, a line each. Builds no model.

    read_tasks has checked labels and evidence, but not against the video's end."""
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    def look(task):
        """-> (fault or None, tokens of the prompt with `num_frames`)."""
        spec = source.overview_spec(task, min(4, num_frames))  # few, but from all over the video
        try:
            frames = source.load(spec)
            starts, info = source.cache.index(video.resolve(spec["video"], source.root))
            if fault := label_fault(task, info.duration, task.get("evidence") or ()):
                raise launch.UserError(fault)
            check_subtitles([task] if source.subtitles else [], source.root)
        except launch.UserError as error:
            return f"task {task['id']}: {error}", 0
        times = starts[video.overview_indices(starts, info.duration, num_frames)]
        subtitles = source.subtitles(task, times, source.root) if source.subtitles else ""
        tokens = prompt_tokens(task, spec, frames, times, subtitles)
        fault = (f"task {task['id']}: {tokens} tokens with {num_frames} frames do not fit into "
                 f"--max-model-len {context}; lower --frames or --max-pixels")
        return (fault if tokens + 32 > context else None), tokens

    # Threads, because most of the time goes into decoders.
    with ThreadPoolExecutor(video.decode_threads()) as pool:
        looked = list(tqdm(pool.map(look, tasks), total=len(tasks), desc="videos", disable=None))
    largest, videos = max((tokens for _, tokens in looked), default=0), {t["video"] for t in tasks}
    print(f"{len(tasks)} tasks, {len(videos)} videos; the largest prompt has {largest} tokens with "
          f"{num_frames} frames, of --max-model-len {context}")
    return [fault for fault, _ in looked if fault]


def max_positions(codec) -> float:
    """Tokens that a context of this checkpoint may have; inf if config.json names no limit."""
    text = launch.parse_json(codec.files["config.json"])["text_config"]
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    # Positions that are stretched (yarn) may be more than max_position_embeddings.
    stretched = rope.get("rope_type", "default") != "default"
    return float("inf") if stretched else text.get("max_position_embeddings", float("inf"))


# ------------------------------------------------------------------------------------------------
# Chats


def read_chats(path: str, faults: list | None = None) -> list[dict]:
    """SFT JSONL -> rows, checked as by read_tasks."""
    def fault(row):
        if "messages" not in row:
            return "missing 'messages'" + "; a task, for grpo.py and eval.py" * ("question" in row)
        if unread := [name for name in UNREAD if row.get(name)]:
            return f"a column {unread[0]!r}, which is not read; tools/convert.py reads such rows"
        if not (isinstance(t := row.get("tools") or [], list) and all(type(x) is dict for x in t)):
            return "'tools' must be a list of tools, or null"
        return chat_fault(row["messages"])

    return launch.read_jsonl(path, ("id",), fault, faults)


def unread_fields(item: dict, known: tuple) -> list:
    """-> fields that hold something and are none of `known`. Of another trainer's format, they
    would change nothing, silently: calls, thoughts, a mask of the loss (0, false)."""
    empty = (None, "", [], {})  # tables fill the fields that a row lacks
    return [name for name, value in item.items() if name not in known and value not in empty]


def chat_fault(messages) -> str | None:
    """-> None, or the reason why a chat of these messages cannot be trained on."""
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list with at least one message"
    with_video = []  # numbers of the messages that hold a video
    for n, m in enumerate(messages):
        valid = isinstance(m, dict) and m.get("role") in ("system", "user", "assistant", "tool")
        if not valid or "content" not in m:
            return "every message needs a 'role' (system, user, assistant, tool) and a 'content'"
        if unread := unread_fields(m, MESSAGE_FIELDS):
            return f"a message with {unread[0]!r}, which is not read"
        if isinstance(m["content"], str):
            continue
        # No list, or an empty one, has the fault of a piece that is no dict.
        for piece in m["content"] if isinstance(m["content"], list) and m["content"] else [None]:
            if fault := piece_fault(piece):
                return fault
            with_video += [n] * (piece["type"] == "video")
    # The pieces are good. Now their order: chat.encode_chat builds prompt, turn, glue, turn, ..
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        return "no assistant message: nothing to learn"
    if roles[0] == "assistant":
        return "the first message is the assistant's: no prompt stands before that turn"
    if ("assistant", "assistant") in zip(roles, roles[1:]):
        return "two assistant messages in a row: nothing stands between them to end the first"
    if any(n >= roles.index("assistant") and roles[n] != "tool" for n in with_video):
        return "a video after the first assistant message, outside a tool message"
    if any(roles[n] == "system" for n in with_video):
        return "a video in a system message: chat templates take text there"
    return None


def piece_fault(piece) -> str | None:
    """-> None, or the reason why one piece of a message cannot be used."""
    kind = piece.get("type") if isinstance(piece, dict) else None
    # "trusted" marks a program's own text, which may hold special tokens. Data may not.
    if kind == "text" and isinstance(piece.get("text"), str) and "trusted" not in piece:
        return None
    if kind == "video" and isinstance(piece.get("video"), str):
        # K frames of the whole video, or a window in seconds. video.load checks the numbers.
        fields = "frames" if "frames" in piece else "start end fps max_frames num_frames"
        if unread := unread_fields(piece, ("type", "video", *fields.split())):
            return f"a video with {unread[0]!r}, which is not read beside {fields.split()[0]!r}"
        complete = "frames" in piece or ("start" in piece and "end" in piece)
        return None if complete else "a video needs 'frames', or 'start' and 'end'"
    return "content must be a text, or a list of {'type': 'text', ..} and {'type': 'video', ..}"
