"""
pick.py (tests/test_pick.py): turns rollouts back into data: the best rollout of each prompt as SFT
chats, and the tasks whose rollouts disagree.

  python tools/pick.py r.jsonl --best chats.jsonl --band 0.2 0.8 tasks.jsonl

--best writes for each prompt (a task at one K) the rollout of the highest total reward that ended
well, has an R_acc of at least --least and no turn that was cut off. A tie goes to fewer calls, then
to fewer tokens. The main agent's context is one chat, and every sub-agent whose summary the main
agent read is another, as sft.py reads them. If the policy writes text in the canonical tokens,
sft.py trains on the ids that were sampled. R_tool, and R_fmt a little, pay for calls, needed or
not.

The records of eval.py are read too, which hold text and no ids: a published model or a stronger one
behind an endpoint then teaches the cold start. --recall leaves out rollouts that looked elsewhere
(of tasks with `evidence`), --per-video bounds the prompts that one video gives.

--band LOW HIGH FILE writes the tasks whose mean R_acc over their rollouts lies in this range. From
a group without variance GRPO learns nothing.

Reads:  rollout JSONL (rollout.py, or the rollouts/ of grpo.py), or records.*.jsonl of eval.py.
Writes: chats and tasks as JSONL. Videos stay relative to the folder that they were
        relative to: give that folder to sft.py and grpo.py as --video-root.

(This file is not called select.py, because Python would then import it for its own `select`.)
"""
import argparse
import collections
import json
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import launch
import rewards
import rollout
from agent_tools import TOOLS
from evaluation import results
from plumbing import arguments, data, runs

# ------------------------------------------------------------------------------------------------
# Rollout JSONL that somebody may have edited, merged or written by another program


CONTEXT = ("ids", "mask", "logps", "vision")  # fields of a record that texts alone lack


def read_rollouts(paths: list[str]) -> list[dict]:
    """Rollout JSONL files -> rows that belong together. Raises UserError naming the file, and the
    line or the task."""
    rows, tasks, prompts = {}, {}, {}
    for path in paths:
        for row in launch.read_jsonl(path, (*rollout.RECORD_FIELDS, *CONTEXT, "K"), record_fault):
            name, key = str(row["task"]["id"]), (row["group"], row["sample"])
            prompt = row["ids"][: row["spans"][0][0]] if row["spans"] else None
            why = ("is another task elsewhere" if tasks.setdefault(name, row["task"]) != row["task"]
                   else f"has sample {row['sample']} of {row['group']} twice" if key in rows
                   else "has two prompts in one group"
                   if prompt and prompts.setdefault(row["group"], prompt) != prompt else None)
            if why:
                raise launch.UserError(f"{path}: task {name} {why}; leave out a file, or give "
                                   "the tasks ids of their own")
            rows[key] = row
    return list(rows.values())


def record_fault(row: dict) -> str | None:
    """-> None, or what is wrong with a line of a rollout JSONL that has all fields."""
    try:
        return task_fault(row) or context_fault(row)
    except (TypeError, KeyError, ValueError, AttributeError) as error:  # of another kind or form
        return f"not as rollout.py writes it ({type(error).__name__}: {error})"


def task_fault(row: dict) -> str | None:
    """-> None, or what is wrong with the task and the status of a record."""
    task, statuses = row["task"], ("ok", "video_error", "label_error", "context", "engine_error")
    if task.get("answer", "") is not None and (  # null: a question that somebody asked
            problem := data.task_fault({"answer": None, **task})):
        return f"'task': {problem}"
    return None if row["status"] in statuses else f"'status': {row['status']!r} is unknown"


def context_fault(row: dict) -> str | None:
    """-> None, or what does not fit together in the contexts of a record."""
    parts = [row, *(call["sub"] for call in row["calls"] if call.get("sub"))]
    for item in (chat.VisionItem(**fields) for part in parts for fields in part["vision"]):
        if min(item.frames, item.height, item.width) < 1 or len(item.seconds) != item.frames:
            return "'vision' must list the frames of the context"
    # The mask marks the sampled ids: of the main agent those of its spans, which follow a prompt.
    marks, ends = [0] * len(row["ids"]), [0, *sum(row["spans"], [])]
    for start, end in zip(ends[1::2], ends[2::2]):
        marks[start:end] = [1] * (end - start)
    fits = (all(len(p["ids"]) == len(p["mask"]) == len(p["logps"]) and {0, 1}.issuperset(p["mask"])
                and min(p["ids"], default=0) >= 0 and math.isfinite(sum(p["logps"]))
                for p in parts)
            and all(part["vision"] for part in parts[1:])  # a sub-agent always saw a window
            and row["mask"] == marks and ends == sorted(ends) and 0 not in ends[1:2]
            and all(len(span) == 2 for span in row["spans"])
            and len(row["spans"]) <= len(row["turns"]) == len(row["finish"]))
    return None if fits else "'ids', 'mask', 'logps', 'spans', 'turns' and 'finish' do not fit"


