"""
model.py (tests/test_model.py): the policy. Frames to features, trees to packs, attention, exact
log-probs.

For a context c (prompt ids with vision tokens) and the tokens o_1 .. o_R sampled after c:

  logp_t = log softmax((W h_{t-1} + b) / T)[o_t]      T: sampling temperature
  H_t    = entropy of that same distribution          b: -100 at ids that are never sampled, else 0

Samples that share a context are packed as ONE tree  [ c | o^1 | o^2 | .. | o^G ]. A token of o^i
attends to c and to the earlier tokens of o^i, and has the position of a sequence [ c | o^i ] alone.
So log-probs and gradients are those of G separate sequences, while c (thousands of vision tokens)
is computed once. Several trees fill one pack; a tree does not see another.

As in the paper the vision tower is frozen in every stage, so features are computed once per
distinct frame set and kept.

Letters in shapes: L tokens of a pack, N trained tokens, V vision tokens, D deepstack levels, H
hidden size; [T, H, W, 3] are T frames of H x W pixels.

Reads and writes no file: plumbing/checkpoint.py loads and saves the policy.
"""
import functools
import inspect
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

# Importing torch takes seconds: tell a person who waits at a terminal.
if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
    print(f"{os.path.basename(sys.argv[0])}: loading torch", file=sys.stderr, flush=True)
import torch
import torch.nn.functional as F

import chat

# ------------------------------------------------------------------------------------------------
# 1. Frames -> vision features


