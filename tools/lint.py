"""
lint.py: prints the size of each script beside the aim of this project.

A short script is easy to read and to change. The aims are for the maintainers of this repository.
This tool prints the aims and marks the scripts above them. No test checks the aims, so the length
of your change breaks no test.

Only lines of code count: no blank lines, comments or docstrings. The tool reads the scripts of the
folder above and writes no file.

  python tools/lint.py
"""
import ast
import io
import os
import tokenize

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AIMS = {"launch": 314, "rewards": 525, "video": 660, "data": 200, "chat": 375, "model": 430,
        "engine": 267, "endpoint": 210, "checkpoint": 440, "runs": 312, "rollout": 630,
        "metrics": 250, "sft": 330, "grpo": 470, "eval": 320, "toy": 405}
STEP = ("grpo", "rollout", "engine", "video", "rewards", "chat", "model")  # one GRPO step
STEP_AIM = 1600  # code lines of these scripts, each above its ruled line


def read(name: str) -> str:
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


def code_lines(source: str) -> list[int]:
    """Numbers of the lines that hold code."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return [n for n, line in lines
            if n not in skipped and line.strip() and not line.strip().startswith("#")]


def comment_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def main() -> None:
    step = 0
    for name, aim in AIMS.items():
        source = read(f"{name}.py")
        code = code_lines(source)
        lines = source.splitlines()
        # A reader of the training step may stop at the ruled line.
        ruled = next((n for n, line in enumerate(lines) if line.startswith("# ---- below")),
                     len(lines))
        step += sum(n <= ruled for n in code) if name in STEP else 0
        density = comment_lines(source) / len(code)
        over = f" | {len(code) - aim} above" if len(code) > aim else ""
        print(f"{name + '.py':15} {len(code):4} code lines, aim {aim:3} | "
              f"{density:.2f} comments per code line{over}")
    print(f"one GRPO step, above the ruled lines: {step} code lines, aim {STEP_AIM}")


if __name__ == "__main__":
    main()
