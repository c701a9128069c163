"""
evaluation/systems.py (tests/test_protocols.py): the protocols of the other systems in the paper's
Table 1.

A system is an entry of `all_systems` and the functions that the entry names. The paper's own
protocol lies in evaluation/paper.py, and evaluation/protocol_loop.py plays all of them.

Departs from the publishers' code in wording, because the prompts here are ours. --texts-of takes
the publishers' own from a checkout of their code; --prompt-file reads single files and never runs
code.

Reads prompt files. Used by eval.py:
    python eval.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M --protocol conan ..
"""

import ast
import hashlib
import json
import os
import re
import string
from dataclasses import dataclass, field, replace
from functools import partial

import launch
import rewards
import rollout
import video
from evaluation import answers, frame_sources, paper, paper_texts
from evaluation.protocol_loop import (
    PLACES,
    QUESTION,
    Protocol,
    Reply,
    add_video,
    fill_template,
    load_windows,
    opening,
    tagged,
    tool_replies,
    trained_reply,
    window_call,
)
from plumbing import hub

NAMED_PATH = "The video path for this video is: {video}"
ANSWER = "Write only the final answer between <answer> and </answer>."
THINK = ("Reason between <think> and </think>, then write only the final answer between <answer> "
         "and </answer>.")
REWATCH = (f"{QUESTION}\nThe video runs from 00:00 to {{length}}. You may note what you look at "
           "between <action> and </action> and what you see between <observation> and "
           "</observation>. " + THINK)
LONGVT = ("Reason between <think> and </think>. Call crop_video when you need to see a part of the "
          "video closely; when you know the answer, write it between <answer> and </answer>.")
VIDEOZOOMER = (
    "You watch a video through a few frames, each after a tag with its number and time. To see a "
    "part of it at a higher frame rate, write\n"
    '<video_zoom> {"segment": [start, end], "fps": frames per second} </video_zoom>\n'
    "once in a turn, with the times in seconds and at most 16 frames in all. Think between <think> "
    "and </think> first. When you know the answer, write <answer> \\boxed{answer} </answer>.")

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
SAGE_DEPARTURES = (
    "two of its six tools run: extract_parts_from_timestamp and identify_timestamps_visually show "
    "the frames of their window",
    "search, pages of the web and speech answer \"not available\"",
    "perform_reasoning has no model of its own: the frames stay in the chat, and the model reasons "
    "over them itself",
    "64 frames and one growing chat, as the paper's driver asks; its own has 128 frames, then "
    "steps of text alone, 10 at most",
    "answers are read by our rules, theirs by a judge model")

# ------------------------------------------------------------------------------------------------
# The systems


@dataclass
class System:
    """One system: prompts, protocol, flags, and the answer that is graded."""

    files: str  # files of the publisher's release, for --prompt-file
    texts: list  # our wording of the same, in the same order
    make: callable  # (texts, args) -> Protocol
    native: dict  # flags of the publisher's recipe: the defaults of a run
    final: callable = answers.answer_or_tail  # (turns, think_open) -> answer to grade, or None
    # args -> (windows beside the overview, frames of each)
    crop_frames_in_context: callable = lambda args: (0, 0)
    departures: tuple = ()  # known differences from the publisher's own evaluation, in words
    reader: dict = field(default_factory=dict)  # fields of frame_sources.PublisherSource


