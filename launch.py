"""
launch.py (tests/test_launch.py): how all stages start: imports of transformers and vLLM beside a
CPU build of torch, ranks, signals, errors, data rows and their order, files and their locks. No
torch at the top, so that a tool that only reads JSONL starts at once.

  batch of step s = rows s B .. (s + 1) B - 1 of an endless stream of shuffled epochs, which is a
  function of (s, seed) alone: a resumed run and every rank draw the same rows

Reads JSONL files; writes small text files, each whole or not at all.
"""
import contextlib
import errno
import faulthandler
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

# Segments that grow fragment less, since packs differ in length. torch reads this at its first
# allocation. vLLM 0.32 turns the option off around its own pool, which cannot use it.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.pop("PYTHONSAFEPATH", None)  # else decode workers do not find the files beside theirs

# ------------------------------------------------------------------------------------------------
# Errors and main()

MACHINE = "the machine: "  # marks the text of an error that the machine caused, not the file


class UserError(Exception):
    """Bad input by the user: one line on stderr, exit code 2."""


class RunError(Exception):
    """A run that cannot go on (full disk, no finite gradient): one line on stderr, exit code 1."""


def run_main(main):
    """Runs a script's main(). Bad user input becomes one line on stderr and exit code 2. A run that
    cannot go on becomes one line and exit code 1, Ctrl-C one line and exit code 130."""
    import traceback

    name, rank = os.path.basename(sys.argv[0]), os.environ.get("RANK", "0")
    world = int(os.environ.get("WORLD_SIZE", 1))
    for kind in ("stdout", "stderr"):
        stream = getattr(sys, kind)
        if stream and stream is getattr(sys, f"__{kind}__"):  # not one of a test
            os.set_blocking(stream.fileno(), True)  # else a full pipe, as of node, is an error
            buffer = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, kind, io.TextIOWrapper(buffer, stream.encoding, stream.errors, None, True))
    try:
        main()
    except (Exception, KeyboardInterrupt) as e:
        # Of a file that cannot be written. Any other OSError is a fault of ours.
        named = "ENOSPC EDQUOT EROFS EACCES EIO ENOENT EPERM EFBIG ENAMETOOLONG ESTALE ENOTCONN"
        if isinstance(e, OSError) and errno.errorcode.get(e.errno) in named.split():
            e = RunError(f"{e.filename or 'a file'}: {why(e)}")
        expected = isinstance(e, (UserError, RunError, KeyboardInterrupt))
        code = 2 if isinstance(e, UserError) else 130 if isinstance(e, KeyboardInterrupt) else 1
        if not expected and world == 1:
            raise
        text = f" {printable(e) or 'interrupted'}" if expected else f"\n{traceback.format_exc()}"
        who = f"{name}: rank {rank}" if world > 1 else name
        if isinstance(e, RuntimeError) and "by peer" in str(e):  # gloo's; that rank says why
            text = " another rank has ended, or the network has failed"
        # Most errors are met by all ranks, since they read the same flags and files. The first rank
        # of a machine says them at once, and torchrun then ends the others within that second.
        if os.environ.get("LOCAL_RANK", rank) != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(1)
        print(f"{who}:{text}", file=sys.stderr, flush=True)
        if world == 1:
            sys.exit(code)
        # The others may wait for this rank in a collective, and the threads of this rank for them.
        sys.stdout.flush()
        os._exit(code)


class Terminal(io.FileIO):
    """stdout or stderr. If nobody reads them any more (`| head`, a closed terminal), or their file
    lies on a full disk or in a home over its quota, the run goes on without them."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            return len(data)


def why(error):
    """Error -> its reason in words."""
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def naming(sample):
    """An error that is raised inside names the sample below its traceback."""
    try:
        yield
    except Exception as error:
        error.add_note(f"sample {sample}")
        raise


def machine_mark(error, own=("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG")):
    """-> MACHINE for the text of an OSError that does not lie in the file itself; else "". own:
    errors that do."""
    # EACCES is none of these: a mount's ticket may have ended. Nor is ELOOP: containers answer so
    # where a mount is missing. Nor are PyAV's own large numbers.
    code = getattr(error, "errno", 0) or 0
    return MACHINE * (0 < code < 4096 and errno.errorcode.get(code) not in own)


def printable(text):
    """Text of a model or a data file -> the same without characters that steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(text))


