"""
Tests of faults while running, on two ranks: python -m pytest tests/slow/test_faults.py -q

A rank that dies, hangs, raises or cannot write: every run ends within a deadline, with one reason
and a checkpoint that loads. Under torchrun if torchrun has to act; else the ranks are
started by preloaded.py, which saves their imports.
"""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT, run_script
from scripted import LIVE

from plumbing import checkpoint

HEAD = """
    import os, signal, sys, time
    sys.path[:0] = [{root!r}, {root!r} + "/tests"]
    import torch
    import model, launch, reference, rewards, rollout, sft, grpo, video
    from plumbing import checkpoint
    rollout.make_engine = reference.make_engine
    rank = int(os.environ.get("RANK", 0))
"""


@pytest.fixture
def command(toy, tmp_path):
    """command("sft" | "grpo", fault, *flags) -> script and flags of a run; `fault`: Python that is
    run before its main()."""
    def command(script, fault, *flags):
        path = tmp_path / f"{script}_faulty.py"
        main = f"\nif __name__ == '__main__':\n    launch.run_main({script}.main)\n"
        path.write_text(textwrap.dedent(HEAD.format(root=ROOT)) + textwrap.dedent(fault) + main)
        common = {"grpo": ("--data", toy / "rl.jsonl", *LIVE),
                  "sft": ("--data", toy / "sft.jsonl", "--batch-size=4", "--muon-lr=0")}
        return [path, "--preset", "toy", "--ckpt", toy / "init", "--video-root", toy,
                "--out", tmp_path / "out", "--save-every", 1, "--dp-replicate", 1,
                *common[script], *flags]

    return command


@pytest.fixture
def run(command):
    """run(..) as command(..) -> what its two ranks left; none of them had to be killed."""
    def run(*given):
        done = run_script(*command(*given), ranks=2, timeout=120)
        assert not done.killed, done.stderr[-3000:]
        return done

    return run


def steps_of(out):
    return [row["step"] for row in map(json.loads, (out / "log.jsonl").read_text().splitlines())
            if "grad_norm" in row]


def newest(out):
    return checkpoint.step_folders(str(out))[0]


def goes_on(toy, tmp_path, steps, muon_lr=0):
    """The same command on one rank goes on from the newest whole checkpoint."""
    done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "sft.jsonl", "--video-root", toy, "--batch-size", 4, "--save-every", 1,
                      "--muon-lr", muon_lr, "--dp-replicate", 1, "--steps", steps,
                      "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "out") == list(range(1, steps + 1))


AT_STEP = """
    def saved(step):
        out = sys.argv[sys.argv.index("--out") + 1]
        while not (checkpoint.step_folders(out) or [""])[0].endswith(f"step_{{step:06d}}"):
            time.sleep(0.1)

    real, calls = sft.forward_backward, []
    def backward(*given):
        calls.append(1)
        if len(calls) == {step} and rank == {rank}:
            {what}
        return real(*given)
    sft.forward_backward = backward
"""


def test_a_rank_that_raises_ends_the_run_with_its_traceback(run):
    """Rank 1 fails in its engine while rank 0 has finished its rollouts and waits."""
    fault = """
        if rank == 1:
            def poll(self):
                raise RuntimeError("the engine is on fire")
            reference.ReferenceEngine.poll = poll
    """
    done = run("grpo", fault, "--steps", 2)
    assert done.returncode != 0
    assert "RuntimeError: the engine is on fire" in done.stderr and "in poll" in done.stderr


def test_an_error_of_one_rank_alone_is_one_line_and_the_other_rank_adds_one(run):
    """No traceback of the collective in which rank 0 waited hides the reason."""
    fault = AT_STEP.format(step=2, rank=1, what='raise video.VideoError("a.mp4", "is gone")')
    done = run("sft", fault, "--steps", 3)
    said = [line for line in done.stderr.splitlines() if line.startswith("sft_faulty.py:")]
    assert said[0] == "sft_faulty.py: rank 1: a.mp4: is gone"
    assert len(said) == 2 and "rank 0: another rank has ended" in said[1], done.stderr
    assert "Traceback" not in done.stderr


# Neither ends at a signal, which torchrun sends when rank 0 leaves: here always first.
@pytest.mark.parametrize("hang", ["time.sleep(999)", "max(iter(int, 1))"],
                         ids=["waiting", "holding the interpreter"])
def test_a_rank_that_hangs_ends_the_run_with_its_stack(run, tmp_path, hang):
    less_patience = """
        real_beat = launch.reset_watchdog
        # loading may take its time
        def beat():
            launch.PATIENCE = 4.5 + 0.5 * rank if calls else 60.0
            real_beat()
        launch.reset_watchdog = beat
    """
    fault = textwrap.dedent(AT_STEP.format(step=2, rank=1, what=f"saved(1); {hang}"))
    fault += textwrap.dedent(less_patience)
    done = run("sft", fault, "--steps", 4)
    assert done.returncode != 0 and "step 0001/0004" in done.stdout
    assert "Timeout" in done.stderr  # faulthandler's
    assert re.search(r'sft_faulty.py", line \d+ in backward', done.stderr)  # where rank 1 hung
    assert newest(tmp_path / "out").endswith("step_000001")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_stops_all_ranks_with_one_line_and_an_older_checkpoint(
        run, toy, tmp_path, rank):
    """Files of one rank may not grow beyond 100 kB any more, as if the disk were full: the weights
    (rank 0) or a shard (rank 1) do not fit."""
    fault = AT_STEP.format(step=3, rank=rank, what="saved(2); import resource; "
                           "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    done = run("sft", fault, "--steps", 6)
    err = done.stderr
    assert done.returncode != 0
    # Of a shard torch says where its writer was.
    assert ".step.tmp" in err and "Traceback" not in err, err[-3000:]
    # nothing half-written has a final name
    left = sorted(n for n in os.listdir(tmp_path / "out") if n.startswith("step"))
    assert left == ["step_000001", "step_000002"]
    goes_on(toy, tmp_path, 4)


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
    assert newest(tmp_path / "out").endswith("step_000002")
    goes_on(toy, tmp_path, 4)


def test_a_scheduler_that_warns_the_launcher_loses_no_step(torchrun, toy, tmp_path):
    """SIGTERM to torchrun, which hands it to its ranks and gives them half a minute."""
    fault = AT_STEP.format(step=3, rank=0, what="open(sys.argv[sys.argv.index('--out') + 1] "
                           "+ '/third', 'w').close(); time.sleep(1)")
    process = torchrun("sft", fault, "--steps", 4, "--muon-lr", 6e-3)
    until = time.monotonic() + 60
    while not (tmp_path / "out" / "third").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, out, err = finish(process)
    assert "stopped after step 3; the same command goes on" in out, err[-2000:]
    assert not alive(tmp_path), err[-2000:]
    assert steps_of(tmp_path / "out") == [1, 2, 3]
    goes_on(toy, tmp_path, 4, 6e-3)


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
             tmp_path / "out", *LIVE, "--steps", 3, "--lr", 5e-3, "--dp-replicate", 2]
    nodes = [subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, cwd=ROOT) for _ in range(2)]
    ended = [finish(node) for node in nodes]
    assert [code for code, *_ in ended] == [0, 0], ended[0][2][-2000:] + ended[1][2][-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [m["step"] for m in rows] == [1, 2, 3]
    assert all(m["signal_groups"] == 2 and m["gap"] < 1e-4 for m in rows)
    assert len(list((tmp_path / "out" / "rollouts").iterdir())) == 6
    assert newest(tmp_path / "out").endswith("step_000003") and not alive(tmp_path)
