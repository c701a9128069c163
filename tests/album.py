"""
album.py: random videos that exist only in memory, and the prompts, trees and log-probs that several
test files make of them.
"""
import numpy as np
import torch
from reference import forward

import chat
import model
import video
from model import TokenSpan, Tree


class Album:
    """Random videos that exist only in memory, and the loader that VisionFeatures asks for them."""

    def __init__(self):
        self.frames = {}

    def item(self, seed, frames=3, height=64, width=96, name=None):
        """-> VisionItem of a random video with 2 x 3 vision tokens a frame."""
        rng, name = np.random.default_rng(seed), name or f"v{seed}-{frames}-{height}-{width}"
        images = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
        seconds = np.round(np.cumsum(rng.uniform(0.6, 7.0, frames)), 1)
        self.frames[name] = video.Frames(images, seconds, name, [f"{name} {t}" for t in seconds])
        return chat.vision_item({"video": name}, self.frames[name])

    def load(self, spec):
        return self.frames[spec["video"]]

    def features(self, policy, codec):
        return model.VisionFeatures(policy, self.load)


def user(*parts):
    """One user message: a VisionItem becomes its frames, a string becomes text."""
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str)
                                         else {"type": "video", **p.spec} for p in parts]}]


def prompt(codec, *parts):
    """-> (expanded ids, compact ids, items) of one user message."""
    items = [p for p in parts if not isinstance(p, str)]
    return *chat.encode_prompt(codec, user(*parts), items), items


def response(seed, n):
    """n random plain token ids."""
    return np.random.default_rng(seed).integers(10, 250, n).tolist()


def plain_tree(ids, items, answer):
    return Tree(TokenSpan(ids + answer, [0] * len(ids) + [1] * len(answer)), items)


def branched_tree(ids, items, texts):
    return Tree(TokenSpan(ids, [0] * len(ids)), items, [TokenSpan(t, [1] * len(t)) for t in texts])


def logprobs(policy, codec, vision, trees, **options):
    with torch.no_grad():
        return forward(policy, model.pack_trees(codec, trees), vision, **options)[0]


def separate_and_packed(codec, album):
    """-> (separate plain sequences, the same as trees with shared prefixes in one pack)."""
    first, second = album.item(1), album.item(2, frames=2, height=96)
    a, _, _ = prompt(codec, first, "Which colours appear?")
    b, _, _ = prompt(codec, "Compare ", second, " with ", first, "?")
    groups = [(a, [first], [response(1, 5), response(2, 1), response(3, 17)]),
              (b, [second, first], [response(4, 9), response(5, 4)])]
    separate = [plain_tree(ids, items, o) for ids, items, answers in groups for o in answers]
    packed = [branched_tree(*group) for group in groups]
    # Rollouts that were shown windows of their own after their first turn.
    looks = [looked(codec, album.item(seed, frames, height), seed) for seed, frames, height in
             ((6, 1, 64), (7, 3, 96))]
    separate += [Tree(TokenSpan(a + span.ids, [0] * len(a) + span.mask), [first, *span.items])
                 for span in looks]
    return separate, [*packed, Tree(TokenSpan(a, [0] * len(a)), [first], looks)]


def looked(codec, item, seed):
    """-> the Span of a rollout: a turn, the frames of a window, another turn."""
    turns, (place,) = [response(seed, 6), response(seed + 1, 8)], user(item)
    compact = chat.tool_response_ids(codec, [{**place, "role": "tool"}], True, [item])
    glue = chat.expand(codec, compact, [item])
    return TokenSpan(turns[0] + glue + turns[1], [1] * 6 + [0] * len(glue) + [1] * 8, {}, [item])
