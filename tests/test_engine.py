"""
Tests of engine.py: python -m pytest tests/test_engine.py -q

vLLM on the random toy checkpoint: its ids and log-probs beside those of the trainer and of the
reference engine, before and after a sync of weights.
"""
import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from album import logprobs
from conftest import Overheard
from fixtures import enliven
from reference import load_policy
from scripted import ANSWER, Scripted, calls, play, play_one

import chat
import launch
import model
import rollout
import video
from engine import EngineConfig, VllmEngine, gpu_options
from plumbing import checkpoint

HOT = rollout.AgentConfig(temperature=1.0, max_model_len=1024, max_new_tokens=16,
                          sub_max_new_tokens=8, max_turns=2)
FIVE_CALLS = [calls((0, 8), (16, 24), (40, 48)), calls((3, 10.5), (5, 5.5)), ANSWER]


def saying(engine, texts):
    """An engine whose main agent is taken to say these texts, turn by turn."""
    return Overheard(engine, lambda sample, turn: texts[min(turn, len(texts) - 1)])


@pytest.fixture(scope="module")
def base(toy):
    return str(toy / "init")


@pytest.fixture(scope="module")
def vllm_engines(base, codec):
    """get(..) -> an engine in this process, one of each kind, since the second start is
    quick. All are closed at the end of the file: closing one ends the groups that others need."""
    made = {}

    def get(context=1024, max_seqs=16, chunk=None, dtype="float32"):
        kind = context, max_seqs, chunk, dtype
        if kind not in made:
            family = replace(codec.base, cpu_dtype=dtype)
            made[kind] = VllmEngine(base, replace(codec, base=family), EngineConfig(
                context, 128, max_seqs=max_seqs, max_num_batched_tokens=chunk))
        return made[kind]

    yield get
    for engine in made.values():
        engine.close()


def trainer_logps(policy, codec, source, ids, mask, items, temperature=1.0):
    features = model.VisionFeatures(policy, source.load)
    features.codec = codec
    tree = model.Tree(model.TokenSpan(ids, mask), items)
    return logprobs(policy, codec, features, [tree], temperature=temperature).numpy()


def asked(codec, tasks, source, **settings):
    """The first request of an episode."""
    scripted = Scripted(codec, [ANSWER])
    play_one(scripted, tasks, source)
    return replace(scripted.requests[0], **settings)


def finish(engine, *requests):
    """-> their completions."""
    for request in requests:
        engine.submit(request)
    done = []
    while len(done) < len(requests):
        done += engine.poll()
    return done


def engine_gap(engine, policy, codec, tasks, source, seed):
    """Sample from the engine -> largest difference between its log-probs and the trainer's."""
    request = asked(codec, tasks, source, id=f"gap{seed}", max_tokens=24, seed=seed)
    (done,) = finish(engine, request)
    ids, mask = request.expanded + done.ids, [0] * len(request.expanded) + [1] * len(done.ids)
    ours = trainer_logps(policy, codec, source, ids, mask, request.items, request.temperature)
    return np.abs(ours - done.logps).max()


# ------------------------------------------------------------------------------------------------
# vLLM beside the trainer


@pytest.mark.parametrize("temperature, response, pixels", [
    (1.0, "summary", 1024), (0.6, "frames", 4096), (0.6, "summary", 4096)])
def test_engine_and_trainer_agree_on_multi_turn_episodes(
        temperature, response, pixels, vllm_engines, codec, policy, tasks, toy):
    """Prompt ids (the engine's poll compares them), frames, positions, temperature: one difference
    and log-probs drift. Frames of one token, and of four."""
    source = video.VideoSource(str(toy), video.FrameCache(), pixels, pixels)
    engine, checked = saying(vllm_engines(), FIVE_CALLS), 0
    agent = replace(HOT, temperature=temperature, crop_response=response)
    frames = "gated" if pixels == 1024 else 5
    for episode in play(engine, tasks[:2], source, agent, frames, group=2):
        assert episode.status == "ok" and episode.executed() == 5 and len(episode.spans) == 3
        row = json.loads(json.dumps(episode.to_dict()))
        for part in [row] + [c["sub"] for c in row["calls"] if "sub" in c]:
            items = [chat.VisionItem(**v) for v in part["vision"]]
            given = source, part["ids"], part["mask"], items, temperature
            want = [logp for logp, flag in zip(part["logps"], part["mask"]) if flag]
            assert np.abs(trainer_logps(policy, codec, *given) - want).max() < 1e-4
            checked += len(want)
    assert checked > 150
    # The comparison would see a difference: pixels matter even to random weights.
    dark = replace(codec, mean=(0.4, 0.4, 0.4))
    assert np.abs(trainer_logps(policy, dark, *given) - want).max() > 1e-3


def test_an_engine_prompt_that_differs_from_the_trainers_is_refused(
        vllm_engines, codec, tasks, frames_of):
    """Frames that were resized once more would train on other pixels than were sampled from,
    silently."""
    request = asked(codec, tasks, frames_of)
    request.expanded.append(codec.eos)
    with pytest.raises(RuntimeError, match="the engine's prompt ids differ"):
        finish(vllm_engines(), request)


