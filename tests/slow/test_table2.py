"""
Tests of Table 2, of its world and of bench/table2.py: python -m pytest tests/slow/test_table2.py -q
"""
import random
import sys

import numpy as np

import launch
import toy as toy_world
from bench import table2


def write_seed(folder, f_tau):
    """A seed with two rows: a cold start, and GRPO in eight steps whose calls die out."""
    for name in ("sft", "grpo"):
        cell = {"tools": "on", "K": 4, "acc": 0.5, "f_tau": 0.2, "kappa": 1.5}
        cells = [cell, {**cell, "K": 64, "acc": 0.7}, {**cell, "tools": "off", "acc": 0.1}]
        (folder / "eval" / name).mkdir(parents=True)
        launch.write_jsonl(folder / "eval" / name / "summary.json", [{"results": cells}])
    rows = [{"step": n, "f_tau": f_tau, "kappa": 8.0 - n} for n in range(1, 9)]
    (folder / "rl" / "grpo").mkdir(parents=True)
    launch.write_jsonl(folder / "rl" / "grpo" / "log.jsonl", rows)
    return str(folder)


def test_rows_are_means_of_training_and_differences_of_seeds(tmp_path, monkeypatch, capsys):
    folders = [write_seed(tmp_path / "0", 0.3), write_seed(tmp_path / "1", 0.5)]
    monkeypatch.setattr(sys, "argv", ["table2.py", *folders, "--to", "sft"])
    table2.main()
    grpo, sft = capsys.readouterr().out.splitlines()[-2:]
    # f_tau 0.3 and 0.5, less 0.2: 0.1 and 0.3. Student's t of one degree of freedom: 12.7 * 0.1
    assert grpo.startswith("| grpo | 0.40 [-1.07, +1.47] | 0.40 [-1.07, +1.47] | 3.50 [")
    assert sft.startswith("| sft | 0.20 [") and "| 0.50 [+0.00, +0.00] | 0.70 [" in sft
    monkeypatch.setattr(sys, "argv", ["table2.py", folders[0]])  # one seed has no interval
    table2.main()
    assert "\n| grpo | 0.30 | 0.30 | 3.50 |" in capsys.readouterr().out


def test_the_fragile_world_has_a_loose_base_and_a_strict_cold_start():
    """Its questions name the windows, so that 64 frames tell the answer. Half of the base's calls
    are not followed by an answer, which is why calling does not pay at first."""
    draw = random.Random(3)
    texts, unanswered = {"loose": [], "strict": []}, []
    for n in range(60):
        task = toy_world.make_task(f"v{n}", *toy_world.make_scenes(draw), fragile=True)
        assert all(f"{a} to {b}" in task["question"] for a, b in task["evidence"])
        for style, written in texts.items():
            for row in toy_world.sample_chats(task, draw, 0.3, fragile=style):
                turns = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
                if "-sub-" not in row["id"]:
                    written += turns
                if "-call-" in row["id"] and style == "loose":
                    unanswered.append("I saw" not in turns[-1])
    assert all("</think>" in text for text in texts["strict"])
    assert 0.2 < np.mean(["</think>" in text for text in texts["loose"]]) < 0.4
    assert 0.4 < np.mean(unanswered) < 0.6
    few = toy_world.sample_chats(task, draw, fragile="loose", calling=0.0)
    assert not any("-call-" in row["id"] for row in few)