def all_systems():
    """name -> System."""
    single = {"max_turns": 0, "think_prefix": False, "tools": ["off"]}
    rounds = {"think_prefix": False, "max_parallel": 1}
    # 2 frames a second, 768 at most, with 3584 x 28 x 28 pixels in all.
    many = {**paced_overview(2.0, 768), "min_pixels": 16 * 784, "max_pixels": 768 * 784,
            "total_pixels": 3584 * 784}
    reasoning = {**single, "max_pixels": 256 * 784, "max_new_tokens": 1024}
    conan = {**rounds, "max_turns": 2, "frames": [16], "max_pixels": 448 * 448}
    longvt = {**rounds, "max_turns": 5, **paced_overview(1.0, 512), "min_pixels": 784,
              "max_pixels": 50176, "max_new_tokens": 49152, "max_model_len": 131072,
              "stamps": False}
    zoomer = {**rounds, "max_turns": 4, **paced_overview(0.5, 64), "max_new_tokens": 4096,
              "temperature": 1.0, "min_pixels": 25088, "max_pixels": 100352}
    qwen3 = {**single, **paced_overview(2.0, 512), "min_pixels": 3584, "max_pixels": 401408,
             "total_pixels": 19267584, "max_new_tokens": 32768, "temperature": 0.7, "top_p": 0.8,
             "top_k": 20, "presence_penalty": 1.5, "max_model_len": 98304}
    stamps = "each frame is an image after its time, theirs are one video"
    replies = "the answers to calls are in our words"
    greedy = "greedy here, theirs samples at temperature 0.1 with top-p 0.001"
    raised = "frames and pixels are those of their README, their file holds those of training"
    schema = "the description of the tool is in our words"
    raw = "frames are JPEGs of quality 90, theirs are not"
    sides = "sides of frames are multiples of 32, theirs keep the shape of the video"
    parsed = "calls are read from the text by our parser, theirs is that of vLLM (hermes)"
    demo = ("49,152 new tokens, as their harness has for Video-MME and Charades-STA; their demo "
            "script, which is repeated here, has 4,096",
            "a window that ends after the video is cut, as in their demo; their harness refuses it")
    worded = "the words of the question lie in their data files, here they are ours"
    r1 = {"departures": (stamps, greedy, raised)}
    qwen = {"overview_grid": "qwen"}  # they read videos with a copy of qwen_vl_utils
    paper_fields = {"final": paper.final, "crop_frames_in_context": crops_in_context,
                    "reader": paper.READER, "departures": ("answers are read by our rules",)}
    tool, files = crop_schema(frames=True, path=True)[0], "--texts-of takes them of the driver"
    agent = paper.our_texts(paravt_text(True, "frames", timed=False), tool), paper.protocol
    one_turn = {"native": paper.settings(True), **paper_fields, "final": answers.answer_or_tail}
    single_turn = partial(paper.protocol, names=paper.ONE_TURN)
    as_system = partial(one_turn_protocol, role="system")
    return {
        # Ours, as trained
        "paravt": System("a system text", [rollout.system_prompt()], paravt_protocol, {}),
        # The paper's Table 1: ParaVT-8B; Qwen3-VL-8B and Conan-7B; Qwen2.5-VL-7B; the others
        "paper": System(files, *agent, paper.settings(False), **paper_fields),
        "paper-general": System(files, agent[0], partial(paper.protocol, general=True),
                                paper.settings(False), **paper_fields),
        "paper-direct": System(files, paper.our_texts(ANSWER), single_turn, **one_turn),
        "paper-reasoning": System(files, paper.our_texts(THINK), single_turn, **one_turn),
        # Any model of one turn: GPT-4o, Gemini 1.5 Pro
        "direct": System("a system text", [ANSWER], as_system, single),
        # Qwen3-VL-8B as in the publisher's evaluation: no tools, no system text
        "qwen3-vl": System("a text made from the user turn of evaluation/VideoMME/dataset_utils.py",
                           ["{subtitles}{style}\nQuestion: {question}\n{options}\nAnswer:"],
                           one_turn_protocol, qwen3, reader={**qwen, "patch": 16},
                           departures=(stamps, raw, "their judge model reads the answer, here a "
                                       "rule")),
        "video-r1": System(wrapped_files("Video-R1"), wrapped_texts(),
                           partial(wrapped_protocol, header="Options:\n"),
                           {**reasoning, **paced_overview(2.0, 64), "min_pixels": 128 * 784},
                           reader=qwen, **r1),
        "videorft": System(wrapped_files("VideoRFT"), wrapped_texts(), wrapped_protocol,
                           {**reasoning, "frames": [32], "min_pixels": 256 * 784},
                           reader=qwen, **r1),
        # Video-Thinker-7B, whose code is not published
        "reasoning": System("a system text", [THINK], as_system, reasoning),
        "videochat-r1": System("src_eval/eval_prompts.py:QA_THINK and :GROUND_TEMPLATE_THINK, "
                               "filled at [QUESTION], [OPTION] and [EVENT]",
                               [f"{QUESTION}\n{THINK}", f"{QUESTION}\n{THINK}"],
                               videochat_protocol, {**single, **many}, reader=qwen,
                               departures=(stamps, raw)),
        "time-r1": System("src/vllm_inference/data/config.py:DEFAULT_MCQ_PROMPT[r1] and "
                          ":DEFAULT_TG_PROMPT[r1], filled at {}",
                          [f"{QUESTION}\n{ANSWER}",
                           f'{{subtitles}}When in the video is the event "{{event}}"? {{style}} '
                           f"{ANSWER}"],
                          time_r1_protocol, {**single, **many, "max_new_tokens": 1024},
                          reader=qwen, departures=(
                              stamps, raw, "a letter is read from the answer, theirs is "
                              "sampled once more after a forced start")),
        "rewatch-r1": System("a text made from the model card's prompt", [REWATCH],
                             one_turn_protocol,
                             {**single, **paced_overview(2.0, 192), "max_pixels": 128 * 784},
                             departures=(stamps,)),
        "conan": System("texts made from Conan-Eval/prompt_temp.py: first round, further round, "
                        "last round with options; the same three without", conan_texts(),
                        conan_protocol, {**conan, "temperature": 1.0, "max_new_tokens": 4000},
                        crop_frames_in_context=lambda args: (args.max_turns, 8), departures=(
                            "frames lie at the centres of equal segments, theirs at their starts",
                            "frames have at most 448 x 448 pixels, theirs 448 on the longer side",
                            "frames that were shown are known exactly, theirs by rounded "
                            "times", "no frame is shown twice if a video has too few", raw)),
        # LongVT-RFT-7B
        "longvt": System("TOOL_PROMPT of lmms_eval_tasks/*/utils.py, as a text", [LONGVT],
                         longvt_protocol, {**longvt, "sub_frames": 128, "max_parallel": 5},
                         crop_frames_in_context=crops_in_context, reader=qwen, departures=(
                             replies, schema, raw, parsed, *demo)),
        "videozoomer": System("a text made from data.system_prompt of scripts/eval_video.sh",
                              [VIDEOZOOMER], videozoomer_protocol, zoomer,
                              reader={"overview_grid": "start"},
                              crop_frames_in_context=lambda args: (args.max_turns, 16),
                              departures=(worded, replies, raw, sides, "no frame of a call is "
                                          "shown twice, theirs repeats some")),
        # SAGE-7B. The paper's driver has a place for its prompt and ships without the text.
        "sage": System("sage/prompts/sage/context_vlm.txt, filled at <<<tools>>>", [SAGE],
                       sage_protocol, paper.settings(False), **{
                           **paper_fields, "final": sage_final,
                           "crop_frames_in_context": lambda args: (args.max_turns, args.sub_frames),
                           "departures": SAGE_DEPARTURES})}


