"""
Tests of --frames 0 and --show of eval.py: python -m pytest tests/slow/test_blind.py
"""
import json

import pytest
from conftest import run_script
from scripted import AGENT, Scripted, Server

import rollout
import video
from evaluation import frame_sources, protocol_loop

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
    engine = Scripted(codec, ["</think><answer>B</answer>"])
    sampler = rollout.RolloutWorker(engine, codec, shown(toy, "real"), agent)
    (episode,) = protocol_loop.run(sampler, [TASK], protocol_loop.Protocol(), frames=0)
    assert episode.status == "ok" and episode.num_frames == 0 and episode.duration == 64.0
    (request,) = engine.requests
    assert not request.items and not request.frames and codec.image_pad not in request.expanded
    assert "Which is first?" in codec.tokenizer.decode(request.expanded)
    gone = {**TASK, "video": "gone.mp4"}
    (broken,) = protocol_loop.run(sampler, [gone], protocol_loop.Protocol(), frames=0)
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
    grid = ("--frames", 0, 2, 4, "--tools", "off", "--show", "real", "blank", "shuffled", "options")
    with Server("<answer>B</answer>") as server:
        part = ask(server, tmp_path / "out", *grid, "--limit", 5, data=data, toy=toy)
        assert part.returncode == 0, part.stderr
        path = tmp_path / "out" / "records.rank0.jsonl"  # of a run that may have been killed
        path.write_text(path.read_text().replace('"served": ["m-1"]', '"served": ["m-0"]'))
        asked = len(server.asked)
        done = ask(server, tmp_path / "out", *grid, data=data, toy=toy, ranks=2)  # goes on
        assert done.returncode == 0 and (tmp_path / "out/records.rank1.jsonl").stat(), done.stderr
        # 2 K with 4 modes, and text alone with 2; the probe of each run comes on top
        assert len(server.asked) == 12 * (2 * 4 + 2) + (asked - 5 * (2 * 4 + 2)) * 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "several models: m-0, m-1\n" in done.stdout and len(summary["served"]) == 2
    modes = [(row["K"], row["show"]) for row in summary["results"]]
    assert modes == [(0, "real"), (0, "options")] + [
        (k, show) for k in (2, 4) for show in ("real", "blank", "shuffled", "options")]
    tasks = [json.loads(line) for line in data.read_text().splitlines()]
    still = sum(protocol_loop.shuffle_options(task)["answer"] == "B" for task in tasks) / 12
    assert 0 < still < 1 and not protocol_loop.shuffle_options({**tasks[0], "answer": ""})["answer"]
    found = {(row["K"], row["show"]): row for row in summary["controls"]}
    assert {place: row["headline"] for place, row in found.items()} == {
        (0, "text alone"): 1.0, (0, "options"): still,
        **{(k, shown): still if shown == "options" else 1.0
           for k in (2, 4) for shown in ("blank", "shuffled", "options")}}
    assert found[0, "text alone"]["against"] == "4" and found[2, "blank"]["against"] == "2"
    for (_, shown), row in found.items():
        moved = shown == "options"
        assert row["difference"] == pytest.approx(still - 1 if moved else 0.0)
        assert (row["p"] < 1) == moved and row["chance"] == pytest.approx(1 / 3)
    assert done.stdout.count("does the answer need the video?") == 1
    # in the paper's layout
    table = run_script("eval.py", "--table", tmp_path / "out")
    assert table.returncode == 0 and "text alone" in table.stdout, table.stderr
