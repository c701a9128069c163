"""
More of the judge as a reward: python -m pytest tests/slow/test_judge_reward.py -q
"""

import pytest
from scripted import Server
from test_judge_reward import (  # noqa: F401
    flags,
    given,
    judge,
    judged_by,
    no_pause,
    open_tasks,
    pay,
    rows_of,
    run,
    said,
    say,
    table,
    task,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_judge_that_goes_away_stops_no_run_and_is_asked_when_it_is_back(
        judge, no_pause, capsys):
    """No server within the wait: the answers that are left fall back at once. The next step looks
    again."""
    up = {"up": True}

    def reply(body):
        return "yes" if up["up"] else 503

    with Server(reply, probe=reply) as server:
        one = judge(server)
        up["up"] = False
        down = pay(one, *[said(f"{n} red", n) for n in range(9)])
        assert [r["judge"] for r in down] == ["fallback"] * 9 and len(server.asked) < 27
        up["up"] = True
        assert [r["judge"] for r in pay(one, said("0 red"))] == [True]
    assert capsys.readouterr().err.count("no verdict of the judge (") == 1


