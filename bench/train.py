"""
train.py: two ratios of the trainer's forward + backward, at the toy's geometry.

  shared  a GRPO group as one tree [prompt | o1 | .. | oG], against the same responses packed
          plainly, each after a copy of the prompt, one per forward (the faster way on a CPU)
  packed  SFT chats of mixed lengths packed end to end, against one padded batch through plain
          transformers

The script checks that both sides compute the same gradient. Tokens/s count every token of every
sequence. A shared prompt counts once per sequence, and padding does not count. The sides alternate.
The script prints medians as one line of JSON.

  python bench/train.py --ckpt toy/init [--prompt 4000 --response 800 --group 8]
"""
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "tests"))
import numpy as np
import torch
from reference import load_policy  # not sharded: the padded side skips our forward

import chat
import checkpoint
import launch
import model
import video


def noise(spec):
    """Frames in place of a file: 32 x 32 pixels, one vision token per frame."""
    rng = np.random.default_rng(spec["frames"])
    images = rng.integers(0, 256, (spec["frames"], 32, 32, 3), dtype=np.uint8)  # [T, 32, 32, 3]
    return video.Frames(images, np.arange(spec["frames"], dtype=float), str(spec["frames"]), [])


def prompt_of(codec, rng, frames, text):
    """-> (ids: `frames` placeholders, then `text` random tokens; [VisionItem])."""
    spec = {"video": "noise", "frames": frames}
    ids = [codec.image_pad] * frames + rng.integers(0, 256, text).tolist()
    return ids, [chat.vision_item(spec, noise(spec))]


def group_trees(codec, rng, prompt, response, group):
    """-> (one shared tree, the same responses as separate sequences). Lengths in tokens; three
    quarters of the prompt are frames."""
    ids, items = prompt_of(codec, rng, prompt * 3 // 4, prompt - prompt * 3 // 4)
    branches = [model.Span(rng.integers(0, 256, response).tolist(), [1] * response)
                for _ in range(group)]  # mask 1: every token is trained
    plain = [model.Tree(model.Span(ids + b.ids, [0] * prompt + b.mask), items) for b in branches]
    return model.Tree(model.Span(ids, [0] * prompt), items, branches), plain


def chat_trees(codec, rng):
    """Chats with overviews of 4 to 64 frames, long or short texts, and 30 trained tokens each."""
    trees = []
    for frames in (4, 8, 16, 32, 64) * 4:
        ids, items = prompt_of(codec, rng, frames, int(rng.integers(40, 400)))
        trees.append(model.Tree(model.Span(ids, [0] * (len(ids) - 30) + [1] * 30), items))
    return trees


def packed_backward(policy, packs):
    for pack in packs:
        (-policy(pack)[0].sum()).backward()


def padded_backward(policy, trees):
    """One right-padded batch through plain transformers, as in a trainer without packing."""
    codec, longest = policy.codec, max(len(tree) for tree in trees)
    ids = torch.full((len(trees), longest), codec.eos)  # [B, L], as are the masks
    attention = torch.zeros_like(ids)
    trained = torch.zeros_like(ids, dtype=torch.bool)
    positions = torch.zeros(4, len(trees), longest, dtype=torch.long)  # text, time, height, width
    for row, tree in enumerate(trees):
        n = len(tree)
        ids[row, :n] = torch.tensor(tree.prefix.ids)
        attention[row, :n] = 1
        trained[row, :n] = torch.tensor(tree.prefix.mask).bool()
        positions[0, row, :n] = torch.arange(n)
        grid, _ = model.rope_positions(codec, tree.prefix.ids, tree.items)
        positions[1:, row, :n] = torch.from_numpy(grid)
    features = torch.cat([policy.features(item) for tree in trees for item in tree.items])
    seen = ids == codec.image_pad
    embeds, levels = policy.embed(ids, seen, features)  # [B, L, H]
    text = policy.hf.model.language_model
    # Use transformers' attention, because ours handles packs but no padding.
    ours, text.config._attn_implementation = text.config._attn_implementation, "sdpa"
    hidden = text(inputs_embeds=embeds, position_ids=positions, attention_mask=attention,
                  use_cache=False, visual_pos_masks=seen, deepstack_visual_embeds=levels)
    text.config._attn_implementation = ours
    logits = policy.hf.lm_head(hidden.last_hidden_state[:, :-1])  # [B, L - 1, vocab], with padding
    logits[..., list(codec.banned)] -= 100.0  # as our policy bans these ids
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(),
                                               reduction="none")
    (losses * trained[:, 1:].flatten()).sum().backward()


def compare(sides, parameters, repeats):
    """{name: (function, *arguments)} -> {name: median seconds}. Raises RuntimeError if the sides
    leave different gradients."""
    seconds, norms = {name: [] for name in sides}, {}
    for repeat in range(repeats + 1):  # the first round warms up
        for name in list(sides)[:: 1 if repeat % 2 else -1]:  # take turns to go first
            for p in parameters:
                p.grad = None
            function, *arguments = sides[name]
            began = time.perf_counter()
            function(*arguments)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
            norms[name] = torch.stack([p.grad.norm() for p in parameters]).norm().item()
    one, other = norms.values()
    if abs(one - other) > 1e-3 * other:
        raise RuntimeError(f"the two sides computed different gradients: {norms}")
    return {name: statistics.median(values) for name, values in seconds.items()}


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--ckpt", required=True, help="toy checkpoint; its weights do not matter")
    add("--prompt", type=int, default=4000, help="tokens of the shared prompt")
    add("--response", type=int, default=800, help="tokens of each response")
    add("--group", type=int, default=8, help="responses of the group")
    add("--repeats", type=int, default=3, help="measurements of each side")
    add("--threads", type=int, default=2, help="torch threads")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # tiny models make denormals, which run in microcode
    ckpt = checkpoint.resolve_checkpoint(args.ckpt)
    codec = chat.load_codec(ckpt)
    policy = load_policy(ckpt, codec)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, noise)  # cached
    parameters, rng = model.trained_parameters(policy), np.random.default_rng(0)

    shared, plain = group_trees(codec, rng, args.prompt, args.response, args.group)
    chats = chat_trees(codec, rng)
    sides = {"shared": (packed_backward, policy, [model.pack_trees(codec, [shared])]),
             "plain": (packed_backward, policy,
                       [model.pack_trees(codec, [tree]) for tree in plain])}
    seconds = compare(sides, parameters, args.repeats)
    sides = {"packed": (packed_backward, policy, [model.pack_trees(codec, chats)]),
             "padded": (padded_backward, policy, chats)}
    seconds.update(compare(sides, parameters, args.repeats))

    in_group, in_chats = sum(map(len, plain)), sum(map(len, chats))
    tokens = {"shared": in_group, "plain": in_group, "packed": in_chats, "padded": in_chats}
    print(json.dumps({
        "bench": "train",
        "shared_ratio": round(seconds["plain"] / seconds["shared"], 3),
        "packed_ratio": round(seconds["padded"] / seconds["packed"], 3),
        "seconds": {name: round(s, 3) for name, s in seconds.items()},
        "tokens_per_s": {name: round(tokens[name] / s) for name, s in seconds.items()},
        "padding": round(1 - in_chats / (len(chats) * max(map(len, chats))), 3),
        **{name: getattr(args, name) for name in ("prompt", "response", "group", "repeats")},
        "threads": args.threads, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    launch.run_main(main)
