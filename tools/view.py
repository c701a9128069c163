"""
view.py (tests/slow/test_page.py): runs, rollouts and evaluations -> ONE HTML file: curves, episodes
with frames, tables.

The file opens from disk and fetches nothing. This script puts data and thumbnails (JPEGs, within
--max-mb) into a copy of page.html, which holds styles, script and the list of curves and tables. If
you copy this script, copy page.html too.

A token's colour is the credit that grpo.py gave it, A_task + A_fmt [t in struct(o)]. struct(o) is
computed again from the text of the sampled tokens, without a tokenizer. Inserted text (a forced
<think>, tool responses) is dim. "Correct" means an R_acc, or an evaluation's score, of 0.5 or more.

Reads:  folders of sft.py, grpo.py and eval.py (also of --compare), folders that hold such folders,
        and rollout JSONL. The page counts lines and records that cannot be read.
Writes: --out, whole or not at all.

  python tools/view.py grpo_out --out page.html
  python tools/view.py grpo_a grpo_b eval_out --names struct sequence eval --out page.html
"""
import base64
import bisect
import fnmatch
import io
import json
import os
import re
import sys
from collections import Counter, defaultdict
from urllib.parse import quote

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rewards
from plumbing import arguments

# ---- files of the other scripts ----------------------------------------------------------------

def read_objects(path, troubles):
    """JSONL, or a .json of one object -> list of dicts; [] if there is no such file. A line that is
    no JSON object, or no UTF-8, is counted in `troubles`, which names the first such line."""
    if not launch.is_file(path) or not os.path.getsize(path):  # a run has just begun
        return []
    rows, faults = [], []
    try:
        if path.endswith(".json"):
            rows = [launch.parse_json(launch.read_file(path))]
        else:
            rows = launch.read_jsonl(path, faults=faults)
    except (OSError, ValueError, launch.UserError) as error:
        faults.append(f"{path}: {error}")
    objects = [row for row in rows if isinstance(row, dict)]  # "null" is JSON too
    if bad := len(faults) + len(rows) - len(objects):
        troubles[faults[0] if faults else f"{path}: JSON that is no object"] += bad
    return objects


def find_runs(path):
    """Path -> list of the folders, at it and below it, that hold something to show; top down."""
    paths = []
    for folder, below, files in launch.walk(path):  # no links: they may lead in a circle
        # Leave out checkpoints and a run's rollouts. os.walk goes on from this list, so it is
        # changed in place.
        below[:] = [name for name in sorted(below)
                    if name != "rollouts" and not name.startswith((".", "step_"))]
        # A run, a comparison or a finished evaluation, an evaluation under way.
        if any(name.startswith(("log.jsonl", "summary.json", "records.")) for name in files):
            paths.append(folder)
    return paths


def record_files(path):
    """A folder, or JSONL -> its files of rollouts, by step, then rank, and of an evaluation."""
    if os.path.isfile(path):
        return [path]
    return [os.path.join(at, name)
            for at, pattern in ((f"{path}/rollouts", "*.jsonl"), (path, "records.*jsonl"))
            for name in sorted(fnmatch.filter(next(launch.walk(at), [()] * 3)[2], pattern))]


def load_source(path, name, troubles):
    """A folder, or JSONL -> {"kind", "stage", "name", "args", "root", "log", "rows", "tables"}."""
    # A lone JSONL has no arguments and no log. {} stands for a missing file.
    args = [*read_objects(f"{path}/args.json", troubles), {}][0]
    summary = [*read_objects(f"{path}/summary.json", troubles), {}][0]
    tables = {key: [row for row in rows if isinstance(row, dict)]  # of an evaluation
              for key, rows in summary.items() if isinstance(rows, list)}
    log = read_objects(f"{path}/log.jsonl", troubles)  # a row for each step
    # Videos are relative to it.
    root = os.path.dirname(os.path.abspath(path)) if os.path.isfile(path) else path
    if isinstance(args.get("data"), str):
        root = os.path.dirname(os.path.abspath(args["data"]))  # as the scripts themselves do
    # Not yet checked.
    rows = [row for file in record_files(path) for row in read_objects(file, troubles)]
    stage = "sft" if any("trained_tokens" in row for row in log) else "grpo"
    return {"kind": "run" if log else "eval", "stage": stage, "name": name, "args": args,
            "log": log, "rows": rows, "tables": tables, "root": args.get("video_root") or root}


