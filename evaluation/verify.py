"""
evaluation/verify.py: compares the requests of a protocol with those of its publisher's own code.

eval.py --protocol X --verify CHECKOUT asks both for the same made-up tasks, on made-up videos whose
frames show their numbers, with a model that says what a script says. Their side is recorded from
their own functions, run in a child process (evaluation/publishers.py); ours are the bodies that an
endpoint would get, with the texts of the same checkout. Whole requests are compared: texts and
roles, sampling, number, size, JPEG tables and numbers of frames, executed calls and their answers.

A difference that System.declared covers is a footnote. Any other is printed as UNDECLARED, and the
exit code is 1. What cannot be compared is listed at the end, with a count.

Reads the checkout, through the child. Writes no file that stays.
"""

import argparse
import base64
import difflib
import functools
import hashlib
import io
import json
import os
import re
import tempfile
from dataclasses import dataclass, field

import numpy as np

import launch
import rollout
from engine import Completion
from evaluation import checkouts, endpoint, episodes, readers, systems
from evaluation.episodes import QUESTION, filled

# What was read when a protocol was written: protocol -> (snapshot, digest of the texts, digest of
# all requests). The second digest sees what a declared difference passes over.
READ = {"paper": ("cf55249", "b28bba5a86b9686a", None),
        "paper-general": ("cf55249", "7e44984a222458b1", None),
        "paper-direct": ("cf55249", "761e478eedf60529", None),
        "paper-reasoning": ("cf55249", "4d20a97d6539fc55", None),
        "qwen3-vl": ("9658872", "b2a52017bad7b085", "69dc7b8eef9a725a"),
        "conan": ("b4805ae", "363df4f59221b2d7", "4e335535fbb0243f"),
        "longvt": ("08d755b9", "1a01c706cdb83f2e", "ef797b0e9c5ed368"),
        "videozoomer": ("5638153", "19e73f1febce4a22", "2050154a8f1b4a17"),
        "video-r1": ("of 2026-11-25", "299ce12cb8d47e89", "81988068e871ab87"),
        "videorft": ("of 2026-11-25", "299ce12cb8d47e89", "5da02dd3ba9ce107"),
        "time-r1": ("7f2b594", "9405798c9eb72302", "ca071536a1f08da3"),
        "videochat-r1": ("of 2026-11-25", "133e85539f669383", "65b353b521778e59")}
# Fields of a request that depend on the server or on our client alone.
APART = ("model", "messages", "seed", "stream")


@dataclass
class Case:
    """One made-up question, and what the model says about it, turn by turn."""

    name: str
    task: dict
    said: list
    film: str = "small"  # one of FILMS
    spoken: list = None  # lines of subtitles
    frames: int = 0  # of the overview, to save time; 0 = as the publisher's flags say


# name -> frames, frames a second, height, width
FILMS = {"small": (200, 2, 96, 128), "wide": (80, 1, 720, 1280), "tall": (300, 30, 640, 360),
         "short": (40, 25, 96, 128), "long": (200, 1, 96, 128)}

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
        "an answer": "<think>x</think><answer>B</answer>",
    }


def question(split, options=4, **more):
    """A made-up task of a benchmark."""
    texts = ["a red kite", "a blue {kite}", "no kite: \"none\"", "two kites", "a kite\\line"]
    task = {"id": split, "split": split, "video": "made-up.mp4", "type": "mcq", "answer": "B",
            "question": "Which kite flies over the harbour?", "options": texts[:options] or None,
            "tags": {}}
    if split in ("mlvu", "lvbench"):
        lines = [f"({letter}) {text}" for letter, text in zip("ABCDE", task["options"])]
        task["published"] = "\n".join([task["question"], *lines])
    if split == "charades":
        task.update(type="grounding", options=None, answer=[8.0, 16.0], event="a kite flies up.")
    return {**task, **more}


