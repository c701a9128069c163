"""
evaluation/answers.py (tests/test_answers.py): answers in the prose of any model -> what they say,
and whether that is right.

  mcq        extract_letter: "The answer is (B)", "B. dog", "答案是选项B", the text of one option
  grounding  extract_span: "from 1m30s to 2m", "start: 90, end: 120", "12.5 - 20.0"
  list       the items in order
  open       match_open: the gold text, its acronym, or a sentence that says it

Training reads the body of <answer> by one plain rule a type (rewards.py). Here replies of models
that were never taught our form are graded, and a wrong reading is worse than none. Nothing sees the
gold answer before it has read the reply. Patterns see only texts of bounded length, and no text can
make them raise. Reads and writes no file.

    >>> match_open("Answer: O(n^2), because it shows two loops.", "O(n²)")
    True
"""
import itertools
import re
import string
import unicodedata

import rewards

# -----------------------------------------------------------------------------
# The text that is graded

MAX_ANSWER_CHARS = 50_000  # longer is no answer. Bounds the work below: NFKC may grow a text 18x
# A block is no answer, and its numbers are no span. One that never closes takes all text after it,
# so no second search runs to the end.
BLOCK = re.compile(r"(?s)<(tool_[a-z]+|action|observation|score|clip)>(?:.*?</\1>|.*)")


def never_closed(text, think_open=False):
    """Whether a turn ends inside a thought. think_open: the turn began inside a thought."""
    text = rewards.with_forced_start(text, think_open)
    return text.rfind("</think>") < text.rfind("<think>")


def answer_or_tail(turns, think_open=False):
    """The text that is graded: the last <answer> of the last turn, else the text after the thought;
    None if there is neither."""
    if not turns:
        return None
    # A turn whose first think tag is a closing one began inside a thought.
    before_tag = turns[-1].partition("<think>")[0]
    answer = rewards.final_answer(turns, think_open or "</think>" in before_tag)
    # An unclosed thought has no tail. Reading an answer out of reasoning would grade drafts.
    if answer is not None or never_closed(turns[-1], think_open):
        return answer
    text = BLOCK.sub("\n", turns[-1].rpartition("</think>")[2])
    return text.strip() if rewards.has_word(text) else None


def nfkc(text):
    """NFKC: full-width characters to ASCII. But 10² becomes 10^2, which NFKC would make 102."""
    text = unicodedata.normalize("NFKC", re.sub("(?<=[0-9])[⁻⁰¹²³⁴-⁹ⁿ]+", r"^\g<0>", text))
    return text.replace("。", ". ").replace("’", "'")


def answer_lines(response):
    """The lines of a response that are graded: of an answer body all, of a turn those after the
    thought."""
    text = answer_or_tail([response]) or ""
    if len(text) > MAX_ANSWER_CHARS:
        return []
    # A LaTeX box declares the answer. The last box counts.
    text = re.sub(r"\\(?:text|math)[a-z]{0,6} ?\{([^{}]*)\}", r"\1", text)
    for box in re.findall(r"\\boxed ?\{([^{}]*)\}", text):
        text = box
    # Single spaces also keep the patterns below from backtracking over long blanks.
    lines = [" ".join(line.split()) for line in nfkc(text).splitlines()]
    return [line for line in lines if line]


# -----------------------------------------------------------------------------
# Grades


def read_answer(answer, task):
    """What an answer says, without a look at the label: a letter, a span, or its text; None: it
    says nothing of the kind."""
    if answer is None:
        return None
    if task["type"] == "mcq":
        return extract_letter(answer, task.get("options"))
    if task["type"] == "grounding":
        return extract_span(answer)
    return " ".join(answer_lines(answer)) or None


def score_answer(answer, task):
    """-> score in [0, 1] of an answer (None: 0). Training pays for a part of an open answer or of a
    list; here the whole is asked for."""
    extracted = read_answer(answer, task)
    if extracted is None:
        return 0.0
    if task["type"] == "mcq":
        return float(extracted == task["answer"].strip().upper())
    if task["type"] == "grounding":
        return rewards.temporal_iou(extracted, task["answer"])
    if task["type"] == "list":
        return float(list_items(extracted) == list_items(task["answer"]) != [])
    return float(match_open(answer, task["answer"]))


