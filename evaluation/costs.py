"""
evaluation/costs.py: counts the costs of an answer, deals out the work of a run, and estimates the
costs of a run beforehand.

  tokens  = tokens that had to be computed: the prompt of a context once, even if many turns follow
            (servers keep the prefix), and all sampled tokens
  frames  = shown to the main agent, overview and windows; frames of sub-agents are counted apart
  rounds  = turns of the main agent
  seconds = of the episode, while other episodes ran too

Tokens are counted from ids if the engine has ids, else taken from the endpoint's own counts, else
None. An estimate reads videos. Writes no file.
"""

import itertools
import json
import math
import os
from dataclasses import replace

import chat
import launch
import rewards
import rollout
import video
from engine import Completion
from evaluation import episodes, systems
from evaluation.endpoint import evenly

# ------------------------------------------------------------------------------------------------
# Counting


class Meter:
    """An engine around an engine, which notes the tokens of every request."""

    def __init__(self, engine):
        self.engine = engine
        self.under_way = {}  # request id -> (prompt tokens, chat)
        self.taken = {}  # request id -> (prompt tokens, sampled tokens, chat)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        # Endpoints have a chat, which shows whether a turn goes on from the turn before. A request
        # with ids always does.
        self.under_way[request.id] = len(request.expanded), getattr(request, "messages", [])
        self.engine.submit(request)

    def poll(self):
        finished = self.engine.poll()
        for said in finished:
            prompt, messages = self.under_way.pop(said.id)
            counts = getattr(self.engine, "usage", {}).pop(said.id, (None, None))
            if said.ids is not None:
                counts = prompt, len(said.ids)
            elif said.error:
                counts = 0, 0  # the server's own cost of a failed request is unknown
            self.taken[said.id] = (*counts, messages)
        return finished


def of(episode, taken):
    """
    Episode -> costs. Removes the episode's requests from `taken`, see Meter.taken.

    Tokens are None if one of the requests has no count.
    """
    name = f"{episode.group}/{episode.sample}"
    main, sub = [], []  # (prompt tokens, sampled tokens)
    before = None
    for turn in itertools.count():
        request = taken.pop(f"{name}/{turn}", None)
        if request is None:
            break
        main.append(fresh(request, before))
        before = request
        # A call whose window could not be loaded made no request, so numbers may be missing.
        asked = [taken.pop(f"{name}/{turn}/{n}", None) for n in range(len(episode.calls))]
        sub += [request[:2] for request in asked if request]
    shown = sum(len(f.seconds) for f in episode.context.frames) if episode.context else 0
    # If each step is a new context (SAGE), only the first one has the overview.
    overview = len(episode.notes.get("seconds", []))
    seen = [call for call in episode.calls if "frames_seen" in call]
    return {
        "frames": max(shown, overview),
        # A call with `seconds_seen` showed frames to the main agent, which are counted above.
        "sub_frames": sum(call["frames_seen"] for call in seen if "seconds_seen" not in call),
        "prompt_tokens": total(main, 0), "sampled_tokens": total(main, 1),
        "sub_prompt_tokens": total(sub, 0), "sub_sampled_tokens": total(sub, 1),
        "rounds": len(episode.turns),
        "seconds": episode.timing.get("total_s", 0.0),
    }


def fresh(request, before):
    """-> (tokens of the prompt that are new since the turn before, sampled tokens)."""
    prompt, sampled, messages = request
    if before is None or None in (prompt, *before[:2]):
        return prompt, sampled
    goes_on = messages[: len(before[2])] == before[2]  # else a new conversation, new as a whole
    return (max(0, prompt - sum(before[:2])) if goes_on else prompt), sampled


def total(counts, place):
    """Sum over requests, None if one is unknown."""
    some = [count[place] for count in counts]
    return None if None in some else sum(some)


def mean(records):
    """Records -> mean of every cost but seconds, and "tokens", the sum of all tokens. A cost that
    any record lacks is None. Records written before costs existed make every cost None."""
    costs = [record["cost"] for record in records if "cost" in record]
    if len(costs) < len(records):
        return None
    out = {}
    for name in [name for name in costs[0] if name != "seconds"]:  # the summary has them already
        values = [cost[name] for cost in costs]
        out[name] = None if None in values else sum(values) / len(values)
    parts = [value for name, value in out.items() if name.endswith("_tokens")]
    return {"tokens": None if None in parts else sum(parts), **out}


