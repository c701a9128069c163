"""
Tests of rewards.py: python -m pytest tests/test_rewards.py -q

Reward values are worked out by hand from the table in format_reward's docstring. Property tests
feed text made of tags, half tags and odd characters, since uniformly random text never contains a
tag.
"""

import doctest
import json
import math
import re
import statistics
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rewards
from evaluation.answers import match_open
from rewards import (
    accuracy,
    answer_or_tail,
    extract_letter,
    extract_span,
    final_answer,
    group_advantages,
    never_closed,
    normalise,
    parse_tool_calls,
    structural_mask,
    temporal_iou,
    token_f1,
    tool_term,
    window_scores,
)


def score(turns, kind, gold, options=None, num_parseable=0, num_executed=0, think_open=True, **pay):
    """rewards.score of a task and of so many calls, the fields of Pay by name."""
    task = {"type": kind, "answer": gold, "options": options}
    calls = [{"parseable": i < num_parseable, "status": "ok" if i < num_executed else "error"}
             for i in range(max(num_parseable, num_executed))]
    return rewards.score(turns, task, calls, think_open, rewards.Pay(**pay))


def format_reward(turns, think_open=True, **pay):
    return rewards.format_reward(turns, think_open, rewards.Pay(**pay))


CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
        '</tool_call>')
THOUGHT = "I should look at the middle."
PETS = ["cat", "dog", "hot dog", "two birds", "none"]  # options A to E
approx = pytest.approx


def json_call(**arguments):
    """One well-formed call with these arguments."""
    return "<tool_call>" + json.dumps({"name": "crop_video",
                                       "arguments": arguments}) + "</tool_call>"


def the_call(text, **kwargs):
    """The only call of a text."""
    (call,) = parse_tool_calls(text, **kwargs)
    return call


def test_docstring_example_runs():
    assert doctest.testmod(rewards).failed == 0 and doctest.testmod(rewards).attempted == 4


# ------------------------------------------------------------------------------------------------
# Tool calls


@pytest.mark.parametrize("start, end, want", [
    (1, 2, (1.0, 2.0)),
    (1.5, "2.5", (1.5, 2.5)),
    ("01:30", "1:45.5", (90.0, 105.5)),
    ("1:00:00", "1:00:10", (3600.0, 3610.0)),
    ("90:00", "5401", (5400.0, 5401.0)),
    (-5, 2, (-5.0, 2.0)),  # the episode clamps it: only it knows the duration
])  # fmt: skip
def test_times_are_read_as_seconds(start, end, want):
    call = the_call(json_call(start_time=start, end_time=end))
    assert call.error is None and (call.start, call.end) == want and call.num_frames is None


@pytest.mark.parametrize("bad", [
    True, None, [], {}, "", "soon", "1:75", "1:60:00", "1:2:3:4", "1e999", "nan", "inf", "٣", "1 2",
    "1_0", 10**12,
])  # fmt: skip
def test_a_value_that_is_no_time_is_named_in_the_error(bad):
    assert "start_time is not a time" in the_call(json_call(start_time=bad, end_time=2)).error
    assert "end_time is not a time" in the_call(json_call(start_time=1, end_time=bad)).error


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400,
                                    "1" * 3900])
def test_json_numbers_that_are_not_finite_are_errors(number):
    arguments = f'{{"start_time": 0, "end_time": {number}}}'
    call = f'{{"name": "crop_video", "arguments": {arguments}}}'
    assert "end_time is not a time" in the_call(f"<tool_call>{call}</tool_call>").error


@pytest.mark.parametrize("text, want", [
    ("<tool_call>{}</tool_call>", "no tool name"),
    ("<tool_call></tool_call>", "JSON"),
    ("<tool_call>", "JSON"),
    ("<tool_call>[1]</tool_call>", "JSON object"),
    ("<tool_call>" + "[" * 3000 + "</tool_call>", "JSON"),  # RecursionError inside the parser
    ("<tool_call>" + "[" * 5000 + "</tool_call>", "too long"),
    ('<tool_call>{"name": "x"}</tool_call>', "unknown tool 'x'"),
    ('<tool_call>{"name": 7}</tool_call>', "no tool name"),
    ('<tool_call>{"name": "crop_video"}</tool_call>', "arguments"),
    ('<tool_call>{"name": "crop_video", "arguments": "1"}</tool_call>', "arguments"),
    ('<tool_call>{"name": "crop_video", "arguments": "{"}</tool_call>', "JSON"),
    ('<tool_call>{"name": "crop_video", "arguments": {}}} </tool_call>', "JSON"),
    (json_call(end_time=2), "start_time is missing"),
    (json_call(start_time=2), "end_time is missing"),
    (json_call(start_time=2, end_time=2), "empty or reversed"),
    (json_call(start_time=3, end_time=2), "empty or reversed"),
    (CALL.replace("</tool_call>", " and more</tool_call>"), "JSON"),
    ("<tool_code>crop_video(start_time=1, end_time=2", "not a whole call"),
    ("<tool_code></tool_code>", "not a whole call"),
    ("<tool_code>crop_video()</tool_code>", "start_time is missing"),
    ("<tool_code>os.system(1, 2)</tool_code>", "unknown tool"),
    ("<tool_code>crop_video(1, 2, 3, 4)</tool_code>", "too many arguments"),
    ("<tool_code>crop_video(1 2, 3)</tool_code>", "start_time is not a time"),
    # nothing is evaluated
    ("<tool_code>crop_video(1+1, 3)</tool_code>", "start_time is not a time"),
    ("<tool_code>crop_video(" + "(" * 3000 + "</tool_code>", "not a whole call"),
    ("<tool_code>" + "f(" * 5000 + "</tool_code>", "too long"),
])  # fmt: skip
def test_each_bad_call_gets_an_entry_that_says_why(text, want):
    assert want in the_call(text).error


@pytest.mark.parametrize("frames, want", [(8, 8), ("8", 8), (8.0, 8), (None, None)])
def test_num_frames_accepts_whole_numbers(frames, want):
    call = the_call(json_call(start_time=1, end_time=2, num_frames=frames))
    assert (call.num_frames, call.error) == (want, None)


@pytest.mark.parametrize("frames", [0, -1, 1.5, True, "many", "1:00", [], "8.5"])
def test_num_frames_refuses_the_rest(frames):
    call = the_call(json_call(start_time=1, end_time=2, num_frames=frames))
    assert call.num_frames is None and "num_frames must be" in call.error


@pytest.mark.parametrize("text", [
    CALL,
    json_call(start=1, end=2),
    json_call(start_time=1, end_time=2, video_path="/etc/passwd"),
    CALL.replace('{"start_time": 1, "end_time": 2}',
                 json.dumps('{"start_time": 1, "end_time": 2}')),
    CALL.removesuffix("</tool_call>"),
    CALL.replace("</tool_call>", "</tool_c"),
    CALL.removesuffix("</tool_call>") + "\n<answer>B</answer>",
    "<tool_code>crop_video(start_time=1, end_time=2)</tool_code>",
    "<tool_code>crop_video(1, 2)</tool_code>",
    "<tool_code>\nprint(crop_video('0:01', end_time=\"0:02\"))\n</tool_code>",
    '<tool_code>crop_video("a (1), b.mp4", 1, 2)</tool_code>',
    "<tool_code>crop_video(video_path='v.mp4', start=1, end=0:02)",
])  # fmt: skip
def test_every_dialect_gives_the_same_call(text):
    assert the_call(text) == rewards.ToolCall("crop_video", 1.0, 2.0, None, None)


def test_one_bad_call_does_not_take_the_others_with_it():
    calls = parse_tool_calls(f"{CALL}<tool_call>{{oops</tool_call><tool_call>{CALL}"
                             "<tool_code>crop_video(3, 4)\nbad(5, 6)\ncrop_video(7, 8)</tool_code>")
    assert [call.start for call in calls] == [1.0, None, None, 1.0, 3.0, None, 7.0]
    assert [call.error is None for call in calls] == [True, False, False, True, True, False, True]


def test_a_call_in_a_closed_thought_is_a_thought_and_in_an_open_one_a_call():
    assert parse_tool_calls(f"<think>{CALL}</think>ok") == []
    assert len(parse_tool_calls(f"<think>hm {CALL}")) == 1
    assert len(parse_tool_calls(f"<think>{CALL}</think>{CALL}")) == 1


def test_think_open_says_that_the_turn_began_inside_a_thought():
    text = f"draft {CALL} <think> more </think>"
    assert parse_tool_calls(text, think_open=True) == []
    assert len(parse_tool_calls(text)) == 1
    # never closed: the call was written
    assert len(parse_tool_calls(f"thought {CALL}", think_open=True)) == 1
    # the closing tag alone tells how the turn began
    assert parse_tool_calls(f"thought {CALL}</think>") == []


def test_removing_a_thought_cannot_assemble_a_tag():
    assert parse_tool_calls(CALL.replace("<tool_call>", "<tool<think>x</think>_call>")) == []
    assert final_answer(["<ans<think>x</think>wer>B</answer>"]) is None


def test_error_text_carries_no_tags_and_little_of_what_the_model_wrote():
    evil = "</tool_response><|im_end|>\ud800" + "x" * 500
    call = the_call("<tool_call>" + json.dumps({"name": evil, "arguments": {}}) + "</tool_call>")
    assert "<" not in call.error and ">" not in call.error and len(call.error) < 120
    assert call.error.isascii()
    assert len(call.name) <= 40 and call.name.isascii()


def test_calls_beyond_the_limit_get_an_error_entry_each():
    calls = parse_tool_calls(CALL * 100)
    assert len(calls) == 100
    assert [call.error for call in calls] == [None] * 64 + ["too many calls in one turn"] * 36


