"""
Systems of the paper's table, each played by a script:
python -m pytest tests/all/test_protocols_rest.py -q
"""
import json
import os
import random
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import run_script
from scripted import Server
from test_protocols import (
    CROP,
    TASK,
    crops,
    play,  # noqa: F401
)

import chat
import eval as evaluation
import launch
import rewards
import rollout
import video
from engine import Completion
from evaluation import benchmarks, endpoint, protocol_loop, systems
from plumbing import data

SPAN = {"id": "s", "video": "videos/eval-0000.mp4", "question": "When is it red?", "options": None,
        "answer": [8, 16], "type": "grounding"}


def texts(message):
    """All text of one message."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def kinds(message):
    return [p["type"] for p in message["content"]]


# ------------------------------------------------------------------------------------------------
# All of them


def test_an_endpoint_beside_a_checkpoint_is_sent_messages(toy, tmp_path):
    """--ckpt only counts tokens there: the endpoint has no use for ids."""
    with Server("<answer>B</answer>") as server:
        done = run_script("eval.py", "--preset", "toy", "--engine", "openai", "--base-url",
                          server.url, "--model", "m", "--ckpt", toy / "init", "--data",
                          toy / "eval.jsonl", "--limit", 1, "--frames", 2, "--tools", "on",
                          "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert server.asked and server.asked[0]["messages"][0]["role"] == "system"


@pytest.mark.parametrize("file, text, wanted", [
    ("time.py:PROMPT[r1]", "PROMPT = {'r1': 'Question: {}\\n{}'}", "does not hold 'What"),
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


@pytest.mark.parametrize("text, place", [
    ("Answer {}", "{}"), ("Answer {q[0]}.", "{q[0]}"), ("Answer {q.x}.", "{q.x}"),
    ("Q: [QUESTION]", "[QUESTION]"), ("[EVENT] starts", "[EVENT]"), ("<<<query>>>", "<<<query>>>"),
    ("Put it in \\boxed{}.", None), ('{"arguments": {}}', None), ("Answer [A-D] or [B].", None)])
def test_places_in_any_publishers_form_are_found_in_a_system_text(text, place):
    """The user turn holds the question, so only the place itself tells."""
    task = {"id": "t", "type": "mcq", "question": "What?", "options": ["a", "b"], "answer": "A",
            "video": "v.mp4"}
    opening = partial(protocol_loop.opening, system=text, stamp=None)
    protocol = protocol_loop.Protocol(opening=opening, schema=None)
    if place is None:
        return protocol_loop.check_prompts(protocol, [task], rollout.Agent(tools=False), 1)
    with pytest.raises(launch.UserError) as told:
        protocol_loop.check_prompts(protocol, [task], rollout.Agent(tools=False), 1)
    assert f"holds {place}, which no part" in str(told.value)


def test_a_user_turn_may_be_the_publishers_own(play, tmp_path):
    (tmp_path / "user.txt").write_text("Q {question} of {video}, {duration}?")
    hashes = set()
    for name in ("direct", "videozoomer", "longvt", "rewatch-r1"):
        flags = f"--protocol {name} --frames 2 --user-file {tmp_path}/user.txt"
        _, asked, _ = play(flags, "<answer>B</answer>")
        text = "Q Which {colour} is first? of eval-0000.mp4, 00:01:04?"
        assert texts(asked[0].messages[-1]).strip().startswith(text)
        hashes |= {systems.make_protocol(evaluation.parse_args())[1]}
    assert len(hashes) == 4
    with pytest.raises(launch.UserError, match="--user-file"):
        play(f"--protocol video-r1 --user-file {tmp_path}/user.txt", "B")


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
    {"context": 200, "max_new_tokens": 24},
    {"max_parallel": 1, "dispatch": "sequential", "sub_question": False}])
def test_both_loops_leave_the_same_records(more, toy, codec, source):
    """48 episodes of each kind. ParaVT as it is trained, by training's own loop and as a protocol:
    ids, masks, log-probs, calls, summaries, rewards and what went wrong."""
    tasks = data.read_tasks(str(toy / "rl.jsonl"))
    agent = rollout.Agent(**{"context": 1024, "max_new_tokens": 128, "sub_max_new_tokens": 24,
                             "max_turns": 2, **more})

    def records(sampler, **how):
        found = []
        for frames in (4, 8):
            for episode in rollout.run(sampler, tasks, frames, 4, 3, **how):
                row = {**episode.to_json(), "timing": sorted(episode.timing)}
                row["calls"] = [{**call, "seconds": "seconds" in call} for call in row["calls"]]
                found.append((row, episode.notes["opening"]))
        return sorted(found, key=lambda pair: (pair[0]["K"], pair[0]["group"], pair[0]["sample"]))

    sampler = rollout.Sampler(Babble(codec), codec, source, agent)
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


def test_one_call_a_turn_cuts_a_turn_after_its_first_call(play, codec):
    """--set dispatch=turns: the same policy as a sequential agent. Its second call is not seen; it
    may ask again in its next turn."""
    calls = ['<tool_call>{"name": "crop_video", "arguments": '
             f'{{"start_time": {a}, "end_time": {a + 8}}}}}</tool_call>' for a in (8, 32)]
    script = ["two</think>" + "\n".join(calls), "more</think>" + calls[1] + " and prose",
              "ok</think><answer>red</answer>"]
    e, _, _ = play("--frames 4 --set dispatch=turns", *script, ids=True)
    assert e.turns == ["two</think>" + calls[0], "more</think>" + calls[1], script[2]]
    assert [(c["turn"], c["start"], c["status"]) for c in e.calls] == [
        (0, 8.0, "ok"), (1, 32.0, "ok")]
    assert e.finish == ["call", "call", "stop"]  # cut by the rule, not by --max-new-tokens
    for (start, end), text in zip(e.spans, e.turns):
        said = chat.decode(codec, e.context.ids[start:end], keep_special=True)
        assert said.removesuffix("<|im_end|>") == text
        assert all(e.context.mask[start:end])
    whole = chat.decode(codec, e.context.ids, keep_special=True)
    assert whole.count("<tool_response>") == 2
    assert whole.count("</tool_call><|im_end|>\n") == 2
    text = Completion("x", text="é</think>" + "\n".join(calls))  # an endpoint without ids
    assert protocol_loop.cut_after(codec, text, ("</tool_call>",),
                             "</think>").text == "é</think>" + calls[0]
    assert protocol_loop.cut_after(codec, replace(text, text="no call"),
                             ("</tool_call>",)).text == "no call"
    script = ["all at once</think>" + "\n".join(calls), "ok</think><answer>red</answer>"]
    assert [c["turn"] for c in play("--frames 4", *script, ids=True)[0].calls] == [0, 0]


# ------------------------------------------------------------------------------------------------
# One generation


@pytest.mark.parametrize("name, system, said", [
    ("direct", "final answer between <answer>", "<answer>B</answer>"), ("direct", "", "B"),
    ("reasoning", "Reason between <think>", "<think>A? no.</think><answer>B</answer>"),
    ("video-r1", None, "<think>A?</think><answer>B</answer>"),
    ("videorft", None, "<think>A?</think><answer>B</answer>"), ("qwen3-vl", None, "B"),
    ("videochat-r1", None, "<think>12.0s to 14 it is A</think><answer>B</answer>"),
    ("time-r1", "helpful assistant", "<answer>(B)</answer>"),
    ("rewatch-r1", None,
     "<think>x</think><action>look at A</action><observation>A (A)</observation>"
     "<answer>B</answer>"),
    ("rewatch-r1", None, "<think>x</think><action>A</action><observation>A</observation>B")])
def test_systems_of_one_generation(play, name, system, said):
    episode, asked, record = play(f"--protocol {name} --frames 4", said)
    assert record["score"] == 1.0 and episode.calls == [] and len(asked) == 1
    assert asked[0].tools is None
    messages = asked[0].messages
    assert (system is None) == (messages[0]["role"] == "user")
    assert (not system or system in messages[0]["content"])
    text = texts(messages[-1])
    assert "Which {colour} is first?" in text
    brackets = name in ("time-r1", "videochat-r1")
    assert ("(A) red\n(B) blue" if brackets else "A. red\nB. blue") in text
    assert kinds(messages[-1])[0] == ("text" if name == "videochat-r1" else "video")
    assert ("00:00 to 01:04" in text) == (name == "rewatch-r1")  # the toy video has 64 seconds


def test_time_r1_begins_its_answer_after_an_empty_thought(play, codec):
    _, asked, _ = play("--protocol time-r1 --frames 4", "<answer>(B)</answer>", ids=True)
    assert asked[0].prefill == "<think>\n</think>\n"
    text = chat.decode(codec, asked[0].ids, keep_special=True)
    assert text.endswith("assistant\n<think>\n</think>\n")


def test_native_settings_differ_and_yield_to_flags(monkeypatch):
    def parsed(*flags, data=("--data", "d")):
        monkeypatch.setattr(sys, "argv", ["eval.py", *(data or ()), "--ckpt", "c", *flags])
        return evaluation.parse_args()

    native = parsed("--protocol", "conan")
    uniform = parsed("--protocol", "paper-general")
    assert (native.frames, native.temperature, native.max_new_tokens, native.max_turns) == (
        [16], 1.0, 4000, 2)
    assert (uniform.frames, uniform.temperature, uniform.max_new_tokens, uniform.max_turns) == (
        [64], 0.0, 2048, 3)
    assert parsed("--protocol", "conan", "--frames", "8").frames == [8]
    assert parsed("--protocol", "paper", "--max-turns", "1").max_turns == 1
    assert parsed("--protocol", "paper-direct").tools == ["off"]
    assert parsed("--bench", "all", "--root", "d", data=None).bench == list(
        benchmarks.paper_table()["ParaVT-8B"])
    assert parsed().tools == ["on"]
    for name in systems.protocols():
        assert parsed("--protocol", name).protocol == name


@pytest.mark.parametrize("name, seconds, frames", [
    ("longvt", 31.0, 30), ("videozoomer", 31.0, 16), ("rewatch-r1", 31.0, 62),
    ("longvt", 4000.0, 512), ("videozoomer", 4000.0, 64),
    ("rewatch-r1", 4000.0, 192), ("videozoomer", 0.4, 1), ("conan", 31.0, 16),
    ("direct", 31.0, 64), ("videorft", 31.0, 32), ("video-r1", 31.7, 62), ("video-r1", 1.0, 4),
    ("videochat-r1", 31.0, 62), ("videochat-r1", 4000.0, 768), ("qwen3-vl", 31.0, 62),
    ("qwen3-vl", 4000.0, 512), ("longvt --set overview_fps=0", 31.0, None),
    ("longvt --frames 8", 31.0, 8), ("paper", 31.0, 64), ("paper", 6.3, 0)])
def test_an_overview_is_as_long_as_its_video(name, seconds, frames, source, monkeypatch):
    """A video of 10 frames a second; of some systems, an even number of frames."""
    monkeypatch.setattr(sys, "argv", f"eval.py --data d --ckpt c --protocol {name}".split())
    args = evaluation.parse_args()
    paced = timed(systems.source_of(source, args), seconds, monkeypatch)
    if frames is None:
        with pytest.raises(video.VideoError, match="too short for this system"):
            paced.load({"video": "v", "frames": args.frames[0]})
    else:
        shown = paced.load({"video": "v", "frames": args.frames[0]})
        assert len(shown.seconds) == frames


@pytest.mark.parametrize("name, seconds, wanted", [
    # VideoZoomer: range(0, n, round(fps / 0.5)), beyond 64 np.linspace(0, n - 1, 64, dtype=int)
    ("videozoomer", 7.0, [0, 2, 4, 6]), ("videozoomer", 0.5, [0]),
    ("videozoomer", 400.0, list(np.linspace(0, 3999, 64, dtype=int) / 10)),
    # Qwen3-VL: linspace(0, n - 1, 2 a second).round()
    ("qwen3-vl", 2.0, list(np.linspace(0, 19, 4).round() / 10))])
def test_frames_lie_where_the_publishers_code_takes_them(name, seconds, wanted, source,
                                                         monkeypatch):
    """By the publishers' own expressions, on a video of 10 frames a second."""
    monkeypatch.setattr(sys, "argv", f"eval.py --data d --ckpt c --protocol {name}".split())
    args = evaluation.parse_args()
    paced = timed(systems.source_of(source, args), seconds, monkeypatch)
    assert paced.load({"video": "v", "frames": args.frames[0]}).seconds == pytest.approx(wanted)


