"""
plumbing/checkpoint.py (tests/test_checkpoint.py): checkpoint folders: open and check them, load
them in shards, train adapters on them, save them.

  a checkpoint   the small files of its base, byte for byte but for the dtype; and whole weights in
                 safetensors, or adapters in the layout of peft on whole weights; in a run
                 also train_state/, see runs.py

A checkpoint that cannot be used is refused in one line before any long work. Nothing in a
checkpoint is ever run.

Departs from transformers' save_pretrained: it rewrites configuration and tokenizer in its own
dialect, which older versions cannot read.

Reads and writes checkpoint folders; sft.py, grpo.py, rollout.py, eval.py and toy.py call it.
"""
import argparse
import contextlib
import functools
import json
import math
import os
import re

import model  # isort: skip  (before torch: model.py tells a terminal that torch is loading)
import torch
import torch.nn.functional as F

import chat
import launch
from plumbing import hub, runs

# ------------------------------------------------------------------------------------------------
# Opening a checkpoint


def resolve_checkpoint(path):
    """A checkpoint folder, a name on the Hub, or the run folder that holds a checkpoint under
    `last` -> the folder that `from_pretrained` opens. Checks its files and those of its base, and
    runs no code in them. Raises UserError that names the fault and the remedy."""
    folder = chat.check_config(path)
    # Without tokenizer_config.json transformers guesses the tokenizer's class, and another class
    # gives other ids. transformers 5 saves the image processor inside processor_config.json.
    for names in (("tokenizer.json",), ("tokenizer_config.json",),
                  ("preprocessor_config.json", "processor_config.json")):
        if not any(launch.is_file(os.path.join(folder, name)) for name in names):
            raise launch.UserError(f"checkpoint {folder}: {names[0]} is missing; copy it from the "
                                   "checkpoint that this one was made from")
    chat.read_object(os.path.join(folder, "tokenizer.json"))  # some readers take a cut-off file
    base = base_of(folder, check=True)
    # Once on each machine: torchrun then ends the other ranks.
    for part in {folder, base} if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        if changed := runs.changed_files(part, runs.saved_sums(part)):
            raise launch.UserError(f"checkpoint {part}: {changed[0]} has other bytes than were "
                                   "saved; copy it again, or, if that is meant, delete state.json")
    stored = stored_shapes(base)  # once: a large checkpoint has a dozen files of headers
    hf = meta_model(base)
    names = dict(hf.named_parameters())
    check_weights(base, names, stored)
    check_copies(base, hf, stored)
    # Any other weight would be left out silently.
    known = chat.bases()[hf.config.model_type].unused  # but these, which no loader takes
    strange = set(stored) - set(hf.state_dict())
    if unused := sorted(name for name in strange if not name.startswith(known)):
        raise launch.UserError(f"checkpoint {base}: {unused[0]} is stored, but config.json "
                               "describes a model without it; copy config.json again")
    inner = {name for name in names if ".language_model.layers." in name}  # as in add_adapters
    if strange := sorted(set(read_adapters(folder)) - inner):
        raise launch.UserError(f"checkpoint {folder}: its adapters are for {strange[0]}; this code "
                               "has them in the layers of the language model of its base alone")
    return os.path.realpath(folder)


def check_copies(ckpt: str, hf, stored: dict) -> None:
    """Raises UserError if a weight of the model, as a tied head, is stored under two names with
    other values: programs differ in which of the two they read."""
    names = {}  # of each weight
    for name, weight in hf.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for name, *copies in names.values():
        for copy in filter(stored.get, copies):
            one, two = (w.float() for key, w in merged_weights(ckpt) if key in (name, copy))
            if not torch.equal(one, two):
                raise launch.UserError(f"checkpoint {ckpt}: config.json ties {copy} to {name}, but "
                                       "other values are stored; set tie_word_embeddings to false "
                                       f"if the model was trained so, or delete {copy}")


def meta_model(ckpt):
    """Checkpoint folder -> transformers' model on the meta device: names and shapes, no memory."""
    config = chat.load_config(ckpt)
    with chat.as_user_error(ckpt, "config.json"), torch.device("meta"):
        hf = model_class(config)(config)
    hf.tie_weights()
    return hf


def model_class(config):
    """transformers' configuration -> transformers' class of the whole model."""
    import transformers

    return getattr(transformers, chat.bases()[config.model_type].model_class)


