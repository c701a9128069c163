"""
replies.py: how often do three graders read a reply as it is meant? A fixed list of replies that we
made up, graded by ours, by lmms-eval's and by ParaVT's code.

Every reply of multiple choice is graded twice, once with the option it means as gold and once with
another one (a reply that names no option: with two golds). A grader agrees if it scores 1 in the
first case and 0 in the second. Spans agree if the score is the IoU of the span that is meant. If a
letter and a text contradict each other, the letter counts. The list has each form of reply once. A
model has its own share of each, so the table says nothing about any model's number.

Writes: --out, benchmark folders with records, as eval.py does: `eval.py --table OUT` reads them.

  python bench/replies.py --checkout LMMS_EVAL PARAVT --out replies_out
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from evaluation import benchmarks, folders, graders

ROOT = os.path.dirname(os.path.abspath(launch.__file__))
OPTIONS = ["a red cup", "a blue cup", "a green bowl", "a dog"]
# Reply -> the letter that it means, "" for none.
LETTERS = {
    "B": "B", "B.": "B", "(B)": "B", "b": "B", "b)": "B", "**B**": "B", "\\boxed{B}": "B",
    "B. a blue cup": "B", "B: a blue cup": "B", "The answer is B.": "B",
    "The correct answer is b.": "B", "Answer: B\nThe cup is blue.": "B", "a blue cup": "B",
    "A blue cup is shown.": "B", "It is the green bowl.": "C", "B. a green bowl": "B",
    "A man lifts the cup, so the answer is C.": "C", "It is not A; it is D.": "D",
    "Both A and B look right, but the best answer is D.": "D",
    "First I thought C. On a closer look, the answer is A.": "A",
    "<answer>B</answer>": "B", "<answer>b</answer>": "B", "<answer>A blue cup</answer>": "B",
    "<think>Option A is wrong.</think>C": "C",
    "<think>A red cup comes first, then B.</think>\n<answer>C</answer>": "C",
    "A or B, I cannot tell.": "", "I cannot answer this question.": "",
    "Because the light is dim, nothing can be seen.": "", "G": "", "": "",
}  # fmt: skip
# Reply -> whether it means the gold "depth-first search".
TEXTS = {
    "depth-first search": True, "Depth-First Search (DFS).": True, "DFS": True,
    "The algorithm is depth-first search, because it goes down first.": True,
    "<answer>depth-first search</answer>": True, "breadth-first search": False,
    "It is not depth-first search.": False, "search": False,
    "It is depth-first search or breadth-first search.": False, "I cannot tell.": False,
    "": False,
}  # fmt: skip
# Reply -> the span in seconds that it means. Gold: 2 to 8.
SPANS = {
    "2.0 - 8.0 seconds": (2, 8), "The event happens in the 2.0 - 8.0 seconds.": (2, 8),
    "<answer>2.0 to 8.0</answer>": (2, 8), "From 2 to 8 seconds.": (2, 8), "[2, 8]": (2, 8),
    "It starts at 2 seconds and ends at 8 seconds.": (2, 8), "00:02 - 00:08": (2, 8),
    "<time>00:02.0 - 00:08.0</time>": (2, 8), "Between second 4 and second 8.": (4, 8),
    "<think>At first 10 - 20 looks right.</think>\n<answer>2.0 - 8.0</answer>": (2, 8),
    "The video has 30.0 seconds. The event happens in the 2.0 - 8.0 seconds.": (2, 8),
    "12.0 - 18.0 seconds": (12, 18), "I cannot find the event.": None, "": None,
}  # fmt: skip


def cases(bench):
    """-> [(reply, gold, score that it deserves)]."""
    if bench == "charades":
        return [(text, [2.0, 8.0], iou(span)) for text, span in SPANS.items()]
    found = []
    for text, letter in LETTERS.items():
        golds = [letter, "ABCD"["ABCD".index(letter) - 1]] if letter else ["A", "B"]
        found += [(text, gold, float(gold == letter)) for gold in golds]
    if bench == "mmvu":
        found += [(text, "depth-first search", float(right)) for text, right in TEXTS.items()]
    return found


def iou(span, start=2, end=8):
    if span is None:
        return 0.0
    return max(0, min(span[1], end) - max(span[0], start)) / (max(span[1], end)
                                                              - min(span[0], start))


def row_of(bench, number, gold):
    """A row as the benchmark's publisher ships it."""
    question = "What is shown?"
    tags = {"duration": "short", "domain": "Knowledge", "sub_category": "Art", "task_type": "OCR"}
    choices = dict(zip("ABCDE", [*OPTIONS, "a spoon"]))
    rows = {
        "videomme": {"question_id": f"{number}", "videoID": f"v{number}", "question": question,
                     "options": [f"{label}. {text}" for label, text in zip("ABCD", OPTIONS)],
                     "answer": gold, **tags},
        "longvideobench": {"id": f"v{number}_0", "video_path": f"v{number}.mp4",
                           "question": question, "candidates": OPTIONS, "duration_group": 15,
                           "correct_choice": "ABCD".find(str(gold)), "question_category": "S2E"},
        "lvbench": {"key": f"v{number}", "type": "cartoon", "uid": f"{number}", "answer": gold,
                    "question": "\n".join([question, *(f"({label}) {text}" for label, text in
                                                       zip("ABCD", OPTIONS))]),
                    "question_type": ["entity recognition"]},
        "mlvu": {"video_name": f"v{number}.mp4", "question": question, "candidates": OPTIONS,
                 "answer": gold, "task_type": "count", "question_id": f"Q{number}"},
        "mmvu": {"id": f"validation_{number}", "video": f"videos/Art/{number}.mp4",
                 "question_type": "multiple-choice" if len(gold) == 1 else "open-ended",
                 "question": question, "answer": gold,
                 "choices": choices if len(gold) == 1 else dict.fromkeys("ABCDE", "")},
        "charades": {"video": f"v{number}.mp4", "caption": "a cup falls", "timestamp": gold},
    }
    return rows[bench]