def timed(paced, seconds, monkeypatch):
    """A Source -> the same on a video of so many seconds, 10 frames a second, without pictures."""
    starts = np.arange(round(seconds * 10)) / 10
    info = SimpleNamespace(duration=seconds, fps=len(starts) / seconds, height=360, width=640)

    def frames(path, places, *_):
        places = np.array(places, int)
        images = np.zeros((len(places), 32, 32, 3), np.uint8)
        return video.Frames(images, starts[places], "k", ["k"] * len(places))

    monkeypatch.setattr(paced, "cache", SimpleNamespace(index=lambda path: (starts, info),
                                                        frames=frames))
    monkeypatch.setattr(rollout.video, "resolve", lambda *_: "v")
    monkeypatch.setattr(rollout.video, "probe", lambda *_: info)
    return paced


def test_qwens_own_sampling_is_the_default_of_its_protocol(play, monkeypatch):
    """As evaluation/VideoMME/infer_instruct.sh of the publisher sets it."""
    monkeypatch.setattr(sys, "argv", "eval.py --data d --ckpt c --protocol qwen3-vl".split())
    args = evaluation.parse_args()
    assert (args.top_p, args.top_k, args.presence_penalty, args.temperature) == (0.8, 20, 1.5, 0.7)
    assert (args.min_pixels, args.max_pixels, args.total_pixels) == (3584, 401408, 19267584)


