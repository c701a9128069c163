"""Shared by all tests: one small toy world a session, its codec and its policy, on CPU in fp32."""
import faulthandler
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

import chat
import launch
from engine import VllmEngine
from plumbing import data

# No test is timed: a busy machine may take a second for what takes a millisecond.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLOW = Path(ROOT, "tests", "slow")


def run_script(name, *arguments, ranks=0, timeout=600, reference=False):
    """Run a script in a process of its own -> CompletedProcess. ranks > 0: so many processes, with
    the environment that torchrun gives them; .killed: one had to be. reference: with the reference
    engine for vLLM."""
    driver = [os.path.join(ROOT, "tests", "reference.py")] if reference else []
    command = [*driver, os.path.join(ROOT, name), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: os.path.join(folder, kind) for kind in ("out", "err")}
        requests, answers = preloaded()
        print(json.dumps({"argv": command, "ranks": ranks, "timeout": timeout, **files}),
              file=requests, flush=True)
        code, killed = json.loads(answers.readline())
        written = [Path(files[kind]).read_text() for kind in ("out", "err")]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *written)
    done = subprocess.CompletedProcess(command, code, *written)
    done.killed = killed
    return done


@functools.cache
def preloaded():
    """The process that scripts are forked from, one for each process of pytest -> (requests,
    answers); it ends with its requests."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # a fork of this one, which needs the imports as well
        import preloaded

        return preloaded.split()
    command = [sys.executable, os.path.join(ROOT, "tests", "preloaded.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               cwd=ROOT)
    return process.stdin, process.stdout


class Overheard:
    """A real engine whose main agent is taken to have said something else, main(sample, turn) ->
    text: its ids stay as sampled. A random model would never call. close() may come twice: a test
    that failed leaves no engine behind."""

    def __init__(self, engine, main):
        self.engine, self.main = engine, main

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def poll(self):
        done = self.engine.poll()
        for completion in done:
            sample, turn, *call = map(int, completion.id.split("/")[2:])
            completion.text = completion.text if call else self.main(sample, turn)
        return done


def pytest_configure(config):
    """Several processes of pytest share out the cores, and what they start inherits its part: two
    pools of spinning threads on the same cores cost a factor of ten."""
    if name := os.environ.get("PYTEST_XDIST_WORKER"):
        number, count = int(name.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % len(cores)::count])
        preloaded()  # now, while there are no threads that a fork would lose


def pytest_addoption(parser):
    add = parser.addoption
    add("--shuffle", type=int, default=None, metavar="SEED",
        help="files and their tests in a random order: no test may need another")
    add("--fast", action="store_true",
        help="leave out what builds vLLM's engine, starts processes or takes long otherwise")
    add("--all", action="store_true", help="also the tests in tests/slow")
    add("--all-faults", action="store_true",
        help="test_file_faults strikes at every file operation, not at a sample of them")
    add("--checkouts", metavar="DIR",
        help="clones of publishers' code, for the proofs in tests/publishers")
    add("--kills", type=int, default=2, help="of a run, in the tests of test_survival that kill")


def pytest_ignore_collect(collection_path, config):
    """tests/slow belongs to --all, and to a command that names the folder or a file of it."""
    if collection_path == SLOW and not config.getoption("--all"):
        named = (Path(config.invocation_params.dir, words.split("::")[0]).resolve()
                 for words in config.args)
        return not any(path.is_relative_to(SLOW) for path in named) or None


def pytest_collection_modifyitems(config, items):
    """Long files first: with a file to each of two processes, a long one at the end would leave the
    other idle."""
    if config.getoption("--fast"):
        files = {"test_faults.py", "test_survival.py", "test_toy.py"}
        made = {"engine", "vllm_engines", "training", "recorded"}
        items[:] = [item for item in items
                    if item.path.name not in files and not made & set(item.fixturenames)]
    seed = config.getoption("--shuffle")
    if seed is not None:  # a file stays in one piece: its module fixtures are made once
        draw = random.Random(seed)
        files = {name: draw.random() for name in dict.fromkeys(item.path.name for item in items)}
        order = {item: (files[item.path.name], draw.random()) for item in items}
        items.sort(key=order.get)
        return
    long = [f"test_{name}.py" for name in (  # the second begins while the toy world is made
        "faults", "video", "published", "fake_gpu", "server", "file_faults", "hostile", "survival",
        "eval", "sft", "grpo", "engine", "replay", "toy", "grpo_run", "folders", "rewards", "model",
        "checkpoint", "rollout", "lora", "qwen35", "page", "bf16")]
    items.sort(key=lambda item: long.index(item.path.name) if item.path.name in long else len(long))


@pytest.fixture(scope="module", autouse=True)
def fresh_process():
    """Sets and restores the state of the whole process: the shim before transformers is
    imported, no process group, and torch.compile's stance."""
    import torch

    launch.import_shim()
    yield
    torch.compiler.set_stance("default")  # vLLM's engine on CPU turns it off
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread():
    """Spinning threads of torch and of an engine on shared cores cost a factor of ten."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_processes(request, monkeypatch):
    """--fast: a test that starts a process, or vLLM's engine in this one, ends there."""
    if request.config.getoption("--fast"):

        def leave(*_, **__):
            pytest.skip("--fast: starts a process, or an engine")

        monkeypatch.setattr(subprocess, "Popen", leave)
        monkeypatch.setattr(VllmEngine, "__init__", leave)
        monkeypatch.setattr(sys.modules[__name__], "preloaded", leave)


