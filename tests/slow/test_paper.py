"""
Tests of evaluation/qwen_vl_sampling.py:
    python -m pytest tests/slow/test_paper.py -q

The authors' own code is the oracle in tests/publishers, with a clone of it. torch and transformers
are always there.
"""
import random

import numpy as np

from evaluation import qwen_vl_sampling


def test_sizes_are_those_of_the_processors():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

    draw = random.Random(1)
    for _ in range(2000):
        height, width = draw.randrange(40, 2200), draw.randrange(40, 2200)
        for factor, least, most in ((28, 100352, 602112), (28, 784, 50176), (32, 65536, 16777216)):
            wanted = smart_resize(height, width, factor, least, most)
            assert qwen_vl_sampling.sides(height, width, factor, least, most) == wanted
        assert qwen_vl_sampling.vllm_video(900, height, width, 25165824)[1] == of_video(
            32, height, width, 2, 32, 4096, 25165824)
    places, _ = qwen_vl_sampling.vllm_video(901, 480, 640, 25165824)
    assert places == np.linspace(0, 900, 32, dtype=int).tolist()
