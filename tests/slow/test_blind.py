"""
Tests of --frames 0 and --show of eval.py: python -m pytest tests/slow/test_blind.py
"""
import json

import pytest
from conftest import run_script
from scripted import AGENT, Scripted, Server

import rollout
import video
from evaluation import frame_sources, systems

TASK = {"id": "q", "video": "videos/eval-0000.mp4", "question": "Which is first?", "type": "mcq",
        "options": ["red", "blue", "green"], "answer": "B"}


def shown(toy, show, **more):
    """-> VideoSource of eval.py that shows frames in this way."""
    source = rollout.VideoSource(str(toy), video.FrameCache())
    return frame_sources.PublisherSource(**vars(source), show=show, **more)


def test_without_frames_nothing_is_decoded_and_no_image_is_sent(toy, codec, monkeypatch):
    def refuse(*_):
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr(video, "read_frames", refuse)
    agent = rollout.AgentConfig(**{**vars(AGENT), "tools": False, "max_turns": 0})
    engine, system = Scripted(None, ["</think><answer>B</answer>"]), systems.all_systems()["paravt"]
    sampler = rollout.RolloutWorker(engine, None, shown(toy, "real"), agent)
    (episode,) = systems.run(sampler, [TASK], system, frames=0)
    assert episode.status == "ok" and episode.num_frames == 0 and episode.duration == 64.0
    (request,) = engine.requests
    assert not request.frames and "Which is first?" in str(request.messages)
    assert "'video'" not in str(request.messages)
    gone = {**TASK, "video": "gone.mp4"}
    (broken,) = systems.run(sampler, [gone], system, frames=0)
    assert broken.status == "video_error"


def ask(server, out, *flags, data=None, toy=None, ranks=0):
    """eval.py against `server`, in folder `out`."""
    return run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "m",
                      "--data", data, "--video-root", toy, "--protocol", "direct", "--out", out,
                      *flags, ranks=ranks)


@pytest.fixture
def data(tmp_path):
    """Twelve questions about four videos; the third of every video names the other options."""
    rows = []
    for n in range(12):
        options = ["red", "blue", "all of the above"] if n >= 8 else TASK["options"]
        path = f"videos/eval-000{n % 4}.mp4"
        rows.append({**TASK, "id": f"q{n}", "options": options, "video": path})
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "d.jsonl"


@pytest.mark.process
def test_what_the_video_gives_is_a_block_of_the_table(toy, data, tmp_path):
    """A server that reads the question alone answers as well blind; it follows letters, so moved
    options cost it what they should."""
    grid = ("--frames", 0, 2, 4, "--tools", "off", "--show", "real", "blank", "shuffled")
    with Server("<answer>B</answer>") as server:
        part = ask(server, tmp_path / "out", *grid, "--limit", 5, data=data, toy=toy)
        assert part.returncode == 0, part.stderr
        path = tmp_path / "out" / "records.rank0.jsonl"  # of a run that may have been killed
        path.write_text(path.read_text().replace('"served": ["m-1"]', '"served": ["m-0"]'))
        asked = len(server.asked)
        done = ask(server, tmp_path / "out", *grid, data=data, toy=toy, ranks=2)  # goes on
        assert done.returncode == 0 and (tmp_path / "out/records.rank1.jsonl").stat(), done.stderr
        # 2 K with 3 modes, and text alone; the probe of each run comes on top
        assert len(server.asked) == 12 * (2 * 3 + 1) + (asked - 5 * (2 * 3 + 1)) * 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    modes = [(row["K"], row["show"]) for row in summary["results"]]
    assert modes == [(0, "real")] + [
        (k, show) for k in (2, 4) for show in ("real", "blank", "shuffled")]
    assert all(row["headline"] == 1.0 for row in summary["results"])
