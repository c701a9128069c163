"""
plumbing/hub.py (tests/test_checkpoint.py): names of checkpoints on the Hugging Face Hub.

  OWNER/NAME     stands for a checkpoint folder, unless a folder of this name exists: `fetch_ckpt`
  a commit       is a part of the path of what was fetched, and so of args.json and state.json
  a run          holds its newest checkpoint under `last`: `config_folder`
  adapters       on a base from the Hub name that base and its commit: `name_of`
  a model card   of every checkpoint says how it was made: `write_card`, `our_commit`

No torch here and no huggingface_hub at the top: both take time to import.

Reads the Hub, or its cache alone with HF_HUB_OFFLINE=1; writes that cache.
"""
import contextlib
import functools
import json
import os
import re
import subprocess

import launch


def fetch_ckpt(path: str, revision: str | None = None) -> str:
    """A name on the Hub, OWNER/NAME -> the folder of its files in the Hub's cache, whose path names
    the commit. Any other path, and one that exists here, is returned as it is. Raises UserError if
    the name cannot be fetched."""
    # A misspelt path below a folder that exists is no name.
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or os.path.isdir(path.partition("/")[0]):
        return path
    if path not in fetch_ckpt.folders:
        import huggingface_hub
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.utils import WeakFileLock

        try:
            os.makedirs(HF_HUB_CACHE, exist_ok=True)
            # One rank of a machine downloads. The others wait, then find the files in the cache.
            with WeakFileLock(os.path.join(HF_HUB_CACHE, ".fetched.lock")):
                fetch_ckpt.folders[path] = huggingface_hub.snapshot_download(
                    path, revision=revision, ignore_patterns=["*/*"],
                    allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"])
        except Exception as e:  # of the network, the disk and the Hub: of many classes
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:250]
            raise launch.UserError(f"--ckpt {path}: no such folder ({os.path.abspath(path)}), and "
                                   f"nothing from the Hub ({reason})") from None
        launch.print0(f"{path}: {fetch_ckpt.folders[path]} (an older one, if the Hub was away)")
    return fetch_ckpt.folders[path]


fetch_ckpt.folders = {}  # {name: folder} of this process; args.json holds them


def config_folder(path: str) -> str | None:
    """A checkpoint folder, a name on the Hub, or the run folder that holds a checkpoint under
    `last` -> the folder that has a config.json, None if there is none. UserError if there are
    two."""
    # sft.py and grpo.py link `last` to the newest checkpoint of their run.
    folders = [path := fetch_ckpt(path), os.path.join(path, "last")]
    found = [f for f in folders if launch.is_file(os.path.join(f, "config.json"))]
    if len(found) > 1:
        raise launch.UserError(f"--ckpt {path}: a config.json lies here and in {path}/last: give "
                               f"{path}/last, or delete one of the two")
    return found[0] if found else None


def name_of(folder: str) -> dict:
    """Folder of the base of adapters -> fields of adapter_config.json: a folder of the Hub's cache
    is named by its name and commit, so that others can load the adapters."""
    parts = re.search(r"models--([\w.-]+)/snapshots/([0-9a-f]{40})$", folder)
    if not parts:
        return {"base_model_name_or_path": folder}
    return {"base_model_name_or_path": parts[1].replace("--", "/", 1), "revision": parts[2]}


@functools.cache
def our_commit() -> str:
    """The commit of this code at the start, "-dirty" after an edit, "" if unknown. args.json and
    state.json hold it. Read once: a later `git pull` would name code that does not run."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = ["git", "-C", root, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    with contextlib.suppress(OSError):  # no git
        return subprocess.run(command, text=True, capture_output=True).stdout.strip()
    return ""


def write_card(folder: str, out: str, state: dict) -> None:
    """Writes README.md of a checkpoint of the run in `out`: the commit of this code, settings, the
    last numbers of the log. It claims nothing. state: of state.json."""
    # Of a local path the base name alone, because cards are published.
    args = {name: os.path.basename(value.rstrip("/"))
            if isinstance(value, str) and value not in fetch_ckpt.folders else value
            for name, value in state.get("args", {"ckpt": "?"}).items()}
    base, made = args["ckpt"], {"step": state.get("step"), "commit": our_commit(), "settings": args}
    # Of a path like out/sft the Hub would make a link to the model of somebody else.
    head = f"base_model: {base}\n" * (base in fetch_ckpt.folders)
    blocks = [json.dumps(made, indent=1)]
    with contextlib.suppress(OSError), open(os.path.join(out, "log.jsonl")) as file:
        blocks += file.readlines()[-1:]
    log = ", and the last line of its log" * (len(blocks) - 1)
    text = "".join(f"```json\n{block.rstrip()}\n```\n" for block in blocks)
    launch.write_atomic(f"{folder}/README.md", f"---\nlibrary_name: transformers\n{head}---\n\n"
                        f"Trained from {base} with ParaVT in flat scripts{log}:\n{text}")
