"""
Tests of tools/convert.py: python -m pytest tests/test_convert.py -q

Rows in the two published layouts (ParaVT-Parquet, LongVT-Parquet), with the quirks that these files
have.
"""
import json
import sys

import pytest
from conftest import run_script

import chat
import launch
import rewards
import rollout
from data import read_tasks
from tools import convert as conversion


def piece(kind, text=None, url=None):
    """Arrow unifies structs: keys that a piece does not use come back as null."""
    return {"type": kind, "text": text, "video_url": {"url": url} if kind == "video_url" else None,
            "image_url": {"url": url} if kind == "image_url" else None}


CALL = ('<think>look</think>\n<tool_call>\n{"name": "crop_video", "arguments": '
        '{"start_time": 1, "end_time": 9}}\n</tool_call>')
ANSWER = "<think>seen</think>\n<answer>A  dog</answer>"
TOOLS = "Use tools.\n<tools>\n{\"name\": \"crop_video\"}\n</tools>"


def responses(*texts, role="user"):
    joined = "\n".join(f"<tool_response>\n{t}\n</tool_response>" for t in texts)
    return {"role": role, "content": [piece("text", joined)]}


def paravt(*middle, system=TOOLS, video="file:///data/x/longvt_source/a/b.mp4", question="What?"):
    # One call for each response.
    calls = sum(json.dumps(m).count("</tool_response>") or m["role"] == "tool" for m in middle) or 1
    said = CALL + CALL.split("</think>")[1] * (calls - 1)
    messages = [{"role": "user", "content": [piece("video_url", url=video),
                                             piece("text", question)]},
                {"role": "assistant", "content": [piece("text", said)]},
                *(middle or [responses("ok")]),
                {"role": "assistant", "content": [piece("text", ANSWER)]}]
    return [*([{"role": "system", "content": [piece("text", system)]}] if system else []),
            *messages]


