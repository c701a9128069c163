"""
evaluation/answers.py (tests/test_rewards.py): whether a free answer says the gold text.

Training pays token F1 (rewards.py), which a part of an answer earns. A benchmark asks for the whole
answer. Patterns see only texts of bounded length, and no text can make them raise. Reads and writes
no file.

    >>> match_open("Answer: O(n^2), because it shows two loops.", "O(n²)")
    True
"""

import re

from rewards import NEGATIONS, answer_lines, normalise

PREDICATE = re.compile(r"(?i)\b(?:is|are|was|were|it['’]s|that['’]s) (?:(?:an?|the) )?(.+)")
# "Therefore, the final answer is: X". The last one counts, after any amount of reasoning.
ANSWER_IS = re.compile(r"(?is)(.*)\banswer[*_ ]*(?:is\b[*_ ]*:?|:)[*_\s]*(.+)")
# "X. The lens zooms in.", but not the list item "1. The lens zooms in."
LAST_SENTENCE = re.compile(r"(?s)(.+)(?:\n|(?<![0-9])[.!] )([^\n]+)")
BECAUSE = re.compile(r"(?is)(.+?),? ((?:because|since) .+)")
# A reason has one of these words. A sentence without them ("It is X") may be a second answer.
REASONS = ("because since while when where which who shows show shown showing seen see sees "
           "visible used using indicates indicating").split()  # fmt: skip
HEDGES = "maybe perhaps possibly probably likely might may could or either unsure guess".split()
# A sentence with one of these words, a hedge or a negation is another answer, not a reason.
TURNS = ("actually wait instead rather however but also alternatively correction sorry answer "
         "another possible").split()  # fmt: skip
# "It is a pan" and "The technique is a pan" answer again, but "The array is sorted .." explains.
CLAIM = re.compile(r"(?i)(?:(?:it|this|that)(?:['’]s| is| was)|the \w+ (?:is|was) (?:an?|the)) ")
# An explanation of many sentences may hold a "not", but none of these.
RETRACTIONS = "actually wait correction sorry answer alternatively".split()
SMALL_WORDS = ("of", "the", "and", "in", "for", "a", "an", "on", "to")


def is_acronym(short, text):
    """Whether `short` is the initials of `text`: DFS, or FDA of "Food and Drug Administration"."""
    letters, words = re.sub(r"[.\s]", "", short), re.findall(r"[^\W_]+", text)
    content = [word for word in words if word.lower() not in SMALL_WORDS]
    # With and without the small words: FDA, and DOA of "dead on arrival".
    initials = ["".join(word[0] for word in group).upper() for group in (words, content)]
    return len(letters) > 1 and letters.isalpha() and letters.isupper() and letters in initials


def answer_forms(text):
    """The forms of an answer: the text, and either part of "Long Name (LN)"."""
    # At most 200 characters a part: a longer text is a sentence, not a name with an acronym.
    match = re.fullmatch(r"([^()]{1,200}?) ?\(([^()]{1,200})\)[. ]*", text.strip())
    if match and (is_acronym(match[1], match[2]) or is_acronym(match[2], match[1])):
        return [text, match[1], match[2]]
    return [text]


def same_form(text, gold):
    """Whether two texts are equal once normalised, or one is the initials of the other."""
    # A gold of two letters is the initials of too many answers: "AI" of "any item".
    acronym = is_acronym(text, gold) or (len(gold) > 2 and is_acronym(gold, text))
    tokens = normalise(text)
    return tokens != [] and (acronym or tokens == normalise(gold))


def is_explanation(text):
    """Whether the text after a blank line explains the line above: a sentence, longer than an
    answer would be, which neither takes that line back nor gives another answer."""
    words, first = normalise(text[:5000]), normalise(re.split(r"[.!?;\n]", text[:1000])[0])
    new_claim = CLAIM.match(text) and set(REASONS).isdisjoint(first)
    doubts = {*HEDGES, *NEGATIONS, *TURNS} & set(first) or set(RETRACTIONS) & set(words)
    # Five words with a full stop, or nine: "Pan along the street" may be a second answer.
    return len(words) > (4 if re.search(r"[.!?]\s*$", text) else 8) and not new_claim and not doubts


def statements(text):
    """The texts that a reply may come down to: the reply, the answer that it declares, and that
    answer without the reason after it. A reason is one sentence, or all text after a first line and
    a blank line."""
    doubt, declared = {*HEDGES, *NEGATIONS, "possible", "another"}, ANSWER_IS.fullmatch(text)
    # "I doubt that the answer is X" declares no answer. Only the declaring clause is searched for
    # doubt, because the reasoning before may doubt other answers.
    clause = re.split(r"[.;!?\n]", declared[1][-100:])[-1] if declared else ""
    if declared and doubt.isdisjoint(normalise(clause)):
        text = declared[2]
    (head, _, reason), text = text.strip().partition("\n\n"), re.sub("\n+", "\n", text).strip()
    candidates = [text]
    if "\n" not in head and is_explanation(reason.strip()):
        candidates.append(head)
    for pattern in (LAST_SENTENCE, BECAUSE):
        parts = pattern.fullmatch(text)
        words = normalise(parts[2][:1000]) if parts else []
        is_reason = len(words) <= 40 and not set(REASONS).isdisjoint(words)
        if is_reason and {*doubt, *TURNS}.isdisjoint(words):
            candidates.append(parts[1])
    return candidates


def match_open(response, gold):
    """Whether a free answer says the gold text: equal after normalising, the acronym or the long
    form of the gold text, or the predicate of one short sentence that does not hedge or negate. The
    answer may be declared as such and may have a reason, see `statements`. An empty answer never
    matches, nor does a part of a text."""
    forms = answer_forms("\n".join(answer_lines(response)).replace("\n", " "))
    for statement in statements("\n".join(answer_lines(response, blank=True))):
        forms += answer_forms(statement.replace("\n", " "))
        # A text of more than 2,000 characters is no short sentence.
        tokens, predicate = normalise(statement[:2000]), PREDICATE.search(statement)
        unsure = set(tokens) & {*HEDGES, *NEGATIONS} or re.search(r"[.;!?] +\w|\n", statement)
        if predicate and len(statement) < 2000 and len(tokens) <= 20 and not unsure:
            forms.append(predicate[1])
    return any(same_form(form, wanted) for form in forms for wanted in answer_forms(gold))
