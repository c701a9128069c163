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
from unittest.mock import Mock

import pytest
from scripted import Server

import chat
import eval as evaluation
import rollout
import video
from engine import Completion
from evaluation import endpoint, episodes, folders, systems
from plumbing import runs

STORED = Path(__file__).with_name("protocols.json")
TASK = {"id": "q", "video": "videos/eval-0000.mp4", "question": "Which {colour} is first?",
        "options": ["red", "blue"], "answer": "B", "type": "mcq"}


class Chat:
    """Answers from a script, one text a turn; keeps what it was asked. codec None: an endpoint that
    returns text."""

    max_seqs = 4

    def __init__(self, codec, *script):
        self.codec, self.script, self.asked, self.waiting, self.turn = codec, script, [], [], 0

    def submit(self, request):
        self.asked.append(request)
        self.waiting.append(request)

    def poll(self):
        done, self.waiting = self.waiting, []
        return [self.complete(request) for request in done]

    def complete(self, request):
        if request.id.count("/") == 4:  # a sub-agent
            text = "seen at 00:00:10"
        else:
            text, self.turn = self.script[min(self.turn, len(self.script) - 1)], self.turn + 1
        if self.codec is None:
            return Completion(request.id, text=text, ended=True)
        ids = chat.encode(self.codec, text) + [self.codec.eos]
        return Completion(request.id, ids, [-1.0] * len(ids), chat.decode(self.codec, ids),
                                  True)


@pytest.fixture
def play(toy, source, codec, monkeypatch):
    """play(flags, *script) -> episode, requests, graded record."""
    def play(flags, *script, task=TASK, ids=False, files=()):
        given = ["eval.py", "--data", str(toy / "eval.jsonl"), "--ckpt", "x", "--max-pixels",
                 "4096", "--set", "min_pixels=1024", *flags.split()]
        given += ["--prompt-file", *files] if files else []  # a name may hold a space
        monkeypatch.setattr(sys, "argv", given)
        args = evaluation.parse_args()
        modes, args.tools = args.tools, True
        agent, _ = rollout.agent_settings(args, str(toy / "eval.jsonl"))
        agent.tools = modes == ["on"]
        source.min_pixels, source.max_pixels = args.min_pixels, args.max_pixels
        protocol, digest = systems.make_protocol(args)
        engine = Chat(codec if ids else None, *script)
        sampler = rollout.Sampler(engine, engine.codec, systems.source_of(source, args), agent)
        (episode,) = episodes.run(sampler, [task], protocol, args.frames[0])
        record = folders.record_of(episode, "d", args.frames[0], "on", args)
        return episode, engine.asked, record

    return play


# ------------------------------------------------------------------------------------------------
# All of them


def scripts():
    """name -> texts of a model, turn by turn, sub-agents too; one answer if there is none."""
    clip = "<think>x</think><clip>00:00:05-00:00:10</clip><answer></answer>"
    window = dict(timestamp_start="00:00:08", timestamp_end="00:00:16")
    return {
        "paravt": [crops((0, 2)), "it is blue"], "paper": [crops((0, 3), (70, 72))],
        "paper-general": [crops((0, 3))], "longvt": [CROP % (0, 2) + CROP % (5, 3)],
        "conan": [clip, clip],
        "videozoomer": ['<video_zoom>{"segment": [8, 10], "fps": 1}</video_zoom>'],
        "sage": [tool("identify_timestamps_visually", event="blue", **window), "at 00:00:12",
                 sage(final_answer="B", answerable={"verdict": True})]}


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


@pytest.mark.parametrize("name", list(systems.protocols()))
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
        sampler = rollout.Sampler(engine, None, systems.source_of(source, args), agent)
        (episode,) = episodes.run(sampler, [TASK], protocol, 2)
        engine.close()
        sent = [readable(body) for body in server.asked]
    assert folders.record_of(episode, "d", 2, "on", args)["score"] == 1.0
    stored = json.loads(STORED.read_text())
    if name not in stored:
        STORED.write_text(json.dumps({**stored, name: sent}, indent=1) + "\n")
    assert sent == stored.get(name), "written to tests/protocols.json: is it meant?"


