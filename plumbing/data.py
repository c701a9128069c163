"""
plumbing/data.py (tests/test_data.py): rows of tasks and of chats, checked before any long work, and
subtitles.

  task       {"id", "video", "question", "options", "answer", "type", "subtitles", ..}, one a line
  chat       {"id", "messages": [{"role", "content"}, ..], "tools"?}, one a line
  fault      a label that earns less than 1 when the model writes that very label; an id twice; two
             turns in a row; a field of another trainer's format; ..
  subtitles  the lines that are spoken while a frame of the overview is shown. Sub-agents, which see
             one window, get none

Reads JSONL and files of subtitles; writes nothing. Used by sft.py, rollout.py, grpo.py and eval.py.
"""
import functools
import html
import json
import re
import string
from concurrent.futures import ThreadPoolExecutor

import launch
import rewards
import video

# ------------------------------------------------------------------------------------------------
# Tasks


# What a label must be, for the line that refuses one.
LABELS = {
    "mcq": "the capital letter of one of the task's options",
    "open": "a text with a letter or a digit, and no tags",
    "list": "items in order, commas between, a letter or a digit",
    "grounding": "[start, end] in seconds, 0 <= start < end",
}


def bare_options(options):
    """Options without their labels ("A. ", "(A) ", "A) ", "A: ")."""
    bare = []
    for letter, option in zip(string.ascii_uppercase, options):
        label = re.match(rf"\s*(?:\({letter}\)|{letter}[.):])\s+", option)
        # Only if every option has its own letter: the text "B. B. King" as the one option with a
        # letter in front is a name.
        if label is None:
            return [option.strip() for option in options]
        bare.append(option[label.end():].strip())
    return bare


def read_tasks(path, faults=None):
    """Task JSONL -> rows, checked before any long work. Raises UserError naming file and line; with
    a list `faults` the line goes there, and the row is left out."""
    ids = set()  # ids name groups, seeds and records: two tasks of one id would be mixed up

    def fault(row):
        name = str(row["id"])
        if name in ids:
            return f"task ids are not unique: {name} is there twice"
        ids.add(name)
        return task_fault(row)

    fields = ("id", "video", "question", "answer", "type")
    return launch.read_jsonl(path, fields, fault, faults)


def task_fault(row):
    """-> None, or why a task cannot be used."""
    if not (isinstance(row["video"], str) and isinstance(row["question"], str)):
        return "video and question must be texts"
    evidence = row.get("evidence") or []
    if not all(is_span(window) for window in evidence):
        return "evidence must be a list of windows [start, end] in seconds, or null"
    options = row.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return "options must be a list of strings, or null"
    # The type chooses the reward, so a misspelt one must not pass.
    if row["type"] not in LABELS:
        return f"type is {row['type']!r}; expected {', '.join(LABELS)}"
    if not label_earns_all(row, options):
        return (f"the answer {str(row['answer'])[:80]!r} earns no full reward when the model gives "
                f"it: of type {row['type']} it must be {LABELS[row['type']]}")
    return None


def is_span(value):
    """Whether a value of JSON is [start, end] in seconds, 0 <= start < end."""
    try:
        start, end = value
        return 0 <= start < end < 1e9  # NaN fails this
    except (TypeError, ValueError):  # not two, or not of numbers
        return False


def label_earns_all(row, options):
    """Whether a policy that writes the very label is paid 1. Graded by the function that pays a
    rollout: a label that can never be earned misleads training."""
    label = row["answer"]
    if row["type"] == "grounding":
        return is_span(label)
    if row["type"] == "mcq":
        return label in list(string.ascii_uppercase[:len(options)])
    if not isinstance(label, str):
        return False
    body = rewards.final_answer([f"<answer>{label}</answer>"], think_open=False)
    return rewards.accuracy(body, row) > 0.999


def late_window(task, end):
    """-> None, or why the video, which ends at `end` seconds, cannot show the answer or the
    evidence."""
    windows = list(task.get("evidence") or [])
    if task["type"] == "grounding":
        windows.append(task["answer"])
    for window in windows:  # one may end beyond the video: annotators round
        if window[0] >= end:
            return f"{window} s lies beyond the video, which has {end:g} s"
    return None


