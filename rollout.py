"""
rollout.py: the agent. Prompts, one episode, fan-out and gather: the one loop that RL, evaluation of
our agent and this CLI share.

One episode, for a task with overview budget K:
  main agent   <system><K frames><question> -> turn 1
  fan-out      turn 1 holds n crop_video calls: n sub-agents, the same weights, each in a fresh
               context with the frames of one window; each returns a short summary
  gather       ALL n responses, in call order, become ONE user turn with ONE generation prompt
  main agent   turn 2, ..: at most --max-turns tool turns, then one turn that must answer
Every main turn starts with a forced `<think>\\n` (--think-prefix). Ids only grow:
next prompt = previous ids + sampled ids + glue; nothing sampled is decoded and encoded again.

An episode is a coroutine that awaits its frames and its samples. The pump (engine.py) feeds all
episodes into one engine, so a fan-out starts the moment its turn ends. K is a draw per prompt
(--frames gated) from a digest of (seed, step, task id).

Departs from the paper: a sub-agent is told the question (--set sub_question=false: it is not);
calls that a model writes in its last turn are not run. Calls inside a thought that never closes are
run; --set open_thought=drop drops them, as a serving stack does whose reasoning parser comes before
its tools.

Reads:  a checkpoint folder, task JSONL.
Writes: rollout JSONL, one episode a line, enough to train on without the engine.

CPU toy:  python rollout.py --preset toy --ckpt sft_out --data toy/rl.jsonl --group 4 --limit 8 \\
            --show 2 --out r.jsonl
1 GPU:    python rollout.py --ckpt sft_out --data rl.jsonl --group 8 --out r.jsonl
8 GPUs:   one process per GPU, each with its own --data part; grpo.py has one engine per rank
"""
import argparse
import asyncio
import hashlib
import itertools
import json
import os
import re
import string
import sys
import time
from dataclasses import dataclass, field, fields

import chat
import launch
import rewards
import video
from engine import Limits, Pump, Request, VllmEngine, in_flight

# ------------------------------------------------------------------------------------------------
# Prompts: the one home of every word put before the model. SFT data, RL and evaluation build here.


def main_prompt(tools=True):
    calls = ("If the frames do not show what you need, call crop_video once for each window you "
             "want to see closely; several calls in one turn run at the same time. Every call "
             "returns a short summary of its window.\n")
    return ("You answer questions about a long video. A few frames from all over it are shown, "
            "each after its time.\n"
            "Think first, between <think> and </think>.\n" + (calls if tools else "")
            + "When you know the answer, write it between <answer> and </answer>.")


def sub_prompt():
    return ("You watch one short window of a longer video. Say in a few words what happens in it "
            "that helps to answer the question. Times are those of the whole video.")


def empty_summary():
    """The response of a window in which its sub-agent found nothing to say."""
    return "(nothing to report)"


def tool_schema():
    start = "start of the window in seconds from the start of the video"
    frames = "frames to look at; default: one per second, at most 16"
    does = ("Look closely at one window of the video. "
            "Returns a short text summary of what happens there.")
    arguments = {"type": "object", "required": ["start_time", "end_time"], "properties": {
        "start_time": {"type": "number", "description": start},
        "end_time": {"type": "number", "description": "end of the window in seconds"},
        "num_frames": {"type": "integer", "description": frames}}}
    function = {"name": "crop_video", "description": does, "parameters": arguments}
    return [{"type": "function", "function": function}]


def answer_style(task_type):
    return {"mcq": "Answer with the letter of one option.",
            "open": "Answer with a few words.",
            "list": "Answer with a list, in order, separated by commas.",
            "grounding": "Answer with the start and the end in seconds, for example: 12.5 - 20.0",
            }[task_type]


def question_text(task):
    """Task -> the text after the frames: question, options, how to answer."""
    options = bare_options(task.get("options") or [])
    lines = [task["question"]]
    lines += [f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options)]
    lines.append(answer_style(task["type"]))
    return "\n" + "\n".join(lines)


def main_messages(task, num_frames, tools=True, subtitles=""):
    """The main agent's first context: K overview frames, subtitles where there are any,
    question."""
    spoken = f"\nSubtitles:\n{subtitles}\n" if subtitles else ""
    overview = {"type": "video", "video": task["video"], "frames": num_frames}
    asked = {"type": "text", "text": spoken + question_text(task)}
    return [{"role": "system", "content": main_prompt(tools)},
            {"role": "user", "content": [overview, asked]}]


def sub_messages(task, window, question=True):
    """A sub-agent's context: the frames of one window (as video.load reads it), its times, the
    question."""
    text = f"\nWindow: {window['start']:g} to {window['end']:g} seconds."
    if question:
        text += f"\nQuestion: {task['question']}"
    seen = {"type": "video", "video": task["video"], **window}
    return [{"role": "system", "content": sub_prompt()},
            {"role": "user", "content": [seen, {"type": "text", "text": text}]}]


