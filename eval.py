"""
eval.py: task JSONL through the same agent loop as training, greedy, into records, tables and one JSON summary.

  acc(K)    = mean over ALL tasks of the score of the final answer; a broken video, a full context or an engine error scores 0
  f_tau     = mean R_fmt          kappa = executed crop_video calls per episode          both as in training (rewards.py)
  interval  = half the width of Wilson's 95% interval, z sqrt(acc (1 - acc) / n + z^2 / 4n^2) / (1 + z^2 / n), z = 1.96: it stays
              above zero where all or none are right

Scores: mcq exact letter, open rule-based match, grounding temporal IoU. The answer is the last <answer> block, or, where there is
none, the text after the thought: an evaluation asks what the model said, training (rewards.py) pays only for the tag.

Reads:  --ckpt (or an OpenAI-compatible endpoint), --data.
Writes: --out/records.rankR.jsonl (one episode a line, appended as they finish: run again to go on), --out/summary.json, --out/args.json

CPU toy:  torchrun --nproc_per_node 2 eval.py --preset toy --ckpt grpo_out --data toy/eval.jsonl --frames 4 16 64 --tools on off --out eval_out
1 GPU:    python eval.py --ckpt grpo_out --data eval.jsonl --frames 64 --out eval_out
8 GPUs:   torchrun --nproc_per_node 8 eval.py --ckpt grpo_out --data eval.jsonl --frames 64 --out eval_out
"""
import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import replace

import model
import rewards
import rollout


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ckpt", default=None, help="checkpoint folder; not needed with --engine openai")
    add("--data", default=None, help="task JSONL")
    add("--compare", nargs="+", default=None, metavar="DIR", help="no evaluation: one table from the summaries of these finished --out folders")
    add("--out", default="eval_out", help="folder of records and summary; an earlier run of the same settings is continued")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths that suit the world of toy.py")
    add("--frames", type=rollout.frames_argument, nargs="+", default=[64], help="overview frames K, one evaluation each; 'gated' draws K per task")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--engine", choices=["auto", "vllm", "transformers", "openai"], default="auto", help="who samples")
    add("--base-url", default=None, help="openai: for example http://127.0.0.1:8000/v1")
    add("--model", default=None, help="openai: name of the model")
    add("--api-key-env", default=None, help="openai: environment variable that holds the key")
    rollout.add_agent_arguments(parser, tools=False)
    add("--tools", nargs="+", choices=["on", "off"], default=["on"], help="offer crop_video, or answer from the overview alone; or both")
    parser.set_defaults(temperature=0.0)
    return parser


def parse_args():
    parser = build_parser()
    if parser.parse_known_args()[0].preset == "toy":
        parser.set_defaults(**rollout.toy_lengths())
    args = parser.parse_args()
    if not (args.data or args.compare):
        raise model.UserError("give --data (task JSONL), or --compare with finished evaluations")
    if args.compare:
        return args
    if args.engine == "openai" and not (args.base_url and args.model):
        raise model.UserError("--engine openai needs --base-url and --model")
    if args.engine != "openai" and not args.ckpt:
        raise model.UserError("give --ckpt, or --engine openai with --base-url and --model")
    if args.limit < 0:
        raise model.UserError("--limit may not be negative")
    return args


def settings_digest(args, ckpt):
    """What must be equal for records to belong together: every flag but the ones that only say where and how fast."""
    free = {"out", "limit", "frames", "tools", "max_seqs", "decode_threads", "decode_timeout", "ckpt"}
    kept = {k: v for k, v in sorted(vars(args).items()) if k not in free}
    stamp = os.path.getmtime(os.path.join(ckpt, "config.json")) if ckpt else None  # the same path may hold a newer checkpoint
    with open(args.data, "rb") as f:
        data = hashlib.sha256(f.read()).hexdigest()
    return hashlib.sha256(json.dumps([kept, ckpt, stamp, data]).encode()).hexdigest()[:16]