# ------------------------------------------------------------------------------------------------
# Rollouts -> data


def read_evaluation(folder: str) -> list[dict]:
    """Folder of eval.py -> its records of real frames as rows of rollout.py, but without ids.
    Raises UserError naming the folder, and the task of a record that cannot be used."""
    blank = {**{name: [] for name in CONTEXT}, "spans": [], "struct": [], "advantage": {},
             "policy_step": 0, "subtitles": ""}
    required = [name for name in (*rollout.RECORD_FIELDS, "K") if name not in blank]
    settings = results.read_json(folder, "args.json")
    if settings.get("protocol", "paravt") != "paravt":
        raise launch.UserError(f"{folder}: not of --protocol paravt, which alone sft.py trains on")
    windows = {"crop_response": settings.get("crop_response", "summary")}
    for row in (rows := results.read_records(folder).values()):
        missing = ", ".join(f"missing {name!r}" for name in required if name not in row)
        if why := missing or data.task_fault({"answer": None, **row["task"]}, unlabelled=True):
            raise launch.UserError(f"{folder}: record of task {row['task']['id']}: {why}")
    return [{**blank, **row, "windows": windows} for row in rows
            if row.get("show") == "real" and row["K"]]  # without frames nothing can be learned


def read_groups(paths: list[str]) -> list[list]:
    """Rollout JSONL files, or records of eval.py -> Episodes, those of one task together, in the
    order of their tasks. Raises UserError naming file and line, and for a task without an answer.
    """
    records = [path for path in paths if os.path.basename(path).startswith("records.")]
    rows = read_rollouts([path for path in paths if path not in records])
    # All files of a folder, since an item that was asked again may stand in two of them.
    folders = dict.fromkeys(os.path.dirname(os.path.abspath(path)) for path in records)
    by_task, tasks = {}, {}  # task id -> Episodes, task
    for row in [*rows, *(row for folder in folders for row in read_evaluation(folder))]:
        if row["task"].get("answer") is None:
            raise launch.UserError(f"task {row['task']['id']} has no answer, so no rollout of it "
                                   "can be called good")
        name = str(row["task"]["id"])
        if tasks.setdefault(name, row["task"]) != row["task"]:  # of two evaluations, say
            raise launch.UserError(f"task {name} is another task elsewhere; leave out a file, or "
                                   "give the tasks ids of their own")
        by_task.setdefault(name, []).append(rollout.from_dict(row))
        by_task[name][-1].notes.update(tools=row.get("tools", "on") == "on",
                                       settings=row.get("windows"))
    for group in by_task.values():
        for episode in group:  # by the present code, whatever version wrote them
            verdict = episode.reward.get("judge")  # but for a judge, who is not asked again
            known = verdict if isinstance(verdict, bool) else None
            episode.reward = {**rewards.score(episode.turns, episode.task, episode.calls,
                                               episode.think_open, verdict=known), "judge": verdict}
    return list(by_task.values())


def rollout_fault(e, min_acc: float = 0.5, recall: float = 0.0) -> str | None:
    """-> None, or why a rollout is nothing to learn from. recall: see --recall."""
    share = (e.reward.get("windows") or {}).get("recall")  # None: no evidence to compare with
    return ("not ok" if e.status != "ok" else "cut off" if "length" in e.finish
            else "not judged" if runs.unjudged(e.reward) else "wrong" if e.reward["acc"] < min_acc
            else "looked elsewhere" if share is not None and e.calls and share < recall else None)


def best_of(group: list, min_acc: float = 0.5, recall: float = 0.0):
    """Rollouts of one task -> the one to learn from, or None."""
    def worth(e):
        length = sum(e.context.mask) if e.context else len("".join(e.turns))
        return e.reward["total"], -len(e.calls), -length

    return max((e for e in group if not rollout_fault(e, min_acc, recall)), default=None, key=worth)


