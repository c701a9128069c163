"""
evaluation/benchmarks.py (tests/slow/test_benchmarks.py): turns benchmarks, as their publishers ship
them, into tasks; and holds the paper's published results.

A new benchmark is an entry of `splits` and a function that turns one published row into tasks. The
column of the paper's Table 1, if there is one, goes into `paper_table`.

Departs from the authors' evaluation, which misreads MLVU's letters and MMVU's open questions. Here
every published row becomes a task. A task whose video is missing, or whose published answer is none
of the options, counts as wrong.

Reads a benchmark's folder: rows (parquet, JSON, JSONL, text), places of videos, subtitle files.
Writes no file; `python eval.py --bench mlvu --root MLVU_dev --prepare mlvu.jsonl` writes the tasks.
"""

import glob
import json
import os
import re
import string
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import launch
import rewards
from plumbing import data

# ------------------------------------------------------------------------------------------------
# The splits


@dataclass
class Split:
    """One benchmark: places of files below the root folder, how rows are read, the headline.

    The headline is the mean over parts of the mean over the items of a part.
    """

    hub: str  # name of the published data set
    items: int  # as published; 0 = not known to us
    rows: tuple  # patterns of row files, without ending; the first that matches is taken
    columns: tuple  # columns that every row must have
    read: callable  # (row, path of the file) -> iterator of tasks
    videos: tuple  # folders that may hold videos; "" is the root
    subtitles: tuple = ()  # folders that may hold subtitles; () = the benchmark has none
    folder: str = ""  # in a folder of all benchmarks; "" = its name
    default_subtitles: str = "none"  # of --set, unless it is given
    metric: str = "accuracy"  # name of the headline
    part: callable = lambda record: ""  # -> part of the headline; None = the item is in no part
    marked: str = ""  # a file without this column in any row is another task: left out, counted
    merged: bool = False  # tasks of one id are one item, as in the publisher's own mean


def splits():
    """name -> Split, in the order of the tables' columns."""
    videomme = Split(hub="lmms-lab/Video-MME", items=2700, read=videomme_tasks,
                     rows=("videomme/test-*", "test-*", "test"), videos=("data", "videos", ""),
                     columns=("question_id", "videoID", "question", "options", "answer"),
                     subtitles=("subtitle", "subtitles"))
    cgbench = Split(
        hub="CG-Bench/CG-Bench", items=3000, read=cgbench_tasks,
        rows=("cgbench_mini", "cg-bench-mini/train-*", "train-*"),
        columns=("qid", "video_uid", "question", "choices", "right_answer", "clue_intervals"),
        videos=("cg_videos_720p", "videos", ""), subtitles=("cg_subtitles", "subtitles"))
    timelens = {f"timelens_{name}": Split(
        hub="kcz358/timelens", items=0, read=timelens_tasks, rows=(f"{name}-*", name),
        columns=("video_path", "query", "span"), videos=("", "videos"), folder="timelens",
        metric="mIoU", merged=True) for name in ("charades", "activitynet", "qvhighlights")}
    return {
        "videomme": videomme,
        # The same items with the lines that are spoken at the frames' times.
        "videomme_wsub": replace(videomme, folder="videomme", default_subtitles="aligned"),
        "longvideobench": Split(
            hub="longvideobench/LongVideoBench", items=1337, read=longvideobench_tasks,
            rows=("lvb_val", "validation-*"),  # test rows are published without answers
            columns=("id", "video_path", "question", "correct_choice"),
            videos=("videos", ""), subtitles=("subtitles", "")),
        "lvbench": Split(
            hub="lmms-lab/LVBench", items=1549, read=lvbench_tasks,
            rows=("train-*", "video_info.meta"),  # the only split is called train
            columns=("key", "type"), videos=("", "videos", "all_videos")),
        "mlvu": Split(
            hub="sy1998/MLVU_dev", items=2174, read=mlvu_tasks,
            rows=("test-*", "json/[0-9]_*"),  # the Hub's parquet, or the first release
            columns=("question", "candidates", "answer"), videos=("", "videos", "video"),
            # The mean of the means of seven tasks, not the mean over items.
            metric="M-Avg", part=lambda record: record["task"]["tags"].get("task", ""),
            marked="candidates"),  # the first release has two tasks more, answered in sentences
        "mmvu": Split(
            hub="yale-nlp/MMVU", items=1000, read=mmvu_tasks,
            rows=("validation", "validation-*"),
            columns=("id", "video", "question_type", "question", "choices", "answer"),
            videos=("", "videos"),
            metric="accuracy, multiple choice",  # open answers stand beside the headline
            part=lambda record: "mc" if record["task"]["type"] == "mcq" else None),
        "charades": Split(
            hub="lmms-lab/charades_sta", items=3720, read=charades_tasks,
            rows=("charades_sta_test", "test-*"), columns=("video", "caption", "timestamp"),
            videos=("Charades_v1_480", "Charades_v1", "videos", ""), metric="mIoU"),
        # From here on the paper has no column.
        "cgbench": cgbench,
        # The same questions about what their publisher cut out of the video: clue_acc.
        "cgbench_clue": replace(cgbench, read=partial(cgbench_tasks, clue=True), subtitles=(),
                                folder="cgbench", videos=("cg_clue_videos",)),
        **timelens,
        "videomme_v2": Split(
            hub="MME-Benchmarks/Video-MME-v2", items=3200, read=videomme_v2_tasks,
            rows=("test", "test-*"),
            columns=("video_id", "question_id", "question", "options", "answer", "group_type",
                     "group_structure"),
            videos=("video", "videos", ""), subtitles=("subtitle",), metric="group score"),
        "video_holmes": Split(
            hub="TencentARC/Video-Holmes", items=1837, read=video_holmes_tasks,
            rows=("test_Video-Holmes",),
            columns=("video ID", "Question", "Options", "Question Type", "Answer"),
            videos=("videos_cropped", "videos", "video", ""))}


