"""
Tests of rewards.py: python -m pytest tests/test_rewards.py -q

Reward values are worked out by hand from the table in format_reward's docstring. Property tests
feed text made of tags, half tags and odd characters, since uniformly random text never contains a
tag.
"""

import doctest
import json
import math
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rewards
from evaluation.answers import match_open


def score(turns, kind, gold, options=None, num_parseable=0, num_executed=0, think_open=True, **pay):
    """rewards.score of a task and of so many calls, the fields of RewardConfig by name."""
    task = {"type": kind, "answer": gold, "options": options}
    calls = [{"parseable": i < num_parseable, "status": "ok" if i < num_executed else "error"}
             for i in range(max(num_parseable, num_executed))]
    return rewards.score(turns, task, calls, think_open, rewards.RewardConfig(**pay))


def format_reward(turns, think_open=True, **pay):
    return rewards.format_reward(turns, think_open, rewards.RewardConfig(**pay))


CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
        '</tool_call>')
THOUGHT = "I should look at the middle."
PETS = ["cat", "dog", "hot dog", "two birds", "none"]  # options A to E
approx = pytest.approx


def json_call(**arguments):
    """One well-formed call with these arguments."""
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def the_call(text, **kwargs):
    """The only call of a text."""
    (call,) = rewards.parse_tool_calls(text, **kwargs)
    return call


def test_docstring_example_runs():
    assert doctest.testmod(rewards).failed == 0 and doctest.testmod(rewards).attempted == 4


# ------------------------------------------------------------------------------------------------
# Tool calls


@pytest.mark.parametrize("start, end, want", [
    (1, 2, (1.0, 2.0)), (1.5, "2.5", (1.5, 2.5)), ("01:30", "1:45.5", (90.0, 105.5)),
    ("1:00:00", "1:00:10", (3600.0, 3610.0)), ("90:00", "5401", (5400.0, 5401.0)),
    (-5, 2, (-5.0, 2.0)),  # the episode clamps it: only it knows the duration
])  # fmt: skip
def test_times_are_read_as_seconds(start, end, want):
    call = the_call(json_call(start_time=start, end_time=end))
    assert call.error is None and (call.start, call.end) == want and call.num_frames is None


@pytest.mark.parametrize("text, want", [
    ("<tool_call>{}</tool_call>", "no tool name"), ("<tool_call></tool_call>", "JSON"),
    ("<tool_call>", "JSON"), ("<tool_call>[1]</tool_call>", "JSON object"),
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
    ("<tool_code>crop_video(1 2, 3)</tool_code>", "start_time is not a time"),
    # nothing is evaluated
    ("<tool_code>crop_video(1+1, 3)</tool_code>", "start_time is not a time"),
    ("<tool_code>crop_video(" + "(" * 3000 + "</tool_code>", "not a whole call"),
    ("<tool_code>" + "f(" * 5000 + "</tool_code>", "too long")])
def test_each_bad_call_gets_an_entry_that_says_why(text, want):
    assert want in the_call(text).error


@pytest.mark.parametrize("frames, want", [
    (8, 8), ("8", 8), (8.0, 8), (None, None),
    *((wrong, "num_frames must be") for wrong in (0, -1, 1.5, True, "many", "1:00", [], "8.5"))])
def test_num_frames_is_a_whole_number_or_null(frames, want):
    call = the_call(json_call(start_time=1, end_time=2, num_frames=frames))
    assert (call.num_frames, call.error) == (want, None) or (
        call.num_frames is None and str(want) in call.error)


@pytest.mark.parametrize("text", [
    CALL.replace('{"start_time": 1, "end_time": 2}',
                 json.dumps('{"start_time": 1, "end_time": 2}')), CALL.removesuffix("</tool_call>"),
    "<tool_code>\nprint(crop_video('0:01', end_time=\"0:02\"))\n</tool_code>",
    "<tool_code>crop_video(video_path='v.mp4', start=1, end=0:02)", json_call(start=1, end=2), CALL,
    json_call(start_time=1, end_time=2, video_path="/etc/passwd"),
    "<tool_code>crop_video(start_time=1, end_time=2)</tool_code>",
    CALL.removesuffix("</tool_call>") + "\n<answer>B</answer>",
    '<tool_code>crop_video("a (1), b.mp4", 1, 2)</tool_code>',
    "<tool_code>crop_video(1, 2)</tool_code>", CALL.replace("</tool_call>", "</tool_c")])
