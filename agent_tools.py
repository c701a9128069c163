"""
agent_tools.py (tests/test_rewards.py, tests/test_rollout.py): the tools that the main agent may
call, one class each. A second tool is one more class here and one more entry of TOOLS.

  name                           as the model writes it
  prompt(response)               what the system prompt says of it
  schema(response)               what the chat template declares
  parse(arguments)               what the model wrote -> fields of the call's record; ValueError
  spec(call, task, duration)     the record of a call -> what video.load shall read; ValueError
  answered_by(response)          "sub_agent": fresh eyes look at the start and end of spec, a text
                                 comes back; "main": the frames stand in the main context. A text
                                 that a program computes needs a branch in rollout.answer_call
  max_frames                     of one call

response: --crop-response, "summary" or "frames". The text of a ValueError is the response to the
call, so it must tell the model what to write instead. "start" and "end" of a record are the seconds
that were looked at, by which windows are judged; a tool that does not look leaves them out. R_tool
pays for every executed call. rollout.py, rewards.py and the limits of the
engine go over TOOLS. A changed prompt or schema needs new data of toy.py and a new cold start.

Reads and writes nothing. Used by rollout.py, rewards' parser and evaluation/.
"""
import rewards


def read_time(arguments, name, alias):
    """The argument of this name, or of its alias -> seconds. Raises ValueError for the model."""
    if name not in arguments and alias not in arguments:
        raise ValueError(f'{name} is missing, expected seconds or "MM:SS"')
    try:
        return rewards.to_seconds(arguments.get(name, arguments.get(alias)))
    except ValueError:
        raise ValueError(f'{name} is not a time, expected seconds or "MM:SS"') from None


def read_whole(arguments, name, low, high):
    """An argument that must be a whole number from low to high; 8, 8.0 and "8" all are 8. Raises
    ValueError for the model."""
    try:
        number = float(str(arguments[name]))  # str: true would be 1.0
    except (KeyError, ValueError):
        number = float("nan")
    # NaN and infinity fail this test too.
    if not (low <= number <= high and number % 1 == 0):
        raise ValueError(f"{name} must be a whole number of at least {low} and at most {high}")
    return int(number)


class CropVideo:
    """Look at one window of the video more closely."""

    name = "crop_video"
    fps = 1.0  # frames per second of a window, unless the model gives a number
    max_frames = 16

    def prompt(self, response):
        returned = "a short summary" if response == "summary" else "frames"
        return (
            "If the frames do not show what you need, call crop_video once for each window you "
            "want to see closely; several calls in one turn run at the same time. Every call "
            f"returns {returned} of its window."
        )

    def schema(self, response):
        returned = "frames of it"
        if response == "summary":
            returned = "a short text summary of what happens there"
        return {
            "name": self.name,
            "description": f"Look closely at one window of the video. Returns {returned}.",
            "parameters": {
                "type": "object",
                "required": ["start_time", "end_time"],
                "properties": {
                    "start_time": {
                        "type": "number",
                        "description": "start of the window in seconds from the start of the video",
                    },
                    "end_time": {
                        "type": "number",
                        "description": "end of the window in seconds",
                    },
                    "num_frames": {
                        "type": "integer",
                        "description": "frames to look at; default: one per second, at most 16",
                    },
                },
            },
        }

    def parse(self, arguments):
        start = read_time(arguments, "start_time", "start")
        end = read_time(arguments, "end_time", "end")
        # A negative start is no error here, because `spec` clamps windows to the video.
        if end <= start:
            raise ValueError(
                "the window is empty or reversed, end_time must be greater than start_time"
            )
        num_frames = None
        if arguments.get("num_frames") is not None:
            num_frames = read_whole(arguments, "num_frames", 1, 10**6)
        # Other arguments are ignored: the published data gives a video_path, and no call may choose
        # the video.
        return {"start": start, "end": end, "num_frames": num_frames}

    def spec(self, call, task, duration):
        start, end = call["start"], call["end"]
        if start >= duration or end <= 0:
            extent = f"the video, which runs from 0 to {duration:g} s"
            raise ValueError(f"window {start:g}-{end:g} s holds nothing of {extent}")
        # Clamped: the sub-agent and the record shall name the part that is shown.
        return {
            "video": task["video"],
            "start": max(0.0, start),
            "end": min(end, duration),
            "fps": self.fps,
            "num_frames": call["num_frames"],
            "max_frames": self.max_frames,
        }

    def answered_by(self, response):
        return "sub_agent" if response == "summary" else "main"


TOOLS = {tool.name: tool for tool in [CropVideo()]}
