"""
evaluation/systems.py (tests/test_protocols.py): the systems of the paper's Table 1.

A system is an entry of `all_systems`: prompt texts, frames, how its calls are read, how they are
answered. evaluation/protocol_loop.py asks it behind an endpoint; ParaVT from a checkpoint goes
through rollout.py's own loop.

The texts are ours. --prompts FILE.json, {name: text}, replaces texts of an entry by those of its
publisher. Places that are filled: see `places`.

  paper*       as the paper's authors evaluate (ParaVT cf55249, paravt/eval), faults included: a
               video below 64 frames is asked about without any, options have two labels in
               Video-MME and stand twice in MLVU, a call inside a thought runs
  all others   as the system's own publisher evaluates it

Reads --prompts. Writes no file.
"""

import hashlib
import json
import os
import re
import string
from dataclasses import dataclass, field, replace
from functools import partial

import agent_tools
import chat
import launch
import rewards
import rollout
from evaluation import answers, frame_sources, protocol_loop
from evaluation.protocol_loop import (
    Call,
    answer_with_frames,
    answer_with_summaries,
    frames_item,
    load_windows,
    text_item,
)

ANSWER = "Write only the final answer between <answer> and </answer>."
THINK = ("Reason between <think> and </think>, then write only the final answer between <answer> "
         "and </answer>.")
QUESTION = "{subtitles}{question}\n{options}\n{style}"

# ------------------------------------------------------------------------------------------------
# What a system is


@dataclass
class System:
    """One system. The defaults are those of a system that answers in one turn."""

    texts: dict  # name -> text; "system" and "user" are the first messages
    settings: dict  # flags of its publisher's recipe: the defaults of a run
    reader: dict = field(default_factory=dict)  # fields of frame_sources.PublisherSource
    template: callable = None  # (texts, task, subtitles) -> user text; None: see user_text
    stamp: str = None  # before every frame, see chat.stamp_text
    label: str = "{}."  # of an option
    option_separator: str = "\n"  # options
    text_first: bool = False  # the question stands before the frames
    parse: callable = None  # (text, think_open) -> calls
    final: callable = answers.answer_or_tail  # (turns, think_open) -> answer to grade, or None
    answer: callable = None  # async (records, episode, worker, turn) -> messages, frames
    schema: callable = None  # () -> tools for the server's chat template
    force: callable = None  # (task) -> (text put before the last turn, its tokens)
    prefill: str = ""  # forced start of every turn
    stop: tuple = ()  # strings that end a turn
    jpeg_quality: int = 90  # quality of images

    def opening(self, task, num_frames, agent, subtitles, duration):
        """-> the first messages. The frames stand as an item without pixels."""
        if self.texts == {}:  # ParaVT, as it is trained
            return rollout.main_messages(
                task, num_frames, agent.tools, subtitles, agent.crop_response)
        filled = places(task, duration, subtitles, self.label, self.option_separator)
        template = (self.template or user_text)(self.texts, task, subtitles)
        if not filled["options"]:  # no empty line
            template = re.sub(r"\{options\}\n?", "", template)
        text = {"type": "text", "text": fill(template, filled)}
        frames = frames_item(task, self.stamp)
        content = [frames, text]
        if self.text_first:
            content = [text, frames]
        messages = [{"role": "user", "content": content}]
        system = self.texts.get("system")
        if task["type"] == "grounding":
            system = self.texts.get("system_grounding", system)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return messages


def user_text(texts, task, subtitles):
    if task["type"] == "grounding" and "grounding" in texts:
        return texts["grounding"]
    return texts["user"]


def fill(template, filled):
    """A template with its places filled; other braces stay. In one pass, because a question may
    hold "{options}"."""
    return re.sub(r"\{(\w+)\}", lambda match: filled.get(match[1], match[0]), template)


