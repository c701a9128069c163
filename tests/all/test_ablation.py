"""
Tests of bench/ablation.py, verdicts.py, frontier.py, lossy.py: python -m pytest
tests/all/test_ablation.py -q

The runs themselves take hours; here: its commands are ones the scripts take, nothing finished is
run again, and its verdicts follow.
"""
import argparse
import asyncio
import importlib.util
import json
import os
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

import eval as evaluation
import grpo
import launch
import rewards
import rollout
import sft
import toy
import video


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("ablation",
                                                  os.path.join(ROOT, "bench", "ablation.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(out=str(tmp_path / "out"), results=str(tmp_path / "table"),
                              seeds=list(range(8)), rows=None, keep_old=False,
                              base_flags="--steps 400", taught_flags="--steps 1000",
                              sft_flags="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                              calls_flags="--steps 24", need_flags="--steps 24",
                              rl_flags="--prompts 8 --steps 30 --show-every 0")


def test_every_command_is_one_that_its_script_takes(ablation, args, monkeypatch):
    """And rows differ: two rows with the same flags would be one experiment under two names."""
    seen, kinds = {}, ablation.kinds()
    for name in [*ablation.rows(), "world-strong", "base-strong", "taught-need", "sft-strong",
                 "calls-strong"]:
        for script, *words in ablation.commands(name, args, 3)[1]:
            lossy = script == os.path.join("bench", "lossy.py")
            share = float(words.pop(0)) if lossy else None
            monkeypatch.setattr("sys.argv", [script, *words])
            if script == "toy.py":
                continue
            parsed = vars({"sft.py": sft, "eval.py": evaluation}.get(script, grpo).parse_args())
            assert parsed["seed"] == 3 and "toy" in parsed["preset"]
            if script == "grpo.py" or lossy:
                key = json.dumps({**parsed, "out": "", "q": share}, sort_keys=True)
                assert key not in seen, (name, seen.get(key))
                seen[key] = name
                # the release runs calls of open thoughts; one row does not
                assert parsed["open_thought"] == ("drop" if name == "acc-drop" else "run")
                if name in kinds["need"][0]:  # the demo's settings
                    assert parsed["temperature"] == 1.0 and parsed["sub_fps"] == 1.0
                    assert parsed["prompts"] == 16 and not lossy
                else:
                    assert parsed["temperature"] == 0.7 and parsed["sub_fps"] == 0.375
                    assert lossy and (share == 1 or name in kinds["phase"][0])
                trained = parsed
            if script == "eval.py" and "--temperature 0 " in " ".join(words):
                assert parsed["temperature"] == 0
                if ablation.rows()[name][3] is not None:  # evaluated as it was trained
                    assert all(parsed[f] == trained[f] for f in (
                        "think_prefix", "sub_fps", "sub_question", "dispatch", "open_thought"))
    assert len(seen) == sum(row[3] is not None for row in ablation.rows().values())


def test_rewards_of_rows_are_what_their_names_say(ablation, args, monkeypatch):
    def paid(name):
        script, *words = ablation.commands(name, args, 3)[1][0]
        monkeypatch.setattr("sys.argv", [script, *words[script != "grpo.py":]])
        found = grpo.parse_args()
        return found.tool_weight, found.format_weight, found.call_cost, found.frames

    assert paid("para") == (1.0, 1.0, 0.0, "gated") and paid("acc") == (0.0, 0.0, 0.0, 64)
    assert paid("vanilla") == (1.0, 1.0, 0.0, 64) and paid("no-tool")[0] == 0.0
    assert paid("phase-0.4-1-gated") == (1.0, 0.0, 0.0, "gated")
    assert paid("phase-1.0-0-64") == (0.0, 0.0, 0.0, 64)
    assert paid("need-tool") == paid("habit-tool") == (1.0, 1.0, 0.0, "gated")
    assert paid("half-c0.05") == (0.0, 1.0, 0.05, "gated") and paid("need-acc")[0] == 0.0


def test_plan_runs_what_is_needed_first_and_nothing_twice(ablation, args):
    jobs = ablation.plan(args, {})
    assert len(jobs) == len(set(jobs))
    for rows, _ in ablation.kinds().values():
        for name, (_, _, seeds, *_) in rows.items():
            assert [seed for seed, job in jobs if job == name] == list(range(seeds))
    # one world and one base for the rows of the first two kinds
    for job in ("world-strong", "base-strong", "sft-strong"):
        assert sum(job == name for _, name in jobs) == 8
    assert sum(name == "world-need" for _, name in jobs) == 3
    for seed, name in jobs:
        assert all(jobs.index((seed, need)) < jobs.index((seed, name))
                   for need in ablation.commands(name, args, seed)[0])
    args.rows, args.seeds = ["need"], None
    assert {seed for seed, _ in ablation.plan(args, {})} == set(ablation.kinds()["need"][1])


def test_rows_can_be_picked_by_name(ablation, args):
    args.rows, args.seeds = ["whole"], [0]
    assert [name for _, name in ablation.plan(args, {})] == [
        "world-strong", "base-strong", "sft-strong", "whole"]


def test_unknown_rows_are_one_line_and_exit_code_2(ablation, monkeypatch, capsys, tmp_path):
    why, flags = "known are table phase need, or sft para", ("--rows", "nothing")
    monkeypatch.setattr("sys.argv", ["ablation.py", "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit) as stop:
        ablation.launch.run_main(ablation.main)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and why in err and err.count("\n") == 1


def test_a_finished_row_is_kept_until_its_commands_change(ablation, args):
    args.rows, args.seeds = ["base", "sft", "para"], [0]
    done = {"0": {name: ablation.made_by(name, args, 0) for name in args.rows}}
    assert ablation.plan(args, done) == []
    args.rl_flags += " --lr 1e-3"
    assert [name for _, name in ablation.plan(args, done)] == [
        "world-strong", "base-strong", "sft-strong", "para"]


def test_a_finished_folder_is_kept_until_its_commands_change(ablation, args):
    args.rows, args.seeds = ["base", "sft", "para"], [0]
    # the last is a row, whose numbers are not in the tables yet
    for name in ("world-strong", "base-strong", "sft"):
        folder = os.path.join(args.out, "seed0", name)
        os.makedirs(folder)
        with open(os.path.join(folder, "done.json"), "w") as f:
            json.dump(ablation.made_by(name, args, 0), f)
    assert [name for _, name in ablation.plan(args, {})] == [
        "sft-strong", "sft", "para", "base"]
    args.base_flags = "--steps 5"
    assert [name for _, name in ablation.plan(args, {})][:2] == ["base-strong", "sft-strong"]


def test_a_row_of_other_code_is_made_again_unless_asked_to_keep_it(ablation, args, monkeypatch):
    args.rows, args.seeds = ["para"], [0]
    done = {"0": {"para": ablation.made_by("para", args, 0)}}
    assert ablation.plan(args, done) == []
    today = ablation.code_digests()
    assert {"toy.py", "rewards.py", "eval.py", "evaluation/scores.py", "bench/lossy.py"} <= {*today}
    changed = {**today, "rewards.py": "another reward"}
    monkeypatch.setattr(ablation, "code_digests", lambda: changed)
    assert ablation.plan(args, done)[-1] == (0, "para")
    args.keep_old = True
    assert ablation.plan(args, done) == []
    results = {"0": {"para": done["0"]["para"]}}
    codes = {ablation.version(today): today, ablation.version(changed): changed}
    assert "changed in rewards.py." in ablation.verdicts.versions(results, codes)
    fresh = {"0": {"para": {"code": ablation.version(changed)}}}
    assert "today's code" in ablation.verdicts.versions(fresh, codes)


def test_comments_and_docstrings_are_no_code(ablation, monkeypatch, tmp_path):
    found = []
    for text in ('"""One."""\ndef f():\n    """Two."""\n    return 1  # three\n',
                 '"""Other."""\n\n\ndef f():\n    return 1\n', "def f():\n    return 2\n"):
        (tmp_path / "rewards.py").write_text(text)
        monkeypatch.setattr(ablation, "ROOT", str(tmp_path))
        found.append(ablation.code_digests.__wrapped__())
    assert found[0] == found[1] != found[2] and list(found[0]) == ["rewards.py"]


def test_what_is_not_of_todays_commands_is_not_shown(ablation, monkeypatch, tmp_path):
    """Nor does it stop the tables: rows come and go."""
    table = tmp_path / "table"
    monkeypatch.setattr("sys.argv", ["ablation.py", "--out", str(tmp_path / "out"), "--results",
                                     str(table), "--picture", str(tmp_path / "p.png")])
    stale = {"3": {"gone": {"commands": []}, "para": {"commands": ["toy.py of old"]}}}
    (tmp_path / "table.json").write_text(json.dumps({"claims": [], "results": stale}))
    monkeypatch.setattr(ablation, "run_all", lambda args, results, save: None)
    ablation.main()
    assert json.loads((tmp_path / "table.json").read_text())["results"] == stale  # left as it was


def test_a_failing_command_stops_the_run_with_its_log(ablation, args, monkeypatch):
    command = ["eval.py", "--data", "nowhere.jsonl", "--ckpt", "x"]
    monkeypatch.setattr(ablation, "commands", lambda name, args, seed: ([], [command]))
    with pytest.raises(RuntimeError, match="seed 7, some: exit code 2(.|\n)*nowhere"):
        ablation.work("some", args, 7, [0])
    assert not ablation.finished("some", args, 7)


def test_no_core_is_idle_while_a_job_can_run(ablation, args, monkeypatch):
    """One long job and three short ones on two cores: the short ones go one after the other on the
    second core."""
    jobs, ended, released = ["long", "a", "b", "c"], [], threading.Event()
    monkeypatch.setattr(ablation, "plan", lambda args, results: [(7, name) for name in jobs])
    monkeypatch.setattr(ablation, "commands", lambda name, args, seed: ([], []))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def work(name, args, seed, cores):
        core = cores.pop()  # as the real one: what is left are the free ones
        if name == "long":
            assert released.wait(20), "the others waited for it"
        ended.append(name)
        if name == "c":
            released.set()
        cores.append(core)
        return 1.0

    monkeypatch.setattr(ablation, "work", work)
    ablation.run_all(args, {}, lambda: None)
    assert ended == ["a", "b", "c", "long"]


def fake_row(f_tau, kappa, acc):
    cells = {str(k): {"acc": acc, "f_tau": f_tau, "kappa": kappa} for k in (4, 8, 16, 32, 64)}
    by_k = {k: {"n": 8, "well_formed": f_tau, "gap": 0.5, **c} for k, c in cells.items()}
    parts = {m: dict.fromkeys(("mean", "first", "last"), v)
             for m, v in (("f_tau", f_tau), ("f_released", f_tau), ("kappa", kappa),
                          ("well_formed", f_tau), ("acc", acc))}
    need = {str(k): {"acc": acc, "kappa": kappa, "needed": 0.8, "wasted": 0.1,
                     "called_unseen": acc, "called_shown": f_tau, "evidence": acc}
            for k in (4, 8, 16, 32, 64)}
    writing = {"worth": 0.1, "prompts": 3, "wrote": 0.5}
    return {"train": {**parts, "by_K": by_k, "by_K_last": by_k, "steps": 4},
            "writing": {"first": writing, "last": {**writing, "wrote": 0.75}},
            "need": {"eval": need, "train": need, "sampled": need},
            "eval": {"on": cells, "off": cells}, "f_released": f_tau,
            "curves": {"f_tau": [f_tau] * 4, "kappa": [kappa] * 4}, "seconds": 9, "commands": [],
            "code": "v", "measured": "today, here"}


@pytest.mark.parametrize("values, p", [
    ([1.0, 3.0], 0.29517), ([1.0, 2.0, 3.0], 0.07418), ([1.0, 2.0, 3.0, 4.0], 0.03047),
    ([0.1, 0.2, -0.3, 0.4, 0.5], 0.26585), ([2.0, 1.0, 2.0, 3.0, 1.0, -1.0], 0.06235),
    ([-1.0, -1.0, -2.0, -3.0, -1.0, -1.0, -2.0, -1.0], 0.00081), ([1.0, -1.0], 1.0),
    ([0.0, 0.0], 1.0), ([0.1, 0.1], 0.0)])
def test_the_t_test_gives_the_tables_values(ablation, values, p):
    """Values of scipy.stats.ttest_1samp 1.17."""
    assert ablation.verdicts.t_test(values) == pytest.approx(p, abs=1e-5)


def test_holm_adjusts_by_rank_and_never_falls(ablation):
    assert ablation.verdicts.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ablation.verdicts.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert ablation.verdicts.holm([]) == []


def test_a_verdict_needs_more_than_the_noise(ablation):
    """PARA-GRPO's f_tau at least 0.2 above that of GRPO on accuracy alone, by seeds."""
    def verdict(*pairs):
        results = {str(i): {"acc": fake_row(low, 0, 0), "para": fake_row(high, 0, 0)}
                   for i, (low, high) in enumerate(pairs)}
        found = [c for c in ablation.verdicts.judge(results)
                 if c["claim"].startswith("PARA-GRPO's mean")]
        return found[0] if found else None

    one = verdict((0.5, 0.9), (0.5, 0.92), (0.5, 0.91))
    assert (one["verdict"], one["margin"], one["seeds"]) == ("holds", 0.21, 3)
    assert one["spread"] == pytest.approx(0.01) and one["p_alone"] < 0.001
    assert one["p_alone"] < one["p"] < 0.01  # of two claims on these rows
    assert one["numbers"] == {"para": pytest.approx(0.91), "acc": 0.5}
    assert verdict((0.5, 0.5), (0.5, 0.52), (0.5, 0.51))["verdict"] == "does not hold"
    # above its standard deviation, which is t = 2.1 and p = 0.17
    noisy = verdict((0.5, 0.8), (0.5, 0.9), (0.5, 0.72))
    assert noisy["margin"] > noisy["spread"] and noisy["verdict"] == "not decided"
    assert verdict((0.0, 1.0)) is None  # one seed decides nothing


def test_many_claims_make_each_verdict_harder(ablation):
    """The same margins decide alone, and not among others: Holm."""
    rows = [("acc", 0.5 + d, 1) for d in (0.0, 0.04, -0.04)]
    few = {str(i): {"acc": fake_row(f, k, 0), "para": fake_row(0.86, 1, 0)}
           for i, (_, f, k) in enumerate(rows)}
    many = {i: {**r, **{name: fake_row(0.7 + 0.1 * int(i), 1, 0.1 * int(i)) for name in
                        ("sft", "base", "vanilla", "no-tool", "whole")}}
            for i, r in few.items()}

    def p(results):
        return next(c["p"] for c in ablation.verdicts.judge(results)
                    if c["claim"].startswith("PARA-GRPO's mean f_tau") and "alone" in c["claim"])
    assert p(few) < 0.05 < p(many)


def test_numbers_are_those_of_the_log_the_summary_and_the_records(ablation, tmp_path):
    steps = [{"f_tau": 0.1 * i, "well_formed": 0.0, "kappa": i, "acc": 0.5,
              "rollout_s": 2.0, "train_s": 1.0, "zero_variance": 1, "groups": 8,
              "by_K": {"4" if i % 2 else "64": {"n": 8 * (1 + i), "acc": 0.5, "f_tau": 0.1 * i,
                                                "well_formed": 0.0, "kappa": i,
                                                "call_minus_skip": None if i % 2 else i}}}
             for i in range(8)]
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    # The release pays 0.5 for a flawless rollout whose <think> was forced, and 0 for "B". The
    # second rank writes "B" in the first half of the run.
    flawless = ["x</think><answer>B</answer>"]
    os.makedirs(tmp_path / "run" / "rollouts")
    for i in range(8):
        for rank, turns in enumerate((flawless, ["B"] if i < 4 else flawless)):
            path = tmp_path / "run" / "rollouts" / f"step_{i:06d}.rank{rank}.jsonl"
            # from a third of the way on the second rollout of a prompt writes a call, which pays
            wrote = rank and i >= 4
            row = {"turns": turns if not wrote else ["x</think><tool_call>{}", *turns], "K": 64,
                   "group": "p", "reward": {"acc": 1.0, "paid_task": 1.0 + 0.25 * wrote},
                   "calls": [], "task": {"events": []}, "status": "ok"}
            path.write_text(json.dumps(row) + "\n")
    for name in ("eval", "sampled"):
        os.makedirs(tmp_path / name)
        result = {"K": 4, "tools": "on", "acc": 0.25, "f_tau": 0.5, "kappa": 2.0}
        (tmp_path / name / "summary.json").write_text(json.dumps({"results": [result]}))
        (tmp_path / name / "args.json").write_text(json.dumps({"sub_fps": 1.0}))
        record = {"task": {"id": "t", "events": []}, "budget": "4", "tools": "on", "sample": 0,
                  "digest": "d", "status": "ok", "calls": [], "score": 1.0,
                  "turns": ["x</think><answer>B</answer>"]}
        (tmp_path / name / "records.0.jsonl").write_text(json.dumps(record) + "\n")
    got = ablation.numbers(str(tmp_path))
    assert got["train"]["kappa"] == {"mean": 3.5, "first": 0.5, "last": 6.5}
    assert got["train"]["f_released"]["first"] == 0.25
    wanted = (0 * 8 + 2 * 24 + 4 * 40 + 6 * 56) / 128
    assert got["train"]["by_K"]["64"]["kappa"] == pytest.approx(wanted)
    assert got["train"]["by_K"]["64"]["gap"] == pytest.approx(3.0)
    assert got["train"]["by_K"]["4"]["gap"] is None
    assert got["writing"] == {"first": {"worth": None, "prompts": 0, "wrote": 0.0},
                              "last": {"worth": 0.25, "prompts": 1, "wrote": 0.5}}
    assert got["eval"] == {"on": {"4": {"acc": 0.25, "f_tau": 0.5, "kappa": 2.0}}}
    assert got["f_released"] == 0.5 and set(got["need"]) == {"train", "eval", "sampled"}
    assert set(got) == {"train", "writing", "need", "eval", "sampled", "f_released", "curves"}
    assert got["curves"]["kappa"] == list(range(8))


# ------------------------------------------------------------------------------------------------
# The frontier


@pytest.mark.parametrize("fps", [1.0, 0.375])
@pytest.mark.parametrize("k", [4, 8, 16, 32, 64])
def test_ceilings_equal_a_count_over_drawn_timelines(ablation, k, fps):
    """The expectation against 4,000 timelines of toy.py: three standard errors are 0.024."""
    rng, clock = random.Random(k), np.arange(64.0)
    looks = video.overview_indices(clock, 64.0, k).tolist()
    never, all_seen, unseen = [], [], []
    for _ in range(4000):
        events = toy.make_timeline(rng)
        seen = toy.shown(events, looks)
        crops = [e for e in events
                 if toy.shown([e], video.crop_indices(clock, 64.0, *e["window"], fps=fps))]
        never.append(len(seen) == len(events))
        all_seen.append(all(e in seen or e in crops for e in events))
        unseen.append(len(events) - len(seen))
    exact = ablation.frontier.ceilings(k, fps)
    assert exact["never"] == pytest.approx(np.mean(never), abs=0.024)
    assert exact["ceiling"] == pytest.approx(np.mean(all_seen), abs=0.024)
    assert exact["needed"] == pytest.approx(np.mean(unseen), abs=0.05) and exact["always"] == 2


def toy_rollout(k, called, turn="", acc=1.0):
    """Events in slots 8 (on two frames of K = 64, none of 4) and 32."""
    events = [{"start": 9, "end": 11, "colour": "red", "window": (8, 16)},
              {"start": 33, "end": 35, "colour": "blue", "window": (32, 40)}]
    calls = [{"start": float(a), "end": float(a + 8), "status": status} for a, status in called]
    return {"task": {"events": events}, "K": k, "acc": acc, "calls": calls, "turns": [turn]}


def test_the_way_to_an_answer_is_taken_apart_by_hand(ablation):
    """One event, on the frames 9 and 10. Steps count after those before them alone."""
    def one(acc, *calls):
        calls = [{"start": a, "end": b, "status": "ok", "num_frames": 0, "summary": text}
                 for a, b, text in calls]
        task = {"events": [{"start": 9, "end": 11, "colour": "red", "window": (8, 16)}]}
        return {"task": task, "acc": acc, "calls": calls}

    there, elsewhere = (8.0, 16.0, "8 red"), (16.0, 24.0, "16 red")
    frontier = ablation.frontier
    found = frontier.way([one(1.0, there), one(0.0, there), one(1.0, elsewhere), one(0.0),
                          one(1.0, elsewhere, (8.0, 16.0, "8 blue"))], 1.0)
    # called 4 of 5, found 3 of 4, told 3 of 3 (by another window), right 2 of 3
    assert found == {"factors": [0.8, 0.75, 1.0, pytest.approx(2 / 3)],
                     "rest": pytest.approx(0.2)}
    better = {"factors": [1.0, 0.75, 1.0, 1.0], "rest": 0.0}
    parts = frontier.shares(found, better)
    assert sum(parts) == pytest.approx(0.75 - 0.4) and parts[1:3] == [0.0, 0.0]
    assert parts[0] == pytest.approx(0.75 * 0.2 * (2 / 3 + 1) / 2)
    none = frontier.way([one(0.0)], 1.0)
    assert none == {"factors": [0.0, None, None, None], "rest": 0.0}
    assert "+0.750" in frontier.way_lines({"a": none, "b": better})


def test_needed_calls_are_counted_by_window_and_by_hand(ablation):
    ok, lost = "ok", "error"
    at_4 = ablation.frontier.need([
        toy_rollout(4, [(8, ok), (32, ok)], "I saw 8 nothing, 32 nothing."),
        toy_rollout(4, [(8, ok), (48, ok), (32, lost)], "I saw 8 red.", acc=0.0)])
    assert at_4 == {"n": 2, "acc": 0.5, "kappa": 2.0, "needed": 2.0, "wasted": 0.5,
                    "called_unseen": 0.75, "called_shown": None, "evidence": pytest.approx(2 / 3)}
    at_64 = ablation.frontier.need([toy_rollout(64, [(8, ok)]), toy_rollout(64, [])])
    assert at_64["called_unseen"] is None and at_64["called_shown"] == 0.25
    assert (at_64["needed"], at_64["wasted"], at_64["evidence"]) == (0.0, 0.5, None)
    cells = {4: at_4, 64: at_64}
    assert ablation.frontier.verdict(cells).startswith("Calls hardly follow need: 75%")
    assert "do not follow" in ablation.frontier.verdict({4: {**at_4, "called_shown": 0.7}})
    table = ablation.frontier.table(cells, 1.0)
    assert len(table.splitlines()) == 4 and table.splitlines()[-1].startswith("mean")


def test_the_frontier_prints_ceilings_and_a_folder_and_refuses_others(ablation, monkeypatch,
                                                                      capsys, tmp_path):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["frontier.py", *map(str, words)])
        launch.run_main(ablation.frontier.main)
        return capsys.readouterr().out

    assert "ceiling 0.860" in run("--sub-fps", 0.375) and "ceiling 1.000" in run()
    os.makedirs(tmp_path / "rollouts")
    for step in range(8):  # the last quarter are steps 6 and 7
        row = toy_rollout(64, [(8, "ok")] if step < 6 else [])
        row |= {"status": "ok", "reward": {"acc": 1.0}}
        path = tmp_path / "rollouts" / f"step_{step:06d}.rank0.jsonl"
        path.write_text(json.dumps(row) + "\n")
    (tmp_path / "args.json").write_text(json.dumps({"sub_fps": 1.0}))
    out = run(tmp_path)
    assert "cannot tell" in out and "64" in out and "0.00" in out
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "nowhere")
    assert stop.value.code == 2 and "no rollouts" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Lossy calls


def test_a_share_of_the_written_calls_is_lost_and_the_same_ones_again(ablation):
    from bench import lossy

    async def serve(record, *rest):
        record["status"] = "ok"

    def served(success):
        found = []
        for sample in range(400):
            episode = SimpleNamespace(version=0, task={"id": "t"}, sample=sample)
            sampler = SimpleNamespace(agent=SimpleNamespace(seed=0))
            record = {"status": "pending"}
            asyncio.run(lossy.losing(serve, success)(record, {}, episode, sampler, 0, 0))
            found.append(record["status"] == "ok")
            assert record["status"] == "ok" or "could not be looked at" in record["summary"]
        return found

    some = served(0.6)
    assert 0.53 < np.mean(some) < 0.67 and some == served(0.6)
    assert all(served(1.0)) and not any(served(0.0))
    assert all(b for a, b in zip(some, served(0.8)) if a)  # less loss loses fewer, of the same


@pytest.mark.parametrize("turn, want", [
    ("hm</think><answer>B</answer> bye", "B"), ("hm</think>\nred, blue", "red, blue"),
    ("I saw red.\nred", "red"), ("I saw red", "I saw red"),
    ("hm</think>\nred\n</tool_call>\n", "red"), ("hm\n</think>\n", None), ("", None),
    ("<answer>red", "red")])
def test_the_release_reads_the_tag_else_the_last_line(turn, want, monkeypatch):
    from bench import lossy

    assert lossy.stated_answer([turn], think_open=True) == want
    assert lossy.stated_answer([]) is None
    monkeypatch.setattr("sys.argv", ["lossy.py", "1"])
    monkeypatch.setattr(rewards, "final_answer", rewards.final_answer)
    monkeypatch.setattr(rollout, "sub_agent", rollout.sub_agent)
    monkeypatch.setattr(grpo, "main", lambda: None)
    lossy.main()
    task = {"type": "open", "answer": "red"}
    paid = rewards.score([turn], task, think_open=True)["acc"]
    assert paid == rewards.accuracy(want, "open", "red")


def test_only_windows_that_meet_the_evidence_are_paid_as_calls():
    from bench import lossy

    turns = ["I look.</think>\n", "I saw red.</think>\n<answer>red</answer>"]
    task = {"type": "open", "answer": "red", "evidence": [[0, 8]]}

    def call(start, end, status="ok"):
        return {"parseable": True, "status": status, "start": start, "end": end}

    paid, pay = lossy.paying_hits(rewards.score), rewards.Pay(tool_weight=2.0)
    for calls in ([], [call(4, 9)], [call(40, 48), call(7, 9)], [call(1, 2, "error")]):
        assert paid(turns, task, calls, pay=pay) == rewards.score(turns, task, calls, pay=pay)
    missed = [call(40, 48), call(8, 9)]  # a window that only touches the evidence shows none of it
    found, usual = (score(turns, task, missed, True, pay) for score in (paid, rewards.score))
    assert found["tool"] == 0.1 and usual["tool"] == 0.8
    assert usual["total"] - found["total"] == pytest.approx(2.0 * 0.7)
    assert usual["paid_task"] - found["paid_task"] == pytest.approx(2.0 * 0.7)
    assert found["windows"] == usual["windows"] and found["fmt"] == usual["fmt"]
    bare = {"type": "open", "answer": "red"}
    assert paid(turns, bare, missed, True, pay) == rewards.score(turns, bare, missed, True, pay)


def test_lossy_needs_its_probability(monkeypatch, capsys):
    from bench import lossy

    for words in ([], ["--preset", "toy"], ["1.5"]):
        monkeypatch.setattr("sys.argv", ["lossy.py", *words])
        with pytest.raises(SystemExit) as stop:
            launch.run_main(lossy.main)
        assert stop.value.code == 2 and "Q is the probability" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Tables


def test_rows_are_compared_with_the_full_method_seed_by_seed(ablation):
    results = {str(s): {"para": fake_row(0.5 + 0.2 * s, 1.0, 0.5),
                        "whole": fake_row(0.4 + 0.2 * s, 1.0, 0.6 - 0.2 * s)} for s in (0, 1)}
    (_, f_tau), *_, (_, accuracy), _ = ablation.verdicts.measures()
    assert ablation.verdicts.difference(results, "whole", f_tau) == "-0.10 ±0.00 (2, 0.000)"
    assert ablation.verdicts.difference(results, "whole", accuracy) == "+0.00 ±0.14 (2, 1.000)"
    assert ablation.verdicts.difference({"0": results["0"]}, "whole", f_tau) == "-"


def test_the_phase_diagram_counts_the_runs_that_change_as_predicted(ablation):
    def run(worth, first, last):
        return {"writing": {"first": {"worth": worth, "wrote": first}, "last": {"wrote": last}}}

    results = {"0": {"a": run(0.2, 0.5, 0.7), "b": run(-0.2, 0.5, 0.7), "x": run(1, 0, 1)},
               "1": {"a": run(-0.2, 0.5, 0.1), "b": run(None, 0.5, 0.7)}}
    assert ablation.verdicts.same_signs(results, ["a", "b"]) == (2, 3)
    assert ablation.verdicts.change(results["1"]["a"]) == -0.4


def test_tables_show_every_row_and_the_pictures_are_drawn(ablation, tmp_path):
    pytest.importorskip("matplotlib",
                        reason="the picture needs matplotlib, which `make ablation` installs")
    verdicts = ablation.verdicts
    results = {str(s): {name: fake_row(0.5 + 0.1 * s, 1.0, 0.5) for name in ablation.rows()}
               for s in (0, 1)}
    titles = {kind: {name: row[0] for name, row in some.items()}
              for kind, (some, _) in ablation.kinds().items()}
    text = verdicts.markdown(results, verdicts.judge(results), titles, ablation.paper(), "Here.")
    for kind, some in titles.items():
        for title in some.values():
            assert text.count(f"| {title} |") >= (5 if kind == "table" else 1), title
    assert "(seeds 0, 1). Here." in text and "0.55 ±0.07" in text
    assert "| a perfect reader | 0.65 | 0.65 | 1.00 | 1.00 | 1.00 | 0.86 |" in text
    results["1"]["para"]["measured"] = "tomorrow, there"
    assert ablation.where_measured(results) == "today, here; tomorrow, there"
    verdicts.picture(results, str(tmp_path / "docs" / "p.png"))
    verdicts.phase_picture(results, ablation.phase_rows(), str(tmp_path / "docs" / "q.png"))
    for name in "pq":
        assert (tmp_path / "docs" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_each_claim_is_decided_by_the_rows_it_names_and_can_go_either_way(ablation):
    """A claim whose margin has one sign for all numbers could not fail."""
    rng = random.Random(0)
    signs = {text: set() for text, *_ in ablation.verdicts.claims()}
    for _ in range(200):
        rows = {name: fake_row(rng.random(), 3 * rng.random(), rng.random())
                for name in ablation.rows()}
        for cell in rows["acc-gated"]["train"]["by_K"].values():
            cell["gap"] = rng.random()
        for text, needs, margin, shown in ablation.verdicts.claims():
            some = {name: rows[name] for name in needs}  # a KeyError is another row
            signs[text].add(margin(some) > 0)
            assert None not in shown(some).values()
    assert all(found == {True, False} for found in signs.values()), signs


CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}'
        '</tool_call>')
