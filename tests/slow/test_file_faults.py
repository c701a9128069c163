"""
Tests of faults between two writes: python -m pytest tests/slow/test_file_faults.py [--all-faults]

A save is a hundred file operations. At each of them the process is killed, or the operation fails;
then the same command is given again, and is judged by what users read: `last`, `best`, the log,
rollouts. A sample of the operations without --all-faults, all of them with it.
"""
import builtins
import contextlib
import errno
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import sys
import traceback
import types

import pytest
import torch
from safetensors.torch import load_file

import chat
import grpo
import launch
import model
import rollout
import sft
from plumbing import checkpoint, judge, runs

# ------------------------------------------------------------------------------------------------
# A disk that fails


class Disk:
    """Counts what this process does to files while it is `on`, and strikes at operation number
    `at`. how: "kill" ends the process in the middle of it; "once" is a bad block (EIO); "full"
    leaves no room from then on (ENOSPC)."""

    def __init__(self, how, at):
        self.how, self.at, self.done, self.on = how, at, [], False
        for name in ("fsync", "replace", "rename", "symlink", "remove", "unlink", "rmdir", "mkdir",
                     "chmod", "fchmod", "truncate"):
            self.watch(os, name)
        self.open, builtins.open, io.open = open, self.opened, self.opened

    def watch(self, module, name):
        real = getattr(module, name)

        def watched(*given, **named):
            self.touch(name, given[0])
            if name != "fsync":  # of which a living machine shows nothing
                return real(*given, **named)

        setattr(module, name, watched)

    def opened(self, file, mode="r", *given, **named):
        writes = set(mode) & set("wax+") and not isinstance(file, int)
        if writes:
            self.touch("open", file, lambda: self.open(file, mode, *given, **named))
        file = self.open(file, mode, *given, **named)
        return Written(self, file) if writes else file

    def touch(self, name, path, half=lambda: None):
        """An operation begins. half: what becomes of the file if the process dies in it."""
        if not self.on:
            return
        self.done.append((name, str(path)))
        now = len(self.done)
        if now == self.at and self.how == "kill":
            half()
            os._exit(137)
        room = name in ("open", "write", "mkdir", "symlink", "serialize_file")
        if now == self.at or (now > self.at and self.how == "full" and room):
            number = errno.ENOSPC if self.how == "full" else errno.EIO
            raise OSError(number, os.strerror(number), str(path))


