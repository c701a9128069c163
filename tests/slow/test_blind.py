"""
Test of --frames 0 of eval.py: python -m pytest tests/slow/test_blind.py
"""
from scripted import AGENT, Scripted

import rollout
import video
from evaluation import frame_sources, systems

TASK = {"id": "q", "video": "videos/eval-0000.mp4", "question": "Which is first?", "type": "mcq",
        "options": ["red", "blue", "green"], "answer": "B"}


def test_without_frames_nothing_is_decoded_and_no_image_is_sent(toy, monkeypatch):
    def refuse(*_):
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr(video, "read_frames", refuse)
    agent = rollout.AgentConfig(**{**vars(AGENT), "tools": False, "max_turns": 0})
    engine, system = Scripted(None, ["</think><answer>B</answer>"]), systems.all_systems()["paravt"]
    source = frame_sources.PublisherSource(str(toy), video.FrameCache())
    (episode,) = systems.run(rollout.RolloutWorker(engine, None, source, agent), [TASK], system, 0)
    assert episode.status == "ok" and episode.num_frames == 0 and episode.duration == 64.0
    (request,) = engine.requests
    assert "Which is first?" in str(request.messages)
    assert not sum(len(frames.seconds) for frames in request.frames)