def load_sources(paths, names, troubles):
    """The command line's paths, and their names or None -> list of sources."""
    sources = []
    for n, path in enumerate(paths):
        if not os.path.exists(path):
            raise launch.UserError(f"{path}: no such file or folder")
        members = [path] if os.path.isfile(path) else find_runs(path)
        if not members:
            raise launch.UserError(
                f"{path}: neither log.jsonl nor records nor summary.json is in it or below it")
        label = names[n] if names else os.path.basename(os.path.normpath(path))
        prefix = f"{label}/" if names or len(paths) > 1 else ""  # the only folder's says nothing
        for folder in members:
            below = os.path.relpath(folder, path)
            sources.append(load_source(folder, label if below == "." else prefix + below, troubles))
    # Runs come first, SFT before GRPO, which alone has episodes.
    return sorted(sources, key=lambda source: (not source["log"], bool(source["rows"])))


def bin_centres(count):
    """Centres of `count` equal shares of a whole -> list of fractions in (0, 1)."""
    return [(n + 0.5) / count for n in range(count)]


def mode_of(row):
    """Record or result of an evaluation -> "on" or "off" (tools), with what eval.py --show changed:
    "off blank". None for training."""
    show = row.get("show") or "real"
    return row.get("tools") if show == "real" else f"{row.get('tools')} {show}"


def subsample(rows, limit):
    """At most `limit` episodes: whole groups, evenly spread over the steps. If a run grows, groups
    leave one by one: the choice is by the place's bits read backwards (van der Corput)."""
    by_prompt = defaultdict(list)
    for row in rows:  # an evaluation asks a prompt at several K, with tools and without
        by_prompt[str(row.get("group")), str(row.get("K")), str(mode_of(row))].append(row)
    groups = list(by_prompt.values())  # in the order of the files: by step
    few = max(1, round(limit * len(groups) / len(rows))) if rows else 0
    places, chosen = sorted(range(len(groups)), key=lambda n: f"{n:032b}"[::-1])[:few], []
    for group in (groups[n] for n in sorted(places)):
        chosen += group if len(chosen) + len(group) <= limit else []  # groups differ in size
    return chosen


# ---- episodes, as the page shows them ----------------------------------------------------------

def number(value, digits=4):
    """A finite number -> rounded; all else -> None: the page's JSON has no NaN and no infinity."""
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return round(value, digits) if numeric and abs(value) < 1e300 else None  # NaN < x is False


def credit_segments(pieces, ended, format_credit, advantage):
    """The sampled tokens of a turn, as texts -> [[kind, text, credit]], neighbours joined."""
    structural = rewards.structural_mask([piece.encode("utf-8", "replace") for piece in pieces])
    task = number(advantage.get("task"))  # None if no advantage was recorded
    fmt, parts = number(advantage.get("fmt")) or 0.0, []
    for n, (piece, tag) in enumerate(zip(pieces, structural)):
        kind = "t" if tag else "s"  # structural, or merely sampled
        if ended and n + 1 == len(pieces):
            kind = "e"  # the end of the turn, sampled too
        if parts and parts[-1][0] == kind:  # the credit is the same: a turn has one advantage
            parts[-1][1] += piece
            continue
        reached = format_credit == "sequence" or tag and format_credit != "none"
        credit = None if task is None else round(task + fmt * reached, 3)
        parts.append([kind, piece, credit])
    return parts if ended else [*parts, ["c", "", None]]  # cut off


