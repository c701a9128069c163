"""
step_model.py: seconds of one PARA-GRPO step on GPUs that you do not have, by arithmetic.

  operations  = of the matrices, 6 per token and weight, forward and backward
  prefill     = operations of the prompts, once per group, of all sub-agents' windows and of the
                tower, over --prefill-mfu of the peak
  decode      = engine steps x (bytes of the weights and of the keys and values in use over
                --bandwidth + --launch-ms)
  update      = operations x (forward 1, recomputation 1, backward 2, reference 1) over --train-mfu
  video       = core seconds of the overviews and windows over a rank's decoders. Windows are
                decoded while the rank samples, overviews of the next step also while it trains
  sync        = bytes of the weights over --link

No line was compared with a GPU. Rates and response lengths are guesses, which you can change by
flags. The costs of decoding are those of bench/peers.py on CPUs. The ratio of two lines depends
less on the guesses than one line does. Every GPU is an H100 unless you give other rates.

  python bench/step_model.py 8B --gpus 8 --cores 64
"""
import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from tools import plan

BUDGETS = (4, 8, 16, 32, 64)  # K of training


def training_flops(text, layers, tokens, trained, pairs):
    """FLOPs of forward and backward: 6 per token and weight of the layers (`layers` weights), 6 per
    trained token and weight of the head, 12 per visible (query, key) pair, head dimension and
    layer. Recomputed work does not count, and a shared prompt counts once."""
    weights = layers * tokens + text.vocab_size * text.hidden_size * trained
    # 12: two products forward (scores, values), four backward, 2 FLOPs per multiply-add.
    width = text.num_attention_heads * text.head_dim * text.num_hidden_layers
    return 6 * weights + 12 * pairs * width


def tower_flops(vision, patches, of_frame):
    """FLOPs of a forward of the vision tower. of_frame: patches of a frame, which see each other.
    The mergers run once per square of merge x merge patches. The table of places is no product."""
    width, square = vision.hidden_size, vision.spatial_merge_size**2
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    block = 4 * width**2 + 2 * width * vision.intermediate_size + 2 * of_frame * width
    merger = (square * width + vision.out_hidden_size) * width  # of a patch
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    return 2 * patches * (embedding + vision.depth * block + mergers * merger)


def tree_pairs(prompt, responses=()):
    """Number of visible (query, key) pairs of one tree; lengths in tokens."""
    return prompt * (prompt + 1) // 2 + sum(r * prompt + r * (r + 1) // 2 for r in responses)


def forward_operations(config, counts, tokens, sampled, pairs):
    """Multiplications and additions of one forward: a third of forward and backward together.
    sampled: tokens that pass the head. pairs: visible (query, key) pairs of attention."""
    text, layers = config.text_config, counts["layers"]
    return training_flops(text, layers, tokens, sampled, pairs) / 3


