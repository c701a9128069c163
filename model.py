"""
model.py: the policy. Chat to token ids, packing, exact log-probs, FSDP2, checkpoints.

What this file computes, for a context c (prompt ids with vision tokens) and the tokens o_1 .. o_R sampled after it:

  logp_t  = log softmax((W h_{t-1} + b) / T)[o_t]         T = sampling temperature, b = -100 at ids nobody may sample
  H_t     = entropy of that same distribution             b keeps vision placeholders out of what the model writes

Samples that share a context are packed as ONE tree  [ c | o^1 | o^2 | .. | o^G ]. A token of o^i attends to c and to its
own branch, and has the positions it would have had alone, so log-probs and gradients are those of G separate sequences
while c (thousands of vision tokens) is computed once. Several trees fill one pack; trees do not see each other.

One construction of token ids serves SFT, RL and evaluation: prompt = template(messages before the first assistant turn)
with a generation prompt; then turn ids; then glue (end of turn, tool responses, next generation prompt), where the glue is
cut out of the template rendered on a dummy chat. Ids only ever grow: nothing sampled is decoded and encoded again.

Departures: the vision tower is frozen in every stage, so its features are computed once per distinct frame set and kept.

Legend: L tokens in a pack, N trained tokens, V vision tokens, D deepstack levels, H hidden size, T frames.
Reads and writes: checkpoint directories (`from_pretrained` layout) and `train_state/` beside them.

What a size takes on a GPU, before it is rented:  python model.py --plan 8B --gpus 8 --gpu-gb 80 --context 32768
"""
import argparse
import bisect
import codecs
import contextlib
import faulthandler
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

import video

GUARD = "\ue000"  # private-use character: marks where a literal in untrusted text must not become a special token
TURN = "\ue001"  # stands for an assistant turn while the template is rendered on a dummy chat


class UserError(Exception):
    """Bad input by the user: the scripts print it as one line on stderr and exit with code 2."""


class RankError(UserError):
    """Bad input that one rank alone has met (a chat of its own share): that rank says it."""


class RunError(Exception):
    """A run that cannot go on, met by all ranks alike (full disk, no finite gradient): one line on stderr, exit code 1."""


def printable(text):
    """Nothing a model or a data file wrote may steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


# ---------------------------------------------------------------------------------------------------------------------
# Starting up


def import_shim():
    """Make `import transformers` and `import vllm` safe beside a CPU build of torch. A no-op everywhere else.

    The package index's torchvision, torchaudio and torchcodec are CUDA builds: next to a CPU torch their libraries do
    not load, and torchvision's import then fails on two operators it expects to find. We never call either operator.
    """
    if torch.version.cuda or torch.version.hip or hasattr(import_shim, "library"):
        return
    import glob
    import importlib.util

    for name in ("torchcodec", "torchaudio"):
        sys.modules.setdefault(name, None)  # `import name` raises ImportError, which transformers treats as "not there"
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    try:
        libraries = glob.glob(os.path.join(os.path.dirname(spec.origin), "_C*.so"))
        for path in libraries:
            torch.ops.load_library(path)
        loaded = bool(libraries)
    except OSError:  # the CUDA build: libcudart is missing
        loaded = False
    if not loaded:
        import_shim.library = torch.library.Library("torchvision", "DEF")  # kept alive by this reference
        for op in ("nms", "qnms"):
            import_shim.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def quiet_libraries():
    """Keep the terminal for the run's own lines: no weight-loading bars, no deprecation notes of the libraries."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


def start_process_group(patience=1800.0):
    """Join the torchrun process group, or make one of a single process. -> (rank, world, device). patience: seconds, as `Watch.begin`
    has it; a collective waits a minute longer, so that the watch is the one to speak. 0 = a month."""
    from datetime import timedelta

    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        # Two spinning thread pools on shared cores cost a factor of ten: divide the cores between the ranks.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
        warnings.filterwarnings("ignore", message="The value of the smallest subnormal")  # numpy notices
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=patience + 60 if patience else 30 * 86400))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return rank, world, device


class Watch:
    """Ends a run that hangs, on every rank, with the stack of each.

    A rank that has not called `beat` for `patience` seconds, and a rank that dies of an error, say so in torchrun's store; every
    other rank reads that within a second, prints it and exits with code 3. Of a hang, all ranks print the stacks of their threads.
    A thread sees a main thread that waits in a collective. One that holds the interpreter stops this thread too: for that there is
    faulthandler's timer, up to a minute later. All clocks are monotonic: setting the machine's clock changes nothing.
    """

    def __init__(self):
        self.patience, self.store, self.thread, self.ended = 0.0, None, None, threading.Event()
        self.rank, self.key = int(os.environ.get("RANK", 0)), "paravt/fault/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def begin(self, patience):
        """patience: seconds between two beats at most; 0 = for ever. Call it once the process group stands."""
        import torch.distributed as dist

        self.patience = patience
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # a connection of its own: the process group's may be busy waiting
            self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self.beat()
        self.thread = threading.Thread(target=self.look, name="watch", daemon=True)
        self.thread.start()

    def beat(self):
        """This rank is alive: a phase has ended."""
        self.last = time.monotonic()
        if self.patience:
            faulthandler.dump_traceback_later(self.patience + min(60, self.patience), exit=True, file=sys.__stderr__)

    def look(self):
        while not self.ended.wait(1.0 if self.patience == 0 or self.patience > 10 else 0.1):
            silent, heard = time.monotonic() - self.last, self.heard()
            if heard:
                self.end(*heard)
            elif self.patience and silent > self.patience:
                why = f"rank {self.rank} has finished no phase for {silent:.0f} s (--patience)"
                self.tell(why, True)
                self.end(why, True)

    def heard(self):
        """What another rank said and whether it hangs, or None. A store that is gone is torchrun's business: it ends its processes itself."""
        try:
            return json.loads(self.store.get(self.key)) if self.store and self.store.check([self.key]) else None
        except RuntimeError:  # torch's DistError
            self.store = None

    def tell(self, why, hangs=False):
        with contextlib.suppress(RuntimeError):
            if self.store:
                self.store.set(self.key, json.dumps([why, hangs]))

    def end(self, why, hangs):
        if self.ended.is_set():
            return
        with tempfile.TemporaryFile("w+") as stacks:  # faulthandler writes word by word: several ranks at once would be unreadable
            if hangs:
                faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            print(f"{os.path.basename(sys.argv[0])}: stopped on rank {self.rank}: {printable(why)}\n{stacks.read()}", end="", file=sys.stderr, flush=True)
        time.sleep(3.0)  # the others hear it and print theirs, before torchrun sees the first exit and ends them all
        os._exit(3)

    def stop(self):
        self.ended.set()
        if self.thread:  # a thread inside the store while the interpreter ends would abort the process
            self.thread.join(10)
        faulthandler.cancel_dump_traceback_later()


def watched(main):
    """main(watch) -> main(): the watch ends with it, and an error of this rank alone is told to the others, who may be waiting for it."""
    def run():
        watch = Watch()
        try:
            main(watch)
        except BaseException as error:
            if not isinstance(error, (UserError, RunError)) or isinstance(error, RankError):
                watch.tell(f"rank {watch.rank} failed: {type(error).__name__}: {str(error)[:500]}")
            raise
        finally:
            watch.stop()

    return run


def resolve_checkpoint(path):
    """A checkpoint directory, or the run folder that holds one under `last` -> the directory `from_pretrained` opens.

    Raises UserError naming what is missing.
    """
    for candidate in (path, os.path.join(path, "last")):
        if os.path.isfile(os.path.join(candidate, "config.json")):
            for name in ("tokenizer.json", "preprocessor_config.json"):
                # transformers 5 saves the image processor inside processor_config.json
                alternatives = [name, "processor_config.json"] if name.startswith("pre") else [name]
                if not any(os.path.isfile(os.path.join(candidate, n)) for n in alternatives):
                    raise UserError(f"checkpoint {candidate}: {name} is missing; save the processor beside the weights")
            try:
                with open(os.path.join(candidate, "config.json")) as f:
                    json.load(f)
            except ValueError as e:
                raise UserError(f"checkpoint {candidate}: config.json is not JSON ({e})") from None
            check_weights(candidate)
            return os.path.realpath(candidate)
    raise UserError(f"checkpoint {path}: no config.json here nor in {path}/last; give a folder saved by sft.py, grpo.py or "
                    "save_pretrained")


def check_weights(folder):
    """Open every safetensors header: a missing shard or a truncated file is found now, not after the models are built. -> {weight: its file}."""
    from safetensors import SafetensorError, safe_open

    shards, where = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors")), {}
    index = os.path.join(folder, "model.safetensors.index.json")
    listed = os.path.isfile(index)
    if listed:
        with open(index) as f:
            where = json.load(f)["weight_map"]
        shards = sorted(set(where.values()))
    if not shards:
        raise UserError(f"checkpoint {folder}: no .safetensors file; only safetensors weights are loaded")
    for name in shards:
        try:
            with safe_open(os.path.join(folder, name), "pt") as f:
                if not listed:
                    where.update(dict.fromkeys(f.keys(), name))
        except (SafetensorError, OSError) as e:
            raise UserError(f"checkpoint {folder}: {name} cannot be read ({e}); copy it again") from None
    return where


# ---------------------------------------------------------------------------------------------------------------------
# Chat -> token ids


@dataclass
class Codec:
    """What turns chats and frames into ids and patches; read from the checkpoint, same for all stages."""

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
    temporal: int  # frames a patch spans (2); an image is repeated to fill it
    mean: tuple
    std: tuple
    markup: tuple  # literals of added tokens ("<|im_end|>", "<tool_call>", ..) that untrusted text must not become
    banned: tuple  # ids that are never sampled: vision placeholders, turn starts, every end but <|im_end|>
    opens_thought: bool  # the template's generation prompt ends in `<think>\n` (Thinking checkpoints)
    pieces: list  # [vocab] bytes of every token

    @property
    def pad(self):
        return self.image_pad if self.channel == "image" else self.video_pad

    @property
    def frames_per_item(self):
        """Frames that one run of placeholder tokens stands for."""
        return 1 if self.channel == "image" else self.temporal