def headline_metric(name):
    """Name of a benchmark (None: no benchmark) -> (name of the headline, Split.part)."""
    split = splits()[name] if name else Split
    return split.metric, split.part


def paper_table():
    """system -> (its group, {split: percent}): Table 1 of the paper (arXiv 2605.20342), in its
    order. The Charades-STA column is mIoU. A split without a number is not in the row."""
    names = ("videomme", "videomme_wsub", "longvideobench", "lvbench", "mlvu", "mmvu", "charades")
    rows = """
        proprietary, from official reports
        GPT-4o              71.9    77.2    66.7    34.7    64.6    66.7    -
        Gemini 1.5 Pro      75.0    81.3    64.4    33.1    74.3    65.8    -
        instruct, direct answer
        Qwen2.5-VL-7B       55.7    64.5    46.4    32.2    47.8    65.4    31.6
        reasoning
        Video-R1-7B         57.6    66.0    57.4    36.9    61.6    61.3    25.4
        VideoChat-R1-7B     50.4    58.2    49.2    23.8    58.7    65.0    31.5
        VideoRFT-7B         58.5    65.6    55.1    38.0    44.9    42.7    18.7
        Time-R1-7B          58.9    66.2    56.0    38.2    60.5    63.4    34.7
        ReWatch-R1-7B       58.8    65.0    53.6    38.5    60.1    59.8    20.2
        Video-Thinker-7B    61.9    65.3    56.0    -       65.2    64.5    29.0
        agentic
        Qwen3-VL-8B         59.9    68.4    52.2    33.1    58.3    68.0    49.3
        Conan-7B            55.5    62.8    54.5    38.2    59.2    64.0    25.4
        LongVT-RFT-7B       59.5    66.0    54.7    37.9    59.4    63.4    23.4
        SAGE-7B             44.1    52.4    37.4    31.8    49.7    55.7    28.9
        VideoZoomer-7B      45.3    48.3    39.6    22.9    46.2    61.6    -
        ParaVT-8B           62.1    69.4    60.4    39.8    65.0    68.6    50.1"""
    table, group = {}, None
    for system, *cells in (re.split("  +", line.strip()) for line in rows.splitlines()[1:]):
        if cells:
            percents = {name: float(cell) for name, cell in zip(names, cells) if cell != "-"}
            table[system] = group, percents
        else:
            group = system
    return table


