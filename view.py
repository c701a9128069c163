"""
view.py: runs, rollouts and evaluations -> ONE HTML file that opens from disk: curves, episodes with their frames, tables.

Nothing is fetched when the page opens: styles, script, data and thumbnails (JPEGs made by video.py) are inside it, within --max-mb. The
plots are SVG drawn by 80 lines of script: a plotting library would be ten times the code that draws and still know no episodes.

A token's colour is its credit, A_task + A_fmt [t in struct], as grpo.py gave it; structure is found in the text by rewards.py, so no
tokenizer is needed. Inserted text (forced <think>, tool responses) is dimmed. "Correct" means R_acc, or an evaluation's score, >= 0.5.

Reads:  run folders of sft.py and grpo.py, rollout JSONL, folders of eval.py (also of eval.py --compare), or a folder that holds such.
        Lines and records that cannot be read are counted on the page, never fatal.
Writes: --out, whole or not at all.

  python view.py grpo_out --out page.html
  python view.py grpo_a grpo_b eval_out --names struct sequence eval --out page.html
"""
import argparse
import base64
import io
import json
import math
import os
from collections import Counter

import model
import rewards
import video

# ---------------------------------------------------------------------------------------------------------------------
# Reading what the other scripts wrote


def read_lines(path, troubles):
    """JSONL -> list of dicts. Lines that are none (torn by a crash, damaged) are counted in `troubles`."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.strip():
                troubles[f"{path}: lines that are no JSON objects"] += 1
    return rows


def read_object(path, troubles):
    """JSON file -> dict, {} where there is none or it is none (counted)."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        troubles[f"{path}: no JSON object"] += 1
    return value if isinstance(value, dict) else {}


def find(path):
    """What is below a path -> list of ("run" | "eval" | "table" | "rollouts", path), the path itself first."""
    if os.path.isfile(path):
        return [("rollouts", path)]
    if not os.path.isdir(path):
        raise model.UserError(f"{path}: no such file or folder")
    inside = set(os.listdir(path))
    found = [("run", path)] if "log.jsonl" in inside else []
    if any(n.startswith("records.") for n in inside):
        found.append(("eval", path))
    elif "summary.json" in inside:
        found.append(("table", path))
    for name in sorted(inside):
        below = os.path.join(path, name)
        if os.path.isdir(below) and not os.path.islink(below) and not name.startswith((".", "step_")) and name != "rollouts":
            found += find(below)
    return found


def load_source(kind, path, name, troubles):
    """One thing found -> {"kind", "name", "args", "root", "log", "rows", "summary"}; rows: episodes as they were written."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    args = read_object(os.path.join(folder, "args.json"), troubles) if kind != "rollouts" else {}
    data = args.get("data")
    root = args.get("video_root") or (os.path.dirname(os.path.abspath(data)) if isinstance(data, str) else folder)
    files = {"run": "rollouts", "eval": ".", "rollouts": None, "table": None}[kind]
    rows = []
    if kind == "rollouts":
        rows = read_lines(path, troubles)
    elif files and os.path.isdir(os.path.join(folder, files)):
        names = [n for n in sorted(os.listdir(os.path.join(folder, files))) if n.endswith(".jsonl") and (kind == "run" or n.startswith("records."))]
        rows = [row for n in names for row in read_lines(os.path.join(folder, files, n), troubles)]
    log = read_lines(os.path.join(folder, "log.jsonl"), troubles) if kind == "run" else []
    summary = read_object(os.path.join(folder, "summary.json"), troubles) if kind in ("eval", "table") else {}
    return {"kind": kind, "name": name, "args": args, "root": root, "log": log, "rows": rows, "summary": summary}


def thinned(rows, most):
    """At most `most` episodes: whole groups, evenly spread over the steps."""
    groups = {}
    for row in rows:
        groups.setdefault((str(row.get("group")), str(row.get("K")), str(row.get("tools"))), []).append(row)
    if len(rows) <= most:
        return [row for group in groups.values() for row in group]
    keep, wanted, kept = [], max(1, round(most * len(groups) / len(rows))), list(groups.values())
    for i in range(wanted):
        group = kept[int((i + 0.5) * len(kept) / wanted)]
        if len(keep) + len(group) <= most:
            keep += group
    return keep


# ---------------------------------------------------------------------------------------------------------------------
# Episodes, as the page shows them


def number(value, digits=4):
    """A finite number, rounded, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return round(value, digits)


def segments(pieces, ended, credit_mode, advantage):
    """Tokens of one turn, as text -> [[kind, text, credit]]; kind "s" sampled, "t" structural, "e" the sampled end of turn, "c" cut off;
    credit None where none was recorded. As grpo.py had it: of a turn that was cut off, the last token is structural."""
    structural = rewards.structural_mask([c.encode("utf-8", "replace") for c in pieces], credit_mode if credit_mode in ("tags", "closing") else "struct")
    task, fmt = (number(advantage.get(k)) for k in ("task", "fmt"))
    out = []
    for n, (piece, tag) in enumerate(zip(pieces, structural)):
        kind = "e" if ended and n + 1 == len(pieces) else "t" if tag else "s"
        if out and out[-1][0] == kind:
            out[-1][1] += piece
        else:
            credited = (credit_mode == "sequence" or tag and credit_mode != "none")
            out.append([kind, piece, None if task is None else round(task + (fmt or 0.0) * credited, 3)])
    return out if ended else [*out, ["c", "", None]]


def shown_turns(row, calls, args):
    """-> list of turns, each a list of segments: what was inserted before, what was sampled, where it ended."""
    turns, finish = row["turns"], row.get("finish") or []
    credit, advantage = args.get("format_credit", "struct"), row.get("advantage") or {}
    out = []
    for n, text in enumerate(turns):
        parts = [["i", "<think>\n", None]] if row["think_open"] else []
        ended = n < len(finish) and finish[n] == "stop"
        pieces = row["pieces"][n] if row["pieces"] else [*str(text), *([""] if ended else [])]  # an endpoint says no tokens: by characters
        parts += segments([str(p) for p in pieces[:20_000]], ended, credit, advantage)
        answered = [c for c in calls if c["turn"] == n and c["status"] != "not_run" or c["turn"] == n and c["summary"]] if n + 1 < len(turns) else []
        parts += [["i", f"\n<tool_response>\n{c['summary']}\n</tool_response>", None] for c in answered]
        out.append(parts)
    return out


