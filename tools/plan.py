"""
plan.py (tests/test_plan.py): the memory that a model size takes, per GPU and per node, before you
rent the machine.

  python tools/plan.py 8B --gpus 8 --gpu-gb 80 --max-model-len 32768

The numbers are calculated from the configuration alone. tests/slow/test_fake_gpu.py compares them
with traced steps (the peak within 10%, the memory between steps within 1%, at the widths of 8B and
2B). They have not been compared with a GPU. The engine's activations and CUDA graphs are an
estimate.
The exit code is 1 if a phase or the engine does not fit.
"""
import bisect
import json
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import launch
from plumbing import arguments

PHASE = 11  # columns of a number in the table
# Bytes that vLLM keeps while it sleeps: CUDA graphs and libraries. Others report 0.8 to 1.5 GB;
# tools/gpu_check.py measures them.
ENGINE_ASLEEP = 1.5e9
SEQUENCES = 64  # that the engine samples at once, the default of --set max_num_seqs


def public_config(hidden, layers, heads, intermediate, tied, depth, width, inner, levels):
    """The sizes in config.json of a public dense checkpoint, Qwen/Qwen3-VL-*-Instruct."""
    text = {"vocab_size": 151936, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": intermediate}
    vision = {"depth": depth, "hidden_size": width, "intermediate_size": inner, "in_channels": 3,
              "deepstack_visual_indexes": levels, "num_position_embeddings": 2304, "num_heads": 16,
              "out_hidden_size": hidden, "patch_size": 16, "temporal_patch_size": 2,
              "spatial_merge_size": 2}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def public_sizes():
    small, large = (24, 1024, 4096, [5, 11, 17]), (27, 1152, 4304, [8, 16, 24])  # towers
    delta = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
             "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_key_value_heads": 4,
             "head_dim": 256, "vocab_size": 248320, "full_attention_interval": 4}
    newer = public_config(4096, 32, 16, 12288, False, *large[:3], [])
    newer["text_config"] |= delta
    return {"2B": public_config(2048, 28, 16, 6144, True, *small),
            "4B": public_config(2560, 36, 32, 9728, True, *small),
            "8B": public_config(4096, 36, 32, 12288, False, *large),
            "32B": public_config(5120, 64, 64, 25600, False, *large), "3.5-9B": newer}


def read_config(name):
    """A public size ("8B") or a checkpoint folder -> the configuration, as objects. Neither torch
    nor transformers is loaded, which takes seconds."""
    if name in public_sizes():
        config = public_sizes()[name]
    elif os.path.isdir(name):
        config = launch.parse_json(launch.read_file(os.path.join(name, "config.json")))
    else:
        raise launch.UserError(f"{name}: neither one of {', '.join(public_sizes())} nor a folder "
                               "with a config.json")
    return json.loads(json.dumps(config), object_hook=lambda fields: SimpleNamespace(**fields))


def parameter_counts(config):
    """-> {"layer", "layers", "root", "tower", "trained", "sides"}: parameters of the largest
    decoder layer, of all layers, of embeddings, head and last norm, of the tower, and of all
    trained weights; "sides": rows + columns of all matrices in the layers. Times the rank, that is
    the size of an adapter."""
    text, vision, kinds = config.text_config, config.vision_config, layer_kinds(config.text_config)
    hidden, d = text.hidden_size, text.head_dim
    heads, shared = text.num_attention_heads * d, text.num_key_value_heads * d
    gates = 1 + ("linear_attention" in kinds)  # Qwen3.5 also gates the output of attention
    # Shapes of the matrices of a layer, and its other parameters.
    matrices = {"full_attention": [gates * heads, shared, shared, heads]}
    others = {"full_attention": 2 * hidden + 2 * d}
    if gates > 1:
        (mixed, values), n = delta_sizes(text), text.linear_num_value_heads
        matrices["linear_attention"] = [mixed, values, n, n, values]
        others["linear_attention"] = (2 * hidden + mixed * text.linear_conv_kernel_dim + 2 * n
                                      + text.linear_value_head_dim)
    for sides in matrices.values():  # the other side of each is `hidden`
        sides += 3 * [text.intermediate_size]
    layer = {kind: hidden * sum(matrices[kind]) + others[kind] for kind in matrices}
    layers = sum(layer[kind] for kind in kinds)
    root = text.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    width, inner = vision.hidden_size, vision.intermediate_size
    merged, out = vision.spatial_merge_size**2 * width, vision.out_hidden_size
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tower = ((patch + 1 + vision.num_position_embeddings + 2) * width + 2 * levels * merged
             + vision.depth * (4 * width * width + 2 * width * inner + 9 * width + inner)
             + (1 + levels) * (merged * merged + merged + merged * out + out))
    return {"layer": max(layer[kind] for kind in kinds), "layers": layers, "root": root,
            "tower": tower, "trained": layers + root,
            "sides": sum(hidden + side for kind in kinds for side in matrices[kind])}


