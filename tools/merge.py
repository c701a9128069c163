"""
merge.py (tests/test_lora.py): adapters and their base -> one checkpoint of whole weights.

  W + 2 B A in fp32, stored in the dtype of W

sft.py, grpo.py, rollout.py and eval.py load a folder of adapters without this step. Merge the
adapters for a tool that cannot load them, or to train all weights afterwards.

Reads a checkpoint folder of adapters, as sft.py or grpo.py saved it, and the base named there.
Writes --out, whole or not at all.

  python tools/merge.py grpo_out --out whole
"""
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import launch
from plumbing import checkpoint


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("ckpt", help="checkpoint of adapters, or a run folder")
    parser.add_argument("--out", required=True, help="folder to write")
    args = parser.parse_args()
    ckpt = checkpoint.resolve(args.ckpt)
    if os.path.exists(args.out):
        raise launch.UserError(f"--out {args.out} exists")
    temp = f"{args.out.rstrip('/')}.tmp"  # of a kill; the next start begins anew
    shutil.rmtree(temp, ignore_errors=True)
    os.makedirs(temp)
    weights = dict(checkpoint.merged_weights(ckpt))
    checkpoint.save_files(temp, checkpoint.small_files(ckpt), weights)
    launch.publish_folder(temp, args.out)
    print(f"{args.out}: the adapters of {args.ckpt}, merged")


if __name__ == "__main__":
    launch.run_main(main)
