"""
evaluation/verify.py: compares what a protocol sends with what its publisher's own code sends.

eval.py --protocol X --verify CHECKOUT builds the publisher's messages for made-up tasks from the
source in the folder CHECKOUT. The source is parsed and its formatting is evaluated by `value` and
`execute` below, which know constants, names and the methods of strings and lists: nothing is
imported and nothing is run. Our messages are the ones that an endpoint would get, with the texts of
the same checkout. Two proofs exist, and the output names the one that was used:

  built from the source                  their side was computed from their code
  the source is the one that was read    the code is the one that a person compared with ours; only
                                         a digest of its lines is kept here (`known_sources`)

Differences that System.departures states are footnotes. Any other is printed as UNDECLARED, and
the exit code is 1. A missing file or name ends with exit code 2.

Reads the checkout. Writes nothing.
"""

import ast
import difflib
import hashlib
import json
import math
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass, field
from functools import partial

import launch
import rollout
from engine import Completion
from evaluation import endpoint, systems

BUILT = "built from the source"
READ = "the source is the one that was read"
VIDEO = "<video>"  # stands for all frames of a video, where the publisher sends one video
IMAGE = "<image>"


class Unreadable(Exception):
    """A piece of source is not of the few kinds that are evaluated here."""


@dataclass
class Item:
    """One comparison. Equal texts are the same; a departure is one of System.departures."""

    name: str
    theirs: object  # text or number
    ours: object
    proof: str = BUILT
    departure: str = None
    known: object = None  # their value that the departure was written for; None: any


# ------------------------------------------------------------------------------------------------
# A few kinds of expressions and statements. No name leads to a module, so no code can reach a file.