# ------------------------------------------------------------------------------------------------
# Start-up, processes, signals


def import_shim():
    """Makes `import transformers` and `import vllm` safe beside a CPU build of torch.

    The package index offers CUDA builds of torchvision, torchaudio and torchcodec. Their libraries
    do not load beside a CPU torch, and the import of torchvision then fails because two operators
    are missing. We never call these. Does nothing beside a GPU build.
    """
    import importlib.util
    import logging

    import torch

    if torch.version.cuda or torch.version.hip or hasattr(torch.ops.torchvision, "nms"):
        return
    # vLLM warns about a missing Triton before its own logging is set up, so Python would print it.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    for name in ("torchcodec", "torchaudio"):
        sys.modules.setdefault(name, None)  # importing it now raises ImportError
    if spec := importlib.util.find_spec("torchvision"):
        with contextlib.suppress(OSError):  # the CUDA build: libcudart is missing
            torch.ops.load_library(os.path.join(os.path.dirname(spec.origin), "_C.so"))
    if not hasattr(torch.ops.torchvision, "nms"):
        for op in ("torchvision::nms", "torchvision::qnms"):
            torch.library.define(op, "(Tensor dets, Tensor scores, float limit) -> Tensor")


def quiet_libraries():
    """Keeps messages of libraries off the terminal, which belongs to the lines of the run."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # torch says this of every checkpoint that a single process saves.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def cores():
    """Cores for this rank: its share of those that this process may use."""
    # macOS has no sched_getaffinity.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
    # torchrun says how many ranks this machine has; other launchers may not.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", 1)
    return max(1, len(allowed(0)) // int(ranks))


def use_gpu(cpu=False):
    """Whether this process computes on a GPU; with cpu never. Raises UserError that says why not,
    if the machine or the build of torch shows that there should be one: an 8B would train in fp32
    on the CPU."""
    import torch

    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts, so that vLLM sees none either
    elif not torch.cuda.is_available() and (torch.version.cuda or shutil.which("nvidia-smi")):
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as e:  # no driver, an old one, a build for CPUs, ..
            raise UserError(f"no GPU can be used ({' '.join(str(e).split())}): see nvidia-smi, "
                            "or `make venv GPU=1`, or give --set cpu=true") from None
    return torch.cuda.is_available()


def start_process_group(patience=1800.0, cpu=False):
    """Joins torchrun's process group, or makes one of a single process -> (rank, world, device).
    patience: see reset_watchdog. A collective waits a minute longer, so that the watchdog prints
    its stacks first. cpu: see use_gpu."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    gpu, device = use_gpu(cpu), torch.device("cpu")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        # Two spinning thread pools on shared cores cost a factor of ten: divide the cores.
        if not os.environ.get("OMP_NUM_THREADS"):  # else OpenMP has taken the user's number
            torch.set_num_threads(cores())
        torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
        warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    if not dist.is_initialized():
        wait = timedelta(seconds=patience + 60 if patience else 30 * 86400)
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=wait, **alone)
    return rank, world, device


def end_process_group(engine=None, code=0):
    """Ends a run, after everything is written and printed: leaves --out, the engine and the process
    group. Collective. With an engine on a GPU or on several ranks it does not return, nor with an
    exit code above 0."""
    import torch.distributed as dist

    unlock()
    several = engine and rank_and_world()[1] > 1
    if engine:
        any_rank(False)  # a barrier: closing vLLM may end the group, and rank 0 may still write
        engine.close(code)
    if dist.is_initialized():  # closing vLLM may have ended the group
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()  # the process may have more to do
    sys.stdout.flush()
    if several or code:  # threads of gloo and vLLM have aborted sys.exit, once in 20 runs
        (os._exit if several else sys.exit)(code)


def reset_watchdog(patience):
    """Marks the end of a phase: the next one may take `patience` seconds (0 = for ever). A rank
    that takes longer prints the stacks of its threads and exits, and torchrun ends the others."""
    if patience:
        faulthandler.dump_traceback_later(patience, exit=True, file=sys.__stderr__)


