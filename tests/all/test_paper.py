"""
Tests of evaluation/paper.py, paper_texts.py, paper_driver.py, readers.py and sources.py:
    python -m pytest tests/all/test_paper.py -q

The authors' own code is the oracle in tests/publishers, with a clone of it. torch and transformers
are always there.
"""
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import eval as evaluation
import launch
from evaluation import endpoint, paper, paper_texts, readers, sources, systems


def crop(start, end=None, name="crop_video"):
    window = {"start_time": start, "end_time": end}
    given = {key: value for key, value in window.items() if value is not None}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def question(split, **more):
    """A made-up task of a benchmark."""
    texts = ["a red kite", "a blue {kite}", "no kite", "two kites"]
    task = {"id": split, "split": split, "video": "made-up.mp4", "type": "mcq", "answer": "B",
            "question": "Which kite flies over the harbour?", "options": texts, "tags": {}}
    if split in ("mlvu", "lvbench"):
        lines = [f"({letter}) {text}" for letter, text in zip("ABCD", texts)]
        task["published"] = "\n".join([task["question"], *lines])
    if split == "charades":
        task.update(type="grounding", options=None, answer=[8.0, 16.0], event="a kite flies up.")
    return {**task, **more}


# A made-up clone of the authors' code: files and functions as theirs, in words of our own.
UTILS = '''
import json, os, subprocess, sys
from multiprocessing import Process
from openai import OpenAI
from qwen_vl_utils.vision_process import fetch_video

def shown(path, **asked):
    try:
        return fetch_video({"video": path, **asked})
    except ValueError:
        return []

def load_samples(name, home, prompt_mode):
    from datasets import load_dataset
    (row,) = load_dataset("made/up")
    options = row.get("options") or row.get("candidates") or [
        row[f"option{n}"] for n in range(5) if row.get(f"option{n}")]
    options = [*row["choices"].values()] if name == "mmvu" else options
    lines = "\\n".join(f"{chr(65 + n)}. {text}" for n, text in enumerate(options))
    asked = row["question"] if name == "lvbench" else f"Q {row.get('question')}\\n{lines}"
    if name == "videomme_wsub":
        with open(os.path.join(home, f"videomme/subtitle/{row['videoID']}.srt")) as file:
            asked = f"Heard: {file.read().split(chr(10))[2]}. {asked}"
    if name == "charades":
        asked = f"When: {row['caption']}"
    return [{"question": asked, "video_path": os.path.join(home, "films", "made-up.mp4"),
             "span": name == "charades"}]

def run_shard(ask, samples, turns, path):
    with open(path, "w") as file:
        json.dump([ask(OpenAI(api_key="x"), sample, turns) for sample in samples], file)

def run_eval(args, ask):
    import requests
    subprocess.Popen([sys.executable, "-m", "vllm"])
    assert requests.get("http://x").status_code == 200
    samples = load_samples(args.datasets, os.environ["HF_HOME"], prompt_mode=args.prompt_mode)
    process = Process(target=run_shard, args=(ask, samples, args.max_turns, "shard.json"))
    process.start()
    process.join()
    os.makedirs(args.output_dir)
    with open("shard.json") as shard, open(f"{args.output_dir}/{args.datasets}.json", "w") as file:
        json.dump({"results": json.load(shard)}, file)
'''
DRIVER = '''
import argparse, json, re
from paravt.eval import utils

def ask(mode, client, sample, turns):
    text = sample["question"] + " File: made-up.mp4" * mode.startswith("agent")
    messages = [{"role": "system", "content": f"Mode {mode}."}, {"role": "user", "content": [
        {"type": "text", "text": text}]}]
    for turn in range(turns + 1 if mode.startswith("agent") else 1):
        done = client.chat.completions.create(model="m", messages=messages)
        said = done.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        for call in re.findall("<tool_call>(.*?)</tool_call>", said):
            given = json.loads(call)["arguments"]
            cut = utils.shown(sample["video_path"], video_start=given["start_time"])
            window = f"{given['start_time']:.1f} to {given['end_time']:.1f}"
            content = [*({"type": "image"} for _ in cut), {"type": "text", "text":
                       f"{len(cut)} of {window}"}] if cut else f"none of {window}"
            messages.append({"role": "user", "content": content})
        if turn == turns - 1:
            last = "Times now." if sample["span"] else "A letter now."
            messages.append({"role": "user", "content": last})
    return {"score": 0.0}

def main():
    parser = argparse.ArgumentParser()
    for name in ("model_path", "output_dir", "datasets", "prompt_mode", "video_channel",
                 "num_gpus", "main_nframes", "max_parallel"):
        parser.add_argument("--" + name)
    parser.add_argument("--max_turns", type=int)
    args = parser.parse_args()
    import functools
    utils.run_eval(args, functools.partial(ask, args.prompt_mode))
'''
RECIPE = "".join(f"{name}: {value}\n" for name, value in {
    "prompt_mode": "agentic  # a comment", "video_channel": "image_url", "main_nframes": 64,
    "max_turns": 3, "max_parallel": 5}.items())
