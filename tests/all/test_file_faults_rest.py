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


