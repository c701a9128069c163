"""
Tests of bench/ablation.py: python -m pytest tests/test_ablation.py -q

The runs themselves take hours; here: its commands are ones the scripts take, nothing finished is
run again, and its verdicts follow.
"""
import argparse
import importlib.util
import json
import os

import pytest
from conftest import ROOT

import eval as evaluation
import grpo
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
                              seeds=[0, 1], blocks="ABCDE", rows=None,
                              base_flags="--steps 400",
                              sft_flags="--steps 14 --muon-lr 4e-4 --lr 1.5e-4",
                              rl_flags="--prompts 8 --steps 30 --answer-from line --show-every 0")


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
    assert len(jobs) == len(set(jobs)) == 2 * (len(ablation.rows()) + 6)
    for seed, name in jobs:
        assert all(jobs.index((seed, need)) < jobs.index((seed, name))
                   for need in ablation.commands(name, args, seed)[0])
    args.blocks = "C"
    assert [name for seed, name in ablation.plan(args, {}) if seed == 0] == [
        "world-strong", "base-strong", "sft-strong", "para", "sequential", "turns"]


def test_rows_can_be_picked_by_name(ablation, args):
    args.rows, args.seeds = ["whole"], [0]
    assert [name for _, name in ablation.plan(args, {})] == [
        "world-strong", "base-strong", "sft-strong", "whole"]


@pytest.mark.parametrize("flags, why", [(("--rows", "nothing"), "known are base sft"),
                                        (("--blocks", "AX"), "known are A to E")])
