"""
What tools/convert.py does with rare rows: python -m pytest tests/slow/test_convert.py -q
"""

import json

import pytest
from test_convert import ANSWER, ASKED, TOOLS, convert, paravt, piece

import chat
import rewards
import rollout
from agent_tools import TOOLS as TOOL_CLASSES
from plumbing.data import chat_fault
from tools import convert as conversion

STRICT = ("Think first, call **crop_video** if needed, then answer. Format strictly as:  "
          "<think>...</think>  <tool_call>...</tool_call> (if tools needed)  <answer>...</answer>.")


def asks(start, end, name="b.mp4"):
    return ('<think>At [8.00s - 12.00s].</think>\n\n<tool_call>{"name":"crop_video","arguments":'
            f'{{"video_path": "{name}", "start_time": {start}, "end_time": {end}}}}}</tool_call>')


def longvt(*middle, said="<think>This window shows it.</think> <answer> A red one. </answer>",
           question=f"Which one? {STRICT} The Video path for this video is: b.mp4",
           path="longvt_source/selftrace_1/b.mp4"):
    """One row; middle: its messages between the question and the last turn."""
    return {"id": "rft_1", "messages": [{"role": "system", "content": [piece("text", TOOLS)]},
        {"role": "user", "content": [piece("video_url", url=path), piece("text", question)]},
        *middle, {"role": "assistant", "content": [piece("text", said)]}]}


def shown(*pieces, role="user"):
    return {"role": role, "content": [piece("text", p) if type(p) is str else p for p in pieces]}


LETTERS = "Which?\n(A) one\n(B) two\n(C) three\n(D) four"


FORMS = {"blank lines": (LETTERS.replace("\n", "\n\n"), "(D) four", "(D)"),
         "heading": (LETTERS.replace("?", "?\nOptions:"), "D.", "D"), "mcq": (LETTERS, "D", "D"),
         "to": ("Find the segment.", "8.6 to 13.2", [8.6, 13.2]),
         "from": ("When?", "From 8.6s to 13.2s.", "8.6 - 13.2"),
         "score": ("What is the score?", "3 - 5", "3 - 5"), "brackets": (LETTERS, "(D)", "D. four"),
         "tvg": ("When?", "[8.6, 13.2]", [8.6, 13.2]), "oe": ("What is it?", "A dog.", "a dog"),
         "its text": (LETTERS, "four", "four"), "text": (LETTERS, "D. four", "four")}


KINDS = {"text": "mcq", "its text": "mcq", "brackets": "mcq", "blank lines": None, "heading": None,
         "to": None, "score": None, "from": "tvg"}


# ------------------------------------------------------------------------------------------------
# Frames in tool responses, as in LongVT's traces. Its tool returns the frames of the window, one a
# second, and the sentence below; the traces store the frames as stills, in a user turn.

SENTENCE = "The tool executed successfully. Here are the processed result"


STILLS = [piece("image_url", url=f"longvt_source/selftrace_1/b_8.0_12.0_{n}.jpg")
          for n in (0, 1, 10, 2)]
SAME = piece("video_url", url="file:///data/longvt_source/selftrace_1/b.mp4")
CLIP = piece("video_url", url="longvt_source/selftrace_1/b_8.0_12.0.mp4")


# ------------------------------------------------------------------------------------------------
# One prompt for the cold start and for RL


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tail", [f" {STRICT} The Video path for this video is: /data/b.mp4",
                                  " The video path for this video is my file.mp4.", ""])
def test_a_chat_and_a_task_of_one_question_begin_with_the_same_ids(tmp_path, codec, kind, tail):
    """The cold start has to show the prompt that RL and evaluation show: not a token more."""
    question, said, gold = FORMS[kind]
    talk = longvt(shown(asks(8, 12), role="assistant"), shown("<tool_response>red</tool_response>"),
                  said=f"<think>x</think><answer>{said}</answer>", question=question + tail,
                  path="selfqa/b.mp4")
    extra = {"answer": gold, "question_type": KINDS.get(kind, kind)}
    task = {"prompt": [{"role": "system", "content": TOOLS},
                       {"role": "user", "content": "<video>" + question + tail}],
            "videos": [{"video": "selfqa/b.mp4"}], "extra_info": extra}
    (talk,), (task,) = convert(tmp_path, [talk], frames=3), convert(tmp_path, [task])
    item = chat.VisionItem({}, "k", 3, 32, 32, [1.0, 2.0, 3.0])
    prompt, _ = chat.encode_prompt(codec, rollout.main_messages(task, 3), [item],
                                   rollout.tool_schema())
    ids = chat.encode_chat(codec, talk["messages"], [item], talk["tools"]).ids
    assert ids[:len(prompt)] == prompt
    text = chat.decode(codec, ids, keep_end=True)
    assert "video_path" not in text and "Video path" not in text and "Format strictly" not in text
    (call,) = rewards.parse_tool_calls(talk["messages"][2]["content"], TOOL_CLASSES, False)
    assert (call.arguments["start"], call.arguments["end"], call.error) == (8.0, 12.0, None)


