"""
Tests of rewards.py: python -m pytest tests/test_rewards.py -q

Reward values are worked out by hand from the table in format_reward's docstring. Property tests
feed text made of tags, half tags and odd characters, since uniformly random text never contains a
tag.
"""

import doctest
import json
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rewards
from agent_tools import TOOLS


def calls_in(turns, think_open=True, num_executed=0):
    """Records of the calls that the turns hold, the first ones executed."""
    records = []
    for turn, text in enumerate(turns):
        for call in rewards.parse_tool_calls(text, TOOLS, think_open):
            status = "ok" if len(records) < num_executed else "error"
            records.append({"turn": turn, "parseable": call.error is None, "status": status})
    return records


def score(turns, kind, gold, num_executed=0, think_open=True, **pay):
    """rewards.score of a task, the fields of RewardConfig by name."""
    task = {"type": kind, "answer": gold}
    calls = calls_in(turns, think_open, num_executed)
    return rewards.score(turns, task, calls, think_open, rewards.RewardConfig(**pay))


def format_reward(turns, think_open=True, **pay):
    calls = calls_in(turns, think_open)
    return rewards.format_reward(turns, calls, think_open, rewards.RewardConfig(**pay))


def accuracy(answer, kind, gold):
    return rewards.accuracy(answer, {"type": kind, "answer": gold})


CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
        '</tool_call>')
XML = ("<function=crop_video>\n<parameter=start_time>\n3\n</parameter>\n<parameter=end_time>\n9\n"
       "</parameter>\n</function>")
THOUGHT = "I should look at the middle."
approx = pytest.approx


def json_call(**arguments):
    """One well-formed call with these arguments."""
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def the_call(text, think_open=False):
    """The only call of a text."""
    (call,) = rewards.parse_tool_calls(text, TOOLS, think_open)
    return call


def test_docstring_example_runs():
    assert doctest.testmod(rewards).failed == 0 and doctest.testmod(rewards).attempted == 3


# ------------------------------------------------------------------------------------------------
# Tool calls


@pytest.mark.parametrize("start, end, want", [
    (1, 2, (1.0, 2.0)), (1.5, "2.5", (1.5, 2.5)), ("01:30", "1:45.5", (90.0, 105.5)),
    ("1:00:00", "1:00:10", (3600.0, 3610.0)), ("90:00", "5401", (5400.0, 5401.0)),
    (-5, 2, (-5.0, 2.0)),  # the episode clamps it: only it knows the duration
])  # fmt: skip
def test_times_are_read_as_seconds(start, end, want):
    call = the_call(json_call(start_time=start, end_time=end))
    assert call.error is None
    assert call.arguments == {"start": want[0], "end": want[1], "num_frames": None}


@pytest.mark.parametrize("text, want", [
    ("<tool_call>{}</tool_call>", "JSON"), ("<tool_call></tool_call>", "JSON"),
    ("<tool_call>", "JSON"), ("<tool_call>[1]</tool_call>", "JSON"),
    ("<tool_call>" + "[" * 3000 + "</tool_call>", "JSON"),  # RecursionError inside the parser
    ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', "unknown tool 'x'"),
    ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "JSON"),
    ('<tool_call>{"name": "crop_video"}</tool_call>', "JSON"),
    ('<tool_call>{"name": "crop_video", "arguments": "1"}</tool_call>', "JSON"),
    ('<tool_call>{"name": "crop_video", "arguments": "{"}</tool_call>', "JSON"),
    ('<tool_call>{"name": "crop_video", "arguments": {}}} </tool_call>', "JSON"),
    (json_call(end_time=2), "start_time is missing"),
    (json_call(start_time=2), "end_time is missing"),
    (json_call(start_time=2, end_time=2), "empty or reversed"),
    (json_call(start_time=3, end_time=2), "empty or reversed"),
    *((json_call(start_time=wrong, end_time=2), "start_time is not a time")
      for wrong in (True, None, "", "x", [], {}, 1e300, "nan", "-inf")),
    ('<tool_call>{"name": "crop_video", "arguments": {"start_time": NaN, "end_time": 3}}',
     "start_time is not a time"),
    (CALL.replace("</tool_call>", " and more</tool_call>"), "JSON"),
    ("<tool_code>crop_video(start_time=1, end_time=2", "not a whole call"),
    ("<tool_code></tool_code>", "not a whole call"),
    ("<tool_code>crop_video()</tool_code>", "start_time is missing"),
    ("<tool_code>crop_video(1, 2)</tool_code>", "start_time is missing"),  # by name alone
    ("<tool_code>os.system(a=1, b=2)</tool_code>", "unknown tool 'system'"),
    # nothing is evaluated
    ("<tool_code>crop_video(start_time=1+1, end_time=3)</tool_code>", "start_time is not a time"),
    ("<tool_code>crop_video(" + "(" * 3000 + "</tool_code>", "not a whole call"),
    # Qwen3.5's XML without the tag around it: no answer, and the model is told
    (XML, "must stand between <tool_call>"), (XML + "\n</tool_call>", "must stand between"),
    (f"<tool_call>{XML.replace('3', 'x')}</tool_call>", "start_time is not a time")])
