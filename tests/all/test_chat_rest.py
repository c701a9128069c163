"""
More of chat.py, the arguments of templates:
python -m pytest tests/all/test_chat_rest.py -q
"""
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import chat
import rollout
from plumbing import runs

OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


def published_template(name):
    """Text of a template as its publisher ships it, from the package trl, which is not imported."""
    spec = importlib.util.find_spec("trl")
    path = spec and Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    if not (path and path.exists()):
        pytest.skip(f"no published template {name}: pip install --no-deps trl==1.16.0")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name, given, says, ends, dialect", [
    ("qwen3_vl", [], None, "assistant\n", "json"),
    ("qwen3_5_think", [], None, OPEN, "xml"),
    ("qwen3_5_think", ["enable_thinking=false"], None, CLOSED, "xml"),
    ("qwen3_5_nothink", [], None, CLOSED, "xml"),
    ("qwen3_5_nothink", ["enable_thinking=true"], None, OPEN, "xml"),
    ("qwen3_6", ["enable_thinking=false"], None, CLOSED, "xml"),
    ("qwen3_8", [], "effort is set to xhigh", OPEN, "xml"),
    ("qwen3_8", ["reasoning_effort=low"], "effort is set to low", OPEN, "xml"),
    ("qwen3_8", ["reasoning_effort=medium"], None, OPEN, "xml"),
    ("qwen3_8", ["enable_thinking=false", "reasoning_effort=low"], None, CLOSED, "xml")])
def test_published_templates_take_their_arguments(toy, tmp_path, name, given, says, ends, dialect):
    """For the main agent, for sub-agents and between turns."""
    folder = tmp_path / "init"
    shutil.copytree(toy / "init", folder)
    (folder / "chat_template.jinja").write_text(published_template(name), encoding="utf-8")
    codec = chat.load_codec(str(folder), "image", given)
    assert codec.tool_call_format == dialect and codec.opens_thought == (ends == OPEN)
    task = {"video": "v.mp4", "question": "Which?", "type": "open", "answer": "red"}
    window = {"start": 0.0, "end": 4.0, "fps": 1.0, "max_frames": 4}
    for messages, tools in ((rollout.main_messages(task, 4), rollout.tool_schema()),
                            (rollout.sub_messages(task, window), None)):
        for message in messages:  # the text alone
            message["content"] = "".join(piece["text"] for piece in chat.content_of(message)
                                         if piece["type"] == "text")
        text = chat.template(codec, messages, tools)
        assert text.endswith(ends) and ("effort is set" in text) == bool(says)
        assert (says or "") in text
    replies = [{"role": "tool", "content": "red"}]
    glue = chat.decode(codec, chat.tool_response_ids(codec, replies, True),
                       keep_special=True)
    assert "<tool_response>\nred\n</tool_response>" in glue and glue.endswith(ends)


@pytest.mark.parametrize("stage", ["sft.py", "grpo.py", "eval.py"])
def test_another_template_argument_is_another_setting(stage):
    """For a run that goes on (rollout.py compares as grpo.py does) and for records of eval.py."""
    import eval as evaluation
    import grpo
    import sft
    from evaluation import results

    parser = {"sft.py": sft, "grpo.py": grpo, "eval.py": evaluation}[stage].build_parser()
    low, again, none = (
        parser.parse_args(["--ckpt", "c", "--data", "d", *more])
        for more in (["--template-args", "reasoning_effort=low"],) * 2 + ((),))
    if stage == "eval.py":
        low, again, none = (results.settings_digest(args, "", None, [], "")
                            for args in (low, again, none))
        assert low == again != none
        return
    then = {"args": json.loads(json.dumps(vars(low)))}
    assert runs.changes(again, {}, then) == []
    (flag,) = runs.changes(none, {}, then)
    assert "--template-args" in flag and "low" in flag
