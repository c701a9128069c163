"""
bench/ablation.py: the paper's Table 2 in the toy world, row by row and seed by seed, with a verdict
on each ordering there.

This script calls toy.py, sft.py, grpo.py and eval.py with flags (`rows` below is the whole
experiment), reads their log.jsonl, summary.json and records, and writes tables. Each seed has a
world and a base for each prior (pretraining in the prior's style) and a short cold start. Each row
is one RL run from that cold start, followed by greedy evaluation at every K with and without tools.

  f_tau      = R_fmt by the paper preset's terms, for every row, also if a row is paid by others
  f_released = the same as the release computes it, over sampled tokens alone
  kappa      = executed calls per rollout
  mean       = over all rollouts of training, sampled at 0.7; first, last = over the first and last
               quarter of the steps. For rows without RL: over the sampled rollouts of an evaluation
               at 0.7
  gap        = R_acc of rollouts that called minus R_acc of those that did not, within prompts
  margin     = how far a claim is on the right side, one number per seed
  p          = of the two-sided paired t-test that the mean margin is 0, Holm-adjusted over all
               claims. If p < 0.05 a claim holds or does not hold; otherwise the claim is undecided

Reads and writes: --out (worlds, checkpoints, logs; may be deleted), --picture, --results.json,
--results.md. The JSON holds every finished row and seed with the commands that made it. A row is
run again only if the commands or toy.py have changed.

CPU: python bench/ablation.py                    all rows, one job per core
     python bench/ablation.py --rows para acc --seeds 10 11
"""
import ast
import glob
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import launch  # noqa: E402
import rewards  # noqa: E402
import rollout  # noqa: E402
import toy  # noqa: E402
import video  # noqa: E402
from bench import frontier  # noqa: E402
from evaluation import folders  # noqa: E402

BUDGETS = rollout.gated_choices()


def table_rows():
    """Rows beside the paper's Table 2: name -> (title, start, seeds, flags of grpo.py (None = not
    trained by RL), flags of both grpo.py and eval.py). seeds: a row uses so many of --seeds, from
    the first."""
    plain, reward = "--no-think-prefix", "--vanilla --format-weight 0 --tool-reward 0"
    return {
        "sft": ("+ SFT", "sft-strong", 8, None, ""),
        "para": ("+ SFT + PARA-GRPO (full)", "sft-strong", 8, "", ""),
        "acc": ("GRPO, accuracy the only reward, K = 64", "sft-strong", 8, reward, plain),
        "acc-gated": ("GRPO, accuracy the only reward, K gated", "sft-strong", 8,
                      reward + " --frames gated", plain),
        "acc-drop": ("the same as the first of these, calls in open thoughts dropped",
                     "sft-strong", 5, reward, plain + " --set open_thought=drop"),
        "vanilla": ("GRPO as released, K = 64", "sft-strong", 8, "--vanilla", plain),
        "gating": ("GRPO as released, K gated", "sft-strong", 8, "--vanilla --frames gated", plain),
        "no-tool": ("full - R_tool", "sft-strong", 5, "--tool-reward 0", ""),
        "base": ("base", "base-strong", 5, None, ""),
        "anchoring": ("full at K = 64", "sft-strong", 5, "--frames 64", ""),
        "no-gamma": ("full - gamma", "sft-strong", 5, "--set gamma=0", ""),
        "whole": ("full, credit on the whole sequence", "sft-strong", 5,
                  "--format-credit sequence", ""),
    }


def phase_rows():
    """Rows of the phase diagram, accuracy the only other reward: the share q of calls that are
    served, R_tool or not, K = 64 or gated."""
    reward = "--vanilla --format-weight 0 --steps 16"
    return {f"phase-{q}-{tool}-{k}": (f"q = {q}, {'with' if tool else 'without'} R_tool, K {k}",
                                      "calls-strong", 6,
                                      f"{reward} --tool-reward {tool} --frames {k}",
                                      "--no-think-prefix")
            for q in (0.4, 0.6, 0.8, 1.0) for tool in (0, 1) for k in ("64", "gated")}