def test_every_dialect_gives_the_same_call(text):
    assert the_call(text) == rewards.ToolCall("crop_video", 1.0, 2.0, None, None)


def test_a_call_in_a_closed_thought_is_a_thought_and_in_an_open_one_a_call():
    assert rewards.parse_tool_calls(f"<think>{CALL}</think>ok") == []
    assert len(rewards.parse_tool_calls(f"<think>hm {CALL}")) == 1
    assert len(rewards.parse_tool_calls(f"<think>{CALL}</think>{CALL}")) == 1


def test_think_open_says_that_the_turn_began_inside_a_thought():
    text = f"draft {CALL} <think> more </think>"
    assert rewards.parse_tool_calls(text, think_open=True) == []
    assert len(rewards.parse_tool_calls(text)) == 1
    # never closed: the call was written
    assert len(rewards.parse_tool_calls(f"thought {CALL}", think_open=True)) == 1
    # the closing tag alone tells how the turn began
    assert rewards.parse_tool_calls(f"thought {CALL}</think>") == []


PIECES = ["<tool_call>", "<tool_code>", "<think>", "</think>", "<answer>", "</answer>", "<answer>B",
          "answer is A, ", "a(", "'a\"(", "1,2,", "10 - ", "start 1 ", "not ", " ", "[", "\\boxed{",
          "1 min ", "<tool_response>", "twenty ", "-1.", "<tool_code>crop_video(1,2)</tool_code>",
          "ﷺ", '<tool_call>{"name":"crop_video",']


# ------------------------------------------------------------------------------------------------
# Answers


@pytest.mark.parametrize("turns, want", [
    ([], None), (["B"], None), (["<answer></answer>"], None), (["<answer> . </answer>"], None),
    (["<answer><b></b></answer>"], None), (["<answer>B</answer>"], "B"), (["<answer>B"], "B"),
    (["<answer>A</answer><answer>B</answer>"], "B"),
    (["<answer>B</answer><answer> </answer>"], "B"), (["<answer>A<answer>B"], "B"),
    (["<answer>A</answer>", "no tag here"], None),
    (["<think><answer>A</answer></think><answer>B</answer>"], "B"),
    # the forced prefix: the turn began inside the thought
    (["draft <answer>A</answer></think>"], None), (["draft <answer>A</answer></think> B"], None),
    (["<think>hm <answer>B</answer>"], "B"),  # a thought that never closes hides nothing
])  # fmt: skip
def test_final_answer_is_the_last_answer_block_outside_thought(turns, want):
    assert rewards.final_answer(turns) == want


@pytest.mark.parametrize("turns, want", [
    (["<think>A</think> B "], "B"), (["hm</think>B"], "B"), (["<think>A"], None), (["B"], "B"),
    ([f"{CALL} B"], "B"), (["<tool_response>A</tool_response>B"], "B"),
    (["<tool_call>{"], None), (["x</think>C<answer>B</answer>"], "B"), ([], None)])
def test_evaluation_falls_back_on_the_text_after_the_thought(turns, want):
    assert rewards.answer_or_tail(turns) == want


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
    assert rewards.extract_letter(response, PETS) == want


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
    ("1:2:3:4 - 5", None), ("0:10 - 0:99", None), ("<think>1-2", None), ("１０－２０", (10, 20)),
    ("(3 , 9)", (3, 9)), ("1.2.3, 5", None), ("20 - 10", None), ("10 - 10", None), ("5%-6%", None),
    ("-5 - 10", None), ("3s-9s", (3, 9)), ("٣ - ٥", None)])
def test_span_is_read_in_seconds(response, want):
    assert rewards.extract_span(response) == want


@pytest.mark.parametrize("span, gold, want", [
    ((0, 10), (5, 15), 5 / 15), ((0, 10), (0, 10), 1), ((0, 1), (1, 2), 0), ((0, 1), (5, 6), 0),
    (None, (0, 1), 0), ((2, 4), (0, 10), 0.2), ((5, 5), (0, 10), 0), ((6, 5), (0, 10), 0),
    ((math.nan, 5), (0, 10), 0), ((0, math.inf), (0, 10), 0)])
