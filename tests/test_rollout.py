"""
Tests of rollout.py: python -m pytest tests/test_rollout.py -q

Episodes run against a scripted engine: it answers each request with a text that the test chose, so
that the protocol is tested without a model. Real engines are in test_engine.py, endpoints in
test_endpoint.py.
"""
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from conftest import ROOT, run_script
from reference import make_engine

from scripted import (  # isort: skip
    AGENT, ANSWER, Scripted, call, calls, play, play_one, text_of, turn_of, window_of)

import chat
import grpo
import rewards
import rollout
import video
from agent_tools import TOOLS
from engine import Completion

pytestmark = pytest.mark.usefixtures("one_thread")


def runs(flags):
    """[start, end) of every run of ones."""
    return np.flatnonzero(np.diff([0, *flags, 0])).reshape(-1, 2).tolist()


# ------------------------------------------------------------------------------------------------
# Prompts


def test_options_are_lettered_once():
    """A data set that labels its own options must not show them as 'A. A. cat'."""
    for options in (["cat", "dog", "ox"], ["A. cat", "B. dog", "C. ox"],
                    ["(A) cat", "(B) dog", "C) ox"]):
        text = rollout.question_text({"question": "Which?", "options": options, "type": "mcq"})
        assert text.split("\n") == ["", "Which?", "A. cat", "B. dog", "C. ox",
                                    rollout.ANSWER_STYLES["mcq"]]
    text = rollout.question_text({"question": "Who", "options": ["A. Milne", "Poe"], "type": "mcq"})
    assert "\nA. A. Milne\nB. Poe\n" in text  # a name, not a label


# ------------------------------------------------------------------------------------------------
# Ids: what the trainer gets is what the template would have written


SCRIPTS = {
    "direct": [(ANSWER, 0)], "three calls": [(calls((0, 8), (16, 24), (40, 48)), 3), (ANSWER, 0)],
    "one call": [(calls((0, 8)), 1), (ANSWER, 0)],
    "two tool turns": [(calls((0, 8), (16, 24)), 2), (calls((40, 48)), 1), (ANSWER, 0)]}


def rendered(codec, task, source, num_frames, turns, response):
    """The conversation through the chat template and the tokenizer, the whole text at once -> ids.

    turns: assistant texts with their thought's opening tag. response: --crop-response. Nothing of
    model.py is used.
    """
    def parts(**spec):
        seconds = video.load({"video": task["video"], **spec}, source.root).seconds
        return [p for s in seconds
                for p in ({"type": "text", "text": f"<{s:.1f} seconds>"}, {"type": "image"})]

    system, user = rollout.main_messages(task, num_frames, crop_response=response)
    messages = [system, {**user, "content": parts(frames=num_frames) + [user["content"][1]]}]
    for text in turns:
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": "a red square" if response == "summary" else parts(
            start=c.arguments["start"], end=c.arguments["end"], fps=1.0)}
            for c in rewards.parse_tool_calls(text, TOOLS, False)]
    text = codec.processor.apply_chat_template(messages, tools=rollout.tool_schema(response),
                                               tokenize=False)
    return codec.tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("response", ["summary", "frames"])
def test_ids_of_an_episode_are_those_of_the_rendered_chat(script, prefix, response, codec, tasks,
                                                          frames_of):
    """Ids grow piece by piece; wherever sampled text is tokenised to itself they must equal the
    template's own rendering, or the policy is trained on headers that inference never shows it."""
    turns = SCRIPTS[script]
    engine = Scripted(codec, [text if prefix else "<think>\n" + text for text, _ in turns])
    agent = replace(AGENT, think_prefix=prefix, crop_response=response)
    episode = play_one(engine, tasks, frames_of, agent, frames=8)
    assert episode.status == "ok" and episode.executed() == sum(n for _, n in turns)
    assert len(engine.subs()) == (episode.executed() if response == "summary" else 0)
    want = rendered(codec, tasks[0], frames_of, 8, ["<think>\n" + t for t, _ in turns], response)
    assert text_of(codec, episode.context.ids) == text_of(codec, want)
    assert episode.context.ids == want


