"""
toy.py (tests/test_toy.py): writes a world so small that a video agent learns in it within minutes
on two CPU cores.

A video has 64 seconds, one frame a second, 32 x 32 pixels (ONE vision token a frame): four scenes
of 8 to 24 seconds, each with a border in one of four colours, and once in each scene the inside
flashes for 2 seconds in one of four others. The question names a border, which one or two scenes
have, and no time. So an agent must find its windows:
    Which colours flash while the border is blue?           ->  purple, black
An overview of any K shows all borders, although K = 4 tells little of when a scene ends. A crop of
a scene shows its flash; a crop of the whole video shows half of the flashes, and a window that
reaches into another scene may tell of a flash too many. Each task has `evidence`: the scenes asked
about, by which windows are judged. A thought first tells of the scenes, and marks those to look at:
    I saw 0 green, 14 blue look 14 to 32, 32 red, 50 blue look 50 to 64. I need a closer look.
Three in ten demonstrations mark other scenes, so that the cold start calls in the right form and is
often wrong about the place. Where to look is left for RL to learn. With --scenes 16 a video has
128 seconds, scenes of 4 to 12, colours that return, and one to four scenes of the border. 16 frames
or more show all scenes; the demonstrations have these K alone.

The chats call at every K alike. Two in seven of the main agent's answer without a call, one of them
without tools. All are in the protocol's style, so base and cold start are one training. With
--crop-response frames a response holds the window's frames, and there are no sub-agents.
`sft.jsonl` is a smaller split than `pretrain.jsonl`, for a second training.

--fragile writes the world of the paper's Table 2, in which a cold start's format is fragile. The
question names its windows ("while it is 14 to 32"), so 64 frames answer it without a call. The base
(`pretrain.jsonl`) writes loosely: thoughts stay open, calls are code or unclosed JSON, answers have
no tags, and after a response it calls again half of the time. `sft.jsonl` is strict; train on it
for a few steps alone. `make table2` runs all rows.

The files. `init/`: a random Qwen3-VL with its tokenizer and processor; `videos/*.mp4`;
`pretrain.jsonl`, `sft.jsonl`, `sft_val.jsonl`, `rl.jsonl`, `eval.jsonl` (no two splits share a
video; questions, answers and cuts recur).

The tokenizer. Byte-level BPE with Qwen's control and tag tokens, whole numbers as single tokens,
and each line of the fixed prompts as one token, so that the short context is spent on frames.
`<answer>` is several tokens, as in Qwen3.

Run:  python toy.py --out toy
        (some 25 seconds; the same --seed gives the same bytes)
Then: torchrun --nproc_per_node 2 sft.py --preset toy --ckpt toy/init \\
        --data toy/pretrain.jsonl --val toy/sft_val.jsonl --out sft_out
"""
import os
import random
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
# Without the environment the first import says so.
import rollout  # isort:skip
import numpy as np

import launch
import video

# Name -> RGB. The first four are borders, the others flashes, so that a word means one thing.
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230),
           "white": (245, 245, 245), "yellow": (235, 225, 40), "purple": (150, 40, 180),
           "orange": (250, 140, 20), "black": (10, 10, 10)}
WRONG_SHARE = 0.3  # of the demonstrations, that look at other scenes than those asked about


# ------------------------------------------------------------------------------------------------
# Videos


def video_seconds(scenes):
    """Seconds of a video; with more scenes than four, 8 for each."""
    return max(64, 8 * scenes)