def test_iou_equals_hand_computed_values(span, gold, want):
    assert rewards.temporal_iou(span, gold) == approx(want)


def test_half_of_a_labelled_span_has_to_be_in_the_video():
    within = rewards.task_types()["grounding"].within
    assert [within((10, 20), end) for end in (30, 15, 14.9, 5)] == [True, True, False, False]


@pytest.mark.parametrize("response, gold", [
    ("The Dolly Zoom.", "dolly zoom"), ("twenty-one", "21"), ("1,000", "1000"), ("H₂O", "h2o"),
    ("5.0", "five"), ("x²", "x2"), ("dont", "don't"), ("50%", "50 percent"),
    ("well known", "well-known"), ("007", "7"), ("(A)", "A"),
    ("दिन", "दिन"), ("তিন", "তিন"), ("พ่อ", "พ่อ"), ("كِتَابٌ", "كتاب"), ("שָׁלוֹם", "שלום"),
    ("cafe\u0301", "café"), ("a red ❤️", "red"), ("1️⃣", "1")])
def test_open_answers_match_after_normalising(response, gold):
    assert match_open(response, gold) and rewards.accuracy(response, "open", gold) == 1.0


@pytest.mark.parametrize("response, gold", [
    ("", ""), (".", "."), ("the", "A"), (".", "A"), ("!!", "A"), ("", "A"), ("4", "14"),
    ("zoom", "dolly zoom"), ("not red", "red"), ("-5", "5"), ("1.5", "15"), ("C++", "C"),
    ("50", "50%"), ("red or blue", "red"),
    # Vowels that are combining marks: day and gift, peacock and blow, three and oil, father and you
    ("दान", "दिन"), ("मार", "मोर"), ("তেল", "তিন"), ("เธอ", "พ่อ")])
def test_open_answers_that_differ_do_not_match(response, gold):
    assert not match_open(response, gold)


@pytest.mark.parametrize("response, gold, want", [
    ("red car red", "red red car", 1.0),  # multisets: order is free, repeats count
    ("red red red", "red", 0.5),  # 2 * 1 / (3 + 1)
    ("red car", "blue car", 0.5), ("blue", "red", 0.0), ("", "red", 0.0), ("", "", 0.0),
    ("the", "A", 0.0), ("दान", "दिन", 0.0), ("लाल कार", "नीली कार", 0.5),
    # without blanks between words: by characters, 5 of 7 and 5
    ("一辆红色的汽车", "红色的汽车", 10 / 12), ("赤い車", "赤い自動車", 6 / 8), ("蓝天", "红色", 0),
    ("iPhone手机", "iPhone", 2 / 4)])
def test_token_f1_counts_multisets(response, gold, want):
    assert rewards.token_f1(response, gold) == approx(want)


def test_accuracy_dispatches_on_task_type():
    assert rewards.accuracy("dog", "mcq", "B", PETS) == 1.0
    assert rewards.accuracy("C", "mcq", "b", PETS) == 0.0
    assert rewards.accuracy("0 - 10", "grounding", [5, 15]) == approx(1 / 3)
    assert rewards.accuracy("red car", "open", "blue car") == 0.5
    for kind, gold in (("mcq", "A"), ("open", "x"), ("grounding", (0, 1))):
        assert rewards.accuracy(None, kind, gold) == 0.0
    with pytest.raises(KeyError, match="essay"):
        rewards.accuracy("A", "essay", "A")


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
    ([f"{THOUGHT}</think>{CALL}<answer>B</answer>"], 1.1, 0.4, 1.0)]


@pytest.mark.parametrize("turns, base, anchor, total", TABLE)
def test_format_reward_equals_hand_computed_values(turns, base, anchor, total):
    got = format_reward(turns)
    assert (got["base"], got["anchor"], got["total"]) == approx((base, anchor, total))


def test_nothing_earns_nothing():
    empty = "</think><tool_call></tool_call><answer></answer>"
    for turns in ([], [""], ["<think>hi"], [empty], [empty, empty], ["<answer></answer>" * 20],
                  ["</think>" * 9]):
        assert format_reward(turns)["total"] == 0.0
        assert format_reward(turns, think_open=False)["total"] == 0.0


