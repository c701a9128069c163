"""
Tests of evaluation/benchmarks.py: python -m pytest tests/all/test_benchmarks.py -q

Each split is built in its publisher's layout, with words of our own and the quirks that the real
files have, and read item by item.
"""
import json
import os

import pytest

import eval as evaluation
import launch
from evaluation import benchmarks, scores
from plumbing import data, subtitles

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
    # The question as its publisher writes it, for the protocol that asks so: see test_paper.py.
    assert all(t.pop("published", "?") for t in tasks)
    return {t["id"]: t for t in tasks}, notes


VIDEOMME = [{"video_id": "001", "duration": "short", "domain": "Knowledge",
             "sub_category": "Baking", "url": "u", "videoID": "ab_-1", "question_id": "001-1",
             "task_type": "Counting Problem", "question": "How many buns?",
             "options": ["A. Two.", "B. A. A. Milne.", "C. 3", "D. As many as (A)."],
             "answer": "C"},
            {"video_id": "001", "duration": "short", "domain": "Knowledge",
             "sub_category": "Baking", "url": "u", "videoID": "ab_-1", "question_id": "001-2",
             "task_type": "OCR", "question": "Which word?",
             "options": ["A. Buns.", "B. Rolls.", "C. Bread.", "D. None."], "answer": "D"},
            {"video_id": "002", "duration": "long", "domain": "Sports", "sub_category": "Chess",
             "url": "u", "videoID": "gone", "question_id": "002-1",
             "task_type": "OCR", "question": "Who?",
             "options": ["A. I.", "B. You.", "C. He.", "D. We."], "answer": "A"}]


@pytest.mark.parametrize("where", ["videomme/test-00000-of-00001.parquet", "test.jsonl",
                                   "test-00000-of-00001.json"])
def test_videomme(tmp_path, where):
    """Options come labelled, three questions share a video, a subtitle file may lack, a video may
    end in .MP4 or .mkv."""
    put(tmp_path, where, VIDEOMME)
    put(tmp_path, "data/ab_-1.MP4")
    put(tmp_path, "subtitle/ab_-1.srt", "1\n00:00:01,000 --> 00:00:02,000\nHello\n")
    tasks, notes = read("videomme", tmp_path)
    assert tasks["001-1"] == {"id": "001-1", "video": "data/ab_-1.MP4",
                              "question": "How many buns?", "type": "mcq", "answer": "C",
                              "options": ["Two.", "A. A. Milne.", "3", "As many as (A)."],
                              "subtitles": "subtitle/ab_-1.srt",
                              "tags": {"duration": "short", "domain": "Knowledge",
                                       "sub_category": "Baking", "task_type": "Counting Problem"}}
    assert tasks["002-1"]["video"] == "data/gone.mp4" and tasks["002-1"]["subtitles"] is None
    assert notes == {"items": 3, "published": 2700, "no video": 1, "no subtitles": 1,
                     "no usable answer": 0}
    assert read("videomme_wsub", tmp_path)[0] == tasks


def longvideobench(**more):
    return {"video_id": "v", "id": "v_0", "video_path": "v.mp4", "subtitle_path": "v_en.json",
            "correct_choice": 1, "question": "Then what?",
            "duration": 190.2, "duration_group": 600, "question_category": "S2E",
            "topic_category": "Travel",
            "starting_timestamp_for_subtitles": 12.5, **more}


def test_longvideobench_parquet_pads_options(tmp_path):
    """option0 to option4, padded with "N/A" or nothing; correct_choice counts from 0."""
    rows = [longvideobench(option0="walk", option1="run", option2="swim", option3="N/A",
                           option4="N/A"),
            longvideobench(id="v_1", correct_choice=2, option0="one", option1="", option2="three",
                           option3="four", option4=None),
            longvideobench(id="v_2", correct_choice=4, option0="one", option1="two", option2="N/A",
                           option3="N/A", option4="N/A")]
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


