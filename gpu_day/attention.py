"""
Part 4: which kernel computes attention over packs, at part 1's shapes (bf16, 16 query heads, 8 key heads, d 128).

  trees      flex     FlexAttention with model.block_mask: what grpo.update runs today
             merged   three varlen FlashAttention calls of torch itself (prefixes; branches against their prefix;
                      branches against themselves), joined by their log-sums: nothing to compile, no block lists
             unshared one causal sequence per rollout, by sdpa: what a trainer without shared prompts runs
             padded   the same with an explicit mask, as transformers passes for rows of unequal length
  chats      flex | varlen   a pack of plain sequences (SFT): today's path without flash-attn, and torch's own kernel

Each: seconds of the first call (compiles), ms forward, ms forward and backward, TFLOP/s of the work it does,
distance from flex. Also the host's time for the block mask.
"""
import inspect
import os
import sys
import time

from common import (PEAK, Result, batch, chat, geometry, make_checkpoint, median, model, np, parse, parser, sync,
                    torch)
import torch.nn.functional as F

aten = torch.ops.aten


# ---- candidate for model.py: TreeAttention on both devices ----

def varlen(q, k, v, ends_q, ends_k, causal, scale):
    """Sequences one after another: q [Lq, heads, d], ends [n + 1] on the host -> (out, lse [heads, Lq])."""
    if q.is_cuda:
        cu_q, cu_k, max_q, max_k = *ends_on(q.device, ends_q, ends_k), span(ends_q), span(ends_k)
        out, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)
        return out, lse
    outs, lses, shared = [], [], q.shape[1] // k.shape[1]
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        x, y, z = (t[None].transpose(1, 2) for t in (q[a:b], k[c:d].repeat_interleave(shared, 1),
                                                     v[c:d].repeat_interleave(shared, 1)))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(x, y, z, 0.0, causal, scale=scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def varlen_backward(grad, q, k, v, out, lse, ends_q, ends_k, causal, scale):
    """out, lse: of the whole row, not of these keys alone -> gradients of q, k, v by these keys."""
    if q.is_cuda:
        cu_q, cu_k, max_q, max_k = *ends_on(q.device, ends_q, ends_k), span(ends_q), span(ends_k)
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return aten._flash_attention_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, rng,
                                              torch.empty(0, device=q.device), scale=scale)
    shared, parts = q.shape[1] // k.shape[1], []
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        x, y, z = (t[None].transpose(1, 2) for t in (q[a:b], k[c:d].repeat_interleave(shared, 1),
                                                     v[c:d].repeat_interleave(shared, 1)))
        g, o = (t[a:b][None].transpose(1, 2) for t in (grad, out))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, x, y, z, o, lse[:, a:b][None], 0.0, causal, scale=scale)
        dk, dv = (t[0].transpose(0, 1).unflatten(1, (-1, shared)).sum(2) for t in (dk, dv))
        parts.append((dq[0].transpose(0, 1), dk, dv))
    return tuple(torch.cat(x) for x in zip(*parts))


def span(ends):
    return max(b - a for a, b in zip(ends, ends[1:]))


def ends_on(device, *lists):
    return [model.to_device(torch.tensor(e, dtype=torch.int32), device) for e in lists]


class Plan:
    """Rows and ends of a pack's prefixes and branches, made once per pack."""

    def __init__(self, layout, device):
        # Trees with branches first: the keys of all branches are then the beginning of the prefixes.
        layout = sorted(layout, key=lambda tree: not tree[2])
        rows, self.prefix_ends, self.tail_ends, self.own_ends, self.key_ends = ([], []), [0], [0], [0], [0]
        for start, p, branches in layout:
            rows[0].extend(range(start, start + p))
            self.prefix_ends.append(len(rows[0]))
            if branches:
                rows[1].extend(range(start + p, start + p + sum(branches)))
                self.tail_ends.append(len(rows[1]))
                self.key_ends.append(len(rows[0]))
                self.own_ends += (self.own_ends[-1] + np.cumsum(branches)).tolist()
        self.prefix, self.tail = (model.to_device(torch.tensor(x, dtype=torch.long), device) for x in rows)