def test_banned_ids_are_never_sampled(codec, tasks, frames_of, vllm_engines):
    """A sampled vision placeholder would ask the trainer for a frame that does not exist."""
    request, seen = asked(codec, tasks, frames_of, temperature=2.0, max_tokens=64), Counter()
    requests = [replace(request, id=f"{n}", seed=n) for n in range(12)]
    for completion in finish(vllm_engines(), *requests):
        seen.update(completion.ids)
        assert completion.ended == (completion.ids[-1] == codec.eos)
        assert codec.eos not in completion.ids[:-1]
        assert len(completion.ids) == 64 or completion.ended
        assert completion.text == chat.decode(codec, completion.ids) and max(completion.logps) < 0
    assert sum(seen.values()) > 300 and len(seen) > 150
    assert not set(seen) & set(codec.suppress_tokens)


def test_the_engine_agrees_with_the_trainer_before_and_after_a_sync(
        vllm_engines, base, codec, tasks, frames_of):
    """Stale weights fail silently everywhere else. All weights change, embeddings too: a tied head
    must follow them."""
    engine, new = vllm_engines(), enliven(load_policy(base, codec), 0.05)
    # The engine still has the old ones: the probe can tell.
    assert engine_gap(engine, new, codec, tasks, frames_of, 1) > 0.1
    engine.sync(checkpoint.full_weights(new, torch.float32))
    assert engine_gap(engine, new, codec, tasks, frames_of, 2) < 1e-3
    with torch.no_grad():  # only the embeddings, which are the head
        new.hf.model.language_model.embed_tokens.weight.mul_(1.3)
    engine.sync(checkpoint.full_weights(new, torch.float32))
    assert engine_gap(engine, new, codec, tasks, frames_of, 3) < 1e-3
    old = load_policy(base, codec)
    engine.sync(checkpoint.full_weights(old, torch.float32))  # as other tests expect it
    from vllm.engine.arg_utils import EngineArgs  # it knows all options of a GPU
    assert gpu_options(EngineConfig(32)).keys() <= EngineArgs.__dataclass_fields__.keys()


# ------------------------------------------------------------------------------------------------
# The check of new weights

# what a load loses, by the names of the trainer; a swap is done by `broken`
LOSES = {"a skipped reload": "", "one layer": "language_model.layers.1.",
         "one matrix of three fused": "layers.1.self_attn.k_proj.weight",
         "one norm": "layers.1.input_layernorm.weight"}


def broken(weights, fault, other=1):
    """(name, tensor) of a load that loses some, or takes layer 0 and the other for each other."""
    numbers = {"0": str(other), str(other): "0"}
    for name, tensor in weights:
        if fault == "two layers swapped":
            found = re.match(r"(model\.language_model\.layers\.)(\d+)(\..*)", name)
            if found and found[2] in numbers:
                name = found[1] + numbers[found[2]] + found[3]
        elif LOSES[fault] in name:
            continue
        yield name, tensor


def check_loads(engine, weights, step, faults, monkeypatch, other=1):
    """Healthy loads pass, each fault is told of, and the load after it passes. weights(): what the
    trainer sends; step(): one update."""
    real = engine.llm.collective_rpc

    def load(fault, method, *args, **more):
        if method != "reload_weights":
            return real(method, *args, **more)
        sent = broken(more["kwargs"]["weights_iterator"], fault, other)
        if fault == "a skipped reload":
            return list(sent)
        return real(method, kwargs={"weights_iterator": sent})

    for _ in range(4):
        step()
        engine.sync(weights())
    for fault in faults:
        step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm, "collective_rpc", partial(load, fault))
            with pytest.raises(launch.RunError, match="does not hold the weights .* differ"):
                engine.sync(weights())
        engine.sync(weights())


def update_at(rate, policy):
    """-> a function that moves every trained weight by the rate, as a step of Adam does."""
    draw = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step():
        for p in model.trained_parameters(policy):
            p.add_(rate * torch.randn(p.shape, generator=draw).sign())

    return step


@pytest.mark.parametrize("lora", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_that_loses_one_update_is_told_of(
        vllm_engines, base, codec, process_group, monkeypatch, dtype, lora):
    """At the paper's rate, where the log-prob gap sees nothing. In bf16 such a step leaves most
    norms as they are, and adapters never touch them: no norm is lost there."""
    policy = checkpoint.load_policy(base, codec, torch.device("cpu"), lora_rank=lora)
    faults = ["a skipped reload", "one layer", "two layers swapped", "one matrix of three fused"]
    if dtype == "float32" and not lora:
        faults.append("one norm")
    check_loads(vllm_engines(dtype=dtype),
                lambda: checkpoint.full_weights(policy, getattr(torch, dtype)),
                update_at(2e-6, policy), faults, monkeypatch)


def test_an_engine_that_was_not_woken_samples_nothing(vllm_engines, codec, tasks, frames_of):
    engine = vllm_engines()
    engine.sleep()
    pytest.raises(RuntimeError, engine.submit, asked(codec, tasks, frames_of)).match("not woken")
    engine.asleep = False