def test_each_bad_call_gets_an_entry_that_says_why(text, want):
    assert want in the_call(text).error


@pytest.mark.parametrize("frames, want", [
    (8, 8), ("8", 8), (8.0, 8), (None, None),
    *((wrong, "num_frames must be") for wrong in (0, -1, 1.5, True, "many", "1:00", [], "8.5"))])
def test_num_frames_is_a_whole_number_or_null(frames, want):
    call = the_call(json_call(start_time=1, end_time=2, num_frames=frames))
    if call.error is None:
        assert call.arguments["num_frames"] == want
    else:
        assert str(want) in call.error


@pytest.mark.parametrize("text", [
    CALL.replace('{"start_time": 1, "end_time": 2}',
                 json.dumps('{"start_time": 1, "end_time": 2}')), CALL.removesuffix("</tool_call>"),
    "<tool_code>\nprint(crop_video(start_time='0:01', end_time=\"0:02\"))\n</tool_code>",
    "<tool_code>crop_video(video_path='v.mp4', start=1, end=0:02)", json_call(start=1, end=2), CALL,
    json_call(start_time=1, end_time=2, video_path="/etc/passwd"),
    "<tool_code>crop_video(start_time=1, end_time=2)</tool_code>",
    CALL.removesuffix("</tool_call>") + "\n<answer>B</answer>",
    "<tool_call>" + XML.replace("3", "1").replace("9", "0:02") + "</tool_call>",
    CALL.replace("</tool_call>", "</tool_c")])
def test_every_dialect_gives_the_same_call(text):
    arguments = {"start": 1.0, "end": 2.0, "num_frames": None}
    assert the_call(text) == rewards.ToolCall("crop_video", arguments, None)


def test_a_call_in_a_closed_thought_is_a_thought_and_in_an_open_one_a_call():
    def count(text, think_open=False):
        return len(rewards.parse_tool_calls(text, TOOLS, think_open))

    assert count(f"<think>{CALL}</think>ok") == 0
    assert count(f"<think>hm {CALL}") == 1
    assert count(f"<think>{CALL}</think>{CALL}") == 1
    text = f"draft {CALL} <think> more </think>"
    assert (count(text, think_open=True), count(text)) == (0, 1)
    assert count(f"thought {CALL}", think_open=True) == 1  # never closed: the call was written


def test_the_window_of_a_call_is_clamped_or_refused():
    tool, task = TOOLS["crop_video"], {"video": "v.mp4"}
    spec = tool.spec({"start": -5.0, "end": 90.0, "num_frames": 3}, task, 64.0)
    assert spec == {"video": "v.mp4", "start": 0.0, "end": 64.0, "fps": 1.0, "num_frames": 3,
                    "max_frames": 16}
    for start, end in ((64.0, 70.0), (-5.0, 0.0)):
        with pytest.raises(ValueError, match="holds nothing of the video, which runs from 0 to 64"):
            tool.spec({"start": start, "end": end, "num_frames": None}, task, 64.0)


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
    (["<think>hm <answer>B</answer>"], "B"),  # a thought that never closes hides nothing
])  # fmt: skip
def test_final_answer_is_the_last_answer_block_outside_thought(turns, want):
    assert rewards.final_answer(turns, False) == want


def test_a_draft_in_the_forced_thought_is_no_answer():
    for text in ("draft <answer>A</answer></think>", "draft <answer>A</answer></think> B"):
        assert rewards.final_answer([text], True) is None


