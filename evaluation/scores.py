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

import numpy as np

import rewards
from evaluation import benchmarks

# ------------------------------------------------------------------------------------------------
# Scores


def mode_of(row):
    """Row of a summary, or record -> "on" or "off" (tools), with what --show changed: "off blank".
    """
    show = row.get("show") or "real"
    return row["tools"] if show == "real" else f"{row['tools']} {show}"


def split_mode(mode):
    """Mode -> (tools, show)."""
    tools, _, show = mode.partition(" ")
    return tools, show or "real"


def cell_of(row):
    """Row of a summary -> (benchmark or None, K as text, mode), the key of its records."""
    return row.get("bench"), str(row["K"]), mode_of(row)


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
    acc = sum(record["score"] for record in records) / len(records)
    stats = {"n": len(records), "headline": None, "interval": None, "acc": acc}
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
        for name, labels in tags.items():
            for label in labels if isinstance(labels, list) else [labels]:
                cell = found.setdefault(name, {}).setdefault(str(label), {"n": 0, "acc": 0.0})
                cell["n"] += 1
                cell["acc"] += (record["score"] - cell["acc"]) / cell["n"]
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
        values = [scores[name] for scores in found if scores[name] is not None]
        stats[name] = sum(values) / len(values) if values else None
    return stats


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, mode) -> dict of numbers. Errors are in every denominator."""
    n, ended = len(records), [r for r in records if r["status"] == "ok"]
    errors = {}
    for record in records:
        if record["status"] != "ok":
            errors[record["status"]] = errors.get(record["status"], 0) + 1
    out = {
        "metric": benchmarks.headline_metric(bench)[0],
        **headline_stats(records, bench),
        "f_tau": sum(r["reward"]["fmt"] for r in records) / n,
        "kappa": sum(call["status"] == "ok" for r in records for call in r["calls"]) / n,
        "errors": errors,
        "no_answer": sum(r["extracted"] is None for r in ended),
        "truncated": sum(r["finish"][-1:] == ["length"] for r in ended),  # in the last turn
        "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n}
    tokens = [r["tokens"] for r in records if r.get("tokens") is not None]
    out["tokens"] = sum(tokens) / len(tokens) if tokens else None
    if windows := window_stats(records):
        out["windows"] = windows
    if judged:
        verdicts = [r["judge"] for r in records if "judge" in r]
        failed = verdicts.count(None)  # the request failed, or the reply was neither yes nor no
        out["judge"] = {"judged": len(verdicts), "yes": verdicts.count(True), "failed": failed}
        if failed:
            errors["judge_error"] = failed
    best = {}  # task id -> score of its best sample
    for record in records:
        name = record["task"]["id"]
        best[name] = max(record["score"], best.get(name, 0.0))
    if n > len(best):
        out["pass@n"] = sum(best.values()) / len(best)
    if {r["task"]["type"] for r in records} == {"grounding"}:  # recall at thresholds of the IoU
        for threshold in (0.3, 0.5, 0.7):
            out[f"R@{threshold}"] = sum(r["score"] >= threshold for r in records) / n
    types = [{"score": r["score"], "task": {"tags": {"type": r["task"]["type"]}}} for r in records]
    out["by_type"] = breakdowns(types)["type"]
    out["by"] = breakdowns(records)
    return out


def failed_lines(results):
    """-> a line for every result of which more than 1% of the items failed."""
    lines = []
    for row in results:
        failed = sum(row["errors"].values())
        if failed > 0.01 * row["n"]:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(row["errors"].items()))
            lines.append(f"{row.get('bench') or 'data'} at K {row['K']}, tools {mode_of(row)}: "
                         f"{failed} of {row['n']} items failed ({causes})")
    return lines


# ------------------------------------------------------------------------------------------------
# Tables in the terminal


def text_of(value, digits=3):
    """A cell of a table."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


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
        rows.append([row.get("bench"), row["K"], mode_of(row), row["n"], interval_text(row),
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
        for name, groups in {"type": row["by_type"], **row["by"]}.items():
            if 1 < len(groups) <= labels:
                for label, cell in sorted(groups.items()):
                    found.append([name, label, cell["n"], cell["acc"]])
        if found:
            title = f"{row.get('bench') or 'data'}, K {row['K']}, tools {mode_of(row)}"
            lines += ["", f"{title}: {row['metric']} is the headline", *aligned(found)]
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

    evaluations: [(name, summary.json, {(benchmark, K, mode): {(task id, sample): graded record}})].
    """
    rows, pairs = [], []
    first, _, baseline = evaluations[0]
    for name, summary, cells in evaluations:
        for row in summary["results"]:
            kept = ("K", "tools", "n", "headline", "interval", "f_tau", "kappa", "tokens")
            rows.append({"name": name, "bench": row.get("bench"), "show": row.get("show"),
                         **{key: row.get(key) for key in kept}})
            cell = cell_of(row)
            if name == first or cell not in baseline:
                continue
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
        rows.append([row["name"], row["bench"], row["K"], mode_of(row), row["n"],
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
    for name, summary, _ in evaluations:
        found = {}  # (K, mode) -> {benchmark: cell}
        for row in summary["results"]:
            if row.get("bench"):
                found.setdefault((row["K"], mode_of(row)), {})[row["bench"]] = our_cell(row)
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
