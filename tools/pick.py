"""
pick.py: turns rollouts back into data: the best rollout of each prompt as SFT chats, and the tasks
whose rollouts disagree.

  python tools/pick.py r.jsonl --best chats.jsonl --band 0.2 0.8 tasks.jsonl

--best writes for each prompt (a task at one K) the rollout of the highest total reward that ended
well, has an R_acc of at least --least and no turn that was cut off. A tie goes to fewer calls, then
to fewer tokens. The main agent's context is one chat, and every sub-agent whose summary the main
agent read is another, as sft.py reads them. If the policy writes text in the canonical tokens,
sft.py trains on the ids that were sampled. R_tool, and R_fmt a little, pay for calls, needed or
not. --fewest-calls ranks by R_acc, then by whether all tags are whole, then by fewer calls: the
chats then call if calling helped.

The records of eval.py are read too, which hold text and no ids: a published model or a stronger one
behind an endpoint then teaches the cold start. --recall leaves out rollouts that looked elsewhere
(of tasks with `evidence`), --per-video bounds the prompts that one film gives.

--kept FILE writes all rollouts that were read, each with "picked": "kept" or why not, and
tools/view.py FILE shows them.

--band LOW HIGH FILE writes the tasks whose mean R_acc over their rollouts lies in this range. From
a group without variance GRPO learns nothing.

Reads:  rollout JSONL (rollout.py, or the rollouts/ of grpo.py), or records.*.jsonl of eval.py.
Writes: chats, tasks and rollouts as JSONL. Videos stay relative to the folder that they were
        relative to: give that folder to sft.py and grpo.py as --video-root.

(This file is not called select.py, because Python would then import it for its own `select`.)
"""
import argparse
import collections
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import launch
import rewards
import rollout
import runs
from evaluation import folders
from tools import records


def read_evaluation(path: str) -> list[dict]:
    """Records of eval.py of real frames -> rows as rollout.py writes them, but without ids. Raises
    UserError naming file and line."""
    blank = {"ids": [], "mask": [], "logps": [], "vision": [], "spans": [], "advantage": {},
             "version": 0}  # fmt: skip
    shape = {name: kind for name, kind in records.record_shape().items() if name not in blank}
    rows = launch.read_jsonl(path, shape, lambda row: records.misfit(row, shape) or data.task_fault(
        {"answer": None, **row["task"]}, unlabelled=True))
    kept = folders.read_json(os.path.dirname(os.path.abspath(path)), "args.json")
    if kept.get("protocol", "paravt") != "paravt" or kept.get("crop_reply") == "frames":
        raise launch.UserError(f"{path}: not of --protocol paravt with summaries, whose turns "
                               "alone sft.py can train on")
    # Fields of rollout.Agent.
    windows = {name: kept[name] for name in ("sub_fps", "sub_frames", "sub_question")
               if name in kept}
    return [{**blank, **row, "windows": windows, "record": row} for row in rows
            if row.get("show") == "real" and row["K"]]  # without frames nothing can be learned


def groups(paths: list[str]) -> list[list]:
    """Rollout JSONL files, or records of eval.py -> Episodes, those of one task together, in the
    order of their tasks. Raises UserError naming file and line, and for a task without an answer.
    """
    text = [path for path in paths if os.path.basename(path).startswith("records.")]
    rows = records.read_rollouts([path for path in paths if path not in text])
    found, tasks = {}, {}  # task id -> Episodes, task
    for row in [*rows, *(row for path in text for row in read_evaluation(path))]:
        if row["task"].get("answer") is None:
            raise launch.UserError(f"task {row['task']['id']} has no answer, so no rollout of it "
                                   "can be called good")
        name = str(row["task"]["id"])
        if tasks.setdefault(name, row["task"]) != row["task"]:  # of two evaluations, say
            raise launch.UserError(f"task {name} is another task elsewhere; leave out a file, or "
                                   "give the tasks ids of their own")
        found.setdefault(name, []).append(rollout.from_json(row))
        found[name][-1].notes.update(tools=row.get("tools", "on") == "on",
                                     settings=row.get("windows"), record=row.get("record", row))
    for group in found.values():
        for episode in group:  # by the present code, whatever version wrote them
            verdict = episode.reward.get("judge")  # but for a judge, who is not asked again
            episode.reward = rollout.compute_reward(
                episode, verdict=verdict if isinstance(verdict, bool) else None)
    return list(found.values())


def fault(e, least: float = 0.5, recall: float = 0.0) -> str | None:
    """-> None, or why a rollout is nothing to learn from. recall: see --recall."""
    seen = (e.reward.get("windows") or {}).get("recall")  # None: no evidence to compare with
    return ("not ok" if e.status != "ok" else "cut off" if "length" in e.finish
            else "wrong" if e.reward["acc"] < least
            else "looked elsewhere" if seen is not None and e.calls and seen < recall else None)


def best(group: list, least: float = 0.5, fewest_calls: bool = False, recall: float = 0.0):
    """Rollouts of one task -> the one to learn from, or None. fewest_calls: no reward for
    calling counts."""
    good = [e for e in group if not fault(e, least, recall)]

    def worth(e):
        paid = (e.reward["total"],)
        if fewest_calls:
            whole = rewards.format_reward(e.turns, e.think_open)["well_formed"]
            paid = (e.reward["acc"], whole)
        length = sum(e.context.mask) if e.context else len("".join(e.turns))
        return *paid, -len(e.calls), -length

    return max(good, default=None, key=worth)


