"""
rollout.py (tests/test_rollout.py): the agent loop that RL, evaluation and the command line below
share.

One episode, for a task with K overview frames:
  main agent   <system><K frames><question> -> turn 1
  fan-out      turn 1 holds n calls: n sub-agents, the same weights, each in a fresh context with
               the frames of one window; each returns a short summary
  gather       ALL n responses, in call order, become ONE user turn with ONE generation prompt
               (--crop-response frames: no sub-agents, the responses are the windows' frames)
  main agent   turn 2, ..: at most --max-turns tool turns, then one turn that must answer
Every main turn starts with a forced `<think>\\n` (--think-prefix). Ids only grow:
next prompt = previous ids + sampled ids + glue. A sampled id is never decoded and encoded again.

An episode is a coroutine that awaits frames and samples. The pump (engine.py) feeds all episodes
into one engine, so a fan-out starts the moment its turn ends. Whatever the model writes, and a
video whose bytes do not decode, is a counted outcome in the record. Everything else raises, with
the task's id. With --frames gated, K is drawn once per prompt from a digest of (seed, step, task).

Departs from the paper: a sub-agent is told the question. Calls in the last turn are not run,
because no turn follows that could read the responses. Calls inside a thought that never closes are
run.

Reads:  a checkpoint folder, task JSONL.
Writes: rollout JSONL, one episode a line, enough to train on without the engine (grpo.py
        --rollouts), and beside it r.args.json; with --judge-url the judge's verdicts, judge.jsonl.
        Meanwhile finished episodes are in r.jsonl.part, and the same command goes on from there.

CPU toy:  python rollout.py --preset toy --ckpt sft_out --data toy/rl.jsonl --num-generations 4 \\
            --show 2 --out r.jsonl
1 GPU:    python rollout.py --ckpt sft_out --data rl.jsonl --num-generations 8 --out r.jsonl
8 GPUs:   one process per GPU, each with a part of --data; grpo.py has one engine per rank
"""
import argparse
import asyncio
import collections
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
from agent_tools import TOOLS, CropVideo
from engine import EngineConfig, EngineLoop, Request, VllmEngine, in_flight
from plumbing import data
from plumbing.data import task_subtitles
from plumbing.judge import add_judge_arguments, open_judge
from video import VideoSource

# -----------------------------------------------------------------------------
# Prompts. SFT data, RL and evaluation all build their prompts here: a model that was trained on one
# wording and asked in another loses accuracy without any error.

ANSWER_STYLES = {  # the end of a question, by the type of its task: the form that rewards.py reads
    "mcq": "Answer with the letter of one option.",
    "open": "Answer with a few words.",
    "list": "Answer with a list, in order, separated by commas.",
    "grounding": "Answer with the start and the end in seconds, for example: 12.5 - 20.0",
}
SUB_PROMPT = (
    "You watch one short window of a longer video. Say in a few words what happens in it "
    "that helps to answer the question. Times are those of the whole video."
)
EMPTY_SUMMARY = "(nothing to report)"  # the response to a call if the sub-agent wrote no summary


def system_prompt(tools=True, crop_response="summary"):
    lines = [
        "You answer questions about a long video. A few frames from all over it are shown, each "
        "after its time.",
        "Think first, between <think> and </think>.",
    ]
    if tools:
        lines += [tool.prompt(crop_response) for tool in TOOLS.values()]
    lines.append("When you know the answer, write it between <answer> and </answer>.")
    return "\n".join(lines)


def tool_schema(crop_response="summary"):
    """Declaration of the tools for the chat template."""
    return [
        {"type": "function", "function": tool.schema(crop_response)} for tool in TOOLS.values()
    ]


def question_text(task):
    """Task -> the text after the frames: question, options, how to answer."""
    lines = [task["question"]]
    # Publishers label options in several ways; here every option gets the same kind of label.
    for letter, option in zip(string.ascii_uppercase, data.bare_options(task.get("options") or [])):
        lines.append(f"{letter}. {option}")
    # "style": a client of tools/serve.py has said how to answer.
    style = task.get("style", ANSWER_STYLES[task["type"]])
    if style:
        lines.append(style)
    return "\n" + "\n".join(lines)


def main_messages(task, num_frames, tools=True, subtitles="", crop_response="summary"):
    """The main agent's first messages: system, overview of num_frames, subtitles if there are any,
    question. crop_response: summary | frames, the response to a call."""
    text = question_text(task)
    if subtitles:
        text = f"\nSubtitles:\n{subtitles}\n{text}"
    # Frames come first: all rollouts of a group, and questions of one video, share that prefix.
    overview = {"type": "video", "video": task["video"], "frames": num_frames}
    return [
        {"role": "system", "content": system_prompt(tools, crop_response)},
        {"role": "user", "content": [overview, {"type": "text", "text": text}]},
    ]


