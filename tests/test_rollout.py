"""
Tests of rollout.py: python -m pytest tests/test_rollout.py -q

Episodes run against a scripted engine: it answers each request with a text that the test chose, so
that the protocol is tested without a model. Real engines are in test_engine.py, endpoints in
test_endpoint.py.
"""
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fixtures import rows_of
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


def runs(flags):
    """[start, end) of every run of ones."""
    return np.flatnonzero(np.diff([0, *flags, 0])).reshape(-1, 2).tolist()


# ------------------------------------------------------------------------------------------------
# Prompts


def test_options_are_lettered_once():
    """A data set that labels its own options must not show them as 'A. A. cat'."""
    for options in (["cat", "A. Milne"], ["A. cat", "B. A. Milne"]):  # a name, not a label
        text = rollout.question_text({"question": "Which?", "options": options, "type": "mcq"})
        assert text == f"\nWhich?\nA. cat\nB. A. Milne\n{rollout.ANSWER_STYLES['mcq']}"


# ------------------------------------------------------------------------------------------------
# Ids: what the trainer gets is what the template would have written


SCRIPTS = {
    "direct": [(ANSWER, 0)], "three calls": [(calls((0, 8), (16, 24), (40, 48)), 3), (ANSWER, 0)],
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
                                                          frames_of, monkeypatch):
    """Ids grow piece by piece; wherever sampled text is tokenised to itself they must equal the
    template's own rendering, or the policy is trained on headers that inference never shows it.
    Here by a template that looks at the tools again at each response."""
    monkeypatch.setattr(codec.processor, "chat_template", codec.processor.chat_template.replace(
        "{{- '<tool_response>", "{{- 'none' if not tools else '<tool_response>"))
    turns = SCRIPTS[script]
    engine = Scripted(codec, [text if prefix else "<think>\n" + text for text, _ in turns])
    agent = replace(AGENT, think_prefix=prefix, crop_response=response)
    episode = play_one(engine, tasks, frames_of, agent, frames=8)
    assert episode.status == "ok" and episode.executed() == sum(n for _, n in turns)
    assert len(engine.subs()) == (episode.executed() if response == "summary" else 0)
    want = rendered(codec, tasks[0], frames_of, 8, ["<think>\n" + t for t, _ in turns], response)
    assert text_of(codec, episode.context.ids) == text_of(codec, want)
    assert episode.context.ids == want


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


def test_mask_and_credit_lie_on_sampled_tokens_only(codec, tasks, frames_of):
    """Forced prefix, glue and tool responses are not the policy's words: no gradient may reach
    them. Selective Anchoring credits the tags and the end of each turn."""
    turns = [calls((0, 8), (16, 24)), ANSWER]
    episode = play_one(Scripted(codec, turns), tasks, frames_of)
    context = episode.context
    assert len(context.ids) == len(context.mask) == len(context.logps)
    assert runs(context.mask) == episode.spans and len(episode.spans) == 2
    for (start, end), said in zip(episode.spans, turns):
        assert text_of(codec, context.ids[start:end]) == said + "<|im_end|>"
        assert context.logps[start:end] == [-(n + 1) / 7 for n in range(end - start)]
        # forced, so in no span
        assert text_of(codec, context.ids[:start]).endswith("<|im_start|>assistant\n<think>\n")
    assert all(logp == 0.0 for logp, flag in zip(context.logps, context.mask) if not flag)
    assert episode.turns == turns and episode.finish == ["stop", "stop"]
    credited = text_of(codec, [context.ids[place] for place in episode.struct]).split()
    assert credited == ["</think>" + 2 * "<tool_call></tool_call>" + "<|im_end|></think>"
                        "<answer></answer><|im_end|>"]


def test_a_turn_cut_off_by_its_length_is_closed_by_an_unsampled_token(codec, tasks, frames_of):
    engine = Scripted(codec, [calls((0, 8)) + " a red square" * 200, ANSWER])
    episode = play_one(engine, tasks, frames_of, replace(AGENT, max_new_tokens=80))
    start, end = episode.spans[0]
    assert episode.finish == ["length", "stop"] and end - start == 80
    assert codec.eos not in episode.context.ids[start:end]
    assert episode.context.ids[end] == codec.eos and episode.context.mask[end] == 0


def test_the_next_request_holds_exactly_what_was_sampled(codec, tasks, frames_of):
    """Sampled ids may be a split the tokenizer would not choose; decoding and encoding them again
    would change them."""
    odd = [chat.encode(codec, c)[0] for c in calls((0, 8))] + [codec.eos]
    assert chat.encode(codec, calls((0, 8))) != odd[:-1]

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


