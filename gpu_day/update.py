"""
Parts 1 and 3: seconds of one optimizer step over 4 prompts x 8 rollouts, ours beside peers, in turns.

  ours      grpo.update: each prompt once, bf16 over fp32 masters, layers recomputed
  plain     the same loss in plain transformers: one sequence per rollout, sdpa, fp32 masters under autocast,
            layers recomputed, micro-batches of 8; the frozen tower runs on every rollout's pictures
  TRL       GRPOTrainer, if it can be imported: the same micro-batches; its own generate() is timed apart

Then one profiled step of ours: top kernels, share of the time in which no kernel runs. Gradients of ours and
plain are compared first: both sides compute the same step.

  python update.py [--dry] [--peers FOLDER] [--skip trl]
"""
import sys
import time

from common import (PEAK, Result, batch, checkpoint, chat, gc, launch, make_checkpoint, median, model, np, parse,
                    parser, grpo, os, settings, step_flops, timed, torch)


def make_ours(args, ckpt, codec, device, trees, source, recompute=True):
    policy = checkpoint.load_policy(ckpt, codec, device, recompute)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, device)
    tokens = sum(len(b.ids) for t in trees for b in t.branches)

    def step(*flags):
        policy.features = model.VisionFeatures(policy, source.load)  # new prompts in every step, as in training
        return grpo.update(policy, None, optimizer, trees, tokens, settings(*flags))

    return policy, step


def sequences(codec, trees):
    """The same rollouts, one padded row each, as a collator of transformers would hand them over."""
    rows = []
    for tree in trees:
        images = [tree.items[0]] * len(tree.branches)
        rows += [(tree.prefix.ids, b.ids, b.values["advantage"], i) for b, i in zip(tree.branches, images)]
    return rows


def make_plain(args, ckpt, codec, device, trees, source, micro=8):
    """-> step() -> norm of the gradient. transformers' own model, attention and tower."""
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=torch.float32, attn_implementation="sdpa")
    hf = hf.to(device).train()
    hf.model.visual.requires_grad_(False)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in hf.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type == "cuda")
    rows = sequences(codec, trees)
    total = sum(len(ids) for _, ids, _, _ in rows)
    bias = torch.zeros(hf.lm_head.weight.shape[0], device=device)
    bias[list(codec.suppress_tokens)] = -100.0
    micro = min(micro, len(rows))
    pixels = {}  # of each prompt: the collator's work is not timed on either side

    def inputs(part):
        longest = max(len(r) for _, r, _, _ in part)
        width = max(len(p) for p, *_ in part)
        ids, mask, keep, advantage = [], [], [], []
        for prompt, response, adv, _ in part:  # prompts padded on the left, responses on the right: TRL's layout
            left, right = width - len(prompt), longest - len(response)
            ids.append([codec.eos] * left + prompt + response + [codec.eos] * right)
            mask.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
            keep.append([1] * len(response) + [0] * right)
            advantage.append(adv + [0.0] * right)
        out = []
        for item in (row[3] for row in part):
            if item.key not in pixels:
                patches, _ = model.patchify(codec, source.load(item.spec).images, device)
                side = args.side // 16
                pixels[item.key] = patches, torch.tensor([[1, side, side]] * item.frames, device=device)
            out.append(pixels[item.key])
        pix, grid = (torch.cat(x) for x in zip(*out))
        ids = torch.tensor(ids, device=device)
        return (ids, torch.tensor(mask, device=device), torch.tensor(keep, device=device),
                torch.tensor(advantage, device=device), pix, grid)

    made = [inputs(rows[i:i + micro]) for i in range(0, len(rows), micro)]

    def step(clip=1.0):
        for ids, mask, keep, advantage, pix, grid in made:
            n = keep.shape[1]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                types = {"mm_token_type_ids": (ids == codec.image_pad).int()}
                logits = hf(input_ids=ids, attention_mask=mask, pixel_values=pix, image_grid_thw=grid,
                            use_cache=False, logits_to_keep=n + 1, **types).logits[:, :-1]
            logits = logits.float() + bias
            logp = logits.gather(2, ids[:, -n:, None])[..., 0] - logits.logsumexp(-1)
            ratio = torch.exp(logp - logp.detach())
            uniform = -float(np.log(logits.shape[-1]))
            weight = torch.exp(logp.detach() - uniform).clamp(max=5.0)
            clipped = ratio.clamp(0.8, 1.2)
            loss = -weight * torch.minimum(ratio * advantage, clipped * advantage)
            ((loss * keep).sum() / total).backward()
            del logits, logp, loss
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def tower():  # what one round of the peer spends on pictures
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for *_, pix, grid in made:
                hf.model.visual(pix, grid_thw=grid)

    return step, tower


