"""
evaluation/systems.py: plays episodes by the protocols of the other systems in the paper's Table 1.

A protocol is a system's prompt, the form of calls, the responses to calls, and when the system must
answer: an entry of `protocols` and the functions that the entry names. `play` is the episode loop
of all protocols, on the engine, pump, frames and records of rollout.py. ParaVT as trained goes
through rollout.py's own loop; a test asserts that both loops give the same records.

Departs from the publishers' code in wording, because the prompts here are ours. --prompt-file reads
the publishers' own from their releases, in the order of `files`, and never runs that code.

Reads prompt files. Used by eval.py:
    python eval.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M --protocol sage ..
"""

import ast
import asyncio
import bisect
import hashlib
import itertools
import json
import os
import re
import string
import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

import chat
import data
import launch
import rewards
import rollout
import video
from evaluation.endpoint import ChatRequest

QUESTION = "{subtitles}{question}\n{options}\n{style}"
NAMED_PATH = "The video path for this video is: {video}"
ANSWER = "Write only the final answer between <answer> and </answer>."
THINK = (
    "Reason between <think> and </think>, then write only the final answer between <answer> and "
    "</answer>."
)

# ------------------------------------------------------------------------------------------------
# The episode of a protocol


@dataclass
class Chat(rollout.Context):
    """A Context with the same contents as a chat. Endpoints take no ids, only the chat."""

    messages: list = field(default_factory=list)

    def sampled(self, ids, logps):
        if ids is not None:
            super().sampled(ids, logps)

    def request(self, name, **settings):
        return ChatRequest(name, list(self.compact), list(self.ids), list(self.items),
                           list(self.frames), messages=self.messages, **settings)


def open_chat(codec, messages, specs, frames, tools=None):
    """rollout.open_context -> Chat. codec: None for an endpoint."""
    context = rollout.open_context(codec, messages, specs, frames, tools) if codec else None
    return Chat(**vars(context) if context else {"frames": list(frames)}, messages=list(messages))


@dataclass
class Reply:
    """The answer to the calls of a turn: messages, and the specs and Frames of their videos, in
    order."""

    messages: list
    specs: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    fresh: bool = False  # the messages are a new conversation, not the next turn of this one


def trained_opening(task, num_frames, agent, subtitles, duration):
    """ParaVT's first messages, as Protocol.opening."""
    return rollout.main_messages(task, num_frames, agent.tools, subtitles)


async def summaries_answer(records, calls, episode, sampler, turn):
    """ParaVT's Protocol.answer: a sub-agent for every call, one tool message each, in order."""
    await rollout.serve(records, calls, episode, sampler, turn)
    return Reply([{"role": "tool", "content": record["summary"]} for record in records])


@dataclass
class Protocol:
    """The differences between systems that look at videos in turns. The defaults are ParaVT's."""

    opening: callable = trained_opening  # (task, K, agent, subtitles, duration) -> first messages
    parse: callable = rewards.parse_tool_calls  # (text, whether it began in a thought) -> calls
    answer: callable = summaries_answer  # async (records, calls, episode, sampler, turn) -> Reply
    force: callable = None  # (task) -> text put before the last turn
    force_tokens: callable = None  # (task) -> tokens of that turn
    schema: callable = rollout.tool_schema  # () -> tools for the chat template; None: no tools
    prefill: str = ""  # forced start of every turn, instead of --think-prefix
    stop: tuple = ()  # strings that end a turn


def run(sampler, tasks, protocol, frames=64, group=1):
    """rollout.run of a protocol."""
    sampler, own = player(sampler, protocol, frames)
    return rollout.run(sampler, tasks, frames, group, play=own)


def player(sampler, protocol, frames):
    """-> (sampler, episode loop) of a protocol: training's own for ParaVT as trained, if the engine
    takes ids."""
    trained = protocol == Protocol() and sampler.agent.dispatch != "turns" and frames != 0
    # An endpoint answers messages with text, also if a checkpoint's tokenizer counts the tokens.
    if sampler.codec and trained and not getattr(sampler.engine, "takes_messages", False):
        return sampler, rollout.run_episode
    return replace(sampler, open_context=open_chat), partial(play, protocol=protocol)


async def play(episode, sampler, protocol):
    """rollout.run_episode for any protocol, with ids or without -> Episode."""
    agent, codec, task, began = sampler.agent, sampler.codec, episode.task, time.monotonic()
    blind = episode.num_frames == 0
    shown = await rollout.load_overview(episode, sampler)
    if shown is None:
        return episode
    spec, frames, spoken = shown
    messages = protocol.opening(task, episode.num_frames, agent, spoken, episode.duration)
    messages = [without_video(message) for message in messages] if blind else messages
    tools = protocol.schema() if agent.tools and protocol.schema else None
    context = episode.context = open_chat(codec, messages, [] if blind else [spec],
                                          [] if blind else [frames], tools)
    episode.notes.update(opening=messages, seconds=[] if blind else frames.seconds)
    prefill = protocol.prefill or ("<think>\n" if agent.think_prefix else "")
    episode.think_open = rewards.never_closed(prefill, codec is not None and codec.opens_thought)

    tool_turns = agent.max_turns if agent.tools else 0
    for turn in range(tool_turns + 1):  # the last turn must answer
        last = turn == tool_turns
        prefix = forced_ids(codec, context.ids, prefill)
        room = agent.context - len(context.ids) - len(prefix)
        if room < 1:
            episode.fail("context", f"{len(context.ids)} tokens leave no room in a context of "
                         f"{agent.context}")
            break
        context.insert(prefix)
        limit = agent.max_new_tokens
        if last and tool_turns and protocol.force_tokens:
            limit = protocol.force_tokens(task)
        said = await sampler.pump.sample(context.request(
            f"{episode.group}/{episode.sample}/{turn}", max_tokens=min(limit, room),
            temperature=agent.temperature, seed=rollout.turn_seed(episode, agent, turn),
            prefill=prefill, tools=tools, stop=protocol.stop))
        if said.error:
            episode.fail("engine_error", said.error)
            break
        ended, said = said.ended, cut_turn(said, agent, protocol, codec)
        finish = "stop" if said.ended else "call" if ended else "length"
        if said.ids is not None:
            rollout.record_turn(episode, codec, said, finish)
        else:  # from an endpoint
            episode.turns.append(said.text)
            episode.finish.append(finish)
            episode.notes.setdefault("reasoning", []).append(said.reasoning)
        calls, records = rollout.record_calls(episode, agent, said.text, turn, protocol.parse)
        if last or not calls:
            for record in records:
                record.update(status="not_run", summary="")
            break

        reply = await protocol.answer(records, calls, episode, sampler, turn)
        if protocol.force and turn == tool_turns - 1:
            reply.messages.append({"role": "user", "content": protocol.force(task)})
        if reply.fresh:
            context = open_chat(codec, reply.messages, reply.specs, reply.frames, tools)
            episode.context = context
            episode.spans.clear()  # of the last context alone
            continue
        spoken_turn = {"role": "assistant", "content": prefill + said.text}
        context.messages = [*context.messages, spoken_turn, *reply.messages]
        context.frames += reply.frames
        if codec is not None:
            items = [chat.vision_item(s, f) for s, f in zip(reply.specs, reply.frames)]
            compact = chat.glue_ids(codec, reply.messages, said.ended, items)
            glue = chat.expand(codec, compact, items)
            if not rollout.fits(episode, agent, len(glue) + len(prefix)):
                break
            context.insert(glue, compact)
            context.items += items
    episode.timing["total_s"] = time.monotonic() - began
    return episode


