"""
eval.py: benchmarks and task JSONL through the same agent loop as training, greedy, into records, scores and tables.

  score     = [letter == gold] | [text matches gold] | temporal IoU       of the final answer; a broken video, a full context or a
                                                                          failed request scores 0 and stays in the denominator
  headline  = mean over items | MLVU: mean of its seven tasks' means | MMVU: multiple choice alone | Charades-STA: mean IoU
  interval  = 2.5 and 97.5 percentiles of the headline over 2000 draws of VIDEOS with replacement
  pass@n    = mean over tasks of the best of its n samples
  f_tau     = mean R_fmt          kappa = executed crop_video calls per episode          both as in training (rewards.py)

The answer is the last <answer> block, or, where there is none, the text after the thought: an evaluation asks what the model said,
training (rewards.py) pays only for the tag. What is extracted never depends on the gold answer.

A protocol (--protocol) is how a system is spoken to: its prompt, its calls, what comes back, when it must answer; ParaVT's own by
default. A protocol's native frames, lengths and rounds are its defaults; --protocol-set paper takes the paper's uniform ones.

Departs from the authors' evaluation: benchmarks are read as their publishers ship them (theirs misreads MLVU's letters and MMVU's open
questions), sub-agents answer calls as in training (--crop-reply frames: the frames themselves, as theirs), errors are never graded as text.

Reads:  --ckpt (or an OpenAI-compatible endpoint), --data or --bench with --root.
Writes: --out[/bench]/records.*.jsonl (one episode a line, appended as they finish: run again to go on), tasks.jsonl, args.json,
        judge.jsonl; --out/summary.json

CPU toy:  torchrun --nproc_per_node 2 eval.py --preset toy --ckpt grpo_out --data toy/eval.jsonl --frames 4 16 64 --tools on off --out eval_out
1 GPU:    python eval.py --ckpt grpo_out --bench videomme --root Video-MME --out eval_out
8 GPUs:   torchrun --nproc_per_node 8 eval.py --ckpt grpo_out --bench mlvu lvbench --root DATA --out eval_out
Endpoint: python eval.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M --protocol longvt --bench mmvu --root MMVU --out eval_out
"""
import argparse
import ast
import glob
import hashlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import replace

import model
import rewards
import rollout
import video


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ckpt", default=None, help="checkpoint folder; not needed with --engine openai")
    add("--data", default=None, help="task JSONL")
    add("--bench", nargs="+", choices=list(splits()), default=[], help="benchmarks, read from --root as their publishers ship them; several: one table")
    add("--root", nargs="+", default=[], metavar="DIR", help="a folder per benchmark; or one that holds a folder of each name")
    add("--prepare", default=None, metavar="JSONL", help="no evaluation: write the benchmark's tasks to this file (videos relative to --root)")
    add("--compare", nargs="+", default=None, metavar="DIR", help="no evaluation: one table from the summaries of these finished --out folders")
    add("--table", nargs="+", default=None, metavar="DIR", help="no evaluation: Markdown of these finished --bench folders, the paper's figures beside")
    add("--rescore", nargs="+", default=None, metavar="DIR", help="no model: grade the records of a finished folder again; several are merged into --out")
    add("--protocol", choices=list(protocols()), default="paravt", help="how the system is spoken to; its own frames, lengths and rounds become the defaults")
    add("--protocol-set", choices=["native", "paper"], default="native", help="paper: the paper's uniform frames, lengths and rounds instead")
    add("--prompt-file", nargs="+", default=[], metavar="FILE[.py:NAME]", help="the publisher's own prompt texts (README); default: our wording of the same")
    add("--crop-reply", choices=["summary", "frames"], default="summary", help="paravt: a sub-agent's summary, or the frames of the window themselves")
    add("--stamps", action=argparse.BooleanOptionalAction, default=True, help="a frame's time before it; protocols with stamps of their own keep them")
    add("--force-answer", action=argparse.BooleanOptionalAction, default=False, help="paravt: demand the answer in few tokens after the last round of calls")
    add("--out", default="eval_out", help="folder of records and summary; an earlier run of the same settings is continued")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths that suit the world of toy.py")
    add("--frames", type=rollout.frames_argument, nargs="+", default=[64], help="overview frames K, one evaluation each; 'gated' draws K per task")
    add("--limit", type=int, default=0, help="tasks; 0 = all")
    add("--live", type=int, default=0, help="episodes at once; 0 = twice --max-seqs; 1 measures the seconds of an episode that has the engine to itself")
    add("--samples", type=int, default=1, help="episodes per task: mean and pass@n; above 1 needs --temperature")
    add("--shard", type=shard_argument, default=(0, 1), metavar="I/N", help="every Nth task from the Ith on; --rescore merges")
    add("--allow-errors", action="store_true", help="print a headline even where more than 1%% of the items failed")
    add("--judge-url", default=None, help="chat endpoint that is asked about open answers the rule calls wrong; default: no judge")
    add("--judge-model", default=None, help="name of the judge; with --rescore and without --judge-url its earlier verdicts count")
    add("--judge-key-env", default=None, help="environment variable that holds the judge's key")
    add("--engine", choices=["auto", "vllm", "transformers", "openai"], default="auto", help="who samples")
    add("--base-url", default=None, help="openai: for example http://127.0.0.1:8000/v1")
    add("--model", default=None, help="openai: name of the model")
    add("--api-key-env", default=None, help="openai: environment variable that holds the key")
    add("--image-cap", type=int, default=0, help="openai: images per request at most, evenly kept; 0 = no cap")
    add("--tokens-field", choices=["max_tokens", "max_completion_tokens"], default="max_tokens", help="openai: what the endpoint calls the limit")
    add("--send-temperature", action=argparse.BooleanOptionalAction, default=True, help="openai: some endpoints take no temperature and no seed")
    add("--workers", type=int, default=8, help="openai and judge: requests at once")
    add("--retries", type=int, default=3, help="openai and judge: times a request is sent again after 429, 5xx or a timeout, after 1, 2, 4, .. seconds")
    add("--quiet", action="store_true", help="no progress bar; the tables stay")
    add("--request-timeout", type=float, default=300.0, help="openai and judge: seconds")
    rollout.add_agent_arguments(parser, tools=False)
    add("--tools", nargs="+", choices=["on", "off"], default=["on"], help="offer crop_video, or answer from the overview alone; or both")
    parser.set_defaults(temperature=0.0, subtitles=None)
    return parser


def shard_argument(text):
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with 0 <= I < N, for example 0/4")
    return int(part), int(parts)


def parse_args():
    parser = build_parser()
    early = parser.parse_known_args()[0]
    native = protocols()[early.protocol]["native"]
    # A system that makes no calls makes none in the uniform runs either.
    parser.set_defaults(**native if early.protocol_set == "native" else {**paper_settings(), **({"max_turns": 0, "tools": ["off"]} if native.get("max_turns") == 0 else {})})
    if early.preset == "toy":
        parser.set_defaults(**rollout.toy_lengths())
    args = parser.parse_args()
    if args.judge_url and not args.judge_model:
        raise model.UserError("--judge-url needs --judge-model")
    if args.compare or args.table or args.rescore:
        return args
    if not (args.data or args.bench):
        raise model.UserError("give --data (task JSONL), --bench with --root, or --compare with finished evaluations")
    if args.bench:
        if args.data or not args.root:
            raise model.UserError("--bench needs --root, and no --data")
        if len(args.root) not in (1, len(args.bench)):
            raise model.UserError(f"--root: {len(args.root)} folders for {len(args.bench)} benchmarks; give one each, or one that holds all")
        if len(args.bench) > 1 and len(args.root) == 1:  # the two forms of Video-MME share a folder
            args.root = [os.path.join(args.root[0], name.removesuffix("_wsub")) for name in args.bench]
    if args.prepare and len(args.bench) != 1:
        raise model.UserError("--prepare takes one --bench")
    if args.prepare:
        return args
    if args.image_cap < 0:
        raise model.UserError("--image-cap may not be negative")
    if args.engine == "openai" and not (args.base_url and args.model):
        raise model.UserError("--engine openai needs --base-url and --model")
    if args.engine != "openai" and not args.ckpt:
        raise model.UserError("give --ckpt, or --engine openai with --base-url and --model")
    if args.limit < 0 or args.live < 0:
        raise model.UserError("--limit and --live may not be negative")
    if args.samples < 1 or (args.samples > 1 and args.temperature == 0):
        raise model.UserError("--samples must be at least 1, and above 1 needs --temperature above 0: greedy samples are all the same")
    if args.workers < 1 or args.retries < 0 or not args.request_timeout > 0:
        raise model.UserError("--workers and --request-timeout must be above 0, --retries may not be negative")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Benchmarks as their publishers ship them -> tasks


