"""
Tests of evaluation/benchmarks.py: python -m pytest tests/test_benchmarks.py -q

A few rows of each split in its publisher's own layout, with words of our own, and the task that
one of them becomes. Quirks of the real files are in tests/slow/test_benchmarks.py.
"""
import json

import pytest

from evaluation import benchmarks

VIDEOMME = [{
    "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Baking",
    "videoID": "ab_-1", "question_id": f"001-{number}", "task_type": "Counting Problem",
    "question": "How many buns?", "options": ["A. Two.", "B. A. A. Milne.", "C. 3", "D. As (A)."],
    "answer": "C"} for number in (1, 2)]
QUESTION = {"question": "How many buns?", "options": ["Two.", "A. A. Milne.", "3", "As (A)."],
            "answer": "C", "type": "mcq"}
PLAIN = {"question": "Then what?", "options": ["walk", "run"], "answer": "B", "type": "mcq"}
# split -> (file, rows or text, files of videos and subtitles, a task, its fields)
SPLITS = {
    "videomme": ("test.jsonl", VIDEOMME, ["data/ab_-1.MP4"], "001-1",
                 {**QUESTION, "video": "data/ab_-1.MP4", "subtitles": None}),
    "videomme_wsub": ("test.jsonl", VIDEOMME, ["subtitle/ab_-1.srt"], "001-2",
                      {**QUESTION, "video": "data/ab_-1.mp4", "subtitles": "subtitle/ab_-1.srt"}),
    "longvideobench": ("lvb_val.json", [{
        "video_path": "v.mp4", "id": f"v_{n}", "subtitle_path": "v_en.json", "correct_choice": 1,
        "question": "Then what?", "candidates": ["walk", "run"], "duration_group": 600,
        "starting_timestamp_for_subtitles": 12.5} for n in (0, 1)], ["videos/v.mp4"], "v_1",
        {**PLAIN, "video": "videos/v.mp4", "subtitle_start": 12.5}),
    "lvbench": ("video_info.meta.jsonl", [{"key": "Cm73", "type": "cartoon", "qa": [
        {"uid": uid, "question": "Who (if anyone)?\n(A) A cook\n(B) A. Smith,\n   a sailor",
         "answer": "B", "question_type": ["reasoning"], "time_reference": time}
        for uid, time in ((7, "01:00-01:30"), (8, None))]}], ["Cm73.mp4"], "7",
        {"question": "Who (if anyone)?", "options": ["A cook", "A. Smith, a sailor"],
         "answer": "B", "type": "mcq", "video": "Cm73.mp4", "evidence": [[60.0, 90.0]]}),
    "mlvu": ("test-0.jsonl", [{
        "question_id": f"Q{n}", "video_name": "v.mp4", "question": "Then what?", "answer": "B",
        "candidates": ["walk", "run"], "task_type": "count"} for n in (0, 1)], ["videos/v.mp4"],
        "Q0", {**PLAIN, "video": "videos/v.mp4", "tags": {"task": "count"}}),
    "mmvu": ("validation.json", [{
        "id": f"validation_{n}", "video": "https://hub.invalid/x/resolve/main/videos/Art/0.mp4",
        "question_type": kind, "question": "Which style?", "answer": answer,
        "choices": {"A": first, "B": first and "Pop"}} for n, kind, answer, first in (
            (0, "multiple-choice", "B", "Dada"), (1, "open-ended", "Cubism", ""))],
        ["videos/Art/0.mp4"], "validation_1",
        {"question": "Which style?", "options": None, "answer": "Cubism", "type": "open",
         "video": "videos/Art/0.mp4"}),
    "charades": ("charades_sta_test.txt", "3MSZA 24.3 30.4##person turn a light on.\n"
                 "XYZ 0.0 7.1##a - b ## c\n", ["Charades_v1/3MSZA.mp4"], "3MSZA/24.3-30.4",
                 {"answer": [24.3, 30.4], "event": "person turn a light on.", "type": "grounding",
                  "video": "Charades_v1/3MSZA.mp4"})}


@pytest.mark.parametrize("name", list(benchmarks.splits()))
def test_published_rows_become_tasks(name, tmp_path):
    file, rows, media, task_id, fields = SPLITS[name]
    text = rows
    if file.endswith(".json"):
        text = json.dumps(rows)
    elif file.endswith(".jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / file).write_text(text)
    for path in media:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    tasks, notes = benchmarks.read_split(name, str(tmp_path))
    assert notes["items"] == 2 and notes["no usable answer"] == 0
    (task,) = [task for task in tasks if task["id"] == task_id]
    assert task["split"] == name and {key: task[key] for key in fields} == fields