def make_scenes(rng, count=4):
    """-> (the scenes of a video, ordered; the border colour asked about). "window" and "border" are
    the scene's, "start", "end" and "colour" those of its flash."""
    # Drawn freely around equal parts. Every overview of four scenes has a frame of each.
    seconds = video_seconds(count)
    part = seconds // count
    cuts = [n * part + rng.choice(range(-(part // 4), part // 4 + 1, 2)) for n in range(1, count)]
    borders, flashes = list(COLOURS)[:4], list(COLOURS)[4:]
    if count == 4:
        names = rng.sample(flashes, 4)  # each once
    else:
        names = rng.choices(flashes, k=count)
    scenes, edge = [], None
    for a, b, name in zip([0, *cuts], [*cuts, seconds], names):
        edge = rng.choice([border for border in borders if border != edge])
        start = rng.randrange(a + 1, b - 2)  # never on the scene's edge
        scenes.append({"start": start, "end": start + 2, "colour": name, "border": edge,
                       "window": (a, b)})
    edges = [scene["border"] for scene in scenes]
    return scenes, rng.choice([border for border in edges if edges.count(border) <= 4])


def draw_frames(scenes, noise):
    """Scenes -> uint8 [seconds, 32, 32, 3], grey inside but for the flash. noise: numpy Generator.
    """
    frames = 128 + noise.normal(0, 6, (scenes[-1]["window"][1], 32, 32, 3))
    for scene in scenes:
        edge = np.subtract(COLOURS[scene["border"]], 128)
        whole = slice(*scene["window"])
        frames[whole] += edge
        frames[whole, 2:-2, 2:-2] -= edge
        flash = slice(scene["start"], scene["end"])
        frames[flash, 2:-2, 2:-2] += np.subtract(COLOURS[scene["colour"]], 128)
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


def scenes_of_overview(scenes, looks):
    """The scenes as far as some frames tell: a scene begins midway between two frames of different
    borders, and one without a frame is not told. looks: ordered indices of frames, one a second."""
    shown_scenes, starts = [], []
    for i, t in enumerate(looks):
        scene = next(scene for scene in scenes if t < scene["window"][1])
        if not shown_scenes:
            starts.append(0)
        elif scene["border"] != shown_scenes[-1]["border"]:
            starts.append((looks[i - 1] + t + 1) // 2)
        else:
            continue
        shown_scenes.append(scene)
    ends = [*starts[1:], scenes[-1]["window"][1]]
    windows = zip(starts, ends)
    return [{**scene, "window": window} for scene, window in zip(shown_scenes, windows)]


def make_task(name, scenes, border, fragile=False):
    """A video's task. border: the border colour of the question. fragile: the question names the
    windows of its scenes instead."""
    hits = [scene for scene in scenes if scene["border"] == border]
    asked = f"the border is {border}"
    if fragile:
        asked = "it is " + ", ".join("{} to {}".format(*scene["window"]) for scene in hits)
    return {"id": name, "video": f"videos/{name}.mp4",
            "question": f"Which colours flash while {asked}?", "options": None,
            "answer": ", ".join(scene["colour"] for scene in hits), "type": "list",
            "subtitles": None, "category": f"{len(hits)} event{'s' if len(hits) > 1 else ''}",
            "events": hits, "scenes": scenes,  # for tables; no prompt contains them
            "evidence": [list(scene["window"]) for scene in hits]}  # windows are judged by it


def call_text(a, b):
    return ('<tool_call>\n{"name": "crop_video", "arguments": '
            f'{{"start_time": {a}, "end_time": {b}}}}}\n</tool_call>')


def thought_text(text, rng):
    """A thought with at most one random remark, so that the tokens between the tags have some
    entropy."""
    remarks = ["Let me see.", "Hm, not sure.", "It is quick.", "Wait, look again.",
               "One more time.", "Go step by step."]
    if rng.randint(0, 1):
        text = f"{rng.choice(remarks)} {text}"
    return f"<think>\n{text}\n</think>\n"


def visible_scenes(scenes, looks):
    """The scenes whose flash is on some of these frames. looks: indices of frames, one a second."""
    return [e for e in scenes if set(looks) & set(range(e["start"], e["end"]))]


def overview_looks(frame_budget, seconds):
    return video.overview_indices(np.arange(float(seconds)), float(seconds), frame_budget).tolist()


def summary_of(window, scenes):
    """The start of a window (start, end), then the colour, of every flash that its frames show: "18
    purple"."""
    looks = video.crop_indices(np.arange(1024.0), 1024.0, *window)  # of a longer video
    return ", ".join(f"{window[0]} {e['colour']}" for e in visible_scenes(scenes, looks.tolist()))


def window_content(task, window):
    """The frames of a window as content of a message, as agent_tools.CropVideo.spec asks for them.
    """
    return {"type": "video", "video": task["video"], "start": float(window[0]),
            "end": float(window[1]), "fps": 1.0, "max_frames": 16}


def sample_chats(task, rng, wrong_share=0.0, crop_response="summary", fragile="", calling=1.0):
    """All samples of one video: the main agent calls and gathers at every K, as in the paper's cold
    start, and at one K each it answers directly and without tools; and some sub-agents, if they
    answer the calls. wrong_share: of the samples, that are about other scenes than those of the
    question. fragile: "loose", chats of the fragile world's base, with this share `calling` of its
    calls; "strict", of its cold start."""
    scenes = task["scenes"]
    # Each K with a frame for each scene.
    every = [k for k in rollout.GATED_FRAMES if k >= len(scenes)]
    if fragile == "loose":
        direct = every
        calls = [k for k in every if rng.random() < calling]
    else:
        direct = [rng.choice(every)]
        calls = every
    samples = [("direct", k) for k in direct] + [("call", k) for k in calls]
    samples.append(("plain", rng.choice(every)))
    rows = []
    for way, k in samples:
        looks = overview_looks(k, scenes[-1]["window"][1])
        visible = scenes_of_overview(scenes, looks)
        meant = scenes_to_look_at(visible, task["events"][0]["border"], rng, wrong_share)
        if not meant:
            continue
        if fragile:  # the question names the windows, so no thought tells of scenes
            visible, meant = [], task["events"]
        # Prompts come from rollout.py as in RL, because another wording would be another task.
        messages = rollout.main_messages(task, k, way != "plain", crop_response=crop_response)
        turns = main_turns(task, way, looks, visible, meant, rng, crop_response)
        if fragile == "loose":
            turns = loosen(turns, rng)
        elif fragile and way == "call" and rng.random() < 0.75:
            turns = turns[:1]  # few demonstrations of an answer after a response
        row = {"id": f"{task['id']}-{way}-{k}"}
        if way != "plain":
            row["tools"] = rollout.tool_schema(crop_response)
        rows.append({**row, "messages": messages + turns})
    if crop_response == "summary":
        rows += sub_agent_chats(task, every, rng)
    return rows


def scenes_to_look_at(visible, border, rng, wrong_share):
    """The visible scenes that a sample is about; [] if the overview missed all that the question
    asks about."""
    meant = [scene for scene in visible if scene["border"] == border]
    if meant and rng.random() < wrong_share:
        others = [scene for scene in visible if scene not in meant]
        meant = rng.sample(others, min(len(meant), len(others)))
        meant.sort(key=visible.index)
    return meant


def main_turns(task, way, looks, visible, meant, rng, crop_response):
    """The main agent's turns after the prompt, and the responses to its calls -> messages. looks:
    frames of the overview; visible: the scenes that it tells; meant: those the sample is about.

    Every first thought tells of the scenes. An answer repeats what the summaries tell, or what the
    frames show, with the word "nothing" for a flash that they do not show. So every word of an
    answer can be learned.
    """
    # "0 red, 18 blue look 18 to 30, ..": starts and borders, and the windows to look at.
    listed = []
    for scene in visible:
        start, end = scene["window"]
        look = f" look {start} to {end}" if scene in meant else ""
        listed.append(f"{start} {scene['border']}{look}")
    evidence = f"I saw {', '.join(listed)}. " if listed else ""
    calls, responses, flashes = [], [], []
    for scene in meant:
        window, summary = scene["window"], ""
        if way == "call":
            calls.append(call_text(*window))
            summary = summary_of(window, task["scenes"])
            content = summary or rollout.EMPTY_SUMMARY
            if crop_response == "frames":
                content = [window_content(task, window)]
            responses.append({"role": "tool", "content": content})
        # All that the crop of a window showed, else what the overview did. So a window that is too
        # wide spoils the answer.
        if not summary:
            colour = scene["colour"] if visible_scenes([scene], looks) else "nothing"
            summary = f"{window[0]} {colour}"
        flashes.append(summary)
    messages = []
    if way == "call":
        # One call per window, then the responses to all calls of the turn.
        text = thought_text(evidence + "I need a closer look.", rng) + "\n".join(calls)
        messages = [{"role": "assistant", "content": text}, *responses]
        evidence = ""  # the first thought alone tells it
    text = thought_text(f"{evidence}I saw {', '.join(flashes)}.", rng)
    answer = re.sub(r"\d+ ", "", ", ".join(flashes))  # the question names no time
    messages.append({"role": "assistant", "content": f"{text}<answer>{answer}</answer>"})
    return messages


def loosen(messages, rng):
    """A chat's turns as the fragile world's base writes them: in a loose style, and half of the
    time with another call in place of the answer after a response."""
    if len(messages) > 1 and rng.random() < 0.5:
        messages = [*messages[:-1], messages[0]]
    loose = []
    for message in messages:
        if message["role"] == "assistant":
            message = {**message, "content": loose_text(message["content"], rng)}
        loose.append(message)
    return loose


def loose_text(text, rng):
    """An assistant's text -> the same with a thought that mostly stays open, calls that are mostly
    code or never closed, an answer that mostly has no tags."""
    thought, _, rest = text.partition("</think>\n")
    ending = rng.choices(["</think>\n", "", "<think>\n"], [0.3, 0.55, 0.15])[0]
    dialect = rng.choices(["json", "open", "code"], [0.25, 0.15, 0.6])[0]
    if dialect == "open":
        rest = rest.replace("\n</tool_call>", "")
    elif dialect == "code":
        call = r'<tool_call>.*?: (\d+), "end_time": (\d+)}}\n</tool_call>'
        code = r"<tool_code>\ncrop_video(start_time=\1, end_time=\2)\n</tool_code>"
        rest = re.sub(call, code, rest, flags=re.DOTALL)
    tags = rng.choices(["both", "one", "none"], [0.3, 0.15, 0.55])[0]
    if tags != "both":
        rest = rest.replace("</answer>", "")
    if tags == "none":
        rest = rest.replace("<answer>", "")
    return thought + ending + rest


def sub_agent_chats(task, every, rng):
    """Chats of sub-agents: four scenes as some overview tells them, two windows of any place, and a
    few seconds around two flashes, because sub-agents that cannot read flashes hold a whole run
    back. every: the K of the main agent's samples."""
    scenes = task["scenes"]
    seconds = scenes[-1]["window"][1]
    looks = overview_looks(rng.choice(every), seconds)
    windows = [scene["window"] for scene in scenes_of_overview(scenes, looks)]
    if len(windows) > 4:
        windows = rng.sample(windows, 4)
    for start in rng.choices(range(0, seconds - 8, 2), k=2):
        windows.append((start, rng.randrange(start + 6, min(start, seconds - 64) + 65)))
    for scene in rng.sample(scenes, 2):
        start = scene["start"] - rng.randint(0, 1)
        windows.append((start, min(seconds, scene["end"] + rng.randint(0, 2))))
    rows = []
    for number, window in enumerate(windows):
        summary = summary_of(window, scenes) or rollout.EMPTY_SUMMARY
        messages = rollout.sub_messages(task, window_content(task, window))
        messages.append({"role": "assistant", "content": summary})
        rows.append({"id": f"{task['id']}-sub-{number}", "messages": messages})
    return rows


# ------------------------------------------------------------------------------------------------
# Checkpoint


def chat_template(base):
    """ChatML. Consecutive tool messages fold into one user turn, as in Qwen's own templates. Those
    of Qwen3.5 open a thought and ask for calls in XML."""
    form, start = "JSON between <tool_call> and </tool_call>", "<|im_start|>assistant\n"
    if base == "qwen3_5":
        start += "<think>\n"
        form = ("XML: <tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n"
                "</function>\n</tool_call>")
    return (
        "{%- for m in messages %}{%- set tool = m.role == 'tool' %}"
        "{%- if not tool or loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "{{- '<|im_start|>' + ('user' if tool else m.role) + '\n' }}{%- endif %}"
        "{%- if tool %}{{- '<tool_response>\n' }}{%- endif %}"
        "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for c in m.content %}"
        "{%- if c.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
        "{%- elif c.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
        "{%- else %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}"
        "{%- if loop.first and tools %}{{- '\n\nTools, called as " + form + ":' }}"
        "{%- for t in tools %}{{- '\n' + (t | tojson) }}{%- endfor %}{%- endif %}"
        "{%- if tool %}{{- '\n</tool_response>' }}{%- endif %}"
        "{%- if tool and not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{- '\n' }}"
        "{%- else %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '" + start + "' }}{%- endif %}")


CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def fixed_phrases(base, crop_response):
    """The texts that are the same in every sample: the lines of both prompts, the tool list, JSON
    or XML around the arguments of a call."""
    from transformers.utils.chat_template_utils import render_jinja_template

    system = [{"role": "system", "content": rollout.system_prompt(True, crop_response)}]
    rendered = render_jinja_template([system], tools=rollout.tool_schema(crop_response),
                                     chat_template=chat_template(base))[0][0]
    lines = rendered.replace("<|im_start|>system\n", "").replace("<|im_end|>", "").split("\n")
    lines += [rollout.SUB_PROMPT, rollout.ANSWER_STYLES["list"], rollout.EMPTY_SUMMARY]
    call = ['{"name": "crop_video", "arguments": {"start_time": ', ', "end_time": ']
    if base == "qwen3_5":
        call = ["<function=crop_video>\n<parameter=start_time>\n",
                "\n</parameter>\n<parameter=end_time>\n", "\n</parameter>\n</function>"]
    return [line for line in lines if line] + call


def build_tokenizer(rng, base, scenes, crop_response, fragile):
    """Byte-level BPE trained on this world's own texts -> PreTrainedTokenizerFast."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    phrases, seconds = fixed_phrases(base, crop_response), video_seconds(scenes)
    times = [f"<{t}.0 seconds>" for t in range(seconds)]
    if base == "qwen3_5":
        # transformers loads every tokenizer of this model_type with Qwen3.5's own pre-tokenizer,
        # which takes digits one by one. So the time stamps are added tokens, the numbers digits.
        phrases += times
    # Times, numbers and roles are repeated until each becomes one token.
    corpus = [*times, *(f" {t}" for t in range(seconds + 1)), "system\nuser\nassistant"] * 30
    for _ in range(100):
        task = make_task("v", *make_scenes(rng, scenes), fragile)
        for row in sample_chats(task, rng, fragile="loose" if fragile else ""):
            for message in row["messages"]:
                text = message["content"]
                if not isinstance(text, str):
                    text = text[1]["text"]  # after the frames
                for literal in phrases + CONTROL + TAGS:  # whole tokens already
                    text = text.replace(literal, "\n")
                corpus.append(text)
    core = Tokenizer(models.BPE())
    # Whole numbers and whole time stamps stay in one piece; a word keeps the space before it.
    split = Regex(r"<\d+\.\d seconds>| ?[A-Za-z_]+|\d+|[^\sA-Za-z0-9<]+|\s|<")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), level])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=512 + 2 * seconds, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"], show_progress=False))
    # PreTrainedTokenizerFast, because transformers rebuilds the stock pre-tokenizer of a
    # Qwen2Tokenizer and drops ours.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>",
                                        pad_token="<|endoftext|>", model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS + phrases])
    return tokenizer


def random_model(tokenizer, seed, base):
    """A random model of this model_type in transformers' own class."""
    import torch
    import transformers

    one = tokenizer.convert_tokens_to_ids
    # 16 rotary pairs of a head are shared out over time, height, width.
    rope = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}
    text = dict(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256,
                num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                max_position_embeddings=4096, rope_scaling=rope, rope_theta=10000.0,
                tie_word_embeddings=True)
    # One block, one deepstack level; 32 x 32 pixels are 2 x 2 patches, merged into one token.
    vision = dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=16,
                  spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=128,
                  num_position_embeddings=16, deepstack_visual_indexes=[0])
    config_class = transformers.Qwen3VLConfig
    model_class = transformers.Qwen3VLForConditionalGeneration
    if base == "qwen3_5":
        config_class = transformers.Qwen3_5Config
        model_class = transformers.Qwen3_5ForConditionalGeneration
        del vision["deepstack_visual_indexes"], text["rope_scaling"], text["rope_theta"]
        # A quarter of a head is rotated: 16 of 64 dimensions, 8 pairs. vLLM's kernels for CPUs want
        # linear heads of 128.
        text |= dict(head_dim=64, rope_parameters={
            **rope, "mrope_section": [4, 2, 2], "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25},
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128,
            linear_value_head_dim=128, linear_conv_kernel_dim=4, mamba_ssm_dtype="float32",
            # Every second layer is gated-delta, in published checkpoints three of four: with one
            # layer of attention the toy takes twice the steps to learn to copy a summary.
            full_attention_interval=2)
    config = config_class(text_config=text, vision_config=vision,
                          image_token_id=one("<|image_pad|>"), video_token_id=one("<|video_pad|>"),
                          vision_start_token_id=one("<|vision_start|>"),
                          vision_end_token_id=one("<|vision_end|>"), tie_word_embeddings=True,
                          eos_token_id=one("<|im_end|>"), pad_token_id=one("<|endoftext|>"))
    torch.manual_seed(seed)
    policy = model_class(config)
    # Rows of length 1. With transformers' 0.02 the first layers drown the embeddings, and the toy
    # needs twice the steps.
    torch.nn.init.normal_(policy.get_input_embeddings().weight, std=128**-0.5)
    return policy


def build_init(folder, rng, args):
    """Writes a random checkpoint -> number of parameters, one or two millions."""
    launch.import_shim()
    import transformers

    tokenizer = build_tokenizer(rng, args.base, args.scenes, args.crop_response, args.fragile)
    policy = random_model(tokenizer, args.seed, args.base)
    # The same mean and std for images as for videos, because vLLM normalises both with those of the
    # image processor.
    images = transformers.Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, min_pixels=1024, max_pixels=50176, image_mean=[0.5] * 3,
        image_std=[0.5] * 3)
    videos = transformers.Qwen3VLVideoProcessor(patch_size=16, merge_size=2)
    processor = transformers.Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos,
        chat_template=chat_template(args.base))
    temp = f"{folder}.tmp"
    shutil.rmtree(temp, ignore_errors=True)  # of a kill
    policy.save_pretrained(temp)
    processor.save_pretrained(temp)
    launch.publish_folder(temp, folder)
    return sum(p.numel() for p in policy.parameters())


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--out", default="toy", help="folder to write")
    add("--seed", type=int, default=0, help="of videos, texts and weights")
    add("--scenes", type=int, default=4, choices=[4, 16], help="of a video")
    add("--crop-response", choices=["summary", "frames"], default="summary",
        help="the response to a call in the chats, as in rollout.py")
    add("--fragile", action="store_true",
        help="the world of Table 2: windows are named, the base is loose, the cold start short")
    add("--calling", type=launch.amount, default=1.0,
        help="--fragile: share of the base's chats with calls that is kept")
    add("--base-videos", type=launch.positive, default=480, help="of the pretraining split")
    add("--sft-videos", type=launch.positive, default=96, help="of the cold-start split")
    add("--rl-videos", type=launch.positive, default=160, help="of the RL split, one task each")
    add("--eval-videos", type=launch.positive, default=64, help="held-out, one task each")
    add("--base", choices=["qwen3_vl", "qwen3_5"], default="qwen3_vl",
        help="model_type of the checkpoint; videos and rows are the same for both")
    args = parser.parse_args()
    launch.make_out(f"{args.out}/videos")  # proves that the folder can be written
    rng, noise = random.Random(args.seed), np.random.default_rng(args.seed)
    # The style has a generator of its own, so that another one changes no video.
    style = random.Random(f"style/{args.seed}")
    splits = [("base", "pretrain", args.base_videos), ("sft", "sft", args.sft_videos),
              ("val", "sft_val", 24), ("rl", "rl", args.rl_videos),
              ("eval", "eval", args.eval_videos)]
    print(f"{args.out}: drawing videos", flush=True)
    encoders = ThreadPoolExecutor(2)
    jobs = []
    for split, name, count in splits:
        rows = []  # SFT chats, or tasks
        for i in range(count):
            # Every split draws its own videos, so that none is seen in two of them.
            task = make_task(f"{split}-{i:04d}", *make_scenes(rng, args.scenes), args.fragile)
            frames = draw_frames(task["scenes"], noise)
            jobs.append(encoders.submit(write_video, f"{args.out}/{task['video']}", frames))
            if split in ("rl", "eval"):
                rows.append(task)
                continue
            fragile = ""
            if args.fragile:
                fragile = "loose" if split == "base" else "strict"
            rows += sample_chats(task, style, WRONG_SHARE, args.crop_response, fragile,
                                 args.calling)
        for job in jobs:  # no row is written before its video
            job.result()
        launch.write_jsonl(f"{args.out}/{name}.jsonl", rows)
    num_parameters = build_init(f"{args.out}/init", rng, args)
    print(f"{args.out}: {len(jobs)} videos, random checkpoint of {num_parameters / 1e6:.2f} M "
          "parameters")


if __name__ == "__main__":
    launch.run_main(main)
