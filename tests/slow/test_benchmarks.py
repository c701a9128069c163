"""
Tests of evaluation/benchmarks.py: python -m pytest tests/slow/test_benchmarks.py -q

Splits in their publisher's parquet, with words of our own and the quirks that the real files have.
"""
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import launch
from evaluation import benchmarks


def put(root, path, rows=()):
    """A file below root: empty, or rows as parquet."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).touch()
    if rows:
        table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
        parquet.write_table(table, root / path)


def read(name, root):
    tasks, notes = benchmarks.read_split(name, str(root))
    assert {t.pop("split") for t in tasks} <= {name}
    # The question as its publisher writes it, for the protocol that asks so.
    assert all(t.pop("published", "?") for t in tasks)
    return {t["id"]: t for t in tasks}, notes


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
    put(tmp_path, "subtitles/v_en.json")
    tasks, notes = read("longvideobench", tmp_path)
    assert tasks["v_0"] == {"id": "v_0", "video": "videos/v.mp4", "question": "Then what?",
                            "type": "mcq", "answer": "B", "options": ["walk", "run", "swim"],
                            "subtitles": "subtitles/v_en.json", "subtitle_start": 12.5,
                            "tags": {"duration_group": 600, "question_category": "S2E",
                                     "topic_category": "Travel"}}
    assert (tasks["v_1"]["options"], tasks["v_1"]["answer"]) == (["one", "three", "four"], "B")
    assert tasks["v_2"]["answer"] == "" and notes["no usable answer"] == 1
    assert set(tasks) == {"v_0", "v_1", "v_2"}


def test_charades_as_text_and_as_half_precision(tmp_path):
    """24.3 in float16 is 24.296875; rows repeat; the text has no ending on its videos."""
    text, table = tmp_path / "text", tmp_path / "parquet"
    text.mkdir()
    (text / "charades_sta_test.txt").write_text(
        "3MSZA 24.3 30.4##person turn a light on.\n" * 2 + "XYZ 0.0 7.1##a - b ## c\n")
    spans = [np.array(s, np.float16) for s in ([24.3, 30.4], [24.3, 30.4], [0.0, 7.1])]
    half = pyarrow.array(spans, type=pyarrow.list_(pyarrow.float16()))
    put(table, "data/test-00000-of-00001.parquet", pyarrow.table({
        "video": ["3MSZA.mp4", "3MSZA.mp4", "XYZ.mp4"], "timestamp": half,
        "caption": ["person turn a light on.", "person turn a light on.", "a - b ## c"]}))
    for root, name, folder in ((text, "3MSZA", "_480"), (table, "3MSZA.mp4", "")):
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
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(launch.UserError, match="train-0.parquet: not readable"):
        benchmarks.read_split("lvbench", str(tmp_path))
    with pytest.raises(launch.UserError, match="no rows of lvbench"):
        benchmarks.read_split("lvbench", str(tmp_path / "none"))
