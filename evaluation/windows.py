"""
evaluation/windows.py (tests/test_scores.py): did an agent look at the right place?

  recall     share of the evidence (seconds in which the answer can be seen) inside windows
  precision  share of the seconds looked at that is evidence
  hit, iou   whether any window meets the evidence; IoU of the two unions
  random     the same four, if the same windows had been placed at random in the video

In the toy world also the way to an answer: share of episodes that called, of those the share whose
frames found every flash, of those the share whose summaries told all colours, of those the share
that was right. Their product is the accuracy that the search earns.

Each executed window keeps its length, cut at the ends of the video, and its start is drawn evenly
among those with which the window lies in the video. Windows are drawn apart from each other.

Numbers alone. Reads and writes no file. Used by evaluation/scores.py.
"""

import collections
import itertools
import random

import rewards

NAMES = ("recall", "precision", "hit", "iou")
STEPS = ("called", "found", "told", "right")  # of the header; only tasks of toy.py have `events`


def executed_calls(record):
    return [call for call in record["calls"] if call["status"] == "ok"]


def executed_spans(record):
    """Record -> spans of its executed calls [(start, end)], cut at the ends of the video."""
    end = record["timing"].get("video_s") or float("inf")
    spans = [(max(0.0, call["start"]), min(call["end"], end)) for call in executed_calls(record)]
    return [span for span in spans if span[0] <= span[1]]


def random_scores(spans, evidence, seconds, draws=100, seed=""):
    """-> {name: mean of window_scores over `draws` placements}, for a video of `seconds`."""
    draw, total = random.Random(seed), dict.fromkeys(NAMES, 0.0)
    lengths = [end - start for start, end in spans]
    for _ in range(draws):
        starts = [draw.uniform(0.0, seconds - length) for length in lengths]
        scores = rewards.window_scores([(a, a + b) for a, b in zip(starts, lengths)], evidence)
        for name in NAMES:  # no precision: all windows are instants
            total[name] += (scores[name] or 0.0) / draws
    return total


def step_shares(records):
    """Records of toy.py's tasks -> {step: share of the episodes that took all steps before it, None
    of no episode}; {} of other tasks."""
    counts = collections.Counter()
    for record in records:
        calls, frames, report = executed_calls(record), set(), ""
        if record["status"] != "ok" or not (events := record["task"].get("events")):
            continue
        for call in calls:
            # A window's frames are at the middles of equal parts. Toy videos have 1 frame a second.
            start, end, n = call["start"], call["end"], call.get("frames_seen", 0)
            frames |= {int(start + (i + 0.5) * (end - start) / n) for i in range(n)}
            report += f" {call['summary']},"
        if calls and "seconds_seen" in calls[0]:  # shown to the main agent, whose thought tells
            report = f" {record['turns'][-1].partition('</think>')[0].replace('.', ',')} "
        colours = collections.Counter(event["colour"] for event in events)
        passed = (True, bool(calls), all(frames & {*range(e["start"], e["end"])} for e in events),
                  all(report.count(f" {name},") >= n for name, n in colours.items()),
                  item_score(record) == 1)
        counts.update(range(len([*itertools.takewhile(bool, passed)])))
    return {name: counts[n + 1] / counts[n] if counts[n] else None
            for n, name in enumerate(STEPS)} if counts else {}


def window_stats(records, mean):
    """
    Records of one (benchmark, K, mode) -> {"n", name: mean, "random": {name: mean}, "acc_hit",
    "acc_miss", "miou", "rec@iou", "acc@iou", "intervals": {name: [low, high] or None}} and
    `step_shares`, {} if no task has evidence or no episode looked.

    The first are means over the episodes that looked. miou, rec@iou and acc@iou follow CG-Bench, as
    VLMEvalKit computes them, with the executed windows in place of intervals that a model is asked
    for, over all episodes: without a window the IoU is 0. mean: [(record, value)] -> (mean or None,
    interval).
    """
    pairs = [(record, executed_spans(record)) for record in records
             if record["status"] == "ok" and record["task"].get("evidence")]
    scored = [(record, spans, rewards.window_scores(spans, record["task"]["evidence"]))
              for record, spans in pairs if spans]
    if not scored:
        return {}
    columns = {name: [(record, scores[name]) for record, _, scores in scored
                      if scores[name] is not None] for name in NAMES}
    columns["acc_hit"] = [(r, item_score(r)) for r, _, scores in scored if scores["hit"]]
    columns["acc_miss"] = [(r, item_score(r)) for r, _, scores in scored if not scores["hit"]]
    ious = {id(record): scores["iou"] for record, _, scores in scored}
    columns["miou"] = [(record, ious.get(id(record), 0.0)) for record, _ in pairs]
    # Mean over the thresholds 0.1 to 0.5.
    columns["rec@iou"] = [(record, sum(iou > n / 10 for n in range(1, 6)) / 5)
                          for record, iou in columns["miou"]]
    columns["acc@iou"] = [(r, share * (item_score(r) == 1)) for r, share in columns["rec@iou"]]
    placed = [(r, random_scores(spans, r["task"]["evidence"], r["timing"]["video_s"],
                                seed=str(r["task"]["id"])))
              for r, spans, _ in scored if r["timing"].get("video_s")]
    means = {name: mean(column) for name, column in columns.items()}
    chance = {name: mean([(record, scores[name]) for record, scores in placed]) for name in NAMES}
    return {"n": len(scored), **{name: value for name, (value, _) in means.items()},
            "random": {name: value for name, (value, _) in chance.items()},
            "intervals": {name: ends for name, (_, ends) in means.items()}, **step_shares(records)}


def item_score(record):
    """Score of the answer itself: in Video-MME-v2, "score" is that of a group."""
    return record.get("item_score", record["score"])
