"""
sft.py (tests/test_sft.py): cold-start supervised fine-tuning of main agent, gather turn and sub-
agent, in one pass.

  L = -(1/N) sum_t log p(o_t | everything before o_t in the same chat)       p: see model.py, T = 1
      t over assistant tokens with their <|im_end|>, N = their number over ALL ranks and packs
  lr(s) = lr * (s + 1) / w                                    for s < w  (warm-up), s from 0
          m + (lr - m) * (1 + cos(pi (s - w) / (S - w))) / 2  after
      S = steps, w = warmup * S (at least 1), m = min_lr * lr

One chat is one agent context: a main-agent chat holds the calls, the tool responses as one user
turn, and the answer; every sub-agent chat is a sample too. Chats are packed to --pack-tokens
without seeing each other. One count N for the whole batch is taken before backward, so 1 rank or 8,
one pack or ten, give the same gradient.

As in the paper the vision tower is frozen, so its features are computed once per batch.

Crash-only: a video that does not decode costs its chat, and is counted; everything else ends the
run with one line. The same command goes on from the newest checkpoint, exactly: the order of the
data is a function of (seed, step).

Reads:  --ckpt, --data (SFT JSONL: {"id", "messages", "tools"?}), videos relative to the JSONL.
        tools/convert.py writes such files from published training data.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last and --out/best (links),
        --out/log.jsonl, --out/args.json

CPU toy:  torchrun --nproc_per_node 2 sft.py --preset toy --ckpt base --data toy/sft.jsonl \\
            --val toy/sft_val.jsonl --out sft_out
1 GPU:    python sft.py --ckpt Qwen/Qwen3-VL-2B-Instruct
8 GPUs:   torchrun --nproc_per_node 8 sft.py --ckpt Qwen/Qwen3-VL-8B-Instruct --data sft.jsonl \\
            --val val.jsonl --out sft_out
Adapters: with --lora-rank 64 the 8B trains on one GPU of 80 GB
"""
import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import model
import video
from plumbing import checkpoint, data
from plumbing.log import TRACKERS, Log

# ------------------------------------------------------------------------------------------------
# Arguments


def build_parser():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("input and output").add_argument
    add("--ckpt", required=True, help="checkpoint folder to start from, or a name on the Hub")
    add("--data", default="sft.jsonl",
        help='a chat a line, {"id", "messages"}: of toy.py or tools/convert.py')
    add("--val", help="held-out SFT JSONL; none: no held-out loss, no `best`")
    add("--out", default="sft_out", help="run folder")
    add("--resume", action="store_true", help="go on although settings or rows have changed")
    add("--check", action="store_true", help="only look at the data: videos, tokens")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: numbers for toy.py")
    add("--max-len", type=launch.positive, default=32768, help="tokens; a longer chat is an error")
    add("--chat-template-kwargs", type=json.loads, default={},
        help='JSON for the template: {"enable_thinking": false}')
    data.add_frame_arguments(parser)
    add = parser.add_argument_group("optimisation").add_argument
    add("--seed", type=int, default=0, help="order of the data")
    add("--epochs", type=launch.amount, default=1.0, help="passes over the data, also a fraction")
    add("--steps", type=launch.amount, default=0, help="optimizer steps; 0: from --epochs")
    add("--batch-size", type=launch.positive, default=64, help="chats per step, over all ranks")
    add("--pack-tokens", type=launch.positive, default=32768, help="tokens per pack (one forward)")
    add("--lr", type=launch.amount, help="peak of AdamW; default 1e-5, of adapters 1e-4, toy 2e-3")
    add("--muon-lr", type=launch.amount, default=0.0,
        help="peak of Muon, for matrices; 0: AdamW for all; toy 3e-3")
    add("--warmup", type=launch.amount, default=0.03, help="fraction of the steps")
    add("--max-grad-norm", type=launch.amount, default=1.0, help="clips gradients; 0: never")
    add("--lora-rank", type=launch.amount, default=0, help="of adapters; 0: all is trained")
    add("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True,
        help="compute decoder layers again in backward")
    add("--dp-replicate", type=launch.amount, default=1,
        help="HSDP: groups of ranks that each hold the whole model; 0: every rank does")
    add = parser.add_argument_group("looking and saving").add_argument
    add("--save-every", type=launch.amount, default=200,
        help="steps between checkpoints, and uses of --val; 0: at the end")
    add("--track", choices=TRACKERS, help="send the numbers of log.jsonl there too")
    # No flags: AdamW's second beta, and the final learning rate as a fraction of the peak.
    parser.set_defaults(beta2=0.999, min_lr=0.1)
    return parser


