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
Writes: --out, one task a line, with its window as `evidence`. A task is added once it is checked,
        and no line is changed or removed, so --out may be corrected by hand at any time.
        Beside it OUT.drafts.jsonl, all drafts and why they were left out: the same command goes on
        after a stop. OUT.html at the end.

  python tools/draft.py VIDEOS --base-url http://127.0.0.1:8000/v1 --model M --out VIDEOS/t.jsonl
"""
import json
import os
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
import rollout
import video
from evaluation import answers
from evaluation.endpoint import ChatRequest, OpenAIEngine
from plumbing import arguments, data, judge, runs
from tools import ask

WRITE = """These frames are one part of a longer video, each after its time. Write one question
for somebody who has the whole video. Only this part may answer it: not common sense, not the
question itself. Say which moment you mean by what happens there. Name no time, frame, clip or part.
Reply with one JSON object: {{"question": "..", "options": {0}}}"""
FORMS = {"mcq": '["..", "..", "..", ".."], "answer": "the right option, word for word"',
         "open": 'null, "answer": "one to three words"'}
BLIND = "You cannot see the video that this question is about. Give the likeliest answer."
# A question that holds the place of its answer teaches nobody to look for it.
PLACE = re.compile(r"\d ?(?:s|sec|seconds?|min|minutes?)\b|\d:\d\d|\b(?:at|from|between|after) \d|"
                   r"\b(?:this|these|the (?:first|last|given|shown)) (?:frame|clip|part|image|"
                   r"window|segment)s?\b", re.IGNORECASE)


class Unanswered(Exception):
    """The endpoint sent no answer. The next start tries this draft again."""


def draw_window(name, number, args, duration):
    """-> [start, end] in seconds: a part of share `number` of the video."""
    share = duration / args.questions
    length = min(args.seconds, share)
    start = number * share + (share - length) * (
        launch.stable_hash("window", args.seed, name, number) / 2**64)
    return [round(start, 2), min(round(start + length, 2), duration)]


def fill_task(reply, task):
    """Fills a task from the reply of the model that writes -> None, or why it is no task."""
    try:
        written = launch.parse_json(re.search(r"\{.*\}", reply, re.DOTALL)[0])
        question, answer = written["question"].strip(), str(written["answer"]).strip()
        options = written["options"] if task["type"] == "mcq" else None
        if options:
            options = data.bare_options(options)
            answer = options["ABCD".index(answers.extract_letter(answer, options))]
            # Models put the right option first or second more often than not.
            random.Random(task["id"]).shuffle(options)
            answer = "ABCD"[options.index(answer)]
    except (ValueError, TypeError, LookupError, AttributeError):
        return "not the JSON that was asked for"
    task.update(question=question, options=options, answer=answer)
    if options and not len(set(options)) == len(options) == 4:
        return "not four different options"
    if data.task_fault(task):
        return "an answer that earns no reward"
    return "names a time or a part" if PLACE.search(question) else None


def draft_task(engine, source, args, name, number):
    """Writes and checks one task -> the row of OUT.drafts.jsonl. Raises VideoError, Unanswered."""
    window = draw_window(name, number, args, source.duration({"video": name}))
    frames = source.load({"video": name, "start": window[0], "end": window[1], "fps": 1.0,
                          "max_frames": args.frames})
    task = {"id": f"{name}/{number}", "video": name, "question": "", "options": None,
            "answer": None, "type": args.types[number % len(args.types)], "evidence": [window]}

    def reply(text, frames=()):
        content = [*[{"type": "video"} for _ in frames], {"type": "text", "text": text}]
        done = engine.wait_for(ChatRequest(
            task["id"], [], [], [], list(frames), args.max_new_tokens, 0.0, args.seed,
            messages=[{"role": "user", "content": content}]))
        if not (text := done.text.rpartition("</think>")[2].strip()):
            raise Unanswered(done.error or "the answer was empty")
        return text

    def is_right(answer):
        answer = answers.answer_or_tail([answer])
        return answers.score_answer(answer, task) >= 0.5

    left_out = fill_task(reply(WRITE.format(FORMS[task["type"]]), [frames]), task)
    blind = in_window = None
    if not left_out:
        blind = reply(BLIND + rollout.question_text(task))
        left_out = "right without the video" if is_right(blind) else None
    if not left_out:
        in_window = reply(rollout.question_text(task), [frames])
        left_out = None if is_right(in_window) else "wrong with the window"
    return {"id": task["id"], "task": task, "left_out": left_out, "blind": blind, "seen": in_window}


def write_page(path, root, rows):
    """draft.html with the drafts in it. root: folder of the videos."""
    with open(f"{os.path.splitext(os.path.abspath(__file__))[0]}.html", encoding="utf-8") as f:
        page = f.read()
    root = os.path.relpath(root, os.path.dirname(os.path.abspath(path)))
    content = json.dumps({"root": root, "rows": sorted(rows, key=lambda row: row["id"])})
    launch.write_atomic(path, page.replace("/*DATA*/", content.replace("<", "\\u003c")))


def main():
    from tqdm import tqdm

    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("videos", nargs="+", metavar="VIDEOS", help="files, or folders that hold them")
    add("--base-url", required=True, type=judge.base_url, help="http://127.0.0.1:8000/v1, say")
    add("--model", required=True, help="name of the model at the endpoint; it has to see images")
    add("--api-key-env", help="environment variable that holds the key")
    add("--out", required=True, help="task JSONL to write")
    add("--video-root", help="folder that videos are relative to; default: that of --out")
    add("--questions", type=int, default=4, help="drafts for each video")
    add("--types", nargs="+", choices=FORMS, default=["mcq"], help="of the tasks, in turn")
    add("--seconds", type=float, default=10.0, help="of a window, at most")
    add("--frames", type=int, default=16, help="of a window, at most: one a second")
    add("--max-pixels", type=int, default=448 * 448, help="of a frame")
    add("--max-new-tokens", type=int, default=2048, help="of a reply, thoughts included")
    add("--workers", type=int, default=8, help="requests at once")
    add("--seed", type=int, default=0, help="of the windows and of the endpoint")
    args = parser.parse_args()
    arguments.require_min(1, args, "questions", "seconds", "frames", "max_pixels", "workers")
    stem, root = args.out.removesuffix(".jsonl"), video.root_of(args, args.out)
    names = [os.path.relpath(p, root) for path in args.videos for p in ask.videos_below(path)]
    if not args.out.endswith(".jsonl") or not names:
        raise launch.UserError("no video there" if not names else "--out should end in .jsonl")
    if any(name.startswith("..") for name in names):
        raise launch.UserError(f"the videos have to lie below {root}: change --out or --video-root")
    launch.make_out(folder := os.path.dirname(os.path.abspath(args.out)))
    # Two processes would write each draft twice.
    launch.lock(folder, f".{os.path.basename(args.out)}.lock")
    drafts, rows = f"{stem}.drafts.jsonl", []
    if launch.is_file(drafts):
        rows = launch.read_jsonl(drafts, ("id", "task", "left_out", "settings"), faults=[])
    elif launch.is_file(args.out):
        raise launch.UserError(f"--out {args.out} exists and is not of this tool; choose another")
    settings = {name: value for name, value in vars(args).items() if name in (
        "model", "questions", "types", "seconds", "frames", "max_pixels", "seed")}
    if rows and (changed := runs.settings_diff(args, {}, {"args": rows[0]["settings"]})):
        raise launch.UserError(f"{drafts} is of {', '.join(changed)}; choose another --out")
    engine = OpenAIEngine([args.base_url], args.model, args.api_key_env, workers=args.workers)
    engine.check_servers()
    cache = video.FrameCache(2**28, args.workers)
    source = video.VideoSource(root, cache, 1024, args.max_pixels)
    done, failed = {row["id"] for row in rows}, []
    # A kill between the two appends below leaves a task without its draft.
    kept = launch.is_file(args.out) and launch.read_jsonl(args.out, ("id",), faults=["torn lines"])
    kept = {row["id"] for row in kept or ()}

    def work(number):
        try:
            row = draft_task(engine, source, args, *number)
        except (video.VideoError, Unanswered) as error:
            failed.append(str(error))
            return
        if not row["left_out"] and row["id"] not in kept:
            judge.append_row(args.out, row["task"])
        rows.append({**row, "settings": settings})
        judge.append_row(drafts, {**row, "settings": settings})

    todo = [(name, n) for name in dict.fromkeys(names) for n in range(args.questions)
            if f"{name}/{n}" not in done]
    with ThreadPoolExecutor(args.workers) as pool:
        list(tqdm(pool.map(work, todo), "drafts", len(todo), disable=None))
    engine.close()
    write_page(f"{stem}.html", root, rows)
    counts = Counter(row["left_out"] for row in rows)
    print(f"{len(rows)} drafts, {counts.pop(None, 0)} kept -> {args.out}; to correct: {stem}.html")
    print("left out: " + (", ".join(f"{n} {text}" for text, n in counts.most_common()) or "none"))
    if failed:
        raise launch.RunError(f"{len(failed)} drafts could not be made; most often: "
                              f"{max(failed, key=failed.count)}. The same command tries them again")


if __name__ == "__main__":
    launch.run_main(main)
