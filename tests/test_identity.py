"""
Tests of identity: python -m pytest tests/test_identity.py -q

Everything that is read and is no flag is changed between two starts of the same command. Each start
then says so in a line, or ends with exit code 2 and one line. Then ids, films that are replaced
while they are read, records that no rollout.py wrote, and weights that are no numbers.
"""
import copy
import json
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import make_engine
from safetensors.torch import load_file, save_file
from scripted import ANSWER, Scripted, Server, calls, play, play_one
from test_eval import Scripted as EvalEngine

import chat
import checkpoint
import data
import eval as evaluation
import grpo
import launch
import rollout
import sft
import video
from endpoint import open_judge
from tools import pick, records, replay

SCRIPTS = {"sft": sft, "grpo": grpo, "rollout": rollout, "eval": evaluation, "pick": pick,
           "replay": replay, "records": records}
SAID = {"id": "said", "video": "videos/rl-0000.mp4", "question": "Which?", "answer": "crimson",
        "options": None, "type": "open", "subtitles": "said.srt"}
SRT = "1\n00:00:00,000 --> 00:01:00,000\nRed it is\n"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def start(monkeypatch, capsys, codec):
    """start(script, *flags) -> (exit code, what it printed). vLLM is the reference engine, or the
    scripted one in eval.py."""
    def engine(ckpt, codec_, args, *more, **named):
        if sys.argv[0].startswith("eval"):
            return EvalEngine(codec, lambda request: ANSWER)
        return make_engine(ckpt, codec_, args)

    monkeypatch.setattr(rollout, "make_engine", engine)
    before = signal.getsignal(signal.SIGTERM)

    def start(script, *flags):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        capsys.readouterr()
        try:
            launch.run_main(SCRIPTS[script].main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        launch.unlock()
        out, err = capsys.readouterr()
        assert code == 0 or len(err.splitlines()) == 1, err
        return code, out + err

    yield start
    signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------
# Changed between two starts


def flags_of(script, world):
    """The command of a stage in a world."""
    common = ("--preset", "toy", "--ckpt", world / "run", "--out", world / script)
    return {
        "sft": (*common, "--data", world / "sft.jsonl", "--val", world / "val.jsonl",
                "--batch-size", 2, "--steps", 1),
        "grpo": (*common, "--data", world / "rl.jsonl", "--val", world / "held.jsonl", "--steps", 1,
                 "--prompts", 2, "--group", 2, "--frames", 4, "--max-new-tokens", 4,
                 "--show-every", 0),
        "rollout": (*common[:4], "--data", world / "rl.jsonl", "--frames", 4, "--max-new-tokens", 4,
                    "--out", world / "rollout.jsonl"),
        "eval": (*common, "--data", world / "rl.jsonl", "--frames", 4, "--allow-errors",
                 "--protocol", "direct", "--prompt-file", world / "prompt.txt"),
    }[script]


def judge_flags(server):
    return ("--judge-url", server.url, "--judge-model", "m")


@pytest.fixture
def server():
    with Server("no") as server:
        yield server


@pytest.fixture(scope="module")
def world(toy, tmp_path_factory):
    """Folder of all that the stages read: small files, and a run folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("identity") / "world"
    shutil.copytree(toy / "videos", folder / "videos")
    step = folder / "run" / "step_000001"
    shutil.copytree(toy / "init", step)
    checkpoint.symlink(str(folder / "run" / "last"), str(step))
    short = [r for r in rows_of(toy / "sft.jsonl") if r["id"].endswith("-4") or "-sub-" in r["id"]]
    write_rows(folder / "sft.jsonl", short[:5])
    write_rows(folder / "val.jsonl", short[5:7])
    tasks = rows_of(toy / "rl.jsonl")
    write_rows(folder / "rl.jsonl", [SAID, *tasks[:3]])
    write_rows(folder / "held.jsonl", tasks[3:4])
    (folder / "said.srt").write_text(SRT)
    (folder / "prompt.txt").write_text("Look, then answer between <answer> and </answer>.")
    return folder


def newer(world):
    """The run behind --ckpt has saved again."""
    step = shutil.copytree(world / "run" / "step_000001", world / "run" / "step_000002")
    weights = {k: w + 0.01 for k, w in load_file(step / "model.safetensors").items()}
    save_file(weights, step / "model.safetensors", {"format": "pt"})
    checkpoint.symlink(str(world / "run" / "last"), str(step))


def adapters(world):
    """The run behind --ckpt has saved adapters, whose base then becomes another model."""
    step = shutil.copytree(world / "run" / "step_000001", world / "run" / "step_000003")
    base = str(shutil.move(step, world / "base"))
    codec = chat.load_codec(base)
    launch.start_process_group()
    policy = checkpoint.load_sharded(base, codec, torch.device("cpu"), lora=2)
    checkpoint.save_checkpoint(policy, codec, str(step), {"step": 3})
    checkpoint.symlink(str(world / "run" / "last"), str(step))
    weights = {k: w + 0.01 for k, w in load_file(base + "/model.safetensors").items()}
    save_file(weights, base + "/model.safetensors", {"format": "pt"})


def template(world):
    path = world / "run" / "step_000001" / "chat_template.jinja"
    path.write_text(path.read_text() + "\n{# edited #}")


def lines(name, change):
    def write(world):
        (world / name).write_text("".join(change((world / name).read_text().splitlines(True))))
    return write


def film(world):
    """Each film is replaced by another one."""
    whole = (world / "videos" / "base-0000.mp4").read_bytes()
    for path in (world / "videos").glob("*.mp4"):
        path.write_bytes(whole)


def verdicts(name):
    return lambda world: lines(name, lambda rows: [
        row.replace('"verdict": false', '"verdict": true') for row in rows])(world)


def text(name, content):
    return lambda world: (world / name).write_text(content)


def label(rows):
    row = json.loads(rows[0])
    if "answer" in row:
        row["answer"] = "blue"
    else:
        row["messages"][-1]["content"] = "<answer>1</answer>"
    return [json.dumps(row) + "\n", *rows[1:]]


DATA = {"appended": lambda rows: [*rows, rows[0].replace('"id": "', '"id": "new-')],
        "reordered": lambda rows: rows[::-1], "halved": lambda rows: rows[: len(rows) // 2],
        "label": label}
CHANGES = {  # (stage, change) -> (function of the world, exit code, words of the line)
    **{(stage, f"data {name}"): (lines(f"{file}.jsonl", change), 2, f"{file}.jsonl")
       for stage, file in (("sft", "sft"), ("grpo", "rl")) for name, change in DATA.items()},
    **{(stage, "checkpoint behind --ckpt"): (newer, 2, "step_000002")
       for stage in ("sft", "grpo")},
    **{(stage, "its template"): (template, 2, "step_000001") for stage in ("sft", "grpo")},
    **{(stage, "base of adapters"): (adapters, 2, "is not the checkpoint that these adapters")
       for stage in ("sft", "grpo", "eval")},
    **{(stage, "films"): (film, 0, "films") for stage in ("sft", "grpo")},
    ("sft", "held-out rows"): (lines("val.jsonl", label), 2, "--val"),
    ("grpo", "held-out rows"): (lines("held.jsonl", label), 2, "--val"),
    ("grpo", "subtitles"): (text("said.srt", SRT.replace("Red", "Blue")), 2, "subtitles"),
    ("grpo", "verdicts"): (verdicts("grpo/judge.jsonl"), 0, "judge.jsonl"),
    **{("rollout", name): (change, 2, words) for name, change, words in (
        ("data", lines("rl.jsonl", label), "rl.jsonl"), ("template", template, "step_000001"),
        ("checkpoint behind --ckpt", newer, "step_000002"),
        ("subtitles", text("said.srt", SRT.replace("Red", "Blue")), "subtitles"))},
    ("rollout", "films"): (film, 0, "films changed since"),
    **{("eval", name): (change, 2, "other settings") for name, change in {
        "data": lines("rl.jsonl", label), "checkpoint behind --ckpt": newer, "template": template,
        "subtitles": text("said.srt", SRT.replace("Red", "Blue")),
        "prompt file": text("prompt.txt", "Answer between <answer> and </answer>.")}.items()},
    ("eval", "films"): (film, 0, "4 of 4 records are of films that have changed"),
    ("eval", "verdicts"): (verdicts("eval/judge.jsonl"), 2, "judge.jsonl:1"),
}


@pytest.fixture(scope="module")
def finished():
    return {}  # stage -> world in which it has ended


@pytest.fixture
def ended(world, start, server, finished, tmp_path):
    """ended(stage) -> a copy of the world in which the stage has ended, and its flags there. The
    copy lies elsewhere: the place of a file is not its identity."""
    def ended(stage):
        if stage not in finished:
            finished[stage] = shutil.copytree(world, world.parent / stage, symlinks=True)
            judge = judge_flags(server) if stage != "sft" else ()
            code, said = start(stage, *flags_of(stage, finished[stage]), *judge)
            assert code == 0, said
            if stage == "grpo":  # the random model gave no answer to judge
                names = ("judge_url", "judge_model", "judge_key_env")
                asked = SimpleNamespace(**dict(zip(names, (server.url, "m", None))))
                judge = open_judge(asked, str(finished[stage] / "grpo" / "judge.jsonl"))
                assert judge.ask("Which?", "crimson", "red")[0].result() is False
                judge.close()
        copied = shutil.copytree(finished[stage], tmp_path / "world", symlinks=True)
        judge = judge_flags(server) if stage != "sft" else ()
        return copied, (*flags_of(stage, copied), *judge)

    return ended


@pytest.mark.parametrize("stage", ["sft", "grpo", "rollout", "eval"])
def test_a_second_start_of_an_unchanged_world_says_nothing_of_changes(ended, start, stage):
    _, flags = ended(stage)
    code, said = start(stage, *flags)
    assert code == 0 and "changed" not in said, said
    assert ("nothing to do" in said) == (stage != "eval")


@pytest.mark.parametrize("stage, name", CHANGES, ids=lambda value: value.replace(" ", "-"))
def test_what_is_read_and_is_no_flag_may_not_change_in_silence(ended, start, stage, name):
    world, flags = ended(stage)
    change, wanted, words = CHANGES[stage, name]
    change(world)
    code, said = start(stage, *flags)
    assert code == wanted and words in said, said
    if wanted == 2 and stage in ("sft", "grpo") and "adapters" not in words:
        code, said = start(stage, *flags, "--resume")
        assert code == 0 and words in said, said


def test_the_reference_of_the_kl_is_kept_with_its_folder_and_named_if_it_changes(ended, start):
    world, flags = ended("grpo")
    state = json.loads((world / "grpo" / "step_000001" / "state.json").read_text())
    digest, folder = state["inputs"]["--ckpt"]
    step = world / "run" / "step_000001"
    assert folder.endswith("run/step_000001") and digest == checkpoint.content_digest(str(step))
    newer(world)
    code, said = start("grpo", *flags)
    assert code == 2 and "run/step_000002" in said and "run/step_000001" in said
    assert "--ckpt" in said and "--resume" in said
    flags = [step if flag == world / "run" else flag for flag in flags]  # the remedy
    code, said = start("grpo", *flags)
    assert code == 0 and "nothing to do" in said


@pytest.mark.parametrize("stage, other", [("sft", True), ("grpo", False)],
                         ids=["another --val", "same file"])
def test_best_begins_anew_with_other_held_out_rows(ended, start, stage, other):
    """The best so far could not be beaten, but it was measured on other rows."""
    world, flags = ended(stage)
    held = world / {"sft": "val.jsonl", "grpo": "held.jsonl"}[stage]
    state = world / stage / "step_000001" / "state.json"
    kept = {**json.loads(state.read_text()), "best": 0.0 if stage == "sft" else 2.0}
    state.write_text(json.dumps({**kept, "own_crc32": launch.own_sum(kept)}))
    target = world / "other.jsonl" if other else held
    target.write_text("".join(label(held.read_text().splitlines(True))))
    flags = [target if flag == held else flag for flag in flags]
    flags[flags.index("--steps") + 1] = 2
    code, said = start(stage, *flags, "--resume")
    assert code == 0 and "`best` begins anew" in said, said
    assert os.readlink(world / stage / "best") == "step_000002"


# ------------------------------------------------------------------------------------------------
# Ids


def task(name, **more):
    return {"id": name, "video": "videos/rl-0000.mp4", "question": "Which?", "options": None,
            "answer": "0 red", "type": "list", **more}


def test_ids_are_counted_as_strings(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [task(7), task("a"), task("7")])
    with pytest.raises(launch.UserError, match="not unique: 7 is there 2 times"):
        data.read_tasks(str(path))


IDS = ["a", "a/0", "a/0/0", "a%2F0", "0", "0/a", "a/"]


def test_no_id_can_imitate_a_part_of_a_name(codec, toy, tmp_path):
    """Names of groups and requests, seeds, and the ids of the chats of tools/pick.py."""
    engine = Scripted(codec, lambda r: calls((0, 8)) if r.ids[-1:] and len(r.items) == 1 and
                      r.max_tokens == 512 and len(r.ids) < 700 else ANSWER, sub="0 red")
    source = rollout.Source(str(toy), video.FrameCache())
    episodes = play(engine, [task(name) for name in IDS], source, group=2)
    names = [request.id for request in engine.requests]
    assert len(names) == len(set(names)) > 3 * len(episodes)
    assert len({request.seed for request in engine.requests}) == len(names)
    assert len({episode.group for episode in episodes}) == len(IDS)
    rows = [row for e in episodes for row in pick.chats(e)]
    assert len({row["id"] for row in rows}) == len(rows) > 2 * len(episodes) - 1


def test_each_id_has_its_own_costs(start, world, tmp_path):
    folder = shutil.copytree(world, tmp_path / "world", symlinks=True)
    write_rows(folder / "rl.jsonl", [{**SAID, "id": name} for name in IDS])
    flags = [flag for flag in flags_of("eval", folder) if flag not in ("--protocol", "direct")]
    code, said = start("eval", *flags[:-2])
    assert code == 0, said
    costs = [record["cost"] for path in (folder / "eval").glob("records.*")
             for record in rows_of(path)]
    assert len(costs) == len(IDS) and len({cost["prompt_tokens"] for cost in costs}) == 1
    assert all(cost["sampled_tokens"] for cost in costs)


@pytest.fixture(scope="module")
def recorded(codec, toy):
    """Rows of a rollout JSONL: two samples of one task, each with one call."""
    engine = Scripted(codec, [calls((0, 8)), "I saw it.\n</think>\n<answer>0 red</answer>"])
    source = rollout.Source(str(toy), video.FrameCache())
    return [e.to_json() for e in play(engine, [task("a")], source, group=2)]


@pytest.mark.parametrize("second, words", [
    (lambda rows: rows, "a"), (lambda rows: rows[:1], "a"),
    (lambda rows: [{**row, "task": {**row["task"], "answer": "8 blue"}, "group": "1/a"}
                   for row in rows], "another task"),
    (lambda rows: [{**rows[0], "sample": 5, "ids": [rows[0]["ids"][0] + 1, *rows[0]["ids"][1:]]}],
     "prompt")], ids=["twice", "one twice", "another task", "another prompt"])
def test_rollouts_that_do_not_belong_together_are_refused_by_id(
        start, recorded, toy, tmp_path, second, words):
    paths = [write_rows(tmp_path / "1.jsonl", recorded),
             write_rows(tmp_path / "2.jsonl", second(recorded))]
    for script, flags in (("pick", ["--best", tmp_path / "best.jsonl", *paths]),
                          ("replay", ["--ckpt", toy / "init", "--rollouts", *paths]),
                          ("records", paths)):
        code, said = start(script, *flags)
        assert code == 2
        assert "task a" in said and words in said and "2.jsonl" in said


# ------------------------------------------------------------------------------------------------
# Records that no rollout.py wrote


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


FAULTS = {
    "mask shorter": changed(["mask"], lambda mask: mask[:-1]),
    "logps longer": changed(["logps"], lambda logps: [*logps, 0.0]),
    "mask of twos": changed(["mask"], lambda mask: [2 * m for m in mask]),
    "mask moved": changed(["mask"], lambda mask: [*mask[1:], mask[0]]),
    "logp is text": changed(["logps", -1], "x"),
    "logp is NaN": changed(["logps", -1], float("nan")),
    "ids are texts": changed(["ids"], lambda ids: list(map(str, ids))),
    "id below 0": changed(["ids", 0], -1),
    "no spans": changed(["spans"], []),
    "span beyond the end": changed(["spans", -1, 1], lambda end: end + 1),
    "span reversed": changed(["spans", 0], lambda span: span[::-1]),
    "span is a number": changed(["spans", 0], 5),
    "turns are numbers": changed(["turns"], [1, 2]),
    "turn missing": changed(["turns"], lambda turns: turns[:1]),
    "finish is null": changed(["finish"], None),
    "call is a text": changed(["calls", 0], "crop"),
    "call without status": changed(["calls", 0], {"turn": 0}),
    "sub_tokens is text": changed(["calls", 0, "sub_tokens"], "9"),
    "sub without frames": changed(["calls", 0, "sub", "vision"], []),
    "sample is text": changed(["sample"], "0"),
    "K is null": changed(["K"], None),
    "group is a number": changed(["group"], 3),
    "task is a text": changed(["task"], "a"),
    "task of no type": changed(["task", "type"], "mc"),
    "task without video": changed(["task"], lambda task: {"id": "a", "answer": "x"}),
    "reward is a number": changed(["reward"], 1.0),
    "unknown status": changed(["status"], "fine"),
    "think_open is text": changed(["think_open"], "yes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_no_rollout_wrote_is_refused_with_the_field(recorded, fault):
    row = FAULTS[fault](recorded[0])
    line = json.dumps(row)
    _, why = launch.read_row(line, records.record_shape(), records.record_fault)
    assert why and "\n" not in why
    assert launch.read_row(json.dumps(recorded[0]), (), records.record_fault)[1] is None


def test_records_of_failed_episodes_and_of_questions_are_good(codec, toy):
    source = rollout.Source(str(toy), video.FrameCache())
    broken = play_one(Scripted(codec, [ANSWER]), [task("a", video="none.mp4")], source)
    asked = play_one(Scripted(codec, [ANSWER]), [task("a", answer=None)], source)
    small = play_one(Scripted(codec, [ANSWER]), [task("a")], source,
                     rollout.Agent(context=20))
    for episode in (broken, asked, small):
        row = json.loads(json.dumps(episode.to_json()))
        assert records.record_fault(row) is None
        assert rollout.from_json(row).to_json() == row
    assert (broken.status, asked.status, small.status) == ("video_error", "ok", "context")


# ------------------------------------------------------------------------------------------------
# Films


@pytest.fixture
def films(toy, tmp_path):
    """Folder with a film to replace, and another one."""
    for name in ("rl-0000", "rl-0001"):
        shutil.copy(toy / "videos" / f"{name}.mp4", tmp_path / f"{name}.mp4")
    return tmp_path


def replace_film(folder):
    shutil.copy(folder / "rl-0001.mp4", folder / "new.mp4")
    os.replace(folder / "new.mp4", folder / "rl-0000.mp4")


def test_a_film_replaced_while_it_is_read_is_an_error_and_is_not_kept(films, monkeypatch):
    path, cache = str(films / "rl-0000.mp4"), video.FrameCache()
    real = video._read
    monkeypatch.setattr(video, "_read", lambda *given: (replace_film(films), real(*given))[1])
    with pytest.raises(video.VideoError, match="changed while it was read"):
        video.overview(path, 4, cache=cache)
    monkeypatch.setattr(video, "_read", real)
    seen = video.overview(path, 4, cache=cache)
    wanted = video.overview(str(films / "rl-0001.mp4"), 4)
    assert np.array_equal(seen.images, wanted.images)


def test_a_film_replaced_between_overview_and_crop_is_a_counted_error(films, codec):
    source = rollout.Source(str(films), video.FrameCache())

    def main(request):
        replace_film(films)
        return calls((0, 8)) if len(engine.requests) == 1 else ANSWER

    engine = Scripted(codec, main)
    before = list(video.identity(str(films / "rl-0000.mp4")))
    episode = play_one(engine, [task("a", video="rl-0000.mp4")], source)
    (record,) = episode.calls
    assert record["status"] == "video_error" and "changed" in record["summary"]
    assert str(films) not in record["summary"] and not engine.subs()
    assert episode.to_json()["film"] == episode.film == before
    assert before != list(video.identity(str(films / "rl-0000.mp4")))


def test_a_film_replaced_while_the_overview_is_read_is_a_counted_error(films, codec, monkeypatch):
    source = rollout.Source(str(films), video.FrameCache())
    real = rollout.Source.duration
    monkeypatch.setattr(rollout.Source, "duration", lambda self, spec: (
        replace_film(films), real(self, spec))[1])
    episode = play_one(Scripted(codec, [ANSWER]), [task("a", video="rl-0000.mp4")], source)
    assert episode.status == "video_error" and "changed" in episode.error


def test_the_identity_of_a_folder_of_frames_is_remembered_for_some_seconds(tmp_path, monkeypatch):
    from PIL import Image

    for number in range(3):
        Image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "fps").write_text("1")
    looked, real, clock = [], os.scandir, [100.0]
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))
    monkeypatch.setattr(video.time, "monotonic", lambda: clock[0])
    first = video.identity(str(tmp_path))
    assert [video.identity(str(tmp_path)) for _ in range(9)] == [first] * 9 and len(looked) == 1
    (tmp_path / "fps").write_text("2.0")
    clock[0] += 60
    assert video.identity(str(tmp_path)) != first and len(looked) == 2


# ------------------------------------------------------------------------------------------------
# Refused, not cut and not trained on


@pytest.mark.parametrize("count", [26, 27])
def test_more_options_than_letters_are_refused(tmp_path, count):
    row = task("a", type="mcq", answer="B", options=[f"option {n}" for n in range(count)])
    path = write_rows(tmp_path / "t.jsonl", [row])
    if count == 26:
        assert "Z. option 25" in rollout.question_text(data.read_tasks(str(path))[0])
    else:
        with pytest.raises(launch.UserError, match="t.jsonl:1: 27 options"):
            data.read_tasks(str(path))


@pytest.mark.parametrize("damage, words", [
    (lambda w: w.fill_(0), "zeros"), (lambda w: w[-1:].fill_(float("nan")), "no number"),
    (lambda w: w[:1].fill_(float("inf")), "no number")], ids=["zeros", "NaN", "infinity"])
def test_weights_that_are_no_numbers_or_all_zero_are_refused(toy, tmp_path, damage, words):
    folder = shutil.copytree(toy / "init", tmp_path / "ckpt")
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("layers.1.mlp.up_proj.weight"))
    damage(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(launch.UserError, match=f"{name}.*{words}"):
        checkpoint.resolve_checkpoint(str(folder))


def test_ids_beyond_the_vocabulary_are_refused(recorded, codec):
    row = copy.deepcopy(recorded[0])
    row["ids"][0] = 10**6
    with pytest.raises(launch.UserError, match="0/a, sample 0: .* not of this checkpoint"):
        replay.complete([rollout.from_json(row)], codec)
