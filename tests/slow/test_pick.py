"""
Tests of tools/pick.py: python -m pytest tests/slow/test_pick.py -q
"""
from types import SimpleNamespace

import pytest
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
    row = pick.best_of(pick.read_groups([recorded])["a", 4])
    assert row["sample"] == 1 and len(row["calls"]) == 3
    rows = pick.chats_of(row)
    path = write_rows(tmp_path / "chats.jsonl", rows)
    args = SimpleNamespace(video_root=str(toy), max_pixels=50176, max_len=4096)
    chats = sft.Chats(str(path), codec, args, video.FrameCache())
    contexts = [row, *(call["sub"] for call in row["calls"] if "sub" in call)]
    assert len(rows) == len(contexts) == 3
    for number, context in enumerate(contexts):
        chat = chats.encode(chats.rows[number], chats.frames_of(chats.rows[number]))
        assert list(chat.ids) == context["ids"]
        # A forced <think> is trained by SFT and not by RL.
        assert all(ours >= theirs for ours, theirs in zip(chat.mask, context["mask"]))
        assert sum(chat.mask) - sum(context["mask"]) == (2 * 2 if number == 0 else 0)


def test_the_best_is_the_highest_reward_then_the_fewest_calls(recorded):
    a, b, c = pick.read_groups([recorded]).values()
    assert pick.best_of(b) is None and not pick.best_of(c)["calls"]
    c[0]["finish"], c[0]["reward"]["total"] = ["length"], 9.0
    assert pick.best_of(c) is not c[0]


def test_the_command_and_its_flags(recorded, tmp_path, start):
    """The band takes tasks whose rollouts disagree."""
    chats, band = tmp_path / "chats.jsonl", tmp_path / "tasks.jsonl"
    code, out, err = start(pick, recorded, "--best", chats, "--band", 0.2, 0.8, band)
    assert code == 0 and data.read_tasks(str(band)) == TASKS[:1], err
    assert "2 of 3 prompts have a good rollout: 4 chats, 2 of main agents" in out
    assert "Question:" in rows_of(chats)[1]["messages"][1]["content"][1]["text"]
    # The settings of a run of grpo.py stand above its rollouts; records of eval.py name the tools.
    path = tmp_path / "rollouts" / "r.jsonl"
    path.parent.mkdir()
    (tmp_path / "args.json").write_text('{"crop_response": "frames"}')
    for more in ({}, {"tools": "off"}):
        write_rows(path, [{**row, **more} for row in rows_of(recorded)])
        (chat,) = pick.chats_of(pick.best_of(pick.read_groups([path])["a", 4]))  # no sub-agents
        assert ("tools" in chat) == ("frames of its window" in str(chat)) == (not more)
        assert "'start': 16.0, 'end': 24.0" in str(chat)
