"""
Long tables of the forms in which models write letters, spans and open answers:
python -m pytest tests/slow/test_rewards.py -q
"""
import re

import pytest
from test_rewards import PETS

import rewards
from rewards import extract_letter, extract_span, never_closed

# ------------------------------------------------------------------------------------------------
# Answers


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
                 "BEFORE STRAY PAIR NAMED COUNTED MINUTES MINUTE_RANGE").split():
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