def stored_shapes(folder):
    """Every safetensors header of a checkpoint -> {weight: (shape, file)}. Raises UserError for a
    missing shard, a truncated file, a weight that is stored twice, quantized weights, and values
    that no training leaves: now, not after the models are built."""
    from safetensors import SafetensorError, safe_open

    names = sorted(n for n in os.listdir(folder) if n.endswith(".safetensors"))
    index = os.path.join(folder, "model.safetensors.index.json")
    if launch.is_file(index):
        content = chat.read_object(index)
        with chat.as_user_error(folder, "model.safetensors.index.json"):
            # Loaders differ in whether they read a file that the index does not name.
            odd = sorted({*map(str, content["weight_map"].values())} ^ {*names})
        if odd:
            raise launch.UserError(f"checkpoint {folder}: {odd[0]} is missing, or not in its index")
    if not names:
        raise launch.UserError(f"checkpoint {folder}: no .safetensors file; only safetensors are "
                               "loaded, no .bin, no GGUF: take or save it in that format")
    stored = {}
    for name in names:
        try:
            with safe_open(os.path.join(folder, name), "pt") as f:
                for key in f.keys():
                    if key in stored:  # loaders differ in which of the two they take
                        raise launch.UserError(f"checkpoint {folder}: {key} is in {stored[key][1]} "
                                               f"and in {name}; delete the file that is too much")
                    weight = f.get_slice(key)
                    check_values(weight, f"checkpoint {folder}: {key} in {name}")
                    stored[key] = list(weight.get_shape()), name
        except (SafetensorError, OSError) as e:
            raise launch.UserError(f"{folder}/{name} cannot be read ({e}); copy it again") from None
    return stored


def check_values(weight, label):
    """Raises UserError for a quantized weight, one that is no number, and a matrix of zeros, as a
    download that was cut off leaves it. Reads small weights whole and some rows of large ones."""
    if weight.get_dtype() not in ("BF16", "F16", "F32"):
        raise launch.UserError(f"{label} is stored as {weight.get_dtype()}, and quantized weights "
                               "cannot be trained; give a checkpoint in BF16, F16 or F32")
    shape = weight.get_shape()
    stride = 1 if math.prod(shape) < 2**20 else 1 + shape[0] // 8
    sample = torch.cat([weight[i:i + 1].flatten() for i in range(0, shape[0], stride)])
    if not sample.isfinite().all() or (len(shape) > 1 and not sample.any()):
        raise launch.UserError(f"{label} holds a value that is no number, or zeros alone; copy the "
                               "file again, or take an older checkpoint")


def check_weights(ckpt: str, weights: dict, stored: dict) -> None:
    """Raises UserError unless a checkpoint holds each of these weights in its shape. stored: see
    stored_shapes."""
    if missing := sorted(set(weights) - set(stored)):
        raise launch.UserError(f"checkpoint {ckpt}: {len(missing)} weights are missing, for "
                               f"example {missing[0]}; download it again")
    for name, weight in weights.items():
        if stored[name][0] != list(weight.shape):
            raise launch.UserError(f"checkpoint {ckpt}: {name} has shape {stored[name][0]}, the "
                                   f"configuration says {list(weight.shape)}; the two are not of "
                                   "one checkpoint, copy it again")


# ------------------------------------------------------------------------------------------------
# Into a policy, in shards


def load_sharded(ckpt, codec, device, gradient_checkpointing=False, replicas=1, frozen=False,
                 lora=0):
    """Checkpoint folder -> sharded Policy. Collective; no rank holds more than its shard.

    The model is built on the meta device, then every rank reads its own rows from the safetensors
    files. Trained weights are fp32 whatever the files hold. replicas: see shard. frozen: a
    reference without gradients, in its compute dtype; it has no tower and receives features.
    lora: rank of the adapters, all else is frozen; 0: all weights are trained. For a checkpoint of
    adapters pass their own rank, see adapter_rank.
    """
    import torch.distributed.checkpoint as dcp

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
            if name.endswith(codec.base.keep_fp32):
                p.data = p.data.float()
    if lora:
        add_adapters(hf, lora)
    policy = shard(model.wrap_policy(hf, codec, device, gradient_checkpointing), device, replicas)
    if frozen:
        hf.model.visual = None
        if hasattr(policy, "set_reshard_after_forward"):
            # FSDP keeps the root whole after a forward, for a backward that never comes here.
            policy.set_reshard_after_forward(True, recurse=False)
    policy.to_empty(device=device)
    hf.tie_weights()  # to_empty unties weights that are not in shards
    # Rotary tables are computed, not stored, so they are made anew on the device.
    for owner, name in ((hf.model.language_model, "rotary_emb"),
                        (hf.model.visual, "rotary_pos_emb")):
        if old := getattr(owner, name, None):
            setattr(owner, name, type(old)(old.config).to(device))
    weights = {name: p.detach() for name, p in hf.named_parameters() if ".lora_" not in name}
    policy.base = base_of(ckpt)
    policy.digest = runs.content_digest(policy.base) if lora else None  # adapters are saved with it
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(policy.base))
    if lora:
        start_adapters(hf, read_adapters(ckpt))
    if frozen:
        hf.requires_grad_(False)  # adapters too
    return policy


