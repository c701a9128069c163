"""
More of sft.py: bounds of its caches, rarer flags: python -m pytest tests/all/test_sft_rest.py -q
"""
import os
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
# Bad data


def test_encoded_chats_are_kept_within_a_bound(toy, codec):
    """Least recently used go first; what is gone is encoded again, the same."""
    chats, all_of_them = chats_of(toy / "sft.jsonl", codec), chats_of(toy / "sft.jsonl", codec)
    chats.max_tokens = len(chats[0].ids) + len(chats[1].ids)
    for index in (0, 2, 1, 0):
        assert chats[index].ids == all_of_them[index].ids
        assert chats.tokens == sum(len(s.ids) for s in chats.encoded.values())
        assert (chats.tokens <= chats.max_tokens or len(chats.encoded) == 1)
    first = chats[0]
    assert chats[0] is first


def test_the_frame_cache_has_the_size_and_the_folder_that_were_asked_for(
        trained, monkeypatch, tmp_path):
    made, real = [], sft.video.FrameCache
    monkeypatch.setattr(sft.video, "FrameCache", lambda *given, **named: made.append((given, named))
                        or real(*given, **named))
    trained("--frame-cache-gb", 0.5, "--frame-cache-dir", tmp_path, "--frame-cache-dir-gb", 0.25)
    asked = (2**29, 60.0, sft.video.decode_threads(), str(tmp_path), 2**28)
    assert made == [(asked, {})] and any(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# Flags


def test_clipping_changes_no_reported_norm_and_zero_turns_it_off(trained):
    assert trained("--clip", 1e-7).rows[0]["grad_norm"] == trained().rows[0]["grad_norm"] > 1e-3
    assert distance(trained("--clip", 0), trained("--clip", 1e9)) == 0


def test_data_flags_change_the_batch(trained):
    base = trained()
    assert trained("--batch-size", 9).rows[0]["tokens"] > 2 * base.rows[0]["tokens"]
    assert trained("--seed", 1).rows[0]["loss"] != base.rows[0]["loss"]
    # one for two frames
    assert trained("--channel", "video").rows[0]["tokens"] < base.rows[0]["tokens"]
    assert len(trained("--steps", 0, "--epochs", 1 / 3).rows) == 1  # three of nine chats


def test_flags_about_memory_change_no_weight(trained):
    """But for a few: Adam's first step is the sign of a gradient, and rounding may turn the sign of
    one that is almost zero."""
    plain = trained().weights
    for flags in (("--pack-tokens", 1), ("--recompute", "full")):
        found = trained(*flags).weights
        apart = sum(((plain[n] - found[n]).abs() > 2e-5).sum().item() for n in plain)
        assert apart < 1e-4 * sum(weight.numel() for weight in plain.values())


def test_saving_and_looking_flags(trained, toy, tmp_path):
    held = write_rows(tmp_path / "val.jsonl", small_rows(toy, "sft_val", 4))
    run = trained("--steps", 5, "--save-every", 1, "--val", held, "--eval-every", 2, "--lr", 1e-3)
    looks = [r for r in run.rows if "val_loss" in r]
    assert [r["step"] for r in looks] == [2, 4, 5]
    best = min(looks, key=lambda r: r["val_loss"])["step"]
    assert os.readlink(run.out / "best") == f"step_{best:06d}"
    assert os.readlink(run.out / "last") == "step_000005"
    folders = sorted(n for n in os.listdir(run.out) if n.startswith("step_"))
    assert folders == sorted({"step_000004", "step_000005", f"step_{best:06d}"})
    assert not (trained().out / "best").exists()
    assert sorted(n for n in os.listdir(trained().out) if n[:4] == "step") == ["step_000002"]


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