def without_video(message):
    """A message without its frames."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [item for item in message["content"] if item["type"] != "video"]}


def reordered(task):
    """A task with its options in an order drawn from its id, and the letter of the answer after
    them. "order": the places in the publisher's order. A task of another type, or with an option
    that speaks of other options ("all of the above"), stays as it is."""
    options = data.bare_options(task.get("options") or [])
    if task["type"] != "mcq" or any(map(names_others, options)):
        return task
    order = sorted(range(len(options)), key=lambda i: launch.stable_number("order", task["id"], i))
    answer = order.index(string.ascii_uppercase.index(task["answer"]))
    return {**task, "options": [options[i] for i in order], "order": order,
            "answer": string.ascii_uppercase[answer]}


def names_others(option):
    """Whether an option speaks of others by their places or letters, so that it must not move."""
    return re.search(r"\b(all|none|both|neither|either|any) (of )?(the )?(above|below|these|those|"
                     r"other|previous|preceding)|\b[A-H]\b,? (and|or|&) [A-H]\b", option, re.I)


def forced_ids(codec, ids, prefill):
    """Ids of the forced start of a turn that follows `ids`; [] for endpoints, and if the template
    wrote it."""
    if codec is None:
        return []
    if not chat.think_prefix_ids(codec, ids):  # the template has opened the thought
        prefill = prefill.removeprefix("<think>\n")
    return chat.encode(codec, prefill)


def cut_turn(said, agent, protocol, codec):
    """A turn as the rules end it: after a protocol's stop strings; with dispatch=turns after its
    first call, because an agent with one window a turn would have stopped there."""
    if agent.dispatch == "turns":
        said = cut_after(codec, said, ("</tool_call>", "</tool_code>"), since="</think>")
    return cut_after(codec, said, protocol.stop) if protocol.stop else said


def cut_after(codec, said, tags, since=None):
    """A Completion cut after the first of `tags`, searched after the first `since`; unchanged if
    there is none."""
    # In bytes: a turn may hold half a character, and ids are cut where the tag is whole.
    if said.ids is None:  # an endpoint that returns text
        pieces = [character.encode() for character in said.text]
    else:
        pieces = chat.pieces_of(codec, said.ids)
    text = b"".join(pieces)
    start = max(0, text.find(since.encode())) if since else 0
    ends = [at + len(tag) for tag in map(str.encode, tags) if (at := text.find(tag, start)) >= 0]
    if not ends:
        return said
    lengths = list(itertools.accumulate(map(len, pieces)))
    cut = bisect.bisect_left(lengths, min(ends)) + 1  # the token that completes the tag stays
    if said.ids is None:
        return replace(said, text=said.text[:cut])
    ids = said.ids[:cut]
    return replace(said, ids=ids, logps=said.logps[:cut], text=chat.decode(codec, ids), ended=False)


# ------------------------------------------------------------------------------------------------
# The systems


def nothing_held(args):
    return 0, 0


@dataclass
class System:
    """One system: prompts, protocol, flags, and the answer that is graded."""

    files: str  # files of the publisher's release, for --prompt-file
    texts: list  # our wording of the same, in the same order
    make: callable  # (texts, args) -> Protocol
    native: dict  # flags of the publisher's recipe: the defaults of a run
    final: callable = rewards.answer_or_tail  # (turns, think_open) -> answer to grade, or None
    held: callable = nothing_held  # args -> (windows beside the overview, frames of each)
    departures: tuple = ()  # known differences from the publisher's own evaluation, in words
    paper: tuple = ()  # the same for --protocol-set paper and the driver of the paper's authors


def protocols():
    """name -> System."""
    single = {"max_turns": 0, "think_prefix": False, "tools": ["off"]}
    rounds = {"think_prefix": False, "max_parallel": 1}
    # 2 frames a second, 768 at most, with 3584 x 28 x 28 pixels in all.
    many = {**paced(2.0, 768), "min_pixels": 16 * 784, "max_pixels": 768 * 784,
            "total_pixels": 3584 * 784}
    reasoning = {**single, "max_pixels": 256 * 784, "max_new_tokens": 1024}
    conan = {**rounds, "max_turns": 2, "frames": [16], "max_pixels": 448 * 448}
    longvt = {**rounds, "max_turns": 5, **paced(1.0, 512), "min_pixels": 784,
              "max_pixels": 50176, "max_new_tokens": 49152, "context": 131072}
    zoomer = {**rounds, "max_turns": 4, **paced(0.5, 64), "overview_grid": "start",
              "max_new_tokens": 4096, "min_pixels": 25088, "max_pixels": 100352}
    qwen3 = {**single, **paced(2.0, 512), "overview_grid": "ends", "min_pixels": 3584,
             "max_pixels": 401408, "total_pixels": 19267584, "max_new_tokens": 32768,
             "temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5,
             "context": 98304}
    centres = "frames lie at the centres of equal segments, theirs include the first and the last"
    stamps = "each frame is an image after its time, theirs are one video"
    even = "an odd number of frames may be shown, theirs is even and 4 at least"
    replies = "the answers to calls are in our words"
    greedy = "greedy here, theirs samples at temperature 0.1 with top-p 0.001"
    raised = "frames and pixels are those of their README, their file holds those of training"
    timed = ("a grounding task has a time before each frame, theirs has one video and windows "
             "without times")
    failed = "the answer to a call that fails is in our words"
    one = "Charades-STA has the system text of the others, their script gives it another"
    forced = "the request for an answer after the last calls is in our words"
    schema = "the description of the tool is in our words"
    zoomed = "frames of a call lie at the centres of segments, theirs include first and last"
    worded = "the words of the question lie in their data files, here they are ours"
    driver = "paravt/eval/driver.py"
    return {
        # ParaVT-8B; Qwen3-VL-8B and Conan-7B in the paper's runs
        "paravt": System(f"{driver}:GENERAL_AGENTIC_SYSTEM",
                         [rollout.main_prompt()], paravt_protocol, {}, held=paravt_held,
                         paper=(schema, timed, one, forced, failed)),
        # Qwen2.5-VL-7B, GPT-4o, Gemini 1.5 Pro
        "direct": System(f"{driver}:DIRECT_SYSTEM", [ANSWER], prompt_as_system, single,
                         paper=(timed,)),
        # Qwen3-VL-8B as in the publisher's evaluation: no tools, no system text
        "qwen3-vl": System("a text made from the user turn of evaluation/VideoMME/dataset_utils.py",
                           [qwen3_text()], prompt_as_user, qwen3, departures=(
                               stamps, even,
                               "their judge model reads the answer, here a rule")),
        "video-r1": System(wrapped_files("Video-R1"), wrapped_texts(),
                           partial(wrapped_protocol, header="Options:\n"),
                           {**reasoning, **paced(2.0, 64), "min_pixels": 128 * 784},
                           departures=(centres, stamps, even, greedy, raised)),
        "videorft": System(wrapped_files("VideoRFT"), wrapped_texts(), wrapped_protocol,
                           {**reasoning, "frames": [32], "min_pixels": 256 * 784},
                           departures=(centres, stamps, greedy, raised)),
        # Video-Thinker-7B, whose code is not published; and all of these in the paper's runs
        "reasoning": System(f"{driver}:REASONING_SYSTEM", [THINK], prompt_as_system, reasoning,
                            paper=(timed,)),
        "videochat-r1": System("src_eval/eval_prompts.py:QA_THINK and :GROUND_TEMPLATE_THINK, "
                               "filled at [QUESTION], [OPTION] and [EVENT]",
                               [f"{QUESTION}\n{THINK}", f"{QUESTION}\n{THINK}"],
                               videochat_protocol, {**single, **many},
                               departures=(centres, stamps, even)),
        "time-r1": System("src/vllm_inference/data/config.py:DEFAULT_MCQ_PROMPT[r1] and "
                          ":DEFAULT_TG_PROMPT[r1], filled at {}",
                          [f"{QUESTION}\n{ANSWER}",
                           f'{{subtitles}}When in the video is the event "{{event}}"? {{style}} '
                           f"{ANSWER}"],
                          time_r1_protocol, {**single, **many, "max_new_tokens": 1024},
                          departures=(
                              centres, stamps, even, "a letter is read from the answer, theirs is "
                              "sampled once more after a forced start")),
        "rewatch-r1": System("a text made from the model card's prompt", [rewatch_text()],
                             prompt_as_user,
                             {**single, **paced(2.0, 192), "max_pixels": 128 * 784},
                             departures=(centres, stamps)),
        "conan": System("texts made from Conan-Eval/prompt_temp.py: first round, further round, "
                        "last round with options; the same three without", conan_texts(),
                        conan_protocol, {**conan, "temperature": 1.0, "max_new_tokens": 4000},
                        held=conan_held, departures=(
                            "frames lie at the centres of equal segments, theirs at their starts",
                            "frames have at most 448 x 448 pixels, theirs 448 on the longer side",
                            "frames that were shown are known exactly, theirs by rounded "
                            "times", "no frame is shown twice if a video has too few")),
        # LongVT-RFT-7B
        "longvt": System("TOOL_PROMPT of lmms_eval_tasks/*/utils.py, as a text", [longvt_text()],
                         longvt_protocol, {**longvt, "sub_frames": 128, "max_parallel": 5},
                         held=crops_held, departures=(
                             centres, stamps, replies, schema,
                             "one limit of new tokens, theirs is 4096 on LVBench and "
                             "LongVideoBench")),
        "videozoomer": System("a text made from data.system_prompt of scripts/eval_video.sh",
                              [videozoomer_text()], videozoomer_protocol, zoomer,
                              held=videozoomer_held, departures=(worded, replies, zoomed)),
        "sage": System("context_vlm.txt, iterative_reasoner.txt and iterative_reasoner_msg.txt of "
                       "sage/prompts/sage",
                       sage_texts(), sage_protocol,
                       # eleven steps: the first, and ten that follow a call
                       {**rounds, "max_turns": 10, **paced(1.0, 128), "max_pixels": 48 * 784,
                        "max_new_tokens": 32768}, sage_final, departures=(
                            centres, stamps, replies, "the same model serves the tools that look, "
                            "theirs may be a larger one", "web and speech tools answer that they "
                            "are not available", "a reply that cannot be read is told to the "
                            "model, theirs is sampled again", "without an answer at the end none "
                            "is graded, theirs grades a sentence that says so")),
    }


def paced(fps, most):
    """Flags of an overview that grows with the video: fps a second, `most` frames at most."""
    return {"overview_fps": fps, "frames": [most]}


def paced_frames(seconds, fps, most):
    """Frames of a video: half a frame counts as one, and half a second still shows one."""
    return max(1, min(int(seconds * fps + 0.5), most))


@dataclass
class Source(rollout.Source):
    """A Source whose overview grows with the length of the video, to K frames at most."""

    overview_fps: float = 0.0  # frames per second; 0 = always K
    total_pixels: int = 0  # of the overview, all frames together; 0 = no bound
    overview_grid: str = "centres"  # of equal segments; "ends": the first and the last frame, and
    # evenly between; "start": from the first on, 1 / overview_fps apart, and as "ends" beyond K
    show: str = "real"  # "blank", "shuffled": see changed; others change no frame

    def load(self, spec):
        if "frames" not in spec:
            return self.changed(super().load(spec), spec)
        shown = spec["frames"]
        if shown == 0:  # text alone; the video must open nevertheless, because prompts tell lengths
            return video.Frames(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0), "none", [])
        if self.overview_fps:
            shown = paced_frames(self.duration(spec), self.overview_fps, shown)
        most = self.max_pixels
        if self.total_pixels:
            # Two frames make one grid of patches, which the publishers' reader counts once. The
            # reader leaves 5% above the least, so that a shape still fits between both bounds.
            most = min(most, max(2 * self.total_pixels // shown, int(1.05 * self.min_pixels)))
        asked = {**spec, "frames": shown}
        if self.overview_grid != "centres":
            asked = {"video": spec["video"], "times": self.grid(spec, shown)}
        return self.changed(video.load(asked, self.root, self.cache, self.min_pixels, most), spec)

    def changed(self, frames, spec):
        """Frames as --show wants them. Times stay, so a prompt has the same tokens."""
        if self.show == "blank":
            order = np.arange(len(frames.seconds))
            images = np.broadcast_to(np.uint8(127), frames.images.shape)
        elif self.show == "shuffled" and "frames" in spec:
            draws = [launch.stable_number("show", spec["video"], len(frames.seconds), i)
                     for i in range(len(frames.seconds))]
            order = np.argsort(draws)
            images = frames.images[order]
        else:
            return frames
        # Keys name pictures: caches of the engine must not take these for the real ones.
        keys = [f"{self.show}{frames.frame_keys[i]}" for i in order]
        return replace(frames, images=images, key=f"{self.show}{frames.key}", frame_keys=keys)

    def grid(self, spec, shown):
        """-> seconds of `shown` frames at most, on the grid of the publishers."""
        starts, info = self.cache.index(video.resolve(spec["video"], self.root))
        places = [i * (len(starts) - 1) / max(1, shown - 1) for i in range(shown)]
        # VideoZoomer cuts fractions of frame numbers, Qwen rounds them.
        places = map(int if self.overview_grid == "start" else round, places)
        if self.overview_grid == "start" and self.overview_fps:
            step = max(1, round(len(starts) / info.duration / self.overview_fps))  # in frames
            if len(starts) <= step * spec["frames"]:
                places = range(0, len(starts), step)
        # A video with fewer frames shows no frame twice.
        return [float(starts[place]) for place in dict.fromkeys(places)]


def source_of(source, args):
    """rollout.Source -> the same with the flags of an overview."""
    return Source(**vars(source), overview_fps=args.overview_fps, total_pixels=args.total_pixels,
                  overview_grid=args.overview_grid)


def settings(name, which):
    """Defaults of the flags: a system's "native" recipe, or the "paper"'s uniform one for all."""
    native = protocols()[name].native
    if which == "native":
        return native
    # The paper's evaluation ran every open model with these flags.
    uniform = dict(
        frames=[64], min_pixels=4 * 784, max_pixels=768 * 784, crop_pixels=50176, stamps=False,
        temperature=0.0, max_new_tokens=2048, context=65536, think_prefix=False,
        max_turns=3, max_parallel=5, crop_reply="frames", force_answer=True)
    if native.get("max_turns") == 0:  # a system that makes no calls makes none here either
        uniform.update(max_turns=0, tools=["off"])
    return uniform


def add_arguments(parser):
    """Flags of protocols."""
    add = parser.add_argument_group("protocol of the system").add_argument
    add("--protocol", choices=list(protocols()), default="paravt",
        help="the system's own frames, lengths and rounds become the defaults")
    add("--protocols", action="store_true",
        help="print the prompts of each protocol and the texts that it takes, and end")
    add("--protocol-set", choices=["native", "paper"], default="native",
        help="paper: the paper's uniform frames, lengths and rounds instead")
    add("--prompt-file", nargs="+", default=[], metavar="FILE[.py:NAME]",
        help="the publisher's own prompt texts (docs/evaluation.md); default: our wording")
    add("--user-file", metavar="FILE[.py:NAME]",
        help="the user turn, if --prompt-file is the system text (places: --protocols)")
    add("--verify", metavar="CHECKOUT",
        help="compare --protocol with the publisher's own source in this folder, and end")


def rare_settings():
    """Settings of protocols for --set, see rollout.settings."""
    return {
        # paravt: a sub-agent's summary, or the frames of the window themselves
        "crop_reply": ("summary", "frames"),  # paravt: the answer to a call
        "force_answer": (False, True),  # paravt: an answer in few tokens after the last calls
        # Whether a frame follows its time. Protocols with other stamps keep theirs.
        "stamps": (True, False),
        "overview_grid": ("centres", "ends", "start"),  # where the frames lie, see Source
        "overview_fps": 0.0,  # frames per second of video, at most --frames; 0 = always --frames
        # Pixels of a frame at least; of a window's frame at most, 0 = as --max-pixels; of the
        # overview's frames together, each within its own bounds, 0 = no bound.
        "min_pixels": rollout.Source.min_pixels, "crop_pixels": 0, "total_pixels": 0,
        "dispatch": ("parallel", "sequential", "turns"),  # turns: a turn is cut after one call
    }


def describe_all(flags):
    """Flags of protocols -> text for --protocols: prompts, frames and limits of each."""
    places = " ".join(f"{{{name}}}" for name in filled_places())
    head = (f"A text of the user turn is filled at {places}. Other braces stay; a publisher's own "
            "places are listed with its texts.")
    return "\n\n".join([head, *map(describe, flags)])


def describe(args):
    """Flags -> text: the prompts, frames and limits of their protocol."""
    system, (protocol, _) = protocols()[args.protocol], make_protocol(args)
    texts = read_prompts(args.prompt_file) if args.prompt_file else system.texts
    # A task that fills every place of a template with the name of the place.
    task = {"video": "{video}", "question": "{question}", "options": ["{option}"], "type": "mcq"}
    agent = rollout.Agent(tools=args.tools == ["on"])
    messages = protocol.opening(task, args.frames[0], agent, "", 60.0)
    most = args.frames[0]
    frames = f"{args.overview_fps:g} a second, 1 to {most}" if args.overview_fps else f"{most}"
    pixels = f"{args.min_pixels} to {args.max_pixels} pixels each"
    if args.total_pixels:
        pixels += f", {args.total_pixels} in all"
    limits = (f"{args.max_new_tokens} tokens a turn, temperature {args.temperature:g}, "
              f"{args.max_turns} turns of calls, {args.max_parallel} calls a turn")
    lines = [f"== {args.protocol}", f"frames  {frames}; {pixels}", f"limits  {limits}"]
    prefill = protocol.prefill or ("<think>\n" if args.think_prefix else "")
    lines += [f"begins  {json.dumps(prefill)}"] if prefill else []
    lines += [f"stops   at {' '.join(protocol.stop)}"] if protocol.stop else []
    if agent.tools and protocol.schema:
        for tool in protocol.schema():
            arguments = ", ".join(tool["function"]["parameters"]["properties"])
            lines.append(f"tool    {tool['function']['name']}({arguments})")
    source = "the publisher's" if args.prompt_file else "ours"
    departs = system.paper if args.protocol_set == "paper" else system.departures
    lines += [f"departs {text}" for text in departs]
    lines.append(f"texts   {source}; --prompt-file takes {len(system.texts)}: {system.files}")
    for message in messages:
        said = message["content"]
        if not isinstance(said, str):
            said = "".join(part.get("text", "[frames]") for part in said)
        lines += [f"{message['role']}:", *("    " + line for line in said.strip().splitlines())]
    for number, text in enumerate(texts[1:], 2):  # the first has been sent above
        lines += [f"text {number}:", *("    " + line for line in text.strip().splitlines())]
    return "\n".join(lines)


def faults(args):
    """-> [(whether the flags of a protocol contradict each other, why)]."""
    return [
        (not 0 <= args.overview_fps < float("inf") or args.total_pixels < 0,
         "--set: overview_fps and total_pixels must be numbers of at least 0"),
    ]


def make_protocol(args):
    """Flags -> (Protocol, hash of its prompt texts)."""
    system = protocols()[args.protocol]
    texts = read_prompts(args.prompt_file) if args.prompt_file else system.texts
    # Too few texts would fail in the middle of a run, and spare ones would be left out silently.
    if len(texts) != len(system.texts):
        takes = f"--protocol {args.protocol} takes {len(system.texts)}: {system.files}"
        raise launch.UserError(f"--prompt-file: {takes}")
    protocol = system.make(texts, args)
    if args.user_file:
        texts = texts + read_prompts([args.user_file])
        protocol = with_user(protocol, texts[-1], args.protocol)
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    return protocol, digest


def with_user(protocol, text, name):
    """A protocol with another user turn."""
    if getattr(protocol.opening, "func", None) not in (opening, paravt_opening):  # several texts
        raise launch.UserError(f"--user-file: the user turn of --protocol {name} has parts of its "
                              "own; see --protocols")
    return replace(protocol, opening=partial(protocol.opening, user=text))


def read_prompts(sources):
    """--prompt-file values -> texts. FILE is a text. FILE.py:NAME is the string that the file sets
    NAME to, FILE.py:NAME[key] one of a dictionary. Raises UserError naming the value."""
    texts = []
    for source in sources:
        path, _, name = source.partition(".py:")  # a plain text may have any name
        path += ".py" if name else ""
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe could wait for ever
            raise launch.UserError(f"--prompt-file {source}: is not a regular file")
        try:
            with open(path, encoding="utf-8-sig") as f:
                text = f.read()
            if name:
                text = single_braces(assigned_string(text, name))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise launch.UserError(f"--prompt-file {source}: {error}") from None
        if text is None:
            raise launch.UserError(f"--prompt-file {source}: {path} sets no string {name}")
        texts.append(text)
    return texts


def assigned_string(code, name):
    """The string that Python source assigns to `name`, or to `name[key]` of a dictionary, or None.
    The source is parsed, never run."""
    name, _, key = name.removesuffix("]").partition("[")
    value = None
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


def check_prompts(protocol, tasks, agent, num_frames):
    """Raises UserError if the first messages of a task lack the question or an option, or hold a
    place that is not filled. A publisher's text in another form would be sent without the question,
    and its answers would be graded like any others."""
    kinds = {(task["type"], bool(task.get("options"))): task for task in reversed(tasks)}
    for task in kinds.values():  # the first task of each kind stands for all
        # Marked, because "yes" and "no" may stand in any prompt.
        options = [f"{option} 5f3a{n}" for n, option in enumerate(task.get("options") or [])]
        task = {**task, "question": task["question"] + " 5f3a", "options": options or None}
        if "event" in task:
            task["event"] += " 5f3ae"
        messages = protocol.opening(task, num_frames, agent, "", 60.0)
        pieces = [piece for message in messages for piece in chat.content_of(message)]
        said = "\n".join(piece.get("text", "") for piece in pieces)
        event = task.get("event", task["question"])
        asked = event if event in said else task["question"]
        for text in [asked, *(task.get("options") or [])]:
            text = text if text in said else repr(text)[1:-1]  # in a list that Python printed
            if text not in said:
                raise launch.UserError(f"the first prompt of task {task['id']} does not hold "
                                       f"{text[:60]!r}; --protocols lists the places that are "
                                       "filled in a text of --prompt-file or --user-file")
            said = said.replace(text, "")  # a task's own text may hold braces
        # \boxed{answer} is no place, {} after a key is JSON. The last two forms are publishers'.
        braces = r"(?<!\w)(?<!\":)(?<!\": )\{ ?([A-Za-z_0-9][\w.\[\]]*)?(![rs])?(:[^{}\"']*)? ?\}"
        if place := re.search(braces + r"|<<<\w+>>>|\[(QUESTION|OPTIONS?|EVENT)\]", said):
            raise launch.UserError(f"the first prompt of task {task['id']} ({task['type']}) holds "
                                   f"{place[0]}, which no part of the task fills")


# ------------------------------------------------------------------------------------------------
# First messages


def filled_places():
    return ("question", "event", "options", "option_list", "style", "duration", "length", "video",
            "subtitles")


def filled(text, task, duration=0.0, subtitles="", label="{}.", between="\n"):
    """
    Template -> text, filled at filled_places; other braces stay. label: of an option, "{}." or
    "({})". between: separates options. duration: seconds.
    """
    options = task.get("options") or []
    labels = map(label.format, string.ascii_uppercase)
    lines = [f"{label} {option}" for label, option in zip(labels, options)]
    values = {
        "question": task["question"],
        "event": task.get("event") or task["question"],  # of Charades-STA: the bare caption
        "options": between.join(lines),
        "option_list": str(lines),  # as Python prints a list
        "style": rewards.task_types()[task["type"]].ask,
        "duration": clock(duration),  # HH:MM:SS
        "length": clock(duration)[3:] if duration < 3600 else clock(duration),  # MM:SS if possible
        "video": os.path.basename(task["video"]),
        "subtitles": f"Subtitles:\n{subtitles}\n\n" if subtitles else "",
    }
    if not lines:  # no empty line for options; blank lines of a publisher's text stay
        text = re.sub(r"\{options\}\n?", "", text)
    # In one pass, because a question may contain "{options}".
    place = r"\{(" + "|".join(filled_places()) + r")\}"
    return re.sub(place, lambda found: values[found[1]], text)


def clock(seconds):
    return chat.stamp_text(seconds, 0, "clock")


def stamp_kind(args):
    """The stamp before a frame: a kind of chat.stamp_text, or "grounding", see stamp_for."""
    if args.stamps:
        return None
    return "grounding" if args.protocol_set == "paper" else "none"


def stamp_for(task, stamp):
    """The stamp of a task's frames. "grounding": times if the task asks for times, else none. The
    paper's evaluation sends grounding tasks as a video, which carries times."""
    if stamp != "grounding":
        return stamp
    return None if task["type"] == "grounding" else "none"


