"""
Tests of what the pages in docs/ tell a reader to run: python -m pytest tests/slow/test_docs.py -q
"""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from conftest import ROOT, run_script
from fixtures import rows_of
from scripted import ANSWER, Scripted, Server, call, play_one, text_of
from slow.test_draft import SCRIPT, Model
from test_docs import changed

import chat
import grpo
import rollout
import video


def test_the_slurm_file_starts_a_run_that_all_parsers_take(tmp_path):
    """With stubs for SLURM and torchrun; the flags go to the parsers of torchrun and grpo.py."""
    from torch.distributed.run import get_args_parser

    (text,) = re.findall(r"^```bash\n(#!.*?)^```", (Path(ROOT) / "docs" / "recipe.md").read_text(),
                         re.M | re.S)
    assert len(text.splitlines()) == 10
    path = tmp_path / ".venv" / "bin"
    path.mkdir(parents=True)
    (path / "activate").touch()
    for name, body in (("srun", 'shift; exec "$@"'), ("scontrol", "echo node7; echo node8"),
                       ("torchrun", 'printf "%s\\n" "$@"')):
        (path / name).write_text(f"#!/bin/sh\n{body}\n")
        (path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", "SLURM_NNODES": "4",
           "SLURM_JOB_NODELIST": "node[7-8]"}
    sh = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert sh.returncode == 0, sh.stderr
    run = get_args_parser().parse_args(sh.stdout.splitlines())
    assert (run.nnodes, run.nproc_per_node, run.rdzv_endpoint) == ("4", "8", "node7:29500")
    assert run.shutdown_timeout == 900 and run.training_script == "grpo.py"
    flags = grpo.build_parser().parse_args(run.training_script_args)
    assert (flags.steps, flags.save_every, flags.dp_replicate) == (54, 10, 4)


class Teacher(Model):
    """Writes drafts, and plays our agent: a look at the whole video, then the right answer."""

    def __call__(self, body):
        messages = body["messages"]
        if len(messages) == 1:
            return super().__call__(body)
        texts = [part["text"] for m in messages for part in chat.content_of(m) if "text" in part]
        if not any("crop_video" in text for text in texts):
            return "A hat."
        if not any("A hat." in text for text in texts):
            return "<think>look</think>\n" + call(0, 64.0)
        (color,) = {row[3] for row in SCRIPT if any(row[0] in text for text in texts)}
        (letter,) = [line[0] for text in texts for line in text.split("\n")
                     if line[1:3] == ". " and line[3:] in color.rstrip(".").split()]
        return f"<think>it is</think>\n<answer>{letter}</answer>"


def test_videos_alone_lead_to_an_evaluation(toy, tmp_path):
    """The commands of docs/your-own-data.md: drafts, --check, a teacher's rollouts, a cold start,
    PARA-GRPO, an evaluation."""
    shutil.copy(sorted((toy / "videos").glob("*.mp4"))[0], tmp_path / "a.mp4")
    tasks, toy_flags = tmp_path / "tasks.jsonl", ("--preset", "toy")

    def stage(script, *flags):
        done = run_script(script, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with Server(Teacher()) as server:
        asked = "--base-url", server.url, "--model", "m"
        stage("tools/draft.py", tmp_path, *asked, "--out", tasks, "--questions", 8)
        assert "no fault" in stage("grpo.py", *toy_flags, "--ckpt", toy / "init", "--data", tasks,
                                  "--check", "--out", tmp_path / "grpo")
        stage("eval.py", *asked, "--data", tasks, "--frames", 8, "--out", tmp_path / "teacher")
    stage("tools/pick.py", *(tmp_path / "teacher").glob("records.*"), "--best",
          tmp_path / "chats.jsonl")
    assert len(rows_of(tmp_path / "chats.jsonl")) == 4  # of each task one with its sub-agent's
    stage("sft.py", *toy_flags, "--ckpt", toy / "init", "--data", tmp_path / "chats.jsonl",
          "--steps", 1, "--batch-size", 2, "--out", tmp_path / "sft")
    run = (*toy_flags, "--data", tasks, "--frames", 8, "--max-new-tokens", 8)
    stage("grpo.py", *run, "--ckpt", tmp_path / "sft", "--steps", 1, "--prompts", 2,
          "--num-generations", 2, "--out", tmp_path / "grpo")
    stage("eval.py", *run, "--ckpt", tmp_path / "grpo", "--out", tmp_path / "eval")
    assert len(rows_of(next((tmp_path / "eval").glob("records*.jsonl")))) == 2


def test_a_second_tool_is_one_class_and_one_function(codec, tasks, source, monkeypatch):
    """zoom_frame, played: declared, parsed, its picture in the main context, recorded, paid."""
    for name, text in changed("A second tool").items():
        module = ModuleType(f"changed {name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
        module.__file__ = os.path.join(ROOT, name)
        exec(compile(text, name, "exec"), vars(module))
    monkeypatch.setattr(video, "load", sys.modules["changed video.py"].load)
    monkeypatch.setattr(rollout, "TOOLS", sys.modules["changed agent_tools.py"].TOOLS)

    def zoom(**arguments):
        body = json.dumps({"name": "zoom_frame", "arguments": arguments})
        return f"<tool_call>{body}</tool_call>"

    text = "Look.\n</think>\n" + call(0, 8) + zoom(time="0:10", x=500, y=250)
    engine = Scripted(codec, [text + zoom(time=99, x=0, y=0) + zoom(time=1, x=2000, y=0), ANSWER])
    episode = play_one(engine, tasks, source)
    assert '"name": "zoom_frame"' in text_of(codec, episode.context.ids[:episode.spans[0][0]])
    assert [c["status"] for c in episode.calls] == ["ok", "ok", "error", "error"]
    # The window was summarised by a sub-agent; the zoomed picture stands in the main context.
    assert len(engine.subs()) == 1 and len(episode.context.items) == 2
    item = episode.context.items[1]
    assert item.seconds == [10.0] and item.spec["zoom"] == [500, 250]
    whole = source.load({"video": tasks[0]["video"], "times": [10.0]})
    frames = source.load(item.spec)
    assert frames.images.shape == whole.images.shape and frames.key != whole.key
    assert episode.reward["tool"] >= 0.3
