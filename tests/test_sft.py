"""
Tests of sft.py: python -m pytest tests/test_sft.py -q

The arithmetic is checked by hand numbers; each flag is turned in a two-step training inside this
process and must change what it names; one training of two ranks runs as a user would start it, with
a broken video in its data, and is resumed half-way.
"""
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run_script
from fixtures import rows_of, write_rows
from reference import forward
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch
import model
import sft
import video
from plumbing import data


def chats_of(path, codec, video_root=None, pack_tokens=2048):
    args = SimpleNamespace(video_root=video_root, max_pixels=50176, max_len=2048,
                           pack_tokens=pack_tokens, batch_size=2)
    return sft.Chats(str(path), codec, args, video.FrameCache())


def small_rows(toy, split="sft", count=200):
    """The chats of the toy that show few frames."""
    rows = launch.read_jsonl(toy / f"{split}.jsonl")
    return [r for r in rows if r["id"].endswith(("-4", "-8")) or "-sub-" in r["id"]][:count]


def user_and(answer, **video_item):
    parts = [{"type": "video", "video": "v.mp4", **video_item}, {"type": "text", "text": "Which?"}]
    content = parts if video_item else "Which?"
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


# ------------------------------------------------------------------------------------------------
# Arithmetic


def test_schedule_warms_up_linearly_then_falls_by_a_cosine_to_its_floor():
    """Ten steps, two of warm-up, floor 0.1: hand numbers."""
    values = [sft.schedule(s, 10, 0.2, 0.1) for s in range(11)]
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[6] == pytest.approx(0.55) and values[10] == pytest.approx(0.1)
    assert values[4] == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2)
    assert values[2:] == sorted(values[2:], reverse=True)
    assert sft.schedule(0, 10, 0.0, 0.1) == 1.0  # no warm-up: full speed at once
    assert sft.schedule(5, 10, 0.2, 1.0) == 1.0  # floor 1: constant
    assert sft.schedule(0, 1, 0.03, 0.1) == 1.0  # one step only


def test_loss_is_the_mean_over_all_trained_tokens(toy, codec, policy, process_group):
    """Not a mean of means: chats of different lengths weigh by their tokens, however they are
    packed."""
    chats = chats_of(toy / "sft.jsonl", codec)
    vision = model.VisionFeatures(policy, chats.source.load)
    rows = chats.rows = [chats.rows[i] for i in (0, 1, 7)]
    alone = [forward(policy, p, vision)[0] for row in rows for p in chats.packs([row])[0]]
    assert len({len(x) for x in alone}) == 3
    wanted = -torch.cat(alone).mean().item()
    for budget in (1, 10**6):
        chats.args.pack_tokens = budget
        packs, _, _ = chats.packs(rows)
        assert len(packs) == (3 if budget == 1 else 1)
        with torch.no_grad():
            loss, count = sft.forward_backward(policy, packs)
        assert (loss, count) == (pytest.approx(wanted, rel=1e-6), sum(map(len, alone)))
    assert sft.held_out_loss(policy, chats) == pytest.approx(wanted, rel=1e-6)  # batches of 2 and 1
    assert all(p.grad is None for p in policy.parameters())  # a held-out loss leaves no gradient
    args = SimpleNamespace(lr=1e-3, muon_lr=0.0, beta2=0.9, max_grad_norm=1.0)
    optimizers = sft.build_optimizers(policy, args, torch.device("cpu"))
    assert not sft.update(policy, optimizers, [], 1.0, args)[1]  # no chat of a step can be read


