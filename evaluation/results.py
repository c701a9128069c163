"""
evaluation/results.py (tests/test_eval.py): reads and grades the records of an evaluation, and
compares finished folders without a model.

A record is one line per item, appended when the episode ends. An item is (task id, K, mode,
sample), see scores.mode_of. A leaf is a folder of records: the --out of --data, or a folder in the
--out of --bench.

Reads and writes: records.*.jsonl, tasks.jsonl, args.json, judge.jsonl, summary.json.
Used by eval.py: --rescore, --compare, --table, --prepare.
"""

import argparse
import collections
import contextlib
import glob
import hashlib
import itertools
import json
import os
import time

import launch
import rewards
import video
from evaluation import answers, benchmarks, costs, endpoint, scores, systems
from plumbing import runs

# ------------------------------------------------------------------------------------------------
# Records


def settings_digest(args, weights, subtitles, tasks, prompts, texts=None):
    """-> digest of all that must be equal for records to belong together: tasks, prompts, weights
    (a digest), texts (a digest of the subtitles; None: none are shown), and every flag except those
    for paths, parts, speed and judges."""
    # Paths: the digest covers the contents of the files (tasks, prompts, weights).
    free = "ckpt data bench root video_root out prompt_file user_file texts_of "
    # Parts: a record names K, mode and sample. The argument `subtitles` is the resolved flag.
    free += "limit frames tools show samples subtitles video question options "
    # Speed, addresses, and the treatment of finished records.
    free += ("live workers retries request_timeout api_key_env base_url give_up server_wait "
             "max_num_seqs frame_cache_gb frame_cache_dir frame_cache_dir_gb decode_timeout quiet "
             "gpu_memory_utilization patience cpu judge_url judge_model judge_key_env allow_errors")
    kept = {name: value for name, value in sorted(vars(args).items())
            if name not in free.split()}
    settings = json.dumps([kept, prompts, subtitles, weights, tasks, *filter(None, [texts])])
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def read_records(out, digest=None):
    """
    Finished records of a folder -> {item: record}. A torn last line is dropped. If an item was
    asked again after an error that may pass, the error is dropped.

    Raises UserError if records are of other settings than `digest`, or of two settings.
    """
    done = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(out), "records.*.jsonl"))):
        with open(path, "rb") as f:
            lines = f.read().split(b"\n")
        # A whole line ends in a newline, so the last piece is empty or torn.
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = launch.parse_json(line)
                item = (record["task"]["id"], record["budget"], scores.mode_of(record),
                        record["sample"])
                digest = digest or record["digest"]  # None: of the first record
            except (ValueError, KeyError, TypeError):
                why = "not JSON, or no record; delete the line or the file"
                raise launch.UserError(f"{path}:{number}: {why}") from None
            if record["digest"] != digest:
                why = "holds records of another checkpoint or other settings; choose another --out"
                raise launch.UserError(f"{out} {why}")
            # Files of several ranks come in any order, so the error may be read last.
            if not (item in done and runs.is_retried(record)):
                done[item] = record
    return done


def of_other_films(seen, root):
    """[(video, its identity when a record was made, or None)] -> the videos that have another
    identity now. A video that is missing now has none."""
    now = {}
    for name in {name for name, film in seen if film}:
        with contextlib.suppress(video.VideoError):
            now[name] = video.identity(video.resolve(name, root))
    return [name for name, film in seen if film and now.get(name, film) != film]


def cells(kept):
    """Flags of a run, as a dict -> its (K, mode). Without frames there is nothing to look at and
    nothing to blank or shuffle."""
    shows = kept.get("show") or ["real"]  # runs from before the flag
    found = []
    for k, tools, show in itertools.product(kept["frames"], kept["tools"], shows):
        if k != 0 or (tools == "off" and show in ("real", "options")):
            found.append((k, scores.mode_of({"tools": tools, "show": show})))
    return found


