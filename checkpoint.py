"""
checkpoint.py: checkpoint folders: open and check them, load them in shards, train adapters on them,
save runs and go on with them.

  a checkpoint   the small files of its base, byte for byte but for the dtype; and whole weights in
                 safetensors, or adapters in the layout of peft on whole weights (--lora)
  a run          out/step_NNNNNN/ = a checkpoint, train_state/ and state.json, which is written last
                 and lists size and CRC-32 of every other file; out/last and out/best link to them

A checkpoint that cannot be used is refused in one line before any long work. Nothing in a
checkpoint is ever run. A folder appears under its final name only when it is whole on the disk.

Departs from transformers' save_pretrained: it rewrites configuration and tokenizer in its own
dialect, which older versions cannot read.

Reads and writes checkpoint folders; sft.py, grpo.py, rollout.py, eval.py and toy.py call it.
"""
import argparse
import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import model  # isort: skip  (before torch: model.py tells a terminal that torch is loading)
import torch
import torch.nn.functional as F

import chat
import launch

# ------------------------------------------------------------------------------------------------
# Opening a checkpoint


def resolve_checkpoint(path):
    """A checkpoint folder, or the run folder that holds one under `last` -> the folder that
    `from_pretrained` opens. Checks its files and those of its base, and runs no code in them.
    Raises UserError that names the fault and the remedy."""
    folder = chat.find_config(path)
    # Without tokenizer_config.json transformers guesses the tokenizer's class, and another class
    # gives other ids. transformers 5 saves the image processor inside processor_config.json.
    needed = [("tokenizer.json",), ("tokenizer_config.json",),
              ("preprocessor_config.json", "processor_config.json")]
    for names in needed:
        if not any(os.path.isfile(os.path.join(folder, name)) for name in names):
            raise launch.UserError(f"checkpoint {folder}: {names[0]} is missing; copy it from the "
                                   "checkpoint that this one was made from")
    chat.read_object(os.path.join(folder, "tokenizer.json"))  # some readers take a cut-off file
    base = base_of(folder, check=True)
    stored = stored_weights(base)  # once: a large checkpoint has a dozen files of headers
    check_layers(base, stored)
    hf = meta_model(base)
    names = dict(hf.named_parameters())
    check_weights(base, names, stored)
    # A tied head may be stored beside the embeddings; any other weight would be left out silently.
    known = chat.bases()[hf.config.model_type].unused  # but these, which no loader takes
    strange = set(stored) - set(hf.state_dict())
    if unused := sorted(name for name in strange if not name.startswith(known)):
        raise launch.UserError(f"checkpoint {base}: {unused[0]} is stored, but config.json "
                               "describes a model without it; copy config.json again")
    check_values(base)
    if strange := sorted(set(read_adapters(folder)) - set(names)):
        raise launch.UserError(f"checkpoint {folder}: its adapters are for {strange[0]}, which the "
                               "base does not have")
    return os.path.realpath(folder)


def check_layers(ckpt: str, stored: dict) -> None:
    """Raises UserError unless config.json names as many decoder layers as are stored. This comes
    before the model is built, because a wrong number may build for minutes."""
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in stored
              if re.search(r"\.language_model\.layers\.[0-9]+\.", name)}
    text = chat.read_object(os.path.join(ckpt, "config.json")).get("text_config")
    named = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if layers and named is not None and named != len(layers):
        raise launch.UserError(f"checkpoint {ckpt}: {len(layers)} decoder layers are stored, "
                               f"config.json names {named}; copy config.json again")


def meta_model(ckpt):
    """Checkpoint folder -> transformers' model on the meta device: names and shapes, no memory."""
    config = chat.load_config(ckpt)
    with chat.reading(ckpt, "config.json"), torch.device("meta"):
        hf = model_class(config)(config)
    hf.tie_weights()
    return hf


def model_class(config):
    """transformers' configuration -> transformers' class of the whole model."""
    import transformers

    return getattr(transformers, chat.bases()[config.model_type].model_class)


