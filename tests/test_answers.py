"""
Tests of evaluation/answers.py: python -m pytest tests/test_answers.py -q

Tables of the forms in which models write letters, spans and open answers, with a reply for each
alternative of the patterns that read them.
"""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rewards import CALL, anything

from evaluation import answers
from evaluation.answers import extract_letter, extract_span, match_open

PETS = ["cat", "dog", "hot dog", "two birds", "none"]  # options A to E


@pytest.mark.parametrize("turns, want", [
    (["<think>A</think> B "], "B"), (["hm</think>B"], "B"), (["<think>A"], None), (["B"], "B"),
    ([f"{CALL} B"], "B"), (["<tool_response>A</tool_response>B"], "B"),
    (["<tool_call>{"], None), (["x</think>C<answer>B</answer>"], "B"), ([], None)])
def test_evaluation_falls_back_on_the_text_after_the_thought(turns, want):
    assert answers.answer_or_tail(turns) == want


# A reply for each alternative of the patterns that read letters and times.
CLOSE = "Close: A, C. "  # so that neither the first letter nor the only one decides


@pytest.mark.parametrize("response, want", [
    ("b", "B"), ("(b)", "B"), ("**B**", "B"), ("Ｂ", "B"), ("\\boxed{D}", "D"), ("B) dog", "B"),
    ("B: the brown one", "B"), ("(E) dog", None),  # label and text contradict each other
    ("F", None), ("AB", None), ("A, C", None), ("", None), ("Cannot tell", None),
    ("The answer is A. No, wait: the answer is C.", "C"), ("A. The answer is B", None),
    ("The answer is A man", None),
    ("option B is wrong, option C is right", "C"), ("option B, option C", None),
    ("A man is running so B", "B"), ("I think ...", None),
    ("I think it is the dog", "B"), ("A hot dog", "C"), ("2 birds", "D"),
    ("the dog is not there", None), ("cat and dog", None),
    ("A. cat\nB. dog\nThe answer is B", "B"), ("A. cat\nB. dog", None),
    ("<think>A</think>B", "B"), ("<think>B", None), ("<answer>X</answer><answer>B</answer>", "B"),
    ("<answer>B</answer> as A said", "B"), ("<answer>B", "B"), ("B) dog, since it barks", "B"),
    ("The best answer is: D. two birds", "D"),
    ("<action>A</action><observation>it is A</observation>B", "B"),
    ("It is option (c), a hot dog.", "C"), ("A shows two, C four.\nB", "B"),
    *((f"{CLOSE}{text}", "B") for text in (
        "The answer is B.", "The best option would be B.", "The choice must be B.", "It's B.",
        "I think it is most likely B.", "B is clearly correct.", "B is the best option.",
        "I'd choose B.", "I will go with B.", "I pick [B].", "Answer: B", "The answer is (B).")),
    *((text, None) for text in (
        "The limit is C and the top is B.", "Answer: B-roll", "The answer is C++",
        "The answer is A.M. radio", "A is close, C is closer.", "x = 30°A", "A.B. news",
        # two letters
        "The answer is A or B.", "The answer is A as well as B.", "Answer: (A) / (B)",
        "The answer is B and possibly D.", "Answer: A, option B", "The answer is either A or B.",
        "The clip shows labels A/C.", "The clip shows labels (A) (C).",
        "答案不是B", "He takes vitamins B", "A best-selling book")),
    # the first letter of a reply, a label
    ("Option B\n\nOption C would need a bun.", "B"), ("(B), as it barks; (A) meows.", "B"),
    ("Look:\nb)\nOption C would need a bun.", "B"), ("Answer: dog\nThe cat sleeps.", "B"),
    ("The correct answer is dog\nThe cat sleeps.", "B"), ("Answer: A I think it purrs.", "A"),
    # a letter that is denied
    *((f"{denial} A. So B", "B") for denial in (
        "It is not", "It was never", "I doubt it is", "It is unlikely to be", "I ruled out",
        "It isn't", "I do not think that it is", "It is not D or")),
    *((f"A {denial}. So B", "B") for denial in (
        "can't be it", "does not fit", "seems wrong", "is ruled out", "has been eliminated",
        "is probably wrong")),
    ("Neither A nor B, D", "D"), ("B rather than A", "B"), ("不选B，选C", "C"),
    ("A, and (B) are wrong. So C", "C"),
    # words that a letter follows, words that follow a letter
    *((f"Yes {word} B", "B") for word in ("choice", "thus", "matches", "towards", "probably")),
    *((f"Yes: B {word} x", "B") for word in ("because", "rather than", "seems", "its"))])