def append_to(path):
    """-> file to read and append to. A torn last line is cut off first, because the next line would
    become a part of that line."""
    with open(path, "ab+") as f:
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)
    return open(path, "a+", encoding="utf-8", errors="replace")


# ------------------------------------------------------------------------------------------------
# Grading


def record_of(episode, digest, k, mode, args, taken=None) -> dict:
    """Episode -> record: the text of every turn, calls, rewards, costs and grade, without token
    ids. k: as in --frames. mode: see scores.mode_of. taken: tokens of the requests, see
    costs.Meter."""
    # Only training needs these fields, and they are most of an episode's bytes.
    left = {"ids", "mask", "logps", "vision", "spans", "advantage", "version"}
    record = {name: value for name, value in episode.to_json().items() if name not in left}
    # "sub" holds the ids of a sub-agent, left out too.
    calls = [{name: value for name, value in c.items() if name != "sub"} for c in episode.calls]
    times = [round(float(second), 3) for second in episode.notes.get("seconds", [])]
    # A hash of the opening messages shows which wording a record was asked with.
    prompt = json.dumps(episode.notes.get("opening")).encode()  # None for a broken video
    if any(episode.notes.get("reasoning", [])):  # texts that an endpoint kept apart, one per turn
        record["reasoning"] = episode.notes["reasoning"]
    tools, show = scores.parts_of(mode)
    record.update(calls=calls, digest=digest, budget=str(k), tools=tools, show=show,
                  frame_times=times, prompt_hash=hashlib.sha256(prompt).hexdigest()[:16],
                  cost=costs.of(episode, taken or {}))
    return {**record, **grade(record, args.protocol)}


def grade(record, protocol="paravt"):
    """One record -> {"said", "extracted", "score"}, the score in [0, 1]."""
    if record["status"] != "ok":  # text from before the failure is no answer
        return {"said": None, "extracted": None, "score": 0.0}
    task = record["task"]
    kind, options = task["type"], task.get("options")
    said = systems.protocols()[protocol].final(record["turns"], record["think_open"])
    # Extraction never sees the gold answer.
    read = rewards.task_types()[kind].read
    extracted = None if said is None else read(said, options) or None
    if kind == "open" and said is not None:
        # Training pays token F1 for a part of an answer. A benchmark asks for the whole answer.
        score = float(answers.match_open(said, task["answer"]))
    else:
        score = rewards.accuracy(said, kind, task["answer"], options)
        score = float(score == 1.0) if kind == "list" else score  # the whole list too
    return {"said": said, "extracted": extracted, "score": score}


def graded(folder, judge):
    """Folder -> {item: record}, graded by the present code, and by a judge if the flags name one.
    judge: flags, see endpoint.judge."""
    kept = read_json(folder, "args.json")
    records = read_records(folder)
    # An older version of the grader may have written the scores, so all records are graded again.
    for record in records.values():
        record.update(grade(record, kept["protocol"]))
    if judge.judge_model:
        endpoint.judge(records.values(), os.path.join(folder, "judge.jsonl"), judge)
    return benchmarks.credited(records)


# ------------------------------------------------------------------------------------------------
# Finished folders


def leaf_of(out, bench):
    return os.path.join(out, bench) if bench else out


def leaves(folder):
    """-> [(benchmark or None, leaf)] of an --out. Raises UserError if there is none."""
    found = [(bench, leaf_of(folder, bench)) for bench in [*benchmarks.splits(), None]]
    found = [pair for pair in found if os.path.exists(os.path.join(pair[1], "tasks.jsonl"))]
    if not found:
        raise launch.UserError(f"{folder}: no tasks.jsonl and records here")
    # If --out was used for both, only the benchmarks, because one table cannot hold both.
    return [pair for pair in found if pair[0]] or found


def read_json(*path):
    """A JSON file of a finished folder. Raises UserError."""
    path = os.path.join(*path)
    try:
        with open(path, encoding="utf-8") as f:
            return launch.parse_json(f.read())
    except (OSError, ValueError) as error:
        why = f"{error}; finish this evaluation first"
        raise launch.UserError(f"{path}: {why}") from None