def read_records(out, digest):
    """Finished records of earlier runs -> {(task id, K, tools): record}. A torn last line is dropped; an item that was
    asked again after an engine error has two records, of which the error loses.

    Raises UserError when the folder holds records of other settings.
    """
    done = {}
    for name in sorted(os.listdir(out)):
        if not (name.startswith("records.") and name.endswith(".jsonl")):
            continue
        with open(os.path.join(out, name), encoding="utf-8") as f:
            lines = f.read().split("\n")
        for number, line in enumerate(lines[:-1], 1):  # a whole line ends in a newline, so the last piece is empty or torn
            try:
                record = json.loads(line)
            except ValueError:
                raise model.UserError(f"{os.path.join(out, name)}:{number}: not JSON; delete the line or the file") from None
            if record["digest"] != digest:
                raise model.UserError(f"{out} holds records of another checkpoint or other settings; choose another --out")
            item = record["task"]["id"], record["budget"], record["tools"]
            if not (item in done and record["status"] == "engine_error"):
                done[item] = record
    return done


def grade(episode, think_prefix):
    """-> score in [0, 1] of one episode. think_prefix: its turns began with a forced <think>, which is not in their text."""
    if episode.status != "ok":
        return 0.0
    answer = rewards.answer_or_tail(episode.turns, think_prefix)
    task = episode.task
    return rewards.accuracy(answer, task["type"], task["answer"], task.get("options"), open_metric="exact")


def summarise(records):
    """Records of one (K, tools) -> dict of numbers; every record is in the denominator."""
    n = len(records)
    acc = sum(r["score"] for r in records) / n
    categories = sorted({r["task"].get("category") or r["task"]["type"] for r in records})
    groups = {c: [r["score"] for r in records if (r["task"].get("category") or r["task"]["type"]) == c] for c in categories}
    z = 1.96
    return {"n": n, "acc": acc, "acc_interval": z * math.sqrt(acc * (1 - acc) / n + z * z / (4 * n * n)) / (1 + z * z / n),
            "f_tau": sum(r["reward"]["fmt"] for r in records) / n,
            "kappa": sum(c["status"] == "ok" for r in records for c in r["calls"]) / n,
            "errors": {s: sum(r["status"] == s for r in records) for s in sorted({r["status"] for r in records}) if s != "ok"},
            "by_category": {c: {"n": len(v), "acc": sum(v) / len(v)} for c, v in groups.items()},
            "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n}


def table(summary):
    """Summary -> aligned text, one row per K and mode."""
    lines = [f"{'K':>6} {'tools':>5} {'n':>5} {'acc':>13} {'f_tau':>6} {'kappa':>6} {'errors':>6}"]
    for row in summary["results"]:
        lines.append(f"{row['K']!s:>6} {row['tools']:>5} {row['n']:>5} {row['acc']:>6.3f} ±{row['acc_interval']:.3f} {row['f_tau']:>6.3f} "
                     f"{row['kappa']:>6.2f} {sum(row['errors'].values()):>6}")
        for name, c in row["by_category"].items() if len(row["by_category"]) > 1 else []:
            lines.append(f"{'':>12} {c['n']:>5} {c['acc']:>6.3f}  {name}")
    return "\n".join(lines)


def compare(folders):
    """Finished evaluations -> (summary dict, text): one row per checkpoint and K, with tools and without side by side."""
    rows = []
    for folder in folders:
        try:
            with open(os.path.join(folder, "summary.json")) as f:
                summary = json.load(f)
        except (OSError, ValueError) as error:
            raise model.UserError(f"{folder}/summary.json: {error}; finish this evaluation first") from None
        for k in dict.fromkeys(r["K"] for r in summary["results"]):
            modes = {r["tools"]: r for r in summary["results"] if r["K"] == k}
            on, off = modes.get("on"), modes.get("off")
            row = {"name": os.path.basename(os.path.normpath(folder)), "K": k, "n": (on or off)["n"]}
            if on:
                row.update(acc_tools=on["acc"], f_tau=on["f_tau"], kappa=on["kappa"], interval=on["acc_interval"])
            if off:
                row.update(acc_no_tools=off["acc"])
            rows.append(row)

    def cell(value, width, digits):
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    lines = [f"{'checkpoint':<12} {'K':>6} {'n':>5} {'acc, tools':>16} {'acc, no tools':>14} {'f_tau':>6} {'kappa':>6}"]
    for r in rows:
        interval = f" ±{r['interval']:.3f}" if "interval" in r else ""
        lines.append(f"{r['name']:<12} {r['K']!s:>6} {r['n']:>5} {cell(r.get('acc_tools'), 9, 3)}{interval:>7} {cell(r.get('acc_no_tools'), 14, 3)} "
                     f"{cell(r.get('f_tau'), 6, 3)} {cell(r.get('kappa'), 6, 2)}")
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "rows": rows}, "\n".join(lines)