def opening(task, num_frames, agent, subtitles, duration,
            user=QUESTION, system=None, stamp=None, label="{}.", text_first=False, tail="",
            between="\n"):
    """
    Protocol.opening of most systems: a system text, then one user turn of frames and text.

    user: template, see filled. tail: follows unchanged, except {video} and {duration}.
    """
    if "{subtitles}" not in user:  # publishers' texts have no place for them
        user = "{subtitles}" + user
    tail = tail.replace("{video}", os.path.basename(task["video"]))
    tail = tail.replace("{duration}", clock(duration))
    text = filled(user, task, duration, subtitles, label, between) + tail
    # The spec of the overview: the frames themselves are loaded by the loop.
    frames = {"type": "video", "video": task["video"], "frames": num_frames,
              "stamp": stamp_for(task, stamp)}
    if text_first:
        content = [{"type": "text", "text": text}, frames]
    else:
        content = [frames, {"type": "text", "text": text}]  # nothing between, as the publishers
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": content}]


# ------------------------------------------------------------------------------------------------
# One generation, no calls


def prompt_as_system(texts, args):
    first = partial(opening, system=texts[0], stamp=stamp_kind(args))
    return Protocol(opening=first, schema=None)


def prompt_as_user(texts, args):
    first = partial(opening, user=texts[0], stamp=stamp_kind(args))
    return Protocol(opening=first, schema=None)