@pytest.mark.parametrize("name, text", [
    ("rows.json", '[{"video": "v", "timestamp": ["1.0", "2.0"], "caption": "x"}]'),
    ("rows.jsonl", '{"video": "v", "timestamp": ["1.0", "2.0"], "caption": "x"}'),
    ("rows.txt", "v 1.0 2.0##x")])
def test_a_byte_order_mark_is_passed_over(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    read_it = benchmarks.charades_lines if name.endswith(".txt") else benchmarks.read_rows
    assert read_it(str(path)) == [{"video": "v", "timestamp": ["1.0", "2.0"], "caption": "x"}]


def test_longvideobench_json_has_candidates(tmp_path):
    put(tmp_path, "lvb_val.json", [longvideobench(candidates=["walk", "run"])])
    put(tmp_path, "lvb_test_wo_gt.json", [longvideobench(id="hidden", candidates=["walk", "run"])])
    put(tmp_path, "v.mp4")
    tasks, _ = read("longvideobench", tmp_path)
    assert tasks["v_0"]["options"] == ["walk", "run"] and tasks["v_0"]["answer"] == "B"
    assert tasks["v_0"]["video"] == "v.mp4" and len(tasks) == 1


LVBENCH = {"uid": "7",
           "question": "Who (if anyone) enters?\n(A) A cook\n(B) The king\n"
                       "(C) A. Smith,\n   a sailor\n(D) Nobody", "answer": "C",
           "question_type": ["entity recognition", "reasoning"], "time_reference": "01:00-01:30"}


@pytest.mark.parametrize("layout", ["flat", "meta"])
def test_lvbench(tmp_path, layout):
    """Options stand in the question; a question has several types; rows are flat, or one line a
    video with its questions in `qa`."""
    second = {**LVBENCH, "uid": 8, "answer": "A", "time_reference": None}
    if layout == "flat":
        put(tmp_path, "data/train-00000-of-00001.parquet",
            [{**q, "uid": str(q["uid"]), "key": "Cm73", "type": "cartoon", "video_path": "Cm73.mp4"}
                                                            for q in (LVBENCH, second)])
    else:
        put(tmp_path, "video_info.meta.jsonl",
            [{"key": "Cm73", "type": "cartoon", "video_info": {"fps": 25},
              "qa": [LVBENCH, second]}])
    put(tmp_path, "Cm73.mp4")
    tasks, notes = read("lvbench", tmp_path)
    assert tasks["7"] == {"id": "7", "video": "Cm73.mp4", "question": "Who (if anyone) enters?",
                          "type": "mcq", "answer": "C", "subtitles": None,
                          "options": ["A cook", "The king", "A. Smith, a sailor", "Nobody"],
                          "evidence": [[60.0, 90.0]],
                          "tags": {"type": "cartoon",
                                   "question_type": ["entity recognition", "reasoning"]}}
    assert tasks["8"]["answer"] == "A" and notes["no subtitles"] == 0 and notes["no video"] == 0
    assert "evidence" not in tasks["8"] and notes["no evidence"] == 1


@pytest.mark.parametrize("inline", [True, False])
def test_lvbench_with_a_column_of_options(tmp_path, inline):
    """Labelled or bare; the question may repeat them, and is asked without."""
    question = LVBENCH["question"] if inline else "Who (if anyone) enters?"
    options = ["(A) A cook", "(B) The king", "(C) A. Smith, a sailor", "(D) Nobody"]
    put(tmp_path, "data/train-00000-of-00001.parquet", [
        {**LVBENCH, "question": question, "options": options, "key": "Cm73", "type": "cartoon",
         "video_path": "Cm73.mp4"}])
    tasks, notes = read("lvbench", tmp_path)
    assert tasks["7"]["options"] == ["A cook", "The king", "A. Smith, a sailor", "Nobody"]
    assert tasks["7"]["question"] == "Who (if anyone) enters?" and tasks["7"]["answer"] == "C"
    assert notes["no usable answer"] == 0


STATEMENTS = "Which order is right?\nA. he runs\nB. he falls\nC. he sings\nChoose one."
ORDERS = ["A-B-C", "B-A-C", "C-B-A", "A-C-B"]


@pytest.mark.parametrize("bench, file, row", [
    ("videomme", "test", {"question_id": "1", "videoID": "v", "question": STATEMENTS, "answer": "B",
                          "options": [f"{a}. {o}" for a, o in zip("ABCD", ORDERS)]}),
    ("longvideobench", "lvb_val", {"id": "1", "video_path": "v.mp4", "question": STATEMENTS,
                                   "candidates": ORDERS, "correct_choice": 1}),
    ("lvbench", "train-0", {"key": "v", "type": "x", "uid": "1", "question": STATEMENTS,
                            "question_type": [], "options": ORDERS, "answer": "B"}),
    ("mlvu", "test-0", {"video": "v.mp4", "question": STATEMENTS, "candidates": ORDERS,
                        "answer": "B"}),
    ("mmvu", "validation", {"id": "1", "video": "x/main/videos/Art/1.mp4", "answer": "B",
                            "question_type": "multiple-choice", "question": STATEMENTS,
                            "choices": dict(zip("ABCDE", [*ORDERS, "none"]))}),
    ("cgbench", "cgbench_mini", {"qid": 1, "video_uid": "v", "question": STATEMENTS,
                                 "choices": ORDERS, "right_answer": "B",
                                 "clue_intervals": [[1, 2]], "duration": 60}),
    ("videomme_v2", "test", {"video_id": "001", "question_id": "001-1", "question": STATEMENTS,
                             "options": "\n".join(f"{a}. {o}" for a, o in zip("ABCD", ORDERS)),
                             "answer": "B", "group_type": "relevance", "group_structure": None}),
    ("video_holmes", "test_Video-Holmes", {
        "video ID": "v", "Question": STATEMENTS, "Options": dict(zip("ABCD", ORDERS)),
        "Question Type": "TCI", "Answer": "B"})], ids=lambda value: value if "_" in value else "")
def test_labelled_statements_of_a_question_are_no_options(bench, file, row, tmp_path):
    """They stay, with all lines after them, if the options stand in a column of their own."""
    put(tmp_path, f"{file}.jsonl", [row])
    ((task,), _) = (list(part.values()) for part in read(bench, tmp_path))
    assert task["question"] == STATEMENTS
    assert task["options"][:4] == ORDERS and task["answer"] == "B"


def test_white_space_of_a_published_question_and_its_options_is_kept_beside_the_task(tmp_path):
    """Our prompts show them trimmed. The authors' driver shows them as they are published."""
    row = {"id": "1", "video": "x/main/videos/Art/1.mp4", "question_type": "multiple-choice",
           "question": " Which? \n", "choices": {"A": "a cat ", "B": "a dog"}, "answer": "B"}
    put(tmp_path, "validation.jsonl", [row, {**row, "id": "2", "question": "Which?",
                                             "choices": {"A": "a cat", "B": "a dog"}}])
    (spaced, plain), _ = benchmarks.read_split("mmvu", str(tmp_path))
    assert spaced["question"] == "Which?" and spaced["options"] == ["a cat", "a dog"]
    assert spaced["published"] == " Which? \n"
    assert spaced["published_options"] == ["a cat ", "a dog"]
    assert not {"published", "published_options"} & set(plain)


def test_mlvu_from_the_hub(tmp_path):
    """A letter as answer, options in the question and in `candidates`."""
    put(tmp_path, "mlvu/test-00000-of-00001.parquet", [
        {"video_name": "needle_32.mp4", "duration": 467.98,
         "question": "What does the hand do?\n(A) Waves\n(B) Points",
         "candidates": ["Waves", "Points"],
         "answer": "B", "task_type": "needle", "question_id": "Q0"},
        {"video_name": "count_1.mp4", "duration": 60.0, "question": "How many?\n(A) 2\n(B) 1",
         "candidates": ["2", "1"], "answer": "A", "task_type": "count",
         "question_id": "Q1"}])
    put(tmp_path, "needle_32.mp4")
    tasks, notes = read("mlvu", tmp_path)
    assert tasks["Q0"] == {"id": "Q0", "video": "needle_32.mp4",
                           "question": "What does the hand do?", "type": "mcq",
                           "options": ["Waves", "Points"],
                           "answer": "B", "subtitles": None, "tags": {"task": "needle"}}
    assert tasks["Q1"]["answer"] == "A" and notes["no video"] == 1


def test_mlvu_as_first_released(tmp_path):
    """A file and a video folder per task, the answer as text, another spelling of a task, texts
    that match no candidate or two."""
    put(tmp_path, "json/2_needle.json", [
        {"video": "needle_1.mp4", "duration": 100, "question": "What falls?",
         "candidates": ["A cup", "A hat"], "answer": "A hat", "question_type": "findNeedle"},
        {"video": "needle_1.mp4", "duration": 100, "question": "Who sings?",
         "candidates": ["A boy", "A girl"], "answer": "A gril", "question_type": "findNeedle"}])
    put(tmp_path, "json/6_anomaly_reco.json", [
        {"video": "a.mp4", "duration": 9, "question": "What?",
         "candidates": ["Fire", "Arson", "Arson"], "answer": "Arson",
         "question_type": "anomaly_reco"},
        # As row 27 of its 7_topic_reasoning.json: nothing but a video.
        {"video": "b.mp4", "duration": 9, "question": "", "candidates": ["", ""], "answer": "",
         "question_type": "anomaly_reco"}])
    put(tmp_path, "video/2_needle/needle_1.mp4")
    tasks, notes = read("mlvu", tmp_path)
    first = tasks["needle-needle_1.mp4"]
    assert tasks["needle-needle_1.mp4#2"]["answer"] == ""
    assert first["video"] == "video/2_needle/needle_1.mp4" and first["answer"] == "B"
    assert first["tags"] == {"task": "needle"}
    assert tasks["anomaly_reco-a.mp4"]["answer"] == "B" and len(tasks) == 3
    assert notes["empty rows left out"] == 1 and notes["items"] == 3
    assert notes["no usable answer"] == 1 and notes["no video"] == 1


def test_mlvu_as_first_released_has_two_tasks_without_candidates(tmp_path):
    """Nine files; in the last two the answer is a text. They are left out, counted, and no other
    file may lack candidates for it."""
    names = ("plotQA", "needle", "ego", "count", "order", "anomaly_reco", "topic_reasoning")
    for number, name in enumerate(names, 1):
        put(tmp_path, f"json/{number}_{name}.json", [
            {"video": "v.mp4", "duration": 9, "question": "What?", "candidates": ["Fire", "Rain"],
             "answer": "Rain", "question_type": name}])
    for number, name in ((8, "sub_scene"), (9, "summary")):
        put(tmp_path, f"json/{number}_{name}.json", [
            {"video": "v.mp4", "duration": 9, "question": "Describe it.", "answer": "It rains.",
             "question_type": name}] * 3)
    tasks, notes = read("mlvu", tmp_path)
    assert {task["tags"]["task"] for task in tasks.values()} == {*names}
    assert len(tasks) == notes["items"] == 7 and notes["files without candidates left out"] == 2
    row = {"video": "v.mp4", "question": "What?", "answer": "Rain", "question_type": "ego"}
    put(tmp_path, "json/3_ego.json", [{**row, "candidates": ["Fire", "Rain"]}, row])
    with pytest.raises(launch.UserError, match="3_ego.json: no column 'candidates'"):
        benchmarks.read_split("mlvu", str(tmp_path))


def test_mmvu(tmp_path):
    """The video is an address, five choices or five empty ones, no subject of its own."""
    empty = dict.fromkeys("ABCDE", "")
    put(tmp_path, "validation.json", [
        {"id": "validation_0",
         "video": "https://hub.invalid/datasets/x/resolve/main/videos/Art/0.mp4",
         "question_type": "multiple-choice",
         "metadata": {"subject": "Art"}, "question": "Which style?",
         "choices": {"A": "Cubism", "B": "Baroque", "C": "Pop", "D": "Dada", "E": "None"},
         "answer": "E"},
        {"id": "validation_1",
         "video": "https://hub.invalid/datasets/x/resolve/main/videos/Computer_Science/3.mp4",
         "question_type": "open-ended",
         "metadata": {}, "question": "Which sort?", "choices": empty, "answer": "Bubble sort"}])
    put(tmp_path, "videos/Art/0.mp4")
    tasks, notes = read("mmvu", tmp_path)
    assert tasks["validation_0"] == {"id": "validation_0", "video": "videos/Art/0.mp4",
                                     "question": "Which style?", "type": "mcq", "subtitles": None,
                                     "options": ["Cubism", "Baroque", "Pop", "Dada", "None"],
                                     "answer": "E",
                                     "tags": {"kind": "multiple-choice",
                                              "discipline": "Humanities and Social Science",
                                              "subject": "Art"}}
    assert tasks["validation_1"]["type"] == "open" and tasks["validation_1"]["options"] is None
    assert tasks["validation_1"]["answer"] == "Bubble sort"
    assert tasks["validation_1"]["tags"]["discipline"] == "Engineering" and notes["no video"] == 1
    assert len(benchmarks.mmvu_disciplines()) == 27


def test_charades_as_text_and_as_half_precision(tmp_path):
    """24.3 in float16 is 24.296875; rows repeat; the text has no ending on its videos."""
    text, parquet = tmp_path / "text", tmp_path / "parquet"
    put(text, "charades_sta_test.txt",
        "3MSZA 24.3 30.4##person turn a light on.\n" * 2 + "XYZ 0.0 7.1##a - b ## c\n")
    pyarrow = pytest.importorskip("pyarrow", reason=NO_PYARROW)
    import numpy as np

    half = pyarrow.array([np.array(s, dtype=np.float16)
                          for s in ([24.3, 30.4], [24.3, 30.4], [0.0, 7.1])],
                         type=pyarrow.list_(pyarrow.float16()))
    put(parquet, "data/test-00000-of-00001.parquet", pyarrow.table({
        "video": ["3MSZA.mp4", "3MSZA.mp4",
                  "XYZ.mp4"], "caption": ["person turn a light on.", "person turn a light on.",
                                          "a - b ## c"], "timestamp": half}))
    for root in (text, parquet):
        put(root, "Charades_v1_480/3MSZA.mp4")
    for root, name in ((text, "3MSZA"), (parquet, "3MSZA.mp4")):
        tasks, notes = read("charades", root)
        # An exact duplicate is an item of its own.
        assert len(tasks) == 3 and notes["no video"] == 1
        question = "When does this happen in the video: person turn a light on."
        assert tasks[f"{name}/24.3-30.4"] == {
            "id": f"{name}/24.3-30.4", "video": "Charades_v1_480/3MSZA.mp4", "type": "grounding",
            "options": None, "question": question, "answer": [24.3, 30.4], "subtitles": None,
            "event": "person turn a light on.", "evidence": [[24.3, 30.4]], "tags": {}}
        assert tasks[f"{name}/24.3-30.4#2"]["answer"] == [24.3, 30.4]


CGBENCH = {"qid": 7, "video_uid": "ab", "question": "Which bun?", "choices": ["Two", "Red", "3"],
           "duration": 612.5, "domain": "GUI", "sub_category": "Time Perception",
           "right_answer": "B", "clue_intervals": [[4, 9.5], [30, 31]]}


def test_cgbench_and_the_films_of_its_clues(tmp_path):
    put(tmp_path, "cgbench_mini.json", [CGBENCH, {**CGBENCH, "qid": 8, "clue_intervals": []}])
    put(tmp_path, "cg_videos_720p/ab.mp4")
    put(tmp_path, "cg_clue_videos/7.mp4")
    put(tmp_path, "cg_subtitles/ab.srt")
    tasks, notes = read("cgbench", tmp_path)
    tags = {"duration": "10 ~ 20", "domain": "GUI", "sub_category": "Time Perception"}
    assert tasks["7"] == {"id": "7", "video": "cg_videos_720p/ab.mp4", "type": "mcq",
                          "question": "Which bun?", "options": ["Two", "Red", "3"], "answer": "B",
                          "subtitles": "cg_subtitles/ab.srt",
                          "evidence": [[4.0, 9.5], [30.0, 31.0]], "tags": tags}
    assert "evidence" not in tasks["8"] and notes["no evidence"] == 1 and notes["published"] == 3000
    clue, notes = read("cgbench_clue", tmp_path)
    assert clue["7"]["video"] == "cg_clue_videos/7.mp4" and notes["no video"] == 1
    assert "evidence" not in clue["7"] and clue["7"]["subtitles"] is None


def test_timelens_knows_the_first_span_and_merges_equal_rows(tmp_path):
    row = {"video_path": "c/x.mp4", "query": "it falls", "span": [[2, 8], [9, 10]]}
    put(tmp_path, "charades-00000-of-00001.jsonl", [row, row, {**row, "span": [[3, 8]]}])
    put(tmp_path, "qvhighlights-00000-of-00001.jsonl", [row])
    put(tmp_path, "c/x.mp4")
    tasks, notes = read("timelens_charades", tmp_path)
    assert notes == {"items": 2, "no video": 0, "no subtitles": 0, "no usable answer": 0,
                     "equal rows merged": 1}
    first, _ = tasks.values()
    assert (first["answer"], first["evidence"], first["event"]) == ([2, 8], [[2, 8]], "it falls")
    assert len(read("timelens_qvhighlights", tmp_path)[0]) == 1


V2 = [{"video_id": 1, "question_id": f"001-{n}", "question": "Who?", "answer": "H",
       "options": "\n".join(f"{letter}. Mr {letter}" for letter in "ABCDEFGH"),
       "group_type": "logic", "group_structure": "[1, [2, 3], 4]", "level": n,
       "second_head": "s", "third_head": None} for n in (1, 2, 3, 4)]


def test_video_mme_v2(tmp_path):
    put(tmp_path, "test.jsonl", V2)
    put(tmp_path, "video/001.mp4")
    put(tmp_path, "subtitle/001.jsonl", [{"text": "Hello", "start_time": 0.5, "end_time": 1.0},
                                         {"text": "you", "start_time": 1.0, "end_time": 1.5}])
    tasks, notes = read("videomme_v2", tmp_path)
    assert tasks["001-2"] == {
        "id": "001-2", "video": "video/001.mp4", "type": "mcq", "question": "Who?", "answer": "H",
        "options": [f"Mr {letter}" for letter in "ABCDEFGH"], "place": 2,
        "subtitles": "subtitle/001.jsonl",
        "tags": {"group_type": "logic", "group_structure": "[1, [2, 3], 4]", "level": 2,
                 "second_head": "s"}}
    assert subtitles.task_subtitles(tasks["001-2"], [0.7], str(tmp_path), "aligned") == "Hello"
    put(tmp_path, "test.jsonl", [{**V2[0], "group_structure": "[1, 2]"}])
    with pytest.raises(launch.UserError, match="row 1: not as expected.*is not known"):
        benchmarks.read_split("videomme_v2", str(tmp_path))


def test_a_group_of_video_mme_v2_has_one_score_and_its_last_question_s_level(tmp_path):
    put(tmp_path, "test.jsonl", V2)
    tasks = benchmarks.read_split("videomme_v2", str(tmp_path))[0]
    records = {(task["id"], "64", "on", 0): {"task": task, "score": score}
               for task, score in zip(tasks, (1.0, 0.0, 1.0, 1.0))}
    del records["001-4", "64", "on", 0]  # of a run with --limit
    found = benchmarks.credited(records).values()
    assert [record["score"] for record in found] == [pytest.approx(4 / 12)] * 3
    assert [record["right"] for record in found] == [1.0, 0.0, 1.0]
    assert {record["task"]["tags"]["level"] for record in found} == {3}
    assert tasks[0]["tags"]["level"] == 1  # the task itself stays as it is


def test_video_holmes(tmp_path):
    row = {"video ID": "x1", "Question": "Why?", "Question Type": "TCI", "Question ID": 4,
           "Options": {"A": "a", "B": "b", "D": "d", "C": None}, "Answer": "D"}
    put(tmp_path, "test_Video-Holmes.json", [row])
    put(tmp_path, "videos_cropped/x1.mp4")
    tasks, notes = read("video_holmes", tmp_path)
    assert tasks == {"x1-4": {
        "id": "x1-4", "video": "videos_cropped/x1.mp4", "type": "mcq", "question": "Why?",
        "options": ["a", "b", "d"], "answer": "C", "subtitles": None,
        "tags": {"question_type": "TCI"}}}
    assert notes["no video"] == 0


@pytest.mark.parametrize("options, bare", [
    (["A. Apples.", "B. B. King"], ["Apples.", "B. King"]), (["(A) x", "(B) y"], ["x", "y"]),
    (["A) x", "B) y"], ["x", "y"]), (["A: x", "B: y"], ["x", "y"]),
    (["A. Milne", "Kafka"], ["A. Milne", "Kafka"]),  # a name, not a label
    (["B. x", "A. y"], ["B. x", "A. y"]), (["A.M.", "B.C."], ["A.M.", "B.C."]),
    ([" x ", "y"], ["x", "y"])])
def test_labels_go_only_where_every_option_has_its_own(options, bare):
    assert data.bare_options(options) == bare


@pytest.mark.parametrize("answer, letter", [("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"),
                                            ("two", "B"), ("A", "A"), ("E", ""), ("three", "C"),
                                            ("thr", "")])
def test_the_gold_letter_comes_from_a_letter_a_label_or_a_text(answer, letter):
    assert benchmarks.answer_letter(answer, ["one", "two", "three", "three"]) == letter


@pytest.mark.parametrize("name, files, why", [
    ("videomme", {}, "expected videomme/test-*"),
    # its only split is called train
    ("lvbench", {"data/test-0.parquet": [{"x": 1}]}, "no rows of lvbench"),
    ("videomme", {"test.jsonl": [{"question_id": "1"}]}, "no column 'videoID'"),
    ("lvbench", {"video_info.meta.jsonl": [{"key": "a", "type": "tv", "qa": [{"uid": 1}]}]},
     "no 'question'"),
    ("mmvu", {"validation.json": "{not json"}, "validation.json"),
    ("mmvu", {"validation.json": {"a": 1}}, "expected a list"),
    ("charades", {"charades_sta_test.txt": "3MSZA 24.3##no end\n"}, "VIDEO START END"),
    ("mlvu", {"json/1_plotQA.json": []}, "no rows")])
def test_a_wrong_folder_is_one_line_that_says_what_was_expected(name, files, why, tmp_path):
    for path, content in files.items():
        put(tmp_path, path, content)
    with pytest.raises(launch.UserError) as error:
        benchmarks.read_split(name, str(tmp_path))
    assert why in str(error.value) and "\n" not in str(error.value)


VIDEOMME_ROW = VIDEOMME[0]
MLVU_ROW = {"video": "v.mp4", "question": "What?", "candidates": ["Fire", "Rain"], "answer": "Rain"}


@pytest.mark.parametrize("name, files, why", [
    # options neither in the question nor in a column; one alone; a text; a mapping; a gap
    ("lvbench", {"train-0.jsonl": [{**LVBENCH, "question": "Who?", "key": "a", "type": "tv"}]},
     "7 has no options"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "options": ["A. Two."]}]}, "has no options"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "options": "A. Two. B. One."}]}, "no list"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "options": {"A": "1", "B": "2"}}]}, "no list"),
    ("videomme", {"test.jsonl": [VIDEOMME[1], {**VIDEOMME_ROW, "options": ["1", None]}]}, "row 2"),
    # a column that is there and empty, or of another kind
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "question": None}]}, "row 1"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "question": " "}]}, "001-1 has no question"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "videoID": None}]}, "row 1"),
    ("videomme", {"test.jsonl": [{**VIDEOMME_ROW, "answer": None}]}, "no answer"),
    ("charades", {"test-0.jsonl": [{"video": "a", "caption": "b", "timestamp": [1.0]}]}, "row 1"),
    ("mmvu", {"validation.json": [{"id": "v", "video": "a", "question_type": "multiple-choice",
                                   "question": "?", "choices": None, "answer": "A"}]},
     "v has no options"),
    # answers that no option has
    ("mlvu", {"json/1_plotQA.json": [MLVU_ROW, *[{**MLVU_ROW, "answer": 7}] * 2]},
     "2 of 3 answers"),
    ("mlvu", {"json/8_sub_scene.json": [{"question": "Describe it.", "answer": "It rains."}]},
     "that have 'candidates'"),
    # a part of the rows
    ("videomme", {"test-00000-of-00002.jsonl": VIDEOMME}, "00001-of-00002.jsonl: no such file"),
    ("videomme", {"test.jsonl": [5]}, "expected a list of objects"),
])  # fmt: skip
def test_half_read_ends_with_exit_code_2(name, files, why, tmp_path, monkeypatch, capsys):
    for path, content in files.items():
        put(tmp_path, path, content)
    out = tmp_path / "tasks.jsonl"
    monkeypatch.setattr("sys.argv", ["eval.py", "--bench", name, "--root", str(tmp_path),
                                     "--prepare", str(out)])
    with pytest.raises(SystemExit) as end:
        launch.run_main(evaluation.main)
    said = capsys.readouterr().err
    assert end.value.code == 2 and why in said and said.count("\n") == 1 and not out.exists()


