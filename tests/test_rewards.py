"""
Tests of rewards.py: python -m pytest tests/test_rewards.py -q

Reward values are worked out by hand from the table in format_reward's docstring. Property tests
feed text made of tags, half tags and odd characters, since uniformly random text never contains a
tag.
"""
import doctest
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
        '</tool_call>')
XML = ("<function=crop_video>\n<parameter=start_time>\n1\n</parameter>\n<parameter=end_time>\n2\n"
       "</parameter>\n</function>")
THOUGHT = "I should look at the middle."
approx = pytest.approx


def json_call(**arguments):
    """One well-formed call with these arguments."""
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def the_call(text):
    """The only call of a text."""
    (call,) = rewards.parse_tool_calls(text, TOOLS, False)
    return call


def test_docstring_example_runs():
    assert doctest.testmod(rewards) == (0, 3)


# ------------------------------------------------------------------------------------------------
# Tool calls


@pytest.mark.parametrize("text, window, num_frames", [
    (json_call(start_time=1.5, end_time="2.5"), (1.5, 2.5), None),
    (json_call(start_time="01:30", end_time="1:00:10"), (90, 3610), None),
    (json_call(start=-5, end=2, num_frames="8"), (-5, 2), 8),
    (CALL.removesuffix("</tool_call>") + "\n", (1, 2), None),
    (CALL.replace('{"start_time": 1, "end_time": 2}', '"{\\"start\\": 1, \\"end\\": 2}"'), (1, 2),
     None), (f"<tool_call>{XML}</tool_call>", (1, 2), None),
    ("<tool_code>\nprint(crop_video(start_time='0:01', end_time=\"0:02\"))\n</tool_code>", (1, 2),
     None)])
def test_every_dialect_gives_the_same_call(text, window, num_frames):
    arguments = {"start": window[0], "end": window[1], "num_frames": num_frames}
    assert the_call(text) == rewards.ToolCall("crop_video", arguments, None)


@pytest.mark.parametrize("text, why", [
    *((f"<tool_call>{body}</tool_call>", "JSON") for body in (
        "", "[1]", "[" * 3000, '{"name": 7, "arguments": {}}', '{"name": "crop_video"}',
        '{"name": "crop_video", "arguments": "{"}', '{"name": "crop_video", "arguments": {}}}')),
    ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', "unknown tool 'x'"),
    (json_call(end_time=2), "start_time is missing"), (json_call(start=2), "end_time is missing"),
    (json_call(start_time=2, end_time=2), "empty or reversed"),
    *((json_call(start_time=wrong, end_time=2), "start_time is not a time")
      for wrong in (True, None, "", [], 1e300, "nan", "-inf")),
    *((json_call(start_time=1, end_time=2, num_frames=wrong), "num_frames must be")
      for wrong in (0, 1.5, True, "1:00", [])),
    ("<tool_code>crop_video(start_time=1, end_time=2", "not one whole call"),
    ("<tool_code>crop_video(1, 2)</tool_code>", "start_time is missing"),  # by name alone
    # nothing is evaluated
    ("<tool_code>crop_video(start_time=1+1, end_time=3)</tool_code>", "start_time is not a time"),
    # Qwen3.5's XML without the tag around it: no answer, and the model is told
    (XML + "\n</tool_call>", "must stand between <tool_call>"),
    ("<tool_call>" + XML.replace("\n1\n</parameter>", "1") + "</tool_call>", "is missing")])
def test_each_bad_call_gets_an_entry_that_says_why(text, why):
    assert why in the_call(text).error


@pytest.mark.parametrize("text, forced, plain", [  # calls with a forced thought, and without
    (f"<think>{CALL}</think>{CALL}", 1, 1), (f"<think>hm {CALL}", 1, 1),
    (f"draft {CALL} <think> more </think>", 0, 1), (f"{CALL}{CALL}", 2, 2)])
def test_a_call_in_a_closed_thought_is_a_thought_and_in_an_open_one_a_call(text, forced, plain):
    counts = [len(rewards.parse_tool_calls(text, TOOLS, think_open)) for think_open in (1, 0)]
    assert counts == [forced, plain]


# ------------------------------------------------------------------------------------------------
# Answers


