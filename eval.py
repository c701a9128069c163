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
(evaluation/systems.py): an error is never graded as text.

--protocol asks the other systems of the paper's Table 1 (evaluation/systems.py) behind an endpoint
(evaluation/endpoint.py). evaluation/results.py grades records and works on finished folders,
evaluation/scores.py computes intervals and tables.

A video that does not decode, a text that the server refuses, a full context are outcomes of their
item. Whatever else fails ends the run with exit code 1, and the same command goes on. If more than
1% of the items failed, the table is printed and the exit code is 1.

Reads:  --ckpt (or an OpenAI-compatible endpoint), --data or --bench with --root.
Writes: --out[/bench]/records.*.jsonl (one episode a line, appended as episodes finish; the same
        command again goes on), tasks.jsonl, args.json, judge.jsonl, summary.json
        --out/summary.json

CPU toy:  torchrun --nproc_per_node 2 eval.py --preset toy --ckpt grpo_out --data toy/eval.jsonl
1 GPU:    python eval.py --ckpt grpo_out --bench videomme --root Video-MME --out eval_out
Table 1:  python eval.py --base-url http://127.0.0.1:8000/v1 --model ParaVT-8B
              --protocol paper --prompts paper.json --bench all --root DATA
8 GPUs:   torchrun --nproc_per_node 8 eval.py --ckpt grpo_out --bench mlvu lvbench --root DATA
Endpoint: python eval.py --base-url http://127.0.0.1:8000/v1 --model M
              --protocol longvt --bench mmvu --root MMVU
