"""
ask.py (tests/test_ask.py): one video, your questions: how the agent looks at the video, and its
answers.

Prints turns, windows and summaries as they come, each with its seconds. Frames and prompts stay in
the caches, so a second question about a video is faster. The episode is that of rollout.py; with
--protocol or --engine openai another system is asked, as eval.py does. `run_events` is the core: it
tells an episode step by step, and the terminal is one way to show the steps.

Reads:  a checkpoint, a video: a file or a folder of frames; --subtitle-file of it. Questions come
        from --question, from the terminal or from a pipe, one a line; options follow a question
        after bars.
Writes: --out, if given: rollout JSONL without rewards.

  python tools/ask.py --ckpt C --video video.mp4 --question "Who opens the door?"
  python tools/ask.py --engine openai --base-url http://127.0.0.1:8000/v1 --model M --protocol conan
      --video video.mp4 --question "Who opens the door?" --options "the butler" "a guest"
"""
import argparse
import asyncio
import json
import os
import re
import string
import sys
import time
from dataclasses import replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import chat
import eval as evaluation
import launch
import rollout
from evaluation import answers, endpoint, protocol_loop, systems
from plumbing import arguments, data

# ------------------------------------------------------------------------------------------------
# An episode as events


async def run_events(episode, sampler, play=rollout.run_episode, final=answers.answer_or_tail):
    """
    Plays an episode -> asynchronous iterator of its steps, each a dict with "event" and "at", the
    seconds since the episode began. Leaving the iterator cancels the episode.

    overview times [K], duration: the frames that the main agent sees, seconds of the video
    turn     number, text: the main agent has written a turn
    call     number, turn, start, end, parseable: the turn holds this call, numbers count on
    window   number, start, end, times [T]: the frames of this call are decoded
    summary  number, start, end, parseable, status, text, seconds or None: the response to this call
    answer   text or None, letter or None, status, error, frames, windows: the episode has ended

    play: the episode loop. final: (turns, think_open) -> answer or None; default: as in training.
    """
    began, sent, windows = time.monotonic(), set(), []

    def open_context(codec, messages, specs, frames, *rest):
        windows.append((specs[0], frames[0].seconds))  # of a sub-agent, which has one window
        return sampler.open_context(codec, messages, specs, frames, *rest)

    work = asyncio.create_task(play(episode, replace(sampler, open_context=open_context)))
    try:
        ended = False
        while not ended:
            await asyncio.wait([work], timeout=0.05)
            ended = work.done()
            for step in episode_events(episode, windows):
                if (step["event"], step["number"]) not in sent:
                    sent.add((step["event"], step["number"]))
                    yield {**step, "at": time.monotonic() - began}
        rollout.check_calls(work.result())  # raises if the loop has a bug
        yield {**answer_event(episode, final), "at": time.monotonic() - began}
    finally:
        work.cancel()  # if the caller leaves early


def episode_events(episode, windows):
    """-> the steps of an episode so far, in the order in which a reader wants them: a turn, its
    calls, then the windows and responses of these. windows: [(spec, times)] of sub-agents."""
    pending = list(windows)
    if "seconds" in episode.notes:
        times = [float(second) for second in episode.notes["seconds"]]
        yield {"event": "overview", "number": 0, "times": times, "duration": episode.duration}
    for number, text in enumerate(episode.turns, 1):
        yield {"event": "turn", "number": number, "text": text}
        calls = [(n, call) for n, call in enumerate(episode.calls, 1) if call["turn"] == number - 1]
        named = ("start", "end", "parseable")
        for n, call in calls:
            yield {"event": "call", "number": n, "turn": number, **{k: call[k] for k in named}}
        for n, call in calls:
            times = call.get("seconds_seen")  # other systems are shown the frames themselves
            window = call["start"], call["end"]
            looks = [look for look in pending if (look[0]["start"], look[0]["end"]) == window]
            if times is None and looks:
                pending.remove(looks[0])
                times = looks[0][1]
            if times is not None:
                yield {"event": "window", "number": n, "start": window[0], "end": window[1],
                       "times": [float(second) for second in times]}
            if call["status"] != "pending":
                yield {"event": "summary", "number": n, "status": call["status"],
                       "text": call["summary"], "seconds": call.get("seconds"),
                       **{name: call[name] for name in named}}


