"""
bench/frontier.py: what a perfect reader can reach in the toy world at each K, and whether an
agent's calls follow need.

  shown(K)    = P(the overview shows an event); either(K): the overview or a crop of its window
  never       = E[prod over events of shown(K)]      accuracy without calls
  ceiling     = E[prod over events of either(K)]     accuracy if every unseen window is called
  needed      = E[events not shown]                  the fewest calls that reach the ceiling
  always      = E[events] = 2                        calls if every window is called
The expectations are exact: they run over every start of an event, every slot and 1 to 3 events.

Of an agent, per K, from its records: accuracy, calls run a rollout, needed calls a rollout, the
share of needed windows that it called, and of windows that the frames show (calls follow need if
the first is high and the second low), wasted calls a rollout, and truthful evidence: the share of
slots of which the first thought says what the frames show.

Of the way to an answer, in both worlds, over all K and from the same records:
  P(call)           a call was run
  P(found | call)   the frames of the calls show every event of the question
  P(told | found)   the summaries tell of all of them
  P(right | told)   the answer is right
Their product is the accuracy that the search earns. The rest is right without the whole way: read
from the overview, or guessed. Of two folders: what each factor adds to the difference, a Shapley
value, so that the parts sum to the difference whatever their order.

Reads: folders of eval.py, or runs of grpo.py (the rollouts of the last quarter of the steps).
CPU: python bench/frontier.py                                   the ceilings
     python bench/frontier.py out/demo/eval/sft out/demo/eval/grpo
     python bench/frontier.py --sub-fps 0.375                   ceilings of bench/ablation.py
"""
import collections
import glob
import itertools
import json
import math
import os
import re
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch  # noqa: E402
import rollout  # noqa: E402
import toy  # noqa: E402
import video  # noqa: E402
from evaluation import folders  # noqa: E402


def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def ceilings(frame_budget: int, sub_fps: float = 1.0) -> dict[str, float]:
    """-> {"never", "ceiling", "needed", "always"} of one K, exactly. sub_fps: frames of a crop per
    second."""
    clock = np.arange(64.0)  # starts of the frames, s
    looks = set(video.overview_indices(clock, 64.0, frame_budget).tolist())
    shown, either = [], []  # of each slot: the share of starts that are seen
    for slot in range(0, 64, 8):
        crop = set(video.crop_indices(clock, 64.0, slot, slot + 8, fps=sub_fps).tolist())
        frames = [{start, start + 1} for start in range(slot + 1, slot + 6)]  # as in make_timeline
        shown.append(sum(bool(f & looks) for f in frames) / len(frames))
        either.append(sum(bool(f & (looks | crop)) for f in frames) / len(frames))

    def all_seen(share):
        """P(every event is seen): 1 to 3 events alike, any set of slots alike."""
        sets = [list(itertools.combinations(share, n)) for n in (1, 2, 3)]
        return mean([mean([np.prod(s) for s in some]) for some in sets])

    return {"never": float(all_seen(shown)), "ceiling": float(all_seen(either)),
            "needed": 2 * (1 - mean(shown)), "always": 2.0}