def list_items(text):
    """The items of a list, normalised; a piece without a word is no item."""
    return [normalise(item) for item in text.split(",") if rewards.has_word(item)]


# -----------------------------------------------------------------------------
# Words

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
NEGATIONS = (
    "not no never neither nor cannot cant isnt wasnt arent dont doesnt didnt except wrong incorrect"
).split()
SPELLED = {word: str(number) for number, word in enumerate(NUMBERS)}  # words -> one form of them
SPELLED["%"] = "percent"


def normalise(text):
    """The tokens by which open answers are compared. Case, articles, punctuation, hyphens and
    thousands commas are removed. The exponent of a letter joins the letter, number words become
    digits. A minus sign, a decimal point, % and C++ stay, because they change the meaning."""
    text = nfkc(text).casefold()
    text = re.sub(r"(?<=[^\W\d_])\^\{?(?=[0-9])", "", text)  # n^2, n^{2} -> n2, as NFKC has n²
    text = re.sub("['`]", "", text).replace("−", "-")  # don't -> dont
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # 1,000 -> 1000
    tokens = []
    sign = r"(?<![^\s.%+#-])"  # where no word ends
    for word in re.findall(
        rf"{sign}-?(?:[0-9]+\.[0-9]+|\.[0-9]+)(?![^\s.%+#-])|{sign}-[0-9]+|%|[^\s.%+#-]+[+#]*",
        rewards.word_characters(text),
    ):
        if re.fullmatch("-?[0-9]*[.]?[0-9]+", word):
            word = f"{float(word):.15g}"  # 05 -> 5, 5.0 -> 5, .5 -> 0.5
        tokens.append(SPELLED.get(word, word))
    # If only articles are left, keep them. Otherwise gold "A" would equal "the", and both ".".
    return [token for token in tokens if token not in ("a", "an", "the")] or tokens


# -----------------------------------------------------------------------------
# Option letters

# Each pattern sees single spaces and newlines. None has two open-ended repeats in a row, so all
# take linear time. Of brackets they see round ones alone, see strip_markdown. A table of the tests
# has a reply for each alternative.
OPTION = r"(?:option )?\(?"
END = r"(?![-']?\w|\+\+|#|\.\w\.)"  # alone: not Apples, A's, B-roll, C++, C#, A.M.
IS = r" (?:is|(?:would|should|must) be)(?: most)?(?: \w{1,9}ly)?"
# "answer: B", "correct option is B", "it's B", "I choose B", "B is correct", "答案是选项 B"
DECLARED = re.compile(
    rf"(?i)(?:\b(?:answer(?:{IS})?|(?:option|choice)(?:{IS}|:|'s)|it(?:{IS}|'s)|"
    r"I(?:'d|'ll| would| will)? (?:choose|select|pick|go with))|答案(?:[是为选]|选项)*)"
    rf"[ \n:=→-]{{0,8}}(?:选项 )?{OPTION}([a-z]){END}|"
    r"([a-z])\)? is(?: \w{1,9}ly)?(?: the)?(?: best)? (?:correct|answer|option|choice)")
LEADING = re.compile(rf"(?i)\A{OPTION}([a-z]){END}(?!\)? (?:is|has))")
CAPITAL = re.compile(rf"(?<![\w.°])([A-Z]|(?<=ption )[a-z]){END}")
LABEL = re.compile(r"\(?([A-Za-z])(?:[):.]+(?: |$)|$)")  # "B. ", "(B)", "B"
# The start of a line: "Option ", "The correct answer is: "
STARTER = re.compile(r"(?i)\A(?:the )?(?:\w{4,7} )?(?:answer|option)(?: is)?:? ")
# "or C" after a stated letter; after a comma or a space only if the text says no more of C.
ALTERNATIVE = re.compile(
    r"(?i)(?:\)?\.?,? \(?(?:or|and|as well as)(?: possibly)? |\)? ?[/&] ?|"
    rf"((?:\)?,)? (?=(?:option )?\(?[A-Z]\)?(?:[,.;\n]|$)))){OPTION}([A-Z]){END}")
