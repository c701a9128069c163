"""
Tests of evaluation/benchmarks.py: python -m pytest tests/slow/test_benchmarks.py -q

Each split is built in its publisher's layout, with words of our own and the quirks that the real
files have, and read item by item.
"""
import json
import os

import pytest

import launch
from evaluation import benchmarks

NO_PYARROW = "pyarrow is not installed (requirements-dev.txt brings it)"


def put(root, path, content=""):
    """A file below root: text, JSON, JSONL (list of dicts to a .jsonl) or parquet."""
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if path.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow", reason=NO_PYARROW)
        from pyarrow import parquet

        parquet.write_table(content if isinstance(content, pyarrow.Table)
                            else pyarrow.Table.from_pylist(content), path)
        return
    with open(path, "w", encoding="utf-8") as f:
        f.write(content if isinstance(content, str) else json.dumps(content)
                if not path.endswith(".jsonl") else "".join(json.dumps(r) + "\n" for r in content))


def read(name, root):
    tasks, notes = benchmarks.read_split(name, str(root))
    assert {t.pop("split") for t in tasks} <= {name}
    # The question as its publisher writes it, for the protocol that asks so.
    assert all(t.pop("published", "?") for t in tasks)
    return {t["id"]: t for t in tasks}, notes


BUNS = {"video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Baking",
        "url": "u", "videoID": "ab_-1"}
VIDEOMME = [{**BUNS, "question_id": "001-1", "task_type": "Counting Problem", "answer": "C",
             "question": "How many buns?",
             "options": ["A. Two.", "B. A. A. Milne.", "C. 3", "D. As many as (A)."]},
            {**BUNS, "question_id": "001-2", "task_type": "OCR", "question": "Which?",
             "answer": "D", "options": ["A. Buns.", "B. Rolls.", "C. Bread.", "D. None."]},
            {**BUNS, "video_id": "002", "duration": "long", "domain": "Sports", "videoID": "gone",
             "sub_category": "Chess", "question_id": "002-1", "task_type": "OCR", "answer": "A",
             "question": "Who?", "options": ["A. I.", "B. You.", "C. He.", "D. We."]}]


def test_videomme(tmp_path):
    """Options come labelled, a subtitle file may lack, a video may end in .MP4 or .mkv."""
    put(tmp_path, "videomme/test-00000-of-00001.parquet", VIDEOMME)
    put(tmp_path, "data/ab_-1.MP4")
    put(tmp_path, "subtitle/ab_-1.srt", "1\n00:00:01,000 --> 00:00:02,000\nHello\n")
    tasks, notes = read("videomme", tmp_path)
    assert tasks["001-1"]["options"] == ["Two.", "A. A. Milne.", "3", "As many as (A)."]
    assert tasks["001-1"]["tags"]["task_type"] == "Counting Problem"
    assert tasks["002-1"]["video"] == "data/gone.mp4" and tasks["002-1"]["subtitles"] is None
    assert notes == {"items": 3, "published": 2700, "no video": 1, "no subtitles": 1,
                     "no usable answer": 0}


def longvideobench(**more):
    return {"video_id": "v", "id": "v_0", "video_path": "v.mp4", "subtitle_path": "v_en.json",
            "correct_choice": 1, "question": "Then what?", "duration": 190.2, "duration_group": 600,
            "question_category": "S2E", "topic_category": "Travel",
            "starting_timestamp_for_subtitles": 12.5, **more}


def test_longvideobench_parquet_pads_options(tmp_path):
    """option0 to option4, padded with "N/A" or nothing; correct_choice counts from 0."""
    rows = [longvideobench(option0="walk", option1="run", option2="swim", option3="N/A",
            option4="N/A"), longvideobench(id="v_1", correct_choice=2, option0="one", option1="",
            option2="three", option3="four", option4=None), longvideobench(id="v_2", option0="one",
            correct_choice=4, option1="two", **{f"option{n}": "N/A" for n in (2, 3, 4)})]
    put(tmp_path, "validation-00000-of-00001.parquet", rows)
    # another split of the same release
    put(tmp_path, "test-00000-of-00001.parquet",
        [longvideobench(id="hidden", correct_choice=0, option0="no")])
    put(tmp_path, "videos/v.mp4")
    put(tmp_path, "subtitles/v_en.json", "[]")
    tasks, notes = read("longvideobench", tmp_path)
    assert tasks["v_0"] == {"id": "v_0", "video": "videos/v.mp4", "question": "Then what?",
                            "type": "mcq", "answer": "B", "options": ["walk", "run", "swim"],
                            "subtitles": "subtitles/v_en.json", "subtitle_start": 12.5,
                            "tags": {"duration_group": 600, "question_category": "S2E",
                                     "topic_category": "Travel"}}
    assert (tasks["v_1"]["options"], tasks["v_1"]["answer"]) == (["one", "three", "four"], "B")
    assert tasks["v_2"]["answer"] == "" and notes["no usable answer"] == 1
    assert set(tasks) == {"v_0", "v_1", "v_2"}