def splits():
    """name -> one split: hub id, where its rows lie below the root (without ending), columns they need, items as published, row ->
    tasks, folders that may hold its videos and subtitles."""
    videomme = {"hub": "lmms-lab/Video-MME", "rows": ("videomme/test-*", "test-*", "test"), "items": 2700, "read": videomme_rows,
                "needs": ("question_id", "videoID", "question", "options", "answer"), "videos": ("data", "videos", ""), "subtitles": ("subtitle", "subtitles")}
    return {
        "videomme": videomme,
        "videomme_wsub": videomme,
        "longvideobench": {"hub": "longvideobench/LongVideoBench", "rows": ("lvb_val", "validation-*"), "items": 1337, "read": longvideobench_rows,
                           "needs": ("id", "video_path", "question", "correct_choice"), "videos": ("videos", ""), "subtitles": ("subtitles", "")},
        "lvbench": {"hub": "lmms-lab/LVBench", "rows": ("train-*", "video_info.meta"), "items": 1549, "read": lvbench_rows, "needs": ("key", "type"),
                    "videos": ("", "videos", "all_videos"), "subtitles": ()},
        "mlvu": {"hub": "sy1998/MLVU_dev", "rows": ("test-*", "json/[0-9]_*"), "items": 2174, "read": mlvu_rows, "needs": ("question", "candidates", "answer"),
                 "videos": ("", "videos", "video"), "subtitles": ()},
        "mmvu": {"hub": "yale-nlp/MMVU", "rows": ("validation", "validation-*"), "items": 1000, "read": mmvu_rows,
                 "needs": ("id", "video", "question_type", "question", "choices", "answer"), "videos": ("", "videos"), "subtitles": ()},
        "charades": {"hub": "lmms-lab/charades_sta", "rows": ("charades_sta_test", "test-*"), "items": 3720, "read": charades_rows,
                     "needs": ("video", "caption", "timestamp"), "videos": ("Charades_v1_480", "Charades_v1", "videos", ""), "subtitles": ()},
    }


def videomme_rows(row, path):
    yield {"id": row["question_id"], "video": row["videoID"] + ".mp4", "question": row["question"], "options": row["options"], "answer": row["answer"],
           "subtitles": row["videoID"] + ".srt", "tags": {k: row.get(k) for k in ("duration", "domain", "sub_category", "task_type")}}


def longvideobench_rows(row, path):
    """Options as `candidates` (JSON), or as option0 to option4 padded with "N/A" or nothing (parquet)."""
    given = row.get("candidates") or [row.get(f"option{i}") for i in range(5)]
    kept = [i for i, text in enumerate(given) if text not in (None, "", "N/A")]  # a pad is left out, wherever it stands
    right = row["correct_choice"]
    yield {"id": row["id"], "video": row["video_path"], "question": row["question"], "options": [given[i] for i in kept],
           "answer": rollout.letters()[kept.index(right)] if right in kept else "", "subtitles": row.get("subtitle_path"),
           "subtitle_start": row.get("starting_timestamp_for_subtitles") or 0.0,
           "tags": {k: row.get(k) for k in ("duration_group", "question_category", "topic_category")}}


def lvbench_rows(row, path):
    """Flat rows, or one line a video with its questions under `qa`. The options stand in the question."""
    for q in row.get("qa") or [row]:
        missing = [k for k in ("uid", "question", "answer", "question_type") if k not in q]
        if missing:
            raise model.UserError(f"{path}: a question has no {missing[0]!r}; found {', '.join(sorted(q))}")
        yield {"id": str(q["uid"]), "video": row.get("video_path") or row["key"] + ".mp4", "question": q["question"], "options": None, "type": "mcq",
               "answer": q["answer"], "tags": {"type": row["type"], "question_type": list(q["question_type"])}}


def mlvu_rows(row, path):
    """The answer is a letter (Hub) or the text of a candidate (first release, a file and a video folder per task)."""
    task = row.get("task_type") or row.get("question_type")
    task = {"findNeedle": "needle"}.get(task, task)  # one task, two spellings
    folder = os.path.basename(os.path.splitext(path)[0]) if os.path.basename(os.path.dirname(path)) == "json" else ""
    yield {"id": row.get("question_id") or f"{task}-{row.get('video')}", "video": os.path.join(folder, row.get("video_name") or row["video"]),
           "question": row["question"], "options": row["candidates"], "answer": row["answer"], "tags": {"task": task}}


def mmvu_rows(row, path):
    """video is the file's address on the hub; the local path is what follows /main/. Open questions have empty choices."""
    video = row["video"].partition("/main/")[2] or row["video"]
    subject = os.path.basename(os.path.dirname(video))
    choices = [(letter, text) for letter, text in sorted((row["choices"] or {}).items()) if text]
    mcq = row["question_type"] == "multiple-choice"
    yield {"id": row["id"], "video": video, "question": row["question"], "options": [text for _, text in choices] if mcq else None,
           "answer": row["answer"], "type": "mcq" if mcq else "open",
           "tags": {"kind": row["question_type"], "discipline": mmvu_disciplines().get(subject), "subject": subject}}


def mmvu_disciplines():
    """subject -> discipline, as MMVU's paper groups them."""
    groups = {"Science": "Astronomy Biology Chemistry Electromagnetism Geography Materials_Science Mechanics Modern_Physics Neurobiology Thermodynamics",
              "Engineering": "Biomedical_Engineering Civil_Engineering Computer_Science Electrical_Engineering Electronics_and_Communication "
                             "Mechanical_Engineering",
              "Healthcare": "Basic_Medicine Clinical_Medicine Dentistry Pharmacy Preventive_Medicine",
              "Humanities and Social Science": "Art Economics History Law Literature Management"}
    return {subject: group for group, subjects in groups.items() for subject in subjects.split()}


def charades_rows(row, path):
    # The parquet holds float16 (24.3 is 24.296875); the publisher's text has one decimal.
    start, end = (round(float(t), 1) for t in row["timestamp"])
    yield {"id": f"{row['video']}/{start:g}-{end:g}", "video": row["video"] + ("" if "." in row["video"] else ".mp4"), "options": None, "type": "grounding",
           "question": f"When does this happen in the video: {row['caption'].strip()}", "answer": [start, end], "tags": {}}


def row_files(root, patterns):
    """Files of the first pattern that matches something, in the root or one folder below."""
    for pattern in patterns:
        found = sorted(path for depth in ("", "*") for ending in (".parquet", ".jsonl", ".json", ".txt")
                       for path in glob.glob(os.path.join(glob.escape(root), depth, pattern + ending)))
        if found:
            return found
    return []


def read_rows(path):
    """Rows of a parquet, JSON, JSONL or Charades-STA text file, as dicts. Raises UserError naming the file."""
    if not path.endswith(".txt"):
        return model.read_rows(path)
    with open(path, encoding="utf-8") as f:
        lines = [re.fullmatch(r"(\S+) ([0-9.]+) ([0-9.]+)##(.*)", line.strip()) for line in f if line.strip()]
    if not all(lines):
        raise model.UserError(f"{path}: a line is not `VIDEO START END##SENTENCE`")
    return [{"video": line[1], "timestamp": [line[2], line[3]], "caption": line[4]} for line in lines]


def locate(root, folders, name):
    """Path of a video or subtitle below the root: as named, or with another usual ending; None where there is none."""
    stem, ending = os.path.splitext(name)
    endings = [ending, *(e for e in (".mp4", ".MP4", ".mkv", ".webm") if ending not in (".srt", ".json", e))]
    tried = [os.path.join(folder, stem + e) for folder in folders for e in endings]
    return next((path for path in tried if os.path.isfile(os.path.join(root, path))), None)


def read_split(name, root):
    """A benchmark folder as its publisher ships it -> (tasks, {note: count}). Raises UserError: what was expected where.

    Every published row becomes a task: one whose video is not there, or whose answer is none of its options, counts as wrong.
    """
    split, tasks, seen = splits()[name], [], Counter()
    if not os.path.isdir(root):
        raise model.UserError(f"--root {root}: no such folder; expected {split['hub']} as its publisher ships it")
    files = row_files(root, split["rows"])
    if not files:
        raise model.UserError(f"--root {root}: no rows of {name}; expected {' or '.join(split['rows'])} (.parquet, .json, .jsonl) of {split['hub']}")
    notes = dict.fromkeys(("items", "published", "no video", "no subtitles", "no usable answer"), 0)
    for path in files:
        for row in read_rows(path):
            missing = [k for k in split["needs"] if k not in row]
            if missing:
                raise model.UserError(f"{path}: no column {missing[0]!r}, which {name} needs; found {', '.join(sorted(row))}")
            for task in split["read"](row, path):
                task = {"id": None, "video": None, "type": "mcq", "subtitles": None, **task}
                if task["type"] == "mcq":
                    task["question"], inline = rollout.split_inline(task["question"])
                    task["options"] = rollout.bare_options(task["options"] or inline)
                    task["answer"] = rollout.answer_letter(task["answer"], task["options"])
                seen[task["id"]] += 1
                if seen[task["id"]] > 1:  # the first release of MLVU has no ids, Charades-STA repeats rows
                    task["id"] += f"#{seen[task['id']]}"
                found = locate(root, split["videos"], task["video"])
                notes["no video"] += found is None
                notes["no usable answer"] += task["answer"] == ""
                task["video"] = found or os.path.join(split["videos"][0], task["video"])
                if task["subtitles"]:
                    task["subtitles"] = locate(root, split["subtitles"], task["subtitles"])
                notes["no subtitles"] += task["subtitles"] is None and bool(split["subtitles"])
                tasks.append({**task, "tags": {k: v for k, v in task["tags"].items() if v is not None}})
    if not tasks:
        raise model.UserError(f"{', '.join(files)}: no rows of {name}")
    notes.update(items=len(tasks), published=split["items"])
    return tasks, notes


