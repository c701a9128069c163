"""
bench/ablation.py: the paper's Table 2 in the toy world, row by row and seed by seed, with a verdict
on each of its orderings.

It only calls toy.py, sft.py, grpo.py and eval.py with flags (`rows` below is the whole experiment),
reads their log.jsonl and summary.json, and writes tables. For every seed: a world and a base for
each prior (pretraining in the prior's style), a short cold start, then each row's RL run from that
cold start, then greedy evaluation at every K with tools and without.

  f_tau    = R_fmt by the paper preset's terms, whatever the row was paid for; kappa = executed
  calls per rollout
  mean     = over all rollouts of training, sampled at 0.7; first, last = over the first and last
  quarter of the steps
             rows that are not trained by RL: over the sampled rollouts of an evaluation at 0.7
  margin   = how far a claim is on its right side, per seed; it holds where the mean margin is above
  the standard deviation over
             seeds, does not hold where it is below minus that, and is undecided between

Reads and writes: --out (worlds, checkpoints, logs; may be deleted), --picture, --results.json
(every finished row and seed with the commands that made it: a row whose commands have not changed
is not run again), --results.md.

CPU: python bench/ablation.py                    all rows, seeds 10 11 12, one job per core
     python bench/ablation.py --blocks A --seeds 10
"""
import argparse
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import model  # noqa: E402
import rollout  # noqa: E402

BUDGETS = rollout.gated_budgets()


def rows():
    """name -> (blocks, title, start, flags of grpo.py (None = not trained by RL), flags of both
    grpo.py and eval.py)."""
    return {
        "base": ("A", "base", "base-strong", None, ""),
        "sft": ("A", "+ SFT", "sft-strong", None, ""),
        "grpo": ("ABD", "+ SFT + GRPO", "sft-strong", "--vanilla", "--no-think-prefix"),
        "para": ("ABE", "+ SFT + PARA-GRPO (full)", "sft-strong", "", ""),
        "anchoring": ("B", "GRPO + Exploration Anchoring", "sft-strong",
                      "--frames 64 --tool-reward 0", ""),
        "gating": ("B", "GRPO + nFrames Gating", "sft-strong", "--vanilla --frames gated",
                   "--no-think-prefix"),
        "no-tool": ("B", "full - R_tool", "sft-strong", "--tool-reward 0", ""),
        "no-gamma": ("B", "full - gamma", "sft-strong", "--gamma 0", ""),
        "sequential": ("C", "full, sequential dispatch", "para", None, "--dispatch sequential"),
        "turns": ("C", "full, one call a turn", "para", None, "--dispatch turns --max-turns 3"),
        "weak-base": ("D", "weak-prior base", "base-weak", None, ""),
        "weak-sft": ("D", "weak prior + SFT", "sft-weak", None, ""),
        "weak-grpo": ("D", "weak prior + SFT + GRPO", "sft-weak", "--vanilla", "--no-think-prefix"),
        "acc-only": ("E", "GRPO, accuracy the only reward", "sft-strong",
                     "--vanilla --format-weight 0", "--no-think-prefix"),
        "whole": ("E", "full, credit on the whole sequence", "sft-strong",
                  "--format-credit sequence", ""),
        "train-sub": ("E", "full, sub-agents trained too", "sft-strong", "--train-subagents", ""),
        "blind-sub": ("E", "full, sub-agents do not see the question", "sft-strong", "",
                      "--no-sub-question"),
    }


def paper():
    """The paper's Table 2: (f_tau, kappa)."""
    return {"base": (0.03, 0.45), "sft": (0.13, 2.50), "grpo": (0.13, 0.02), "para": (0.41, 0.21),
            "anchoring": (0.35, 0.19),
            "gating": (0.10, 1.36), "no-tool": (0.33, 0.04), "no-gamma": (0.36, 0.27)}