def sub_messages(task, window):
    """A sub-agent's messages: the frames of one window, its times, the question. window: {"start",
    "end", ..} in seconds, as video.load reads it."""
    text = f"\nWindow: {window['start']:g} to {window['end']:g} seconds."
    text += f"\nQuestion: {task['question']}"
    frames = {"type": "video", "video": task["video"], **window}
    return [
        {"role": "system", "content": SUB_PROMPT},
        {"role": "user", "content": [frames, {"type": "text", "text": text}]},
    ]


# -----------------------------------------------------------------------------
# Draws. Python's hash() of a string differs from process to process, so draws come from digests.

GATED_FRAMES = (4, 8, 16, 32, 64)  # the numbers of overview frames of nFrames gating (paper)


def draw_num_frames(frames, seed, step, task_id):
    """--frames (a number, or "gated") -> K of a task in a step. "gated" is nFrames gating: K ~
    Uniform, one draw per prompt and step, so a whole group shares K."""
    if frames != "gated":
        return int(frames)
    draw = launch.stable_hash("K", seed, step, task_id)  # "K": not the digest of a sampling seed
    return GATED_FRAMES[draw % len(GATED_FRAMES)]


# -----------------------------------------------------------------------------
# Parts of an episode


@dataclass
class AgentConfig:
    """The rules of an episode. See add_agent_arguments for the flags of the same names."""

    temperature: float = 0.7
    max_new_tokens: int = 2048
    sub_max_new_tokens: int = 512
    max_model_len: int = 32768
    max_turns: int = 3
    max_parallel: int = 5
    tools: bool = True
    crop_response: str = "summary"
    think_prefix: bool = True
    seed: int = 0