def answer_event(episode, final) -> dict:
    """The end of an episode as an event."""
    options = episode.task["options"]
    answer = final(episode.turns, episode.think_open) if episode.status == "ok" else None
    return {"event": "answer", "text": answer, "status": episode.status, "error": episode.error,
            "letter": answers.extract_letter(answer, options) if answer and options else None,
            "frames": len(episode.notes.get("seconds", [])), "windows": episode.executed()}


# ------------------------------------------------------------------------------------------------
# The terminal


def ask(sampler, tasks, frames, play=rollout.run_episode, final=answers.answer_or_tail):
    """Asks one question after the other and prints how the agent comes to its answers -> records.
    play, final: see `run_events`."""

    async def narrated(episode, sampler):
        last = 0.0  # when the step before ended
        async for event in run_events(episode, sampler, play, final):
            if event["event"] != "call":  # the text of its turn shows a call
                print(line_of(event, event["at"] - last, episode.task["options"]), flush=True)
                last = event["at"]
        return episode

    rows = []
    for task in tasks:
        # Another seed for each question; the step has no other meaning here.
        (episode,) = rollout.run(sampler, [task], frames, step=len(rows), play=narrated)
        rows.append(episode.to_dict())
    return rows


def line_of(event, took, options=None) -> str:
    """An event -> text for the terminal. took: seconds since the event before."""
    kind, n = event["event"], event.get("number")
    if kind == "overview":
        return f"[{len(event['times'])} frames of {event['duration']:.1f} s, {took:.1f} s]"
    if kind == "turn":
        return f"[turn {n}, {took:.1f} s] {launch.printable(event['text'].strip())}"
    if kind == "answer":
        text = event["text"] or "none"
        if event["status"] != "ok":
            text = f"none ({event['status']}: {event['error']})"
        elif event["letter"]:
            index = string.ascii_uppercase.index(event["letter"])
            text = f"{event['letter']}. {data.bare_options(options)[index]}"
        return (f"answer: {launch.printable(text)}   ({event['frames']} frames, "
                f"{event['windows']} windows, {event['at']:.1f} s)")
    if kind == "window":
        return (f"  [call {n} looks at {len(event['times'])} frames, "
                f"{event['start']} to {event['end']} s]")
    window = f"{event['start']} to {event['end']} s" if event["parseable"] else "no window"
    seconds = "" if event["seconds"] is None else f", {event['seconds']:.1f} s"
    return f"  [call {n}, {window}: {event['status']}{seconds}] {launch.printable(event['text'])}"


def read_questions(args):
    """-> iterator of tasks about --video: --question alone, or the lines of the terminal or a
    pipe, each a question with its options after |."""
    if args.question:
        yield video_task(args, 1, args.question, args.options)
        return
    launch.print0("a question a line, | before each option; Ctrl-D ends")
    for number, line in enumerate(filter(str.strip, sys.stdin), 1):
        question, *options = map(str.strip, line.split("|"))
        yield video_task(args, number, question, options)


def video_task(args, number=0, question="", options=None) -> dict:
    """A question about --video as a task without a gold answer."""
    path = args.subtitle_file and os.path.relpath(args.subtitle_file, args.video_root)
    return {"id": f"question-{number}", "video": os.path.relpath(args.video, args.video_root),
            "question": question, "options": options or None, "answer": None,
            "type": "mcq" if options else args.type, **({"subtitles": path} if path else {})}


def videos_below(path):
    """A path -> iterator of the videos there: a file, or in a folder and below it files of videos
    and folders of frames. Raises UserError if there is nothing at the path."""
    if not os.path.exists(path):
        how = "; download the video first" * (":/" in path)  # as realpath leaves a URL
        raise launch.UserError(f"{path}: no such file or folder{how}")
    if os.path.isfile(path):
        yield path
    names = r"(?i)\.(mp4|mkv|webm|mov|avi|m4v|mpe?g|vob|m?ts|m2ts|mxf|flv|wmv|asf|ogv|3gp|gif)$"
    for folder, below, files in os.walk(path):
        if {"fps", "times.txt"} & set(files):  # see docs/your-own-data.md
            below.clear()
            yield folder
            continue
        yield from (os.path.join(folder, file) for file in files if re.search(names, file))


