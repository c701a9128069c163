"""
Tests of eval.py: python -m pytest tests/test_eval.py -q

The engine is scripted, by task, so that every number of a table can be worked out by hand.
"""
import json
import os
import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import reference  # noqa: F401  waits for engines with `patient`
from conftest import run_script

import chat
import eval as evaluation
import launch
import rewards
import rollout
from engine import Completion
from evaluation import results

CALL = ('<tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 8}}'
        "</tool_call>")


class Scripted:
    """Says what the test wants of each task; counts what it was asked."""

    # all frames are waited for: what meets in it does not depend on the machine
    max_seqs, patient = 4, True

    def __init__(self, codec, say):
        self.codec, self.say, self.asked, self.waiting = codec, say, [], []
        self.closed, self.most = False, 0

    def submit(self, request):
        self.asked.append(request)
        self.waiting.append(request)

    def poll(self):
        out, self.most = [], max(self.most, len({task_of(r) for r in self.waiting}))
        for request in self.waiting:
            text = self.say(request)
            if text is None:
                out.append(Completion(request.id, error="HTTP 500"))
                continue
            if isinstance(text, Completion):
                out.append(text)
                continue
            ids = (chat.encode(self.codec, text) + [self.codec.eos])[: request.max_tokens]
            out.append(Completion(request.id, ids, [-1.0] * len(ids),
                                          chat.decode(self.codec, ids), ids[-1] == self.codec.eos))
        self.waiting = []
        return out

    def close(self):
        self.closed = True


def task_of(request):
    return request.id.split("/")[1]


def answer(text):
    return f"I saw it.\n</think>\n<answer>{text}</answer>"


def row(name, **more):
    return {"id": name, "video": "videos/eval-0000.mp4", "question": "Which?", "answer": "red",
            "type": "open", **more}


ROWS = [row("red", category="easy"), row("blue", category="easy", answer="blue"),
        row("broken", video="videos/none.mp4", category="hard"),
        row("failing", category="hard"),
        row("letter", type="mcq", options=["cat", "dog"], answer="B"),
        row("span", type="grounding", answer=[10, 20])]
SAID = {"red": answer("red"), "blue": answer("red"), "failing": None, "letter": answer("B"),
        "span": answer("10 - 15")}