def test_letter_is_read_by_policy(response, want):
    assert extract_letter(response, PETS) == want


@pytest.mark.parametrize("response, want", [
    ("It happens in the 24.3 - 30.4 seconds, no, in 5-7", (5, 7)), ("start: 10, end: 20", (10, 20)),
    ("The start time is 12.5 seconds and the end time is 20 seconds.", (12.5, 20)),
    ("<think>1-2</think><answer>3-4</answer>", (3, 4)), ("from 00:03 until 00:09", (3, 9)),
    ('{"start_time":10,"end_time":20.5}', (10, 20.5)), ("between 10 and 20", (10, 20)),
    ("1 minute 30 seconds to 2 minutes", (90, 120)), ("<answer>3 - 9</answer> or 10 - 12", (3, 9)),
    ("it lasts 6 seconds", None), ("at 10, 20 people", None), ("2024-2025 frames", None),
    ("[[3.5, 9]]", (3.5, 9)), ("10", None), ("", None), ("start 9, end 3", None),
    ("5-7, then 9-8", None), ("10, 20", (10, 20)), ("frames 10-20", None), ("1:2:3:4 - 5", None),
    ("<think>1-2", None), ("１０－２０", (10, 20)), ("1.2.3, 5", None), ("10 - 10", None),
    ("5%-6%", None), ("-5 - 10", None), ("٣ - ٥", None),
    # joined
    *((f"10 {joint} 20", (10, 20)) for joint in ("-", "–", "~", "-->", "up to", "until", "and")),
    ("It is ( 10, 20) here", (10, 20)), ("10 sec. to 20", (10, 20)),
    ("1:00:10 - 1:00:20.5", (3610, 3620.5)), ("from 10 to about 20", (10, 20)),
    ("t = 10 to t = 20", (10, 20)), ("10 - 20, 80.5-90.5% sure", (10, 20)),
    *((f"10 - 20, {denial}", (10, 20)) for denial in (
        "never 3 - 5", "I ruled out 3 - 5", "as 3 - 5 is wrong", "neither 3 - 5 nor 6 - 7",
        "not between 3 and 5", "confidence: 0.8-0.9", "I am 80-90 percent sure")),
    # named
    ("starts at 10 and stops at 20", (10, 20)), ("Start time: 10\nEnd time: 20", (10, 20)),
    ("Start (seconds): 10, end (s): 20", (10, 20)), ("Start: 0:10.5, end: 0:20", (10.5, 20)),
    ("starts at around 10, ends at second 20", (10, 20)),
    # no times
    ("frames from 10 to 20", None), ("It does not happen from 10 to 20", None),
    # minutes
    ("2 mins to 3 mins", (120, 180)), ("2-3 min", (120, 180)), ("1m 5 s - 1m 20 s", (65, 80)),
    ("1m30s - 2m", (90, 120)), ("1h2m3s - 1h2m9s", (3723, 3729)),
    ("(2,5 - 7,5)", (2.5, 7.5)), ("(2,5 s - 7,5 s)", (2.5, 7.5)), ("[2, 5]", (2, 5)),
    ("(2 - 7,5)", None), ("在12.5秒到20秒之间", (12.5, 20)), ("1分30秒至2分5秒", (90, 125)),
    ("10 - 20, a depth of 4 m to 8 m", (10, 20)),
    ("1 minute, 5 seconds to 1 minute and 20.5 seconds", (65, 80.5)),
    ("12.5 - 20.0\nConfidence: 85%", (12.5, 20)), ("12.5 \u2014 20.0", (12.5, 20)),
    ("31.0\u221244.5", (31, 44.5))])