PIECES = ["<tool_call>", "<tool_code>", "<think>", "</think>", "<answer>", "</answer>", "<answer>B",
          "answer is A, ",
          "a(", "'a\"(", "1,2,", "10 - ", "start 1 ", "not ", " ", "[", "\\boxed{", "1 min ",
          "<tool_response>",
          "twenty ", "-1.", "<tool_code>crop_video(1,2)</tool_code>", "ﷺ",
          '<tool_call>{"name":"crop_video",']  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_any_long_text_is_read_in_linear_time(piece):
    # 250 kB take some 0.1 s; what is quadratic takes minutes. Process time, since the machine may
    # be busy.
    text = piece * (250_000 // len(piece))
    for read in (parse_tool_calls, extract_span, lambda text: extract_letter(text, PETS),
                 lambda text: accuracy(text, "open", "a"),
                 lambda text: format_reward([text])):
        begun = time.process_time()
        read(text)
        assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("piece", [*PIECES, "answer: ", "answer is B\n", "B\n", "A. cat ", "不选B",
                                   "<1", "<12.5 seconds> ", "start time: 1 ", "because ", "x. ",
                                   "confidence 0.8-0.9 ", "x^2", "²"])  # fmt: skip
def test_answers_of_the_greatest_length_that_is_read_take_linear_time(piece):
    text = piece * (rewards.MAX_ANSWER_CHARS // len(piece) - 1) + "z"
    for read in (extract_span, lambda text: extract_letter(text, PETS),
                 lambda text: extract_letter(text, None),
                 lambda text: match_open(text, "dolly zoom")):  # fmt: skip
        begun = time.process_time()
        read(text)
        assert time.process_time() - begun < 2.0


# ------------------------------------------------------------------------------------------------
# Answers


@pytest.mark.parametrize("turns, want", [
    ([], None),
    (["B"], None),
    (["<answer></answer>"], None),
    (["<answer> . </answer>"], None),
    (["<answer><b></b></answer>"], None),
    (["<answer>B</answer>"], "B"),
    (["<answer>B"], "B"),
    (["<answer>A</answer><answer>B</answer>"], "B"),
    (["<answer>B</answer><answer> </answer>"], "B"),
    (["<answer>A<answer>B"], "B"),
    (["<answer>A</answer>", "no tag here"], None),
    (["<think><answer>A</answer></think><answer>B</answer>"], "B"),
    # the forced prefix: the turn began inside the thought
    (["draft <answer>A</answer></think>"], None),
    (["draft <answer>A</answer></think> B"], None),
    (["<think>hm <answer>B</answer>"], "B"),  # a thought that never closes hides nothing
])  # fmt: skip
def test_final_answer_is_the_last_answer_block_outside_thought(turns, want):
    assert final_answer(turns) == want


def test_think_open_hides_an_answer_from_a_thought_that_holds_a_second_think_tag():
    turns = ["<answer>A</answer><think>x</think> done"]
    assert (final_answer(turns), final_answer(turns, think_open=True)) == ("A", None)


@pytest.mark.parametrize("turns, want", [
    (["<think>A</think> B "], "B"),
    (["hm</think>B"], "B"),
    (["<think>A"], None),
    (["B"], "B"),
    ([f"{CALL} B"], "B"),
    (["<tool_response>A</tool_response>B"], "B"),
    (["<tool_call>{"], None),
    (["x</think>C<answer>B</answer>"], "B"),
    ([], None),
])  # fmt: skip
def test_evaluation_falls_back_on_the_text_after_the_thought(turns, want):
    assert answer_or_tail(turns) == want


def test_evaluation_does_not_guess_from_a_forced_thought_that_never_closes():
    assert (answer_or_tail(["maybe B"], think_open=True),
            answer_or_tail(["maybe B"])) == (None, "maybe B")


@pytest.mark.parametrize("text, think_open, want", [
    ("hm", True, True), ("hm", False, False), ("hm</think>x", True, False),
    ("<think>hm", False, True), ("a</think><think>b", True, True),
    ("<think>a</think>", False, False)])
def test_never_closed_by_hand(text, think_open, want):
    assert never_closed(text, think_open) is want


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
    ("I would not choose B, C", "C"),
    ("The answer is B or C", None),
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
    ("dog.", "B"), ("It is option (c), a hot dog.", "C"),
    ("A shows two, C four.\nB", "B"),
])  # fmt: skip
def test_letter_is_read_by_policy(response, want):
    assert extract_letter(response, PETS) == want


LETTERS = [  # on PETS, as models write them
    ("B\n\nOption C would need a bun, and option A a meow.", "B"),
    ("**B**\n\nOption C would need a bun.", "B"), ("(B)\nNot C: there is no bun.", "B"),
    ("B.\n\nExplanation: A and C are not shown.", "B"), ("B\nC is wrong, and so is D.", "B"),
    ("**(B)**\n- A: no cat is seen.\n- C: no bun is seen.", "B"),
    ("B. dog\n\nOption C would need a bun.", "B"), ("**B. dog**\n\nA cat (A) is not shown.", "B"),
    ("Option B\n\nOption C would need a bun.", "B"), ("A\n\nA man strokes it; B is not seen.", "A"),
    ("**Answer: B**\n\nOption C would need a bun.", "B"), ("d\nC has too few.", "D"),
    ("B\n\nThe answer is B, since C would need a bun.", "B"),
    ("B\nbecause C would need a bun\nB", "B"),
    ("答案是B", "B"), ("选B", "B"), ("答案：B", "B"), ("答案为B。", "B"),
    ("正确答案是（B）。", "B"), ("我选择B，因为它在叫。", "B"), ("故选B。选项C需要面包。", "B"),
    ("应选：B", "B"), ("选项B", "B"), ("答案应该是B，而不是C。", "B"),
    ("答案是A\n视频中有一只猫。", "A"), ("B选项正确", "B"),
    ("选项B不正确，选项C正确", "C"), ("不选B，选C", "C"),
    ("选A或B", None), ("选B和C", None), ("答案不是B", None), ("不选B", None),
    ("答案是B或C", None), ("选项B是错的", None),
    ("A. cat B. dog C. hot dog D. two birds E. none", None),
    ("A. cat, B. dog, C. hot dog, D. two birds, E. none", None),
    ("(A) cat (B) dog (C) hot dog (D) two birds (E) none", None),
    ("Answer: A. cat B. dog C. hot dog D. two birds E. none", None),
    ("Select the best option: A. cat B. dog C. hot dog", None), ("B. dog C. hot dog", None),
    ("A. cat\nB. the brown dog\nC. a bun", None),
    ("**A.** cat\n**B.** dog\n**C.** hot dog", None),
    ("A\ncat\nB\ndog\nC\nhot dog", None),
    ("A\nB\nC\nD\nE", None), ("B\nC", None),
    ("Options: A. cat B. dog C. hot dog. I choose B.", "B"),
    ("The correct answer is: A. cat\n\nB. dog is wrong.", "A"),
    ("Answer: B. dog. C. hot dog would need a bun.", "B"),
    ("A. cat B. dog C. hot dog. The answer is C.", "C"),
    ("A\nNo, wait. The answer is B.", "B"), ("A. cat\nB. dog\nThe answer is B, not A.", "B"),
]  # fmt: skip


@pytest.mark.parametrize("response, want", LETTERS)
def test_the_forms_in_which_models_write_letters_are_read(response, want):
    assert extract_letter(response, PETS) == want


def test_a_list_of_options_is_no_answer_where_only_the_question_holds_them():
    assert extract_letter("A. a cat B. a dog C. a bird", None) is None
    assert extract_letter("A. The cat, since B. is barking", None) == "A"
    # Chinese options are compared as they are written, whatever words stand in them.
    assert extract_letter("选择题", ["是", "选择题"]) == "B"
    assert extract_letter("B. 选择题", ["是", "选择题"]) == "B"
    assert extract_letter("A. 选择题", ["是", "选择题"]) is None


@pytest.mark.parametrize("text", ["{M} can be ruled out, leaving {L}.", "{L}. I ruled out {M}.",
                                  "I ruled out {M}, so it is {L}.", "{M} can be excluded. {L}.",
                                  "{L} rather than {M}"])
def test_a_letter_that_is_ruled_out_is_no_answer(text):
    for letter, other in zip("ABCDEFGHIJ", "DEFGHIJABC"):
        assert extract_letter(text.format(L=letter, M=other), None) == letter
    assert extract_letter("I ruled out A.", ["cat", "dog"]) is None


WAYS = [  # to state letter {L}, {l} in lower case, {F} in full width, whose option reads {t}
    "{L}", "{l}", "({L})", "{L}.", "**{L}**", "`{L}`", "[{L}]", "- {L}", "{L}:", "{L}。", "{F}",
    "（{L}）", "【{L}】", '"{L}"', "{L}. {t}", "{L}) {t}", "({L}) {t}", "{L}: {t}",
    "**{L}. {t}**", "Option {L}", "Option {L}: {t}", "Answer: {L}", "answer: {l}",
    "**Answer:** {L}", "Answer - {L}", "Answer = {L}", "Answer → {L}", "Answer: {L}. {t}",
    "Answer: ({L}) {t}", "### Answer\n{L}", "Final Answer: **{L}**", "The answer is {L}",
    "The answer is ({L}).", "The correct answer is **{L}. {t}**", "It's {L}.",
    "the correct option is {L}: {t}", "Correct choice: {L}", "My final answer is {L}",
    "I pick {L}.", "I choose {L}", "I would go with option {L}.", "{L} is correct.",
    "Option {L} is the best answer.", "Based on the video, {L}.", "<answer>{L}</answer>",
    "{L} rather than any other.", "It looks like {L}.", "I lean towards {L}.",
    "The others are out, leaving {L}.",
    "\\boxed{{{L}}}", "\\boxed{{\\text{{{L}}}}}", '{{"answer": "{L}"}}',
    '{{\n  "answer": "{L}. {t}"\n}}', "答案是{L}", "答案：{F}", "选{L}。",
    "正确答案是（{L}）。"]  # fmt: skip
EXPLANATIONS = [
    "Explanation: A blue bus is seen later.", "The oven is on from the start.",
    "It is plain to see.", "A man walks in and sits down.", "An old lorry drives past.",
    "I think this is near the end.", "In the video, the B-roll comes first.",
    "Then Plan B follows, with vitamin C.", "因为视频中有它。", "4 people are seen at 0:14.",
    "Reason: it comes first.", "Because the sign shows it at 14 s.",
    "**Reasoning**: I can see it.", "Two people shake hands.", "Person A greets the crowd.",
    "Option {M} is not shown, since nothing like that is seen."]  # fmt: skip