def value(node, names):
    """Expression -> its value. names: name or dotted name -> value, function definition of the
    source, or a function of ours. Raises Unreadable."""
    go = partial(value, names=names)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            if (name := ast.unparse(node)) in names:
                return names[name]
        case ast.JoinedStr():
            return "".join(map(go, node.values))
        case ast.FormattedValue():
            shown = {115: str, 114: repr}.get(node.conversion, lambda x: x)(go(node.value))
            return format(shown, go(node.format_spec) if node.format_spec else "")
        case ast.BinOp(left=left, right=right):
            left, right = go(left), go(right)
            if isinstance(node.op, ast.Add):
                return plus(left, right)
            if isinstance(left, (int, float)) and isinstance(right, (int, float)):
                return {ast.Sub: lambda: left - right, ast.Mult: lambda: left * right,
                        ast.Div: lambda: left / right, ast.FloorDiv: lambda: left // right,
                        ast.Mod: lambda: left % right}.get(type(node.op), unknown(node))()
        case ast.List() | ast.Tuple():
            return [go(item) for item in node.elts]
        case ast.Dict():
            pairs = [(go(k), go(v)) if k else go(v) for k, v in zip(node.keys, node.values)]
            return {k: v for pair in pairs
                    for k, v in (pair.items() if isinstance(pair, dict) else [pair])}
        case ast.Subscript():
            return go(node.value)[go(node.slice)]
        case ast.Slice():
            return slice(*(go(end) if end else None for end in (node.lower, node.upper, node.step)))
        case ast.UnaryOp(op=ast.Not()):
            return not go(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            return -go(node.operand)
        case ast.BoolOp():
            every = isinstance(node.op, ast.And)
            for item in node.values:
                if bool(found := go(item)) != every:
                    break
            return found
        case ast.Compare(ops=[op], comparators=[right]):
            left, right = go(node.left), go(right)
            return {ast.Eq: lambda: left == right, ast.NotEq: lambda: left != right,
                    ast.Lt: lambda: left < right, ast.Gt: lambda: left > right,
                    ast.LtE: lambda: left <= right, ast.GtE: lambda: left >= right,
                    ast.In: lambda: left in right, ast.NotIn: lambda: left not in right,
                    ast.Is: lambda: left is right, ast.IsNot: lambda: left is not right,
                    }.get(type(op), unknown(node))()
        case ast.IfExp():
            return go(node.body) if go(node.test) else go(node.orelse)
        case (ast.ListComp(generators=[each]) | ast.GeneratorExp(generators=[each])
              | ast.DictComp(generators=[each])):
            found, pairs = [], isinstance(node, ast.DictComp)
            for item in go(each.iter):
                inner = dict(names)
                assign(each.target, item, inner)
                if all(value(test, inner) for test in each.ifs):
                    parts = [node.key, node.value] if pairs else [node.elt]
                    found.append([value(part, inner) for part in parts])
            return dict(found) if pairs else [part for part, in found]
        case ast.Call():
            return called(node, names)
    raise Unreadable(ast.unparse(node)[:80])


def plus(left, right):
    """left + right of plain data, which no loop of a checkout makes endless."""
    if not isinstance(left, (str, list, int, float)) or len(str(left)) > 1_000_000:
        raise Unreadable("a sum of something else than texts, lists and numbers, or a large one")
    return left + right


def unknown(node):
    def fail():
        raise Unreadable(ast.unparse(node)[:80])
    return fail


def called(node, names):
    """A call of a function in `names`, of a few builtins, or of a method of plain data."""
    given = [value(item, names) for item in node.args]
    named = {word.arg: value(word.value, names) for word in node.keywords}
    name = ast.unparse(node.func)
    plain = {"str": str, "len": len, "range": short_range, "enumerate": enumerate, "zip": zip,
             "chr": chr, "ord": ord, "sorted": sorted, "list": list, "isinstance": isinstance,
             "min": min, "max": max, "round": round, "int": int, "print": lambda *_, **__: None,
             "json.dumps": json.dumps}
    found = names.get(name, plain.get(name))
    if isinstance(found, ast.FunctionDef):
        return returned(found, given, named, names)
    if found is None and isinstance(node.func, ast.Attribute):
        owner = value(node.func.value, names)
        methods = {str: ("format", "join", "replace", "strip", "lower", "split",
                         "startswith"),
                   list: ("append", "extend", "insert"), dict: ("get", "items", "keys")}
        if node.func.attr in methods.get(type(owner), ()):
            found = getattr(owner, node.func.attr)
    if found is None:
        raise Unreadable(ast.unparse(node)[:80])
    return found(*given, **named)


def short_range(*bounds):
    return range(*bounds)[:10_000]


def returned(function, given, named, names):
    """What a function of the source returns."""
    taken = [item.arg for item in function.args.args]
    if taken[:1] == ["self"]:
        given = [None, *given]
    defaults = function.args.defaults
    late = {name: value(node, names) for name, node in zip(taken[::-1], defaults[::-1])}
    found = execute(function.body, {**names, **late, **dict(zip(taken, given)), **named})
    return found[0] if found else None


def assign(target, what, names):
    if isinstance(target, ast.Name):
        names[target.id] = what
    elif isinstance(target, ast.Subscript):
        value(target.value, names)[value(target.slice, names)] = what
    elif isinstance(target, ast.Tuple):
        for item, part in zip(target.elts, what, strict=True):
            assign(item, part, names)
    else:
        raise Unreadable(ast.unparse(target))


def execute(body, names):
    """Statements -> [returned value] or None; `names` changes."""
    for node in body:
        found = None
        match node:
            case ast.Assign():
                what = value(node.value, names)
                for target in node.targets:
                    assign(target, what, names)
            case ast.AnnAssign(value=ast.expr()):
                assign(node.target, value(node.value, names), names)
            case ast.AugAssign(op=ast.Add()):
                old = value(node.target, names)
                assign(node.target, plus(old, value(node.value, names)), names)
            case ast.Expr():
                value(node.value, names)
            case ast.Return():
                return [value(node.value, names) if node.value else None]
            case ast.If():
                found = execute(node.body if value(node.test, names) else node.orelse, names)
            case ast.For(orelse=[]):
                for item in value(node.iter, names):
                    assign(node.target, item, names)
                    if found := execute(node.body, names):
                        break
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass():
                pass
            case _:
                raise Unreadable(ast.unparse(node)[:80])
        if found:
            return found
    return None


# ------------------------------------------------------------------------------------------------
# A checkout


@dataclass
class Source:
    """One file of a checkout: its text, and its tree if it is Python."""

    path: str
    text: str
    tree: object = None

    def function(self, name):
        """FunctionDef of `name` or `Class.name`. Raises UserError if there is none."""
        node = self.tree
        for part in name.split("."):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found = [n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part]
            if not found:
                raise missing(self.path, f"the function {name}")
            node = found[0]
        return node

    def assigned(self, name, inside=None, names=()):
        """The value of the last assignment to `name`. names: values that it may use."""
        nodes = [n.value for n in ast.walk(inside or self.tree) if isinstance(n, ast.Assign)
                 and any(ast.unparse(target) == name for target in n.targets)]
        if not nodes:
            raise missing(self.path, f"an assignment to {name}")
        return value(nodes[-1], dict(names))

    def keyword(self, call, name):
        """The value of keyword `name` in the first call of `call`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == call:
                for word in node.keywords:
                    if word.arg == name:
                        return value(word.value, {})
        raise missing(self.path, f"{name} in a call of {call}")

    def default(self, function, name):
        """The default of an argument of a function, or of a flag (name: "--flag")."""
        if name.startswith("--"):
            for node in ast.walk(self.function(function) if function else self.tree):
                if isinstance(node, ast.Call) and node.args and name == getattr(
                        node.args[0], "value", None):
                    for word in node.keywords:
                        if word.arg == "default":
                            return value(word.value, self.constants())
            raise missing(self.path, f"a default of {name}")
        node = self.function(function)
        taken = [item.arg for item in node.args.args][::-1]
        found = dict(zip(taken, node.args.defaults[::-1]))
        if name not in found:
            raise missing(self.path, f"a default of {name} in {function}")
        return value(found[name], self.constants())

    def entry(self, function, key, names=None):
        """The value of `key` in a dictionary that a function writes out."""
        for node in ast.walk(self.function(function)):
            for name, found in zip(node.keys, node.values) if isinstance(node, ast.Dict) else ():
                if getattr(name, "value", None) == key:
                    return value(found, names or self.constants())
        raise missing(self.path, f"{key!r} in a dictionary of {function}")

    def flag(self, name):
        """The value that a shell script gives: `--name 3`, or `name=3`."""
        found = re.search(rf"(?<![\w.]){re.escape(name)}[ =]([\w.+-]+)", self.text)
        if not found:
            raise missing(self.path, name)
        return json.loads(found[1]) if re.fullmatch(r"-?[\d.]+", found[1]) else found[1]

    def constants(self):
        """Names that the top of the file sets to what can be evaluated, and its functions."""
        names = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                names[node.name] = node
            elif isinstance(node, ast.Assign):
                try:
                    execute([node], names)
                except (Unreadable, KeyError, TypeError, ValueError):
                    continue  # for example a path from the environment
        return names

    def digest(self, name):
        """Of the lines of a function, without comments and blank lines."""
        code = ast.get_source_segment(self.text, self.function(name), padded=True)
        lines = [line.rstrip() for line in textwrap.dedent(code).splitlines()]
        kept = [line for line in lines if line and not line.lstrip().startswith("#")]
        return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]


def missing(path, what):
    return launch.UserError(f"--verify: {path} does not hold {what}")


def opened(root, path):
    """File of a checkout -> Source. Raises UserError if it is missing or cannot be parsed."""
    whole = os.path.join(root, path)
    if not os.path.isfile(whole):
        raise launch.UserError(f"--verify {root}: no file {path}")
    try:
        with open(whole, encoding="utf-8-sig") as f:
            text = f.read()
        return Source(whole, text, ast.parse(text) if path.endswith(".py") else None)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise launch.UserError(f"--verify: {whole}: {error}") from None


def known_sources():
    """Digests of functions that were read, see Source.digest."""
    return {"uniform_sample_idx": "b5ff847846e8", "clips_to_frame_indices": "562a5edfc731",
            "identify_replay": "6a39a017af1d", "identify_clip": "5e3e7a8572d6",
            "process_video": "86add4c38200", "extract_video_clip": "fa6b3e1ca869",
            "prepare_tool_call_inputs_video": "32f478967805"}


def same_source(source, name, departure=None):
    """-> Item: a function is the one that was read and compared with ours by a person. departure:
    what that person found."""
    found, known = source.digest(name), known_sources().get(name)
    theirs = "as read" if found == known else f"source changed ({found}): cannot tell"
    mine = "as read" if departure is None else "not the same"
    return Item(f"{name} of {os.path.basename(source.path)}", theirs, mine, READ, departure,
                "as read")


# ------------------------------------------------------------------------------------------------
# Our side


def tasks():
    """name -> made-up task: four options, five, an open question, an event."""
    four = ["a red kite", "a blue {kite}", "no kite", "two kites"]
    base = {"video": "made-up.mp4", "answer": "B", "type": "mcq"}
    asked = "Which kite flies over the harbour?"
    return {
        "four options": {**base, "id": "4", "question": asked, "options": four},
        "five options": {**base, "id": "5", "question": asked, "options": [*four, "no sky"]},
        "open question": {**base, "id": "o", "question": asked, "options": None, "type": "open"},
        "event": {**base, "id": "e", "question": "When does a kite fly?", "options": None,
                  "event": "a kite flies", "answer": [8, 16], "type": "grounding"}}


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


def write_black(path):
    """An mp4 of 64 black frames, one a second."""
    import av
    import numpy as np

    with av.open(path, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=1)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        frame = np.zeros((32, 32, 3), np.uint8)
        for _ in range(64):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def ours(args, texts, task, *script, user=None):
    """Bodies of the requests of an episode, with the publisher's texts, two frames of a video of 64
    seconds (one frame a second), and a model that says what `script` says. user: the publisher's
    user turn, as --user-file takes it."""
    with tempfile.TemporaryDirectory() as root:
        write_black(os.path.join(root, task["video"]))
        args.video_root, modes, args.tools = root, args.tools, True
        agent, source = rollout.agent_settings(args, None)
        args.tools, agent.tools = modes, modes == ["on"]
        args.prompt_file = ["CHECKOUT"]  # some protocols ask whether the texts are their own
        protocol = systems.protocols()[args.protocol].make(texts, args)
        if user:
            protocol = systems.with_user(protocol, user, args.protocol)
        wire = endpoint.OpenAIEngine("http://none", "none", sampling=endpoint.sampling_settings(
            args), prefill=args.think_prefix or bool(protocol.prefill))
        engine = Listener(wire, [*script, "<answer>B</answer>"])
        sampler = rollout.Sampler(engine, None, systems.source_of(source, args), agent)
        (episode,) = systems.run(sampler, [task], protocol, 2)
        wire.close()
    if episode.status != "ok":
        raise launch.UserError(f"--verify: our own episode failed: {episode.error}")
    return engine.bodies


def shown(messages, joined=False):
    """Messages of either side -> text: a line for every role, images as <image>. joined: frames
    with times, and images in a row, are one <video>."""
    lines = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(picture_or_text(part) for part in content)
        if joined:
            content = re.sub(rf"((<\d+\.\d seconds>)?{IMAGE})+", VIDEO, content)
        lines += [f"[{message['role']}]", *content.split("\n")]
    return "\n".join(lines)


def picture_or_text(part):
    if part.get("type", "text") == "text" and "text" in part:
        return part["text"]
    if "video" in part or "video_url" in part:
        return VIDEO
    return IMAGE


# ------------------------------------------------------------------------------------------------
# The publishers: (root, args) -> Items


def declared(args):
    """The known differences of a protocol from its publisher's evaluation."""
    system = systems.protocols()[args.protocol]
    return system.paper if args.protocol_set == "paper" else system.departures


def noted(args, words):
    """The departure of the protocol that holds these words."""
    found = [text for text in declared(args) if words in text]
    return found[0] if found else None


def labelled(options, label="{}. {}"):
    """Options as a publisher's data file holds them."""
    return [label.format(chr(65 + n), text) for n, text in enumerate(options or [])]


def first_messages(args, texts, built, **more):
    """built: name of a task -> messages of the publisher -> Items of the first messages."""
    # Only where System.departures says so, may images after their times stand for a video.
    joined = noted(args, "theirs are one video") is not None
    return [Item(f"first message, {name}", shown(theirs),
                 shown(ours(args, texts, tasks()[name])[0]["messages"], joined), **more)
            for name, theirs in built.items()]


def frame_counts(reader, args):
    """-> Items: numbers of frames by the publisher's reader and by ours, for videos of 25 frames a
    second. Our bounds go into both, because some publishers set them by hand."""
    most, counts = args.frames[0], []
    names = reader.constants() | {"math.floor": math.floor, "math.ceil": math.ceil,
                                  "logger.warning": lambda text: None, "FPS_MAX_FRAMES": most}
    if not args.overview_fps:  # they set both bounds to one number
        names["FPS_MIN_FRAMES"] = most
    for seconds in (31.0, 4000.0, 31.7, 1.0):
        total = round(25 * seconds)
        if not args.overview_fps and total < most:
            total = most  # their reader refuses a video with too few frames
        theirs = returned(reader.function("smart_nframes"), [{}, total, 25.0], {}, names)
        counts.append((theirs, systems.paced_frames(seconds, args.overview_fps, most)
                       if args.overview_fps else most))
    return [Item("frames of 31 s, 4000 s", *(list(side[:2]) for side in zip(*counts))),
            Item("frames of 31.7 s, 1 s", *(list(side[2:]) for side in zip(*counts)),
                 departure=noted(args, "an odd number"), known=[62, 4])]


def wrapped(root, args):
    """Video-R1, VideoRFT."""
    bench = opened(root, "src/eval_bench.py")
    places = ("QUESTION_TEMPLATE", "TYPE_TEMPLATE[multiple choice]", "TYPE_TEMPLATE[free-form]")
    texts = systems.read_prompts([f"{bench.path}:{place}" for place in places])
    loops = [n for n in ast.walk(bench.tree) if isinstance(n, ast.For)
             and (ast.unparse(n.target), ast.unparse(n.iter)) == ("x", "data")]
    if not loops:
        raise missing(bench.path, "the loop `for x in data`")
    built = {}
    for name in ("four options", "five options", "open question"):
        task = tasks()[name]
        row = {"problem": task["question"], "options": labelled(task["options"]), "path": "./v",
               "problem_type": "multiple choice" if task["options"] else "free-form",
               "data_type": "video"}
        names = {place: bench.assigned(place) for place in ("QUESTION_TEMPLATE", "TYPE_TEMPLATE")}
        names |= {"data": [row], "messages": [], "os.getcwd": lambda: "/"}
        execute(loops[0:1], names)
        built[name] = names["messages"][0]
    frames = opened(root, "src/qwen-vl-utils/src/qwen_vl_utils/vision_process.py")
    reader = frames.constants()
    greedy = "greedy here, theirs samples at temperature 0.1 with top-p 0.001"
    raised = "frames and pixels are those of their README, their file holds those of training"
    fps = reader["FPS"] if reader["FPS_MIN_FRAMES"] < reader["FPS_MAX_FRAMES"] else 0.0
    return texts, [
        *first_messages(args, texts, built),
        Item("temperature", bench.keyword("SamplingParams", "temperature"), args.temperature,
             departure=greedy, known=0.1),
        Item("top-p", bench.keyword("SamplingParams", "top_p"), args.top_p, departure=greedy,
             known=0.001),
        Item("new tokens", bench.keyword("SamplingParams", "max_tokens"), args.max_new_tokens),
        Item("frames a second", fps, args.overview_fps),
        Item("frames at most", reader["FPS_MAX_FRAMES"], args.frames[0], departure=raised,
             known=16),
        Item("pixels at least", reader["VIDEO_MIN_PIXELS"], args.min_pixels, departure=raised,
             known=100352),
        Item("pixels at most", reader["VIDEO_MAX_PIXELS"], args.max_pixels, departure=raised,
             known=100352),
        *frame_counts(frames, args),
    ]


def qwen3(root, args):
    builder = opened(root, "evaluation/VideoMME/dataset_utils.py")
    script = opened(root, "evaluation/VideoMME/infer_instruct.sh")
    function = builder.function("build_videomme_prompt")
    names = builder.constants() | {"os.path.join": lambda *parts: "/".join(parts),
                                   "string.ascii_uppercase": "ABCDEFGHIJ"}

    def built(question, options):
        row = dict.fromkeys(("videoID", "duration", "domain", "sub_category", "question_id"), "x")
        row |= {"question": question, "options": options, "answer": "B"}
        return returned(function, [row, "videos"], {}, names)[0]

    # The text that a user makes of the code: their own turn with places.
    turn = built("{question}", ["A. {options}"])[-1]["content"]
    texts = [part["text"].replace("A. {options}", "{options}") for part in turn if "text" in part]
    rows = {name: tasks()[name] for name in ("four options", "five options")}
    items = first_messages(args, texts, {name: built(task["question"], labelled(task["options"]))
                                         for name, task in rows.items()})
    for what, flag, mine in (
            ("temperature", "temperature", args.temperature), ("top-p", "top-p", args.top_p),
            ("top-k", "top-k", args.top_k), ("new tokens", "max-new-tokens", args.max_new_tokens),
            ("presence penalty", "presence-penalty", args.presence_penalty),
            ("frames a second", "fps", args.overview_fps),
            ("frames at most", "max-frames", args.frames[0]),
            ("pixels at least", "min-pixels", args.min_pixels),
            ("pixels at most", "max-pixels", args.max_pixels),
            ("pixels in all", "total-pixels", args.total_pixels)):
        items.append(Item(what, script.flag(f"--{flag}"), mine))
    frames = opened(root, "qwen-vl-utils/src/qwen_vl_utils/vision_process.py")
    return texts, [*items, Item("frames at least", script.flag("--min-frames"), 1,
                                departure=noted(args, "an odd number"), known=4),
                   *frame_counts(frames, args)]


def videochat(root, args):
    prompts = opened(root, "src_eval/eval_prompts.py")
    names = ("QA_THINK", "GROUND_TEMPLATE_THINK")
    texts = systems.read_prompts([f"{prompts.path}:{name}" for name in names])
    asking = opened(root, "src_eval/evaluate_qa.py")
    timing = opened(root, "src_eval/evaluate_grounding.py")
    frames = opened(root, "src_eval/my_qwen_utils.py")
    reader = frames.constants()
    built, label = {}, option_label(root)
    for name, task in tasks().items():
        source = timing if name == "event" else asking
        if name == "open question":
            continue
        names = {alias: prompts.assigned(of) for alias, of in imported(source, "eval_prompts")}
        names |= {"item": {"problem": {"question": task["question"],
                                       "options": labelled(task["options"], label)}},
                  "ann": {"sentences": [task.get("event")]}, "sentence_idx": 0, "video_path": "v"}
        body = source.function("process_work_items")
        for step in ("example_prompt", "prompt"):
            if step == "prompt" or name != "event":
                names[step] = source.assigned(step, body, names)
        built[name] = source.assigned("messages", source.function("inference"), names)
    return texts, [
        *first_messages(args, texts, built),
        Item("new tokens", asking.default("inference", "max_new_tokens"), args.max_new_tokens),
        Item("frames a second", reader["FPS"], args.overview_fps),
        Item("frames at most", reader["FPS_MAX_FRAMES"], args.frames[0]),
        Item("pixels at least", asking.entry("inference", "min_pixels"), args.min_pixels),
        Item("pixels at most", reader["VIDEO_MAX_PIXELS"], args.max_pixels),
        Item("pixels in all", asking.entry("inference", "total_pixels"), args.total_pixels),
        *frame_counts(frames, args),
    ]


def imported(source, module):
    """-> [(alias, name)] of what a file imports from a module."""
    return [(part.asname or part.name, part.name) for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom) and node.module == module for part in node.names]