def check_tasks(tasks, source):
    """--check of tasks: opens every video, looks for the answer in its time, reads subtitles ->
    faults, a line each. Builds no model."""
    from tqdm import tqdm

    def look(task):
        spec = source.overview_spec(task, 4)  # few frames, but from all over the video
        try:
            source.load_overview(spec, task)
            fault = late_window(task, source.duration(spec))
        except launch.UserError as error:
            fault = str(error)
        return fault and f"task {task['id']}: {fault}"

    # Threads, because most of the time goes into decoders.
    with ThreadPoolExecutor(video.decode_threads()) as pool:
        looked = list(tqdm(pool.map(look, tasks), total=len(tasks), desc="videos", disable=None))
    return [fault for fault in looked if fault]


# ------------------------------------------------------------------------------------------------
# Rows of either kind


def add_frame_arguments(parser):
    """Flags of videos and their frames, the same in SFT, RL and evaluation."""
    add = parser.add_argument_group("frames").add_argument
    # A path in a data file must not reach other files of the machine.
    add("--video-root", help="folder that holds all videos; default: the JSONL's folder")
    # 50176 = 224 x 224, at most 49 vision tokens: a token stands for 32 x 32 pixels.
    add("--max-pixels", type=launch.positive, default=50176, help="of a frame after resizing")


def balance_over_ranks(items, cost, rank, world):
    """This rank's part of a batch. Items are dealt out by falling cost, each to the rank with the
    least work so far."""
    totals = [0 for _ in range(world)]
    part = []
    for item in sorted(items, key=cost, reverse=True):
        lightest = totals.index(min(totals))
        totals[lightest] += cost(item)
        if lightest == rank:
            part.append(item)
    return part


def report_check(faults, path):
    """Ends --check: prints each fault; raises UserError if there is one."""
    for fault in faults:
        print(launch.printable(fault))
    if faults:
        raise launch.UserError(f"--check: {len(faults)} faults in {path}")
    print(f"no fault in {path}")


# ------------------------------------------------------------------------------------------------
# Chats

# Columns of other trainers' formats. They would change nothing, silently.
UNREAD = ("videos", "images", "audios", "system", "documents", "chat_template_kwargs")
ROLES = ("system", "user", "assistant", "tool")
# The fields that are read, in a message and in each kind of content. Others of another trainer's
# format (calls, thoughts, a mask of the loss) are refused. So is "trusted", the mark of a program's
# own text, which may hold special tokens.
MESSAGE = {"role", "content", "id", "name", "tool_call_id"}  # ids change nothing
TEXT = {"type", "text"}
OVERVIEW = {"type", "video", "frames"}
WINDOW = {"type", "video", "start", "end"}
OF_WINDOW = {"fps", "max_frames", "num_frames"}  # may be left out; video.load checks the numbers


def read_chats(path, faults=None):
    """SFT JSONL -> rows, checked as by read_tasks."""
    def fault(row):
        row["messages"] = without_empty(row["messages"] or [])
        return chat_fault(row)

    return launch.read_jsonl(path, ("id", "messages"), fault, faults)


def without_empty(value):
    """A value of JSON without the fields that hold nothing: tables, as Arrow's, fill so what a row
    lacks."""
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    if isinstance(value, dict):
        return {name: without_empty(x) for name, x in value.items() if x not in (None, [], {})}
    return value


def chat_fault(row):
    """-> None, or the reason why a chat cannot be trained on."""
    for name in UNREAD:
        if row.get(name):
            return f"a column {name!r}, which is not read; tools/convert.py reads such rows"
    for message in row["messages"]:
        if message.get("role") not in ROLES:
            return f"a role {message.get('role')!r}, not {', '.join(ROLES)}"
        fault = content_fault(message)
        if fault:
            return fault
    # The order: chat.encode_chat builds prompt, turn, glue, turn, ..
    order = " ".join(message["role"] for message in row["messages"])
    if order.startswith("assistant") or "assistant assistant" in order or "assistant" not in order:
        return (f"roles in the order {order!r}; a chat needs turns of the assistant, each after a "
                "message of another role")
    return None


def content_fault(message):
    """-> None, or why the content of a message cannot be used."""
    unread = message.keys() - MESSAGE
    if unread:
        return f"a message with the field {min(unread)!r}, which is not read here"
    content = message.get("content")
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return "content must be a text, or a list of texts and videos"
    for piece in content:
        # K frames of the whole video, or a window in seconds. A type is the name of a field.
        is_known = piece.keys() in (TEXT, OVERVIEW) or piece.keys() - OF_WINDOW == WINDOW
        if not is_known or piece["type"] not in piece:
            return (f"content {piece} is neither {{'type': 'text', 'text'}} nor a video with "
                    "'frames', or with 'start' and 'end'")
    return None


