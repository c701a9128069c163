"""
model.py (tests/test_model.py): the policy. Frames to features, trees to packs, attention, exact
log-probs, shards.

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
import importlib.util
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import chat
import launch

# ------------------------------------------------------------------------------------------------
# 1. Frames -> vision features

MAX_FEATURE_BYTES = 2**30  # that VisionFeatures keeps


def patchify(codec, images, device="cpu"):
    """uint8 frames [T, H, W, 3] -> (patches [T gh gw, 3 temporal patch^2] fp32 on the device, grid
    [1, 3] in host memory).

    The order of patches is the processor's: merge x merge neighbours are consecutive. All frames
    form one grid here. The processor makes one grid per image, and the tower loops over grids on
    the host.
    """
    # The bytes travel: they are a quarter of the fp32 numbers, and cutting them is the GPU's work.
    x = to_device(torch.from_numpy(np.array(images)), device)
    frames, height, width, _ = x.shape
    p, m = codec.patch, codec.merge
    gh, gw = height // p, width // p  # patches in a column and in a row
    # Split both sides into (squares, patches in a square, pixels in a patch). Then the order of the
    # rows is (frame, square, patch in the square) and of a row's numbers (colour, pixels).
    x = x.reshape(frames, gh // m, m, p, gw // m, m, p, 3)
    x = x.permute(0, 1, 4, 2, 5, 7, 3, 6)
    x = x.reshape(frames * gh * gw, 3, p * p).float()
    mean = to_device(torch.tensor(codec.mean)[:, None], device)
    std = to_device(torch.tensor(codec.std)[:, None], device)
    x = x.div_(255.0).sub_(mean).div_(std)
    # A patch spans `temporal` frames; an image fills them by repetition.
    x = x[:, :, None].expand(-1, -1, codec.temporal, -1).flatten(1)
    return x, torch.tensor([[frames, gh, gw]])


class VisionFeatures:
    """Features of the frozen tower, computed once per distinct frame set. A stage makes one for
    each batch: which frames share a call of the tower decides on the last bits of their features,
    and a run that goes on has none of the calls before."""

    def __init__(self, policy, load, frames=()):
        """load: a VisionItem's spec -> video.Frames; for features and frames not kept. frames:
        [video.Frames] that are in memory, which need no load."""
        self.visual = policy.hf.model.visual
        self.codec = policy.codec
        self.load = load
        self.frames = {loaded.key: loaded for loaded in frames}
        self.cache = {}  # VisionItem.key -> features

    @torch.no_grad()
    def __call__(self, items):
        """[VisionItem] -> [V, 1 + D, H] in their order: the tower's output, then the D deepstack
        levels. Raises ValueError if a file changed after the prompt was built from it."""
        # Batches with more frames than these bytes hold lose the features of their earlier packs.
        if sum(part.nbytes for part in self.cache.values()) > MAX_FEATURE_BYTES:
            self.cache.clear()
        # A call of the tower costs milliseconds even for one frame, so new sets with frames of one
        # size share a call.
        new = {item.key: item for item in items if item.key not in self.cache}
        by_size = {}  # (height, width) -> new items
        for item in new.values():
            by_size.setdefault((item.height, item.width), []).append(item)
        for group in by_size.values():
            self.compute(group)
        return torch.cat([self.cache[item.key] for item in items])

    def compute(self, items):
        """Runs the tower once on items with frames of one size, and caches the features of each."""
        weight = next(self.visual.parameters())  # tells the tower's device and dtype
        parts = [patchify(self.codec, self.load_images(item), weight.device) for item in items]
        patches = torch.cat([part for part, _ in parts]).to(weight.dtype)
        grids = torch.cat([grid for _, grid in parts])
        out = self.visual(patches, grid_thw=to_device(grids, weight.device))
        levels = getattr(out, "deepstack_features", None) or ()  # Qwen3.5 has none: D = 0
        features = torch.stack([out.pooler_output, *levels], 1)  # [V, 1 + D, H] of all sets
        counts = [len(part) // self.codec.merge**2 for part, _ in parts]  # vision tokens of each
        for item, part in zip(items, features.split(counts)):
            self.cache[item.key] = part

    def load_images(self, item):
        """VisionItem -> its frames, uint8 [T, H, W, 3]."""
        frames = self.frames.get(item.key) or self.load(item.spec)
        # The ids hold times and one placeholder per token, so other frames do not fit them.
        loaded = chat.vision_item(item.spec, frames)
        if replace(loaded, key=item.key) != item:
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
    """A context and the responses that continue it. A tree without branches is one sequence. The
    first token of a context is never trained: nothing predicts it."""

    prefix: TokenSpan
    items: list = field(default_factory=list)  # [chat.VisionItem] of the prefix
    branches: list = field(default_factory=list)

    def __len__(self):
        return len(self.prefix.ids) + sum(len(b.ids) for b in self.branches)


@dataclass
class Pack:
    """Trees as the tensors of one forward, in host memory."""

    ids: torch.Tensor  # [L]
    positions: torch.Tensor  # [3, 1, L] time, height, width (interleaved mrope)
    tree: torch.Tensor  # [L] which tree a token belongs to
    branch: torch.Tensor  # [L] 0 in the prefix, 1.. in branches
    predictor: torch.Tensor  # [N] position whose hidden state predicts the trained token
    target: torch.Tensor  # [N] id of the trained token
    values: dict  # name -> [N]
    items: list  # [chat.VisionItem] in the order of the placeholders
    layout: list  # [(start, prefix length, [branch lengths])]


def rope_positions(codec, ids, items):
    """Expanded ids [L] -> (positions [3, L] in time, height, width; the next free position).

    A text token advances all three axes by one. A frame of rows x columns tokens stays at one time
    step and advances by max(rows, columns). The rule is transformers' get_rope_index, without its
    loop over frames in torch. chat.py made the placeholders from the same grids.
    """
    if not items:
        return np.tile(np.arange(len(ids)), (3, 1)), len(ids)
    # Of all vision tokens: row and column, and how far each moves the next token.
    grids, moves = [], []
    for item in items:
        rows, columns = chat.token_grid(codec, item)
        grid = np.indices((rows, columns)).reshape(2, -1)  # [2, rows * columns]
        move = np.zeros(rows * columns, np.int64)
        move[-1] = max(rows, columns)
        grids.append(np.tile(grid, item.frames))
        moves.append(np.tile(move, item.frames))
    is_vision = np.asarray(ids) == codec.image_pad  # [L]
    advance = np.ones(len(ids), np.int64)
    advance[is_vision] = np.concatenate(moves)
    positions = np.tile(np.cumsum(advance) - advance, (3, 1))
    positions[1:, is_vision] += np.concatenate(grids, -1)
    return positions, int(advance.sum())


def pack_trees(codec, trees):
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
    columns = defaultdict(list)  # name -> arrays of each span; positions are [3, 1, n]
    values = defaultdict(list)  # the same for TokenSpan.values
    items, layout = [], []
    cursor = 0  # pack position where the next span begins
    for tree_number, tree in enumerate(trees):
        start = cursor
        p = len(tree.prefix.ids)
        for number, span in enumerate([tree.prefix, *tree.branches]):
            n = len(span.ids)
            ids = np.asarray(span.ids, np.int64)
            span_items = span.items if number else tree.items
            axes, end = rope_positions(codec, span.ids, span_items)
            if number == 0:
                following = end  # the position after the prefix, where every branch goes on
            else:
                axes += following
            trained = np.flatnonzero(span.mask)  # [n'] places in this span
            # The state BEFORE a token, in its own sequence, predicts it. For the first token of a
            # branch that is the end of the prefix. Its left neighbour belongs to another branch.
            predictor = np.where(trained == 0, start + p - 1, cursor + trained - 1)
            arrays = dict(ids=ids, positions=axes[:, None], tree=np.full(n, tree_number),
                          branch=np.full(n, number), predictor=predictor, target=ids[trained])
            for name, array in arrays.items():
                columns[name].append(array)
            for name, numbers in span.values.items():
                values[name].append(np.asarray(numbers, np.float32)[trained])
            items += span_items
            cursor += n
        layout.append((start, p, [len(branch.ids) for branch in tree.branches]))
    return Pack(values=join(values), items=items, layout=layout, **join(columns))


def join(columns):
    """{name: arrays [.., n] of each span} -> {name: tensor [.., L]}"""
    return {name: torch.from_numpy(np.concatenate(x, -1)) for name, x in columns.items()}


def fill_packs(trees, budget):
    """Trees -> lists of at most `budget` tokens, each a pack: first fit, longest first.

    A tree over the budget is split by branches, and each part computes the prefix again. A single
    sequence over the budget fills a pack alone.
    """
    pieces = []  # trees that fit
    for tree in trees:
        piece = Tree(tree.prefix, tree.items)
        for branch in tree.branches:
            if piece.branches and len(piece) + len(branch.ids) > budget:
                pieces.append(piece)
                # The prefix's own trained tokens, if any, count in the first piece only.
                silent = replace(tree.prefix, mask=[0 for _ in tree.prefix.ids])
                piece = Tree(silent, tree.items)
            piece.branches.append(branch)
        pieces.append(piece)
    packs = []
    for piece in sorted(pieces, key=len, reverse=True):
        for pack in packs:
            if sum(map(len, pack)) + len(piece) <= budget:
                pack.append(piece)
                break
        else:
            packs.append([piece])
    return packs


def make_packs(codec, trees, budget):
    """Trees -> [Pack] of at most `budget` tokens each, see fill_packs."""
    return [pack_trees(codec, part) for part in fill_packs(trees, budget)]


def pad_packs_over_ranks(codec, packs):
    """This rank's packs as (pack, True), then spare ones as (pack, False), until all ranks have
    equally many. Collective.

    A forward under FSDP is a chain of collectives: if one rank runs fewer forwards, the others wait
    for ever.
    """
    max_packs = torch.tensor(len(packs))  # in host memory, so the host does not wait for a GPU
    dist.all_reduce(max_packs, op=dist.ReduceOp.MAX)
    # Two ids, the second one trained: the smallest pack with a loss to go backward from.
    spare = pack_trees(codec, [Tree(TokenSpan([codec.eos, codec.eos], [0, 1]))])
    num_spare = int(max_packs) - len(packs)
    return [(pack, True) for pack in packs] + [(spare, False) for _ in range(num_spare)]


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
    parts: list = None  # of the CPU, see attention_parts
    mask: object = None  # FlexAttention's BlockMask
    ends: torch.Tensor = None  # [sequences + 1] int32: 0 and the ends of plain sequences
    longest: int = 0  # tokens of the longest plain sequence


def attention_plan(pack, device):
    """Pack -> AttentionPlan. On a GPU: flash-attn, if installed, for packs without branches, else
    FlexAttention. On a CPU: TreeAttention."""
    if device.type == "cpu":
        return AttentionPlan("parts", pack.layout, parts=attention_parts(pack.layout))
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
        key = key.repeat_interleave(shared, 1)
        value = value.repeat_interleave(shared, 1)
    return TreeAttention.apply(query, key, value, plan.parts, scaling).transpose(1, 2), None


# ------------------------------------------------------------------------------------------------
# 4. Log-probs


class Policy(torch.nn.Module):
    """A Qwen3-VL or Qwen3.5 with the one forward of all training stages: a pack goes in, log-probs
    of its trained tokens come out."""

    def __init__(self, hf, codec):
        super().__init__()
        self.hf = hf
        self.codec = codec
        self.features = None  # VisionFeatures; set by each stage, which knows the videos

    def forward(self, pack, temperature=1.0):
        """Pack -> (logp [N], entropy [N]) of pack.target, fp32.

        The host waits for the GPU in two places: the tower reads the sizes of new frames, and
        transformers turns a boolean mask into positions twice per deepstack level.
        """
        text = self.hf.model.language_model
        device = text.embed_tokens.weight.device
        features = None  # [V, 1 + D, H]; None for text alone
        vision_mask = None  # [1, L]
        if pack.items:
            features = self.features(pack.items)
            vision_mask = self.placeholder_mask(pack.ids, features)
            vision_mask = to_device(vision_mask, device)[None]
        ids = to_device(pack.ids, device)[None]  # [1, L]
        embeds, levels = self.embed(ids, vision_mask, features)  # [1, L, H], D x [V, H]
        out = text(inputs_embeds=embeds, position_ids=to_device(pack.positions, device),
                   use_cache=False, visual_pos_masks=vision_mask, deepstack_visual_embeds=levels,
                   plan=attention_plan(pack, device))
        hidden = out.last_hidden_state[0]  # [L, H]
        # Only states that predict a trained token meet the vocabulary: [N, H] of [L, H].
        return token_logprobs(hidden[to_device(pack.predictor, device)], self.hf.lm_head.weight,
                              to_device(pack.target, device), self.codec.suppress_tokens,
                              temperature)

    def placeholder_mask(self, ids, features):
        """ids in host memory, features [V, 1 + D, H] or None -> mask of the ids that stand for
        vision tokens, or None. Raises ValueError if their number is not V."""
        if features is None:
            return None
        # Counted on the host: masked_scatter would take too many features without a word.
        vision_mask = ids == self.codec.image_pad
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
    # b of the header. The engine samples under the same bias, so the two distributions are one.
    bias = torch.zeros(weight.shape[0], device=hidden.device)
    never = to_device(torch.tensor(list(banned), dtype=torch.long), hidden.device)
    bias.index_fill_(0, never, -100.0)
    logps, entropies = [], []
    for h, y in zip(hidden.split(chunk), target.split(chunk)):
        # Keeps h for backward, not the logits.
        logp, entropy = checkpoint(chunk_logprobs, h, weight, y, bias, temperature,
                                   use_reentrant=False)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def chunk_logprobs(hidden, weight, target, bias, temperature):
    """hidden [n, H] -> (log-prob of target [n], entropy [n]) of the sampled distribution, fp32."""
    logits = (F.linear(hidden, weight).float() + bias) / temperature  # [n, vocab]
    norm = logits.logsumexp(-1)  # [n]
    logp = logits.gather(1, target[:, None])[:, 0] - norm
    with torch.no_grad():  # entropy is logged, never trained
        entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return logp, entropy


# ---- below: kernels, shards, optimizer (a reader of the step may stop here) ---------------------


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
    partial = (pairs > 0) & ~full
    # The kernel calls `visible` in blocks seen in part. It skips that in blocks seen whole.
    lists = []
    for kind in (partial, full):
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
    for first, end, first_key, end_key, causal in attention_parts(layout):
        queries = inside(first, end)
        if causal:  # all pairs of earlier blocks, a triangle within the same block
            pairs += np.tril(np.outer(queries, queries), -1)
            pairs += np.diag(queries * (queries + 1) // 2)
        else:
            pairs += np.outer(queries, inside(first_key, end_key))
    return pairs


# ------------------------------------------------------------------------------------------------
# Attention kernels


def attention_parts(layout):
    """Pack.layout -> [(first query, end, first key, end, causal)], rectangles and triangles that
    together are the pairs of a pack: each prefix with itself, each branch with itself, all branches
    of a tree with their prefix."""
    parts = []
    for start, p, branches in layout:
        prefix_end = start + p
        parts.append((start, prefix_end, start, prefix_end, True))
        end = prefix_end
        for n in branches:
            parts.append((end, end + n, end, end + n, True))
            end += n
        if branches:
            parts.append((prefix_end, end, start, prefix_end, False))
    return parts


class TreeAttention(torch.autograd.Function):
    """Attention of trees on a CPU, without masks and without copies of the prefix: one kernel call
    for each of attention_parts. query, key, value [1, heads, L, d] -> the same.

    A branch meets its keys in two parts, a and b. Each gives an output and a softmax's log-sum:

      o = (1 - w) o_a + w o_b,   w = sigmoid(lse_b - lse_a)      lse = log(exp(lse_a) + exp(lse_b))

    Backward hands the whole o and lse to the same kernel for each part. Its formula then gives the
    share of that part in the gradient, as in ring attention. (sdpa with a dense mask per tree, or
    per branch, takes 1.6 to 3 times as long here.)
    """

    @staticmethod
    def forward(ctx, query, key, value, parts, scale):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = torch.zeros_like(query)
        lse = torch.full(query.shape[:3], -torch.inf)  # [1, heads, L]
        for a, b, c, d, causal in parts:
            o, part_lse = kernel(query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], 0.0, causal,
                            scale=scale)
            lse_so_far = lse[:, :, a:b]  # -inf in the first part of a query, which gives weight 1
            weight = torch.sigmoid(part_lse - lse_so_far)[..., None]
            out[:, :, a:b].lerp_(o, weight.to(o.dtype))
            lse[:, :, a:b] = torch.logaddexp(lse_so_far, part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts = parts
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
        for a, b, c, d, causal in ctx.parts:
            part_q, part_k, part_v = kernel(
                grad[:, :, a:b], query[:, :, a:b], key[:, :, c:d], value[:, :, c:d],
                out[:, :, a:b], lse[:, :, a:b], 0.0, causal, scale=ctx.scale)
            grad_q[:, :, a:b] += part_q
            grad_k[:, :, c:d] += part_k
            grad_v[:, :, c:d] += part_v
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


def frames_attention(module, query, key, value, mask=None, scaling=None, cu_seq_lens_q=None, **_):
    """The tower's attention: each frame attends to itself. query [1, heads, L, d] -> ([1, L, heads,
    d], None).

    The frames of one call have one size (VisionFeatures sees to that), so they are one batch for
    one sdpa call. transformers' own path loops over the frames in every layer.
    """
    frames = len(cu_seq_lens_q) - 1
    q, k, v = (x[0].unflatten(1, (frames, -1)).transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [frames, heads, L / frames, d]
    return out.transpose(1, 2).flatten(0, 1)[None], None


# ------------------------------------------------------------------------------------------------
# From transformers' model to ours, in shards


def compute_dtype(device):
    """bf16 on a GPU; fp32 on a CPU, because bf16 gains nothing there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def engine_dtype(codec, device):
    """The dtype in which vLLM computes, and takes weights."""
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, codec.base.cpu_dtype)


