"""
ask.py (tests/test_ask.py): one video, your questions: how the agent looks at the video, and its
answers.

Prints turns, windows and summaries as they come. Frames and prompts stay in the caches, so a second
question about a video is faster. The episode is that of rollout.py. `run_events` tells an episode
step by step; the terminal and tools/serve.py are two ways to show the steps.

Reads:  a checkpoint, a video: a file or a folder of frames. Questions come from --question, from
        the terminal or from a pipe, one a line; options follow a question after bars.
Writes: --out, if given: rollout JSONL without rewards.

  python tools/ask.py --ckpt C --video video.mp4 --question "Who opens the door?"
  python tools/ask.py --ckpt C --video video.mp4 --question "Who sings? | the butler | a guest"
"""
import asyncio
import os
import re
import string
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
import chat
import launch
import rollout
from evaluation import answers

VIDEO_FILES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".ts", ".flv", ".wmv")

# ------------------------------------------------------------------------------------------------
# An episode as events


async def run_events(episode, worker):
    """
    Plays an episode -> asynchronous iterator of its steps, each a dict with "event" and "at", the
    seconds since the episode began. Leaving the iterator cancels the episode.

    overview times [K], duration: the frames that the main agent sees, seconds of the video
    turn     number, text: the main agent has written a turn
    call     number, turn, start, end, parseable: the turn holds this call, numbers count on
    summary  the same, status, text, times [T]: the response to this call, its frames' times
    answer   text or None, status, error, frames, windows: the episode has ended
    """
    began, sent = time.monotonic(), set()
    work = asyncio.create_task(rollout.run_episode(episode, worker))
    try:
        ended = False
        while not ended:
            await asyncio.wait([work], timeout=0.05)
            ended = work.done()
            for step in episode_events(episode):
                if (step["event"], step["number"]) not in sent:
                    sent.add((step["event"], step["number"]))
                    yield {**step, "at": time.monotonic() - began}
        work.result()  # raises what the episode raised
        yield {**answer_event(episode), "at": time.monotonic() - began}
    finally:
        work.cancel()  # if the caller leaves early


def episode_events(episode):
    """-> the steps of an episode so far: every turn, with its calls and their responses."""
    if "seconds" in episode.notes:
        times = [float(second) for second in episode.notes["seconds"]]
        yield {"event": "overview", "number": 0, "times": times, "duration": episode.duration}
    for turn, text in enumerate(episode.turns):
        yield {"event": "turn", "number": turn + 1, "text": text}
        for number, call in enumerate(episode.calls, 1):
            if call["turn"] != turn:
                continue
            step = {"number": number, "turn": turn + 1, "start": call["start"], "end": call["end"],
                    "parseable": call["parseable"]}
            yield {"event": "call", **step}
            if call["status"] != "pending":
                yield {"event": "summary", **step, "status": call["status"],
                       "text": call["summary"], "times": call.get("seconds_seen", [])}


def answer_event(episode):
    """The end of an episode as an event."""
    answer = None
    if episode.status == "ok":
        answer = answers.answer_or_tail(episode.turns, episode.think_open)
    return {"event": "answer", "text": answer, "status": episode.status, "error": episode.error,
            "frames": len(episode.notes.get("seconds", [])), "windows": episode.executed()}


def line_of(event):
    """An event -> a line that tells it; "" for a call, which the text of its turn shows."""
    kind = event["event"]
    if kind == "overview":
        return f"[{len(event['times'])} frames of {event['duration']:.1f} s]"
    if kind == "turn":
        return f"[turn {event['number']}] {event['text'].strip()}"
    if kind == "summary":
        window = "no window"
        if event["parseable"]:
            window = f"{event['start']} to {event['end']} s, {len(event['times'])} frames"
        return f"[call {event['number']}, {window}: {event['status']}] {event['text']}"
    if kind == "call":
        return ""
    if event["status"] != "ok":
        return f"answer: none ({event['status']}: {event['error']})"
    answer = event["text"] or "none"
    return f"answer: {answer}   ({event['frames']} frames, {event['windows']} windows)"


# ------------------------------------------------------------------------------------------------
# The terminal


