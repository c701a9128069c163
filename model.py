"""
model.py: the policy. Chat to token ids, frames to features, packing, exact log-probs; below the
line: loading in shards, checkpoints, starting up.

What this file computes, for a context c (prompt ids with vision tokens) and the tokens o_1 .. o_R
sampled after it:

  logp_t = log softmax((W h_{t-1} + b) / T)[o_t]      T = sampling temperature
  H_t    = entropy of that same distribution          b = -100 at ids nobody may sample, else 0

Samples that share a context are packed as ONE tree  [ c | o^1 | o^2 | .. | o^G ]. A token of o^i
attends to c and to its own branch, and has the positions it would have had alone, so log-probs and
gradients are those of G separate sequences while c (thousands of vision tokens) is computed once.
Several trees fill one pack; trees do not see each other.

One construction of ids serves SFT, RL and evaluation: prompt = template(messages before the first
assistant turn) with a generation prompt; then turn ids; then glue (end of turn, tool responses,
next generation prompt), where the glue is cut out of the template rendered on a dummy chat. Ids
only ever grow: nothing sampled is decoded and encoded again.

Departs from the paper: the vision tower is frozen in every stage, so its features are computed once
per distinct frame set and kept.

With --lora RANK (LoRA, arXiv 2106.09685) the decoder's matrices are W + 2 B A, W frozen.

Legend: L tokens of a pack, N trained, V of vision; D deepstack levels, H hidden size, T frames.
Reads and writes: checkpoint directories (`from_pretrained` layout, or peft's for adapters),
`train_state/` beside them. No code that a checkpoint brings is run.
  python model.py --merge DIR --out DIR       adapters and their base -> one whole checkpoint
"""
import codecs
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":  # somebody waits: seconds
    print(f"{os.path.basename(sys.argv[0])}: loading torch", file=sys.stderr, flush=True)
import torch
import torch.nn.functional as F

import video

GUARD = "\ue000"  # private-use character: splits a literal that must not become a special token
TURN = "\ue001"  # stands for an assistant turn while the template is rendered on a dummy chat

# ------------------------------------------------------------------------------------------------
# 1. Chat -> token ids


@dataclass
class Codec:
    """What turns chats and frames into ids and patches; read from the checkpoint by load_codec."""

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
    markup: tuple  # literals of added tokens ("<|im_end|>", "<tool_call>", ..)
    banned: tuple  # ids that are never sampled: placeholders, turn starts, every end but <|im_end|>
    opens_thought: bool  # the generation prompt ends in `<think>\n` (Thinking checkpoints)
    pieces: list  # [vocab] bytes of every token
    files: dict  # of the checkpoint, see small_files: what is saved holds them as they are

    @property
    def pad(self):
        return self.image_pad if self.channel == "image" else self.video_pad


@dataclass
class VisionItem:
    """The frames behind one video in a context: enough to load them again and find their
    features."""

    spec: dict  # {"video", "frames"} or {"video", "start", "end", ..}: what video.load reads
    key: str  # identity of the frame set
    frames: int  # T
    height: int  # pixels
    width: int
    seconds: list  # [T]


def vision_item(spec, frames):
    t, height, width, _ = frames.images.shape  # [T, H, W, 3]
    return VisionItem(dict(spec), frames.key, t, height, width, frames.seconds.tolist())


def tokens_per_item(codec, item):
    """Placeholder tokens that one frame (channel image) or frame pair (channel video) becomes."""
    side = codec.patch * codec.merge
    return (item.height // side) * (item.width // side)


def frame_times(codec, item):
    """Seconds before each run of placeholders: a frame's own, or the mean of a pair's two."""
    step = 1 if codec.channel == "image" else codec.temporal  # frames of a run of placeholders
    seconds = list(item.seconds)
    seconds += [seconds[-1]] * (-len(seconds) % step)  # an odd count repeats its last frame
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]


def pieces_of(codec, ids):
    """Ids -> the bytes that each writes; b"" for ids beyond the tokenizer (a padded vocabulary)."""
    return [codec.pieces[i] if i < len(codec.pieces) else b"" for i in ids]


def decode(codec, ids, keep_special=False):
    """Sampled ids -> text for parsing and logs. The turn end is dropped unless keep_special."""
    ids = [i for i in ids if keep_special or i != codec.eos]
    return b"".join(pieces_of(codec, ids)).decode("utf-8", errors="replace")


def guard(codec, text, literals=None):
    """Split every special-token literal in untrusted text, so that `encode` gives it plain tokens.

    A question that contains "<|im_end|>" must not end the turn. The mark splits the literal for the
    tokenizer and is never encoded itself: the ids decode to the very text that was given.
    literals: None = all of the tokenizer's.
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


def template(codec, messages, tools=None, generation=True):
    """Render messages (content strings) with the checkpoint's own chat template -> text."""
    owner = codec.processor if codec.processor.chat_template else codec.tokenizer
    return owner.apply_chat_template(messages, tools=tools, tokenize=False,
                                     add_generation_prompt=generation)


def stamp_text(seconds, number, kind=None):
    """Text before a frame. None: `<12.5 seconds>`, as Qwen3-VL was trained; for other systems'
    agents "clock": HH:MM:SS, "frame": `<frame3_time12.50s>`, "none": no text."""
    if kind == "clock":
        whole = int(seconds)
        return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    if kind == "frame":
        return f"<frame{number}_time{seconds:.2f}s>"
    return "" if kind == "none" else f"<{seconds:.1f} seconds>"


def render(codec, messages, items=()):
    """Messages -> messages as the template takes them: text guarded, frames as times and
    placeholders. items: the VisionItems of their videos, in order."""
    items = iter(items)
    rendered = []
    for message in messages:
        content = content_parts(codec, message, items)
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        rendered.append({"role": message["role"], "content": content})
    return rendered


def content_parts(codec, message, items):
    """Content of one message -> parts for the template."""
    # Our own system prompt names the tags; everything else is data.
    own = message["role"] == "system"
    content = message["content"]
    if isinstance(content, str):
        return [text_part(codec, content, own)]
    parts = []
    raw = None  # text of the part before, where it is data
    for piece in content:
        if piece["type"] == "text" and piece.get("trusted"):  # tags that we put around data
            parts.append(text_part(codec, piece["text"], True))
            raw = None
        elif piece["type"] == "text":
            # Guarded together with the data before it: a literal may be spread over two pieces.
            if raw is not None:
                parts.pop()
            raw = (raw or "") + piece["text"]
            parts.append(text_part(codec, raw, own))
        else:
            raw = None
            item = next(items)
            if codec.channel == "video":
                parts.append({"type": "video"})
                continue
            # The time stands before <|vision_start|>, as vLLM and transformers put it for video.
            for number, seconds in enumerate(frame_times(codec, item)):
                stamp = stamp_text(seconds, number, piece.get("stamp"))
                if stamp:
                    parts.append({"type": "text", "text": stamp})
                parts.append({"type": "image"})
    return parts


def text_part(codec, text, trusted):
    return {"type": "text", "text": text if trusted else guard(codec, text)}


def encode_prompt(codec, messages, items=(), tools=None):
    """Messages before the first assistant turn -> (expanded ids, compact ids).

    Expanded ids hold one placeholder per vision token (what the trainer sees), compact ids one per
    frame or video (what an engine is given, and expands itself to the very same).
    """
    compact = encode(codec, template(codec, render(codec, messages, items), tools))
    return expand(codec, compact, items), compact


def expand(codec, compact, items):
    """One placeholder per frame (or video) -> one per vision token. Raises ValueError when the
    counts disagree."""
    out = []
    found = compact.count(codec.pad)
    if codec.channel == "image":
        sizes = iter([tokens_per_item(codec, item) for item in items for _ in range(item.frames)])
        for i in compact:
            out += [i] * next(sizes, 0) if i == codec.image_pad else [i]
        wanted = sum(item.frames for item in items)
    else:
        # <|vision_start|><|video_pad|><|vision_end|> becomes `<t seconds>` and one such triple for
        # each frame pair.
        triple = [codec.vision_start, codec.video_pad, codec.vision_end]
        queue = iter(items)
        wanted = len(items)
        position = 0
        while position < len(compact):
            if compact[position:position + 3] != triple:
                out.append(compact[position])
                position += 1
                continue
            item = next(queue, None)
            for seconds in frame_times(codec, item) if item else ():
                out += encode(codec, f"<{seconds:.1f} seconds>") + [codec.vision_start]
                out += [codec.video_pad] * tokens_per_item(codec, item) + [codec.vision_end]
            position += 3
    if found != wanted:
        what = "frames" if codec.channel == "image" else "videos"
        raise ValueError(f"{found} vision placeholders in the prompt for {wanted} {what}")
    return out


def think_prefix_ids(codec, prompt_ids):
    """The forced `<think>\\n`; empty when the template's generation prompt already opens a
    thought."""
    prefix = encode(codec, "<think>\n")
    return [] if prompt_ids[-len(prefix):] == prefix else prefix


def glue_ids(codec, messages, ended, items=()):
    """Compact ids between two sampled turns: end of turn, all responses as the template writes
    them, next generation prompt.

    messages: the tool (or user) messages of this turn, items: the VisionItems of their frames.
    ended: the turn's last sampled id was the end of turn; where the turn was cut off instead, that
    id is inserted here (unsampled, so not trained on).
    """
    dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}]
    text = template(codec, dummy + render(codec, messages, items)).split(TURN, 1)[1]
    ids = encode(codec, text)
    if ids[0] != codec.eos:
        raise UserError("the chat template does not end an assistant turn with <|im_end|>")
    return ids[1:] if ended else ids


