"""
preloaded.py: a process that has imported torch, transformers and vLLM once and forks for every run
of a script, since the imports cost more than most of the runs. A line of JSON on stdin asks for a
run: {"argv", "ranks", "timeout", "out", "err": files}; a line on stdout answers with its exit code,
null if it took too long, and whether a rank had to be killed. Of several ranks one that fails
ends the others, as under torchrun.
"""
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork(request, rank, port):
    """-> pid of a child that becomes the script; in the child, returns 0."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # its children, decoders say, go with it
    for name, fd in (("out", 1), ("err", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["ranks"]:
        world = str(request["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world,
                          LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    return 0


def wait(pids, seconds):
    """-> (the first exit code that is not 0, else 0; None where one is still there after so long,
    whether one had to be killed)."""
    end, left, code = time.monotonic() + seconds, set(pids), 0
    while left and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            failed = os.waitstatus_to_exitcode(status)
            if failed and not code:
                code = failed
                for other in left:
                    os.kill(other, signal.SIGTERM)
                end = min(end, time.monotonic() + 5)  # the others' time to go
        elif not pid:
            time.sleep(0.01)
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None if left and not code else code, bool(left)


def load():
    """The imports; scripts that belong to tests find the helpers of this folder."""
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import launch

    launch.import_shim()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # read on import; rollout.py says the same
    for name in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
                 "transformers.processing_utils", "transformers.models.qwen3_vl.modeling_qwen3_vl",
                 "transformers.models.qwen3_vl.processing_qwen3_vl"):
        importlib.import_module(name)
    for name in ("vllm.entrypoints.llm", "vllm.model_executor.models.qwen3_vl",
                 "vllm.v1.worker.cpu_worker",
                 "transformers.tokenization_mistral_common"):  # the processor asks for this one
        with contextlib.suppress(ImportError):  # not installed
            importlib.import_module(name)


def serve(requests, answers):
    """Answers until `requests` ends; a child becomes the script that was asked for."""
    gc.freeze()  # or each child would copy it all to look for garbage in it
    sys.path.insert(0, "")  # replaced by the folder of the script
    for line in requests:
        request = json.loads(line)
        port, pids = free_port(), []
        for rank in range(max(1, request["ranks"])):
            pids.append(fork(request, rank, port))
            if not pids[-1]:
                run()
        print(json.dumps(wait(pids, request["timeout"])), file=answers, flush=True)
    os._exit(0)


def run():
    """In a child: the script, then the end of its process without the interpreter's own, which
    would look through all that was imported: a second and a half."""
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as multiprocessing does: waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@functools.cache  # here, because pytest imports conftest twice
def split():
    """This process imports all that, then another one like it, forked before anything has run here,
    serves -> (file of requests, file of answers)."""
    load()
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(ask)  # or the requests would never end
        # not those of pytest
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        serve(os.fdopen(asked), os.fdopen(answer, "w"))
    os.close(asked)
    os.close(answer)
    return os.fdopen(ask, "w"), os.fdopen(answered)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    load()
    serve(sys.stdin, sys.stdout)
