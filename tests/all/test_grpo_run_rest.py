"""
More of runs of grpo.py: decoding ahead, epochs that meet, K:
python -m pytest tests/all/test_grpo_run_rest.py -q
"""
import concurrent.futures

import pytest
import torch
from test_grpo_run import (
    LIVE,
    tasks,  # noqa: F401
)

import grpo
import rollout
import video

# ------------------------------------------------------------------------------------------------
# Real rollouts, by the reference engine


@pytest.mark.parametrize("frames", [4, "gated"])
def test_the_next_steps_overviews_are_decoded_while_this_one_trains(
        run_grpo, toy, monkeypatch, varied_rewards, frames):
    """When the rollouts of a step begin, its overviews are in the cache."""
    real_run, real_update, sources, misses = rollout.run, grpo.update, [], []
    asked, real_ask = [], video.ChildDecoder.ask
    monkeypatch.setattr(video.ChildDecoder, "ask", lambda decoder, request: asked.append(request)
                        or real_ask(decoder, request))

    def run(sampler, mine, budget, group, step, pump):
        source = sampler.source
        sources.append(source)
        if len(sources) > 1:
            specs = [{"video": t["video"], "frames": budget if isinstance(budget, int)
                      else rollout.gated_frames(0, step, t["id"])} for t in mine]
            before = len(asked)
            for spec in specs:
                source.load(spec)
            misses.append(len(asked) - before)
        return real_run(sampler, mine, budget, group, step, pump=pump)

    class Pool(grpo.ThreadPoolExecutor):
        def submit(self, *given):
            futures.append(super().submit(*given))
            return futures[-1]

    def update(*given):
        # As if the update took long: all decodes that were asked for before it are over.
        concurrent.futures.wait(futures, timeout=60)
        return real_update(*given)

    futures = []
    monkeypatch.setattr(grpo, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(rollout, "run", run)
    monkeypatch.setattr(grpo, "update", update)
    # six tasks: three steps see each once
    run_grpo("--data", toy / "rl.jsonl", "--steps", 3, "--frames", frames, *LIVE,
             "--max-new-tokens", 2)
    assert misses == [0, 0] and asked


def test_a_film_that_vanishes_between_rollout_and_update_changes_nothing(
        run_grpo, given_rollouts, monkeypatch, hard_tasks):
    common = ("--data", hard_tasks, "--steps", 1, "--prompts", 2, "--group", 4)
    wanted = run_grpo(*common, out="straight")[0]
    real = grpo.training_trees

    def vanish(*given):
        monkeypatch.setattr(video, "load", lambda spec, *_, **__: video.probe("gone.mp4"))
        return real(*given)

    monkeypatch.setattr(grpo, "training_trees", vanish)
    found, m, _ = run_grpo(*common, out="vanished")
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert m["not_ok"] == 0 and m["loss"] is not None
