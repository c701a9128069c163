"""
More tests of tools/pick.py: a cold start from a teacher behind an endpoint, as its user walks it:
python -m pytest --all tests/slow/test_pick.py
"""
import json

from conftest import run_script
from scripted import Server, calls
from test_pick import recorded  # noqa: F401

import rewards
import rollout


def teacher(tasks):
    """A teacher that calls the evidence of even tasks and a wrong place of odd ones, and is right
    but for the last task."""
    by_question = {(task["question"], task["video"]): task for task in tasks}

    def reply(body):
        text = json.dumps(body["messages"])
        asked = [task for (question, _), task in by_question.items() if question in text]
        if body["messages"][0]["content"] == rollout.sub_prompt():
            return "18 purple"
        task = asked[0]
        number = tasks.index(task)
        if not any(rewards.parse_tool_calls(str(m["content"])) for m in body["messages"][1:]
                   if m["role"] == "assistant"):
            return calls(*(task["evidence"] if number % 2 == 0 else [[62, 64]]))
        answer = "mauve" if number == len(tasks) - 1 else task["answer"]
        return f"I saw it.\n</think>\n<answer>{answer}</answer>"

    return reply


def test_a_cold_start_from_a_teacher_behind_an_endpoint(toy, tmp_path):
    """eval.py asks the endpoint, pick.py sorts its records, sft.py trains on the chats."""
    tasks = [json.loads(line) for line in (toy / "rl.jsonl").read_text().splitlines()]
    # A question of its own for each task, so that the script knows which film it is asked about.
    tasks = [{**task, "question": f"{n}. {task['question']}", "evidence": [[8 * n, 8 * n + 8]]}
             for n, task in enumerate(tasks[:5])]
    data, out, chats = tmp_path / "tasks.jsonl", tmp_path / "teacher", tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with Server(teacher(tasks)) as server:
        done = run_script("eval.py", "--engine", "openai", "--base-url", server.url, "--model", "t",
                          "--data", data, "--video-root", toy, "--frames", 4, 8, "--tools", "on",
                          "--samples", 2, "--temperature", 0.7, "--max-pixels", 1024, "--out", out)
    assert done.returncode == 0, done.stderr
    done = run_script("tools/pick.py", *out.glob("records.*"), "--best", chats, "--recall", 0.5)
    assert done.returncode == 0, done.stderr
    # Tasks 0 and 2 are right and looked at the evidence, 1 and 3 elsewhere, and 4 is wrong.
    # A prompt is a task at one K, and a cold start needs every K.
    assert "4 of 10 prompts have a good rollout: 8 chats" in done.stdout
    assert "8 good, 8 looked elsewhere, 4 wrong" in done.stdout
    done = run_script("sft.py", "--preset", "toy", "--ckpt", toy / "init", "--data", chats,
                      "--video-root", toy, "--steps", 1, "--batch-size", 2, "--out",
                      tmp_path / "sft")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sft" / "last" / "model.safetensors").exists()