def load_codec(ckpt, channel="image"):
    """Checkpoint directory -> Codec. channel: "image" | "video" (how frames enter the prompt)."""
    import_shim()
    quiet_libraries()
    from transformers import AutoConfig, AutoProcessor

    config = AutoConfig.from_pretrained(ckpt)
    if getattr(config, "model_type", None) != "qwen3_vl":
        raise UserError(f"checkpoint {ckpt}: model_type is {config.model_type!r}, this code trains qwen3_vl")
    processor = AutoProcessor.from_pretrained(ckpt)
    tokenizer, images = processor.tokenizer, processor.image_processor
    if not (processor.chat_template or tokenizer.chat_template):
        raise UserError(f"checkpoint {ckpt}: no chat template")
    videos = processor.video_processor
    if channel == "video" and (list(videos.image_mean), list(videos.image_std)) != (list(images.image_mean), list(images.image_std)):
        raise UserError(f"checkpoint {ckpt}: image and video processor normalise differently, and vLLM applies the image processor's to both; "
                        "use --channel image")
    one = tokenizer.convert_tokens_to_ids
    added = sorted((t for t in tokenizer.get_added_vocab() if t.startswith("<")), key=len, reverse=True)
    banned = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|endoftext|>"]
    # Published checkpoints end on two ids. vLLM stops at either; sampled, the other one would stand in the turn as text.
    banned = {i for t in banned if (i := tokenizer.get_vocab().get(t)) is not None} | (end_ids(ckpt) - {one("<|im_end|>")})
    codec = Codec(tokenizer=tokenizer, processor=processor, channel=channel, image_pad=config.image_token_id,
                 video_pad=config.video_token_id, vision_start=config.vision_start_token_id,
                 vision_end=config.vision_end_token_id, eos=one("<|im_end|>"), patch=images.patch_size,
                 merge=images.merge_size, temporal=images.temporal_patch_size, mean=tuple(images.image_mean),
                 std=tuple(images.image_std), markup=tuple(added), banned=tuple(sorted(banned)), opens_thought=False,
                 pieces=token_bytes(tokenizer))
    codec.opens_thought = template(codec, [{"role": "user", "content": "x"}]).endswith("<think>\n")
    return codec


def end_ids(ckpt):
    """Ids at which generation ends, as generation_config.json says."""
    path = os.path.join(ckpt, "generation_config.json")
    if not os.path.isfile(path):
        return set()
    with open(path) as f:
        ends = json.load(f).get("eos_token_id")
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def token_bytes(tokenizer):
    """Byte-level BPE tokenizer -> list of bytes, one per id: the bytes that token writes (b"" for unused ids).

    Tag positions must be found on bytes: one token may hold half of a UTF-8 character or a third of `<answer>`.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte <-> character table
    char_to_byte = {chr(b): b for b in visible}
    char_to_byte.update({chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in visible)})
    added = tokenizer.get_added_vocab()
    vocab = tokenizer.get_vocab()
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if token in added or any(c not in char_to_byte for c in token):
            pieces[i] = token.encode("utf-8")
        else:
            pieces[i] = bytes(char_to_byte[c] for c in token)
    return pieces


def pieces_of(codec, ids):
    """Ids -> list of the bytes that each one writes; b"" for ids beyond the tokenizer (a padded vocabulary)."""
    return [codec.pieces[i] if i < len(codec.pieces) else b"" for i in ids]


def decode(codec, ids, keep_special=False):
    """Sampled ids -> text for parsing and logs. The turn end is dropped unless keep_special."""
    ids = [i for i in ids if keep_special or i != codec.eos]
    return b"".join(pieces_of(codec, ids)).decode("utf-8", errors="replace")


def text_pieces(codec, ids):
    """Sampled ids -> the text that each one completes; joined they are `decode` of the ids. A token that ends within a character adds nothing yet."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(b"" if i == codec.eos else piece) for i, piece in zip(ids, pieces_of(codec, ids))]
    if pieces:
        pieces[-1] += decoder.decode(b"", True)
    return pieces


def guard(codec, text, literals=None):
    """Mark every special-token literal in untrusted text, so that `encode` gives it plain tokens. literals: None = all of them.

    A question that contains "<|im_end|>" must not end the turn. The mark splits the literal for the tokenizer and is
    never encoded itself: the ids decode to the very text that was given.
    """
    text = text.replace(GUARD, "").replace(TURN, "")
    for literal in codec.markup if literals is None else literals:
        text = text.replace(literal, literal[0] + GUARD + literal[1:])
    return text


def encode(codec, text):
    """Template text -> ids; splits at guard marks. No BOS, no truncation."""
    ids = []
    for piece in text.split(GUARD):
        ids += codec.tokenizer(piece, add_special_tokens=False)["input_ids"]
    return ids


@dataclass
class VisionItem:
    """The frames behind one video in a context: enough to load them again and to find their features."""

    spec: dict  # {"video": path, "frames": K} or {"video": path, "start": s, "end": e, ...}: what video.load reads
    key: str  # identity of the frame set
    frames: int  # T
    height: int  # pixels
    width: int
    seconds: list  # [T]


def vision_item(spec, frames):
    t, height, width, _ = frames.images.shape
    return VisionItem(dict(spec), frames.key, t, height, width, [float(s) for s in frames.seconds])


def tokens_per_item(codec, item):
    """Placeholder tokens one frame (channel image) or one frame pair (channel video) becomes."""
    side = codec.patch * codec.merge
    return (item.height // side) * (item.width // side)


def frame_times(codec, item):
    """Seconds written before each run of placeholders: a frame's own, or the mean of a pair's first and last."""
    step, seconds = codec.frames_per_item, list(item.seconds)
    seconds += [seconds[-1]] * (-len(seconds) % step)  # an odd count repeats its last frame, as the processor does
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]


def template(codec, messages, tools=None, generation=True):
    """Render messages (content strings) with the checkpoint's own chat template -> text."""
    owner = codec.processor if codec.processor.chat_template else codec.tokenizer
    return owner.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation)


def stamp_text(seconds, number, kind=None):
    """Text before a frame. None: `<12.5 seconds>`, as Qwen3-VL was trained; other systems' agents: "clock" HH:MM:SS, "frame"
    `<frame3_time12.50s>`, "none" no text."""
    whole = int(seconds)
    return {None: f"<{seconds:.1f} seconds>", "clock": f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}",
            "frame": f"<frame{number}_time{seconds:.2f}s>", "none": ""}[kind]


def content_text(codec, message, items):
    """Content of one message -> (parts for the template, [VisionItem]). Frames expand to stamp + image.

    items: iterator over the VisionItems of the chat's videos, in order.
    """
    trusted = message["role"] == "system"  # our own prompt names the tags; everything else is data
    clean = (lambda s: s) if trusted else (lambda s: guard(codec, s))
    if isinstance(message["content"], str):
        return [{"type": "text", "text": clean(message["content"])}], []
    parts, used = [], []
    for piece in message["content"]:
        if piece["type"] == "text" and piece.get("trusted"):  # tags that we put around data
            parts.append({"type": "text", "text": piece["text"], "trusted": True})
            continue
        if piece["type"] == "text":
            # Cleaned together with the text before it: a literal may be spread over two pieces.
            joins = parts and parts[-1]["type"] == "text" and not parts[-1].get("trusted")
            parts.append({"type": "text", "text": clean((parts.pop()["text"] if joins else "") + piece["text"])})
            continue
        item = next(items)
        used.append(item)
        if codec.channel == "image":
            # The time stands before <|vision_start|>, as vLLM and transformers put it for native video.
            for number, seconds in enumerate(frame_times(codec, item)):
                stamp = stamp_text(seconds, number, piece.get("stamp"))
                parts += [*([{"type": "text", "text": stamp}] if stamp else []), {"type": "image"}]
        else:
            parts.append({"type": "video"})
    return parts, used


def render(codec, messages, items=()):
    """Messages -> (messages as the template takes them, [VisionItem] in order): text guarded, frames as times and placeholders."""
    items, used, rendered = iter(items), [], []
    for message in messages:
        parts, new = content_text(codec, message, items)
        text_only = all(p["type"] == "text" for p in parts)
        rendered.append({"role": message["role"], "content": "".join(p["text"] for p in parts) if text_only else parts})
        used += new
    return rendered, used


def encode_prompt(codec, messages, items=(), tools=None):
    """Messages before the first assistant turn -> (ids, expanded; compact ids; [VisionItem]).

    Expanded ids hold one placeholder per vision token (what the trainer sees), compact ids one per frame or video (what
    an engine is given and expands itself). The two are tested equal to what vLLM makes of them.
    """
    rendered, used = render(codec, messages, items)
    compact = encode(codec, template(codec, rendered, tools))
    return expand(codec, compact, used), compact, used


def expand(codec, compact, items):
    """One placeholder per frame (or video) -> one per vision token; raises ValueError when the counts disagree."""
    out, position = [], 0
    if codec.channel == "image":
        sizes = iter([tokens_per_item(codec, item) for item in items for _ in range(item.frames)])
        for i in compact:
            out += [i] * next(sizes, 0) if i == codec.image_pad else [i]
        wanted = sum(item.frames for item in items)
    else:
        # <|vision_start|><|video_pad|><|vision_end|> becomes `<t seconds>` + one such triple for each frame pair.
        queue, wanted = iter(items), len(items)
        while position < len(compact):
            i = compact[position]
            if compact[position:position + 3] == [codec.vision_start, codec.video_pad, codec.vision_end]:
                item = next(queue, None)
                for seconds in frame_times(codec, item) if item else []:
                    out += encode(codec, f"<{seconds:.1f} seconds>") + [codec.vision_start]
                    out += [codec.video_pad] * tokens_per_item(codec, item) + [codec.vision_end]
                position += 3
            else:
                out.append(i)
                position += 1
    found = compact.count(codec.pad)
    if found != wanted:
        raise ValueError(f"{found} vision placeholders in the prompt for {wanted} {'frames' if codec.channel == 'image' else 'videos'}")
    return out


def think_prefix_ids(codec, prompt_ids):
    """The forced `<think>\\n`; empty when the template's generation prompt already opens a thought."""
    prefix = encode(codec, "<think>\n")
    return [] if prompt_ids[-len(prefix):] == prefix else prefix


def turn_ids(codec, text, prompt_ids):
    """An assistant turn as it is written in data -> ids behind `prompt_ids`, the ids that a rollout would hold.

    `<think>` is forced in rollouts as `<think>\\n`, ids of its own, so it is encoded apart, whether or not data has the newline. Where the
    template has opened a thought, a turn without one closes it first. Control tokens spelled in the text stay text.
    """
    ids = []
    if text.startswith("<think>"):
        ids, text = think_prefix_ids(codec, prompt_ids), text.removeprefix("<think>").removeprefix("\n")
    elif codec.opens_thought:
        text = "</think>\n\n" + text
    control = [codec.tokenizer.convert_ids_to_tokens(i) for i in (*codec.banned, codec.eos)]
    return ids + encode(codec, guard(codec, text, control)) + [codec.eos]


def glue_ids(codec, messages, ended, items=()):
    """Compact ids between two sampled turns: end of turn, all responses as the template writes them, next generation prompt.

    messages: the tool (or user) messages of this turn, items: the VisionItems of their frames. ended: the turn's last sampled
    id was the end-of-turn token; when it was cut off instead, the end-of-turn token is inserted here (unsampled, so not trained on).
    """
    dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}, *render(codec, messages, items)[0]]
    text = template(codec, dummy).split(TURN, 1)[1]
    ids = encode(codec, text)
    if ids[0] != codec.eos:
        raise UserError("the chat template does not end an assistant turn with <|im_end|>")
    return ids[1:] if ended else ids


@dataclass
class Sequence:
    """One agent context: expanded ids, mask of trained (sampled) ids, the frames behind it."""

    ids: list
    mask: list
    vision: list = field(default_factory=list)


