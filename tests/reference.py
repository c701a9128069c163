"""
reference.py: the oracle beside which the real engine and the packed forward are tested.

generate() is plain left-padded batch decoding with transformers' own cache; ReferenceEngine puts it
behind the interface of rollout.VllmEngine, deterministic to the bit. As a script it runs another
script with that engine in place of vLLM:

  python tests/reference.py grpo.py --ckpt .. --data ..
"""
import asyncio
import os
import runpy
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import launch
import model
import rollout
from engine import Completion, EngineLoop
from plumbing import checkpoint


def load_policy(ckpt, codec, device=None, recompute=False):
    """Checkpoint directory -> Policy, fp32, whole on this rank, read by from_pretrained."""
    launch.import_shim()
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=torch.float32)
    device = device or torch.device("cpu")
    return model.wrap_policy(hf.to(device), codec, device, recompute)


def forward(policy, pack, features, **more):
    """policy(pack) with these features -> (logp [N], entropy [N])."""
    policy.features = features
    return policy(pack, **more)


@torch.no_grad()
def generate(policy, codec, vision, prompts, limits, temperatures, seeds):
    """prompts: list of (expanded ids, [VisionItem]); one token limit, temperature (0 = greedy) and
    seed each: a sample does not depend on what it was batched with, but for rounding.

    -> list of (sampled ids, log-probs); a sample ends with the end of turn unless it was cut off.
    """
    from transformers import DynamicCache

    text = policy.hf.model.language_model
    n, longest = len(prompts), max(len(ids) for ids, _ in prompts)
    heat = torch.tensor(temperatures)[:, None]  # [n, 1]
    ids, mask = torch.full((n, longest), codec.eos), torch.zeros(n, longest, dtype=torch.long)
    positions = torch.zeros(4, n, longest, dtype=torch.long)
    following = torch.zeros(n, dtype=torch.long)
    # left padding: the last place is the last token
    for row, (prompt, items) in enumerate(prompts):
        own = slice(longest - len(prompt), longest)
        ids[row, own], mask[row, own] = torch.tensor(prompt), 1
        grid, following[row] = model.rope_positions(codec, prompt, items)
        positions[1:, row, own] = torch.from_numpy(grid)
        positions[0, row, own] = torch.arange(len(prompt))
    shown = [item for _, items in prompts for item in items]
    features = vision(shown) if shown else None
    seen, bias = policy.placeholder_mask(ids, features), torch.zeros(text.config.vocab_size)
    bias[list(codec.suppress_tokens)] = -100.0
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    sampled, logps, alive = [[] for _ in prompts], [[] for _ in prompts], [True] * n
    cache, lengths = DynamicCache(config=text.config), mask.sum(1)
    for _ in range(max(limits)):
        logits = decode_step(policy, ids, positions, seen, features, mask, cache)
        logits = (logits + bias) / torch.where(heat > 0, heat, 1.0)
        logprobs = logits.log_softmax(-1)  # [n, vocab]
        token = logits.argmax(-1)
        for row in range(n):
            if heat[row] > 0 and alive[row]:
                token[row] = torch.multinomial(logprobs[row].exp(), 1, generator=draws[row])
        chosen = logprobs.gather(1, token[:, None])[:, 0].tolist()
        for row, (t, logp) in enumerate(zip(token.tolist(), chosen)):
            if alive[row]:
                sampled[row].append(t)
                logps[row].append(logp)
                alive[row] = t != codec.eos and len(sampled[row]) < limits[row]
        if not any(alive):
            break
        ids, seen, features = token[:, None], None, None
        positions = torch.cat([lengths[None], following.expand(3, n)])[..., None]  # [4, n, 1]
        mask = torch.cat([mask, mask.new_ones(n, 1)], 1)
        lengths, following = lengths + 1, following + 1
    return list(zip(sampled, logps))