def test_a_new_benchmark_is_one_entry_and_leaves_the_papers_rows_as_they_are(monkeypatch):
    """Rows are by name: neither its place among the splits nor a row without it moves a number."""
    known = benchmarks.splits()
    monkeypatch.setattr(benchmarks, "splits", lambda: {"new": known["mlvu"], **known})
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                      for line in scores.paper_layout([], "markdown").split("\n")]
    shown = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert shown["ParaVT-8B (the paper's)"]["mlvu"] == "65.0"
    assert "new" not in head  # neither the paper nor we have measured it
    table = benchmarks.paper_table()
    assert "charades" not in table["GPT-4o"] and "lvbench" not in table["Video-Thinker-7B"]
    assert all(isinstance(percent, float) for row in table.values() for percent in row.values())
    assert {name for row in table.values() for name in row} < {*known}
    assert sum(len(row) for row in table.values()) == 101  # of 15 x 7, as counted in the paper


def test_a_broken_parquet_and_a_missing_folder_are_named(tmp_path):
    pytest.importorskip("pyarrow", reason=NO_PYARROW)
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(launch.UserError, match="train-0.parquet: not readable"):
        benchmarks.read_split("lvbench", str(tmp_path))
    with pytest.raises(launch.UserError, match="no such folder"):
        benchmarks.read_split("lvbench", str(tmp_path / "none"))