SCRIPT = """
bash scripts/run_eval.sh with.yaml --video_channel image_url
bash scripts/run_eval.sh with.yaml \\
    --datasets charades --prompt_mode agent_lean --video_channel video_url
"""


@pytest.fixture
def clone(tmp_path):
    for path, text in {"paravt/__init__.py": "", "paravt/eval/__init__.py": "",
                       "paravt/eval/utils.py": UTILS, "paravt/eval/driver.py": DRIVER,
                       "with.yaml": RECIPE,
                       "paravt/eval/scripts/reproduce_paravt_8b.sh": SCRIPT}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_all_texts_are_taken_from_a_checkout(clone):
    """Cut out of the requests that its own main() sends, with the flags of its script."""
    texts = dict(zip(paper.AGENT, paper_texts.texts("paper", str(clone))))
    assert texts == {
        "system": "Mode agentic.", "grounding": "Mode agent_lean.",
        "videomme": "Q {published}\n{labelled}",
        "videomme_wsub": "Heard: {spoken}. Q {published}\n{labelled}",
        **dict.fromkeys(("longvideobench", "mlvu", "mmvu"), "Q {published}\n{lines}"),
        "lvbench": "{published}", "charades": "When: {event}", "path": " File: {video}",
        "reply": "{frames} of {start} to {end}", "failed": "none of {start} to {end}",
        "letter": "A letter now.", "span": "Times now."}


@pytest.mark.parametrize("change, why", [
    (lambda clone: (clone / "paravt/eval/driver.py").unlink(), "no paravt/eval/driver.py in"),
    (lambda clone: (clone / "paravt/eval/driver.py").write_text("x = 1"), "has no function main"),
    (lambda clone: (clone / "paravt/eval/utils.py").write_text("import gone"),
     "fails with ModuleNotFoundError"),
    (lambda clone: (clone / "paravt/eval/utils.py").write_text("import os; os._exit(5)"),
     "exit code 5"),
    (lambda clone: (clone / "with.yaml").write_text(""), "fails with KeyError"),
    (lambda clone: (clone / "paravt/eval/driver.py").write_text(
        DRIVER.replace("import argparse", "import socket, argparse").replace(
            "def main():", "def main():\n    socket.create_connection(('127.0.0.1', 9))")),
     "there is no network")])
def test_a_checkout_of_other_code_is_one_line(clone, change, why):
    change(clone)
    with pytest.raises(launch.UserError, match=why) as refused:
        paper_texts.texts("paper", str(clone))
    assert "\n" not in str(refused.value)


def test_texts_of_other_systems_are_not_run():
    with pytest.raises(launch.UserError, match="--prompt-file"):
        paper_texts.texts("conan", "nowhere")


def test_frames_lie_where_torch_puts_them():
    import torch

    draw = random.Random(0)
    for _ in range(3000):
        first = draw.randrange(300_000)
        last, count = first + draw.randrange(1, 300_000), 2 * draw.randrange(1, 40)
        wanted = torch.linspace(first, last, count).round().long().tolist()
        assert readers.spread(first, last, count) == wanted


def test_sizes_are_those_of_the_processors():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_film

    draw = random.Random(1)
    for _ in range(2000):
        height, width = draw.randrange(40, 2200), draw.randrange(40, 2200)
        for factor, least, most in ((28, 100352, 602112), (28, 784, 50176), (32, 65536, 16777216)):
            wanted = smart_resize(height, width, factor, least, most)
            assert readers.sides(height, width, factor, least, most) == wanted
        assert readers.film(900, height, width, 25165824)[1] == of_film(
            32, height, width, 2, 32, 4096, 25165824)
    places, _ = readers.film(901, 480, 640, 25165824)
    assert places == np.linspace(0, 900, 32, dtype=int).tolist()


