"""
subtitles.py: the subtitles of a task -> text of a prompt, the same in training and in evaluation.

A task may name a file in "subtitles" (SRT, WebVTT, or JSON as LongVideoBench ships it). The path is
relative to the folder of the videos, and may not leave that folder. "subtitle_start" is the second
of the file at which the video begins. --subtitles chooses the lines: those spoken while one of the
frames of the overview is on display, all, or none. Sub-agents, which see one window, get none.

Reads one subtitle file. Writes nothing.
"""
import html
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
    path = video.resolve(task["subtitles"], root)
    lines = read_subtitles(path, task.get("subtitle_start") or 0.0)
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
    shown = []
    for start, end, text in lines:
        seen = seconds is None or any(start <= second <= end for second in seconds)
        if seen and text and text not in shown[-1:]:  # rolling captions say a line twice
            shown.append(text)
    return "\n".join(shown)


def read_subtitles(path: str, offset: float = 0.0) -> list[tuple]:
    """
    SRT, WebVTT or JSON file -> [(start, end, text)] in seconds, in time order. offset: second of
    the file at which the video begins. Raises ValueError naming the file.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("a pipe, which may never end, or a folder")
        # Many begin with a byte order mark, some are not quite UTF-8.
        with open(path, encoding="utf-8-sig", errors="replace") as f:
            text = f.read()
        lines = json_lines(text) if path.endswith(".json") else srt_lines(text)
        # A line without a time or a text cannot be shown.
        lines = [line for line in lines if line[0] is not None and line[2]]
        lines.sort(key=lambda line: line[0])
        out = []
        for line, following in zip(lines, [*lines[1:], None]):
            start, end, said = line
            if end is None:  # open: until the next one begins
                end = following[0] if following else start
            # No tokenizer takes a lone surrogate. Formatting (<i>, <font ..>) and line breaks go.
            said = said.encode("utf-8", "replace").decode()
            said = re.sub(r"<[^<>]*>", "", said)
            said = " ".join((html.unescape(said) if path.endswith(".vtt") else said).split())
            out.append((start - offset, end - offset, said))
        return out
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: unreadable subtitles ({type(error).__name__})") from None


def json_lines(text):
    """LongVideoBench's two forms -> [(start, end or None, text)] in seconds of the file."""
    out = []
    for row in launch.parse_json(text):
        # {"timestamp": [start, end or null], "text"}, or {"start", "end", "line"}.
        start, end = row["timestamp"] if "timestamp" in row else (row["start"], row["end"])
        said = row.get("text", row.get("line"))
        out.append((rewards.to_seconds(start), rewards.to_seconds(end), said))
    return out


def srt_lines(text):
    """SRT or WebVTT -> [(start, end, text)] in seconds of the file, in the order of the file."""
    stamp = r"((?:\d+:)?\d+:\d+[,.]\d+)"  # 00:01:02,345; hours and the comma vary
    # A block ends at an empty line. The text may have several lines.
    block = rf"{stamp} *--> *{stamp}[^\n]*\n(.*?)(?=\n[ \t]*\n|\Z)"
    out = []
    for found in re.finditer(block, text.replace("\r\n", "\n"), re.DOTALL):
        start, end = (rewards.to_seconds(found[i].replace(",", ".")) for i in (1, 2))
        out.append((start, end, found[3]))
    return out
