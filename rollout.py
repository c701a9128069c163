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

CPU toy:  python rollout.py --preset toy --ckpt sft_out --data toy/rl.jsonl --out r.jsonl
          python tools/view.py r.jsonl --out r.html   # to look at them
1 GPU:    python rollout.py --ckpt sft_out --data rl.jsonl --num-generations 8 --out r.jsonl
8 GPUs:   one process per GPU, each with a part of --data; grpo.py has one engine per rank
"""
import argparse
import asyncio
import json
import os
import string
import sys
import time
from dataclasses import dataclass, field, fields, replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import rewards
import video
from agent_tools import TOOLS, CropVideo
from engine import EngineConfig, EngineLoop, Request, VllmEngine, in_flight
from plumbing import data
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
        return frames
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

    def extend(self, context):
        """Adds another context at the end."""
        for name, values in vars(context).items():
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


def context_of(record):
    """What Context.record has written -> Context, without decoded frames and compact ids: no engine
    is asked to go on from a record."""
    items = [chat.VisionItem(**item) for item in record["vision"]]
    return Context(ids=record["ids"], mask=record["mask"], logps=record["logps"], items=items)


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


@dataclass(repr=False)  # else asyncio.Runner makes a text of each result, for nothing
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
    context: Context = field(default_factory=Context)  # empty for a broken video
    think_open: bool = False  # every turn begins inside a thought: forced, or by the template
    turns: list = field(default_factory=list)  # sampled text of each main turn
    pieces: list = field(default_factory=list)  # the same token by token, for tools/view.py
    spans: list = field(default_factory=list)  # [start, end) of a turn's sampled ids in context.ids
    struct: list = field(default_factory=list)  # places in context.ids that carry format credit
    finish: list = field(default_factory=list)  # per turn: "stop" | "length"
    calls: list = field(default_factory=list)  # dicts, in the order they were written
    reward: dict = field(default_factory=dict)
    advantage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)  # seconds
    duration: float = None  # seconds of the video
    subtitles: str = ""  # their text in the prompt
    notes: dict = field(default_factory=dict)  # for evaluation/: first messages, times; not saved

    def fail(self, status, error):
        """Records what went wrong first."""
        if self.status == "ok":
            self.status, self.error = status, error

    def executed(self):
        """Number of calls that were run."""
        return sum(call["status"] == "ok" for call in self.calls)

    def to_dict(self):
        record_fields = {name: getattr(self, name) for name in RECORD_FIELDS}
        return {**record_fields, "K": self.num_frames, **self.context.record()}


def from_dict(row):
    """A line of a rollout JSONL -> Episode, without decoded frames: grpo.py --rollouts trains on
    it."""
    record_fields = {name: row[name] for name in RECORD_FIELDS}
    return Episode(num_frames=row["K"], context=context_of(row), **record_fields)


@dataclass
class RolloutWorker:
    """Everything that turns tasks into episodes."""

    engine: object  # submit(Request), abort(id), poll() -> [Completion], max_seqs: the batch
    codec: chat.ChatProcessor
    source: VideoSource
    agent: AgentConfig
    pay: rewards.RewardConfig = rewards.PAPER  # the terms of the reward and their weights
    judge: object = None  # plumbing.judge.Judge, whose verdicts pay open answers; None: F1 of words
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
        episode.fail("context", f"{len(context.ids)} tokens leave no room in --max-model-len "
                     f"{agent.max_model_len}")
        return episode

    # One more turn than tool turns, so no episode ends on tool responses that were never read.
    for turn in range(agent.max_turns + 1):
        context.add_masked(prefix)  # not sampled, so neither gradient nor credit
        completion = await sample(context, episode, worker, agent.max_new_tokens, turn)
        record_turn(episode, codec, completion)
        records = record_calls(episode, agent, completion.text, turn)
        if turn == agent.max_turns or not records:
            for record in records:  # they come too late
                record.update(status="not_run", summary="")
            break
        # Fan-out: all calls at once. Their decoding and their tokens share the machine with every
        # other episode.
        windows = await asyncio.gather(*[answer_call(r, episode, worker) for r in records])
        # Gather: ONE user turn, in call order, then ONE generation prompt.
        responses = response_context(codec, records, windows, completion.ended, tools)
        # If no token fits after the responses, they are left out: an episode never ends on a tool
        # response.
        if len(context.ids) + len(responses.ids) + len(prefix) >= agent.max_model_len:
            episode.fail("context", f"the responses exceed --max-model-len {agent.max_model_len}")
            break
        context.extend(responses)
    return episode


async def load_overview(episode, worker):
    """-> (spec, Frames) of the overview; None for a video that cannot be decoded."""
    source = worker.source
    spec = source.overview_spec(episode.task, episode.num_frames)
    try:
        # In a thread of the pump: decoding takes seconds, and other episodes go on meanwhile.
        frames, episode.duration, episode.subtitles = await worker.pump.load(
            source.load_overview, spec, episode.task
        )
    except video.VideoError as error:
        episode.fail("video_error", str(error))
        return None
    episode.timing["video_s"] = episode.duration
    return spec, frames


async def sample(context, episode, worker, max_tokens, *turn):
    """Samples what continues a context -> Completion. turn: number of the main turn; of a
    sub-agent, that and the number of the call."""
    agent = worker.agent
    tokens_left = agent.max_model_len - len(context.ids)
    return await worker.pump.sample(context.request(
        # The name is unique within a run.
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


def record_turn(episode, codec, completion):
    """Adds a sampled turn to the episode's context and record."""
    start = len(episode.context.ids)
    episode.context.add_sampled(completion.ids, completion.logps)
    episode.spans.append([start, start + len(completion.ids)])
    pieces = chat.token_bytes_of(codec, completion.ids)  # the bytes of each token
    for position, credited in enumerate(rewards.structural_mask(pieces), start):
        if credited:
            episode.struct.append(position)
    if completion.ended:
        pieces = [*pieces[:-1], b""]  # the end of the turn is no text
    episode.pieces.append(chat.text_pieces(pieces))
    episode.turns.append(completion.text)
    episode.finish.append("stop" if completion.ended else "length")