@pytest.mark.parametrize("turns, want", [
    ([], None), (["B"], None), (["<answer><b></b></answer>"], None), (["<answer>B"], "B"),
    (["<answer>A</answer><answer>B</answer>"], "B"), (["<answer>B</answer><answer> . "], "B"),
    (["<answer>A</answer>", "no tag here"], None),
    (["<think><answer>A</answer></think><answer>B</answer>"], "B"),
    (["<ans<think>x</think>wer>B</answer>"], None),
    (["<think>hm <answer>B</answer>"], "B")])  # a thought that never closes hides nothing
def test_final_answer_is_the_last_answer_block_outside_thought(turns, want):
    assert rewards.final_answer(turns, False) == want
    draft = ["draft <answer>A</answer></think> B"]
    assert [rewards.final_answer(draft, forced) for forced in (True, False)] == [None, "A"]


GRADES = {
    ("mcq", "b"): {"B": 1, "(b)": 1, "**B**\n": 1, "B. dog": 1, "B: the dog": 1, "A": 0, "BC": 0,
                   # prose earns nothing: the question asks for the letter
                   "B or C": 0, "The answer is B": 0, "": 0, None: 0},
    ("grounding", (5, 15)): {
        "0 - 10": 1 / 3, "from 5 to 15 seconds": 1, "0:05 - 0:15.0": 1, "15 - 5": 0, "5": 0,
        "5.0 - 15\nConfidence: 0.9": 1, "5 - 5": 0, "20 - 25": 0, "8 - 10": 0.2, None: 0},
    # Token F1 would pay a wrong order in full.
    ("list", "16 red, 40 blue"): {
        "16 Red,40 blue.": 1, "40 blue, 16 red": 0, "16 red": 0.5, "16 red, 40 blue, 48 green":
        2 / 3, "": 0, ",": 0, "red, blue": 0, "16 red, , 40 blue": 1, None: 0},
    # multisets: order is free, repeats count
    ("open", "red red car"): {"red car red": 1, "A red car.": 0.8, "blue": 0, "": 0, None: 0},
    ("open", "the A"): {"a the": 1, "": 0}, ("open", "दिन"): {"दिन": 1, "दान": 0},
    # without blanks between words: by characters, 5 of 7 and 5
    ("open", "红色的汽车"): {"一辆红色的汽车": 10 / 12}, ("open", "赤い自動車"): {"赤い車": 6 / 8},
    # signs that change the meaning; points that are usually left out; other widths
    ("open", "C"): {"C++": 0, "Ｃ": 1}, ("open", "5"): {"-5": 0}, ("open", "15"): {"1.5": 0},
    ("open", "50"): {"50%": 0}, ("open", "كتاب"): {"كِتَابٌ": 1}, ("open", "café"): {"cafe\u0301": 1}}


@pytest.mark.parametrize("kind, gold", GRADES)
def test_answers_earn_what_their_type_pays(kind, gold):
    grades = GRADES[kind, gold]
    assert {answer: approx(rewards.accuracy(answer, {"type": kind, "answer": gold}))
            for answer in grades} == grades


# ------------------------------------------------------------------------------------------------
# Format reward: turns without the forced "<think>\n"; R_fmt without R_anchor, R_fmt

