"""
Tests of evaluation/answers.py: python -m pytest tests/test_answers.py -q

Tables of the forms in which models write letters, spans and open answers, with a reply for each
alternative of the patterns that read them.
"""
import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rewards import CALL, anything

from evaluation import answers
from evaluation.answers import extract_letter, extract_span, match_open, never_closed

PETS = ["cat", "dog", "hot dog", "two birds", "none"]  # options A to E
CARS = ["a red car", "a blue car", "a green car", "a white car"]


def test_docstring_example_runs():
    assert doctest.testmod(answers).failed == 0 and doctest.testmod(answers).attempted == 1


@pytest.mark.parametrize("turns, want", [
    (["<think>A</think> B "], "B"), (["hm</think>B"], "B"), (["<think>A"], None), (["B"], "B"),
    ([f"{CALL} B"], "B"), (["<tool_response>A</tool_response>B"], "B"),
    (["<tool_call>{"], None), (["x</think>C<answer>B</answer>"], "B"), ([], None)])
def test_evaluation_falls_back_on_the_text_after_the_thought(turns, want):
    assert answers.answer_or_tail(turns) == want


@pytest.mark.parametrize("response, want", [
    ("B", "B"), ("b", "B"), ("(b)", "B"), ("B.", "B"), ("**B**", "B"), ("Ｂ", "B"),
    ("\\boxed{D}", "D"),
    ("B. dog", "B"), ("B) dog", "B"), ("(E) none", "E"), ("B: the brown one", "B"),
    ("(E) dog", None), ("A. dog", None),  # label and text contradict each other
    ("F", None), ("AB", None), ("A, C", None), ("B or C", None), ("", None), ("Cannot tell", None),
    ("The answer is (b).", "B"), ("The answer is B because of the tail", "B"),
    ("Answer: A because it shows", "A"),
    ("The answer is A. No, wait: the answer is C.", "C"), ("The answer is B, not option C", "B"),
    ("A. The answer is B, or option C", None), ("A. The answer is B", None),
    ("I would not choose B, C", "C"), ("The answer is B or C", None),
    ("The answer is Apples", None), ("The answer is A man", None), ("answer is not A", None),
    ("The correct option is D.", "D"), ("I would choose C", "C"),
    ("option B is wrong, option C is right", "C"),
    ("option B, option C", None), ("not B but C", "C"), ("neither A nor B, D", "D"),
    ("A man is running so B", "B"), ("A man is running", None), ("A's car", None),
    ("A request timed out", None),
    ("I think ...", None), ("I think it is the dog", "B"), ("A hot dog", "C"), ("2 birds", "D"),
    ("the dog is not there", None), ("cat and dog", None), ("catalogue", None),
    ("A. cat\nB. dog\nThe answer is B", "B"), ("A. cat\nB. dog", None),
    ("<think>A</think>B", "B"), ("<think>B", None), ("<think>x</think><answer>A</answer>", "A"),
    ("Therefore, the final answer is: B.", "B"), ("<answer>X</answer><answer>B</answer>", "B"),
    ("<answer>B</answer> as A said", "B"),
    ("<answer>\\boxed{C}</answer>", "C"), ("<answer>B", "B"), ("Best option: (B", "B"),
    ("B) dog, since it barks", "B"), ("[D]", "D"),
    ("The man picks B-roll", None), ("The best answer is: D. two birds", "D"),
    ("I choose the dog, not the cat", None),
    ("<action>A</action><observation>it is A</observation>B", "B"), ("<think>so B</think>", None),
    ("dog.", "B"), ("It is option (c), a hot dog.", "C"), ("A shows two, C four.\nB", "B")])
def test_letter_is_read_by_policy(response, want):
    assert extract_letter(response, PETS) == want