def commands(name, args, seed):
    """-> (jobs it needs, commands): how one checkpoint, world or row of one seed is made, as lists
    of words."""
    here, table = os.path.join(args.out, f"seed{seed}"), rows()
    common = ["--preset", "toy", "--temperature", "0.7", "--open-thought", "drop", "--sub-fps",
              "0.375", "--seed", str(seed)]

    def path(*parts):
        return os.path.join(here, *parts)

    kind, _, prior = name.partition("-")
    if kind == "world":
        return [], [["toy.py", "--out", path(name), "--prior", prior, "--seed", str(seed)]]
    if kind == "base" and prior:
        return [f"world-{prior}"], [["sft.py", "--preset", "toy", "--ckpt",
                                     path(f"world-{prior}", "init"), "--data",
                                     path(f"world-{prior}", "pretrain.jsonl"), "--out", path(name),
                                     "--seed", str(seed), *args.base_flags.split()]]
    if kind == "sft" and prior:
        return [f"base-{prior}"], [["sft.py", "--preset", "toy", "--ckpt", path(f"base-{prior}"),
                                    "--data", path(f"world-{prior}", "sft.jsonl"),
                                    "--out", path(name), "--seed", str(seed),
                                    *args.sft_flags.split()]]
    _, _, start, flags, agent = table[name]
    world = path("world-weak" if "weak" in start else "world-strong")
    test = ["eval.py", *common, "--data", os.path.join(world, "eval.jsonl"), "--frames",
            *map(str, BUDGETS), *agent.split()]
    greedy = [*test, "--temperature", "0", "--out", path(name, "eval")]
    if start == "para":
        # which dispatch is faster: one episode at a time, the two in turn, so that a busy minute of
        # the machine hits both
        alone = ["--ckpt", path(start, "run"), "--temperature", "0", "--limit", "24", "--live", "1"]
        timed = [[*test, *alone, "--dispatch", way, "--frames", "4", "--out",
                  path(name, f"alone-{way}.{n}")]
                 for n in range(3) for way in ("parallel", "sequential") if name == "sequential"]
        return [start], [[*greedy, "--ckpt", path(start, "run")], *timed]
    if flags is None:
        return [start], [[*test, "--ckpt", path(start), "--out", path(name, "sampled")],
                         [*greedy, "--ckpt", path(start), "--tools", "on", "off"]]
    run = ["grpo.py", *common, "--ckpt", path(start), "--data", os.path.join(world, "rl.jsonl"),
           "--out", path(name, "run"),
           *args.rl_flags.split(), *flags.split(), *agent.split()]
    return [start], [run, [*greedy, "--ckpt", path(name, "run"), "--tools", "on", "off"]]


# ------------------------------------------------------------------------------------------------
# Running


def history(name, args, seed):
    """Every command behind a thing, oldest first: what a cached result depends on. Folders are left
    out."""
    needs, lines = commands(name, args, seed)
    before = [line for need in needs for line in history(need, args, seed)]
    return before + [" ".join(word.replace(args.out + os.sep, "") for word in line)
                     for line in lines]


def finished(name, args, seed):
    """Whether the folder of a job holds what the present commands would make."""
    try:
        with open(os.path.join(args.out, f"seed{seed}", name, "done.json")) as f:
            return json.load(f) == history(name, args, seed)
    except OSError:
        return False