def test_the_agent_is_told_what_a_call_returns():
    for response, schema, prompt in (("summary", "a short text summary", "a short summary of"),
                                     ("frames", "frames of it", "frames of its")):
        assert f"Returns {schema}" in json.dumps(rollout.tool_schema(response))
        assert f"returns {prompt}" in rollout.system_prompt(True, response)


def test_a_sub_agent_sees_its_window_and_the_question(codec, tasks, frames_of):
    """A summary that does not know the question cannot help to answer it, and its times must be the
    video's own."""
    engine = Scripted(codec, [calls((16, 24)), ANSWER])
    play_one(engine, tasks, frames_of)
    (request,) = engine.subs()
    text = text_of(codec, request.ids)
    assert tasks[0]["question"] in text and "16 to 24 seconds" in text and "crop_video" not in text
    assert request.items[0].seconds == [16.0 + t for t in range(8)]
    assert request.expanded.count(codec.image_pad) == 8
    assert request.expanded[-1] == chat.encode(codec, "<|im_start|>assistant\n")[-1]


# ------------------------------------------------------------------------------------------------
# Masks, spans, log-probs


def test_mask_covers_sampled_tokens_only(codec, tasks, frames_of):
    """Forced prefix, glue and tool responses are not the policy's words: no gradient may reach
    them."""
    engine = Scripted(codec, [calls((0, 8), (16, 24), (40, 48)), ANSWER])
    episode = play_one(engine, tasks, frames_of)
    context = episode.context
    assert len(context.ids) == len(context.mask) == len(context.logps)
    assert runs(context.mask) == episode.spans and len(episode.spans) == 2
    for (start, end), said in zip(episode.spans, [calls((0, 8), (16, 24), (40, 48)), ANSWER]):
        assert text_of(codec, context.ids[start:end]) == said + "<|im_end|>"
        assert context.logps[start:end] == [-(n + 1) / 7 for n in range(end - start)]
        # forced, so in no span
        assert text_of(codec, context.ids[:start]).endswith("<|im_start|>assistant\n<think>\n")
    assert all(logp == 0.0 for logp, flag in zip(context.logps, context.mask) if not flag)
    between = text_of(codec, context.ids[episode.spans[0][1]:episode.spans[1][0]])
    assert between.count("<tool_response>") == 3 and "</think>" not in between
    assert episode.turns == [calls((0, 8), (16, 24), (40, 48)), ANSWER]
    assert episode.finish == ["stop", "stop"]


def test_format_credit_lies_on_the_tags_and_the_end_of_each_turn(codec, tasks, frames_of):
    """Selective Anchoring credits these places of context.ids and no others."""
    episode = play_one(Scripted(codec, [calls((0, 8)), ANSWER]), tasks, frames_of)
    found = ["".join(text_of(codec, [episode.context.ids[t]]) for t in episode.struct
                     if start <= t < end) for start, end in episode.spans]
    tags = ["</think>", "<tool_call>", "</tool_call>"], ["</think>", "<answer>", "</answer>"]
    assert [text.split() for text in found] == [["".join(names) + "<|im_end|>"] for names in tags]


def test_a_turn_cut_off_by_its_length_is_closed_by_an_unsampled_token(codec, tasks, frames_of):
    engine = Scripted(codec, [calls((0, 8)) + " a red square" * 200, ANSWER])
    episode = play_one(engine, tasks, frames_of, replace(AGENT, max_new_tokens=80))
    end = episode.spans[0][1]
    assert episode.finish == ["length", "stop"] and end - episode.spans[0][0] == 80
    assert codec.eos not in episode.context.ids[episode.spans[0][0]:end]
    assert episode.context.ids[end] == codec.eos and episode.context.mask[end] == 0
    glue = text_of(codec, episode.context.ids[end:])
    assert glue.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_the_next_request_holds_exactly_what_was_sampled(codec, tasks, frames_of):
    """Sampled ids may be a split the tokenizer would not choose; decoding and encoding them again
    would change them."""
    letters = [chat.encode(codec, c)[0] for c in "red"]
    odd = chat.encode(codec, calls((0, 8)) + "\n") + letters + [codec.eos]
    assert chat.encode(codec, "red") != letters

    def main(request):
        if turn_of(request):
            return ANSWER
        return Completion(request.id, odd, [-1.0] * len(odd), chat.decode(codec, odd), True)

    engine = Scripted(codec, main)
    episode, (first, second) = play_one(engine, tasks, frames_of), engine.mains()
    assert second.ids[: len(first.ids) + len(odd)] == first.ids + odd
    assert second.expanded[: len(first.expanded) + len(odd)] == first.expanded + odd
    assert episode.context.ids[: len(second.expanded)] == second.expanded