# -----------------------------------------------------------------------------
# Calls and responses


def record_calls(episode, agent, text, turn):
    """The calls in the text of a turn -> their records, which the episode holds too."""
    calls = []
    if agent.tools:  # without tools a model may still write calls; they are text then
        calls = rewards.parse_tool_calls(text, TOOLS, episode.think_open)
    records = []
    num_good = 0  # a bad call does not count towards max_parallel, because nothing runs for it
    for call in calls:
        # Every call gets a record, also a bad one: each must be answered, in the order of the text.
        record = {
            "turn": turn, "name": call.name, "start": None, "end": None, "num_frames": None,
            "parseable": call.error is None, "status": "pending", "summary": "", "sub_tokens": 0,
        }
        if call.error is not None:
            record.update(status="error", summary=f"error: {call.error}")
        else:
            record.update(call.arguments, number=num_good)
            num_good += 1
            if num_good > agent.max_parallel:
                text = f"not run: at most {agent.max_parallel} calls per turn"
                record.update(status="not_run", summary=text)
        records.append(record)
    episode.calls += records
    return records


async def answer_call(record, episode, worker):
    """Runs a call, if it is good. -> (spec, Frames) that the main agent shall see, or (None, None)
    if the response is the record's summary."""
    if record["status"] != "pending":
        return None, None
    tool = TOOLS[record["name"]]
    try:
        spec = tool.spec(record, episode.task, episode.duration)
        frames = await worker.pump.load(worker.source.load, spec)
    except video.VideoError as error:
        # Only the reason, since the whole text holds a path on this machine.
        record.update(
            status="video_error", summary=f"error: the window could not be read ({error.reason})")
        # That says nothing of the policy, so the episode goes on, and is not trained on.
        episode.fail("video_error", f"a call: {error}")
        return None, None
    except ValueError as error:  # the tool's or the video's: no part of it lies in the video
        record.update(status="error", summary=f"error: {error}")
        return None, None
    if "start" in spec:
        record.update(start=spec["start"], end=spec["end"])  # clamped
    record["seconds_seen"] = [round(float(second), 3) for second in frames.seconds]
    if tool.answered_by(worker.agent.crop_response) == "main":
        record["status"] = "ok"
        return spec, frames
    record.update(await ask_sub_agent(spec, frames, episode, worker, record))
    return None, None


async def ask_sub_agent(spec, frames, episode, worker, record):
    """The same weights in a fresh context that holds one window -> what the record of the call says
    of the result."""
    agent, codec = worker.agent, worker.codec
    began = time.monotonic()
    messages = sub_messages(episode.task, spec)
    context = open_context(codec, messages, [spec], [frames])  # a sub-agent has no tools
    if len(context.ids) >= agent.max_model_len:
        return {"status": "error", "summary": "error: the window does not fit into the context"}
    call_number = record["turn"], record["number"]
    completion = await sample(context, episode, worker, agent.sub_max_new_tokens, *call_number)
    # Only the text after the thought is returned: the main agent's context stays small. A thought
    # that never closes holds no summary. A Thinking checkpoint's template opens one.
    _, closed, summary = completion.text.rpartition("</think>")
    if "<think>" in summary or (codec.opens_thought and not closed):
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
    Context of these alone. windows: of answer_call. ended: the turn has its end; else the glue
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


