"""
tests/publishers/child.py: makes a publisher's own code send its requests, or grade replies.

  paper..                 main() of paravt/eval/driver.py, by evaluation/paper_driver.py
  qwen3-vl                main of evaluation/VideoMME/run_videomme.py, as infer_instruct.sh calls it
  video-r1, videorft      src/eval_bench.py, the whole script
  videochat-r1            process_work_items of src_eval/evaluate_qa.py
  time-r1                 main of evaluate.py, with test.sh's flags
  conan                   evaluate_example of Conan-Eval/*.py, with run.sh's flags
  longvt                  run_inference of examples/eval/single_inference.py
  videozoomer             MultiModalDataset and vLLMRollout_MultiTurn_Video, with eval_video.sh's
  lmms-eval:BENCHMARK     process_results of the task, after the harness's own removal of thoughts

proof.py starts this script in a process of its own, as evaluation/paper_driver.py is: without a
network, without keys, in an empty folder. Models, processors and readers of video files are
stand-ins: the model says what the item says, chats are written in ChatML and read back, and frames
show their numbers. All else is the publisher's code, down to its copy of qwen_vl_utils. A module
that is not installed is replaced by an empty one, which raises as soon as a function uses it.

  python -I -B tests/publishers/child.py CHECKOUT PROTOCOL EVALUATION

Reads:  stdin, JSON: [item], see proof.py. EVALUATION: our folder of that name.
Writes: stdout, JSON: {"sent": [{"requests", "pictures": [data URL], ..} or {"score"} or {"error"}]}
        or {"fault": why}. A request holds "picture:N" in place of a URL.
"""

import base64
import importlib
import importlib.machinery
import importlib.util
import io
import json
import logging
import os
import random
import re
import resource
import shlex
import shutil
import socket
import sys
import types
from functools import partial

import numpy as np

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
        module, module.__getattr__ = types.ModuleType(spec.name), partial(stand_in, spec.name)
        if spec.name == "loguru":  # a log does not change a verdict
            module.logger = logging.getLogger("loguru")
        return module

    def exec_module(self, module):
        pass


# ------------------------------------------------------------------------------------------------
# lmms-eval: (row, text) -> (score, what the grader read in the reply or None)


class Fault(Exception):
    """The checkout is not as expected."""


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
        raise Fault(f"no lmms_eval/tasks/{folder}/utils.py")
    bare_package("lmms_eval", root)
    bare_package("lmms_eval.tasks", os.path.join(root, "tasks"))
    task, strip = importlib.import_module(f"lmms_eval.tasks.{folder}.utils"), None
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
        raise Fault(f"{task.__file__} has no function temporal_grounding_aggregate_miou")
    return lambda row, text: (mean([process(row, [text])["charades_sta_mIOU"]], None) / 100, None)


def timelens(task):
    process, mean = needed(task, "timelens_process_results", "timelens_aggregate_miou")
    return lambda row, text: (mean([process(row, [text])["timelens_mIOU"]], None) / 100, None)


# ------------------------------------------------------------------------------------------------
# Pictures that show their numbers


def marked(number: int, height: int, width: int) -> np.ndarray:
    """A picture that shows the number of its frame: 4 x 4 squares, a bit each -> uint8 [H, W, 3].
    `number_of` reads it back, after any resizing and JPEG. For made-up videos."""
    bits = [number >> bit & 1 for bit in range(16)]
    squares = np.array(bits).reshape(4, 4) * 175 + 40
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    # More red than green, more green than blue: channels in another order are seen too.
    return (squares[rows][:, columns, None] * (1.0, 0.75, 0.5)).astype(np.uint8)