@pytest.mark.parametrize("answer, paid", [
    ("B", 1), ("b", 1), ("(B)", 1), ("B.", 1), ("**B**", 1), ("B. dog", 1), ("B) dog", 1),
    ("(B) dog", 1), ("B: the dog", 1), (" B\n", 1), ("A", 0), ("A. B", 0), ("BC", 0), ("B or C", 0),
    # prose earns nothing: the question asks for the letter
    ("dog", 0), ("The answer is B", 0), ("B because it barks", 0), ("", 0)])
def test_a_letter_is_paid_alone_or_as_a_label(answer, paid):
    assert accuracy(answer, "mcq", "b") == paid


@pytest.mark.parametrize("answer, paid", [
    ("0 - 10", 1 / 3), ("from 5 to 15 seconds", 1), ("0:05 - 0:15.0", 1), ("15 - 5", 0), ("5", 0),
    ("", 0), ("1:2:3:4 - 5", 0), ("5.0 - 15\nConfidence: 0.9", 1), ("5 - 5", 0)])
def test_a_span_is_the_first_two_times(answer, paid):
    assert accuracy(answer, "grounding", [5, 15]) == approx(paid)


@pytest.mark.parametrize("span, gold, want", [
    ((0, 10), (5, 15), 5 / 15), ((0, 10), (0, 10), 1), ((0, 1), (1, 2), 0), ((0, 1), (5, 6), 0),
    ((2, 4), (0, 10), 0.2), ((5, 5), (0, 10), 0), ((6, 5), (0, 10), 0)])
def test_iou_equals_hand_computed_values(span, gold, want):
    assert rewards.temporal_iou(span, gold) == approx(want)


@pytest.mark.parametrize("response, gold, want", [
    ("red car red", "red red car", 1.0),  # multisets: order is free, repeats count
    ("red red red", "red", 0.5),  # 2 * 1 / (3 + 1)
    ("red car", "blue car", 0.5), ("blue", "red", 0.0), ("", "red", 0.0), ("", "", 0.0),
    ("the", "A", 0.0), ("दान", "दिन", 0.0), ("लाल कार", "नीली कार", 0.5),
    # without blanks between words: by characters, 5 of 7 and 5
    ("一辆红色的汽车", "红色的汽车", 10 / 12), ("赤い車", "赤い自動車", 6 / 8), ("蓝天", "红色", 0),
    ("iPhone手机", "iPhone", 2 / 4),
    # signs that change the meaning; marks, points and pictures
    ("C++", "C", 0), ("-5", "5", 0), ("1.5", "15", 0), ("50%", "50", 0),
    ("A red car.", "Red car", 1),
    ("दिन", "दिन", 1), ("তেল", "তিন", 0), ("เธอ", "พ่อ", 0), ("كِتَابٌ", "كتاب", 1),
    ("שָׁלוֹם", "שלום", 1), ("cafe\u0301", "café", 1), ("ＲＥＤ", "red", 1)])
def test_f1_counts_multisets_of_words(response, gold, want):
    assert accuracy(response, "open", gold) == approx(want)


def test_no_answer_earns_nothing_and_another_type_is_an_error():
    for kind, gold in (("mcq", "A"), ("open", "x"), ("list", "x"), ("grounding", (0, 1))):
        assert accuracy(None, kind, gold) == 0.0
    with pytest.raises(KeyError, match="essay"):
        accuracy("A", "essay", "A")


# ------------------------------------------------------------------------------------------------
# Format reward: turns without the forced "<think>\n"; R_fmt without R_anchor, R_fmt