def option_label(root):
    """The label before an option in the data file of VideoChat-R1."""
    path = opened(root, "Annotations/NextGQA/nextgqa_test.json")
    option = json.loads(path.text)[0]["options"][0]
    return re.match(r"\W*A\W*", option)[0].replace("A", "{}") + "{}"


def time_r1(root, args):
    folder = "src/vllm_inference/data/"
    config, data = opened(root, folder + "config.py"), opened(root, folder + "__init__.py")
    places = ("DEFAULT_MCQ_PROMPT[r1]", "DEFAULT_TG_PROMPT[r1]")
    texts = systems.read_prompts([f"{config.path}:{place}" for place in places])
    script = opened(root, "scripts/test.sh")
    built = {}
    for name, kind, text in (("four options", "MultipleChoiceQADataset", texts[0]),
                             ("five options", "MultipleChoiceQADataset", texts[0]),
                             ("event", "TemporalGroundingDataset", texts[1])):
        task = tasks()[name]
        names = {"self.default_ele": dict, "self.prompt": text, "itm": {
            "video": "v", "question": task["question"], "options": task["options"],
            "sentence": task.get("event")}}
        names["self.sys_prompt"] = data.default("build_dataloader", "sys_prompt")
        if name != "event":
            for helper in ("_build_user_prompt", "_choice_id_to_letter"):
                names[f"self.{helper}"] = data.function(f"{kind}.{helper}")
        body = data.function(f"{kind}._preprocess").body
        until = [n for n, node in enumerate(body) if ast.unparse(node).startswith("tmp =")]
        execute(body[: until[0] if until else len(body)], names)
        # The start of the answer that is forced, by the flag that their script gives.
        start = data.function(f"vllm{kind}_nothink.__getitem__")
        begun = data.assigned("inputs['text']", start, {"inputs": {"text": ""}})
        begun = begun if re.search(r"^\s*--use_nothink", script.text, re.MULTILINE) else ""
        built[name] = [*names["messages"], {"role": "assistant", "content": begun}]
    frames = opened(root, "src/utils/vision_process.py")
    reader = frames.constants()
    runs, scores = opened(root, "src/vllm_inference/vllm_infer.py"), opened(root, "evaluate.py")
    again = [word for node in ast.walk(scores.tree) if isinstance(node, ast.Call)
             for word in node.keywords if word.arg == "answer_prompt"]
    return texts, [
        *first_messages(args, texts, built),
        Item("temperature", runs.default("vllmWrapper.generate", "temperature"), args.temperature),
        Item("new tokens", script.flag("--max_new_tokens"), args.max_new_tokens),
        Item("answers of a question with options", 1 + bool(again), 1,
             departure=noted(args, "once more")),
        Item("frames a second", reader["FPS"], args.overview_fps),
        Item("frames at most", reader["FPS_MAX_FRAMES"], args.frames[0]),
        Item("pixels at least", data.default("build_dataloader", "min_pixels"), args.min_pixels),
        Item("pixels at most", reader["VIDEO_MAX_PIXELS"], args.max_pixels),
        Item("pixels in all", data.default("build_dataloader", "total_pixels"), args.total_pixels),
        *frame_counts(frames, args),
    ]


