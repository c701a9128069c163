"""
ask.py: one film, one question: how the agent looks at the film, and its answer.

Prints turns, calls and summaries as they come, each with its seconds. Frames and prompts stay in
the caches, so a second question about a film is faster. The episode is that of rollout.py.

Reads:  a checkpoint folder, a film: a file or a folder of frames. Questions come from --question,
        from the terminal or from a pipe, one a line; options follow a question after bars.
Writes: --out, if given: rollout JSONL without rewards.

  python ask.py --ckpt C --video film.mp4 --question "Who opens the door?"
"""
import asyncio
import os
import string
import sys
import time
from functools import partial

import data
import launch
import rewards
import rollout


def add_film_arguments(add) -> None:
    """Flags of a question about one film. add: add_argument of a parser."""
    add("--video", help="a film to ask about, a file or a folder of frames")
    add("--question", help="about --video; default: questions are read from the terminal")
    add("--options", nargs="+", metavar="TEXT", help="of that question; default: an open answer")


def check_film(args) -> None:
    """Makes the path of --video absolute. Raises UserError for flags that lack another one."""
    if (args.question or args.options) and not (args.video and args.question):
        raise launch.UserError("--question belongs to --video, and --options to --question")
    if args.video:
        args.video = os.path.realpath(args.video)  # a link may lead out of its folder
        if not os.path.exists(args.video):
            raise launch.UserError(f"--video {args.video}: no such file")


def film_task(args, number=0, question="", options=None) -> dict:
    """A question about --video as a task without a gold answer."""
    return {"id": f"question-{number}", "video": os.path.basename(args.video),
            "question": question, "options": options or None, "answer": None,
            "type": "mcq" if options else "open"}


def questions(args):
    """-> iterator of tasks about --video: --question alone, or lines from the terminal or a
    pipe. Options follow a question after bars."""
    given, number = [[args.question, *(args.options or [])]], 0
    while given:
        line = given.pop() if args.question else typed_question()
        if not line:
            return
        number += 1
        yield film_task(args, number, line[0], line[1:])
        given += [] if args.question else [None]


def typed_question() -> list[str] | None:
    """One line of standard input -> [question, option, ..], or None at the end: an empty line or
    Ctrl-C at a terminal, the end of a pipe."""
    terminal = sys.stdin.isatty()
    line = ""
    while not line:
        try:
            line = input("question (| before each option; an empty line ends): " * terminal).strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if terminal and not line:
            return None
    return [part.strip() for part in line.split("|")]


async def narrated(episode, sampler, play=rollout.run_episode) -> rollout.Episode:
    """`play`, which also prints turns, calls and summaries as they come, each with the seconds that
    it took."""
    last, turns, told = time.monotonic(), 0, set()  # told: numbers of calls

    def took():
        nonlocal last
        before, last = last, time.monotonic()
        return last - before

    def tell_calls(before):
        """The calls of turns below `before` that have been answered."""
        for number, call in enumerate(episode.calls):
            if number in told or call["status"] == "pending" or call["turn"] >= before:
                continue
            told.add(number)
            seconds = f", {call['seconds']:.1f} s" if "seconds" in call else ""
            window = f"{call['start']} to {call['end']} s" if call["parseable"] else "no window"
            print(f"  [call {number + 1}, {window}: {call['status']}{seconds}] "
                  f"{launch.printable(call['summary'])}", flush=True)
            took()

    work = asyncio.create_task(play(episode, sampler))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=0.05)
            for text in episode.turns[turns:]:
                tell_calls(turns)  # a fast engine may be two turns further
                turns += 1
                print(f"[turn {turns}, {took():.1f} s] {launch.printable(text.strip())}",
                      flush=True)
            tell_calls(turns)
        return work.result()
    finally:
        work.cancel()  # if the run ends early


def ask(sampler, tasks, frames, play=rollout.run_episode, final=None) -> list[dict]:
    """
    Asks one question after the other and prints how the agent comes to its answers -> records.
    Frames and prompts stay in the caches, so a second question about a film is faster.

    play: the episode loop. final: (turns, think_open) -> answer or None; default: as in training.
    """
    rows = []
    for task in tasks:
        # Another seed for each question; the step has no other meaning here.
        (episode,) = rollout.run(sampler, [task], frames, step=len(rows),
                         play=partial(narrated, play=play))
        print(answer_line(episode, final or rewards.answer_or_tail), flush=True)
        rows.append(episode.to_json())
    return rows


def answer_line(episode: rollout.Episode, final) -> str:
    """The end of an episode -> one line: the answer, the frames shown, the seconds."""
    options = episode.task["options"]
    said = final(episode.turns, episode.think_open)
    letter = rewards.extract_letter(said, options) if said and options else None
    if episode.status != "ok":
        said = f"none ({episode.status}: {episode.error})"
    elif letter:
        said = f"{letter}. {data.bare_options(options)[string.ascii_uppercase.index(letter)]}"
    frames = len(episode.notes.get("seconds", []))
    return (f"answer: {launch.printable(said or 'none')}   ({frames} frames, "
            f"{episode.executed()} windows, {episode.timing.get('total_s', 0.0):.1f} s)")


def parse_args():
    parser = launch.parser(__doc__)
    add = parser.add_argument_group("what to ask").add_argument
    add("--ckpt", required=True, help="checkpoint folder")
    add_film_arguments(add)
    add("--out", help="rollout JSONL to write; default: none is written")
    add("--preset", choices=["paper", "toy"], default="paper", help="toy: lengths for toy.py")
    add("--frames", type=int, default=64, help="K")
    rollout.add_agent_arguments(parser)
    # One answer, the same each time.
    lengths = rollout.toy_lengths() if launch.peek(parser).preset == "toy" else {}
    parser.set_defaults(temperature=0.0, **lengths)
    args = parser.parse_args()
    check_film(args)
    if not args.video:
        raise launch.UserError("give --video: a film to ask about")
    launch.at_least(1, args, "frames")
    rollout.check_rollout_file(args.out, args.video)
    return args


def main():
    args = parse_args()
    first = film_task(args, 0, args.question or "", args.options)
    sampler = rollout.set_up(args, [first], args.video)
    rows = ask(sampler, questions(args), args.frames)
    rollout.write(rows, args.out)
    if args.out:
        print(f"{len(rows)} answers -> {args.out}")


if __name__ == "__main__":
    launch.run_main(main)
