"""
evaluation/endpoint.py (tests/test_endpoint.py): OpenAI-compatible endpoints as an engine, by the
openai client, and a judge's verdicts on the open answers of an evaluation.

Endpoints take messages and return text, without ids and log-probs, so they serve evaluation alone.
A text that the server refuses is the error of its episode, never a text that would be graded. A
server that does not answer ends the run with exit code 1; the same command goes on.

Asks endpoints; writes the verdicts of a judge. Used by eval.py, tools/ask.py, tools/draft.py.
"""

import asyncio
import base64
import io
import json
import queue
from dataclasses import dataclass

import chat
from engine import Completion, Request
from plumbing.judge import ChatClient, Refused, base_url, open_judge, read_verdicts

# ------------------------------------------------------------------------------------------------
# Flags


def add_arguments(parser):
    """Flags of endpoints."""
    add = parser.add_argument_group("endpoint, in place of --ckpt").add_argument
    add("--base-url", nargs="+", metavar="URL", type=base_url,
        help="for example http://127.0.0.1:8000/v1; several take turns")
    add("--model", help="name of the model there")
    add("--api-key-env", help="environment variable that holds the key")
    add("--request", metavar="JSON", type=json.loads, default={},
        help='fields of every request; null takes one out: {"max_tokens": null, '
        '"max_completion_tokens": 2048, "top_p": 0.9}')


# ------------------------------------------------------------------------------------------------
# The engine


@dataclass
class ChatRequest(Request):
    """A Request with the same contents as a chat, for endpoints without ids."""

    messages: list = None
    prefill: str = ""  # forced start of the turn
    tools: list = None  # schema, for the server's chat template
    stop: tuple = ()  # strings that end the turn and stay in it


class OpenAIEngine(ChatClient):
    """Any OpenAI-compatible chat endpoint, as an engine of rollout.py."""

    takes_messages = True

    def __init__(self, base_urls, model, key_variable=None, workers=8, seconds=300.0,
                 prefill=False, jpeg_quality=90, fields=None):
        """base_urls: they take turns. workers: requests at once. seconds: of one try. prefill: a
        turn's forced start goes as a begun turn (vLLM and SGLang take it). jpeg_quality: of
        images. fields: of every request; None takes one out."""
        super().__init__(base_urls, model, key_variable, seconds, workers)
        self.max_seqs = workers
        self.prefill, self.jpeg_quality, self.fields = prefill, jpeg_quality, fields or {}
        self.calls, self.done = {}, queue.SimpleQueue()

    def check_servers(self):
        """Asks each for a few tokens. Raises UserError if one does not answer, or refuses."""
        probe = [{"role": "user", "content": "Reply with yes."}]
        self.check(self.body(ChatRequest("probe", [], [], [], [], 16, 0.0, 0, probe)))

    def wait_for(self, request):
        """Request -> Completion. Raises RunError if no server answers."""
        return self.run(self.ask(request)).result()

    def submit(self, request):
        call = self.run(self.ask(request))
        self.calls[request.id] = call
        call.add_done_callback(self.done.put)

    def abort(self, name):
        if name in self.calls:
            self.calls.pop(name).cancel()

    def poll(self):
        """-> Completions that have arrived. Waits 20 ms for the first, so that no core spins.
        Raises RunError if no server answers."""
        arrived = []
        try:
            arrived.append(self.done.get(timeout=0.02))
            while True:
                arrived.append(self.done.get_nowait())
        except queue.Empty:
            pass
        finished = [call.result() for call in arrived if not call.cancelled()]
        for completion in finished:
            self.calls.pop(completion.id, None)
        return finished

    async def ask(self, request):
        """Request -> Completion."""
        body = await asyncio.to_thread(self.body, request)  # JPEGs take a tenth of a second
        try:
            answer, choice = await self.chat(body)
        except Refused as error:
            return Completion(request.id, error=str(error))
        message, text = choice.message, choice.message.content
        if message.tool_calls:
            return Completion(request.id, error="start the server without --tool-call-parser")
        # Gateways name the limit in three ways.
        ended = choice.finish_reason not in ("length", "max_tokens", "model_length")
        if not text and not ended:
            return Completion(request.id, error="the answer was cut off before its first word: "
                              "give more --max-new-tokens")
        thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        # Some servers repeat the begun turn.
        completion = Completion(request.id, text=text.removeprefix(request.prefill), ended=ended,
                                reasoning=str(thought or ""))
        if answer.usage:
            completion.tokens = answer.usage.total_tokens
        return completion

    def body(self, request):
        """Request -> fields of a request."""
        body = {"messages": self.chat_messages(request), "max_tokens": request.max_tokens,
                "temperature": request.temperature, "seed": request.seed}
        if request.tools:  # for the template alone: our own parser reads calls from the text
            body.update(tools=request.tools, tool_choice="none")
        if request.stop:
            body.update(stop=list(request.stop), include_stop_str_in_output=True)
        if self.prefill and request.prefill:  # the server is told to go on with our turn
            body["messages"].append({"role": "assistant", "content": request.prefill})
            body.update(add_generation_prompt=False, continue_final_message=True)
        body.update(self.fields)
        return {name: value for name, value in body.items() if value is not None}

    def chat_messages(self, request):
        """Request -> chat messages with frames as JPEGs after their times. Consecutive tool
        messages become one user turn, as in the chat template of the policy."""
        frames, messages, last_role = iter(request.frames), [], None
        for message in request.messages:
            parts = []
            for piece in chat.content_of(message):
                if piece["type"] == "text":
                    parts.append({"type": "text", "text": piece["text"]})
                else:
                    parts += self.frame_parts(next(frames), piece.get("stamp"))
            role = message["role"]
            if role == "tool":
                head = "<tool_response>\n"
                if last_role == "tool":
                    head = "\n<tool_response>\n"
                parts = [{"type": "text", "text": head}, *parts,
                         {"type": "text", "text": "\n</tool_response>"}]
            if role == last_role == "tool":
                messages[-1]["content"] += parts
            else:
                messages.append({"role": role.replace("tool", "user"), "content": parts})
            last_role = role
        for message in messages:  # some endpoints take no parts where a string will do
            if all(part["type"] == "text" for part in message["content"]):
                message["content"] = "".join(part["text"] for part in message["content"])
        return messages

    def frame_parts(self, frames, stamp):
        """Frames -> parts of a message."""
        if hasattr(frames, "path"):  # frame_sources.ServerVideo: the server reads the file
            return [{"type": "video_url", "video_url": {"url": f"file://{frames.path}"}}]
        parts = []
        for index, (image, seconds) in enumerate(zip(frames.images, frames.seconds)):
            text = chat.stamp_text(seconds, index, stamp)
            if text:
                parts.append({"type": "text", "text": text})
            url = jpeg_url(image, self.jpeg_quality)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return parts


