"""
Readers and numbers of the newer benchmarks against the code of lmms-eval and VLMEvalKit:
CHECKOUTS=DIR python -m pytest tests/all/test_oracles.py -q

CHECKOUTS is the folder that holds clones named lmms-eval and VLMEvalKit. The rows are made up, in
the publishers' format. Elsewhere these tests are skipped.
"""
import ast
import itertools
import os
import random
import re
from functools import partial

import pytest
from test_benchmarks import CGBENCH, V2, put
from test_scores_rest import looked

from evaluation import benchmarks, checkouts, scores
from evaluation.windows import judged


def clone(name):
    path = os.path.join(os.environ.get("CHECKOUTS", ""), name)
    if not os.path.isdir(path):
        pytest.skip(f"no clone of {name}: set CHECKOUTS to the folder that holds it")
    return path


def functions(name, *file, **known):
    """The functions of a file of a clone, without its imports, which need the whole harness."""
    with open(os.path.join(clone(name), *file), encoding="utf-8") as f:
        tree = ast.parse(f.read())
    kept = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign))]
    space = {"ast": ast, "re": re, **known}
    for node in kept:
        try:
            exec(compile(ast.Module([node], []), file[-1], "exec"), space)
        except NameError:  # a decorator or a constant of a package
            pass
    return space


HOLMES = {"video ID": "x1", "Question": "Why?", "Question Type": "TCI", "Question ID": 4,
          "Options": dict(zip("ABCDEF", ("rain", "snow", "sun", "fog", "hail", "wind"))),
          "Answer": "D"}
TIMELENS = {"video_path": "c/x.mp4", "query": "it falls", "span": [[2.0, 8.0]]}
# bench -> (file of rows, a row, replies with the score that both graders give)
ROWS = {
    "cgbench": ("cgbench_mini", CGBENCH, {"B": 1, "The answer is (B).": 1, "A": 0}),
    "cgbench_clue": ("cgbench_mini", CGBENCH, {"B": 1, "C": 0}),
    "videomme_v2": ("test", V2[1], {"H": 1, "Final Answer: H": 1, "A": 0}),
    "video_holmes": ("test_Video-Holmes", HOLMES, {"(D)": 1, "D. fog": 1, "(A)": 0}),
    "timelens_charades": ("charades-0", TIMELENS, {
        "The event happens in 2.0 - 8.0 seconds.": 1, "The event happens in 4 - 10 seconds.": 0.5,
        "The event happens in 20 - 30 seconds.": 0})}


@pytest.mark.parametrize("bench", ROWS)
def test_lmms_eval_grades_what_our_readers_make_of_its_rows(bench, tmp_path):
    file, row, replies = ROWS[bench]
    put(tmp_path, f"{file}.jsonl", [row])
    (task,), _ = benchmarks.read_split(bench, str(tmp_path))
    items = [{"row": benchmarks.published_row(bench, task), "text": text} for text in replies]
    *found, _ = checkouts.run("lmms-eval", bench, clone("lmms-eval"), items, 60, "lmms-eval")
    assert [one.get("score") for one in found] == [*replies.values()], found


def test_groups_of_video_mme_v2_score_as_in_both_harnesses():
    both = [functions("lmms-eval", "lmms_eval", "tasks", "videomme_v2", "utils.py"),
            functions("VLMEvalKit", "vlmeval", "dataset", "videommev2.py")]
    kinds = [("relevance", None), *(("logic", text) for text in
                                    ("[1, 2, 3, 4]", "[1, [2, 3], 4]", "[[1, 2], 3, 4]"))]
    for (kind, structure), right in itertools.product(kinds, itertools.product((0, 1), repeat=4)):
        ours = benchmarks.group_score({"group_type": kind, "group_structure": structure}, right)
        for theirs in both:
            wanted = (theirs["cal_logic"](right, structure) if structure
                      else theirs["cal_relevance"](right))
            wanted = wanted[0] if isinstance(wanted, tuple) else wanted
            assert 100 * ours == pytest.approx(wanted), (kind, structure, right)


def test_the_headline_of_video_mme_v2_and_its_levels_are_lmms_evals():
    """Levels: of the last question of a group. Questions of a group have levels of their own."""
    from collections import defaultdict
    from unittest import mock

    theirs = functions("lmms-eval", "lmms_eval", "tasks", "videomme_v2", "utils.py",
                       defaultdict=defaultdict, eval_logger=mock.Mock())
    draw, records, rows = random.Random(0), {}, []
    for film in range(40):
        kind = draw.choice(["relevance", "logic"])
        structure = draw.choice(["[1, 2, 3, 4]", "[1, [2, 3], 4]", "[[1, 2], 3, 4]"])
        for place in (1, 2, 3, 4):
            tags = {"group_type": kind, "group_structure": structure, "level": draw.choice("123")}
            name, score = f"{film:03d}-{place}", draw.randrange(2)
            task = {"id": name, "video": f"{film}.mp4", "type": "mcq", "split": "videomme_v2",
                    "place": place, "tags": tags}
            records[name, "64", "on", 0] = {**looked(name, []), "task": task, "score": score}
            rows.append({**tags, "second_head": "s", "third_head": "t", "video_id": film,
                         "question_id": name, "score": score})
    found = scores.summarise([*benchmarks.credited(records).values()], "videomme_v2")
    wanted = theirs["_compute_all_subscores"](rows)
    assert 100 * found["headline"] == pytest.approx(wanted["overall_score"])
    assert 100 * found["acc"] == pytest.approx(wanted["overall_acc"])
    for level in "123":
        mine = 100 * found["by"]["level"][level]["acc"]
        assert mine == pytest.approx(wanted[f"level_{level}_score"])


def test_the_numbers_of_cgbench_are_vlmevalkits():
    """mIoU, rec@IoU, acc@IoU and CRR: theirs of intervals that a model wrote, ours of windows."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    import numpy as np

    theirs = functions("VLMEvalKit", "vlmeval", "dataset", "utils", "cgbench.py", np=np, pd=pandas)
    draw, records, rows = random.Random(1), [], []
    clue = []
    for number in range(80):
        def spans(most):
            found = [sorted((draw.randrange(100), draw.randrange(100))) for _ in range(most)]
            return [[a, b + 1] for a, b in found]

        gold, windows = spans(draw.randrange(1, 4)), spans(draw.randrange(4))
        right = draw.randrange(2)
        records.append(looked(f"q{number}", windows, gold, float(right)))
        records[-1]["timing"]["video_s"] = 101.0
        clue.append(draw.randrange(2))
        iou = theirs["calculate_intervals_iou"]([*map(list, gold)], [*map(list, windows)])
        same = {"qid": number, "duration": 100.0, "domain": "GUI", "sub_category": "x"}
        rows += [{**same, "task_mode": mode, "score": score} for mode, score in
                 (("long_acc", right), ("clue_acc", clue[-1]), ("miou", iou))]
    theirs["load"] = lambda _: pandas.DataFrame(rows)
    wanted = theirs["get_dimention_rating_mcq_grouding"]("")
    found = judged(records, scores.mean_of)
    for name in ("miou", "rec@iou", "acc@iou"):
        assert found[name] == pytest.approx(wanted[name]["overall"], abs=2e-4), name  # theirs round
    long = sum(record["score"] for record in records) / len(records)
    row = partial(dict, K=64, tools="on", show="real")
    both = [row(bench="cgbench", headline=long), row(bench="cgbench_clue",
                                                     headline=sum(clue) / len(clue))]
    scores.add_crr(both)
    assert both[0]["CRR"] == pytest.approx(wanted["CRR"]["overall"], abs=1e-4)