# ------------------------------------------------------------------------------------------------
# Calls and responses


def responses(codec, episode, turn=0):
    """Text of each response after a turn, and the whole glue."""
    end = episode.spans[turn + 1][0] if turn + 1 < len(episode.spans) else None
    glue = text_of(codec, episode.context.ids[episode.spans[turn][1]:end])
    return [x.split("\n</tool_response>")[0] for x in glue.split("<tool_response>\n")[1:]], glue


def test_every_call_gets_its_own_response_in_call_order_in_one_user_turn(codec, tasks, toy):
    """Good or bad, every call is answered, and the answers come as ONE user turn with ONE
    generation prompt after it."""
    class Broken(rollout.VideoSource):
        def load(self, spec):
            if spec.get("start") == 30:
                raise video.VideoError(spec["video"], "it is broken here")
            return super().load(spec)

    def sub(request):
        return f"I saw {window_of(request)[0]:g}"

    written = [call(0, 8), "<tool_call>{not json</tool_call>",
               '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>', call(9, 5),
               *map(call, (60, 100, 40, 30, "nan", 16), (500, 120, 48, 34, 5, 24))]
    engine = Scripted(codec, ["look\n</think>\n" + "\n".join(written), ANSWER], sub, newest_first=1)
    episode = play_one(engine, tasks, Broken(str(toy), video.FrameCache()))
    got, glue = responses(codec, episode)
    assert episode.status == "video_error"  # of one call; the episode went on
    assert len(got) == len(episode.calls) == 10 and got == [c["summary"] for c in episode.calls]
    wanted = ["I saw 0", "not valid JSON", "unknown tool 'zoom'", "reversed", "I saw 60",
              "holds nothing of the video", "I saw 40",
              "it is broken here", "is not a time", "not run: at most 5"]
    for text, part in zip(got, wanted):
        assert part in text
    assert len(set(got)) == 10
    assert [c["status"] for c in episode.calls] == ["ok", "error", "error", "error", "ok", "error",
        "ok", "video_error", "error", "not_run"]
    assert all(text.startswith("error: ") for text, c in zip(got, episode.calls)
               if c["status"] not in ("ok", "not_run"))
    assert glue.count("<|im_start|>user") == glue.count("<|im_start|>assistant") == 1
    assert glue.count("<|im_start|>") == 2 and glue.count("<|im_end|>") == 1
    assert glue.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert len(engine.subs()) == 3  # those whose frames could be read, of the first five good calls
    clamped = next(r for r in engine.subs() if window_of(r)[0] == 60)
    assert clamped.items[0].seconds[0] >= 60 and clamped.items[0].seconds[-1] < 64
    # what the sub-agent reads is what it sees, not what was asked for
    assert "Window: 60 to 64 seconds" in text_of(codec, clamped.ids)
    assert (60.0, 64.0) in [(c["start"], c["end"]) for c in episode.calls]
    # by its name another tool's call is told apart; one that cannot be read has none
    assert [c["name"] for c in episode.calls] == ["crop_video", "", "zoom"] + 7 * ["crop_video"]


def test_a_window_that_does_not_decode_is_no_fault_of_the_policy(codec, tasks, toy):
    """The episode goes on, is counted as failed, and is not trained on."""
    class Damaged(rollout.VideoSource):
        def load(self, spec):
            if "start" in spec:
                raise video.VideoError(spec["video"], "its bytes are damaged")
            return super().load(spec)

    engine = Scripted(codec, [calls((0, 8)), ANSWER])
    source = Damaged(str(toy), video.FrameCache())
    (episode,) = rollout.run(rollout.RolloutWorker(engine, codec, source, AGENT), tasks[:1], 4)
    assert episode.status == "video_error" and "its bytes are damaged" in episode.error
    assert episode.turns[-1] == ANSWER and grpo.group_by_prompt([episode]) == []
    good = replace(episode, status="ok")
    assert grpo.group_by_prompt([good]) == [[good]]


