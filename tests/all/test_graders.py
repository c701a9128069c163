"""
Tests of evaluation/graders.py and publishers.py: python -m pytest tests/all/test_graders.py -q

The checkouts are made up: files, functions and signatures as in the publishers' code, rules of our
own that differ from ours on purpose.
"""
import json
import shutil
import subprocess
import textwrap

import pytest
from test_scores import command, table  # noqa: F401  fixture

from evaluation import benchmarks, graders
from tools import view

# "b" is right here, and so is any reply with the letter in it; a ! raises, a ? never ends.
VIDEOMME = """
    import os, sys, time
    import no_such_package
    from no_such_package.deep import helper
    from loguru import logger

    print("imported")
    os.write(1, b"{}\\n")

    @no_such_package.decorated(3)
    def videomme_process_results(doc, results):
        from lmms_eval.tasks._task_utils.letters import first
        print("a line for the terminal")
        logger.info("graded")
        if results[0] == "!":
            return helper(results)
        if results[0] == "exit":
            sys.exit(3)
        while results[0] == "?":
            pass
        return {"videomme_perception_score": {"pred_answer": first(results[0]),
                "answer": doc["answer"], "question": doc["question_id"] + doc["options"][0]}}
"""
LETTERS = "def first(text):\n    return text.strip()[:1].upper()\n"
STRIP = """
    def strip_reasoning_tags(text, tag_pairs):
        return text.rsplit(tag_pairs[0][1], 1)[-1].strip()
"""
DRIVER = """
    from paravt.eval import utils

    def _score(sample, final):
        if sample["is_mcq"]:
            return None, float(final.strip().endswith(sample["answer"])), final[-1:]
        return None, 0.25, "from the start"
"""
UTILS = """
    from datasets import load_dataset
    from no_such_package import fetch_video

    def load_samples(dataset_name, hf_home, prompt_mode="agentic_general"):
        rows = load_dataset("a/name", split="test", cache_dir=hf_home)
        return [{"answer": row.get("answer"), "is_mcq": dataset_name != "charades"} for row in rows]
"""


def put(root, **files):
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def lmms(tmp_path):
    (tmp_path / "lmms/lmms_eval/tasks").mkdir(parents=True)
    for package in ("lmms_eval", "lmms_eval/tasks"):  # which import the whole harness
        (tmp_path / "lmms" / package / "__init__.py").write_text("raise MemoryError")
    return put(tmp_path / "lmms", lmms_eval__tasks__videomme__utils=VIDEOMME,
               lmms_eval__tasks___task_utils__letters=LETTERS, lmms_eval__api__reasoning=STRIP)


@pytest.fixture
def paravt(tmp_path):
    return put(tmp_path / "paravt", paravt____init__="", paravt__eval____init__="",
               paravt__eval__driver=DRIVER, paravt__eval__utils=UTILS)


TASKS = {
    "mcq": {"type": "mcq", "options": ["a cat", "a dog"], "answer": "B", "tags": {}},
    "grounding": {"type": "grounding", "event": "it falls", "answer": [2.0, 8.0], "tags": {}},
}


