"""
convert.py (tests/test_convert.py): training data in the forms that people have -> the JSONL that
sft.py and grpo.py read.

  chats (SFT)   `messages` (ParaVT, LongVT, ms-swift), `conversations` (LLaVA, ShareGPT),
                `query` and `response` (ms-swift)
  tasks (RL)    `prompt` (ParaVT, LongVT); columns of a video, a question, an answer and perhaps
                options, `problem` and `solution` (Video-R1, EasyR1) included. --map names others

Chats of which none has an <answer> become tasks: each answer of the assistant is one. A chat gets
the prompt that rollout.py builds for the same video and question. This replaces the system prompt,
the tool schema and the instructions of the release; calls lose their `video_path`. All other text
keeps its words. A row that cannot be converted whole is left out, counted and named.

A tool response keeps its frames. If they are stills, or the chat's own video, the window of the
call is decoded from the video again, one frame a second. Another file is shown whole.

Reads:  parquet (needs pyarrow), JSON, JSONL, CSV or TSV.    Writes: --out, one JSONL.

  python tools/convert.py paravt_sft_tvg_6k3.parquet --out sft.jsonl
  python tools/convert.py paravt_rl_diverse_4k4.parquet --out rl.jsonl
  python tools/convert.py mine.csv --map video=clip question=text answer=label --out VIDEOS/rl.jsonl
"""
import ast
import contextlib
import csv
import io
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
from plumbing import arguments, data

# Columns of a task, under the names that data sets give them. --map adds one in front.
COLUMNS = {"video": ("video", "videos", "video_path", "path"), "question": ("question", "problem"),
           "options": ("options", "choices", "candidates"), "answer": ("answer", "solution")}
MORE = ("start", "end", "evidence", "type", "subtitles")  # columns of a task that may be there
KNOWN = {*MORE, *(name for names in COLUMNS.values() for name in names)}
# A column of one option.
OPTION = r"(?i)(?:(?:ans|answer|opt|option|choice|candidate)[ _]?)?(?:[a-h]|\d\d?)|a\d\d?"
COUNT = re.compile(r"(\d\d?)(?:\.0)?")  # an answer that may be the place of an option
SHIFTED = "numbers as answers count otherwise than the options: --answers-from 0 or 1"
UNKNOWN = "no video, no question or no answer"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool"}


def read_table(path):
    """A file of rows -> dicts. Raises UserError with the path."""
    if not path.lower().endswith((".csv", ".tsv")):
        return benchmarks.read_rows(path)
    try:
        f = io.StringIO(launch.read_file(path).decode("utf-8-sig"), newline="")
        first = f.readline()
        delimiter = max(",;\t", key=first.count)  # spreadsheets write any of these
        f.seek(f.tell() if first.startswith("sep=") else 0)  # Excel's line before the names
        return list(csv.DictReader(f, restkey="(no name)", delimiter=delimiter))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "" if isinstance(error, OSError) else "; save it as CSV in UTF-8"
        raise launch.UserError(f"{path}: not readable ({launch.why(error)}){hint}") from None


def normal_form(row, first=None):
    """A row of any form -> the same as `messages` or `prompt`, with `videos`. first: the number of
    the first option in answers, or None. Raises ValueError if its columns are not known."""
    def column(name):
        return next((row[key] for key in COLUMNS[name] if row.get(key) not in (None, "")), None)

    if row.get("data_type") == "image":  # Video-R1 mixes both
        raise ValueError("still images are not read")
    if unread := [name for name in ("documents", "chat_template_kwargs") if row.get(name)]:
        raise ValueError(f"a column {unread[0]!r}, which is not read")
    if any((cell or "").strip() for cell in row.get("(no name)") or []):
        raise ValueError("more cells than columns: a cell with a comma needs quotes")
    videos = parse_loosely(column("video"))
    videos = videos if isinstance(videos, list) else [videos] if videos else []
    row = {**row, "(first)": first, "videos": row.get("videos") or videos}
    question, answer = column("question"), parse_loosely(column("answer"))
    if answer is None and row.get("type") == "grounding":
        answer = [row.get("start"), row.get("end")]
    tagged = re.search("<answer>(.*?)</answer>", str(answer), re.DOTALL)
    extra = {"answer": tagged[1].strip() if tagged else answer, "question_type": row.get("type")}
    talk = parse_loosely(row.get("messages"))
    if talk and answer is not None and all(m["role"] != "assistant" for m in talk):  # ms-swift, RL
        return {**row, "messages": None, "prompt": talk, "extra_info": extra}
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if talk or row.get("prompt"):
        return {**row, "messages": system + talk} if system and talk else row
    turns = [(m.get("from") or m["role"], m.get("value") or m["content"])
             for m in parse_if_json(row.get("conversations")) or []]
    if row.get("query"):
        pairs = [*(parse_if_json(row.get("history")) or []), (row["query"], row["response"])]
        turns = [turn for pair in pairs for turn in zip(("user", "assistant"), pair)]
    if turns:  # LLaVA marks a video as <image>
        mark = "<image>" if row.get("images") else "<video>"
        return {**row, "messages": [*system, *(
            {"role": ROLES.get(role, role), "content": text.replace("<image>", mark)}
            for role, text in turns)]}
    if question is None or answer is None or not videos:
        raise ValueError(UNKNOWN)
    options, extra["answer"] = options_of(row, column("options"), extra["answer"])
    return {**row, "prompt": [{"role": "user", "content": f"{question}\n{options}"}],
            "extra_info": extra}