def decode_step(policy, ids, positions, seen, features, mask, cache):
    """ids [B, n] -> logits of the last position [B, vocab]; `cache` grows."""
    text, (embeds, levels) = policy.hf.model.language_model, policy.embed(ids, seen, features)
    packed, text.config._attn_implementation = text.config._attn_implementation, "sdpa"
    try:  # a padded batch, not a pack
        out = text(inputs_embeds=embeds, position_ids=positions, attention_mask=mask,
                   use_cache=True,
                   past_key_values=cache, visual_pos_masks=seen, deepstack_visual_embeds=levels)
    finally:
        text.config._attn_implementation = packed
    return F.linear(out.last_hidden_state[:, -1], policy.hf.lm_head.weight).float()


async def patient_steps(pump, plain_steps=EngineLoop.steps):
    """EngineLoop.steps for engines with `patient`: polls only after every episode has gone on as
    far as it can, and after all pending decodes. The same batches then come again, and the same
    bits."""
    if not getattr(pump.engine, "patient", False):
        return await plain_steps(pump)
    while True:
        # A completion wakes an episode, which starts sub-agents, which submit requests: one round
        # of the loop each.
        for _ in range(4):
            await asyncio.sleep(0)
        if pump.loads or not pump.pending:
            pump.wakeup.clear()
            await pump.wakeup.wait()
            continue
        for done in pump.engine.poll():
            future = pump.pending.pop(done.id, None)
            if future and not future.done():
                future.set_result(done)


def noted_load(pump, *work, plain_load=EngineLoop.load):
    """EngineLoop.load, which `patient_steps` waits for."""
    future = plain_load(pump, *work)
    pump.loads = {*pump.loads, future}
    future.add_done_callback(lambda _: (setattr(pump, "loads", pump.loads - {future}),
                                        pump.wakeup.set()))
    return future


EngineLoop.steps, EngineLoop.load, EngineLoop.loads = patient_steps, noted_load, frozenset()


class ReferenceEngine:
    """rollout.VllmEngine's interface. Batches what is waiting, longest first: what it batches does
    not depend on how fast frames were decoded, since `patient_steps` waits for all of them."""

    patient = True

    def __init__(self, ckpt, codec, max_seqs=32, policy=None):
        self.policy = (policy or load_policy(ckpt, codec)).eval()
        self.codec, self.max_seqs, self.waiting = codec, max_seqs, []
        self.vision = model.VisionFeatures(self.policy, None)

    def submit(self, request):
        self.waiting.append(request)

    def abort(self, name):
        self.waiting = [r for r in self.waiting if r.id != name]

    def poll(self):
        if not self.waiting:
            return []
        # By name: frames come in any order.
        self.waiting.sort(key=lambda r: (len(r.expanded), r.id))
        batch = [self.waiting.pop() for _ in range(min(self.max_seqs, len(self.waiting)))]
        frames = {item.key: f for r in batch for item, f in zip(r.items, r.frames)}
        self.vision.load = lambda spec: frames[spec["key"]]
        prompts = [(r.expanded, [replace(i, spec={"key": i.key}) for i in r.items]) for r in batch]
        samples = generate(self.policy, self.codec, self.vision, prompts, *zip(
            *((r.max_tokens, r.temperature, r.seed) for r in batch)))
        return [Completion(r.id, ids, logps, chat.decode(self.codec, ids),
                           ids[-1] == self.codec.eos) for r, (ids, logps) in zip(batch, samples)]

    def sync(self, weights):
        own = self.policy.hf.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def sleep(self):
        pass

    def wake(self, weights):
        self.sync(weights)

    def close(self, code=0):
        pass


def make_engine(ckpt, codec, args, sleeping=False):
    """In the place of rollout.make_engine."""
    base = checkpoint.base_of(ckpt)
    engine = ReferenceEngine(base, codec, max_seqs=args.max_num_seqs)
    if base != ckpt:
        engine.sync(checkpoint.merged_weights(ckpt))
    return engine


if __name__ == "__main__":
    rollout.make_engine = make_engine
    sys.argv = sys.argv[1:]
    sys.argv[0] = os.path.join(sys.path[0], sys.argv[0])  # of the root
    runpy.run_path(sys.argv[0], run_name="__main__")