def stop_on_signal():
    """-> an Event that SIGTERM, SIGUSR1 (schedulers send them as a warning), SIGHUP (the terminal
    has been closed) and Ctrl-C set. A second Ctrl-C ends the process at once, another second signal
    does nothing: torchrun passes on what its ranks may have got already."""
    import threading

    stop_event = threading.Event()

    def handler(number, frame):
        stop_event.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process
            if os.environ.get("RANK", "0") == "0":
                # Not print: the signal may have interrupted one.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nsaving; another Ctrl-C ends at once (not under torchrun)\n")

    # nohup: a process alone goes on. But torchrun ends with its terminal even then, and passes
    # SIGHUP on to the ranks.
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "RANK" not in os.environ
    for number in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")[:3 if nohup else 4]:
        signal.signal(signal.Signals[number], handler)
    return stop_event


def rank_and_world():
    """-> (rank, ranks) of the process group; (0, 1) before it is joined."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_rows(rows):
    """Lists of every rank -> one list, on every rank. Collective, in host memory: no GPU has to
    finish first."""
    import torch.distributed as dist

    gathered = [rows] * rank_and_world()[1]
    if len(gathered) > 1:
        dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def any_rank(flag):
    """Whether `flag` holds on any rank. Collective."""
    import torch

    any_flag = torch.tensor(int(bool(flag)))  # in host memory; objects take ten times as long
    if rank_and_world()[1] > 1:
        torch.distributed.all_reduce(any_flag, op=torch.distributed.ReduceOp.MAX)
    return bool(any_flag)


def broadcast(values):
    """Rank 0's list of plain objects, on every rank. Collective."""
    return gather_rows([values])[0]