def paper_cases(calls):
    """The cases of the paper's driver. calls: whether the model may make some."""
    once = [crop(10, 20)] if calls else ["B"]
    open_one = question("mmvu", 0, type="open", answer="a kite",
                        tags={"kind": "open-ended", "subject": "Art"})
    found = [Case(split, question(split), once) for split in checkouts.SPLITS]
    found += [
        Case("videomme_wsub, with subtitles", question("videomme_wsub"), once,
             spoken=["A kite.", "A kite.", "<i>It</i> flies  away."]),
        Case("longvideobench, two options", question("longvideobench", 2), ["B"]),
        Case("longvideobench, five options", question("longvideobench", 5), ["B"]),
        Case("mmvu, an open question", open_one, once),
        Case("a question about a path", question("videomme", question="Which video path is it?"),
             ["B"]),
        Case("a wide video", question("mlvu"), once, "wide"),
        Case("a wide video, charades", question("charades"), once, "wide"),
        Case("a tall video", question("mlvu"), [crop(2, 4), crop(0, 10)] if calls else ["B"],
             "tall"),
        Case("a tall video, charades", question("charades"), once, "tall"),
        Case("fewer than 64 frames", question("lvbench"), [crop(0.2, 0.9)], "short")]
    if calls:
        found += [Case(f"a turn: {name}", question("longvideobench", question=f"What? {name}"),
                       [text, "B"], frames=4) for name, text in turns().items()]
        found.append(Case("four rounds", question("videomme"), [crop(n, n + 2) for n in range(5)]))
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
    if not protocol.startswith("paper"):
        splits = ["videomme"]
        if protocol == "conan":
            splits += ["longvideobench", "lvbench", "mlvu"]
        if protocol in ("videochat-r1", "time-r1"):
            splits += ["charades"]
        found = [Case(split, question(split), ["B"]) for split in splits]
        if protocol in ("video-r1", "videorft"):
            found.append(Case("an open question", question(
                "mmvu", 0, type="open", tags={"kind": "open-ended"}), ["B"]))
        found += [Case(film, question("videomme"), ["B"], film) for film in ("wide", "tall")]
        found += [Case(f"a turn: {name}", question("videomme"), [*said, "B"])
                  for name, said in turns_of(protocol).items()]
        # Bounds of pixels, and of frames. The first turn asks for 1 fps, which all films have.
        for said in [*turns_of(protocol).values()][:1]:
            found += [Case(f"a window, {film}", question("videomme"), [*said, "B"], film)
                      for film in ("wide", "long")]
        return found
    return paper_cases(calls=protocol in ("paper", "paper-general"))


# ------------------------------------------------------------------------------------------------
# Our side


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
        done = [Completion(name, text=said, ended=True) for name in self.waiting]
        self.waiting = []
        return done


def ours(args, protocol, case, folder):
    """-> (bodies of the requests of an episode, Episode). folder: of its video and subtitles."""
    flags = argparse.Namespace(**{**vars(args), "video_root": folder, "tools": True})
    flags.subtitles = "full" if case.spoken else "none"
    agent, source = rollout.agent_settings(flags, None)
    agent.tools = args.tools == ["on"]
    task = {**case.task, "subtitles": "lines.srt" if case.spoken else None}
    wire = endpoint.OpenAIEngine("http://none", "none", jpeg=protocol.jpeg,
                                 sampling=endpoint.sampling_settings(args),
                                 prefill=args.think_prefix or bool(protocol.prefill))
    engine = Listener(wire, case.said)
    sampler = rollout.Sampler(engine, None, systems.source_of(source, args), agent)
    (episode,) = episodes.run(sampler, [task], protocol, case.frames or args.frames[0])
    wire.close()
    return engine.bodies, episode


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
        return [f"<{part['type']} {url}>"]
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
            f"{readers.number_of(pixels)} {order}" + f", chroma {chroma}" * (chroma in (0, 1)))


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


# ------------------------------------------------------------------------------------------------
# The report


def not_compared(args, absent):
    """What the proof does not see, a line each."""
    found = [
        "how an answer is read and scored (eval.py --rescore --grader compares that)",
        "the name of the model, a seed, retries and time-outs",
        "where the publisher's code looks for rows and videos, and how it downloads them",
        "what the server does with an image, a video or a chat: decoding, resizing, template",
        "pixels of frames beyond their number, size, JPEG tables and order of channels",
        "files whose times are uneven, turned or damaged: the videos here are plain"]
    if not args.protocol.startswith("paper"):
        found += ["the model, the chat template and the reader of video files: stand-ins of ours",
                  "splits other than those above"]
    shown = systems.protocols()[args.protocol]
    found += [f"declared, but in no case above: {text}" for text in shown.departures
              if text not in [text for _, text in shown.declared]]
    found += [f"{name}: not installed here" for name in absent]
    return found


