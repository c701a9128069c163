"""
plumbing/data.py: rows of tasks and of chats, and files of subtitles, checked before any long work.

  task       {"id", "video", "question", "options", "answer", "type", "subtitles", ..}, one a line
  chat       {"id", "messages": [{"role", "content"}, ..], "tools"?}, one a line
  fault      a label that earns less than 1 when the model writes that very label; an id twice; two
             turns in a row; ..
  subtitles  SRT, WebVTT, or JSON as LongVideoBench ships it -> the lines of the frames shown

Reads JSONL and subtitles; writes nothing. Used by sft.py, rollout.py, grpo.py and eval.py.
"""
import html
import itertools
import os
import re
import string
from dataclasses import dataclass

import launch
import rewards
import video

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


def read_tasks(path: str, faults: list | None = None, unlabelled: bool = False) -> list[dict]:
    """Task JSONL -> rows, checked before any long work. Raises UserError naming file and line; with
    a list `faults` the line goes there, and the row is left out. unlabelled: an answer may be null.
    """
    seen = set()  # ids name groups, seeds and records: two tasks of one id would be mixed up

    def fault(row):
        if (name := str(row["id"])) in seen:
            return f"task ids are not unique: {name} is there twice"
        if not (wrong := task_fault(row, unlabelled)):
            seen.add(name)
        return wrong

    return launch.read_jsonl(path, ("id", "video", "question", "answer", "type"), fault, faults)


def task_fault(row: dict, unlabelled: bool = False) -> str | None:
    """-> None, or why a task cannot be used. unlabelled: its answer may be null."""
    options = row.get("options") or []
    if not (isinstance(row["id"], (str, int)) and isinstance(row["question"], str)):
        return "id and question must be text"
    if not (isinstance(options, list) and all(isinstance(option, str) for option in options)):
        return "options must be a list of strings, or null"
    if not isinstance(row.get("subtitles") or "", str):
        return "subtitles must be the path of a file, or null"
    # The type chooses the reward, so a misspelt one must not pass.
    if row["type"] not in [*rewards.task_types()]:  # a list, since JSON may hold any value
        return f"type is {row['type']!r}; expected {', '.join(rewards.task_types())}"
    if len(options) > 26:  # the rest would have no letter
        return f"{len(options)} options; there are letters for 26"
    if unlabelled and row["answer"] is None:
        return None
    # A label that earns less than 1 when the model writes that very label misleads training.
    # Graded by the very functions that pay a rollout.
    kind = rewards.task_types()[row["type"]]
    said = kind.render_label(row["answer"], options)
    given = rewards.final_answer([f"<answer>{said}</answer>"])
    if said is None or rewards.accuracy(given, row["type"], row["answer"], options or None) < 0.999:
        return (f"the answer {str(row['answer'])[:80]!r} earns no full reward when the model gives "
                f"it: of type {row['type']} it must be {kind.label_format}")
    return None


def files_of(args, *read: tuple[str, list]) -> tuple[list, list]:
    """Flags, (data file, its tasks), .. -> (films, files of subtitles that prompts show), each
    [(folder, name)]."""
    both = [(video.root_of(args, path), task) for path, tasks in read for task in tasks]
    spoken = [(root, task["subtitles"]) for root, task in both if task.get("subtitles")]
    return [(root, str(task["video"])) for root, task in both], spoken * (args.subtitles != "none")


def label_fault(task: dict, duration: float) -> str | None:
    """-> None, or why the video cannot show the answer. duration: seconds of the video."""
    within = rewards.task_types()[task["type"]].within
    if task["answer"] is None or within(task["answer"], duration):
        return None
    return (f"the answer, {task['answer']} s, lies beyond the end of the video, which has "
            f"{duration:g} s")


def report_check(faults, of):
    """Ends --check: prints each fault; raises UserError if there is one. of: what was checked."""
    for fault in faults:
        print(launch.printable(fault))
    if faults:
        raise launch.UserError(f"--check: {len(faults)} faults in {of}")
    print(f"no fault in {of}")