def frame_times(text, form):
    """The times before frames of our messages, for the publisher's code to write in its way."""
    return re.findall(form + IMAGE, text)


def conan(root, args):
    """The three rounds of a question with options. Their code for open questions never fills
    {type_fix}, so it fails there; here the place gets their TYPE_TEMPLATE[free-form]."""
    folder = "Conan-Eval/"
    prompts, bench = opened(root, folder + "prompt_temp.py"), opened(root, folder + "videomme.py")
    script, reader = opened(root, folder + "run.sh"), opened(root, folder + "video_io.py")
    helpers = opened(root, folder + "utils.py")
    places = [f"Prompt_temp_{part}_{kind}" for kind in ("mc", "gen")
              for part in ("init", "round", "final")]
    words = prompts.assigned("TYPE_TEMPLATE")["free-form"]
    texts = [text.replace("{type_fix}", words)
             for text in systems.read_prompts([f"{prompts.path}:{place}" for place in places])]
    clip = "<clip>00:00:05-00:00:10</clip>"
    names = prompts.constants() | bench.constants()
    names |= {"video_io.load_video": lambda path: [[], 1.0], "video_path": "v", "max_frames": 2,
              "video_io.uniform_sample_idx": lambda *_: [], "mode": "step",
              "video_io.save_video_frames": lambda *_: []}
    stamp = reader.function("idx_to_timestamp")
    loops = [n for n in ast.walk(bench.function("evaluate_example")) if isinstance(n, ast.While)]
    if not loops:
        raise missing(bench.path, "the rounds of evaluate_example")
    items = []
    for name in ("four options", "five options"):
        task = tasks()[name]
        names["item"] = {"options": labelled(task["options"]), "question": task["question"]}
        for key in ("options", "question"):
            names[key] = bench.entry("load_data", key, names)
        mine = ours(args, texts, task, clip, clip)[-1]["messages"]
        built = []
        for step in range(3):
            names |= {"step_idx": step, "history_frames": [0] * step}
            execute([node for node in loops[0].body if isinstance(node, ast.If)][:1], names)
            times = frame_times(shown(mine[2 * step : 2 * step + 1]), r"(\d\d:\d\d:\d\d)")
            seconds = [sum(int(part) * 60**n for n, part in enumerate(text.split(":")[::-1]))
                       for text in times]
            stamps = [returned(stamp, [second, 1.0], {}, {}) for second in seconds]
            built += returned(bench.function("construct_message"),
                              [names["prompt"], [0] * len(stamps), stamps, True], {}, names)
            built.append({"role": "assistant", "content": clip})
        items.append(Item(f"three rounds, {name}", shown(built[:-1]), shown(mine)))
    clips = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Call)
             and ast.unparse(node.func) == "clips_to_frame_indices"]
    return texts, [
        *items,
        Item("temperature", script.flag("--temperature"), args.temperature),
        Item("new tokens", script.flag("--max_new_tokens"), args.max_new_tokens),
        Item("turns", script.flag("--max_steps"), args.max_turns + 1),
        Item("frames", script.flag("--max_frames"), args.frames[0]),
        Item("frames of a round", value(clips[0].args[2], {}), systems.conan_held(args)[1]),
        Item("pixels at most", reader.default("save_video_frames", "max_len"), args.max_pixels,
             departure=noted(args, "longer side"), known=448),
        same_source(reader, "uniform_sample_idx", noted(args, "at their starts")),
        same_source(helpers, "clips_to_frame_indices", noted(args, "rounded times")),
        same_source(helpers, "identify_replay"), same_source(helpers, "identify_clip"),
    ]


