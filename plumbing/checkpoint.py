"""
plumbing/checkpoint.py (tests/test_checkpoint.py): checkpoint folders: load in shards, LoRA, save,
go on.

  out/step_000050/  weights and small files as from_pretrained and vLLM read them;
                    train_state/: fp32 shards of weights and moments; state.json, written last
  out/last, best    links to the newest one and to the one that its state.json names

  y = x W' + 2 (x A') B'      W [out, in] frozen, A [r, in] and B [out, r] trained; alpha = 2 r

LoRA, arXiv 2106.09685, on the matrices of the decoder layers. Not by the library peft, which
renames the modules: then neither the shards of a checkpoint nor the weights of the engine are
found. The files have peft's layout, so that other tools read them.

Crash-only: a folder gets its name when all of it is on the disk. What a kill leaves behind has
another name, or is older than the two newest, and the next save or start deletes it.

Departs from transformers' save_pretrained, which rewrites configuration and tokenizer in its own
dialect: the small files of a checkpoint are copied byte for byte.

Reads and writes checkpoint folders; reads the Hub, or its cache alone with HF_HUB_OFFLINE=1.
"""
import contextlib
import glob
import json
import os
import re
import shutil

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import chat
import launch
import model
from plumbing import qwen35

# What two parts of one run may differ in: how far, how fast, where, and who is told. The rows of
# --data and --val are compared, not their paths.
FREE = ("steps epochs out resume check data val save_every track window_gain dp_replicate "
        "max_num_seqs gpu_memory_utilization judge_url").split()

# ------------------------------------------------------------------------------------------------
# Folders


