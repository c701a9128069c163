"""
Systems of the paper's table, each played by a script:
python -m pytest tests/slow/test_protocols.py -q
"""
import json
import os
import random
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
from conftest import run_script
from scripted import Scripted, Server
from test_protocols import CROP, TASK, scripts
from test_video import write

import chat
import eval as evaluation
import launch
import rollout
import video
from engine import Completion
from evaluation import protocol_loop, results, systems
from plumbing import data, runs


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
        engine = Scripted(codec if ids else None, list(script), "seen at 00:00:10", at_once=True)
        worker = rollout.RolloutWorker(engine, engine.codec, systems.source_of(source, args), agent)
        (episode,) = protocol_loop.run(worker, [task], protocol, args.frames[0])
        record = results.record_of(episode, "d", args.frames[0], "on", args)
        return episode, engine.requests, record

    return play


# ------------------------------------------------------------------------------------------------
# All of them


@pytest.mark.parametrize("file, text, wanted", [
    ("time.py:PROMPT[r1]", "PROMPT = {'r1': 'Question: {}\\n{}'}", "does not hold 'What"),
    ("t.txt", "\n", "t.txt: is empty"),  # its disk was full
    ("t.txt", "Question: {question}", "does not hold"),  # no options
    ("t.txt", "{question} {options} Answer {type_fix}.", "holds {type_fix}"),
    ("t.txt", "{question} {options} Put it in \\boxed{answer}, as {\"a\": {}}.", None)])
def test_a_publishers_text_without_the_question_is_refused(toy, tmp_path, file, text, wanted):
    """Sent, it would get answers to no question, and a headline."""
    (tmp_path / file.partition(":")[0]).write_text(text)
    task = {"id": "q", "video": "videos/" + os.listdir(toy / "videos")[0], "type": "mcq",
            "question": "What {place} is it?", "options": ["Fire", "Rain"], "answer": "B"}
    (tmp_path / "d.jsonl").write_text(json.dumps(task) + "\n")
    with Server("<answer>B</answer>") as server:
        done = run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "m",
                          "--data", tmp_path / "d.jsonl", "--video-root", toy, "--frames", 2,
                          "--protocol", "rewatch-r1", "--prompt-file", tmp_path / file,
                          "--out", tmp_path / "out")
    if wanted:
        assert done.returncode == 2 and wanted in done.stderr and not server.asked
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0 and "Rain" in json.dumps(server.asked), done.stderr


def test_settings_of_the_overview_and_of_the_user_turn(play, source, tmp_path):
    source.root = str(tmp_path)
    write(tmp_path / "v.mp4", 4, size=(64, 64))
    (tmp_path / "u.txt").write_text("Look: {question} {options}")
    seen = {}
    for setting in ("top_p=1", "stamps=false", "total_pixels=2048", f"user_file={tmp_path}/u.txt"):
        _, (request,), _ = play(f"--protocol direct --frames 2 --set {setting}",
                                "<answer>B</answer>", task={**TASK, "video": "v.mp4"})
        (item, words), height = request.messages[-1]["content"], request.frames[0].images.shape[1]
        seen[setting.partition("=")[0]] = item["stamp"], height, words["text"][:5]
    assert seen == {"top_p": (None, 64, "Which"), "stamps": ("none", 64, "Which"),
                    "total_pixels": (None, 32, "Which"), "user_file": (None, 64, "Look:")}


# ------------------------------------------------------------------------------------------------
# Two loops


class Babble:
    """Draws its answers from the names and seeds of its requests: calls of every kind, thoughts
    that stay open, answers, failures."""

    max_seqs = 8

    def __init__(self, codec):
        self.codec, self.waiting = codec, []

    def submit(self, request):
        self.waiting.append(request)

    def poll(self):
        done, self.waiting = self.waiting, []
        return [self.complete(request) for request in done]

    def complete(self, request):
        draw = random.Random(f"{request.id} {request.seed} {len(request.expanded)}")
        if draw.random() < 0.05:
            return Completion(request.id, error="down")
        if request.id.count("/") == 4:
            text = draw.choice(["a red square", "", "<think>open", "so</think> blue"])
        else:
            text = draw.choice(["x</think>", "x", "y</think> z"])
            for _ in range(draw.randrange(4)):
                start = draw.randrange(70)
                text += CROP % (start, start + draw.randrange(-1, 9))
            text += draw.choice(["", "<answer>red</answer>"])
        ids = [*chat.encode(self.codec, text), self.codec.eos][: request.max_tokens]
        logps = [-draw.random() for _ in ids]
        return Completion(request.id, ids, logps, chat.decode(self.codec, ids),
                          ids[-1] == self.codec.eos)


