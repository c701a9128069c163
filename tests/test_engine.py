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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from album import logprobs, plain_tree
from conftest import Overheard
from reference import ReferenceEngine, load_policy
from scripted import ANSWER, Scripted, call, calls, is_sub, play, play_one

import chat
import launch
import model
import rollout
import video
from engine import EngineConfig, Request, VllmEngine, cpu_options, gpu_options
from plumbing import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
HOT = rollout.AgentConfig(temperature=1.0, max_model_len=1024, max_new_tokens=16,
                          sub_max_new_tokens=8, max_turns=2)
TALK = [calls((0, 8), (16, 24), (40, 48)), calls((3, 10.5)), ANSWER]
FIVE_CALLS = [TALK[0], TALK[1] + call(5, 5.5), ANSWER]


class Saying(Overheard):
    """Its main agent is taken to say these texts, turn by turn. Keeps what it was asked."""

    def __init__(self, engine, texts):
        super().__init__(engine, lambda sample, turn: texts[min(turn, len(texts) - 1)])
        self.requests = []

    def submit(self, request):
        self.requests.append(request)
        self.engine.submit(request)


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
    features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    tree = model.Tree(model.TokenSpan(ids, mask), items)
    return logprobs(policy, codec, features, [tree], temperature=temperature).numpy()


def test_room_on_a_cpu_is_for_the_states_of_gated_delta_layers():
    """A page of keys and values may be as large as one. Two contexts of two layers, in fp32. And
    vLLM knows all options of a GPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    text = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, linear_num_value_heads=2,
                           head_dim=8, linear_key_head_dim=128, linear_value_head_dim=128)
    codec = SimpleNamespace(config=SimpleNamespace(text_config=text), base=chat.bases()["qwen3_5"])
    options = cpu_options(codec, EngineConfig(32))
    from vllm.engine.arg_utils import EngineArgs
    assert gpu_options(EngineConfig(32)).keys() <= EngineArgs.__dataclass_fields__.keys()
    assert options["kv_cache_memory_bytes"] >= 2 * 2 * (2 * 128 * 128 * 4)
    assert options["max_num_batched_tokens"] >= 32  # no prompt is cut


@pytest.fixture(scope="module")
def engine(saved, codec):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    limits = EngineConfig(context=1024, max_frames=16, max_pixels=8192, max_seqs=8)
    engine = VllmEngine(str(saved[1]), codec, limits)
    yield engine
    engine.close()


def engine_gap(engine, policy, codec, source, seed):
    """Sample from the engine -> largest difference between its log-probs and the trainer's."""
    requests = []
    for n, frames in enumerate((4, 8)):
        task = {"video": "videos/rl-0000.mp4",
                "question": "Which colours appear between 16 and 24?", "type": "open"}
        messages = rollout.main_messages(task, frames)
        spec = messages[1]["content"][0]
        context = rollout.open_context(codec, messages, [spec], [source.load(spec)],
                                       rollout.tool_schema())
        requests.append(Request(f"r{seed}-{n}", context.compact, context.ids, context.items,
                                context.frames, 24, 0.8, seed + n))
        engine.submit(requests[-1])
    finished = {}
    while len(finished) < len(requests):
        finished.update({c.id: c for c in engine.poll()})
    vision, gap = model.VisionFeatures(policy.hf.model.visual, codec, source.load), 0.0
    for r in requests:
        done = finished[r.id]
        ours = logprobs(policy, codec, vision, [plain_tree(r.expanded, r.items, done.ids)],
                        temperature=0.8)
        gap = max(gap, (ours - torch.tensor(done.logps)).abs().max().item())
    return gap


# ------------------------------------------------------------------------------------------------
# vLLM beside the trainer


def check_episodes(engine, policy, codec, tasks, source, agent, k):
    """Plays episodes and compares every log-prob of the engine with the trainer's -> their number,
    and the last context as (ids, mask, items, log-probs)."""
    checked = 0
    for episode in play(engine, tasks, source, agent, k, group=2):
        assert episode.status == "ok" and episode.executed() == 5 and len(episode.spans) == 3
        row = json.loads(json.dumps(episode.to_dict()))
        for part in [row] + [c["sub"] for c in row["calls"] if "sub" in c]:
            items = [chat.VisionItem(**v) for v in part["vision"]]
            got = trainer_logps(policy, codec, source, part["ids"], part["mask"], items,
                                agent.temperature)
            want = [logp for logp, flag in zip(part["logps"], part["mask"]) if flag]
            assert np.abs(got - want).max() < 1e-4
            checked += len(want)
    return checked, (part["ids"], part["mask"], items, want)


@pytest.mark.parametrize("temperature,response", [(1.0, "summary"), (0.6, "summary"),
                                                  (1.0, "frames")])