def rows_of_table_1():
    """Row of the paper's Table 1 -> the protocol that asks this system natively."""
    return {
        "GPT-4o": "direct", "Gemini 1.5 Pro": "direct", "Qwen2.5-VL-7B": "direct",
        "Video-R1-7B": "video-r1", "VideoChat-R1-7B": "videochat-r1", "VideoRFT-7B": "videorft",
        "Time-R1-7B": "time-r1", "ReWatch-R1-7B": "rewatch-r1", "Video-Thinker-7B": "reasoning",
        "Qwen3-VL-8B": "qwen3-vl", "Conan-7B": "conan", "LongVT-RFT-7B": "longvt",
        "SAGE-7B": "sage", "VideoZoomer-7B": "videozoomer", "ParaVT-8B": "paravt"}


def paced_overview(fps, max_frames):
    """Flags of an overview that grows with the video: fps a second, `max_frames` at most."""
    return {"overview_fps": fps, "frames": [max_frames]}


def add_arguments(parser):
    """Flags of protocols."""
    add = parser.add_argument_group("protocol of the system").add_argument
    add("--protocol", choices=list(all_systems()), default="paravt",
        help="the system's own frames, lengths and rounds become the defaults")
    add("--texts-of", metavar="CHECKOUT",
        help="paper*: take the authors' own prompt texts from this checkout of their code, which "
        "is run in a child process; default: our wording")
    add("--prompt-file", nargs="+", default=[], metavar="FILE[.py:NAME]",
        help="the publisher's own texts from files, which are not run (places: --protocols)")
    add = parser.add_setting
    add("user_file", "FILE[.py:NAME]: the user turn, if --prompt-file is the system text", type=str)
    add("stamps", "a frame follows its time; protocols with other stamps keep theirs", True)
    add("overview_fps", "frames per second of video, at most --frames; 0 = always --frames", 0.0)
    add("min_pixels", "of a frame after resizing", rollout.VideoSource.min_pixels)
    add("total_pixels", "of the overview's frames together, each within its bounds; 0 = any", 0)
    add("sub_fps", "frames per second of a window", 1.0)
    add("sub_frames", "frames of a window, at most", 16)
    add("dispatch", "turns: a turn ends after one call", "parallel", choices=["parallel", "turns"])


def describe_all(flags):
    """Flags of protocols -> text for --protocols: the prompts of each."""
    places = " ".join(f"{{{name}}}" for name in PLACES)
    head = (f"A text of the user turn is filled at {places}. Other braces stay; a publisher's own "
            "places are listed with its texts.")
    return "\n\n".join([head, *map(describe_one, flags)])


def describe_one(args):
    """Flags -> text: the prompts of their protocol."""
    system, (protocol, _) = all_systems()[args.protocol], make_protocol(args)
    texts = read_texts(args)
    # A task that fills every place of a template with the name of the place.
    task = {"video": "{video}", "question": "{question}", "options": ["{option}"], "type": "mcq"}
    agent = rollout.AgentConfig(tools=args.tools == ["on"])
    messages = protocol.opening(task, args.frames[0], agent, "", 60.0)
    lines = [f"== {args.protocol} (frames and limits: the defaults of --help)"]
    lines += [f"stops   at {' '.join(protocol.stop)}"] if protocol.stop else []
    source = "the publisher's" if args.prompt_file or args.texts_of else "ours"
    lines += [f"departs {text}" for text in system.departures]
    lines.append(f"texts   {source}; --prompt-file takes {len(system.texts)}: {system.files}")
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "[frames]") for part in content)
        lines += [f"{message['role']}:", *("    " + line for line in content.strip().splitlines())]
    for number, text in enumerate(texts[1:], 2):  # the first has been sent above
        lines += [f"text {number}:", *("    " + line for line in text.strip().splitlines())]
    return "\n".join(lines)


