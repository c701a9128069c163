"""
More of toy.py, its world in detail: python -m pytest tests/slow/test_toy.py -q
"""
from collections import Counter

from test_toy import kind_of, rows_of

import rollout

# ------------------------------------------------------------------------------------------------
# The checkpoint


def test_the_cold_start_teaches_calling_at_every_budget(toy):
    """Calls at every K alike, a direct answer at one of them: it must not know when the tool
    helps."""
    rows = rows_of(toy, "sft.jsonl")
    kinds = Counter((kind, int(n)) for _, kind, n in map(kind_of, rows) if kind != "sub")
    calls = {k: n for (kind, k), n in kinds.items() if kind == "call"}
    assert calls == dict.fromkeys((4, 8, 16, 32, 64), 12)
    for way in ("direct", "plain"):
        names = sorted(kind_of(row)[0] for row in rows if kind_of(row)[1] == way)
        assert names == sorted({kind_of(row)[0] for row in rows})
        assert len({k for kind, k in kinds if kind == way}) > 2
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        name, kind, n = kind_of(row)
        roles = [m["role"] for m in row["messages"]]
        if kind in ("direct", "plain"):
            assert roles == ["system", "user", "assistant"]
        if kind == "call":
            called = row["messages"][2]["content"].count("<tool_call>")
            assert roles == ["system", "user", "assistant", *["tool"] * called, "assistant"]
            assert 1 <= called <= 2
        assert (row.get("tools") == rollout.tool_schema()) == (kind in ("direct", "call"))
        assert ("tools" in row) == (kind in ("direct", "call"))
    both = [*rows, *rows_of(toy, "sft_val.jsonl")]
    assert {row["messages"][2]["content"].count("<tool_call>") for row in both
            if kind_of(row)[1] == "call"} == {1, 2}
