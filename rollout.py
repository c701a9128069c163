"""
rollout.py (tests/test_rollout.py): the agent loop that RL, evaluation and the command line below
share.

One episode, for a task with K overview frames:
  main agent   <system><K frames><question> -> turn 1
  fan-out      turn 1 holds n crop_video calls: n sub-agents, the same weights, each in a fresh
               context with the frames of one window; each returns a short summary
  gather       ALL n responses, in call order, become ONE user turn with ONE generation prompt
               (--crop-response frames: no sub-agents, the responses are the windows' frames)
  main agent   turn 2, ..: at most --max-turns tool turns, then one turn that must answer
Every main turn starts with a forced `<think>\\n` (--think-prefix). Ids only grow:
next prompt = previous ids + sampled ids + glue. A sampled id is never decoded and encoded again.

An episode is a coroutine that awaits frames and samples. The pump (engine.py) feeds all episodes
into one engine, so a fan-out starts the moment the turn ends. With --frames gated, K is drawn once
per prompt from a digest of (seed, step, task id).

Departs from the paper: a sub-agent is told the question (--set sub_question=false turns this off).
Calls that a model writes in its last turn are not run, because no turn follows that could read the
responses. Calls inside a thought that never closes are run.

Reads:  a checkpoint folder, task JSONL.
Writes: rollout JSONL, one episode a line, enough to train on without the engine, and beside it the
        settings, r.args.json; with --judge-url the judge's verdicts, judge.jsonl. Episodes that
        have ended are in r.jsonl.part meanwhile, and the same command goes on from there.

CPU toy:  python rollout.py --preset toy --ckpt sft_out --data toy/rl.jsonl --num-generations 4 \\
            --show 2 --out r.jsonl
1 GPU:    python rollout.py --ckpt sft_out --data rl.jsonl --num-generations 8 --out r.jsonl
8 GPUs:   one process per GPU, each with a part of --data; grpo.py has one engine per rank
"""
import argparse
import asyncio
import collections
import contextlib
import glob
import itertools
import json
import os
import string
import sys
import time
from dataclasses import dataclass, field, fields, replace
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import rewards
import video
from engine import EngineConfig, EngineLoop, Request, VllmEngine, in_flight
from plumbing import arguments, data, runs
from plumbing.data import subtitle_files, task_subtitles
from plumbing.judge import add_judge_arguments, open_judge
from video import VideoSource

# ------------------------------------------------------------------------------------------------
# Prompts. SFT data, RL and evaluation all build their prompts here: a model that was trained on one
# wording and asked in another loses accuracy without any error.


def system_prompt(tools: bool = True, crop_response: str = "summary") -> str:
    calls = ("If the frames do not show what you need, call crop_video once for each window you "
             "want to see closely; several calls in one turn run at the same time. Every call "
             f"returns {'a short summary' if crop_response == 'summary' else 'frames'} of its "
             "window.\n")
    return ("You answer questions about a long video. A few frames from all over it are shown, "
            "each after its time.\n"
            "Think first, between <think> and </think>.\n" + (calls if tools else "")
            + "When you know the answer, write it between <answer> and </answer>.")


SUB_PROMPT = ("You watch one short window of a longer video. Say in a few words what happens in it "
              "that helps to answer the question. Times are those of the whole video.")
EMPTY_SUMMARY = "(nothing to report)"  # the response to a call if the sub-agent wrote no summary


def tool_schema(crop_response: str = "summary") -> list[dict]:
    """Declaration of crop_video for the chat template."""
    response = "frames of it" if crop_response == "frames" else (
        "a short text summary of what happens there")
    start = "start of the window in seconds from the start of the video"
    frames = "frames to look at; default: one per second, at most 16"
    # num_frames is optional: a window is shown at 1 fps unless the model gives a number.
    arguments = {"type": "object", "required": ["start_time", "end_time"], "properties": {
        "start_time": {"type": "number", "description": start},
        "end_time": {"type": "number", "description": "end of the window in seconds"},
        "num_frames": {"type": "integer", "description": frames}}}
    function = {"name": "crop_video", "description": "Look closely at one window of the video. "
                f"Returns {response}.", "parameters": arguments}
    return [{"type": "function", "function": function}]


def question_text(task: dict) -> str:
    """Task -> the text after the frames: question, options, how to answer."""
    # Publishers label options in several ways; here every option gets the same kind of label.
    options = data.bare_options(task["options"]) if task.get("options") else ()
    lines = [f"{letter}. {option}" for letter, option in zip(string.ascii_uppercase, options)]
    # "style": a client of tools/serve.py has said how to answer.
    style = task.get("style", rewards.task_types()[task["type"]].prompt_suffix)
    return "\n" + "\n".join(filter(None, [task["question"], *lines, style]))


def main_messages(task: dict, num_frames: int, tools: bool = True, subtitles: str = "",
                  crop_response: str = "summary") -> list:
    """The main agent's first messages: system, overview of num_frames, subtitles if there are any,
    question. crop_response: summary | frames, the response to a call."""
    # Frames come first: all rollouts of a group, and questions of one video, share that prefix.
    subtitle_lines = f"\nSubtitles:\n{subtitles}\n" if subtitles else ""
    overview = {"type": "video", "video": task["video"], "frames": num_frames}
    question_item = {"type": "text", "text": subtitle_lines + question_text(task)}
    return [{"role": "system", "content": system_prompt(tools, crop_response)},
            {"role": "user", "content": [overview, question_item]}]