def places(task, duration=0.0, subtitles="", label="{}.", option_separator="\n"):
    """What stands at the places of a template."""
    labels = [label.format(letter) for letter in string.ascii_uppercase]
    lines = [" ".join(pair) for pair in zip(labels, task.get("options") or [])]
    published = [" ".join(pair) for pair in zip(labels, task.get("published_options") or [])]
    clock = chat.stamp_text(duration, 0, "clock")  # HH:MM:SS
    return {
        "question": task["question"],
        "event": task.get("event") or task["question"],
        "options": option_separator.join(lines),
        "style": rollout.ANSWER_STYLES[task["type"]],
        "duration": clock,
        "length": clock if duration >= 3600 else clock[3:],
        "video": os.path.basename(task["video"]),
        "subtitles": f"Subtitles:\n{subtitles}\n\n" if subtitles else "",
        # Of the paper's driver: question and options as published, options with two labels each.
        "spoken": subtitles,
        "published": task.get("published") or task["question"],
        "lines": "\n".join(published or lines),
        "labelled": "\n".join(published or [f"{line[:2]} {line}" for line in lines])}


def run(worker, tasks, system, frames=64, group=1):
    """rollout.run with this system: by training's own loop for ParaVT from a checkpoint."""
    play = partial(protocol_loop.play, system=system)
    if worker.codec:
        play = rollout.run_episode
    return rollout.run(worker, tasks, frames, group, play=play)


# ------------------------------------------------------------------------------------------------
# ParaVT, as it is trained


def trained_calls(text, think_open=False):
    calls = []
    for call in rewards.parse_tool_calls(text, agent_tools.TOOLS, think_open):
        window = call.arguments or {}
        calls.append(Call(call.name, window.get("start"), window.get("end"),
                          window.get("num_frames"), call.error))
    return calls


async def answer_as_trained(records, episode, worker, turn):
    answer = answer_with_summaries
    if worker.agent.crop_response == "frames":
        answer = answer_with_frames
    return await answer(records, episode, worker, turn)


def crop_schema():
    """Training's declaration of crop_video with the arguments of the authors' tool."""
    schema = rollout.tool_schema("frames")[:1]
    arguments = schema[0]["function"]["parameters"]
    arguments["required"] = ["video_path", "start_time", "end_time"]
    arguments["properties"] = {
        "video_path": {"type": "string", "description": "path of the video"},
        "start_time": arguments["properties"]["start_time"],
        "end_time": arguments["properties"]["end_time"]}
    return schema


# ------------------------------------------------------------------------------------------------
# As the paper's authors evaluate


PAPER_TURNS = {
    "videomme": "Question: {published}\nOptions:\n{labelled}\n",
    "videomme_wsub": "Subtitles:\n{spoken}\n\nQuestion: {published}\nOptions:\n{labelled}\n",
    "longvideobench": "Question: {published}\nOptions:\n{lines}\n",
    "lvbench": "{published}\n",
    "mlvu": "Question: {published}\nOptions:\n{lines}\n",
    "mmvu": "Question: {published}\nOptions:\n{lines}\n",
    "charades": 'When does this happen in the video: "{event}"? Reply in this form: The event '
                "happens in 10.0 - 20.0 seconds."}


def paper_system(system_text):
    """One turn. The driver reads 64 frames with qwen_vl_utils; a server reads the videos of
    Charades-STA itself."""
    return System(
        {"system": system_text, **PAPER_TURNS},
        {"frames": [64], "temperature": 0.0, "max_new_tokens": 2048, "max_model_len": 65536,
         "think_prefix": False, "max_turns": 0, "tools": ["off"], "min_pixels": 100352,
         "max_pixels": 25165824},
        reader={"grid": "qwen", "grounding_as_video": True, "short_is_blind": True,
                "written_lines": True, "crop_min_pixels": 784, "crop_pixels": 50176},
        template=paper_text, stamp="none", jpeg_quality=85)


