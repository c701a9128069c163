"""
evaluation/paper_texts.py (tests/publishers/test_proof.py): the prompt texts of the paper's authors,
cut out of the requests that their own driver sends.

A place of a template stands in a made-up row in place of data: where {published} comes out, the
published question goes in. The driver runs in a child process, see evaluation/paper_driver.py.

Reads the checkout, through the child. Writes no file. Used by evaluation/systems.py (--texts-of).
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import launch
from evaluation import paper

# protocol -> the authors' script of its row in Table 1
SCRIPTS = {"paper": "reproduce_paravt_8b.sh", "paper-general": "reproduce_qwen3vl_8b.sh",
           "paper-direct": "reproduce_qwen25vl_7b.sh",
           "paper-reasoning": "reproduce_reasoning_baselines.sh"}


def stub_rows():
    """split -> a row as its publisher ships it, whose data are the places of a template."""
    options = ["{a}", "{b}"]
    videomme = {"videoID": "made-up", "question": "{published}", "options": options, "answer": "A"}
    return {"videomme": videomme, "videomme_wsub": videomme,
            "longvideobench": {"id": "x", "video_path": "made-up.mp4", "question": "{published}",
                               "option0": "{a}", "option1": "{b}", "correct_choice": 0},
            "lvbench": dict(uid="x", video_path="made-up.mp4", question="{published}", answer="A"),
            "mlvu": {"video_name": "made-up.mp4", "question": "{published}", "candidates": options,
                     "answer": "{a}", "task_type": "x"},
            "mmvu": {"id": "x", "video": "videos/Art/made-up.mp4", "question": "{published}",
                     "choices": {"A": "{a}", "B": "{b}"}, "answer": "A"},
            "charades": {"video": "made-up.mp4", "caption": "{event}", "timestamp": [1.0, 2.0]}}


def run_driver(checkout, script, items, child=None, extra_args=()):
    """-> what the driver sends for each item, see evaluation/paper_driver.py. Raises UserError if
    the checkout is not as expected. child: the script that runs it. extra_args: for that script."""
    child = child or os.path.join(os.path.dirname(os.path.abspath(__file__)), "paper_driver.py")
    words = [sys.executable, "-I", "-B", child, os.path.abspath(checkout), script, *extra_args]
    with tempfile.TemporaryDirectory() as empty:
        # Neither keys nor folders of the user: the code must not ask a paid service or download.
        env = {n: os.environ[n] for n in ("PATH", "LD_LIBRARY_PATH") if n in os.environ}
        env |= {"HOME": empty, "HF_HOME": empty, "TMPDIR": empty, "HF_HUB_OFFLINE": "1",
                "PARAVT_MMVU_VIDEO_DIR": empty, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
        try:
            done = subprocess.run(words, input=json.dumps(items), capture_output=True, text=True,
                                  cwd=empty, env=env, timeout=600 + 60 * len(items),
                                  errors="replace")
        except subprocess.TimeoutExpired:
            raise launch.UserError(f"{checkout}: its code does not end") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise launch.UserError(f"{checkout}: its code ended with code {done.returncode}: {last}")
    output = json.loads(lines[-1])
    if "fault" in output:
        raise launch.UserError(f"{checkout}: {output['fault']}; expected a checkout of "
                               "EvolvingLMMs-Lab/ParaVT as we know it")
    return output["sent"]


def texts(protocol, checkout):
    """-> the texts of a protocol, in the order of System.texts. Raises UserError."""
    if protocol not in SCRIPTS:
        raise launch.UserError(f"--texts-of takes the texts of {', '.join(SCRIPTS)} alone; those "
                               f"of {protocol} by --prompt-file (places: --protocols)")
    calls = [{"name": "crop_video", "arguments": {"start_time": start, "end_time": start + 6}}
             for start in (21.5, 221.5)]  # the second one lies after the end of the video
    replies = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    files = {"videomme/subtitle/made-up.srt": "1\n00:00:01,000 --> 00:00:02,000\n{spoken}\n"}
    rows = stub_rows()
    items = [{"bench": split, "row": row, "replies": replies,
              "files": files if split == "videomme_wsub" else {}} for split, row in rows.items()]
    sent = dict(zip(rows, run_driver(checkout, SCRIPTS[protocol], items)))
    try:
        return cut_texts(protocol, sent)
    except (LookupError, TypeError, AttributeError) as error:
        raise launch.UserError(f"{checkout}: its requests are not of the form that we know "
                               f"({error!r})") from None


def cut_texts(protocol, sent):
    """{split: what the driver sends} -> texts, see evaluation/paper.py."""
    mcq, span = (sent[split]["requests"] for split in ("videomme", "charades"))
    by_name = {"system": mcq[0]["messages"][0]["content"],
               "grounding": span[0]["messages"][0]["content"]}
    for split, item in sent.items():
        # Options that the publisher has labelled get a second label.
        options = "{labelled}" if split.startswith("videomme") else "{lines}"
        by_name[split] = item["question"].replace("A. {a}\nB. {b}", options)
    if protocol in ("paper-direct", "paper-reasoning"):
        return [by_name[name] for name in paper.ONE_TURN]
    named = mcq[0]["messages"][1]["content"][-1]["text"].removeprefix(sent["videomme"]["question"])
    answers = [mcq[2]["messages"][index]["content"] for index in (3, 5)]
    frames = len(answers[0]) - 1
    reply = re.sub(rf"(?<![\d.]){frames}(?![\d.])", "{frames}", answers[0][-1]["text"])
    by_name |= {"path": named.replace("made-up.mp4", "{video}"),
                "reply": reply.replace("21.5", "{start}").replace("27.5", "{end}"),
                "failed": answers[1].replace("221.5", "{start}").replace("227.5", "{end}"),
                "letter": mcq[-1]["messages"][-1]["content"],
                "span": span[-1]["messages"][-1]["content"]}
    return [by_name[name] for name in paper.AGENT]