def write_folder(bench, out):
    """Records of all cases in `out`/bench -> {task id: score that the reply deserves}."""
    leaf, files = os.path.join(out, bench), {"longvideobench": "lvb_val", "charades": "test-0",
            "lvbench": "video_info.meta", "mmvu": "validation"}  # fmt: skip
    published = os.path.join(leaf, "published")
    launch.make_out(published)
    given = cases(bench)
    rows = [row_of(bench, number, gold) for number, (_, gold, _) in enumerate(given)]
    path = os.path.join(published, files.get(bench, "test-0") + ".jsonl")
    folders.write_tasks(rows, path)
    tasks, _ = benchmarks.read_split(bench, published)
    records = [{"task": task, "sample": 0, "budget": "64", "tools": "off", "digest": "made up",
                "status": "ok", "turns": [text], "think_open": False, "finish": ["stop"],
                "calls": [], "reward": {"fmt": 0.0}, "timing": {}, "K": 64, "pieces": [],
                "group": task["id"]} for task, (text, *_) in zip(tasks, given)]
    for record in records:
        record.update(folders.grade(record))
    folders.write_tasks(records, os.path.join(leaf, "records.rank0.jsonl"))
    folders.write_tasks(tasks, os.path.join(leaf, "tasks.jsonl"))
    folders.write_json({"frames": [64], "tools": ["off"], "samples": 1, "protocol": "paravt",
                        "ckpt": "made up", "engine": "vllm"}, leaf, "args.json")
    return {task["id"]: score for task, (*_, score) in zip(tasks, given)}


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--checkout", nargs=2, required=True, metavar="DIR", help="of lmms-eval and of ParaVT")
    add("--out", default="replies_out", help="folder to write")
    args = parser.parse_args()
    names = [name for name in benchmarks.splits() if name != "videomme_wsub"]
    wanted = {bench: write_folder(bench, args.out) for bench in names}
    done = subprocess.run([sys.executable, os.path.join(ROOT, "eval.py"), "--rescore", args.out,
                           "--grader", "lmms-eval", "paper", "--checkout", *args.checkout])
    if done.returncode:
        raise launch.UserError("eval.py --rescore has failed, see above")
    table, wrong = [], {}
    for bench in names:
        leaf = os.path.join(args.out, bench)
        records = folders.read_records(leaf)
        scored = {"ours": records}
        scored |= {name: graders.regraded(leaf, records, name)[0] for name in graders.NAMES[1:]}
        # MMVU's open questions have a line of their own.
        for kind in dict.fromkeys(record["task"]["type"] for record in records.values()):
            some = [item for item, record in records.items() if record["task"]["type"] == kind]
            line = {"benchmark": f"{bench}, {kind}", "n": len(some)}
            for name, by in scored.items():
                missed = [by[item]["turns"][0] for item in some if by and graders.differ(
                    by[item]["score"], wanted[bench][item[0]])]
                line[name] = len(some) - len(missed) if by else None
                wrong[line["benchmark"], name] = list(dict.fromkeys(missed))
            table.append(line)
    print("\n| replies | n | ours | lmms-eval | paper |\n|---|---|---|---|---|")
    for line in table:
        print("| " + " | ".join("-" if cell is None else str(cell) for cell in line.values())
              + " |")
    for (name, grader), texts in wrong.items():
        print(f"{name}, {grader}: {json.dumps(texts)}")


if __name__ == "__main__":
    launch.run_main(main)
