"""
eval.py: benchmarks and task JSONL through the agent loop of training, greedy, into scored records.

  score     = [letter == gold] | [text matches gold] | temporal IoU   of the final answer; a broken
              video, a full context or a failed request scores 0 and stays in the denominator
  headline  = mean over items | MLVU: mean of its seven tasks' means | MMVU: multiple choice alone |
              Charades-STA: mean IoU
  interval  = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  pass@n    = mean over tasks of the best of its n samples
  f_tau     = mean R_fmt    kappa = executed crop_video calls per episode    both as in training

The answer is the last <answer> block or, where there is none, the text after the thought: an
evaluation asks what the model said, training (rewards.py) pays only for the tag. Departs from the
authors' evaluation: benchmarks are read as their publishers ship them (bench/benchmarks.py),
sub-agents answer calls as in training (--crop-reply frames: the frames themselves, as theirs),
errors are never graded as text. --protocol speaks to other systems (bench/systems.py).

Reads:  --ckpt (or an OpenAI-compatible endpoint), --data or --bench with --root.
Writes: --out[/bench]/records.*.jsonl (one episode a line, appended as they finish: run again to go
        on), tasks.jsonl, args.json, judge.jsonl, summary.json; --out/summary.json

CPU toy:  torchrun --nproc_per_node 2 eval.py --preset toy --ckpt grpo_out --data toy/eval.jsonl
1 GPU:    python eval.py --ckpt grpo_out --bench videomme --root Video-MME --out eval_out
8 GPUs:   torchrun --nproc_per_node 8 eval.py --ckpt grpo_out --bench mlvu lvbench --root DATA
Endpoint: python eval.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M
              --protocol longvt --bench mmvu --root MMVU
"""

import argparse
import glob
import hashlib
import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import model
import rewards
import rollout
from bench import benchmarks, systems

# ------------------------------------------------------------------------------------------------
# Arguments


def build_parser():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)

    add = parser.add_argument_group("what to run").add_argument
    add("--engine", choices=["vllm", "openai"], default="vllm", help="who samples")
    add("--ckpt", help="checkpoint folder; not needed with --engine openai")
    add("--data", help="task JSONL")
    add("--bench", nargs="+", choices=list(benchmarks.splits()), default=[],
        help="benchmarks, as their publishers ship them; several: one table")
    add("--root", nargs="+", default=[], metavar="DIR",
        help="a folder per benchmark; or one that holds a folder of each name")
    add("--out", default="eval_out", help="an earlier run of the same settings is continued here")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    # Every K with every mode of --tools: as many evaluations, in one table.
    add("--frames", type=rollout.frames_argument, nargs="+", default=[64],
        help="overview frames K, one evaluation each; 'gated' draws K per task")
    add("--tools", nargs="+", choices=["on", "off"], default=["on"],
        help="offer crop_video, or answer from the overview alone; or both")
    add("--subtitles", choices=["aligned", "full", "none"],
        help="lines at the frames' times, all, none; default: what --bench asks for, else none")
    add("--samples", type=int, default=1, help="episodes per task; above 1 needs --temperature")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--shard", type=shard_argument, default=(0, 1), metavar="I/N",
        help="every Nth task from the Ith on; --rescore merges")
    add("--allow-errors", action="store_true",
        help="print a headline even where more than 1%% of the items failed")

    systems.add_arguments(parser)  # protocol, endpoint, judge

    add = parser.add_argument_group("finished folders: no evaluation, no model").add_argument
    add("--rescore", nargs="+", metavar="DIR", help="grade again; several are merged into --out")
    add("--compare", nargs="+", metavar="DIR", help="one table from these --out folders")
    add("--table", nargs="+", metavar="DIR", help="Markdown of --bench folders, beside the paper's")
    add("--prepare", metavar="JSONL", help="write the tasks of --bench (videos relative to --root)")

    add = parser.add_argument_group("speed").add_argument  # none of these changes an answer
    add("--live", type=int, default=0,
        help="episodes at once; 0 = twice --max-seqs; 1 measures an episode by itself")
    add("--quiet", action="store_true", help="no progress bar; the tables stay")
    add("--decode-timeout", type=float, default=60.0, help="seconds a video may take")

    agent = parser.add_argument_group("agent, as in training")
    rollout.add_agent_arguments(agent, tools=False)
    agent.add_argument("--min-pixels", type=int, default=rollout.Source.min_pixels,
                       help="pixels of a frame after resizing, at least")
    parser.set_defaults(temperature=0.0)  # training's is 0.7
    return parser