def sub_messages(task: dict, window: dict, question: bool = True) -> list:
    """A sub-agent's messages: the frames of one window, the window's times, the question.
    window: {"start", "end", ..} in seconds, as video.load reads it."""
    times = f"\nWindow: {window['start']:g} to {window['end']:g} seconds."
    question_line = f"\nQuestion: {task['question']}" if question else ""
    frames = {"type": "video", "video": task["video"], **window}
    return [{"role": "system", "content": SUB_PROMPT},
            {"role": "user", "content": [frames, {"type": "text", "text": times + question_line}]}]


# ------------------------------------------------------------------------------------------------
# Draws. Python's hash() of a string differs from process to process, so draws come from digests.


GATED_FRAMES = (4, 8, 16, 32, 64)  # the numbers of overview frames of nFrames gating (paper)


def draw_num_frames(frames: int | str, seed: int, step: int, task_id: str | int) -> int:
    """--frames (a number, or "gated") -> K of a task in a step. "gated" is nFrames gating: K ~
    Uniform, one draw per prompt and step, so a whole group shares K."""
    if frames != "gated":
        return int(frames)
    # "K": not the digest of a sampling seed.
    return GATED_FRAMES[launch.stable_hash("K", seed, step, task_id) % len(GATED_FRAMES)]


# ------------------------------------------------------------------------------------------------
# Parts of an episode


def flag(default, text, choices=None, is_setting=False):
    """A field of AgentConfig with a flag of its own, or a setting of --set. text: its help."""
    return field(default=default, metadata=dict(help=text, choices=choices, is_setting=is_setting))


@dataclass
class AgentConfig:
    """The rules of an episode. A field is a flag of the command lines or a setting of --set."""

    temperature: float = flag(0.7, "of sampling; 0 = greedy")
    max_new_tokens: int = flag(2048, "tokens per main turn")
    max_model_len: int = flag(32768, "tokens of one context with its answer")
    max_turns: int = flag(3, "tool turns before the answer turn")
    max_parallel: int = flag(5, "calls run per turn; a further call is answered with a refusal")
    tools: bool = flag(True, "offer crop_video")
    think_prefix: bool = flag(True, "force <think>\\n in every main turn")
    seed: int = flag(0, "of sampling, of the draws of K, of the order of tasks")
    crop_response: str = flag("summary", "to a call: a sub-agent's summary, or the window's frames",
                              choices=["summary", "frames"])
    sub_question: bool = flag(True, "a sub-agent is told the question", is_setting=True)
    sub_fps: float = flag(1.0, "frames per second of a window", is_setting=True)
    sub_frames: int = flag(16, "frames of a window, at most", is_setting=True)
    sub_max_new_tokens: int = flag(512, "per summary", is_setting=True)


@dataclass
class Context:
    """Ids, mask and log-probs of one agent context. The three lists only grow, and together."""

    ids: list = field(default_factory=list)  # expanded: one placeholder per vision token
    compact: list = field(default_factory=list)  # one placeholder per frame, as engines take them
    mask: list = field(default_factory=list)  # 1 = sampled by this policy, and trained
    logps: list = field(default_factory=list)  # of the distribution sampled from; 0 if mask is 0
    items: list = field(default_factory=list)  # [chat.VisionItem]
    frames: list = field(default_factory=list)  # [video.Frames], one per item

    def add_masked(self, ids: list[int], compact: list[int] | None = None) -> None:
        """Adds tokens that no model sampled: prompts, forced starts, tool responses. compact: the
        same ids with one placeholder per frame, if there are frames among them."""
        self.ids += ids
        self.compact += ids if compact is None else compact
        self.mask += [0] * len(ids)  # neither loss nor credit
        self.logps += [0.0] * len(ids)

    def add_sampled(self, ids: list[int], logps: list[float]) -> None:
        """Adds tokens that the policy sampled."""
        # The sampled ids themselves: text that is encoded again may give other ids.
        self.ids += ids
        self.compact += ids
        self.mask += [1] * len(ids)  # trained
        self.logps += logps

    def request(self, name, **settings):
        """The context as a Request. Lists are copied, because the context grows on meanwhile."""
        return Request(name, list(self.compact), list(self.ids), list(self.items),
                       list(self.frames), **settings)


def open_context(codec, messages, specs, frames, tools=None) -> Context:
    """Messages, with the spec and the decoded Frames of each of their videos -> Context."""
    items = [chat.vision_item(spec, f) for spec, f in zip(specs, frames)]
    context = Context(items=items, frames=list(frames))
    # encode_prompt returns both forms of the ids: expanded and compact.
    context.add_masked(*chat.encode_prompt(codec, messages, context.items, tools))
    return context


@dataclass
class Episode:
    """One rollout. `to_dict` is a line of the rollout JSONL."""

    task: dict
    group: str  # "step/task id": the rollouts of one prompt
    sample: int  # number within the group
    num_frames: int  # K, "K" in the record
    policy_step: int  # after which the weights were taken
    status: str = "ok"  # ok | video_error | label_error | context | engine_error
    error: str = None
    context: Context = None
    think_open: bool = False  # every turn begins inside a thought: forced, or by the template
    turns: list = field(default_factory=list)  # sampled text of each main turn
    pieces: list = field(default_factory=list)  # the same token by token; none from endpoints
    spans: list = field(default_factory=list)  # [start, end) of a turn's sampled ids in context.ids
    struct: list = field(default_factory=list)  # places in context.ids that carry format credit
    finish: list = field(default_factory=list)  # per turn: "stop" | "length" | "call" (cut there)
    calls: list = field(default_factory=list)  # dicts, in the order they were written
    reward: dict = field(default_factory=dict)
    advantage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)  # seconds
    duration: float = None  # seconds of the video
    fingerprint: list = None  # video.identity; in the record, if the video could be read
    subtitles: str = ""  # their text in the prompt; in the record, if there is any
    notes: dict = field(default_factory=dict)  # for evaluation/: first messages, memory; not saved

    def fail(self, status, error):
        """Records how the episode ended, if not well."""
        self.status, self.error = status, error

    def executed(self):
        """Number of calls that were run."""
        return sum(c["status"] == "ok" for c in self.calls)

    def to_dict(self) -> dict:
        c = self.context or Context()  # a broken video has none
        optional = {k: v for k in ("subtitles", "fingerprint") if (v := getattr(self, k))}
        return {**{name: getattr(self, name) for name in RECORD_FIELDS}, **optional,
                "K": self.num_frames, "ids": c.ids, "mask": c.mask, "logps": c.logps,
                "vision": [vars(item) for item in c.items]}  # fmt: skip


