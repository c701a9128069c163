"""
evaluation/graders.py: the graders of lmms-eval and of the paper's release on our records.

A published number depends on the grader as well as on the model. `eval.py --rescore DIR --grader
lmms-eval paper --checkout LMMS_EVAL PARAVT` runs the publishers' own functions, in the user's
checkout of their code, on the replies of finished records. None of their code is in this project.

A publisher's grader gets the last turn of an episode, as sampled, and the published row, as far as
the task keeps its fields. A failed episode scores 0 for every grader, because it has no reply. If
the function raises, or takes too long, the verdict is an error, which scores 0 and is counted.

Reads and writes: graders.jsonl beside the records, a line per grader and reply. Every line has a
digest of its reply, so that verdicts of other replies are refused. evaluation/publishers.py is the
child process.
"""

import hashlib
import json
import os
import subprocess

import launch

NAMES = ("ours", "lmms-eval", "paper")
CODE = {"lmms-eval": "EvolvingLMMs-Lab/lmms-eval", "paper": "EvolvingLMMs-Lab/ParaVT"}


def faults(args):
    """-> [(whether the flags contradict each other, why)]."""
    others = [name for name in args.grader if name != "ours"]
    return [((others or args.checkout) and not args.rescore,
             "--grader and --checkout need --rescore"),
            (len(set(args.grader)) < len(args.grader), "--grader names a grader twice"),
            (len(others) != len(args.checkout), f"--checkout: {len(args.checkout)} folders for "
             f"{len(others)} graders other than ours; give one each, in their order"),
            (not 0 < args.grader_timeout < 3600, "--grader-timeout must be above 0 seconds, and "
             "below 3600")]


def folders_of(args):
    """-> {grader: folder of its checkout}, without ours."""
    return dict(zip([name for name in args.grader if name != "ours"], args.checkout))


# ------------------------------------------------------------------------------------------------
# Records -> what a publisher's grader takes


def reply_digest(record):
    """-> digest of all that a verdict depends on, but for the checkout."""
    what = [record["task"], record["status"], record["turns"]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# The child process


def run(grader, checkout, bench, leaf, records, seconds):
    """
    Grades the records of a leaf {item: record} and writes the verdicts -> one line that says what
    was done. A benchmark for which the checkout has no grader gets no verdicts.

    seconds: for one reply. Raises UserError if the checkout is not one of this grader's code.
    """
    from evaluation import benchmarks, checkouts  # numpy, which tools/view.py does without

    name = os.path.basename(leaf)
    if bench is None:
        write(leaf, grader, [])
        return f"{grader}: no grader for task JSONL, left empty: {leaf}"
    items = {item: record for item, record in records.items() if record["status"] == "ok"}
    given = [{"row": benchmarks.published_row(bench, record["task"]), "text": last_turn(record),
              "seed": str(item)} for item, record in items.items()]
    said = checkouts.run(grader, bench, checkout, given, seconds,
                         f"{CODE[grader]} whose grader of {bench} is as we know it")
    if "none" in said[-1]:
        write(leaf, grader, [])
        return f"{grader}: no grader for {bench} in {checkout}, left empty: {said[-1]['none']}"
    *verdicts, used = said
    version = commit(checkout) or f"files {digest_of(used['files'])}"
    lines = []
    for (task, k, mode, sample), verdict in zip(items, verdicts):
        record = items[task, k, mode, sample]
        lines.append({"grader": grader, "version": version, "files": digest_of(used["files"]),
                      "id": task, "K": k, "tools": mode, "sample": sample,
                      "of": reply_digest(record), "score": verdict.get("score", 0.0),
                      "said": verdict.get("said"), "error": verdict.get("error")})
    write(leaf, grader, lines)
    *_, note = regraded(leaf, records, grader)
    absent = f"; not installed: {', '.join(used['absent'])}" if used["absent"] else ""
    return f"{name}: {note}; {version}{absent}"


def last_turn(record):
    return record["turns"][-1] if record["turns"] else ""


def digest_of(files):
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]


def commit(checkout):
    """-> "@abc1234", with "-dirty" if files were changed; None if the folder is no clone."""
    if not os.path.exists(os.path.join(checkout, ".git")):  # git would look in the folders above
        return None
    words = ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None
    return f"@{done.stdout.strip()}" if done.returncode == 0 else None


# ------------------------------------------------------------------------------------------------
# graders.jsonl


def read(leaf):
    path = os.path.join(leaf, "graders.jsonl")
    keys = ("grader", "version", "id", "K", "tools", "sample", "of", "score", "error")
    return launch.read_jsonl(path, keys) if os.path.exists(path) else []


def write(leaf, grader, lines):
    """Replaces the verdicts of one grader."""
    path = os.path.join(leaf, "graders.jsonl")
    lines = [line for line in read(leaf) if line["grader"] != grader] + lines
    if lines:
        launch.write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))
    elif os.path.exists(path):
        os.remove(path)


def present(leaf):
    """-> names of the graders that a leaf has verdicts of."""
    return {line["grader"] for line in read(leaf)}


def regraded(leaf, records, grader):
    """
    {item: record} -> ({item: record with this grader's score}, version of its code, text that says
    how far it agrees with ours). Without verdicts of this grader: {}.

    Raises UserError if the verdicts are of other replies.
    """
    verdicts = {(line["id"], line["K"], line["tools"], line["sample"]): line
                for line in read(leaf) if line["grader"] == grader}
    if not verdicts:
        return {}, None, ""
    digests = {item: reply_digest(record) for item, record in records.items()
               if record["status"] == "ok"}
    if digests != {item: line["of"] for item, line in verdicts.items()}:
        again = f"eval.py --rescore with --grader {grader} and its --checkout grades them again"
        raise launch.UserError(f"{leaf}/graders.jsonl: the verdicts of {grader} are stale, the "
                               f"records have changed; {again}")
    out = {item: {**record, "score": verdicts[item]["score"] if item in verdicts else 0.0}
           for item, record in records.items()}
    ours = {item: record.get("right", record["score"]) for item, record in records.items()}
    others = sum(differ(ours[item], line["score"]) for item, line in verdicts.items())
    errors = sum(line["error"] is not None for line in verdicts.values())
    note = f"{grader} and ours differ on {others} of {len(verdicts)} replies"
    note += f", {grader} fails on {errors}, which score 0" if errors else ""
    return out, next(iter(verdicts.values()))["version"], note


def differ(a, b):
    """Whether two scores differ by more than the rounding of an IoU."""
    return abs(a - b) > 0.005


def joined(versions):
    """Versions of a grader's code, one per benchmark -> one text. Without a commit, the files of
    every benchmark have a digest of their own."""
    found = list(dict.fromkeys(versions))
    return found[0] if len(found) == 1 else f"files {digest_of(found)}"
