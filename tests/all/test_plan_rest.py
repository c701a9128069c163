"""
The counts of tools/plan.py against torch's, and what tools/gpu_check.py finds:
python -m pytest tests/all/test_plan_rest.py -q
"""
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_script

import chat
import checkpoint
import launch
import model
import rollout
import sft
from tools import plan

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


def held_after_forward(config, tokens, recompute):
    """Bytes allocated in a forward and not freed by its end, as torch's profiler counts them."""
    from transformers import Qwen3VLForConditionalGeneration

    policy = model.as_policy(Qwen3VLForConditionalGeneration(config), ChatProcessor, CPU, recompute)
    pack = flat_pack(tokens)
    policy(pack)  # what is allocated once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as seen:
        out = policy(pack)
    assert out[0].requires_grad
    return sum(e.self_cpu_memory_usage for e in seen.key_averages())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_held_for_backward_is_what_the_ledger_says(recompute):
    tokens, config = 2048, tiny(layers=6)
    wanted = plan.ledger(config, 1, tokens, recompute, width=4,
                         repeated=True)["top layer"]["activations kept"]
    assert held_after_forward(config, tokens, recompute) == pytest.approx(wanted, rel=0.08)


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


def test_a_save_takes_the_host_memory_that_the_plan_names(toy, codec, process_group, tmp_path,
                                                          monkeypatch):
    for lora, name in ((0, "save_whole"), (4, "save_adapters")):
        policy = checkpoint.load_sharded(str(toy / "init"), codec, CPU, lora=lora)
        held = []

        def save(*given, held=held):
            held.append(sum(tensor.nbytes for tensor in given[-1].values()))

        monkeypatch.setattr(checkpoint, name, save)
        checkpoint.save_checkpoint(policy, codec, str(tmp_path / name), {"step": 1})
        n = plan.parameter_counts(policy.hf.config)
        assert held == [sum(plan.host_memory(n, 1, 0.0, width=4, lora=lora).values())]


def test_the_recipe_shows_what_the_command_prints(monkeypatch, capsys):
    with open(os.path.join(ROOT, "docs", "recipe.md")) as f:
        page = f.read().splitlines()
    command = next(line for line in page if line.startswith("$ python tools/plan.py"))
    monkeypatch.setattr(sys, "argv", command.split()[2:])
    with pytest.raises(SystemExit):
        launch.run_main(plan.main)
    assert all(line in page for line in capsys.readouterr().out.splitlines())


def test_counted_operations_are_those_that_torch_counts():
    """torch's own counter, forward and backward of one sequence, attention by plain matrix products
    over the full square."""
    launch.import_shim()
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3VLForConditionalGeneration

    from tools import gpu_check

    tokens, config = 256, tiny()
    policy, text = model.as_policy(Qwen3VLForConditionalGeneration(config), ChatProcessor, CPU,
                                   "none"), config.text_config
    policy.hf.model.language_model.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        policy(flat_pack(tokens))[0].sum().backward()
    wanted = gpu_check.training_flops(text, plan.parameter_counts(config)["layers"], tokens, 8,
                                      tokens**2)
    # norms are weights, but no products
    wanted -= 6 * tokens * sum(p.numel() for p in policy.hf.model.language_model.layers.parameters()
                               if p.ndim == 1)
    # the head is done again in backward, which is no model FLOP
    wanted += 2 * text.vocab_size * text.hidden_size * 8
    assert counter.get_total_flops() == pytest.approx(wanted, rel=0.002)
    assert gpu_check.tree_pairs(3, [2, 1]) == (1 + 2 + 3) + (3 + 1 + 3 + 2) + (3 + 1)


def test_the_towers_operations_are_those_that_torch_counts():
    """Two frames through three blocks of the 8B's tower."""
    launch.import_shim()
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from tools import gpu_check

    vision = plan.read_config("8B").vision_config
    vision.depth, vision.deepstack_visual_indexes = 3, [0, 1]
    vision._attn_implementation = "eager"  # the counter knows products of matrices
    tower, patches = Qwen3VLVisionModel(vision), torch.zeros(2 * 196, 3 * 2 * 16 * 16)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tower(patches, grid_thw=torch.tensor([[2, 14, 14]]))
    assert gpu_check.tower_flops(vision, 2 * 196, 196) == counter.get_total_flops()