@pytest.mark.parametrize("response, want", [
    ("It happens in the 24.3 - 30.4 seconds, no, in 5-7", (5, 7)), ("start: 10, end: 20", (10, 20)),
    ("The event happens in 24.3 - 30.4 seconds.", (24.3, 30.4)), ("12.54 to 17.83", (12.54, 17.83)),
    ("The start time is 12.5 seconds and the end time is 20 seconds.", (12.5, 20)),
    ("starts at 3 seconds and ends at 9 seconds", (3, 9)), ("1:02:03 - 1:02:10", (3723, 3730)),
    ("<think>1-2</think><answer>3-4</answer>", (3, 4)), ("from 00:03 until 00:09", (3, 9)),
    ('{"start_time":10,"end_time":20.5}', (10, 20.5)), ("10.5–20 seconds", (10.5, 20)), ("", None),
    ("1 minute 30 seconds to 2 minutes", (90, 120)), ("<answer>3 - 9</answer> or 10 - 12", (3, 9)),
    ("between 10 and 20", (10, 20)), ("2 to 3 minutes", (120, 180)), ("10, 20 seconds", (10, 20)),
    ("it lasts 6 seconds", None), ("from 10 to 20", (10, 20)), ("0:10 to 0:20", (10, 20)),
    ("at 10, 20 people", None), ("2024-2025 frames", None), ("[[3.5, 9]]", (3.5, 9)), ("10", None),
    ("start 9, end 3", None), ("5-7, then 9-8", None), ("10s, 20s", (10, 20)), ("10, 20", (10, 20)),
    ("[10, 20]", (10, 20)), ("frames 10-20", None), ("10-20 frames", None), ("10 - 20", (10, 20)),
    ("1:2:3:4 - 5", None), ("<think>1-2", None), ("１０－２０", (10, 20)),
    ("(3 , 9)", (3, 9)), ("1.2.3, 5", None), ("20 - 10", None), ("10 - 10", None), ("5%-6%", None),
    ("-5 - 10", None), ("3s-9s", (3, 9)), ("٣ - ٥", None)])
def test_span_is_read_in_seconds(response, want):
    assert extract_span(response) == want


@pytest.mark.parametrize("response, gold", [
    ("The Dolly Zoom.", "dolly zoom"), ("twenty", "20"), ("1,000", "1000"), ("H₂O", "h2o"),
    ("5.0", "five"), ("x²", "x2"), ("dont", "don't"), ("50%", "50 percent"),
    ("well known", "well-known"), ("007", "7"), ("(A)", "A"),
    ("दिन", "दिन"), ("তিন", "তিন"), ("พ่อ", "พ่อ"), ("كِتَابٌ", "كتاب"), ("שָׁלוֹם", "שלום"),
    ("cafe\u0301", "café")])
def test_open_answers_match_after_normalising(response, gold):
    assert match_open(response, gold)
    assert answers.score_answer(response, {"type": "open", "answer": gold}) == 1.0


@pytest.mark.parametrize("response, gold", [
    ("", ""), (".", "."), ("the", "A"), (".", "A"), ("!!", "A"), ("", "A"), ("4", "14"),
    ("zoom", "dolly zoom"), ("not red", "red"), ("-5", "5"), ("1.5", "15"), ("C++", "C"),
    ("50", "50%"), ("red or blue", "red"),
    # Vowels that are combining marks: day and gift, peacock and blow, three and oil, father and you
    ("दान", "दिन"), ("मार", "मोर"), ("তেল", "তিন"), ("เธอ", "พ่อ")])
def test_open_answers_that_differ_do_not_match(response, gold):
    assert not match_open(response, gold)


@pytest.mark.parametrize("text", [
    "选项B", "答案是选项B", "答案：选项B", "答案 B", "选项B正确", "最佳答案是选项B：蓝色的车",
    "选项A错误。答案是选项B", "A \u2717\nB \u2713\nC \u2717\nD \u2717", "A? No. B? Yes.",
    "A \u274c B \u2705 C \u274c D \u274c"])
def test_letters_in_chinese_and_with_marks(text):
    assert extract_letter(text, CARS) == "B"


def test_a_letter_that_is_only_discussed_does_not_win():
    text = "Looking at it: A is red, B is blue. The video shows blue. So B"
    assert extract_letter(text, CARS) in ("B", None)


@pytest.mark.parametrize("text, want", [
    ("12.5 - 20.0\nConfidence: 0.9", (12.5, 20)),
    ("Answer: 12.5 - 20.0\nConfidence: 85%", (12.5, 20)),
    ("12.5 - 20.0 seconds\nConfidence: high", (12.5, 20)), ("confidence 0.8 - 0.9", None),
    ("00:12.5 - 00:20\nconfidence 90%", (12.5, 20)),
    ("(2,5 - 7,5)", (2.5, 7.5)), ("(2,5 s - 7,5 s)", (2.5, 7.5)), ("[2, 5]", (2, 5)),
    ("(2 - 7,5)", None), ("(2.5, 7.5)", (2.5, 7.5)),
    ("12.5\u201420.0", (12.5, 20)),
    ("12.5 \u2014 20.0", (12.5, 20)), ("31.0\u221244.5", (31, 44.5)),
    ("1m30s - 2m", (90, 120)), ("2m - 2m40s", (120, 160)), ("1h2m3s - 1h2m9s", (3723, 3729)),
    ("12.5秒 - 20秒", (12.5, 20)), ("12.5秒到20秒", (12.5, 20)), ("1分30秒至2分5秒", (90, 125)),
    ("在12.5秒到20秒之间", (12.5, 20))])
def test_spans_in_forms_that_a_reader_would_expect(text, want):
    assert extract_span(text) == want


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


