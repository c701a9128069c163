"""
draft.py (tests/test_draft.py): a model behind an OpenAI-compatible endpoint writes tasks about your
videos.

  windows   --questions for each video, one in each equal share of it, --seconds long: drawn first,
            so that the questions are spread over the video
  write     the model sees the frames of one window, each after its time, and writes a question
            with its answer. A question that names a time is left out
  check     the model answers the question (a) without the video, (b) from the window. A draft is
            kept if (a) is wrong and (b) is right (LongVT and Video-R1 filter in this way, too)

The check asks the model that wrote the question, so its mistakes stay. Look at the drafts
in OUT.html: it plays each window, and its button saves the tasks that you kept or corrected.

Reads:  videos: files, and folders that hold them or are folders of frames.
Writes: OUT.drafts.jsonl, all drafts and why they were left out, as they come: the same command goes
        on after a stop. At the end --out, the kept drafts as tasks with their windows as
        `evidence`, and OUT.html.

  python tools/draft.py VIDEOS --base-url http://127.0.0.1:8000/v1 --model M --out VIDEOS/t.jsonl
"""
import json
import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rollout
import video
from evaluation import answers
from evaluation.endpoint import ChatRequest, OpenAIEngine
from plumbing import data, judge
from tools import ask

WRITE = """These frames are one part of a longer video, each after its time. Write one question
for somebody who has the whole video. Only this part may answer it: not common sense, not the
question itself. Say which moment you mean by what happens there. Name no time, frame, clip or part.
Reply with one JSON object: {"question": "..", "options": ["..", "..", "..", ".."],
"answer": "the right option, word for word"}"""
BLIND = "You cannot see the video that this question is about. Give the likeliest answer."
WORKERS = 8  # requests at once
MAX_TOKENS = 2048  # of a reply with its thoughts
# A question that holds the place of its answer teaches nobody to look for it.
PLACE = re.compile(r"\d ?(?:s|sec|seconds?|min|minutes?)\b|\d:\d\d|\b(?:at|from|between|after) \d|"
                   r"\b(?:this|these|the (?:first|last|given|shown)) (?:frame|clip|part|image|"
                   r"window|segment)s?\b", re.IGNORECASE)

# ------------------------------------------------------------------------------------------------
# One draft


class LeftOut(Exception):
    """Why a draft is no task."""


def draw_window(name, number, args, duration):
    """-> [start, end] in seconds: a part of share `number` of the video."""
    share = duration / args.questions
    length = min(args.seconds, share)
    draw = random.Random(f"{name}/{number}").random()  # the same after a stop
    start = number * share + draw * (share - length)
    return [round(start, 2), min(round(start + length, 2), duration)]


def fill_task(task, reply):
    """Fills a task from the reply of the model that writes. Raises LeftOut."""
    try:
        written = launch.parse_json(re.search(r"\{.*\}", reply, re.DOTALL)[0])
        question, options = written["question"].strip(), data.bare_options(written["options"])
        right = options["ABCD".index(answers.extract_letter(str(written["answer"]), options))]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise LeftOut("not the JSON that was asked for") from None
    # Models put the right option first or second more often than not.
    random.Random(task["id"]).shuffle(options)
    task.update(question=question, options=options, answer="ABCD"[options.index(right)])
    if len(set(options)) != 4 or data.task_fault(task):
        raise LeftOut("not a question with four different options")
    if PLACE.search(question):
        raise LeftOut("names a time or a part")


def ask_model(engine, name, text, frames=()):
    """A text after the frames of a window -> the model's reply. Raises LeftOut, RunError."""
    content = [{"type": "video"} for _ in frames]
    content.append({"type": "text", "text": text})
    done = engine.wait_for(ChatRequest(name, [], [], [], frames, MAX_TOKENS, 0.0, 0,
                                       messages=[{"role": "user", "content": content}]))
    if done.error:
        raise LeftOut(done.error)
    return done.text.rpartition("</think>")[2].strip()


