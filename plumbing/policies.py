"""
plumbing/policies.py (tests/test_lora.py): the models of a GRPO run: the policy, the reference of
the KL, the teacher.

  reference  the model of --ckpt, frozen; with adapters the policy itself, adapters changed
  teacher    the model of --teacher, frozen, of any size, with the same ids

Reads checkpoint folders; writes nothing. Used by grpo.py and tools/replay.py.
"""
import torch

import chat
import launch
import model
from plumbing import checkpoint, metrics


def load_models(args, ckpt, codec, source, device, folder):
    """-> (policy, reference or None, optimizer). folder: the checkpoint from which the run goes on,
    or None. Collective."""
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    policy = checkpoint.load_sharded(ckpt, codec, device, args.recompute, args.replicas,
                                     lora=args.lora)
    # The vision tower is frozen. Features of a frame are computed once and read by all forwards.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = None
    # With adapters a second copy of the adapters is enough: the base is frozen.
    if args.kl > 0 and args.lora:
        reference = AdapterReference(policy)
    elif args.kl > 0:
        reference = checkpoint.load_sharded(ckpt, codec, device, replicas=args.replicas,
                                            frozen=True)
        reference.features = policy.features  # both read the features of one tower
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    return policy, reference, optimizer


def load_teacher(ckpt, args, codec, device):
    """The frozen policy of --teacher, of any size, which computes its own features; None without.
    ckpt: its folder. Raises UserError unless it reads the student's ids and frames as they are.
    Collective."""
    if not ckpt or not args.distill:
        return None
    own = chat.load_codec(ckpt, args.channel)
    read = ("token_bytes", "image_pad", "video_pad", "vision_start", "vision_end", "eos", "patch",
            "merge", "temporal")  # fmt: skip
    if other := [name for name in read if getattr(own, name) != getattr(codec, name)]:
        raise launch.UserError(f"--teacher {args.teacher}: its ids or frames are not those of "
                               f"--ckpt ({', '.join(other)} differ)")
    teacher = checkpoint.load_sharded(ckpt, own, device, replicas=args.replicas, frozen=True,
                                      tower=True, lora=checkpoint.adapter_rank(ckpt, 0))
    teacher.features = model.VisionFeatures(teacher.hf.model.visual, own, None)
    return teacher


def teacher_kl(packs):
    """[(K [n], reverse KL to the teacher [n])] of each pack -> {"mean": nats per token, "by_K": {K:
    ..}}, over all ranks. Collective."""
    rows = []
    for frames, nats in packs:
        for k in frames.unique().tolist():
            some = nats.cpu()[frames == k].double()
            rows.append({"K": int(k), "nats": some.sum().item(), "n": len(some)})
    rows = launch.gather_rows(rows)

    def mean(some):
        return sum(row["nats"] for row in some) / sum(row["n"] for row in some) if some else None

    return {"mean": mean(rows), "by_K": metrics.by_value(rows, "K", mean)}


class AdapterReference:
    """The KL reference of a run with adapters: the policy with the adapters it started from. The
    frozen weights are shared. The copy of the adapters is small beside them: 0.7 GB for the 8B at
    rank 64, and as much again during a call."""

    def __init__(self, policy):
        self.policy = policy
        self.start = [p.detach().clone() for p in model.trained_parameters(policy)]

    def __call__(self, *args):
        now = [p.detach().clone() for p in model.trained_parameters(self.policy)]
        self.put(self.start)
        try:
            return self.policy(*args)
        finally:
            self.put(now)

    @torch.no_grad()
    def put(self, values):
        for p, value in zip(model.trained_parameters(self.policy), values):
            p.copy_(value)