def test_without_a_reference_its_memory_is_free(monkeypatch, capsys):
    sums = []
    for flags in ((), ("--kl", 0)):
        monkeypatch.setattr(sys, "argv", ["plan.py", "4B", *map(str, flags)])
        with pytest.raises(SystemExit):
            launch.run_main(plan.main)
        sums.append(float(next(line for line in capsys.readouterr().out.splitlines()
                               if line.startswith("sum")).split()[-1]))
    assert sums[1] == pytest.approx(sums[0] - 2 * 4.02 / 8, abs=0.1)  # its shard in bf16


def test_the_gpu_script_runs_its_cpu_part(tmp_path):
    """So that it does not rot without a GPU: every CPU check passes on every rank, what
    needs a GPU says so, and the page holds every row."""
    done = run_script("tools/gpu_check.py", "--out", tmp_path / "check", ranks=2)
    found = json.loads((tmp_path / "check.json").read_text())
    text = (tmp_path / "check.md").read_text()
    rows = {row["what"]: row for row in found["rows"]}
    if found["gpu"] is None:
        assert done.returncode == 0 and not found["failed"], done.stdout[-2000:] + done.stderr
        # kernels of attention and of gated-delta layers, steps, the engine beside a trainer
        assert len(found["skipped"]) == 4 and found["ranks"] == 2
        assert rows["CPU engine alone: answers that sleep, wake and reload changed"]["value"] == 0
        assert "vllm" in (tmp_path / "check.vllm.rank1.log").read_text()
        assert found["rows"][-1]["what"] == "CPU engine: seconds of its end"
        assert rows["CPU toy packed SFT: MFU"]["value"] > 0
        assert rows["CPU toy GRPO update: tokens/s"]["value"] > 0
        assert "CPU fp32, 2 replicas packed: gradient" in rows
        least, most = rows["decoding, all threads: frames/s"]["range"]
        assert 0 < least < most
    assert all(f"| {name.replace('|', '/')} |" in text for name in rows)


@pytest.fixture
def gpu_world(process_group, tmp_path):
    from tools import gpu_check

    ckpt = str(tmp_path / "init")
    tasks, source = gpu_check.make_world(ckpt)
    codec = chat.load_codec(ckpt)
    return gpu_check, gpu_check.Table(), ckpt, codec, tasks, source


def test_a_gap_that_is_no_number_is_not_ok(gpu_world, monkeypatch):
    """In the last cycle alone: Python's max of 0 and NaN is 0. Nor are episodes that fail there."""
    gpu_check, table, ckpt, codec, tasks, source = gpu_world
    gaps = iter([0.0, 9.0, 0.0, 9.0, float("nan")])  # at first, then before and after each wake
    monkeypatch.setattr(gpu_check, "gap", lambda policy, episodes: next(gaps))
    run = rollout.run

    def broken_later(*args, step=0, **more):
        for episode in run(*args, step=step, **more):
            if step == 2:
                episode.status = "bad"
            yield episode

    monkeypatch.setattr(rollout, "run", broken_later)
    table.run(gpu_check.check_rollouts, ckpt, codec, tasks, source, CPU, 1e9)
    failed = [row["what"].split(": ")[1] for row in table.rows if row["verdict"] == "FAIL"]
    assert failed == ["failed episodes after wakes", "largest gap of 2 sleeps and wakes"]


def test_a_base_that_moves_under_its_adapters_is_not_ok(gpu_world, monkeypatch):
    gpu_check, table, ckpt, codec, tasks, source = gpu_world
    trees = gpu_check.make_trees(codec, tasks, source)

    def backward(policy, packs, real=sft.backward):
        with torch.no_grad():
            policy.hf.model.language_model.norm.weight.add_(1e-6)
        return real(policy, packs)

    monkeypatch.setattr(sft, "backward", backward)
    table.run(gpu_check.check_adapters, ckpt, codec, trees, source, CPU)
    failed = [row["what"] for row in table.rows if row["verdict"] == "FAIL"]
    assert failed == ["CPU adapters: weights of the base that moved"]