def patchify(codec: chat.ChatProcessor, images: np.ndarray,
             device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 frames [T, H, W, 3] -> (patches [T' gh gw, 3 temporal patch^2] fp32 on the device, grid
    [1, 3] in host memory).

    The order of patches is the processor's: merge x merge neighbours are consecutive. All frames
    form one grid here. The processor makes one grid per image, and the tower loops over grids on
    the host.
    """
    pair = 1 if codec.channel == "image" else codec.temporal  # frames that a patch spans
    # The bytes travel: they are a quarter of the fp32 numbers, and cutting them is the GPU's work.
    x = to_device(torch.from_numpy(np.array(images)), device)
    # An odd count of frames repeats the last one, as the processor does.
    x = torch.cat([x, x[-1:].expand(-len(x) % pair, -1, -1, -1)])  # [T' pair, H, W, 3]
    p, m = codec.patch, codec.merge
    # patches over time, in a column, in a row
    n, gh, gw = len(x) // pair, x.shape[1] // p, x.shape[2] // p
    # Split both sides into (squares, patches in a square, pixels in a patch). Then the order of the
    # rows is (time, square, patch in the square) and of a row's numbers (colour, time, pixels).
    x = x.reshape(n, pair, gh // m, m, p, gw // m, m, p, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    x = x.reshape(n * gh * gw, 3, pair * p * p).float()
    mean, std = (to_device(torch.tensor(v)[:, None], device) for v in (codec.mean, codec.std))
    x = x.div_(255.0).sub_(mean).div_(std)
    # An image fills the temporal patch by repetition.
    x = x.unflatten(2, (pair, -1)).expand(-1, -1, codec.temporal, -1).flatten(1)
    return x, torch.tensor([[n, gh, gw]])


class VisionFeatures:
    """Features of the frozen tower, computed once per distinct frame set. The least recently used
    sets are dropped if all together exceed max_bytes."""

    def __init__(self, visual, codec, load, max_bytes=2**30):
        """load: a VisionItem's spec -> video.Frames; for features and frames not kept."""
        self.visual, self.codec, self.load = visual, codec, load
        self.frames = {}  # VisionItem.key -> video.Frames that are in memory, which need no load
        self.cache = OrderedDict()  # VisionItem.key -> features
        self.max_bytes, self.bytes = max_bytes, 0

    @torch.no_grad()
    def __call__(self, items):
        """[VisionItem] -> [V, 1 + D, H] in their order: the tower's output, then the D deepstack
        levels. Raises ValueError if a file changed after the prompt was built from it."""
        weight = next(self.visual.parameters())  # tells the tower's device and dtype
        # A call of the tower costs milliseconds even for one frame, so new sets with frames of one
        # size share a call.
        sizes = {}  # (height, width) -> new items
        for item in {item.key: item for item in items if item.key not in self.cache}.values():
            sizes.setdefault((item.height, item.width), []).append(item)
        for group in sizes.values():
            parts = [patchify(self.codec, self.load_images(item), weight.device) for item in group]
            patches, grids = (torch.cat(tensors) for tensors in zip(*parts))
            out = self.visual(patches.to(weight.dtype), grid_thw=to_device(grids, weight.device))
            levels = getattr(out, "deepstack_features", None) or ()  # Qwen3.5 has none: D = 0
            features = torch.stack([out.pooler_output, *levels], 1)  # [V, 1 + D, H] of all sets
            counts = [len(part) // self.codec.merge**2 for part, _ in parts]  # vision tokens
            for item, part in zip(group, features.split(counts)):
                self.cache[item.key] = part.clone()  # a view would keep all sets in memory
                self.bytes += part.nbytes
        for item in items:
            self.cache.move_to_end(item.key)  # used last
        features = torch.cat([self.cache[item.key] for item in items])
        # The newest set stays, even if that set alone is over the limit.
        while self.bytes > self.max_bytes and len(self.cache) > 1:
            self.bytes -= self.cache.popitem(last=False)[1].nbytes
        return features

    def load_images(self, item):
        """VisionItem -> its frames, uint8 [T, H, W, 3]."""
        frames = self.frames.get(item.key) or self.load(item.spec)
        # The ids hold times and one placeholder per token, so other frames do not fit them.
        same_size = frames.images.shape[:3] == (item.frames, item.height, item.width)
        if not same_size or list(frames.seconds) != list(item.seconds):
            raise ValueError(f"{item.spec['video']}: the file or --max-pixels has changed")
        return frames.images


# ------------------------------------------------------------------------------------------------
# 2. Packing


@dataclass
class TokenSpan:
    """A run of ids. mask 1: the token is trained. values: numbers per token by name (advantage,
    sampler, ..), which are read if the mask is 1."""

    ids: list
    mask: list
    values: dict = field(default_factory=dict)
    items: list = field(default_factory=list)  # [chat.VisionItem] of a branch


@dataclass
class Tree:
    """A context and the responses that continue it. A tree without branches is one sequence."""

    prefix: TokenSpan
    items: list = field(default_factory=list)  # [chat.VisionItem] of the prefix
    branches: list = field(default_factory=list)

    def __len__(self):
        return len(self.prefix.ids) + sum(len(b.ids) for b in self.branches)


@dataclass
class Pack:
    """Trees as the tensors of one forward, in host memory."""

    ids: torch.Tensor  # [L]
    positions: torch.Tensor  # [4, 1, L] text position, then time/height/width (interleaved mrope)
    tree: torch.Tensor  # [L] which tree a token belongs to
    branch: torch.Tensor  # [L] 0 in the prefix, 1.. in branches
    predictor: torch.Tensor  # [N] position whose hidden state predicts the trained token
    target: torch.Tensor  # [N] id of the trained token
    values: dict  # name -> [N]
    items: list  # [chat.VisionItem] in the order of the placeholders
    layout: list  # [(start, prefix length, [branch lengths])]


def rope_positions(codec, ids, items):
    """Expanded ids [L] -> (positions [3, L] in time, height, width; the next free position).

    Qwen3-VL's rule: a text token advances all three axes by one. A frame of rows x columns tokens
    stays at one time step and advances by max(rows, columns). Raises ValueError if placeholders and
    frames do not match.
    """
    ids = np.asarray(ids)  # [L]
    positions = np.empty((3, len(ids)), np.int64)
    # A frame, or a pair of frames (channel video), is one grid: the times between them are text.
    side = codec.patch * codec.merge
    sizes = [(i.height // side, i.width // side) for i in items for _ in chat.frame_times(codec, i)]
    at = np.flatnonzero(ids == codec.pad)  # [V] places of all vision tokens
    cursor = 0  # tokens that have their positions so far
    current = 0  # the next free position
    hits = 0  # vision tokens that have their positions so far
    for rows, columns in sizes:
        start = at[hits]
        text = start - cursor
        positions[:, cursor:start] = current + np.arange(text)  # text before the frame
        current += text
        n = rows * columns
        if not (ids[start:start + n] == codec.pad).all():
            raise ValueError("vision placeholders do not match the frames of this context")
        # Row by row: the time stands still, the row repeats, the column runs.
        positions[0, start:start + n] = current
        positions[1, start:start + n] = current + np.repeat(np.arange(rows), columns)
        positions[2, start:start + n] = current + np.tile(np.arange(columns), rows)
        current += max(rows, columns)
        cursor = start + n
        hits += n
    if hits != len(at):
        raise ValueError(f"{len(at)} vision placeholders, {hits} vision tokens")
    positions[:, cursor:] = current + np.arange(len(ids) - cursor)  # text after the last frame
    return positions, current + len(ids) - cursor


def pack_trees(codec: chat.ChatProcessor, trees: list[Tree]) -> Pack:
    """
    Trees -> one Pack.

    Example: a prompt [7, 8] with the answers [5, 9] and [6], all of them trained, is packed as

      place      0  1 | 2  3 | 4
      ids        7  8 | 5  9 | 6
      position   0  1 | 2  3 | 2     as if each answer stood alone after the prompt
      branch     0  0 | 1  1 | 2
      target             5  9   6
      predictor          1  2   1    token 6 is predicted at place 1, the prompt's end, not at 3
    """
    columns = {name: [] for name in ("ids", "text", "tree", "branch", "predictor", "target")}
    axes = []  # [3, n] time, height, width of each span
    values, items, layout = {}, [], []
    start = 0  # pack position where the tree begins
    for index, tree in enumerate(trees):
        p = len(tree.prefix.ids)
        if tree.prefix.mask and tree.prefix.mask[0]:
            raise ValueError("the first token of a context has no predecessor to be predicted from")
        following = 0  # the position after the prefix, where every branch goes on
        last_of_prefix = start + p - 1
        cursor = start  # pack position where the next span begins
        for number, span in enumerate([tree.prefix, *tree.branches]):
            n, ids = len(span.ids), np.asarray(span.ids, np.int64)
            trained = np.flatnonzero(span.mask)  # [n'] places in this span
            # The state BEFORE a token, in its own sequence, predicts it. For the first token of a
            # branch that is the end of the prefix. Its left neighbour belongs to another branch.
            predictor = np.where(trained == 0, last_of_prefix, cursor + trained - 1)
            columns["ids"].append(ids)
            columns["text"].append(np.arange(n) + (p if number else 0))  # as if alone
            columns["tree"].append(np.full(n, index))
            columns["branch"].append(np.full(n, number))
            columns["predictor"].append(predictor)
            columns["target"].append(ids[trained])
            for name, numbers in span.values.items():
                values.setdefault(name, []).append(np.asarray(numbers, np.float32)[trained])
            span_items = span.items if number else tree.items
            span_positions, end = rope_positions(codec, span.ids, span_items)  # [3, n]
            axes.append(following + span_positions)
            following = following if number else end
            items += span_items
            cursor += n
        layout.append((start, p, [len(b.ids) for b in tree.branches]))
        start = cursor
    joined = {name: torch.from_numpy(np.concatenate(x)) for name, x in columns.items()}
    text = joined.pop("text")[None]  # [1, L]
    # transformers takes four rows: the plain position, then the three axes. [4, 1, L]
    positions = torch.cat([text, torch.from_numpy(np.concatenate(axes, 1))])[:, None]
    values = {name: torch.from_numpy(np.concatenate(x)) for name, x in values.items()}
    return Pack(positions=positions, values=values, items=items, layout=layout, **joined)


def fill_packs(trees: list[Tree], budget: int) -> list[list[Tree]]:
    """Trees -> lists of at most `budget` tokens, each a pack: first fit, longest first.

    A tree over the budget is split by branches, and each part computes the prefix again. A single
    sequence over the budget fills a pack alone.
    """
    pieces = []  # trees that fit
    for t in trees:
        piece = Tree(t.prefix, t.items, [])
        for b in t.branches:
            if piece.branches and len(piece) + len(b.ids) > budget:
                pieces.append(piece)
                # The prefix's own trained tokens, if any, count in the first piece only.
                silent = TokenSpan(t.prefix.ids, [0] * len(t.prefix.ids), t.prefix.values)
                piece = Tree(silent, t.items, [])
            piece.branches.append(b)
        pieces.append(piece)
    packs = []
    for piece in sorted(pieces, key=len, reverse=True):
        fitting = [pack for pack in packs if sum(map(len, pack)) + len(piece) <= budget]
        if fitting:
            fitting[0].append(piece)
        else:
            packs.append([piece])
    return packs


def pad_packs_over_ranks(codec, packs):
    """This rank's packs as (pack, True), then spare ones as (pack, False), until all ranks have
    equally many. Collective.

    A forward under FSDP is a chain of collectives: if one rank runs fewer forwards, the others wait
    for ever.
    """
    import torch.distributed as dist

    max_packs = torch.tensor(len(packs))  # in host memory, so the host does not wait for a GPU
    dist.all_reduce(max_packs, op=dist.ReduceOp.MAX)
    # Two ids, the second one trained: the smallest pack with a loss to go backward from.
    spare = pack_trees(codec, [Tree(TokenSpan([codec.eos, codec.eos], [0, 1]))])
    return [(pack, True) for pack in packs] + [(spare, False)] * (int(max_packs) - len(packs))


def to_device(tensor, device):
    """Copies a tensor from host memory to the device."""
    # From pinned memory the copy waits in the GPU's queue, and the host goes on at once.
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ------------------------------------------------------------------------------------------------
# 3. Attention over a pack


@dataclass
class AttentionPlan:
    """All that the layers of one forward share, built once per pack."""

    kind: str  # "flash": no branches, flash-attn; "flex": any pack, GPU; "parts": any pack, CPU
    layout: list  # Pack's
    mask: object = None  # FlexAttention's BlockMask
    ends: torch.Tensor = None  # [sequences + 1] int32: 0 and the ends of plain sequences
    longest: int = 0  # tokens of the longest plain sequence


def attention_plan(pack, device):
    """Pack -> AttentionPlan. On a GPU: flash-attn, if installed, for packs without branches, else
    FlexAttention. On a CPU: PrefixTreeAttention."""
    import importlib.util

    if device.type == "cpu":
        return AttentionPlan("parts", pack.layout)
    # flash-attn knows causal sequences, not trees. Chats of SFT are sequences.
    plain = not any(branches for _, _, branches in pack.layout)
    # Look for the compiled kernels: a folder named flash_attn may be anything.
    if plain and importlib.util.find_spec("flash_attn_2_cuda"):
        lengths = [p for _, p, _ in pack.layout]
        ends = to_device(torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32), device)
        return AttentionPlan("flash", pack.layout, ends=ends, longest=max(lengths))
    return AttentionPlan("flex", pack.layout, mask=block_mask(pack, device))


def packed_attention(module, query, key, value, attention_mask=None, scaling=None, plan=None, **_):
    """transformers calls this in every decoder layer. query [1, heads, L, d], key and value
    [1, key heads, L, d] -> ([1, L, heads, d], None)."""
    shared = query.shape[1] // key.shape[1]  # query heads that share a key head
    if plan.kind == "flex":
        out = compiled_flex()(query, key, value, block_mask=plan.mask, scale=scaling,
                              enable_gqa=shared > 1)
        return out.transpose(1, 2), None
    if plan.kind == "flash":
        from flash_attn import flash_attn_varlen_func

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, d]
        out = flash_attn_varlen_func(q, k, v, plan.ends, plan.ends, plan.longest, plan.longest,
                                     softmax_scale=scaling, causal=True)
        return out[None], None
    if shared > 1:  # the CPU kernel has no shared key heads
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return PrefixTreeAttention.apply(query, key, value, plan.layout, scaling).transpose(1, 2), None


# ------------------------------------------------------------------------------------------------
# 4. Log-probs


class Policy(torch.nn.Module):
    """A Qwen3-VL or Qwen3.5 with the one forward of all training stages: a pack goes in, log-probs
    of its trained tokens come out."""

    def __init__(self, hf, codec):
        super().__init__()
        self.hf, self.codec = hf, codec
        self.features = None  # VisionFeatures; set by each stage, which knows the videos

    def forward(self, pack, temperature=1.0, chunk=1024):
        """Pack -> (logp [N], entropy [N]) of pack.target, fp32.

        The host waits for the GPU in two places: the tower reads the sizes of new frames, and
        transformers turns a boolean mask into positions twice per deepstack level.
        """
        text = self.hf.model.language_model
        device = text.embed_tokens.weight.device
        ids, positions = to_device(pack.ids, device), to_device(pack.positions, device)
        predictor, target = to_device(pack.predictor, device), to_device(pack.target, device)
        # [V, 1 + D, H], None for text alone
        features = self.features(pack.items) if pack.items else None
        vision_mask = self.placeholder_mask(pack.ids, features)  # [L], in host memory
        vision_mask = None if vision_mask is None else to_device(vision_mask, device)
        embeds, levels = self.embed(ids, vision_mask, features)  # [L, H], D x [V, H]
        hidden = text(
            inputs_embeds=embeds[None], position_ids=positions, use_cache=False,
            visual_pos_masks=None if vision_mask is None else vision_mask[None],
            deepstack_visual_embeds=levels, plan=attention_plan(pack, device)
        ).last_hidden_state[0]  # [L, H]
        # Only states that predict a trained token meet the vocabulary: [N, H] of [L, H].
        return token_logprobs(hidden[predictor], self.hf.lm_head.weight, target,
                              self.codec.suppress_tokens, temperature, chunk)

    def placeholder_mask(self, ids, features):
        """ids in host memory, features [V, 1 + D, H] or None -> mask of the ids that stand for
        vision tokens, or None. Raises ValueError if their number is not V."""
        if features is None:
            return None
        # Counted on the host: masked_scatter would take too many features without a word.
        vision_mask = (ids == self.codec.image_pad) | (ids == self.codec.video_pad)
        if vision_mask.sum() != len(features):
            raise ValueError(f"{vision_mask.sum()} vision placeholders, {len(features)} tokens")
        return vision_mask

    def embed(self, ids, vision_mask, features):
        """ids [.., n], vision_mask: mask of vision positions, features [V, 1 + D, H] or None ->
        (embeddings [.., n, H], deepstack levels)."""
        embeds = self.hf.model.language_model.embed_tokens(ids)
        if features is None:
            return embeds, None
        features = features.to(embeds.device, embeds.dtype)
        embeds = embeds.masked_scatter(vision_mask[..., None], features[:, 0])
        return embeds, list(features[:, 1:].unbind(1))


def token_logprobs(hidden, weight, target, banned=(), temperature=1.0, chunk=1024):
    """hidden [N, H], weight [vocab, H], target [N] -> (logp [N], entropy [N]) fp32.

    Projects to the vocabulary in chunks that backward recomputes: Qwen3-VL has 151936 ids, and all
    N rows of fp32 logits never exist at once. chunk: rows of one projection.
    """
    from torch.utils.checkpoint import checkpoint

    # b of the header. The engine samples under the same bias, so the two distributions are one.
    bias = torch.zeros(weight.shape[0], device=hidden.device)
    never = to_device(torch.tensor(list(banned), dtype=torch.long), hidden.device)
    bias.index_fill_(0, never, -100.0)
    out = []
    for h, y in zip(hidden.split(chunk), target.split(chunk)):
        inputs = (h, weight, y, bias, temperature)
        if torch.is_grad_enabled():  # keep h, not the logits
            out.append(checkpoint(chunk_logprobs, *inputs, use_reentrant=False))
        else:
            out.append(chunk_logprobs(*inputs))
    logp, entropy = (torch.cat(x) for x in zip(*out))
    return logp, entropy


def chunk_logprobs(hidden, weight, target, bias, temperature):
    """hidden [n, H] -> (log-prob of target [n], entropy [n]) of the sampled distribution, fp32."""
    logits = (F.linear(hidden, weight).float() + bias) / temperature  # [n, vocab]
    norm = logits.logsumexp(-1)  # [n]
    logp = logits.gather(1, target[:, None])[:, 0] - norm
    with torch.no_grad():  # entropy is logged, never trained
        entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return logp, entropy


# ---- below: kernels, optimizer (a reader of the step may stop here) -----------------------------


# ------------------------------------------------------------------------------------------------
# The mask of FlexAttention


def block_mask(pack, device, size=128):
    """Pack -> FlexAttention's BlockMask. size: tokens of a block, fixed by the kernel.

    Counted from the layout, because torch's create_block_mask builds [L, L] masks, which are
    gigabytes at 32k tokens.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tree, branch = to_device(pack.tree, device), to_device(pack.branch, device)  # [L]

    def visible(_batch, _head, q, k):  # the kernel asks this inside partly visible blocks
        same = (branch[k] == 0) | (branch[k] == branch[q])
        return (q >= k) & (tree[q] == tree[k]) & same

    pairs = visible_pairs(pack.layout, len(pack.ids), size)  # [blocks, blocks]
    full = pairs == size * size  # never true of a ragged last block
    lists = []
    # The kernel calls `visible` in blocks seen in part. It skips that in blocks seen whole.
    for kind in ((pairs > 0) & ~full, full):
        number = kind.sum(1)  # [blocks] blocks of this kind in each row
        which = np.argsort(~kind, 1, kind="stable")  # [blocks, blocks] columns of this kind first
        for x in (number, which):
            lists.append(to_device(torch.from_numpy(x.astype(np.int32))[None, None], device))
    return BlockMask.from_kv_blocks(*lists, size, visible, (len(tree), len(tree)))


def visible_pairs(layout, tokens, size):
    """Pack.layout -> [blocks, blocks] int: the number of (query, key) pairs between two blocks in
    which the query sees the key."""
    blocks = -(-tokens // size)
    edges = np.arange(blocks + 1) * size  # [blocks + 1] first token of each block, and the end

    def inside(start, end):  # [blocks] tokens of start..end in each block
        return np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)

    pairs = np.zeros((blocks, blocks), np.int64)
    for start, p, branches in layout:
        prefix = inside(start, start + p)
        bounds = np.cumsum([start, p, *branches])  # begin of the prefix and of each branch, end
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            counts = inside(begin, end)
            # Causal with itself: all pairs of earlier blocks, a triangle within the same block.
            pairs += np.tril(np.outer(counts, counts), -1) + np.diag(counts * (counts + 1) // 2)
            if number:  # a branch sees the whole prefix
                pairs += np.outer(counts, prefix)
    return pairs


# ------------------------------------------------------------------------------------------------
# Gated-delta layers (Qwen3.5)


def packed_delta(layer, hidden_states, plan=None, **_):
    """Stands in for the forward of a gated-delta layer (Qwen3.5). hidden_states [1, L, H] -> the
    same.

      S_t = e^{g_t} S_{t-1} (I - beta_t k_t k_t') + beta_t v_t k_t'      o_t = S_t q_t

    q, k, v pass a causal convolution of C taps before. The state S runs through a sequence, so a
    prefix is computed once: its last C - 1 inputs of the convolution and its state are where each
    branch begins.
    """
    h = hidden_states[0]
    qkv, z = layer.in_proj_qkv(h), layer.in_proj_z(h)  # [L, q and k and v], [L, value heads * d]
    beta = layer.in_proj_b(h).sigmoid()  # [L, value heads]
    # The engine holds this bias in its compute dtype, and A_log in fp32.
    gate = layer.in_proj_a(h).float() + layer.dt_bias.to(h.dtype).float()
    decay = -layer.A_log.float().exp() * F.softplus(gate)  # [L, value heads] g, a log
    taps = layer.conv_kernel_size - 1  # earlier inputs that a convolution reads
    out = []
    for start, p, branches in plan.layout:
        cut = start + p
        first = F.pad(qkv[start:cut], (0, 0, taps, 0))[None]  # zeros stand before a sequence
        o, state = delta_rule(layer, first, decay[None, start:cut], beta[None, start:cut], None)
        out.append(o[0])
        if branches:
            # One batch, padded at the end by decay 0 and beta 0, which change nothing before.
            parts = (v[cut:cut + sum(branches)].split(branches) for v in (qkv, decay, beta))
            x, g, b = (torch.nn.utils.rnn.pad_sequence(v, batch_first=True) for v in parts)
            before = first[:, first.shape[1] - taps:].expand(len(branches), -1, -1)
            x = torch.cat([before, x], 1)  # [branches, taps + n, q and k and v]
            o, _ = delta_rule(layer, x, g, b, state.expand(len(branches), -1, -1, -1))
            out += [row[:n] for row, n in zip(o, branches)]
    core = layer.norm(torch.cat(out).flatten(0, 1), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(core.to(z.dtype).reshape(1, len(h), -1))


def delta_rule(layer, x, decay, beta, state):
    """x [B, C - 1 + n, q and k and v]; decay, beta [B, n, value heads]; state: None = zeros ->
    (out [B, n, value heads, d], the state at the end [B, value heads, d, d])."""
    # The weight may be kept in fp32, see checkpoint.shard.
    weight = layer.conv1d.weight.to(x.dtype)
    x = F.silu(F.conv1d(x.transpose(1, 2), weight, groups=x.shape[2])).transpose(1, 2)
    q, k, v = x.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    shared = layer.num_v_heads // layer.num_k_heads  # value heads that share a key head
    q, k = (x.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(shared, 2) for x in (q, k))
    return delta_kernel(x.device)(
        q, k, v.unflatten(-1, (-1, layer.head_v_dim)), g=decay, beta=beta, initial_state=state,
        output_final_state=True, use_qk_l2norm_in_kernel=True)


def delta_kernel(device):
    """The gated-delta rule of this device: flash-linear-attention's kernels, on a CPU transformers'
    own rule. Raises ImportError; transformers would take its slow rule without a word."""
    if device.type == "cpu":
        import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

        # If the kernels are installed, transformers has put them in the place of its rule.
        return inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    # vLLM brings TileLang, which fla 0.6 prefers on Hopper, because Triton 3.4 to 3.7.0 computed
    # wrong gradients. TileLang compiles anew for each number of branches, 21 s each time.
    os.environ.setdefault("FLA_TILELANG", "0")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


# ------------------------------------------------------------------------------------------------
# Attention kernels


class PrefixTreeAttention(torch.autograd.Function):
    """Attention of trees on a CPU, without masks and without copies of the prefix: all branches
    attend to the prefix in one kernel call, then each branch to itself.

      o = w o_prefix + (1 - w) o_own,   w = exp(lse_prefix - lse)     lse: log of the softmax's sum
      lse = log(exp(lse_prefix) + exp(lse_own))

    Backward hands the whole o and lse to the same kernel. Its formula then gives the share of each
    part in the gradient, as in ring attention. query, key, value [1, heads, L, d] -> the same.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        def part(a, b, c, d, causal):  # queries a..b, keys c..d -> (out, lse)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            q, k, v = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
            return kernel(q, k, v, 0.0, causal, scale=scale)

        outputs = []
        for start, p, branches in layout:
            cut = start + p
            ends = np.cumsum([cut, *branches]).tolist()
            outputs.append(part(start, cut, start, cut, True))
            if branches:
                across, lse_across = part(cut, ends[-1], start, cut, False)
                own_out = [part(a, b, a, b, True) for a, b in zip(ends, ends[1:])]
                own_out, lse_own = (torch.cat(x, 2) for x in zip(*own_out))
                weight = torch.sigmoid(lse_across - lse_own)[..., None].to(own_out.dtype)
                outputs.append((own_out.lerp(across, weight), torch.logaddexp(lse_across, lse_own)))
        out, lse = (torch.cat(x, 2) for x in zip(*outputs))
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


@functools.cache
def compiled_flex():
    """FlexAttention, compiled once per process. Without compilation it builds [L, L] scores."""
    from torch.nn.attention.flex_attention import flex_attention

    # With and without gradients, other heads: each is one more compilation of the same code. After
    # eight torch would run it uncompiled, with a warning; fullgraph makes that an error.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=64)


class PatchEmbedding(torch.nn.Conv3d):
    """The tower's patch embedding as a matrix product. Kernel and stride are one whole patch, so
    the convolution is a linear layer. Some GPUs have no fast kernel for it in bf16."""

    def forward(self, patches):  # [n, 3, temporal, patch, patch] -> [n, width]
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def frames_attention(module, query, key, value, attention_mask=None, scaling=None,
                     cu_seq_lens_q=None, max_length_q=None, **_):  # fmt: skip
    """The tower's attention: each frame attends to itself. query [1, heads, L, d] -> ([1, L, heads,
    d], None).

    The frames of one call have one size, so they are one batch for one sdpa call. transformers' own
    path loops over the frames in every layer.
    """
    frames = len(cu_seq_lens_q) - 1
    if frames * int(max_length_q) != query.shape[2]:
        raise ValueError("the frames of one call of the tower have to be of one size")
    split = [x[0].unflatten(1, (frames, -1)).transpose(0, 1) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*split, scale=scaling)  # [frames, heads, L / frames, d]
    return out.transpose(1, 2).flatten(0, 1)[None], None


# ------------------------------------------------------------------------------------------------
# From transformers' model to ours


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU; fp32 on a CPU, because bf16 gains nothing there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def engine_dtype(codec: chat.ChatProcessor, device: torch.device) -> torch.dtype:
    """The dtype in which vLLM computes, and takes weights."""
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, codec.base.cpu_dtype)


def wrap_policy(hf, codec: chat.ChatProcessor, device: torch.device, recompute: bool) -> Policy:
    """transformers' model -> Policy with our attention and a frozen tower. recompute: backward
    computes the decoder layers again instead of keeping their activations."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)
    AttentionInterface.register("frames_as_flash", frames_attention)
    hf.model.language_model.config._attn_implementation = "packed"
    for layer in hf.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = functools.partial(packed_delta, layer.linear_attn)
    tower = hf.model.visual.requires_grad_(False).to(compute_dtype(device))
    # Only to a name that holds "flash" does transformers hand over all frames at once.
    tower.config._attn_implementation = "frames_as_flash"
    tower.patch_embed.proj.__class__ = PatchEmbedding  # names and shapes stay
    if recompute:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, codec).train()
    tower.eval()
    return policy


# ------------------------------------------------------------------------------------------------
# Training


def trained_parameters(policy: Policy) -> list:
    return [p for p in policy.parameters() if p.requires_grad]


def adamw(parameters, lr, beta2, device, weight_decay=0.01):
    """AdamW with beta1 0.9. Weight decay applies to matrices, not to norms and biases."""
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=device.type == "cuda")


def reduce_and_clip(policy, limit):
    """Clips the gradients to the norm `limit` (0: no clipping). -> the norm before clipping, taken
    over the gradients of all ranks, so every rank gets the same number. Collective. Without FSDP
    the gradients are this rank's own until here, and are averaged first."""
    trained = [p for p in policy.parameters() if p.grad is not None]
    grads = [p.grad for p in trained]
    world = torch.distributed.get_world_size()
    if world > 1 and grads and not hasattr(grads[0], "full_tensor"):
        torch.distributed.all_reduce(flat := torch.nn.utils.parameters_to_vector(grads))
        torch.nn.utils.vector_to_parameters(flat / world, grads)
    norm = torch.nn.utils.clip_grad_norm_(trained, limit or float("inf"))
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
