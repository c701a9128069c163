"""
More of tools/ask.py: python -m pytest tests/all/test_ask_rest.py -q
"""
import json

from conftest import run_script
from scripted import Server, calls, turn_of
from test_ask import FILM, sampler

import rollout
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