def print0(text):
    """Prints one line, on rank 0 alone, before work that shows no progress of its own."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


# ------------------------------------------------------------------------------------------------
# Data: rows, and their order


def read_jsonl(path, required=(), fault=None, faults=None):
    """JSONL file -> list of dicts. required: keys that every row has. fault: function of a row ->
    None, or the reason why it cannot be used. Raises UserError naming file and line. faults: a list
    that gets those lines instead (--check); such rows are left out."""
    try:
        lines = read_file(path).decode("utf-8-sig").split("\n")  # editors put a byte order mark
    except (OSError, UnicodeDecodeError) as e:
        hint = "; tools/convert.py reads parquet; gunzip a .gz" if isinstance(e, ValueError) else ""
        raise UserError(f"{path}: {why(e)}{hint}") from None
    if next(filter(str.strip, lines), "").lstrip().startswith("["):
        raise UserError(f"{path}: a JSON array; tools/convert.py reads it (jq -c '.[]' splits it)")
    if str(path).lower().endswith((".csv", ".tsv")):
        raise UserError(f"{path}: a table; tools/convert.py makes JSONL of it")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row, problem = read_row(line, required, fault)
        if problem and faults is None:
            raise UserError(f"{path}:{number}: {problem}")
        (faults if problem else rows).append(f"{path}:{number}: {problem}" if problem else row)
    if not rows and not faults:
        raise UserError(f"{path}: no rows")
    return rows


def read_row(line, required=(), fault=None):
    """A line of JSONL -> (row, why it cannot be used, or None). See read_jsonl."""
    try:
        row = parse_json(line)
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is no text
    except ValueError as e:
        return None, f"not JSON ({e}); tools/convert.py reads other files, CSV and parquet too"
    missing = [k for k in required if not isinstance(row, dict) or k not in row]
    if missing:
        return None, f"missing {', '.join(map(repr, missing))}"
    return row, fault and fault(row)


def read_file(path):
    """-> bytes of a whole file. Raises OSError, also if the disk ends it early: some network disks
    do so without an error."""
    with open(path, "rb") as f:
        size, content = os.fstat(f.fileno()).st_size, f.read()
    if len(content) < size:
        raise OSError(errno.EIO, "the disk ended it early", path)
    return content


def parse_json(text):
    """json.loads of text or UTF-8 bytes. Every error is a ValueError: nested too deep, too."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def batch_indices(step, batch_size, rows, seed):
    """Rows of one global batch: a window of the endless stream of shuffled epochs. It depends on
    (step, seed) alone, so every rank and every resumed run draws the same rows."""
    import random

    orders, positions = {}, range(step * batch_size, (step + 1) * batch_size)
    for epoch in {i // rows for i in positions}:  # 8,000 rows take 8 ms
        orders[epoch] = list(range(rows))
        random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])  # a str seed is the same everywhere
    return [orders[i // rows][i % rows] for i in positions]


# ------------------------------------------------------------------------------------------------
# Files


def make_out(path):
    """Creates an output folder and proves that it can be written, before any long work."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        raise UserError(f"output folder {path}: {e.strerror}") from None


def lock(out, name=".lock"):
    """Keeps the folder `out` for this run, until unlock() or the end of the process. Raises
    UserError that names the run which holds it. Rank 0 holds it for all ranks. The file stays, and
    only its lock counts."""
    import fcntl

    path = os.path.join(os.path.realpath(out), name)
    if os.environ.get("RANK", "0") != "0" or path in lock.files:
        return
    try:
        file = open(path, "a+")
        # A lock of flock would live on in forked children. A POSIX lock belongs to the process, but
        # ends as soon as the process closes any handle of the file, so there is only one handle.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"--out {out}: another run writes there ({file.read().strip()}); wait for "
                        "its end, or choose another --out") from None
    except OSError as e:
        print0(f"{path}: no locks here ({e.strerror}); do not start a second run with this --out")
        return
    file.truncate(0)
    print(f"pid {os.getpid()} on {os.uname().nodename} since {time.ctime()}", file=file, flush=True)
    lock.files[path] = file


lock.files = {}  # path -> open file


def unlock():
    """Lets go of the folders that this process has locked."""
    while lock.files:
        lock.files.popitem()[1].close()


def walk(path):
    """As os.walk, but a folder that cannot be read raises: os.walk would leave it out. One that
    belongs to somebody else, as lost+found, is left out with a line."""
    def fail(error):
        if isinstance(error, PermissionError):
            print(f"left out: {error}", file=sys.stderr, flush=True)
        elif not isinstance(error, FileNotFoundError):
            raise error
    return os.walk(path, onerror=fail)


def is_file(path, folders=False):
    """As os.path.isfile, but for an error of the disk, which that takes for no file. folders: a
    folder counts, too."""
    # A longer name is an error, too.
    return len(Path(path).name) < 256 and (Path(path).is_file() or folders and Path(path).is_dir())


def fsync(path):
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a filesystem that cannot sync folders
            raise
    finally:
        os.close(handle)


def publish_folder(temp, path):
    """Gives a finished folder its name, once all of it is on the disk. An older folder of that name
    goes."""
    for folder, _, names in os.walk(temp):
        for name in [*names, "."]:
            fsync(os.path.join(folder, name))
    shutil.rmtree(path, ignore_errors=True)
    os.rename(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def write_atomic(path, content):
    """Writes a text or bytes: the final name appears once the file is whole on the disk."""
    temp = f"{path}.tmp{os.getpid()}"
    try:
        with open(temp, "wb") as f:  # its end raises also what close() has to tell
            f.write(content if isinstance(content, bytes) else content.encode())
        fsync(temp)
        os.replace(temp, path)
        fsync(os.path.dirname(os.path.abspath(path)))  # else a power loss may take the new name
    except OSError as e:  # with the name and the reason, which users are told
        raise type(e)(e.errno, why(e), path) from None
    finally:
        with contextlib.suppress(OSError):  # there is none after a success
            os.remove(temp)


# ------------------------------------------------------------------------------------------------
# Numbers of a run


@functools.cache
def our_commit():
    """The commit of this code at the start, "-dirty" after an edit, "" if unknown. Read once: a
    later `git pull` would name code that does not run."""
    root = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, text=True, capture_output=True).stdout.strip()
    except OSError:  # no git
        return ""


def join_key(*parts) -> str:
    """The parts with slashes between them. A slash in a part is escaped, so that no task id can
    imitate the parts after it."""
    return "/".join(str(part).replace("%", "%25").replace("/", "%2F") for part in parts)


def stable_hash(*parts) -> int:
    """A 64-bit number that depends on the parts alone, on every rank and in every process."""
    return int.from_bytes(hashlib.sha256(join_key(*parts).encode()).digest()[:8], "big")