def resolve(path):
    """A checkpoint folder, a run folder (its newest checkpoint) or OWNER/NAME on the Hub -> the
    folder that from_pretrained opens. Raises UserError."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(f"{path}/last"):  # sft.py and grpo.py link it
        path = f"{path}/last"
    if os.path.isdir(path):
        return os.path.realpath(path)
    try:
        # Weights and small files. Folders inside hold formats that are not read here. The folder
        # in the Hub's cache has the commit in its path.
        return snapshot_download(path, ignore_patterns=["*/*"],
                                 allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"])
    except (OSError, ValueError) as error:  # of the Hub, too
        reason = str(error).splitlines()[0]
        raise launch.UserError(f"--ckpt {path}: no such folder, and nothing from the Hub "
                               f"({reason})") from None


def adapter_config(ckpt):
    """The settings of a folder of adapters, {} for whole weights. Raises UserError for adapters
    that another tool has scaled in another way."""
    path = f"{ckpt}/adapter_config.json"
    if not os.path.exists(path):
        return {}
    config = json.loads(launch.read_file(path))
    if config["lora_alpha"] != 2 * config["r"] or config.get("use_rslora"):
        raise launch.UserError(f"checkpoint {ckpt}: lora_alpha of its adapters is not 2 r; merge "
                               "them with the tool that made them")
    return config


def base_of(ckpt):
    """Checkpoint folder -> the folder of the whole weights: itself, or the base of its adapters."""
    base = adapter_config(ckpt).get("base_model_name_or_path")
    return resolve(base) if base else ckpt


def adapter_rank(ckpt, rank):
    """--ckpt, --lora-rank -> the rank of the adapters that a stage trains; 0: all weights are
    trained. If the checkpoint holds adapters of another rank, loading refuses them."""
    return rank or adapter_config(resolve(ckpt)).get("r", 0)


def small_files(folder):
    """-> {name: bytes} of the files that training does not change: configuration, tokenizer,
    processor, chat template."""
    files = {}
    for name in sorted(os.listdir(folder)):
        # Others describe the weights beside them.
        of_weights = ("index.json", "adapter_config.json", "state.json")
        if name.endswith((".json", ".jinja", ".txt")) and not name.endswith(of_weights):
            files[name] = launch.read_file(f"{folder}/{name}")
    return files


def all_files(ckpt):
    """-> paths of all files of a checkpoint folder, and of the base of its adapters."""
    paths = []
    for folder in {ckpt, base_of(ckpt)}:
        paths += glob.glob(f"{glob.escape(folder)}/*.*")  # train_state/ has no dot
    return sorted(paths)


# ------------------------------------------------------------------------------------------------
# LoRA


class LoraLinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + 2 * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_adapters(hf, rank):
    """Adds adapters in fp32 to a frozen model on the meta device -> names of their matrices."""
    names = set()
    for path, module in hf.model.language_model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = LoraLinear
            a = torch.empty(rank, module.in_features, device="meta")
            b = torch.empty(module.out_features, rank, device="meta")
            module.lora_A = torch.nn.Parameter(a)
            module.lora_B = torch.nn.Parameter(b)
            names.add(path.split(".")[-1])
    return sorted(names)


def start_adapters(hf):
    """Gives new adapters their first values: A is small and random, B is zero, so that the adapted
    model equals the base."""
    draw = torch.Generator().manual_seed(0)  # every rank draws the same
    values = {}
    for name, p in hf.named_parameters():
        if name.endswith("lora_A"):
            bound = p.shape[1] ** -0.5
            values[name] = torch.empty(p.shape).uniform_(-bound, bound, generator=draw)
        if name.endswith("lora_B"):
            values[name] = torch.zeros(p.shape)
    # Each rank takes its own rows.
    set_model_state_dict(hf, values,
                         options=StateDictOptions(full_state_dict=True, strict=False))


def peft_name(name):
    """A parameter of the adapters -> its name in the files of peft."""
    return f"base_model.model.{name.removeprefix('hf.')}.weight"


class AdapterReference:
    """The KL reference of a run with adapters: the policy with the adapters it started from. The
    frozen weights are shared. The copy of the adapters is small beside them: 0.7 GB for the 8B at
    rank 64, and as much again during a call."""

    def __init__(self, policy):
        self.policy = policy
        self.start = self.swap(None)

    def __call__(self, *args):
        current = self.swap(self.start)
        output = self.policy(*args)
        self.swap(current)
        return output

    @torch.no_grad()
    def swap(self, values):
        """Copies of the adapters; then sets them to `values`, if there are any."""
        adapters = model.trained_parameters(self.policy)
        copies = [p.clone() for p in adapters]
        for p, value in zip(adapters, values or []):
            p.copy_(value)
        return copies


def with_adapters(name, weight, adapters):
    """W + 2 B A in fp32 -> in the dtype of W; a weight without adapters as it is. adapters: {name:
    tensor}, of shards a collective."""
    stem = name.removesuffix("weight")
    if f"{stem}lora_A" not in adapters:
        return weight
    a = whole_tensor(adapters[f"{stem}lora_A"]).float()
    b = whole_tensor(adapters[f"{stem}lora_B"]).float()
    return (weight.float() + 2 * (b @ a)).to(weight.dtype)


# ------------------------------------------------------------------------------------------------
# Load


def load_policy(ckpt, codec, device, recompute=False, lora_rank=0, frozen=False, replicas=1):
    """Checkpoint folder -> sharded Policy. Collective; no rank holds more than its shard.

    The model is built on the meta device, then every rank reads its own rows from the safetensors
    files. Trained weights are fp32 whatever the files hold. recompute: compute decoder layers again
    in backward. lora_rank: of adapters, the rest is frozen; 0: all weights are trained. frozen: a
    reference in its compute dtype, without a tower: it is given features. replicas: of model.shard.
    """
    import transformers

    base = base_of(ckpt)
    config = chat.load_config(base)
    with chat.as_user_error(base, "config.json"), torch.device("meta"):
        hf = getattr(transformers, config.architectures[0])(config)
    hf.tie_weights()
    # Published configurations say bf16. A step of 2e-6 would round to nothing in bf16.
    hf.float()
    if frozen or lora_rank:
        hf.requires_grad_(False)
        hf.to(model.compute_dtype(device))
        for name, p in hf.named_parameters():
            if name.endswith(codec.base.keep_fp32):
                p.data = p.data.float()
    files = small_files(ckpt)  # read now: the folder may change while the run goes on
    if lora_rank:
        config = {"peft_type": "LORA", "r": lora_rank, "lora_alpha": 2 * lora_rank,
                  "target_modules": add_adapters(hf, lora_rank), "base_model_name_or_path": base}
        files["adapter_config.json"] = json.dumps(config, indent=1).encode()
    policy = model.wrap_policy(hf, codec, device, recompute)
    qwen35.use_packed_layers(hf)  # Qwen3-VL has none
    policy = model.shard(policy, device, replicas, qwen35.shard_mixer)
    policy.to_empty(device=device)
    hf.tie_weights()  # to_empty unties weights that are not in shards
    # Rotary tables are computed, not stored, so they are made anew on the device.
    text, tower = hf.model.language_model, hf.model.visual
    text.rotary_emb = type(text.rotary_emb)(text.config).to(device)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
    if frozen:
        hf.model.visual = None  # a reference is given features
        if hasattr(policy, "set_reshard_after_forward"):
            # FSDP keeps the root whole after a forward, for a backward that never comes here.
            policy.set_reshard_after_forward(True, recurse=False)
    read_weights(hf, base, ckpt)
    policy.files = files
    return policy


@contextlib.contextmanager
def in_one_line(error_class, text):
    """An error of safetensors, or of torch's checkpoints, whose text ends with the error of a rank
    after its traceback, becomes one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, dcp.CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise error_class(f"{text} ({reason})") from None