# ------------------------------------------------------------------------------------------------
# Films of tasks


@dataclass
class Source:
    """Where frames come from: the root folder, size bounds, the cache of this stage."""

    root: str
    cache: video.FrameCache
    min_pixels: int = 1024  # of a frame after resizing
    max_pixels: int = 50176
    crop_pixels: int = 0  # of a window's frame, at most; 0 = max_pixels
    subtitles: object = None  # (task, seconds of the frames [K]) -> text shown with the question
    snap: bool = False  # overviews take nearby key frames, see video.py
    own_labels: bool = False  # labels of a user's file are checked, those of a benchmark are not

    def overview_spec(self, task, num_frames):
        """The overview of a task, as `load` reads it and as a rollout records it."""
        # Only if set: records of runs without --snap have no such field.
        snap = {"snap": True} if self.snap else {}
        return {"video": task["video"], "frames": num_frames, **snap}

    def load(self, spec: dict) -> video.Frames:
        """{"video", "frames"} or {"video", "start", "end", ..} -> Frames. Raises VideoError, or
        ValueError if a window holds no part of the video."""
        most = self.max_pixels if "frames" in spec else self.crop_pixels or self.max_pixels
        return video.load(spec, self.root, self.cache, self.min_pixels, most)

    def load_overview(self, spec, task):
        """-> (Frames, seconds of the video, text of the subtitles, video.identity)."""
        # One call for all, because each reads the disk and this runs in a decoder's thread.
        film, duration = self.film(spec), self.duration(spec)
        frames = self.load_same(spec, film)
        spoken = self.subtitles(task, frames.seconds) if self.subtitles else ""
        return frames, duration, spoken, film

    def load_window(self, spec, film):
        """A crop as the model asked for -> (the same clamped to the video, Frames). film: the
        identity at the overview. Raises as `load` does, and VideoError for another film."""
        frames = self.load_same(spec, film)
        # A model may ask for -5 s or for a second after the end. The message to the sub-agent and
        # the record name the part that was shown.
        start, end = max(0.0, spec["start"]), min(spec["end"], self.duration(spec))
        return {**spec, "start": start, "end": end}, frames

    def load_same(self, spec, film):
        """As `load`; VideoError also for a file that is not `film` (an identity) after decoding."""
        try:
            return self.load(spec)
        finally:  # also after the ValueError of a window that lies beyond another film's end
            if self.film(spec) != film:
                raise video.VideoError(spec["video"], "the file changed during the episode")

    def film(self, spec):
        """-> video.identity of a spec's file."""
        return video.identity(video.resolve(spec["video"], self.root))

    def duration(self, spec):
        """Seconds of the video."""
        return video.probe(video.resolve(spec["video"], self.root), self.cache).duration


def look_at_film(task: dict, source: Source, spec: dict, most: int) -> tuple:
    """Reads the film and the subtitles of a task, for --check. spec: of an overview of few frames,
    which is decoded -> (its Frames, times of an overview of `most` frames [<= most], which is not).
    Raises UserError if one of them is broken, or if the label lies beyond the end."""
    seen = source.load(spec)  # few frames, but from all over the film
    if fault := label_fault(task, source.duration(spec)):
        raise launch.UserError(fault)
    if source.subtitles:
        check_subtitles([task], source.root)
    starts, info = source.cache.index(video.resolve(spec["video"], source.root))
    return seen, starts[video.overview_indices(starts, info.duration, most)]


# ------------------------------------------------------------------------------------------------
# Chats


def read_chats(path: str, faults: list | None = None) -> list[dict]:
    """SFT JSONL -> rows, checked as by read_tasks."""
    return launch.read_jsonl(path, ("id", "messages"), lambda r: chat_fault(r["messages"]), faults)