# ------------------------------------------------------------------------------------------------
# Draws. Digests, since Python's hash() of a string differs from process to process.


def gated_budgets():
    """The overview frames K that nFrames gating draws from (paper)."""
    return (4, 8, 16, 32, 64)


def frame_budget(seed, step, task_id):
    """nFrames gating: K ~ Uniform, one draw per prompt and step, the same on every rank."""
    digest = hashlib.sha256(f"K/{seed}/{step}/{task_id}".encode()).digest()
    choices = gated_budgets()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


def overview_frames(frames, seed, step, task_id):
    """--frames -> K of a task in a step: drawn where it is "gated"."""
    return frame_budget(seed, step, task_id) if frames == "gated" else int(frames)


def request_seed(*parts):
    """Stable 31-bit seed of one generation from (seed, step, task, sample, turn, ...)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


# ------------------------------------------------------------------------------------------------
# What an episode is made of


@dataclass
class Agent:
    """The rules of an episode. Every field is a flag of the CLIs, or one of `settings`."""

    temperature: float = 0.7
    max_new_tokens: int = 2048  # per main-agent turn
    sub_max_new_tokens: int = 512
    context: int = 32768  # tokens of one context, answer included
    max_turns: int = 3  # tool turns; one more turn always follows, which must answer
    max_parallel: int = 5  # calls run per turn; further ones get a response that says so
    dispatch: str = "parallel"  # or "sequential"; "turns": evaluation/systems.py alone
    tools: bool = True
    think_prefix: bool = True
    open_thought: str = "run"  # calls in a thought that never closes; "drop": they are only thought
    sub_frames: int = 16
    sub_fps: float = 1.0
    sub_question: bool = True  # a sub-agent is told the question
    seed: int = 0


@dataclass
class Source:
    """Where frames come from: root folder, size bounds, the cache of this stage."""

    root: str
    cache: video.FrameCache
    min_pixels: int = 1024
    max_pixels: int = 50176
    crop_pixels: int = 0  # of a window's frames, at most; 0 = max_pixels
    subtitles: object = None  # (task, seconds of the frames [K]) -> text shown with the question
    snap: bool = False  # overviews: key frames where they are near, see video.py
    own_labels: bool = False  # tasks of a user's file, whose labels are checked; no benchmark's

    def overview_spec(self, task, num_frames):
        """The overview of a task as `load` reads it, and as a rollout records it."""
        spec = {"video": task["video"], "frames": num_frames}
        return {**spec, "snap": True} if self.snap else spec

    def load(self, spec):
        """{"video", "frames"} or {"video", "start", "end", ..} -> Frames."""
        most = self.max_pixels if "frames" in spec else self.crop_pixels or self.max_pixels
        return video.load(spec, self.root, self.cache, self.min_pixels, most)

    def load_overview(self, spec, task):
        """-> (Frames, seconds of the video, text of its subtitles)."""
        frames = self.load(spec)
        spoken = self.subtitles(task, frames.seconds) if self.subtitles else ""
        return frames, self.duration(spec), spoken

    def load_window(self, spec):
        """A crop as the model asked for it -> (the same, clamped to the video; its Frames). Raises
        ValueError beyond the end."""
        frames = self.load(spec)
        start, end = max(0.0, spec["start"]), min(spec["end"], self.duration(spec))
        return {**spec, "start": start, "end": end}, frames

    def clusters(self, specs):
        """Windows of one turn -> lists of their places: those that are decoded in one go."""
        return video.clusters(specs, self.root, self.cache)

    def preload(self, specs):
        """Windows of a cluster -> the cache."""
        most = self.crop_pixels or self.max_pixels
        video.preload(specs, self.root, self.cache, self.min_pixels, most)

    def duration(self, spec):
        return video.probe(video.resolve(spec["video"], self.root), self.cache).duration


@dataclass
class Context:
    """Ids, mask and log-probs of one agent context; they only ever grow, and together."""

    ids: list = field(default_factory=list)  # expanded: one placeholder per vision token
    compact: list = field(default_factory=list)  # one placeholder per frame: what engines take
    mask: list = field(default_factory=list)  # 1 = sampled by this policy, and trained
    logps: list = field(default_factory=list)  # of the distribution sampled from; 0 where mask is 0
    items: list = field(default_factory=list)  # [model.VisionItem]
    frames: list = field(default_factory=list)  # [video.Frames], one per item

    def insert(self, ids, compact=None):
        """Tokens nobody sampled: headers, tool responses. compact: where frames are among them."""
        self.ids += ids
        self.compact += ids if compact is None else compact
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def sampled(self, ids, logps):
        self.ids += ids
        self.compact += ids
        self.mask += [1] * len(ids)
        self.logps += logps

    def request(self, name, **settings):
        """The context as it is now; it grows on while the request waits, so lists are copied."""
        return Request(name, list(self.compact), list(self.ids), list(self.items),
                       list(self.frames), **settings)


def open_context(codec, messages, specs, frames, tools=None):
    """Messages whose frames are decoded -> Context."""
    context = Context(frames=list(frames))
    context.items = [chat.vision_item(spec, f) for spec, f in zip(specs, frames)]
    context.insert(*chat.encode_prompt(codec, messages, context.items, tools))
    return context


@dataclass
class Episode:
    """One rollout; `to_json` is a line of the rollout JSONL."""

    task: dict
    group: str
    sample: int
    frame_budget: int
    version: int  # of the weights: the step
    status: str = "ok"  # ok | video_error | label_error | context | engine_error
    error: str = None
    context: Context = None
    think_open: bool = False  # every turn begins inside a thought: forced, or by the template
    turns: list = field(default_factory=list)  # sampled text of each main turn
    pieces: list = field(default_factory=list)  # the same token by token; none from endpoints
    spans: list = field(default_factory=list)  # [start, end) of a turn's sampled ids in context.ids
    finish: list = field(default_factory=list)  # per turn: "stop" | "length" | "call" (cut there)
    calls: list = field(default_factory=list)  # dicts, in the order they were written
    reward: dict = field(default_factory=dict)
    advantage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)
    duration: float = None  # seconds of the video
    notes: dict = field(default_factory=dict)  # what a protocol remembers between turns; not saved

    def fail(self, status, error):
        self.status, self.error = status, error

    def executed(self):
        return sum(c["status"] == "ok" for c in self.calls)

    def parseable(self):
        return sum(c["parseable"] for c in self.calls)

    @staticmethod
    def kept():
        """Fields that a record holds under their own names."""
        return ("task", "group", "sample", "version", "status", "error", "think_open", "turns",
                "pieces", "spans", "finish", "calls", "reward", "advantage", "timing")  # fmt: skip

    def to_json(self):
        c = self.context or Context()
        return {**{name: getattr(self, name) for name in self.kept()}, "K": self.frame_budget,
                "ids": c.ids, "mask": c.mask, "logps": c.logps,
                "vision": [vars(item) for item in c.items]}  # fmt: skip


@dataclass
class Sampler:
    """All that turns tasks into episodes. One `run` at a time."""

    engine: object  # submit(Request), poll() -> [Completion], max_seqs: its batch
    codec: chat.Codec
    source: Source
    agent: Agent
    pay: rewards.Pay = rewards.Pay()  # what a rollout is paid for
    threads: int = 4  # that decode
    max_live: int = None  # episodes at once; None = twice the engine's batch
    open_context: callable = open_context  # evaluation/systems.py keeps the chat beside the ids
    pump: Pump = None  # of the latest run; its idle_s: seconds the engine only waited for frames


# ------------------------------------------------------------------------------------------------
# The episode


async def run_episode(episode, sampler):
    """The main agent: overview, then turns that look closer, then one that answers -> Episode.

    Nothing that the model writes can raise out of it: bad calls, broken videos, full contexts and
    failed requests are counted outcomes in the record.
    """
    agent, codec, task, began = sampler.agent, sampler.codec, episode.task, time.monotonic()
    shown = await load_overview(episode, sampler)
    if shown is None:
        return episode
    spec, frames, spoken = shown
    messages = main_messages(task, episode.frame_budget, agent.tools, spoken)
    tools = tool_schema() if agent.tools else None
    context = episode.context = open_context(codec, messages, [spec], [frames], tools)
    episode.notes.update(opening=messages, seconds=frames.seconds)
    episode.think_open = agent.think_prefix or codec.opens_thought

    tool_turns = agent.max_turns if agent.tools else 0
    for turn in range(tool_turns + 1):  # the last one must answer: its calls come too late
        # Forced, not sampled: mask 0, neither gradient nor credit.
        prefix = chat.think_prefix_ids(codec, context.ids) if agent.think_prefix else []
        room = agent.context - len(context.ids) - len(prefix)
        if room < 1:
            episode.fail("context", f"{len(context.ids)} tokens leave no room in a context of "
                         f"{agent.context}")
            break
        context.insert(prefix)
        said = await sampler.pump.sample(context.request(
            f"{episode.group}/{episode.sample}/{turn}", max_tokens=min(agent.max_new_tokens, room),
            temperature=agent.temperature, seed=turn_seed(episode, agent, turn)))
        if said.error:
            episode.fail("engine_error", said.error)
            break
        record_turn(episode, codec, said, "stop" if said.ended else "length")
        calls, records = record_calls(episode, agent, said.text, turn)
        if turn == tool_turns or not calls:
            for record in records:
                record.update(status="not_run", summary="")
            break

        # Fan-out: one sub-agent per window, all at once; they join the engine's running batch.
        await serve(records, calls, episode, sampler, turn)

        # Gather: ONE user turn, in call order, then ONE generation prompt.
        replies = [{"role": "tool", "content": record["summary"]} for record in records]
        glue = chat.glue_ids(codec, replies, said.ended)
        if not fits(episode, agent, len(glue) + len(prefix)):
            break
        context.insert(glue)
    episode.timing["total_s"] = time.monotonic() - began
    return episode


async def load_overview(episode, sampler):
    """-> (spec, Frames, subtitles) of the overview. None if the video or the task's label is to
    blame; the episode then says so."""
    source, began = sampler.source, time.monotonic()
    spec = source.overview_spec(episode.task, episode.frame_budget)
    try:
        frames, episode.duration, spoken = await sampler.pump.load(
            source.load_overview, spec, episode.task)
    except (video.VideoError, ValueError) as error:
        episode.fail("video_error", str(error))
        return None
    finally:
        episode.timing["decode_s"] = time.monotonic() - began
    episode.timing["video_s"] = episode.duration
    if source.own_labels and (wrong := label_fault(episode.task, episode.duration)):
        episode.fail("label_error", wrong)
        return None
    return spec, frames, spoken


def turn_seed(episode, agent, *turn):
    """Seed of a main turn (its number), or of a sub-agent of it (both numbers)."""
    return request_seed(agent.seed, episode.version, episode.task["id"], episode.sample, *turn)


def record_turn(episode, codec, said, finish):
    """A sampled turn -> the episode's context and record. finish: why it ended, see Episode."""
    start = len(episode.context.ids)
    episode.context.sampled(said.ids, said.logps)  # mask 1: trained
    episode.spans.append([start, start + len(said.ids)])
    episode.pieces.append(chat.text_pieces(codec, said.ids))
    episode.turns.append(said.text)
    episode.finish.append(finish)


