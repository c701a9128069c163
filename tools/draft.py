"""
draft.py (tests/slow/test_draft.py): a model behind an OpenAI-compatible endpoint writes tasks about
your videos.

  windows   --questions for each video, one in each equal share of it, 10 seconds long: drawn
            first, so that the questions are spread over the video
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

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
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
WINDOW_SECONDS = 10
MAX_FRAMES = 16  # of a window, one a second: what an agent sees of it
# A question that holds the place of its answer teaches nobody to look for it.
PLACE = re.compile(r"\d ?(?:s|sec|seconds?|min|minutes?)\b|\d:\d\d|\b(?:at|from|between|after) \d|"
                   r"\b(?:this|these|the (?:first|last|given|shown)) (?:frame|clip|part|image|"
                   r"window|segment)s?\b", re.IGNORECASE)

# ------------------------------------------------------------------------------------------------
# One draft


class LeftOut(Exception):
    """Why a draft is no task."""


def draw_window(draft_id, number, num_questions, duration):
    """-> [start, end] in seconds: a part of share `number` of the video."""
    share = duration / num_questions
    length = min(WINDOW_SECONDS, share)
    # The same after a stop.
    start = number * share + random.Random(draft_id).uniform(0, share - length)
    return [round(start, 2), round(start + length, 2)]


def fill_task(task, reply):
    """Fills a task from the reply of the model that writes. Raises LeftOut."""
    try:
        written = launch.parse_json(re.search(r"\{.*\}", reply, re.DOTALL)[0])
        question, options = written["question"].strip(), data.bare_options(written["options"])
        letter = answers.extract_letter(str(written["answer"]), options)
        right = options["ABCD".index(letter)]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise LeftOut("not the JSON that was asked for") from None
    # Models put the right option first or second more often than not.
    random.Random(task["id"]).shuffle(options)
    task.update(question=question, options=options, answer="ABCD"[options.index(right)])
    if len(set(options)) != 4 or data.task_fault(task):
        raise LeftOut("not a question with four different options")
    if PLACE.search(question):
        raise LeftOut("names a time or a part")


def ask_model(engine, draft_id, text, frames=()):
    """A text after the frames of a window -> the model's reply. Raises LeftOut, RunError."""
    content = [{"type": "video"} for _ in frames]
    content.append({"type": "text", "text": text})
    completion = engine.wait_for(ChatRequest(
        draft_id, [], [], [], frames, MAX_TOKENS, 0.0, 0,
        messages=[{"role": "user", "content": content}]))
    if completion.error:
        raise LeftOut(completion.error)
    return completion.text.rpartition("</think>")[2].strip()


def is_right(reply, task):
    return answers.score_answer(answers.answer_or_tail([reply]), task) == 1


def draft_task(engine, source, args, draft_id, name, number):
    """Writes and checks one task about the video `name` -> the row of OUT.drafts.jsonl. Raises
    RunError."""
    task = {"id": draft_id, "video": name, "question": "", "options": None, "answer": None,
            "type": "mcq", "evidence": []}
    row = {"id": draft_id, "task": task, "left_out": None, "blind": None, "seen": None}
    try:
        start, end = draw_window(draft_id, number, args.questions, source.duration({"video": name}))
        task["evidence"] = [[start, end]]
        frames = source.load({"video": name, "start": start, "end": end, "fps": 1.0,
                              "max_frames": MAX_FRAMES})
        fill_task(task, ask_model(engine, draft_id, WRITE, [frames]))
        question = rollout.question_text(task)
        row["blind"] = ask_model(engine, draft_id, BLIND + question)
        if is_right(row["blind"], task):
            raise LeftOut("right without the video")
        row["seen"] = ask_model(engine, draft_id, question, [frames])
        if not is_right(row["seen"], task):
            raise LeftOut("wrong with the window")
    except (LeftOut, video.VideoError) as error:
        row["left_out"] = str(error)
    return row


# ------------------------------------------------------------------------------------------------
# All drafts


def draft_all(args, root, drafts):
    """Drafts what the file `drafts` does not hold yet, and appends it there -> all rows. root:
    folder that the names of videos are relative to."""
    rows, todo = [], {}  # todo: id of a draft -> name of the video, number of the window
    if os.path.exists(drafts):
        rows = launch.read_jsonl(drafts, ("id", "task"))
    for path in args.videos:
        for file in ask.videos_below(path):
            name = os.path.relpath(file, root)
            for number in range(args.questions):
                todo[f"{name}/{number}"] = name, number
    for row in rows:
        todo.pop(row["id"], None)
    engine = OpenAIEngine([args.base_url], args.model, args.api_key_env, WORKERS)
    engine.check_servers()
    source = video.VideoSource(root, video.FrameCache(2**28, WORKERS), 1024, 448 * 448)

    def work(draft_id):
        row = draft_task(engine, source, args, draft_id, *todo[draft_id])
        judge.append_row(drafts, row)
        print(f"{draft_id}: {row['left_out'] or 'kept'}", flush=True)
        return row

    with ThreadPoolExecutor(WORKERS) as pool:
        rows += pool.map(work, todo)
    engine.close()
    return sorted(rows, key=lambda row: row["id"])


def write_page(path, rows):
    """draft.html with the drafts in it. path: in the folder that videos are relative to."""
    with open(__file__.removesuffix("py") + "html", encoding="utf-8") as file:
        page = file.read()
    content = json.dumps(rows).replace("<", "\\u003c")  # never the end of the script
    launch.write_atomic(path, page.replace("/*DATA*/", content))


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("videos", nargs="+", metavar="VIDEOS", help="files, or folders that hold them")
    add("--base-url", required=True, type=judge.base_url, help="http://127.0.0.1:8000/v1, say")
    add("--model", required=True, help="name of the model at the endpoint; it has to see images")
    add("--api-key-env", help="environment variable that holds the key")
    add("--out", required=True, help="task JSONL to write, in a folder above the videos")
    add("--questions", type=launch.positive, default=4, help="drafts for each video")
    args = parser.parse_args()
    if not args.out.endswith(".jsonl") or os.path.exists(args.out):
        raise launch.UserError(f"--out {args.out}: give a new file that ends in .jsonl")
    stem = args.out.removesuffix(".jsonl")
    rows = draft_all(args, os.path.dirname(os.path.abspath(args.out)), f"{stem}.drafts.jsonl")
    tasks = [row["task"] for row in rows if not row["left_out"]]
    write_page(f"{stem}.html", rows)
    launch.write_jsonl(args.out, tasks)
    print(f"{len(rows)} drafts, {len(tasks)} kept -> {args.out}; to correct: {stem}.html")


if __name__ == "__main__":
    launch.run_main(main)
