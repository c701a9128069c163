"""
evaluation/results.py (tests/test_eval.py): reads and grades the records of an evaluation, and
compares finished folders without a model.

A record is one line per item, appended when the episode ends. An item is (task id, K, mode,
sample), see scores.mode_of. A bench_dir is a folder of records: the --out of --data, or a folder in
the --out of --bench.

Reads and writes: records.*.jsonl, tasks.jsonl, args.json, judge.jsonl, summary.json.
Used by eval.py: --rescore, --compare, --table, --prepare.
"""

import argparse
import collections
import hashlib
import itertools
import json
import os
import pathlib
import re
import sys
import time

import launch
from evaluation import answers, benchmarks, costs, endpoint, scores, systems
from plumbing import runs

# ------------------------------------------------------------------------------------------------
# Records


def settings_digest(args, weights, subtitles, tasks, prompts, texts=None):
    """-> digest of all that must be equal for records to belong together: tasks, prompts, weights
    (a digest), texts (a digest of the subtitles; None: none are shown), and every flag except those
    for paths, parts, speed and judges."""
    # Paths: the digest covers the contents of the files (tasks, prompts, weights).
    ignored = "ckpt data bench root video_root out prompt_file user_file texts_of "
    # Parts: a record names K, mode and sample. The argument `subtitles` is the resolved flag.
    ignored += "limit frames tools show samples subtitles video question options "
    # Speed, addresses, and the treatment of finished records.
    ignored += ("live workers retries request_timeout api_key_env base_url give_up server_wait "
                "max_num_seqs frame_cache_gb frame_cache_dir frame_cache_dir_gb "
                "gpu_memory_utilization patience quiet cpu judge_url judge_model judge_tokens "
                "judge_key_env allow_errors missing_videos")
    covered = {k: v for k, v in sorted(vars(args).items()) if k not in ignored.split()}
    # Where a benchmark's files lie, and whether all are there yet, is no setting.
    tasks = [{**task, "video": pathlib.Path(task["video"]).stem, "subtitles": None}
             if task.get("split") else task for task in tasks]
    settings = json.dumps([covered, prompts, subtitles, weights, tasks, *filter(None, [texts])])
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def read_records(out, digest=None):
    """
    Finished records of a folder -> {item: record}. A torn last line is dropped, and one in which a
    disk lost bytes, which come back as zeros. If an item was asked again after an error that may
    pass, the error is dropped.

    Raises UserError if records are of other settings than `digest`, or of two settings.
    """
    done = {}
    for name in sorted(n for n in os.listdir(out) if re.fullmatch(r"records\..*\.jsonl", n)):
        lines = launch.read_file(path := os.path.join(out, name)).split(b"\n")
        # A whole line ends in a newline, so the last piece is empty or torn.
        for number, line in enumerate(lines[:-1], 1):
            if b"\0" in line:
                continue
            try:
                row = launch.parse_json(line)
                item = row["task"]["id"], row["budget"], scores.mode_of(row), row["sample"]
                digest = digest or row["digest"]  # None: of the first record
            except (ValueError, KeyError, TypeError):
                reason = "not JSON, or no record; delete the line or the file"
                raise launch.UserError(f"{path}:{number}: {reason}") from None
            if row["digest"] != digest:
                raise launch.UserError(f"{out} holds records of another checkpoint or other "
                                       "settings; choose another --out")
            # Files of several ranks come in any order, so the error may be read last.
            if not (item in done and runs.is_retried(row)):
                done[item] = row
    return done


def grid_cells(flags):
    """Flags of a run, as a dict -> its (K, mode). Without frames there is nothing to look at and
    nothing to blank or shuffle."""
    shows = flags.get("show") or ["real"]  # runs from before the flag
    grid = []
    for k, tools, show in itertools.product(flags["frames"], flags["tools"], shows):
        if k != 0 or (tools == "off" and show in ("real", "options")):
            grid.append((k, scores.mode_of({"tools": tools, "show": show})))
    return grid


def open_append(path):
    """-> file to read and append to. A torn last line is cut off first, because the next line would
    become a part of that line."""
    with open(path, "ab") as f:
        f.truncate(launch.read_file(path).rfind(b"\n") + 1)
    return open(path, "a+", encoding="utf-8", errors="replace")


# ------------------------------------------------------------------------------------------------
# Grading


