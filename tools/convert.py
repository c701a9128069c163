"""
convert.py (tests/test_convert.py): published training data, or a table of your own -> the JSONL
that sft.py and grpo.py read.

  messages                           chats (SFT): the cold start of ParaVT and LongVT
  prompt                             tasks (RL): of ParaVT and LongVT
  conversations                      tasks: LLaVA, ShareGPT; each answer of "gpt" is one
  video, question, options, answer   tasks: a table of your own; --map names other columns

A chat gets the prompt that rollout.py builds for the same video and question, in place of the
release's system prompt, tool schema and instructions; calls lose their `video_path`. All other text
keeps its words. A tool response keeps its frames: stills, or the chat's own video, become the
window of the call, one frame a second; another file is shown whole.

A row that cannot be converted whole is left out, counted and named. Text after the last option, as
"Answer with the letter.", is dropped and counted: our prompt has its own. An answer may be a letter
or the text of an option. If it is the letter of one option and the text of another, the other
answers of the file decide, and if they are letters the row is left out.

Reads:  parquet (needs pyarrow), JSON, JSONL or CSV.    Writes: --out, one JSONL.

  python tools/convert.py paravt_sft_tvg_6k3.parquet --out sft.jsonl
  python tools/convert.py paravt_rl_diverse_4k4.parquet --out rl.jsonl
  python tools/convert.py mine.csv --map video=clip question=text answer=label --out VIDEOS/rl.jsonl
"""
import csv
import json
import os
import re
import string
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import launch
import rewards
import rollout
from agent_tools import TOOLS
from evaluation import answers, benchmarks
from plumbing import data

# Columns of a table, under the names that data sets give them.
COLUMNS = {"video": ("video", "videos", "path"), "question": ("question", "problem"),
           "options": ("options", "choices", "candidates"), "answer": ("answer", "solution")}
KINDS = {"oe": "open", "tvg": "grounding"}  # ParaVT's names of task types
# Top folders of the published archives; a path of the publisher's machine ends with one of them.
ARCHIVES = ("longvt_source", "museg", "selfqa")
TAGS = r"<{0}> ?(?:and )?</{0}> tags"
# The sentences at the end of the releases' questions that tell the model how to answer: our prompt
# has its own. A path may hold spaces.
INSTRUCTIONS = re.compile(r"(?i)(?:\A|\s+)(?:" + "|".join((
    r"The video path for this video is\b:? ?(?:[^\n?!]{0,300}?\.(?:mp4|mkv|webm|avi|mov)|\S*)\.?",
    r"Think first, call \**crop_video\** if needed, then answer\.?",
    r"Format strictly as:\s*<think>\.{3}</think>\s*<tool_call>\.{3}</tool_call>\s*"
    r"\(if (?:tools )?needed\)\s*<answer>\.{3}</answer>\.?",
    r"Please think about this question as if you were a human pondering deeply\.[^\n<]{1,400}?"
    r"in the reasoning process\.",
    rf"Provide your detailed reasoning between the {TAGS.format('think')}, and then give your "
    rf"final answer between the {TAGS.format('answer')}\.",
    rf"Please (?:provide|transcribe) [^\n<]{{1,90}} within the {TAGS.format('answer')}\.",
    r"Answer with the (?:option(?:['’]s)? )?letter(?: from the given choices directly| only)?\.?",
    r"(?:Options|Choices):")) + r")\s*\Z")

# ------------------------------------------------------------------------------------------------
# Rows


