"""
plumbing/metrics.py (tests/test_metrics.py): numbers of a run, from episodes to log.jsonl, the
terminal and a tracker.

  row      = the numbers of one episode, small enough to send to rank 0
  metrics  = means over the rows that are ok, sums over ranks, the same per K and per type
  signs    = warnings that a run learns nothing, with the likely cause

What each number means: docs/metrics.md. Reads and writes --out/log.jsonl. Used by sft.py,
grpo.py and tools/replay.py.
"""
import contextlib
import json
import math
import os
import sys
import time

import launch
import rewards
from plumbing import runs, tracker

PHASES = ("rollout_s", "train_s", "sync_s")  # their seconds are logged


def log_step(log, step, steps, episodes, stats, counts):
    """Writes the metrics of a step, and warns of signs that the run learns nothing. episodes,
    counts: of this rank; stats: of all ranks. Collective."""
    rows = launch.gather_rows([episode_row(e) for e in episodes])
    counts = launch.gather_rows([counts])
    if not log:  # rank 0 alone writes
        return
    # Numbers that are summed over ranks instead of averaged over rollouts. Seconds and speeds are
    # those of rank 0, because ranks wait for each other at the update.
    first, packed = counts[0], sum(c["packed"] for c in counts)
    sampled = sum(row["length"] + row["sub_tokens"] for row in rows)
    m = {**summarise(rows), **stats, **{name: first[name] for name in PHASES},
         "zero_variance": sum(c["skipped"] for c in counts), "packed_tokens": packed,
         "groups": sum(c["groups"] for c in counts), "decode_s": max(c["decode_s"] for c in counts),
         "rollout_tokens_per_s": sampled / max(first["rollout_s"], 1e-9),
         "train_tokens_per_s": packed / max(first["train_s"], 1e-9), "step": step + 1}
    if first["judge"]:
        judged = [row for row in rows if row["judge"] is not None]
        m |= {"judged": len(judged),
              "judge_failed": sum(row["judge"] == "fallback" for row in judged),
              "judge_cached": sum(r["judge_cached"] for r in judged if r["judge"] != "fallback")}
    log.write(m, step_line(m, steps, log.eta(step + 1, steps)))
    warnings = {key: line for key, line in run_warnings(log.rows).items() if key not in log.warned}
    # Once per run, and one line per step: the first sign is the cause, others follow from it.
    # After a collapse of the whole run every other number looks bad too.
    if warnings and not log.warned & {"f_tau", "entropy", "failed"}:
        print(f"WARNING step {step + 1}: {next(iter(warnings.values()))}", flush=True)
    log.warned |= warnings.keys()


def episode_row(e):
    """The numbers of one episode for the log, small enough to send to rank 0."""
    # f_tau uses the paper's terms in every run, so that runs with other terms can be compared.
    executed = sum(call["status"] == "ok" for call in e.calls)
    ruler = rewards.format_reward(e.turns, e.think_open)
    return {
        "K": e.num_frames, "type": e.task["type"], "group": e.group, "status": e.status,
        "f_tau": ruler["total"], "well_formed": ruler["well_formed"],
        # All numbers of the reward, so a term that is added in rewards.score is logged by itself.
        "reward": {name: n for name, n in e.reward.items() if name not in ("judge", "windows")},
        "acc": e.reward.get("acc"),  # none without a label
        # Counts, not shares: shares of rollouts with few tags would weigh as much as those of many.
        "closure": rewards.closure_counts(e.turns, e.think_open),
        "written": len(e.calls), "parseable": sum(call["parseable"] for call in e.calls),
        "executed": executed,
        "turns": len(e.turns),
        "length": sum(e.context.mask) if e.context else 0,
        "cut": sum(reason == "length" for reason in e.finish),
        "sub_tokens": sum(call["sub_tokens"] for call in e.calls),
        # Of rollouts that looked: `called` counts the others.
        "windows": e.reward.get("windows") if executed else None,
        "judge": e.reward.get("judge"), "judge_cached": e.notes.get("judge_cached", False)}


def mean(values):
    """Mean of the numbers that are not None, None if there are none."""
    values = [float(value) for value in values if value is not None]
    return sum(values) / len(values) if values else None


