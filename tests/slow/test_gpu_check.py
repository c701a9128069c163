"""
Tests of tools/gpu_check.py: python -m pytest tests/slow/test_gpu_check.py -q
"""
import json

from conftest import run_script

from tools import gpu_check


def test_the_gpu_script_runs_its_cpu_part(toy, tmp_path):
    """So that it does not rot without a GPU: every stage passes on every rank, in order."""
    done = run_script("tools/gpu_check.py", "--cpu", "--ckpt", toy / "init", "--out",
                      tmp_path / "check", timeout=900)
    found = json.loads((tmp_path / "check.json").read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert done.returncode == 0 and not found["failed"], done.stdout[-3000:] + done.stderr
    took = [name.split()[1].rstrip(":") for name in rows if name.startswith("stage ")]
    assert took == [*gpu_check.stages()] and found["ranks"] == 2
    assert found["skipped"] == ["GPU gated-delta kernels"]
    assert rows["CPU engine alone: chunk / tokens of the prompt"]["value"] < 0.9
    assert rows["CPU engine alone: log-prob gap of a video in chunks"]["value"] < 1e-3
    assert "CPU rollouts: largest gap, 3 sleeps and wakes" in rows
    least, most = rows["CPU fp32 packed: gradient"]["range"]
    assert 0 < least <= most < 1e-5 and rows["grpo.py: train_s of the second step"]["value"] > 0
    assert "vllm" in (tmp_path / "check.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.json", "check.log"]
