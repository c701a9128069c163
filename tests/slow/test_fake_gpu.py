"""
Tests of the GPU's path without a GPU: python -m pytest tests/slow/test_fake_gpu.py -q

Fake tensors on `cuda` have device, dtype and shape but no numbers, and torch's `fake` process group
answers every collective at once. So one process plays one rank of eight: load_policy, FSDP2, bf16
compute, recomputation, the vision tower, an SFT step, a GRPO update and the weights for the engine
run at the 8B's widths, each tensor as large as it would be.

Found: a tensor left on the host, a dtype that a kernel refuses, masters that are not fp32, shapes,
waits of the host for the GPU. Not found: numbers, what Triton
compiles, the order of streams, NCCL, how often the tower reads its grid on the host.

torch's CPU build knows no CUDA device to switch to, so autograd and FSDP2 would refuse: a stub in
C++ stands in. That and the patches are for good; hence this file, run as a script, is also the
child process that does the work.
"""
# ruff: noqa: E402
import contextlib
import ctypes
import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # torch asks once, early, whether it has a device

import numpy as np
import pytest
import torch
import torch._dynamo  # lists torch's functions: before any of them is patched
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import chat
import grpo
import launch
import model
import sft
from plumbing import checkpoint, qwen35

ROOT = str(Path(__file__).resolve().parents[2])

# Sizes of public checkpoints, Qwen/Qwen3-VL-*-Instruct: hidden, heads, intermediate, whether the
# head is tied; of the tower width and inner width.
PUBLIC_SIZES = {"2B": (2048, 16, 6144, True, 1024, 4096),
                "8B": (4096, 32, 12288, False, 1152, 4304)}


def hf_config(name, layers):
    """transformers' configuration of a public size, with fewer layers, and three blocks of the
    tower, each a deepstack level."""
    from transformers import Qwen3_5Config, Qwen3VLConfig

    if name == "3.5-9B":  # transformers' defaults are this size
        config = Qwen3_5Config(vision_config={"out_hidden_size": 4096, "depth": 3})
        config.text_config.num_hidden_layers = layers
        config.text_config.layer_types = config.text_config.layer_types[:layers]
        return config
    hidden, heads, intermediate, tied, width, inner = PUBLIC_SIZES[name]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    text = {"vocab_size": 151936, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": intermediate, "rope_parameters": rope}
    vision = {"depth": 3, "hidden_size": width, "intermediate_size": inner, "in_channels": 3,
              "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 2304,
              "num_heads": 16, "out_hidden_size": hidden, "patch_size": 16,
              "temporal_patch_size": 2, "spatial_merge_size": 2}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)

STUB = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device gpu(DeviceType::CUDA, 0);
static const Stream only(Stream::DEFAULT, gpu);
// One device, one stream, nothing to wait for: what autograd's engine asks before it runs a node.
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return only; }
  Stream getNewStream(Device, int) const override { return only; }
  Stream exchangeStream(Stream) const noexcept override { return only; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard);