"""

import argparse
import faulthandler
import json
import os
import sys
from dataclasses import dataclass, fields, replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import rollout
import video
from evaluation import benchmarks, endpoint, results, systems
from plumbing import data
from plumbing.judge import add_judge_arguments, open_judge

# ------------------------------------------------------------------------------------------------
# Arguments


def build_parser():
    parser = launch.parser(__doc__)

    add = parser.add_argument_group("what to run").add_argument
    add("--ckpt", help="checkpoint folder; or --base-url")
    add("--data", help="task JSONL")
    add("--bench", nargs="+", choices=[*benchmarks.splits(), "all"], default=[],
        help="benchmarks as their publishers ship them; several give one table; all: the paper's")
    add("--root", nargs="+", default=[], metavar="DIR",
        help="folder of each benchmark, or one of all; of the videos of --data (default: its own)")
    add("--out", help="folder to write; a run of the same settings goes on there; default: "
        "eval_out, with --compare none")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    # Every K with every mode of --tools is an evaluation of its own. All share one table.
    add("--frames", type=frames_argument, nargs="+", default=[64],
        help="overview frames K, one evaluation each; gated: K is drawn per task; 0: text alone, "
        "with --tools off only")
    add("--tools", nargs="+", choices=["on", "off"], default=["on"], help="offer crop_video")
    add("--samples", type=launch.positive, default=1,
        help="episodes per task; above 1 needs --temperature")
    add("--limit", type=launch.positive, metavar="N", help="the first N tasks; default: all")
    systems.add_arguments(parser)

    # Defaults are those of the checkpoint's training, see `trained_settings`, or of the protocol.
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=launch.amount, default=0.0, help="of sampling; 0 = greedy")
    add("--max-new-tokens", type=launch.positive, help="tokens per main turn")
    add("--max-model-len", type=launch.positive, help="tokens of one context with its answer")
    add("--max-turns", type=int, help="tool turns before the answer turn")
    add("--max-parallel", type=int, help="calls run per turn")
    add("--think-prefix", action=argparse.BooleanOptionalAction,
        help="force <think>\\n in every main turn")
    add("--crop-response", choices=["summary", "frames"],
        help="to a call of paravt: a sub-agent's summary, or the window's frames")
    add("--seed", type=int, default=0, help="of sampling and of the draws of K")
    add("--max-num-seqs", type=launch.positive, default=64,
        help="sequences in the engine's batch, or requests at once to all endpoints")

    endpoint.add_arguments(parser)
    add_judge_arguments(parser, "if the rule says wrong",
                        "the judge's name; without --judge-url earlier verdicts count")

    add = parser.add_argument_group("finished folders, no model").add_argument
    add("--compare", nargs="+", metavar="DIR",
        help="one table, with differences to the first folder and the rows of the paper")
    return parser


def frames_argument(text: str) -> int | str:
    """--frames: as in rollout.py, or 0."""
    return 0 if text == "0" else rollout.frames_argument(text)


def parse_args():
    """The flags, checked. Raises UserError."""
    parser = build_parser()
    # Read twice: some flags change defaults, which any flag still overrides.
    set_defaults(parser, parser.parse_args())
    args = parser.parse_args()
    if "all" in args.bench:
        args.bench = list(benchmarks.paper_table()["ParaVT-8B"])
    if args.compare:
        if args.out and os.path.realpath(args.out) in map(os.path.realpath, args.compare):
            raise launch.UserError("--out would be replaced, but it is an input; choose another")
        return args
    args.out = args.out or "eval_out"
    check_flags(args)
    if args.bench and len(args.bench) > len(args.root):
        # One folder of folders. Benchmarks of one data set share a folder.
        names = [benchmarks.splits()[name].folder or name for name in args.bench]
        args.root = [os.path.join(args.root[0], name) for name in names]
    return args


def set_defaults(parser, args):
    """Defaults of settings, with a flag or without one. args: the flags that change them."""
    defaults = {**systems.READER_SETTINGS, "chat_template_kwargs": {}}
    for setting in fields(rollout.AgentConfig):
        if setting.name not in ("tools", "temperature", "seed"):  # flags with their own defaults
            defaults[setting.name] = setting.default
    parser.set_defaults(**defaults)
    parser.set_defaults(**systems.all_systems()[args.protocol].settings)
    if args.preset == "toy":
        parser.set_defaults(**rollout.toy_defaults())
    if args.ckpt:
        trained = trained_settings(args.ckpt)
        parser.set_defaults(**{name: trained[name] for name in defaults if name in trained})


def trained_settings(ckpt):
    """-> args.json of the run that a checkpoint is of, as sft.py and grpo.py write it; {} if there
    is none. A model that is asked in another way than it was trained loses accuracy."""
    folder = os.path.realpath(ckpt)  # of the run, or of a checkpoint in it
    for path in (folder, os.path.dirname(folder)):
        if os.path.exists(os.path.join(path, "args.json")):
            return results.read_json(path, "args.json")
    return {}


def check_flags(args):
    """Raises UserError if the flags of a run contradict each other, before any file is read."""
    benches, roots = len(args.bench), len(args.root)
    for invalid, reason in (
        (bool(args.data) == bool(benches), "give --data, or --bench with --root, or --compare with "
         "finished evaluations; --bench takes no --data (tools/ask.py asks about one video)"),
        (os.path.exists(os.path.join(args.out, "log.jsonl")),
         f"--out {args.out} holds a training run; choose another folder"),
        (benches and roots not in (1, benches), "--root: one folder for each --bench, or one "
         "for all"),
        (bool(args.ckpt) == bool(args.base_url), "give --ckpt, or --base-url with --model"),
        (args.base_url and not args.model, "--base-url needs --model"),
        (args.protocol != "paravt" and not args.base_url,
         f"--protocol {args.protocol} asks an endpoint: `vllm serve MODEL`, then --base-url"),
        (0 in args.frames and "off" not in args.tools,
         "--frames 0 shows no video, but --tools on lets the agent look: give --tools off"),
        (args.samples > 1 and args.temperature == 0,
         "--samples above 1 needs --temperature above 0: greedy samples are all the same")):
        if invalid:
            raise launch.UserError(reason)


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
    done_items: set = None  # items that have a record


def load_suites(args, weights: str | None, prompts: str) -> list[Suite]:
    """One Suite per --bench, or one of --data. weights, prompts: digests, for records to carry.
    Raises UserError for a file that cannot be used and for records of other settings."""
    suites = []
    for bench, root in zip(args.bench or [None], args.root or [None]):
        root = root or os.path.dirname(os.path.abspath(args.data))
        tasks, mode = read_tasks(args, bench, root)
        agent, source = agent_and_source(args, root, mode)
        out = results.bench_dir_of(args.out, bench)
        launch.lock(out)
        # Of all tasks, not of the first --limit, so that a long run continues a short one.
        texts = None
        if mode != "none":
            names = [task["subtitles"] for task in tasks if task.get("subtitles")]
            texts = results.digest_of_files(video.resolve(name, root) for name in names)
        digest = results.settings_digest(args, weights, mode, tasks, prompts, texts)
        done_items = set(results.read_records(out, digest))
        tasks = tasks[: args.limit]
        # Refused now, or a wrong folder would cost hours of counted errors.
        source.cache.check_present(bench or args.data, tasks, root)
        suites.append(Suite(bench, tasks, agent, source, out, digest, done_items))
    return suites


def read_tasks(args, bench, root):
    """-> (tasks of a benchmark or of --data, which subtitles are shown). Raises UserError."""
    if bench:
        tasks, notes = benchmarks.read_split(bench, root)
        results.print_counts(bench, notes)
        mode = benchmarks.splits()[bench].default_subtitles
        if mode != "none" and notes["no subtitles"] == len(tasks):
            raise launch.UserError(f"{bench}: none of its subtitles lies below {root}; unpack them "
                                   "there")
        return tasks, mode
    return data.read_tasks(args.data), "aligned"  # as in training


def agent_and_source(args, root, subtitles):
    """Arguments, folder of the videos, which subtitles -> (AgentConfig, VideoSource)."""
    names = {f.name for f in fields(rollout.AgentConfig)} - {"tools"}
    agent = rollout.AgentConfig(tools=True, **{name: getattr(args, name) for name in names})
    read_subtitles = data.task_subtitles if subtitles == "aligned" else None
    cache = video.FrameCache(workers=video.decode_threads())
    return agent, systems.source_of(args, root, cache, read_subtitles)


def whole_checkpoint(args):
    """-> (folder of --ckpt, checked; digest of the weights), or None twice for endpoints."""
    if not args.ckpt:
        return None, None
    from plumbing import checkpoint  # imports torch, which an endpoint does not need

    ckpt = checkpoint.resolve(args.ckpt)
    return ckpt, results.digest_of_files(checkpoint.all_files(ckpt))


def pending_tasks(suites: list[Suite], args) -> list[tuple]:
    """-> [(suite, K, mode, tasks)], one job each. A task with an unfinished item is asked with all
    samples again, because they are drawn as one group."""
    jobs = []
    for suite in suites:
        for k, mode in results.grid_cells(vars(args)):
            todo = []
            for task in suite.tasks:
                items = {(task["id"], str(k), mode, sample) for sample in range(args.samples)}
                if not items <= suite.done_items:
                    todo.append(task)
            jobs.append((suite, k, mode, todo))
    return jobs


def tasks_of_rank(tasks, rank, world):
    """Tasks -> those that a rank asks. The questions of a video stay together, so that one rank
    decodes it."""
    by_video = sorted(tasks, key=lambda task: task["video"])
    return by_video[len(tasks) * rank // world : len(tasks) * (rank + 1) // world]


def evaluate(args):
    """Runs every task that has no record yet, on all ranks. Rank 0 writes the summary."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    launch.reset_watchdog()
    if args.data:  # a bad row is named now, because torch takes seconds to load
        data.read_tasks(args.data)
    if args.judge_url:  # a judge that does not answer is found before hours of episodes
        open_judge(args).close()
    ckpt, weights = whole_checkpoint(args)
    system, prompts = systems.make_system(args)
    suites = load_suites(args, weights, prompts)
    if world > 1:
        launch.start_process_group()
        launch.any_rank(False)  # a barrier: all ranks have read the records before any rank appends
    # Reading benchmarks and hashing weights may have taken minutes.
    launch.reset_watchdog()
    jobs, engine = pending_tasks(suites, args), None
    if any(todo for *_, todo in jobs):  # on one rank or another: building vLLM is collective
        codec, engine = make_engine(args, ckpt, system)
    if rank == 0:
        # What --compare reads. Only now, so that a refused run leaves no files.
        flags = {**vars(args), "prompt_hash": prompts, "code": launch.our_commit()}
        for suite in suites:
            rows = "".join(json.dumps(task) + "\n" for task in suite.tasks)
            launch.write_atomic(os.path.join(suite.out, "tasks.jsonl"), rows)
            results.write_json(flags, suite.out, "args.json")
    if engine:
        jobs = [(*job, tasks_of_rank(todo, rank, world)) for *job, todo in jobs]
        run_jobs(jobs, engine, codec, system, args, rank)
    faulthandler.cancel_dump_traceback_later()  # no more resets: waiting and grading take long
    if world > 1:
        launch.any_rank(False)  # a barrier: all records are written
    failed = ""
    if rank == 0:
        folders = [(suite.bench, suite.out) for suite in suites]
        failed = results.finish(args, folders, prompts)
    if failed:  # after the table and the summary
        print(launch.printable(failed), file=sys.stderr, flush=True)
    launch.end_process_group(engine, int(bool(failed)))