def test_an_error_of_the_machine_ends_the_run_and_names_the_sample(codec, tasks, toy):
    class Gone(rollout.VideoSource):
        def load(self, spec):
            raise OSError(5, "Input/output error")

    source = Gone(str(toy), video.FrameCache())
    error = pytest.raises(OSError, play_one, Scripted(codec, [ANSWER]), tasks, source)
    assert error.value.__notes__ == [f"sample {tasks[0]['id']}"]


def test_an_episode_always_ends_on_a_sampled_turn(codec, tasks, frames_of):
    """max_turns counts tool turns; one more turn must answer, and what it still calls is not
    run."""
    engine = Scripted(codec, lambda r: calls((8 * turn_of(r), 8 * turn_of(r) + 8)))
    episode = play_one(engine, tasks, frames_of, replace(AGENT, max_turns=2))
    assert len(episode.turns) == len(engine.mains()) == 3 and len(engine.subs()) == 2
    assert [c["status"] for c in episode.calls] == ["ok", "ok", "not_run"]
    assert episode.context.mask[-1] == 1 and episode.context.ids[-1] == codec.eos
    assert episode.spans[-1][1] == len(episode.context.ids)
    assert episode.executed() == 2 and sum(call["parseable"] for call in episode.calls) == 3


def test_the_context_is_never_overrun_and_never_ends_on_a_response(codec, tasks, frames_of):
    """Every size from too small for the prompt up to ample: a step of one token must not open a gap
    anywhere."""
    full = play_one(Scripted(codec, [calls((0, 8)), ANSWER]), tasks, frames_of)
    prompt, ends, seen = full.spans[0][0], len(full.context.ids), Counter()
    for size in range(prompt - 4, ends + 3):
        engine = Scripted(codec, [calls((0, 8)), ANSWER])
        episode = play_one(engine, tasks, frames_of, replace(AGENT, max_model_len=size))
        seen[episode.status] += 1
        assert episode.status in ("ok", "context")
        assert (episode.status == "ok") == (episode.error is None)
        assert all(1 <= r.max_tokens <= size - len(r.expanded) for r in engine.requests)
        assert len(episode.context.ids) <= max(size, prompt)
        if episode.turns:
            assert episode.context.mask[-1] == 1, size
            assert runs(episode.context.mask) == episode.spans
        else:
            assert episode.status == "context" and not engine.requests
    assert seen["ok"] and seen["context"]


# ------------------------------------------------------------------------------------------------
# K


def test_a_group_shares_budget_frames_and_prompt(codec, tasks, toy, opened):
    source = rollout.VideoSource(str(toy), video.FrameCache())
    engine = Scripted(codec, [calls((0, 8)), ANSWER])
    episodes = play(engine, tasks, source, frames="gated", group=4, step=3)
    assert len(episodes) == 4 * len(tasks) and len({e.num_frames for e in episodes}) > 1
    for i in range(0, len(episodes), 4):
        group = episodes[i:i + 4]
        first, k = group[0].context, rollout.draw_num_frames("gated", 0, 3, group[0].task["id"])
        prompt = first.ids[: group[0].spans[0][0]]
        assert [e.num_frames for e in group] == [k] * 4
        assert [e.sample for e in group] == [0, 1, 2, 3] and len({e.group for e in group}) == 1
        assert all(e.context.ids[: e.spans[0][0]] == prompt
                   and e.context.items[0].key == first.items[0].key for e in group)
        # K reaches the decoder and the prompt, not only the record.
        assert prompt.count(codec.image_pad) == k
        assert k == len(first.items[0].seconds) == len(first.frames[0].images)
    assert len({e.group for e in episodes}) == len(tasks)
    # once for the times of a film, once for all frames of one so small
    assert len(opened) == 2 * len(tasks)
    # members differ by their seeds alone
    assert len({r.seed for r in engine.requests}) == len(engine.requests)


