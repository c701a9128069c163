"""
Tests of eval.py: python -m pytest tests/test_eval.py -q

The engine is scripted, by task, so that every number of a table can be worked out by hand.
"""
import json
import os
import sys
from types import SimpleNamespace

import pytest
import reference  # noqa: F401  waits for engines with `patient`
from conftest import run_script
from scripted import CALL, Scripted

import chat
import eval as evaluation
import rollout


def task_of(request):
    return request.id.split("/")[1]


def answer(text):
    return f"I saw it.\n</think>\n<answer>{text}</answer>"


def row(name, **more):
    return {"id": name, "video": "videos/eval-0000.mp4", "question": "Which?", "answer": "red",
            "type": "open", **more}


ROWS = [row("red", category="easy"), row("blue", category="easy", answer="blue"),
        row("broken", video="videos/broken.mp4", category="hard"),
        row("letter", type="mcq", options=["cat", "dog"], answer="B"),
        row("span", type="grounding", answer=[10, 20])]
SAID = {"red": answer("red"), "blue": answer("red"), "letter": answer("B"),
        "span": answer("10 - 15")}


@pytest.fixture
def world(toy, tmp_path, monkeypatch, start):
    """evaluate(*flags, rows, say) -> exit code, stdout, stderr, the engine (None when none was
    made)."""
    data, broken = toy / "eval-of-a-test.jsonl", toy / "videos" / "broken.mp4"
    broken.write_bytes(b"no video")

    def evaluate(*flags, rows=ROWS, say=lambda r: SAID.get(task_of(r), "red"), out=tmp_path / "out",
                 drop=()):
        data.write_text("".join(json.dumps(r) + "\n" for r in rows))
        made = []

        def make_engine(ckpt, codec, *_):
            made.append(Scripted(codec, say, say, at_once=True))
            return made[-1]

        monkeypatch.setattr(rollout, "make_engine", make_engine)
        given = {"--ckpt": toy / "init", "--data": data, "--out": out, "--frames": 4}
        kept = [x for k, v in given.items() if k not in flags and k not in drop for x in (k, v)]
        code, printed, err = start(evaluation, "--preset", "toy", *kept, *flags)
        result = SimpleNamespace(code=code, out=printed, err=err, folder=out,
                                 engine=made[-1] if made else None)
        if (out / "summary.json").exists():
            result.results = json.loads((out / "summary.json").read_text()).get("results")
        return result

    yield evaluate
    data.unlink(missing_ok=True)
    broken.unlink()


