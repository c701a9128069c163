"""
plumbing/hub.py (tests/test_checkpoint.py): names of checkpoints on the Hugging Face Hub.

  OWNER/NAME     stands for a checkpoint folder, unless a folder of this name exists: `fetch_ckpt`
  a commit       is a part of the path of what was fetched, and so of args.json and state.json
  a run          holds its newest checkpoint under `last`: `config_folder`

No torch here and no huggingface_hub at the top: both take time to import.

Reads the Hub, or its cache alone with HF_HUB_OFFLINE=1; writes that cache.
"""
import os
import re

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