def videozoomer(root, args):
    script = opened(root, "scripts/eval_video.sh")
    data = opened(root, "verl/utils/dataset/multimodal_dataset.py")
    folder = "verl/workers/rollout/vllm_rollout/"
    loop = opened(root, folder + "vllm_rollout_spmd_video.py")
    tools = opened(root, folder + "function_tools.py")
    found = re.search(r"'data\.system_prompt=\"(.*?)\"'", script.text, re.DOTALL)
    if not found:
        raise missing(script.path, "data.system_prompt")
    texts = [found[1].replace('\\"', '"')]
    zoom = '<video_zoom>{"segment": [8, 10], "fps": 1}</video_zoom>'
    task, form = tasks()["four options"], r"<frame\d+_time([\d.]+)s>"
    sent = ours(args, texts, task, *[zoom] * args.max_turns)
    first, asked = sent[0]["messages"], shown(sent[0]["messages"][-1:])
    # Their user turn lies in their data. Ours goes through their code, in the place of theirs.
    row = {"data_source": "x", "problem": "<image>" + asked.rpartition(IMAGE)[2]}
    names = {"OPEN_ENDED_DATA_SOURCES": [], **data.constants()}
    built = returned(data.function("make_conversation_multimodal"), [[row], texts[0]], {}, names)
    names["prompt_with_chat_template"] = built[0]["prompt"][-1]["content"]
    names |= {"frame_time": [float(time) for time in frame_times(asked, form)]}
    names["frames"] = names["frame_time"]
    stamped = [node.value for node in ast.walk(data.tree) if isinstance(node, ast.Assign)
               and ast.unparse(node.targets[0]) == "raw_prompt" and "_time" in ast.unparse(node)]
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    built[0]["prompt"][-1]["content"] = value(stamped[0], names).replace(vision, IMAGE)
    replies = [node for node in ast.walk(loop.tree) if isinstance(node, ast.If)
               and ast.unparse(node.test) == "not isinstance(tool_call_result_, str)"]
    items, answers = [Item("first message", shown(built[0]["prompt"]), shown(first))], []
    for turn in range(args.max_turns):
        mine = shown(sent[turn + 1]["messages"][-1:])
        names = {"current_iteration": turn, "max_iterations": script.flag(
            "actor_rollout_ref.rollout.max_generation_round"), "tool_call_result_": {
                "frame_time": [float(time) for time in frame_times(mine, form)]}}
        until = [n for n, node in enumerate(replies[0].body)
                 if "next_turn_prompt_ids" in ast.unparse(node)]
        execute(replies[0].body[: until[0]], names)
        said = names["tool_call_prompt_message"].replace(vision, IMAGE)
        said = said.replace("<|im_start|>user\n", "[user]\n").partition("<|im_end|>")[0]
        items += [
            Item(f"answer to call {turn + 1}", said, mine, departure=noted(args, "answers")),
            Item(f"answer to call {turn + 1}, frames and tags", tags(said), tags(mine))]
        answers.append((said, mine))
    # The answer to the last call says that no call may follow, so it is another one.
    others = [[turn for turn in range(1, len(answers))
               if answers[turn][side] != answers[turn - 1][side]] for side in (0, 1)]
    items.append(Item("turns whose answer is another than before", *others))
    return texts, [
        *items,
        Item("stop", loop.keyword("update_sampling_params", "stop"), sent[0]["stop"][0]),
        Item("new tokens", script.flag("data.max_response_length"), args.max_new_tokens),
        Item("turns", script.flag("actor_rollout_ref.rollout.max_generation_round"),
             args.max_turns + 1),
        Item("frames a second", script.flag("data.video_fps"), args.overview_fps),
        Item("frames at most", script.flag("data.frames_upbound"), args.frames[0]),
        Item("pixels at least", script.flag("data.min_pixels"), args.min_pixels),
        Item("pixels at most", script.flag("data.max_pixels"), args.max_pixels),
        Item("frames of a call", script.flag("actor_rollout_ref.rollout.tool_call_max_frames"),
             systems.videozoomer_held(args)[1]),
        same_source(data, "process_video"),
        same_source(tools, "extract_video_clip", noted(args, "frames of a call")),
        same_source(tools, "prepare_tool_call_inputs_video"),
    ]