def chat_fault(messages) -> str | None:
    """-> None, or the reason why a chat of these messages cannot be trained on."""
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list with at least one message"
    shown = []  # numbers of the messages that hold a video
    for n, m in enumerate(messages):
        known = isinstance(m, dict) and m.get("role") in ("system", "user", "assistant", "tool")
        if not known or "content" not in m:
            return "every message needs a 'role' (system, user, assistant, tool) and a 'content'"
        if isinstance(m["content"], str):
            continue
        # No list, or an empty one, has the fault of a piece that is no dict.
        for piece in m["content"] if isinstance(m["content"], list) and m["content"] else [None]:
            if fault := piece_fault(piece):
                return fault
            shown += [n] * (piece["type"] == "video")
    # The pieces are good. Now their order: chat.encode_chat builds prompt, turn, glue, turn, ..
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        return "no assistant message: nothing to learn"
    if roles[0] == "assistant":
        return "the first message is the assistant's: no prompt stands before that turn"
    if ("assistant", "assistant") in zip(roles, roles[1:]):
        return "two assistant messages in a row: nothing stands between them to end the first"
    if any(n >= roles.index("assistant") and roles[n] != "tool" for n in shown):
        return "a video after the first assistant message, outside a tool message"
    if any(roles[n] == "system" for n in shown):
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
        whole = "frames" in piece or ("start" in piece and "end" in piece)
        return None if whole else "a video needs 'frames', or 'start' and 'end'"
    return ("content must be a text, or a list of {'type': 'text', 'text'} and "
            "{'type': 'video', 'video', ...}")


# ------------------------------------------------------------------------------------------------
# Subtitles. A task may name a file in "subtitles": SRT, WebVTT, or JSON as LongVideoBench ships it.
# The path is relative to the folder of the videos. "subtitle_start" is the second of the file at
# which the video begins. Sub-agents, which see one window, get no subtitles.


def task_subtitles(task: dict, seconds, root: str, which: str) -> str:
    """
    Text of a task's subtitles, "" if there are none.

    seconds: times of the frames that are shown [K]. which: "aligned" (lines spoken at those times)
    or "full". Raises VideoError for a path that leaves the root, ValueError for an unreadable file.
    """
    if not task.get("subtitles"):
        return ""
    lines = read_subtitles(video.resolve(task["subtitles"], root), task.get("subtitle_start") or 0)
    return subtitle_text(lines, seconds if which == "aligned" else None)


def check_subtitles(tasks: list[dict], root: str) -> None:
    """Reads each subtitle file of the tasks once. Raises UserError for a file that is missing or
    broken, or that holds no line with a time."""
    for name, start in {(task.get("subtitles"), task.get("subtitle_start")): 0 for task in tasks}:
        mend = "; mend it, or set subtitles to null in its tasks, or give --subtitles none"
        try:
            path = video.resolve(name, root) if name else None
            # A silent film may have an empty file, or one with the header WEBVTT alone.
            if path and not read_subtitles(path, start or 0.0) and os.path.getsize(path) > 16:
                raise ValueError(f"{path}: holds no line with times, as SRT, WebVTT or JSON")
        except (ValueError, video.VideoError) as error:
            raise launch.UserError(str(error) + mend) from None


def subtitle_text(lines, seconds=None):
    """Lines [(start, end, text)] -> those that overlap one of `seconds`, or all; a repeat once."""
    texts = [text for start, end, text in lines if text and (
        seconds is None or any(start <= second <= end for second in seconds))]
    return "\n".join(text for text, _ in itertools.groupby(texts))