@pytest.fixture
def made(tmp_path, command):  # noqa: F811
    """made(replies, bench, kind) -> a finished folder with an item per reply; None: it failed."""
    def made(replies, bench="videomme", kind="mcq", name="out"):
        leaf = tmp_path / name / (bench or "")
        leaf.mkdir(parents=True)
        rows = [{"task": {"id": f"q{i}", "video": f"v{i}.mp4", "question": "Which?", **TASKS[kind]},
                 "sample": 0, "budget": "64", "tools": "on", "digest": "d", "calls": [],
                 "status": "engine_error" if text is None else "ok", "turns": [text or "B"],
                 "think_open": False, "finish": ["stop"], "reward": {"fmt": 1.0}, "timing": {}}
                for i, text in enumerate(replies)]
        args = {"frames": [64], "tools": ["on"], "samples": 1, "protocol": "paravt",
                "ckpt": "c", "engine": "vllm"}
        (leaf / "args.json").write_text(json.dumps(args))
        for file, lines in (("tasks", [r["task"] for r in rows]), ("records.rank0", rows)):
            (leaf / f"{file}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return tmp_path / name

    return made


def verdicts(folder, grader="lmms-eval", bench="videomme"):
    lines = [json.loads(x) for x in (folder / bench / "graders.jsonl").read_text().splitlines()]
    return {line["id"]: line for line in lines if line["grader"] == grader}


def rescored(command, out, *words):  # noqa: F811
    code, said, err = command("--rescore", out, *words)
    assert code == 0, err
    return said


# ------------------------------------------------------------------------------------------------
# Verdicts


def test_three_graders_stand_side_by_side(made, command, lmms, paravt):  # noqa: F811
    """Ours reads <answer>, lmms-eval's stand-in the first letter, the paper's the last one."""
    out = made(["B", "<answer>B</answer>", "B or A", "so it is B", None])
    before = table(command, *(rescored(command, out, "--allow-errors") and [out]))
    said = rescored(command, out, "--allow-errors", "--grader", "ours", "lmms-eval", "paper",
                    "--checkout", lmms, paravt)
    by = [[verdicts(out, name)[f"q{i}"]["score"] for i in range(4)]
          for name in ("lmms-eval", "paper")]
    assert by == [[1, 0, 1, 0], [1, 0, 0, 1]]
    assert "q4" not in verdicts(out)  # a failed episode has no reply
    assert verdicts(out)["q2"]["said"] == "B"
    assert json.loads(said.splitlines()[-1])["acc"] == {"videomme/64/on": 0.6}
    rows, notes = table(command, out)
    first, second, third = [row for row in rows if row.endswith("(measured)") or "[" in row]
    assert {**rows} | before[0] == rows  # no row of before has changed
    assert first == "out, K 64, tools on (measured)" and rows[first][0].startswith("60.0 ")
    assert second.startswith("out, graded by lmms-eval files ") and rows[second][0][:4] == "40.0"
    assert third.startswith("out, graded by paper files ") and rows[third][0].startswith("40.0 ")
    versions = [verdicts(out, name)["q0"]["version"] for name in ("lmms-eval", "paper")]
    assert notes == [f"1. videomme: lmms-eval and ours differ on 3 of 4 replies ({versions[0]})",
                     f"2. videomme: paper and ours differ on 1 of 4 replies ({versions[1]})"]


@pytest.mark.parametrize("form", ["latex", "csv"])
def test_other_forms_have_the_graders_too(form, made, command, lmms):  # noqa: F811
    wanted = "graded by lmms-eval"
    out = made(["B", "A"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    code, said, err = command("--table", out, "--format", form)
    assert code == 0 and wanted in said and "differ on 0 of 2 replies" in said, err
    code, said, err = command("--table", out, "--format", form, "--by", "category")
    assert code == 0 and said.count("50.0 n 2") == 2 and wanted in said, err


def test_runs_of_one_system_are_pooled_per_grader(made, command, lmms):  # noqa: F811
    folders = [made(["B", "it is B"], name="one"), made(["A", "B"], name="two")]
    rescored(command, folders[0], "--grader", "lmms-eval", "--checkout", lmms)
    rescored(command, folders[1])
    rows, _ = table(command, "x=", *folders)
    assert [row for row in rows if "graded" in row] == []  # the second has no verdicts
    rescored(command, folders[1], "--grader", "lmms-eval", "--checkout", lmms)
    rows, _ = table(command, "x=", *folders)
    ours, theirs = [rows[row][0] for row in rows if row.startswith("x, ")]
    assert ours.startswith("75.0 ") and theirs.startswith("50.0 ")


def test_an_error_of_a_grader_is_its_verdict_and_is_counted(made, command, lmms):  # noqa: F811
    out = made(["B", "!", "exit", "B"])
    said = rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    found = verdicts(out)
    assert found["q1"]["error"] == "ImportError: no_such_package.deep.helper is not installed"
    assert found["q2"]["error"] == "SystemExit: 3" and found["q2"]["score"] == 0.0
    assert found["q3"]["score"] == 1.0 and found["q3"]["error"] is None
    assert "lmms-eval fails on 2, which score 0" in said
    assert "not installed: no_such_package" in said
    assert "fails on 2" in table(command, out)[1][0]


def test_a_reply_without_an_end_costs_the_time_limit(made, command, lmms):  # noqa: F811
    out = made(["?", "B"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms, "--grader-timeout", 0.2)
    assert verdicts(out)["q0"]["error"] == "no verdict within 0.2 seconds"
    assert verdicts(out)["q1"]["score"] == 1.0


def test_a_thought_is_taken_off_by_the_harness_of_lmms_eval(made, command, lmms):  # noqa: F811
    out = made(["A?</think>B"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    assert verdicts(out)["q0"]["said"] == "B"
    (lmms / "lmms_eval/api/reasoning.py").unlink()  # older versions have none
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    assert verdicts(out)["q0"]["said"] == "A"


def test_a_grader_cannot_reach_a_network_or_a_key(made, command, lmms, monkeypatch):  # noqa: F811
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    put(lmms, lmms_eval__tasks___task_utils__letters="""
        import os, socket
        def first(text):
            if text == "key":
                return os.environ.get("OPENAI_API_KEY", "B")
            socket.create_connection(("127.0.0.1", 9))
    """)
    out = made(["key", "B"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    assert verdicts(out)["q0"]["said"] == "B"
    assert verdicts(out)["q1"]["error"] == "OSError: a grader has no network"


def test_spans_are_scores_between_0_and_1(made, command, lmms, paravt):  # noqa: F811
    put(lmms, lmms_eval__tasks__charades_sta__utils="""
        def temporal_grounding_process_results_generation(doc, result):
            return {"charades_sta_mIOU": {f"{doc['video']}>>>{doc['timestamp']}": result[0]}}

        def temporal_grounding_aggregate_miou(results, args):
            (key, text), = results[0].items()
            return {"half": 50.0}.get(text, 200.0) if key == "v0.mp4>>>[2.0, 8.0]" else 200.0
    """)
    out = made(["half", "2 to 8"], "charades", "grounding")
    rescored(command, out, "--grader", "lmms-eval", "paper", "--checkout", lmms, paravt)
    found = verdicts(out, bench="charades")
    assert found["q0"]["score"] == 0.5 and found["q1"]["error"] == "ValueError: the score is 2.0"
    assert verdicts(out, "paper", "charades")["q1"]["score"] == 0.25


def test_the_page_has_the_scores_of_other_graders(made, command, lmms, tmp_path):  # noqa: F811
    out = made(["B", "so it is B", "!", None])
    rescored(command, out, "--allow-errors", "--grader", "lmms-eval", "--checkout", lmms)

    def scores():
        shown = view.build([str(out)], None, str(tmp_path / "page.html"), 10, 1.0, None, 6144)
        return [(e["id"], e["acc"], e["graders"]) for e in shown["episodes"]]

    path = out / "videomme" / "records.rank0.jsonl"
    rows = [json.loads(line) | {"K": 64, "group": f"q{i}", "score": float(i < 2), "pieces": []}
            for i, line in enumerate(path.read_text().splitlines())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert scores() == [("q0", 1.0, {"lmms-eval": 1.0}), ("q1", 1.0, {"lmms-eval": 0.0}),
                        ("q2", 0.0, {"lmms-eval": 0.0}), ("q3", 0.0, {})]
    path.write_text(path.read_text().replace('["B"]', '["A"]', 1))
    assert scores()[0] == ("q0", 1.0, {"lmms-eval": None})  # the verdict is of an older reply
    text = (tmp_path / "page.html").read_text()
    assert 'menu("disputed"' in text and "episode.graders" in text
    # A page of a folder without verdicts has the field, empty: its script reads it everywhere.
    (out / "videomme" / "graders.jsonl").unlink()
    assert {json.dumps(given) for *_, given in scores()} == {"{}"}


def row_of(bench, number, gold):
    """A row as the benchmark's publisher ships it."""
    question = "What is shown?"
    options = ["a red cup", "a blue cup", "a green bowl", "a dog"]
    tags = {"duration": "short", "domain": "Knowledge", "sub_category": "Art", "task_type": "OCR"}
    choices = dict(zip("ABCDE", [*options, "a spoon"]))
    rows = {
        "videomme": {"question_id": f"{number}", "videoID": f"v{number}", "question": question,
                     "options": [f"{label}. {text}" for label, text in zip("ABCD", options)],
                     "answer": gold, **tags},
        "longvideobench": {"id": f"v{number}_0", "video_path": f"v{number}.mp4",
                           "question": question, "candidates": options, "duration_group": 15,
                           "correct_choice": "ABCD".find(str(gold)), "question_category": "S2E"},
        "lvbench": {"key": f"v{number}", "type": "cartoon", "uid": f"{number}", "answer": gold,
                    "question": "\n".join([question, *(f"({label}) {text}" for label, text in
                                                       zip("ABCD", options))]),
                    "question_type": ["entity recognition"]},
        "mlvu": {"video_name": f"v{number}.mp4", "question": question, "candidates": options,
                 "answer": gold, "task_type": "count", "question_id": f"Q{number}"},
        "mmvu": {"id": f"validation_{number}", "video": f"videos/Art/{number}.mp4",
                 "question_type": "multiple-choice" if len(gold) == 1 else "open-ended",
                 "question": question, "answer": gold,
                 "choices": choices if len(gold) == 1 else dict.fromkeys("ABCDE", "")},
        "charades": {"video": f"v{number}.mp4", "caption": "a cup falls", "timestamp": gold},
    }
    return rows[bench]


@pytest.mark.parametrize("bench", ["videomme", "longvideobench", "lvbench", "mlvu", "mmvu",
                                   "charades"])
def test_a_task_goes_back_into_its_published_row(bench, tmp_path):
    """The publishers' functions read these fields. LVBench's question keeps its inline options."""
    gold = [2.0, 8.0] if bench == "charades" else "D"
    row = row_of(bench, 7, gold)
    name = {"longvideobench": "lvb_val", "charades": "test-0", "mmvu": "validation",
            "lvbench": "video_info.meta"}.get(bench, "test-0")
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (task,), _ = benchmarks.read_split(bench, str(tmp_path))
    back = benchmarks.published_row(bench, task)
    if bench == "longvideobench":
        given = row.pop("candidates")
        row |= {f"option{i}": text for i, text in enumerate([*given, "N/A"])}
    if bench == "lvbench":
        row = {"uid": "7", "video_path": "v7.mp4", "answer": "D",
               "question": "What is shown?\n(A) a red cup\n(B) a blue cup\n(C) a green bowl\n"
                           "(D) a dog"}
    assert {key: back[key] for key in row} == row


# ------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("change, why", [
    (lambda lmms: put(lmms, lmms_eval__tasks__videomme__utils="x = 1"),
     "has no function videomme_process_results"),
    (lambda lmms: shutil.rmtree(lmms / "lmms_eval"), "no folder lmms_eval/tasks in "),
    (lambda lmms: put(lmms, lmms_eval__tasks__videomme__utils="import lmms_eval.gone"),
     "its imports fail with ModuleNotFoundError: No module named 'lmms_eval.gone'"),
    (lambda lmms: put(lmms, lmms_eval__tasks___task_utils__letters="import os; os._exit(5)"),
     "ended at reply 1 of 1 with exit code 5"),
], ids=["no function", "no checkout", "broken import", "a dead child"])
def test_a_checkout_that_cannot_grade_is_one_line(change, why, made, command, lmms):  # noqa: F811
    out = made(["B"])
    change(lmms)
    code, _, err = command("--rescore", out, "--grader", "lmms-eval", "--checkout", lmms)
    assert code == 2 and err.count("\n") == 1 and why in err and str(lmms) in err
    assert not (out / "videomme" / "graders.jsonl").exists()


def test_a_benchmark_without_a_grader_is_left_empty(made, command, lmms, paravt):  # noqa: F811
    made(["B"])
    out = made(["B"], "mlvu", name="out2")
    shutil.move(out / "mlvu", out.parent / "out" / "mlvu")
    out = out.parent / "out"
    said = rescored(command, out, "--grader", "lmms-eval", "paper", "--checkout", lmms, paravt)
    line, = [line for line in said.splitlines() if "left empty" in line]
    assert "lmms-eval: no grader for mlvu" in line
    rows, _ = table(command, out)
    by = {row.split(" files")[0]: [cell for cell in cells if cell != "-"]
          for row, cells in rows.items() if row.startswith("out, graded")}
    assert len(by["out, graded by lmms-eval"]) == 1 and len(by["out, graded by paper"]) == 2
    plain = made(["B"], bench=None, name="plain")
    said = rescored(command, plain, "--grader", "lmms-eval", "--checkout", lmms)
    assert "lmms-eval: no grader for task JSONL" in said


def test_stale_verdicts_are_refused(made, command, lmms):  # noqa: F811
    out = made(["B", "A"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    path = out / "videomme" / "records.rank0.jsonl"
    path.write_text(path.read_text().replace('["A"]', '["B"]'))
    code, _, err = command("--table", out)
    assert code == 2 and err.count("\n") == 1 and "the verdicts of lmms-eval are stale" in err
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    rows, _ = table(command, out)
    assert [cells[0][:5] for row, cells in rows.items() if "graded" in row] == ["100.0"]


def test_a_clone_is_named_by_its_commit(made, command, lmms):  # noqa: F811
    def git(*words):
        done = subprocess.run(["git", "-C", lmms, "-c", "user.name=n", "-c", "user.email=e",
                               *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "--short=7", "HEAD")
    assert graders.commit(lmms) == f"@{head}"
    out = made(["B"])
    rescored(command, out, "--grader", "lmms-eval", "--checkout", lmms)
    assert not git("status", "--porcelain")  # nothing was written into the checkout
    assert f"out, graded by lmms-eval @{head}, K 64, tools on (measured) [1]" in table(
        command, out)[0]
    put(lmms, lmms_eval__api__reasoning=STRIP + "\n")
    assert graders.commit(lmms) == f"@{head}-dirty"


@pytest.mark.parametrize("words, why", [
    (["--grader", "lmms-eval"], "0 folders for 1 graders"),
    (["--grader", "paper", "paper", "--checkout", "a", "b"], "names a grader twice"),
    (["--grader", "paper", "--checkout", "a", "--grader-timeout", "0"], "--grader-timeout must"),
])
def test_flags_that_do_not_fit(words, why, made, command):  # noqa: F811
    code, _, err = command("--rescore", made(["B"]), *words)
    assert code == 2 and err.count("\n") == 1 and why in err
    code, _, err = command("--data", "x", "--grader", "paper", "--checkout", "a")
    assert code == 2 and "need --rescore" in err
