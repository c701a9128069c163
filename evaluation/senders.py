"""
evaluation/senders.py: makes a publisher's own code send its requests, and records them.

  paper..                 load_samples and eval_one of paravt/eval, with the flags of the scripts
  qwen3-vl                main of evaluation/VideoMME/run_videomme.py, as infer_instruct.sh calls it
  video-r1, videorft      src/eval_bench.py, the whole script
  videochat-r1            process_work_items of src_eval/evaluate_qa.py
  time-r1                 main of evaluate.py, with test.sh's flags
  conan                   evaluate_example of Conan-Eval/*.py, with run.sh's flags
  longvt                  run_inference of examples/eval/single_inference.py
  videozoomer             MultiModalDataset and vLLMRollout_MultiTurn_Video, with eval_video.sh's

evaluation/publishers.py loads this file in its child process and no other file imports it. Models,
processors and readers of video files are stand-ins: the model says what the item says, chats are
written in ChatML and read back, and frames show their numbers. All else is the publisher's code,
down to its copy of qwen_vl_utils if the checkout has one.

Reads and writes: see evaluation/publishers.py.
"""

import base64
import importlib
import importlib.machinery
import io
import json
import os
import re
import shlex
import shutil
import sys
import types

import numpy as np

now = {}  # the item that is asked, and its Script
child = None  # evaluation/publishers.py, as it runs

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
        message = types.SimpleNamespace(content=text, tool_calls=calls or None,
                                        reasoning_content=None)
        choice = types.SimpleNamespace(message=message,
                                       finish_reason="tool_calls" if calls else "stop")
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
        return readers().marked(int(place), *self.size).view(Array)

    def get_batch(self, places):
        return np.stack([self[place] for place in places]).view(Array)


def readers():
    if "readers" not in now:
        now["readers"] = child.load("readers.py")
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
        done = []
        same = not isinstance(sampling_params, list)
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
    module = types.ModuleType(name)
    module.__getattr__ = child.partial(child.stand_in, name)
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
        frames = np.stack([readers().marked(place, *size).transpose(2, 0, 1) for place in places])
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
        raise child.Fault(f"no {'/'.join(path)} ({error.strerror})") from None


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
        raise child.Fault(f"no {name.replace('.', '/')}.py in {folder}")
    return importlib.import_module(name)


# ------------------------------------------------------------------------------------------------
# The publishers. Each function takes the checkout -> ask(item) -> Script.sent()


def ask_qwen3(checkout):
    folder = os.path.join(checkout, "evaluation", "VideoMME")
    sys.path[:0] = [os.path.join(checkout, "qwen-vl-utils", "src"), folder]
    rows = []
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
        raise child.Fault("src/eval_bench.py has no PROMPT_PATH or no loop over dataset_name")

    def run(rows):
        for number, name in enumerate(re.findall(r"'(\w+)'", names[0])):
            place = places[0].replace("{dataset_name}", name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                json.dump([] if number else rows, file)
        child.Absent.grading = False  # its imports are run again
        sys.argv = ["eval_bench.py", "--model_path", "m", "--file_name", "f"]
        for folder in ("src/r1-v/eval_results", "eval_results"):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                os.remove(os.path.join(folder, name))  # a result would be taken for this one
        exec(code, {"__name__": "__main__", "__file__": code.co_filename})

    def ask(item):
        script, task = begin(item), item["task"]
        kind = "multiple choice" if task["options"] else "free-form"
        run([{"problem": task["question"], "options": lettered(task["options"]),
              "path": "./v.mp4", "problem_type": kind, "data_type": "video",
              "solution": "<answer>B</answer>"}])
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
    run = imported(checkout, "evaluate")
    loaders = sys.modules["src.vllm_inference.data"]
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
    benches = {name: imported(folder, name) for name in ("videomme", "longvideobench", "lvbench",
                                                         "mlvu")}
    flags = flags_in(read(folder, "run.sh"))
    table = []
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
    child.bare_package("verl", os.path.join(checkout, "verl"))
    sys.modules["verl"].DataProto = child.stand_in("verl", "DataProto")
    child.bare_package("verl.workers.rollout.vllm_rollout", os.path.join(
        checkout, "verl", "workers", "rollout", "vllm_rollout"))
    child.bare_package("verl.third_party", os.path.join(checkout, "verl", "third_party"))
    enter("verl.third_party.vllm", vllm_version="0.8.0")
    place = "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd_video"
    data = imported(checkout, "verl.utils.dataset.multimodal_dataset")
    loop = imported(checkout, place)
    flags = flags_in(read(checkout, "scripts", "eval_video.sh"))
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
            "rows.json", processor, processor, image_key=given["image_key"],
            system_prompt=given["system_prompt"].strip('"').replace('\\"', '"'),
            max_pixels=given["max_pixels"], min_pixels=given["min_pixels"],
            video_fps=given["video_fps"], frames_upbound=given["frames_upbound"],
            pass_video_as_frames=given["pass_video_as_frames"], return_raw_chat=False)
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