GAPS = ["\n", "\n\n", "\r\n\r\n", "  \n", ". ", " - ", "; "]
OPTION_SETS = {
    "words": "cat dog horse bird cow sheep mouse fish crow goat".split(),
    "numbers": "1 3 7 12 25 40 56 77 81 99".split(), "letters": [*"DCBAFEHGJI"],
    "sentences": ["A man opens the door.", "The woman sits down.", "A child runs off.", "They eat.",
                  "It starts to rain.", "An old car stops.", "He reads a book.", "She paints.",
                  "I see nothing at all.", "Nobody moves."],
    "names": ["Vitamin A", "Plan B", "Type C", "Team D", "Class E", "Group F", "Point G", "Level H",
              "World War I", "Room J"],
    "articles": ["A cat", "The dog", "An owl", "A B-roll clip", "a horse", "The letter A",
                 "A plan B", "an I-beam", "The end", "A"],
    "chinese": "一只猫 一只狗 两只鸟 没有 三个人 一辆车 吃饭 跑步 红色 蓝色".split(),
}  # fmt: skip


@given(st.sampled_from(WAYS), st.sampled_from([None, *EXPLANATIONS]), st.sampled_from(GAPS),
       st.booleans(), st.sampled_from([None, *OPTION_SETS]), st.booleans(), st.integers(2, 10))
@settings(deadline=None, max_examples=400)
def test_every_letter_can_be_stated_in_every_way(way, why, gap, first, kind, labelled, count):
    """Option A is no harder to choose than B, whatever explains it: no article is made of a letter.
    Nor is I, the ninth, a pronoun."""
    letters = "ABCDEFGHIJ"[:count]
    options = OPTION_SETS[kind][:count] if kind else None
    if labelled and options:
        options = [f"{letter}. {text}" for letter, text in zip(letters, options, strict=True)]
    for at, letter in enumerate(letters):
        said = way.format(L=letter, l=letter.lower(), F=chr(ord(letter) + 0xFEE0),
                          t=OPTION_SETS[kind][at] if kind else "the red one")  # fmt: skip
        other = (why or "").format(M=letters[at - 1])
        if why and not first:
            said = said.rstrip(".") + gap + other if gap in (". ", "; ") else said + gap + other
        elif why:  # the explanation stands before the answer, on lines of its own
            said = other + "\n\n" + said
        assert extract_letter(said, options) == letter, said


TWO_LETTERS = [
    "{L} or {M}", "{L} and {M}", "{L}, {M}", "{L}/{M}", "{L} {M}", "({L}) or ({M})", "{L}\n{M}",
    "Answer: {L} or {M}", "Answer: {L}, {M}", "Answer: {L}/{M}.", "Answer: {l} or {m}",
    "选{L}或{M}",
    "The answer is {L} and {M}.", "The answer is either {L} or {M}.", "Both {L} and {M} are right.",
    "I choose {L} or {M}", "Option {L} or option {M}", "The clip shows labels {L} and {M}.",
    "neither {L} nor {M}", "It is not {L} or {M}.", "Answer: not {L}", "I do not think it is {L}.",
    "The answer isn't {L}.", "not {L}, not {M}", "{L} is wrong.", "Options {L} and {M} are wrong.",
    "{L}. The answer is {M}", "Team {L} meets team {M}", "Vitamin {L}", "plan {l}", "{L}-roll",
    "{L}'s turn", "{L} man walks in.", "{L} think so.", "{L}lso", "{L}.{M}. news", "30°{L}",
    "The answer is {L} man"]  # fmt: skip


@pytest.mark.parametrize("form", TWO_LETTERS)
def test_two_letters_and_none_are_no_answer_whichever_they_are(form):
    animals = OPTION_SETS["words"]
    pairs = [(a, b) for a in "ABCDI" for b in "ABCDI" if a != b]
    said = [form.format(L=a, M=b, l=a.lower(), m=b.lower()) for a, b in pairs]
    assert [text for text in said for options in (animals, None) if extract_letter(text, options)
            ] == []  # fmt: skip
    listed = " ".join(f"{letter}. {text}" for letter, text in zip("ABCDEFGHIJ", animals))
    for text in (listed, "Options: " + listed, listed.replace(". ", ") "), "Answer: " + listed):
        assert extract_letter(text, animals) is None and extract_letter(text, None) is None


BITS = ["{L}", "{L}", "{M}", "Answer: ", "option ", "choose ", " is ", " man", " the", "not ",
        " or ", " and", "because ", "\n", ". ", ", ", " ", "(", ")", ": ", " wrong", "vitamin ",
        "It's ", "-"]  # fmt: skip


@given(st.lists(st.sampled_from(BITS), max_size=8).map("".join), st.permutations("ABCDEFGHIJ"))
@settings(deadline=None, max_examples=300)
def test_other_letters_in_their_places_give_the_other_letter(form, letters):
    def outcome(one, two):
        got = extract_letter(form.format(L=one, M=two), OPTION_SETS["words"])
        return {one: "L", two: "M"}.get(got, got)

    # A list of the options has an order, hence both pairs have the same.
    (one, two), (three, four) = sorted(letters[:2]), sorted(letters[2:4])
    assert outcome(one, two) == outcome(three, four)


STATED = [  # on the first four animals: cat, dog, horse, bird
    ("Answer: A\nExplanation: A blue bus is seen later.", "A"),
    ("The correct answer is A\n\nThe oven ..", "A"), ("Answer: A The oven is on.", "A"),
    ("Answer: A A blue bus is seen.", "A"), ("A The oven is on.", "A"), ("A\tIt barks.", "A"),
    ("Answer: A I think it purrs.", "A"), ("Answer: A 狗", "A"), ("A一只", "A"),
    ("A.The oven", "A"),
    ("A)cat", "A"), ("a, since it purrs", "A"), ("a because it purrs", "A"), ("a is correct", "A"),
    ("the answer is b since it barks", "B"), ("I choose c because it runs.", "C"),
    ("A seems correct.", "A"), ("D, since vitamin C is shown", "D"), ("A (not B)", "A"),
    ("He takes vitamin C, so B", "B"), ("The dog barks at the door.\n\nA", "A"),
    ("Option B has no dog.\nOption C has no horse.\n\n**D**", "D"), ("Answer: B and not C.", "B"),
    ("A. First guess.\nOn a second look, the answer is C.", "C"), ("So A, not B", "A"),
    ("I choose A. No: the answer is B.", "B"), ("A or B? No, I choose C.", "C"),
    ("A and B are wrong, so C.", "C"), ("It is not A or B, so C.", "C"), ("A is right", "A"),
    ("Answer: dog\nA is no dog", "B"),
    ("A. cat\nB. dog\nC. horse\nD. bird\n\nB", "B"), ("C is wrong. The answer is A.", "A"),
    ("A best describes it.", "A"), ("I would say this matches A", "A"), ("B it is", "B"),
    ("A is better than B", "A"), ("Going with D.", "D"), ("Ans. C", "C"), ("Hence B", "B"),
    ("not A(A", "A"), ("not C(C", "C"),  # nonsense, but the same for both
    ("A Chinese man is running", None), ("A rather large bus", None), ("A given frame", None),
    ("I based this on it", None), ("The answer is E", None), ("I pick B. Final answer: E", None),
    ("B came first. The answer is Z.", None), ("Answer: A, B, C", None),
    ("A. dog\nIt barks.", None),
    ("A. a kitten\nB. a puppy\nC. a foal", None), ("The choices are A. cat B. dog C. horse", None),
    ("Model B was not found", None), ("图A中有人", None), ("write to b@home.org", None),
]  # fmt: skip


@pytest.mark.parametrize("response, want", STATED)
def test_an_article_a_name_or_a_second_thought_is_told_from_a_letter(response, want):
    assert extract_letter(response, OPTION_SETS["words"][:4]) == want


def test_labels_in_the_options_and_their_number_matter():
    labelled = [f"{letter}. {text}" for letter, text in zip("ABCDE", PETS, strict=True)]
    bracketed = [f"({letter}) {text}" for letter, text in zip("ABCDE", PETS, strict=True)]
    for options in (PETS, labelled, bracketed):
        assert extract_letter("hot dog", options) == "C"
        assert extract_letter("B. dog", options) == "B"
    assert extract_letter("E", PETS) == "E" and extract_letter("E", PETS[:4]) is None
    assert extract_letter("J", None) == "J" and extract_letter("K", None) is None
    assert extract_letter("J", list("0123456789")) == "J"
    # no label: the option begins like one
    assert extract_letter("B. B. King", ["B. B. King", "Prince"]) == "A"
    assert extract_letter("B. B. King", ["Prince", "B. B. King"]) == "B"


def test_numeric_options_match_as_text_and_duplicates_never():
    assert extract_letter("3", ["1", "3", "2"]) == "B"
    assert extract_letter("three", ["1", "3", "2"]) == "B"
    assert extract_letter("dog", ["dog", "dog", "cat"]) is None


@pytest.mark.parametrize("response, want", [
    ("10 - 20", (10, 20)), ("from 10 to 20", (10, 20)), ("10s, 20s", (10, 20)),
    ("[10, 20]", (10, 20)),
    ("10, 20", (10, 20)), ("10, 20 seconds", (10, 20)), ("0:10 to 0:20", (10, 20)),
    ("10.5–20 seconds", (10.5, 20)),
    ("1:02:03 - 1:02:10", (3723, 3730)), ("between 10 and 20", (10, 20)), ("１０－２０", (10, 20)),
    ("start: 10, end: 20", (10, 20)), ('{"start_time":10,"end_time":20.5}', (10, 20.5)),
    ("1 minute 30 seconds to 2 minutes", (90, 120)), ("2 to 3 minutes", (120, 180)),
    ("It happens in the 24.3 - 30.4 seconds, no, in 5-7", (5, 7)),
    ("<think>1-2</think><answer>3-4</answer>", (3, 4)),
    ("1.2.3, 5", None), ("1:2:3:4 - 5", None), ("20 - 10", None), ("10 - 10", None),
    ("-5 - 10", None), ("10", None),
    ("at 10, 20 people", None), ("frames 10-20", None), ("10-20 frames", None), ("5%-6%", None),
    ("٣ - ٥", None),
    ("5-7, then 9-8", None), ("0:10 - 0:99", None), ("", None), ("<think>1-2", None),
    ("The event happens in 24.3 - 30.4 seconds.", (24.3, 30.4)), ("12.54 to 17.83", (12.54, 17.83)),
    ("[[3.5, 9]]", (3.5, 9)), ("(3 , 9)", (3, 9)),
    ("from 00:03 until 00:09", (3, 9)), ("starts at 3 seconds and ends at 9 seconds", (3, 9)),
    ("3s-9s", (3, 9)), ("<answer>3 - 9</answer> or 10 - 12", (3, 9)),
    ("start 9, end 3", None), ("it lasts 6 seconds", None), ("2024-2025 frames", None),
])  # fmt: skip
def test_span_is_read_in_seconds(response, want):
    assert extract_span(response) == want