namespace at {
// What a CUDA build of torch registers to say that there is a device.
struct Hooks : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 8; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
}
"""

# What is traced: (stage, size, ranks, layers, rank of adapters).
RUNS = {"8B sft": ("sft", "8B", 8, 8, 0), "8B grpo": ("grpo", "8B", 8, 8, 0),
        "2B grpo": ("grpo", "2B", 1, 4, 0), "8B grpo --lora": ("grpo", "8B", 2, 8, 64),
        "3.5-9B sft": ("sft", "3.5-9B", 8, 8, 0),
        "3.5-9B grpo --lora": ("grpo", "3.5-9B", 2, 8, 64)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the child process has found."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this build of torch has a device guard of its own")
    if not shutil.which("g++"):
        pytest.skip("the stub of a device needs a C++ compiler (g++)")
    home, folder = os.path.dirname(torch.__file__), tmp_path_factory.mktemp("stub")
    (folder / "stub.cpp").write_text(STUB)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", abi, f"-I{home}/include", "stub.cpp",
                    f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu", "-o",
                    "stub.so"], check=True, cwd=folder)
    done = subprocess.run([sys.executable, __file__, str(folder / "stub.so")], capture_output=True,
                          text=True, timeout=600, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
                               "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_gradients_are_reduced_in_fp32(found):
    for name, (_, _, ranks, *_) in RUNS.items():
        assert found["runs"][name]["reduced"] == ["torch.float32"] * (ranks > 1)


def test_the_host_waits_for_the_gpu_a_few_times_a_step(found):
    """For the numbers of the log, and where the deepstack levels go. A wait in each layer, forward
    and backward, would be dozens."""
    assert found["runs"]["8B sft"]["waits"] == {"item": 1}  # the loss
    waits = found["runs"]["8B grpo"]["waits"]
    assert set(waits) <= {"item", "nonzero", "tolist"} and sum(waits.values()) < 24


def test_a_fault_is_found(found):
    """A check that cannot fail is none: the code with one fault at a time, against the code as it
    is."""
    assert [name for name, error in found["faults"].items() if not error] == ["none"]


# ------------------------------------------------------------------------------------------------
# The child process: a GPU that is not there

DEVICE, PAD, FRAMES, SIDE, FRAME_TOKENS = torch.device("cuda", 0), 151655, 64, 224, 49
CODEC = SimpleNamespace(suppress_tokens=(5, 6), image_pad=PAD, video_pad=151656, pad=PAD,
                        eos=151645, patch=16, merge=2, temporal=2, channel="image", mean=(0.5,) * 3,
                        std=(0.5,) * 3)  # config and base: see stored()
waits = Counter()  # of the host for the GPU, by what it asked for
reduced = set()  # dtypes in which gradients are summed over ranks


class Anything:
    """A stream, or an event: nothing is computed, so nothing is waited for."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        return self

    wait = wait_event = wait_stream = record_event = record


def real(function):
    """-> the function, run on real tensors: it looks at numbers."""
    def run(*given, **named):
        with unset_fake_temporarily():
            return function(*given, **named)

    return run