def read_subtitles(path: str, offset: float = 0.0) -> list[tuple]:
    """
    SRT, WebVTT or JSON file -> [(start, end, text)] in seconds, in time order. offset: second of
    the file at which the video begins. Raises ValueError naming the file.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("a pipe, which may never end, or a folder")
        with open(path, "rb") as f:
            raw = f.read()
        encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        text = raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        if path.endswith(".jsonl"):  # a word a line, as Video-MME-v2 ships it
            text = f"[{','.join(filter(str.strip, text.splitlines()))}]"
        lines = json_lines(text) if path.endswith((".json", ".jsonl")) else srt_lines(text)
        # A line without a time or a text cannot be shown.
        lines = sorted((line for line in lines if line[0] is not None and line[2]),
                       key=lambda line: line[0])
        out, above = [], []  # above: rows of the cue before
        for number, (start, end, text) in enumerate(lines, 1):
            if end is None:  # open: until the next one begins
                end = lines[number][0] if number < len(lines) else start
            rows = plain_rows(text, path.endswith(".vtt"))
            # Rolling captions begin a cue with the last rows of the one before, which stay shown.
            count = max(n for n in range(len(rows) + 1)
                        if n == 0 or rows[:n] == above[-n:] and start <= out[-1][1])
            if count:
                out[-1] = (out[-1][0], max(out[-1][1], end), out[-1][2])
            if rows[count:]:
                out.append((start, end, " ".join(rows[count:])))
            above = rows
        return [(start - offset, end - offset, text) for start, end, text in out]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Another encoding is not guessed: a wrong guess shows the model wrong words.
        why = "not UTF-8: convert it, as with iconv -f GB18030 -t UTF-8, or -f CP1252"
        why = why if isinstance(error, UnicodeError) else type(error).__name__
        raise ValueError(f"{path}: unreadable subtitles ({why})") from None


def plain_rows(text: str, vtt: bool) -> list[str]:
    """Text of a cue -> its rows, without markup."""
    # A tag is a name, a name with attributes, a voice, or a time. "a < b and c > d" holds none.
    text = re.sub(r"<(?:/?[a-z][\w.-]*\s*/?|[a-z]\w*\s[^<>=]*=[^<>]*|(?:v|lang)[.\s][^<>]*"
                  r"|\d+:[\d:.]+)>", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\{\\[^{}]*\}", "", text).replace("\\N", "\n")  # {\an8} and \N are of ASS
    text = html.unescape(text) if vtt else text
    rows = text.encode("utf-8", "replace").decode().split("\n")  # no tokenizer takes a surrogate
    return [" ".join(row.split()) for row in rows if row.strip()]


def json_lines(text):
    """LongVideoBench's two forms -> iterator of (start, end or None, text), seconds of the file."""
    for row in launch.parse_json(text):
        # {"timestamp": [start, end or null], "text"}, or {"start", "end", "line"}, or of words.
        times = row["timestamp"] if "timestamp" in row else [
            row[name] if name in row else row[f"{name}_time"] for name in ("start", "end")]
        start, end = map(rewards.to_seconds, times)
        yield start, end, row["text"] if "text" in row else row["line"]


def srt_lines(text):
    """SRT or WebVTT -> iterator of (start, end, text) in seconds, in the order of the file."""
    # 00:01:02,345; hours and the comma vary. Bounded, or a file of digits takes minutes.
    stamp = r"(?:\d{1,6}:)?\d{1,6}:\d{1,6}[,.]\d{1,6}"
    # A block ends at an empty line, or where the next one begins, with or without a number before.
    # The text may have several lines, or none. In rolling captions the first one is blank, which
    # ffmpeg writes as an empty line into SRT.
    blank = r"\n[ \t]+" if text.startswith("WEBVTT") else r"\n[ \t]*"
    ends = rf"(?=\n[ \t]*\n|\n(?:\d{{1,9}}\n)?{stamp} *-->|\Z)"
    block = rf"({stamp}) *--> *({stamp})[^\n]*((?:{blank}(?=\n))?.*?){ends}"
    for cue in re.finditer(block, text, re.DOTALL):
        start, end = (rewards.to_seconds(cue[i].replace(",", ".")) for i in (1, 2))
        yield start, end, cue[3]