@dataclass
class Context:
    """Ids, mask and log-probs of one agent context. The lists only grow, and together."""

    ids: list = field(default_factory=list)  # expanded: one placeholder per vision token
    compact: list = field(default_factory=list)  # one placeholder per frame, as engines take them
    mask: list = field(default_factory=list)  # 1 = sampled by this policy, and trained
    logps: list = field(default_factory=list)  # of the distribution sampled from; 0 if mask is 0
    items: list = field(default_factory=list)  # [chat.VisionItem]
    frames: list = field(default_factory=list)  # [video.Frames], one per item

    def add_masked(self, ids, compact=None):
        """Adds tokens that no model sampled: prompts, forced starts, tool responses. compact: the
        same ids with one placeholder per frame, if there are frames among them."""
        self.ids += ids
        self.compact += ids if compact is None else compact
        self.mask += [0 for _ in ids]  # neither loss nor credit
        self.logps += [0.0 for _ in ids]

    def add_sampled(self, ids, logps):
        """Adds tokens that the policy sampled: the ids themselves, since text that is encoded again
        may give other ids."""
        self.ids += ids
        self.compact += ids
        self.mask += [1 for _ in ids]  # trained
        self.logps += logps

    def extend(self, other):
        """Adds another context at the end."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def request(self, name, **settings):
        """The context as a Request. Lists are copied, because the context grows on meanwhile."""
        return Request(
            name, list(self.compact), list(self.ids), list(self.items), list(self.frames),
            **settings,
        )

    def record(self):
        """What training needs again. The frames are loaded by the specs of "vision"."""
        return {
            "ids": self.ids,
            "mask": self.mask,
            "logps": self.logps,
            "vision": [vars(item) for item in self.items],
        }


def open_context(codec, messages, specs, frames, tools=None):
    """Messages, with the spec and the decoded Frames of each of their videos -> Context."""
    items = [chat.vision_item(spec, f) for spec, f in zip(specs, frames)]
    context = Context(items=items, frames=list(frames))
    ids, compact = chat.encode_prompt(codec, messages, items, tools)
    context.add_masked(ids, compact)
    return context


# Fields of an Episode that its record holds under the same name.
RECORD_FIELDS = (
    "task", "group", "sample", "policy_step", "status", "error", "think_open", "turns", "pieces",
    "spans", "struct", "finish", "calls", "reward", "advantage", "timing", "subtitles",
)


@dataclass
class Episode:
    """One rollout. `to_dict` is a line of the rollout JSONL."""

    task: dict
    group: str  # "step/task id": the rollouts of one prompt
    sample: int  # number within the group
    num_frames: int  # K, "K" in the record
    policy_step: int  # after which the weights were taken
    # context: the prompt or a response does not fit. engine_error: of an endpoint, in evaluation.
    status: str = "ok"  # ok | video_error | context | engine_error
    error: str = None
    context: Context = None
    think_open: bool = False  # every turn begins inside a thought: forced, or by the template
    turns: list = field(default_factory=list)  # sampled text of each main turn
    pieces: list = field(default_factory=list)  # the same token by token, for tools/view.py
    spans: list = field(default_factory=list)  # [start, end) of a turn's sampled ids in context.ids
    struct: list = field(default_factory=list)  # places in context.ids that carry format credit
    finish: list = field(default_factory=list)  # per turn: "stop" | "length" | "call" (cut there)
    calls: list = field(default_factory=list)  # dicts, in the order they were written
    reward: dict = field(default_factory=dict)
    advantage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)  # seconds
    duration: float = None  # seconds of the video
    subtitles: str = ""  # their text in the prompt
    notes: dict = field(default_factory=dict)  # for evaluation/: first messages, times; not saved

    def fail(self, status, error):
        """Records how the episode ended, if not well."""
        self.status, self.error = status, error

    def executed(self):
        """Number of calls that were run."""
        return sum(call["status"] == "ok" for call in self.calls)

    def to_dict(self):
        context = self.context or Context()  # a broken video has none
        own = {name: getattr(self, name) for name in RECORD_FIELDS}
        return {**own, "K": self.num_frames, **context.record()}


def from_dict(row):
    """A line of a rollout JSONL -> Episode, without decoded frames: grpo.py --rollouts trains on
    it."""
    context = None
    if row["ids"]:
        items = [chat.VisionItem(**item) for item in row["vision"]]
        # No compact ids: no engine is asked to go on from a record.
        context = Context(ids=row["ids"], mask=row["mask"], logps=row["logps"], items=items)
    own = {name: row[name] for name in RECORD_FIELDS}
    return Episode(num_frames=row["K"], context=context, **own)


@dataclass
class RolloutWorker:
    """Everything that turns tasks into episodes."""

    engine: object  # submit(Request), abort(id), poll() -> [Completion], max_seqs: the batch
    codec: chat.ChatProcessor
    source: VideoSource
    agent: AgentConfig
    pay: rewards.RewardConfig = rewards.PAPER  # the terms of the reward and their weights
    judge: object = None  # plumbing.judge.Judge, whose verdicts pay open answers; None: F1 of words
    max_live: int = None  # episodes at once; None: twice the engine's batch
    open_context: callable = open_context  # of sub-agents; evaluation/ has another
    pump: EngineLoop = None  # of the run, in the copy that the run's episodes are given


# -----------------------------------------------------------------------------
# The episode


async def run_episode(episode, worker):
    """The main agent: overview, then turns that look closer, then a turn that answers."""
    agent, codec = worker.agent, worker.codec
    loaded = await load_overview(episode, worker)
    if loaded is None:
        return episode  # episode.status says why
    spec, frames = loaded
    messages = main_messages(
        episode.task, episode.num_frames, agent.tools, episode.subtitles, agent.crop_response
    )
    tools = tool_schema(agent.crop_response) if agent.tools else None
    context = episode.context = open_context(codec, messages, [spec], [frames], tools)
    episode.notes.update(opening=messages, seconds=frames.seconds)
    episode.think_open = agent.think_prefix or codec.opens_thought
    # The forced start of every turn. No ids if the template has just opened a thought.
    prefix = chat.think_prefix_ids(codec, context.ids) if agent.think_prefix else []
    if len(context.ids) + len(prefix) >= agent.max_model_len:
        episode.fail("context", f"{len(context.ids)} tokens leave no room in a context of "
                     f"{agent.max_model_len}")
        return episode

    # One more turn than tool turns, so no episode ends on tool responses that were never read.
    tool_turns = agent.max_turns if agent.tools else 0
    for turn in range(tool_turns + 1):
        context.add_masked(prefix)  # not sampled, so neither gradient nor credit
        completion = await sample(context, episode, worker, agent.max_new_tokens, turn)
        record_turn(episode, codec, completion, "stop" if completion.ended else "length")
        calls = []
        if agent.tools:  # without tools a model may still write calls; they are text then
            calls = rewards.parse_tool_calls(completion.text, TOOLS, episode.think_open)
        records = record_calls(episode, calls, turn)
        if turn == tool_turns or not records:
            for record in records:  # they come too late
                record.update(status="not_run", summary="")
            break
        # Fan-out: all calls at once.
        windows = await answer_calls(records, episode, worker)
        # Gather: ONE user turn, in call order, then ONE generation prompt.
        responses = response_context(codec, records, windows, completion.ended, tools)
        # If no token fits after the responses, they are left out: an episode never ends on a tool
        # response.
        if len(context.ids) + len(responses.ids) + len(prefix) >= agent.max_model_len:
            episode.fail("context", f"the responses exceed a context of {agent.max_model_len}")
            break
        context.extend(responses)
    return episode


async def load_overview(episode, worker):
    """-> (spec, Frames) of the overview; None for a video that cannot be decoded."""
    source, began = worker.source, time.monotonic()
    spec = source.overview_spec(episode.task, episode.num_frames)
    try:
        # In a thread of the pump: decoding takes seconds, and other episodes go on meanwhile.
        frames, episode.duration, episode.subtitles = await worker.pump.load(
            source.load_overview, spec, episode.task
        )
    except video.VideoError as error:
        episode.fail("video_error", str(error))
        return None
    # decode_s: waiting for a thread included.
    episode.timing.update(decode_s=time.monotonic() - began, video_s=episode.duration)
    return spec, frames


async def sample(context, episode, worker, max_tokens, *turn):
    """Samples what continues a context -> Completion. turn: number of the main turn; of a
    sub-agent, that and the number of the call."""
    agent = worker.agent
    tokens_left = agent.max_model_len - len(context.ids)
    return await worker.pump.sample(context.request(
        # The name is unique within a run. evaluation/costs.py finds an episode's requests by name.
        "/".join(map(str, (episode.group, episode.sample, *turn))),
        max_tokens=min(max_tokens, tokens_left),
        temperature=agent.temperature,
        seed=turn_seed(episode, agent, *turn),
    ))


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
    for place, credited in enumerate(rewards.structural_mask(pieces), start):
        if credited:
            episode.struct.append(place)
    if completion.ended:
        pieces = [*pieces[:-1], b""]  # the end of the turn is no text
    episode.pieces.append(chat.text_pieces(pieces))
    episode.turns.append(completion.text)
    episode.finish.append(finish)


# -----------------------------------------------------------------------------
# Calls and responses


def record_calls(episode, calls, turn):
    """[rewards.ToolCall] of a turn -> their records, which the episode holds too."""
    records = []
    for call in calls:
        # Every call gets a record, also a bad one: each must be answered, in the order of the text.
        record = {
            "turn": turn, "name": call.name, "start": None, "end": None, "num_frames": None,
            "parseable": call.error is None, "status": "pending", "summary": "", "sub_tokens": 0,
        }
        if call.error is None:
            record.update(call.arguments)
        else:
            record.update(status="error", summary=f"error: {call.error}")
        records.append(record)
    episode.calls += records
    return records


async def answer_calls(records, episode, worker, tools=TOOLS):
    """Runs the good calls of a turn, all at once: their decoding and their tokens share the machine
    with every other episode. -> for each call (spec, Frames) that the main agent shall see, or
    (None, None) if the response is the record's summary."""
    jobs = []
    num_good = 0  # a bad call does not count towards max_parallel, because nothing runs for it
    for record in records:
        jobs.append(answer_call(record, num_good, episode, worker, tools))
        if record["status"] == "pending":
            num_good += 1
    return await asyncio.gather(*jobs)


