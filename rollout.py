"""
rollout.py: the agent. Prompts, protocol, engines, episodes, and the one loop that RL, evaluation and this CLI share.

One episode, for a task with overview budget K:
  main agent   <system><K frames><question> -> turn 1
  calls        turn 1 holds n crop_video calls: n sub-agents, the same weights, each in a fresh context with one window
  glue         ALL n responses, in call order, become ONE user turn with ONE generation prompt after it
  main agent   turn 2, ... at most --max-turns tool turns, then one turn that must answer
Every main turn starts with a forced `<think>\\n` (--think-prefix). Ids only grow: next prompt = previous ids + sampled ids + glue.

An episode is a generator that yields the generations and decodings it waits for; `drive` feeds all episodes into one engine, so
a fan-out starts the moment its turn ends. K is a draw per prompt (--frames gated) from a digest of (seed, step, task id).

Departs from the paper: a sub-agent is told the question (--no-sub-question: it is not); calls a model writes in its last turn are not
run. Calls inside a thought that never closes are run; with --open-thought drop they are not, as where a serving stack's reasoning
parser stands between model and tools.

Reads:  a checkpoint folder, task JSONL.   Writes: rollout JSONL, one episode a line, enough to train on without the engine.

CPU toy:  python rollout.py --preset toy --ckpt sft_out --data toy/rl.jsonl --group 4 --limit 8 --show 2 --out r.jsonl
1 GPU:    python rollout.py --ckpt sft_out --data rl.jsonl --group 8 --out r.jsonl
8 GPUs:   one process per GPU, each with its own --data part; training runs one engine per rank by itself (grpo.py)
"""
import argparse
import bisect
import hashlib
import itertools
import json
import os
import queue
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace

import model
import rewards
import video

# ---------------------------------------------------------------------------------------------------------------------
# Prompts: the one home of every word that is put before the model. SFT data, RL and evaluation build from here.


def main_prompt(tools=True):
    calls = ("If the frames do not show what you need, call crop_video once for each window you want to see closely; several "
             "calls in one turn run at the same time. Every call returns a short summary of its window.\n")
    return ("You answer questions about a long video. A few frames from all over it are shown, each after its time.\n"
            "Think first, between <think> and </think>.\n" + (calls if tools else "") +
            "When you know the answer, write it between <answer> and </answer>.")


def sub_prompt():
    return ("You watch one short window of a longer video. Say in a few words what happens in it that helps to answer "
            "the question. Times are those of the whole video.")


def tool_schema():
    number = {"type": "number"}
    return [{"type": "function", "function": {
        "name": "crop_video",
        "description": "Look closely at one window of the video. Returns a short text summary of what happens there.",
        "parameters": {"type": "object", "required": ["start_time", "end_time"], "properties": {
            "start_time": {**number, "description": "start of the window in seconds from the start of the video"},
            "end_time": {**number, "description": "end of the window in seconds"},
            "num_frames": {"type": "integer", "description": "frames to look at; default: one per second, at most 16"}}}}}]


def answer_style(task_type):
    return {"mcq": "Answer with the letter of one option.",
            "open": "Answer with a few words.",
            "grounding": "Answer with the start and the end in seconds, for example: 12.5 - 20.0"}[task_type]


def question_text(task):
    """Task -> the text after the frames: question, options, how to answer."""
    lines = [task["question"]]
    lines += [f"{letter}. {option}" for letter, option in zip(letters(), bare_options(task.get("options") or []))]
    lines.append(answer_style(task["type"]))
    return "\n" + "\n".join(lines)


def letters():
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def bare_options(options):
    """Options without labels ("A. ", "(A) ", "A) ", "A: "), which go only where every option carries its own letter."""
    labels = [re.match(rf"\s*(?:\({letter}\)|{letter}[.):])\s+", text) for letter, text in zip(letters(), options)]
    return [text[label.end():].strip() for text, label in zip(options, labels)] if all(labels) else [text.strip() for text in options]


def main_messages(task, num_frames, tools=True, subtitles=""):
    """The main agent's first context: K overview frames, subtitles where there are any, then the question."""
    spoken = f"\nSubtitles:\n{subtitles}\n" if subtitles else ""
    return [{"role": "system", "content": main_prompt(tools)},
            {"role": "user", "content": [{"type": "video", "video": task["video"], "frames": num_frames},
                                         {"type": "text", "text": spoken + question_text(task)}]}]


def sub_messages(task, window, question=True):
    """A sub-agent's context: the frames of one window (a spec that video.load reads), its times, the question."""
    text = f"\nWindow: {window['start']:g} to {window['end']:g} seconds." + (f"\nQuestion: {task['question']}" if question else "")
    return [{"role": "system", "content": sub_prompt()},
            {"role": "user", "content": [{"type": "video", "video": task["video"], **window}, {"type": "text", "text": text}]}]


def gated_budgets():
    """The overview frames K that nFrames gating draws from (paper)."""
    return (4, 8, 16, 32, 64)


def frame_budget(seed, step, task_id, choices=None, weights=None):
    """nFrames gating: K ~ Uniform(choices), or by `weights`, one draw per prompt and step, the same in every process and on every rank.

    Python's hash() of a string differs from process to process, so the draw is a digest of (seed, step, task id).
    """
    choices = choices or gated_budgets()
    digest = hashlib.sha256(f"K/{seed}/{step}/{task_id}".encode()).digest()
    draw = int.from_bytes(digest[:8], "big")
    if weights is None:
        return choices[draw % len(choices)]
    level, last = draw / 2**64 * sum(weights), len(choices) - 1
    return choices[min(last, bisect.bisect_right(list(itertools.accumulate(weights)), level))]


