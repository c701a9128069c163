"""
rollout_speed.py: two ratios of the rollout loop, with vLLM on a toy checkpoint.

  pump      all episodes of a batch on engine.Pump, against lock-step: load all requested frames,
            then run all generations to the end, then continue all episodes. Episodes, requests
            and engine are the same; only the order of waiting differs
  dispatch  episodes one at a time, with three windows called in the first turn: Agent.dispatch
            "parallel" against "sequential"

The script sets the lengths, because a toy checkpoint would write shorter turns than real agents. A
main turn has a log-normal number of tokens: 90% of the draws lie between --shortest and --longest,
and the rest are moved to these ends. A summary has half of such a number. The end of turn is
forbidden. After a first turn is generated, this script replaces the text by calls of 0 to --windows
windows, evenly drawn. Both sides decode all frames anew. The sides alternate. The result is one
line of JSON with medians.

  python bench/rollout_speed.py --ckpt sft_out --data toy/rl.jsonl
"""
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch

import chat
import checkpoint
import data
import launch
import rollout
import video
from engine import Limits, Pump, VllmEngine


class LockStep(Pump):
    """The baseline: a barrier after every stage."""

    async def steps(self):
        while True:
            for _ in range(4):  # as in Pump: every episode makes the next request
                await asyncio.sleep(0)
            if self.loading or not self.waiting:  # load every frame first; the engine idles
                await asyncio.sleep(0.001)
                continue
            finished = []
            while len(finished) < len(self.waiting):  # then run one batch to the end
                finished += self.engine.poll()
            for done in finished:
                self.waiting.pop(done.id).set_result(done)


class ScriptedEngine:
    """vLLM, except that this class sets the length of each request and the text of a first turn."""

    def __init__(self, engine, codec, shortest, longest, windows):
        self.engine = engine
        self.codec = codec
        self.max_seqs = engine.max_seqs
        self.shortest = shortest  # tokens
        self.longest = longest
        self.windows = windows  # of a first turn, at most
        self.fixed = None  # (tokens of a main turn, of a summary, windows), instead of drawn ones
        self.tokens = 0  # sampled so far

    def submit(self, request):
        # Ids are step/task/sample/turn; those of sub-agents have one more part.
        request.max_tokens = self.length(request.id)
        self.engine.submit(request)

    def abort(self, name):
        self.engine.abort(name)

    def length(self, name):
        """Tokens of a request, drawn from the name, so that both sides have the same."""
        summary = name.count("/") > 3
        if self.fixed:
            return self.fixed[summary]
        low, high = math.log(self.shortest), math.log(self.longest)
        # 1.645 standard deviations on each side of the middle hold 90%
        draw = random.Random(name).normalvariate((low + high) / 2, (high - low) / 3.29)
        return round(math.exp(min(max(draw, low), high)) / (2 if summary else 1))

    def poll(self):
        finished = []
        for said in self.engine.poll():
            self.tokens += len(said.ids)
            if said.id.endswith("/0") and said.id.count("/") == 3:
                count = random.Random(f"windows of {said.id}").randint(0, self.windows)
                text = script(self.fixed[2] if self.fixed else count)
                ids = chat.encode(self.codec, text) + [self.codec.eos]
                said = replace(said, text=text, ids=ids, logps=[0.0] * len(ids), ended=True)
            finished.append(said)
        return finished


def script(windows):
    """A first turn in the style of the toy's cold start, with calls of windows far apart. Without
    windows the turn answers."""
    calls = []
    for n in range(windows):
        window = {"start_time": 16 * n, "end_time": 16 * n + 8}
        call = json.dumps({"name": "crop_video", "arguments": window})
        calls.append(f"<tool_call>\n{call}\n</tool_call>")
    calls = calls or ["<answer>16 red</answer>"]
    return "I need a closer look.\n</think>\n" + "\n".join(calls)