def test_protocols_are_told(monkeypatch, capsys, tmp_path):
    """Frames, limits and texts of every protocol, and the places of a publisher's; of one with its
    file."""
    monkeypatch.setattr(sys, "argv", ["eval.py", "--protocols"])
    evaluation.main()
    told = dict(zip(systems.protocols(), capsys.readouterr().out.split("\n== ")[1:]))
    assert all(told[name].startswith(name + "\n") for name in systems.protocols())
    for name, part in (("longvt", "1 a second, 1 to 512"), ("longvt", "49152 tokens"),
                       ("longvt", "crop_video(video_path, start_time, end_time)"),
                       ("videozoomer", "stops   at </video_zoom>"), ("conan", "text 6:"),
                       ("sage", "<<<tools_so_far>>>"), ("videochat-r1", "2809856 in all"),
                       ("time-r1", "</think>"), ("video-r1", "TYPE_TEMPLATE[free-form]")):
        assert part in told[name], (name, part)
    assert "system:" not in told["qwen3-vl"] and "system:" in told["direct"]
    (tmp_path / "mine.txt").write_text("Mine.")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--protocols", "--protocol", "direct",
                                      "--prompt-file", f"{tmp_path}/mine.txt"])
    evaluation.main()
    told = capsys.readouterr().out
    assert "Mine." in told and "the publisher's" in told and told.count("\n== ") == 1


def test_a_tool_that_training_adds_is_not_offered_to_other_systems(monkeypatch):
    tools = rollout.tool_schema()
    monkeypatch.setattr(rollout, "tool_schema", lambda: json.loads(json.dumps([*tools, *tools])))
    assert len(systems.crop_schema(True, True)) == 1


@pytest.mark.parametrize("name", ["paravt", "paper", "longvt", "conan", "videozoomer", "sage"])
@pytest.mark.parametrize("part", ["table", "frames"])
def test_an_episode_whose_disk_went_away_meanwhile_is_played_again(name, part, play, source,
                                                                   monkeypatch):
    """After the overview nothing can be read any more: neither answer nor status is the model's."""
    real = source.load_overview

    def load_overview(spec, task):
        seen = real(spec, task)
        away = Mock(side_effect=video.VideoError("f.mp4", "Input/output error"))
        monkeypatch.setattr(*{"table": (source.cache, "index", away),
                              "frames": (source.cache, "frames", away)}[part])
        return seen

    monkeypatch.setattr(source, "load_overview", load_overview)
    monkeypatch.setattr(systems, "source_of", lambda source, args: source)
    episode, _, record = play(f"--protocol {name} --frames 4", *scripts()[name],
                              "<answer>A</answer>")
    assert episode.status == "video_error" and runs.is_retried(record)


# ------------------------------------------------------------------------------------------------
# Two loops


def test_paravt_as_it_is_trained_is_played_by_trainings_own_loop(codec, source, monkeypatch):
    """With ids. An endpoint, another protocol and one call a turn go through `episodes.play`."""
    plays = []
    monkeypatch.setattr(rollout, "run",
                        lambda *given, play: plays.append(play is rollout.run_episode))
    sampler = rollout.Sampler(None, codec, source, rollout.Agent())
    turns = replace(sampler, agent=rollout.Agent(dispatch="turns"))
    for some, protocol in ((sampler, episodes.Protocol()), (turns, episodes.Protocol()),
                           (replace(sampler, codec=None), episodes.Protocol()),
                           (sampler, episodes.Protocol(stop=("x",)))):
        episodes.run(some, [], protocol)
    assert plays == [True, False, False, False]


# ------------------------------------------------------------------------------------------------
# crop_video agents


CROP = ('<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %s, "end_time": %s}}\n'
        "</tool_call>")


def crops(*windows):
    return "I look.</think>" + "\n".join(CROP % w for w in windows)


# ------------------------------------------------------------------------------------------------
# Conan, VideoZoomer, SAGE


def sage(**fields):
    return "<json>" + json.dumps({"final_answer": None, **fields}) + "</json>"


def tool(name, **arguments):
    calls = [{"rationale": "r", "name": name, "arguments": arguments},
             {"name": "never run", "arguments": {}}]
    return sage(video_context="a square", recommended_tools={"needed": True, "tool_calls": calls})
