"""
More of toy.py, its world in detail: python -m pytest tests/all/test_toy_rest.py -q
"""
import re
from collections import Counter

from test_toy import kind_of, rows_of, seconds_of

import rollout

# ------------------------------------------------------------------------------------------------
# The SFT mixture


def test_answers_and_summaries_hold_what_frames_showed(toy):
    import rewards

    kinds = Counter()
    for row in rows_of(toy, "sft.jsonl"):
        _, kind, _ = kind_of(row)
        spec, question = row["messages"][1]["content"]
        spec = {name: spec[name] for name in spec if name != "type"}
        shown = {flash for *_, flash in seconds_of(spec.pop("video"), toy, **spec) if flash}
        said = row["messages"][-1]["content"]
        if kind == "sub":
            start = re.search(r"Window: (\d+)", question["text"])[1]
            told = set(re.findall(rf"{start} ([a-z]+)", said))
            assert told == shown and (said == rollout.empty_summary()) == (not shown)
        else:
            answer = rewards.final_answer([said.removeprefix("<think>\n")], True).split(", ")
            told = {word for m in row["messages"] if m["role"] == "tool"
                    for word in re.findall(r"\d+ ([a-z]+)", m["content"])}
            assert set(answer) - {"nothing"} <= shown | told
            turns = [m["content"].removeprefix("<think>\n") for m in row["messages"]
                     if m["role"] == "assistant"]
            assert rewards.format_reward(turns)["total"] == 1.0
        kinds[kind, "nothing" in said] += 1
    # Samples that call see a flash in almost every window, the others in some overviews.
    assert {(kind, empty) for kind in ("sub", "direct", "plain") for empty in (True, False)} | {
        ("call", False)} <= set(kinds)


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