async def answer_call(record, number, episode, worker, tools):
    """One call of answer_calls. number: among the good ones of its turn."""
    agent = worker.agent
    if record["status"] != "pending":
        return None, None
    if number >= agent.max_parallel:
        record.update(status="not_run",
                      summary=f"not run: at most {agent.max_parallel} calls per turn")
        return None, None
    tool = tools[record["name"]]
    try:
        spec = tool.spec(record, episode.task, episode.duration)
        frames = await worker.pump.load(worker.source.load, spec)
    except video.VideoError as error:
        # Only the reason, since the whole text holds a path on this machine.
        why = f"error: the window could not be read ({error.why})"
        record.update(status="video_error", summary=why)
        return None, None
    except ValueError as error:  # the tool's or the video's: no part of it lies in the video
        record.update(status="error", summary=f"error: {error}")
        return None, None
    if "start" in spec:
        record.update(start=spec["start"], end=spec["end"])  # clamped
    seconds = [round(float(second), 3) for second in frames.seconds]
    if tool.answered_by(agent.crop_response) == "main":
        record.update(status="ok", frames_seen=len(seconds), seconds_seen=seconds)
        return spec, frames
    context = worker.open_context(  # a sub-agent has no tools
        worker.codec, sub_messages(episode.task, spec), [spec], [frames]
    )
    record.update(await ask_sub_agent(context, episode, worker, record["turn"], number))
    if record["status"] == "ok":
        record["frames_seen"] = len(seconds)
    return None, None


