"""
More faults between two writes, of rollout.py:
python -m pytest tests/all/test_file_faults_rest.py -q
"""
import json

from test_file_faults import episodes_in, forked, rollouts, write_inputs  # noqa: F401


def test_records_that_somebody_edited_are_sampled_again(tmp_path):
    write_inputs(tmp_path)
    out = tmp_path / "r.jsonl"
    assert forked(rollouts(tmp_path, out), tmp_path)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    wanted, edits = episodes_in(out), [{"group": 3, "sample": "x"}]
    edits += [{"group": rows[2]["group"], "sample": rows[2]["sample"]}, {**rows[3], "group": "0/z"}]
    for edit in edits:
        part = [edit, *rows[4:]]
        out.with_suffix(".jsonl.part").write_text("".join(json.dumps(row) + "\n" for row in part))
        out.unlink(missing_ok=True)
        code, said, err, _ = forked(rollouts(tmp_path, out), tmp_path)
        assert code == 0 and not err and "11 were there, 4 rollouts in" in said, (edit, said, err)
        assert episodes_in(out) == wanted


def test_rollouts_of_other_settings_are_not_replaced(tmp_path):
    write_inputs(tmp_path)
    out = tmp_path / "r.jsonl"
    assert forked(rollouts(tmp_path, out), tmp_path)[0] == 0
    before = out.read_bytes()

    def refused(*flags):
        code, _, err, _ = forked(rollouts(tmp_path, out, *flags), tmp_path)
        assert code == 2 and err.count("\n") == 1 and "choose another --out" in err, err
        assert out.read_bytes() == before
        return err

    said = refused("--seed", "1", "--frames", "4")
    assert "other settings: --frames gated (now 4), --seed 0 (now 1);" in said
    tasks = (tmp_path / "data").read_text()
    (tmp_path / "data").write_text(tasks.replace("a day", "a week", 1))
    assert "other settings: --data changed since (" in refused()
    (tmp_path / "data").write_text(tasks)
    (tmp_path / "base" / "config.json").write_text('{"a": 1}')
    assert "other settings: --ckpt changed since (" in refused()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "r.args.json").unlink()  # as an older version leaves it
    assert "other settings: " in refused() and "r.args.json is missing" in refused()
    out.unlink()
    assert forked(rollouts(tmp_path, out, "--seed", "1"), tmp_path)[0] == 0