def shown_call(call):
    """A recorded call -> what the page needs; frames are filled in later."""
    return {"turn": int(call.get("turn", 0)), "start": number(call.get("start")), "end": number(call.get("end")), "status": str(call.get("status")),
            "summary": str(call.get("summary") or "")[:2000], "seconds": number(call.get("seconds"), 2), "frames": number(call.get("frames_seen")), "thumbs": []}


def shown_episode(row, source, number_of_source):
    """A record -> the page's episode. Raises KeyError, TypeError, ValueError, AttributeError on records that are not what they should be."""
    task, reward = row["task"], row.get("reward") or {}
    calls = [shown_call(c) for c in row.get("calls") or []]
    times = row.get("frame_times") or (row["vision"][0]["seconds"] if row.get("vision") else [])
    timing = row.get("timing") or {}
    times = [float(t) for t in times if number(t) is not None]
    acc = number(row["score"] if "score" in row else reward.get("acc"))
    advantage = row.get("advantage") or {}
    return {"source": number_of_source, "step": int(row["version"]) + 1 if "version" in row else None, "id": str(task["id"]), "group": str(row["group"]),
            "sample": int(row["sample"]), "K": str(row.get("budget", row["K"])), "tools": row.get("tools"), "status": str(row["status"]),
            "error": row.get("error") and str(row["error"])[:500],
            "question": str(task["question"])[:4000], "options": [str(o) for o in task.get("options") or []], "type": str(task["type"]),
            "gold": json.dumps(task["answer"]) if isinstance(task["answer"], list) else str(task["answer"]), "video": str(task["video"]),
            "acc": acc, "extracted": str(row["extracted"]) if row.get("extracted") is not None else None,
            "reward": {k: number(reward.get(k)) for k in ("total", "acc", "fmt", "tool")},
            "advantage": {k: number(advantage.get(k)) for k in ("task", "fmt")},
            "duration": number(timing.get("video_s")) or max([*times, *(c["end"] or 0 for c in calls), 1.0]),
            "times": [round(t, 2) for t in times], "calls": calls, "thumbs": [], "turns": shown_turns(row, calls, source["args"]),
            "called": any(c["status"] == "ok" for c in calls),
            "trouble": sorted({*([row["status"]] if row["status"] != "ok" else []), *(f"call: {c['status']}" for c in calls if c["status"] not in ("ok", "not_run")),
                               *(["cut off"] if "length" in (row.get("finish") or []) else [])})}