def by_value(rows, name, cell):
    """{value of a column: cell(rows that have this value)}."""
    return {str(value): cell([row for row in rows if row[name] == value])
            for value in sorted({row[name] for row in rows})}


def call_minus_skip(rows):
    """How much R_acc a call was worth, compared within prompts: mean of the rollouts that wrote a
    call minus mean of those that did not. A call that was written and not run counts: the policy
    decides to write, and what then gets lost is part of the price. R_tool is left out, because it
    pays for calling. None if no prompt has both."""
    # Within prompts, because easy prompts are called less and answered better.
    groups = {}
    for row in rows:
        wrote = row["written"] > 0 or any(row["closure"][kind][0] for kind in rewards.CALLS)
        if row["acc"] is not None:
            groups.setdefault(row["group"], ([], []))[wrote].append(row["acc"])
    return mean(mean(b) - mean(a) for a, b in groups.values() if a and b)  # without calls, with


def summarise(rows):
    """Episode rows of all ranks -> the step's metrics: means over the rollouts that are ok. A
    broken video has no accuracy and no format, so zeros for it would blame the policy."""
    failed = sum(row["status"] != "ok" for row in rows)
    terms = dict.fromkeys(name for row in rows for name in row["reward"])
    # From here on only rollouts that are ok. None stands for a mean over nothing.
    rows = [row for row in rows if row["status"] == "ok"]

    # The Tool Necessity Gap shows per K only: with 64 frames a call is worth little. A dead task
    # type among several shows per type only.
    def cell(group):
        out = {"n": len(group), **{name: mean(row[name] for row in group)
                                   for name in ("acc", "f_tau", "well_formed")},
               "kappa": mean(row["executed"] for row in group),
               "call_minus_skip": call_minus_skip(group)}
        # Means over rollouts that looked and whose tasks have evidence.
        looked = [row["windows"] for row in group if row["windows"]]
        return out | {f"window_{k}": mean(w[k] for w in looked) for k in (looked or [{}])[0]}

    out = {"total": None}  # if no task has a label
    out |= {name: mean(row["reward"][name] for row in rows if row["reward"]) for name in terms}
    out |= {name: number for name, number in cell(rows).items() if name != "n"}
    columns = {"length": "length", "turns": "turns", "sub_tokens": "sub_tokens",
               "written_calls": "written", "valid_calls": "parseable"}
    out |= {name: mean(row[column] for row in rows) for name, column in columns.items()}
    out["called"] = mean(float(row["executed"] > 0) for row in rows)
    # Of all turns of the step, a rollout of three turns counts three times.
    turns = sum(row["turns"] for row in rows)
    out["cut_turns"] = sum(row["cut"] for row in rows) / turns if turns else None
    out["not_ok"] = failed
    # Closed / opened over all turns of the step. None: no such tag was opened.
    out["closure"] = {}
    for tag in rewards.KINDS:
        opened, closed = (sum(row["closure"][tag][i] for row in rows) for i in (0, 1))
        out["closure"][tag] = closed / opened if opened else None
    return out | {"by_K": by_value(rows, "K", cell), "by_type": by_value(rows, "type", cell)}