def record_calls(episode, agent, text, turn, parse=rewards.parse_tool_calls):
    """Text of a turn -> (its calls, their records, which are the episode's, too)."""
    unclosed = rewards.never_closed(text, episode.think_open)
    unseen = not agent.tools or (agent.open_thought == "drop" and unclosed)
    calls = [] if unseen else parse(text, episode.think_open)
    records = [{
        "turn": turn, "name": call.name, "start": call.start, "end": call.end,
        "num_frames": call.num_frames, "parseable": call.error is None,
        "status": "error" if call.error else "pending",
        "summary": f"error: {call.error}" if call.error else "", "sub_tokens": 0}
        for call in calls]  # fmt: skip
    episode.calls += records
    return calls, records


def fits(episode, agent, more):
    """Whether `more` tokens leave room for a turn. An episode never ends on a tool response: what
    does not fit is left out whole."""
    if len(episode.context.ids) + more < agent.context:
        return True
    episode.fail("context", f"the responses do not fit into a context of {agent.context}")
    return False


async def serve(records, calls, episode, sampler, turn):
    """Run the good calls of one turn on sub-agents and fill their records; every call gets exactly
    one response."""
    run = admitted(records, calls, sampler.agent.max_parallel)
    specs = [window_spec(calls[i], episode.task, sampler.agent) for i in run]
    decoded = await decoding(specs, sampler)
    jobs = [sub_agent(records[i], specs[n], episode, sampler, turn, n, decoded[n])
            for n, i in enumerate(run)]
    if sampler.agent.dispatch == "parallel":
        # Their decoding and their tokens share the machine with everybody else's.
        jobs = [asyncio.gather(*jobs)]
    for job in jobs:
        await job


