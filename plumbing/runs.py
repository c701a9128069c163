"""
plumbing/runs.py (tests/test_runs.py): the folder of a run: who writes there, that no output
overwrites an input, what it is made from, where it goes on.

  a run      out/step_NNNNNN/ = a checkpoint, train_state/ and state.json, which is written last and
             lists size and CRC-32 of every other file; out/last and out/best link to them
  identity   digests of all that a run reads but videos: checkpoints, rows, subtitles.
             A start that finds another one says so, or ends with exit code 2
  a kill     between any two file operations loses no checkpoint that was whole, and leaves nothing
             half-written under a final name

No torch at the top, so that `rollout.py --help` and tools/pick.py answer at once.

Reads and writes the folders of sft.py, grpo.py and tools/replay.py, and the file of rollout.py.
"""
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import chat
import launch
from plumbing import arguments, hub

# ------------------------------------------------------------------------------------------------
# The folder of a run


def claim_run(out, data_paths):
    """Makes the folder of a training run this run's own, or raises UserError before any long work:
    no log replaces an input, and no other run writes there."""
    rollouts = [f"rollouts/{name}" for name in files_in(os.path.join(out, "rollouts"))]
    outputs = [os.path.join(out, name) for name in ("log.jsonl", "args.json", *rollouts)]
    arguments.check_outputs(outputs, data_paths)
    launch.lock(out)  # until this process ends: two runs would delete each other's files
    # Proves that the disk can hold `last` and `best`. clean_run deletes what a kill leaves here.
    with tempfile.TemporaryDirectory(prefix=".step_", dir=out) as folder:
        os.symlink(f"a symbolic link in {out}", os.path.join(folder, "last"))  # named by an error


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
            config = chat.read_object(path)
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
    content = {**vars(args), "code": hub.our_commit(), "hub": hub.fetch_ckpt.folders, **fields}
    launch.write_atomic(path, json.dumps(content, indent=1))


def settings_diff(args, inputs, run):
    """What is not as it was at the start before -> [text of a flag or an input]. inputs: see
    identities. run: {"args": .., "inputs": ..} of that start."""
    # How far, how fast, where, and who is told: two parts of one run may differ in these.
    # Inputs are compared by content: files may move. The last three are no flags.
    ignored = ("steps epochs resume check out save_every eval_every show_every show max_num_seqs "
               "frame_cache_gb frame_cache_dir frame_cache_dir_gb gpu_memory_utilization patience "
               "dp_replicate decode_timeout track project judge_url judge_tokens judge_key_env "
               "ckpt data val missing_videos rollouts code hub inputs").split()
    new, old, was = json.loads(json.dumps(vars(args))), run.get("args", {}), run.get("inputs", {})
    flags = [f"{k} {old[k]} (now {new.get(k, 'gone: use the code of that run')})"
             for k in sorted(old) if k not in ignored and (k not in new or old[k] != new[k])]
    return [f"{k} changed since" + f" ({was[k][1]}, now {inputs[k][1]})" * bool(was[k][1])
            for k in sorted(was) if k in inputs and inputs[k][0] != was[k][0]] + flags


def resume_point(out, args, resume, inputs=None, base=None):
    """Where a run goes on -> (folder, its loop state), or (None, {}) to begin.

    resume None: go on if --out holds a run of the same settings, and raise UserError if it holds a
    run of others. True: go on with the new settings. False: begin anew and delete that run.
    inputs: see identities. They are settings too. base: the folder of whole weights that the
    adapters of --ckpt stand on, or --ckpt itself.
    """
    folder, state = (None, {}) if resume is False else undamaged_checkpoint(out)
    if args.ckpt != state.get("args", {}).get("ckpt"):  # else the run there began from it
        refuse_ckpt_in_out(args.ckpt, base, out)
    if folder is None:
        # Damaged after it was saved: the user decides.
        if resume is not False and (torn := step_folders(out)):
            raise launch.UserError(f"{torn[0]} is not whole (its state.json lists its files), and "
                                   "nothing else here is; --no-resume begins anew and deletes it")
        return None, {}
    differ = settings_diff(args, inputs or {}, state)
    if resume is None and differ:
        raise launch.UserError(f"--out {out} holds a run of other settings: "
                               f"{', '.join(differ[:3])}; choose another --out, or --resume to go "
                               "on with the new ones, or --no-resume to delete it")
    for text in differ:
        launch.print0(f"{folder}: {text}")
    # Values on other held-out rows cannot be compared.
    if any(text.startswith("--val ") for text in differ):
        launch.print0(f"{folder}: other held-out rows, so `best` begins anew")
        state = {k: v for k, v in state.items() if not k.startswith("best")}
    if launch.rank_and_world()[0] == 0:  # a kill may have come before the links
        clean_run(out, state["step"])
        update_links(folder, state)
    return folder, state


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
    old = chat.read_object(args_path(out)) if paths and os.path.isfile(args_path(out)) else {}
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


