"""
sft.py: cold-start supervised fine-tuning of the main agent, the gather turn and the sub-agent, in one pass over chats.

  L = -(1/N) sum_t log p(o_t | everything before it in its own chat)      t over assistant tokens (with their <|im_end|>),
                                                                          N = their number over ALL ranks and micro-batches
  lr(s) = lr * s / w                        for s < w   (warm-up)
          m + (lr - m) * (1 + cos(pi (s - w) / (S - w))) / 2  after       m = min_lr * lr, S = total steps

One chat is one agent context: a main-agent chat holds the calls, the tool responses as one user turn, and the answer; a
sub-agent chat is a sample of its own. Chats are packed to --pack-tokens without seeing each other. One count N for the whole
batch is taken before backward, so 1 rank or 8, one pack or ten, give the same gradient.

Departs from the paper: nothing is trained in the vision tower (its features are computed once per frame set).

--convert turns published training data (ParaVT-Parquet, LongVT-Parquet: rows of `messages`, or of `prompt` for RL) into the JSONL that
this file and grpo.py read. Text stays as it is; what cannot be used is left out, counted and named.

Reads:  --ckpt (a checkpoint folder), --data (SFT JSONL, DESIGN: {"id", "messages", "tools"?}), videos relative to the JSONL.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last and --out/best (links), --out/log.jsonl, --out/args.json
The same command again goes on from the newest whole checkpoint: the order of the data is a function of (seed, step).

CPU toy:  torchrun --nproc_per_node 2 sft.py --preset toy --ckpt base --data toy/sft.jsonl --val toy/sft_val.jsonl --out sft_out
1 GPU:    python sft.py --ckpt Qwen3-VL-2B-Instruct --data sft.jsonl --out sft_out
          python sft.py --convert paravt_sft_tvg_6k3.parquet --out sft.jsonl
8 GPUs:   torchrun --nproc_per_node 8 sft.py --ckpt Qwen3-VL-8B-Instruct --data sft.jsonl --val val.jsonl --out sft_out
"""
import argparse
import json
import math
import os
import re
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor

import model
import rewards
import video


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # what to read and write
    add("--ckpt", default=None, help="checkpoint folder to start from")
    add("--data", default=None, help="SFT JSONL")
    add("--convert", nargs="+", default=None, metavar="FILE", help="no training: published data (parquet, JSON, JSONL) -> JSONL at --out, for sft.py or grpo.py")
    add("--convert-frames", type=int, default=64, help="overview frames K of converted chats")
    add("--val", default=None, help="held-out SFT JSONL; none = no held-out loss, `best` is not written")
    add("--out", default="sft_out", help="run folder")
    add("--video-root", default=None, help="folder videos are relative to and may not leave; default: the JSONL's folder")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: numbers that suit the world of toy.py")
    add("--resume", action=argparse.BooleanOptionalAction, default=None,
        help="go on from the newest checkpoint of --out; default: if it is of the same settings; no: begin anew")
    # data
    add("--channel", choices=["image", "video"], default="image", help="frames as `<t seconds>` + images, or one video item")
    add("--max-len", type=int, default=32768, help="tokens; a longer chat is an error, never cut")
    add("--min-pixels", type=int, default=1024, help="pixels of a frame after resizing, at least")
    add("--max-pixels", type=int, default=50176, help="pixels of a frame after resizing, at most")
    add("--decode-timeout", type=float, default=60.0, help="seconds a video may take, read in a child process; 0 = in this process, unprotected")
    add("--frame-cache-gb", type=float, default=4.0, help="GiB of decoded frames kept per rank; 0 = none")
    add("--seed", type=int, default=0, help="order of the data")
    # optimisation
    add("--epochs", type=float, default=1.0, help="passes over the data; may be a fraction")
    add("--steps", type=int, default=0, help="optimiser steps; 0 = from --epochs")
    add("--batch-size", type=int, default=64, help="chats per optimiser step, over all ranks")
    add("--pack-tokens", type=int, default=32768, help="tokens per pack (one forward)")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for the decoder's matrices, adamw for the rest (toy)")
    add("--lr", type=float, default=1e-5, help="peak learning rate of AdamW")
    add("--muon-lr", type=float, default=6e-3, help="peak learning rate of Muon")
    add("--min-lr", type=float, default=0.1, help="final learning rate as a fraction of the peak")
    add("--warmup", type=float, default=0.03, help="fraction of the steps")
    add("--weight-decay", type=float, default=0.01, help="AdamW, matrices only")
    add("--beta2", type=float, default=0.999, help="AdamW; beta1 is 0.9")
    add("--clip", type=float, default=1.0, help="gradient norm; 0 = no clipping")
    # looking and saving
    add("--eval-every", type=int, default=200, help="steps between held-out losses; 0 = only at the end")
    add("--save-every", type=int, default=500, help="steps between checkpoints; 0 = only at the end")
    add("--keep", type=int, default=2, help="newest checkpoints kept besides `last` and `best`; 0 = all")
    add("--max-bad-steps", type=int, default=3, help="steps in a row without a finite gradient, each skipped, that stop the run")
    add("--patience", type=float, default=1800.0, help="seconds a step, an evaluation or a save may take; beyond, the run ends with the stacks of every rank; 0 = for ever")
    add("--format-samples", type=int, default=32, help="held-out prompts answered greedily for the format rate; 0 = none")
    add("--max-new-tokens", type=int, default=512, help="per greedy answer of the format rate")
    model.add_memory_arguments(parser)
    model.add_log_arguments(parser)
    return parser


