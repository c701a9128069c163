"""
Tests of tools/convert.py: python -m pytest tests/test_convert.py -q

Rows in the two published layouts (ParaVT-Parquet, LongVT-Parquet), with the quirks that these files
have.
"""
import json
from dataclasses import replace

import pyarrow
import pytest
from fixtures import rows_of, write_rows
from pyarrow import csv, parquet
from scripted import AGENT, Scripted, play_one

import chat
import rollout
from plumbing.data import read_tasks
from tools import convert as conversion


def piece(kind, text=None, url=None):
    """Arrow unifies structs: keys that a piece does not use come back as null."""
    return {"type": kind, "text": text, "video_url": {"url": url} if kind == "video_url" else None,
            "image_url": {"url": url} if kind == "image_url" else None}


CALL = ('<think>look</think>\n<tool_call>\n{"name": "crop_video", "arguments": '
        '{"start_time": 1, "end_time": 9}}\n</tool_call>')
ANSWER = "<think>seen</think>\n<answer>A  dog</answer>"
TOOLS = "Use tools.\n<tools>\n{\"name\": \"crop_video\"}\n</tools>"


def responses(*texts):
    joined = "\n".join(f"<tool_response>\n{t}\n</tool_response>" for t in texts)
    return {"role": "user", "content": [piece("text", joined)]}


def paravt(*middle, said=CALL, system=TOOLS, video="file:///data/x/longvt_source/a/b.mp4"):
    asked = [piece("video_url", url=video), piece("text", "What?")]
    first, last = ({"role": "assistant", "content": [piece("text", t)]} for t in (said, ANSWER))
    messages = [{"role": "user", "content": asked}, first, *(middle or [responses("ok")]), last]
    return [*[{"role": "system", "content": [piece("text", system)]}] * bool(system), *messages]


def convert(tmp_path, rows, name="paravt_sft_x.jsonl", frames=64):
    path = str(write_rows(tmp_path / name, rows))
    conversion.convert([path], str(tmp_path / "out.jsonl"), frames, {})
    return rows_of(tmp_path / "out.jsonl")


def test_a_published_trace_with_frames_is_an_episode_of_rollout(tmp_path, codec, tasks, frames_of,
                                                                monkeypatch):
    """One protocol for the cold start, RL and evaluation: the ids that SFT trains on are those that
    an agent with --crop-response frames meets."""
    monkeypatch.setattr(conversion, "MAX_FRAMES", 16)
    shown = piece("video_url", url=tasks[0]["video"])
    talk = paravt({"role": "tool", "content": [shown]}, system=None, video=tasks[0]["video"])
    (row,) = convert(tmp_path, [{"id": "x-1", "messages": json.dumps(talk)}], frames=8)
    items = [chat.vision_item(s, frames_of.load(s)) for s in chat.videos_in(row["messages"])]
    sequence = chat.encode_chat(codec, row["messages"], items, row["tools"])
    turns = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    task = {**tasks[0], "question": "What?", "type": "open"}
    engine = Scripted(codec, [text.removeprefix("<think>") for text in turns])
    episode = play_one(engine, [task], frames_of, replace(AGENT, crop_response="frames"), frames=8)
    assert episode.context.ids == sequence.ids and len(episode.context.items) == 2
    assert [i.seconds for i in episode.context.items] == [i.seconds for i in sequence.items]
    trained = [i for i, flag in zip(sequence.ids, sequence.mask) if flag]
    assert chat.decode(codec, trained, True) == "".join(
        text.replace("<think>", "<think>\n") + "<|im_end|>" for text in turns)


def test_a_paravt_chat_keeps_its_words_and_gets_tool_messages(tmp_path):
    """Messages as a JSON string, nulls in every piece, file:// and the publisher's folders before
    the path, results in a user turn."""
    two_calls = CALL + CALL.split("</think>")[1]
    talk = paravt(responses("a red square", "nothing"), said=two_calls, system=None)
    talk = json.dumps(talk)
    (row,) = convert(tmp_path, [{"id": "x-1", "messages": talk, "system": TOOLS}], frames=8)
    task = {"video": "longvt_source/a/b.mp4", "question": "What?", "type": "open"}
    said = [{"role": "assistant", "content": two_calls}]
    said += [{"role": "tool", "content": text} for text in ("a red square", "nothing")]
    said.append({"role": "assistant", "content": ANSWER})  # byte for byte
    assert row == {"id": "paravt_sft_x/0", "messages": rollout.main_messages(task, 8) + said,
                   "tools": rollout.tool_schema()}


ASKED = {"question": "Which?", "options": ["one", "two"], "answer": "B"}