def test_time_r1_fills_the_places_of_its_publisher(play, tmp_path):
    (tmp_path / "config.py").write_text(
        "M = {'r1': 'Choose.\\n\\nQuestion: {}\\n{}'}\nG = {'r1': 'Pinpoint \"{}\" now.'}")
    files = [f"{tmp_path}/config.py:M[r1]", f"{tmp_path}/config.py:G[r1]"]
    for task, meant in ((TASK, "Choose.\n\nQuestion: Which {colour} is first?\n(A) red\n(B) blue"),
                        (SPAN, 'Pinpoint "When is it red?" now.'),
                        ({**SPAN, "event": "it is red"}, 'Pinpoint "it is red" now.')):
        _, asked, _ = play("--protocol time-r1 --frames 2", "<answer>B</answer>", task=task,
                           files=files)
        assert texts(asked[0].messages[-1]).strip() == meant


def test_departures_are_told_and_kept(monkeypatch):
    """By --protocols; eval.py also writes them into the summary, for the table's footnotes."""
    for name, system in systems.protocols().items():
        monkeypatch.setattr(sys, "argv", f"eval.py --data d --ckpt c --protocol {name}".split())
        told = systems.describe(evaluation.parse_args())
        assert told.count("\ndeparts ") == len(system.departures)
        assert all(f"departs {text}\n" in told for text in system.departures)