def options_of(row, cell, answer):
    """-> (options of a row as lines, its answer). The cell may hold a list, {"A": ..}, or texts
    with line breaks, | or ; between them. Without it columns are read (OPTION). Of these and of
    {"A": ..} the answer may be a name, or its last letter or number. Raises ValueError with the
    reason."""
    columns = {key: row[key] for key in map(str, row) if re.fullmatch(OPTION, key)}
    options = parse_loosely(cell) or (columns if len(columns) > 1 else [])
    if isinstance(options, dict):
        options = sorted((len(str(key)), str(key).lower(), text) for key, text in options.items())
        marks = [re.search(r"\d+$|.$", key)[0] for _, key, _ in options]
        counted = row["(first)"] is not None and COUNT.fullmatch(str(answer))  # see letter_of
        named = {n for n, (_, key, text) in enumerate(options) if not counted
                 and (str(answer).lower() in (key, marks[n]) or str(text) == str(answer))}
        # Letters lie below all numbers: "96" is none.
        places = [int(mark) if mark.isdigit() else ord(mark) - 999 for mark in marks]
        # Then the other rows have wrong labels: 0 with columns from 1, or the other way round.
        if not named and not counted and str(answer) in (str(places[0] - 1), str(places[-1] + 1)):
            raise ValueError(SHIFTED)
        if len(named) > 1:  # a digit that is also the text of another option
            raise ValueError("an answer that names two options")
        if not named and places != [*range(places[0], places[0] + len(places))]:
            raise ValueError("options whose letters or numbers leave one out")
        # In brackets, so that it is no text of another option.
        answer = f"({string.ascii_uppercase[named.pop()]})" if named else answer
        options = [text for _, _, text in options]
    elif not isinstance(options, list) and not benchmarks.split_options(str(options))[1]:
        mark = next((mark for mark in "\n|;" if mark in str(options)), "\n")
        options = [text for text in str(options).split(mark) if text.strip()]
    if isinstance(options, list):
        while options and options[-1] in (None, ""):  # of a row with fewer options than others
            options.pop()
        if len(options) == 1 or any(isinstance(text, (dict, list)) for text in options):
            raise ValueError("options that cannot be read: each on a line of its own, or | between")
        options = data.bare_options(["" if text is None else str(text) for text in options])
        options = "\n".join(map("{}. {}".format, string.ascii_uppercase, options))
    return options, answer


def as_tasks(row):
    """A row of messages -> a row with a `prompt` for each answer of the assistant."""
    messages = parse_if_json(row["messages"])
    return [{**row, "prompt": [prompt], "extra_info": {"answer": reply["content"]}}
            for prompt, reply in zip(messages, messages[1:])
            if (prompt["role"], reply["role"]) == ("user", "assistant")]


def archive_path(path):
    """A path of published data -> the path relative to the folder of the unpacked archives; an
    absolute path of a file that is there stays. Raises ValueError if no part of the path is known.
    """
    path = path.removeprefix("file://") if "/" in path else path.replace("\\", "/")  # of Windows
    if os.path.isabs(path) and not launch.is_file(path, folders=True):
        # The publisher's machine made the path absolute. The archive's own tree begins here.
        at = [path.find(f"/{top}/") for top in ("longvt_source", "museg", "selfqa")]
        if max(at) < 0:
            raise ValueError("an absolute path that is neither here nor of the published folders")
        path = path[max(at) + 1:]
    return path


