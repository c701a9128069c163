"""
evaluation/protocol_loop.py (tests/test_protocols.py): asks a system of evaluation/systems.py turn
by turn, through an OpenAI-compatible endpoint (`vllm serve MODEL`).

A turn ends the episode if it holds no call, or if it is the last one. Otherwise its calls are
answered as the system's entry says, and all that was shown stays in the chat.

Used by evaluation/systems.py. Reads and writes no file.
"""

import asyncio
import time
from dataclasses import dataclass, field

import rollout
import video
from evaluation import answers
from evaluation.endpoint import ChatRequest


@dataclass
class Call:
    """One call of a turn, as the model wrote it. start, end: seconds, None if unreadable."""

    name: str
    start: float | None = None
    end: float | None = None
    num_frames: int | None = None
    error: str | None = None  # None: it may run


@dataclass
class Chat(rollout.Context):
    """A Context of an endpoint: messages and frames, no ids."""

    messages: list = field(default_factory=list)
    prefill: str = ""  # forced start of every turn
    tools: list = None  # schema, for the server's chat template
    stop: tuple = ()  # strings that end a turn

    def request(self, name, **settings):
        return ChatRequest(name, [], [], [], list(self.frames), messages=list(self.messages),
                           prefill=self.prefill, tools=self.tools, stop=self.stop, **settings)


async def play(episode, worker, system):
    """rollout.run_episode for a system behind an endpoint -> Episode."""
    agent, began = worker.agent, time.monotonic()
    overview = await rollout.load_overview(episode, worker)
    if overview is None:
        return episode
    chat = open_chat(episode, agent, system, overview[1])
    tool_turns = 0
    if agent.tools:
        tool_turns = agent.max_turns
    for turn in range(tool_turns + 1):
        last, limit = turn == tool_turns, agent.max_new_tokens
        if last and tool_turns and system.force:
            text, limit = system.force(episode.task)
            chat.messages.append({"role": "user", "content": text})
        completion = await worker.pump.sample(chat.request(
            f"{episode.group}/{episode.sample}/{turn}", max_tokens=limit,
            temperature=agent.temperature, seed=rollout.turn_seed(episode, agent, turn)))
        if completion.error:
            episode.fail("engine_error", completion.error)
            break
        records = record_turn(episode, completion, agent, system, turn)
        if last or not records:
            for record in records:
                record.update(status="not_run", summary="")
            break
        replies, new_frames = await system.answer(records, episode, worker, turn)
        chat.messages.append({"role": "assistant", "content": chat.prefill + completion.text})
        chat.messages += replies
        chat.frames += new_frames
    episode.timing["total_s"] = time.monotonic() - began
    return episode


def open_chat(episode, agent, system, frames):
    """Frames of the overview -> the Chat with the first messages."""
    messages = system.opening(
        episode.task, episode.num_frames, agent, episode.subtitles, episode.duration)
    chat = episode.context = Chat(
        messages=messages, frames=[frames], prefill=system.prefill, stop=system.stop)
    if agent.think_prefix and not system.prefill:
        chat.prefill = "<think>\n"
    if agent.tools and system.schema:
        chat.tools = system.schema()
    episode.think_open = answers.never_closed(chat.prefill, False)
    episode.notes.update(opening=list(messages), seconds=frames.seconds, reasoning=[],
                         tokens=0)
    return chat


def record_turn(episode, completion, agent, system, turn):
    """Adds a turn to the episode -> records of its calls. `load_windows` completes them."""
    episode.turns.append(completion.text)
    finish = "length"
    if completion.ended:
        finish = "stop"
    episode.finish.append(finish)
    episode.notes["reasoning"].append(completion.reasoning)
    episode.notes["tokens"] += completion.tokens
    if not agent.tools:  # calls are text
        return []
    records = []
    for call in system.parse(completion.text, episode.think_open):
        record = {"turn": turn, "name": call.name, "start": call.start, "end": call.end,
                  "num_frames": call.num_frames, "parseable": call.error is None,
                  "status": "pending", "summary": "", "sub_tokens": 0}
        if call.error:
            record.update(status="error", summary=f"error: {call.error}")
        records.append(record)
    episode.calls += records
    return records