class TreeFlash(torch.autograd.Function):
    """o = w o_prefix + (1 - w) o_own by the log-sums of both, as model.TreeAttention, for all trees of a
    pack in three calls. query, key, value [1, heads, L, d] -> [1, heads, L, d]."""

    @staticmethod
    def forward(ctx, query, key, value, plan, scale):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, d]
        head, tail = ([x.index_select(0, rows) for x in (q, k, v)] for rows in (plan.prefix, plan.tail))
        out_head, lse_head = varlen(*head, plan.prefix_ends, plan.prefix_ends, True, scale)
        out = torch.empty_like(q).index_copy_(0, plan.prefix, out_head)
        saved = [*head, out_head, lse_head]
        if len(plan.tail):
            keys = [x[:plan.key_ends[-1]] for x in head[1:]]
            across, lse_across = varlen(tail[0], *keys, plan.tail_ends, plan.key_ends, False, scale)
            own, lse_own = varlen(*tail, plan.own_ends, plan.own_ends, True, scale)
            weight = torch.sigmoid(lse_across - lse_own).T[..., None]
            out_tail = own.lerp(across, weight.to(own.dtype))
            out.index_copy_(0, plan.tail, out_tail)
            saved += [*tail, out_tail, torch.logaddexp(lse_across, lse_own)]
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.scale = plan, scale
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx, grad):
        plan, scale, saved = ctx.plan, ctx.scale, ctx.saved_tensors
        (*head, out_head, lse_head), rest = saved[:5], saved[5:]
        grad = grad[0].transpose(0, 1)
        grad_head = grad.index_select(0, plan.prefix)
        dh = varlen_backward(grad_head, *head, out_head, lse_head, plan.prefix_ends, plan.prefix_ends, True, scale)
        grads = [x.new_empty((len(grad), *x.shape[1:])) for x in head]
        if len(plan.tail):
            *tail, out_tail, lse_tail = rest
            grad_tail, cut = grad.index_select(0, plan.tail), plan.key_ends[-1]
            # The whole row's output and log-sum: the kernel then gives each part's share of the gradient.
            dq, dk, dv = varlen_backward(grad_tail, tail[0], *(x[:cut] for x in head[1:]), out_tail, lse_tail,
                                         plan.tail_ends, plan.key_ends, False, scale)
            own = varlen_backward(grad_tail, *tail, out_tail, lse_tail, plan.own_ends, plan.own_ends, True, scale)
            dh[1][:cut] += dk
            dh[2][:cut] += dv
            for whole, part in zip(grads, (own[0] + dq, *own[1:])):
                whole.index_copy_(0, plan.tail, part)
        for whole, part in zip(grads, dh):
            whole.index_copy_(0, plan.prefix, part)
        return *(x.transpose(0, 1)[None] for x in grads), None, None


# ---- the measurement ----

def bench(device, function, inputs, rounds):
    """-> (first call s, forward ms, forward and backward ms, out, gradients)."""
    def both():
        out = function(*inputs)
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

    began = time.perf_counter()
    out, grads = both()
    sync(device)
    first, times = time.perf_counter() - began, {0: [], 1: []}
    for _ in range(rounds):
        for which, call in enumerate((lambda: function(*inputs), both)):
            sync(device)
            began = time.perf_counter()
            for _ in range(3):
                call()
            sync(device)
            times[which].append((time.perf_counter() - began) / 3 * 1e3)
    return first, median(times[0]), median(times[1]), out.detach(), grads


def pairs_of(layout):
    return sum(p * (p + 1) / 2 + sum(n * p + n * (n + 1) / 2 for n in branches) for _, p, branches in layout)


