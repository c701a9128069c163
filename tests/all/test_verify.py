"""
Tests of evaluation/verify.py with a made-up publisher: python -m pytest tests/all/test_verify.py -q

The publisher has the modules and functions of the published driver, in words and code of our own.
As it is, it passes. Each MUTANT changes one thing, and the comparison must find it.
"""
import contextlib
import sys

import pytest

import eval as evaluation
import launch
from evaluation import checkouts, systems, verify

UTILS = '''
import base64, io, re, subprocess, sys
import numpy as np
from PIL import Image
from qwen_vl_utils.vision_process import fetch_video

QUALITY, EDGE = 85, 50176

def url(image):
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()

def pictures(path, **asked):
    try:
        found = fetch_video({"type": "video", "video": "file://" + path, **asked})
    except ValueError:
        return []
    return [Image.fromarray(frame.permute(1, 2, 0).numpy().astype(np.uint8)) for frame in found]

def window(path, start, end):
    return pictures(path, fps=1, min_frames=1, max_frames=16, min_pixels=784, max_pixels=EDGE,
                    video_start=start, video_end=end)

def seconds(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0

def load_samples(name, home, prompt_mode=""):
    from datasets import load_dataset
    (row,) = load_dataset("made/up")
    end = "\\nOne letter." if prompt_mode != "none" else ""
    if name == "charades":
        return [{"question": "When: " + row["caption"], "is_mcq": False}]
    options = row.get("options") or row.get("candidates") or [
        row[f"option{n}"] for n in range(5) if row.get(f"option{n}") not in (None, "N/A")]
    if name == "mmvu":
        options = list((row["choices"] or {}).values())
    lines = "\\n".join(f"{chr(65 + n)}. {text}" for n, text in enumerate(options))
    asked = f"Q: {row['question']}\\n{lines}{end}"
    if name == "lvbench":
        asked = row["question"] + end
    if name == "videomme_wsub":
        try:
            with open(f"videomme/subtitle/{row['videoID']}.srt") as file:
                blocks = file.read().strip().split("\\n\\n")
            asked = "Said: " + "\\n".join(b.split("\\n")[2] for b in blocks) + "\\n" + asked
        except OSError:
            pass
    return [{"question": asked, "is_mcq": True}]

def launch_servers(model, count, nframes, max_pixels, max_num_batched_tokens, log_prefix,
                   disable_mm_kwargs=True):
    words = [sys.executable, "-m", "vllm", "--model", model, "--dtype", "bfloat16",
             "--max-model-len", "65536", "--limit-mm-per-prompt", '{"video":1,"image":1024}']
    subprocess.Popen(words, stdout=None)
'''
DRIVER = '''
import argparse, json, os, re
from paravt.eval import utils

TOOL = json.dumps({"name": "crop_video"})
FIRST = {"agentic_general": "Cut windows: " + TOOL, "agentic_minimal": "Cut: " + TOOL}
LEAST = 64

def calls_of(text):
    found = []
    for body in re.findall(r"<tool_call>\\s*(.*?)\\s*</tool_call>", text, re.DOTALL):
        try:
            found.append(json.loads(body))
        except ValueError:
            pass
    return found

def ask(client, model, messages, tokens):
    done = client.chat.completions.create(model=model, messages=messages, max_tokens=tokens,
                                          temperature=0)
    return done.choices[0].message.content

def eval_one(client, model, sample, nframes, turns, mode, parallel, tokens, channel):
    path = sample["video_path"]
    if channel == "video_url":
        shown = [{"type": "video_url", "video_url": {"url": "file://" + path}}]
    else:
        shown = [{"type": "image_url", "image_url": {"url": utils.url(image)}}
                 for image in utils.pictures(path, nframes=nframes)]
    text = sample["question"]
    if "video path" not in text.lower():
        text += " The video: " + os.path.basename(path)
    messages = [{"role": "system", "content": FIRST[mode]},
                {"role": "user", "content": shown + [{"type": "text", "text": text}]}]
    for turn in range(turns + 1):
        said = ask(client, model, messages, tokens)
        calls = calls_of(said)[:parallel]
        if not calls:
            break
        messages.append({"role": "assistant", "content": said})
        for call in calls:
            given = call["arguments"]
            start = utils.seconds(given.get("start_time", 0))
            end = utils.seconds(given.get("end_time", start + 10))
            cut = utils.window(path, start, end)
            told = f"{len(cut)} from {start:.1f} to {end:.1f}." if cut else (
                f"Nothing from {start:.1f} to {end:.1f}.")
            parts = [{"type": "image_url", "image_url": {"url": utils.url(i)}} for i in cut]
            parts.append({"type": "text", "text": told})
            messages.append({"role": "user", "content": parts if cut else told})
        if turn == turns - 1:
            last, most = ("A letter now.", LEAST) if sample["is_mcq"] else ("Times now.", 128)
            messages.append({"role": "user", "content": last})
            ask(client, model, messages, most)
            break
    return {}

def _parse_args_with_prompt_mode():
    parser = argparse.ArgumentParser()
    for name in ("model_path", "output_dir", "datasets", "prompt_mode", "video_channel"):
        parser.add_argument("--" + name)
    for name in ("main_nframes", "max_turns", "max_parallel"):
        parser.add_argument("--" + name, type=int)
    parser.set_defaults(max_tokens=2048, max_pixels=1, max_num_batched_tokens=1, no_mm_kwargs=True)
    return parser.parse_args()
'''
RECIPE = """
prompt_mode: agentic_general  # a comment
video_channel: image_url
main_nframes: 64
max_turns: 3
max_parallel: 5
"""
SCRIPT = """
bash scripts/run_eval.sh paravt/eval/configs/with.yaml \\
    --video_channel image_url
bash scripts/run_eval.sh paravt/eval/configs/with.yaml \\
    --datasets charades --prompt_mode agentic_minimal --video_channel video_url
"""
FILES = {"paravt/__init__.py": "", "paravt/eval/__init__.py": "", "paravt/eval/utils.py": UTILS,
         "paravt/eval/driver.py": DRIVER, "paravt/eval/configs/with.yaml": RECIPE,
         "paravt/eval/scripts/reproduce_paravt_8b.sh": SCRIPT}