def measure(engine, pump, root, tasks, agent, codec, group, repeat, live):
    """-> (seconds, tokens/s) of all episodes, `live` of them at once."""
    # Clear frames, encoder outputs and prefixes that the other side has left.
    engine.engine.llm.reset_mm_cache()
    engine.engine.engine.reset_encoder_cache()
    engine.engine.engine.reset_prefix_cache()
    source = rollout.Source(root, video.FrameCache())
    engine.tokens = 0
    began = time.perf_counter()
    sampler = rollout.Sampler(engine, codec, source, agent, max_live=live)
    with mock.patch.object(rollout, "Pump", pump):
        # The repeat is part of the ids, so each repeat draws other lengths.
        episodes = list(rollout.run(sampler, tasks, 16, group, step=repeat))
    seconds = time.perf_counter() - began
    # Unequal work could not be compared. Calls that a last turn writes are not run.
    called = [sum(call["turn"] == 0 for call in e.calls) for e in episodes]
    if any(e.executed() != n or len(e.turns) != 1 + (n > 0) for e, n in zip(episodes, called)):
        raise RuntimeError("an episode did not make its calls")
    return seconds, engine.tokens / seconds


def compare(sides, repeats):
    """{name: arguments of `measure` except the repeat} -> {name: medians of seconds and tokens/s}.
    The sides alternate, and take turns to go first."""
    found = {name: [] for name in sides}
    for repeat in range(repeats + 1):  # the first round warms up
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            found[name].append(measure(**sides[name], repeat=repeat))
    return {name: [statistics.median(column) for column in zip(*rows[1:])]
            for name, rows in found.items()}


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint")
    add("--data", required=True, help="task JSONL of the same toy world")
    add("--prompts", type=int, default=8, help="prompts of a batch")
    add("--group", type=int, default=4, help="rollouts per prompt")
    add("--shortest", type=int, default=50, help="tokens of the shortest main turn")
    add("--longest", type=int, default=800, help="tokens of the longest main turn")
    add("--windows", type=int, choices=range(5), default=4, help="most windows of a first turn")
    add("--turn", type=int, default=64, help="tokens of a main turn, dispatch")
    add("--summary", type=int, default=128, help="tokens of a summary, dispatch")
    add("--episodes", type=int, default=6, help="episodes per measurement, dispatch")
    add("--repeats", type=int, default=5, help="measurements of each side")
    add("--max-seqs", type=int, default=64, help="sequences in the engine's batch")
    add("--threads", type=int, default=1,
        help="torch threads; on shared cores two spinning ones cost a factor of ten")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)  # the engine keeps these settings
    ckpt = checkpoint.resolve_checkpoint(args.ckpt)
    codec = chat.load_codec(ckpt)
    codec = replace(codec, banned=(*codec.banned, codec.eos))  # requests run to full length
    vllm = VllmEngine(ckpt, codec, Limits(4096, max_seqs=args.max_seqs))
    engine = ScriptedEngine(vllm, codec, args.shortest, args.longest, args.windows)
    tasks = data.read_tasks(args.data)[:args.prompts]
    agent = rollout.Agent(temperature=1.0, context=4096, max_turns=1)
    side = {"engine": engine, "pump": Pump, "tasks": tasks, "agent": agent, "codec": codec,
            "root": os.path.dirname(os.path.abspath(args.data)), "group": args.group,
            "live": len(tasks) * args.group}
    pump = compare({"pump": side, "lock_step": {**side, "pump": LockStep}}, args.repeats)

    engine.fixed = args.turn, args.summary, 3  # equal lengths: the ratio is of the dispatch alone
    side.update(tasks=tasks[:args.episodes], group=1, live=1)
    sequential = {**side, "agent": replace(agent, dispatch="sequential")}
    dispatch = compare({"parallel": side, "sequential": sequential}, args.repeats)
    # Decoding steps one after the other: the ratio if a step cost the same for one and for three.
    bound = (2 * args.turn + 3 * args.summary) / (2 * args.turn + args.summary)
    print(json.dumps({
        "bench": "rollout_speed",
        "pump_ratio": round(pump["lock_step"][0] / pump["pump"][0], 3),
        "dispatch_ratio": round(dispatch["sequential"][0] / dispatch["parallel"][0], 3),
        "dispatch_bound": round(bound, 3),
        "seconds": {name: round(s, 3) for name, (s, _) in {**pump, **dispatch}.items()},
        "tokens_per_s": {name: round(rate) for name, (_, rate) in pump.items()},
        "batch": len(tasks) * args.group, "episodes": len(side["tasks"]),
        "lengths": [args.shortest, args.longest], "windows": args.windows,
        "turn": args.turn, "summary": args.summary,
        "repeats": args.repeats, "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}))
    vllm.close()


if __name__ == "__main__":
    launch.run_main(main)
