"""
handmade.py: episodes by hand, as rollout.py leaves them, and log-probs by plain transformers
forwards: for the tests of grpo.py and plumbing/log.py.
"""
import torch
from scripted import calls

import chat
import rewards
import rollout
from plumbing import data

CALLING = calls((8, 16))


def sub_record(codec, source, task, text):
    """The record of one executed call, with the sub-agent's own context."""
    window = {"start": 8.0, "end": 16.0, "fps": 1.0, "max_frames": 4}
    spec = {"video": task["video"], **window}
    context = rollout.open_context(codec, rollout.sub_messages(task, window), [spec],
                                   [source.load(spec)])
    ids = chat.encode(codec, text) + [codec.eos]
    context.add_sampled(ids, [-1.0] * len(ids))
    return {"turn": 0, "start": 8.0, "end": 16.0, "num_frames": None, "parseable": True,
            "status": "ok", "summary": text, "sub_tokens": len(ids),
            "sub": {"ids": context.ids, "mask": context.mask, "logps": context.logps,
                    "vision": [vars(item) for item in context.items]}}


def make_episode(codec, source, task, sample, turns, summaries=(), step=0, frames=4, cut=False,
                 windows=()):
    """An Episode as rollout.py leaves it: `turns` are sampled texts, each call of the first turn is
    answered by a summary, or by the frames of a window."""
    spec = {"video": task["video"], "frames": frames}
    context = rollout.open_context(codec, rollout.main_messages(task, frames), [spec],
                                   [source.load(spec)], rollout.tool_schema())
    episode = rollout.Episode(task, f"{step}/{task['id']}", sample, frames, step, context=context,
                              think_open=True, timing={"decode_s": 0.01})
    for number, text in enumerate(turns):
        context.add_masked(chat.think_prefix_ids(codec, context.ids))
        last = number == len(turns) - 1
        ids = chat.encode(codec, text) + ([] if cut and last else [codec.eos])
        episode.spans.append([len(context.ids), len(context.ids) + len(ids)])
        mask = rewards.structural_mask(chat.token_bytes_of(codec, ids))
        episode.struct += [t for t, one in enumerate(mask, len(context.ids)) if one]
        context.add_sampled(ids, [-1.0] * len(ids))
        episode.turns.append(text)
        episode.finish.append("length" if cut and last else "stop")
        if not last:
            episode.calls = [sub_record(codec, source, task, text) for text in summaries]
            replies = [{"role": "tool", "content": text} for text in summaries]
            specs = [{"video": task["video"], "start": a, "end": b, "fps": 1.0, "max_frames": 4}
                     for a, b in windows]
            replies += [{"role": "tool", "content": [{"type": "video", **s}]} for s in specs]
            items = [chat.vision_item(spec, source.load(spec)) for spec in specs]
            compact = chat.tool_response_ids(codec, replies, True, items)
            context.add_masked(chat.expand(codec, compact, items), compact)
            context.items += items
    return episode


def reward(acc, fmt, tool, weight=1.0):
    base = weight * 0.6 * fmt
    return {"acc": acc, "fmt": fmt, "tool": tool, "paid_task": acc + tool, "paid_fmt": weight * fmt,
            "paid_base": base, "total": acc + weight * fmt + tool}


def make_group(codec, source, task, step=0, frames=4, windows=()):
    """Four rollouts of one prompt: two turns with a call, a short answer, a thought that never
    closes, a turn cut off."""
    some, rest = task["answer"].split(",")[0], ((), step, frames)
    group = [make_episode(codec, source, task, 0,
                          [CALLING, f"I saw {some}.\n</think>\n<answer>{some}</answer>"],
                          ["a red square"], step, frames, windows=windows),
             make_episode(codec, source, task, 1,
                          [f"It was {some} I think.\n</think>\n<answer>{some}</answer>"], *rest),
             make_episode(codec, source, task, 2, ["I saw red.\n<answer>red</answer>"], *rest),
             make_episode(codec, source, task, 3, ["I saw white. I saw"], *rest, cut=True)]
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
        contexts = [(e.context.ids, e.context.mask, e.context.logps,
                     [i.spec for i in e.context.items])]
        contexts += [(c["sub"]["ids"], c["sub"]["mask"], c["sub"]["logps"],
                      [v["spec"] for v in c["sub"]["vision"]]) for c in e.calls]
        for ids, mask, logps, specs in contexts:
            with torch.no_grad():
                true = plain_logps(hf, codec, source, ids, specs, temperature)
            for n, t in enumerate(sampled_positions(mask)):
                logps[t] = true[t - 1].item() + shift(n)


def colourful(toy):
    """RL tasks with several colours first: naming one of them is neither right nor wrong."""
    return sorted(data.read_tasks(str(toy / "rl.jsonl")), key=lambda t: -len(t["answer"].split()))