TABLE = [
    # everything: .2 think + .5 answer + .3 call + .1 balanced = 1.1; anchor .4 + .3; 1.1 + .35 is
    # clipped
    ([f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think>\n<answer>B</answer>"], 1.0, 1.0),
    # direct answer: .2 + .5 + .1; anchor .7
    ([f"{THOUGHT}</think><answer>B</answer>"], 0.8, 1.0),
    # a thought of less than ten characters: .5 + .1, closed all the same
    (["123456789</think><answer>B</answer>"], 0.6, 0.95),
    (["1234567890</think><answer>B</answer>"], 0.8, 1.0),
    # thought and call: .2 + .3 + .1; closed, no flow
    ([f"{THOUGHT}</think>{CALL}"], 0.6, 0.8),
    # an empty answer pair: .2 + .1; closed, no flow
    ([f"{THOUGHT}</think><answer> </answer>"], 0.3, 0.5),
    # a call before the thought's end is a draft: .2 alone, nested
    ([f"{CALL}{THOUGHT}</think>{CALL}"], 0.2, 0.4),
    # never closed: answer .5, no balance; anchor -.3
    ([f"{THOUGHT}<answer>B</answer>"], 0.5, 0.35),
    # nothing but a thought that never closes: 0 - .15 is clipped to 0
    (["hi"], 0, 0), ([], 0, 0), (["</think><tool_call></tool_call><answer></answer>"], 0, 0),
    ([f"</think>{CALL}"], 0, 0),  # a thought without a word
    # </answer> missing: .2 + .3, no balance; closed .4; .5 + .2 is capped
    ([f"{THOUGHT}</think><answer>B"], 0.5, 0.5),
    # one turn of two never closes: .2 + .5, no balance; anchor -.3
    ([CALL, f"{THOUGHT}</think><answer>B</answer>"], 0.5, 0.5),
    # an invalid call earns nothing by itself: .2 + .1
    ([f"{THOUGHT}</think><tool_call>{{}}</tool_call>"], 0.3, 0.5),
    # answer in a turn that is not the last: .2 + .1
    ([f"{THOUGHT}</think><answer>B</answer>", f"{THOUGHT}</think>no idea"], 0.3, 0.5),
    # misused tags: two answers, a second <think> after the forced one, a response of its own
    ([f"{THOUGHT}</think><answer>A</answer><answer>B</answer>"], 0.5, 0.5),
    ([f"<think>{THOUGHT}</think><answer>B</answer>"], 0.5, 0.5),
    ([f"{THOUGHT}</think><tool_response>a dog</tool_response><answer>B</answer>"], 0.5, 0.5)]


@pytest.mark.parametrize("turns, base, total", TABLE)
def test_format_reward_equals_hand_computed_values(turns, base, total):
    """Base and anchor are also what --format-credit anchor pays apart."""
    assert rewards.format_reward(turns, calls_in(turns)) == approx((total, base))
    got = score(turns, "open", "B", format_weight=0.5)
    assert (got["paid_fmt"], got["paid_base"]) == approx((total / 2, base / 2))


# ------------------------------------------------------------------------------------------------
# Tool reward and the sum


@pytest.mark.parametrize("call, executed, answer, tool", [
    ("", 0, "B", 0.0), (CALL, 0, "B", 0.1), (CALL, 1, "A", 0.3), (CALL * 2, 1, "B", 0.8),
    ("<tool_call>{}</tool_call>", 0, "B", 0.0)])
def test_tool_reward_equals_hand_computed_values(call, executed, answer, tool):
    got = score([f"x</think>{call}", f"y</think><answer>{answer}</answer>"], "mcq", "B", executed)
    assert got["tool"] == tool


def test_score_sums_its_weighted_terms():
    turns = [f"{THOUGHT}</think>{CALL}", "hi</think><answer>B</answer>"]
    # fmt: .5 answer + .3 call + .1 balanced
    got = score(turns, "mcq", "B", 1, anchor=0.0, format_weight=0.5, tool_weight=0.25)
    # terms come unweighted
    assert (got["acc"], got["tool"]) == (1, 0.8)
    assert (got["fmt"], got["total"]) == approx((0.9, 1.65))
    assert (got["paid_task"], got["paid_fmt"]) == (approx(1.2), approx(0.45))
    assert rewards.score(turns, {"type": "open", "answer": "x"}, [], verdict=True)["acc"] == 1.0


@pytest.mark.parametrize("setting, fmt", [
    ({}, 0.35), ({"gamma": 0.0}, 0.5), ({"anchor": 0.0}, 0.5),
    # .2 + .1 for the answer, -.15 for the thought left open
    ({"answer_suffix": False}, 0.15), ({"think_open": False}, 0.6)])
def test_score_passes_every_setting_on(setting, fmt):
    assert score([f"{THOUGHT}<answer>B</answer>"], "mcq", "B", **setting)["fmt"] == approx(fmt)


# ------------------------------------------------------------------------------------------------
# Properties: no text raises, everything stays in bounds

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>",
        "<answer>", "</answer>"]
PIECES = [*TAGS, CALL, "<answer>B", "a(", "'a\"(", "10 - ", " ", "[", "{", "}", "<tool_response>",
          "<tool_code>crop_video(1,2)</tool_code>", '<tool_call>{"name":"crop_video",', "ﷺ", "null",
          "NaN", "\x00", "\ud800", "٣", "²", "0:10", ", ", ".", "A", "\n", "1" * 50, "1e999", "\\"]
anything = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=14).map("".join)


