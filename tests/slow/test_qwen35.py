"""
More of the second base, Qwen3.5: python -m pytest tests/slow/test_qwen35.py -q
"""
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_script
from test_qwen35 import CALL, alone, codec35, loaded, random_trees, world35  # noqa: F401

import chat
import launch
import rewards

# ---- calls in XML ----


@pytest.mark.parametrize("body", [
    CALL.format(16, 8), CALL.format("soon", 8), CALL.format("", 8),
    CALL.format(8, 16).replace("crop_video", "look"),
    CALL.format(8, 16).replace("</function>", ""),
    CALL.format(8, 16).replace("</parameter>\n<parameter=end_time>", "<parameter=end_time>"),
    CALL.format(8, 16).replace("</parameter>\n</function>", "</function>"),
    CALL.format(8, 16).replace("</function>", "</function> and more"),
    CALL.format(8, 16).replace("<parameter=start_time>", "start_time="),
    CALL.format(8, "16</parameter><parameter=end_time"),
    "<tool_call><function=", "<tool_call><function=></function></tool_call>",
    "<tool_call><function=crop_video></function></tool_call>",
    "<tool_call>" + "<function=crop_video>" * 100_000,
    "<tool_call><function=crop_video>" + "<parameter=a>" * 200 + "</function></tool_call>",
])
def test_faulty_calls_in_xml_are_one_error_each(body):
    (call,) = rewards.parse_tool_calls("ok</think>\n" + body, True)
    assert call.error and len(call.error) < 200


def test_calls_are_read_as_vllm_reads_them(codec35):
    """vLLM's server has a parser of this dialect: names and arguments of whole calls are the same.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

    import rollout

    schema, rng = rollout.tool_schema(), random.Random(1)
    theirs = Qwen3EngineToolParser(codec35.tokenizer, schema)
    request = ChatCompletionRequest(model="m", tools=schema,
                                    messages=[{"role": "user", "content": "x"}])
    for _ in range(60):
        calls = []
        for _ in range(rng.randint(1, 3)):
            arguments = {"start_time": rng.choice([rng.randint(0, 60), 7.25, "1:05"]),
                         "end_time": rng.choice([rng.randint(66, 99), 90.5, "0:02:05"])}
            arguments |= {"num_frames": rng.randint(1, 9)} if rng.random() < 0.3 else {}
            call = chat.xml_call("crop_video", arguments)
            calls.append(f"<tool_call>\n{call}\n</tool_call>")
        text = rng.choice(["\n", "", " and "]).join(calls)
        wanted = [json.loads(call.function.arguments)
                  for call in theirs.extract_tool_calls(text, request).tool_calls]
        assert [(c.start, c.end, c.num_frames) for c in rewards.parse_tool_calls(text)] == [
            (rewards.to_seconds(a["start_time"]), rewards.to_seconds(a["end_time"]),
             a.get("num_frames")) for a in wanted]
        assert len(wanted) == len(calls)


# ---- checkpoints ----


# ---- stages ----


def trained_weights(folder):
    from safetensors.torch import load_file

    name = "adapter_model.safetensors"
    return load_file(folder / name if (folder / name).exists() else folder / "model.safetensors")


@pytest.mark.parametrize("flags", [(), ("--lora", 3)], ids=["whole", "adapters"])
def test_two_ranks_train_what_one_trains(world35, tmp_path, flags):
    """Shards: a gated-delta layer is three groups of FSDP2, each with its own hooks."""
    for ranks in (1, 2):
        done = run_script("sft.py", "--preset", "toy", "--ckpt", world35 / "init", "--data",
                          world35 / "sft.jsonl", *flags, "--steps", 2, "--batch-size", 4,
                          "--optimizer", "adamw", "--lr", 1e-2, "--warmup", 0, "--out",
                          tmp_path / f"ranks{ranks}", ranks=ranks)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (trained_weights(tmp_path / f"ranks{n}" / "last") for n in (1, 2))
    start = trained_weights(world35 / "init")
    # Adam's step is the sign of a gradient, also of one near 0, so a few weights may part.
    apart = torch.cat([(one[n] - two[n]).abs().flatten() for n in one])
    assert (apart > 1e-4).float().mean() < 0.01
    names = [n for n in one if ".linear_attn." in n and ".lora_A" not in n]
    assert len(names) >= 10
    for name in names:
        assert not torch.equal(one[name], start.get(name, torch.zeros_like(one[name]))), name


@pytest.mark.parametrize("stale", [False, True])
def test_grpo_with_vllm_end_to_end(world35, tmp_path, stale):
    """Two updates with the engine in this process, so large that an engine with old weights is told
    of (stale). With new ones the gap is rounding. The checkpoint opens in transformers."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from unittest import mock

    from conftest import Overheard
    from slow.test_bf16 import run, said

    import grpo
    import rollout
    from engine import VllmEngine

    out, engines, real = tmp_path / "out", [], rollout.make_engine
    synced = VllmEngine.sync

    def make_engine(*args, **more):
        engines.append(Overheard(real(*args, **more), said))
        return engines[0]

    def sync(engine, weights):
        if stale:
            return [*weights] and None
        return synced(engine, weights)

    with (mock.patch.object(rollout, "make_engine", make_engine),
          mock.patch.object(VllmEngine, "sync", sync)):
        try:
            run(grpo, out, "--preset", "toy", "--prompts", 2, "--group", 2, "--frames", 8, "--kl",
                0.01, "--show-every", 0, "--max-new-tokens", 24, "--lr", 1e-2, "--steps", 2,
                "--ckpt", world35 / "init", "--data", world35 / "rl.jsonl")
        except launch.RunError as error:
            assert stale and "gap" in str(error)
            return
        finally:
            for engine in engines:
                with contextlib.suppress(Exception):  # closed by the script, unless it failed
                    engine.close()
    assert not stale
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2]
    assert all(0 < row["gap"] < 0.02 and row["kappa"] == 0.5 for row in log), log
    from transformers import AutoModelForImageTextToText

    _, loading = AutoModelForImageTextToText.from_pretrained(out / "last", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


# ---- kernels ----


def test_the_kernels_of_the_gpu_are_the_rule_of_the_cpu(tmp_path):
    """In Triton's interpreter, in fp32: outputs, states and all gradients."""
    for name in ("triton", "fla"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (pip install flash-linear-attention==0.6.0)")
    script = os.path.join(ROOT, "tests", "slow", "kernels.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True,
                          cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert len(distances) == 8 and max(distances.values()) < 1e-5, distances


