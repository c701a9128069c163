"""
launch.py (tests/test_launch.py): how every stage starts and ends: ranks, signals, errors in one
line, atomic files, data rows and their order. No torch at its top, so that a tool that only reads
JSONL starts at once.

  batch of step s = rows s B .. (s + 1) B - 1 of an endless stream of shuffled epochs, which is a
  function of (s, seed) alone: a resumed run and every rank draw the same rows

  exit code 2   bad input: one line says which
  exit code 1   the machine (a disk, a GPU, a NaN), or stopped by a signal: the same command goes on
  exit code 130 Ctrl-C before the loop

Reads JSONL files; writes small text files, each whole or not at all.
"""
import argparse
import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings

# Segments that grow fragment less, since packs differ in length. torch reads this at its first
# allocation. vLLM turns the option off around its own pool, which cannot use it.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# ------------------------------------------------------------------------------------------------
# Errors and main()


class UserError(Exception):
    """Bad input by the user: one line on stderr, exit code 2."""


class RunError(Exception):
    """A run that cannot go on: one line on stderr, exit code 1."""


def run_main(main):
    """Runs a script's main(). What a user can mend becomes one line and an exit code, all else a
    traceback and exit code 1. Crash-only: nothing is tried twice, the same command goes on."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        main()
    except UserError as error:
        code, text = 2, one_line(error)
    except (RunError, OSError) as error:  # of a disk or a network: the text names the file
        code, text = 1, one_line(error)
    except KeyboardInterrupt:
        code, text = 130, "interrupted"
    except Exception as error:
        if world == 1:
            raise
        code, text = 1, traceback.format_exc()
        if "by peer" in str(error):  # gloo's: that rank says why
            text = "another rank has ended"
    else:
        return
    name = os.path.basename(sys.argv[0])
    if world == 1:
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        sys.exit(code)
    # All ranks of a machine read the same flags and files. The first one says so at once, and
    # torchrun ends the others within this second, so that the line is there once.
    if os.environ.get("LOCAL_RANK") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1)
    print(f"{name}: rank {os.environ.get('RANK')}: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: other ranks may wait for this one in a collective, and threads for them.
    os._exit(code)


def one_line(error):
    """Error -> its text and the sample in which it was met, see `naming`."""
    return printable(", ".join([str(error), *getattr(error, "__notes__", [])]))


def printable(text):
    """Text of a model or a data file -> the same without characters that steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(text))


@contextlib.contextmanager
def naming(sample):
    """An error that is raised inside names the sample."""
    try:
        yield
    except Exception as error:
        error.add_note(f"sample {sample}")
        raise


# ------------------------------------------------------------------------------------------------
# Arguments


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with defaults, and the description as it was written."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, where a bad flag is a UserError like any other bad input: one line, once."""

    def error(self, message):
        raise UserError(f"{message}; --help lists all flags")


def parser(description):
    """A script's ArgumentParser. A flag is spelled out: an abbreviation could mean another one in
    the next version."""
    return ArgumentParser(description=description, formatter_class=HelpFormatter,
                          allow_abbrev=False)


def positive(text):
    """Type of an argument: a whole number, at least 1."""
    if int(text) < 1:
        raise ValueError  # argparse names the flag and the text
    return int(text)


def amount(text):
    """Type of an argument: a finite number, at least 0; whole if it is written so."""
    number = float(text)
    if not 0 <= number < float("inf"):  # NaN fails this
        raise ValueError
    return int(text) if text.isdigit() else number


# ------------------------------------------------------------------------------------------------
# Imports


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
    spec = importlib.util.find_spec("torchvision")
    if spec:
        with contextlib.suppress(OSError):  # the CUDA build: libcudart is missing
            torch.ops.load_library(os.path.join(os.path.dirname(spec.origin), "_C.so"))
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("torchvision::nms", "torchvision::qnms"):
            torch.library.define(name, "(Tensor dets, Tensor scores, float limit) -> Tensor")