# Fields of an Episode that a record holds under their own names.
RECORD_FIELDS = ("task", "group", "sample", "policy_step", "status", "error", "think_open", "turns",
                 "pieces", "spans", "struct", "finish", "calls", "reward", "advantage", "timing")


@dataclass
class RolloutWorker:
    """Everything that turns tasks into episodes."""

    engine: object  # submit(Request), abort(id), poll() -> [Completion], max_seqs: the batch
    codec: chat.ChatProcessor
    source: VideoSource
    agent: AgentConfig
    pay: rewards.RewardConfig = rewards.RewardConfig()  # the terms of the reward and their weights
    judge: object = None  # plumbing.judge.Judge, whose verdicts pay open answers; None: token F1
    threads: int = field(default_factory=video.decode_threads)  # that decode
    max_live: int = None  # episodes at once; None = twice the engine's batch
    open_context: callable = open_context  # of sub-agents; evaluation/systems.py has another
    pump: EngineLoop = None  # of the run, in the copy that the run's episodes are given


# ------------------------------------------------------------------------------------------------
# The episode


async def run_episode(episode: Episode, sampler: RolloutWorker) -> Episode:
    """The main agent: overview, then turns that look closer, then a turn that answers.

    No text that the model writes can make this raise: bad calls, broken videos, full contexts and
    failed requests are counted outcomes in the record.
    """
    agent, codec, task, began = sampler.agent, sampler.codec, episode.task, time.monotonic()
    loaded = await load_overview(episode, sampler)
    if loaded is None:
        return episode  # episode.status says why
    spec, frames, subtitles = loaded
    messages = main_messages(task, episode.num_frames, agent.tools, subtitles, agent.crop_response)
    tools = tool_schema(agent.crop_response) if agent.tools else None
    context = episode.context = open_context(codec, messages, [spec], [frames], tools)
    episode.notes.update(opening=messages, seconds=frames.seconds)
    episode.think_open = agent.think_prefix or codec.opens_thought

    # One more turn than tool turns, so no episode ends on tool responses that were never read.
    tool_turns = agent.max_turns if agent.tools else 0
    for turn in range(tool_turns + 1):  # the last turn must answer
        # The forced start is not sampled, so mask 0: neither gradient nor credit. No ids if the
        # template has just opened a thought.
        prefix = chat.think_prefix_ids(codec, context.ids) if agent.think_prefix else []
        room = agent.max_model_len - len(context.ids) - len(prefix)  # tokens left for this turn
        if room < 1:
            episode.fail("context", f"{len(context.ids)} tokens leave no room in a context of "
                         f"{agent.max_model_len}")
            break
        context.add_masked(prefix)
        # The name is unique within a run. evaluation/costs.py finds an episode's requests by name.
        completion = await sampler.pump.sample(context.request(
            f"{episode.group}/{episode.sample}/{turn}", max_tokens=min(agent.max_new_tokens, room),
            temperature=agent.temperature, seed=turn_seed(episode, agent, turn)))
        if completion.error:
            episode.fail("engine_error", completion.error)
            break
        record_turn(episode, codec, completion, "stop" if completion.ended else "length")
        calls, records = record_calls(episode, agent, completion.text, turn)
        if turn == tool_turns or not calls:
            # Calls in the last turn come too late: they are recorded and not run.
            for record in records:
                record.update(status="not_run", summary="")
            break

        # Fan-out: one sub-agent per window, all at once. They join the engine's running batch. Or
        # the main agent looks at the windows itself.
        respond = load_windows if agent.crop_response == "frames" else run_sub_agents
        windows = await respond(records, calls, episode, sampler, turn)

        # Gather: ONE user turn, in call order, then ONE generation prompt.
        replies = [{"role": "tool", "content": [{"type": "video", **spec}] if spec
                    else record["summary"]} for record, (spec, _) in zip(records, windows)]
        items = [chat.vision_item(*window) for window in windows if window[0]]
        # A turn that was cut off at max_new_tokens has no end of turn yet; the glue adds one.
        compact = chat.tool_response_ids(codec, replies, completion.ended, items, tools)
        glue = chat.expand(codec, compact, items)
        # The next turn starts with prefix. If nothing fits after it, the episode fails without the
        # responses: an episode never ends on a tool response.
        if len(context.ids) + len(glue) + len(prefix) >= agent.max_model_len:
            episode.fail("context", f"the responses exceed a context of {agent.max_model_len}")
            break
        context.add_masked(glue, compact)
        context.items += items
        context.frames += [frames for spec, frames in windows if spec]
    episode.timing["total_s"] = time.monotonic() - began
    return episode