@pytest.mark.process
def test_gated_frames_is_the_same_in_every_process():
    """Python's own hash of a string is salted per process: ranks would disagree about K."""
    code = "[rollout.draw_num_frames('gated', 7, s, f't-{i}') for s in range(3) for i in range(40)]"
    done = subprocess.run([sys.executable, "-c", f"import rollout; print({code})"], text=True,
                          capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert json.loads(done.stdout) == eval(code), done.stderr


def test_gated_frames_is_uniform_and_drawn_anew_for_each_step_seed_and_task():
    draws = Counter(rollout.draw_num_frames("gated", 0, 5, f"task-{i}") for i in range(5000))
    assert set(draws) == {4, 8, 16, 32, 64} and all(900 < n < 1100 for n in draws.values())
    steps, seeds = ({rollout.draw_num_frames("gated", *key, "task") for key in keys}
                    for keys in ([(0, s) for s in range(60)], [(s, 0) for s in range(60)]))
    assert steps == seeds == {4, 8, 16, 32, 64}


# ------------------------------------------------------------------------------------------------
# The scheduler


def test_no_episode_waits_for_another(codec, tasks, frames_of):
    """While one main turn is slow, another episode fans out, gathers and finishes: there is no
    barrier between phases."""
    fast = f"0/{tasks[1]['id']}/0"
    engine = Scripted(codec, [calls((0, 8), (8, 16)), ANSWER],
                      hold=lambda r: tasks[0]["id"] in r.id and f"{fast}/1" not in engine.answered)
    done = list(rollout.run(rollout.RolloutWorker(engine, codec, frames_of, AGENT), tasks[:2], 4))
    assert [e.task["id"] for e in done] == [tasks[1]["id"], tasks[0]["id"]]
    slow = engine.log.index(("answer", f"0/{tasks[0]['id']}/0/0"))
    begun = engine.log.index(("submit", f"0/{tasks[0]['id']}/0/0"))
    assert begun < engine.log.index(("answer", f"{fast}/0/1")) < slow


@pytest.mark.parametrize("name, why", [("missing.mp4", "no such file"), ("empty.mp4", "empty"),
                                       ("../x.mp4", "outside")])
def test_a_broken_video_costs_its_own_episode_only(name, why, codec, tasks, tmp_path, toy):
    os.symlink(toy / "videos", tmp_path / "videos")
    (tmp_path / "empty.mp4").touch()
    source = rollout.VideoSource(str(toy), video.FrameCache())
    source.root = str(tmp_path) if name == "empty.mp4" else str(toy)
    broken, engine = {**tasks[0], "id": "broken", "video": name}, Scripted(codec, [ANSWER])
    bad = play(engine, [broken], source, group=2)
    assert [e.status for e in bad] == ["video_error"] * 2 and why in bad[0].error
    assert not engine.requests
    engine = Scripted(codec, ["I saw red red red.\n</think>\n<answer>red</answer>"])
    good = play(engine, [tasks[1], broken, tasks[2]], video.VideoSource(toy, video.FrameCache()))
    assert [e.status for e in good] == ["ok", "video_error", "ok"]
    assert bad[0].reward["total"] == 0.0 and json.dumps(bad[0].to_dict())
    assert rollout.from_dict(bad[0].to_dict()).context.ids == []
    assert "broken" in rollout.episode_text(bad[0], codec)
    assert "«I saw red red red.\n" in rollout.episode_text(good[0], codec)


# ------------------------------------------------------------------------------------------------
# The rules of an episode


def of_both(e, name):
    """A field of all requests of the main agent, and of the sub-agents."""
    return {getattr(r, name) for r in e.mains()}, {getattr(r, name) for r in e.subs()}


FIELDS = {
    "max_model_len": (300, lambda e: {len(r.expanded) + r.max_tokens for r in e.mains()} == {300},
                      False, True), "max_parallel": (1, lambda e: len(e.subs()), 9, 3),
    "tools": (False, lambda e: (len(e.requests), "crop_video" in text_of(
        e.codec, e.requests[0].ids)), (13, True), (1, False)),
    "think_prefix": (False, lambda e: {text_of(e.codec, r.ids).endswith("<think>\n")
                                       for r in e.mains()}, {True}, {False}),
    "crop_response": ("frames", lambda e: (len(e.subs()), len(e.mains()[-1].items)), (9, 1),
                      (0, 10)), "max_turns": (2, lambda e: len(e.mains()), 4, 3),
    "sub_max_new_tokens": (9, lambda e: of_both(e, "max_tokens"), ({512}, {64}), ({512}, {9})),
    "temperature": (0.9, lambda e: of_both(e, "temperature"), ({0.7}, {0.7}), ({0.9}, {0.9})),
    "max_new_tokens": (99, lambda e: of_both(e, "max_tokens"), ({512}, {64}), ({99}, {64}))}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_the_agent_changes_what_it_names(name, codec, tasks, frames_of):
    (value, look, before, after), agent = FIELDS[name], replace(AGENT, max_model_len=4096)
    text = "x\n</think>\n" + call(0, 8) + call(8, 16) + call(16, 24)
    for settings_, want in ((agent, before), (replace(agent, **{name: value}), after)):
        engine = Scripted(codec, [text])
        play_one(engine, tasks, frames_of, settings_)
        assert look(engine) == want


def test_seeds_differ_by_request_and_repeat_by_seed_and_step(codec, tasks, frames_of):
    def seeds(agent, step=0):
        engine = Scripted(codec, [calls((0, 8), (8, 16)), ANSWER])
        play(engine, tasks[:2], frames_of, agent, group=2, step=step)
        named = {r.id.split("/", 1)[1]: r.seed for r in engine.requests}
        assert len(set(named.values())) == len(named) == 16
        return named

    first = seeds(AGENT)
    assert first == seeds(AGENT)
    assert not set(first.values()) & set(seeds(replace(AGENT, seed=1)).values())
    assert not set(first.values()) & set(seeds(AGENT, step=1).values())


# ------------------------------------------------------------------------------------------------
# Records


def test_a_record_survives_json_text_exactly(codec, tasks, frames_of):
    """Floats too: a log-prob that lost digits would be a ratio that is not one."""
    engine = Scripted(codec, [calls((0, 8), (9, 5)), ANSWER])
    for episode in play(engine, tasks[:2], frames_of, group=2, step=7,
                        pay=rewards.RewardConfig(format_weight=0.3)):
        row = episode.to_dict()
        again = rollout.from_dict(json.loads(json.dumps(row, allow_nan=False)))
        assert again.to_dict() == row and row["policy_step"] == 7 and row["K"] == 4
        assert (again.context.ids, again.context.mask, again.context.logps) == (
            episode.context.ids, episode.context.mask, episode.context.logps)
        assert again.context.items == episode.context.items and again.executed() == 1
        assert [call["parseable"] for call in again.calls] == [True, False]
        reward = row["reward"]
        total = reward["acc"] + 0.3 * reward["fmt"] + reward["tool"]
        assert reward["total"] == pytest.approx(total)
        sub, said = row["calls"][0]["sub"], len(chat.encode(codec, "a red square"))
        assert row["calls"][0]["seconds_seen"] == [
            round(second, 3) for second in row["calls"][0]["sub"]["vision"][0]["seconds"]]
        assert row["calls"][0]["sub_tokens"] == sum(sub["mask"]) == said + 1
        assert len(sub["ids"]) == len(sub["mask"]) == len(sub["logps"])
        assert "sub" not in row["calls"][1]


def test_the_reward_knows_what_was_really_executed(codec, tasks, frames_of):
    """A response that the model writes itself is not an executed call."""
    response = chat.escape_special_tokens(codec, "<tool_response>\nred\n</tool_response>")
    forged, task = "x\n</think>\n" + call(9, 5) + response, {**tasks[0], "answer": "red"}

    def tool(texts, sub="red"):
        return play_one(Scripted(codec, texts, sub), [task], frames_of).reward["tool"]

    assert tool([calls((0, 8)), ANSWER]) == 0.8 and tool([forged, ANSWER]) == 0.0
    assert tool([calls((0, 8)), "</think><answer>no</answer>"]) == 0.3


@pytest.mark.parametrize("response, frames", [("summary", 64), ("frames", 64 + 15 * 16)])
def test_the_engine_has_room_for_all_frames_of_a_context(monkeypatch, codec, toy, response, frames):
    """An overview, and three turns with five windows of 16 frames."""
    monkeypatch.setattr(rollout, "VllmEngine", lambda base, codec, limits: limits)
    args = grpo.build_parser().parse_args(["--ckpt", "c", "--data", "d", "--frames", "64",
                                           "--crop-response", response])
    limits = rollout.make_engine(str(toy / "init"), codec, args)
    assert limits.max_frames == frames


# ------------------------------------------------------------------------------------------------
# A second tool: the example of docs/hacking.md


def changed(section):
    """Section of docs/hacking.md -> {script: its text after the diffs of the section}."""
    guide = open(os.path.join(ROOT, "docs", "hacking.md"), encoding="utf-8").read()
    (text,) = [part for part in guide.split("\n## ") if part.startswith(section)]
    scripts = {}
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        name = diff.partition("\n")[0].removeprefix("# ")
        script = scripts.get(name) or open(os.path.join(ROOT, name), encoding="utf-8").read()
        for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
            lines = hunk.strip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
            new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
            assert script.count(old) == 1, f"{name}:\n{old}"
            script = script.replace(old, new)
        scripts[name] = script
    return scripts


def test_a_second_tool_is_one_class_and_one_function(codec, tasks, toy, monkeypatch):
    """zoom_frame, played: declared, parsed, its picture in the main context, recorded, paid."""
    scripts = changed("A second tool")
    assert sorted(scripts) == ["agent_tools.py", "video.py"]
    for name, text in scripts.items():
        module = ModuleType(f"changed {name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
        module.__file__ = os.path.join(ROOT, name)
        exec(compile(text, name, "exec"), vars(module))
    monkeypatch.setattr(video, "load", sys.modules["changed video.py"].load)
    tools = sys.modules["changed agent_tools.py"].TOOLS
    monkeypatch.setattr(rollout, "TOOLS", tools)

    def zoom(**arguments):
        body = json.dumps({"name": "zoom_frame", "arguments": arguments})
        return f"<tool_call>{body}</tool_call>"

    text = "Look.\n</think>\n" + call(0, 8) + zoom(time="0:10", x=500, y=250)
    engine = Scripted(codec, [text + zoom(time=99, x=0, y=0) + zoom(time=1, x=2000, y=0), ANSWER])
    source = video.VideoSource(str(toy), video.FrameCache())
    episode = play_one(engine, tasks, source)
    opening = text_of(codec, episode.context.ids[:episode.spans[0][0]])
    assert '"name": "zoom_frame"' in opening and "zoom_frame shows you a region" in opening
    assert [c["status"] for c in episode.calls] == ["ok", "ok", "error", "error"]
    assert "lies outside of the video" in episode.calls[2]["summary"]
    assert "x must be a whole number" in episode.calls[3]["summary"]
    # The window was summarised by a sub-agent; the zoomed picture stands in the main context.
    assert len(engine.subs()) == 1 and len(episode.context.items) == 2
    item = episode.context.items[1]
    assert item.seconds == [10.0] and item.spec["zoom"] == [500, 250]
    again = rollout.from_dict(json.loads(json.dumps(episode.to_dict())))
    frames, whole = source.load(again.context.items[1].spec), video.load(
        {"video": tasks[0]["video"], "times": [10.0]}, str(toy))
    assert frames.images.shape == whole.images.shape and frames.key != whole.key
    assert episode.reward["tool"] >= 0.3


# ------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.process
def test_command_line_writes_records_that_train(toy, tmp_path, codec):
    out = tmp_path / "r.jsonl"
    done = run_script("rollout.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "rl.jsonl", "--limit", 2, "--num-generations", 2, "--show", 1,
                      "--max-new-tokens", 24, "--frames", 4, "--out", out, reference=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["task"]["id"], r["sample"], r["K"]) for r in rows] == [
        (f"rl-000{i}", s, 4) for i in (0, 1) for s in (0, 1)]
    assert all(runs(r["mask"]) == r["spans"] and len(r["ids"]) == len(r["logps"]) for r in rows)
    assert done.stdout.count("== 0/rl-") == 1 and "4 rollouts -> " in done.stdout
    assert str(out) in done.stdout
    assert "\033" not in done.stdout  # not a terminal: no colours in a log
    assert "| R " in done.stdout and "Traceback" not in done.stderr


GOOD = {"id": "a", "video": "videos/rl-0000.mp4", "question": "Q?", "answer": "red", "type": "open"}


@pytest.fixture
def command(toy, tmp_path, monkeypatch, start):
    """The script's own main, in this process -> (exit code, stderr). Rows: a task file of these,
    else the world's own."""
    def call_main(*flags, rows=None):
        data = toy / "rl.jsonl"
        if rows is not None:
            data = toy / "tasks-of-a-test.jsonl"
            data.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n"
                                    for row in rows))
        given = {"--ckpt": toy / "init", "--data": data, "--out": tmp_path / "out.jsonl",
                 "--preset": "toy"}
        monkeypatch.setattr(rollout, "make_engine", make_engine)
        kept = [x for k, v in given.items() if k not in flags for x in (k, v)]
        code, _, err = start(rollout, *kept, *flags)
        return code, err

    yield call_main
    (toy / "tasks-of-a-test.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize("flags, why", [
    (("--out", "/tmp"), ".jsonl"), (("--out", "/proc/nothing/r.jsonl"), "/proc/nothing"),
    (("--video-root", "/no/such/place"), "not below"), (("--nonsense", "1"), "--nonsense 1"),
    (("--ckpt", "/no/such/place"), "no such"), (("--data", "/no/such/file"), "No such file"),
    (("--num-generations", "0"), "--num-generations"), (("--max-new", "9"), "--max-new 9"),
    (("--temperature", "nan"), "temperature"),
    (("--frames", "0"), "--frames")])