def need_rows():
    """Rows on calls that follow need, at the demo's settings: what the demonstrations teach (habit:
    --prior tidy, as in the demo) x what RL pays."""
    paid = {"sft": ("SFT", None), "tool": ("PARA-GRPO", ""),
            "acc": ("- R_tool", "--tool-reward 0"),
            **{f"c{cost}": (f"- R_tool, {cost} a call", f"--tool-reward 0 --call-cost {cost}")
               for cost in (0.02, 0.05, 0.1)}}
    rows = {f"{start}-{name}": (f"{start}, {title}", f"taught-{start}", 3, flags, "")
            for start in ("need", "half") for name, (title, flags) in paid.items()}
    return {"habit-sft": ("habit, SFT", "taught-tidy", 3, None, ""),
            "habit-tool": ("habit, PARA-GRPO", "taught-tidy", 3, "", ""), **rows}


def kinds():
    """{kind of rows: its rows}."""
    return {"table": table_rows(), "phase": phase_rows(), "need": need_rows()}


def rows():
    """All rows of all kinds."""
    return {name: row for some in kinds().values() for name, row in some.items()}


def paper():
    """The paper's Table 2: (f_tau, kappa)."""
    return {"base": (0.03, 0.45), "sft": (0.13, 2.50), "vanilla": (0.13, 0.02),
            "para": (0.41, 0.21), "anchoring": (0.35, 0.19), "gating": (0.10, 1.36),
            "no-tool": (0.33, 0.04), "no-gamma": (0.36, 0.27)}


def commands(name, args, seed):
    """-> (needed jobs, commands): the commands that make one checkpoint, world or row of one seed,
    as lists of words."""
    here = os.path.join(args.out, f"seed{seed}")
    numbered = ["--seed", str(seed)]

    def path(*parts):
        return os.path.join(here, *parts)

    def sft(start, data, flags):
        return ["sft.py", "--preset", "toy", "--ckpt", start, "--data", data, "--out", path(name),
                *numbered, *flags.split()]

    kind, _, prior = name.partition("-")
    world = f"world-{prior}"
    if kind == "world":
        return [], [["toy.py", "--out", path(name), "--prior", prior, *numbered]]
    if name in ("base-strong", "taught-tidy", "taught-need", "taught-half"):
        flags = args.base_flags if kind == "base" else args.taught_flags
        return [world], [sft(path(world, "init"), path(world, "pretrain.jsonl"), flags)]
    if name in ("sft-strong", "calls-strong"):
        flags = args.sft_flags if kind == "sft" else args.calls_flags
        return ["base-strong"], [sft(path("base-strong"), path(world, "sft.jsonl"), flags)]

    _, start, _, flags, agent = rows()[name]
    world = path("world-" + start.partition("-")[2])
    common = ["--preset", "toy", *numbered]
    if name not in need_rows():  # the demo's settings are those of the preset
        common += ["--temperature", "0.7", "--set", "sub_fps=0.375"]
    test = ["eval.py", *common, "--data", os.path.join(world, "eval.jsonl"), "--frames",
            *map(str, BUDGETS), *agent.split()]
    greedy = [*test, "--temperature", "0", "--out", path(name, "eval"), "--tools", "on", "off"]
    if flags is None:
        # sampled as in training: greedy answers hide how often an agent calls
        return [start], [[*test, "--ckpt", path(start), "--out", path(name, "sampled")],
                         [*greedy, "--ckpt", path(start)]]
    script = ["grpo.py"]
    if name in phase_rows():
        script = [os.path.join("bench", "lossy.py"), name.split("-")[1]]
    run = [*script, *common, "--ckpt", path(start), "--data", os.path.join(world, "rl.jsonl"),
           "--out", path(name, "run"),
           *(args.need_flags if name in need_rows() else args.rl_flags).split(), *flags.split(),
           *agent.split()]
    if name in phase_rows():
        return [start], [run]  # read from its training rollouts
    return [start], [run, [*greedy, "--ckpt", path(name, "run")]]


