"""
bench/lossy.py: grpo.py for the ablation: R_acc as in the authors' release, and calls that get lost;
or R_tool for windows that meet the evidence alone.

  R_acc reads the answer block, or else the last line with a word, so only R_fmt asks for the tags.
  P(a written, parseable call is served) = q, drawn per call; a lost one gets an error as its
  response, as if its window could not be looked at. R_tool and kappa count served calls.

The draw depends on the call's sampling seed alone, so a run can be repeated. bench/ablation.py runs
this script for its main rows (q = 1) and for its phase diagram: when does RL drop calls, and when
does it keep them?

With the word `hit` in the place of q nothing else changes than R_tool: a call counts as executed if
its window meets the task's evidence, and as parseable otherwise.

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
    answer = rewards.last_answer(turns[-1], think_open)[0] if turns else None
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


def paying_hits(score):
    """rewards.score -> the same, but that R_tool counts windows that meet the evidence alone."""
    def paid(turns, task, calls=(), think_open=True, pay=None, *more, **named):
        def hit(call):
            span = [(call["start"], call["end"])] if call["status"] == "ok" else []
            return not span or rewards.window_scores(span, task["evidence"])["hit"]

        def scored(calls):
            return score(turns, task, calls, think_open, pay, *more, **named)

        found = scored(calls)
        if task.get("evidence"):
            hits = [call if hit(call) else {**call, "status": "missed"} for call in calls]
            tool = scored(hits)["tool"]
            change = (pay or rewards.Pay()).tool_weight * (tool - found["tool"])
            found.update(tool=tool, paid_task=found["paid_task"] + change,
                         total=found["total"] + change)
        return found

    return paid


def main():
    if sys.argv[1:2] == ["hit"]:
        del sys.argv[1]
        rewards.score = paying_hits(rewards.score)
        return grpo.main()
    try:
        success = float(sys.argv.pop(1))
    except (IndexError, ValueError):
        success = -1.0
    if not 0 <= success <= 1:
        raise launch.UserError("bench/lossy.py Q FLAGS: Q is the probability that a written call "
                               "is served, or the word hit; FLAGS are those of grpo.py")
    rewards.final_answer = stated_answer
    rollout.sub_agent = losing(rollout.sub_agent, success)
    grpo.main()


if __name__ == "__main__":
    launch.run_main(main)
