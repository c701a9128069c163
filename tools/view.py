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
  python tools/view.py grpo_a grpo_b eval_out --episodes 400 --out page.html
"""
import base64
import fnmatch
import glob
import io
import json
import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rewards
import video
from plumbing.log import flat_numbers

# Title of a plot: patterns of its lines; a number deep in a row has a name like by_K.4.acc.
PLOTS = {
    "Loss": ["loss", "val_loss"],
    "Reward R": ["total"],
    "Accuracy R_acc": ["acc", "val.acc"],
    "Format reward, and f_tau": ["fmt", "f_tau"],
    "Executed calls a rollout (kappa)": ["kappa"],
    "Closed tags / opened tags": ["closure.*", "closed_think", "closed_tool_call", "closed_answer"],
    "Accuracy by K": ["by_K.*.acc"],
    "Accuracy by type": ["by_type.*.acc"],
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
            files = glob.glob(glob.escape(folder) + "/rollouts/*.jsonl")
            files += glob.glob(glob.escape(folder) + "/records.*jsonl")
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
    if root is None:  # as the scripts themselves do
        root = os.path.dirname(args.get("data") or files[0] if files else folder)
    return Run(os.path.relpath(folder), args, root, log, files,
               read_json(folder + "/summary.json"))


def is_right(row):
    """Whether the answer of an episode earned half of its points or more."""
    score = row["score"] if "score" in row else row["reward"].get("acc")
    return (score or 0.0) >= 0.5


def read_groups(run, limit, wrong, faults):
    """-> groups of episodes of one prompt, about `limit` episodes in all, evenly taken. wrong: only
    those with a wrong answer."""
    groups = []
    # A run may have thousands of files. One holds a group of eight or more.
    files = run.files[:: max(1, 8 * len(run.files) // limit)]
    for path in filter(os.path.getsize, files):
        by_prompt, num_rows = {}, 0
        for row in launch.read_jsonl(path, ("task", "group", "sample", "turns"), faults=faults):
            key = (row["group"], row["K"], row.get("tools"))
            if not (wrong and is_right(row)):
                by_prompt.setdefault(key, []).append(row)
                num_rows += 1
        groups += list(by_prompt.values())[:: max(1, num_rows * len(files) // limit)]
    return groups


# ------------------------------------------------------------------------------------------------
# Tables and curves


def text_of(value):
    """A value of a table -> text."""
    if isinstance(value, list):  # an interval
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


def tables_of(runs):
    """-> [(title, rows)]: the last numbers of every log, then the tables of every evaluation."""
    last_rows = []
    for run in runs:
        row = {"name": run.name}
        for logged in run.log:  # not all steps have all numbers
            row.update((name, value) for name, value in logged.items() if value is not None)
        if run.log:
            last_rows.append(row)
    tables = [("Last numbers of the logs", last_rows)]
    for run in runs:
        tables += [(f"{run.name}: {title}", rows) for title, rows in run.summary.items()
                   if isinstance(rows, list)]
    return tables


def lines_of(log, patterns):
    """Rows of a log, patterns of PLOTS -> {name of a line: [(step, value)]}; null is no point."""
    lines = {}
    for row in log:
        for name, value in flat_numbers(row, ".").items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                lines.setdefault(name, []).append((row["step"], value))
    return lines


def plot_svg(title, runs, patterns):
    """One plot of the lines of all runs -> SVG; "" if no line has two points."""
    drawn = []
    for run in runs:
        for name, points in lines_of(run.log, patterns).items():
            label = name if len(runs) == 1 else f"{run.name} {name}"
            if len(points) > 1:
                drawn.append((label, points))
    if not drawn:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    # Texts stay texts, and the same run gives the same bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9})
    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    axes = figure.subplots()
    for label, points in drawn:
        axes.plot(*zip(*points), label=label, linewidth=1.2)
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.5)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :]


# ------------------------------------------------------------------------------------------------
# Episodes


def overview_seconds(row):
    """An episode -> times of its overview frames: in a record of eval.py, or in a rollout."""
    if "frame_times" in row:
        return row["frame_times"]
    return row["vision"][0]["seconds"] if row["vision"] else []


def frames_of(run, name, times, limit, cache):
    """Times in a video -> at most `limit` of the frames that were seen then: [(second, JPEG in
    base64)]. Raises VideoError, or ValueError if no time lies in the video."""
    from PIL import Image

    count = min(limit, len(times))
    if count == 0:
        return []
    wanted = [times[int((n + 0.5) * len(times) / count)] for n in range(count)]
    frames, pictures = video.load({"video": name, "times": wanted}, run.root, cache, 1024, 6144), []
    for image, second in zip(frames.images, frames.seconds):
        jpeg = io.BytesIO()
        Image.fromarray(image).save(jpeg, "JPEG", quality=70)
        pictures.append((second, base64.b64encode(jpeg.getvalue()).decode()))
    return pictures


def timeline_of(row):
    """An episode -> what lies on the bar of its video, in percent of the video: [(kind, left,
    width)]. Kind "frame" is a frame of the overview, "evidence" where the answer can be seen, and
    else the status of a call."""
    spans = [("frame", second, second) for second in overview_seconds(row)]
    for call in row["calls"]:
        if call["start"] is not None:
            spans.append((call["status"], call["start"], call["end"]))
    spans += [("evidence", start, end) for start, end in row["task"].get("evidence") or []]
    duration = row["timing"].get("video_s") or max([end for _, _, end in spans], default=1.0)
    return [(kind, 100 * start / duration, 100 * (end - start) / duration)
            for kind, start, end in spans]


def credits_of(row, turn, format_credit):
    """The text of a turn -> [[text, credit of its tokens]], neighbours of equal credit joined."""
    # An endpoint returns no tokens: then a character is one.
    pieces = row["pieces"][turn] if row["pieces"] else row["turns"][turn]
    structural = rewards.structural_mask([piece.encode("utf-8", "replace") for piece in pieces])
    advantage, parts = row.get("advantage", {}), []  # an evaluation has none
    for piece, in_struct in zip(pieces, structural):
        credit = advantage.get("task", 0.0)
        if format_credit == "sequence" or (in_struct and format_credit != "none"):
            credit += advantage.get("fmt", 0.0)
        if parts and parts[-1][1] == credit:
            parts[-1][0] += piece
        else:
            parts.append([piece, credit])
    return parts


# ------------------------------------------------------------------------------------------------
# The page


def build_page(paths, limit=200, wrong=False, video_root=None):
    """-> (the page, number of its episodes, lines that could not be read)."""
    import jinja2

    faults, cache = [], video.FrameCache()

    def pictures(*args):
        try:
            return frames_of(*args, cache)
        except (video.VideoError, ValueError) as error:
            return [(str(error), None)]

    runs = [read_run(folder, files, video_root, faults)
            for folder, files in find_folders(paths).items()]
    logged = [run for run in runs if run.log]
    plots = [plot_svg(title, logged, patterns) for title, patterns in PLOTS.items()]
    num_with_episodes = sum(bool(run.files) for run in runs)
    groups = []
    for run in runs:
        found = read_groups(run, max(1, limit // max(1, num_with_episodes)), wrong, faults)
        groups += [(run, group) for group in found]
    num_episodes = sum(len(group) for _, group in groups)
    # autoescape: texts of models and of data are never read as markup.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    environment.tests["right"] = is_right
    environment.globals.update(
        pictures=pictures, timeline_of=timeline_of, credits_of=credits_of,
        overview_seconds=overview_seconds, text_of=text_of)
    with open(os.path.splitext(os.path.abspath(__file__))[0] + ".html", encoding="utf-8") as file:
        template = environment.from_string(file.read())
    page = template.render(runs=runs, plots=plots, tables=tables_of(runs), columns=COLUMNS,
                           groups=groups, num_episodes=num_episodes)
    return page, num_episodes, faults


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="RUN_OR_JSONL", help="folders of runs or evaluations, or JSONL")
    add("--out", default="page.html", help="HTML file to write")
    add("--episodes", type=int, default=200, help="show about so many, evenly taken")
    add("--wrong", action="store_true", help="show episodes with a wrong answer alone")
    add("--video-root", help="folder of the videos; default: what the run was given")
    return parser.parse_args()


def main():
    args = parse_args()
    if not args.out.endswith(".html"):
        raise launch.UserError(f"--out {args.out}: the name of a page ends with .html")
    page, num_episodes, faults = build_page(args.paths, args.episodes, args.wrong, args.video_root)
    launch.write_atomic(args.out, page)
    for fault in faults[:5]:
        print(f"left out: {fault}")
    print(f"{args.out}: {len(page) / 2**20:.1f} MiB, {num_episodes} episodes, {len(faults)} lines "
          "left out; open it in a browser")


if __name__ == "__main__":
    launch.run_main(main)
