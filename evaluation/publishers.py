"""
evaluation/publishers.py: runs functions of a publisher's own code, in the user's checkout of it.

  grade   replies -> verdicts, by lmms-eval or by ParaVT's driver
  ask     made-up items and replies -> the requests that the publisher's code would send

evaluation/checkouts.py starts this script in a process of its own and no other file imports it.
Only the standard library is imported at the top, so that nothing of ours can change a verdict. The
checkout has no network, no keys, an empty home folder, bounds on memory and files, and no channel
but the lines that this script writes. What the checkout prints goes to stderr. It is the user's
code all the same: whoever runs it trusts it as far as that.

A module that the checkout imports and that is not installed is replaced by an empty one. The empty
one lets the import pass and raises as soon as a function uses it. qwen_vl_utils alone has a
stand-in that works: evaluation/readers.py tells it which frames of the made-up video to take.

  python -I -B evaluation/publishers.py lmms-eval|paper BENCHMARK CHECKOUT SECONDS
  python -I -B evaluation/publishers.py ask PROTOCOL CHECKOUT SECONDS

Reads:  stdin, an item a line. To grade: {"row": as published, "text": the reply, "seed": text}. To
        ask: {"bench", "row", "video": path, "shape": [frames, frames per second, height, width],
        "files": {path: text}, "said": replies, "frames"?: of the overview}. SECONDS is the most
        that one item may take.
Writes: stdout, a line per item: {"score": in [0, 1], "said": text or null}, {"requests": [..],
        "pictures": [data URL]} (a request holds "picture:N" in place of the URL), or {"error":
        text}; last {"files": {path: sha256}, "absent": [modules]} of all that was imported. Or one
        line: {"fault": why} if the checkout is not as expected, {"none": why} if it has nothing for
        the benchmark.
"""

import faulthandler
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import random
import resource
import signal
import socket
import sys
import types
from functools import partial

STARTING = 300  # seconds that the imports of a checkout may take

# ------------------------------------------------------------------------------------------------
# Modules that are not installed


class Absent(type):
    """Type of the stand-ins for what a module that is not installed would hold."""

    grading = False

    def __getattr__(cls, name):
        return stand_in(cls.__name__, name)

    def __call__(cls, *args, **kwargs):
        if Absent.grading:
            raise ImportError(f"{cls.__name__} is not installed")
        # A decorator returns what it is given. The call before it may have had arguments.
        plain = len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType))
        return args[0] if plain else cls

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):  # without it, __getitem__ would be asked without end
        return iter(())

    def __or__(cls, other):  # in an annotation: numpy.ndarray | None
        return cls

    __ror__ = __or__


def stand_in(of, name):
    if name.startswith("__"):  # Python itself asks for these
        raise AttributeError(name)
    if Absent.grading:
        raise ImportError(f"{of} is not installed")
    return Absent(f"{of}.{name}", (), {})