def flag_checks(args):
    """-> [(whether the flags of a protocol contradict each other, why)]."""
    native = all_systems()[args.protocol].native if args.protocol.startswith("paper") else {}
    return [(not 0 <= args.overview_fps < float("inf") or args.total_pixels < 0,
             "--set: overview_fps and total_pixels must be numbers of at least 0"),
            (args.texts_of and (args.prompt_file or args.user_file),
             "--texts-of takes all texts: leave --prompt-file and user_file out"),
            (args.protocol.startswith("paper") and args.tools != native.get("tools", ["on"]),
             f"--protocol {args.protocol} has --tools {native.get('tools', ['on'])[0]}")]


def source_of(source, args):
    """rollout.VideoSource -> the PublisherSource that reads as the system does."""
    fields = {**vars(source), "overview_fps": args.overview_fps,
              "total_pixels": args.total_pixels, "crop_fps": args.sub_fps,
              "crop_frames": args.sub_frames, **all_systems()[args.protocol].reader}
    if args.engine == "openai":
        fields["jpeg"] = 0  # the client writes JPEGs, and the server's processor resizes them
    elif fields.get("jpeg"):
        fields["processor"] = processor_bounds(args.ckpt)
    return frame_sources.PublisherSource(**fields)


def processor_bounds(ckpt):
    """Checkpoint folder -> (min, max) pixels of an image, as its processor resizes it. Those of
    the published Qwen3-VL, if the folder does not say."""
    path = os.path.join(hub.config_folder(ckpt) or ckpt, "preprocessor_config.json")
    size = launch.parse_json(launch.read_file(path)).get("size", {}) if launch.is_file(path) else {}
    return size.get("shortest_edge", 65536), size.get("longest_edge", 16777216)


def read_texts(args):
    """Flags -> texts of the protocol, in the order of System.texts."""
    system = all_systems()[args.protocol]
    if args.texts_of:
        return paper_texts.texts(args.protocol, args.texts_of)
    return read_prompts(args.prompt_file) if args.prompt_file else system.texts


def make_protocol(args):
    """Flags -> (Protocol, hash of its prompt texts)."""
    system, texts = all_systems()[args.protocol], read_texts(args)
    # Too few texts would fail in the middle of a run, and spare ones would be left out silently.
    if len(texts) != len(system.texts):
        takes = f"--protocol {args.protocol} takes {len(system.texts)}: {system.files}"
        raise launch.UserError(f"--prompt-file: {takes}")
    protocol = replace(system.make(texts, args), one_call=args.dispatch == "turns")
    if args.user_file:
        texts = texts + read_prompts([args.user_file])
        protocol = with_user(protocol, texts[-1], args.protocol)
    return protocol, hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def with_user(protocol, text, name):
    """A protocol with another user turn."""
    func, keywords = (getattr(protocol.opening, name, None) for name in ("func", "keywords"))
    if func not in (opening, paravt_opening) or callable(keywords.get("user")):  # several texts
        raise launch.UserError(f"user_file: the user turn of --protocol {name} has parts of its "
                               "own; see --protocols")
    return replace(protocol, opening=partial(protocol.opening, user=text))


def read_prompts(sources):
    """--prompt-file values -> texts. FILE is a text. FILE.py:NAME is the string that the file sets
    NAME to, FILE.py:NAME[key] one of a dictionary. Raises UserError naming the value."""
    templates = []
    for source in sources:
        path, _, name = source.partition(".py:")  # a plain text may have any name
        path += ".py" if name else ""
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe could wait for ever
            raise launch.UserError(f"--prompt-file {source}: is not a regular file")
        try:
            text = launch.read_file(path).decode("utf-8-sig").replace("\r\n", "\n")
            if name:
                text = single_braces(assigned_string(text, name))
            elif not text.strip():
                raise ValueError("is empty")  # its disk was full, perhaps
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise launch.UserError(f"--prompt-file {source}: {error}") from None
        if text is None:
            raise launch.UserError(f"--prompt-file {source}: {path} sets no string {name}")
        templates.append(text)
    return templates


def assigned_string(code, name):
    """The string that Python source assigns to `name`, or to `name[key]` of a dictionary, or None.
    The source is parsed, never run."""
    (name, _, key), value = name.removesuffix("]").partition("["), None
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                value = node.value  # the last assignment counts, as in a run
    # Only a literal: an expression raises ValueError.
    text = ast.literal_eval(value) if value is not None else None
    if key:
        text = text.get(key) if isinstance(text, dict) else None
    return text if isinstance(text, str) else None


