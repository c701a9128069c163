"""More of engine.py: python -m pytest tests/slow/test_engine.py -q"""
import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scripted import ANSWER, Scripted, play

from test_engine import (  # noqa: F401  # isort: skip
    HOT, base, saying, trainer_logps, vllm_engines)

from engine import EngineLoop, Request


def asked(name):
    return Request(name, [], [], [], [], 10, 0.0, 0)


async def pumped(engine, work):
    """work(pump) beside the steps of its pump -> its result; an error of the steps is raised."""
    pump = EngineLoop(engine, 1)
    steps, work = asyncio.create_task(pump.steps()), asyncio.create_task(work(pump))
    await asyncio.wait({steps, work}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        steps.result()  # its error, or InvalidStateError: nothing came within 20 s
    steps.cancel()
    return work.result()


# ------------------------------------------------------------------------------------------------
# Requests, sleep


def test_frames_that_cross_a_chunk_of_the_prefill_are_the_trainers(vllm_engines, codec, policy,
                                                                   tasks, frames_of):
    """Greedy, since a CPU's generators cannot be rewound; GPUs cut every long prompt."""
    engine = vllm_engines(max_seqs=4, chunk=32)
    agent, steps, real = replace(HOT, temperature=0.0), [], engine.engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.engine, "step", lambda: steps.append(1) or real())
        (episode,) = play(saying(engine, [ANSWER]), tasks[:1], frames_of, agent, 64)
    context = episode.context
    frames = [n for n, i in enumerate(context.ids) if i == codec.image_pad]
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
        other, real, polls = await pump.sample(asked("0/t/1/0")), engine.poll, []

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


def test_a_request_that_is_aborted_is_forgotten_by_vllm_too(vllm_engines):
    engine = vllm_engines()
    engine.submit(Request("gone", [10, 11], [10, 11], [], [], 4, 1.0, 0))
    engine.abort("gone")
    assert not engine.running and not engine.engine.has_unfinished_requests()