async def ask_sub_agent(context, episode, worker, turn, number):
    """The same weights in a fresh context that holds one window -> what the record of the call says
    of the result."""
    agent, codec = worker.agent, worker.codec
    began = time.monotonic()
    if len(context.ids) >= agent.max_model_len:
        return {"status": "error", "summary": "error: the window does not fit into the context"}
    completion = await sample(context, episode, worker, agent.sub_max_new_tokens, turn, number)
    if completion.error:  # of an endpoint
        # The model does not see the error, which is about machines and not about the video.
        why = "error: the window could not be looked at"
        return {"status": "engine_error", "error": completion.error, "summary": why}
    # Only the text after the thought is returned: the main agent's context stays small. A thought
    # that never closes holds no summary. A Thinking checkpoint's template opens one.
    _, closed, summary = completion.text.rpartition("</think>")
    opens_thought = codec is not None and codec.opens_thought
    if "<think>" in summary or (opens_thought and not closed):
        summary = ""
    context.add_sampled(completion.ids, completion.logps)
    return {
        "status": "ok",
        "summary": summary.strip() or EMPTY_SUMMARY,
        "seconds": time.monotonic() - began,
        "sub_tokens": sum(context.mask),
        "sub": context.record(),  # not trained; for the gap, and for whoever trains sub-agents
    }


def response_context(codec, records, windows, ended, tools):
    """ALL responses of a turn, in call order, as ONE user turn with ONE generation prompt ->
    Context of these alone. windows: of answer_calls. ended: the turn has its end; else the glue
    adds one."""
    glue, replies = Context(), []
    for record, (spec, frames) in zip(records, windows):
        content = record["summary"]
        if frames is not None:
            content = [{"type": "video", **spec}]
            glue.items.append(chat.vision_item(spec, frames))
            glue.frames.append(frames)
        replies.append({"role": "tool", "content": content})
    compact = chat.tool_response_ids(codec, replies, ended, glue.items, tools)
    glue.add_masked(chat.expand(codec, compact, glue.items), compact)
    return glue


# -----------------------------------------------------------------------------
# All episodes of a batch


def run(worker, tasks, frames=64, group=1, step=0, play=run_episode, pump=None, done=()):
    """
    THE agent loop: RL, evaluation and the command line all call this function. -> iterator of
    scored Episodes, in the order in which they finish.

    frames: K, or "gated" (K drawn per prompt, the same for the whole group). group: rollouts per
    task. step: enters every seed and every draw of K, and is the version of the weights in a
    record. play: coroutine function (Episode, RolloutWorker) -> Episode. pump: a new EngineLoop,
    for a caller that watches it. done: (group, sample) of episodes to leave out.
    """
    worker = replace(worker, pump=pump or EngineLoop(worker.engine, video.decode_threads()))
    counts = collections.Counter()  # group -> rollouts so far
    rollouts = []
    for task in tasks:
        # A batch across two epochs may hold a task twice. The rollouts then form one larger group,
        # and their numbers go on, so that their seeds differ.
        name = launch.join_key(step, task["id"])
        for _ in range(group):
            if (name, counts[name]) not in done:
                rollouts.append((task, name, counts[name]))
            counts[name] += 1

    async def play_and_score(task, name, number):
        num_frames = draw_num_frames(frames, worker.agent.seed, step, task["id"])
        began = time.monotonic()
        with launch.naming(task["id"]):  # an error names the sample
            episode = await play(Episode(task, name, number, num_frames, step), worker)
            episode.timing["total_s"] = time.monotonic() - began
            check_calls(episode)
            return await score_episode(episode, worker.pay, worker.judge)

    # A generator: an episode exists only once there is room for it. More of them than the engine's
    # batch keep the batch full while some of them decode, or wait for a judge.
    coroutines = (play_and_score(*rollout) for rollout in rollouts)
    max_live = worker.max_live or 2 * worker.engine.max_seqs
    finished = in_flight(worker.pump, coroutines, max_live)

    async def next_episode():
        return await anext(finished, None)

    # A loop of its own: this is a plain generator, which any script can iterate over. If the caller
    # stops early, Runner cancels the episodes under way and ends their threads.
    with asyncio.Runner() as runner:
        while True:
            episode = runner.run(next_episode())
            if episode is None:
                return
            yield episode


