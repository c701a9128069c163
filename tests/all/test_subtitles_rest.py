"""
More of subtitles in prompts:
python -m pytest tests/all/test_subtitles_rest.py -q
"""
import json
import re

import pytest
from scripted import Scripted, calls, is_sub
from test_subtitles import ANSWER, data, prompts, settings  # noqa: F401

import chat
import launch
import rollout
from tools import pick


def test_a_sub_agent_gets_no_subtitles_and_a_chat_from_a_rollout_has_them(
        toy, codec, data, monkeypatch):
    _, tasks, agent, source = settings(rollout, monkeypatch, toy, data)
    engine = Scripted(codec, [calls((4, 12)), ANSWER])
    (episode,) = rollout.run(rollout.Sampler(engine, codec, source, agent), tasks[:1], 4)
    subs = [r for r in engine.requests if is_sub(r)]
    assert subs and all("Hello" not in chat.decode(codec, r.ids) for r in subs)
    again = rollout.from_json(json.loads(json.dumps(episode.to_json())))
    assert pick.chats(again)[0]["messages"][:2] == episode.notes["opening"]
    assert "Hello there\nAgain" in json.dumps(episode.notes["opening"]).replace("\\n", "\n")


def test_the_largest_prompt_counts_its_subtitles(toy, codec, data, monkeypatch, capsys):
    _, tasks, agent, source = settings(rollout, monkeypatch, toy, data, "--subtitles", "full")
    assert rollout.preflight(codec, tasks, agent, source, 4) == []
    said = int(re.search(r"has (\d+) tokens", capsys.readouterr().out)[1])
    engine = Scripted(codec, [ANSWER])
    list(rollout.run(rollout.Sampler(engine, codec, source, agent), tasks, 4))
    prefix = len(chat.think_prefix_ids(codec, []))
    longest = {name: len(ids) - prefix for name, ids in prompts(engine).items()}
    assert said == longest["spoken"] > longest["mute"]
    # The context of a run must hold them too.
    small = rollout.Agent(context=said + 31)
    with pytest.raises(launch.UserError, match=f"takes {said} tokens"):
        rollout.check_context(codec, tasks, small, source, 4)