def record_of(episode, digest, k, mode, args, taken=None) -> dict:
    """Episode -> record: the text of every turn, calls, rewards, costs and grade, without token
    ids. k: as in --frames. mode: see scores.mode_of. taken: tokens of the requests, see
    costs.Meter."""
    # Only training needs these fields, and they are most of an episode's bytes.
    dropped = {"ids", "mask", "logps", "vision", "spans", "advantage", "policy_step"}
    record = {name: value for name, value in episode.to_dict().items() if name not in dropped}
    # "sub" holds the ids of a sub-agent, left out too. The times of its frames are kept.
    calls = [{name: value for name, value in c.items() if name != "sub"} for c in episode.calls]
    for call, kept in zip(episode.calls, calls):
        if "sub" in call:
            seconds = call["sub"]["vision"][0]["seconds"]
            kept["sub_seconds"] = [round(float(second), 3) for second in seconds]
    times = [round(float(second), 3) for second in episode.notes.get("seconds", [])]
    # A hash of the opening messages shows which wording a record was asked with.
    prompt = json.dumps(episode.notes.get("opening")).encode()  # None for a broken video
    if any(episode.notes.get("reasoning", [])):  # texts that an endpoint kept apart, one per turn
        record["reasoning"] = episode.notes["reasoning"]
    tools, show = scores.split_mode(mode)
    record.update(calls=calls, digest=digest, budget=str(k), tools=tools, show=show,
                  frame_times=times, prompt_hash=hashlib.sha256(prompt).hexdigest()[:16],
                  cost=costs.episode_cost(episode, taken or {}))
    return {**record, **grade_record(record, args.protocol)}


def grade_record(record, protocol="paravt"):
    """One record -> {"final_answer", "extracted", "score"}, the score in [0, 1]."""
    if record["status"] != "ok":  # text from before the failure is no answer
        return {"final_answer": None, "extracted": None, "score": 0.0}
    task = record["task"]
    final_answer = systems.all_systems()[protocol].final(record["turns"], record["think_open"])
    return {"final_answer": final_answer, "extracted": answers.read_answer(final_answer, task),
            "score": answers.score_answer(final_answer, task)}


def grade_folder(folder, judge):
    """Folder -> {item: record}, graded by the present code, and by a judge if the flags name one.
    judge: flags, see endpoint.judge."""
    flags, records = read_json(folder, "args.json"), read_records(folder)
    # An older version of the grader may have written the scores, so all records are graded again.
    for record in records.values():
        record.update(grade_record(record, flags["protocol"]))
    if judge.judge_model:
        endpoint.judge(records.values(), os.path.join(folder, "judge.jsonl"), judge)
    return benchmarks.apply_group_scores(records)


# ------------------------------------------------------------------------------------------------
# Finished folders


def bench_dir_of(out, bench):
    return os.path.join(out, bench) if bench else out


def list_bench_dirs(folder):
    """-> [(benchmark or None, bench_dir)] of an --out. Raises UserError if there is none."""
    pairs = [(bench, bench_dir_of(folder, bench)) for bench in [*benchmarks.splits(), None]]
    pairs = [pair for pair in pairs if launch.is_file(os.path.join(pair[1], "tasks.jsonl"))]
    if not pairs:
        raise launch.UserError(f"{folder}: no tasks.jsonl and records here")
    # If --out was used for both, only the benchmarks, because one table cannot hold both.
    return [pair for pair in pairs if pair[0]] or pairs


def read_json(*path):
    """A JSON file of a finished folder. Raises UserError."""
    path = os.path.join(*path)
    try:
        return launch.parse_json(launch.read_file(path))
    except (OSError, ValueError) as error:
        raise launch.UserError(f"{path}: {error}; finish this evaluation first") from None


def write_json(value, *path):
    launch.write_atomic(os.path.join(*path), json.dumps(value, indent=1))


def write_tasks(tasks, path):
    launch.write_atomic(path, "".join(json.dumps(task) + "\n" for task in tasks))