def request_seed(*parts):
    """Stable 31-bit seed of one generation from (seed, step, task, sample, turn, ...)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") & 0x7FFFFFFF


# ---------------------------------------------------------------------------------------------------------------------
# Engines: submit(request) takes a generation, poll() works a little and returns what is finished


@dataclass
class Request:
    """One generation: everything any engine needs to continue one context."""

    id: str
    ids: list  # compact ids: one placeholder per frame; the engine expands them
    expanded: list  # what the trainer will see; engines that return their prompt must return exactly this
    items: list  # [model.VisionItem]
    frames: list  # [video.Frames], one per item
    messages: list  # the same context as chat messages, for endpoints that take no ids
    max_tokens: int
    temperature: float
    seed: int
    prefill: str = ""  # forced start of the turn, already part of ids
    tools: list = None  # schema, already part of ids; for endpoints
    stop: tuple = ()  # strings that end the turn and stay in it


@dataclass
class Completion:
    id: str
    ids: list = None  # sampled ids with the end-of-turn id where it was sampled; None from endpoints that return text
    logps: list = None  # of the distribution sampled from
    text: str = ""
    ended: bool = False  # False: cut off by max_tokens
    error: str = None


class VllmEngine:
    """vLLM inside this process, on CPU or GPU. Requests join its continuous batch while others run."""

    def __init__(self, ckpt, codec, context, max_frames=64, max_pixels=50176, max_seqs=64, seed=0, gpu_memory=0.5, sleeping=False):
        """context: tokens; max_frames: images in one context; max_pixels: of the largest frame; gpu_memory: fraction of the card."""
        import torch

        model.import_shim()
        gpu = torch.cuda.is_available()
        # vLLM reads its own switches from the environment; ours never do. In process: its worker shares our shim and ranks.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if not gpu:
            # Bound threads of several ranks land on one core; KV space is in GiB and is allocated at once.
            os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        threads = torch.get_num_threads()
        from vllm import LLM, ModelRegistry
        from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

        if not gpu:  # vLLM would inspect the class in a subprocess, which has no shim
            ModelRegistry.register_model("Qwen3VLForConditionalGeneration", Qwen3VLForConditionalGeneration)
        options = dict(dtype="bfloat16", gpu_memory_utilization=gpu_memory, enable_sleep_mode=sleeping) if gpu else \
            dict(dtype="float32", enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(context, 8192))
        # (A prompt prefilled in chunks would rewind its seeded generator, which CPU generators cannot.)
        if gpu and "RANK" in os.environ:
            options["distributed_executor_backend"] = "external_launcher"  # one engine per torchrun rank, TP 1
        # The processor bounds an image by itself but a video by all of its frames together.
        images, longest = (max_frames, max_pixels) if codec.channel == "image" else (0, max_pixels * max_frames)
        self.llm = LLM(ckpt, max_model_len=context, max_num_seqs=max_seqs, seed=seed, generation_config="vllm",
                       limit_mm_per_prompt={"image": images, "video": 1}, logprobs_mode="processed_logprobs",
                       # Frames arrive at their final size: these bounds keep the processor from resizing them again. The
                       # upper one must be honest, since vLLM sizes its encoder for the largest image it allows.
                       mm_processor_kwargs={"size": {"shortest_edge": (codec.patch * codec.merge) ** 2, "longest_edge": longest}},
                       disable_log_stats=True, use_tqdm_on_load=False, **options)
        torch.set_num_threads(threads)  # on CPU vLLM lowers it for the whole process
        config = self.llm.llm_engine.model_config.hf_config
        self.tied_on_cpu, self.sleeping = not gpu and config.tie_word_embeddings, gpu and sleeping
        self.engine, self.codec, self.running, self.max_seqs = self.llm.llm_engine, codec, {}, max_seqs

    def submit(self, request):
        from vllm import SamplingParams

        ids = list(request.ids)
        if self.codec.channel == "image":
            from PIL import Image

            images = [Image.fromarray(image) for f in request.frames for image in f.images]
            data, uuids = {"image": images}, {"image": [key for f in request.frames for key in f.frame_keys]}
        else:
            # frames_indices / fps is how the processor gets seconds: with fps 1 the indices are the seconds themselves.
            # A single frame is doubled here, since the processor refuses it: the pair is what patchify makes of it too.
            clips = [(f.images, f.seconds) if len(f.images) > 1 else (f.images.repeat(2, 0), f.seconds.repeat(2)) for f in request.frames]
            data = {"video": [(images, dict(fps=1.0, frames_indices=[float(s) for s in seconds], do_sample_frames=False,
                                            total_num_frames=len(images), duration=float(seconds[-1]) + 1.0)) for images, seconds in clips]}
            uuids = {"video": [f.key for f in request.frames]}
            # vLLM expands the bare placeholder only and would leave the template's markers around all of its frames, a form
            # Qwen3-VL was not trained on: every frame pair brings markers of its own.
            for at in [n for n, i in enumerate(ids) if i == self.codec.video_pad][::-1]:
                ids[at - 1:at + 2] = [self.codec.video_pad]
        prompt = {"prompt_token_ids": ids}
        if request.frames:
            prompt.update(multi_modal_data=data, multi_modal_uuids=uuids)
        # No top-p, top-k or min-p: the trainer's log-probs are of the full softmax at this temperature.
        params = SamplingParams(temperature=request.temperature, max_tokens=request.max_tokens, logprobs=0, detokenize=False,
                                seed=request.seed, stop_token_ids=[self.codec.eos],
                                logit_bias={i: -100.0 for i in self.codec.banned})
        self.running[request.id] = request
        self.engine.add_request(request.id, prompt, params)

    def poll(self):
        if not self.running:
            return []
        finished = []
        for output in self.engine.step():
            if not output.finished:
                continue
            request = self.running.pop(output.request_id)
            if list(output.prompt_token_ids) != list(request.expanded):
                raise RuntimeError(f"{request.id}: the engine's prompt ids differ from the trainer's (frames resized or "
                                   "placeholders expanded differently)")
            sampled = output.outputs[0]
            ids = list(sampled.token_ids)
            logps = [entry[token].logprob for token, entry in zip(ids, sampled.logprobs)]
            finished.append(Completion(request.id, ids, logps, model.decode(self.codec, ids), ids[-1:] == [self.codec.eos]))
        return finished

    def sync(self, weights):
        """weights: iterator of (name, full tensor). Loads them, then drops every cache made with the old ones."""
        # Without an iterator reload_weights would read the base checkpoint from disk again, silently.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.tied_on_cpu:
            self.llm.apply_model(repack_head)
        self.llm.reset_mm_cache()
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()

    def close(self):
        """Stop the engine while the process group still lives: its own exit hook would come too late."""
        self.engine.engine_core.shutdown()

    def sleep(self):
        """Free weights and KV cache while the trainer works; without sleeping=True (CPU) nothing happens."""
        if self.sleeping:
            self.llm.sleep(level=2)

    def wake(self, weights):
        """Load new weights. Order matters: weights get memory, are loaded, and only then the KV cache comes back."""
        if self.sleeping:
            self.llm.wake_up(tags=["weights"])
            self.llm.apply_model(zero_deepstack)
        self.sync(weights)
        if self.sleeping:
            self.llm.wake_up(tags=["kv_cache"])


def zero_deepstack(engine_model):
    """vLLM keeps the deepstack features of a prefill in a plain list of tensors. A level-2 sleep discards their memory and restores buffers
    alone: a text-only prefill would then add to its hidden states what happens to lie there."""
    for level in getattr(engine_model, "deepstack_input_embeds", None) or ():
        level.zero_()


def repack_head(engine_model):
    """On CPU vLLM multiplies by a packed copy of each matrix. Reloading repacks every layer that the iterator names, but a tied
    lm_head is not named: without this it would go on with the old embeddings, and the log-prob gap would grow step by step."""
    head = engine_model.language_model.lm_head
    head.quant_method.process_weights_after_loading(head)


class TransformersEngine:
    """Plain transformers: the reference, and the fallback where vLLM is not installed. Batches what is waiting.

    Deterministic to the bit on one machine: what it batches does not depend on how fast frames were decoded.
    """

    patient = True  # the scheduler waits for all frames before it polls

    def __init__(self, ckpt, codec, device=None, max_seqs=32, policy=None):
        import torch

        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.policy = policy or model.load_policy(ckpt, codec, self.device, dtype)
        self.policy.eval()
        self.codec, self.max_seqs, self.waiting, self.frames = codec, max_seqs, [], {}
        self.vision = model.VisionFeatures(self.policy.hf.model.visual, codec, None)

    def submit(self, request):
        self.waiting.append(request)

    def poll(self):
        if not self.waiting:
            return []
        # Longest first: neighbours in length share a batch with little padding. By name: frames come in any order.
        self.waiting.sort(key=lambda r: (len(r.expanded), r.id))
        batch = [self.waiting.pop() for _ in range(min(self.max_seqs, len(self.waiting)))]
        frames = {item.key: f for r in batch for item, f in zip(r.items, r.frames)}
        self.vision.load = lambda spec: frames[spec["key"]]
        prompts = [(r.expanded, [replace(item, spec={"key": item.key}) for item in r.items]) for r in batch]
        samples = model.generate(self.policy, self.codec, self.vision, prompts, [r.max_tokens for r in batch],
                                 [r.temperature for r in batch], [r.seed for r in batch])
        return [Completion(r.id, ids, logps, model.decode(self.codec, ids), ids[-1] == self.codec.eos)
                for r, (ids, logps) in zip(batch, samples)]

    def close(self):
        pass

    def sleep(self):
        pass

    def wake(self, weights):
        self.sync(weights)

    def sync(self, weights):
        import torch

        own = self.policy.hf.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)


# ---------------------------------------------------------------------------------------------------------------------
# One context, growing


@dataclass
class Context:
    """Ids, mask and log-probs of one agent context; they only ever grow, and together. mask 1 = sampled by this policy."""

    ids: list = field(default_factory=list)  # expanded
    compact: list = field(default_factory=list)
    mask: list = field(default_factory=list)
    logps: list = field(default_factory=list)
    items: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    messages: list = field(default_factory=list)

    def insert(self, ids, compact=None):
        """Tokens nobody sampled: forced prefix, end of a cut turn, tool responses, headers. compact: where frames are among them."""
        self.ids += ids
        self.compact += ids if compact is None else compact
        self.mask += [0] * len(ids)
        self.logps += [0.0] * len(ids)

    def sampled(self, ids, logps):
        self.ids += ids
        self.compact += ids
        self.mask += [1] * len(ids)
        self.logps += logps


def open_context(codec, messages, specs, frames, tools=None):
    """Messages whose frames are decoded -> Context. codec None (an endpoint that takes no ids): messages only."""
    context = Context(frames=list(frames), messages=list(messages))
    if codec is not None:
        context.items = [model.vision_item(spec, f) for spec, f in zip(specs, frames)]
        ids, compact, _ = model.encode_prompt(codec, messages, context.items, tools)
        context.ids, context.compact = list(ids), list(compact)
        context.mask, context.logps = [0] * len(ids), [0.0] * len(ids)
    return context


# ---------------------------------------------------------------------------------------------------------------------
# Episodes: generators that yield what they wait for


@dataclass
class Agent:
    """The rules of an episode. Field names are the flags of the CLIs."""

    temperature: float = 0.7
    sub_temperature: float = None  # None: the main agent's
    max_new_tokens: int = 2048  # per main-agent turn
    sub_max_new_tokens: int = 512
    context: int = 32768  # tokens of one context, answer included
    max_turns: int = 3  # tool turns; one more turn always follows, which must answer
    max_parallel: int = 5  # calls run per turn; further ones get a response that says so
    dispatch: str = "parallel"  # "sequential": a turn's windows one after the other; "turns": one call a turn, what follows it is cut off
    tools: bool = True
    think_prefix: bool = True
    open_thought: str = "run"  # calls in a thought that never closes; or "drop": they are thought, as serving stacks' reasoning parsers hold
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
    subtitles: callable = None  # (task, seconds of the frames) -> text shown with the question

    def load(self, spec):
        return video.load(spec, self.root, self.cache, min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def load_overview(self, spec, task):
        """-> (Frames, seconds of the video, text of the subtitles)."""
        frames = self.load(spec)
        spoken = self.subtitles(task, frames.seconds) if self.subtitles else ""
        return frames, self.duration(spec), spoken

    def duration(self, spec):
        return video.probe(video.resolve(spec["video"], self.root), self.cache).duration

    def load_window(self, spec):
        """A crop as the model asked for it -> (the same, clamped to the video; its Frames). Raises ValueError beyond the end."""
        frames = self.load(spec)
        return {**spec, "start": max(0.0, spec["start"]), "end": min(spec["end"], self.duration(spec))}, frames


@dataclass
class Reply:
    """What the calls of a turn are answered with: messages, and the specs and Frames of the videos in them, in order."""

    messages: list
    specs: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    fresh: bool = False  # the messages are a new conversation, not the next turn of this one


@dataclass
class Protocol:
    """What differs between systems that look at videos in turns. The defaults are ParaVT's; other systems' are in bench/systems.py. The
    loop, run_episode, is one and the same."""

    opening: callable = None  # (task, K, agent, subtitles, duration) -> first messages, with one {"type": "video"} for the overview
    parse: callable = rewards.parse_tool_calls  # (text of a turn, it began inside a thought) -> calls
    answer: callable = None  # generator (records, calls, episode, agent, codec, source, step, turn) -> Reply
    force: callable = None  # (task) -> text put before the last turn
    force_tokens: callable = None  # (task) -> tokens of that turn
    schema: bool = True  # crop_video is declared to the chat template
    prefill: str = ""  # forced start of every turn, instead of --think-prefix
    stop: tuple = ()  # strings that end a turn


@dataclass
class Episode:
    """One finished rollout; `to_json` is a line of the rollout JSONL."""

    task: dict
    group: str
    sample: int
    frame_budget: int
    version: int
    status: str = "ok"  # ok | video_error | context | engine_error
    error: str = None
    context: Context = None
    think_open: bool = False  # every turn begins inside a thought: forced by us, or opened by the chat template
    turns: list = field(default_factory=list)  # sampled text of each main turn
    pieces: list = field(default_factory=list)  # the same token by token; "" at the end of a turn; none from endpoints
    spans: list = field(default_factory=list)  # [start, end) of each turn's sampled ids in context.ids
    finish: list = field(default_factory=list)  # "stop" | "length" per turn
    calls: list = field(default_factory=list)  # dicts, in the order they were written
    reward: dict = field(default_factory=dict)
    advantage: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)
    duration: float = None  # seconds of the video
    notes: dict = field(default_factory=dict)  # the opening, and what a protocol has to remember between turns; not written

    def executed(self):
        return sum(c["status"] == "ok" for c in self.calls)

    def parseable(self):
        return sum(c["parseable"] for c in self.calls)

    def to_json(self):
        c = self.context or Context()
        return {"task": self.task, "group": self.group, "sample": self.sample, "K": self.frame_budget, "version": self.version,
                "status": self.status, "error": self.error, "ids": c.ids, "mask": c.mask, "logps": c.logps,
                "vision": [vars(item) for item in c.items], "think_open": self.think_open, "turns": self.turns, "pieces": self.pieces, "spans": self.spans, "finish": self.finish,
                "calls": self.calls, "reward": self.reward, "advantage": self.advantage, "timing": self.timing}


def from_json(row):
    """A line of a rollout JSONL -> Episode (without decoded frames)."""
    items = [model.VisionItem(**v) for v in row["vision"]]
    context = Context(ids=row["ids"], mask=row["mask"], logps=row["logps"], items=items) if row["ids"] else None
    return Episode(row["task"], row["group"], row["sample"], row["K"], row["version"], row["status"], row["error"], context,
                   row["think_open"], row["turns"], row["pieces"], row["spans"], row["finish"], row["calls"], row["reward"], row["advantage"], row["timing"])


def run_episode(episode, agent, codec, source, step, protocol=None):
    """The main agent, as a generator: yields lists of things to wait for, is resumed with the list of their results."""
    task, protocol = episode.task, protocol or Protocol()
    spec = {"video": task["video"], "frames": episode.frame_budget}
    began = time.monotonic()
    (loaded,) = yield [lambda: source.load_overview(spec, task)]
    episode.timing["decode_s"] = time.monotonic() - began
    if isinstance(loaded, (video.VideoError, ValueError)):
        episode.status, episode.error = "video_error", str(loaded)
        return episode
    frames, episode.duration, spoken = loaded
    episode.timing["video_s"] = episode.duration
    messages = (protocol.opening or opening)(task, episode.frame_budget, agent, spoken, episode.duration)
    tools = tool_schema() if agent.tools and protocol.schema else None
    context = episode.context = open_context(codec, messages, [spec], [frames], tools)
    episode.notes.update(opening=messages, seconds=frames.seconds)
    prefill = protocol.prefill or ("<think>\n" if agent.think_prefix else "")
    episode.think_open = thinking = rewards.never_closed(prefill, codec is not None and codec.opens_thought)
    turns = agent.max_turns if agent.tools else 0
    for turn in range(turns + 1):
        prefix = []
        if codec:
            prefix = model.think_prefix_ids(codec, context.ids) if prefill == "<think>\n" else model.encode(codec, prefill)
        room = agent.context - len(context.ids) - len(prefix)
        if room < 1:
            episode.status, episode.error = "context", f"{len(context.ids)} tokens leave no room in a context of {agent.context}"
            break
        context.insert(prefix)
        last = turn == turns
        longest = protocol.force_tokens(task) if last and turns and protocol.force_tokens else agent.max_new_tokens
        (done,) = yield [Request(f"{episode.group}/{episode.sample}/{turn}", list(context.compact), list(context.ids), list(context.items),
                                 list(context.frames), context.messages, min(longest, room), agent.temperature,
                                 request_seed(agent.seed, step, task["id"], episode.sample, turn), prefill, tools, protocol.stop)]
        if done.error:
            episode.status, episode.error = "engine_error", done.error
            break
        if agent.dispatch == "turns":  # what an agent would have said that may ask for one window a turn
            done = cut_behind(codec, done, ("</tool_call>", "</tool_code>"), after="</think>")
        if protocol.stop:
            done = cut_behind(codec, done, protocol.stop)
        if done.ids is not None:
            episode.spans.append([len(context.ids), len(context.ids) + len(done.ids)])
            context.sampled(done.ids, done.logps)
            episode.pieces.append(model.text_pieces(codec, done.ids))
        episode.turns.append(done.text)
        episode.finish.append("stop" if done.ended else "length")
        unseen = not agent.tools or (agent.open_thought == "drop" and rewards.never_closed(done.text, thinking))
        calls = [] if unseen else protocol.parse(done.text, thinking)
        records = [call_record(c, turn) for c in calls]
        episode.calls += records
        if last or not calls:
            for record in records:
                record.update(status="not_run", summary="")  # the final turn must answer; its calls come too late
            break
        reply = yield from (protocol.answer or summaries)(records, calls, episode, agent, codec, source, step, turn)
        if protocol.force and turn == turns - 1:
            reply.messages.append({"role": "user", "content": protocol.force(task)})
        if reply.fresh:
            context = episode.context = open_context(codec, reply.messages, reply.specs, reply.frames, tools)
            episode.spans.clear()  # of the last context alone
            continue
        context.messages = context.messages + [{"role": "assistant", "content": prefill + done.text}] + reply.messages
        context.frames += reply.frames
        if codec is not None:
            items = [model.vision_item(spec, f) for spec, f in zip(reply.specs, reply.frames)]
            compact = model.glue_ids(codec, reply.messages, done.ended, items)
            glue = model.expand(codec, compact, items)
            if len(context.ids) + len(glue) + len(prefix) >= agent.context:
                # An episode never ends on a tool response: what does not fit is left out whole.
                episode.status, episode.error = "context", f"the responses do not fit into a context of {agent.context}"
                break
            context.insert(glue, compact)
            context.items += items
    episode.timing["total_s"] = time.monotonic() - began
    return episode


def opening(task, num_frames, agent, subtitles, duration):
    """ParaVT's first messages, as Protocol.opening."""
    return main_messages(task, num_frames, agent.tools, subtitles)


