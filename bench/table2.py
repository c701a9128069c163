"""
bench/table2.py: the paper's Table 2 from folders of `make table2`, one folder a seed.

f_tau is the format reward R_fmt and kappa the number of executed calls, both a mean of the rollouts
at temperature 0.7: of all training steps for rows that RL trained, of an evaluation for the others.
"last" is a mean of the last quarter of the steps. on, off: accuracy with and without tools, at each
K of the evaluation.

Of each column the mean over seeds, then the 95% interval (Student's t) of the difference to the row
--to of the same seed: without 0 in it the sign of the difference is shown.

The paper's own f_tau, kappa: base 0.03, 0.45; sft 0.13, 2.50; grpo 0.13, 0.02; para 0.41, 0.21;
anchoring 0.35, 0.19; gating 0.10, 1.36; no-tool-reward 0.33, 0.04; no-gamma 0.36, 0.27.

Reads:  SEED/rl/ROW/log.jsonl of grpo.py, SEED/eval/ROW/summary.json of eval.py. Prints Markdown.
Run:    make table2 SEED=0; make table2 SEED=1; python bench/table2.py out/table2/strong/*
"""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np

import launch


def read_row(folder, name):
    """The row of one seed's folder -> {column: number}."""
    cells = json.loads(launch.read_file(f"{folder}/eval/{name}/summary.json"))["results"]
    steps = [cell for cell in cells if cell["tools"] == "on"]
    log = f"{folder}/rl/{name}/log.jsonl"
    if os.path.exists(log):
        steps = launch.read_jsonl(log)
    columns = {}
    for column in ("f_tau", "kappa"):
        values = [step[column] for step in steps]
        columns[column] = np.mean(values)
        columns[f"last {column}"] = np.mean(values[-(len(values) // 4 or 1):])
    for cell in cells:
        columns[f"{cell['tools']} {cell['K']}"] = cell["acc"]
    return columns


def main():
    from scipy import stats

    parser = launch.parser(__doc__)
    parser.add_argument("folders", nargs="+", help="of `make table2`, one a seed")
    parser.add_argument("--to", default="grpo", help="row from which the differences are taken")
    args = parser.parse_args()
    rows = {}  # name -> numbers [seeds, columns]
    for name in sorted(os.listdir(f"{args.folders[0]}/eval")):
        read = [read_row(folder, name) for folder in args.folders]
        rows[name] = np.array([list(columns.values()) for columns in read])
    print(f"{len(read)} seed(s). Mean [95% interval of the difference to {args.to}]\n")
    head = ["row", *read[0]]
    print("|", " | ".join(head), "|")
    print("|", " | ".join("---" for _ in head), "|")
    for name, row in rows.items():
        cells = [name]
        for mean, differences in zip(row.mean(0), (row - rows[args.to]).T):
            cells.append(f"{mean:.2f}")
            if len(row) > 1:  # one seed has no interval
                low, high = stats.ttest_1samp(differences, 0).confidence_interval()
                cells[-1] += f" [{low:+.2f}, {high:+.2f}]"
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    launch.run_main(main)