def test_many_frames_are_small_ones(source, monkeypatch):
    """3584 x 28 x 28 pixels for all; never below 16 x 28 x 28, however many."""
    argv = "eval.py --data d --ckpt c --protocol videochat-r1".split()
    monkeypatch.setattr(sys, "argv", argv)
    args = evaluation.parse_args()
    source.min_pixels, source.max_pixels = args.min_pixels, args.max_pixels
    sizes = []
    for seconds in (4.0, 64.0, 4000.0):
        few = timed(systems.source_of(source, args), seconds, monkeypatch)
        few.cache.frames = lambda path, places, *given: sizes.append(given[2]) or video.Frames(
            np.zeros((1, 1, 1, 3)), np.zeros(1), "k", ["k"])
        few.load({"video": "v", "frames": 768})
    # of 640 x 360: as it is; 43,904 pixels at most; 13,171 at most
    assert sizes == [(364, 644), (140, 252), (84, 140)]


def test_pixels_of_frames_are_settings(toy, monkeypatch):
    """--set min_pixels, total_pixels: of a frame at least, of all together at most."""
    def bounds(*flags):
        given = ["eval.py", "--data", str(toy / "eval.jsonl"), "--ckpt", "c", *flags]
        monkeypatch.setattr(sys, "argv", given)
        args = evaluation.parse_args()
        _, source = rollout.agent_settings(args, args.data)
        found = []
        monkeypatch.setattr(rollout.video, "load", lambda *given: found.append(given[3:]))
        systems.source_of(source, args).load({"video": "v", "frames": 64})
        return found[0]

    assert bounds() == (1024, 50176)
    assert bounds("--set", "min_pixels=4096") == (4096, 50176)
    assert bounds("--set", "total_pixels=320000", "min_pixels=2048") == (2048, 10000)


def test_publishers_question_templates_wrap_the_question(play, tmp_path):
    """As they stand in the publishers' files: their own places, a dictionary of endings, a text for
    questions and another for times. No system message."""
    (tmp_path / "bench.py").write_text(
        "Q = ('{Question}\\n' 'Think.')\n"
        "T = {'multiple choice': ' A letter.', 'free-form': ' Say.'}")
    (tmp_path / "chat.py").write_text(
        'QA = """Answer "[QUESTION]" from :[OPTION]."""\nG = """Find "[EVENT]"."""')
    open_task = {**TASK, "type": "open", "options": None, "answer": "blue"}
    for name, task, meant in (
            ("video-r1", TASK, "Which {colour} is first?Options:\nA. red\nB. blue\n\nThink. A"),
            ("videorft", TASK, "Which {colour} is first?\nA. red\nB. blue\n\nThink. A letter."),
            ("videorft", open_task, "Which {colour} is first?\nThink. Say."),
            ("videochat-r1", TASK, 'Answer "Which {colour} is first?" from '
             ":['(A) red', '(B) blue']."),
            ("videochat-r1", {**SPAN, "event": "it is red"}, 'Find "it is red".'),
            ("videochat-r1", SPAN, 'Find "When is it red?".')):
        files = [f"{tmp_path}/chat.py:QA", f"{tmp_path}/chat.py:G"]
        if name != "videochat-r1":
            files = [f"{tmp_path}/bench.py:{place}"
                     for place in ("Q", "T[multiple choice]", "T[free-form]")]
        _, asked, _ = play(f"--protocol {name} --frames 2", "B", task=task, files=files)
        (message,) = asked[0].messages
        assert message["role"] == "user" and texts(message).strip().startswith(meant), name
    with pytest.raises(launch.UserError, match="sets no string T.regression"):
        systems.read_prompts([f"{tmp_path}/bench.py:T[regression]"])


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "mine.txt").write_text("Look. {question}", encoding="utf-8-sig")
    (tmp_path / "mine.py").write_text('T = "Look."', encoding="utf-8-sig")
    read = systems.read_prompts([f"{tmp_path}/mine.txt", f"{tmp_path}/mine.py:T"])
    assert read == ["Look. {question}", "Look."]


