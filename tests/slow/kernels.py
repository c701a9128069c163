"""
kernels.py: flash-linear-attention's gated-delta kernels in Triton's interpreter, on a CPU, against
transformers' rule. Prints {name: relative distance}. tests/slow/test_qwen35.py starts it.

  python tests/slow/kernels.py FOLDER

FOLDER gets a copy of the package that the interpreter can run.
"""
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
sys.path.insert(0, str(Path(__file__).parents[2]))
import torch

import launch
from plumbing import qwen35


def first(self, *args, **more):
    """Autotuner.run without a device to time on: the first configuration."""
    self.nargs = dict(zip(self.arg_names, args))
    return self.fn.run(*args, **{**more, **self.configs[0].all_kwargs()})


def main():
    launch.import_shim()
    torch.set_num_threads(1)
    copy = Path(sys.argv[1]) / "fla"
    (found,) = importlib.util.find_spec("fla").submodule_search_locations
    shutil.copytree(found, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # In the interpreter a loop counts in Python's int, which has no .to().
    path = copy / "ops" / "common" / "chunk_delta_h.py"
    path.write_text(re.sub(r"= (i_t)\.to\(tl\.int64\)", r"= \1", path.read_text()))
    sys.path.insert(0, sys.argv[1])
    kernels = qwen35.delta_kernel(torch.device("cuda"))
    from triton.runtime.autotuner import Autotuner

    from tools import gpu_check

    for kind in (Autotuner, *Autotuner.__subclasses__()):
        kind.run = first
    wanted, found = (gpu_check.delta_results(rule, gpu_check.CPU, torch.float32, 2, 70, 2, 64)
                     for rule in (qwen35.delta_kernel(gpu_check.CPU), kernels))
    print(json.dumps({n: ((found[n] - x).norm() / x.norm()).item() for n, x in wanted.items()}))


if __name__ == "__main__":
    main()