TABLE = [
    # everything: .2 think + .5 answer + .3 call + .1 balanced = 1.1; anchor .4 + .3; 1.1 + .35 is
    # clipped
    ([f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think>\n<answer>B</answer>"], 1.0, 1.0),
    # direct answer: .2 + .5 + .1; anchor .7
    ([f"{THOUGHT}</think><answer>B</answer>"], 0.8, 1.0),
    # the thought is too short: .5 + .1, closed all the same
    (["hi</think><answer>B</answer>"], 0.6, 0.95),
    # a thought and nothing else: .2 + .1; closed, no flow
    ([f"{THOUGHT}</think>"], 0.3, 0.5),
    # thought and call: .2 + .3 + .1; closed, no flow
    ([f"{THOUGHT}</think>{CALL}"], 0.6, 0.8),
    # never closed: answer .5, no balance; anchor -.3
    ([f"{THOUGHT}<answer>B</answer>"], 0.5, 0.35),
    # nothing but a thought that never closes: 0 - .15 is clipped to 0
    (["hi"], 0.0, 0.0),
    # </answer> missing: .2 + .3, no balance; closed .4; .5 + .2 is capped
    ([f"{THOUGHT}</think><answer>B"], 0.5, 0.5),
    # one turn of two never closes: .2 + .5, no balance; anchor -.3
    ([CALL, f"{THOUGHT}</think><answer>B</answer>"], 0.5, 0.5),
    # an invalid call earns nothing by itself: .2 + .1
    ([f"{THOUGHT}</think><tool_call>{{}}</tool_call>"], 0.3, 0.5),
    # answer in a turn that is not the last: .2 + .1
    ([f"{THOUGHT}</think><answer>B</answer>", f"{THOUGHT}</think>no idea"], 0.3, 0.5),
    # a call and an answer in one turn: all of the base, but not the think, answer flow
    ([f"{THOUGHT}</think>{CALL}<answer>B</answer>"], 1.0, 1.0)]


@pytest.mark.parametrize("turns, base, total", TABLE)
def test_format_reward_equals_hand_computed_values(turns, base, total):
    assert format_reward(turns) == approx((total, base))


def test_nothing_earns_nothing():
    empty = "</think><tool_call></tool_call><answer></answer>"
    for turns in ([], [""], ["<think>hi"], [empty], [empty, empty], ["<answer></answer>" * 20],
                  ["</think>" * 9]):
        assert format_reward(turns) == format_reward(turns, think_open=False) == (0.0, 0.0)


@pytest.mark.parametrize("length, base", [(9, 0.6), (10, 0.8), (11, 0.8)])
def test_a_thought_counts_from_ten_characters_on(length, base):
    assert format_reward(["x" * length + "</think><answer>B</answer>"])[1] == approx(base)


@pytest.mark.parametrize("turn", [
    f"{THOUGHT}</think><answer>A</answer><answer>B</answer>",
    f"<think>{THOUGHT}</think><answer>B</answer>",  # a second <think> after the forced one
    f"{THOUGHT}</think><tool_response>a dog</tool_response><answer>B</answer>"])
def test_misused_tags_cap_the_format_reward(turn):
    total, base = format_reward([turn])
    assert 0.0 < total <= 0.5 and base <= 0.5  # the clean turn gets 1.0


def test_thinking_must_come_before_the_first_call():
    assert format_reward([f"{THOUGHT}</think>{CALL}"])[1] == approx(0.6)
    code = "<tool_code>crop_video(start_time=1, end_time=2)</tool_code>"
    assert format_reward([f"{THOUGHT}</think>{code}"])[1] == approx(0.6)
    for turn in (f"{CALL}{THOUGHT}</think>", f"{CALL}{THOUGHT}</think>{CALL}", f"</think>{CALL}",
                 CALL, f"{THOUGHT}</think><tool_call>{{}}</tool_call>"):
        assert format_reward([turn])[1] <= 0.3 + 1e-9


def test_base_and_anchor_are_the_parts_of_what_is_paid():
    """For --format-credit anchor: R_base everywhere, R_anchor at the tags."""
    for turns, base, total in TABLE:
        got = score(turns, "open", "B", format_weight=0.5)
        assert (got["paid_fmt"], got["paid_base"]) == approx((total / 2, base / 2))


@pytest.mark.parametrize("said, share", [
    ("16 red, 40 blue", 1.0), ("16 Red,40 blue.", 1.0), ("16 red, 40 blue,", 1.0),
    ("40 blue, 16 red", 0.0), ("16 red", 0.5), ("16 red, 40 green", 0.5),
    ("16 red, 40 blue, 48 green", 2 / 3), ("40 blue", 0.0), ("", 0.0), (",", 0.0), (".", 0.0),
    ("red, blue", 0.0), ("16 red, , 40 blue", 1.0)])
def test_a_list_is_paid_by_the_places_that_are_right(said, share):
    """Token F1 would pay a wrong order in full."""
    assert accuracy(said, "list", "16 red, 40 blue") == approx(share)
    assert accuracy("", "list", "") == 0.0


def test_anchor_and_gamma_weigh_the_anchor_term():
    short = ["hi</think><answer>B</answer>"]  # base .6, R_anchor .7
    assert [format_reward(short, anchor=a)[0] for a in (0, .2, .5)] == approx([.6, .74, .95])
    left = [f"{THOUGHT}<answer>B</answer>"]  # base .5, R_anchor -gamma
    assert [format_reward(left, gamma=g)[0] for g in (0, 0.3, 1)] == approx([0.5, 0.35, 0.0])


# ------------------------------------------------------------------------------------------------
# Tool reward and the sum


@pytest.mark.parametrize("call, executed, answer, tool", [
    ("", 0, "B", 0.0), (CALL, 0, "A", 0.1), (CALL, 0, "B", 0.1), (CALL, 1, "A", 0.3),
    (CALL * 2, 1, "B", 0.8), ("<tool_call>{}</tool_call>", 0, "B", 0.0)])
def test_tool_reward_equals_hand_computed_values(call, executed, answer, tool):
    got = score([f"x</think>{call}", f"y</think><answer>{answer}</answer>"], "mcq", "B", executed)
    assert got["tool"] == tool


def test_score_sums_its_weighted_terms():
    turns = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>B</answer>"]
    # fmt: .5 answer + .3 call + .1 balanced + .35 anchor, clipped to 1; without the anchor .9
    got = score(turns, "mcq", "B", 1, anchor=0.0)
    assert (got["acc"], got["fmt"], got["tool"], got["total"]) == (1, approx(0.9), 0.8, approx(2.7))
    half = score(turns, "mcq", "B", 1, anchor=0.0, format_weight=0.5, tool_weight=0.0)
    # terms come unweighted
    assert (half["total"], half["fmt"], half["tool"]) == (approx(1.45), approx(0.9), 0.8)
    assert (half["paid_task"], half["paid_fmt"]) == (approx(1.0), approx(0.45))
    judged = rewards.score(turns, {"type": "open", "answer": "x"}, [], verdict=True)
    assert judged["acc"] == 1.0


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
    for call in rewards.parse_tool_calls(text, TOOLS, think_open):
        if call.error is None:
            start, end, num_frames = call.arguments.values()
            assert call.name == "crop_video" and -1e9 < start < end < 1e9
            assert num_frames is None or num_frames >= 1
        else:
            assert call.arguments is None and 0 < len(call.error) < 150
        json.dumps(vars(call), allow_nan=False).encode()


@given(st.lists(anything, max_size=3), st.booleans(), st.booleans(),
       st.sampled_from(["mcq", "open", "list", "grounding"]))
@settings(deadline=None, max_examples=300)
def test_scores_never_raise_and_stay_in_bounds(turns, think_open, answer_suffix, task_type):
    gold = {"mcq": "A", "open": "red car", "list": "1 red, 2 blue", "grounding": (1, 5)}[task_type]
    got = score(turns, task_type, gold, 1, think_open, answer_suffix=answer_suffix)
    assert 0.0 <= got["acc"] <= 1.0 and 0.0 <= got["fmt"] <= 1.0 and 0.0 <= got["tool"] <= 0.8
    assert got["total"] == approx(got["acc"] + got["fmt"] + got["tool"])


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


# ------------------------------------------------------------------------------------------------
# Scores of windows


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
    lambda p: (p[0], p[0] + p[1])), max_size=5)