def load_finished(folder):
    """
    Folder -> the triple that scores.compare takes. Headlines and intervals of the summary are
    computed again from the records, as graded by the present code; a refused one stays refused.
    Raises UserError if a summary is of other records than the folder holds.
    """
    name, summary = os.path.basename(os.path.normpath(folder)), read_json(folder, "summary.json")
    # Without an address the judge is not asked again: the verdicts in the folder count.
    judge = argparse.Namespace(judge_url=None, judge_model=summary.get("judge_model"))
    cells = {}  # (benchmark, K, mode) -> {(task id, sample): record}
    for bench, bench_dir in list_bench_dirs(folder):
        for (task, k, mode, sample), record in grade_folder(bench_dir, judge).items():
            cells.setdefault((bench, k, mode), {})[task, sample] = record
    for row in summary["results"]:
        records = cells.get(scores.cell_of(row), {}).values()
        if len(records) != row["n"]:
            reason = f"its summary.json is of {row['n']} records, and there are {len(records)}"
            raise launch.UserError(f"{folder}: {reason}; finish the run, then --rescore {folder}")
        # Without its verdict an open answer would count as wrong.
        lost = sum(record.get("judge", 0) is None for record in records)
        if lost > row.get("judge", {}).get("failed", 0):
            raise launch.UserError(f"{folder}: judge.jsonl lacks {lost} verdicts; ask for them: "
                                   f"--rescore {folder} --judge-url URL --judge-model NAME")
        refused = row["headline"] is None
        row.update(scores.headline_stats(records, row.get("bench")))
        if refused:
            row["headline"] = row["interval"] = None
    if away := sum(launch.MACHINE in str(r.get("error")) or r.get("judge", 0) is None
                   for cell in cells.values() for r in cell.values()):
        print(f"WARNING: {folder}: {away} items failed through the machine or lack a verdict; the "
              "command that wrote it asks them again", file=sys.stderr)
    return name, summary, cells


def load_evaluations(words):
    """
    Words of --compare and --table -> finished evaluations, in order. A word NAME= begins a group:
    the folders after it are runs of one system, pooled under that name. A folder whose own name
    ends in "=" is written with a slash after it.

    Raises UserError for a group without folders, a group's name given twice, a folder twice in it.
    """
    evaluations, groups, name = [], {}, None
    for word in words:
        if word.endswith("="):
            name = word[:-1]
            if not name or name in groups:
                raise launch.UserError(f"{word}: a group needs a name of its own")
            groups[name] = []
        elif name is None:
            evaluations.append(load_finished(word))
        else:
            groups[name].append(word)
    for name, folders in groups.items():
        if not folders:
            raise launch.UserError(f"{name}=: name the folders of its runs after it")
        if len({os.path.realpath(folder) for folder in folders}) < len(folders):
            raise launch.UserError(f"{name}=: a folder stands twice among its runs")
        evaluations.append(scores.pool_seeds(name, [*map(load_finished, folders)]))
    return evaluations


