"""
bench/wrong_window.py (tests/slow/test_rollout.py): eval.py, but one call of each episode is
answered with another window of the same length, which shows none of the task's evidence if there is
one.

How much accuracy does an agent lose by one wrong answer among several of one turn, or in an earlier
turn? The call stays in the context as the model wrote it.

Reads and writes what eval.py does, with its flags, after the number of the tool turn (from 0) and
of its call (from 0). Give it an --out of its own:
    python bench/wrong_window.py 0 0 --preset toy --ckpt grpo_out --data toy/eval.jsonl --out wrong
"""
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import eval as evaluation
import launch
import rollout


def other_window(start, end, seconds, evidence, draw):
    """A window of the same length in a video of `seconds` that does not meet the evidence, of 100
    draws; else the last."""
    for _ in range(100):
        a = draw.randrange(max(1, int(seconds - (end - start)) + 1))
        if not any(a < stop and begin < a + end - start for begin, stop in evidence):
            break
    return float(a), a + end - start


def main():
    turn, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    record_calls = rollout.record_calls

    def replaced(episode, agent, text, at, *parse):
        calls, records = record_calls(episode, agent, text, at, *parse)
        if at == turn and number < len(calls) and calls[number].error is None:
            call, draw = calls[number], random.Random(f"{episode.task['id']}/{episode.num_frames}")
            call.start, call.end = other_window(call.start, call.end, episode.duration,
                                                episode.task.get("evidence") or [], draw)
        return calls, records

    rollout.record_calls = replaced
    evaluation.main()


if __name__ == "__main__":
    launch.run_main(main)