def window_spec(call, task, agent):
    """The window of a call, as video.load reads it."""
    return {"video": task["video"], "start": call.start, "end": call.end, "fps": agent.sub_fps,
            "num_frames": call.num_frames or None, "max_frames": agent.sub_frames}


async def sub_agent(record, spec, episode, sampler, turn, number, decoded):
    """The same weights in a fresh context that holds one window. Fills `record`; never raises on
    what a model wrote. decoded: awaited before its frames are asked for."""
    agent, codec, task = sampler.agent, sampler.codec, episode.task
    began = time.monotonic()
    try:
        await decoded
        spec, frames = await sampler.pump.load(sampler.source.load_window, spec)
    except (video.VideoError, ValueError) as error:
        return refuse_window(record, error)
    record.update(start=spec["start"], end=spec["end"])

    window = {name: value for name, value in spec.items() if name != "video"}
    messages = sub_messages(task, window, agent.sub_question)
    context = sampler.open_context(codec, messages, [spec], [frames])
    room = agent.context - len(context.ids)
    if room < 1:
        record.update(status="error", summary="error: the window does not fit into the context")
        return
    said = await sampler.pump.sample(context.request(
        f"{episode.group}/{episode.sample}/{turn}/{number}",
        max_tokens=min(agent.sub_max_new_tokens, room), temperature=agent.temperature,
        seed=turn_seed(episode, agent, turn, number)))
    if said.error:
        record.update(status="engine_error", summary="error: the window could not be looked at")
        return

    # A thought that never closes holds no summary: a Thinking checkpoint opens one by itself.
    thought = rewards.never_closed(said.text, codec is not None and codec.opens_thought)
    summary = "" if thought else said.text.rpartition("</think>")[2].strip()
    context.sampled(said.ids, said.logps)
    record.update(status="ok", summary=summary or empty_summary(),
                  seconds=time.monotonic() - began, frames_seen=len(frames.seconds),
                  sub_tokens=sum(context.mask),
                  sub={"ids": context.ids, "mask": context.mask, "logps": context.logps,
                       "vision": [vars(item) for item in context.items]})


