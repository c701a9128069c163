"""
scripted.py: an engine and an endpoint that speak from a script, and episodes against them. So the
protocol is tested without a model.
"""
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import chat
import rollout
from engine import Completion
from evaluation import systems
from plumbing import judge

# What endpoints are asked at a start.
PROBES = ([{"role": "user", "content": "Reply with yes."}], judge.judge_messages(*judge.PROBE))
ANSWER = "I saw red.\n</think>\n<answer>red</answer>"
CALL = ('<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 8, "end_time": 16}}\n'
        "</tool_call>")
# flags of short runs of grpo.py
LIVE = ("--prompts", 2, "--num-generations", 3, "--max-new-tokens", 6, "--temperature", 1.0,
        "--frames", 4)
AGENT = rollout.AgentConfig(max_model_len=4096, max_new_tokens=512, sub_max_new_tokens=64)


def call(start, end, **more):
    arguments = {"start_time": start, "end_time": end, **more}
    body = json.dumps({"name": "crop_video", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def calls(*windows):
    return "I need a closer look.\n</think>\n" + "\n".join(call(*w) for w in windows)


def is_sub(request):
    """Ids of requests are step/task/sample/turn, and one part more for a sub-agent."""
    return request.id.count("/") == 4


def turn_of(request):
    return int(request.id.split("/")[3])


def window_of(request):
    """Window of a sub-agent's request, from what it was told."""
    return request.items[0].spec["start"], request.items[0].spec["end"]


class Scripted:
    """An engine that speaks from a script. main: texts by turn, or a function of the request; sub:
    one text or a function. A function may return a Completion to answer with as it is, or None: the
    request failed. hold(request): not to be answered yet. at_once: a poll answers all that wait,
    and comes only after all frames are there, so that batches do not depend on the machine. codec
    None: an endpoint, which has no ids."""

    max_seqs = 4

    def __init__(self, codec, main, sub="a red square", hold=None, newest_first=False,
                 at_once=False):
        self.codec, self.newest_first, self.at_once = codec, newest_first, at_once
        self.patient, self.closed = at_once, False
        self.hold = hold or (lambda request: False)
        self.main = main if callable(main) else lambda r: main[min(turn_of(r), len(main) - 1)]
        self.sub = sub if callable(sub) else lambda request: sub
        self.requests, self.answered, self.log, self.waiting, self.idle = [], set(), [], [], 0

    def submit(self, request):
        self.requests.append(request)
        self.waiting.append(request)
        # Step, task and sample name an episode: no more of them begin than there is room for.
        assert len({tuple(r.id.split("/")[:3]) for r in self.waiting}) <= 2 * self.max_seqs
        self.log.append(("submit", request.id))

    def abort(self, name):
        self.waiting = [r for r in self.waiting if r.id != name]
        self.log.append(("abort", name))

    def poll(self):
        ready = [r for r in self.waiting if not self.hold(r)]
        if self.at_once:
            self.waiting = []
            return [self.answer(request) for request in ready]
        if not ready:
            self.idle += 1
            assert self.idle < 20_000, "stalled: " + ", ".join(r.id for r in self.waiting)
            time.sleep(0.001)
            return []
        request = ready[-1 if self.newest_first else 0]
        self.waiting.remove(request)
        return [self.answer(request)]

    def answer(self, request):
        self.answered.add(request.id)
        self.log.append(("answer", request.id))
        said = (self.sub if is_sub(request) else self.main)(request)
        if said is None:
            return Completion(request.id, error="HTTP 500")
        if self.codec is None and isinstance(said, str):
            return Completion(request.id, text=said, ended=True)
        return said if isinstance(said, Completion) else self.complete(request, said)

    def close(self, code=0):
        self.closed = True

    def complete(self, request, text):
        """Text as a model would have sampled it: never a banned id, nothing after the end of the
        turn, at most max_tokens."""
        ids = [i for i in chat.encode(self.codec, text) if i not in self.codec.suppress_tokens]
        spoken = ids[: ids.index(self.codec.eos)] if self.codec.eos in ids else ids
        ids = (spoken + [self.codec.eos])[: request.max_tokens]
        return Completion(request.id, ids, [-(n + 1) / 7 for n in range(len(ids))],
                          chat.decode(self.codec, ids), ids[-1] == self.codec.eos)

    def mains(self):
        return [r for r in self.requests if not is_sub(r)]

    def subs(self):
        return [r for r in self.requests if is_sub(r)]


class Server:
    """An OpenAI-compatible endpoint on this machine. replies: what to answer, in order (the last
    one for ever): a text, None for no content, an HTTP status, (status, JSON or text, headers), or
    bytes to send as they are. Keeps what it was asked.
    probe: the answer to a probe, the same for ever; probes are not kept."""

    def __init__(self, *replies, probe="yes"):
        self.asked, self.headers, outer = [], [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = probe
                if body["messages"] not in PROBES:
                    outer.asked.append(body)
                    outer.headers.append((self.path, dict(self.headers)))
                    reply = replies[min(len(outer.asked), len(replies)) - 1]
                reply = reply(body) if callable(reply) else reply
                if isinstance(reply, str | None):
                    choice = {"message": {"content": reply}, "finish_reason": "stop"}
                    reply = json.dumps({"choices": [choice], "model": "m-1"}).encode()
                elif isinstance(reply, int):
                    reply = reply, "", {}
                status, content, headers = (200, reply, {}) if isinstance(reply, bytes) else reply
                if not isinstance(content, bytes):
                    content = json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01},
                         daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def play(engine, tasks, source, agent=AGENT, frames=4, group=1, step=0, **more):
    """All episodes, in the order of tasks and samples; of an endpoint, which has no codec, by the
    loop of the other systems. more: of the RolloutWorker."""
    order = {task["id"]: n for n, task in enumerate(tasks)}
    sampler = rollout.RolloutWorker(engine, engine.codec, source, agent, **more)
    if engine.codec:
        done = list(rollout.run(sampler, tasks, frames, group, step))
    else:
        done = list(systems.run(sampler, tasks, systems.all_systems()["paravt"], frames, group))
    return sorted(done, key=lambda e: (order[e.task["id"]], e.sample))


def play_one(engine, tasks, source, agent=AGENT, frames=4, **more):
    (episode,) = play(engine, tasks[:1], source, agent, frames, **more)
    return episode


def text_of(codec, ids):
    return chat.decode(codec, ids, keep_end=True)
