"""
evaluation/scores.py (tests/test_scores.py): turns the records of an evaluation into numbers and
tables.

  headline   = mean over items | mean of the means of parts (MLVU) | one part alone (MMVU)
  interval   = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  difference = headline of (score of B - score of A) of the same items, with its interval

A record is a line of records.*.jsonl, read and graded by evaluation/results.py. Reads and writes no
file.
"""

import time
from collections import Counter

import numpy as np

import rewards
from evaluation import benchmarks

# ------------------------------------------------------------------------------------------------
# Scores


def mean(values):
    """-> mean; None of no values."""
    values = list(values)
    return sum(values) / len(values) if values else None


def headline_stats(records, bench, draws=2000):
    """
    Records of one (benchmark, K, mode) -> {"n", "headline", "interval", "acc"}. The interval of
    items of one video is None.

    Videos are drawn, not items, because answers about one video err together. The draws depend on
    the set of videos alone, so the draws of a difference of two systems are paired.
    """
    records = list(records)
    _, part_of = benchmarks.headline_metric(bench)
    parts = [part_of(record) for record in records]  # None: an item that is not in the headline
    names = sorted({part for part in parts if part is not None})
    videos, places = np.unique([r["task"]["video"] for r in records], return_inverse=True)
    sums = np.zeros((len(videos), len(names)))
    counts = np.zeros((len(videos), len(names)))
    for record, place, part in zip(records, places, parts):
        if part is not None:
            sums[place, names.index(part)] += record["score"]
            counts[place, names.index(part)] += 1
    stats = {"n": len(records), "headline": None, "interval": None,
             "acc": mean(record["score"] for record in records)}
    if names:
        stats["headline"] = float((sums.sum(0) / counts.sum(0)).mean())
    if names and len(videos) > 1:
        chances = np.full(len(videos), 1 / len(videos))
        times = np.random.default_rng(0).multinomial(len(videos), chances, size=draws)
        times = times[(times @ counts).any(1)]  # a draw may miss all items
        with np.errstate(invalid="ignore"):  # or a part
            drawn = np.nanmean((times @ sums) / (times @ counts), 1)
        stats["interval"] = np.nanpercentile(drawn, (2.5, 97.5)).tolist()
    return stats


def breakdowns(records):
    """-> {tag: {label: n and accuracy}}. An item with several labels counts under each label."""
    found = {}
    for record in records:
        task = record["task"]
        tags = task.get("tags") or {"category": task.get("category") or task["type"]}
        for name, labels in {"type": task["type"], **tags}.items():
            for label in labels if isinstance(labels, list) else [labels]:
                found.setdefault(name, {}).setdefault(str(label), []).append(record["score"])
    for cells in found.values():
        for label, values in cells.items():
            cells[label] = {"n": len(values), "acc": mean(values)}
    return found


def window_stats(records):
    """Did the agent look at the right place? -> means of rewards.window_scores over the episodes
    that looked and whose task has `evidence`; {} if there is none."""
    found = []
    for record in records:
        spans = [(call["start"], call["end"]) for call in record["calls"] if call["status"] == "ok"]
        if spans and record["task"].get("evidence") and record["status"] == "ok":
            found.append(rewards.window_scores(spans, record["task"]["evidence"]))
    stats = {"n": len(found)} if found else {}
    for name in found[0] if found else ():
        stats[name] = mean(scores[name] for scores in found if scores[name] is not None)
    return stats


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, mode) -> dict of numbers. Errors are in every denominator."""
    ended = [record for record in records if record["status"] == "ok"]
    errors = Counter(record["status"] for record in records if record["status"] != "ok")
    calls = [sum(call["status"] == "ok" for call in record["calls"]) for record in records]
    out = {
        "metric": benchmarks.headline_metric(bench)[0],
        **headline_stats(records, bench),
        "f_tau": mean(record["reward"]["fmt"] for record in records),
        "kappa": mean(calls),
        "errors": errors,
        "no_answer": sum(record["extracted"] is None for record in ended),
        "truncated": sum(record["finish"][-1:] == ["length"] for record in ended),  # the last turn
        "seconds_per_episode": mean(r["timing"].get("total_s", 0.0) for r in records),
        "tokens": mean(r["tokens"] for r in records if r.get("tokens") is not None),
        "by": breakdowns(records)}
    if judged:
        out["judge"] = judge_counts(records)
        if out["judge"]["failed"]:
            errors["judge_error"] = out["judge"]["failed"]
    return out | rarer_numbers(records)


def judge_counts(records):
    verdicts = [record["judge"] for record in records if "judge" in record]
    # None: the request was refused, or the reply was neither yes nor no
    return {"judged": len(verdicts), "yes": verdicts.count(True), "failed": verdicts.count(None)}


def rarer_numbers(records):
    """-> numbers that only some records have."""
    out = {}
    if windows := window_stats(records):
        out["windows"] = windows
    best = {}  # task id -> score of its best sample
    for record in records:
        name = record["task"]["id"]
        best[name] = max(record["score"], best.get(name, 0.0))
    if len(records) > len(best):
        out["pass@n"] = mean(best.values())
    if {record["task"]["type"] for record in records} == {"grounding"}:
        for threshold in (0.3, 0.5, 0.7):  # recall, of the IoU
            out[f"R@{threshold}"] = mean(record["score"] >= threshold for record in records)
    return out


def failed_lines(results):
    """-> a line for every result of which more than 1% of the items failed."""
    lines = []
    for row in results:
        failed = sum(row["errors"].values())
        if failed > 0.01 * row["n"]:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(row["errors"].items()))
            lines.append(f"{title_of(row)}: {failed} of {row['n']} items failed ({causes})")
    return lines


# ------------------------------------------------------------------------------------------------
# Tables in the terminal


def text_of(value, digits=3):
    """A cell of a table."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def title_of(row):
    return f"{row['bench'] or 'data'}, K {row['K']}, tools {row['tools']}"