def run(worker, tasks, frames=64, group=1, step=0, play=run_episode, done=()):
    """
    THE agent loop: RL, evaluation and the command line all call this function. -> iterator of
    scored Episodes, in the order in which they finish.

    frames: K, or "gated" (K drawn per prompt, the same for the whole group). group: rollouts per
    task. step: enters every seed and every draw of K, and is the version of the weights in a
    record. play: coroutine function (Episode, RolloutWorker) -> Episode. done: (group, sample) of
    episodes to leave out.
    """
    worker = replace(worker, pump=EngineLoop(worker.engine, video.decode_threads()))

    async def play_and_score(task, name, number):
        num_frames = draw_num_frames(frames, worker.agent.seed, step, task["id"])
        began = time.monotonic()
        with launch.naming(task["id"]):  # an error names the sample
            episode = await play(Episode(task, name, number, num_frames, step), worker)
            episode.timing["total_s"] = time.monotonic() - began
            return await score_episode(episode, worker.pay, worker.judge)

    def coroutines():
        for task in tasks:
            name = launch.join_key(step, task["id"])
            for number in range(group):
                if (name, number) not in done:
                    yield play_and_score(task, name, number)

    # An episode exists only once there is room for it. More of them than the engine's batch keep
    # the batch full while some of them decode, or wait for a judge.
    in_order_of_finish = in_flight(worker.pump, coroutines(), 2 * worker.engine.max_seqs)

    async def next_episode():
        return await anext(in_order_of_finish, None)

    # A loop of its own: this is a plain generator, which any script can iterate over. If the caller
    # stops early, Runner cancels the episodes under way and ends their threads.
    with asyncio.Runner() as runner:
        while True:
            episode = runner.run(next_episode())
            if episode is None:
                return
            yield episode


async def score_episode(episode, pay=rewards.PAPER, judge=None):
    """Sets the reward of an episode that has ended. judge: plumbing.judge.Judge or None. It reads
    open answers only, because letters, lists, spans and missing answers are graded by rule."""
    task, verdict = episode.task, None
    if task["answer"] is None:  # a question without a known answer, of tools/serve.py
        return episode
    answer = rewards.final_answer(episode.turns, episode.think_open)
    judged = judge is not None and task["type"] == "open" and answer is not None
    if judged:
        future = judge.ask(task["question"], task["answer"], answer)
        # The other episodes go on meanwhile. Shielded: equal answers share one request.
        verdict = await asyncio.shield(asyncio.wrap_future(future))
    episode.reward = rewards.score(
        episode.turns, task, episode.calls, episode.think_open, pay, verdict
    )
    if judged:  # the record says who scored
        episode.reward["judge"] = "fallback" if verdict is None else verdict
    return episode


# ---- below: arguments, the command line (may be skipped) ----


def frames_argument(text):
    """--frames: a number of overview frames, or "gated"."""
    return text if text == "gated" else launch.positive(text)


def max_num_frames(frames):
    """--frames -> the largest K that a run can ask for."""
    return max(GATED_FRAMES) if frames == "gated" else frames


def add_agent_arguments(parser):
    """Arguments of the agent loop, the same in every script that plays episodes."""
    add = parser.add_argument_group("agent").add_argument
    add("--temperature", type=launch.amount, default=0.7, help="of sampling; 0 = greedy")
    add("--max-new-tokens", type=launch.positive, default=2048, help="tokens per main turn")
    add("--max-model-len", type=launch.positive, default=32768,
        help="tokens of one context with its answer")
    add("--max-turns", type=int, default=3, help="tool turns before the answer turn; 0: no call")
    add("--max-parallel", type=launch.positive, default=5,
        help="calls run per turn; a further call is answered with a refusal")
    add("--crop-response", choices=["summary", "frames"], default="summary",
        help="to a call: a sub-agent's summary, or the window's frames")
    add("--think-prefix", action=argparse.BooleanOptionalAction, default=True,
        help="force <think>\\n in every main turn")
    add("--seed", type=int, default=0, help="of sampling, of the draws of K, of the order of tasks")
    data.add_frame_arguments(parser)
    add = parser.add_argument_group("engine").add_argument
    add("--gpu-memory-utilization", type=float, default=0.5, help="vLLM's part while awake")
    add("--max-num-seqs", type=launch.positive, default=64, help="sequences in the engine's batch")
    add("--chat-template-kwargs", type=json.loads, default={},
        help='JSON, for the template of all agents: {"enable_thinking": false}')