# ------------------------------------------------------------------------------------------------
# One row -> tasks. `complete_task` adds the common fields: type mcq, bare options, gold letter,
# paths.


def videomme_tasks(row, path):
    tags = ("duration", "domain", "sub_category", "task_type")
    yield {
        "id": row["question_id"], "question": row["question"],
        "video": row["videoID"] + ".mp4",  # or .MP4, .mkv: see locate
        "options": row["options"],  # labelled, "A. .."
        "answer": row["answer"],  # a letter
        "subtitles": row["videoID"] + ".srt",  # not every video has them
        "tags": {name: row.get(name) for name in tags}}


def longvideobench_tasks(row, path):
    # The JSON has `candidates`; the parquet has option0 to option4, padded with "N/A" or "".
    candidates = row.get("candidates") or [row.get(f"option{i}") for i in range(5)]
    # Pads may stand anywhere, so the published index is looked up among the options that are kept.
    indices = [i for i, text in enumerate(candidates) if text not in (None, "", "N/A")]
    gold, tags = row["correct_choice"], ("duration_group", "question_category", "topic_category")
    yield {
        "id": row["id"], "video": row["video_path"], "question": row["question"],
        "options": [candidates[i] for i in indices],
        "answer": string.ascii_uppercase[indices.index(gold)] if gold in indices else "",
        "subtitles": row.get("subtitle_path"),
        # Second of the subtitle file at which the video begins.
        "subtitle_start": row.get("starting_timestamp_for_subtitles") or 0.0,
        "tags": {name: row.get(name) for name in tags}}


def lvbench_tasks(row, path):
    # Flat rows, or one line per video with the questions under `qa`.
    for qa in row.get("qa") or [row]:
        for name in ("uid", "question", "answer", "question_type"):
            if name not in qa:
                columns = ", ".join(sorted(qa))
                raise launch.UserError(f"{path}: a question has no {name!r}; found {columns}")
        yield {
            "id": str(qa["uid"]), "question": qa["question"],
            "video": row.get("video_path") or row["key"] + ".mp4",
            "options": qa.get("options"),  # else in the question, on lines of their own
            "answer": qa["answer"],  # a letter
            "evidence": clock_spans(qa.get("time_reference")),
            # A question has several types, and counts under each.
            "tags": {"type": row["type"], "question_type": list(qa["question_type"])}}


def mlvu_tasks(row, path):
    kind = row.get("task_type") or row.get("question_type")
    kind = "needle" if kind == "findNeedle" else kind  # one task, two spellings
    # The first release has no ids, and the videos of json/2_needle.json lie in 2_needle.
    first = os.path.basename(os.path.dirname(path)) == "json"
    folder = os.path.splitext(os.path.basename(path))[0] if first else ""
    answer = row["answer"]  # a letter (Hub) or the text of a candidate (first release)
    if first and answer and answer in row["candidates"]:
        answer = string.ascii_uppercase[row["candidates"].index(answer)]
    yield {
        "id": row.get("question_id") or f"{kind}-{row.get('video')}",
        "video": os.path.join(folder, row.get("video_name") or row["video"]),
        "question": row["question"], "options": row["candidates"], "tags": {"task": kind},
        "answer": answer}


def mmvu_tasks(row, path):
    # The column holds an address on the Hub. The path below the root follows /main/.
    file = row["video"].partition("/main/")[2] or row["video"]
    subject = os.path.basename(os.path.dirname(file))
    choices = [text for _, text in sorted((row["choices"] or {}).items()) if text]
    mcq = row["question_type"] == "multiple-choice"  # open questions have five empty choices
    # No column names the subject; the folder of the video does.
    discipline = mmvu_disciplines().get(subject)
    yield {"id": row["id"], "video": file, "question": row["question"], "answer": row["answer"],
           "options": choices if mcq else None, "type": "mcq" if mcq else "open",
           "tags": {"kind": row["question_type"], "discipline": discipline, "subject": subject}}