def parse_args():
    parser = build_parser()
    # Read twice: the preset changes defaults, which any flag still overrides.
    if parser.parse_args().preset == "toy":
        # A model of a million parameters from random weights: large steps, few of them, and less
        # memory of past gradients.
        parser.set_defaults(muon_lr=3e-3, lr=2e-3, batch_size=12, max_len=2048, pack_tokens=2048,
                            beta2=0.98, min_lr=0.02, warmup=0.1, save_every=0,
                            gradient_checkpointing=False, dp_replicate=0)
    args = parser.parse_args()
    args.lora_rank = checkpoint.adapter_rank(args.ckpt, args.lora_rank)
    if args.lora_rank:
        args.muon_lr = 0.0  # Muon steps whole matrices
    if args.lr is None:  # adapters start at zero and take larger steps
        args.lr = 1e-4 if args.lora_rank else 1e-5
    return args


# ------------------------------------------------------------------------------------------------
# Data


class Chats:
    """Rows of an SFT JSONL, and what they become: token sequences and frames."""

    def __init__(self, path, codec, args, cache, faults=None):
        """Raises UserError naming file and line; with a list `faults` the line goes there, and the
        row is left out."""
        self.path, self.codec, self.args = path, codec, args
        root = video.root_of(args, path)
        self.source = video.VideoSource(root, cache, max_pixels=args.max_pixels)
        self.rows = data.read_chats(path, faults)
        items = []
        for row in self.rows:
            items += chat.videos_in(row["messages"])
        if faults is None:  # --check names each missing video itself
            cache.check_present(path, items, root)

    def frames_of(self, row):
        """-> Frames of the videos of a chat. Raises VideoError, or ValueError for a window that
        holds nothing of its video."""
        return [self.source.load(spec) for spec in chat.videos_in(row["messages"])]

    def encode(self, row, frames):
        """-> chat.Sequence. Raises UserError if it is too long."""
        specs = chat.videos_in(row["messages"])
        items = [chat.vision_item(spec, loaded) for spec, loaded in zip(specs, frames)]
        sequence = chat.encode_chat(self.codec, row["messages"], items, row.get("tools"))
        # A chat that is cut would teach an answer without the question: better to end the run.
        if len(sequence.ids) > self.args.max_len:
            raise launch.UserError(f"{self.path}: chat {row['id']} has {len(sequence.ids)} tokens, "
                                   f"--max-len is {self.args.max_len}")
        return sequence

    def packs(self, rows):
        """Rows -> (Packs, the Frames that they show, ids that are skipped). A chat is a tree
        without branches."""
        trees, shown, skipped = [], [], []
        for row in rows:
            with launch.naming(row["id"]):
                try:
                    frames = self.frames_of(row)
                except (video.VideoError, ValueError) as error:
                    print(launch.printable(f"skipped {row['id']}: {error}"), flush=True)
                    skipped.append(row["id"])
                    continue
                sequence = self.encode(row, frames)
            span = model.TokenSpan(sequence.ids, sequence.mask)
            trees.append(model.Tree(span, sequence.items))
            # The frames are kept until the forward, which then needs no file.
            shown += frames
        return model.make_packs(self.codec, trees, self.args.pack_tokens), shown, skipped

    def batch(self, step):
        """This rank's packs of a step, from 1, as packs(). (seed, step) draws the chats, so a
        resumed run sees the same ones. They are dealt out by cost, so no rank waits for the long
        videos of another."""
        rank, world = launch.rank_and_world()
        picked = launch.batch_indices(step - 1, self.args.batch_size, len(self.rows),
                                      self.args.seed)
        rows = [self.rows[index] for index in picked]
        return self.packs(data.balance_over_ranks(rows, cost, rank, world))


def cost(row):
    """About how many frames a chat has, known without decoding; ranks are balanced by this."""
    frames = 12  # for the text
    for item in chat.videos_in(row["messages"]):
        frames += item.get("frames") or item.get("max_frames") or 16
    return frames


def check_chats(args, codec, cache):
    """--check: encodes every chat and prints counts. Raises UserError if there is a fault."""
    from tqdm import tqdm

    faults = []
    for path in filter(None, (args.data, args.val)):
        chats = Chats(path, codec, args, cache, faults)
        lengths = [0]
        for row in tqdm(chats.rows, desc=path, disable=None):
            try:
                sequence = chats.encode(row, chats.frames_of(row))
                lengths.append(len(sequence.ids))
            except (launch.UserError, ValueError) as error:  # a video, a window, a length
                faults.append(f"{path}: chat {row['id']}: {error}")
        print(f"{path}: {len(chats.rows)} chats, the longest has {max(lengths)} tokens, of "
              f"--max-len {args.max_len}; {sum(lengths)} tokens in all")
    data.report_check(faults, args.data)


# ------------------------------------------------------------------------------------------------
# Loss and optimizer


