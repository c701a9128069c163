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

A row that cannot be converted whole is left out, counted and named. Sentences such as "Answer with
the letter." are dropped, because our prompt has its own; another text after the last option goes
into the field "after_options", which the prompt does not show. An answer may be a letter or the
text of an option; if it is the letter of one option and the text of another, the row is left out.

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

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import chat
import launch
import rewards
import rollout
from agent_tools import TOOLS
from evaluation import answers, benchmarks
from plumbing import data
from tools import ask

# Columns of a table, under the names that data sets give them.
COLUMNS = {"video": ("video", "videos", "path"), "question": ("question", "problem"),
           "options": ("options", "choices", "candidates"), "answer": ("answer", "solution")}
KINDS = {"oe": "open", "tvg": "grounding"}  # ParaVT's names of task types
# Top folders of the published archives; a path of the publisher's machine ends with one of them.
ARCHIVES = re.compile("/((?:longvt_source|museg|selfqa)/.*)")
MAX_FRAMES = 64  # of a window in a tool response
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
    except UnicodeDecodeError:
        raise launch.UserError(f"{path}: save it as CSV in UTF-8") from None


def parsed(value):
    """JSON text -> its value; any other value unchanged."""
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        try:
            return launch.parse_json(value)
        except ValueError:
            pass
    return value


def video_path(video):
    """A published video, a path or an object -> its path."""
    if isinstance(video, dict):
        if video.get("video_start") is not None:
            raise ValueError("a part of a video: videos are read whole")
        video = video.get("url") or video["video"]
    path = video.removeprefix("file://")
    if os.path.isabs(path) and not os.path.exists(path):
        published = ARCHIVES.search(path)
        if not published:
            raise ValueError("an absolute path that is neither here nor of the published folders")
        path = published[1]
    return path


def read_messages(messages, videos):
    """Published messages, and the column of their videos -> ([(role, text)], [path of a video]).
    A video or an image among the pieces of a content becomes a mark in the text, as they stand in
    the texts of rows with such a column: <video>, <image>."""
    texts, paths = [], []
    for message in parsed(messages):
        content = parsed(message["content"])
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        text = ""
        for piece in content:
            kind = piece["type"].removesuffix("_url")
            if kind == "text":
                text += piece["text"]
            else:
                text += f"<{kind}>"
            if kind == "video":
                paths.append(video_path(piece.get("video_url") or piece))
        texts.append((message["role"], text))
    for video in parsed(videos) or []:
        paths.append(video_path(video))
    if "".join(text for _, text in texts).count("<video>") != len(paths):
        raise ValueError("another number of <video> marks than of videos")
    return texts, paths


# ------------------------------------------------------------------------------------------------
# Questions and answers


def without_instructions(text):
    """A text -> the same without the known instructions at its end."""
    shorter = INSTRUCTIONS.sub("", text.strip())
    while shorter != text:
        text, shorter = shorter, INSTRUCTIONS.sub("", shorter)
    return text


def split_question(text, options=()):
    """A published question -> (question, options, text after the options), without marks and
    instructions. options: those of another column."""
    text = without_instructions(re.sub("<video>|<image>", "", text))
    if options:
        return text, options, ""
    question, options, after = ask.split_options(text)
    return without_instructions(question), options, after


def answer_letter(answer, options):
    """A published answer, "B", "(b)", "B. two" or the text of an option -> its letter, "" for none.
    Raises ValueError if it can be read in two ways."""
    letter = benchmarks.answer_letter(answer, options)
    if answer in options and string.ascii_uppercase[options.index(answer)] != letter:
        raise ValueError("the answer is the letter of one option and the text of another")
    if not letter and re.match(r"\(?[A-Z][).:]\s", answer):
        letter = answers.extract_letter(answer, options) or ""
    return letter


def read_span(answer):
    """[1, 2] or a text with two times -> [start, end] or None. Raises ValueError for no time."""
    if isinstance(answer, list):
        return [rewards.to_seconds(second) for second in answer]
    return list(answers.extract_span(str(answer)) or []) or None


def make_task(video, text, answer, kind=None, options=()):
    """A published question with its answer -> a task. kind: its type, if the row names one."""
    question, options, after = split_question(text, options)
    if re.search(r"</?(think|answer|tool_call)>|crop_video|\\boxed", question):
        raise ValueError("the question still holds instructions of the release")
    if not rewards.has_word(question):
        raise ValueError("no question")
    if not options and re.fullmatch(r"\(?[A-Ha-h][.)]?", str(answer)):
        raise ValueError("a letter as the answer, and no options: --map options=COLUMN names them")
    if kind is None:
        kind = "open"
        if options:
            kind = "mcq"
        elif isinstance(answer, list):
            kind = "grounding"
    task = {"video": video, "question": question, "options": None, "answer": str(answer),
            "type": kind}
    if kind == "mcq":
        task.update(options=options, answer=answer_letter(str(answer), options))
        if not task["answer"]:
            raise ValueError("the answer is none of the options")
    elif options:
        lines = map("{}. {}".format, string.ascii_uppercase, options)
        task["question"] = "\n".join([question, *lines])
    if kind == "grounding":
        task["answer"] = read_span(answer)
    if after:
        task["after_options"] = after
    return task