def write_json(value, *path):
    launch.write_atomic(os.path.join(*path), json.dumps(value, indent=1))


def write_tasks(tasks, path):
    launch.write_atomic(path, "".join(json.dumps(task) + "\n" for task in tasks))


def finished(folder):
    """
    Folder -> the triple that scores.compare takes. Headlines and intervals of the summary are
    computed again from the records, as graded by the present code; a refused one stays refused.
    Raises UserError if a summary is of other records than the folder holds.
    """
    name, summary = os.path.basename(os.path.normpath(folder)), read_json(folder, "summary.json")
    # Without an address the judge is not asked again: the verdicts in the folder count.
    judge = argparse.Namespace(judge_url=None, judge_model=summary.get("judge_model"))
    here = {}  # (benchmark, K, mode) -> {(task id, sample): record}
    for bench, leaf in leaves(folder):
        for (task, k, mode, sample), record in graded(leaf, judge).items():
            here.setdefault((bench, k, mode), {})[task, sample] = record
    for row in summary["results"]:
        records = here.get(scores.place_of(row), {}).values()
        if len(records) != row["n"]:
            why = f"its summary.json is of {row['n']} records, and there are {len(records)}"
            raise launch.UserError(f"{folder}: {why}; finish the run, then --rescore {folder}")
        refused = row["headline"] is None
        row.update(scores.counted(records, row.get("bench")))
        if refused:
            row["headline"] = row["interval"] = None
    return name, summary, here


def gathered(words):
    """
    Words of --compare and --table -> finished evaluations, in order. A word NAME= begins a group:
    the folders after it are runs of one system, pooled under that name. A folder whose own name
    ends in "=" is written with a slash after it.

    Raises UserError for a group without folders, a group's name given twice, a folder twice in it.
    """
    found, groups = [], {}
    name = None
    for word in words:
        if word.endswith("="):
            name = word[:-1]
            if not name or name in groups:
                raise launch.UserError(f"{word}: a group needs a name of its own")
            groups[name] = []
        elif name is None:
            found.append(finished(word))
        else:
            groups[name].append(word)
    for name, folders in groups.items():
        if not folders:
            raise launch.UserError(f"{name}=: name the folders of its runs after it")
        if len({os.path.realpath(folder) for folder in folders}) < len(folders):
            raise launch.UserError(f"{name}=: a folder stands twice among its runs")
        found.append(scores.pool(name, [*map(finished, folders)]))
    return found