def script_words(path, bench):
    """The words after run_eval.sh in the command of a script that runs a benchmark."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().replace("\\\n", " ").splitlines()
    found = [line.partition("run_eval.sh")[2].split() for line in lines if "run_eval.sh" in line]
    own = [words for words in found if bench in words] or [w for w in found if "charades" not in w]
    if len(own) != 1:
        raise child.Fault(f"{path}: no command for {bench} that is known")
    return own[0]


def ask_paper(checkout, script_of):
    """ParaVT's driver: load_samples makes a question of the row, eval_one asks the model, with the
    flags of the script of this system."""
    driver, utils, rows = child.paravt_modules(checkout)
    load, launch_servers = child.needed(utils, "load_samples", "launch_servers")
    ask_one, parse = child.needed(driver, "eval_one", "_parse_args_with_prompt_mode")

    def flags_of(bench):
        path = os.path.join(checkout, "paravt/eval/scripts", script_of)
        recipe, *more = script_words(path, bench)
        with open(os.path.join(checkout, recipe), encoding="utf-8") as file:
            settings = dict(re.findall(r"^(\w+): *([^#$\s]+) *(?:#.*)?$", file.read(), re.M))
        words = ["driver", "--model_path", "m", "--output_dir", ".", "--datasets", bench]
        for name in ("main_nframes", "max_turns", "max_parallel", "prompt_mode", "video_channel"):
            words += [f"--{name}", settings[name]]
        at = more.index("--datasets") if "--datasets" in more else len(more)
        sys.argv = words + more[:at] + more[at + 2 :]
        return parse()

    def server_of(flags):
        """The command of the server that they start."""
        started = []

        def start(words, **_):
            started.append([word for word in words if word != sys.executable])
            return types.SimpleNamespace(pid=0)

        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        before, utils.subprocess.Popen = utils.subprocess.Popen, start
        try:
            launch_servers(
                "m", 1, nframes=flags.main_nframes, max_pixels=flags.max_pixels,
                max_num_batched_tokens=flags.max_num_batched_tokens,
                log_prefix=os.path.relpath(os.getcwd(), "/tmp") + "/log",
                disable_mm_kwargs=flags.no_mm_kwargs)
        finally:
            utils.subprocess.Popen = before
        return started[0]

    def ask(item):
        script, rows[:] = begin(item), [item["row"]]
        for path, text in item["files"].items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        flags = flags_of(item["bench"])
        sample, = load(item["bench"], os.getcwd(), prompt_mode=flags.prompt_mode)
        sample["video_path"] = item["video"]
        frames = item.get("frames") or flags.main_nframes
        done = ask_one(script, "m", sample, frames, flags.max_turns, flags.prompt_mode,
                       flags.max_parallel, flags.max_tokens, flags.video_channel)
        return {**script.sent(), "question": sample["question"], "failed": done.get("error"),
                "server": server_of(flags)}

    return ask


ASK = {"paper": (ask_paper, "reproduce_paravt_8b.sh"),
       "paper-general": (ask_paper, "reproduce_qwen3vl_8b.sh"),
       "paper-direct": (ask_paper, "reproduce_qwen25vl_7b.sh"),
       "paper-reasoning": (ask_paper, "reproduce_reasoning_baselines.sh"),
       "qwen3-vl": (ask_qwen3,), "video-r1": (ask_r1,), "videorft": (ask_r1,),
       "videochat-r1": (ask_videochat,), "time-r1": (ask_time_r1,), "conan": (ask_conan,),
       "longvt": (ask_longvt,), "videozoomer": (ask_videozoomer,)}


def prepared(name, checkout, finder, runs):
    """-> ask(item) of a protocol. runs: the module evaluation/publishers.py."""
    global child
    child = runs
    make, *more = ASK[name]
    if make is not ask_paper:
        enter_packages()
        finder.own = "-"  # modules of a checkout that are missing get stand-ins too
    if name in ("longvt", "conan") or make is ask_paper:
        stand_in_for_qwen(finder)
    return make(checkout, *more)
