"""
More faults while running: torchrun itself, two nodes, an engine that never ends:
python -m pytest tests/all/test_faults_rest.py -q
"""
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_script
from test_faults import AT_STEP, HEAD, LIVE, command, goes_on, run, steps_of  # noqa: F401

from plumbing import runs


@pytest.fixture
def torchrun(command, tmp_path):
    """launch(..) as command(..) -> torchrun with its two ranks, running."""
    running = []

    def torchrun(*given):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                 2, *command(*given)]
        running.append(subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, cwd=ROOT))
        return running[-1]

    yield torchrun
    # a test that failed leaves no process; torchrun's ranks have sessions of their own
    for process in running:
        process.kill()
        subprocess.run(["pkill", "-9", "-f", str(tmp_path / "out")])


def finish(process, timeout=120):
    """-> (exit code, stdout, stderr without the launcher's own report)."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def alive(tmp_path):
    """Command lines of this run's processes that still live, half a second for the last to go."""
    time.sleep(0.5)
    found = subprocess.run(["ps", "-e", "-o", "stat=,args="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if str(tmp_path / "out") in line
            and not line.startswith("Z")]


def test_a_rank_that_is_killed_ends_the_run_and_loses_one_step(torchrun, toy, tmp_path):
    fault = AT_STEP.format(step=3, rank=1, what="saved(2); os.kill(os.getpid(), signal.SIGKILL)")
    code, out, err = finish(torchrun("sft", fault, "--steps", 4))
    assert code != 0 and "step 0002/0004" in out and "step 0003" not in out and not alive(tmp_path)
    assert runs.newest_checkpoint(str(tmp_path / "out")).endswith("step_000002")
    goes_on(toy, tmp_path, 4)


def test_a_scheduler_that_warns_the_launcher_loses_no_step(torchrun, toy, tmp_path):
    """SIGTERM to torchrun, which hands it to its ranks and gives them half a minute."""
    fault = AT_STEP.format(step=3, rank=0, what="open(sys.argv[sys.argv.index('--out') + 1] "
                           "+ '/third', 'w').close(); time.sleep(1)")
    process = torchrun("sft", fault, "--steps", 4, "--optimizer", "muon")
    until = time.monotonic() + 60
    while not (tmp_path / "out" / "third").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, out, err = finish(process)
    assert "stopped after step 3 of 4; the same command goes on" in out, err[-2000:]
    assert not alive(tmp_path), err[-2000:]
    assert steps_of(tmp_path / "out") == [1, 2, 3]
    goes_on(toy, tmp_path, 4, "muon")


# ------------------------------------------------------------------------------------------------
# Two nodes


VARIED = """
# Rewards that differ between rollouts, so that there is something to learn: a random base earns 0.
import runpy, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import rewards
real = rewards.score
def score(turns, *given, **named):
    return {{**real(turns, *given, **named), "paid_fmt": sum(map(ord, "".join(turns))) % 7 / 7}}
rewards.score = score
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_two_nodes_share_nothing_but_folders(toy, tmp_path):
    """Two launchers that find each other, as docs/recipe.md has it: a rank and a whole copy of the
    model in shards on each node. The engine, whole in each process, is the reference."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    (tmp_path / "varied.py").write_text(VARIED.format(root=ROOT))
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1,
             "--rdzv_backend", "c10d", "--rdzv_endpoint", place, tmp_path / "varied.py",
             os.path.join(ROOT, "tests", "reference.py"), os.path.join(ROOT, "grpo.py"),
             "--preset", "toy", "--ckpt", toy / "init", "--data", toy / "rl.jsonl", "--out",
             tmp_path / "out", *LIVE, "--steps", 3, "--lr", 5e-3, "--replicas", 2]
    nodes = [subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, cwd=ROOT) for _ in range(2)]
    ended = [finish(node) for node in nodes]
    assert [code for code, *_ in ended] == [0, 0], ended[0][2][-2000:] + ended[1][2][-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [m["step"] for m in rows] == [1, 2, 3]
    assert all(m["groups"] == 2 and m["skipped_update"] == 0 for m in rows)
    assert all(m["gap_max"] < 1e-3 for m in rows)
    assert len(list((tmp_path / "out" / "rollouts").iterdir())) == 6
    assert runs.is_complete(str(tmp_path / "out" / "last")) and not alive(tmp_path)


STUCK = """
    import eval
    from threading import Event
    from types import SimpleNamespace
    from engine import VllmEngine

    class Stuck(reference.ReferenceEngine):
        gpu, sleeping, hang = True, False, Event().wait
        engine = SimpleNamespace(engine_core=SimpleNamespace(
            shutdown=hang, engine_core=SimpleNamespace(
                model_executor=SimpleNamespace(shutdown=hang))))

        def close(self):
            VllmEngine.close(self, patience=0.5)

    rollout.make_engine = lambda ckpt, codec, *_, **__: Stuck(ckpt, codec)
"""


@pytest.mark.parametrize("script", ["grpo", "eval"])
def test_a_run_on_gpus_ends_although_vllm_never_does(command, toy, tmp_path, script):
    """No shutdown of this engine returns: the run is whole, and its exit code is 0."""
    if script == "grpo":
        given = command("grpo", STUCK, "--steps", 1)
    else:
        path, *_ = command("sft", STUCK)
        path.write_text(path.read_text().replace("sft.main", "eval.main"))
        given = [path, "--preset", "toy", "--ckpt", toy / "init", "--data", toy / "eval.jsonl",
                 "--out", tmp_path / "out", "--frames", 4, "--max-new-tokens", 6, "--quiet"]
    done = run_script(*given, ranks=2, timeout=120)
    assert done.returncode == 0 and not done.killed, done.stderr[-3000:]
    out = tmp_path / "out"
    if script == "grpo":
        assert "step 0001/0001" in done.stdout and runs.undamaged_checkpoint(out)[0]
        assert len((out / "log.jsonl").read_text().splitlines()) == 1
    else:
        assert "headline" in done.stdout
        assert json.loads((out / "summary.json").read_text())["results"][0]["n"] == 4
    assert not list(out.glob("*lock"))


def test_batches_that_teach_nothing_and_gradients_that_are_none_are_counted(run, tmp_path):
    """Step 1: rank 1 cannot read a video. Step 2: nobody can. Step 3: all rewards are equal on both
    ranks. Step 4: rank 1's gradient is not finite."""
    fault = """
        import dataclasses, random
        real_run, real_score, step = rollout.run, rewards.score, [0]
        real_clip = torch.nn.utils.clip_grad_norm_

        def run(sampler, *given, **named):
            step[0] += 1
            if step[0] == 2 or (step[0] == 1 and rank == 1):
                class Broken(rollout.Source):
                    def load(self, spec):
                        raise video.VideoError(spec["video"], "is broken")
                broken = Broken(sampler.source.root, sampler.source.cache)
                sampler = dataclasses.replace(sampler, source=broken)
            return real_run(sampler, *given, **named)

        def score(turns, *given, **named):
            fmt = 0.5 if step[0] == 3 else random.Random(turns[0] if turns else 0).random()
            return {**real_score(turns, *given, **named), "paid_fmt": fmt}

        def clip(parameters, limit):
            parameters = list(parameters)
            if step[0] == 4 and rank == 1:
                next(p for p in parameters if p.grad is not None).grad.fill_(float("nan"))
            return real_clip(parameters, limit)

        rollout.run, rewards.score, torch.nn.utils.clip_grad_norm_ = run, score, clip
    """
    done = run("grpo", fault, "--steps", 5)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [r["not_ok"] for r in rows] == [3, 6, 0, 0, 0]
    assert [r["skipped_update"] for r in rows] == [0, 1, 1, 0, 0]
    assert [r["zero_variance"] for r in rows][2:4] == [2, 0]
    assert [r["bad_updates"] for r in rows] == [0, 0, 0, 1, 0]
    assert done.stdout.count("skipped task") == 3
