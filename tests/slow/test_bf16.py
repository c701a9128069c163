"""The GPU's precisions, on CPU: FSDP computes in bf16 and reduces gradients in fp32, tower,
reference, engine and its weights are bf16.

The scripts choose precision by device, so it is chosen here from outside. What the sums of bf16
cost is known then before a GPU is rented: the loss, the gradient, the gap between engine and
trainer, and that masters are touched by none of it. Run: pytest tests/slow/test_bf16.py
"""
import contextlib
import functools
import json
import sys
from unittest import mock

import pytest
import torch
from conftest import Overheard

import grpo
import launch
import model
import rollout
import sft
from plumbing import checkpoint

HALF = torch.bfloat16
SFT = ("--preset", "toy", "--muon-lr", 0, "--lr", 1e-4, "--steps", 1, "--batch-size", 8,
       "--warmup", 0)
UPDATE = ("--preset", "toy", "--beta", 0.01, "--lr", 1e-4)
GRPO = (*UPDATE, "--prompts", 2, "--num-generations", 2, "--frames", 8, "--max-new-tokens", 24)


@contextlib.contextmanager
def gpu_precisions():
    """All that asks for the precision of a GPU gets it -> list of the policies that are made."""
    import torch.distributed.fsdp as fsdp

    launch.import_shim()
    real_policy, real_dtype = model.wrap_policy, model.compute_dtype
    real_save, policies = checkpoint.save_run, []

    def wrapped(*args):
        policies.append(real_policy(*args))
        return policies[-1]

    def save_run(*args):  # in fp32: a step of 1e-4 could not be seen in bf16
        with mock.patch.object(model, "compute_dtype", real_dtype):
            return real_save(*args)

    with (mock.patch.object(fsdp, "MixedPrecisionPolicy",
                            functools.partial(fsdp.MixedPrecisionPolicy, HALF, torch.float32)),
          mock.patch.object(model, "wrap_policy", wrapped),
          mock.patch.object(checkpoint, "save_run", save_run),
          mock.patch.object(grpo, "gap_tolerance", lambda policy: 0.03),  # of a bf16 engine
          mock.patch.object(model, "compute_dtype", lambda device: HALF)):
        yield policies


def run(script, out, *flags):
    """main() of a script in this process."""
    with mock.patch.object(sys, "argv", [f"{script.__name__}.py", *map(str, flags), "--out",
                                         str(out)]):
        script.main()


def read(out):
    """-> (rows of the log, the weights at the end)."""
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return rows, load_file(out / "last" / "model.safetensors")


def both_steps(toy, record, out):
    """One cold-start step and one update from recorded rollouts, each from the random
    checkpoint."""
    run(sft, out / "sft", *SFT, "--ckpt", toy / "init", "--data", toy / "sft.jsonl")
    run(grpo, out / "grpo", *UPDATE, "--ckpt", toy / "init", "--rollouts", record,
        "--video-root", toy)


def said(sample, turn):
    call = ('<tool_call>\n{"name": "crop_video", "arguments": '
            '{"start_time": 8, "end_time": 16}}\n</tool_call>')
    turns = (f"hm</think>{call}", "hm</think><answer>red</answer>")
    return turns[turn] if sample == 0 else "hm<answer>no</answer>"


@pytest.fixture(scope="module")
def sampled(toy, tmp_path_factory):
    """Two steps of grpo.py with vLLM, all of it as on a GPU -> (rows of its log, rollouts of the
    first step, dtypes of trained weights, tower, reference)."""
    launch.import_shim()
    import vllm

    out, engines = tmp_path_factory.mktemp("sampled"), []
    real, llm = rollout.make_engine, vllm.LLM

    def make_engine(*args, **more):
        with mock.patch.object(vllm, "LLM", lambda *a, **k: llm(*a, **{**k, "dtype": "bfloat16"})):
            engines.append(Overheard(real(*args, **more), said))
        return engines[0]

    try:
        with gpu_precisions() as policies, mock.patch.object(rollout, "make_engine", make_engine):
            run(grpo, out, *GRPO, "--steps", 2, "--ckpt", toy / "init", "--data", toy / "rl.jsonl")
    finally:
        for engine in engines:
            with contextlib.suppress(Exception):  # closed by the script, unless it failed
                engine.close()
    policy, reference = policies
    parts = (model.trained_parameters(policy), policy.hf.model.visual.parameters(),
             reference.parameters())
    dtypes = [{p.dtype for p in part} for part in parts]
    return read(out)[0], out / "rollouts" / "step_000000.rank0.jsonl", dtypes


@pytest.fixture(scope="module")
def one_rank(toy, sampled, tmp_path_factory):
    """-> {precision: folder of both_steps}."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("fp32", "bf16")}
    with mock.patch.object(grpo, "gap_tolerance", lambda *_: 0.03):  # of rollouts in bf16
        both_steps(toy, sampled[1], folders["fp32"])
    with gpu_precisions():
        both_steps(toy, sampled[1], folders["bf16"])
    return folders


def cosine(toy, a, b):
    """Between the updates of two runs."""
    from safetensors.torch import load_file

    base = load_file(toy / "init" / "model.safetensors")
    # the tower is rounded to bf16, not trained
    names = [n for n in sorted(base) if "visual" not in n]
    one, two = (torch.cat([(weights[n] - base[n]).flatten() for n in names]) for weights in (a, b))
    # masters are fp32: moved by the learning rate, unrounded
    assert one.abs().max().item() == pytest.approx(1e-4, rel=0.01)
    return torch.nn.functional.cosine_similarity(one, two, dim=0).item()


def test_engine_and_trainer_agree_within_the_rounding_of_bf16(sampled):
    """The second step samples from weights that travelled in bf16. In fp32 the gap is 1e-6: were it
    so here, nothing would be tested."""
    rows, _, dtypes = sampled
    assert dtypes == [{torch.float32}, {HALF}, {HALF}]
    for row in rows:
        assert 1e-5 < row["gap"] < 4e-3 and row["kappa"] == 0.5
        assert row["signal_groups"] == 2
    # the reference's bf16 shards compute what the masters do
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"]


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_a_step_in_bf16_is_nearly_the_step_in_fp32(one_rank, toy, script):
    ((half,), moved), ((full,), wanted) = (read(one_rank[n] / script) for n in ("bf16", "fp32"))
    assert half["loss"] != full["loss"] == pytest.approx(half["loss"], rel=2e-3)
    assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.02)
    # Adam's first step is the sign of the gradient, which rounding turns if it is small
    assert cosine(toy, moved, wanted) > 0.9