def mmvu_disciplines():
    """subject -> discipline, as MMVU's paper groups them."""
    groups = {
        "Science": "Astronomy Biology Chemistry Electromagnetism Geography Materials_Science "
        "Mechanics Modern_Physics Neurobiology Thermodynamics",
        "Engineering": "Biomedical_Engineering Civil_Engineering Computer_Science "
        "Electrical_Engineering Electronics_and_Communication Mechanical_Engineering",
        "Healthcare": "Basic_Medicine Clinical_Medicine Dentistry Pharmacy Preventive_Medicine",
        "Humanities and Social Science": "Art Economics History Law Literature Management"}
    return {subject: group for group, names in groups.items() for subject in names.split()}


def charades_tasks(row, path):
    # The parquet holds float16 (24.3 is 24.296875); the publisher's text has one decimal.
    start, end = (round(float(second), 1) for second in row["timestamp"])
    video = row["video"] + ("" if "." in row["video"] else ".mp4")
    yield event_task(f"{row['video']}/{start:g}-{end:g}", video, row["caption"], start, end)


def timelens_tasks(row, path):
    start, end = map(float, row["span"][0])  # the publisher's mean knows the first one alone
    name = f"{row['video_path']}/{row['query']}/{json.dumps(row['span'])}"
    yield event_task(name, row["video_path"], row["query"], start, end)


def event_task(name, video, event, start, end):
    """The task to find an event. name: an id, as none is published."""
    return {
        "id": name, "video": video, "options": None, "type": "grounding",
        "question": f"When does this happen in the video: {event.strip()}",
        "event": event.strip(),  # for prompts that ask about an event in their own words
        "answer": [start, end], "evidence": [[start, end]], "tags": {}}


def cgbench_tasks(row, path, clue=False):
    # As VLMEvalKit groups lengths; a float, or text in some exports.
    minutes = float(row["duration"]) / 60
    length = next((f"{n - 10} ~ {n}" for n in range(10, 70, 10) if minutes <= n), "60+")
    yield {
        "id": str(row["qid"]),
        "video": f"{row['qid'] if clue else row['video_uid']}.mp4",
        "question": row["question"], "options": row["choices"],
        "answer": row["right_answer"],  # a letter
        "subtitles": None if clue else f"{row['video_uid']}.srt",  # not every video has them
        # Seconds of the whole video, which the clue video does not have.
        **({} if clue else {"evidence": row["clue_intervals"]}),
        "tags": {"duration": length, "domain": row.get("domain"),
                 "sub_category": row.get("sub_category")}}


def videomme_v2_tasks(row, path):
    names = ("group_type", "group_structure", "level", "second_head", "third_head")
    tags = {name: row.get(name) for name in names}
    group_score(tags, [])  # raises now for a group that cannot be scored
    position = int(row["question_id"].rpartition("-")[2])  # of the question in its group
    name = str(row["video_id"]).zfill(3)
    yield {
        "id": row["question_id"], "video": f"{name}.mp4", "question": row["question"],
        "options": split_options(row["options"])[1],  # one text of labelled lines
        "answer": row["answer"],  # a letter
        "subtitles": f"{name}.jsonl", "position": position, "tags": tags}


def video_holmes_tasks(row, path):
    # Parquet fills the options that a question lacks with nulls.
    options = {label: text for label, text in sorted(row["Options"].items()) if text}
    index = [*options].index(row["Answer"]) if row["Answer"] in options else None
    name = row["video ID"]
    yield {"id": "-".join(map(str, filter(None, (name, row.get("Question ID"))))),
           "video": f"{name}.mp4", "question": row["Question"], "options": [*options.values()],
           "answer": "" if index is None else string.ascii_uppercase[index],
           "tags": {"question_type": row["Question Type"]}}