def single_braces(text):
    """Undoubles the braces of a str.format template; fields stay. Any other text stays unchanged,
    for example one with JSON in plain braces."""
    try:
        fields = [field for _, field, *_ in string.Formatter().parse(text or "")]
    except ValueError:  # a brace alone
        return text
    fields = [field for field in fields if field is not None]
    if not fields or not all(field.isidentifier() for field in fields):
        return text
    return text.replace("{{", "{").replace("}}", "}")


# ------------------------------------------------------------------------------------------------
# One generation, no calls


def stamp_kind(args):
    """The stamp before a frame: a kind of chat.stamp_text."""
    return None if args.stamps else "none"


def one_turn_protocol(texts, args, role="user", prefill="", **first):
    """System.make. role: whose text the first of the texts is. first: more arguments of opening."""
    first = {role: texts[0], "stamp": stamp_kind(args), **first}
    return Protocol(opening=partial(opening, **first), prefill=prefill, schema=None)


def wrapped_files(name):
    types = "TYPE_TEMPLATE[multiple choice] and TYPE_TEMPLATE[free-form]"
    return f"QUESTION_TEMPLATE, {types} of {name}'s src/eval_bench.py, filled at {{Question}}"


def wrapped_texts():
    """The text around the question, and the text after that for a letter and for words."""
    return [f"{{Question}}\n{THINK}", " The final answer is the letter of one option.",
            " The final answer is a text."]


def wrapped_protocol(texts, args, header="\n"):
    """No system text. {Question} is the question; with options: header, options, an empty line."""
    around, letter, words = texts
    # The publishers' texts do not say how to write times, so ours do.
    ends = {"mcq": letter, "open": words, "list": " {style}", "grounding": " {style}"}

    def user(task):
        question = "{question}" + (header + "{options}\n" if task.get("options") else "")
        return around.replace("{Question}", question) + ends[task["type"]]

    return one_turn_protocol(texts, args, user=user)


def videochat_protocol(texts, args):
    """The text stands before the video: one text for questions, another for times of an event."""
    # The publisher's code replaces these places, which are no fields of str.format.
    replacements = {"[QUESTION]": "{question}", "[EVENT]": "{event}", "[OPTION]": "{option_list}"}
    for old, new in replacements.items():
        texts = [text.replace(old, new) for text in texts]
    return one_turn_protocol(texts, args, user=lambda task: texts[task["type"] == "grounding"],
                          text_first=True, label="({})")


def time_r1_protocol(texts, args):
    """One text for questions, another for times of an event. The answer begins after an empty
    thought."""
    question, event = texts
    # The publisher's code fills {} in order; our texts have named places.
    question = question.replace("{}", "{question}", 1).replace("{}", "{options}", 1)
    event = event.replace("{}", "{event}")
    return one_turn_protocol(
        texts, args, user=lambda task: event if task["type"] == "grounding" else question,
        prefill="<think>\n</think>\n", label="({})", system="You are a helpful assistant.")


# ------------------------------------------------------------------------------------------------
# Answers to calls. The functions `*_answer` alone wait for frames. Each
# `*_answer` is a Protocol.answer, (records, calls, episode, sampler, turn) -> Reply.


async def frames_reply(records, calls, episode, sampler, turn, stamp):
    """A user message for every call: the frames of the window, then their description in tool
    response tags, as the paper's authors evaluate, or why there are none."""
    reply, windows = Reply([]), await load_windows(records, calls, episode, sampler, turn)
    for record, (spec, frames) in zip(records, windows):
        content = []
        if frames is not None:
            window = f"from {record['start']:.1f}s to {record['end']:.1f}s"
            record["summary"] = f"{len(frames.seconds)} frames {window}."
            content.append(add_video(reply, spec, frames, stamp))
        reply.messages.append({"role": "user", "content": content + tagged(record["summary"])})
    return reply


# ------------------------------------------------------------------------------------------------
# ParaVT


def paravt_protocol(texts, args):
    """ParaVT as trained, see --crop-response, or with the prompts of --prompt-file."""
    default_text, stamp = not args.prompt_file, stamp_kind(args)
    frames = args.crop_response == "frames"
    if default_text and args.stamps:  # the very prompts of training
        return Protocol(schema=partial(rollout.tool_schema, args.crop_response))
    # A text that contains the schema declares the tool, so the template must not declare it again.
    schema_in_text = not default_text and "{tool_schema}" in texts[0]
    schema = partial(crop_schema, frames=frames, path=schema_in_text)
    system = None if default_text else texts[0].replace("{tool_schema}", json.dumps(schema()[0]))
    opening = partial(paravt_opening, system=system, stamp=stamp, path=schema_in_text)
    reply = frames_reply if schema_in_text and frames else trained_reply
    return Protocol(opening=opening, answer=partial(reply, stamp=stamp),
                    schema=None if schema_in_text else schema)


