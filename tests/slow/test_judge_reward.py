"""
A judge as the reward of grpo.py: python -m pytest tests/slow/test_judge_reward.py -q
"""
import pytest
from fixtures import rows_of, write_rows
from scripted import Scripted, Server
from test_judge_reward import given, table

import grpo
import rollout


@pytest.fixture
def open_tasks(toy, tmp_path):
    same = {"type": "open", "question": "Which colour?", "answer": "deep red"}
    return write_rows(tmp_path / "o.jsonl", [row | same for row in rows_of(toy / "rl.jsonl")[:2]])


def say(request):
    """Four answers of a group: the judge likes the second, token F1 likes the first."""
    answer = ["deep red", "crimson", "blue", None][int(request.id.split("/")[2]) % 4]
    return "I saw it.\n</think>\n" + (f"<answer>{answer}</answer>" if answer else "")


@pytest.fixture
def run(monkeypatch, train, open_tasks, codec):
    """run(name of a folder, *flags): grpo.py with scripted answers."""
    class Engine(Scripted):
        def close(self, *_):
            pass

        sleep = wake = sync = close

    monkeypatch.setattr(rollout, "make_engine", lambda *_, **__: Engine(codec, say))
    monkeypatch.setattr(grpo, "check_gap", lambda *_: None)  # its log-probs are a script's
    return lambda out, *flags: train("grpo", "--data", open_tasks, "--num-generations", 4,
                                     "--max-new-tokens", 64, *flags, out=out)


def judged_by(server):
    return "--judge-url", server.url, "--judge-model", "j"


def test_a_run_is_trained_by_its_verdicts_and_counts_them(run, tmp_path):
    """What is logged is what the advantages are made of. A run that goes on asks nothing again,
    even if the judge has moved."""
    with Server(table({"crimson": "yes", "blue": "hm"})) as server:
        run("out", "--steps", 1, *judged_by(server))
        asked = sorted(map(given, server.asked))
    # Both tasks have the same question and label. Only failures may be asked about again.
    assert asked.count("crimson") == asked.count("deep red") == 1 and 1 <= asked.count("blue") <= 2
    with Server("no") as server:
        run("out", "--steps", 2, *judged_by(server))
        assert set(map(given, server.asked)) == {"blue"}
    first, second = rows_of(tmp_path / "out" / "log.jsonl")
    assert first["judge_failed"] == pytest.approx(2 / 6) and second["judge_failed"] == 0
    assert first["acc"] == second["acc"] == 0.25
    rows = rows_of(tmp_path / "out" / "rollouts" / "step_000000.rank0.jsonl")
    assert [r["reward"].get("judge") for r in rows] == [False, True, "fallback", None] * 2
    assert [r["reward"]["acc"] for r in rows] == [0.0, 1.0, 0.0, 0.0] * 2
    best, *others = sorted((row["advantage"]["task"] for row in rows[:4]), reverse=True)
    assert rows[1]["advantage"]["task"] == best > max(others)