def schedule(step, steps, warmup, floor):
    """Fraction of the peak learning rate at this step: linear warm-up, then a cosine to `floor`.
    warmup: fraction of the steps."""
    warm = max(1, round(warmup * steps))  # steps; at least 1, so the first step is not 0
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)  # 0 at the peak, nearly 1 at the last step
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2


def fp32_semi_orthogonal(matrix, coefficients, steps, eps):
    """The semi-orthogonal matrix near to `matrix`, by Newton-Schulz iterations as in torch.optim
    (torch 2.13), which runs them in bf16. A CPU without bf16 instructions needs twice the time of
    the whole step for that.

      X = G / |G|, then five times  X = a X + (b X X^T + c (X X^T)^2) X
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        matrix = matrix.T
    x = matrix / matrix.norm().clamp(min=eps)  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = x.addmm(gram.addmm(gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.T
    return x


def build_optimizers(policy, args, device):
    """-> [AdamW], or [AdamW, Muon] with Muon for the matrices inside the decoder layers.

    Muon's update is the semi-orthogonal matrix nearest to the momentum, scaled to the size of an
    AdamW update. A tiny model learns two to three times faster per token with it, so it is the
    toy's default. Muon gathers whole matrices: use AdamW for large checkpoints.
    """
    import torch

    matrices = []
    if args.muon_lr > 0:  # only matrices can be semi-orthogonal; norms stay with AdamW
        matrices = [p for p in policy.hf.model.language_model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}  # tensors compare by value, so compare ids
    rest = [p for p in model.trained_parameters(policy) if id(p) not in taken]
    optimizers = [model.adamw(rest, args.lr, args.beta2, device)]
    if matrices:
        # match_rms_adamw gives updates of AdamW's size, whatever the shape of the matrix.
        optimizers.append(torch.optim.Muon(matrices, lr=args.muon_lr, momentum=0.95,
                                           weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if device.type == "cpu":
            torch.optim._muon._zeropower_via_newtonschulz = fp32_semi_orthogonal
    return optimizers


def forward_backward(policy, packs):
    """Forward over this rank's packs, and backward if gradients are on -> (mean loss in nats per
    token, N trained tokens), both over all ranks. Collective."""
    import torch
    import torch.distributed as dist

    world, device = dist.get_world_size(), next(policy.parameters()).device
    # N is known before backward: a sum over all packs of all ranks is divided by it, not each pack
    # by its own number.
    num_trained = launch.sum_over_ranks(sum(len(pack.target) for pack in packs))
    n = max(1, num_trained)  # a batch of broken videos has no token: 0 / 1, not NaN
    loss = torch.zeros((), device=device, dtype=torch.float64)  # nats per token, this rank's part
    # All ranks run equally many forwards, since FSDP gathers in each: some get spare packs, which
    # are not real.
    for pack, real in model.pad_packs_over_ranks(policy.codec, packs):
        logp, _ = policy(pack)  # [trained tokens of the pack] nats
        part = -real * logp.sum() / n
        if torch.is_grad_enabled():
            # FSDP averages gradients over ranks; each rank holds a part of the sum over N.
            (part * world).backward()
        loss += part.detach().double()
    dist.all_reduce(loss)
    return loss.item(), num_trained


def held_out_loss(policy, chats):
    """Nats per token of the held-out chats. Collective."""
    import torch

    rank, world = launch.rank_and_world()
    nats, tokens = 0.0, 0
    size = chats.args.batch_size  # the frames of all chats would not fit into memory
    for first in range(0, len(chats.rows), size):
        batch = chats.rows[first:first + size]
        packs, frames, _ = chats.packs(batch[rank::world])
        policy.features = model.VisionFeatures(policy, chats.source.load, frames)
        # No policy.eval(): our attention has no dropout, so both modes compute the same.
        with torch.no_grad():
            loss, n = forward_backward(policy, packs)
        nats += loss * n
        tokens += n
    return nats / max(1, tokens)


def update(policy, optimizers, packs, fraction, args):
    """One optimizer step at this fraction of the peak learning rates -> numbers for the log, and
    whether the weights have moved. Collective."""
    loss, num_trained = forward_backward(policy, packs)
    norm = model.reduce_and_clip(policy, args.max_grad_norm)
    # The norm covers the gradients of all ranks, so all of them step or none does. A skipped step
    # costs a batch. A step with NaN in it would cost the run.
    has_moved = num_trained > 0 and math.isfinite(norm)
    for optimizer, peak in zip(optimizers, (args.lr, args.muon_lr)):
        for group in optimizer.param_groups:
            group["lr"] = peak * fraction
        if has_moved:
            optimizer.step()
        optimizer.zero_grad()  # frees the memory until the next backward
    num_tokens = launch.sum_over_ranks(sum(len(pack.ids) for pack in packs))
    numbers = {"loss": loss, "lr": optimizers[0].param_groups[0]["lr"], "grad_norm": norm,
               "trained_tokens": num_trained, "tokens": num_tokens}
    return numbers, has_moved


# ------------------------------------------------------------------------------------------------
# The run


def start_run(args, codec, cache):
    """Takes the folder --out, joins the ranks, and reads the chats: the shape of every row now,
    frames and tokens when a batch needs them -> (Chats of --data, of --val or None, device, the
    newest checkpoint of --out if the run goes on from one, else None, its state)."""
    launch.lock(args.out)
    device = launch.start_process_group()
    launch.reset_watchdog()  # from here on a phase that hangs ends the run
    train, val = Chats(args.data, codec, args, cache), None
    if args.val:
        val = Chats(args.val, codec, args, cache)
    inputs = {"data": train.rows, "val": val and val.rows}
    return train, val, device, *checkpoint.resume_point(args, inputs)


def load_models(ckpt, codec, device, folder, args):
    """-> (policy, optimizers). folder: the checkpoint from which the run goes on, or None.
    Collective."""
    policy = checkpoint.load_policy(ckpt, codec, device, args.gradient_checkpointing,
                                    args.lora_rank, replicas=args.dp_replicate)
    optimizers = build_optimizers(policy, args, device)
    if folder:  # fp32 weights and moments, not the bf16 weights of the folder
        checkpoint.load_train_state(policy, optimizers, folder)
    return policy, optimizers


def main():
    # 0. Everything that can be refused is refused before the model is built.
    args = parse_args()
    ckpt = checkpoint.resolve(args.ckpt)
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    cache = video.FrameCache(workers=video.decode_threads())
    if args.check:
        return check_chats(args, codec, cache)
    train, val, device, folder, state = start_run(args, codec, cache)
    start = state["step"]
    steps = args.steps or max(1, round(args.epochs * len(train.rows) / args.batch_size))
    if start >= steps:
        launch.print0(f"nothing to do: {args.out} has {start} steps of {steps}")
        return launch.end_process_group()
    log = Log(args.out, start, steps, args)
    launch.print0(f"{args.ckpt} -> {args.out}: {len(train.rows)} chats, {steps} steps of "
                  f"{args.batch_size}, {launch.rank_and_world()[1]} ranks on {device.type}")
    policy, optimizers = load_models(ckpt, codec, device, folder, args)

    # A thread decodes, tokenises and packs the next batch while this one trains.
    prefetch = ThreadPoolExecutor(1)
    future = prefetch.submit(train.batch, start + 1)
    check_signals = launch.stop_on_signal()
    num_bad = 0  # steps in a row that moved no weight
    for step in range(start + 1, steps + 1):
        last = step == steps
        began = time.monotonic()
        packs, frames, skipped = future.result()  # raises its error
        waited = time.monotonic() - began  # near 0 if decoding keeps up with training
        if not last:
            future = prefetch.submit(train.batch, step + 1)

        # 1. One optimizer step.
        policy.features = model.VisionFeatures(policy, train.source.load, frames)
        fraction = schedule(step - 1, steps, args.warmup, args.min_lr)
        numbers, has_moved = update(policy, optimizers, packs, fraction, args)
        num_bad = 0 if has_moved else num_bad + 1
        if num_bad == 3:
            raise launch.RunError(f"step {step}: no finite gradient, or no readable chat, for "
                                  "three steps")

        # 2. Numbers, to the terminal and to log.jsonl.
        seconds = time.monotonic() - began
        row = {"step": step, **numbers, "tokens_per_s": numbers["tokens"] / seconds,
               "wait_s": waited, "step_s": seconds,
               "skipped_chats": len(set(launch.gather_rows(skipped)))}
        log.write(row, "loss lr grad_norm trained_tokens tokens tokens_per_s wait_s step_s")

        # 3. The held-out loss, and a checkpoint. `best` links to the one with the lowest loss.
        save = last or (args.save_every and step % args.save_every == 0)
        if save and val:
            loss = held_out_loss(policy, val)  # on every rank the same
            log.write({"step": step, "val_loss": loss}, "val_loss")
            checkpoint.note_best(state, -loss, step)
        # A signal on any rank stops all of them, after a checkpoint.
        stopping = check_signals()
        if save or stopping:
            checkpoint.save_run(policy, optimizers, args.out, step, state)
        if stopping:
            break

    log.close(step)
    prefetch.shutdown(cancel_futures=True)  # after a signal a batch may still be in the making
    launch.end_process_group(code=int(not last))  # 1: so that no next stage begins


if __name__ == "__main__":
    launch.run_main(main)
