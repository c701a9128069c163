"""
bench_rollout.py: two ratios of the rollout engine, measured with vLLM on a toy checkpoint. Prints ONE line of JSON.

  scheduler   all episodes of a batch on rollout.drive, against lock-step batches: every main turn of the batch, then every crop
              decoded, then every sub-agent, then every answer, with a barrier after each stage. The same generators, the same
              requests, the same engine; only the waiting differs.
  dispatch    one episode at a time, three windows called in its first turn: --dispatch parallel against sequential, in
              wall time per episode.

Lengths are mixed on purpose: how long a request may run is drawn per request from a long-tailed law (--shortest to --longest),
and the end-of-turn token is suppressed, so that a request always runs that long, whatever the checkpoint would write. First
turns are scripted (three calls of the toy world) after their tokens were generated, so that every episode has three windows.
Both sides are interleaved and repeated; medians and the ratio of medians are reported, with the machine's load.

Run:  python tests/bench_rollout.py --ckpt sft_out --data toy/rl.jsonl
"""
import argparse
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch

import model
import rollout
import video


class ScriptedEngine:
    """vLLM with two things decided by the bench: how many tokens each request runs for, and what a first turn says."""

    def __init__(self, engine, codec, shortest, longest, script):
        self.engine, self.codec, self.max_seqs = engine, codec, engine.max_seqs
        self.shortest, self.longest, self.script, self.tokens = shortest, longest, script, 0
        self.fixed = None  # (tokens of a main turn, tokens of a summary) instead of drawn lengths

    def length(self, request):
        """Log-uniform from a digest of the request's id: long-tailed, and the same on both sides of a comparison."""
        if self.fixed:
            return self.fixed[request.id.count("/") > 3]
        draw = random.Random(request.id).random()
        return round(self.shortest * (self.longest / self.shortest) ** draw)

    def submit(self, request):
        request.max_tokens = self.length(request)
        self.engine.submit(request)

    def poll(self):
        done = self.engine.poll()
        for completion in done:
            self.tokens += len(completion.ids)
            # ids are <group>/<sample>/<turn> for a main turn and have one more part for a sub-agent
            if completion.id.endswith("/0") and completion.id.count("/") == 3:
                completion.text, completion.ids = self.script, model.encode(self.codec, self.script) + [self.codec.eos]
                completion.logps, completion.ended = [0.0] * len(completion.ids), True
        return done


def lock_step(engine, works, threads=4):
    """The baseline: the same generators, one stage at a time, with a barrier after each -> list of return values."""
    nodes, out = [], []

    def advance(node, value):
        try:
            node.results = node.work.send(value)
        except StopIteration as stop:
            node.results = None
            out.append(stop.value) if node.parent is None else node.parent.missing.update({node.slot: stop.value})
            return
        node.missing = {}  # slot -> result
        for slot, wait in enumerate(node.results):
            if not isinstance(wait, rollout.Request) and not callable(wait):
                child = rollout.Node(wait, node, slot)
                nodes.append(child)
                advance(child, None)

    for work in works:
        nodes.append(rollout.Node(work))
        advance(nodes[-1], None)
    with ThreadPoolExecutor(threads) as pool:
        while any(n.results is not None for n in nodes):
            waiting = [(n, s, w) for n in nodes if n.results is not None for s, w in enumerate(n.results) if s not in n.missing]
            decode = [x for x in waiting if callable(x[2])]
            if decode:  # every frame set first, while the engine idles
                for (n, s, _), frames in zip(decode, pool.map(lambda x: x[2](), decode)):
                    n.missing[s] = frames
            else:  # then one batch of generations, until the last of them is finished
                owners = {w.id: (n, s) for n, s, w in waiting if isinstance(w, rollout.Request)}
                for _, _, w in waiting:
                    if isinstance(w, rollout.Request):
                        engine.submit(w)
                while owners:
                    for completion in engine.poll():
                        n, s = owners.pop(completion.id)
                        n.missing[s] = completion
            for n in list(nodes):  # whoever has everything goes on; children before parents, since they were added later
                while n is not None and n.results is not None and len(n.missing) == len(n.results):
                    advance(n, [n.missing[s] for s in range(len(n.results))])
                    n = n.parent
            nodes = [n for n in nodes if n.results is not None]
    return out


def works(tasks, group, agent, codec, source, repeat):
    """Episodes of a batch; the repeat enters the ids, so that no side profits from lengths the other has seen."""
    return [rollout.run_episode(rollout.Episode(t, f"{repeat}/{t['id']}", sample, 16, 0), agent, codec, source, repeat)
            for t in tasks for sample in range(group)]


def fresh(engine, root):
    """Before each measurement: no frames, no encoder outputs, no prefixes left over from the other side."""
    engine.engine.llm.reset_mm_cache()
    engine.engine.engine.reset_encoder_cache()
    engine.engine.engine.reset_prefix_cache()
    engine.tokens = 0
    return rollout.Source(root, video.FrameCache())