def test_span_is_read_in_seconds(response, want):
    assert extract_span(response) == want


@pytest.mark.parametrize("response, gold", [
    ("Answer: O(n^2), because it shows two loops.", "O(n²)"), ("The Dolly Zoom.", "dolly zoom"),
    ("twenty", "20"), ("1,000", "1000"), ("H₂O", "h2o"), ("Depth First Search (DFS)", "DFS"),
    ("5.0", "five"), ("x²", "x2"), ("dont", "don't"), ("50%", "50 percent"),
    ("well known", "well-known"), ("007", "7"), ("(A)", "A"),
    ("दिन", "दिन"), ("তিন", "তিন"), ("พ่อ", "พ่อ"), ("كِتَابٌ", "كتاب"), ("שָׁלוֹם", "שלום"),
    ("יְלָדִים", "ילדים"), ("cafe\u0301", "café")])
def test_open_answers_match_after_normalising(response, gold):
    assert match_open(response, gold)
    assert answers.score_answer(response, {"type": "open", "answer": gold}) == 1.0


@pytest.mark.parametrize("response, gold", [
    ("", ""), (".", "."), ("the", "A"), (".", "A"), ("!!", "A"), ("", "A"), ("4", "14"),
    ("zoom", "dolly zoom"), ("not red", "red"), ("-5", "5"), ("1.5", "15"), ("C++", "C"),
    ("50", "50%"), ("red or blue", "red"), ("any item", "AI"),
    # Vowels that are combining marks: day and gift, peacock and blow, three and oil, father and you
    ("दान", "दिन"), ("मार", "मोर"), ("তেল", "তিন"), ("เธอ", "พ่อ")])
def test_open_answers_that_differ_do_not_match(response, gold):
    assert not match_open(response, gold)


@pytest.mark.parametrize("text", [
    "选项B", "答案是选项B", "答案：选项B", "答案 B", "选项B正确", "最佳答案是选项B：蓝色的车",
    "选项A错误。答案是选项B", "A \u2717\nB \u2713\nC \u2717\nD \u2717", "A? No. B? Yes."])
def test_letters_in_chinese_and_with_marks(text):
    assert extract_letter(text, ["a red car", "a blue car", "a green car", "a white car"]) == "B"


@pytest.mark.parametrize("task, answer, score", [
    ({"type": "mcq", "answer": "B", "options": PETS}, "It is the dog.", 1.0),
    ({"type": "mcq", "answer": "B", "options": PETS}, "A", 0.0),
    ({"type": "grounding", "answer": [5, 15]}, "0 - 10", 1 / 3),
    ({"type": "list", "answer": "red, 2 blue"}, "Red, two blue.", 1.0),
    ({"type": "list", "answer": "red, blue"}, "red, green", 0.0),  # the whole list
    ({"type": "open", "answer": "blue car"}, "red car", 0.0),
    ({"type": "open", "answer": "blue car"}, None, 0.0)])
def test_grades_ask_for_the_whole_answer(task, answer, score):
    assert answers.score_answer(answer, task) == pytest.approx(score)


@given(anything, anything, st.sampled_from(["mcq", "open", "list", "grounding"]))
@settings(deadline=None, max_examples=300)
def test_no_text_raises(text, more, kind):
    gold = {"mcq": "A", "open": "red car", "list": "1 red, 2 blue", "grounding": (1, 5)}[kind]
    answer = answers.answer_or_tail([text, more])
    task = {"type": kind, "answer": gold, "options": PETS}
    assert 0.0 <= answers.score_answer(answer, task) <= 1.0