def shown_turns(row, calls, format_credit):
    """A record -> its turns, each a list of segments: "i" was inserted before or after."""
    finish, turns = row.get("finish") or [], []
    for n, text in enumerate(row["turns"]):
        ended = finish[n : n + 1] == ["stop"]
        # An endpoint returns no tokens: then take characters, and "" for the end of a turn.
        tokens = row["pieces"][n] if row["pieces"] else [*str(text), *[""] * ended]
        turn_pieces = [str(piece) for piece in tokens[:20_000]]  # a page must stay a page
        parts = [["i", "<think>\n", None]] if row["think_open"] else []
        parts += credit_segments(turn_pieces, ended, format_credit, row.get("advantage") or {})
        for call in calls:  # after the last turn nothing was inserted
            answered = call["status"] != "not_run" or call["summary"]
            if answered and call["turn"] == n < len(row["turns"]) - 1:
                text = call["summary"] or f"[{call['frames']} frames]"  # --crop-response frames
                parts.append(["i", f"\n<tool_response>\n{text}\n</tool_response>", None])
        turns.append(parts)
    return turns


def seen_seconds(call):
    """A recorded call -> the times, in seconds, of the frames that answered it; [] if the record
    does not hold them."""
    if "seconds_seen" in call:  # frames that the main agent saw itself
        seconds = call["seconds_seen"]
    elif "sub" in call:  # frames that a sub-agent saw, in a rollout
        seconds = call["sub"]["vision"][0]["seconds"]
    else:  # the same of an evaluation
        seconds = call.get("sub_seconds") or []
    return [round(float(second), 3) for second in seconds if number(second) is not None]


def shown_call(call):
    """A recorded call -> the part of it that the page shows."""
    return {
        "name": str(call.get("name") or "")[:40],  # of the tool; not in records of old
        "turn": int(call.get("turn", 0)),  # the turn that wrote it, from 0
        "start": number(call.get("start")), "end": number(call.get("end")),  # s of the video
        "status": str(call.get("status")), "summary": str(call.get("summary") or "")[:2000],
        "seconds": number(call.get("seconds"), 2),  # that it took
        "frames": number(call.get("frames_seen")), "times": seen_seconds(call),
        "thumbs": [],  # add_thumbnails fills them in
    }


def shown_episode(row, source, source_index):
    """A record of a source -> the page's episode. Other objects raise: see episodes_of."""
    task = row["task"]
    reward, advantage = row.get("reward") or {}, row.get("advantage") or {}
    calls = [shown_call(call) for call in row.get("calls") or []]
    looked = (row.get("vision") or [{"seconds": []}])[0]  # the overview was looked at first
    times = row.get("frame_times") or looked["seconds"]  # of an evaluation, of a rollout
    times = [round(float(second), 3) for second in times if number(second) is not None]
    last = max([*times, *(call["end"] or 0.0 for call in calls), 1.0])
    step = int(row["policy_step"]) + 1 if "policy_step" in row else None  # from 0
    budget = str(row.get("budget", row["K"]))  # "gated" has one K for each item
    tools = None if row.get("tools") is None else str(mode_of(row))  # of an evaluation
    # The link names the episode instead of its place, so the next page has the same link.
    link = "/".join([
        source["name"], *([] if step is None else [f"step{step}"]), str(task["id"]), f"K{budget}",
        *([] if tools is None else [f"tools-{tools}"]), str(int(row["sample"]))])  # fmt: skip
    # Types are forced and texts are cut, so that a damaged record neither stops nor fills the page.
    return {
        "source": source_index, "group": str(row["group"]), "sample": int(row["sample"]),
        "step": step, "K": budget, "tools": tools,
        "link": quote(link, errors="replace"),
        "id": str(task["id"]), "video": str(task["video"]), "gold": str(task["answer"]),
        "question": str(task["question"])[:4000],
        "options": [str(option) for option in task.get("options") or []],
        "status": str(row["status"]), "error": str(row.get("error") or "")[:500],
        "extracted": None if row.get("extracted") is None else str(row["extracted"]),
        "acc": number(row["score"] if "score" in row else reward.get("acc")),
        "reward": {term: number(reward.get(term)) for term in ("total", "acc", "fmt", "tool")},
        "advantage": {term: number(advantage.get(term)) for term in ("task", "fmt")},
        "duration": number((row.get("timing") or {}).get("video_s")) or last,  # seconds
        "evidence": [[float(start), float(end)] for start, end in task.get("evidence") or []],
        "times": times, "thumbs": [], "calls": calls,  # times of the overview frames
        "turns": shown_turns(row, calls, source["args"].get("format_credit", "struct"))}