def run_warnings(history):
    """Rows of the log -> {name: line}: signs that a run learns nothing, with the likely cause. The
    thresholds are wide, so that healthy runs show none."""
    lines = {}
    history = [row for row in history if "by_type" in row]  # the others hold held-out accuracy
    m, three = history[-1], history[-3:]

    def lasting(test, rows):
        return len(rows) == 3 and all(map(test, rows))

    # Both fall slowly in a healthy run. A step that is too long breaks them at once.
    for name in ("f_tau", "entropy"):
        values = [row[name] for row in history[-6:] if row[name] is not None]
        if len(values) > 1 and max(values) > 0.1 and values[-1] < max(values) / 2:
            lines[name] = (f"{name} fell from {max(values):.2f} to {values[-1]:.2f} within five "
                           "steps: --lr is probably too high")
    # A turn that is cut has no answer and no closing tag.
    if (m["cut_turns"] or 0) > 0.5:
        lines["cut"] = (f"{m['cut_turns']:.0%} of all turns were cut off: --max-new-tokens is too "
                        "small, or the policy does not end its turns")
    # Such a run is paid by another reward than it was started with.
    if m.get("judge_failed", 0) > m.get("judged", 0) / 2:
        lines["judge"] = (f"the judge failed on {m['judge_failed']} of {m['judged']} answers, and "
                          "token F1 paid them instead: is its server up?")
    # Nothing was sampled, so no other number moves.
    if lasting(lambda row: row["not_ok"] and row["acc"] is None, three):
        lines["failed"] = "no rollout has been ok for 3 steps: see the lines of skipped tasks"
    # A tag that nothing opens has no share.
    for kind in rewards.KINDS:
        shares = [row["closure"][kind] for row in three]
        if lasting(lambda share: share is not None and share < 0.5, shares):
            lines[f"open {kind}"] = (f"most <{kind}> tags were never closed for 3 steps: the cold "
                                     "start did not teach the format, or --lr is too high")
    for kind in m["by_type"]:
        cells = [row["by_type"][kind] for row in history if kind in row["by_type"]]
        if lasting(lambda cell: cell["acc"] == 0, cells[-3:]):
            lines[f"type {kind}"] = (
                f"no rollout of a task of type {kind} has earned accuracy for 3 steps: see whether "
                "the labels are right and in the form that the answers have (--set show_every=1)")
    # Without a signal no weight moves, so the next steps look the same. A few groups may be equal
    # by chance.
    equal = lasting(lambda row: row["groups"] and row["zero_variance"] == row["groups"], three)
    if equal and sum(row["groups"] for row in three) >= 24:
        lines["signal"] = ("no group has had a signal for 3 steps, because all rollouts of a prompt"
                           " earn the same: tasks too hard or too easy, --temperature or "
                           "--num-generations too low, or a broken policy")
    return lines


def best_so_far(state, worst):
    """Loop state of a run, {} at its start -> what `update_best` compares with, and its step.
    worst: a value that each other one beats."""
    names = ("best_step", "best_unread", "last_unread")  # None: there is none yet
    return {"best": state.get("best", worst), **{name: state.get(name) for name in names}}


def update_best(best, value, step, unread, sign=1):
    """Notes a held-out value in `best`, of best_so_far, if it is the highest one, with sign -1 the
    lowest. NaN says nothing: no number, or an evaluation while something was away. unread: rows
    whose videos could not be read, so that the value is a mean over the others; means over other
    rows cannot be compared. `best` begins anew if more rows can be read than at `best`, and if the
    same ones could not be read twice in a row: they have gone for good."""
    if math.isnan(value):
        return
    limit, last = sign * best["best"], best["last_unread"]
    before = last if best["best_unread"] is None else best["best_unread"]
    if before not in (None, unread):
        recovered = set(unread) < set(before) or unread == last
        launch.print0(f"held-out rows not read: {len(before)} before, {len(unread)} now,"
                      + (" so `best` begins anew" if recovered else " so this is no `best`"))
        limit = -math.inf if recovered else math.inf
    if sign * value > limit:
        best.update(best=value, best_step=step, best_unread=unread)
    best["last_unread"] = unread


def log_held_out(log, step, rows):
    """Logs the held-out accuracy of an evaluation, with and without tools, per K and type -> (that
    with tools, NaN of no task and if a judge gave no verdict on a quarter; ids of the tasks that
    failed, which it leaves out). rows: of this rank. Collective."""
    # A broken video says nothing of the policy. A context that overflowed counts as a wrong answer.
    rows = launch.gather_rows(rows)
    finished = [row for row in rows if row["status"] in ("ok", "context")]

    def cell(group):
        with_tools, without = ([row for row in group if row["tools"] is on] for on in (True, False))
        return {"n": len(with_tools), "acc": mean(row["acc"] for row in with_tools),
                "acc_without_tools": mean(row["acc"] for row in without)}

    # A K or a type may be worse while the mean is better.
    val = {**cell(finished), "not_ok": len(rows) - len(finished),
           **{f"by_{name}": by_value(finished, name, cell) for name in ("K", "type")}}
    if log:
        failed = f" | not ok {val['not_ok']}" if val["not_ok"] else ""
        log.write({"step": step, "val": val}, f"step {step:04d} | held-out acc "
                  f"{number(val['acc'])} no tools {number(val['acc_without_tools'])}{failed}")
    unread = {row["id"] for row in rows} - {row["id"] for row in finished if row["tools"]}
    verdicts = [row["judge"] for row in finished if row["tools"] and row["judge"] is not None]
    away = val["acc"] is None or verdicts.count("fallback") > len(verdicts) / 4
    return math.nan if away else val["acc"], sorted(unread)