# ------------------------------------------------------------------------------------------------
# Running


def history(name, args, seed):
    """Every command that leads to a result, oldest first. Folders are left out."""
    needs, lines = commands(name, args, seed)
    before = [line for need in needs for line in history(need, args, seed)]
    return before + [" ".join(word.replace(args.out + os.sep, "") for word in line)
                     for line in lines]


def code_digests():
    """{script: digest of its code} of every script that a row may depend on. Comments, docstrings
    and blank lines do not count."""
    found = {}
    for pattern in ("*.py", "evaluation/*.py", "bench/lossy.py"):
        for path in sorted(glob.glob(os.path.join(ROOT, pattern))):
            with open(path) as f:
                tree = ast.parse(f.read())
            for node in ast.walk(tree):
                documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
                if isinstance(node, documented) and ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
            name = os.path.relpath(path, ROOT)
            found[name] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]
    return found


def version(digests):
    """One digest of all scripts."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]


def made_by(name, args, seed):
    """What a cached result must equal: its commands and the code that ran them."""
    return {"commands": history(name, args, seed), "code": version(code_digests())}


def current(found, name, args, seed):
    """Whether a result ({"commands", "code"}) is of today's commands, and of today's code unless
    --keep-old is given."""
    today = made_by(name, args, seed)
    return found.get("commands") == today["commands"] and (
        args.keep_old or found.get("code") == today["code"])


def finished(name, args, seed):
    """Whether the folder of a job holds the results of the present commands and code."""
    try:
        with open(os.path.join(args.out, f"seed{seed}", name, "done.json")) as f:
            return current(json.load(f), name, args, seed)
    except OSError:
        return False


def work(name, args, seed, cores):
    """Runs the commands of one job on one core -> seconds. Two jobs with two threads each would
    spin against each other."""
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
    launch.write_atomic(os.path.join(folder, "done.json"), json.dumps(made_by(name, args, seed)))
    return time.time() - began


def plan(args, results):
    """-> [(seed, job)] that still have to run, seed by seed, each after the jobs that it needs."""
    order = []

    def need(name, seed, row=False):
        # a row that is not in the tables runs, even if the folder is finished
        if (seed, name) in order or (finished(name, args, seed) and not row):
            return
        for other in commands(name, args, seed)[0]:
            need(other, seed)
        order.append((seed, name))

    for number, seed in enumerate(args.seeds):
        for name, (_, _, seeds, *_) in rows().items():
            known = results.get(str(seed), {}).get(name, {})
            kind = next(kind for kind, some in kinds().items() if name in some)
            picked = number < seeds if not args.rows or kind in args.rows else name in args.rows
            if picked and not current(known, name, args, seed):
                need(name, seed, row=True)
    return order


def here():
    """Day and machine of a measurement."""
    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")),
                   "unknown CPU")
    return f"{time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} cores of {cpu}"


def where_measured(results):
    """Text: the days and machines of all rows."""
    places = {row["measured"]: None for found in results.values() for row in found.values()}
    return "; ".join(places)


def run_all(args, results, save):
    """Runs every missing job, as many at a time as there are cores. Each finished row goes into
    `results` immediately."""
    order, cores, live = plan(args, results), sorted(os.sched_getaffinity(0)), {}
    total, at_once, began = len(order), len(cores), time.time()  # `cores`: the free ones
    print(f"{total} jobs on {at_once} cores", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        while order or live:
            waiting = {*order, *live.values()}
            ready = [job for job in order
                     if not any((job[0], other) in waiting
                                for other in commands(job[1], args, job[0])[0])]
            for job in ready[: at_once - len(live)]:
                order.remove(job)
                live[pool.submit(work, job[1], args, job[0], cores)] = job
            for future in wait(live, return_when=FIRST_COMPLETED).done:
                seed, name = live.pop(future)
                seconds = future.result()
                if name in rows():
                    results.setdefault(str(seed), {})[name] = {
                        **made_by(name, args, seed), "seconds": round(seconds),
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
        return {str(k): rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def pool_by_budget(steps):
    """by_K of several steps -> by_K, each step weighted by the number of rollouts. gap: the mean
    over the steps that have a gap."""
    out = {}
    for k in map(str, BUDGETS):
        cells = [s["by_K"][k] for s in steps if k in s["by_K"]]
        n = sum(c["n"] for c in cells)
        if n:
            out[k] = {"n": n, **{m: sum(c[m] * c["n"] for c in cells) / n
                                 for m in ("acc", "f_tau", "well_formed", "kappa")},
                      "gap": mean(c["call_minus_skip"] for c in cells)}
    return out


def limits(records, sub_fps):
    """Greedy records with tools -> {step of an episode: [right, of]}, which shows the step that
    limits accuracy. windows: calls that are a window of the question. seen: summaries of these
    windows that name the event, if a frame shows it. unseen: summaries that name no colour, if no
    frame shows the event. gather 1, 2, 3: answers to so many events, if every window and every
    summary was right."""
    count = {}

    def add(name, right):
        pair = count.setdefault(name, [0, 0])
        count[name] = [pair[0] + right, pair[1] + 1]

    clock = np.arange(64.0)  # starts of the world's frames, s
    for record in records:
        events, right = record["task"]["events"], set()
        for call in record["calls"]:
            if call["status"] != "ok":
                continue
            window = (call["start"], call["end"])
            event = next((e for e in events if tuple(e["window"]) == window), None)
            add("windows", event is not None)
            if event is None:
                continue
            looks = video.crop_indices(clock, 64.0, *window, fps=sub_fps)
            named = set(call["summary"].split()) & set(toy.colours())
            if toy.shown([event], looks):
                add("seen", named == {event["colour"]})
                right |= {window} if named == {event["colour"]} else set()
            else:
                add("unseen", not named)
        if len(right) == len(events) == sum(call["status"] == "ok" for call in record["calls"]):
            add(f"gather {len(events)}", record["score"] == 1.0)
    return count


def released_format(turns):
    """R_fmt by the PARA-GRPO recipe of the authors' release, to compare with its figures: over the
    sampled text of all turns at once. The forced <think> is no part of it: a flawless rollout gets
    0.5, one that opens a second thought in every turn 1.0. No cap."""
    text = "\n".join(turns)
    thought, closing, _ = text.partition("<think>")[2].partition("</think>")
    if not closing:  # an open one lasts to the next tag
        thought = re.split("<tool_|<answer>", thought)[0]
    think = len(thought.strip()) >= 10
    closed = think and "</think>" in text
    # Cut at each closing tag, not searched for lazily: that is quadratic on "<answer>" * 1e5.
    answered = any(piece.partition("<answer>")[2].strip() for piece in text.split("</answer>")[:-1])
    before = re.split("|".join(f"<{kind}>" for kind in rewards.CALLS), text)[0]
    called = before != text and any(call.error is None for call in rewards.parse_tool_calls(text))
    score = 0.2 * think + 0.5 * answered + 0.3 * (think and called and "<think>" in before)
    lost = "<think>" in text and "</think>" not in text
    score += 0.5 * (0.4 * closed + 0.3 * (closed and answered) - 0.3 * lost)
    even = all(text.count(f"<{kind}>") == text.count(f"</{kind}>") for kind in rewards.KINDS)
    return min(score + 0.1 * (even and score > 0), 1.0)


def rollouts_of_steps(folder):
    """The rollouts of a run, one list a step, in the order of steps."""
    found = {}  # number of the step, as the file name has it -> rollouts
    for path in sorted(glob.glob(os.path.join(folder, "run", "rollouts", "step_*.jsonl"))):
        found.setdefault(os.path.basename(path).split(".")[0], []).extend(launch.read_jsonl(path))
    return list(found.values())


def writing(rollouts):
    """Rollouts -> what writing a call was worth in paid reward (R_acc and R_tool) within prompts,
    lost calls included, the number of prompts with both kinds, and the share that wrote one."""
    groups = {}
    for r in rollouts:
        wrote = any(f"<{kind}>" in turn for turn in r["turns"] for kind in rewards.CALLS)
        groups.setdefault((r["group"], r["K"]), ([], []))[wrote].append(r["reward"]["paid_task"])
    gaps = [mean(with_call) - mean(without) for without, with_call in groups.values()
            if with_call and without]
    return {"worth": mean(gaps), "prompts": len(gaps),
            "wrote": sum(len(w) for _, w in groups.values()) / len(rollouts)}


def numbers(folder):
    """The numbers of one finished row for the tables: {"train", "sampled", "eval", "limits",
    "curves"}, without those that the row does not have."""
    out = {}
    log = os.path.join(folder, "run", "log.jsonl")
    if os.path.exists(log):
        with open(log) as f:
            steps = [json.loads(line) for line in f]
        quarter = max(1, len(steps) // 4)
        parts = {"mean": steps, "first": steps[:quarter], "last": steps[-quarter:]}
        rolled = rollouts_of_steps(folder)
        # The log does not have the release's format reward. The rollouts of each step give it.
        for step, some in zip(steps, rolled, strict=True):
            step["f_released"] = mean(released_format(r["turns"]) for r in some)
        # the first steps are close to the start: they predict, the last quarter shows
        out["writing"] = {part: writing([r for some in rolled[where] for r in some])
                          for part, where in (("first", slice(0, 3)),
                                              ("last", slice(-quarter, None)))}
        out["need"] = {"train": frontier.by_budget(frontier.read(os.path.join(folder, "run")))}
        out["train"] = {m: {part: mean(s[m] for s in some) for part, some in parts.items()}
                        for m in ("f_tau", "f_released", "well_formed", "kappa", "acc")}
        out["train"].update(by_K=pool_by_budget(steps), by_K_last=pool_by_budget(parts["last"]),
                            steps=len(steps),
                            closure={tag: mean(s["closure"][tag] for s in steps)
                                     for tag in rewards.KINDS})
        out["curves"] = {m: [s[m] for s in steps] for m in ("f_tau", "kappa")}
    for name in ("sampled", "eval"):
        path = os.path.join(folder, name)
        if not os.path.exists(os.path.join(path, "summary.json")):
            continue
        with open(os.path.join(path, "summary.json")) as f:
            results = json.load(f)["results"]
        out[name] = {mode: {str(r["K"]): {m: r[m] for m in ("acc", "f_tau", "kappa")}
                            for r in results if r["tools"] == mode}
                     for mode in {r["tools"] for r in results}}
        records = [r for r in folders.read_records(path).values() if r["tools"] == "on"]
        if name == "sampled":
            out["f_released"] = mean(released_format(r["turns"]) for r in records)
        else:
            with open(os.path.join(path, "args.json")) as f:
                out["limits"] = limits(records, json.load(f)["sub_fps"])
            out.setdefault("need", {})["eval"] = frontier.by_budget(frontier.read(path))
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


def by_budget(row, metric, *budgets, part="by_K_last"):
    """Mean over some K of one metric of training rollouts."""
    return mean(row["train"][part].get(str(k), {}).get(metric) for k in budgets)


# ------------------------------------------------------------------------------------------------
# Claims


def claims():
    """[(text, needed rows, margin(rows of one seed) -> float, above 0 if the claim is right, the
    numbers that decide)]"""
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

    return [
        ("SFT transfers tool calls: its kappa is at least twice the base's", ("base", "sft"),
         lambda r: kappa(r["sft"]) - 2 * kappa(r["base"]),
         lambda r: {"base": kappa(r["base"]), "SFT": kappa(r["sft"])}),
        ("SFT does not transfer format: sampled f_tau below 0.5", ("sft",),
         lambda r: 0.5 - f(r["sft"]), lambda r: {"f_tau SFT": f(r["sft"])}),
        ("Tool Necessity Gap: what a call is worth in R_acc within prompts (accuracy the only "
         "reward, K gated) is at least 0.2 more at K of 4 to 16 than at 64", ("acc-gated",),
         lambda r: gap(r, 4, 8, 16) - gap(r, 64) - 0.2,
         lambda r: {"4 to 16": gap(r, 4, 8, 16), "64": gap(r, 64)}),
        ("GRPO on accuracy alone kills calling at K = 64: kappa in the last quarter under a fourth "
         "of SFT's", ("sft", "acc"), *dies("acc")),
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
        ("the full method at K = 64 (Exploration Anchoring without gating) loses its calls, by the "
         "same measure", ("sft", "anchoring"), *dies("anchoring")),
        ("PARA-GRPO is more accurate than GRPO on accuracy alone at K = 64, averaged over K",
         ("para", "acc"), *above("para", "acc", 0, accuracy)),
        ("PARA-GRPO is more accurate than GRPO as released", ("para", "vanilla"),
         *above("para", "vanilla", 0, accuracy)),
        ("without R_tool calls are fewer: kappa in the last quarter at most half of the full "
         "method's", ("para", "no-tool"),
         lambda r: 0.5 * late(r["para"]) - late(r["no-tool"]),
         lambda r: {"- R_tool": late(r["no-tool"]), "full": late(r["para"])}),
        ("without gamma format is worse: mean f_tau below the full method's", ("para", "no-gamma"),
         *above("para", "no-gamma", 0, f)),
        ("structural credit brings format: mean f_tau above that of credit on the whole sequence",
         ("para", "whole"), *above("para", "whole", 0, f)),
        ("parallel calls are more accurate than one call a turn, same checkpoint",
         ("para", "turns"), *above("para", "turns", 0, accuracy)),
        ("a weak tool prior keeps its format under GRPO as released: mean f_tau above 0.9",
         ("weak-vanilla",), lambda r: f(r["weak-vanilla"]) - 0.9,
         lambda r: {"f_tau": f(r["weak-vanilla"])}),
        ("and never calls: kappa in the last quarter below 0.1", ("weak-vanilla",),
         lambda r: 0.1 - late(r["weak-vanilla"]), lambda r: {"kappa": late(r["weak-vanilla"])}),
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


def shares(some, name):
    """`limits` of several seeds -> "share (of n)"."""
    pairs = [r["limits"].get(name, [0, 0]) for r in some]
    right, of = (sum(pair[i] for pair in pairs) for i in (0, 1))
    return f"{right / of:.2f} ({of})" if of else "-"


def markdown(results, judged):
    """All tables as one Markdown text."""
    table = {name: (title, [r[name] for r in results.values() if name in r])
             for name, (title, *_) in table_rows().items()}
    table = {name: pair for name, pair in table.items() if pair[1]}

    def block(head, line, names=None):
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        return lines + ["| " + " | ".join([title, *line(name, some)]) + " |"
                        for name, (title, some) in table.items() if names is None or name in names]

    trained = [name for name, (_, some) in table.items() if "train" in some[0]]
    by_k = [f"K {k}" for k in BUDGETS]
    out = ["# The Tool Prior Paradox in the toy world", "",
           f"Made by `make ablation` (seeds {', '.join(results)}; {where_measured(results)}). "
           "Mean ± standard deviation over seeds. "
           "Definitions: the docstring of `bench/ablation.py`; "
           "every command behind a number: `bench/ablation.json`. "
           "The paper's figures come from an 8B model on real videos "
           "and are shown for the order of the rows, not for their size.", "",
           "## Claims", "", "| # | claim | verdict | p, Holm | margin ± sd | numbers |",
           "|---|---|---|---|---|---|"]
    for number, c in enumerate(judged, 1):
        shown = ", ".join(f"{k} {v:.2f}" for k, v in c["numbers"].items())
        out.append(f"| {number} | {c['claim']} | **{c['verdict']}** ({c['seeds']} seeds) | "
                   f"{c['p']:.3f} | {c['margin']:+.3f} ± {c['spread']:.3f} | {shown} |")

    out += ["", "## Format and calls while sampling at temperature 0.7", ""]

    def sampled(name, some):
        cells = [cell([f_and_kappa(r)[0] for r in some]),
                 cell([r["train"]["f_released"]["mean"] if name in trained else r["f_released"]
                       for r in some]), cell([f_and_kappa(r)[1] for r in some])]
        for metric, part in (("f_tau", "last"), ("kappa", "last"), ("well_formed", "last")):
            cells.append(cell([r["train"][metric][part] for r in some]) if name in trained else "-")
        theirs = paper().get(name)
        return [*cells, *(f"{x:.2f}" if theirs else "-" for x in theirs or (0, 0))]

    sampling = [name for name, (_, some) in table.items() if name in trained
                or "sampled" in some[0]]
    out += block(["row", "f_tau", "f_released", "kappa", "f_tau last quarter", "kappa last",
                  "whole rollouts last", "paper f_tau", "paper kappa"], sampled, sampling)
    out += ["", "## Calls at each K, last quarter of training", ""]
    out += block(["row", *by_k], lambda name, some: [
        cell([by_budget(r, "kappa", k) for r in some]) for k in BUDGETS], trained)
    out += ["", "## What a call is worth: gap at each K, all steps", ""]
    out += block(["row", *by_k], lambda name, some: [
        cell([by_budget(r, "gap", k, part="by_K") for r in some]) for k in BUDGETS], trained)
    out += ["", "## Closure rate per tag, training mean", ""]
    out += block(["row", *rewards.KINDS], lambda name, some: [
        cell([r["train"]["closure"][t] for r in some]) for t in rewards.KINDS], trained)
    for mode, title in (("on", "Greedy accuracy with tools"),
                        ("off", "Greedy accuracy without tools")):
        out += ["", f"## {title}", ""]
        out += block(["row", *by_k, "mean over K"], lambda name, some, mode=mode: [
            *(cell([r["eval"][mode][str(k)]["acc"] for r in some]) for k in BUDGETS),
            cell([accuracy(r, mode) for r in some])],
            [n for n in table if mode in table[n][1][0]["eval"]])
    out += ["", "## What limits accuracy, greedy, with tools", "",
            "Share right (of how many): calls that are a window of the question; summaries where "
            "the event is in a frame; summaries that name nothing where it is not; answers to 1, 2 "
            "and 3 events where every window and every summary was right.", ""]
    parts = ("windows", "seen", "unseen", "gather 1", "gather 2", "gather 3")
    out += block(["row", *parts], lambda name, some: [shares(some, part) for part in parts])
    beside = [name for name in trained if name != "para" and not name.startswith("weak")]
    out += ["", "## Each row against the full method, paired by seed", "",
            "Mean difference ± standard deviation (seeds, p of this comparison alone).", ""]
    out += block(["row", *(title for title, _ in measures())], lambda name, some: [
        difference(results, name, value) for _, value in measures()], beside)
    out += ["", "## Greedy calls per episode at each K, and what training took", ""]
    out += block(["row", *by_k, "seconds"], lambda name, some: [
        *(cell([r["eval"]["on"][str(k)]["kappa"] for r in some]) for k in BUDGETS),
        cell([r["seconds"] for r in some], 0)])
    return "\n".join(out) + "\n"


def picture(results, path):
    """Writes a PNG with four panels, for SFT and five ways to train from it: calls and format over
    the steps, calls at each K in the last quarter, greedy accuracy at each K afterwards. Lines are
    means over seeds, bands the range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {"sft": ("SFT", "#8a8a8a"), "acc": ("accuracy alone, K = 64", "#c2571a"),
             "acc-gated": ("accuracy alone, K gated", "#d9a514"),
             "vanilla": ("GRPO as released", "#7a4fa3"), "para": ("PARA-GRPO", "#1b6ca8"),
             "no-tool": ("full - R_tool", "#2a8c4a")}
    some = {name: [r[name] for r in results.values() if name in r] for name in lines}
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.1))

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
    figure.legend(*axes[3].get_legend_handles_labels(), loc="lower center", ncol=len(lines),
                  fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))  # above the legend
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path + ".tmp", dpi=110, format="png", metadata={"Software": None})
    os.replace(path + ".tmp", path)


