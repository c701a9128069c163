"""
eval.py (tests/test_eval.py): runs benchmarks and task JSONL through the agent loop of training and
scores the answers.

  score     = [letter == gold] | [text matches gold] | temporal IoU   of the final answer; a broken
              video, a full context or a failed request scores 0 and stays in the denominator
  headline  = mean over items | MLVU: mean of the means of seven tasks | Charades-STA: mean IoU |
              MMVU: multiple choice alone
  f_tau     = mean R_fmt    kappa = executed crop_video calls per episode    both as in training

Sampling is greedy, unless --temperature or the protocol says otherwise. The answer is the last
<answer> block, or the text after the thought if there is no block. An evaluation asks for the
model's answer, while training (rewards.py) pays only for the tag. Sub-agents answer calls as in
training. Departs from the authors' evaluation, which --protocol paper repeats
(evaluation/paper.py): an error is never graded as text.

--protocol evaluates other systems (evaluation/systems.py), also behind an endpoint
(evaluation/endpoint.py). evaluation/results.py grades records and works on finished folders,
evaluation/scores.py computes intervals and tables.

Reads:  --ckpt (or an OpenAI-compatible endpoint), --data or --bench with --root.
Writes: --out[/bench]/records.*.jsonl (one episode a line, appended as episodes finish; the same
        command again goes on), tasks.jsonl, args.json, judge.jsonl, summary.json
        --out/summary.json

CPU toy:  torchrun --nproc_per_node 2 eval.py --preset toy --ckpt grpo_out --data toy/eval.jsonl
1 GPU:    python eval.py --ckpt grpo_out --bench videomme --root Video-MME --out eval_out
Table 1:  python eval.py --ckpt ParaVT-8B --protocol paper --texts-of PARAVT --bench all --root DATA
8 GPUs:   torchrun --nproc_per_node 8 eval.py --ckpt grpo_out --bench mlvu lvbench --root DATA
Endpoint: python eval.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M
              --protocol longvt --bench mmvu --root MMVU
"""

import argparse
import faulthandler
import json
import os
import sys
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import rollout
from evaluation import benchmarks, costs, endpoint, results, scores, systems
from evaluation.protocol_loop import check_prompts, run, shuffle_options
from plumbing import arguments, data, runs
from plumbing.data import subtitle_files
from plumbing.judge import add_judge_arguments, open_judge, rewrite_files

# ------------------------------------------------------------------------------------------------
# Arguments


def build_parser():
    parser = arguments.parser(__doc__)

    add = parser.add_argument_group("what to run").add_argument
    add("--engine", choices=["vllm", "openai"], default="vllm", help="openai: ask an endpoint")
    add("--ckpt", help="checkpoint folder; not needed with --engine openai")
    add("--data", help="task JSONL")
    add("--bench", nargs="+", choices=[*benchmarks.splits(), "all"], default=[],
        help="benchmarks as their publishers ship them; several give one table; all: the paper's")
    add("--root", nargs="+", default=[], metavar="DIR", help="one per benchmark, or one of all")
    add("--out", default="eval_out", help="folder to write; a run of the same settings goes on")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    # Every K with every mode of --tools is an evaluation of its own. All share one table.
    add("--frames", type=frames_argument, nargs="+", default=[64],
        help="overview frames K, one evaluation each; gated: K is drawn per task; 0: text alone, "
        "with --tools off only")
    # Does the answer need the video, the order of its frames, the place of the right option?
    add("--show", nargs="+", choices=["real", "blank", "shuffled", "options"], default=["real"],
        help="one evaluation each; blank: grey frames, windows too; shuffled: frames of the "
        "overview, times in order; options: of multiple choice, in another order")
    add("--tools", nargs="+", choices=["on", "off"], default=["on"], help="offer crop_video")
    add("--samples", type=int, default=1, help="episodes per task; above 1 needs --temperature")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--allow-errors", action="store_true", help="print a headline with over 1%% failed items")

    add("--protocols", action="store_true", help="print prompts and texts of each, and end")
    systems.add_arguments(parser)
    endpoint.add_arguments(parser)
    add_judge_arguments(parser, "if the rule says wrong",
                        "the judge's name; without --judge-url earlier verdicts count")

    add = parser.add_argument_group("finished folders, no model").add_argument
    add("--rescore", nargs="+", metavar="DIR", help="grade the records again")
    add("--compare", nargs="+", metavar="DIR", help="one table; NAME= DIR DIR ..: pooled runs")
    add("--table", nargs="+", metavar="DIR", help="beside the paper's rows, in Markdown")
    add("--prepare", metavar="JSONL", help="write the tasks of --bench (videos relative to --root)")

    # No flag of this group changes an answer, so settings_digest leaves them out.
    add = parser.add_argument_group("speed").add_argument
    add("--live", type=int, default=0, help="episodes at once; 0 = twice max_num_seqs")
    add("--quiet", action="store_true", help="no progress bar; the tables stay")

    rollout.add_agent_arguments(parser, tools_flag=False)
    # Training samples at 0.7, and its engine shares the card with the trainer.
    # subtitles: as the benchmark asks.
    parser.set_defaults(temperature=0.0, gpu_memory_utilization=0.9, subtitles=None)
    return parser