def test_engine_and_trainer_agree_on_multi_turn_episodes(
        temperature, response, vllm_engines, codec, policy, tasks, frames_of):
    """Prompt ids (the engine's poll compares them), frames, positions, temperature: one difference
    and log-probs drift."""
    engine = Saying(vllm_engines(), FIVE_CALLS)
    agent = replace(HOT, temperature=temperature, crop_response=response)
    checked, _ = check_episodes(engine, policy, codec, tasks[:1], frames_of, agent, 5)
    k = "gated" if response == "summary" else 8
    more, (ids, mask, items, want) = check_episodes(engine, policy, codec, tasks[:4], frames_of,
                                                    agent, k)
    assert checked + more > (300 if response == "summary" else 150)
    # the comparison would see a difference: pixels matter even to random weights
    dark = replace(codec, mean=(0.4, 0.4, 0.4))
    other = trainer_logps(policy, dark, frames_of, ids, mask, items, temperature)
    assert np.abs(other - want).max() > 1e-3
    shown = [item.frames for r in engine.requests for item in r.items[not is_sub(r):]]
    assert {*shown} >= {1, 8}  # of the windows


@pytest.mark.parametrize("response", ["summary", "frames"])
def test_engine_and_trainer_agree_on_frames_of_four_tokens(
        response, vllm_engines, codec, policy, tasks, toy, monkeypatch):
    """The toy's frames are one token, whose height and width are always those of its time. Here a
    trainer that lost both would be told of."""
    source = video.VideoSource(str(toy), video.FrameCache(), min_pixels=4096, max_pixels=4096)
    engine, agent = Saying(vllm_engines(), FIVE_CALLS), replace(HOT, crop_response=response)
    check_episodes(engine, policy, codec, tasks[:1], source, agent, 5)
    whole = model.rope_positions

    def time_alone(*args):
        positions, end = whole(*args)
        return positions[:1].repeat(3, 0), end

    monkeypatch.setattr(model, "rope_positions", time_alone)
    with pytest.raises(AssertionError, match="0.0001"):
        check_episodes(engine, policy, codec, tasks[:1], source, agent, 5)


def test_an_engine_prompt_that_differs_from_the_trainers_is_refused(
        vllm_engines, codec, tasks, frames_of):
    """Frames that were resized once more would train on other pixels than were sampled from,
    silently."""
    engine, scripted = vllm_engines(), Scripted(codec, [ANSWER])
    play_one(scripted, tasks, frames_of)
    (request,) = scripted.requests
    engine.submit(replace(request, id="odd", expanded=request.expanded + [codec.eos], max_tokens=2))
    with pytest.raises(RuntimeError, match="odd: the engine's prompt ids differ"):
        while True:
            engine.poll()


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.process), "reference"])
def test_banned_ids_are_never_sampled(kind, codec, base, tasks, frames_of, request):
    """A sampled vision placeholder would ask the trainer for a frame that does not exist."""
    engine = (request.getfixturevalue("vllm_engines")() if kind == "vllm"
              else ReferenceEngine(base, codec, max_seqs=4))
    scripted = Scripted(codec, [ANSWER])
    play_one(scripted, tasks, frames_of)
    (asked,), seen = scripted.requests, Counter()
    for n in range(12):
        engine.submit(replace(asked, id=f"hot{n}", temperature=2.0, max_tokens=64, seed=n))
    done = []
    while len(done) < 12:
        done += engine.poll()
    for completion in done:
        seen.update(completion.ids)
        assert completion.ended == (completion.ids[-1] == codec.eos)
        assert codec.eos not in completion.ids[:-1]
        assert len(completion.ids) == 64 or completion.ended
        assert completion.text == chat.decode(codec, completion.ids) and max(completion.logps) < 0
    assert sum(seen.values()) > 300 and len(seen) > 150
    assert not set(seen) & set(codec.suppress_tokens)


def test_vllm_loads_the_checkpoint_and_agrees_before_and_after_a_sync(
        saved, engine, codec, source, toy):
    """Stale weights fail silently everywhere else. All weights change, embeddings too: a tied head
    must follow them."""
    policy, _ = saved
    assert engine_gap(engine, policy, codec, source, 1) < 1e-3
    new = load_policy(str(toy / "init"), codec)
    new.load_state_dict(policy.state_dict())
    torch.manual_seed(6)
    with torch.no_grad():
        for p in new.hf.model.language_model.parameters():
            p.add_(0.2 * p.std() * torch.randn_like(p) if p.ndim > 1 else .05 * torch.randn_like(p))
    # the engine still has the old ones: the probe can tell
    assert engine_gap(engine, new, codec, source, 3) > 0.1
    engine.sync(checkpoint.full_weights(new))
    assert engine_gap(engine, new, codec, source, 5) < 1e-3
    with torch.no_grad():  # only the embeddings, which are the head
        new.hf.model.language_model.embed_tokens.weight.mul_(1.3)
    engine.sync(checkpoint.full_weights(new))
    assert engine_gap(engine, new, codec, source, 7) < 1e-3


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
    engine, scripted = vllm_engines(), Scripted(codec, [ANSWER])
    play_one(scripted, tasks, frames_of)
    engine.sleep()
    pytest.raises(RuntimeError, engine.submit, scripted.requests[0]).match("was not woken")
    engine.asleep = False