async def load_overview(episode, sampler):
    """-> (spec, Frames, subtitles) of the overview, or None after a failure, which the episode then
    records: an unreadable video, or a label beyond the end."""
    source, began = sampler.source, time.monotonic()
    spec = source.overview_spec(episode.task, episode.num_frames)
    try:
        # In a thread of the pump: decoding takes seconds, and other episodes go on meanwhile.
        frames, episode.duration, subtitles, episode.fingerprint = await sampler.pump.load(
            source.load_overview, spec, episode.task)
    except (video.VideoError, ValueError) as error:  # ValueError: unreadable subtitles
        episode.fail("video_error", str(error))
        return None
    finally:
        episode.timing["decode_s"] = time.monotonic() - began  # waiting for a thread included
    episode.timing["video_s"], episode.subtitles = episode.duration, subtitles
    # Only now is the length known. Nothing has been sampled yet for a label that cannot be met.
    if source.check_labels and (fault := data.late_window(episode.task, episode.duration)):
        episode.fail("label_error", fault)
        return None
    return spec, frames, subtitles


def turn_seed(episode, agent, *turn):
    """31-bit seed of a main turn (one number), or of a sub-agent (turn, number of the call)."""
    # The seed depends on the request alone: the order in which episodes finish changes no sample.
    parts = agent.seed, episode.policy_step, episode.task["id"], episode.sample, *turn
    return launch.stable_hash(*parts) >> 32 & 0x7FFFFFFF


def record_turn(episode, codec, completion, finish):
    """Adds a sampled turn to the episode's context and record. finish: see Episode."""
    start = len(episode.context.ids)
    episode.context.add_sampled(completion.ids, completion.logps)
    episode.spans.append([start, start + len(completion.ids)])
    pieces = chat.token_bytes_of(codec, completion.ids)  # the bytes of each token
    # The places of the tokens that carry format credit.
    episode.struct += [t for t, flag in enumerate(rewards.structural_mask(pieces), start) if flag]
    # For the page, which draws token by token. Rewards read `turns`.
    episode.pieces.append(chat.text_pieces(pieces[:-1] + [b""] if completion.ended else pieces))
    episode.turns.append(completion.text)
    episode.finish.append(finish)


def record_calls(episode, agent, text, turn, parse=rewards.parse_tool_calls):
    """Text of a turn -> (calls, their records). The episode holds the same records."""
    # Every call gets a record, also a bad one: each must be answered, in the order of the text.
    # Without tools a model may still write calls; they are text then, and no turn follows.
    calls = parse(text, episode.think_open) if agent.tools else []
    records = [{
        "turn": turn, "name": call.name, "start": call.start, "end": call.end,
        "num_frames": call.num_frames, "parseable": call.error is None,
        "status": "error" if call.error else "pending",  # run_sub_agents or run_episode replaces it
        "summary": f"error: {call.error}" if call.error else "", "sub_tokens": 0}
        for call in calls]  # fmt: skip
    episode.calls += records
    return calls, records


async def load_windows(records, calls, episode, sampler, turn, spec_of=None) -> list:
    """Loads the windows of the good calls of a turn -> (spec, Frames) for every call, (None, None)
    for one without frames. Each record says what was shown, or why nothing. spec_of: (call, task,
    agent) -> spec as video.load reads it."""
    agent, windows = sampler.agent, [(None, None)] * len(calls)
    runnable = runnable_calls(records, calls, agent.max_parallel)  # indices of calls
    specs = [(spec_of or window_spec)(calls[i], episode.task, agent) for i in runnable]
    loaded = await asyncio.gather(*[load_window(s, sampler) for s in specs])
    for i, (result, spec, frames) in zip(runnable, loaded):
        records[i].update(result)
        if frames is not None:
            seconds = [round(float(second), 3) for second in frames.seconds]
            records[i].update(status="ok", frames_seen=len(seconds), seconds_seen=seconds)
            windows[i] = spec, frames
    return windows


async def load_window(spec, sampler):
    """-> (what the record of a call says of its window, spec clamped to the video, Frames or None).
    spec: as video.load reads it."""
    try:
        spec, frames = await sampler.pump.load(sampler.source.load_window, spec)
    except (video.VideoError, ValueError) as error:
        return load_error(error), spec, None
    return {"start": spec["start"], "end": spec["end"]}, spec, frames


async def run_sub_agents(records, calls, episode, sampler, turn):
    """Runs the good calls of one turn on sub-agents and adds their results to the records, so that
    every call has exactly one response. -> no window to show, see load_windows."""
    agent = sampler.agent
    runnable = runnable_calls(records, calls, agent.max_parallel)  # indices of calls
    jobs = [sub_agent(window_spec(calls[i], episode.task, agent), episode, sampler, turn, n)
            for n, i in enumerate(runnable)]
    # All at once: their decoding and their tokens share the machine with every other episode.
    for i, result in zip(runnable, await asyncio.gather(*jobs)):
        records[i].update(result)
    return [(None, None)] * len(records)


def runnable_calls(records, calls, max_parallel):
    """-> indices of the calls of a turn that are run. The records of the others say why not."""
    parsed = [i for i, call in enumerate(calls) if call.error is None]
    # A bad call does not count towards max_parallel, because no sub-agent runs for that call.
    for i in parsed[max_parallel:]:
        records[i].update(status="not_run",
                          summary=f"not run: at most {max_parallel} calls per turn")
    return parsed[:max_parallel]


def window_spec(call, task, agent):
    """The window of a call, as video.load reads it. The model chooses times and the number of
    frames, never the video."""
    return {"video": task["video"], "start": call.start, "end": call.end, "fps": agent.sub_fps,
            "num_frames": call.num_frames or None, "max_frames": agent.sub_frames}