def smooth(values, width=3):
    """Running mean over the last `width` steps of 64 rollouts each."""
    return [mean(values[max(0, i - width + 1): i + 1]) for i in range(len(values))]


def as_json(judged, results):
    """{"claims", "results"} as text, one line for each claim and each row of a seed."""
    def lines(items, pair="{}"):
        return pair[0] + "\n" + ",\n".join(items) + "\n" + pair[1]

    seeds = [f'"{seed}": ' + lines([f'"{name}": {json.dumps(row)}' for name, row in rows.items()])
             for seed, rows in results.items()]
    return lines(['"claims": ' + lines(map(json.dumps, judged), "[]"),
                  '"results": ' + lines(seeds)]) + "\n"


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("--out", default="out/ablation",
                        help="folder of worlds, checkpoints and logs")
    parser.add_argument("--results", default=os.path.join("bench", "ablation"),
                        help="path of the tables, without .json and .md")
    parser.add_argument("--picture", default=os.path.join("docs", "ablation.png"),
                        help="curves of GRPO and PARA-GRPO; needs matplotlib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(11, 16), 21, 22, 23],
                        help="each seed is a world, a base, a cold start and all runs; 21 to 23 "
                        "were never looked at while the worlds were made")
    parser.add_argument("--rows", nargs="+", default=None, metavar="NAME",
                        help="only these rows, on all of --seeds; table, phase and need are all "
                        "rows of one kind on as many seeds as they have")
    parser.add_argument("--keep-old", action="store_true",
                        help="keep rows of other code; the tables name the scripts that changed")
    parser.add_argument("--base-flags", default="--batch-size 12",
                        help="flags of sft.py in pretraining")
    parser.add_argument("--sft-flags", default="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                        help="flags of sft.py in the cold start: short, so that format stays "
                        "fragile")
    parser.add_argument("--calls-flags", default="--steps 24 --muon-lr 4e-4 --lr 1.5e-4",
                        help="the same for the phase diagram, whose start calls more often")
    parser.add_argument("--taught-flags", default="--batch-size 12 --steps 1000 --eval-every 0",
                        help="flags of sft.py, base and cold start in one, for rows on need")
    parser.add_argument("--rl-flags", default="--prompts 8 --steps 30 --lr 3e-4 "
                        "--set answer_from=line --show-every 0", help="flags of every grpo.py run")
    parser.add_argument("--need-flags", default="--steps 24 --show-every 0",
                        help="flags of grpo.py in rows on need: those of the demo")
    args = parser.parse_args()
    args.out, args.results, args.picture = map(os.path.abspath,
                                               (args.out, args.results, args.picture))
    unknown = sorted(set(args.rows or []) - {*rows(), *kinds()})
    if unknown:
        raise launch.UserError(f"--rows {' '.join(unknown)}: known are {' '.join(kinds())}, or "
                               f"{' '.join(rows())}")
    launch.make_out(args.out)
    results = {}
    if os.path.exists(args.results + ".json"):
        with open(args.results + ".json") as f:
            stored = json.load(f)["results"]
        # Results of another world or other flags must not stand beside today's.
        results = {seed: {name: row for name, row in found.items() if name in rows()
                          and current(row, name, args, int(seed))}
                   for seed, found in stored.items()}
        results = {seed: found for seed, found in results.items() if found}

    def save():
        judged = judge(results)
        launch.write_atomic(args.results + ".json", as_json(judged, results))
        launch.write_atomic(args.results + ".md", markdown(results, judged))

    run_all(args, results, save)
    if results:
        save()
    if any("para" in r for r in results.values()):
        picture(results, args.picture)
    for number, c in enumerate(judge(results), 1):
        print(f"{number:2d}. {c['verdict']:>13}: {c['claim']} "
              f"(margin {c['margin']:+.3f} ± {c['spread']:.3f}, p {c['p']:.3f})")


if __name__ == "__main__":
    launch.run_main(main)
