"""
More of engine.py: what sleeps, what closes, what a rank decodes:
python -m pytest tests/slow/test_engine.py -q
"""
import asyncio
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference  # noqa: F401  waits for engines with `patient`
import torch
from scripted import ANSWER, Scripted, play
from test_engine import (  # noqa: F401
    HOT,
    TALK,
    Saying,
    base,
    engine,
    engine_gap,
    plain,
    sample,
    trainer_logps,
    vllm_engines,
)

import grpo
from engine import Pump, Request, VllmEngine

pytestmark = pytest.mark.usefixtures("one_thread")


def asked(name):
    return Request(name, [], [], [], [], 10, 0.0, 0)


async def pumped(engine, work):
    """work(pump) beside the steps of its pump -> its result; an error of the steps is raised."""
    pump = Pump(engine, 1)
    steps, work = asyncio.create_task(pump.steps()), asyncio.create_task(work(pump))
    await asyncio.wait({steps, work}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        steps.result()  # its error, or InvalidStateError: nothing came within 20 s
    steps.cancel()
    return work.result()


# ------------------------------------------------------------------------------------------------
# Decoders


def test_the_next_overviews_are_decoded_while_no_decode_of_this_step_waits():
    args, loaded = SimpleNamespace(frames=4, seed=0), []
    source = SimpleNamespace(overview_spec=lambda task, k: (task["id"], k), load=loaded.append)
    pump, gates = Pump(None, 2), [threading.Event(), threading.Event()]

    async def step():
        decodes = [pump.load(gate.wait, 20) for gate in gates]
        for gate, decode in zip(gates, decodes):
            await asyncio.sleep(0.05)
            assert not loaded
            gate.set()
            await decode

    with ThreadPoolExecutor(2) as decoders:
        grpo.look_ahead(decoders, [{"id": n} for n in range(3)], 5, args, source, pump.quiet)
        time.sleep(0.05)
        assert not loaded  # the run has not begun
        asyncio.run(step())
    assert sorted(loaded) == [(0, 4), (1, 4), (2, 4)]


# ------------------------------------------------------------------------------------------------
# Requests, sleep


class SleepyLlm:
    """vLLM's own Worker and allocator around "device" memory that is a dict of CPU tensors. Pages
    that are taken away, and pages that come back, are full of NaN."""

    def __init__(self, monkeypatch):
        from vllm import device_allocator
        from vllm.device_allocator import AllocationData, cumem
        from vllm.v1.worker.gpu_worker import Worker

        self.calls, self.memory, self.executor_asleep = [], {}, set()
        allocator = object.__new__(cumem.CuMemAllocator)
        allocator.pointer_to_data = {}

        def device(tag, values):
            page = torch.tensor(values)
            at, size = page.data_ptr(), page.nbytes
            self.memory[at] = page
            allocator.pointer_to_data[at] = AllocationData((0, size, at, 0), tag)
            return page

        self.weight = torch.nn.Parameter(device("weights", [1.0, 2.0]))
        self.rotary = device("weights", [3.0, 4.0])
        self.positions, self.scratch = device("weights", [0.0] * 3), device("workspace", [0.0])
        self.block_table, self.cache = device("runtime", [5.0]), device("kv_cache", [6.0] * 4)

        def lost(*handle):
            self.calls.append("map" if handle[2] in self.unmapped else "unmap")
            self.unmapped ^= {handle[2]}
            self.memory[handle[2]].fill_(float("nan"))

        self.unmapped = set()
        runtime = SimpleNamespace(
            cudaMemset=lambda at, value, size: self.clear(at, value, size),
            cudaMemcpy=lambda to, at, size: ctypes.memmove(to, at, size) and None)
        for name, value in (("python_create_and_map", lost), ("python_unmap_and_release", lost),
                            ("libcudart", runtime), ("cumem_available", True),
                            ("PIN_MEMORY", False)):
            monkeypatch.setattr(cumem, name, value)
        monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
        monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.accelerator, name, lambda: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 2))

        tower = torch.nn.Module()
        tower.weight = self.weight
        tower.register_buffer("rotary", self.rotary, persistent=False)
        self.worker = object.__new__(Worker)
        self.waited = False  # for torch's stream, on which buffers are cloned
        self.worker.synchronize_device = lambda: setattr(self, "waited", True)
        model_config = SimpleNamespace(
            sleep_preserve_parameter_names=(), sleep_mode_backend="cumem",
            enable_nccl_comm_suspend=False)
        vars(self.worker).update(
            model_runner=SimpleNamespace(model=tower, get_draft_model=lambda: None),
            vllm_config=SimpleNamespace(model_config=model_config), model_config=model_config,
            _sleep_mode_backend=None, _sleep_saved_buffers={}, _sleep_saved_parameters={},
            _sleep_saved_draft_buffers={})

    def clear(self, at, value, size):
        assert self.waited  # the null stream does not wait for the clones
        ctypes.memset(at, value, size)

    def sleep(self, level):
        self.worker.sleep(level)

    def wake_up(self, tags=None):
        self.calls.append(tags)
        self.worker.wake_up(tags)

    def collective_rpc(self, function, args):
        self.waited = False
        function(self.worker, *args)

    def is_sleeping(self):
        return bool(self.unmapped)


