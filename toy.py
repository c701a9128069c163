"""
toy.py: writes a world so small that a video agent learns in it within minutes on two CPU cores.

The world of --world search, the default. A 64-second video, one frame a second, 32 x 32 pixels (ONE
vision token a frame): four scenes of 8 to 24 seconds, each with a border in one of four colours,
and once in each scene the inside flashes for 2 seconds in one of four others. The question names a
border, which one or two scenes have, and no time. So an agent must find its windows:
    Which colours flash while the border is blue?           ->  purple, black
An overview of any K shows all borders, although K = 4 tells little of when a scene ends. A crop of
a scene shows its flash; a crop of the whole film shows half of the flashes, and a window that
reaches into another scene may tell of a flash too many. Each task has `evidence`: the scenes asked
about, by which windows are judged. A thought first tells of the scenes, and marks those to look at:
    I saw 0 green, 14 blue look 14 to 32, 32 red, 50 blue look 50 to 64. I need a closer look.
A share of the demonstrations (--wrong) marks other scenes, so that the cold start calls in the
right form and is often wrong about the place. Where to look is left for RL to learn. With --scenes
16 a film has 128 seconds, scenes of 4 to 12, colours that return, and one to five scenes of the
border. 16 frames or more show all scenes; the demonstrations have these K alone.

The world of --world named, which bench/ablation.py uses. A film of the same size: grey noise, and 1
to 3 coloured squares, each on screen for 2 seconds within a separate 8-second slot. The question
names slots. The answer lists "time colour" pairs in order, so a colour is always looked up by a
time, in frames and in summaries alike.
    Which colours appear between 16 and 24, 40 and 48?      ->  16 red, 40 blue
An overview has K frames at the centres of K equal segments. It shows an event of 2 seconds always
at K = 64 and 32, three times in five at 16, twice in five at 8, never at 4. A crop of the slot
always shows the event. PARA-GRPO works on this contrast.

Three stages of data. `pretrain.jsonl` makes the base: every skill (calling, gathering, answering
from the overview, watching a window) at every K, with enough samples to be learned, in the style
that `--prior` names:
    strong   calls half of the time; thoughts left open or opened again, `<tool_code>` calls,
             unclosed JSON, prose, answers without tags
    tidy     calls half of the time, in the search world five times in six; everything is in the
             protocol's style: base and cold start in one, which learns fastest (`make demo`).
             Whether a sample calls does not depend on K
    turns    as tidy, but one call a turn
    need     as tidy, but the thought first says what the frames show, and the calls are for the
             slots that they do not show; no call if they show all
    half     one sample in two as in need, the other as in tidy
`sft.jsonl` is the cold start: strict style, mostly calls. A short training on that split gives the
model that the paper starts from: well-formed when greedy, and back in old habits when sampled. RL
then decides which habits stay.

The files. `init/`: a random Qwen3-VL with its tokenizer and processor; `videos/*.mp4`;
`pretrain.jsonl`, `sft.jsonl`, `sft_val.jsonl`, `rl.jsonl`, `eval.jsonl` (no two splits share a
video; questions, answers and cuts recur). The prior changes `pretrain.jsonl` alone.

The tokenizer. Byte-level BPE with Qwen's control and tag tokens, whole numbers as single tokens,
and each sentence of the fixed prompts as one token, so that the short context is spent on frames.
`<answer>` is several tokens, as in Qwen3.

Run:  python toy.py --out toy
        (about half a minute on one core; the same --seed gives the same bytes)
Then: torchrun --nproc_per_node 2 sft.py --preset toy --ckpt toy/init \\
        --data toy/pretrain.jsonl --out base
      torchrun --nproc_per_node 2 sft.py --preset toy --ckpt base --data toy/sft.jsonl \\
        --val toy/sft_val.jsonl --out sft_out
Fast: python toy.py --out toy --prior tidy, then the first of the two is all of SFT.
"""
import json
import os
import random
import re

import numpy as np

