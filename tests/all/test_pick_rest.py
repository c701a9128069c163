"""
More tests of tools/pick.py: a cold start from a teacher behind an endpoint, as its user walks it:
python -m pytest --all tests/all/test_pick_rest.py
"""
import json
from types import SimpleNamespace

import pytest
from conftest import run_script
from scripted import Server, calls
from test_pick import recorded  # noqa: F401

import launch
import rewards
import rollout
from evaluation import results, scores
from tools import pick


def teacher(tasks):
    """A teacher that calls the evidence of even tasks and a wrong place of odd ones, and is right
    but for the last task."""
    by_question = {(task["question"], task["video"]): task for task in tasks}

    def reply(body):
        text = json.dumps(body["messages"])
        asked = [task for (question, _), task in by_question.items() if question in text]
        if body["messages"][0]["content"] == rollout.SUB_PROMPT:
            return "18 purple"
        task = asked[0]
        number = tasks.index(task)
        if not any(rewards.parse_tool_calls(str(m["content"])) for m in body["messages"][1:]
                   if m["role"] == "assistant"):
            return calls(*(task["evidence"] if number % 2 == 0 else [[62, 64]]))
        answer = "mauve" if number == len(tasks) - 1 else task["answer"]
        return f"I saw it.\n</think>\n<answer>{answer}</answer>"

    return reply


def test_a_cold_start_from_a_teacher_behind_an_endpoint(toy, tmp_path):
    """eval.py asks the endpoint, pick.py sorts its records, sft.py trains on the chats."""
    tasks = [json.loads(line) for line in (toy / "rl.jsonl").read_text().splitlines()]
    # A question of its own for each task, so that the script knows which film it is asked about.
    tasks = [{**task, "question": f"{n}. {task['question']}", "evidence": [[8 * n, 8 * n + 8]]}
             for n, task in enumerate(tasks[:5])]
    data, out, chats = tmp_path / "tasks.jsonl", tmp_path / "teacher", tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with Server(teacher(tasks)) as server:
        done = run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "t",
                          "--data", data, "--video-root", toy, "--frames", 4, 8, "--tools", "on",
                          "--samples", 2, "--temperature", 0.7, "--max-pixels", 1024, "--out", out)
    assert done.returncode == 0, done.stderr
    done = run_script("tools/pick.py", *out.glob("records.*"), "--best", chats, "--recall", 0.5)
    assert done.returncode == 0, done.stderr
    # Tasks 0 and 2 are right and looked at the evidence, 1 and 3 elsewhere, and 4 is wrong.
    # A prompt is a task at one K, and a cold start needs every K.
    assert "4 of 10 prompts have a good rollout: 8 chats" in done.stdout
    assert "8 good, 8 looked elsewhere, 4 wrong" in done.stdout
    done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data", chats,
                      "--video-root", toy, "--steps", 1, "--batch-size", 2, "--out",
                      tmp_path / "sft")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sft" / "last" / "model.safetensors").exists()


def test_fewest_calls_takes_the_right_rollout_that_did_without(recorded, tmp_path):
    """Samples 1 and 2 of task a are right. Sample 1 called, and R_tool paid for it."""
    (a, *_) = pick.groups([recorded])
    assert [e.reward["acc"] for e in a] == [0.0, 1.0, 1.0, 0.0]
    assert pick.best(a).sample == 1 and pick.best(a, fewest_calls=True).sample == 2
    # a better answer is worth its calls, and so are whole tags
    a[2].reward["acc"] = 0.75
    assert pick.best(a, fewest_calls=True).sample == 1
    a[2].reward["acc"], a[2].turns = 1.0, ["<answer>0 red"]
    assert pick.best(a, fewest_calls=True).sample == 1
    found = {}
    for flags in ((), ("--fewest-calls",)):
        done = run_script("tools/pick.py", recorded, "--best", tmp_path / "c.jsonl", *flags)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
        found[flags] = sum("crop_video" in m["content"] for row in rows for m in row["messages"]
                           if m["role"] == "assistant")
    assert found == {(): 1, ("--fewest-calls",): 0}