def shard_argument(text):
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        why = "expected I/N with 0 <= I < N, for example 0/4"
        raise argparse.ArgumentTypeError(f"{text!r}: {why}")
    return int(part), int(parts)


def parse_args():
    parser = build_parser()
    # A protocol and a preset set defaults, which yield to flags: they have to be known first.
    early, _ = parser.parse_known_args()
    parser.set_defaults(**systems.settings(early.protocol, early.protocol_set))
    if early.preset == "toy":
        parser.set_defaults(**rollout.toy_lengths())
    args = parser.parse_args()
    for wrong, why in faults(args):
        if wrong:
            raise model.UserError(why)
    if len(args.bench) > len(args.root):  # one folder of folders; both Video-MMEs share theirs
        names = [name.removesuffix("_wsub") for name in args.bench]
        args.root = [os.path.join(args.root[0], name) for name in names]
    return args


def faults(args):
    """[(whether the flags cannot be meant, why)]: told before anything is read or loaded."""
    benches, roots = len(args.bench), len(args.root)
    found = [(args.judge_url and not args.judge_model, "--judge-url needs --judge-model")]
    if args.compare or args.table or args.rescore:
        return found  # all else comes from the folders
    found += [
        (not (args.data or benches), "give --data (task JSONL), --bench with --root, or --compare "
         "with finished evaluations"),
        (args.prepare and benches != 1, "--prepare takes one --bench"),
        (benches and (args.data or not roots), "--bench needs --root, and no --data"),
        (benches and roots not in (1, benches), f"--root: {roots} folders for {benches} "
         "benchmarks; give one each, or one that holds all"),
    ]
    if args.prepare:
        return found  # nothing is sampled
    return found + systems.faults(args) + [
        (not args.ckpt and args.engine != "openai",
         "give --ckpt, or --engine openai with --base-url and --model"),
        (args.limit < 0 or args.live < 0, "--limit and --live may not be negative"),
        (args.samples < 1 or (args.samples > 1 and args.temperature == 0), "--samples must be at "
         "least 1, and above 1 needs --temperature above 0: greedy samples are all the same"),
    ]


# ------------------------------------------------------------------------------------------------
# Records: one line an item, appended as it finishes. An item is (task id, K, tools, sample).


def settings_digest(args, ckpt, subtitles, tasks, prompts):
    """What must be equal for records to belong together: tasks, prompts, checkpoint, and every flag
    but those that say where, which part, how fast, and who judges."""
    # Where: what is found there (tasks, prompts, weights) counts, its path does not.
    free = {"ckpt", "data", "bench", "root", "video_root", "out", "prompt_file"}
    # Which part: every item carries its own K, mode and sample. `subtitles` is the resolved flag.
    free |= {"limit", "shard", "frames", "tools", "samples", "subtitles"}
    # How fast, and what happens to records that are there already.
    free |= {"live", "workers", "retries", "request_timeout", "api_key_env"}
    free |= {"max_seqs", "frame_cache_gb", "engine_share", "patience", "decode_timeout", "quiet"}
    free |= {"judge_url", "judge_model", "judge_key_env", "allow_errors"}
    kept = {name: value for name, value in sorted(vars(args).items()) if name not in free}
    # The same path may hold a newer checkpoint: its time of writing, in seconds.
    stamp = os.path.getmtime(os.path.join(ckpt, "config.json")) if ckpt else None
    settings = json.dumps([kept, prompts, subtitles, ckpt, stamp, tasks])
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def read_records(out, digest=None):
    """
    Finished records of a folder -> {item: record}. A torn last line is dropped; of an item that was
    asked again after an engine error, the error loses.

    Raises UserError where records are of other settings than `digest`, or of two settings.
    """
    done = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(out), "records.*.jsonl"))):
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
        # A whole line ends in a newline, so the last piece is empty or torn.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = json.loads(line)
            except ValueError:
                why = "not JSON; delete the line or the file"
                raise model.UserError(f"{path}:{number}: {why}") from None
            digest = digest or record["digest"]  # of the first one, where none is asked for
            if record["digest"] != digest:
                why = "holds records of another checkpoint or other settings; choose another --out"
                raise model.UserError(f"{out} {why}")
            item = record["task"]["id"], record["budget"], record["tools"], record["sample"]
            # Files of several ranks come in any order: the error may be read last.
            if not (item in done and record["status"] == "engine_error"):
                done[item] = record
    return done