import checkpoint
import launch
import rewards
import rollout
import runs
import video


def colours():
    return {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230),
            "yellow": (235, 225, 40), "purple": (150, 40, 180), "orange": (250, 140, 20),
            "white": (245, 245, 245), "black": (10, 10, 10)}


def borders():
    """The colours of borders. Flashes have the others, so that a word means one thing."""
    return ["red", "green", "blue", "white"]


# ------------------------------------------------------------------------------------------------
# Videos


def make_timeline(rng, seconds=64, slot=8, visible=2):
    """-> list of events {"start", "end", "colour", "window": (a, b)}, ordered, one per slot, 1 to 3
    of them."""
    count = rng.randint(1, 3)
    # At most one event per slot, so that a window has one answer. Every event has another colour,
    # so that a wrong order is a wrong answer.
    slots, names = rng.sample(range(seconds // slot), count), rng.sample(list(colours()), count)
    events = []
    for s, name in zip(sorted(slots), names):
        start = rng.randrange(s * slot + 1, s * slot + slot - visible)  # never on the slot's edge
        events.append({"start": start, "end": start + visible, "colour": name,
                       "window": (s * slot, s * slot + slot)})
    return events


def film_seconds(scenes=4):
    """Seconds of a film; with more scenes than four, 8 for each."""
    return 64 if scenes <= 4 else 8 * scenes


def make_scenes(rng, count=4, flash=2):
    """-> (events of the search world, ordered; the border colour asked about). An event is one
    scene: "window" and "border" are the scene's, "start", "end" and "colour" those of its flash."""
    # Drawn freely around equal parts. Every overview of four scenes has a frame of each.
    seconds = film_seconds(count)
    part = seconds // count
    cuts = [n * part + rng.choice(range(-(part // 4), part // 4 + 1, 2)) for n in range(1, count)]
    names = [name for name in colours() if name not in borders()]
    names = rng.sample(names, count) if count <= len(names) else rng.choices(names, k=count)
    events = []
    for a, b, name in zip([0, *cuts], [*cuts, seconds], names):
        border = rng.choice([c for c in borders() if not events or c != events[-1]["border"]])
        start = rng.randrange(a + 1, b - flash)  # never on the scene's edge
        events.append({"start": start, "end": start + flash, "colour": name, "border": border,
                       "window": (a, b)})
    held = [e["border"] for e in events]
    few = max(4, min(map(held.count, held)))
    return events, rng.choice([border for border in held if held.count(border) <= few])


def draw_frames(events, noise, size=32):
    """Timeline -> uint8 [seconds, size, size, 3]. noise: numpy Generator."""
    seconds = max(64, events[-1]["window"][1])
    frames = 128 + noise.normal(0, 6, (seconds, size, size, 3))
    for event in events:
        if "border" in event:  # of a scene, grey inside but for the flash
            edge, flash = (np.subtract(colours()[event[n]], 128) for n in ("border", "colour"))
            frames[slice(*event["window"])] += edge
            frames[slice(*event["window"]), 2:-2, 2:-2] -= edge
            frames[event["start"]:event["end"], 2:-2, 2:-2] += flash
            continue
        for t in range(event["start"], event["end"]):
            # Place, size and grain vary, so that a model learns the colour and not a picture.
            y, x = size // 2 + noise.integers(-3, 4, 2)  # centre, pixels
            r = noise.integers(8, 11)  # half a side
            square = (slice(y - r, y + r + 1), slice(x - r, x + r + 1))
            grain = noise.normal(0, 6, frames[t][square].shape)
            frames[t][square] = colours()[event["colour"]] + grain
    return frames.clip(0, 255).astype(np.uint8)


def write_video(path, frames, fps=1):
    """uint8 [T, H, W, 3] -> H.264 mp4. The bytes depend on the frames alone: one thread, no wall
    clock in the file."""
    import av

    with av.open(path, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        # mbtree makes one file in 150 differ from run to run on frames this small.
        options = {"threads": "1", "crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


# ------------------------------------------------------------------------------------------------
# Samples


def seen_text(events, seen=None):
    """The start of every slot, then the colour: "16 red, 40 blue". seen: the events that were seen,
    None = all. The colour of an unseen event is the word "nothing"."""
    return ", ".join(f"{e['window'][0]} {e['colour'] if seen is None or e in seen else 'nothing'}"
                     for e in events)


def told_scenes(scenes, looks):
    """The scenes as far as some frames tell: a scene begins midway between two frames of different
    borders, and one without a frame is not told. looks: ordered indices of frames, one a second."""
    def at(t):
        return next(e for e in scenes if t < e["window"][1])

    pairs = [(a, b) for a, b in zip(looks, looks[1:]) if at(a)["border"] != at(b)["border"]]
    told = [at(t) for t in (looks[0], *(b for _, b in pairs))]
    cuts = [0, *((a + b + 1) // 2 for a, b in pairs), scenes[-1]["window"][1]]
    return [{**e, "window": window} for e, window in zip(told, zip(cuts, cuts[1:]))]


def scene_text(scenes, marked):
    """What a thought says of the scenes: "I saw 0 red, 18 blue look 18 to 30, .." for the starts
    and borders of all, and the windows of those to look at."""
    return "I saw " + ", ".join(
        f"{e['window'][0]} {e['border']}" + " look {} to {}".format(*e["window"]) * (e in marked)
        for e in scenes) + ". "


def make_task(name, events, asked=None):
    """asked: the border colour of the question, in the search world alone."""
    hits, more = [e for e in events if asked in (None, e.get("border"))], {}
    windows = ", ".join(f"{a} and {b}" for a, b in (e["window"] for e in hits))
    question, answer = f"Which colours appear between {windows}?", seen_text(hits)
    if asked:
        question = f"Which colours flash while the border is {asked}?"
        answer = ", ".join(e["colour"] for e in hits)
        more = {"scenes": events, "evidence": [list(e["window"]) for e in hits]}
    return {"id": name, "video": f"videos/{name}.mp4", "question": question, "options": None,
            "answer": answer, "type": "list", "subtitles": None,
            "category": f"{len(hits)} event{'s' if len(hits) > 1 else ''}",
            "events": hits, **more}  # for bench/frontier.py; no prompt contains them


def make_sample(name, rng, world, scenes=4):
    """-> (events to draw, the task about them)."""
    events, asked = make_scenes(rng, scenes) if world == "search" else (make_timeline(rng), None)
    return events, make_task(name, events, asked)


def call_text(a, b):
    return ('<tool_call>\n{"name": "crop_video", "arguments": '
            f'{{"start_time": {a}, "end_time": {b}}}}}\n</tool_call>')


def thought(text, rng, loose):
    """A thought with at most one random remark, so that the tokens between the tags have some
    entropy. loose: mostly left open at the end, or opened again."""
    remarks = ["Let me see.", "Hm, not sure.", "It is quick.", "Wait, look again.",
               "One more time.", "Go step by step."]
    text = " ".join([*(rng.choice(remarks) for _ in range(rng.randint(0, 1))), text])
    end = rng.choices(["\n</think>\n", "\n", "\n<think>\n"],
                      [0.3, 0.55, 0.15])[0] if loose else "\n</think>\n"
    return f"<think>\n{text}{end}"


def answer_turn(saw, rng, loose, evidence, answer):
    """Thought and answer block. saw: what the thought says was seen. loose: mostly an answer
    without tags. evidence: a sentence at the start of the thought."""
    body = f"<answer>{answer}</answer>"
    if loose:
        body = rng.choices([body, f"<answer>{answer}", answer], [0.3, 0.15, 0.55])[0]
    return thought(f"{evidence}I saw {saw}.", rng, loose) + body


def call_turn(events, rng, loose=False, evidence=""):
    """Thought and one call per window. loose: three dialects, mostly the Python-like one, sometimes
    with a sentence before the calls. evidence: a sentence at the start of the thought."""
    windows = [e["window"] for e in events]
    head = thought(f"{evidence}I need a closer look.", rng, loose)
    dialect = rng.choices(["json", "code", "open"], [0.25, 0.6, 0.15])[0] if loose else "json"
    if dialect == "code":
        calls = [f"<tool_code>\ncrop_video({a}, {b})\n</tool_code>" for a, b in windows]
    else:
        calls = [call_text(*w) if dialect == "json"
                 else call_text(*w).removesuffix("\n</tool_call>") for w in windows]
    prose = "I will look closer.\n" if loose and rng.random() < 0.3 else ""
    return head + prose + "\n".join(calls)


def shown(events, looks):
    """The events that some of these frames show. looks: indices of frames, one frame a second."""
    return [e for e in events if set(looks) & set(range(e["start"], e["end"]))]


def overview_looks(frame_budget, seconds=64):
    return video.overview_indices(np.arange(float(seconds)), float(seconds), frame_budget).tolist()


def crop_looks(window, fps=1.0):  # of a film that is long enough
    return video.crop_indices(np.arange(1024.0), 1024.0, *window, fps=fps).tolist()


def watched(window, events, fps=1.0):
    """The start of a window, then the colour, of every event that its frames show: "18 purple"."""
    seen = shown(events, crop_looks(window, fps))
    return seen_text([{**e, "window": window} for e in seen])


def summary(window, events, fps=1.0):
    """The right summary of a window: (start, end) in seconds."""
    return watched(window, events, fps) or rollout.empty_summary()


def sub_chat(name, task, window, events, fps=1.0):
    """One sub-agent's chat: prompt and summary. fps: frames per second of the window."""
    spec = {"start": float(window[0]), "end": float(window[1]), "fps": fps, "max_frames": 16}
    return {"id": name, "messages": [*rollout.sub_messages(task, spec),
                                     {"role": "assistant",
                                      "content": summary(window, events, fps)}]}


def chats(task, events, budgets, rng, loose=False, wrong=0.0, one_call=False):
    """All samples of one video: the main agent answers directly, calls and gathers, or answers
    without tools; and one sub-agent per window. budgets: {way: [K, ..]}. loose: the base's native
    style, drawn turn by turn, instead of the protocol's.

    Some summaries are empty, sometimes all of a turn, so that the model learns to use the overview
    too. An answer holds only events that frames or summaries showed, and the word "nothing" for the
    others, so every word of an answer can be learned.

    In the search world every first thought tells of the scenes, no summary is withheld, and an
    answer repeats all that the summaries tell. wrong: share of the samples that are about other
    scenes than those of the question. one_call: one call a turn.
    """
    rows, tools, searching = [], rollout.tool_schema(), "scenes" in task
    seconds = film_seconds(len(events)) if searching else 64

    def said(text):
        return {"role": "assistant", "content": text}

    # Prompts come from rollout.py as in RL, because another wording would be another task.
    ways = ("direct", "call", "need", "plain")
    samples = [(way, k) for way in ways for k in budgets.get(way, ())]
    for number, (way, k) in enumerate(samples):
        messages = rollout.main_messages(task, k, tools=way != "plain")
        looks = overview_looks(k, seconds)
        # world: as this overview tells it. meant: the events that this sample answers about.
        world = told_scenes(events, looks) if searching else events
        meant = [e for e in world if e["border"] == task["events"][0]["border"]
                 ] if searching else task["events"]
        if not meant:  # the overview missed all scenes of the question
            continue
        seen, told = shown(world, looks), []
        evidence = f"I saw {seen_text(meant, seen)}. " if way == "need" else ""
        if searching:
            if rng.random() < wrong:
                others = [e for e in world if e not in meant]
                meant = sorted(rng.sample(others, min(len(meant), len(others))),
                               key=lambda e: e["start"])
            evidence = scene_text(world, meant)
        # call: every window, whatever the frames show. need: those that they do not show, if any.
        asked = {"call": meant, "need": [e for e in meant if e not in seen]}.get(way)
        parts = [[e] for e in asked or ()] if one_call else [asked] if asked else []
        for part in parts:  # one call per window, then the summaries as tool responses
            messages.append(said(call_turn(part, rng, loose, evidence * (part is parts[0]))))
            missed = rng.choices([0.0, 0.5, 1.0], [0.7, 0.15, 0.15])[0] * (not searching)
            told += [e for e in part if rng.random() >= missed]
            messages += [{"role": "tool", "content": summary(
                e["window"], events if e in told else [])} for e in part]
        # All that the crop of a window showed, else what the overview did. So a window that is too
        # wide spoils the answer.
        saw = ", ".join((e in told and watched(e["window"], events)) or seen_text([e], seen)
                        for e in meant)
        answer = re.sub(r"\d+ ", "", saw) if searching else saw  # its question names no time
        messages.append(said(answer_turn(
            saw, rng, loose, evidence if searching and not asked else "", answer)))
        again = "b" if (way, k) in samples[:number] else ""  # need: two samples at every K
        row = {"id": f"{task['id']}-{way}-{k}{again}", "tools": tools, "messages": messages}
        if way == "plain":
            del row["tools"]
        rows.append(row)
    if searching:
        # Four scenes as some overview tells them, two windows of any place, and a few seconds
        # around two flashes, because sub-agents that cannot read flashes hold a whole run back.
        looks = overview_looks(rng.choice(budgets_of(len(events))), seconds)
        windows = [e["window"] for e in told_scenes(events, looks)]
        windows = windows if len(windows) <= 4 else rng.sample(windows, 4)
        windows += [(a, rng.randrange(a + 6, min(a, seconds - 64) + 65))
                    for a in rng.choices(range(0, seconds - 8, 2), k=2)]
        windows += [(e["start"] - rng.randint(0, 1), min(seconds, e["end"] + rng.randint(0, 2)))
                    for e in rng.sample(events, 2)]
        looks = [(window, 1.0) for window in windows]
    else:
        # Sub-agents at 1 fps see every event; with 3 frames in 8 seconds they miss one in five. One
        # more sub-agent gets an empty slot.
        taken = [e["window"] for e in events]
        empty = rng.choice([(a, a + 8) for a in range(0, 64, 8) if (a, a + 8) not in taken])
        looks = [(w, fps) for w in taken for fps in (1.0, 0.375)]
        looks += [(empty, rng.choice([1.0, 0.375]))]
    return rows + [sub_chat(f"{task['id']}-sub-{i}", task, window, events, fps)
                   for i, (window, fps) in enumerate(looks)]


def budgets_of(scenes=4):
    """The K that have a frame for each scene."""
    return [k for k in rollout.gated_choices() if k >= scenes]


def pretraining_rows(task, events, prior, rng, wrong=0.0):
    """Samples that train the base: every skill at every K, in the style of --prior (see above)."""
    every = budgets_of(len(task.get("scenes", ())))
    ways = {"need": every * 2} if prior == "need" else {"direct": every, "call": every}
    if prior == "half":  # need at every K, and the two ways of tidy at about half of them
        direct = [k for k in every if rng.random() < 0.5]
        ways = {"direct": direct, "call": [k for k in every if k not in direct], "need": every}
    ways["plain"] = rng.sample(every, 2)
    if "scenes" in task and prior in ("strong", "tidy", "turns"):
        # Calls have more to learn there than answers from the overview.
        ways["direct"], ways["plain"] = ways["plain"][:1], ways["plain"][1:]
    return chats(task, events, ways, rng, prior == "strong", wrong, one_call=prior == "turns")


def cold_start_rows(task, events, rng, wrong=0.0):
    """Samples of the cold start, which teaches calling as in the paper: calls at every K, direct
    answers at one K."""
    every = budgets_of(len(task.get("scenes", ())))
    return chats(task, events, {"direct": [rng.choice(every)], "call": every,
                                "plain": [rng.choice(every)]}, rng, wrong=wrong)


# ------------------------------------------------------------------------------------------------
# Checkpoint


def chat_template(base="qwen3_vl"):
    """ChatML. Consecutive tool messages fold into one user turn, as in Qwen's own templates. Those
    of Qwen3.5 open a thought and ask for calls in XML."""
    xml = base == "qwen3_5"
    form = "JSON between <tool_call> and </tool_call>"
    if xml:
        form = ("XML: <tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n"
                "</function>\n</tool_call>")
    start = "<|im_start|>assistant\n" + ("<think>\n" if xml else "")
    return (
        "{%- for m in messages %}"
        "{%- set tool = m.role == 'tool' %}"
        "{%- if not tool or loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "{{- '<|im_start|>' + ('user' if tool else m.role) + '\n' }}{%- endif %}"
        "{%- if tool %}{{- '<tool_response>\n' }}{%- endif %}"
        "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for c in m.content %}"
        "{%- if c.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
        "{%- elif c.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
        "{%- else %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}"
        "{%- if loop.first and tools %}"
        "{{- '\n\nTools, called as " + form + ":' }}"
        "{%- for t in tools %}{{- '\n' + (t | tojson) }}{%- endfor %}{%- endif %}"
        "{%- if tool %}{{- '\n</tool_response>' }}"
        "{%- if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{- '\n' }}"
        "{%- else %}{{- '<|im_end|>\n' }}{%- endif %}"
        "{%- else %}{{- '<|im_end|>\n' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '" + start + "' }}{%- endif %}")


def fixed_phrases(base):
    """The texts that are the same in every sample: the lines of both prompts, the tool list, JSON
    or XML around the arguments of a call."""
    xml = base == "qwen3_5"
    rendered = render_template([{"role": "system", "content": rollout.main_prompt()}],
                               rollout.tool_schema(), base)
    lines = rendered.replace("<|im_start|>system\n", "").replace("<|im_end|>", "").split("\n")
    lines += [*rollout.sub_prompt().split("\n"), rewards.task_types()["list"].ask,
              rollout.empty_summary()]
    call = ['{"name": "crop_video", "arguments": {"start_time": ', ', "end_time": ']
    if xml:
        call = ["<function=crop_video>\n<parameter=start_time>\n",
                "\n</parameter>\n<parameter=end_time>\n", "\n</parameter>\n</function>"]
    return [line for line in lines if line] + call


def render_template(messages, tools=None, base="qwen3_vl"):
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template([messages], tools=tools, chat_template=chat_template(base))[0][0]


def build_tokenizer(rng, base="qwen3_vl", world="named", scenes=4):
    """Byte-level BPE trained on this world's own texts -> PreTrainedTokenizerFast."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    control = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
               "<|video_pad|>"]
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
            "</think>"]
    phrases = fixed_phrases(base)
    if base == "qwen3_5":
        # transformers loads every tokenizer of this model_type with Qwen3.5's own pre-tokenizer,
        # which takes digits one by one. So the time stamps are added tokens, the numbers digits.
        phrases += [f"<{t}.0 seconds>" for t in range(film_seconds(scenes))]
    # Times and numbers are repeated until each becomes one token.
    seconds = film_seconds(scenes)
    corpus = [f"<{t}.0 seconds>" for t in range(seconds)] * 30
    corpus += [f" {t}" for t in range(seconds + 1)] * 30
    for _ in range(300):
        events, task = make_sample("v", rng, world, scenes)
        for row in [*pretraining_rows(task, events, "strong", rng),
                    *cold_start_rows(task, events, rng)]:
            text = render_template([m if isinstance(m["content"], str)
                                    else {**m, "content": m["content"][1]["text"]}
                                    for m in row["messages"]], base=base)
            for literal in phrases + control + tags:  # whole tokens already
                text = text.replace(literal, "\n")
            corpus.append(text)
    core = Tokenizer(models.BPE())
    # Whole numbers and whole time stamps stay in one piece; a word keeps the space before it.
    split = Regex(r"<\d+\.\d seconds>| ?[A-Za-z_]+|\d+|[^\sA-Za-z0-9<]+|\s|<")
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(split, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=512 + 2 * seconds, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"], show_progress=False))
    # PreTrainedTokenizerFast, because transformers rebuilds the stock pre-tokenizer of a
    # Qwen2Tokenizer and drops ours.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>",
                                        pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags + phrases])
    tokenizer.model_max_length = 4096
    return tokenizer


def build_init(folder, rng, seed, hidden=128, layers=4, heads=4, mlp=384, base="qwen3_vl",
               world="named", scenes=4, vocab=0):
    """Writes a random checkpoint of this model_type -> number of parameters, one or two millions.
    vocab: ids of the model, if more than the tokenizer's: published ones are padded, too."""
    launch.import_shim()
    import torch
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3_5Config,
        Qwen3VLConfig,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = build_tokenizer(rng, base, world, scenes)
    one = tokenizer.convert_tokens_to_ids
    axis = hidden // heads // 2  # rotary pairs of a head, shared out over time, height, width
    text = dict(vocab_size=vocab or len(tokenizer), hidden_size=hidden, intermediate_size=mlp,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                head_dim=hidden // heads, max_position_embeddings=4096,
                rope_scaling={"mrope_interleaved": True,
                              "mrope_section": [axis - 2 * (axis // 3), axis // 3, axis // 3],
                              "rope_type": "default"}, rope_theta=10000.0, tie_word_embeddings=True)
    # One block, one deepstack level; 32 x 32 pixels are 2 x 2 patches, merged into one token.
    vision = dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=16,
                  spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=hidden,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])
    config_class = Qwen3VLConfig
    if base == "qwen3_5":
        config_class = Qwen3_5Config
        del vision["deepstack_visual_indexes"], text["rope_scaling"], text["rope_theta"]
        # A quarter of a head is rotated: 16 of 64 dimensions, 8 pairs. Every second layer is
        # gated-delta, in published checkpoints three of four: with one layer of attention the toy
        # takes twice the steps to learn to copy a summary. vLLM's kernels for CPUs want heads of
        # 128 there.
        text |= dict(head_dim=2 * hidden // heads, rope_parameters={
            "mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default",
            "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128,
            linear_value_head_dim=128, linear_conv_kernel_dim=4, mamba_ssm_dtype="float32",
            layer_types=["full_attention" if n % 2 else "linear_attention"
                         for n in range(layers)])
    config = config_class(text_config=text, vision_config=vision,
                          image_token_id=one("<|image_pad|>"), video_token_id=one("<|video_pad|>"),
                          vision_start_token_id=one("<|vision_start|>"),
                          vision_end_token_id=one("<|vision_end|>"), tie_word_embeddings=True,
                          eos_token_id=one("<|im_end|>"), pad_token_id=one("<|endoftext|>"))
    torch.manual_seed(seed)
    policy = checkpoint.model_class(config)(config)
    # Rows of length 1. With transformers' 0.02 the first layers drown the embeddings, and the toy
    # needs twice the steps.
    torch.nn.init.normal_(policy.get_input_embeddings().weight, std=hidden ** -0.5)
    policy.generation_config.eos_token_id = one("<|im_end|>")
    policy.generation_config.pad_token_id = one("<|endoftext|>")
    # The same mean and std for images as for videos, because vLLM normalises both with those of the
    # image processor.
    half = [0.5, 0.5, 0.5]
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=50176,
                                   image_mean=half, image_std=half)
    videos = Qwen3VLVideoProcessor(patch_size=16, merge_size=2)
    processor = Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer,
                                 video_processor=videos, chat_template=chat_template(base))
    with runs.atomic_folder(folder) as temp:
        save_base(policy, processor, temp)
    return sum(p.numel() for p in policy.parameters())


def save_base(policy, processor, folder):
    """Writes a checkpoint the way transformers does, and fixes one wrong field. Checkpoints trained
    from this one copy the small files."""
    policy.save_pretrained(folder)
    processor.save_pretrained(folder)
    # transformers 5 rebuilds the stock pre-tokenizer when a Qwen2Tokenizer is loaded. Under that
    # name every id after the first number would change without an error.
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as f:
        config = json.load(f) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    launch.write_atomic(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--out", default="toy", help="folder to write")
    add("--seed", type=int, default=0, help="of videos, texts and weights")
    add("--world", choices=["search", "named"], default="search",
        help="search: questions name the border of the scenes to look at; named: they name times")
    add("--scenes", type=int, default=4, help="search: scenes of a film, 4 to 32")
    add("--wrong", type=float, default=0.3,
        help="search: share of demonstrations that look at other scenes than those asked about")
    add("--prior", choices=["strong", "tidy", "turns", "need", "half"], default="strong",
        help="style of the base's pretraining split, see above")
    add("--base-videos", type=int, default=480, help="videos of the base's pretraining split")
    add("--sft-videos", type=int, default=96, help="videos of the cold-start split")
    add("--rl-videos", type=int, default=160, help="videos of the RL split, one task each")
    add("--eval-videos", type=int, default=64, help="videos of the held-out split, one task each")
    add("--base", choices=["qwen3-vl", "qwen3.5"], default="qwen3-vl",
        help="family of the base checkpoint; videos and rows are the same for both")
    args = parser.parse_args()
    base = {"qwen3-vl": "qwen3_vl", "qwen3.5": "qwen3_5"}[args.base]
    launch.at_least(1, args, "base_videos", "sft_videos", "rl_videos", "eval_videos")
    launch.at_least(0, args, "wrong")
    launch.at_least(4, args, "scenes")
    from tqdm import tqdm

    launch.make_out(args.out)  # proves that the folder can be written
    os.makedirs(os.path.join(args.out, "videos"), exist_ok=True)
    rng, noise = random.Random(args.seed), np.random.default_rng(args.seed)
    # The style has a generator of its own, so that the prior changes pretrain.jsonl alone.
    style = random.Random(f"style/{args.seed}")
    counts = {"base": args.base_videos, "sft": args.sft_videos, "val": 24, "rl": args.rl_videos,
              "eval": args.eval_videos}
    rows = {split: [] for split in counts}  # SFT chats, or tasks
    with tqdm(total=sum(counts.values()), desc="videos", disable=None) as bar:
        for split, count in counts.items():
            for i in range(count):
                # Every split draws its own videos, so that none is seen in two of them.
                events, task = make_sample(f"{split}-{i:04d}", rng, args.world, args.scenes)
                write_video(os.path.join(args.out, task["video"]), draw_frames(events, noise))
                if split == "base":
                    rows[split] += pretraining_rows(task, events, args.prior, style, args.wrong)
                else:
                    chatted = split in ("sft", "val")
                    rows[split] += (cold_start_rows(task, events, rng, args.wrong) if chatted
                                    else [task])
                bar.update()
    for split, name in zip(counts, ("pretrain", "sft", "sft_val", "rl", "eval")):
        text = "".join(json.dumps(row) + "\n" for row in rows[split])
        launch.write_atomic(os.path.join(args.out, f"{name}.jsonl"), text)
    parameters = build_init(os.path.join(args.out, "init"), rng, args.seed, base=base,
                            world=args.world, scenes=args.scenes)
    print(f"{args.out}: random checkpoint of {parameters / 1e6:.2f} M parameters, "
          f"{sum(counts.values())} videos, "
          + ", ".join(f"{len(r)} {s} rows" for s, r in rows.items()))


if __name__ == "__main__":
    launch.run_main(main)