def read_weights(hf, base, ckpt):
    """Every rank reads its own rows: the weights of the folder `base`, and the adapters of `ckpt`,
    or new ones. Raises UserError for weights of another model."""
    weights, adapters = {}, {}
    for name, p in hf.named_parameters():
        if ".lora_" in name:
            adapters[peft_name(name)] = p.detach()
        else:
            weights[name] = p.detach()
    with in_one_line(launch.UserError, f"checkpoint {ckpt}: its weights cannot be loaded"):
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(base))
        if base != ckpt:
            dcp.load(adapters, storage_reader=dcp.HuggingFaceStorageReader(ckpt))
        elif adapters:
            start_adapters(hf)


def merged_weights(ckpt):
    """Iterator of (name, tensor) of a checkpoint in host memory, with its adapters added."""
    from safetensors.torch import load_file

    adapters, base = {}, base_of(ckpt)
    if base != ckpt:
        for name, tensor in load_file(f"{ckpt}/adapter_model.safetensors").items():
            adapters[name.removeprefix("base_model.model.").removesuffix(".weight")] = tensor
    for path in glob.glob(f"{glob.escape(base)}/*.safetensors"):
        for name, tensor in load_file(path).items():  # a file has at most some gigabytes
            yield name, with_adapters(name, tensor, adapters)


# ------------------------------------------------------------------------------------------------
# Whole weights out of shards