def refuse_ckpt_in_out(ckpt, base, out):
    """Raises UserError if --ckpt, or the base of its adapters, lies in --out, where a run deletes
    old checkpoints."""
    for folder in filter(None, (hub.config_folder(ckpt), base)):
        path = pathlib.Path(folder).resolve()
        if any(os.path.samefile(out, ancestor) for ancestor in (path, *path.parents)):
            raise launch.UserError(f"--ckpt {ckpt}: {folder} lies in --out {out}, where a run "
                                   "deletes old checkpoints; choose another --out")


def check_run(step, bad, out, blind, last):
    """Raises RunError, on all ranks alike, after three bad steps in a row, and after a last step
    that was blind: the disk with the videos is away, so the run is not done."""
    if bad >= (1 if last and blind else 3):
        reason = ("videos could not be read for {} steps; is the disk there? Or was a judge away?"
                  if blind else "no finite gradient for {} steps in a row;").format(bad)
        saved = newest_checkpoint(out)  # of this step: its evaluation alone is missing
        again = f"; --steps {step + 2} evaluates again" * f"{saved}".endswith(f"_{step + 1:06d}")
        raise launch.RunError(f"step {step + 1}: {reason} last saved: {saved}{again}")


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


# ------------------------------------------------------------------------------------------------
# Its checkpoints


def update_links(folder, state):
    """On rank 0, after a save and at a start: `last` links to the newest checkpoint `folder` and
    `best` to the one that its state names; others are pruned. The run has all that it needs,
    so an error is one line, and the run goes on."""
    out = os.path.dirname(folder)
    try:
        replace_link(os.path.join(out, "last"), folder)
        best = f"step_{state.get('best_step') or 0:06d}"  # 0: no folder has this name
        if launch.is_file(os.path.join(out, best), folders=True):
            replace_link(os.path.join(out, "best"), best)
        launch.fsync(out)  # before older checkpoints go
        prune_checkpoints(folder)
    except OSError as error:
        launch.print0(f"{error}: `last`, `best` or an old checkpoint stays as it was, and the run "
                      f"goes on; the newest whole checkpoint is {folder}")


def prune_checkpoints(newest, keep=2):
    """Deletes the whole step_* folders beside the checkpoint `newest`, but for the `keep` up to it,
    the best ones by the states of these, and what `last` and `best` stand for."""
    out = os.path.dirname(newest)
    # A newer one is damaged, else the run would have gone on from it.
    complete = list(filter(is_complete, step_folders(out)))  # torn folders are left out
    complete = complete[complete.index(newest):] if newest in complete else []
    # If the newest one is damaged, the run goes on from the one before, and that one's best.
    states = [chat.read_object(f"{folder}/state.json") for folder in complete[:keep]]
    best = [f"{out}/step_{state.get('best_step') or 0:06d}" for state in states]
    keep_paths = set(map(os.path.realpath, [*complete[:keep], *best, f"{out}/last", f"{out}/best"]))
    for folder in complete:
        if os.path.realpath(folder) not in keep_paths:
            # Rename first: clean_run then finds a folder that a kill left half deleted.
            doomed = os.path.join(out, f".{os.path.basename(folder)}.pruned")
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


def step_folders(out):
    """The folders of a run's checkpoints, whole or not, the newest first."""
    names = os.listdir(out)
    # Not step_000010_keep: a copy that a user made would count as newer, or be deleted.
    steps = sorted((int(n[5:]) for n in names if re.fullmatch(r"step_\d{6,}", n)), reverse=True)
    return [os.path.join(out, f"step_{step:06d}") for step in steps]


def newest_checkpoint(out):
    """The newest complete step_* folder of a run, or None."""
    return next(filter(is_complete, step_folders(out)), None)