def parse_if_json(value):
    """JSON text -> its value; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return launch.parse_json(value)
    return value


def parse_loosely(value):
    """Like `parse_if_json`, but reads lists as Python prints them, too, since pandas saves them so,
    and arrays of texts. A text that only looks like either, as "[unclear]", stays a text."""
    def literal(text):  # ['one' 'two'] is an array
        return ast.literal_eval(text.strip() if re.search("['\"],", text) else
                                re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text.strip()))

    for read in (parse_if_json, literal):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(value)
    return value


def media_of(row):
    """Columns `videos` and `images` -> {"video": iterator of pieces, "image": the same}."""
    videos, images = (parse_if_json(row.get(name)) or [] for name in ("videos", "images"))
    return {"video": iter([video_piece(v) for v in videos]),
            "image": iter([{"type": "image"} for _ in images])}


def video_piece(video):
    """A published video, a path or an object -> {"type", "video"}, and "start" and "end" of a part.
    Raises ValueError with the reason if the entry cannot be read."""
    video = video if isinstance(video, dict) else {"video": video}
    path = video.get("url") or video.get("video")
    if not path:
        raise ValueError("a video without a path")
    piece = {"type": "video", "video": archive_path(path)}
    part = [video.get("video_start"), video.get("video_end")]
    if part != [None, None]:
        start, end = window_of(part, "a part of a video without a start and an end")
        piece.update(start=start, end=end)
    return piece


def window_of(times, reason):
    """[start, end] as published -> in seconds. Raises ValueError with the reason if they are not.
    """
    try:
        # A decimal comma, as some spreadsheets write it.
        window = [rewards.to_seconds(str(second).replace(",", ".")) for second in times]
    except ValueError:
        raise ValueError(reason) from None
    if len(window) != 2 or not window[0] < window[1]:
        raise ValueError(reason)
    return window


def fill_marks(text, media):
    """Text with <video> and <image> marks -> pieces, videos and images where the marks stood.
    Raises ValueError if the columns hold too few."""
    pieces = []
    for part in re.split("(<video>|<image>)", text):
        if part in ("<video>", "<image>"):
            kind = part.strip("<>")
            pieces.append(next(media[kind], None))
            if pieces[-1] is None:
                raise ValueError(f"more {part} marks than {kind}s")
        elif part:
            pieces.append({"type": "text", "text": part})
    return pieces


def content_pieces(message, media):
    """Content of a published message -> pieces: texts, videos, images. Raises ValueError with the
    reason if a part cannot be read."""
    if fault := data.unread_field(message, data.MESSAGE):
        raise ValueError(fault)
    content = message.get("content")
    if isinstance(content, str):  # the JSON of a list of pieces, or a plain text
        parsed = parse_loosely(content)
        listed = type(parsed) is list and all(type(p) is dict and "type" in p for p in parsed)
        content = parsed if listed else [{"type": "text", "text": content}]
    pieces = []
    for piece in [content] if isinstance(content, dict) else content or []:
        kind = piece.get("type")
        if kind == "text" and message["role"] in ("user", "tool"):
            pieces += fill_marks(piece.get("text") or "", media)
        elif kind == "text":
            pieces.append({"type": "text", "text": piece.get("text") or ""})
        elif kind in ("video", "video_url"):
            pieces.append(video_piece(piece.get("video_url") or piece))
        elif kind in ("image", "image_url"):
            pieces.append({"type": "image"})
        else:
            raise ValueError(f"content of type {kind}")
    if message["role"] in ("system", "assistant") and any(p["type"] != "text" for p in pieces):
        raise ValueError(f"a video or an image in a message of role {message['role']}")
    return pieces


def join_texts(pieces):
    return "".join(piece.get("text", "") for piece in pieces)


def split_roles(role, pieces):
    """A user or tool message -> [(role, pieces)]. Each pair of tool response tags becomes a tool
    message, because the template writes these tags itself and never passes on those of a user. Text
    around a pair becomes a user message. Raises ValueError for tags that do not pair up."""
    if role not in ("user", "tool") or "tool_response>" not in join_texts(pieces):
        return [(role, pieces)]
    parts = [("user", [])]
    for piece in pieces:
        for text in re.split("(</?tool_response>)", piece.get("text", "")):
            opening, closing = text == "<tool_response>", text == "</tool_response>"
            if not opening and not closing:
                parts[-1][1].append({**piece, "text": text} if "text" in piece else piece)
            elif opening == (parts[-1][0] == "tool"):
                raise ValueError("tags of tool responses that do not pair up")
            else:
                parts.append(("tool" if opening else "user", []))
    if parts[-1][0] == "tool":
        raise ValueError("tags of tool responses that do not pair up")
    # Frames without text, before or after the only response, belong to that response.
    tools = [items for kind, items in parts if kind == "tool"]
    for at, (kind, items) in enumerate(parts):
        if kind == "user" and not join_texts(items).strip() and len(tools) == 1:
            frames = [piece for piece in items if piece["type"] != "text"]
            tools[0][:] = frames + tools[0] if at == 0 else tools[0] + frames
            items.clear()
    for items in tools:  # the template writes the line breaks inside the tags
        for piece, cut in zip(items[:1] + items[-1:], (str.removeprefix, str.removesuffix)):
            if "text" in piece:
                piece["text"] = cut(piece["text"], "\n")
    return [(kind, [piece for piece in items if piece.get("text") != ""]) for kind, items in parts
            if kind == "tool" or join_texts(items).strip() or any("text" not in p for p in items)]


def response_pieces(pieces, call, overviews, max_frames):
    """Pieces of a tool response -> the content of a tool message, frames as our video pieces.

    call: the rewards.ToolCall that is answered, or None. overviews: the videos of the prompt.
    max_frames: of a window. Raises ValueError with the reason if the response cannot be converted.
    """
    content, stills = [], [piece for piece in pieces if piece["type"] == "image"]
    for piece in pieces:
        still = piece["type"] == "image"
        if piece["type"] == "text":
            content.append(piece)
        elif still and piece is not stills[0]:
            continue  # the first still stands for the whole window
        elif "start" in piece:
            content.append({**piece, "fps": 1.0, "max_frames": max_frames})
        else:
            if call is None or call.error:
                raise ValueError("frames in a tool response whose call cannot be read")
            if still and len(overviews) != 1:
                raise ValueError("stills in a tool response, of no single video")
            path = overviews[0] if still else piece["video"]
            start, end = call.arguments["start"], call.arguments["end"]
            window = {"start": start, "end": end, "fps": 1.0, "max_frames": max_frames}
            if path not in overviews:  # a separate clip, which holds exactly the window
                window = {"frames": min(max(round(end - start), 1), max_frames)}
            content.append({"type": "video", "video": path, **window})
    windows = [piece for piece in content if piece["type"] == "video"]
    # The release writes this sentence before frames. Without the frames the next turn would have
    # no source for the things it describes.
    sentence = r"(?i)the tool executed successfully|here are the processed results?|" \
               r"\(processed video here\)"
    if not windows and not rewards.has_word(re.sub(sentence, "", join_texts(content))):
        raise ValueError("a tool response that speaks of frames and shows none")
    return content if windows else join_texts(content)


def our_messages(row, frames, max_frames):
    """A published SFT row -> (messages before the first assistant turn, those from there on).
    frames: of an overview; max_frames: of a window. Raises ValueError with the reason if the row
    cannot be converted."""
    talk, media = parse_if_json(row["messages"]), media_of(row)
    head, rest, calls = [], [], iter(())
    for message in talk if isinstance(talk, list) else []:
        role, pieces = message["role"], content_pieces(message, media)
        if role == "assistant":
            calls = iter(rewards.parse_tool_calls(join_texts(pieces), TOOLS, False))
            rest.append({"role": role, "content": join_texts(pieces)})
            continue
        for kind, items in split_roles(role, pieces):
            if kind == "tool" and not rest:
                raise ValueError("a tool response before the first assistant message")
            if kind == "tool":
                rest.append({"role": kind, "content": items, "call": next(calls, None)})
            elif any(piece["type"] == "image" for piece in items):
                raise ValueError("still images are not read")
            elif not rest:
                head.append({"role": kind, "content": items})
            elif any(piece["type"] == "video" for piece in items):
                raise ValueError("a video after the first assistant message, in no tool response")
            else:
                rest.append({"role": kind, "content": join_texts(items)})
    spare, first = list(media["video"]), next((m for m in head if m["role"] == "user"), None)
    if first and not chat.videos_in(head) and len(spare) == 1:  # without a mark it goes first
        first["content"].insert(0, spare.pop())
    if spare or next(media["image"], None):
        raise ValueError("more videos than marks" if spare else "more images than marks")
    overviews = [piece["video"] for piece in chat.videos_in(head)]
    for message in rest:
        if "call" in message:
            call = message.pop("call")
            message["content"] = response_pieces(message["content"], call, overviews, max_frames)
    window = {"fps": 1.0, "max_frames": max_frames}  # a part of a video: at the rate of a window
    for piece in chat.videos_in(head):
        piece.update(window if "start" in piece else {"frames": frames})
    if not all(m["content"] for m in head + rest):
        raise ValueError("an empty message")
    if any(m["role"] == "system" for m in (head + rest)[1:]):
        raise ValueError("a system message after the first message")
    if problem := data.chat_fault(head + rest) or pairing_fault(rest):
        raise ValueError(problem)
    return head, rest


def pairing_fault(rest):
    """-> None, or the reason if a call or response has no counterpart. An episode answers each call
    once, in the same round, and ends on a turn of the agent."""
    waiting = 0
    for message in [*rest, {"role": "assistant", "content": ""}]:
        if message["role"] == "tool":
            waiting -= 1
        elif message["role"] == "assistant" and waiting:
            return "calls and tool responses that do not pair up"
        elif message["role"] == "assistant":
            waiting = len(rewards.parse_tool_calls(message["content"], TOOLS, False))
    return None if rest[-1]["role"] == "assistant" else "the last message is not the assistant's"


def to_chat(row, frames, max_frames, dropped):
    """A published SFT row -> {"messages", "tools"}. Raises ValueError with the reason if the row
    cannot be converted."""
    head, rest = our_messages(row, frames, max_frames)
    # As rollout.py --crop-response: does the agent see the windows itself?
    crop_response = "frames" if chat.videos_in(rest) else "summary"
    head = our_prompt(head, rest, frames, crop_response, dropped)
    rest = [{**m, "content": without_path(m["content"])} if m["role"] == "assistant" else m
            for m in rest]
    return {"messages": [*head, *rest], "tools": rollout.tool_schema(crop_response)}


def our_prompt(head, rest, frames, crop_response, dropped):
    """The prompt that rollout.py builds for the video and the question of a chat -> messages.
    Raises ValueError with the reason if the chat does not fit this prompt."""
    videos = chat.videos_in(head)
    if len(videos) != 1 or "start" in videos[0]:
        raise ValueError(f"{len(videos)} videos before the first turn; our prompt shows one, whole")
    answer = rewards.final_answer([m["content"] for m in rest if m["role"] == "assistant"], False)
    if answer is None:
        raise ValueError("no <answer> in the last turn, as others have; apart, such rows are tasks")
    prompt, question, options = question_of(
        [m["content"] for m in head if m["role"] == "user"], dropped)
    task = {"video": videos[0]["video"], "question": prompt, "type": "open"}
    # The answer shows the type: a letter, a span without other words, or else an open text.
    time = r"\d[\d.:]* ?(?:s|seconds)?"
    span = rf"(?:from )?{time} ?(?:-|–|to) ?{time}\.?|[\[(]{time}, ?{time}[\])]"
    # "3 - 5" may be a score. A span has brackets, a unit or a point, or the question asks for time.
    timed = re.search(r"[\[(:]|\d\.\d|\d ?s", answer) or re.search(
        r"(?i)\b(?:when|time\w*|seconds?|moments?|period|segment|interval|clip|starts?)\b", prompt)
    if options and letter_of(answer, options):
        task.update(question=question, options=options, type="mcq")
    elif options and re.match(r"\(?[A-Z](?:[).:]|$)", answer):
        raise ValueError("the answer is none of the options")
    elif timed and answers.extract_span(answer) and re.fullmatch(span, answer, re.IGNORECASE):
        task["type"] = "grounding"
    return rollout.main_messages(task, frames, crop_response=crop_response)


def without_path(text):
    """An assistant turn -> the same without the video_path of calls, which our tool does not take.
    A call without a video_path, or that is not JSON, does not change."""
    def shorter(match):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            call = launch.parse_json(match[2])
            if call["arguments"].pop("video_path", None) is not None:
                return match[1] + json.dumps(call, ensure_ascii=False) + match[3]
        return match[0]
    return re.sub(r"(<tool_call>\s*)(.*?)(\s*</tool_call>)", shorter, text, flags=re.DOTALL)


# The sentences of ParaVT, LongVT, Video-R1 and EasyR1 that tell the model how to answer, and our
# prompt's own heading of options. Each is removed whole from the end of a text. {PATH} may hold
# spaces.
PATH = r"(?:(?:(?!\.(?:mp4|mkv|webm|avi|mov)\b)[^\n?!]){0,300}\.(?:mp4|mkv|webm|avi|mov)|"\
       r"\S{0,300})\.?"
TAGS = "<{0}> ?(?:and )?</{0}> tags"
INSTRUCTIONS = re.compile(r"(?i)(?:\A|\s+)(?:" + "|".join((
    rf"The video path for this video is\b:? ?{PATH}",
    r"Think first, call \**crop_video\** if needed, then answer\.?",
    r"Format strictly as:\s*<think>\.{3}</think>\s*<tool_call>\.{3}</tool_call>\s*"
    r"\(if (?:tools )?needed\)\s*<answer>\.{3}</answer>\.?",
    r"You FIRST think about the reasoning process as an internal monologue and then provide the "
    r"final answer\.",
    rf"The reasoning process MUST BE enclosed within {TAGS.format('think')}\.",
    rf"The final answer MUST BE (?:put in|enclosed within) {TAGS.format('answer')}\.?",
    r"Please think about this question as if you were a human pondering deeply\. Engage in an "
    r"internal dialogue [^\n<]{1,200}? It's encouraged to include self-reflection or verification "
    r"in the reasoning process\.",
    rf"Provide your detailed reasoning between the {TAGS.format('think')}, and then give your "
    rf"final answer between the {TAGS.format('answer')}\.",
    rf"Please (?:provide|transcribe) [^\n<]{{1,90}} within the {TAGS.format('answer')}\.",
    r"Please (?:respond with only the letter of the correct answer|provide your answer by stating "
    r"the letter followed by the full option)\.",  # LLaVA-Video
    r"Answer with the (?:option(?:['’]s)? )?letter(?: from the given choices directly| only)?\.?",
    r"(?:Options|Choices):")) + r")\s*\Z")
# Other words that tell the model how to answer. Such a row is left out, because our prompt would
# contradict these words.
FORM = r"\b(?:letter|tags?|format|reasoning|only|single word)\b|[\[<]"
STEERING = re.compile(
    r"</?(?:think|answer|tool_call)>|\\boxed|(?i:crop_video|video path for this video|"
    r"\[start\w*, ?end|\byou (?:first|must|should|need to|have to) (?:first )?(?:think|reason|"
    r"answer|respond|output|provide)\b|\b(?:your|the)(?: final)? answer (?:should|must|has to|"
    r"needs to)\b|\b(?:answer|option)(?: is)? ?[:(][:( ]*\Z|\b(?:think|reason|"
    r"work)\b[^.?!\n]{0,40} step[ -]by[ -]step)|(?:(?<=[.?!] )|(?<=\n))(?:answer|respond|reply)\b|"
    r"(?<![\w'’-])(?:Answer|Respond|Reply|Think|Reason|Output|Return|Enclose|[Pp]lease (?:first )?"
    r"(?:answer|respond|reply|think|reason|output|return))\b[^.?!\n]{0,80}?"
    rf"(?:{FORM}|\b(?:option|choices?|answer|steps?|words?|phrase)\b)|"
    r"(?<![\w'’-])(?:Provide|Give|Write|Select|Choose|Pick|Use|Put|State|[Pp]lease (?:provide|"
    rf"give|write|select|choose|pick|use|put))\b[^.?!\n]{{0,80}}?(?:{FORM})")


def strip_instructions(text):
    """A text -> the text without the known instructions at the end. `question_of` finds those that
    stay: in another place, or inside a quotation."""
    shorter = INSTRUCTIONS.sub("", text.strip())
    while shorter != text:
        text, shorter = shorter, INSTRUCTIONS.sub("", shorter)
    return text


def after_options(text):
    """A question with options on lines of their own -> (the text up to the last option, the text
    after it)."""
    lines = text.split("\n")
    labels = [re.match(r"\s*\(?([A-Z])[.):]\s", line) for line in lines]
    count, end = 0, len(lines)
    for n, label in enumerate(labels):
        if label and label[1] == string.ascii_uppercase[count]:
            count, end = count + 1, n + 1
    if count < 2:
        return text, ""
    return "\n".join(lines[:end]), "\n".join(lines[end:]).strip()


def question_of(contents, dropped):
    """User messages (texts with <video> marks, or pieces) -> (question with options, question,
    options), without marks and instructions, which our prompt replaces. A text after the last
    option is left out and added to `dropped`. Raises ValueError if instructions are left, or text
    that is neither question nor option."""
    texts = ["<video>".join([p["text"] for p in content if p["type"] == "text"])
             if isinstance(content, list) else content for content in contents]
    # Two words with a video between them stay two words.
    text = re.sub(r"(?<=\S)(?:<video>)+(?=\S)", "\n", "\n".join(texts)).replace("<video>", "")
    full_text, after = after_options(strip_instructions(text))
    if after:
        dropped.append(after)
    stem, options = benchmarks.split_options(full_text)
    written = [line for line in full_text.split("\n") if line.strip()]
    # An option is one line. A further line would be read as part of the option before it.
    if options and len(written) != len(options) + sum(map(bool, map(str.strip, stem.split("\n")))):
        raise ValueError("text between the options")
    question = strip_instructions(stem)
    full_text = question + full_text[len(stem):]
    # No option begins with an instruction: "Reply to the letter" may be one.
    if STEERING.search(question) or any(STEERING.search(option, 1) for option in options):
        raise ValueError("the question still holds instructions of the release")
    if not rewards.has_word(question) or not all(options):
        raise ValueError("no question, or an option without a text")
    if not options and re.search(
            r"(?ms)(?:^|[\s(*])A[.):].+?[\s(*]B[.):]|^\W*a[.):].+?^\W*b[.):]", full_text):
        raise ValueError("options that cannot be read: each belongs on a line of its own")
    return full_text, question, options


def letter_of(answer, options, first=None):
    """The letter of a published answer, "" for none: "B", "(B)", "B. two" or the option's text.
    first: the number of the first option, if numbers count them; raises ValueError if one does not.
    """
    if first is not None and (count := COUNT.fullmatch(str(answer))):
        if int(count[1]) in (first - 1, first + len(options)):
            raise ValueError(SHIFTED)
        return dict(enumerate(string.ascii_uppercase[:len(options)], first)).get(int(count[1]), "")
    label = re.match(r"\(?[A-Z][).:]\s", str(answer))
    by_letter, by_text = data.answer_letters(answer, options)
    return by_text or by_letter or (label and answers.extract_letter(answer, options)) or ""


def to_task(row, dropped):
    """A published RL row -> a task of grpo.py's JSONL. Raises ValueError with the reason."""
    extra, reward = (parse_if_json(row.get(name)) or {} for name in ("extra_info", "reward_model"))
    answer = extra["answer"] if extra.get("answer") is not None else reward.get("ground_truth")
    media = media_of(row)
    videos = list(media["video"])
    if len(videos) != 1:
        raise ValueError(f"{len(videos)} videos; a task shows one")
    if "start" in videos[0]:
        raise ValueError("a part of a video; a task shows a whole video")
    if answer in (None, ""):
        raise ValueError("no answer")
    prompt = parse_if_json(row["prompt"])
    if any(m["role"] not in ("system", "user") for m in prompt):
        raise ValueError("a prompt with turns of an assistant")
    marks = {"video": iter(videos), "image": media["image"]}
    texts = [content_pieces(m, marks) for m in prompt if m["role"] == "user"]
    if next(media["image"], None) or any(p["type"] == "image" for t in texts for p in t):
        raise ValueError("still images are not read")
    stated = extra.get("question")
    full_text, question, options = question_of([stated] if stated else texts, dropped)
    kind = {"oe": "open", "tvg": "grounding", **{name: name for name in data.LABELS}}.get(
        extra.get("question_type"))
    span = span_of(parse_loosely(answer), kind)  # "[1.5, 7]"
    letter = letter_of(answer, options, row["(first)"]) if options else ""
    if kind is None and not options and re.fullmatch(r"\(?[A-Ha-h][.)]?", str(answer)):
        raise ValueError("a letter as the answer, and no options: --map options=COLUMN names them")
    kind = kind or ("grounding" if span is not None else "mcq" if options else "open")
    task = {"video": videos[0]["video"], "question": full_text, "options": None,
            "answer": str(answer), "type": kind}
    if kind == "grounding":
        task["answer"] = window_of(span or [], "the answer is not [start, end]")
    elif isinstance(answer, (list, dict)):
        raise ValueError("the answer is not a text")
    if kind == "mcq":
        if not options:
            raise ValueError("a choice whose options cannot be read")
        if not letter:
            hint = COUNT.fullmatch(str(answer)) and "; do numbers count? --answers-from 0 or 1"
            raise ValueError(f"the answer is none of the options{hint or ''}")
        task.update(question=question, options=options, answer=letter)
        task["(letters)"] = data.answer_letters(answer, options)  # see convert
    windows = parse_loosely(row.get("evidence"))  # other data sets have texts there
    windows = windows if isinstance(windows, list) else [[row.get("start"), row.get("end")]]
    more = {"evidence": [window_of(times, "no window in seconds: evidence, or start and end")
                         for times in windows if not {None, ""} >= {*times}],
            "subtitles": row.get("subtitles"),
            "subtitle_start": offset_of(row.get("subtitle_start"))}
    task.update((key, value) for key, value in more.items() if value)
    if problem := data.task_fault({"id": "", **task}):
        raise ValueError(problem)
    return task


