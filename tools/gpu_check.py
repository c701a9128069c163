"""
gpu_check.py (tests/slow/test_gpu_check.py): does your checkpoint compute the same on your GPUs as
on a CPU in fp32, in the trainer and in the engine? Run it before a long training, with the flags of
grpo.py that the training will have, and an --out of its own.

Every rank samples two rollouts of each of two tasks with K 64, as grpo.py does. Then:

  engine     mean |log-prob of the engine - log-prob of the trainer| over the sampled tokens
  forwards   log-probs and gradients of packs in bf16, in which rollouts share their prompt and
             attention is FlexAttention with the checkpoint's groups of heads, against one forward
             per rollout on the CPU in fp32
  moved      the trainer's layers are multiplied by 1.1, then the engine gets these weights: the
             gap, and its share of the gap to an engine that still holds the old ones
  delta      Qwen3.5 alone: outputs and gradients of the gated-delta kernels, against the CPU's rule
  grpo       three steps of grpo.py, which ends itself at a gap beyond rounding. The weights must
             leave the reference of the KL

A row holds the smallest and the largest number of all ranks, and fails if one of them is beyond the
bound. The exit code is 1 if a row fails: then train nothing. docs/gpu.md says what has run.

Reads:  --ckpt, --data (`python toy.py --out toy` makes one).
Writes: --out, a run of grpo.py with one checkpoint.

CPU toy:  python tools/gpu_check.py --ckpt sft_out/last --data toy/rl.jsonl --preset toy --beta 0.01
8 GPUs:   python tools/gpu_check.py --ckpt Qwen/Qwen3-VL-8B-Instruct --data toy/rl.jsonl --out check
"""
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import torch

import chat
import grpo
import launch
import model
import rollout
from plumbing import checkpoint, data, qwen35

CPU = torch.device("cpu")
STEPS = ["--frames", "64", "--steps", "3", "--save-every", "0"]
# Of log-probs in nats, of gradients and of the gated-delta rule, relative: bf16 has 8 bits of
# mantissa.
BOUNDS = {"cuda": (0.06, 0.05, 0.03), "cpu": (1e-5, 1e-4, 1e-5)}


FAILED = []  # the rows that have failed


def row(check, value, bound):
    """Prints one check of all ranks. Collective."""
    values = launch.gather_rows([value])
    verdict = "ok"
    if not all(value <= bound for value in values):  # NaN fails
        verdict = "FAIL"
        FAILED.append(check)
    launch.print0(f"{check:48s} {min(values):9.3g} to {max(values):9.3g}, at most {bound:7.3g}: "
                  f"{verdict}")


# ------------------------------------------------------------------------------------------------
# Engine and forwards


def sample(worker, tasks, step):
    """-> groups of two rollouts of each task, with advantages 1 and -1. Raises RunError."""
    episodes = list(rollout.run(worker, tasks, 64, group=2, step=step))
    for e in episodes:
        if e.status != "ok":
            raise launch.RunError(f"task {e.task['id']}: {e.status}, {e.error}")
        e.advantage = {"task": (-1.0) ** e.sample, "fmt": 0.0}
    return grpo.group_by_prompt(episodes)


def pack_groups(codec, groups):
    """Groups of rollouts -> one pack, in which those of a group share their prompt."""
    return model.pack_trees(codec, [grpo.group_tree(group) for group in groups])


@torch.no_grad()
def engine_gap(policy, groups, temperature):
    """Mean |log-prob of the engine - of the trainer| in nats. Collective."""
    pack = pack_groups(policy.codec, groups)
    logp, _ = policy(pack, temperature)  # [n]
    return (logp.cpu() - pack.values["sampling"]).abs().mean().item()


def load_policy(ckpt, codec, device, source):
    policy = checkpoint.load_policy(ckpt, codec, device, recompute=True)
    policy.features = model.VisionFeatures(policy, source.load)
    return policy


def forward_backward(policy, packs):
    """-> log-probs of all sampled tokens [N]. The gradient of their advantage-weighted sum stays in
    the parameters. Collective."""
    logps = []
    for pack in packs:  # gradients add up
        logp, _ = policy(pack)  # [n]
        advantage = model.to_device(pack.values["advantage"], logp.device)  # [n]
        (logp * advantage).sum().backward()
        logps.append(logp.detach().cpu())
    return torch.cat(logps)


def gradient_distance(policy, reference):
    """Relative L2 distance of all gradients, which FSDP has averaged over ranks. Collective."""
    distance, length = 0.0, 0.0
    pairs = zip(model.trained_parameters(policy), model.trained_parameters(reference))
    for ours, theirs in pairs:  # one at a time: a host cannot hold two 8B gradients a rank
        expected = checkpoint.whole_tensor(theirs.grad)
        computed = checkpoint.whole_tensor(ours.grad).cpu()
        distance += (computed - expected).double().square().sum().item()
        length += expected.double().square().sum().item()
    return (distance / length) ** 0.5


def check_forwards(policy, reference, groups, bounds):
    """One pack of shared prompts against one forward per rollout. Collective."""
    shared = [pack_groups(policy.codec, groups)]
    alone = [pack_groups(policy.codec, [[e]]) for group in groups for e in group]
    gap = forward_backward(policy, shared) - forward_backward(reference, alone)
    row("forwards: log-probs, nats", gap.abs().mean().item(), bounds[0])
    row("forwards: gradient, relative", gradient_distance(policy, reference), bounds[1])
    policy.zero_grad()