def read(folder: str) -> list[dict]:
    """Rollouts with tools of an evaluation, or of the last quarter of a run's steps."""
    steps = sorted(glob.glob(os.path.join(glob.escape(folder), "rollouts", "step_*.jsonl")))
    if not steps:
        records = folders.read_records(folder).values()
        return [{**r, "K": int(r["budget"]), "acc": r["score"]} for r in records
                if r["tools"] == "on" and r["status"] == "ok"]
    names = sorted({os.path.basename(path).split(".")[0] for path in steps})
    last = set(names[-max(1, len(names) // 4):])
    rows = [r for path in steps if os.path.basename(path).split(".")[0] in last
            for r in launch.read_jsonl(path, required=("turns", "task", "calls"))]
    return [{**r, "acc": float(r["reward"]["acc"] == 1.0)} for r in rows if r["status"] == "ok"]


def stated_evidence(turn, task, frame_budget):
    """What a first turn's thought says of the overview -> (true claims, claims). Claims are about
    the slots of the question (the colour, or "nothing" if no frame shows the event), in the search
    world about all scenes (when each starts, as far as the frames tell, and its border)."""
    looks = toy.overview_looks(frame_budget, toy.film_seconds(len(task.get("scenes", ()))))
    if "scenes" in task:
        truth = {e["window"][0]: e["border"] for e in toy.told_scenes(task["scenes"], looks)}
    else:
        seen = toy.shown(task["events"], looks)
        truth = {e["window"][0]: e["colour"] if e in seen else "nothing" for e in task["events"]}
    text = turn.split("</think>")[0].partition("I saw")[2].split(".")[0]
    claims = dict(re.findall(r"(\d+) ([a-z]+)", re.sub(r" look \d+ to \d+", "", text)))
    said = [claims[str(t)] == word for t, word in truth.items() if str(t) in claims]
    return sum(said), len(said)


def film(task):
    """-> (starts of the frames of a task's film, its seconds)."""
    seconds = float(toy.film_seconds(len(task.get("scenes", ()))))
    return np.arange(seconds), seconds


def need(rows: list[dict]) -> dict:
    """Rollouts of one K -> {"n", "acc", "kappa", "needed", "wasted": per rollout; "called_unseen",
    "called_shown": shares of windows that were called; "evidence": share of slots}."""
    count = dict.fromkeys(("unseen", "shown", "hit", "extra", "calls", "right", "slots"), 0)
    for row in rows:
        events, k = row["task"]["events"], row["K"]
        seen = toy.shown(events, video.overview_indices(*film(row["task"]), k))
        called = [(c["start"], c["end"]) for c in row["calls"] if c["status"] == "ok"]
        for event in events:
            kind, asked = ("shown", "extra") if event in seen else ("unseen", "hit")
            count[kind] += 1
            count[asked] += tuple(map(float, event["window"])) in called
        count["calls"] += len(called)
        right, slots = (stated_evidence(row["turns"][0], row["task"], k) if row["turns"]
                        else (0, 0))
        count["right"], count["slots"] = count["right"] + right, count["slots"] + slots

    def share(a, b):
        return count[a] / count[b] if count[b] else None

    n = len(rows)
    return {"n": n, "acc": mean([r["acc"] for r in rows]), "kappa": count["calls"] / n,
            "needed": count["unseen"] / n, "wasted": (count["calls"] - count["hit"]) / n,
            "called_unseen": share("hit", "unseen"), "called_shown": share("extra", "shown"),
            "evidence": share("right", "slots")}


def steps_of(row: dict, sub_fps: float) -> list[bool]:
    """Rollout -> [called, found, told, right], see above; a step counts only after those before."""
    calls = [c for c in row["calls"] if c["status"] == "ok"]
    shown, told = [], " ".join(f"{c['summary']}," for c in calls)
    for c in calls:
        shown += toy.shown(row["task"]["events"], video.crop_indices(
            *film(row["task"]), c["start"], c["end"], c["num_frames"] or None, sub_fps))
    colours = collections.Counter(e["colour"] for e in row["task"]["events"])
    steps = [bool(calls), all(e in shown for e in row["task"]["events"]),
             all(told.count(f" {name},") >= n for name, n in colours.items()), row["acc"] == 1.0]
    return list(itertools.accumulate(steps, lambda before, step: before and step))


def way(rows: list[dict], sub_fps: float) -> dict:
    """Rollouts -> {"factors": the four conditional shares, None after a share of 0; "rest": share
    of rollouts that are right without the whole way}."""
    counts = [len(rows), *map(sum, zip(*(steps_of(row, sub_fps) for row in rows)))]
    right = sum(row["acc"] == 1.0 for row in rows)
    return {"factors": [b / a if a else None for a, b in zip(counts, counts[1:])],
            "rest": (right - counts[-1]) / len(rows)}


def shares(before: dict, after: dict) -> list[float]:
    """Two `way`s -> what each of the four factors adds to the difference of the products."""
    pairs = [[p or 0.0 for p in pair] for pair in zip(before["factors"], after["factors"])]
    added, orders = [0.0] * 4, list(itertools.permutations(range(4)))
    for order in orders:
        now = [old for old, _ in pairs]
        for i in order:
            last, now[i] = math.prod(now), pairs[i][1]
            added[i] += (math.prod(now) - last) / len(orders)
    return added


def way_lines(ways: dict[str, dict]) -> str:
    """{folder: way} -> text, with what each factor adds from the first folder to each other one."""
    names = ("P(call)", "P(found | call)", "P(told | found)", "P(right | told)", "rest")
    lines, first = ["  ".join(["accuracy", *names])], None
    for folder, found in ways.items():
        numbers = [math.prod(p or 0.0 for p in found["factors"]) + found["rest"],
                   *found["factors"], found["rest"]]
        rows = [(folder, numbers, ".3f")]
        if first:
            parts = [*shares(first, found), found["rest"] - first["rest"]]
            rows.append(("  adds", [sum(parts), *parts], "+.3f"))
        first = first or found
        lines += ["  ".join(f"{'-' if n is None else format(n, form):>{len(title)}}" for n, title in
                            zip(row, ("accuracy", *names))) + f"  {label}"
                  for label, row, form in rows]
    return "\n".join(lines)


def by_budget(rows: list[dict]) -> dict[int, dict]:
    """-> {K: need of the rollouts with this K}."""
    return {k: need([r for r in rows if r["K"] == k]) for k in sorted({r["K"] for r in rows})}


def verdict(cells: dict[int, dict]) -> str:
    """One sentence on whether calls follow need. Means over K."""
    unseen, shown = (mean([c[m] for c in cells.values()])
                     for m in ("called_unseen", "called_shown"))
    if unseen is None or shown is None:
        return "These K cannot tell whether calls follow need."
    word = "follow" if unseen - shown > 0.5 else "hardly follow" if unseen - shown > 0.1 \
        else "do not follow"
    return (f"Calls {word} need: {unseen:.0%} of the windows that the frames do not show are "
            f"called, and {shown:.0%} of those that they show.")


def table(cells: dict[int, dict], sub_fps: float) -> str:
    """-> text, one line for each K and their mean."""
    def number(value):
        return "-" if value is None else f"{value:.2f}"

    limits = {k: ceilings(k, sub_fps) for k in cells}
    columns = [("never", limits, "never"), ("accuracy", cells, "acc"),
               ("ceiling", limits, "ceiling"), ("calls", cells, "kappa"),
               ("needed", cells, "needed"), ("wasted", cells, "wasted"),
               ("called unseen", cells, "called_unseen"), ("called shown", cells, "called_shown"),
               ("evidence", cells, "evidence")]
    columns = [c for c in columns if c[1] is limits or any(x.get(c[2]) is not None
                                                           for x in c[1].values())]
    lines = ["K     " + "  ".join(title for title, *_ in columns)]
    for k in [*cells, None]:
        values = [(where[k][m] if k else mean([c[m] for c in where.values()]))
                  for _, where, m in columns]
        lines.append(f"{k or 'mean':<6}" + "  ".join(
            f"{number(v):>{len(title)}}" for v, (title, *_) in zip(values, columns)))
    return "\n".join(lines)


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("folders", nargs="*", help="folders of eval.py, or runs of grpo.py")
    parser.add_argument("--sub-fps", type=float, default=None,
                        help="frames of a crop per second; default: of each folder's args.json, "
                        "or 1")
    args = parser.parse_args()
    if not args.folders:
        print("A perfect reader:")
        limits = {k: ceilings(k, args.sub_fps or 1.0) for k in rollout.gated_choices()}
        for k, cell in [*limits.items(),
                        ("mean", {m: mean([c[m] for c in limits.values()]) for m in limits[4]})]:
            print(f"K {k:<4}  never {cell['never']:.3f}  ceiling {cell['ceiling']:.3f}  "
                  f"needed calls {cell['needed']:.2f} of {cell['always']:.0f}")
    ways = {}
    for folder in args.folders:
        rows = [r for r in read(folder) if "events" in r["task"]]
        if not rows:
            raise launch.UserError(f"{folder}: no rollouts with tools on tasks of toy.py")
        fps = args.sub_fps
        if fps is None:
            with open(os.path.join(folder, "args.json")) as f:
                fps = json.load(f)["sub_fps"]
        cells = by_budget(rows)
        if "scenes" not in rows[0]["task"]:  # there every need is a window that is named
            print(f"{folder}\n{table(cells, fps)}\n{verdict(cells)}")
        ways[folder] = way(rows, fps)
    if ways:
        print(way_lines(ways))


if __name__ == "__main__":
    launch.run_main(main)