def parse_args():
    parser = build_parser()
    if parser.parse_known_args()[0].preset == "toy":
        parser.set_defaults(optimizer="muon", lr=2e-3, batch_size=24, pack_tokens=2048, max_len=2048, epochs=1.2,
                            beta2=0.98, min_lr=0.02, warmup=0.1, eval_every=100, save_every=0, recompute="none", max_new_tokens=128)
    args = parser.parse_args()
    if args.convert:
        if not args.out.endswith(".jsonl"):
            raise model.UserError(f"--convert writes a JSONL file: --out {args.out} should end in .jsonl")
    elif not (args.ckpt and args.data):
        raise model.UserError("give --ckpt and --data, or --convert with published files")
    for name in ("batch_size", "pack_tokens", "max_len", "convert_frames", "replicas"):
        if getattr(args, name) < 1:
            raise model.UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    model.check_log_arguments(args)
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Chats:
    """Rows of an SFT JSONL as token sequences; each row is encoded once, its frames are decoded once, as far as the caches reach."""

    def __init__(self, path, codec, args, cache, max_tokens=2**22):
        """max_tokens: of all encoded rows that are kept, least recently used go first; 4 M are about 100 MB."""
        self.path, self.codec, self.args, self.cache, self.max_tokens = path, codec, args, cache, max_tokens
        self.root = args.video_root or os.path.dirname(os.path.abspath(path))
        self.rows = model.read_jsonl(path, required=("id", "messages"))
        self.encoded, self.tokens = OrderedDict(), 0
        self.broken = set()
        for number, row in enumerate(self.rows, 1):
            problem = check_chat(row["messages"])
            if problem:
                raise model.UserError(f"{path}:{number}: {problem}")

    def frames(self, spec):
        return video.load(spec, self.root, self.cache, min_pixels=self.args.min_pixels, max_pixels=self.args.max_pixels)

    def __getitem__(self, index):
        """-> model.Sequence, or None where the chat's video is broken (counted in .broken)."""
        if index not in self.encoded and index not in self.broken:
            row = self.rows[index]
            specs = [p for m in row["messages"] if not isinstance(m["content"], str) for p in m["content"] if p["type"] == "video"]
            try:
                items = [model.vision_item(spec, self.frames(spec)) for spec in specs]
            except (video.VideoError, ValueError) as error:  # ValueError: a window that holds nothing of the video
                print(model.printable(f"skipped {row['id']}: {error}"), flush=True)
                self.broken.add(index)
                return None
            sequence = model.encode_chat(self.codec, row["messages"], items, row.get("tools"))
            if len(sequence.ids) > self.args.max_len:
                raise model.RankError(f"{self.path}: chat {row['id']} has {len(sequence.ids)} tokens, --max-len is {self.args.max_len}")
            self.encoded[index] = sequence
            self.tokens += len(sequence.ids)
            while self.tokens > self.max_tokens and len(self.encoded) > 1:
                self.tokens -= len(self.encoded.popitem(last=False)[1].ids)
            return sequence
        if index in self.encoded:
            self.encoded.move_to_end(index)
        return self.encoded.get(index)

    def cost(self, index):
        """Rough tokens of a row, known without decoding: balances the ranks."""
        parts = [p for m in self.rows[index]["messages"] for p in (m["content"] if not isinstance(m["content"], str) else [])]
        return sum(p.get("frames") or p.get("max_frames") or 16 for p in parts if p["type"] == "video") + 1