@pytest.mark.parametrize("more", [
    {}, {"max_turns": 1, "think_prefix": False}, {"tools": False},
    {"max_model_len": 200, "max_new_tokens": 24}, {"max_parallel": 1, "sub_question": False}])
def test_both_loops_leave_the_same_records(more, toy, codec, source):
    """48 episodes of each kind. ParaVT as it is trained, by training's own loop and as a protocol:
    ids, masks, log-probs, calls, summaries, rewards and what went wrong."""
    tasks = data.read_tasks(str(toy / "rl.jsonl"))
    agent = rollout.AgentConfig(**{"max_model_len": 1024, "max_new_tokens": 128,
                                   "sub_max_new_tokens": 24, "max_turns": 2, **more})

    def records(sampler, **how):
        found = []
        for frames in (4, 8):
            for episode in rollout.run(sampler, tasks, frames, 4, 3, **how):
                row = {**episode.to_dict(), "timing": sorted(episode.timing)}
                row["calls"] = [{**call, "seconds": "seconds" in call} for call in row["calls"]]
                found.append((row, episode.notes["opening"]))
        return sorted(found, key=lambda pair: (pair[0]["K"], pair[0]["group"], pair[0]["sample"]))

    sampler = rollout.RolloutWorker(Babble(codec), codec, source, agent)
    trained = records(sampler)
    played = records(replace(sampler, open_context=protocol_loop.open_chat),
                     play=partial(protocol_loop.play, protocol=protocol_loop.Protocol()))
    assert len(trained) == 48 and trained == played
    found = set()  # all of it came up
    for row, _ in trained:
        found |= {row["status"], *row["finish"], *(call["status"] for call in row["calls"])}
    if not more:
        assert found >= {"ok", "engine_error", "error", "not_run", "stop"}
    if "context" in more:
        assert found >= {"context", "length"}


# ------------------------------------------------------------------------------------------------
# Parsers, and disks that go away


@pytest.mark.parametrize("parse", [systems.parse_zoom, systems.parse_clips])
@pytest.mark.parametrize("text", ["<clip>" * 30000, "<video_zoom>" * 30000 + "</video_zoom>",
                                  "</clip><clip>", "\0",
                                  '<video_zoom>{"segment": [NaN, Infinity], "fps": 1e999}'
                                  "</video_zoom>", "<clip>99999999999:1-2,-,--</clip>"])
def test_no_text_makes_a_parser_raise_or_hang(parse, text):
    for call in parse(text):
        assert call.error or call.name


@pytest.mark.parametrize("name", ["paravt", "paper", "longvt", "conan", "videozoomer"])
@pytest.mark.parametrize("part", ["table", "frames"])
def test_an_episode_whose_disk_went_away_meanwhile_is_played_again(name, part, play, source,
                                                                   monkeypatch):
    """After the overview nothing can be read any more: neither answer nor status is the model's."""
    real = source.load_overview

    def load_overview(spec, task):
        seen = real(spec, task)
        away = Mock(side_effect=video.VideoError("f.mp4", f"{launch.MACHINE}Input/output error"))
        monkeypatch.setattr(*{"table": (source.cache, "table", away),
                              "frames": (source.cache, "frames", away)}[part])
        return seen

    monkeypatch.setattr(source, "load_overview", load_overview)
    monkeypatch.setattr(systems, "source_of", lambda source, args: source)
    episode, _, row = play(f"--protocol {name} --frames 4", *scripts()[name], "<answer>A</answer>")
    assert episode.status == "video_error" and runs.is_retried(row)
    assert launch.MACHINE in row["error"]  # the run ends with 1
