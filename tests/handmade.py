"""
handmade.py: episodes of scripted words and rewards, and log-probs by plain transformers forwards:
for the tests of grpo.py and plumbing/log.py.
"""
from dataclasses import replace

import torch
from scripted import AGENT, Scripted, calls, play

import chat
from engine import Completion


def reward(acc, fmt, tool, weight=1.0):
    base = weight * 0.6 * fmt
    return {"acc": acc, "fmt": fmt, "tool": tool, "paid_task": acc + tool, "paid_fmt": weight * fmt,
            "paid_base": base, "total": acc + weight * fmt + tool}


def make_group(codec, source, task, frames=4, windows=((8, 16),), response="summary"):
    """Four rollouts of one prompt: two turns with calls, a short answer, a thought that never
    closes, a turn cut off."""
    some = task["answer"].split(",")[0]
    said = {"0/0": calls(*windows), "0/1": f"I saw {some}.\n</think>\n<answer>{some}</answer>",
            "1/0": f"It was {some} I think.\n</think>\n<answer>{some}</answer>",
            "2/0": "I saw red.\n<answer>red</answer>"}

    def main(request):
        text = said.get(request.id.partition(f"{task['id']}/")[2])
        ids = chat.encode(codec, "I saw white. I saw")
        return text or Completion(request.id, ids, [-1.0 for _ in ids], "I saw white. I saw", False)

    group = play(Scripted(codec, main), [task], source, replace(AGENT, crop_response=response),
                 frames, group=4)
    for e, r in zip(group, [(0.5, 1.0, 0.8), (0.5, 0.9, 0.0), (0.2, 0.35, 0.0), (0.0, 0.1, 0.0)]):
        e.reward = reward(*r)
    return group


def plain_logps(hf, codec, source, ids, specs, temperature):
    """Log-probs [L - 1] of ids[1:], under the distribution that was sampled from, by one unpadded
    forward."""
    from PIL import Image

    images = [Image.fromarray(image) for spec in specs for image in source.load(spec).images]
    vision = codec.processor.image_processor(images=images, do_resize=False, return_tensors="pt")
    row = torch.tensor([ids])
    inputs = {name: vision[name] for name in ("pixel_values", "image_grid_thw")}
    logits = hf(input_ids=row, **inputs, mm_token_type_ids=(row == codec.image_pad).int()).logits[0]
    never = torch.zeros(logits.shape[-1])
    never[list(codec.suppress_tokens)] = -100.0
    return ((logits + never) / temperature).log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]


def sampled_positions(mask):
    return [t for t, m in enumerate(mask) if m]


def record_logps(hf, codec, source, episodes, temperature=1.0, shift=lambda n: 0.0):
    """Overwrite the sampled log-probs by the true ones plus shift(n-th sampled token): an engine
    that is nearly the trainer."""
    for e in episodes:
        for context in [e.context.record(), *(call["sub"] for call in e.calls if "sub" in call)]:
            specs = [item["spec"] for item in context["vision"]]
            with torch.no_grad():
                true = plain_logps(hf, codec, source, context["ids"], specs, temperature)
            for n, t in enumerate(sampled_positions(context["mask"])):
                context["logps"][t] = true[t - 1].item() + shift(n)
