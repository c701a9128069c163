"""
What plumbing/checkpoint.py refuses: kinds of checkpoints, damaged folders, code in a checkpoint:
python -m pytest tests/slow/test_checkpoint_refused.py -q
"""
import json
import shutil

import pytest
import torch
from reference import load_policy
from safetensors.torch import load_file, save_file
from test_checkpoint import CPU
from test_engine import engine_gap

import chat
import eval as evaluation
import grpo
import launch
import rollout
import sft
from engine import EngineConfig, VllmEngine
from plumbing import checkpoint, runs
from tools import plan

SCRIPTS = {"sft": sft, "grpo": grpo, "rollout": rollout, "eval": evaluation}


# ------------------------------------------------------------------------------------------------
# Loading in shards, several replicas


def test_a_checkpoint_in_several_files(toy, codec, process_group, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "many")
    weights = load_file(folder / "model.safetensors")
    assert len(sharded(folder)) == 2
    policy = checkpoint.load_sharded(str(folder), codec, CPU)
    assert all(torch.equal(w, weights[n]) for n, w in checkpoint.full_weights(policy))


# ------------------------------------------------------------------------------------------------
# Folders as they lie about


@pytest.fixture
def ckpt(toy, tmp_path):
    """A checkpoint to damage."""
    return shutil.copytree(toy / "init", tmp_path / "ckpt")


def text(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
    return write


def gone(name):
    return lambda folder: (folder / name).unlink()


@pytest.fixture
def refuse(start, toy, tmp_path):
    """refuse(script, folder) -> the one line that the script says; no file is left."""

    def refuse(script, ckpt):
        data, out = {"sft": "sft", "eval": "eval"}.get(script, "rl"), tmp_path / "runs" / "out"
        target = out / "r.jsonl" if script == "rollout" else out
        flags = ("--preset", "toy", "--ckpt", ckpt, "--data", toy / f"{data}.jsonl", "--video-root",
                 toy, "--out", target)
        words = (plan, ckpt) if script == "plan" else (SCRIPTS[script], *flags)
        code, _, err = start(*words)
        assert code == 2 and not [p for p in out.rglob("*.*") if ".lock" not in p.name]
        (line,) = err.splitlines()
        assert line.startswith(f"{script}.py: ")
        return line

    return refuse


def change(folder, name, part=None, **values):
    """Set values in a JSON file of a checkpoint, in a part of it."""
    content = json.loads((folder / name).read_text())
    (content[part] if part else content).update(values)
    (folder / name).write_text(json.dumps(content))


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


def head(folder, factor):
    """Stores a head beside the embeddings that it is tied to, as some trainers and merges do."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"] * factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_a_head_that_is_stored_beside_equal_embeddings_follows_them(toy, codec, source, tmp_path,
                                                                    process_group):
    """Not refused. vLLM then unties its configuration, and a sync brings no head."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    head(shutil.copytree(toy / "init", tmp_path / "equal"), 1)
    engine = VllmEngine(str(tmp_path / "equal"), codec, EngineConfig(1024, 16, 8192, 8))
    policy = load_policy(str(toy / "init"), codec)
    with torch.no_grad():
        policy.hf.model.language_model.embed_tokens.weight.mul_(3)
    engine.sync(checkpoint.full_weights(policy))
    assert engine_gap(engine, policy, codec, source, 9) < 1e-3
    engine.close()


def other_adapters(folder):
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("alpha, more, why", [(2, ("lora_A", "lora_B"), "lora_alpha"),
                                              (4, ("lora_A", "lora_B", "head"), "head"),
                                              (4, ("lora_B",), "no A and B")])
def test_adapters_that_another_tool_has_changed_are_refused(tmp_path, alpha, more, why):
    config = {"r": 2, "lora_alpha": alpha, "base_digest": "0"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"q.{name}.weight": torch.ones(2, 2) for name in more},
              tmp_path / "adapter_model.safetensors")
    with pytest.raises(launch.UserError, match=why):
        checkpoint.read_adapters(str(tmp_path))


def changed(*place):
    return lambda **fields: lambda folder: change(folder, *place, **fields)


quantized, language = changed("config.json"), changed("config.json", "text_config")
pictures = changed("processor_config.json", "image_processor")