# ---------------------------------------------------------------------------------------------------------------------
# Protocols: how each system of the paper's Table 1 is spoken to. One record each; rollout.run_episode is the loop of all.
#
# The wording here is ours. A publisher's own prompt is read from its release with --prompt-file, in the order of `files`.


def protocols():
    """name -> {"systems", "files": what of the publisher's release --prompt-file takes, "texts": our wording of the same, "make": (texts, args) ->
    rollout.Protocol, "native": defaults of the native run, "final": (turns, think_open) -> what is graded, where not the usual}."""
    answer = "Write only the final answer between <answer> and </answer>."
    think = "Reason between <think> and </think>, then write only the final answer between <answer> and </answer>."
    one = {"max_turns": 0, "think_prefix": False, "tools": ["off"]}
    rounds = {"think_prefix": False, "max_parallel": 1}
    few = {"min_pixels": 16 * 784, "max_pixels": 3584 * 784 // 64}  # their total of 3584 x 28 x 28 pixels, over 64 frames
    question = "{subtitles}{question}\n{options}\n{style}"
    return {
        "paravt": {"systems": "ParaVT-8B; Qwen3-VL-8B and Conan-7B in the paper's runs", "files": "paravt/eval/driver.py:GENERAL_AGENTIC_SYSTEM",
                   "texts": [rollout.main_prompt()], "make": paravt_protocol, "native": {}},
        "direct": {"systems": "Qwen2.5-VL-7B, GPT-4o, Gemini 1.5 Pro", "files": "paravt/eval/driver.py:DIRECT_SYSTEM", "texts": [answer],
                   "make": lambda texts, args: single(args, system=texts[0], user=question), "native": one},
        "reasoning": {"systems": "Video-R1-7B, VideoRFT-7B, Video-Thinker-7B", "files": "paravt/eval/driver.py:REASONING_SYSTEM", "texts": [think],
                      "make": lambda texts, args: single(args, system=texts[0], user=question),
                      "native": {**one, "max_pixels": 256 * 784, "max_new_tokens": 1024}},  # their temperature 0.1 at top-p 0.001 is greedy
        "videochat-r1": {"systems": "VideoChat-R1-7B", "files": "a text made from src_eval/eval_prompts.py", "texts": [question + "\n" + think],
                         "make": lambda texts, args: single(args, user=texts[0], text_first=True), "native": {**one, **few}},
        "time-r1": {"systems": "Time-R1-7B", "files": "a text made from src/vllm_inference/data/config.py", "texts": [question + "\n" + answer],
                    "make": lambda texts, args: single(args, system="You are a helpful assistant.", user=texts[0], label="({})",
                                                       prefill="<think>\n\n</think>\n\n"), "native": {**one, **few, "max_new_tokens": 1024}},
        "rewatch-r1": {"systems": "ReWatch-R1", "files": "a text made from the model card's prompt",
                       "texts": [question + "\nThe video runs from 00:00 to {length}. You may note what you look at between <action> and </action> and what "
                                 "you see between <observation> and </observation>. " + think],
                       "make": lambda texts, args: single(args, user=texts[0]), "native": {**one, "frames": [192], "max_pixels": 128 * 784}},
        "conan": {"systems": "Conan-7B", "files": "texts made from Conan-Eval/prompt_temp.py: first round, further round, last round", "texts": conan_texts(),
                  "make": conan_protocol, "native": {**rounds, "max_turns": 2, "frames": [16], "max_pixels": 448 * 448, "temperature": 1.0,
                                                     "max_new_tokens": 4000}},
        "longvt": {"systems": "LongVT-RFT-7B", "files": "TOOL_PROMPT of lmms_eval_tasks/*/utils.py, as a text",
                   "texts": ["Reason between <think> and </think>. Call crop_video when you need to see a part of the video closely; when you know the answer, "
                             "write it between <answer> and </answer>."],
                   "make": longvt_protocol, "native": {**rounds, "max_turns": 5, "frames": [512], "max_pixels": 50176, "sub_frames": 128, "max_parallel": 5}},
        "videozoomer": {"systems": "VideoZoomer-7B", "files": "a text made from data.system_prompt of scripts/eval_video.sh", "texts": [videozoomer_text()],
                        "make": videozoomer_protocol, "native": {**rounds, "max_turns": 4, "min_pixels": 25088, "max_pixels": 100352}},
        "sage": {"systems": "SAGE-7B", "files": "sage/prompts/sage/context_vlm.txt and iterative_reasoner.txt", "texts": sage_texts(), "make": sage_protocol,
                 "native": {**rounds, "max_turns": 9, "frames": [128]}, "final": sage_final},
    }


def paper_settings():
    """--protocol-set paper: what the paper's evaluation ran every open model with, whatever its own recipe."""
    return {"frames": [64], "temperature": 0.0, "max_new_tokens": 2048, "max_turns": 3, "max_parallel": 5, "context": 65536, "min_pixels": 4 * 784,
            "max_pixels": 768 * 784, "stamps": False, "crop_reply": "frames", "force_answer": True, "think_prefix": False}


def read_prompts(sources):
    """--prompt-file values -> texts. FILE is a text; FILE.py:NAME the string that NAME is set to in that file, which is read and never run."""
    texts = []
    for source in sources:
        path, _, name = source.partition(".py:")
        path += ".py" if name else ""
        try:
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if name:
                found = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)
                         and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)]
                text = ast.literal_eval(found[-1]) if found else None
        except (OSError, SyntaxError, ValueError) as error:
            raise model.UserError(f"--prompt-file {source}: {error}") from None
        if not isinstance(text, str):
            raise model.UserError(f"--prompt-file {source}: {path} sets no string {name}")
        texts.append(text)
    return texts


def make_protocol(args):
    """Flags -> (rollout.Protocol, hash of its prompt texts)."""
    entry = protocols()[args.protocol]
    texts = read_prompts(args.prompt_file) if args.prompt_file else entry["texts"]
    if len(texts) != len(entry["texts"]):
        raise model.UserError(f"--prompt-file: --protocol {args.protocol} takes {len(entry['texts'])}: {entry['files']}")
    return entry["make"](texts, args), hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def clock(seconds):
    return model.stamp_text(seconds, 0, "clock")


def filled(text, task, duration=0.0, subtitles="", label="{}."):
    """A template with {question}, {options}, {style}, {subtitles}, {duration}, {length}, {video} -> text. Other braces stay."""
    options = "\n".join(f"{label.format(letter)} {option}" for letter, option in zip(rollout.letters(), task.get("options") or []))
    values = {"question": task["question"], "options": options, "style": rollout.answer_style(task["type"]), "duration": clock(duration),
              "length": clock(duration)[3:] if duration < 3600 else clock(duration), "video": os.path.basename(task["video"]),
              "subtitles": f"Subtitles:\n{subtitles}\n\n" if subtitles else ""}
    text = re.sub(r"\{(" + "|".join(values) + r")\}", lambda found: values[found[1]], text)  # one pass: a question may hold braces
    return re.sub(r"\n\n+", "\n", text) if not options else text


def single(args, system=None, user=None, text_first=False, label="{}.", prefill=""):
    """One generation, no tools: a system text, the frames and a user text."""
    def opening(task, num_frames, agent, subtitles, duration):
        frames = {"type": "video", "video": task["video"], "frames": num_frames, "stamp": stamp_kind(args)}
        text = {"type": "text", "text": ("" if text_first else "\n") + filled(user, task, duration, subtitles, label)}
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": [text, frames] if text_first else [frames, text]}]

    return rollout.Protocol(opening=opening, prefill=prefill, schema=False)


def stamp_kind(args):
    return None if args.stamps else "none"


def force_text(task):
    """What the authors' evaluation demands after the last round of calls, in our words."""
    if task["type"] == "grounding":
        return "Answer now, in this form: The event happens in 10.0 - 20.0 seconds."
    return "Answer now, with the letter of one option alone." if task["type"] == "mcq" else "Answer now, in a few words."


def paravt_protocol(texts, args):
    """ParaVT's own, as it is trained (sub-agents that return summaries), or as the authors evaluate it (--crop-reply frames: the frames
    themselves, an own user message for every call)."""
    own = not args.prompt_file
    if own and args.crop_reply == "summary" and args.stamps and not args.force_answer:
        return rollout.Protocol()

    def opening(task, num_frames, agent, subtitles, duration):
        messages = rollout.main_messages(task, num_frames, agent.tools, subtitles)
        messages[0]["content"] = messages[0]["content"] if own else texts[0]
        messages[1]["content"][0]["stamp"] = stamp_kind(args)
        return messages

    def answer(records, calls, episode, agent, codec, source, step, turn):
        if args.crop_reply == "summary":
            return (yield from rollout.summaries(records, calls, episode, agent, codec, source, step, turn))
        return (yield from frame_replies(records, calls, episode, agent, source, stamp_kind(args)))

    def force_tokens(task):  # as the authors' evaluation has them
        return 128 if task["type"] == "grounding" else 64

    forced = {"force": force_text, "force_tokens": force_tokens} if args.force_answer else {}
    return rollout.Protocol(opening=opening, answer=answer, **forced)