def summaries(records, calls, episode, agent, codec, source, step, turn):
    """ParaVT's Protocol.answer: every call served by a sub-agent, one tool message each, in call order."""
    yield from serve(records, calls, episode, agent, codec, source, step, turn)
    return Reply([{"role": "tool", "content": r["summary"]} for r in records])


def cut_behind(codec, done, tags, after=None):
    """A turn cut behind the first of `tags`, searched behind the first `after`; as it is where there is none."""
    # In bytes: a turn may hold half a character, and ids are cut where the tag is whole.
    pieces = [character.encode() for character in done.text] if done.ids is None else model.pieces_of(codec, done.ids)
    said = b"".join(pieces)
    since = max(0, said.find(after.encode())) if after else 0
    ends = [at + len(tag) for tag in map(str.encode, tags) if (at := said.find(tag, since)) >= 0]
    if not ends:
        return done
    cut = bisect.bisect_left(list(itertools.accumulate(map(len, pieces))), min(ends)) + 1
    if done.ids is None:  # an endpoint that returns text
        return replace(done, text=done.text[:cut])
    return replace(done, ids=done.ids[:cut], logps=done.logps[:cut], text=model.decode(codec, done.ids[:cut]), ended=False)


def call_record(call, turn):
    return {"turn": turn, "start": call.start, "end": call.end, "num_frames": call.num_frames, "parseable": call.error is None,
            "status": "error" if call.error else "pending", "summary": call.error or "", "sub_tokens": 0}


