"""
Tests of evaluation/systems.py and protocol_loop.py: python -m pytest tests/test_protocols.py -q

Each system of the paper's table is played by a script: what it is shown, how its calls are read,
what it gets back, when it has to answer, what is graded.
"""
import json
import sys
from pathlib import Path

import pytest
from scripted import Server

import eval as evaluation
import rollout
from evaluation import endpoint, results, systems

STORED = Path(__file__).with_name("protocols.json")
TASK = {"id": "q", "video": "videos/eval-0000.mp4", "question": "Which {colour} is first?",
        "options": ["red", "blue"], "answer": "B", "type": "mcq"}


# ------------------------------------------------------------------------------------------------
# All of them


def scripts():
    """name -> texts of a model, turn by turn, sub-agents too; one answer if there is none."""
    clip = "<think>x</think><clip>00:00:05-00:00:10</clip><answer></answer>"
    return {"paravt": [crops((0, 2)), "it is blue"], "paper": [crops((0, 3), (70, 72))],
            "paper-general": [crops((0, 3))], "longvt": [CROP % (0, 2) + CROP % (5, 3)],
            "conan": [clip, clip],
            "sage": [sage("extract_parts_from_timestamp", "00:00:08", "00:00:10"),
                     sage("verbal_transcript", "00:00:00", "00:00:10"),
                     '<json>{"answerable": {"verdict": true}, "final_answer": "(B) blue"}</json>'],
            "videozoomer": 4 * ['<video_zoom>{"segment": [8, 10], "fps": 1}</video_zoom>']}


def readable(body):
    """What an endpoint was sent -> what a protocol decides of it; frames as "[image]"."""
    told = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "stop")
    out = {name: body[name] for name in told if name in body}
    tools = [tool["function"] for tool in body.get("tools", [])]
    if tools:
        out["tools"] = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
    for number, message in enumerate(body["messages"], 1):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "[image]") for part in content)
        out[f"{number} {message['role']}"] = content.splitlines()
    return out


def set_up(name, toy, monkeypatch, url="http://x", *flags):
    """-> (flags of eval.py, AgentConfig, VideoSource) of a protocol."""
    given = ["eval.py", "--base-url", url, "--model", "m", "--data", "d", "--protocol", name]
    monkeypatch.setattr(sys, "argv", [*given, *flags])
    args = evaluation.parse_args()
    agent, source = evaluation.agent_and_source(args, str(toy), "none")
    agent.tools = args.tools == ["on"]
    return args, agent, source


def stored(path, name, value):
    """What a file holds of a protocol. An entry that was taken out is written anew."""
    found = json.loads(path.read_text())
    if name not in found:
        path.write_text(json.dumps({**found, name: value}, indent=1) + "\n")
    return found.get(name)


@pytest.mark.parametrize("name", list(systems.all_systems()))
def test_an_endpoint_is_sent_what_is_stored(name, toy, monkeypatch):
    """tests/protocols.json, made of requests that reached a server: look at what changed there. An
    entry that is taken out is written anew."""
    with Server(*scripts().get(name, []), "<answer>B</answer>") as server:
        args, agent, shown = set_up(name, toy, monkeypatch, server.url, "--frames", "2")
        system, _ = systems.make_system(args)
        engine = endpoint.make_engine(args, system.prefill)
        worker = rollout.RolloutWorker(engine, None, shown, agent)
        (episode,) = systems.run(worker, [TASK], system, 2)
        engine.close()
        sent = [readable(body) for body in server.asked]
    assert results.record_of(episode, "d", 2, "on", system)["score"] == 1.0
    assert sent == stored(STORED, name, sent), "written to tests/protocols.json: is it meant?"


CROP = ('<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %s, "end_time": %s}}\n'
        "</tool_call>")


def crops(*windows):
    return "I look.</think>" + "\n".join(CROP % w for w in windows)


# ------------------------------------------------------------------------------------------------
# SAGE


def sage(name, start=None, end=None, needed=True, **more):
    arguments = {"video_path": "v.mp4", "timestamp_start": start, "timestamp_end": end}
    tools = {"needed": needed, "tool_calls": [{"name": name, "arguments": arguments}]}
    return f"<json>{json.dumps({'final_answer': None, 'recommended_tools': tools, **more})}</json>"


@pytest.mark.parametrize("text, calls", [
    (sage("extract_parts_from_timestamp", "00:01:10", "1:15"), [(70.0, 75.0, None)]),
    (sage("identify_timestamps_visually", "00:00:10", "00:00:08"), [(None, None, "HH:MM:SS")]),
    (sage("extract_parts_from_timestamp", None, "00:00:08"), [(None, None, "HH:MM:SS")]),
    (sage(["x"]), [(None, None, "not available")]), (sage("parse_web_data", needed=False), []),
    ('```json\n{"recommended_tools": {"needed": 1, "tool_calls": [{"name": "parse_web_data"},]}}',
     [(None, None, "not available")]), ("<json>{", []), ("B", [])])
def test_sages_first_tool_is_read(text, calls):
    found = systems.sage_calls(text)
    assert [(call.start, call.end) for call in found] == [call[:2] for call in calls]
    for call, (*_, error) in zip(found, calls):
        assert (error or "") in (call.error or "") and bool(error) == bool(call.error)
    answer = ["B"] if text == "B" else [text, '<json>{"final_answer": "(B) blue"}</json>']
    assert "B" in systems.sage_final(answer)


def test_the_next_frames_of_conan_by_hand():
    clips = [{"start": 0, "end": 3}, {"start": 10, "end": 19}, {"start": 40, "end": 41}]
    # One each leaves 5: 1 for the 4 new frames of 14, 3 for the 10, the fifth for the largest clip.
    # The third has none, so the video's first frame that is not among these fills the eight.
    assert systems.conan_seconds(clips, [*range(20), 30]) == [0, 1, 3, 10, 12, 14, 17, 19]
    assert [clip["summary"][:8] for clip in clips] == ["2 frames", "5 frames", "error: n"]
    assert [clip["status"] for clip in clips] == ["ok", "ok", "error"]
