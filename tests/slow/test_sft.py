"""
More of sft.py: bounds of its caches, rarer flags: python -m pytest tests/slow/test_sft.py -q
"""
import shutil

import torch
from test_sft import (  # noqa: F401
    chats_of,
    distance,
    small_rows,
    trained,  # noqa: F401
    user_and,
    write_rows,
)

import model
import sft

# ------------------------------------------------------------------------------------------------
# Flags


def test_a_film_that_goes_or_changes_after_its_first_epoch_costs_one_chat(
        toy, codec, policy, tmp_path, capsys, process_group):
    """Also if it goes between the making of a batch and the forward."""
    film, other = tmp_path / "a.mp4", toy / "videos" / "sft-0001.mp4"
    shutil.copy(toy / "videos" / "sft-0000.mp4", film)
    rows = [{"id": "one", "messages": user_and("a", video="a.mp4", frames=4)}]
    chats = chats_of(write_rows(tmp_path / "d.jsonl", rows), codec)
    policy.features = model.VisionFeatures(policy.hf.model.visual, codec, None)
    features = []
    for change in (lambda: shutil.copy(other, film), film.unlink):
        packs, policy.features.frames = sft.make_packs(chats, [0], codec, 2048)
        change()
        with torch.no_grad():
            assert sft.backward(policy, packs)[1] == 2
        features.append(policy.features(packs[0].items[0]))
    assert not torch.equal(*features)  # the second batch showed the new film
    assert sft.make_packs(chats, [0], codec, 2048)[0] == [] and chats.broken == {0}
    assert "skipped one" in capsys.readouterr().out


def test_a_film_that_changes_between_two_chats_of_a_batch_is_shown_to_each_as_it_was(
        toy, codec, tmp_path):
    film, other = tmp_path / "a.mp4", toy / "videos" / "sft-0001.mp4"
    shutil.copy(toy / "videos" / "sft-0000.mp4", film)
    rows = [{"id": n, "messages": user_and("a", video="a.mp4", frames=4)} for n in ("one", "two")]
    chats = chats_of(write_rows(tmp_path / "d.jsonl", rows), codec)
    real = chats.read
    chats.read = lambda i, shown: i and shutil.copy(other, film) and None or real(i, shown)
    (pack,), frames = sft.make_packs(chats, [0, 1], codec, 2048)
    images = [frames[item.key].images for item in pack.items]
    assert len(images) == 2 and not (images[0] == images[1]).all()