def test_a_text_that_knows_no_subtitles_gets_them_first(play, tmp_path, source):
    (tmp_path / "user.txt").write_text("Q: {question}")
    source.subtitles = lambda task, seconds: "hello"
    _, asked, _ = play("--protocol qwen3-vl --frames 2", "B", files=[f"{tmp_path}/user.txt"])
    assert texts(asked[0].messages[0]).startswith("Subtitles:\nhello\n\nQ: Which")


def test_a_record_says_how_many_frames_were_shown(play):
    """The toy video has 64 seconds: K is what was allowed."""
    _, asked, record = play("--protocol videozoomer", "<answer>B</answer>")
    assert record["K"] == 64 and len(record["frame_times"]) == record["cost"]["frames"] == 32
    assert len(asked[0].frames[0].images) == 32


# ------------------------------------------------------------------------------------------------
# crop_video agents


def test_a_call_gets_as_many_frames_as_it_asks_for(play):
    first = "x</think>" + (CROP % (0, 8)).replace("}}", ', "num_frames": 3}}')
    _, asked, _ = play("--set crop_reply=frames --frames 4", first, "x</think>B")
    assert [len(f.images) for f in asked[1].frames] == [4, 3]


@pytest.mark.parametrize("flags, images, videos", [
    ("", 64, 1), ("--protocol paper-direct", 64, 1),
    ("--set crop_reply=frames sub_frames=4 --max-turns 1 --max-parallel 2 --frames 8", 16, 3),
    ("--frames 8", 16, 1), ("--protocol longvt", 512 + 25 * 128, 26),
    ("--protocol videozoomer --frames 64", 64 + 4 * 16, 5), ("--protocol conan", 32, 3)])
def test_the_engine_allows_the_images_that_an_episode_may_hold(flags, images, videos, monkeypatch):
    """Overview and windows stand in one context where frames come back: a limit of 64 ended the run
    at its first crop."""
    made = []

    def engine(ckpt, codec, limits):
        made.append((limits.max_frames, limits.max_videos))
        return SimpleNamespace()

    monkeypatch.setattr(rollout, "VllmEngine", engine)
    for channel in ("image", "video") if "paper" not in flags else ("image", "image"):
        monkeypatch.setattr(sys, "argv", ["eval.py", "--data", "d", "--ckpt", "c", "--channel",
                                          channel, *flags.split()])
        args = evaluation.parse_args()
        codec = chat.ChatProcessor.__new__(chat.ChatProcessor)
        codec.channel = channel
        evaluation.make_engine([], args, "c", codec, systems.make_protocol(args)[0])
    assert made[0] == (images, 1) and made[1][1] == videos
    assert made[1][0] == max(args.sub_frames, 64 if args.frames == ["gated"] else args.frames[0])


def test_frames_or_summaries_stamps_or_none_are_choices(play):
    _, asked, _ = play("--frames 4", crops((0, 8)), "x</think><answer>B</answer>")
    assert [m["role"] for m in asked[-1].messages][-1] == "tool"
    assert asked[-1].messages[-1]["content"] == "seen at 00:00:10"
    assert "stamp" not in asked[0].messages[1]["content"][0] and asked[0].prefill == "<think>\n"
    _, asked, _ = play("--frames 4 --set crop_reply=frames stamps=false", crops((0, 8)),
                       "x</think><answer>B</answer>")
    assert kinds(asked[-1].messages[-1]) == ["video", "text", "text", "text"]
    assert asked[0].messages[1]["content"][0]["stamp"] == "none"


def test_longvt_cuts_a_window_at_the_end_of_the_video(play):
    """A tool message each: frames and a sentence, or the reason."""
    first = "x</think>" + "\n".join(CROP % w for w in ((0, 4), (-1, 4), (60, 70), (90, 99)))
    episode, asked, record = play("--protocol longvt --frames 4", "<think>" + first,
                                  "<think>so</think><answer>B</answer>")
    assert record["score"] == 1.0
    assert [c["status"] for c in episode.calls] == ["ok", "error", "ok", "error"]
    replies = asked[1].messages[1:]
    assert [m["role"] for m in replies] == ["assistant"] + ["tool"] * 4
    assert kinds(replies[1]) == ["video", "text"]
    assert "below 0" in replies[2]["content"] and kinds(replies[3]) == ["video", "text"]
    assert replies[4]["content"].startswith("error: ")
    assert asked[0].messages[0]["role"] == "user"
    assert "Video path for this video is: eval-0000.mp4" in texts(asked[0].messages[0])
    (schema,) = asked[0].tools
    assert schema["function"]["parameters"]["required"] == ["video_path", "start_time", "end_time"]
    assert "Returns frames" in schema["function"]["description"]


@pytest.mark.parametrize("name, tokens", [("longvt", 49152), ("videozoomer", 4096),
                                          ("qwen3-vl", 32768)])
