"""
plumbing/subtitles.py (tests/test_data.py): files of subtitles -> the lines that a prompt shows.

  aligned  the lines that are spoken while a frame of the overview is shown
  full     all lines

A task may name a file in "subtitles": SRT, WebVTT, or JSON as LongVideoBench ships it. The path is
relative to the folder of the videos. "subtitle_start" is the second of the file at which the video
begins. Sub-agents, which see one window, get no subtitles.

Reads files of subtitles; writes nothing. Used by plumbing/data.py,
rollout.py, grpo.py, eval.py and evaluation/.
"""
import functools
import html
import itertools
import os
import re

import launch
import rewards
import video


def task_subtitles(task: dict, seconds, root: str, which: str) -> str:
    """
    Text of a task's subtitles, "" if there are none.

    seconds: times of the frames that are shown [K]. which: "aligned" (lines spoken at those times)
    or "full". Raises VideoError for a path that leaves the root, ValueError for an unreadable file.
    """
    if not task.get("subtitles"):
        return ""
    lines = read_subtitles(task["subtitles"], task.get("subtitle_start") or 0, root)
    return subtitle_text(lines, seconds if which == "aligned" else None)


def check_subtitles(tasks: list[dict], root: str) -> None:
    """Reads each subtitle file of the tasks once. Raises UserError for a file that is missing or
    broken, or that holds no line with a time."""
    for name, start in {(task.get("subtitles"), task.get("subtitle_start")): 0 for task in tasks}:
        mend = "; mend it, or set subtitles to null in its tasks, or give --set subtitles=none"
        try:
            path = video.resolve(name, root) if name else None
            # A silent video may have an empty file, or one with the header WEBVTT alone.
            if path and not read_subtitles(name, start or 0, root) and os.path.getsize(path) > 16:
                raise ValueError(f"{path}: holds no line with times, as SRT, WebVTT or JSON")
        except (ValueError, video.VideoError) as error:
            raise launch.UserError(str(error) + mend) from None


def subtitle_text(lines, seconds=None):
    """Lines [(start, end, text)] -> those that overlap one of `seconds`, or all; a repeat once."""
    texts = [text for start, end, text in lines if text and (
        seconds is None or any(start <= second <= end for second in seconds))]
    return "\n".join(text for text, _ in itertools.groupby(texts))


@functools.cache  # check_subtitles reads all: a disk that goes later takes none, no link, away
def read_subtitles(path: str, offset: float = 0.0, root: str | None = None) -> list[tuple]:
    """
    SRT, WebVTT or JSON file -> [(start, end, text)] in seconds, in time order. offset: second of
    the file at which the video begins. root: see video.resolve. Raises ValueError naming the file.
    """
    # The ending is that of the name given: in a Hub cache it is a link to a blob without one.
    ending = os.path.splitext(path)[1].lower()
    path = video.resolve(path, root)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("a pipe, which may never end, or a folder")
        raw = launch.read_file(path)
        encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        text = raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        if ending == ".jsonl":  # a word a line, as Video-MME-v2 ships it
            text = f"[{','.join(filter(str.strip, text.splitlines()))}]"
        lines = json_lines(text) if ending in (".json", ".jsonl") else srt_lines(text)
        # A line without a time or a text cannot be shown.
        lines = sorted((x for x in lines if x[0] is not None and x[2]), key=lambda x: x[0])
        out, above = [], []  # above: rows of the cue before
        for number, (start, end, text) in enumerate(lines, 1):
            if end is None:  # open: until the next one begins
                end = lines[number][0] if number < len(lines) else start
            rows = plain_rows(text, ending == ".vtt")
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
        reason = "not UTF-8: convert it, as with iconv -f GB18030 -t UTF-8, or -f CP1252"
        reason = reason if isinstance(error, UnicodeError) else (
            launch.machine_mark(error) + type(error).__name__)
        raise ValueError(f"{path}: unreadable subtitles ({reason})") from None


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


def written_lines(path):
    """Text of an SRT file as the paper's driver shows it: every line, repeats too. ValueError for
    an unreadable file."""
    try:
        text = launch.read_file(path).decode(errors="ignore").replace("\r\n", "\n")
    except OSError as error:
        why = f"{launch.MACHINE}{path}: unreadable subtitles ({error.strerror})"  # read at a start
        raise ValueError(why) from None
    blocks = re.split(r"\n\s*\n", text.strip())
    # Number and times are the first two lines of a block.
    lines = [line for block in blocks for line in block.strip().split("\n")[2:]]
    return "\n".join(filter(None, (re.sub("<[^>]+>", "", line).strip() for line in lines)))


def subtitle_files(args, *read: tuple[str, list]) -> list:
    """Flags, (data file, its tasks), .. -> files of subtitles that prompts show [(folder, name)].
    Reads them, and raises UserError for one that is missing or broken."""
    if args.subtitles == "none":
        return []
    read = [(video.root_of(args, path), tasks) for path, tasks in read if tasks]
    for root, tasks in read:
        check_subtitles(tasks, root)
    return [(root, row["subtitles"]) for root, rows in read for row in rows if row.get("subtitles")]