def stored_weights(folder):
    """Every safetensors header of a checkpoint -> {weight: (shape, dtype)}. Raises UserError for a
    missing shard, a truncated file, a weight that is stored twice, and quantized weights: now, not
    after the models are built."""
    from safetensors import SafetensorError, safe_open

    names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    index = os.path.join(folder, "model.safetensors.index.json")
    listed = None  # weight -> file, if there are several files
    if os.path.isfile(index):
        listed = chat.read_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise launch.UserError(f"{index} has no weight_map; copy it again")
        if missing := sorted(set(map(str, listed.values())) - set(names)):
            raise launch.UserError(f"checkpoint {folder}: {missing[0]} is missing, which the index "
                                   "names; download it again")
    if not names:
        raise launch.UserError(f"checkpoint {folder}: no .safetensors file; only safetensors are "
                               "loaded, no .bin, no GGUF: take or save the checkpoint in that "
                               "format")
    found, where = {}, {}
    for name in names:
        try:
            with safe_open(os.path.join(folder, name), "pt") as f:
                slices = {key: f.get_slice(key) for key in f.keys()}
                headers = {k: (list(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
        except (SafetensorError, OSError) as e:
            raise launch.UserError(f"checkpoint {folder}: {name} cannot be read ({e}); copy it "
                                   "again") from None
        for key, (_, dtype) in headers.items():
            if key in where:  # loaders differ in which of the two they take
                raise launch.UserError(f"checkpoint {folder}: {key} is in {where[key]} and in "
                                       f"{name}; delete the file that does not belong here")
            if dtype not in ("BF16", "F16", "F32"):
                raise launch.UserError(f"checkpoint {folder}: {key} in {name} is stored as "
                                       f"{dtype}, and quantized weights cannot be trained; give a "
                                       "checkpoint in BF16, F16 or F32")
            where[key] = name
        found.update({k: v for k, v in headers.items() if listed is None or listed.get(k) == name})
    return found


def check_weights(ckpt: str, weights: dict, stored: dict) -> str:
    """-> the dtypes in which the checkpoint stores these weights. Raises UserError unless it holds
    each of them in its shape. stored: see stored_weights."""
    missing = sorted(set(weights) - set(stored))
    if missing:
        raise launch.UserError(f"checkpoint {ckpt}: {len(missing)} weights are missing, for "
                               f"example {missing[0]}; download it again")
    for name, weight in weights.items():
        if stored[name][0] != list(weight.shape):
            raise launch.UserError(f"checkpoint {ckpt}: {name} has shape {stored[name][0]}, the "
                                   f"configuration says {list(weight.shape)}; the two are not of "
                                   "one checkpoint, copy it again")
    return "/".join(sorted({stored[name][1] for name in weights}))


def check_values(ckpt):
    """Raises UserError for a weight that is no number and for a matrix of zeros, as a download that
    was cut off leaves it. Reads small weights whole and some rows of large ones."""
    from safetensors import safe_open

    for name in sorted(n for n in os.listdir(ckpt) if n.endswith(".safetensors")):
        with safe_open(os.path.join(ckpt, name), "pt") as f:
            for key in f.keys():
                weight = f.get_slice(key)
                shape = weight.get_shape()
                stride = 1 if math.prod(shape) < 2**20 else 1 + shape[0] // 8
                some = torch.cat([weight[i:i + 1].flatten() for i in range(0, shape[0], stride)])
                wrong = "a value that is no number" if not some.isfinite().all() else (
                    "zeros alone" if len(shape) > 1 and not some.any() else None)
                if wrong:
                    raise launch.UserError(f"checkpoint {ckpt}: {key} holds {wrong}; copy {name} "
                                           "again, or take an older checkpoint")


def content_digest(ckpt):
    """Digest of the content of a checkpoint folder, wherever the folder lies. Small files count
    whole, weights with 4 KiB of every MiB, because 16 GB would take minutes to read."""
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(os.listdir(ckpt)):
        weights = name.endswith(".safetensors")
        if not weights and not name.endswith((".json", ".jinja", ".txt")) or name == "state.json":
            continue  # a README, an optimizer, the state of its training
        path = os.path.join(ckpt, name)
        if not os.path.isfile(path):  # a folder of that name, or a link to a file that is gone
            continue
        if name == "adapter_config.json":  # counts with its base's digest, not with the base's path
            config = chat.read_object(path)
            config.pop("base_model_name_or_path", None)
            digest.update(json.dumps(config, sort_keys=True).encode())
            continue
        size = os.path.getsize(path)
        stride = 2**20 if weights and size > 2**26 else 2**12  # bytes; 2**12 reads all of a file
        digest.update(f"{name} {size}".encode())
        with open(path, "rb") as f:
            for at in range(0, size, stride):
                f.seek(at)
                digest.update(f.read(2**12))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------
# Into a policy, in shards


def load_sharded(ckpt, codec, device, recompute="none", replicas=1, frozen=False, lora=0,
                 tower=False):
    """Checkpoint folder -> sharded Policy. Collective; no rank ever holds a whole copy.

    The model is built on the meta device, then every rank reads its own rows from the safetensors
    files. Trained weights are fp32 whatever the files hold. replicas: see shard. frozen: a
    reference without gradients, in its compute dtype; tower: with its tower, else it receives
    features.
    lora: rank of the adapters, all else is frozen; 0: all weights are trained. For a checkpoint of
    adapters pass their own rank, see adapter_rank.
    """
    import torch.distributed.checkpoint as dcp

    assert lora or adapter_config(ckpt) is None, f"{ckpt} holds adapters: pass their rank"
    hf = meta_model(ckpt)
    if codec.base.recurrent:
        try:
            model.delta_kernel(device)
        except ImportError as e:
            raise launch.UserError(f"no kernels for gated-delta layers ({e}): pip install "
                                   "flash-linear-attention==0.6.0") from None
    # Published configurations say bf16. A step of 2e-6 would round to nothing in bf16.
    hf.float()
    if frozen or lora:
        hf.requires_grad_(False)
        hf.to(model.compute_dtype(device))
        for name, p in hf.named_parameters():
            if name.endswith(codec.base.exact):
                p.data = p.data.float()
    if lora:
        add_adapters(hf, lora)
    policy = shard(model.as_policy(hf, codec, device, recompute), device, replicas)
    if frozen:
        hf.model.visual = hf.model.visual if tower else None
        if hasattr(policy, "set_reshard_after_forward"):
            # FSDP keeps the root whole after a forward, for a backward that never comes here.
            policy.set_reshard_after_forward(True, recurse=False)
    policy.to_empty(device=device)
    hf.tie_weights()  # to_empty unties weights that are not in shards
    # Rotary tables are computed, not stored, so they are made anew on the device.
    rotary = [(hf.model.language_model, "rotary_emb")]
    rotary += [(hf.model.visual, "rotary_pos_emb")] if hf.model.visual else []
    for owner, name in rotary:
        old = getattr(owner, name)
        setattr(owner, name, type(old)(old.config).to(device))
    weights = {name: p.detach() for name, p in hf.named_parameters() if ".lora_" not in name}
    policy.base = base_of(ckpt)
    policy.stored_as = check_weights(policy.base, weights, stored_weights(policy.base))
    policy.digest = content_digest(policy.base) if lora else None  # adapters are saved with it
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(policy.base))
    if lora:
        start_adapters(hf, read_adapters(ckpt))
    if frozen:
        hf.requires_grad_(False)  # adapters too
    wrong = [n for n, p in hf.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    assert not wrong, f"trained weights that are not fp32: {wrong[:3]}"
    return policy


def shard(policy, device, replicas=1):
    """FSDP2: one group per decoder layer, one for the rest (embeddings, head, norm). The frozen
    tower stays replicated.

    On a GPU: fp32 shards, bf16 compute, fp32 gradient reduction. replicas: groups of ranks that
    each hold the whole model in shards (HSDP). With one group per node, weights are gathered inside
    a node and only gradients cross between nodes. 0: as many groups as ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    replicas = replicas or world
    if world % replicas:
        raise launch.UserError(f"--replicas {replicas}: {world} ranks cannot be divided into so "
                               "many")
    if world == 1 and model.compute_dtype(device) == torch.float32:
        return policy  # one fp32 rank needs no shards; FSDP's hooks cost a third of a toy step
    if replicas == 1:
        mesh = init_device_mesh(device.type, (world,))
    else:
        shape, names = (replicas, world // replicas), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    precision = MixedPrecisionPolicy()
    if device.type == "cuda":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tower = set(policy.hf.model.visual.parameters())
    for layer in policy.hf.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            # Two more groups in a gated-delta layer: its matrices, and the rest, which computes in
            # fp32. A group has one dtype, and A_log must not be rounded.
            mixer = layer.linear_attn
            matrices = [m for m in mixer.children() if isinstance(m, torch.nn.Linear)]
            fully_shard(matrices, mesh=mesh, mp_policy=precision)
            fully_shard(mixer, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=tower)
    return policy


# ------------------------------------------------------------------------------------------------
# Adapters (--lora)
#
#   y = x W' + 2 (x A') B'      W [out, in] frozen, A [r, in], B [out, r] trained; alpha = 2 r
#
# LoRA, arXiv 2106.09685, on the matrices of the decoder layers. Not by the library peft, because it
# renames the modules: then neither the shards of a checkpoint nor the weights of the engine are
# found. The files have the layout of peft, so that other tools read them. Adapters stand on whole
# weights, never on other adapters: a stage that is given adapters goes on training them.


class LoraLinear(torch.nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return torch.add(y, F.linear(F.linear(x, self.lora_A), self.lora_B), alpha=2)


def add_adapters(hf, rank: int) -> None:
    """Adds adapters in fp32 to a frozen model on the meta device."""
    for module in hf.model.language_model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = LoraLinear
            for name, shape in (("lora_A", (rank, module.in_features)),
                                ("lora_B", (module.out_features, rank))):
                weight = torch.empty(shape, dtype=torch.float32, device="meta")
                module.register_parameter(name, torch.nn.Parameter(weight))


def start_adapters(hf, saved: dict) -> None:
    """Gives the adapters their first values. saved: {weight name: (A, B)} of a checkpoint. If saved
    is {}, A is small and random (the same for every --seed) and B is zero. The adapted model then
    equals the base."""
    import hashlib

    for name, p in hf.named_parameters():
        stem, _, letter = name.partition("lora_")
        if not letter:
            continue
        if saved:
            value = saved[stem + "weight"][letter == "B"]
        elif letter == "B":
            value = torch.zeros(p.shape)
        else:  # seeded by its name, so that any number of ranks draws the same
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            bound = p.shape[1] ** -0.5
            value = torch.empty(p.shape).uniform_(-bound, bound,
                                                  generator=torch.Generator().manual_seed(seed))
        p.detach().copy_(own_rows(p, value.to(p.device)))


def own_rows(weight, whole: torch.Tensor):
    """This rank's part of a whole tensor, split in the way that `weight` is split."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(weight, "device_mesh"):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


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


def adapter_config(ckpt: str) -> dict | None:
    """The settings of a folder of adapters; None for a folder of whole weights, and for none.
    Raises UserError if sft.py or grpo.py did not save the adapters."""
    path = os.path.join(ckpt, "adapter_config.json")
    if not os.path.isfile(path):
        return None
    config = chat.read_object(path)
    if "base_digest" not in config:
        raise launch.UserError(f"checkpoint {ckpt}: its adapters were not saved by sft.py or "
                               "grpo.py; merge them with the tool that made them")
    return config


def adapter_rank(ckpt: str, asked: int) -> int:
    """--ckpt, --lora -> the rank of the adapters that a stage trains; 0: it trains whole weights.
    Raises UserError if the checkpoint holds adapters of another rank."""
    folder = chat.with_config(ckpt)
    config = adapter_config(folder) if folder else None  # None: resolve_checkpoint refuses it
    if config is None:
        return asked
    if asked not in (0, config["r"]):
        raise launch.UserError(f"--lora {asked}: {ckpt} holds adapters of rank {config['r']}, and "
                               "a stage goes on training them: leave --lora out, or merge them "
                               "first (tools/merge.py)")
    return config["r"]


def base_of(ckpt: str, check: bool = False) -> str:
    """Checkpoint folder -> the folder of its whole weights: the folder itself, or the base of its
    adapters. check: read some of every MiB of the base and compare with the base that the adapters
    were trained on. Raises UserError if the base is missing or another one."""
    config = adapter_config(ckpt)
    if config is None:
        return ckpt
    base = str(config.get("base_model_name_or_path"))
    if not os.path.isdir(base):
        raise launch.UserError(f"checkpoint {ckpt}: its base {base} is missing; write where the "
                               "base lies now into base_model_name_or_path of adapter_config.json")
    if adapter_config(base) is not None:
        raise launch.UserError(f"checkpoint {ckpt}: its base {base} holds adapters itself; merge "
                               "the base first (tools/merge.py)")
    if check and config["base_digest"] != content_digest(base):
        raise launch.UserError(f"checkpoint {ckpt}: {base} is not the checkpoint that these "
                               "adapters were trained on (its content differs)")
    return base


def read_adapters(ckpt: str) -> dict:
    """Folder of adapters -> {weight name: (A, B)} fp32 in host memory; {} for whole weights. Raises
    UserError if the file is damaged or does not hold pairs of this rank."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = adapter_config(ckpt)
    if config is None:
        return {}
    path = os.path.join(ckpt, "adapter_model.safetensors")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as e:
        raise launch.UserError(f"{path} cannot be read ({e}); copy it again") from None
    found = {}
    for key, a in tensors.items():
        if ".lora_A." in key:
            b = tensors.get(key.replace(".lora_A.", ".lora_B."))
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            if (b is None or not config["r"] == len(a) == b.shape[1]
                    or not (a.isfinite().all() and b.isfinite().all())):
                raise launch.UserError(f"{path}: {name} has no A and B of rank {config['r']} and "
                                       "of numbers; copy the folder again")
            found[name] = a.float(), b.float()
    return found


def merged_weights(ckpt: str):
    """Iterator of (name, tensor) of a checkpoint in host memory, with its adapters added."""
    from safetensors import safe_open

    base, adapters = base_of(ckpt), read_adapters(ckpt)
    for name in sorted(n for n in os.listdir(base) if n.endswith(".safetensors")):
        with safe_open(os.path.join(base, name), "pt") as f:
            for key in f.keys():
                tensor = f.get_tensor(key)
                if key in adapters:
                    a, b = adapters[key]
                    tensor = (tensor.float() + 2 * (b @ a)).to(tensor.dtype)
                yield key, tensor


def check_adapters(policy, path: str) -> None:
    """Raises UserError unless the run saved at `path` trained the weights that `policy` trains: all
    of them, or adapters of this rank on this base."""
    a = next((p for name, p in policy.named_parameters() if name.endswith(".lora_A")), None)
    config = adapter_config(path) or {}
    rank, then = len(a) if a is not None else 0, config.get("r", 0)
    if rank != then:
        raise launch.UserError(f"{path} was trained with --lora {then}, not {rank}")
    if rank and config["base_digest"] != policy.digest:
        raise launch.UserError(f"{path} holds adapters on another base than {policy.base}")


def save_adapters(policy, files: dict, folder: str, weights: dict) -> None:
    """Writes the two files of peft, adapter_config.json and adapter_model.safetensors, and beside
    them the small files of the base."""
    from safetensors.torch import save_file

    named = {"base_model.model." + re.sub(r"\.lora_([AB])$", r".lora_\1.weight", name): tensor
             for name, tensor in weights.items()}
    save_file(named, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})
    rank = next(tensor.shape[0] for name, tensor in weights.items() if name.endswith(".lora_A"))
    targets = sorted({name.split(".")[-2] for name in weights})
    config = {"peft_type": "LORA", "task_type": None, "r": rank, "lora_alpha": 2 * rank,
              "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
              "inference_mode": True, "base_model_name_or_path": policy.base,
              "base_digest": policy.digest}
    launch.write_atomic(os.path.join(folder, "adapter_config.json"), json.dumps(config, indent=1))
    save_files(files, folder)


# ------------------------------------------------------------------------------------------------
# Whole weights out of shards


def full_weights(policy, dtype=None):
    """Iterator of (checkpoint name, full tensor) in `dtype` (None: its own), with adapters added.
    vLLM's `reload_weights` takes it. Collective: every rank has to run it to its end. A tied
    lm_head is left out, as in the checkpoint file."""
    tied = policy.hf.config.tie_word_embeddings
    state = policy.hf.state_dict()
    for name, tensor in state.items():
        if (tied and name == "lm_head.weight") or ".lora_" in name:
            continue
        # Cast before the gather: bf16 is half the traffic.
        kept = dtype is None or name.endswith(policy.codec.base.exact)
        whole = whole_tensor(tensor.detach().to(tensor.dtype if kept else dtype))
        if (stem := name.removesuffix("weight")) + "lora_A" in state:  # adapters: added in fp32
            a, b = (whole_tensor(state[f"{stem}lora_{letter}"].detach()) for letter in "AB")
            whole = (whole.float() + 2 * (b @ a)).to(whole.dtype)
        yield name, whole


def whole_tensor(tensor):
    """A sharded tensor -> the whole tensor on every rank. Collective. Other tensors stay as they
    are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained_state(policy):
    """{name: weight} of the trained weights, a tied matrix once, without the frozen tower."""
    # After a forward without backward, FSDP keeps the root unsharded. state_dict() triggers the
    # hook that reshards it.
    policy.state_dict()
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------------------------
# Saving and going on


def save_run(policy, codec, optimizer, out, step, state):
    """Saves a run as out/step_NNNNNN, then see `settle`. Collective; training waits, because a save
    takes seconds every some dozen steps. state: loop state for state.json; "best_step": the step
    that `best` links to. Raises RunError if the run cannot be written."""
    path = os.path.join(out, f"step_{step:06d}")
    state = {"step": step, "code": launch.code_digests(), **state}
    save_checkpoint(policy, codec, path, state, optimizer)
    if launch.rank_and_world()[0] == 0:
        settle(path, state)


def settle(folder, state):
    """On rank 0, after a save and at a start: `last` links to the newest checkpoint `folder` and
    `best` to the one that its state names; older ones are deleted. The run has all that it needs,
    so an error is one line, and the run goes on."""
    out = os.path.dirname(folder)
    try:
        symlink(os.path.join(out, "last"), folder)
        if os.path.isdir(best := best_beside(folder, state) or ""):
            symlink(os.path.join(out, "best"), best)
        sync(out)  # before older checkpoints go
        prune_checkpoints(folder)
    except OSError as error:
        launch.say(f"{error}: `last`, `best` or an old checkpoint stays as it was, and the run "
                   f"goes on; the newest whole checkpoint is {folder}")


def best_beside(folder, state):
    """The folder that `best` stands for, by the state of the checkpoint `folder`; None: none."""
    step = state.get("best_step")
    return step and os.path.join(os.path.dirname(folder), f"step_{step:06d}")


def save_checkpoint(policy, codec, path, state, optimizer=None):
    """Writes, atomically, a folder that `from_pretrained` and vLLM load. With an optimizer (or a
    list of them) also `train_state/`: fp32 shards of weights and moments in torch's distributed
    format, which another number of ranks can load.

    Collective. Raises RunError on every rank if one of them cannot write; then the final name does
    not appear.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    rank, world = launch.rank_and_world()
    state_dict = trained_state(policy)
    if any(name.endswith(".lora_A") for name in state_dict):
        write = functools.partial(save_adapters, policy)
        gathered = ((name.removeprefix("hf."), whole_tensor(p)) for name, p in state_dict.items())
    else:
        write = save_whole
        gathered = full_weights(policy, model.compute_dtype(next(policy.parameters()).device))
    # Gathering is a collective, so every rank runs it to its end. Rank 0 keeps the tensors.
    weights = {name: tensor.cpu() for name, tensor in gathered if rank == 0}
    opened = contextlib.ExitStack()  # on rank 0: the folder under its temporary name

    def begin():
        out = os.path.dirname(os.path.abspath(path))
        # The log reaches the disk before a checkpoint that is newer than its last line.
        for name in ("log.jsonl", "rollouts"):
            with contextlib.suppress(FileNotFoundError):
                sync(os.path.join(out, name))
        folder = opened.enter_context(atomic_folder(path))
        write(codec.files, folder, weights)
        return folder

    try:
        with opened:
            folder = on_rank_0(begin)
            if optimizer is not None:
                moments = get_optimizer_state_dict(policy, optimizer)
                # With one rank, save without collectives: gloo would start its own thread pool,
                # the cores would be oversubscribed, and every later step would take half longer.
                dcp.save({"model": state_dict, "optimizer": moments},
                         checkpoint_id=os.path.join(folder, "train_state"), no_dist=world == 1)
            sums = checksums(folder, on_rank_0(lambda: files_in(folder)))
            on_rank_0(lambda: mark_complete(folder, state, sums))
            on_rank_0(opened.close)  # gives the folder its name
    except (OSError, dcp.CheckpointException) as error:  # on every rank, whichever could not write
        why = launch.why(next(iter(getattr(error, "failures", {0: [error]}).values()))[0])
        left = newest_checkpoint(os.path.dirname(os.path.abspath(path)))
        rest = f"the newest whole one is {left}: make room, and the same command goes on from it"
        raise launch.RunError(f"checkpoint {path} could not be written ({why}); "
                              + (rest if left else "there is no older one")) from None


def on_rank_0(work):
    """work() on rank 0 alone -> its result, on every rank. Collective: if work cannot write, every
    rank raises OSError, so no rank waits in the next collective."""
    from safetensors import SafetensorError

    result, why = None, None
    if launch.rank_and_world()[0] == 0:
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            why = launch.why(error)
    result, why = launch.broadcast([result, why])
    if why:
        raise OSError(why)
    return result


def save_whole(files, folder, weights):
    """Writes a checkpoint of whole weights: safetensors (above 5 GB several files and an index) and
    the small files of its base."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shards = split_torch_state_dict_into_shards(weights)
    for name, keys in shards.filename_to_tensors.items():
        part = {key: weights[key].contiguous() for key in keys}
        save_file(part, os.path.join(folder, name), {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        launch.write_atomic(os.path.join(folder, "model.safetensors.index.json"),
                           json.dumps(index, indent=2))
    # Of the matrices: a few vectors may be exact (chat.Base).
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.ndim > 1}
    save_files(files, folder, dtypes.pop() if len(dtypes) == 1 else None)


def save_files(files, folder, dtype=None):
    """Writes the small files byte for byte, because transformers 5 would write them in a dialect
    that transformers 4 cannot read. dtype: of the weights beside them; config.json then names it
    wherever it names a dtype or torch_dtype."""
    for name, content in files.items():
        if name == "config.json" and dtype:
            spelled = str(dtype).removeprefix("torch.").encode()
            content = re.sub(rb'("(?:torch_)?dtype"\s*:\s*")[^"]*', rb"\g<1>" + spelled, content)
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)


def load_train_state(policy, optimizer, path):
    """Restores weights and optimizer (or a list of them) from `path`/train_state, which any number
    of ranks saved. Collective. resume_point restores the loop state."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    check_adapters(policy, path)
    shards = {"model": trained_state(policy),
              "optimizer": states.get_optimizer_state_dict(policy, optimizer)}
    dcp.load(shards, checkpoint_id=os.path.join(path, "train_state"),  # weights: in place
             no_dist=dist.get_world_size() == 1)  # as in save_checkpoint
    states.set_optimizer_state_dict(policy, optimizer, shards["optimizer"])


@contextlib.contextmanager
def atomic_folder(path):
    """Yields a temporary folder, which becomes `path` if the block ends without an error and is
    deleted otherwise. It replaces an older folder of that name."""
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    temp = os.path.join(parent, f".{os.path.basename(path)}.{os.urandom(4).hex()}")
    os.mkdir(temp)  # with the mode of the umask; mkdtemp's is for the owner alone
    try:
        yield temp
        mode = os.stat(temp).st_mode & 0o666
        for folder, _, names in os.walk(temp):
            for name in (os.path.join(folder, name) for name in names):
                with unless_missing():
                    os.chmod(name, mode)  # safetensors makes files that others cannot read
                sync(name)
            sync(folder)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temp, path)
        with contextlib.suppress(OSError):  # the folder is whole
            sync(parent)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def sync(path):
    """Returns once a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with unless_missing():
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def unless_missing():
    """Passes over an operation that the filesystem lacks, as exFAT, SMB and some FUSE do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise


def symlink(link, target):
    """Makes `link` a relative link to the folder `target` beside it, atomically. Without links: a
    file with the name of the folder, see chat.followed."""
    temp, name = f"{link}.tmp{os.getpid()}", os.path.basename(target)
    with contextlib.suppress(FileNotFoundError):
        os.remove(temp)
    with unless_missing():
        os.symlink(name, temp)
    if not os.path.islink(temp):
        launch.write_atomic(temp, name + "\n")
    os.replace(temp, link)


def claim_run(out, inputs):
    """Makes the folder of a training run this run's own, or raises UserError before any long work:
    no log replaces an input, no other run writes there, and a checkpoint can be saved."""
    rollouts = [f"rollouts/{name}" for name in files_in(os.path.join(out, "rollouts"))]
    launch.keep_inputs([os.path.join(out, name) for name in ("log.jsonl", "args.json", *rollouts)],
                       inputs)
    for link in (os.path.join(out, name) for name in ("last", "best")):
        if os.path.isdir(link) and not os.path.islink(link):  # no link could replace it
            raise launch.UserError(f"{link} is a folder, as cp -rL makes it; move it elsewhere, "
                                   "and the same command links to the step_* folders")
    launch.lock(out)  # until this process ends: two runs would delete each other's files
    try_save(out)


def try_save(out):
    """On rank 0: one empty save with a link, so that a folder which cannot hold a run is refused
    before any long work. Raises UserError."""
    probe = os.path.join(out, ".step_probe")
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        with atomic_folder(probe) as folder:
            launch.write_atomic(os.path.join(folder, "state.json"), "{}")
        symlink(f"{probe}.tmp0", probe)  # a name that clean_run deletes after a kill
        os.remove(f"{probe}.tmp0")
    except OSError as error:
        raise launch.UserError(f"output folder {out}: a checkpoint cannot be saved here "
                               f"({error.strerror})") from None
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def files_in(folder):
    """Sorted names of all files in a folder, relative to the folder."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in paths)


def checksums(folder, names):
    """-> {name: CRC-32} of files; None for a file that cannot be read. Collective: every rank reads
    its share."""
    rank, world = launch.rank_and_world()

    def crc32(name):
        number, buffer = 0, memoryview(bytearray(2**20))
        try:
            with open(os.path.join(folder, name), "rb", buffering=0) as f:
                while size := f.readinto(buffer):
                    number = zlib.crc32(buffer[:size], number)
        except OSError:
            return None
        return number

    mine = names[rank::world]
    with ThreadPoolExecutor(4) as pool:  # zlib lets other threads run meanwhile
        return dict(launch.gather_rows(list(zip(mine, pool.map(crc32, mine)))))


def mark_complete(folder, state, sums):
    """Writes state.json, the last file: the loop state, and size and CRC-32 of all other files."""
    if unread := [name for name, number in sums.items() if number is None]:
        raise OSError(f"{unread[0]} cannot be read back")
    files = {name: os.path.getsize(os.path.join(folder, name)) for name in sums}
    state = {**state, "files": files, "crc32": sums}
    marker = json.dumps({**state, "own_crc32": launch.own_sum(state)}, indent=1)
    launch.write_atomic(os.path.join(folder, "state.json"), marker)


def is_complete(folder):
    """Whether a checkpoint is whole: all files are as long as its state.json says."""
    try:
        with open(os.path.join(folder, "state.json")) as f:
            files = launch.parse_json(f.read())["files"].items()
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def complete_checkpoints(out):
    """The complete checkpoints of a run, the newest first. Torn folders are left out."""
    return [folder for folder in step_folders(out) if is_complete(folder)]


def step_folders(out):
    """The folders of a run's checkpoints, whole or not, the newest first."""
    names = os.listdir(out) if os.path.isdir(out) else []
    # Not step_000010_keep: a copy that a user made would count as newer, or be deleted.
    steps = sorted((int(n[5:]) for n in names if re.fullmatch(r"step_\d{6,}", n)), reverse=True)
    return [os.path.join(out, f"step_{step:06d}") for step in steps]


def newest_checkpoint(out):
    """The newest complete step_* folder of a run, or None."""
    return next(iter(complete_checkpoints(out)), None)


def undamaged_checkpoint(out):
    """-> (the newest checkpoint whose bytes are those that were saved, its state.json), or
    (None, {}). Collective: reads every file once, a share on each rank."""
    for folder in launch.broadcast([complete_checkpoints(out)])[0]:
        with open(os.path.join(folder, "state.json")) as f:
            state = json.load(f)
        saved = state.get("crc32", {})  # older versions wrote no sums
        found = checksums(folder, sorted(saved))
        damaged = [name for name in saved if found[name] != saved[name]]
        if state.get("own_crc32") not in (None, launch.own_sum(state)):
            damaged.append("state.json")
        if not damaged:
            return folder, state
        launch.say(f"{folder}: {damaged[0]} has other bytes than were saved; going on from an "
                   "older checkpoint")
    return None, {}


def add_arguments(add):
    """Flags of a stage that trains a checkpoint."""
    add("--lora", type=int, default=0, help="rank of adapters, the rest is frozen; 0 = off")
    add("--clip", type=float, default=1.0, help="gradient norm; 0 = no clipping")
    add("--recompute", choices=["full", "none"], default="full", help="decoder layers in backward")
    add("--replicas", type=int, default=1,
        help="groups of ranks that each hold the whole model in shards (HSDP): one per node; "
             "0 = every rank holds the whole (toy)")
    add("--resume", action=argparse.BooleanOptionalAction, default=None,
        help="go on from --out; default: if it is of the same settings; no: begin anew")


def identities(ckpts, flags, films, subtitles=()):
    """-> {what a run reads: [digest, name]}, for resume_point. Collective: rank 0 reads. ckpts:
    {flag: folder, as resolved}. flags: {flag: [path or None]}. films, subtitles: [(folder, name)].
    """
    found = None
    if launch.rank_and_world()[0] == 0:
        flags = {flag: [path for path in paths if path] for flag, paths in flags.items()}
        # A renamed file is the same data.
        found = {flag: [launch.digest_of(map(os.path.split, paths), names=False),
                        " ".join(paths) or "none"] for flag, paths in flags.items()}
        found |= {flag: [content_digest(ckpt), ckpt] for flag, ckpt in ckpts.items()}
        # Films are terabytes, so only size and mtime.
        found |= {"subtitles": [launch.digest_of(subtitles), None],
                  "films": [launch.digest_of(films, content=False), None]}
    return launch.broadcast([found])[0]


def resume_point(out, args, resume, inputs=None):
    """Where a run goes on -> (folder, its loop state), or (None, {}) to begin.

    resume None: go on if --out holds a run of the same settings, and raise UserError if it holds a
    run of others. True: go on with the new settings. False: begin anew and delete that run.
    inputs: see identities. They are settings too, but for films.
    """
    folder, state = (None, {}) if resume is False else undamaged_checkpoint(out)
    check_apart(args.ckpt, out, state.get("args", {}))
    if folder is None:
        torn = step_folders(out)
        if torn and resume is not False:  # damaged after it was saved: the user decides
            raise launch.UserError(f"{out}: {os.path.basename(torn[0])} is not whole, and nothing "
                                   "else here is (a file is missing, or its size or bytes are not "
                                   "those in state.json); --no-resume begins anew and deletes it")
        return None, {}
    flags, moved = launch.changes(args, inputs or {}, state)
    films = moved.pop("films", None)  # a copy of them has another mtime, so they are only told of
    flags = [*moved.values(), *flags]
    if resume is None and flags:
        raise launch.UserError(f"--out {out} holds a run of other settings: {', '.join(flags[:3])};"
                               " choose another --out, or --resume to go on with the new ones, or "
                               "--no-resume to delete it")
    for text in filter(None, [films, *moved.values()]):
        launch.say(f"{folder}: {text}")
    # Values on other held-out rows cannot be compared.
    if any(fault.startswith("--val ") for fault in flags):
        launch.say(f"{folder}: other held-out rows, so `best` begins anew")
        state = {k: v for k, v in state.items() if not k.startswith("best")}
    # Not refused: people mend a script and go on. But the record must not hide it.
    code, then = launch.code_digests(), state.get("code")
    if then and (changed := sorted(k for k in code.keys() | then if code.get(k) != then.get(k))):
        launch.say(f"{folder} was saved by other code: {', '.join(changed)} changed since")
    if launch.rank_and_world()[0] == 0:  # a kill may have come before the links
        clean_run(out, state["step"])
        settle(folder, state)
    return folder, state


def check_apart(ckpt, out, then):
    """Raises UserError if --ckpt, or the base of its adapters, lies in --out, where a run deletes
    old checkpoints. then: the arguments of the run that goes on; --ckpt may be as it was there."""
    start = chat.with_config(ckpt)
    if start is None or then.get("ckpt") == ckpt:
        return
    for folder in (start, base_of(start)):
        above = pathlib.Path(folder).resolve()
        if any(os.path.samefile(out, place) for place in (above, *above.parents)):
            raise launch.UserError(f"--ckpt {ckpt}: {folder} lies in --out {out}, where a run "
                                   "deletes old checkpoints; choose another --out (the run there "
                                   "goes on with the --ckpt that it began from)")


def clean_run(out, start):
    """On rank 0, at a start: deletes files that killed runs left half-written, rollouts of steps
    that this run will take again and, if a run begins anew, its older checkpoints. Raises UserError
    if one of them stays."""
    for folder in (out, os.path.join(out, "rollouts")):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            rollouts = re.match(r"step_(\d+)\.rank", name)
            # .tmp: of write_atomic and symlink
            if re.search(r"\.tmp\d+$", name) or (rollouts and int(rollouts[1]) >= start):
                os.remove(os.path.join(folder, name))
    old = step_folders(out)
    for name in os.listdir(out):
        path = os.path.join(out, name)
        if re.match(r"\.+step_", name) or (start == 0 and path in old):
            shutil.rmtree(path, ignore_errors=True)
        if start == 0 and name in ("last", "best"):
            os.remove(path)
    if start == 0 and (left := newest_checkpoint(out)):
        raise launch.UserError(f"{left} of an older run cannot be deleted; choose another --out")


def prune_checkpoints(newest, keep=2):
    """Deletes the whole step_* folders beside the checkpoint `newest`, but for the `keep` up to it,
    the best one of each of these, and those that `last` and `best` stand for."""
    out = os.path.dirname(newest)
    # A newer one is damaged, else the run would have gone on from it.
    whole = complete_checkpoints(out)
    whole = whole[whole.index(newest):] if newest in whole else []
    kept = [chat.followed(os.path.join(out, name)) for name in ("last", "best")]
    for folder in whole[:keep]:
        state = chat.read_object(os.path.join(folder, "state.json"))
        kept += [folder, best_beside(folder, state) or folder]
    kept = set(map(os.path.realpath, kept))
    for folder in whole:
        if os.path.realpath(folder) not in kept:
            # Rename first: clean_run then finds a folder that a kill left half deleted.
            doomed = os.path.join(out, f".{os.path.basename(folder)}.pruned")
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


def check_run(step, bad, out, limit=3):
    """Raises RunError, on all ranks alike, after `limit` steps in a row without a finite
    gradient."""
    if bad >= limit:
        raise launch.RunError(f"step {step + 1}: no finite gradient for {bad} steps in a row; the "
                              f"newest checkpoint is {newest_checkpoint(out)}")


def weights_line(policy):
    """For the terminal: how many weights are trained, and the dtypes in which they were stored."""
    n = sum(p.numel() for p in model.trained_parameters(policy))
    return f"{n / 1e6:.2f} M trained parameters in fp32 (read from {policy.stored_as})"