@pytest.fixture(autouse=True)
def signals():
    """Scripts take SIGTERM, SIGHUP and Ctrl-C, which are to end the tests."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_beat():
    """launch.beat ends the process --patience seconds after the last phase of a script's main():
    half an hour later, in the midst of other tests."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def denormals():
    """Starting a process group flushes denormal numbers, for the whole process; hypothesis draws
    them."""
    yield
    sys.modules["torch"].set_flush_denormal(False)


# flags of the toy world that the tests share
TOY = ("--base-videos", 2, "--sft-videos", 12, "--rl-videos", 6, "--eval-videos", 4)


@pytest.fixture(scope="session")
def toy_as_made(tmp_path_factory):
    """Folder of a small toy world: 2 pretraining videos, 12 SFT videos, 24 held-out ones, 6 RL
    tasks, 4 evaluation tasks, a random checkpoint. All processes of pytest share it: the first one
    that asks makes it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with open(root / "toy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "toy").exists():
            done = run_script("toy.py", *TOY, "--out", root / "toy.part")
            assert done.returncode == 0, done.stderr
            os.rename(root / "toy.part", root / "toy")
    return root / "toy"


@pytest.fixture(scope="session")
def toy(toy_as_made, tmp_path_factory):
    """A copy of that world for this process, whose random policy says anything."""
    folder = tmp_path_factory.mktemp("world") / "toy"
    shutil.copytree(toy_as_made, folder)
    # An embedding of the length that learns fast makes a random policy repeat what it has read:
    # here it is to say anything, so that samples differ.
    from safetensors.torch import load_file, save_file

    path = folder / "init" / "model.safetensors"
    weights = load_file(path)
    weights["model.language_model.embed_tokens.weight"] *= 0.02 * 128**0.5
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def codec(toy):
    return chat.load_codec(str(toy / "init"))


@pytest.fixture(scope="session")
def codecs(toy, codec):
    return {"image": codec, "video": chat.load_codec(str(toy / "init"), "video")}


@pytest.fixture
def video_codec(codecs):
    return codecs["video"]


@pytest.fixture
def each_codec(request, codecs):
    """The codec of both channels, one after the other."""
    return codecs[request.param]


@pytest.fixture
def opened(monkeypatch):
    """The video files that this process opened from now on: one entry for the times of a file, one
    for each set of frames that was decoded."""
    av = pytest.importorskip("av")
    names, real = [], av.open

    def spy(file, mode=None, **more):
        if mode is None:
            names.append(str(file))
        return real(file, mode, **more)

    monkeypatch.setattr(av, "open", spy)
    return names


@pytest.fixture
def decoders(monkeypatch):
    """The decoders in processes of their own, started from now on."""
    import video

    started, real = [], video.ChildDecoder
    monkeypatch.setattr(video, "ChildDecoder",
                        lambda *given: started.append(real(*given)) or started[-1])
    return started


@pytest.fixture
def process_group():
    """A process group of one, which FSDP and the lockstep helpers need. Made if there is none,
    because closing a vLLM engine ends it."""
    launch.start_process_group()


@pytest.fixture
def policy(toy, codec):
    from reference import load_policy

    return load_policy(str(toy / "init"), codec)


@pytest.fixture
def lively(policy):
    """The random policy with larger weights: fresh ones give a flat distribution, in which little
    can go wrong."""
    import torch

    with torch.no_grad():
        for name, p in policy.hf.model.language_model.named_parameters():
            if p.ndim > 1:
                p.mul_(10 if "embed_tokens" in name else 3)
    return policy


@pytest.fixture(scope="module")
def saved(toy, codec, tmp_path_factory):
    """A changed policy and the checkpoint it was saved to."""
    import torch
    from reference import load_policy

    from plumbing import checkpoint

    launch.start_process_group()
    policy = load_policy(str(toy / "init"), codec)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in policy.hf.model.language_model.named_parameters():
            p.mul_(1 if p.ndim < 2 else 10 if "embed" in name
                   else 3).add_(0.01 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp("saved") / "step_000001"
    checkpoint.save_checkpoint(policy, codec, str(folder), {"step": 1})
    return policy.eval(), folder


@pytest.fixture
def album():
    from album import Album

    return Album()


@pytest.fixture(scope="module")
def tasks(toy):

    return data.read_tasks(str(toy / "rl.jsonl"))


@pytest.fixture(scope="module")
def frames_of(toy):
    """A source that the tests of a file share, so that each frame set is decoded once."""
    import rollout
    import video

    return rollout.Source(str(toy), video.FrameCache())


@pytest.fixture
def source(toy):
    import rollout
    import video

    return rollout.Source(str(toy), video.FrameCache())


@pytest.fixture
def plain(toy):
    """The same checkpoint as plain transformers, nothing of model.py in its forward."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(str(toy / "init"), dtype=torch.float32,
                                                         attn_implementation="eager")
    hf.model.visual.requires_grad_(False)
    return hf