@pytest.mark.parametrize("length, counts", [(9, False), (10, True), (11, True)])
def test_a_thought_counts_from_ten_characters_on(length, counts):
    assert format_reward(["x" * length + "</think><answer>B</answer>"])["think"] is counts


@pytest.mark.parametrize("turn", [
    f"{THOUGHT}</think><answer>A</answer><answer>B</answer>",
    f"<think>{THOUGHT}</think><answer>B</answer>",  # a second <think> after the forced one
    f"{THOUGHT}</think><tool_response>a dog</tool_response><answer>B</answer>"])
def test_misused_tags_cap_the_format_reward(turn):
    got = format_reward([turn])
    assert got["capped"] and 0.0 < got["total"] <= 0.5  # the clean turn gets 1.0, see TABLE


def test_thinking_must_come_before_the_first_call():
    assert format_reward([f"{THOUGHT}</think>{CALL}"])["think_before_call"]
    for turn in (f"{CALL}{THOUGHT}</think>", f"{CALL}{THOUGHT}</think>{CALL}", f"</think>{CALL}",
                 CALL,
                 f"{THOUGHT}</think><tool_call>{{}}</tool_call>"):  # fmt: skip
        assert not format_reward([turn])["think_before_call"]
    dialect = f"{THOUGHT}</think><tool_code>crop_video(1, 2)</tool_code>"
    assert format_reward([dialect])["think_before_call"]


@pytest.mark.parametrize("said, share", [
    ("16 red, 40 blue", 1.0), ("16 Red,40 blue.", 1.0), ("16 red, 40 blue,", 1.0),
    ("40 blue, 16 red", 0.0), ("16 red", 0.5), ("16 red, 40 green", 0.5),
    ("16 red, 40 blue, 48 green", 2 / 3), ("40 blue", 0.0), ("", 0.0), (",", 0.0), (".", 0.0),
    ("red, blue", 0.0), ("16 red, , 40 blue", 1.0)])
def test_a_list_is_paid_by_the_places_that_are_right(said, share):
    """Token F1 would pay a wrong order in full."""
    assert rewards.accuracy(said, "list", "16 red, 40 blue") == approx(share)
    assert rewards.accuracy("", "list", "") == 0.0


def test_anchor_and_gamma_weigh_the_anchor_term():
    short = ["hi</think><answer>B</answer>"]  # base .6, R_anchor .7
    assert [format_reward(short, anchor=a)["total"] for a in (0, .2, .5)] == approx([.6, .74, .95])
    left = [f"{THOUGHT}<answer>B</answer>"]  # base .5, R_anchor -gamma
    assert [format_reward(left, gamma=g)["total"] for g in (0, 0.3, 1)] == approx([0.5, 0.35, 0.0])


# ------------------------------------------------------------------------------------------------
# Tool reward and the sum


def test_tool_reward_equals_hand_computed_values():
    cases = {(0, 0, 1.0): 0.0, (1, 0, 0.0): 0.1, (1, 0, 1.0): 0.1, (2, 1, 0.0): 0.3,
             (1, 1, 0.2): 0.8, (0, 3, 1.0): 0.0}
    assert {case: rewards.tool_term(*case) for case in cases} == cases


def test_score_sums_its_weighted_terms():
    turns = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>dog</answer>"]
    # fmt: .5 answer + .3 call + .1 balanced + .35 anchor, clipped to 1; without the anchor .9
    got = score(turns, "mcq", "B", PETS, num_parseable=1, num_executed=1, anchor=0.0)
    assert (got["acc"], got["fmt"], got["tool"], got["total"]) == (1, approx(0.9), 0.8, approx(2.7))
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
    assert score(["<answer>1</answer><think>x</think>"], "open", "1", think_open=False)["acc"] == 1


def test_closure_counts_opened_and_closed_tags():
    whole = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>dog</answer>"]
    assert rewards.closure_counts(whole) == {"think": [2, 2], "tool_call": [1, 1],
                                             "tool_code": [0, 0], "answer": [1, 1]}
    got = rewards.closure_counts(["x</think><tool_call><tool_call></tool_call></answer>", "y"])
    assert got == {"think": [2, 1], "tool_call": [2, 1], "tool_code": [0, 0], "answer": [0, 0]}
    assert rewards.closure_counts(["y"], False)["think"] == [0, 0]


