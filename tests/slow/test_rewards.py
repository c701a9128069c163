"""
Long tables of the forms in which models write letters, spans and open answers:
python -m pytest tests/slow/test_rewards.py -q
"""
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rewards import (
    PETS,
    PIECES,
    THOUGHT,
    anything,
    format_reward,
    score,
)

import rewards
from evaluation.answers import match_open
from rewards import (
    accuracy,
    answer_or_tail,
    extract_letter,
    extract_span,
    never_closed,
    normalise,
)

# ------------------------------------------------------------------------------------------------
# Tool calls


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


@pytest.mark.parametrize("text, think_open, want", [
    ("hm", True, True), ("hm", False, False), ("hm</think>x", True, False),
    ("<think>hm", False, True), ("a</think><think>b", True, True),
    ("<think>a</think>", False, False)])
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
    (CLOSE + "(B) is correct", "B"),
    ("The limit is C and the top is B.", None),
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
        "I ruled out",
        "It isn't", "It is not option", "It is not answer", "I do not choose", "I do not pick",
        "I do not think it is", "I do not believe it's", "I do not think that it is",
        "It is not D or", "Neither C nor")),
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
        "this", "there", "it", "its", "in",
        "seems", "best", "has")),
    ("He takes vitamins B", None), ("Vitamin B", None), ("A best-selling book", None),
    ("A man", None), ("B选项正确", "B"), ("答案是B", "B"),
    ("(A) is wrong. So B", "B"), ("A and B are wrong. So C", "C"),
    ("A, and (B) are wrong. So C", "C"),
]
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
    ("10 - 20, 80.5-90.5% sure", (10, 20)),
    ("10, 20 seconds", (10, 20)),
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
    ("2 min to 3 min", (120, 180)), ("2 mins to 3 mins", (120, 180)),
    ("1 minute to 2 minutes", (60, 120)), ("1.5 min to 2 min", (90, 120)),
    ("2min to 3min", (120, 180)), ("1m5s to 1m20s", (65, 80)), ("1m 5 s - 1m 20 s", (65, 80)),
    ("10 - 20, a depth of 4 m to 8 m", (10, 20)),
    ("1 minute, 5 seconds to 1 minute and 20.5 seconds", (65, 80.5)),
    ("12.5 - 20, neither 3 - 5 nor 6 - 7", (12.5, 20)), ("10 - 20, not from 3 to 5", (10, 20)),
    ("10 - 20, not between 3 and 5", (10, 20)), ("It does not happen from 10 to 20", None),
]


@pytest.mark.parametrize("response, want", STATED)
def test_each_alternative_reads_a_letter(response, want):
    assert extract_letter(response, PETS) == want


@pytest.mark.parametrize("response, want", TIMES)
def test_each_alternative_reads_a_range(response, want):
    assert extract_span(response) == want


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


SPAN_FORMS = [  # as models write them, all of 12.5 to 20 seconds unless said
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


@pytest.mark.parametrize("response", SPAN_FORMS)
def test_the_forms_in_which_models_write_spans_are_read(response):
    assert extract_span(response) == (12.5, 20)
    # Training reads the answer body, whose stamps are text and no tags: an answer was given.
    turn = f"{THOUGHT}</think><answer>{response}</answer>"
    assert score([turn], "grounding", (12.5, 20))["acc"] == 1.0
    assert format_reward([turn])["answer_opened"] and format_reward([turn])["well_formed"]


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


# ------------------------------------------------------------------------------------------------
# Every part of a pattern has a reply that needs it


def without_a_part(tree):
    """A parsed pattern, changed in place: yields each alternative, optional part and lookaround
    while the pattern lacks it."""
    for at, (kind, value) in enumerate(list(tree)):
        if kind is re._constants.BRANCH:
            for n, part in enumerate(list(value[1])):
                value[1].pop(n)
                yield part
                value[1].insert(n, part)
                yield from without_a_part(part)
        elif kind is re._constants.MAX_REPEAT:
            if value[0] == 0:
                tree[at] = (kind, (0, 0, value[2]))
                yield value[2]
                tree[at] = (kind, value)
            yield from without_a_part(value[2])
        elif kind in (re._constants.ASSERT, re._constants.ASSERT_NOT):
            del tree[at]
            yield value[1]
            tree.insert(at, (kind, value))
            yield from without_a_part(value[1])
        elif kind is re._constants.SUBPATTERN:
            yield from without_a_part(value[3])


def forget_widths(value):
    """The compiler skips texts shorter than the width that the parser has noted."""
    if isinstance(value, re._parser.SubPattern):
        value.width, value = None, value.data
    for part in value if isinstance(value, (list, tuple)) else ():
        forget_widths(part)


def test_each_part_of_a_pattern_has_a_reply_that_needs_it(monkeypatch):
    needed, idle = set(), {}
    for name in ("DECLARED LEADING CAPITAL LABEL STARTER ALTERNATIVE JOINT NOT_BEFORE NOT_AFTER "
                 "BEFORE STRAY PAIR NAMED COUNTED MINUTES").split():
        tree = re._parser.parse(getattr(rewards, name).pattern)
        for part in without_a_part(tree):
            forget_widths(tree)
            monkeypatch.setattr(rewards, name, re._compiler.compile(tree))
            if any(extract_letter(reply, PETS) != want for reply, want in STATED) or any(
                    extract_span(reply) != want for reply, want in TIMES):
                needed.add(repr(part))
            else:
                idle[repr(part)] = name
        monkeypatch.undo()
    # A part that several patterns share, as TIME and END, needs one reply.
    assert {part: name for part, name in idle.items() if part not in needed} == {}


# ------------------------------------------------------------------------------------------------
# Properties: no text raises, everything stays in bounds


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
