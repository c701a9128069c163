"""
evaluation/results.py (tests/test_eval.py): reads and grades the records of an evaluation, and
compares finished folders without a model.

A record is one line per item, appended when the episode ends. An item is (task id, K, mode,
sample); the mode is that of --tools, "on" or "off". A bench_dir is a folder of records: the --out
of --data, or a folder in the --out of --bench.

Numbers come from records, graded anew by the present code, never from a summary.json.

Reads and writes: records.*.jsonl, tasks.jsonl, args.json, judge.jsonl, summary.json.
Used by eval.py.
"""

import argparse
import collections
import glob
import hashlib
import json
import os
import pathlib
import time

import launch
from evaluation import answers, benchmarks, endpoint, scores, systems

# ------------------------------------------------------------------------------------------------
# Records


# Flags that change no answer, or that the digest holds by the content of their files.
NO_SETTINGS = ("ckpt data bench root out prompts limit frames tools samples preset base_url "
               "api_key_env max_num_seqs judge_url judge_model compare"
               ).split()


def settings_digest(args, weights, subtitles, tasks, prompts, texts=None):
    """-> digest of all that must be equal for records to belong together: tasks, prompts, weights
    (a digest), texts (a digest of the subtitles; None: none are shown), and the flags that change
    an answer. A record names its own K, mode and sample."""
    flags = {name: value for name, value in sorted(vars(args).items()) if name not in NO_SETTINGS}
    rows = []
    for task in tasks:
        if task.get("split"):
            # Where a benchmark's files lie, and whether all are there yet, is no setting.
            task = {**task, "video": pathlib.Path(task["video"]).stem, "subtitles": None}
        rows.append(task)
    settings = json.dumps([flags, prompts, subtitles, weights, rows, texts])
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def digest_of_files(paths):
    """-> digest of the bytes of files, wherever they lie. Raises UserError."""
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        try:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise launch.UserError(f"{path}: unreadable ({error.strerror})") from None
    return digest.hexdigest()[:16]


def read_records(out, digest=None):
    """
    Finished records of a folder -> {item: record}. A line that a kill has torn is dropped.

    Raises UserError if records are of other settings than `digest`, or of two settings.
    """
    done = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(out), "records.*.jsonl"))):
        # A whole line ends in a newline, so the last piece is empty or torn.
        for number, line in enumerate(launch.read_file(path).split(b"\n")[:-1], 1):
            try:
                row = launch.parse_json(line)
                item = row["task"]["id"], row["budget"], row["tools"], row["sample"]
                digest = digest or row["digest"]  # None: of the first record
            except (ValueError, KeyError, TypeError):
                fault = "not JSON, or no record; delete the line or the file"
                raise launch.UserError(f"{path}:{number}: {fault}") from None
            if row["digest"] != digest:
                raise launch.UserError(f"{out} holds records of another checkpoint or other "
                                       "settings; choose another --out")
            done[item] = row
    return done


def grid_cells(flags):
    """Flags of a run, as a dict -> its (K, mode). Without frames there is nothing to look at."""
    cells = []
    for k in flags["frames"]:
        for mode in flags["tools"]:
            if k != 0 or mode == "off":
                cells.append((k, mode))
    return cells


def open_append(path):
    """-> file to read and append to. A torn last line is cut off first, because the next line would
    become a part of that line."""
    with open(path, "ab") as f:
        f.truncate(launch.read_file(path).rfind(b"\n") + 1)
    return open(path, "a+", encoding="utf-8", errors="replace")


# ------------------------------------------------------------------------------------------------
# Grading


def tokens_of(episode):
    """Tokens of all contexts of an episode, or as an endpoint counts its requests; None if it does
    not."""
    if not episode.turns:
        return 0
    if not episode.context.ids:
        return episode.notes["tokens"] or None
    subs = [len(call["sub"]["ids"]) for call in episode.calls if "sub" in call]
    return len(episode.context.ids) + sum(subs)


def record_of(episode, digest, k, mode, system) -> dict:
    """Episode -> record: the text of every turn, calls, rewards, tokens and grade, without token
    ids. k: as in --frames."""
    # Only training needs these fields, and they are most of an episode's bytes.
    dropped = {"ids", "mask", "logps", "vision", "spans", "advantage", "policy_step"}
    record = {name: value for name, value in episode.to_dict().items() if name not in dropped}
    calls = []
    for call in episode.calls:
        calls.append({**call})
        calls[-1].pop("sub", None)  # the ids of a sub-agent
    times = [round(float(second), 3) for second in episode.notes.get("seconds", [])]
    # A hash of the opening messages shows which wording a record was asked with.
    prompt = json.dumps(episode.notes.get("opening")).encode()  # None for a broken video
    if any(episode.notes.get("reasoning", [])):  # texts that an endpoint kept apart, one per turn
        record["reasoning"] = episode.notes["reasoning"]
    record.update(calls=calls, digest=digest, budget=str(k), tools=mode, frame_times=times,
                  prompt_hash=hashlib.sha256(prompt).hexdigest()[:16],
                  tokens=tokens_of(episode))
    return {**record, **grade_record(record, system)}


def grade_record(record, system):
    """One record of a System -> {"final_answer", "extracted", "score"}, the score in [0, 1]."""
    if record["status"] != "ok":  # text from before the failure is no answer
        return {"final_answer": None, "extracted": None, "score": 0.0}
    final_answer = system.final(record["turns"], record["think_open"])
    return {"final_answer": final_answer,
            "extracted": answers.read_answer(final_answer, record["task"]),
            "score": answers.score_answer(final_answer, record["task"])}