def number(value, form=".2f"):
    """A number for the terminal, "-" for None."""
    return "-" if value is None else format(value, form)


def step_line(m, steps, eta):
    """The numbers to watch, on one line of the terminal. log.jsonl has all. eta: seconds."""
    # Only if some failed: a column of zeros would hide the one that matters.
    details = f"not ok {m['not_ok']} | " if m["not_ok"] else ""
    if "window_recall" in m:
        details += f"window recall {number(m['window_recall'])} IoU {number(m['window_iou'])} | "
    if "judged" in m:
        details += f"judged {m['judged']} failed {m['judge_failed']} cached {m['judge_cached']} | "
    return (f"step {m['step']:04d}/{steps:04d} | R {number(m['total'])} acc {number(m['acc'])} "
            f"f_tau {number(m['f_tau'])} kappa {number(m['kappa'])} | {details}"
            f"gap {number(m['gap'], '.0e')} gn {number(m['grad_norm'])} "
            f"zero {m['zero_variance']}/{m['groups']} | "
            f"roll {m['rollout_s']:.1f}s train {m['train_s']:.1f}s | eta {eta / 60:.1f}m")


def open_log(args, start, size):
    """On rank 0: writes the settings beside the outputs, prints `size`, the size of the run -> Log.
    None on other ranks. start: the step after which the run goes on."""
    rank, world = launch.rank_and_world()
    if rank:
        return None
    # args.json before the first step: a run that dies early still says how it was started.
    runs.write_args(os.path.join(args.out, "args.json"), args)
    # Deletes files that a killed run left half-written and, in a new run, older checkpoints.
    runs.clean_run(args.out, start)
    print(f"{size} | {world} rank{'s' if world > 1 else ''}", flush=True)
    return Log(args.out, start, args)


class Log:
    """Rank 0's numbers of each step: the same to log.jsonl, to the terminal and to --track."""

    def __init__(self, out, start, args):
        """start: the step after which the run goes on. Lines of later steps and a torn last line
        are dropped."""
        path = os.path.join(out, "log.jsonl")
        self.out, self.start, self.began = out, start, time.monotonic()
        self.rows = [row for row in whole_rows(path) if row["step"] <= start] if start else []
        self.warned = set()  # warnings already given by this process
        launch.write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = open(path, "a", encoding="utf-8")
        self.tracker = tracker.start_tracker(out, start, args)

    def write(self, record, line):
        """Adds a row to log.jsonl and to --track, and prints `line`."""
        self.rows.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(line, flush=True)
        if self.tracker:
            numbers = tracker.flat_numbers(record)
            self.track("log", numbers, step=numbers.pop("step"))

    def track(self, call, *args, **named):
        """Calls a function of --track. Errors are printed once, and end no run."""
        try:
            getattr(self.tracker, call)(*args, **named)
        except Exception as error:  # of whatever kind: log.jsonl has the numbers
            if "track" not in self.warned:
                reason = f"{type(error).__name__}: {launch.printable(error)}"
                print(f"--track: {reason}; the run goes on, log.jsonl has all numbers",
                      file=sys.stderr, flush=True)
            self.warned.add("track")

    def eta(self, step, steps):
        """Seconds until step `steps` at the pace so far."""
        return (time.monotonic() - self.began) / (step - self.start) * (steps - step)

    def close(self, step, steps):
        """Prints how the run ended."""
        idle = sum(bool(row.get("bad_steps") or row.get("skipped_update")) for row in self.rows)
        end = (f"done: {steps - self.start} steps in {(time.monotonic() - self.began) / 60:.1f} min"
               f" -> {self.out}/last" + f" ({idle} of {steps} moved no weight)" * bool(idle))
        if step < steps:
            end = f"stopped after step {step} of {steps}; the same command goes on from {self.out}"
        print(end, flush=True)
        self.file.close()
        if self.tracker:
            self.track("finish")


def whole_rows(path):
    """Rows of a log, without a line that a crash cut off."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in launch.read_file(path).split(b"\n")[:-1]:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # no row with a step
                row = launch.parse_json(line)
                if row["step"] >= 0:
                    rows.append(row)
    return rows