def paravt_opening(task, num_frames, agent, subtitles, duration, system, stamp, path, user=None):
    """Training's first messages with another stamp and system text (None: training's, adapted).
    path: the video's name is told. user: a template."""
    messages = rollout.main_messages(task, num_frames, agent.tools, subtitles)
    if system is None:
        system = paravt_text(agent.tools, agent.crop_response, timed=stamp is None)
    messages[0]["content"] = system
    overview, question = messages[1]["content"]
    overview["stamp"] = stamp
    if user:
        user = user if "{subtitles}" in user else "{subtitles}" + user
        question["text"] = fill_template(user, task, duration, subtitles)
    if path and agent.tools:
        named = NAMED_PATH.replace("{video}", os.path.basename(task["video"]))
        question["text"] += (" " if user else "\n") + named
    return messages


def paravt_text(tools, crop_response, timed):
    """Training's system text, without times if not timed."""
    text = rollout.system_prompt(tools, crop_response)
    return text if timed else text.replace(", each after its time", "")


def crop_schema(frames, path):
    """Training's schema. frames: calls return frames. path: a call names the video."""
    schema = rollout.tool_schema("frames" if frames else "summary")[:1]  # crop_video alone
    arguments = schema[0]["function"]["parameters"]
    if path:  # the authors' three arguments; the model does not choose the number of frames
        named = {"type": "string", "description": "path of the video"}
        times = {name: arguments["properties"][name] for name in ("start_time", "end_time")}
        arguments.update(properties={"video_path": named, **times}, required=["video_path", *times])
    return schema


def crops_in_context(args):
    """Every call of every turn may add a window to the context."""
    return args.max_turns * args.max_parallel, args.sub_frames


# ------------------------------------------------------------------------------------------------
# LongVT: crop_video as a declared tool; a tool message holds the frames and a sentence


def longvt_protocol(texts, args):
    stamp = stamp_kind(args)
    # The publisher's prompt is no template. The text follows the question unchanged.
    tail = f" {texts[0]} {NAMED_PATH.replace('The video', 'The Video')}"
    return Protocol(opening=partial(opening, tail=tail, stamp=stamp),
                    answer=partial(longvt_reply, stamp=stamp),
                    schema=partial(crop_schema, frames=True, path=True))


async def longvt_reply(records, calls, episode, sampler, turn, stamp):
    refuse_before(records, calls)
    windows = await load_windows(records, calls, episode, sampler, turn)
    return tool_replies(records, windows, stamp, "The frames of the window are shown above. Go on "
                        "with your analysis.")


def refuse_before(records, calls):
    """Makes a window that begins before the video an error. One that ends after it is cut."""
    for call, record in zip(calls, records):
        if call.error is None and call.arguments["start"] < 0:
            # Not pending, so the call is not run; the model is told.
            record.update(status="error", summary="error: start_time is below 0")


# ------------------------------------------------------------------------------------------------
# VideoZoomer: one zoom a turn, answered by stamped frames


def videozoomer_protocol(texts, args):
    first = partial(opening, system=texts[0], stamp="frame")
    # A turn ends with the call: text after the call would be about frames not yet seen.
    return Protocol(opening=first, parse=parse_zoom, answer=videozoomer_reply,
                    schema=None, stop=("</video_zoom>",))


