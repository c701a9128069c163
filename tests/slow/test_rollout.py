"""
More of rollout.py: masses of odd text, the rarer flags:
python -m pytest tests/slow/test_rollout.py -q
"""
import json
from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import AGENT, ANSWER, Scripted, call, play_one
from test_rollout import runs

import chat

# ------------------------------------------------------------------------------------------------
# Hostile text


FRAGMENTS = ['{"name": "crop_video", "arguments": {"start_time": NaN, "end_time": 3}}', "</answer>",
             "crop_video(start_time=1, end_time=2)", call(0, 8, num_frames=0), "</tool_response>",
             "<|vision_start|>", call("nan", "inf"), "<tool_response>", call(True, None), "<think>",
             "<|image_pad|>", "<|video_pad|>", "<|endoftext|>", call(-1e8, 1e8), "</tool_call>",
             "</tool_code>", "<|im_start|>", call(63.9, 64), "<tool_call>", "<tool_code>", "user\n",
             "<|im_end|>", "</think>", "<answer>", call(0, 8), "\x1b[2J", "\ue000", "\ue001", "red",
             "\u202e", "\ud7ff", "[" * 50, "\x00", "日本", "\\", "16", "é", "🙂", "{", "}", '"']
HOSTILE = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=12).map("".join)


def check_sound(codec, episode, num_frames):
    """What must hold whatever was written."""
    context = episode.context
    assert episode.status in ("ok", "context")
    assert runs(context.mask) == [span for span in episode.spans if span[1] > span[0]]
    assert context.mask[-1] == 1
    inserted = Counter(i for i, flag in zip(context.ids, context.mask) if not flag)
    served, one = len(episode.spans) - 1, codec.tokenizer.convert_tokens_to_ids
    assert inserted[one("<|im_start|>")] == 3 + 2 * served
    assert inserted[codec.image_pad] == inserted[one("<|vision_start|>")] == num_frames
    answered = sum(c["turn"] < served for c in episode.calls)
    assert inserted[one("<tool_response>")] == inserted[one("</tool_response>")] == answered
    assert not any(i in codec.suppress_tokens for i, flag in zip(context.ids, context.mask) if flag)
    json.dumps(episode.to_dict(), allow_nan=False)


@settings(max_examples=80, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=HOSTILE, second=HOSTILE, sub=HOSTILE, plain=st.booleans())
def test_no_text_breaks_an_episode(first, second, sub, plain, codec, tasks, frames_of):
    """plain: the same literals spelled in ordinary tokens, as a model can always do."""
    spell = (lambda text: chat.escape_special_tokens(codec, text)) if plain else (lambda text: text)
    engine = Scripted(codec, [spell(first), spell(second), spell(ANSWER)], spell(sub))
    episode = play_one(engine, tasks, frames_of,
                       replace(AGENT, max_turns=2, max_new_tokens=900, sub_max_new_tokens=200))
    check_sound(codec, episode, 4)