def clock_spans(text):
    """"00:04-00:08" -> [[4.0, 8.0]]; [] if the text names no span."""
    clock = r"(\d+(?::\d+){1,2})"
    pairs = re.findall(rf"{clock}\s*-\s*{clock}", text or "")
    return [[*map(rewards.to_seconds, pair)] for pair in pairs]


def group_score(tags, right):
    """Video-MME-v2: tags of a group, and which of its four questions are answered right (in order,
    0 or 1) -> [0, 1]. In a group of logic only the right answers before the first wrong one count.
    Raises ValueError for another group."""
    right = [*right, 0, 0, 0, 0][:4]
    chain = [*right, 0].index(0)
    structure = json.loads(tags["group_structure"]) if tags["group_type"] == "logic" else None
    if tags["group_type"] == "relevance":
        return (sum(right) / 4) ** 2
    if structure == [1, 2, 3, 4]:
        return (chain / 4) ** 2
    # Of two questions in brackets, the second is worth as much as the first.
    if structure == [1, [2, 3], 4]:
        return (0, 1 / 12, 4 / 12, 7 / 12, 1)[chain + (chain == 1 and right[2])]
    if structure == [[1, 2], 3, 4]:
        return (0, 0.1, 0.2, 0.5, 1)[chain + (chain == 0 and right[1])]
    raise ValueError(f"group {tags['group_type']!r} {structure} is not known")


def apply_group_scores(records):
    """
    {item: graded record} -> the same, changed in place. A record of Video-MME-v2 gets the score of
    its group, and its own as "item_score", so that the mean over items is the mean over groups. It
    also gets the tags of the group's last question, which name the level of the group.
    """
    groups = {}
    for (_, *run), record in records.items():
        if record["task"].get("split") == "videomme_v2":
            groups.setdefault((record["task"]["video"], *run), []).append(record)
    for group in groups.values():
        right = [0] * 4  # a question that was not asked, because of --limit, is wrong
        for record in group:
            right[record["task"]["position"] - 1] = int(record["score"])
        tags = max(group, key=lambda record: record["task"]["position"])["task"]["tags"]
        for record in group:
            record.update(item_score=record["score"], score=group_score(tags, right),
                          task={**record["task"], "tags": tags})
    return records


# ------------------------------------------------------------------------------------------------
# A folder -> tasks


def read_split(name, root, again=True):
    """
    A benchmark's folder -> (tasks, {note: count}). Every published row becomes at least one
    task, unless it is empty.

    Notes: items, published, no video, no subtitles, no usable answer; files and empty rows that
    were left out, if any.
    Raises UserError for a missing folder, file or column, and for a row that cannot be read. The
    message names the place and the expected contents.
    """
    split = splits()[name]
    if not os.path.isdir(root):
        expected = f"expected {split.hub} as its publisher ships it"
        raise launch.UserError(f"--root {root}: no such folder; {expected}")
    files = row_files(root, split.rows)
    if not files:
        expected = f"expected {' or '.join(split.rows)} (.parquet, .json.., .txt) of {split.hub}"
        raise launch.UserError(f"--root {root}: no rows of {name}; {expected}")
    note_names = ("items", "published", "no video", "no subtitles", "no usable answer")
    tasks, counts, notes = [], Counter(), dict.fromkeys(note_names, 0)
    # One pass over all rows. A row that is not as expected ends the pass, because a reader would
    # take a benchmark that was read in part for the whole.
    for path in files:
        rows = charades_lines(path) if path.endswith(".txt") else read_rows(path)
        if split.marked and not any(row.get(split.marked) for row in rows):
            note = f"files without {split.marked} left out"
            notes[note] = notes.get(note, 0) + 1
            continue
        for number, row in enumerate(rows, 1):
            for column in split.columns:
                if column not in row:
                    detail = f"which {name} needs; found {', '.join(sorted(row))}"
                    raise launch.UserError(f"{path}: no column {column!r}, {detail}")
            for task in row_tasks(split, row, f"{path}, row {number}", path, root, notes):
                counts[task["id"]] += 1
                if split.merged and counts[task["id"]] > 1:
                    notes["equal rows merged"] = notes.get("equal rows merged", 0) + 1
                    continue
                task["split"] = name  # evaluation/paper.py has a prompt for each
                if counts[task["id"]] > 1:  # MLVU's first release has no ids, Charades-STA repeats
                    task["id"] += f"#{counts[task['id']]}"
                tasks.append(task)
    if not tasks:
        having = f" that have {split.marked!r}" if split.marked else ""
        raise launch.UserError(f"{', '.join(files)}: no rows of {name}{having}")
    # A few published answers are misprinted. If most are unusable, the column holds other data.
    if 2 * notes["no usable answer"] > len(tasks):
        unusable = f"{notes['no usable answer']} of {len(tasks)} answers"
        raise launch.UserError(f"{', '.join(files)}: {unusable} are none of their options")
    notes.update(items=len(tasks), published=split.items)
    if not split.items:
        del notes["published"]
    # Said, because a disk that holds the first folder may be away.
    notes |= {f"in {folder}": count for folder in split.videos[1:]
              if (count := sum(task["video"].startswith(f"{folder}/") for task in tasks))}
    # A second look: a disk may have come or gone meanwhile.
    if again and read_split(name, root, again=False)[0] != tasks:
        raise launch.UserError(f"--root {root}: files come or go; start again with all disks there")
    return tasks, notes