def frames_argument(text: str) -> int | str:
    """--frames: as in rollout.py, or 0."""
    return 0 if text == "0" else rollout.frames_argument(text)


def parse_args(protocol: str | None = None):
    """The flags, checked. protocol: replaces --protocol. Raises UserError."""
    parser = build_parser()
    # A protocol and a preset change defaults, which yield to flags. So both must be known first.
    early = arguments.parse_early(parser)
    name = protocol or early.protocol
    parser.set_defaults(**systems.all_systems()[name].native)
    if early.preset == "toy":
        parser.set_defaults(**rollout.toy_defaults())
    args = parser.parse_args()
    args.protocol = name
    if "all" in args.bench:
        args.bench = list(benchmarks.paper_table()["ParaVT-8B"][1])
    for invalid, reason in flag_checks(args):
        if invalid:
            raise launch.UserError(reason)
    if len(args.bench) > len(args.root):
        # One folder of folders. Benchmarks of one data set share a folder.
        names = [benchmarks.splits()[name].folder or name for name in args.bench]
        args.root = [os.path.join(args.root[0], name) for name in names]
    return args


def flag_checks(args):
    """-> [(whether the flags contradict each other, why)], before any file is read."""
    benches, roots = len(args.bench), len(args.root)
    if args.compare or args.table or args.rescore or args.protocols:
        return []  # all other settings come from the folders
    checks = [
        (not (args.data or benches), "give --data, --bench with --root, or --compare with finished "
         "evaluations (tools/ask.py asks about one video)"),
        (args.prepare and benches != 1, "--prepare takes one --bench"),
        (args.out and os.path.exists(os.path.join(args.out, "log.jsonl")),
         f"--out {args.out} holds a training run; choose another folder"),
        (benches and (args.data or not roots), "--bench needs --root, and no --data"),
        (benches and roots not in (1, benches), "--root: one for each --bench, or one for all")]
    if args.prepare:
        return checks  # nothing is sampled
    return checks + run_faults(args) + [
        (not results.grid_cells(vars(args)), "--frames 0 has no frames for --show to change"),
        (min(args.limit, args.live) < 0, "--limit and --live may not be negative"),
        (args.samples < 1 or (args.samples > 1 and args.temperature == 0), "--samples must be at "
         "least 1, and above 1 needs --temperature above 0: greedy samples are all the same")]


def run_faults(args):
    """Those faults of flags that tools/ask.py can meet too."""
    return systems.flag_checks(args) + endpoint.flag_checks(args) + [
        (not args.ckpt and args.engine != "openai",
         "give --ckpt, or --engine openai with --base-url and --model"),
        (args.chat_template_kwargs and args.engine == "openai",
         "chat_template_kwargs: an endpoint has a template of its own, set them there"),
        (0 in args.frames and "off" not in args.tools,
         "--frames 0 shows no video, but --tools on lets the agent look: give --tools off")]


# ------------------------------------------------------------------------------------------------
# The run


@dataclass
class Suite:
    """One benchmark or --data: the tasks to run, and the folder of their records."""

    bench: str | None
    tasks: list  # the first --limit
    agent: rollout.AgentConfig
    source: rollout.VideoSource  # of the videos and subtitles
    out: str = ""  # leaf folder of the records
    digest: str = ""  # see results.settings_digest
    done: dict = None  # item with a finished record -> seconds of that episode
    part: bool = False  # the folder holds more tasks than these; their summary is then left alone


