"""
same_bytes.py: whether a change of the code leaves the numbers as they are, to the bit.

60 steps of the cold start, two steps of PARA-GRPO and one evaluation, with the tests' reference
engine, which repeats itself exactly. Prints a digest of the weights after each stage, and of the
ids, log-probs, advantages and scores of all episodes; seconds and settings do not count. Run it
before and after a refactor, on the same machine and the same world: the lines must be equal.

  python toy.py --out out/world
  python tests/same_bytes.py out/world            (about two minutes on one core)
"""
import glob
import hashlib
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(script, *arguments):
    """Runs a script with the reference engine and ends this process if it fails."""
    command = [sys.executable, os.path.join(ROOT, "tests", "reference.py"), script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        ending = done.stdout[-3000:] + done.stderr[-3000:]
        sys.exit(f"{script} ended with exit code {done.returncode}\n{ending}")


def weights_digest(ckpt):
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(ckpt, "*.safetensors"))):
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:16]


def records_digest(pattern, *fields):
    """Digest of these fields of all records, whose order does not count -> text."""
    rows = []
    for path in glob.glob(pattern, recursive=True):
        with open(path, encoding="utf-8") as f:
            rows += [json.loads(line) for line in f if line.strip()]
    texts = sorted(json.dumps([row.get(field) for field in fields]) for row in rows)
    return f"{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]} of {len(rows)} records"


def main():
    world = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        def out(name):
            return os.path.join(folder, name)

        toy = ("--preset", "toy")
        run("sft.py", *toy, "--ckpt", f"{world}/init", "--data", f"{world}/pretrain.jsonl",
            "--val", f"{world}/sft_val.jsonl", "--batch-size", "12", "--steps", "60",
            "--eval-every", "0", "--out", out("sft"))
        print("cold start, weights  ", weights_digest(out("sft/last")), flush=True)
        run("grpo.py", *toy, "--ckpt", out("sft"), "--data", f"{world}/rl.jsonl", "--steps", "2",
            "--prompts", "8", "--num-generations", "4", "--out", out("grpo"))
        print("PARA-GRPO, weights   ", weights_digest(out("grpo/last")))
        print("PARA-GRPO, rollouts  ", records_digest(
            out("grpo/rollouts/*.jsonl"), "ids", "mask", "logps", "advantage"), flush=True)
        run("eval.py", *toy, "--ckpt", out("grpo"), "--data", f"{world}/eval.jsonl", "--frames",
            "4", "16", "--temperature", "1", "--limit", "12", "--out", out("eval"))
        print("evaluation, records  ", records_digest(
            out("eval/**/*.jsonl"), "ids", "turns", "prediction", "score"))


if __name__ == "__main__":
    main()