def row_tasks(split, row, location, path, root, notes):
    """Tasks of one row, complete. Raises UserError naming `location` for a value of the wrong kind,
    because a half-read task would be asked and graded like any other."""
    try:
        # MLVU's first release has a row in which only the video is filled in.
        tasks = [complete_task(task, split, root, notes) for task in split.read(row, path)
                 if not left_empty(task, notes)]
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise launch.UserError(f"{location}: not as expected ({error!r})") from None
    for task in tasks:
        if not task["question"]:
            raise launch.UserError(f"{location}: {task['id']} has no question")
        if task["type"] == "mcq" and len(task["options"]) < 2:
            raise launch.UserError(f"{location}: {task['id']} has no options to choose from")
    return tasks


def left_empty(task, notes):
    """Whether a published task has no question, no answer and no option; counts these."""
    texts = [task["question"], task["answer"], *(task["options"] or [])]
    empty = all(text is None or isinstance(text, str) and not text.strip() for text in texts)
    if empty:
        notes["empty rows left out"] = notes.get("empty rows left out", 0) + 1
    return empty


def complete_task(task, split, root, notes):
    """A reader's task -> with bare options, gold letter and paths; counts in `notes`."""
    # This order of keys is the tasks', and so part of the digest that records carry.
    task = {"id": None, "video": None, "type": "mcq", "subtitles": None, **task}
    if task["answer"] is None:
        raise ValueError("no answer")
    if task["type"] == "mcq":
        question, inline = split_options(task["question"])
        # A text would be read as its characters, a mapping as its labels.
        if task["options"] is not None and not isinstance(task["options"], list):
            raise TypeError("options are no list")
        options = data.bare_options(task["options"] or inline)
        if inline != options:  # statements that the question is about, or no labels at all
            question = task["question"].strip()
        # evaluation/paper.py shows the question and the options as they were published.
        if question != task["question"]:
            task["published"] = task["question"]
        if any(text != text.strip() for text in task["options"] or []):
            task["published_options"] = task["options"]
        by_letter, by_text = data.answer_letters(task["answer"], options)
        # Publishers give letters, so an option may itself be the text "A". mlvu_tasks knows texts.
        task.update(question=question, options=options, answer=by_letter or by_text)
    notes["no usable answer"] += task["answer"] == ""
    # A missing video keeps the expected path, and the episode ends in a counted error.
    path = locate_file(root, split.videos, task["video"])
    notes["no video"] += path is None
    task["video"] = path or os.path.join(split.videos[0], task["video"])
    if task["subtitles"]:
        task["subtitles"] = locate_file(root, split.subtitles, task["subtitles"])
    notes["no subtitles"] += task["subtitles"] is None and bool(split.subtitles)
    task["tags"] = {name: label for name, label in task["tags"].items() if label is not None}
    if "evidence" in task:
        task["evidence"] = [[*map(float, span)] for span in task["evidence"] or []
                            if None not in span and span[0] < span[1]]
        if not task["evidence"]:  # the question counts, and no window of it is judged
            del task["evidence"]
            notes["no evidence"] = notes.get("no evidence", 0) + 1
    return task


