"""
view.py (tests/test_view.py): runs, rollouts and evaluations -> one HTML page: a summary, curves,
tables, and episodes with the frames that the agent saw.

The page opens from disk, fetches nothing and runs no script. All rollouts of a prompt stand
together, because they saw the same overview. A token's background is the credit that grpo.py gave
it, A_task + A_fmt [t in struct(o)]: green above 0, red below. Dim text was inserted and not
sampled. "Right" means R_acc, or the score of an evaluation, of 0.5 or more.

Reads:  folders of sft.py, grpo.py and eval.py (also of --compare), folders that hold such folders,
        and JSONL of rollouts or records; the videos.
Writes: --out, whole or not at all.

  python tools/view.py grpo_out --out page.html
  python tools/view.py grpo_a grpo_b eval_out --prompts 100 --out page.html
"""
import fnmatch
import io
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import launch
import rewards
import rollout
import video
from evaluation.endpoint import jpeg_url
from plumbing.log import flat_numbers

# Title of a plot: patterns of its lines; a number deep in a row has a name like by_K/4/acc.
PLOTS = {
    "Loss": ["loss", "val_loss"],
    "Reward R": ["total"],
    "Accuracy R_acc": ["acc", "val/acc"],
    "Format reward, and f_tau": ["fmt", "f_tau"],
    "Executed calls a rollout (kappa)": ["kappa"],
    "Closed tags / opened tags": ["closure/*", "closed_think", "closed_tool_call", "closed_answer"],
    "Accuracy by K": ["by_K/*/acc"],
    "Accuracy by type": ["by_type/*/acc"],
    "Gap between engine and trainer, nats": ["gap", "gap_sub"],
    "Gradient norm": ["grad_norm"],
    "Groups with a signal": ["signal_groups"],
    "Sampled tokens a rollout": ["length"],
    "Seconds a step": ["rollout_s", "train_s", "step_s"],
    "Learning rate": ["lr"],
}
# Columns of tables, those that any row has: of summary.json, and of the last row of a log.
COLUMNS = ("name", "minus", "bench", "K", "tools", "n", "headline", "difference",
           "interval", "step", "total", "acc", "f_tau", "kappa", "loss", "val_loss", "grad_norm",
           "tokens", "no_answer", "truncated")


@dataclass
class Run:
    """A folder of a run or an evaluation."""

    name: str
    args: dict  # its args.json
    root: str  # folder of its videos
    log: list  # rows of log.jsonl
    files: list  # JSONL of episodes
    summary: dict  # summary.json of an evaluation


# ------------------------------------------------------------------------------------------------
# Files of the other scripts


def read_json(path):
    """A .json file -> its object; {} if there is none."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def find_folders(paths):
    """Paths -> {folder of a run, at a path or below it: its JSONL of episodes}."""
    folders = {}
    for path in paths:
        if os.path.isfile(path):
            folder = os.path.dirname(os.path.abspath(path)).removesuffix("/rollouts")
            folders.setdefault(folder, []).append(path)
        for folder, _, names in os.walk(path):
            files = [*Path(folder).glob("rollouts/*.jsonl"), *Path(folder).glob("records.*jsonl")]
            if files or "log.jsonl" in names or "summary.json" in names:
                folders[folder] = sorted(files)
    if not folders:
        raise launch.UserError(f"{' '.join(paths)}: no log.jsonl, no rollouts and no records there")
    return folders


def read_run(folder, files, video_root, faults):
    """A folder with its JSONL of episodes -> Run. Lines that cannot be read go into `faults`: the
    last one of a run that writes just now may be half written."""
    args, log, path = read_json(folder + "/args.json"), [], folder + "/log.jsonl"
    if os.path.exists(path) and os.path.getsize(path):
        log = launch.read_jsonl(path, ("step",), faults=faults)
    root = video_root or args.get("video_root")
    root = root or os.path.dirname(args.get("data") or f"{folder}/")  # as the scripts themselves do
    return Run(os.path.relpath(folder), args, root, log, files, read_json(folder + "/summary.json"))


def is_right(row):
    """Whether the answer of an episode earned half of its points or more."""
    return (row.get("score") or row["reward"].get("acc") or 0.0) >= 0.5


def read_groups(run, limit, only_wrong, faults):
    """-> groups of episodes of one prompt, at most 2 * limit, evenly taken. only_wrong: of those
    with a wrong answer."""
    groups = {}
    # A run may have thousands of files.
    files = run.files[:: max(1, len(run.files) // limit)]
    for path in filter(os.path.getsize, files):
        for row in launch.read_jsonl(path, ("task", "group", "sample", "turns"), faults=faults):
            if not (only_wrong and is_right(row)):
                groups.setdefault((row["group"], row["K"], row.get("tools")), []).append(row)
    return list(groups.values())[:: max(1, len(groups) // limit)]


# ------------------------------------------------------------------------------------------------
# Curves


def lines_of(log, patterns):
    """Rows of a log, patterns of PLOTS -> {name of a line: [(step, value)]}; null is no point."""
    lines = {}
    for row in log:
        for name, value in flat_numbers(row).items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                lines.setdefault(name, []).append((row["step"], value))
    return lines


def plot_svg(title, runs, patterns):
    """One plot of the lines of all runs -> SVG; "" if no line has two points."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9})  # texts stay texts
    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        for name, points in lines_of(run.log, patterns).items():
            if len(points) > 1:
                axes.plot(*zip(*points), label=f"{run.name} {name}", linewidth=1.2)
    if not axes.lines:
        return ""
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.5)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True)
    return "<svg" + text.getvalue().partition("<svg")[2]


