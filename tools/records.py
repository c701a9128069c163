"""
records.py: reads rollout JSONL that somebody may have edited, merged or written by another program.

A line is refused, and named, if a field is missing or of another type, if ids, mask, log-probs and
spans do not fit each other, or if it does not belong to the others: a rollout that is there twice,
an id that stands for two tasks, a group with two prompts.

  python tools/records.py r.jsonl ..      says what is wrong, or how many rollouts there are

Reads:  rollout JSONL. Writes nothing. Used by pick.py and replay.py.
"""
import math
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import launch


def read_rollouts(paths: list[str]) -> list[dict]:
    """Rollout JSONL files -> rows that belong together. Raises UserError naming the file, and the
    line or the task."""
    rows, tasks, prompts = {}, {}, {}
    for path in paths:
        for row in launch.read_jsonl(path, record_shape(), record_fault):
            name, place = str(row["task"]["id"]), (row["group"], row["sample"])
            prompt = row["ids"][: row["spans"][0][0]] if row["spans"] else None
            wrong = (
                "is another task elsewhere" if tasks.setdefault(name, row["task"]) != row["task"]
                else f"has sample {row['sample']} of {row['group']} twice" if place in rows
                else "has two prompts in one group"
                if prompt and prompts.setdefault(row["group"], prompt) != prompt else None)
            if wrong:
                raise launch.UserError(f"{path}: task {name} {wrong}; leave out a file, or give "
                                       "the tasks ids of their own")
            rows[place] = row
    return list(rows.values())


def record_shape() -> dict:
    """Fields of a rollout record and their shapes, see misfit."""
    item = {"spec": {"video": str}, "key": str, "frames": int, "height": int, "width": int,
            "seconds": [float]}
    context = {"ids": [int], "mask": [int], "logps": [float], "vision": [item]}
    call = {"turn": int, "parseable": bool, "status": str, "summary": str, "sub_tokens": int,
            "sub": (None, context)}
    return {"task": {"id": (str, int), "video": str, "question": str, "type": str}, "group": str,
            "sample": int, "version": int, "K": int, "status": str, "error": (None, str),
            "think_open": bool, "turns": [str], "pieces": [[str]], "finish": [str],
            "spans": [[int]], "calls": [call], "reward": dict, "advantage": dict, "timing": dict,
            **context}


def record_fault(row: dict) -> str | None:
    """-> None, or what is wrong with a line of a rollout JSONL that has all fields."""
    if wrong := misfit(row, record_shape()):
        return f"{wrong} is missing, or not of the kind that rollout.py writes"
    task, known = row["task"], ("ok", "video_error", "label_error", "context", "engine_error")
    if task.get("answer", "") is not None and (  # null: a question that somebody asked
            wrong := data.task_fault({"answer": None, **task})):
        return f"'task': {wrong}"
    if row["status"] not in known:
        return f"'status': {row['status']!r} is unknown"
    parts = [row, *(call["sub"] for call in row["calls"] if call.get("sub"))]
    for item in (item for part in parts for item in part["vision"]):
        sizes = item["frames"], item["height"], item["width"]
        if len(item) != 6 or min(sizes) < 1 or len(item["seconds"]) != sizes[0]:
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
    return None if fits else ("'ids', 'mask', 'logps', 'spans', 'turns' and 'finish' do not fit "
                              "each other")


def misfit(value, shape, name: str = "record") -> str | None:
    """-> None, or where a JSON value has another shape: "record.task.id", say. shape: a type, None,
    [shape of all items], {key: shape}, or a tuple of shapes of which one fits."""
    if isinstance(shape, tuple):
        return name if all(misfit(value, one, name) for one in shape) else None
    if isinstance(shape, list) and isinstance(value, list):
        if all(kind is shape[0] for kind in set(map(type, value))):  # 30,000 ids, at once
            return None
        return next(filter(None, (misfit(part, shape[0], name) for part in value)), None)
    if isinstance(shape, dict) and isinstance(value, dict):
        parts = (misfit(value.get(key), one, f"{name}.{key}") for key, one in shape.items())
        return next(filter(None, parts), None)
    # Not isinstance: True is an int. A whole number is a float in JSON.
    good = value is shape or type(value) is shape or (shape is float and type(value) is int)
    return None if good else name


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("rollouts", nargs="+", metavar="JSONL", help="rollouts")
    rows = read_rollouts(parser.parse_args().rollouts)
    print(f"no fault in {len(rows)} rollouts")


if __name__ == "__main__":
    launch.run_main(main)