def admitted(records, calls, max_parallel):
    """Which calls of a turn are run -> their indices; the records of the others say why they are not."""
    good = [i for i, c in enumerate(calls) if c.error is None]
    for i in good[max_parallel:]:
        records[i].update(status="not_run", summary=f"not run: at most {max_parallel} calls per turn")
    for record in records:
        if record["status"] == "error":
            record["summary"] = f"error: {record['summary']}"
    return good[:max_parallel]


def serve(records, calls, episode, agent, codec, source, step, turn):
    """Run the good calls of one turn on sub-agents and fill their records; every call gets exactly one response."""
    jobs = [sub_agent(records[i], episode, agent, codec, source, request_seed(agent.seed, step, episode.task["id"], episode.sample, turn, n),
                      f"{episode.group}/{episode.sample}/{turn}/{n}") for n, i in enumerate(admitted(records, calls, agent.max_parallel))]
    if agent.dispatch == "parallel":
        yield jobs  # all windows at once: their decoding and their tokens share the machine with everybody else's
    else:
        for job in jobs:
            yield [job]


def sub_agent(record, episode, agent, codec, source, seed, name):
    """The same weights in a fresh context that holds one window. Fills `record`; never raises on what a model wrote."""
    window = {"start": record["start"], "end": record["end"], "fps": agent.sub_fps, "max_frames": agent.sub_frames}
    if record["num_frames"]:
        window["num_frames"] = record["num_frames"]
    began = time.monotonic()
    spec = {"video": episode.task["video"], **window}
    (loaded,) = yield [lambda: source.load_window(spec)]
    if isinstance(loaded, ValueError):
        record.update(status="error", summary=f"error: {loaded}")
        return
    if isinstance(loaded, video.VideoError):
        record.update(status="video_error", summary=f"error: the window could not be read ({loaded.why})")
        return
    spec, frames = loaded
    record.update(start=spec["start"], end=spec["end"])
    context = open_context(codec, sub_messages(episode.task, spec, agent.sub_question), [spec], [frames])
    room = agent.context - len(context.ids)
    if room < 1:
        record.update(status="error", summary="error: the window does not fit into the context")
        return
    temperature = agent.temperature if agent.sub_temperature is None else agent.sub_temperature
    (done,) = yield [Request(name, list(context.compact), list(context.ids), context.items, context.frames, context.messages,
                             min(agent.sub_max_new_tokens, room), temperature, seed)]
    if done.error:
        record.update(status="engine_error", summary="error: the window could not be looked at")
        return
    # A thought that never closes holds no summary: a Thinking checkpoint opens one by itself.
    thought = rewards.never_closed(done.text, codec is not None and codec.opens_thought)
    summary = "" if thought else done.text.rpartition("</think>")[2].strip()
    record.update(status="ok", summary=summary or "(nothing to report)", seconds=time.monotonic() - began)
    if done.ids is not None:
        context.sampled(done.ids, done.logps)
        record.update(sub_tokens=len(done.ids), frames_seen=len(frames.seconds),
                      sub={"ids": context.ids, "mask": context.mask, "logps": context.logps,
                           "vision": [vars(item) for item in context.items]})


