"""
bench/ablation.py: three experiments in the toy world, seed by seed, with a verdict on each claim.

  table  the rows of the paper's Table 2: what does each part of PARA-GRPO do to format and calls?
  phase  if only a share q of the written calls is served, when does RL drop calls?
  need   can an agent learn to call only if its frames do not show the event?

This script calls toy.py, sft.py, grpo.py and eval.py with flags (`commands` below is the whole
experiment), reads their logs, summaries and records, and hands numbers to bench/verdicts.py. Each
seed has its own world, base and cold start. Each row is one RL run from that start, followed by
greedy evaluation at every K with and without tools.

  f_tau      = R_fmt by the paper preset's terms, for every row, also if a row is paid by others
  f_released = the same as the release computes it, over sampled tokens alone
  kappa      = executed calls per rollout
  mean       = over all rollouts of training; first, last = over the first and last quarter of the
               steps. For rows without RL: over the sampled rollouts of an evaluation

Calls in a thought that never closes are run, as in the authors' release; one row drops them.

Reads and writes: --out (worlds, checkpoints, logs; may be deleted), --picture, --results.json,
--results.md. The JSON holds every finished row and seed with the commands that made it and a digest
of the code that ran. A row is run again if either has changed; comments and docstrings do not count
as code.

CPU: python bench/ablation.py                    all rows, one job per core, many hours
     python bench/ablation.py --rows para acc --seeds 10 11
     python bench/ablation.py --rows need
"""
import ast
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import launch  # noqa: E402
import rewards  # noqa: E402
from bench import frontier, verdicts  # noqa: E402


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
    """{kind of rows: (its rows, its seeds)}. Seeds 21 and above were never looked at while the
    worlds, the rewards and the settings were chosen."""
    return {"table": (table_rows(), [*range(11, 16), 21, 22, 23]),
            "phase": (phase_rows(), [*range(21, 27)]), "need": (need_rows(), [31, 32, 33])}


def rows():
    """All rows of all kinds."""
    return {name: row for some, _ in kinds().values() for name, row in some.items()}


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
        return [], [["toy.py", "--world", "named", "--out", path(name), "--prior", prior,
                     *numbered]]
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
            *map(str, verdicts.BUDGETS), *agent.split()]
    greedy = [*test, "--temperature", "0", "--out", path(name, "eval"), "--tools", "on", "off"]
    if flags is None:
        # sampled as in training: greedy answers hide how often an agent calls
        return [start], [[*test, "--ckpt", path(start), "--out", path(name, "sampled")],
                         [*greedy, "--ckpt", path(start)]]
    script = ["grpo.py"]
    if name not in need_rows():
        served = name.split("-")[1] if name in phase_rows() else "1"
        script = [os.path.join("bench", "lossy.py"), served]
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


@functools.cache  # parsing all scripts takes half a second
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
    code = version(code_digests())
    return {"commands": history(name, args, seed), "code": code}


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

    for kind, (some, its) in kinds().items():
        seeds = args.seeds or its
        for seed in seeds:
            for name, (_, _, few, *_) in some.items():
                if args.rows:
                    picked = name in args.rows or kind in args.rows
                else:
                    picked = seeds.index(seed) < few
                if picked and not current(results.get(str(seed), {}).get(name, {}), name, args,
                                          seed):
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


def pool_by_budget(steps):
    """by_K of several steps -> by_K, each step weighted by the number of rollouts. gap: the mean
    over the steps that have a gap."""
    out = {}
    for k in map(str, verdicts.BUDGETS):
        cells = [s["by_K"][k] for s in steps if k in s["by_K"]]
        n = sum(c["n"] for c in cells)
        if n:
            out[k] = {"n": n, **{m: sum(c[m] * c["n"] for c in cells) / n
                                 for m in ("acc", "f_tau", "well_formed", "kappa")},
                      "gap": frontier.mean(c["call_minus_skip"] for c in cells)}
    return out


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
    gaps = [frontier.mean(called) - frontier.mean(skipped) for skipped, called in groups.values()
            if called and skipped]
    return {"worth": frontier.mean(gaps), "prompts": len(gaps),
            "wrote": sum(len(w) for _, w in groups.values()) / len(rollouts)}


