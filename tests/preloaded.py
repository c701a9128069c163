"""
preloaded.py: what scripts import, imported once: torch, transformers and vLLM cost more than most
of the runs. Python's server of forks loads this module; each rank of a script is a fork of it.
"""
import atexit
import gc
import importlib
import os
import runpy
import sys

IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
           "transformers.processing_utils", "transformers.models.qwen3_vl.modeling_qwen3_vl",
           "transformers.models.qwen3_vl.processing_qwen3_vl", "vllm.entrypoints.llm",
           "vllm.model_executor.models.qwen3_vl", "vllm.v1.worker.cpu_worker",
           "transformers.tokenization_mistral_common")  # the processor asks for this one


def become(argv, environment, out, err):
    """In a fork: the script."""
    os.setsid()  # its children, decoders say, go with it
    for name, fd in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ.update(environment)
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a fork of multiprocessing leaves them out


if "pytest" not in sys.modules:  # in the server
    import launch

    launch.import_shim()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # read on import; rollout.py says the same
    for name in IMPORTS:
        if importlib.util.find_spec(name.partition(".")[0]):  # vLLM may not be installed
            importlib.import_module(name)
    del os.environ["PYTHONPATH"]  # it was for finding this module
    gc.freeze()  # or each fork would copy it all to look for garbage in it