@pytest.fixture
def sleepy(monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    engine = object.__new__(VllmEngine)
    engine.llm = engine.engine = llm = SleepyLlm(monkeypatch)
    engine.sleeping = True
    return engine, llm


def test_waking_clears_all_that_sleep_has_lost(sleepy, monkeypatch):
    """vLLM's runner keeps state in the memory of the weights, which a level-2 sleep discards. Only
    buffers come back. In order: memory, zeros, weights, cache."""
    engine, llm = sleepy

    def sync(self, weights):
        llm.calls.append("sync")
        assert llm.cache.isnan().all()  # the cache comes last
        assert not llm.positions.any() and not llm.weight.any()  # none of the NaN of the sleep
        with torch.no_grad():
            llm.weight.copy_(torch.tensor(weights))

    monkeypatch.setattr(VllmEngine, "sync", sync)
    for weights in ([7.0, 8.0], [9.0, 10.0]):
        del llm.calls[:]
        assert engine.sleep() == 1e-9  # GB in use: 1 byte of 2 is free
        assert llm.calls == ["unmap"] * 6 and all(x.isnan().all() for x in llm.memory.values())
        engine.wake(weights)
        assert llm.calls[6:] == [["weights"], *["map"] * 5, "sync", ["kv_cache"], "map"]
        assert llm.weight.tolist() == weights and llm.rotary.tolist() == [3.0, 4.0]
        assert llm.block_table.tolist() == [5.0]
        assert not llm.positions.any() and not llm.scratch.any() and not llm.cache.any()


@pytest.mark.parametrize("channel", ["image", "video"])
def test_frames_that_cross_a_chunk_of_the_prefill_are_the_trainers(channel, vllm_engines, codecs,
                                                                   policy, tasks, frames_of):
    """Greedy, since a CPU's generators cannot be rewound; GPUs cut every long prompt."""
    codec, engine = codecs[channel], vllm_engines(channel, max_seqs=4, chunk=32)
    agent, steps, real = replace(HOT, temperature=0.0), [], engine.engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.engine, "step", lambda: steps.append(1) or real())
        (episode,) = play(Saying(engine, [ANSWER]), tasks[:1], frames_of, agent, 64)
    context = episode.context
    frames = [n for n, i in enumerate(context.ids) if i == codec.pad]
    assert frames[0] < 32 and frames[-1] > 96  # in four chunks
    assert len(steps) > sum(context.mask)  # more than one step per token: the prompt took several
    got = trainer_logps(policy, codec, frames_of, context.ids, context.mask, context.items)
    want = [logp for logp, flag in zip(context.logps, context.mask) if flag]
    assert np.abs(got - want).max() < 1e-4


# ------------------------------------------------------------------------------------------------
# vLLM beside the trainer


@pytest.mark.parametrize("finished", [False, True])
def test_a_sample_that_is_cancelled_gives_up_its_request(codec, finished):
    """Also if the engine finishes the request in the very moment."""
    held = {"0/t/0/0"}
    engine = Scripted(codec, ["red"], hold=lambda request: request.id in held)

    async def work(pump):
        left = asyncio.create_task(pump.sample(asked("0/t/0/0")))
        other = await pump.sample(asked("0/t/1/0"))
        real, polls = engine.poll, []

        def poll():
            # The task is cancelled and has not run since.
            if not polls and finished:
                held.clear()
                left.cancel()
            return polls.append(1) or real()

        engine.poll = poll
        if not finished:
            left.cancel()
        await asyncio.wait([left])
        return left.cancelled(), other.text, (await pump.sample(asked("0/t/2/0"))).text

    assert asyncio.run(pumped(engine, work)) == (True, "red", "red")
    assert (("abort", "0/t/0/0") in engine.log) != finished and engine.waiting == []