def episodes_of(sources, limit, troubles):
    """Sources -> the page's episodes; each source that has any gets an equal share of `limit`."""
    share, episodes = limit // max(1, sum(bool(source["rows"]) for source in sources)), []
    for index, source in enumerate(sources):
        for row in subsample(source["rows"], max(1, share)):
            try:
                episodes.append(shown_episode(row, source, index))
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError,
                    RecursionError) as error:  # int() of an infinity, str() of a deep list
                reason = f"records that are not episodes ({type(error).__name__})"
                troubles[f"{source['name']}: {reason}"] += 1
    # Groups stay together; a step's K are sorted by size, and "gated" comes after the numbers.
    episodes.sort(key=lambda e: (e["source"], e["step"] or 0, e["group"], len(e["K"]), e["K"],
                                 str(e["tools"]), e["sample"]))
    return episodes


# ---- thumbnails --------------------------------------------------------------------------------

def evenly(times, limit):
    """At most `limit` of the times, evenly spread."""
    return [times[int(share * len(times))] for share in bin_centres(min(limit, len(times)))]


def wanted_frames(episode, limit=8):
    """-> [(second, list it goes into)]: `limit` frames of the overview, half as many of every
    window that was read. All are frames that an agent saw."""
    wants = [(second, episode["thumbs"]) for second in evenly(episode["times"], limit)]
    for call in episode["calls"]:
        if call["status"] == "ok":
            wants += [(second, call["thumbs"])
                      for second in evenly(call["times"], max(1, limit // 2))]
    return wants


def jpeg(image):
    """uint8 [H, W, 3] -> JPEG in base64, as a page embeds it."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=70)
    return base64.b64encode(buffer.getvalue()).decode()


def add_thumbnails(episodes, sources, root, pixels, budget, troubles):
    """
    Fill the thumbs of episodes and calls with [second, place] -> list of JPEGs in base64.

    second: of the frame that is shown. place: in that list; None if the video could not be read,
    "full" if `budget`, the characters of all JPEGs, was spent. pixels: of a frame at most.
    """
    from tqdm import tqdm

    import video

    by_video = defaultdict(list)  # a video is opened once, for all its episodes
    for episode in episodes:
        folder = root or sources[episode["source"]]["root"]
        by_video[folder, episode["video"]] += wanted_frames(episode)
    cache = video.FrameCache(2**28)  # bytes
    pictures = []  # in base64
    stored = {}  # key of a frame -> its place in pictures: a frame is stored once
    for (folder, name), wants in tqdm(by_video.items(), desc="thumbnails", disable=None):
        decoded = {}  # second -> (time of its frame, key of its frame, JPEG)
        missing = sorted({second for second, _ in wants})
        try:
            if missing and budget > 0:  # a page that is full opens no more videos
                path = video.resolve(name, folder)  # raises if the name leads out of the folder
                frames = video.frames_at(path, missing, 1024, pixels, cache)
                for second in missing:
                    # The frame on display then. A record holds milliseconds: 609.4333 is 609.433.
                    at = max(0, bisect.bisect(frames.seconds, second + 0.001) - 1)
                    decoded[second] = (float(frames.seconds[at]), frames.frame_keys[at],
                                       jpeg(frames.images[at]))
        except (video.VideoError, ValueError) as error:  # ValueError: no second lies within it
            troubles[str(error)] += 1
        for second, thumbs in wants:
            seen_at, key, picture = decoded.get(second, (second, None, ""))
            if key and key not in stored and budget > 0:  # the last one may go beyond
                stored[key] = len(pictures)
                pictures.append(picture)
                budget -= len(picture)
            place = stored.get(key, None if budget > 0 and not key else "full")
            thumbs.append([round(seen_at, 3), place])
    return pictures


# ---- curves and tables: which ones, page.html says ----------------------------------------

def value_at(row, keys):
    """Follow the keys down a row -> what is there, None if one of them is missing."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def points_of(log, keys):
    """A log and the keys that lead to a number in its rows -> [[step, number]]. A row without that
    number, or with null, is no point."""
    # 8: a rate is 2e-6
    points = [[number(row.get("step")), number(value_at(row, keys), 8)] for row in log]
    return [point for point in points if None not in point]


def curve_keys(log, path):
    """A log and a key as page.html has it -> [(name for the star, keys)]: a line for each name that
    any row has at the star, one line if the key has no star."""
    keys = path.split(".")
    if "*" not in keys:
        return [("", keys)]
    star = keys.index("*")
    values = [value_at(row, keys[:star]) for row in log]
    names = set().union(*(value for value in values if isinstance(value, dict)))
    # The star is replaced after the split: a name is any text, with dots too. JSON's keys are
    # texts: by length "4" stands before "16".
    return [(name, [*keys[:star], name, *keys[star + 1 :]])
            for name in sorted(names, key=lambda name: (len(name), name))]


def curves_of(sources, plots):
    """Sources, and {stage: plots} -> [{"stage", "title", "series": [{"name", "run", "points"}]}] of
    the plots that have any. A line of held-out numbers, which only some steps have, is marked with
    "held_out": True."""
    curves = []
    for stage, (title, _, _, lines, _) in [(key, plot) for key in plots for plot in plots[key]]:
        series = []
        for run, source in enumerate(sources):
            for label, path in lines.items() if source["stage"] == stage else ():
                for star, keys in curve_keys(source["log"], path):
                    name = f"{source['name']} {label.replace('*', star)}".strip()
                    points = points_of(source["log"], keys)
                    mark = {"held_out": True} if path.startswith("val") else {}
                    if points:
                        series.append({"name": name, "run": run, "points": points, **mark})
        # One point is no curve, and a plot of nothing else says nothing.
        if any(len(line["points"]) > 1 for line in series):
            curves.append({"stage": stage, "title": title, "series": series})
    return curves


def cell(value, sign="", name=""):
    """A value of a summary, of any type -> text; sign "+" writes a number with its sign. name: of
    the value in the summary."""
    if isinstance(value, dict):  # errors by kind
        value = sum(count for count in value.values() if isinstance(count, int))
    if isinstance(value, list):  # an interval
        return f"[{', '.join(cell(bound, sign) for bound in value)}]"
    if isinstance(value, float) and name in ("p", "p_holm") and value < 0.001:
        return "< 0.001"  # no p is zero
    if isinstance(value, float) and name.endswith(("frames", "tokens")):
        return f"{value:.0f}"  # a mean of whole numbers
    if isinstance(value, float):
        return f"{value:{sign}.3f}"
    return "-" if value is None else str(value)


def cost_curves(rows):
    """Rows of a table -> [{"name", "mode", "points": [[tokens per answer, headline, K]]}]: a line
    for each folder, benchmark and mode whose answers' tokens are known."""
    lines = defaultdict(list)
    for row in rows:
        cost = row["cost"] if isinstance(row.get("cost"), dict) else row  # of one folder, of many
        point = [number(cost.get("tokens")), number(row.get("headline"))]
        if None not in point:
            name = " ".join(str(row[key]) for key in ("name", "bench") if row.get(key))
            lines[name, str(mode_of(row))].append([*point, str(row.get("K"))])
    return [{"name": name, "mode": mode, "points": sorted(points)}
            for (name, mode), points in lines.items()]


def tables_of(sources, tables):
    """-> [{"key", "title", "head", "rows", "lines"}] of evaluations."""
    listed = []
    for source in sources:
        for key, (words, columns) in tables.items():  # {head of a column: template of its cells}
            sign = "+" if key == "differences" else ""  # "+0.020" is a gain
            rows, results = [], source["tables"].get(key, [])
            for row in results:
                texts = {name: cell(value, sign * (name[0] != "p"), name)
                         for name, value in row.items()}
                texts = defaultdict(lambda: "-", texts)  # for what the row lacks
                # The templates are ours; texts of the data are only put into them.
                rows.append([template.format_map(texts) for template in columns.values()])
            if rows:
                title = source["name"] + words
                listed.append({"key": key, "title": title, "head": list(columns), "rows": rows,
                              "lines": cost_curves(results)})
    return listed


# ---- the page ----------------------------------------------------------------------------------

def page_template():
    """page.html beside this script -> (text before the data, text after it, its contents)."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")
    with open(path, encoding="utf-8") as file:
        before, after = file.read().split("/*DATA*/")
    contents = re.search(r'<script id="contents"[^>]*>(.*?)</script>', before, re.DOTALL)
    return before, after, json.loads(contents[1])


def script_json(value):
    """A value as JSON that may stand inside <script>: no "<" is left that could end the element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def build_page(paths, names, out, episodes, max_mb, root, pixels):
    """Writes the page `out` -> its data, of which page.html says more."""
    before, after, contents = page_template()  # first: decoding frames may take minutes
    troubles = Counter()  # reason why something could not be read -> how often
    sources = load_sources(paths, names, troubles)
    chosen = episodes_of(sources, episodes, troubles)
    data = {
        "sources": [{key: source[key] for key in ("name", "kind", "stage", "args")}
                    for source in sources],
        "curves": curves_of(sources, contents["plots"]),
        "tables": tables_of(sources, contents["tables"]),
        "episodes": chosen,
        "found": sum(len(source["rows"]) for source in sources),  # before groups were left out
    }
    # Thumbnails get the bytes that are left. The places of an episode's thumbnails take some 200.
    budget = int(max_mb * 2**20) - len(before + script_json(data) + after) - 200 * len(chosen)
    # This also fills the thumbs of the episodes that are in `data` already.
    data["pictures"] = add_thumbnails(chosen, sources, root, pixels, budget, troubles)
    data["troubles"] = troubles.most_common(50)  # [[why, how often]]
    launch.write_atomic(out, before + script_json(data) + after)
    return data


def line_of(out, data):
    """A page and its data -> the line that the terminal shows."""
    bad = sum(count for _, count in data["troubles"])
    note = f"could not be read: {bad}, listed on the page; " * bool(bad) + "open it in a browser"
    return (f"{out}: {os.path.getsize(out) / 2**20:.1f} MiB, {len(data['episodes'])} of "
            f"{data['found']} episodes, {len(data['pictures'])} thumbnails; {note}")


def main():
    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="RUN_OR_JSONL", help="folders of runs or evaluations, or JSONL")
    add("--out", default="page.html", help="HTML file to write")
    add("--names", nargs="+", help="one name per path; default: its last part")
    add("--episodes", type=int, default=2000, help="at most; whole groups, spread over the steps")
    add("--max-mb", type=float, default=20.0, help="MiB; thumbnails beyond are left out and marked")
    add("--thumb-pixels", dest="pixels", type=int, default=6144, help="of a thumbnail, at most")
    add("--video-root", dest="root", help="folder of the videos; default: what the run was given")
    options = vars(parser.parse_args())
    if options["names"] and len(options["names"]) != len(options["paths"]):
        raise launch.UserError(f"--names: {len(options['names'])} of {len(options['paths'])} paths")
    if options["episodes"] < 0 or not options["max_mb"] > 0 or options["pixels"] < 1024:
        raise launch.UserError("--episodes may not be negative, --max-mb must be above 0, "
                               "--thumb-pixels at least 1024")
    if launch.is_file(options["out"]):
        with open(options["out"], "rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise launch.UserError(f"--out {options['out']} is no page; give another name")
    # Before the frames are decoded.
    launch.make_out(os.path.dirname(os.path.abspath(options["out"])))
    print(line_of(options["out"], build_page(**options)))


if __name__ == "__main__":
    launch.run_main(main)