def tags(text):
    """Frames and tool response tags of a text, in order."""
    return " ".join(re.findall(rf"<frame[^>]*>|{IMAGE}|</?tool_response>", text))


def crop_replies(item):
    """A tool message as their chat template shows it: a user turn with response tags."""
    return [{"role": "user", "content": [{"type": "text", "text": "<tool_response>\n"}, *item,
                                         {"type": "text", "text": "\n</tool_response>"}]}]


def schema_names(tool):
    """A tool's name, and the name and type of each argument, without descriptions."""
    function = tool["function"]
    arguments = function["parameters"]["properties"].items()
    return json.dumps([function["name"], [(name, given["type"]) for name, given in arguments],
                       function["parameters"]["required"]])


def longvt(root, args):
    bench = opened(root, "lmms_eval_tasks/longvideobench/utils.py")
    timing = opened(root, "lmms_eval_tasks/charades_sta/utils.py")
    yaml = opened(root, "lmms_eval_tasks/charades_sta/charades_tool.yaml")
    short = opened(root, "lmms_eval_tasks/longvideobench/longvideobench_val_v_tool.yaml")
    single = opened(root, "examples/eval/single_inference.py")
    prompt = bench.assigned("TOOL_PROMPT")
    run = single.function("run_inference")
    around = {part: json.loads(re.search(rf"{part}: (\".*\")", yaml.text)[1])
              for part in ("pre_prompt", "post_prompt")}

    def asked(question, options, event=None):
        """Their user turn before the tool prompt."""
        row = {f"option{n}": options[n] if n < len(options) else "N/A" for n in range(5)}
        row |= {"question": question, "caption": event}
        source, name = (timing, "temporal_grounding") if event else (bench, "longvideobench")
        more = around if event else {"pre_prompt": "", "post_prompt": ""}
        names = source.constants()
        names |= {f"{name}_doc_to_visual": lambda *_: ["v"],
                  f"{name}_doc_to_visual_v": lambda *_: ["v"], "TOOL_PROMPT": "@"}
        messages = returned(source.function(f"{name}_tool_doc_to_messages"), [row, more], {}, names)
        return messages[0]["content"][-1]["text"].removesuffix(" @")

    def whole(text):
        """Their messages, with the sentence that names the video."""
        names = {"video_contents": [{"video": "v"}], "question": text, "TOOL_PROMPT": prompt,
                 "video_path": "made-up.mp4", "enable_tool": True}
        names["user_content"] = single.assigned("user_content", run, names)
        found = [n.value for n in ast.walk(run) if isinstance(n, ast.Assign)
                 and ast.unparse(n.targets[0]) == "messages"]
        return value(found[0], names)

    items = []
    call = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 4}}'
    call += "</tool_call>"
    templates = {"mcq": asked("{question}", ["{options}"]).replace("A. {options}", "{options}"),
                 "grounding": asked("", [], "{event}")}
    for name in ("four options", "five options", "event"):
        task = tasks()[name]
        sent = ours(args, [prompt], task, call, user=templates[task["type"]])
        theirs = whole(asked(task["question"], task["options"] or [], task.get("event")))
        items.append(Item(f"first message, {name}", shown(theirs),
                          shown(sent[0]["messages"], joined=True)))
    count = shown(sent[1]["messages"][-1:]).count(IMAGE)
    names = {"result_images": [{"type": "image_url"}] * count,
             "func_args": {"start_time": 2.0, "end_time": 4.0}}
    reply = crop_replies(single.assigned("tool_content", run, names))
    mine = shown(sent[1]["messages"][-1:], joined=True)
    crop, tool = "crop_video_local", single.assigned("CROP_VIDEO_TOOL")
    return [prompt, *templates.values()], [
        *items,
        Item("answer to a call", shown(reply, joined=True), mine,
             departure=noted(args, "answers")),
        Item("tool", schema_names(tool), schema_names(sent[0]["tools"][0])),
        Item("tool's description", tool["function"]["description"],
             sent[0]["tools"][0]["function"]["description"], departure=noted(args, "the descr")),
        Item("temperature", yaml.flag("temperature:"), args.temperature),
        Item("new tokens", yaml.flag("max_new_tokens:"), args.max_new_tokens),
        Item("new tokens of LongVideoBench", short.flag("max_new_tokens:"), args.max_new_tokens,
             departure=noted(args, "one limit"), known=4096),
        Item("rounds of calls", single.default("run_inference", "max_tool_rounds"), args.max_turns),
        Item("frames a second", single.default("run_inference", "fps"), args.overview_fps),
        Item("frames at most", single.default("run_inference", "max_frames"), args.frames[0]),
        Item("pixels at least", single.entry("encode_video_frames", "min_pixels"),
             args.min_pixels),
        Item("pixels at most", single.default("run_inference", "max_pixels"), args.max_pixels),
        Item("frames a second of a call", single.entry(crop, "fps"), args.sub_fps),
        Item("frames of a call", single.entry(crop, "max_frames"), args.sub_frames),
        Item("pixels of a call's frame", single.entry(crop, "max_pixels"),
             args.crop_pixels or args.max_pixels),
    ]


