"""
bench/rejection.py: SFT on the best of one's own rollouts, against the cold start that they come
from and against PARA-GRPO, in the toy.

  make demo DEMO=out/demo-0 SEED=0        (and 1, 2: a world, a cold start and PARA-GRPO each)
  python bench/rejection.py out/demo-0 out/demo-1 out/demo-2

For every demo: the cold start samples every task of rl.jsonl --rounds times, 8 rollouts each and
each round at a K of its own (2 rounds are 2,560 rollouts; PARA-GRPO drew 3,072). tools/pick.py
writes the best of every prompt as chats, and sft.py goes on from the cold start with them for
--epochs passes. The demo's evaluation then asks all three. A finished part is kept, so the same
command goes on.

Writes: DEMO/rejection/ (rollouts, chats, checkpoint), DEMO/eval/rejection, and the table of --out.
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def script(name, *words):
    """Runs one of the project's scripts. A failure ends this one, with the script's own line."""
    done = subprocess.run([sys.executable, os.path.join(HERE, name), *map(str, words)])
    if done.returncode:
        sys.exit(done.returncode)


def grown(demo, args):
    """DEMO -> the number of prompts with a good rollout; makes what is missing."""
    out, toy = os.path.join(demo, "rejection"), os.path.join(demo, "toy")
    os.makedirs(out, exist_ok=True)
    picked = []
    for number in range(args.rounds):
        rollouts = os.path.join(out, f"r{number}.jsonl")
        if not os.path.exists(rollouts):
            script("rollout.py", "--preset", "toy", "--ckpt", os.path.join(demo, "sft"), "--data",
                   os.path.join(toy, "rl.jsonl"), "--group", 8, "--step", number, "--out", rollouts)
        best = os.path.join(out, f"best{number}.jsonl")
        script("tools/pick.py", rollouts, "--best", best)
        picked += launch.read_jsonl(best)
    chats = os.path.join(out, "chats.jsonl")
    launch.write_atomic(chats, "".join(json.dumps(row) + "\n" for row in picked))
    if not os.path.exists(os.path.join(out, "sft", "last")):
        # A quarter of the rates at which the cold start learned from random weights.
        script("sft.py", "--preset", "toy", "--ckpt", os.path.join(demo, "sft"), "--data", chats,
               "--video-root", toy, "--batch-size", 12, "--epochs", args.epochs, "--lr", 5e-4,
               "--muon-lr", 1.5e-3, "--eval-every", 0, "--out", os.path.join(out, "sft"))
    script("eval.py", "--preset", "toy", "--ckpt", os.path.join(out, "sft"), "--data",
           os.path.join(toy, "eval.jsonl"), "--frames", 4, 8, 16, 32, 64, "--tools", "on", "off",
           "--temperature", 1, "--out", os.path.join(demo, "eval", "rejection"))
    return sum("tools" in row for row in picked)


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("demos", nargs="+", metavar="DEMO", help="folders of make demo, a seed each")
    add("--rounds", type=int, default=2, help="times that every task is sampled 8 times")
    add("--epochs", type=float, default=2.0, help="passes over the chats")
    add("--out", default="out/rejection", help="folder of the table")
    args = parser.parse_args()
    for demo in args.demos:
        print(json.dumps({"demo": demo, "good prompts": grown(demo, args)}), flush=True)
    groups = [("cold=", "sft"), ("rejection=", "rejection"), ("PARA-GRPO=", "grpo")]
    words = [word for name, leaf in groups
             for word in (name, *(os.path.join(demo, "eval", leaf) for demo in args.demos))]
    script("eval.py", "--compare", *words, "--out", args.out)


if __name__ == "__main__":
    launch.run_main(main)