def last_block(text, tag):
    """Contents of the last closed <tag> of a text, or None. Linear time for any text."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def parse_zoom(text, think_open=False):
    """Last <video_zoom> of a turn -> [one call] or []. num_frames is fps times seconds."""
    body = last_block(rewards.without_thoughts(
        rewards.with_forced_start(text, think_open)), "video_zoom")
    if body is None:
        return []
    start = end = frames = None
    try:
        call = json.loads(body[:1000])  # bounded: a model may write any length
        start, end = (rewards.to_seconds(second) for second in call["segment"])
        fps = rewards.to_seconds(call["fps"])
        if not start < end or fps <= 0:
            error = "segment must be [start, end] in seconds with start < end, and fps above 0"
        else:
            frames = int(fps * (end - start))  # OverflowError if the product is infinite
            error = (f"{frames} frames are more than 16: take a shorter segment or a lower fps"
                     if frames > 16 else None if frames else
                     "the segment holds no frame at this fps")
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        error = 'expected {"segment": [start, end], "fps": n}'
    return [window_call("video_zoom", start, end, frames, error)]


async def videozoomer_reply(records, calls, episode, sampler, turn):
    """One user message: the frames inside tool response tags, or the error."""
    [(spec, frames)] = await load_windows(records, calls, episode, sampler, turn)
    reply, record = Reply([]), records[0]
    if frames is None:
        hint = {"type": "text", "text": "\nThink about what went wrong, then go on."}
        content = [*tagged(record["summary"]), hint]
    else:
        record["summary"] = "The frames of the segment:"
        head = "<tool_response>\nThe frames of the segment:\n"
        content = [{"type": "text", "text": head, "trusted": True},
                   add_video(reply, spec, frames, "frame"),
                   {"type": "text", "text": "\n</tool_response>", "trusted": True},
                   {"type": "text", "text": "\nGo on thinking, then zoom again or answer."}]
    if turn == sampler.agent.max_turns - 1:
        content.append({"type": "text", "text": " Do not zoom again: answer now."})
    reply.messages.append({"role": "user", "content": content})
    return reply


# ------------------------------------------------------------------------------------------------
# Conan: eight new frames a round, from the clips that the model names


def conan_texts():
    """First round, further round, last round of a question with options; then without."""
    contract = ("Rate between <score> and </score> how well the frames so far answer the question, "
                "reason between <think> and </think>, name the clips you want to see between "
                "<clip> and </clip> as HH:MM:SS-HH:MM:SS, separated by commas, or leave it empty "
                "when you need none, and write your answer between <answer> and </answer>.")
    question, options = "Question: {question}", "\nOptions: {options}"
    rounds = [f"{question}{options}\nThe frames above carry their times. {contract}",
              f"These are frames of the clips you asked for. {contract} {question}{options}",
              "These are the last frames. Reason between <think> and </think> and write your "
              f"answer between <answer> and </answer>. {question}{options}"]
    return rounds + [text.replace(options, "") for text in rounds]


def conan_protocol(texts, args):
    first = partial(opening, user=lambda t: conan_rounds(texts, t)[0], stamp="clock", between=", ")
    answer = partial(conan_reply, texts=texts)
    return Protocol(opening=first, parse=parse_clips, answer=answer, schema=None)


def conan_rounds(texts, task):
    """-> the texts of the three rounds of a task, filled but for its subtitles and length. Their
    loaders write the options of Video-MME in one line, each of other splits on a line of its own,
    and none for LVBench, whose question holds them."""
    texts, split = texts[:3] if task.get("options") else texts[3:], task.get("split")
    if split == "lvbench":
        texts = [re.sub(r"\n[^\n]*\{options\}", "", text) for text in texts]
        return [text.replace("{question}", "{published}") for text in texts]
    if split in ("longvideobench", "mlvu"):
        return [text.replace("{options}", "{lines}\n") for text in texts]
    return texts


def parse_clips(text, think_open=False):
    """First <clip> of a turn -> a call for every HH:MM:SS-HH:MM:SS that runs forward. Plain seconds
    are not Conan's form. A turn without a call ends the episode."""
    body = text.partition("<clip>")[2].partition("</clip>")
    if not body[1]:  # never closed
        return []
    clock, calls = r"(\d{1,2}:\d{2}:\d{2})", []
    for window in re.findall(rf"{clock}\s*-\s*{clock}", body[0][:1000])[:16]:
        a, b = (sum(int(n) * 60.0**i for i, n in enumerate(t.split(":")[::-1])) for t in window)
        if a < b:
            calls.append(window_call("clip", a, b))
    return calls


async def conan_reply(records, calls, episode, sampler, turn, texts):
    last = turn == sampler.agent.max_turns - 1
    text = fill_template(conan_rounds(texts, episode.task)[1 + last], episode.task, between=", ")
    path = {"video": episode.task["video"]}
    starts = await sampler.pump.load(frame_starts, sampler.source, path)
    wanted = conan_times(records, calls, episode, starts)
    if not wanted:  # all frames have been seen
        return Reply([{"role": "user", "content": text}])
    spec = {**path, "times": wanted}
    frames = await sampler.pump.load(sampler.source.load, spec)
    episode.notes["shown_times"].update(wanted)
    reply = Reply([])
    content = [add_video(reply, spec, frames, "clock"), {"type": "text", "text": text}]
    reply.messages.append({"role": "user", "content": content})
    return reply


def frame_starts(source, spec):
    """-> seconds at which the frames of a video come on display."""
    starts, info = source.cache.index(video.resolve(spec["video"], source.root))
    return [start for start in map(float, starts) if 0 <= start < info.duration]


