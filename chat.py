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

Reads the tokenizer, the processor and the configuration of a checkpoint folder; writes nothing.
"""
import codecs
import contextlib
import itertools
import json
import os
import re
from dataclasses import dataclass, field

import launch

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
    config: object  # transformers' configuration of the checkpoint
    base: object  # ModelFamily of its model_type, see BASES
    image_pad: int  # placeholder that vision tokens replace
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
    template_kwargs: dict  # {name: value}, which every rendering of the template shall know


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


def token_grid(codec, item):
    """VisionItem -> (rows, columns) of the vision tokens of each of its frames."""
    side = codec.patch * codec.merge  # pixels a side of the square that one token stands for
    return item.height // side, item.width // side


def vision_item(spec, frames):
    """A video item of the data and the decoded video.Frames -> VisionItem."""
    t, height, width, _ = frames.images.shape  # [T, H, W, 3]
    return VisionItem(dict(spec), frames.key, t, height, width, frames.seconds.tolist())


def token_bytes_of(codec, ids):
    """Ids -> the bytes of each; b"" for ids beyond the tokenizer, since vocabularies are padded."""
    return [codec.token_bytes[i] if i < len(codec.token_bytes) else b"" for i in ids]


def decode(codec, ids, keep_end=False):
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


def encode(codec, text):
    """Template text -> ids, split at guard marks. No BOS, no truncation."""
    # The tokenizer never sees the two halves of a guarded literal side by side.
    return [i for piece in text.split(GUARD)
            for i in codec.tokenizer(piece, add_special_tokens=False)["input_ids"]]


def apply_template(codec, messages, tools=None, generation=True):
    """Messages as `guard_messages` returns them -> text, by the checkpoint's own chat template."""
    # The template lies in a file of the processor's, or in tokenizer_config.json.
    owner = codec.processor if codec.processor.chat_template else codec.tokenizer
    return owner.apply_chat_template(messages, tools=tools, tokenize=False,
                                     add_generation_prompt=generation, **codec.template_kwargs)


def stamp_text(seconds, number, kind=None):
    """The text before a frame. kind None: `<12.5 seconds>`, as Qwen3-VL was trained. Other systems'
    agents use "clock": HH:MM:SS, "frame": `<frame3_time12.50s>`, or "none": no text."""
    if kind is None:
        return f"<{seconds:.1f} seconds>"
    if kind == "frame":
        return f"<frame{number}_time{seconds:.2f}s>"
    if kind == "clock":
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
    return ""