def check_moved(worker, policy, groups, tasks, args, tolerance):
    """Other weights in the trainer, then in the engine. Collective."""
    worker.engine.sleep()
    # Farther than a step would, so that old weights show. After a forward FSDP leaves the root
    # whole, so only the layers move.
    with torch.no_grad():
        for p in policy.hf.model.language_model.layers.parameters():
            p.mul_(1.1)
    stale = engine_gap(policy, groups, args.temperature)
    device = next(policy.parameters()).device
    worker.engine.wake(checkpoint.full_weights(policy, model.engine_dtype(policy.codec, device)))
    gap = engine_gap(policy, sample(worker, tasks, 1), args.temperature)
    # Larger weights round more: 0.063 nats on an H100 when the factor was 1.5.
    row("moved: gap to the trainer, nats", gap, 2 * tolerance)
    row("moved: its share of that of the old weights", gap / stale, 0.5)


def check_rank(args):
    """What one rank checks -> the engine, which is to end. Collective."""
    device = launch.start_process_group()
    rank, _ = launch.rank_and_world()  # known once the group is joined
    launch.reset_watchdog()
    launch.import_shim()
    ckpt = checkpoint.resolve(args.ckpt)
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    agent, source = rollout.agent_settings(args, args.data)
    tasks = data.read_tasks(args.data)[2 * rank:2 * rank + 2]  # other ones on every rank
    policy = load_policy(ckpt, codec, device, source)
    engine = rollout.make_engine(ckpt, codec, args, sleeping=True)
    worker = rollout.RolloutWorker(engine, codec, source, agent)
    tolerance = grpo.gap_tolerance(policy)
    groups = sample(worker, tasks, 0)
    row("engine: gap to the trainer, nats", engine_gap(policy, groups, args.temperature), tolerance)
    bounds = BOUNDS[device.type]
    check_forwards(policy, load_policy(ckpt, codec, CPU, source), groups, bounds)
    check_moved(worker, policy, groups, tasks, args, tolerance)
    if codec.base.recurrent:
        check_delta(device, bounds[2])
    return engine


# ------------------------------------------------------------------------------------------------
# The gated-delta rule of Qwen3.5


def check_delta(device, bound):
    """The kernels of the device against the rule of the CPU in fp32. Collective."""
    expected = delta_results(qwen35.delta_kernel(CPU), CPU, torch.float32)
    computed = delta_results(qwen35.delta_kernel(device), device, model.compute_dtype(device))
    for number, (ours, theirs) in enumerate(zip(computed, expected)):
        distance = (ours - theirs).norm() / theirs.norm()
        row(f"delta: tensor {number}, relative", distance.item(), bound)


def delta_results(kernel, device, dtype):
    """Outputs and gradients of a batch that goes on from a state, as packed_delta asks for
    -> [fp32 tensor on the CPU]."""
    rows, length, heads, width = 4, 1000, 4, 128
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, rows, length, heads, width, generator=draw)
    decay, beta = torch.rand(2, rows, length, heads, generator=draw)
    state = torch.randn(rows, heads, width, width, generator=draw)
    inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v, beta)]
    inputs += [x.to(device).requires_grad_() for x in (-0.5 * decay, 0.1 * state)]  # fp32
    q, k, v, beta, decay, state = inputs
    out, end = kernel(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True,
                      use_qk_l2norm_in_kernel=True)
    (out.float().square().sum() + end.square().sum()).backward()
    results = [out.detach(), end.detach()]
    results += [x.grad for x in inputs]
    return [x.float().cpu() for x in results]


# ------------------------------------------------------------------------------------------------
# grpo.py


def check_steps(log):
    """Rows of the log.jsonl of grpo.py. Steps in which nothing was trained do not count: nothing
    was compared."""
    trained = [step for step in log if step.get("signal_groups")]
    # The first step meets the reference itself, so its KL is zero.
    largest_kl = max([step["kl"] for step in trained[1:]], default=0.0)
    row("grpo: the weights stayed at the reference", float(largest_kl == 0), 0)


def start(script):
    """Runs a script with our flags on all GPUs, two ranks on a CPU. Raises RunError."""
    ranks = torch.cuda.device_count() or 2
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node", str(ranks), script, *sys.argv[1:], *STEPS])
    if done.returncode:
        raise launch.RunError(f"{os.path.basename(script)} has failed: train nothing")


def main():
    args = grpo.parse_args()
    if "RANK" in os.environ:  # one of the processes of `start`
        engine = check_rank(args)
        return launch.end_process_group(engine, int(len(FAILED) > 0))
    if os.path.exists(args.out):
        raise launch.UserError(f"--out {args.out} exists; choose another")
    # Each part in processes of its own: memory that one keeps is not missing in the next.
    start(__file__)
    start(os.path.join(sys.path[0], "grpo.py"))
    check_steps(launch.read_jsonl(os.path.join(args.out, "log.jsonl")))
    if FAILED:
        raise launch.RunError("grpo.py has failed: train nothing")


if __name__ == "__main__":
    launch.run_main(main)