def refuse_window(record, error):
    """Why a window could not be loaded -> the call's record. error: VideoError, or ValueError if it
    holds nothing of the video."""
    if isinstance(error, video.VideoError):
        why = f"error: the window could not be read ({error.why})"
        record.update(status="video_error", summary=why)
    else:
        record.update(status="error", summary=f"error: {error}")


def admitted(records, calls, max_parallel):
    """Which calls of a turn are run -> their indices; the records of the others say why not."""
    good = [i for i, call in enumerate(calls) if call.error is None]
    for i in good[max_parallel:]:
        why = f"not run: at most {max_parallel} calls per turn"
        records[i].update(status="not_run", summary=why)
    return good[:max_parallel]


async def decoding(specs, sampler):
    """Begin to decode the windows of one turn -> {place in specs: Future}, the same one for those
    that are decoded in one go."""
    found = {}
    for near in await sampler.pump.load(sampler.source.clusters, specs):
        done = sampler.pump.load(sampler.source.preload, [specs[n] for n in near])
        found.update(dict.fromkeys(near, done))
    return found


# ------------------------------------------------------------------------------------------------
# All episodes of a batch


def run(sampler, tasks, frames=64, group=1, step=0, play=run_episode):
    """THE agent loop: RL, evaluation and the CLI all call this. -> iterator of scored Episodes, as
    they finish.

    frames: overview frames K, or "gated" (K drawn per prompt, the same for its whole group). group:
    rollouts per task. step: enters every seed and every draw of K, and is the version of the
    weights in a record. play: coroutine function (Episode, Sampler) -> Episode.
    """
    pump = sampler.pump = Pump(sampler.engine, sampler.threads)
    # A few more episodes than the engine's batch keep it full while others decode.
    live = sampler.max_live or 2 * sampler.engine.max_seqs
    works = (play(episode, sampler)
             for episode in new_episodes(tasks, sampler.agent.seed, frames, group, step))
    loop = asyncio.new_event_loop()
    finished = in_flight(pump, works, live)
    try:
        while episode := loop.run_until_complete(anext(finished, None)):
            episode.reward = scored(episode, sampler.pay)
            yield episode
    finally:
        loop.run_until_complete(finished.aclose())
        loop.close()


def scored(episode, pay=None):
    """Episode -> its reward, see rewards.score."""
    tokens = sum(episode.context.mask) if episode.context else 0  # sampled by the main agent
    return rewards.score(episode.turns, episode.task, episode.calls, episode.think_open, pay,
                         tokens)


def new_episodes(tasks, seed, frames, group, step):
    """Tasks -> Episodes that have not begun, `group` of each."""
    seen = {}  # a batch across two epochs may hold a task twice: one larger group, other seeds
    for task in tasks:
        k = overview_frames(frames, seed, step, task["id"])
        first = seen.get(task["id"], 0)
        seen[task["id"]] = first + group
        for sample in range(first, first + group):
            yield Episode(task, f"{step}/{task['id']}", sample, k, step)


# ---- below: looking at episodes, checks, the command line (may be skipped) ----------------------


def bare_options(options):
    """Options without labels ("A. ", "(A) ", "A) ", "A: "), which go only where every option has
    its own letter: "B. B. King" alone is no label."""
    patterns = [rf"\s*(?:\({letter}\)|{letter}[.):])\s+" for letter in string.ascii_uppercase]
    labels = [re.match(pattern, text) for pattern, text in zip(patterns, options)]
    if not all(labels):
        return [text.strip() for text in options]
    return [text[label.end():].strip() for text, label in zip(options, labels)]


def show(episode, codec, colour=True):
    """One episode as text: sampled tokens in one colour, inserted ones in another, structural ones
    marked."""
    marks = {"inserted": ("\033[2m", "\033[0m"), "sampled": ("\033[32m", "\033[0m"),
             "struct": ("\033[1;33m", "\033[0m")}  # fmt: skip
    if not colour:
        marks = {"inserted": ("", ""), "sampled": ("«", "»"), "struct": ("«*", "*»")}
    context = episode.context or Context()
    kinds = ["sampled" if m else "inserted" for m in context.mask]
    for start, end in episode.spans:
        pieces = chat.pieces_of(codec, context.ids[start:end])
        mask = rewards.structural_mask(pieces)
        kinds[start:end] = ["struct" if flag else "sampled" for flag in mask]
    pads = {codec.image_pad, codec.video_pad}
    text = []
    at = 0  # first token of the run of one kind
    for kind, members in itertools.groupby(kinds):
        n = len(list(members))
        # One placeholder stands for a whole run of them.
        run = [i for place, i in enumerate(context.ids[at:at + n], at)
               if i not in pads or context.ids[place - 1] != i]
        on, off = marks[kind]
        text.append(on + launch.printable(chat.decode(codec, run, True)) + off)
        at += n
    r = episode.reward
    terms = " ".join(f"{k} {r[k]:.2f}" for k in ("total", "acc", "fmt", "tool")) if r else ""
    head = (f"== {episode.task['id']} sample {episode.sample} | K {episode.frame_budget} | "
            f"{episode.status} | {terms} | gold {episode.task['answer']}")
    calls = [f"   call {c['start']}-{c['end']}: {c['status']} -> {c['summary']}"
             for c in episode.calls]
    return "\n".join([launch.printable(head), "".join(text), *map(launch.printable, calls)])


