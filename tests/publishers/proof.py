"""
tests/publishers/proof.py: the requests of a protocol beside those of its publisher's own code.

Both get the same made-up rows, as the benchmark publishes them, and made-up videos whose frames
show their numbers, with a model that says what a script says. Their side is recorded from their own
code, run in a child process (child.py); ours are the bodies that an endpoint would get. Whole
requests are compared: texts and roles, sampling, number, size, JPEG tables and numbers of frames,
executed calls and their answers. A difference that DECLARED covers is a departure of the protocol.
"""

import argparse
import base64
import functools
import io
import json
import os
import re
from dataclasses import dataclass, field

import av
import child
import numpy as np

import rollout
from engine import Completion
from evaluation import benchmarks, endpoint, paper_texts, protocol_loop, systems
from evaluation.protocol_loop import QUESTION, fill_template

HERE = os.path.dirname(os.path.abspath(__file__))
EVALUATION = os.path.join(os.path.dirname(os.path.dirname(HERE)), "evaluation")
# protocol -> (folder of the clone, snapshot that was read)
KNOWN = {"paper": ("ParaVT", "cf55249"), "paper-general": ("ParaVT", "cf55249"),
         "paper-direct": ("ParaVT", "cf55249"), "paper-reasoning": ("ParaVT", "cf55249"),
         "qwen3-vl": ("Qwen3-VL", "9658872"), "conan": ("Conan", "b4805ae"),
         "longvt": ("LongVT", "08d755b9"), "videozoomer": ("VideoZoomer", "5638153"),
         "video-r1": ("Video-R1", "of 2026-11-25"), "videorft": ("VideoRFT", "of 2026-11-25"),
         "time-r1": ("Time-R1", "7f2b594"), "videochat-r1": ("VideoChat-R1", "of 2026-11-25")}
# Places of the publishers' texts, as --prompt-file takes them; of the others they are cut out of a
# request.
R1 = tuple(f"src/eval_bench.py:{name}" for name in
           ("QUESTION_TEMPLATE", "TYPE_TEMPLATE[multiple choice]", "TYPE_TEMPLATE[free-form]"))
TEXTS = {"video-r1": R1, "videorft": R1,
         "videochat-r1": ("src_eval/eval_prompts.py:QA_THINK",
                          "src_eval/eval_prompts.py:GROUND_TEMPLATE_THINK"),
         "time-r1": ("src/vllm_inference/data/config.py:DEFAULT_MCQ_PROMPT[r1]",
                     "src/vllm_inference/data/config.py:DEFAULT_TG_PROMPT[r1]"),
         "conan": tuple(f"Conan-Eval/prompt_temp.py:Prompt_temp_{part}_{kind}"
                        for kind in ("mc", "gen") for part in ("init", "round", "final")),
         "longvt": ("examples/eval/single_inference.py:TOOL_PROMPT",)}
# Fields of a request that depend on the server or on our client alone.
APART = ("model", "messages", "seed", "stream")

# What may differ: a regular expression on lines, and the first words of its departure.
RAW = (r"(?<=<)data:\S+ |quality \w+ ", "frames are JPEGs of quality 90")
TIMED = (r"^<\d+\.\d seconds>$", "each frame is an image after its time")
REPLIES = (r"^(The frames of |Cropped |continue your |Go on |Think about |Please analyze |Error: |"
           r"error: |ERROR |Do not | Do not ).*$|^$", "the answers to calls are in our words")
PICTURES = r"^<.* frame \d+ .*>$"
R1_DIFFERS = (TIMED, (r"temperature (0\.1, top_p 0\.001|0)$", "greedy here"),
              (PICTURES, "frames and pixels are those of their README"))