def make_engine(args, prefill, jpeg_quality=90):
    """Flags -> OpenAIEngine. Raises UserError if a server does not answer, or refuses. prefill: the
    system's forced start of every turn, or "". jpeg_quality: of images."""
    fields = {}
    for name in ("top_p", "top_k", "presence_penalty"):  # of the system, if it sets them
        if getattr(args, name, None) is not None:
            fields[name] = getattr(args, name)
    engine = OpenAIEngine(
        args.base_url, args.model, args.api_key_env, args.max_num_seqs, jpeg_quality=jpeg_quality,
        prefill=bool(args.think_prefix or prefill), fields={**fields, **args.request})
    engine.check_servers()
    return engine


def jpeg_url(image, quality):
    """uint8 [H, W, 3] -> data URL."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# ------------------------------------------------------------------------------------------------
# The judge of open answers


def judge(records, path, args):
    """Lets a chat endpoint decide open answers that the rule calls wrong. A yes makes the score 1.

    path: file of verdicts. records get "judge": True, False, or None after a failure, and then the
    rule's score stays. args: the judge's flags; without judge_url only known verdicts count.
    """
    doubtful = [r for r in records if r["task"]["type"] == "open" and r["score"] == 0
                and r["extracted"] is not None]
    texts = [(r["task"]["question"], r["task"]["answer"], r["extracted"]) for r in doubtful]
    verdicts = read_verdicts(path, args.judge_model)
    if args.judge_url and not verdicts.keys() >= set(texts):
        client = open_judge(args, path)
        futures = [client.ask(*text) for text in texts]
        verdicts = {text: future.result() for text, future in zip(texts, futures)}
        client.close()
    for record, text in zip(doubtful, texts):
        record["judge"] = verdicts.get(text)
        record["score"] = float(record["judge"] is True)