def draft_task(engine, source, args, name, number):
    """Writes and checks one task -> the row of OUT.drafts.jsonl. Raises RunError."""
    task = {"id": f"{name}/{number}", "video": name, "question": "", "options": None,
            "answer": None, "type": "mcq", "evidence": []}
    row = {"id": task["id"], "task": task, "left_out": None, "blind": None, "seen": None}

    def is_right(answer):
        return answers.score_answer(answers.answer_or_tail([answer]), task) >= 0.5

    try:
        start, end = draw_window(name, number, args, source.duration({"video": name}))
        task["evidence"] = [[start, end]]
        frames = source.load({"video": name, "start": start, "end": end, "fps": 1.0,
                              "max_frames": args.frames})
        fill_task(task, ask_model(engine, task["id"], WRITE, [frames]))
        question = rollout.question_text(task)
        row["blind"] = ask_model(engine, task["id"], BLIND + question)
        if is_right(row["blind"]):
            raise LeftOut("right without the video")
        row["seen"] = ask_model(engine, task["id"], question, [frames])
        if not is_right(row["seen"]):
            raise LeftOut("wrong with the window")
    except (LeftOut, video.VideoError) as error:
        row["left_out"] = str(error)
    return row


# ------------------------------------------------------------------------------------------------
# All drafts


def write_page(path, rows):
    """draft.html with the drafts in it. path: in the folder that videos are relative to."""
    with open(os.path.join(sys.path[0], "tools", "draft.html"), encoding="utf-8") as file:
        page = file.read()
    content = json.dumps(rows).replace("<", "\\u003c")  # never the end of the script
    launch.write_atomic(path, page.replace("/*DATA*/", content))


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("videos", nargs="+", metavar="VIDEOS", help="files, or folders that hold them")
    add("--base-url", required=True, type=judge.base_url, help="http://127.0.0.1:8000/v1, say")
    add("--model", required=True, help="name of the model at the endpoint; it has to see images")
    add("--api-key-env", help="environment variable that holds the key")
    add("--out", required=True, help="task JSONL to write, in a folder above the videos")
    add("--questions", type=launch.positive, default=4, help="drafts for each video")
    add("--seconds", type=launch.positive, default=10, help="of a window, at most")
    add("--frames", type=launch.positive, default=16, help="of a window, at most: one a second")
    args = parser.parse_args()
    if not args.out.endswith(".jsonl") or os.path.exists(args.out):
        raise launch.UserError(f"--out {args.out}: give a new file that ends in .jsonl")
    return args


def main():
    args = parse_args()
    root, stem = os.path.dirname(os.path.abspath(args.out)), args.out.removesuffix(".jsonl")
    names = [os.path.relpath(p, root) for path in args.videos for p in ask.videos_below(path)]
    if not names or any(name.startswith("..") for name in names):
        raise launch.UserError(f"{len(names)} videos; all have to lie below {root}: change --out")
    rows, drafts = [], f"{stem}.drafts.jsonl"
    if os.path.exists(drafts):
        rows = launch.read_jsonl(drafts, ("id", "task", "left_out"))
    engine = OpenAIEngine([args.base_url], args.model, args.api_key_env, WORKERS)
    engine.check_servers()
    source = video.VideoSource(root, video.FrameCache(2**28, WORKERS), 1024, 448 * 448)
    done = {row["id"] for row in rows}

    def work(draft):
        row = draft_task(engine, source, args, *draft)
        judge.append_row(drafts, row)
        print(f"{row['id']}: {row['left_out'] or 'kept'}", flush=True)
        return row

    todo = [(name, n) for name in sorted(set(names)) for n in range(args.questions)
            if f"{name}/{n}" not in done]
    with ThreadPoolExecutor(WORKERS) as pool:
        rows += pool.map(work, todo)
    engine.close()
    rows.sort(key=lambda row: row["id"])
    kept = [row["task"] for row in rows if not row["left_out"]]
    write_page(f"{stem}.html", rows)
    launch.write_atomic(args.out, "".join(json.dumps(task) + "\n" for task in kept))
    print(f"{len(rows)} drafts, {len(kept)} kept -> {args.out}; to correct: {stem}.html")


if __name__ == "__main__":
    launch.run_main(main)
