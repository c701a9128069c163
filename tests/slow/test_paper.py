"""
Tests of evaluation/paper.py, paper_texts.py, paper_driver.py, readers.py and sources.py:
    python -m pytest tests/slow/test_paper.py -q

The authors' own code is the oracle in tests/publishers, with a clone of it. torch and transformers
are always there.
"""
import json
import random

import numpy as np

from evaluation import qwen_vl_sampling


def crop(start, end=None, name="crop_video"):
    window = {"start_time": start, "end_time": end}
    given = {key: value for key, value in window.items() if value is not None}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def question(split, **more):
    """A made-up task of a benchmark."""
    texts = ["a red kite", "a blue {kite}", "no kite", "two kites"]
    task = {"id": split, "split": split, "video": "made-up.mp4", "type": "mcq", "answer": "B",
            "question": "Which kite flies over the harbour?", "options": texts, "tags": {}}
    if split in ("mlvu", "lvbench"):
        lines = [f"({letter}) {text}" for letter, text in zip("ABCD", texts)]
        task["published"] = "\n".join([task["question"], *lines])
    if split == "charades":
        task.update(type="grounding", options=None, answer=[8.0, 16.0], event="a kite flies up.")
    return {**task, **more}


def test_sizes_are_those_of_the_processors():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_film

    draw = random.Random(1)
    for _ in range(2000):
        height, width = draw.randrange(40, 2200), draw.randrange(40, 2200)
        for factor, least, most in ((28, 100352, 602112), (28, 784, 50176), (32, 65536, 16777216)):
            wanted = smart_resize(height, width, factor, least, most)
            assert qwen_vl_sampling.sides(height, width, factor, least, most) == wanted
        assert qwen_vl_sampling.film(900, height, width, 25165824)[1] == of_film(
            32, height, width, 2, 32, 4096, 25165824)
    places, _ = qwen_vl_sampling.film(901, 480, 640, 25165824)
    assert places == np.linspace(0, 900, 32, dtype=int).tolist()
