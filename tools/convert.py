"""
convert.py: published training data (ParaVT-Parquet, LongVT-Parquet) -> the JSONL that sft.py and
grpo.py read.

Rows of `messages` become chats (SFT), rows of `prompt` become tasks (RL). Text stays as it is; what
cannot be used is left out, counted and named.

Reads:  parquet (needs pyarrow), JSON or JSONL.    Writes: --out, one JSONL.

  python tools/convert.py paravt_sft_tvg_6k3.parquet --out sft.jsonl
  python tools/convert.py paravt_rl_diverse_4k4.parquet --out rl.jsonl
"""
import json
import os
import re
import sys
from collections import Counter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rewards
import rollout
import sft
from evaluation import benchmarks


def relative(path):
    """A path of published data -> relative to the folder its archives are unpacked in. Raises
    ValueError for one that has no such part."""
    path = path.removeprefix("file://")
    if os.path.isabs(path):
        # Made absolute on the publisher's machine: what follows is the archive's own tree.
        at = [path.find(f"/{top}/") for top in ("longvt_source", "museg", "selfqa")]
        if max(at) < 0:
            raise ValueError("an absolute path outside the published folders")
        path = path[max(at) + 1:]
    return path


def decoded(value):
    """JSON text -> what it says; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return json.loads(value)
    return value


def video_paths(row):
    """The `videos` column: paths, or objects that hold one."""
    videos = decoded(row.get("videos")) or []
    return [relative(v["video"] if isinstance(v, dict) else v) for v in videos]


def in_place(text, paths, frames):
    """Text with <video> marks, iterator of paths -> content pieces, videos where the marks stood.
    Raises ValueError when paths run out."""
    pieces = []
    for number, part in enumerate(text.split("<video>")):
        if number:
            path = next(paths, None)
            if path is None:
                raise ValueError("more <video> marks than videos")
            pieces.append({"type": "video", "video": path, "frames": frames})
        if part:
            pieces.append({"type": "text", "text": part})
    return pieces


def content_pieces(message, paths, frames):
    """Content of a published message -> our pieces. Raises ValueError with the reason why not."""
    content = message.get("content")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    pieces = []
    for piece in given:
        kind = piece.get("type")
        if kind == "text" and message["role"] == "user":
            pieces += in_place(piece.get("text") or "", paths, frames)
        elif kind == "text":
            pieces.append({"type": "text", "text": piece.get("text") or ""})
        elif kind in ("video", "video_url"):
            path = piece.get("video") or (piece.get("video_url") or {}).get("url")
            if not path:
                raise ValueError("a video without a path")
            pieces.append({"type": "video", "video": relative(path), "frames": frames})
        elif kind in ("image", "image_url"):
            raise ValueError("still images are not read")
        else:
            raise ValueError(f"content of type {kind}")
    return pieces


def our_messages(message, pieces):
    """One published message -> ours: tool results in a user turn become tool messages."""
    text = "".join(p.get("text", "") for p in pieces)
    response = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
    # The template writes the same tokens, and text of users is never let through as tags.
    if message["role"] in ("user", "tool") and response.search(text):
        if not response.sub("", text).strip():
            return [{"role": "tool", "content": found} for found in response.findall(text)]
    only_text = all(p["type"] == "text" for p in pieces)
    return [{"role": message["role"], "content": text if only_text else pieces}]


def to_chat(row, frames):
    """A published SFT row -> {"messages", "tools"?}. Raises ValueError with the reason why not.

    A system text that declares tools stays and is the only declaration; else ours is put, with the
    schema.
    """
    given = decoded(row["messages"])
    paths = iter(video_paths(row))
    messages = []
    videos = 0
    for message in given if isinstance(given, list) else []:
        pieces = content_pieces(message, paths, frames)
        videos += sum(p["type"] == "video" for p in pieces)
        messages += our_messages(message, pieces)
    left = list(paths)
    first = next((m for m in messages if m["role"] == "user"), None)
    if first and videos == 0 and len(left) == 1:  # no mark anywhere: the one video goes first
        seen = {"type": "video", "video": left.pop(), "frames": frames}
        first["content"] = [seen, {"type": "text", "text": first["content"]}]
    if left:
        raise ValueError("more videos than <video> marks")
    head = messages[0] if messages else {"role": None}
    declared = head["role"] == "system" and "<tools>" in head["content"]
    if not declared:
        spoken = [m for m in messages if m["role"] != "system"]
        messages = [{"role": "system", "content": rollout.main_prompt()}, *spoken]
    problem = sft.chat_fault(messages)
    if problem:
        raise ValueError(problem)
    return {"messages": messages, **({} if declared else {"tools": rollout.tool_schema()})}


def to_task(row):
    """A published RL row -> a task of grpo.py's JSONL. Raises ValueError with the reason."""
    extra = decoded(row.get("extra_info")) or {}
    reward = decoded(row.get("reward_model")) or {}
    answer = extra.get("answer")
    answer = decoded(reward.get("ground_truth") if answer is None else answer)
    paths = video_paths(row)
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} videos, one is wanted")
    if answer in (None, ""):
        raise ValueError("no answer")
    spoken = [m["content"] for m in decoded(row["prompt"]) if m["role"] == "user"]
    asked = (extra.get("question") or "\n".join(spoken)).replace("<video>", "")
    where = r" ?The video path for this video is:? \S+"  # our agent needs no path
    asked = re.sub(where, "", asked, flags=re.IGNORECASE).strip()
    question, options = benchmarks.split_inline(asked)
    kind = {"mcq": "mcq", "oe": "open", "tvg": "grounding"}.get(extra.get("question_type"))
    span = span_of(answer, kind)
    letter = benchmarks.answer_letter(answer, options) if options else ""
    if kind is None:
        kind = "grounding" if span is not None else "mcq" if letter else "open"
    task = {"video": paths[0], "question": asked, "options": None, "answer": str(answer),
            "type": kind}
    if kind == "grounding":
        span = [rewards.to_seconds(t) for t in span or []]
        if len(span) != 2 or None in span or not span[0] < span[1]:
            raise ValueError("the answer is no [start, end]")
        task["answer"] = span
    if kind == "mcq":
        if not options:
            raise ValueError("a choice whose options cannot be read")
        if not letter:
            raise ValueError("the answer is none of the options")
        task.update(question=question, options=options, answer=letter)
    return task


