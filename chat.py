"""
chat.py (tests/test_chat.py): chats to token ids and back, through the checkpoint's own template.

One construction of ids serves SFT, RL and evaluation:

  prompt = template(messages before the first assistant turn), with a generation prompt at the end
  turn   = a forced `<think>\\n`, then the ids that were sampled, or the ids of a text from data
  glue   = end of turn, all tool responses, the next generation prompt: cut out of the template,
           which is rendered on a dummy chat
  ids    = prompt + turn + glue + turn + ..

Ids only grow: a sampled id is never decoded and encoded again. Text is for parsing and logs.

Departs from the release: a frame's time stands before <|vision_start|> in every stage, and the text
of a question or of a tool response never becomes a special token (see `escape_special_tokens`).

Reads the tokenizer, the processor and the other small files of a checkpoint folder; writes nothing.
"""
import codecs
import contextlib
import itertools
import json
import os
import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec

import launch
from plumbing import hub

if not find_spec("torch"):  # the other scripts import this one first
    sys.stderr.write(f"{sys.argv[0]}: torch is not here: make venv, source .venv/bin/activate\n")
    sys.exit(2)

# Two private-use characters of Unicode. `escape_special_tokens` removes both from text that is not
# ours.
GUARD = "\ue000"  # splits a literal that must not become a special token
TURN = "\ue001"  # stands for an assistant turn while the template is rendered on a dummy chat

# ------------------------------------------------------------------------------------------------
# Chat -> token ids


@dataclass
class ChatProcessor:
    """Everything that turns chats and frames into ids and patches. See load_codec."""

    tokenizer: object
    processor: object
    channel: str  # "image": `<t seconds>` text + one image a frame; "video": one native video item
    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int
    eos: int  # <|im_end|>: ends every turn, is sampled and therefore trained
    patch: int  # pixels a side of a vision patch
    merge: int  # patches a side that become one token
    temporal: int  # frames a patch spans (2); an image is repeated to fill a patch
    mean: tuple  # [3] red, green, blue in 0..1; model.patchify subtracts them
    std: tuple  # [3] of the same; model.patchify divides by them
    special_strings: tuple  # of tokens marked special, and added ones like "<tool_call>"
    suppress_tokens: tuple  # never sampled: placeholders, turn starts, every end but <|im_end|>
    opens_thought: bool  # the generation prompt ends in `<think>\n`, as in Thinking checkpoints
    tool_call_format: str  # how the template asks for calls: "json", or "xml" as in Qwen3.5
    token_bytes: list  # [vocab] bytes of every token
    files: dict  # name -> bytes, see small_files: every checkpoint we save holds them unchanged
    base: object  # ModelFamily of its model_type, see `bases`
    pad: int = field(init=False)  # id of the placeholder that vision tokens replace, see channel

    def __post_init__(self):
        self.pad = self.image_pad if self.channel == "image" else self.video_pad


@dataclass
class VisionItem:
    """The frames of one video item in a context: enough to load them again and to find their
    features."""

    spec: dict  # {"video", "frames"} or {"video", "start", "end", ..}, as video.load takes them
    key: str  # identity of the frame set
    frames: int  # T
    height: int  # pixels
    width: int
    seconds: list  # [T] time of each frame, on the clock of the whole video


def vision_item(spec: dict, frames) -> VisionItem:
    """A video item of the data and the decoded video.Frames -> VisionItem."""
    t, height, width, _ = frames.images.shape  # [T, H, W, 3]
    return VisionItem(dict(spec), frames.key, t, height, width, frames.seconds.tolist())


def frame_times(codec, item):
    """Seconds that stand before each run of placeholders: of one frame, or the mean of a pair."""
    step = 1 if codec.channel == "image" else codec.temporal  # frames in a run of placeholders
    # Qwen3-VL's processor repeats the last frame of an odd count, so that time counts twice.
    seconds = item.seconds + item.seconds[-1:] * (-len(item.seconds) % step)
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]


def token_bytes_of(codec, ids):
    """Ids -> the bytes of each; b"" for ids beyond the tokenizer, since vocabularies are padded."""
    return [codec.token_bytes[i] if i < len(codec.token_bytes) else b"" for i in ids]