def test_every_call_gets_its_own_response_in_call_order_in_one_user_turn(codec, tasks, toy):
    """Good or bad, every call is answered, and the answers come as ONE user turn with ONE
    generation prompt after it. A window that does not decode is no fault of the policy: the episode
    goes on, and is not trained on."""
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
    assert episode.status == "video_error" and episode.turns[-1] == ANSWER
    assert grpo.group_by_prompt([episode]) == []
    assert grpo.group_by_prompt([replace(episode, status="ok")]) != []
    glue = text_of(codec, episode.context.ids[episode.spans[0][1]:episode.spans[1][0]])
    got = [x.split("\n</tool_response>")[0] for x in glue.split("<tool_response>\n")[1:]]
    assert got == [c["summary"] for c in episode.calls]
    wanted = [("ok", "I saw 0"), ("error", "not valid JSON"), ("error", "unknown tool 'zoom'"),
              ("error", "reversed"), ("ok", "I saw 60"), ("error", "holds nothing of the video"),
              ("ok", "I saw 40"), ("video_error", "it is broken here"), ("error", "is not a time"),
              ("not_run", "not run: at most 5")]
    for record, (status, text) in zip(episode.calls, wanted, strict=True):
        assert record["status"] == status and text in record["summary"]
    assert glue.count("<|im_start|>") == 2 and glue.count("<|im_end|>") == 1
    assert glue.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")
    # The window is clamped; what the sub-agent reads is what it sees, not what was asked for.
    (clamped,) = [r for r in engine.subs() if window_of(r)[0] == 60]
    assert "Window: 60 to 64 seconds" in text_of(codec, clamped.ids)
    assert (60.0, 64.0) == (episode.calls[4]["start"], episode.calls[4]["end"])


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


def test_the_context_is_never_overrun_and_never_ends_on_a_response(codec, tasks, frames_of):
    """Every size from too small for the prompt up to ample: a step of one token must not open a gap
    anywhere."""
    full = play_one(Scripted(codec, [calls((0, 8)), ANSWER]), tasks, frames_of)
    prompt, ends, seen = full.spans[0][0], len(full.context.ids), set()
    for size in range(prompt - 4, ends + 3, 2):
        engine = Scripted(codec, [calls((0, 8)), ANSWER])
        episode = play_one(engine, tasks, frames_of, replace(AGENT, max_model_len=size))
        seen.add(episode.status)
        assert all(1 <= r.max_tokens <= size - len(r.expanded) for r in engine.requests)
        assert len(episode.context.ids) <= max(size, prompt)
        assert runs(episode.context.mask) == episode.spans
        if episode.turns:
            assert episode.context.mask[-1] == 1, size
        else:
            assert episode.status == "context" and episode.error and not engine.requests
    assert seen == {"ok", "context"}


# ------------------------------------------------------------------------------------------------
# K


def test_a_group_shares_budget_frames_and_prompt(codec, tasks, source, opened):
    engine = Scripted(codec, [calls((0, 8)), ANSWER])
    episodes = play(engine, tasks, source, frames="gated", group=4, step=3)
    assert len({e.num_frames for e in episodes}) > 1
    for i in range(0, len(episodes), 4):
        group = episodes[i:i + 4]
        first, k = group[0].context, rollout.draw_num_frames("gated", 0, 3, group[0].task["id"])
        prompt = first.ids[: group[0].spans[0][0]]
        assert [(e.num_frames, e.sample) for e in group] == [(k, n) for n in range(4)]
        assert all(e.context.ids[: e.spans[0][0]] == prompt and e.group == group[0].group
                   and e.context.items[0].key == first.items[0].key for e in group)
        # K reaches the decoder and the prompt, not only the record.
        assert prompt.count(codec.image_pad) == k == len(first.frames[0].images)
    # once for the times of a film, once for all frames of one so small
    assert len({e.group for e in episodes}) == len(tasks) == len(opened) / 2


def test_gated_frames_is_uniform_and_drawn_anew_for_each_step_seed_and_task():
    draws = Counter(rollout.draw_num_frames("gated", 0, 5, f"task-{i}") for i in range(5000))
    assert set(draws) == {4, 8, 16, 32, 64} and all(900 < n < 1100 for n in draws.values())
    steps, seeds = ({rollout.draw_num_frames("gated", *key, "task") for key in keys}
                    for keys in ([(0, s) for s in range(60)], [(s, 0) for s in range(60)]))
    assert steps == seeds == {4, 8, 16, 32, 64}
    # Python's own hash of a string is salted per process: ranks would disagree about K.
    assert [rollout.draw_num_frames("gated", 7, 3, f"t-{i}") for i in range(4)] == [4, 32, 64, 4]


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


# ------------------------------------------------------------------------------------------------
# The rules of an episode