async def sub_agent(spec, episode, sampler, turn, number) -> dict:
    """Asks the same weights in a fresh context that holds one window -> the result, for the record
    of the call.

    A bad window, a full context and a failed request become the call's response, as in run_episode.
    spec: the window, as video.load reads it. number: of the call among those of its turn that run.
    """
    agent, codec, task, began = sampler.agent, sampler.codec, episode.task, time.monotonic()
    result, spec, frames = await load_window(spec, sampler)
    if frames is None:
        return result
    messages = sub_messages(task, spec, agent.sub_question)
    context = sampler.open_context(codec, messages, [spec], [frames])  # a sub-agent has no tools
    room = agent.max_model_len - len(context.ids)
    if room < 1:
        return {**result, "status": "error",
                "summary": "error: the window does not fit into the context"}
    completion = await sampler.pump.sample(context.request(
        f"{episode.group}/{episode.sample}/{turn}/{number}",
        max_tokens=min(agent.sub_max_new_tokens, room), temperature=agent.temperature,
        seed=turn_seed(episode, agent, turn, number)))
    if completion.error:
        # The model does not see the error, which is about machines and not about the video.
        return {**result, "status": "engine_error", "error": completion.error,
                "summary": "error: the window could not be looked at"}

    # Only the text after the thought is returned: the main agent's context stays small.
    # A thought that never closes holds no summary. A Thinking checkpoint's template opens one.
    unclosed = rewards.never_closed(completion.text, codec is not None and codec.opens_thought)
    summary = "" if unclosed else completion.text.rpartition("</think>")[2].strip()
    context.add_sampled(completion.ids, completion.logps)
    # Sub-agents are not trained. Their ids are kept so that a record is complete.
    ids = {"ids": context.ids, "mask": context.mask, "logps": context.logps,
           "vision": [vars(item) for item in context.items]}
    return {**result, "status": "ok", "summary": summary or EMPTY_SUMMARY,
            "seconds": time.monotonic() - began, "frames_seen": len(frames.seconds),
            "sub_tokens": sum(context.mask), "sub": ids}


def load_error(error) -> dict:
    """Why a window could not be loaded, for the record of the call. error: VideoError, or
    ValueError if the window holds no part of the video."""
    broken = isinstance(error, video.VideoError)
    # Of a VideoError only the reason, since its text also holds the path on this machine.
    reason = f"the window could not be read ({error.why})" if broken else error
    return {"status": "video_error" if broken else "error", "summary": f"error: {reason}"}


# ------------------------------------------------------------------------------------------------
# All episodes of a batch


def run(sampler: RolloutWorker, tasks: list, frames=64, group=1, step=0, play=run_episode,
        pump=None, done=(), tries=2):
    """THE agent loop: RL, evaluation and the command line all call this function. -> iterator of
    scored Episodes, in the order in which they finish.

    frames: K, or "gated" (K drawn per prompt, the same for the whole group). group: rollouts per
    task. step: enters every seed and every draw of K, and is the version of the weights in a
    record. play: coroutine function (Episode, RolloutWorker) -> Episode. pump: a new EngineLoop,
    for a caller that watches it. done: (group, sample) of episodes to leave out. tries: how often
    an episode is played whose video cannot be read. It comes once, after all others.
    """
    # A batch across two epochs may hold a task twice. The rollouts then form one larger group, and
    # their numbers go on, so that their seeds differ.
    counts, rollouts = collections.Counter(), []
    for task in tasks:
        name, first = launch.join_key(step, task["id"]), counts[task["id"]]
        rollouts += [(task, name, n) for n in range(first, first + group) if (name, n) not in done]
        counts[task["id"]] += group
    while rollouts:
        unread, tries = [], tries - 1
        # Closed if the caller stops early.
        with contextlib.closing(play_all(sampler, rollouts, frames, step, play, pump)) as episodes:
            for episode in episodes:
                # An outage may have passed by then. Without the windows that it cost, the rest
                # would teach the policy to make no calls.
                if tries and episode.status == "video_error":  # engines ask again themselves
                    unread.append((episode.task, episode.group, episode.sample))
                else:
                    yield episode
        rollouts, pump = unread, None


def play_all(sampler, rollouts, frames, step, play, pump):
    """As `run`, each rollout once. rollouts: [(task, group, sample)]."""
    sampler = replace(sampler, pump=pump or EngineLoop(sampler.engine, sampler.threads))

    # More episodes than the engine's batch keep the batch full while some of them decode.
    live = sampler.max_live or 2 * sampler.engine.max_seqs
    slots = asyncio.Semaphore(live)

    async def play_and_score(episode):
        with launch.naming(episode.task["id"]):
            async with slots:  # one that waits for its judge keeps no other from being played
                episode = await play(episode, sampler)
            check_calls(episode)
            return await score_episode(episode, sampler.pay, sampler.judge)

    # A generator: an Episode and its coroutine exist only once there is room for them.
    coroutines = (play_and_score(Episode(task, name, n, draw_num_frames(
        frames, sampler.agent.seed, step, task["id"]), step)) for task, name, n in rollouts)
    finished = in_flight(sampler.pump, coroutines, live + 256 * (sampler.judge is not None))

    async def following():
        return await anext(finished, None)

    # A loop of its own: this is a plain generator, which any script can iterate over. If the caller
    # stops early, and after Ctrl-C, Runner cancels the episodes under way and ends their threads.
    with asyncio.Runner() as runner:
        try:
            yield from iter(lambda: runner.run(following()), None)
        except KeyboardInterrupt:
            # It may have come as the loop was about to stop. The loop then stops once more, at its
            # next start, which must not be that of the episodes' end.
            with contextlib.suppress(RuntimeError):
                runner.run(asyncio.sleep(0))
            raise


def check_calls(episode: Episode) -> None:
    """An episode that has ended fails if the machine failed one of its calls: a window whose file
    has gone, or a request that failed, says nothing of the policy."""
    failed = [c for c in episode.calls if c["status"] in runs.MACHINE_FAULTS]
    if failed and episode.status in ("ok", "context"):  # the call's text may have filled it
        episode.fail(failed[0]["status"], f"a call: {failed[0].get('error', failed[0]['summary'])}")