def finish(out, bench_dirs, args, policy, parts=None):
    """
    Writes summary.json of every folder of `bench_dirs` and of the whole, and prints the tables: the
    end of an evaluation and of --rescore. Raises UserError if a record is missing, or if too many
    items failed.

    policy: the checkpoint, or the model of an endpoint. parts: {bench_dir: tasks} of those that
    hold more tasks than this run asked: these are printed, not written.
    """
    results, missing, cells, parts, served = [], 0, {}, parts or {}, set()
    errors = collections.Counter()  # messages of failed items
    for bench, bench_dir in bench_dirs:
        tasks = parts.get(bench_dir) or launch.read_jsonl(os.path.join(bench_dir, "tasks.jsonl"))
        flags = read_json(bench_dir, "args.json")  # flags of the run, which --rescore does not have
        if bench_dir in parts:
            flags |= vars(args)
        done = grade_folder(bench_dir, args)
        # flags: of runs from before the records' field.
        served.update(flags.get("served", ()), *(r.get("served", ()) for r in done.values()))
        # All items that the run was to ask: a run that was cut short has no summary.
        ids = [(task["id"], sample) for task in tasks for sample in range(flags["samples"])]
        for k, mode in grid_cells(flags):
            items = [(task, str(k), mode, sample) for task, sample in ids]
            records = [done[item] for item in items if item in done]
            missing += len(items) - len(records)
            row = {"bench": bench} if bench else {}
            row.update(zip(("K", "tools", "show"), (k, *scores.split_mode(mode))))
            if records:
                row.update(scores.summarise(records, bench, judged=bool(args.judge_model)))
                row["silent"] = sum(not any(text.strip() for text in r["turns"]) for r in records
                                    if r["status"] == "ok")
                results.append(row)
                cells[scores.cell_of(row)] = {(r["task"]["id"], r["sample"]): r for r in records}
            errors.update(r["error"] for r in records if r.get("error"))
    if missing:
        hint = "run the same command first, then --rescore"
        raise launch.UserError(f"{out}: {missing} items have no record yet; {hint} {out}")
    # Our engine hides no text: there an empty answer is wrong.
    refused = ([] if args.allow_errors
               else scores.refuse_headlines(results, refuse_empty=flags.get("engine") == "openai"))
    scores.add_crr(results)
    summary = {"checkpoint": policy}
    summary |= {"judge_model": args.judge_model} if args.judge_model else {}
    names = ("protocol", "prompt_hash", "prompt_file", "texts_of")
    summary |= {name: flags[name] for name in names if name in flags}
    summary |= {"served": sorted(served)} if served else {}  # of endpoints
    departures = list(systems.all_systems()[flags["protocol"]].departures)
    if flags["protocol"] != "paravt" and not (flags.get("prompt_file") or flags.get("texts_of")):
        departures.append("prompts in our wording, not the publisher's")
    if departures:
        summary["departures"] = departures
    summary["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
    for bench, bench_dir in bench_dirs:
        rows = [row for row in results if row.get("bench") == bench]
        if bench_dir not in parts:
            write_json({**summary, "results": rows}, bench_dir, "summary.json")
    controls = scores.control_tests(results, cells)
    if controls:
        summary["controls"] = controls
    if not parts:
        write_json({**summary, "results": results}, out, "summary.json")
    print(launch.printable(scores.table(results)))
    if controls:
        print(f"\n{launch.printable(scores.control_table([('', controls)]))}")
    acc = {}  # printed last, for scripts: "[bench/]K/mode" -> accuracy
    for row in results:
        prefix = [row["bench"]] if "bench" in row else []
        acc["/".join([*prefix, str(row["K"]), scores.mode_of(row)])] = round(row["acc"], 4)
    if len(served) > 1:
        print(f"answers came from several models: {launch.printable(', '.join(sorted(served)))}")
    if parts:
        print(f"{out} holds more tasks than these: its summary stays as it is")
    print(json.dumps({"summary": None if parts else os.path.join(out, "summary.json"), "acc": acc}))
    # Last, so that the table and the summary are there.
    if (away := [text for text in errors if launch.MACHINE in text]) and not args.allow_errors:
        raise launch.RunError(f"{sum(map(errors.get, away))} items failed through the machine; the "
                              f"same command asks them again: {away[0][:300]}")
    if refused:
        head = "no headline above 1% failed items (--allow-errors prints it): "
        for message, count in errors.most_common(1):
            refused.append(f"the most frequent error, {count} times: {message[:300]}")
        raise launch.UserError(head + "; ".join(refused))


def rescore(folders, args):
    """--rescore: grades the records of finished folders again."""
    for folder in folders:
        bench_dirs = list_bench_dirs(folder)
        flags = read_json(bench_dirs[0][1], "args.json")
        finish(folder, bench_dirs, args, flags["ckpt"] or flags["model"])


def compare(words, out):
    """--compare: one table from finished folders, and summary.json in `out`."""
    compared = scores.compare(load_evaluations(words))
    launch.make_out(out)
    write_json(compared, out, "summary.json")
    print(launch.printable(scores.comparison_table(compared)))


def table(words):
    """--table: benchmark folders beside the paper's numbers."""
    evaluations = load_evaluations(words)
    text = scores.paper_layout(evaluations)
    controls = [(name, scores.control_tests(summary["results"], cells))
                for name, summary, cells in evaluations]
    if any(rows for _, rows in controls):
        text += f"\n\n{scores.control_table(controls, markdown=True)}"
    print(launch.printable(text))


def prepare_data(bench, root, path):
    """--prepare: the tasks of a benchmark as task JSONL. Raises UserError if `path` exists."""
    if launch.is_file(path, folders=True):  # it may be a file of the publisher
        raise launch.UserError(f"--prepare {path}: there is such a file already")
    tasks, notes = benchmarks.read_split(bench, root)
    # --data shows the subtitle files that tasks name.
    if benchmarks.splits()[bench].default_subtitles == "none":
        tasks = [{**task, "subtitles": None} for task in tasks]
    write_tasks(tasks, path)
    print_counts(path, notes)


def print_counts(name, notes):
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)
