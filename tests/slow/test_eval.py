"""
More tests of eval.py: the deal of videos to ranks, corners of its table:
python -m pytest tests/slow/test_eval.py -q
"""
import json
import shutil

import pytest
from scripted import Server

from test_eval import (  # noqa: F401  # isort: skip
    ROWS, SAID, answer, records, row, task_of, world)

import chat
import eval as evaluation
from evaluation import scores


def record(name, score, video=None, **task):
    return {"task": {"id": name, "video": video or name, "type": "mcq", **task}, "score": score}


# ------------------------------------------------------------------------------------------------
# Numbers


def test_intervals_are_of_videos_drawn_with_replacement():
    """40 of 80 right: 0.5 with a standard error of sqrt(.25 / 80) = .056. When the 80 are 8 videos
    that are right or wrong as a whole, the error is that of 8 coins: sqrt(.25 / 8) = .177."""
    stats = scores.headline_stats([record(i, i % 2) for i in range(80)], None)
    low, high = stats["interval"]
    assert stats["headline"] == 0.5
    assert high - low == pytest.approx(2 * 1.96 * 0.0559, rel=0.12)
    stats = scores.headline_stats([record(i, i % 8 % 2, video=i % 8) for i in range(80)], None)
    low, high = stats["interval"]
    assert stats["headline"] == 0.5 and high - low == pytest.approx(2 * 1.96 * 0.177, rel=0.15)


def test_headlines_of_the_benchmarks():
    """MLVU: the mean of its tasks' means. MMVU: multiple choice alone, open answers beside it.
    Charades-STA: IoU and its thresholds."""
    def full(name, score, **task):
        return {**record(name, score, **task), "status": "ok", "reward": {"fmt": 1.0}, "calls": [],
                "extracted": "x", "finish": ["stop"], "timing": {}}

    mlvu = [full(i, float(i == 0), tags={"task": "ego" if i < 2 else "count"}) for i in range(6)]
    got = scores.summarise(mlvu, "mlvu")
    assert (got["metric"], got["headline"], got["acc"]) == ("M-Avg", 0.25, pytest.approx(1 / 6))
    mmvu = [full(i, float(i < 3), type="mcq" if i < 4 else "open") for i in range(8)]
    got = scores.summarise(mmvu, "mmvu")
    assert (got["headline"], got["acc"]) == (0.75, 0.375)
    spans = [full(i, score, type="grounding") for i, score in enumerate((0.3, 0.5, 0.71, 0.0))]
    got = scores.summarise(spans, "charades")
    assert got["metric"] == "mIoU" and got["headline"] == pytest.approx(0.3775)
    assert [got[f"R@{t}"] for t in (0.3, 0.5, 0.7)] == [0.75, 0.5, 0.25]


# ------------------------------------------------------------------------------------------------
# Benchmarks, samples, shards, grading again