class Finder:
    """Finds, after all others, what a file of the checkout imports and what is not installed."""

    def __init__(self, checkout, own):
        self.checkout, self.own, self.absent = checkout, own, set()

    def find_spec(self, name, path=None, target=None):
        if Absent.grading or name.partition(".")[0] == self.own:
            return None
        # Installed packages try imports, too, and do well without the module that they miss.
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(self.checkout + os.sep):
            return None
        self.absent.add(name.partition(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = partial(stand_in, spec.name)
        if spec.name == "loguru":  # a log does not change a verdict
            module.logger = logging.getLogger("loguru")
        return module

    def exec_module(self, module):
        pass


# ------------------------------------------------------------------------------------------------
# The graders. Each is (row, text) -> (score, what the grader read in the reply or None).


class Fault(Exception):
    """The checkout is not as expected."""


class NoGrader(Exception):
    """The checkout has no grader for the benchmark."""


def needed(module, *names):
    for name in names:
        if not callable(getattr(module, name, None)):
            raise Fault(f"{module.__file__} has no function {name}")
    return [getattr(module, name) for name in names]


def bare_package(name, folder):
    """Enters a package without running its __init__.py, which imports the whole harness."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [folder]


def lmms_eval(checkout, bench):
    """lmms-eval: process_results of the benchmark's task, after the harness's own removal of
    thoughts. The comparison is that of the task's aggregation."""
    folders = {"videomme_wsub": "videomme", "charades": "charades_sta", "cgbench_clue": "cgbench"}
    folder = folders.get(bench, "timelens" if bench.startswith("timelens") else bench)
    root = os.path.join(checkout, "lmms_eval")
    if not os.path.isdir(os.path.join(root, "tasks")):
        raise Fault(f"no folder lmms_eval/tasks in {checkout}")
    if not os.path.isfile(os.path.join(root, "tasks", folder, "utils.py")):
        raise NoGrader(f"no lmms_eval/tasks/{folder}/utils.py")
    bare_package("lmms_eval", root)
    bare_package("lmms_eval.tasks", os.path.join(root, "tasks"))
    task = importlib.import_module(f"lmms_eval.tasks.{folder}.utils")
    strip = None
    if os.path.isfile(os.path.join(root, "api", "reasoning.py")):  # younger versions
        strip, = needed(importlib.import_module("lmms_eval.api.reasoning"), "strip_reasoning_tags")
    grade = {"longvideobench": longvideobench, "lvbench": lvbench, "mmvu": mmvu,
             "charades": charades, "timelens": timelens}.get(
        "timelens" if folder == "timelens" else bench)
    grade = grade(task) if grade else letters(task, folder)
    tags = [["<think>", "</think>"], ["<analysis>", "</analysis>"]]  # the harness's default
    return lambda row, text: grade(row, strip(text, tags) if strip else text)


def letters(task, folder):
    process, = needed(task, f"{folder}_process_results")

    def grade(row, text):
        found, *_ = process(row, [text]).values()  # one verdict under the name of every metric
        if "pred_answer" not in found:
            return found["score"], None
        return found["pred_answer"] == found["answer"], found["pred_answer"]

    return grade


def longvideobench(task):
    process, equal = needed(task, "longvideobench_process_results", "eval_multi_choice")

    def grade(row, text):
        found = process(row, [text])["lvb_acc"]
        return equal(found["answer"], found["parsed_pred"]), found["parsed_pred"]

    return grade


def lvbench(task):
    process, = needed(task, "lvbench_process_results")
    return lambda row, text: (process(row, [text])["lvbench_score"], None)


def mmvu(task):
    process, = needed(task, "mmvu_process_results")

    def grade(row, text):
        found = process(row, [text])["accuracy"]
        return found["correct"], found["pred_answer"]

    return grade


def charades(task):
    process, = needed(task, "temporal_grounding_process_results_generation")
    mean = getattr(task, "temporal_grounding_aggregate_miou", None)
    if mean is None:  # older versions only write the replies down
        raise NoGrader(f"{task.__file__} has no function temporal_grounding_aggregate_miou")
    return lambda row, text: (mean([process(row, [text])["charades_sta_mIOU"]], None) / 100, None)


def timelens(task):
    process, mean = needed(task, "timelens_process_results", "timelens_aggregate_miou")
    return lambda row, text: (mean([process(row, [text])["timelens_mIOU"]], None) / 100, None)


def paravt_modules(checkout):
    """-> ParaVT's driver and utils, and the list of the rows that its loaders find."""
    if not os.path.isfile(os.path.join(checkout, "paravt", "eval", "driver.py")):
        raise Fault(f"no paravt/eval/driver.py in {checkout}")
    rows = []
    hub = types.ModuleType("datasets")  # whether it is installed or not: nothing is downloaded
    hub.load_dataset = lambda *args, **kwargs: rows
    hub.__getattr__ = partial(stand_in, "datasets")
    sys.modules["datasets"] = hub
    sys.path.insert(0, checkout)
    return *map(importlib.import_module, ("paravt.eval.driver", "paravt.eval.utils")), rows


def paper(checkout, bench):
    """ParaVT: the loader of paravt/eval/utils.py makes a sample of the row, and _score of
    paravt/eval/driver.py grades the reply."""
    driver, utils, rows = paravt_modules(checkout)
    (score,), (load,) = needed(driver, "_score"), needed(utils, "load_samples")

    def grade(row, text):
        rows[:] = [row]
        sample, = load(bench, os.getcwd())
        _, value, said = score(sample, text)
        return value, said

    return grade


# ------------------------------------------------------------------------------------------------
# The channel


class Overrun(BaseException):
    """Not an Exception, which the checkout's own handlers would catch."""


def overrun(*_):
    raise Overrun


def limited(seconds, function, *args):
    """function(*args). Raises Overrun after `seconds`; code that does not heed this is killed."""
    faulthandler.dump_traceback_later(seconds + 5, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def no_network(*args, **kwargs):
    raise OSError("a grader has no network")


def digests(checkout):
    """{path in the checkout: sha256} of the Python files that were imported."""
    files = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith(checkout + os.sep) and os.path.isfile(path):
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            files[os.path.relpath(path, checkout)] = digest
    return dict(sorted(files.items()))


def verdict(grade, item):
    score, said = grade(item["row"], item["text"])
    score = float(score)
    if not 0 <= score <= 1:  # NaN fails this comparison too
        raise ValueError(f"the score is {score}")
    if said is not None:  # half a character (a lone surrogate) is no text
        said = str(said)[:200].encode("utf-8", "replace").decode()
    return {"score": score, "said": said}


def outcome(function, item, seconds):
    random.seed(item["seed"])  # some graders guess if they find no letter
    try:
        return limited(seconds, function, item)
    except Overrun:
        return {"error": f"no verdict within {seconds:g} seconds"}
    except (Exception, SystemExit) as error:  # whatever it raises is this item's outcome
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def prepared(kind, name, checkout, finder):
    """-> function of an item."""
    if kind == "ask":
        return load("senders.py").prepared(name, checkout, finder, sys.modules[__name__])
    return partial(verdict, {"lmms-eval": lmms_eval, "paper": paper}[kind](checkout, name))


def load(file):
    """A file beside this one, as a module under a name that no checkout has."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), file)
    spec = importlib.util.spec_from_file_location(f"_ours_{file[:-3]}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    kind, name, checkout, seconds = sys.argv[1:]
    checkout, seconds = os.path.realpath(checkout), float(seconds)
    items = [json.loads(line) for line in sys.stdin.buffer]
    # The channel gets a number of its own. Prints of the checkout, also from C, go to stderr.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGALRM, overrun)
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = no_network
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))  # bytes of a file
    resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))

    def tell(value):
        channel.write(json.dumps(value) + "\n")
        channel.flush()

    finder = Finder(checkout, {"lmms-eval": "lmms_eval"}.get(kind, "paravt"))
    sys.meta_path.append(finder)
    try:
        function = limited(STARTING, prepared, kind, name, checkout, finder)
    except NoGrader as why:
        return tell({"none": str(why)})
    except Fault as why:
        return tell({"fault": str(why)})
    except Overrun:
        return tell({"fault": f"its imports took more than {STARTING} seconds"})
    except (Exception, SystemExit) as error:  # whatever the imports of the checkout raise
        return tell({"fault": f"its imports fail with {type(error).__name__}: {error}"[:300]})
    Absent.grading = True
    for item in items:
        tell(outcome(function, item, seconds))
    # Only now, because a grader may import a file when it first needs it.
    tell({"files": digests(checkout), "absent": sorted(finder.absent)})


if __name__ == "__main__":
    main()