def grade_folder(folder, judge):
    """Folder -> {(K, mode): {(task id, sample): record}} of all items of its tasks.jsonl, graded by
    the present code, and by a judge if the flags name one. judge: flags, see endpoint.judge. Raises
    UserError if an item has no record."""
    flags, done = read_json(folder, "args.json"), read_records(folder)
    system = systems.all_systems()[flags.get("protocol", "paravt")]
    cells, records, missing = {}, [], 0
    for k, mode in grid_cells(flags):
        cell = cells[k, mode] = {}
        for task in launch.read_jsonl(os.path.join(folder, "tasks.jsonl")):
            for sample in range(flags["samples"]):
                record = done.get((task["id"], str(k), mode, sample))
                if record is None:
                    missing += 1
                    continue
                # An older grader may have written the score, so all records are graded again.
                record.update(grade_record(record, system))
                cell[task["id"], sample] = record
                records.append(record)
    if missing:
        raise launch.UserError(f"{folder}: {missing} items have no record yet; run the command "
                               "that made it again")
    if judge.judge_model:
        endpoint.judge(records, os.path.join(folder, "judge.jsonl"), judge)
    return cells


# ------------------------------------------------------------------------------------------------
# Finished folders


def bench_dir_of(out, bench):
    return os.path.join(out, bench) if bench else out


def list_bench_dirs(folder):
    """-> [(benchmark or None, bench_dir)] of an --out. Raises UserError if there is none."""
    pairs = []
    for bench in [*benchmarks.splits(), None]:
        bench_dir = bench_dir_of(folder, bench)
        if os.path.isfile(os.path.join(bench_dir, "tasks.jsonl")):
            pairs.append((bench, bench_dir))
    if not pairs:
        raise launch.UserError(f"{folder}: no tasks.jsonl and records here")
    return pairs


def read_json(*path):
    """A JSON file of a finished folder. Raises UserError."""
    path = os.path.join(*path)
    try:
        return launch.parse_json(launch.read_file(path))
    except (OSError, ValueError) as error:
        raise launch.UserError(f"{path}: {error}; finish this evaluation first") from None


def write_json(value, *path):
    launch.write_atomic(os.path.join(*path), json.dumps(value, indent=1))


def grade_all(bench_dirs, judge):
    """[(benchmark, bench_dir)] -> (rows of numbers, {(benchmark, K, mode): {(task id, sample):
    record}})."""
    rows, cells = [], {}
    for bench, bench_dir in bench_dirs:
        for (k, mode), cell in grade_folder(bench_dir, judge).items():
            cells[bench, k, mode] = cell
            numbers = scores.summarise(list(cell.values()), bench, bool(judge.judge_model))
            rows.append({"bench": bench, "K": k, "tools": mode, **numbers})
    return rows, cells


def load_finished(folder):
    """Folder -> (its name, rows and cells of `grade_all`)."""
    # Without an address the judge is not asked again: the verdicts in the folder count.
    judge_model = read_json(folder, "summary.json")["judge_model"]
    judge = argparse.Namespace(judge_url=None, judge_model=judge_model)
    return os.path.basename(os.path.normpath(folder)), *grade_all(list_bench_dirs(folder), judge)


def finish(args, bench_dirs, prompt_hash):
    """
    The end of an evaluation: grades all records, writes summary.json of every folder of
    `bench_dirs` and of the whole, and prints the table -> why the table is not to be trusted: more
    than 1% of the items failed; else "". Raises UserError if a record is missing.
    """
    results, cells = grade_all(bench_dirs, args)
    summary = {"checkpoint": args.ckpt or args.model, "time": time.strftime("%Y-%m-%d %H:%M:%S"),
               "judge_model": args.judge_model, "protocol": args.protocol, "prompts": args.prompts,
               "prompt_hash": prompt_hash}
    for bench, bench_dir in bench_dirs:
        rows = [row for row in results if row["bench"] == bench]
        write_json({**summary, "results": rows}, bench_dir, "summary.json")
    write_json({**summary, "results": results}, args.out, "summary.json")
    print(launch.printable(scores.table(results)))
    acc = {}  # printed last, for scripts: "[bench/]K/mode" -> accuracy
    for row in results:
        cell = [row["bench"], str(row["K"]), row["tools"]]
        acc["/".join(filter(None, cell))] = round(row["acc"], 4)
    print(json.dumps({"summary": os.path.join(args.out, "summary.json"), "acc": acc}))
    failed = scores.failed_lines(results)
    if failed:
        errors = collections.Counter()
        for cell in cells.values():
            errors.update(record["error"] for record in cell.values() if record.get("error"))
        for message, count in errors.most_common(1):
            failed.append(f"the most frequent error, {count} times: {message[:300]}")
    return "; ".join(failed)


def compare(folders, out):
    """--compare: tables of finished folders; of benchmarks beside the paper's rows, in Markdown.
    out: folder for their numbers, or None."""
    evaluations = [load_finished(folder) for folder in folders]
    compared = scores.compare(evaluations)
    if out:
        launch.make_out(out)
        write_json(compared, out, "summary.json")
    print(launch.printable(scores.comparison_table(compared)))
    if any(row["bench"] for row in compared["rows"]):
        print("\n" + launch.printable(scores.paper_layout(evaluations)))


def print_counts(name, notes):
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)