def append_to(path):
    """-> file to read and append to. A last line that was interrupted is cut off: what is appended
    would become part of it."""
    with open(path, "ab+") as f:
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)
    return open(path, "a+", encoding="utf-8")


def record_of(episode, digest, budget, mode, args):
    """Episode -> its record: the text of every turn and all that was decided, without token ids."""
    # What only training needs; it is most of an episode's bytes.
    left = {"ids", "mask", "logps", "vision", "spans", "advantage", "version"}
    record = {name: value for name, value in episode.to_json().items() if name not in left}
    # "sub" holds the ids of a sub-agent.
    calls = [{name: value for name, value in c.items() if name != "sub"} for c in episode.calls]
    times = [round(float(second), 3) for second in episode.notes.get("seconds", [])]
    prompt = json.dumps(episode.notes.get("opening")).encode()  # None for a broken video
    record.update(calls=calls, digest=digest, budget=str(budget), tools=mode, frame_times=times,
                  prompt_hash=hashlib.sha256(prompt).hexdigest()[:16])
    return {**record, **grade(record, args.protocol)}


def grade(record, protocol="paravt"):
    """One record -> {"said", "extracted", "score"}, the score in [0, 1]."""
    if record["status"] != "ok":  # whatever was said before it broke is no answer
        return {"said": None, "extracted": None, "score": 0.0}
    task = record["task"]
    kind, options = task["type"], task.get("options")
    said = systems.protocols()[protocol].final(record["turns"], record["think_open"])
    # What is extracted never depends on the gold answer, which is looked at only afterwards.
    extracted = None
    if said is not None and kind == "mcq":
        extracted = rewards.extract_letter(said, options)
    elif said is not None and kind == "grounding":
        extracted = rewards.extract_span(said)
    elif said is not None:
        extracted = rewards.region(said) or None
    # Exact: token F1 pays for the way to an answer, a benchmark asks for the answer.
    score = rewards.accuracy(said, kind, task["answer"], options, open_metric="exact")
    return {"said": said, "extracted": extracted, "score": score}


def graded(folder, judge):
    """Records of a folder, graded as the code grades now, and by a judge where one is named
    -> {item: record}. judge: flags, see systems.judge."""
    kept = read_json(folder, "args.json")
    records = read_records(folder)
    # An older grader may have written them: its score is not believed.
    for record in records.values():
        record.update(grade(record, kept["protocol"]))
    if judge.judge_model:
        with append_to(os.path.join(folder, "judge.jsonl")) as verdicts:
            systems.judge(records.values(), verdicts, judge)
    return records


# ------------------------------------------------------------------------------------------------
# Scores


def resampled(records, bench, draws=2000):
    """
    -> (headline, draws of it [draws]): None and [] without any of its items, fewer where a draw
    holds none. Videos are drawn with replacement, not items: questions of one video err together.

    The draws depend on the set of videos alone: two systems on the same items are drawn alike, and
    the difference of their draws is paired.
    """
    _, part_of = benchmarks.headline(bench)
    parts = [part_of(record) for record in records]  # None: in no part
    names = sorted({part for part in parts if part is not None})
    if not names:
        return None, np.zeros(0)
    # All videos have a line, also those without an item of the headline.
    videos, lines = np.unique([r["task"]["video"] for r in records], return_inverse=True)
    sums = np.zeros((len(videos), len(names)))  # of scores, [videos, parts]
    counts = np.zeros((len(videos), len(names)))  # of items
    for record, line, part in zip(records, lines, parts):
        if part is not None:
            sums[line, names.index(part)] += record["score"]
            counts[line, names.index(part)] += 1
    # How often a draw holds each video: [draws, videos].
    chances = np.full(len(videos), 1 / len(videos))
    times = np.random.default_rng(0).multinomial(len(videos), chances, size=draws).astype(float)
    items = times @ counts  # [draws, parts]
    there = items > 0  # a draw may miss a part, or all of them
    means = np.divide(times @ sums, items, out=np.zeros(items.shape), where=there)
    some = there.any(1)  # [draws]
    # Mean over parts of the mean over a part's items; of a draw, over the parts it holds.
    headline = float((sums.sum(0) / counts.sum(0)).mean())
    return headline, means.sum(1)[some] / there.sum(1)[some]