# ------------------------------------------------------------------------------------------------
# What a call is answered with


async def load_windows(records, episode, worker, fps=1.0, max_frames=16):
    """Loads the windows of the good calls of a turn, max_parallel at most -> the Frames of each
    call, or None. The records say what was shown, or why nothing. fps, max_frames: of a window, if
    the call names no number of frames."""
    limit = worker.agent.max_parallel
    runnable = [record for record in records if record["status"] == "pending"]
    for record in runnable[limit:]:
        record.update(status="not_run", summary=f"not run: at most {limit} calls per turn")

    async def load_window(record):
        if record["status"] != "pending":
            return None
        spec = {"video": episode.task["video"], "start": record["start"], "end": record["end"],
                "fps": fps, "num_frames": record["num_frames"], "max_frames": max_frames}
        try:
            frames = await worker.pump.load(worker.source.load, spec)
        except video.VideoError as error:
            # Only the reason: the text of the error holds a path on this machine.
            record.update(status="video_error",
                          summary=f"error: the window could not be read ({error.reason})")
            episode.fail("video_error", f"a call: {error}")
            return None
        except ValueError as error:  # no part of the window lies in the video
            record.update(status="error", summary=f"error: {error}")
            return None
        seconds = [round(float(second), 3) for second in frames.seconds]
        record.update(status="ok", start=max(0.0, record["start"]),
                      end=min(record["end"], episode.duration), seconds_seen=seconds)
        return frames

    return await asyncio.gather(*[load_window(record) for record in records])


def text_item(text):
    return {"type": "text", "text": text}


def frames_item(task, stamp):
    """The place of frames in a message. stamp: see chat.stamp_text."""
    return {"type": "video", "video": task["video"], "stamp": stamp}


async def answer_with_frames(records, episode, worker, turn, text="", stamp=None, max_frames=16):
    """A tool message for each call: the frames of its window and a text, or why there are none."""
    windows = await load_windows(records, episode, worker, max_frames=max_frames)
    messages, new_frames = [], []
    for record, frames in zip(records, windows):
        content = record["summary"]
        if frames is not None:
            record["summary"] = text
            content = [frames_item(episode.task, stamp), text_item(text)]
            new_frames.append(frames)
        messages.append({"role": "tool", "content": content})
    return messages, new_frames


async def answer_with_summaries(records, episode, worker, turn):
    """A tool message for each call: what the same model says of the window in a fresh context."""
    windows = await load_windows(records, episode, worker)
    await asyncio.gather(*[
        ask_sub_agent(record, frames, episode, worker, (turn, number))
        for number, (record, frames) in enumerate(zip(records, windows))])
    return [{"role": "tool", "content": record["summary"]} for record in records], []


async def ask_sub_agent(record, frames, episode, worker, turn):
    """The record of a call gets its summary. turn: number of the turn and of the call."""
    if frames is None:
        return  # the record says why
    agent = worker.agent
    window = {"start": record["start"], "end": record["end"]}
    chat = Chat(messages=rollout.sub_messages(episode.task, window), frames=[frames])
    name = "/".join(map(str, (episode.group, episode.sample, *turn)))
    completion = await worker.pump.sample(chat.request(
        name, max_tokens=agent.sub_max_new_tokens,
        temperature=agent.temperature, seed=rollout.turn_seed(episode, agent, *turn)))
    episode.notes["tokens"] += completion.tokens
    record["summary"] = rollout.EMPTY_SUMMARY
    if completion.error:
        record.update(status="engine_error", error=completion.error,
                      summary="error: the window could not be looked at")
        episode.fail("engine_error", f"a call: {completion.error}")
    elif not answers.never_closed(completion.text, False):
        # Only the text after the thought.
        summary = completion.text.rpartition("</think>")[2].strip()
        record["summary"] = summary or rollout.EMPTY_SUMMARY