def span_of(answer, kind):
    """[start, end] of a published answer: a list, a nested one, {"start", "end"}, or, where the row
    says it is one, a text."""
    if isinstance(answer, dict):
        answer = [answer.get("start"), answer.get("end")]
    if not isinstance(answer, list):
        return rewards.extract_span(str(answer)) if kind == "grounding" else None
    return answer[0] if len(answer) == 1 and isinstance(answer[0], list) else answer


def convert(paths, out, frames):
    """Published files -> one JSONL. Says how many rows were left out, and why."""
    rows = []
    rejected = Counter()
    kinds = set()
    for path in paths:
        name = os.path.splitext(os.path.basename(path))[0]
        for number, row in enumerate(benchmarks.read_rows(path)):
            kind = next((k for k in ("messages", "prompt") if row.get(k)), None)
            if kind is None:
                raise launch.UserError(f"{path}: row {number} has neither 'messages' (SFT) nor "
                                      f"'prompt' (RL); found {', '.join(sorted(row))}")
            kinds.add(kind)
            try:
                made = to_chat(row, frames) if kind == "messages" else to_task(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                # Published rows are data: a bad one is left out and named.
                malformed = f"malformed ({type(error).__name__})"
                rejected[str(error) if type(error) is ValueError else malformed] += 1
                continue
            source = row.get("id") or row.get("data_source") or name
            rows.append({"id": f"{name}/{number}", "source": source, **made})
    if len(kinds) > 1:
        raise launch.UserError("some files hold chats (SFT), some tasks (RL); convert them apart")
    for why, count in rejected.most_common():
        print(f"left out: {count} rows, {why}")
    if not rows:
        raise launch.UserError("no row could be used")
    launch.write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    what = "chats" if kinds == {"messages"} else "tasks"
    print(f"{out}: {len(rows)} {what}, {sum(rejected.values())} left out")


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="parquet, JSON or JSONL")
    parser.add_argument("--out", required=True, help="JSONL to write")
    parser.add_argument("--frames", type=int, default=64, help="overview frames K of chats")
    args = parser.parse_args()
    if not args.out.endswith(".jsonl"):
        raise launch.UserError(f"--out {args.out} should end in .jsonl")
    launch.at_least(1, args, "frames")
    convert(args.files, args.out, args.frames)


if __name__ == "__main__":
    launch.run_main(main)