# ------------------------------------------------------------------------------------------------
# Episodes


def frames_of(run, name, times, limit, cache):
    """Times in a video -> at most `limit` of the frames that were seen then: [(second, URL that
    holds the JPEG)]. Raises VideoError, or ValueError if no time lies in the video."""
    if not times:
        return []
    step = math.ceil(len(times) / limit)
    spec = {"video": name, "times": times[step // 2 :: step]}
    frames = video.load(spec, run.root, cache, 1024, 6144)
    return [(second, jpeg_url(image, 70)) for image, second in zip(frames.images, frames.seconds)]


def credits_of(row, turn):
    """The text of a turn -> [(text, credit of its tokens)], neighbours of equal credit joined."""
    if not row.get("advantage"):  # of an evaluation
        return [(row["turns"][turn], 0.0)]
    start, end = row["spans"][turn]
    credit = rewards.token_advantages(rollout.from_dict(row))[start:end]
    parts = []
    tokens = zip(credit, row["pieces"][turn])
    for credit, run_of_tokens in itertools.groupby(tokens, key=lambda token: token[0]):
        parts.append(("".join(piece for _, piece in run_of_tokens), credit))
    return parts


# ------------------------------------------------------------------------------------------------
# The page


def build_page(paths, limit=20, only_wrong=False, video_root=None):
    """-> (the page, lines that could not be read). limit: prompts of one run."""
    import jinja2

    faults, cache = [], video.FrameCache()

    def pictures(*args):
        try:
            return frames_of(*args, cache)
        except (video.VideoError, ValueError) as error:
            return [(str(error), None)]

    runs, last_rows, groups = [], [], []
    for folder, files in find_folders(paths).items():
        run = read_run(folder, files, video_root, faults)
        runs.append(run)
        if run.log:
            last_rows.append({"name": run.name, **run.log[-1]})
        for group in read_groups(run, limit, only_wrong, faults):
            groups.append((run, group))
    plots = [plot_svg(title, runs, patterns) for title, patterns in PLOTS.items()]
    # autoescape: texts of models and of data are never read as markup.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    environment.tests["right"] = is_right
    with open(__file__.removesuffix("py") + "html", encoding="utf-8") as file:
        template = environment.from_string(file.read())
    page = template.render(
        runs=runs, last_rows=last_rows, columns=COLUMNS, plots=plots, groups=groups,
        pictures=pictures, credits_of=credits_of)
    return page, faults


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="RUN_OR_JSONL", help="folders of runs or evaluations, or JSONL")
    add("--out", default="page.html", help="HTML file to write")
    add("--prompts", type=launch.positive, default=20, help="of each run, about, evenly taken")
    add("--wrong", action="store_true", help="show episodes with a wrong answer alone")
    add("--video-root", help="folder of the videos; default: what the run was given")
    args = parser.parse_args()
    page, faults = build_page(args.paths, args.prompts, args.wrong, args.video_root)
    launch.write_atomic(args.out, page)
    print(f"{args.out}: open it in a browser")
    for fault in faults:
        print(f"left out: {fault}")


if __name__ == "__main__":
    launch.run_main(main)