def decode(codec: ChatProcessor, ids: list[int], keep_end: bool = False) -> str:
    """Sampled ids -> text for parsing and logs. Drops the end of turn unless keep_end."""
    ids = [i for i in ids if keep_end or i != codec.eos]
    # Join before decoding: one character may be spread over several tokens.
    return b"".join(token_bytes_of(codec, ids)).decode("utf-8", errors="replace")


def escape_special_tokens(codec, text, literals=None):
    """Splits every literal of a special token in untrusted text, so `encode` makes plain tokens.

    A question that contains "<|im_end|>" must not end the turn. `encode` splits the text at the
    mark and drops the mark, so the ids decode to the text that was given, without marks. literals:
    None = those of all special tokens.
    """
    # First of all: a literal that a mark cuts in two is whole again without that mark.
    text = text.replace(GUARD, "").replace(TURN, "")
    for literal in codec.special_strings if literals is None else literals:
        text = text.replace(literal, literal[0] + GUARD + literal[1:])
    return text


def encode(codec: ChatProcessor, text: str) -> list[int]:
    """Template text -> ids, split at guard marks. No BOS, no truncation."""
    # The tokenizer never sees the two halves of a guarded literal side by side.
    return [i for piece in text.split(GUARD)
            for i in codec.tokenizer(piece, add_special_tokens=False)["input_ids"]]


def apply_template(codec, messages, tools=None, generation=True):
    """Messages as `guard_messages` returns them -> text, by the checkpoint's own chat template."""
    # The template lies in a file of the processor's, or in tokenizer_config.json.
    owner = codec.processor if codec.processor.chat_template else codec.tokenizer
    return owner.apply_chat_template(messages, tools=tools, tokenize=False,
                                     add_generation_prompt=generation)


def stamp_text(seconds, number, kind=None):
    """The text before a frame. kind None: `<12.5 seconds>`, as Qwen3-VL was trained. Other systems'
    agents use "clock": HH:MM:SS, "frame": `<frame3_time12.50s>`, or "none": no text."""
    full = int(seconds)
    return {None: f"<{seconds:.1f} seconds>", "frame": f"<frame{number}_time{seconds:.2f}s>",
            "none": "", "clock": f"{full // 3600:02d}:{full // 60 % 60:02d}:{full % 60:02d}"}[kind]