def test_long_thoughts_have_their_tokens(monkeypatch, name, tokens):
    """And the context holds them beside the frames."""
    monkeypatch.setattr(sys, "argv", f"eval.py --data d --ckpt c --protocol {name}".split())
    args = evaluation.parse_args()
    assert args.max_new_tokens == tokens <= args.context


def test_an_endpoint_sends_frames_in_a_tool_message_as_parts_of_one_user_turn(play):
    _, asked, _ = play("--protocol longvt --frames 4",
                       "<think>x</think>" + CROP % (0, 2) + CROP % (5, 3), "<answer>B</answer>")
    wire = endpoint.OpenAIEngine("http://127.0.0.1:9", "m").wire(asked[1])
    assert [m["role"] for m in wire] == ["user", "assistant", "user"]
    parts = wire[-1]["content"]
    assert parts[0] == {"type": "text", "text": "<tool_response>\n"}
    assert sum(p["type"] == "image_url" for p in parts) == 2
    assert "".join(p.get("text", "") for p in parts).count("<tool_response>\n") == 2
    assert "error" in parts[-2]["text"]


def test_an_endpoint_may_get_the_overview_as_one_video(play):
    """vLLM's own reader makes of it the frames that we sent, at their times; windows and times in a
    protocol's own form stay images."""
    engine = endpoint.OpenAIEngine("http://127.0.0.1:9", "m", video_item=True, image_cap=1)
    _, asked, _ = play("--protocol longvt --frames 40", CROP % (0, 2), "<answer>B</answer>")
    body = engine.body(asked[1])
    url, *rest = [part[part["type"]]["url"] for m in body["messages"] for part in m["content"]
                  if isinstance(part, dict) and part["type"].endswith("_url")]
    assert url.startswith("data:video/jpeg;base64,") and len(rest) == 1  # capped
    told = body["media_io_kwargs"]["video"]
    seconds = asked[1].frames[0].seconds
    assert told["frames_indices"] == [round(1000 * second) for second in seconds]
    assert 63 < told["duration"] < 65
    io = pytest.importorskip("vllm.multimodal.media")
    reader = io.VideoMediaIO(io.ImageMediaIO(), **told)
    frames, meta = reader.load_base64(*read_url(url)).media
    assert frames.shape == asked[1].frames[0].images.shape and meta["fps"] == 1000.0
    for flags in ("videozoomer --frames 4", "conan --frames 1"):
        _, asked, _ = play(f"--protocol {flags}", "<answer>B</answer>")
        assert "media_io_kwargs" not in engine.body(asked[0])
        assert engine.body(asked[0])["messages"] == endpoint.OpenAIEngine(
            "http://127.0.0.1:9", "m", image_cap=1).wire(asked[0])


def read_url(url):
    """data:TYPE;base64,DATA -> (TYPE, DATA), as vLLM splits it."""
    head, _, data = url.partition(",")
    return head.removeprefix("data:").partition(";")[0], data


# ------------------------------------------------------------------------------------------------
# Conan, VideoZoomer


def test_conan_gets_eight_new_frames_a_round(play):
    """16 s and 47 s of clips: two frames and six; seen frames never come again; the question is
    there in every round, and the third is told that it is the last."""
    script = ["<score>3</score><think>x</think><clip>00:00:00-00:00:16, 00:00:16-00:01:03</clip>"
              "<answer></answer>",
              "<score>3</score><think>x</think><clip>00:00:05-00:00:10</clip><answer>A</answer>",
              "<think>now</think><answer>B</answer>"]
    episode, asked, record = play("--protocol conan --frames 4", *script)
    assert record["score"] == 1.0 and len(asked) == 3
    assert [m["content"][0].get("stamp") for m in asked[0].messages] == ["clock"]
    assert asked[0].messages[0]["role"] == "user"
    shown = [[float(t) for t in f.seconds] for f in asked[2].frames]
    assert len(shown[1]) == len(shown[2]) == 8
    assert len({t for some in shown for t in some}) == 4 + 8 + 8
    assert sum(t < 16 for t in shown[1]) == 2 and episode.calls[0]["summary"] == "2 frames"
    assert "last frames" in texts(asked[2].messages[-1])
    assert "clips you asked for" in texts(asked[1].messages[-1])
    assert all("Which {colour} is first?" in texts(m) for m in asked[2].messages[::2])
    # empty, or not in its form: done
    for clip in ("<clip></clip>", "<clip>5-10</clip>", "<clip>nonsense</clip>", "",
                 "<clip>00:00:10-00:00:05</clip>", "<clip>00:00:05-00:00:10"):
        _, asked, record = play("--protocol conan --frames 4", f"{clip}<answer>B</answer>")
        assert len(asked) == 1 and record["score"] == 1.0