class Written:
    """A file that is open for writing."""

    def __init__(self, disk, file):
        self.disk, self.file = disk, file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __iter__(self):
        return iter(self.file)

    def write(self, data):
        def half():
            self.file.write(data[:len(data) // 2])
            self.file.flush()

        self.disk.touch("write", self.file.name, half)
        return self.file.write(data)


def forked(work, folder, how=None, at=0):
    """work(disk) as the main() of a script, in a forked child -> (exit code, stdout, stderr, the
    operations that were counted)."""
    names = [os.path.join(folder, kind) for kind in ("stdout", "stderr", "done")]
    # A timer of launch.reset_watchdog has a thread that no fork copies, so the child would wait.
    faulthandler.cancel_dump_traceback_later()
    child = os.fork()
    if child == 0:  # whatever is changed here is changed in the child alone
        signal.alarm(300)  # a child that hangs fails its test, and holds up no other
        code = 99
        try:
            for number, name in enumerate(names[:2], 1):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
            sys.__stderr__, disk = sys.stderr, Disk(how, at)
            try:
                launch.run_main(lambda: work(disk))
                code = 0
            except SystemExit as stop:
                code = stop.code
            disk.on = False
            with disk.open(names[2], "w") as f:
                json.dump(disk.done, f)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out, err = (open(name).read() for name in names[:2])
    return code, out, err, json.load(open(names[2])) if code in (0, 1, 2) else []


def sample(request, done, how):
    """Numbers of the operations to strike at: all of them, or a sample (larger with --all) in which
    each kind occurs at the end, where links are made and old checkpoints deleted."""
    numbers = range(1, len(done) + 1)
    if request.config.getoption("--all-faults"):
        return numbers
    first, every = {"kill": 1, "once": 2, "full": 3}[how], 1 + 2 * request.config.getoption("--all")
    last = list({name: n for n, (name, _) in enumerate(done, 1)}.values())
    return sorted({*numbers[8 * first::120 // every], *last[first - 1::12 // every]})


# ------------------------------------------------------------------------------------------------
# A run of almost nothing


class Tiny(torch.nn.Module):
    """A policy of one matrix, which holds the number of steps that it has taken."""

    def __init__(self):
        super().__init__()
        self.hf = torch.nn.Module()
        self.hf.config = types.SimpleNamespace(tie_word_embeddings=False)
        self.hf.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.hf.model = types.SimpleNamespace(visual=None)
        self.codec = types.SimpleNamespace(base=types.SimpleNamespace(keep_fp32=("none",)), files={
            "config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"template"})
        self.stored_as, self.features = "F32", None

    def steps(self):
        return round(self.hf.weight[0, 0].item())


VALUES = [5.0, 3.0, 4.0, 2.0, 6.0]  # held-out, by step: steps 1, 2 and 4 are the best so far


def stage(script, folder, out, steps, window):
    """-> main() of sft.py or grpo.py with such a policy. The operations of step `window`, its
    evaluation and its save are counted; 0: those of the start; None: none."""
    def work(disk):
        policy, nothing = Tiny(), types.SimpleNamespace(load=None)
        checkpoint.resolve_checkpoint = lambda path: path
        checkpoint.load_sharded, chat.load_codec = lambda *_, **__: policy, lambda *_: policy.codec
        model.VisionFeatures = lambda *_: nothing
        model.adamw = lambda *_: torch.optim.SGD([policy.hf.weight], lr=1.0)
        {"sft": stand_in_for_sft, "grpo": stand_in_for_grpo}[script](policy, disk, window)
        data = folder / "data"
        words = ["--ckpt", folder / "base", "--data", data, "--val", data, "--out", out,
                 "--steps", steps, *"--save-every 1 --eval-every 1 --set patience=60".split()]
        words += {"grpo": "--missing-videos 1 --prompts 2 --num-generations 2 --beta 0",
                  "sft": "max_grad_norm=0 --batch-size 1 --min-lr 1 --warmup 0"}[script].split()
        sys.argv, disk.on = [f"{script}.py", *map(str, words)], window == 0
        {"sft": sft, "grpo": grpo}[script].main()

    return work


def stand_in_for_sft(policy, disk, window):
    def backward(*_):
        disk.on, policy.hf.weight.grad = policy.steps() + 1 == window, -torch.ones(2, 2)
        return 1 / (policy.steps() + 1), 4

    sft.Chats = lambda *_: types.SimpleNamespace(rows=[{"messages": ()}] * 5, frames=None, path="d",
                                                 broken=set())
    sft.batch_packs = lambda *_: ([], None, False, [])
    sft.build_optimizers, sft.forward_backward = lambda *_: [model.adamw()], backward
    sft.held_out_loss = lambda *_: VALUES[policy.steps() - 1]


def stand_in_for_grpo(policy, disk, window):
    """Every context is full at once, so episodes end before a token is sampled."""
    real_batch, real_update = grpo.sample_batch, grpo.update

    def sample_batch(*given):
        disk.on = policy.steps() + 1 == window
        return real_batch(*given)

    def update(*given):
        with torch.no_grad():
            policy.hf.weight += 1
        return real_update(*given)

    def evaluate(log, sampler, held, step, args):
        value = VALUES[step - 1] if step else 9.0
        log.write({"step": step, "val": value}, "")
        return 1 / value, ["held"]

    model.engine_dtype = lambda *_: torch.float32
    rollout.make_engine = lambda *_, **__: types.SimpleNamespace(
        max_seqs=4, sleep=lambda: 0, wake=list, sync=list, close=bool)
    rollout.check_context, rollout.load_overview = lambda *_: None, no_room
    grpo.sample_batch, grpo.update, grpo.evaluate = sample_batch, update, evaluate


async def no_room(episode, sampler):
    episode.fail("context", "no room")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Once, and not in every child: the optimizer alone imports torch's compiler."""
    import torch.distributed.checkpoint._fsspec_filesystem
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    torch.optim.SGD(Tiny().parameters())


@pytest.fixture
def play(request, tmp_path):
    """play(name, window, how, at) -> (folder of the run, *what `forked` returns). The run goes on
    from step 2, in which it was killed between its checkpoint and the links."""
    def play(name, window=None, how=None, at=0, steps=5):
        out = tmp_path / name
        if not out.exists() and steps == 5:
            shutil.copytree(begun, out, symlinks=True)
        work = stage(request.param, tmp_path, out, steps, window)
        return out, *forked(work, tmp_path, how, at)

    write_inputs(tmp_path)
    begun, code, _, err, _ = play("begun", steps=2)
    assert code == 0, err
    for name in ("last", "best"):
        assert os.readlink(begun / name) == "step_000002"
        os.remove(begun / name)
        os.symlink("step_000001", begun / name)
    if request.param == "grpo":  # of the step in which it was killed, on two ranks
        for rank in (0, 1):
            (begun / "rollouts" / f"step_000002.rank{rank}.jsonl").write_text("{}\n")
    return play


def write_inputs(folder):
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text("{}")
    (folder / "data").write_text("".join(json.dumps({"id": str(n), "video": "x.mp4", "type": "open",
        "question": "?", "options": None, "answer": "a day"}) + "\n" for n in range(5)))


def read(out):
    """What users read of a run."""
    found = {"names": sorted(os.listdir(out))}
    for name in ("last", "best"):
        state = json.loads((out / name / "state.json").read_text())
        weight = load_file(out / name / "model.safetensors")["weight"]
        found[name] = (os.readlink(out / name), weight.tolist(), state["step"], state["best"])
    rows = rows_of(out / "log.jsonl")
    found["log"] = [(r["step"], r.get("loss"), r.get("val_loss", r.get("val"))) for r in rows]
    for path in sorted((out / "rollouts").glob("*")):
        found[path.name] = [(row["group"], row["sample"], row["K"]) for row in rows_of(path)]
    return found


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


# Windows: the start; the save of the step that is the best one; the last step, which is not.
@pytest.mark.parametrize("play, window", [("sft", 0), ("sft", 4), ("sft", 5), ("grpo", 0),
                                          ("grpo", 4)], indirect=["play"])
@pytest.mark.parametrize("how", ["kill", "once", "full"])
def test_nothing_finished_is_lost_whichever_operation_fails(request, play, window, how):
    straight, code, _, err, done = play("straight", window)
    assert code == 0 and not err and len(done) > 10, err
    wanted = read(straight)
    names = {*".lock args.json best last log.jsonl rollouts step_000004 step_000005".split()}
    assert names - {"rollouts"} <= set(wanted["names"]) <= names
    assert [(wanted[name][0], wanted[name][2]) for name in ("last", "best")] == [
        ("step_000005", 5), ("step_000004", 4)]
    assert [value for _, _, value in wanted["log"] if value not in (None, 9.0)] == VALUES
    wrong = []
    for at in sample(request, done, how):
        (out, code, _, err, _), why = play(f"struck{at}", window, how, at), []
        if "Traceback" in err or code not in (0, 1, 2, 137) or (window and err.count("\n") > 1):
            why.append(f"code {code}: {err[-300:]}")
        for name in ("last", "best"):
            if os.path.lexists(out / name) and not runs.is_complete(str(out / name)):
                why.append(f"{name} is no whole checkpoint")
        _, code, _, err, _ = play(f"struck{at}")
        found = {} if code or err else read(out)
        why += [f"{key}: {found.get(key)}" for key in found | wanted
                if found and found.get(key) != wanted.get(key)]
        if not found:
            why.append(f"the next start: code {code}: {err[-300:]}")
        if why:
            wrong.append(f"{how} at {at}, {done[at - 1]}: " + "; ".join(why))
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------
# Rollouts of the command line


def rollouts(folder, out, *flags, after=None, signal_number=None):
    """-> main() of rollout.py for 5 tasks of 3 episodes, which end without a token since their
    context is full. signal_number comes as soon as `after` episodes have ended."""
    def work(disk):
        ended, real = [], rollout.Episode.to_dict

        def to_json(episode):
            ended.append(episode.task)
            if episode.task and len(ended) - ended.count(None) == after:
                os.kill(os.getpid(), signal_number)
            return real(episode)

        rollout.Episode.to_dict = to_json
        checkpoint.resolve_checkpoint, chat.load_codec = lambda path: path, lambda *_: None
        rollout.check_context, rollout.load_overview = lambda *_: None, no_room
        rollout.make_engine = lambda *_, **__: types.SimpleNamespace(max_seqs=4, close=bool)
        sys.argv = ["rollout.py", "--ckpt", str(folder / "base"), "--data", str(folder / "data"),
                    *"--missing-videos 1 --num-generations 3 --out".split(), str(out), *flags]
        disk.on = True
        rollout.main()

    return work


def episodes_in(*paths):
    """Episodes in files, in order; torn lines are left out."""
    found = []
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                found.append((row["group"], row["sample"], row["K"], row["status"]))
    return found


@pytest.mark.parametrize("how", ["kill", "once", "full"])
def test_no_episode_that_has_ended_is_lost(request, tmp_path, how):
    write_inputs(tmp_path)
    (tmp_path / "straight").mkdir()
    whole = tmp_path / "straight" / "r.jsonl"
    code, out, err, done = forked(rollouts(tmp_path, whole), tmp_path)
    assert code == 0 and not err and "15 new rollouts in" in out
    wanted = episodes_in(whole)
    assert len(wanted) == 15 and wanted == sorted(wanted)
    assert sorted(os.listdir(whole.parent)) == [".r.jsonl.lock", "r.args.json", "r.jsonl"]
    for at in sample(request, done, how):
        struck = tmp_path / f"struck{at}" / "r.jsonl"
        part = struck.with_suffix(".jsonl.part")
        code, _, err, _ = forked(rollouts(tmp_path, struck), tmp_path, how, at)
        assert "Traceback" not in err and code in (0, 1, 2, 137), (done[at - 1], err)
        ended = sum(name == "write" and path.endswith(".part") for name, path in done[:at - 1])
        assert len(set(episodes_in(struck, part))) >= ended, done[at - 1]
        code, _, err, _ = forked(rollouts(tmp_path, struck), tmp_path)
        assert code == 0 and not err, (done[at - 1], err)
        assert episodes_in(struck) == wanted, done[at - 1]
        assert set(os.listdir(struck.parent)) == set(os.listdir(whole.parent)), done[at - 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_episodes_that_have_ended_and_the_same_command_goes_on(tmp_path, number):
    write_inputs(tmp_path)
    out = tmp_path / "r.jsonl"
    part = out.with_suffix(".jsonl.part")
    code, _, err, _ = forked(rollouts(tmp_path, out, after=4, signal_number=number), tmp_path)
    assert code == 1
    assert err.splitlines()[-1].endswith("stopped after 4 of 15 rollouts; the same command goes on")
    assert len(episodes_in(out)) == 4 and not part.exists()
    code, *_ = forked(rollouts(tmp_path, out, after=3, signal_number=signal.SIGKILL), tmp_path)
    assert code == -9 and len(episodes_in(out)) == 4 and len(episodes_in(part)) == 2
    code, said, err, _ = forked(rollouts(tmp_path, out), tmp_path)
    assert code == 0 and not err and "9 new rollouts in" in said and not part.exists()
    assert len(set(episodes_in(out))) == len(episodes_in(out)) == 15
    before, (code, said, err, _) = out.read_bytes(), forked(rollouts(tmp_path, out), tmp_path)
    assert code == 0 and "has all 15 rollouts" in said and out.read_bytes() == before


def test_a_full_disk_leaves_no_half_row(tmp_path):
    judge.append_row(path := tmp_path / "tasks.jsonl", {"id": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))  # bytes of a file
    with pytest.raises(launch.RunError, match="the disk is full"):
        judge.append_row(path, {"id": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"id": 1}\n'
