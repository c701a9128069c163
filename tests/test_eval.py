"""
Tests of eval.py: python -m pytest tests/test_eval.py -q

The engine is scripted, by task, so that every number of a table can be worked out by hand.
"""
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import run_script

import eval as evaluation
import model
import rewards
import rollout

CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "end_time": 8}}</tool_call>'


class Scripted:
    """Says what the test wants of each task; counts what it was asked."""

    max_seqs = 4

    def __init__(self, codec, say):
        self.codec, self.say, self.asked, self.waiting, self.closed = codec, say, [], [], False

    def submit(self, request):
        self.asked.append(request)
        self.waiting.append(request)

    def poll(self):
        out = []
        for request in self.waiting:
            text = self.say(request)
            if text is None:
                out.append(rollout.Completion(request.id, error="HTTP 500"))
                continue
            ids = (model.encode(self.codec, text) + [self.codec.eos])[: request.max_tokens]
            out.append(rollout.Completion(request.id, ids, [-1.0] * len(ids), model.decode(self.codec, ids), True))
        self.waiting = []
        return out

    def close(self):
        self.closed = True


def task_of(request):
    return request.id.split("/")[1]


def answer(text):
    return f"I saw it.\n</think>\n<answer>{text}</answer>"


def row(name, **more):
    return {"id": name, "video": "videos/eval-0000.mp4", "question": "Which?", "answer": "red", "type": "open", **more}


ROWS = [row("red", category="easy"), row("blue", category="easy", answer="blue"), row("broken", video="videos/none.mp4", category="hard"),
        row("failing", category="hard"), row("letter", type="mcq", options=["cat", "dog"], answer="B"),
        row("span", type="grounding", answer=[10, 20])]
SAID = {"red": answer("red"), "blue": answer("red"), "failing": None, "letter": answer("B"), "span": answer("10 - 15")}