def wrapped_files(name):
    types = "TYPE_TEMPLATE[multiple choice] and TYPE_TEMPLATE[free-form]"
    return f"QUESTION_TEMPLATE, {types} of {name}'s src/eval_bench.py, filled at {{Question}}"


def wrapped_texts():
    """The text around the question, and the text after that for a letter and for words."""
    return [f"{{Question}}\n{THINK}", " The final answer is the letter of one option.",
            " The final answer is a text."]


def wrapped_protocol(texts, args, header="\n"):
    """No system text. {Question} is the question; with options: header, options, an empty line."""
    first = partial(wrapped_opening, texts=texts, header=header, stamp=stamp_kind(args))
    return Protocol(opening=first, schema=None)


def wrapped_opening(task, num_frames, agent, subtitles, duration, texts, header, stamp):
    around, letter, words = texts
    question = "{question}" + (header + "{options}\n" if task.get("options") else "")
    # The publishers' texts do not say how to write times, so ours do.
    ends = {"mcq": letter, "open": words, "list": " {style}", "grounding": " {style}"}
    user = around.replace("{Question}", question) + ends[task["type"]]
    return opening(task, num_frames, agent, subtitles, duration, user=user, stamp=stamp)


def videochat_protocol(texts, args):
    """The text stands before the video: one text for questions, another for times of an event."""
    # The publisher's code replaces these places, which are no fields of str.format.
    places = {"[QUESTION]": "{question}", "[EVENT]": "{event}", "[OPTION]": "{option_list}"}
    for place, name in places.items():
        texts = [text.replace(place, name) for text in texts]
    first = partial(videochat_opening, texts=texts, stamp=stamp_kind(args))
    return Protocol(opening=first, schema=None)