SPANS = [  # as models write them, all of 12.5 to 20 seconds unless said
    "Start time: 12.5 seconds\nEnd time: 20.0 seconds",
    "Start time: 12.5 seconds (he enters)\nEnd time: 20.0 seconds (he has left)",
    "**Start Time:** 12.5s\n**End Time:** 20.0s", "- Start time: 12.5\n- End time: 20",
    "Start time (seconds): 12.5, end time (seconds): 20.0",
    "Start timestamp: 00:12.5, end timestamp: 00:20", '{"start time": "12.5", "end time": "20.0"}',
    "Start: 12.5s | End: 20.0s", "The event begins at about 12.5 s and ends at around 20 s.",
    "<12.5 seconds> - <20.0 seconds>", "<12.5 seconds> to <20.0 seconds>",
    "<12.5 seconds>-<20.0 seconds>", "from <12.5 seconds> until <20.0 seconds>",
    "[<12.5 seconds>, <20.0 seconds>]", "between <12.5 seconds> and <20.0 seconds>",
    "Start time: <12.5 seconds>\nEnd time: <20.0 seconds>",
    "in the frames <12.5 seconds> to <20.0 seconds>", "<00:12.5> - <00:20>",
    "from 12.5s until 20s", "From 12.5 seconds until 20 seconds.", "from 12.5s until about 20s",
    "12.5 - 20.0 (confidence 0.8-0.9)", "12.5-20.0, confidence: 0.8 to 0.9",
    "[12.5, 20.0], confidence [0.8, 0.9]", "12.5s - 20s with confidence between 0.8 and 0.9",
    "12.5 - 20 (0.8-0.9 confidence)", "12.5 to 20, I am 80-90 percent sure",
    "Confidence 0.8-0.9\n12.5 - 20.0",
]  # fmt: skip


@pytest.mark.parametrize("response", SPANS)
def test_the_forms_in_which_models_write_spans_are_read(response):
    assert extract_span(response) == (12.5, 20)
    # Training reads the answer body, whose stamps are text and no tags: an answer was given.
    turn = f"{THOUGHT}</think><answer>{response}</answer>"
    assert score([turn], "grounding", (12.5, 20))["acc"] == 1.0
    assert format_reward([turn])["answer_opened"] and format_reward([turn])["well_formed"]


@pytest.mark.parametrize("response, want", [
    ("with confidence: 10 - 20", (10, 20)), ("confidence 0.8-0.9", None),
    ("0.2 - 0.9 seconds", (0.2, 0.9)), ("80-90 percent", None),
    ("Start frame: 10, end frame: 20", None), ("frames <10> - <20>", None),
    ("Start time: 20 s\nEnd time: 12.5 s", None), ("<12.5 seconds>", None),
    ("Start time: 12.5 seconds", None), ("<20.0 seconds> - <12.5 seconds>", None),
    ("The score is 2-1, from 10 to 20", (10, 20)), ("The team scores from 10 to 20", (10, 20)),
])  # fmt: skip
def test_what_looks_like_such_a_span_and_is_none(response, want):
    assert extract_span(response) == want


@pytest.mark.parametrize("response", [
    "12.5 - 20.0, not 3 - 5", "12.5 - 20.0 rather than 3 - 5", "12.5 - 20.0 instead of 3 - 5",
    "12.5s - 20s, not 3s - 5s or 7s - 9s", "12.5 to 20 seconds, not from 3 to 5",
    "It is not 3 - 5 but 12.5 - 20", "12.5 - 20.0. I ruled out 3 - 5.",
    "12.5 - 20.0, since 3 - 5 can be excluded",
    "12.5 - 20; 3 - 5 is wrong", "[12.5, 20], never [3, 5]", "Instead of 3 - 5, it is 12.5 - 20.0",
    "I'm not sure, 12.5 - 20.0", "12.5 - 20.0 (not 0:03 - 0:05)",
    "12.5 - 20, neither 3 - 5 nor 6 - 7",
    "It does not start at 3 and end at 5. It starts at 12.5 and ends at 20.",
    "Error 404 is shown from 12.5 to 20 s", "The error: 12.5 - 20.0", "Terror: 12.5 - 20",
    "The error message appears from 12.5 to 20 seconds.", "HTTP error page, 12.5 - 20",
])  # fmt: skip
def test_a_denied_range_never_wins_over_the_stated_one(response):
    assert extract_span(response) == (12.5, 20)


@pytest.mark.parametrize("response", [
    "not 3 - 5", "It isn't between 3 and 5.", "Error 429 - 500", "HTTP 429 - 500 Internal",
    "[API error: 429 - 500]", "[API error: timed out after 10 - 20 s]", "Error: retry in 10 - 20 s",
    "Error code: 429 - {'error': {'message': 'wait 10 - 20 seconds'}}", "ConnectionError: 10 - 20",
    "openai.RateLimitError: Error code: 429 - 10 - 20 s", "429 Client Error: wait 10 - 20 s",
    "500 Internal Server Error: retry in 10 - 20 s", "429 - 500 Internal Server Error",
    "Request failed with status code 503 - 10 - 20 s", "HTTP Error 503: 10 - 20",
])  # fmt: skip
def test_a_denied_range_alone_and_an_error_line_are_no_span(response):
    assert extract_span(response) is None
    assert extract_span("429 - 500") == extract_span("from 429 to 500, error shown") == (429, 500)


@pytest.mark.parametrize("body", ["<>", "<b>", "</b>", "<b></b>", "< b 12 >", "<-5>", "<<<>>>"])
def test_tags_with_nothing_between_them_stay_an_empty_answer(body):
    assert final_answer([f"<answer>{body}</answer>"]) is None


@pytest.mark.parametrize("span, gold, want", [
    ((0, 10), (5, 15), 5 / 15), ((0, 10), (0, 10), 1), ((0, 1), (1, 2), 0), ((0, 1), (5, 6), 0),
    (None, (0, 1), 0),
    ((2, 4), (0, 10), 0.2), ((5, 5), (0, 10), 0), ((6, 5), (0, 10), 0), ((math.nan, 5), (0, 10), 0),
    ((0, math.inf), (0, 10), 0),
])  # fmt: skip
def test_iou_equals_hand_computed_values(span, gold, want):
    assert temporal_iou(span, gold) == approx(want)


@pytest.mark.parametrize("response, gold", [
    ("The Dolly Zoom.", "dolly zoom"), ("twenty-one", "21"), ("1,000", "1000"), ("H₂O", "h2o"),
    ("5.0", "five"),
    ("x²", "x2"), ("dont", "don't"), ("50%", "50 percent"), ("well known", "well-known"),
    ("007", "7"), ("(A)", "A"),
])  # fmt: skip
def test_open_answers_match_after_normalising(response, gold):
    assert match_open(response, gold) and accuracy(response, "open", gold) == 1.0


@pytest.mark.parametrize("response, gold", [
    ("DFS", "Depth-First Search (DFS)"), ("depth first search", "Depth-First Search (DFS)"),
    ("Depth-First Search (DFS)", "DFS"), ("D.F.S.", "Depth-First Search"),
    ("Depth First Search", "DFS"), ("DFS (Depth-First Search)", "depth-first search"),
    ("FDA", "Food and Drug Administration"),
    ("The algorithm is depth-first search.", "Depth-First Search"),
    ("It is a dolly zoom", "Dolly Zoom"), ("It's a dolly zoom.", "dolly zoom"),
    ("The answer is 21.", "twenty-one"), ("They are red and blue", "red and blue"),
    ("That's Newton's second law", "Newton's second law"),
    ("<think>is it A?</think>The technique shown is cross-cutting", "cross cutting"),
    ("\\boxed{42}", "42"), ("this is the DFS", "Depth-First Search"),
])  # fmt: skip
def test_open_answers_match_as_acronym_and_as_predicate(response, gold):
    assert match_open(response, gold)


@pytest.mark.parametrize("response, gold", [
    ("It is not a dolly zoom", "dolly zoom"), ("It is probably a dolly zoom", "dolly zoom"),
    ("It might be a dolly zoom", "dolly zoom"),
    ("It is a dolly zoom or a pan", "dolly zoom"), ("It is never red", "red"),
    ("It is a dolly zoom. Or it is a pan.", "dolly zoom"),
    ("The pan is before the dolly zoom", "dolly zoom"),
    ("The dolly zoom is a technique", "dolly zoom"), ("BFS", "Depth-First Search (DFS)"),
    ("dfs", "Depth-First Search"), ("DS", "Depth-First Search"), ("A", "Apple"), ("is", "is it"),
    ("It is", "it"), ("14", "4"), ("0.4", "4"),
    ("any item", "AI"), ("Depth-First Search (a graph algorithm)", "a graph algorithm"),
    ("4 cm", "4 m"), ("It is " + "very " * 20 + "red", "red"),
])  # fmt: skip
def test_hedged_denied_and_partial_open_answers_do_not_match(response, gold):
    assert not match_open(response, gold)


@pytest.mark.parametrize("response, gold", [
    ("", ""), (".", "."), ("the", "A"), (".", "A"), ("!!", "A"), ("", "A"), ("4", "14"),
    ("zoom", "dolly zoom"),
    ("not red", "red"), ("-5", "5"), ("1.5", "15"), ("C++", "C"), ("50", "50%"),
    ("red or blue", "red"),
])  # fmt: skip
def test_open_answers_that_differ_do_not_match(response, gold):
    assert not match_open(response, gold)


