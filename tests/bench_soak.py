"""
bench_soak.py: hundreds of GRPO steps on the toy world; does anything grow?

  slope of a process = least squares over (step, resident MiB) behind the first quarter of the steps, in MiB per 100 steps
  growth of step time = median of the last quarter / median of the second quarter

Runs grpo.py under torchrun, looks at every process of the run once a second through /proc. Prints a line per process and one JSON line.

  python tests/bench_soak.py --ckpt out/demo/sft --data out/demo/toy/rl.jsonl --steps 400
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
    """Process id -> {pid: (name, resident MiB, open files)} of it and all that descend from it (torchrun's ranks have sessions of their own)."""
    parents, found = {}, {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/stat") as f:
                parents[pid] = int(f.read().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
    for pid in parents:
        line = [pid]
        while line[-1] in parents and line[-1] != root:
            line.append(parents[line[-1]])
        if line[-1] != root:
            continue
        try:
            with open(f"/proc/{pid}/statm") as f:
                resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            with open(f"/proc/{pid}/cmdline") as f:
                words = f.read().split("\0")
            name = "torchrun" if pid == root else next((os.path.basename(w) for w in words if w.endswith(".py")), words[0])
            found[pid] = name, resident, len(os.listdir(f"/proc/{pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="toy checkpoint")
    parser.add_argument("--data", required=True, help="toy task JSONL")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps")
    parser.add_argument("--ranks", type=int, default=2, help="processes under torchrun")
    parser.add_argument("--engine", default="auto", help="grpo.py --engine")
    parser.add_argument("--cache-gb", type=float, default=0.001, help="grpo.py --frame-cache-gb and --feature-cache-gb: small, so that they fill at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", args.ranks, os.path.join(ROOT, "grpo.py"), "--preset", "toy",
                 "--ckpt", args.ckpt, "--data", args.data, "--out", out, "--steps", args.steps, "--prompts", 2 * args.ranks, "--group", 4, "--save-every", 50,
                 "--keep", 2, "--show-every", 0, "--engine", args.engine, "--frame-cache-gb", args.cache_gb, "--feature-cache-gb", args.cache_gb, "--probe-tolerance", 1e-2]
        run = subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        series, log = {}, os.path.join(out, "log.jsonl")
        while run.poll() is None:
            time.sleep(1.0)
            step = sum(1 for _ in open(log)) if os.path.exists(log) else 0
            for pid, (name, resident, files) in look(run.pid).items():
                series.setdefault((pid, name), []).append((step, resident, files))
        if run.returncode:
            sys.exit(f"grpo.py ended with {run.returncode}")
        with open(log) as f:
            rows = [json.loads(line) for line in f]
    seconds = np.array([r["rollout_s"] + r["train_s"] + r["sync_s"] for r in rows])
    quarter, processes = args.steps // 4, []
    for (_, name), points in sorted(series.items()):
        later = np.array([p for p in points if quarter <= p[0] < args.steps])  # [n, 3]; at the last step it is ending
        if len(later) < 10 or later[-1, 0] - later[0, 0] < args.steps / 4:
            continue  # short-lived: a decode worker that was replaced
        half = later[len(later) // 2:]
        slope = 100 * np.polyfit(later[:, 0], later[:, 1], 1)[0]
        processes.append({"name": name, "mib": round(later[-1, 1], 1), "mib_per_100_steps": round(slope, 2),
                          "mib_per_100_steps_later": round(100 * np.polyfit(half[:, 0], half[:, 1], 1)[0], 2),
                          "files_first": int(later[0, 2]), "files_last": int(later[-1, 2]), "files_most": int(later[:, 2].max())})
        print(f"{name:<12} {later[-1, 1]:8.1f} MiB, {slope:+7.2f} MiB per 100 steps; open files {later[0, 2]:.0f} -> {later[-1, 2]:.0f}, most {later[:, 2].max():.0f}")
    growth = float(np.median(seconds[-quarter:]) / np.median(seconds[quarter:2 * quarter]))
    print(json.dumps({"bench": "soak", "steps": args.steps, "ranks": args.ranks, "step_s": round(float(np.median(seconds)), 3), "step_time_growth": round(growth, 3),
                      "processes": processes}))


if __name__ == "__main__":
    main()