def shard(policy, device, replicas=1):
    """FSDP2: one group per decoder layer, one for the rest (embeddings, head, norm). The frozen
    tower stays replicated.

    On a GPU: fp32 shards, bf16 compute, fp32 gradient reduction. replicas: groups of ranks that
    each hold the whole model in shards (HSDP). With one group per node, weights are gathered inside
    a node and only gradients cross between nodes. 0: as many groups as ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = launch.rank_and_world()[1]
    replicas = replicas or world
    if world % replicas:
        raise launch.UserError(f"dp_replicate={replicas}: {world} ranks cannot be divided so")
    if replicas == world and model.compute_dtype(device) == torch.float32:
        # Every rank holds the whole model in fp32, and reduce_and_clip averages the gradients.
        # FSDP's hooks would cost a third of a toy step, and Muon on its tensors more than that.
        return policy
    dims = ({"replicate": replicas} if replicas > 1 else {}) | {"shard": world // replicas}
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
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
# Adapters (--lora-rank)
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
        p.detach().copy_(shard_like(p, value.to(p.device)))


def shard_like(weight, full: torch.Tensor):
    """This rank's part of a whole tensor, split in the way that `weight` is split."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(weight, "device_mesh"):
        return full
    return distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)


def adapter_config(ckpt: str) -> dict | None:
    """The settings of a folder of adapters; None for a folder of whole weights, and for none.
    Raises UserError if sft.py or grpo.py did not save the adapters."""
    path = os.path.join(ckpt, "adapter_config.json")
    if not launch.is_file(path):
        return None
    config = chat.read_object(path)
    if "base_digest" not in config or config.get("lora_alpha") != 2 * config.get("r", 0):
        raise launch.UserError(f"checkpoint {ckpt}: its adapters, or their lora_alpha, were not "
                               "saved by sft.py or grpo.py; merge them with the tool that made "
                               "them")
    return config


def adapter_rank(ckpt: str, rank: int) -> int:
    """--ckpt, --lora-rank -> the rank of the adapters that a stage trains; 0: whole weights.
    Raises UserError if the checkpoint holds adapters of another rank."""
    folder = hub.config_folder(ckpt)
    config = adapter_config(folder) if folder else None  # None: resolve_checkpoint refuses it
    if config is None:
        return rank
    if rank not in (0, config["r"]):
        raise launch.UserError(f"--lora-rank {rank}: {ckpt} holds adapters of rank {config['r']}: "
                               "leave the flag out to train these, or merge them first "
                               "(tools/merge.py)")
    return config["r"]


def base_of(ckpt: str, check: bool = False) -> str:
    """Checkpoint folder -> the folder of its whole weights: the folder itself, or the base of its
    adapters. check: read some of every MiB of the base and compare with the base that the adapters
    were trained on. Raises UserError if the base is missing or another one."""
    config = adapter_config(ckpt)
    if config is None:
        return ckpt
    base = hub.fetch_ckpt(str(config.get("base_model_name_or_path")), config.get("revision"))
    if not launch.is_file(base, folders=True):
        raise launch.UserError(f"checkpoint {ckpt}: its base {base} is missing; write where the "
                               "base lies now into base_model_name_or_path of adapter_config.json")
    if check and config["base_digest"] != runs.content_digest(base):
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
    adapters = {}
    for key in sorted({key.replace(".lora_B.", ".lora_A.") for key in tensors}):
        a, b = tensors.get(key), tensors.get(key.replace(".lora_A.", ".lora_B."))
        name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
        # a is b: a weight that is no part of an adapter, as modules_to_save of peft
        if (a is None or b is None or a is b or not config["r"] == len(a) == b.shape[1]
                or not (a.isfinite().all() and b.isfinite().all())):
            raise launch.UserError(f"{path}: {name} has no A and B of rank {config['r']} and of "
                                   "numbers; copy the folder again")
        adapters[name] = a.float(), b.float()
    return adapters


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
    rank, config_rank = len(a) if a is not None else 0, config.get("r", 0)
    if rank != config_rank:
        raise launch.UserError(f"{path} was trained with --lora-rank {config_rank}, not {rank}")
    if rank and config["base_digest"] != policy.digest:
        raise launch.UserError(f"{path} holds adapters on another base than {policy.base}")