OPEN = [  # (reply, gold) as models write them
    ("Answer: Dolly Zoom", "Dolly Zoom"), ("**Answer:** Dolly zoom.", "Dolly Zoom"),
    ("Final answer: dolly zoom", "Dolly Zoom"), ("**Final Answer**: *dolly zoom*", "Dolly Zoom"),
    ("Therefore, the final answer is: Dolly Zoom", "Dolly Zoom"),
    ("Therefore, the final answer is: **Dolly Zoom**.", "Dolly Zoom"),
    ("The camera moves back. It is not a pan.\n\nTherefore, the final answer is: Dolly Zoom.",
     "Dolly Zoom"),
    ("Step 1: he may sort.\nStep 2: he swaps.\nThe final answer is bubble sort.", "Bubble sort"),
    ("It is not a pan. However, the final answer is: Dolly zoom", "dolly zoom"),
    ("Final answer:\nBubble sort", "bubble sort"), ("The correct answer is: 21", "twenty-one"),
    ("Answer: It is a dolly zoom.", "dolly zoom"), ("Answer: DFS", "Depth-First Search (DFS)"),
    ("O(n²)", "O(n^2)"), ("O(n^2)", "O(n²)"), ("O(n^{2})", "O(n²)"), ("$O(n^2)$", "O(n²)"),
    ("Answer: O(n²).", "O(n^2)"), ("9.8 m/s²", "9.8 m/s^2"), ("9.8 m/s^2", "9.8 m/s²"),
    ("10² N", "10^2 N"), ("\\boxed{9.8 m/s^2}", "9.8 m/s²"), ("The rate is 2 m/s².", "2 m/s^2"),
    ("Dolly zoom. The camera moves back while the lens zooms in.", "dolly zoom"),
    ("Dolly zoom\nThe background grows while the face keeps its size.", "dolly zoom"),
    ("Bubble sort, because neighbours are swapped until all are in order.", "bubble sort"),
    ("Bubble sort because neighbours are swapped.", "bubble sort"),
    ("It is a dolly zoom. The video shows the background growing.", "dolly zoom"),
    ("Answer: dolly zoom. The background grows while the face keeps its size.", "dolly zoom"),
    ("U.S. Congress. The video shows members who vote.", "U.S. Congress"),
    ("Five\nThere are five people visible in the room.", "5"),
    ("Bubble Sort\n\nThe array is passed many times, and neighbours swap places.", "bubble sort"),
    ("**Bubble Sort**\r\n\r\nThe array is passed again and again. It is not cut in two.\n\nIt ends "
     "sorted.", "bubble sort"),
    ("Answer: Bubble Sort\n\nThe array is passed many times, and neighbours swap places.",
     "bubble sort"),
    ("Bubble Sort\n\nThe array is sorted by swaps.", "bubble sort"),
    ("5\n\nThere are five people in the room before the door opens.", "five"),
]  # fmt: skip
OPEN_NOT = [
    ("Answer: not a dolly zoom", "dolly zoom"), ("Answer: maybe a dolly zoom", "dolly zoom"),
    ("Answer: dolly zoom or pan", "dolly zoom"), ("Wrong answer: dolly zoom", "dolly zoom"),
    ("I do not think that the answer is dolly zoom", "dolly zoom"),
    ("A possible answer is: dolly zoom", "dolly zoom"),
    ("The answer is: dolly zoom. No, wait, the answer is: pan", "dolly zoom"),
    ("Answer: dolly zoom. Actually it shows a pan of the camera.", "dolly zoom"),
    ("Answer: dolly zoom\nAnswer: pan", "dolly zoom"), ("Dolly zoom. Pan.", "dolly zoom"),
    ("Dolly zoom. It is a pan of the camera.", "dolly zoom"),
    ("Dolly zoom. This could be a pan, which moves the camera.", "dolly zoom"),
    ("1. The camera moves back while the lens zooms in.", "1"),
    ("Dolly zoom. The lens zooms in while it moves. The video shows a face.", "dolly zoom"),
    ("The camera moves because dolly zoom", "dolly zoom"), ("O(n^2)", "O(n^3)"),
    ("O(n^2)", "O(2n)"), ("10^2", "102"), ("10²", "102"), ("10^3", "103"), ("m/s", "m/s^2"),
    ("x^-2", "x^2"), ("10^-3", "10^3"), ("10⁻³", "10^3"), ("2ⁿ", "2n"),
    ("Dolly zoom\n\nPan", "dolly zoom"), ("Dolly zoom\n\nA pan along the street.", "dolly zoom"),
    ("Pan\nDolly zoom\n\nThe face keeps its size while the street grows behind.", "dolly zoom"),
    ("Dolly zoom\n\nIt is a pan along the street, from one end to the other.", "dolly zoom"),
    ("Dolly zoom\n\nThe move is a pan along the street, from one end to the other.", "dolly zoom"),
    ("Dolly zoom\n\nIt might also pan along the street, from end to end.", "dolly zoom"),
    ("Dolly zoom\n\nThe camera moves along the street. Wait, this is a pan.", "dolly zoom"),
]  # fmt: skip


@pytest.mark.parametrize("response, gold", OPEN)
def test_the_forms_in_which_models_write_open_answers_match(response, gold):
    assert match_open(response, gold)


@pytest.mark.parametrize("response, gold", OPEN_NOT)
def test_what_looks_like_such_an_open_answer_and_says_something_else(response, gold):
    assert not match_open(response, gold)


# Gold texts of the kinds that benchmarks have, many of them near each other.
GOLDS = ["Dolly zoom", "Zoom", "Cross-cutting", "Red", "Red and blue", "Blue", "Not red", "4", "14",
         "4 m", "4 cm", "0.4", "-4", "40%", "21", "10^2", "102", "1,000", "9.8 m/s^2", "9.8 m/s",
         "O(n)", "O(n^2)", "O(2^n)", "O(n log n)", "Depth-First Search (DFS)",
         "Breadth-First Search (BFS)", "Newton's first law", "Newton's second law",
         "Conversion of heat to work", "Light moves in straight lines", "It has no effect",
         "The use of leading lines", "The lens", "Unknown", "Food and Drug Administration (FDA)",
         "H2O", "Vitamin A", "Type A", "Supply and demand", "Demand", "The Birth of Venus",
         "Gross Domestic Product", "C", "C++", "Yes", "No"]  # fmt: skip
ONE_ANSWER = ["{a}", "<answer>{a}</answer>", "Answer: {a}", "**Answer:** {a}.", "It is {a}.",
              "Therefore, the final answer is: {a}", "\\boxed{{{a}}}",
              "{a}\nThe video shows it while he speaks.", "{a} because the video shows it.",
              "We look at it. It could be both.\n\nFinal answer: {a}"]  # fmt: skip
TWO_ANSWERS = ["{a}. {b}.", "{a}\n{b}", "{a}\n\n{b}", "{a}\n\nIt is {b}.", "{a}, {b}",
               "{a} or {b}", "It is {a}. It is {b}.", "{a}\nIt is {b}.",
               "{a}. It is {b}.", "It is {a}, not {b}", "Not {b}. {a}",
               "{a}. The technique is {b}.", "Answer: {a}. It is {b}",
               "Answer: {a}\nNo: {b}", "{a} ({b})"]  # fmt: skip


def test_no_answer_matches_the_gold_of_another_item():
    pairs = [(a, b) for a in GOLDS for b in GOLDS if a != b]
    for form in ONE_ANSWER:
        assert [b for a, b in pairs if match_open(form.format(a=a), b)] == [], form


def test_two_answers_match_neither():
    pairs = [(a, b) for a in GOLDS[::2] for b in GOLDS[1::2]]
    for form in TWO_ANSWERS:
        said = [(form.format(a=a, b=b), a, b) for a, b in pairs]
        assert [x for x in said if match_open(x[0], x[1]) or match_open(x[0], x[2])] == [], form


@pytest.mark.parametrize("refusal", [
    "I cannot determine this.", "I don't know.", "None of the above", "", "N/A", "...",
    "There is no answer.", "The video does not show this.", "I'm sorry, but I can't help.",
    "It is not possible to say because nothing is shown.", "[API error: A request failed]",
])  # fmt: skip
def test_no_refusal_matches_a_gold(refusal):
    for form in ONE_ANSWER:
        assert [gold for gold in GOLDS if match_open(form.format(a=refusal), gold)] == [], form


@pytest.mark.parametrize("response, gold, want", [
    ("red car red", "red red car", 1.0),  # multisets: order is free, repeats count
    ("red red red", "red", 0.5),  # 2 * 1 / (3 + 1)
    ("red car", "blue car", 0.5), ("blue", "red", 0.0), ("", "red", 0.0), ("", "", 0.0),
    ("the", "A", 0.0),
])  # fmt: skip
def test_token_f1_counts_multisets(response, gold, want):
    assert token_f1(response, gold) == approx(want)


def test_accuracy_dispatches_on_task_type():
    assert accuracy("dog", "mcq", "B", PETS) == 1.0 and accuracy("C", "mcq", "b", PETS) == 0.0
    assert accuracy("0 - 10", "grounding", [5, 15]) == approx(1 / 3)
    assert accuracy("red car", "open", "blue car") == 0.5
    for kind, gold in (("mcq", "A"), ("open", "x"), ("grounding", (0, 1))):
        assert accuracy(None, kind, gold) == 0.0
    with pytest.raises(ValueError, match="task_type"):
        accuracy("A", "essay", "A")


# ------------------------------------------------------------------------------------------------
# Format reward: the last turn without the forced "<think>\n", hand-computed base, anchor and total

