"""
evaluation/scores.py: turns the records of an evaluation into numbers and tables.

  headline  = mean over items | mean of the means of parts (MLVU) | one part alone (MMVU)
  interval  = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  pass@n    = mean over tasks of the best of n samples

A record is a line of records.*.jsonl, read and graded by evaluation/folders.py. Reads and writes no
file.
"""

import time

import numpy as np

from evaluation import benchmarks, costs

# ------------------------------------------------------------------------------------------------
# Scores


def resampled(records, bench, draws=2000):
    """
    -> (headline, bootstrap draws of the headline [draws]). Without any item of the headline: None
    and []. A draw that holds no such item is left out.

    Videos are drawn with replacement, not items, because answers about one video err together. The
    draws depend on the set of videos alone. So two systems on the same items are drawn alike, and
    the difference of their draws is paired.
    """
    _, part_of = benchmarks.headline(bench)
    parts = [part_of(record) for record in records]  # None: in no part
    names = sorted({part for part in parts if part is not None})
    if not names:
        return None, np.zeros(0)
    # Every video has a line, also one without an item of the headline.
    videos, lines = np.unique([r["task"]["video"] for r in records], return_inverse=True)
    sums = np.zeros((len(videos), len(names)))  # of scores, [videos, parts]
    counts = np.zeros((len(videos), len(names)))  # of items
    for record, line, part in zip(records, lines, parts):
        if part is not None:
            sums[line, names.index(part)] += record["score"]
            counts[line, names.index(part)] += 1
    # How often a draw holds each video: [draws, videos].
    chances = np.full(len(videos), 1 / len(videos))
    times = np.random.default_rng(0).multinomial(len(videos), chances, size=draws).astype(float)
    items = times @ counts  # [draws, parts]
    there = items > 0  # a draw may miss a part, or all of them
    means = np.divide(times @ sums, items, out=np.zeros(items.shape), where=there)
    some = there.any(1)  # [draws]
    # Mean over parts of the mean over a part's items. A draw counts only the parts that it holds.
    headline = float((sums.sum(0) / counts.sum(0)).mean())
    return headline, means.sum(1)[some] / there.sum(1)[some]


def interval(draws):
    """95% interval of bootstrap draws, None without any."""
    return [float(np.percentile(draws, q)) for q in (2.5, 97.5)] if len(draws) else None


def mean_scores(pairs):
    """[(label, record)] -> {label: n and accuracy}, in the order of the labels."""
    groups = {}
    for label, record in pairs:
        groups.setdefault(label, []).append(record["score"])
    return {label: {"n": len(groups[label]), "acc": sum(groups[label]) / len(groups[label])}
            for label in sorted(groups)}


