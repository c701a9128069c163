"""
eval.py: benchmarks and task JSONL through the agent loop of training, greedy, into scored records.

  score     = [letter == gold] | [text matches gold] | temporal IoU   of the final answer; a broken
              video, a full context or a failed request scores 0 and stays in the denominator
  headline  = mean over items | MLVU: mean of its seven tasks' means | MMVU: multiple choice alone |
              Charades-STA: mean IoU
  f_tau     = mean R_fmt    kappa = executed crop_video calls per episode    both as in training

The answer is the last <answer> block or, where there is none, the text after the thought: an
evaluation asks what the model said, training (rewards.py) pays only for the tag. Departs from the
authors' evaluation: benchmarks are read as their publishers ship them (bench/benchmarks.py),
sub-agents answer calls as in training (--crop-reply frames: the frames themselves, as theirs),
errors are never graded as text. --protocol speaks to other systems (bench/systems.py); intervals
and tables are in bench/scores.py.

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
import faulthandler
import glob
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import chat
import checkpoint
import launch
import rewards
import rollout
from evaluation import answers, benchmarks, costs, scores, systems

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
        help="part I of N, whole videos together; --rescore merges")
    add("--allow-errors", action="store_true",
        help="print a headline even where more than 1%% of the items failed")
    add("--estimate", type=int, nargs="?", const=3, default=0, metavar="VIDEOS",
        help="print what the run takes, measured on so many videos of each benchmark, and end")

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
    add("--decode-timeout", type=float, default=60.0,
        help="seconds that up to 64 frames of a video may take; more frames, in proportion")

    agent = parser.add_argument_group("agent, as in training")
    rollout.add_agent_arguments(agent, tools=False)
    agent.add_argument("--min-pixels", type=int, default=rollout.Source.min_pixels,
                       help="pixels of a frame after resizing, at least")
    # Training's are 0.7, and 0.5 of a card that it shares with the trainer.
    parser.set_defaults(temperature=0.0, engine_share=0.9)
    return parser


def shard_argument(text):
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        why = "expected I/N with 0 <= I < N, for example 0/4"
        raise argparse.ArgumentTypeError(f"{text!r}: {why}")
    return int(part), int(parts)


def parse_args(protocol=None):
    """protocol: as if it were --protocol."""
    parser = build_parser()
    # A protocol and a preset set defaults, which yield to flags: they have to be known first.
    early, _ = parser.parse_known_args()
    name = protocol or early.protocol
    parser.set_defaults(**systems.settings(name, early.protocol_set))
    if early.preset == "toy":
        parser.set_defaults(**rollout.toy_lengths())
    args = parser.parse_args()
    args.protocol = name
    for wrong, why in faults(args):
        if wrong:
            raise launch.UserError(why)
    if len(args.bench) > len(args.root):  # one folder of folders; both Video-MMEs share theirs
        names = [name.removesuffix("_wsub") for name in args.bench]
        args.root = [os.path.join(args.root[0], name) for name in names]
    return args


def faults(args):
    """[(whether the flags cannot be meant, why)]: told before anything is read or loaded."""
    benches, roots = len(args.bench), len(args.root)
    found = [(args.judge_url and not args.judge_model, "--judge-url needs --judge-model")]
    if args.compare or args.table or args.rescore or args.protocols:
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
        (min(args.limit, args.live, args.estimate) < 0,
         "--limit, --live and --estimate may not be negative"),
        (args.samples < 1 or (args.samples > 1 and args.temperature == 0), "--samples must be at "
         "least 1, and above 1 needs --temperature above 0: greedy samples are all the same"),
    ]


# ------------------------------------------------------------------------------------------------
# Records: one line an item, appended as it finishes. An item is (task id, K, tools, sample).


def settings_digest(args, weights, subtitles, tasks, prompts):
    """What must be equal for records to belong together: tasks, prompts, weights (their digest),
    and every flag but those that say where, which part, how fast, and who judges."""
    # Where: what is found there (tasks, prompts, weights) counts, its path does not.
    free = {"ckpt", "data", "bench", "root", "video_root", "out", "prompt_file",
            "user_file"}
    # Which part: every item carries its own K, mode and sample. `subtitles` is the resolved flag.
    free |= {"limit", "shard", "frames", "tools", "samples", "subtitles"}
    # How fast, over which address, and what happens to records that are there already.
    free |= {"live", "workers", "retries", "request_timeout", "api_key_env", "base_url"}
    free |= {"max_seqs", "frame_cache_gb", "frame_cache_dir", "frame_cache_dir_gb"}
    free |= {"engine_share", "patience", "decode_timeout", "quiet"}
    free |= {"judge_url", "judge_model", "judge_key_env", "allow_errors", "estimate"}
    kept = {name: value for name, value in sorted(vars(args).items()) if name not in free}
    settings = json.dumps([kept, prompts, subtitles, weights, tasks])
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
                raise launch.UserError(f"{path}:{number}: {why}") from None
            digest = digest or record["digest"]  # of the first one, where none is asked for
            if record["digest"] != digest:
                why = "holds records of another checkpoint or other settings; choose another --out"
                raise launch.UserError(f"{out} {why}")
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


def record_of(episode, digest, budget, mode, args, taken=None):
    """Episode -> its record: the text of every turn and all that was decided, without token ids.
    taken: what its requests took, see costs.Meter."""
    # What only training needs; it is most of an episode's bytes.
    left = {"ids", "mask", "logps", "vision", "spans", "advantage", "version"}
    record = {name: value for name, value in episode.to_json().items() if name not in left}
    # "sub" holds the ids of a sub-agent.
    calls = [{name: value for name, value in c.items() if name != "sub"} for c in episode.calls]
    times = [round(float(second), 3) for second in episode.notes.get("seconds", [])]
    prompt = json.dumps(episode.notes.get("opening")).encode()  # None for a broken video
    record.update(calls=calls, digest=digest, budget=str(budget), tools=mode, frame_times=times,
                  prompt_hash=hashlib.sha256(prompt).hexdigest()[:16],
                  cost=costs.of(episode, taken or {}))
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
    if kind == "open" and said is not None:
        # Token F1 pays for the way to an answer, a benchmark asks for the answer.
        score = float(answers.match_open(said, task["answer"]))
    else:
        score = rewards.accuracy(said, kind, task["answer"], options)
        score = float(score == 1.0) if kind == "list" else score  # the whole list, likewise
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
# Finished folders. A leaf holds records: an --out of --data, or a folder in an --out of --bench.


def leaf_of(out, bench):
    return os.path.join(out, bench) if bench else out


def leaves(folder):
    """-> [(benchmark or None, leaf)] of an --out. Raises UserError where there is none."""
    found = [(bench, leaf_of(folder, bench)) for bench in [*benchmarks.splits(), None]]
    found = [pair for pair in found if os.path.exists(os.path.join(pair[1], "tasks.jsonl"))]
    if not found:
        raise launch.UserError(f"{folder}: no tasks.jsonl and records here")
    # A folder that was used for both: benchmarks alone, as one table cannot hold them beside data.
    return [pair for pair in found if pair[0]] or found


def read_json(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return json.load(f)


def write_json(value, *path):
    launch.write_atomic(os.path.join(*path), json.dumps(value, indent=1))


def write_tasks(tasks, path):
    launch.write_atomic(path, "".join(json.dumps(task) + "\n" for task in tasks))


def read_summary(folder):
    """-> (the folder's last name, its summary). Raises UserError where it has none."""
    try:
        return os.path.basename(os.path.normpath(folder)), read_json(folder, "summary.json")
    except (OSError, ValueError) as error:
        why = f"{error}; finish this evaluation first"
        raise launch.UserError(f"{folder}/summary.json: {why}") from None


def finished(folder):
    """-> what scores.compare takes of one folder."""
    name, summary = read_summary(folder)
    # The verdicts that it was judged by count; nobody is asked again.
    judge = argparse.Namespace(judge_url=None, judge_model=summary.get("judge_model"))
    here = {}  # (benchmark, K, tools) -> {(task id, sample): record}
    for bench, leaf in leaves(folder):
        for (task, k, mode, sample), record in graded(leaf, judge).items():
            here.setdefault((bench, k, mode), {})[task, sample] = record
    return name, summary, here


def finish(out, found, args, checkpoint, parts=None):
    """
    Records of the leaves `found` -> summary.json of each and of the whole, tables: the end of an
    evaluation and of --rescore.

    parts: {leaf: tasks} of leaves that hold more than was asked for: shown, and nothing written.
    """
    results, missing, parts = [], 0, parts or {}
    for bench, leaf in found:
        tasks = parts.get(leaf) or launch.read_jsonl(os.path.join(leaf, "tasks.jsonl"))
        kept = read_json(leaf, "args.json")  # of the run, which may differ from ours
        if leaf in parts:
            kept |= vars(args)
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
                row.update(scores.summarise(records, bench, judged=bool(args.judge_model)))
                results.append(row)
    if missing:
        why = "run the same command (or the other shards) first, then --rescore"
        raise launch.UserError(f"{out}: {missing} items have no record yet; {why} {out}")
    refused = scores.refuse(results, args.allow_errors)
    summary = {"checkpoint": checkpoint}
    if args.judge_model:
        summary["judge_model"] = args.judge_model
    told = ("protocol", "protocol_set", "prompt_hash", "prompt_file", "served")
    summary |= {name: kept[name] for name in told if name in kept}  # served: by an endpoint alone
    summary["time"] = time.strftime("%Y-%m-%d %H:%M:%S")
    for bench, leaf in found:
        own = [row for row in results if row.get("bench") == bench]
        if leaf not in parts:
            write_json({**summary, "results": own}, leaf, "summary.json")
    if not parts:
        write_json({**summary, "results": results}, out, "summary.json")
    print(launch.printable(scores.table(results)))
    acc = {}  # the last line is for scripts: "[bench/]K/tools" -> accuracy
    for row in results:
        place = [row["bench"]] if "bench" in row else []
        acc["/".join([*place, str(row["K"]), row["tools"]])] = round(row["acc"], 4)
    if parts:
        print(f"{out} holds more tasks than these: its summary stays as it is")
    print(json.dumps({"summary": None if parts else os.path.join(out, "summary.json"),
                      "acc": acc}))
    if refused:  # last, so that the table and the summary are there: exit code 2
        why = "no headline above 1% failed items (--allow-errors prints it): "
        raise launch.UserError(why + "; ".join(refused))


def rescore(folders, args):
    """Grade finished records again; those of several folders (shards) become parts of one run."""
    sources = [(number, pair) for number, folder in enumerate(folders) for pair in leaves(folder)]
    # Copied, so that the merged folder can be graded again and compared like any other.
    for number, (bench, leaf) in sources if len(folders) > 1 else []:
        target = leaf_of(args.out, bench)
        launch.make_out(target)
        if os.path.samefile(leaf, target):  # --out is one of them
            continue
        # Before anything is copied: --out would hold records of two settings.
        known = [*read_records(leaf).values(), *read_records(target).values()]
        if len({record["digest"] for record in known}) > 1:
            why = "its records are of another checkpoint or other settings than those of"
            raise launch.UserError(f"--rescore {folders[number]}: {why} {folders[0]}")
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
    done: dict  # item with a record that stands -> seconds of its episode
    part: bool  # its folder holds more tasks: their summary stays


def load_suites(args, ckpt, prompts):
    suites = []
    weights = checkpoint.content_digest(ckpt) if ckpt else None  # endpoints have none
    for bench, root in zip(args.bench or [None], args.root or [None]):
        flags = argparse.Namespace(**{**vars(args), "tools": True})  # the mode is each job's
        shown = args.subtitles or "none"
        if bench:
            tasks, notes = benchmarks.read_split(bench, root)
            print_notes(bench, notes)
            flags.video_root = args.video_root or root
            shown = args.subtitles or benchmarks.splits()[bench].shown
            if args.protocol_set == "paper" and shown == "aligned" and not args.subtitles:
                shown = "full"  # as its authors' evaluation shows them
        else:
            tasks = rollout.read_tasks(args.data)
        agent, source = rollout.agent_settings(flags, args.data)
        source = systems.source_of(source, args)
        source.cache.timeout = args.decode_timeout or None
        if shown != "none":
            source.subtitles = partial(benchmarks.task_subtitles, root=source.root, which=shown)
        benchmarks.check_videos(bench or args.data, tasks, source.root)
        out = leaf_of(args.out, bench)
        if not args.estimate:
            launch.make_out(out)
        # Of all tasks, not of the first --limit: a short run is part of a long one.
        digest = settings_digest(args, weights, shown, tasks, prompts)
        records = read_records(out, digest)
        # A broken video stays broken; an endpoint that was down is asked again.
        done = {item: r["timing"].get("total_s") for item, r in records.items()
                if r["status"] != "engine_error"}
        tasks = tasks[: args.limit or None]
        kept = os.path.join(out, "tasks.jsonl")
        part = bool(records) and len(launch.read_jsonl(kept)) > len(tasks)
        suites.append(Suite(bench, tasks, agent, source, out, digest, done, part))
    return suites


def print_notes(name, notes):
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)