@pytest.fixture
def vision(policy, codec, source):
    import model

    return model.VisionFeatures(policy.hf.model.visual, codec, source.load)


# ------------------------------------------------------------------------------------------------
# Scripts in this process


@pytest.fixture
def start(monkeypatch, capsys):
    """start(script, *words) -> (exit code, stdout, stderr) of the main() of a script in this
    process, given as its module."""
    def start(script, *words):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        capsys.readouterr()
        try:
            launch.run_main(script.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        launch.unlock()
        return code, *capsys.readouterr()

    return start


@pytest.fixture
def run_grpo(monkeypatch, toy, tmp_path):
    """-> function that runs grpo.main(), or replay.main() if it is given --rollouts -> (weights,
    last row of log.jsonl, run folder)."""
    from reference import ReferenceEngine
    from safetensors.torch import load_file

    import grpo
    import rollout
    from tools import replay

    monkeypatch.setattr(rollout, "make_engine", lambda ckpt, codec, args, *_,
                        **__: ReferenceEngine(ckpt, codec, args.max_seqs))

    def run(*flags, out="run"):
        folder = tmp_path / out
        script = replay if "--rollouts" in flags else grpo
        words = [f"{script.__name__}.py", "--preset", "toy", "--ckpt", toy / "init", "--out",
                 folder, "--video-root", toy, *flags]
        words += () if script is replay else ("--show-every", 0) * ("--show-every" not in flags)
        monkeypatch.setattr(sys, "argv", [str(w) for w in words])
        script.main()
        weights = load_file(folder / "last" / "model.safetensors")
        return weights, json.loads((folder / "log.jsonl").read_text().splitlines()[-1]), folder

    return run


@pytest.fixture(scope="module")
def base(toy):
    """The weights of the random checkpoint."""
    from safetensors.torch import load_file

    return load_file(toy / "init" / "model.safetensors")


@pytest.fixture
def any_gap(monkeypatch):
    """Recorded log-probs that are not this run's own: the probe would stop it."""
    import grpo

    monkeypatch.setattr(grpo, "gap_tolerance", lambda *_: 99)


@pytest.fixture
def given_rollouts(monkeypatch, codec, source, tasks, any_gap):
    """Rollouts of grpo.main() are the hand-made group, scored by the real rewards -> list of the
    calls of rollout.run."""
    from handmade import SilentEngine, make_group

    import rollout

    seen = []

    def fake_run(sampler, batch, frames, group, step, pump):
        agent, pay = sampler.agent, sampler.pay
        seen.append({"agent": agent, "frames": frames, "group": group, "step": step,
                     "pay": pay, "tasks": [t["id"] for t in batch]})
        for task in batch:
            for e in make_group(codec, source, task, step):
                e.think_open = agent.think_prefix
                e.reward = rollout.compute_reward(e, pay)
                yield e

    monkeypatch.setattr(rollout, "run", fake_run)
    monkeypatch.setattr(rollout, "make_engine", lambda *_, **__: SilentEngine())
    return seen


@pytest.fixture
def hard_tasks(tasks, tmp_path):
    """Task JSONL of the two tasks with the most colours."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in tasks[:2]))
    return path


@pytest.fixture
def varied_rewards(monkeypatch):
    """A random base earns zero everywhere; this reward depends on what was sampled, so that there
    is something to learn."""
    from handmade import reward

    import rewards

    def score(turns, *_, **__):
        value = sum(map(ord, "".join(turns))) % 7 / 7
        return reward(value, 0.5 * value * value, 0.0)

    monkeypatch.setattr(rewards, "score", score)