JOINT = re.compile(r",? ?(?:and|n?or|[/&])? ?")  # from "A" to "B" in "A and B"
NOT_BEFORE = re.compile(
    r"(?i)(?:not|never|neither|rather than|instead of|ruled out|doubt|anything but|unlikely|n't|"
    r"不[是选])(?: option| answer| it| is| be| choose| pick| think| believe| that| it's| to|"
    r" happen| from| between| 选项| (?:[A-Z]|[0-9][0-9.: s–-]{0,16}) n?or)*[ (]*$")
# "is wrong", "and B are wrong", "has been eliminated", "A ✗", "A? No.", "A 错误"
NOT_AFTER = re.compile(
    r"(?i)\)?(?:[.:]? ?[✗✘✖❌×]|\? ?no\b| ?(?:是)?(?:错|不)|"
    r"(?:(?:,? (?:and )?\(?[A-Z]\)?)+(?= are))? (?:is|are|can|does|seems|has been)(?: be)? ?"
    r"(?:not|n?'t|(?:\w{1,9}ly )?(?:wrong|incorrect|ruled out|excluded|eliminated|unlikely)))")
# An option is named after punctuation or one of these words: "so C", but not "vitamin C". The
# Chinese ones end "answer is", "choose", "or", "and", "option" and "answer".
BEFORE = re.compile(
    r"(?i)(?:[^\w ]|[是为选择或和项案]|\b(?:(option|choice)|answer|choose|select|pick|with|is|be|s|"
    r"so|but|as|thus|hence|say|matches|and|towards|like|leaving|\w{1,9}ly|n?or|neither)) ?$")
# A letter before a word is an article or a stray letter ("A man", "I think"). Exceptions are words
# that no article precedes: "A because", "A The", "A B", a Chinese word.
STRAY = re.compile(
    r" (?!(?i:because|since|as|n?or|and|is|but|rather than|that|the|this|there|its?|in|seems|best|"
    "has|[A-Z])\\b(?!-)|[\u2e80-\u9fff])\\w")


def is_letter(text, at):
    """Whether text[at] names an option, so is no article, pronoun, initial or name. One rule serves
    all letters, so that no letter is easier to state than another."""
    # A short window of the text, so that each look has a constant cost.
    match = BEFORE.search(("\n" + text)[max(0, at - 15) : at + 1])
    if match is None:
        return False
    # The A of "option A depicts .." is no article, whichever word follows.
    return match[1] is not None or not STRAY.match(text, at + 1)


def is_denied(text, start, end):
    """Whether a letter or a range at text[start:end] is said not to be the answer."""
    denied_before = NOT_BEFORE.search(text[max(0, start - 40) : start])
    return bool(denied_before or NOT_AFTER.match(text[end : end + 30]))


def strip_markdown(text):
    """A line without Markdown, bullets and quotes, all brackets as round ones, with a space
    wherever a Chinese word begins or ends."""
    text = re.sub(r"^[-•>#]+ |[*_`$\"“”【】「」]|(?<!\w)'|'(?!\w)", "", text)
    text = text.translate(str.maketrans("[]{}", "()()"))
    return re.sub("(?<=[!-~])(?=[\u2e80-\u9fff])|(?<=[\u2e80-\u9fff])(?=[!-~])", " ", text)


def named_letters(pattern, text):
    """{letter: index after the match} of all letters that a pattern names in text, by last
    mention. Denied letters are left out."""
    named, valid, end = {}, True, 0
    for match in pattern.finditer(text):
        at = match.start(match.lastindex)
        # "labels A and C" names neither.
        joined = JOINT.fullmatch(text, end, at)
        valid = is_letter(text, at) and (valid or not joined)
        end = match.end()
        if valid and not is_denied(text, *match.span()):
            named.pop(text[at].upper(), None)
            named[text[at].upper()] = end
    return named


