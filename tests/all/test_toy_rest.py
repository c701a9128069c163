"""
More of toy.py, its world in detail: python -m pytest tests/all/test_toy_rest.py -q
"""
import random
import re
from collections import Counter

import numpy as np
import pytest
from conftest import run_script
from test_toy import digests, kind_of, rows_of, seconds_of, told_scenes

import chat
import rewards
import rollout
import toy as toy_world
import video
from plumbing import data

SMALL = ("--base-videos", 3, "--sft-videos", 3, "--rl-videos", 2, "--eval-videos", 1)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Folders of small worlds: a, and c of another seed."""
    root = tmp_path_factory.mktemp("twins")
    for name, seed in (("a", 5), ("c", 6)):
        done = run_script("toy.py", "--out", root / name, "--seed", seed, *SMALL)
        assert done.returncode == 0, done.stderr
    return root

# ------------------------------------------------------------------------------------------------
# The same bytes from the same seed


def test_an_encoder_that_ran_before_writes_the_same_bytes_again(tmp_path):
    """Two worlds are too few to see an encoder that goes astray once in a hundred files."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    for _ in range(10):
        frames, found = toy_world.draw_frames(toy_world.make_scenes(rng)[0], noise), set()
        for _ in range(15):
            toy_world.write_video(tmp_path / "v.mp4", frames)
            found.add((tmp_path / "v.mp4").read_bytes())
        assert len(found) == 1


def test_another_seed_gives_another_world(twin):
    a, c = digests(twin / "a"), digests(twin / "c")
    assert a.keys() == c.keys()
    differ = {name for name in a if a[name] != c[name]}
    assert {"pretrain.jsonl", "sft.jsonl", "sft_val.jsonl", "rl.jsonl", "eval.jsonl"} < differ
    assert all(name in differ for name in a if name.startswith("videos/"))


# ------------------------------------------------------------------------------------------------
# The SFT mixture


def test_the_prior_changes_the_chats_alone(twin, tmp_path):
    done = run_script("toy.py", "--out", tmp_path / "w", "--seed", 5, *SMALL, "--prior", "turns")
    assert done.returncode == 0, done.stderr
    tidy, turns = digests(twin / "a"), digests(tmp_path / "w")
    assert tidy.keys() == turns.keys()
    assert {name for name in tidy if tidy[name] != turns[name]} == {
        "pretrain.jsonl", "sft.jsonl", "sft_val.jsonl"}


def first_turns(rows, way):
    """[(K, first turn, windows called)] of the samples of one way."""
    found = []
    for row in rows:
        if kind_of(row)[1] == way:
            text = row["messages"][2]["content"]
            windows = re.findall(r'"start_time": (\d+), "end_time": (\d+)', text)
            windows = [(int(a), int(b)) for a, b in windows]
            found.append((int(kind_of(row)[2]), text, windows))
    return found


def test_one_crop_of_the_whole_film_misses_half_of_the_flashes_and_a_scene_shows_its_own():
    rng, seen, total = random.Random(0), 0, 0
    for _ in range(300):
        events, _ = toy_world.make_scenes(rng)
        whole = {round(2 + 4 * n) for n in range(16)}  # centres of 16 equal parts
        seen += sum(bool(whole & {e["start"], e["start"] + 1}) for e in events)
        total += len(events)
        for e in events:
            assert f"{e['window'][0]} {e['colour']}" == toy_world.watched(e["window"], events)
    assert 0.45 < seen / total < 0.55


def test_a_draw_that_looks_at_nothing_is_rarely_right():
    """The best blind guess is one colour: one scene matches in 55 of 100 films, so 0.14."""
    rng, counts = random.Random(0), Counter()
    for _ in range(1000):
        events, asked = toy_world.make_scenes(rng)
        counts[toy_world.make_task("v", events, asked)["answer"]] += 1
    assert max(counts.values()) < 180 and len(counts) == 4 + 4 * 3