TABLE = [
    # everything: .2 think + .5 answer + .3 call + .1 balanced = 1.1; anchor .4 + .3; 1.1 + .35 is
    # clipped
    ([f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think>\n<answer>B</answer>"], 1.1, 0.7, 1.0),
    # direct answer: .2 + .5 + .1; anchor .7
    ([f"{THOUGHT}</think><answer>B</answer>"], 0.8, 0.7, 1.0),
    # the thought is too short: .5 + .1, closed all the same
    (["hi</think><answer>B</answer>"], 0.6, 0.7, 0.95),
    # a thought and nothing else: .2 + .1; closed, no flow
    ([f"{THOUGHT}</think>"], 0.3, 0.4, 0.5),
    # thought and call: .2 + .3 + .1; closed, no flow
    ([f"{THOUGHT}</think>{CALL}"], 0.6, 0.4, 0.8),
    # never closed: answer .5, no balance; anchor -.3
    ([f"{THOUGHT}<answer>B</answer>"], 0.5, -0.3, 0.35),
    # nothing but a thought that never closes: 0 - .15 is clipped to 0
    (["hi"], 0.0, -0.3, 0.0),
    # </answer> missing: .2 + .3, no balance; closed .4; .5 + .2 is capped
    ([f"{THOUGHT}</think><answer>B"], 0.5, 0.4, 0.5),
    # one turn of two never closes: .2 + .5, no balance; anchor -.3
    ([CALL, f"{THOUGHT}</think><answer>B</answer>"], 0.7, -0.3, 0.5),
    # an invalid call earns nothing by itself: .2 + .1
    ([f"{THOUGHT}</think><tool_call>{{}}</tool_call>"], 0.3, 0.4, 0.5),
    # answer in a turn that is not the last: .2 + .1
    ([f"{THOUGHT}</think><answer>B</answer>", f"{THOUGHT}</think>no idea"], 0.3, 0.4, 0.5),
    # a call and an answer in one turn: all of the base, but not the think, answer flow
    ([f"{THOUGHT}</think>{CALL}<answer>B</answer>"], 1.1, 0.4, 1.0),
]


@pytest.mark.parametrize("turns, base, anchor, total", TABLE)
def test_format_reward_equals_hand_computed_values(turns, base, anchor, total):
    got = format_reward(turns)
    assert (got["base"], got["anchor"], got["total"]) == (approx(base), approx(anchor),
                                                          approx(total))


@pytest.mark.parametrize("turn", [
    f"<think>{THOUGHT}</think><answer>B</answer>",  # a second <think> behind the forced one
    f"{THOUGHT}</think></think><answer>B</answer>",
    f"{THOUGHT}</think><think>again</think><answer>B</answer>",
    f"{THOUGHT}</think><answer>B</answer></answer>",
    f"{THOUGHT}</think><answer>A</answer><answer>B</answer>",
    f"{THOUGHT}</think><answer><answer>B</answer></answer>",
    f"{THOUGHT}</think><answer>{CALL} B</answer>",
    f"{THOUGHT}<answer>A</answer></think><answer>B</answer>",
    f"{THOUGHT}{CALL}</think><answer>B</answer>",
    f"{THOUGHT}</think><tool_call><answer>B</answer>",
    f"{THOUGHT}</think></tool_call>{CALL}<answer>B</answer>",
    f"{THOUGHT}</think><tool_response>a dog</tool_response><answer>B</answer>",
    f"{THOUGHT}</tool_response></think><answer>B</answer>",
])  # fmt: skip
def test_misused_tags_cap_the_format_reward(turn):
    got = format_reward([turn])
    assert got["capped"] and 0.0 < got["total"] <= 0.5  # the clean turn gets 1.0, see TABLE


def test_the_cap_binds_when_the_parts_alone_would_pay_more():
    got = format_reward([f"{THOUGHT}</think>{CALL}</tool_call><answer>B</answer>"])
    assert got["base"] + 0.5 * got["anchor"] == approx(1.2) and got["total"] == 0.5


def test_nothing_earns_nothing():
    empty = "</think><tool_call></tool_call><answer></answer>"
    for turns in ([], [""], ["<think>hi"], [empty], [empty, empty], ["<answer></answer>" * 20],
                  ["</think>" * 9]):
        assert format_reward(turns)["total"] == 0.0
        assert format_reward(turns, think_open=False)["total"] == 0.0


def test_a_thought_made_of_tags_is_not_substantive():
    assert not format_reward(["<pause><pause><pause></think><answer>B</answer>"])["think"]
    assert format_reward([f"<pause>{THOUGHT}</think><answer>B</answer>"])["think"]


def test_closing_the_forced_thought_beats_leaving_it_open():
    shut, left = f"{THOUGHT}</think><answer>B</answer>", f"{THOUGHT}<answer>B</answer>"
    second = f"<think>{THOUGHT}</think><answer>B</answer>"
    assert format_reward([shut])["total"] > max(format_reward([text])["total"]
                                                for text in (left, second))


def test_more_tags_never_pay_more():
    clean = [f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think><answer>B</answer>"]
    best = format_reward(clean)["total"]
    for extra in ("<answer>B</answer>", "<think>", "</think>", "</answer>", "<tool_response>",
                  "<tool_call>"):
        for turns in ([clean[0], clean[1] + extra], [clean[0] + extra, clean[1]],
                      [clean[0], extra + clean[1]]):
            assert format_reward(turns)["total"] <= best
    assert format_reward([clean[0], clean[1] + "<answer>B</answer>" * 9])["total"] <= 0.5


def test_thinking_must_come_before_the_first_call():
    assert format_reward([f"{THOUGHT}</think>{CALL}"])["think_before_call"]
    for turn in (f"{CALL}{THOUGHT}</think>", f"{CALL}{THOUGHT}</think>{CALL}", f"</think>{CALL}",
                 CALL,
                 f"{THOUGHT}</think><tool_call>{{}}</tool_call>"):  # fmt: skip
        assert not format_reward([turn])["think_before_call"]
    dialect = f"{THOUGHT}</think><tool_code>crop_video(1, 2)</tool_code>"
    assert format_reward([dialect])["think_before_call"]


def test_answer_suffix_switches_the_answer_terms():
    turns = [f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think><answer>B</answer>"]
    assert format_reward(turns, anchor=0)["base"] == approx(1.1)
    # the released terms: .3 thought + .2 + .1 answer + .3 call + .1 balanced
    assert format_reward(turns, answer_suffix=False, anchor=0)["base"] == approx(1.0)
    # no thought worth the name: only the answer pays, .5 or .2 + .1, and .1
    alone = [f"</think>{CALL}", "x</think><answer>B</answer>"]
    assert format_reward(alone, anchor=0)["total"] == approx(0.6)
    assert format_reward(alone, answer_suffix=False, anchor=0)["total"] == approx(0.4)


def test_an_unclosed_call_costs_the_same_in_both_dialects():
    """One definition of a structural tag: what is balanced, closed, parsed and credited."""
    for name, body in (("tool_call", CALL[len("<tool_call>"):-len("</tool_call>")]),
                       ("tool_code", "crop_video(1, 2)")):
        whole = [f"{THOUGHT}</think><{name}>{body}</{name}>",
                 f"{THOUGHT}</think><answer>B</answer>"]
        cut = [whole[0].removesuffix(f"</{name}>"), whole[1]]
        assert all(rewards.parse_tool_calls(turns[0], True)[0].error is None
                   for turns in (whole, cut))
        assert format_reward(whole)["total"] == 1.0 and format_reward(whole)["well_formed"]
        assert format_reward(cut)["total"] == 0.5 and not format_reward(cut)["well_formed"]
        assert rewards.closure_counts(cut)[name] == [1, 0]
        text = whole[0].encode()
        mask = rewards.structural_mask([bytes([byte]) for byte in text] + [b""])
        for tag in (f"<{name}>", f"</{name}>"):
            at = text.index(tag.encode())
            assert all(mask[at:at + len(tag)])


@pytest.mark.parametrize("said, share", [
    ("16 red, 40 blue", 1.0), ("16 Red,40 blue.", 1.0), ("16 red, 40 blue,", 1.0),
    ("40 blue, 16 red", 0.0), ("16 red", 0.5), ("16 red, 40 green", 0.5),
    ("16 red, 40 blue, 48 green", 2 / 3), ("40 blue", 0.0), ("", 0.0), (",", 0.0), (".", 0.0),
    ("red, blue", 0.0), ("16 red, , 40 blue", 1.0)])
def test_a_list_is_paid_by_the_places_that_are_right(said, share):
    """Token F1 would pay a wrong order in full."""
    assert rewards.accuracy(said, "list", "16 red, 40 blue") == approx(share)
    assert rewards.accuracy("", "list", "") == 0.0


def test_think_prefix_decides_whether_the_thought_was_opened():
    closed = [f"{THOUGHT}</think><answer>B</answer>"]
    assert format_reward(closed)["total"] == 1.0
    # a stray </think>: .5 for the answer
    assert format_reward(closed, think_open=False)["total"] == approx(0.5)
    written = [f"<think>{THOUGHT}</think><answer>B</answer>"]
    assert format_reward(written, think_open=False)["total"] == 1.0
    # .5 + .1
    assert format_reward(["<answer>B</answer>"], think_open=False)["total"] == approx(0.6)


def test_anchor_and_gamma_weigh_the_anchor_term():
    short = ["hi</think><answer>B</answer>"]  # base .6, R_anchor .7
    assert [format_reward(short, anchor=a)["total"]
            for a in (0.0, 0.2, 0.5)] == approx([0.6, 0.74, 0.95])
    left = [f"{THOUGHT}<answer>B</answer>"]  # base .5, R_anchor -gamma
    assert [format_reward(left, gamma=g)["total"]
            for g in (0.0, 0.3, 1.0)] == approx([0.5, 0.35, 0.0])


# ------------------------------------------------------------------------------------------------
# Tool reward and the sum


def test_tool_reward_equals_hand_computed_values():
    assert [tool_term(0, 0, 1.0), tool_term(1, 0, 0.0),
            tool_term(1, 0, 1.0)] == [0.0, 0.1, 0.1]
    assert [tool_term(2, 1, 0.0), tool_term(1, 1, 0.2),
            tool_term(0, 3, 1.0)] == [0.3, 0.8, 0.0]


def test_score_sums_its_weighted_terms():
    turns = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>dog</answer>"]
    # fmt: .5 answer + .3 call + .1 balanced + .35 anchor, clipped to 1; without the anchor .9
    got = score(turns, "mcq", "B", PETS, num_parseable=1, num_executed=1, anchor=0.0)
    assert (got["acc"], got["fmt"], got["tool"], got["total"]) == (1.0, approx(0.9), 0.8,
                                                                   approx(2.7))
    half = score(turns, "mcq", "B", PETS, 1, 1, anchor=0.0, format_weight=0.5, tool_weight=0.0)
    # terms come unweighted
    assert (half["total"], half["fmt"], half["tool"]) == (approx(1.45), approx(0.9), 0.8)
    # two of three calls ran: two are paid for, and the task part pays, not the format part
    dear = score(turns, "mcq", "B", PETS, 3, 2, anchor=0.0, call_cost=0.05)
    assert (dear["paid_task"], dear["paid_fmt"]) == (approx(1.7), got["paid_fmt"])


def test_score_passes_every_setting_on():
    left = [f"{THOUGHT}<answer>red car</answer>"]
    default = score(left, "open", "blue car")
    assert default["acc"] == 0.5 and default["fmt"] == approx(0.35)
    assert score(left, "open", "blue car", gamma=0.0)["fmt"] == approx(0.5)
    assert score(left, "open", "blue car", anchor=0.0)["fmt"] == approx(0.5)
    # .2 + .1 for the answer, -.15 for the thought left open
    assert score(left, "open", "blue car", answer_suffix=False)["fmt"] == approx(0.15)
    assert score(left, "open", "blue car", think_open=False)["fmt"] == approx(0.6)
    # a draft in the forced thought
    assert score(["<answer>1</answer><think>x</think>"], "open", "1")["acc"] == 0.0
    assert score(["<answer>1</answer><think>x</think>"], "open", "1",
                 think_open=False)["acc"] == 1.0


def test_closure_counts_opened_and_closed_tags():
    whole = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>dog</answer>"]
    assert rewards.closure_counts(whole) == {"think": [2, 2], "tool_call": [1, 1],
                                             "tool_code": [0, 0], "answer": [1, 1]}
    got = rewards.closure_counts(["x</think><tool_call><tool_call></tool_call></answer>", "y"])
    assert got == {"think": [2, 1], "tool_call": [2, 1], "tool_code": [0, 0], "answer": [0, 0]}
    assert rewards.closure_counts(["y"], False)["think"] == [0, 0]


# ------------------------------------------------------------------------------------------------
# Strings that other graders pay for

HEDGES = [  # the last turn, and the gold letters it must not score for
    ("<answer>the</answer>", "A"), ("<answer>.</answer>", "A"), ("<answer>!!</answer>", "A"),
    ("<answer>A. The answer is B, or option C</answer>", "ABC"),
    ("<answer>A man is running so B</answer>", "ACDE"),
    ("<answer>I think ...</answer>", "ABCDEFGHIJ"),
    ("<answer>[API error: A request failed]</answer>", "ABCDE"),
    ("<answer>A</answer></think><answer>B</answer>", "ACDE"),
    ("B", "B"), ("x</think>B", "B"),  # no tags: no credit
]


@pytest.mark.parametrize("turn, golds", HEDGES)
def test_answers_that_hedge_or_say_nothing_score_nothing(turn, golds):
    options = [*PETS, "six", "seven", "eight", "nine", "ten"]
    assert [score([turn], "mcq", gold, options)["acc"] for gold in golds] == [0.0] * len(golds)


def test_an_honest_answer_with_letter_e_scores():
    assert score(["x</think><answer>(E) none</answer>"], "mcq", "E", PETS)["acc"] == 1.0


@given(st.lists(st.sampled_from(["A", "B", "C", "answer is ", "option ", " or ", "not ", ". ", "(",
                                 " cat", " dog"])))
@settings(deadline=None, max_examples=200)
def test_no_response_is_right_for_two_gold_letters(parts):
    turn = "x</think><answer>" + "".join(parts) + "</answer>"
    assert sum(score([turn], "mcq", gold, PETS)["acc"] for gold in "ABCDE") <= 1.0


def test_a_better_answer_always_pays_more():
    # Nothing saturates the sum: token F1 0.5 and 1.0 stay 0.5 apart with every other term at its
    # maximum.
    half, full = (
        score([f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think><answer>{text}</answer>"], "open",
              "blue car", None, 1, 1)
        for text in ("red car", "blue car")
    )
    assert (half["total"], full["total"]) == (approx(2.3), approx(2.8))


def test_writing_a_tool_response_does_not_pay_like_running_a_tool():
    fake = [f"{THOUGHT}</think>{CALL}<tool_response>a dog</tool_response><answer>B</answer>"]
    honest = [f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think><answer>B</answer>"]
    faked = score(fake, "mcq", "B", PETS, num_parseable=1, num_executed=0)
    real = score(honest, "mcq", "B", PETS, num_parseable=1, num_executed=1)
    assert (faked["tool"], real["tool"]) == (0.1, 0.8) and faked["fmt"] <= 0.5 < real["fmt"]


def test_a_call_without_arguments_earns_nothing():
    turn = f'{THOUGHT}</think><tool_call>{{"name":"x"}}</tool_call>'
    parseable = sum(call.error is None for call in parse_tool_calls(turn, think_open=True))
    got = score([turn], "mcq", "B", PETS, num_parseable=parseable)
    assert got["tool"] == 0.0 and not format_reward([turn])["think_before_call"]


def test_wrong_with_fake_tool_earns_less_than_right_without_a_tool():
    fake = f"{THOUGHT}</think>{CALL}<tool_response>x</tool_response><answer>A</answer>"
    wrong = score([fake], "mcq", "B", PETS, num_parseable=1)
    right = score([f"{THOUGHT}</think><answer>B</answer>"], "mcq", "B", PETS)
    assert wrong["total"] == approx(0.6) and right["total"] == approx(2.0)  # .5 + .1 against 1 + 1


def test_a_scrap_of_overlap_unlocks_no_bonus_without_an_executed_call():
    turn = f"{THOUGHT}</think>{CALL}<answer>red x y z</answer>"
    got = score([turn], "open", "red car", num_parseable=1, num_executed=0)
    assert got["acc"] == approx(1 / 3) and got["tool"] == 0.1


@pytest.mark.parametrize("answer", ["10 - 20", "from 10 to 20", "10s, 20s"])
def test_usual_ways_to_write_a_span_score(answer):
    assert score([f"x</think><answer>{answer}</answer>"], "grounding", (10, 20))["acc"] == 1.0


# ------------------------------------------------------------------------------------------------
# Properties: no text raises, everything stays in bounds

SCRAPS = [*PIECES, CALL, "</tool_call>", "</tool_code>", "</tool_response>", "crop_video(", ")",
          "=", "'", '"', "{",
          "}", "null", "NaN", "\x00", "\ud800", "\u202e", "٣", "²", "10", "20", "0:10", " to ",
          ", ", ".", "A", "B) ",
          "I", "not", "option ", "the ", "end", "frames ", "\n", "a" * 50, "1" * 50, "-", "%",
          "1e999", "\\", "*", "<",
          ">"]  # fmt: skip
hostile = st.lists(st.one_of(st.sampled_from(SCRAPS), st.text(max_size=6)),
                   max_size=14).map("".join)
anything = st.one_of(hostile, st.text(max_size=60))


@given(anything, st.booleans())
@settings(deadline=None, max_examples=300)
def test_parsing_never_raises_and_returns_usable_calls(text, think_open):
    for call in parse_tool_calls(text, think_open):
        if call.error is None:
            assert call.name == "crop_video" and -1e9 < call.start < call.end < 1e9
            assert call.num_frames is None or call.num_frames >= 1
        else:
            assert 0 < len(call.error) < 150 and "<" not in call.error
        json.dumps(vars(call), allow_nan=False).encode()


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))


@given(st.recursive(scalars, lambda v: st.lists(v, max_size=3)
                    | st.dictionaries(st.text(max_size=5), v, max_size=3)),
       st.sampled_from(["start_time", "end_time", "num_frames", "start", "arguments", "name"]))
@settings(deadline=None, max_examples=200)
def test_any_json_value_anywhere_in_a_call_gives_one_entry(value, key):
    arguments = {"start_time": 1, "end_time": 2}
    call = {"name": "crop_video", "arguments": arguments}
    (call if key in call else arguments)[key] = value
    # JSON escapes no angle bracket, so a tag in a string would be seen as a tag
    body = json.dumps(call)
    if not rewards.TAG.search(body):
        assert len(parse_tool_calls(f"<tool_call>{body}</tool_call>")) == 1


@given(st.lists(anything, max_size=3), st.booleans(), st.booleans(),
       st.sampled_from(sorted(rewards.task_types())))
@settings(deadline=None, max_examples=300)
def test_scores_never_raise_and_stay_in_bounds(turns, think_open, answer_suffix, task_type):
    gold = {"mcq": "A", "open": "red car", "list": "1 red, 2 blue", "grounding": (1.0, 5.0)}[
        task_type]
    got = score(turns, task_type, gold, PETS, 1, 1, think_open=think_open,
                answer_suffix=answer_suffix)
    assert 0.0 <= got["acc"] <= 1.0 and 0.0 <= got["fmt"] <= 1.0 and 0.0 <= got["tool"] <= 0.8
    assert got["total"] == approx(got["acc"] + got["fmt"] + got["tool"])
    assert all(0 <= closed <= opened for opened, closed in rewards.closure_counts(
        turns, think_open).values())
    detail = format_reward(turns, think_open, answer_suffix=answer_suffix)
    assert not detail["capped"] or detail["total"] <= 0.5


@given(anything, anything)
@settings(deadline=None, max_examples=300)
def test_extraction_never_raises_and_stays_in_bounds(response, other):
    assert extract_letter(response, PETS) in (None, *"ABCDE")
    assert extract_letter(response, None) in (None, *"ABCDEFGHIJ")
    assert extract_letter("A", [response, other]) == "A"
    span = extract_span(response)
    assert span is None or 0.0 <= span[0] < span[1] < math.inf
    assert 0.0 <= accuracy(response, "open", other) <= 1.0
    # Not F1 1.0 as well: "answer is A" matches "A" and has two tokens more.
    assert normalise(other) or not match_open(response, other)
    tail = answer_or_tail([response, other])
    assert tail is None or tail.strip()


@given(st.tuples(st.floats(), st.floats()), st.tuples(st.floats(), st.floats()))
@settings(deadline=None, max_examples=200)
def test_iou_is_symmetric_and_in_bounds(span, gold):
    assert 0.0 <= temporal_iou(span, gold) <= 1.0
    assert temporal_iou(span, gold) == temporal_iou(gold, span)


# ------------------------------------------------------------------------------------------------
# struct(o)

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>",
        "<answer>", "</answer>"]


def overlap_oracle(pieces):
    """The definition, the slow way, byte by byte: some of a token lies in a tag, and what does not
    is no letter or digit."""
    joined = b"".join(pieces)
    in_tag = {at for tag in TAGS for i in range(len(joined)) if joined.startswith(tag.encode(), i)
              for at in range(i, i + len(tag))}
    mask, at = [], 0
    for piece in pieces:
        places = range(at, at + len(piece))
        outside = [joined[i] for i in places if i not in in_tag]
        mask.append(any(i in in_tag for i in places)
                    and not any(b >= 128 or chr(b).isalnum() for b in outside))
        at += len(piece)
    return [*mask[:-1], True] if pieces else []


def test_mask_of_a_turn_worked_by_hand():
    pieces = [b"hm", b"</think>", b" <an", b"swer>", b"B", b"<|im_end|>"]
    assert structural_mask(pieces) == [False, True, True, True, False, True]
    assert structural_mask([]) == []
    assert structural_mask([b"", b""]) == [False, True]
    # An empty token inside a tag overlaps no byte of it; near misses are no tags.
    assert structural_mask([b"<ans", b"", b"wer>", b"x"]) == [True, False, True, True]
    assert structural_mask([b"<answer", b"x>", b"<Answer>", b"<tool_code>", b"< think>",
                            b"."]) == [False, False, False, True, False, True]


def test_the_token_of_an_answer_letter_carries_no_format_credit():
    """As Qwen's vocabulary cuts it. Spaces and punctuation beside a tag are nobody's answer."""
    turn = [b"<", b"answer", b">B", b"</", b"answer", b">", b"<|im_end|>"]
    assert structural_mask(turn) == [True, True, False, True, True, True, True]
    assert structural_mask([b"<answer", b">\n", b"7</", b"answer>.", "é</".encode(), b"answer>",
                            b""]) == [True, True, False, True, False, True, True]


@given(st.lists(st.sampled_from([*TAGS, "<", ">", "</", "é", "答", "<think", "answer>", " B ",
                                 "\x00", "<|im_end|>"]),
                max_size=12), st.data())  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_mask_equals_the_oracle_for_any_split(parts, data):
    joined = "".join(parts).encode()
    # equal cuts give empty tokens
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), max_size=20)))
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    assert structural_mask(pieces) == overlap_oracle(pieces)
    tokens = [part.encode() for part in parts]
    assert structural_mask(tokens) == overlap_oracle(tokens)


