"""
Everything that is read and is no flag changes between two starts of a stage:
python -m pytest tests/slow/test_identity.py -q
"""
import copy
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripted import ANSWER, Scripted, calls, play

from test_identity import (  # noqa: F401  # isort: skip
    SAID, SCRIPTS, SRT, ended, films, finished, flags_of, judge_flags, newer, replace_film, rows_of,
    server, start, task, world, write_rows)

import chat
import launch
import rollout
import video
from plumbing import checkpoint, runs
from tools import pick


def changed(path, value):
    """path: keys and numbers down into a record."""
    def change(row):
        row = copy.deepcopy(row)
        place = row
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
        return row
    return change


# ------------------------------------------------------------------------------------------------
# Changed between two starts


def adapters(world):
    """The run behind --ckpt has saved adapters, whose base then becomes another model."""
    step = shutil.copytree(world / "run" / "step_000001", world / "run" / "step_000003")
    base = str(shutil.move(step, world / "base"))
    codec = chat.load_codec(base)
    launch.start_process_group()
    policy = checkpoint.load_sharded(base, codec, torch.device("cpu"), lora=2)
    checkpoint.save_checkpoint(policy, codec, str(step), {"step": 3})
    runs.replace_link(str(world / "run" / "last"), str(step))
    weights = {k: w + 0.01 for k, w in load_file(base + "/model.safetensors").items()}
    save_file(weights, base + "/model.safetensors", {"format": "pt"})


def template(world):
    path = world / "run" / "step_000001" / "chat_template.jinja"
    path.write_text(path.read_text() + "\n{# edited #}")


def lines(name, change):
    def write(world):
        (world / name).write_text("".join(change((world / name).read_text().splitlines(True))))
    return write


def text(name, content):
    return lambda world: (world / name).write_text(content)


def label(rows):
    row = json.loads(rows[0])
    if "answer" in row:
        row["answer"] = "blue"
    else:
        row["messages"][-1]["content"] = "<answer>1</answer>"
    return [json.dumps(row) + "\n", *rows[1:]]


CHANGES = {  # (stage, change) -> (function of the world, exit code, words of the line)
    **{(stage, "data"): (lines(f"{file}.jsonl", label), 2, f"{file}.jsonl")
       for stage, file in (("sft", "sft"), ("grpo", "rl"))},
    **{(stage, "checkpoint behind --ckpt"): (newer, 2, "step_000002")
       for stage in ("sft", "grpo")},
    **{(stage, "its template"): (template, 2, "step_000001") for stage in ("sft", "grpo")},
    **{(stage, "base of adapters"): (adapters, 2, "is not the checkpoint that these adapters")
       for stage in ("sft", "grpo", "eval")},
    ("sft", "held-out rows"): (lines("val.jsonl", label), 2, "--val"),
    ("grpo", "held-out rows"): (lines("held.jsonl", label), 2, "--val"),
    ("grpo", "subtitles"): (text("said.srt", SRT.replace("Red", "Blue")), 2, "subtitles"),
    **{("rollout", name): (change, 2, words) for name, change, words in (
        ("data", lines("rl.jsonl", label), "rl.jsonl"), ("template", template, "step_000001"),
        ("checkpoint behind --ckpt", newer, "step_000002"),
        ("subtitles", text("said.srt", SRT.replace("Red", "Blue")), "subtitles"))},
    **{("eval", name): (change, 2, "other settings") for name, change in {
        "data": lines("rl.jsonl", label), "checkpoint behind --ckpt": newer, "template": template,
        "subtitles": text("said.srt", SRT.replace("Red", "Blue")),
        "prompt file": text("prompt.txt", "Answer between <answer> and </answer>.")}.items()}}


@pytest.mark.parametrize("stage, name", CHANGES, ids=lambda value: value.replace(" ", "-"))
def test_what_is_read_and_is_no_flag_may_not_change_in_silence(ended, start, stage, name):
    (world, flags), (change, wanted, words) = ended(stage), CHANGES[stage, name]
    change(world)
    code, said = start(stage, *flags)
    assert code == wanted and words in said, said
    if wanted == 2 and stage in ("sft", "grpo") and "adapters" not in words:
        code, said = start(stage, *flags, "--resume")
        assert code == 0 and words in said, said


# ------------------------------------------------------------------------------------------------
# Ids


@pytest.fixture(scope="module")
def recorded(codec, toy):
    """Rows of a rollout JSONL: two samples of one task, each with one call."""
    engine = Scripted(codec, [calls((0, 8)), "I saw it.\n</think>\n<answer>0 red</answer>"])
    source = rollout.VideoSource(str(toy), video.FrameCache())
    return [e.to_dict() for e in play(engine, [task("a")], source, group=2)]


# ------------------------------------------------------------------------------------------------
# Records that no rollout.py wrote


FAULTS = {
    "mask shorter": changed(["mask"], lambda mask: mask[:-1]), "no spans": changed(["spans"], []),
    "span beyond the end": changed(["spans", -1, 1], lambda end: end + 1),
    "logp is NaN": changed(["logps", -1], float("nan")), "task of no type": changed(
        ["task", "type"], "mc"), "sub without frames": changed(["calls", 0, "sub", "vision"], [])}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_no_rollout_wrote_is_refused_with_the_field(recorded, fault):
    row = FAULTS[fault](recorded[0])
    line = json.dumps(row)
    _, why = launch.read_row(line, (), pick.record_fault)
    assert why and "\n" not in why
    assert launch.read_row(json.dumps(recorded[0]), (), pick.record_fault)[1] is None


# ------------------------------------------------------------------------------------------------
# Films


def test_a_film_replaced_between_overview_and_crop_is_a_counted_error(films, codec):
    source = rollout.VideoSource(str(films), video.FrameCache())

    def main(request):
        replace_film(films)
        return calls((0, 8)) if len(engine.requests) == 1 else ANSWER

    engine = Scripted(codec, main)
    before, sampler = list(video.identity(str(films / "rl-0000.mp4"))), rollout.RolloutWorker(
        engine, codec, source, rollout.AgentConfig())
    (episode,) = rollout.run(sampler, [task("a", video="rl-0000.mp4")], 4, tries=1)
    (record,) = episode.calls
    assert record["status"] == "video_error" and "changed" in record["summary"]
    assert str(films) not in record["summary"] and not engine.subs()
    assert episode.to_dict()["fingerprint"] == episode.fingerprint == before
    assert before != list(video.identity(str(films / "rl-0000.mp4")))


def test_rows_from_a_pipe_have_no_digest(tmp_path):
    """Read a second time it is empty: a resume would take other rows."""
    os.mkfifo(tmp_path / "rows")
    pytest.raises(launch.UserError, runs.digest_of, [(tmp_path, "rows")]).match("regular file")
