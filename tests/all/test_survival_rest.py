"""
Runs that are killed at random, with rollouts and with vLLM; trackers; clocks:
python -m pytest tests/all/test_survival_rest.py -q
"""
import json

import pytest
from test_survival import LIVE, RUNNER, check_killed, go, kills, run, same, steps_of, weights  # noqa: F401

# ------------------------------------------------------------------------------------------------
# Killed


def drawn(folder):
    """What was sampled from what: of every step the tasks, K, samples and ids."""
    return [[(row["group"], row["sample"], row["K"], row["ids"])
             for row in map(json.loads, path.read_text().splitlines())]
            for path in sorted((folder / "rollouts").iterdir())]


def test_reinforcement_learning_killed_draws_the_same_and_learns_the_same(toy, go, kills):
    """The same with rollouts, from the reference engine, which is deterministic to the bit."""
    steps = 2 * kills + 5
    words = ["grpo.py", "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--steps", steps,
             "--frames", "gated", "--show-every", 0, *LIVE]
    straight, killed = go(0, words, "straight"), go(kills, words, "killed")
    check_killed(straight, killed, steps)
    assert drawn(straight) == drawn(killed) and len(drawn(killed)) == steps


def test_killed_runs_with_vllm_draw_the_same_tasks_budgets_and_seeds(toy, go):
    """vLLM's batches depend on time, so its log-probs differ in their last bits, and with them what
    is sampled now and then; what is asked for does not."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    words = ["grpo.py", "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--steps", 4,
             "--frames", "gated", "--show-every", 0, *LIVE, "--vllm"]
    straight, killed = go(0, words, "straight"), go(1, words, "killed")
    assert steps_of(killed) == list(range(1, 5))
    a, b = ([[row[:3] for row in step] for step in drawn(folder)] for folder in (straight, killed))
    assert a == b
    # of 24 rollouts, ids and all
    assert sum(x == y for s, t in zip(drawn(straight), drawn(killed)) for x, y in zip(s, t)) > 16