def quiet_libraries():
    """Keeps messages of libraries off the terminal, which belongs to the lines of the run."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # torch says this of every checkpoint that a single process saves.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# ------------------------------------------------------------------------------------------------
# Ranks


def cores():
    """Cores for this rank: its share of those that this process may use."""
    # torchrun says how many ranks this machine has; other launchers may not.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", 1)
    return max(1, len(os.sched_getaffinity(0)) // int(ranks))


def use_gpu():
    """Whether this process computes on a GPU. Never if CUDA_VISIBLE_DEVICES is set and empty.
    Raises UserError if the machine or the build of torch shows that there should be a GPU: an 8B
    would train in fp32 on the CPU."""
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    if not torch.cuda.is_available() and (torch.version.cuda or shutil.which("nvidia-smi")):
        raise UserError("no GPU can be used: see nvidia-smi, or `make venv GPU=1`, or set "
                        "CUDA_VISIBLE_DEVICES= to compute on the CPU")
    return torch.cuda.is_available()


PATIENCE = 3600.0  # seconds that a phase of a run may take


def start_process_group():
    """Joins torchrun's process group, or makes one of a single process -> the rank's device. A
    collective has no deadline of its own, because ranks of an evaluation end hours apart; the
    watchdog ends a rank that hangs."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if use_gpu():
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        backend = "gloo"
        device = torch.device("cpu")
        # Two spinning thread pools on shared cores cost a factor of ten: divide the cores.
        if not os.environ.get("OMP_NUM_THREADS"):  # else OpenMP has taken the user's number
            torch.set_num_threads(cores())
        torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
        warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    if not dist.is_initialized():
        store = None  # torchrun's
        if "RANK" not in os.environ:
            store = dist.HashStore()
        dist.init_process_group(backend, timeout=timedelta(days=30), store=store, rank=rank,
                                world_size=world)
    return device


def end_process_group(engine=None, code=0):
    """Ends a run, after everything is written and printed. Collective. With an engine on several
    ranks it does not return, nor with an exit code above 0."""
    import torch.distributed as dist

    world = rank_and_world()[1]
    if engine:
        any_rank(False)  # a barrier: closing vLLM may end the group, and rank 0 may still write
        engine.close(code)
    if dist.is_initialized():  # closing vLLM may have ended the group
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()  # the process may have more to do
    sys.stdout.flush()
    if engine and world > 1:  # threads of gloo and vLLM have aborted sys.exit, once in 20 runs
        os._exit(code)
    if code:
        sys.exit(code)


def reset_watchdog():
    """Marks the end of a phase: the next one may take PATIENCE seconds. A rank that takes longer
    prints the stacks of its threads and exits, and torchrun ends the others."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__)


def stop_on_signal():
    """-> a function: whether a rank has got SIGTERM, SIGUSR1 (schedulers send them as a warning),
    SIGHUP (the terminal has been closed) or Ctrl-C; collective. A second Ctrl-C ends the process at
    once, another second signal does nothing: torchrun passes on what its ranks may have got
    already."""
    caught = []

    def handler(number, frame):
        caught.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        # A closed terminal takes no text any more, and the next print would end the run unsaved.
        for output in (1, 2):
            try:
                os.write(output, b"")
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handler)
    # nohup: a process alone goes on. But torchrun ends with its terminal even then.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "RANK" in os.environ:
        signal.signal(signal.SIGHUP, handler)
    return lambda: any_rank(len(caught) > 0)


def rank_and_world():
    """-> (rank, ranks) of the process group; (0, 1) before it is joined."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather_rows(rows):
    """Lists of every rank -> one list, on every rank. Collective, in host memory: no GPU has to
    finish first."""
    import torch.distributed as dist

    world = rank_and_world()[1]
    if world == 1:
        return list(rows)
    gathered = [[] for _ in range(world)]
    dist.all_gather_object(gathered, rows)
    return sum(gathered, [])


def sum_over_ranks(number):
    """The sum of the numbers of all ranks, on every rank. Collective."""
    return sum(gather_rows([number]))