def windows(records, calls, episode, agent, source, specs=None):
    """Load the windows of the calls that are run -> [(spec, Frames), or (None, None)] of all calls; every record says what became of it.
    specs: {index of a call: spec} where it is not the window at --sub-fps."""
    wanted = {n: (specs or {}).get(n) or {"video": episode.task["video"], "start": calls[n].start, "end": calls[n].end, "fps": agent.sub_fps,
                                          "max_frames": agent.sub_frames} for n in rollout.admitted(records, calls, agent.max_parallel)}
    loaded = yield [lambda spec=spec: source.load(spec) for spec in wanted.values()]
    out = [(None, None)] * len(calls)
    for (n, spec), frames in zip(wanted.items(), loaded):
        if isinstance(frames, video.VideoError):
            records[n].update(status="video_error", summary=f"error: the window could not be read ({frames.why})")
        elif isinstance(frames, ValueError):
            records[n].update(status="error", summary=f"error: {frames}")
        else:
            records[n].update(status="ok", frames_seen=len(frames.seconds), seconds_seen=[round(float(t), 3) for t in frames.seconds])
            out[n] = spec, frames
    return out


def tagged(text):
    """Text in tool response tags, which are ours; the text is data."""
    return [{"type": "text", "text": "<tool_response>\n", "trusted": True}, {"type": "text", "text": text},
            {"type": "text", "text": "\n</tool_response>", "trusted": True}]


def frame_replies(records, calls, episode, agent, source, stamp):
    """A user message for every call: its frames, then what they are, in tool response tags."""
    found, reply = (yield from windows(records, calls, episode, agent, source)), rollout.Reply([])
    for record, (spec, frames) in zip(records, found):
        if frames is None:
            reply.messages.append({"role": "user", "content": tagged(record["summary"])})
            continue
        record["summary"] = f"{len(frames.seconds)} frames from {record['start']:.1f}s to {record['end']:.1f}s."
        reply.messages.append({"role": "user", "content": [{"type": "video", "video": spec["video"], "stamp": stamp}, *tagged(record["summary"])]})
        reply.specs.append(spec)
        reply.frames.append(frames)
    return reply


def longvt_protocol(texts, args):
    """crop_video as a declared tool; a tool message holds the frames and a sentence. A window beyond the video is an error, not clamped."""
    def opening(task, num_frames, agent, subtitles, duration):
        text = filled("\n{subtitles}{question}\n{options}\n{style} ", task, duration, subtitles) + texts[0] + \
            f" The video path for this video is: {os.path.basename(task['video'])}"
        return [{"role": "user", "content": [{"type": "video", "video": task["video"], "frames": num_frames, "stamp": stamp_kind(args)},
                                             {"type": "text", "text": text}]}]

    def answer(records, calls, episode, agent, codec, source, step, turn):
        for call, record in zip(calls, records):
            if call.error is None:
                why = ("start_time is below 0" if call.start < 0 else f"start_time lies behind the end of the video, {episode.duration:.1f}s"
                       if call.start >= episode.duration else f"end_time lies behind the end of the video, {episode.duration:.1f}s"
                       if call.end > episode.duration else None)
                if why:
                    call.error = record["summary"] = why
                    record["status"] = "error"
        found, reply = (yield from windows(records, calls, episode, agent, source)), rollout.Reply([])
        for record, (spec, frames) in zip(records, found):
            content = record["summary"]
            if frames is not None:
                record["summary"] = "The frames of the window are shown above. Go on with your analysis."
                content = [{"type": "video", "video": spec["video"], "stamp": stamp_kind(args)}, {"type": "text", "text": record["summary"]}]
                reply.specs.append(spec)
                reply.frames.append(frames)
            reply.messages.append({"role": "tool", "content": content})
        return reply

    return rollout.Protocol(opening=opening, answer=answer)


def videozoomer_text():
    return ("You watch a video through a few frames, each after a tag with its number and time. To see a part of it at a higher frame rate, write\n"
            '<video_zoom> {"segment": [start, end], "fps": frames per second} </video_zoom>\n'
            "once in a turn, with the times in seconds and at most 16 frames in all. Think between <think> and </think> first. When you know the answer, write "
            "<answer> \\boxed{answer} </answer>.")