def content_of(message: dict) -> list[dict]:
    """Content of a message as a list of pieces; a string becomes one piece."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def videos_in(messages) -> list[dict]:
    """The video pieces of messages, in order."""
    return [piece for m in messages for piece in content_of(m) if piece["type"] == "video"]


def guard_messages(codec, messages, items=()):
    """Messages -> messages for the template: text is guarded, frames become times and placeholders.
    items: the VisionItems of their videos, in order."""
    items = iter(items)
    return [{"role": message["role"], "content": content_parts(codec, message, items)}
            for message in messages]


def content_parts(codec, message, items):
    """Content of one message -> parts for the template, or one string if all of it is text, because
    some templates take no lists. Takes one VisionItem per video from the iterator `items`."""

    def kind(piece):
        # Two texts may name the tags: our own system prompt, and tags that our code puts around
        # data. All other text is data.
        return piece["type"], message["role"] == "system" or bool(piece.get("trusted"))

    parts = []
    for (name, trusted), run in itertools.groupby(content_of(message), kind):
        if name == "text":
            # Neighbours are guarded as one text, because a literal may span two pieces.
            text = "".join(piece["text"] for piece in run)
            text = text if trusted else escape_special_tokens(codec, text)
            parts.append({"type": "text", "text": text})
            continue
        for piece in run:
            item = next(items)
            if codec.channel == "video":
                parts.append({"type": "video"})  # `expand` writes the times
                continue
            # The time stands before <|vision_start|>, where vLLM and transformers put it.
            for number, seconds in enumerate(frame_times(codec, item)):
                stamp = stamp_text(seconds, number, piece.get("stamp"))
                parts += [{"type": "text", "text": stamp}, {"type": "image"}]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def encode_prompt(codec: ChatProcessor, messages: list[dict], items=(), tools=None) -> tuple:
    """Messages before the first assistant turn -> (expanded ids, compact ids).

    Expanded ids hold one placeholder per vision token: the trainer sees these. Compact ids hold one
    per frame or video: an engine is given these, and expands them to the same ids.
    """
    compact = encode(codec, apply_template(codec, guard_messages(codec, messages, items), tools))
    return expand(codec, compact, items), compact


def expand(codec, compact, items):
    """Ids with one placeholder per frame (or video) -> ids with one per vision token. Raises
    ValueError if the placeholders do not match the items.

    A frame of two tokens, a video of two pairs of frames with two tokens each, as text:
        <0.5 seconds><|vision_start|><|image_pad|><|vision_end|>
     -> <0.5 seconds><|vision_start|><|image_pad|><|image_pad|><|vision_end|>
        <|vision_start|><|video_pad|><|vision_end|>
     -> <0.5 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>
        <2.5 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>   (on one line)
    """
    runs = []  # ids that take the place of each placeholder
    for item in items:
        # Vision tokens of one frame (channel image) or of one pair of frames (channel video).
        side = codec.patch * codec.merge  # pixels a side of the square that one token stands for
        tokens = [codec.pad] * (item.height // side) * (item.width // side)
        if codec.channel == "image":
            runs += [tokens] * item.frames
            continue
        # A video becomes `<t seconds>` and a marked run of its own for each pair of frames.
        run = []
        for seconds in frame_times(codec, item):
            run += encode(codec, stamp_text(seconds, 0))
            run += [codec.vision_start, *tokens, codec.vision_end]
        runs.append(run)
    places = [n for n, i in enumerate(compact) if i == codec.pad]
    if len(places) != len(runs):
        raise ValueError(f"{len(places)} placeholders in the prompt, {len(runs)} {codec.channel}s")
    # The template writes one pair of markers around a whole video: they go with the placeholder.
    markers = 0 if codec.channel == "image" else 1  # ids on each side
    out = []
    cursor = 0  # ids of `compact` that are in `out` by now, or replaced
    for position, run in zip(places, runs):
        out += compact[cursor:position - markers] + run
        cursor = position + 1 + markers
    return out + compact[cursor:]


def think_prefix_ids(codec, prompt_ids):
    """Ids of the forced `<think>\\n`; none if the generation prompt has opened the thought."""
    prefix = encode(codec, "<think>\n")  # [<think>, newline] in Qwen3's vocabulary
    return [] if prompt_ids[-len(prefix):] == prefix else prefix


def tool_response_ids(codec, messages, ended, items=(), tools=None):
    """Compact ids between two sampled turns: end of turn, all responses as the template writes
    them, the next generation prompt.

    messages: the tool (or user) messages after this turn; items: the VisionItems of their frames;
    tools: of the prompt, as some templates look at them again.
    ended: the turn's last sampled id was the end of turn. If the turn was cut off instead, the end
    is inserted here. The model did not sample that id, so that id is not trained.

    As text, for one tool message, in Qwen3-VL's template; without the first mark if `ended`:
        <|im_end|>\\n<|im_start|>user\\n<tool_response>\\nA dog.\\n</tool_response><|im_end|>\\n
        <|im_start|>assistant\\n   (on one line)
    """
    # TURN stands for the sampled turn, whose own ids are kept. The text after TURN is the glue.
    dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}]
    text = apply_template(codec, dummy + guard_messages(codec, messages, items), tools)
    ids = encode(codec, text.split(TURN, 1)[1])
    # The engine stops a turn at this id alone, so the glue must begin with this id.
    if ids[0] != codec.eos:
        raise launch.UserError("the chat template does not end an assistant turn with <|im_end|>")
    # A turn that ended holds the end already, as its last sampled id.
    return ids[1:] if ended else ids


# ---- below: SFT chats, reading a checkpoint (a reader of the step may stop here) ----------------


def text_pieces(pieces):
    """The bytes of tokens -> the text that each of them completes. A token that ends inside a
    character completes no text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back half a character
    # A character that the last token leaves unfinished becomes U+FFFD, as in `decode`.
    return [decoder.decode(piece, n == len(pieces)) for n, piece in enumerate(pieces, 1)]


