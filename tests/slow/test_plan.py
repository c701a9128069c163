"""
The counts of tools/plan.py against torch's, and what tools/gpu_check.py finds:
python -m pytest tests/slow/test_plan.py -q
"""
import json

import pytest
import torch
from conftest import run_script

import launch
import model
from plumbing import checkpoint
from tools import gpu_check, plan

CPU = torch.device("cpu")


def tiny(hidden=96, inner=256, heads=4, shared=2, d=32, layers=3, vocab=640):
    launch.import_shim()
    from transformers import Qwen3VLConfig

    text = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
            "num_key_value_heads": shared, "head_dim": d, "num_hidden_layers": layers,
            "vocab_size": vocab,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6,
                                "mrope_section": [d // 4, d // 8, d // 8]}}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128,
              "out_hidden_size": hidden, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision)


class ChatProcessor:
    image_pad, video_pad, banned = 1, 2, (1, 2)


def flat_pack(tokens):
    """One sequence of random ids; its first eight predictions are trained."""
    ids, flat = torch.randint(5, 600, (tokens,)), torch.zeros(tokens, dtype=torch.long)
    return model.Pack(ids, torch.arange(tokens).expand(4, 1, tokens).contiguous(), flat, flat,
                      torch.arange(8), ids[:8], {}, [], [(0, tokens, [])])


def kept_for_backward(config, tokens, dtype, recompute):
    """Bytes of all storages that autograd keeps for one pack of so many tokens, parameters
    apart."""
    from transformers import Qwen3VLForConditionalGeneration

    hf = Qwen3VLForConditionalGeneration(config).to(dtype)
    policy = model.as_policy(hf, ChatProcessor, CPU, recompute)
    pack = flat_pack(tokens)
    own = {p.untyped_storage().data_ptr() for p in hf.parameters()}
    kept = {}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            # held, so that no address comes twice
            kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy(pack)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("shape", [{}, {"hidden": 128, "inner": 192, "heads": 8, "shared": 2,
                                        "d": 16, "layers": 5}])
@pytest.mark.parametrize("dtype, width", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_kept_are_those_that_autograd_keeps(shape, dtype, width, recompute):
    tokens, config = 512, tiny(**shape)
    wanted = plan.ledger(config, 1, tokens, recompute, width=width,
                         repeated=True)["top layer"]["activations kept"]
    # the rotary tables: held by the checkpoint, not by autograd
    wanted -= (recompute == "full") * 2 * config.text_config.head_dim * width * tokens
    assert kept_for_backward(config, tokens, dtype, recompute) == pytest.approx(wanted, rel=0.06)


def test_weights_gradients_and_moments_take_what_is_allocated(toy, codec, process_group):
    policy = checkpoint.load_sharded(str(toy / "init"), codec, CPU)
    optimizer = model.adamw(model.trained_parameters(policy), 1e-3, 0.9, CPU)
    for p in model.trained_parameters(policy):
        p.grad = torch.zeros_like(p)
    optimizer.step()

    def size(tensors):
        return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)

    planned = plan.ledger(policy.hf.config, 1, 1, width=4)["low layer"]
    trained, layers = model.trained_parameters(policy), policy.hf.model.language_model.layers
    assert size(trained) == planned["weights, fp32 shard"]
    assert size(p.grad for p in layers.parameters()) == planned["gradients of layers, fp32 shard"]
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert size(moments) == planned["AdamW moments, fp32 shard"]
    assert size(policy.hf.model.visual.parameters()) == planned["vision tower"]


# ------------------------------------------------------------------------------------------------
# tools/gpu_check.py


def test_the_gpu_script_runs_its_cpu_part(toy, tmp_path):
    """So that it does not rot without a GPU: every stage passes on every rank, in order, and the
    page holds every row."""
    done = run_script("tools/gpu_check.py", "--cpu", "--ckpt", toy / "init", "--out",
                      tmp_path / "check", timeout=900)
    found = json.loads((tmp_path / "check.json").read_text())
    text = (tmp_path / "check.md").read_text()
    rows = {row["what"]: row for row in found["rows"]}
    assert done.returncode == 0 and not found["failed"], done.stdout[-3000:] + done.stderr
    took = [name.split()[1].rstrip(":") for name in rows if name.startswith("stage ")]
    assert took == [*gpu_check.stages()] and found["ranks"] == 2
    assert found["skipped"] == ["GPU gated-delta kernels"]
    assert rows["CPU engine alone: chunk / tokens of the prompt"]["value"] < 0.9
    assert rows["CPU engine alone: log-prob gap of a video in chunks"]["value"] < 1e-3
    assert "CPU rollouts: largest gap, 3 sleeps and wakes" in rows
    least, most = rows["CPU fp32, 2 replicas packed: gradient"]["range"]
    assert 0 < least <= most < 1e-5
    assert rows["grpo.py: train_s of the second step"]["value"] > 0
    assert "vllm" in (tmp_path / "check.log").read_text()
    assert all(f"| {name.replace('|', '/')} |" in text for name in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.json", "check.log",
                                                                "check.md"]


def rows_of(table):
    return [json.loads(line) for line in open(table.path)]


def failed(table):
    return [row["what"] for row in rows_of(table) if row["verdict"] == "FAIL"]


