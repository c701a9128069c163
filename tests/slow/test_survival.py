"""
Tests of stopping and going on: python -m pytest tests/slow/test_survival.py -q

Runs that are asked to stop, runs that are killed where it hurts most, gradients that are not
finite. Torn checkpoints are in test_checkpoint.py.
"""
import json
import math
import os
import signal
import textwrap
import time

import pytest
import torch
from conftest import ROOT, run_script
from scripted import LIVE

import launch
import rollout
from plumbing import checkpoint

# ------------------------------------------------------------------------------------------------
# Asked to stop


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "last" / "model.safetensors")


def same(a, b):
    return max((a[n] - b[n]).abs().max().item() for n in a)


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()
            if "rollout_s" in line or "loss" in line]


def test_grpo_stops_when_asked_and_goes_on_as_if_it_had_not(train, monkeypatch, capsys):
    """SIGTERM in the middle of the second step's rollouts: the step is finished and saved."""
    straight, real, times = train("grpo", "--steps", 3, out="straight"), rollout.load_overview, []

    async def asked_to_stop(episode, sampler):
        if episode.policy_step == 1 and not times:
            times.append(time.time())
            os.kill(os.getpid(), signal.SIGTERM)
        return await real(episode, sampler)

    monkeypatch.setattr(rollout, "load_overview", asked_to_stop)
    parts = train("grpo", "--steps", 3, out="parts", stopped=True)
    assert times and "stopped after step 2" in capsys.readouterr().out
    assert steps_of(parts) == [1, 2] and os.readlink(parts / "last") == "step_000002"
    train("grpo", "--steps", 3, out="parts")  # the same command
    assert steps_of(parts) == [1, 2, 3] and "going on after step 2" in capsys.readouterr().out
    assert same(weights(straight), weights(parts)) == 0.0
    a, b = ([[json.loads(x)["ids"] for x in p.read_text().splitlines()]
             for p in sorted((f / "rollouts").iterdir())] for f in (straight, parts))
    assert a == b
    train("grpo", "--steps", 3, out="parts")
    assert "nothing to do" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# Gradients that are not finite


@pytest.mark.parametrize("script", ["grpo", "sft"])
def test_an_update_without_a_finite_gradient_is_skipped(train, varied_rewards, monkeypatch, script):
    """One bad update of three: the weights are those of the other two; bad ones in a row stop the
    run, which leaves its checkpoint."""
    spoilt, seen, real = {1}, [], torch.nn.utils.clip_grad_norm_

    def clip(parameters, limit):
        parameters = list(parameters)
        if len(seen) in spoilt:
            parameters[0].grad.fill_(math.nan) if parameters[0].grad is not None else None
        seen.append(1)
        return real(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    folder = train(script, "--steps", 3)
    log = [json.loads(s) for s in (folder / "log.jsonl").read_text().splitlines() if "loss" in s]
    assert [math.isfinite(row["grad_norm"]) for row in log] == [True, False, True]
    assert all(torch.isfinite(w).all() for w in weights(folder).values())
    spoilt.update(range(99))
    with pytest.raises(launch.RunError, match="no finite gradient"):
        train(script, "--steps", 9, "--resume")
    assert checkpoint.step_folders(str(folder))[0].endswith("step_000003")


# ------------------------------------------------------------------------------------------------
# Killed


RUNNER = """
    import os, random, signal, sys, time
    import model, launch, sft, grpo, video, rollout, reference, rewards, handmade
    from plumbing import checkpoint

    def score(turns, *_, **__):  # a random policy earns nothing, so nothing would be learnt
        value = sum(map(ord, "".join(turns))) % 7 / 7
        return handmade.reward(value, 0.5 * value * value, 0.0)

    rollout.make_engine, rewards.score = reference.make_engine, score

    kills, log, words = int(sys.argv[1]), os.path.join(sys.argv[-1], "log.jsonl"), sys.argv[2:]
    rng = random.Random(7)

    def lines():
        return open(log).read().count("\\n") if os.path.exists(log) else 0

    for attempt in range(kills + 1):
        before, child = lines(), os.fork()
        if child == 0:  # imports are shared: an attempt costs a second; the parent has no threads
            sys.argv = words
            try:
                launch.run_main({"sft.py": sft, "grpo.py": grpo}[words[0]].main)
            finally:
                sys.stdout.flush()
                os._exit(0)
        if attempt == kills:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        grown = rng.choice((0, 1, 2))  # while it starts; or so many steps further on
        while grown and lines() < before + grown:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3 if grown else 2.0))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended before it was killed"
"""


@pytest.fixture
def go(tmp_path):
    """go(kills, words, out) -> run folder of a run that was killed so many times."""
    path = f"import sys\nsys.path[:0] = [{ROOT!r}, {ROOT + '/tests'!r}]\n"
    (tmp_path / "runner.py").write_text(path + textwrap.dedent(RUNNER))

    def go(kills, words, out):
        done = run_script(tmp_path / "runner.py", kills, *words, "--preset", "toy",
                          "--save-every", 1, "--out", tmp_path / out, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        return tmp_path / out

    return go


def check_killed(straight, killed, steps):
    """Nothing was trained twice, nothing torn was loaded, nothing is left over."""
    assert steps_of(killed) == list(range(1, steps + 1))
    weights = [(f / "last" / "model.safetensors").read_bytes() for f in (straight, killed)]
    assert weights[0] == weights[1]
    left = [n for n in os.listdir(killed) if n.startswith((".", "step_")) and n != ".lock"]
    assert sorted(left) == [f"step_{n:06d}" for n in (steps - 1, steps)], left
    norms = [[json.loads(line)["grad_norm"] for line in (f / "log.jsonl").open()]
             for f in (straight, killed)]
    assert norms[0] == norms[1] and min(norms[0]) > 0


@pytest.fixture
def kills(request):
    """How often a run is killed; it has to be long enough for all of them."""
    return request.config.getoption("--kills")


def test_a_run_killed_many_times_ends_with_the_weights_of_one_that_was_not(toy, go, kills):
    """SIGKILL at random moments, a save after every step."""
    steps = 2 * kills + 5
    words = ["sft.py", "--ckpt", toy / "init", "--data", toy / "sft.jsonl", "--batch-size", 4,
             "--steps", steps]
    check_killed(go(0, words, "straight"), go(kills, words, "killed"), steps)


# ------------------------------------------------------------------------------------------------
# Killed


def drawn(folder):
    """What was sampled from what: of every step the tasks, K, samples and ids."""
    return [[(row["group"], row["sample"], row["K"], row["ids"])
             for row in map(json.loads, path.read_text().splitlines())]
            for path in sorted((folder / "rollouts").iterdir())]


def test_reinforcement_learning_killed_draws_the_same_and_learns_the_same(toy, go, kills):
    """The same with rollouts of the reference engine, one sequence at a time. Of 2 frames the tower
    makes other last bits beside other videos, and each task comes back after three steps."""
    steps = 2 * kills + 5
    words = ["grpo.py", "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--steps", steps,
             *LIVE, "--max-num-seqs", 1, "--frames", 2]
    straight, killed = go(0, words, "straight"), go(kills, words, "killed")
    check_killed(straight, killed, steps)
    assert drawn(straight) == drawn(killed) and len(drawn(killed)) == steps