def any_rank(flag):
    """Whether `flag` holds on any rank. Collective."""
    return any(gather_rows([flag]))


def print0(text):
    """Prints one line, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


# ------------------------------------------------------------------------------------------------
# Data: rows, and their order


def read_jsonl(path, required=(), fault=None, faults=None):
    """JSONL file -> list of dicts. required: keys that every row has. fault: function of a row ->
    None, or the reason why it cannot be used. Raises UserError naming file and line. faults: a list
    that gets those lines instead (--check); such rows are left out."""
    rows = []
    try:
        text = read_file(path).decode("utf-8-sig")  # editors put a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; tools/convert.py reads parquet") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row, problem = read_row(line, required, fault)
            if problem is None:
                rows.append(row)
            elif faults is None:
                raise UserError(f"{path}:{number}: {problem}")
            else:
                faults.append(f"{path}:{number}: {problem}")
    if not rows and not faults:
        raise UserError(f"{path}: no rows")
    return rows


def read_row(line, required, fault):
    """A line of JSONL -> (row, why it cannot be used, or None)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return None, f"not JSON ({error}); tools/convert.py reads arrays, CSV and parquet"
    for name in required:
        if not isinstance(row, dict) or name not in row:
            return None, f"missing {name!r}"
    return row, fault and fault(row)


def batch_indices(step, batch_size, rows, seed):
    """Rows of one global batch: a window of the endless stream of shuffled epochs. It depends on
    (step, seed) alone, so every rank and every resumed run draws the same rows."""
    picked = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, index = divmod(position, rows)
        picked.append(epoch_order(epoch, rows, seed)[index])
    return picked


@functools.lru_cache(2)  # 8,000 rows take 8 ms
def epoch_order(epoch, rows, seed):
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a str seed is the same everywhere
    return order


def join_key(*parts):
    """The parts with slashes between them. A slash in a part is escaped, so that no task id can
    imitate the parts after it."""
    return "/".join(str(part).replace("%", "%25").replace("/", "%2F") for part in parts)


def stable_hash(*parts):
    """A 64-bit number that depends on the parts alone, on every rank and in every process."""
    return int.from_bytes(hashlib.sha256(join_key(*parts).encode()).digest()[:8], "big")


# ------------------------------------------------------------------------------------------------
# Files


def make_out(path):
    """Creates an output folder. Raises UserError if that cannot be."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {error}") from None


@functools.cache  # keeps the lock, which ends with its object; the same process may ask twice
def lock(out, name=".lock"):
    """Makes the folder `out`, and keeps it for this process until its end. Raises UserError if
    another process writes there. Rank 0 holds it for all ranks."""
    import filelock

    make_out(out)
    folder_lock = filelock.FileLock(f"{out}/{name}")
    if os.environ.get("RANK", "0") == "0":
        try:
            folder_lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UserError(f"--out {out}: another run writes there; wait for its end, or choose "
                            "another --out") from None
    return folder_lock


def fsync(path):
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def publish_folder(temp, path):
    """Gives a finished folder its name, once all of it is on the disk. An older folder of that name
    goes."""
    for folder, _, names in os.walk(temp):
        for name in names:
            fsync(f"{folder}/{name}")
        fsync(folder)
    shutil.rmtree(path, ignore_errors=True)
    os.rename(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def write_atomic(path, content):
    """Writes a text or bytes: the final name appears once the file is whole on the disk."""
    if isinstance(content, str):
        content = content.encode()
    temp = f"{path}.tmp"  # of a kill; the same command writes it anew
    with open(temp, "wb") as file:
        file.write(content)
    fsync(temp)
    os.replace(temp, path)
    fsync(os.path.dirname(os.path.abspath(path)))  # else a power loss may take the new name


def write_jsonl(path, rows):
    """Writes rows as JSONL, whole or not at all."""
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


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


def read_file(path):
    """-> bytes of a whole file."""
    with open(path, "rb") as file:
        return file.read()


def parse_json(text):
    """json.loads of text or UTF-8 bytes. Every error is a ValueError: nested too deep, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