def pick(what, *_):
    return what


def paravt(root, args):
    """The driver of the paper's evaluation: paravt, direct and reasoning with --protocol-set
    paper."""
    driver = opened(root, "paravt/eval/driver.py")
    tools = opened(root, "paravt/eval/utils.py")
    modes = {"paravt": "agentic_general", "direct": "direct", "reasoning": "reasoning"}
    mode, calls = modes[args.protocol], args.protocol == "paravt"
    prompt = {"paravt": "GENERAL_AGENTIC_SYSTEM", "direct": "DIRECT_SYSTEM",
              "reasoning": "REASONING_SYSTEM"}[args.protocol]
    texts = systems.read_prompts([f"{driver.path}:{prompt}"])
    names = driver.constants() | {
        "os.path.basename": os.path.basename, "utils.get_frames": lambda *_, **__: [0, 0],
        "utils.pil_to_b64": lambda image: "x", "utils.parse_time_val": float,
        "prompt_mode": mode, "video_channel": "image_url", "nframes": 2, "turn": 0,
        "vpath": "videos/made-up.mp4", "sample": {}}

    def asked(question, options, event=None):
        """Their user turn, by the loader of LongVideoBench or Charades-STA."""
        row = {f"option{n}": options[n] if n < len(options) else "N/A" for n in range(5)}
        row |= {"question": question, "caption": event, "timestamp": [8, 16], "video": "v",
                "video_path": "v", "correct_choice": 1}
        loader = {**tools.constants(), "hf_load": lambda *_, **__: [row], "float": float,
                  "os.path.join": lambda *parts: "/".join(parts)}
        which = "charades" if event else "longvideobench"
        return returned(tools.function("load_samples"), [which, "data", mode], {},
                        loader)[0]["question"]

    body = [node for node in ast.walk(driver.function("eval_one")) if isinstance(node, ast.Try)]
    steps = {ast.unparse(node).split("\n")[0]: n for n, node in enumerate(body[0].body)}
    begin = [n for line, n in steps.items() if line.startswith("q_text =")]
    end = [n for line, n in steps.items() if "'user'" in line and "append" in line]
    templates = {"mcq": asked("{question}", ["{options}"]).replace("A. {options}", "{options}"),
                 "grounding": asked("", [], "{event}")}
    call = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 4}}'
    items, sent, tool = [], {}, systems.crop_schema(frames=True, path=True)[0]
    for name in ("four options", "five options", "event"):
        task = tasks()[name]
        names["sample"] = {"question": asked(task["question"], task["options"] or [],
                                             task.get("event"))}
        # Their scripts send a video for events. Its stand-in here are frames after their times.
        names["video_channel"] = "video_url" if name == "event" else "image_url"
        names["os.path.abspath"] = os.path.abspath
        execute(body[0].body[begin[0] : end[0] + 1], names)
        sent[name] = ours(args, texts, task, *[call + "</tool_call>"] * args.max_turns,
                          user=templates[task["type"]])
        theirs, mine = (shown(messages, joined=name == "event") for messages in (
            names["base_messages"], sent[name][0]["messages"]))
        # The schema in the system text is compared by itself.
        items.append(Item(f"first message, {name}", theirs.replace(names["TOOL_SCHEMA"], "SCHEMA"),
                          mine.replace(json.dumps(tool), "SCHEMA")))
    items += [
        Item("temperature", driver.keyword("create", "temperature"), args.temperature),
        Item("new tokens", driver.default(None, "--max_tokens"), args.max_new_tokens),
        Item("frames", driver.default(None, "--main_nframes"), args.frames[0])]
    if not calls:
        return [*texts, *templates.values()], items
    loop = [n for n in ast.walk(body[0]) if isinstance(n, ast.For)]
    replies = [n for n in loop if ast.unparse(n.iter) == "tcs"][0]
    force = [n for n in ast.walk(body[0]) if isinstance(n, ast.If)
             and ast.unparse(n.test) == "turn == max_turns - 1"][0]
    for name, conversation in sent.items():
        mine = [shown(conversation[turn]["messages"]) for turn in range(1, args.max_turns + 1)]
        cropped = [0] * mine[0].rpartition("[assistant]")[2].count(IMAGE)
        names |= {"tool_calls": 0, "messages": [], "utils.crop_frames": partial(pick, cropped),
                  "tcs": [{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 4}}]}
        execute([replies], names)
        items.append(Item(f"answer to a call, {name}", shown(names["messages"]),
                          shown(conversation[1]["messages"][-1:]),
                          departure=noted(args, "without times") if name == "event" else None))
        names["sample"], names["final"] = {"is_mcq": name != "event"}, ""
        execute([n for n in force.body if isinstance(n, ast.If)], names)
        items += [
            Item(f"request for an answer, {name}", names["force"],
                 conversation[-1]["messages"][-1]["content"], departure=noted(args, "the req")),
            Item(f"tokens of that answer, {name}", names["force_max"],
                 conversation[-1]["max_tokens"]),
            Item(f"requests at most, {name}", driver.default(None, "--max_turns") + 1,
                 len(conversation))]
    beyond = call.replace("2", "900").replace("4}", "910}") + "</tool_call>"
    names["utils.crop_frames"], names["messages"] = (lambda *_: []), []
    names["tcs"] = [{"name": "crop_video", "arguments": {"start_time": 900, "end_time": 910}}]
    execute([replies], names)
    failed = ours(args, texts, tasks()["four options"], beyond, user=templates["mcq"])
    return [*texts, *templates.values()], [
        *items,
        Item("tool", schema_names(json.loads(names["TOOL_SCHEMA"])), schema_names(tool)),
        Item("tool's description",
             json.loads(names["TOOL_SCHEMA"])["function"]["description"],
             tool["function"]["description"], departure=noted(args, "the descr")),
        Item("answer to a call that fails", shown(names["messages"]),
             shown(failed[1]["messages"][-1:]), departure=noted(args, "that fails")),
        Item("calls a turn", driver.default(None, "--max_parallel"), args.max_parallel),
        Item("frames a second of a call", tools.entry("crop_frames", "fps"), args.sub_fps),
        Item("frames of a call", tools.default("crop_frames", "max_frames"), args.sub_frames),
        Item("pixels of a call's frame", tools.entry("crop_frames", "max_pixels"),
             args.crop_pixels)]