LVBENCH = {"uid": "7", "question": "Who (if anyone) enters?\n(A) A cook\n(B) The king\n"
           "(C) A. Smith,\n   a sailor\n(D) Nobody", "answer": "C",
           "question_type": ["entity recognition", "reasoning"], "time_reference": "01:00-01:30"}


def test_lvbench(tmp_path):
    """Options stand in the question; a question has several types; a time may lack."""
    rows = [{**LVBENCH, "key": "Cm73", "type": "cartoon", "video_path": "Cm73.mp4", **more}
            for more in ({}, {"uid": "8", "answer": "A", "time_reference": None})]
    put(tmp_path, "data/train-00000-of-00001.parquet", rows)
    tasks, notes = read("lvbench", tmp_path)
    assert tasks["7"]["options"] == ["A cook", "The king", "A. Smith, a sailor", "Nobody"]
    assert tasks["7"]["question"] == "Who (if anyone) enters?"
    assert tasks["7"]["tags"]["question_type"] == ["entity recognition", "reasoning"]
    assert tasks["8"]["answer"] == "A" and notes["no subtitles"] == 0 and notes["no video"] == 2
    assert "evidence" not in tasks["8"]


def test_charades_as_text_and_as_half_precision(tmp_path):
    """24.3 in float16 is 24.296875; rows repeat; the text has no ending on its videos."""
    text, parquet = tmp_path / "text", tmp_path / "parquet"
    put(text, "charades_sta_test.txt",
        "3MSZA 24.3 30.4##person turn a light on.\n" * 2 + "XYZ 0.0 7.1##a - b ## c\n")
    pyarrow = pytest.importorskip("pyarrow", reason=NO_PYARROW)
    import numpy as np

    spans = [np.array(s, np.float16) for s in ([24.3, 30.4], [24.3, 30.4], [0.0, 7.1])]
    half = pyarrow.array(spans, type=pyarrow.list_(pyarrow.float16()))
    put(parquet, "data/test-00000-of-00001.parquet", pyarrow.table({
        "video": ["3MSZA.mp4", "3MSZA.mp4",
                  "XYZ.mp4"], "caption": ["person turn a light on.", "person turn a light on.",
                                          "a - b ## c"], "timestamp": half}))
    for root, name, folder in ((text, "3MSZA", "_480"), (parquet, "3MSZA.mp4", "")):
        put(root, f"Charades_v1{folder}/3MSZA.mp4")
        tasks, notes = read("charades", root)
        # An exact duplicate is an item of its own. The larger videos are named.
        assert len(tasks) == 3 and notes["no video"] == 1
        question = "When does this happen in the video: person turn a light on."
        assert tasks[f"{name}/24.3-30.4"] == {
            "id": f"{name}/24.3-30.4", "video": f"Charades_v1{folder}/3MSZA.mp4", "options": None,
            "question": question, "answer": [24.3, 30.4], "subtitles": None, "type": "grounding",
            "event": "person turn a light on.", "evidence": [[24.3, 30.4]], "tags": {}}
        assert tasks[f"{name}/24.3-30.4#2"]["answer"] == [24.3, 30.4]


def test_a_broken_parquet_and_a_missing_folder_are_named(tmp_path):
    pytest.importorskip("pyarrow", reason=NO_PYARROW)
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(launch.UserError, match="train-0.parquet: not readable"):
        benchmarks.read_split("lvbench", str(tmp_path))
    with pytest.raises(launch.UserError, match="no rows of lvbench"):
        benchmarks.read_split("lvbench", str(tmp_path / "none"))
