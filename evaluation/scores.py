"""
evaluation/scores.py (tests/test_scores.py): turns the records of an evaluation into numbers and
tables.

  headline   = mean over items | mean of the means of parts (MLVU) | one part alone (MMVU)
  interval   = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  difference = headline of (score of B - score of A) of the same items
  p          = how often |difference| is as large, if A and B change places in random VIDEOS
  pass@n     = mean over tasks of the best of n samples

A record is a line of records.*.jsonl, read and graded by evaluation/results.py. Reads and writes no
file.
"""

import math
import statistics
import time

import numpy as np

import launch
from evaluation import benchmarks, costs, windows

FEW = 10  # videos: intervals over fewer are marked

# ------------------------------------------------------------------------------------------------
# Scores


def video_sums(records, bench):
    """-> (sums of scores, counts of items), both [videos, parts of the headline]. Every video has a
    line, also one without an item of the headline. Without any part, no column."""
    _, part_of = benchmarks.headline_metric(bench)
    parts = [part_of(record) for record in records]  # None: in no part
    names = sorted({part for part in parts if part is not None})
    videos, lines = np.unique([r["task"]["video"] for r in records], return_inverse=True)
    sums, counts = np.zeros((2, len(videos), len(names)))
    for record, line, part in zip(records, lines, parts):
        if part is not None:
            sums[line, names.index(part)] += record["score"]
            counts[line, names.index(part)] += 1
    return sums, counts


def bootstrap(records, bench, draws=2000):
    """
    -> (headline, bootstrap draws of the headline [draws]). Without any item of the headline: None
    and []. With items of one video alone there are no draws, because they would all be equal. A
    draw that holds no item of the headline is left out.

    Videos are drawn with replacement, not items, because answers about one video err together. The
    draws depend on the set of videos alone. So two systems on the same items are drawn alike, and
    the difference of their draws is paired.
    """
    sums, counts = video_sums(records, bench)
    if not sums.size:
        return None, np.zeros(0)
    # Mean over parts of the mean over a part's items.
    headline = float((sums.sum(0) / counts.sum(0)).mean())
    if counts.any(1).sum() < 2:
        return headline, np.zeros(0)
    # How often a draw holds each video: [draws, videos].
    chances = np.full(len(sums), 1 / len(sums))
    times = np.random.default_rng(0).multinomial(len(sums), chances, size=draws).astype(float)
    items = times @ counts  # [draws, parts]
    present = items > 0  # a draw may miss a part, or all of them
    means = np.divide(times @ sums, items, out=np.zeros(items.shape), where=present)
    nonempty = present.any(1)  # [draws]
    # A draw counts only the parts that it holds.
    drawn = (means.sum(1) / np.maximum(1, present.sum(1)))[nonempty]
    return headline, add_run_variance(drawn, headline, records, bench)


def add_run_variance(drawn, middle, records, bench):
    """
    Draws over videos -> the same, with the spread of runs, around `middle`. Unchanged if no system
    has several runs that differ: a single run tells nothing of other seeds.

    The variance of the draws, and s^2 / R of each system with R runs whose headlines have the
    standard deviation s, are added as in Welch's test. All deviations are stretched as Student's t
    with Satterthwaite's degrees of freedom is, because a few runs tell little of s. records:
    `sides` holds the scores of the runs of each system.
    """
    parts = [(drawn.var(), len({r["task"]["video"] for r in records}) - 1)]
    for side, runs in enumerate(next(iter(records), {}).get("sides", ())):
        values = [bootstrap([{**{name: value for name, value in record.items() if name != "sides"},
                              "score": record["sides"][side][run]} for record in records],
                            bench, draws=1)[0] for run in range(len(runs))]
        if len(values) > 1:
            parts.append((statistics.variance(values) / len(values), len(values) - 1))
    run_variance = sum(variance for variance, _ in parts[1:])
    if not run_variance:
        return drawn
    freedom = sum(v for v, _ in parts) ** 2 / sum(v * v / number for v, number in parts)
    rng = np.random.default_rng(1)
    deviations = drawn - middle + math.sqrt(run_variance) * rng.standard_normal(len(drawn))
    return middle + deviations * np.sqrt(freedom / rng.chisquare(freedom, len(drawn)))