@pytest.fixture
def world(toy, tmp_path, codec, monkeypatch, capsys):
    """evaluate(*flags, rows, say) -> exit code, stdout, stderr, the engine (None when none was
    made)."""
    data = toy / "eval-of-a-test.jsonl"

    def evaluate(*flags, rows=ROWS, say=lambda r: SAID.get(task_of(r), "red"), out=tmp_path / "out",
                 drop=(), allow=True):
        data.write_text("".join(json.dumps(r) + "\n" for r in rows))
        made = []

        def make_engine(ckpt, codec_, args, *more, **kw):
            made.append(SimpleNamespace(engine=Scripted(codec_, say), args=args))
            return made[-1].engine

        monkeypatch.setattr(rollout, "make_engine", make_engine)
        given = {"--ckpt": toy / "init", "--data": data, "--out": out, "--frames": 4,
                 "--preset": "toy"}
        flags = [*map(str, flags), *(["--allow-errors"] if allow else [])]
        kept = [str(x) for k, v in given.items() if k not in flags and k not in drop
                for x in (k, v)]
        monkeypatch.setattr(sys, "argv", ["eval.py", *kept, *flags])
        try:
            launch.run_main(evaluation.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        result = SimpleNamespace(code=code, out=printed.out, err=printed.err, engine=made[-1].engine
                                 if made else None,
                                 args=made[-1].args if made else None, folder=out)
        if (out / "summary.json").exists():
            result.results = json.loads((out / "summary.json").read_text()).get("results")
        return result

    yield evaluate
    data.unlink(missing_ok=True)


def records(folder):
    return [json.loads(line) for path in sorted(folder.glob("records.*.jsonl"))
            for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------
# Numbers


def test_errors_stay_in_the_denominator(world):
    """A broken video or a failing endpoint is a zero, not a question less: leaving them out would
    reward failing."""
    done = world()
    assert done.code == 0, done.err
    (result,) = done.results
    # red 1, blue 0, broken 0, failing 0, letter 1, span 5 s of 10 s
    assert result["n"] == 6 and result["acc"] == pytest.approx(2.5 / 6)
    assert result["errors"] == {"video_error": 1, "engine_error": 1}
    assert result["headline"] == result["acc"]
    assert result["interval"][0] < result["acc"] < result["interval"][1]
    scores = {r["task"]["id"]: (r["score"], r["status"]) for r in records(done.folder)}
    assert scores == {"red": (1.0, "ok"), "blue": (0.0, "ok"), "broken": (0.0, "video_error"),
                      "failing": (0.0, "engine_error"),
                      "letter": (1.0, "ok"), "span": (0.5, "ok")}


def test_categories_have_numbers_of_their_own(world):
    (result,) = world().results
    assert result["by"] == {"category": {"easy": {"n": 2, "acc": 0.5}, "hard": {"n": 2, "acc": 0.0},
                                         "mcq": {"n": 1, "acc": 1.0},
                                         "grounding": {"n": 1, "acc": 0.5}}}
    assert result["by_type"] == {"open": {"n": 4, "acc": 0.25}, "mcq": {"n": 1, "acc": 1.0},
                                 "grounding": {"n": 1, "acc": 0.5}}


def test_no_answer_and_cut_off_are_counted_apart_from_errors(world):
    said = {"silent": "hm\n</think>\n", "torn": "I think that the answer",
            "letter": "x\n</think>\nneither"}
    rows = [row("silent"), row("torn"),
            row("letter", type="mcq", options=["cat", "dog"], answer="B"), row("red")]
    (result,) = world("--max-new-tokens", 12, rows=rows,
                      say=lambda r: said.get(task_of(r), "x\n</think>\nred")).results
    assert (result["no_answer"], result["truncated"], result["errors"],
            result["acc"]) == (3, 1, {}, 0.25)


def test_kappa_counts_executed_calls_and_f_tau_is_the_format_reward(world):
    def say(request):
        if request.id.count("/") == 4:
            return "a red square"
        if request.id.endswith("/0") and task_of(request) == "red":
            return "Look.\n</think>\n" + CALL * 2 + CALL.replace("8", "-8")
        return answer("red")

    done = world(rows=ROWS[:2], say=say)
    (result,) = done.results
    assert result["kappa"] == 1.0  # two of three calls of one of two episodes
    formats = [r["reward"]["fmt"] for r in records(done.folder)]
    assert result["f_tau"] == pytest.approx(sum(formats) / 2) and result["f_tau"] > 0.5


def test_several_budgets_and_modes_in_one_run(world):
    done = world("--frames", 4, 16, "gated", "--tools", "on", "off", rows=ROWS[:2])
    assert [(r["K"], r["tools"], r["n"]) for r in done.results] == [
        (k, mode, 2) for k in (4, 16, "gated") for mode in ("on", "off")]
    asked = Counter((r.items[0].frames, "crop_video" in chat.decode(done.engine.codec, r.ids))
                    for r in done.engine.asked)
    assert asked[4, True] >= 2 and asked[16, False] >= 2 and sum(asked.values()) == 12
    # gated may draw 64: an engine made for 16 frames would refuse them
    assert done.args.frames == 64
    by_budget = {r["task"]["id"]: r["K"] for r in records(done.folder) if r["budget"] == "gated"}
    assert by_budget == {name: rollout.overview_frames("gated", 0, 0, name)
                         for name in ("red", "blue")}


def test_evaluation_is_greedy_unless_told_otherwise(world, tmp_path):
    assert {r.temperature for r in world(rows=ROWS[:1]).engine.asked} == {0.0}
    warm = world("--temperature", 0.5, rows=ROWS[:1], out=tmp_path / "other")
    assert {r.temperature for r in warm.engine.asked} == {0.5}
    assert warm.engine.sampling == {}
    narrow = world("--top-p", 0.8, "--top-k", 20, "--presence-penalty", 1.5, rows=ROWS[:1],
                   out=tmp_path / "narrow")
    assert narrow.engine.sampling == {"top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}


def test_table_and_summary_say_the_same(world):
    done = world("--tools", "on", "off")
    lines = done.out.splitlines()
    assert lines[0].split() == ["K", "tools", "n", "headline", "[95%]", "acc", "f_tau", "kappa",
                                "errors", "no", "answer", "cut", "off"]
    low, high = done.results[0]["interval"]
    on = lines[1].split()
    # "!": of fewer than ten videos
    assert on[:7] == ["4", "on", "6", "0.417", f"[{low:.3f},", f"{high:.3f}]!", "0.417"]
    assert on[-3:] == ["2", "0", "0"]
    assert lines[2].split() == ["grounding", "0.500", "of", "1,", "mcq", "1.000", "of", "1,",
                                "open", "0.250", "of", "4"]
    assert [line.split()[-2:] for line in lines[3:7]] == [
        ["category", name] for name in ("easy", "grounding", "hard", "mcq")]
    assert lines[7].split()[:2] == ["4", "off"]
    last = json.loads(lines[-1])
    assert last["acc"] == {"4/on": 0.4167, "4/off": 0.4167}
    assert last["summary"] == str(done.folder / "summary.json")
    kept = json.loads((done.folder / "args.json").read_text())
    assert kept["tools"] == ["on", "off"] and kept["frames"] == [4] and kept["temperature"] == 0.0
    assert done.engine.closed


def test_a_headline_with_more_than_one_percent_errors_is_refused(world, tmp_path):
    refused = world(allow=False)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "2 of 6 items failed (1 engine_error, 1 video_error)" in refused.err
    assert refused.results[0]["headline"] is None
    assert refused.results[0]["acc"] == pytest.approx(2.5 / 6) and "refused" in refused.out
    assert world(allow=False, rows=[row("red")], out=tmp_path / "clean").code == 0
    edge = [row(f"q{i}") for i in range(99)] + [row("failing")]
    # one of a hundred is not more than 1%
    assert world(allow=False, rows=edge, out=tmp_path / "edge").code == 0


def test_compare_puts_finished_folders_side_by_side(world, tmp_path):
    one = world("--tools", "on", "off", out=tmp_path / "one")
    two = world(rows=[row("red"), row("blue", answer="blue")], say=lambda r: answer(task_of(r)),
                out=tmp_path / "two")
    done = world("--compare", one.folder, two.folder, out=tmp_path / "both",
                 drop=("--data", "--ckpt"))
    assert done.code == 0 and done.engine is None
    lines = [line.split() for line in done.out.splitlines()]
    low, high = one.results[0]["interval"]
    tokens = [f"{r['cost']['tokens']:.0f}" for r in one.results]  # with tools, without
    assert lines[1][:9] == ["one", "4", "6", "0.417", f"[{low:.3f},", f"{high:.3f}]!",
                            tokens[0], "0.417", tokens[1]]
    assert lines[2][:5] == ["two", "4", "2", "1.000", "[-]"] and lines[2][6:8] == ["-", "-"]
    # The two items that both have: red is right in both, blue only in the second. They share a
    # video, and one video gives no interval.
    assert lines[-1] == ["two", "-", "one", "4", "on", "+0.500", "[-]", "-", "-", "1", "2"]
    kept = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert kept["differences"][0]["difference"] == 0.5 and kept["differences"][0]["n"] == 2


def record(name, score, video=None, **task):
    return {"task": {"id": name, "video": video or name, "type": "mcq", **task}, "score": score}


def test_an_answer_carries_what_it_cost(world, codec):
    """Two turns, two windows of a call each: prompts once, however many turns go on from them."""
    def say(request):
        if request.id.count("/") == 4:  # a sub-agent
            return "a red square"
        return "Look.\n</think>\n" + CALL * 2 if request.id.endswith("/0") else answer("red")

    done = world("--max-seqs", 2, rows=ROWS[:1], say=say)
    (kept,) = records(done.folder)
    main = [r for r in done.engine.asked if r.id.count("/") == 3]
    subs = [r for r in done.engine.asked if r.id.count("/") == 4]
    cost = kept["cost"]
    texts = ["Look.\n</think>\n" + CALL * 2, answer("red")]
    sampled = [len(chat.encode(codec, text)) + 1 for text in texts]  # and the end of the turn
    assert (len(main), len(subs)) == (2, 2) and cost["rounds"] == 2
    assert (cost["frames"], cost["sub_frames"]) == (4, 16)
    assert cost["sampled_tokens"] == sum(sampled)
    assert cost["prompt_tokens"] == len(main[1].expanded) - sampled[0]
    assert cost["sub_prompt_tokens"] == sum(len(r.expanded) for r in subs)
    assert cost["sub_sampled_tokens"] == 2 * (len(chat.encode(codec, "a red square")) + 1)
    assert cost["seconds"] > 0
    (result,) = done.results
    assert result["cost"]["tokens"] == sum(cost[n] for n in cost if n.endswith("_tokens"))
    assert {n: result["cost"][n] for n in cost if n != "seconds"} == {
        n: value for n, value in cost.items() if n != "seconds"}


# ------------------------------------------------------------------------------------------------
# Grading


def episode(*turns, task=ROWS[0], status="ok", think_open=True):
    return {"status": status, "turns": list(turns), "task": task, "think_open": think_open}


@pytest.mark.parametrize("turns, think_open, score", [
    (["I saw it.</think><answer>red</answer>"], True, 1.0),
    (["I saw it.</think>red"], True, 1.0),  # evaluation asks what was said, with the tag or without
    (["I saw it.</think>blue"], True, 0.0),
    (["red"], True, 0.0),  # a thought that was forced open and never closed: drafts are no answer
    (["red"], False, 1.0),
    (["<think>red"], False, 0.0),
    # the last turn counts
    (["x</think><answer>red</answer>", "y</think><answer>blue</answer>"], True, 0.0),
    ([], True, 0.0),
])  # fmt: skip
def test_the_last_answer_or_the_text_after_the_thought_is_graded(turns, think_open, score):
    assert results.grade(episode(*turns, think_open=think_open))["score"] == score


@pytest.mark.parametrize("status", ["video_error", "context", "engine_error"])
def test_an_episode_that_did_not_finish_scores_nothing(status):
    assert results.grade(episode(answer("red"), status=status))["score"] == 0.0


@pytest.mark.parametrize("text", ["A. The answer is B, or option C", "I think so",
                                  "A man is running so B", "the", "(E) dog", "error: A"])
def test_extraction_does_not_depend_on_the_gold_answer(text):
    """At most one gold letter can be right for one and the same text."""
    options = ["a", "b", "c", "d", "e"]
    tasks = [row("x", type="mcq", options=options, answer=gold) for gold in "ABCDE"]
    scores = [results.grade(episode(answer(text), task=task))["score"] for task in tasks]
    assert sum(scores) <= 1


def test_open_answers_are_matched_and_not_scored_by_overlap():
    """Token F1 is a training reward; a benchmark asks for the answer."""
    task = row("x", answer="red, blue")
    assert results.grade(episode(answer("red, blue"), task=task))["score"] == 1.0
    graded = results.grade(episode(answer("red, green"), task=task))
    assert graded["score"] == 0.0 < rewards.accuracy("red, green", "open", "red, blue")


@pytest.mark.parametrize("said, score", [("16 red, 40 blue", 1.0), ("40 blue, 16 red", 0.0),
                                         ("16 red", 0.0), ("16 red, 40 green", 0.0)])
def test_a_list_counts_whole_and_in_order(said, score):
    """Training pays for the places that are right."""
    task = row("x", type="list", answer="16 red, 40 blue")
    assert results.grade(episode(answer(said), task=task))["score"] == score


# ------------------------------------------------------------------------------------------------
# Going on


def test_only_what_is_missing_is_run_again(world):
    first = world("--frames", 4, 8)
    path = first.folder / "records.rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = lines[::2]
    # half of them, and a line cut off by a crash
    path.write_text("".join(kept) + lines[1][: len(lines[1]) // 2])
    missing = {(r["task"]["id"], r["budget"]) for r in map(json.loads, lines[1::2])}
    again = world("--frames", 4, 8)
    assert again.code == 0, again.err
    asked = {(task_of(r), str(r.items[0].frames)) for r in again.engine.asked}
    # What failed is asked again, its old record stays. A broken video asks the engine nothing.
    failed = {(r["task"]["id"], r["budget"]) for r in map(json.loads, kept)
              if r["status"] in ("engine_error", "video_error")}
    assert asked == {key for key in missing | failed if key[0] != "broken"}
    assert path.read_text().startswith("".join(kept))
    assert len(records(first.folder)) == 12 + len(failed)
    assert len({(r["task"]["id"], r["budget"], r["tools"]) for r in records(first.folder)}) == 12
    assert [{k: v for k, v in r.items() if k != "seconds_per_episode"} for r in again.results] == \
        [{k: v for k, v in r.items() if k != "seconds_per_episode"} for r in first.results]


def test_a_finished_run_asks_only_for_what_failed(world):
    """An endpoint or a disk may be back. The numbers stay the same if it is not."""
    first = world()
    again = world()
    assert again.code == 0 and again.out == first.out
    assert {task_of(r) for r in again.engine.asked} == {"failing"}


def test_videos_that_were_away_are_asked_about_by_the_next_start(world, toy):
    """The disk goes away after the first of five answers, and is back when the run has ended."""
    rows = [row(f"task {n}", video=f"videos/eval-000{n % 4}.mp4") for n in range(5)]

    def say(request):
        if task_of(request) == "task 0" and not away.exists():
            os.rename(toy / "videos", away)
        return answer("red")

    away = toy / "elsewhere"
    first = world("--live", 1, rows=rows, say=say, allow=False)
    os.rename(away, toy / "videos")
    assert first.code == 2 and "4 of 5" in first.err, first.err
    again = world("--live", 1, rows=rows, say=lambda request: answer("red"), allow=False)
    assert again.code == 0 and [r["n"] for r in again.results] == [5], again.err
    assert {task_of(r) for r in again.engine.asked} == {f"task {n}" for n in range(1, 5)}
    assert again.results[0]["acc"] == 1.0
    assert world("--live", 1, rows=rows, allow=False).engine is None


def test_a_run_without_failures_starts_no_engine_again(world):
    assert world("--limit", 1).code == 0
    assert world("--limit", 1).engine is None


def test_adding_a_mode_or_a_budget_runs_only_that(world):
    world(rows=ROWS[:2])
    more = world("--tools", "on", "off", rows=ROWS[:2])
    assert len(more.engine.asked) == 2 and [r["tools"] for r in more.results] == ["on", "off"]


@pytest.mark.parametrize("flags", [("--temperature", 0.5), ("--no-think-prefix",),
                                   ("--max-turns", 2), ("--seed", 1), ("--max-pixels", 4096),
                                   ("--top-p", 0.8), ("--top-k", 20), ("--presence-penalty", 1),
                                   ("--set", "sub_frames=8"), ("--max-new-tokens", 64)])
def test_records_of_other_settings_are_refused(flags, world):
    """Numbers of two settings in one table are numbers of neither."""
    assert world(rows=ROWS[:1]).code == 0
    other = world(*flags, rows=ROWS[:1])
    assert other.code == 2 and "other settings" in other.err and other.err.count("\n") == 1
    assert other.engine is None


def test_an_evaluation_has_the_card_to_itself(world):
    assert world(rows=ROWS[:1]).args.engine_share == 0.9


def test_a_spoilt_record_is_named(world):
    first = world(rows=ROWS[:2])
    path = first.folder / "records.rank0.jsonl"
    path.write_text("{spoilt\n" + path.read_text())
    again = world(rows=ROWS[:2])
    assert again.code == 2 and f"{path}:1" in again.err


# ------------------------------------------------------------------------------------------------
# Benchmarks, samples, grading again


@pytest.fixture
def videomme(toy, tmp_path):
    """Video-MME in miniature, in its publisher's layout: three questions on one toy video, one on a
    video that is not there."""
    root = tmp_path / "root" / "videomme"
    (root / "data").mkdir(parents=True)
    (root / "subtitle").mkdir()
    shutil.copy(toy / "videos" / "eval-0000.mp4", root / "data" / "ab.mp4")
    (root / "subtitle" / "ab.srt").write_text(
        "1\n00:00:00,000 --> 00:00:20,000\n<i>Hello</i> there\n\n"
        "2\n00:59:00,000 --> 00:59:01,000\nGoodbye\n")
    rows = [{"question_id": f"1-{i}", "videoID": "ab" if i < 4 else "gone",
             "question": f"Which {i}?", "options": ["A. red", "B. blue"], "answer": "AB"[i % 2],
             "duration": "short" if i < 2 else "long"} for i in range(1, 5)]
    (root / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


def test_benchmarks_are_evaluated_from_their_folders(world, videomme, tmp_path):
    """Two benchmarks in one run, folders by name; every row counts, the missing video as an error;
    one table, a summary each."""
    done = world("--bench", "videomme", "videomme_wsub", "--root", tmp_path / "root",
                 drop=("--data",), say=lambda r: answer("B"))
    assert done.code == 0, done.err
    assert [(r["bench"], r["n"], r["acc"], r["errors"]) for r in done.results] == [
        (b, 4, 0.5, {"video_error": 1}) for b in ("videomme", "videomme_wsub")]
    assert done.results[0]["by"]["duration"] == {
        "short": {"n": 1, "acc": 1.0}, "long": {"n": 3, "acc": pytest.approx(1 / 3)}}
    assert "4 items, 2700 published, 1 no video, 1 no subtitles" in done.out
    texts = [chat.decode(done.engine.codec, r.ids, keep_special=True) for r in done.engine.asked]
    # aligned, in the split with subtitles
    assert sum("Hello there" in text for text in texts) == 3
    assert not any("Goodbye" in text for text in texts)
    assert all("A. red" in text and "A. A." not in text for text in texts)
    (own,) = json.loads((tmp_path / "out" / "videomme" / "summary.json").read_text())["results"]
    assert own["acc"] == 0.5
    table = world("--table", tmp_path / "out", drop=("--data", "--ckpt")).out.splitlines()
    assert table[0].startswith("| system | videomme |") and "(measured) | 50.0 [" in table[-1]
    assert table[-1].count("| - ") == 5 and table[-1].count("n 4 of 2700") == 2
    assert any(line.startswith("| ParaVT-8B (the paper's) | 62.1 | 69.4 |") for line in table)


def test_rescore_grades_what_was_said_without_a_model(world):
    first = world(rows=ROWS[:2])
    path = first.folder / "records.rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:  # an older grader had it wrong
        line.update(score=0.25, extracted="?")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = world("--rescore", first.folder, drop=("--data", "--ckpt"))
    assert again.code == 0 and again.engine is None
    assert again.results[0]["acc"] == first.results[0]["acc"] == 0.5


def test_a_record_holds_all_that_was_said_and_decided(world):
    def say(request):
        first = request.id.endswith("/0") and request.id.count("/") == 3
        return "Look.\n</think>\n" + CALL if first else answer("red")

    (kept,) = records(world(rows=ROWS[:1], say=say).folder)
    assert kept["turns"] == ["Look.\n</think>\n" + CALL, answer("red")]
    assert kept["finish"] == ["stop", "stop"]
    assert kept["calls"][0]["summary"] and kept["calls"][0]["end"] == 8
    assert "sub" not in kept["calls"][0] and "ids" not in kept
    assert len(kept["frame_times"]) == 4 and len(kept["prompt_hash"]) == 16
    assert (kept["said"], kept["extracted"], kept["score"], kept["budget"], kept["tools"],
            kept["sample"]) == ("red", "red", 1.0, "4", "on", 0)


# ------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("flags, drop, why", [
    ((), ("--ckpt",), "--ckpt"), ((), ("--data",), "--data"),
    (("--engine", "openai"), (), "--base-url"), (("--frames", -1), (), "positive"),
    (("--ckpt", "/no/such"), (), "no such folder"), (("--data", "/no/such"), (), "No such file"),
    (("--tools", "maybe"), (), "invalid choice"),
    (("--context", 60), (), "too small"), (("--compare", "/no/such"), (), "summary.json"),
    (("--out", "/proc/no"), (), "output folder"),
    (("--limit", -1), (), "--limit"), (("--live", -1), (), "--live"),
    (("--samples", 2), (), "--temperature"), (("--samples", 0), (), "--samples"),
    (("--bench", "videomme"), ("--data",), "--root"),
    (("--bench", "nobench"), ("--data",), "invalid choice"),
    (("--bench", "mlvu", "--root", "/x"), (), "no --data"),
    (("--bench", "mlvu", "--root", "/no/such"), ("--data",), "no such folder"),
    (("--bench", "mlvu", "lvbench", "--root", "a", "b", "c"), ("--data",), "--root"),
    (("--rescore", "/no/such"), (), "tasks.jsonl"), (("--table", "/no/such"), (), "summary.json"),
    (("--judge-url", "http://x"), (), "--judge-model"),
    (("--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "j"), (),
     "no server answers at http://127.0.0.1:9"),
    (("--engine", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"), (),
     "no server answers at http://127.0.0.1:9"),
    (("--engine", "openai", "--base-url", "nonsense", "--model", "m"), (), "no server answers"),
    (("--protocol", "none"), (), "invalid choice"),
    (("--prompt-file", "/no/such.txt"), (), "--prompt-file"),
    (("--set", "overview_fps=-1"), (), "overview_fps"),
    (("--set", "min_pixels=x"), (), "min_pixels takes a whole number"),
    (("--set", "no_such=1"), (), "no such setting"), (("--samp", 2), (), "arguments: --samp"),
    (("--image-cap", -1), (), "--image-cap"), (("--tokens-field", "x"), (), "invalid choice"),
    (("--prepare", "x.jsonl"), (), "--bench"), (("--workers", 0), (), "--workers"),
    (("--retries", -1), (), "--retries"), (("--top-p", 0), (), "--top-p"),
    (("--top-p", "nan"), (), "--top-p"), (("--top-k", -1), (), "--top-k"),
    (("--presence-penalty", 3), (), "--presence-penalty"),
    (("--request-timeout", 0), (), "--request-timeout"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(flags, drop, why, world):
    done = world(*flags, drop=drop)
    assert done.code == 2 and why in done.err and "Traceback" not in done.err
    assert done.engine is None
    assert done.err.count("\n") == 1 or done.err.startswith("usage:")


def test_command_line_runs_on_the_toy_world(toy, tmp_path):
    done = run_script("eval.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "eval.jsonl", "--frames", 4,
                      "--max-new-tokens", 16, "--limit", 3, "--out", tmp_path / "out",
                      reference=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["results"][0]["n"] == 3 and summary["checkpoint"] == str(toy / "init")
    assert done.stdout.startswith(f"{'K':>6} tools")