# ------------------------------------------------------------------------------------------------
# 2. Frames -> vision features


def patchify(codec, images):
    """uint8 frames [T, H, W, 3] -> (patches [T' gh gw, 3 temporal patch^2] fp32, grid [1, 3]).

    The order of patches is the processor's: merge x merge neighbours are consecutive. Images are
    one grid here, where the processor has one each: the tower loops over grids, on the host.
    """
    t, height, width, _ = images.shape
    x = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).float() / 255.0  # [T, 3, H, W]
    x = (x - torch.tensor(codec.mean)[:, None, None]) / torch.tensor(codec.std)[:, None, None]
    if codec.channel == "image":
        # An image fills the temporal patch by repetition.
        x = x[:, None].expand(t, codec.temporal, 3, height, width)
    else:
        x = torch.cat([x, x[-1:].expand(-t % codec.temporal, 3, height, width)])
        x = x.reshape(-1, codec.temporal, 3, height, width)  # [T', temporal, 3, H, W]
    n, p, m = x.shape[0], codec.patch, codec.merge
    gh, gw = height // p, width // p
    x = x.reshape(n, codec.temporal, 3, gh // m, m, p, gw // m, m, p)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(n * gh * gw, -1)
    return x, torch.tensor([[n, gh, gw]])


class VisionFeatures:
    """Features of the frozen tower, once per distinct frame set, bounded by bytes (least recently
    used goes first)."""

    def __init__(self, visual, codec, load, max_bytes=2**30):
        """load: VisionItem spec -> video.Frames, called only when the features are not here."""
        self.visual = visual
        self.codec = codec
        self.load = load
        self.max_bytes = max_bytes
        self.cache = OrderedDict()  # VisionItem.key -> features
        self.bytes = 0
        self.computed = 0  # frame sets that went through the tower

    @torch.no_grad()
    def __call__(self, item):
        """VisionItem -> [vision tokens, 1 + D, H]: the tower's output, then its deepstack
        levels."""
        if item.key in self.cache:
            self.cache.move_to_end(item.key)
            return self.cache[item.key]
        frames = self.load(item.spec)
        same_size = frames.images.shape[:3] == (item.frames, item.height, item.width)
        if not same_size or list(frames.seconds) != list(item.seconds):
            raise ValueError(f"{item.spec['video']}: the file changed since its prompt was built")
        weight = next(self.visual.parameters())
        patches, grid = patchify(self.codec, frames.images)
        out = self.visual(patches.to(weight.device, weight.dtype), grid_thw=grid.to(weight.device))
        features = torch.stack([out.pooler_output, *out.deepstack_features], 1)
        self.cache[item.key] = features
        self.computed += 1
        self.bytes += features.nbytes
        while self.bytes > self.max_bytes and len(self.cache) > 1:
            self.bytes -= self.cache.popitem(last=False)[1].nbytes
        return features


# ------------------------------------------------------------------------------------------------
# 3. Packing


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
    positions: torch.Tensor  # [4, 1, L] text position, then time/height/width (interleaved mrope)
    tree: torch.Tensor  # [L] which tree a token belongs to
    branch: torch.Tensor  # [L] 0 in the prefix, 1.. in branches
    source: torch.Tensor  # [N] position whose hidden state predicts the trained token
    target: torch.Tensor  # [N] id of the trained token
    values: dict  # name -> [N]
    vision: list  # [VisionItem] in the order of the placeholders
    layout: list  # [(start, prefix length, [branch lengths])]


def rope_positions(codec, ids, items):
    """Expanded ids -> (positions [3, L], the next free position). Qwen3-VL's rule: text advances
    all three axes by one; a frame of rows x columns tokens keeps one time step and advances by
    max(rows, columns)."""
    ids = np.asarray(ids)
    positions = np.empty((3, len(ids)), np.int64)
    side = codec.patch * codec.merge
    sizes = [(i.height // side, i.width // side) for i in items for _ in frame_times(codec, i)]
    at = np.flatnonzero(ids == codec.pad)  # places of all vision tokens
    cursor = 0  # tokens that have their positions
    current = 0  # the next free position
    hits = 0  # vision tokens that have theirs
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
        current += max(rows, columns)
        cursor = start + n
        hits += n
    if hits != len(at):
        raise ValueError(f"{len(at)} vision placeholders, {hits} vision tokens")
    positions[:, cursor:] = current + np.arange(len(ids) - cursor)
    return positions, current + len(ids) - cursor


def pack_trees(codec, trees):
    """Trees -> one Pack."""
    columns = {name: [] for name in ("ids", "text", "tree", "branch", "source", "target")}
    positions = []
    values = {}
    vision = []
    layout = []
    start = 0  # pack position where the tree begins
    for index, tree in enumerate(trees):
        p = len(tree.prefix.ids)
        if tree.prefix.mask and tree.prefix.mask[0]:
            raise ValueError("the first token of a context has no predecessor to be predicted from")
        grid, following = rope_positions(codec, tree.prefix.ids, tree.vision)
        positions.append(grid)  # [3, p]
        last_of_prefix = start + p - 1
        cursor = start
        for number, span in enumerate([tree.prefix, *tree.branches]):
            n = len(span.ids)
            ids = np.asarray(span.ids, np.int64)
            trained = np.flatnonzero(span.mask)  # [n'] places in this span
            # Token t is predicted by the state BEFORE it in its own sequence. For a branch's first
            # token that is the prefix's last one, not its left neighbour, which ends another
            # branch.
            predictor = np.where(trained == 0, last_of_prefix, cursor + trained - 1)
            columns["ids"].append(ids)
            columns["text"].append(np.arange(n) + (p if number else 0))  # as if it were alone
            columns["tree"].append(np.full(n, index))
            columns["branch"].append(np.full(n, number))
            columns["source"].append(predictor)
            columns["target"].append(ids[trained])
            for name, numbers in span.values.items():
                values.setdefault(name, []).append(np.asarray(numbers, np.float32)[trained])
            if number:
                positions.append(np.broadcast_to(following + np.arange(n), (3, n)))
            cursor += n
        layout.append((start, p, [len(b.ids) for b in tree.branches]))
        vision += tree.vision
        start = cursor
    joined = {name: torch.from_numpy(np.concatenate(x)) for name, x in columns.items()}
    text = joined.pop("text")[None]  # [1, L]
    grid = torch.cat([text, torch.from_numpy(np.concatenate(positions, 1))])[:, None]  # [4, 1, L]
    values = {name: torch.from_numpy(np.concatenate(x)) for name, x in values.items()}
    return Pack(positions=grid, values=values, vision=vision, layout=layout, **joined)


def fill_packs(trees, budget):
    """First-fit-decreasing packing of trees into lists of at most `budget` tokens.

    A tree over the budget is split by branches (its prefix is then computed more than once); a
    single sequence over the budget gets a pack of its own.
    """
    pieces = []
    for t in trees:
        piece = Tree(t.prefix, t.vision, [])
        for b in t.branches:
            if piece.branches and len(piece) + len(b.ids) > budget:
                pieces.append(piece)
                # The prefix's own trained tokens, if any, count in the first piece only.
                silent = Span(t.prefix.ids, [0] * len(t.prefix.ids), t.prefix.values)
                piece = Tree(silent, t.vision, [])
            piece.branches.append(b)
        pieces.append(piece)
    packs = []
    room = []  # tokens left in each pack
    for piece in sorted(pieces, key=len, reverse=True):
        fits = [n for n, left in enumerate(room) if left >= len(piece)]
        if fits:
            packs[fits[0]].append(piece)
            room[fits[0]] -= len(piece)
        else:
            packs.append([piece])
            room.append(budget - len(piece))
    return packs


def even_packs(codec, packs):
    """This rank's packs as (pack, True), then spare ones as (pack, False), until all ranks have
    equally many. Collective.

    Every forward under FSDP is a chain of collectives: a rank that runs fewer hangs all others.
    """
    import torch.distributed as dist

    most = torch.tensor(len(packs))  # in host memory: no GPU is waited for
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    spare = pack_trees(codec, [Tree(Span([codec.eos, codec.eos], [0, 1]))])
    spares = [(spare, False)] * (int(most.item()) - len(packs))
    return [(pack, True) for pack in packs] + spares


def to_device(tensor, device):
    """A tensor in host memory -> on device. To a GPU from pinned memory: the host does not wait for
    what the GPU has still to do."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ------------------------------------------------------------------------------------------------
# 4. Attention over a pack


@dataclass
class AttentionPlan:
    """What every layer of one forward shares, built once per pack."""

    kind: str  # "flash": plain sequences, flash-attn; "flex": anything, GPU; "parts": anything, CPU
    layout: list  # Pack's
    mask: object = None  # FlexAttention's BlockMask
    ends: torch.Tensor = None  # [sequences + 1] int32: where plain sequences end
    longest: int = 0


def attention_plan(pack, device):
    """-> AttentionPlan. GPU: flash-attn for packs without branches where it is installed, else
    FlexAttention. CPU: PartsAttention."""
    import importlib.util

    if device.type == "cpu":
        return AttentionPlan("parts", pack.layout)
    plain = not any(branches for _, _, branches in pack.layout)
    # The kernels themselves: a folder named flash_attn may be anything.
    if plain and importlib.util.find_spec("flash_attn_2_cuda"):
        lengths = [p for _, p, _ in pack.layout]
        ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        ends = to_device(ends, device)
        return AttentionPlan("flash", pack.layout, ends=ends, longest=max(lengths))
    return AttentionPlan("flex", pack.layout, mask=block_mask(pack, device))


def packed_attention(module, query, key, value, attention_mask=None, scaling=None, plan=None, **_):
    """What transformers calls in every decoder layer. query [1, heads, L, d], key and value
    [1, key heads, L, d] -> ([1, L, heads, d], None)."""
    shared = query.shape[1] // key.shape[1]  # query heads that share a key head
    if plan.kind == "flex":
        attend = compiled_flex()
        out = attend(query, key, value, block_mask=plan.mask, scale=scaling, enable_gqa=shared > 1)
        return out.transpose(1, 2), None
    if plan.kind == "flash":
        from flash_attn import flash_attn_varlen_func

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, d]
        out = flash_attn_varlen_func(q, k, v, plan.ends, plan.ends, plan.longest, plan.longest,
                                     softmax_scale=scaling, causal=True)
        return out[None], None
    if shared > 1:  # CPU's kernel knows no shared heads
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return PartsAttention.apply(query, key, value, plan.layout, scaling).transpose(1, 2), None


def block_mask(pack, device, size=128):
    """Pack -> FlexAttention's BlockMask, counted from the layout: torch's create_block_mask makes
    [L, L] masks to count in, some GB at 32k tokens. size: tokens of a block, the kernel's own."""
    from torch.nn.attention.flex_attention import BlockMask

    tree, branch = to_device(pack.tree, device), to_device(pack.branch, device)  # [L]

    def visible(_batch, _head, q, k):  # asked inside blocks that are seen in part
        same = (branch[k] == 0) | (branch[k] == branch[q])
        return (q >= k) & (tree[q] == tree[k]) & same

    pairs = visible_pairs(pack.layout, len(pack.ids), size)  # [blocks, blocks]
    full = pairs == size * size  # a ragged last block never is
    lists = []
    for kind in ((pairs > 0) & ~full, full):  # blocks seen in part, blocks seen whole
        number = kind.sum(1)  # [blocks] how many a row
        which = np.argsort(~kind, 1, kind="stable")  # [blocks, blocks] theirs first
        for x in (number, which):
            lists.append(to_device(torch.from_numpy(x.astype(np.int32))[None, None], device))
    return BlockMask.from_kv_blocks(*lists, size, visible, (len(tree), len(tree)))


def visible_pairs(layout, tokens, size):
    """Pack.layout -> [blocks, blocks] int: how many (query, key) pairs of two blocks see each
    other."""
    blocks = -(-tokens // size)
    edges = np.arange(blocks + 1) * size

    def inside(start, end):  # [blocks] tokens of start..end in each block
        return np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)

    pairs = np.zeros((blocks, blocks), np.int64)
    for start, p, branches in layout:
        prefix = inside(start, start + p)
        bounds = np.cumsum([start, p, *branches])
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            own = inside(begin, end)
            # Causal with itself: whole blocks before, a triangle in the same one.
            pairs += np.tril(np.outer(own, own), -1) + np.diag(own * (own + 1) // 2)
            if number:  # a branch sees its whole prefix
                pairs += np.outer(own, prefix)
    return pairs


# ------------------------------------------------------------------------------------------------
# 5. Log-probs


class Policy(torch.nn.Module):
    """A Qwen3-VL and the forward of all training stages: pack in, log-probs of its trained tokens
    out."""

    def __init__(self, hf, codec):
        super().__init__()
        self.hf = hf
        self.banned = codec.banned
        self.pads = (codec.image_pad, codec.video_pad)

    def forward(self, pack, vision, temperature=1.0, chunk=1024):
        """pack: Pack; vision: VisionFeatures -> (logp [N], entropy [N]) of pack.target, fp32.

        The host waits for the GPU where frames are new (the tower reads their sizes), and once a
        deepstack level: transformers asks for the positions of a boolean mask.
        """
        text = self.hf.model.language_model
        device = text.embed_tokens.weight.device
        ids, positions = to_device(pack.ids, device), to_device(pack.positions, device)
        source, target = to_device(pack.source, device), to_device(pack.target, device)
        features = None
        if pack.vision:
            features = torch.cat([vision(item) for item in pack.vision])  # [V, 1 + D, H]
        seen = self.placeholders(pack.ids, features)  # [L], counted in host memory
        seen = None if seen is None else to_device(seen, device)
        embeds, levels = self.embed(ids, seen, features)  # [L, H], D x [V, H]
        hidden = text(
            inputs_embeds=embeds[None], position_ids=positions, use_cache=False,
            visual_pos_masks=None if seen is None else seen[None], deepstack_visual_embeds=levels,
            plan=attention_plan(pack, device)).last_hidden_state[0]  # [L, H]
        return token_logprobs(hidden[source], self.hf.lm_head.weight, target, self.banned,
                              temperature, chunk)

    def placeholders(self, ids, features):
        """ids in host memory, features [V, 1 + D, H] or None -> mask of the ids that stand for
        vision tokens, or None. Raises ValueError when they are not V."""
        if features is None:
            return None
        seen = (ids == self.pads[0]) | (ids == self.pads[1])
        found = int(seen.sum())
        if found != len(features):
            raise ValueError(f"{found} vision placeholders for {len(features)} vision tokens")
        return seen

    def embed(self, ids, seen, features):
        """ids [.., n], seen: mask of vision positions, features [V, 1 + D, H] or None ->
        (embeddings [.., n, H], deepstack levels)."""
        embeds = self.hf.model.language_model.embed_tokens(ids)
        if features is None:
            return embeds, None
        features = features.to(embeds.device, embeds.dtype)
        embeds = embeds.masked_scatter(seen[..., None], features[:, 0])
        return embeds, list(features[:, 1:].unbind(1))


def token_logprobs(hidden, weight, target, banned=(), temperature=1.0, chunk=1024):
    """Vocabulary projection in chunks, recomputed in backward: never a [tokens, 151936] fp32
    tensor.

    hidden [N, H], weight [vocab, H], target [N] -> (logp [N], entropy [N]) fp32.
    """
    from torch.utils.checkpoint import checkpoint

    # The same bias the engine samples under.
    bias = torch.zeros(weight.shape[0], device=hidden.device)
    never = to_device(torch.tensor(list(banned), dtype=torch.long), hidden.device)
    bias.index_fill_(0, never, -100.0)
    out = []
    for h, y in zip(hidden.split(chunk), target.split(chunk)):
        inputs = (h, weight, y, bias, temperature)
        if torch.is_grad_enabled():
            out.append(checkpoint(chunk_logprobs, *inputs, use_reentrant=False))
        else:
            out.append(chunk_logprobs(*inputs))
    logp, entropy = (torch.cat(x) for x in zip(*out))
    return logp, entropy


def chunk_logprobs(hidden, weight, target, bias, temperature):
    """hidden [n, H] -> (log-prob of target [n], entropy [n]), both of the distribution that is
    sampled from, fp32."""
    logits = (F.linear(hidden, weight).float() + bias) / temperature  # [n, vocab]
    norm = logits.logsumexp(-1)  # [n]
    logp = logits.gather(1, target[:, None])[:, 0] - norm
    with torch.no_grad():  # entropy is logged, never trained
        probabilities = (logits - norm[:, None]).exp()
        entropy = norm - (probabilities * logits).sum(-1)
    return logp, entropy


# ---- below: SFT chats, loading, checkpoints, start-up (a reader of the step may stop here) -------


def text_pieces(codec, ids):
    """Sampled ids -> the text that each completes; joined they are `decode` of the ids. A token
    that ends inside a character adds nothing yet."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = [b"" if i == codec.eos else piece for i, piece in zip(ids, pieces_of(codec, ids))]
    pieces = [decoder.decode(piece) for piece in written]
    if pieces:
        pieces[-1] += decoder.decode(b"", True)
    return pieces


class UserError(Exception):
    """Bad input by the user: one line on stderr, exit code 2."""


class RankError(UserError):
    """Bad input that one rank alone has met (a chat of its own share): that rank says it."""


class RunError(Exception):
    """A run that cannot go on, met by all ranks alike (full disk, no finite gradient): exit code
    1."""


# ------------------------------------------------------------------------------------------------
# Attention kernels


class PartsAttention(torch.autograd.Function):
    """Attention of trees on CPU without masks and without copies of the prefix: all branches ask
    the prefix at once, then each itself.

      o = w o_prefix + (1 - w) o_own,   w = exp(lse_prefix - lse)     lse: log of the softmax's sum
      lse = log(exp(lse_prefix) + exp(lse_own))

    Backward asks the same kernel with the whole o and lse: its formula then gives each part's share
    of the gradient (as in ring attention). query, key, value [1, heads, L, d] -> [1, heads, L, d].
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        def part(a, b, c, d, causal):  # queries a..b, keys c..d -> (out, lse)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            q, k, v = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
            return kernel(q, k, v, 0.0, causal, scale=scale)

        found = []
        for start, p, branches in layout:
            cut = start + p
            ends = np.cumsum([cut, *branches]).tolist()
            found.append(part(start, cut, start, cut, True))
            if branches:
                across, lse_across = part(cut, ends[-1], start, cut, False)
                own = [part(a, b, a, b, True) for a, b in zip(ends, ends[1:])]
                own, lse_own = (torch.cat(x, 2) for x in zip(*own))
                weight = torch.sigmoid(lse_across - lse_own)[..., None].to(own.dtype)
                found.append((own.lerp(across, weight), torch.logaddexp(lse_across, lse_own)))
        out, lse = (torch.cat(x, 2) for x in zip(*found))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))

        def part(a, b, c, d, causal):  # adds the share of queries a..b and keys c..d
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            q, k, v = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
            share_q, share_k, share_v = kernel(grad[:, :, a:b], q, k, v, out[:, :, a:b],
                                               lse[:, :, a:b], 0.0, causal, scale=ctx.scale)
            grad_q[:, :, a:b] += share_q
            grad_k[:, :, c:d] += share_k
            grad_v[:, :, c:d] += share_v

        for start, p, branches in ctx.layout:
            cut = start + p
            ends = np.cumsum([cut, *branches]).tolist()
            part(start, cut, start, cut, True)
            if branches:
                part(cut, ends[-1], start, cut, False)
            for a, b in zip(ends, ends[1:]):
                part(a, b, a, b, True)
        return grad_q, grad_k, grad_v, None, None


def compiled_flex():
    """FlexAttention is only fast, and only memory-safe, compiled; compiled once per process."""
    if not hasattr(compiled_flex, "function"):
        from torch.nn.attention.flex_attention import flex_attention

        compiled_flex.function = torch.compile(flex_attention, dynamic=True)
    return compiled_flex.function


def frames_attention(module, query, key, value, attention_mask=None, scaling=None,
                     cu_seq_lens_q=None, max_length_q=None, **_):  # fmt: skip
    """The tower's attention: each frame attends to itself. query [1, heads, L, d] -> ([1, L, heads,
    d], None).

    The frames of one item have one size: a batch for one sdpa call, where transformers' own path is
    a loop over frames in every layer.
    """
    frames = len(cu_seq_lens_q) - 1
    if frames * int(max_length_q) != query.shape[2]:
        raise ValueError("the frames of one call of the tower have to be of one size")
    split = [x[0].unflatten(1, (frames, -1)).transpose(0, 1) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*split, scale=scaling)  # [frames, heads, L / frames, d]
    return out.transpose(1, 2).flatten(0, 1)[None], None


# ------------------------------------------------------------------------------------------------
# Chats with assistant turns (SFT)


@dataclass
class Sequence:
    """One agent context: expanded ids, mask of trained ids, the frames behind it."""

    ids: list
    mask: list
    vision: list = field(default_factory=list)


def encode_chat(codec, messages, items=(), tools=None):
    """A whole conversation -> Sequence; mask 1 on assistant tokens and their turn ends.

    Built from the three pieces of a rollout (prompt, turns, glue), so SFT teaches the ids RL will
    see.
    """
    roles = [m["role"] for m in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    rest = iter(items)  # of the videos that are still to come, in order

    def shown(part):
        return list(itertools.islice(rest, len(videos_in(part))))

    ids, _ = encode_prompt(codec, messages[:first], shown(messages[:first]), tools)
    mask = [0] * len(ids)
    position = first
    while position < len(messages):
        turn = turn_ids(codec, content_text(messages[position]), ids)
        ids += turn
        mask += [1] * len(turn)
        position += 1
        replies = []  # all that stands before the next assistant turn: ONE glue
        while position < len(messages) and roles[position] != "assistant":
            replies.append(messages[position])
            position += 1
        if replies:
            seen = shown(replies)
            glue = expand(codec, glue_ids(codec, replies, True, seen), seen)
            ids += glue
            mask += [0] * len(glue)
    if next(rest, None):
        raise ValueError("more frame sets than videos in the chat")
    return Sequence(ids, mask, list(items))


def videos_in(messages):
    """The video pieces of messages, in order."""
    lists = [m["content"] for m in messages if not isinstance(m["content"], str)]
    return [piece for content in lists for piece in content if piece["type"] == "video"]


def content_text(message):
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def turn_ids(codec, text, prompt_ids):
    """An assistant turn as data has it -> ids behind `prompt_ids`, those that a rollout would hold.

    `<think>` is forced in rollouts as `<think>\\n`, ids of its own: it is encoded apart, whether or
    not data has the newline, or blanks before it. Where the template has opened a thought, a turn
    without one closes it first. Control tokens spelled in the text stay text.
    """
    ids = []
    bare = text.lstrip()
    if bare.startswith("<think>"):
        ids = think_prefix_ids(codec, prompt_ids)
        text = bare.removeprefix("<think>").removeprefix("\n")
    elif codec.opens_thought:
        text = "</think>\n\n" + text
    control = [codec.tokenizer.convert_ids_to_tokens(i) for i in (*codec.banned, codec.eos)]
    return ids + encode(codec, guard(codec, text, control)) + [codec.eos]


# ------------------------------------------------------------------------------------------------
# Opening a checkpoint


def resolve_checkpoint(path):
    """A checkpoint folder, or the run folder that holds one under `last` -> the folder that
    `from_pretrained` opens. Checks its files and those of its bases, and runs no code in them.
    Raises UserError that names the fault and the remedy."""
    folder = find_config(path)
    # The tokenizer's class is in tokenizer_config.json: another one splits other ids, silently.
    # transformers 5 saves the image processor inside processor_config.json.
    needed = [("tokenizer.json",), ("tokenizer_config.json",),
              ("preprocessor_config.json", "processor_config.json")]
    for names in needed:
        if not any(os.path.isfile(os.path.join(folder, name)) for name in names):
            raise UserError(f"checkpoint {folder}: {names[0]} is missing; copy it from the "
                            "checkpoint that this one was made from")
    read_object(os.path.join(folder, "tokenizer.json"))  # cut off, some readers still take it
    base, *adapters = lineage(folder, check=True)
    check_weights(base, dict(meta_model(base).named_parameters()))
    for adapter in adapters:
        stored_weights(adapter)
    return os.path.realpath(folder)


def find_config(path):
    """A checkpoint folder, or the run folder that holds one under `last` -> the folder with the
    config.json, if that is the configuration of a model that this code trains: the one check for
    all scripts, and for tools/plan.py. Raises UserError."""
    folders = [path, os.path.join(path, "last")]
    folder = next((f for f in folders if os.path.isfile(os.path.join(f, "config.json"))), None)
    if folder is None:
        raise UserError(f"checkpoint {path}: no config.json here nor in {path}/last; give a folder "
                        "saved by sft.py or grpo.py, or a whole download of Qwen3-VL with "
                        "safetensors (no GGUF, no adapters of another tool)")
    config = read_object(os.path.join(folder, "config.json"))
    kind = config.get("model_type")
    if kind != "qwen3_vl":
        raise UserError(f"checkpoint {folder}: model_type is {kind!r}, this code trains qwen3_vl "
                        "(dense Qwen3-VL: 2B, 4B, 8B, 32B; README.md says why)")
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)]
    if any(part.get("quantization_config") is not None for part in parts):
        raise UserError(f"checkpoint {folder}: quantization_config in config.json: quantized "
                        "weights cannot be trained; give the BF16 checkpoint it was made from")
    # Files that may ask for Python code of the checkpoint's own, which is never run.
    for kind in ("", "tokenizer_", "processor_", "preprocessor_", "video_preprocessor_",
                 "generation_"):
        path = os.path.join(folder, name := f"{kind}config.json")
        if os.path.isfile(path) and asks_for_code(read_object(path)):
            raise UserError(f"checkpoint {folder}: {name} asks for code of its own (auto_map), "
                            "which is never run; Qwen3-VL needs none: remove auto_map, or use the "
                            "published checkpoint")
    return folder


def asks_for_code(part):
    """Whether a part of a configuration has an auto_map, at any depth."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return (isinstance(part, dict) and "auto_map" in part) or any(map(asks_for_code, inner))


def read_object(path):
    """A checkpoint's JSON file that holds an object -> dict. Raises UserError."""
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON ({e}); copy it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, no JSON object; copy it again")
    return content


@contextlib.contextmanager
def reading(ckpt, part):
    """An error that a library raises inside, for a file of a checkpoint, becomes a UserError."""
    try:
        yield
    except Exception as e:  # tokenizers raises Exception itself, jinja2 and others their own
        why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise UserError(f"checkpoint {ckpt}: its {part} cannot be used ({why}); copy the files "
                        "beside the weights again") from e


def load_config(ckpt):
    """Checkpoint folder -> transformers' configuration."""
    import_shim()
    quiet_libraries()
    from transformers import AutoConfig

    with reading(ckpt, "config.json"):
        return AutoConfig.from_pretrained(ckpt, trust_remote_code=False)


def meta_model(ckpt):
    """Checkpoint folder -> transformers' model on the meta device: names and shapes."""
    config = load_config(ckpt)
    from transformers import Qwen3VLForConditionalGeneration

    with reading(ckpt, "config.json"), torch.device("meta"):
        hf = Qwen3VLForConditionalGeneration(config)
    hf.tie_weights()
    return hf


def stored_weights(folder):
    """Every safetensors header of a checkpoint -> {weight: (shape, dtype)}. A missing shard or a
    truncated file is found now, not after the models are built: UserError."""
    from safetensors import SafetensorError, safe_open

    names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    index = os.path.join(folder, "model.safetensors.index.json")
    listed = None  # weight -> file, if there are several files
    if os.path.isfile(index):
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise UserError(f"{index} has no weight_map; copy it again")
        if missing := sorted(set(map(str, listed.values())) - set(names)):
            raise UserError(f"checkpoint {folder}: {missing[0]} is missing, which the index names; "
                            "download it again")
    if not names:
        raise UserError(f"checkpoint {folder}: no .safetensors file; only safetensors are loaded, "
                        "no .bin, no GGUF: take or save the checkpoint in that format")
    found, where = {}, {}
    for name in names:
        try:
            with safe_open(os.path.join(folder, name), "pt") as f:
                slices = {key: f.get_slice(key) for key in f.keys()}
                headers = {k: (list(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
        except (SafetensorError, OSError) as e:
            raise UserError(f"checkpoint {folder}: {name} cannot be read ({e}); "
                            "copy it again") from None
        for key, (_, dtype) in headers.items():
            if key in where:  # which one is loaded would be the loader's choice
                raise UserError(f"checkpoint {folder}: {key} is in {where[key]} and in {name}; "
                                "delete the file that does not belong here")
            if dtype not in ("BF16", "F16", "F32"):
                raise UserError(f"checkpoint {folder}: {key} in {name} is stored as {dtype}, and "
                                "quantized weights cannot be trained; give a checkpoint in BF16, "
                                "F16 or F32")
            where[key] = name
        found.update({k: v for k, v in headers.items() if listed is None or listed.get(k) == name})
    return found


def small_files(folder):
    """-> {name: bytes} of the files that training does not change: configuration, tokenizer,
    processor, chat template. The rule: every *.json, *.jinja, *.txt and *.model of the folder
    itself, up to 64 MiB, but for those that describe the weights beside them (an index, adapters,
    our state.json). So no code, no weights, no README, no optimizer."""
    kinds, own = (".json", ".jinja", ".txt", ".model"), ("adapter_config.json", "state.json")
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not name.endswith(kinds) or name.endswith(".index.json") or name in own:
            continue
        if os.path.isfile(path) and os.path.getsize(path) <= 2**26:  # through links: a cache's
            with open(path, "rb") as f:
                found[name] = f.read()
    return found


def content_digest(ckpt):
    """Digest of what a checkpoint folder holds, wherever it lies: its small files whole, of weights
    4 KiB in every MiB, since 16 GB would take minutes to read."""
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(os.listdir(ckpt)):
        weights = name.endswith(".safetensors")
        if not weights and not name.endswith((".json", ".jinja", ".txt")) or name == "state.json":
            continue  # a README, an optimizer, the state of its training
        path = os.path.join(ckpt, name)
        if name == "adapter_config.json":  # holds its base's digest; where that lies is no content
            config = read_object(path)
            config.pop("base_model_name_or_path", None)
            digest.update(json.dumps(config, sort_keys=True).encode())
            continue
        size = os.path.getsize(path)
        stride = 2**20 if weights and size > 2**26 else 2**12  # bytes; small files: all of them
        digest.update(f"{name} {size}".encode())
        with open(path, "rb") as f:
            for at in range(0, size, stride):
                f.seek(at)
                digest.update(f.read(2**12))
    return digest.hexdigest()


def load_codec(ckpt, channel="image"):
    """Checkpoint directory -> Codec. channel: "image" | "video" (how frames enter the prompt)."""
    find_config(ckpt)
    config = load_config(ckpt)
    from transformers import AutoProcessor

    with reading(ckpt, "tokenizer or processor"):
        processor = AutoProcessor.from_pretrained(ckpt, trust_remote_code=False)
        tokenizer, images = processor.tokenizer, processor.image_processor
        videos, vocabulary = processor.video_processor, tokenizer.get_vocab()
        eos, cut = vocabulary["<|im_end|>"], (images.patch_size, images.merge_size,
                                              images.temporal_patch_size)
    if not (processor.chat_template or tokenizer.chat_template):
        raise UserError(f"checkpoint {ckpt}: no chat template; copy chat_template.json or "
                        "chat_template.jinja from the checkpoint that this one was made from")
    tower = config.vision_config
    wanted = (tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size)
    if cut != wanted:
        raise UserError(f"checkpoint {ckpt}: its image processor cuts patches (pixels, merged, "
                        f"frames) {cut}, its vision tower takes {wanted}; copy "
                        "preprocessor_config.json again")
    same = (list(videos.image_mean), list(videos.image_std)) == (
        list(images.image_mean), list(images.image_std))  # fmt: skip
    if channel == "video" and not same:
        raise UserError(f"checkpoint {ckpt}: image and video processor normalise differently, and "
                        "vLLM applies the image processor's to both; use --channel image")
    # Published checkpoints end on two ids. vLLM stops at either; sampled, the other one would stand
    # in the turn as text.
    never = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
             "<|im_start|>", "<|endoftext|>")  # fmt: skip
    banned = {vocabulary[t] for t in never if t in vocabulary} | (end_ids(ckpt) - {eos})
    added = [t for t in tokenizer.get_added_vocab() if t.startswith("<")]
    codec = Codec(
        tokenizer=tokenizer, processor=processor, channel=channel,
        image_pad=config.image_token_id, video_pad=config.video_token_id,
        vision_start=config.vision_start_token_id, vision_end=config.vision_end_token_id, eos=eos,
        patch=cut[0], merge=cut[1], temporal=cut[2],
        mean=tuple(images.image_mean), std=tuple(images.image_std),
        markup=tuple(sorted(added, key=len, reverse=True)),  # longest first: one may hold another
        banned=tuple(sorted(banned)), opens_thought=False, pieces=token_bytes(tokenizer),
        files=small_files(ckpt))
    with reading(ckpt, "chat template"):
        prompt = template(codec, [{"role": "user", "content": "x"}])
    codec.opens_thought = prompt.endswith("<think>\n")
    return codec


def end_ids(ckpt):
    """Ids at which generation ends, as generation_config.json says."""
    path = os.path.join(ckpt, "generation_config.json")
    if not os.path.isfile(path):
        return set()
    ends = read_object(path).get("eos_token_id")
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    if not all(isinstance(end, int) for end in ends):
        raise UserError(f"{path}: eos_token_id must be an id or a list of ids, got {ends}")
    return set(ends)


def token_bytes(tokenizer):
    """Byte-level BPE tokenizer -> list of bytes, one per id: what that token writes (b"" for unused
    ids). Tags are found on bytes: one token may hold half a character or a third of `<answer>`."""
    # GPT-2's table: these bytes stand for themselves, the others for characters from 256 on.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    char_to_byte = {chr(b): b for b in visible}
    char_to_byte.update({chr(256 + n): b for n, b in enumerate(hidden)})
    added = tokenizer.get_added_vocab()
    vocabulary = tokenizer.get_vocab()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if token in added or any(c not in char_to_byte for c in token):
            pieces[i] = token.encode("utf-8")
        else:
            pieces[i] = bytes(char_to_byte[c] for c in token)
    return pieces


def load_sharded(ckpt, codec, device, recompute="none", replicas=1, frozen=False, lora=0):
    """Checkpoint directory -> sharded Policy. Collective; no rank ever holds a whole copy.

    Built on the meta device, then every rank reads its own rows from the safetensors files. Trained
    weights are fp32 whatever the files hold. replicas: see shard. frozen: a reference without
    gradients; its shards are in the precision it computes in, and it has no tower: it is given
    features. lora: rank of new adapters, the rest is frozen; 0 = all weights are trained.
    """
    import torch.distributed.checkpoint as dcp

    hf = meta_model(ckpt)
    # Published configurations say bf16, in which a step of 2e-6 rounds to nothing.
    hf.float()
    if frozen or lora:
        hf.requires_grad_(False)
        hf.to(compute_dtype(device))
    if lora:
        add_adapters(hf, lora)
    policy = shard(as_policy(hf, codec, device, recompute), device, replicas)
    if frozen:
        hf.model.visual = None
        if hasattr(policy, "set_reshard_after_forward"):
            # The root stays whole after a forward, for a backward that never comes.
            policy.set_reshard_after_forward(True, recurse=False)
    policy.to_empty(device=device)
    hf.tie_weights()  # the line above unties what is not in shards
    # Rotary tables are buffers that are computed, not stored.
    rotary = [(hf.model.language_model, "rotary_emb")]
    rotary += [] if frozen else [(hf.model.visual, "rotary_pos_emb")]
    for owner, name in rotary:
        old = getattr(owner, name)
        setattr(owner, name, type(old)(old.config).to(device))
    weights = {name: p.detach() for name, p in hf.named_parameters() if ".lora_" not in name}
    base, *adapters = lineage(ckpt)
    policy.ckpt, policy.stored_as = ckpt, check_weights(base, weights)
    policy.digest = content_digest(ckpt) if lora else None  # of the base that adapters will name
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(base))
    for name, parts in read_adapters(adapters).items():  # of stages before: part of the weights
        whole = own_rows(weights[name], adapters_sum(parts).to(device))
        weights[name].copy_(weights[name].float() + whole)
    start_adapters(hf)
    wrong = [n for n, p in hf.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    assert not wrong, f"trained weights that are not fp32: {wrong[:3]}"
    return policy


def check_weights(ckpt, weights):
    """-> dtypes the checkpoint holds them in. Raises UserError unless it has each in its shape."""
    stored = stored_weights(ckpt)
    missing = sorted(set(weights) - set(stored))
    if missing:
        raise UserError(f"checkpoint {ckpt}: {len(missing)} weights are missing, for example "
                        f"{missing[0]}; download it again")
    for name, weight in weights.items():
        if stored[name][0] != list(weight.shape):
            raise UserError(f"checkpoint {ckpt}: {name} has shape {stored[name][0]}, the "
                            f"configuration says {list(weight.shape)}; the two are not of one "
                            "checkpoint, copy it again")
    return "/".join(sorted({stored[name][1] for name in weights}))


def compute_dtype(device):
    """bf16 on GPU; fp32 on CPU, where bf16 gains nothing."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def as_policy(hf, codec, device, recompute):
    """transformers' model -> Policy: our attention, tower frozen, decoder layers recomputed in
    backward as asked."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)
    AttentionInterface.register("frames_as_flash", frames_attention)
    hf.model.language_model.config._attn_implementation = "packed"
    # transformers hands over all frames at once only to a name with "flash" in it.
    hf.model.visual.config._attn_implementation = "frames_as_flash"
    hf.model.visual.requires_grad_(False)
    hf.model.visual.to(compute_dtype(device))
    if recompute == "full":
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, codec)
    policy.train()
    hf.model.visual.eval()
    return policy


def shard(policy, device, replicas=1):
    """FSDP2: one group per decoder layer, one for the rest (embeddings, head, norm). The frozen
    tower stays replicated.

    GPU: fp32 shards, bf16 compute, fp32 gradient reduction. replicas: groups of ranks that each
    hold the whole model in shards (HSDP); with one per node, weights are gathered inside a node and
    only gradients cross between nodes. 0: as many as ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    replicas = replicas or world
    if world % replicas:
        raise UserError(f"--replicas {replicas}: {world} ranks cannot be divided into so many")
    if world == 1 and compute_dtype(device) == torch.float32:
        return policy  # nothing to divide, no precision to mix: only hooks, a third of a toy's step
    if replicas == 1:
        mesh = init_device_mesh(device.type, (world,))
    else:
        shape, names = (replicas, world // replicas), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tower = set(policy.hf.model.visual.parameters())
    for layer in policy.hf.model.language_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=tower)
    return policy


# ------------------------------------------------------------------------------------------------
# Adapters (--lora)
#
#   y = x W' + 2 (x A') B'      W [out, in] frozen, A [r, in], B [out, r] trained; alpha = 2 r
#
# LoRA, arXiv 2106.09685, on the matrices of the decoder layers. Not peft: it wraps modules, and
# under its names neither the shards of a checkpoint nor the engine's weights would be found. Files
# have peft's layout, so that its tools read them.


class LoraLinear(torch.nn.Linear):
    adapted = True  # False: W alone, which is the reference of the KL

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if self.adapted:
            y = torch.add(y, F.linear(F.linear(x, self.lora_A), self.lora_B), alpha=2)
        return y


def add_adapters(hf, rank):
    """Adapters in fp32 for a frozen model on the meta device."""
    for module in hf.model.language_model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = LoraLinear
            for name, shape in (("lora_A", (rank, module.in_features)),
                                ("lora_B", (module.out_features, rank))):
                weight = torch.empty(shape, dtype=torch.float32, device="meta")
                module.register_parameter(name, torch.nn.Parameter(weight))


def start_adapters(hf):
    """A small and random, the same for every --seed; B zero: the adapted model begins as the
    base."""
    import hashlib

    for name, p in hf.named_parameters():
        if name.endswith(".lora_A"):  # seeded by its name: the same on any number of ranks
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            bound = p.shape[1] ** -0.5
            draw = torch.empty(p.shape).uniform_(-bound, bound,
                                                 generator=torch.Generator().manual_seed(seed))
            p.detach().copy_(own_rows(p, draw.to(p.device)))
        elif name.endswith(".lora_B"):
            p.detach().zero_()


def own_rows(weight, whole):
    """This rank's part of a whole tensor, split as `weight` is."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(weight, "device_mesh"):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


class WithoutAdapters:
    """The policy with its adapters off, called as it is: the reference of the KL, no second
    copy."""

    def __init__(self, policy):
        self.policy = policy

    def __call__(self, *args):
        layers = [m for m in self.policy.modules() if isinstance(m, LoraLinear)]
        for layer in layers:
            layer.adapted = False
        try:
            return self.policy(*args)
        finally:
            for layer in layers:
                layer.adapted = True


def lineage(ckpt, check=False):
    """Checkpoint folder -> [folder of whole weights, adapters on it, adapters on those, ..]. Raises
    UserError where a base is not there; check, which reads some of every MiB and is asked for once,
    by resolve_checkpoint: or is not the one that the adapters were trained on."""
    settings = os.path.join(ckpt, "adapter_config.json")
    if not os.path.isfile(settings):
        return [ckpt]
    config = read_object(settings)
    if "base_digest" not in config:
        raise UserError(f"checkpoint {ckpt}: its adapters were not saved by sft.py or grpo.py; "
                        "merge them with the tool that made them")
    base = str(config.get("base_model_name_or_path"))
    if not os.path.isdir(base):
        raise UserError(f"checkpoint {ckpt}: its base {base} is not there; where it lies now goes "
                        "into base_model_name_or_path of adapter_config.json")
    if check and config["base_digest"] != content_digest(base):
        raise UserError(f"checkpoint {ckpt}: {base} is not the checkpoint that these adapters were "
                        "trained on (its content differs)")
    return [*lineage(base, check), ckpt]


def read_adapters(folders):
    """Adapter folders -> {name of a weight: [(factor, A, B), ..]}."""
    from safetensors.torch import load_file

    found = {}
    for folder in folders:
        with open(os.path.join(folder, "adapter_config.json")) as f:
            config = json.load(f)
        tensors = load_file(os.path.join(folder, "adapter_model.safetensors"))
        for key, a in tensors.items():
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            if ".lora_A." in key:
                b = tensors[key.replace(".lora_A.", ".lora_B.")]
                part = (config["lora_alpha"] / config["r"], a.float(), b.float())
                found.setdefault(name, []).append(part)
    return found


def adapters_sum(parts):
    """[(factor, A, B), ..] -> what they add to a weight, [out, in] fp32."""
    return sum(factor * (b @ a) for factor, a, b in parts)


def merged_weights(ckpt):
    """Iterator of (name, tensor) of a checkpoint in host memory, adapters added."""
    from safetensors import safe_open

    base, *adapters = lineage(ckpt)
    added = read_adapters(adapters)
    for name in sorted(n for n in os.listdir(base) if n.endswith(".safetensors")):
        with safe_open(os.path.join(base, name), "pt") as f:
            for key in f.keys():
                tensor = f.get_tensor(key)
                if key in added:
                    tensor = (tensor.float() + adapters_sum(added[key])).to(tensor.dtype)
                yield key, tensor


def check_adapters(policy, path):
    """Raises UserError unless the run saved at `path` trained what `policy` trains: everything, or
    adapters of this rank on this base."""
    a = next((p for name, p in policy.named_parameters() if name.endswith(".lora_A")), None)
    config = {}
    if os.path.isfile(settings := os.path.join(path, "adapter_config.json")):
        with open(settings) as f:
            config = json.load(f)
    rank, then = len(a) if a is not None else 0, config.get("r", 0)
    if rank != then:
        raise UserError(f"{path} was trained with --lora {then}, not {rank}")
    if rank and config["base_digest"] != policy.digest:
        raise UserError(f"{path} holds adapters on another base than {policy.ckpt}")


def save_adapters(policy, files, folder, weights):
    """Write peft's two files, adapter_config.json and adapter_model.safetensors: adapters on the
    checkpoint that the policy was loaded from. Its small files go beside them."""
    from safetensors.torch import save_file

    named = {"base_model.model." + re.sub(r"\.lora_([AB])$", r".lora_\1.weight", name): tensor
             for name, tensor in weights.items()}
    save_file(named, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})
    rank = next(tensor.shape[0] for name, tensor in weights.items() if name.endswith(".lora_A"))
    targets = sorted({name.split(".")[-2] for name in weights})
    config = {"peft_type": "LORA", "task_type": None, "r": rank, "lora_alpha": 2 * rank,
              "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
              "inference_mode": True, "base_model_name_or_path": policy.ckpt,
              "base_digest": policy.digest}
    write_atomic(os.path.join(folder, "adapter_config.json"), json.dumps(config, indent=1))
    save_files(files, folder)


def trained_parameters(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def adamw(parameters, lr, beta2, device, weight_decay=0.01):
    """AdamW with beta1 0.9; weight decay on matrices, none on norms."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=device.type == "cuda")


def clip_gradients(policy, limit):
    """Clip to `limit` (0: not) -> the norm before, of all ranks' gradients: the same on each."""
    norm = torch.nn.utils.clip_grad_norm_(trained_parameters(policy), limit or float("inf"))
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def full_weights(policy, dtype=None):
    """Iterator of (checkpoint name, full tensor) in `dtype` (None: its own), in the same order on
    every rank: gathering is a collective, so all of them have to run it to its end. This is what
    vLLM's `reload_weights` takes; a tied lm_head is left out, as in the checkpoint file."""
    tied = policy.hf.config.tie_word_embeddings
    state = policy.hf.state_dict()
    for name, tensor in state.items():
        if (tied and name == "lm_head.weight") or ".lora_" in name:
            continue
        whole = whole_tensor(tensor.detach().to(dtype or tensor.dtype))  # cast before it travels
        if (stem := name.removesuffix("weight")) + "lora_A" in state:  # adapters: added in fp32
            a, b = (whole_tensor(state[f"{stem}lora_{letter}"].detach()) for letter in "AB")
            whole = (whole.float() + adapters_sum([(2, a, b)])).to(whole.dtype)
        yield name, whole


def whole_tensor(tensor):
    """A sharded tensor's whole on every rank. Collective; any other tensor is returned as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ------------------------------------------------------------------------------------------------
# Saving and going on


def save_run(policy, codec, optimizer, out, step, state, links=("last",), keep=2):
    """Save a run as out/step_NNNNNN with `links` to it; the newest `keep` stay besides those with a
    link. Collective: training waits, since a save takes seconds and comes every some dozen steps.
    state: JSON-able loop state. Raises RunError where it could not be written."""
    import torch.distributed as dist

    path = os.path.join(out, f"step_{step:06d}")
    save_checkpoint(policy, codec, path, {"step": step, **state}, optimizer)
    if dist.get_rank() == 0:
        for link in links:
            symlink(os.path.join(out, link), path)
        prune_checkpoints(out, keep)


def save_checkpoint(policy, codec, path, state, optimizer=None):
    """Write, atomically, a directory that `from_pretrained` and vLLM load; with an optimizer (or a
    list of them) `train_state/` beside the weights: fp32 shards of weights and moments in torch's
    distributed format, which another number of ranks can load.

    Collective. Raises RunError, on every rank, when any of them cannot write; nothing is left under
    the final name then.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    first, why = dist.get_rank() == 0, None
    state_dict = trained_state(policy)
    adapted = any(name.endswith(".lora_A") for name in state_dict)
    if adapted:
        gathered = ((name.removeprefix("hf."), whole_tensor(p)) for name, p in state_dict.items())
    else:
        gathered = full_weights(policy, compute_dtype(next(policy.parameters()).device))
    # Every rank runs it to its end, since gathering is a collective; one keeps what comes.
    weights = {name: tensor.cpu() for name, tensor in gathered if first}
    try:
        with contextlib.ExitStack() as opened:
            folder = None
            if first:
                try:
                    folder = opened.enter_context(atomic_folder(path))
                    if adapted:
                        save_adapters(policy, codec.files, folder, weights)
                    else:
                        save_whole(codec.files, folder, weights)
                except (OSError, SafetensorError) as error:
                    why = f"{type(error).__name__}: {error}"
            # All ranks have to hear of a full disk before they meet again.
            folder, why = broadcast([folder, why])
            if why:
                raise OSError(why)
            if optimizer is not None:
                moments = get_optimizer_state_dict(policy, optimizer)
                # Alone without collectives: gloo's thread would copy in a pool of threads of its
                # own, and with more threads than cores OpenMP's are slow from then on, by half.
                dcp.save({"model": state_dict, "optimizer": moments},
                         checkpoint_id=os.path.join(folder, "train_state"),
                         no_dist=dist.get_world_size() == 1)
            if first:
                mark_complete(folder, state)
    except OSError as error:
        why = str(error)
    except dcp.CheckpointException as error:  # the same on every rank, whichever could not write
        why = str(next(iter(error.failures.values()))[0])
    (why,) = broadcast([why])
    if why:
        left = newest_checkpoint(os.path.dirname(os.path.abspath(path)))
        rest = f"the newest whole one is {left}: make room, and the same command goes on from it"
        raise RunError(f"checkpoint {path} could not be written ({why}); "
                       + (rest if left else "there is no older one"))


def save_whole(files, folder, weights):
    """Write a checkpoint of whole weights: safetensors (above 5 GB several files and an index) and
    the small files."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shards = split_torch_state_dict_into_shards(weights)
    for name, keys in shards.filename_to_tensors.items():
        part = {key: weights[key].contiguous() for key in keys}
        save_file(part, os.path.join(folder, name), {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_atomic(os.path.join(folder, "model.safetensors.index.json"),
                     json.dumps(index, indent=2))
    dtypes = {tensor.dtype for tensor in weights.values()}
    save_files(files, folder, dtypes.pop() if len(dtypes) == 1 else None)


def save_files(files, folder, dtype=None):
    """Write small_files byte for byte, since each library reads its own dialect of them: saved by
    transformers 5 they would not load in transformers 4. dtype: of the weights beside them; each
    dtype or torch_dtype in config.json becomes it."""
    for name, content in files.items():
        if name == "config.json" and dtype:
            spelled = str(dtype).removeprefix("torch.").encode()
            content = re.sub(rb'("(?:torch_)?dtype"\s*:\s*")[^"]*', rb"\g<1>" + spelled, content)
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)


def edit_json(path, parts, values):
    """Set values in a JSON file, at its top and in its named parts."""
    with open(path) as f:
        config = json.load(f)
    for owner in (config, *(config[part] for part in parts)):
        owner.update(values)
    write_atomic(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def broadcast(values):
    """Rank 0's list of plain objects, on every rank. Collective."""
    import torch.distributed as dist

    dist.broadcast_object_list(values)
    return values


def trained_state(policy):
    """{name: weight} of what is trained, a tied matrix once: the tower is in the checkpoint."""
    # A forward without a backward leaves the root whole, and frees that memory at the next chance:
    # FSDP's hook of state_dict brings the shards back.
    policy.state_dict()
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


def load_train_state(policy, optimizer, path):
    """Restore weights and optimizer (or a list of them) from `path`/train_state, saved by any
    number of ranks. Collective. The loop state is resume_point's."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    check_adapters(policy, path)
    shards = {"model": trained_state(policy),
              "optimizer": states.get_optimizer_state_dict(policy, optimizer)}
    dcp.load(shards, checkpoint_id=os.path.join(path, "train_state"),  # weights: in place
             no_dist=dist.get_world_size() == 1)  # as in save_checkpoint
    states.set_optimizer_state_dict(policy, optimizer, shards["optimizer"])


@contextlib.contextmanager
def atomic_folder(path):
    """A temporary folder that becomes `path` when the block ends without an error; else nothing is
    left of it. An older folder of that name goes just before."""
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    temp = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=parent)
    try:
        yield temp
        for folder, _, names in os.walk(temp):
            for name in names:
                with open(os.path.join(folder, name), "rb") as f:
                    os.fchmod(f.fileno(), 0o644)  # safetensors lets nobody else read
                    os.fsync(f.fileno())
        os.chmod(temp, 0o755)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temp, path)
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


def symlink(link, target):
    """Make `link` a relative link to the folder `target` beside it, atomically."""
    temp = f"{link}.tmp{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.remove(temp)
    os.symlink(os.path.basename(target), temp)
    os.replace(temp, link)


def mark_complete(folder, state):
    """state.json, written last: loop state, and every other file with its bytes."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    files = {os.path.relpath(path, folder): os.path.getsize(path) for path in paths}
    marker = json.dumps({**state, "files": files}, indent=1)
    write_atomic(os.path.join(folder, "state.json"), marker)


def is_complete(folder):
    """Whether a checkpoint is whole: state.json is there and all files are as long as it says."""
    try:
        with open(os.path.join(folder, "state.json")) as f:
            files = json.load(f)["files"].items()
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest_checkpoint(out):
    """The newest complete step_* folder of a run, or None. A torn one is passed over."""
    names = os.listdir(out) if os.path.isdir(out) else []
    folders = [os.path.join(out, n) for n in sorted(names, reverse=True) if n.startswith("step_")]
    return next((folder for folder in folders if is_complete(folder)), None)


def resume_point(out, args, resume):
    """Where a run goes on -> (folder, its loop state), or (None, {}) to begin.

    resume None: go on when --out holds a run of the same settings. True: go on whatever they were.
    False: begin anew; older checkpoints are deleted. Raises UserError for a run of other settings.
    """
    folder = newest_checkpoint(out)
    if folder is None:
        torn = sorted(name for name in os.listdir(out) if name.startswith("step_"))
        if torn and resume is not False:  # damaged later: not ours to delete unasked
            raise UserError(f"{out}: {torn[-1]} is not whole, and nothing else here is (a file is "
                            "missing or of another size than state.json says); --no-resume begins "
                            "anew and deletes it")
        return None, {}
    with open(os.path.join(folder, "state.json")) as f:
        state = json.load(f)
    # How far, how fast, to whom: these may differ between two parts of one run.
    free = {"steps", "epochs", "resume", "out", "save_every", "eval_every", "show_every",
            "max_seqs", "frame_cache_gb", "frame_cache_dir", "frame_cache_dir_gb", "engine_share",
            "patience", "replicas", "wandb"}  # fmt: skip
    now, then = json.loads(json.dumps(vars(args))), state.get("args", {})
    other = sorted(k for k in then if k in now and k not in free and then[k] != now[k])
    if resume is None and other:
        flags = [f"--{k.replace('_', '-')} {then[k]} (now {now[k]})" for k in other[:3]]
        raise UserError(f"--out {out} holds a run of other settings: {', '.join(flags)}; choose "
                        "another --out, or --resume to go on with the new ones, or --no-resume to "
                        "delete it")
    return (None, {}) if resume is False else (folder, state)


def say(text):
    """One line on stdout, of rank 0 alone: what is being done while nothing else shows it."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def clean_run(out, start):
    """Rank 0, before the first step: drop what killed runs left half-written and, where a run
    begins anew, its older checkpoints."""
    for folder in (out, os.path.join(out, "rollouts")):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            if re.search(r"\.tmp\d+$", name):  # write_atomic's, and symlink's
                os.remove(os.path.join(folder, name))
    for name in os.listdir(out):
        path = os.path.join(out, name)
        if name.startswith(".step_") or (start == 0 and name.startswith("step_")):
            shutil.rmtree(path, ignore_errors=True)
        if start == 0 and name in ("last", "best") and os.path.islink(path):
            os.remove(path)


def prune_checkpoints(out, keep):
    """Keep the newest `keep` complete step_* folders of a run, and what `last` and `best` point
    to."""
    names = [n for n in os.listdir(out) if n.startswith("step_")]
    whole = sorted(n for n in names if is_complete(os.path.join(out, n)))
    links = [os.path.realpath(os.path.join(out, link)) for link in ("last", "best")]
    spared = {os.path.basename(target) for target in links}
    for name in set(whole[:-keep]) - spared:
        # Half deleted it would be no checkpoint, and nobody's to delete; so clean_run finds it.
        doomed = os.path.join(out, f".{name}.pruned")
        os.rename(os.path.join(out, name), doomed)
        shutil.rmtree(doomed)


# ------------------------------------------------------------------------------------------------
# Numbers of a run


class Log:
    """Rank 0's numbers: log.jsonl, a line on the terminal, and --wandb; the same everywhere."""

    def __init__(self, out, start, args):
        """start: the step behind which the run goes on. A torn last line and lines of later steps
        are dropped."""
        path = os.path.join(out, "log.jsonl")
        self.out, self.start, self.began = out, start, time.monotonic()
        kept = [row for row in whole_rows(path) if row["step"] <= start] if start else []
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = open(path, "a", encoding="utf-8")
        self.wandb = None
        if args.wandb:
            import hashlib

            import wandb

            name = os.path.abspath(out)  # the same run again, wherever it goes on
            identity = hashlib.sha256(name.encode()).hexdigest()[:16]
            self.wandb = wandb.init(project=args.wandb, name=os.path.basename(name), id=identity,
                                    resume="allow", config=vars(args), dir=out)

    def write(self, record, line):
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(line, flush=True)
        if self.wandb:
            self.wandb.log(record, step=record["step"])

    def eta(self, step, steps):
        """Seconds that the steps behind `step` will take at the pace so far."""
        return (time.monotonic() - self.began) / (step - self.start) * (steps - step)

    def close(self, step, steps):
        """Say how the run ended."""
        minutes = (time.monotonic() - self.began) / 60
        end = f"done: {steps - self.start} steps in {minutes:.1f} min -> {self.out}/last"
        if step < steps:
            end = (f"stopped by SIGTERM after step {step} of {steps}; the same command goes on "
                   f"from {self.out}")
        print(end, flush=True)
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def check_wandb(args):
    """Raises UserError where --wandb is asked for and not installed: before the models are
    loaded."""
    import importlib.util

    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb: the package is not installed: pip install wandb")


def weights_line(policy):
    """What was loaded: how many weights, in which precision they are kept and were stored."""
    n = sum(p.numel() for p in trained_parameters(policy))
    return f"{n / 1e6:.2f} M trained parameters in fp32 (read from {policy.stored_as})"


def check_run(step, bad, out, patience=3):
    """Raise RunError, on all ranks alike, where no gradient was finite for `patience` steps in a
    row."""
    if bad >= patience:
        raise RunError(f"step {step + 1}: no finite gradient for {bad} steps in a row; the newest "
                       f"checkpoint is {newest_checkpoint(out)}")


def whole_rows(path):
    """Rows of a log; a line that a crash cut off is left out."""
    rows = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            for line in f:
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict) and "step" in row and line.endswith("\n"):
                        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------------
# Starting up, and small things every stage does the same way


def import_shim():
    """Make `import transformers` and `import vllm` safe beside a CPU build of torch.

    The package index's torchvision, torchaudio and torchcodec are CUDA builds: next to a CPU torch
    their libraries do not load, and torchvision's import then fails on two operators it expects to
    find. We never call either. A no-op everywhere else.
    """
    import glob
    import importlib.util
    import logging

    if torch.version.cuda or torch.version.hip or hasattr(import_shim, "library"):
        return
    # vLLM warns that there is no Triton before its own logging stands: Python would print it.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    for name in ("torchcodec", "torchaudio"):
        sys.modules.setdefault(name, None)  # importing it is an ImportError: "not there"
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    libraries = glob.glob(os.path.join(os.path.dirname(spec.origin), "_C*.so"))
    try:
        for path in libraries:
            torch.ops.load_library(path)
    except OSError:  # the CUDA build: libcudart is missing
        libraries = []
    if not libraries:
        import_shim.library = torch.library.Library("torchvision", "DEF")  # lives as long as this
        for op in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            import_shim.library.define(op + signature)


def quiet_libraries():
    """Keep the terminal for the run's own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Said of every checkpoint that a process alone saves.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def start_process_group(patience=1800.0):
    """Join the torchrun process group, or make one of a single process. -> (rank, world, device).
    patience: see beat; a collective waits a minute longer, so that beat's stacks come first."""
    from datetime import timedelta

    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        # Two spinning thread pools on shared cores cost a factor of ten: divide the cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
        warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        if "RANK" in os.environ:
            wait = timedelta(seconds=patience + 60 if patience else 30 * 86400)
            dist.init_process_group(backend, timeout=wait)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return rank, world, device


def end_process_group():
    """Leave the process group; closing vLLM may have ended it already."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def beat(patience):
    """A phase has ended: the next may take `patience` seconds (0 = for ever). A rank that takes
    longer prints the stacks of its threads and exits; torchrun then ends the others."""
    import faulthandler

    if patience:
        faulthandler.dump_traceback_later(patience, exit=True, file=sys.__stderr__)


def stop_on_sigterm():
    """-> an Event that is set once SIGTERM has come, a scheduler's warning. A second one ends the
    process at once."""
    import signal
    import threading

    asked = threading.Event()

    def handler(number, frame):
        if asked.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.set()

    signal.signal(signal.SIGTERM, handler)
    return asked


def any_rank(flag):
    """Whether `flag` holds on any rank. Collective, in host memory: no GPU is waited for."""
    import torch.distributed as dist

    value = torch.tensor(float(bool(flag)))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def gather_rows(rows):
    """Lists of every rank -> one list, on every rank. Collective."""
    import torch.distributed as dist

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def give_back_memory():
    """Freed memory back to the system: glibc keeps it, in an arena per thread, and after some
    hundred steps that is hundreds of MiB."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim:
        trim(0)


def read_jsonl(path, required=(), fault=None):
    """JSONL file -> list of dicts. fault: of a row, None or what is wrong with it. Raises UserError
    naming file and line."""
    try:
        with open(path, encoding="utf-8-sig") as f:  # some editors put a byte order mark first
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
        if wrong := fault and fault(row):
            raise UserError(f"{path}:{number}: {wrong}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def has_surrogate(value):
    """Whether a text in a JSON value cannot be encoded: "\\ud800" alone is valid JSON, and no
    tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def at_least(least, args, *names):
    """Raises UserError naming the first of these flags that is below `least`."""
    for name in names:
        if not getattr(args, name) >= least:  # written so that NaN is refused as well
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be at least {least}, got {getattr(args, name)}")


def frame_cache(args):
    """--frame-cache-gb, --frame-cache-dir, --frame-cache-dir-gb -> the decoded frames of a stage.
    Raises UserError naming the flag."""
    if not 0 < args.frame_cache_dir_gb < float("inf"):
        got = args.frame_cache_dir_gb
        raise UserError(f"--frame-cache-dir-gb must be a number above 0, got {got}")
    # In a child process: a decoder that hangs or crashes costs one video.
    return video.FrameCache(int(args.frame_cache_gb * 2**30), timeout=60.0,
                            folder=args.frame_cache_dir,
                            folder_bytes=int(args.frame_cache_dir_gb * 2**30))


@functools.lru_cache(maxsize=2)  # a batch lies in two epochs at most; 8,000 rows take 8 ms
def epoch_order(epoch, rows, seed):
    """Rows in the order of one pass over the data."""
    import random

    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)  # a str seed is the same everywhere
    return order


def batch_indices(step, batch_size, rows, seed):
    """Rows of one global batch: a window of the endless stream of reshuffled epochs. A function of
    (step, seed) alone, so every rank and every resumed run draws the same."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    return [epoch_order(i // rows, rows, seed)[i % rows] for i in positions]


def deal(items, cost, rank, world):
    """This rank's part of a batch: dealt out by falling cost, back and forth, so that all ranks
    work alike. Equally many each, where their number divides by that of the ranks."""
    ordered = sorted(items, key=cost, reverse=True)
    # 0 1 2 2 1 0 0 1 2 ..: who got the longest of a round gets the shortest of the next.
    there_and_back = [*range(world), *reversed(range(world))]
    return [x for i, x in enumerate(ordered) if there_and_back[i % (2 * world)] == rank]


def make_out(path):
    """Create an output folder and prove that it can be written, before any long work. run_main
    removes an empty one again if the run is refused."""
    head = os.path.abspath(path)
    while not os.path.exists(head):
        make_out.made.append(head)
        head = os.path.dirname(head)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as e:
        raise UserError(f"output folder {path}: {e.strerror}") from None


make_out.made = []  # folders that were not there before


def printable(text):
    """Nothing a model or a data file wrote may steer the terminal."""
    bad = "\N{REPLACEMENT CHARACTER}"
    return "".join(c if c.isprintable() or c == "\n" else bad for c in str(text))


def run_main(main):
    """Run a script's main(). Bad user input becomes one line on stderr and exit code 2, a run that
    cannot go on one line and exit code 1."""
    import traceback

    try:
        main()
    except (UserError, RunError, video.VideoError) as e:
        # Under torchrun all ranks see most faults: one of them says it.
        if os.environ.get("RANK", "0") == "0" or isinstance(e, RankError):
            name = os.path.basename(sys.argv[0])
            print(f"{name}: {printable(e)}", file=sys.stderr, flush=True)
        code = 1 if isinstance(e, RunError) else 2
        for folder in sorted(make_out.made, key=len, reverse=True) if code == 2 else ():
            with contextlib.suppress(OSError):  # not empty, or another rank was faster
                os.rmdir(folder)
        if isinstance(e, RankError) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(code)
        sys.exit(code)
    except Exception:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise
        # The other ranks wait in a collective, and our threads for them: leave at once, so that
        # torchrun sees it and ends them all.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main():
    import argparse

    parser = argparse.ArgumentParser(description="Adapters and their base -> one whole checkpoint.")
    parser.add_argument("--merge", metavar="DIR", required=True, help="checkpoint of adapters")
    parser.add_argument("--out", required=True, help="folder to write")
    args = parser.parse_args()
    ckpt = resolve_checkpoint(args.merge)
    if os.path.exists(args.out):
        raise UserError(f"--out {args.out} exists")
    with atomic_folder(args.out) as folder:
        save_whole(small_files(ckpt), folder, dict(merged_weights(ckpt)))
    base, *adapters = lineage(ckpt)
    print(f"{args.out}: {base} with the adapters of {len(adapters)} stages")


if __name__ == "__main__":
    run_main(main)