def layer_kinds(text):
    """Kinds of the decoder layers: "full_attention", or "linear_attention" (gated-delta)."""
    every = getattr(text, "full_attention_interval", None) or 1
    return getattr(text, "layer_types", None) or [
        "linear_attention" if n % every else "full_attention"
        for n in range(1, text.num_hidden_layers + 1)]


def delta_sizes(text):
    """-> (numbers of queries, keys and values of one token, of its values) in a gated-delta layer.
    """
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return 2 * text.linear_num_key_heads * text.linear_key_head_dim + values, values


def delta_activation_bytes(text, width):
    """As layer_activation_bytes, of a gated-delta layer with flash-linear-attention's kernels."""
    (mixed, values), heads = delta_sizes(text), text.linear_num_value_heads
    norms = 2 * text.hidden_size * (3 * width if width == 4 else 4 + 2 * width)
    # Queries, keys and values as projected, padded, convolved and activated; queries and keys once
    # per value head; the kernel's chunks of 64; output, its norm and gate.
    inner = (4 * mixed + 3 * values) * width + heads * 64 * width + 4 * values * width
    return norms + inner + 5 * 4 * heads + 4 * text.intermediate_size * width


def layer_activation_bytes(text, width, repeated=False, kind="full_attention"):
    """Bytes per token that autograd keeps inside one decoder layer without recomputation. width:
    bytes of a number in compute (2: bf16, whose norms keep fp32 copies). repeated: keys and values
    are repeated for every head, as on CPU."""
    if kind != "full_attention":
        return delta_activation_bytes(text, width)
    hidden, inner, d = text.hidden_size, text.intermediate_size, text.head_dim
    heads, shared = text.num_attention_heads, text.num_key_value_heads
    # Two norms per layer keep their input in fp32, normalised, and scaled. The norms of queries and
    # keys keep the same, but attention holds the last form. Then: queries, keys, values and output
    # of attention; statistics of norms and softmax.
    norms = 2 * hidden * (3 * width if width == 4 else 4 + 2 * width)
    rotated = (heads + shared) * d * (2 * width if width == 4 else 4 + width)
    attention = (5 * heads if repeated else 2 * heads + 2 * shared) * d * width
    statistics = 4 * (2 + 2 * heads + shared)
    if len(set(layer_kinds(text))) > 1:  # Qwen3.5 also gates the output of attention
        attention += 3 * heads * d * width
    mlp = 4 * inner * width  # gate, activated gate, up, their product
    return norms + rotated + attention + mlp + statistics


def memory_use(config, gpus, pack_tokens, recompute=True, replicas=1, reference=True,
               engine_gb=None, width=2, chunk=1024, repeated=False, feature_cache_gb=1.0,
               counts=None, lora=0):  # fmt: skip
    """Bytes per GPU -> {phase: {item: bytes}}: "rollout" and "sync" (only with an engine), then
    three moments of a backward. In "top layer" all activations are still there. In "low layer" they
    are gone, and the gradients of the other layers are there. In "embeddings" no layer is whole,
    but the root's gradients are there twice. An update takes the largest of the three, not their
    sum.

    gpus: ranks. engine_gb: GB that vLLM takes while awake (None: no engine). width: bytes of a
    number in compute (CPU: 4). counts: parameter_counts, if the caller has them. lora: rank of
    adapters. The other weights are then frozen, stored in the compute dtype and without gradients.
    The reference shares them and has its own adapters.
    """
    text, n = config.text_config, counts or parameter_counts(config)
    shards, hidden = gpus // replicas, text.hidden_size
    of_kind = {k: layer_activation_bytes(text, width, repeated, k) for k in layer_kinds(text)}
    inner = max(of_kind.values())
    # per token, in all layers
    stored = sum(hidden * width if recompute else of_kind[k] for k in layer_kinds(text))
    head = width * text.vocab_size * hidden  # the largest matrix
    trained = lora * n["sides"] if lora else n["trained"]
    resting = {"weights, fp32 shard": 4 * trained / shards,
               "AdamW moments, fp32 shard": 8 * trained / shards,
               "vision tower": width * n["tower"], "vision features kept": feature_cache_gb * 2**30}
    if lora:
        resting["frozen weights, shard"] = width * n["trained"] / shards
    if reference:
        resting["reference, shard"] = (4 * trained if lora else width * trained) / shards
    phases = {}
    if engine_gb is not None:
        awake = {**resting, "vLLM": engine_gb * 1e9}
        phases = {"rollout": awake, "sync": {**awake, "one weight whole, and cast": 2 * head}}
        resting["vLLM, asleep"] = ENGINE_ASLEEP
    # The part of one layer that is computed again, with the largest gradients. Before the backward
    # of the first layer, the logits stand in the same place.
    recomputed = hidden * width if recompute else inner
    one = pack_tokens * (inner - recomputed + width * (3 * text.intermediate_size + 5 * hidden))
    logits = chunk * text.vocab_size * (8 + width)
    layer = {**resting, "root whole, gradient of its head": width * n["root"] + head * (not lora),
             "two layers whole, one's gradients": n["layer"] * (2 * width + (0 if lora else 4)),
             "one layer in backward, or logits": max(one, logits)}
    gradients = {"gradients of layers, fp32 shard": 4 * (trained if lora else n["layers"]) / shards}
    ends = hidden * (6 if width == 2 else 8) + 2 * text.head_dim * width  # embeddings, rotary table
    activations = {"activations kept": (stored + ends) * pack_tokens}
    root = {"root's gradients, as made and fp32": 0 if lora else n["root"] * (width + 4)}
    return {**phases, "top layer": {**layer, **activations}, "low layer": {**layer, **gradients},
            "embeddings": {**resting, **gradients, **root}}


