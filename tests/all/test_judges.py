"""
Other people's harnesses ask tools/serve.py and grade what they get: lmms-eval, which sends films,
and inspect_ai, which sends frames. python -m pytest --all tests/all/test_judges.py
Each runs in a process of its own and is skipped if it is not installed (pip install lmms-eval,
inspect-ai).
"""
import base64
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT
from scripted import Scripted, calls, turn_of
from test_serve import running  # noqa: F401  (a fixture)

import video

FILMS = [f"videos/rl-000{n}.mp4" for n in range(4)]


def judged(script, tmp_path, server):
    """Runs a harness's script in `tmp_path` against a server -> its standard output."""
    env = {**os.environ, "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{server.url}/v1",
           "OPENAI_API_BASE": f"{server.url}/v1", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path),
           "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def by_film(request):
    """Two windows, then a letter: A for the first film, B for the second one, .."""
    if turn_of(request) == 0:
        return calls((0, 8), (16, 24))
    number = [n for n, name in enumerate(FILMS) if request.items[0].spec["video"] == name]
    return f"Seen.\n</think>\n<answer>{'ABCD'[number[0]]}</answer>"


LMMS_TASK = """
task: films
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_visual: !function films.visual
doc_to_text: !function films.words
doc_to_target: label
process_results: !function films.grade
generation_kwargs: {max_new_tokens: 16, temperature: 0, do_sample: false}
metric_list: [{metric: right, aggregation: mean, higher_is_better: true}]
"""
LMMS_FUNCTIONS = """
def visual(doc):
    return [doc["film"]]
def words(doc):
    return "Which colour?\\nA. red\\nB. green\\nC. blue\\nD. black\\nAnswer with the letter."
def grade(doc, results):
    return {"right": float(results[0].strip() == doc["label"])}
"""
LMMS = """
import launch, sys
launch.import_shim()
sys.argv = ["lmms_eval", "--model", "openai", "--tasks", "films", "--include_path", ".",
            "--model_args", "base_url={url}/v1,api_key=none,model_version=toy,pass_video_url=True",
            "--batch_size", "1", "--output_path", "out", "--log_samples"]
from lmms_eval.__main__ import cli_evaluate
cli_evaluate()
"""


def test_lmms_eval_grades_the_served_agent(running, codec, toy, tmp_path):  # noqa: F811
    """By films, at its own 16 tokens. It finds the one label that we made wrong."""
    if not find_spec("lmms_eval"):
        pytest.skip("lmms-eval is not installed")
    server = running(Scripted(codec, by_film))
    rows = [{"film": str(toy / name), "label": label} for name, label in zip(FILMS, "ABDD")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "films.py").write_text(LMMS_FUNCTIONS)
    (tmp_path / "films.yaml").write_text(LMMS_TASK.replace("DATA", str(tmp_path / "rows.jsonl")))
    judged(LMMS.format(url=server.url), tmp_path, server)
    (found,) = (tmp_path / "out").rglob("*_results.json")
    results = json.loads(found.read_text())["results"]["films"]
    assert results["right,none"] == 0.75
    assert len({r.items[0].spec["video"] for r in server.engine.mains()}) == 4


INSPECT = """
import json
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import exact
samples = []
for row in map(json.loads, open("rows.jsonl")):
    content = []
    for second, image in row["frames"]:
        content += [ContentText(text=f"<{{second}} seconds>"), ContentImage(image=image)]
    content.append(ContentText(text="Which colour? Answer with one word."))
    samples.append(Sample(input=[ChatMessageUser(content=content)], target=row["label"]))
(log,) = eval(Task(dataset=samples, scorer=exact()), model="openai-api/local/toy",
              model_base_url="{url}/v1", model_args=dict(api_key="none"), display="none",
              log_dir="logs", max_tokens=16)
assert log.status == "success", log.error
print("MEAN", log.results.scores[0].metrics["mean"].value, log.results.total_samples)
"""


def test_inspect_ai_grades_the_served_agent(running, codec, toy, tmp_path):  # noqa: F811
    """By frames with their times, five rows, one of them with a wrong label."""
    if not find_spec("inspect_ai"):
        pytest.skip("inspect_ai is not installed")
    from PIL import Image

    def as_url(image):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    frames = video.overview(str(toy / FILMS[0]), 4)
    shown = [[float(s), as_url(image)] for s, image in zip(frames.seconds, frames.images)]
    rows = [{"frames": shown, "label": label} for label in ("red", "red", "red", "red", "blue")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = running(Scripted(codec, ["Seen.\n</think>\n<answer>red</answer>"]))
    said = judged(INSPECT.format(url=server.url), tmp_path, server)
    assert "MEAN 0.8 5" in said
    (request, *_) = server.engine.mains()
    assert [len(f.images) for f in request.frames] == [4]
    assert request.items[0].seconds == [float(s) for s in frames.seconds]