def work(name, args, seed, cores):
    """Run one job's commands on one core -> seconds. One core each: two jobs with two threads each
    would spin against each other."""
    folder = os.path.join(args.out, f"seed{seed}", name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    core, began = cores.pop(), time.time()
    for number, line in enumerate(commands(name, args, seed)[1]):
        log = os.path.join(args.out, f"seed{seed}", f"{name}.{number}.log")
        with open(log, "w") as f:
            done = subprocess.run(["taskset", "-c", str(core), sys.executable, *line], cwd=ROOT,
                                  stdout=f, stderr=f)
        if done.returncode:
            with open(log) as f:
                tail = f.read()[-2000:]
            raise RuntimeError(f"seed {seed}, {name}: exit code {done.returncode} of "
                               f"{' '.join(line)}\n{tail}")
    cores.append(core)
    model.write_atomic(os.path.join(folder, "done.json"), json.dumps(history(name, args, seed)))
    return time.time() - began


def plan(args, results):
    """-> [(seed, job)] that still has to run, needs before users; seed by seed."""
    order = []

    def need(name, seed, row=False):
        # a row that is not in the tables runs, whatever its folder holds
        if (seed, name) in order or (finished(name, args, seed) and not row):
            return
        for other in commands(name, args, seed)[0]:
            need(other, seed)
        order.append((seed, name))

    for seed in args.seeds:
        for name, (blocks, *_) in rows().items():
            known = results.get(str(seed), {}).get(name, {}).get("commands")
            picked = name in args.rows if args.rows else set(blocks) & set(args.blocks)
            if picked and known != history(name, args, seed):
                need(name, seed, row=True)
    return order


def here():
    """Day and machine of a measurement."""
    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")),
                   "unknown CPU")
    return f"{time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} cores of {cpu}"


def where_measured(results):
    """Text: when and where most rows were measured, and which were elsewhere."""
    places = {}
    for rows_of_seed in results.values():
        for name, row in rows_of_seed.items():
            places.setdefault(row["measured"], {})[rows()[name][1]] = None
    (most, _), *rest = sorted(places.items(), key=lambda place: -len(place[1]))
    return most + "".join(f"; {place}: {', '.join(names)}" for place, names in rest)


def run_all(args, results, save):
    """Every missing job, as many at once as there are cores; each finished row goes into `results`
    at once."""
    order, cores, live = plan(args, results), sorted(os.sched_getaffinity(0)), {}
    total, began = len(order), time.time()
    print(f"{total} jobs on {len(cores)} cores", flush=True)
    with ThreadPoolExecutor(len(cores)) as pool:
        while order or live:
            waiting = {*order, *live.values()}
            ready = [job for job in order
                     if not any((job[0], other) in waiting
                                for other in commands(job[1], args, job[0])[0])]
            for job in ready[: len(cores) - len(live)]:
                order.remove(job)
                live[pool.submit(work, job[1], args, job[0], cores)] = job
            for future in wait(live, return_when=FIRST_COMPLETED).done:
                seed, name = live.pop(future)
                seconds = future.result()
                if name in rows():
                    results.setdefault(str(seed), {})[name] = {
                        "commands": history(name, args, seed), "seconds": round(seconds),
                        "measured": here(),
                        **numbers(os.path.join(args.out, f"seed{seed}", name))}
                    save()
                print(f"[{total - len(order) - len(live)}/{total}] seed {seed} {name}: "
                      f"{seconds:.0f} s | {(time.time() - began) / 60:.1f} min", flush=True)


# ------------------------------------------------------------------------------------------------
# Numbers


def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def rounded(value):
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def pool_by_budget(steps):
    """by_K of several steps -> by_K, each step weighted by its rollouts."""
    out = {}
    for k in map(str, BUDGETS):
        cells = [s["by_K"][k] for s in steps if k in s["by_K"]]
        n = sum(c["n"] for c in cells)
        if n:
            out[k] = {"n": n, **{m: sum(c[m] * c["n"] for c in cells) / n
                                 for m in ("acc", "f_tau", "well_formed", "kappa")},
                      "call_minus_skip": mean(c["call_minus_skip"] for c in cells)}
    return out


