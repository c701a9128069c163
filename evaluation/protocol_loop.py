"""
evaluation/protocol_loop.py (tests/test_protocols.py): plays an episode by the protocol of a system,
and builds its messages.

A Protocol is a system's prompt, the form of calls, the responses to calls, and when the system must
answer; evaluation/systems.py and evaluation/paper.py have one for each system. `play` is the
episode loop of all protocols, on the engine, pump, frames and records of rollout.py. ParaVT as
trained goes through rollout.py's own loop; a test asserts that both loops give the same records.

Reads and writes no file. Used by eval.py, evaluation/systems.py, evaluation/paper.py, tools/ask.py.
"""

import bisect
import itertools
import os
import re
import string
import time
from dataclasses import dataclass, field, replace
from functools import partial

import agent_tools
import chat
import launch
import rewards
import rollout
import video
from evaluation import answers
from evaluation.endpoint import ChatRequest
from plumbing import data

QUESTION = "{subtitles}{question}\n{options}\n{style}"


# ------------------------------------------------------------------------------------------------
# The episode of a protocol


@dataclass
class Chat(rollout.Context):
    """A Context with the same contents as a chat. Endpoints take no ids, only the chat."""

    messages: list = field(default_factory=list)

    def add_sampled(self, ids, logps):
        if ids is not None:
            super().add_sampled(ids, logps)

    def request(self, name, **settings):
        return ChatRequest(name, list(self.compact), list(self.ids), list(self.items),
                           list(self.frames), messages=self.messages, **settings)


def open_chat(codec, messages, specs, frames, tools=None):
    """rollout.open_context -> Chat. codec: None for an endpoint."""
    context = rollout.open_context(codec, messages, specs, frames, tools) if codec else None
    return Chat(**vars(context) if context else {"frames": list(frames)}, messages=list(messages))


@dataclass
class Reply:
    """The answer to the calls of a turn: messages, and the specs and Frames of their videos, in
    order."""

    messages: list
    specs: list = field(default_factory=list)
    frames: list = field(default_factory=list)


def trained_opening(task, num_frames, agent, subtitles, duration):
    """ParaVT's first messages, as Protocol.opening."""
    return rollout.main_messages(task, num_frames, agent.tools, subtitles, agent.crop_response)


class Window(agent_tools.CropVideo):
    """The tool of a system whose calls are answered with the frames of a window."""

    def __init__(self, fps, max_frames):
        self.fps, self.max_frames = fps, max_frames

    def answered_by(self, response):
        return "main"


async def load_windows(records, calls, episode, sampler, turn):
    """Loads the windows of the good calls of a turn -> (spec, Frames) for every call, (None, None)
    for one without frames. Each record says what was shown, or why nothing."""
    source = sampler.source
    window = Window(getattr(source, "crop_fps", 1.0), getattr(source, "crop_frames", 16))
    tools = {record["name"]: window for record in records}
    return await rollout.answer_calls(records, episode, sampler, tools)


def window_call(name, start, end, num_frames=None, error=None):
    """-> rewards.ToolCall of a window in seconds."""
    return rewards.ToolCall(name, {"start": start, "end": end, "num_frames": num_frames}, error)


def trained_calls(text, think_open):
    """ParaVT's Protocol.parse."""
    return rewards.parse_tool_calls(text, agent_tools.TOOLS, think_open)


async def trained_reply(records, calls, episode, sampler, turn, stamp=None):
    """ParaVT's Protocol.answer: one tool message for every call, in order, with the summary of a
    sub-agent or the frames of the window."""
    if sampler.agent.crop_response == "frames":
        windows = await load_windows(records, calls, episode, sampler, turn)
        return tool_replies(records, windows, stamp)
    await rollout.answer_calls(records, episode, sampler)
    return Reply([{"role": "tool", "content": record["summary"]} for record in records])


@dataclass
class Protocol:
    """The differences between systems that look at videos in turns. The defaults are ParaVT's."""

    opening: callable = trained_opening  # (task, K, agent, subtitles, duration) -> first messages
    parse: callable = trained_calls  # (text, whether it began in a thought) -> calls
    answer: callable = trained_reply  # async (records, calls, episode, sampler, turn) -> Reply
    force: callable = None  # (task) -> text put before the last turn
    force_tokens: callable = None  # (task) -> tokens of that turn
    schema: callable = rollout.tool_schema  # () -> tools for the chat template; None: no tools
    prefill: str = ""  # forced start of every turn, instead of --think-prefix
    stop: tuple = ()  # strings that end a turn
    one_call: bool = False  # a turn is cut after its first call
    jpeg: int = 90  # quality of the images that an endpoint gets


