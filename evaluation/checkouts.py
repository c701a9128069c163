"""
evaluation/checkouts.py: asks a publisher's own code, in the user's checkout, in a child process.

  run     items -> what evaluation/publishers.py answers
  texts   a protocol -> the publisher's prompt texts, cut out of the requests that their code sends

Reads the checkout, through the child. Writes no file. Used by evaluation/graders.py (--grader),
evaluation/systems.py (--texts-of) and evaluation/verify.py (--verify).
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import launch
from evaluation import benchmarks, paper, readers
from evaluation.paper import SPLITS

# Protocols whose publisher's code can be asked, and the places of its texts for
# systems.read_prompts; () = the texts are cut out of requests.
R1 = tuple(f"src/eval_bench.py:{name}" for name in
           ("QUESTION_TEMPLATE", "TYPE_TEMPLATE[multiple choice]", "TYPE_TEMPLATE[free-form]"))
KNOWN = {"paper": (), "paper-general": (), "paper-direct": (), "paper-reasoning": (),
         "qwen3-vl": (), "videozoomer": (), "video-r1": R1, "videorft": R1,
         "videochat-r1": ("src_eval/eval_prompts.py:QA_THINK",
                          "src_eval/eval_prompts.py:GROUND_TEMPLATE_THINK"),
         "time-r1": ("src/vllm_inference/data/config.py:DEFAULT_MCQ_PROMPT[r1]",
                     "src/vllm_inference/data/config.py:DEFAULT_TG_PROMPT[r1]"),
         "conan": tuple(f"Conan-Eval/prompt_temp.py:Prompt_temp_{part}_{kind}"
                        for kind in ("mc", "gen") for part in ("init", "round", "final")),
         "longvt": ("examples/eval/single_inference.py:TOOL_PROMPT",)}


def run(kind, name, checkout, items, seconds, expected):
    """
    -> what the child says, a line per item and a last line, see evaluation/publishers.py.

    seconds: for one item. expected: words for the checkout that it should be. Raises UserError if
    it is none, or if the child ends early.
    """
    child = os.path.join(os.path.dirname(os.path.abspath(__file__)), "publishers.py")
    words = [sys.executable, "-I", "-B", child, kind, name, os.path.abspath(checkout), str(seconds)]
    given = "".join(json.dumps({"seed": "", **item}) + "\n" for item in items)
    where = f"{checkout}"
    with tempfile.TemporaryDirectory() as empty:
        # Neither keys nor folders of the user: the code must not ask a paid judge or download.
        kept = ("PATH", "LD_LIBRARY_PATH")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"HOME": empty, "HF_HOME": empty, "TMPDIR": empty, "HF_HUB_OFFLINE": "1",
                "PARAVT_MMVU_VIDEO_DIR": empty, "OMP_NUM_THREADS": "1"}
        try:
            # The child ends itself if an item takes too long. This limit is behind that one.
            done = subprocess.run(words, input=given, capture_output=True, text=True, cwd=empty,
                                  env=env, timeout=600 + (seconds + 10) * len(items),
                                  errors="replace")
        except subprocess.TimeoutExpired:
            raise launch.UserError(f"{where}: its code does not end") from None
    said = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
    if said and "fault" in said[-1]:
        raise launch.UserError(f"{where}: {said[-1]['fault']}; expected a checkout of {expected}")
    if not said or not {"none", "files"} & set(said[-1]):
        lines = done.stderr.strip().splitlines() or ["no message"]
        # A child that its own watchdog ends prints this, and then its stack.
        last = next((line for line in lines if line.startswith("Timeout (")), lines[-1])[:200]
        raise launch.UserError(f"{where}: its code of {name} ended at reply {len(said) + 1} of "
                               f"{len(items)} with exit code {done.returncode}: {last}")
    return said


# ------------------------------------------------------------------------------------------------
# Made-up items


def write_video(path, frames=128, rate=1, height=96, width=128):
    """An mp4 whose frames show their numbers -> [frames, rate, height, width]."""
    import av

    with av.open(path, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = av.VideoFrame.from_ndarray(readers.marked(number, height, width), "rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return [frames, rate, height, width]


def item_of(task, said, path, shape, spoken=None, asked=""):
    """Task of a benchmark, with a made-up video -> an item to ask. spoken: lines of subtitles.
    asked: the text of the user turn, for publishers whose code takes it as data."""
    row = benchmarks.published_row(task["split"], task)
    name = os.path.splitext(os.path.basename(task["video"]))[0]
    blocks = [f"{n}\n00:00:0{n},000 --> 00:00:0{n + 1},000\n{line}\n"
              for n, line in enumerate(spoken or [], 1)]
    files = {f"videomme/subtitle/{name}.srt": "\n".join(blocks)} if spoken else {}
    return {"bench": task["split"], "row": row, "said": said, "video": path, "shape": shape,
            "files": files, "task": task, "asked": asked}


def asked(protocol, checkout, items, seconds=120.0):
    """Items -> (what the checkout sends for each, names of what is not installed). Raises UserError
    if the code fails on one."""
    *sent, last = run("ask", protocol, checkout, items, seconds,
                      f"the code of the publisher of --protocol {protocol}, as we know it")
    for item, found in zip(items, sent):
        if "error" in found:
            raise launch.UserError(f"{checkout}: its code fails on a task of {item['bench']}: "
                                   f"{found['error']}")
    return sent, last["absent"]


# ------------------------------------------------------------------------------------------------
# Prompt texts, cut out of requests. A place of a template stands in the item in place of data.


def texts(protocol, checkout):
    """-> the publisher's texts of a protocol, in the order of System.texts, or their places in its
    files, as --prompt-file takes them. Raises UserError."""
    if KNOWN.get(protocol):
        return [os.path.join(checkout, place) for place in KNOWN[protocol]]
    if protocol not in KNOWN:
        raise launch.UserError(f"--texts-of: no code of the publisher of --protocol {protocol} is "
                               "known; give its texts by --prompt-file")
    calls = [{"name": "crop_video", "arguments": {"start_time": start, "end_time": start + 6}}
             for start in (21.5, 221.5)]  # the second one lies behind the end
    said = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "made-up.mp4")
        shape = write_video(path)
        items = [item_of(place_task(split), said, path, shape,
                         ["{spoken}"] if split == "videomme_wsub" else None)
                 for split in (SPLITS if protocol.startswith("paper") else ["videomme"])]
        sent, _ = asked(protocol, checkout, items)
    try:
        if protocol == "videozoomer":
            return [sent[0]["requests"][0]["messages"][0]["content"][0]["text"]]
        if protocol == "qwen3-vl":
            text = sent[0]["requests"][0]["messages"][-1]["content"][-1]["text"]
            return [text.replace("A. {a}\nB. {b}", "{options}")]
        return paper_texts(protocol, dict(zip(SPLITS, sent)))
    except (LookupError, TypeError, AttributeError) as error:
        raise launch.UserError(f"{checkout}: its requests are not of the form that we know "
                               f"({error!r})") from None


def place_task(split):
    """A task whose data are the places of a template."""
    task = {"id": "x", "split": split, "video": "made-up.mp4", "question": "{published}",
            "options": ["{a}", "{b}"], "answer": "A", "type": "mcq", "tags": {}}
    if split == "mmvu":
        task["tags"] = {"kind": "multiple-choice"}
    if split == "charades":
        task.update(type="grounding", options=None, answer=[1.0, 2.0], event="{event}")
    return task


def paper_texts(protocol, sent):
    """{split: what ParaVT's driver sends} -> texts, see evaluation/paper.py."""
    mcq, span = (sent[split]["requests"] for split in ("videomme", "charades"))
    found = {"system": mcq[0]["messages"][0]["content"],
             "grounding": span[0]["messages"][0]["content"]}
    for split, one in sent.items():
        text = one["question"].replace("A. A. {a}\nB. B. {b}", "{labelled}")
        found[split] = text.replace("A. {a}\nB. {b}", "{lines}")
    if protocol in ("paper-direct", "paper-reasoning"):
        return [found[name] for name in paper.ONE_TURN]
    named = mcq[0]["messages"][1]["content"][-1]["text"].removeprefix(sent["videomme"]["question"])
    answers = [mcq[2]["messages"][place]["content"] for place in (3, 5)]
    frames = len(answers[0]) - 1
    reply = re.sub(rf"(?<![\d.]){frames}(?![\d.])", "{frames}", answers[0][-1]["text"])
    found |= {"path": named.replace("made-up.mp4", "{video}"),
              "reply": reply.replace("21.5", "{start}").replace("27.5", "{end}"),
              "failed": answers[1].replace("221.5", "{start}").replace("227.5", "{end}"),
              "letter": mcq[-1]["messages"][-1]["content"],
              "span": span[-1]["messages"][-1]["content"]}
    return [found[name] for name in paper.AGENT]