def save_adapters(policy, files: dict, folder: str, weights: dict) -> None:
    """Writes the two files of peft, adapter_config.json and adapter_model.safetensors, and beside
    them the small files of the base."""
    from safetensors.torch import save

    named = {"base_model.model." + re.sub(r"\.lora_([AB])$", r".lora_\1.weight", name): tensor
             for name, tensor in weights.items()}
    content = save(named, {"format": "pt"})
    launch.write_atomic(os.path.join(folder, "adapter_model.safetensors"), content)
    rank = next(tensor.shape[0] for name, tensor in weights.items() if name.endswith(".lora_A"))
    targets = sorted({name.split(".")[-2] for name in weights})
    config = {"peft_type": "LORA", "task_type": None, "r": rank, "lora_alpha": 2 * rank,
              "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
              "inference_mode": True, **hub.name_of(policy.base), "base_digest": policy.digest}
    launch.write_atomic(os.path.join(folder, "adapter_config.json"), json.dumps(config, indent=1))
    save_files(files, folder)


# ------------------------------------------------------------------------------------------------
# Whole weights out of shards


def full_weights(policy, dtype=None):
    """Iterator of (checkpoint name, full tensor) in `dtype` (None: its own), with adapters added.
    vLLM's `reload_weights` takes it. Collective: every rank has to run it to its end. A tied
    lm_head is left out, as in the checkpoint file."""
    tied, state = policy.hf.config.tie_word_embeddings, policy.hf.state_dict()
    for name, tensor in state.items():
        if (tied and name == "lm_head.weight") or ".lora_" in name:
            continue
        # Cast before the gather: bf16 is half the traffic.
        keep_dtype = dtype is None or name.endswith(policy.codec.base.keep_fp32)
        full = whole_tensor(tensor.detach().to(tensor.dtype if keep_dtype else dtype))
        if (stem := name.removesuffix("weight")) + "lora_A" in state:  # adapters: added in fp32
            a, b = (whole_tensor(state[f"{stem}lora_{letter}"].detach()) for letter in "AB")
            full = (full.float() + 2 * (b @ a)).to(full.dtype)
        yield name, full


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
    """Saves a run as out/step_NNNNNN, then see `update_links`. Collective; training waits, because
    a save takes seconds every some dozen steps. state: loop state for state.json; "best_step": the
    step that `best` links to. Raises RunError if the run cannot be written."""
    path = os.path.join(out, f"step_{step:06d}")
    state = {"step": step, "code": hub.our_commit(), **state}
    save_checkpoint(policy, codec, path, state, optimizer)
    if launch.rank_and_world()[0] == 0:
        runs.update_links(path, state)