@given(st.lists(anything, max_size=3), st.booleans(), st.booleans(),
       st.sampled_from(["mcq", "open", "list", "grounding"]))
@settings(max_examples=300)
def test_no_text_raises_and_scores_stay_in_bounds(turns, think_open, answer_suffix, task_type):
    for call in rewards.parse_tool_calls("".join(turns), TOOLS, think_open):
        assert (call.arguments is None) != (call.error is None) and len(call.error or "") < 150
        assert call.error or -1e9 < call.arguments["start"] < call.arguments["end"] < 1e9
        json.dumps(vars(call), allow_nan=False)
    gold = {"mcq": "A", "open": "red car", "list": "1 red, 2 blue", "grounding": (1, 5)}[task_type]
    got = score(turns, task_type, gold, 1, think_open, answer_suffix=answer_suffix)
    assert 0.0 <= got["acc"] <= 1.0 and 0.0 <= got["fmt"] <= 1.0 and 0.0 <= got["tool"] <= 0.8
    assert got["total"] == approx(got["acc"] + got["fmt"] + got["tool"])


# ------------------------------------------------------------------------------------------------
# struct(o)


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


@given(st.lists(st.sampled_from([*TAGS, "<", ">", "</", "é", "<think", "answer>", " B ", "\x00"]),
                max_size=12), st.data())
@settings(max_examples=300)
def test_mask_equals_the_oracle_for_any_split(parts, data):
    joined = "".join(parts).encode()
    # equal cuts give empty tokens
    cuts = sorted(data.draw(st.lists(st.integers(0, len(joined)), max_size=20)))
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    assert rewards.structural_mask(pieces) == overlap_oracle(pieces)


# ------------------------------------------------------------------------------------------------
# Group advantages


def test_advantages_equal_hand_computed_values():
    # rewards 1 + .5 = 1.5 and 0 + 0 = 0: mean .75, sigma .75
    a_task, a_fmt, sigma = rewards.group_advantages([1.0, 0.0], [0.5, 0.0])
    assert [sigma, *a_task, *a_fmt] == approx([0.75, 2 / 3, -2 / 3, 1 / 3, -1 / 3])
    # The parts cancel: the composed reward is constant although neither part is.
    assert rewards.group_advantages([1.0, 0.0], [0.0, 1.0])[:2] == ([0.0, 0.0], [0.0, 0.0])
    # Seven spans are the label, one ends 0.1 ms late: TRL's advantage is -0.08 there.
    assert rewards.group_advantages([1.0] * 7 + [1.0 - 1e-5], [0.0] * 8)[0][7] == approx(-8.75e-3)


# ------------------------------------------------------------------------------------------------
# Scores of windows


@pytest.mark.parametrize("windows, evidence, recall, precision, iou", [
    # 15 s were looked at, once; 12 s are evidence, 7 s both
    ([(0, 10), (5, 15)], [(8, 20)], 7 / 12, 7 / 15, 7 / 20),
    ([(0, 4)], [(8, 12), (10, 14)], 0, 0, 0), ([], [(8, 12)], 0, None, 0)])
def test_window_scores_worked_by_hand(windows, evidence, recall, precision, iou):
    found = rewards.window_scores(windows, evidence)
    assert found == {"recall": approx(recall), "iou": approx(iou), "hit": float(recall > 0),
                     "precision": precision if precision is None else approx(precision)}


def test_windows_are_judged_if_they_were_run_and_the_task_has_evidence():
    task = {"type": "open", "answer": "a dog", "evidence": [[8.0, 16.0]]}
    calls = [{"turn": 0, "parseable": True, "status": status, "start": a, "end": b}
             for a, b, status in ((8.0, 12.0, "ok"), (12.0, 20.0, "video_error"))]
    assert rewards.score(["Look."], task, calls)["windows"]["recall"] == 0.5
    assert "windows" not in rewards.score(["Look."], {**task, "evidence": []}, calls)