def chats(episode, tools: bool = True, sub_question: bool = True) -> list[dict]:
    """An Episode -> SFT chats: one of the main agent, one of each sub-agent that was run.
    tools, sub_question: as in the rollouts, because a record of rollout.py does not hold them."""
    task, prefix = episode.task, "<think>\n" if episode.think_open else ""
    tools = tools and episode.notes.get("tools", True)
    sub_question &= (episode.notes.get("settings") or {}).get("sub_question", True)
    messages = rollout.main_messages(task, episode.num_frames, tools, episode.spoken)
    name = launch.name_of(episode.version, task["id"], episode.sample)
    rows = [{"id": name, "messages": messages}]
    if tools:
        rows[0]["tools"] = rollout.tool_schema()
    for turn, text in enumerate(episode.turns):
        messages.append({"role": "assistant", "content": prefix + text})
        for number, call in enumerate(c for c in episode.calls if c["turn"] == turn):
            if turn + 1 < len(episode.turns):  # calls of the last turn were never answered
                messages.append({"role": "tool", "content": call["summary"]})
            if call["status"] == "ok":
                # The window as it was shown. Records of eval.py do not hold the frames.
                spec = (call["sub"]["vision"][0]["spec"] if "sub" in call else rollout.window_spec(
                    argparse.Namespace(**call), task, rollout.Agent(**episode.notes["settings"])))
                spec = {key: value for key, value in spec.items() if value is not None}
                said = {"role": "assistant", "content": call["summary"]}
                rows.append({"id": f"{name}/{turn}/{number}",
                             "messages": [*rollout.sub_messages(task, spec, sub_question), said]})
    return rows


def mean_accuracy(group: list) -> float:
    """Mean R_acc of a group. Failed rollouts count as 0."""
    return sum(e.reward["acc"] for e in group) / len(group)


def write(path: str, rows: list[dict]) -> None:
    launch.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("rollouts", nargs="+", metavar="JSONL", help="rollouts")
    add("--best", metavar="CHATS", help="SFT chats to write; default: none are written")
    add("--least", type=float, default=0.5, help="R_acc that the best rollout needs, 0 to 1")
    add("--recall", type=float, default=0.0, help="share of a task's `evidence` that the windows "
        "of a rollout with calls must show, 0 to 1; 0 = any windows")
    add("--per-video", type=int, default=0, help="prompts of one film, at most; 0 = all")
    add("--kept", metavar="ROLLOUTS", help="the rollouts again, with what became of them, for "
        "tools/view.py; default: none are written")
    add("--fewest-calls", action="store_true",
        help="rank by R_acc, whole tags, fewer calls; default: by the reward, which pays calls")
    yes_no = argparse.BooleanOptionalAction
    add("--tools", action=yes_no, default=True, help="crop_video was offered, as in rollout.py")
    add("--sub-question", action=yes_no, default=True,
        help="sub-agents were told the question, as by --set sub_question")
    add("--band", nargs=3, metavar=("LOW", "HIGH", "TASKS"), help="tasks to write, and the range "
        "of their mean R_acc; default: none are written")
    args = parser.parse_args()
    if not (args.best or args.band):
        raise launch.UserError("give --best, --band or both: nothing would be written")
    if args.kept and not args.best:
        raise launch.UserError("--kept says what --best made of each rollout: give both")
    if not (0 <= args.least <= 1 and 0 <= args.recall <= 1 and args.per_video >= 0):
        raise launch.UserError("--least and --recall lie within 0 and 1, and --per-video is 0 or "
                               "more")
    outputs = [path for path in (args.best, args.kept) if path]
    if args.band:
        try:
            low, high = float(args.band[0]), float(args.band[1])
        except ValueError:
            raise launch.UserError(f"--band {args.band[0]} {args.band[1]}: two numbers come "
                                   "first") from None
        if not 0 <= low <= high <= 1:
            raise launch.UserError(f"--band {low:g} {high:g}: expected 0 <= LOW <= HIGH <= 1")
        outputs.append(args.band[2])
    runs.keep_inputs(outputs, args.rollouts)
    found = groups(args.rollouts)
    if args.best:
        prompts = collections.defaultdict(list)  # (task, K) -> Episodes
        for episode in (e for group in found for e in group):
            prompts[episode.task["id"], episode.num_frames].append(episode)
        picked, told = [], []  # told: the rows of --kept
        left, taken = collections.Counter(), collections.Counter()  # taken: prompts of each film
        for group in prompts.values():
            one, why = best(group, args.least, args.fewest_calls, args.recall), "another was better"
            if one and args.per_video and taken[one.task["video"]] == args.per_video:
                one, why = None, "enough of this film"
            if one:
                picked.append(one)
                taken[one.task["video"]] += 1
            for e in group:
                wrong = fault(e, args.least, args.recall)
                left[wrong or "good"] += 1
                told.append({**e.notes["record"],
                             "picked": "kept" if e is one else wrong or why})
        rows = [row for episode in picked
                for row in chats(episode, args.tools, args.sub_question)]
        write(args.best, rows)
        print(f"{len(picked)} of {len(prompts)} prompts have a good rollout: {len(rows)} chats, "
              f"{len(picked)} of main agents -> {args.best}")
        print("rollouts: " + ", ".join(f"{n} {why}" for why, n in sorted(left.items())))
        if args.kept:
            write(args.kept, told)
    if args.band:
        tasks = [group[0].task for group in found if low <= mean_accuracy(group) <= high]
        write(args.band[2], tasks)
        print(f"{len(tasks)} of {len(found)} tasks have a mean R_acc of {low:g} to {high:g} "
              f"-> {args.band[2]}")


if __name__ == "__main__":
    launch.run_main(main)