def read_table(path):
    """A file of rows -> dicts. Raises UserError with the path."""
    if not path.lower().endswith(".csv"):
        return benchmarks.read_rows(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise launch.UserError(f"{path}: not readable ({error}); save it as CSV in UTF-8") from None


def parsed(value):
    """JSON text -> its value; any other value unchanged."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            return launch.parse_json(value)
        except ValueError:
            pass
    return value


def media_of(row):
    """Columns `videos` and `images` -> {"video": iterator of pieces, "image": the same}."""
    videos = parsed(row.get("videos")) or []
    images = parsed(row.get("images")) or []
    return {"video": iter([video_piece(video) for video in videos]),
            "image": iter([{"type": "image"} for _ in images])}


def video_piece(video):
    """A published video, a path or an object -> a piece, with "start" and "end" if it is a part."""
    if not isinstance(video, dict):
        video = {"video": video}
    path = (video.get("url") or video["video"]).removeprefix("file://")
    if os.path.isabs(path) and not os.path.exists(path):
        places = [path.find(f"/{folder}/") for folder in ARCHIVES]
        if max(places) < 0:
            raise ValueError("an absolute path that is neither here nor of the published folders")
        path = path[max(places) + 1 :]
    piece = {"type": "video", "video": path}
    if video.get("video_start") is not None:
        piece.update(start=float(video["video_start"]), end=float(video["video_end"]))
    return piece


def pieces_of(message, media):
    """Content of a message -> pieces of type text, video, image; marks are replaced by the next
    video or image of the columns."""
    content = parsed(message["content"])
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    pieces = []
    for piece in content:
        kind = piece["type"].removesuffix("_url")
        if kind == "video":
            pieces.append(video_piece(piece.get("video_url") or piece))
        elif kind == "image":
            pieces.append({"type": "image"})
        else:
            for part in re.split("(<video>|<image>)", piece.get("text") or ""):
                if part in ("<video>", "<image>"):
                    found = next(media[part.strip("<>")], None)
                    if found is None:
                        raise ValueError(f"more {part} marks than {part.strip('<>')}s")
                    pieces.append(found)
                elif part:
                    pieces.append({"type": "text", "text": part})
    return pieces


def texts_of(pieces):
    return "".join(piece.get("text", "") for piece in pieces)


# ------------------------------------------------------------------------------------------------
# Questions and answers


def without_instructions(text):
    """A text -> the same without the known instructions at its end."""
    shorter = INSTRUCTIONS.sub("", text.strip())
    while shorter != text:
        text, shorter = shorter, INSTRUCTIONS.sub("", shorter)
    return text


def split_question(text, dropped):
    """A published question -> (question, options), without the release's instructions. Text after
    the last option goes into `dropped`."""
    lines, options, first, last = without_instructions(text).split("\n"), [], 0, 0
    for number, line in enumerate(lines):
        label = re.match(r"\s*\(?([A-Z])[.):]\s+(\S.*)", line)
        # Only the next letter in order begins an option, so "I. Newton" in a text does not.
        if label and label[1] == string.ascii_uppercase[len(options)]:
            if not options:
                first = number
            elif "".join(lines[last + 1 : number]).strip():
                raise ValueError("text between the options")
            options.append(label[2].strip())
            last = number
    if len(options) < 2:
        return "\n".join(lines), []
    rest = "\n".join(lines[last + 1 :]).strip()
    if rest:
        dropped.append(rest)
    return without_instructions("\n".join(lines[:first])), options


def check_question(question):
    """Raises ValueError if a question is none, or tells the model how to answer."""
    if re.search(r"</?(think|answer|tool_call)>|crop_video|\\boxed", question):
        raise ValueError("the question still holds instructions of the release")
    if not rewards.has_word(question):
        raise ValueError("no question")


def answer_letters(answer, options):
    """A published answer -> (the letter that it is, the letter of the option whose text it is), ""
    for none. The letter may be written "B", "b", "(B)" or "B."; of equal texts the first counts.

    The two differ if options are letters themselves: "c" of the options e, c, a is C, or the text
    of B. Only the file knows, see unclear_labels.
    """
    answer = str(answer).strip()
    letters = string.ascii_uppercase[:len(options)]
    by_letter, by_text = "", ""
    label = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", answer)
    if label and label[1].upper() in letters:
        by_letter = label[1].upper()
    if answer in options:
        by_text = letters[options.index(answer)]
    return by_letter, by_text


def unclear_labels(answers):
    """Pairs of answer_letters, of one file -> which of them cannot be read: those that are the
    letter of one option and the text of another, if other answers can only be letters. If all other
    answers are texts, the text counts."""
    only_letters = any(by_letter and not by_text for by_letter, by_text in answers)
    unclear = []
    for by_letter, by_text in answers:
        differ = by_letter and by_text and by_letter != by_text
        unclear.append(bool(only_letters and differ))
    return unclear


def letters_of(answer, options):
    """A published answer -> answer_letters of it: (letter that it is, letter of the option
    whose text it is), "" for none. "B. two" is a letter too."""
    by_letter, by_text = answer_letters(answer, options)
    if not (by_letter or by_text) and re.match(r"\(?[A-Z][).:]\s", answer):
        by_letter = answers.extract_letter(answer, options) or ""
    return by_letter, by_text


def span_of(answer):
    """[1, 2], [[1, 2]], {"start", "end"} or a text with two times -> [start, end] or None. Raises
    ValueError if a time is none."""
    if isinstance(answer, dict):
        answer = [answer["start"], answer["end"]]
    if isinstance(answer, list):
        times = answer[0] if isinstance(answer[0], list) else answer
        return [rewards.to_seconds(second) for second in times]
    span = answers.extract_span(str(answer))
    return span and list(span)


def make_task(video, question, options, answer, kind=None):
    """A question with its answer -> a task. "(letters)" is for `convert`."""
    check_question(question)
    if kind is None:
        kind = "mcq" if options else "open"
        if isinstance(answer, (list, dict)):
            kind = "grounding"
    if not options and re.fullmatch(r"\(?[A-Ha-h][.)]?", str(answer)):
        raise ValueError("a letter as the answer, and no options: --map options=COLUMN names them")
    task = {"video": video, "question": question, "options": None, "answer": str(answer),
            "type": kind}
    if kind == "mcq":
        by_letter, by_text = letters_of(str(answer), options)
        if not (by_letter or by_text):
            raise ValueError("the answer is none of the options")
        task.update(options=options, answer=by_text or by_letter)
        task["(letters)"] = (by_letter, by_text)
    elif options:
        lines = map("{}. {}".format, string.ascii_uppercase, options)
        task["question"] = "\n".join([question, *lines])
    if kind == "grounding":
        task["answer"] = span_of(answer)
    return task


# ------------------------------------------------------------------------------------------------
# RL rows and tables -> tasks


def task_of_prompt(row, dropped):
    """A published RL row -> a task."""
    extra = parsed(row.get("extra_info")) or {}
    answer = extra.get("answer")
    if answer is None:
        answer = parsed(row["reward_model"])["ground_truth"]
    media, pieces = media_of(row), []
    for message in parsed(row["prompt"]):
        if message["role"] == "user":
            pieces += pieces_of(message, media)
    videos = [piece for piece in pieces if piece["type"] != "text"]
    if [piece["type"] for piece in videos] != ["video"]:
        raise ValueError("a task shows one video and no still image")
    kind = extra.get("question_type")
    question, options = split_question(extra.get("question") or texts_of(pieces), dropped)
    return make_task(videos[0]["video"], question, options, parsed(answer), KINDS.get(kind, kind))


def tasks_of_conversation(row, dropped):
    """A row of LLaVA or ShareGPT, {"video", "conversations": [{"from", "value"}]} -> its tasks."""
    turns = [(turn["from"], turn["value"]) for turn in parsed(row["conversations"])]
    tasks = []
    for (asker, text), (_, answer) in zip(turns[::2], turns[1::2]):
        if asker not in ("human", "user"):
            raise ValueError(f"a conversation that does not alternate: {asker!r} asks")
        question, options = split_question(re.sub("<(image|video)>", "", text), dropped)
        tasks.append(make_task(video_of_row(row), question, options, answer))
    if not tasks:
        raise ValueError("a conversation without an answer")
    return tasks


def video_of_row(row):
    """The one video of a row: a path, an object, or a list of one."""
    videos = parsed(column_of(row, "video"))
    if not isinstance(videos, list):
        videos = [videos]
    if len(videos) != 1 or not videos[0]:
        raise ValueError("a task shows one video")
    return video_piece(videos[0])["video"]


def column_of(row, name):
    """What stands in a row under one of the names of a column; None if nothing does."""
    return next((row[key] for key in COLUMNS[name] if row.get(key) not in (None, "")), None)


def options_of(row):
    """The options of a row of a table: a list, {"A": ..}, or texts with line breaks or | between
    them."""
    options = parsed(column_of(row, "options")) or []
    if isinstance(options, dict):
        options = [options[letter] for letter in sorted(options)]
    if isinstance(options, str):
        options = re.split(r"\n|\|", options)
    while options and options[-1] in (None, ""):  # of a row with fewer options than others
        options.pop()
    return data.bare_options([str(text) for text in options])


def task_of_table(row, dropped):
    """A row of a table -> a task."""
    question, answer = column_of(row, "question"), column_of(row, "answer")
    kind = row.get("type") if row.get("type") in data.LABELS else None
    if kind == "grounding" and answer is None:
        answer = [row["start"], row["end"]]
    if question is None or answer is None or column_of(row, "video") is None:
        raise ValueError("no video, no question or no answer")
    tagged = re.search("<answer>(.*?)</answer>", str(answer), re.DOTALL)
    answer = tagged[1].strip() if tagged else parsed(answer)
    options = options_of(row)
    question = without_instructions(question.replace("<video>", ""))
    if not options:
        question, options = split_question(question, dropped)
    task = make_task(video_of_row(row), question, options, answer, kind)
    windows = parsed(row.get("evidence")) or [[row.get("start"), row.get("end")]]
    if windows[0][0] not in (None, ""):
        task["evidence"] = [list(map(rewards.to_seconds, window)) for window in windows]
    if row.get("subtitles"):
        task["subtitles"] = row["subtitles"]
    return task


# ------------------------------------------------------------------------------------------------
# SFT rows -> chats


def to_chat(row, frames, max_frames, dropped):
    """A published SFT row -> {"messages", "tools"}. frames: of the overview; max_frames: of a
    window in a tool response."""
    media, head, rest, calls, overview = media_of(row), [], [], iter(()), None
    for message in parsed(row["messages"]):
        role, pieces = message["role"], pieces_of(message, media)
        if role == "system":
            continue  # our prompt has another
        if role == "assistant":
            text = without_path(texts_of(pieces))
            calls = iter(rewards.parse_tool_calls(text, TOOLS, False))
            rest.append({"role": role, "content": text})
        elif rest:
            for response in tool_responses(role, pieces):
                content = response_content(response, next(calls, None), overview, max_frames)
                rest.append({"role": "tool", "content": content})
        else:
            head += pieces
            videos = [piece for piece in head if piece["type"] != "text"] or [*media["video"]]
            if [piece["type"] for piece in videos] != ["video"] or "start" in videos[0]:
                raise ValueError("the prompt shows one video, whole")
            overview = videos[0]["video"]
    if next(media["video"], None) or next(media["image"], None):
        raise ValueError("more videos or images than marks")
    check_turns(rest)
    turns = [message["content"] for message in rest if message["role"] == "assistant"]
    answer = rewards.final_answer(turns, False)
    if answer is None:
        raise ValueError("no <answer> in the last turn")
    crop_response = "frames" if chat.videos_in(rest) else "summary"
    question, options = split_question(texts_of(head), dropped)
    task = make_task(overview, question, options, answer, kind_of(question, options, answer))
    prompt = rollout.main_messages(task, frames, crop_response=crop_response)
    return {"messages": [*prompt, *rest], "tools": rollout.tool_schema(crop_response)}


def kind_of(question, options, answer):
    """The type of a chat's task, which its answer shows: a letter, a span, or else a text."""
    if options:
        return "mcq" if any(letters_of(answer, options)) else "open"
    time = r"\d[\d.:]* ?(?:s|seconds)?"
    span = rf"(?:from )?{time} ?(?:-|–|to) ?{time}\.?|[\[(]{time}, ?{time}[\])]"
    asked = re.search(r"(?i)\b(?:when|time\w*|seconds?|moments?|segment|interval|clip)\b", question)
    # "3 - 5" may be a score.
    if re.fullmatch(span, answer, re.I) and (asked or re.search(r"[\[(:]|\d\.\d|\d ?s", answer)):
        return "grounding"
    return "open"


def tool_responses(role, pieces):
    """A message after the first answer -> the pieces of every tool response in it. Frames beside
    the only response belong to it."""
    before, responses, after = [], [], []
    current = before
    for piece in pieces:
        if piece["type"] != "text":
            current.append(piece)
            continue
        for part in re.split("(</?tool_response>)", piece["text"]):
            if part == "<tool_response>":
                current = []
                responses.append(current)
            elif part == "</tool_response>":
                current = after
            elif part.strip():
                current.append({"type": "text", "text": part})
    if role == "tool" and not responses:
        return [before]
    if not responses or texts_of(before + after) or ((before or after) and len(responses) > 1):
        raise ValueError("text or frames beside tool responses")
    responses[0][:] = before + responses[0] + after
    for response in responses:  # the template writes the line breaks inside the tags
        for piece in response:
            if "text" in piece:
                piece["text"] = piece["text"].removeprefix("\n").removesuffix("\n")
    return responses


def response_content(pieces, call, overview, max_frames):
    """Pieces of a tool response -> the content of a tool message."""
    window = {"fps": 1.0, "max_frames": max_frames}
    content, stills = [], False
    for piece in pieces:
        if piece["type"] == "text":
            content.append(piece)
            continue
        if "start" in piece:
            content.append({**piece, **window})
            continue
        if call is None or call.error:
            raise ValueError("frames in a tool response whose call cannot be read")
        if piece["type"] == "image" and stills:
            continue  # the first still stands for the whole window
        stills |= piece["type"] == "image"
        path = piece.get("video", overview)
        start, end = call.arguments["start"], call.arguments["end"]
        video = {"type": "video", "video": path, "start": start, "end": end, **window}
        if path != overview:  # a clip that holds exactly the window
            seconds = max(round(end - start), 1)
            video = {"type": "video", "video": path, "frames": min(seconds, max_frames)}
        content.append(video)
    if any(piece["type"] == "video" for piece in content):
        return content
    if "the tool executed successfully" in texts_of(content).lower():
        raise ValueError("a tool response that speaks of frames and shows none")
    return texts_of(content)


def check_turns(rest):
    """Raises ValueError unless every call is answered once, in the same round."""
    waiting = 0
    for message in rest:
        if message["role"] == "tool":
            waiting -= 1
        else:
            if waiting:
                raise ValueError("calls and tool responses that do not pair up")
            waiting = len(rewards.parse_tool_calls(message["content"], TOOLS, False))
    if waiting or not rest or rest[-1]["role"] != "assistant":
        raise ValueError("the last message is not an answer of the assistant")


def without_path(text):
    """An assistant turn without the video_path of its calls, which our tool does not take."""
    def shorter(match):
        try:
            call = launch.parse_json(match[2])
            del call["arguments"]["video_path"]
        except (ValueError, TypeError, KeyError):
            return match[0]
        return match[1] + json.dumps(call, ensure_ascii=False) + match[3]

    return re.sub(r"(<tool_call>\s*)(.*?)(\s*</tool_call>)", shorter, text, flags=re.DOTALL)


# ------------------------------------------------------------------------------------------------
# The command line


def convert_row(row, frames, max_frames, dropped):
    """A row -> the chats or tasks that it holds. Raises ValueError with the reason if it is none.
    """
    if row.get("messages"):
        return [to_chat(row, frames, max_frames, dropped)]
    if row.get("conversations"):
        tasks = tasks_of_conversation(row, dropped)
    else:
        tasks = [task_of_prompt(row, dropped) if row.get("prompt") else task_of_table(row, dropped)]
    for task in tasks:
        problem = data.task_fault({"id": "", **task})
        if problem:
            raise ValueError(problem)
    return tasks


def drop_unclear(rows, left_out):
    """Rows of one file -> those whose labels can be read, see unclear_labels."""
    letters = [row.pop("(letters)", ("", "")) for row in rows]
    clear = []
    for row, is_unclear in zip(rows, unclear_labels(letters)):
        if is_unclear:
            reason = "the answer is the letter of one option and the text of another"
            left_out.setdefault(reason, []).append(row["id"])
        else:
            clear.append(row)
    return clear


def renamed(row, names, path):
    """A row of a file -> the same with our names of columns."""
    row = dict(row)
    for ours, theirs in names.items():
        if theirs not in row:
            raise launch.UserError(f"{path}: no column {theirs}, but {', '.join(row)}")
        row[ours] = row[theirs]
    return {str(key).lower(): value for key, value in row.items()}


def convert(paths, out, frames, max_frames=64, names=None):
    """Files of rows -> one JSONL. names: {our column: theirs}. Prints what was left out, and why.
    """
    rows, left_out, dropped = [], {}, []  # left_out: reason -> names of rows
    for path in paths:
        stem = os.path.splitext(os.path.basename(path))[0]
        found = []
        for number, row in enumerate(read_table(path)):
            row = renamed(row, names or {}, path)
            name = f"{stem}/{number}"
            try:
                converted = convert_row(row, frames, max_frames, dropped)
            except ValueError as error:
                reason, converted = str(error), []
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                reason, converted = f"malformed ({type(error).__name__})", []
            if not converted:
                left_out.setdefault(reason, []).append(name)
            source = row.get("id") or row.get("data_source") or stem
            for place, one in enumerate(converted):
                found.append({"id": f"{name}/{place}" if place else name, "source": source, **one})
        rows += drop_unclear(found, left_out)
    for reason, ids in left_out.items():
        print(f"left out: {len(ids)} rows, {reason}; the first is {ids[0]}")
    if dropped:
        print(f"dropped: {len(dropped)} texts after the options; the first is {dropped[0]!r}")
    if not rows:
        raise launch.UserError("no row could be used")
    chats = sum("messages" in row for row in rows)
    if chats not in (0, len(rows)):
        raise launch.UserError("some rows are chats (SFT), some tasks (RL); convert them apart")
    launch.write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{out}: {len(rows)} {'chats' if chats else 'tasks'}, "
          f"{sum(map(len, left_out.values()))} left out")


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="parquet, JSON, JSONL or CSV")
    add("--out", required=True, help="JSONL to write")
    add("--frames", type=int, default=64, help="overview frames K of chats")
    add("--map", nargs="+", default=[], metavar="OURS=THEIRS", help="columns: question=text, say")
    args = parser.parse_args()
    names = dict(pair.partition("=")[::2] for pair in args.map)
    known = [*COLUMNS, "start", "end", "evidence", "type", "subtitles"]
    if not set(names) <= set(known):
        raise launch.UserError(f"--map: OURS=THEIRS, where OURS is one of {', '.join(known)}")
    convert(args.files, args.out, args.frames, names=names)


if __name__ == "__main__":
    launch.run_main(main)