async def score_episode(episode: Episode, pay: rewards.RewardConfig | None = None,
                        judge=None) -> Episode:
    """Sets the reward of an episode that has ended. judge: plumbing.judge.Judge or None. It reads
    open answers only, because letters, lists, spans and missing answers are graded by rule."""
    task, verdict = episode.task, None
    answer = rewards.final_answer(episode.turns, episode.think_open)
    judged = (judge is not None and rewards.task_types()[task["type"]].judged
              and None not in (task["answer"], answer))
    if judged:
        future, episode.notes["judge_cached"] = judge.ask(task["question"], task["answer"], answer)
        # The other episodes go on meanwhile. Shielded: equal answers share one request.
        verdict = await asyncio.shield(asyncio.wrap_future(future))
    episode.reward = compute_reward(episode, pay, verdict)
    if judged:  # the record says who scored
        episode.reward["judge"] = "fallback" if verdict is None else verdict
    return episode


def compute_reward(episode: Episode, pay: rewards.RewardConfig | None = None,
                   verdict: bool | None = None) -> dict:
    """Episode -> reward terms, see rewards.score; {} for a question without a known answer.
    verdict: a judge's, None for the rule."""
    if episode.task["answer"] is None:
        return {}
    tokens = sum(episode.context.mask) if episode.context else 0  # sampled by the main agent
    return rewards.score(episode.turns, episode.task, episode.calls, episode.think_open, pay,
                         tokens, verdict)


# ---- below: looking at episodes, checks, the command line (may be skipped) ----------------------


def episode_text(episode: Episode, codec: chat.ChatProcessor) -> str:
    """One episode as text: «sampled», «*sampled, with format credit*», and inserted as it is."""
    marks = {"inserted": ("", ""), "sampled": ("«", "»"), "struct": ("«*", "*»")}
    ids = episode.context.ids if episode.context else []
    kinds = ["inserted"] * len(ids)
    for start, end in episode.spans:
        kinds[start:end] = ["sampled"] * (end - start)
    for t in episode.struct:  # the very tokens that selective anchoring credits
        kinds[t] = "struct"
    text, pads = [], {codec.image_pad}
    for kind, places in itertools.groupby(range(len(ids)), kinds.__getitem__):
        # Of a run of placeholders only the first is shown: a frame has dozens.
        run = [ids[i] for i in places if ids[i] not in pads or ids[i - 1] != ids[i]]
        # Characters that steer a terminal are replaced: a model may write any.
        text.append(launch.printable(chat.decode(codec, run, True)).join(marks[kind]))
    terms = " ".join(f"{k} {episode.reward[k]:.2f}" for k in ("total", "acc", "fmt", "tool")
                     if episode.reward)
    head = (f"== {episode.task['id']} sample {episode.sample} | K {episode.num_frames} | "
            f"{episode.status} | {terms} | gold {episode.task['answer']}")
    calls = [f"   call {c['start']}-{c['end']}: {c['status']} -> {c['summary']}"
             for c in episode.calls]
    return "\n".join([launch.printable(head), "".join(text), *map(launch.printable, calls)])


def from_dict(row: dict) -> Episode:
    """A line of a rollout JSONL -> Episode, without decoded frames."""
    items = [chat.VisionItem(**v) for v in row["vision"]]
    # No compact ids: no engine is asked to go on from a record.
    context = Context(ids=row["ids"], mask=row["mask"], logps=row["logps"], items=items)
    return Episode(num_frames=row["K"], context=context if row["ids"] else None,
                   subtitles=row.get("subtitles", ""), fingerprint=row.get("fingerprint"),
                   **{name: row[name] for name in RECORD_FIELDS})