def load_suites(args, weights: str | None, prompts: str) -> list[Suite]:
    """One Suite per --bench, or one of --data. weights, prompts: digests, for records to carry.
    Raises UserError for a file that cannot be used and for records of other settings."""
    suites = []
    for bench, root in zip(args.bench or [None], args.root or [None]):
        # agent_settings takes one mode of --tools. run_jobs sets each job's own.
        flags = argparse.Namespace(**{**vars(args), "tools": True})
        if bench:
            tasks, notes = benchmarks.read_split(bench, root)
            results.print_counts(bench, notes)
            flags.video_root = args.video_root or root
            mode = args.subtitles or benchmarks.splits()[bench].default_subtitles
            if mode != "none" and notes["no subtitles"] == len(tasks):
                raise launch.UserError(f"{bench}: none of its subtitles lies below {root}; unpack "
                                       "them there, or --set subtitles=none")
        else:
            tasks = data.read_tasks(args.data)
            named = any(task.get("subtitles") for task in tasks)
            mode = args.subtitles or ("aligned" if named else "none")  # as in training
        flags.subtitles = mode
        agent, source = rollout.agent_settings(flags, args.data)
        source = systems.source_of(source, args)
        out = results.bench_dir_of(args.out, bench)
        launch.make_out(out)
        # Of all tasks, not of the first --limit, so that a long run continues a short one.
        files = subtitle_files(flags, (args.data, tasks))
        texts = runs.digest_of(files) if files else None
        digest = results.settings_digest(args, weights, mode, tasks, prompts, texts)
        records = results.read_records(out, digest)
        done = {k: r["timing"].get("total_s") for k, r in records.items() if not runs.is_retried(r)}
        tasks = tasks[: args.limit or None]
        # Refused now, or a wrong folder would cost hours of counted video errors.
        source.cache.check_present(flags, bench or args.data, tasks)
        # A run with --limit in the folder of a longer one must not replace the longer summary.
        part = bool(records) and len(launch.read_jsonl(f"{out}/tasks.jsonl")) > len(tasks)
        suites.append(Suite(bench, tasks, agent, source, out, digest, done, part))
    return suites


def whole_checkpoint(args):
    """-> (folder of --ckpt, checked; digest of the weights), or None twice for endpoints."""
    if not args.ckpt:
        return None, None
    from plumbing import checkpoint  # imports torch, which an endpoint does not need

    ckpt = checkpoint.resolve(args.ckpt)
    return ckpt, checkpoint.content_digest(ckpt)


def pending_tasks(suites: list[Suite], args) -> list[tuple]:
    """-> [(suite, K, mode, tasks)], one job each. A task with an unfinished item is asked with all
    samples again, because they are drawn as one group."""
    jobs = []
    for suite in suites:
        for k, mode in results.grid_cells(vars(args)):
            todo = [task for task in suite.tasks if not suite.done.keys() >= {
                (task["id"], str(k), mode, sample) for sample in range(args.samples)}]
            jobs.append((suite, k, mode, todo))
    return jobs