# ------------------------------------------------------------------------------------------------
# Properties: no text raises, everything stays in bounds

SCRAPS = [*PIECES, CALL, "</tool_call>", "</tool_code>", "</tool_response>", "crop_video(", ")",
          "=", "'", '"', "{",
          "}", "null", "NaN", "\x00", "\ud800", "\u202e", "٣", "²", "10", "20", "0:10", " to ",
          ", ", ".", "A", "B) ",
          "I", "not", "option ", "the ", "end", "frames ", "\n", "a" * 50, "1" * 50, "-", "%",
          "1e999", "\\", "*", "<",
          ">"]  # fmt: skip
scraps = st.lists(st.one_of(st.sampled_from(SCRAPS), st.text(max_size=6)), max_size=14).map("".join)
anything = st.one_of(scraps, st.text(max_size=60))


@given(anything, st.booleans())
@settings(deadline=None, max_examples=300)
def test_parsing_never_raises_and_returns_usable_calls(text, think_open):
    for call in rewards.parse_tool_calls(text, think_open):
        if call.error is None:
            assert call.name == "crop_video" and -1e9 < call.start < call.end < 1e9
            assert call.num_frames is None or call.num_frames >= 1
        else:
            assert 0 < len(call.error) < 150 and "<" not in call.error
        json.dumps(vars(call), allow_nan=False).encode()


@given(st.lists(anything, max_size=3), st.booleans(), st.booleans(),
       st.sampled_from(sorted(rewards.task_types())))
@settings(deadline=None, max_examples=300)
def test_scores_never_raise_and_stay_in_bounds(turns, think_open, answer_suffix, task_type):
    gold = {"mcq": "A", "open": "red car", "list": "1 red, 2 blue", "grounding": (1, 5)}[task_type]
    got = score(turns, task_type, gold, PETS, 1, 1, think_open, answer_suffix=answer_suffix)
    assert 0.0 <= got["acc"] <= 1.0 and 0.0 <= got["fmt"] <= 1.0 and 0.0 <= got["tool"] <= 0.8
    assert got["total"] == approx(got["acc"] + got["fmt"] + got["tool"])
    assert all(0 <= closed <= opened for opened, closed in rewards.closure_counts(
        turns, think_open).values())
    detail = format_reward(turns, think_open, answer_suffix=answer_suffix)
    assert not detail["capped"] or detail["total"] <= 0.5


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
    assert rewards.structural_mask(pieces) == [False, True, True, True, False, True]
    assert rewards.structural_mask([]) == []
    assert rewards.structural_mask([b"", b""]) == [False, True]
    # An empty token inside a tag overlaps no byte of it; near misses are no tags.
    assert rewards.structural_mask([b"<ans", b"", b"wer>", b"x"]) == [True, False, True, True]
    assert rewards.structural_mask([b"<answer", b"x>", b"<Answer>", b"<tool_code>", b"< think>",
                            b"."]) == [False, False, False, True, False, True]


@given(st.lists(st.sampled_from([*TAGS, "<", ">", "</", "é", "答", "<think", "answer>", " B ",
                                 "\x00", "<|im_end|>"]),
                max_size=12), st.data())  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_mask_equals_the_oracle_for_any_split(parts, data):
    joined = "".join(parts).encode()
    # equal cuts give empty tokens
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), max_size=20)))
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    assert rewards.structural_mask(pieces) == overlap_oracle(pieces)
    tokens = [part.encode() for part in parts]
    assert rewards.structural_mask(tokens) == overlap_oracle(tokens)


# ------------------------------------------------------------------------------------------------
# Group advantages

def test_advantages_equal_hand_computed_values():
    # rewards 1 + .5 = 1.5 and 0 + 0 = 0: mean .75, sigma .75
    a_task, a_fmt, sigma = rewards.group_advantages([1.0, 0.0], [0.5, 0.0])
    assert sigma == approx(0.75) and a_task == approx([2 / 3, -2 / 3])
    assert a_fmt == approx([1 / 3, -1 / 3])
    assert rewards.group_advantages([1.0, 0.0], [0.0, 0.0])[:2] == ([1.0, -1.0], [0.0, 0.0])


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), min_size=2, max_size=8),
       st.floats(0, 2))