def test_films_of_sixteen_scenes():
    """Twice as long; one to five scenes of the border asked about, each crop of one shows its
    flash; 16 frames show every scene and 8 do not; the demonstrations may call once a turn."""
    rng, asked_about, told = random.Random(0), Counter(), Counter()
    for _ in range(200):
        events, asked = toy_world.make_scenes(rng, 16)
        task = toy_world.make_task("v-0000", events, asked)
        assert len(events) == 16 and events[-1]["window"][1] == 128 == toy_world.film_seconds(16)
        assert all(a["window"][1] == b["window"][0] and a["border"] != b["border"]
                   for a, b in zip(events, events[1:]))
        assert all(4 <= b - a <= 12 for a, b in (e["window"] for e in events))
        assert [len(toy_world.watched(e["window"], events).split()) for e in events] == [2] * 16
        asked_about[len(task["evidence"])] += 1
        for k in (8, 16, 32):
            told[k] += len(toy_world.told_scenes(events, toy_world.overview_looks(k, 128)))
        frames = toy_world.draw_frames(events, np.random.default_rng(0))
        assert frames.shape == (128, 32, 32, 3)
    assert set(asked_about) == {1, 2, 3, 4, 5}
    assert told[32] == told[16] == 200 * 16 and told[8] <= 200 * 8
    rows = toy_world.chats(task, rng, one_call=True)
    assert {kind_of(row)[2] for row in rows if kind_of(row)[1] == "call"} == {"16", "32", "64"}
    for row in rows:
        calls = [m["content"].count("<tool_call>") for m in row["messages"]
                 if m["role"] == "assistant"]
        if kind_of(row)[1] == "call":
            assert calls[-1] == 0 and set(calls[:-1]) == {1}
            assert sum("I saw 0" in m["content"] for m in row["messages"][2:]) == 1
        else:
            assert not any(calls)


def test_demonstrations_tell_what_the_overview_shows_and_some_look_elsewhere(toy):
    """Starts are midway between the frames around a change of the border. Calls are the marked
    windows; the marked scenes have the border of the question, but in the share of --wrong."""
    films, right = {}, Counter()
    for row in rows_of(toy, "sft.jsonl"):
        name, kind, k = kind_of(row)
        if kind == "sub":
            continue
        film = row["messages"][1]["content"][0]["video"]
        seconds = films.setdefault((film, k), seconds_of(film, toy, frames=int(k)))
        edges = [border for _, border, _ in seconds]
        starts = [0] + [(a + b + 1) // 2 for (a, x, _), (b, y, _) in zip(seconds, seconds[1:])
                        if x != y]
        borders = [x for x, y in zip(edges, [*edges[1:], None]) if x != y]
        claims, marked = told_scenes(row["messages"][2]["content"])
        assert claims == list(zip(starts, borders))
        asked = re.search(r"border is (\w+)", row["messages"][1]["content"][1]["text"])[1]
        wanted = [w for w, border in zip(zip(starts, [*starts[1:], 64]), borders)
                  if border == asked]
        assert len(marked) == len(wanted)
        right[marked == wanted] += 1
        assert marked == wanted or not set(marked) & set(wanted)
        if kind == "call":
            (_, _, windows), = first_turns([row], "call")
            assert windows == marked
    assert 0.2 < right[False] / right.total() < 0.4


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
            assert told == shown and (said == rollout.EMPTY_SUMMARY) == (not shown)
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


def pieces(codec, text):
    return [codec.token_bytes[i].decode() for i in chat.encode(codec, text)]


def test_whole_numbers_and_fixed_phrases_are_single_tokens(codec):
    """A number in one piece can be copied from the question into a call; a fixed sentence need not
    be read word by word."""
    for number in range(65):
        assert len(chat.encode(codec, str(number))) == 1
        assert len(chat.encode(codec, f"<{number % 64}.0 seconds>")) == 1
    phrases = toy_world.fixed_phrases("qwen3_vl")
    assert all(chat.encode(codec, phrase) == [codec.tokenizer.convert_tokens_to_ids(phrase)]
               for phrase in phrases)
    assert {rewards.task_types()["list"].prompt_suffix, rollout.EMPTY_SUMMARY} <= set(phrases)
    assert all(line in phrases for line in rollout.main_prompt().split("\n"))
    call = pieces(codec, toy_world.call_text(16, 24))
    assert (call[-7:] == ["16", ', "end_time": ', "24", "}", "}", "\n", "</tool_call>"]
            or call[-6:] == ["16", ', "end_time": ', "24", "}}", "\n", "</tool_call>"])


def test_tags_are_split_as_in_qwen3(codec):
    """`<think>` and `<tool_call>` are one token and `<answer>` is several there, which is why tags
    are found by their bytes."""
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>"):
        assert len(chat.encode(codec, tag)) == 1
        assert codec.tokenizer.convert_tokens_to_ids(tag) not in codec.tokenizer.all_special_ids
    assert len(chat.encode(codec, "<answer>")) > 1 and len(chat.encode(codec, "</answer>")) > 1
    assert all(len(chat.encode(codec, t)) == 1
               for t in ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"))


def test_prompts_of_the_world_are_short(toy, codec):
    """The context is meant for frames: what stands around 64 of them stays below 60 tokens but for
    their own markers."""
    task = data.read_tasks(str(toy / "rl.jsonl"))[0]
    frames = video.overview(str(toy / task["video"]), 64)
    ids, _ = chat.encode_prompt(codec, rollout.main_messages(task, 64),
                                 [chat.vision_item({}, frames)], rollout.tool_schema())
    assert len(ids) - 64 * 4 < 60 + 30 and len(ids) < 350


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