def stated_letter(pattern, text):
    """{the last letter that a pattern states}, {} if there is none, both letters of "B or C"."""
    named = named_letters(pattern, text)
    if not named:
        return set()
    # The last one counts: "The answer is A. No, wait: the answer is C."
    letter, end = list(named.items())[-1]
    second = ALTERNATIVE.match(text, end)
    if second and (second[1] or is_letter(text, second.start(2))):
        if not is_denied(text, *second.span(2)):
            return {letter, second[2].upper()}
    return {letter}


def letters_by_text(answer, texts, letters):
    """The letters of the options whose text is said and not denied. answer, texts: normalised."""
    answer = f" {answer} "
    # Longer texts first, so that "hot dog" does not name "dog". A lone letter is a label.
    names = {text for text in texts if text.upper() not in {"", *letters}}
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    matched = names & set(re.findall(f"(?<= )(?:{any_name})(?= )", answer))
    if len(matched) == 1:
        # An option's text may hold a "not", so look beside it.
        rest = answer.replace(f" {min(matched)} ", " ").split()
        if not set(NEGATIONS).isdisjoint(rest):
            return set()
    return {letter for letter, text in zip(letters, texts) if text in matched}


def line_letter(line, letters, texts):
    """The letter of a line that holds only an answer: "B", "Option B.", "(B) dog", "Answer: dog".
    "?" if label and text contradict each other. Else None."""
    line = STARTER.sub("", line, count=1)
    label = LABEL.match(line)
    if label:
        letter = label[1].upper()
        statement = " ".join(normalise(line[label.end():]))
        # Options with the text after the label; "B. B. King" has none, as an option begins so.
        named = [at for at, text in zip(letters, texts) if text == statement]
        if not statement:
            named = letters
        if named:
            return letter if letter in named else "?"
    statement = " ".join(normalise(line))
    named = [at for at, text in zip(letters, texts) if text == statement]
    return named[0] if len(named) == 1 else None


def option_text(letter, option):
    """An option as normalised text: "3" and "three" name one option. Only a label that fits the
    option's place is taken off: "B. B. King" may be the text of option A."""
    text = re.sub(rf"^\s*\(?{letter}[).:]+\s+", "", strip_markdown(str(option)))
    return " ".join(normalise(text))


def extract_letter(response, options):
    """The option letter that a response settles on, or None. options: texts, labelled ("A. ..",
    "(A) ..") or bare; without options A to J are allowed. The first step that names a letter
    decides: 1. the last "answer is X"; 2. a letter or an option alone on a line, or a letter that
    leads; 3. the only capital that stands as a letter; 4. the text of one option. No answer: two
    letters in one step, a letter that no option has, a label that contradicts its text, a list of
    the options."""
    letters = string.ascii_uppercase[: len(options) if options else 10]
    lines = [strip_markdown(line) for line in answer_lines(response)] or [""]
    # Keep the line breaks: joined by spaces, the A before "The oven .." would read as an article.
    text = "\n".join(lines)
    declared = stated_letter(DECLARED, text)
    # Two labelled lines repeat the options. Then only a bare letter is an answer.
    labels = [LABEL.match(line) for line in lines]
    listing = len({label[1].upper() for label in labels if label}) > 1
    texts = []
    if options and not listing:
        texts = [option_text(letter, option) for letter, option in zip(letters, options)]
    own_lines = [line_letter(line, letters, texts) for line in lines]
    # A letter alone on the last line answers, whatever option the first line begins with.
    leading = set()
    if not (listing or own_lines[0] or own_lines[-1]):
        leading = stated_letter(LEADING, text)
    if declared and len(lines) == len(leading) == 1:
        declared |= leading  # "A. The answer is B" contradicts itself
    alone = set(filter(None, own_lines)) | leading
    capitals = set(named_letters(CAPITAL, text))
    by_text = letters_by_text(" ".join(normalise(text)), texts, letters)
    # The first step that names a letter decides. A later step never breaks a tie.
    for step in (declared, alone, capitals, by_text):
        if step:
            letter = min(step)
            return letter if len(step) == 1 and letter in letters else None
    return None


# -----------------------------------------------------------------------------
# Time spans