@given(SPANS, SPANS.filter(bool))
def test_window_scores_are_those_of_sets_of_seconds(windows, evidence):
    """Counted second by second, which is exact for whole seconds."""
    looked, gold = ({t for a, b in spans for t in range(a, b)} for spans in (windows, evidence))
    found = rewards.window_scores(windows, evidence)
    assert found == {"recall": approx(len(looked & gold) / len(gold)),
                     "precision": approx(len(looked & gold) / len(looked)) if looked else None,
                     "iou": approx(len(looked & gold) / len(looked | gold)),
                     "hit": float(bool(looked & gold))}


def test_windows_are_judged_once_each_and_only_if_they_were_run():
    task = {"type": "open", "answer": "a dog", "evidence": [[8.0, 16.0]]}
    calls = [{"turn": 0, "parseable": True, "status": status, "start": a, "end": b}
             for a, b in ((8.0, 12.0), (12.0, 20.0)) for status in ("ok", "ok", "video_error")]
    windows = rewards.score(["Look."], task, calls)["windows"]
    assert windows == {"recall": 1.0, "precision": approx(8 / 12), "iou": approx(8 / 12), "hit": 1}
    failed = [{**call, "status": "error"} for call in calls]
    assert rewards.score(["Look."], task, failed)["windows"]["recall"] == 0.0
    for evidence in ({}, {"evidence": None}, {"evidence": []}):
        task = {"type": "open", "answer": "a dog", **evidence}
        assert "windows" not in rewards.score(["Look."], task, calls)
