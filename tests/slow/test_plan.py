"""
The counts of tools/plan.py against torch's, and what tools/gpu_check.py finds:
python -m pytest tests/slow/test_plan.py -q
"""
import json

import torch
from conftest import run_script

import launch
from tools import gpu_check

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
    least, most = rows["CPU fp32 packed: gradient"]["range"]
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