def peak(phases):
    """Ledger -> bytes of the phase that takes most."""
    return max(sum(items.values()) for items in phases.values())


def largest_pack(config, gpu_gb, **options):
    """Tokens of the largest pack whose update fits into gpu_gb GB; 0 if the weights alone do not
    fit."""
    options.setdefault("counts", parameter_counts(config))

    return max(0, bisect.bisect(range(2**24), False, key=lambda tokens: peak(
        memory_use(config, pack_tokens=tokens, **options)) > gpu_gb * 1e9) - 1)


def host_memory(n, ranks, frame_cache_gb, width=2, lora=0):
    """Bytes of host memory on the node of rank 0 while it writes a checkpoint -> {item: bytes}.
    n: parameter_counts; ranks: of the node. Shards go to the disk tensor by tensor."""
    full = 4 * lora * n["sides"] if lora else width * (n["trained"] + n["tower"])
    return {"whole weights on rank 0": full, "decoded frames": frame_cache_gb * 2**30 * ranks}


def state_bytes(text):
    """Bytes of the states of one sequence in vLLM: of each gated-delta layer the matrix of every
    value head in fp32, and the last inputs of its convolution."""
    layers = layer_kinds(text).count("linear_attention")
    if not layers:
        return 0
    mixed, values = delta_sizes(text)
    return layers * (4 * values * text.linear_key_head_dim
                     + 2 * mixed * (text.linear_conv_kernel_dim - 1))


def profile_bytes(config, gpu_gb):
    """Bytes that vLLM 0.32 takes from its share beside weights and KV cache. An estimate, read from
    its source, never compared with a GPU.

    At its start vLLM runs the tower, then the decoder, on a full step. It sets the peak of the
    activations aside, and the memory of CUDA graphs and libraries, for which 1 GB stands here.
    """
    text, vision = config.text_config, config.vision_config
    # Tokens of a step by default. An A100 has the smaller number: then the plan is too careful.
    tokens = 16384 if gpu_gb * 1e9 >= 70 * 2**30 else 8192
    # Embeddings and deepstack levels: the tower's output, and once more the decoder's buffers.
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    features = 2 * tokens * text.hidden_size * levels
    # The largest moment of a layer is its MLP: residual, input, and the wide tensors.
    decoder = 2 * tokens * (2 * text.hidden_size + 3 * text.intermediate_size)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tower = 2 * (2 * vision.hidden_size + 2 * vision.intermediate_size) + 4 * patch  # of a patch
    tower *= tokens * vision.spatial_merge_size**2
    return max(decoder + features, tower) + features + 1e9