def main():
    args = parse_args()
    if args.compare:
        summary, text = compare(args.compare)
        model.make_out(args.out)
        model.write_atomic(os.path.join(args.out, "summary.json"), json.dumps(summary, indent=1))
        print(text)
        return
    tasks = rollout.read_tasks(args.data)[: args.limit or None]
    modes, args.tools = args.tools, True
    agent, source = rollout.agent_settings(args, args.data)
    ckpt = model.resolve_checkpoint(args.ckpt) if args.ckpt else None
    model.make_out(args.out)
    digest = settings_digest(args, ckpt)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    done = read_records(args.out, digest)
    if world > 1:
        import torch.distributed as dist

        model.start_process_group()
        dist.barrier()  # every rank has read the records before any appends to them
    from tqdm import tqdm

    done = {item for item, record in done.items() if record["status"] != "engine_error"}  # an endpoint that was down is asked again
    jobs = [(k, mode, [t for t in tasks if (t["id"], str(k), mode) not in done]) for k in args.frames for mode in modes]
    jobs, engine = [(k, mode, todo[rank::world]) for k, mode, todo in jobs], None
    if any(todo for _, _, todo in jobs):
        largest = max(64 if k == "gated" else k for k in args.frames)
        codec = model.load_codec(ckpt, args.channel) if ckpt else None
        if codec:
            rollout.check_context(codec, tasks, agent, source, largest)
        limits = argparse.Namespace(**{**vars(args), "frames": largest})
        if args.engine == "openai":
            engine = rollout.OpenAIEngine(args.base_url, args.model, args.api_key_env, prefill=args.think_prefix)
        else:
            engine = rollout.make_engine(args.engine, ckpt, codec, limits, args.seed, quiet=rank > 0)
        with open(os.path.join(args.out, f"records.rank{rank}.jsonl"), "a", encoding="utf-8") as f, \
                tqdm(total=sum(len(todo) for _, _, todo in jobs), desc="episodes", disable=None if rank == 0 else True) as bar:
            drop_torn_line(f.name)
            for k, mode, todo in jobs:
                for episode in rollout.run(engine, todo, replace(agent, tools=mode == "on"), codec, source, k, threads=args.decode_threads):
                    record = {**episode.to_json(), "digest": digest, "budget": str(k), "tools": mode, "score": grade(episode, args.think_prefix)}
                    f.write(json.dumps(record) + "\n")
                    f.flush()
                    bar.update()
    if world > 1:
        dist.barrier()
    if rank == 0:
        done = read_records(args.out, digest)
        results = []
        for k in args.frames:
            for mode in modes:
                records = [done[t["id"], str(k), mode] for t in tasks]
                results.append({"K": k, "tools": mode, **summarise(records)})
        args.tools = modes
        summary = {"checkpoint": args.ckpt or args.model, "data": args.data, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "results": results}
        model.write_atomic(os.path.join(args.out, "args.json"), json.dumps(vars(args), indent=1))
        model.write_atomic(os.path.join(args.out, "summary.json"), json.dumps(summary, indent=1))
        print(table(summary))
        print(json.dumps({"summary": os.path.join(args.out, "summary.json"), "acc": {f"{r['K']}/{r['tools']}": round(r["acc"], 4) for r in results}}))
    if engine:
        engine.close()
    if world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def drop_torn_line(path):
    """Cut an interrupted last line off, so that what is appended starts on a line of its own."""
    with open(path, "rb+") as f:
        data = f.read()
        f.truncate(data.rfind(b"\n") + 1)


if __name__ == "__main__":
    model.run_main(main)
