"""
plumbing/policies.py (tests/test_lora.py): the models of a GRPO run: the policy and the reference
of the KL.

  reference  the model of --ckpt, frozen; with adapters the policy itself, adapters changed

Reads checkpoint folders; writes nothing. Used by grpo.py and tools/replay.py.
"""
import torch

import model
from plumbing import checkpoint


def load_models(args, ckpt, codec, source, device, folder):
    """-> (policy, reference or None, optimizer). folder: the checkpoint from which the run goes on,
    or None. Collective."""
    # fp32 master weights in shards; computed in bf16 on a GPU, in fp32 on a CPU.
    policy = checkpoint.load_sharded(ckpt, codec, device, args.gradient_checkpointing,
                                     args.dp_replicate, lora=args.lora_rank)
    # The vision tower is frozen. Features of a frame are computed once and read by all forwards.
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, source.load)
    optimizer = model.adamw(model.trained_parameters(policy), args.lr, 0.999, device)
    # The reference is made before a resumed run loads its weights: it is the model of --ckpt.
    reference = None
    # With adapters a second copy of the adapters is enough: the base is frozen.
    if args.beta > 0 and args.lora_rank:
        reference = AdapterReference(policy)
    elif args.beta > 0:
        reference = checkpoint.load_sharded(ckpt, codec, device, replicas=args.dp_replicate,
                                            frozen=True)
        reference.features = policy.features  # both read the features of one tower
    if folder:
        checkpoint.load_train_state(policy, optimizer, folder)
    return policy, reference, optimizer


class AdapterReference:
    """The KL reference of a run with adapters: the policy with the adapters it started from. The
    frozen weights are shared. The copy of the adapters is small beside them: 0.7 GB for the 8B at
    rank 64, and as much again during a call."""

    def __init__(self, policy):
        self.policy = policy
        self.start = [p.detach().clone() for p in model.trained_parameters(policy)]

    def __call__(self, *args):
        current = [p.detach().clone() for p in model.trained_parameters(self.policy)]
        self.put(self.start)
        try:
            return self.policy(*args)
        finally:
            self.put(current)

    @torch.no_grad()
    def put(self, values):
        for p, value in zip(model.trained_parameters(self.policy), values):
            p.copy_(value)
