"""
plumbing/log.py (tests/test_log.py): the numbers of a run, from episodes to log.jsonl, the terminal
and a tracker, and warnings that a run learns nothing.

  row       = the numbers of one episode, small enough to send to other ranks
  metrics   = means over the rows that training sees, of all ranks; the same per K and per type
  closed_T  = closed tags / opened tags of kind T in one rollout
  kappa     = executed calls per rollout

What each number means: docs/metrics.md. Reads and writes --out/log.jsonl; writes --out/args.json.
Used by sft.py and grpo.py.
"""
import glob
import importlib
import json
import os
import statistics
import time

import launch
import rewards

TAGS = ("think", "tool_call", "answer")
TRACKERS = ("trackio", "wandb", "swanlab")

# -----------------------------------------------------------------------------
# Episodes -> numbers


def episode_row(episode):
    """The numbers of one episode, and what they are grouped by."""
    row = {
        "status": episode.status,
        "group": episode.group,
        "K": episode.num_frames,
        "type": episode.task["type"],
        "written_calls": len(episode.calls),
        "kappa": episode.executed(),
        "called": episode.executed() > 0,
        "sub_tokens": sum(call["sub_tokens"] for call in episode.calls),
    }
    # All numbers of the reward: a term that is added to rewards.score is logged by itself.
    row.update(flat_numbers(episode.reward))
    if "judge" in episode.reward:  # a verdict, or that token F1 paid in its place
        row["judge_failed"] = episode.reward["judge"] == "fallback"
    if episode.turns:
        row["length"] = sum(episode.context.mask)  # sampled tokens of the main agent
        row["cut_turns"] = episode.finish.count("length") / len(episode.turns)
        # By the paper's terms in every run, so that runs which are paid by others can be compared.
        row["f_tau"], _ = rewards.format_reward(
            episode.turns, episode.calls, episode.think_open)
    text = "".join(episode.turns)
    for tag in TAGS:
        opened = text.count(f"<{tag}>")
        if tag == "think" and episode.think_open:
            opened += len(episode.turns)  # the forced prefix, which is no part of the text
        if opened > 0:
            row[f"closed_{tag}"] = min(1.0, text.count(f"</{tag}>") / opened)
    return row


def call_minus_skip(rows):
    """How much R_acc a call was worth: mean of the rollouts that wrote a call minus mean of those
    that did not, within prompts, because easy prompts are called less and answered better. A call
    that was written and not run counts: the policy decides to write. None if no prompt has both."""
    with_call, without = {}, {}  # prompt -> accuracies
    for row in rows:
        if "acc" in row:
            accs = with_call if row["written_calls"] > 0 else without
            accs.setdefault(row["group"], []).append(row["acc"])
    gains = []
    for group in with_call.keys() & without.keys():
        gains.append(statistics.fmean(with_call[group]) - statistics.fmean(without[group]))
    return statistics.fmean(gains) if gains else None


def means(rows):
    """Rows -> {name: mean of this number over the rows that have it}, and their count n."""
    values = {}
    for row in rows:
        for name, value in flat_numbers(row).items():
            values.setdefault(name, []).append(value)
    numbers = {name: sum(column) / len(column) for name, column in values.items()}
    return {"n": len(rows), **numbers, "call_minus_skip": call_minus_skip(rows)}


def episode_numbers(episodes):
    """Episodes of this rank -> metrics of all ranks. Collective."""
    return summarise(launch.gather_rows([episode_row(e) for e in episodes]))


def summarise(rows):
    """Episode rows of all ranks -> metrics. A broken video has no accuracy and no format, so zeros
    for it would blame the policy. A full context is the policy's own: means are over the rollouts
    that training sees."""
    trained = [row for row in rows if row["status"] in ("ok", "context")]
    metrics = means(trained)
    metrics["not_ok"] = sum(row["status"] != "ok" for row in rows)
    # The Tool Necessity Gap shows per K only: with 64 frames a call is worth little. A dead task
    # type among several shows per type only.
    for column in ("K", "type"):
        cells = metrics[f"by_{column}"] = {}
        for value in sorted({row[column] for row in trained}):
            cells[value] = means([row for row in trained if row[column] == value])
    return metrics


# -----------------------------------------------------------------------------
# Warnings