def add_agent_arguments(parser, tools_flag: bool = True) -> None:
    """Flags and settings of the agent loop, the same in rollout.py, grpo.py and eval.py: the fields
    of AgentConfig, those of VideoSource, the engine. tools_flag=False leaves --tools to the caller
    (eval.py runs both modes)."""
    add, yes_no = parser.add_argument_group("agent").add_argument, argparse.BooleanOptionalAction
    for f in fields(AgentConfig):
        if f.metadata["is_setting"]:
            parser.add_setting(f.name, f.metadata["help"], f.default)
        elif tools_flag or f.name != "tools":
            kind = {"action": yes_no} if f.type is bool else {"type": f.type}
            add(f"--{f.name.replace('_', '-')}", default=f.default, help=f.metadata["help"],
                choices=f.metadata["choices"], **kind)
    parser.add_setting("subtitles", "of tasks that name a file: lines spoken while a frame of the "
                       "overview is shown, all, or none; default of eval.py --bench: as it asks",
                       "aligned", choices=["aligned", "full", "none"])
    video.add_arguments(parser)
    arguments.add_computing(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--gpu-memory-utilization", type=float, default=0.5, help="vLLM's part while awake")
    parser.add_setting("max_num_seqs", "sequences in the engine's batch", 64)


def agent_settings(args, data_path: str | None) -> tuple[AgentConfig, VideoSource]:
    """Parsed flags -> (AgentConfig, VideoSource). data_path: of the task file, None for a
    benchmark. Raises UserError naming the flag."""
    agent = AgentConfig(**{f.name: getattr(args, f.name) for f in fields(AgentConfig)})
    arguments.require_min(1, args, "max_new_tokens", "max_model_len", "max_parallel",
                          "max_num_seqs")
    arguments.require_min(0, args, "max_turns")
    # Chained comparisons, because they refuse NaN too. 2 is vLLM's own bound.
    if not (0 <= args.temperature <= 2 and 0 < args.gpu_memory_utilization < 1):
        raise launch.UserError("--temperature must lie between 0 and 2, --gpu-memory-utilization "
                               f"between 0 and 1; got {args.temperature} and "
                               f"{args.gpu_memory_utilization}")
    # NaN fails this comparison too.
    min_setting = min(agent.sub_fps, agent.sub_frames, agent.sub_max_new_tokens)
    if not min_setting > 0 or agent.sub_fps == float("inf"):
        raise launch.UserError("--set: sub_fps, sub_frames, sub_max_new_tokens must be above 0")
    min_pixels = getattr(args, "min_pixels", VideoSource.min_pixels)  # eval.py alone has it
    arguments.require_min(min_pixels, args, "max_pixels")
    if not os.path.isdir(root := video.root_of(args, data_path)):
        raise launch.UserError(f"--video-root {root}: no such folder")
    spoken = partial(task_subtitles, which=args.subtitles) if args.subtitles != "none" else None
    return agent, VideoSource(
        root, video.frame_cache(args), min_pixels, args.max_pixels, subtitles=spoken,
        check_labels=bool(data_path))


def check_positions(codec, agent) -> None:
    """Raises UserError if a context may be longer than the checkpoint's positions."""
    if agent.max_model_len > (max_positions := data.max_positions(codec)):
        raise launch.UserError(f"--max-model-len {agent.max_model_len}: the checkpoint has "
                               f"{max_positions} positions; lower it (for toy.py: --preset toy)")


def check_context(codec, tasks, agent, source, frames) -> None:
    """Raises UserError if the context cannot hold the largest prompt of the first task whose video
    can be read. Called before any weights are loaded."""
    check_positions(codec, agent)
    # Overview prompts differ little in length, but for subtitles, so the first readable task stands
    # for all. --check looks at all.
    for task in tasks[:8]:
        spec = source.overview_spec(task, max_num_frames(frames))
        try:
            overview, _, subtitles, _ = source.load_overview(spec, task)
        except video.VideoError:
            continue  # counted as video_error when the episode of this task comes
        tokens = prompt_tokens(codec, agent, task, spec, overview, overview.seconds, subtitles)
        if tokens + 32 > agent.max_model_len:  # 32: the shortest thought and answer worth sampling
            reason = f"task {task['id']} with {len(overview.seconds)} frames takes {tokens} tokens"
            raise launch.UserError(f"--max-model-len {agent.max_model_len} is too small: {reason}; "
                                   "raise it, or lower --frames or --max-pixels")
        return


def prompt_tokens(codec, agent, task, spec, frames, times, subtitles) -> int:
    """Tokens of the first prompt of a task with an overview of Frames at `times`, seconds; with
    --crop-response frames those of a window too."""
    # Only sizes and times enter the ids: `frames` may hold fewer.
    item = replace(chat.vision_item(spec, frames), frames=len(times), seconds=list(times))
    messages = main_messages(task, len(times), agent.tools, subtitles, agent.crop_response)
    tools = tool_schema(agent.crop_response) if agent.tools else None
    tokens = len(chat.encode_prompt(codec, messages, [item], tools)[0])
    if agent.tools and agent.crop_response == "frames":  # a window has to fit as well
        side = codec.patch * codec.merge
        tokens += agent.sub_frames * (item.height // side) * (item.width // side)
    return tokens


def max_num_frames(frames: int | str) -> int:
    """--frames -> the largest K that a run can ask for."""
    return max(GATED_FRAMES) if frames == "gated" else int(frames)


def frames_argument(text: str) -> int | str:
    """--frames: a number of overview frames, or "gated"."""
    if text != "gated" and not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number or 'gated'")
    return text if text == "gated" else int(text)


def make_engine(ckpt, codec, args, sleeping=False, windows=(0, 0)) -> VllmEngine:
    """The engine of the flags. Collective.

    sleeping: give memory back between rollouts (GPU). windows: (crops that one context may hold
    beside the overview, frames of each).
    """
    from plumbing import checkpoint  # imports torch, so not at the top

    launch.use_gpu(args.cpu)
    # The engine reserves memory for the largest context: all frames that one may hold.
    num_frames, (crops, window_frames) = max_num_frames(args.frames), windows
    if args.crop_response == "frames":
        crops, window_frames = args.max_turns * args.max_parallel, args.sub_frames
    # Every frame is an item, and all crops add to the overview.
    largest = max(args.sub_frames, num_frames + crops * window_frames)
    base = checkpoint.base_of(ckpt)
    engine = VllmEngine(base, codec, EngineConfig(
        args.max_model_len, largest, args.max_pixels, args.max_num_seqs,
        args.gpu_memory_utilization, sleeping))
    if base != ckpt:  # the engine loads the base; weights with merged adapters replace it
        engine.sync(checkpoint.merged_weights(ckpt))
    return engine


def toy_defaults() -> dict[str, int]:
    """Lengths of the toy world: a context is a few hundred tokens, a window 8 frames."""
    return dict(max_model_len=1024, max_new_tokens=128, sub_max_new_tokens=24, max_turns=1)


def check_rollout_file(out: str, read: str) -> None:
    """Raises UserError if --out cannot be the name of a rollout file. read: the input."""
    if os.path.isdir(out) or not out.endswith(".jsonl"):  # a file of a checkpoint, say
        raise launch.UserError(f"--out {out}: give the name of a file in .jsonl, not a folder")
    arguments.check_outputs([out], [read, verdicts_beside(out)])


# ------------------------------------------------------------------------------------------------
# The command line


def parse_args():
    parser = arguments.parser(__doc__)
    add = parser.add_argument_group("what to run").add_argument
    add("--ckpt", required=True, help="checkpoint folder")
    add("--data", required=True, help="task JSONL")
    add("--out", default="rollouts.jsonl", help="rollout JSONL to write")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    add("--frames", type=frames_argument, default="gated", help="K, or gated: K ~ U{4,8,16,32,64}")
    add("--num-generations", type=int, default=1, help="rollouts per task")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--step", type=int, default=0, help="enters seeds and draws of K, as in training")
    add("--show", type=int, default=0, help="print this many episodes, «sampled» text in marks")
    add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says")
    # A preset changes defaults, which yield to flags. So the preset must be known first.
    if arguments.parse_early(parser).preset == "toy":
        parser.set_defaults(temperature=1.0, **toy_defaults())  # as grpo.py samples the toy
    args = parser.parse_args()
    arguments.require_min(1, args, "num_generations")
    check_rollout_file(args.out, args.data)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise launch.UserError("rollout.py is one process: start it with python for each GPU")
    return args


def write_rollouts(rows: list[dict], out: str) -> None:
    """Writes records to --out in place of its .part, and ends the run there."""
    # Episodes finish in any order; the file does not depend on that order.
    rows.sort(key=lambda row: (row["group"], row["sample"]))
    launch.write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{out}.part")
    launch.unlock()


def verdicts_beside(out):
    """The file of a judge's verdicts for rollouts that are written to `out`."""
    return os.path.join(os.path.dirname(os.path.abspath(out)), "judge.jsonl")


def summary_line(rows, new, seconds):
    """Records, how many are new, seconds that these took -> one line for the terminal."""
    # Failed episodes stay in every denominator: leaving them out would flatter a run.
    terms = ("total", "acc", "fmt", "tool")
    mean = {k: sum(row["reward"][k] for row in rows) / len(rows) for k in terms}
    kappa = sum(c["status"] == "ok" for row in rows for c in row["calls"]) / len(rows)
    return (f"{new} new rollouts in {seconds:.1f} s ({new / seconds:.1f}/s), {len(rows)} in all | "
            f"R {mean['total']:.3f} (acc {mean['acc']:.3f} fmt {mean['fmt']:.3f} "
            f"tool {mean['tool']:.3f}) | kappa {kappa:.2f} calls/rollout | "
            f"{sum(row['status'] != 'ok' for row in rows)} not ok")


def main():
    # Everything that can be wrong with the input is found before the engine is loaded.
    args = parse_args()
    from tqdm import tqdm

    from plumbing import checkpoint  # imports torch, which takes seconds: --help answers at once

    read = {"--data": (args.data, tasks := data.read_tasks(args.data))}
    tasks, ckpt = tasks[: args.limit or None], checkpoint.resolve(args.ckpt)
    agent, source = agent_settings(args, args.data)
    inputs = runs.input_identities({"--ckpt": ckpt}, read, subtitle_files(args, (args.data, tasks)))
    wanted = len(tasks) * args.num_generations
    names = {(launch.join_key(args.step, t["id"]), n)
             for t in tasks for n in range(args.num_generations)}
    rows = runs.claim_file(args.out, args, inputs, names, {*RECORD_FIELDS, "ids"})
    for path in (args.out, runs.args_path(args.out)):
        for leftover in glob.glob(f"{glob.escape(path)}.tmp*"):  # a kill in write_atomic
            os.remove(leftover)
    if len(rows) == wanted:
        write_rollouts(rows, args.out)  # perhaps a kill came first
        return launch.print0(f"nothing to do: {args.out} has all {wanted} rollouts")
    launch.reset_watchdog(args.patience)  # a disk that hangs ends the run
    source.cache.check_present(args, args.data, tasks)
    launch.print0(f"{args.ckpt}: loading the tokenizer, then the engine")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    check_context(codec, tasks, agent, source, args.frames)
    judge = open_judge(args, verdicts_beside(args.out))
    sampler = RolloutWorker(make_engine(ckpt, codec, args), codec, source, agent, judge=judge)

    runs.write_args(runs.args_path(args.out), args, inputs=inputs)
    stop_event, began, before = launch.stop_on_signal(), time.monotonic(), len(rows)
    done = {(row["group"], row["sample"]) for row in rows}
    episodes = run(sampler, tasks, args.frames, args.num_generations, args.step, done=done)
    with contextlib.closing(episodes), open(f"{args.out}.part", "a", encoding="utf-8") as part:
        if part.tell():
            part.write("\n")  # ends a line that a kill has torn
        for episode in tqdm(episodes, total=wanted, initial=before, disable=None):
            launch.reset_watchdog(args.patience)  # an engine that hangs ends the run
            rows.append(episode.to_dict())
            part.write(json.dumps(rows[-1]) + "\n")
            part.flush()  # a kill loses the episodes under way alone
            if len(rows) - before <= args.show:
                print(episode_text(episode, codec), flush=True)
            if stop_event.is_set():
                break
    write_rollouts(rows, args.out)
    print(f"{summary_line(rows, len(rows) - before, time.monotonic() - began)} -> {args.out}")
    failed = [row for row in rows if runs.is_retried(row)]
    errors = [row["error"] for row in failed if row["error"]]
    # A judge may have no verdict on a single answer, however often it is asked.
    judge_away = sum(runs.unjudged(row["reward"]) for row in failed) > wanted / 100
    judge_away |= bool(judge and judge.lost)
    if len(rows) < wanted or judge_away or len(failed) == wanted or launch.MACHINE in str(errors):
        raise launch.RunError(f"stopped after {len(rows) - len(failed)} of {wanted} rollouts; the "
                              "same command goes on")
    sampler.engine.close()  # on a GPU this ends the process


if __name__ == "__main__":
    launch.run_main(main)