DECLARED = {
    "qwen3-vl": (TIMED, RAW), "videochat-r1": (TIMED, RAW), "time-r1": (TIMED, RAW),
    "video-r1": R1_DIFFERS, "videorft": R1_DIFFERS,
    "conan": ((PICTURES + r"|^\d\d:\d\d:\d\d$", "frames lie at the centres of equal segments"),),
    "longvt": (RAW, REPLIES, (r'"description": "[^"]*",? ?', "the description of the tool"),
               (r'tool_choice "\w+"', "calls are read from the text by our parser"),
               (r"max_tokens (4096|49152)", "49,152 new tokens")),
    "videozoomer": (RAW, (r"\d+x\d+ ", "sides of frames are multiples of 32"), REPLIES,
                    (r"^</tool_response>$", REPLIES[1]))}
# Flags of the authors' server that change an answer, but for the length of its context.
SERVER = ('--dtype bfloat16 --max-model-len {context} '
          '--limit-mm-per-prompt {{"video":1,"image":1024}}')


@dataclass
class Case:
    """One made-up question, and what the model says about it, turn by turn."""

    name: str
    split: str
    row: dict  # as the benchmark publishes it
    said: list
    film: str = "small"  # one of FILMS
    spoken: list = None  # lines of subtitles
    frames: int = 0  # of the overview, to save time; 0 = as the publisher's flags say


# name -> frames, frames a second, height, width
FILMS = {"small": (200, 2, 96, 128), "wide": (80, 1, 720, 1280), "tall": (300, 30, 640, 360),
         "short": (40, 25, 96, 128), "long": (200, 1, 96, 128), "700 s": (700, 1, 96, 128)}
# split -> file of rows; folder of subtitles
FILES = {"videomme": "test", "videomme_wsub": "test", "longvideobench": "lvb_val",
         "lvbench": "train-0", "mlvu": "test-0", "mmvu": "validation", "charades": "test-0"}


