"""
More of model.py: odd layouts, sampling of the reference engine, bounds of its caches:
python -m pytest tests/slow/test_model.py -q
"""
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from album import logprobs, plain_tree, separate_and_packed
from reference import forward, generate
from test_model import gradients, relative, sampling_prompts

import model
from model import Span, Tree

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# One forward, many sequences


def test_grouped_queries_and_checkpointed_layers_do_not_change_a_tree(codec, toy, album):
    """Real checkpoints share key heads between query heads and recompute layers in backward; the
    toy does neither."""
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    config = AutoConfig.from_pretrained(str(toy / "init"))
    config.text_config.num_key_value_heads = 2
    torch.manual_seed(0)
    policy = model.as_policy(Qwen3VLForConditionalGeneration(config), codec, CPU, "none")
    vision = album.features(policy, codec)
    separate, trees = separate_and_packed(codec, album)
    alone = torch.cat([forward(policy, model.pack_trees(codec, [t]), vision)[0]
                       for t in separate])
    wanted = gradients(policy, alone.square().sum())
    policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    together, _ = forward(policy, model.pack_trees(codec, trees), vision)
    assert (together - alone).abs().max() < 1e-5
    assert relative(gradients(policy, together.square().sum()), wanted) < 1e-5


def test_flex_attention_never_runs_uncompiled(monkeypatch):
    """Past torch's limit of compilations the mask would be a matrix [L, L], without an error. The
    limit is ours, and here two, to save time."""
    from torch.nn.attention import flex_attention as flex

    made, options, real = [], [], torch.compile

    def backend(graph, _):  # no compiler: counts, and returns tensors of the right shape
        made.append(graph)
        outputs = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])

        def run(*given):
            query = next(x for x in given if torch.is_tensor(x) and x.is_floating_point())
            return tuple(query * 1 for _ in range(outputs))
        return run

    def compiled(function, **more):
        options.append(more)
        return real(function, **{**more, "recompile_limit": 2, "backend": backend})

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(model, "compiled_flex",
                        functools.cache(model.compiled_flex.__wrapped__))
    torch.compiler.set_stance("default")
    codec = SimpleNamespace(channel="video", temporal=2, patch=16, merge=2, pad=-5)
    pack = model.pack_trees(codec, [Tree(Span([1] * 200, [0] * 199 + [1]))])
    mask = model.block_mask(pack, CPU)

    def attend(width):
        q = torch.randn(1, 2, 200, width)
        model.compiled_flex()(q, q, q, block_mask=mask)

    attend(16)
    attend(32)
    with pytest.raises(Exception, match="fullgraph"):
        attend(64)
    assert len(made) == 2 and options[0]["recompile_limit"] == 64


# ------------------------------------------------------------------------------------------------
# Sampling


def test_a_sample_does_not_depend_on_what_it_was_batched_with(lively, codec, album):
    """Own seed, own generator, own padding: batch mates and their lengths change nothing; another
    seed does."""
    vision, prompts = album.features(lively, codec), sampling_prompts(codec, album)
    batch = generate(lively, codec, vision, prompts, [9, 5, 7], [0.9] * 3, [3, 4, 5])
    for pair, limit, seed, (ids, logps) in zip(prompts, [9, 5, 7], [3, 4, 5], batch):
        (alone, alone_logps), = generate(lively, codec, vision, [pair], [limit], [0.9], [seed])
        assert alone == ids and np.allclose(alone_logps, logps, atol=1e-4)
        table = logprobs(lively, codec, vision, [plain_tree(*pair, ids)], temperature=0.9)
        assert np.allclose(table, logps, atol=1e-4)  # of the distribution that was sampled from
        assert len(ids) == limit or ids[-1] == codec.eos
    other = generate(lively, codec, vision, prompts, [9, 5, 7], [0.9] * 3, [6, 7, 8])
    assert [ids for ids, _ in other] != [ids for ids, _ in batch]
