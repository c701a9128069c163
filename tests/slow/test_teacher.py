"""
More tests of --teacher: two ranks, a resumed run, a teacher of another size or of other ids.
python -m pytest --all tests/slow/test_teacher.py
"""
import json

import pytest
from conftest import run_script
from safetensors.torch import load_file
from test_replay import recorded, same_update, tasks  # noqa: F401  (fixtures)
from test_teacher import LIVE, groups, teacher, wise  # noqa: F401  (fixtures)

TAUGHT = ("--distill", 0.7)


def test_one_rank_and_two_learn_the_same_from_a_teacher(toy, recorded, base, wise,  # noqa: F811
                                                        tmp_path):
    """Teacher, reference and policy in shards, a spare pack."""
    logs, found = [], []
    for ranks in (1, 2):
        out = tmp_path / f"ranks{ranks}"
        done = run_script("tools/replay.py", "--preset", "toy", "--ckpt", toy / "init",
                          "--rollouts", recorded, "--video-root", toy, "--out", out, "--clip", 0,
                          "--pack-tokens", 600, "--kl", 0.01, "--teacher", wise, *TAUGHT,
                          ranks=ranks)
        assert done.returncode == 0, done.stderr
        logs.append(json.loads((out / "log.jsonl").read_text()))
        found.append(load_file(out / "last" / "model.safetensors"))
    a, b = logs
    assert same_update(*found, base)
    for key in ("grad_norm", "tokens", "gap_max", "groups"):
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), key
    assert a["teacher_kl"]["mean"] == pytest.approx(b["teacher_kl"]["mean"], rel=1e-4)
    assert abs(a["teacher_kl"]["mean"]) > 1e-3
    assert a["teacher_kl"]["by_K"] == {k: pytest.approx(v, rel=1e-4)
                                       for k, v in b["teacher_kl"]["by_K"].items()}