def encode_chat(codec, messages, items=(), tools=None):
    """A whole conversation with assistant turns -> Sequence; mask 1 on assistant tokens and their turn ends.

    Built from the same three pieces as a rollout (prompt, turns, glue), so SFT teaches exactly the ids RL will see.
    """
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    ids, _, vision = encode_prompt(codec, messages[:first], items, tools)
    ids, mask = list(ids), [0] * len(ids)
    position = first
    while position < len(messages):
        content = messages[position]["content"]
        text = content if isinstance(content, str) else "".join(p["text"] for p in content)
        turn = turn_ids(codec, text, ids)
        ids, mask = ids + turn, mask + [1] * len(turn)
        position += 1
        replies = []
        while position < len(messages) and messages[position]["role"] != "assistant":
            reply = messages[position]["content"]
            replies.append({"role": messages[position]["role"],
                            "content": reply if isinstance(reply, str) else "".join(p["text"] for p in reply)})
            position += 1
        if replies:
            glue = glue_ids(codec, replies, ended=True)
            ids, mask = ids + glue, mask + [0] * len(glue)
    return Sequence(ids, mask, vision)


# ---------------------------------------------------------------------------------------------------------------------
# Frames -> vision tensors


def patchify(codec, images):
    """uint8 frames [T, H, W, 3] -> (patches [T' * gh * gw, 3 * temporal * patch^2] float32, grids [n, 3]).

    The order of patches is the processor's: merge x merge neighbours are consecutive. Tested equal to it.
    """
    t, height, width, _ = images.shape
    x = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).float() / 255.0  # [T, 3, H, W]
    x = (x - torch.tensor(codec.mean)[:, None, None]) / torch.tensor(codec.std)[:, None, None]
    if codec.channel == "image":
        x = x[:, None].expand(t, codec.temporal, 3, height, width)  # an image fills the temporal patch by repetition
    else:
        x = torch.cat([x, x[-1:].expand(-t % codec.temporal, 3, height, width)])
        x = x.reshape(-1, codec.temporal, 3, height, width)
    n, p, m = x.shape[0], codec.patch, codec.merge
    gh, gw = height // p, width // p
    x = x.reshape(n, codec.temporal, 3, gh // m, m, p, gw // m, m, p)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(n * gh * gw, -1)
    grids = [[1, gh, gw]] * n if codec.channel == "image" else [[n, gh, gw]]
    return x, torch.tensor(grids)


class VisionFeatures:
    """Features of the frozen tower, once per distinct frame set, bounded by bytes (least recently used goes first)."""

    def __init__(self, visual, codec, load, max_bytes=2**30):
        """load: VisionItem spec -> video.Frames, called only when the features are not here."""
        self.visual, self.codec, self.load, self.max_bytes = visual, codec, load, max_bytes
        self.cache, self.bytes, self.computed = OrderedDict(), 0, 0

    @torch.no_grad()
    def __call__(self, item):
        """VisionItem -> [vision tokens, 1 + D, H]: the tower's output, then its deepstack levels."""
        if item.key in self.cache:
            self.cache.move_to_end(item.key)
            return self.cache[item.key]
        frames = self.load(item.spec)
        if frames.images.shape[:3] != (item.frames, item.height, item.width) or list(frames.seconds) != list(item.seconds):
            raise ValueError(f"{item.spec['video']}: the file changed since its prompt was built")
        weight = next(self.visual.parameters())
        patches, grids = patchify(self.codec, frames.images)
        out = self.visual(patches.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
        features = torch.stack([out.pooler_output, *out.deepstack_features], 1)
        self.cache[item.key] = features
        self.computed += 1
        self.bytes += features.nbytes
        while self.bytes > self.max_bytes and len(self.cache) > 1:
            self.bytes -= self.cache.popitem(last=False)[1].nbytes
        return features


# ---------------------------------------------------------------------------------------------------------------------
# Packing


@dataclass
class Span:
    """A run of ids; mask 1 = trained; values: named per-token numbers, used where mask is 1."""

    ids: list
    mask: list
    values: dict = field(default_factory=dict)


@dataclass
class Tree:
    """A context and the responses that continue it. Without branches: a plain sequence."""

    prefix: Span
    vision: list = field(default_factory=list)
    branches: list = field(default_factory=list)

    def __len__(self):
        return len(self.prefix.ids) + sum(len(b.ids) for b in self.branches)


@dataclass
class Pack:
    ids: torch.Tensor  # [L]
    positions: torch.Tensor  # [4, 1, L] text position, then time/height/width of Qwen3-VL's interleaved mrope
    tree: torch.Tensor  # [L] which tree a token belongs to
    branch: torch.Tensor  # [L] 0 in the prefix, 1.. in branches
    source: torch.Tensor  # [N] position whose hidden state predicts the trained token
    target: torch.Tensor  # [N] id of the trained token
    values: dict  # name -> [N]
    vision: list  # [VisionItem] in the order of the placeholders
    layout: list  # [(start, prefix length, [branch lengths])]


def rope_positions(codec, ids, items):
    """Expanded ids -> (positions [3, L], the next free position). Qwen3-VL's rule: text advances all three axes by one,
    a frame of gh x gw merged patches keeps one time step and advances by max(gh, gw)."""
    ids = np.asarray(ids)
    positions = np.empty((3, len(ids)), np.int64)
    side = codec.patch * codec.merge
    sizes = [(i.height // side, i.width // side) for i in items for _ in frame_times(codec, i)]
    at, cursor, current = np.flatnonzero(ids == codec.pad), 0, 0
    hits = 0
    for rows, columns in sizes:
        start = at[hits]
        text = start - cursor
        positions[:, cursor:start] = current + np.arange(text)
        current += text
        n = rows * columns
        if not (ids[start:start + n] == codec.pad).all():
            raise ValueError("vision placeholders do not match the frames of this context")
        positions[0, start:start + n] = current
        positions[1, start:start + n] = current + np.repeat(np.arange(rows), columns)
        positions[2, start:start + n] = current + np.tile(np.arange(columns), rows)
        current, cursor, hits = current + max(rows, columns), start + n, hits + n
    if hits != len(at):
        raise ValueError(f"{len(at)} vision placeholders, {hits} vision tokens")
    positions[:, cursor:] = current + np.arange(len(ids) - cursor)
    return positions, current + len(ids) - cursor


def pack_trees(codec, trees):
    """Trees -> one Pack. Every trained token is predicted from its predecessor in its own sequence: the first token of
    a branch from the last token of the prefix."""
    ids, positions, text, tree, branch, source, target, layout, vision = [], [], [], [], [], [], [], [], []
    values = {}

    def add(span, start, before, tree_index, branch_index):
        tree.append(np.full(len(span.ids), tree_index))
        branch.append(np.full(len(span.ids), branch_index))
        ids.append(np.asarray(span.ids, np.int64))
        trained = np.flatnonzero(span.mask)
        source.append(np.where(trained == 0, before, start + trained - 1))
        target.append(ids[-1][trained])
        for name, numbers in span.values.items():
            values.setdefault(name, []).append(np.asarray(numbers, np.float32)[trained])

    start = 0
    for index, t in enumerate(trees):
        p = len(t.prefix.ids)
        if t.prefix.mask and t.prefix.mask[0]:
            raise ValueError("the first token of a context has no predecessor and cannot be trained on")
        add(t.prefix, start, 0, index, 0)
        prefix_positions, following = rope_positions(codec, t.prefix.ids, t.vision)
        positions.append(prefix_positions)
        text.append(np.arange(p))
        cursor = start + p
        for number, b in enumerate(t.branches):
            add(b, cursor, start + p - 1, index, number + 1)
            n = len(b.ids)
            positions.append(np.broadcast_to(following + np.arange(n), (3, n)))
            text.append(p + np.arange(n))
            cursor += n
        layout.append((start, p, [len(b.ids) for b in t.branches]))
        vision += t.vision
        start = cursor
    cat = np.concatenate
    grid = cat([cat(text)[None], cat(positions, 1)])[:, None]  # [4, 1, L]
    return Pack(torch.from_numpy(cat(ids)), torch.from_numpy(grid), torch.from_numpy(cat(tree)),
                torch.from_numpy(cat(branch)), torch.from_numpy(cat(source)), torch.from_numpy(cat(target)),
                {k: torch.from_numpy(cat(v)) for k, v in values.items()}, vision, layout)


def fill_packs(trees, budget):
    """First-fit-decreasing packing of trees into lists of at most `budget` tokens.

    A tree over the budget is split by branches (its prefix is then computed more than once); a single sequence over the
    budget gets a pack of its own.
    """
    pieces = []
    for t in trees:
        piece = Tree(t.prefix, t.vision, [])
        for b in t.branches:
            if piece.branches and len(piece) + len(b.ids) > budget:
                pieces.append(piece)
                # The prefix's own trained tokens, if any, count in the first piece only.
                piece = Tree(Span(t.prefix.ids, [0] * len(t.prefix.ids), t.prefix.values), t.vision, [])
            piece.branches.append(b)
        pieces.append(piece)
    packs = []  # [[room, [trees]]]
    for piece in sorted(pieces, key=len, reverse=True):
        for entry in packs:
            if entry[0] >= len(piece):
                entry[0] -= len(piece)
                entry[1].append(piece)
                break
        else:
            packs.append([budget - len(piece), [piece]])
    return [members for _, members in packs]


def even_packs(codec, packs):
    """This rank's packs as (pack, 1.0), then as many spare ones (pack, 0.0) as it takes for all ranks to run equally many.

    Every forward under FSDP is a chain of collectives: a rank that runs fewer of them hangs all others.
    """
    import torch.distributed as dist

    most = torch.tensor(len(packs))  # in host memory: no GPU is waited for
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    spare = pack_trees(codec, [Tree(Span([codec.eos, codec.eos], [0, 1]))])
    return [(pack, 1.0) for pack in packs] + [(spare, 0.0)] * (int(most.item()) - len(packs))


def sent(tensor, device):
    """A tensor in host memory -> on device. To a GPU from pinned memory: the host does not wait for what the GPU has still to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Attention over a pack


def choose_attention(device, kind="auto"):
    """-> "flash" | "varlen" | "sdpa" | "parts": how plain sequences of a pack attend. Trees use FlexAttention on GPU, except under "sdpa".

    "auto": flash-attn when importable, else torch's own varlen kernel, on GPU; on CPU `PartsAttention`, where "sdpa" is the plain way.
    """
    import importlib.util

    if kind != "auto":
        if kind != "sdpa" and (kind == "parts") == (device.type == "cuda"):
            raise UserError(f"--attention {kind}: not on {device.type}; auto takes what is there")
        return kind
    if device.type != "cuda":
        return "parts"
    if importlib.util.find_spec("flash_attn_2_cuda"):  # the kernels; a folder named flash_attn may be anything
        return "flash"
    return "varlen" if importlib.util.find_spec("torch.nn.attention.varlen") else "sdpa"


@dataclass
class AttentionPlan:
    """What every layer of one forward shares, built once per pack."""

    kind: str
    ends: torch.Tensor = None  # [sequences + 1] where plain sequences end
    longest: int = 0
    mask: object = None  # FlexAttention's block mask, or sdpa's {(prefix, branch): [branch, prefix + branch]}
    layout: list = None


def visible_pairs(layout, length, size):
    """Pack's layout -> [blocks, blocks]: how many (query, key) pairs of each pair of blocks attend; blocks of `size` tokens."""
    edges = size * np.arange(-(-length // size) + 1)
    pairs = np.zeros((len(edges) - 1,) * 2, np.int64)

    def share(a, b):  # tokens a..b -> the blocks they lie in, and how many of them lie in each
        blocks = slice(a // size, -(-b // size))
        return blocks, np.diff(edges[blocks.start:blocks.stop + 1].clip(a, b))

    for start, p, branches in layout:
        cuts = np.cumsum([start, p, *branches]).tolist()
        prefix, of_prefix = share(start, start + p)
        for number, (a, b) in enumerate(zip(cuts, cuts[1:])):
            own, n = share(a, b)
            pairs[own, own] += np.tril(np.outer(n, n), -1) + np.diag(n * (n + 1) // 2)  # causal with itself
            if number:  # a branch also sees the whole prefix
                pairs[own, prefix] += np.outer(n, of_prefix)
    return pairs


def block_mask(pack, device, size=128):
    """Pack -> FlexAttention's BlockMask, counted from the layout. torch's create_block_mask would make [L, L] masks to count in:
    some GB at 32k tokens. size: tokens of a block, the kernel's own."""
    from torch.nn.attention.flex_attention import BlockMask

    tree, branch = sent(pack.tree, device), sent(pack.branch, device)

    def visible(_batch, _head, q, k):  # asked inside blocks that are seen in part
        return (q >= k) & (tree[q] == tree[k]) & ((branch[k] == 0) | (branch[k] == branch[q]))

    pairs = visible_pairs(pack.layout, len(pack.ids), size)
    full = pairs == size * size  # a ragged last block never is
    lists = []
    for kind in ((pairs > 0) & ~full, full):  # blocks seen in part, blocks seen whole: how many a row, and which, theirs first
        order = np.argsort(~kind, 1, kind="stable")
        lists += [sent(torch.from_numpy(x.astype(np.int32))[None, None], device) for x in (kind.sum(1), order)]
    return BlockMask.from_kv_blocks(*lists, size, visible, (len(tree), len(tree)))


def attention_plan(pack, kind, device):
    """Pack, kernel's name -> AttentionPlan."""
    branched = any(branches for _, _, branches in pack.layout)
    if kind in ("flash", "varlen") and not branched:
        lengths = [p for _, p, _ in pack.layout]
        ends = sent(torch.tensor(np.cumsum([0] + lengths), dtype=torch.int32), device)
        return AttentionPlan(kind, ends, max(lengths))
    if kind != "sdpa" and branched and device.type == "cuda":
        return AttentionPlan("flex", mask=block_mask(pack, device))
    if kind == "parts":
        return AttentionPlan("parts", layout=pack.layout)
    # One sdpa call per prefix (causal) and one per branch: keys are [prefix | branch], mask is the lower-right causal one.
    masks = {(p, r): torch.ones(r, p + r, dtype=torch.bool, device=device).tril(p)
             for _, p, branches in pack.layout for r in branches}
    return AttentionPlan("sdpa", mask=masks, layout=pack.layout)


def packed_attention(module, query, key, value, attention_mask=None, scaling=None, plan=None, **_):
    """The attention function transformers calls in every decoder layer. query [1, heads, L, d] -> ([1, L, heads, d], None)."""
    kind = plan.kind
    if kind in ("flash", "varlen"):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, d]
        ends, longest = plan.ends, plan.longest
        if kind == "flash":
            from flash_attn import flash_attn_varlen_func

            out = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, softmax_scale=scaling, causal=True)
        else:
            from torch.nn.attention.varlen import varlen_attn

            # A window that reaches back without limit and forward by nothing is the causal mask.
            out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0),
                              enable_gqa=q.shape[1] != k.shape[1])
        return out[None], None
    if kind == "flex":
        out = compiled_flex()(query, key, value, block_mask=plan.mask, scale=scaling,
                              enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # CPU sdpa would fall to the slow path with enable_gqa
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if kind == "parts":
        return PartsAttention.apply(query, key, value, plan.layout, scaling).transpose(1, 2), None
    out = []
    for start, p, branches in plan.layout:
        q, k, v = (x[:, :, start:start + p] for x in (query, key, value))
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
        at = start + p
        for r in branches:
            both = [torch.cat([prefix, x[:, :, at:at + r]], 2) for prefix, x in ((k, key), (v, value))]
            out.append(F.scaled_dot_product_attention(query[:, :, at:at + r], *both, attn_mask=plan.mask[p, r],
                                                      scale=scaling))
            at += r
    return torch.cat(out, 2).transpose(1, 2), None


class PartsAttention(torch.autograd.Function):
    """Attention of trees on CPU without a mask and without copies of the prefix: all branches ask the prefix at once, then each itself.

      o = w o_prefix + (1 - w) o_own,  w = exp(lse_prefix - lse),  lse = log(exp(lse_prefix) + exp(lse_own))       lse: log of the softmax's sum

    Backward asks the same kernel with the whole o and lse, for which its formula gives each part's share of the gradient (as in ring attention).
    query, key, value [1, heads, L, d]; layout: Pack's. -> [1, heads, L, d]
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def part(a, b, c, d, causal):  # queries a..b, keys c..d -> (out, lse)
            return attend(query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], 0.0, causal, scale=scale)

        found = []
        for start, p, branches in layout:
            cut, ends = start + p, np.cumsum([start + p, *branches]).tolist()
            found.append(part(start, cut, start, cut, True))
            if branches:
                across, lse_across = part(cut, ends[-1], start, cut, False)
                own, lse_own = (torch.cat(x, 2) for x in zip(*(part(a, b, a, b, True) for a, b in zip(ends, ends[1:]))))
                weight = torch.sigmoid(lse_across - lse_own)[..., None].to(own.dtype)
                found.append((own.lerp(across, weight), torch.logaddexp(lse_across, lse_own)))
        out, lse = (torch.cat(x, 2) for x in zip(*found))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]

        def part(a, b, c, d, causal, first_q, first_k):  # adds to the gradients of queries a..b and keys c..d, or is their first share
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, a:b], query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], out[:, :, a:b], lse[:, :, a:b], 0.0, causal, scale=ctx.scale)
            for whole, share, begin, end, first in zip(grads, shares, (a, c, c), (b, d, d), (first_q, first_k, first_k)):
                whole[:, :, begin:end].copy_(share) if first else whole[:, :, begin:end].add_(share)

        for start, p, branches in ctx.layout:
            cut, ends = start + p, np.cumsum([start + p, *branches]).tolist()
            part(start, cut, start, cut, True, True, True)
            if branches:
                part(cut, ends[-1], start, cut, False, True, False)
            for a, b in zip(ends, ends[1:]):
                part(a, b, a, b, True, False, True)
        return (*grads, None, None)


def frames_attention(module, query, key, value, attention_mask=None, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
    """The vision tower's attention: each frame attends to itself. query [1, heads, L, d] -> ([1, L, heads, d], None).

    `VisionFeatures` gives the tower the frames of one item, which are of one size: a batch for one sdpa call. transformers' own path for
    sdpa is a loop over frames in every layer; it hands over all frames at once only to a name with "flash" in it.
    """
    frames = len(cu_seq_lens_q) - 1
    if frames * int(max_length_q) != query.shape[2]:
        raise ValueError("the frames of one call of the tower have to be of one size")
    q, k, v = (x[0].unflatten(1, (frames, -1)).transpose(0, 1) for x in (query, key, value))  # [frames, heads, L / frames, d]
    out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)[None], None


def compiled_flex():
    """FlexAttention is only fast (and only memory-safe) compiled; compiled once per process."""
    if not hasattr(compiled_flex, "function"):
        from torch.nn.attention.flex_attention import flex_attention

        compiled_flex.function = torch.compile(flex_attention, dynamic=True)
    return compiled_flex.function


# ---------------------------------------------------------------------------------------------------------------------
# The policy


def chunk_logprobs(hidden, weight, target, bias, temperature):
    """hidden [n, H] -> (log-prob of target [n], entropy [n]), both of the distribution that is sampled from, fp32."""
    logits = (F.linear(hidden, weight).float() + bias) / temperature  # [n, vocab]
    norm = logits.logsumexp(-1)
    logp = logits.gather(1, target[:, None])[:, 0] - norm
    with torch.no_grad():  # entropy is logged, never trained
        entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return logp, entropy


def token_logprobs(hidden, weight, target, banned=(), temperature=1.0, chunk=1024):
    """Vocabulary projection in chunks, recomputed in backward: never a [tokens, 151936] fp32 tensor.

    hidden [N, H], weight [vocab, H], target [N] -> (logp [N], entropy [N]) fp32.
    """
    from torch.utils.checkpoint import checkpoint

    bias = torch.zeros(weight.shape[0], device=hidden.device)
    bias.index_fill_(0, sent(torch.tensor(list(banned), dtype=torch.long), hidden.device), -100.0)  # the same bias the engine samples under
    out = []
    for h, y in zip(hidden.split(chunk), target.split(chunk)):
        if torch.is_grad_enabled():
            out.append(checkpoint(chunk_logprobs, h, weight, y, bias, temperature, use_reentrant=False))
        else:
            out.append(chunk_logprobs(h, weight, y, bias, temperature))
    return tuple(torch.cat(x) for x in zip(*out))


class Policy(torch.nn.Module):
    """A Qwen3-VL and the forward of all training stages: pack in, log-probs of its trained tokens out."""

    def __init__(self, hf, codec, attention="auto"):
        super().__init__()
        self.hf, self.banned = hf, codec.banned
        self.pads = (codec.image_pad, codec.video_pad)
        self.attention = attention

    def forward(self, pack, vision, temperature=1.0, chunk=1024):
        """pack: Pack; vision: VisionFeatures -> (logp [N], entropy [N]) of pack.target, fp32.

        The host waits for the GPU in two places: where frames are new (the tower reads their sizes), and in transformers' sum of deepstack
        features, which asks for the positions of a boolean mask, once a level.
        """
        text = self.hf.model.language_model
        device = text.embed_tokens.weight.device
        ids, positions, source, target = (sent(x, device) for x in (pack.ids, pack.positions, pack.source, pack.target))
        features = torch.cat([vision(item) for item in pack.vision]) if pack.vision else None  # [V, 1 + D, H]
        seen = self.placeholders(pack.ids, features)  # [L], in host memory
        seen = None if seen is None else sent(seen, device)
        embeds, levels = self.embed(ids, seen, features)  # [L, H], D x [V, H]
        plan = attention_plan(pack, choose_attention(device, self.attention), device)
        hidden = text(inputs_embeds=embeds[None], position_ids=positions, use_cache=False,
                      visual_pos_masks=None if seen is None else seen[None], deepstack_visual_embeds=levels,
                      plan=plan).last_hidden_state[0]  # [L, H]
        return token_logprobs(hidden[source], self.hf.lm_head.weight, target, self.banned, temperature, chunk)

    def placeholders(self, ids, features):
        """ids in host memory, features [V, 1 + D, H] or None -> mask of the ids that stand for vision tokens, or None. Raises ValueError when
        they are not V."""
        if features is None:
            return None
        seen = (ids == self.pads[0]) | (ids == self.pads[1])
        if int(seen.sum()) != len(features):
            raise ValueError(f"{int(seen.sum())} vision placeholders for {len(features)} vision tokens")
        return seen

    def embed(self, ids, seen, features):
        """ids [..., n], seen: mask of vision positions, features [V, 1 + D, H] or None -> (embeddings, deepstack levels)."""
        embeds = self.hf.model.language_model.embed_tokens(ids)
        if features is None:
            return embeds, None
        features = features.to(embeds.device, embeds.dtype)
        return embeds.masked_scatter(seen[..., None], features[:, 0]), list(features[:, 1:].unbind(1))

    def step(self, ids, positions, seen, features, mask, cache):
        """One decoding forward for `generate`: ids [B, n] -> (logits of the last position [B, vocab] fp32, cache). A method
        of its own so that FSDP gathers the root's weights around it."""
        text, embeds, levels = self.hf.model.language_model, *self.embed(ids, seen, features)
        packed, text.config._attn_implementation = text.config._attn_implementation, "sdpa"  # a padded batch, not a pack
        try:
            out = text(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=True, past_key_values=cache,
                       visual_pos_masks=seen, deepstack_visual_embeds=levels)
        finally:
            text.config._attn_implementation = packed
        return F.linear(out.last_hidden_state[:, -1], self.hf.lm_head.weight).float(), out.past_key_values


@torch.no_grad()
def generate(policy, codec, vision, prompts, max_new_tokens, temperature=0.0, seeds=None, lockstep=False):
    """Plain left-padded batch decoding with a KV cache: the reference sampler, and the one used where vLLM is not.

    prompts: list of (expanded ids, [VisionItem]); max_new_tokens and temperature: one number or one per prompt; seeds: one
    int per prompt (own generator each, so a sample does not depend on what it was batched with), None = no seeding.
    lockstep: every rank runs as many steps as the longest (needed while the policy is sharded).
    -> list of (sampled ids, log-probs); a sample ends with the end-of-turn id unless it was cut off.
    """
    import torch.distributed as dist
    from transformers import DynamicCache

    text = policy.hf.model.language_model
    device = text.embed_tokens.weight.device
    n, longest = len(prompts), max(len(ids) for ids, _ in prompts)
    limits = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * n
    heat = torch.tensor(temperature if isinstance(temperature, list) else [temperature] * n, device=device)[:, None]
    ids = torch.full((n, longest), codec.eos)
    mask = torch.zeros(n, longest, dtype=torch.long)
    positions = torch.zeros(4, n, longest, dtype=torch.long)
    following = torch.zeros(n, dtype=torch.long)
    for row, (prompt, items) in enumerate(prompts):  # left padding: the last position of every row is its last token
        ids[row, longest - len(prompt):] = torch.tensor(prompt)
        mask[row, longest - len(prompt):] = 1
        grid, following[row] = rope_positions(codec, prompt, items)
        positions[1:, row, longest - len(prompt):] = torch.from_numpy(grid)
        positions[0, row, longest - len(prompt):] = torch.arange(len(prompt))
    features = [vision(item) for _, items in prompts for item in items]
    features = torch.cat(features).to(device) if features else None
    seen = policy.placeholders(ids, features)
    seen = None if seen is None else seen.to(device)
    ids, mask, positions, following = (x.to(device) for x in (ids, mask, positions, following))
    bias = torch.zeros(text.config.vocab_size, device=device)
    bias[list(codec.banned)] = -100.0
    draws = [torch.Generator(device).manual_seed(s) for s in seeds] if seeds else [None] * n
    sampled, logps, alive = [[] for _ in prompts], [[] for _ in prompts], [True] * n
    cache, lengths = DynamicCache(config=text.config), mask.sum(1)
    for _ in range(max(limits)):
        logits, cache = policy.step(ids, positions, seen, features, mask, cache)
        logits = (logits + bias) / torch.where(heat > 0, heat, 1.0)
        logprobs = logits.log_softmax(-1)
        token = logits.argmax(-1)
        for row in range(n):
            if heat[row] > 0 and alive[row]:
                token[row] = torch.multinomial(logprobs[row].exp(), 1, generator=draws[row])
        chosen = logprobs.gather(1, token[:, None])[:, 0].tolist()
        for row, (t, lp) in enumerate(zip(token.tolist(), chosen)):
            if alive[row]:
                sampled[row].append(t)
                logps[row].append(lp)
                alive[row] = t != codec.eos and len(sampled[row]) < limits[row]
        going = torch.tensor(float(any(alive)), device=device)
        if lockstep:
            dist.all_reduce(going, op=dist.ReduceOp.MAX)
        if not going.item():
            break
        ids, seen, features = token[:, None], None, None
        positions = torch.cat([lengths[None], following.expand(3, n)])[..., None]  # [4, B, 1]
        mask = torch.cat([mask, mask.new_ones(n, 1)], 1)
        lengths, following = lengths + 1, following + 1
    return list(zip(sampled, logps))


def load_policy(ckpt, codec, device, dtype=torch.float32, attention="auto", recompute="none"):
    """Checkpoint directory -> Policy on device, whole on every rank: vision tower frozen (bf16 on GPU), language model in `dtype`."""
    import_shim()
    from transformers import Qwen3VLForConditionalGeneration

    hf, report = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=dtype, use_safetensors=True, output_loading_info=True)
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        raise UserError(f"checkpoint {ckpt}: {len(report['missing_keys'])} weights are missing, for example {sorted(report['missing_keys'])[0]}")
    return as_policy(hf.to(device), codec, device, attention, recompute)


def as_policy(hf, codec, device, attention, recompute):
    """transformers' model -> Policy: our attention, tower frozen and in bf16 on GPU, decoder layers recomputed in backward as asked."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)
    AttentionInterface.register("frames_as_flash", frames_attention)
    hf.model.language_model.config._attn_implementation = "packed"
    hf.model.visual.config._attn_implementation = "frames_as_flash"
    hf.model.visual.requires_grad_(False)
    if device.type == "cuda":
        hf.model.visual.to(torch.bfloat16)
    if recompute != "none":
        options = {"use_reentrant": False, **({"context_fn": keep_matrix_products} if recompute == "selective" else {})}
        hf.gradient_checkpointing_enable(options)
        hf.model.visual.gradient_checkpointing = False
    policy = Policy(hf, codec, attention)
    policy.train()
    hf.model.visual.eval()
    return policy


def keep_matrix_products():
    """--recompute selective: products of matrices and attention are kept, what lies between them (norms, rotations, gates) is done again.

    Attention is kept where it is one operator: sdpa's and torch's varlen kernel. FlexAttention and flash-attn are done again.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    ops = torch.ops.aten
    kept = {ops.mm.default, ops.addmm.default, ops.bmm.default, ops._scaled_dot_product_flash_attention.default,
            ops._scaled_dot_product_flash_attention_for_cpu.default, ops._scaled_dot_product_efficient_attention.default}
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):  # defined once torch.nn.attention.varlen has been imported
        kept.add(torch.ops.torch_attn._varlen_attn.default)

    def policy(_, op, *given, **named):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def load_sharded(ckpt, codec, device, attention="auto", recompute="none", replicas=1, frozen=False):
    """Checkpoint directory -> sharded Policy, fp32, without a whole copy on any rank: built on the meta device, then every rank reads its own
    rows of each matrix from the safetensors files. The frozen tower is read whole. replicas: see `shard`. frozen: no gradients (a
    reference); its shards are in the precision it computes in, which changes nothing but their bytes, and it has no tower: it is given features."""
    import_shim()
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, GenerationConfig, Qwen3VLForConditionalGeneration

    config = AutoConfig.from_pretrained(ckpt)
    with torch.device("meta"):
        hf = Qwen3VLForConditionalGeneration(config)
    hf.tie_weights()
    hf.float()  # published configurations say bf16, in which a step of 2e-6 rounds to nothing: masters and moments are fp32
    if os.path.exists(os.path.join(ckpt, "generation_config.json")):
        hf.generation_config = GenerationConfig.from_pretrained(ckpt)
    if frozen:
        hf.requires_grad_(False).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    policy = shard(as_policy(hf, codec, device, attention, recompute), device, replicas)
    if frozen:
        hf.model.visual = None
        policy.set_reshard_after_forward(True, recurse=False)  # the root stays whole after a forward, for a backward that never comes
    policy.to_empty(device=device)
    for owner, name in [(hf.model.language_model, "rotary_emb")] + ([] if frozen else [(hf.model.visual, "rotary_pos_emb")]):
        old = getattr(owner, name)  # its buffers are computed, not stored
        setattr(owner, name, type(old)(old.config).to(device))
    where = check_weights(ckpt)
    own = dict(hf.named_parameters())
    missing = sorted(set(own) - set(where))
    if missing:
        raise UserError(f"checkpoint {ckpt}: {len(missing)} weights are missing, for example {missing[0]}")
    policy.stored_as = set()
    with contextlib.ExitStack() as stack, torch.no_grad():
        files = {}
        for name, parameter in own.items():
            if where[name] not in files:
                files[where[name]] = stack.enter_context(safe_open(os.path.join(ckpt, where[name]), "pt"))
            stored = files[where[name]].get_slice(name)
            policy.stored_as.add(stored.get_dtype())
            if list(stored.get_shape()) != list(parameter.shape):
                raise UserError(f"checkpoint {ckpt}: {name} has shape {stored.get_shape()}, the configuration says {list(parameter.shape)}")
            if isinstance(parameter, DTensor):  # rows are dealt out as torch.chunk deals them: equal parts, the last ones smaller or empty
                mesh, local = parameter.device_mesh, parameter.to_local()
                part, parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
                rows = -(-parameter.shape[0] // parts)
                if len(local):
                    local.copy_(stored[part * rows:part * rows + len(local)])
            else:
                parameter.copy_(stored[:])
    wrong = [n for n, p in own.items() if p.requires_grad and p.dtype != torch.float32]
    assert not wrong, f"trained weights that are not fp32: {wrong[:3]}"
    return policy


def shard(policy, device, replicas=1):
    """FSDP2: one group per decoder layer, one for the rest (embeddings, head, norm). The frozen tower stays replicated.

    GPU: fp32 shards, bf16 compute, fp32 gradient reduction. CPU: fp32 throughout. replicas: groups of ranks that each hold the whole
    model in shards (HSDP); with one per node, weights are gathered inside a node and only gradients cross between nodes.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    world = dist.get_world_size()
    if world % replicas:
        raise UserError(f"--replicas {replicas}: {world} ranks cannot be divided into so many")
    mesh = init_device_mesh(device.type, (world,)) if replicas == 1 else \
        init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if device.type == "cuda" \
        else MixedPrecisionPolicy()
    for layer in policy.hf.model.language_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=set(policy.hf.model.visual.parameters()))
    register_fsdp_forward_method(policy, "step")
    return policy


def add_memory_arguments(parser):
    """Flags about where the weights lie and how they are computed with: the same in sft.py and grpo.py. None of them changes a gradient."""
    parser.add_argument("--attention", choices=["auto", "flash", "varlen", "sdpa", "parts"], default="auto", help="attention kernel for packs; flash and varlen: GPU, parts: CPU")
    parser.add_argument("--recompute", choices=["full", "selective", "none"], default="full", help="decoder layers in backward: all of them; all but matrix products "
                        "and attention (FlexAttention and flash-attn are done again); nothing")
    parser.add_argument("--feature-cache-gb", type=float, default=1.0, help="GiB of vision features kept per rank, beside the weights")
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that each hold the whole model in shards (HSDP): one per node")


def trained_parameters(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def adamw(parameters, lr, weight_decay, beta2, device):
    """AdamW with beta1 0.9; weight decay on matrices, none on norms."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                             lr=lr, betas=(0.9, beta2), fused=device.type == "cuda")


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest semi-orthogonal matrix, for 2-D weights, sharded by FSDP2 or not.

      m <- mu m + (1 - mu) g        u = (1 - mu) g + mu m        W <- W - lr * 0.2 sqrt(max(rows, columns)) * orth(u)

    orth(u) = U V^T of u's SVD, by five Newton-Schulz iterations (Keller Jordan's coefficients). A tiny model learns two to
    three times faster per token than under AdamW, which is why the toy's cold start uses it; 0.2 sqrt(.) makes the step as
    large as AdamW's. Needs whole matrices: they are gathered, every rank orthogonalises its part of the list. Fine for a
    few million weights; for large checkpoints use AdamW.
    """

    def __init__(self, params, lr, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, distribute_tensor

        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            shapes = {}  # matrices of one shape are orthogonalised as one batch
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(m, group["momentum"])
                shapes.setdefault(tuple(p.shape), []).append((p, update.full_tensor() if isinstance(update, DTensor) else update))
            for (rows, columns), members in shapes.items():
                stack = torch.stack([u for _, u in members])  # [n, rows, columns]
                out = torch.zeros_like(stack)
                out[rank::world] = orthogonalise(stack[rank::world])
                if world > 1:
                    dist.all_reduce(out)  # every rank did its share; the rest is zeros
                for (p, _), u in zip(members, out):
                    if isinstance(p, DTensor):  # each rank keeps its own rows; nothing is sent
                        u = distribute_tensor(u, p.device_mesh, p.placements, src_data_rank=None)
                    p.sub_(u, alpha=group["lr"] * 0.2 * max(rows, columns) ** 0.5)


def orthogonalise(x, steps=5):
    """[n, rows, columns] -> about U V^T of each matrix: singular values pushed into (0.7, 1.2)."""
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def full_weights(policy, dtype=None, bucket_bytes=2**28):
    """Iterator of (checkpoint name, full tensor), the same order on every rank: gathering is a collective.

    Shards travel in buckets of about `bucket_bytes`, in `dtype` (None: their own), and while the caller takes in one bucket the next is on its
    way. This is what vLLM's `reload_weights` takes; a tied lm_head is left out, as in the checkpoint file.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    def buckets():
        members, size = [], 0
        for name, tensor in policy.hf.state_dict().items():
            if policy.hf.config.tie_word_embeddings and name == "lm_head.weight":
                continue
            members.append((name, tensor))
            size += tensor.numel() * (dtype or tensor.dtype).itemsize
            if size >= bucket_bytes:
                yield members
                members, size = [], 0
        yield members

    def send(members):
        """-> (members, all parts [ranks, numbers of one part], the collective under way)"""
        sharded = [t for _, t in members if isinstance(t, DTensor)]
        if not sharded:
            return members, None, None
        mesh = sharded[0].device_mesh
        flat = []
        for t in sharded:  # equal parts for everyone, though the last ranks may hold fewer rows, or none
            local = t.to_local().detach().to(dtype or t.dtype).flatten()
            flat.append(F.pad(local, (0, -(-t.shape[0] // mesh.size(mesh.ndim - 1)) * math.prod(t.shape[1:]) - len(local))))
        flat = torch.cat(flat)
        if mesh.size(mesh.ndim - 1) == 1:  # gloo would copy in a thread of its own, whose OpenMP team then slows down everything on CPU
            return members, flat[None], None
        parts = flat.new_empty(mesh.size(mesh.ndim - 1) * len(flat))
        work = dist.all_gather_into_tensor(parts, flat, group=mesh.get_group(mesh.ndim - 1), async_op=True)
        return members, parts.view(-1, len(flat)), work

    def taken(members, parts, work):
        if work:
            work.wait()
        at = 0
        for name, tensor in members:
            if not isinstance(tensor, DTensor):
                yield name, tensor.detach().to(dtype or tensor.dtype)
                continue
            n = -(-tensor.shape[0] // len(parts)) * math.prod(tensor.shape[1:])
            # A tensor of its own: an engine may keep what it is given, and a slice would keep the whole bucket.
            yield name, torch.cat(parts[:, at:at + n].unbind(0)).view(-1, *tensor.shape[1:])[:tensor.shape[0]]
            at += n

    under_way = None
    for members in buckets():
        following = send(members)
        if under_way:
            yield from taken(*under_way)
        under_way = following
    yield from taken(*under_way)


# ---------------------------------------------------------------------------------------------------------------------
# What it takes: a ledger of memory, from a configuration alone


def public_sizes():
    """Geometry of the public dense Qwen3-VL checkpoints, as in config.json of Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct."""
    def size(hidden, layers, heads, intermediate, tied, tower):
        text = {"vocab_size": 151936, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": intermediate, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}}
        vision = {"small": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
                  "large": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}}[tower]
        return {"text_config": text, "vision_config": {**vision, "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": hidden}, "tie_word_embeddings": tied}

    return {"2B": size(2048, 28, 16, 6144, True, "small"), "4B": size(2560, 36, 32, 9728, True, "small"),
            "8B": size(4096, 36, 32, 12288, False, "large"), "32B": size(5120, 64, 64, 25600, False, "large")}


def read_config(name):
    """A public size ("8B") or a checkpoint folder -> its configuration."""
    import_shim()
    quiet_libraries()
    from transformers import AutoConfig, Qwen3VLConfig

    if name in public_sizes():
        return Qwen3VLConfig(**public_sizes()[name])
    if not os.path.exists(os.path.join(name, "config.json")):
        raise UserError(f"--plan {name}: neither one of {', '.join(public_sizes())} nor a folder with a config.json")
    return AutoConfig.from_pretrained(name)


def parameter_counts(config):
    """Configuration -> {"layer", "layers", "root", "tower", "trained"}: parameters of one decoder layer, of all, of embeddings, head and last
    norm, of the tower, of all that is trained. The model is built on the meta device: nothing is allocated."""
    from transformers import Qwen3VLForConditionalGeneration

    config = deepcopy(config)
    config.vision_config._attn_implementation = "sdpa"  # a running model's says "flash" (frames_attention), which a new one would look for
    with torch.device("meta"):
        hf = Qwen3VLForConditionalGeneration(config)
    hf.tie_weights()
    tower = sum(p.numel() for p in hf.model.visual.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in hf.model.language_model.layers]
    trained = sum(p.numel() for p in hf.parameters()) - tower
    return {"layer": layers[0], "layers": sum(layers), "root": trained - sum(layers), "tower": tower, "trained": trained}


def layer_activation_bytes(text, width, kernel="flash"):
    """Bytes a token that autograd keeps inside one decoder layer when nothing is recomputed. width: bytes of a number in compute (2: bf16;
    norms then keep fp32 copies). kernel "sdpa" repeats keys and values for every head, as the path for CPU does."""
    hidden, inner, d = text.hidden_size, text.intermediate_size, text.head_dim
    heads, shared = text.num_attention_heads, text.num_key_value_heads
    norms = 2 * hidden * (3 * width if width == 4 else 4 + 2 * width)  # input in fp32, normalised, scaled; twice
    rotated = (heads + shared) * d * (2 * width if width == 4 else 4 + width)  # the same of queries and keys, whose last form attention keeps
    attention = 5 * heads * d * width if kernel == "sdpa" else (2 * heads + 2 * shared) * d * width  # q, k, v, out
    statistics = 4 * (2 + 2 * heads + shared)  # of norms and softmax
    return norms + rotated + attention + 4 * inner * width + statistics  # gate, its activation, up, their product


def ledger(config, gpus, pack_tokens, recompute="full", replicas=1, reference=True, engine_gb=None, width=2, chunk=1024, kernel="flash", feature_cache_gb=1.0,
           counts=None):
    """Bytes per GPU -> {phase: {item: bytes}}: "rollout" and "sync" (only with an engine), then three moments of a backward, which runs from the top
    layer to the lowest, then through embeddings: "top layer" still has all activations, "low layer" has the other layers' gradients instead,
    "embeddings" has no layer whole, but its own gradients twice. What an update takes is the largest of the three, not their sum.

    gpus: ranks; engine_gb: GB that vLLM takes beside the trainer while it is awake (None: no engine there); width: bytes of a number in compute
    (CPU: 4); counts: parameter_counts, where they are known. Held against traced peaks in tests/test_fake_gpu.py.
    """
    text, n = config.text_config, counts or parameter_counts(config)
    shards, hidden = gpus // replicas, text.hidden_size
    inside = layer_activation_bytes(text, width, kernel)
    kept = {"full": hidden * width, "none": inside,  # selective: the input, and the products: q, k, v, attention, its output, gate, up, down
            "selective": width * (3 * hidden + (2 * text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim + 2 * text.intermediate_size)}[recompute]
    head = width * text.vocab_size * hidden  # the largest matrix
    resting = {"weights, fp32 shard": 4 * n["trained"] / shards, "AdamW moments, fp32 shard": 8 * n["trained"] / shards, "vision tower": width * n["tower"],
               "vision features kept": feature_cache_gb * 2**30}
    if reference:
        resting["reference, shard"] = width * n["trained"] / shards
    engine = {} if engine_gb is None else {"rollout": {**resting, "vLLM": engine_gb * 1e9},
                                           "sync": {**resting, "vLLM": engine_gb * 1e9, "buckets of weights": 2 * (2**28 + head)}}
    # One layer's inside, as far as it is computed again, with its largest gradients; before the first layer, logits.
    one = pack_tokens * (inside - kept + width * (3 * text.intermediate_size + 5 * hidden))
    layer = {**resting, "root whole, gradient of its head": width * n["root"] + head, "two layers whole, one's gradients": n["layer"] * (2 * width + 4),
             "one layer in backward, or logits": max(one, chunk * text.vocab_size * (8 + width))}
    gradients = {"gradients of layers, fp32 shard": 4 * n["layers"] / shards}
    activations = {"activations kept": (text.num_hidden_layers * kept + hidden * (6 if width == 2 else 8) + 2 * text.head_dim * width) * pack_tokens}
    return {**engine, "top layer": {**layer, **activations}, "low layer": {**layer, **gradients},
            "embeddings": {**resting, **gradients, "root's gradients, as made and fp32": n["root"] * (width + 4)}}


def peak(phases):
    """Ledger -> bytes of the phase that takes most."""
    return max(sum(items.values()) for items in phases.values())


def largest_pack(config, gpu_gb, **options):
    """Tokens of the largest pack whose update fits into gpu_gb GB; 0 where not even its weights do."""
    options.setdefault("counts", parameter_counts(config))
    return max(0, bisect.bisect(range(2**24), False, key=lambda tokens: peak(ledger(config, pack_tokens=tokens, **options)) > gpu_gb * 1e9) - 1)


def host_memory(config, n, ranks, shards, frame_cache_gb, width=2):
    """Bytes of host memory on the node of rank 0, while a checkpoint is written -> {item: bytes}. n: parameter_counts; ranks: of the node."""
    again = config.tie_word_embeddings * config.text_config.vocab_size * config.text_config.hidden_size  # a tied matrix is copied under both names
    return {"fp32 shards of weights and moments": (12 * n["trained"] + 4 * again) / shards * ranks, "the tower once a rank": width * n["tower"] * ranks,
            "whole weights on rank 0": width * (n["trained"] + n["tower"]), "decoded frames": frame_cache_gb * 2**30 * ranks}


def kv_bytes(text, width=2):
    """Bytes of KV cache a token."""
    return 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * width


def plan_text(config, gpus, gpu_gb, context, pack_tokens, engine_share=0.5, node_gpus=8, frame_cache_gb=4.0, **options):
    """The ledger as a table, and what fits -> (table, verdict, whether all fits). node_gpus: ranks of one node, which share its host memory."""
    n = options["counts"] = parameter_counts(config)
    phases = ledger(config, gpus, pack_tokens, engine_gb=engine_share * gpu_gb if engine_share else None, **options)
    limit, text = 0.94 * gpu_gb, config.text_config  # the rest: CUDA, NCCL, fragments
    items = list(dict.fromkeys(item for phase in phases.values() for item in phase))
    lines = [f"{n['trained'] / 1e9:.2f} B trained parameters, {n['tower'] / 1e9:.2f} B in the frozen tower; GB per GPU, of {gpus} with {gpu_gb:g} each",
             f"{'':<36}" + "".join(f"{phase:>11}" for phase in phases)]
    for item in items:
        lines.append(f"{item:<36}" + "".join(f"{phases[p][item] / 1e9:>11.1f}" if item in phases[p] else f"{'-':>11}" for p in phases))
    totals = {p: sum(v.values()) / 1e9 for p, v in phases.items()}
    lines.append(f"{'sum':<36}" + "".join(f"{t:>11.1f}" for t in totals.values()))
    table, lines, over = "\n".join(lines), [], [p for p, t in totals.items() if t > limit]
    lines.append(f"does not fit while: {', '.join(over)} (limit {limit:.1f} GB)" if over else f"fits (limit {limit:.1f} GB)")
    lines.append(f"largest pack: {largest_pack(config, limit, gpus=gpus, **options)} tokens (--pack-tokens {pack_tokens})")
    ranks = min(gpus, node_gpus)
    host = host_memory(config, n, ranks, gpus // options.get("replicas", 1), frame_cache_gb)
    lines.append(f"host memory of a node of {ranks} ranks while it saves: {sum(host.values()) / 1e9:.0f} GB (" + ", ".join(f"{v / 1e9:.0f} {k}" for k, v in host.items()) +
                 ")\n  and what is not counted: processes and their libraries, the engine, decoders, files that the system keeps in memory")
    if engine_share:
        weights = 2 * (n["trained"] + n["tower"])
        tokens = max(0, int((engine_share * gpu_gb * 1e9 - weights) / kv_bytes(text)))
        lines.append(f"vLLM: {weights / 1e9:.1f} GB of weights, KV cache for {tokens} tokens: "
                     f"{tokens // context} contexts of {context} at once" + ("" if tokens >= context else "; NOT ONE: raise its share or lower --context"))
        over += [] if tokens >= context else ["vLLM"]
    return table, "\n".join(lines), not over


def warn_of_memory(config, args, device, world, **options):
    """On a GPU: what fits by the ledger, and a warning before the first step that cannot. Rank 0 calls it."""
    if device.type != "cuda":
        return
    table, verdict, fits = plan_text(config, world, torch.cuda.get_device_properties(device).total_memory / 1e9, getattr(args, "context", args.pack_tokens),
                                     args.pack_tokens, node_gpus=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), frame_cache_gb=args.frame_cache_gb,
                                     recompute=args.recompute, replicas=args.replicas, feature_cache_gb=args.feature_cache_gb, **options)
    print(verdict if fits else f"{table}\nWARNING: {verdict}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


@contextlib.contextmanager
def atomic_folder(path):
    """A temporary folder that becomes `path` when the block ends without an error; else nothing is left behind.

    An older folder of that name waits as `path`.old until the new one is in place: a process killed in between leaves one of the two.
    """
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    temp = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=parent)
    try:
        yield temp
        for folder, _, names in os.walk(temp):
            for name in names:
                with open(os.path.join(folder, name), "rb") as f:
                    os.fsync(f.fileno())
        os.chmod(temp, 0o755)
        if os.path.isdir(path):
            shutil.rmtree(f"{path}.old", ignore_errors=True)
            os.rename(path, f"{path}.old")
        os.rename(temp, path)
        shutil.rmtree(f"{path}.old", ignore_errors=True)
        handle = os.open(parent, os.O_RDONLY)  # the new name itself has to reach the disk
        os.fsync(handle)
        os.close(handle)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def write_atomic(path, text):
    """Write a small text file under its final name only when it is whole."""
    temp = f"{path}.tmp{os.getpid()}"
    try:
        with open(temp, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temp)
        raise


def point(link, target):
    """Make `link` a relative symbolic link to the folder `target` beside it, replacing an older one atomically."""
    temp = f"{link}.tmp{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.remove(temp)
    os.symlink(os.path.basename(target), temp)
    os.replace(temp, link)


def host_copy(policy, optimizer=None, dtype=None):
    """What a checkpoint holds, copied to host memory -> {"weights": full tensors, rank 0 alone; "shards": this rank's part}. Collective.

    From here on training may go on: nothing of this is a view of the policy. optimizer: one, a list, or None (weights only).
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def copied(x):
        if isinstance(x, torch.Tensor):
            return x.detach().to("cpu", copy=True)
        if isinstance(x, dict):
            return {k: copied(v) for k, v in x.items()}
        return [copied(v) for v in x] if isinstance(x, list) else x

    weights, shards = {}, None
    for name, tensor in full_weights(policy, dtype):  # collective: every rank runs it, rank 0 keeps the result
        if dist.get_rank() == 0:
            weights[name] = tensor.to("cpu", copy=True)
    if optimizer is not None:
        shards = copied({"model": policy.state_dict(), "optimizer": get_optimizer_state_dict(policy, optimizer)})
    return {"weights": weights, "shards": shards}


def write_checkpoint(policy, codec, path, copy, state=None, group=None):
    """Write a host copy as a checkpoint directory that `from_pretrained` and vLLM load, atomically. All ranks call it.

    state: JSON-able loop state (step, cursor, ...). `train_state/` holds what --resume needs: fp32 shards of weights and optimizer in
    torch's distributed checkpoint format, which another number of ranks can load.
    Raises RunError, on every rank, when any of them cannot write; nothing is left under the final name then.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError

    rank, why = dist.get_rank(), None
    try:
        with atomic_folder(path) if rank == 0 else contextlib.nullcontext() as folder:
            try:
                if rank == 0:
                    dtype = next(iter(copy["weights"].values())).dtype  # now: saving empties the dict
                    policy.hf.save_pretrained(folder, state_dict=copy["weights"])
                    codec.processor.save_pretrained(folder)
                    fix_tokenizer_class(folder, codec.tokenizer)
                    fix_dtype(folder, dtype)
            except (OSError, SafetensorError) as error:
                why = f"{type(error).__name__}: {error}"
            folder, why = agreed([folder, why], group)  # all ranks have to hear of a full disk before they meet again
            if why:
                raise OSError(why)
            if copy["shards"] is not None:
                dcp.save(copy["shards"], checkpoint_id=os.path.join(folder, "train_state"), process_group=group)
            if rank == 0:  # the marker of a whole checkpoint, written last
                files = {os.path.relpath(os.path.join(where, name), folder): os.path.getsize(os.path.join(where, name))
                         for where, _, names in os.walk(folder) for name in names}
                write_atomic(os.path.join(folder, "state.json"), json.dumps({**(state or {}), "files": files}, indent=1))
    except OSError as error:
        why = str(error)
    except dcp.CheckpointException as error:  # the same on every rank, whichever could not write
        why = str(next(iter(error.failures.values()))[0])
    (why,) = agreed([why], group)
    if why:
        left = newest_checkpoint(os.path.dirname(os.path.abspath(path)))
        raise RunError(f"checkpoint {path} could not be written ({why}); " +
                       (f"the newest whole one is {left}: make room, and the same command goes on from it" if left else "there is no older one"))


def agreed(values, group=None):
    """Rank 0's values, on every rank; a list of plain objects."""
    import torch.distributed as dist

    dist.broadcast_object_list(values, 0, group)
    return values


class Saver:
    """Saves a run's checkpoints behind its back: the copy to host memory waits, the writing does not.

    One checkpoint is written at a time. Writing is collective as well: a thread of every rank, in a process group of its own, so that
    the collectives of training stay undisturbed.
    """

    def __init__(self, policy, codec, out, keep, start):
        """start: the step that is saved already, where the run goes on."""
        import torch.distributed as dist

        self.policy, self.codec, self.out, self.keep, self.saved = policy, codec, out, keep, start
        self.group = dist.new_group(backend="gloo")
        self.pool, self.writing = ThreadPoolExecutor(1, thread_name_prefix="save"), None

    def save(self, step, state, optimizer, links=("last",)):
        """Save the policy as step_NNNNNN with `links` to it; collective. Raises RunError when the save before could not be written."""
        self.wait()
        if step == self.saved:  # stopped right behind a save
            return
        self.saved, path = step, os.path.join(self.out, f"step_{step:06d}")
        gpu = next(self.policy.parameters()).device.type == "cuda"
        copy = host_copy(self.policy, optimizer, torch.bfloat16 if gpu else torch.float32)
        self.writing = self.pool.submit(self.write, path, copy, {"step": step, **state}, links)

    def write(self, path, copy, state, links):
        import torch.distributed as dist

        write_checkpoint(self.policy, self.codec, path, copy, state, self.group)
        if dist.get_rank() == 0:
            for link in links:
                point(os.path.join(self.out, link), path)
            prune_checkpoints(self.out, self.keep)

    def failed(self):
        """Whether the last save is known to have failed; `wait` says why."""
        return self.writing is not None and self.writing.done() and self.writing.exception() is not None

    def wait(self):
        """Until the last save is on disk. Raises RunError when it could not be written."""
        if self.writing:
            self.writing.result()
            self.writing = None


def is_complete(folder):
    """Whether a checkpoint is whole: its state.json, written last, lists every other file with its bytes."""
    try:
        with open(os.path.join(folder, "state.json")) as f:
            files = json.load(f)["files"]
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest_checkpoint(out):
    """The newest complete step_* folder of a run, or None. A torn one is passed over; an .old one stands in where its successor is missing."""
    names = {n.removesuffix(".old") for n in os.listdir(out) if n.startswith("step_")} if os.path.isdir(out) else set()
    for name in sorted(names, reverse=True):
        for folder in (os.path.join(out, name), os.path.join(out, name + ".old")):
            if is_complete(folder):
                return folder
    return None


def pace_flags():
    """Flags that say how fast, how patiently and to whom, never what: they may differ between two parts of one run."""
    return {"max_seqs", "decode_threads", "decode_timeout", "frame_cache_gb", "feature_cache_gb", "engine_share", "patience", "quiet", "tensorboard", "wandb"}


def resume_point(out, args, resume):
    """Where a run goes on -> (folder, its loop state), or (None, {}) to begin.

    resume None: go on when --out holds a run of the same settings. True: go on whatever they were. False: begin anew; the older
    checkpoints are deleted. Raises UserError when --out holds a run of other settings.
    """
    folder = newest_checkpoint(out)
    if folder is None:
        torn = sorted(n for n in os.listdir(out) if n.startswith("step_"))
        if torn and resume is not False:  # damaged later, or of a version that did not list its files: not ours to delete unasked
            raise UserError(f"{out}: {torn[-1]} is not whole, and nothing else here is (a file is missing or of another size than state.json says); "
                            "--no-resume begins anew and deletes it")
        return None, {}
    with open(os.path.join(folder, "state.json")) as f:
        state = json.load(f)
    free = {"steps", "epochs", "resume", "out", "save_every", "eval_every", "keep", "show_every"} | pace_flags()
    now, then = json.loads(json.dumps(vars(args))), state.get("args", {})
    other = sorted(k for k in then if k in now and k not in free and then[k] != now[k])
    if resume is None and other:
        flags = ", ".join(f"--{k.replace('_', '-')} {then[k]} (now {now[k]})" for k in other[:3])
        raise UserError(f"--out {out} holds a run of other settings: {flags}; choose another --out, or --resume to go on with the new ones, "
                        "or --no-resume to delete it")
    return (None, {}) if resume is False else (folder, state)


def clean_run(out, start):
    """Rank 0, before the first step: drop what killed runs left (half-written folders and files), and, where a run begins anew, its older checkpoints."""
    for folder in (out, os.path.join(out, "rollouts")):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            if re.search(r"\.tmp\d+$", name):  # write_atomic's, and point's
                os.remove(os.path.join(folder, name))
    for name in os.listdir(out):
        path = os.path.join(out, name)
        if name.startswith(".step_") or (name.endswith(".old") and is_complete(path.removesuffix(".old"))) or (start == 0 and name.startswith("step_")):
            shutil.rmtree(path, ignore_errors=True)
        if start == 0 and name in ("last", "best") and os.path.islink(path):
            os.remove(path)


def open_log(path, start):
    """log.jsonl of a run that goes on behind step `start` -> file to append to. A torn last line and lines of later steps are dropped."""
    kept = []
    if start and os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            for line in f:
                try:
                    if line.endswith("\n") and json.loads(line)["step"] <= start:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # a line that a crash cut off
    write_atomic(path, "".join(kept))
    return open(path, "a", encoding="utf-8")


def flat(record, prefix=""):
    """{"step": 3, "closure": {"think": 0.9, "answer": None}} -> {"step": 3, "closure/think": 0.9}: the numbers alone."""
    out = {}
    for name, value in record.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)):
            out[prefix + name] = value
    return out


def add_log_arguments(parser):
    """Flags of the scripts that train: where their numbers go besides log.jsonl."""
    parser.add_argument("--quiet", action="store_true", help="no line per step; the first and the last line, and what is skipped, stay")
    parser.add_argument("--tensorboard", default=None, metavar="DIR", help="send the numbers of log.jsonl there too; needs tensorboard")
    parser.add_argument("--wandb", nargs="?", const="paravt", default=None, metavar="PROJECT", help="send the numbers of log.jsonl there too; needs wandb")


def check_log_arguments(args):
    """Raises UserError where --tensorboard or --wandb is asked for and its package is not installed: before the models are loaded."""
    import importlib.util

    for name in ("tensorboard", "wandb"):
        if getattr(args, name) and importlib.util.find_spec(name) is None:
            raise UserError(f"--{name}: the package is not installed: pip install {name}")


class Log:
    """Rank 0's numbers: log.jsonl, a line on the terminal, and --tensorboard or --wandb; the same numbers everywhere."""

    def __init__(self, out, start, args):
        """start: the step behind which the run goes on."""
        self.file, self.quiet, self.board, self.wandb = open_log(os.path.join(out, "log.jsonl"), start), args.quiet, None, None
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(args.tensorboard, purge_step=start + 1)
        if args.wandb:
            import hashlib

            import wandb

            name = os.path.abspath(out)  # the same run again, wherever it goes on
            self.wandb = wandb.init(project=args.wandb, name=os.path.basename(name), id=hashlib.sha256(name.encode()).hexdigest()[:16], resume="allow",
                                    config=vars(args), dir=out)

    def write(self, record, line):
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if not self.quiet:
            print(line, flush=True)
        if self.board:
            for name, value in flat(record).items():
                self.board.add_scalar(name, value, record["step"])
        if self.wandb:
            self.wandb.log(flat(record), step=record["step"])

    def close(self):
        self.file.close()
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


def give_back_memory():
    """Freed memory back to the system: glibc keeps it, in an arena per thread, and after some hundred steps that is hundreds of MiB."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim:
        trim(0)


def stop_on_sigterm():
    """-> a list that is no longer empty once SIGTERM has come, a scheduler's warning. A second one ends the process at once."""
    import signal

    asked = []

    def handler(number, frame):
        if asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.append(number)

    signal.signal(signal.SIGTERM, handler)
    return asked


def any_rank(*flags):
    """Whether any of `flags` holds on any rank; collective, in host memory: no GPU is waited for."""
    import torch.distributed as dist

    value = torch.tensor(float(any(map(bool, flags))))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def fix_tokenizer_class(folder, tokenizer):
    """transformers 5 rebuilds the stock pre-tokenizer for Qwen2Tokenizer on load: a tokenizer with its own must stay
    PreTrainedTokenizerFast, or every id after the first number changes silently."""
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path) as f:
        config = json.load(f)
    if type(tokenizer).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_atomic(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def fix_dtype(folder, dtype):
    """config.json names the precision that the file holds: left alone it says the masters' fp32, and inside text_config what it once began with."""
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = str(dtype).removeprefix("torch.")
    write_atomic(path, json.dumps(config, indent=2) + "\n")


def load_train_state(policy, optimizer, path):
    """Restore weights and optimizer (or a list of them) from `path`/train_state, saved by any number of ranks. The loop state is resume_point's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    shards = {"model": policy.state_dict(), "optimizer": get_optimizer_state_dict(policy, optimizer)}
    dcp.load(shards, checkpoint_id=os.path.join(path, "train_state"))
    policy.load_state_dict(shards["model"])
    set_optimizer_state_dict(policy, optimizer, shards["optimizer"])


def prune_checkpoints(out, keep):
    """Keep the newest `keep` complete step_* folders of a run, and whatever `last` and `best` point to."""
    steps = sorted(n for n in os.listdir(out) if n.startswith("step_") and is_complete(os.path.join(out, n)))
    spared = {os.path.basename(os.path.realpath(os.path.join(out, n))) for n in ("last", "best")}
    for name in steps[:-keep] if keep else []:
        if name not in spared:
            doomed = os.path.join(out, f".{name}.pruned")  # half deleted it would be no checkpoint, and nobody's to delete; so clean_run finds it
            os.rename(os.path.join(out, name), doomed)
            shutil.rmtree(doomed)


# ---------------------------------------------------------------------------------------------------------------------
# Small things every stage does the same way


def read_jsonl(path, required=()):
    """JSONL file -> list of dicts. Raises UserError naming file and line."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text ({e.reason})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise UserError(f"{path}:{number}: not JSON ({e})") from None
        missing = [k for k in required if not isinstance(row, dict) or k not in row]
        if missing:
            raise UserError(f"{path}:{number}: missing {', '.join(map(repr, missing))}")
        if has_surrogate(row):
            raise UserError(f"{path}:{number}: a lone surrogate (\\ud800 to \\udfff) is no text")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def has_surrogate(value):
    """Whether a text in a JSON value cannot be encoded: "\\ud800" alone is valid JSON, and no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def batch_indices(step, batch_size, rows, seed):
    """Rows of one global batch: a window of the endless stream of reshuffled epochs. A function of (step, seed) alone, so
    every rank and every resumed run draws the same."""
    import random

    out, epoch, order = [], None, None
    for position in range(step * batch_size, (step + 1) * batch_size):
        if position // rows != epoch:
            epoch, order = position // rows, list(range(rows))
            random.Random(f"{seed}/{epoch}").shuffle(order)  # a str seed goes through SHA-512: the same in every process
        out.append(order[position % rows])
    return out


def make_out(path):
    """Create an output folder and prove that it can be written, before any long work."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise UserError(f"output folder {path}: {e.strerror}") from None


def run_main(main):
    """Run a script's main(). Bad user input becomes one line on stderr and exit code 2, a run that cannot go on one line and exit code 1."""
    try:
        main()
    except (UserError, RunError, video.VideoError) as e:
        # Under torchrun all ranks see most faults: one of them says it.
        if os.environ.get("RANK", "0") == "0" or isinstance(e, RankError):
            print(f"{os.path.basename(sys.argv[0])}: {printable(e)}", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(e, RunError) else 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, metavar="SIZE", help="2B, 4B, 8B, 32B or a checkpoint folder: what it takes per GPU, in each phase of grpo.py")
    parser.add_argument("--gpus", type=int, default=8, help="ranks, all nodes together")
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="GB of one GPU")
    parser.add_argument("--context", type=int, default=32768, help="tokens of one context")
    parser.add_argument("--pack-tokens", type=int, default=32768, help="tokens per pack (one forward)")
    parser.add_argument("--recompute", choices=["full", "selective", "none"], default="full", help="as grpo.py has it")
    parser.add_argument("--replicas", type=int, default=1, help="as grpo.py has it")
    parser.add_argument("--kl", type=float, default=0.01, help="0 = no reference model")
    parser.add_argument("--engine-share", type=float, default=0.5, help="vLLM's part of the GPU while it is awake; 0 = no engine (sft.py)")
    parser.add_argument("--node-gpus", type=int, default=8, help="ranks of one node: they share its host memory")
    parser.add_argument("--frame-cache-gb", type=float, default=4.0, help="as grpo.py has it: GiB per rank")
    args = parser.parse_args()
    if min(args.gpus, args.context, args.pack_tokens, args.replicas, args.node_gpus) < 1 or args.gpus % args.replicas or not args.gpu_gb > 0 or not 0 <= args.engine_share < 1:
        raise UserError("--gpus, --gpu-gb, --context, --pack-tokens, --replicas and --node-gpus must be above 0, --gpus a multiple of --replicas, --engine-share below 1")
    config = read_config(args.plan)
    table, verdict, fits = plan_text(config, args.gpus, args.gpu_gb, args.context, args.pack_tokens, args.engine_share, args.node_gpus,
                                     args.frame_cache_gb, recompute=args.recompute, replicas=args.replicas, reference=args.kl > 0)
    print(f"{table}\n{verdict}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    run_main(main)