def test_the_tower_that_is_timed_is_the_trainers(gpu_world):
    gpu_check, table, ckpt, codec, _, _ = gpu_world
    with torch.profiler.profile() as seen:
        gpu_check.check_tower(table, plan.read_config(ckpt), codec, CPU, 2, 32)
    assert table.rows[0]["value"] > 0
    assert not any(e.key == "aten::conv3d" for e in seen.key_averages())


def test_a_check_that_fails_says_what_to_do_and_the_page_is_written_at_once(gpu_world, monkeypatch):
    """All ranks met the error here, so the other checks run; if some did, all ranks stop."""
    gpu_check, table, *_ = gpu_world
    written = []
    table.save = lambda: written.append(len(table.rows))

    def check_exchange(table):
        raise RuntimeError("NCCL")

    table.run(check_exchange)
    assert written == [1] and table.rows[0]["verdict"] == "FAIL"
    assert "RuntimeError: NCCL; TO DO: NCCL_DEBUG=INFO" in table.rows[0]["note"]
    monkeypatch.setattr(launch, "any_rank", lambda flag: True)  # another rank did not fail
    with pytest.raises(launch.RunError, match="check_exchange failed on some ranks"):
        table.run(check_exchange)
    assert written == [1, 2]  # also before the end
    for name in (name for name in dir(gpu_check) if name.startswith("check_")):
        assert name in gpu_check.remedies() or name == "check_forms"  # a part of check_forwards


def test_a_machine_that_lacks_what_a_run_needs_is_told(gpu_world, monkeypatch):
    """Here four GPUs with an old driver, of which others hold half, for one rank."""
    gpu_check, table, *_ = gpu_world
    monkeypatch.setattr(gpu_check.metadata, "requires", lambda name: ["triton==0.1; x", "sympy"])
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(gpu_check.subprocess, "run",
                        lambda *_, **__: SimpleNamespace(stdout="535.104.05\n535.104.05\n"))
    for name, value in (("device_count", 4), ("mem_get_info", (40e9, 80e9)),
                        ("memory_reserved", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    table.run(gpu_check.check_machine, torch.device("cuda", 0))
    rows = {row["what"].removeprefix("machine: "): row for row in table.rows}
    for name, said in (("driver below 580", "driver 535.104.05"),
                       ("GPUs without a rank", "--nproc_per_node 4"),
                       ("GB of the GPU that others hold", "nvidia-smi"),
                       ("triton is not torch's", "make venv GPU=1"),
                       ("missing for Triton's compiler", "gcc")):
        assert rows[name]["verdict"] == "FAIL" and said in rows[name]["note"], name
    assert "libraries of vLLM that do not load" in rows  # the last one: no error came before


def test_more_ranks_than_gpus_are_one_line(monkeypatch, capsys):
    from tools import gpu_check

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as stop:
        launch.run_main(gpu_check.main)
    assert stop.value.code == 2 and "8 ranks, 4 GPUs" in capsys.readouterr().err


def test_a_check_that_fails_on_one_rank_fails_the_page(monkeypatch):
    """Rank 0 alone knows its own rows."""
    from tools import gpu_check

    tables = [gpu_check.Table(rank) for rank in (0, 1)]
    for table, value in zip(tables, (0.25, float("nan"))):
        table.add("drift", value, 1.0, "nats")
        table.add("speed", 4.0 - table.rank)
    tables[1].add("an error", 1.0, 0.0, "here alone")
    monkeypatch.setattr(launch, "gather_rows", lambda rows: tables[0].rows + tables[1].rows)
    drift, speed, error = tables[0].merged()
    assert drift["verdict"] == "FAIL" and drift["note"] == "rank 1: nats"
    assert drift["range"] == [0.25, 0.25] and speed["range"] == [3.0, 4.0]
    assert speed["value"] == 4.0 and error["verdict"] == "FAIL"
    text = gpu_check.page({"gpu": None, "ranks": 2, "seconds": 1.0, "versions": "torch 2",
                           "failed": ["drift"], "rows": [drift, speed, error]}, {"2B": "8 GB"})
    assert "| drift | 0.25 | 0.25 to 0.25 | <= 1 | FAIL | rank 1: nats |" in text
    assert "## Plan: 2B" in text and "8 GB" in text