def read_tasks(path):
    """Task JSONL -> rows, checked before any long work. Raises UserError naming file and line."""
    rows = launch.read_jsonl(path, ("id", "video", "question", "answer", "type"), task_fault)
    if len({row["id"] for row in rows}) < len(rows):
        raise launch.UserError(f"{path}: task ids are not unique")
    return rows


def task_fault(row):
    """-> None, or what is wrong with a task."""
    options = row.get("options") or []
    if not (isinstance(row["id"], (str, int)) and isinstance(row["question"], str)):
        return "id and question must be text"
    if not (isinstance(options, list) and all(isinstance(option, str) for option in options)):
        return "options must be a list of strings, or null"
    if row["type"] not in rewards.task_types():
        return f"type is {row['type']!r}; expected {', '.join(rewards.task_types())}"
    if row["type"] == "mcq" and not options:
        return "an mcq task needs 'options'"
    answer = row["answer"]
    if row["type"] == "grounding":
        span = [rewards.to_seconds(second) for second in answer if not isinstance(second, str)
                ] if isinstance(answer, list) else []
        if len(span) != 2 or len(answer) != 2 or None in span:
            return "the answer of a grounding task is [start, end] in seconds"
        said = f"{span[0]:.6f} - {span[1]:.6f}"
    elif not (isinstance(answer, str) and answer.strip()):
        return "the answer is a text; of a list task: its items in order, commas between"
    else:
        said = answer
    # A label that earns less than 1 when the model gives it can only mislead the training.
    given = rewards.final_answer([f"<answer>{said}</answer>"])
    if rewards.accuracy(given, row["type"], answer, options or None) < 0.999:
        wanted = {"mcq": "it must be the letter of one of the options",
                  "grounding": "it must be [start, end], 0 <= start < end"}
        why = wanted.get(row["type"], "it must hold a letter or a digit, and no tags")
        return f"the answer earns no full reward when the model gives it: {why}"
    return None


def label_fault(task, duration):
    """-> None, or that the answer of a grounding task lies beyond the video's end (seconds), by
    more than a half: annotators round, and end a span a little late."""
    if task["type"] != "grounding":
        return None
    start, end = task["answer"]
    if min(end, duration) - start >= (end - start) / 2:
        return None
    return (f"the answer, {start:g} to {end:g} s, lies beyond the end of the video, which has "
            f"{duration:g} s")


def from_json(row):
    """A line of a rollout JSONL -> Episode (without decoded frames)."""
    items = [chat.VisionItem(**v) for v in row["vision"]]
    context = None
    if row["ids"]:
        context = Context(ids=row["ids"], mask=row["mask"], logps=row["logps"], items=items)
    kept = {name: row[name] for name in Episode.kept()}
    return Episode(frame_budget=row["K"], context=context, **kept)


def settings():
    """Agent fields that few runs change, given by --set. name -> the values that it takes, the
    default first; a number alone: any number."""
    return {"dispatch": ("parallel", "sequential"), "open_thought": ("run", "drop"),
            "sub_question": (True, False), "sub_fps": (Agent.sub_fps,),
            "sub_frames": (Agent.sub_frames,)}


class Set(argparse.Action):
    """--set NAME=VALUE ..: the attribute NAME of the parsed flags. const: as `settings`."""

    def __call__(self, parser, namespace, texts, option_string=None):
        for text in texts:
            name, _, said = text.partition("=")
            values = self.const.get(name)
            if values is None:
                raise launch.UserError(f"--set {text}: no such setting; there are "
                                       + ", ".join(self.const))
            known = {str(value).lower(): value for value in values}
            try:
                value = known[said] if len(values) > 1 else type(values[0])(said)
            except (KeyError, ValueError):
                wanted = ", ".join(known) if len(values) > 1 else "a number"
                raise launch.UserError(f"--set {text}: {name} takes {wanted}") from None
            setattr(namespace, name, value)


