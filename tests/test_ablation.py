"""
Tests of bench/ablation.py: python -m pytest tests/test_ablation.py -q

The runs themselves take hours; here: its commands are ones the scripts take, nothing finished is
run again, and its verdicts follow.
"""
import argparse
import importlib.util
import json
import os
import threading

import pytest
from conftest import ROOT

import eval as evaluation
import grpo
import rewards
import sft


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
                              seeds=list(range(8)), rows=None,
                              base_flags="--steps 400",
                              sft_flags="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                              rl_flags="--prompts 8 --steps 30 --set answer_from=line "
                                       "--show-every 0")


def test_every_command_is_one_that_its_script_takes(ablation, args, monkeypatch):
    """And rows differ: two rows with the same flags would be one experiment under two names."""
    seen = {}
    for name in [*ablation.rows(), "world-strong", "base-weak", "sft-strong"]:
        for script, *words in ablation.commands(name, args, 3)[1]:
            monkeypatch.setattr("sys.argv", [script, *words])
            if script != "toy.py":
                parsed = vars({"sft.py": sft, "grpo.py": grpo,
                               "eval.py": evaluation}[script].parse_args())
                assert parsed["seed"] == 3 and "toy" in parsed["preset"]
                if script == "grpo.py":
                    key = json.dumps({**parsed, "out": ""}, sort_keys=True)
                    assert key not in seen, (name, seen.get(key))
                    seen[key] = name
                    assert parsed["temperature"] == 0.7 and parsed["open_thought"] == "drop"
                    assert parsed["answer_from"] == "line"
                    trained = parsed
                if script == "eval.py" and "--temperature 0 " in " ".join(words):
                    assert parsed["temperature"] == 0 and parsed["open_thought"] == "drop"
                    if ablation.rows()[name][3] is not None:  # evaluated as it was trained
                        assert all(parsed[f] == trained[f]
                                   for f in ("think_prefix", "sub_fps", "sub_question", "dispatch"))
    assert len(seen) == sum(row[3] is not None for row in ablation.rows().values())


def test_plan_runs_what_is_needed_first_and_nothing_twice(ablation, args):
    jobs = ablation.plan(args, {})
    # a world, a base and a cold start for each prior, and what each row asks for
    few = {seed for _, _, seed, *_ in ablation.rows().values()}
    assert few == {5, 8}
    assert len(jobs) == len(set(jobs))
    for name, (_, _, seeds, *_) in ablation.rows().items():
        assert [seed for seed, job in jobs if job == name] == list(range(seeds))
    for prior, seeds in (("strong", 8), ("weak", 5)):
        assert sum(job in (f"world-{prior}", f"base-{prior}", f"sft-{prior}")
                   for _, job in jobs) == 3 * seeds
    for seed, name in jobs:
        assert all(jobs.index((seed, need)) < jobs.index((seed, name))
                   for need in ablation.commands(name, args, seed)[0])
    args.rows = ["turns"]
    assert [name for seed, name in ablation.plan(args, {}) if seed == 7] == [
        "world-strong", "base-strong", "sft-strong", "para", "turns"]


def test_rows_can_be_picked_by_name(ablation, args):
    args.rows, args.seeds = ["whole"], [0]
    assert [name for _, name in ablation.plan(args, {})] == [
        "world-strong", "base-strong", "sft-strong", "whole"]


