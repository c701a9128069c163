"""
soak.py: runs hundreds of GRPO steps in the toy world. Do memory, open files or step times grow?

  slope of a process   least squares over (step, resident MiB) after the first quarter of the
                       steps, in MiB per 100 steps
  growth of step time  median of the last quarter / median of the second quarter

The script runs grpo.py under torchrun on a few tasks, with caches so small that they fill at once.
Once a second the script reads every process of the run through /proc. At the end one line of JSON
is printed.

  python bench/soak.py --ckpt out/demo/sft --data out/demo/toy/rl.jsonl --steps 400
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def look(root):
    """Process id -> {pid: (name, resident MiB, open files)} of that process and its descendants.
    The ranks of torchrun have their own sessions, so a session would not find them."""
    parents, found = {}, {}  # parents: pid -> pid, of all processes of the machine
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/stat") as f:
                parents[pid] = int(f.read().rsplit(")", 1)[1].split()[1])  # a name may hold spaces
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != root:
            ancestor = parents[ancestor]
        if ancestor != root:
            continue
        try:
            with open(f"/proc/{pid}/statm") as f:
                resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            with open(f"/proc/{pid}/cmdline") as f:
                words = f.read().split("\0")
            scripts = [os.path.basename(word) for word in words if word.endswith(".py")]
            name = "torchrun" if pid == root else (scripts or words)[0]
            found[pid] = name, resident, len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def command(args, out):
    """The command: grpo.py under torchrun on the first tasks alone. No flag bounds the trainer's
    feature cache. With few tasks that cache is full long before the first quarter is over."""
    few = os.path.join(out, "few.jsonl")
    with open(args.data) as source, open(few, "w") as target:
        target.writelines(list(source)[:4 * args.ranks])
    flags = {"ckpt": args.ckpt, "data": few, "video-root": os.path.dirname(args.data) or ".",
             "out": out, "steps": args.steps, "prompts": 2 * args.ranks, "group": 4,
             "save-every": 50, "show-every": 0, "frame-cache-gb": args.cache_gb}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
             str(args.ranks), os.path.join(ROOT, "grpo.py"), "--preset", "toy"]
    return words + [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def watch(run, log):
    """-> {(pid, name): [(step, resident MiB, open files)]}, one point per second until the run
    ends."""
    series = {}
    while run.poll() is None:
        time.sleep(1.0)
        step = sum(1 for _ in open(log)) if os.path.exists(log) else 0
        for pid, (name, resident, files) in look(run.pid).items():
            series.setdefault((pid, name), []).append((step, resident, files))
    return series


def growth(name, points, steps):
    """-> the growth of one process, or None if the process did not last a quarter of the steps."""
    # Leave out the warm-up and the end.
    later = np.array([p for p in points if steps // 4 <= p[0] < steps])  # [n, 3]
    if len(later) < 10 or later[-1, 0] - later[0, 0] < steps / 4:
        return None
    half = later[len(later) // 2:]  # growth that ends has a smaller slope in this half
    slopes = [100 * np.polyfit(part[:, 0], part[:, 1], 1)[0] for part in (later, half)]
    return {"name": name, "mib": round(later[-1, 1], 1),
            "mib_per_100_steps": round(slopes[0], 2),
            "mib_per_100_steps_later": round(slopes[1], 2),
            "files_first": int(later[0, 2]), "files_last": int(later[-1, 2]),
            "files_most": int(later[:, 2].max())}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint")
    add("--data", required=True, help="toy task JSONL, beside its videos")
    add("--steps", type=int, default=400, help="optimiser steps")
    add("--ranks", type=int, default=2, help="processes under torchrun")
    add("--cache-gb", type=float, default=0.001, help="grpo.py --frame-cache-gb")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        run = subprocess.Popen(command(args, out), stdout=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
        log = os.path.join(out, "log.jsonl")
        series = watch(run, log)
        if run.returncode:
            sys.exit(f"grpo.py ended with {run.returncode}")
        with open(log) as f:
            rows = [json.loads(line) for line in f]
    seconds = [row["rollout_s"] + row["train_s"] + row["sync_s"] for row in rows]
    quarter = args.steps // 4
    slower = np.median(seconds[-quarter:]) / np.median(seconds[quarter:2 * quarter])
    found = [growth(name, points, args.steps) for (_, name), points in sorted(series.items())]
    print(json.dumps({"bench": "soak", "steps": args.steps, "ranks": args.ranks,
                      "step_s": round(float(np.median(seconds)), 3),
                      "step_time_growth": round(float(slower), 3),
                      "processes": [process for process in found if process]}))


if __name__ == "__main__":
    main()