def whole_tensor(tensor):
    """A sharded tensor -> the whole one on every rank. Collective. Others stay as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def full_weights(policy, dtype):
    """Iterator of (checkpoint name, full tensor) in `dtype`, with adapters added: for vLLM and for
    files. Collective: every rank has to run it to its end. A tied lm_head is left out, as in the
    checkpoint file."""
    state = policy.hf.state_dict()
    for name, tensor in state.items():
        tied = name == "lm_head.weight" and policy.hf.config.tie_word_embeddings
        if tied or ".lora_" in name:
            continue
        if not name.endswith(policy.codec.base.keep_fp32):
            tensor = tensor.to(dtype)  # before the gather: bf16 is half the traffic
        yield name, with_adapters(name, whole_tensor(tensor), state)


def trained_state(policy):
    """{name: weight} of the trained weights, a tied matrix once, without the frozen tower."""
    # After a forward without backward, FSDP keeps the root unsharded. state_dict() triggers the
    # hook that reshards it.
    policy.state_dict()
    return {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}


# ------------------------------------------------------------------------------------------------
# Save


def save_run(policy, optimizer, out, step, state):
    """Saves a run as out/step_NNNNNN. Collective; training waits, because a save takes seconds
    every some hundred steps. optimizer: one or a list. state: of resume_point; "best": (value,
    step). Raises RunError if the disk is full; then the newest checkpoint is the one before."""
    temp = f"{out}/.step.tmp"
    trained = trained_state(policy)
    if "adapter_config.json" in policy.files:  # all that is trained are adapters
        gathered = ((peft_name(name), whole_tensor(p)) for name, p in trained.items())
    else:
        dtype = model.compute_dtype(next(policy.parameters()).device)
        gathered = full_weights(policy, dtype)
    # Gathering is a collective, so every rank runs it to its end. Rank 0 keeps the tensors.
    rank, world = launch.rank_and_world()
    # A copy, because a gathered tensor is a part of a larger one, which safetensors refuses.
    weights = {name: p.to("cpu", copy=True) for name, p in gathered if rank == 0}
    moments = get_optimizer_state_dict(policy, optimizer)
    with in_one_line(launch.RunError, f"{temp} could not be written"):
        if rank == 0:
            shutil.rmtree(temp, ignore_errors=True)
            os.makedirs(temp)
            save_files(temp, policy.files, weights)
        launch.any_rank(False)  # a barrier: the folder is there
        # With one rank, save without collectives: gloo would start its own thread pool, the cores
        # would be oversubscribed, and every later step would take half longer.
        dcp.save({"model": trained, "optimizer": moments}, no_dist=world == 1,
                 checkpoint_id=f"{temp}/train_state")
    if rank == 0:
        state = {**state, "step": step, "code": launch.our_commit()}
        launch.write_atomic(f"{temp}/state.json", json.dumps(state, indent=1))
        launch.publish_folder(temp, f"{out}/step_{step:06d}")
        tidy(out, state)
    launch.any_rank(False)  # a barrier: no rank goes on before the folder has its name


def save_files(folder, files, weights):
    """Writes small files and weights: safetensors, above 4 GB several files and an index."""
    from huggingface_hub import save_torch_state_dict

    for name, content in files.items():
        launch.write_atomic(f"{folder}/{name}", content)
    pattern = "model{suffix}.safetensors"
    if "adapter_config.json" in files:
        pattern = "adapter_model{suffix}.safetensors"
    # A network disk reports a lost write at fsync, which publish_folder calls for each file.
    save_torch_state_dict(weights, folder, filename_pattern=pattern, max_shard_size="4GB")


# ------------------------------------------------------------------------------------------------
# Go on


def step_folders(out):
    """Checkpoints of a run, the newest first. Each has its name since all of it is on the disk."""
    # Not step_000010_keep, a copy that a user made.
    names = [name for name in os.listdir(out) if re.fullmatch(r"step_\d{6}", name)]
    return [f"{out}/{name}" for name in sorted(names, reverse=True)]


def tidy(out, state):
    """Sets the links `last` and `best`, and keeps the two newest checkpoints and the best one.
    After each save and at each start, since a kill may come before it."""
    folders = step_folders(out)
    _, best_step = state.get("best", (0, 0))  # of step 0 there is no folder
    best = f"{out}/step_{best_step:06d}"
    for name, folder in (("last", folders[0]), ("best", best)):
        if folder in folders:
            temp = f"{out}/.{name}.tmp"
            if os.path.lexists(temp):  # of a kill
                os.remove(temp)
            os.symlink(os.path.basename(folder), temp)
            os.replace(temp, f"{out}/{name}")
    launch.fsync(out)  # before older checkpoints go
    for folder in folders[2:]:
        if folder != best:
            shutil.rmtree(folder)


def settings_of(args, inputs):
    """All flags, and a digest of the rows that each flag of `inputs` names, as JSON keeps them."""
    settings = {**vars(args), "ckpt": resolve(args.ckpt)}  # `last` may link to another folder later
    for name, rows in inputs.items():
        settings[f"rows of --{name}"] = launch.stable_hash(json.dumps(rows))
    return json.loads(json.dumps(settings))


def changed_settings(settings, earlier):
    """Settings of two starts -> a text of those that may not differ, and do; "" if none does."""
    changes = []
    for name, value in settings.items():
        if name not in FREE and value != earlier.get(name):
            changes.append(f"{name} {earlier.get(name)} (now {value})")
    return ", ".join(changes)


def note_best(state, value, step):
    """Notes a step whose value is the highest so far: save_run links `best` to it."""
    if "best" not in state or value > state["best"][0]:
        state["best"] = value, step


def resume_point(args, inputs):
    """Where a run goes on -> (folder, its state), or (None, a state to begin with). Collective.

    args: all flags. inputs: {flag: rows that it names}. state: {"step", "settings", "best"?, ..},
    which save_run takes. Raises UserError if --out holds a run of other settings or rows, unless
    --resume: then the differences are printed, and the run goes on with the new ones.
    """
    settings = settings_of(args, inputs)
    folder, state = None, {"step": 0, "settings": settings}
    if launch.rank_and_world()[0] == 0 and step_folders(args.out):
        folder = step_folders(args.out)[0]
        state = json.loads(launch.read_file(f"{folder}/state.json"))
        tidy(args.out, state)
    # Every rank compares its own flags and rows with those of rank 0.
    folder, state = launch.gather_rows([(folder, state)])[0]
    changes = changed_settings(settings, state["settings"])
    if changes and not args.resume:
        raise launch.UserError(f"--out {args.out} holds a run with another {changes}; choose "
                               "another --out, or --resume to go on with the new settings")
    if changes:
        launch.print0(f"{folder}: {changes}")
    if "rows of --val" in changes:  # values on other rows cannot be compared
        state.pop("best", None)
    if folder:
        launch.print0(f"going on after step {state['step']} of {folder}")
    return folder, {**state, "settings": settings}


def load_train_state(policy, optimizer, folder):
    """Restores weights and moments, which any number of ranks saved, in place. Collective."""
    state = {"model": trained_state(policy),
             "optimizer": get_optimizer_state_dict(policy, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/train_state",
             no_dist=launch.rank_and_world()[1] == 1)  # as in save_run
    set_optimizer_state_dict(policy, optimizer, state["optimizer"])