def interval(draws):
    """95% interval of bootstrap draws, None without any."""
    return [float(np.percentile(draws, q)) for q in (2.5, 97.5)] if len(draws) else None


def mean_and_interval(pairs):
    """[(record, value)] -> (mean or None, its interval)."""
    value, draws = bootstrap([{"task": r["task"], "score": value} for r, value in pairs], None)
    return value, interval(draws)


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
    return {name: mean_scores(group) for name, group in pairs.items()}


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, mode) -> dict of numbers. Errors are in every denominator."""
    n, graded = len(records), headline_stats(records, bench)
    completed = [r for r in records if r["status"] == "ok"]
    causes = sorted({r["status"] for r in records} - {"ok"})
    out = {
        "n": n,
        "metric": benchmarks.headline_metric(bench)[0],
        **{name: graded[name] for name in ("headline", "interval", "videos", "acc")},
        "f_tau": sum(r["reward"]["fmt"] for r in records) / n,
        "kappa": sum(call["status"] == "ok" for r in records for call in r["calls"]) / n,
        "errors": {cause: sum(r["status"] == cause for r in records) for cause in causes},
        "no_answer": sum(r["extracted"] is None for r in completed),  # of episodes that ended well
        "truncated": sum(r["finish"][-1:] == ["length"] for r in completed),  # in the last turn
        "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n}
    cost = costs.mean_costs(records)
    if cost:
        out["cost"] = cost  # per answer
    if stats := windows.window_stats(records, mean_and_interval):
        out["windows"] = stats
    if judged:
        verdicts = [r["judge"] for r in records if "judge" in r]
        failed = verdicts.count(None)  # the request failed, or the reply was neither yes nor no
        out["judge"] = {"judged": len(verdicts), "yes": verdicts.count(True), "failed": failed}
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


def refuse_headlines(results, refuse_empty=False):
    """Removes the headline of every result with more than 1% failed items and, if asked, of each
    whose episodes hold no text at all, although none failed -> lines that say why."""
    lines = []
    for row in results:
        failed = sum(row["errors"].values())
        ended = row["n"] - failed + row["errors"].get("judge_error", 0)
        causes = ", ".join(f"{count} {cause}" for cause, count in row["errors"].items())
        reasons = [f"{failed} of {row['n']} items failed ({causes})"] * (failed > 0.01 * row["n"])
        if refuse_empty and row["silent"] == ended > 0:
            reasons.append(f"none of {ended} answers holds any text (the server may move it to "
                           "reasoning_content: start it without --reasoning-parser, or raise "
                           "--max-new-tokens)")
        if reasons:
            row["headline"] = row["interval"] = None
        lines += [f"{row.get('bench') or 'data'} at K {row['K']}, tools {mode_of(row)}: {reason}"
                  for reason in reasons]
    return lines


# ------------------------------------------------------------------------------------------------
# Differences


def paired_differences(baseline, candidate):
    """
    {item: record} of two systems -> records of the items that both have, with the score candidate -
    baseline. A headline is a mean of means, so the headline of these records is the difference of
    the headlines, and `bootstrap` draws it paired.
    """
    same = sorted(set(baseline) & set(candidate), key=str)
    return [{**baseline[item], "score": candidate[item]["score"] - baseline[item]["score"],
             "sides": [side for records in (candidate, baseline) for side in
                       records[item].get("sides") or [[records[item]["score"]]]]} for item in same]


def sign_flip_p(records, bench, draws=20000):
    """
    Two-sided p-value of the headline of `paired_differences` records, None below two videos.

    If the systems do not differ, their names could as well be exchanged in any video, which turns
    the sign of that video's share of the difference. Up to 20 videos with a share are exact: all
    sign patterns. More are drawn at random, always from the same seed. If a system has several
    runs, a draw of `add_run_variance` is added, because other seeds of equal systems differ, too.
    """
    sums, counts = video_sums(records, bench)
    if counts.any(1).sum() < 2:
        return None
    # The items are the same for both systems, so the headline is a sum over videos.
    shares = (sums / counts.sum(0)).mean(1)  # [videos]
    bound = abs(shares.sum()) - 1e-9 * np.abs(shares).sum()  # equal sums may differ by rounding
    shares = shares[shares != 0]  # a turned 0 stays 0
    several = any(len(runs) > 1 for runs in next(iter(records), {}).get("sides", ()))
    if len(shares) <= 20 and not several:
        flipped = np.zeros(1)
        for share in shares:
            flipped = np.concatenate([flipped + share, flipped - share])
        return float((np.abs(flipped) >= bound).mean())
    rng, flipped = np.random.default_rng(0), np.zeros(draws)
    for at in range(0, draws, 1000):  # in pieces, or thousands of videos would take gigabytes
        signs = 2 * rng.integers(0, 2, (1000, len(shares)), dtype=np.int8) - 1
        flipped[at : at + 1000] = signs @ shares
    # Not below the p of the videos alone, which the noise would make smaller at a tie.
    as_large = max(int((np.abs(totals) >= bound).sum())
                   for totals in (flipped, add_run_variance(flipped, 0.0, records, bench)))
    return (1 + as_large) / (1 + draws)  # the observed signs are one of the patterns


def holm(values):
    """p-values -> p-values after Holm's correction, in the same order. None stays None and does not
    count."""
    ranked = sorted((p, i) for i, p in enumerate(values) if p is not None)
    out, largest = [None] * len(values), 0.0
    for rank, (p, i) in enumerate(ranked):
        # Never below the one before, or a larger p could be rejected before a smaller one.
        largest = max(largest, min(1.0, p * (len(ranked) - rank)))
        out[i] = largest
    return out


# ------------------------------------------------------------------------------------------------
# Several runs of one system


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


def pool_seeds(name, runs):
    """
    Runs of one system under several seeds, each as `compare` takes it -> one such triple. The score
    of an item is its mean over the runs, and only items that all runs have count. All other numbers
    are means of the runs' numbers. A row also has "seeds": the headline of every run.

    Raises UserError if a run lacks a benchmark, K or mode that another has.
    """
    results, pooled = [], {}
    cells = {cell_of(row): None for _, summary, _ in runs for row in summary["results"]}
    for cell in cells:
        run_records = [run_cells.get(cell, {}) for *_, run_cells in runs]
        rows = [row for _, summary, _ in runs for row in summary["results"] if cell_of(row) == cell]
        same = set(run_records[0]).intersection(*run_records[1:])
        if len(rows) < len(runs) or not same:
            words = f"{cell[0] or 'data'} at K {cell[1]}, tools {cell[2]}"
            reason = f"its folders are no runs of the same items: {words} is not in all of them"
            raise launch.UserError(f"{name}: {reason}")
        records = {}
        for item in sorted(same, key=str):
            each = [run[item]["score"] for run in run_records]
            records[item] = run_records[0][item] | {"score": sum(each) / len(each), "sides": [each]}
        row = {"bench": cell[0], "K": rows[0]["K"]}
        row["tools"], row["show"] = split_mode(cell[2])
        row.update(headline_stats(records.values(), cell[0]))
        for key in ("f_tau", "kappa", "seconds_per_episode"):
            row[key] = costs.mean_or_none([r[key] for r in rows])
        if any(r["headline"] is None for r in rows):
            row["headline"] = row["interval"] = None  # refused in one run
        run_costs = [r.get("cost") for r in rows]
        if None not in run_costs:
            row["cost"] = {k: costs.mean_or_none([c[k] for c in run_costs]) for k in run_costs[0]}
        # On the items that all have, so that the runs differ by their seeds alone.
        row["seeds"] = [bootstrap([r[i] for i in records], cell[0], 1)[0] for r in run_records]
        results.append(row)
        pooled[cell] = records
    departures = [text for _, summary, _ in runs for text in summary.get("departures", [])]
    return name, {"results": results, "departures": list(dict.fromkeys(departures))}, pooled


def headline_stats(records, bench):
    """Records of one (benchmark, K, mode) -> the part of a row that depends on grades: headline,
    interval, n, items (tasks of the benchmark), items_headline, videos (of the headline), acc."""
    part_of, (value, draws) = benchmarks.headline_metric(bench)[1], bootstrap(list(records), bench)
    within = [r["task"] for r in records if part_of(r) is not None]
    return {"n": len(records), "headline": value, "interval": interval(draws),
            "items": len({r["task"]["id"] for r in records}),
            "items_headline": len({task["id"] for task in within}),
            "videos": len({task["video"] for task in within}),
            "acc": sum(map(windows.item_score, records)) / len(records)}  # the mean over all items


# ------------------------------------------------------------------------------------------------
# Tables


def interval_text(row):
    if row.get("headline") is None:
        return "refused: errors"
    if row["interval"] is None:  # of one video
        return f"{row['headline']:.3f} [-]"
    return "{:.3f} [{:.3f}, {:.3f}]".format(row["headline"], *row["interval"]) + few_mark(row)


def few_mark(row):
    """The mark of an interval over few videos: of 2 videos it holds the truth in half of all
    cases, not in 95%."""
    return "!" * (row.get("videos", FEW) < FEW)


def table(results, labels=12):
    """Results -> aligned text: a row per benchmark, K and mode, then the breakdowns. Those with
    a single label, or with more than `labels`, are in summary.json alone."""
    named = any(row.get("bench") for row in results)
    head = f"{'bench':<15} " if named else ""  # no column that would be empty
    wide = max(5, *(len(mode_of(row)) for row in results))
    lines = [f"{head}{'K':>6} {'tools':>{wide}} {'n':>5} {'headline [95%]':>22} {'acc':>6} "
             f"{'f_tau':>6} {'kappa':>6} {'errors':>6} {'no answer':>9} {'cut off':>7}"]
    for row in results:
        head = f"{row.get('bench') or '-':<15} " if named else ""
        indent = " " * len(head)
        lines.append(f"{head}{row['K']!s:>6} {mode_of(row):>{wide}} {row['n']:>5} "
                     f"{interval_text(row):>22} {row['acc']:>6.3f} {row['f_tau']:>6.3f} "
                     f"{row['kappa']:>6.2f} {sum(row['errors'].values()):>6} "
                     f"{row['no_answer']:>9} {row['truncated']:>7}")
        # Numbers that only some results have go below the row, in one line.
        details = [f"{row['metric']} is the headline"] if row["metric"] != "accuracy" else []
        for name in ("pass@n", "R@0.3", "R@0.5", "R@0.7"):
            details += [f"{name} {row[name]:.3f}"] if name in row else []
        details += [f"CRR {row['CRR']:.4f}"] if "CRR" in row else []
        details += window_words(row["windows"]) if "windows" in row else []
        for kind, cell in row.get("by_type", {}).items():
            details.append(f"{kind} {cell['acc']:.3f} of {cell['n']}")
        if details:
            lines.append(f"{indent}       {', '.join(details)}")
        for name, groups in row["by"].items():
            for label, cell in groups.items() if 1 < len(groups) <= labels else []:
                numbers = f"{cell['n']:>5} {cell['acc']:>6.3f}"
                lines.append(f"{indent}{'':>12} {numbers}  {name} {label}")
    return "\n".join(lines)


def window_words(row):
    """"windows" of a row -> texts for the terminal."""
    def mean_text(name):
        if row[name] is None:
            return "-"
        low_high = row["intervals"][name]
        text = f"{row[name]:.3f}" + (" [{:.3f}, {:.3f}]".format(*low_high) if low_high else " [-]")
        chance = row["random"].get(name)
        return text + ("" if chance is None else f" (at random {chance:.3f})")

    parts = {"recall": "recall", "precision": "precision", "hit": "hit rate", "iou": "IoU",
             "acc_hit": "accuracy after a hit", "acc_miss": "after a miss",
             "miou": "over all episodes mIoU", "rec@iou": "rec@IoU", "acc@iou": "acc@IoU"}
    texts = [f"{words} {mean_text(name)}" for name, words in parts.items()]
    texts += [f"{name} {'-' if row[name] is None else format(row[name], '.3f')}"
              for name in windows.STEPS if name in row]
    return [f"windows of {row['n']} episodes that called: {texts[0]}", *texts[1:]]


def add_crr(results):
    """CG-Bench's CRR, as VLMEvalKit computes it: min(long, clue) / clue, of the accuracies on the
    videos and on the parts that hold the clues, at the same K and mode. Writes it into the rows."""
    rows = {cell_of(row): row for row in results if row["headline"] is not None}
    for (bench, *key), row in rows.items():
        clue = rows.get(("cgbench_clue", *key), {}).get("headline")
        if bench == "cgbench" and clue:
            row["CRR"] = min(row["headline"], clue) / clue


def compare(evaluations):
    """
    Finished evaluations -> {"time", "rows", "seeds", "costs", "differences"}. rows: one
    per checkpoint, benchmark and K, with tools and without. seeds: headlines of the runs of a
    pooled system. costs: headline and cost per folder, benchmark, K and mode. differences: of every
    folder to the first, paired by item, with the p-value and Holm's over all of them.

    evaluations: [(name, summary.json, {(benchmark, K, mode): {(task id, sample): graded record}})].
    """
    rows, seeds, run_costs, differences = [], [], [], []
    for name, summary, _ in evaluations:
        pairs = {}  # (benchmark, K, show) -> one row of both modes of --tools
        for r in summary["results"]:
            labels = {"bench": r.get("bench"), "K": r["K"], "show": r.get("show") or "real"}
            row = pairs.setdefault(tuple(labels.values()), {"name": name, **labels, "n": r["n"]})
            tokens = (r.get("cost") or {}).get("tokens")
            if r["tools"] == "on":
                row.update(acc_tools=r["headline"], f_tau=r["f_tau"], tokens_tools=tokens)
                row.update(kappa=r["kappa"], interval=r["interval"], videos=r.get("videos", FEW))
                row |= {key: share for key, share in r.get("windows", {}).items()
                        if key in ("recall", "hit", *windows.STEPS)}
            else:
                row.update(acc_no_tools=r["headline"], tokens_no_tools=tokens)
            if r.get("cost"):  # runs from before costs were kept have none
                cost_row = {"K": r["K"], "tools": mode_of(r), "headline": r["headline"]}
                cost_row |= {**r["cost"], "seconds": r["seconds_per_episode"]}
                run_costs.append({"name": name, "bench": r.get("bench"), **cost_row})
            if "seeds" in r:
                seeds.append({"name": name, **labels, "tools": mode_of(r), "headlines": r["seeds"]})
        rows += pairs.values()
    (minus, base, first), *others = evaluations
    for cell, baseline in first.items():
        bench, k, mode = cell
        for name, summary, cells in others:
            records = paired_differences(baseline, cells.get(cell, {}))
            difference, draws = bootstrap(records, bench)
            if difference is None:  # no item in common
                continue
            _, counts = video_sums(records, bench)
            row = {"name": name, "minus": minus, "bench": bench, "K": k, "tools": mode,
                   "n": int(counts.sum()), "videos": int(counts.any(1).sum())}
            results = [*base["results"], *summary["results"]]
            if any(r["headline"] is None for r in results if cell_of(r) == cell):
                # Too many items failed in one of the two.
                row |= dict.fromkeys(("difference", "interval", "p"))
            else:
                row.update(difference=difference, interval=interval(draws),
                           p=sign_flip_p(records, bench))
            differences.append(row)
    for row, p in zip(differences, holm([row["p"] for row in differences])):
        row["p_holm"] = p
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "rows": rows, "seeds": seeds,
            "costs": run_costs, "differences": differences}


def comparison_table(compared):
    """Result of `compare` -> aligned text."""
    # Windows of episodes that called, and the way to an answer in the toy world.
    windowed, toy = (any(name in row for row in compared["rows"]) for name in ("recall", "called"))
    lines = [f"{'checkpoint':<12} {'K':>6} {'n':>5} {'with tools [95%]':>22} {'tokens':>7} "
             f"{'no tools':>9} {'tokens':>7} {'f_tau':>6} {'kappa':>6}"
             + " window: recall  hit" * windowed + " called  found   told  right" * toy]
    for row in compared["rows"]:
        tools = "-"  # not run, or refused
        if row.get("acc_tools") is not None:
            tools = interval_text({**row, "headline": row["acc_tools"]})
        line = f"{row['name']:<12} {row['K']!s:>6} {row['n']:>5} {tools:>22}"
        for name, width, digits in (("tokens_tools", 7, 0), ("acc_no_tools", 9, 3),
                                    ("tokens_no_tools", 7, 0), ("f_tau", 6, 3), ("kappa", 6, 2),
                                    *[("recall", 14, 3), ("hit", 4, 2)] * windowed,
                                    *[(name, 6, 2) for name in windows.STEPS] * toy):
            cell = "-" if row.get(name) is None else f"{row[name]:.{digits}f}"
            line += f" {cell:>{width}}"
        named = [row["bench"]] if row["bench"] else []
        named += [row["show"]] if row["show"] != "real" else []
        lines.append("  ".join([line, *named]))
    if compared["seeds"]:
        lines += ["", "spread between the runs of a system (sd) and the headline of every run"]
    for row in compared["seeds"]:
        headlines = " ".join(f"{value:.3f}" for value in row["headlines"])
        line = f"{row['name']:<12} {row['K']!s:>6} {row['tools']:>5} {sd_text(row['headlines'])}"
        lines.append(f"{line}: {headlines}" + (f"  {row['bench']}" if row["bench"] else ""))
    lines += cost_lines(compared["costs"])
    return "\n".join(lines + difference_lines(compared))


def sd_text(headlines, digits=3):
    """Headlines of several runs -> their standard deviation as text, "-" of one run."""
    return f"{statistics.stdev(headlines):.{digits}f}" if len(headlines) > 1 else "-"


def difference_lines(compared):
    """The differences of `compare`, one line each."""
    rows = compared["differences"]
    if not rows:
        return []
    tests = sum(row["p"] is not None for row in rows)
    lines = ["", f"difference of the same items; p by sign flips of videos, Holm's over {tests}",
             f"{'pair':<18} {'K':>6} {'tools':>5} {'difference [95%]':>23} {'p':>6} {'Holm':>6} "
             f"{'videos':>6} {'items':>6}"]
    for row in rows:
        low_high = "[-]"
        if row["interval"]:
            low_high = "[{:+.3f}, {:+.3f}]".format(*row["interval"]) + few_mark(row)
        difference = "refused: errors"
        if row["difference"] is not None:
            difference = f"{row['difference']:+.3f} {low_high:>16}"
        line = f"{row['name']} - {row['minus']}".ljust(18)
        line += f" {row['K']:>6} {row['tools']:>5} {difference:>23}"
        line += f" {p_text(row['p']):>6} {p_text(row['p_holm']):>6}"
        line += f" {row['videos']:>6} {row['n']:>6}"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    return lines


def p_text(p):
    return "-" if p is None else "<.0001" if p < 0.0001 else f"{p:.4f}"


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
            cell = "-" if None in pair else "{:.0f} + {:.0f}".format(*pair)
            line += f" {cell:>{width}}"
        line += f" {row['rounds']:>6.1f} {row['seconds']:>7.1f}"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    return lines


# ------------------------------------------------------------------------------------------------
# Tables for papers


def paper_layout(evaluations):
    """
    Finished evaluations, as `compare` takes them -> the paper's Table 1 with a group of our rows at
    the end, in Markdown.

    The best of every column is bold. A run of a part of a benchmark is never the best.
    """
    ours = {row.get("bench") for _, summary, _ in evaluations for row in summary["results"]}
    paper = benchmarks.paper_table()
    # A benchmark that neither the paper nor we have measured gets no column.
    names = [name for name in benchmarks.splits() if name in ours or name in paper["ParaVT-8B"][1]]
    systems = [{"group": group, "label": f"{system} (the paper's)", "departures": [],
                "cells": {name: (percent, True, f"{percent:.1f}") for name, percent in row.items()}}
               for system, (group, row) in paper.items()]
    for name, summary, _ in evaluations:
        results = summary["results"]
        for k, mode in dict.fromkeys((row["K"], mode_of(row)) for row in results):
            if is_control(k, mode):  # see control_table
                continue
            cells = {row["bench"]: our_cell(row) for row in results
                     if (row["K"], mode_of(row)) == (k, mode) and row.get("bench") in names}
            systems.append({"group": "measured here", "cells": cells,
                            "label": f"{name}, K {k}, tools {mode} (measured)",
                            "departures": summary.get("departures", [])})
    notes = list(dict.fromkeys(note for system in systems for note in system["departures"]))
    best = {}  # benchmark -> percent as printed, so that a tie is a tie
    for name in names:
        percents = [system["cells"][name][0] for system in systems
                    if name in system["cells"] and system["cells"][name][1]]
        best[name] = f"{max(percents):.1f}" if percents else None
    rows, bold = [], set()
    for before, system in zip([{"group": None}, *systems], systems):
        if system["group"] != before["group"]:
            rows.append([system["group"]])
        marks = ", ".join(str(notes.index(note) + 1) for note in system["departures"])
        row = [system["label"] + (f" [{marks}]" if marks else "")]
        for column, name in enumerate(names, 1):
            percent, complete, text = system["cells"].get(name, (None, False, "-"))
            row.append(text)
            if complete and f"{percent:.1f}" == best[name]:
                bold.add((len(rows), column))
        rows.append(row)
    return markdown_table(["system", *names], rows, bold, notes)


def our_cell(row):
    """Row of a summary -> a cell of `paper_layout`: percent (None: refused), whether these are all
    items that the benchmark has, and a text: "66.7 [60.1, 72.3] n 30 of 2700"."""
    if row["headline"] is None:
        return None, False, "refused"
    n, items, total = row["items_headline"], row["items"], benchmarks.splits()[row["bench"]].items
    low_high = "[-]"
    if row["interval"]:
        low_high = "[{:.1f}, {:.1f}]".format(*(100 * x for x in row["interval"])) + few_mark(row)
    text = f"{100 * row['headline']:.1f} {low_high} n {n}"
    if items < total:  # MMVU's headline leaves items out, which a whole run has, too
        text += f" of {total}" if n == items else f" ({items} of {total} items)"
    # The mean over items of a benchmark that has another headline.
    if benchmarks.headline_metric(row["bench"])[0] not in ("accuracy", "mIoU"):
        text += f", over items {100 * row['acc']:.1f}"
    if seeds := [100 * value for value in row.get("seeds", [])]:
        text += f", sd {sd_text(seeds, 1)} of {len(seeds)} runs"
    return 100 * row["headline"], items >= total, text


def is_control(k, mode):
    """Whether a run was shown something else than the question and real frames."""
    return str(k) == "0" or split_mode(mode)[1] != "real"


def control_tests(results, cells):
    """
    Does the answer need the video? Rows of a summary, and their records -> a row for every control:
    its headline, the difference to the real frames at the same K and tools, p, and Holm's over all
    rows. Text alone (K 0) is compared with the most frames without tools. chance: accuracy of a
    guess, if every item is multiple choice.

    cells: {(benchmark, K, mode): {(task id, sample): graded record}}.
    """
    rows = []
    for row in results:
        bench, k, mode = cell_of(row)
        if not is_control(k, mode):
            continue
        tools, show = split_mode(mode)
        against = k
        if k == "0" and show == "real":
            k_values = [key for name, key, run_mode in cells if (name, run_mode) == (bench, "off")]
            against = max(k_values, key=lambda key: int(key) if key.isdigit() else 0)
        control, real = cells[bench, k, mode], cells.get((bench, against, tools), {})
        choices = [len(r["task"]["options"]) if r["task"]["type"] == "mcq" else 0
                   for r in control.values()]
        out = {"bench": bench, "K": row["K"], "tools": tools, "n": row["n"], "p": None,
               "show": "text alone" if (k, show) == ("0", "real") else show, "interval": None,
               "headline": row["headline"], "against": against, "difference": None,
               "chance": sum(1 / n for n in choices) / len(choices) if all(choices) else None}
        refused = {cell_of(r) for r in results if r["headline"] is None}
        records = [] if real is control else paired_differences(real, control)
        if records and not refused & {(bench, k, mode), (bench, against, tools)}:
            out["difference"], draws = bootstrap(records, bench)
            out.update(interval=interval(draws), p=sign_flip_p(records, bench))
        rows.append(out)
    for row, p in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = p
    return rows


def control_table(named, markdown=False):
    """[(system, rows of `control_tests`)] -> "Does the answer need the video?" as aligned text, or
    in Markdown."""
    rows = []
    for name, controls in named:
        for row in controls:
            percents = {key: "-" if row[key] is None else f"{100 * row[key]:.1f}"
                        for key in ("headline", "chance")}
            difference = "-"
            if row["difference"] is not None:
                difference = f"{100 * row['difference']:+.1f} [-]"  # of one video: no interval
                if row["interval"]:
                    low, high = row["interval"]
                    difference = difference[:-3] + f"[{100 * low:+.1f}, {100 * high:+.1f}]"
            rows.append([*([name] if name else []), row["bench"] or "data", f"{row['K']}",
                         row["tools"], row["show"], f"{row['n']}", percents["headline"],
                         percents["chance"], difference, p_text(row["p"]), p_text(row["p_holm"])])
    head = "benchmark K tools show n headline chance".split() + ["minus real frames", "p", "Holm"]
    head = [*(["system"] if named[0][0] else []), *head]
    title = "does the answer need the video? (percent)"
    if markdown:
        return markdown_table(head, [[title], *rows])
    wide = [max(map(len, column)) for column in zip(head, *rows)]
    return "\n".join([title, *("  ".join(map(str.ljust, r, wide)).rstrip() for r in [head, *rows])])


def markdown_table(head, rows, bold=(), notes=()):
    """Texts of a table -> Markdown. rows: a row of one text is the title of a group. bold: {(row,
    column)}. notes: footnotes, numbered from 1."""
    lines = [head, ["---"] * len(head)]
    for number, row in enumerate(rows):
        cells = [f"**{cell}**" if (number, column) in bold else cell
                 for column, cell in enumerate(map(escape_markdown, row))]
        if len(cells) == 1:
            cells[0] = f"*{cells[0]}*"
        lines.append(cells + [""] * (len(head) - len(cells)))
    notes = [f"{number}. {escape_markdown(text)}" for number, text in enumerate(notes, 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in lines]
    lines[1] = "|---" * len(head) + "|"
    return "\n".join(lines + ([""] if notes else []) + notes)


def escape_markdown(text):
    """Text on one line, with the characters escaped that Markdown's cells would read."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