# ------------------------------------------------------------------------------------------------
# Chats with assistant turns (SFT)


@dataclass
class Sequence:
    """One agent context: expanded ids, a mask of the trained ones, the frames."""

    ids: list
    mask: list  # 1: an assistant turn or the end of one; 0: all other ids
    items: list = field(default_factory=list)  # [VisionItem], in the order of the placeholders


def encode_chat(codec: ChatProcessor, messages: list[dict], items=(), tools=None) -> Sequence:
    """A whole conversation -> Sequence. Assistant tokens and their ends of turn have mask 1.

    The ids are built from the pieces of a rollout (prompt, turns, glue), so SFT teaches the very
    ids that RL sees later.
    """
    ids, mask = [], []
    rest = iter(items)  # of the videos that are still to come, in order
    for assistant, run in itertools.groupby(messages, lambda m: m["role"] == "assistant"):
        run = list(run)
        run_items = list(itertools.islice(rest, len(videos_in(run))))
        if assistant:
            (message,) = run  # data.chat_fault refuses two turns in a row
            new = turn_ids(codec, "".join(piece["text"] for piece in content_of(message)), ids)
        elif ids:
            # All messages before the next turn make ONE glue, as in a rollout.
            new = expand(codec, tool_response_ids(codec, run, True, run_items, tools), run_items)
        else:
            new, _ = encode_prompt(codec, run, run_items, tools)
        ids += new
        mask += [int(assistant)] * len(new)
    if next(rest, None):
        raise ValueError("more frame sets than videos in the chat")
    return Sequence(ids, mask, list(items))


def turn_ids(codec, text, prompt_ids):
    """Text of an assistant turn -> the ids that a rollout would hold after `prompt_ids`.

    A rollout forces `<think>\\n` as ids of their own. So a leading `<think>` is encoded apart, with
    or without blanks before and a newline after. Control tokens spelled in the text stay text;
    tags (`</think>`, `<tool_call>`) become special tokens, as a model samples them.
    """
    ids, bare = [], text.lstrip()
    if bare.startswith("<think>"):
        ids = think_prefix_ids(codec, prompt_ids)
        text = bare.removeprefix("<think>").removeprefix("\n")
    elif codec.opens_thought:
        # The generation prompt has opened a thought and the turn holds none: the turn closes that.
        text = "</think>\n\n" + text
    text = in_dialect(codec, text)
    # In data, <|im_end|> inside a turn is a mistake: as a token, the turn would end there.
    control = codec.tokenizer.convert_ids_to_tokens([*codec.suppress_tokens, codec.eos])
    return ids + encode(codec, escape_special_tokens(codec, text, control)) + [codec.eos]


def in_dialect(codec, text):
    """Text of an assistant turn -> the same with each whole JSON call in the template's dialect, so
    that one file of chats trains bases of both dialects."""
    def rewritten(match):
        try:
            call = launch.parse_json(match[1])
            return f"<tool_call>\n{xml_call(call['name'], call['arguments'])}\n</tool_call>"
        except (ValueError, TypeError, KeyError, AttributeError):
            return match[0]  # a faulty call stays as it was written

    if codec.tool_call_format == "json" or "<tool_call>" not in text:
        return text
    return re.sub(r"<tool_call>\s*(\{[^<]*\})\s*</tool_call>", rewritten, text)


def xml_call(name, arguments):
    """A call as the templates of Qwen3.5 write it, between <tool_call> and </tool_call>."""
    values = {key: value if isinstance(value, str) else json.dumps(value)
              for key, value in arguments.items()}
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<function={name}>\n{''.join(lines)}</function>"


# ------------------------------------------------------------------------------------------------
# The bases, and reading the codec of a checkpoint


