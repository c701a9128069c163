"""
More of toy.py: priors, the search world in detail: python -m pytest tests/all/test_toy_rest.py -q
"""
import random
import re
from collections import Counter

import numpy as np
import pytest
from conftest import run_script
from test_toy import (  # noqa: F401
    colour_at,
    digests,
    kind_of,
    rows_of,
    search,
    seconds_of,
)

import chat
import data
import rewards
import rollout
import toy as toy_world
import video

SMALL = ("--world", "named", "--base-videos", 3, "--sft-videos", 3, "--rl-videos", 2,
         "--eval-videos", 1)


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
        frames, found = toy_world.draw_frames(toy_world.make_timeline(rng), noise), set()
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
# Videos and tasks


def test_a_crop_always_shows_the_event_and_a_thin_overview_often_does_not():
    """This contrast is what the tool is for. The shares are exact: an event starts 1 to 5 seconds
    into its slot of 8."""
    rng, hits, total = random.Random(0), Counter(), 0
    for _ in range(400):
        for event in toy_world.make_timeline(rng):
            total += 1
            assert event["window"][0] < event["start"] < event["end"] <= event["window"][1]
            for k in (4, 8, 16, 32, 64):
                looks = {int((i + 0.5) * 64 / k) for i in range(k)}
                hits[k] += any(event["start"] <= t < event["end"] for t in looks)
    assert hits[64] == hits[32] == total
    assert hits[4] == 0 and abs(hits[8] / total - 2 / 5) < 0.05
    assert abs(hits[16] / total - 3 / 5) < 0.05


# ------------------------------------------------------------------------------------------------
# The SFT mixture


def test_an_answer_says_what_was_seen_and_nothing_of_the_rest(toy):
    """From the pixels of its overview and from its summaries: a target that could only be guessed
    would be noise."""
    import rewards

    kinds = Counter()
    for row in [*rows_of(toy, "sft.jsonl"), *rows_of(toy, "sft_val.jsonl")]:
        _, kind, k = kind_of(row)
        if kind == "sub":
            continue
        seen, question = row["messages"][1]["content"]
        frames = video.load(seen, str(toy))
        told = [m["content"] for m in row["messages"] if m["role"] == "tool"]
        wanted = []
        for n, (a, b) in enumerate(re.findall(r"(\d+) and (\d+)", question["text"])):
            colours = {colour_at(image) for image, t in zip(frames.images, frames.seconds)
                       if int(a) <= t < int(b)} - {None}
            summary = told[n] if told and told[n] != rollout.empty_summary() else None
            wanted.append(summary or f"{a} {colours.pop() if colours else 'nothing'}")
            kinds[kind, wanted[-1].split()[1] == "nothing", summary is None] += 1
        assert rewards.final_answer([row["messages"][-1]["content"].removeprefix("<think>\n")],
                                    True) == ", ".join(wanted)
    assert {pair[:2] for pair in kinds} == {(kind, empty) for kind in ("direct", "call", "plain")
                                            for empty in (True, False)}
    assert kinds["call", False, True] and kinds["call", True, True]  # the overview, or nobody, saw


def test_a_sub_agent_says_what_its_frames_show(toy):
    """Colour by colour, from the pixels: also that a window shows nothing, if nothing happens
    and where 3 frames in 8 seconds miss it."""
    told = Counter()
    for row in [*rows_of(toy, "sft.jsonl"), *rows_of(toy, "sft_val.jsonl")]:
        if kind_of(row)[1] != "sub":
            continue
        spec = row["messages"][1]["content"][0]
        seen = {colour_at(image) for image in video.load(spec, str(toy)).images} - {None}
        wanted = f"{spec['start']:g} {seen.pop()}" if seen else rollout.empty_summary()
        assert row["messages"][2]["content"] == wanted and not seen
        told[spec["fps"], wanted == rollout.empty_summary()] += 1
    # at one frame a second only the window where nothing happens is empty
    assert len(told) == 4 and told[1.0, True] < told[1.0, False]


def test_some_summaries_saw_nothing_at_times_all_of_a_turn(twin):
    rows = rows_of(twin / "a", "pretrain.jsonl") + rows_of(twin / "a", "sft.jsonl") + rows_of(
        twin / "a", "sft_val.jsonl")
    missed = [[m["content"] == rollout.empty_summary() for m in row["messages"]
               if m["role"] == "tool"] for row in rows if kind_of(row)[1] == "call"]
    several = [m for m in missed if len(m) > 1]
    assert any(map(all, several)) and any(any(m) and not all(m) for m in several)
    assert 0.1 < sum(map(sum, missed)) / sum(map(len, missed)) < 0.35