def interval(draws):
    """95% interval of bootstrap draws, None without any."""
    return [float(np.percentile(draws, q)) for q in (2.5, 97.5)] if len(draws) else None


def mean_scores(pairs):
    """[(label, record)] -> {label: n and accuracy}, in the order of the labels."""
    groups = {}
    for label, record in pairs:
        groups.setdefault(label, []).append(record["score"])
    return {label: {"n": len(groups[label]), "acc": sum(groups[label]) / len(groups[label])}
            for label in sorted(groups)}


def breakdowns(records):
    """-> {name: {label: n and accuracy}}; an item with several labels counts under each."""
    pairs = {}
    for record in records:
        task = record["task"]
        tags = task.get("tags") or {"category": task.get("category") or task["type"]}
        for name, labels in tags.items():
            for label in labels if isinstance(labels, list) else [labels]:
                pairs.setdefault(name, []).append((str(label), record))
    return {name: mean_scores(some) for name, some in pairs.items()}


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, tools) -> dict of numbers. Errors are in every denominator."""
    n = len(records)
    value, draws = resampled(records, bench)
    fine = [r for r in records if r["status"] == "ok"]
    causes = sorted({r["status"] for r in records} - {"ok"})
    out = {
        "n": n,
        "metric": benchmarks.headline(bench)[0],
        "headline": value,
        "interval": interval(draws),
        "acc": sum(r["score"] for r in records) / n,  # whatever the headline is
        "f_tau": sum(r["reward"]["fmt"] for r in records) / n,
        "kappa": sum(call["status"] == "ok" for r in records for call in r["calls"]) / n,
        "errors": {cause: sum(r["status"] == cause for r in records) for cause in causes},
        "no_answer": sum(r["extracted"] is None for r in fine),  # ended well, and none was found
        "truncated": sum(r["finish"][-1:] == ["length"] for r in fine),  # in the last turn
        "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n,
    }
    if judged:
        verdicts = [r["judge"] and r["judge"]["verdict"] for r in records if "judge" in r]
        failed = verdicts.count(None)  # asked in vain, or neither yes nor no
        out["judge"] = {"asked": len(verdicts), "yes": verdicts.count(True), "failed": failed}
        if failed:  # counts towards the 1% above which the headline is refused
            out["errors"]["judge_error"] = failed
    samples = {}  # task id -> scores of its episodes
    for r in records:
        samples.setdefault(r["task"]["id"], []).append(r["score"])
    if n > len(samples):
        out["samples"] = max(map(len, samples.values()))
        out["pass@n"] = sum(map(max, samples.values())) / len(samples)
    kinds = {r["task"]["type"] for r in records}
    if kinds == {"grounding"}:  # recall at thresholds of the IoU
        out.update({f"R@{t}": sum(r["score"] >= t for r in records) / n for t in (0.3, 0.5, 0.7)})
    if len(kinds) > 1:
        out["by_type"] = mean_scores((r["task"]["type"], r) for r in records)
    out["by"] = breakdowns(records)
    return out


def refuse(results, allow_errors):
    """Take the headline of results with more than 1% failed items away -> lines that say why."""
    said = []
    for row in results:
        failed = sum(row["errors"].values())
        if failed > 0.01 * row["n"] and not allow_errors:
            row["headline"] = row["interval"] = None
            causes = ", ".join(f"{count} {cause}" for cause, count in row["errors"].items())
            place = f"{row.get('bench') or 'data'} at K {row['K']}, tools {row['tools']}"
            said.append(f"{place}: {failed} of {row['n']} items failed ({causes})")
    return said


# ------------------------------------------------------------------------------------------------
# Tables


def shown_interval(row):
    if row.get("headline") is None:
        return "refused: errors"
    return "{:.3f} [{:.3f}, {:.3f}]".format(row["headline"], *row["interval"])


def table(results, labels=12):
    """Results -> aligned text: a row per benchmark, K and mode, then its breakdowns; those with one
    label, or more than `labels`, are in the summary alone."""
    named = any(row.get("bench") for row in results)
    head = f"{'bench':<15} " if named else ""  # no column that would be empty
    lines = [f"{head}{'K':>6} {'tools':>5} {'n':>5} {'headline [95%]':>22} {'acc':>6} {'f_tau':>6} "
             f"{'kappa':>6} {'errors':>6} {'no answer':>9} {'cut off':>7}"]
    for row in results:
        head = f"{row.get('bench') or '-':<15} " if named else ""
        indent = " " * len(head)
        lines.append(f"{head}{row['K']!s:>6} {row['tools']:>5} {row['n']:>5} "
                     f"{shown_interval(row):>22} {row['acc']:>6.3f} {row['f_tau']:>6.3f} "
                     f"{row['kappa']:>6.2f} {sum(row['errors'].values()):>6} "
                     f"{row['no_answer']:>9} {row['truncated']:>7}")
        # What only some results have goes below, in one line.
        more = [f"{row['metric']} is the headline"] if row["metric"] != "accuracy" else []
        for name in ("pass@n", "R@0.3", "R@0.5", "R@0.7"):
            more += [f"{name} {row[name]:.3f}"] if name in row else []
        for kind, cell in row.get("by_type", {}).items():
            more.append(f"{kind} {cell['acc']:.3f} of {cell['n']}")
        if more:
            lines.append(f"{indent}       {', '.join(more)}")
        for name, found in row["by"].items():
            for label, cell in found.items() if 1 < len(found) <= labels else []:
                numbers = f"{cell['n']:>5} {cell['acc']:>6.3f}"
                lines.append(f"{indent}{'':>12} {numbers}  {name} {label}")
    return "\n".join(lines)


def compare(folders):
    """Finished evaluations -> {"time", "rows", "differences"}: a row per checkpoint, benchmark and
    K, with tools and without; the difference of every folder to the first, paired by item."""
    rows, found = [], []
    for folder in folders:
        name, summary = read_summary(folder)
        pairs = {}  # (benchmark, K) -> one row of both modes
        for r in summary["results"]:
            place = {"bench": r.get("bench"), "K": r["K"]}
            row = pairs.setdefault(tuple(place.values()), {"name": name, **place, "n": r["n"]})
            if r["tools"] == "on":
                row.update(acc_tools=r["headline"], f_tau=r["f_tau"])
                row.update(kappa=r["kappa"], interval=r["interval"])
            else:
                row.update(acc_no_tools=r["headline"])
        rows += pairs.values()
        # The verdicts that it was judged by count; nobody is asked again.
        judge = argparse.Namespace(judge_url=None, judge_model=summary.get("judge_model"))
        here = {}  # (benchmark, K, tools) -> {(task id, sample): record}
        for bench, leaf in leaves(folder):
            for (task, k, mode, sample), record in graded(leaf, judge).items():
                here.setdefault((bench, k, mode), {})[task, sample] = record
        found.append((name, here))
    differences = []
    (minus, first), *others = found
    for place, own in first.items():
        for name, here in others:
            other = here.get(place, {})
            # The same items alone: what one of them did not run says nothing about the other.
            same = sorted(set(own) & set(other), key=str)
            a, drawn_a = resampled([own[item] for item in same], place[0])
            b, drawn_b = resampled([other[item] for item in same], place[0])
            if a is not None:
                row = dict(zip(("bench", "K", "tools"), place))
                row.update(n=len(same), name=name, minus=minus, difference=b - a)
                differences.append({**row, "interval": interval(drawn_b - drawn_a)})
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"time": when, "rows": rows, "differences": differences}


def comparison(compared):
    """What `compare` found -> aligned text."""
    lines = [f"{'checkpoint':<12} {'K':>6} {'n':>5} {'with tools [95%]':>22} {'no tools':>9} "
             f"{'f_tau':>6} {'kappa':>6}"]
    for row in compared["rows"]:
        tools = "-"  # not run, or refused
        if row.get("acc_tools") is not None:
            tools = shown_interval({"headline": row["acc_tools"], "interval": row["interval"]})
        line = f"{row['name']:<12} {row['K']!s:>6} {row['n']:>5} {tools:>22}"
        for name, width, digits in (("acc_no_tools", 9, 3), ("f_tau", 6, 3), ("kappa", 6, 2)):
            cell = "-" if row.get(name) is None else f"{row[name]:.{digits}f}"
            line += f" {cell:>{width}}"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    if compared["differences"]:
        lines += ["", "difference of the same items [95%]"]
    for row in compared["differences"]:
        line = f"{row['name']} - {row['minus']}".ljust(28)
        low, high = row["interval"]
        line += f" {row['K']:>6} tools {row['tools']:<3} {row['difference']:+.3f} "
        line += f"[{low:+.3f}, {high:+.3f}] {row['n']} items"
        lines.append(line + (f"  {row['bench']}" if row["bench"] else ""))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------
# Finished folders. A leaf holds records: an --out of --data, or a folder in an --out of --bench.


def leaf_of(out, bench):
    return os.path.join(out, bench) if bench else out


def leaves(folder):
    """-> [(benchmark or None, leaf)] of an --out. Raises UserError where there is none."""
    found = [(bench, leaf_of(folder, bench)) for bench in [*benchmarks.splits(), None]]
    found = [pair for pair in found if os.path.exists(os.path.join(pair[1], "tasks.jsonl"))]
    if not found:
        raise model.UserError(f"{folder}: no tasks.jsonl and records here")
    # A folder that was used for both: benchmarks alone, as one table cannot hold them beside data.
    return [pair for pair in found if pair[0]] or found


def read_json(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return json.load(f)


def write_json(value, *path):
    model.write_atomic(os.path.join(*path), json.dumps(value, indent=1))


def write_tasks(tasks, path):
    model.write_atomic(path, "".join(json.dumps(task) + "\n" for task in tasks))


def read_summary(folder):
    """-> (the folder's last name, its summary). Raises UserError where it has none."""
    try:
        return os.path.basename(os.path.normpath(folder)), read_json(folder, "summary.json")
    except (OSError, ValueError) as error:
        why = f"{error}; finish this evaluation first"
        raise model.UserError(f"{folder}/summary.json: {why}") from None


def finish(out, found, args, checkpoint):
    """Records of the leaves `found` -> summary.json of each and of the whole, tables: the end of
    an evaluation and of --rescore."""
    results, missing = [], 0
    for bench, leaf in found:
        tasks = model.read_jsonl(os.path.join(leaf, "tasks.jsonl"))
        kept = read_json(leaf, "args.json")  # of the run, which may differ from ours
        done = graded(leaf, args)
        # What was asked for, not what is there: a run that was cut short has no summary.
        ids = [(task["id"], sample) for task in tasks for sample in range(kept["samples"])]
        for k, mode in itertools.product(kept["frames"], kept["tools"]):
            items = [(task, str(k), mode, sample) for task, sample in ids]
            records = [done[item] for item in items if item in done]
            missing += len(items) - len(records)
            row = {"bench": bench} if bench else {}
            row.update(K=k, tools=mode)
            if records:
                row.update(summarise(records, bench, judged=bool(args.judge_model)))
                results.append(row)
    if missing:
        why = "run the same command (or the other shards) first, then --rescore"
        raise model.UserError(f"{out}: {missing} items have no record yet; {why} {out}")
    refused = refuse(results, args.allow_errors)
    summary = {"checkpoint": checkpoint}
    if args.judge_model:
        summary["judge_model"] = args.judge_model
    told = ("protocol", "protocol_set", "prompt_hash", "prompt_file", "served")
    summary |= {name: kept[name] for name in told if name in kept}  # served: by an endpoint alone
    summary["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
    for bench, leaf in found:
        own = [row for row in results if row.get("bench") == bench]
        write_json({**summary, "results": own}, leaf, "summary.json")
    write_json({**summary, "results": results}, out, "summary.json")
    print(model.printable(table(results)))
    acc = {}  # the last line is for scripts: "[bench/]K/tools" -> accuracy
    for row in results:
        place = [row["bench"]] if "bench" in row else []
        acc["/".join([*place, str(row["K"]), row["tools"]])] = round(row["acc"], 4)
    print(json.dumps({"summary": os.path.join(out, "summary.json"), "acc": acc}))
    if refused:  # last, so that the table and the summary are there: exit code 2
        why = "no headline above 1% failed items (--allow-errors prints it): "
        raise model.UserError(why + "; ".join(refused))


def rescore(folders, args):
    """Grade finished records again; those of several folders (shards) become parts of one run."""
    sources = [(number, pair) for number, folder in enumerate(folders) for pair in leaves(folder)]
    # Copied, so that the merged folder can be graded again and compared like any other.
    for number, (bench, leaf) in sources if len(folders) > 1 else []:
        target = leaf_of(args.out, bench)
        model.make_out(target)
        # Before anything is copied: --out would hold records of two settings.
        known = [*read_records(leaf).values(), *read_records(target).values()]
        if len({record["digest"] for record in known}) > 1:
            why = "its records are of another checkpoint or other settings than those of"
            raise model.UserError(f"--rescore {folders[number]}: {why} {folders[0]}")
        for path in glob.glob(os.path.join(glob.escape(leaf), "records.*")):
            name = os.path.basename(path).replace("records.", f"records.part{number}.", 1)
            shutil.copyfile(path, os.path.join(target, name))
        for name in ("tasks.jsonl", "args.json"):
            shutil.copyfile(os.path.join(leaf, name), os.path.join(target, name))
    out = args.out if len(folders) > 1 else folders[0]
    kept = read_json(leaves(out)[0][1], "args.json")
    finish(out, leaves(out), args, kept["ckpt"] or kept["model"])


# ------------------------------------------------------------------------------------------------
# The run


@dataclass
class Suite:
    """One benchmark, or --data: what is run and where its records go."""

    bench: str | None
    tasks: list  # the first --limit
    agent: rollout.Agent
    source: rollout.Source  # of its videos and subtitles
    out: str  # its leaf
    digest: str  # see settings_digest
    done: set  # items with a record that stands


def load_suites(args, ckpt, prompts):
    suites = []
    for bench, root in zip(args.bench or [None], args.root or [None]):
        flags = argparse.Namespace(**{**vars(args), "tools": True})  # the mode is each job's
        shown = args.subtitles or "none"
        if bench:
            tasks, notes = benchmarks.read_split(bench, root)
            print_notes(bench, notes)
            flags.video_root = args.video_root or root
            shown = args.subtitles or benchmarks.splits()[bench].shown
        else:
            tasks = rollout.read_tasks(args.data)
        agent, source = rollout.agent_settings(flags, args.data)
        source.cache.timeout = args.decode_timeout or None
        if shown != "none":
            source.subtitles = partial(benchmarks.task_subtitles, root=source.root, which=shown)
        out = leaf_of(args.out, bench)
        model.make_out(out)
        # Of all tasks, not of the first --limit: a short run is part of a long one.
        digest = settings_digest(args, ckpt, shown, tasks, prompts)
        records = read_records(out, digest)
        # A broken video stays broken; an endpoint that was down is asked again.
        done = {item for item, r in records.items() if r["status"] != "engine_error"}
        suites.append(Suite(bench, tasks[: args.limit or None], agent, source, out, digest, done))
    return suites


def print_notes(name, notes):
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)


def plan(suites, args, rank, world):
    """-> [(suite, K, mode, tasks)] of this shard and rank. A task whose items are not all done is
    asked with all its samples: they are drawn as a group."""
    part, parts = args.shard
    jobs = []
    for suite, k, mode in itertools.product(suites, args.frames, args.tools):
        todo = []
        for task in suite.tasks[part::parts][rank::world]:
            items = {(task["id"], str(k), mode, sample) for sample in range(args.samples)}
            if not items <= suite.done:
                todo.append(task)
        jobs.append((suite, k, mode, todo))
    return jobs


def evaluate(args):
    """Run what has no record yet, on every rank; rank 0 writes the summary."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    part, parts = args.shard
    if args.judge_url:  # hours of episodes later would be late to find out
        systems.OpenAIEngine(args.judge_url, args.judge_model).knock()
    ckpt = model.resolve_checkpoint(args.ckpt) if args.ckpt else None  # endpoints have none
    protocol, prompts = systems.make_protocol(args)
    suites = load_suites(args, ckpt, prompts)
    if world > 1:
        import torch.distributed as dist

        model.start_process_group(args.patience)
        dist.barrier()  # every rank has read the records before any appends to them
    model.beat(args.patience)
    # What --rescore and --compare read; once for all ranks.
    kept = {**vars(args), "prompt_hash": prompts}
    for suite in suites if rank == 0 else []:
        write_tasks(suite.tasks, os.path.join(suite.out, "tasks.jsonl"))
        write_json(kept, suite.out, "args.json")
    jobs = plan(suites, args, rank, world)
    needed = any(todo for *_, todo in jobs)
    if world > 1:  # building vLLM is collective: all ranks build, or none does
        needed = model.any_rank(needed)
    engine = None
    if needed:
        # Without a checkpoint there are no ids: prompts stay messages, answers text.
        codec = model.load_codec(ckpt, args.channel) if ckpt else None
        engine = make_engine(suites, args, ckpt, codec, protocol)
        shard = f"shard{part}of{parts}." if parts > 1 else ""
        name = f"records.{shard}rank{rank}.jsonl"  # a file per rank: nobody waits for a lock
        run_jobs(jobs, engine, codec, protocol, args, name, quiet=rank > 0 or args.quiet)
    if world > 1:
        dist.barrier()  # all records are there
    if engine and args.engine == "openai" and rank == 0:
        for suite in suites:  # the name asked for may stand for another model next month
            write_json({**kept, "served": sorted(engine.served)}, suite.out, "args.json")
    if engine:
        engine.close()
    if world > 1 and dist.is_initialized():  # closing vLLM ends the group
        dist.destroy_process_group()
    if rank == 0 and parts > 1:  # no summary: a part would pass for the whole
        then = f"python eval.py --rescore {args.out} (or the folder of every shard, with --out)"
        print(f"shard {part} of {parts} is done; when all are: {then}")
    elif rank == 0:
        found = [(suite.bench, suite.out) for suite in suites]
        finish(args.out, found, args, args.ckpt or args.model)


def make_engine(suites, args, ckpt, codec, protocol):
    """The engine that samples, made for the largest K of the run."""
    largest = max(64 if k == "gated" else k for k in args.frames)  # gated draws up to 64
    # A context that is too small for the first prompt is told now, not by every episode.
    for suite in suites if codec else []:
        rollout.check_context(codec, suite.tasks, suite.agent, suite.source, largest)
    if args.engine == "openai":
        return systems.make_engine(args, protocol)
    limits = argparse.Namespace(**{**vars(args), "frames": largest})
    return rollout.make_engine(ckpt, codec, limits, args.seed)


def run_jobs(jobs, engine, codec, protocol, args, name, quiet):
    """Every episode becomes a line of its suite's file `name` as it finishes."""
    from tqdm import tqdm

    total = sum(len(todo) for *_, todo in jobs) * args.samples
    with tqdm(total=total, desc="episodes", disable=quiet or None) as bar:
        for suite, k, mode, todo in jobs:  # one after the other: the agent differs
            agent = replace(suite.agent, tools=mode == "on")
            episodes = rollout.run(
                engine, todo, agent, codec, suite.source, frames=k, group=args.samples,
                max_live=args.live or None, protocol=protocol)
            with append_to(os.path.join(suite.out, name)) as f:
                for episode in episodes:
                    record = record_of(episode, suite.digest, k, mode, args)
                    f.write(json.dumps(record) + "\n")
                    f.flush()  # a crash loses the episodes under way, no more
                    bar.update()
                    model.beat(args.patience)


def main():
    args = parse_args()
    if args.prepare:
        tasks, notes = benchmarks.read_split(args.bench[0], args.root[0])
        write_tasks(tasks, args.prepare)
        print_notes(args.prepare, notes)
    elif args.table:
        summaries = [read_summary(folder) for folder in args.table]
        print(model.printable(benchmarks.markdown_table(summaries)))
    elif args.rescore:
        rescore(args.rescore, args)
    elif args.compare:
        compared = compare(args.compare)
        model.make_out(args.out)
        write_json(compared, args.out, "summary.json")
        print(model.printable(comparison(compared)))
    else:
        evaluate(args)


if __name__ == "__main__":
    model.run_main(main)