WINDOW = {"type": "video", "video": "longvt_source/selftrace_1/b.mp4", "start": 8.0, "end": 12.0,
          "fps": 1.0, "max_frames": 64}


WHOLE = {"type": "video", "video": "longvt_source/selftrace_1/b_8.0_12.0.mp4", "frames": 4}


@pytest.mark.parametrize("frames, seen", [(STILLS, WINDOW), ([SAME], WINDOW), ([CLIP], WHOLE)])
@pytest.mark.parametrize("shape", ["inside", "after", "before", "tool"])
def test_a_tool_response_keeps_its_frames(tmp_path, frames, seen, shape):
    """Without them the next turn, which says what the window shows, would be learned blind."""
    middle = {"inside": shown(f"<tool_response>\n{SENTENCE}: ", *frames, "\n</tool_response>"),
              "after": shown(f"<tool_response>{SENTENCE}: </tool_response>", *frames),
              "before": shown(*frames, f"<tool_response>{SENTENCE}: </tool_response>"),
              "tool": shown(*frames, f"{SENTENCE}: ", role="tool")}[shape]
    (row,) = convert(tmp_path, [longvt(shown(asks(8.0, 12.0), role="assistant"), middle)], frames=8)
    system, user, call, tool, last = row["messages"]
    text = {"type": "text", "text": f"{SENTENCE}: "}
    assert tool == {"role": "tool", "content": [seen, text] if shape in ("before", "tool")
                    else [text, seen]}
    assert last["content"].startswith("<think>This window shows it.")
    assert user["content"][0]["frames"] == 8 and chat_fault(row) is None
    assert "video_path" not in call["content"] and row["tools"] == rollout.tool_schema("frames")


def test_marks_and_columns_in_tool_responses(tmp_path):
    """The older layout: texts with marks, files in columns."""
    row = {"images": ["a_0.jpg", "a_1.jpg"], "messages": json.dumps([
        {"role": "user", "content": "<video>Which?"}, {"role": "assistant", "content": asks(1, 3)},
        {"role": "tool", "content": "<image>\n<image>done"},
        {"role": "assistant", "content": asks(4, 6)},
        {"role": "user", "content": "<tool_response><video></tool_response>"},
        {"role": "assistant", "content": ANSWER}]),
        "videos": ["selfqa/a.mp4", {"video": "selfqa/a.mp4"}]}
    (talk,) = convert(tmp_path, [row])
    assert [m["role"] for m in talk["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    window = {"type": "video", "video": "selfqa/a.mp4", "fps": 1.0, "max_frames": 64}
    assert talk["messages"][3]["content"][0] == {**window, "start": 1.0, "end": 3.0}
    assert talk["messages"][5]["content"] == [{**window, "start": 4.0, "end": 6.0}]


def test_what_cannot_be_used_is_left_out_counted_and_named(tmp_path, capsys):
    user = [{"role": "user", "content": "<video>Say."}, {"role": "assistant", "content": ANSWER}]
    shown, image = ({"role": "user", "content": [piece(kind, url=url)]} for kind, url in (
        ("video_url", "selfqa/a.mp4"), ("image_url", "a.png")))
    part = {"video": "selfqa/a.mp4", "video_start": 4, "video_end": 5}
    bad = [({"messages": user, "videos": []}, "another number of <video> marks than of videos"),
           ({"messages": user, "videos": [part]}, "a part of a video"),
           ({"messages": "[not json"}, "TypeError: "),
           ({"messages": [image]}, "the prompt shows one video, whole"),
           ({"messages": [shown]}, "the last message is not an answer of the assistant"),
           ({"messages": paravt()[:3] + paravt()[-1:]}, "that do not pair up")]
    changes = [({"video": "/no/such.mp4"}, "an absolute path that is"),
               ({"answer": None}, "no video, no"), ({"answer": 2}, "none of the"),
               # MVBench means the text; another file means the letter.
               ({"options": ["e", "c", "a"], "answer": "c"}, "the letter of one option and"),
               ({"start": 5, "end": 2}, "evidence must be")]
    bad += [({"video": "b", **ASKED, **change}, why) for change, why in changes]
    rows = convert(tmp_path, [row for row, _ in bad] + [{"messages": paravt()}])
    printed = capsys.readouterr().out
    assert len(rows) == 1 and f"1 chats or tasks, {len(bad)} rows left out" in printed
    assert [why for _, why in bad if why not in printed] == []


@pytest.mark.parametrize("name, flags, says", [
    ("a.json", ("--map", "video=x"), "no row could"), ("a.csv", (), "save it as CSV in UTF-8"),
    ("b.json", (), "not readable")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, start, name, flags, says):
    content = b"[{}]" if name == "a.json" else "video;question".encode("utf-16")
    (tmp_path / name).write_bytes(content)
    code, _, err = start(conversion, tmp_path / name, "--out", tmp_path / "out.jsonl", *flags)
    assert code == 2 and says in err and err.count("\n") == 1