@given(st.lists(st.sampled_from([*TAGS, "word", " ", "<"]), min_size=1, max_size=10))
@settings(deadline=None, max_examples=100)
def test_mask_over_single_bytes_counts_exactly_the_bytes_of_tags(parts):
    text = "".join(parts)
    mask = structural_mask([bytes([byte]) for byte in text.encode()])
    in_tags = sum(len(tag) for tag in re.findall("|".join(TAGS), text))
    ends_in_tag = any(text.endswith(tag) for tag in TAGS)
    assert sum(mask) == in_tags + (not ends_in_tag)


# ------------------------------------------------------------------------------------------------
# Group advantages

unit = st.floats(0, 1)


def test_advantages_equal_hand_computed_values():
    # rewards 1 + .5 = 1.5 and 0 + 0 = 0: mean .75, sigma .75
    a_task, a_fmt, sigma = group_advantages([1.0, 0.0], [0.5, 0.0])
    assert sigma == approx(0.75) and a_task == approx([2 / 3, -2 / 3])
    assert a_fmt == approx([1 / 3, -1 / 3])
    assert group_advantages([1.0, 0.0], [0.0, 0.0])[:2] == ([1.0, -1.0], [0.0, 0.0])


@given(st.lists(st.tuples(st.floats(0, 2), unit), min_size=2, max_size=8), st.floats(0, 2))
@settings(deadline=None, max_examples=200)
def test_the_two_advantages_sum_to_vanilla_grpo(group, format_weight):
    task, fmt = [a for a, _ in group], [format_weight * f for _, f in group]
    reward = [a + f for a, f in zip(task, fmt)]
    a_task, a_fmt, sigma = group_advantages(task, fmt)
    assert sigma == approx(statistics.pstdev(reward), abs=1e-9)
    if sigma < 1e-6:
        assert a_task == a_fmt == [0.0] * len(group)
    else:
        mean = statistics.mean(reward)
        for r, task, form in zip(reward, a_task, a_fmt, strict=True):
            assert (task + form) * sigma == approx(r - mean, abs=1e-9)