def make_engine(args, ckpt, system):
    """-> (codec, engine that samples), made for the largest K of the run."""
    if args.base_url:
        # No ids there: prompts stay messages, and answers stay text.
        return None, endpoint.make_engine(args, system.prefill, system.jpeg_quality)
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    largest = max(1, *map(rollout.max_num_frames, args.frames))
    # rollout's --frames is one K, ours is a list of them. Here no trainer shares the card.
    flags = {**vars(args), "frames": largest, "gpu_memory_utilization": 0.9}
    return codec, rollout.make_engine(ckpt, codec, argparse.Namespace(**flags))


def run_jobs(jobs, engine, codec, system, args, rank):
    """Writes every episode, as soon as it ends, as a line of the records of its suite. A file per
    rank needs no lock."""
    from tqdm import tqdm

    total = sum(len(todo) for *_, todo in jobs) * args.samples
    with tqdm(total=total, desc="episodes", disable=rank > 0 or None) as bar:
        for suite, k, mode, todo in jobs:  # one after the other, because their agents differ
            agent = replace(suite.agent, tools=mode == "on")
            sampler = rollout.RolloutWorker(engine, codec, suite.source, agent)
            with results.open_append(os.path.join(suite.out, f"records.rank{rank}.jsonl")) as f:
                for episode in systems.run(sampler, todo, system, k, args.samples):
                    record = results.record_of(episode, suite.digest, k, mode, system)
                    f.write(json.dumps(record) + "\n")
                    f.flush()  # a crash then loses only the episodes under way
                    bar.update()
                    launch.reset_watchdog()


def main():
    args = parse_args()
    if args.compare:
        results.compare(args.compare, args.out)
    else:
        evaluate(args)


if __name__ == "__main__":
    launch.run_main(main)