# ------------------------------------------------------------------------------------------------
# Subtitles. A task may name a file in "subtitles": SRT, WebVTT, or JSON as LongVideoBench ships it,
# relative to the folder of the videos. "subtitle_start" is the second of the file at which the
# video begins. Not read by ffmpeg, which takes "a < b and c > d" for a tag.


def task_subtitles(task, seconds, root):
    """Lines of a task's subtitles that are spoken while a frame is shown, "" if there are none.
    seconds: times of the frames [K]. Raises UserError."""
    if not task.get("subtitles"):
        return ""
    texts = []
    offset = task.get("subtitle_start") or 0.0
    for start, end, text in read_subtitles(video.resolve(task["subtitles"], root)):
        is_spoken = any(start <= second + offset <= end for second in seconds)
        if is_spoken and texts[-1:] != [text]:  # a repeat is shown once
            texts.append(text)
    return "\n".join(texts)


@functools.cache
def read_subtitles(path):
    """SRT, WebVTT or JSON file -> [(start, end, text)] in seconds of the file, in time order.
    Raises UserError naming the file."""
    try:
        text = launch.read_file(path).decode("utf-8-sig")
        # By the first sign, not by the name: in a Hub cache that is a blob's, without an ending.
        if text.lstrip().startswith(("[", "{")):
            cues = json_cues(text)
        else:
            cues = srt_cues(text.replace("\r\n", "\n"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        # Another encoding is not guessed: a wrong guess shows the model wrong words.
        raise launch.UserError(
            f"{path}: unreadable subtitles ({error}); if they are not UTF-8, convert them, as with "
            "iconv -f GB18030 -t UTF-8, or -f CP1252; or set subtitles to null in the tasks"
        ) from None
    lines, above, shown_until = [], [], 0.0  # above: rows of the cue before
    for start, end, text in sorted(cues):
        rows = plain_rows(text)
        # Rolling captions begin a cue with rows of the one before, which are lines already.
        fresh = [row for row in rows if start > shown_until or row not in above]
        if fresh:
            lines.append((start, end, " ".join(fresh)))
        above, shown_until = rows, end
    return lines


def plain_rows(text):
    """Text of a cue -> its rows, without markup."""
    # A tag is a name, a name with attributes, a voice, or a time. "a < b and c > d" holds none.
    text = re.sub(r"<(?:/?[a-z][\w.-]*\s*/?|[a-z]\w*\s[^<>=]*=[^<>]*|(?:v|lang)[.\s][^<>]*"
                  r"|\d+:[\d:.]+)>", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\{\\[^{}]*\}", "", text).replace("\\N", "\n")  # {\an8} and \N are of ASS
    text = html.unescape(text)  # &amp; of WebVTT
    return [" ".join(row.split()) for row in text.split("\n") if row.strip()]


def srt_cues(text):
    """SRT or WebVTT -> [(start, end, text)] in seconds, in the order of the file."""
    stamp = r"(?:\d+:)?\d+:\d+[,.]\d+"  # 00:01:02,345; hours and the comma vary
    line = rf"^[ \t]*({stamp})[ \t]*-->[ \t]*({stamp}).*$"
    parts = re.split(line, text, flags=re.MULTILINE)
    cues = []
    for start, end, cue_text in zip(parts[1::3], parts[2::3], parts[3::3]):
        cue_text = re.sub(r"\n\d+\n\Z", "\n", cue_text)  # the number of the next cue
        # The text ends at an empty line. In rolling captions the first row may be blank.
        text = re.split(r"\n[ \t]*\n", cue_text.strip())[0]
        start = rewards.to_seconds(start.replace(",", "."))
        end = rewards.to_seconds(end.replace(",", "."))
        cues.append((start, end, text))
    return cues


def json_cues(text):
    """As LongVideoBench ships them, {"timestamp": [start, end or null], "text"} or {"start", "end",
    "line"} -> [(start, end, text)] in seconds of the file."""
    cues = []
    for row in json.loads(text):
        if "timestamp" in row:
            (start, end), text = row["timestamp"], row["text"]
        else:
            start, end, text = row["start"], row["end"], row["line"]
        # An open line stands until the end of the video, as in LongVideoBench's own reader.
        cues.append((rewards.to_seconds(start), rewards.to_seconds(end or 1e8), text))
    return cues