# ---------------------------------------------------------------------------------------------------------------------
# The scheduler


@dataclass
class Node:
    """A running generator: where its result goes, and which of the things it waits for have come."""

    work: object
    parent: object = None
    slot: int = 0
    results: list = None
    missing: int = 0


def drive(engine, works, threads=4, max_live=None, clock=None, stop=None):
    """Run generators on one engine, all at once -> iterator of their return values, as they finish.

    A generator yields a list of waits and is resumed with the list of results, in order. A wait is a Request (a Completion
    comes back), a callable (run in a thread; a VideoError or ValueError comes back as a value) or another generator. There
    is no barrier: a fan-out starts the moment its turn ends, whatever the other episodes are doing.
    clock: a dict whose "decode_s" grows by the seconds in which the engine had nothing to do but wait for frames.
    stop: a function; once it says True, nothing more is run and the iterator ends.
    """
    works, live, finished, owners = iter(works), 0, [], {}
    limit = max_live or 2 * engine.max_seqs  # a few more episodes than the engine's batch keep it full while others decode
    arrived = queue.SimpleQueue()  # (node, slot, result) from the decode threads
    decoding = 0

    def advance(node, value):
        nonlocal live, decoding
        try:
            waits = node.work.send(value)
        except StopIteration as stop:
            if node.parent is None:
                live -= 1
                finished.append(stop.value)
            else:
                deliver(node.parent, node.slot, stop.value)
            return
        node.results, node.missing = [None] * len(waits), len(waits)
        if not waits:
            advance(node, [])
        for slot, wait in enumerate(waits):
            if isinstance(wait, Request):
                owners[wait.id] = node, slot
                engine.submit(wait)
            elif callable(wait):
                decoding += 1
                pool.submit(settle, wait, node, slot)
            else:
                advance(Node(wait, node, slot), None)

    def settle(wait, node, slot):
        try:
            arrived.put((node, slot, wait()))
        except (video.VideoError, ValueError) as error:  # expected: a broken file, a window outside the video
            arrived.put((node, slot, error))
        except BaseException as error:  # a bug: carried to the main thread and raised there
            arrived.put((None, None, error))

    def deliver(node, slot, result):
        node.results[slot] = result
        node.missing -= 1
        if not node.missing:
            advance(node, node.results)

    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        exhausted = False
        while True:
            while not exhausted and live < limit:
                work = next(works, None)
                if work is None:
                    exhausted = True
                    break
                live += 1
                advance(Node(work), None)
            while decoding and (not owners or not arrived.empty() or getattr(engine, "patient", False)):  # block only when the engine has nothing to do
                waiting = time.monotonic()
                node, slot, result = arrived.get()
                if clock is not None and not owners:
                    clock["decode_s"] = clock.get("decode_s", 0.0) + time.monotonic() - waiting
                decoding -= 1
                if node is None:
                    raise result
                deliver(node, slot, result)
            for completion in engine.poll() if owners else []:
                deliver(*owners.pop(completion.id), completion)
            yield from finished
            finished.clear()
            if (exhausted and not live) or (stop and stop()):
                return