def row_files(root, patterns):
    """Files of the first pattern that matches any file, in the root or one folder below."""
    for pattern in patterns:
        files = []
        for folder in ("", "*"):
            for ending in (".parquet", ".jsonl", ".json", ".txt"):
                files += glob.glob(os.path.join(glob.escape(root), folder, pattern + ending))
        if files:
            return whole_shards(sorted(files))
    return []


def whole_shards(files):
    """The files. Raises UserError if "..-00000-of-00003" is there without the other parts."""
    for path in files:
        shard = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.\w+)", path, re.DOTALL)
        for index in range(int(shard[3]) if shard else 0):
            part = f"{shard[1]}{index:05d}{shard[2]}"
            if part not in files:
                raise launch.UserError(f"{part}: no such file, though there is {path}")
    return files


def locate_file(root, folders, name):
    """Path below the root of a video or a subtitle file, None if there is none."""
    stem, ending = os.path.splitext(name)
    endings, is_video = [ending], ending not in (".srt", ".json", ".jsonl")
    if is_video:  # shipped re-encoded, or in another spelling
        endings += [suffix for suffix in (".mp4", ".MP4", ".mkv", ".webm", "") if suffix != ending]
    for folder in folders:
        for ending in endings:
            path = os.path.join(root, folder, stem + ending)
            # A folder of frames. Of subtitles also a link to nothing: their disk is away.
            if launch.is_file(path, folders=is_video) or not is_video and os.path.islink(path):
                return os.path.join(folder, stem + ending)
    return None


def read_rows(path):
    """Rows of a parquet, JSON (a list) or JSONL file, as dicts. Raises UserError with the path."""
    try:
        if path.lower().endswith(".jsonl"):
            rows = launch.read_jsonl(path)
        elif path.lower().endswith(".parquet"):
            import pyarrow.parquet  # needed for parquet alone

            rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
        else:
            rows = launch.parse_json(launch.read_file(path).decode("utf-8-sig"))
    except ImportError:
        reason = "reading parquet needs pyarrow: pip install pyarrow"
        raise launch.UserError(f"{path}: {reason}") from None
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own are of these kinds
        reason = str(error).splitlines()[0]
        hint = "; give CSV or JSON in UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise launch.UserError(f"{path}: not readable ({reason}){hint}") from None
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise launch.UserError(f"{path}: expected a list of objects")
    return rows


def charades_lines(path):
    """Rows of Charades-STA's text file, `VIDEO START END##SENTENCE`. Raises UserError."""
    rows, text = [], launch.read_file(path).decode("utf-8-sig")
    for line in filter(None, map(str.strip, text.split("\n"))):
        match = re.fullmatch(r"(\S+) ([0-9.]+) ([0-9.]+)##(.*)", line)
        if not match:
            raise launch.UserError(f"{path}: a line is not `VIDEO START END##SENTENCE`")
        rows.append({"video": match[1], "timestamp": [match[2], match[3]], "caption": match[4]})
    return rows


# ------------------------------------------------------------------------------------------------
# Options and letters, as publishers write them


def split_options(question):
    """Question with options on lines of their own -> (question, bare options, [] without any)."""
    stem, options = [], []
    for line in question.split("\n"):
        label = re.match(r"\s*\(?([A-Z])[.):]\s+(.*)", line)
        # Only the next letter in order begins an option, so "I. Newton" in the text does not.
        if label and label[1] == string.ascii_uppercase[len(options)]:
            options.append(label[2].strip())
        elif options:
            options[-1] = f"{options[-1]} {line.strip()}".strip()  # an option of several lines
        else:
            stem.append(line)
    if len(options) < 2:
        return question.strip(), []
    return "\n".join(stem).strip(), options
