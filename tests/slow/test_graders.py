"""
How often does our grader read a reply as it is meant? On a fixed list of replies that we made up,
knowing our own rules: python -m pytest tests/slow/test_graders.py -q

Every reply of multiple choice is graded twice, once with the option it means as gold and once with
another one (a reply that names no option: with two golds). A grader agrees if it scores 1 in the
first case and 0 in the second. Spans agree if the score is the IoU of the span that is meant. If a
letter and a text contradict each other, the letter counts.
"""
import pytest

from evaluation import results, systems

OPTIONS = ["a red cup", "a blue cup", "a green bowl", "a dog"]
# Reply -> the letter that it means, "" for none.
LETTERS = {
    "B": "B", "B.": "B", "(B)": "B", "b": "B", "b)": "B", "**B**": "B", "\\boxed{B}": "B",
    "B. a blue cup": "B", "B: a blue cup": "B", "The answer is B.": "B",
    "The correct answer is b.": "B", "Answer: B\nThe cup is blue.": "B", "a blue cup": "B",
    "A blue cup is shown.": "B", "It is the green bowl.": "C", "B. a green bowl": "B",
    "A man lifts the cup, so the answer is C.": "C", "It is not A; it is D.": "D",
    "Both A and B look right, but the best answer is D.": "D",
    "First I thought C. On a closer look, the answer is A.": "A",
    "<answer>B</answer>": "B", "<answer>b</answer>": "B", "<answer>A blue cup</answer>": "B",
    "<think>Option A is wrong.</think>C": "C",
    "<think>A red cup comes first, then B.</think>\n<answer>C</answer>": "C",
    "A or B, I cannot tell.": "", "I cannot answer this question.": "",
    "Because the light is dim, nothing can be seen.": "", "G": "", "": "",
}  # fmt: skip
# Reply -> whether it means the gold "depth-first search".
TEXTS = {
    "depth-first search": True, "Depth-First Search (DFS).": True, "DFS": True,
    "The algorithm is depth-first search, because it goes down first.": True,
    "<answer>depth-first search</answer>": True, "breadth-first search": False,
    "It is not depth-first search.": False, "search": False,
    "It is depth-first search or breadth-first search.": False, "I cannot tell.": False,
    "": False,
}  # fmt: skip
# Reply -> the span in seconds that it means. Gold: 2 to 8.
SPANS = {
    "2.0 - 8.0 seconds": (2, 8), "The event happens in the 2.0 - 8.0 seconds.": (2, 8),
    "<answer>2.0 to 8.0</answer>": (2, 8), "From 2 to 8 seconds.": (2, 8), "[2, 8]": (2, 8),
    "It starts at 2 seconds and ends at 8 seconds.": (2, 8), "00:02 - 00:08": (2, 8),
    "<time>00:02.0 - 00:08.0</time>": (2, 8), "Between second 4 and second 8.": (4, 8),
    "<think>At first 10 - 20 looks right.</think>\n<answer>2.0 - 8.0</answer>": (2, 8),
    "The video has 30.0 seconds. The event happens in the 2.0 - 8.0 seconds.": (2, 8),
    "12.0 - 18.0 seconds": (12, 18), "I cannot find the event.": None, "": None,
}  # fmt: skip


def iou(span, start=2, end=8):
    if span is None:
        return 0.0
    a, b = span
    return max(0, min(b, end) - max(a, start)) / (max(b, end) - min(a, start))


def cases(kind):
    """-> [(reply, gold, score that it deserves)]."""
    if kind == "grounding":
        return [(text, [2.0, 8.0], iou(span)) for text, span in SPANS.items()]
    if kind == "open":
        return [(text, "depth-first search", float(right)) for text, right in TEXTS.items()]
    found = []
    for text, letter in LETTERS.items():
        golds = [letter, "ABCD"["ABCD".index(letter) - 1]] if letter else ["A", "B"]
        found += [(text, gold, float(gold == letter)) for gold in golds]
    return found


@pytest.mark.parametrize("kind, count", [("mcq", 59), ("open", 11), ("grounding", 14)])
def test_replies_are_read_as_they_are_meant(kind, count):
    """Of 60 replies of multiple choice, 11 open ones and 14 spans."""
    system, right = systems.all_systems()["paravt"], 0
    for text, gold, wanted in cases(kind):
        task = {"type": kind, "answer": gold, "options": OPTIONS}
        record = {"task": task, "status": "ok", "turns": [text], "think_open": False}
        right += abs(results.grade_record(record, system)["score"] - wanted) <= 0.005
    assert right == count