# ------------------------------------------------------------------------------------------------
# RL rows, conversations and tables -> tasks


def task_of_prompt(row):
    """A published RL row -> a task."""
    extra = parsed(row.get("extra_info")) or {}
    answer = extra.get("answer")
    if answer is None:
        answer = parsed(row["reward_model"])["ground_truth"]
    messages, videos = read_messages(row["prompt"], row.get("videos"))
    text = "".join(text for role, text in messages if role == "user")
    if len(videos) != 1 or "<image>" in text:
        raise ValueError("a task shows one video and no still image")
    kind = extra.get("question_type")
    return make_task(videos[0], extra.get("question") or text, parsed(answer),
                     KINDS.get(kind, kind))


def tasks_of_conversation(row):
    """A row of LLaVA or ShareGPT, {"video", "conversations": [{"from", "value"}]} -> its tasks."""
    turns = parsed(row["conversations"])
    tasks = []
    for question, answer in zip(turns[::2], turns[1::2]):
        if question["from"] not in ("human", "user"):
            raise ValueError(f"a conversation that does not alternate: {question['from']!r} asks")
        tasks.append(make_task(video_of_row(row), question["value"], answer["value"]))
    if not tasks:
        raise ValueError("a conversation without an answer")
    return tasks


def column_of(row, name):
    """What stands in a row under one of the names of a column; None if nothing does."""
    for key in COLUMNS[name]:
        if row.get(key) not in (None, ""):
            return parsed(row[key])
    return None


def video_of_row(row):
    """The one video of a row: a path, an object, or a list of one."""
    video = column_of(row, "video")
    if isinstance(video, list):
        if len(video) != 1:
            raise ValueError("a task shows one video")
        video = video[0]
    return video_path(video)


def options_of(row):
    """The options of a row of a table: a list, or texts with line breaks or | between them."""
    options = column_of(row, "options") or []
    if isinstance(options, str):
        options = re.split(r"\n|\|", options)
    while options and options[-1] in (None, ""):  # of a row with fewer options than others
        options.pop()
    return data.bare_options([str(option) for option in options])


def task_of_table(row):
    """A row of a table -> a task."""
    question, answer, kind = column_of(row, "question"), column_of(row, "answer"), row.get("type")
    window = [row.get("start"), row.get("end")]
    if kind == "grounding" and answer is None:
        answer = window
    if question is None or answer is None or column_of(row, "video") is None:
        raise ValueError("no video, no question or no answer: --map names their columns")
    tagged = re.search("<answer>(.*?)</answer>", str(answer), re.DOTALL)
    if tagged:
        answer = tagged[1].strip()
    if kind not in data.LABELS:
        kind = None
    task = make_task(video_of_row(row), str(question), answer, kind, options_of(row))
    evidence = parsed(row.get("evidence")) or [window]
    if evidence[0][0] not in (None, ""):
        task["evidence"] = [list(map(rewards.to_seconds, window)) for window in evidence]
    if row.get("subtitles"):
        task["subtitles"] = row["subtitles"]
    return task


# ------------------------------------------------------------------------------------------------
# SFT rows -> chats


def to_chat(row, num_frames):
    """A published SFT row -> {"messages", "tools"}. num_frames: of the overview."""
    texts, paths = read_messages(row["messages"], row.get("videos"))
    videos = iter(paths)
    prompt, rest, turns = "", [], []
    calls = []  # those of the last turn that have no response yet
    for role, text in texts:
        if role == "assistant":
            if calls:
                raise ValueError("calls and tool responses that do not pair up")
            text = without_path(text)
            calls = rewards.parse_tool_calls(text, TOOLS, False)
            turns.append(text)
            rest.append({"role": "assistant", "content": text})
        elif rest:
            for response in tool_responses(role, text):
                if not calls:
                    raise ValueError("calls and tool responses that do not pair up")
                content = response_content(response, calls.pop(0), paths[0], videos)
                rest.append({"role": "tool", "content": content})
        elif role != "system":  # our prompt has another system message
            prompt += text
            if prompt.count("<video>") != 1 or "<image>" in prompt:
                raise ValueError("the prompt shows one video, whole")
            next(videos)
    if calls or not rest or rest[-1]["role"] != "assistant":
        raise ValueError("the last message is not an answer of the assistant")
    answer = rewards.final_answer(turns, False)
    if answer is None:
        raise ValueError("no <answer> in the last turn")
    crop_response = "frames" if chat.videos_in(rest) else "summary"
    task = make_task(paths[0], prompt, answer, kind_of(prompt, answer))
    messages = rollout.main_messages(task, num_frames, crop_response=crop_response)
    return {"messages": messages + rest, "tools": rollout.tool_schema(crop_response)}