def add_agent_arguments(parser, tools=True, more=()):
    """Flags of the agent loop, the same in rollout.py, grpo.py and eval.py; field for field the
    Agent and the Source. tools=False leaves --tools to the caller (eval.py runs both modes). more:
    settings of the caller's own, see `settings`."""
    table = {**settings(), **dict(more)}
    add, yes_no = parser.add_argument_group("agent").add_argument, argparse.BooleanOptionalAction
    add("--temperature", type=float, default=Agent.temperature, help="of sampling; 0 = greedy")
    add("--max-new-tokens", type=int, default=Agent.max_new_tokens, help="tokens per main turn")
    add("--sub-max-new-tokens", type=int, default=Agent.sub_max_new_tokens,
        help="tokens per sub-agent summary")
    add("--context", type=int, default=Agent.context, help="tokens of one context with its answer")
    add("--max-turns", type=int, default=Agent.max_turns,
        help="tool turns; one answer turn always follows; 0 = no tool turn")
    add("--max-parallel", type=int, default=Agent.max_parallel, help="calls run per turn")
    if tools:
        add("--tools", action=yes_no, default=True, help="offer crop_video")
    add("--think-prefix", action=yes_no, default=True, help="force <think>\n in every main turn")
    add("--seed", type=int, default=0, help="of sampling, of the draws of K, of the order of tasks")
    parser.set_defaults(**{name: values[0] for name, values in table.items()})
    shown = [f"{name}={'|'.join(map(str, values)).lower()}" for name, values in table.items()]
    add("--set", action=Set, const=table, nargs="+", default=argparse.SUPPRESS,
        metavar="NAME=VALUE", help="what few runs change, its default first: " + ", ".join(shown))

    add = parser.add_argument_group("frames and engine").add_argument
    add("--channel", choices=["image", "video"], default="image",
        help="frames as `<t seconds>` + images, or one video item")
    add("--video-root", default=None,
        help="folder videos are relative to and may not leave; default: the JSONL's folder")
    add("--max-pixels", type=int, default=Source.max_pixels,
        help="pixels of a frame after resizing, at most")
    add("--snap", choices=["off", "keyframe"], default="off",
        help="overviews take the key frame nearest to a look, where its segment has one: fast in "
        "files of hours")
    add("--frame-cache-gb", type=float, default=4.0, help="GiB of decoded frames kept per rank")
    add("--frame-cache-dir", default=None,
        help="folder of decoded frames for later runs and all ranks of a node; default: none")
    add("--frame-cache-dir-gb", type=float, default=50.0, help="GiB of all that is kept there")
    add("--patience", type=float, default=1800.0,
        help="seconds a phase may take; beyond, the run ends with its stacks; 0 = for ever")
    add("--engine-share", type=float, default=0.5, help="vLLM's part of the GPU while it is awake")
    add("--max-seqs", type=int, default=64, help="sequences in the engine's batch")


def agent_settings(args, data_path):
    """Parsed flags -> (Agent, Source). Raises UserError naming the flag."""
    agent = Agent(**{f.name: getattr(args, f.name) for f in fields(Agent)})
    launch.at_least(1, args, "max_new_tokens", "sub_max_new_tokens", "context", "max_parallel",
                    "max_seqs")
    launch.at_least(0, args, "max_turns")
    if not 0 <= args.temperature <= 2:  # vLLM's own bounds; not NaN
        raise launch.UserError(f"--temperature must lie between 0 and 2, got {args.temperature}")
    if not 0 < args.engine_share < 1:
        raise launch.UserError(f"--engine-share must lie between 0 and 1, got {args.engine_share}")
    if not (agent.sub_fps > 0 and agent.sub_frames > 0):
        raise launch.UserError("--set: sub_fps and sub_frames must be above 0")
    least = getattr(args, "min_pixels", Source.min_pixels)  # eval.py's alone
    launch.at_least(least, args, "max_pixels")
    root = args.video_root or os.path.dirname(os.path.abspath(data_path))
    if not os.path.isdir(root):
        raise launch.UserError(f"--video-root {root}: no such folder")
    crop = getattr(args, "crop_pixels", 0)  # eval.py's alone, too
    if crop and crop < least:
        raise launch.UserError(f"--set crop_pixels must be at least {least}, or 0, got {crop}")
    return agent, Source(root, video.frame_cache(args), least, args.max_pixels,
                         min(crop, args.max_pixels), snap=args.snap == "keyframe",
                         own_labels=bool(data_path))


def check_context(codec, tasks, agent, source, frames):
    """Refuse, before anything is loaded, a context that cannot hold the largest prompt of the first
    readable task."""
    budget = frames if isinstance(frames, int) else max(gated_budgets())
    tools = tool_schema() if agent.tools else None
    first = None  # what was wrong with the first video
    for task in tasks[:8]:
        spec = source.overview_spec(task, budget)
        try:
            item = chat.vision_item(spec, source.load(spec))
        except video.VideoError as error:
            first = first or error
            continue  # counted when its episode comes
        messages = main_messages(task, budget, agent.tools)
        ids, _ = chat.encode_prompt(codec, messages, [item], tools)
        if len(ids) + 32 > agent.context:  # 32: a thought and an answer that could be scored
            raise launch.UserError(
                f"--context {agent.context} is too small: task {task['id']} with {item.frames} "
                f"frames takes {len(ids)} tokens; raise --context, or lower --frames or "
                "--max-pixels")
        return
    raise launch.UserError(f"none of the first {len(tasks[:8])} videos can be read; "
                          f"is --video-root right? {first}")


