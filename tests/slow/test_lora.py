"""
More of adapters: damaged ones, bases that move, ranks, vLLM:
python -m pytest tests/slow/test_lora.py -q
"""
import os
import signal
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from test_lora import CPU, RANK, adapted, moved, pack_of, saved  # noqa: F401

import grpo
import model
import sft
from engine import EngineConfig, VllmEngine
from plumbing import checkpoint

# ------------------------------------------------------------------------------------------------
# The scripts


def adapters(folder):
    return load_file(folder / "last" / "adapter_model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_vllm_reads_it_as_the_same_model(toy, codec, adapted, tmp_path, process_group):
    """vLLM's own reader of adapters, on our base, against our forward."""
    vllm = pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.lora.request import LoRARequest

    optimizer = model.adamw(model.trained_parameters(adapted), 0.1, 0.9, CPU)
    checkpoint.save_run(moved(adapted), optimizer, str(tmp_path), 1, {"settings": {}})
    folder = tmp_path / "step_000001"
    ids = list(range(20, 60))
    tree = model.Tree(model.TokenSpan(ids, [0] + [1] * (len(ids) - 1)))
    with torch.no_grad():
        ours = adapted(model.pack_trees(codec, [tree]))[0]
    real = vllm.LLM
    with mock.patch.object(vllm, "LLM", lambda *given, **named: real(
            *given, **named, enable_lora=True, max_lora_rank=8)):
        engine = VllmEngine(str(toy / "init"), codec, EngineConfig(256, 4, max_seqs=2))
    asked, found = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), []
    for adapter in (None, LoRARequest("ours", 1, str(folder))):
        (out,) = engine.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False,
                                     lora_request=adapter)
        entries = zip(ids[1:], out.prompt_logprobs[1:])
        found.append(torch.tensor([entry[i].logprob for i, entry in entries]))
    engine.close()
    base, theirs = found
    # vLLM computes the adapters' part in bf16; the adapters move log-probs by some nats.
    assert (theirs - ours).abs().max() < 0.1 < (base - ours).abs().max() / 5


@pytest.mark.parametrize("script", [sft, grpo])
def test_a_run_goes_on_as_if_it_had_not_stopped(train, varied_rewards, monkeypatch, script):
    flags = ["--lora-rank", RANK, "--lr", 1e-2, "--steps", 2]
    if script is grpo:
        flags += ["--beta", 0.1]
    straight = train(script.__name__, *flags, out="straight")
    name = "forward_backward" if script is sft else "update"
    real = getattr(script, name)

    def asked_to_stop(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    monkeypatch.setattr(script, name, asked_to_stop)
    half = train(script.__name__, *flags, out="halves", stopped=True)
    assert not equal(adapters(half), adapters(straight))
    monkeypatch.setattr(script, name, real)
    assert equal(adapters(train(script.__name__, *flags, out="halves")), adapters(straight))
