"""
bench/costs.py: what an answer costs, so that accuracy can stand against it.

  tokens  = tokens that had to be computed: a context's prompt once, however many turns go on from
            it (their servers keep the prefix), and all that was sampled
  frames  = shown to the main agent, overview and windows; those of sub-agents apart
  rounds  = turns of the main agent
  seconds = of the episode, beside whatever else ran

Tokens come from the engine: ids where it has them, else what the endpoint says; None where neither
is known. Reads and writes nothing.
"""

import itertools


class Meter:
    """An engine that notes what every request took. What it does not know it leaves to the
    engine."""

    def __init__(self, engine):
        self.engine = engine
        self.under_way = {}  # request id -> (prompt tokens, messages)
        self.taken = {}  # request id -> (prompt tokens, sampled tokens, messages)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        self.under_way[request.id] = len(request.expanded), request.messages
        self.engine.submit(request)

    def poll(self):
        finished = self.engine.poll()
        for said in finished:
            prompt, messages = self.under_way.pop(said.id)
            counts = getattr(self.engine, "usage", {}).pop(said.id, (None, None))
            if said.ids is not None:
                counts = prompt, len(said.ids)
            elif said.error:
                counts = 0, 0  # it gave nothing; what it cost the server nobody knows
            self.taken[said.id] = (*counts, messages)
        return finished


def of(episode, taken):
    """
    Episode -> its costs; its requests are taken out of `taken`, see Meter.

    Tokens are None where one of its requests has no count.
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
        # A call whose window could not be loaded asked nothing: there are gaps.
        asked = [taken.pop(f"{name}/{turn}/{n}", None) for n in range(len(episode.calls))]
        sub += [request[:2] for request in asked if request]
    shown = sum(len(f.seconds) for f in episode.context.frames) if episode.context else 0
    # Where each step is a new context, only the first one has the overview.
    overview = len(episode.notes.get("seconds", []))
    seen = [call for call in episode.calls if "frames_seen" in call]
    return {
        "frames": max(shown, overview),
        # `seconds_seen`: shown to the main agent itself, and so counted above.
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
    goes_on = messages[: len(before[2])] == before[2]  # else a new conversation: all of it is new
    return (max(0, prompt - sum(before[:2])) if goes_on else prompt), sampled


def total(counts, place):
    """Sum over requests, None where one is unknown."""
    some = [count[place] for count in counts]
    return None if None in some else sum(some)


def mean(records):
    """Records -> mean of every cost but seconds, and "tokens", all together; a cost that is not
    known of all is None, and so is everything where a record is older than costs are."""
    costs = [record["cost"] for record in records if "cost" in record]
    if len(costs) < len(records):
        return None
    out = {}
    for name in [name for name in costs[0] if name != "seconds"]:  # the summary has them already
        values = [cost[name] for cost in costs]
        out[name] = None if None in values else sum(values) / len(values)
    parts = [value for name, value in out.items() if name.endswith("_tokens")]
    return {"tokens": None if None in parts else sum(parts), **out}