TIME = r"((?:[0-9]{1,9}:){0,2}[0-9]{1,9}(?:\.[0-9]{1,9})?)(?![0-9:%]|\.[0-9])"  # not 80-90%
SECONDS, ABOUT = r"( ?s(?:ec(?:ond)?s?)?\.?)?", r"(?:about |around |second |t ?= ?)?"
DASH = "-–—−~→"
PAIR = re.compile(
    rf"(?i)([\[(] ?)?(?<![\w.:-]){TIME}{SECONDS} ?([{DASH},]|-->|(?:up )?to|through|until|and) ?"
    rf"{ABOUT}{TIME}{SECONDS}(?!,[0-9]| ?[{DASH}] ?[0-9])")
# "start_time": 1, "**Start time (s):** 1", "The start time is 1", "starts at about 1"
AT = (
    rf"[a-z_]{{0,8}}(?: time(?:stamp)?)?(?: \(s(?:econds)?\))?[\"' :=]{{0,6}}(?:is |at ){{0,2}}"
    rf"{ABOUT}{TIME}")
NAMED = re.compile(rf"(?i)(?:start|begin){AT}[^0-9]{{0,60}}?(?:end|finish|stop){AT}")
# Words just before or after a pair of numbers that is no time. A newline stands for the pair.
COUNTED = re.compile(r"(?i)(?:frames?|confidence:?)(?: \w{4,7})? ?\n|\n (?:frame|percent|confid)")
MINUTE_RANGE = re.compile(r"\b([0-9]{1,4}) ?(?:[-–—]|to) ?(?=[0-9]{1,4} ?min)")
MINUTES = re.compile(
    r"(?:([0-9]{1,3}) ?h(?:ours?|rs?)?,? ?)?([0-9]{1,4}(?:\.[0-9]{1,3})?) ?"
    rf"m(?:in(?:ute)?s?|(?= ?[0-9]{{1,2}} ?s))(?:,? ?(?:and )?([0-9]{{1,2}}(?:\.[0-9]{{1,3}})?)"
    rf"{SECONDS})?")

CHINESE = {"小时": "h", "分钟": "m", "时": "h", "分": "m", "秒": "s", "至": " to ", "到": " to "}


def extract_span(response):
    """(start, end) in seconds of the last time range in a response, or None. A range is two times
    (12.5, MM:SS, H:MM:SS, "1 minute 5 seconds", 1m30s) joined by a dash, "to", "until" or "and", or
    given as start and end; by a comma only in brackets, with a unit, or alone. A reversed last
    range is wrong and gives None. Frame numbers, a confidence and a denied range ("not 3 - 5") are
    no answer."""
    lines = answer_lines(response)
    text = " ".join(line for line in lines if not line.lower().startswith("confidence"))
    text = plain_times(text)
    spans = [(match.span(), match[1], match[2]) for match in NAMED.finditer(text)]
    alone = text.strip(" .\"'")
    for match in PAIR.finditer(text):
        bracket, start, unit, joint, end, _ = match.groups()
        listed = joint == "," and not (bracket or unit or match[0] == alone)  # "at 10, 20 people"
        first, last = match.span()
        around = text[max(0, first - 32) : first] + "\n" + text[last : last + 12]
        # "frames 10-20", "confidence 0.8-0.9"; "frames <12.5 seconds> - <20.0 seconds>" are times.
        if not listed and (unit or not COUNTED.search(around)):
            spans.append((match.span(), start, end))
    # The last range counts, because an echoed example or a first guess stands before the answer.
    stated = [span for span in spans if not is_denied(text, *span[0])]
    if not stated:
        return None
    _, start, end = max(stated)
    start, end = rewards.to_seconds(start), rewards.to_seconds(end)
    return (start, end) if start < end else None


