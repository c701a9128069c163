"""
More of model.py: odd layouts, sampling of the reference engine, bounds of its caches:
python -m pytest tests/slow/test_model.py -q
"""

import numpy as np
import torch
from album import logprobs, plain_tree, separate_and_packed
from reference import forward, generate
from test_model import gradients, relative, sampling_prompts

import model

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
