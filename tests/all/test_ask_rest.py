"""
More of tools/ask.py: python -m pytest tests/all/test_ask_rest.py -q
"""
import json

import pytest
from conftest import run_script
from scripted import AGENT, Scripted, Server, calls, turn_of
from test_ask import FILM, flags, sampler

import launch
import rollout
import video
from tools import ask


def test_the_model_cannot_steer_the_terminal(codec, toy, capsys):
    ask.ask(sampler(codec, toy, "</think>\x1b[2J<answer>r\x1bed</answer>"), [FILM], 4)
    assert "\x1b" not in capsys.readouterr().out


def test_another_system_is_asked_behind_an_endpoint(toy, tmp_path):
    """With its own prompt and the schema of the paper's evaluation, here behind an endpoint."""
    film = toy / "videos" / "rl-0000.mp4"
    prompt = tmp_path / "system.txt"
    prompt.write_text("Made-up system text. Tools: {tool_schema}\n")
    call = ('<tool_call>{"name": "crop_video", "arguments": {"video_path": "rl-0000.mp4", '
            '"start_time": 0, "end_time": 8}}</tool_call>')

    def run(*more):
        return run_script("tools/ask.py", "--engine", "openai", "--base-url", server.url,
                          "--model", "m", "--video", film, "--question", "Which is first?",
                          "--frames", 4, "--set", "crop_reply=frames", "--prompt-file", prompt,
                          *more)

    with Server(call, "<answer>A</answer>") as server:
        done = run("--options", "red", "blue", "--out", tmp_path / "asked.jsonl")
        assert done.returncode == 0, done.stderr
        asked = json.dumps(server.asked)
    assert "Made-up system text" in asked and "video_path" in asked
    (row,) = map(json.loads, (tmp_path / "asked.jsonl").read_text().splitlines())
    assert row["task"]["question"] == "Which is first?" and len(row["calls"]) == 1
    assert "0.0 to 8.0 s: ok" in done.stdout
    assert "answer: A. red" in done.stdout


def test_empty_lines_are_passed_over(monkeypatch):
    from types import SimpleNamespace

    def asked(lines, terminal):
        """lines: what input() returns in turn, or the error that it raises."""
        rest = iter([*lines, EOFError()])

        def typed(prompt):
            assert bool(prompt) == terminal
            line = next(rest)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
        monkeypatch.setattr("builtins.input", typed)
        args = SimpleNamespace(video="/a/v.mp4", video_root="/a", subtitle_file=None, question=None)
        return [(t["question"], t["options"]) for t in ask.questions(args)]

    lines = ["Who? | A | B", " ", "", "When?"]
    for terminal in (False, True):  # a terminal ends with Ctrl-D, a pipe with its end
        assert asked(lines, terminal) == [("Who?", ["A", "B"]), ("When?", None)]
    assert asked(["Who?", KeyboardInterrupt()], True) == [("Who?", None)]


def test_subtitles_may_lie_beside_the_film_or_elsewhere(codec, monkeypatch, toy, tmp_path):
    spoken = tmp_path / "words.srt"
    spoken.write_text("1\n00:00:00,000 --> 00:10:00,000\nBeware of the dog\n")
    for folder in (toy / "videos", tmp_path):
        if folder == tmp_path:
            (tmp_path / "rl-0000.mp4").write_bytes((toy / "videos" / "rl-0000.mp4").read_bytes())
        args = flags(monkeypatch, "--video", str(folder / "rl-0000.mp4"), "--question", "Who?",
                     "--subtitles", str(spoken))
        (task,) = ask.questions(args)
        args.tools = True
        _, source = rollout.agent_settings(args, args.video)
        engine = Scripted(codec, ["</think><answer>red</answer>"])
        (row,) = ask.ask(rollout.Sampler(engine, codec, source, AGENT), [task], 4)
        assert row["status"] == "ok" and row["subtitles"] == "Beware of the dog"


def test_leaving_the_events_cancels_the_episode(codec, toy):
    asked = sampler(codec, toy, calls((0, 8)), "</think><answer>red</answer>")
    asked.engine.hold = lambda request: turn_of(request) == 1
    left = []

    async def play(episode, sampler):
        told = ask.events(episode, sampler)
        async for event in told:
            if event["event"] == "summary":
                await told.aclose()
        left.append(episode)
        return episode

    (episode,) = rollout.run(asked, [FILM], 4, play=play)
    assert left == [episode] and len(episode.turns) == 1


def test_a_film_that_cannot_be_read_is_told_with_its_reason(codec, toy, tmp_path):
    """One film: nothing about the first of many, and no advice on a flag that was not given."""
    (tmp_path / "frames").mkdir()
    source = rollout.Source(str(tmp_path), video.FrameCache())
    with pytest.raises(launch.UserError) as told:
        rollout.check_context(codec, [{**FILM, "video": "frames"}], AGENT, source, 4)
    assert str(told.value).startswith(f"the video cannot be read: {tmp_path / 'frames'}: ")
    assert "has no images" in str(told.value) and "--video-root" not in str(told.value)


def test_a_film_that_does_not_fit_is_refused_before_the_checkpoint_is_opened(toy, monkeypatch):
    """Frames of 32 x 32 pixels take a token each, in a video item half of one."""
    given = "--preset", "toy", "--video", str(toy / "videos" / "rl-0000.mp4"), "--question", "Who?"
    with pytest.raises(launch.UserError, match="64 frames of 32 x 32 pixels take 64 tokens, and "
                       "--context holds 64: lower --max-pixels"):
        ask.set_up(flags(monkeypatch, *given, "--context", "64"))
    for more in (("--context", "65"), ("--context", "64", "--channel", "video")):
        with pytest.raises(launch.UserError, match="no such folder"):  # it is looked at now
            ask.set_up(flags(monkeypatch, *given, *more))