def breakdowns(records):
    """-> {name: {label: n and accuracy}}. An item with several labels counts under each label."""
    pairs = {}
    for record in records:
        task = record["task"]
        tags = task.get("tags") or {"category": task.get("category") or task["type"]}
        for name, labels in tags.items():
            for label in labels if isinstance(labels, list) else [labels]:
                pairs.setdefault(name, []).append((str(label), record))
    return {name: mean_scores(some) for name, some in pairs.items()}


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, tools) -> dict of numbers. Errors are in every denominator."""
    n = len(records)
    value, draws = resampled(records, bench)
    fine = [r for r in records if r["status"] == "ok"]
    causes = sorted({r["status"] for r in records} - {"ok"})
    out = {
        "n": n,
        "metric": benchmarks.headline(bench)[0],
        "headline": value,
        "interval": interval(draws),
        "acc": sum(r["score"] for r in records) / n,  # the mean over all items
        "f_tau": sum(r["reward"]["fmt"] for r in records) / n,
        "kappa": sum(call["status"] == "ok" for r in records for call in r["calls"]) / n,
        "errors": {cause: sum(r["status"] == cause for r in records) for cause in causes},
        "no_answer": sum(r["extracted"] is None for r in fine),  # of episodes that ended well
        "truncated": sum(r["finish"][-1:] == ["length"] for r in fine),  # in the last turn
        "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n,
    }
    spent = costs.mean(records)
    if spent:
        out["cost"] = spent  # per answer
    if judged:
        verdicts = [r["judge"] and r["judge"]["verdict"] for r in records if "judge" in r]
        failed = verdicts.count(None)  # the request failed, or the reply was neither yes nor no
        out["judge"] = {"asked": len(verdicts), "yes": verdicts.count(True), "failed": failed}
        if failed:  # counts towards the 1% above which the headline is refused
            out["errors"]["judge_error"] = failed
    samples = {}  # task id -> scores of its episodes
    for r in records:
        samples.setdefault(r["task"]["id"], []).append(r["score"])
    if n > len(samples):
        out["samples"] = max(map(len, samples.values()))
        out["pass@n"] = sum(map(max, samples.values())) / len(samples)
    kinds = {r["task"]["type"] for r in records}
    if kinds == {"grounding"}:  # recall at thresholds of the IoU
        out.update({f"R@{t}": sum(r["score"] >= t for r in records) / n for t in (0.3, 0.5, 0.7)})
    if len(kinds) > 1:
        out["by_type"] = mean_scores((r["task"]["type"], r) for r in records)
    out["by"] = breakdowns(records)
    return out


def refuse(results, allow_errors):
    """Removes the headline of every result with more than 1% failed items -> lines that say why."""
    said = []
    for row in results:
        failed = sum(row["errors"].values())
        if failed > 0.01 * row["n"] and not allow_errors:
            row["headline"] = row["interval"] = None
            causes = ", ".join(f"{count} {cause}" for cause, count in row["errors"].items())
            place = f"{row.get('bench') or 'data'} at K {row['K']}, tools {row['tools']}"
            said.append(f"{place}: {failed} of {row['n']} items failed ({causes})")
    return said


# ------------------------------------------------------------------------------------------------
# Tables


def shown_interval(row):
    if row.get("headline") is None:
        return "refused: errors"
    return "{:.3f} [{:.3f}, {:.3f}]".format(row["headline"], *row["interval"])


def table(results, labels=12):
    """Results -> aligned text: a row per benchmark, K and mode, then the breakdowns. One with a
    single label, or with more than `labels`, are in summary.json alone."""
    named = any(row.get("bench") for row in results)
    head = f"{'bench':<15} " if named else ""  # no column that would be empty
    lines = [f"{head}{'K':>6} {'tools':>5} {'n':>5} {'headline [95%]':>22} {'acc':>6} {'f_tau':>6} "
             f"{'kappa':>6} {'errors':>6} {'no answer':>9} {'cut off':>7}"]
    for row in results:
        head = f"{row.get('bench') or '-':<15} " if named else ""
        indent = " " * len(head)
        lines.append(f"{head}{row['K']!s:>6} {row['tools']:>5} {row['n']:>5} "
                     f"{shown_interval(row):>22} {row['acc']:>6.3f} {row['f_tau']:>6.3f} "
                     f"{row['kappa']:>6.2f} {sum(row['errors'].values()):>6} "
                     f"{row['no_answer']:>9} {row['truncated']:>7}")
        # Numbers that only some results have go below the row, in one line.
        more = [f"{row['metric']} is the headline"] if row["metric"] != "accuracy" else []
        for name in ("pass@n", "R@0.3", "R@0.5", "R@0.7"):
            more += [f"{name} {row[name]:.3f}"] if name in row else []
        for kind, cell in row.get("by_type", {}).items():
            more.append(f"{kind} {cell['acc']:.3f} of {cell['n']}")
        if more:
            lines.append(f"{indent}       {', '.join(more)}")
        for name, found in row["by"].items():
            for label, cell in found.items() if 1 < len(found) <= labels else []:
                numbers = f"{cell['n']:>5} {cell['acc']:>6.3f}"
                lines.append(f"{indent}{'':>12} {numbers}  {name} {label}")
    return "\n".join(lines)


def compare(found):
    """
    Finished evaluations -> {"time", "rows", "costs", "differences"}. rows: one per checkpoint,
    benchmark and K, with tools and without. costs: accuracy and cost of each of those runs.
    differences: of every folder to the first, paired by item.

    found: [(name, summary.json, {(benchmark, K, tools): {(task id, sample): graded record}})].
    """
    rows, spent, differences = [], [], []
    for name, summary, _ in found:
        pairs = {}  # (benchmark, K) -> one row of both modes
        for r in summary["results"]:
            place = {"bench": r.get("bench"), "K": r["K"]}
            row = pairs.setdefault(tuple(place.values()), {"name": name, **place, "n": r["n"]})
            tokens = (r.get("cost") or {}).get("tokens")
            if r["tools"] == "on":
                row.update(acc_tools=r["headline"], f_tau=r["f_tau"], tokens_tools=tokens)
                row.update(kappa=r["kappa"], interval=r["interval"])
            else:
                row.update(acc_no_tools=r["headline"], tokens_no_tools=tokens)
            if r.get("cost"):  # runs from before costs were kept have none
                told = {key: r[key] for key in ("K", "tools", "headline")}
                told |= {**r["cost"], "seconds": r["seconds_per_episode"]}
                spent.append({"name": name, "bench": r.get("bench"), **told})
        rows += pairs.values()
    (minus, _, first), *others = found
    for place, own in first.items():
        for name, _, here in others:
            other = here.get(place, {})
            # Only items that both folders have.
            same = sorted(set(own) & set(other), key=str)
            a, drawn_a = resampled([own[item] for item in same], place[0])
            b, drawn_b = resampled([other[item] for item in same], place[0])
            if a is not None:
                row = dict(zip(("bench", "K", "tools"), place))
                row.update(n=len(same), name=name, minus=minus, difference=b - a)
                differences.append({**row, "interval": interval(drawn_b - drawn_a)})
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"time": when, "rows": rows, "costs": spent, "differences": differences}


def comparison(compared):
    """Result of `compare` -> aligned text."""
    lines = [f"{'checkpoint':<12} {'K':>6} {'n':>5} {'with tools [95%]':>22} {'tokens':>7} "
             f"{'no tools':>9} {'tokens':>7} {'f_tau':>6} {'kappa':>6}"]
    for row in compared["rows"]:
        tools = "-"  # not run, or refused
        if row.get("acc_tools") is not None:
            tools = shown_interval({"headline": row["acc_tools"], "interval": row["interval"]})
        line = f"{row['name']:<12} {row['K']!s:>6} {row['n']:>5} {tools:>22}"
        for name, width, digits in (("tokens_tools", 7, 0), ("acc_no_tools", 9, 3),
                                    ("tokens_no_tools", 7, 0), ("f_tau", 6, 3), ("kappa", 6, 2)):
            cell = "-" if row.get(name) is None else f"{row[name]:.{digits}f}"
            line += f" {cell:>{width}}"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    lines += cost_lines(compared["costs"])
    if compared["differences"]:
        lines += ["", "difference of the same items [95%]"]
    for row in compared["differences"]:
        line = f"{row['name']} - {row['minus']}".ljust(28)
        low, high = row["interval"]
        line += f" {row['K']:>6} tools {row['tools']:<3} {row['difference']:+.3f} "
        line += f"[{low:+.3f}, {high:+.3f}] {row['n']} items"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    return "\n".join(lines)


def cost_lines(rows):
    """Accuracy against what an answer costs: a line per folder, benchmark, K and mode."""
    if not rows:
        return []
    lines = ["", "accuracy against cost, means per answer (tokens: main agent + sub-agents)",
             f"{'checkpoint':<12} {'K':>6} {'tools':>5} {'headline':>8} {'tokens':>8} "
             f"{'prompt':>14} {'sampled':>12} {'frames':>11} {'rounds':>6} {'seconds':>7}"]
    for row in rows:
        headline = "refused" if row["headline"] is None else f"{row['headline']:.3f}"
        tokens = "-" if row["tokens"] is None else f"{row['tokens']:.0f}"  # "-": not counted
        line = f"{row['name']:<12} {row['K']!s:>6} {row['tools']:>5} {headline:>8} {tokens:>8}"
        for name, width in (("prompt_tokens", 14), ("sampled_tokens", 12), ("frames", 11)):
            pair = [row[name], row[f"sub_{name}"]]
            shown = "-" if None in pair else "{:.0f} + {:.0f}".format(*pair)
            line += f" {shown:>{width}}"
        line += f" {row['rounds']:>6.1f} {row['seconds']:>7.1f}"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    return lines