def write_video(path, frames, rate, height, width):
    """An mp4 whose frames show their numbers."""
    with av.open(path, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"g": "50"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(child.marked(number, height, width), "rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


# ------------------------------------------------------------------------------------------------
# The cases


def crop(start=None, end=None, name="crop_video", **more):
    """A call as most models write it."""
    window = {"video_path": "v.mp4", "start_time": start, "end_time": end, **more}
    given = {key: value for key, value in window.items() if value is not None}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def turns():
    """name -> text of a turn: calls of every form, good and bad."""
    return {
        "one window": f"<think>Look.</think>{crop(10, 14.5)}",
        "windows beside an answer": f"{crop(3, 5)} and {crop(90, 130)}<answer>A</answer>",
        "a call inside a thought": f"<think>I might try {crop(7, 9)}</think>B",
        "a call that is not closed": crop(7, 9).removesuffix("</tool_call>"),
        "broken JSON": '<tool_call>{"name": "crop_video", "arguments": {start: 3}}</tool_call>C',
        "another tool": crop(20, 24, name="search_web"),
        "no end time": crop(30),
        "no times": crop(),
        "a reversed window": crop(40, 38),
        "a window behind the end": crop(150, 160),
        "a window before the start": crop(-8, 4),
        "an instant": crop(12, 12) + crop(12.1, 12.2),
        "times as text": crop("12.5", "0:20") + crop("00:01:10", "1:15.5") + crop("soon", None),
        "other names": crop(start=None, end=None, start_seconds=2) + '<tool_call>{"name": "x", '
        '"arguments": {"start": 2, "end": 8.4}}</tool_call>',
        "true, null, a list": crop(True, 6) + '<tool_call>{"arguments": {"start_time": null, '
        '"end_time": [3]}}</tool_call>',
        "seven windows": "".join(crop(n, n + 3) for n in range(7)),
        "the whole video": crop(0, 100) + crop(0, 1e9),
        "as code": "<tool_code>crop_video(start_time=5.0, end_time='9')</tool_code><tool_code>"
        "print(1)</tool_code><tool_code>crop_video(5, 9)</tool_code>" + crop(1, 2),
        "arguments as text": '<tool_call>{"name": "crop_video", "arguments": "{}"}</tool_call>',
        "a list of calls": '<tool_call>[{"name": "crop_video"}]</tool_call>',
        "no text": "",
        "an answer": "<think>x</think><answer>B</answer>"}


def published(split, options=4, **more):
    """A made-up row of a benchmark, as its publisher ships it."""
    texts = ["a red kite", "a blue {kite}", "no kite: \"none\"", "two kites", "a kite\\line"]
    texts, question = texts[:options], "Which kite flies over the harbour?"
    inline = "\n".join([question, *(f"({a}) {text}" for a, text in zip("ABCDE", texts))])
    row = {"question": question, "answer": "B"}
    if split.startswith("videomme"):
        row.update(question_id="x", videoID="made-up", duration="short", domain="d",
                   sub_category="s", task_type="t",
                   options=[f"{a}. {text}" for a, text in zip("ABCDE", texts)])
    elif split == "longvideobench":
        row.update({f"option{n}": [*texts, *["N/A"] * 5][n] for n in range(5)}, id="x",
                   video_path="made-up.mp4", correct_choice=1)
    elif split == "lvbench":
        row.update(uid="x", key="made-up", type="t", video_path="made-up.mp4", question=inline,
                   question_type=[])
    elif split == "mlvu":
        row.update(video_name="made-up.mp4", question=inline, candidates=texts, question_id="x",
                   task_type="count")
    elif split == "mmvu":
        row.update(id="x", question_type="multiple-choice" if options else "open-ended",
                   choices=dict(zip("ABCDE", [*texts, *[""] * 5])),
                   video="https://x/resolve/main/videos/Art/made-up.mp4")
    else:
        row = {"video": "made-up.mp4", "caption": "a kite flies up.", "timestamp": [8.0, 16.0]}
    return {**row, **more}


def case(split, said, film="small", name=None, spoken=None, frames=0, **row):
    return Case(name or split, split, published(split, **row), said, film, spoken, frames)


def paper_cases(calls):
    """The cases of the paper's driver. calls: whether the model may make some."""
    once = [crop(10, 20)] if calls else ["B"]
    found = [case(split, once) for split in FILES]
    found += [
        case("videomme_wsub", once, name="subtitles",
             spoken=["A kite.", "A kite.", "<i>It</i> flies  away."]),
        case("longvideobench", ["B"], name="two options", options=2),
        case("longvideobench", ["B"], name="five options", options=5),
        case("mmvu", once, name="an open question", options=0, answer="a kite"),
        case("mmvu", ["B"], name="white space", question=" Which kite? \n",
             choices={"A": "a red kite ", "B": " blue", "C": "", "D": "", "E": ""}),
        case("videomme", ["B"], name="statements", question="Which?\nA. It flies\nB. It sinks"),
        case("videomme", ["B"], name="a question about a path", question="Which video path is it?"),
        case("mlvu", once, "wide", "a wide video"), case("charades", once, "wide", "a wide film"),
        case("mlvu", [crop(2, 4), crop(0, 10)] if calls else ["B"], "tall", "a tall video"),
        case("charades", once, "tall", "a tall film"),
        case("lvbench", [crop(0.2, 0.9)], "short", "fewer than 64 frames"),
        case("videomme", [crop(100, 400), crop(650, 699), crop(399.5, 699.9)], "700 s",
             "a video of 700 s and a window of 300 s"),
        case("charades", once, "700 s", "a film of 700 s")]
    if calls:
        found += [case("longvideobench", [text, "B"], name=f"a turn: {name}", frames=4,
                       question=f"What? {name}") for name, text in turns().items()]
        found.append(case("videomme", [crop(n, n + 2) for n in range(5)], name="four rounds"))
    return found


def turns_of(protocol):
    """name -> turns of an agent of another publisher, in its own form of calls."""
    cut = functools.partial(crop, video_path="made-up.mp4")
    zoom = '<think>x</think><video_zoom>{"segment": [%s, %s], "fps": %s}</video_zoom>'
    clip = "<score>3</score><think>x</think><clip>%s</clip><answer></answer>"
    return {
        "longvt": {"one window": ["<think>x</think>" + cut(10, 14)],
                   "two windows": [cut(3, 5) + "\n" + cut(90, 94)],
                   "a window that ends behind the end": [cut(90, 130)],
                   "a window behind the end": [cut(150, 160)], "six rounds": [cut(1, 9)] * 7},
        "videozoomer": {"one window": [zoom % (10, 14, 1)], "too many frames": [zoom % (0, 50, 1)],
                        "five rounds": [zoom % (2, 8, 2)] * 6, "no JSON": [zoom % ("a", "b", "c")],
                        "past the end": [zoom % (94, 106, 1)]},
        "conan": {"a clip": [clip % "00:00:05-00:00:10"],
                  "two clips": [clip % "00:00:05-00:00:10, 00:01:05-00:01:20"],
                  "four rounds": [clip % "00:00:20-00:00:40"] * 4,
                  "a reversed clip": [clip % "00:00:10-00:00:05"]}}.get(protocol, {})


def cases(protocol):
    """Cases of a protocol."""
    if protocol.startswith("paper"):
        return paper_cases(calls=protocol in ("paper", "paper-general"))
    splits = {"conan": ["videomme", "longvideobench", "lvbench", "mlvu"],
              "videochat-r1": ["videomme", "charades"], "time-r1": ["videomme", "charades"]}
    found = [case(split, ["B"]) for split in splits.get(protocol, ["videomme"])]
    if protocol in ("video-r1", "videorft"):
        found.append(case("mmvu", ["B"], name="an open question", options=0))
    found += [case("videomme", ["B"], film, film) for film in ("wide", "tall", "700 s")]
    for name, said in turns_of(protocol).items():
        found.append(case("videomme", [*said, "B"], name=f"a turn: {name}"))
    # Bounds of pixels, and of frames. The first turn asks for 1 fps, which all films have.
    for said in [*turns_of(protocol).values()][:1]:
        found += [case("videomme", [*said, "B"], f, f"a window, {f}") for f in ("wide", "long")]
    return found


# ------------------------------------------------------------------------------------------------
# Both sides


@dataclass
class Listener:
    """An engine that keeps the bodies that an endpoint would get and answers from a script."""

    wire: endpoint.OpenAIEngine
    script: list
    bodies: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    max_seqs: int = 1

    def submit(self, request):
        self.waiting.append(request.id)
        # A copy, because the messages of an episode go on.
        self.bodies.append(json.loads(json.dumps(self.wire.body(request))))

    def poll(self):
        said = self.script[min(len(self.bodies), len(self.script)) - 1]
        done, self.waiting = [Completion(name, text=said, ended=True) for name in self.waiting], []
        return done


class Films:
    """The made-up videos of a session, each written once."""

    def __init__(self, folder):
        self.folder = str(folder)

    def path(self, name):
        path = os.path.join(self.folder, name, "made-up.mp4")
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_video(path, *FILMS[name])
        return path


def task_of(some, films, root):
    """Case -> its task, as our reader makes it of the published row below `root`."""
    split = benchmarks.splits()[some.split]
    place = {"mmvu": "videos/Art", "longvideobench": "videos", "charades": "Charades_v1_480",
             "videomme": "data", "videomme_wsub": "data"}.get(some.split, "")
    os.makedirs(os.path.join(root, place), exist_ok=True)
    os.symlink(films.path(some.film), os.path.join(root, place, "made-up.mp4"))
    with open(os.path.join(root, FILES[some.split] + ".jsonl"), "w", encoding="utf-8") as file:
        file.write(json.dumps(some.row) + "\n")
    if some.spoken:
        os.makedirs(os.path.join(root, split.subtitles[0]))
        with open(os.path.join(root, split.subtitles[0], "made-up.srt"), "w") as file:
            file.write(subtitles(some.spoken))
    (task,), _ = benchmarks.read_split(some.split, root)
    return task


def subtitles(spoken):
    return "\n".join(f"{n}\n00:00:0{n},000 --> 00:00:0{n + 1},000\n{line}\n"
                     for n, line in enumerate(spoken, 1))


def ours(args, protocol, some, task, root):
    """-> (bodies of the requests of an episode, Episode)."""
    flags = argparse.Namespace(**{**vars(args), "video_root": root, "tools": True})
    flags.subtitles = "full" if some.spoken else "none"
    agent, source = rollout.agent_settings(flags, None)
    agent.tools = args.tools == ["on"]
    wire = endpoint.OpenAIEngine("http://none", "none", jpeg=protocol.jpeg,
                                 sampling=endpoint.sampling_settings(args),
                                 prefill=args.think_prefix or bool(protocol.prefill))
    engine = Listener(wire, some.said)
    sampler = rollout.RolloutWorker(engine, None, systems.source_of(source, args), agent)
    (episode,) = protocol_loop.run(sampler, [task], protocol, some.frames or args.frames[0])
    wire.close()
    return engine.bodies, episode


def theirs(protocol, checkout, some, tasks, films):
    """Cases and their tasks -> what the publisher's code sends for each."""
    items = [{"bench": one.split, "row": one.row, "said": one.said, "video": films.path(one.film),
              "shape": FILMS[one.film], "task": task, "asked": fill_template(QUESTION, task),
              "frames": one.frames, "files": {"videomme/subtitle/made-up.srt":
                                              subtitles(one.spoken)} if one.spoken else {}}
             for one, task in zip(some, tasks)]
    return paper_texts.run_driver(checkout, protocol, items, os.path.join(HERE, "child.py"),
                                  [EVALUATION])


def made_protocol(args, checkout, films):
    """-> our Protocol with the publisher's own texts."""
    name = args.protocol
    if name.startswith("paper"):
        args.texts_of = checkout
    elif name in TEXTS:
        args.prompt_file = [os.path.join(checkout, place) for place in TEXTS[name]]
    else:  # cut out of a request for a row whose data are the places of the template
        row = published("videomme", question="{question}", options=2)
        row["options"] = ["A. {a}", "B. {b}"]
        some = Case("", "videomme", row, ["B"])
        task = {"question": "{question}", "options": ["{a}", "{b}"], "type": "mcq", "video": "v"}
        (sent,) = theirs(name, checkout, [some], [task], films)
        content = sent["requests"][0]["messages"][0 if name == "videozoomer" else -1]["content"]
        text = content[0 if name == "videozoomer" else -1]["text"]
        path = os.path.join(films.folder, f"{name}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("A. {a}\nB. {b}", "{options}"))
        args.prompt_file = [path]
    return systems.make_protocol(args)[0]


def compared(args, some, sent, bodies, episode):
    """-> (lines of theirs, lines of ours) of a case."""
    both = [lines_of(sent.get("requests", []), sent.get("pictures", ())), lines_of(bodies)]
    failed = "error" in sent or "error" in sent.get("result", {})
    both[0].append("no answer" if failed else "an answer")
    final = systems.all_systems()[args.protocol].final(episode.turns, False)
    both[1].append("no answer" if failed and final is None else "an answer")
    if episode.status != "ok":
        both[1].append(f"our own episode failed: {episode.error}")
    if "server" in sent:
        both[0] += server_lines(sent["server"])
        both[1] += server_lines(SERVER.format(context=args.max_model_len).split())
    return both


# ------------------------------------------------------------------------------------------------
# Requests -> lines of text


def lines_of(requests, pictures=()):
    """Requests of either side -> lines that hold all that is compared. pictures: data URLs, which
    stand in the requests by their numbers."""
    lines = []
    for number, request in enumerate(requests, 1):
        more = {name: value for name, value in request.items() if name not in APART}
        # 0 and 0.0 are one temperature.
        lines.append(f"request {number}: " + ", ".join(
            f"{name} {float(value):g}" if isinstance(value, (int, float)) else
            f"{name} {json.dumps(value, sort_keys=True)}" for name, value in sorted(more.items())))
        if number > 1:  # the first messages stand above
            before = len(requests[number - 2]["messages"])
            same = request["messages"][:before] == requests[number - 2]["messages"]
            lines.append("  all messages before" if same else "  other messages than before")
        new = request["messages"][before if number > 1 and same else 0 :]
        for message in new:
            lines.append(f"[{message['role']}]")
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                lines += shown_part(part, pictures)
    return lines


def shown_part(part, pictures):
    """A part of a message -> lines."""
    if part.get("type", "text") == "text":
        return part["text"].split("\n")
    url = part.get(part["type"], {})
    url = url["url"] if isinstance(url, dict) else str(url)
    if url.startswith("picture:"):
        url = pictures[int(url.partition(":")[2])]
    if part["type"] != "image_url" or not url.startswith("data:"):
        return [f"<{part['type']} {os.path.basename(url)}>"]  # each side has a folder of its own
    head, _, data = url.partition(",")
    return [f"<{head} {described(base64.b64decode(data))}>"]


@functools.lru_cache(maxsize=1000)
def described(data):
    """Bytes of an image -> size, quality, number of the frame, order of the channels."""
    from PIL import Image, JpegImagePlugin

    image = Image.open(io.BytesIO(data))
    chroma = JpegImagePlugin.get_sampling(image) if image.format == "JPEG" else 2
    pixels = np.asarray(image.convert("RGB"))
    tables = json.dumps(getattr(image, "quantization", None), sort_keys=True)
    means = pixels.reshape(-1, 3).mean(0)
    order = "rgb" if means[0] > means[1] > means[2] else "channels in another order"
    return (f"{image.width}x{image.height} quality {qualities().get(tables, 'unknown')} frame "
            f"{child.number_of(pixels)} {order}" + f", chroma {chroma}" * (chroma in (0, 1)))


@functools.cache
def qualities():
    """Quantization tables of a JPEG, as text -> its quality."""
    from PIL import Image

    blank, found = np.zeros((8, 8, 3), np.uint8), {}
    for quality in range(1, 101):
        image = Image.open(io.BytesIO(endpoint.jpeg_bytes(blank, quality)))
        found.setdefault(json.dumps(image.quantization, sort_keys=True), quality)
    return found


def server_lines(words):
    """The command of a server -> its flags that change an answer."""
    apart = ("--model", "--port", "--gpu-memory-utilization", "--max-num-batched-tokens",
             "--allowed-local-media-path", "--trust-remote-code")
    flags = re.findall(r"(--\S+)(?: ([^-\s]\S*))?", " ".join(words))
    return sorted(f"{name} {value}" for name, value in flags if name not in apart)


def covered(theirs, mine, declared):
    """Lines of both sides -> (the declared differences without which they would differ, or None if
    they differ all the same; what is left of both sides). declared: (regular expression, text):
    what it matches does not count."""
    def left(some):
        sides = theirs, mine
        for pattern, _ in some:  # a line that it takes whole is gone
            sides = [[cut for line in side if (cut := re.sub(pattern, "", line))
                      or not re.search(pattern, line)] for side in sides]
        return sides

    if theirs == mine:
        return [], (theirs, mine)
    one, other = left(declared)
    if one != other:
        return None, (one, other)
    needed = [left([*declared[:n], *declared[n + 1 :]]) for n in range(len(declared))]
    used = [text for (_, text), (a, b) in zip(declared, needed) if a != b]
    return list(dict.fromkeys(used or [text for _, text in declared])), (one, other)
