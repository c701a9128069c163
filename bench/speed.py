"""
bench/speed.py: one optimizer step on a group of rollouts, TRL's GRPOTrainer beside grpo.update,
which computes the shared prompt once.

Both sides train the same checkpoint in fp32 with AdamW and without a KL, on the batch that TRL
makes: random responses to one prompt without frames, which spares TRL a run of the tower for each
response. They take turns, the first round only warms up, and the ratio is one of medians: above 1,
this code is faster.

Peer: trl 1.16.0. A folder of `pip install --target` will do:

  pip install --target peers --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 dill \\
      multiprocess xxhash pandas python-dateutil pytz tzdata six aiohttp
  PYTHONPATH=peers:. python bench/speed.py --ckpt out/demo/toy/init
"""
import os
import time

import numpy as np

import chat
import grpo
import launch
import model
from plumbing import checkpoint

PROMPT = "frame " * 800  # about 5 tokens each with the toy's tokenizer
GROUP, RESPONSE = 8, 600  # responses, tokens of each
ROUNDS = 3  # that count
LR = 1e-6


def make_trainer(ckpt):
    """-> (TRL's trainer, a batch of it: tensors by name, one row a response)"""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    draw = np.random.default_rng(0)
    row = {"prompt": [{"role": "user", "content": PROMPT}]}
    config = GRPOConfig(
        output_dir="out/trl", per_device_train_batch_size=GROUP, num_generations=GROUP, beta=0.0,
        learning_rate=LR, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[])
    trainer = GRPOTrainer(
        ckpt, lambda completions, **_: draw.random(GROUP).tolist(), args=config,
        train_dataset=Dataset.from_list([row]))
    trainer.current_gradient_accumulation_steps = 1  # as Trainer.train() sets it
    trainer.create_optimizer()
    # Sampling takes minutes, and is not what is compared.
    responses = draw.integers(10, 250, (GROUP, RESPONSE)).tolist()
    trainer._generate_single_turn = lambda *_: (responses, None)
    return trainer, trainer._generate_and_score_completions([row for _ in range(GROUP)])


def make_tree(batch):
    """TRL's batch -> the same group as [shared prompt | o^1 | .. | o^G]."""
    prompt = batch["prompt_ids"][0].numpy()
    ones = np.ones(RESPONSE)
    branches = []
    for ids, advantage in zip(batch["completion_ids"].numpy(), batch["advantages"].numpy()):
        values = {"advantage": advantage * ones, "sampling": -5 * ones, "turn": ones}
        branches.append(model.TokenSpan(ids, ones, values))
    return model.Tree(model.TokenSpan(prompt, 0 * prompt), [], branches)


def main():
    from torch.nn.utils import clip_grad_norm_

    parser = launch.parser(__doc__)
    parser.add_argument("--ckpt", required=True, help="toy checkpoint; its weights do not matter")
    ckpt = parser.parse_args().ckpt
    launch.import_shim()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # TRL's side has use_cpu
    device = launch.start_process_group()
    trainer, batch = make_trainer(ckpt)
    trees = [make_tree(batch)]
    settings = grpo.build_parser().parse_args(["--ckpt", ckpt, "--beta", "0"])
    policy = checkpoint.load_policy(ckpt, chat.load_codec(ckpt), device)
    optimizer = model.adamw(model.trained_parameters(policy), LR, 0.999, device)
    seconds = []  # of TRL and of this code in each round
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        trainer.compute_loss(trainer.model, batch).backward()
        clip_grad_norm_(trainer.model.parameters(), grpo.MAX_GRAD_NORM)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        between = time.perf_counter()
        grpo.update(policy, None, optimizer, trees, GROUP * RESPONSE, settings)
        seconds.append([between - began, time.perf_counter() - between])
    trl, ours = np.median(seconds[1:], 0)
    print(f"update: TRL {trl:.3f} s, ours {ours:.3f} s, ratio {trl / ours:.2f}")


if __name__ == "__main__":
    launch.run_main(main)
