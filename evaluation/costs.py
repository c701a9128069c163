"""
evaluation/costs.py (tests/test_eval.py): counts the costs of an answer, and deals out the work of a
run.

  tokens  = tokens that had to be computed: the prompt of a context once, even if many turns follow
            (servers keep the prefix), and all sampled tokens
  frames  = shown to the main agent, overview and windows; frames of sub-agents are counted apart
  rounds  = turns of the main agent
  seconds = of the episode, while other episodes ran too

Tokens are counted from ids if the engine has ids, else taken from the endpoint's own counts, else
None. Reads and writes no file.
"""

import itertools
import os

from plumbing import data

# ------------------------------------------------------------------------------------------------
# Counting


class Meter:
    """An engine around an engine, which notes the tokens of every request."""

    def __init__(self, engine):
        self.engine = engine
        self.under_way = {}  # request id -> prompt tokens
        self.taken = {}  # request id -> (prompt tokens, sampled tokens)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        self.under_way[request.id] = len(request.expanded)
        self.engine.submit(request)

    def poll(self):
        finished = self.engine.poll()
        for completion in finished:
            prompt = self.under_way.pop(completion.id)
            counts = getattr(self.engine, "usage", {}).pop(completion.id, (None, None))
            if completion.ids is not None:
                counts = prompt, len(completion.ids)
            elif completion.error:
                counts = 0, 0  # the server's own cost of a failed request is unknown
            self.taken[completion.id] = counts
        return finished


def episode_cost(episode, taken):
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
        new, sampled = request  # tokens of the prompt that are new since the turn before
        if before is not None and None not in (new, *before):
            new = max(0, new - sum(before))
        main.append((new, sampled))
        before = request
        # A call whose window could not be loaded made no request, so numbers may be missing.
        sub_requests = [taken.pop(f"{name}/{turn}/{n}", None) for n in range(len(episode.calls))]
        sub += filter(None, sub_requests)
    calls = [call for call in episode.calls if "frames_seen" in call]
    return {
        "frames": sum(len(f.seconds) for f in episode.context.frames) if episode.context else 0,
        # A call with `seconds_seen` showed frames to the main agent, which are counted above.
        "sub_frames": sum(call["frames_seen"] for call in calls if "seconds_seen" not in call),
        "prompt_tokens": sum_or_none(main, 0), "sampled_tokens": sum_or_none(main, 1),
        "sub_prompt_tokens": sum_or_none(sub, 0), "sub_sampled_tokens": sum_or_none(sub, 1),
        "rounds": len(episode.turns),
        "seconds": episode.timing.get("total_s", 0.0)}


def sum_or_none(counts, index):
    """Sum over requests, None if one is unknown."""
    values = [count[index] for count in counts]
    return None if None in values else sum(values)


def mean_costs(records):
    """Records -> mean of every cost but seconds, and "tokens", the sum of all tokens. A cost that
    any record lacks is None. None if a record was written before costs existed."""
    costs = [record["cost"] for record in records if "cost" in record]
    if len(costs) < len(records):
        return None
    out = {name: mean_or_none([cost[name] for cost in costs])
           for name in costs[0] if name != "seconds"}  # the summary has them already
    parts = [[value] for name, value in out.items() if name.endswith("_tokens")]
    return {"tokens": sum_or_none(parts, 0), **out}


def mean_or_none(values):
    return None if None in values else sum(values) / len(values)


# ------------------------------------------------------------------------------------------------
# Dealing out tasks


def tasks_by_rank(jobs, ranks):
    """Jobs -> [ranks][jobs]: the indices of the tasks that a rank asks, in order."""
    work = [(n, i) for n, (*_, todo) in enumerate(jobs) for i in range(len(todo))]
    dealt = balance_tasks([(jobs[n][0].source.root, jobs[n][3][i]) for n, i in work], ranks)
    return [[[work[index][1] for index in indices if work[index][0] == n] for n in range(len(jobs))]
            for indices in dealt]


def balance_tasks(tasks, parts):
    """
    [(root, task)] -> the indices of each of `parts`, the longest work first.

    The questions of a video stay together, so that one rank decodes the video once, unless they are
    more than a fair share.
    """
    videos = {}  # path -> indices
    for index, (root, task) in enumerate(tasks):
        videos.setdefault(os.path.join(root, str(task["video"])), []).append(index)
    fair = max(1, -(-len(tasks) // parts))  # rounded up
    chunks = [videos[path][at : at + fair] for path in sorted(videos)
              for at in range(0, len(videos[path]), fair)]
    shares = (data.balance_over_ranks(chunks, len, part, parts) for part in range(parts))
    return [[index for group in share for index in group] for share in shares]