THOUGHT = "I should look at the middle."


RELEASED = [  # the sampled text of each turn, without the forced <think>; score by the release
    # flawless, as our prefix makes it: the answer alone is seen, its tags do not balance
    ([f"{THOUGHT}</think>{CALL}", f"{THOUGHT}</think><answer>B</answer>"], 0.5),
    ([f"{THOUGHT}</think><answer>B</answer>"], 0.5),
    # a second thought opened in every turn: paid in full
    ([f"<think>{THOUGHT}</think>{CALL}", f"<think>{THOUGHT}</think><answer>B</answer>"], 1.0),
    ([f"<think>{THOUGHT}</think><answer>B</answer>"], 1.0),
    (["<think>hi"], -0.15), ([""], 0.0), ([], 0.0),
    # .2 + .5 answer + .5 * .7, clipped: garbage after it costs .1, which the clip hides
    ([f"<think>{THOUGHT}</think><answer>B</answer></answer></think>"], 1.0),
    # an open thought of ten characters is one; -.15 for leaving it open
    ([f"<think>{THOUGHT}<answer>B</answer>"], 0.2 + 0.5 - 0.15),
    ([f"<think>{THOUGHT}{CALL}"], 0.2 + 0.3 - 0.15),
    ([f"<think>{THOUGHT}</think><tool_code>crop_video(1, 2)"], 0.2 + 0.2 + 0.3),
    (["<answer> </answer>"], 0.0), (["<answer>B"], 0.0),
]


@pytest.mark.parametrize("turns, wanted", RELEASED)
def test_the_released_ruler_sees_sampled_tokens_alone(ablation, turns, wanted):
    assert ablation.released_format(turns) == pytest.approx(wanted)