def rl(answer, question="<video>Which?\n(A) one\n(B) two", kind=None):
    extra = {"answer": answer, **({"question_type": kind} if kind else {})}
    question += " The video path for this video is: /tmp/a.mp4"
    return {"prompt": [{"role": "system", "content": TOOLS}, {"role": "user", "content": question}],
            "videos": [{"video": "selfqa/a.mp4", "fps": 1.0}], "extra_info": json.dumps(extra),
            "reward_model": {"style": "rule", "ground_truth": "zzz"}}


def test_rl_rows_become_tasks(tmp_path):
    rows = [rl("B", kind="mcq"), rl("(B)"), rl("two", kind="mcq"),
            rl("[1.5, 7]", "<video>When?", "tvg"), rl([1.5, 7], "<video>When?"),
            rl("1.5 - 7 s", "<video>When?", "tvg"),
            rl("a dog", "<video>What?", "oe"), rl("a dog", "<video>What?")]
    tasks = convert(tmp_path, rows)
    assert tasks[0] == {"id": "paravt_sft_x/0", "video": "selfqa/a.mp4", "question": "Which?",
                        "options": ["one", "two"], "answer": "B", "type": "mcq"}
    assert [(t["type"], t["answer"]) for t in tasks] == (
        [("mcq", "B")] * 3 + [("grounding", [1.5, 7.0])] * 3 + [("open", "a dog")] * 2)
    assert all(t["question"] == "When?" and t["options"] is None for t in tasks[3:6])
    assert read_tasks(str(tmp_path / "out.jsonl")) == tasks


LINES = "Which?\nA. one\nB. two"
VIDEO_R1 = {"problem_id": 7, "problem": "Which?", "options": ["A. one", "B. two"],
            "problem_type": "multiple choice", "solution": "<answer>B</answer>", "path": "a.mp4"}


def llava(question, answer="B"):
    return {"video": "a.mp4", "conversations": [{"from": "human", "value": question},
                                                {"from": "gpt", "value": answer}]}


@pytest.mark.parametrize("row, flags", [
    (llava("<image>\n" + LINES, "B. two"), ()),
    # LLaVA's rows tell the model how to answer below the options, in words of their own.
    (llava(f"<video>{LINES}\nAnswer with the letter."), ()), (llava(LINES + "\nBe brief."), ()),
    (VIDEO_R1, ()), ({"Problem": LINES, "Answer": "B", "videos": ["a.mp4"]}, ()),
    *[({"video": "a.mp4", **ASKED, "options": options}, ()) for options in (
        "A. one\nB. two", "one|two", ["one", "two", ""])],
    ({"video": "a.mp4", **ASKED, "answer": "two"}, ()),
    ({"clip": "a.mp4", "text": LINES, "label": "B"},
     ("--map", "video=clip", "question=text", "answer=label"))])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_forms_that_people_have_become_tasks(tmp_path, start, row, flags, kind):
    path, write = tmp_path / ("mine." + kind), parquet.write_table
    if kind == "csv":
        row = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
        write = csv.write_csv
    write(pyarrow.Table.from_pylist([row, row]), path)
    assert start(conversion, path, "--out", tmp_path / "out.jsonl", *flags)[0] == 0
    tasks = read_tasks(str(tmp_path / "out.jsonl"))
    assert [task["id"] for task in tasks] == ["mine/0", "mine/1"]
    assert tasks[0].items() >= {"type": "mcq", "video": "a.mp4", **ASKED}.items()
    assert tasks[0].get("after_options") == ("Be brief." if "Be brief" in str(row) else None)


def test_turns_types_and_windows(tmp_path):
    (there := tmp_path / "a.mp4").touch()
    talk = [("human", "<video>What?"), ("gpt", "A dog."), ("human", "When?"), ("gpt", "Later.")]
    statements = "Which order?\nA. he runs\nB. he sings\nChoose one."
    tasks = convert(tmp_path, [
        {"video": str(there), "conversations": [{"from": k, "value": v} for k, v in talk]},
        {**ASKED, "video": "b", "question": statements, "answer": "red", "type": "open"},
        {"video": "b", "question": "When?", "start": 1, "end": "2.5", "type": "grounding"},
        {**ASKED, "video": "b", "start": 2, "end": 70, "subtitles": "s"},
        {**ASKED, "video": "b", "evidence": "[[1, 2], [3.5, 4]]", "start": None, "end": ""}])
    assert [(t["id"][13:], t["question"], t["answer"], t["type"]) for t in tasks[:4]] == [
        ("0", "What?", "A dog.", "open"), ("0/1", "When?", "Later.", "open"),
        # A question may list statements itself.
        ("1", statements + "\nA. one\nB. two", "red", "open"),
        ("2", "When?", [1, 2.5], "grounding")]
    assert tasks[0]["video"] == str(there)
    assert tasks[4]["evidence"] == [[2, 70]] and tasks[4]["subtitles"] == "s"
    assert tasks[5]["evidence"] == [[1, 2], [3.5, 4]] and "subtitles" not in tasks[5]