@pytest.mark.parametrize("text, think_open, want", [
    ("<think>a</think>", False, False), ("a</think><think>b", True, True), ("hm", False, False),
    ("hm</think>x", True, False), ("<think>hm", False, True), ("hm", True, True)])
def test_never_closed_by_hand(text, think_open, want):
    assert never_closed(text, think_open) is want


# A reply for each alternative of the patterns that read letters and times. Without the alternative
# that reply is read in another way (the last test drops them one by one).
CLOSE = "Close: A, C. "  # so that neither the first letter nor the only one decides
STATED = [
    *((f"{CLOSE}{subject} {verb} B.", "B")
      for verb in ("is", "would be", "should be", "must be", "is most likely")
      for subject in ("The answer", "The best option", "The choice", "I think it")),
    *((f"{CLOSE}B {verb} {what}.", "B") for verb in ("is", "is clearly")
      for what in ("correct", "the answer", "the best option", "the choice")),
    *((f"{CLOSE}{who} {choose} B.", "B") for who in ("I", "I'd", "I'll", "I would", "I will")
      for choose in ("choose", "select", "pick", "go with")),
    (CLOSE + "Answer: B", "B"), (CLOSE + "Best option: B", "B"), (CLOSE + "It's B.", "B"),
    (CLOSE + "It’s B.", "B"), (CLOSE + "The answer is option B.", "B"),
    (CLOSE + "The answer is (B).", "B"), (CLOSE + "I choose [B].", "B"),
    (CLOSE + "(B) is correct", "B"), ("The limit is C and the top is B.", None),
    ("The answer is Apples", None), ("Answer: B-roll", None), ("The answer is A's car", None),
    ("The answer is C++", None), ("The answer is C#", None), ("The answer is A.M. radio", None),
    # the first letter of a reply
    ("Option B\n\nOption C would need a bun.", "B"), ("(B)\nNot C: there is no bun.", "B"),
    ("Option B, as it barks; (A) meows.", "B"), ("(B), as it barks; (A) meows.", "B"),
    ("A is close, C is closer.", None), ("(A) has no bun, C has one.", None),
    # one capital
    ("It looks like option b", "B"), ("x = 30°A", None), ("A.B. news", None),
    # a label
    ("A. dog", None), ("(A) dog", None), ("Look:\nb\nOption C would need a bun.", "B"),
    ("Look:\nb)\nOption C would need a bun.", "B"),
    ("Answer: dog\nThe cat sleeps.", "B"), ("The answer is: dog\nThe cat sleeps.", "B"),
    ("The correct answer is dog\nThe cat sleeps.", "B"), ("Option dog\nThe cat sleeps.", "B"),
    # two letters
    ("The answer is A or B.", None), ("The answer is A and B.", None),
    ("The answer is A as well as B.", None),
    ("The answer is B and possibly D.", None), ("Answer: (A) or (B)", None),
    ("Answer: A., or B", None),
    ("Answer: A/B", None), ("Answer: (A) / (B)", None), ("Answer: A, B", None),
    ("Answer: (A), (B)", None),
    ("Answer: B (or D)", None), ("Answer: A I think it purrs.", "A"), ("Answer: A, option B", None),
    ("Answer: A, B, C", None), ("The answer is either A or B.", None),
    ("The clip shows labels A and C.", None), ("The clip shows labels A or C.", None),
    ("The clip shows labels A nor C.", None), ("The clip shows labels A/C.", None),
    ("The clip shows labels A, C.", None), ("The clip shows labels (A) (C).", None),
    # a letter that is denied
    *((f"{denial} A. So B", "B") for denial in (
        "It is not", "It was never", "I doubt", "It is anything but", "It is unlikely to be",
        "I ruled out", "It isn't", "It is not option", "It is not answer", "I do not choose",
        "I do not pick", "I do not think it is", "I do not believe it's",
        "I do not think that it is", "It is not D or", "Neither C nor")),
    ("I doubt it is A. So B", "B"), ("So A, B is wrong.", "A"), ("Neither A nor B, D", "D"),
    ("B rather than A", "B"), ("B, instead of A", "B"), ("答案不是B", None), ("不选B，选C", "C"),
    *((f"A {denial}. So B", "B") for denial in (
        "is not it", "isn't it", "can't be it", "does not fit", "is wrong", "seems wrong",
        "is incorrect", "is ruled out",
        "can be excluded", "has been eliminated", "is unlikely", "is probably wrong")),
    # words that a letter follows, words that follow a letter
    *((f"Yes {word} B", "B") for word in (
        "option", "choice", "answer", "choose", "select", "pick", "with", "is", "be", "so", "but",
        "as", "thus", "hence",
        "say", "matches", "and", "towards", "like", "leaving", "probably", "or", "nor")),
    *((f"Yes: B {word} x", "B") for word in (
        "because", "since", "as", "or", "nor", "and", "is", "but", "rather than", "that", "the",
        "this", "there", "it", "its", "in", "seems", "best", "has")),
    ("He takes vitamins B", None), ("Vitamin B", None), ("A best-selling book", None),
    ("A man", None), ("B选项正确", "B"), ("答案是B", "B"),
    ("(A) is wrong. So B", "B"), ("A and B are wrong. So C", "C"),
    ("A, and (B) are wrong. So C", "C")]