def episodes_of(sources, most, troubles):
    """Sources -> the page's episodes, an equal share of `most` for each source that has any."""
    sources_with = [s for s in sources if s["rows"]]
    out = []
    for s in sources_with:
        for row in thinned(s["rows"], max(1, most // len(sources_with))):
            try:
                out.append(shown_episode(row, s, sources.index(s)))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
                troubles[f"{s['name']}: records that are not episodes ({type(error).__name__})"] += 1
    out.sort(key=lambda e: (e["source"], e["step"] or 0, e["group"], len(e["K"]), e["K"], str(e["tools"]), e["sample"]))  # "gated" behind the numbers
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Thumbnails


def wanted_frames(episode, overview=8, window=4):
    """-> [(seconds, where it goes)]: evenly chosen overview frames, and looks into every window that was read."""
    wants, step = [], max(1.0, len(episode["times"]) / overview)
    for i in range(min(overview, len(episode["times"]))):
        wants.append((episode["times"][int((i + 0.5) * step) if step > 1 else i], episode["thumbs"]))
    for call in episode["calls"]:
        if call["status"] == "ok" and call["start"] is not None and call["end"] is not None:
            n = min(window, int(call["frames"] or window))
            wants += [(call["start"] + (i + 0.5) * (call["end"] - call["start"]) / n, call["thumbs"]) for i in range(n)]
    return wants


def jpeg(image, quality=70):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return base64.b64encode(buffer.getvalue()).decode()


def add_thumbnails(episodes, sources, root, pixels, budget, troubles):
    """Fill the thumbs of episodes and calls with [seconds, index] -> list of base64 JPEGs, at most `budget` characters of them.

    A video is opened once, for all its episodes, and one frame is stored once. Index None: the video could not be read; "full": the page is.
    """
    from tqdm import tqdm

    cache, pictures, index, spent = video.FrameCache(2**28, timeout=60.0), [], {}, 0
    by_video = {}
    for episode in episodes:
        by_video.setdefault((root or sources[episode["source"]]["root"], episode["video"]), []).append(episode)
    for (folder, name), some in tqdm(by_video.items(), desc="thumbnails", disable=None):
        wants = [want for episode in some for want in wanted_frames(episode)]
        if spent >= budget:
            for seconds, place in wants:
                place.append([round(seconds, 2), "full"])
            continue
        try:
            path = video.resolve(name, folder)
            times = sorted({round(t, 2) for t, _ in wants})
            frames = video.at(path, times, 1024, pixels, cache) if times else None
        except (video.VideoError, ValueError) as error:
            troubles[f"{error}"] += 1
            for seconds, place in wants:
                place.append([round(seconds, 2), None])
            continue
        for seconds, place in wants:
            shown = max((i for i, t in enumerate(frames.seconds) if t <= seconds + 0.02), default=0)  # the frame on display then
            key = frames.frame_keys[shown]
            if key not in index and spent < budget:
                pictures.append(jpeg(frames.images[shown]))
                index[key] = len(pictures) - 1
                spent += len(pictures[-1])
            place.append([round(float(seconds), 2), index.get(key, "full")])
    cache.close()
    return pictures


# ---------------------------------------------------------------------------------------------------------------------
# Curves and tables


def plots():
    """What is drawn of a log -> list of [title, unit, {label: path into a log row, or a name inside by_K}, definition]. "by K" plots have a line per K."""
    return [
        ["Reward", "R", {"": "total"}, "Mean over the step's rollouts of R = R_acc + w_fmt R_fmt + R_tool."],
        ["Accuracy term", "R_acc", {"": "acc"}, "Mean R_acc: letter match, F1 of words (open questions) or IoU (grounding)."],
        ["Format term", "R_fmt", {"": "fmt"}, "Mean R_fmt as this run is paid for it, before its weight."],
        ["Tool term", "R_tool", {"": "tool"}, "Mean R_tool: 0.3 for a valid executed call, more when the answer is right too."],
        ["f_tau", "0..1", {"": "f_tau"}, "Mean R_fmt by the paper preset's terms, whatever the run is paid for: one ruler for all runs."],
        ["Well-formed rollouts", "share", {"": "well_formed"}, "Every turn one closed thought, the last one thought and answer in order, no tag misused."],
        ["kappa", "calls a rollout", {"": "kappa"}, "Executed crop_video calls per rollout."],
        ["Rollouts that called", "share", {"": "called"}, "Share of rollouts with at least one executed call."],
        ["Closure of think", "closed / opened", {"": "closure.think"}, "Over all turns of the step; the forced <think> counts as opened."],
        ["Closure of tool_call", "closed / opened", {"": "closure.tool_call"}, "Over all turns of the step; no value where none was opened."],
        ["Closure of answer", "closed / opened", {"": "closure.answer"}, "Over all turns of the step; no value where none was opened."],
        ["Accuracy by K", "R_acc", "acc", "Mean R_acc of the rollouts with K overview frames."],
        ["Call minus skip by K", "advantage", "call_minus_skip", "Mean A_task of rollouts that called minus that of rollouts that did not, at K: what a call was worth. No value where either is empty."],
        ["Entropy", "nats a token", {"": "entropy"}, "Of the distribution that was sampled from, mean over sampled tokens."],
        ["Log-prob gap", "nats", {"mean": "gap", "largest": "gap_max"}, "Absolute difference between the engine's and the trainer's log-prob of sampled tokens."],
        ["Gradient norm", "before clipping", {"": "grad_norm"}, "Global norm over all ranks."],
        ["Groups", "a step", {"without signal": "zero_variance", "all": "groups"}, "Groups whose rewards are all equal teach nothing and are skipped."],
        ["Length", "tokens", {"": "length"}, "Sampled tokens of the main agent per rollout."],
        ["Phase times", "s a step", {"rollout": "rollout_s", "of it frames": "decode_s", "update": "train_s", "sync": "sync_s"}, "Seconds per step; frames: waited for with an idle engine."],
        ["Loss", "nats a token", {"": "loss", "held out": "val_loss"}, "SFT: mean over trained tokens; held out: the same on --val. GRPO: its surrogate, which is no measure of progress."],
        ["Held-out format rate", "share", {"": "format_rate"}, "SFT: held-out prompts whose greedy first turn is well formed."],
        ["Learning rate", "", {"": "lr"}, "Of AdamW."],
        ["Speed", "tokens / s", {"update": "tokens_per_s", "GRPO update": "train_tokens_per_s", "rollouts": "rollout_tokens_per_s"}, "Packed tokens of the update, a shared prompt counted once; sampled tokens of the rollouts."],
    ]


def dig(row, keys):
    """A log row and the keys that lead to a number in it -> that number or None."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return number(row, 8)


def curves_of(sources):
    """-> [{"title", "unit", "definition", "series": [{"name", "run", "points": [[step, value]]}]}], plots without a point left out."""
    out = []
    for title, unit, what, definition in plots():
        series = []
        for n, s in enumerate(sources):
            if isinstance(what, str):  # a line per K
                budgets = sorted({k for row in s["log"] if isinstance(row.get("by_K"), dict) for k in row["by_K"]}, key=lambda k: (len(k), k))
                lines = {f"K {k}": ["by_K", k, what] for k in budgets}
            else:
                lines = {label: path.split(".") for label, path in what.items()}
            for label, keys in lines.items():
                points = [[number(row.get("step")), dig(row, keys)] for row in s["log"]]
                points = [p for p in points if p[0] is not None and p[1] is not None]
                if points:
                    series.append({"name": " ".join(filter(None, [s["name"], label])), "run": n, "points": points})
        if series:
            out.append({"title": title, "unit": unit, "definition": definition, "series": series})
    return out


def tables_of(sources):
    """-> [{"title", "head", "rows"}] of evaluations, the paper's figures beside ours where they exist."""
    import eval as evaluation

    out = []
    for s in sources:
        summary, rows = s["summary"], []
        for r in summary.get("results") or []:
            try:
                rows.append([r.get("bench") or "-", str(r["K"]), r["tools"], r["n"], evaluation.shown_interval(r), f"{r['acc']:.3f}", f"{r['f_tau']:.3f}", f"{r['kappa']:.2f}",
                             sum(r["errors"].values()), r["no_answer"], r["truncated"], r.get("metric", "accuracy")])
            except (KeyError, TypeError, ValueError, AttributeError):
                rows.append(["unreadable", *[""] * 11])
        if rows:
            out.append({"title": s["name"], "head": ["benchmark", "K", "tools", "n", "headline [95%]", "acc", "f_tau", "kappa", "errors", "no answer", "cut off", "headline is"], "rows": rows})
        compared = [r for r in summary.get("rows") or [] if isinstance(r, dict)]
        if compared:
            def cell(value, digits=3):
                return "-" if number(value) is None else f"{value:.{digits}f}"

            out.append({"title": f"{s['name']}: side by side", "head": ["checkpoint", "benchmark", "K", "n", "with tools [95%]", "no tools", "f_tau", "kappa"],
                        "rows": [[str(r.get("name")), r.get("bench") or "-", str(r.get("K")), r.get("n"),
                                  f"{cell(r.get('acc_tools'))} [{cell((r.get('interval') or [None])[0])}, {cell((r.get('interval') or [None])[-1])}]", cell(r.get("acc_no_tools")),
                                  cell(r.get("f_tau")), cell(r.get("kappa"), 2)] for r in compared]})
        differences = [d for d in summary.get("differences") or [] if isinstance(d, dict)]
        if differences:
            out.append({"title": f"{s['name']}: differences of the same items", "head": ["", "benchmark", "K", "tools", "difference", "95%", "items"],
                        "rows": [[f"{d.get('name')} - {d.get('minus')}", d.get("bench") or "-", str(d.get("K")), d.get("tools"), f"{d.get('difference', 0):+.3f}",
                                  "[" + ", ".join(f"{x:+.3f}" for x in d.get("interval") or []) + "]", d.get("n")] for d in differences]})
    benches = list(evaluation.splits())
    if any(r.get("bench") in benches for s in sources for r in s["summary"].get("results") or []):
        rows = []
        for s in sources:
            for k, mode in dict.fromkeys((r["K"], r["tools"]) for r in s["summary"].get("results") or [] if r.get("bench")):
                found = {r.get("bench"): r for r in s["summary"]["results"] if (r["K"], r["tools"]) == (k, mode)}
                rows.append([f"{s['name']}, K {k}, tools {mode} (measured)", *(f"{100 * found[b]['headline']:.1f}" if found.get(b) and found[b]["headline"] is not None else "-" for b in benches)])
        rows += [[f"{name} (the paper's)", *("-" if v is None else f"{v:.1f}" for v in values)] for name, values in evaluation.paper_table().items()]
        out.append({"title": "Benchmarks beside the paper's Table 1, percent", "head": ["system", *benches], "rows": rows})
    return out


# ---------------------------------------------------------------------------------------------------------------------


def embedded(value):
    """A value as JSON that may stand inside <script>: no "<" is left, so nothing in it can end the element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def build(paths, names, out, episodes, max_mb, root, pixels):
    """-> (bytes of the page, episodes on it, episodes found, thumbnails). Writes `out`."""
    troubles, sources = Counter(), []
    for n, path in enumerate(paths):
        found = find(path)
        if not found:
            raise model.UserError(f"{path}: neither log.jsonl nor records nor summary.json is in it or below it")
        given = names[n] if names else os.path.basename(os.path.normpath(path))
        for kind, place in found:
            below = os.path.relpath(place, path)
            sources.append(load_source(kind, place, given if below == "." else below if len(paths) == 1 and not names else f"{given}/{below}", troubles))
    order = {"run": 0, "rollouts": 1, "eval": 2, "table": 3}
    sources.sort(key=lambda s: (order[s["kind"]], not s["rows"]))  # reinforcement learning first: it has curves and episodes
    chosen = episodes_of(sources, episodes, troubles)
    data = {"sources": [{"name": s["name"], "kind": s["kind"]} for s in sources], "curves": curves_of(sources), "tables": tables_of(sources)}
    fixed = len(embedded(data)) + len(embedded(chosen)) + len(page_template()) + 200 * len(chosen)
    pictures = add_thumbnails(chosen, sources, root, pixels, int(max_mb * 2**20 - fixed), troubles)
    total = sum(len(s["rows"]) for s in sources)
    data.update(episodes=chosen, found=total, pictures=pictures, troubles=[[why, count] for why, count in troubles.most_common(50)])
    page = page_template().replace("/*DATA*/", embedded(data))
    model.write_atomic(out, page)
    return len(page), len(chosen), total, len(pictures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_JSONL", help="run folders, rollout JSONL, evaluation folders, or folders that hold such")
    parser.add_argument("--out", default="page.html", help="HTML file to write")
    parser.add_argument("--names", nargs="+", default=None, help="one name per path; default: its last part")
    parser.add_argument("--episodes", type=int, default=2000, help="episodes on the page at most: whole groups, evenly spread over the steps")
    parser.add_argument("--max-mb", type=float, default=20.0, help="MiB of the page; thumbnails that do not fit are left out and marked")
    parser.add_argument("--thumb-pixels", type=int, default=6144, help="pixels of a thumbnail at most")
    parser.add_argument("--video-root", default=None, help="folder videos are relative to and may not leave; default: what the run was given")
    args = parser.parse_args()
    if args.names and len(args.names) != len(args.paths):
        raise model.UserError(f"--names: {len(args.names)} for {len(args.paths)} paths")
    if args.episodes < 0 or not args.max_mb > 0 or args.thumb_pixels < 1024:
        raise model.UserError("--episodes may not be negative, --max-mb must be above 0, --thumb-pixels at least 1024")
    model.make_out(os.path.dirname(os.path.abspath(args.out)))
    size, shown, total, pictures = build(args.paths, args.names, args.out, args.episodes, args.max_mb, args.video_root, args.thumb_pixels)
    print(f"{args.out}: {size / 2**20:.1f} MiB, {shown} of {total} episodes, {pictures} thumbnails; open it in a browser")


# ---------------------------------------------------------------------------------------------------------------------
# The page. Everything from models and data goes through textContent or esc(): nothing of it is ever markup.


def page_template():
    return r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>ParaVT runs</title>
<style>
:root { --back: #fbfbfa; --card: #fff; --ink: #1c1d20; --dim: #6c6f76; --line: #dcdde1; --mark: #e9edf7; --good: 22,140,80; --bad: 200,50,50; --accent: #2456c9;
        --c0: #2456c9; --c1: #c2500a; --c2: #14804a; --c3: #8a3fc0; --c4: #b3253d; --c5: #0a7f93; --c6: #7a6a00; --c7: #555b6e; color-scheme: light; }
[data-theme=dark] { --back: #15161a; --card: #1d1f25; --ink: #e8e9ec; --dim: #9a9da6; --line: #363942; --mark: #2a3145; --good: 70,200,130; --bad: 240,100,100; --accent: #86a8ff;
        --c0: #86a8ff; --c1: #ffa263; --c2: #62d196; --c3: #cd9bf5; --c4: #ff8797; --c5: #5fd0e3; --c6: #dccb57; --c7: #aab0c2; color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
header { position: sticky; top: 0; z-index: 5; display: flex; gap: 4px 14px; align-items: center; flex-wrap: wrap; padding: 8px 14px; background: var(--card); border-bottom: 1px solid var(--line); }
header h1 { font-size: 15px; margin: 0 8px 0 0; }
button, select, input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 3px 8px; min-width: 0; }
button { cursor: pointer; } button.on { background: var(--mark); border-color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
main { padding: 14px; } section[hidden] { display: none; }
.note, .dim { color: var(--dim); } .key { display: inline-block; width: 14px; height: 3px; vertical-align: middle; margin-right: 5px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); gap: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; min-width: 0; }
.card h3 { margin: 0; font-size: 14px; display: flex; align-items: baseline; gap: 8px; } .card h3 small { color: var(--dim); font-weight: 400; flex: 1; }
.card h3 button { padding: 0 7px; border-radius: 50%; } .definition { color: var(--dim); margin: 4px 0; }
.plot { position: relative; } svg { display: block; width: 100%; height: auto; touch-action: pan-y; } svg text { fill: var(--dim); font-size: 11px; }
.tip { position: absolute; pointer-events: none; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; font-size: 12px; white-space: nowrap; z-index: 3; box-shadow: 0 2px 8px #0003; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; }
.split { display: grid; grid-template-columns: minmax(270px, 380px) minmax(0, 1fr); gap: 14px; align-items: start; }
@media (max-width: 800px) { .split { grid-template-columns: minmax(0, 1fr); } main { padding: 8px; } }
.filters { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 8px; } .filters input { flex: 1 1 130px; }
.list { position: relative; overflow-y: auto; height: min(62vh, 560px); border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
@media (max-width: 800px) { .list { height: 210px; } }
.row { position: absolute; left: 0; right: 0; height: 28px; display: flex; gap: 8px; align-items: center; padding: 0 10px; cursor: pointer; white-space: nowrap; overflow: hidden; border-bottom: 1px solid var(--line); }
.row.on { background: var(--mark); } .row .name { flex: 1; overflow: hidden; text-overflow: ellipsis; } .row .mono { font-variant-numeric: tabular-nums; color: var(--dim); }
.good { color: rgb(var(--good)); } .bad { color: rgb(var(--bad)); }
.turn { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; margin: 8px 0; padding: 8px; background: var(--back); border-radius: 6px; border: 1px solid var(--line); }
.turn .i { color: var(--dim); opacity: .75; } .turn .t { font-weight: 700; border-radius: 3px; box-shadow: inset 0 -2px 0 currentColor; } .turn .end { color: var(--dim); font-size: 11px; border: 1px solid var(--line); border-radius: 3px; padding: 0 3px; }
.time { position: relative; margin: 10px 0 4px; height: 26px; background: var(--back); border: 1px solid var(--line); border-radius: 4px; }
.time i { position: absolute; top: 0; width: 1px; height: 8px; background: var(--dim); } .time b { position: absolute; top: 8px; bottom: 0; background: rgb(var(--good), .3); border: 1px solid rgb(var(--good)); border-radius: 3px; font-size: 11px; text-align: center; overflow: hidden; min-width: 3px; }
.time b.no { background: rgb(var(--bad), .2); border-color: rgb(var(--bad)); }
.scale { display: flex; justify-content: space-between; font-size: 11px; color: var(--dim); }
.frames { display: flex; flex-wrap: wrap; gap: 6px; margin: 6px 0; } figure { margin: 0; font-size: 11px; color: var(--dim); text-align: center; }
figure img { display: block; height: 54px; min-width: 40px; border-radius: 4px; image-rendering: auto; } figure .gap { display: flex; align-items: center; justify-content: center; width: 84px; height: 54px; border: 1px dashed var(--line); border-radius: 4px; padding: 2px; }
.terms { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 6px 0; font-variant-numeric: tabular-nums; }
.group { display: flex; gap: 10px; overflow-x: auto; padding-bottom: 6px; } .group .card { flex: 0 0 300px; cursor: pointer; max-height: 420px; overflow-y: auto; } .group .card.on { border-color: var(--accent); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; } th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; } tr.paper td { color: var(--dim); }
kbd { border: 1px solid var(--line); border-radius: 4px; padding: 0 4px; font-size: 12px; } h2 { font-size: 15px; margin: 18px 0 6px; } h2:first-child { margin-top: 0; }
</style>
</head>
<body>
<header><h1>ParaVT runs</h1><nav id="tabs"></nav><span class="note" id="counts"></span><span style="flex:1"></span>
<label class="note" id="smoothing">smoothing <input type="range" id="smooth" min="0" max="0.95" step="0.05" value="0.5"> <output id="smoothed">0.5</output></label>
<button id="theme" title="theme (t)">theme</button></header>
<main>
<section id="tab-curves"><div class="legend" id="runs"></div><div class="plots" id="plots"></div></section>
<section id="tab-episodes" hidden><div class="split"><div><div class="filters" id="filters"></div><div class="note" id="matching"></div><div class="list" id="list" tabindex="0"><div id="rows"></div></div>
<p class="note"><kbd>j</kbd> <kbd>k</kbd> next, previous &middot; <kbd>w</kbd> next wrong one &middot; <kbd>/</kbd> search &middot; <kbd>1</kbd> <kbd>2</kbd> <kbd>3</kbd> tabs &middot; <kbd>t</kbd> theme</p></div><div id="one"></div></div></section>
<section id="tab-tables" hidden></section>
<div id="troubles" class="note"></div>
</main>
<script id="data" type="application/json">/*DATA*/</script>
<script>
"use strict";
const D = JSON.parse(document.getElementById("data").textContent), $ = id => document.getElementById(id);
const esc = s => String(s).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const num = (x, digits = 2) => x === null || x === undefined ? "-" : Number(x).toFixed(digits);
const colour = n => `var(--c${n % 8})`;

// ---- tabs and theme
const tabs = ["curves", "episodes", "tables"].filter(t => (D[t] || []).length);
function open(tab) {
  for (const t of ["curves", "episodes", "tables"]) $("tab-" + t).hidden = t !== tab;
  for (const b of $("tabs").children) b.className = b.dataset.tab === tab ? "on" : "";
  $("smoothing").hidden = tab !== "curves";
  if (tab === "episodes") drawRows();
}
$("tabs").innerHTML = tabs.map(t => `<button data-tab="${t}">${t}</button> `).join("");
$("tabs").onclick = e => e.target.dataset.tab && open(e.target.dataset.tab);
function theme(dark) { document.documentElement.dataset.theme = dark ? "dark" : "light"; }
theme(matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").onclick = () => theme(document.documentElement.dataset.theme !== "dark");
$("counts").textContent = D.episodes.length ? `${D.episodes.length} of ${D.found} episodes` : "";
$("troubles").innerHTML = D.troubles.length ? "<h2>Could not be read</h2>" + D.troubles.map(([why, n]) => `<div>${n} &times; ${esc(why)}</div>`).join("") : "";

// ---- curves
const W = 420, H = 200, L = 46, R = 8, T = 8, B = 22;
function ticks(low, high, n) {
  const raw = (high - low) / n || 1, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const out = []; for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v); return out;
}
const label = v => Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(0) : String(+v.toPrecision(6));
function smooth(points, weight) { let s = null; return points.map(([x, y]) => [x, s = s === null ? y : weight * s + (1 - weight) * y]); }
function lookOf(plot) { // one line a run: the run's colour; several lines a run: a colour each, runs by dashes
  const several = plot.series.some((s, i) => plot.series.findIndex(o => o.run === s.run) !== i), per = {};
  return plot.series.map(s => { const k = per[s.run] = (per[s.run] ?? -1) + 1; return several ? [colour(k), ["", "5 3", "2 3", "8 3 2 3"][s.run % 4]] : [colour(s.run), ""]; });
}
function draw(plot, card) {
  const weight = +$("smooth").value, look = lookOf(plot), lines = plot.series.map(s => smooth(s.points, weight));
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of lines) for (const [x, y] of line) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  if (x1 === x0) { x0 -= .5; x1 += .5; } const space = (y1 - y0) * .06 || Math.abs(y1) * .1 || .1; y0 -= space; y1 += space;
  const X = x => L + (x - x0) / (x1 - x0) * (W - L - R), Y = y => H - B - (y - y0) / (y1 - y0) * (H - T - B);
  const path = points => points.map(([x, y], i) => (i ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1)).join("");
  let svg = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${esc(plot.title)}">`;
  for (const v of ticks(y0, y1, 4)) svg += `<line x1="${L}" x2="${W - R}" y1="${Y(v)}" y2="${Y(v)}" stroke="var(--line)"/><text x="${L - 5}" y="${Y(v) + 4}" text-anchor="end">${label(v)}</text>`;
  for (const v of ticks(x0, x1, 5)) if (Number.isInteger(v)) svg += `<text x="${X(v)}" y="${H - 6}" text-anchor="middle">${v}</text>`;
  plot.series.forEach((s, i) => {
    if (weight) svg += `<path d="${path(s.points.map(([x, y]) => [x, Math.min(y1, Math.max(y0, y))]))}" fill="none" stroke="${look[i][0]}" opacity=".2"/>`;
    svg += lines[i].length > 1 ? `<path d="${path(lines[i])}" fill="none" stroke="${look[i][0]}" stroke-width="1.6" stroke-dasharray="${look[i][1]}"/>`
      : `<circle cx="${X(lines[i][0][0])}" cy="${Y(lines[i][0][1])}" r="3" fill="${look[i][0]}"/>`;
  });
  card.querySelector(".plot").innerHTML = svg + `<line class="cross" y1="${T}" y2="${H - B}" stroke="var(--dim)" visibility="hidden"/></svg><div class="tip" hidden></div>`;
  card.querySelector(".legend").innerHTML = plot.series.length > 1 ? plot.series.map((s, i) => `<span><span class="key" style="background:${look[i][0]}"></span>${esc(s.name)}</span>`).join("") : "";
  const area = card.querySelector("svg"), cross = area.querySelector(".cross"), tip = card.querySelector(".tip");
  area.onpointermove = e => {
    const box = area.getBoundingClientRect(), at = x0 + ((e.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    const step = plot.series.flatMap(s => s.points.map(p => p[0])).reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
    cross.setAttribute("x1", X(step)); cross.setAttribute("x2", X(step)); cross.setAttribute("visibility", "visible");
    tip.innerHTML = `<b>step ${step}</b>` + plot.series.map((s, i) => { const k = s.points.findIndex(p => p[0] === step);
      return k < 0 ? "" : `<div><span class="key" style="background:${look[i][0]}"></span>${esc(s.name)} ${label(+lines[i][k][1].toPrecision(4))}${weight ? ` <span class="dim">(${label(+s.points[k][1].toPrecision(4))})</span>` : ""}</div>`; }).join("");
    tip.hidden = false; tip.style.top = "4px";
    const left = X(step) / W * box.width; tip.style.left = Math.max(0, left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10) + "px";
  };
  area.onpointerleave = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
}
const runs = [...new Set(D.curves.flatMap(p => p.series.map(s => s.run)))];
$("runs").innerHTML = runs.map(r => `<span><span class="key" style="background:${colour(r)}"></span>${esc(D.sources[r].name)}</span>`).join("");
const cards = D.curves.map(plot => {
  const card = document.createElement("div"); card.className = "card";
  card.innerHTML = `<h3>${esc(plot.title)} <small>${esc(plot.unit)}</small><button title="what is this?">?</button></h3><div class="definition" hidden>${esc(plot.definition)}</div><div class="plot"></div><div class="legend"></div>`;
  card.querySelector("button").onclick = () => { const d = card.querySelector(".definition"); d.hidden = !d.hidden; };
  $("plots").append(card); draw(plot, card); return card;
});
$("smooth").oninput = () => { $("smoothed").textContent = $("smooth").value; D.curves.forEach((p, i) => draw(p, cards[i])); };

// ---- episodes
const E = D.episodes, terms = ["total", "acc", "fmt", "tool"], correct = e => e.acc !== null && e.acc >= .5;
const unique = f => [...new Set(E.flatMap(f))].filter(x => x !== null && x !== undefined);
const options = (name, all, values) => values.length > 1 || name === "trouble" && values.length ? `<select id="f-${name}"><option value="">${all}</option>${values.map(v => `<option value="${esc(v)}">${esc(v)}</option>`).join("")}</select>` : "";
const numeric = (a, b) => (parseFloat(a) || 0) - (parseFloat(b) || 0) || String(a).localeCompare(String(b));
$("filters").innerHTML = `<input id="f-text" type="search" placeholder="task or text">` +
  (D.sources.length > 1 && unique(e => e.source).length > 1 ? `<select id="f-source"><option value="">all runs</option>${unique(e => e.source).map(s => `<option value="${s}">${esc(D.sources[s].name)}</option>`).join("")}</select>` : "") +
  options("step", "all steps", unique(e => e.step).sort(numeric)) + options("K", "all K", unique(e => e.K).sort(numeric)) + options("tools", "tools on and off", unique(e => e.tools)) +
  `<select id="f-right"><option value="">right and wrong</option><option value="1">correct</option><option value="0">wrong</option></select>` +
  `<select id="f-called"><option value="">called or not</option><option value="1">called</option><option value="0">skipped</option></select>` +
  options("trouble", "any trouble", unique(e => e.trouble).sort()) +
  `<select id="f-sort"><option value="">in order</option>${terms.flatMap(t => [`<option value="${t} 1">${t}, low first</option>`, `<option value="${t} -1">${t}, high first</option>`]).join("")}</select>`;
let shown = E.map((_, i) => i), at = 0;
const value = name => $("f-" + name) ? $("f-" + name).value : "";
function filter(event) {
  const text = value("text").toLowerCase(), current = shown[at];
  shown = E.map((_, i) => i).filter(i => { const e = E[i];
    return (!value("source") || String(e.source) === value("source")) && (!value("step") || String(e.step) === value("step")) && (!value("K") || e.K === value("K")) &&
      (!value("tools") || e.tools === value("tools")) && (!value("right") || correct(e) === (value("right") === "1")) && (!value("called") || e.called === (value("called") === "1")) &&
      (!value("trouble") || e.trouble.includes(value("trouble"))) &&
      (!text || (e.id + "\n" + e.question + "\n" + e.turns.map(t => t.map(s => s[1]).join("")).join("\n")).toLowerCase().includes(text)); });
  if (value("sort")) { const [term, way] = value("sort").split(" "); shown.sort((a, b) => ((E[a].reward[term] ?? -9) - (E[b].reward[term] ?? -9)) * way || a - b); }
  at = event && event.target.id === "f-sort" ? 0 : Math.max(0, shown.indexOf(current)); select(at);
}
const ROW = 28;
function drawRows() { // only the rows in view exist: thousands of episodes scroll as few do
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5), last = Math.min(shown.length, first + Math.ceil((list.clientHeight || 600) / ROW) + 12);
  $("rows").style.cssText = `height:${shown.length * ROW}px`;
  let html = "";
  for (let n = first; n < last; n++) { const e = E[shown[n]];
    html += `<div class="row${n === at ? " on" : ""}" data-n="${n}" style="top:${n * ROW}px"><span class="${correct(e) ? "good" : "bad"}">${e.status !== "ok" ? "!" : correct(e) ? "\u2713" : "\u2717"}</span><span class="name">${esc(e.id)}</span><span class="mono">${e.step === null ? "" : "step " + e.step + " "}K ${esc(e.K)} ${e.tools === "off" ? "no tools " : ""}#${e.sample} R ${num(e.reward.total)}</span></div>`; }
  $("rows").innerHTML = html;
  $("matching").textContent = `${shown.length} episodes, ${shown.filter(i => correct(E[i])).length} correct`;
}
$("list").onscroll = drawRows;
$("rows").onclick = e => { const row = e.target.closest(".row"); if (row) select(+row.dataset.n); };
$("filters").oninput = filter;
function tint(credit) { if (credit === null || !credit) return ""; const a = Math.min(.6, .12 + Math.abs(credit) * .25); return ` style="background:rgb(var(--${credit > 0 ? "good" : "bad"}),${a.toFixed(2)})"`; }
function turnHTML(parts) {
  return `<div class="turn">` + parts.map(([kind, text, credit]) => kind === "e" ? `<span class="end"${tint(credit)} title="sampled end of turn${credit === null ? "" : ", credit " + credit}">end</span>` : kind === "c" ? `<span class="end bad">cut off</span>`
    : `<span class="${kind}"${kind === "i" ? ' title="inserted"' : tint(credit) + ` title="${kind === "t" ? "structural, " : ""}${credit === null ? "sampled" : "credit " + credit}"`}>${esc(text)}</span>`).join("") + `</div>`;
}
function framesHTML(thumbs) {
  return thumbs.length ? `<div class="frames">` + thumbs.map(([t, i]) => `<figure>${typeof i === "number" ? `<img alt="frame at ${t} s" src="data:image/jpeg;base64,${D.pictures[i]}">` : `<div class="gap">${i === "full" ? "left out (--max-mb)" : "video not readable"}</div>`}${num(t, 1)} s</figure>`).join("") + `</div>` : "";
}
const termsHTML = e => `<div class="terms">${[["R", e.reward.total], ["R_acc", e.acc], ["R_fmt", e.reward.fmt], ["R_tool", e.reward.tool], ["A_task", e.advantage.task], ["A_fmt", e.advantage.fmt]].map(([n, v]) => `<span><span class="dim">${n}</span> ${num(v)}</span>`).join("")}</div>`;
function episodeHTML(e) {
  const share = t => (100 * Math.min(1, Math.max(0, t / e.duration))).toFixed(2);
  let html = `<div class="card"><h3>${esc(e.id)} <small>${esc(D.sources[e.source].name)}${e.step === null ? "" : ", step " + e.step}, K ${esc(e.K)}, sample ${e.sample}${e.tools ? ", tools " + esc(e.tools) : ""}</small><span class="${correct(e) ? "good" : "bad"}">${e.status !== "ok" ? esc(e.status) : correct(e) ? "correct" : "wrong"}</span></h3>`;
  html += `<p>${esc(e.question)}</p>` + e.options.map((o, i) => `<div>${String.fromCharCode(65 + i)}. ${esc(o)}</div>`).join("");
  html += `<p><span class="dim">gold</span> <b>${esc(e.gold)}</b>${e.extracted === null ? "" : ` <span class="dim">read</span> <b>${esc(e.extracted)}</b>`}</p>` + (e.error ? `<p class="bad">${esc(e.error)}</p>` : "") + termsHTML(e);
  html += `<div class="time" title="${esc(e.video)}">` + e.times.map(t => `<i style="left:${share(t)}%"></i>`).join("") +
    e.calls.map((c, n) => c.start === null || c.end === null ? "" : `<b class="${c.status === "ok" ? "" : "no"}" style="left:${share(c.start)}%;width:${Math.max(.6, share(c.end) - share(c.start))}%" title="call ${n + 1}: ${c.start} to ${c.end} s">${n + 1}</b>`).join("") +
    `</div><div class="scale"><span>0 s</span><span>${e.times.length} overview frames</span><span>${num(e.duration, 1)} s</span></div>` + framesHTML(e.thumbs);
  html += e.turns.map((t, n) => turnHTML(t) + e.calls.map((c, i) => c.turn !== n ? "" : `<div class="card" style="margin-left:18px"><b>call ${i + 1}</b> <span class="dim">${c.start === null ? "no window" : `${c.start} to ${c.end} s`}, ${esc(c.status)}${c.frames === null ? "" : `, ${c.frames} frames`}${c.seconds === null ? "" : `, ${c.seconds} s`}</span>${framesHTML(c.thumbs)}<div>${esc(c.summary)}</div></div>`).join("")).join("");
  return html + "</div>";
}
function select(n) {
  at = Math.max(0, Math.min(shown.length - 1, n)); const list = $("list");
  if (at * ROW < list.scrollTop) list.scrollTop = at * ROW; else if ((at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * ROW - list.clientHeight;
  drawRows();
  if (!shown.length) { $("one").innerHTML = `<p class="note">No episode passes these filters.</p>`; return; }
  const e = E[shown[at]], group = E.map((_, i) => i).filter(i => { const o = E[i]; return o.source === e.source && o.group === e.group && o.K === e.K && o.tools === e.tools; });
  $("one").innerHTML = episodeHTML(e) + (group.length > 1 ? `<h2>The group: ${group.length} rollouts of this prompt</h2><div class="group">` + group.map(i => `<div class="card${i === shown[at] ? " on" : ""}" data-e="${i}"><h3>#${E[i].sample} <small>${E[i].calls.length} calls</small><span class="${correct(E[i]) ? "good" : "bad"}">${correct(E[i]) ? "correct" : "wrong"}</span></h3>${termsHTML(E[i])}${E[i].turns.map(turnHTML).join("")}</div>`).join("") + "</div>" : "");
}
$("one").onclick = e => { const card = e.target.closest(".group .card"); if (!card) return; const n = shown.indexOf(+card.dataset.e); if (n >= 0) select(n); };
document.onkeydown = e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (/INPUT|SELECT/.test(document.activeElement.tagName)) { if (e.key === "Escape" || e.key === "Enter") document.activeElement.blur(); return; }
  const here = !$("tab-episodes").hidden;
  if (e.key === "t") $("theme").click();
  else if ("123".includes(e.key)) { const tab = ["curves", "episodes", "tables"][e.key - 1]; if (tabs.includes(tab)) open(tab); }
  else if (here && (e.key === "j" || e.key === "ArrowDown")) { select(at + 1); e.preventDefault(); }
  else if (here && (e.key === "k" || e.key === "ArrowUp")) { select(at - 1); e.preventDefault(); }
  else if (here && e.key === "w") { for (let n = 1; n <= shown.length; n++) { const m = (at + n) % shown.length; if (!correct(E[shown[m]])) { select(m); break; } } }
  else if (here && e.key === "/") { $("f-text").focus(); e.preventDefault(); }
};

// ---- tables
$("tab-tables").innerHTML = D.tables.map(t => `<h2>${esc(t.title)}</h2><div class="scroll"><table><tr>${t.head.map(h => `<th>${esc(h)}</th>`).join("")}</tr>${t.rows.map(r => `<tr class="${String(r[0]).endsWith("(the paper's)") ? "paper" : ""}">${r.map(c => `<td>${esc(c ?? "-")}</td>`).join("")}</tr>`).join("")}</table></div>`).join("");
if (E.length) filter();
if (tabs.length) open(tabs.includes(location.hash.slice(1)) ? location.hash.slice(1) : tabs[0]);
</script>
</body>
</html>
"""


if __name__ == "__main__":
    model.run_main(main)
