"""
Tests of bench/speed.py: python -m pytest tests/slow/test_speed.py -q
"""


from bench import speed


def test_a_ratio_is_that_of_medians_and_the_first_round_only_warms_up(monkeypatch, capsys):
    clock, order = [0.0], []
    seconds = {"ours": iter([90.0, 1.0, 2.0, 30.0]), "TRL": iter([50.0, 6.0, 5.0, 7.0])}
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def run(side):
        order.append(side)
        clock[0] += next(seconds[side])

    found = speed.alternate({side: lambda side=side: run(side) for side in seconds}, 3)
    assert found == {"ours": 2.0, "TRL": 6.0}
    assert order == ["TRL", "ours", "ours", "TRL"] * 2  # each is first as often as the other
    speed.print_ratios("update", found)
    assert capsys.readouterr().out.split() == "update TRL 3.00 6.000 s, ours 2.000 s".split()