def numbers(folder):
    """What the tables need of one finished row: {"train", "sampled", "eval", "alone", "curves"},
    each where it exists."""
    out = {}
    log = os.path.join(folder, "run", "log.jsonl")
    if os.path.exists(log):
        with open(log) as f:
            steps = [json.loads(line) for line in f]
        quarter = max(1, len(steps) // 4)
        parts = {"mean": steps, "first": steps[:quarter], "last": steps[-quarter:]}
        out["train"] = {m: {part: mean(s[m] for s in some) for part, some in parts.items()}
                        for m in ("f_tau", "well_formed", "kappa", "acc")}
        out["train"].update(by_K=pool_by_budget(steps), by_K_last=pool_by_budget(parts["last"]),
                            steps=len(steps),
                            closure={tag: mean(s["closure"][tag] for s in steps)
                                     for tag in ("think", "tool_call", "answer")})
        out["curves"] = {m: [s[m] for s in steps] for m in ("f_tau", "kappa")}
        for k in ("4", "64"):
            out["curves"][f"acc_{k}"] = [s["by_K"].get(k, {}).get("acc") for s in steps]
    for path in sorted(glob.glob(os.path.join(folder, "*", "summary.json"))):
        name = os.path.basename(os.path.dirname(path))
        with open(path) as f:
            results = json.load(f)["results"]
        if name.startswith("alone-"):  # alone-<dispatch>.<n>: seconds of one episode at a time
            out.setdefault("alone", {}).setdefault(name[6:-2],
                                                   []).append(results[0]["seconds_per_episode"])
        else:
            out[name] = {mode: {str(r["K"]): {"acc": r["acc"], "f_tau": r["f_tau"],
                                              "kappa": r["kappa"],
                                              "seconds": r["seconds_per_episode"]}
                                for r in results if r["tools"] == mode}
                         for mode in {r["tools"] for r in results}}
    return rounded(out)


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


def seconds(row):
    """Seconds per episode of the greedy evaluation with tools, averaged over K."""
    return mean(c["seconds"] for c in row["eval"]["on"].values())


# ------------------------------------------------------------------------------------------------
# Claims


def claims():
    """[(text, rows it needs, margin(rows of one seed) -> float, above 0 where the claim is right,
    the numbers that decide)]"""
    def f(row, k=None):
        return f_and_kappa(row, k)[0]

    def kappa(row, k=None):
        return f_and_kappa(row, k)[1]

    def late(row):
        return row["train"]["kappa"]["last"]

    def alone(r, way):
        return statistics.median(r["sequential"]["alone"][way])

    def others(r):
        return max(accuracy(r[n]) for n in ("grpo", "anchoring", "gating"))

    return [
        ("SFT transfers tool calls: its kappa is at least twice the base's", ("base", "sft"),
         lambda r: kappa(r["sft"]) - 2 * kappa(r["base"]),
         lambda r: {"base": kappa(r["base"]), "SFT": kappa(r["sft"])}),
        ("SFT does not transfer format: sampled f_tau of SFT below 0.5", ("sft",),
         lambda r: 0.5 - f(r["sft"]), lambda r: {"f_tau SFT": f(r["sft"])}),
        ("GRPO kills calling: its kappa in the last quarter is under a tenth of SFT's at K = 64",
         ("sft", "grpo"),
         lambda r: 0.1 * kappa(r["sft"], 64) - late(r["grpo"]),
         lambda r: {"GRPO last": late(r["grpo"]), "SFT at 64": kappa(r["sft"], 64)}),
        ("GRPO does not mend format: its mean f_tau is at most 0.1 above SFT's at K = 64",
         ("sft", "grpo"),
         lambda r: f(r["sft"], 64) + 0.1 - f(r["grpo"]),
         lambda r: {"GRPO": f(r["grpo"]), "SFT at 64": f(r["sft"], 64)}),
        ("PARA-GRPO's mean f_tau is at least 0.2 above GRPO's", ("grpo", "para"),
         lambda r: f(r["para"]) - f(r["grpo"]) - 0.2,
         lambda r: {"PARA-GRPO": f(r["para"]), "GRPO": f(r["grpo"])}),
        ("PARA-GRPO's kappa is at least ten times GRPO's (last quarters)", ("grpo", "para"),
         lambda r: late(r["para"]) - 10 * late(r["grpo"]),
         lambda r: {"PARA-GRPO": late(r["para"]), "GRPO": late(r["grpo"])}),
        ("gating alone keeps calls: kappa in the last quarter at least half of SFT's",
         ("sft", "gating"),
         lambda r: late(r["gating"]) - 0.5 * kappa(r["sft"]),
         lambda r: {"gating": late(r["gating"]), "SFT": kappa(r["sft"])}),
        ("gating alone does not keep format: mean f_tau at least 0.2 under the full method's",
         ("gating", "para"),
         lambda r: f(r["para"]) - f(r["gating"]) - 0.2,
         lambda r: {"gating": f(r["gating"]), "PARA-GRPO": f(r["para"])}),
        ("anchoring alone keeps format: mean f_tau at least 0.2 above GRPO's",
         ("anchoring", "grpo"),
         lambda r: f(r["anchoring"]) - f(r["grpo"]) - 0.2,
         lambda r: {"anchoring": f(r["anchoring"]), "GRPO": f(r["grpo"])}),
        ("anchoring alone does not keep calls: kappa in the last quarter under a tenth of SFT's at "
         "K = 64", ("sft", "anchoring"),
         lambda r: 0.1 * kappa(r["sft"], 64) - late(r["anchoring"]),
         lambda r: {"anchoring": late(r["anchoring"]), "SFT at 64": kappa(r["sft"], 64)}),
        ("the full method is most accurate, averaged over K, against GRPO, anchoring alone and "
         "gating alone", ("para", "grpo", "anchoring", "gating"),
         lambda r: accuracy(r["para"]) - others(r),
         lambda r: {"PARA-GRPO": accuracy(r["para"]), "best other": others(r)}),
        ("without R_tool calls are fewer: kappa in the last quarter at most half of the full "
         "method's", ("para", "no-tool"),
         lambda r: 0.5 * late(r["para"]) - late(r["no-tool"]),
         lambda r: {"- R_tool": late(r["no-tool"]), "full": late(r["para"])}),
        ("without gamma format is worse: mean f_tau below the full method's", ("para", "no-gamma"),
         lambda r: f(r["para"]) - f(r["no-gamma"]),
         lambda r: {"- gamma": f(r["no-gamma"]), "full": f(r["para"])}),
        ("parallel dispatch is not less accurate than sequential, same checkpoint",
         ("para", "sequential"),
         lambda r: accuracy(r["para"]) - accuracy(r["sequential"]) + 0.005,
         lambda r: {"parallel": accuracy(r["para"]), "sequential": accuracy(r["sequential"])}),
        ("parallel dispatch is at least 0.007 more accurate than one call a turn, same checkpoint",
         ("para", "turns"),
         lambda r: accuracy(r["para"]) - accuracy(r["turns"]) - 0.007,
         lambda r: {"parallel": accuracy(r["para"]), "one a turn": accuracy(r["turns"])}),
        ("parallel dispatch is faster: seconds of one episode at a time, K = 4, medians of three "
         "interleaved runs", ("sequential",),
         lambda r: alone(r, "sequential") - alone(r, "parallel"),
         lambda r: {way: alone(r, way) for way in ("parallel", "sequential")}),
        ("a weaker tool prior keeps its format under GRPO: mean f_tau at least 0.2 above the "
         "strong prior's", ("weak-grpo", "grpo"),
         lambda r: f(r["weak-grpo"]) - f(r["grpo"]) - 0.2,
         lambda r: {"weak": f(r["weak-grpo"]), "strong": f(r["grpo"])}),
        ("a weaker tool prior never calls under GRPO: kappa in the last quarter below 0.1",
         ("weak-grpo",),
         lambda r: 0.1 - late(r["weak-grpo"]), lambda r: {"weak": late(r["weak-grpo"])}),
        ("GRPO keeps calling because its R_fmt pays for it: with accuracy as the only reward, "
         "kappa in the last quarter is at most half of GRPO's", ("grpo", "acc-only"),
         lambda r: 0.5 * late(r["grpo"]) - late(r["acc-only"]),
         lambda r: {"GRPO": late(r["grpo"]), "accuracy only": late(r["acc-only"])}),
        ("structural credit is what brings format: mean f_tau above that of credit on the whole "
         "sequence", ("para", "whole"),
         lambda r: f(r["para"]) - f(r["whole"]),
         lambda r: {"structural": f(r["para"]), "whole sequence": f(r["whole"])}),
    ]


def judge(results):
    """-> [{"claim", "verdict", "seeds", "margin", "spread", "numbers"}]"""
    out = []
    for text, needs, margin, shown in claims():
        seeds = [r for r in results.values() if all(n in r for n in needs)]
        margins = [margin(r) for r in seeds]
        if not margins:
            continue
        m, spread = statistics.mean(margins), statistics.stdev(margins) if len(margins) > 1 else 0.0
        verdict = ("undecided" if len(margins) < 2 or abs(m) <= spread
                   else "holds" if m > 0 else "does not hold")
        cells = [shown(r) for r in seeds]
        out.append(rounded({"claim": text, "verdict": verdict, "seeds": len(margins), "margin": m,
                            "spread": spread,
                            "numbers": {name: mean(c[name] for c in cells) for name in cells[0]}}))
    return out


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
    """[(title, function of one row)]: what block E is compared on."""
    return [("f_tau", lambda r: r["train"]["f_tau"]["mean"]),
            ("f_tau last quarter", lambda r: r["train"]["f_tau"]["last"]),
            ("kappa last quarter", lambda r: r["train"]["kappa"]["last"]),
            ("accuracy with tools", accuracy),
            ("accuracy without tools", lambda r: accuracy(r, "off"))]


def difference(results, name, value):
    """A row minus the row that it changes, paired by seed -> "+mean ±standard deviation"."""
    against = "grpo" if "--vanilla" in rows()[name][3] else "para"
    gaps = [value(r[name]) - value(r[against]) for r in results.values() if name in r
            and against in r]
    if len(gaps) < 2:
        return f"{gaps[0]:+.2f}" if gaps else "-"
    # + 0.0: no "-0.00"
    text = f"{round(statistics.mean(gaps), 2) + 0.0:+.2f} ±{statistics.stdev(gaps):.2f}"
    return f"**{text}**" if abs(statistics.mean(gaps)) > statistics.stdev(gaps) else text


def markdown(results, judged):
    """All tables as one Markdown text."""
    table = {name: (title, [r[name] for r in results.values() if name in r])
             for name, (_, title, *_) in rows().items()}
    table = {name: pair for name, pair in table.items() if pair[1]}

    def block(head, line, names=None):
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        return lines + ["| " + " | ".join([title, *line(name, some)]) + " |"
                        for name, (title, some) in table.items() if names is None or name in names]

    trained = [name for name, (_, some) in table.items() if "train" in some[0]]
    out = ["# The Tool Prior Paradox in the toy world", "",
           f"Made by `make ablation` (seeds {', '.join(results)}; {where_measured(results)}). "
           "Mean ± standard deviation over seeds. "
           "Definitions: the docstring of `bench/ablation.py`; "
           "every command behind a number: `bench/ablation.json`. "
           "The paper's figures come from an 8B model on real videos "
           "and are shown for the order of the rows, not for their size.", "",
           "## Claims", "", "| # | claim | verdict | margin ± spread | numbers |",
           "|---|---|---|---|---|"]
    for number, c in enumerate(judged, 1):
        shown = ", ".join(f"{k} {v:.2f}" for k, v in c["numbers"].items())
        out.append(f"| {number} | {c['claim']} | **{c['verdict']}** ({c['seeds']} seeds) "
                   f"| {c['margin']:+.3f} ± {c['spread']:.3f} | {shown} |")

    out += ["", "## Format and calls while sampling at temperature 0.7", ""]

    def sampled(name, some):
        cells = [cell([f_and_kappa(r)[i] for r in some]) for i in (0, 1)]
        for part in ("first", "last"):
            cells += [cell([r["train"][m][part] for r in some]) if name in trained else "-"
                      for m in ("f_tau", "kappa")]
        cells.append(cell([r["train"]["well_formed"]["mean"] for r in some]) if name in trained
                     else "-")
        theirs = paper().get(name)
        return [*cells, *(f"{x:.2f}" if theirs else "-" for x in theirs or (0, 0))]

    sampling = [name for name, (_, some) in table.items() if name in trained
                or "sampled" in some[0]]
    out += block(["row", "f_tau", "kappa", "f_tau first quarter", "kappa first",
                  "f_tau last quarter", "kappa last", "well-formed",
                  "paper f_tau", "paper kappa"], sampled, sampling)
    for title, index in (("f_tau", 0), ("kappa", 1)):
        out += ["", f"## {title} at each K, sampled", ""]
        out += block(["row", *(f"K {k}" for k in BUDGETS)],
                     lambda name, some, index=index: [
                         cell([f_and_kappa(r, k)[index] for r in some]) for k in BUDGETS],
                     sampling)
    out += ["", "## Call-minus-skip advantage at each K, last quarter of training", ""]
    out += block(["row", *(f"K {k}" for k in BUDGETS)],
                 lambda name, some: [
                     cell([r["train"]["by_K_last"].get(str(k), {}).get("call_minus_skip")
                           for r in some]) for k in BUDGETS], trained)
    out += ["", "## Closure rate per tag, training mean", ""]
    out += block(["row", "think", "tool_call", "answer"],
                 lambda name, some: [cell([r["train"]["closure"][t] for r in some])
                                     for t in ("think", "tool_call", "answer")], trained)
    for mode, title in (("on", "Greedy accuracy with tools"),
                        ("off", "Greedy accuracy without tools")):
        out += ["", f"## {title}", ""]
        out += block(["row", *(f"K {k}" for k in BUDGETS), "mean over K"],
                     lambda name, some, mode=mode: [
                         *(cell([r["eval"][mode][str(k)]["acc"] for r in some]) for k in BUDGETS),
                         cell([accuracy(r, mode) for r in some])],
                     [n for n in table if mode in table[n][1][0]["eval"]])
    beyond = [name for name in trained if "E" in rows()[name][0] and name != "para"]
    if beyond:
        out += ["", "## Beyond the paper: each change against the same seed without it", "",
                "Against the full method; rows that are GRPO, against GRPO. Bold: further from 0 "
                "than the standard deviation of the difference over seeds.", ""]
        out += block(["row", *(title for title, _ in measures())],
                     lambda name, some: [difference(results, name, value)
                                         for _, value in measures()], beyond)
    out += ["", "## Greedy evaluation: calls per episode at each K, format, seconds", ""]
    out += block(["row", *(f"K {k}" for k in BUDGETS), "f_tau", "seconds per episode"],
                 lambda name, some: [
                     *(cell([r["eval"]["on"][str(k)]["kappa"] for r in some]) for k in BUDGETS),
                     cell([mean(c["f_tau"] for c in r["eval"]["on"].values()) for r in some]),
                     cell([seconds(r) for r in some])])
    return "\n".join(out) + "\n"


def picture(results, path):
    """GRPO against PARA-GRPO: kappa and f_tau over the steps of training, greedy accuracy at each K
    afterwards, with tools and without -> PNG. Lines are means over seeds, bands the range. GRPO
    trains at K = 64 only, so accuracy at K = 4 can be had after training alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"sft": "#8a8a8a", "grpo": "#c2571a", "para": "#1b6ca8"}
    names = {"sft": "SFT", "grpo": "SFT + GRPO", "para": "SFT + PARA-GRPO"}
    some = {name: [r[name] for r in results.values() if name in r] for name in names}
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.1))
    for axis, (metric, title) in zip(axes, (("kappa", "calls per rollout (kappa), training"),
                                            ("f_tau", "format (f_tau), training"))):
        for name in ("grpo", "para"):
            curves = [smooth(r["curves"][metric]) for r in some[name]]
            steps = range(1, len(curves[0]) + 1)
            axis.plot(steps, [statistics.mean(c) for c in zip(*curves)], color=colours[name],
                      label=names[name])
            axis.fill_between(steps, [min(c) for c in zip(*curves)], [max(c) for c in zip(*curves)],
                              color=colours[name], alpha=0.2, lw=0)
        axis.set(title=title, xlabel="step", ylim=(0, 1.05 if metric == "f_tau" else None))
    for axis, (mode, title) in zip(axes[2:], (("on", "accuracy with tools, greedy"),
                                              ("off", "accuracy without tools, greedy"))):
        for name in names:
            cells = [[r["eval"][mode][str(k)]["acc"] for k in BUDGETS] for r in some[name]]
            axis.plot(range(len(BUDGETS)), [statistics.mean(c) for c in zip(*cells)],
                      color=colours[name], marker="o", ms=4, label=names[name])
            axis.fill_between(range(len(BUDGETS)), [min(c) for c in zip(*cells)],
                              [max(c) for c in zip(*cells)], color=colours[name], alpha=0.2, lw=0)
        axis.set(title=title, xlabel="overview frames K", ylim=(-0.02, 1.05),
                 xticks=range(len(BUDGETS)))
        axis.set_xticklabels(BUDGETS)
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[2].legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path + ".tmp", dpi=110, format="png", metadata={"Software": None})
    os.replace(path + ".tmp", path)


def smooth(values, width=3):
    """Running mean over the last `width` steps: one step is 64 rollouts."""
    return [mean(values[max(0, i - width + 1): i + 1]) for i in range(len(values))]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/ablation",
                        help="folder of worlds, checkpoints and logs")
    parser.add_argument("--results", default=os.path.join("bench", "ablation"),
                        help="path of the tables, without .json and .md")
    parser.add_argument("--picture", default=os.path.join("docs", "ablation.png"),
                        help="curves of GRPO and PARA-GRPO; needs matplotlib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12],
                        help="each seed is a world, a base, a cold start and all runs")
    parser.add_argument("--blocks", default="ABCDE", help="which blocks of the table")
    parser.add_argument("--rows", nargs="+", default=None, metavar="NAME",
                        help="these rows only, whatever their block")
    parser.add_argument("--base-flags", default="--epochs 1.75",
                        help="flags of sft.py in pretraining")
    parser.add_argument("--sft-flags", default="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                        help="flags of sft.py in the cold start: short, so that format stays "
                        "fragile")
    parser.add_argument("--rl-flags", default="--prompts 8 --steps 30 --lr 3e-4 "
                        "--answer-from line --show-every 0", help="flags of every grpo.py run")
    args = parser.parse_args()
    args.out, args.results, args.picture = map(os.path.abspath,
                                               (args.out, args.results, args.picture))
    unknown = sorted(set(args.rows or []) - set(rows()))
    if unknown or not set(args.blocks) <= set("ABCDE"):
        raise model.UserError(f"--rows {' '.join(unknown)}: known are {' '.join(rows())}" if unknown
                              else f"--blocks {args.blocks}: known are A to E")
    model.make_out(args.out)
    results = {}
    if os.path.exists(args.results + ".json"):
        with open(args.results + ".json") as f:
            results = json.load(f)["results"]

    def save():
        judged = judge(results)
        model.write_atomic(args.results + ".json",
                           json.dumps({"claims": judged, "results": results}, indent=1))
        model.write_atomic(args.results + ".md", markdown(results, judged))

    run_all(args, results, save)
    if results:
        save()
    if any({"sft", "grpo", "para"} <= set(r) for r in results.values()):
        picture(results, args.picture)
    for number, c in enumerate(judge(results), 1):
        print(f"{number:2d}. {c['verdict']:>13}: {c['claim']} "
              f"(margin {c['margin']:+.3f} ± {c['spread']:.3f})")


if __name__ == "__main__":
    model.run_main(main)
