"""
More of tools/ask.py: python -m pytest tests/slow/test_ask.py -q
"""

from scripted import calls, turn_of
from test_ask import FILM, sampler

import rollout
from tools import ask


def test_the_model_cannot_steer_the_terminal(codec, toy, capsys):
    ask.ask(sampler(codec, toy, "</think>\x1b[2J<answer>r\x1bed</answer>"), [FILM], 4)
    assert "\x1b" not in capsys.readouterr().out


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