def paper_agent(general=False):
    """Turns with crop_video, answered with frames. general: one system text for all splits."""
    one_turn = paper_system("")
    call = {"name": "crop_video",
            "arguments": {"video_path": "..", "start_time": 0, "end_time": 9}}
    rules = rollout.system_prompt(True, "frames").replace(", each after its time", "")
    text = (f"{rules}\n<tools>\n{json.dumps(crop_schema()[0])}\n</tools>\n"
            "Write each call, and several to see several windows, as\n"
            f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    letter = "Reply with the letter of one option."
    texts = {name: turn + letter for name, turn in PAPER_TURNS.items()}
    texts |= {"charades": PAPER_TURNS["charades"], "system": text,
              "path": " The video path for this video is: {video}",
              "reply": "{frames} frames from {start}s to {end}s.",
              "failed": "[no frames from {start}s to {end}s]",
              "letter": "Answer now, with the letter of one option alone.",
              "span": "Answer now, in this form: The event happens in 10.0 - 20.0 seconds."}
    if not general:
        texts["system_grounding"] = text
    settings = {"max_turns": 3, "tools": ["on"], "max_parallel": 5}
    return replace(one_turn, texts=texts, settings={**one_turn.settings, **settings},
                   parse=paper_calls, answer=partial(paper_answer, texts=texts),
                   force=partial(paper_force, texts))


def paper_text(texts, task, subtitles):
    split = task.get("split")
    if task["type"] == "grounding":
        split = "charades"
    elif split not in PAPER_TURNS or split == "charades":
        split = "longvideobench"  # a question and options, in no special form
    elif split == "videomme_wsub" and not subtitles:
        split = "videomme"
    text = texts[split]
    if "path" in texts and "video path" not in (text + task["question"]).lower():
        text += texts["path"]
    return text


def paper_force(texts, task):
    if task["type"] == "grounding":
        return texts["span"], 128
    return texts["letter"], 64


def paper_calls(text, think_open=False):
    """Every call of a turn, also inside a thought: JSON first, then code."""
    windows = []  # arguments of each call
    for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL):
        try:
            windows.append(json.loads(body)["arguments"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # broken JSON is no call
    for body in re.findall(r"<tool_code>\s*crop_video\s*\((.*?)\)\s*</tool_code>", text, re.DOTALL):
        pairs = [pair.split("=", 1) for pair in re.split(r",\s*(?=[a-zA-Z_]+\s*=)", body)]
        named = {pair[0].strip(): pair[1].strip(" \"'") for pair in pairs if len(pair) == 2}
        if named:
            windows.append(named)
    calls = []
    for window in windows:
        if isinstance(window, dict):
            start = paper_seconds(window.get("start_time", window.get("start", 0)))
            end = paper_seconds(window.get("end_time", window.get("end", start + 10)))
            calls.append(Call("crop_video", start, end))
    return calls


def paper_seconds(value):
    """A time as the driver reads it: anything but a number, MM:SS or HH:MM:SS is 0."""
    seconds = 0.0
    try:
        for part in str(value).split(":"):
            seconds = 60 * seconds + float(part)
    except ValueError:
        return 0.0
    if not abs(seconds) < 1e9:  # NaN fails this
        return 0.0
    return seconds


async def paper_answer(records, episode, worker, turn, texts):
    """A user message for each call that is run."""
    messages, new_frames = [], []
    # The texts name the times as they were asked for, before they are cut.
    times = [{"start": f"{r['start']:.1f}", "end": f"{r['end']:.1f}"} for r in records]
    windows = await load_windows(records, episode, worker)
    for filled, record, frames in zip(times, records, windows):
        if record["status"] == "not_run":
            continue
        content, text = [], texts["failed"]
        if frames is not None:
            content, text = [frames_item(episode.task, "none")], texts["reply"]
            filled["frames"] = str(len(frames.seconds))
            new_frames.append(frames)
        text = f"<tool_response>\n{fill(text, filled)}\n</tool_response>"
        if record["status"] != "video_error":  # whose reason stays
            record["summary"] = text
        messages.append({"role": "user", "content": [*content, text_item(text)]})
    return messages, new_frames


# ------------------------------------------------------------------------------------------------
# LongVT: crop_video as a declared tool


LONGVT_REPLY = "The frames of the window are shown above. Go on with your analysis."
LONGVT = ("Reason between <think> and </think>. Call crop_video when you need to see a part of the "
          "video closely; when you know the answer, write it between <answer> and </answer>.")


# ------------------------------------------------------------------------------------------------
# VideoZoomer: one zoom a turn, answered by stamped frames


VIDEOZOOMER = (
    "You watch a video through a few frames, each after a tag with its number and time. To see a "
    "part of it at a higher frame rate, write\n"
    '<video_zoom> {"segment": [start, end], "fps": frames per second} </video_zoom>\n'
    "once in a turn, with the times in seconds and at most 16 frames in all. Think between <think> "
    "and </think> first. When you know the answer, write <answer> \\boxed{answer} </answer>.")


def zoom_call(text, think_open=False):
    """The last closed <video_zoom> of a turn -> [one call] or []. Its frames are fps x seconds."""
    text = rewards.without_thoughts(rewards.with_forced_start(text, think_open))
    head, closed, _ = text.rpartition("</video_zoom>")
    _, opened, body = head.rpartition("<video_zoom>")
    if not (opened and closed):
        return []
    start = end = frames = error = None
    try:
        zoom = json.loads(body[:1000])
        start, end = map(rewards.to_seconds, zoom["segment"])
        frames = max(0, int(rewards.to_seconds(zoom["fps"]) * (end - start)))
        if not 1 <= frames <= 16:
            error = f"the segment holds {frames} frames at this fps, and 1 to 16 are allowed"
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        error = 'expected {"segment": [start, end], "fps": n}'
    return [Call("video_zoom", start, end, frames, error)]


async def zoom_answer(records, episode, worker, turn):
    """One user message: the frames inside tool response tags, or the error."""
    [frames] = await load_windows(records, episode, worker)
    [record], new_frames = records, []
    if frames is None:
        content = [text_item(f"<tool_response>\n{record['summary']}\n</tool_response>"),
                   text_item("\nThink about what went wrong, then go on.")]
    else:
        record["summary"] = "The frames of the segment:"
        content = [text_item("<tool_response>\nThe frames of the segment:\n"),
                   frames_item(episode.task, "frame"),
                   text_item("\n</tool_response>\nGo on thinking, then zoom again or answer.")]
        new_frames = [frames]
    if turn == worker.agent.max_turns - 1:
        content.append(text_item(" Do not zoom again: answer now."))
    return [{"role": "user", "content": content}], new_frames


# ------------------------------------------------------------------------------------------------
# Conan: eight new frames a round, from the clips that the model names


CONAN = ("Rate between <score> and </score> how well the frames so far answer the question, "
         "reason between <think> and </think>, name the clips you want to see between <clip> and "
         "</clip> as HH:MM:SS-HH:MM:SS, separated by commas, or leave it empty when you need none, "
         "and write your answer between <answer> and </answer>.")
CONAN_QUESTION = "Question: {question}\nOptions: {options}"
CONAN_TEXTS = {
    "user": f"{{subtitles}}{CONAN_QUESTION}\nThe frames above carry their times. {CONAN}",
    "round": f"These are frames of the clips you asked for. {CONAN} {CONAN_QUESTION}",
    "last": "These are the last frames. Reason between <think> and </think> and write your answer "
            f"between <answer> and </answer>. {CONAN_QUESTION}"}


def conan_text(texts, task, subtitles="", name="user"):
    """Its loaders write the options of Video-MME in one line, others on a line each, and none for
    LVBench, whose question holds them."""
    text = texts[name]
    if task.get("split") == "lvbench":
        text = text.replace("{question}", "{published}")
    if task.get("split") == "lvbench" or not task.get("options"):
        text = text.replace("\nOptions: {options}", "")
    if task.get("split") in ("longvideobench", "mlvu"):
        text = text.replace("{options}", "{lines}\n")
    return text


def conan_calls(text, think_open=False):
    """The first <clip> of a turn -> a call for every HH:MM:SS-HH:MM:SS that runs forward."""
    body, closed, _ = text.partition("<clip>")[2].partition("</clip>")
    if not closed:
        return []
    calls = []
    for window in re.findall(r"(\d{1,2}:\d\d:\d\d)\s*-\s*(\d{1,2}:\d\d:\d\d)", body[:1000])[:16]:
        start, end = map(rewards.to_seconds, window)
        if start < end:
            calls.append(Call("clip", start, end))
    return calls


async def conan_answer(records, episode, worker, turn, texts):
    """The next eight frames, none twice, and the text of the round."""
    task = episode.task
    name = "round"
    if turn == worker.agent.max_turns - 1:
        name = "last"
    text = fill(conan_text(texts, task, name=name), places(task, option_separator=", "))
    starts = await worker.pump.load(frame_sources.frame_starts, worker.source, task["video"])
    old = episode.notes.setdefault("shown", set(map(float, episode.context.frames[0].seconds)))
    seconds = conan_seconds(records, [start for start in starts if start not in old])
    old.update(seconds)
    if not seconds:  # all frames have been seen
        return [{"role": "user", "content": text}], []
    spec = {"video": task["video"], "times": seconds}
    frames = await worker.pump.load(worker.source.load, spec)
    content = [frames_item(task, "clock"), text_item(text)]
    return [{"role": "user", "content": content}], [frames]


def conan_seconds(records, new_starts, count=8):
    """
    Seconds of the next frames, in order: `count`, or all that are left. Fills the records.

    Every clip gives one frame, and the rest in proportion to its new frames, both ends among them.
    If the clips have too few, the whole video gives the rest.
    """
    clips = []
    for record in records:
        clips.append([s for s in new_starts if record["start"] <= s <= record["end"]])
    total, spare = sum(map(len, clips)), max(0, count - len(clips))
    shares = [spare * len(clip) // max(1, total) for clip in clips]
    if total:  # the largest clips give the remainder after rounding
        largest = sorted(range(len(clips)), key=lambda index: -len(clips[index]))
        for index in largest[: spare - sum(shares)]:
            shares[index] += 1
    chosen = set()
    for record, clip, share in zip(records, clips, shares):
        seconds = ends_and_between(clip, share + 1)
        chosen.update(seconds)
        record.update(status="ok", summary=f"{len(seconds)} frames")
        if not seconds:
            record.update(status="error", summary="error: nothing new in this clip")
    others = [s for s in new_starts if s not in chosen]
    chosen.update(ends_and_between(others, count - len(chosen)))
    return ends_and_between(sorted(chosen), count)


def ends_and_between(items, n):
    """n of the items, the first and the last among them; all if there are fewer."""
    if not 1 < n < len(items):
        return items[: max(n, 0)]
    step = (len(items) - 1) / (n - 1)
    return [items[round(i * step)] for i in range(n)]


# ------------------------------------------------------------------------------------------------
# SAGE: a JSON object in every turn, one tool at a time. The paper's driver has a place for its
# prompt and ships without the text, so this entry is its publisher's prompt in that driver: 64
# frames, one growing chat, a forced answer. Its own code has 128 frames, then up to ten steps of
# text alone. Two of its six tools run: they show the frames of their window. The others, which need
# the web, the speech or another model, answer "not available".


SAGE = (
    "You find out what a question about a video needs. Look at the video, then either answer or "
    "recommend one of the tools for the next step, with its arguments. Reply with one JSON object "
    "between <json> and </json>:\n"
    '{"video_context": what the video shows, "query_intent": what is asked, "final_answer": the '
    'answer, or null as long as it is not known, "recommended_tools": {"needed": true or false, '
    '"why_no_tool": if none is needed, "tool_calls": [{"rationale": why, "name": the tool, '
    '"arguments": {..}}]}}\nThe tools:\n<<<tools>>>')

# name -> (arguments, description). The names and arguments are the publisher's.
SAGE_TOOLS = {
    "extract_parts_from_timestamp": (
        "video_path timestamp_start timestamp_end extract_type",
        "Frames of a window of at most 5 minutes. Times are HH:MM:SS."),
    "identify_timestamps_visually": (
        "video_path event timestamp_start timestamp_end",
        "Looks for an event in a window of at most 10 minutes. Times are HH:MM:SS."),
    "perform_reasoning": ("query media_paths", "Answers a question about frames."),
    "verbal_transcript": ("video_path timestamp_start timestamp_end", "The speech of a window."),
    "unified_web_search": ("query search_type num_results", "Searches the web."),
    "parse_web_data": ("website_url max_content_length", "Reads a page of the web.")}


def sage_agent():
    system = paper_agent()
    lines = ["<tools>"]
    for name, (arguments, description) in SAGE_TOOLS.items():
        properties = {argument: {"type": "string"} for argument in arguments.split()}
        function = {"name": name, "description": description,
                    "parameters": {"type": "object", "properties": properties}}
        lines.append(json.dumps({"type": "function", "function": function}))
    text = SAGE.replace("<<<tools>>>", "\n".join([*lines, "</tools>"]))
    texts = {**system.texts, "system": text, "system_grounding": text,
             "path": "\nVideo Path: {video} of duration {duration}."}
    return replace(system, texts=texts, parse=sage_calls, answer=sage_answer, final=sage_final,
                   force=partial(paper_force, texts))


def sage_object(text):
    """The last JSON object of a turn: in <json> tags, in a fence or bare. {} if there is none."""
    blocks = re.findall(r"<json>(.*?)(?:</json>|$)", text, re.DOTALL)
    blocks = blocks or re.findall(r"```json(.*?)(?:```|$)", text, re.DOTALL) or [text]
    _, brace, body = blocks[-1].partition("{")
    body = re.sub(r",\s*([}\]])", r"\1", brace + body)  # a trailing comma is the most frequent slip
    try:
        # Text may follow the object.
        return json.JSONDecoder(strict=False).raw_decode(body)[0]
    except (ValueError, RecursionError):
        return {}


def sage_calls(text, think_open=False):
    """The first tool that a turn recommends -> [one call]; [] if it answers."""
    try:
        reply = sage_object(text)
        recommended = reply["recommended_tools"]
        answered = reply.get("answerable", {}).get("verdict") and reply.get("final_answer")
        if answered or not recommended["needed"]:
            return []
        call = recommended["tool_calls"][0]
        name, arguments = call.get("name"), call.get("arguments")
    except (TypeError, KeyError, IndexError, AttributeError):
        return []  # of another form
    if name not in ("extract_parts_from_timestamp", "identify_timestamps_visually"):
        return [Call(str(name), error="not available")]
    try:
        start = rewards.to_seconds(arguments["timestamp_start"])
        end = rewards.to_seconds(arguments["timestamp_end"])
        if start < end:
            return [Call(name, start, end)]
    except (TypeError, KeyError, ValueError):
        pass  # not of this form
    error = "timestamp_start and timestamp_end must be HH:MM:SS, the first before the last"
    return [Call(name, error=error)]


async def sage_answer(records, episode, worker, turn):
    """One user message: the frames of the window, or why there are none."""
    [frames] = await load_windows(records, episode, worker)
    [record], content, new_frames = records, [], []
    record["summary"] = record["summary"].removeprefix("error: ")
    if frames is not None:
        window = f"from {record['start']:.1f}s to {record['end']:.1f}s"
        record["summary"] = f"{len(frames.seconds)} frames {window}, shown above"
        content, new_frames = [frames_item(episode.task, "none")], [frames]
    text = (f"{record['name']} output: {record['summary']}\nCan the query be answered now? Reply "
            'in the same form, with "answerable": {"verdict": true or false, "reasoning": why}.')
    return [{"role": "user", "content": [*content, text_item(text)]}], new_frames


def sage_final(turns, think_open=False):
    """System.final: the final_answer of the last turn, or its text if it holds no JSON."""
    reply = sage_object(turns[-1]) if turns else {}
    if not reply:
        return answers.answer_or_tail(turns, think_open)
    answer = reply.get("final_answer")
    if answer is not None:
        answer = str(answer)
    return answer


# ------------------------------------------------------------------------------------------------
# The systems


ONE_TURN = {"max_turns": 0, "think_prefix": False, "tools": ["off"]}
R1 = {**ONE_TURN, "max_pixels": 256 * 784, "max_new_tokens": 1024}
# 2 frames a second, 768 at most, with 3584 x 28 x 28 pixels in all
MANY = {**ONE_TURN, "overview_fps": 2.0, "frames": [768], "min_pixels": 16 * 784,
        "max_pixels": 768 * 784, "total_pixels": 3584 * 784}
QWEN = {"grid": "qwen"}  # publishers that read videos with a copy of qwen_vl_utils


def wrapped_text(header, texts, task, subtitles):
    """Video-R1, VideoRFT: question, header, options, an empty line, and how to answer."""
    text = texts["user"]
    if task.get("options"):
        text = text.replace("{question}", f"{{question}}{header}{{options}}\n")
    return text + texts.get(task["type"], " {style}")


def all_systems():
    """name -> System."""
    wrapped = {"user": f"{{subtitles}}{{question}}\n{THINK}",
               "mcq": " The final answer is the letter of one option.",
               "open": " The final answer is a text."}
    return {
        # ParaVT as it is trained. With --ckpt this is rollout.py's own loop.
        "paravt": System({}, {}, parse=trained_calls, answer=answer_as_trained,
                         schema=rollout.tool_schema),
        # The paper's Table 1: ParaVT-8B; Qwen3-VL-8B, Conan-7B; Qwen2.5-VL-7B; reasoning baselines
        "paper": paper_agent(),
        "paper-general": paper_agent(general=True),
        "paper-direct": paper_system(ANSWER),
        "paper-reasoning": paper_system(THINK),
        # Any model of one turn: GPT-4o, Gemini 1.5 Pro
        "direct": System({"system": ANSWER, "user": QUESTION}, ONE_TURN),
        # Video-Thinker-7B, whose code is not published
        "reasoning": System({"system": THINK, "user": QUESTION}, R1),
        # Qwen3-VL-8B as its publisher evaluates it; here no judge model reads the answer
        "qwen3-vl": System(
            {"user": "{subtitles}{style}\nQuestion: {question}\n{options}\nAnswer:"},
            {**ONE_TURN, "overview_fps": 2.0, "frames": [512], "min_pixels": 3584,
             "max_pixels": 401408, "total_pixels": 19267584, "max_new_tokens": 32768,
             "temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5,
             "max_model_len": 98304},
            reader={**QWEN, "patch": 16}),
        # Greedy here; theirs samples at temperature 0.1 with top-p 0.001.
        "video-r1": System(
            wrapped, {**R1, "overview_fps": 2.0, "frames": [64], "min_pixels": 128 * 784},
            reader=QWEN, template=partial(wrapped_text, "Options:\n")),
        "videorft": System(
            wrapped, {**R1, "frames": [32], "min_pixels": 256 * 784},
            reader=QWEN, template=partial(wrapped_text, "\n")),
        "videochat-r1": System(
            {"user": f"{QUESTION}\n{THINK}"}, MANY, reader=QWEN, text_first=True, label="({})"),
        # A letter is read from the answer; theirs is sampled once more after a forced start.
        "time-r1": System(
            {"system": "You are a helpful assistant.", "user": f"{QUESTION}\n{ANSWER}",
             "grounding": f'{{subtitles}}When in the video is the event "{{event}}"? {{style}} '
                          f"{ANSWER}"},
            {**MANY, "max_new_tokens": 1024}, reader=QWEN, label="({})",
            prefill="<think>\n</think>\n"),
        "rewatch-r1": System(
            {"user": f"{QUESTION}\nThe video runs from 00:00 to {{length}}. You may note what you "
                     "look at between <action> and </action> and what you see between "
                     f"<observation> and </observation>. {THINK}"},
            {**ONE_TURN, "overview_fps": 2.0, "frames": [192], "max_pixels": 128 * 784}),
        # LongVT-RFT-7B; 49,152 new tokens, as its harness has
        "longvt": System(
            {"user": f"{QUESTION} {LONGVT} The Video path for this video is: {{video}}"},
            {"max_turns": 5, "think_prefix": False, "overview_fps": 1.0, "frames": [512],
             "min_pixels": 784, "max_pixels": 50176, "max_new_tokens": 49152,
             "max_model_len": 131072, "max_parallel": 5},
            reader=QWEN, stamp="none", parse=trained_calls, answer=partial(
                answer_with_frames, text=LONGVT_REPLY, stamp="none", max_frames=128),
            schema=crop_schema),
        # Frames lie at the centres of equal segments; theirs from the first frame on, evenly.
        "videozoomer": System(
            {"system": VIDEOZOOMER, "user": QUESTION},
            {"max_turns": 4, "max_parallel": 1, "think_prefix": False, "overview_fps": 0.5,
             "frames": [64], "max_new_tokens": 4096, "temperature": 1.0, "min_pixels": 25088,
             "max_pixels": 100352},
            stamp="frame", parse=zoom_call, answer=zoom_answer,
            stop=("</video_zoom>",)),
        # Frames lie at the centres of equal segments; theirs at their starts.
        "conan": System(
            CONAN_TEXTS,
            {"max_turns": 2, "max_parallel": 1, "think_prefix": False, "frames": [16],
             "max_pixels": 448 * 448, "temperature": 1.0, "max_new_tokens": 4000},
            template=conan_text, stamp="clock", option_separator=", ", parse=conan_calls,
            answer=partial(conan_answer, texts=CONAN_TEXTS)),
        # SAGE-7B
        "sage": sage_agent()}


# ------------------------------------------------------------------------------------------------
# Flags and frames

# Settings of a system that are no flags, with the values of those that leave them out:
# overview_fps: frames per second of video, at most --frames; 0 = always --frames. pixels: of a
# frame after resizing; total_pixels: of the overview's frames together, 0 = the reader's own bound.
READER_SETTINGS = {"overview_fps": 0.0, "min_pixels": 1024, "max_pixels": 50176, "total_pixels": 0}


def add_arguments(parser):
    add = parser.add_argument_group("protocol of the system").add_argument
    add("--protocol", choices=list(all_systems()), default="paravt",
        help="of evaluation/systems.py; its own frames, lengths and rounds become the defaults")
    add("--prompts", metavar="FILE.json", help="{name: text} in place of texts of the protocol")


def make_system(args):
    """Flags -> (System, hash of its texts). Raises UserError for a text that is not known, and for
    one that leaves the question out."""
    system = all_systems()[args.protocol]
    if "on" in args.tools and system.parse is None:
        raise launch.UserError(f"--protocol {args.protocol} has no tools: leave --tools out")
    texts = {}
    if args.prompts:
        try:
            texts = launch.parse_json(launch.read_file(args.prompts))
        except (OSError, ValueError) as error:
            raise launch.UserError(f"--prompts {args.prompts}: {error}") from None
    for name, text in texts.items():
        ours = system.texts.get(name, "")
        if not ours or asks(ours) and not asks(text):
            raise launch.UserError(
                f"--prompts {args.prompts}: {name!r} is no text of --protocol {args.protocol} "
                f"({', '.join(system.texts)}), or lacks the place of the question")
    system.texts.update(texts)
    return system, hashlib.sha256(json.dumps(system.texts).encode()).hexdigest()[:16]


def asks(template):
    """Whether a template has a place for the question."""
    return re.search(r"\{(question|published|event)\}", template)


def source_of(args, root, cache, subtitles):
    """Flags, folder of the videos, FrameCache, see VideoSource.subtitles -> a source that reads as
    the system does."""
    return frame_sources.PublisherSource(
        root, cache, args.min_pixels, args.max_pixels, subtitles=subtitles, fps=args.overview_fps,
        total_pixels=args.total_pixels, **all_systems()[args.protocol].reader)