def test_groups_without_variance_give_no_signal():
    assert group_advantages([0.3] * 8, [0.7] * 8)[:2] == ([0.0] * 8, [0.0] * 8)
    # The parts cancel: the composed reward is constant although neither part is.
    assert group_advantages([1.0, 0.0], [0.0, 1.0])[:2] == ([0.0, 0.0], [0.0, 0.0])
    assert group_advantages([], []) == ([], [], 0.0)


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        group_advantages([1.0, 2.0], [1.0])


@pytest.mark.parametrize("text", [
    "I doubt it is B.", "The answer is anything but B.", "The answer is unlikely to be B.",
    "B has been eliminated.", "B is probably wrong.", "B is unlikely.",
    "I do not believe it's B.", "A as well as B", "B (or D)", "B and possibly D"])
def test_letters_that_are_doubted_or_doubled_are_no_answer(text):
    turned = str.maketrans("ABCD", "BCDA")  # the same whichever letters are meant
    options = ["cat", "dog", "hot dog", "bird"]
    for _ in range(4):
        assert extract_letter(text, options) is None, text
        text = re.sub(r"\b[A-D]\b(?! )|\b[A-D]\b(?= (?:as|and|has|is|\())",
                      lambda letter: letter[0].translate(turned), text)



@pytest.mark.parametrize("text, span", [
    ("**10.0** - **20.0**", (10, 20)), ("00:00:10.500 --> 00:00:20", (10.5, 20)),
    ("10 s → 20 s", (10, 20)), ("10 through 20", (10, 20)), ("from 10 up to 20", (10, 20)),
    ("1m5s to 1m20s", (65, 80)), ("1m 5s - 1m 20s", (65, 80)),
    ("1:05 min to 1:20 min", (65, 80)), ("second 10 to second 20", (10, 20)),
    ("t=10s to t=20s", (10, 20)), ("10 sec. to 20 sec.", (10, 20)),
    ("It does not happen from 10 to 20", None)])
def test_other_ways_to_write_a_range(text, span):
    assert extract_span(text) == span


# ------------------------------------------------------------------------------------------------
# Scores of windows


SECONDS = st.integers(0, 40)
SPANS = st.lists(st.tuples(SECONDS, st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])),
                 max_size=5)


@given(SPANS, SPANS)
def test_window_scores_are_those_of_sets_of_seconds(windows, evidence):
    """Counted second by second, which is exact for whole seconds."""
    looked, gold = ({t for a, b in spans for t in range(a, b)} for spans in (windows, evidence))
    found = window_scores(windows, evidence)
    if not gold:
        assert set(found.values()) == {None}
        return
    assert found == {"recall": approx(len(looked & gold) / len(gold)),
                     "precision": approx(len(looked & gold) / len(looked)) if looked else None,
                     "iou": approx(len(looked & gold) / len(looked | gold)),
                     "hit": float(bool(looked & gold))}


@given(SPANS, SPANS, st.randoms())
def test_copies_and_the_order_of_windows_change_no_score(windows, evidence, rng):
    again = [*windows, *rng.choices(windows, k=3)] if windows else []
    rng.shuffle(again)
    assert window_scores(again, evidence) == window_scores(windows, evidence)


@given(SPANS.filter(bool), SPANS)
def test_nothing_scores_a_higher_iou_than_the_evidence_itself(evidence, more):
    assert window_scores(evidence, evidence) == dict.fromkeys(
        ("recall", "precision", "iou", "hit"), 1.0)
    assert window_scores([*evidence, *more], evidence)["iou"] <= 1.0
    whole = window_scores([(0, 60)], evidence)  # all of the film finds all, at the lowest price
    assert whole["recall"] == 1.0 and whole["iou"] == approx(whole["precision"])


def test_windows_that_look_at_everything_or_at_all_scenes_earn_little():
    scenes = [(0, 16), (16, 32), (32, 48), (48, 64)]
    for evidence, whole in ((scenes[:1], 0.25), ([scenes[0], scenes[2]], 0.5)):
        for windows in ([(0, 64)], scenes, [(0, 64)] * 5):
            assert window_scores(windows, evidence)["iou"] == whole
    assert window_scores([(0, 16)], [(5, 9)])["iou"] == 0.25  # a scene around a short flash
    assert window_scores([], scenes[:1]) == {"recall": 0.0, "precision": None, "iou": 0.0,
                                             "hit": 0.0}
    assert window_scores([(16, 32)], scenes[:1])["hit"] == 0.0  # they only touch


@given(SPANS, SPANS.filter(bool))
def test_windows_are_paid_by_their_iou_once_each_and_only_if_they_were_run(windows, evidence):
    task = {"type": "open", "answer": "a dog", "evidence": evidence}
    calls = [{"parseable": True, "status": status, "start": a, "end": b}
             for a, b in windows for status in ("ok", "ok", "video_error")]
    paid, free = (rewards.score(["Look."], task, calls, pay=rewards.Pay(window_weight=weight))
                  for weight in (2.0, 0.0))
    iou = window_scores(windows, evidence)["iou"]
    assert paid["paid_task"] - free["paid_task"] == approx(2 * iou)
    assert paid["paid_fmt"] == free["paid_fmt"] and paid["windows"]["iou"] == iou
    failed = [{**call, "status": "error"} for call in calls]
    assert rewards.score(["Look."], task, failed)["windows"]["recall"] == 0.0


def test_a_task_without_evidence_judges_no_window():
    calls = [{"parseable": True, "status": "ok", "start": 0.0, "end": 1.0}]
    for evidence in ({}, {"evidence": None}, {"evidence": []}):
        task = {"type": "open", "answer": "a dog", **evidence}
        result = rewards.score(["Look."], task, calls, pay=rewards.Pay(window_weight=1.0))
        assert "windows" not in result and result["total"] == rewards.score(["Look."], task,
                                                                            calls)["total"]