def videochat_opening(task, num_frames, agent, subtitles, duration, texts, stamp):
    user = texts[task["type"] == "grounding"]
    return opening(task, num_frames, agent, subtitles, duration,
                   user=user, stamp=stamp, text_first=True, label="({})")


def qwen3_text():
    return "{subtitles}{style}\nQuestion: {question}\n{options}\nAnswer:"


def time_r1_protocol(texts, args):
    """One text for questions, another for times of an event. The answer begins after an empty
    thought."""
    asked, timed = texts
    # The publisher's code fills {} in order; our texts have named places.
    asked = asked.replace("{}", "{question}", 1).replace("{}", "{options}", 1)
    texts = [asked, timed.replace("{}", "{event}")]
    first = partial(time_r1_opening, texts=texts, stamp=stamp_kind(args))
    return Protocol(opening=first, prefill="<think>\n</think>\n", schema=None)


def time_r1_opening(task, num_frames, agent, subtitles, duration, texts, stamp):
    return opening(task, num_frames, agent, subtitles, duration,
                   user=texts[task["type"] == "grounding"], stamp=stamp, label="({})",
                   system="You are a helpful assistant.")


def rewatch_text():
    return (
        f"{QUESTION}\nThe video runs from 00:00 to {{length}}. You may note what you look at "
        "between <action> and </action> and what you see between <observation> and "
        f"</observation>. {THINK}"
    )


# ------------------------------------------------------------------------------------------------
# Answers to calls. Only `windows`, `load_all` and the functions `*_answer` wait for frames. Each
# `*_answer` is a Protocol.answer, (records, calls, episode, sampler, turn) -> Reply.


async def windows(records, calls, episode, sampler, spec_of=None):
    """
    Loads the windows of the calls that are run -> (spec, Frames) or (None, None) for every call.
    Fills the records. spec_of: (call, task, agent) -> spec of video.load.
    """
    agent = sampler.agent
    wanted = rollout.admitted(records, calls, agent.max_parallel)  # indices of calls
    specs = [(spec_of or rollout.window_spec)(calls[i], episode.task, agent) for i in wanted]
    found = [(None, None)] * len(calls)
    for i, spec, frames in zip(wanted, specs, await load_all(sampler, specs, episode.film)):
        if note_frames(records[i], frames):
            found[i] = spec, frames
    return found


async def load_all(sampler, specs, film):
    """Loads all specs at once, in the decode threads -> Frames of each, or the VideoError or
    ValueError as a value. film: see Source.load_window."""
    jobs = [sampler.pump.load(sampler.source.load_same, spec, film) for spec in specs]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        expected = isinstance(result, (video.VideoError, ValueError))
        if isinstance(result, BaseException) and not expected:
            raise result
    return results


def note_frames(record, frames):
    """Notes Frames or an error in a call's record -> whether there are Frames."""
    if isinstance(frames, Exception):
        rollout.refuse_window(record, frames)
        return False
    seconds = [round(float(second), 3) for second in frames.seconds]
    record.update(status="ok", frames_seen=len(seconds), seconds_seen=seconds)
    return True


