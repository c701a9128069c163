"""Shared by all tests: scripts in processes of their own, one small toy world a session, the state
that every test finds. More fixtures are in fixtures.py."""
import faulthandler
import fcntl
import functools
import multiprocessing.connection
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import hypothesis
import preloaded
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
    the environment that torchrun gives them, and one that fails ends the others; .killed: one had
    to be. reference: with the reference engine for vLLM."""
    driver = [os.path.join(ROOT, "tests", "reference.py")] if reference else []
    command = [*driver, os.path.join(ROOT, name), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, kind) for kind in ("out", "err")]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port}
        processes = []
        for rank in range(max(1, ranks)):
            own = {**group, "RANK": rank, "LOCAL_RANK": rank} if ranks else {}
            own = {name: str(value) for name, value in own.items()}
            processes.append(forks().Process(target=preloaded.become, args=(command, own, *files)))
            processes[-1].start()
        code, killed = wait(processes, timeout)
        written = [Path(file).read_text() for file in files]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *written)
    done = subprocess.CompletedProcess(command, code, *written)
    done.killed = killed
    return done


def wait(processes, seconds):
    """-> (the first exit code that is not 0, else 0; None where one is still there after so long,
    whether one had to be killed)."""
    end, left, code = time.monotonic() + seconds, list(processes), 0
    while left and multiprocessing.connection.wait([p.sentinel for p in left],
                                                   end - time.monotonic()):
        for process in [p for p in left if p.exitcode is not None]:
            left.remove(process)
            if process.exitcode and not code:
                code = process.exitcode
                end = min(end, time.monotonic() + 5)  # the others' time to go
                for other in left:
                    other.terminate()
    for process in left:
        os.killpg(process.pid, signal.SIGKILL)
    return None if left and not code else code, bool(left)


@functools.cache
def forks():
    """Python's server of forks, with the imports of preloaded.py. It starts with the first
    process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT}/tests"):
        multiprocessing.forkserver.ensure_running()
    return context


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


def pytest_addoption(parser):
    add = parser.addoption
    add("--fast", action="store_true",
        help="leave out tests marked `process`, and what builds vLLM's engine")
    add("--all", action="store_true", help="also the tests in tests/slow")
    add("--kills", type=int, default=2, help="of a run, in the tests of test_survival that kill")


def pytest_ignore_collect(collection_path, config):
    """tests/slow belongs to --all, and to a command that names the folder or a file of it."""
    if collection_path == SLOW and not config.getoption("--all"):
        named = (Path(config.invocation_params.dir, w.split(":")[0]).resolve() for w in config.args)
        return not any(path.is_relative_to(SLOW) for path in named) or None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--fast"):
        made = {"vllm_engines", "training", "recorded", "saved", "world35", "published"}
        items[:] = [item for item in items if not item.get_closest_marker("process")
                    and not made & set(item.fixturenames)]


@pytest.fixture(scope="module", autouse=True)
def fresh_process():
    """Sets and restores the state of the whole process: one thread, since spinning threads of torch
    and of an engine on shared cores cost a factor of ten, the shim before transformers is imported,
    no process group, and torch.compile's stance."""
    import torch

    torch.set_num_threads(1)
    launch.import_shim()
    yield
    torch.compiler.set_stance("default")  # vLLM's engine on CPU turns it off
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