def chats_of(episode, tools: bool = True, crop_response: str = "summary") -> list[dict]:
    """An Episode -> SFT chats: one of the main agent, one of each sub-agent that was run. tools,
    crop_response: as in the rollouts, because a record of rollout.py does not hold
    them."""
    task, prefix = episode.task, "<think>\n" if episode.think_open else ""
    tools = tools and episode.notes.get("tools", True)
    settings = episode.notes.get("settings") or {}
    response = settings.get("crop_response", crop_response)
    messages = rollout.main_messages(task, episode.num_frames, tools, episode.subtitles, response)
    windows = iter(episode.context.items[1:] if episode.context else ())
    name = launch.join_key(episode.policy_step, task["id"], episode.sample)
    rows = [{"id": name, "messages": messages}]
    if tools:
        rows[0]["tools"] = rollout.tool_schema(response)
    for turn, text in enumerate(episode.turns):
        messages.append({"role": "assistant", "content": prefix + text})
        for number, call in enumerate(c for c in episode.calls if c["turn"] == turn):
            content = call["summary"]
            if call["status"] == "ok":
                # The window as it was shown. Records of eval.py do not hold the frames.
                if settings:
                    # The window is clamped already.
                    spec = TOOLS[call["name"]].spec(call, task, float("inf"))
                else:
                    spec = call["sub"]["vision"][0]["spec"] if "sub" in call else next(windows).spec
                spec = {key: value for key, value in spec.items() if value is not None}
                if response == "frames":
                    content = [{"type": "video", **spec}]
            if turn + 1 < len(episode.turns):  # calls of the last turn were never answered
                messages.append({"role": "tool", "content": content})
            if call["status"] == "ok" and response == "summary":
                reply = {"role": "assistant", "content": call["summary"]}
                rows.append({"id": f"{name}/{turn}/{number}",
                             "messages": [*rollout.sub_messages(task, spec), reply]})
    return rows


def mean_accuracy(group: list) -> float:
    """Mean R_acc of a group, without rollouts that machine or judge failed; NaN: none is left."""
    accs = [e.reward["acc"] for e in group
            if not runs.is_retried({"status": e.status, "reward": e.reward})]
    return sum(accs) / len(accs) if accs else float("nan")


def write_rows(path: str, rows: list[dict]) -> None:
    launch.write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("rollouts", nargs="+", metavar="JSONL", help="rollouts")
    add("--best", metavar="CHATS", help="SFT chats to write; default: none are written")
    add("--least", type=float, default=0.5, help="R_acc that the best rollout needs, 0 to 1")
    add("--recall", type=float, default=0.0, help="share of a task's `evidence` that the windows "
        "of a rollout with calls must show, 0 to 1; 0 = any windows")
    add("--per-video", type=int, default=0, help="prompts of one video, at most; 0 = all")
    yes_no = argparse.BooleanOptionalAction
    add("--tools", action=yes_no, default=True, help="crop_video was offered, as in rollout.py")
    add("--crop-response", choices=["summary", "frames"], default="summary", help="as rollout.py")
    add("--band", nargs=3, metavar=("LOW", "HIGH", "TASKS"), help="tasks to write, and the range "
        "of their mean R_acc; default: none are written")
    args = parser.parse_args()
    if not (args.best or args.band):
        raise launch.UserError("give --best, --band or both: nothing would be written")
    if not (0 <= args.least <= 1 and 0 <= args.recall <= 1 and args.per_video >= 0):
        raise launch.UserError("--least and --recall lie within 0 and 1; --per-video is 0 or more")
    outputs = [args.best] * bool(args.best)
    if args.band:
        try:
            low, high = float(args.band[0]), float(args.band[1])
        except ValueError:
            raise launch.UserError(f"--band {args.band[0]} {args.band[1]}: no numbers") from None
        if not 0 <= low <= high <= 1:
            raise launch.UserError(f"--band {low:g} {high:g}: expected 0 <= LOW <= HIGH <= 1")
        outputs.append(args.band[2])
    arguments.check_outputs(outputs, args.rollouts)
    grouped = read_groups(args.rollouts)
    if args.best:
        prompts = collections.defaultdict(list)  # (task, K) -> Episodes
        for episode in (e for group in grouped for e in group):
            prompts[episode.task["id"], episode.num_frames].append(episode)
        picked, taken = [], collections.Counter()  # taken: prompts of each video
        for group in prompts.values():
            one = best_of(group, args.least, args.recall)
            if one and not (args.per_video and taken[one.task["video"]] == args.per_video):
                picked.append(one)
                taken[one.task["video"]] += 1
        counts = collections.Counter(rollout_fault(e, args.least, args.recall) or "good"
                                     for group in prompts.values() for e in group)
        rows = [row for episode in picked
                for row in chats_of(episode, args.tools, args.crop_response)]
        write_rows(args.best, rows)
        print(f"{len(picked)} of {len(prompts)} prompts have a good rollout: {len(rows)} chats, "
              f"{len(picked)} of main agents -> {args.best}")
        print("rollouts: " + ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items())))
    if args.band:
        tasks = [group[0].task for group in grouped if low <= mean_accuracy(group) <= high]
        write_rows(args.band[2], tasks)
        print(f"{len(tasks)} of {len(grouped)} tasks have a mean R_acc of {low:g} to {high:g} (of "
              f"{sum(map(math.isnan, map(mean_accuracy, grouped)))} none ran) -> {args.band[2]}")


if __name__ == "__main__":
    launch.run_main(main)
