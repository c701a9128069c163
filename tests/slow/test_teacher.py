"""
Tests of grpo.py's --teacher: python -m pytest tests/slow/test_teacher.py -q

The oracle is that of test_grpo.py: one plain transformers forward per sequence, with the formulas
of the docstring written out.
"""
import copy
import json
import shutil

import pytest
import torch
from handmade import colourful, plain_logps, record_logps
from reference import load_policy
from test_grpo import (
    distance,
    perturb,
    plain_grads,
    plain_loss,
    plain_parts,
    run_update,
    settings,
)

import launch
import model


@pytest.fixture(scope="module")
def tasks(toy):
    return colourful(toy)


@pytest.fixture
def teacher(toy, codec, source):
    """Another policy of the same size, with a tower of its own."""
    other = load_policy(str(toy / "init"), codec)
    perturb(other.hf)
    other.features = model.VisionFeatures(other.hf.model.visual, codec, source.load)
    return other


def test_a_teacher_adds_its_log_ratio_to_the_advantage_of_every_sampled_token(
        process_group, codec, source, groups, policy, vision, plain, teacher):
    episodes = [e for g in groups for e in g]
    record_logps(plain, codec, source, episodes, 1.0, lambda n: 0.02 * (n % 5 - 2))
    (found,), stats = run_update(policy, vision, codec, groups, settings(teacher="T", distill=0.7),
                                 teacher=teacher)
    other = copy.deepcopy(plain)
    other.load_state_dict(teacher.hf.state_dict())
    parts, kl = [], []
    for ids, at, sampler, advantage, specs in (p for g in groups for p in plain_parts(codec, g)):
        with torch.no_grad():
            old, taught = (plain_logps(hf, codec, source, ids, specs, 1.0)[torch.tensor(at) - 1]
                           for hf in (plain, other))
        kl += (old - taught).tolist()
        more = (0.7 * (taught - old)).tolist()
        parts.append((ids, at, sampler, [a + b for a, b in zip(advantage, more)], specs))
    loss, _, _ = plain_loss(plain, codec, source, parts, len(kl), 1.0, 0.2, 5.0, 0.0)
    loss.backward()
    assert distance(found, plain_grads(plain)) < 1e-5
    mean = sum(kl) / len(kl)
    assert stats["teacher_kl"]["mean"] == pytest.approx(mean, abs=1e-5) and abs(mean) > 1e-3
    assert stats["teacher_kl"]["by_K"] == {"4": pytest.approx(mean, abs=1e-5)}


@pytest.fixture
def wise(toy, tmp_path):
    """A checkpoint of other weights."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(toy / "init", tmp_path / "wise")
    weights = {n: w + 0.02 * torch.randn(w.shape, generator=torch.Generator().manual_seed(len(n)))
               for n, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


LIVE = ("--steps", 1, "--prompts", 2, "--group", 2, "--frames", 4, "--max-new-tokens", 6)


def test_a_run_learns_from_a_teacher_without_rewards_and_without_answers(
        run_grpo, base, wise, toy, tmp_path):
    rows = [{**row, "answer": None} for row in map(json.loads, open(toy / "rl.jsonl"))][:4]
    blank = tmp_path / "blank.jsonl"
    blank.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(launch.UserError, match="earns no full reward"):
        run_grpo(*LIVE, "--data", blank, out="without")
    weights, row, _ = run_grpo(*LIVE, "--data", blank, "--teacher", wise, "--group", 1, out="one")
    assert row["teacher_kl"]["mean"] and row["acc"] is None and row["kl"] == 0
    assert not all(torch.equal(base[n], w) for n, w in weights.items())
    # W = 0 is a run without a teacher, to the bit
    common = (*LIVE, "--data", toy / "rl.jsonl", "--lr", 1e-2)
    off, _, _ = run_grpo(*common, "--teacher", wise, "--distill", 0, out="off")
    none, row, _ = run_grpo(*common, out="none")
    assert "teacher_kl" not in row and all(torch.equal(off[n], w) for n, w in none.items())
    far, _, _ = run_grpo(*common, "--teacher", wise, "--distill", 3, out="far")
    assert not all(torch.equal(off[n], w) for n, w in far.items())


