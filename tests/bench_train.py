"""
bench_train.py: two ratios of the trainer, forward + backward on random weights of the toy's geometry. Prints ONE line of JSON.

  shared    one GRPO group as [prompt | o1 | .. | oG] through model.Policy, against the same responses packed plainly, each behind
            a copy of the prompt. Same log-probs, same gradients; the prompt (most of it vision tokens) is computed once or G times.
  packed    SFT chats of mixed lengths packed end to end through model.Policy, against one padded batch through plain transformers.

Tokens/s count useful tokens: every token of every sequence, padding not counted, a shared prompt counted once per sequence, so
both sides of a ratio did the same useful work. Sides are interleaved; medians and their ratio are reported, with the load.

Run:  python tests/bench_train.py --ckpt toy/init [--prompt 4000 --response 800 --group 8]
"""
import argparse
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch

import model


def frames_item(key, count):
    """A frame set of 32 x 32 pixels (one vision token a frame) that needs no file."""
    return model.VisionItem({"video": key}, key, count, 32, 32, [float(s) for s in range(count)])


class NoiseVision(model.VisionFeatures):
    """The real frozen tower on noise frames; features are kept, as in training."""

    def __init__(self, visual, codec):
        super().__init__(visual, codec, self.noise)

    def noise(self, spec):
        import video

        count = int(spec["video"].split("-")[-1])
        images = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return video.Frames(images, np.arange(count, dtype=float), spec["video"], [])


def sequence(codec, rng, frames, text):
    """Ids of `frames` frames, one placeholder each, and then `text` plain tokens -> (ids, [VisionItem])."""
    words = rng.integers(0, 256, text).tolist()
    return [codec.image_pad] * frames + words, [frames_item(f"noise-{frames}", frames)] if frames else []


def timed(function, parameters):
    """-> seconds of one forward + backward, and a digest of its gradient: proof that both sides did the same work."""
    for p in parameters:
        p.grad = None
    began = time.perf_counter()
    loss = function()
    loss.backward()
    seconds = time.perf_counter() - began
    return seconds, torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()


def compare(sides, parameters, repeats):
    """{name: loss function} -> ({name: median seconds}, {name: gradient norm}); sides alternate."""
    seconds, norms = {name: [] for name in sides}, {}
    for repeat in range(repeats + 1):  # the first round warms up and is dropped
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            took, norms[name] = timed(sides[name], parameters)
            if repeat:
                seconds[name].append(took)
    return {name: statistics.median(s) for name, s in seconds.items()}, norms


def group_trees(codec, rng, prompt, response, group):
    """-> (one shared tree, the same responses as separate sequences). Three quarters of the prompt are frames."""
    ids, vision = sequence(codec, rng, prompt * 3 // 4, prompt - prompt * 3 // 4)
    branches = [model.Span(rng.integers(0, 256, response).tolist(), [1] * response) for _ in range(group)]
    shared = model.Tree(model.Span(ids, [0] * prompt), vision, branches)
    plain = [model.Tree(model.Span(ids + b.ids, [0] * prompt + b.mask), vision) for b in branches]
    return shared, plain


def padded_loss(hf, codec, vision, trees):
    """Plain transformers on one right-padded batch: what a trainer without packing does. -> summed log-prob loss."""
    longest = max(len(t) for t in trees)
    ids = torch.full((len(trees), longest), codec.eos)
    attention, trained = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    positions = torch.zeros(4, len(trees), longest, dtype=torch.long)
    for row, t in enumerate(trees):
        n = len(t)
        ids[row, :n], attention[row, :n] = torch.tensor(t.prefix.ids), 1
        trained[row, :n] = torch.tensor(t.prefix.mask).bool()
        positions[0, row, :n] = torch.arange(n)
        positions[1:, row, :n] = torch.from_numpy(model.rope_positions(codec, t.prefix.ids, t.vision)[0])
    features = torch.cat([vision(item) for t in trees for item in t.vision])
    seen = (ids == codec.image_pad) & attention.bool()
    text = hf.model.language_model
    embeds = text.embed_tokens(ids).masked_scatter(seen[..., None], features[:, 0])
    hidden = text(inputs_embeds=embeds, position_ids=positions, attention_mask=attention, use_cache=False, visual_pos_masks=seen,
                  deepstack_visual_embeds=list(features[:, 1:].unbind(1))).last_hidden_state
    logits = hf.lm_head(hidden[:, :-1])  # [B, longest - 1, vocab], padding included
    for i in codec.banned:
        logits[..., i] -= 100.0
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * trained[:, 1:].flatten()).sum()


