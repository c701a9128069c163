"""
pick.py (tests/slow/test_pick.py): turns rollouts back into data: the best rollout of each prompt as
SFT chats, and the tasks whose rollouts disagree.

  python tools/pick.py r.jsonl --best chats.jsonl --band 0.2 0.8 tasks.jsonl

--best writes for each prompt (a task at one K) the most accurate rollout that ended well, if it is
at least half right. A tie goes to the higher reward, then to fewer calls. The main agent's context
is one chat, and every sub-agent whose summary it read is another, as sft.py reads them. The records
of eval.py are read too: a stronger model behind an endpoint then teaches the cold start.

--band LOW HIGH FILE writes the tasks whose mean R_acc lies in this range. From a group without
variance GRPO learns nothing.

Reads:  rollout JSONL (rollout.py, or the rollouts/ of grpo.py), or records.*.jsonl of eval.py; the
        settings in the args.json beside it.
Writes: chats and tasks as JSONL. Videos stay relative to the folder that they were relative to:
        give that folder to sft.py and grpo.py as --video-root.

(This file is not called select.py, because Python would then import it for its own `select`.)
"""
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import launch
import rollout
from agent_tools import TOOLS


def crop_response_of(path):
    """A JSONL of rollouts -> --crop-response of its run, from the args.json beside it."""
    stem = os.path.abspath(path).removesuffix(".jsonl")
    folder = os.path.dirname(stem)
    # Of rollout.py, of eval.py, of grpo.py.
    for args_path in (f"{stem}.args.json", f"{folder}/args.json", f"{folder}/../args.json"):
        if os.path.exists(args_path):
            with open(args_path, encoding="utf-8") as file:
                return json.load(file)["crop_response"]
    return "summary"


def read_groups(paths):
    """JSONL files -> {(task id, K): records}, each with the "crop_response" of its run."""
    groups = {}
    for path in paths:
        crop_response = crop_response_of(path)
        for row in launch.read_jsonl(path, ("task", "turns", "calls", "reward", "K", "sample")):
            row["crop_response"] = crop_response
            groups.setdefault((str(row["task"]["id"]), row["K"]), []).append(row)
    return groups


def accuracy_of(row):
    return row["reward"].get("acc", 0.0)  # a rollout of ask.py has no reward


def best_of(group):
    """Records of one prompt -> the one to learn from, or None."""
    candidates = []
    for row in group:
        if row["status"] == "ok" and "length" not in row["finish"] and accuracy_of(row) >= 0.5:
            candidates.append(row)
    return max(candidates, default=None, key=lambda row: (
        accuracy_of(row), row["reward"]["total"], -len(row["calls"])))


def chats_of(row):
    """A record -> SFT chats: one of the main agent, one of each sub-agent that was run."""
    task, crop_response, subs = row["task"], row["crop_response"], []
    tools = row.get("tools", "on") == "on"  # eval.py asks without them, too
    prefix = "<think>\n" if row["think_open"] else ""
    messages = rollout.main_messages(task, row["K"], tools, row.get("subtitles", ""), crop_response)
    for turn, text in enumerate(row["turns"]):
        messages.append({"role": "assistant", "content": prefix + text})
        for call in row["calls"]:
            if call["turn"] != turn or turn + 1 == len(row["turns"]):
                continue  # calls of the last turn were never answered
            content = call["summary"]
            if call["status"] == "ok":
                # The window of a record is clamped already.
                spec = TOOLS[call["name"]].spec(call, task, float("inf"))
                window = {name: value for name, value in spec.items() if value is not None}
                if crop_response == "frames":
                    content = [{"type": "video", **window}]
                else:
                    prompt = rollout.sub_messages(task, window)
                    subs.append([*prompt, {"role": "assistant", "content": content}])
            messages.append({"role": "tool", "content": content})
    name = f"{row['group']}/{row['sample']}"
    chats = [{"id": name, "messages": messages}]
    if tools:
        chats[0]["tools"] = rollout.tool_schema(crop_response)
    for number, sub in enumerate(subs):
        chats.append({"id": f"{name}/{number}", "messages": sub})
    return chats


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("rollouts", nargs="+", metavar="JSONL", help="rollouts")
    add("--best", metavar="CHATS", help="SFT chats to write")
    add("--band", nargs=3, metavar=("LOW", "HIGH", "TASKS"),
        help="tasks to write, and the range of their mean R_acc")
    args = parser.parse_args()
    groups = read_groups(args.rollouts)
    if args.best:
        chats = []
        best = list(filter(None, map(best_of, groups.values())))
        for row in best:
            chats += chats_of(row)
        launch.write_jsonl(args.best, chats)
        print(f"{args.best}: {len(best)} of {len(groups)} prompts have a good rollout: "
              f"{len(chats)} chats, {len(best)} of main agents")
    if args.band:
        rows_by_task = {}  # over all K
        for (task_id, _), group in groups.items():
            rows_by_task.setdefault(task_id, []).extend(group)
        low, high, path = args.band
        tasks = []
        for rows in rows_by_task.values():
            if float(low) <= statistics.fmean(map(accuracy_of, rows)) <= float(high):
                tasks.append(rows[0]["task"])
        launch.write_jsonl(path, tasks)
        print(f"{path}: {len(tasks)} of {len(rows_by_task)} tasks")


if __name__ == "__main__":
    launch.run_main(main)