@pytest.fixture
def world(toy, tmp_path, codec, monkeypatch, capsys):
    """evaluate(*flags, rows, say) -> exit code, stdout, stderr, the engine (None when none was made)."""
    data = toy / "eval-of-a-test.jsonl"

    def evaluate(*flags, rows=ROWS, say=lambda r: SAID.get(task_of(r), "red"), out=tmp_path / "out", drop=()):
        data.write_text("".join(json.dumps(r) + "\n" for r in rows))
        made = []

        def make_engine(kind, ckpt, codec_, args, *more, **kw):
            made.append(SimpleNamespace(engine=Scripted(codec_, say), args=args))
            return made[-1].engine

        monkeypatch.setattr(rollout, "make_engine", make_engine)
        given = {"--ckpt": toy / "init", "--data": data, "--out": out, "--frames": 4, "--preset": "toy"}
        flags = list(map(str, flags))
        monkeypatch.setattr(sys, "argv", ["eval.py", *[str(x) for k, v in given.items() if k not in flags and k not in drop for x in (k, v)], *flags])
        try:
            model.run_main(evaluation.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        result = SimpleNamespace(code=code, out=printed.out, err=printed.err, engine=made[-1].engine if made else None,
                                 args=made[-1].args if made else None, folder=out)
        if (out / "summary.json").exists():
            result.results = json.loads((out / "summary.json").read_text()).get("results")
        return result

    yield evaluate
    data.unlink(missing_ok=True)


def records(folder):
    return [json.loads(line) for path in sorted(folder.glob("records.*.jsonl")) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def test_errors_stay_in_the_denominator(world):
    """A broken video or a failing endpoint is a zero, not a question less: leaving them out would reward failing."""
    done = world()
    assert done.code == 0, done.err
    (result,) = done.results
    # red 1, blue 0, broken 0, failing 0, letter 1, span 5 s of 10 s
    assert result["n"] == 6 and result["acc"] == pytest.approx(2.5 / 6)
    assert result["errors"] == {"video_error": 1, "engine_error": 1}
    assert result["acc_interval"] == pytest.approx(0.3097, abs=1e-4)  # Wilson, 2.5 of 6: 1.96 sqrt(.0405 + .0267) / 1.640
    scores = {r["task"]["id"]: (r["score"], r["status"]) for r in records(done.folder)}
    assert scores == {"red": (1.0, "ok"), "blue": (0.0, "ok"), "broken": (0.0, "video_error"), "failing": (0.0, "engine_error"),
                      "letter": (1.0, "ok"), "span": (0.5, "ok")}


def test_categories_have_numbers_of_their_own(world):
    (result,) = world().results
    assert result["by_category"] == {"easy": {"n": 2, "acc": 0.5}, "hard": {"n": 2, "acc": 0.0}, "mcq": {"n": 1, "acc": 1.0},
                                     "grounding": {"n": 1, "acc": 0.5}}


def test_kappa_counts_executed_calls_and_f_tau_is_the_format_reward(world):
    def say(request):
        if request.id.count("/") == 4:
            return "a red square"
        return "Look.\n</think>\n" + CALL * 2 + CALL.replace("8", "-8") if request.id.endswith("/0") and task_of(request) == "red" else answer("red")

    done = world(rows=ROWS[:2], say=say)
    (result,) = done.results
    assert result["kappa"] == 1.0  # two of three calls of one of two episodes
    assert result["f_tau"] == pytest.approx(sum(r["reward"]["fmt"] for r in records(done.folder)) / 2) and result["f_tau"] > 0.5


def test_several_budgets_and_modes_in_one_run(world):
    done = world("--frames", 4, 16, "gated", "--tools", "on", "off", rows=ROWS[:2])
    assert [(r["K"], r["tools"], r["n"]) for r in done.results] == [(k, mode, 2) for k in (4, 16, "gated") for mode in ("on", "off")]
    asked = Counter((r.items[0].frames, "crop_video" in model.decode(done.engine.codec, r.ids)) for r in done.engine.asked)
    assert asked[4, True] >= 2 and asked[16, False] >= 2 and sum(asked.values()) == 12
    assert done.args.frames == 64  # gated may draw 64: an engine made for 16 frames would refuse them
    by_budget = {r["task"]["id"]: r["K"] for r in records(done.folder) if r["budget"] == "gated"}
    assert by_budget == {name: rollout.frame_budget(0, 0, name) for name in ("red", "blue")}


def test_evaluation_is_greedy_unless_told_otherwise(world, tmp_path):
    assert {r.temperature for r in world(rows=ROWS[:1]).engine.asked} == {0.0}
    assert {r.temperature for r in world("--temperature", 0.5, rows=ROWS[:1], out=tmp_path / "other").engine.asked} == {0.5}


def test_table_and_summary_say_the_same(world):
    done = world("--tools", "on", "off")
    lines = done.out.splitlines()
    assert lines[0].split() == ["K", "tools", "n", "acc", "f_tau", "kappa", "errors"]
    on = lines[1].split()
    assert on[:4] == ["4", "on", "6", "0.417"] and on[-1] == "2" and lines[6].split()[:2] == ["4", "off"]
    assert [line.split()[-1] for line in lines[2:6]] == ["easy", "grounding", "hard", "mcq"]
    last = json.loads(lines[-1])
    assert last["acc"] == {"4/on": 0.4167, "4/off": 0.4167} and last["summary"] == str(done.folder / "summary.json")
    kept = json.loads((done.folder / "args.json").read_text())
    assert kept["tools"] == ["on", "off"] and kept["frames"] == [4] and kept["temperature"] == 0.0
    assert done.engine.closed


def test_compare_puts_finished_folders_side_by_side(world, tmp_path, capsys):
    one = world("--tools", "on", "off", out=tmp_path / "one")
    two = world(rows=ROWS[:1], out=tmp_path / "two")
    done = world("--compare", one.folder, two.folder, out=tmp_path / "both", drop=("--data", "--ckpt"))
    assert done.code == 0 and done.engine is None
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[1][:5] == ["one", "4", "6", "0.417", f"±{one.results[0]['acc_interval']:.3f}"] and lines[1][5] == "0.417"
    assert lines[2][:4] == ["two", "4", "1", "1.000"] and lines[2][5] == "-"


# ---------------------------------------------------------------------------------------------------------------------
# Grading


def episode(*turns, task=ROWS[0], status="ok"):
    return SimpleNamespace(status=status, turns=list(turns), task=task)


@pytest.mark.parametrize("turns, think_prefix, score", [
    (["I saw it.</think><answer>red</answer>"], True, 1.0),
    (["I saw it.</think>red"], True, 1.0),  # evaluation asks what was said, with the tag or without
    (["I saw it.</think>blue"], True, 0.0),
    (["red"], True, 0.0),  # a thought that was forced open and never closed: drafts are no answer
    (["red"], False, 1.0),
    (["<think>red"], False, 0.0),
    (["x</think><answer>red</answer>", "y</think><answer>blue</answer>"], True, 0.0),  # the last turn counts
    ([], True, 0.0),
])  # fmt: skip
def test_the_last_answer_or_the_text_after_the_thought_is_graded(turns, think_prefix, score):
    assert evaluation.grade(episode(*turns), think_prefix) == score


@pytest.mark.parametrize("status", ["video_error", "context", "engine_error"])
def test_an_episode_that_did_not_finish_scores_nothing(status):
    assert evaluation.grade(episode(answer("red"), status=status), True) == 0.0


@pytest.mark.parametrize("text", ["A. The answer is B, or option C", "I think so", "A man is running so B", "the", "(E) dog", "error: A"])
def test_extraction_does_not_depend_on_the_gold_answer(text):
    """At most one gold letter can be right for one and the same text."""
    options = ["a", "b", "c", "d", "e"]
    scores = [evaluation.grade(episode(answer(text), task=row("x", type="mcq", options=options, answer=gold)), True) for gold in "ABCDE"]
    assert sum(scores) <= 1


def test_open_answers_are_matched_and_not_scored_by_overlap():
    """Token F1 is a training reward; a benchmark asks for the answer."""
    task = row("x", answer="red, blue")
    assert evaluation.grade(episode(answer("red, blue"), task=task), True) == 1.0
    assert evaluation.grade(episode(answer("red, green"), task=task), True) == 0.0 < rewards.accuracy("red, green", "open", "red, blue")


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def test_only_what_is_missing_is_run_again(world):
    first = world("--frames", 4, 8)
    path = first.folder / "records.rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = lines[::2]
    path.write_text("".join(kept) + lines[1][: len(lines[1]) // 2])  # half of them, and a line cut off by a crash
    missing = {(r["task"]["id"], r["budget"]) for r in map(json.loads, lines[1::2])}
    again = world("--frames", 4, 8)
    assert again.code == 0, again.err
    asked = {(task_of(r), str(r.items[0].frames)) for r in again.engine.asked}
    # A broken video asks the engine nothing; what failed in the engine is asked again, its old record stays behind.
    failed = {(r["task"]["id"], r["budget"]) for r in map(json.loads, kept) if r["status"] == "engine_error"}
    assert asked == {key for key in missing | failed if key[0] != "broken"}
    assert path.read_text().startswith("".join(kept)) and len(records(first.folder)) == 12 + len(failed)
    assert len({(r["task"]["id"], r["budget"], r["tools"]) for r in records(first.folder)}) == 12
    assert [{k: v for k, v in r.items() if k != "seconds_per_episode"} for r in again.results] == \
        [{k: v for k, v in r.items() if k != "seconds_per_episode"} for r in first.results]


def test_a_finished_run_asks_only_for_what_failed_in_the_engine(world):
    """A broken video stays broken, an endpoint may be back: only the latter is tried again, and the numbers stay the same if it is not."""
    first = world()
    again = world()
    assert again.code == 0 and again.out == first.out
    assert {task_of(r) for r in again.engine.asked} == {"failing"}


def test_a_run_without_failures_starts_no_engine_again(world):
    assert world("--limit", 1).code == 0
    assert world("--limit", 1).engine is None


def test_a_short_run_is_part_of_a_long_one_but_never_mistaken_for_it(world):
    """Records are kept by item: a --limit run leaves no file that passes for the whole result."""
    short = world("--limit", 1)
    assert short.results[0]["n"] == 1 and len(short.engine.asked) == 1
    full = world()
    assert full.results[0]["n"] == 6 and "red" not in {task_of(r) for r in full.engine.asked}


def test_adding_a_mode_or_a_budget_runs_only_that(world):
    world(rows=ROWS[:2])
    more = world("--tools", "on", "off", rows=ROWS[:2])
    assert len(more.engine.asked) == 2 and [r["tools"] for r in more.results] == ["on", "off"]


@pytest.mark.parametrize("flags", [("--temperature", 0.5), ("--no-think-prefix",), ("--max-turns", 2), ("--seed", 1), ("--max-pixels", 4096),
                                   ("--sub-frames", 8), ("--max-new-tokens", 64)])
def test_records_of_other_settings_are_refused(flags, world):
    """Numbers of two settings in one table are numbers of neither."""
    assert world(rows=ROWS[:1]).code == 0
    other = world(*flags, rows=ROWS[:1])
    assert other.code == 2 and "other settings" in other.err and other.err.count("\n") == 1 and other.engine is None


def test_records_of_another_checkpoint_are_refused(world, toy, tmp_path):
    import shutil

    shutil.copytree(toy / "init", tmp_path / "ckpt")
    assert world(rows=ROWS[:1]).code == 0
    assert world("--ckpt", tmp_path / "ckpt", rows=ROWS[:1]).code == 2


def test_how_fast_it_runs_does_not_make_it_another_run(world):
    assert world(rows=ROWS[:1]).code == 0
    assert world("--max-seqs", 2, "--decode-threads", 1, rows=ROWS[:1]).code == 0


def test_a_spoilt_record_is_named(world):
    first = world(rows=ROWS[:2])
    path = first.folder / "records.rank0.jsonl"
    path.write_text("{spoilt\n" + path.read_text())
    again = world(rows=ROWS[:2])
    assert again.code == 2 and f"{path}:1" in again.err


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("flags, drop, why", [
    ((), ("--ckpt",), "--ckpt"), ((), ("--data",), "--data"), (("--engine", "openai"), (), "--base-url"), (("--frames", 0), (), "positive"),
    (("--ckpt", "/no/such"), (), "no config.json"), (("--data", "/no/such"), (), "No such file"), (("--tools", "maybe"), (), "invalid choice"),
    (("--context", 60), (), "too small"), (("--compare", "/no/such"), (), "summary.json"), (("--out", "/proc/no"), (), "output folder"),
    (("--decode-threads", 0), (), "--decode-threads"), (("--limit", -1), (), "--limit"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(flags, drop, why, world):
    done = world(*flags, drop=drop)
    assert done.code == 2 and why in done.err and "Traceback" not in done.err and done.engine is None
    assert done.err.count("\n") == 1 or done.err.startswith("usage:")


def test_command_line_runs_on_the_toy_world(toy, tmp_path):
    done = run_script("eval.py", "--preset", "toy", "--engine", "transformers", "--ckpt", toy / "init", "--data", toy / "eval.jsonl", "--frames", 4,
                      "--max-new-tokens", 16, "--limit", 3, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["results"][0]["n"] == 3 and summary["checkpoint"] == str(toy / "init") and done.stdout.startswith(f"{'K':>6} tools")
