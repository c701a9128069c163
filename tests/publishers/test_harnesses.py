"""
Numbers of the newer benchmarks against the code of lmms-eval and VLMEvalKit:
python -m pytest tests/publishers --checkouts DIR -q

DIR holds clones named lmms-eval and VLMEvalKit. The records are made up.
"""
import ast
import itertools
import os
import random
import re
from functools import partial

import pytest
from test_scores import looked

from evaluation import benchmarks, scores
from evaluation.windows import window_stats


@pytest.fixture
def functions(request):
    """functions(clone, file ..) -> the functions of a file of a clone."""
    def functions(name, *file, **known):
        path = os.path.join(request.config.getoption("--checkouts") or "", name)
        if not os.path.isdir(path):
            pytest.skip(f"--checkouts names no folder with a clone of {name}; with one this test "
                        f"compares our numbers with those of its {'/'.join(file)}")
        return run(os.path.join(path, *file), known)

    return functions


def run(path, known):
    """A Python file without its imports, which need the whole harness -> its names."""
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    kept = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign))]
    space = {"ast": ast, "re": re, **known}
    for node in kept:
        try:
            exec(compile(ast.Module([node], []), path, "exec"), space)
        except NameError:  # a decorator or a constant of a package
            pass
    return space


def test_groups_of_video_mme_v2_score_as_in_both_harnesses(functions):
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


def test_the_headline_of_video_mme_v2_and_its_levels_are_lmms_evals(functions):
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
                    "position": place, "tags": tags}
            records[name, "64", "on", 0] = {**looked(name, []), "task": task, "score": score}
            rows.append({**tags, "second_head": "s", "third_head": "t", "video_id": film,
                         "question_id": name, "score": score})
    found = scores.summarise([*benchmarks.apply_group_scores(records).values()], "videomme_v2")
    wanted = theirs["_compute_all_subscores"](rows)
    assert 100 * found["headline"] == pytest.approx(wanted["overall_score"])
    assert 100 * found["acc"] == pytest.approx(wanted["overall_acc"])
    for level in "123":
        mine = 100 * found["by"]["level"][level]["acc"]
        assert mine == pytest.approx(wanted[f"level_{level}_score"])


def test_the_numbers_of_cgbench_are_vlmevalkits(functions):
    """mIoU, rec@IoU, acc@IoU and CRR: theirs of intervals that a model wrote, ours of windows."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    import numpy as np

    theirs = functions("VLMEvalKit", "vlmeval", "dataset", "utils", "cgbench.py", np=np, pd=pandas)
    draw, records, rows, clue = random.Random(1), [], [], []
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
    found = window_stats(records, scores.mean_and_interval)
    for name in ("miou", "rec@iou", "acc@iou"):
        assert found[name] == pytest.approx(wanted[name]["overall"], abs=2e-4), name  # theirs round
    long = sum(record["score"] for record in records) / len(records)
    row = partial(dict, K=64, tools="on", show="real")
    both = [row(bench="cgbench", headline=long), row(bench="cgbench_clue",
                                                     headline=sum(clue) / len(clue))]
    scores.add_crr(both)
    assert both[0]["CRR"] == pytest.approx(wanted["CRR"]["overall"], abs=1e-4)