def compare(sides, repeats):
    """{name: function(repeat)} -> {name: [seconds]}; sides alternate, and so does which of them goes first."""
    seconds = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            seconds[name].append(sides[name](repeat))
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint")
    add("--data", required=True, help="task JSONL of the same toy world")
    add("--prompts", type=int, default=8, help="prompts of a batch")
    add("--group", type=int, default=4, help="rollouts per prompt")
    add("--shortest", type=int, default=8, help="tokens of the shortest request")
    add("--longest", type=int, default=256, help="tokens of the longest request")
    add("--turn", type=int, default=64, help="tokens of a main turn in the dispatch comparison")
    add("--summary", type=int, default=128, help="tokens of a summary in the dispatch comparison")
    add("--repeats", type=int, default=5, help="measurements of each side")
    add("--episodes", type=int, default=6, help="episodes per measurement of the dispatch, one at a time")
    add("--max-seqs", type=int, default=64, help="sequences in the engine's batch")
    add("--threads", type=int, default=1, help="torch threads; on shared cores two spinning threads cost a factor of ten")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)  # the engine keeps what it finds
    ckpt = model.resolve_checkpoint(args.ckpt)
    codec = model.load_codec(ckpt)
    tasks = rollout.read_tasks(args.data)[: args.prompts]
    root = os.path.dirname(os.path.abspath(args.data))
    codec.banned = (*codec.banned, codec.eos)  # a request runs exactly as long as it was told to
    # Three windows of different places; the text is what the toy's cold start teaches.
    windows = [{"start_time": 0, "end_time": 8}, {"start_time": 24, "end_time": 32}, {"start_time": 48, "end_time": 56}]
    calls = [json.dumps({"name": "crop_video", "arguments": window}) for window in windows]
    script = "I need a closer look.\n</think>\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    engine = ScriptedEngine(rollout.VllmEngine(ckpt, codec, 2048, max_seqs=args.max_seqs), codec, args.shortest, args.longest, script)
    agent = rollout.Agent(temperature=1.0, context=2048, max_new_tokens=512, max_turns=1)
    rates = {"drive": [], "lock_step": []}

    def batch(name, repeat):
        source = fresh(engine, root)
        began = time.perf_counter()
        jobs = works(tasks, args.group, agent, codec, source, repeat)
        out = list(rollout.drive(engine, jobs)) if name == "drive" else lock_step(engine, jobs)
        seconds = time.perf_counter() - began
        # A comparison of unequal work would be worthless: every episode made three calls, and ran both of its turns.
        if [sum(c["status"] == "ok" for c in e.calls) for e in out] != [3] * len(jobs) or any(len(e.turns) != 2 for e in out):
            raise RuntimeError("an episode did not make its three calls")
        rates[name].append(engine.tokens / seconds)
        return seconds

    def one_by_one(dispatch, repeat):
        source = fresh(engine, root)
        engine.fixed = args.turn, args.summary  # equal lengths: the ratio is that of the dispatch alone
        rules = rollout.Agent(**{**vars(agent), "dispatch": dispatch})
        began = time.perf_counter()
        for work in works(tasks[: args.episodes], 1, rules, codec, source, repeat):
            list(rollout.drive(engine, [work]))
        seconds = (time.perf_counter() - began) / min(args.episodes, len(tasks))
        engine.fixed = None
        return seconds

    for name in rates:  # kernels and caches of the process warm up
        batch(name, -1)
        rates[name].clear()
    scheduler = compare({name: lambda r, name=name: batch(name, r) for name in rates}, args.repeats)
    dispatch = compare({name: lambda r, name=name: one_by_one(name, 100 + r) for name in ("parallel", "sequential")}, args.repeats)
    middle = {name: statistics.median(s) for name, s in {**scheduler, **dispatch}.items()}
    print(json.dumps({
        "scheduler_ratio": round(middle["lock_step"] / middle["drive"], 3), "scheduler_target": 1.3,
        "dispatch_ratio": round(middle["sequential"] / middle["parallel"], 3), "dispatch_target": 1.8,
        # Decoding steps on the critical path: what the ratio would be if a step cost the same for one sequence and for three.
        "dispatch_bound": round((2 * args.turn + 3 * args.summary) / (2 * args.turn + args.summary), 3),
        "turn": args.turn, "summary": args.summary, "drive_s": round(middle["drive"], 3), "lock_step_s": round(middle["lock_step"], 3),
        "parallel_s_per_episode": round(middle["parallel"], 4), "sequential_s_per_episode": round(middle["sequential"], 4),
        "drive_tokens_per_s": round(statistics.median(rates["drive"])), "lock_step_tokens_per_s": round(statistics.median(rates["lock_step"])),
        "all_s": {name: [round(x, 3) for x in s] for name, s in {**scheduler, **dispatch}.items()},
        "episodes": len(tasks) * args.group, "lengths": [args.shortest, args.longest], "max_seqs": args.max_seqs, "repeats": args.repeats,
        "threads": args.threads, "cores": len(os.sched_getaffinity(0)), "load": [round(x, 1) for x in os.getloadavg()]}))
    engine.engine.close()


if __name__ == "__main__":
    model.run_main(main)