TIMES = [
    # joined
    *((f"10 {joint} 20", (10, 20)) for joint in ("-", "–", "~", "→", "-->", "to", "up to",
      "through", "until", "and")),
    ("10,20", (10, 20)), ("It is [10, 20] here", (10, 20)), ("It is ( 10, 20) here", (10, 20)),
    ("at 10, 20 people", None),
    ("10s, 20 here", (10, 20)), ("10 s - 20", (10, 20)), ("10 sec to 20", (10, 20)),
    ("10 second to 20", (10, 20)), ("10 seconds to 20", (10, 20)),
    ("10 sec. to 20", (10, 20)), ("1:00:10 - 1:00:20.5", (3610, 3620.5)), ("10.5-20", (10.5, 20)),
    ("from 10 to about 20", (10, 20)), ("from 10 to around 20", (10, 20)),
    ("second 10 to second 20", (10, 20)),
    ("t = 10 to t = 20", (10, 20)), ("-5 - 10", None), ("10 - 20, 80-90% sure", (10, 20)),
    ("10 - 20, 80.5-90.5% sure", (10, 20)), ("10, 20 seconds", (10, 20)),
    *((f"10 - 20, {denial} 3 - 5", (10, 20)) for denial in ("never", "rather than", "instead of",
      "I ruled out", "it isn't")),
    *((f"10 - 20, as 3 - 5 {denial}", (10, 20)) for denial in ("is wrong", "can be excluded",
      "can't be", "isn't it", "does not fit")),
    # named
    ("start: 10, end: 20", (10, 20)), ("begins at 10 and ends at 20", (10, 20)),
    ("starts at 10 and finishes at 20", (10, 20)),
    ("starts at 10 and stops at 20", (10, 20)), ('{"start_time": 10, "end_time": 20}', (10, 20)),
    ("Start time: 10\nEnd time: 20", (10, 20)),
    ("Start timestamp: 10, end timestamp: 20", (10, 20)), ("Start (s): 10, end (s): 20", (10, 20)),
    ("Start (seconds): 10, end (seconds): 20", (10, 20)),
    ("starts at about 10, ends at around 20", (10, 20)),
    ("starts at around 10, ends at about 20", (10, 20)),
    ("starts at second 10, ends at second 20", (10, 20)),
    ("starts at t = 10, ends at t = 20", (10, 20)),
    ("Start: 0:10, end: 0:20.5", (10, 20.5)), ("Start: 0:10.5, end: 0:20", (10.5, 20)),
    # no times
    ("frames 10-20", None), ("frame 10-20", None), ("10-20 frames", None),
    ("frames from 10 to 20", None),
    ("10 - 20, confidence 0.8-0.9", (10, 20)), ("10 - 20, confidence: 0.8-0.9", (10, 20)),
    ("10 - 20 (0.8-0.9 confidence)", (10, 20)), ("10 to 20, I am 80-90 percent sure", (10, 20)),
    # minutes
    ("2 min to 3 min", (120, 180)), ("2 mins to 3 mins", (120, 180)), ("2-3 min", (120, 180)),
    ("1 minute to 2 minutes", (60, 120)), ("1.5 min to 2 min", (90, 120)),
    ("2min to 3min", (120, 180)), ("1m5s to 1m20s", (65, 80)), ("1m 5 s - 1m 20 s", (65, 80)),
    ("10 - 20, a depth of 4 m to 8 m", (10, 20)),
    ("1 minute, 5 seconds to 1 minute and 20.5 seconds", (65, 80.5)),
    ("12.5 - 20, neither 3 - 5 nor 6 - 7", (12.5, 20)), ("10 - 20, not from 3 to 5", (10, 20)),
    ("10 - 20, not between 3 and 5", (10, 20)), ("It does not happen from 10 to 20", None)]


@pytest.mark.parametrize("response, want", STATED)
def test_each_alternative_reads_a_letter(response, want):
    assert extract_letter(response, PETS) == want


@pytest.mark.parametrize("response, want", TIMES)
def test_each_alternative_reads_a_range(response, want):
    assert extract_span(response) == want