def add_video(reply, spec, frames, stamp):
    """Adds frames to a reply -> the content item that stands for the frames."""
    reply.specs.append(spec)
    reply.frames.append(frames)
    return {"type": "video", "video": spec["video"], "stamp": stamp}


def tagged(text):
    """Text in tool response tags. The tags are trusted and become special tokens; the text is not.
    """
    return [
        {"type": "text", "text": "<tool_response>\n", "trusted": True},
        {"type": "text", "text": text},
        {"type": "text", "text": "\n</tool_response>", "trusted": True},
    ]


async def frames_answer(records, calls, episode, sampler, turn, stamp):
    """A user message for every call: the frames of the window, or why there are none."""
    found = await windows(records, calls, episode, sampler)
    return user_replies(records, found, stamp_for(episode.task, stamp))


def user_replies(records, found, stamp):
    """The frames, then their description in tool response tags, as the paper's authors evaluate."""
    reply = Reply([])
    for record, (spec, frames) in zip(records, found):
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
    """ParaVT as trained (sub-agents return summaries), or as the authors evaluate (--set
    crop_reply=frames stamps=false force_answer=true; with --protocol-set paper a call names the
    video)."""
    own, paper = not args.prompt_file, args.protocol_set == "paper"
    summaries = args.crop_reply == "summary"
    if own and summaries and args.stamps and not args.force_answer and not paper:
        return Protocol()  # the very prompts of training
    stamp = stamp_kind(args)
    # A text that contains the schema declares the tool, so the template must not declare it again.
    inside = not own and "{tool_schema}" in texts[0]
    schema = partial(crop_schema, frames=not summaries, path=paper or inside)
    system = None if own else texts[0].replace("{tool_schema}", json.dumps(schema()[0]))
    protocol = Protocol(
        opening=partial(paravt_opening, system=system, stamp=stamp, frames=not summaries,
                        path=paper or inside),
        answer=summaries_answer if summaries else partial(frames_answer, stamp=stamp),
        schema=None if inside else schema)
    if args.force_answer:
        protocol = replace(protocol, force=force_text, force_tokens=force_tokens)
    return protocol


def paravt_opening(task, num_frames, agent, subtitles, duration, system, stamp, frames, path,
                   user=None):
    """Training's first messages with another stamp and system text (None: training's, adapted).
    frames: calls are answered with frames. path: the video's name is told. user: a template."""
    stamp = stamp_for(task, stamp)
    messages = rollout.main_messages(task, num_frames, agent.tools, subtitles)
    if system is None:
        system = paravt_text(agent.tools, frames, timed=stamp is None)
    messages[0]["content"] = system
    overview, asked = messages[1]["content"]
    overview["stamp"] = stamp
    if user:
        user = user if "{subtitles}" in user else "{subtitles}" + user
        asked["text"] = filled(user, task, duration, subtitles)
    if path and agent.tools:
        named = NAMED_PATH.replace("{video}", os.path.basename(task["video"]))
        asked["text"] += (" " if user else "\n") + named
    return messages


def paravt_text(tools, frames, timed):
    """Training's system text, without times if not timed, and with frames instead of summaries."""
    text = rollout.main_prompt(tools)
    if not timed:
        text = text.replace(", each after its time", "")
    if frames:
        text = text.replace("returns a short summary of its window", "returns frames of its window")
    return text


def crop_schema(frames, path):
    """Training's schema. frames: calls return frames. path: a call names the video."""
    schema = rollout.tool_schema()[:1]  # crop_video, whichever tools training adds
    function = schema[0]["function"]
    arguments = function["parameters"]
    if frames:
        function["description"] = "Look closely at one window of the video. Returns frames of it."
    if path:  # the authors' three arguments; the model does not choose the number of frames
        named = {"type": "string", "description": "path of the video"}
        times = {name: arguments["properties"][name] for name in ("start_time", "end_time")}
        arguments.update(properties={"video_path": named, **times},
                         required=["video_path", *times])
    return schema


def paravt_held(args):
    return crops_held(args) if args.crop_reply == "frames" else (0, 0)


def crops_held(args):
    """Every call of every turn may add a window to the context."""
    return args.max_turns * args.max_parallel, args.sub_frames


def force_text(task):
    """The request for an answer after the last round of calls, as the authors evaluate, in our
    words."""
    if task["type"] == "grounding":
        return "Answer now, in this form: The event happens in 10.0 - 20.0 seconds."
    if task["type"] == "mcq":
        return "Answer now, with the letter of one option alone."
    return "Answer now, in a few words."


def force_tokens(task):
    """Tokens of that answer in the authors' evaluation."""
    return 128 if task["type"] == "grounding" else 64


# ------------------------------------------------------------------------------------------------
# LongVT: crop_video as a declared tool; a tool message holds the frames and a sentence


def longvt_text():
    return (
        "Reason between <think> and </think>. Call crop_video when you need to see a part of the "
        "video closely; when you know the answer, write it between <answer> and </answer>."
    )


def longvt_protocol(texts, args):
    stamp = stamp_kind(args)
    # The publisher's prompt is no template. The text follows the question unchanged.
    tail = f" {texts[0]} {NAMED_PATH.replace('The video', 'The Video')}"
    first = partial(opening, tail=tail, stamp=stamp)
    schema = partial(crop_schema, frames=True, path=True)
    return Protocol(opening=first, answer=partial(longvt_answer, stamp=stamp),
                            schema=schema)


async def longvt_answer(records, calls, episode, sampler, turn, stamp):
    refuse_beyond(records, calls, episode.duration)
    found = await windows(records, calls, episode, sampler)
    return tool_replies(records, found, stamp_for(episode.task, stamp))


def refuse_beyond(records, calls, duration):
    """Makes a window that leaves the video (seconds) an error. Other protocols clamp it."""
    for call, record in zip(calls, records):
        if call.error is not None:
            continue
        if call.start < 0:
            why = "start_time is below 0"
        elif call.start >= duration:
            why = f"start_time lies behind the end of the video, {duration:.1f}s"
        elif call.end > duration:
            why = f"end_time lies behind the end of the video, {duration:.1f}s"
        else:
            continue
        call.error = why  # so the call is not run
        record.update(status="error", summary=f"error: {why}")  # told to the model


def tool_replies(records, found, stamp):
    """A tool message for every call: frames and a sentence, or the reason as text."""
    reply = Reply([])
    for record, (spec, frames) in zip(records, found):
        content = record["summary"]
        if frames is not None:
            said = "The frames of the window are shown above. Go on with your analysis."
            record["summary"] = said
            content = [add_video(reply, spec, frames, stamp), {"type": "text", "text": said}]
        reply.messages.append({"role": "tool", "content": content})
    return reply


# ------------------------------------------------------------------------------------------------
# VideoZoomer: one zoom a turn, answered by stamped frames


def videozoomer_text():
    return (
        "You watch a video through a few frames, each after a tag with its number and time. To see "
        "a part of it at a higher frame rate, write\n"
        '<video_zoom> {"segment": [start, end], "fps": frames per second} </video_zoom>\n'
        "once in a turn, with the times in seconds and at most 16 frames in all. Think between "
        "<think> and </think> first. When you know the answer, write <answer> \\boxed{answer} "
        "</answer>."
    )


def videozoomer_protocol(texts, args):
    first = partial(opening, system=texts[0], stamp="frame")
    # A turn ends with the call: text after the call would be about frames not yet seen.
    return Protocol(opening=first, parse=parse_zoom, answer=videozoomer_answer,
                            schema=None, stop=("</video_zoom>",))


def videozoomer_held(args):
    return args.max_turns, 16