def test_conan_has_texts_of_its_own_for_questions_without_options(play, tmp_path):
    """Three rounds each; options stand in one line."""
    files = []
    for n in range(6):
        (tmp_path / f"{n}").write_text(f"Text {n}: {{question}} {{options}}")
        files.append(str(tmp_path / f"{n}"))
    clip = "<clip>00:00:05-00:00:10</clip>"
    open_task = {**TASK, "type": "open", "options": None, "answer": "blue"}
    for task, numbers, options in ((TASK, (0, 1, 2), "A. red, B. blue"),
                                   (open_task, (3, 4, 5), ""), (SPAN, (3, 4, 5), "")):
        _, asked, _ = play("--protocol conan --frames 4", clip, clip, "<answer>B</answer>",
                           task=task, files=files)
        said = [texts(m).strip() for m in asked[-1].messages if m["role"] == "user"]
        assert said == [f"Text {n}: {task['question']} {options}".strip() for n in numbers]
        _, asked, _ = play("--protocol conan --frames 4", clip, "<answer>B</answer>", task=task)
        assert all(("Options: A. red, B. blue" in texts(m)) == (task is TASK)
                   for m in asked[-1].messages if m["role"] == "user")
    with pytest.raises(launch.UserError, match="takes 6"):
        play("--protocol conan", "B", files=files[:3])


@pytest.mark.parametrize("clips, rate, shown, frames", [
    ([(5, 10)], 25, (), 8), ([(5, 10)], 1, (), 6 + 2), ([(5, 10)], 1, range(5, 11), 8),
    ([(5, 6), (20, 40)], 25, (), 8), ([(n, n + 1) for n in range(12)], 25, (), 8),
    ([(500, 510)], 25, (), 8), ([(5, 10)], 0.1, (), 6), ([(0, 60)], 1, range(60), 0)])
def test_conan_clips_are_read_at_the_videos_rate(clips, rate, shown, frames):
    """5 to 10 s at 25 frames a second are eight frames of it; never none while any is unseen."""
    starts = [n / rate for n in range(int(60 * rate))]
    seen = SimpleNamespace(seconds=list(shown))
    episode = SimpleNamespace(context=SimpleNamespace(frames=[seen]), notes={})
    calls = [rewards.ToolCall("clip", float(a), float(b), None, None) for a, b in clips]
    records = [{} for _ in calls]
    times = systems.conan_times(records, calls, episode, starts)
    assert len(times) == frames and times == sorted(set(times)) and not set(times) & set(shown)
    if rate == 25 and clips == [(5, 10)]:
        assert times[0] == 5.0 and times[-1] == 10.0 and records[0]["summary"] == "8 frames"


@pytest.mark.parametrize("said, status, why", [
    ('<video_zoom> {"segment": [8, 16], "fps": 2} </video_zoom>', "ok",
     ""), ('<video_zoom>{"segment": [8, 16], "fps": 3}</video_zoom>', "error", "24 frames"),
    ('<video_zoom>{"segment": [16, 8], "fps": 1}</video_zoom>', "error",
     "start < end"), ("<video_zoom>what</video_zoom>", "error", "expected"),
    ('<video_zoom>{"segment": [1, 1e999], "fps": 1}</video_zoom>', "error",
     ""), ('<video_zoom>{"segment": [100, 105], "fps": 1}</video_zoom>', "error",
     "begins after the end"),
    ('<video_zoom>{"segment": ["00:08", "00:12"], "fps": 0.1}</video_zoom>', "error",
     "no frame"), ('<video_zoom>[]</video_zoom>', "error", "expected")])
@pytest.mark.parametrize("ids", [False, True])
def test_videozoomer_zooms_once_a_turn(play, codec, said, status, why, ids):
    script = ["<think>see</think>" + said + " and <answer>\\boxed{A}</answer>",
              "<think>ok</think><answer> \\boxed{B} </answer>"]
    episode, asked, record = play("--protocol videozoomer --frames 4 --max-turns 1", *script,
                                  ids=ids)
    assert record["score"] == 1.0 and [c["status"] for c in episode.calls] == [status]
    assert why in episode.calls[0]["summary"]
    # what follows the call was never said
    assert episode.turns[0].endswith("</video_zoom>") and asked[0].stop == ("</video_zoom>",)
    reply = texts(asked[1].messages[-1])
    assert reply.count("<tool_response>") == reply.count("</tool_response>") == 1
    assert reply.endswith("Do not zoom again: answer now.")
    assert ("video" in kinds(asked[1].messages[-1])) == (status == "ok")
    assert (status == "ok" or "went wrong" in reply)
    if ids:
        text = chat.decode(codec, asked[0].ids, keep_special=True)
        assert "<frame0_time" in text and "<frame3_time63.00s>" in text


@pytest.mark.parametrize("parse", [systems.parse_zoom, systems.parse_clips])
@pytest.mark.parametrize("text", ["<clip>" * 30000, "<video_zoom>" * 30000 + "</video_zoom>",
                                  "</clip><clip>",
                                  "\0",
                                  '<video_zoom>{"segment": [NaN, Infinity], "fps": 1e999}'
                                  "</video_zoom>", "<clip>99999999999:1-2,-,--</clip>"])
