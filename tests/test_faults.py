"""
Tests of faults while running, on two ranks: python -m pytest tests/test_faults.py -q

A rank that dies, hangs, raises or cannot write: every run ends within a deadline, with one reason
and a checkpoint that loads. Under torchrun if torchrun has to act; else the ranks are
started by preloaded.py, which saves their imports.
"""
import json
import os
import re
import textwrap

import pytest
from conftest import ROOT, run_script

from plumbing import runs

HEAD = """
    import os, signal, sys, time
    sys.path[:0] = [{root!r}, {root!r} + "/tests"]
    import torch
    import model, launch, reference, rewards, rollout, sft, grpo, video
    from plumbing import checkpoint, runs
    rollout.make_engine = reference.make_engine
    rank = int(os.environ.get("RANK", 0))
"""
LIVE = ("--prompts", 2, "--group", 3, "--max-new-tokens", 6, "--set", "sub_max_new_tokens=4",
        "--temperature", 1.0, "--frames", 4, "--show-every", 0)


@pytest.fixture
def command(toy, tmp_path):
    """command("sft" | "grpo", fault, *flags) -> script and flags of a run; `fault`: Python that is
    run before its main()."""
    def command(script, fault, *flags):
        path = tmp_path / f"{script}_faulty.py"
        main = f"\nif __name__ == '__main__':\n    launch.run_main({script}.main)\n"
        path.write_text(textwrap.dedent(HEAD.format(root=ROOT)) + textwrap.dedent(fault) + main)
        common = {"grpo": ("--data", toy / "rl.jsonl", *LIVE),
                  "sft": ("--data", toy / "sft.jsonl", "--batch-size", 4,
                          "--optimizer", "adamw")}[script]
        return [path, "--preset", "toy", "--ckpt", toy / "init", "--video-root", toy,
                "--out", tmp_path / "out", "--save-every", 1, "--replicas", 1, *common, *flags]

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


def goes_on(toy, tmp_path, steps, optimizer="adamw"):
    """The same command on one rank goes on from the newest whole checkpoint."""
    done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "sft.jsonl", "--video-root", toy, "--batch-size", 4, "--save-every", 1,
                      "--optimizer", optimizer, "--steps", steps, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "out") == list(range(1, steps + 1))


AT_STEP = """
    def saved(step):
        out = sys.argv[sys.argv.index("--out") + 1]
        while not (runs.newest_checkpoint(out) or "").endswith(f"step_{{step:06d}}"):
            time.sleep(0.1)

    real, calls = sft.backward, []
    def backward(*given):
        calls.append(1)
        if len(calls) == {step} and rank == {rank}:
            {what}
        return real(*given)
    sft.backward = backward
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
        real_beat = launch.beat
        # loading may take its time
        launch.beat = lambda patience: real_beat(4.5 + 0.5 * rank if calls else 60.0)
    """
    fault = textwrap.dedent(AT_STEP.format(step=2, rank=1, what=f"saved(1); {hang}"))
    fault += textwrap.dedent(less_patience)
    done = run("sft", fault, "--steps", 4, "--patience", 60)
    assert done.returncode != 0 and "step 0001/0004" in done.stdout
    assert "Timeout" in done.stderr  # faulthandler's
    assert re.search(r'sft_faulty.py", line \d+ in backward', done.stderr)  # where rank 1 hung
    assert runs.newest_checkpoint(str(tmp_path / "out")).endswith("step_000001")


def test_ranks_end_together_if_the_disk_of_one_has_gone(run, tmp_path):
    """The other one still reads, so its tokens are in the log, but no such step counts."""
    done = run("sft", """
        real = sft.batch_packs

        def batch_packs(chats, step, *more):
            def gone(spec):
                raise video.VideoError(spec["video"], "is gone")

            if rank == 1 and step:
                chats.frames, chats.cache.witness = gone, "gone.mp4"
            return real(chats, step, *more)

        sft.batch_packs = batch_packs
    """, "--steps", 8)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "step 4: no video could be read for 3 steps; is the disk there?" in done.stderr
    rows = list(map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines()))
    assert [row["bad_steps"] for row in rows] == [0, 1, 2]
    assert all(row["trained_tokens"] for row in rows)


def test_grpo_ends_on_all_ranks_if_the_disk_of_one_has_gone(run, tmp_path):
    """Else the other rank's films would be all that is trained on, to the end."""
    done = run("grpo", """
        real = grpo.sample_batch

        def sample_batch(sampler, tasks, step, *more):
            def gone(path):
                raise video.VideoError(path, "is gone")

            if rank == 1 and step:
                video._identity = gone
            return real(sampler, tasks, step, *more)

        grpo.sample_batch = sample_batch
    """, "--steps", 8)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "step 4: no video could be read for 3 steps; is the disk there?" in done.stderr
    rows = list(map(json.loads, (tmp_path / "out" / "log.jsonl").read_text().splitlines()))
    assert [row["skipped_update"] for row in rows][1:] == [1, 1]


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
    said = [line for line in err.splitlines() if "could not be written" in line
            and line.startswith("sft_faulty.py:")]
    assert len(said) == 1 and "step_000003" in said[0], err[-3000:]
    assert "the newest whole one is" in said[0] and "step_000002" in said[0], err[-3000:]
    # nothing half-written is left
    left = sorted(n for n in os.listdir(tmp_path / "out") if "step" in n)
    assert left == ["step_000001", "step_000002"]
    goes_on(toy, tmp_path, 4)