@pytest.fixture
def videomme(toy, tmp_path):
    """Video-MME in miniature, in its publisher's layout: three questions on one toy video, one on a
    broken one."""
    root = tmp_path / "root" / "videomme"
    (root / "data").mkdir(parents=True)
    (root / "subtitle").mkdir()
    shutil.copy(toy / "videos" / "eval-0000.mp4", root / "data" / "ab.mp4")
    (root / "data" / "gone.mkv").write_bytes(b"no video")
    (root / "subtitle" / "ab.srt").write_text("1\n00:00:00,000 --> 00:00:20,000\nHi you\n")
    rows = [{"question_id": f"1-{i}", "videoID": "ab" if i < 4 else "gone",
             "question": f"Which {i}?", "options": ["A. red", "B. blue"], "answer": "AB"[i % 2],
             "duration": "short" if i < 2 else "long"} for i in range(1, 5)]
    (root / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


@pytest.mark.process  # four evaluations
def test_benchmarks_are_evaluated_from_their_folders(world, videomme, tmp_path):
    """Two benchmarks in one run, folders by name; every row counts, the broken video as an error;
    one table, a summary each."""
    names = "--bench", "videomme", "videomme_wsub", "--root", tmp_path / "root"
    done = world(*names, drop=("--data",), say=lambda r: answer("B"))
    assert done.code == 1, done.err
    assert [(r["bench"], r["n"], r["acc"], r["errors"]) for r in done.results] == [
        (b, 4, 0.5, {"video_error": 1}) for b in ("videomme", "videomme_wsub")]
    assert done.results[0]["by"]["duration"] == {
        "short": {"n": 1, "acc": 1.0}, "long": {"n": 3, "acc": pytest.approx(1 / 3)}}
    assert "4 items, 2700 published, 0 no video, 1 no subtitles" in done.out
    texts = [chat.decode(done.engine.codec, r.ids, keep_end=True) for r in done.engine.requests]
    assert sum("Hi you" in text for text in texts) == 3  # in the split with subtitles
    (videomme / "data" / "gone.mkv").unlink()
    for flags in (names, ("--bench", "videomme", "--root", videomme)):  # or its own folder
        assert "1 of 2 videos are not below" in world(*flags, drop=("--data",)).err
    shutil.copy(videomme / "data" / "ab.mp4", videomme / "data" / "gone.mkv")
    shutil.rmtree(videomme / "subtitle")
    assert "_wsub: none of its subtitles lies below" in world(*names, drop=("--data",)).err
    assert (tmp_path / "out" / "videomme" / "summary.json").exists()


def test_samples_give_a_mean_and_the_best_of_n(world):
    """red is right in samples 0 and 2 of 3, blue never."""
    done = world("--samples", 3, "--temperature", 1, rows=ROWS[:2], say=lambda r: answer(
        "red" if r.id.split("/")[2] != "1" and task_of(r) == "red" else "no"))
    (result,) = done.results
    assert result["n"] == 6 and result["acc"] == pytest.approx(2 / 6) and result["pass@n"] == 0.5
    assert len({r.seed for r in done.engine.requests}) == 6
    assert ["pass@n", "6", "0.500"] in [line.split() for line in done.out.splitlines()]


def test_the_judge_decides_open_answers_and_never_in_silence(world):
    rows = [row("right"), row("same", answer="scarlet"), row("other", answer="blue"),
            row("dead", answer="x"), row("vague", answer="y"),
            row("letter", type="mcq", options=["cat", "dog"], answer="A"), row("silent")]
    said = {"right": "red", "same": "bright red", "other": "green", "dead": "gone", "vague": "hmm",
            "letter": "B", "silent": ""}
    replies = {"bright red": "Yes.", "green": "no", "hmm": "perhaps", "gone": (400, "no", {})}

    def judge(body):
        asked = body["messages"][0]["content"]
        return next(reply for key, reply in replies.items() if f"Given answer: {key}\n" in asked)

    def say(request):
        return f"x\n</think>\n<answer>{said[task_of(request)]}</answer>"

    with Server(judge) as server:
        flags, plain = ("--judge-url", server.url, "--judge-model", "j"), world(rows=rows, say=say)
        assert plain.results[0]["acc"] == pytest.approx(1 / 7) and not server.asked
        assert "judge" not in plain.results[0]
        done = world(*flags, rows=rows, say=say)
        assert done.engine is None  # nothing is sampled again: the judge is no setting of episodes
        (result,) = done.results
        assert result["acc"] == pytest.approx(2 / 7)
        assert result["judge"] == {"judged": 4, "yes": 1, "failed": 2}
        assert result["errors"] == {"judge_error": 2}
        # not what the rule knows, not letters, not silence
        asked = [body["messages"][0]["content"] for body in server.asked]
        assert len(asked) == 4 and all("Question: Which?" in text for text in asked)
        lines = (done.folder / "judge.jsonl").read_text().split("\n")
        verdicts = {v["answer"]: v for v in map(json.loads, filter(None, lines))}
        assert {n: v["verdict"] for n, v in verdicts.items()} == {"bright red": 1, "green": 0}
        world(*flags, rows=rows, say=say)
        assert len(server.asked) == 6  # only the two that failed are asked again


# ------------------------------------------------------------------------------------------------
# Bad input


def test_the_questions_of_a_video_go_to_one_rank():
    """Video-MME has three a video, LVBench fifteen; round robin decoded each on every rank."""
    rows = [row(f"{v}-{q}", video=f"{v}.mp4") for q in range(3) for v in "abcdefgh"]
    shares = [evaluation.tasks_of_rank(rows, rank, 4) for rank in range(4)]
    assert [len(share) for share in shares] == [6] * 4
    assert sorted(task["id"] for task in sum(shares, [])) == sorted(task["id"] for task in rows)
    assert [len({task["video"] for task in share}) for share in shares] == [2] * 4