@dataclass(frozen=True)
class ModelFamily:
    """What this code has to know of a family of models. All else is read from a checkpoint's own
    files: sizes, kinds of layers, template, dialect of calls, ids."""

    model_class: str  # in transformers, and in vLLM's module
    engine_module: str  # vllm.model_executor.models.*
    title: str  # for messages
    recurrent: bool = False  # has gated-delta layers, whose states no cache of prefixes holds
    cpu_dtype: str = "float32"  # in which vLLM runs on a CPU
    keep_fp32: tuple = ()  # ends of the names of weights that stay fp32 in compute
    unused: tuple = ()  # starts of the names of stored weights that are not part of the model


def bases() -> dict:
    """{model_type of config.json: ModelFamily}. docs/recipe.md says why others are not among
    them."""
    return {
        "qwen3_vl": ModelFamily("Qwen3VLForConditionalGeneration", "qwen3_vl", "dense Qwen3-VL"),
        # vLLM's gated-delta kernels for CPUs know bf16 alone. exp(A_log) is the rate of forgetting:
        # an error of bf16 in it grows with the length of the sequence. mtp: heads that guess
        # further tokens, which neither transformers nor a plain engine loads.
        "qwen3_5": ModelFamily("Qwen3_5ForConditionalGeneration", "qwen3_5", "dense Qwen3.5", True,
                               "bfloat16", (".A_log",), ("mtp.",))}


def check_config(path):
    """A checkpoint folder, a name on the Hub, or the run folder that holds a checkpoint under
    `last` -> the folder that holds config.json. Raises UserError for a model that this code does
    not train. All scripts and tools/plan.py use this check."""
    folder = hub.config_folder(path)
    if folder is None:
        if not os.path.exists(hub.fetch_ckpt(path)):
            owner = "ParaVT" if path.startswith("ParaVT") else "Qwen"
            name = "" if "/" in path else f"; a name on the Hub has an owner: {owner}/{path}"
            raise launch.UserError(f"--ckpt {path}: no such folder ({os.path.abspath(path)}){name}")
        raise launch.UserError(f"checkpoint {path}: no config.json here nor in {path}/last; give a "
                               "folder saved by sft.py or grpo.py, or a whole download of "
                               "the base with safetensors (no GGUF, no adapters of another tool)")
    config = read_object(os.path.join(folder, "config.json"))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in bases():
        families = ", ".join(f"{name} ({base.title})" for name, base in bases().items())
        raise launch.UserError(f"checkpoint {folder}: model_type is {kind!r}, this code trains "
                               f"{families}; docs/recipe.md says why")
    # Quantizers write their settings at the top of the file or into a section. vLLM drops a part of
    # this bias, and reads other kinds of RoPE, no factor, the tower's theta, or attention to both
    # sides in another way than transformers.
    if bad := re.search('"quantization_config": (?!null)|"attention_bias": true|"factor": null|'
                        '"(rope_)?type": "(?!axial|default|mrope|yarn)[^"]*"|"is_causal": false|'
                        r'"vision_config": \{[^}]*theta": (?!10000\b)[^,}]+', json.dumps(config)):
        raise launch.UserError(f"checkpoint {folder}: {bad[0]} in config.json: such weights "
                               "cannot be trained; give the BF16 checkpoint as published")
    # Files that may ask for code of the checkpoint's own: an auto_map, or at any depth an attention
    # kernel from a hub ("owner/name"), which transformers would fetch.
    code = r'"auto_map": |attn_implementation": (?:"[^"]*|\{[^}]*)/'
    for name in sorted(name for name in os.listdir(folder) if name.endswith("config.json")):
        if re.search(code, json.dumps(read_object(os.path.join(folder, name)))):
            raise launch.UserError(f"checkpoint {folder}: {name} asks for code of its own, which "
                                   "is never run; remove auto_map or attn_implementation from it")
    return folder


def read_object(path):
    """A checkpoint's JSON file that holds an object -> dict. Raises UserError."""
    try:
        content = launch.parse_json(launch.read_file(path))
    except (OSError, ValueError) as e:
        raise launch.UserError(f"{path} is not JSON ({e}); copy it again") from None
    if not isinstance(content, dict):
        raise launch.UserError(f"{path} holds no JSON object; copy it again")
    return content