def test_the_settings_of_the_agent_reach_its_requests(codec, tasks, frames_of):
    agent = replace(AGENT, temperature=0.9, max_new_tokens=99, sub_max_new_tokens=9)
    engine = Scripted(codec, [calls((0, 8)), ANSWER])
    play_one(engine, tasks, frames_of, agent)
    assert [(r.temperature, r.max_tokens) for r in engine.mains()] == [(0.9, 99), (0.9, 99)]
    assert [(r.temperature, r.max_tokens) for r in engine.subs()] == [(0.9, 9)]
    # Without tools none is declared, and a call is text.
    play_one(engine, tasks, frames_of, replace(AGENT, tools=False))
    assert len(engine.requests) == 4
    assert "crop_video" not in text_of(codec, engine.requests[3].ids)


def test_seeds_differ_by_request_and_repeat_by_seed_and_step(codec, tasks, frames_of):
    def seeds(agent, step=0):
        engine = Scripted(codec, [calls((0, 8), (8, 16)), ANSWER])
        play(engine, tasks[:2], frames_of, agent, group=2, step=step)
        return {r.seed for r in engine.requests}

    first = seeds(AGENT)
    assert len(first) == 16 and first == seeds(AGENT)
    assert first.isdisjoint(seeds(replace(AGENT, seed=1)) | seeds(AGENT, step=1))


# ------------------------------------------------------------------------------------------------
# Records


def test_a_record_survives_json_text_exactly(codec, tasks, frames_of):
    """Floats too: a log-prob that lost digits would be a ratio that is not one."""
    engine = Scripted(codec, [calls((0, 8), (9, 5)), ANSWER])
    episode = play_one(engine, tasks, frames_of, step=7, pay=rewards.RewardConfig(format_weight=.3))
    row = episode.to_dict()
    again = rollout.from_dict(json.loads(json.dumps(row, allow_nan=False)))
    assert again.to_dict() == row and row["policy_step"] == 7 and row["K"] == 4
    assert again.context.logps == episode.context.logps
    assert again.context.items == episode.context.items and again.executed() == 1
    good, bad = row["calls"]
    assert (good["parseable"], bad["parseable"]) == (True, False)
    reward, sub = row["reward"], good["sub"]
    assert reward["tool"] >= 0.3  # a call was executed
    assert reward["total"] == reward["acc"] + 0.3 * reward["fmt"] + reward["tool"]
    assert good["seconds_seen"] == [round(t, 3) for t in sub["vision"][0]["seconds"]]
    assert good["sub_tokens"] == sum(sub["mask"]) == len(chat.encode(codec, "a red square")) + 1
    assert len(sub["ids"]) == len(sub["mask"]) == len(sub["logps"]) and "sub" not in bad


@pytest.mark.parametrize("response, frames", [("summary", 64), ("frames", 64 + 15 * 16)])
def test_the_engine_has_room_for_all_frames_of_a_context(monkeypatch, codec, toy, response, frames):
    """An overview, and three turns with five windows of 16 frames."""
    monkeypatch.setattr(rollout, "VllmEngine", lambda base, codec, limits: limits)
    args = grpo.build_parser().parse_args(["--ckpt", "c", "--data", "d", "--frames", "64",
                                           "--crop-response", response])
    assert rollout.make_engine(str(toy / "init"), codec, args).max_frames == frames


# ------------------------------------------------------------------------------------------------
# The command line


def test_the_same_command_goes_on_and_another_is_refused(toy, tmp_path, monkeypatch, start):
    """After a kill in the middle of a line: the whole rollouts stay, and the file is the same."""
    monkeypatch.setattr(rollout, "make_engine", make_engine)
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"

    def command(*flags):
        return start(rollout, "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--preset", "toy",
                     "--limit", 2, "--num-generations", 2, "--frames", 4, "--max-new-tokens", 8,
                     "--out", out, *flags)

    def ids():
        return {(row["task"]["id"], row["sample"], row["K"]): row["ids"] for row in rows_of(out)}

    code, printed, _ = command()
    assert code == 0 and f"4 rollouts -> {out} | R " in printed and "| 0 not ok" in printed
    whole, lines = ids(), out.read_text().splitlines(keepends=True)
    assert list(whole) == [(f"rl-000{i}", sample, 4) for i in (0, 1) for sample in (0, 1)]
    part.write_text("".join(lines[2:]) + lines[0][:100])
    out.unlink()
    code, _, err = command("--temperature", 0.5)
    assert code == 2 and "other temperature" in err and part.exists()
    # It changes no episode.
    assert command("--gpu-memory-utilization", 0.4)[0] == 0
    assert ids() == whole and not part.exists()
    before = out.stat().st_mtime_ns
    assert command()[0] == 0 and out.stat().st_mtime_ns == before  # all is done
