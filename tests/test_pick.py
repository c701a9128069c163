"""
Tests of tools/pick.py: python -m pytest tests/test_pick.py -q
"""
from types import SimpleNamespace

import pytest
from conftest import run_script
from fixtures import rows_of, write_rows
from scripted import Scripted, calls, play

import rollout
import sft
import video
from plumbing import data
from tools import pick

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

    source = rollout.VideoSource(str(toy), video.FrameCache())
    episodes = play(Scripted(codec, main, sub="0 red"), TASKS, source, group=4)
    return write_rows(tmp_path_factory.mktemp("made") / "r.jsonl", [e.to_dict() for e in episodes])


def test_a_chat_holds_the_ids_that_were_sampled(recorded, codec, toy, tmp_path):
    """sft.py's own reader encodes each chat; the main agent's and the sub-agents' ids, masks and
    frames are those of the rollout."""
    (group, *_) = pick.read_groups([recorded])
    episode = pick.best_of(group)
    assert episode.sample == 1 and len(episode.calls) == 3
    rows = pick.chats_of(episode)
    path = write_rows(tmp_path / "chats.jsonl", rows)
    args = SimpleNamespace(video_root=str(toy), max_pixels=50176, max_len=4096, missing_videos=0)
    chats = sft.Chats(str(path), codec, args, video.FrameCache())
    subs = [call["sub"] for call in episode.calls if "sub" in call]
    contexts = [(episode.context.ids, episode.context.mask)] + [(s["ids"], s["mask"]) for s in subs]
    assert len(rows) == len(contexts) == 3
    for number, (ids, mask) in enumerate(contexts):
        chat, _ = chats.encode(chats.rows[number])
        assert list(chat.ids) == ids
        # A forced <think> is trained by SFT and not by RL.
        assert all(ours >= theirs for ours, theirs in zip(chat.mask, mask))
        assert sum(chat.mask) - sum(mask) == (2 * 2 if number == 0 else 0)


def test_the_best_is_the_highest_reward_then_the_fewest_calls(recorded):
    a, b, c = pick.read_groups([recorded])
    assert pick.best_of(b) is None and pick.best_of(b, min_acc=0.0) and not pick.best_of(c).calls
    c[0].finish, c[0].reward["total"] = ["length"], 9.0
    assert pick.best_of(c) is not c[0]
    c[1].status, c[1].reward["total"] = "context", 9.0
    assert pick.best_of(c) not in c[:2]
    tokens = [sum(e.context.mask) for e in c[2:]]
    assert tokens[0] == tokens[1]
    c[3].context.mask = c[3].context.mask[:-1]
    assert pick.best_of(c) is c[3]


@pytest.mark.process
def test_an_answer_without_a_verdict_is_neither_good_nor_wrong(recorded, tmp_path):
    rows = rows_of(recorded)
    rows[1]["reward"]["judge"] = "fallback"
    a, *_ = pick.read_groups([write_rows(tmp_path / "r.jsonl", rows)])
    assert pick.rollout_fault(a[1]) == "not judged" and pick.mean_accuracy(a) == 1 / 3


def test_an_item_that_an_evaluation_asked_again_counts_once(recorded, tmp_path):
    rows = [row | dict(digest="d", budget=4, tools="on", show="real") for row in rows_of(recorded)]
    write_rows(tmp_path / "records.rank0.jsonl", rows)
    write_rows(tmp_path / "records.rank1.jsonl", [{**row, "status": "video_error"} for row in rows])
    write_rows(tmp_path / "args.json", [{}])
    known, again = map(pick.read_groups, ([recorded], sorted(tmp_path.glob("records.*"))))
    assert [[e.status for e in es] for es in again] == [["ok"] * len(es) for es in known]


def test_the_command_and_its_flags(recorded, tmp_path):
    """The band takes tasks whose rollouts disagree."""
    out, band = tmp_path / "chats.jsonl", tmp_path / "tasks.jsonl"
    done = run_script("tools/pick.py", recorded, "--best", out, "--band", 0.2, 0.8, band)
    assert not done.returncode and data.read_tasks(str(band)) == TASKS[:1], done.stderr
    assert "2 of 3 prompts have a good rollout: 4 chats, 2 of main agents" in done.stdout
    rows = rows_of(out)
    assert "Question:" in rows[1]["messages"][1]["content"][1]["text"] and "tools" in rows[0]
    rows = rows_of(recorded)
    twice = [{**r, "K": r["K"] + n, "group": f"{n}{r['group']}"} for n in (0, 1) for r in rows]
    write_rows(tmp_path / "twice.jsonl", twice)  # two prompts of each video
    for count, flags in ((8, []), (4, ["--per-video", 1])):
        run_script("tools/pick.py", tmp_path / "twice.jsonl", "--best", out, *flags)
        assert len(rows_of(out)) == count
    run_script("tools/pick.py", recorded, "--best", out, "--no-tools",
               "--least", 0)
    rows = rows_of(out)
    assert len(rows) >= 4 and "tools" not in rows[0]
    assert "crop_video" not in rows[0]["messages"][0]["content"]
