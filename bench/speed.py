"""
bench/speed.py: this code beside the usual alternatives, each as a ratio of medians in one run.

  update  one optimizer step over one group: TRL's GRPOTrainer | grpo.update on the shared prompt
  frames  64 frames of a video: fetch_video of qwen-vl-utils, decord | video.py

A ratio above 1 means that this code is faster. The sides take turns, and the first round only warms
up. All frames are decoded anew in each round; video.py decodes in threads, as in training.

update: both sides train the same checkpoint in fp32 with AdamW and without a KL; the sizes are the
constants below. The seconds in which TRL samples are not counted.
frames: decord reads the frames that video.py chose, fetch_video has its own rule for times.

Peers: trl 1.16.0, qwen-vl-utils 0.0.14, decord 0.6.0. A folder of `pip install --target` will do:

  pip install --target peers --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 dill \\
      multiprocess xxhash pandas python-dateutil pytz tzdata six aiohttp qwen-vl-utils==0.0.14
  PYTHONPATH=peers python bench/speed.py --ckpt out/demo/toy/init
  PYTHONPATH=peers python bench/speed.py --video film.mp4
"""
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import numpy as np
import torch

import chat
import grpo
import launch
import model
import video
from plumbing import checkpoint

IMAGES = 64  # of the prompt, 32 x 32 pixels: one vision token each
QUESTION = "frame " * 2000
RESPONSE = 600  # tokens of each response
GROUP = 8  # responses
ROUNDS = 3  # that count


def print_ratios(row, seconds):
    """seconds: {side: seconds of each round}, this code's under the name "ours"."""
    medians = {side: statistics.median(values[1:]) for side, values in seconds.items()}
    for side, median in medians.items():
        print(f"{row}: {side} {median:.3f} s, ratio {median / medians['ours']:.2f}", flush=True)


# ------------------------------------------------------------------------------------------------
# update


def make_update(ckpt, images):
    """-> a function that trains once on a group of random responses -> seconds."""
    codec = chat.load_codec(ckpt)
    policy = checkpoint.load_policy(ckpt, codec, torch.device("cpu"))
    names = [str(number) for number in range(IMAGES)]
    frames = video.Frames(images, np.arange(float(IMAGES)), "stills", names)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, lambda spec: frames)
    item = chat.vision_item({"video": "stills"}, frames)
    content = [{"type": "video", "video": "stills"}, {"type": "text", "text": QUESTION}]
    ids, _ = chat.encode_prompt(codec, [{"role": "user", "content": content}], [item])
    branches = []
    for number in range(GROUP):
        response = np.random.default_rng(number).integers(10, 250, RESPONSE)
        branches.append(span(response, 1, number % 3 - 1))
    tree = model.Tree(span(ids, 0, 0), [item], branches)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-6, 0.999, torch.device("cpu"))
    settings = grpo.build_parser().parse_args(["--ckpt", ckpt, "--beta", "0"])

    def update():
        policy.features.cache.clear()  # a new prompt every step, as in training
        began = time.perf_counter()
        grpo.update(policy, None, optimizer, [tree], GROUP * RESPONSE, settings)
        return time.perf_counter() - began

    return update


def span(ids, trained, advantage):
    """-> TokenSpan with one number for all of its tokens."""
    values = {"advantage": advantage, "sampling": -5, "turn": 1}
    columns = {name: np.full(len(ids), value) for name, value in values.items()}
    return model.TokenSpan(ids, np.full(len(ids), trained), columns)


def compare_update(ckpt):
    """Trains with TRL, and once with grpo.update after each of its steps."""
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    images = np.random.default_rng(0).integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
    ours = make_update(ckpt, images)
    content = []
    for number in range(IMAGES):
        content += [{"type": "text", "text": f"<{number}.0 seconds>"}, {"type": "image"}]
    content.append({"type": "text", "text": QUESTION})
    row = {"prompt": [{"role": "user", "content": content}],
           "images": [Image.fromarray(image) for image in images]}
    sampling = []  # seconds of each step
    seconds = {"TRL": [], "ours": []}

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, *given, **named):
            began = time.perf_counter()
            out = super()._generate_and_score_completions(*given, **named)
            sampling.append(time.perf_counter() - began)
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_optimizer_step(self, *_, **__):  # after it
            seconds["TRL"].append(time.perf_counter() - self.began - sampling[-1])
            seconds["ours"].append(ours())

    def reward(completions, **_):
        return [float(number % 3) for number in range(len(completions))]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=GROUP, num_generations=GROUP,
        max_completion_length=RESPONSE, max_steps=ROUNDS + 1,
        generation_kwargs={"min_new_tokens": RESPONSE}, beta=0.0, learning_rate=1e-6,
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[])
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=torch.float32)
    Trainer(model=theirs, reward_funcs=reward, args=config, callbacks=[Clock()],
            train_dataset=Dataset.from_list([row for _ in range(64)]),
            processing_class=AutoProcessor.from_pretrained(ckpt)).train()
    print_ratios("update", seconds)


# ------------------------------------------------------------------------------------------------
# frames


def by_video_py(path, _):
    cache = video.FrameCache(workers=video.decode_threads())  # knows no frame of the video
    return video.overview(path, 64, cache=cache)


def by_fetch_video(path, _):
    from qwen_vl_utils.vision_process import fetch_video

    fetch_video({"video": path, "nframes": 64, "min_pixels": 1024, "max_pixels": 50176,
                 "total_pixels": 64 * 50176 * 2}, image_patch_size=16)


def by_decord(path, frames):
    from decord import VideoReader

    _, height, width, _ = frames.images.shape
    reader = VideoReader(path, width=width, height=height)
    reader.get_batch(np.rint(frames.seconds * reader.get_avg_fps()).astype(int)).asnumpy()


def compare_frames(path):
    frames = by_video_py(path, None)
    sides = {"ours": by_video_py, "fetch_video": by_fetch_video, "decord": by_decord}
    seconds = {side: [] for side in sides}
    for _ in range(ROUNDS + 1):
        for side, decode in sides.items():
            began = time.perf_counter()
            decode(path, frames)
            seconds[side].append(time.perf_counter() - began)
    print_ratios("frames", seconds)


# ------------------------------------------------------------------------------------------------


def main():
    parser = launch.parser(__doc__)
    parser.add_argument("--ckpt", help="update: a toy checkpoint; its weights do not matter")
    parser.add_argument("--video", help="frames: the file")
    args = parser.parse_args()
    launch.import_shim()
    if args.video:
        compare_frames(args.video)
    if args.ckpt:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer beside it has use_cpu
        launch.start_process_group()
        compare_update(args.ckpt)


if __name__ == "__main__":
    launch.run_main(main)
