"""Shared by all tests: scripts in processes of their own, one small toy world a session, the state
that every test finds. More fixtures are in fixtures.py."""
import faulthandler
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from fixtures import *  # noqa: F403

import launch

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
    config.addinivalue_line("markers", "process: runs a script in a process of its own")
    # Several processes of pytest share out the cores, and what they start inherits its part: two
    # pools of spinning threads on the same cores cost a factor of ten.
    if name := os.environ.get("PYTEST_XDIST_WORKER"):
        number, count = int(name.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % len(cores)::count])
        preloaded()  # now, while there are no threads that a fork would lose


def pytest_addoption(parser):
    add = parser.addoption
    add("--fast", action="store_true",
        help="leave out tests marked `process`, and what builds vLLM's engine")
    add("--all", action="store_true", help="also the tests in tests/slow")
    add("--all-faults", action="store_true",
        help="test_file_faults strikes at every file operation, not at a sample of them")
    add("--kills", type=int, default=2, help="of a run, in the tests of test_survival that kill")


def pytest_ignore_collect(collection_path, config):
    """tests/slow belongs to --all, and to a command that names the folder or a file of it."""
    if collection_path == SLOW and not config.getoption("--all"):
        named = (Path(config.invocation_params.dir, w.split(":")[0]).resolve() for w in config.args)
        return not any(path.is_relative_to(SLOW) for path in named) or None


def pytest_collection_modifyitems(config, items):
    """Long files first: with a file to each of two processes, a long one at the end would leave the
    other idle."""
    if config.getoption("--fast"):
        made = {"vllm_engines", "training", "recorded", "saved", "world35", "published"}
        items[:] = [item for item in items if not item.get_closest_marker("process")
                    and not made & set(item.fixturenames)]
    long = [f"test_{name}.py" for name in (  # the second begins while the toy world is made
        "sft", "faults", "survival", "file_faults", "published", "fake_gpu", "hostile", "video",
        "grpo_run", "engine", "toy", "grpo", "eval", "model", "identity", "rollout")]
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
def restored_process():
    """Scripts take signals that are to end the tests, set a watchdog that would end the process
    half an hour later, and by starting a process group flush denormal numbers, which hypothesis
    draws."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    faulthandler.cancel_dump_traceback_later()
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