def check_calls(episode):
    """A window that does not decode says nothing of the policy: such an episode has failed, and is
    not trained on."""
    for call in episode.calls:
        failed = call["status"] in ("video_error", "engine_error")
        if failed and episode.status in ("ok", "context"):  # the call's text may have filled it
            episode.fail(call["status"], f"a call: {call.get('error', call['summary'])}")


async def score_episode(episode, pay=rewards.PAPER, judge=None):
    """Sets the reward of an episode that has ended. judge: plumbing.judge.Judge or None. It reads
    open answers only, because letters, lists, spans and missing answers are graded by rule."""
    task, verdict = episode.task, None
    if task["answer"] is None:  # a question without a known answer, of tools/serve.py
        return episode
    answer = rewards.final_answer(episode.turns, episode.think_open)
    judged = judge is not None and task["type"] == "open" and answer is not None
    if judged:
        future, _ = judge.ask(task["question"], task["answer"], answer)
        # The other episodes go on meanwhile. Shielded: equal answers share one request.
        verdict = await asyncio.shield(asyncio.wrap_future(future))
    episode.reward = rewards.score(
        episode.turns, task, episode.calls, episode.think_open, pay, verdict
    )
    if judged:  # the record says who scored
        episode.reward["judge"] = "fallback" if verdict is None else verdict
    return episode


# ---- below: looking at episodes, arguments, the command line (may be skipped) ----


def episode_text(episode, codec):
    """One episode as text: «sampled» in marks, all else as it was inserted, without the frames."""
    terms = json.dumps(episode.reward)
    parts = [f"== {episode.group}/{episode.sample} K {episode.num_frames} {episode.status} "
             f"{terms}\n"]
    context = episode.context or Context()
    pairs = zip(context.mask, context.ids)
    for sampled, run_of_pairs in itertools.groupby(pairs, key=lambda pair: pair[0]):
        ids = [i for _, i in run_of_pairs if i != codec.image_pad]
        text = chat.decode(codec, ids, keep_end=True)
        parts.append(f"«{text}»" if sampled else text)
    return launch.printable("".join(parts))  # a model may write characters that steer a terminal


def frames_argument(text):
    """--frames: a number of overview frames, or "gated"."""
    return text if text == "gated" else launch.positive(text)


def max_num_frames(frames):
    """--frames -> the largest K that a run can ask for."""
    return max(GATED_FRAMES) if frames == "gated" else int(frames)


