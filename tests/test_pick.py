"""
Tests of tools/pick.py: python -m pytest tests/test_pick.py -q
"""
import json
from types import SimpleNamespace

import pytest
from conftest import run_script
from scripted import Scripted, calls, play

import data
import rollout
import sft
import video
from evaluation import folders, scores
from tools import pick, view

TASKS = [{"id": name, "video": f"videos/rl-000{n}.mp4", "question": "Which?", "options": None,
          "answer": "0 red", "type": "list"} for n, name in enumerate(("a", "b", "c"))]
GOOD, BAD = "I saw it.\n</think>\n<answer>0 red</answer>", "No.\n</think>\n<answer>8 blue</answer>"


@pytest.fixture(scope="module")
def recorded(codec, toy, tmp_path_factory):
    """Four rollouts of three tasks: half good, none good, all good with one cut off."""
    def main(request):
        _, name, sample, turn = request.id.split("/")
        if name == "a" and sample == "1" and turn == "0":
            return calls((0, 8), (90, 80), (16, 24))
        return {"a": GOOD if sample in "12" else BAD, "b": BAD, "c": GOOD}[name]

    source = rollout.Source(str(toy), video.FrameCache())
    episodes = play(Scripted(codec, main, sub="0 red"), TASKS, source, group=4)
    path = tmp_path_factory.mktemp("rollouts") / "r.jsonl"
    path.write_text("".join(json.dumps(e.to_json()) + "\n" for e in episodes))
    return path


def test_a_chat_holds_the_ids_that_were_sampled(recorded, codec, toy, tmp_path):
    """sft.py's own reader encodes each chat; the main agent's and the sub-agents' ids, masks and
    frames are those of the rollout."""
    (group, *_) = pick.groups([recorded])
    episode = pick.best(group)
    assert episode.sample == 1 and len(episode.calls) == 3
    rows = pick.chats(episode)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = SimpleNamespace(video_root=str(toy), min_pixels=1024, max_pixels=50176,
                           max_len=4096)
    chats = sft.Chats(str(path), codec, args, video.FrameCache())
    subs = [call["sub"] for call in episode.calls if "sub" in call]
    contexts = [(episode.context.ids, episode.context.mask)] + [(s["ids"], s["mask"]) for s in subs]
    assert len(rows) == len(contexts) == 3
    for number, (ids, mask) in enumerate(contexts):
        chat = chats[number]
        assert list(chat.ids) == ids
        # A forced <think> is trained by SFT and not by RL.
        assert all(ours >= theirs for ours, theirs in zip(chat.mask, mask))
        assert sum(chat.mask) - sum(mask) == (2 * 2 if number == 0 else 0)


def test_the_best_is_the_highest_reward_then_the_fewest_calls(recorded):
    a, b, c = pick.groups([recorded])
    assert pick.best(b) is None and pick.best(b, least=0.0) is not None
    assert not pick.best(c).calls
    c[0].finish, c[0].reward["total"] = ["length"], 9.0
    assert pick.best(c) is not c[0]
    c[1].status, c[1].reward["total"] = "context", 9.0
    assert pick.best(c) not in c[:2]
    tokens = [sum(e.context.mask) for e in c[2:]]
    assert tokens[0] == tokens[1]
    c[3].context.mask = c[3].context.mask[:-1]
    assert pick.best(c) is c[3]


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


def test_the_band_takes_tasks_whose_rollouts_disagree(recorded, tmp_path):
    for band, wanted in (((0.2, 0.8), ["a"]), ((0, 0), ["b"]), ((0.5, 1), ["a", "c"])):
        out = tmp_path / "tasks.jsonl"
        done = run_script("tools/pick.py", recorded, "--band", *band, out)
        assert done.returncode == 0, done.stderr
        rows = data.read_tasks(str(out))
        assert [row["id"] for row in rows] == wanted
        assert rows == [task for task in TASKS if task["id"] in wanted]


def test_the_command_and_its_flags(recorded, tmp_path):
    out = tmp_path / "chats.jsonl"
    done = run_script("tools/pick.py", recorded, "--best", out)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 tasks have a good rollout: 4 chats, 2 of main agents" in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert "Question:" in rows[1]["messages"][1]["content"][1]["text"] and "tools" in rows[0]
    run_script("tools/pick.py", recorded, "--best", out, "--no-sub-question", "--no-tools",
               "--least", 0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5 and "tools" not in rows[0]
    assert "Question:" not in rows[1]["messages"][1]["content"][1]["text"]
    assert "crop_video" not in rows[0]["messages"][0]["content"]


def test_chats_from_text_are_those_from_ids(recorded, tmp_path):
    """Records of eval.py hold no ids. Failed replies, other frames and rows of --show are left."""
    episodes = [rollout.from_json(json.loads(row)) for row in recorded.read_text().splitlines()]
    flags = SimpleNamespace(protocol="paravt")
    rows = [folders.record_of(e, "d", e.num_frames, mode, flags) for e in episodes
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
        kept = tmp_path / "kept.jsonl"
        done = run_script("tools/pick.py", path, "--best", out, "--kept", kept, *flags)
        assert f"{main} of main agents" in done.stdout and why in done.stdout, done.stdout
        told = [json.loads(line) for line in kept.read_text().splitlines()]
        assert [{k: v for k, v in row.items() if k != "picked"} for row in told] == rows
        found = [row["picked"] for row in told]
        assert found.count("kept") == main and found.count("wrong") == 6
        assert found.count("enough of this film") == 4 * ("--per-video" in flags)
        assert found.count("looked elsewhere") == ("--recall" in flags)
        page = view.build([str(kept)], None, str(tmp_path / "page.html"), 100, 20.0, None, 1024)
        assert sorted(e["picked"] for e in page["episodes"]) == sorted(found)


@pytest.mark.parametrize("flags, why", [
    ((), "give --best"), (("--band", "0", "1", "t", "--kept", "k"), "give both"),
    (("--band", "x", "1", "t"), "two numbers"),
    (("--band", "0.9", "0.1", "t"), "LOW <= HIGH"), (("--best", "SAME"), "it is an input")])
def test_bad_flags_are_told(recorded, flags, why):
    flags = [recorded if flag == "SAME" else flag for flag in flags]
    done = run_script("tools/pick.py", recorded, *flags)
    assert done.returncode == 2 and why in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_question_without_an_answer_is_refused(recorded, tmp_path):
    row = json.loads(recorded.read_text().splitlines()[0])
    row["task"]["answer"] = None
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps(row) + "\n")
    done = run_script("tools/pick.py", path, "--best", tmp_path / "x.jsonl")
    assert done.returncode == 2 and "has no answer" in done.stderr