def run(sampler, tasks, protocol, frames=64, group=1):
    """rollout.run of a protocol."""
    sampler, episode_fn = choose_loop(sampler, protocol, frames)
    return rollout.run(sampler, tasks, frames, group, play=episode_fn)


def choose_loop(sampler, protocol, frames):
    """-> (sampler, episode loop) of a protocol: training's own for ParaVT as trained, if the engine
    takes ids."""
    trained = replace(protocol, schema=rollout.tool_schema) == Protocol() and frames != 0
    # An endpoint answers messages with text, also if a checkpoint's tokenizer counts the tokens.
    if sampler.codec and trained and not getattr(sampler.engine, "takes_messages", False):
        return sampler, rollout.run_episode
    return replace(sampler, open_context=open_chat), partial(play, protocol=protocol)


async def play(episode, sampler, protocol):
    """rollout.run_episode for any protocol, with ids or without -> Episode."""
    agent, codec, task, began = sampler.agent, sampler.codec, episode.task, time.monotonic()
    overview = await rollout.load_overview(episode, sampler)
    if overview is None:
        return episode
    spec, frames = overview
    blind = not len(frames.seconds)
    messages = protocol.opening(task, episode.num_frames, agent, episode.subtitles,
                                episode.duration)
    messages = [without_video(message) for message in messages] if blind else messages
    tools = protocol.schema() if agent.tools and protocol.schema else None
    context = episode.context = open_chat(codec, messages, [] if blind else [spec],
                                          [] if blind else [frames], tools)
    episode.notes.update(opening=messages, seconds=frames.seconds)
    prefill = protocol.prefill or ("<think>\n" if agent.think_prefix else "")
    episode.think_open = answers.never_closed(prefill, codec is not None and codec.opens_thought)

    tool_turns = agent.max_turns if agent.tools else 0
    for turn in range(tool_turns + 1):  # the last turn must answer
        last, prefix = turn == tool_turns, forced_ids(codec, context.ids, prefill)
        tokens_left = agent.max_model_len - len(context.ids) - len(prefix)
        if tokens_left < 1:
            episode.fail("context", f"{len(context.ids)} tokens leave no room in a context of "
                         f"{agent.max_model_len}")
            break
        context.add_masked(prefix)
        limit = agent.max_new_tokens
        if last and tool_turns and protocol.force_tokens:
            limit = protocol.force_tokens(task)
        completion = await sampler.pump.sample(context.request(
            f"{episode.group}/{episode.sample}/{turn}", max_tokens=min(limit, tokens_left),
            temperature=agent.temperature, seed=rollout.turn_seed(episode, agent, turn),
            prefill=prefill, tools=tools, stop=protocol.stop))
        if completion.error:
            episode.fail("engine_error", completion.error)
            break
        ended, completion = completion.ended, cut_turn(completion, protocol, codec)
        finish = "stop" if completion.ended else "call" if ended else "length"
        if completion.ids is not None:
            rollout.record_turn(episode, codec, completion, finish)
        else:  # from an endpoint
            episode.turns.append(completion.text)
            episode.finish.append(finish)
            episode.notes.setdefault("reasoning", []).append(completion.reasoning)
        calls = protocol.parse(completion.text, episode.think_open) if agent.tools else []
        records = rollout.record_calls(episode, calls, turn)
        if last or not calls:
            for record in records:
                record.update(status="not_run", summary="")
            break

        try:
            reply = await protocol.answer(records, calls, episode, sampler, turn)
        except video.VideoError as error:  # none of the windows, see rollout.run
            for record in records:
                record.update(status="video_error",
                              summary=f"error: the window could not be read ({error.why})")
            break
        if protocol.force and turn == tool_turns - 1:
            reply.messages.append({"role": "user", "content": protocol.force(task)})
        assistant_turn = {"role": "assistant", "content": prefill + completion.text}
        context.messages = [*context.messages, assistant_turn, *reply.messages]
        context.frames += reply.frames
        if codec is not None:
            items = [chat.vision_item(s, f) for s, f in zip(reply.specs, reply.frames)]
            compact = chat.tool_response_ids(codec, reply.messages, completion.ended, items, tools)
            glue = chat.expand(codec, compact, items)
            if len(context.ids) + len(glue) + len(prefix) >= agent.max_model_len:
                episode.fail("context", f"the responses exceed a context of {agent.max_model_len}")
                break
            context.add_masked(glue, compact)
            context.items += items
    episode.timing["total_s"] = time.monotonic() - began
    return episode