def unfinished(suites, args):
    """-> [(suite, K, mode, tasks)], a job each. A task whose items are not all done is asked with
    all its samples: they are drawn as a group."""
    part, parts = args.shard
    jobs = []
    for suite in suites:
        # Of all tasks: the other shards do not know what is done here.
        mine = costs.deal([(suite.source.root, task) for task in suite.tasks], parts)[part]
        for k, mode in itertools.product(args.frames, args.tools):
            todo = []
            for task in [suite.tasks[i] for i in sorted(mine)]:
                items = {(task["id"], str(k), mode, sample) for sample in range(args.samples)}
                if not items <= suite.done.keys():
                    todo.append(task)
            jobs.append((suite, k, mode, todo))
    return jobs


def evaluate(args):
    """Run what has no record yet, on every rank; rank 0 writes the summary."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    part, parts = args.shard
    launch.beat(args.patience)
    if args.judge_url:  # hours of episodes later would be late to find out
        systems.OpenAIEngine(args.judge_url, args.judge_model).knock()
    ckpt = checkpoint.resolve_checkpoint(args.ckpt) if args.ckpt else None  # endpoints have none
    protocol, prompts = systems.make_protocol(args)
    suites = load_suites(args, ckpt, prompts)
    if world > 1:
        # No deadline: ranks end hours apart. One that hangs is ended by its own beat.
        launch.start_process_group(patience=0)
        launch.any_rank(False)  # every rank has read the records before any appends to them
    launch.beat(args.patience)
    # What --rescore and --compare read; once for all ranks.
    kept = {**vars(args), "prompt_hash": prompts}
    for suite in suites if rank == 0 else []:
        if not suite.part:
            write_tasks(suite.tasks, os.path.join(suite.out, "tasks.jsonl"))
            write_json(kept, suite.out, "args.json")
    jobs = unfinished(suites, args)
    needed = any(todo for *_, todo in jobs)
    shares = costs.split(jobs, world) if rank == 0 else [None] * world
    if world > 1:  # from one rank: a task that two ranks see differently would be asked by neither
        shares = launch.broadcast(shares)
        needed = launch.any_rank(needed)  # building vLLM is collective: all ranks build, or none
    engine = None
    if needed:
        if sys.stdout.isatty():  # else the table alone
            launch.say(f"{args.ckpt or args.engine} -> {args.out}: loading")
        # Without a checkpoint there are no ids: prompts stay messages, answers text.
        codec = chat.load_codec(ckpt, args.channel) if ckpt else None
        engine = make_engine(suites, args, ckpt, codec, protocol)
        shard = f"shard{part}of{parts}." if parts > 1 else ""
        name = f"records.{shard}rank{rank}.jsonl"  # a file per rank: nobody waits for a lock
        own = [(*job[:3], [job[3][i] for i in some]) for job, some in zip(jobs, shares[rank])]
        run_jobs(own, engine, codec, protocol, args, name, quiet=rank > 0 or args.quiet)
    faulthandler.cancel_dump_traceback_later()  # what is left is to wait, and to grade
    if world > 1:
        launch.any_rank(False)  # all records are there
    if engine and args.engine == "openai" and rank == 0:
        for suite in suites:  # the name asked for may stand for another model next month
            if not suite.part:
                write_json({**kept, "served": sorted(engine.served)}, suite.out, "args.json")
    if engine:
        engine.close()
    if world > 1:  # closing vLLM may have ended the group
        launch.end_process_group()
    if rank == 0 and parts > 1:  # no summary: a part would pass for the whole
        then = f"python eval.py --rescore {args.out} (or the folder of every shard, with --out)"
        print(f"shard {part} of {parts} is done; when all are: {then}")
    elif rank == 0:
        finish(args.out, [(s.bench, s.out) for s in suites], args, args.ckpt or args.model,
               {s.out: s.tasks for s in suites if s.part})


def estimate(args):
    """Print what evaluate(args) will take, before anything is built or written."""
    ckpt = checkpoint.resolve_checkpoint(args.ckpt) if args.ckpt else None
    protocol, prompts = systems.make_protocol(args)
    codec = chat.load_codec(ckpt, args.channel) if ckpt else None
    jobs = unfinished(load_suites(args, ckpt, prompts), args)
    shares = costs.split(jobs, int(os.environ.get("WORLD_SIZE", 1)))
    print(costs.estimate(jobs, shares, codec, protocol, args))


def make_engine(suites, args, ckpt, codec, protocol):
    """The engine that samples, made for the largest K of the run."""
    largest = max(64 if k == "gated" else k for k in args.frames)  # gated draws up to 64
    # A context that is too small for the first prompt is told now, not by every episode.
    for suite in suites if codec else []:
        rollout.check_context(codec, suite.tasks, suite.agent, suite.source, largest)
    if args.engine == "openai":
        return systems.make_engine(args, protocol)
    # With --crop-reply frames all windows of an episode end up in one context.
    windows = systems.protocols()[args.protocol].held(args) if "on" in args.tools else (0, 0)
    limits = argparse.Namespace(**{**vars(args), "frames": largest, "windows": windows})
    return rollout.make_engine(ckpt, codec, limits)


def run_jobs(jobs, engine, codec, protocol, args, name, quiet):
    """Every episode becomes a line of its suite's file `name` as it finishes."""
    from tqdm import tqdm

    total = sum(len(todo) for *_, todo in jobs) * args.samples
    meter = costs.Meter(engine)
    with tqdm(total=total, desc="episodes", disable=quiet or None) as bar:
        for suite, k, mode, todo in jobs:  # one after the other: the agent differs
            agent = replace(suite.agent, tools=mode == "on")
            episodes = rollout.run(
                meter, todo, agent, codec, suite.source, frames=k, group=args.samples,
                max_live=args.live or None, protocol=protocol)
            with append_to(os.path.join(suite.out, name)) as f:
                for episode in episodes:
                    record = record_of(episode, suite.digest, k, mode, args, meter.taken)
                    f.write(json.dumps(record) + "\n")
                    f.flush()  # a crash loses the episodes under way, no more
                    bar.update()
                    launch.beat(args.patience)


def main():
    args = parse_args()
    if args.protocols:
        names = [args.protocol] if args.prompt_file else systems.protocols()
        print(systems.describe_all(map(parse_args, names)))
    elif args.prepare:
        tasks, notes = benchmarks.read_split(args.bench[0], args.root[0])
        write_tasks(tasks, args.prepare)
        print_notes(args.prepare, notes)
    elif args.table:
        summaries = [read_summary(folder) for folder in args.table]
        print(launch.printable(benchmarks.markdown_table(summaries)))
    elif args.rescore:
        rescore(args.rescore, args)
    elif args.compare:
        compared = scores.compare([finished(folder) for folder in args.compare])
        launch.make_out(args.out)
        write_json(compared, args.out, "summary.json")
        print(launch.printable(scores.comparison(compared)))
    elif not args.estimate:
        evaluate(args)
    elif os.environ.get("RANK", "0") == "0":  # one of torchrun's ranks speaks for all
        estimate(args)


if __name__ == "__main__":
    launch.run_main(main)
