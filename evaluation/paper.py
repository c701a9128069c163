"""
evaluation/paper.py (tests/slow/test_paper.py): the evaluation of the paper's authors, as their
driver runs it (ParaVT cf55249, paravt/eval). Its numbers are those of the paper's Table 1.

  paper            ParaVT-8B: crop_video answered with frames; another system text for Charades-STA
  paper-general    Qwen3-VL-8B, Conan-7B: the same, with one system text for all
  paper-direct     Qwen2.5-VL-7B: one turn
  paper-reasoning  Video-R1-7B and others: one turn, with a thought

Frames, templates, calls, replies and limits are the driver's, faults included: a video with fewer
than 64 frames is asked about without any, options have two labels in Video-MME and stand twice in
MLVU, a call inside a thought runs, broken JSON is an answer, a window without an end takes 10 s.
The words are ours, unless --texts-of names a checkout of theirs.

Departs: a request that fails is an error and is never graded. Answers are read by our rules. A
window that lies between two frames is an error, where theirs tries another reader.

Reads and writes no file. Used by evaluation/systems.py.
"""

import json
import re
from functools import partial

import rewards
from evaluation import answers
from evaluation.protocol_loop import (
    Protocol,
    Reply,
    add_video,
    fill_template,
    load_windows,
    window_call,
)

TURNS = 3  # rounds of calls, in the scripts that made the table
QUALITY = 85  # of JPEGs
# Fields of frame_sources.PublisherSource: qwen_vl_utils' defaults for the overview, the driver's
# own for a window.
READER = {"overview_grid": "qwen", "grounding_as_video": True, "short_is_blind": True,
          "jpeg": QUALITY, "min_pixels": 100352, "crop_pixels": 50176, "crop_min_pixels": 784,
          "written_lines": True}
# The texts of a checkout, in order. Those of the splits are user turns.
SPLITS = ("videomme", "videomme_wsub", "longvideobench", "lvbench", "mlvu", "mmvu", "charades")
ONE_TURN = ("system", *SPLITS)
AGENT = ("system", "grounding", *SPLITS, "path", "reply", "failed", "letter", "span")


def settings(one_turn: bool) -> dict:
    """Flags of the driver's scripts. max_pixels: of the processor of a video."""
    calls = {"max_turns": 0, "tools": ["off"]} if one_turn else {"max_turns": TURNS}
    return {"frames": [64], "max_pixels": 25165824, "temperature": 0.0, "max_new_tokens": 2048,
            "max_model_len": 65536, "think_prefix": False, "max_parallel": 5, "sub_fps": 1.0,
            "sub_frames": 16, "stamps": False, **calls}


def our_texts(system: str, tool: dict | None = None) -> list[str]:
    """Our wording of ONE_TURN's texts; with the schema of crop_video: of AGENT's."""
    instruction = "Reply with the letter of one option." if tool else ""
    mcq = "Question: {published}\nOptions:\n%s\n" + instruction
    turns = [mcq % "{labelled}", "Subtitles:\n{spoken}\n\n" + mcq % "{labelled}",
             mcq % "{lines}", "{published}\n" + instruction, mcq % "{lines}", mcq % "{lines}",
             'When does this happen in the video: "{event}"? Reply in this form: The event happens '
             "in 10.0 - 20.0 seconds."]
    if not tool:
        return [system, *turns]
    window = {"video_path": "..", "start_time": 0, "end_time": 9}
    call = json.dumps({"name": "crop_video", "arguments": window})
    system += (f"\n<tools>\n{json.dumps(tool)}\n</tools>\nWrite each call, and several to see "
               f"several windows, as\n<tool_call>\n{call}\n</tool_call>")
    return [system, system, *turns, " The video path for this video is: {video}",
            "<tool_response>\n{frames} frames from {start}s to {end}s.\n</tool_response>",
            "<tool_response>\n[no frames from {start}s to {end}s]\n</tool_response>",
            "Answer now, with the letter of one option alone.",
            "Answer now, in this form: The event happens in 10.0 - 20.0 seconds."]


def protocol(texts, args, names=AGENT, general=False):
    """System.make. general: one system text for all splits."""
    texts = dict(zip(names, texts))
    if general:
        texts["grounding"] = texts["system"]
    first = partial(opening, texts=texts)
    if names == ONE_TURN:
        return Protocol(opening=first, schema=None, jpeg=QUALITY)
    return Protocol(opening=first, answer=partial(respond, texts=texts), schema=None, jpeg=QUALITY,
                    parse=lambda text, think_open=False: read_calls(text) or [],
                    force=lambda task: texts["span" if task["type"] == "grounding" else "letter"],
                    force_tokens=lambda task: 128 if task["type"] == "grounding" else 64)