# ------------------------------------------------------------------------------------------------
# Dealing out tasks


def split(jobs, ranks):
    """Jobs -> [ranks][jobs]: the places of the tasks that a rank asks, in order."""
    work = [(n, i) for n, (*_, todo) in enumerate(jobs) for i in range(len(todo))]
    places = [(jobs[n][0].source.root, jobs[n][3][i]) for n, i in work]
    shares = []
    for mine in deal(places, ranks, sizes=True):
        share = [[] for _ in jobs]
        for place in mine:
            n, i = work[place]
            share[n].append(i)
        shares.append(share)
    return shares


def deal(places, parts, sizes=False):
    """
    [(root, task)] -> the indices of each of `parts`, the longest work first.

    The questions of a video stay together, so that one rank decodes the video once, unless they are
    more than a fair share. sizes: long files weigh more. Callers on several machines must then see
    the same files.
    """
    videos = {}  # path -> indices
    for index, (root, task) in enumerate(places):
        videos.setdefault(os.path.join(root, str(task["video"])), []).append(index)
    weight = {path: file_size(path) if sizes else 0 for path in videos}
    total = sum(weight.values()) or 1
    fair = max(1, -(-len(places) // parts))  # rounded up
    chunks = []  # (work, path, indices)
    for path, indices in videos.items():
        for at in range(0, len(indices), fair):
            some = indices[at : at + fair]
            # A rough guess is enough: half of the work is answering, half is decoding.
            cost = len(some) / len(places) + weight[path] / total
            chunks.append((cost, path, some))
    dealt, loads = [[] for _ in range(parts)], [0.0] * parts
    for cost, _, some in sorted(chunks, key=lambda chunk: (-chunk[0], chunk[1], chunk[2])):
        least = loads.index(min(loads))
        dealt[least] += some
        loads[least] += cost
    return dealt


def file_size(path):
    """Bytes, or 0 if the file cannot be read, which the task's own episode will report."""
    try:
        return os.path.getsize(path)
    except (OSError, ValueError):
        return 0


# ------------------------------------------------------------------------------------------------
# Estimates. Some of the tasks go through the loop of the run with an engine that has no model, so
# frames are decoded and prompts encoded as in the run.


class Mute:
    """An engine without a model: every turn is empty, or makes as many calls as are allowed."""

    max_seqs = 1

    def __init__(self, codec, agent, calls):
        self.codec, self.agent, self.calls, self.asked = codec, agent, calls, []

    def submit(self, request):
        text = self.crops(request) if self.calls else ""
        ids = self.codec and [*chat.encode(self.codec, text), self.codec.eos]
        logps = ids and [0.0] * len(ids)
        self.asked.append(Completion(request.id, ids, logps, text, ended=True))

    def abort(self, name):
        self.asked = [done for done in self.asked if done.id != name]

    def poll(self):
        done, self.asked = self.asked, []
        return done

    def crops(self, request):
        """A turn with the longest windows that are allowed, others in every turn, because frames in
        the cache would cost no time."""
        agent, last = self.agent, float(request.frames[0].seconds[-1])  # s, near the video's end
        length = min(last, agent.sub_frames / agent.sub_fps)
        turn = int(request.id.rpartition("/")[2])
        said = "</think>"
        for n in range(agent.max_parallel):
            start = (n + turn / (agent.max_turns + 1)) / agent.max_parallel * (last - length)
            window = {"start_time": start, "end_time": start + length}
            call = json.dumps({"name": "crop_video", "arguments": window})
            said += f"\n<tool_call>\n{call}\n</tool_call>"
        return said


def expected(suite, k, mode, todo, codec, protocol, args):
    """
    Tasks of one (suite, K, mode) -> six numbers. Without a call: seconds to decode a video's
    overview, prompt tokens of an answer, sampled tokens at most. With every call: seconds to decode
    an answer's windows, prompt tokens, sampled tokens at most. NaN: not known.
    """
    agent = replace(suite.agent, tools=mode.startswith("on"))
    first = {str(task["video"]): task for task in reversed(todo)}
    sizes = {path: file_size(os.path.join(suite.source.root, path)) for path in first}
    there = sorted(filter(sizes.get, sizes), key=sizes.get)
    tasks = [first[path] for path in evenly(there, args.estimate)]
    # A new cache, because frames that another K or mode left there would cost no time.
    source = replace(suite.source, cache=video.FrameCache(timeout=args.decode_timeout or None))

    def played(calls):
        meter = Meter(Mute(codec, agent, calls))
        sampler = rollout.Sampler(meter, codec, source, agent, threads=1, max_live=1)
        ran = episodes.run(sampler, tasks, protocol, frames=k)
        ran = [(e, of(e, meter.taken)) for e in ran if "total_s" in e.timing]
        full = [e.error for e, _ in ran if e.status == "context" and not calls]
        if full:  # no prompt of this suite fits
            raise launch.UserError(f"--estimate: {full[0]}")
        if not ran:
            raise launch.UserError(f"--estimate: no video below {source.root} could be read")
        decoding = [e.timing["decode_s"] for e, _ in ran]
        beside = [e.timing["total_s"] - e.timing["decode_s"] for e, _ in ran]
        prompts = [cost["prompt_tokens"] + cost["sub_prompt_tokens"] if codec else math.nan
                   for _, cost in ran]
        return [sum(values) / len(ran) for values in (decoding, beside, prompts)]

    decoding, _, prompt = played(calls=False)
    turn = min(agent.max_new_tokens, agent.context)
    turns = agent.max_turns if agent.tools else 0
    framed, _ = systems.protocols()[args.protocol].held(args)  # windows come back as frames
    summaries = 0 if framed else turns * agent.max_parallel
    beside, prompts = 0.0, prompt
    if turns:  # calls of another form are not played
        plain = protocol.parse is rewards.parse_tool_calls
        _, beside, prompts = played(calls=True) if plain else [math.nan] * 3
    source.cache.close()
    most = (turns + 1) * turn + summaries * agent.sub_max_new_tokens
    return [decoding, prompt, turn, beside, prompts, most]


def estimate(jobs, shares, codec, protocol, args):
    """
    The unfinished part of a run -> text with its costs. Hours are given only if finished records
    show the speed of the engine.

    jobs: [(suite, K, mode, tasks)]. shares: see `split`.
    """
    row = ("{:<15} {:>6} {:>5} {:>6} {:>6}" + " {:>8}" * 6).format
    lines = [f"{'':43}{'without a call':^26} {'with every call':^26}",
             row("benchmark", "K", "tools", "items", "videos", "decode", "prompt", "sample",
                 "+decode", "prompt", "sample")]
    ranks = [[0.0] * 9 for _ in shares]  # items, videos, six costs, hours at the measured speed
    live = args.live or 2 * (len(args.base_url) * args.workers if args.base_url else args.max_seqs)
    for n, (suite, k, mode, todo) in enumerate(jobs):
        if not todo:
            continue
        six = expected(suite, k, mode, todo, codec, protocol, args)
        ran = [s for (_, *place, _), s in suite.done.items() if place == [str(k), mode] and s]
        at_once = min(live, max(1, len(ran) // len(shares)))
        hours = sum(ran) / len(ran) / at_once / 3600 if ran else math.nan
        for rank, share in zip(ranks, shares):
            items, videos = counts([todo[i] for i in share[n]], args)
            weights = [videos / 3600, items / 1e6, items / 1e6, items / 3600] + [items / 1e6] * 2
            own = [items, videos, *map(math.prod, zip(six, weights)), hours * items]
            rank[:] = map(sum, zip(rank, own))
        lines.append(row(suite.bench or "-", k, mode, *counts(todo, args), *cells(six, "s", "")))
    items, videos, *six, hours = map(max, zip(*ranks))
    lines.append(row("the most a rank", "", "", int(items), int(videos), *cells(six, "h", "M")))
    lines += [f"decode: a video's overview, +decode: an answer's windows; {args.estimate} videos, "
              "by one decoder (a rank has 4).", "prompt: tokens of an answer, counted on the same "
              "videos. sample: tokens, a bound."]
    if not math.isnan(hours):
        lines.append(f"{hours:.3f}h for that rank at the speed of the answers that are there")
    return "\n".join(lines)


def counts(tasks, args):
    """-> (answers, videos)."""
    return len(tasks) * args.samples, len({task["video"] for task in tasks})


def cells(six, time, tokens):
    """Result of `expected` -> texts, in these units."""
    units = [time, tokens, tokens] * 2
    texts = [f"{value:.3f}{unit}" if unit else f"{value:.0f}" for value, unit in zip(six, units)]
    return ["-" if "nan" in text else text for text in texts]