def plain_times(text):
    """A text in which times are seconds or have colons: one pattern then reads every range."""
    text = re.sub(r"<([0-9][^<>]*)>", r"\1", text)  # "<12.5 seconds> - <20.0 seconds>"
    text = re.sub(r"[*`]|(?<=:[0-9][0-9]) ?min\b", "", text)  # "**10** - **20**", "1:05 min"
    # "2,5 - 7,5": commas on both sides of a dash are decimal points. Read as 2 to 5 they would be a
    # wrong answer, which is worse than none.
    text = re.sub(
        rf"([0-9]),([0-9]+(?: ?s)? ?(?:[{DASH}]|to) ?[0-9]+),(?=[0-9])", r"\1.\2.", text)
    for word, unit in CHINESE.items():
        text = re.sub(f"(?<=[0-9]){word}|(?<=[smh]){word}(?=[0-9])", unit, text)
    text = re.sub("[\u2e80-\u9fff]", " ", text)
    if re.search("[0-9]m ?[0-9]{1,2} ?s", text):  # beside 1m30s, 2m is no distance
        text = re.sub("(?<=[0-9])m(?![a-z0-9])", " min", text)
    text = MINUTE_RANGE.sub(r"\1 min to ", text)
    return MINUTES.sub(seconds_text, text)


def seconds_text(match):
    """A match of MINUTES -> the same in seconds, as text."""
    hours, minutes, seconds = (float(part or 0) for part in match.groups()[:3])
    return f"{3600 * hours + 60 * minutes + seconds:.3f}s"


# -----------------------------------------------------------------------------
# Open answers
# "It is X": what follows may be the whole answer.
PREDICATE = re.compile(r"(?i)\b(?:is|are|was|were|it['’]s|that['’]s) (?:(?:an?|the) )?(.+)")
# "Therefore, the final answer is: X". The last one counts, after any amount of reasoning.
ANSWER_IS = re.compile(r"(?is)(.*)\banswer[*_ ]*(?:is\b[*_ ]*:?|:)[*_\s]*(.+)")
BECAUSE = re.compile(r"(?is)(.+?),? (?:because|since) (.+)")
HEDGES = "maybe perhaps possibly probably likely might may could or either unsure guess".split()
SMALL_WORDS = ("of", "the", "and", "in", "for", "a", "an", "on", "to")


def is_acronym(short, text):
    """Whether `short` is the initials of `text`: DFS, or FDA of "Food and Drug Administration"."""
    letters = re.sub(r"[.\s]", "", short)
    words = re.findall(r"[^\W_]+", text)
    initials = "".join(word[0] for word in words if word.lower() not in SMALL_WORDS)
    return len(letters) > 1 and letters.isalpha() and letters.isupper() and (
        letters == initials.upper())


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


def is_sure(text):
    """Whether a text neither hedges nor denies."""
    return {*HEDGES, *NEGATIONS}.isdisjoint(normalise(text))


def statements(text):
    """The texts that a reply may come down to: the reply, or the answer that it declares, and the
    same without "because" and the reason after it."""
    declared = ANSWER_IS.fullmatch(text)
    # "I doubt that the answer is X" declares no answer. Only the declaring clause is searched for
    # doubt, because the reasoning before may doubt other answers.
    if declared:
        clause = re.split(r"[.;!?\n]", declared[1][-100:])[-1]
        if is_sure(clause) and "doubt" not in clause:
            text = declared[2]
    candidates = [text]
    because = BECAUSE.fullmatch(text)
    if because and is_sure(because[2][:1000]):  # else the reason may take the answer back
        candidates.append(because[1])
    return candidates


def match_open(response, gold):
    """Whether a free answer says the gold text: equal after normalising, the acronym or the long
    form of the gold text, or the predicate of one short sentence that does not hedge or negate. The
    answer may be declared as such and may have a reason, see `statements`. An empty answer never
    matches, nor does a part of a text. What needs more judgement is asked of a judge."""
    text = "\n".join(answer_lines(response))
    forms = answer_forms(text.replace("\n", " "))
    for statement in statements(text):
        forms += answer_forms(statement.replace("\n", " "))
        predicate = PREDICATE.search(statement)
        is_one_sentence = len(statement) < 200 and not re.search(r"[.;!?] +\w|\n", statement)
        if predicate and is_one_sentence and is_sure(statement):
            forms.append(predicate[1])
    wanted = answer_forms(gold)
    return any(same_form(*pair) for pair in itertools.product(forms, wanted))