def wrap_policy(hf, codec, device, recompute):
    """transformers' model -> Policy with our attention and a frozen tower. recompute: backward
    computes the decoder layers again instead of keeping their activations."""
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_attention)
    AttentionInterface.register("frames_as_flash", frames_attention)
    hf.model.language_model.config._attn_implementation = "packed"
    tower = hf.model.visual
    tower.requires_grad_(False)
    tower.to(compute_dtype(device))
    # Only to a name that holds "flash" does transformers hand over all frames at once.
    tower.config._attn_implementation = "frames_as_flash"
    tower.patch_embed.proj.__class__ = PatchEmbedding  # names and shapes stay
    if recompute:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, codec).train()
    tower.eval()
    return policy


def shard(policy, device, replicas, shard_inside):
    """FSDP2: one group per decoder layer, one for the rest (embeddings, head, norm). The frozen
    tower stays whole on every rank.

    On a GPU: fp32 shards, bf16 compute, fp32 gradient reduction. replicas: groups of ranks that
    each hold the whole model in shards (HSDP). With one group per node, weights are gathered inside
    a node and only gradients cross between nodes. 0: as many groups as ranks. shard_inside(layer,
    mesh, precision): makes further groups in a layer, see plumbing/qwen35.py.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    replicas = replicas or world
    if world % replicas:
        raise launch.UserError(f"--dp-replicate {replicas}: {world} ranks cannot be divided so")
    if replicas == world and compute_dtype(device) == torch.float32:
        # Every rank holds the whole model in fp32, and reduce_and_clip averages the gradients.
        # FSDP's hooks would cost a third of a toy step.
        return policy
    mesh = init_device_mesh(device.type, (replicas, world // replicas),
                            mesh_dim_names=("replicate", "shard"))
    if replicas == 1:
        mesh = mesh["shard"]
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in policy.hf.model.language_model.layers:
        shard_inside(layer, mesh, precision)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    tower = set(policy.hf.model.visual.parameters())
    fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=tower)
    return policy


# ------------------------------------------------------------------------------------------------
# Training


def trained_parameters(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def adamw(parameters, lr, beta2, device):
    """AdamW with beta1 0.9. Weight decay applies to matrices, not to norms and biases."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=device.type == "cuda")


def reduce_and_clip(policy, limit):
    """Clips the gradients to the norm `limit` (0: no clipping). -> the norm before clipping, taken
    over the gradients of all ranks, so every rank gets the same number. Collective. Without FSDP
    the gradients are this rank's own until here, and are averaged first."""
    trained = [p for p in policy.parameters() if p.grad is not None]
    grads = [p.grad for p in trained]
    world = dist.get_world_size()
    if world > 1 and not hasattr(grads[0], "full_tensor"):
        flat = torch.nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat / world, grads)
    norm = torch.nn.utils.clip_grad_norm_(trained, limit or float("inf"))
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return norm.item()