def run(engine, tasks, agent, codec, source, frames=64, group=1, step=0, version=0, scoring=None, threads=4, max_live=None, clock=None, protocol=None,
        stop=None):
    """THE agent loop: RL, evaluation and the CLI all call this. -> iterator of scored Episodes, as they finish.

    frames: overview frames K, or "gated" (K drawn per prompt, the same for the whole group), or a function task -> K. group:
    rollouts per task.
    scoring: keyword arguments of rewards.score. step: enters every seed and every draw of K.
    """
    def works():
        seen = {}  # a batch that spans two epochs may hold a task twice: its group then grows, with seeds of its own
        for task in tasks:
            k = frames(task) if callable(frames) else frame_budget(agent.seed, step, task["id"]) if frames == "gated" else int(frames)
            first = seen.get(task["id"], 0)
            seen[task["id"]] = first + group
            for sample in range(first, first + group):
                episode = Episode(task, f"{step}/{task['id']}", sample, k, version)
                yield run_episode(episode, agent, codec, source, step, protocol)

    for episode in drive(engine, works(), threads, max_live, clock, stop):
        episode.reward = rewards.score(episode.turns, episode.task["type"], episode.task["answer"], episode.task.get("options"),
                                       episode.parseable(), episode.executed(), think_prefix=episode.think_open, **(scoring or {}))
        yield episode


# ---------------------------------------------------------------------------------------------------------------------
# Looking at episodes