def add_agent_arguments(parser, tools_flag=True):
    """Arguments of the agent loop, the same in rollout.py, grpo.py and eval.py. tools_flag=False
    leaves --tools to the caller (eval.py runs both modes)."""
    add = parser.add_argument_group("agent").add_argument
    yes_no = argparse.BooleanOptionalAction
    add("--temperature", type=float, default=0.7, help="of sampling, 0 to 2; 0 = greedy")
    add("--max-new-tokens", type=launch.positive, default=2048, help="tokens per main turn")
    add("--sub-max-new-tokens", type=launch.positive, default=512, help="tokens per summary")
    add("--max-model-len", type=launch.positive, default=32768,
        help="tokens of one context with its answer")
    add("--max-turns", type=int, default=3, help="tool turns before the answer turn; 0: no call")
    add("--max-parallel", type=launch.positive, default=5,
        help="calls run per turn; a further call is answered with a refusal")
    if tools_flag:
        add("--tools", action=yes_no, default=True, help="offer the tools of agent_tools.py")
    add("--crop-response", choices=["summary", "frames"], default="summary",
        help="to a call: a sub-agent's summary, or the window's frames")
    add("--think-prefix", action=yes_no, default=True, help="force <think>\\n in every main turn")
    add("--seed", type=int, default=0, help="of sampling, of the draws of K, of the order of tasks")
    add("--subtitles", choices=["aligned", "full", "none"], default="aligned",
        help="of tasks that name a file: lines spoken while a frame of the overview is shown, all, "
        "or none; default of eval.py --bench: as it asks")
    video.add_arguments(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--gpu-memory-utilization", type=float, default=0.5, help="vLLM's part while awake")
    add("--max-num-seqs", type=launch.positive, default=64, help="sequences in the engine's batch")
    add("--chat-template-kwargs", type=json.loads, default={},
        help='JSON, for the template of all agents: {"enable_thinking": false}')
    add("--cpu", action="store_true", help="compute without a GPU, although there should be one")
    add("--patience", type=float, default=1800.0,
        help="seconds a phase may take before the run ends and prints its stacks; 0 = for ever")


def agent_settings(args, data_path):
    """Parsed arguments -> (AgentConfig, VideoSource). data_path: of the task file, None for a
    benchmark. Raises UserError naming the argument."""
    # Chained comparisons, because they refuse NaN too. 2 is vLLM's own bound.
    if not 0 <= args.temperature <= 2:
        raise launch.UserError(f"--temperature must lie between 0 and 2, got {args.temperature}")
    if not 0 < args.gpu_memory_utilization < 1:
        raise launch.UserError("--gpu-memory-utilization must lie between 0 and 1, got "
                               f"{args.gpu_memory_utilization}")
    root = video.root_of(args, data_path)
    if not os.path.isdir(root):
        raise launch.UserError(f"--video-root {root}: no such folder")
    agent = AgentConfig(**{f.name: getattr(args, f.name) for f in fields(AgentConfig)})
    spoken = None
    if args.subtitles != "none":
        spoken = partial(task_subtitles, which=args.subtitles)
    source = VideoSource(
        root, video.frame_cache(args), max_pixels=args.max_pixels, subtitles=spoken
    )
    return agent, source


def check_context(codec, tasks, agent, source, frames):
    """Raises UserError if the context cannot hold the largest prompt of the first task whose video
    can be read. Called before weights are loaded."""
    # Prompts differ little in length, but for subtitles, so the first readable task stands for all.
    for task in tasks[:8]:
        spec = source.overview_spec(task, max_num_frames(frames))
        try:
            overview, _, subtitles = source.load_overview(spec, task)
        except video.VideoError:
            continue  # counted as video_error when the episode of this task comes
        k = len(overview.seconds)
        messages = main_messages(task, k, agent.tools, subtitles, agent.crop_response)
        tools = tool_schema(agent.crop_response) if agent.tools else None
        tokens = len(open_context(codec, messages, [spec], [overview], tools).ids)
        if tokens + 32 > agent.max_model_len:  # 32: the shortest thought and answer worth sampling
            raise launch.UserError(
                f"--max-model-len {agent.max_model_len} is too small: task {task['id']} with {k} "
                f"frames takes {tokens} tokens; raise it, or lower --frames or --max-pixels"
            )
        return


def make_engine(ckpt, codec, args, sleeping=False, windows=(0, 0)):
    """The engine of the arguments. Collective. sleeping: give memory back between rollouts (GPU).
    windows: (crops that one context may hold beside the overview, frames of each)."""
    from plumbing import checkpoint  # imports torch, so not at the top

    launch.use_gpu(args.cpu)
    # The engine reserves memory for the largest context: all frames that one may hold.
    num_crops, crop_frames = windows
    for tool in TOOLS.values():
        if tool.answered_by(args.crop_response) == "main":
            num_crops = args.max_turns * args.max_parallel
            crop_frames = max(crop_frames, tool.max_frames)
    most = max_num_frames(args.frames) + num_crops * crop_frames
    most = max(most, CropVideo.max_frames)  # the context of a sub-agent
    base = checkpoint.base_of(ckpt)
    engine = VllmEngine(base, codec, EngineConfig(
        args.max_model_len, most, args.max_pixels, args.max_num_seqs,
        args.gpu_memory_utilization, sleeping,
    ))
    if base != ckpt:  # the engine loads the base; weights with merged adapters replace it
        engine.sync(checkpoint.merged_weights(ckpt))
    return engine


def toy_defaults():
    """Lengths of the toy world: a context is a few hundred tokens, a window 8 frames."""
    return {
        "max_model_len": 1024, "max_new_tokens": 128, "sub_max_new_tokens": 24, "max_turns": 1,
    }


# -----------------------------------------------------------------------------
# The command line


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("what to run").add_argument
    add("--ckpt", required=True, help="checkpoint folder, or OWNER/NAME on the Hub")
    add("--data", default="rl.jsonl", help="task JSONL")
    add("--out", default="rollouts.jsonl", help="rollout JSONL to write")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    add("--frames", type=frames_argument, default="gated", help="K, or gated: K ~ U{4,8,16,32,64}")
    add("--num-generations", type=launch.positive, default=1, help="rollouts per task")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--step", type=int, default=0, help="enters seeds and draws of K, as in training")
    add("--show", type=int, default=0, help="print this many episodes, «sampled» text in marks")
    add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says")
    # Read twice: the preset changes defaults, which any flag still overrides.
    if parser.parse_args().preset == "toy":
        parser.set_defaults(temperature=1.0, **toy_defaults())  # as grpo.py samples the toy
    args = parser.parse_args()
    if os.path.isdir(args.out) or not args.out.endswith(".jsonl"):  # a file of a checkpoint, say
        raise launch.UserError(f"--out {args.out}: give the name of a file in .jsonl, not a folder")
    if os.path.realpath(args.out) == os.path.realpath(args.data):
        raise launch.UserError(f"--out {args.out} would be replaced, but it is --data")
    return args


# Arguments that a start which goes on may change: they change no episode.
FREE_ARGUMENTS = {
    "show", "out", "cpu", "patience", "gpu_memory_utilization", "max_num_seqs", "judge_url",
    "judge_key_env", "frame_cache_dir", "missing_videos",
}


def rows_so_far(args, tasks, ckpt):
    """The records that an earlier start of the same command has written. Raises UserError for
    another command, or while another process writes there."""
    folder, name = os.path.split(os.path.abspath(args.out))
    launch.make_out(folder)
    launch.lock(folder, f".{name}.lock")
    args_path = f"{args.out.removesuffix('.jsonl')}.args.json"
    settings = {name: value for name, value in vars(args).items() if name not in FREE_ARGUMENTS}
    # A link such as `last` may lead to other weights by now.
    settings.update(ckpt=os.path.realpath(ckpt), tasks=launch.stable_hash(json.dumps(tasks)))
    settings = json.loads(json.dumps(settings))  # as the file holds them
    paths = [path for path in (args.out, f"{args.out}.part") if os.path.exists(path)]
    if not paths:
        content = {**vars(args), "inputs": settings}
        launch.write_atomic(args_path, json.dumps(content, indent=1))
        return []
    with open(args_path, encoding="utf-8") as file:
        before = json.load(file)["inputs"]
    differ = [name for name in settings if before.get(name) != settings[name]]
    if differ:
        raise launch.UserError(f"{paths[0]} holds rollouts of other {', '.join(differ)}: choose "
                               "another --out, or delete the file")
    # The finished file, if there is one, holds all; a kill may have come before its .part went.
    return launch.read_jsonl(paths[0], ("group", "sample"), faults=["a line that a kill has torn"])


def main():
    args = parse_args()
    from tqdm import tqdm

    from plumbing import checkpoint  # imports torch, which takes seconds: --help answers at once

    # Everything that can be wrong with the input is found before the engine is loaded.
    tasks = data.read_tasks(args.data)[:args.limit or None]
    agent, source = agent_settings(args, args.data)
    ckpt = checkpoint.resolve(args.ckpt)
    rows = rows_so_far(args, tasks, ckpt)
    wanted = len(tasks) * args.num_generations
    if len(rows) == wanted and os.path.exists(args.out):
        return launch.print0(f"nothing to do: {args.out} has all {wanted} rollouts")
    source.cache.check_present(args, args.data, tasks)
    launch.print0(f"{args.ckpt}: loading the tokenizer, then the engine")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    check_context(codec, tasks, agent, source, args.frames)
    folder = os.path.dirname(os.path.abspath(args.out))
    judge = open_judge(args, os.path.join(folder, "judge.jsonl"))
    engine = make_engine(ckpt, codec, args)
    worker = RolloutWorker(engine, codec, source, agent, judge=judge)

    began, before = time.monotonic(), len(rows)
    done = {(row["group"], row["sample"]) for row in rows}
    episodes = run(worker, tasks, args.frames, args.num_generations, args.step, done=done)
    with open(f"{args.out}.part", "a", encoding="utf-8") as part:
        part.write("\n")  # ends a line that a kill has torn; empty ones are skipped
        for episode in tqdm(episodes, total=wanted, initial=before, disable=None):
            rows.append(episode.to_dict())
            part.write(json.dumps(rows[-1]) + "\n")
            part.flush()  # a kill loses the episodes under way alone
            if len(rows) - before <= args.show:
                print(episode_text(episode, codec), flush=True)
    # Episodes finish in any order; the file does not depend on that order.
    rows.sort(key=lambda row: (row["group"], row["sample"]))
    launch.write_atomic(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    os.remove(f"{args.out}.part")
    # Failed episodes stay in the mean: leaving them out would flatter a run.
    total = sum(row["reward"]["total"] for row in rows) / len(rows)
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"{len(rows) - before} new rollouts in {time.monotonic() - began:.1f} s, {len(rows)} in "
          f"all -> {args.out} | R {total:.3f} | {failed} not ok")
    engine.close()  # on a GPU this ends the process


if __name__ == "__main__":
    launch.run_main(main)
