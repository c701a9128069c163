"""
bench/table2.py: the paper's Table 2 from folders of `make table2`, one folder a seed.

f_tau is the format reward R_fmt and kappa the number of executed calls, both a mean of the rollouts
at temperature 0.7: of all training steps for rows that RL trained, of an evaluation for the others.
"last" is a mean of the last quarter of the steps. acc is the accuracy with tools, a mean over K;
"acc off" is the same without tools.

Of each column the mean over seeds, then the mean difference to the row --to of the same seed, with
half of the 95% interval of Student's t: a difference that is larger than that has its sign shown.

Reads:  SEED/rl/ROW/log.jsonl of grpo.py, SEED/eval/ROW/summary.json of eval.py. Prints Markdown.
Run:    make table2 SEED=0; make table2 SEED=1; python bench/table2.py out/table2/*
"""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np

import launch

PAPER = {  # the paper's own f_tau and kappa of a row
    "base": "0.03, 0.45", "sft": "0.13, 2.50", "grpo": "0.13, 0.02", "para": "0.41, 0.21",
    "anchoring": "0.35, 0.19", "gating": "0.10, 1.36", "no-tool-reward": "0.33, 0.04",
    "no-gamma": "0.36, 0.27",
}


def mean(rows, column):
    return np.mean([row[column] for row in rows])


def read_row(folder, name):
    """The row of one seed's folder -> f_tau, kappa, both at the end, acc, acc off."""
    with open(f"{folder}/eval/{name}/summary.json") as f:
        cells = json.load(f)["results"]
    with_tools = [cell for cell in cells if cell["tools"] == "on"]
    without = [cell for cell in cells if cell["tools"] == "off"]
    steps = with_tools
    log = f"{folder}/rl/{name}/log.jsonl"
    if os.path.exists(log):
        steps = launch.read_jsonl(log)
    last = steps[-(len(steps) // 4 or 1):]
    return [mean(steps, "f_tau"), mean(steps, "kappa"), mean(last, "f_tau"), mean(last, "kappa"),
            mean(with_tools, "acc"), mean(without, "acc")]


def main():
    from scipy import stats

    parser = launch.parser(__doc__)
    parser.add_argument("folders", nargs="+", help="of `make table2`, one a seed")
    parser.add_argument("--to", default="grpo", help="row from which the differences are taken")
    args = parser.parse_args()
    names = sorted(os.listdir(f"{args.folders[0]}/eval"))
    rows = {}
    for name in names:
        rows[name] = np.array([read_row(folder, name) for folder in args.folders])  # [seeds, 6]
    num_seeds = len(args.folders)
    print(f"{num_seeds} seeds. Mean (difference to {args.to} ± half of the 95% interval)\n")
    print("| row | f_tau | kappa | last f_tau | last kappa | acc | acc off | the paper's |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        difference = rows[name] - rows[args.to]
        # of Student's t; NaN for one seed
        half = stats.t.ppf(0.975, num_seeds - 1) * stats.sem(difference)  # [6]
        cells = [name]
        for number, change, error in zip(rows[name].mean(0), difference.mean(0), half):
            cells.append(f"{number:.2f} ({change:+.2f} ± {error:.2f})")
        print("| " + " | ".join([*cells, PAPER.get(name, "")]) + " |")


if __name__ == "__main__":
    launch.run_main(main)