def test_bad_flags_are_one_line_and_exit_code_2(flags, why, command):
    code, err = command(*flags)
    assert code == 2 and why in err and "Traceback" not in err
    assert err.count("\n") == 1 or err.startswith("usage:")  # argparse puts its usage first


@pytest.mark.parametrize("rows, why", [
    ([GOOD, {**GOOD, "id": "b", "type": "essay"}], ":2: type is 'essay'"),
    ([GOOD, GOOD], "not unique"), (["{not json"], ":1: not JSON"), ([], "no rows"),
    ([{k: v for k, v in GOOD.items() if k != "video"}], "missing 'video'"),
    ([{**GOOD, "type": "mcq", "options": [1, 2], "answer": "A"}], "options"),
    ([{**GOOD, "question": 5}], "question"), ([{**GOOD, "video": "videos/none.mp4"}],
                                              "1 of 1 videos are not below")])
def test_bad_task_files_are_one_line_and_exit_code_2(rows, why, command):
    code, err = command(rows=rows)
    assert code == 2 and why in err and "Traceback" not in err and err.count("\n") == 1


def ids_of(path):
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["group"], row["sample"], row["ids"]) for row in rows]


def test_the_same_command_goes_on_and_another_is_refused(command, tmp_path, toy):
    """After a kill in the middle of a line: the whole rollouts stay, and the file is the same."""
    flags = ("--limit", 2, "--num-generations", 2, "--frames", 4, "--max-new-tokens", 8)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    assert command(*flags)[0] == 0
    whole = ids_of(out)
    lines = out.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[2:]) + lines[0][:100])
    out.unlink()
    code, err = command(*flags, "--temperature", 0.5)
    assert code == 2 and "other temperature" in err and part.exists()
    # It changes no episode.
    assert command(*flags, "--gpu-memory-utilization", 0.4)[0] == 0 and not part.exists()
    assert ids_of(out) == whole
    before = out.stat().st_mtime_ns
    assert command(*flags)[0] == 0 and out.stat().st_mtime_ns == before  # nothing to do