def profile_attention(policy, pack, vision, parameters):
    """Share of forward + backward spent in sdpa kernels: where the time of the shared form goes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        timed(lambda: -policy(pack, vision)[0].sum(), parameters)
    rows = trace.key_averages()
    total = sum(r.self_cpu_time_total for r in rows)
    attention = sum(r.self_cpu_time_total for r in rows if "attention" in r.key)
    top = sorted(rows, key=lambda r: -r.self_cpu_time_total)[:8]
    return attention / total, {r.key: round(r.self_cpu_time_total / total, 3) for r in top}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint, for its geometry and tokenizer; the weights do not matter")
    add("--data", default=None, help="accepted for symmetry with bench_rollout.py; frames are noise")
    add("--prompt", type=int, default=4000, help="tokens of the shared prompt")
    add("--response", type=int, default=800, help="tokens of each response")
    add("--group", type=int, default=8, help="responses of the group")
    add("--repeats", type=int, default=3, help="measurements of each side")
    add("--threads", type=int, default=2, help="torch threads")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
    ckpt = model.resolve_checkpoint(args.ckpt)
    codec = model.load_codec(ckpt)
    policy = model.load_policy(ckpt, codec, torch.device("cpu"))
    vision = NoiseVision(policy.hf.model.visual, codec)
    parameters, rng = model.trained_parameters(policy), np.random.default_rng(0)

    # 1. One GRPO group. The plain side runs one sequence a forward, which is the kinder way for it on a CPU.
    shared, plain = group_trees(codec, rng, args.prompt, args.response, args.group)
    one, many = model.pack_trees(codec, [shared]), [model.pack_trees(codec, [t]) for t in plain]

    def plain_side():
        for pack in many[1:]:
            (-policy(pack, vision)[0].sum()).backward()
        return -policy(many[0], vision)[0].sum()

    group_s, group_norms = compare({"shared": lambda: -policy(one, vision)[0].sum(), "plain": plain_side}, parameters, args.repeats)
    share, top = profile_attention(policy, one, vision, parameters)

    # 2. SFT chats of mixed lengths: overviews of 4 to 64 frames, some short answers, some long.
    chats = []
    for frames in (4, 8, 16, 32, 64) * 4:
        ids, items = sequence(codec, rng, frames, int(rng.integers(40, 400)))
        chats.append(model.Tree(model.Span(ids, [0] * (len(ids) - 30) + [1] * 30), items))
    pack = model.pack_trees(codec, chats)

    def padded_side():
        # Plain transformers attends with its own sdpa path here, not with ours.
        text = policy.hf.model.language_model
        before, text.config._attn_implementation = text.config._attn_implementation, "sdpa"
        loss = padded_loss(policy.hf, codec, vision, chats)
        text.config._attn_implementation = before
        return loss

    sft_s, sft_norms = compare({"packed": lambda: -policy(pack, vision)[0].sum(), "padded": padded_side}, parameters, args.repeats)
    useful, chat_tokens = args.group * (args.prompt + args.response), sum(len(t) for t in chats)
    for norms in (group_norms, sft_norms):
        a, b = norms.values()
        if abs(a - b) > 1e-3 * abs(b):
            raise RuntimeError(f"the two sides computed different gradients: {norms}")
    print(json.dumps({
        "shared_ratio": round(group_s["plain"] / group_s["shared"], 3), "shared_target": 3.0,
        "packed_ratio": round(sft_s["padded"] / sft_s["packed"], 3),
        "shared_s": round(group_s["shared"], 3), "plain_s": round(group_s["plain"], 3),
        "shared_tokens_per_s": round(useful / group_s["shared"]), "plain_tokens_per_s": round(useful / group_s["plain"]),
        "packed_s": round(sft_s["packed"], 3), "padded_s": round(sft_s["padded"], 3),
        "packed_tokens_per_s": round(chat_tokens / sft_s["packed"]), "padded_tokens_per_s": round(chat_tokens / sft_s["padded"]),
        "padding": round(1 - chat_tokens / (len(chats) * max(len(t) for t in chats)), 3),
        "attention_share_of_shared": round(share, 3), "top_operators": top, "gradient_norms": {**group_norms, **sft_norms},
        "prompt": args.prompt, "response": args.response, "group": args.group, "repeats": args.repeats, "threads": args.threads,
        "load": [round(x, 1) for x in os.getloadavg()]}))


if __name__ == "__main__":
    model.run_main(main)