def kind_of(text, answer):
    """The type of a chat's task, which its answer shows: a letter, a span, or else a text."""
    question, options, _ = split_question(text)
    if options:
        return "mcq" if answer_letter(answer, options) else "open"
    time = r"\d[\d.:]* ?(?:s|seconds)?"
    span = rf"(?:from )?{time} ?(?:-|–|to) ?{time}\.?|[\[(]{time}, ?{time}[\])]"
    asked_when = re.search(
        r"(?i)\b(?:when|time\w*|seconds?|moments?|segment|interval|clip)\b", question)
    # "3 - 5" may be a score.
    is_time = asked_when or re.search(r"[\[(:]|\d\.\d|\d ?s", answer)
    return "grounding" if is_time and re.fullmatch(span, answer, re.I) else "open"


def tool_responses(role, text):
    """A message after the first answer -> the text of every tool response in it, with the marks of
    its frames. Frames beside the only response belong to it."""
    # The template writes the line breaks inside the tags.
    parts = re.split(r"<tool_response>\n?(.*?)\n?</tool_response>", text, flags=re.DOTALL)
    if role == "tool" and len(parts) == 1:
        return parts
    outside = "".join(parts[::2])
    words = re.sub("<video>|<image>", "", outside).strip()
    if len(parts) == 1 or words or (outside.strip() and len(parts) > 3):
        raise ValueError("text or frames beside tool responses")
    if len(parts) == 3:
        return ["".join(parts)]
    return parts[1::2]


def response_content(text, call, overview, videos):
    """A tool response -> the content of a tool message. overview: path of the prompt's video.
    videos: iterator of the paths that the next <video> marks stand for."""
    # The first still stands for the whole window.
    first, still, others = text.partition("<image>")
    content = []
    for part in re.split("(<video>|<image>)", first + still + others.replace("<image>", "")):
        if part not in ("<video>", "<image>"):
            if part.strip():
                content.append({"type": "text", "text": part})
            continue
        if call.error:
            raise ValueError("frames in a tool response whose call cannot be read")
        start, end = call.arguments["start"], call.arguments["end"]
        piece = {"type": "video", "video": overview, "start": start, "end": end, "fps": 1.0,
                 "max_frames": MAX_FRAMES}
        if part == "<video>":
            path = next(videos)
            if path != overview:  # a clip that holds exactly the window
                num_frames = min(max(round(end - start), 1), MAX_FRAMES)
                piece = {"type": "video", "video": path, "frames": num_frames}
        content.append(piece)
    if chat.videos_in([{"content": content}]):
        return content
    if "the tool executed successfully" in text.lower():
        raise ValueError("a tool response that speaks of frames and shows none")
    return text


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


def convert_row(row, num_frames, names):
    """A row -> the chats or tasks that it holds. names: {our column: theirs}. Raises ValueError
    with the reason if it is none."""
    row = {str(key).lower(): value for key, value in row.items()}
    for ours, theirs in names.items():
        row[ours] = row[theirs.lower()]
    if row.get("messages"):
        return [to_chat(row, num_frames)]
    if row.get("conversations"):
        tasks = tasks_of_conversation(row)
    elif row.get("prompt"):
        tasks = [task_of_prompt(row)]
    else:
        tasks = [task_of_table(row)]
    for task in tasks:
        problem = data.task_fault({"id": "", **task})
        if problem:
            raise ValueError(problem)
    return tasks


def convert(paths, out, num_frames, names):
    """Files of rows -> one JSONL. Prints what was left out, and why."""
    rows, left_out = [], {}  # left_out: reason -> names of rows
    for path in paths:
        stem = os.path.splitext(os.path.basename(path))[0]
        for number, row in enumerate(read_table(path)):
            row_id = f"{stem}/{number}"
            try:
                converted = convert_row(row, num_frames, names)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                left_out.setdefault(f"{type(error).__name__}: {error}", []).append(row_id)
                continue
            for turn, one in enumerate(converted):
                rows.append({"id": f"{row_id}/{turn}" if turn else row_id, **one})
    for reason, ids in left_out.items():
        print(f"left out: {len(ids)} rows, {reason}; the first is {ids[0]}")
    if not rows:
        raise launch.UserError("no row could be used")
    launch.write_jsonl(out, rows)
    print(f"{out}: {len(rows)} chats or tasks, {sum(map(len, left_out.values()))} rows left out")


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="parquet, JSON, JSONL or CSV")
    add("--out", required=True, help="JSONL to write")
    add("--frames", type=int, default=64, help="overview frames K of chats")
    add("--map", nargs="+", default=[], metavar="OURS=THEIRS", help="columns: question=text, say")
    args = parser.parse_args()
    names = dict(pair.partition("=")[::2] for pair in args.map)
    convert(args.files, args.out, args.frames, names)


if __name__ == "__main__":
    launch.run_main(main)