def conan_times(records, calls, episode, starts):
    """
    Seconds of the next frames in order: 8, or all that are left. Fills the records.

    Every clip gives one frame, and the rest in proportion to its new frames, both ends among
    them. If the clips have too few, the whole video gives the rest. Departs from the publisher's
    code: frames that were shown are known by their exact times, not by rounded ones, and a video
    with too few frames shows no frame twice.
    """
    overview = {float(second) for second in episode.context.frames[0].seconds}
    shown_times = episode.notes.setdefault("shown_times", overview)
    unshown = [start for start in starts if start not in shown_times]
    # A window ends with the frame that is on display at its end.
    clips = []
    for call in calls:
        start, end = call.arguments["start"], call.arguments["end"]
        clips.append([second for second in unshown if start <= second <= end])
    total, spare = sum(map(len, clips)), max(0, 8 - len(clips))
    shares = [spare * len(clip) // total if total else 0 for clip in clips]
    largest = sorted(range(len(clips)), key=lambda i: -len(clips[i]))
    for i in range(spare - sum(shares) if total else 0):  # the remainder after rounding
        shares[largest[i % len(clips)]] += 1
    wanted = set()
    for record, clip, share in zip(records, clips, shares):
        new = ends_and_between(clip, share + 1)
        wanted.update(new)
        record.update(status="ok" if new else "error",
                      summary=f"{len(new)} frames" if new else "error: nothing new in this clip")
    rest = [start for start in unshown if start not in wanted]
    wanted.update(ends_and_between(rest, 8 - len(wanted)))
    return ends_and_between(sorted(wanted), 8)


def ends_and_between(items, n):
    """n of the items, the first and the last among them; all if there are fewer."""
    if not 1 < n < len(items):
        return items[: max(n, 0)]
    step = (len(items) - 1) / (n - 1)
    return [items[round(i * step)] for i in range(n)]


# ------------------------------------------------------------------------------------------------
# SAGE: a JSON object in every turn, one tool at a time


def sage_protocol(texts, args):
    """SAGE's prompt in the paper's driver: its frames, its user turns, its forced answer."""
    names = {name: {"type": "function", "function": {
        "name": name, "description": told,
        "parameters": {"type": "object", "properties": {a: {"type": "string"}
                                                        for a in arguments.split()}}}}
             for name, (arguments, told) in SAGE_TOOLS.items()}
    lines = "\n".join(["<tools>", *map(json.dumps, names.values()), "</tools>"])
    parts = dict(zip(paper.AGENT, paper.our_texts("", names)))
    parts["system"] = parts["grounding"] = texts[0].replace("<<<tools>>>", lines)
    parts["path"] = "\nVideo Path: {video} of duration {duration}."
    return replace(paper.protocol(list(parts.values()), args), parse=sage_calls, answer=sage_reply)


def sage_object(text):
    """The last JSON object of a turn: in <json> tags, in a fence or bare. {} if there is none."""
    found = re.findall(r"<json>(.*?)(?:</json>|$)", text, re.DOTALL)
    found = found or re.findall(r"```json(.*?)(?:```|$)", text, re.DOTALL) or [text]
    body = found[-1][max(0, found[-1].find("{")) :].strip()
    # A trailing comma is the most frequent slip.
    for tried in (body, re.sub(r",\s*([}\]])", r"\1", body)):
        try:
            read, _ = json.JSONDecoder(strict=False).raw_decode(tried)
            return read if isinstance(read, dict) else {}
        except (ValueError, RecursionError):
            continue
    return {}


def sage_calls(text, think_open=False):
    """The first tool that a turn recommends -> [one call]; [] if it answers."""
    reply = sage_object(text)
    answerable, recommended = reply.get("answerable"), reply.get("recommended_tools")
    answered = isinstance(answerable, dict) and answerable.get("verdict")
    if not isinstance(recommended, dict) or not recommended.get("needed"):
        return []
    wanted = recommended.get("tool_calls")
    if not isinstance(wanted, list) or not wanted or answered and reply.get("final_answer"):
        return []
    call = wanted[0] if isinstance(wanted[0], dict) else {}
    name, arguments = call.get("name"), call.get("arguments")
    if name not in list(SAGE_TOOLS):  # a list: the name may be of any type
        return [rewards.ToolCall("unknown tool", error="there is no tool of this name")]
    start = end = error = None
    if name in ("extract_parts_from_timestamp", "identify_timestamps_visually"):
        try:
            start = rewards.to_seconds(arguments["timestamp_start"])
            end = rewards.to_seconds(arguments["timestamp_end"])
        except (TypeError, KeyError, ValueError):
            pass
        if start is None or end is None or not start < end:
            error = "timestamp_start and timestamp_end must be HH:MM:SS, the first before the last"
    elif name == "perform_reasoning":
        error = "the frames of each window stay above: reason over them here"
    else:
        error = "not available"
    return [window_call(name, start, end, None, error)]


async def sage_reply(records, calls, episode, sampler, turn):
    """One user message: the frames of the window, or why there are none."""
    [(spec, frames)] = await load_windows(records, calls, episode, sampler, turn)
    reply, record, content = Reply([]), records[0], []
    record["summary"] = record["summary"].removeprefix("error: ")
    if frames is not None:
        window = f"from {record['start']:.1f}s to {record['end']:.1f}s"
        record["summary"] = f"{len(frames.seconds)} frames {window}, shown above"
        content.append(add_video(reply, spec, frames, "none"))
    text = (f"{record['name']} output: {record['summary']}\nCan the query be answered now? Reply "
            'in the same form, with "answerable": {"verdict": true or false, "reasoning": why}.')
    reply.messages.append({"role": "user", "content": [*content, {"type": "text", "text": text}]})
    return reply


def sage_final(turns, think_open=False):
    """System.final: the final_answer of the last turn, or its text if it holds no JSON."""
    reply = sage_object(turns[-1]) if turns else {}
    if not reply:
        return answers.answer_or_tail(turns, think_open)
    answer = reply.get("final_answer")
    return None if answer is None else str(answer)