def main():
    p = parser(__doc__, 150)
    args = parse(p)
    result = Result(args, "attention")
    device = torch.device("cpu" if args.dry else "cuda")
    ckpt, _ = make_checkpoint(args, device)
    codec = chat.load_codec(ckpt)
    trees, _ = batch(args, codec)
    text = geometry(args)["text_config"]
    heads, shared, d = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    dtype, scale = model.compute_dtype(device), d ** -0.5
    draw = torch.Generator(device).manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, generator=draw).requires_grad_()

    def report(name, numbers, pairs, reference=None):
        first, forward, both, out, grads = numbers
        row = {"first s": round(first, 2), "forward ms": round(forward, 3), "both ms": round(both, 3),
               "TFLOP/s forward": round(4 * pairs * heads * d / forward / 1e9, 1),
               "TFLOP/s both": round(14 * pairs * heads * d / both / 1e9, 1)}
        if reference is not None:
            row["distance"] = [round(((a.float() - b.float()).norm() / b.float().norm()).item(), 6)
                               for a, b in zip((out, *grads), reference)]
        result.add(name, row)
        return out, *grads

    # One pack of trees
    pack = model.pack_trees(codec, trees)
    n = len(pack.ids)
    inputs = make(1, heads, n, d), make(1, shared, n, d), make(1, shared, n, d)
    began = time.perf_counter()
    mask = model.block_mask(pack, device) if device.type == "cuda" else None
    result.add("trees: host ms of the block mask", (time.perf_counter() - began) * 1e3)
    began = time.perf_counter()
    plan = Plan(pack.layout, device)
    result.add("trees: host ms of the merged plan", (time.perf_counter() - began) * 1e3)
    if device.type == "cuda":
        flex = bench(device, lambda q, k, v: model.compiled_flex()(q, k, v, block_mask=mask, scale=scale,
                                                                    enable_gqa=True), inputs, args.rounds)
    else:  # the CPU's own kernel stands in for the dry run
        def parts(q, k, v):
            k, v = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
            return model.TreeAttention.apply(q, k, v, model.attention_parts(pack.layout), scale)
        flex = bench(device, parts, inputs, args.rounds)
    reference = report("trees: flex" if device.type == "cuda" else "trees: CPU kernel", flex, pairs_of(pack.layout))
    merged = bench(device, lambda q, k, v: TreeFlash.apply(q, k, v, plan, scale), inputs, args.rounds)
    report("trees: merged flash", merged, pairs_of(pack.layout), reference)
    result.add("RATIO flex / merged, both", flex[2] / merged[2])

    # The same rollouts, one sequence each
    rows = [len(t.prefix.ids) + len(b.ids) for t in trees for b in t.branches]
    width, some = max(rows), min(8, len(rows))
    inputs = make(some, heads, width, d), make(some, shared, width, d), make(some, shared, width, d)
    scaled = len(rows) / some
    one = bench(device, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale,
                                                                       enable_gqa=True), inputs, args.rounds)
    report("unshared: sdpa, causal, 8 of all rows", one, some * width * (width + 1) / 2)
    result.add("RATIO unshared / flex, both", one[2] * scaled / flex[2])
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()[None, None]
    causal = causal.expand(some, 1, -1, -1).clone()
    causal[:, :, :, :5] = False  # padding on the left
    causal[:, :, torch.arange(width), torch.arange(width)] = True
    masked = bench(device, lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(heads // shared, 1), v.repeat_interleave(heads // shared, 1), causal, scale=scale),
        inputs, args.rounds)
    report("unshared: sdpa, explicit mask, 8 of all rows", masked, some * width * (width + 1) / 2)
    del inputs, causal, one, masked

    # Plain sequences
    lengths = [256, 128] if args.dry else [4000, 3200, 2800, 2500, 2200, 2000, 1800, 1500, 1300, 1100, 900, 700] * 2
    chats = [model.Tree(model.TokenSpan([codec.eos] * n, [0] + [1] * (n - 1))) for n in lengths]
    pack = model.pack_trees(codec, chats)
    n, ends = len(pack.ids), [0, *np.cumsum(lengths).tolist()]
    inputs = make(1, heads, n, d), make(1, shared, n, d), make(1, shared, n, d)
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 has no such argument, and takes fewer key heads without it.
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        mask = model.block_mask(pack, device)
        flex = bench(device, lambda q, k, v: model.compiled_flex()(q, k, v, block_mask=mask, scale=scale,
                                                                    enable_gqa=True), inputs, args.rounds)
        reference = report("chats: flex", flex, pairs_of(pack.layout))
        (cu,) = ends_on(device, ends)

        def plain(q, k, v):
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            out = varlen_attn(q, k, v, cu, cu, span(ends), span(ends), scale=scale, window_size=(-1, 0), **grouped)
            return out.transpose(0, 1)[None]

        flash = bench(device, plain, inputs, args.rounds)
        report("chats: varlen of torch", flash, pairs_of(pack.layout), reference)
        result.add("RATIO flex / varlen, both", flex[2] / flash[2])
    result.add("done", True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