def show(episode, codec, colour=True):
    """One episode as text: sampled tokens in one colour, inserted ones in another, structural tokens marked."""
    on = {"inserted": "\033[2m", "sampled": "\033[32m", "struct": "\033[1;33m"} if colour else {"inserted": "", "sampled": "«", "struct": "«*"}
    off = {"inserted": "\033[0m", "sampled": "\033[0m", "struct": "\033[0m"} if colour else {"inserted": "", "sampled": "»", "struct": "*»"}
    context = episode.context or Context()
    kind = ["sampled" if m else "inserted" for m in context.mask]
    for start, end in episode.spans:
        flags = rewards.structural_mask(model.pieces_of(codec, context.ids[start:end]))
        kind[start:end] = ["struct" if f else "sampled" for f in flags]
    out, position, pads = [], 0, {codec.image_pad, codec.video_pad}
    while position < len(kind):
        end = position
        while end < len(kind) and kind[end] == kind[position]:
            end += 1
        ids = [i for n, i in enumerate(context.ids[position:end], position) if i not in pads or context.ids[n - 1] != i]
        out.append(on[kind[position]] + model.printable(model.decode(codec, ids, True)) + off[kind[position]])
        position = end
    r = episode.reward
    terms = " ".join(f"{k} {r[k]:.2f}" for k in ("total", "acc", "fmt", "tool")) if r else ""
    head = f"== {episode.task['id']} sample {episode.sample} | K {episode.frame_budget} | {episode.status} | {terms} | gold {episode.task['answer']}"
    calls = [f"   call {c['start']}-{c['end']}: {c['status']} -> {c['summary']}" for c in episode.calls]
    return "\n".join([model.printable(head), "".join(out), *map(model.printable, calls)])


# ---------------------------------------------------------------------------------------------------------------------


def check_tasks(path, rows):
    """Task rows, checked before any long work. Raises UserError naming file and task."""
    for number, row in enumerate(rows, 1):
        options = row.get("options") or []
        if not (isinstance(row["id"], (str, int)) and isinstance(row["question"], str)):
            raise model.UserError(f"{path}:{number}: id and question must be text")
        if not (isinstance(options, list) and all(isinstance(option, str) for option in options)):
            raise model.UserError(f"{path}:{number}: options must be a list of strings, or null")
        if row["type"] not in ("mcq", "open", "grounding"):
            raise model.UserError(f"{path}:{number}: type is {row['type']!r}; expected mcq, open or grounding")
        if row["type"] == "mcq" and not row.get("options"):
            raise model.UserError(f"{path}:{number}: an mcq task needs 'options'")
        if row["type"] == "grounding" and not (isinstance(row["answer"], list) and len(row["answer"]) == 2
                                               and all(type(second) in (int, float) for second in row["answer"])):
            raise model.UserError(f"{path}:{number}: the answer of a grounding task is [start, end] in seconds")
    if len({row["id"] for row in rows}) < len(rows):
        raise model.UserError(f"{path}: task ids are not unique")
    return rows


def read_tasks(path):
    return check_tasks(path, model.read_jsonl(path, required=("id", "video", "question", "answer", "type")))


def add_agent_arguments(parser, tools=True):
    """Flags of the agent loop, the same in rollout.py, grpo.py and eval.py; field for field the Agent and the Source.

    tools=False leaves --tools to the caller (eval.py runs both modes in one call)."""
    add, yes_no = parser.add_argument, argparse.BooleanOptionalAction
    add("--temperature", type=float, default=Agent.temperature, help="sampling temperature; 0 = greedy")
    add("--sub-temperature", type=float, default=None, help="of the sub-agents; default: the main agent's")
    add("--max-new-tokens", type=int, default=Agent.max_new_tokens, help="tokens per main-agent turn")
    add("--sub-max-new-tokens", type=int, default=Agent.sub_max_new_tokens, help="tokens per sub-agent summary")
    add("--context", type=int, default=Agent.context, help="tokens of one context, answer included")
    add("--max-turns", type=int, default=Agent.max_turns, help="tool turns; one answer turn always follows; 0 = no tool turn")
    add("--max-parallel", type=int, default=Agent.max_parallel, help="calls run per turn")
    add("--dispatch", choices=["parallel", "sequential", "turns"], default=Agent.dispatch, help="windows of a turn all at once, one by one, or one call a turn")
    if tools:
        add("--tools", action=yes_no, default=True, help="offer crop_video")
    add("--think-prefix", action=yes_no, default=True, help="force <think>\\n at the start of every main turn")
    add("--open-thought", choices=["run", "drop"], default=Agent.open_thought, help="calls inside a thought that never closes: run or drop them")
    add("--sub-frames", type=int, default=Agent.sub_frames, help="frames of a window at most")
    add("--sub-fps", type=float, default=Agent.sub_fps, help="frames per second of a window")
    add("--sub-question", action=yes_no, default=True, help="tell a sub-agent the question")
    add("--seed", type=int, default=0, help="of sampling and of the draws of K")
    add("--channel", choices=["image", "video"], default="image", help="frames as `<t seconds>` + images, or one video item")
    add("--video-root", default=None, help="folder videos are relative to and may not leave; default: the JSONL's folder")
    add("--min-pixels", type=int, default=1024, help="pixels of a frame after resizing, at least")
    add("--max-pixels", type=int, default=50176, help="pixels of a frame after resizing, at most")
    add("--decode-threads", type=int, default=4, help="threads that read videos while the engine runs")
    add("--decode-timeout", type=float, default=60.0, help="seconds a video may take, read in a child process; 0 = in this process, unprotected")
    add("--frame-cache-gb", type=float, default=4.0, help="GiB of decoded frames kept per rank; 0 = none")
    add("--patience", type=float, default=1800.0, help="seconds a phase, or the next episode, may take; beyond, the run ends with the stacks of every rank; 0 = for ever")
    add("--engine-share", type=float, default=0.5, help="vLLM's part of the GPU while it is awake: its weights and KV cache")
    add("--max-seqs", type=int, default=64, help="sequences in the engine's batch")


def agent_settings(args, data_path):
    """Parsed flags -> (Agent, Source)."""
    agent = Agent(**{f.name: getattr(args, f.name) for f in fields(Agent)})
    for name in ("max_new_tokens", "sub_max_new_tokens", "context", "max_parallel", "sub_frames", "max_seqs", "decode_threads", "min_pixels"):
        if getattr(args, name) < 1:
            raise model.UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("temperature", "sub_temperature"):
        if not 0 <= (getattr(args, name) or 0) <= 2:  # vLLM's own bounds; not NaN
            raise model.UserError(f"--{name.replace('_', '-')} must lie between 0 and 2, got {getattr(args, name)}")
    if not 0 < args.engine_share < 1:
        raise model.UserError(f"--engine-share must lie between 0 and 1, got {args.engine_share}")
    if agent.max_turns < 0 or not agent.sub_fps > 0 or args.min_pixels > args.max_pixels:
        raise model.UserError("--max-turns may not be negative, --sub-fps must be above 0, --min-pixels at most --max-pixels")
    root = args.video_root or os.path.dirname(os.path.abspath(data_path))
    if not os.path.isdir(root):
        raise model.UserError(f"--video-root {root}: no such folder")
    return agent, Source(root, video.FrameCache(int(args.frame_cache_gb * 2**30), timeout=args.decode_timeout or None), args.min_pixels, args.max_pixels)