# What a folder's configuration says: every script refuses it, and tools/plan.py as well.
CONFIGS = {
    "moe": (quantized(model_type="qwen3_vl_moe"), "model_type is 'qwen3_vl_moe'"),
    "cut": (text("config.json", b'{"model_type": "qwen3_vl",'), "config.json is not JSON"),
    "odd value": (language(hidden_size="big"), "config.json cannot be used"),
    "fp8": (quantized(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "rope": (quantized(rope_parameters={"rope_type": "linear"}), "linear"),
    "rope, before 4.43": (quantized(rope_scaling={"type": "dynamic", "factor": 4.0}), "dynamic"),
    "theta": (lambda f: change(f, "config.json", "vision_config", rope_parameters={
        "rope_type": "axial", "rope_theta": 100.0}), "theta"), "empty": (emptied, "no config.json"),
    "bias": (language(attention_bias=True), "bias"), "sides": (language(is_causal=False), "causal"),
    "code": (quantized(auto_map={"AutoConfig": "evil.Evil"}), "config.json asks for code"),
    "inner code": (pictures(auto_map={"AutoImageProcessor": "evil.Evil"}),
                   "processor_config.json asks for code")}


def sharded(folder):
    """As large checkpoints are stored -> names of its files."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {k: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, k in enumerate([*weights])}
    for file in set(files.values()):
        save_file({n: weights[n] for n in weights if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(set(files.values()))


def torn(content):
    """A shard that is cut to so many bytes, or not there at all."""
    def damage(folder):
        last = folder / sharded(folder)[-1]
        if content is None:
            last.unlink()
        else:
            last.write_bytes(last.read_bytes()[:content])
    return damage


def stale(folder):
    """An older download beside the shards: which of the two is loaded would be anyone's guess."""
    old = shutil.copy(folder / "model.safetensors", folder / "old")
    sharded(folder)
    shutil.move(old, folder / "model.safetensors")


def gguf(folder):
    (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf")


def stored_as(dtype):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        weights = {n: w.to(dtype) if "q_proj" in n else w for n, w in weights.items()}
        save_file(weights, folder / "model.safetensors")
    return damage


def overwritten(folder):
    """By a disk, or a copy that was cut off; state.json lists what was saved."""
    runs.mark_complete(folder, {}, runs.checksums(folder, runs.files_in(folder)))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-16] + bytes(16))


def test_a_tokenizer_whose_template_is_another_one_is_told(ckpt, capsys):
    """vLLM's server renders a request with tools by the tokenizer's."""
    template = (ckpt / "chat_template.jinja").read_text()
    (ckpt / "chat_template.jinja").unlink()
    (ckpt / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    change(ckpt, "tokenizer_config.json", chat_template=template + "{# edited #}")
    assert chat.load_codec(str(ckpt)) and "different chat templates" in capsys.readouterr().err


# What lies beside it.
FILES = {
    "shallower": (language(num_hidden_layers=1),
                  "is stored, but config.json describes a model without"),
    "twice": (lambda f: shutil.copy(f / "model.safetensors", f / "b.safetensors"), "is in b.safet"),
    "another head": (lambda f: head(f, 1.5), "ties lm_head.weight to model.language_model.embed"),
    "two checkpoints": (lambda f: (f / "last").symlink_to("."), "a config.json lies here and in"),
    "other ids": (lambda f: change(f, "config.json", image_token_id=7), "<|image_pad|> is id"),
    "no tools": (lambda f: (f / "chat_template.jinja").write_text("plain"), "chat template"),
    "no processor": (gone("processor_config.json"), "preprocessor_config.json is missing"),
    "shard cut": (torn(100_000), "model-00002-of-00002.safetensors cannot be read"),
    "shard missing": (torn(None), "model-00002-of-00002.safetensors is missing"),
    "no template": (gone("chat_template.jinja"), "chat template cannot be used"),
    "other adapters": (other_adapters, "were not saved by sft.py or grpo.py"),
    "other processor": (pictures(patch_size=14), "processor makes patches"),
    "fp8 unsaid": (stored_as(torch.float8_e4m3fn), "is stored as F8_E4M3"),
    "no tokenizer": (gone("tokenizer.json"), "tokenizer.json is missing"),
    "bytes": (pictures(do_normalize=False), "processor makes patches"),
    "bytes changed": (overwritten, "has other bytes than were saved"),
    "wide": (language(intermediate_size=128), "has shape"), "gguf": (gguf, "no .safetensors file"),
    "two downloads": (stale, "not in its index"), "gone": (shutil.rmtree, "no such folder")}


@pytest.mark.parametrize("kind", [*CONFIGS, *FILES])
def test_every_script_refuses_what_it_cannot_train_or_load(ckpt, refuse, kind):
    damage, why = {**CONFIGS, **FILES}[kind]
    damage(ckpt)
    for script in (*SCRIPTS, *["plan"] * (kind in CONFIGS)):  # which reads configurations alone
        line = refuse(script, ckpt)
        assert why in line and str(ckpt) in line