def agent_settings(args, data_path):
    """Parsed arguments -> (AgentConfig, VideoSource). data_path: of the task file, whose folder is
    the default of --video-root."""
    # The tools are offered where no flag says otherwise.
    agent = AgentConfig(**{f.name: getattr(args, f.name, f.default) for f in fields(AgentConfig)})
    root = video.root_of(args, data_path)
    cache = video.FrameCache(workers=video.decode_threads())
    source = VideoSource(root, cache, max_pixels=args.max_pixels,
                         subtitles=data.task_subtitles)
    return agent, source


def make_engine(ckpt, codec, args, sleeping=False):
    """The engine of the arguments. Collective. sleeping: give memory back between rollouts (GPU).
    """
    from plumbing import checkpoint  # imports torch, so not at the top

    launch.use_gpu()
    # The engine reserves memory for the largest context: all frames that one may hold.
    max_frames = max_num_frames(args.frames)
    for tool in TOOLS.values():
        if tool.answered_by(args.crop_response) == "main":
            max_frames += args.max_turns * args.max_parallel * tool.max_frames
    max_frames = max(max_frames, CropVideo.max_frames)  # the context of a sub-agent
    base = checkpoint.base_of(ckpt)
    engine = VllmEngine(base, codec, EngineConfig(
        args.max_model_len, max_frames, args.max_pixels, args.max_num_seqs,
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
    add("--limit", type=launch.positive, help="tasks; default: all")
    add_agent_arguments(parser)
    add_judge_arguments(parser, "whether an open answer says what the label says")
    # Read twice: the preset changes defaults, which any flag still overrides.
    if parser.parse_args().preset == "toy":
        parser.set_defaults(temperature=1.0, **toy_defaults())  # as grpo.py samples the toy
    args = parser.parse_args()
    if not args.out.endswith(".jsonl"):  # other scripts take a folder
        raise launch.UserError(f"--out {args.out}: give the name of a file in .jsonl")
    return args


def rows_so_far(args, tasks):
    """The records that an earlier start of the same command has written. Raises UserError for
    another command, which would mix its episodes with these."""
    from plumbing import checkpoint

    settings = checkpoint.settings_of(args, {"data": tasks})
    args_path = f"{args.out.removesuffix('.jsonl')}.args.json"
    if not os.path.exists(args_path):
        launch.write_atomic(args_path, json.dumps(settings, indent=1))
    with open(args_path, encoding="utf-8") as file:
        saved_settings = json.load(file)
    changes = checkpoint.changed_settings(settings, saved_settings)
    if changes:
        raise launch.UserError(f"{args_path} is of rollouts with another {changes}: choose another "
                               "--out")
    if not os.path.exists(f"{args.out}.part"):
        return []
    return launch.read_jsonl(
        f"{args.out}.part", ("group", "sample"), faults=["a line that a kill has torn"])


def main():
    args = parse_args()
    from tqdm import tqdm

    from plumbing import checkpoint  # imports torch, which takes seconds: --help answers at once

    # Everything that can be wrong with the input is found before the engine is loaded.
    tasks = data.read_tasks(args.data)[:args.limit]
    agent, source = agent_settings(args, args.data)
    ckpt = checkpoint.resolve(args.ckpt)
    folder, name = os.path.split(os.path.abspath(args.out))
    launch.lock(folder, f".{name}.lock")
    source.cache.check_present(args.data, tasks, source.root)
    rows = rows_so_far(args, tasks)
    if os.path.exists(args.out):
        return launch.print0(f"nothing to do: {args.out} is written")
    launch.print0(f"{args.ckpt}: loading the tokenizer, then the engine")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    judge = open_judge(args, os.path.join(folder, "judge.jsonl"))
    engine = make_engine(ckpt, codec, args)
    worker = RolloutWorker(engine, codec, source, agent, judge=judge)

    done = {(row["group"], row["sample"]) for row in rows}
    episodes = run(worker, tasks, args.frames, args.num_generations, done=done)
    wanted = len(tasks) * args.num_generations
    with open(f"{args.out}.part", "a", encoding="utf-8") as part:
        part.write("\n")  # ends a line that a kill has torn; empty ones are skipped
        for episode in tqdm(episodes, total=wanted, initial=len(rows), disable=None):
            rows.append(episode.to_dict())
            part.write(json.dumps(rows[-1]) + "\n")
            part.flush()  # a kill loses the episodes under way alone
    # Episodes finish in any order; the file does not depend on that order.
    rows.sort(key=lambda row: (row["group"], row["sample"]))
    launch.write_jsonl(args.out, rows)
    os.remove(f"{args.out}.part")
    # Failed episodes stay in the mean: leaving them out would flatter a run.
    total = sum(row["reward"]["total"] for row in rows) / len(rows)
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"{len(rows)} rollouts -> {args.out} | R {total:.3f} | {failed} not ok")
    engine.close()  # on a GPU this ends the process


if __name__ == "__main__":
    launch.run_main(main)
