"""
Tests of tools/plan.py: python -m pytest tests/test_plan.py -q

Counted against what is really allocated, at small sizes: bytes of parameters, gradients and
moments, and what autograd keeps for backward.
"""
import pytest
import torch
import transformers
from fixtures import hf_config

from tools import plan


@pytest.mark.parametrize("name, billions", [
    ("2B", 2.13), ("4B", 4.44), ("8B", 8.77), ("32B", 33.36), ("3.5-9B", 9.41)])
def test_public_sizes_have_the_parameters_of_their_model_cards(name, billions):
    """And those of transformers' own models: largest layer, layers, tower, sides of matrices."""
    n = plan.parameter_counts(plan.read_config(name))
    assert (n["trained"] + n["tower"]) / 1e9 == pytest.approx(billions, rel=0.002)
    assert n["layers"] + n["root"] == n["trained"]
    with torch.device("meta"):
        config = hf_config(name)
        hf = getattr(transformers, config.architectures[0])(config)
    decoder = hf.model.language_model.layers
    each = [sum(p.numel() for p in layer.parameters()) for layer in decoder]
    sides = sum(sum(p.shape) for p in decoder.parameters() if p.ndim == 2)
    tower = sum(p.numel() for p in hf.model.visual.parameters())
    assert (n["layer"], n["layers"], n["sides"], n["tower"]) == (max(each), sum(each), sides, tower)


def test_the_largest_pack_is_the_largest_that_fits():
    config, options = plan.read_config("8B"), {"gpus": 8}
    tokens = plan.largest_pack(config, 70.0, **options)
    total = [plan.peak(plan.memory_use(config, pack_tokens=tokens + n, **options)) for n in (0, 1)]
    assert total[0] <= 70.0e9 < total[1] and tokens > 1000


@pytest.mark.parametrize("flags, says", [
    (("--gpus", 2, "--beta", 0, "--set", "gradient_checkpointing=true"), "does not fit"),
    (("--set", "gradient_checkpointing=false"), "while: top layer"), ((), "fits (limit 75.2"),
    (("--pack-tokens", 100_000), "does not fit while: top layer"), (("--gpus", 1), "does not fit"),
    (("--gpus", 1, "--lora-rank", 64), "fits (limit 75.2"),
    (("--set", "dp_replicate=0"), "does not fit while"), (("--max-model-len", 200_000), "NOT ONE"),
    (("--gpu-memory-utilization", 0), "fits"), (("--gpu-gb", 40), "does not fit while")])
def test_command_line_says_what_fits_and_each_flag_counts(start, flags, says):
    code, out, _ = start(plan, "8B", *flags)
    assert says in out and code == (0 if says.startswith("fits") else 1)
    assert ("vLLM" in out) == (flags != ("--gpu-memory-utilization", 0))


@pytest.mark.parametrize("flags, why", [
    (("/no/such",), "neither one of 2B"), (("8B", "--gpus", "0"), "--gpus"),
    (("8B", "--set", "dp_replicate=3"), "--gpus"),
    (("8B", "--gpu-memory-utilization", "1"), "--gpu-memory-utilization")])
def test_bad_input_is_one_line(start, flags, why):
    code, _, err = start(plan, *flags)
    assert code == 2 and why in err
