"""
More of runs of grpo.py: decoding ahead, epochs that meet, K:
python -m pytest tests/all/test_grpo_run_rest.py -q
"""
import concurrent.futures
import json

import pytest
import torch
from test_grpo_run import (
    LIVE,
    read_rollouts,
    tasks,  # noqa: F401
)

import grpo
import launch
import rollout
import video

# ------------------------------------------------------------------------------------------------
# Real rollouts, by the reference engine


def test_gated_frames_reach_the_decoder_and_the_prompt(run_grpo, toy, codec, monkeypatch,
                                                       varied_rewards):
    """K is drawn per prompt and step, is the same in its group, and is the number of frames that
    were decoded and encoded."""
    asked, load = [], rollout.Source.load
    monkeypatch.setattr(rollout.Source, "load", lambda self, spec: asked.append(spec)
                        or load(self, spec))
    _, m, folder = run_grpo("--data", toy / "rl.jsonl", "--steps", 3, *LIVE, "--max-new-tokens", 2)
    rows = read_rollouts(folder)
    budgets = {}
    for r in rows:
        assert r["K"] == rollout.overview_frames("gated", 0, r["version"], r["task"]["id"])
        assert [v["frames"] for v in r["vision"][:1]] == [r["K"]]
        assert r["ids"].count(codec.image_pad) == r["K"]
        budgets.setdefault(r["group"], set()).add(r["K"])
    assert len(budgets) == 6 and all(len(ks) == 1 for ks in budgets.values())
    assert len(set.union(*budgets.values())) > 1
    loaded = {(s["video"], s["frames"]) for s in asked if "frames" in s}
    assert {(r["task"]["video"], r["K"]) for r in rows} <= loaded
    assert set(m["by_K"]) <= {"4", "8", "16", "32", "64"}


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
                      else rollout.overview_frames("gated", 0, step, t["id"])} for t in mine]
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


def test_a_task_is_one_group_even_where_two_epochs_meet_in_a_batch(
        run_grpo, tasks, toy, tmp_path, varied_rewards):
    """Three tasks, two prompts a step: the second batch ends one epoch and begins the next, perhaps
    with the same task. The same seeds would give the same samples twice, under the same request
    ids: the group grows instead."""
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in tasks[:3]))
    seed = next(s for s in range(99) if len(set(launch.batch_indices(1, 2, 3, s))) == 1)
    _, m, folder = run_grpo("--data", path, "--steps", 2, "--frames", 4, *LIVE, "--max-new-tokens",
                            2, "--seed", seed)
    rows = [r for r in read_rollouts(folder) if r["version"] == 1]
    assert m["groups"] == 1 and [r["sample"] for r in rows] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(r["ids"]) for r in rows}) == 6


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
