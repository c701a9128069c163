"""
More of evaluations without their video: python -m pytest tests/slow/test_blind.py -q
"""
import string

from test_blind import (
    OVERVIEW,
    TASK,
    WINDOW,
    data,  # noqa: F401
    shown,
)

from evaluation import episodes


def test_shuffled_frames_are_the_same_at_each_others_times(toy):
    real, shuffled = shown(toy, "real").load(OVERVIEW), shown(toy, "shuffled").load(OVERVIEW)
    assert (shuffled.seconds == real.seconds).all()
    assert sorted(map(bytes, shuffled.images)) == sorted(map(bytes, real.images))
    moved = [n for n, (a, b) in enumerate(zip(shuffled.frame_keys, real.frame_keys))
             if a != f"shuffled{b}"]
    assert len(moved) > 48
    picture = {f"shuffled{key}": bytes(image) for key, image in zip(real.frame_keys, real.images)}
    # A key names its own picture: a cache of the engine goes by keys.
    assert [picture[key] for key in shuffled.frame_keys] == list(map(bytes, shuffled.images))
    again = shown(toy, "shuffled").load(OVERVIEW)
    assert again.frame_keys == shuffled.frame_keys and again.key == shuffled.key
    window = shown(toy, "shuffled").load(WINDOW)
    assert window.frame_keys == shown(toy, "real").load(WINDOW).frame_keys


def test_shuffled_options_keep_the_right_answer():
    orders = set()
    for n in range(60):
        for place, letter in enumerate("ABC"):
            task = {**TASK, "id": f"q{n}", "answer": letter}
            new = episodes.reordered(task)
            assert sorted(new["options"]) == sorted(task["options"])
            assert new["options"][string.ascii_uppercase.index(new["answer"])] == (
                task["options"][place])
            assert [task["options"][i] for i in new["order"]] == new["options"]
            assert episodes.reordered(task) == new
        orders.add(tuple(new["order"]))
    assert len(orders) == 6, "every order of three options comes up"
    labelled = episodes.reordered({**TASK, "options": ["A. red", "B. blue", "C. green"]})
    assert sorted(labelled["options"]) == ["blue", "green", "red"]
    grounding = {**TASK, "type": "grounding", "options": None, "answer": [1.0, 2.0]}
    assert episodes.reordered(grounding) == grounding