def number_of(image: np.ndarray) -> int:
    """The number that `marked` has drawn."""
    height, width = image.shape[:2]
    rows, columns = (((2 * np.arange(4) + 1) * side // 8) for side in (height, width))
    return sum(int(image[y, x].mean() > 95) << bit
               for bit, (y, x) in enumerate((y, x) for y in rows for x in columns))


now = {}  # the item that is asked, and its Script

# ------------------------------------------------------------------------------------------------
# The model


class Script:
    """A model that speaks from a script and keeps what it is sent; also an OpenAI client."""

    def __init__(self, said):
        self.said, self.requests, self.pictures = said, [], {}
        self.chat = self.completions = self

    def take(self, request):
        """Keeps a request -> the next turn."""
        # A copy, because messages go on; every picture once, because all requests repeat them.
        text = re.sub(r'"(data:[^"]*)"', self.named, json.dumps(request, default=repr))
        self.requests.append(json.loads(text))
        return self.said[min(len(self.requests), len(self.said)) - 1]

    def create(self, **request):
        text, calls = self.take(request), []
        if "tools" in request:  # as vLLM's hermes parser reads them
            calls = [json.loads(body) for body in
                     re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)]
            text = text.partition("<tool_call>")[0] if calls else text
        calls = [types.SimpleNamespace(id=str(n), function=types.SimpleNamespace(
            name=call["name"], arguments=json.dumps(call["arguments"])))
                 for n, call in enumerate(calls)]
        told = types.SimpleNamespace(content=text, tool_calls=calls or None, reasoning_content=None)
        why = "tool_calls" if calls else "stop"
        choice = types.SimpleNamespace(message=told, finish_reason=why)
        return types.SimpleNamespace(choices=[choice])

    def named(self, found):
        return f'"picture:{self.pictures.setdefault(found[1], len(self.pictures))}"'

    def sent(self, **more):
        return {"requests": self.requests, "pictures": list(self.pictures), "failed": None, **more}


def begin(item):
    """Makes an item the one that is asked -> its Script."""
    now.update(item=item, script=Script(item["said"]))
    return now["script"]


# ------------------------------------------------------------------------------------------------
# Chats as text, and pictures

PAD = "<|vision_start|><|{}_pad|><|vision_end|>"


def chat_text(messages, prompt=True):
    """Messages -> ChatML."""
    text = ""
    for message in messages:
        parts = message["content"]
        parts = [{"text": parts}] if isinstance(parts, str) else parts
        body = "".join(part["text"] if "text" in part else
                       PAD.format("video" if "video" in part else "image") for part in parts)
        text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
    return text + "<|im_start|>assistant\n" * prompt


def messages_of(text, media):
    """ChatML, {"image" or "video": pictures in order} -> messages with data URLs. A video is its
    frames, one by one."""
    # One video may stand without a list around it.
    media = {kind: iter([found] if getattr(found, "ndim", 0) == 4 else found or ())
             for kind, found in media.items()}
    messages = []
    for role, body in re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", text, re.DOTALL):
        parts = []
        for piece in re.split(r"(<\|vision_start\|><\|\w+_pad\|><\|vision_end\|>)", body):
            if piece in (PAD.format("image"), PAD.format("video")):
                shown = next(media[piece[len("<|vision_start|><|") :][:5]])
                if "video" in piece:
                    shown = shown[0] if isinstance(shown, tuple) else shown
                parts += map(picture, shown if "video" in piece else [shown])
            elif piece:
                parts.append({"type": "text", "text": piece})
        if parts or role != "assistant":
            messages.append({"role": role, "content": parts})
    return messages


def picture(image):
    """A file, a PIL image, an array [H, W, 3] or a tensor [3, H, W] -> part of a message. Only the
    bytes of a file are its own; others get a JPEG of ours, which no server would see."""
    from PIL import Image

    if isinstance(image, str):
        with open(image, "rb") as file:
            data, kind = file.read(), "image/jpeg"
    else:
        if not isinstance(image, Image.Image):
            array = np.asarray(image)
            array = array.transpose(1, 2, 0) if array.shape[0] == 3 else array
            image = Image.fromarray(array.astype(np.uint8))
        buffer, kind = io.BytesIO(), "frame/raw"
        image.save(buffer, "JPEG", quality=95)
        data = buffer.getvalue()
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


# ------------------------------------------------------------------------------------------------
# Stand-ins for packages


class Array(np.ndarray):
    """An array that passes for what the readers of videos return."""

    def permute(self, *axes):
        return self.transpose(axes)

    def numpy(self):
        return np.asarray(self)

    def to(self, *_):
        return self

    asnumpy = cpu = numpy


class Reader:
    """decord.VideoReader of the made-up video."""

    def __init__(self, *_, **__):
        self.frames, self.rate, *self.size = now["item"]["shape"]

    def __len__(self):
        return self.frames

    def seek(self, place):
        self.place = place

    def get_avg_fps(self):
        return float(self.rate)

    def __getitem__(self, place):
        return marked(int(place), *self.size).view(Array)

    def get_batch(self, places):
        return np.stack([self[place] for place in places]).view(Array)


def readers():
    if "readers" not in now:
        now["readers"] = ours("qwen_vl_sampling")
    return now["readers"]


class Settings(types.SimpleNamespace):
    """vllm.SamplingParams: its defaults are what a request does not name."""

    def __init__(self, **given):
        super().__init__(**{
            "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "stop": None, "detokenize": True, "include_stop_str_in_output": False,
            "ignore_eos": False, "seed": None, "logprobs": None, "stop_token_ids": None, **given})

    def request(self):
        plain = vars(Settings())
        found = {name: value for name, value in vars(self).items() if name not in (
            "seed", "logprobs", "detokenize", "stop_token_ids", "stop", "skip_special_tokens",
            "spaces_between_special_tokens") and value != plain.get(name)
            and (name, value) != ("top_k", -1)}
        found |= {"temperature": self.temperature, "max_tokens": self.max_tokens}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if stop:
            return {**found, "stop": stop}
        found.pop("include_stop_str_in_output", None)
        # Every server stops at the model's own ends of a turn and of a text.
        ends = sorted({*(self.stop_token_ids or ())} - {151645, 151643})
        return {**found, "stop_token_ids": ends} if ends else found


class Engine:
    """vllm.LLM."""

    def __init__(self, **settings):
        self.settings = settings

    def get_tokenizer(self):
        return Tokenizer()

    def generate(self, prompts, sampling_params, **_):
        done, same = [], not isinstance(sampling_params, list)
        each = [sampling_params] * len(prompts) if same else sampling_params
        for prompt, settings in zip(prompts, each):
            text = prompt.get("prompt") or Tokenizer().decode(prompt["prompt_token_ids"])
            messages = messages_of(text, prompt["multi_modal_data"])
            begun = {"add_generation_prompt": False, "continue_final_message": True}
            said = now["script"].take({"messages": messages, **settings.request(), **(
                begun if messages[-1]["role"] == "assistant" else {})})
            answer = types.SimpleNamespace(text=said, token_ids=Tokenizer().encode(said))
            done.append(types.SimpleNamespace(outputs=[answer]))
        return done

    def sleep(self, level=1):
        pass


class Tokenizer:
    """A token for every character; <|im_end|> is the published one, because code looks for it."""

    pad_token_id, END = 0, 151645

    def encode(self, text, **_):
        return [number for part in re.split(r"(<\|im_end\|>)", text)
                for number in ([self.END] if part == "<|im_end|>" else map(ord, part))]

    def decode(self, ids, **_):
        return "".join("<|im_end|>" if number == self.END else chr(number) for number in ids)

    def apply_chat_template(self, messages, **_):
        return chat_text(messages)


class Processor(Tokenizer):
    """transformers.AutoProcessor."""

    def __init__(self):
        self.tokenizer, self.image_token = self, "*"
        self.image_processor = types.SimpleNamespace(patch_size=16, merge_size=2)

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def __call__(self, text, images=None, videos=None, **_):
        return Inputs(chat=(text[0], {"image": images, "video": videos}))

    def batch_decode(self, texts, **_):
        return texts


class Inputs(dict):
    input_ids = [""]

    def to(self, *_):
        return self


class Weights:
    """A model of transformers that samples greedily unless it is told otherwise."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def generate(self, chat, max_new_tokens, use_cache=True, **more):
        return [now["script"].take({"messages": messages_of(*chat), "max_tokens": max_new_tokens,
                                    "temperature": 0, **more})]


def enter(name, **contents):
    """Enters a module that has these contents, and a stand-in for every other name."""
    module, module.__getattr__ = types.ModuleType(name), partial(stand_in, name)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def resize(video, size, **_):
    import torch

    return torch.nn.functional.interpolate(video.float(), size)


def to_picture(frame):
    from PIL import Image

    return Image.fromarray(np.asarray(frame).transpose(1, 2, 0).astype(np.uint8))


def enter_packages():
    os.environ["FORCE_QWENVL_VIDEO_READER"] = "decord"
    enter("decord", VideoReader=Reader, cpu=lambda *_: None, DECORDError=RuntimeError,
          bridge=types.SimpleNamespace(set_bridge=lambda *_: None))
    enter("torchvision", __version__="0.25.0", io=None)
    enter("torchvision.transforms", InterpolationMode=types.SimpleNamespace(BICUBIC=3))
    enter("torchvision.transforms.functional", resize=resize, to_pil_image=to_picture)
    enter("vllm", LLM=Engine, SamplingParams=Settings, __version__="0.8.0")
    enter("transformers", AutoProcessor=Processor, AutoTokenizer=Processor,
          Qwen2_5_VLForConditionalGeneration=Weights)


def stand_in_for_qwen(finder):
    """Puts a stand-in for qwen_vl_utils where it is not installed or does not import. Its frames
    show their numbers, as those of the made-up video do."""
    try:
        importlib.import_module("qwen_vl_utils.vision_process")
        return
    except Exception:  # torchvision of another build, for example
        finder.absent.add("qwen_vl_utils, read by ours")

    def fetch_video(ele, image_patch_size=14, return_video_sample_fps=False,
                    return_video_metadata=False):
        given = {name: value for name, value in ele.items() if name not in ("type", "video")}
        places, size = readers().qwen(given, *now["item"]["shape"], image_patch_size)
        frames = np.stack([marked(place, *size).transpose(2, 0, 1) for place in places])
        found = frames.view(Array)
        found = (found, {"frames_indices": places}) if return_video_metadata else found
        return (found, 1.0) if return_video_sample_fps else found

    enter("qwen_vl_utils", fetch_video=fetch_video)
    enter("qwen_vl_utils.vision_process", fetch_video=fetch_video)


def read(checkout, *path):
    """Text of a file of the checkout. Raises Fault if there is none."""
    try:
        with open(os.path.join(checkout, *path), encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise Fault(f"no {'/'.join(path)} ({error.strerror})") from None


def flags_in(text):
    """Shell script -> {name: value} of its --flags and of its name=value words."""
    text = re.sub(r"#.*", "", text.replace("\\\n", " "))
    words = re.findall(r"--([\w-]+) ([^\s-]\S*)", text)
    found = {name.replace("-", "_"): value for name, value in words}
    for word in shlex.split(text) if "python3 -m" in text else ():
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
    return found


def lettered(options, label="{}. {}"):
    return [label.format(chr(65 + n), text) for n, text in enumerate(options or [])]


def imported(folder, name):
    if not os.path.isfile(os.path.join(folder, *name.split(".")) + ".py"):
        raise Fault(f"no {name.replace('.', '/')}.py in {folder}")
    return importlib.import_module(name)


# ------------------------------------------------------------------------------------------------
# The publishers. Each function takes the checkout -> ask(item) -> Script.sent()


def ask_qwen3(checkout):
    folder = os.path.join(checkout, "evaluation", "VideoMME")
    sys.path[:0], rows = [os.path.join(checkout, "qwen-vl-utils", "src"), folder], []
    enter("datasets", load_dataset=lambda *_, **__: {"test": rows})
    run = imported(folder, "run_videomme")
    words = shlex.split(read(folder, "infer_instruct.sh").replace("\\\n", " "), comments=True)
    words = words[words.index("infer") :]

    def ask(item):
        script = begin(item)
        own = {"--data-dir": ".", "--duration": "short", "--output-file": "out/x.jsonl"}
        rows[:] = [{**item["row"], "duration": "short"}]
        given = list(words)
        for name, value in own.items():
            given[given.index(name) + 1] = value
        sys.argv = ["run", *given]
        run.main()
        return script.sent()

    return ask


def ask_r1(checkout):
    """A script without functions: it runs as a whole for every item."""
    sys.path.insert(0, os.path.join(checkout, "src", "qwen-vl-utils", "src"))
    text = read(checkout, "src", "eval_bench.py")
    code = compile(text, os.path.join(checkout, "src", "eval_bench.py"), "exec")
    places = re.findall(r'PROMPT_PATH = f"([^"]*)"', text)
    names = re.findall(r"for dataset_name in \[(.*?)\]", text)
    if not places or not names:
        raise Fault("src/eval_bench.py has no PROMPT_PATH or no loop over dataset_name")

    def run(rows):
        for number, name in enumerate(re.findall(r"'(\w+)'", names[0])):
            place = places[0].replace("{dataset_name}", name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                json.dump([] if number else rows, file)
        Absent.grading = False  # its imports are run again
        sys.argv = ["eval_bench.py", "--model_path", "m", "--file_name", "f"]
        for folder in ("src/r1-v/eval_results", "eval_results"):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                os.remove(os.path.join(folder, name))  # a result would be taken for this one
        exec(code, {"__name__": "__main__", "__file__": code.co_filename})

    def ask(item):
        script, task = begin(item), item["task"]
        kind = "multiple choice" if task["options"] else "free-form"
        run([{"problem": task["question"], "options": lettered(task["options"]), "path": "./v.mp4",
              "problem_type": kind, "data_type": "video", "solution": "<answer>B</answer>"}])
        return script.sent()

    run([])  # what the script imports is then there
    return ask


def ask_videochat(checkout):
    folder = os.path.join(checkout, "src_eval")
    sys.path[:0] = [folder, checkout]
    asking, timing = (imported(folder, f"evaluate_{kind}") for kind in ("qa", "grounding"))
    label = json.loads(read(checkout, "Annotations", "NextGQA", "nextgqa_test.json"))
    label = re.match(r"\W*A\W*", label[0]["options"][0])[0].replace("A", "{}") + "{}"

    def ask(item):
        script, task = begin(item), item["task"]
        for module in (asking, timing):
            module.VIDEO_INFO_CACHE.clear()
        if task["type"] == "grounding":
            timing.inference("v.mp4", timing.GROUND_TEMPLATE.replace("[EVENT]", task["event"]),
                             Weights(), Processor())
        else:
            asking.process_work_items(
                [{"video_path": "v.mp4", "solution": {"answer": "B"}, "problem": {
                    "question": task["question"], "options": lettered(task["options"], label)}}],
                "m", "cuda:0", "out")
        return script.sent()

    return ask


def ask_time_r1(checkout):
    sys.path.insert(0, checkout)
    run, loaders = imported(checkout, "evaluate"), sys.modules["src.vllm_inference.data"]
    imported(checkout, "src.vllm_inference.utils").monkey_patch()
    imported(checkout, "src.vllm_inference.vllm_infer").get_device_count = lambda: 1
    script_of = re.sub("#.*", "", read(checkout, "scripts", "test.sh"))
    rows, flags = [], flags_in(script_of)
    loaders.load_videomme = loaders.load_charades = lambda split: rows

    class Loader(list):  # torch's would start processes
        def __init__(self, dataset, collate_fn, **_):
            super().__init__(collate_fn([dataset[n]]) for n in range(len(dataset)))
            self.dataset = dataset

    loaders.DataLoader = Loader

    def ask(item):
        script, task = begin(item), item["task"]
        timing = task["type"] == "grounding"
        rows[:] = [{"video": item["video"], "qid": "x", "duration": None, "timestamp": [1.0, 2.0],
                    "sentence": task.get("event"), "question": task["question"], "answer": 1,
                    "options": task["options"]}]
        sys.argv = ["evaluate.py", "--datasets", "charades" if timing else "videomme",
                    "--datatype", "tg" if timing else "mcq", "--split", flags["split"].strip("$"),
                    "--max_new_tokens", flags["max_new_tokens"], "--output_dir", "out",
                    *re.findall(r"--use_\w+", script_of)]
        shutil.rmtree("out", ignore_errors=True)  # finished questions are not asked again
        run.main(run.get_args())
        return script.sent()

    return ask


def ask_conan(checkout):
    folder = os.path.join(checkout, "Conan-Eval")
    sys.path.insert(0, folder)
    benches = {n: imported(folder, n) for n in ("videomme", "longvideobench", "lvbench", "mlvu")}
    flags, table = flags_in(read(folder, "run.sh")), []
    for module in benches.values():
        module.load_qa = lambda _: table

    class Model:
        def chat(self, message, history=None):
            chat = (history or []) + message
            sent = [{**turn, "content": turn["content"] if isinstance(turn["content"], str) else [
                picture(part["image"]) if "image" in part else part for part in turn["content"]]}
                    for turn in chat]
            said = now["script"].take({
                "messages": sent, "max_tokens": int(flags["max_new_tokens"]),
                "temperature": float(flags["temperature"])})
            return said, [*chat, {"role": "assistant", "content": said}]

    def ask(item):
        script, task, bench = begin(item), item["task"], benches[item["bench"]]
        row = {**item["row"], "question_category": "", "question_type": "", "key": "v",
               "candidates": task["options"], "correct_choice": 1, "video": "v", "videoID": "v",
               "video_path": "v", "answer": "B"}
        if item["bench"] == "mlvu":
            row.update(answer=task["options"][1], question=task["question"])
        row["qa"] = [{**row, "uid": "x"}]
        table[:] = [row]
        example = bench.load_data()[0]
        example["video_path"] = item["video"]
        for place in [place for place in os.listdir(".") if place.startswith("frames")]:
            shutil.rmtree(place)  # frames of another film
        bench.evaluate_example(Model(), example, mode=flags["mode"],
                               max_frames=int(flags["max_frames"]),
                               max_steps=int(flags["max_steps"]))
        return script.sent()

    return ask


def ask_longvt(checkout):
    folder = os.path.join(checkout, "examples", "eval")
    sys.path.insert(0, folder)

    class Capture:
        def __init__(self, _):
            self.reader = Reader()

        def get(self, name):
            return self.reader.rate if name == "fps" else len(self.reader)

        def isOpened(self):  # noqa: N802, a name of theirs
            return True

        def release(self):
            pass

    enter("cv2", VideoCapture=Capture, CAP_PROP_FPS="fps", CAP_PROP_FRAME_COUNT="frames")
    demo = imported(folder, "single_inference")

    def ask(item):
        script = begin(item)
        demo.OpenAI = lambda **_: script
        os.symlink(item["video"], "made-up.mp4")
        demo.run_inference("made-up.mp4", item["asked"], model_name="m", verbose=False)
        os.remove("made-up.mp4")
        for request in script.requests:
            request["messages"] = as_template(request["messages"])
        return script.sent()

    return ask


def as_template(messages):
    """Messages with calls of a server's parser -> as the chat template writes them: calls in the
    text, answers to calls in one user turn."""
    turns = []
    for message in messages:
        message, parts = dict(message), message["content"]
        if calls := message.pop("tool_calls", None):
            message["content"] = parts + "\n".join(
                "<tool_call>\n" + json.dumps({"name": call["function"]["name"], "arguments":
                                              json.loads(call["function"]["arguments"])})
                + "\n</tool_call>" for call in calls)
        if message["role"] == "tool":
            parts = [{"type": "text", "text": "<tool_response>\n"}, *parts,
                     {"type": "text", "text": "\n</tool_response>"}]
            if turns[-1].get("tool"):
                parts[0]["text"] = "\n<tool_response>\n"
                turns[-1]["content"] += parts
                continue
            message = {"role": "user", "content": parts, "tool": True}
        turns.append(message)
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


class Tree(dict):
    """A configuration: entries are attributes."""

    __getattr__ = dict.get


def ask_videozoomer(checkout):
    import torch
    import yaml

    sys.path.insert(0, checkout)
    # Without its __init__.py, which imports the trainer.
    bare_package("verl", os.path.join(checkout, "verl"))
    sys.modules["verl"].DataProto = stand_in("verl", "DataProto")
    bare_package("verl.workers.rollout.vllm_rollout", os.path.join(
        checkout, "verl", "workers", "rollout", "vllm_rollout"))
    bare_package("verl.third_party", os.path.join(checkout, "verl", "third_party"))
    enter("verl.third_party.vllm", vllm_version="0.8.0")
    place = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd_video"
    data = imported(checkout, "verl.utils.dataset.multimodal_dataset")
    loop, flags = imported(checkout, place), flags_in(read(checkout, "scripts", "eval_video.sh"))
    tree = yaml.safe_load(read(checkout, "verl", "trainer", "config", "ppo_trainer.yaml"))

    def settings(name):
        found = tree
        for part in name.split("."):
            found = found.get(part, {})
        own = {key.removeprefix(name + "."): value for key, value in flags.items()
               if key.startswith(name + ".")}
        found = {**found, **{key: value if key == "system_prompt" else yaml.safe_load(value.replace(
            "image:", "'image':")) for key, value in own.items()}}
        return Tree({key: settings("data")[value[7:-1]] if str(value).startswith("${data.")
                     else value for key, value in found.items()})

    given, rollout = settings("data"), settings("actor_rollout_ref.rollout")
    torch.distributed.get_world_size = lambda *_: 1
    processor = Processor()
    processor.image_processor = Grid()
    data.verl_F = types.SimpleNamespace(
        tokenize_and_postprocess_data=lambda prompt, **_: (torch.ones(1, 4), torch.ones(1, 4)))
    enter("verl.models.transformers.qwen2_vl", get_rope_index=lambda *_, **__: torch.ones(1, 4))
    engine = loop.vLLMRollout_MultiTurn_Video(
        "m", rollout, processor, processor,
        types.SimpleNamespace(max_position_embeddings=10**9))

    class Enough(Exception):
        """The requests have been sent; the rest makes tensors of them for a trainer."""

    def ask(item):
        script = begin(item)
        with open("rows.json", "w", encoding="utf-8") as file:
            json.dump([{"data_source": "x", "problem": "<image>" + item["asked"], "videos":
                        [item["video"]], "solution": "B"}], file)
        rows = data.MultiModalDataset(
            "rows.json", processor, processor, return_raw_chat=False,
            system_prompt=given["system_prompt"].strip('"').replace('\\"', '"'),
            **{name: given[name] for name in ("image_key", "max_pixels", "min_pixels", "video_fps",
                                              "frames_upbound", "pass_video_as_frames")})
        row = rows[0]
        prompts = types.SimpleNamespace(
            batch={name: torch.ones(1, 4, dtype=torch.long)
                   for name in ("input_ids", "attention_mask", "position_ids")},
            meta_info={"eos_token_id": [151645], "do_sample": False, "validate": True},
            non_tensor_batch={"raw_prompt_ids": np.array([row["raw_prompt_ids"], 0], object)[:1],
                              "multi_modal_data": [row["multi_modal_data"]],
                              "video_files": [row["video_files"]]})

        def stop(*_, **__):
            raise Enough

        processor.image_processor.after = stop
        try:
            engine.generate_sequences(prompts)
        except Enough:
            pass
        processor.image_processor.after = None
        return script.sent()

    return ask


class Grid:
    """The image processor of the rollout."""

    merge_size, after = 2, None

    def __call__(self, images, **_):
        if self.after:
            self.after()
        return {"image_grid_thw": np.full((len(images), 3), 2)}


# ------------------------------------------------------------------------------------------------
# The channel

EVALUATION = sys.argv[-1]  # our folder; their code gets an argv of its own
ASK = {"qwen3-vl": ask_qwen3, "video-r1": ask_r1, "videorft": ask_r1,
       "videochat-r1": ask_videochat, "time-r1": ask_time_r1, "conan": ask_conan,
       "longvt": ask_longvt, "videozoomer": ask_videozoomer}
SCRIPTS = {"paper": "reproduce_paravt_8b.sh", "paper-general": "reproduce_qwen3vl_8b.sh",
           "paper-direct": "reproduce_qwen25vl_7b.sh",
           "paper-reasoning": "reproduce_reasoning_baselines.sh"}


def ours(name):
    """A file of our evaluation/, as a module under a name that no checkout has."""
    spec = importlib.util.spec_from_file_location(f"_our_{name}", f"{EVALUATION}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask_paper(checkout, script):
    driver, driver.Fault = ours("paper_driver"), Fault
    ask = driver.prepare_driver(checkout, script)

    def asked(item):
        now.update(item=item)  # whose video the reader shows
        sent, script = ask({**item, "replies": item["said"]}), Script([""])
        for request in sent["requests"]:
            script.take(request)
        return {**script.sent(), **{name: sent[name] for name in ("server", "result")}}

    return asked


def prepared(protocol, checkout, finder):
    kind, _, bench = protocol.partition(":")
    if kind == "lmms-eval":
        finder.own, grade = "lmms_eval", lmms_eval(checkout, bench)
        return lambda item: {"score": float(grade(item["row"], item["text"])[0])}
    if kind in ASK:
        enter_packages()
        finder.own = "-"  # modules of a checkout that are missing get stand-ins too
    if kind in ("longvt", "conan", *SCRIPTS):
        stand_in_for_qwen(finder)
    return ask_paper(checkout, SCRIPTS[kind]) if kind in SCRIPTS else ASK[kind](checkout)


def no_network(*_, **__):
    raise OSError("there is no network")


def main():
    checkout, protocol = os.path.realpath(sys.argv[1]), sys.argv[2]
    items, channel = json.load(sys.stdin), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = no_network
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))  # bytes of a file
    finder = Finder(checkout, "paravt")
    sys.meta_path.append(finder)
    told = {"sent": []}
    try:
        function = prepared(protocol, checkout, finder)
        Absent.grading = True
        for item in items:
            random.seed(0)  # some graders guess if they find no letter
            try:
                told["sent"].append(function(item))
            except (Exception, SystemExit) as error:  # whatever it raises is this item's outcome
                told["sent"].append({"error": f"{type(error).__name__}: {error}"[:300]})
    except (Exception, SystemExit) as error:  # of imports, or a checkout that is not as expected
        told = {"fault": f"{type(error).__name__}: {error}"[:300]}
    channel.write(json.dumps(told) + "\n")
    channel.close()


if __name__ == "__main__":
    main()