def ask(worker, tasks, num_frames):
    """Asks one question after the other and prints how the agent comes to its answers -> records.
    """
    async def narrated(episode, worker):
        async for event in run_events(episode, worker):
            line = line_of(event)
            if line:
                print(f"{event['at']:6.1f} s  {launch.printable(line)}", flush=True)
        return episode

    rows = []
    for task in tasks:
        # Another seed for each question; the step has no other meaning here.
        (episode,) = rollout.run(worker, [task], num_frames, step=len(rows), play=narrated)
        rows.append(episode.to_dict())
    return rows


def read_questions(args):
    """-> iterator of tasks about --video."""
    if not args.question:
        launch.print0("a question a line, | before each option; Ctrl-D ends")
    for number, line in enumerate([args.question] if args.question else sys.stdin, 1):
        question, *options = map(str.strip, line.split("|"))
        if question:
            yield {"id": f"question-{number}", "video": os.path.basename(args.video),
                   "question": question, "options": options or None, "answer": None,
                   "type": "mcq" if options else args.type}


def split_options(text):
    """A text with options, "A. .." or "(A) .." one a line -> (question, options, text after them);
    (text, [], "") if it has none."""
    options, start, end = [], 0, 0
    for label in re.finditer(r"(?m)^\s*\(?([A-Z])[.):]\s+(\S.*)", text):
        # Only the next letter in order begins an option, so "I. Newton" in a text does not.
        if not string.ascii_uppercase.startswith(label[1], len(options)):
            continue
        if not options:
            start = label.start()
        elif text[end : label.start()].strip():  # text between them: no list of options
            return text, [], ""
        options.append(label[2].strip())
        end = label.end()
    if len(options) < 2:
        return text, [], ""
    return text[:start].strip(), options, text[end:].strip()


def videos_below(path):
    """A path -> iterator of the videos there: a file, or in a folder and below it files of videos
    and folders of frames."""
    if os.path.isfile(path):
        yield path
    for folder, below, files in os.walk(path):
        if "fps" in files or "times.txt" in files:  # see docs/your-own-data.md
            below.clear()
            yield folder
            continue
        for file in files:
            if file.lower().endswith(VIDEO_FILES):
                yield os.path.join(folder, file)


# ------------------------------------------------------------------------------------------------
# The command line


def add_arguments(parser):
    """Flags that tools/serve.py has too."""
    add = parser.add_argument_group("agent of the questions").add_argument
    add("--ckpt", required=True, help="checkpoint folder, or OWNER/NAME on the Hub")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    add("--frames", type=launch.positive, default=64, help="overview frames K")
    add("--type", choices=["open", "list", "grounding"], default="open",
        help="of answers without options, as the model was trained; the toy: list")
    rollout.add_agent_arguments(parser)
    # One answer, the same each time.
    parser.set_defaults(temperature=0.0, gpu_memory_utilization=0.9)


def parse_args(parser):
    """-> the arguments, with the defaults of their preset."""
    if parser.parse_args().preset == "toy":  # read twice: any flag overrides the preset
        parser.set_defaults(**rollout.toy_defaults(), type="list")
    return parser.parse_args()


def load_worker(args):
    """The arguments -> RolloutWorker with the engine of --ckpt."""
    from plumbing import checkpoint

    ckpt = checkpoint.resolve(args.ckpt)
    agent, source = rollout.agent_settings(args, None)
    launch.print0(f"{args.ckpt}: loading")
    codec = chat.load_codec(ckpt, args.chat_template_kwargs)
    return rollout.RolloutWorker(rollout.make_engine(ckpt, codec, args), codec, source, agent)


def main():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("what to ask").add_argument
    add("--video", required=True, help="a video: a file, or a folder of frames")
    add("--question", help="default: questions are read from the terminal")
    add("--out", help="rollout JSONL to write, for tools/view.py; default: none is written")
    add_arguments(parser)
    args = parse_args(parser)
    if not os.path.exists(args.video):
        raise launch.UserError(f"--video {args.video}: no such file or folder")
    args.video = os.path.realpath(args.video)  # a link may lead out of its folder
    args.video_root = os.path.dirname(args.video)
    worker = load_worker(args)
    rows = ask(worker, read_questions(args), args.frames)
    if args.out:
        launch.write_jsonl(args.out, rows)
        print(f"{len(rows)} answers -> {args.out}")
    failed = any(row["status"] != "ok" for row in rows)  # a question without an answer
    launch.end_process_group(worker.engine, int(failed))


if __name__ == "__main__":
    launch.run_main(main)