def evaluate(args):
    """Runs every task that has no record yet, on all ranks. Rank 0 writes the summary."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    launch.reset_watchdog(args.patience)
    if args.data:  # a bad row is named now, because torch takes seconds to load
        data.read_tasks(args.data)
    if args.judge_url:  # a judge that does not answer is found before hours of episodes
        open_judge(args).close()
    ckpt, weights = whole_checkpoint(args)
    arguments.check_outputs([os.path.join(args.out, "tasks.jsonl")], [args.data])
    protocol, prompts = systems.make_protocol(args)
    suites = load_suites(args, weights, prompts)
    for suite in suites:
        check_prompts(protocol, suite.tasks, suite.agent, 1)
        launch.lock(suite.out)
    if world > 1:
        # No deadline for collectives, as ranks end hours apart. A rank that hangs is ended
        # by launch.reset_watchdog.
        launch.start_process_group(0, args.cpu or args.engine == "openai")
        launch.any_rank(False)  # a barrier: all ranks have read the records before any rank appends
    # Reading benchmarks and hashing weights may have taken minutes.
    launch.reset_watchdog(args.patience)
    jobs = pending_tasks(suites, args)
    needed = any(todo for *_, todo in jobs)
    # shares: for each rank and job the places of the tasks that the rank asks
    shares = costs.tasks_by_rank(jobs, world) if rank == 0 else [None] * world
    if world > 1:
        # Shares of one rank for all: if two ranks saw a folder differently, a task could be missed.
        shares = launch.broadcast(shares)
        needed = launch.any_rank(needed)  # building vLLM is collective, so all ranks build or none
    engine = None
    if needed:
        if sys.stdout.isatty():  # a script that reads stdout gets the table alone
            launch.print0(f"{args.ckpt or args.engine} -> {args.out}: loading")
        # Without a checkpoint there are no ids: prompts stay messages, and answers stay text.
        codec = chat.load_codec(ckpt, args.chat_template_kwargs) if ckpt else None
        engine = make_engine(suites, args, ckpt, codec, protocol)
    # Rank 0 writes the files that --rescore and --compare read. Only now that the engine has taken
    # the checkpoint, so that a refused run leaves no files.
    meta = {**vars(args), "prompt_hash": prompts, "code": launch.our_commit()}
    for suite in suites:
        if rank == 0 and not suite.part:
            results.write_tasks(suite.tasks, os.path.join(suite.out, "tasks.jsonl"))
            results.write_json(meta, suite.out, "args.json")
    name = f"records.rank{rank}.jsonl"  # a file per rank needs no lock
    if needed:
        # This rank's tasks of every job.
        rank_jobs = [(*job[:3], [job[3][i] for i in part]) for job, part in zip(jobs, shares[rank])]
        run_jobs(rank_jobs, engine, codec, protocol, args, name, quiet=rank > 0 or args.quiet)
    rewrite_files(os.path.join(suite.out, name) for suite in suites)
    faulthandler.cancel_dump_traceback_later()  # no more resets: waiting and grading take long
    if world > 1:
        launch.any_rank(False)  # a barrier: all records are written
    if rank == 0:
        results.finish(args.out, [(s.bench, s.out) for s in suites], args, args.ckpt or args.model,
                       {s.out: s.tasks for s in suites if s.part})
    if world > 1 or args.engine == "vllm":  # the other ranks wait here for the summary of rank 0
        launch.end_process_group(engine)
    elif engine:
        engine.close()
    launch.unlock()


def make_engine(suites, args, ckpt, codec, protocol):
    """The engine that samples, made for the largest K of the run. Raises UserError if the context
    is too small."""
    if args.engine == "openai":  # asked first: a wrong key is then found before any decoding
        tools = protocol.schema() if protocol.schema and "on" in args.tools else None
        videos = [os.path.join(suite.source.root, task["video"]) for suite in suites
                 if suite.source.grounding_as_video for task in suite.tasks
                 if task["type"] == "grounding"]  # the server reads these files itself
        engine = endpoint.make_engine(args, bool(protocol.prefill), protocol.jpeg, tools,
                                      next(filter(os.path.exists, videos), None))
    elif any(suite.source.grounding_as_video and task["type"] == "grounding" for suite in suites
             for task in suite.tasks):
        raise launch.UserError(f"--protocol {args.protocol} sends the videos of grounding tasks as "
                               "files, which an endpoint reads: give --engine openai")
    largest = max(1, *map(rollout.max_num_frames, args.frames))
    # Checked now, or every episode would end with status "context".
    for suite in suites if codec else []:
        rollout.check_context(codec, suite.tasks, suite.agent, suite.source, largest)
    if args.engine == "openai":
        return engine
    # Windows that one context holds beside the overview, in the protocols of other systems.
    system = systems.all_systems()[args.protocol]
    windows = system.crop_frames_in_context(args) if "on" in args.tools else (0, 0)
    # rollout's --frames is one K, ours is a list of them.
    flags = argparse.Namespace(**{**vars(args), "frames": largest})
    engine = rollout.make_engine(ckpt, codec, flags, windows=windows)
    engine.sampling = endpoint.sampling_settings(args)
    return engine


def run_jobs(jobs, engine, codec, protocol, args, name, quiet):
    """Writes every episode, as soon as it ends, as a line of the file `name` of its suite."""
    from tqdm import tqdm

    meter = costs.Meter(engine)  # counts the tokens of every request
    total = sum(len(todo) for *_, todo in jobs) * args.samples
    with tqdm(total=total, desc="episodes", disable=quiet or None) as bar:
        for suite, k, mode, todo in jobs:  # one after the other, because their agents differ
            tools, show = scores.split_mode(mode)
            agent = replace(suite.agent, tools=tools == "on")
            source = replace(suite.source, show=show)
            sampler = rollout.RolloutWorker(meter, codec, source, agent,
                                            max_live=args.live or None)
            if show == "options":
                todo = [shuffle_options(task) for task in todo]
            with results.open_append(os.path.join(suite.out, name)) as f:
                for episode in run(sampler, todo, protocol, frames=k, group=args.samples):
                    record = results.record_of(episode, suite.digest, k, mode, args, meter.taken)
                    # The models that have answered so far: the same name may stand for another.
                    record |= {"served": sorted(engine.served)} if args.engine == "openai" else {}
                    f.write(json.dumps(record) + "\n")
                    f.flush()  # a crash then loses only the episodes under way
                    bar.update()
                    launch.reset_watchdog(args.patience)


def main():
    args = parse_args()
    if args.protocols:
        names = [args.protocol] if args.prompt_file or args.texts_of else systems.all_systems()
        print(systems.describe_all(map(parse_args, names)))
    elif args.prepare:
        results.prepare_data(args.bench[0], args.root[0], args.prepare)
    elif args.table:
        results.table(args.table)
    elif args.rescore:
        results.rescore(args.rescore, args)
    elif args.compare:
        arguments.check_outputs([args.out], args.compare)
        results.compare(args.compare, args.out)
    else:
        evaluate(args)


if __name__ == "__main__":
    launch.run_main(main)
