"""
More of the endpoint client: several servers, servers that go away and come back:
python -m pytest tests/slow/test_endpoint.py -q
"""
import threading
from dataclasses import replace

import pytest
from scripted import AGENT, ANSWER, Server, play
from test_endpoint import no_pause  # noqa: F401

import launch
from evaluation import endpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def test_of_several_endpoints_the_least_busy_is_asked(tasks, frames_of, no_pause):
    """Two at once go to two servers; one that is down is passed over, and named at the start."""
    both = threading.Barrier(2, timeout=20)  # broken where one server gets both requests

    def reply(body):
        both.wait()
        return ANSWER

    with Server(reply) as one, Server(reply) as two:
        engine, engine.codec = endpoint.OpenAIEngine([one.url, two.url + "/"], "m", workers=2), None
        engine.check_servers()
        assert engine.max_seqs == 4
        agent = replace(AGENT, think_prefix=False, tools=False)
        found = play(engine, tasks[:1], frames_of, agent, group=2)
        assert [e.status for e in found] == ["ok"] * 2
        assert (len(one.asked), len(two.asked)) == (1, 1) and set(engine.busy.values()) == {0}
    with Server(ANSWER) as one:
        pass
    with Server(ANSWER) as two:
        engine, engine.codec = endpoint.OpenAIEngine([one.url, two.url], "m", retries=1), None
        found = play(engine, tasks[:1], frames_of, agent, group=6)
        assert [e.status for e in found] == ["ok"] * 6 and len(two.asked) == 6
        with pytest.raises(launch.UserError, match="no server answers"):
            engine.check_servers()


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_in_the_middle_ends_the_run_at_once(
        status, tasks, frames_of, no_pause):
    with Server(ANSWER, status, probe=status) as server:
        with pytest.raises(launch.UserError, match=f"HTTP {status}.*--api-key-env"):
            ask_group(server, tasks, frames_of)
        assert len(server.asked) <= 4 and server.probes >= 1 and not no_pause
    with Server(ANSWER, status, ANSWER) as server:  # of one text, as moderation does
        found = ask_group(server, tasks, frames_of)
        once = "engine_error" if status == 403 else "ok"  # a gateway's 401 is asked again
        assert sorted(e.status for e in found) == [once, "ok", "ok", "ok"]


def ask_group(server, tasks, source, **more):
    engine, engine.codec = endpoint.OpenAIEngine(server.url, "some-model", workers=1, **more), None
    try:
        return play(engine, tasks[:1], source, replace(AGENT, tools=False), group=4)
    finally:
        engine.close()