@contextlib.contextmanager
def as_user_error(ckpt, part):
    """An error that a library raises inside, for a file of a checkpoint, becomes a UserError."""
    try:
        yield
    # A broken file makes tokenizers raise Exception itself, jinja2 and huggingface_hub classes of
    # their own, and transformers TypeError or KeyError. No narrower class covers all of these.
    except Exception as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise launch.UserError(f"checkpoint {ckpt}: its {part} cannot be used ({reason}); copy the "
                               "files beside the weights again") from e


def load_config(ckpt):
    """Checkpoint folder -> transformers' configuration."""
    launch.import_shim()
    launch.quiet_libraries()
    from transformers import AutoConfig

    with as_user_error(ckpt, "config.json"):
        # No code of a checkpoint is ever run; check_config refuses a folder that asks for that.
        return AutoConfig.from_pretrained(ckpt, trust_remote_code=False)


def vllm_overrides(config):
    """Configuration -> vLLM's hf_overrides, of what vLLM reads there and transformers does not: it
    reads the tie elsewhere, has defaults for M-RoPE, and no sliding window, gate, bias nor epsilon
    of the tower."""
    axes = [11, 11, 10] if config.model_type == "qwen3_5" else [24, 20, 20]
    rope = {"mrope_section": axes, **config.text_config.rope_parameters, "mrope_interleaved": True}
    text = dict(tie_word_embeddings=config.tie_word_embeddings, attn_output_gate=True,
                rope_parameters=rope, output_gate_type="swish", qkv_bias=False, sliding_window=None)
    return {"rms_norm_eps": 1e-6, "text_config": text}