def content_of(message):
    """Content of a message as a list of pieces; a string becomes one piece."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def videos_in(messages):
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
            if not trusted:
                text = escape_special_tokens(codec, text)
            parts.append({"type": "text", "text": text})
            continue
        for piece in run:
            item = next(items)
            # The time stands before <|vision_start|>, where vLLM and transformers put it.
            for number, seconds in enumerate(item.seconds):
                stamp = stamp_text(seconds, number, piece.get("stamp"))
                parts.append({"type": "text", "text": stamp})
                parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def encode_prompt(codec, messages, items=(), tools=None):
    """Messages before the first assistant turn -> (expanded ids, compact ids).

    Expanded ids hold one placeholder per vision token: the trainer sees these. Compact ids hold one
    per frame: an engine is given these, and expands them to the same ids.
    """
    compact = encode(codec, apply_template(codec, guard_messages(codec, messages, items), tools))
    return expand(codec, compact, items), compact


def expand(codec, compact, items):
    """Ids with one placeholder per frame -> ids with one per vision token. Raises ValueError if the
    placeholders do not match the items.

    A frame of two tokens, as text:
        <0.5 seconds><|vision_start|><|image_pad|><|vision_end|>
     -> <0.5 seconds><|vision_start|><|image_pad|><|image_pad|><|vision_end|>
    """
    counts = []  # vision tokens of each frame
    for item in items:
        rows, columns = token_grid(codec, item)
        counts += [rows * columns for _ in range(item.frames)]
    places = compact.count(codec.image_pad)
    if places != len(counts):
        raise ValueError(f"{places} placeholders in the prompt, {len(counts)} frames")
    out = []
    rest = iter(counts)
    for i in compact:
        repeats = 1
        if i == codec.image_pad:
            repeats = next(rest)
        out += itertools.repeat(i, repeats)
    return out


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


def encode_chat(codec, messages, items=(), tools=None):
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
        mask += [int(assistant) for _ in new]
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
    recurrent: bool = False  # has gated-delta layers, whose states no cache of prefixes holds
    cpu_dtype: str = "float32"  # in which vLLM runs on a CPU
    keep_fp32: tuple = ()  # ends of the names of weights that stay fp32 in compute


# model_type of config.json -> ModelFamily. docs/recipe.md says why others are not among them.
BASES = {
    "qwen3_vl": ModelFamily("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    # vLLM's gated-delta kernels for CPUs know bf16 alone. exp(A_log) is the rate of forgetting: an
    # error of bf16 in it grows with the length of the sequence.
    "qwen3_5": ModelFamily("Qwen3_5ForConditionalGeneration", "qwen3_5", recurrent=True,
                           cpu_dtype="bfloat16", keep_fp32=(".A_log",)),
}


@contextlib.contextmanager
def as_user_error(ckpt, part):
    """An error that a library raises inside, for a file of a checkpoint, becomes a UserError: its
    own text in one line."""
    try:
        yield
    # A broken file makes tokenizers raise Exception itself, jinja2 and huggingface_hub classes of
    # their own, and transformers TypeError or KeyError. No narrower class covers all of these.
    except Exception as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise launch.UserError(f"checkpoint {ckpt}: its {part} cannot be used ({reason}); copy the "
                               "files beside the weights again") from e


def load_config(ckpt):
    """Checkpoint folder -> transformers' configuration. Raises UserError for a model that this code
    does not train."""
    launch.import_shim()
    launch.quiet_libraries()
    from transformers import AutoConfig

    with as_user_error(ckpt, "config.json"):
        # No code of a checkpoint is ever run.
        config = AutoConfig.from_pretrained(ckpt, trust_remote_code=False)
        with open(os.path.join(ckpt, "config.json"), encoding="utf-8") as file:
            text = json.dumps(json.load(file))
    # A kernel of attention with a slash in its name is a repository on the Hub, whose code
    # transformers would fetch and run with the model.
    if re.search(r'attn_implementation": (?:"[^"]*|\{[^}]*)/', text):
        raise launch.UserError(f"checkpoint {ckpt}: attn_implementation in config.json asks for "
                               "code from the Hub, which is never run; remove it")
    if config.model_type not in BASES:
        raise launch.UserError(f"checkpoint {ckpt}: model_type is {config.model_type}, this code "
                               f"trains {', '.join(BASES)}; docs/recipe.md says why")
    # transformers would load quantized weights, but they have no gradients.
    if getattr(config, "quantization_config", None):
        raise launch.UserError(f"checkpoint {ckpt}: its weights are quantized and cannot be "
                               "trained; give the BF16 checkpoint as published")
    return config


def load_codec(ckpt, template_kwargs=None):
    """Checkpoint folder -> ChatProcessor. template_kwargs: {name: value}, which every rendering of
    the template shall know; a name that the template does not read changes nothing."""
    config = load_config(ckpt)
    from transformers import AutoProcessor, GenerationConfig

    with as_user_error(ckpt, "tokenizer or processor"):
        processor = AutoProcessor.from_pretrained(ckpt, trust_remote_code=False)
        tokenizer = processor.tokenizer
        images = processor.image_processor
        vocabulary = tokenizer.get_vocab()  # token -> id, all of them
        eos = vocabulary["<|im_end|>"]
        never = {config.image_token_id, config.video_token_id, config.vision_start_token_id,
                 config.vision_end_token_id, vocabulary["<|im_start|>"]}
    # Published checkpoints end on two ids, and vLLM stops at either. A turn here ends in <|im_end|>
    # alone: the other id, if sampled, would stand in the turn as text.
    never.add(vocabulary.get("<|endoftext|>"))
    with contextlib.suppress(OSError):  # the file may be missing
        ends = GenerationConfig.from_pretrained(ckpt).eos_token_id
        never.update(ends if isinstance(ends, list) else [ends])
    # Control tokens and tags. The toy adds whole phrases as well, which are harmless in a question.
    added = []
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or str(token).startswith("<"):
            added.append(str(token))
    codec = ChatProcessor(
        tokenizer=tokenizer, processor=processor, config=config, base=BASES[config.model_type],
        image_pad=config.image_token_id, eos=eos, patch=images.patch_size, merge=images.merge_size,
        temporal=images.temporal_patch_size, mean=tuple(images.image_mean),
        std=tuple(images.image_std),
        # The longest first: one may hold another.
        special_strings=tuple(sorted(added, key=len, reverse=True)),
        suppress_tokens=tuple(sorted(never - {eos, None})), opens_thought=False,
        tool_call_format="json", token_bytes=token_bytes(tokenizer),
        template_kwargs=template_kwargs or {})
    # Instruct templates end the generation prompt in "assistant\n", Thinking ones in "<think>\n". A
    # template that declares tools shows how to call one.
    tool = {"type": "function", "function": {"name": "look", "description": "x", "parameters": {}}}
    with as_user_error(ckpt, "chat template"):
        prompt = apply_template(codec, [{"role": "user", "content": "x"}], [tool])
    if '"look"' not in prompt:
        raise launch.UserError(f"checkpoint {ckpt}: its chat template has no tools; copy its "
                               "base's")
    codec.opens_thought = prompt.endswith("<think>\n")
    if "<function=" in prompt:
        codec.tool_call_format = "xml"
    return codec


def token_bytes(tokenizer):
    """Byte-level BPE tokenizer -> [vocab] the bytes of each token, b"" for unused ids. Tags are
    searched in bytes, because a token may hold half a character or a third of `<answer>`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # The vocabulary writes every byte as one visible character.
    char_to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
    added = tokenizer.get_added_vocab()
    vocabulary = tokenizer.get_vocab()
    pieces = [b"" for _ in range(max(vocabulary.values()) + 1)]
    for token, i in vocabulary.items():
        # Added tokens are written as they are, not by the table.
        if token in added or not all(char in char_to_byte for char in token):
            pieces[i] = token.encode()
        else:
            pieces[i] = bytes(char_to_byte[char] for char in token)
    return pieces