# ------------------------------------------------------------------------------------------------
# The command line


def parse_args():
    parser = arguments.parser(__doc__)
    add = parser.add_argument_group("what to ask").add_argument
    add("--engine", choices=["vllm", "openai"], default="vllm", help="openai: ask an endpoint")
    add("--ckpt", help="checkpoint folder; not needed with --engine openai")
    add("--video", required=True, help="a video: a file, or a folder of frames")
    add("--question", help="default: questions are read from the terminal")
    add("--options", nargs="+", metavar="TEXT", help="of that question; default: an open answer")
    add("--type", choices=["open", "list", "grounding"], default="open",
        help="of answers without options, as the model was trained; the toy: list")
    add("--out", help="rollout JSONL to write; default: none is written")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    # Lists of one, because the flags of protocols are those of eval.py.
    add("--frames", type=evaluation.frames_argument, nargs=1, default=[64],
        help="overview frames K; 0: text alone, with --tools off only")
    add("--tools", nargs=1, choices=["on", "off"], default=["on"], help="offer crop_video")
    systems.add_arguments(parser)
    endpoint.add_arguments(parser)
    rollout.add_agent_arguments(parser, tools_flag=False)
    add("--subtitle-file", metavar="FILE",
        help="of the video, SRT or WebVTT: lines spoken while a frame is shown")
    # One answer, the same each time.
    parser.set_defaults(temperature=0.0, gpu_memory_utilization=0.9)
    # A protocol and a preset change defaults, which yield to flags. So both must be known first.
    early = arguments.parse_early(parser)
    parser.set_defaults(**systems.all_systems()[early.protocol].native)
    if early.preset == "toy":
        parser.set_defaults(**rollout.toy_defaults(), type="list")
    args = parser.parse_args()
    for invalid, reason in [(args.options and not args.question, "--options belong to --question"),
                            *evaluation.run_faults(args)]:
        if invalid:
            raise launch.UserError(reason)
    args.subtitles = "aligned"
    # A link may lead out of its folder.
    paths = [os.path.realpath(path) for path in (args.video, args.subtitle_file) if path]
    args.video, args.subtitle_file = [*paths, None][:2]
    for path in paths:
        if (first := next(videos_below(path), path)) != path:
            raise launch.UserError(f"{path}: a folder of videos; give one of them: --video {first}")
    args.video_root = args.video_root or os.path.commonpath([os.path.dirname(p) for p in paths])
    return args


def set_up(args):
    """Flags -> (RolloutWorker, episode loop). Raises UserError before the engine is loaded."""
    protocol, _ = systems.make_protocol(args)
    flags = argparse.Namespace(**{**vars(args), "tools": args.tools == ["on"]})
    agent, source = rollout.agent_settings(flags, args.video)
    tasks = [video_task(args, 0, args.question or "", args.options)]
    suite = evaluation.Suite(None, tasks, agent, systems.source_of(source, args))
    protocol_loop.check_prompts(protocol, tasks, agent, 1)
    ckpt, _ = evaluation.whole_checkpoint(args)
    if args.out:
        launch.make_out(os.path.dirname(os.path.abspath(args.out)))
    launch.print0(f"{args.ckpt or args.model}: loading")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs) if ckpt else None
    engine = evaluation.make_engine([suite], args, ckpt, codec, protocol)
    sampler = rollout.RolloutWorker(engine, codec, suite.source, agent)
    return protocol_loop.choose_loop(sampler, protocol, args.frames[0])


def main():
    args = parse_args()
    (sampler, play), final = set_up(args), systems.all_systems()[args.protocol].final
    rows = ask(sampler, read_questions(args), args.frames[0], play, final)
    if args.out:
        launch.write_atomic(args.out, "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} answers -> {args.out}")
    sampler.engine.close()  # on a GPU this ends the process


if __name__ == "__main__":
    launch.run_main(main)