def small_files(folder):
    """-> {name: bytes} of the files that training does not change: configuration, tokenizer,
    processor, chat template. No code, no weights, no README, no optimizer."""
    kinds = (".json", ".jinja", ".txt", ".model")
    # These two and an index describe the weights beside them, so other weights get no copy.
    run_files, files = ("adapter_config.json", "state.json"), {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        ours = name.endswith(kinds) and not name.endswith(".index.json") and name not in run_files
        # 64 MiB; Qwen3's tokenizer.json has 11. getsize first: a file that has gone is an error.
        if ours and os.path.getsize(path) <= 2**26 and launch.is_file(path):
            files[name] = launch.read_file(path)
    return files


def load_codec(ckpt, channel="image", template_kwargs=None):
    """Checkpoint directory -> ChatProcessor. channel: "image" | "video", how frames enter a prompt.
    template_kwargs: {name: value}, which every rendering of the template shall know."""
    check_config(ckpt)
    config = load_config(ckpt)
    from transformers import AutoProcessor

    with as_user_error(ckpt, "tokenizer or processor"):
        processor = AutoProcessor.from_pretrained(ckpt, trust_remote_code=False)
        images, clips = processor.image_processor, processor.video_processor
        vocabulary = (tokenizer := processor.tokenizer).get_vocab()  # token -> id, all of them
        eos = vocabulary["<|im_end|>"]
        cut, clip_cut = [(p.patch_size, p.merge_size, p.temporal_patch_size, p.do_rescale,
                          round(1 / p.rescale_factor), p.do_normalize) for p in (images, clips)]
        norms = [(tuple(p.image_mean), tuple(p.image_std)) for p in (images, clips)]
    # A tokenizer of another checkpoint has other ids: prompts would hold no frames.
    marks = {"image_pad": config.image_token_id, "video_pad": config.video_token_id,
             "vision_start": config.vision_start_token_id, "vision_end": config.vision_end_token_id}
    for name, i in marks.items():
        if (stored_id := vocabulary.get(f"<|{name}|>")) != i:
            raise launch.UserError(f"checkpoint {ckpt}: <|{name}|> is id {stored_id} in the "
                                   f"tokenizer, {i} in config.json; copy its files again")
    owner = processor if processor.chat_template else tokenizer
    if tokenizer.chat_template not in (None, owner.chat_template):
        print(f"checkpoint {ckpt}: its processor and its tokenizer have different chat templates; "
              "the processor's is used", file=sys.stderr)
    for name, value in (template_kwargs or {}).items():
        # {% statements %} and {{ expressions }}: a misspelt name would change nothing.
        code = re.findall(r"(?s)\{[{%].*?[%}]\}", owner.chat_template or "")
        if name not in re.findall(r"\w+", " ".join(code)) or name == "add_vision_id":
            raise launch.UserError(f"--set chat_template_kwargs: the chat template of {ckpt} does "
                                   f"not read {name}; add_vision_id counts anew in each response")
        owner.chat_template = f"{{% set {name} = {value!r} %}}{owner.chat_template}"
    # Patches of another size would have other features, or crash deep inside the tower. patchify
    # divides by 255 and normalises, in all cases.
    t = config.vision_config
    wanted = (t.patch_size, t.spatial_merge_size, t.temporal_patch_size, 1, 255, 1)
    if mismatch := {cut, clip_cut if channel == "video" else cut} - {wanted}:
        raise launch.UserError(f"checkpoint {ckpt}: its processor makes patches {mismatch.pop()} "
                               f"(pixels, merged, frames, rescaled by, normalised), and {wanted} "
                               "are expected; copy preprocessor_config.json again")
    # patchify uses one mean and std for both, as vLLM does.
    if channel == "video" and norms[0] != norms[1]:
        raise launch.UserError(f"checkpoint {ckpt}: image and video processor normalise "
                               "differently, and vLLM applies the image processor's to both; use "
                               "--set channel=image")
    # Published checkpoints end on two ids, and vLLM stops at either. A turn here ends in <|im_end|>
    # alone: the other id, if sampled, would stand in the turn as text.
    # None: not in this vocabulary.
    never = {vocabulary.get(f"<|{name}|>") for name in (*marks, "im_start", "endoftext")}
    # Control tokens and tags. The toy adds whole phrases as well, which are harmless in a question.
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()
             if token.special or str(token).startswith("<")]
    # Instruct templates end the generation prompt in "assistant\n", Thinking ones in "<think>\n". A
    # template that declares tools shows how to call one.
    tool = {"type": "function", "function": {"name": "look", "description": "x", "parameters": {}}}
    with as_user_error(ckpt, "chat template"):
        prompt = owner.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool],
                                           tokenize=False, add_generation_prompt=True)
    if '"look"' not in prompt or isinstance(tokenizer.chat_template, dict):
        raise launch.UserError(f"checkpoint {ckpt}: no single chat template with tools; copy its "
                               "base's")
    return ChatProcessor(
        tokenizer=tokenizer, processor=processor, channel=channel, eos=eos, **marks,
        patch=cut[0], merge=cut[1], temporal=cut[2], mean=norms[0][0], std=norms[0][1],
        # The longest first: one may hold another.
        special_strings=tuple(sorted(added, key=len, reverse=True)),
        suppress_tokens=tuple(sorted((never | end_ids(ckpt)) - {eos, None})),
        opens_thought=prompt.endswith("<think>\n"), files=small_files(ckpt),
        tool_call_format="xml" if "<function=" in prompt else "json",
        token_bytes=token_bytes(tokenizer), base=bases()[config.model_type])


def end_ids(ckpt):
    """Ids at which generation ends, by the checkpoint's generation_config.json."""
    path = os.path.join(ckpt, "generation_config.json")
    # One id, a list of ids, or null.
    ends = read_object(path).get("eos_token_id") if launch.is_file(path) else None
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    if not all(isinstance(end, int) for end in ends):
        raise launch.UserError(f"{path}: eos_token_id must be an id or a list of ids, got {ends}")
    return set(ends)


def token_bytes(tokenizer):
    """Byte-level BPE tokenizer -> [vocab] the bytes of each token, b"" for unused ids. Tags are
    searched in bytes, because a token may hold half a character or a third of `<answer>`."""
    # GPT-2's table writes every byte as a visible character: these 188 bytes as themselves, the
    # other 68 (blanks, control characters, ..) as the characters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    char_to_byte = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}
    # Added tokens are written as they are, not by the table.
    added, vocabulary = tokenizer.get_added_vocab(), tokenizer.get_vocab()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        plain = token in added or not all(c in char_to_byte for c in token)
        pieces[i] = token.encode() if plain else bytes(char_to_byte[c] for c in token)
    return pieces