def trl_rounds(args, ckpt, codec, trees, source, ours):
    """GRPOTrainer beside ours, each after the other -> [{side: seconds}], generation apart."""
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda, rows = torch.cuda.is_available(), []
    from common import prompt_ids, tasks
    for task in tasks(args, codec)[0]:
        spec = source.overview_spec(task, args.frames)
        frames = source.load(spec)
        # TRL's chat has no system prompt and no tools: as many words more make the prompts equally long.
        ours_ids, item = prompt_ids(args, codec, task, source)
        bare = [{"role": "user", "content": [{"type": "video", **spec}, {"type": "text", "text": task["question"]}]}]
        missing = len(ours_ids) - len(chat.encode_prompt(codec, bare, [item])[0])
        task["question"] += "frame " * (missing * 400 // len(chat.encode(codec, "frame " * 400)))
        content = []
        for t in frames.seconds:
            content += [{"type": "text", "text": f"<{t:.1f} seconds>"}, {"type": "image"}]
        content.append({"type": "text", "text": task["question"]})
        rows.append({"prompt": [{"role": "user", "content": content}],
                     "images": [Image.fromarray(i) for i in frames.images]})
    generation, rounds, began = [], [], [0.0]
    device = torch.device("cuda" if cuda else "cpu")

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, *given, **named):
            seconds, out = timed(device, lambda: super(Trainer, self)._generate_and_score_completions(*given, **named))
            generation.append(seconds)
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if cuda:
                torch.cuda.synchronize()
            began[0] = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            if cuda:
                torch.cuda.synchronize()
            step = time.perf_counter() - began[0]
            made = sum(generation[len(rounds):][-1:])
            rounds.append({"TRL": step - made, "TRL generation": made, "ours": timed(device, ours)[0]})

    config = GRPOConfig(
        output_dir=os.path.join(args.work, "trl"), per_device_train_batch_size=args.group,
        gradient_accumulation_steps=args.prompts, num_generations=args.group,
        max_completion_length=args.response, max_steps=args.rounds + 1, temperature=1.0,
        generation_kwargs={"min_new_tokens": args.response}, beta=0.0, learning_rate=1e-6, use_cpu=not cuda,
        bf16=cuda, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        optim="adamw_torch_fused" if cuda else "adamw_torch")
    hf = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=torch.float32)
    hf.model.visual.requires_grad_(False)
    Trainer(model=hf, reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))],
            args=config, callbacks=[Clock()], train_dataset=Dataset.from_list(rows * 16),
            processing_class=AutoProcessor.from_pretrained(ckpt, trust_remote_code=False)).train()
    return rounds


def profile(result, args, device, step, out):
    from torch.profiler import ProfilerActivity, profile as profiler

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profiler(activities=kinds) as prof:
        wall, _ = timed(device, step)
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in prof.events()
                     if e.device_type.name == "CUDA") if device.type == "cuda" else []
    busy, edge, by_name = 0.0, 0.0, {}
    for start, end, name in kernels:
        busy += max(0.0, end - max(start, edge))
        edge = max(edge, end)
        kind = name.split("<")[0][:70]
        by_name[kind] = by_name.get(kind, 0.0) + (end - start) / 1e3
    table = prof.key_averages().table(sort_by=f"self_{'cuda' if kernels else 'cpu'}_time_total", row_limit=40,
                                      max_name_column_width=70)
    launch.write_atomic(os.path.join(out, "profile.txt"), table)
    result.add("profile: seconds with the profiler", wall)
    if kernels:
        span = (kernels[-1][1] - kernels[0][0]) / 1e6
        result.add("profile: share of the step without a kernel", 1 - busy / 1e6 / max(span, wall))
        top = sorted(by_name.items(), key=lambda kv: -kv[1])[:14]
        result.add("profile: ms by kernel", {name: round(ms, 1) for name, ms in top})
        result.add("profile: kernels", len(kernels))