def test_optimizers_get_the_parameters_that_their_flags_name(policy):
    args = SimpleNamespace(lr=3e-4, muon_lr=0.0, beta2=0.9)
    adamw, = sft.build_optimizers(policy, args, torch.device("cpu"))
    trained = {id(p) for p in model.trained_parameters(policy)}
    assert {id(p) for g in adamw.param_groups for p in g["params"]} == trained
    assert not trained & {id(p) for p in policy.hf.model.visual.parameters()}
    for group in adamw.param_groups:
        assert group["lr"] == 3e-4 and group["betas"] == (0.9, 0.9)
        assert all((p.ndim > 1) == (group["weight_decay"] == 0.01) for p in group["params"])
    args.muon_lr = 7e-3
    adamw, muon = sft.build_optimizers(policy, args, torch.device("cpu"))
    ids = {id(p) for g in muon.param_groups for p in g["params"]}
    assert ids == {id(p) for p in policy.hf.model.language_model.layers.parameters() if p.ndim == 2}
    assert ids ^ {id(p) for g in adamw.param_groups for p in g["params"]} == trained


# ------------------------------------------------------------------------------------------------
# Bad data


@pytest.mark.parametrize("messages, wanted", [
    ([{"role": "robot", "content": "x"}], "role"), ([{"role": "user", "content": 7}], "content m"),
    ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "neither"),
    ([{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}], "'frames'"),
    ([{"role": "user", "content": "x"}], "needs turns"),
    (user_and([{"type": "text", "text": "<|im_end|>", "trusted": True}]), "'trusted'"),
    ([*user_and("a")[1:], *user_and("b")], "each after"),
    ([*user_and("a"), {"role": "assistant", "content": "b"}], "each after"),
    ([user_and("a")[0], {**user_and("a")[1], "weight": 0}], "'weight'"),  # a mask of the loss
    (user_and("a", frames=4, end=8), "'end'"),
    # These are good.
    ([user_and("a")[0], {**user_and("a")[1], "name": "x"}], "None"),
    (user_and("a"), "None"), ([*user_and("a"), *user_and("b", frames=4)], "None"),
    ([*user_and("a"), {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}],
     "None")])
def test_a_chat_that_cannot_be_trained_on_is_refused(messages, wanted):
    """Each of these would otherwise crash later, inside a worker thread, without the name of its
    line."""
    assert wanted in str(data.chat_fault({"messages": messages}))


@pytest.mark.parametrize("spec", [{"video": "videos/none.mp4", "frames": 4},
                                  {"video": "videos/sft-0000.mp4", "start": 900, "end": 950},
                                  {"video": "init/config.json", "frames": 4}])
def test_an_unusable_video_is_skipped_by_name(toy, codec, tmp_path, capsys, spec, monkeypatch):
    """Missing, no video, or a window beyond the end: one bad file of thousands does not end a
    training."""
    rows = [{"id": "odd-one", "messages": user_and("a", **spec)}, *small_rows(toy, count=1)]
    path = write_rows(tmp_path / "d.jsonl", rows)
    if "none" in spec["video"]:
        with pytest.raises(launch.UserError, match="videos are not below .*none.mp4"):
            chats_of(path, codec, str(toy))
    monkeypatch.setattr(video, "MISSING_SHARE", 0.5)
    packs, _, skipped = chats_of(path, codec, str(toy)).packs([rows[0], rows[1], rows[0]])
    assert skipped == ["odd-one"] * 2 and len(packs) == 1 and len(packs[0].layout) == 1
    assert capsys.readouterr().out.count("skipped odd-one") == 2


def test_rows_that_went_through_arrow_are_read(tmp_path):
    """Each piece has the fields of all pieces, null where it had none."""
    fields = ("type", "text", "video", "frames", "start", "end", "fps", "max_frames", "num_frames")
    nulls = dict.fromkeys(fields)
    window = {"type": "video", "video": "film", "start": 1.0, "end": 3.0, "fps": 1.0}
    overview = {"type": "video", "video": "film", "frames": 2}
    text = {"type": "text", "text": "Which?"}
    content = [{**nulls, **piece} for piece in (window, overview, text)]
    messages = [{"role": "user", "content": content}, user_and("a")[1] | {"tool_calls": None}]
    path = write_rows(tmp_path / "d.jsonl", [{"id": 1, "messages": messages}])
    (row,) = data.read_chats(str(path))
    assert row["messages"][0]["content"] == [window, overview, text]