def convert(tmp_path, rows, name="paravt_sft_x.jsonl", frames=64, prompts="release", most=64):
    (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    conversion.convert([str(tmp_path / name)], str(tmp_path / "out.jsonl"), frames, most, prompts)
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_a_paravt_chat_keeps_its_words_and_gets_tool_messages(tmp_path, codec, toy):
    """Messages as a JSON string, nulls in every piece, file:// and the publisher's folders before
    the path, results in a user turn."""
    talk = json.dumps(paravt(responses("a red square", "nothing")))
    (row,) = convert(tmp_path, [{"id": "x-1", "messages": talk}], frames=8)
    # the system text declares them: one declaration
    assert row["id"] == "paravt_sft_x/0" and row["source"] == "x-1" and "tools" not in row
    system, user, first, *tools, last = row["messages"]
    assert system == {"role": "system", "content": TOOLS}
    assert user["content"] == [{"type": "video", "video": "longvt_source/a/b.mp4", "frames": 8},
                               {"type": "text", "text": "What?"}]
    said = CALL + CALL.split("</think>")[1]
    assert (first["content"], last["content"]) == (said, ANSWER)  # byte for byte
    assert tools == [{"role": "tool", "content": "a red square"},
                     {"role": "tool", "content": "nothing"}]
    item = chat.VisionItem({}, "k", 2, 32, 32, [1.0, 2.0])
    ids = chat.encode_chat(codec, row["messages"], [item]).ids
    text = chat.decode(codec, ids, keep_special=True)
    assert ("user\n<tool_response>\na red square\n</tool_response>\n"
            "<tool_response>\nnothing\n</tool_response><|im_end|>") in text
    assert codec.tokenizer("<tool_response>", add_special_tokens=False)["input_ids"][0] in ids


def test_a_chat_without_declared_tools_gets_ours(tmp_path):
    other = paravt(responses("x", role="tool"), system="You are helpful.")
    rows = convert(tmp_path, [{"messages": paravt(system=None)}, {"messages": other}])
    for row in rows:
        assert row["messages"][0] == {"role": "system", "content": rollout.main_prompt()}
        assert row["tools"] == rollout.tool_schema()
        assert [m["role"] for m in row["messages"]].count("system") == 1
    # the tags are the template's, in whichever role they came
    assert rows[1]["messages"][3] == {"role": "tool", "content": "x"}


@pytest.mark.parametrize("text, videos, content", [
    ("Watch <video> and say.", ["museg/charades/a.mp4"],
     [("text", "Watch "), ("video", "museg/charades/a.mp4"), ("text", " and say.")]),
    ("<video><video>Compare.", [{"video": "file://selfqa/a.mp4"}, {"video": "selfqa/b.mp4"}],
     [("video", "selfqa/a.mp4"), ("video", "selfqa/b.mp4"), ("text", "Compare.")]),
    ("Say.", ["selfqa/a.mp4"], [("video", "selfqa/a.mp4"), ("text", "Say.")])])
def test_video_marks_keep_their_place(tmp_path, text, videos, content):
    (row,) = convert(tmp_path, [{"messages": [{"role": "user", "content": text},
                                              {"role": "assistant", "content": ANSWER}],
                                 "videos": videos}])
    assert [(p["type"], p.get("text") or p.get("video"))
            for p in row["messages"][1]["content"]] == content


def test_what_cannot_be_used_is_left_out_counted_and_named(tmp_path, capsys):
    user = [{"role": "user", "content": "<video>Say."}, {"role": "assistant", "content": ANSWER}]
    bad = [({"messages": user, "videos": []}, "more <video> marks than videos"),
           ({"messages": user, "videos": ["a.mp4", "b.mp4"]}, "more videos than"),
           ({"messages": user, "videos": ["/elsewhere/a.mp4"]}, "an absolute path outside"),
           ({"messages": "[not json"}, "malformed (JSONDecodeError)"),
           ({"messages": [{"role": "user", "content": [piece("image_url", url="a.png")]}]},
            "still images are not read"),
           ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
           ({"messages": [{"content": "x"}]}, "malformed (KeyError)"),
           ({"messages": paravt({"role": "user",
                                 "content": [piece("video_url", url="selfqa/a.mp4")]})},
            "a video after the first assistant message")]
    rows = convert(tmp_path, [row for row, _ in bad] + [{"messages": paravt()}])
    printed = capsys.readouterr().out
    assert len(rows) == 1 and f"1 chats, {len(bad)} left out" in printed
    for _, why in bad:
        assert why in printed
    assert "/" not in rows[0]["messages"][1]["content"][0]["video"][:1]  # no absolute path


def rl(answer, question="<video>Which?\n(A) one\n(B) two", kind=None, videos=("selfqa/a.mp4",),
       **more):
    extra = {"answer": answer, **({"question_type": kind} if kind else {})}
    return {"prompt": [{"role": "system", "content": TOOLS},
                       {"role": "user",
                        "content": question + " The video path for this video is: /tmp/a.mp4"}],
            "videos": [{"video": v, "fps": 1.0} for v in videos], "extra_info": json.dumps(extra),
            "reward_model": {"style": "rule", "ground_truth": "zzz"}, **more}


def test_rl_rows_become_tasks(tmp_path):
    rows = [rl("B", kind="mcq"), rl("(B)"), rl("two", kind="mcq"),
            rl("[1.5, 7]", "<video>When?", "tvg"), rl([1.5, 7], "<video>When?"),
            rl("1.5 - 7 s", "<video>When?", "tvg"), rl({"start": 1.5, "end": 7}, "<video>When?"),
            rl("a dog", "<video>What?", "oe"), rl("a dog", "<video>What?")]
    tasks = convert(tmp_path, rows)
    assert tasks[0] == {"id": "paravt_sft_x/0", "source": "paravt_sft_x", "video": "selfqa/a.mp4",
                        "question": "Which?", "options": ["one", "two"],
                        "answer": "B", "type": "mcq"}
    assert [(t["type"], t["answer"]) for t in tasks] == (
        [("mcq", "B")] * 3 + [("grounding", [1.5, 7.0])] * 4 + [("open", "a dog")] * 2)
    assert all(t["question"] == "When?" and t["options"] is None for t in tasks[3:7])
    assert read_tasks(str(tmp_path / "out.jsonl")) == tasks


def test_parquet_is_converted_from_the_command_line(tmp_path):
    pyarrow = pytest.importorskip(
        "pyarrow", reason="pyarrow is not installed (requirements-cpu.txt brings it)")
    from pyarrow import parquet

    rows = [{"id": "1", "messages": paravt()}, {"id": "2", "messages": paravt(responses("a"))}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "s.parquet")
    done = run_script("tools/convert.py", tmp_path / "s.parquet", "--out", tmp_path / "s.jsonl",
                      "--frames", 16)
    assert done.returncode == 0 and "2 chats, 0 left out" in done.stdout, done.stderr
    rows = launch.read_jsonl(str(tmp_path / "s.jsonl"))
    assert rows[1]["messages"][3] == {"role": "tool", "content": "a"}
    assert rows[0]["messages"][1]["content"][0]["frames"] == 16


@pytest.mark.parametrize("files, out, why", [
    ({"a.jsonl": [{"x": 1}]}, "o.jsonl", "neither 'messages'"),
    ({"a.jsonl": [{"messages": paravt()}], "b.jsonl": [rl("B")]}, "o.jsonl", "convert them apart"),
    ({"a.jsonl": [{"messages": "[]"}]}, "o.jsonl", "no row could be used"),
    ({"a.jsonl": [{"messages": paravt()}]}, "folder", "end in .jsonl"), ({}, "o.jsonl", "a.jsonl")])
def test_bad_input_is_one_line_and_nothing_is_written(
        tmp_path, monkeypatch, capsys, files, out, why):
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(sys, "argv", ["convert.py",
                                      *(str(tmp_path / name) for name in files or ["a.jsonl"]),
                                      "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit) as stop:
        launch.run_main(conversion.main)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and why in err and err.count("\n") == 1
    assert not (tmp_path / out).exists()


# ------------------------------------------------------------------------------------------------
# Frames in tool responses, as in LongVT's traces. Its tool returns the frames of the window, one a
# second, and the sentence below; the traces store the frames as stills, in a user turn.
STRICT = ("Think first, call **crop_video** if needed, then answer. Format strictly as:  "
          "<think>...</think>  <tool_call>...</tool_call> (if tools needed)  <answer>...</answer>.")


def asks(start, end, name="b.mp4"):
    return ('<think>I will look at [8.00s - 12.00s].</think>\n\n<tool_call>{"name":"crop_video",'
            f'"arguments":{{"video_path": "{name}", "start_time": {start}, '
            f'"end_time": {end}}}}}</tool_call>')


def longvt(*middle, said="<think>This window shows it.</think> <answer> A red one. </answer>",
           question=f"Which one? {STRICT} The Video path for this video is: b.mp4",
           path="longvt_source/selftrace_1/b.mp4"):
    """One row; middle: its messages between the question and the last turn."""
    return {"id": "rft_1", "messages": [
        {"role": "system", "content": [piece("text", TOOLS)]},
        {"role": "user", "content": [piece("video_url", url=path), piece("text", question)]},
        *middle, {"role": "assistant", "content": [piece("text", said)]}]}


def turn(text):
    return {"role": "assistant", "content": [piece("text", text)]}


def shown(*pieces, role="user"):
    return {"role": role, "content": [piece("text", p) if isinstance(p, str) else p
                                      for p in pieces]}


# ------------------------------------------------------------------------------------------------
# One prompt for the cold start and for RL


LETTERS = "Which?\n(A) one\n(B) two\n(C) three\n(D) four"
FORMS = {"mcq": (LETTERS, "D", "D"), "text": (LETTERS, "D. four", "four"),
         "its text": (LETTERS, "four", "four"), "brackets": (LETTERS, "(D)", "D. four"),
         "blank lines": (LETTERS.replace("\n", "\n\n"), "(D) four", "(D)"),
         "heading": (LETTERS.replace("?", "?\nOptions:"), "D.", "D"),
         "oe": ("What is it?", "A dog.", "a dog"), "tvg": ("When?", "[8.6, 13.2]", [8.6, 13.2]),
         "to": ("Find the segment.", "8.6 to 13.2", [8.6, 13.2]),
         "score": ("What is the score?", "3 - 5", "3 - 5"),
         "from": ("When?", "From 8.6s to 13.2s.", "8.6 - 13.2")}
KINDS = {"text": "mcq", "its text": "mcq", "brackets": "mcq", "blank lines": None, "heading": None,
         "to": None, "score": None, "from": "tvg"}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tail", [
    f" {STRICT} The Video path for this video is: /data/b.mp4",
    f" You FIRST think about the reasoning process as an internal monologue and then provide the "
    f"final answer. {STRICT.removesuffix('.')} \n The Video path for this video is: a b.mp4",
    " The video path for this video is my file.mp4.", ""])
def test_a_chat_and_a_task_of_one_question_begin_with_the_same_ids(tmp_path, codec, kind, tail):
    """The cold start has to show the prompt that RL and evaluation show: not a token more."""
    question, said, gold = FORMS[kind]
    talk = longvt(turn(asks(8, 12)), shown("<tool_response>red</tool_response>"),
                  said=f"<think>x</think><answer>{said}</answer>", question=question + tail,
                  path="selfqa/b.mp4")
    extra = {"answer": gold, "question_type": KINDS.get(kind, kind)}
    task = {"prompt": [{"role": "system", "content": TOOLS},
                       {"role": "user", "content": "<video>" + question + tail}],
            "videos": [{"video": "selfqa/b.mp4"}], "extra_info": extra}
    (talk,) = convert(tmp_path, [talk], prompts="ours", frames=3)
    (task,) = convert(tmp_path, [task])
    item = chat.VisionItem({}, "k", 3, 32, 32, [1.0, 2.0, 3.0])
    prompt, _ = chat.encode_prompt(codec, rollout.main_messages(task, 3), [item],
                                    rollout.tool_schema())
    ids = chat.encode_chat(codec, talk["messages"], [item], talk["tools"]).ids
    assert ids[:len(prompt)] == prompt
    text = chat.decode(codec, ids, keep_special=True)
    assert "video_path" not in text and "Video path" not in text and "Format strictly" not in text
    call = rewards.parse_tool_calls(talk["messages"][2]["content"])[0]
    assert (call.start, call.end, call.error) == (8.0, 12.0, None)
