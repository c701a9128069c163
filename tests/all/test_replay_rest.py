"""
More of tools/replay.py:
python -m pytest tests/all/test_replay_rest.py -q
"""
import json

import pytest
import torch
from test_replay import recorded, tasks  # noqa: F401

import launch


def test_log_probs_that_are_no_numbers_are_refused(run_grpo, recorded, tmp_path):
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    rows[0]["logps"][rows[0]["spans"][0][0]] = float("nan")
    broken = tmp_path / "nan.jsonl"
    broken.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(launch.UserError, match="nan.jsonl:1: .*'logps'"):
        run_grpo("--rollouts", broken)


def test_a_film_that_is_gone_costs_a_replay_its_group_and_is_counted(
        run_grpo, recorded, tmp_path, capsys):
    """The others are trained as if that group had never been there: N counts them alone."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    first = [r for r in rows if r["group"] == rows[0]["group"]]
    others = [r for r in rows if r["group"] != rows[0]["group"]]
    for name, some in (("others", others), ("all", rows)):
        if some is rows:
            for r in first:
                r["vision"][0]["spec"]["video"] = "gone.mp4"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    found = [run_grpo("--rollouts", tmp_path / f"{name}.jsonl", "--temperature", 1, out=name)
             for name in ("others", "all")]
    assert all(torch.equal(w, found[1][0][n]) for n, w in found[0][0].items())
    assert [m["not_ok"] for _, m, _ in found] == [0, len(first)]
    assert [m["groups"] for _, m, _ in found] == [2, 2]
    assert capsys.readouterr().out.count(f"skipped task {first[0]['task']['id']}: ") == 1