def check_context(codec, tasks, agent, source, frames):
    """Refuse, before anything is loaded, a context that cannot hold the largest prompt of the first readable task."""
    budget, first = frames if isinstance(frames, int) else 64, None
    for task in tasks[:8]:
        spec = {"video": task["video"], "frames": budget}
        try:
            item = model.vision_item(spec, source.load(spec))
        except video.VideoError as error:
            first = first or error
            continue  # counted when its episode comes
        ids, _, _ = model.encode_prompt(codec, main_messages(task, budget, agent.tools), [item], tool_schema() if agent.tools else None)
        if len(ids) + 32 > agent.context:  # 32: a thought and an answer that could be scored
            raise model.UserError(f"--context {agent.context} is too small: task {task['id']} with {item.frames} frames takes {len(ids)} tokens; "
                                  "raise --context, or lower --frames or --max-pixels")
        return
    raise model.UserError(f"none of the first {len(tasks[:8])} videos can be read; is --video-root right? {first}")


def frames_argument(text):
    """--frames: a number of overview frames, or "gated"."""
    if text != "gated" and not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of frames or 'gated'")
    return text if text == "gated" else int(text)


def make_engine(kind, ckpt, codec, args, seed=0, sleeping=False, quiet=False):
    """--engine: vllm | transformers | auto (vllm when it is installed). sleeping: give memory back between rollouts (GPU)."""
    import importlib.util

    if kind == "auto":
        kind = "vllm" if importlib.util.find_spec("vllm") else "transformers"
        if kind == "transformers" and not quiet:
            print("vllm is not installed: sampling with plain transformers, which is slow", flush=True)
    if kind == "vllm":
        frames = args.frames if isinstance(args.frames, int) else 64
        return VllmEngine(ckpt, codec, args.context, max(frames, args.sub_frames), args.max_pixels, args.max_seqs, seed,
                          args.engine_share, sleeping)
    return TransformersEngine(ckpt, codec, max_seqs=args.max_seqs)


@model.watched
def main(watch):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="checkpoint folder")
    parser.add_argument("--data", required=True, help="task JSONL")
    parser.add_argument("--out", default=None, help="rollout JSONL to write; none = only look")
    parser.add_argument("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths that suit the world of toy.py")
    parser.add_argument("--engine", choices=["auto", "vllm", "transformers"], default="auto", help="who samples")
    parser.add_argument("--frames", type=frames_argument, default="gated", help="overview frames K, or 'gated': K ~ U{4,8,16,32,64}")
    parser.add_argument("--group", type=int, default=1, help="rollouts per task")
    parser.add_argument("--limit", type=int, default=0, help="tasks; 0 = all")
    parser.add_argument("--step", type=int, default=0, help="enters every seed and the draws of K, as in training")
    parser.add_argument("--show", type=int, default=0, help="print this many episodes, tokens coloured by who wrote them")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_agent_arguments(parser)
    if parser.parse_known_args()[0].preset == "toy":
        parser.set_defaults(**toy_lengths())
    args = parser.parse_args()
    if args.group < 1 or args.limit < 0:
        raise model.UserError("--group must be at least 1 and --limit at least 0")
    if args.out and os.path.isdir(args.out):
        raise model.UserError(f"--out {args.out} is a folder; give the name of a file")
    from tqdm import tqdm

    ckpt = model.resolve_checkpoint(args.ckpt)
    tasks = read_tasks(args.data)[: args.limit or None]
    agent, source = agent_settings(args, args.data)
    if args.out:
        model.make_out(os.path.dirname(os.path.abspath(args.out)))
    codec = model.load_codec(ckpt, args.channel)
    check_context(codec, tasks, agent, source, args.frames)
    engine = make_engine(args.engine, ckpt, codec, args, args.seed)
    watch.begin(args.patience)
    lines, shown, began = [], 0, time.monotonic()
    for episode in tqdm(run(engine, tasks, agent, codec, source, args.frames, args.group, args.step, threads=args.decode_threads),
                        total=len(tasks) * args.group, desc="rollouts", disable=args.quiet or None):
        lines.append(episode.to_json())
        watch.beat()
        if shown < args.show:
            shown += 1
            print(show(episode, codec, sys.stdout.isatty() and "NO_COLOR" not in os.environ), flush=True)
    if args.out:
        lines.sort(key=lambda r: (r["group"], r["sample"]))
        model.write_atomic(args.out, "".join(json.dumps(r) + "\n" for r in lines))
    seconds, n = time.monotonic() - began, len(lines)
    mean = {k: sum(r["reward"][k] for r in lines) / n for k in ("total", "acc", "fmt", "tool")}
    kappa = sum(sum(c["status"] == "ok" for c in r["calls"]) for r in lines) / n
    print(f"{n} rollouts in {seconds:.1f} s ({n / seconds:.1f}/s) | R {mean['total']:.3f} (acc {mean['acc']:.3f} fmt {mean['fmt']:.3f} "
          f"tool {mean['tool']:.3f}) | kappa {kappa:.2f} calls/rollout | {sum(r['status'] != 'ok' for r in lines)} not ok"
          + (f" -> {args.out}" if args.out else ""))


def toy_lengths():
    """Lengths of the toy world: its contexts are a few hundred tokens, its windows 8 frames."""
    return dict(context=1024, max_new_tokens=128, sub_max_new_tokens=24, max_turns=1)


if __name__ == "__main__":
    model.run_main(main)