def pretend_cuda(modules):
    """Patch what a CUDA build of torch would answer, and what fake tensors cannot do. modules:
    transformers' modules of the models."""
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = torch.Event = Anything
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device, torch.cuda.is_initialized = lambda: 0, lambda: True
    torch.Tensor.pin_memory = lambda self: self
    device_mesh.init_device_mesh = real(device_mesh.init_device_mesh)
    model.pack_trees = real(model.pack_trees)
    model.Policy.placeholder_mask = real(model.Policy.placeholder_mask)

    # The tower reads its grid on the host: it gets the numbers of the one grid that there is.
    def of_the_grid(function):
        def run(grid, *given, **named):
            with unset_fake_temporarily():
                made = function(torch.tensor([[FRAMES, SIDE // 16, SIDE // 16]]), *given, **named)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), made)
        return run

    for qwen in modules:
        for name in ("interpolation_indices_and_weights", "position_ids", "attention_seqlens"):
            setattr(qwen, f"get_vision_{name}", of_the_grid(getattr(qwen, f"get_vision_{name}")))

    launch.gather_rows = list  # of counts in host memory: this rank's own will do
    plain_reduce = dist.all_reduce
    dist.all_reduce = lambda t, *a, **k: t.device.type == "cuda" and plain_reduce(t, *a, **k)

    def item(self):
        if not isinstance(self, (FakeTensor, DTensor)):
            return plain_item(self)
        waits["item"] += self.device.type == "cuda"
        # what was made of a Python number is still known
        constant = getattr(self, "constant", None)
        return 1.0 if constant is None else plain_item(constant)

    def tolist(self):  # one copy from a GPU; a fake tensor would be asked for each number
        if self.device.type != "cuda":
            return plain_tolist(self)
        waits["tolist"] += 1
        return np.ones(self.shape).tolist()

    plain_item, torch.Tensor.item = torch.Tensor.item, item
    plain_tolist, FakeTensor.tolist = FakeTensor.tolist, tolist

    # its size is data: the only masks that are asked are those of vision tokens
    def nonzero(mode, func, mask, *_):
        waits["nonzero"] += 1
        with fake_tensor.in_kernel_invocation_manager(mode):
            return FakeTensor(mode, torch.empty(FRAMES * FRAME_TOKENS, mask.ndim, dtype=torch.int64,
                                                device="meta"), mask.device)

    fake_impls.op_implementations_dict[torch.ops.aten.nonzero.default] = nonzero

    moved = WeakIdKeyDictionary()  # parameter -> what it became: tied weights stay one

    # torch's own swaps tensors in place; the weak references to fake ones forbid it
    def apply(self, fn, recurse=True):
        for module in self.children():
            module._apply(fn)
        for name, p in self._parameters.items():
            if p is not None and p not in moved:
                old = p._local_tensor if isinstance(p, DTensor) else p
                new = fn(old)
                if new is old:
                    continue
                if isinstance(p, DTensor):
                    new = DTensor.from_local(new, p.device_mesh, p.placements, run_check=False,
                                             shape=p.shape, stride=p.stride())
                moved[p] = torch.nn.Parameter(new.detach(), p.requires_grad)
            self._parameters[name] = None if p is None else moved[p]
        self._buffers.update({name: b if b is None else fn(b) for name, b in self._buffers.items()})
        return self

    torch.nn.Module._apply = apply


class Recorder(TorchDispatchMode):
    """Notes in which dtypes gradients are summed over ranks."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it acts on its parts, which are seen here
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "reduce_scatter" in func.name():
            tensors = torch.utils._pytree.tree_leaves(args)
            reduced.update(str(x.dtype) for x in tensors if isinstance(x, torch.Tensor))
        return out


class Kernel(torch.autograd.Function):
    """What an attention kernel asks for, and what it keeps for backward."""

    @staticmethod
    def forward(ctx, q, k, v, *others):
        dtypes, devices = {x.dtype for x in (q, k, v)}, {x.device for x in (q, k, v, *others)}
        assert dtypes == {torch.bfloat16}, f"a kernel for bf16 is given {q.dtype}"
        assert devices == {DEVICE}, "an argument was left on the host"
        assert {x.dtype for x in others} == {torch.int32}, "ends and lists of blocks are int32"
        assert all(x.stride(-1) == 1 for x in (q, k, v)) and all(x.is_contiguous() for x in others)
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad):
        return (*map(torch.empty_like, ctx.saved_tensors[:3]),
                *[None] * (len(ctx.needs_input_grad) - 3))


def flash_attn_varlen_func(q, k, v, ends, ends_k, longest, longest_k, softmax_scale, causal):
    assert type(longest) is type(longest_k) is int and causal
    return Kernel.apply(q, k, v, ends, ends_k)


def flex_attention(q, k, v, block_mask, scale, enable_gqa):
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2]) and enable_gqa
    at = torch.zeros(1, dtype=torch.int64, device=q.device)
    # the kernel asks it inside blocks seen in part
    assert block_mask.mask_mod(at, at, at, at).device == q.device
    names = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q")
             for what in ("num_blocks", "indices")]
    return Kernel.apply(q, k, v, *(getattr(block_mask, name) for name in names))


class DeltaKernel(torch.autograd.Function):
    """What flash-linear-attention's rule in chunks of 64 asks for, and what it keeps for backward:
    its inputs, the decays summed up, and a matrix of each chunk."""

    @staticmethod
    def forward(ctx, q, k, v, decay, beta, state):
        given = [x for x in (q, k, v, decay, beta, state) if x is not None]
        assert {x.device for x in given} == {DEVICE}, "an argument was left on the host"
        assert {x.dtype for x in (q, k, v, beta)} == {torch.bfloat16}
        assert decay.dtype == torch.float32, "a decay in bf16 forgets at another rate"
        chunks = q.new_empty(*beta.shape, 64)
        ctx.save_for_backward(q, k, v, decay.clone(), beta, chunks, *given[5:])
        end = torch.empty(len(v), v.shape[2], k.shape[3], v.shape[3], device=v.device)
        assert state is None or state.shape == end.shape and state.dtype == torch.float32
        return torch.empty_like(v), end

    @staticmethod
    def backward(ctx, grad, grad_end):
        q, k, v, decay, beta, _, *state = ctx.saved_tensors
        return (*map(torch.empty_like, (q, k, v, decay, beta)),
                torch.empty_like(state[0]) if state else None)


def delta_rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    assert output_final_state and use_qk_l2norm_in_kernel
    return DeltaKernel.apply(q, k, v, g, beta, initial_state)


# ------------------------------------------------------------------------------------------------
# The child process: the steps


def stored(size, layers):
    """A published checkpoint without numbers, in the place of files -> {weight: shape}."""
    import transformers

    config = hf_config(size, layers)
    config.architectures = [chat.BASES[config.model_type].model_class]  # as published
    config.text_config.dtype = torch.bfloat16  # as published ones say
    with torch.device("meta"):
        hf = getattr(transformers, config.architectures[0])(config)
        shapes = {name: list(p.shape) for name, p in hf.named_parameters()}

    checkpoint.small_files = lambda _: {}
    torch.distributed.checkpoint.load = lambda *_, **__: None
    chat.load_config = lambda _: deepcopy(config)
    CODEC.config, CODEC.base = config, chat.BASES[config.model_type]
    return shapes


def load(lora=0):
    """-> (policy, its optimizer with moments), as a step finds them."""
    policy = checkpoint.load_policy("nowhere", CODEC, DEVICE, True, lora)
    devices = {x.device for x in (*policy.parameters(), *policy.buffers())}
    assert devices == {DEVICE}, "something stayed on the host"
    weights = model.trained_parameters(policy)
    optimizer = model.adamw(weights, 1e-6, 0.999, DEVICE)
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # In bf16 a step of 2e-6 would be rounded away.
    dtypes = {t.dtype for p in weights for t in (p, *optimizer.state[p].values())}
    assert dtypes == {torch.float32}, "masters in fp32"
    return policy, optimizer


def load_reference():
    return checkpoint.load_policy("nowhere", CODEC, DEVICE, frozen=True)


def video_item(key):
    return chat.VisionItem({}, key, FRAMES, SIDE, SIDE, [float(i) for i in range(FRAMES)])


def keep_features(policy, reference):
    """Gives both the features of the policy's tower."""
    frames = SimpleNamespace(key="", images=np.zeros((FRAMES, SIDE, SIDE, 3), np.uint8),
                             seconds=np.arange(FRAMES, dtype=float))
    policy.features = model.VisionFeatures(policy, lambda _: frames)
    if isinstance(reference, model.Policy):
        reference.features = policy.features


def sft_step(policy, optimizer):
    """One pack of eight chats, 32k tokens -> its tokens."""
    span = model.TokenSpan([100] * 4096, [0] * 3600 + [1] * 496)
    pack = model.pack_trees(CODEC, [model.Tree(span) for _ in range(8)])
    sft.forward_backward(policy, [pack])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return len(pack.ids)


def grpo_step(policy, reference, optimizer):
    """One update on a group of eight that share a prompt of 64 frames, in one pack of 32k tokens ->
    its tokens."""
    def span(ids, mask):
        return model.TokenSpan(ids, [mask] * len(ids),
                               {"advantage": [1.0] * len(ids), "sampling": [-1.0] * len(ids),
                                "turn": [1] * len(ids)})

    prompt = span([10] + ([11] + [PAD] * FRAME_TOKENS + [13]) * FRAMES + [14] * 300, 0)
    tree = model.Tree(prompt, [video_item("of the step")], [span([20] * 3600, 1) for _ in range(8)])
    args = grpo.build_parser().parse_args(["--ckpt", "nowhere", "--pack-tokens", str(len(tree))])
    grpo.update(policy, reference, optimizer, [tree], 8 * 3600, args)
    return len(tree)


def trace(stage, size, ranks, layers, lora):
    """Load, one step and the engine's weights -> {"waits": of the host, "reduced"}."""
    shapes, (policy, optimizer) = stored(size, layers), load(lora)
    reference = None
    if stage == "grpo":
        reference = checkpoint.AdapterReference(policy) if lora else load_reference()
        keep_features(policy, reference)
    waits.clear()
    reduced.clear()
    if reference:
        grpo_step(policy, reference, optimizer)
    else:
        sft_step(policy, optimizer)
    found = {"waits": dict(waits), "reduced": sorted(reduced)}
    sent = {name: (list(t.shape), t.dtype, t.device)
            for name, t in checkpoint.full_weights(policy, torch.bfloat16)}
    exact = {name: torch.float32 if name.endswith(".A_log") else torch.bfloat16 for name in shapes}
    assert sent == {name: (shape, exact[name], DEVICE) for name, shape in shapes.items()}
    return found


def faults():
    """-> {name: (stage that must fail, owner, attribute, what it becomes)}. Each wraps what the
    code does, whatever its words are."""
    import torch.distributed.fsdp
    from transformers import Qwen3VLForConditionalGeneration as Qwen

    masks, chunk = model.block_mask, model.chunk_logprobs
    precision = torch.distributed.fsdp.MixedPrecisionPolicy
    return {
        "none": ("grpo", model, "block_mask", masks),
        "no compute in bf16": ("sft", torch.distributed.fsdp, "MixedPrecisionPolicy",
                               lambda param_dtype=None, **more: precision(**more)),
        "masters in the configuration's dtype": ("sft", Qwen, "float", lambda self: self),
        "bias of banned ids on the host": (
            "sft", model, "chunk_logprobs",
            lambda h, w, y, bias, t: chunk(h, w, y, bias.cpu(), t)),
        "blocks on the host": ("grpo", model, "block_mask",
                               lambda p, device: masks(p, device).to("cpu"))}


def outcome(stage, owner, name, fault):
    """-> what goes wrong in a step of one layer at the 8B's widths with this fault, or None."""
    stored("8B", layers=1)
    with mock.patch.object(owner, name, fault):
        try:
            if stage == "sft":
                sft_step(*load())
            else:
                (policy, optimizer), reference = load(), load_reference()
                keep_features(policy, reference)
                grpo_step(policy, reference, optimizer)
        except Exception as error:  # of whatever kind: the point is that it does not pass
            return f"{type(error).__name__}: {error}"[:300]
    return None


def main():
    launch.import_shim()
    # looks for flash-attn while it is imported: before the fake module is put in place
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}")
               for name in ("qwen3_vl", "qwen3_5")]
    pretend_cuda(modules)
    qwen35.delta_kernel = lambda device: delta_rule
    kernels = types.ModuleType("flash_attn_2_cuda")  # what attention_plan looks for
    kernels.__spec__ = importlib.machinery.ModuleSpec("flash_attn_2_cuda", None)
    sys.modules["flash_attn_2_cuda"] = kernels
    sys.modules["flash_attn"] = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    model.compiled_flex = lambda: flex_attention
    found = {"runs": {}, "faults": {}}
    for name, run in RUNS.items():
        dist.init_process_group("fake", store=FakeStore(), rank=run[2] // 2, world_size=run[2])
        with FakeTensorMode(allow_non_fake_inputs=True), Recorder():
            found["runs"][name] = trace(*run)
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, fault in faults().items():
            found["faults"][name] = outcome(*fault)
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's threads for a device that is not there now and then abort at a plain exit


if __name__ == "__main__":
    main()