@settings(deadline=None, max_examples=200)
def test_the_two_advantages_sum_to_vanilla_grpo(group, format_weight):
    task, fmt = [a for a, _ in group], [format_weight * f for _, f in group]
    reward = [a + f for a, f in zip(task, fmt)]
    a_task, a_fmt, sigma = rewards.group_advantages(task, fmt)
    assert sigma == approx(statistics.pstdev(reward), abs=1e-9)
    if sigma < 1e-6:
        assert a_task == a_fmt == [0.0] * len(group)
    else:
        mean = statistics.mean(reward)
        for r, task, form in zip(reward, a_task, a_fmt, strict=True):
            assert (task + form) * max(sigma, 1e-3) == approx(r - mean, abs=1e-9)


def test_a_difference_that_means_nothing_is_no_large_advantage():
    """Seven spans are the label, one ends 0.1 ms late: TRL's advantage is -0.08 there."""
    a_task, a_fmt, _ = rewards.group_advantages([1.0] * 7 + [1.0 - 1e-5], [0.0] * 8)
    assert a_task == approx([1.25e-3] * 7 + [-8.75e-3]) and a_fmt == [0.0] * 8
    small, _, sigma = rewards.group_advantages([1.0] * 7 + [0.9], [0.0] * 8)
    assert sigma > 1e-3 and small == approx([7**-0.5] * 7 + [-7**0.5])  # as without the floor


def test_groups_without_variance_give_no_signal():
    assert rewards.group_advantages([0.3] * 8, [0.7] * 8)[:2] == ([0.0] * 8, [0.0] * 8)
    # The parts cancel: the composed reward is constant although neither part is.
    assert rewards.group_advantages([1.0, 0.0], [0.0, 1.0])[:2] == ([0.0, 0.0], [0.0, 0.0])
    assert rewards.group_advantages([], []) == ([], [], 0.0)


# ------------------------------------------------------------------------------------------------
# Scores of windows


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
    lambda p: (p[0], p[0] + p[1])), max_size=5)


@given(SPANS, SPANS)
def test_window_scores_are_those_of_sets_of_seconds(windows, evidence):
    """Counted second by second, which is exact for whole seconds."""
    looked, gold = ({t for a, b in spans for t in range(a, b)} for spans in (windows, evidence))
    found = rewards.window_scores(windows, evidence)
    if not gold:
        assert set(found.values()) == {None}
        return
    assert found == {"recall": approx(len(looked & gold) / len(gold)),
                     "precision": approx(len(looked & gold) / len(looked)) if looked else None,
                     "iou": approx(len(looked & gold) / len(looked | gold)),
                     "hit": float(bool(looked & gold))}


@given(SPANS, SPANS.filter(bool))
def test_windows_are_paid_by_their_iou_once_each_and_only_if_they_were_run(windows, evidence):
    task = {"type": "open", "answer": "a dog", "evidence": evidence}
    calls = [{"parseable": True, "status": status, "start": a, "end": b}
             for a, b in windows for status in ("ok", "ok", "video_error")]
    paid, free = (rewards.score(["Look."], task, calls,
                  pay=rewards.RewardConfig(window_weight=weight)) for weight in (2.0, 0.0))
    iou = rewards.window_scores(windows, evidence)["iou"]
    assert paid["paid_task"] - free["paid_task"] == approx(2 * iou)
    assert paid["paid_fmt"] == free["paid_fmt"] and paid["windows"]["iou"] == iou
    failed = [{**call, "status": "error"} for call in calls]
    assert rewards.score(["Look."], task, failed)["windows"]["recall"] == 0.0


def test_a_task_without_evidence_judges_no_window():
    calls = [{"parseable": True, "status": "ok", "start": 0.0, "end": 1.0}]
    for evidence in ({}, {"evidence": None}, {"evidence": []}):
        task = {"type": "open", "answer": "a dog", **evidence}
        result = rewards.score(["Look."], task, calls, pay=rewards.RewardConfig(window_weight=1.0))
        assert "windows" not in result and result["total"] == rewards.score(["Look."], task,
                                                                            calls)["total"]
