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
import string
import subprocess
import sys
import tempfile

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


def checkouts(args):
    """-> {grader: folder of its checkout}, without ours."""
    return dict(zip([name for name in args.grader if name != "ours"], args.checkout))


# ------------------------------------------------------------------------------------------------
# Records -> what a publisher's grader takes


def reply_digest(record):
    """-> digest of all that a verdict depends on, but for the checkout."""
    what = [record["task"], record["status"], record["turns"]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def published_row(bench, task):
    """Task of a benchmark -> its row as published: the reverse of evaluation/benchmarks.py, for the
    fields that graders and their loaders read. Letters are those that the model was shown."""
    options = task.get("options") or []
    labels = string.ascii_uppercase
    row = {"question": task["question"], "answer": task["answer"]}
    row |= dict.fromkeys(("duration", "domain", "sub_category", "task_type", "duration_group",
                          "question_category"))  # a tag without a label is not in the task
    row |= task["tags"]
    name = os.path.basename(task["video"])
    if bench in ("videomme", "videomme_wsub"):
        row.update(question_id=task["id"], videoID=os.path.splitext(name)[0],
                   options=[f"{label}. {text}" for label, text in zip(labels, options)])
    elif bench == "longvideobench":
        row.update({f"option{i}": [*options, *["N/A"] * 5][i] for i in range(5)})
        right = labels.find(task["answer"] or "?")  # -1 if no option is right
        row.update(id=task["id"], video_path=name, correct_choice=right)
    elif bench == "lvbench":
        row.update(uid=task["id"], video_path=name)
    elif bench == "mlvu":
        row.update(candidates=options, video_name=name, task_type=task["tags"].get("task"),
                   question_id=task["id"])
    elif bench == "mmvu":
        place = f"videos/{task['tags'].get('subject')}/{name}"
        row.update(id=task["id"], video=place, video_path=place,
                   question_type=task["tags"].get("kind"),
                   choices=dict(zip("ABCDE", [*options, *[""] * 5])))
    elif bench == "charades":
        row.update(video=name, caption=task["event"], timestamp=task["answer"])
    return row


# ------------------------------------------------------------------------------------------------
# The child process


def run(grader, checkout, bench, leaf, records, seconds):
    """
    Grades the records of a leaf {item: record} and writes the verdicts -> one line that says what
    was done. A benchmark for which the checkout has no grader gets no verdicts.

    seconds: for one reply. Raises UserError if the checkout is not one of this grader's code.
    """
    name = os.path.basename(leaf)
    if bench is None:
        write(leaf, grader, [])
        return f"{grader}: no grader for task JSONL, left empty: {leaf}"
    items = {item: record for item, record in records.items() if record["status"] == "ok"}
    given = [{"row": published_row(bench, record["task"]), "text": last_turn(record),
              "seed": str(item)} for item, record in items.items()]
    said = asked(grader, checkout, bench, given, seconds)
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


def asked(grader, checkout, bench, items, seconds):
    """-> what the child says, a verdict per item and a last line. Raises UserError."""
    child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "publishers.py")
    words = [sys.executable, "-I", "-B", child, grader, bench,
             os.path.abspath(checkout), str(seconds)]
    given = "".join(json.dumps(item) + "\n" for item in items)
    where = f"--checkout {checkout}"
    with tempfile.TemporaryDirectory() as empty:
        # Neither keys nor folders of the user: a grader must not ask a paid judge or download.
        kept = ("PATH", "LD_LIBRARY_PATH")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"HOME": empty, "HF_HOME": empty, "TMPDIR": empty, "HF_HUB_OFFLINE": "1",
                "PARAVT_MMVU_VIDEO_DIR": empty}
        try:
            # The child ends itself if a reply takes too long. This limit is behind that one.
            done = subprocess.run(words, input=given, capture_output=True, text=True, cwd=empty,
                                  env=env, timeout=600 + (seconds + 10) * len(items),
                                  errors="replace")
        except subprocess.TimeoutExpired:
            raise launch.UserError(f"{where}: its grader does not end") from None
    said = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
    if said and "fault" in said[-1]:
        raise launch.UserError(f"{where}: {said[-1]['fault']}; expected a checkout of "
                               f"{CODE[grader]} whose grader of {bench} is as we know it")
    if not said or not {"none", "files"} & set(said[-1]):
        lines = done.stderr.strip().splitlines() or ["no message"]
        # A child that its own watchdog ends prints this, and then its stack.
        last = next((line for line in lines if line.startswith("Timeout (")), lines[-1])[:200]
        raise launch.UserError(f"{where}: its grader of {bench} ended at reply {len(said) + 1} of "
                               f"{len(items)} with exit code {done.returncode}: {last}")
    return said


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
    others = sum(differ(records[item]["score"], line["score"]) for item, line in verdicts.items())
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