def step(config, args):
    """-> {part: seconds} of one step of a rank. Shapes are means over K."""
    text, n = config.text_config, plan.parameter_counts(config)
    weights = n["layers"] + text.vocab_size * text.hidden_size  # with the head
    cached = 4 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim  # K, V in bf16
    peak = args.tflops * 1e12
    prompts = args.prompts / args.gpus  # of this rank
    rollouts = prompts * args.group
    frame = args.pixels / 1024 + 12  # tokens: patches of 32 x 32 pixels, and the time before them
    prompt = args.prompt_tokens or args.text + frame * sum(BUDGETS) / len(BUDGETS)
    window = args.text / 4 + frame * args.window_frames  # of a sub-agent
    calls = rollouts * args.kappa
    sampled = args.turn + args.answer  # of the main agent
    response = sampled + args.kappa * args.summary  # with the summaries in between

    # The group's prompt is computed once, because the prefix cache keeps it.
    of_frame = args.pixels / 256  # patches
    patches = of_frame * (prompts * (prompt - args.text) / frame + calls * args.window_frames)
    prefill = forward_operations(
        config, n, prompts * prompt + calls * window, 0,
        prompts * tree_pairs(prompt) + calls * tree_pairs(window))
    prefill += tower_flops(config.vision_config, patches, of_frame)
    prefill /= peak * args.prefill_mfu
    # One chain after the other: the longest first turn, the longest summary, the longest answer.
    steps = args.tail * sampled + (args.tail * args.summary if args.kappa else 0)
    held = rollouts * (prompt / args.group + response) / args.tail * cached  # bytes in use
    loaded = (2 * args.engine_bits / 16 * weights + held) / (args.bandwidth * 1e12)
    decode = steps * (loaded + args.launch_ms / 1e3)
    gpu = prefill + decode

    # As video.decode_threads: a rank's share of the cores of its node, but for one.
    decoders = min(32, max(2, args.cores // min(8, args.gpus) - 1))
    windows = calls * args.window_core_s / decoders
    overviews = prompts * args.overview_core_s / decoders

    tokens = prompts * (prompt + args.group * response)
    pairs = prompts * tree_pairs(prompt, [response] * args.group)
    passes = 3 + (args.recompute == "full") + (args.kl > 0)
    update = passes * forward_operations(config, n, tokens, rollouts * sampled, pairs)
    update /= peak * args.train_mfu
    sync = 2 * weights / (args.link * 1e9)
    # 16 bytes a parameter are read and written: master weight, two moments, gradient.
    optimizer = 2 * 16 * weights / args.gpus / (args.bandwidth * 1e12)
    sampling = max(gpu, windows)
    waiting = max(0.0, windows + overviews - sampling - update)  # for overviews of the next step
    parts = {"prefill": prefill, "decode": decode, "windows": windows, "overviews": overviews,
             "rollouts": sampling, "update": update, "optimizer": optimizer, "sync": sync,
             "waiting": waiting}
    return {**parts, "step": sampling + update + optimizer + sync + waiting, "prompt": prompt}


def split(config, args, samplers):
    """Seconds of a step if `samplers` of the GPUs sample and the others train, one step off policy:
    both work at once, each for the whole batch. All videos of a step are decoded in its time, and
    the samplers have all cores. Memory is not looked at."""
    share = {count: step(config, argparse.Namespace(**{**vars(args), "gpus": count}))
             for count in (samplers, args.gpus - samplers)}
    training = share[args.gpus - samplers]
    trained = training["update"] + training["optimizer"]
    sampling = share[samplers]
    video = sampling["windows"] + sampling["overviews"]
    return max(sampling["rollouts"], trained, video) + training["sync"]


def variants():
    """-> [(name, flags that differ)]."""
    film = {"overview_core_s": 6.7, "window_core_s": 0.9}  # an hour, bench/peers.py
    return [
        ("as given", {}),
        ("16 cores a node", {"cores": 16}),
        ("192 cores a node", {"cores": 192}),
        ("films of an hour", film),
        ("films of an hour, 16 cores", {**film, "cores": 16}),
        ("films of an hour, 192 cores", {**film, "cores": 192}),
        ("3 calls per rollout", {"kappa": 3.0}),
        ("turns of 1200 tokens, longest 4000", {"turn": 800, "answer": 400, "tail": 3.3}),
        ("prompts of 31,000 tokens", {"prompt_tokens": 31000}),
        ("prompts of 64,000 tokens", {"prompt_tokens": 64000}),
        ("prompts of 128,000 tokens", {"prompt_tokens": 128000}),
        ("no reference (--kl 0)", {"kl": 0.0}),
        ("no reference, no recomputation", {"kl": 0.0, "recompute": "none"}),
        ("engine in fp8", {"engine_bits": 8}),
        ("32 GPUs on 4 nodes", {"gpus": 32}),
    ]


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("size", metavar="SIZE", help="2B, 4B, 8B, 32B or a checkpoint folder")
    add("--gpus", type=int, default=8, help="ranks, all nodes together, 8 of a node at most")
    add("--cores", type=int, default=64, help="CPU cores of a node")
    add("--prompts", type=int, default=32, help="prompts per step, as in grpo.py")
    add("--group", type=int, default=8, help="rollouts per prompt")
    add("--pixels", type=int, default=50176, help="pixels of a frame")
    add("--text", type=int, default=600, help="tokens of a prompt beside its frames")
    add("--prompt-tokens", type=int, default=0, help="mean prompt; 0 = text and frames of mean K")
    add("--kappa", type=float, default=1.4, help="calls per rollout")
    add("--window-frames", type=int, default=16, help="frames of a window")
    add("--turn", type=int, default=300, help="tokens of the turns with calls")
    add("--answer", type=int, default=150, help="tokens of the last turn")
    add("--summary", type=int, default=100, help="tokens of a summary")
    add("--tail", type=float, default=3.0, help="longest over mean number of tokens in a batch")
    add("--recompute", choices=["full", "none"], default="full", help="as in grpo.py")
    add("--kl", type=float, default=0.01, help="0 = no reference")
    add("--engine-bits", type=int, choices=[8, 16], default=16, help="of the engine's weights")
    add("--overview-core-s", type=float, default=4.4, help="core seconds of an overview of mean K "
        "(two minutes of 720p)")
    add("--window-core-s", type=float, default=0.9, help="core seconds of a window")
    add("--tflops", type=float, default=989.0, help="peak of dense bf16")
    add("--prefill-mfu", type=float, default=0.45, help="of that peak, in the engine's prefill")
    add("--train-mfu", type=float, default=0.35, help="of that peak, in the update")
    add("--bandwidth", type=float, default=2.3, help="TB/s of GPU memory, as reached")
    add("--launch-ms", type=float, default=3.0, help="host time of an engine step, milliseconds")
    add("--link", type=float, default=100.0, help="GB/s at which a rank receives whole weights")
    args = parser.parse_args()
    if min(args.gpus, args.cores, args.prompts, args.group, args.window_frames) < 1:
        raise launch.UserError("--gpus, --cores, --prompts, --group and --window-frames must be at "
                               "least 1")
    config = plan.read_config(args.size)
    head = "prefill decode windows overviews rollouts update sync waiting step".split()
    print(f"{'seconds of a step, by arithmetic':<36}" + "".join(f"{name:>10}" for name in head)
          + f"{'against':>9}")
    base = None
    for name, more in variants():
        parts = step(config, argparse.Namespace(**{**vars(args), **more}))
        base = base or parts
        print(f"{name:<36}" + "".join(f"{parts[column]:>10.1f}" for column in head)
              + f"{base['step'] / parts['step']:>8.2f}x")
    for samplers in sorted({args.gpus // 2, args.gpus * 3 // 4}) if args.gpus > 1 else []:
        apart = split(config, args, samplers)
        name = f"{samplers} sample, {args.gpus - samplers} train"
        print(f"{name:<36}{apart:>{10 * len(head)}.1f}{base['step'] / apart:>8.2f}x")


if __name__ == "__main__":
    launch.run_main(main)