def finish(out, found, args, policy, parts=None):
    """
    Writes summary.json of every leaf in `found` and of the whole, and prints the tables: the end of
    an evaluation and of --rescore. Raises UserError if a record is missing, or if too many items
    failed.

    policy: the checkpoint, or the model of an endpoint. parts: {leaf: tasks} of leaves that hold
    more tasks than this run asked: these are printed, not written.
    """
    results, missing, here, parts = [], 0, {}, parts or {}
    errors = collections.Counter()  # messages of failed items
    for bench, leaf in found:
        tasks = parts.get(leaf) or launch.read_jsonl(os.path.join(leaf, "tasks.jsonl"))
        kept = read_json(leaf, "args.json")  # flags of the run, which --rescore does not have
        if leaf in parts:
            kept |= vars(args)
        done = graded(leaf, args)
        # All items that the run was to ask: a run that was cut short has no summary.
        ids = [(task["id"], sample) for task in tasks for sample in range(kept["samples"])]
        for k, mode in cells(kept):
            items = [(task, str(k), mode, sample) for task, sample in ids]
            records = [done[item] for item in items if item in done]
            missing += len(items) - len(records)
            row = {"bench": bench} if bench else {}
            row.update(zip(("K", "tools", "show"), (k, *scores.parts_of(mode))))
            if records:
                row.update(scores.summarise(records, bench, judged=bool(args.judge_model)))
                row["silent"] = sum(not any(text.strip() for text in r["turns"]) for r in records
                                    if r["status"] == "ok")
                results.append(row)
                here[scores.place_of(row)] = {(r["task"]["id"], r["sample"]): r for r in records}
            errors.update(r["error"] for r in records if r.get("error"))
    if missing:
        why = "run the same command first, then --rescore"
        raise launch.UserError(f"{out}: {missing} items have no record yet; {why} {out}")
    # Our engine hides no text: there an empty answer is wrong.
    refused = ([] if args.allow_errors
               else scores.refuse(results, silent=kept.get("engine") == "openai"))
    scores.add_crr(results)
    summary = {"checkpoint": policy}
    if args.judge_model:
        summary["judge_model"] = args.judge_model
    told = ("protocol", "prompt_hash", "prompt_file", "texts_of", "served")
    summary |= {name: kept[name] for name in told if name in kept}  # only endpoints have "served"
    departures = list(systems.protocols()[kept["protocol"]].departures)
    if kept["protocol"] != "paravt" and not (kept.get("prompt_file") or kept.get("texts_of")):
        departures.append("prompts in our wording, not the publisher's")
    if departures:
        summary["departures"] = departures
    summary["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
    for bench, leaf in found:
        own = [row for row in results if row.get("bench") == bench]
        if leaf not in parts:
            write_json({**summary, "results": own}, leaf, "summary.json")
    needs = scores.needs(results, here)
    if needs:
        summary["needs"] = needs
    if not parts:
        write_json({**summary, "results": results}, out, "summary.json")
    print(launch.printable(scores.table(results)))
    if needs:
        print(f"\n{launch.printable(scores.needs_table([('', needs)]))}")
    acc = {}  # printed last, for scripts: "[bench/]K/mode" -> accuracy
    for row in results:
        place = [row["bench"]] if "bench" in row else []
        acc["/".join([*place, str(row["K"]), scores.mode_of(row)])] = round(row["acc"], 4)
    if parts:
        print(f"{out} holds more tasks than these: its summary stays as it is")
    print(json.dumps({"summary": None if parts else os.path.join(out, "summary.json"),
                      "acc": acc}))
    if refused:  # last, so that the table and the summary are there: exit code 2
        why = "no headline above 1% failed items (--allow-errors prints it): "
        for message, count in errors.most_common(1):
            refused.append(f"the most frequent error, {count} times: {message[:300]}")
        raise launch.UserError(why + "; ".join(refused))


def rescore(folders, args):
    """--rescore: grades the records of finished folders again."""
    for folder in folders:
        found = leaves(folder)
        kept = read_json(found[0][1], "args.json")
        finish(folder, found, args, kept["ckpt"] or kept["model"])


def compare(words, out):
    """--compare: one table from finished folders, and summary.json in `out`."""
    compared = scores.compare(gathered(words))
    launch.make_out(out)
    write_json(compared, out, "summary.json")
    print(launch.printable(scores.comparison(compared)))


def table(words):
    """--table: benchmark folders beside the paper's numbers."""
    found = gathered(words)
    shown = scores.paper_layout(found)
    needs = [(name, scores.needs(summary["results"], here)) for name, summary, here in found]
    if any(rows for _, rows in needs):
        shown += f"\n\n{scores.needs_table(needs, markdown=True)}"
    print(launch.printable(shown))


def prepare(bench, root, path):
    """--prepare: the tasks of a benchmark as task JSONL. Raises UserError if `path` exists."""
    if os.path.exists(path):  # it may be a file of the publisher
        raise launch.UserError(f"--prepare {path}: there is such a file already")
    tasks, notes = benchmarks.read_split(bench, root)
    if benchmarks.splits()[bench].shown == "none":  # --data shows the files that tasks name
        tasks = [{**task, "subtitles": None} for task in tasks]
    write_tasks(tasks, path)
    print_notes(path, notes)


def print_notes(name, notes):
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)