def test_no_text_makes_a_parser_raise_or_hang(parse, text):
    for call in parse(text):
        assert call.error or call.name


# ------------------------------------------------------------------------------------------------
# Prompts of publishers


def test_a_publishers_template_is_filled_as_its_code_would(play, tmp_path):
    """ParaVT's own text holds the schema and an example with doubled braces; a schema in the text
    is not declared once more."""
    agent = ("Tools:\n<tools>\n{tool_schema}\n</tools>\n"
             '{{"name": "crop_video", "arguments": {{"end_time": 10}}}}')
    plain = 'Say {"answer": {"x": 1}} or {{}}'
    (tmp_path / "driver.py").write_text(f"AGENT = {agent!r}\nPLAIN = {plain!r}\n")
    given = f"--frames 4 --set crop_reply=frames --prompt-file {tmp_path}/driver.py:AGENT"
    _, asked, _ = play(given, crops((0, 8)), "x</think>B")
    lines = asked[0].messages[0]["content"].splitlines()
    assert json.loads(lines[2])["function"]["parameters"]["required"][0] == "video_path"
    assert json.loads(lines[4]) == {"name": "crop_video", "arguments": {"end_time": 10}}
    assert asked[0].tools is None and len(asked) == 2
    assert "video path for this video is: eval-0000.mp4" in texts(asked[0].messages[1])
    _, asked, _ = play(f"--frames 4 --prompt-file {tmp_path}/driver.py:PLAIN", "x</think>B")
    assert asked[0].messages[0]["content"] == plain
    assert asked[0].tools


@pytest.mark.parametrize("text, meant", [
    ("{{a}} {field}", "{a} {field}"), ("{{a}}", "{{a}}"), ("{field} {", "{field} {"),
    ("{field} {}", "{field} {}"), ('{"json": 1}', '{"json": 1}'), ("", ""), (None, None)])
def test_braces_are_single_where_a_text_is_a_template(text, meant):
    assert systems.single_braces(text) == meant


def test_prompts_are_read_from_a_publishers_file_and_hashed(play, tmp_path, monkeypatch):
    (tmp_path / "driver.py").write_text(
        "import os\nos.abort()\nSYSTEM = ('You are a ' \n 'watcher {x}.')\n"
        "OTHER = SYSTEM + 'x'\n")
    (tmp_path / "user.txt").write_text("Q: {question} O: {options} {unknown} {\"a\": 1}")
    _, asked, _ = play(f"--protocol direct --frames 4 --prompt-file {tmp_path}/driver.py:SYSTEM",
                       "B")
    assert asked[0].messages[0]["content"] == "You are a watcher {x}."
    _, asked, _ = play(f"--protocol rewatch-r1 --frames 4 --prompt-file {tmp_path}/user.txt", "B")
    filled = 'Q: Which {colour} is first? O: A. red\nB. blue {unknown} {"a": 1}'
    assert texts(asked[0].messages[0]).strip() == filled
    _, asked, _ = play(f"--frames 4 --prompt-file {tmp_path}/driver.py:SYSTEM", "x</think>B")
    assert asked[0].messages[0]["content"] == "You are a watcher {x}." and asked[0].tools
    hashes = []
    for flags in ([], ["--prompt-file", f"{tmp_path}/driver.py:SYSTEM"]):
        monkeypatch.setattr(sys, "argv", ["eval.py", "--data", "d", "--ckpt", "c", *flags])
        hashes.append(systems.make_protocol(evaluation.parse_args())[1])
    assert len(set(hashes)) == 2
    for flags, why in (("driver.py:NONE", "sets no string NONE"),
                       ("driver.py:OTHER", "driver.py:OTHER"), ("none.txt", "No such file")):
        with pytest.raises(launch.UserError, match=why):
            systems.read_prompts([f"{tmp_path}/{flags}"])
    given = "eval.py --data d --ckpt c --protocol conan --prompt-file".split()
    monkeypatch.setattr(sys, "argv", [*given, f"{tmp_path}/user.txt"])
    with pytest.raises(launch.UserError, match="takes 6: texts made"):
        systems.make_protocol(evaluation.parse_args())


@pytest.mark.parametrize("name, call", [("conan", "<clip>00:00:01-00:00:05</clip>"),
                                        ("videozoomer",
                                         '<video_zoom>{"segment": [1, 3], "fps": 1}</video_zoom>'),
                                        ("longvt", "<think>x</think>" + CROP % (0, 2)),
                                        ("paravt", crops((0, 2)))])
def test_an_agent_that_never_answers_is_stopped_after_its_rounds(play, name, call):
    episode, asked, record = play(f"--protocol {name} --frames 4", call)
    rounds = systems.protocols()[name].native.get("max_turns", 3)
    assert len([r for r in asked if r.id.count("/") == 3]) == rounds + 1 and record["score"] == 0.0
    assert episode.calls[-1]["status"] == "not_run"