def interval_text(row, name="headline", digits=3, scale=1):
    """0.500 [0.400, 0.600]."""
    if row[name] is None:
        return "-"
    ends = [text_of(scale * end, digits) for end in row["interval"] or ()]
    return f"{text_of(scale * row[name], digits)} [{', '.join(ends) or '-'}]"


def aligned(rows):
    """Rows of cells -> lines with aligned columns."""
    rows = [[text_of(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def table(results, labels=12):
    """Results -> aligned text: a row per benchmark, K and mode, then what only some results have.
    Breakdowns with a single label, or with more than `labels`, are in summary.json alone."""
    rows = [["bench", "K", "tools", "n", "headline [95%]", "acc", "f_tau", "kappa", "errors",
             "no answer", "cut off"]]
    for row in results:
        rows.append([row["bench"], row["K"], row["tools"], row["n"], interval_text(row),
                     row["acc"], row["f_tau"], row["kappa"], sum(row["errors"].values()),
                     row["no_answer"], row["truncated"]])
    lines = aligned(rows)
    for row in results:
        found = []
        for name in ("pass@n", "R@0.3", "R@0.5", "R@0.7"):
            if name in row:
                found.append([name, "", row["n"], row[name]])
        for name, value in row.get("windows", {}).items():
            found.append(["windows of episodes that called", name, "", value])
        for name, groups in row["by"].items():
            if 1 < len(groups) <= labels:
                for label, cell in sorted(groups.items()):
                    found.append([name, label, cell["n"], cell["acc"]])
        if found:
            lines += ["", f"{title_of(row)}: {row['metric']} is the headline", *aligned(found)]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------
# Several evaluations


def differences(baseline, candidate, bench):
    """{item: record} of two systems -> headline_stats of candidate - baseline over the items that
    both have, or None. A headline is a mean of means, so this is the difference of the headlines.
    """
    same = sorted(baseline.keys() & candidate.keys(), key=str)
    records = [{**baseline[item], "score": candidate[item]["score"] - baseline[item]["score"]}
               for item in same]
    return headline_stats(records, bench) if records else None


def compare(evaluations):
    """Finished evaluations -> {"time", "rows": every result with the name of its folder,
    "differences": of every folder to the first}.

    evaluations: [(name, rows, {(benchmark, K, mode): {(task id, sample): graded record}})].
    """
    rows, pairs = [], []
    first, _, baseline = evaluations[0]
    for name, results, cells in evaluations:
        kept = ("bench", "K", "tools", "n", "headline", "interval", "f_tau", "kappa", "tokens")
        rows += [{"name": name, **{key: row[key] for key in kept}} for row in results]
        for cell in cells.keys() & baseline.keys() if name != first else ():
            stats = differences(baseline[cell], cells[cell], cell[0])
            if stats:
                pairs.append({"name": name, "minus": first, "bench": cell[0], "K": cell[1],
                              "tools": cell[2], "n": stats["n"], "interval": stats["interval"],
                              "difference": stats["headline"]})
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "rows": rows, "differences": pairs}


def comparison_table(compared):
    """Result of `compare` -> aligned text."""
    rows = [["checkpoint", "bench", "K", "tools", "n", "headline [95%]", "f_tau", "kappa",
             "tokens"]]
    for row in compared["rows"]:
        rows.append([row["name"], row["bench"], row["K"], row["tools"], row["n"],
                     interval_text(row), row["f_tau"], row["kappa"], text_of(row["tokens"], 0)])
    lines = aligned(rows)
    pairs = [["difference of the same items", "bench", "K", "tools", "n", "[95%]"]]
    for row in compared["differences"]:
        pairs.append([f"{row['name']} - {row['minus']}", row["bench"], row["K"], row["tools"],
                      row["n"], interval_text(row, "difference")])
    return "\n".join([*lines, "", *aligned(pairs)])


def paper_layout(evaluations):
    """Finished evaluations -> the paper's Table 1 with our rows at its end, in Markdown."""
    paper = benchmarks.paper_table()
    names = list(paper["ParaVT-8B"][1])
    rows = [["system", *names], ["---"] * (1 + len(names))]
    for system, (_, percents) in paper.items():
        cells = [text_of(percents.get(name), 1) for name in names]
        rows.append([f"{system} (the paper's)", *cells])
    for name, results, _ in evaluations:
        found = {}  # (K, mode) -> {benchmark: cell}
        for row in results:
            if row["bench"]:
                found.setdefault((row["K"], row["tools"]), {})[row["bench"]] = our_cell(row)
        for (k, mode), cells in found.items():
            rows.append([f"{name}, K {k}, tools {mode} (measured)",
                         *[cells.get(bench, "-") for bench in names]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def our_cell(row):
    """Row of a summary -> "66.7 [60.1, 72.3] n 30 of 2700"."""
    total = benchmarks.splits()[row["bench"]].items
    text = f"{interval_text(row, digits=1, scale=100)} n {row['n']}"
    if row["n"] < total:
        text += f" of {total}"
    failed = sum(row["errors"].values())
    if failed > 0.01 * row["n"]:
        text += f", {failed} failed"
    return text