def last_block(text, tag):
    """What the last closed <tag> of a text holds; None where there is none. Linear, whatever was written."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def parse_zoom(text, think_open=False):
    """The last <video_zoom> of a turn -> [one call], or []. fps is carried in num_frames as the number of frames it gives."""
    body = last_block(rewards.visible(text, think_open), "video_zoom")
    if body is None:
        return []
    start = end = frames = None
    try:
        call = json.loads(body[:1000])
        start, end = (rewards.to_seconds(t) for t in call["segment"])
        fps = rewards.to_seconds(call.get("fps", 1))
        if None in (start, end, fps) or not start < end or fps <= 0:
            error = "segment must be [start, end] in seconds with start < end, and fps above 0"
        else:
            frames = int(fps * (end - start))
            error = f"{frames} frames are more than 16: take a shorter segment or a lower fps" if frames > 16 else \
                "the segment holds no frame at this fps" if frames < 1 else None
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        error = 'expected {"segment": [start, end], "fps": n}'
    return [rewards.ToolCall("video_zoom", start, end, frames, error)]


def videozoomer_protocol(texts, args):
    """One zoom a turn, answered by a user message of stamped frames in tool response tags."""
    def opening(task, num_frames, agent, subtitles, duration):
        return [{"role": "system", "content": texts[0]},
                {"role": "user", "content": [{"type": "video", "video": task["video"], "frames": num_frames, "stamp": "frame"},
                                             {"type": "text", "text": "\n" + filled("{subtitles}{question}\n{options}\n{style}", task, duration, subtitles)}]}]

    def answer(records, calls, episode, agent, codec, source, step, turn):
        specs = {0: {"video": episode.task["video"], "start": calls[0].start, "end": calls[0].end, "num_frames": calls[0].num_frames, "max_frames": 16}}
        ((spec, frames),) = yield from windows(records, calls, episode, agent, source, specs if calls[0].error is None else None)
        if frames is None:
            content = [*tagged(records[0]["summary"]), {"type": "text", "text": "\nThink about what went wrong, then go on."}]
        else:
            records[0]["summary"] = "The frames of the segment:"
            content = [{"type": "text", "text": "<tool_response>\nThe frames of the segment:\n", "trusted": True},
                       {"type": "video", "video": spec["video"], "stamp": "frame"}, {"type": "text", "text": "\n</tool_response>", "trusted": True},
                       {"type": "text", "text": "\nGo on thinking, then zoom again or answer."}]
        if turn == agent.max_turns - 1:
            content.append({"type": "text", "text": " Do not zoom again: answer now."})
        return rollout.Reply([{"role": "user", "content": content}], [spec] if frames is not None else [], [frames] if frames is not None else [])

    return rollout.Protocol(opening=opening, parse=parse_zoom, answer=answer, schema=False, stop=("</video_zoom>",))


def conan_texts():
    contract = ("Rate between <score> and </score> how well the frames so far answer the question, reason between <think> and </think>, name the clips you "
                "want to see between <clip> and </clip> as HH:MM:SS-HH:MM:SS, separated by commas, or leave it empty when you need none, and write your "
                "answer between <answer> and </answer>.")
    return ["Question: {question}\n{options}\nThe frames above carry their times. " + contract,
            "These are frames of the clips you asked for. " + contract,
            "These are the last frames. Reason between <think> and </think> and write your answer between <answer> and </answer>. Question: {question}\n{options}"]


def parse_clips(text, think_open=False):
    """The clips of the last <clip> of a turn -> calls; none where it is empty or missing, which ends the episode."""
    calls = []
    for part in (last_block(text, "clip") or "").split(",")[:16]:
        if not part.strip():
            continue
        times = [rewards.to_seconds(t) for t in part.split("-")]
        good = len(times) == 2 and None not in times and times[0] < times[1]
        calls.append(rewards.ToolCall("clip", *(times if good else (None, None)), None, None if good else "a clip is HH:MM:SS-HH:MM:SS"))
    return calls


def conan_protocol(texts, args):
    """Eight new frames a round, shared over the clips by how many unseen seconds each has; without a valid clip, evenly from all unseen ones."""
    def user(task, spec, text, subtitles="", duration=0.0):
        return [{"role": "user", "content": [{"type": "video", "video": task["video"], **spec, "stamp": "clock"},
                                             {"type": "text", "text": "\n" + filled(text, task, duration, subtitles)}]}]

    def opening(task, num_frames, agent, subtitles, duration):
        return user(task, {"frames": num_frames}, "{subtitles}" + texts[0], subtitles, duration)

    def answer(records, calls, episode, agent, codec, source, step, turn):
        task, seen = episode.task, episode.notes.setdefault("seen", {int(t) for t in episode.context.frames[0].seconds})
        unseen = [t for t in range(int(episode.duration)) if t not in seen]
        clips = [[t for t in unseen if c.start <= t <= c.end] if c.error is None else [] for c in calls]
        total, wanted = sum(map(len, clips)), []
        for record, clip, call in zip(records, clips, calls):
            share = min(len(clip), max(1, round(8 * len(clip) / total))) if clip else 0
            wanted += rollout.evenly(clip, min(share, 8 - len(wanted)))
            if call.error is None:
                record.update(status="ok" if clip else "error", summary=f"{share} frames" if clip else "error: nothing new in this clip")
            else:
                record["summary"] = f"error: {record['summary']}"
        wanted = sorted(set(wanted)) or rollout.evenly(unseen, 8)
        text = texts[2] if turn == agent.max_turns - 1 else texts[1]
        if not wanted:
            return rollout.Reply([{"role": "user", "content": filled(text, task)}])
        spec = {"video": task["video"], "times": [t + 0.5 if t + 0.5 < episode.duration else float(t) for t in wanted]}
        (frames,) = yield [lambda: source.load(spec)]
        if isinstance(frames, (video.VideoError, ValueError)):
            return rollout.Reply([{"role": "user", "content": filled(text, task)}])
        seen.update(wanted)
        return rollout.Reply(user(task, {"times": spec["times"]}, text), [spec], [frames])

    return rollout.Protocol(opening=opening, parse=parse_clips, answer=answer, schema=False)


def sage_texts():
    tools = ('{"name": "identify_timestamps_visually", "arguments": {"event": text, "timestamp_start": "HH:MM:SS", "timestamp_end": "HH:MM:SS"}}\n'
             '{"name": "extract_parts_from_timestamp", "arguments": {"timestamp_start": "HH:MM:SS", "timestamp_end": "HH:MM:SS", "extract_type": "frames"}}\n'
             '{"name": "perform_reasoning", "arguments": {"query": text, "media_paths": [path, ..]}}\n'
             '{"name": "verbal_transcript", "arguments": {"timestamp_start": "HH:MM:SS", "timestamp_end": "HH:MM:SS"}}\n'
             '{"name": "unified_web_search", "arguments": {"query": text}}\n{"name": "parse_web_data", "arguments": {"website_url": text}}')
    wanted = '"recommended_tools": {"needed": true or false, "tool_calls": [{"rationale": text, "name": text, "arguments": {}}]}'
    return ["You see a few frames of a video and a query about it. These tools may be called, one at a time:\n<tools>\n" + tools + "\n</tools>\n"
            'Reply with <json>{"video_context": text, "query_intent": text, "final_answer": text or null, ' + wanted + "}</json>",
            "You answer a query about a video from the results of tools. These tools may be called, one at a time:\n<tools>\n" + tools + "\n</tools>\n"
            'Reply with <json>{"answerable": {"verdict": true or false, "reasoning": text}, "final_answer": text or null, ' + wanted + "}</json>"]


def sage_object(text):
    """The JSON object of a SAGE turn, in <json> tags, ``` fences or bare; trailing commas are repaired. None where there is none."""
    text = text[:100_000]
    for opening in ("<json>", "```json", "```", ""):  # the last one that opens, closed or not; what follows the object is not read
        start = text.find("{", max(0, text.rfind(opening + "\n{"), text.rfind(opening + "{"))) if opening else text.find("{")
        if start < 0 or (opening and opening not in text):
            continue
        try:
            found = json.JSONDecoder().raw_decode(re.sub(r",(\s*[}\]])", r"\1", text[start:]))[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def parse_sage(text, think_open=False):
    """A SAGE turn -> [its first tool call], or [] where it has a final answer. A turn that is no JSON is a call with an error: it is asked again."""
    found = sage_object(text)
    if found is None:
        return [rewards.ToolCall("", None, None, None, "the reply is not one JSON object")]
    if found.get("final_answer") not in (None, "", "null"):
        return []
    recommended = found.get("recommended_tools")
    calls = recommended.get("tool_calls") if isinstance(recommended, dict) else None
    first = calls[0] if isinstance(calls, list) and calls and isinstance(calls[0], dict) else None
    if first is None or not isinstance(first.get("arguments"), dict) or not isinstance(first.get("name"), str):
        return [rewards.ToolCall("", None, None, None, "neither a final answer nor a tool call with name and arguments")]
    start, end = (rewards.to_seconds(first["arguments"].get(f"timestamp_{side}")) for side in ("start", "end"))
    call = rewards.ToolCall(rewards.shown(first["name"]), start, end, None, None)
    call.arguments = first["arguments"]
    return [call]


def sage_final(turns, think_open=False):
    found = sage_object(turns[-1]) if turns else None
    said = found.get("final_answer") if found else None
    return None if said in (None, "", "null") else said if isinstance(said, str) else json.dumps(said)


def sage_protocol(texts, args):
    """Step 1 sees the frames; every further step is a new text-only conversation: context, query, the latest ten results. Tools that look are
    served by the same model on the window's frames; web and speech tools are not there and say so."""
    def opening(task, num_frames, agent, subtitles, duration):
        text = filled("\n{subtitles}{question}\n{options}\n{style}", task, duration, subtitles, "({})") + \
            f"\nVideo Path: {os.path.basename(task['video'])} of duration {clock(duration)}."
        return [{"role": "system", "content": texts[0]},
                {"role": "user", "content": [{"type": "video", "video": task["video"], "frames": num_frames, "stamp": stamp_kind(args)},
                                             {"type": "text", "text": text}]}]

    def answer(records, calls, episode, agent, codec, source, step, turn):
        call, record, task, notes = calls[0], records[0], episode.task, episode.notes
        said = sage_object(episode.turns[-1]) or {}
        notes.setdefault("context", str(said.get("video_context", ""))[:4000])
        results, media = notes.setdefault("results", []), notes.setdefault("media", {})
        if call.error:
            record["summary"] = result = f"error: {call.error}"
        else:
            result = yield from sage_tool(call, record, episode, agent, codec, source, step, turn, media)
        results.append((f"{call.name or 'reply'}_#{len(results) + 1}", result))
        listed = "\n".join(f"{key}: {value}" for key, value in results[-10:])
        text = f"Last tool: {call.name or '-'}\nVideo context: {notes['context']}\nQuery: " + filled("{question}\n{options}\n{style}", task, label="({})") + \
            f"\nResults:\n{listed}"
        return rollout.Reply([{"role": "system", "content": texts[1]}, {"role": "user", "content": text}], fresh=True)

    return rollout.Protocol(opening=opening, parse=parse_sage, answer=answer, schema=False)


def sage_tool(call, record, episode, agent, codec, source, step, turn, media):
    """Serve one SAGE call -> its result as text."""
    arguments, limit = call.arguments, {"identify_timestamps_visually": 600, "extract_parts_from_timestamp": 300}.get(call.name)
    if call.name in ("unified_web_search", "parse_web_data", "verbal_transcript"):
        record.update(status="unavailable", summary="error: this tool is not available")
        return record["summary"]
    if call.name == "perform_reasoning":
        paths = arguments.get("media_paths")
        known = [media[path] for path in paths if isinstance(path, str) and path in media] if isinstance(paths, list) else []
        if not known:
            record.update(status="error", summary="error: media_paths names nothing that was extracted")
            return record["summary"]
        call.start, call.end = known[-1]
    elif limit is None:
        record.update(status="error", parseable=False, summary=f"error: unknown tool {call.name}")
        return record["summary"]
    elif call.start is None or call.end is None or not call.start < call.end or call.end - call.start > limit:
        record.update(status="error", summary=f"error: timestamp_start and timestamp_end must be times at most {limit} seconds apart")
        return record["summary"]
    if call.name == "extract_parts_from_timestamp":
        path = f"part{len(media) + 1}"
        media[path] = call.start, call.end
        record.update(status="ok", summary=f"media_paths: [{path}]")
        return record["summary"]
    asked = str(arguments.get("event") or arguments.get("query") or "")[:2000]
    record.update(start=call.start, end=call.end)
    window = {"question": f"{asked}\nGive times as HH:MM:SS." if call.name == "identify_timestamps_visually" else asked}
    shown = replace(episode, task={**episode.task, **window})
    yield [rollout.sub_agent(record, shown, agent, codec, source, rollout.request_seed(agent.seed, step, episode.task["id"], episode.sample, turn, 0),
                             f"{episode.group}/{episode.sample}/{turn}/0")]
    return record["summary"]


# ---------------------------------------------------------------------------------------------------------------------
# Records: one line an item, appended as it finishes


def settings_digest(args, ckpt, agent, tasks, prompts):
    """What must be equal for records to belong together: every flag but the ones that only say where, which part and how fast."""
    free = {"out", "limit", "frames", "tools", "ckpt", "live", "shard", "data", "bench", "root", "video_root", "workers", "retries", "request_timeout", "api_key_env",
            "allow_errors", "judge_url", "judge_model", "judge_key_env", "samples", "subtitles", "prompt_file"} | model.pace_flags()
    kept = {k: v for k, v in sorted(vars(args).items()) if k not in free}
    stamp = os.path.getmtime(os.path.join(ckpt, "config.json")) if ckpt else None  # the same path may hold a newer checkpoint
    return hashlib.sha256(json.dumps([kept, prompts, agent.subtitles, ckpt, stamp, tasks]).encode()).hexdigest()[:16]


def read_records(out, digest=None):
    """Finished records of earlier runs -> {(task id, K, tools, sample): record}. A torn last line is dropped; an item that was
    asked again after an engine error has two records, of which the error loses.

    Raises UserError when the folder holds records of other settings than `digest`, or of two.
    """
    done = {}
    for name in sorted(os.listdir(out)):
        if not (name.startswith("records.") and name.endswith(".jsonl")):
            continue
        with open(os.path.join(out, name), encoding="utf-8") as f:
            lines = f.read().split("\n")
        for number, line in enumerate(lines[:-1], 1):  # a whole line ends in a newline, so the last piece is empty or torn
            try:
                record = json.loads(line)
            except ValueError:
                raise model.UserError(f"{os.path.join(out, name)}:{number}: not JSON; delete the line or the file") from None
            digest = digest or record["digest"]
            if record["digest"] != digest:
                raise model.UserError(f"{out} holds records of another checkpoint or other settings; choose another --out")
            item = record["task"]["id"], record["budget"], record["tools"], record["sample"]
            if not (item in done and record["status"] == "engine_error"):
                done[item] = record
    return done


def record_of(episode, digest, budget, mode, args):
    """Episode -> its record: the text of every turn and all that was decided, without token ids."""
    record = {k: v for k, v in episode.to_json().items() if k not in ("ids", "mask", "logps", "vision", "spans", "advantage", "version")}
    record["calls"] = [{k: v for k, v in call.items() if k != "sub"} for call in episode.calls]
    record.update(digest=digest, budget=str(budget), tools=mode, frame_times=[round(float(t), 3) for t in episode.notes.get("seconds", [])],
                  prompt_hash=hashlib.sha256(json.dumps(episode.notes.get("opening")).encode()).hexdigest()[:16])
    return {**record, **grade(record, args.protocol)}


def grade(record, protocol="paravt"):
    """-> {"said", "extracted", "score"} of one record; score in [0, 1]. The gold answer is looked at only after `extracted` is settled."""
    if record["status"] != "ok":
        return {"said": None, "extracted": None, "score": 0.0}
    said, task = protocols()[protocol].get("final", rewards.answer_or_tail)(record["turns"], record["think_open"]), record["task"]
    extracted = None
    if said is not None:
        extracted = {"mcq": lambda: rewards.extract_letter(said, task.get("options")), "grounding": lambda: rewards.extract_span(said),
                     "open": lambda: rewards.region(said) or None}[task["type"]]()
    return {"said": said, "extracted": extracted,
            "score": rewards.accuracy(said, task["type"], task["answer"], task.get("options"), open_metric="exact")}


def graded(folder, judge=None):
    """Records of a folder, graded as the code grades now, and by a judge where one is named -> {item: record}. judge: see judge_records."""
    with open(os.path.join(folder, "args.json")) as f:
        kept = json.load(f)
    records = read_records(folder)
    for record in records.values():
        record.update(grade(record, kept["protocol"]))
    if judge and judge.judge_model:
        judge_records(list(records.values()), folder, judge)
    return records


def drop_torn_line(path):
    """Cut an interrupted last line off, so that what is appended starts on a line of its own."""
    with open(path, "rb+") as f:
        data = f.read()
        f.truncate(data.rfind(b"\n") + 1)


# ---------------------------------------------------------------------------------------------------------------------
# The judge of open answers


def judge_records(records, folder, args):
    """Ask a chat endpoint about open answers that the rule calls wrong; verdicts are kept in folder/judge.jsonl and asked once.

    args: judge_url (None: only earlier verdicts count), judge_model, ... A yes makes the score 1. Where the judge fails, or says neither yes nor no, the rule's score stays and the failure is counted.
    """
    path, known = os.path.join(folder, "judge.jsonl"), {}
    if os.path.exists(path):
        drop_torn_line(path)
        known = {(v["id"], v["said"], v["model"]): v for v in (model.read_jsonl(path) if os.path.getsize(path) else []) if v["verdict"] is not None}
    asked = [r for r in records if r["task"]["type"] == "open" and r["score"] == 0 and r["extracted"] is not None]

    def name(r):
        return r["task"]["id"], r["said"], args.judge_model

    todo = list({name(r): r for r in asked if name(r) not in known}.values())
    if todo and not args.judge_url:
        todo = []  # --rescore without an endpoint: what was judged before counts, the rest is the rule's
    if todo:
        from tqdm import tqdm

        engine = rollout.OpenAIEngine(args.judge_url, args.judge_model, args.judge_key_env, args.workers, args.request_timeout, args.retries)
        engine.knock()
        for n, r in enumerate(todo):
            text = (f"Question: {r['task']['question']}\nReference answer: {r['task']['answer']}\nGiven answer: {r['extracted']}\n"
                    "Does the given answer say the same as the reference answer? Reply with yes or no.")
            engine.submit(rollout.Request(str(n), [], [], [], [], [{"role": "user", "content": text}], 16, 0.0, 0))
        with open(path, "a", encoding="utf-8") as f, tqdm(total=len(todo), desc="judge", disable=args.quiet or None) as bar:
            left = len(todo)
            while left:
                for done in engine.poll():
                    r, said = todo[int(done.id)], re.match(r"\W*(yes|no)\b", done.text or "", re.IGNORECASE)
                    verdict = {"id": r["task"]["id"], "said": r["said"], "model": args.judge_model, "text": done.text, "error": done.error,
                               "verdict": said[1].lower() == "yes" if said else None}
                    known[name(r)] = verdict
                    f.write(json.dumps(verdict) + "\n")
                    left -= 1
                    bar.update()
        engine.close()
    for r in asked:
        r["judge"] = known.get(name(r))
        if r["judge"] and r["judge"]["verdict"]:
            r["score"] = 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def stratum(bench, record):
    """Part of the headline that a record belongs to, None for none: a headline is the mean of the parts' means.
    MLVU: its seven tasks (M-Avg). MMVU: multiple choice alone. Others: all items alike."""
    if bench == "mlvu":
        return record["task"]["tags"].get("task", "")
    if bench == "mmvu":
        return "mc" if record["task"]["type"] == "mcq" else None
    return ""


def headline_name(bench):
    return {"mlvu": "M-Avg", "mmvu": "accuracy, multiple choice", "charades": "mIoU"}.get(bench, "accuracy")


def resampled(records, bench, draws=2000):
    """(headline, [draws] of it, fewer where a draw holds none of its items): videos are drawn with replacement, not items, since the questions of one video err together.

    The draws depend on the set of videos alone, so two systems on the same items are drawn alike and their difference is paired.
    """
    import numpy as np

    kept = [(r, part) for r in records if (part := stratum(bench, r)) is not None]
    videos = {v: n for n, v in enumerate(sorted({r["task"]["video"] for r in records}))}
    parts = {p: n for n, p in enumerate(sorted({part for _, part in kept}))}
    if not parts:
        return None, np.zeros(0)
    sums, counts = np.zeros((len(videos), len(parts))), np.zeros((len(videos), len(parts)))
    for r, part in kept:
        at = videos[r["task"]["video"]], parts[part]
        sums[at] += r["score"]
        counts[at] += 1
    times = np.random.default_rng(0).multinomial(len(videos), np.full(len(videos), 1 / len(videos)), size=draws).astype(float)  # [draws, videos]
    n = times @ counts
    there = n > 0  # a part may be missing from a draw
    means = np.divide(times @ sums, n, out=np.zeros(n.shape), where=there)
    return float((sums.sum(0) / counts.sum(0)).mean()), means.sum(1)[there.any(1)] / there.sum(1)[there.any(1)]


def interval(draws):
    """95% interval of bootstrap draws."""
    import numpy as np

    return [float(np.percentile(draws, q)) for q in (2.5, 97.5)] if len(draws) else None


def breakdown(task):
    """{name: labels} of one task."""
    tags = task.get("tags") or {"category": task.get("category") or task["type"]}
    return {name: label if isinstance(label, list) else [label] for name, label in tags.items()}


def summarise(records, bench=None, judged=False):
    """Records of one (benchmark, K, tools) -> dict of numbers; every record is in every denominator it belongs to."""
    n = len(records)
    value, draws = resampled(records, bench)
    out = {"n": n, "metric": headline_name(bench), "headline": value, "interval": interval(draws), "acc": sum(r["score"] for r in records) / n,
           "f_tau": sum(r["reward"]["fmt"] for r in records) / n, "kappa": sum(c["status"] == "ok" for r in records for c in r["calls"]) / n,
           "errors": {s: sum(r["status"] == s for r in records) for s in sorted({r["status"] for r in records}) if s != "ok"},
           "no_answer": sum(r["status"] == "ok" and r["extracted"] is None for r in records),
           "truncated": sum(r["status"] == "ok" and r["finish"][-1:] == ["length"] for r in records),
           "seconds_per_episode": sum(r["timing"].get("total_s", 0.0) for r in records) / n}
    if judged:
        asked = [r["judge"] for r in records if "judge" in r]
        failed = sum(v is None or v["verdict"] is None for v in asked)
        out["judge"] = {"asked": len(asked), "yes": sum(bool(v and v["verdict"]) for v in asked), "failed": failed}
        if failed:
            out["errors"]["judge_error"] = failed
    samples = {}
    for r in records:
        samples.setdefault(r["task"]["id"], []).append(r["score"])
    if max(map(len, samples.values())) > 1:
        out["samples"], out["pass@n"] = max(map(len, samples.values())), sum(map(max, samples.values())) / len(samples)
    kinds = {r["task"]["type"] for r in records}
    if kinds == {"grounding"}:
        out.update({f"R@{t}": sum(r["score"] >= t for r in records) / n for t in (0.3, 0.5, 0.7)})
    if len(kinds) > 1:
        out["by_type"] = {kind: mean_score([r for r in records if r["task"]["type"] == kind]) for kind in sorted(kinds)}
    groups = {}
    for r in records:
        for name, labels in breakdown(r["task"]).items():
            for label in labels:
                groups.setdefault(name, {}).setdefault(str(label), []).append(r)
    out["by"] = {name: {label: mean_score(some) for label, some in sorted(found.items())} for name, found in groups.items()}
    return out


def mean_score(records):
    return {"n": len(records), "acc": sum(r["score"] for r in records) / len(records)}


def refuse(results, allow_errors):
    """Take the headline of results with more than 1% failed items away -> lines that say why."""
    said = []
    for row in results:
        failed = sum(row["errors"].values())
        if failed > 0.01 * row["n"] and not allow_errors:
            row["headline"] = row["interval"] = None
            causes = ", ".join(f"{count} {cause}" for cause, count in row["errors"].items())
            said.append(f"{row.get('bench') or 'data'} at K {row['K']}, tools {row['tools']}: {failed} of {row['n']} items failed ({causes})")
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def shown_interval(row):
    return f"{row['headline']:.3f} [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]" if row.get("headline") is not None else "refused: errors"


def table(results, labels=12):
    """Results -> aligned text, a row per benchmark, K and mode, and rows of breakdowns with at most `labels` labels."""
    named = any(row.get("bench") for row in results)
    head = f"{'bench':<15} " if named else ""
    lines = [f"{head}{'K':>6} {'tools':>5} {'n':>5} {'headline [95%]':>22} {'acc':>6} {'f_tau':>6} {'kappa':>6} {'errors':>6} {'no answer':>9} {'cut off':>7}"]
    for row in results:
        head = f"{row.get('bench') or '-':<15} " if named else ""
        lines.append(f"{head}{row['K']!s:>6} {row['tools']:>5} {row['n']:>5} {shown_interval(row):>22} {row['acc']:>6.3f} {row['f_tau']:>6.3f} "
                     f"{row['kappa']:>6.2f} {sum(row['errors'].values()):>6} {row['no_answer']:>9} {row['truncated']:>7}")
        more = [f"{row['metric']} is the headline"] if row["metric"] != "accuracy" else []
        more += [f"{key} {row[key]:.3f}" for key in ("pass@n", "R@0.3", "R@0.5", "R@0.7") if key in row]
        more += [f"{kind} {c['acc']:.3f} of {c['n']}" for kind, c in row.get("by_type", {}).items()]
        if more:
            lines.append(" " * len(head) + "       " + ", ".join(more))
        for name, found in row["by"].items():
            for label, c in found.items() if 1 < len(found) <= labels else []:
                lines.append(" " * len(head) + f"{'':>12} {c['n']:>5} {c['acc']:>6.3f}  {name} {label}")
    return "\n".join(lines)


def read_summary(folder):
    try:
        with open(os.path.join(folder, "summary.json")) as f:
            return json.load(f)
    except (OSError, ValueError) as error:
        raise model.UserError(f"{folder}/summary.json: {error}; finish this evaluation first") from None


def compare(folders):
    """Finished evaluations -> (summary dict, text): one row per checkpoint and K, with tools and without side by side; then the
    difference of every one to the first, paired by item, with its interval."""
    rows, results = [], {}
    for folder in folders:
        summary = read_summary(folder)
        verdicts = argparse.Namespace(judge_url=None, judge_model=summary.get("judge_model"))  # those it was judged by; nobody is asked again
        name = os.path.basename(os.path.normpath(folder))
        for bench, k in dict.fromkeys((r.get("bench"), r["K"]) for r in summary["results"]):
            modes = {r["tools"]: r for r in summary["results"] if r["K"] == k and r.get("bench") == bench}
            on, off = modes.get("on"), modes.get("off")
            row = {"name": name, "bench": bench, "K": k, "n": (on or off)["n"]}
            if on:
                row.update(acc_tools=on["headline"], f_tau=on["f_tau"], kappa=on["kappa"], interval=on["interval"])
            if off:
                row.update(acc_no_tools=off["headline"])
            rows.append(row)
        for leaf in leaves(folder):
            for (task, k, mode, sample), record in graded(leaf, verdicts).items():
                results.setdefault((os.path.basename(leaf) if leaf != folder else None, k, mode), {}).setdefault(folder, {})[task, sample] = record

    def cell(value, width, digits):
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    lines = [f"{'checkpoint':<12} {'K':>6} {'n':>5} {'with tools [95%]':>22} {'no tools':>9} {'f_tau':>6} {'kappa':>6}"]
    for r in rows:
        tools = shown_interval({"headline": r["acc_tools"], "interval": r["interval"]}) if r.get("acc_tools") is not None else "-"
        lines.append(f"{r['name']:<12} {r['K']!s:>6} {r['n']:>5} {tools:>22} {cell(r.get('acc_no_tools'), 9, 3)} {cell(r.get('f_tau'), 6, 3)} "
                     f"{cell(r.get('kappa'), 6, 2)}" + (f"  {r['bench']}" if r["bench"] else ""))
    differences = []
    for (bench, k, mode), found in results.items():
        first = found.get(folders[0])
        for folder in folders[1:]:
            same = sorted(set(first or ()) & set(found.get(folder, ())), key=str)
            if not same:
                continue
            a, drawn_a = resampled([first[item] for item in same], bench)
            b, drawn_b = resampled([found[folder][item] for item in same], bench)
            if a is not None:
                differences.append({"bench": bench, "K": k, "tools": mode, "n": len(same), "name": os.path.basename(os.path.normpath(folder)),
                                    "minus": os.path.basename(os.path.normpath(folders[0])), "difference": b - a, "interval": interval(drawn_b - drawn_a)})
    if differences:
        lines += ["", "difference of the same items [95%]"]
    for d in differences:
        lines.append(f"{d['name']} - {d['minus']}".ljust(28) + f" {d['K']:>6} tools {d['tools']:<3} {d['difference']:+.3f} "
                     f"[{d['interval'][0]:+.3f}, {d['interval'][1]:+.3f}] {d['n']} items" + (f"  {d['bench']}" if d["bench"] else ""))
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "rows": rows, "differences": differences}, "\n".join(lines)


def paper_table():
    """Table 1 of the paper (arXiv 2605.20342), percent, in the order of splits(); its Charades-STA column is mIoU, None where it gives no number."""
    return {"GPT-4o": (71.9, 77.2, 66.7, 34.7, 64.6, 66.7, None), "Gemini 1.5 Pro": (75.0, 81.3, 64.4, 33.1, 74.3, 65.8, None),
            "Qwen2.5-VL-7B": (55.7, 64.5, 46.4, 32.2, 47.8, 65.4, 31.6), "Video-R1-7B": (57.6, 66.0, 57.4, 36.9, 61.6, 61.3, 25.4),
            "VideoChat-R1-7B": (50.4, 58.2, 49.2, 23.8, 58.7, 65.0, 31.5), "VideoRFT-7B": (58.5, 65.6, 55.1, 38.0, 44.9, 42.7, 18.7),
            "Time-R1-7B": (58.9, 66.2, 56.0, 38.2, 60.5, 63.4, 34.7), "ReWatch-R1-7B": (58.8, 65.0, 53.6, 38.5, 60.1, 59.8, 20.2),
            "Video-Thinker-7B": (61.9, 65.3, 56.0, None, 65.2, 64.5, 29.0), "Qwen3-VL-8B": (59.9, 68.4, 52.2, 33.1, 58.3, 68.0, 49.3),
            "Conan-7B": (55.5, 62.8, 54.5, 38.2, 59.2, 64.0, 25.4), "LongVT-RFT-7B": (59.5, 66.0, 54.7, 37.9, 59.4, 63.4, 23.4),
            "SAGE-7B": (44.1, 52.4, 37.4, 31.8, 49.7, 55.7, 28.9), "VideoZoomer-7B": (45.3, 48.3, 39.6, 22.9, 46.2, 61.6, None),
            "ParaVT-8B": (62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1)}


def markdown_table(folders):
    """Finished evaluations of benchmarks -> Markdown: ours in percent with intervals, then the paper's rows, labelled."""
    names = list(splits())
    lines = ["| system | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for folder in folders:
        summary = read_summary(folder)
        for k, mode in dict.fromkeys((r["K"], r["tools"]) for r in summary["results"]):
            found = {r.get("bench"): r for r in summary["results"] if (r["K"], r["tools"]) == (k, mode)}
            cells = []
            for name in names:
                row = found.get(name)
                value = row and row["headline"]
                cells.append("-" if row is None else "refused" if value is None else
                             f"{100 * value:.1f} [{100 * row['interval'][0]:.1f}, {100 * row['interval'][1]:.1f}]")
            lines.append(f"| {os.path.basename(os.path.normpath(folder))}, K {k}, tools {mode} (measured) | " + " | ".join(cells) + " |")
    for system, values in paper_table().items():
        lines.append(f"| {system} (the paper's) | " + " | ".join("-" if v is None else f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------


def leaves(folder):
    """Folders of records below an --out: itself, or one per benchmark."""
    below = [os.path.join(folder, name) for name in splits() if os.path.exists(os.path.join(folder, name, "tasks.jsonl"))]
    return below or [folder]


def finish(out, leaf_folders, args, checkpoint):
    """Records -> summary.json of every leaf and of the whole, tables. The one end of an evaluation, of --rescore and of a merge."""
    results, missing = [], 0
    for bench, leaf in leaf_folders:
        tasks = model.read_jsonl(os.path.join(leaf, "tasks.jsonl"))
        with open(os.path.join(leaf, "args.json")) as f:
            kept = json.load(f)
        done = graded(leaf, args)
        for k in kept["frames"]:
            for mode in kept["tools"]:
                items = [(t["id"], str(k), mode, sample) for t in tasks for sample in range(kept["samples"])]
                records = [done[item] for item in items if item in done]
                missing += len(items) - len(records)
                if records:
                    results.append({**({"bench": bench} if bench else {}), "K": k, "tools": mode, **summarise(records, bench, bool(args.judge_model))})
    if missing:
        raise model.UserError(f"{out}: {missing} items have no record yet; run the same command (or the other shards) first, then --rescore {out}")
    refused = refuse(results, args.allow_errors)
    summary = {"checkpoint": checkpoint, **({"judge_model": args.judge_model} if args.judge_model else {}), **{k: kept[k] for k in ("protocol", "protocol_set", "prompt_hash", "prompt_file", "served") if k in kept}, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "results": results}
    for bench, leaf in leaf_folders if len(leaf_folders) > 1 or leaf_folders[0][1] != out else []:
        model.write_atomic(os.path.join(leaf, "summary.json"), json.dumps({**summary, "results": [r for r in results if r.get("bench") == bench]}, indent=1))
    model.write_atomic(os.path.join(out, "summary.json"), json.dumps(summary, indent=1))
    print(model.printable(table(results)))
    print(json.dumps({"summary": os.path.join(out, "summary.json"),
                      "acc": {"/".join([*([r["bench"]] if "bench" in r else []), str(r["K"]), r["tools"]]): round(r["acc"], 4) for r in results}}))
    if refused:
        raise model.UserError("no headline above 1% failed items (--allow-errors prints it): " + "; ".join(refused))


def rescore(args):
    """Grade finished records again, without a model; several folders (shards) are merged into --out first."""
    folders = args.rescore
    for folder in folders:
        for leaf in leaves(folder):
            if not os.path.exists(os.path.join(leaf, "tasks.jsonl")):
                raise model.UserError(f"--rescore {folder}: no tasks.jsonl and records here")
    if len(folders) > 1:
        import shutil

        for number, folder in enumerate(folders):
            for leaf in leaves(folder):
                target = args.out if leaf == folder else os.path.join(args.out, os.path.basename(leaf))
                model.make_out(target)
                first = next(iter(read_records(leaf).values()), None)
                there = next(iter(read_records(target).values()), None)
                if first and there and first["digest"] != there["digest"]:
                    raise model.UserError(f"--rescore {folder}: its records are of another checkpoint or other settings than those of {folders[0]}")
                for name in os.listdir(leaf):
                    if name.startswith("records."):
                        shutil.copyfile(os.path.join(leaf, name), os.path.join(target, f"records.part{number}.{name[8:]}"))
                    elif name in ("tasks.jsonl", "args.json"):
                        shutil.copyfile(os.path.join(leaf, name), os.path.join(target, name))
    out = args.out if len(folders) > 1 else folders[0]
    with open(os.path.join(leaves(out)[0], "args.json")) as f:
        kept = json.load(f)
    finish(out, [(os.path.basename(leaf) if leaf != out else None, leaf) for leaf in leaves(out)], args, kept["ckpt"] or kept["model"])


def load_sets(args, ckpt, prompts):
    """--data or --bench -> [dict of one set: bench, tasks, agent, source, out, digest]."""
    sets = []
    for bench, root in zip(args.bench or [None], args.root or [None]):
        here = argparse.Namespace(**vars(args))
        if bench:
            tasks, notes = read_split(bench, root)
            here.video_root = args.video_root or root
            print(f"{bench}: " + ", ".join(f"{count} {what}" for what, count in notes.items()), flush=True)
        else:
            tasks = rollout.read_tasks(args.data)
        here.subtitles = args.subtitles or ("aligned" if bench == "videomme_wsub" else "none")
        agent, source = rollout.agent_settings(here, args.data)
        out = os.path.join(args.out, bench) if bench else args.out
        model.make_out(out)
        sets.append({"bench": bench, "tasks": tasks[: args.limit or None], "agent": agent, "source": source, "out": out,
                     "digest": settings_digest(args, ckpt, agent, tasks, prompts)})
    return sets


@model.watched
def main(watch):
    args = parse_args()
    if args.prepare:
        tasks, notes = read_split(args.bench[0], args.root[0])
        model.write_atomic(args.prepare, "".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{args.prepare}: " + ", ".join(f"{count} {what}" for what, count in notes.items()))
        return
    if args.table:
        print(model.printable(markdown_table(args.table)))
        return
    if args.rescore:
        rescore(args)
        return
    if args.compare:
        summary, text = compare(args.compare)
        model.make_out(args.out)
        model.write_atomic(os.path.join(args.out, "summary.json"), json.dumps(summary, indent=1))
        print(model.printable(text))
        return
    if args.judge_url:  # hours of episodes later would be late to find out
        rollout.OpenAIEngine(args.judge_url, args.judge_model).knock()
    modes, args.tools = args.tools, True
    ckpt = model.resolve_checkpoint(args.ckpt) if args.ckpt else None
    protocol, prompts = make_protocol(args)
    sets = load_sets(args, ckpt, prompts)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    part, parts = args.shard
    for one in sets:
        one["done"] = read_records(one["out"], one["digest"])
    if world > 1:
        import torch.distributed as dist

        model.start_process_group(args.patience)
        dist.barrier()  # every rank has read the records before any appends to them
    watch.begin(args.patience)
    kept = {**vars(args), "tools": modes, "prompt_hash": prompts}
    for one in sets if rank == 0 else []:
        model.write_atomic(os.path.join(one["out"], "tasks.jsonl"), "".join(json.dumps(task) + "\n" for task in one["tasks"]))
        model.write_atomic(os.path.join(one["out"], "args.json"), json.dumps(kept, indent=1))
    from tqdm import tqdm

    jobs, engine = [], None
    for one in sets:
        done = {item for item, record in one["done"].items() if record["status"] != "engine_error"}  # an endpoint that was down is asked again
        mine = one["tasks"][part::parts][rank::world]
        jobs += [(one, k, mode, [t for t in mine if any((t["id"], str(k), mode, s) not in done for s in range(args.samples))])
                 for k in args.frames for mode in modes]
    needed = any(todo for *_, todo in jobs)
    if world > 1:  # building vLLM is collective: all ranks build, or none does
        needed = model.any_rank(needed)
    if needed:
        largest = max(64 if k == "gated" else k for k in args.frames)
        codec = model.load_codec(ckpt, args.channel) if ckpt else None
        if codec:
            for one in sets:
                rollout.check_context(codec, one["tasks"], one["agent"], one["source"], largest)
        limits = argparse.Namespace(**{**vars(args), "frames": largest})
        if args.engine == "openai":
            engine = rollout.OpenAIEngine(args.base_url, args.model, args.api_key_env, args.workers, args.request_timeout, args.retries, args.think_prefix or bool(protocol.prefill),
                                          args.image_cap, args.tokens_field, args.send_temperature)
            engine.knock()
        else:
            engine = rollout.make_engine(args.engine, ckpt, codec, limits, args.seed, quiet=rank > 0)
        name = f"records.shard{part}of{parts}.rank{rank}.jsonl" if parts > 1 else f"records.rank{rank}.jsonl"
        with tqdm(total=sum(len(todo) for *_, todo in jobs) * args.samples, desc="episodes", disable=rank > 0 or args.quiet or None) as bar:
            for one, k, mode, todo in jobs:
                with open(os.path.join(one["out"], name), "a", encoding="utf-8") as f:
                    drop_torn_line(f.name)
                    for episode in rollout.run(engine, todo, replace(one["agent"], tools=mode == "on"), codec, one["source"], k, args.samples,
                                               threads=args.decode_threads, max_live=args.live or None, protocol=protocol):
                        f.write(json.dumps(record_of(episode, one["digest"], k, mode, args)) + "\n")
                        f.flush()
                        bar.update()
                        watch.beat()
    if world > 1:
        dist.barrier()
    for one in sets if rank == 0 and args.engine == "openai" and engine else []:  # the name asked for may stand for another model next month
        model.write_atomic(os.path.join(one["out"], "args.json"), json.dumps({**kept, "served": sorted(engine.served)}, indent=1))
    if engine:
        engine.close()
    if world > 1 and dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0 and parts > 1:
        print(f"shard {part} of {parts} is done; when all are: python eval.py --rescore {args.out} (or the folder of every shard, with --out)")
    elif rank == 0:
        finish(args.out, [(one["bench"], one["out"]) for one in sets], args, args.ckpt or args.model)


if __name__ == "__main__":
    model.run_main(main)