# ------------------------------------------------------------------------------------------------
# A training as its user runs it


STEPS = 30


@pytest.fixture(scope="module")
def training(toy, tmp_path_factory):
    """Two ranks with a shard each, one truncated video in the data -> (output folder,
    CompletedProcess, arguments)."""
    folder = tmp_path_factory.mktemp("training")
    shutil.copytree(toy / "videos", folder / "videos")
    whole = (folder / "videos" / "sft-0001.mp4").read_bytes()
    (folder / "videos" / "broken.mp4").write_bytes(whole[: len(whole) // 2])
    rows, broken = small_rows(toy, count=39), user_and("a", video="videos/broken.mp4", frames=4)
    rows.insert(5, {"id": "broken-one", "messages": broken})
    data = write_rows(folder / "sft.jsonl", rows)
    held = write_rows(folder / "val.jsonl", small_rows(toy, "sft_val", 10))
    arguments = ["--preset", "toy", "--ckpt", toy / "init", "--data", data, "--val", held,
                 "--steps", STEPS, "--batch-size", 10, "--muon-lr", 0, "--lr", 4e-3,
                 "--dp-replicate", 1, "--save-every", STEPS // 2]
    done = run_script("sft.py", *arguments, "--out", folder / "out", ranks=2, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "out", done, arguments


def test_two_ranks_learn_the_toy(training):
    """Loss falls clearly, on data and held out; everything the next stage needs is there."""
    out, done, _ = training
    rows = rows_of(out / "log.jsonl")
    losses = [r["loss"] for r in rows if "loss" in r]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, STEPS + 1))
    assert losses[0] > 5 and sum(losses[-5:]) / 5 < 0.4 * losses[0]
    _, held = (r for r in rows if "val_loss" in r)  # at each save
    assert held["val_loss"] < 0.6 * losses[0]
    assert os.readlink(out / "last") == os.readlink(out / "best") == f"step_{STEPS:06d}"
    assert "2 ranks" in done.stdout and f"done: {STEPS} steps" in done.stdout
    steps = [r for r in rows if "loss" in r]
    assert all(r["lr"] == 4e-3 * sft.schedule(n, STEPS, 0.1, 0.02) for n, r in enumerate(steps))
    assert all(r["grad_norm"] > 0 and r["trained_tokens"] < r["tokens"] for r in steps)
    # 40 chats, 10 a batch: every epoch of four steps meets the broken video once, and says so.
    counts = [row["skipped_chats"] for row in rows if "loss" in row]
    assert [sum(counts[first:first + 4]) for first in range(0, 28, 4)] == [1] * 7
    assert "skipped broken-one: " in done.stdout


@pytest.mark.process
def test_a_resumed_training_ends_with_the_same_weights(training, tmp_path):
    """Optimizer states, data order, schedule and best loss all continue: half a run and the rest of
    it are one run."""
    (out, _, arguments), half = training, tmp_path / "half"
    shutil.copytree(out, half, symlinks=True, ignore=shutil.ignore_patterns(f"step_{STEPS:06d}"))
    for name in ("last", "best"):
        (half / name).unlink()
    log = (half / "log.jsonl").read_text().splitlines()
    (half / "log.jsonl").write_text("\n".join(log[: STEPS // 2 + 1]) + "\n")
    done = run_script("sft.py", *arguments, "--out", half, ranks=2, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS // 2:04d}/" not in done.stdout
    assert f"step {STEPS // 2 + 1:04d}/" in done.stdout
    whole, resumed = (load_file(folder / f"step_{STEPS:06d}" / "model.safetensors")
                      for folder in (out, half))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)  # to the bit
    again, first = rows_of(half / "log.jsonl"), [json.loads(line) for line in log]
    assert [r["step"] for r in again] == [r["step"] for r in first]
    losses = [[r.get("loss", r.get("val_loss")) for r in rows] for rows in (again, first)]
    assert losses[0] == losses[1]
    assert "nothing to do" in run_script("sft.py", *arguments, "--out", half, ranks=2).stdout