def main():
    p = parser(__doc__, 300)
    p.add_argument("--peers", help="folder with trl and datasets (pip install --target)")
    p.add_argument("--skip", nargs="*", default=[], choices=["trl", "plain", "profile", "variants"])
    args = parse(p)
    if args.peers:
        sys.path.append(args.peers)
    launch.import_shim()
    result = Result(args, "update")
    device = launch.start_process_group()
    ckpt, seconds = make_checkpoint(args, device)
    result.add("checkpoint: seconds", seconds)
    codec = chat.load_codec(ckpt)
    trees, source = batch(args, codec)
    flops, tokens = step_flops(args, trees)
    plain_flops, plain_tokens = step_flops(args, trees, shared=False)
    result.add("batch", {"prompt": len(trees[0].prefix.ids), "response": args.response, "tokens of ours": tokens,
                         "tokens of a peer": plain_tokens, "TFLOP of ours": round(flops / 1e12, 1),
                         "TFLOP of a peer": round(plain_flops / 1e12, 1)})
    load, (policy, step) = timed(device, lambda: make_ours(args, ckpt, codec, device, trees, source))
    result.add("ours: seconds to load", load)
    first, stats = timed(device, step)
    result.add("ours: first step, s (compiles)", first)
    result.add("ours: second step, s", timed(device, step)[0])
    rounds = [timed(device, step)[0] for _ in range(args.rounds)]
    ours = median(rounds)
    result.add("ours: s", ours)
    result.add("ours: range", [round(min(rounds), 4), round(max(rounds), 4)])
    result.add("ours: MFU (least work)", flops / ours / PEAK)
    result.add("ours: share of peak with recomputation", flops * 4 / 3 / ours / PEAK)
    if device.type == "cuda":
        result.add("ours: peak GB", torch.cuda.max_memory_allocated() / 1e9)
        torch.cuda.reset_peak_memory_stats()

    if "plain" not in args.skip:
        for micro in (8, 4, 2):
            try:
                theirs, tower = make_plain(args, ckpt, codec, device, trees, source, micro)
                norm = theirs()
                break
            except torch.cuda.OutOfMemoryError:
                theirs = tower = None
            gc.collect()  # after the error is gone: it holds the frames whose tensors are to go
            torch.cuda.empty_cache()
        # Of the first step of each, from the checkpoint: both sides compute the same step.
        result.add("norm of the gradient: ours, plain", [round(stats["grad_norm"], 6), round(norm, 6)])
        pairs = []
        for _ in range(args.rounds):
            pairs.append((timed(device, theirs)[0], timed(device, step)[0]))
        plain, ours = (median(x) for x in zip(*pairs))
        result.add("plain: s", plain)
        result.add("plain: micro-batch", micro)
        result.add("ours beside it: s", ours)
        result.add("RATIO plain / ours", plain / ours)
        result.add("plain: MFU (of its own work)", plain_flops / plain / PEAK)
        result.add("plain: of it the tower, s", timed(device, tower)[0])
        if device.type == "cuda":
            result.add("both: peak GB", torch.cuda.max_memory_allocated() / 1e9)
        del theirs, tower
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if "profile" not in args.skip:
        profile(result, args, device, step, args.out)
    if "trl" not in args.skip:
        try:
            rounds = trl_rounds(args, ckpt, codec, trees, source, step)[1:]
            sides = {side: median([r[side] for r in rounds]) for side in rounds[0]}
            result.add("TRL: s", {k: round(v, 3) for k, v in sides.items()})
            result.add("RATIO TRL / ours", sides["TRL"] / sides["ours"])
        except ImportError as error:
            result.add("TRL", f"not here: {error}")
        except Exception as error:  # noqa: BLE001  a peer that fails costs its own row alone
            result.add("TRL", f"failed: {type(error).__name__}: {error}"[:400])
    if "variants" not in args.skip:
        result.add("ours, packs of one tree: s", median([timed(device, lambda: step("--pack-tokens", 8192))[0]
                                                         for _ in range(args.rounds + 1)][1:]))
        del policy, step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        policy, step = make_ours(args, ckpt, codec, device, trees, source, recompute=False)
        try:
            times = [timed(device, lambda: step("--pack-tokens", 8192))[0] for _ in range(args.rounds + 1)]
            result.add("ours, no recomputation, packs of one tree: s", median(times[1:]))
        except torch.cuda.OutOfMemoryError:
            result.add("ours, no recomputation", "out of memory")
    result.add("done", True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