def numbers(folder):
    """The numbers of one finished row for the tables: {"train", "writing", "need", "curves",
    "sampled", "eval", "f_released"}, without those that the row does not have."""
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
            step["f_released"] = frontier.mean(released_format(r["turns"]) for r in some)
        # the first steps are close to the start: they predict, the last quarter shows
        out["writing"] = {part: writing([r for some in rolled[where] for r in some])
                          for part, where in (("first", slice(0, 3)),
                                              ("last", slice(-quarter, None)))}
        out["need"] = {"train": frontier.by_budget(frontier.read(os.path.join(folder, "run")))}
        out["train"] = {m: {part: frontier.mean(s[m] for s in some) for part, some in parts.items()}
                        for m in ("f_tau", "f_released", "well_formed", "kappa", "acc")}
        out["train"].update(by_K=pool_by_budget(steps), by_K_last=pool_by_budget(parts["last"]),
                            steps=len(steps))
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
        records = frontier.read(path)
        out.setdefault("need", {})[name] = frontier.by_budget(records)
        if name == "sampled":
            out["f_released"] = frontier.mean(released_format(r["turns"]) for r in records)
    return verdicts.rounded(out)


def as_json(judged, results, codes):
    """{"claims", "code", "results"} as text, one line for each claim, version of the code and row
    of a seed. codes: {version: {script: digest}}."""
    def lines(items, pair="{}"):
        return pair[0] + "\n" + ",\n".join(items) + "\n" + pair[1]

    seeds = [f'"{seed}": ' + lines([f'"{name}": {json.dumps(row)}' for name, row in rows.items()])
             for seed, rows in results.items()]
    used = {row["code"] for rows in results.values() for row in rows.values()}
    code = [f'"{key}": {json.dumps(codes[key])}' for key in codes if key in used]
    return lines(['"claims": ' + lines(map(json.dumps, judged), "[]"), '"code": ' + lines(code),
                  '"results": ' + lines(seeds)]) + "\n"


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("--out", default="out/ablation",
                        help="folder of worlds, checkpoints and logs")
    parser.add_argument("--results", default=os.path.join("bench", "ablation"),
                        help="path of the tables, without .json and .md")
    parser.add_argument("--picture", default=os.path.join("docs", "ablation.png"),
                        help="curves of GRPO and PARA-GRPO; needs matplotlib")
    parser.add_argument("--seeds", type=int, nargs="+", default=None,
                        help="each seed is a world, a base, a cold start and all runs; default: "
                        "those of each kind of rows")
    parser.add_argument("--rows", nargs="+", default=None, metavar="NAME",
                        help="only these rows, on all seeds of their kind; table, phase and need "
                        "are all rows of one kind")
    parser.add_argument("--keep-old", action="store_true",
                        help="keep rows of other code; the tables name the scripts that changed")
    parser.add_argument("--base-flags", default="--batch-size 12",
                        help="flags of sft.py in pretraining")
    parser.add_argument("--sft-flags", default="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                        help="flags of sft.py in the cold start: short, so that format stays "
                        "fragile")
    parser.add_argument("--calls-flags", default="--steps 36 --muon-lr 4e-4 --lr 1.5e-4",
                        help="the same for the phase diagram, whose start calls more often")
    parser.add_argument("--taught-flags", default="--batch-size 12 --steps 1000 --eval-every 0",
                        help="flags of sft.py, base and cold start in one, for rows on need")
    parser.add_argument("--rl-flags", default="--prompts 8 --steps 30 --lr 3e-4 "
                        "--show-every 0", help="flags of every run of bench/lossy.py")
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
    results, codes = {}, {}
    if os.path.exists(args.results + ".json"):
        with open(args.results + ".json") as f:
            stored = json.load(f)
        # Results of other commands or other code must not stand beside today's unnoticed.
        results = {seed: {name: row for name, row in found.items() if name in rows()
                          and current(row, name, args, int(seed))}
                   for seed, found in stored["results"].items()}
        results = {seed: found for seed, found in results.items() if found}
        codes = stored.get("code", {})
    now = code_digests()
    codes.pop(version(now), None)
    codes[version(now)] = now  # the last one, see verdicts.versions

    def save():
        judged = verdicts.judge(results)
        about = f"{where_measured(results)}. {verdicts.versions(results, codes)}"
        titles = {kind: {name: row[0] for name, row in some.items()}
                  for kind, (some, _) in kinds().items()}
        launch.write_atomic(args.results + ".json", as_json(judged, results, codes))
        launch.write_atomic(args.results + ".md",
                            verdicts.markdown(results, judged, titles, paper(), about))

    run_all(args, results, save)
    if results:
        save()
    if any("para" in r for r in results.values()):
        verdicts.picture(results, args.picture)
    if any(name in r for r in results.values() for name in phase_rows()):
        verdicts.phase_picture(results, phase_rows(), args.picture.replace(".png", "-phase.png"))
    for number, c in enumerate(verdicts.judge(results), 1):
        print(f"{number:2d}. {c['verdict']:>13}: {c['claim']} "
              f"(margin {c['margin']:+.3f} ± {c['spread']:.3f}, p {c['p']:.3f})")


if __name__ == "__main__":
    launch.run_main(main)