def records(folder):
    return [json.loads(line) for path in sorted(folder.glob("records.*.jsonl"))
            for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------
# Numbers


def test_errors_stay_in_the_denominator(world, tmp_path, monkeypatch):
    """A broken video is a zero, not a question less: leaving it out would reward failing.
    A kill after an episode loses no record of it."""
    written = []
    monkeypatch.setattr(evaluation.launch, "reset_watchdog",
                        lambda: written.append(len(records(tmp_path / "out"))))
    done = world()
    assert done.code == 1 and written[-5:] == [1, 2, 3, 4, 5], done.err
    assert "1 of 5 items failed (1 video_error)" in done.err and done.err.count("\n") == 1
    (result,) = done.results
    # red 1, blue 0, broken 0, letter 1, span 5 s of 10 s
    assert result["n"] == 5 and result["acc"] == 0.5
    assert result["errors"] == {"video_error": 1}
    assert result["headline"] == result["acc"]
    assert result["interval"][0] < result["acc"] < result["interval"][1]
    scores = {r["task"]["id"]: (r["score"], r["status"]) for r in records(done.folder)}
    assert scores == {"red": (1.0, "ok"), "blue": (0.0, "ok"), "broken": (0.0, "video_error"),
                      "letter": (1.0, "ok"), "span": (0.5, "ok")}


def test_no_answer_and_cut_off_are_counted_apart_from_errors(world):
    said = {"silent": "hm\n</think>\n", "torn": "I think that the answer",
            "letter": "x\n</think>\nneither"}
    rows = [row("silent"), row("torn"),
            row("letter", type="mcq", options=["cat", "dog"], answer="B"), row("red")]
    (result,) = world("--max-new-tokens", 12, rows=rows,
                      say=lambda r: said.get(task_of(r), "x\n</think>\nred")).results
    assert [result[k] for k in ("no_answer", "truncated", "errors", "acc")] == [3, 1, {}, 0.25]


def test_table_and_summary_say_the_same(world):
    done = world("--tools", "on", "off")
    lines = done.out.splitlines()
    (low, high), on = done.results[0]["interval"], lines[1].split()
    assert on[:8] == ["-", "4", "on", "5", "0.500", f"[{low:.3f},", f"{high:.3f}]", "0.500"]
    assert on[-3:] == ["1", "0", "0"] and lines[2].split()[:3] == ["-", "4", "off"]
    assert ["category", "easy", "2", "0.500"] in [line.split() for line in lines]
    assert json.loads(lines[-1])["acc"] == {"4/on": 0.5, "4/off": 0.5}
    assert done.engine.closed


def test_a_prompt_of_evaluation_is_that_of_training(world, toy, codec, tmp_path, monkeypatch,
                                                    start):
    """With the lines that are spoken while a frame is shown: at 8, 24, 40 and 56 s."""
    (toy / "words.srt").write_text(
        "1\n00:00:07,000 --> 00:00:09,500\nHello <i>there</i>\n\n"
        "2\n00:00:20,000 --> 00:00:22,000\nGoodbye\n\n3\n00:00:39,000 --> 00:00:41,000\nAgain\n")
    rows = [row("spoken", subtitles="words.srt"), row("mute")]
    asked = world(rows=rows).engine
    engine = Scripted(codec, [answer("red")])
    monkeypatch.setattr(rollout, "make_engine", lambda *_, **__: engine)
    code, _, err = start(rollout, "--preset", "toy", "--ckpt", toy / "init", "--frames", 4,
                         "--data", toy / "eval-of-a-test.jsonl", "--out", tmp_path / "r.jsonl")
    assert code == 0, err
    evaluated, trained = ({task_of(r): r.ids for r in e.requests} for e in (asked, engine))
    assert evaluated == trained
    said = chat.decode(codec, trained["spoken"])
    assert "Hello there" in said and "Again" in said and "Goodbye" not in said
    assert "Subtitles:" not in chat.decode(codec, trained["mute"])
    (toy / "words.srt").write_text("1\n00:00:07,000 --> 00:00:09,500\nBye\n")
    assert "other settings" in world(rows=rows).err  # other words, other prompts


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
    assert again.code == 1, again.err  # one item failed, as before
    asked = {(task_of(r), str(r.items[0].frames)) for r in again.engine.requests}
    # A broken video asks the engine nothing.
    assert asked == {key for key in missing if key[0] != "broken"}
    assert path.read_text().startswith("".join(kept))
    assert len({(r["task"]["id"], r["budget"]) for r in records(first.folder)}) == 10
    assert again.results == first.results


@pytest.mark.parametrize("flags", [("--temperature", 0.5), ("--crop-response", "frames")])
def test_records_of_other_settings_are_refused(flags, world):
    """Numbers of two settings in one table are numbers of neither."""
    assert world(rows=ROWS[:1]).code == 0
    other = world(*flags, rows=ROWS[:1])
    assert other.code == 2 and "other settings" in other.err and other.err.count("\n") == 1
    assert other.engine is None


# ------------------------------------------------------------------------------------------------
# Records


def test_a_record_holds_all_that_was_said_and_decided(world):
    """kappa: executed calls per episode. f_tau: the mean format reward. Tokens: those of the last
    context, which holds the ones before, and of the sub-agents."""
    look = "Look.\n</think>\n" + CALL * 2 + CALL.replace("16", "-8")

    def say(request):
        if request.id.count("/") == 4:
            return "a red square"
        if request.id.endswith("/0") and task_of(request) == "red":
            return look
        return answer("red")

    done = world(rows=ROWS[:2], say=say)
    kept, plain = sorted(records(done.folder), key=lambda r: r["task"]["id"] != "red")
    assert kept["turns"] == [look, answer("red")] and kept["finish"] == ["stop", "stop"]
    assert kept["calls"][0]["summary"] and kept["calls"][0]["end"] == 16
    assert "sub" not in kept["calls"][0] and "ids" not in kept
    assert len(kept["frame_times"]) == 4 and len(kept["prompt_hash"]) == 16
    names = ("final_answer", "extracted", "score", "budget", "tools", "sample")
    assert [kept[name] for name in names] == ["red", "red", 1.0, "4", "on", 0]
    (result,) = done.results
    assert result["kappa"] == 1.0  # two of three calls of one of two episodes
    formats = [r["reward"]["fmt"] for r in (kept, plain)]
    assert result["f_tau"] == pytest.approx(sum(formats) / 2) and result["f_tau"] > 0.5
    tokens = 0
    for request in done.engine.requests:  # but the first, which the second one holds
        if task_of(request) == "red" and not request.id.endswith("red/0/0"):
            said = "a red square" if request.id.count("/") == 4 else answer("red")
            tokens += len(request.expanded) + len(chat.encode(done.engine.codec, said)) + 1
    assert kept["tokens"] == tokens and result["tokens"] == (tokens + plain["tokens"]) / 2


def test_a_checkpoint_is_asked_as_it_was_trained(toy, tmp_path, monkeypatch):
    """By args.json of its run; flags override it."""
    run = tmp_path / "run"
    (run / "step_000002").mkdir(parents=True)
    trained = {"max_turns": 5, "max_pixels": 4096, "temperature": 1.0, "seed": 3, "frames": "gated",
               "chat_template_kwargs": {"enable_thinking": False}}
    (run / "args.json").write_text(json.dumps(trained))
    os.symlink("step_000002", run / "last")
    for ckpt in (run, run / "last", run / "step_000002"):
        argv = f"eval.py --ckpt {ckpt} --data d --preset toy --max-turns 4".split()
        for flags, turns in ((argv[:-2], 5), (argv, 4)):
            monkeypatch.setattr(sys, "argv", flags)
            args = evaluation.parse_args()
            agent, source = evaluation.agent_and_source(args, str(toy), "none")
            assert (agent.max_turns, source.max_pixels, agent.max_new_tokens) == (turns, 4096, 128)
            assert args.chat_template_kwargs == {"enable_thinking": False}
            assert (args.temperature, args.seed, args.frames) == (0.0, 0, [64])


# ------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("flags, drop, why", [
    (("--base-url", "http://127.0.0.1:9/v1", "--model", "m"), ("--ckpt",), "does not answer"),
    (("--judge-url", "http://x"), (), "--judge-model"), (("--protocol", "conan"), (), "vllm serve"),
    (("--base-url", "http://x"), (), "give --ckpt, or"), (("--bench", "mlvu"), (), "no --data"),
    (("--bench", "videomme"), ("--data",), "--root"),
    (("--compare", "/no/such"), (), "summary.json"),
    (("--samples", 2), (), "--temperature"), (("--frames", -1), (), "--frames")])
def test_bad_input_is_one_line_and_exit_code_2(flags, drop, why, world):
    done = world(*flags, drop=drop)
    assert done.code == 2 and why in done.err and "Traceback" not in done.err
    assert done.engine is None
    assert done.err.count("\n") == 1 or done.err.startswith("usage:")


@pytest.mark.process
def test_command_line_runs_on_the_toy_world_on_two_ranks(toy, tmp_path):
    done = run_script("eval.py", "--preset", "toy", "--ckpt", toy / "init", "--data",
                      toy / "eval.jsonl", "--frames", 4, "--max-new-tokens", 16, "--limit", 3,
                      "--out", tmp_path / "out", reference=True, ranks=2)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("records.rank?.jsonl"))) == 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["results"][0]["n"] == 3 and summary["checkpoint"] == str(toy / "init")
    assert done.stdout.split()[:3] == ["bench", "K", "tools"]