def check_chat(messages):
    """-> None, or what is wrong with the shape of a chat."""
    if not isinstance(messages, list) or not messages:
        return "'messages' must be a list with at least one message"
    for m in messages:
        if not isinstance(m, dict) or m.get("role") not in ("system", "user", "assistant", "tool") or "content" not in m:
            return "every message needs a 'role' (system, user, assistant, tool) and a 'content'"
        content = [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        for p in content if isinstance(content, list) and content else [None]:
            kind = p.get("type") if isinstance(p, dict) else None
            if not (kind == "text" and isinstance(p.get("text"), str) or kind == "video" and isinstance(p.get("video"), str)):
                return "content must be a text, or a list of {'type': 'text', 'text'} and {'type': 'video', 'video', ...}"
            if kind == "video" and "frames" not in p and not ("start" in p and "end" in p):
                return "a video needs 'frames', or 'start' and 'end'"
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        return "no assistant message: nothing to learn"
    if ("assistant", "assistant") in zip(roles, roles[1:]):
        return "two assistant messages in a row: nothing stands between them to end the first"
    if any(not isinstance(m["content"], str) and any(p["type"] == "video" for p in m["content"]) for m in messages[roles.index("assistant"):]):
        return "a video after the first assistant message: frames are shown before it only"
    return None


def share(indices, cost, rank, world):
    """This rank's part of the batch: dealt out by falling cost, back and forth, so that all ranks work alike."""
    ordered = sorted(indices, key=cost, reverse=True)
    return [x for i, x in enumerate(ordered) if (i % world if (i // world) % 2 == 0 else world - 1 - i % world) == rank]


def make_packs(chats, indices, codec, pack_tokens):
    """-> list of Packs for this rank."""
    sequences = [s for s in (chats[i] for i in indices) if s is not None]
    trees = [model.Tree(model.Span(s.ids, s.mask), s.vision) for s in sequences]
    return [model.pack_trees(codec, members) for members in model.fill_packs(trees, pack_tokens)]


# ---------------------------------------------------------------------------------------------------------------------
# Published data -> JSONL


def relative(path):
    """A path of published data -> relative to the folder its archives are unpacked in. Raises ValueError for one that has no such part."""
    path = path.removeprefix("file://")
    if os.path.isabs(path):
        # Made absolute on the publisher's machine: what follows is the archive's own tree.
        at = [path.find(f"/{top}/") for top in ("longvt_source", "museg", "selfqa")]
        if max(at) < 0:
            raise ValueError("an absolute path outside the published folders")
        path = path[max(at) + 1:]
    return path


def in_place(text, paths, frames):
    """Text with <video> marks, iterator of paths -> content pieces, videos where the marks stood. Raises ValueError when paths run out."""
    pieces = []
    for number, part in enumerate(text.split("<video>")):
        if number:
            path = next(paths, None)
            if path is None:
                raise ValueError("more <video> marks than videos")
            pieces.append({"type": "video", "video": path, "frames": frames})
        if part:
            pieces.append({"type": "text", "text": part})
    return pieces


def decoded(value):
    """JSON text -> what it says; anything else as it is."""
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


def to_chat(row, frames):
    """A published SFT row -> {"messages", "tools"?}. Raises ValueError with the reason why not.

    Tool results that stand in user turns become tool messages: the template writes the same tokens, and text of users is never
    let through as tags. A system text that declares tools stays and is the only declaration; else ours is put, with the schema.
    """
    import rollout

    given = decoded(row["messages"])
    paths = iter([relative(v["video"] if isinstance(v, dict) else v) for v in decoded(row.get("videos")) or []])
    messages, videos = [], 0
    for m in given if isinstance(given, list) else []:
        content, pieces = m.get("content"), []
        for p in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
            kind = p.get("type")
            if kind == "text":
                pieces += in_place(p.get("text") or "", paths, frames) if m["role"] == "user" else [{"type": "text", "text": p.get("text") or ""}]
            elif kind in ("video", "video_url"):
                path = p.get("video") or (p.get("video_url") or {}).get("url")
                if not path:
                    raise ValueError("a video without a path")
                pieces.append({"type": "video", "video": relative(path), "frames": frames})
            else:
                raise ValueError("still images are not read" if kind in ("image", "image_url") else f"content of type {kind}")
        videos += sum(p["type"] == "video" for p in pieces)
        text = "".join(p.get("text", "") for p in pieces)
        responses = re.findall(r"<tool_response>\n?(.*?)\n?</tool_response>", text, re.DOTALL)
        if m["role"] in ("user", "tool") and responses and not re.sub(r"<tool_response>.*?</tool_response>", "", text, flags=re.DOTALL).strip():
            messages += [{"role": "tool", "content": response} for response in responses]
        else:
            only_text = all(p["type"] == "text" for p in pieces)
            messages.append({"role": m["role"], "content": text if only_text else pieces})
    left = list(paths)
    if left and videos == 0 and len(left) == 1:  # no mark anywhere: one video goes first
        first = next((m for m in messages if m["role"] == "user"), None)
        if first:
            first["content"] = [{"type": "video", "video": left.pop(), "frames": frames}, {"type": "text", "text": first["content"]}]
    if left:
        raise ValueError("more videos than <video> marks")
    declared = messages and messages[0]["role"] == "system" and "<tools>" in messages[0]["content"]
    if not declared:
        messages = [{"role": "system", "content": rollout.main_prompt()}, *(m for m in messages if m["role"] != "system")]
    problem = check_chat(messages)
    if problem:
        raise ValueError(problem)
    return {"messages": messages, **({} if declared else {"tools": rollout.tool_schema()})}


def to_task(row):
    """A published RL row -> a task of grpo.py's JSONL. Raises ValueError with the reason why not."""
    from bench import benchmarks

    extra, reward = decoded(row.get("extra_info")) or {}, decoded(row.get("reward_model")) or {}
    answer = decoded(extra.get("answer") if extra.get("answer") is not None else reward.get("ground_truth"))
    paths = [relative(v["video"] if isinstance(v, dict) else v) for v in decoded(row.get("videos")) or []]
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} videos, one is wanted")
    if answer in (None, ""):
        raise ValueError("no answer")
    prompt = decoded(row["prompt"])
    asked = extra.get("question") or "\n".join(m["content"] for m in prompt if m["role"] == "user")
    asked = re.sub(r" ?The video path for this video is:? \S+", "", asked.replace("<video>", ""), flags=re.IGNORECASE).strip()
    question, options = benchmarks.split_inline(asked)
    kind = {"mcq": "mcq", "oe": "open", "tvg": "grounding"}.get(extra.get("question_type"))
    if isinstance(answer, dict):
        answer = [answer.get("start"), answer.get("end")]
    span = answer if isinstance(answer, list) else rewards.extract_span(str(answer)) if kind == "grounding" else None
    if span is not None and len(span) == 1 and isinstance(span[0], list):
        span = span[0]
    kind = kind or ("grounding" if span is not None else "mcq" if options and benchmarks.answer_letter(answer, options) else "open")
    if kind == "grounding":
        span = [rewards.to_seconds(t) for t in span or []]
        if len(span) != 2 or None in span or not span[0] < span[1]:
            raise ValueError("the answer is no [start, end]")
        return {"video": paths[0], "question": asked, "options": None, "answer": span, "type": kind}
    if kind == "mcq":
        letter = benchmarks.answer_letter(answer, options)
        if not options or not letter:
            raise ValueError("a choice whose options cannot be read" if not options else "the answer is none of the options")
        return {"video": paths[0], "question": question, "options": options, "answer": letter, "type": kind}
    return {"video": paths[0], "question": asked, "options": None, "answer": str(answer), "type": kind}


def convert(paths, out, frames):
    """Published files -> one JSONL: chats from rows of `messages`, tasks from rows of `prompt`. Says how many rows were left out, and why."""
    from bench import benchmarks

    rows, rejected, kinds = [], Counter(), set()
    for path in paths:
        for number, row in enumerate(benchmarks.read_rows(path)):
            kind = "messages" if row.get("messages") else "prompt" if row.get("prompt") else None
            if kind is None:
                raise model.UserError(f"{path}: row {number} has neither 'messages' (SFT) nor 'prompt' (RL); found {', '.join(sorted(row))}")
            kinds.add(kind)
            try:
                made = to_chat(row, frames) if kind == "messages" else to_task(row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:  # published rows are data: a bad one is left out and named
                rejected[str(error) if type(error) is ValueError else f"malformed ({type(error).__name__})"] += 1
                continue
            name = os.path.splitext(os.path.basename(path))[0]
            rows.append({"id": f"{name}/{number}", "source": row.get("id") or row.get("data_source") or name, **made})
    if len(kinds) > 1:
        raise model.UserError("--convert: some files hold chats (SFT), some tasks (RL); convert them apart")
    print("".join(f"left out: {count} rows, {why}\n" for why, count in rejected.most_common()), end="")
    if not rows:
        raise model.UserError("--convert: no row could be used")
    model.write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{out}: {len(rows)} {'chats' if kinds == {'messages'} else 'tasks'}, {sum(rejected.values())} left out")


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def schedule(step, steps, warmup, floor):
    """Fraction of the peak learning rate at this step: linear warm-up, then a cosine down to `floor`."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return floor + (1 - floor) * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


def build_optimizers(policy, args, device):
    """-> [AdamW], or [AdamW, Muon], where Muon takes the matrices inside the decoder layers."""
    layers = {id(p) for p in policy.hf.model.language_model.layers.parameters() if p.ndim == 2} if args.optimizer == "muon" else set()
    rest = [p for p in model.trained_parameters(policy) if id(p) not in layers]
    optimizers = [model.adamw(rest, args.lr, args.weight_decay, args.beta2, device)]
    if layers:
        optimizers.append(model.Muon([p for p in policy.parameters() if id(p) in layers], args.muon_lr))
    return optimizers


def backward(policy, vision, packs, codec, world, device, asked=()):
    """Forward and backward over this rank's packs -> (global mean loss in nats per token, global N); None once any rank was `asked` to stop."""
    import torch
    import torch.distributed as dist

    count = torch.tensor(float(sum(len(p.target) for p in packs)), dtype=torch.float64)  # in host memory: no GPU is waited for
    dist.all_reduce(count)
    n = max(1.0, count.item())
    loss = torch.zeros((), device=device, dtype=torch.float64)
    for pack, weight in model.even_packs(codec, packs):
        if torch.is_grad_enabled() and model.any_rank(asked):
            return None
        logp, _ = policy(pack, vision)
        part = -weight * logp.sum() / n
        if torch.is_grad_enabled():
            (part * world).backward()  # FSDP averages gradients over ranks; n is already global
        loss += part.detach().double()
    dist.all_reduce(loss)
    return loss.item(), int(n)


def format_rate(policy, codec, vision, chats, number, max_new_tokens, rank, world):
    """Share of held-out prompts whose greedy first turn is well formed: one closed thought, then calls or an answer."""
    import torch
    import torch.distributed as dist

    prompts = []
    wanted = [i for i, row in enumerate(chats.rows) if row.get("tools")][: number]
    for i in wanted[rank::world]:
        sequence = chats[i]
        if sequence is not None:
            first = sequence.mask.index(1)  # the first assistant turn begins here
            ids = sequence.ids[:first]
            prompts.append((ids + model.think_prefix_ids(codec, ids), sequence.vision))
    good = torch.zeros(2)
    if prompts or world > 1:
        spare = prompts or [([codec.eos], [])]  # an idle rank still has to take part in the collectives
        for ids, _ in model.generate(policy, codec, vision, spare, max_new_tokens, lockstep=True)[: len(prompts)]:
            text = model.decode(codec, ids)
            called = any(c.error is None for c in rewards.parse_tool_calls(text, think_open=True))
            score = rewards.format_reward([text])
            good += torch.tensor([float(ids[-1] == codec.eos and score["balanced"] and (called or score["flow"])), 1.0])
    dist.all_reduce(good)
    return (good[0] / good[1].clamp(min=1)).item()


# ---------------------------------------------------------------------------------------------------------------------


@model.watched
def main(watch):
    args = parse_args()
    if args.convert:
        convert(args.convert, args.out, args.convert_frames)
        return
    ckpt = model.resolve_checkpoint(args.ckpt)
    model.make_out(args.out)
    folder, state = model.resume_point(args.out, args, args.resume)
    start, best = state.get("step", 0), state.get("best", math.inf)
    import torch
    import torch.distributed as dist

    rank, world, device = model.start_process_group(args.patience)
    watch.begin(args.patience)
    codec = model.load_codec(ckpt, args.channel)
    cache = video.FrameCache(int(args.frame_cache_gb * 2**30), timeout=args.decode_timeout or None)
    train = Chats(args.data, codec, args, cache)
    held = Chats(args.val, codec, args, cache) if args.val else None
    if all(train[i] is None for i in range(min(8, len(train.rows)))):
        raise model.UserError(f"{args.data}: none of the first videos can be read; is --video-root right?")
    steps = args.steps or max(1, round(args.epochs * len(train.rows) / args.batch_size))
    if start >= steps:
        if rank == 0:
            print(f"nothing to do: {args.out} has {start} steps of {steps}")
        dist.destroy_process_group()
        return
    torch.manual_seed(args.seed)
    policy = model.load_sharded(ckpt, codec, device, args.attention, args.recompute, args.replicas)
    vision = model.VisionFeatures(policy.hf.model.visual, codec, train.frames, int(args.feature_cache_gb * 2**30))
    held_vision = model.VisionFeatures(policy.hf.model.visual, codec, held.frames, int(args.feature_cache_gb * 2**30)) if held else None
    optimizers = build_optimizers(policy, args, device)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    if folder:
        model.load_train_state(policy, optimizers, folder)
    if rank == 0:
        model.write_atomic(os.path.join(args.out, "args.json"), json.dumps(vars(args), indent=1))
        weights = sum(p.numel() for p in model.trained_parameters(policy))
        print(f"{len(train.rows)} chats x {steps * args.batch_size / len(train.rows):.2f} epochs = {steps} steps of {args.batch_size} chats "
              f"on {world} rank{'s' if world > 1 else ''} ({device.type}, attention {model.choose_attention(device, args.attention)}) | "
              f"{weights / 1e6:.2f} M trained parameters in fp32 (read from {'/'.join(sorted(policy.stored_as))})", flush=True)
        model.warn_of_memory(policy.hf.config, args, device, world, reference=False, engine_share=0)
        model.clean_run(args.out, start)
    log = model.Log(args.out, start, args) if rank == 0 else None

    def evaluate(step):
        policy.eval()
        with torch.no_grad():
            mine = [i for i in range(len(held.rows)) if i % world == rank]
            loss, _ = backward(policy, held_vision, make_packs(held, mine, codec, args.pack_tokens), codec, world, device)
        rate = format_rate(policy, codec, held_vision, held, args.format_samples, args.max_new_tokens, rank, world) \
            if args.format_samples else float("nan")
        policy.train()
        if rank == 0:
            log.write({"step": step, "val_loss": loss, "format_rate": rate},
                      f"step {step:04d} | held-out loss {loss:.4f} nats/token | greedy format rate {rate:.3f}")
        return loss

    saver = model.Saver(policy, codec, args.out, args.keep, start)

    def save(step, names):
        saver.save(step, {"best": best, "args": vars(args)}, optimizers, names)

    prefetch = ThreadPoolExecutor(1)  # next batch is decoded and packed while this one trains

    def upcoming(step):
        mine = share(model.batch_indices(step, args.batch_size, len(train.rows), args.seed), train.cost, rank, world)
        return prefetch.submit(make_packs, train, mine, codec, args.pack_tokens)

    future, began = upcoming(start), time.monotonic()
    bad, finished, asked = 0, False, model.stop_on_sigterm()
    known, skipped = 0, 0  # broken chats: as the ranks report them, and counted once each
    for step in range(start, steps):
        clock = time.monotonic()
        packs = future.result()
        waited = time.monotonic() - clock
        if step + 1 < steps:
            future = upcoming(step + 1)
        fraction = schedule(step, steps, args.warmup, args.min_lr)
        for o, peak in zip(optimizers, peaks):
            for group, lr in zip(o.param_groups, peak):
                group["lr"] = lr * fraction
        done = backward(policy, vision, packs, codec, world, device, asked)
        if done is None:  # a scheduler's warning: this step's gradients are dropped, and made again later as they were
            save(step, ["last"])
            saver.wait()
            if rank == 0:
                print(f"stopped by SIGTERM after step {step} of {steps}; the same command goes on from {args.out}", flush=True)
            break
        loss, tokens = done
        norm = torch.nn.utils.clip_grad_norm_(model.trained_parameters(policy), args.clip or math.inf)
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        bad = 0 if math.isfinite(norm) else bad + 1
        for o in optimizers:
            if not bad:  # the norm is of all ranks' gradients: all of them step, or none does
                o.step()
            o.zero_grad(set_to_none=True)
        if bad >= args.max_bad_steps:
            saver.wait()
            raise model.RunError(f"step {step + 1}: no finite gradient for {bad} steps in a row (--max-bad-steps); the newest checkpoint is "
                               f"{model.newest_checkpoint(args.out)}")
        totals = torch.tensor([sum(len(p.ids) for p in packs), len(train.broken), saver.failed()], device=device, dtype=torch.float64)
        dist.all_reduce(totals)
        length, reported, unsaved = totals.tolist()
        if unsaved:  # known on one rank at least: all of them say why, and stop
            saver.wait()
        if reported > known:  # rare: some rank met a new broken chat. Ranks meet different ones, and the same one in two epochs
            gathered, known = [None] * world, reported
            dist.all_gather_object(gathered, sorted(train.broken))
            skipped = len(set().union(*gathered))
        seconds = time.monotonic() - clock
        if rank == 0:
            eta = (time.monotonic() - began) / (step + 1 - start) * (steps - step - 1)
            record = {"step": step + 1, "loss": loss, "lr": args.lr * fraction, "grad_norm": norm, "trained_tokens": tokens,
                      "tokens": int(length), "tokens_per_s": length / seconds, "wait_s": waited, "step_s": seconds,
                      "skipped_chats": skipped, "bad_steps": bad}
            log.write(record, f"step {step + 1:04d}/{steps:04d} | loss {loss:.4f} | lr {args.lr * fraction:.2e} | gn {norm:.2f} | tok {record['tokens']} "
                      f"({tokens} trained) | {record['tokens_per_s']:.0f} tok/s | wait {waited:.2f}s step {seconds:.2f}s | eta {eta / 60:.1f}m")
        last = step + 1 == steps
        names = ["last"]
        if held and (last or args.eval_every and (step + 1) % args.eval_every == 0):
            watch.beat()
            value = evaluate(step + 1)
            watch.beat()
            if value < best:
                best, names = value, ["last", "best"]
        if last or (args.save_every and (step + 1) % args.save_every == 0) or "best" in names:
            save(step + 1, names)
        watch.beat()
    else:
        saver.wait()
        finished = True
    if rank == 0 and finished:
        print(f"done: {steps} steps in {(time.monotonic() - began) / 60:.1f} min -> {args.out}/last", flush=True)
    prefetch.shutdown()
    if log:
        log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    model.run_main(main)