def signs(history):
    """Rows of the log -> {name: line}: signs that a run learns nothing, with the likely
    cause. The thresholds are wide, so that healthy runs show none."""
    lines = {}

    def column(name):  # of the rows that have this number
        return [row[name] for row in history if row.get(name) is not None]

    # Rounding does not grow tenfold: other weights, frames or kernels do.
    gaps = column("gap")
    if gaps and gaps[-1] > max(1e-3, 10 * statistics.median(gaps)):
        lines["gap"] = ("the gap is ten times the run's median: other weights or other inputs in "
                        "the engine, or --lr is too high")
    # Answers without a call earn as much, and the run goes on as one without tools.
    called = column("called")
    if called and max(called) > 0.3 and max(called[-3:]) < max(called) / 3:
        lines["calls"] = ("calls die out, `called` is a third of what it was: see "
                          "call_minus_skip, --frames gated, --tool-reward")
    for tag in TAGS:
        shares = column(f"closed_{tag}")
        if len(shares) > 2 and max(shares[-3:]) < 0.5:
            lines[tag] = (f"most <{tag}> tags stay open: the cold start did not teach the format, "
                          "--max-new-tokens is too small, or --lr is too high")
    return lines


# -----------------------------------------------------------------------------
# The log


class Log:
    """The numbers of each step: the same to log.jsonl, to the terminal and to --track. On ranks
    other than 0 it does nothing."""

    def __init__(self, out, start, steps, args):
        """start: the step after which the run goes on. Lines and rollouts of later steps and a torn
        last line are dropped. Writes args.json: a run that dies early still says how it was
        started. Raises UserError if the package of --track is missing."""
        self.rank = launch.rank_and_world()[0]
        if self.rank != 0:
            return
        self.out, self.start, self.steps = out, start, steps
        self.began = time.monotonic()
        self.rows, self.warned = [], set()
        # The run samples these steps anew. With fewer ranks it would not write over all files.
        for path in glob.glob(f"{glob.escape(out)}/rollouts/step_*"):
            if os.path.basename(path) >= f"step_{start:06d}":
                os.remove(path)
        path = os.path.join(out, "log.jsonl")
        if start > 0 and os.path.exists(path):
            rows = launch.read_jsonl(path, ("step",), faults=["a line that a kill has torn"])
            self.rows = [row for row in rows if row["step"] <= start]
        launch.write_atomic(os.path.join(out, "args.json"), json.dumps(vars(args), indent=1))
        launch.write_jsonl(path, self.rows)
        self.file = open(path, "a", encoding="utf-8")
        self.tracker = None
        if args.track:
            try:
                self.tracker = importlib.import_module(args.track)
            except ImportError:
                raise launch.UserError(f"--track {args.track}: not installed: pip install "
                                       f"{args.track}") from None
            # A start that goes on is another run there, of the same name. The tracker's own errors,
            # of a login or a network, end the run, which goes on with or without --track.
            name = os.path.basename(os.path.abspath(out))
            self.tracker.init(project="paravt", name=name, config=vars(args))

    def write(self, row, names):
        """Adds a row to log.jsonl and to --track, prints the numbers of these names, and warns once
        of each new sign. Ends a phase of the run, on every rank."""
        launch.reset_watchdog()
        if self.rank != 0:
            return
        step, numbers = row["step"], flat_numbers(row)
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.tracker:
            self.tracker.log(numbers, step=step)
        parts = [f"step {step:04d}/{self.steps:04d}"]
        for name in names.split():
            if name in numbers:
                parts.append(f"{name} {numbers[name]:.4g}")
        pace = (time.monotonic() - self.began) / max(1, step - self.start)  # seconds a step
        parts.append(f"eta {pace * (self.steps - step) / 60:.1f} min")
        print(" | ".join(parts), flush=True)
        for name, line in signs(self.rows).items():
            if name not in self.warned:
                print(f"WARNING step {step}: {line}", flush=True)
                self.warned.add(name)

    def close(self, step):
        """Prints how the run ended."""
        if self.rank != 0:
            return
        self.file.close()
        if self.tracker:
            self.tracker.finish()
        if step < self.steps:
            print(f"stopped after step {step}; the same command goes on from {self.out}")
        else:
            print(f"done: {step} steps -> {self.out}/last")


def flat_numbers(row, prefix=""):
    """A row of the log -> its numbers, {"by_K/4/acc": 0.5, ..}: trackers draw no text, no None."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers.update(flat_numbers(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)):
            numbers[f"{prefix}{name}"] = value
    return numbers
