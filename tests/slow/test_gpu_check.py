"""
Tests of tools/gpu_check.py: python -m pytest tests/slow/test_gpu_check.py -q

The whole command on a CPU, and for every row a fault that it must see.
"""
import sys
from unittest import mock

import pytest
import reference
import torch
from conftest import run_script

import grpo
import model
import rollout
from plumbing import checkpoint, qwen35
from tools import gpu_check

ROWS = ["engine: gap to the trainer, nats", "forwards: log-probs, nats",
        "forwards: gradient, relative", "moved: gap to the trainer, nats",
        "moved: its share of that of the old weights"]
STEP = {"signal_groups": 2, "kl": 1e-6}


def failed_rows(toy, ckpt):
    """What one rank checks, with the reference engine -> names of the rows that fail."""
    flags = f"--ckpt {ckpt} --data {toy / 'rl.jsonl'} --preset toy --beta 0.01 --frames 64"
    with (mock.patch.object(sys, "argv", ["gpu_check.py", *flags.split()]),
          mock.patch.object(rollout, "make_engine", reference.make_engine)):
        return names_that_fail(gpu_check.check_rank, grpo.parse_args())


def names_that_fail(check, *arguments):
    seen = {}

    def row(name, value, bound):
        seen[name] = value <= bound

    with mock.patch.object(gpu_check, "row", row):
        check(*arguments)
    return [name for name, passes in seen.items() if not passes]


def test_the_command_on_a_cpu(toy, saved, tmp_path):
    """Two ranks, vLLM on each. The random policy earns too little for steps with a signal."""
    done = run_script("tools/gpu_check.py", "--ckpt", saved[1], "--data", toy / "rl.jsonl",
                      "--preset", "toy", "--beta", 0.01, "--prompts", 4, "--num-generations", 4,
                      "--out", tmp_path / "out", timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.endswith((": ok", ": FAIL"))]
    assert len(lines) == len(ROWS) + 1, done.stdout[-3000:] + done.stderr[-3000:]
    for name, line in zip(ROWS, lines):
        assert line.startswith(name) and line.endswith(": ok")
    assert done.returncode == int(any(line.endswith("FAIL") for line in lines))
    assert "step 0003/0003" in done.stdout


def shift_branches(codec, trees, plain=model.pack_trees):
    """Positions that go on one too late behind a prompt that is shared."""
    pack = plain(codec, trees)
    if len(trees[0].branches) > 1:
        pack.positions[..., pack.branch > 0] += 1
    return pack


def first_gradient_wrong(*arguments, plain=checkpoint.load_policy, **more):
    """The policy's gradients are a hundredth too long, those of the reference are right."""
    policy = plain(*arguments, **more)
    first_gradient_wrong.loaded += 1
    if first_gradient_wrong.loaded == 1:
        for p in model.trained_parameters(policy):
            p.register_hook(lambda gradient: 1.01 * gradient)
    return policy


class Louder(reference.ReferenceEngine):
    """Log-probs of another temperature."""

    def poll(self):
        done = super().poll()
        for completion in done:
            completion.logps = [1.05 * logp for logp in completion.logps]
        return done


@pytest.mark.parametrize("fault, rows", [
    (None, []),
    ((reference, "ReferenceEngine", Louder), [ROWS[0], ROWS[3]]),
    ((model, "pack_trees", shift_branches), ROWS[1:3]),
    ((checkpoint, "load_policy", first_gradient_wrong), ROWS[2:3]),
    ((reference.ReferenceEngine, "wake", lambda engine, weights: None), ROWS[3:])])
def test_each_row_sees_its_fault(toy, saved, fault, rows):
    first_gradient_wrong.loaded = 0
    if fault is None:
        return_value = failed_rows(toy, saved[1])
    else:
        with mock.patch.object(*fault):
            return_value = failed_rows(toy, saved[1])
    assert set(rows) <= set(return_value) and bool(rows) == bool(return_value)


def test_the_rows_of_the_gated_delta_kernels():
    plain = qwen35.delta_kernel(gpu_check.CPU)

    def forgetful(*arguments, g, **more):
        return plain(*arguments, g=1.1 * g, **more)

    for name, pair in (("right", [plain, plain]), ("wrong", [plain, forgetful])):
        with mock.patch.object(qwen35, "delta_kernel", side_effect=pair):
            rows = names_that_fail(gpu_check.check_delta, torch.device("cpu"), 1e-5)
        assert bool(rows) == (name == "wrong")


@pytest.mark.parametrize("log, rows", [
    ([STEP, STEP, STEP], 0),
    ([STEP, {"signal_groups": 0}, {**STEP, "kl": 2e-6}], 0),
    ([STEP, {**STEP, "kl": 0.0}, {**STEP, "kl": 0.0}], 1),  # the weights have not moved
    ([STEP, {"signal_groups": 0}, {"signal_groups": 0}], 1)])
def test_the_rows_of_the_steps(log, rows):
    assert len(names_that_fail(gpu_check.check_steps, log)) == rows
