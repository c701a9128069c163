"""
plumbing/tracker.py (tests/slow/test_survival.py): the numbers of a run, sent to trackio, wandb or
swanlab (--track).

Used by plumbing/metrics.py, sft.py and grpo.py. Writes --out/track.id, the name of the run there.
"""
import importlib.util
import os

import launch


def add_track_arguments(parser, add):
    """Flags of a tracker. add: add_argument of a group of the parser."""
    add("--track", choices=["trackio", "wandb", "swanlab"],
        help="send the numbers of log.jsonl there too; needs the package of this name")
    parser.add_setting("project", "of --track", "paravt")


def check_tracker(args):
    """Raises UserError if the package of --track is missing: before models are loaded."""
    # A folder wandb/ of earlier runs is found too, as a package without an origin.
    if args.track and not getattr(importlib.util.find_spec(args.track), "origin", None):
        raise launch.UserError(f"--track {args.track}: the package is not installed: "
                               f"pip install {args.track}")


def start_tracker(out, start, args):
    """-> the module of --track, in which a run has begun, or goes on if start > 0. None without
    --track. Raises UserError if the tracker refuses."""
    if not args.track:
        return None
    path = os.path.join(out, "track.id")  # a run that is begun anew here is another one
    if not start or not os.path.exists(path):
        launch.write_atomic(path, os.urandom(16).hex()[:21])
    with open(path, encoding="utf-8") as f:
        identity = f.read()
    # trackio knows a run by its name, so the name must be its own.
    name = f"{os.path.basename(os.path.abspath(out))}-{identity[:6]}"
    options = {"trackio": {}, "wandb": {"id": identity, "dir": out},
                "swanlab": {"id": identity, "log_dir": os.path.join(out, "swanlog")}}[args.track]
    try:
        tracker = importlib.import_module(args.track)
        tracker.init(project=args.project, name=name, config={**vars(args)},  # trackio adds to it
                     resume="allow", **options)
    except Exception as error:  # no login, no network: every tracker has errors of its own
        reason = " ".join(str(error).split())
        raise launch.UserError(f"--track {args.track}: {type(error).__name__}: {reason}") from None
    return tracker


def flat_numbers(value, name=""):
    """A row of the log -> its numbers, {"by_K/4/acc": 0.5, ..}: trackers draw no text, no None."""
    if isinstance(value, dict):
        parts = [flat_numbers(part, f"{name}/{key}") for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    return {name[1:]: value} if isinstance(value, (int, float)) else {}