def plan_text(config, gpus, gpu_gb, context, pack_tokens, engine_share=0.5, frame_cache_gb=4.0,
              **options):  # fmt: skip
    """Memory use as a table, with a verdict -> (text, whether all phases and the engine fit)."""
    n = options["counts"] = parameter_counts(config)
    text, engine_gb = config.text_config, engine_share * gpu_gb if engine_share else None
    phases = memory_use(config, gpus, pack_tokens, engine_gb=engine_gb, **options)
    limit = 0.94 * gpu_gb  # CUDA, NCCL and fragments take the rest
    trained = options.get("lora", 0) * n["sides"] or n["trained"]
    lines = [f"{trained / 1e9:.2f} B trained parameters, {n['tower'] / 1e9:.2f} B in the "
             f"frozen tower; GB per GPU, of {gpus} with {gpu_gb:g} each",
             table_row("", phases)]
    for item in dict.fromkeys(item for phase in phases.values() for item in phase):
        cells = [phase.get(item) for phase in phases.values()]
        lines.append(table_row(item, ["-" if c is None else f"{c / 1e9:.1f}" for c in cells]))
    totals = {name: sum(items.values()) / 1e9 for name, items in phases.items()}
    lines.append(table_row("sum", [f"{total:.1f}" for total in totals.values()]))
    over = [name for name, total in totals.items() if total > limit]
    verdict = f"does not fit while: {', '.join(over)}" if over else "each phase fits"
    lines.append(f"{verdict} (limit {limit:.1f} GB)")
    largest = largest_pack(config, limit, gpus=gpus, engine_gb=engine_gb, **options)
    lines.append(f"largest pack: {largest} tokens (--pack-tokens {pack_tokens})")
    ranks = min(gpus, 8)
    host = host_memory(n, ranks, frame_cache_gb, lora=options.get("lora", 0))
    parts = ", ".join(f"{size / 1e9:.0f} {item}" for item, size in host.items())
    lines.append(f"host memory of a node of {ranks} ranks while it saves: "
                 f"{sum(host.values()) / 1e9:.0f} GB ({parts})")
    lines.append("  not counted: processes and their libraries, the engine, decoders, and files "
                 "that the system keeps in memory")
    if engine_share:
        weights = 2 * (n["trained"] + n["tower"])
        attending = layer_kinds(text).count("full_attention")
        per_token = 4 * attending * text.num_key_value_heads * text.head_dim  # K, V
        profile, states = profile_bytes(config, gpu_gb), SEQUENCES * state_bytes(text)
        tokens = max(0, int((engine_gb * 1e9 - weights - profile - states) / per_token))
        enough = tokens >= context
        lines.append(f"vLLM: {weights / 1e9:.1f} GB of weights, about {profile / 1e9:.1f} of "
                     f"activations and CUDA graphs, KV cache for {tokens} tokens: "
                     f"{tokens / context:.1f} contexts of {context} at once"
                     + ("" if enough else "; NOT ONE: raise its share or lower --max-model-len"))
        over += [] if enough else ["vLLM"]
    return "\n".join(lines), not over


def table_row(head, cells):
    return f"{head:<36}" + "".join(f"{cell:>{PHASE}}" for cell in cells)


def main():
    parser = arguments.parser(__doc__)
    add = parser.add_argument
    add("size", metavar="SIZE", help="2B, 4B, 8B, 32B (Qwen3-VL), 3.5-9B or a checkpoint folder")
    add("--gpus", type=int, default=8, help="ranks, all nodes together")
    add("--gpu-gb", type=float, default=80.0, help="GB of one GPU")
    add("--max-model-len", type=int, default=32768, help="tokens of one context")
    add("--pack-tokens", type=int, default=49152, help="as in grpo.py; the default of sft.py is "
        "32768. A pack is never below one context")
    parser.add_setting("gradient_checkpointing", "as in grpo.py", True)
    parser.add_setting("dp_replicate", "as in grpo.py", 1)
    add("--beta", type=float, default=0.01, help="0 = no reference model")
    add("--lora-rank", type=int, default=0, help="rank of adapters, as in grpo.py; 0 = off")
    add("--gpu-memory-utilization", type=float, default=0.5, help="as grpo.py; 0: none (sft.py)")
    parser.add_setting("frame_cache_gb", "as in grpo.py: GiB per rank", 4.0)
    args = parser.parse_args()
    args.dp_replicate = args.dp_replicate or args.gpus  # 0: every rank holds the whole
    positive = min(args.gpus, args.max_model_len, args.pack_tokens, args.dp_replicate) >= 1
    if (not positive or args.gpus % args.dp_replicate or not args.gpu_gb > 0
            or not 0 <= args.gpu_memory_utilization < 1):
        raise launch.UserError("--gpus, --gpu-gb, --max-model-len and --pack-tokens must be "
                               "above 0, dp_replicate 0 or a divisor of --gpus, "
                               "--gpu-memory-utilization below 1")
    config = read_config(args.size)
    with chat.as_user_error(args.size, "config.json"):  # a text where a number belongs
        text, fits = plan_text(
            config, args.gpus, args.gpu_gb, args.max_model_len,
            max(args.pack_tokens, args.max_model_len), args.gpu_memory_utilization,
            args.frame_cache_gb, recompute=args.gradient_checkpointing,
            replicas=args.dp_replicate, reference=args.beta > 0, lora=args.lora_rank)  # fmt: skip
    print(text)
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    launch.run_main(main)
