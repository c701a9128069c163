"""
Tests of the endpoint client against a real server, vLLM's own, with the toy checkpoint: python -m
pytest tests/slow/test_server.py -q
"""
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from conftest import ROOT, run_script

import chat
import rollout
from evaluation.endpoint import ChatRequest, OpenAIEngine
from plumbing import data


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    """vLLM's OpenAI-compatible server on loopback -> its base URL."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    folder = tmp_path_factory.mktemp("server")
    # The server starts processes of its own: each needs the shim that makes vllm importable beside
    # a CPU torch.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {ROOT!r})\nimport launch\nlaunch.import_shim()\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
               str(toy / "init"), "--host", "127.0.0.1", "--port", str(port),
               "--served-model-name", "toy", "--max-model-len", "1024", "--max-num-batched-tokens",
               "8192", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**25),
               "--enforce-eager",
               "--dtype", "float32", "--no-enable-chunked-prefill", "--generation-config", "vllm",
               "--limit-mm-per-prompt", '{"image": 64, "video": 1}', "--trust-request-mm-kwargs",
               "--mm-processor-kwargs", '{"size": {"shortest_edge": 1024, "longest_edge": 50176}}']
    environment = {**os.environ, "PYTHONPATH": str(folder), "TORCHDYNAMO_DISABLE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
                   "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment,
                                   start_new_session=True)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                time.sleep(0.5)
        else:
            pytest.fail("the server did not come up: " + (folder / "log").read_text()[-3000:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def asked_ids(server, engine, request):
    """-> ids of the prompt, as the server says them."""
    body = {**engine.body(request), "return_token_ids": True}
    call = urllib.request.Request(f"{server}/chat/completions", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as answer:
        return json.load(answer)["prompt_token_ids"]


def test_the_server_reads_the_very_prompt_that_a_policy_is_trained_on(server, toy, codec, source):
    """Frames, times, tool schema and forced start of the thought, over the wire: the same ids as
    rollout.py gives its own engines."""
    engine = OpenAIEngine(server, "toy", prefill=True)
    for task in data.read_tasks(str(toy / "eval.jsonl"))[:2]:
        spec = {"video": task["video"], "frames": 4}
        frames, messages = source.load(spec), rollout.main_messages(task, 4)
        context = rollout.open_context(codec, messages, [spec], [frames], rollout.tool_schema())
        request = ChatRequest("0", [], [], [], [frames], 4, 0.0, 0, messages, "<think>\n",
                              rollout.tool_schema())
        assert asked_ids(server, engine, request) == context.ids + chat.think_prefix_ids(
            codec, context.ids)


def test_a_benchmark_run_against_the_server(server, toy, tmp_path):
    done = run_script("eval.py", "--preset", "toy", "--engine", "openai", "--base-url", server,
                      "--model", "toy", "--data", toy / "eval.jsonl", "--frames", 4,
                      "--tools", "on", "off", "--max-new-tokens", 16, "--limit", 3,
                      "--allow-errors", "--out", tmp_path / "out")  # a random model says newlines
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(r["tools"], r["n"], r["errors"]) for r in summary["results"]] == [
        ("on", 3, {}), ("off", 3, {})]
    assert summary["served"] == ["toy"]
    lines = [json.loads(line)
             for line in (tmp_path / "out" / "records.rank0.jsonl").read_text().splitlines()]
    # a random checkpoint babbles, but it was asked and it spoke
    assert all(r["turns"][0] and r["finish"] for r in lines)


def test_a_model_the_server_does_not_have_is_refused_before_the_run(server, toy, tmp_path):
    done = run_script("eval.py", "--preset", "toy", "--engine", "openai", "--base-url", server,
                      "--model", "other", "--data", toy / "eval.jsonl", "--frames", 4,
                      "--limit", 1, "--retries", 0, "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "HTTP 404: The model `other` does not exist" in done.stderr
    assert "--model other" in done.stderr and server in done.stderr
    assert not any((tmp_path / "out").iterdir())
