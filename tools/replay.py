"""
replay.py (tests/test_replay.py): one PARA-GRPO update from rollouts that were recorded, without an
engine.

The rewards are composed anew by the flags of this update, so that two rewards, two kinds of credit
or two learning rates can be compared on the same samples. All else is a step of grpo.py, whose
functions it calls. The log-probs in the record must be those of --ckpt, at --temperature.

Reads:  --ckpt, --rollouts: rollout JSONL of rollout.py, or of the rollouts/ of grpo.py.
Writes: --out/step_000001/ (checkpoint), --out/last, --out/log.jsonl, --out/args.json,
        --out/judge.jsonl (--judge-url)

  python tools/replay.py --preset toy --ckpt sft_out --rollouts r.jsonl --video-root toy --out D
  torchrun --nproc_per_node 8 tools/replay.py --ckpt C --rollouts grpo_out/rollouts/step_000007.* ..
"""
import asyncio
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import grpo
import launch
import model
import rewards
import rollout
import video
from plumbing import arguments, checkpoint, metrics
from plumbing.judge import open_judge
from tools import pick


def read_rollouts(paths: list[str], pay: rewards.RewardConfig) -> list[rollout.Episode]:
    """Rollout JSONL files -> Episodes, scored anew by `pay`. Raises UserError naming file and line,
    and for a task without an answer."""
    episodes = [rollout.from_dict(row) for row in pick.read_rollouts(paths)]
    for e in episodes:
        e.reward = rollout.compute_reward(e, pay)
        if not e.reward:  # a question of tools/ask.py
            raise launch.UserError(f"--rollouts: task {e.task['id']} has no answer to learn from")
    return episodes


def set_credit_places(episodes: list[rollout.Episode], codec: chat.ChatProcessor) -> None:
    """Sets the places of credit, which a record does not hold. Raises UserError if the frames of an
    episode are not those of its ids, or if the checkpoint has no such ids."""
    vocab_size = json.loads(codec.files["config.json"])["text_config"]["vocab_size"]
    for e in episodes:
        if e.context is None:
            continue
        for start, end in e.spans:
            pieces = chat.token_bytes_of(codec, e.context.ids[start:end])
            e.struct += [t for t, flag in enumerate(rewards.structural_mask(pieces), start) if flag]
        # Positions need frames and ids that fit, so an error here means that they do not.
        try:
            model.rope_positions(codec, e.context.ids, e.context.items)
            fits = max(e.context.ids) < vocab_size
        except (ValueError, IndexError):
            fits = False
        if not fits:
            raise launch.UserError(f"--rollouts: {e.group}, sample {e.sample}: its vision field "
                                   "names other frames than its ids hold, or its ids are not of "
                                   "this checkpoint")


def read_fault(group: list[rollout.Episode], source: video.VideoSource,
               features: model.VisionFeatures) -> str | None:
    """Why the video of a group cannot be read as it was recorded, or None. The features are
    computed, and kept for the update."""
    try:
        path = video.resolve(group[0].task["video"], source.root)
        size = video.identity(path)[0]  # a copy has another mtime
        if any(e.fingerprint and e.fingerprint[0] != size for e in group):
            return f"{path}: has {size} bytes, so it is another file than was recorded"
        for item in group[0].context.items:
            features([item])
    except (video.VideoError, ValueError) as error:
        return launch.printable(error)


def main():
    parser = arguments.parser(__doc__)
    parser.add_argument("--rollouts", nargs="+", required=True, help="rollout JSONL files")
    grpo.add_training_arguments(parser)
    args = grpo.parse_training_arguments(parser)
    pay, ckpt = grpo.reward_config(args), checkpoint.resolve(args.ckpt)
    episodes = read_rollouts(args.rollouts, pay)
    _, source = rollout.agent_settings(args, args.rollouts[0])
    launch.make_out(args.out)
    launch.lock(args.out)
    judge = open_judge(args, os.path.join(args.out, "judge.jsonl"))
    rank, world, device = launch.start_process_group(args.patience, args.cpu)
    launch.reset_watchdog(args.patience)
    rows = [e.to_dict() for e in episodes]
    folder, state = checkpoint.resume_point(args, {"rollouts": rows})
    if folder:
        launch.print0(f"nothing to do: {args.out} has the update")
        return launch.end_process_group()
    source.cache.check_present(args, args.rollouts[0], [e.task for e in episodes if e.context])
    launch.print0(f"{args.ckpt} -> {args.out}: loading the checkpoint")
    codec = chat.load_codec(ckpt, args.channel, args.chat_template_kwargs)
    set_credit_places(episodes, codec)
    policy, reference, optimizer = grpo.load_models(args, ckpt, codec, source, device, None)
    log = metrics.open_log(args, 0, f"one update from the rollouts of {len(args.rollouts)} files")

    # A rank takes whole groups, because sigma needs all rollouts of a group.
    clock, groups = time.monotonic(), grpo.group_by_prompt(episodes)[rank::world]
    episodes = [e for group in groups for e in group]
    # Before the first forward, which all ranks take together.
    faults = [True] * len(groups)
    for _ in range(2):  # a read may fail once
        faults = [f and read_fault(g, source, policy.features) for g, f in zip(groups, faults)]
    texts = [*filter(None, faults)]
    if launch.any_rank(launch.MACHINE in str(texts)) or not launch.any_rank(not all(faults)):
        raise launch.RunError(f"--rollouts: no video can be read; is the disk there? {texts[:1]}")
    for group, fault in zip(groups, faults):
        if fault:
            print(f"skipped task {group[0].task['id']}: {fault}", flush=True)
            for e in group:  # the log counts them
                e.fail("video_error", fault)
    groups = [group for group, fault in zip(groups, faults) if not fault]
    if judge:
        async def score_all():
            await asyncio.gather(*(rollout.score_episode(e, pay, judge) for e in episodes))

        asyncio.run(score_all())
    for group in groups:
        grpo.set_advantages(group)
    rollout_s = time.monotonic() - clock
    launch.reset_watchdog(args.patience)

    clock, (trees, tokens, skipped) = time.monotonic(), grpo.training_trees(groups, args)
    stats = grpo.update(policy, reference, optimizer, trees, tokens, args)
    grpo.check_gap(0, stats["gap"], grpo.gap_tolerance())
    metrics.log_step(log, 0, 1, episodes, stats, {
        "skipped": skipped, "groups": len(groups), "packed": sum(map(len, trees)),
        "judge": judge is not None, "decode_s": 0.0, "rollout_s": rollout_s,
        "train_s": time.monotonic() - clock, "sync_s": 0.0})
    checkpoint.save_run(policy, optimizer, args.out, 1, state)
    if rank == 0:
        log.close(1, 1)
    if judge:
        judge.close()
    launch.end_process_group()


if __name__ == "__main__":
    launch.run_main(main)
