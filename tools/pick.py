"""
pick.py (tests/test_pick.py): turns rollouts back into data: the best rollout of each prompt as SFT
chats, and the tasks whose rollouts disagree.

  python tools/pick.py r.jsonl --best chats.jsonl --band 0.2 0.8 tasks.jsonl

--best writes for each prompt (a task at one K) the rollout of the highest reward that ended well
and is right. A tie goes to fewer calls. The main agent's context is one chat, and every sub-agent
whose summary it read is another, as sft.py reads them. The records of eval.py are read too: a
stronger model behind an endpoint then teaches the cold start.

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
import sys
from dataclasses import fields, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rollout
from agent_tools import TOOLS


def agent_of(path):
    """A JSONL of rollouts -> the AgentConfig of its run; the defaults if there is no args.json."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    names = [field.name for field in fields(rollout.AgentConfig)]
    own = path.removesuffix(".jsonl") + ".args.json"  # of rollout.py
    for args_path in (own, f"{folder}/args.json", f"{folder}/../args.json"):
        if os.path.exists(args_path):
            with open(args_path, encoding="utf-8") as file:
                saved = json.load(file)
            saved = saved.get("args", saved)
            return rollout.AgentConfig(**{name: saved[name] for name in names if name in saved})
    return rollout.AgentConfig()


def read_groups(paths):
    """JSONL files -> {(task id, K): records}, each with the AgentConfig of its run as "agent"."""
    groups = {}
    for path in paths:
        agent = agent_of(path)
        for row in launch.read_jsonl(path, ("task", "turns", "calls", "reward", "K", "sample")):
            offered = row.get("tools", "on" if agent.tools else "off") == "on"
            row["agent"] = replace(agent, tools=offered)
            groups.setdefault((str(row["task"]["id"]), row["K"]), []).append(row)
    return groups


def is_good(row, least=0.5):
    """Whether there is something to learn from a rollout."""
    return (row["status"] == "ok" and "length" not in row["finish"]
            and row["reward"].get("acc", 0.0) >= least)


def best_of(group, least=0.5):
    """Records of one prompt -> the one to learn from, or None."""
    good = [row for row in group if is_good(row, least)]
    return max(good, key=lambda row: (row["reward"]["total"], -len(row["calls"])), default=None)


def chats_of(row):
    """A record -> SFT chats: one of the main agent, one of each sub-agent that was run."""
    task, agent, subs = row["task"], row["agent"], []
    prefix = "<think>\n" if row["think_open"] else ""
    messages = rollout.main_messages(
        task, row["K"], agent.tools, row.get("subtitles", ""), agent.crop_response)
    for turn, text in enumerate(row["turns"]):
        messages.append({"role": "assistant", "content": prefix + text})
        for call in row["calls"]:
            if call["turn"] != turn or turn + 1 == len(row["turns"]):
                continue  # calls of the last turn were never answered
            content = call["summary"]
            if call["status"] == "ok":
                # The window of a record is clamped already.
                window = TOOLS[call["name"]].spec(call, task, float("inf"))
                window = {key: value for key, value in window.items() if value is not None}
                if agent.crop_response == "frames":
                    content = [{"type": "video", **window}]
                else:
                    asked = rollout.sub_messages(task, window)
                    subs.append([*asked, {"role": "assistant", "content": content}])
            messages.append({"role": "tool", "content": content})
    name = f"{row['group']}/{row['sample']}"
    chats = [{"id": name, "messages": messages}]
    if agent.tools:
        chats[0]["tools"] = rollout.tool_schema(agent.crop_response)
    return chats + [{"id": f"{name}/{n}", "messages": sub} for n, sub in enumerate(subs)]


def write_rows(path, rows):
    launch.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("rollouts", nargs="+", metavar="JSONL", help="rollouts")
    add("--best", metavar="CHATS", help="SFT chats to write")
    add("--least", type=float, default=0.5, help="R_acc that the best rollout needs, 0 to 1")
    add("--band", nargs=3, metavar=("LOW", "HIGH", "TASKS"),
        help="tasks to write, and the range of their mean R_acc")
    args = parser.parse_args()
    if not (args.best or args.band):
        raise launch.UserError("give --best, --band or both: nothing would be written")
    groups = read_groups(args.rollouts)
    if args.best:
        best = [best_of(group, args.least) for group in groups.values()]
        best = [row for row in best if row is not None]
        chats = [chat for row in best for chat in chats_of(row)]
        write_rows(args.best, chats)
        print(f"{args.best}: {len(best)} of {len(groups)} prompts have a good rollout: "
              f"{len(chats)} chats, {len(best)} of main agents")
    if args.band:
        low, high, path = float(args.band[0]), float(args.band[1]), args.band[2]
        tasks, accs = {}, {}
        for (name, _), group in groups.items():
            tasks[name] = group[0]["task"]
            accs.setdefault(name, []).extend(row["reward"].get("acc", 0.0) for row in group)
        taken = [task for name, task in tasks.items()
                 if low <= sum(accs[name]) / len(accs[name]) <= high]
        write_rows(path, taken)
        print(f"{path}: {len(taken)} of {len(tasks)} tasks")


if __name__ == "__main__":
    launch.run_main(main)