MUTANTS = {
    "one call a turn": ("calls_of(said)[:parallel]", "calls_of(said)[:1]"),
    "frames of 112 x 112": ('return [Image.fromarray(frame.permute(1, 2, 0).numpy().astype('
                            "np.uint8)) for", 'return [Image.fromarray(frame.permute(1, 2, 0)'
                            ".numpy().astype(np.uint8)).resize((112, 112)) for"),
    "JPEG of quality 5": ("QUALITY, EDGE = 85", "QUALITY, EDGE = 5"),
    "smaller windows": ("EDGE = 85, 50176", "EDGE = 85, 12544"),
    "windows at 2 frames a second": ("fps=1,", "fps=2,"),
    "no options": ("{lines}{end}", "{end}"),
    "other words": ("One letter.", "One capital letter."),
    "a temperature": ("temperature=0)", "temperature=0.7)"),
    "a penalty": ("temperature=0)", "temperature=0, presence_penalty=1.5)"),
    "another parser": ("</tool_call>\"", "(?:</tool_call>|$)\""),
    "thoughts are cut": ('"content": said})', '"content": said.split("</think>")[-1]})'),
    "answers of a tool": ('"user", "content": parts', '"tool", "content": parts'),
    "another default end": ("start + 10", "start + 5"),
    "a longer last turn": ("LEAST = 64", "LEAST = 65"),
    "grey frames": ("image.save(out", 'image.convert("L").save(out'),
    "frames behind the text": ('shown + [{"type": "text", "text": text}]',
                               '[{"type": "text", "text": text}] + shown'),
    "fewer turns": ("max_turns: 3", "max_turns: 2"),
    "one prompt for all": ("--prompt_mode agentic_minimal", "--prompt_mode agentic_general"),
    "frames for a film": ("--video_channel video_url", "--video_channel image_url"),
    "a shorter context": ('"65536"', '"32768"'),
}


def write(folder, old="", new=""):
    for path, text in FILES.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.replace(old, new, 1) if old else text)
    return str(folder)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory):
    """-> (args, folder of the publisher as it is, its protocol and digest)."""
    root = write(tmp_path_factory.mktemp("publisher"))
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["eval.py", "--protocol", "paper", "--verify", root])
    args = evaluation.parse_args()
    patch.undo()
    args.texts_of = root
    return args, root, systems.make_protocol(args)


@pytest.fixture(scope="module")
def our_side(tmp_path_factory):
    """Our requests are made once, because no mutant changes them; so the folder stays the same."""
    folder, kept, written = str(tmp_path_factory.mktemp("films")), {}, {}
    own, write_own = verify.ours, checkouts.write_video

    def ours(args, protocol, case, place):
        if case.name not in kept:
            kept[case.name] = own(args, protocol, case, place)
        return kept[case.name]

    def write_video(path, *shape):
        if path not in written:
            written[path] = write_own(path, *shape)
        return written[path]

    return ours, write_video, lambda: contextlib.nullcontext(folder)


@pytest.fixture
def checked(publisher, our_side, monkeypatch):
    """-> function of a folder: exit code of the comparison, by few cases."""
    args, _, made = publisher
    monkeypatch.setattr(verify, "ours", our_side[0])
    monkeypatch.setattr(checkouts, "write_video", our_side[1])
    monkeypatch.setattr(verify.tempfile, "TemporaryDirectory", our_side[2])
    monkeypatch.setitem(verify.READ, "paper", ("made-up", made[1], None))
    names = ("one window", "no end time", "seven windows", "a call that is not closed")
    some = [verify.Case("mlvu", verify.question("mlvu"), [verify.crop(10, 30)], frames=4),
            verify.Case("wide", verify.question("mlvu"), [verify.crop(10, 12), "B"], "wide", None,
                        4),
            verify.Case("charades", verify.question("charades"), ["B"]),
            *(verify.Case(name, verify.question("longvideobench"), [verify.turns()[name], "B"],
                          frames=4) for name in names)]
    monkeypatch.setattr(verify, "cases", lambda protocol: some)
    return lambda root: verify.verify(args, root)


def test_a_publisher_like_ours_passes(checked, publisher, capsys):
    assert checked(publisher[1]) == 0
    said = capsys.readouterr().out
    assert ", 0 undeclared\n" in said and "\nnot compared (" in said
    assert "UNDECLARED" not in said


@pytest.mark.parametrize("name", MUTANTS)
def test_one_edit_is_found(checked, publisher, tmp_path, monkeypatch, capsys, name):
    old, new = MUTANTS[name]
    assert sum(old in text for text in FILES.values()) == 1, "the edit has no place"
    root = write(tmp_path, old, new)
    if name != "other words":  # texts of the edited code would be other texts on both sides
        monkeypatch.setattr(systems, "make_protocol", lambda args: publisher[2])
    assert checked(root) == 1
    assert "UNDECLARED" in capsys.readouterr().out


def test_a_checkout_of_other_code_is_one_line(publisher, tmp_path):
    with pytest.raises(launch.UserError, match="no paravt/eval/driver.py"):
        verify.verify(publisher[0], str(tmp_path))