def verify(args, root):
    """Prints the comparison of --protocol with a checkout -> exit code: 1 if a difference is not
    declared, else 0. Raises UserError if the checkout is not as expected."""
    name = args.protocol
    if name not in checkouts.KNOWN:
        raise launch.UserError(f"--verify: no code of the publisher of {name} is known; there is "
                               f"some of {', '.join(checkouts.KNOWN)}")
    if not os.path.isdir(root):
        raise launch.UserError(f"--verify {root}: no such folder")
    args = argparse.Namespace(**{**vars(args), "texts_of": root, "engine": "openai"})
    protocol, digest = systems.make_protocol(args)
    system, wrong, notes = systems.protocols()[name], 0, []
    snapshot, known, all_known = READ[name]
    print(f"{name}, texts of the checkout {digest}")
    if digest != known:
        wrong += 1
        print(f"UNDECLARED  the texts: other words than those of snapshot {snapshot}, which were "
              "read")
    with tempfile.TemporaryDirectory() as folder:
        some, items = cases(name), []
        shapes = {}
        for film in {case.film for case in some}:
            os.makedirs(os.path.join(folder, film), exist_ok=True)
            shapes[film] = checkouts.write_video(
                os.path.join(folder, film, "made-up.mp4"), *FILMS[film])
        for case in some:
            path = os.path.join(folder, case.film, "made-up.mp4")
            user = filled(QUESTION, case.task)
            item = checkouts.item_of(case.task, case.said, path, shapes[case.film], case.spoken,
                                     user)
            items.append({**item, "frames": case.frames})
        sent, absent = checkouts.asked(name, root, items)
        frames = requests = 0
        seen = hashlib.sha256()
        for case, item, theirs in zip(some, items, sent):
            for text in item["files"].values():  # of subtitles
                with open(os.path.join(folder, case.film, "lines.srt"), "w") as file:
                    file.write(text)
            bodies, episode = ours(args, protocol, case, os.path.join(folder, case.film))
            both = [lines_of(theirs["requests"], theirs["pictures"]), lines_of(bodies)]
            seen.update("\n".join(both[0]).replace(folder, "").encode())
            both[0].append("no answer" if theirs["failed"] else "an answer")
            both[1].append("an answer" if system.final(episode.turns, False) is not None
                           or not theirs["failed"] else "no answer")
            if episode.status != "ok":
                both[1].append(f"our own episode failed: {episode.error}")
            if "server" in theirs and case is some[0]:
                both[0] += server_lines(theirs["server"])
                both[1] += server_lines(system.server.format(context=args.context).split())
            requests += len(bodies)
            frames += sum(line.startswith("<data:image") for line in both[1])
            used, rest = covered(*both, system.declared)
            if used is None:
                wrong += 1
            notes += [text for text in used or () if text not in notes]
            told = "".join(f" [{notes.index(text) + 1}]" for text in used or ())
            mark = "UNDECLARED" if used is None else f"declared{told}" if used else "same"
            print(f"{mark:<11} {case.name}: {len(bodies)} requests")
            if used is None:
                show_difference(*rest)
    if all_known and seen.hexdigest()[:16] != all_known:
        wrong += 1
        print(f"UNDECLARED  all requests: not those of snapshot {snapshot}, but "
              f"{seen.hexdigest()[:16]}")
    for number, text in enumerate(notes, 1):
        print(f"[{number}] {text}")
    print(f"{len(some)} cases, {requests} requests, {frames} images compared, {wrong} undeclared")
    apart = not_compared(args, absent)
    print(f"not compared ({len(apart)}):", *apart, sep="\n  ")
    return 1 if wrong else 0


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


def show_difference(theirs, mine, most=24):
    lines = list(difflib.unified_diff(theirs, mine, "theirs", "ours", lineterm="", n=1))
    for line in lines[:most]:
        print(launch.printable(f"    {line[:160]}"))
    if len(lines) > most:
        print(f"    and {len(lines) - most} lines more")