def test_the_strong_prior_is_loose_in_every_way_that_is_claimed(twin):
    """It calls, in several dialects, leaves thoughts open or opens them again, and mostly answers
    without tags."""
    import rewards

    rows = rows_of(twin / "a", "pretrain.jsonl")
    kinds = Counter((kind, int(n)) for _, kind, n in map(kind_of, rows) if kind != "sub")
    assert {pair: n for pair, n in kinds.items() if pair[0] != "plain"} == {
        (kind, k): 3 for kind in ("direct", "call") for k in (4, 8, 16, 32, 64)}
    assert sum(n for (kind, _), n in kinds.items() if kind == "plain") == 3 * 2
    turns = [m["content"].removeprefix("<think>\n") for row in rows if kind_of(row)[1] != "sub"
             for m in row["messages"] if m["role"] == "assistant"]
    closed = sum("</think>" in t for t in turns) / len(turns)
    assert 0.15 < closed < 0.5 and any("<think>" in t for t in turns)
    first = [t for t in turns if "crop_video" in t]
    assert {"<tool_code>" in t for t in first} == {True, False}
    assert any("<tool_call>" in t and "</tool_call>" not in t for t in first)
    assert any("I will look closer." in t for t in first)
    assert all(rewards.parse_tool_calls("</think>" + t)[0].error is None for t in first)
    last = [t for t in turns if "crop_video" not in t]
    assert 0.05 < sum("</answer>" in t for t in last) / len(last) < 0.6
    assert sum(rewards.format_reward([t])["well_formed"] for t in last) / len(last) < 0.3
    assert len({t.split("I saw")[0] for t in last}) > 4  # thoughts ramble


def test_the_tidy_prior_calls_in_the_protocols_own_style():
    import rewards

    rng = random.Random(0)
    events = toy_world.make_timeline(rng)
    rows = toy_world.pretraining_rows(toy_world.make_task("v-0000", events), events, "tidy", rng)
    kinds = Counter(kind_of(row)[1] for row in rows)
    # a close and a thin look at each window, and one at an empty window
    assert kinds == {"direct": 5, "call": 5, "plain": 2, "sub": 2 * len(events) + 1}
    for row in rows:
        turns = [m["content"].removeprefix("<think>\n") for m in row["messages"]
                 if m["role"] == "assistant"]
        assert kind_of(row)[1] == "sub" or rewards.format_reward(turns)["total"] == 1.0


def test_the_prior_changes_the_pretraining_split_alone(twin, tmp_path):
    done = run_script("toy.py", "--out", tmp_path / "w", "--seed", 5, *SMALL, "--prior", "tidy")
    assert done.returncode == 0, done.stderr
    strong, tidy = digests(twin / "a"), digests(tmp_path / "w")
    assert {name for name in strong if strong[name] != tidy.get(name)} == {"pretrain.jsonl"}
    assert strong.keys() == tidy.keys()


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


@pytest.mark.parametrize("prior, ways", [("need", {"need": 10}), ("half", {"need": 5, "other": 5})])
def test_a_need_prior_says_what_it_sees_and_calls_for_the_rest(prior, ways):
    """What a frame shows is worked out here from the world's own rule: K frames at the centres of K
    equal segments of 64 frames, an event on two of them."""
    rng = random.Random(1)
    for number in range(30):
        events = toy_world.make_timeline(rng)
        task = toy_world.make_task(f"v-{number:04d}", events)
        rows = toy_world.pretraining_rows(task, events, prior, rng)
        assert len({row["id"] for row in rows}) == len(rows)
        need = first_turns(rows, "need")
        others = first_turns(rows, "direct") + first_turns(rows, "call")
        assert {"need": len(need), **({"other": len(others)} if others else {})} == ways
        for k, text, windows in need:
            looks = {int((i + 0.5) * 64 / k) for i in range(k)}
            unseen = [e for e in events if not looks & {e["start"], e["start"] + 1}]
            assert windows == [tuple(e["window"]) for e in unseen]
            says = ", ".join(f"{e['window'][0]} {'nothing' if e in unseen else e['colour']}"
                             for e in events)
            assert f"I saw {says}." in text and ("I need a closer look." in text) == bool(unseen)
        assert all(windows in ([], [tuple(e["window"]) for e in events]) for *_, windows in others)


