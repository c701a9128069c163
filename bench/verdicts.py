"""
bench/verdicts.py: from the numbers of bench/ablation.json to verdicts, tables and pictures.

  margin = how far a claim is on the right side, one number per seed
  p      = of the two-sided paired t-test that the mean margin is 0, Holm-adjusted over all claims.
           If p < 0.05 a claim holds or does not hold; otherwise the claim is undecided
  gap    = R_acc of rollouts that wrote a call minus R_acc of those that did not, within prompts;
           a call that was written and lost counts
  worth  = the same of the paid reward, R_acc and R_tool, in the first three steps
The other words are those of bench/frontier.py and bench/ablation.py, which imports this file.
"""
import math
import os
import statistics

import rollout
from bench import frontier

BUDGETS = rollout.gated_choices()
mean = frontier.mean

# ------------------------------------------------------------------------------------------------
# Numbers of a row


def rounded(value):
    """Numbers, lists and dicts of them -> the same with four digits and text as keys, as JSON."""
    if isinstance(value, dict):
        return {str(k): rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def f_and_kappa(row, budget=None):
    """(f_tau, kappa) of a row's sampled rollouts, pooled or at one K."""
    if "train" in row:
        train = row["train"]
        cell = (train["by_K"].get(str(budget)) if budget
                else {m: train[m]["mean"] for m in ("f_tau", "kappa")})
        return (cell["f_tau"], cell["kappa"]) if cell else (None, None)
    cells = row.get("sampled", {}).get("on", {})
    cells = [cells[str(budget)]] if budget else list(cells.values())
    return mean(c["f_tau"] for c in cells), mean(c["kappa"] for c in cells)


def accuracy(row, tools="on"):
    """Greedy accuracy averaged over K."""
    return mean(c["acc"] for c in row["eval"][tools].values())


def by_budget(row, metric, *budgets, part="by_K_last"):
    """Mean over some K of one metric of training rollouts."""
    return mean(row["train"][part].get(str(k), {}).get(metric) for k in budgets)


def of_need(row, measure, part="eval"):
    """Mean over K of one measure of bench/frontier.py; part: eval (greedy), sampled or train."""
    return mean(cell[measure] for cell in row["need"][part].values())


# ------------------------------------------------------------------------------------------------
# Claims


def claims():
    """[(text, needed rows, margin(rows of one seed) -> float, above 0 if the claim is right, the
    numbers that decide)]. Those on need were written down before any of their rows ran."""
    def f(row, k=None):
        return f_and_kappa(row, k)[0]

    def kappa(row, k=None):
        return f_and_kappa(row, k)[1]

    def late(row):
        return row["train"]["kappa"]["last"]

    def mended(row):
        return row["train"]["f_tau"]["last"]

    def gap(r, *budgets):
        return by_budget(r["acc-gated"], "gap", *budgets, part="by_K")

    def dies(name):
        return (lambda r: 0.25 * kappa(r["sft"], 64) - late(r[name]),
                lambda r: {"last quarter": late(r[name]), "SFT at 64": kappa(r["sft"], 64)})

    def lives(name):
        return (lambda r: late(r[name]) - 0.5 * kappa(r["sft"]),
                lambda r: {"last quarter": late(r[name]), "SFT": kappa(r["sft"])})

    def broken(name):
        return (lambda r: f(r["sft"], 64) + 0.1 - mended(r[name]),
                lambda r: {"last quarter": mended(r[name]), "SFT at 64": f(r["sft"], 64)})

    def above(high, low, by, value):
        return (lambda r: value(r[high]) - value(r[low]) - by,
                lambda r: {name: value(r[name]) for name in (high, low)})

    def needed(name, measure):
        return lambda r: of_need(r[name], measure)

    def below(name, measure, limit):
        return (lambda r: limit - of_need(r[name], measure),
                lambda r: {name: of_need(r[name], measure)})

    def lies(name):
        return (lambda r: of_need(r["need-acc"], "evidence") - of_need(r[name], "evidence"),
                lambda r: {n: of_need(r[n], "evidence") for n in (name, "need-acc")})

    def selective(row):
        return of_need(row, "called_unseen") - of_need(row, "called_shown")

    return [
        ("SFT does not transfer format: sampled f_tau below 0.5", ("sft",),
         lambda r: 0.5 - f(r["sft"]), lambda r: {"f_tau SFT": f(r["sft"])}),
        ("Tool Necessity Gap: what a call is worth in R_acc within prompts (accuracy the only "
         "reward, K gated) is at least 0.2 more at K of 4 to 16 than at 64", ("acc-gated",),
         lambda r: gap(r, 4, 8, 16) - gap(r, 64) - 0.2,
         lambda r: {"4 to 16": gap(r, 4, 8, 16), "64": gap(r, 64)}),
        ("GRPO on accuracy alone kills calling at K = 64: kappa in the last quarter under a fourth "
         "of SFT's", ("sft", "acc"), *dies("acc")),
        ("and calls more than if calls in open thoughts are dropped", ("acc", "acc-drop"),
         *above("acc", "acc-drop", 0, late)),
        ("and does not mend format: f_tau in the last quarter at most 0.1 above SFT's",
         ("sft", "acc"), *broken("acc")),
        ("gating keeps its calls: kappa in the last quarter at least half of SFT's",
         ("sft", "acc-gated"), *lives("acc-gated")),
        ("and does not mend its format", ("sft", "acc-gated"), *broken("acc-gated")),
        ("GRPO as released kills calling, by the same measure", ("sft", "vanilla"),
         *dies("vanilla")),
        ("GRPO as released does not mend format, by the same measure", ("sft", "vanilla"),
         *broken("vanilla")),
        ("PARA-GRPO's mean f_tau is at least 0.2 above that of GRPO on accuracy alone",
         ("para", "acc"), *above("para", "acc", 0.2, f)),
        ("PARA-GRPO's mean f_tau is at least 0.2 above that of GRPO as released",
         ("para", "vanilla"), *above("para", "vanilla", 0.2, f)),
        ("PARA-GRPO is more accurate than SFT, greedy, averaged over K", ("para", "sft"),
         *above("para", "sft", 0, accuracy)),
        ("PARA-GRPO, averaged over K, is more accurate than GRPO on accuracy alone at K = 64",
         ("para", "acc"), *above("para", "acc", 0, accuracy)),
        ("PARA-GRPO is more accurate than GRPO as released", ("para", "vanilla"),
         *above("para", "vanilla", 0, accuracy)),
        ("PARA-GRPO's calls follow need: unseen windows are called more often than shown ones by "
         "at least 0.1", ("para",), lambda r: selective(r["para"]) - 0.1,
         lambda r: {m: of_need(r["para"], m) for m in ("called_unseen", "called_shown")}),
        ("the full method at K = 64 (Exploration Anchoring without gating) loses its calls, by the "
         "same measure", ("sft", "anchoring"), *dies("anchoring")),
        ("without R_tool calls are fewer: kappa in the last quarter at most half of the full "
         "method's", ("para", "no-tool"),
         lambda r: 0.5 * late(r["para"]) - late(r["no-tool"]),
         lambda r: {"- R_tool": late(r["no-tool"]), "full": late(r["para"])}),
        ("without gamma format is worse: mean f_tau below the full method's", ("para", "no-gamma"),
         *above("para", "no-gamma", 0, f)),
        ("structural credit brings format: mean f_tau above that of credit on the whole sequence",
         ("para", "whole"), *above("para", "whole", 0, f)),
        # calls that follow need
        ("demonstrations teach need: after SFT on them unseen windows are called more often than "
         "shown ones by at least 0.5", ("need-sft",), lambda r: selective(r["need-sft"]) - 0.5,
         lambda r: {m: of_need(r["need-sft"], m) for m in ("called_unseen", "called_shown")}),
        ("from there accuracy alone keeps at most 1.0 calls a rollout", ("need-acc",),
         *below("need-acc", "kappa", 1.0)),
        ("and is at most 0.02 less accurate than PARA-GRPO from habit", ("need-acc", "habit-tool"),
         *above("need-acc", "habit-tool", -0.02, accuracy)),
        ("a price of 0.05 keeps at most 1.0 calls a rollout", ("need-c0.05",),
         *below("need-c0.05", "kappa", 1.0)),
        ("and is at most 0.02 less accurate than PARA-GRPO from habit",
         ("need-c0.05", "habit-tool"), *above("need-c0.05", "habit-tool", -0.02, accuracy)),
        ("R_tool teaches to call for windows that the frames show: more of them than accuracy "
         "alone", ("need-tool", "need-acc"),
         lambda r: needed("need-tool", "called_shown")(r) - needed("need-acc", "called_shown")(r),
         lambda r: {n: of_need(r[n], "called_shown") for n in ("need-tool", "need-acc")}),
        ("and false evidence: fewer true slots than accuracy alone", ("need-tool", "need-acc"),
         *lies("need-tool")),
        ("a price of 0.1 teaches false evidence: fewer true slots than accuracy alone",
         ("need-c0.1", "need-acc"), *lies("need-c0.1")),
        ("from half habit a price of 0.05 brings at most 1.0 calls a rollout", ("half-c0.05",),
         *below("half-c0.05", "kappa", 1.0)),
        ("and accuracy alone brings more calls than that price", ("half-acc", "half-c0.05"),
         lambda r: of_need(r["half-acc"], "kappa") - of_need(r["half-c0.05"], "kappa"),
         lambda r: {n: of_need(r[n], "kappa") for n in ("half-acc", "half-c0.05")}),
    ]


def t_test(values):
    """Two-sided p of the one-sample t-test that the mean is 0. On paired differences this is the
    paired test. Exact for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    freedom, spread = len(values) - 1, statistics.stdev(values)
    if spread == 0:
        return float(statistics.mean(values) == 0)
    angle = math.atan(abs(statistics.mean(values)) / (spread / math.sqrt(len(values)))
                      / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    # even: 1 + 1/2 c^2 + 1*3/(2*4) c^4 ..; odd: c + 2/3 c^3 + 2*4/(3*5) c^5 ..
    for n in range(freedom % 2, freedom - 1, 2):
        total += term * cosine ** n
        term *= (n + 1) / (n + 2)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside)


def holm(ps):
    """p values -> adjusted p values: the chance of even one false verdict stays below the stated
    one."""
    out, least = [None] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, ps[i] * (len(ps) - rank)))
        out[i] = least
    return out


def judge(results):
    """-> [{"claim", "verdict", "p", "seeds", "margin", "spread", "numbers"}]"""
    out = []
    for text, needs, margin, shown in claims():
        # only seeds that have all numbers of the claim, because a K may never be drawn
        seeds = [r for r in results.values() if all(n in r for n in needs)
                 and None not in shown(r).values()]
        margins = [margin(r) for r in seeds]
        if len(margins) < 2:  # one seed decides nothing
            continue
        cells = [shown(r) for r in seeds]
        out.append({"claim": text, "seeds": len(margins), "p_alone": t_test(margins),
                    "margin": statistics.mean(margins), "spread": statistics.stdev(margins),
                    "numbers": {name: mean(c[name] for c in cells) for name in cells[0]}})
    for c, p in zip(out, holm([c["p_alone"] for c in out])):
        c["p"] = p
        c["verdict"] = ("not decided" if p >= 0.05 else "holds" if c["margin"] > 0
                        else "does not hold")
    return rounded(out)


# ------------------------------------------------------------------------------------------------
# Tables


def cell(values, digits=2):
    """Values of the seeds -> "mean ±standard deviation", or "-"."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    spread = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def measures():
    """[(title, function of one row)]: the measures on which rows are compared."""
    return [("f_tau, last quarter", lambda r: r["train"]["f_tau"]["last"]),
            ("kappa at K 4, last quarter", lambda r: by_budget(r, "kappa", 4)),
            ("kappa at K 64, last quarter", lambda r: by_budget(r, "kappa", 64)),
            ("accuracy with tools", accuracy),
            ("accuracy without tools", lambda r: accuracy(r, "off"))]


def change(row):
    """How much the share of rollouts that write a call grew, from the first three steps to the last
    quarter."""
    return row["writing"]["last"]["wrote"] - row["writing"]["first"]["wrote"]


def same_signs(results, names):
    """-> (runs of the phase diagram whose change has the sign of the worth, runs with a worth)."""
    runs = [r[name] for r in results.values() for name in names if name in r]
    signs = [r["writing"]["first"]["worth"] * change(r) > 0 for r in runs
             if r["writing"]["first"]["worth"] is not None]
    return sum(signs), len(signs)


def difference(results, name, value):
    """A row minus the full method, paired by seed -> "+mean ±standard deviation (n, p)". p belongs
    to this comparison alone and is not adjusted."""
    pairs = [(value(r[name]), value(r["para"])) for r in results.values()
             if name in r and "para" in r]
    gaps = [ours - full for ours, full in pairs if ours is not None and full is not None]
    if len(gaps) < 2:
        return "-"
    # + 0.0 turns "-0.00" into "+0.00"
    return (f"{round(statistics.mean(gaps), 2) + 0.0:+.2f} ±{statistics.stdev(gaps):.2f} "
            f"({len(gaps)}, {t_test(gaps):.3f})")


def versions(results, codes):
    """Text: which scripts have changed since the rows were measured. codes: {version: {script:
    digest}}; the last has all of today's scripts."""
    *_, today = codes.values()
    used = {row["code"] for found in results.values() for row in found.values()}
    changed = sorted({script for one in used for script, digest in codes[one].items()
                      if today.get(script) != digest})
    if not changed:
        return "All rows were measured with today's code."
    return ("Some rows were measured before code changed in " + ", ".join(changed) + ".")


def markdown(results, judged, titles, paper, about):
    """All tables as one Markdown text. titles: {kind: {row: title}}. paper: {row: (f_tau, kappa)}.
    about: sentences on days, machines and code."""
    def found(name):
        return [r[name] for r in results.values() if name in r]

    def block(kind, head, line, names=None):
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        return lines + ["| " + " | ".join([title, *line(found(name), name)]) + " |"
                        for name, title in titles[kind].items()
                        if found(name) and (names is None or name in names)]

    trained = [name for kind in titles for name in titles[kind]
               if found(name) and "train" in found(name)[0]]
    by_k = [f"K {k}" for k in BUDGETS]
    out = ["# The Tool Prior Paradox in the toy world", "",
           f"Made by `make ablation` (seeds {', '.join(results)}). {about} "
           "Mean ± standard deviation over seeds. "
           "Definitions: the docstrings of `bench/ablation.py`, `bench/frontier.py` and "
           "`bench/verdicts.py`; every command behind a number: `bench/ablation.json`. "
           "The paper's figures come from an 8B model on real videos "
           "and are shown for the order of the rows, not for their size.", "",
           "## Claims", "", "| # | claim | verdict | p, Holm | margin ± sd | numbers |",
           "|---|---|---|---|---|---|"]
    for number, c in enumerate(judged, 1):
        shown = ", ".join(f"{k} {v:.2f}" for k, v in c["numbers"].items())
        out.append(f"| {number} | {c['claim']} | **{c['verdict']}** ({c['seeds']} seeds) | "
                   f"{c['p']:.3f} | {c['margin']:+.3f} ± {c['spread']:.3f} | {shown} |")

    out += ["", "## A perfect reader", "", "Accuracy without calls, with all needed calls, and the "
            "number of needed calls, exact (`python bench/frontier.py`).", "",
            "| | " + " | ".join(by_k) + " | mean |", "|" + "---|" * (2 + len(by_k))]
    for fps, title in ((0.375, "ablation, phase diagram"), (1.0, "need, demo")):
        cells = [frontier.ceilings(k, fps) for k in BUDGETS]
        for measure in ("never", "ceiling", "needed"):
            values = [c[measure] for c in cells]
            out.append(f"| {measure} ({title}) | " + " | ".join(
                f"{v:.2f}" for v in [*values, mean(values)]) + " |")

    out += ["", "## Format and calls while sampling at temperature 0.7", ""]

    def sampled(some, name):
        cells = [cell([f_and_kappa(r)[0] for r in some]),
                 cell([r["train"]["f_released"]["mean"] if name in trained else r["f_released"]
                       for r in some]), cell([f_and_kappa(r)[1] for r in some])]
        for metric, part in (("f_tau", "last"), ("kappa", "last"), ("well_formed", "last")):
            cells.append(cell([r["train"][metric][part] for r in some]) if name in trained else "-")
        theirs = paper.get(name)
        return [*cells, *(f"{x:.2f}" if theirs else "-" for x in theirs or (0, 0))]

    out += block("table", ["row", "f_tau", "f_released", "kappa", "f_tau last quarter",
                           "kappa last", "whole rollouts last", "paper f_tau", "paper kappa"],
                 sampled)
    out += ["", "## Calls at each K, last quarter of training", ""]
    out += block("table", ["row", *by_k], lambda some, name: [
        cell([by_budget(r, "kappa", k) for r in some]) for k in BUDGETS], trained)
    out += ["", "## What writing a call is worth: gap at each K, all steps", ""]
    out += block("table", ["row", *by_k], lambda some, name: [
        cell([by_budget(r, "gap", k, part="by_K") for r in some]) for k in BUDGETS], trained)
    for mode, title in (("on", "Greedy accuracy with tools, beside the ceiling"),
                        ("off", "Greedy accuracy without tools")):
        out += ["", f"## {title}", ""]
        out += block("table", ["row", *by_k, "mean over K"], lambda some, name, mode=mode: [
            *(cell([r["eval"][mode][str(k)]["acc"] for r in some]) for k in BUDGETS),
            cell([accuracy(r, mode) for r in some])])
        if mode == "on":
            cells = [frontier.ceilings(k, 0.375)["ceiling"] for k in BUDGETS]
            out.append("| a perfect reader | " + " | ".join(
                f"{v:.2f}" for v in [*cells, mean(cells)]) + " |")
    head = ["row", "accuracy", "calls", "needed", "wasted", "called unseen", "called shown",
            "evidence true"]

    def needs(some, name):
        return [cell([of_need(r, m) for r in some]) for m in (
            "acc", "kappa", "needed", "wasted", "called_unseen", "called_shown", "evidence")]

    out += ["", "## Do calls follow need? Greedy, mean over K", ""]
    out += block("table", head, needs)
    beside = [name for name in trained if name != "para"]
    out += ["", "## Each row against the full method, paired by seed", "",
            "Mean difference ± standard deviation (seeds, p of this comparison alone).", ""]
    out += block("table", ["row", *(title for title, _ in measures())], lambda some, name: [
        difference(results, name, value) for _, value in measures()], beside)
    out += ["", "## Phase diagram", "", "worth > 0 predicts that writing a call becomes more "
            "frequent, worth < 0 that it becomes rarer. Share of rollouts that write a call in the "
            "first three steps and in the last quarter. p: that the change is not 0, of this row "
            "alone. {} of {} runs change in the predicted direction.".format(
                *same_signs(results, titles["phase"])), ""]
    out += block("phase", ["row", "worth", "wrote, first", "wrote, last", "change",
                           "p", "served calls, last"], lambda some, name: [
        cell([r["writing"]["first"]["worth"] for r in some]),
        *(cell([r["writing"][part]["wrote"] for r in some]) for part in ("first", "last")),
        cell([change(r) for r in some]),
        f"{t_test([change(r) for r in some]):.3f}" if len(some) > 1 else "-",
        cell([r["train"]["kappa"]["last"] for r in some])])
    out += ["", "## Calls that follow need, at the demo's settings", "",
            "Greedy, mean over K. A perfect reader needs 0.80 calls for an accuracy of 1.", ""]
    out += block("need", head, needs)
    return "\n".join(out) + "\n"


def picture(results, path):
    """Writes a PNG with four panels, for SFT and five ways to train from it: calls and format over
    the steps, calls at each K in the last quarter beside the needed ones, greedy accuracy at each K
    beside the ceiling. Lines are means over seeds, bands the range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {"sft": ("SFT", "#8a8a8a"), "acc": ("accuracy alone, K = 64", "#c2571a"),
             "acc-drop": ("the same, calls in open thoughts dropped", "#e29a73"),
             "acc-gated": ("accuracy alone, K gated", "#d9a514"),
             "vanilla": ("GRPO as released", "#7a4fa3"), "para": ("PARA-GRPO", "#1b6ca8")}
    some = {name: [r[name] for r in results.values() if name in r] for name in lines}
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4))

    def draw(axis, name, x, curves):
        curves = [c for c in curves if None not in c]
        if not curves:
            return
        label, colour = lines[name]
        axis.plot(x, [statistics.mean(c) for c in zip(*curves)], color=colour, label=label,
                  marker="o" if len(x) == len(BUDGETS) else None, ms=3.5)
        axis.fill_between(x, [min(c) for c in zip(*curves)], [max(c) for c in zip(*curves)],
                          color=colour, alpha=0.12, lw=0)

    ticks = range(len(BUDGETS))
    for name, found in some.items():
        ran = [r for r in found if "train" in r]
        for axis, metric in zip(axes, ("kappa", "f_tau")):
            draw(axis, name, range(1, 1 + max((len(r["curves"][metric]) for r in ran), default=0)),
                 [smooth(r["curves"][metric]) for r in ran])
        draw(axes[2], name, ticks, [[by_budget(r, "kappa", k) for k in BUDGETS] for r in ran])
        draw(axes[3], name, ticks, [[r["eval"]["on"][str(k)]["acc"] for k in BUDGETS]
                                    for r in found])
    limits = [frontier.ceilings(k, 0.375) for k in BUDGETS]
    for axis, measure in ((axes[2], "needed"), (axes[3], "ceiling")):
        axis.plot(ticks, [cell[measure] for cell in limits], color="black", ls="--", lw=1.2,
                  label="a perfect reader")
    axes[0].set(title="calls per rollout, training", xlabel="step")
    axes[1].set(title="format (f_tau), training", xlabel="step", ylim=(0, 1.05))
    axes[2].set(title="calls per rollout, last quarter")
    axes[3].set(title="accuracy with tools, greedy", ylim=(-0.02, 1.05))
    for axis in axes[2:]:
        axis.set(xlabel="overview frames K", xticks=ticks)
        axis.set_xticklabels(BUDGETS)
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.legend(*axes[3].get_legend_handles_labels(), loc="lower center", ncol=4,
                  fontsize=9, frameon=False)
    save(figure, path, rect=(0, 0.14, 1, 1))  # above the legend


def phase_picture(results, names, path):
    """Writes a PNG: what writing a call was worth in the first three steps against how its
    frequency changed, one point a run. The prediction is the two quadrants on the diagonal."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 3.8))
    colours = {"0.4": "#c2571a", "0.6": "#d9a514", "0.8": "#7a4fa3", "1.0": "#1b6ca8"}
    for name in names:
        _, q, tool, k = name.split("-")
        some = [r[name] for r in results.values() if name in r]
        some = [r for r in some if r["writing"]["first"]["worth"] is not None]
        axis.scatter([r["writing"]["first"]["worth"] for r in some], [*map(change, some)], s=22,
                     marker="o" if k == "64" else "^", color=colours[q] if tool == "1" else "none",
                     edgecolor=colours[q],
                     label=f"q {q}" if (tool, k) == ("1", "64") else None)
    axis.axvline(0, color="#444444", lw=0.8)
    axis.axhline(0, color="#444444", lw=0.8)
    axis.set_title("filled: R_tool; circle: K = 64, triangle: gated", fontsize=9)
    axis.set(xlabel="worth of writing a call, first 3 steps", ylabel="change of its frequency")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    save(figure, path)


def save(figure, path, rect=(0, 0, 1, 1)):
    """Writes a figure, whole or not at all."""
    figure.tight_layout(rect=rect)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path + ".tmp", dpi=110, format="png", metadata={"Software": None})
    os.replace(path + ".tmp", path)


def smooth(values, width=3):
    """Running mean over the last `width` steps of 64 rollouts each."""
    return [mean(values[max(0, i - width + 1): i + 1]) for i in range(len(values))]