def test_unknown_rows_are_one_line_and_exit_code_2(
        ablation, monkeypatch, capsys, tmp_path, flags, why):
    monkeypatch.setattr("sys.argv", ["ablation.py", "--out", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit) as stop:
        ablation.model.run_main(ablation.main)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and why in err and err.count("\n") == 1


def test_a_finished_row_is_kept_until_its_commands_change(ablation, args):
    args.blocks, args.seeds = "A", [0]
    done = {"0": {name: {"commands": ablation.history(name, args, 0)}
                  for name in ("base", "sft", "grpo", "para")}}
    assert ablation.plan(args, done) == []
    args.rl_flags += " --lr 1e-3"
    assert [name for _, name in ablation.plan(args, done)] == [
        "world-strong", "base-strong", "sft-strong", "grpo", "para"]


def test_a_finished_folder_is_kept_until_its_commands_change(ablation, args):
    args.blocks, args.seeds = "A", [0]
    # the last is a row, whose numbers are not in the tables yet
    for name in ("world-strong", "base-strong", "sft"):
        folder = os.path.join(args.out, "seed0", name)
        os.makedirs(folder)
        with open(os.path.join(folder, "done.json"), "w") as f:
            json.dump(ablation.history(name, args, 0), f)
    assert [name for _, name in ablation.plan(args, {})] == [
        "base", "sft-strong", "sft", "grpo", "para"]
    args.base_flags = "--steps 5"
    assert [name for _, name in ablation.plan(args, {})][:2] == ["base-strong", "base"]


def test_a_failing_command_stops_the_run_with_its_log(ablation, args, monkeypatch):
    command = ["eval.py", "--data", "nowhere.jsonl", "--ckpt", "x"]
    monkeypatch.setattr(ablation, "commands", lambda name, args, seed: ([], [command]))
    with pytest.raises(RuntimeError, match="seed 7, some: exit code 2(.|\n)*nowhere"):
        ablation.work("some", args, 7, [0])
    assert not ablation.finished("some", args, 7)


def fake_row(f_tau, kappa, acc, seconds=1.0):
    cells = {str(k): {"acc": acc, "f_tau": f_tau, "kappa": kappa, "seconds": seconds}
             for k in (4, 8, 16, 32, 64)}
    by_k = {k: {"n": 8, "well_formed": f_tau, "call_minus_skip": 0.5, **c}
            for k, c in cells.items()}
    parts = {m: dict.fromkeys(("mean", "first", "last"), v)
             for m, v in (("f_tau", f_tau), ("kappa", kappa), ("well_formed", f_tau), ("acc", acc))}
    return {"train": {**parts, "by_K": by_k, "by_K_last": by_k, "steps": 4,
                      "closure": dict.fromkeys(("think", "tool_call", "answer"), 0.5)},
            "eval": {"on": cells, "off": cells},
            "alone": {"parallel": [seconds], "sequential": [2 * seconds]},
            "curves": {"f_tau": [f_tau] * 4, "kappa": [kappa] * 4}, "seconds": 9, "commands": [],
            "measured": "today, here"}


def test_verdicts_follow_margin_and_spread(ablation):
    """PARA-GRPO's f_tau at least 0.2 above GRPO's: by 0.3 and 0.4; by 0.0 and 0.1; by 0.1 and 0.3;
    and from one seed only."""
    def verdict(*pairs):
        results = {str(i): {"grpo": fake_row(low, 0, 0), "para": fake_row(high, 0, 0)}
                   for i, (low, high) in enumerate(pairs)}
        (one,) = [c for c in ablation.judge(results)
                  if c["claim"].startswith("PARA-GRPO's mean f_tau")]
        return one

    one = verdict((0.5, 0.8), (0.5, 0.9))
    assert (one["verdict"], one["margin"], one["seeds"]) == ("holds", 0.15, 2)
    assert one["spread"] == pytest.approx(0.0707, abs=1e-3)
    assert one["numbers"] == {"PARA-GRPO": pytest.approx(0.85), "GRPO": 0.5}
    assert verdict((0.5, 0.5), (0.5, 0.6))["verdict"] == "does not hold"
    assert verdict((0.5, 0.6), (0.5, 0.8))["verdict"] == "undecided"
    assert verdict((0.0, 1.0))["verdict"] == "undecided"  # one seed decides nothing


def test_numbers_are_those_of_the_log_and_the_summary(ablation, tmp_path):
    steps = [{"f_tau": 0.1 * i, "well_formed": 0.0, "kappa": i, "acc": 0.5,
              "closure": {"think": 0.5, "tool_call": None, "answer": 1.0},
              "by_K": {"4" if i % 2 else "64": {"n": 8 * (1 + i), "acc": 0.5, "f_tau": 0.1 * i,
                                                "well_formed": 0.0, "kappa": i,
                                                "call_minus_skip": None}}}
             for i in range(8)]
    os.makedirs(tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    os.makedirs(tmp_path / "eval")
    result = {"K": 4, "tools": "on", "acc": 0.25, "f_tau": 0.5, "kappa": 2.0,
              "seconds_per_episode": 1.5}
    (tmp_path / "eval" / "summary.json").write_text(json.dumps({"results": [result]}))
    for run, seconds in (("alone-parallel.0", 1.0), ("alone-parallel.1", 3.0),
                         ("alone-sequential.0", 2.0)):
        os.makedirs(tmp_path / run)
        timed = {**result, "seconds_per_episode": seconds}
        (tmp_path / run / "summary.json").write_text(json.dumps({"results": [timed]}))
    got = ablation.numbers(str(tmp_path))
    assert got["alone"] == {"parallel": [1.0, 3.0], "sequential": [2.0]}
    assert got["train"]["kappa"] == {"mean": 3.5, "first": 0.5, "last": 6.5}
    assert got["train"]["closure"] == {"think": 0.5, "tool_call": None, "answer": 1.0}
    wanted = (0 * 8 + 2 * 24 + 4 * 40 + 6 * 56) / 128
    assert got["train"]["by_K"]["64"]["kappa"] == pytest.approx(wanted)
    assert got["eval"] == {"on": {"4": {"acc": 0.25, "f_tau": 0.5, "kappa": 2.0, "seconds": 1.5}}}
    assert set(got) == {"train", "eval", "alone", "curves"}
    assert got["curves"]["kappa"] == list(range(8)) and got["curves"]["acc_4"][:2] == [None, 0.5]


def test_block_e_is_compared_with_the_row_it_changes_seed_by_seed(ablation):
    results = {str(s): {"para": fake_row(0.5 + 0.2 * s, 1.0, 0.5),
                        "whole": fake_row(0.4 + 0.2 * s, 1.0, 0.6 - 0.2 * s),
                        "grpo": fake_row(0.1, 0.0, 0.5), "acc-only": fake_row(0.3, 0.0, 0.5)}
               for s in (0, 1)}
    (_, f_tau), *_, (_, accuracy), _ = ablation.measures()
    # against the full method
    assert ablation.difference(results, "whole", f_tau) == "**-0.10 ±0.00**"
    assert ablation.difference(results, "acc-only", f_tau) == "**+0.20 ±0.00**"  # against GRPO
    # within the spread: not bold
    assert ablation.difference(results, "whole", accuracy) == "+0.00 ±0.14"
    assert ablation.difference({"0": results["0"]}, "whole", f_tau) == "-0.10"


def test_tables_show_every_row_and_the_picture_is_drawn(ablation, tmp_path):
    pytest.importorskip("matplotlib",
                        reason="the picture needs matplotlib, which `make ablation` installs")
    results = {str(s): {name: fake_row(0.5 + 0.1 * s, 1.0, 0.5) for name in ablation.rows()}
               for s in (0, 1)}
    text = ablation.markdown(results, ablation.judge(results))
    for name, (_, title, *_) in ablation.rows().items():
        assert text.count(f"| {title} |") >= (2 if name in ("sequential", "turns") else 5), name
    assert "| full, credit on the whole sequence | +0.00 ±0.00 |" in text
    assert "| full, sequential dispatch | +0" not in text
    assert "(seeds 0, 1; today, here)" in text
    results["1"]["turns"]["measured"] = "tomorrow, there"
    moved = ablation.markdown(results, ablation.judge(results))
    assert "(seeds 0, 1; today, here; tomorrow, there: full, one call a turn)" in moved
    assert "0.55 ±0.07" in text and text.count("| **") == len(ablation.claims())
    ablation.picture(results, str(tmp_path / "docs" / "p.png"))
    assert (tmp_path / "docs" / "p.png").read_bytes()[:4] == b"\x89PNG"