def publishers():
    """Name of a protocol -> (root, args) -> (texts, Items)."""
    return {"paravt": paravt, "direct": paravt, "reasoning": paravt, "qwen3-vl": qwen3,
            "video-r1": wrapped, "videorft": wrapped, "videochat-r1": videochat,
            "time-r1": time_r1, "conan": conan, "longvt": longvt, "videozoomer": videozoomer}


# ------------------------------------------------------------------------------------------------
# The report


def verify(args, root):
    """Prints the comparison of --protocol with a checkout -> exit code: 1 if a difference is not
    declared, else 0. Raises UserError if a file or a name of the checkout is missing."""
    name = args.protocol
    if name not in publishers():
        raise launch.UserError(f"--verify: no code of the publisher of {name} is known")
    if not os.path.isdir(root):
        raise launch.UserError(f"--verify {root}: no such folder")
    paper = name in ("paravt", "direct", "reasoning")  # of the driver of the paper's evaluation
    if paper != (args.protocol_set == "paper"):
        raise launch.UserError(f"--verify: --protocol {name} is compared with --protocol-set "
                               f"{'paper' if paper else 'native'}")
    departures = declared(args)
    try:
        texts, items = publishers()[name](root, args)
    except (Unreadable, LookupError, TypeError, ValueError, AttributeError, ArithmeticError,
            RecursionError) as error:
        print(f"UNDECLARED  the source changed, cannot tell: {error!r}")
        return 1
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    print(f"{name}, texts of the checkout {digest}")
    wrong, notes = 0, []
    for item in items:
        told = f"{item.name} ({item.proof})"
        if item.theirs == item.ours:
            print(f"same        {told}" + (f": {item.ours}" if "\n" not in str(item.ours) else ""))
            continue
        known = item.departure in departures and item.known in (None, item.theirs)
        wrong += not known
        if known and item.departure not in notes:
            notes.append(item.departure)
        mark = f"declared [{notes.index(item.departure) + 1}]" if known else "UNDECLARED "
        print(f"{mark} {told}")
        theirs, mine = str(item.theirs).split("\n"), str(item.ours).split("\n")
        for line in difflib.unified_diff(theirs, mine, "theirs", "ours", lineterm="", n=1):
            print(f"    {line}")
    notes += [text for text in departures if text not in notes]
    for number, text in enumerate(notes, 1):
        print(f"[{number}] {text}")
    print(f"{len(items)} compared, {wrong} undeclared")
    return 1 if wrong else 0