def without_video(message):
    """A message without its frames."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [item for item in message["content"] if item["type"] != "video"]}


def shuffle_options(task):
    """A task with its options in an order drawn from its id, and the letter of the answer after
    them. "order": the places in the publisher's order. A task of another type, without an answer,
    or with an option that speaks of others ("all of the above"), stays as it is."""
    options = data.bare_options(task.get("options") or [])
    if task["type"] != "mcq" or not task["answer"] or any(map(names_others, options)):
        return task
    order = sorted(range(len(options)), key=lambda i: launch.stable_hash("order", task["id"], i))
    answer = order.index(string.ascii_uppercase.index(task["answer"]))
    task = {**task, "options": [options[i] for i in order], "order": order,
            "answer": string.ascii_uppercase[answer]}
    task.pop("published_options", None)  # in the publisher's order
    if all(option in task.get("published", "") for option in options):
        lines = list(map("({}) {}".format, string.ascii_uppercase, task["options"]))
        task["published"] = "\n".join([task["question"], *lines])
    return task


def names_others(option):
    """Whether an option speaks of others by their places or letters, so that it must not move."""
    letter = r"(\b[A-H]\b|\([A-H]\))"
    return re.search(
        r"\b(all|none|both|neither|either|any) (of )?(the )?(above|below|these|those|other|"
        rf"previous|preceding)|{letter} ?(,|/|&|,? (and|or|nor|to|&)) ?{letter}|"
        rf"\b(only|options?|answers?|choices?) (?-i:{letter})(?! (?!is|are)[a-z])", option, re.I)


def forced_ids(codec, ids, prefill):
    """Ids of the forced start of a turn that follows `ids`; [] for endpoints, and if the template
    wrote it."""
    if codec is None:
        return []
    if not chat.think_prefix_ids(codec, ids):  # the template has opened the thought
        prefill = prefill.removeprefix("<think>\n")
    return chat.encode(codec, prefill)


def cut_turn(completion, protocol, codec):
    """A turn as the rules end it: after a protocol's stop strings; with one_call after its
    first call, because an agent with one window a turn would have stopped there."""
    if protocol.one_call:
        completion = cut_after(codec, completion, ("</tool_call>", "</tool_code>"), "</think>")
    return cut_after(codec, completion, protocol.stop) if protocol.stop else completion


def cut_after(codec, completion, tags, since=None):
    """A Completion cut after the first of `tags`, searched after the first `since`; unchanged if
    there is none."""
    # In bytes: a turn may hold half a character, and ids are cut where the tag is whole.
    # An endpoint returns text without ids.
    pieces = ([character.encode() for character in completion.text] if completion.ids is None
              else chat.token_bytes_of(codec, completion.ids))
    text = b"".join(pieces)
    start = max(0, text.find(since.encode())) if since else 0
    ends = [at + len(tag) for tag in map(str.encode, tags) if (at := text.find(tag, start)) >= 0]
    if not ends:
        return completion
    lengths = list(itertools.accumulate(map(len, pieces)))
    cut = bisect.bisect_left(lengths, min(ends)) + 1  # the token that completes the tag stays
    if completion.ids is None:
        return replace(completion, text=completion.text[:cut])
    ids = completion.ids[:cut]
    return replace(completion, ids=ids, logps=completion.logps[:cut],
                   text=chat.decode(codec, ids), ended=False)


def check_prompts(protocol, tasks, agent, num_frames):
    """Raises UserError if the first messages of a task lack the question or an option, or hold a
    place that is not filled. A publisher's text in another form would be sent without the question,
    and its answers would be graded like any others."""
    kinds = {(task["type"], bool(task.get("options"))): task for task in reversed(tasks)}
    for task in kinds.values():  # the first task of each kind stands for all
        # Marked, because "yes" and "no" may stand in any prompt.
        options = [f"{option} 5f3a{n}" for n, option in enumerate(task.get("options") or [])]
        task = {**task, "question": task["question"] + " 5f3a", "options": options or None}
        for name in ("event", "published"):
            if name in task:
                task[name] += f" 5f3a{name}"
        messages = protocol.opening(task, num_frames, agent, "", 60.0)
        pieces = [piece for message in messages for piece in chat.content_of(message)]
        prompt = "\n".join(piece.get("text", "") for piece in pieces)
        # The question as published holds the options.
        forms = [[task.get("event")], [task.get("published")], [task["question"], *options]]
        wanted = next(form for form in forms if form[0] and form[0] in prompt or form is forms[-1])
        for text in wanted:
            text = text if text in prompt else repr(text)[1:-1]  # in a list that Python printed
            if text not in prompt:
                raise launch.UserError(f"the first prompt of task {task['id']} does not hold "
                                       f"{text[:60]!r}; --protocols lists the places that are "
                                       "filled in a text of --prompt-file or user_file")
        for text in [*wanted, *options]:  # a task's own text may hold braces
            prompt = prompt.replace(text, "")
        # \boxed{answer} is no place, {} after a key is JSON. The last two forms are publishers'.
        braces = r"(?<!\w)(?<!\":)(?<!\": )\{ ?([A-Za-z_0-9][\w.\[\]]*)?(![rs])?(:[^{}\"']*)? ?\}"
        if unfilled := re.search(braces + r"|<<<\w+>>>|\[(QUESTION|OPTIONS?|EVENT)\]", prompt):
            raise launch.UserError(f"the first prompt of task {task['id']} ({task['type']}) holds "
                                   f"{unfilled[0]}, which no part of the task fills")


# ------------------------------------------------------------------------------------------------
# First messages


PLACES = ("question", "event", "options", "option_list", "style", "duration", "length", "video",
          "subtitles", "published", "labelled", "lines", "spoken")


def fill_template(text, task, duration=0.0, subtitles="", label="{}.", between="\n"):
    """
    Template -> text, filled at PLACES; other braces stay. label: of an option, "{}." or
    "({})". between: separates {options}. duration: seconds.
    """
    options, labels = task.get("options") or [], [*map(label.format, string.ascii_uppercase)]
    clock = chat.stamp_text(duration, 0, "clock")
    lines = [f"{label} {option}" for label, option in zip(labels, options)]
    published = task.get("published_options") or []  # with their white space
    written = [f"{label} {option}" for label, option in zip(labels, published)]
    values = {
        "question": task["question"],
        "event": task.get("event") or task["question"],  # of Charades-STA: the bare caption
        "options": between.join(lines),
        "option_list": str(lines),  # as Python prints a list
        "style": rollout.ANSWER_STYLES[task["type"]],
        "duration": clock,  # HH:MM:SS
        "length": clock[3:] if duration < 3600 else clock,  # MM:SS if possible
        "video": os.path.basename(task["video"]),
        "subtitles": f"Subtitles:\n{subtitles}\n\n" if subtitles else "",
        # Forms of the paper's driver: the question as published, with the options that may stand
        # in it, options with two labels each, options that leave an empty line if there are none,
        # subtitles without a head.
        "published": task.get("published") or task["question"],
        "labelled": "\n".join(written or [f"{line[:2]} {line}" for line in lines]),
        "lines": "\n".join(written or lines),
        "spoken": subtitles}
    if not lines:  # no empty line for options; blank lines of a publisher's text stay
        text = re.sub(r"\{options\}\n?", "", text)
    # In one pass, because a question may contain "{options}".
    return re.sub(rf"\{{({'|'.join(PLACES)})\}}", lambda match: values[match[1]], text)


def opening(task, num_frames, agent, subtitles, duration,
            user=QUESTION, system=None, stamp=None, label="{}.", text_first=False, tail="",
            between="\n"):
    """
    Protocol.opening of most systems: a system text, then one user turn of frames and text.

    user: template, see fill_template, or a function of the task that gives one. tail: follows
    unchanged, except {video}.
    """
    user = user(task) if callable(user) else user
    if "{subtitles}" not in user:  # publishers' texts have no place for them
        user = "{subtitles}" + user
    tail = tail.replace("{video}", os.path.basename(task["video"]))
    text = fill_template(user, task, duration, subtitles, label, between) + tail
    # The spec of the overview: the frames themselves are loaded by the loop.
    frames = {"type": "video", "video": task["video"], "frames": num_frames, "stamp": stamp}
    if text_first:
        content = [{"type": "text", "text": text}, frames]
    else:
        content = [frames, {"type": "text", "text": text}]  # nothing between, as the publishers
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": content}]

# ------------------------------------------------------------------------------------------------
# Answers to calls. A Protocol.answer is (records, calls, episode, sampler, turn) -> Reply.


def tool_replies(records, windows, stamp, text=None):
    """A tool message for every call: frames and a text, or the reason as text."""
    reply = Reply([])
    for record, (spec, frames) in zip(records, windows):
        content = record["summary"]
        if frames is not None:
            content = [add_video(reply, spec, frames, stamp)]
            if text:
                record["summary"] = text
                content.append({"type": "text", "text": text})
        reply.messages.append({"role": "tool", "content": content})
    return reply


def add_video(reply, spec, frames, stamp):
    """Adds frames to a reply -> the content item that stands for the frames."""
    reply.specs.append(spec)
    reply.frames.append(frames)
    return {"type": "video", "video": spec["video"], "stamp": stamp}


def tagged(text):
    """Text in tool response tags. The tags are trusted and become special tokens; the text is not.
    """
    return [{"type": "text", "text": "<tool_response>\n", "trusted": True},
            {"type": "text", "text": text},
            {"type": "text", "text": "\n</tool_response>", "trusted": True}]
