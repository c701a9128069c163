"""
evaluation/paper_driver.py (tests/publishers/test_proof.py): runs main() of the paper's authors'
paravt/eval/driver.py, in the user's checkout of their code, and records the requests that it would
send.

evaluation/paper_texts.py starts this file in a process of its own. Only the standard library is
imported at the top. The checkout has no network, no keys and an empty home folder, and what it
prints goes to stderr. It is the user's code all the same: whoever runs it trusts it as far as that.
Rows, servers, the model and the reader of videos are stand-ins.

  python -I -B evaluation/paper_driver.py CHECKOUT SCRIPT

Reads:  stdin, JSON: [{"bench", "row": as published, "replies": texts of the model, turn by turn,
        "files": {path: text}, "video"?: path, "frames"?: of the overview}]. SCRIPT: the script of
        paravt/eval/scripts whose flags count.
Writes: stdout, JSON: {"sent": [{"question", "requests", "server": words of its command, "result"}]}
        or {"fault": why}, if the checkout is not as expected.
"""

import functools
import glob
import importlib
import json
import os
import re
import resource
import socket
import sys
import time
import types


class Fault(Exception):
    """The checkout is not as expected."""


def stub_module(name, **contents):
    """Enters a stand-in for a module."""
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(contents)


def flags_of(checkout, script, bench):
    """Words of the command with which a script runs the driver on a benchmark."""
    path = os.path.join(checkout, "paravt", "eval", "scripts", script)
    with open(path, encoding="utf-8") as file:
        lines = file.read().replace("\\\n", " ").splitlines()
    commands = [line.partition("run_eval.sh")[2].split() for line in lines if "run_eval.sh" in line]
    matching = [c for c in commands if bench in c] or [c for c in commands if "charades" not in c]
    if len(matching) != 1:
        raise Fault(f"{path}: no command for {bench} that is known")
    recipe, *extra = matching[0]
    with open(os.path.join(checkout, recipe), encoding="utf-8") as file:
        settings = dict(re.findall(r"^(\w+): *([^#$\s]+) *(?:#.*)?$", file.read(), re.M))
    words = ["--model_path", "m", "--datasets", bench, "--num_gpus", "1"]
    for name in ("main_nframes", "max_turns", "max_parallel", "prompt_mode", "video_channel"):
        words += [f"--{name}", settings[name]]
    at = extra.index("--datasets") if "--datasets" in extra else len(extra)
    return words + extra[:at] + extra[at + 2 :]


def prepare_driver(checkout, script, fetch_video=None):
    """-> function of an item, see above. fetch_video: in place of qwen_vl_utils', if given."""
    rows, state = [], {}

    class Model:
        """openai.OpenAI, and the model behind it."""

        def __init__(self, **_):
            self.chat = self.completions = self

        def create(self, **request):
            state["requests"].append(json.loads(json.dumps(request)))  # a copy: messages go on
            replies = state["item"]["replies"]
            reply = replies[min(len(state["requests"]), len(replies)) - 1]
            choice = types.SimpleNamespace(message=types.SimpleNamespace(content=reply))
            return types.SimpleNamespace(choices=[choice])

    class Process:
        """multiprocessing's, without a process: its requests are to be seen here."""

        def __init__(self, target, args):
            self.start, self.join = functools.partial(target, *args), lambda: None

    def start_server(words, **_):
        state["server"] = words[1:]
        return types.SimpleNamespace(pid=0, terminate=lambda: None, wait=lambda **_: None)

    ready = types.SimpleNamespace(status_code=200, json=lambda: {"data": [{"id": "m"}]})
    stub_module("openai", OpenAI=Model)
    stub_module("datasets", load_dataset=lambda *_, **__: rows)
    stub_module("requests", get=lambda *_, **__: ready)
    if fetch_video:
        stub_module("qwen_vl_utils")
        stub_module("qwen_vl_utils.vision_process", fetch_video=fetch_video)
    if not os.path.isfile(os.path.join(checkout, "paravt", "eval", "driver.py")):
        raise Fault(f"no paravt/eval/driver.py in {checkout}")
    sys.path.insert(0, checkout)
    driver, utils = map(importlib.import_module, ("paravt.eval.driver", "paravt.eval.utils"))
    for module, name in ((driver, "main"), (utils, "load_samples"), (utils, "run_shard")):
        if not callable(getattr(module, name, None)):
            raise Fault(f"{module.__file__} has no function {name}")
    utils.Process, utils.subprocess = Process, types.SimpleNamespace(Popen=start_server)
    utils.time = types.SimpleNamespace(time=time.time, sleep=lambda _: None)
    load_samples = utils.load_samples

    def load(*args, **kwargs):
        """Their samples, after putting the item's video where they look for it."""
        samples = load_samples(*args, **kwargs)
        for sample in samples:
            state["question"], path = sample["question"], sample["video_path"]
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.lexists(path):
                os.remove(path)
            os.symlink(state["item"].get("video", os.devnull), path)
        return samples

    utils.load_samples = load

    def ask(item):
        state.clear()
        state.update(item=item, requests=[])
        rows[:] = [item["row"]]
        for path, text in item["files"].items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        out = f"out{len(os.listdir())}"  # a finished one would be read instead
        sys.argv = ["driver", *flags_of(checkout, script, item["bench"]), "--output_dir", out]
        if item.get("frames"):
            sys.argv += ["--main_nframes", str(item["frames"])]
        driver.main()
        for path in glob.glob(f"/tmp/*_pid{os.getpid()}.log"):  # of the servers
            os.remove(path)
        with open(os.path.join(out, item["bench"] + ".json"), encoding="utf-8") as file:
            (result,) = json.load(file)["results"]
        sent = {name: state[name] for name in ("question", "requests", "server")}
        return {**sent, "result": result}

    return ask


def fake_fetch_video(ele, **_):
    """fetch_video of a video of 200 seconds: frames without a picture."""
    import numpy as np

    class Frame(np.ndarray):
        def permute(self, *axes):
            return self.transpose(axes)

        def numpy(self):
            return np.asarray(self)

    if ele.get("video_start", 0) >= 200:
        raise ValueError("the window begins after the end of the video")
    return [np.zeros((3, 28, 28)).view(Frame)] * 6


def no_network(*_, **__):
    raise OSError("there is no network")


def main():
    checkout, script = sys.argv[1:]
    items = json.load(sys.stdin)
    # The channel gets a number of its own. Prints of the checkout, also from C, go to stderr.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = no_network
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))  # bytes of a file
    try:
        ask = prepare_driver(os.path.realpath(checkout), script, fake_fetch_video)
        output = {"sent": [ask(item) for item in items]}
    except Fault as fault:
        output = {"fault": str(fault)}
    except (Exception, SystemExit) as error:  # whatever the code of the checkout raises
        output = {"fault": f"its code fails with {type(error).__name__}: {error}"[:300]}
    channel.write(json.dumps(output) + "\n")
    channel.close()


if __name__ == "__main__":
    main()
