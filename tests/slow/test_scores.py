"""
Windows of evaluation/scores.py, worked out by hand: python -m pytest tests/slow/test_scores.py -q
"""
import pytest
from test_scores import looked

from evaluation import scores


def test_windows_are_judged_over_the_episodes_that_called():
    failed = looked("d", [(10, 20)], status="engine_error")
    records = [looked("a", [(10, 20)]), looked("b", [(15, 25), (90, 120)], score=0.0),
               looked("c", []), failed, looked("e", [(30, 30)], score=0.0)]
    found = scores.summarise(records)["windows"]
    assert found["n"] == 3 and found["recall"] == 0.5 and found["hit"] == pytest.approx(2 / 3)
    assert "windows" not in scores.summarise([looked("a", [])])