def test_chats_from_text_are_those_from_ids(recorded, tmp_path):
    """Records of eval.py hold no ids. Failed replies, other frames and rows of --show are left."""
    episodes = [rollout.from_json(json.loads(row)) for row in recorded.read_text().splitlines()]
    flags = SimpleNamespace(protocol="paravt")
    rows = [results.record_of(e, "d", e.num_frames, mode, flags) for e in episodes
            for mode in map(scores.mode_of, ({"tools": "on", "show": "real"},
                                                       {"tools": "on", "show": "blank"}))]
    path = tmp_path / "records.rank0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = rollout.Agent()
    (tmp_path / "args.json").write_text(json.dumps(vars(agent)))
    ids, text = pick.groups([recorded]), pick.groups([str(path)])
    assert [len(group) for group in text] == [len(group) for group in ids] == [4, 4, 4]
    for one, other in zip(ids, text):
        assert [pick.chats(e) for e in one] == [pick.chats(e) for e in other]
    assert pick.chats(pick.best(text[0])) == pick.chats(pick.best(ids[0]))


def records_of(recorded, folder, change=lambda row: row, **settings):  # noqa: F811
    """The rollouts as records of an evaluation -> their path. change: of each rollout."""
    flags, rows = SimpleNamespace(protocol="paravt"), []
    for line in recorded.read_text().splitlines():
        episode = rollout.from_json(change(json.loads(line)))
        mode = scores.mode_of({"tools": "on", "show": "real"})
        rows.append(results.record_of(episode, "d", episode.num_frames, mode, flags))
    folder.mkdir(exist_ok=True)
    path = folder / "records.rank0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.json").write_text(json.dumps({**vars(rollout.Agent()), **settings}))
    return path


def test_records_hold_all_that_the_agents_were_told(recorded, tmp_path):  # noqa: F811
    """The lines that were spoken, and whether sub-agents knew the question."""
    def change(row):
        return {**row, "subtitles": "<3.0> Look, it is red."}

    path = records_of(recorded, tmp_path / "e", change, sub_question=False)
    ids = tmp_path / "r.jsonl"
    ids.write_text("".join(json.dumps(change(json.loads(line))) + "\n"
                           for line in recorded.read_text().splitlines()))
    for one, other in zip(pick.groups([ids]), pick.groups([str(path)])):
        assert [pick.chats(e, sub_question=False) for e in one] == [pick.chats(e) for e in other]
        assert "Look, it is red." in json.dumps(pick.chats(other[0]))


@pytest.mark.parametrize("settings, why", [
    ({"protocol": "conan"}, "--protocol paravt"), ({"crop_reply": "frames"}, "--protocol paravt"),
    ({}, "another task")])
def test_records_that_cannot_be_chats_of_this_agent_are_refused(
        recorded, tmp_path, settings, why):  # noqa: F811
    one = records_of(recorded, tmp_path / "a")
    other = records_of(recorded, tmp_path / "b", lambda row: {
        **row, "task": {**row["task"], "question": row["task"]["question"] + "?" * (not settings)}},
        **settings)
    with pytest.raises(launch.UserError, match=why):
        pick.groups([str(one), str(other)])
    path = records_of(recorded, tmp_path / "blind", lambda row: {**row, "K": 0})
    assert pick.groups([str(path)]) == []


def test_windows_and_films_decide_too(recorded, tmp_path):
    rows = [json.loads(row) for row in recorded.read_text().splitlines()]
    for row in rows:
        row["task"]["evidence"], row["task"]["video"] = [[0, 8], [40, 48]], "videos/rl-0000.mp4"
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (a, *_) = pick.groups([path])
    assert a[1].reward["windows"]["recall"] == 0.5
    assert pick.best(a, recall=0.5).sample == 1 and pick.best(a, recall=0.6).sample == 2
    out = tmp_path / "chats.jsonl"
    for flags, main, why in (((), 2, "6 good, 6 wrong"), (("--per-video", 1), 1, "6 good"),
                             (("--recall", 0.6), 2, "1 looked elsewhere")):
        done = run_script("tools/pick.py", path, "--best", out, *flags)
        assert f"{main} of main agents" in done.stdout and why in done.stdout, done.stdout