def undamaged_checkpoint(out):
    """-> (the newest checkpoint whose bytes are those that were saved, its state.json), or
    (None, {}). Collective: reads every file once, a share on each rank."""
    for folder, whole in launch.broadcast([(f, is_complete(f)) for f in step_folders(out)]):
        state = chat.read_object(os.path.join(folder, "state.json")) if whole else {}
        damaged = changed_files(folder, state.get("crc32", {}))
        damaged += ["state.json"] * (state.get("own_crc32") not in (None, state_crc32(state)))
        if whole and not damaged:
            return folder, state
        launch.print0(f"{folder}: {(damaged or ['file'])[0]} gone or changed; using an older one")
    return None, {}


def changed_files(folder, saved):
    """{name: CRC-32 that was saved} -> names of the files that have another one. Collective: a
    share on each rank."""
    if None in (sums := checksums(folder, sorted(saved))).values():
        raise launch.RunError(f"{folder} cannot be read now; the same command tries again")
    return [name for name in saved if sums[name] != saved[name]]


def saved_sums(folder):
    """Checkpoint folder -> {name: CRC-32} by its state.json, of the weights that are there; {} if
    there is no state.json."""
    path = os.path.join(folder, "state.json")
    saved = chat.read_object(path).get("crc32", {}) if launch.is_file(path) else {}
    return {n: saved[n] for n in os.listdir(folder) if n in saved and n.endswith(".safetensors")}


def is_complete(folder):
    """Whether a checkpoint is whole: all files are as long as its state.json says. Raises OSError
    if the disk cannot say: the run must not go on from an older checkpoint then."""
    try:
        files = launch.parse_json(launch.read_file(f"{folder}/state.json"))["files"].items()
        return all(os.path.getsize(os.path.join(folder, name)) == size for name, size in files)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def mark_complete(folder, state, sums):
    """Writes state.json, the last file: the loop state, and size and CRC-32 of all other files."""
    if None in sums.values():
        raise OSError("a file cannot be read back")
    files = {name: os.path.getsize(os.path.join(folder, name)) for name in sums}
    state = {**state, "files": files, "crc32": sums}
    marker = json.dumps({**state, "own_crc32": state_crc32(state)}, indent=1)
    launch.write_atomic(os.path.join(folder, "state.json"), marker)


def state_crc32(state):
    """CRC-32 of the content of state.json but for this sum, which it may hold as own_crc32."""
    return zlib.crc32(json.dumps({**state, "own_crc32": None}, sort_keys=True).encode())


def checksums(folder, names):
    """-> {name: CRC-32} of files; None for a file that cannot be read. Collective: every rank reads
    its share."""
    rank, world = launch.rank_and_world()

    def file_crc32(name):
        number, buffer = 0, memoryview(bytearray(2**20))
        try:
            with open(os.path.join(folder, name), "rb", buffering=0) as f:
                while size := f.readinto(buffer):
                    number = zlib.crc32(buffer[:size], number)
                if f.tell() < os.fstat(f.fileno()).st_size:  # a disk that gives a part
                    return None
        except OSError:
            return None
        return number

    rank_names = names[rank::world]
    with ThreadPoolExecutor(4) as pool:  # zlib lets other threads run meanwhile
        return dict(launch.gather_rows(list(zip(rank_names, pool.map(file_crc32, rank_names)))))


def files_in(folder):
    """Sorted names of all files in a folder, relative to the folder."""
    paths = [os.path.join(at, name) for at, _, names in launch.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in paths)


# ------------------------------------------------------------------------------------------------
# Files and folders that appear whole


@contextlib.contextmanager
def atomic_folder(path):
    """Yields a temporary folder, which becomes `path` if the block ends without an error and is
    deleted otherwise. It replaces an older folder of that name."""
    parent = os.path.dirname(os.path.abspath(path))  # not made here: its disk may have gone
    temp = os.path.join(parent, f".{os.path.basename(path)}.{os.urandom(4).hex()}")
    os.mkdir(temp)  # with the mode of the umask; mkdtemp's is for the owner alone
    try:
        yield temp
        for folder, _, names in launch.walk(temp):
            for name in names:
                launch.fsync(os.path.join(folder, name))
            launch.fsync(folder)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temp, path)
        launch.fsync(parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # there is none after a success


def replace_link(link, target):
    """Makes `link` a relative link to the folder `target` beside it, atomically."""
    temp = f"{link}.{os.urandom(4).hex()}.tmp0"  # a kill here leaves it to clean_run
    os.symlink(os.path.basename(target), temp)
    os.replace(temp, link)
