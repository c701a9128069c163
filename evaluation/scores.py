"""
evaluation/scores.py (tests/test_scores.py): turns the records of an evaluation into numbers and
tables.

  headline   = mean over items | mean of the means of parts (MLVU) | one part alone (MMVU)
  interval   = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  difference = headline of (score of B - score of A) of the same items, with its interval

A record is a line of records.*.jsonl, read and graded by evaluation/results.py. Reads and writes no
file.
"""

from collections import Counter

import numpy as np

import rewards
from evaluation import benchmarks

# ------------------------------------------------------------------------------------------------
# Scores


def mean(values):
    """-> mean; None of no values."""
    values = list(values)
    if not values:
        return None
    return sum(values) / len(values)


def headline_stats(records, bench):
    """
    Records of one (benchmark, K, mode) -> {"n", "headline", "interval", "acc"}. The interval of
    items of one video is None.

    Videos are drawn, not items, because answers about one video err together. The draws depend on
    the set of videos alone, so the draws of a difference of two systems are paired.
    """
    _, part_of = benchmarks.headline_metric(bench)
    parts = [part_of(record) for record in records]  # None: an item that is not in the headline
    names = sorted({part for part in parts if part is not None})
    stats = {"n": len(records), "headline": None, "interval": None,
             "acc": mean(record["score"] for record in records)}
    if not names:
        return stats
    videos, rows = np.unique([r["task"]["video"] for r in records], return_inverse=True)
    sums = np.zeros((len(videos), len(names)))  # [videos, parts]
    counts = np.zeros((len(videos), len(names)))
    for record, row, part in zip(records, rows, parts):
        if part is not None:
            sums[row, names.index(part)] += record["score"]
            counts[row, names.index(part)] += 1
    stats["headline"] = float((sums.sum(0) / counts.sum(0)).mean())
    if len(videos) > 1:
        chances = np.full(len(videos), 1 / len(videos))
        times = np.random.default_rng(0).multinomial(len(videos), chances, size=2000)
        times = times[(times @ counts).any(1)]  # a draw may miss all items
        with np.errstate(invalid="ignore"):  # or a part
            headlines = np.nanmean((times @ sums) / (times @ counts), 1)
        stats["interval"] = np.nanpercentile(headlines, (2.5, 97.5)).tolist()
    return stats


def breakdowns(records):
    """-> {tag: {label: n and accuracy}}. An item with several labels counts under each label."""
    by_tag = {}
    for record in records:
        task = record["task"]
        tags = task.get("tags") or {"category": task.get("category") or task["type"]}
        for tag, labels in {"type": task["type"], **tags}.items():
            if not isinstance(labels, list):
                labels = [labels]
            for label in labels:
                by_tag.setdefault(tag, {}).setdefault(str(label), []).append(record["score"])
    for cells in by_tag.values():
        for label, values in cells.items():
            cells[label] = {"n": len(values), "acc": mean(values)}
    return by_tag


def window_stats(records):
    """Did the agent look at the right place? -> means of rewards.window_scores over the episodes
    that looked and whose task has `evidence`; {} if there is none."""
    num_episodes, values = 0, {}
    for record in records:
        spans = [(call["start"], call["end"]) for call in record["calls"] if call["status"] == "ok"]
        if spans and record["task"].get("evidence") and record["status"] == "ok":
            num_episodes += 1
            for name, value in rewards.window_scores(spans, record["task"]["evidence"]).items():
                if value is not None:
                    values.setdefault(name, []).append(value)
    if not num_episodes:
        return {}
    stats = {"n": num_episodes}
    for name, column in values.items():
        stats[name] = mean(column)
    return stats


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, mode) -> dict of numbers. Errors are in every denominator."""
    ended = [record for record in records if record["status"] == "ok"]
    errors = Counter(record["status"] for record in records if record["status"] != "ok")
    num_calls = 0  # that were executed
    for record in records:
        num_calls += sum(call["status"] == "ok" for call in record["calls"])
    out = {
        "metric": benchmarks.headline_metric(bench)[0],
        **headline_stats(records, bench),
        "f_tau": mean(record["reward"]["fmt"] for record in records),
        "kappa": num_calls / len(records),
        "errors": errors,
        "no_answer": sum(record["extracted"] is None for record in ended),
        "truncated": sum(record["finish"][-1:] == ["length"] for record in ended),  # the last turn
        "tokens": mean(r["tokens"] for r in records if r.get("tokens") is not None),
        "by": breakdowns(records)}
    if judged:
        # None: the request was refused, or the reply was neither yes nor no.
        verdicts = [record["judge"] for record in records if "judge" in record]
        failed = verdicts.count(None)
        out["judge"] = {"judged": len(verdicts), "yes": verdicts.count(True), "failed": failed}
        if failed:
            errors["judge_error"] = failed
    return out | rarer_numbers(records)


def rarer_numbers(records):
    """-> numbers that only some records have."""
    out = {}
    windows = window_stats(records)
    if windows:
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


def text_of(value):
    """A cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def title_of(row):
    return f"{row['bench'] or 'data'}, K {row['K']}, tools {row['tools']}"