def offset_of(value):
    """Seconds of a published value, or None."""
    try:
        return rewards.to_seconds(value)
    except ValueError:
        return None


def span_of(answer, kind):
    """A published answer -> [start, end] or None. The answer may be a list, a nested list, an
    object with these keys, or, if the row declares a span, a text."""
    if isinstance(answer, dict):
        answer = [answer.get("start"), answer.get("end")]
    if not isinstance(answer, list):
        return answers.extract_span(str(answer)) if kind == "grounding" else None
    return answer[0] if len(answer) == 1 and isinstance(answer[0], list) else answer


def convert(paths, out, frames, max_frames=64, names=None, first=None):
    """Published files -> one JSONL. Prints how many rows were left out, and why. frames: of an
    overview; max_frames: of a window in a tool response; names: {our column: theirs}; first: the
    number of the first option in answers, or None."""
    numbered, rejected = [], {}  # (id, row); reason -> ids of rows
    dropped = []  # texts after the last option of a question

    def attempt(name, make, *given):
        """make(*given), or None: the row `name` is left out. Published rows are data."""
        try:
            return make(*given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            malformed = f"malformed ({type(error).__name__})"
            reason = str(error) if type(error) is ValueError else malformed
            rejected.setdefault(reason, []).append(name)

    for path in paths:
        stem, table = os.path.splitext(os.path.basename(path))[0], read_table(path)
        columns = list(dict.fromkeys(key for row in table for key in row))
        if gone := [theirs for theirs in (names or {}).values() if theirs not in columns]:
            raise launch.UserError(f"{path}: no column {gone[0]}, but {', '.join(columns)}")
        for number, row in enumerate(table):
            named = {ours: row.get(theirs) for ours, theirs in (names or {}).items()}
            row = {key.lower() if key.lower() in KNOWN else key: row[key] for key in row} | named
            if converted := attempt(f"{stem}/{number}", normal_form, row, first):
                numbered.append((f"{stem}/{number}", converted))
        if not numbered and UNKNOWN in rejected:
            lacks = [n for n, known in COLUMNS.items() if not any(row.get(key) for key in known)]
            raise launch.UserError(
                f"{path}: neither messages nor a video, a question and an answer, but "
                f"{', '.join(columns)}; say which they are: --map {'=COLUMN '.join(lacks)}=COLUMN")
    is_chat = any("</answer>" in json.dumps(row.get("messages")) for _, row in numbered)
    if is_chat and not all(row.get("messages") for _, row in numbered):
        raise launch.UserError("some files hold chats (SFT), some tasks (RL); convert them apart")

    def make_rows(row):
        if is_chat:
            return [to_chat(row, frames, max_frames, dropped)]
        if not (tasks := as_tasks(row) if row.get("messages") else [row]):
            raise ValueError("no answer of an assistant, and no column of answers")
        return [to_task(task, dropped) for task in tasks]

    rows = []
    for name, row in numbered:
        source = row.get("id") or row.get("data_source") or name.partition("/")[0]
        rows += [{"id": f"{name}/{n}" if n else name, "source": source, **one}
                 for n, one in enumerate(attempt(name, make_rows, row) or ())]
    letters = {}  # file -> how its answers name options
    for row in rows:
        letters.setdefault(row["id"].partition("/")[0], []).append(row.pop("(letters)", ("", "")))
    unclear = [flag for file in letters.values() for flag in data.unclear_labels(file)]
    why = "the answer is the letter of one option and the text of another, others only letters"
    for row, flag in zip(rows, unclear):
        if flag:
            rejected.setdefault(why, []).append(row["id"])
    rows = [row for row, flag in zip(rows, unclear) if not flag]
    if SHIFTED in rejected:
        raise launch.UserError(f"{SHIFTED}; as in {rejected[SHIFTED][0]}")
    for reason, ids in sorted(rejected.items(), key=lambda item: -len(item[1])):
        print(f"left out: {len(ids)} rows, {reason}; the first is {ids[0]}")
    if dropped:
        print(f"dropped: {len(dropped)} texts after the options; the first is {dropped[0]!r}")
    if not rows:
        raise launch.UserError("no row could be used")
    launch.write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{out}: {len(rows)} {'chats' if is_chat else 'tasks'}, "
          f"{sum(map(len, rejected.values()))} left out")
    if is_chat:
        tools = [[m for m in row["messages"] if m["role"] == "tool"] for row in rows]
        print(f"of these chats {sum(map(bool, tools))} hold a call, "
              f"{sum(bool(chat.videos_in(t)) for t in tools)} show frames in a tool response")


def main():
    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="parquet, JSON, JSONL, CSV or TSV")
    add("--out", required=True, help="JSONL to write")
    add("--frames", type=int, default=64, help="overview frames K of chats")
    add("--map", nargs="+", default=[], metavar="OURS=THEIRS", help="columns: question=text, say")
    add("--answers-from", type=int, choices=[0, 1], help="number of the first option, in answers")
    args = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in args.map if "=" in pair)
    if len(names) < len(args.map) or not {*(ours := [*COLUMNS, *MORE])} >= names.keys():
        raise launch.UserError(f"--map: give OURS=THEIRS, OURS one of {', '.join(ours)}")
    launch.make_out(os.path.dirname(os.path.abspath(args.out)))
    arguments.require_min(1, args, "frames")
    convert(args.files, args.out, args.frames, names=names, first=args.answers_from)


if __name__ == "__main__":
    launch.run_main(main)