def last_block(text, tag):
    """Contents of the last closed <tag> of a text, or None. Linear time for any text."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def parse_zoom(text, think_open=False):
    """Last <video_zoom> of a turn -> [one call] or []. num_frames is fps times seconds."""
    body = last_block(rewards.visible(text, think_open), "video_zoom")
    if body is None:
        return []
    start = end = frames = None
    try:
        call = json.loads(body[:1000])  # bounded: a model may write any length
        start, end = (rewards.to_seconds(second) for second in call["segment"])
        fps = rewards.to_seconds(call["fps"])
        if None in (start, end, fps) or not start < end or fps <= 0:
            error = "segment must be [start, end] in seconds with start < end, and fps above 0"
        else:
            frames = int(fps * (end - start))  # OverflowError if the product is infinite
            error = zoom_error(frames)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        error = 'expected {"segment": [start, end], "fps": n}'
    return [rewards.ToolCall("video_zoom", start, end, frames, error)]


def zoom_error(frames):
    if frames > 16:
        return f"{frames} frames are more than 16: take a shorter segment or a lower fps"
    return "the segment holds no frame at this fps" if frames < 1 else None


def zoom_spec(call, task, agent):
    return {"video": task["video"], "start": call.start, "end": call.end,
            "num_frames": call.num_frames, "max_frames": 16}


async def videozoomer_answer(records, calls, episode, sampler, turn):
    ((spec, frames),) = await windows(records, calls, episode, sampler, zoom_spec)
    return zoom_reply(records[0], spec, frames, last=turn == sampler.agent.max_turns - 1)


def zoom_reply(record, spec, frames, last):
    """One user message: the frames inside tool response tags, or the error."""
    reply = Reply([])
    if frames is None:
        wrong = {"type": "text", "text": "\nThink about what went wrong, then go on."}
        content = [*tagged(record["summary"]), wrong]
    else:
        record["summary"] = "The frames of the segment:"
        head = "<tool_response>\nThe frames of the segment:\n"
        content = [
            {"type": "text", "text": head, "trusted": True},
            add_video(reply, spec, frames, "frame"),
            {"type": "text", "text": "\n</tool_response>", "trusted": True},
            {"type": "text", "text": "\nGo on thinking, then zoom again or answer."},
        ]
    if last:
        content.append({"type": "text", "text": " Do not zoom again: answer now."})
    reply.messages.append({"role": "user", "content": content})
    return reply


# ------------------------------------------------------------------------------------------------
# Conan: eight new frames a round, from the clips that the model names


def conan_texts():
    """First round, further round, last round of a question with options; then without."""
    contract = (
        "Rate between <score> and </score> how well the frames so far answer the question, reason "
        "between <think> and </think>, name the clips you want to see between <clip> and </clip> "
        "as HH:MM:SS-HH:MM:SS, separated by commas, or leave it empty when you need none, and "
        "write your answer between <answer> and </answer>."
    )
    asked, options = "Question: {question}", "\nOptions: {options}"
    rounds = [
        f"{asked}{options}\nThe frames above carry their times. {contract}",
        f"These are frames of the clips you asked for. {contract} {asked}{options}",
        "These are the last frames. Reason between <think> and </think> and write your answer "
        f"between <answer> and </answer>. {asked}{options}",
    ]
    return rounds + [text.replace(options, "") for text in rounds]


def conan_protocol(texts, args):
    first = partial(conan_opening, texts=texts)
    answer = partial(conan_answer, texts=texts)
    return Protocol(opening=first, parse=parse_clips, answer=answer, schema=None)


def conan_rounds(texts, task):
    """-> the texts of the three rounds of a task."""
    return texts[:3] if task.get("options") else texts[3:]


def conan_opening(task, num_frames, agent, subtitles, duration, texts):
    return opening(task, num_frames, agent, subtitles, duration, user=conan_rounds(texts, task)[0],
                   stamp="clock", between=", ")


def conan_held(args):
    return args.max_turns, 8


def parse_clips(text, think_open=False):
    """First <clip> of a turn -> a call for every HH:MM:SS-HH:MM:SS that runs forward. Plain seconds
    are not Conan's form. A turn without a call ends the episode."""
    body = text.partition("<clip>")[2].partition("</clip>")
    if not body[1]:  # never closed
        return []
    clock = r"(\d{1,2}:\d{2}:\d{2})"
    calls = []
    for start, end in re.findall(rf"{clock}\s*-\s*{clock}", body[0][:1000])[:16]:
        times = [sum(int(n) * 60**i for i, n in enumerate(reversed(t.split(":"))))
                 for t in (start, end)]
        if times[0] < times[1]:
            calls.append(rewards.ToolCall("clip", float(times[0]), float(times[1]), None, None))
    return calls


async def conan_answer(records, calls, episode, sampler, turn, texts):
    last = turn == sampler.agent.max_turns - 1
    rounds = conan_rounds(texts, episode.task)
    text = filled(rounds[2] if last else rounds[1], episode.task, between=", ")
    path = {"video": episode.task["video"]}
    starts = await sampler.pump.load(frame_starts, sampler.source, path)
    wanted = conan_times(records, calls, episode, starts)
    frames = None  # if all frames have been seen, or the video breaks off: text alone
    if wanted:
        spec = {**path, "times": wanted}
        (frames,) = await load_all(sampler, [spec], episode.film)
    if frames is None or isinstance(frames, (video.VideoError, ValueError)):
        return Reply([{"role": "user", "content": text}])
    episode.notes["seen"].update(wanted)
    reply = Reply([])
    content = [add_video(reply, spec, frames, "clock"), {"type": "text", "text": text}]
    reply.messages.append({"role": "user", "content": content})
    return reply


def frame_starts(source, spec):
    """-> seconds at which the frames of a video come on display; [] for a broken video."""
    try:
        starts, info = source.cache.index(video.resolve(spec["video"], source.root))
    except video.VideoError:
        return []
    return [start for start in map(float, starts) if 0 <= start < info.duration]


def conan_times(records, calls, episode, starts):
    """
    Seconds of the next frames in order: 8, or all that are left. Fills the records.

    Every clip gives one frame, and the rest in proportion to its unseen frames, both ends among
    them. If the clips have too few, the whole video gives the rest. Departs from the publisher's
    code: "seen" are the frames that were shown, not those at their rounded times, and a video with
    too few frames shows no frame twice.
    """
    overview = {float(second) for second in episode.context.frames[0].seconds}
    seen = episode.notes.setdefault("seen", overview)
    unseen = [start for start in starts if start not in seen]
    # A window ends with the frame that is on display at its end.
    clips = [[s for s in unseen if call.start <= s <= call.end] for call in calls]
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
    rest = [start for start in unseen if start not in wanted]
    wanted.update(ends_and_between(rest, 8 - len(wanted)))
    return ends_and_between(sorted(wanted), 8)


def ends_and_between(items, n):
    """n of the items, the first and the last among them; all if there are fewer."""
    if not 1 < n < len(items):
        return items[: max(n, 0)]
    step = (len(items) - 1) / (n - 1)
    return [items[round(i * step)] for i in range(n)]


# ------------------------------------------------------------------------------------------------
# SAGE: step 1 sees the frames. Every further step is a new conversation of text alone: context,
# query and the latest ten results. The same model serves tools that look, on the frames of the
# window. Web and speech tools do not exist here, and their responses say so.


SAGE_VIDEO = "Video Path: {video} of duration {duration}."


def sage_tools():
    """-> SAGE's tools as JSON lines, in our words, for <<<tools>>>."""
    window = {"timestamp_start": "string", "timestamp_end": "string"}
    of_video = {"video_path": "string", **window}
    takes = {
        "identify_timestamps_visually": (of_video | {"event": "string"},
                                         "Find an event in at most ten minutes of the video."),
        "extract_parts_from_timestamp": (of_video | {"extract_type": "string"},
                                         "Cut out at most five minutes -> media_paths."),
        "perform_reasoning": ({"query": "string", "media_paths": "array"},
                              "Answer a query about the video or parts of it."),
        "verbal_transcript": (of_video, "What is said in a part of the video."),
        "unified_web_search": ({"query": "string"}, "Search the web."),
        "parse_web_data": ({"website_url": "string"}, "Read a page of the web."),
    }
    lines = []
    for name, (arguments, does) in takes.items():
        properties = {argument: {"type": kind} for argument, kind in arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(arguments)}
        function = {"name": name, "description": does, "parameters": parameters}
        lines.append(json.dumps({"type": "function", "function": function}))
    return "<tools>\n" + "\n".join(lines) + "\n</tools>"


