"""
plumbing/runs.py (tests/test_identity.py): what rollouts and records are made from.

Reads and writes the file of rollout.py.
"""
import hashlib
import json
import os
import pathlib
import re
import shutil

import launch
from plumbing import hub

# ------------------------------------------------------------------------------------------------
# The folder of a run


def clean_run(out, start):
    """On rank 0, at a start: deletes files that killed runs left half-written, rollouts of steps
    that this run will take again and, if a run begins anew, its older checkpoints."""
    # .tmp: of write_atomic and symlink; .step_: of atomic_folder and prune_checkpoints
    old = r"(\.step_.*|.*\.tmp\d+)" if start else r"(\.step_.*|.*\.tmp\d+|step_\d{6,}|last|best)"
    for path in [*pathlib.Path(out).iterdir(), *pathlib.Path(out, "rollouts").glob("*")]:
        rollouts = re.match(r"step_(\d+)\.rank", path.name)
        if re.fullmatch(old, path.name) or (rollouts and int(rollouts[1]) >= start):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


# ------------------------------------------------------------------------------------------------
# From what a run is made, and where it goes on


def input_identities(ckpts, rows, subtitles=()):
    """-> {what a run reads: [digest, name]}, for resume_point. Collective. Raises UserError if two
    ranks have read other rows or checkpoints, or two machines, by a rank of each, other subtitles.
    ckpts: {flag: folder, as resolved}. rows: {flag: (path or None, rows as read from there: a file
    may be replaced after it was read)}. subtitles: [(folder, name)]. Not the videos, which are
    terabytes: each record holds the identity of its own."""
    inputs = {flag: [hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16], path or "none"]
              for flag, (path, content) in rows.items()}
    # Each rank resolves these: `last` may move meanwhile, and the Hub gives another commit.
    inputs |= {flag: [content_digest(ckpt), ckpt] for flag, ckpt in ckpts.items()}
    if os.environ.get("LOCAL_RANK", "0") == "0":  # a machine may have copies of its own
        inputs["subtitles"] = [digest_of(subtitles), None]
    first, *others = launch.gather_rows([inputs])
    if differ := [f for other in others for f in other if other[f][0] != first[f][0]]:
        raise launch.UserError(f"{differ[0]}: another rank of this run has read other bytes")
    return first


def content_digest(ckpt):
    """Digest of the content of a checkpoint folder, wherever the folder lies. Small files count
    whole, weights with 4 KiB of every MiB, because 16 GB would take minutes to read."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(ckpt)):
        path = os.path.join(ckpt, name)
        # Not a README, an optimizer, the state of its training.
        if name == "state.json" or not name.endswith((".safetensors", ".json", ".jinja", ".txt")):
            continue
        if name == "adapter_config.json":  # counts with its base's digest, not with the base's path
            config = launch.parse_json(launch.read_file(path))
            config.pop("base_model_name_or_path", None)
            digest.update(json.dumps(config, sort_keys=True).encode())
            continue
        size = os.path.getsize(path)
        # bytes; 2**12 reads all of a file
        stride = 2**20 if name.endswith(".safetensors") and size > 2**26 else 2**12
        digest.update(f"{name} {size}".encode())
        with open(path, "rb") as f:
            for at in range(0, size, stride):
                f.seek(at)
                digest.update(f.read(2**12))
    return digest.hexdigest()


def digest_of(files):
    """Digest of the bytes and names of files [(folder, name)]. The folder does not count, so that
    data may move. OSError: a file is gone that was there before."""
    digests = []
    for folder, name in sorted(set(files)):
        path = os.path.join(folder, name)
        if os.path.exists(path) and not os.path.isfile(path):  # read a second time, a pipe is empty
            raise launch.UserError(f"{path}: is not a regular file")
        digests.append((name, hashlib.sha256(launch.read_file(path)).hexdigest()))
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def write_args(path, args, **fields):
    """Writes the settings of a run, the commit of this code, and the folders of checkpoints from
    the Hub, whose paths name commits, as JSON. fields: further ones."""
    content = {**vars(args), "code": launch.our_commit(), "hub": hub.fetch_ckpt.folders, **fields}
    launch.write_atomic(path, json.dumps(content, indent=1))


def settings_diff(args, inputs, run):
    """What is not as it was at the start before -> [text of a flag or an input]. inputs: see
    identities. run: {"args": .., "inputs": ..} of that start."""
    # How far, how fast, where, and who is told: two parts of one run may differ in these.
    # Inputs are compared by content: files may move. The last three are no flags.
    ignored = ("steps epochs resume check out save_every eval_every show_every show max_num_seqs "
               "frame_cache_gb frame_cache_dir frame_cache_dir_gb gpu_memory_utilization patience "
               "dp_replicate track project judge_url judge_tokens judge_key_env "
               "ckpt data val missing_videos rollouts code hub inputs").split()
    new, old, was = json.loads(json.dumps(vars(args))), run.get("args", {}), run.get("inputs", {})
    flags = [f"{k} {old[k]} (now {new.get(k, 'gone: use the code of that run')})"
             for k in sorted(old) if k not in ignored and (k not in new or old[k] != new[k])]
    return [f"{k} changed since" + f" ({was[k][1]}, now {inputs[k][1]})" * bool(was[k][1])
            for k in sorted(was) if k in inputs and inputs[k][0] != was[k][0]] + flags


def claim_file(out, args, inputs, names, required):
    """Makes --out of rollout.py this run's own -> the records that the file and its .part hold
    already. Raises UserError if these are of other settings, which lie beside them. inputs: see
    identities. names: {(group, sample)} of all rollouts; required: keys of a whole record. Other
    records are left out."""
    folder, name = os.path.split(os.path.abspath(out))
    launch.make_out(folder)
    launch.lock(folder, f".{name}.lock")
    # Not os.path.exists, which would take a fault of the disk for no file.
    paths = [os.path.join(folder, n) for n in (name, f"{name}.part") if n in os.listdir(folder)]
    old = {}
    if paths and os.path.isfile(args_path(out)):
        old = launch.parse_json(launch.read_file(args_path(out)))
    differ = (settings_diff(args, inputs, {"args": old, "inputs": old["inputs"]})
              if old.get("inputs") else [f"{args_path(out)} is missing or old"])
    if paths and differ:
        raise launch.UserError(f"{paths[0]} holds rollouts of other settings: "
                               f"{', '.join(differ[:3])}; choose another --out, or delete the file")
    rows = [row for path in paths
            for row in launch.read_jsonl(path, ("group", "sample"), faults=["torn lines"])]
    rows = {(row["group"], row["sample"]): row for row in rows
            if row.keys() >= required and not is_retried(row)}
    return [row for name, row in rows.items() if name in names]


def args_path(out):
    """The file of the settings of rollouts that are written to `out`."""
    return f"{out.removesuffix('.jsonl')}.args.json"


# Statuses of episodes and calls that say nothing of the policy.
MACHINE_FAULTS = ("video_error", "engine_error")


def is_retried(record):
    """Whether the next start tries the episode of a record again. The fault may have been one of
    the machine, which has passed; a label beyond the end, of a file that was still being copied; a
    judge that was away."""
    return record["status"] in (*MACHINE_FAULTS, "label_error") or unjudged(record.get("reward"))


def unjudged(reward):
    """Whether token F1 scored an answer, because its judge gave no verdict."""
    return (reward or {}).get("judge") == "fallback"