def frames_argument(text):
    """--frames: a number of overview frames, or "gated"."""
    if text == "gated":
        return text
    if not (text.isdigit() and int(text) > 0):
        why = f"{text!r}: expected a positive number of frames or 'gated'"
        raise argparse.ArgumentTypeError(why)
    return int(text)


def make_engine(ckpt, codec, args, sleeping=False, windows=(0, 0)):
    """The engine of the flags. sleeping: give memory back between rollouts (GPU). Collective.

    windows: how many crops one context may hold beside the overview, and the frames of each.
    """
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise launch.UserError("vllm is not installed: pip install -r requirements.txt "
                               "(without a GPU: requirements-cpu.txt)")
    import checkpoint  # brings torch

    frames = args.frames if isinstance(args.frames, int) else max(gated_budgets())
    crops, each = windows
    largest, videos = max(frames, args.sub_frames, each), 1 + crops  # frames of one video item
    if codec.channel == "image":  # every frame is an item of its own
        largest, videos = max(largest, frames + crops * each), 1
    base = checkpoint.base_of(ckpt)
    engine = VllmEngine(base, codec, Limits(
        args.context, largest, args.max_pixels, args.max_seqs, args.engine_share, sleeping, videos))
    if base != ckpt:  # adapters, added to the weights as they stream
        engine.sync(checkpoint.merged_weights(ckpt))
    return engine


def toy_lengths():
    """Lengths of the toy world: its contexts are a few hundred tokens, its windows 8 frames."""
    return dict(context=1024, max_new_tokens=128, sub_max_new_tokens=24, max_turns=1)


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("what to run").add_argument
    add("--ckpt", required=True, help="checkpoint folder")
    add("--data", required=True, help="task JSONL")
    add("--out", default=None, help="rollout JSONL to write; none = only look")
    add("--preset", choices=["paper", "toy"], default="paper",
        help="toy: lengths that suit the world of toy.py")
    add("--frames", type=frames_argument, default="gated",
        help="overview frames K, or 'gated': K ~ U{4,8,16,32,64}")
    add("--group", type=int, default=1, help="rollouts per task")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--step", type=int, default=0, help="enters seeds and draws of K, as in training")
    add("--show", type=int, default=0, help="print so many episodes, coloured by who wrote what")
    add_agent_arguments(parser)
    if parser.parse_known_args()[0].preset == "toy":
        parser.set_defaults(**toy_lengths())
    args = parser.parse_args()
    launch.at_least(1, args, "group")
    launch.at_least(0, args, "limit")
    if args.out and os.path.isdir(args.out):
        raise launch.UserError(f"--out {args.out} is a folder; give the name of a file")
    return args


def main():
    args = parse_args()
    from tqdm import tqdm

    import checkpoint

    ckpt = checkpoint.resolve_checkpoint(args.ckpt)
    tasks = read_tasks(args.data)[: args.limit or None]
    agent, source = agent_settings(args, args.data)
    if args.out:
        launch.make_out(os.path.dirname(os.path.abspath(args.out)))
    launch.say(f"{args.ckpt}: loading the tokenizer, then the engine")
    codec = chat.load_codec(ckpt, args.channel)
    check_context(codec, tasks, agent, source, args.frames)
    sampler = Sampler(make_engine(ckpt, codec, args), codec, source, agent)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    rows = []
    began = time.monotonic()
    episodes = run(sampler, tasks, args.frames, args.group, args.step)
    for episode in tqdm(episodes, total=len(tasks) * args.group, desc="rollouts", disable=None):
        launch.beat(args.patience)
        rows.append(episode.to_json())
        if len(rows) <= args.show:
            print(show(episode, codec, colour), flush=True)
    if args.out:
        rows.sort(key=lambda row: (row["group"], row["sample"]))
        launch.write_atomic(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(summary_line(rows, time.monotonic() - began) + (f" -> {args.out}" if args.out else ""))


def summary_line(rows, seconds):
    n = len(rows)
    mean = {k: sum(row["reward"][k] for row in rows) / n for k in ("total", "acc", "fmt", "tool")}
    kappa = sum(c["status"] == "ok" for row in rows for c in row["calls"]) / n
    failed = sum(row["status"] != "ok" for row in rows)
    return (f"{n} rollouts in {seconds:.1f} s ({n / seconds:.1f}/s) | R {mean['total']:.3f} "
            f"(acc {mean['acc']:.3f} fmt {mean['fmt']:.3f} tool {mean['tool']:.3f}) | "
            f"kappa {kappa:.2f} calls/rollout | {failed} not ok")


if __name__ == "__main__":
    launch.run_main(main)