def sage_texts():
    """System text of the first step, system text of later steps, user text of later steps."""
    offer = "These tools may be called, one at a time, with times as HH:MM:SS:\n<<<tools>>>\n"
    wanted = (
        '"final_answer": text or null, "recommended_tools": {"needed": true or false, '
        '"tool_calls": [{"rationale": text, "name": text, "arguments": {}}]}}</json>'
    )
    return [
        f"You see a few frames of a video and a query about it. {offer}"
        'Reply with <json>{"video_context": text, "query_intent": text, ' + wanted,
        f"You answer a query about a video from the results of tools. {offer}"
        'Reply with <json>{"answerable": {"verdict": true or false, "reasoning": text}, ' + wanted,
        "Last tool: <<<previous_tool_call>>>\nVideo context: <<<visual_context>>>\n"
        "Query: <<<query>>>\n<<<video_info>>>\nResults:\n<<<tools_so_far>>>",
    ]


def placed(text, **values):
    """Fills <<<name>>> as the publisher's code does; in one pass, as results may contain places."""
    return re.sub(r"<<<(\w+)>>>", lambda found: values.get(found[1], found[0]), text)


def sage_protocol(texts, args):
    start, system = [placed(text, tools=sage_tools()) for text in texts[:2]]
    first = partial(opening, system=start, stamp=stamp_kind(args), label="({})",
                    tail="\n" + SAGE_VIDEO)
    answer = partial(sage_answer, system=system, message=texts[2])
    return Protocol(opening=first, parse=parse_sage, answer=answer, schema=None)


def sage_object(text):
    """JSON object of a SAGE turn, in <json> tags, ``` fences or bare, or None. Trailing commas are
    repaired. Text after the object is ignored."""
    text = text[:100_000]
    for fence in ("<json>", "```json", "```", ""):  # the last one that opens, closed or not
        if fence not in text:
            continue
        begin = max(0, text.rfind(fence + "\n{"), text.rfind(fence + "{")) if fence else 0
        start = text.find("{", begin)
        if start < 0:
            continue
        try:
            whole = re.sub(r",(\s*[}\]])", r"\1", text[start:])
            found, _ = json.JSONDecoder().raw_decode(whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def sage_final(turns, think_open=False):
    """System.final: the final answer of the last turn, as text."""
    found = sage_object(turns[-1]) if turns else None
    said = found.get("final_answer") if found else None
    if said in (None, "", "null"):
        return None
    return said if isinstance(said, str) else as_text(said)


def as_text(value):
    """A value that was read as JSON -> JSON. A value may be just too deep to be written again."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "{}"


def parse_sage(text, think_open=False):
    """A SAGE turn -> [the first tool call], or [] after a final answer. A turn with neither is a
    call with an error, so the model is told and asked again.

    A final answer ends the first step unless tools are needed too. It ends a later step only if the
    verdict is that the query can be answered, because such a step may hold a guess beside a call.
    """
    found = sage_object(text)
    if found is None:
        return [rewards.ToolCall("", None, None, None, "the reply is not one JSON object")]
    recommended = found.get("recommended_tools")
    calls = recommended.get("tool_calls") if isinstance(recommended, dict) else None
    if found.get("final_answer") not in (None, "", "null"):
        verdict = found.get("answerable")  # later steps alone have one
        if isinstance(verdict, dict):
            ends = bool(verdict.get("verdict"))
        else:
            ends = not (calls and recommended.get("needed"))
        if ends:
            return []
    first = calls[0] if isinstance(calls, list) and calls else None
    name = first.get("name") if isinstance(first, dict) else None
    arguments = first.get("arguments") if isinstance(first, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        error = "neither a final answer nor a tool call with name and arguments"
        return [rewards.ToolCall("", None, None, None, error)]
    start = rewards.to_seconds(arguments.get("timestamp_start"))
    end = rewards.to_seconds(arguments.get("timestamp_end"))
    # The name goes into a record and into the next prompt, so cut and printable.
    call = rewards.ToolCall(rewards.shown(name), start, end, None, None)
    call.arguments = arguments  # some tools have more than a window
    return [call]


async def sage_answer(records, calls, episode, sampler, turn, system, message):
    call, record = calls[0], records[0]
    # Path -> (start, end) seconds: the video's own path, and names that we make up.
    whole = {os.path.basename(episode.task["video"]): (0.0, episode.duration)}
    media = episode.notes.setdefault("media", whole)
    question = sage_serve(call, record, media)
    if question is not None:
        record.update(start=call.start, end=call.end)
        # A sub-agent is told the question of its task, which is here the question to the tool.
        asking = replace(episode, task={**episode.task, "question": question})
        await rollout.serve([record], [call], asking, sampler, turn)
    return sage_reply(call, record, episode, system, message)


def sage_serve(call, record, media):
    """Fills the record of a call that needs no model -> None; else -> the question to the model.
    A call with media_paths gets their window."""
    if call.error:
        return None
    if call.name in ("unified_web_search", "parse_web_data", "verbal_transcript"):
        record.update(status="unavailable", summary="error: this tool is not available")
        return None
    limits = {"identify_timestamps_visually": 600, "extract_parts_from_timestamp": 300}  # seconds
    asked = str(call.arguments.get("event") or call.arguments.get("query") or "")[:2000]
    if call.name == "perform_reasoning":  # on the last named part that exists
        paths = call.arguments.get("media_paths")
        paths = paths if isinstance(paths, list) else []
        # Only the last name counts: models put folders before it, as the publisher's code does.
        names = [os.path.basename(path) for path in paths if isinstance(path, str)]
        known = [media[name] for name in names if name in media]
        if not known:
            why = "error: media_paths names neither the video nor what was extracted"
            record.update(status="error", summary=why)
            return None
        call.start, call.end = known[-1]
        return asked
    if call.name not in limits:
        why = f"error: unknown tool {call.name}"
        record.update(status="error", parseable=False, summary=why)
        return None
    limit, missing = limits[call.name], call.start is None or call.end is None
    if missing or not call.start < call.end or call.end - call.start > limit:
        why = f"must be times at most {limit} seconds apart"
        record.update(status="error", summary=f"error: timestamp_start and timestamp_end {why}")
        return None
    if call.name == "extract_parts_from_timestamp":
        path = f"part{len(media)}"  # a name for the window: no file is written
        media[path] = call.start, call.end
        record.update(status="ok", summary=f"media_paths: [{path}]")
        return None
    return f"{asked}\nGive times as HH:MM:SS."


def sage_reply(call, record, episode, system, message):
    """The conversation of the next step, with the result of this step."""
    notes, task = episode.notes, episode.task
    said = sage_object(episode.turns[-1]) or {}
    context = notes.setdefault("context", str(said.get("video_context", ""))[:4000])  # of step 1
    results = notes.setdefault("results", [])
    results.append(f"{call.name or 'reply'}_#{len(results) + 1}: {record['summary']}")
    given = as_text(getattr(call, "arguments", {}))[:2000]
    info = SAGE_VIDEO.replace("{video}", os.path.basename(task["video"]))
    user = placed(
        message, visual_context=context, tools_so_far="\n".join(results[-10:]),
        query=filled("{question}\n{options}\n{style}", task, label="({})"),
        video_info=info.replace("{duration}", clock(episode.duration)),
        previous_tool_call=f"{call.name} with arguments {given}" if call.name else "-")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Reply(messages, fresh=True)