def interval_text(row, name="headline", digits=3, scale=1):
    """0.500 [0.400, 0.600]."""
    if row[name] is None:
        return "-"
    text = f"{scale * row[name]:.{digits}f}"
    if row["interval"] is None:  # all items are of one video
        return f"{text} [-]"
    low, high = row["interval"]
    return f"{text} [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"


def cells_of(row, *names):
    return [row[name] for name in names]


def aligned(rows):
    """Rows of cells -> lines with aligned columns."""
    rows = [list(map(text_of, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def table(results):
    """Results -> aligned text: a row per benchmark, K and mode, then what only some results have.
    Breakdowns with a single label, or with more than 12, are in summary.json alone."""
    rows = [["bench", "K", "tools", "n", "headline [95%]", "acc", "f_tau", "kappa", "errors",
             "no answer", "cut off"]]
    for row in results:
        numbers = cells_of(row, "acc", "f_tau", "kappa")
        rows.append([*cells_of(row, "bench", "K", "tools", "n"), interval_text(row), *numbers,
                     sum(row["errors"].values()), *cells_of(row, "no_answer", "truncated")])
    lines = aligned(rows)
    for row in results:
        details = []
        for name in ("pass@n", "R@0.3", "R@0.5", "R@0.7"):
            if name in row:
                details.append([name, "", row["n"], row[name]])
        for name, value in row.get("windows", {}).items():
            details.append(["windows of episodes that called", name, "", value])
        for name, groups in row["by"].items():
            if 1 < len(groups) <= 12:
                for label, cell in sorted(groups.items()):
                    details.append([name, label, cell["n"], cell["acc"]])
        if details:
            lines += ["", f"{title_of(row)}: {row['metric']} is the headline", *aligned(details)]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------
# Several evaluations


def differences(baseline, candidate, bench):
    """{item: record} of two systems -> headline_stats of candidate - baseline over the items that
    both have. A headline is a mean of means, so this is the difference of the headlines.
    """
    records = []
    for item in sorted(baseline.keys() & candidate.keys(), key=str):
        score = candidate[item]["score"] - baseline[item]["score"]
        records.append({**baseline[item], "score": score})
    return headline_stats(records, bench)


def compare(evaluations):
    """Finished evaluations -> {"rows": every result with the name of its folder, "differences": of
    every folder to the first}.

    evaluations: [(name, rows, {(benchmark, K, mode): {(task id, sample): graded record}})].
    """
    rows, pairs = [], []
    first, _, baseline = evaluations[0]
    columns = ("bench", "K", "tools", "n", "headline", "interval", "f_tau", "kappa", "tokens")
    for name, results, cells in evaluations:
        for row in results:
            rows.append({"name": name, **{column: row[column] for column in columns}})
        if name == first:
            continue
        for bench, k, mode in cells.keys() & baseline.keys():
            stats = differences(baseline[bench, k, mode], cells[bench, k, mode], bench)
            pairs.append({"name": name, "minus": first, "bench": bench, "K": k, "tools": mode,
                          "n": stats["n"], "difference": stats["headline"],
                          "interval": stats["interval"]})
    return {"rows": rows, "differences": pairs}


def comparison_table(compared):
    """Result of `compare` -> aligned text."""
    rows = [["checkpoint", "bench", "K", "tools", "n", "headline [95%]", "f_tau", "kappa",
             "tokens"]]
    for row in compared["rows"]:
        rows.append([*cells_of(row, "name", "bench", "K", "tools", "n"), interval_text(row),
                     *cells_of(row, "f_tau", "kappa", "tokens")])
    pairs = [["difference of the same items", "bench", "K", "tools", "n", "[95%]"]]
    for row in compared["differences"]:
        pairs.append([f"{row['name']} - {row['minus']}", *cells_of(row, "bench", "K", "tools", "n"),
                      interval_text(row, "difference")])
    return "\n".join([*aligned(rows), "", *aligned(pairs)])


def paper_layout(evaluations):
    """Finished evaluations -> the paper's Table 1 with our rows at its end, in Markdown."""
    paper = benchmarks.paper_table()
    names = list(paper["ParaVT-8B"])
    rows = [["system", *names], ["---", *("---" for _ in names)]]
    for system, percents in paper.items():
        row = [f"{system} (the paper's)"]
        for name in names:
            row.append(str(percents.get(name, "-")))
        rows.append(row)
    for name, results, _ in evaluations:
        by_grid = {}  # (K, mode) -> {benchmark: cell}
        for row in results:
            if row["bench"]:
                by_grid.setdefault((row["K"], row["tools"]), {})[row["bench"]] = our_cell(row)
        for (k, mode), cells in by_grid.items():
            row = [f"{name}, K {k}, tools {mode} (measured)"]
            for bench in names:
                row.append(cells.get(bench, "-"))
            rows.append(row)
    lines = []
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


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