def save_checkpoint(policy, codec, path, state, optimizer=None):
    """Writes, atomically, a folder that `from_pretrained` and vLLM load. With an optimizer (or a
    list of them) also `train_state/`: fp32 shards of weights and moments in torch's distributed
    format, which another number of ranks can load.

    Collective. Raises RunError on every rank if one of them cannot write; then the final name does
    not appear.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    (rank, world), state_dict = launch.rank_and_world(), trained_state(policy)
    if any(name.endswith(".lora_A") for name in state_dict):
        write = functools.partial(save_adapters, policy)
        gathered = ((name.removeprefix("hf."), whole_tensor(p)) for name, p in state_dict.items())
    else:
        write = save_whole
        gathered = full_weights(policy, model.compute_dtype(next(policy.parameters()).device))
    # Gathering is a collective, so every rank runs it to its end. Rank 0 keeps the tensors.
    weights = {name: tensor.cpu() for name, tensor in gathered if rank == 0}
    opened = contextlib.ExitStack()  # on rank 0: the folder under its temporary name

    out = os.path.dirname(os.path.abspath(path))

    def write_model():
        # The log reaches the disk before a checkpoint that is newer than its last line. A run has
        # one: else the disk with --out has gone, and below is another disk's folder.
        for name in ("log.jsonl", "rollouts"):
            with contextlib.suppress(*[FileNotFoundError] * (not optimizer or name == "rollouts")):
                launch.fsync(os.path.join(out, name))
        folder = opened.enter_context(runs.atomic_folder(path))
        write(codec.files, folder, weights)
        hub.write_card(folder, out, state)
        return folder

    try:
        with opened:
            folder = on_rank_0(write_model)
            if optimizer is not None:
                moments = get_optimizer_state_dict(policy, optimizer)
                # With one rank, save without collectives: gloo would start its own thread pool,
                # the cores would be oversubscribed, and every later step would take half longer.
                dcp.save({"model": state_dict, "optimizer": moments},
                         checkpoint_id=os.path.join(folder, "train_state"), no_dist=world == 1)
            sums = runs.checksums(folder, on_rank_0(lambda: runs.files_in(folder)))
            on_rank_0(lambda: runs.mark_complete(folder, state, sums))
            on_rank_0(opened.close)  # gives the folder its name
    except (OSError, dcp.CheckpointException) as error:  # on every rank, whichever could not write
        reason = launch.why(next(iter(getattr(error, "failures", {0: [error]}).values()))[0])
        newest = runs.newest_checkpoint(out) if os.path.isdir(out) else None
        raise launch.RunError(f"checkpoint {path} could not be written ({reason}); the newest "
                              f"whole one is {newest}: mend that, and go on from it") from None


def on_rank_0(work):
    """work() on rank 0 alone -> its result, on every rank. Collective: if work cannot write, every
    rank raises OSError, so no rank waits in the next collective."""
    from safetensors import SafetensorError

    result, reason = None, None
    if launch.rank_and_world()[0] == 0:
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            reason = launch.why(error)
    result, reason = launch.broadcast([result, reason])
    if reason:
        raise OSError(reason)
    return result


def save_whole(files, folder, weights):
    """Writes a checkpoint of whole weights: safetensors (above 1 GB several files and an index) and
    the small files of its base."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save

    # save_file would need less memory, but a network disk reports a lost write at close(), and
    # save_file passes over that.
    shards = split_torch_state_dict_into_shards(weights, max_shard_size="1GB")
    for name, keys in shards.filename_to_tensors.items():
        part = {key: weights[key].contiguous() for key in keys}
        launch.write_atomic(os.path.join(folder, name), save(part, {"format": "pt"}))
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        launch.write_atomic(os.path.join(folder, "model.safetensors.index.json"),
                            json.dumps(index, indent=2))
    # Of the matrices: a few vectors may be exact (chat.ModelFamily).
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
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    check_adapters(policy, path)
    shards = {"model": trained_state(policy),
              "optimizer": states.get_optimizer_state_dict(policy, optimizer)}
    dcp.load(shards, checkpoint_id=os.path.join(path, "train_state"),  # weights: in place
             no_dist=launch.rank_and_world()[1] == 1)  # as in save_checkpoint
    states.set_optimizer_state_dict(policy, optimizer, shards["optimizer"])


def add_arguments(parser, add):
    """Flags of a stage that trains a checkpoint. add: add_argument of a group of the parser."""
    add("--lora-rank", type=int, default=0, help="rank of adapters, the rest is frozen; 0 = off")
    parser.add_setting("max_grad_norm", "norm at which gradients are clipped; 0 = never", 1.0)
    parser.add_setting("gradient_checkpointing", "compute decoder layers again in backward", True)
    parser.add_setting("dp_replicate", "groups of ranks that each hold the whole model in shards "
                       "(HSDP): one per node; 0 = every rank holds the whole (toy)", 1)
    add("--resume", action=argparse.BooleanOptionalAction, default=None,
        help="go on from --out; default: if it is of the same settings; no: begin anew")


def weights_line(policy):
    """For the terminal: how many weights are trained."""
    weights = model.trained_parameters(policy)
    n = sum(p.numel() for p in weights)
    return f"{n / 1e6:.2f} M trained parameters in fp32 ({weights[0].device.type})"
