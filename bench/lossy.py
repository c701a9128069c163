"""
bench/lossy.py: grpo.py for the ablation: R_acc as in the authors' release, and calls that get lost.

  R_acc reads the answer block, or else the last line with a word, so only R_fmt asks for the tags.
  P(a written, parseable call is served) = q, drawn per call; a lost one gets an error as its
  response, as if its window could not be looked at. R_tool and kappa count served calls.

The draw depends on the call's sampling seed alone, so a run can be repeated. bench/ablation.py runs
this script for its main rows (q = 1) and for its phase diagram: when does RL drop calls, and when
does it keep them?

Reads and writes: as grpo.py, whose flags follow q.

CPU toy: python bench/lossy.py 0.6 --preset toy --ckpt sft_out --data toy/rl.jsonl
"""
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grpo  # noqa: E402
import launch  # noqa: E402
import rewards  # noqa: E402
import rollout  # noqa: E402


def stated_answer(turns, think_open=False):
    """The text that the authors' release pays R_acc for: the final answer, else the last line with
    a word, after the thought or in an open one."""
    answer = rewards.final_answer(turns, think_open)
    if answer is not None or not turns:
        return answer
    tail = turns[-1].rpartition("</think>")[2]
    lines = [rewards.ANY_TAG.sub("", line).strip() for line in tail.split("\n")]
    return next((line for line in reversed(lines) if rewards.has_word(line)), None)


def losing(serve, success):
    """rollout.sub_agent -> the same, which serves a call with probability `success`."""
    async def sub_agent(record, spec, episode, sampler, turn, number):
        draw = random.Random(f"lost/{rollout.turn_seed(episode, sampler.agent, turn, number)}")
        if draw.random() < success:
            return await serve(record, spec, episode, sampler, turn, number)
        # what rollout.py writes if the server of the sub-agent fails
        record.update(status="error", summary="error: the window could not be looked at")

    return sub_agent


def main():
    try:
        success = float(sys.argv.pop(1))
    except (IndexError, ValueError):
        success = -1.0
    if not 0 <= success <= 1:
        raise launch.UserError("bench/lossy.py Q FLAGS: Q is the probability that a written call "
                               "is served, FLAGS are those of grpo.py")
    rewards.paid_answer = stated_answer
    rollout.sub_agent = losing(rollout.sub_agent, success)
    grpo.main()


if __name__ == "__main__":
    launch.run_main(main)