def opening(task, num_frames, agent, subtitles, duration, texts):
    """Protocol.opening."""
    split, system = task.get("split"), texts["system"]
    if task["type"] == "grounding":
        split, system = "charades", texts.get("grounding", system)
    elif split not in SPLITS or split == "charades":
        split = "longvideobench"  # a question and options, in no special form
    if split == "videomme_wsub" and not subtitles:
        split = "videomme"
    text = fill_template(texts[split], task, duration, subtitles)
    if "path" in texts and "video path" not in text.lower():
        text += fill_template(texts["path"], task, duration)
    frames = {"type": "video", "video": task["video"], "frames": num_frames, "stamp": "none"}
    return [{"role": "system", "content": system},
            {"role": "user", "content": [frames, {"type": "text", "text": text}]}]


# ------------------------------------------------------------------------------------------------
# Calls


def tag_contents(text: str, tag: str) -> list[str]:
    """Contents of every closed <tag> of a text, also of those inside a thought."""
    bodies = []
    while text:
        body, closed, text = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
        if closed:
            bodies.append(body.strip())
    return bodies


def parse_seconds(value) -> float:
    """A time as the driver reads it: anything but a number, MM:SS or HH:MM:SS is 0."""
    try:
        if isinstance(value, str) and ":" in value:
            parts = [float(part) for part in value.split(":")]
            read = sum(part * 60**i for i, part in enumerate(reversed(parts)))
            read = read if len(parts) in (2, 3) else 0.0
        else:
            read = float(value)
    except (ValueError, TypeError):
        read = 0.0
    # No JSON holds NaN or infinity; a window beyond both ends is the same.
    return 0.0 if read != read else max(-1e9, min(read, 1e9))


def read_calls(text: str) -> list[rewards.ToolCall] | None:
    """Every call of a turn, JSON first; None if one makes the driver fail, which scores 0."""
    calls = []
    for body in tag_contents(text, "tool_call"):
        try:
            calls.append(json.loads(body))
        except (ValueError, RecursionError):
            continue  # broken JSON is no call
    for body in tag_contents(text, "tool_code"):
        match = re.match(r"crop_video\s*\((.*)\)", body, re.DOTALL)
        pairs = re.split(r",\s*(?=[a-zA-Z_]+\s*=)", match[1]) if match else []
        named = dict(map(str.strip, pair.split("=", 1)) for pair in pairs if "=" in pair)
        if named:
            calls.append({"arguments": {name: value.strip("\"'") for name, value in named.items()}})
    tool_calls = []
    for call in calls:
        try:
            arguments = call.get("arguments", {})  # the name of the tool does not matter
            start = parse_seconds(arguments.get("start_time", arguments.get("start", 0)))
            end = parse_seconds(arguments.get("end_time", arguments.get("end", start + 10)))
        except (AttributeError, OverflowError):  # no object, or a number beyond all floats
            return None if len(tool_calls) < 5 else tool_calls  # later calls are not looked at
        tool_calls.append(window_call("crop_video", start, end))
    return tool_calls


def final(turns, think_open=False):
    """System.final. The driver fails on calls of the last turn that it cannot read. It does not
    look for calls in the answer that it asks for at the end."""
    fails = turns and len(turns) <= TURNS and read_calls(turns[-1]) is None
    return None if fails else answers.answer_or_tail(turns, think_open)


async def respond(records, calls, episode, sampler, turn, texts):
    """Protocol.answer: a user message for every call that is run; the others get none."""
    reply, windows = Reply([]), await load_windows(records, calls, episode, sampler, turn)
    for call, record, (spec, frames) in zip(calls, records, windows):
        if record["status"] == "not_run":
            continue
        items, text = [], texts["failed"]
        if frames is not None:
            items, text = [add_video(reply, spec, frames, "none")], texts["reply"]
            text = text.replace("{frames}", str(len(frames.seconds)))
        start, end = call.arguments["start"], call.arguments["end"]
        text = text.replace("{start}", f"{start:.1f}").replace("{end}", f"{end:.1f}")
        if record["status"] != "video_error":  # whose reason says whether the machine failed
            record["summary"] = text
        # Trusted: the tags are real ones, and nothing between them is the model's.
        part = {"type": "text", "text": text, "trusted": True}
        reply.messages.append({"role": "user", "content": [*items, part]})
    return reply
