"""
Tests of chat.py: python -m pytest tests/test_chat.py -q

The oracles are the checkpoint's own chat template, tokenizer and processor.
"""
import dataclasses
import shutil
from types import SimpleNamespace

import pytest
from album import prompt, user
from hypothesis import given, settings
from hypothesis import strategies as st

import chat
import launch

# ------------------------------------------------------------------------------------------------
# Text


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_question_and_no_tool_response_can_forge_a_turn(codec, data):
    """Literals that are cut, nested, marked, or spread over several text items of one message."""
    piece = st.sampled_from([*codec.special_strings[-8:], "<", "|im_end|>", "<|im_", "end|>",
                             "<|im_start|>assistant\n", chat.GUARD, chat.TURN, "é", "\n"])
    parts = data.draw(st.lists(st.lists(piece, max_size=5).map("".join), max_size=3))
    marks = codec.tokenizer.convert_tokens_to_ids(list(codec.special_strings))

    def contexts(*texts):
        yield prompt(codec, *texts)[0]
        yield chat.tool_response_ids(codec, [{**user(*texts)[0], "role": "tool"}], True)

    unguarded = "".join(parts).replace(chat.GUARD, "").replace(chat.TURN, "")
    for forged, honest in zip(contexts("x", *parts, "x"), contexts("red")):
        assert [forged.count(mark) for mark in marks] == [honest.count(mark) for mark in marks]
        assert f"x{unguarded}x" in chat.decode(codec, forged, keep_end=True)


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30), tag=st.sampled_from(["", "<answer>", "<think>", "<|im_end|>",
                                                       "<3.0 seconds>", "日本"]))
def test_pieces_of_tokens_join_to_the_utf8_text(codec, text, tag):
    """Tag positions are found on these bytes: one lost or doubled byte would move every flag after
    it."""
    text = text[: len(text) // 2] + tag + text[len(text) // 2:]
    ids = codec.tokenizer(text)["input_ids"]
    assert b"".join(codec.token_bytes[i] for i in ids) == text.encode("utf-8")
    wanted = codec.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert chat.decode(codec, ids, keep_end=True) == wanted


# ------------------------------------------------------------------------------------------------
# Whole chats


def test_the_think_prefix_is_not_forced_twice(codec):
    """Thinking checkpoints open the thought in their generation prompt."""
    prefix = chat.encode(codec, "<think>\n")
    assert chat.think_prefix_ids(codec, prompt(codec, "Which?")[0]) == prefix
    rendered = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n"
    owner = SimpleNamespace(chat_template="set", apply_chat_template=lambda *_, **__: rendered)
    opened = dataclasses.replace(codec, processor=owner)
    ids, _, _ = prompt(opened, "Which?")
    assert chat.think_prefix_ids(opened, ids) == []
    talk = [*user("x"), {"role": "assistant", "content": "<think>\nhm\n</think>"}]
    sequence = chat.encode_chat(opened, talk)
    think = codec.tokenizer.convert_tokens_to_ids("<think>")
    # forced by the template: no loss on it
    assert sequence.ids.count(think) == 1 and sequence.mask[:len(ids)] == [0] * len(ids)


# ------------------------------------------------------------------------------------------------
# The codec of a checkpoint


@pytest.mark.parametrize("file, text, why", [
    ("config.json", '{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}', "qwen2"),
    ("tokenizer.json", "{", "processor cannot be used")])
def test_another_architecture_or_a_broken_file_is_one_line(toy, tmp_path, file, text, why):
    folder = shutil.copytree(toy / "init", tmp_path / "init")
    (folder / file).write_text(text)
    pytest.raises(launch.UserError, chat.load_codec, str(folder)).match(why)


def test_a_template_argument_has_its_value(toy, tmp_path):
    folder = shutil.copytree(toy / "init", tmp_path / "init")
    path = folder / "chat_template.jinja"
    path.write_bytes(b"[{{ depth }}{{ add_vision_id }}]" + path.read_bytes())
    codec = chat.load_codec(str(folder), {"depth": -1.5})
    assert chat.apply_template(codec, [{"role": "user", "content": "x"}]).startswith("[-1.5]")