def test_a_window_has_an_even_number_of_frames():
    """At 25 frames a second, 720p: 77 tokens a frame after the processor of the checkpoint."""
    def asked(start, end):
        places, size = readers.qwen({"fps": 1, "min_frames": 1, "max_frames": 16, "min_pixels": 784,
                                     "max_pixels": 50176, "video_start": start, "video_end": end},
                                    2500, 25.0, 720, 1280)
        height, width = readers.sides(*size, 32, 65536, 16777216)
        assert height * width // 1024 == 77
        return len(places)

    assert [asked(0, n) for n in (1, 2, 3, 5, 7.9, 16, 90)] == [2, 2, 2, 4, 6, 16, 16]
    for window in ((5, 5), (9, 2), (200, 300)):
        with pytest.raises(ValueError):
            asked(*window)


@pytest.mark.parametrize("text, wanted", [
    (crop(3, 5), [(3, 5)]), (f"<think>{crop(3, 5)}", [(3, 5)]),
    (crop(3, 5).removesuffix("</tool_call>"), []),
    ("<tool_call>{broken}</tool_call>", []), (crop(3, name="search"), [(3, 13)]),
    (crop(9, 2), [(9, 2)]), (crop("1:02", "00:01:10"), [(62, 70)]),
    (crop("soon", None), [(0, 10)]), ("<tool_call>[1]</tool_call>", None),
    ('<tool_call>{"arguments": "x"}</tool_call>', None), ("<tool_call>" * 50_000, []),
    ("<tool_call>" + " " * 100_000, []),
    ("<tool_code>crop_video(start_time=5.0, end_time='9')</tool_code>", [(5, 9)]),
    ("<tool_code>crop_video(5, 9)</tool_code>", [])])
def test_calls_are_read_as_the_driver_reads_them(text, wanted):
    read = paper.read_calls(text)
    assert (read if read is None else [(call.start, call.end) for call in read]) == wanted
    assert (paper.final([text]) is None) or wanted is not None


def test_the_papers_prompts_name_the_split(monkeypatch):
    """Two labels in Video-MME, options twice in MLVU, one text of the publisher in LVBench."""
    monkeypatch.setattr(sys, "argv", "eval.py --protocol paper --data d --ckpt c".split())
    protocol, _ = systems.make_protocol(evaluation.parse_args())

    def asked(split, **more):
        task = question(split, **more)
        return protocol.opening(task, 64, None, "a line", 60.0)[1]["content"][1]["text"]

    assert "A. A. a red kite\nB. B. a blue {kite}" in asked("videomme")
    assert asked("mlvu").count("two kites") == 2 and asked("lvbench").count("two kites") == 1
    assert "\nOptions:" not in asked("lvbench") and "(A) a red kite" in asked("lvbench")
    assert "a line" in asked("videomme_wsub") and "a line" not in asked("longvideobench")
    assert '"a kite flies up."' in asked("charades")
    assert asked("videomme").count("made-up.mp4") == 1
    assert "made-up.mp4" not in asked("videomme", question="Which video path?")


def test_written_lines_repeat_as_they_do_in_the_file(tmp_path):
    path = tmp_path / "lines.srt"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\n<i>A</i> kite.\nIt flies.\n\n"
                    "2\n00:00:02,000 --> 00:00:03,000\nIt flies.\n\n3\n00:00:03,000\n")
    assert sources.written_lines(str(path)) == "A kite.\nIt flies.\nIt flies."
    with pytest.raises(ValueError, match="none.srt: unreadable subtitles"):
        sources.written_lines(str(tmp_path / "none.srt"))


def test_a_film_goes_to_an_endpoint_by_its_path():
    images = np.zeros((4, 32, 32, 3), np.uint8)
    film = sources.Film(images, np.arange(4.0), "k", ["k"] * 4, "/v.mp4")
    request = SimpleNamespace(frames=[film], messages=[
        {"role": "user", "content": [{"type": "video", "video": "v.mp4", "stamp": "none"},
                                     {"type": "text", "text": "When?"}]}])
    wire = endpoint.OpenAIEngine("http://127.0.0.1:9", "m")
    (message,) = wire.wire(request)
    wire.close()
    assert message["content"][0] == {"type": "video_url", "video_url": {"url": "file:///v.mp4"}}