def test_unknown_rows_are_one_line_and_exit_code_2(ablation, monkeypatch, capsys, tmp_path):
    why, flags = "known are base sft", ("--rows", "nothing")
    monkeypatch.setattr("sys.argv", ["ablation.py", "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit) as stop:
        ablation.launch.run_main(ablation.main)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and why in err and err.count("\n") == 1


def test_a_finished_row_is_kept_until_its_commands_change(ablation, args):
    args.rows, args.seeds = ["base", "sft", "para"], [0]
    done = {"0": {name: {"commands": ablation.history(name, args, 0)} for name in args.rows}}
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
            json.dump(ablation.history(name, args, 0), f)
    assert [name for _, name in ablation.plan(args, {})] == [
        "base", "sft-strong", "sft", "para"]
    args.base_flags = "--steps 5"
    assert [name for _, name in ablation.plan(args, {})][:2] == ["base-strong", "base"]


def test_a_row_of_another_world_is_made_again(ablation, args, monkeypatch, tmp_path):
    args.rows, args.seeds = ["para"], [0]
    done = {"0": {"para": {"commands": ablation.history("para", args, 0)}}}
    assert ablation.plan(args, done) == []
    other = tmp_path / "toy.py"
    other.write_text("another world")
    monkeypatch.setattr(ablation.toy, "__file__", str(other))
    assert ablation.plan(args, done)[-1] == (0, "para")


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
    """One long job and three short ones on two cores: the short ones go one behind the other on the
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
    return {"train": {**parts, "by_K": by_k, "by_K_last": by_k, "steps": 4,
                      "closure": dict.fromkeys(rewards.KINDS, 0.5)},
            "eval": {"on": cells, "off": cells}, "f_released": f_tau,
            "limits": {"windows": [3, 4], "gather 1": [1, 1]},
            "curves": {"f_tau": [f_tau] * 4, "kappa": [kappa] * 4}, "seconds": 9, "commands": [],
            "measured": "today, here"}


@pytest.mark.parametrize("values, p", [
    ([1.0, 3.0], 0.29517), ([1.0, 2.0, 3.0], 0.07418), ([1.0, 2.0, 3.0, 4.0], 0.03047),
    ([0.1, 0.2, -0.3, 0.4, 0.5], 0.26585), ([2.0, 1.0, 2.0, 3.0, 1.0, -1.0], 0.06235),
    ([-1.0, -1.0, -2.0, -3.0, -1.0, -1.0, -2.0, -1.0], 0.00081), ([1.0, -1.0], 1.0),
    ([0.0, 0.0], 1.0), ([0.1, 0.1], 0.0)])
def test_the_t_test_gives_the_tables_values(ablation, values, p):
    """Values of scipy.stats.ttest_1samp 1.17."""
    assert ablation.t_test(values) == pytest.approx(p, abs=1e-5)


def test_holm_adjusts_by_rank_and_never_falls(ablation):
    assert ablation.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ablation.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0]) and ablation.holm([]) == []


def test_a_verdict_needs_more_than_the_noise(ablation):
    """PARA-GRPO's f_tau at least 0.2 above that of GRPO on accuracy alone, by seeds."""
    def verdict(*pairs):
        results = {str(i): {"acc": fake_row(low, 0, 0), "para": fake_row(high, 0, 0)}
                   for i, (low, high) in enumerate(pairs)}
        found = [c for c in ablation.judge(results) if c["claim"].startswith("PARA-GRPO's mean")]
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
        return next(c["p"] for c in ablation.judge(results) if "accuracy alone" in c["claim"]
                    and c["claim"].startswith("PARA"))
    assert p(few) < 0.05 < p(many)


def test_numbers_are_those_of_the_log_the_summary_and_the_records(ablation, tmp_path):
    steps = [{"f_tau": 0.1 * i, "well_formed": 0.0, "kappa": i, "acc": 0.5,
              "rollout_s": 2.0, "train_s": 1.0, "zero_variance": 1, "groups": 8,
              "closure": {"think": 0.5, "tool_call": None, "tool_code": 0.0, "answer": 1.0},
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
            path.write_text(json.dumps({"turns": turns}) + "\n")
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
    assert got["train"]["f_released"] == {"mean": 0.375, "first": 0.25, "last": 0.5}
    assert got["train"]["closure"] == {"think": 0.5, "tool_call": None, "tool_code": 0.0,
                                       "answer": 1.0}
    wanted = (0 * 8 + 2 * 24 + 4 * 40 + 6 * 56) / 128
    assert got["train"]["by_K"]["64"]["kappa"] == pytest.approx(wanted)
    assert got["train"]["by_K"]["64"]["gap"] == pytest.approx(3.0)
    assert got["train"]["by_K"]["4"]["gap"] is None
    assert got["eval"] == {"on": {"4": {"acc": 0.25, "f_tau": 0.5, "kappa": 2.0}}}
    assert got["f_released"] == 0.5 and got["limits"] == {"gather 0": [1, 1]}
    assert set(got) == {"train", "eval", "sampled", "limits", "f_released", "curves"}
    assert got["curves"]["kappa"] == list(range(8))


def test_what_limits_accuracy_is_told_apart(ablation):
    """A right window whose crop shows the event, one whose 2 frames miss it, one that nobody asked
    about; and an answer that is judged only where all before it was right."""
    events = [{"window": [8, 16], "start": 9, "end": 11, "colour": "red"},
              {"window": [32, 40], "start": 37, "end": 39, "colour": "blue"}]

    def call(start, summary):
        return {"start": start, "end": start + 8.0, "status": "ok", "summary": summary}

    def record(*calls, score=1.0):
        return {"task": {"events": events}, "calls": list(calls), "score": score}

    right = record(call(8.0, "8 red"), call(32.0, "32 blue"))
    assert ablation.limits([right], 1.0) == {"windows": [2, 2], "seen": [2, 2], "gather 2": [1, 1]}
    # at one frame in 4 seconds it looks at seconds 10, 14, 34 and 38
    assert ablation.limits([right], 0.25)["seen"] == [2, 2]
    # at one in 8, at seconds 12 and 36: both are missed, and both summaries were invented
    assert ablation.limits([right], 0.125) == {"windows": [2, 2], "unseen": [0, 2]}
    honest = record(call(8.0, "(nothing to report)"), call(32.0, "32 blue"), score=0.0)
    assert ablation.limits([honest], 0.125) == {"windows": [2, 2], "unseen": [1, 2]}
    lost = record(call(8.0, "8 blue"), call(50.0, "50 red"), {**call(32.0, ""), "status": "error"})
    assert ablation.limits([lost], 1.0) == {"windows": [1, 2], "seen": [0, 1]}
    wrong = record(call(8.0, "8 red"), call(32.0, "32 blue"), score=0.5)
    assert ablation.limits([right, wrong], 1.0)["gather 2"] == [1, 2]


def test_rows_are_compared_with_the_full_method_seed_by_seed(ablation):
    results = {str(s): {"para": fake_row(0.5 + 0.2 * s, 1.0, 0.5),
                        "whole": fake_row(0.4 + 0.2 * s, 1.0, 0.6 - 0.2 * s)} for s in (0, 1)}
    (_, f_tau), *_, (_, accuracy), _ = ablation.measures()
    assert ablation.difference(results, "whole", f_tau) == "-0.10 ±0.00 (2, 0.000)"
    assert ablation.difference(results, "whole", accuracy) == "+0.00 ±0.14 (2, 1.000)"
    assert ablation.difference({"0": results["0"]}, "whole", f_tau) == "-"


def test_tables_show_every_row_and_the_picture_is_drawn(ablation, tmp_path):
    pytest.importorskip("matplotlib",
                        reason="the picture needs matplotlib, which `make ablation` installs")
    results = {str(s): {name: fake_row(0.5 + 0.1 * s, 1.0, 0.5) for name in ablation.rows()}
               for s in (0, 1)}
    text = ablation.markdown(results, ablation.judge(results))
    for name, (title, *_) in ablation.rows().items():
        assert text.count(f"| {title} |") >= (2 if name == "turns" else 5), name
    assert "(seeds 0, 1; today, here)" in text
    results["1"]["turns"]["measured"] = "tomorrow, there"
    moved = ablation.markdown(results, ablation.judge(results))
    assert "(seeds 0, 1; today, here; tomorrow, there)" in moved
    assert "0.55 ±0.07" in text and "| 0.75 (8) | - | - | 1.00 (2) |" in text
    ablation.picture(results, str(tmp_path / "docs" / "p.png"))
    assert (tmp_path / "docs" / "p.png").read_bytes()[:4] == b"\x89PNG"


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