# ------------------------------------------------------------------------------------------------
# The search world


def test_one_crop_of_the_whole_film_misses_half_of_the_flashes_and_a_scene_shows_its_own():
    rng, seen, total = random.Random(0), 0, 0
    for _ in range(300):
        events, _ = toy_world.make_scenes(rng)
        whole = {round(2 + 4 * n) for n in range(16)}  # centres of 16 equal parts
        seen += sum(bool(whole & {e["start"], e["start"] + 1}) for e in events)
        total += len(events)
        for e in events:
            assert toy_world.shown([e], toy_world.crop_looks(e["window"])) == [e]
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
    rows = toy_world.pretraining_rows(task, events, "turns", rng)
    assert {kind_of(row)[2] for row in rows if kind_of(row)[1] == "call"} == {"16", "32", "64"}
    for row in rows:
        calls = [m["content"].count("<tool_call>") for m in row["messages"]
                 if m["role"] == "assistant"]
        if kind_of(row)[1] == "call":
            assert calls[-1] == 0 and set(calls[:-1]) == {1}
            assert sum("I saw 0" in m["content"] for m in row["messages"][2:]) == 1
        else:
            assert not any(calls)


def said_scenes(text):
    """First thought -> ([(start, border)], [marked window])."""
    told = text.partition("I saw ")[2].split(".")[0]
    marked = [(int(a), int(b)) for a, b in re.findall(r"look (\d+) to (\d+)", told)]
    starts = re.findall(r"(\d+) (red|green|blue|white)", told)
    return [(int(t), border) for t, border in starts], marked


def test_demonstrations_of_a_search_tell_what_the_overview_shows_and_some_look_elsewhere(search):
    """Starts are midway between the frames around a change of the border. Calls are the marked
    windows; the marked scenes have the border of the question, but in the share of --wrong."""
    films, right = {}, Counter()
    for row in rows_of(search, "pretrain.jsonl"):
        name, kind, k = kind_of(row)
        if kind == "sub":
            continue
        film = row["messages"][1]["content"][0]["video"]
        seconds = films.setdefault((film, k), seconds_of(film, search, frames=int(k)))
        edges = [border for _, border, _ in seconds]
        starts = [0] + [(a + b + 1) // 2 for (a, x, _), (b, y, _) in zip(seconds, seconds[1:])
                        if x != y]
        borders = [x for x, y in zip(edges, [*edges[1:], None]) if x != y]
        claims, marked = said_scenes(row["messages"][2]["content"])
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


def test_answers_and_summaries_of_a_search_hold_what_frames_showed(search):
    import rewards

    kinds = Counter()
    for row in rows_of(search, "pretrain.jsonl"):
        _, kind, _ = kind_of(row)
        spec, question = row["messages"][1]["content"]
        spec = {name: spec[name] for name in spec if name != "type"}
        shown = {flash for *_, flash in seconds_of(spec.pop("video"), search, **spec) if flash}
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


def pieces(codec, text):
    return [codec.pieces[i].decode() for i in chat.encode(codec, text)]


def test_whole_numbers_and_fixed_phrases_are_single_tokens(codec):
    """A number in one piece can be copied from the question into a call; a fixed sentence need not
    be read word by word."""
    for number in range(65):
        assert len(chat.encode(codec, str(number))) == 1
        assert len(chat.encode(codec, f"<{number % 64}.0 seconds>")) == 1
    phrases = toy_world.fixed_phrases(toy_world.render_template)
    assert all(chat.encode(codec, phrase) == [codec.tokenizer.convert_tokens_to_ids(phrase)]
               for phrase in phrases)
    assert rewards.task_types()["list"].ask in phrases and rollout.empty_summary() in phrases
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
            assert 1 <= called <= 3
        assert (row.get("tools") == rollout.tool_schema()) == (kind in ("direct", "call"))
        assert ("tools" in row) == (kind in ("direct", "call"))
    both = [*rows, *rows_of(toy, "sft_val.jsonl")]
    assert {row["messages"][2]["content"].count("<tool_call>") for row in both
            if kind_of(row)[1] == "call"} == {1, 2, 3}
