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

As in the paper the vision tower is frozen, so its features are computed once per frame set.

Reads:  --ckpt, --data (SFT JSONL: {"id", "messages", "tools"?}), videos relative to the JSONL.
        tools/convert.py writes such files from published training data.
Writes: --out/step_NNNNNN/ (checkpoint + train_state/), --out/last and --out/best (links),
        --out/log.jsonl, --out/args.json; decoded frames in frame_cache_dir
The same command again goes on from the newest whole checkpoint: the order of the data is a function
of (seed, step).

CPU toy:  torchrun --nproc_per_node 2 sft.py --preset toy --ckpt base --data toy/sft.jsonl \\
            --val toy/sft_val.jsonl --out sft_out
1 GPU:    python sft.py --ckpt Qwen3-VL-2B-Instruct --data sft.jsonl --out sft_out
8 GPUs:   torchrun --nproc_per_node 8 sft.py --ckpt Qwen3-VL-8B-Instruct --data sft.jsonl \\
            --val val.jsonl --out sft_out
Adapters: with --lora-rank 64 the 8B trains on one GPU of 80 GB
"""
import math
import os
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH=1 leaves it out
import chat
import launch
import model
import video
from plumbing import arguments, checkpoint, data, metrics, muon, tracker


def build_parser():
    parser = arguments.parser(__doc__)
    add = parser.add_argument_group("input and output").add_argument
    add("--ckpt", required=True, help="checkpoint folder to start from")
    add("--data", required=True, help="SFT JSONL")
    add("--val", default=None, help="held-out SFT JSONL; none = no held-out loss, no `best`")
    add("--out", default="sft_out", help="run folder")
    add("--check", action="store_true", help="only look at the data: videos, tokens")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: numbers for toy.py")
    video.add_arguments(parser)
    add("--max-len", type=int, default=32768, help="tokens; a longer chat is an error, never cut")
    add("--seed", type=int, default=0, help="order of the data")
    add = parser.add_argument_group("optimisation").add_argument
    # --steps wins over --epochs. With a checkpoint to go on from, the steps count from the start.
    add("--epochs", type=float, default=1.0, help="passes over the data; may be a fraction")
    add("--steps", type=int, default=0, help="optimiser steps; 0 = from --epochs")
    add("--batch-size", type=int, default=64, help="chats per optimiser step, over all ranks")
    add("--pack-tokens", type=int, default=32768, help="tokens per pack (one forward)")
    add("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: of matrices (toy)")
    add("--lr", type=float, help="peak of AdamW; default 1e-5, of adapters 1e-4, toy 2e-3")
    add("--muon-lr", type=float, default=6e-3, help="peak learning rate of Muon")
    add("--min-lr", type=float, default=0.1, help="final learning rate as a fraction of the peak")
    add("--warmup", type=float, default=0.03, help="fraction of the steps")
    add("--beta2", type=float, default=0.999, help="AdamW; beta1 is 0.9")
    add("--lora-rank", type=int, default=0, help="rank of adapters, the rest is frozen; 0 = off")
    parser.add_setting("max_grad_norm", "norm at which gradients are clipped; 0 = never", 1.0)
    parser.add_setting("gradient_checkpointing", "compute decoder layers again in backward", True)
    parser.add_setting("dp_replicate", "groups of ranks that each hold the whole model in shards "
                       "(HSDP): one per node; 0 = every rank holds the whole (toy)", 1)
    add("--resume", action="store_true", help="go on although settings or rows have changed")
    add = parser.add_argument_group("looking and saving").add_argument
    add("--eval-every", type=int, default=200, help="steps between held-out losses; 0 = at the end")
    add("--save-every", type=int, default=500, help="steps between checkpoints; 0 = at the end")
    tracker.add_track_arguments(parser, add)
    arguments.add_computing(parser)
    return parser


def parse_args():
    parser = build_parser()
    # Read twice: --preset, --ckpt, --lora-rank decide on defaults, which any flag still overrides.
    early = arguments.parse_early(parser)
    # Without --ckpt, parse_args below prints the help or says what is missing.
    lora = checkpoint.adapter_rank(early.ckpt, early.lora_rank) if early.ckpt else early.lora_rank
    # Adapters start at zero and take larger steps.
    parser.set_defaults(lora_rank=lora, lr=1e-4 if lora else 1e-5)
    if early.preset == "toy":
        # A model of a million parameters from random weights: large steps, few of them, and less
        # memory of past gradients.
        parser.set_defaults(optimizer="adamw" if lora else "muon", batch_size=24, max_len=2048,
                            pack_tokens=2048, epochs=1.75, beta2=0.98, min_lr=0.02, warmup=0.1,
                            eval_every=100, save_every=0, gradient_checkpointing=False,
                            dp_replicate=0, lr=2e-3)
    args = parser.parse_args()
    arguments.require_min(0, args, "lora_rank", "dp_replicate")
    arguments.require_min(1, args, "batch_size", "pack_tokens", "max_len")
    if args.lora_rank and args.optimizer == "muon":
        raise launch.UserError("--lora-rank goes with --optimizer adamw: Muon steps whole matrices")
    tracker.check_tracker(args)
    return args


# ------------------------------------------------------------------------------------------------
# Data


class Chats:
    """Rows of an SFT JSONL as token sequences. Each row is encoded once and each frame is decoded
    once, unless a cache had to drop them."""

    def __init__(self, path, codec, args, cache, max_tokens=2**22, faults=None):
        """max_tokens: encoded tokens to keep, 4 M are about 100 MB; the least recently used rows
        are dropped first. Raises UserError naming file and line; with a list `faults` the line goes
        there, and the row is left out."""
        self.path, self.codec, self.args, self.cache = path, codec, args, cache
        self.max_tokens, self.max_positions = max_tokens, data.max_positions(codec)
        self.root, self.rows = video.root_of(args, path), data.read_chats(path, faults)
        self.encoded = OrderedDict()  # row -> chat.Sequence, least recently used first
        self.tokens = 0  # in the encoded rows
        self.broken = {}  # row -> why its video could not be read in this pass over the rows

    def frames(self, spec):
        """A video item of a chat -> video.Frames. Also called by VisionFeatures."""
        return video.load(spec, self.root, self.cache, max_pixels=self.args.max_pixels)

    def __getitem__(self, index):
        """Row -> chat.Sequence, or None if a video of the chat is broken."""
        return self.read(index, {})

    def read(self, index, by_key, retry=False):
        """As [index]. by_key: a dict that gets {VisionItem.key: Frames}, the frames of the chat.
        retry: try also a row that could not be read, since an outage may have passed."""
        with launch.naming(self.rows[index]["id"]):
            return self.encode(index, by_key, retry)

    def encode(self, index, by_key, retry):
        if index in self.broken and not retry:
            return None
        row = self.rows[index]
        try:
            # Read again in each epoch, because a video may have gone or changed meanwhile.
            specs = chat.videos_in(row["messages"])
            frames = [self.frames(spec) for spec in specs]
            items = list(map(chat.vision_item, specs, frames))
        # A broken video costs one chat, not the run. ValueError: a window beyond the video.
        except (video.VideoError, ValueError) as error:
            if index not in self.broken:
                print(launch.printable(f"skipped {row['id']}: {error}"), flush=True)
            self.broken[index] = str(error)
            return None
        self.broken.pop(index, None)
        by_key.update((loaded.key, loaded) for loaded in frames)
        if index in self.encoded:
            sequence = self.encoded.pop(index)
            if sequence.items == items:
                self.encoded[index] = sequence  # used last
                return sequence
            self.tokens -= len(sequence.ids)
        sequence = chat.encode_chat(self.codec, row["messages"], items, row.get("tools"))
        # A chat that is cut would teach an answer without the question: better to end the run. Only
        # this rank has met the chat, and launch.run_main prints its error.
        if len(sequence.ids) > min(self.args.max_len, self.max_positions):
            raise launch.UserError(f"{self.path}: chat {row['id']} has {len(sequence.ids)} tokens, "
                                   f"--max-len is {self.args.max_len}, and the checkpoint has "
                                   f"{self.max_positions} positions")
        self.encoded[index] = sequence
        self.tokens += len(sequence.ids)
        # The newest row stays, even if that row alone is over the limit.
        while self.tokens > self.max_tokens and len(self.encoded) > 1:
            self.tokens -= len(self.encoded.popitem(last=False)[1].ids)
        return sequence

    def cost(self, index):
        """About how many frames a row has, known without decoding; ranks are balanced by this."""
        videos = chat.videos_in(self.rows[index]["messages"])
        # A crop without max_frames shows 16; 12 more for the text of the chat.
        return sum(p.get("frames") or p.get("max_frames") or 16 for p in videos) + 12


def check_chats(args, codec, cache):
    """--check: encodes every chat, prints counts, and ends. Raises UserError if there is a fault.
    """
    from tqdm import tqdm

    if os.environ.get("RANK", "0") != "0":  # under torchrun rank 0 alone looks
        return
    faults = []
    for path in filter(None, [args.data, args.val]):
        chats, longest, trained = Chats(path, codec, args, cache, faults=faults), 0, 0
        for index, row in enumerate(tqdm(chats.rows, desc=path, disable=None)):
            try:
                sequence = chats[index]
            except launch.UserError as error:  # too long
                faults.append(str(error))
                continue
            if sequence is None:  # its video cannot be read; Chats has printed why
                faults.append(f"{path}: chat {row['id']} would be skipped")
                continue
            longest, trained = max(longest, len(sequence.ids)), trained + sum(sequence.mask)
        print(f"{path}: {len(chats.rows)} chats, the longest has {longest} tokens, of --max-len "
              f"{args.max_len}; {trained} trained tokens")
    arguments.report_check(faults, " and ".join(filter(None, [args.data, args.val])))


def batch_packs(chats, step, codec, args, rank, world):
    """This rank's part of the batch of a step, see make_packs, whether the disk with the videos has
    gone, and the rows that this rank has skipped in this epoch. (seed, step) draws the chats, so a
    resumed run sees the same ones. They are dealt out by cost, so no rank waits for the long videos
    of another."""
    first = step * args.batch_size
    if (first + args.batch_size - 1) // len(chats.rows) > (first - 1) // len(chats.rows):
        chats.broken.clear()  # the batch begins an epoch: a disk that was away may be back
    picked = launch.batch_indices(step, args.batch_size, len(chats.rows), args.seed)
    rank_rows = data.balance_over_ranks(picked, chats.cost, rank, world)
    return *read_packs(chats, rank_rows, codec, args.pack_tokens), sorted(chats.broken)


def read_packs(chats, rows, codec, pack_tokens, retry=False):
    """As make_packs, and whether the disk with the videos is away. What could not be read is tried
    once more: a read that fails once, or an outage that passes, costs no chat."""
    packs, frames = make_packs(chats, rows, codec, pack_tokens, retry)
    lost = [chats.broken[i] for i in rows if i in chats.broken]
    if lost and not retry:
        return read_packs(chats, rows, codec, pack_tokens, True)
    return packs, frames, False


def make_packs(chats, indices, codec, pack_tokens, retry=False):
    """Chats -> (Packs, {VisionItem.key: Frames that they show}). A chat is a tree without branches.
    Chats with a broken video are left out. retry: as of Chats.read."""
    # The frames are kept until the forward, so that a video which has gone by then ends no run.
    frames = {}
    # None: a chat with a broken video. A rank may be left without any pack; see forward_backward.
    sequences = [s for s in (chats.read(i, frames, retry) for i in indices) if s is not None]
    trees = [model.Tree(model.TokenSpan(s.ids, s.mask), s.items) for s in sequences]
    packs = [model.pack_trees(codec, members) for members in model.fill_packs(trees, pack_tokens)]
    return packs, frames


# ------------------------------------------------------------------------------------------------
# Loss and optimiser


def schedule(step, steps, warmup, floor):
    """Fraction of the peak learning rate at this step: linear warm-up, then a cosine to `floor`.
    warmup: fraction of the steps."""
    warm = max(1, round(warmup * steps))  # steps; at least 1, so the first step is not 0
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)  # 0 at the peak, nearly 1 at the last step
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2


def build_optimizers(policy, args, device):
    """-> [AdamW], or [AdamW, Muon] with Muon for the matrices inside the decoder layers.

    Muon's update is the semi-orthogonal matrix nearest to the momentum, scaled to the size of an
    AdamW update. A tiny model learns two to three times faster per token with Muon than with AdamW
    alone, so that is the toy's default. Muon gathers whole matrices: use AdamW for large
    checkpoints.
    """
    import torch

    layers = []
    if args.optimizer == "muon":  # only matrices can be semi-orthogonal; norms stay with AdamW
        layers = [p for p in policy.hf.model.language_model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in layers}  # tensors compare by value, so compare ids
    rest = [p for p in model.trained_parameters(policy) if id(p) not in taken]
    optimizers = [model.adamw(rest, args.lr, args.beta2, device)]
    if layers:
        # match_rms_adamw gives updates of AdamW's size, whatever the shape of the matrix.
        optimizers.append(torch.optim.Muon(layers, lr=args.muon_lr, momentum=0.95, weight_decay=0.0,
                                           adjust_lr_fn="match_rms_adamw"))
        if device.type == "cpu":
            muon.patch_muon(optimizers[-1], layers)
    return optimizers


def forward_backward(policy, packs):
    """Forward over this rank's packs, and backward if gradients are on -> (mean loss in nats per
    token, N trained tokens), both over all ranks. Collective."""
    import torch
    import torch.distributed as dist

    world, device = dist.get_world_size(), next(policy.parameters()).device
    # Summed in host memory, so the host does not wait for a GPU.
    count = torch.tensor(float(sum(len(p.target) for p in packs)), dtype=torch.float64)
    dist.all_reduce(count)
    # Known before backward: a sum over all packs is divided by N, not each pack by its own number.
    n = max(1.0, count.item())  # a batch of broken videos has no token: 0 / 1, not NaN
    loss = torch.zeros((), device=device, dtype=torch.float64)  # nats per token, this rank's part
    for pack, real in model.pad_packs_over_ranks(policy.codec, packs):
        logp, _ = policy(pack)  # [trained tokens of the pack] nats
        # A spare pack (real = False) runs for its collectives alone and adds nothing to the loss.
        part = -real * logp.sum() / n
        if torch.is_grad_enabled():
            # FSDP averages gradients over ranks. Each rank holds a part of the sum over N, so the
            # part is multiplied by the number of ranks.
            (part * world).backward()
        loss += part.detach().double()
    # Parts of one mean over N tokens: their sum is that mean, so no rank weighs more per token.
    dist.all_reduce(loss)
    return loss.item(), int(count)


def held_out_loss(policy, chats, args, rank, world):
    """Nats per token of the held-out chats; NaN if none can be read, or if the disk with the videos
    went away meanwhile. Collective."""
    import torch

    nats, tokens, blind, rows = 0.0, 0, False, range(len(chats.rows))
    chats.broken.clear()  # as in batch_packs
    # In batches: the frames of all chats would not fit into memory.
    for batch in (rows[i:i + args.batch_size] for i in rows[::args.batch_size]):
        packs, policy.features.frames, away = read_packs(
            chats, batch[rank::world], policy.codec, args.pack_tokens)
        blind = blind or away
        # No policy.eval(): our attention has no dropout, so both modes compute the same.
        with torch.no_grad():
            loss, n = forward_backward(policy, packs)
        nats, tokens = nats + loss * n, tokens + n
    return math.nan if launch.any_rank(blind) or not tokens else nats / tokens


# ------------------------------------------------------------------------------------------------
# The loop


def main():
    # 0. Everything that can be refused is refused before the model is built.
    args = parse_args()
    cache, ckpt = video.frame_cache(args), checkpoint.resolve(args.ckpt)
    codec = chat.load_codec(ckpt, args.channel, args.chat_template_kwargs)
    if args.check:
        return check_chats(args, codec, cache)
    launch.make_out(args.out)
    launch.lock(args.out)
    rank, world, device = launch.start_process_group(args.patience, args.cpu)
    launch.reset_watchdog(args.patience)  # from here on a phase that hangs ends the run
    launch.print0(f"{args.ckpt} -> {args.out}: loading the checkpoint and {args.data}")
    # Chats checks the shape of every row now, and frames and tokens when a batch needs them.
    train = Chats(args.data, codec, args, cache)
    val_chats = Chats(args.val, codec, args, cache) if args.val else None
    # A disk that is not mounted ends the run here, not after an epoch of skipped chats.
    for chats in filter(None, (train, val_chats)):
        specs = chat.videos_in(m for row in chats.rows for m in row["messages"])
        cache.check_present(args, chats.path, specs)
    rows = {"data": train.rows, "val": val_chats and val_chats.rows}
    # folder: the newest whole checkpoint of --out, if this run goes on from one.
    folder, state = checkpoint.resume_point(args, rows)
    start, best = state["step"], state.get("best", (math.inf, 0))
    # Broken chats count here, since no rank has opened all videos. Their places stay empty.
    steps = args.steps or max(1, round(args.epochs * len(train.rows) / args.batch_size))
    # Every rank reads the same state.json, so all of them end here or none.
    if start >= steps:
        launch.print0(f"nothing to do: {args.out} has {start} steps of {steps}")
        return launch.end_process_group()

    policy = checkpoint.load_policy(ckpt, codec, device, args.gradient_checkpointing,
                                    args.lora_rank, replicas=args.dp_replicate)
    # The tower is frozen: a frame set goes through once, then the features are kept.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, train.frames)
    optimizers = build_optimizers(policy, args, device)
    # The schedule multiplies the peak rate of each group, since Muon and AdamW have different ones.
    # Taken before load_train_state, which restores the rates of the last step.
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    if folder:  # a resumed run: fp32 weights and moments, not the bf16 weights of the folder
        checkpoint.load_train_state(policy, optimizers, folder)
    # --steps and --batch-size decide, so the passes over the data may be no whole number.
    log = metrics.open_log(args, start, f"{len(train.rows)} chats x "
                           f"{steps * args.batch_size / len(train.rows):.2f} epochs = {steps} "
                           f"steps of {args.batch_size} chats")

    # A thread decodes, tokenises and packs the next batch while this one trains. One thread: the
    # batches come in order, and no two threads change the same Chats.
    prefetch = ThreadPoolExecutor(1)
    future = prefetch.submit(batch_packs, train, start, codec, args, rank, world)
    stop_event = launch.stop_on_signal()
    bad = 0  # steps in a row without a finite gradient or a video; check_run ends such a run
    for step in range(start, steps):
        clock = time.monotonic()
        packs, policy.features.frames, away, broken = future.result()  # raises its error
        waited = time.monotonic() - clock  # near 0 if decoding keeps up with training
        if step + 1 < steps:
            future = prefetch.submit(batch_packs, train, step + 1, codec, args, rank, world)

        # 1. One optimizer step. Collective, from the first forward to the norm.
        fraction = schedule(step, steps, args.warmup, args.min_lr)
        for o, peak in zip(optimizers, peaks):
            for group, lr in zip(o.param_groups, peak):
                group["lr"] = lr * fraction
        loss, tokens = forward_backward(policy, packs)
        norm = model.reduce_and_clip(policy, args.max_grad_norm)
        # On one rank is enough, and chats of text alone must not hide it.
        blind = launch.any_rank(away) or not tokens
        # The norm covers the gradients of all ranks, so all of them step or none does. A skipped
        # step costs a batch. A step with NaN in it would cost the run.
        bad = 0 if math.isfinite(norm) and not blind else bad + 1
        for o in optimizers:
            if tokens and not bad:
                o.step()
            o.zero_grad(set_to_none=True)  # frees the memory until the next backward
        last = step + 1 == steps
        if bad == 3 or (last and blind):
            raise launch.RunError(f"step {step + 1}: no finite gradient, or no video, for "
                                  f"{bad} steps")

        # 2. Numbers, to the terminal and to log.jsonl.
        # gather_rows is collective, so all ranks call it. Rank 0 alone writes.
        seconds = time.monotonic() - clock
        # lengths: tokens of each rank. Two ranks may meet the same broken chat.
        lengths, rows = zip(*launch.gather_rows([(sum(len(p.ids) for p in packs), broken)]))
        broken = set().union(*rows)
        if rank == 0:
            # lr is AdamW's rate; Muon's has the same fraction of another peak.
            record = {"step": step + 1, "loss": loss, "lr": args.lr * fraction, "grad_norm": norm,
                      "trained_tokens": tokens, "tokens": sum(lengths),
                      "tokens_per_s": sum(lengths) / seconds, "wait_s": waited, "step_s": seconds,
                      "skipped_chats": len(broken), "bad_steps": bad}  # fmt: skip
            log.write(record, step_line(record, steps, log.eta(step + 1, steps)))
        launch.reset_watchdog(args.patience)

        # 3. The held-out loss, and a checkpoint.
        # `last` links to the newest checkpoint, `best` to the one with the lowest held-out loss.
        # val_chats is None without --val: then no `best`, and checkpoints by --save-every alone.
        if val_chats and (last or (args.eval_every and (step + 1) % args.eval_every == 0)):
            value = held_out_loss(policy, val_chats, args, rank, world)
            if rank == 0:
                log.write({"step": step + 1, "val_loss": None if math.isnan(value) else value},
                          f"step {step + 1:04d} | held-out loss {value:.4f} nats/token")
            # Every rank has the same numbers, so all of them save or none.
            if not blind and value < best[0]:
                best = value, step + 1
            launch.reset_watchdog(args.patience)
        # SIGTERM on any rank stops all of them, after a checkpoint.
        stopping = launch.any_rank(stop_event.is_set())
        # Not after a bad step: two such saves would push out the checkpoints from before the fault.
        due = args.save_every and (step + 1) % args.save_every == 0 and not bad
        # Bad steps moved no weight: a run that only stops in one takes them again.
        due = due or last or best[1] == step + 1
        done = step + 1 - (0 if due else bad)
        if due or stopping and done > start:
            # resume_point reads all of it again and compares the settings.
            checkpoint.save_run(policy, optimizers, args.out, done, {**state, "best": best})
            launch.reset_watchdog(args.patience)
        if stopping:
            break

    if rank == 0:
        log.close(step + 1, steps)
    prefetch.shutdown(cancel_futures=True)  # after SIGTERM a batch may still be in the making
    launch.end_process_group(code=int(step + 1 < steps))  # 1: so that no next stage begins


def step_line(r, steps, eta):
    """A record of log.jsonl -> the line for the terminal."""
    # tok: trained tokens of all tokens, over all ranks. wait: seconds for the next batch.
    return (f"step {r['step']:04d}/{steps:04d} | loss {r['loss']:.4f} | lr {r['lr']:.2e} | "
            f"gn {r['grad_norm']:.2f} | {r['trained_tokens']} of {r['tokens']} tok | "
            f"{r['tokens_per_s']:.0f} tok/s | wait {r['wait_s']:.2f}s step {r['step_s']:.2f}s | "
            f"eta {eta / 60:.1f}m{' | skipped' * bool(r['bad_steps'])}")


if __name__ == "__main__":
    launch.run_main(main)
