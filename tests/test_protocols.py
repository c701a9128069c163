"""
Tests of evaluation/systems.py: python -m pytest tests/test_protocols.py -q

Each system of the paper's table is played by a script: what it is shown, how its calls are read,
what it gets back, when it has to answer, what is graded. With ids (the engines of this project) and
without (an endpoint that takes messages).
"""
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import Server

import eval as evaluation
import rollout
from evaluation import benchmarks, endpoint, protocol_loop, results, systems

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
            "videozoomer": ['<video_zoom>{"segment": [8, 10], "fps": 1}</video_zoom>']}


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


@pytest.mark.parametrize("name", list(systems.all_systems()))
def test_an_endpoint_is_sent_what_is_stored(name, toy, source, monkeypatch):
    """tests/protocols.json, made of requests that reached a server: look at what changed there. An
    entry that is taken out is written anew."""
    script = [*scripts().get(name, []), "<answer>B</answer>"]
    with Server(*script) as server:
        given = f"eval.py --engine openai --base-url {server.url} --model m --data d --frames 2"
        monkeypatch.setattr(sys, "argv", [*given.split(), "--protocol", name])
        args = evaluation.parse_args()
        agent, _ = rollout.agent_settings(args, str(toy / "eval.jsonl"))
        agent.tools = args.tools == ["on"]
        protocol, _ = systems.make_protocol(args)
        engine = endpoint.make_engine(args, bool(protocol.prefill))
        sampler = rollout.RolloutWorker(engine, None, systems.source_of(source, args), agent)
        (episode,) = protocol_loop.run(sampler, [TASK], protocol, 2)
        engine.close()
        sent = [readable(body) for body in server.asked]
    assert results.record_of(episode, "d", 2, "on", args)["score"] == 1.0
    stored = json.loads(STORED.read_text())
    if name not in stored:
        STORED.write_text(json.dumps({**stored, name: sent}, indent=1) + "\n")
    assert sent == stored.get(name), "written to tests/protocols.json: is it meant?"


def test_every_row_of_the_papers_table_has_an_entry():
    rows = systems.rows_of_table_1()
    assert list(rows) == list(benchmarks.paper_table()) and len(rows) == 15
    assert set(rows.values()) <= set(systems.all_systems())


# ------------------------------------------------------------------------------------------------
# Two loops


def test_paravt_as_it_is_trained_is_played_by_trainings_own_loop(codec, source, monkeypatch):
    """With ids. An endpoint, another protocol and one call a turn go through protocol_loop.play."""
    plays = []
    monkeypatch.setattr(rollout, "run", lambda *_, play: plays.append(play is rollout.run_episode))
    sampler = rollout.RolloutWorker(None, codec, source, rollout.AgentConfig())
    for some, protocol in ((sampler, protocol_loop.Protocol()),
                           (sampler, protocol_loop.Protocol(one_call=True)),
                           (replace(sampler, codec=None), protocol_loop.Protocol()),
                           (sampler, protocol_loop.Protocol(stop=("x",)))):
        protocol_loop.run(some, [], protocol)
    assert plays == [True, False, False, False]


# ------------------------------------------------------------------------------------------------
# crop_video agents


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
    (sage("identify_timestamps_visually", "00:00:10", "00:00:08"), [(10.0, 8.0, "HH:MM:SS")]),
    (sage("extract_parts_from_timestamp", None, "00:00:08"), [(None, 8.0, "HH:MM:SS")]),
    (sage("unified_web_search"), [(None, None, "not available")]),
    (sage("perform_reasoning"), [(None, None, "stay above")]),
    (sage("rm -rf"), [(None, None, "no tool of this name")]),
    (sage(["x"]), [(None, None, "no tool of this name")]),
    (sage("unified_web_search", needed=False), []),
    (sage("unified_web_search", answerable={"verdict": True}, final_answer="B"), []),
    ('```json\n{"recommended_tools": {"needed": 1, "tool_calls": [{"name": "parse_web_data"},]}}',
     [(None, None, "not available")]), ("<json>{", []), ("<json>[1]</json>", []), ("B", [])])
def test_sages_first_tool_is_read(text, calls):
    found = systems.sage_calls(text)
    assert [(call.start, call.end) for call in found] == [call[:2] for call in calls]
    for call, (*_, error) in zip(found, calls):
        assert error is None and call.error is None or error in call.error


@pytest.mark.parametrize("turn, answer", [
    ('<json>{"final_answer": "(B) blue"}</json>', "(B) blue"), ("B", "B"),
    ('<json>{"final_answer": null}</json>', None)])
def test_sages_answer_is_its_final_answer(turn, answer):
    assert systems.sage_final([turn]) == answer
