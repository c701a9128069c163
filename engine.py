"""
engine.py: continuations of contexts, sampled by vLLM inside the trainer's own process.

  request      ids of a context, with decoded frames -> completion: sampled ids and log-probs
  pump         lets many coroutines await one engine, which batches all requests that wait
  new weights  sleep() frees memory for a training step, wake(weights) loads the trainer's tensors

Departs from the usual server beside the trainer: no copy of the weights on disk, no network. The
engine's log-probs are those of the distribution that was sampled from: temperature and banned ids
applied, no top-p and no top-k (eval.py alone may set these).

Below the ruled line: any OpenAI-compatible chat endpoint as an engine, for evaluation/, and the
judge of open answers, one prompt and one parser for evaluation and for rewards.

Reads a checkpoint folder; the judge keeps its verdicts in a file. Keys of endpoints come from an
environment variable and are never printed or stored. Used by rollout.py and evaluation/; copy Pump
for any engine that has submit(request) and poll().
"""
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import chat
import launch

# ------------------------------------------------------------------------------------------------
# Requests and completions


@dataclass
class Request:
    """One generation: everything that an engine needs to continue one context."""

    id: str  # unique among the requests in flight
    ids: list  # compact: one placeholder per frame, which the engine expands
    expanded: list  # as the trainer sees the context; the engine must expand `ids` to exactly these
    items: list  # [chat.VisionItem]
    frames: list  # [video.Frames], one per item
    max_tokens: int  # to sample
    temperature: float
    seed: int


@dataclass
class Completion:
    """The answer to a Request."""

    id: str  # of the request
    ids: list = None  # sampled ids, with the end of turn if the model wrote one; None: an endpoint
    logps: list = None  # one per sampled id, of the distribution sampled from
    text: str = ""  # without the end of turn
    ended: bool = False  # False: cut off by max_tokens
    reasoning: str = ""  # an endpoint's text apart from the turn; kept, but never graded
    error: str = None  # why the request failed; then the other fields are empty


# ------------------------------------------------------------------------------------------------
# The pump


class Pump:
    """Lets coroutines await an engine that only knows submit(request) and poll().

    One thread owns the engine. In each turn of `steps`, every episode that can goes on; then the
    engine takes one step on all requests that wait. There is no barrier: a fan-out starts the
    moment the turn before ends, at whatever point the other episodes are.
    """

    def __init__(self, engine, threads: int):
        """threads: videos that are decoded at once."""
        self.engine = engine
        self.waiting = {}  # request id -> Future of its Completion
        self.loading = 0  # videos being decoded
        self.idle_s = 0.0  # seconds in which the engine could only wait for frames
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    async def sample(self, request: Request) -> Completion:
        # The future exists before the engine knows the request, so no completion can miss it.
        self.waiting[request.id] = asyncio.get_running_loop().create_future()
        self.engine.submit(request)
        return await self.waiting[request.id]

    def load(self, function, *args):
        """Starts function(*args) in a thread -> Future. Awaiting the Future raises the function's
        error, if there was one."""
        self.loading += 1
        future = asyncio.get_running_loop().run_in_executor(self.pool, function, *args)
        future.add_done_callback(self.loaded)
        return future

    def loaded(self, future):
        self.loading -= 1

    async def steps(self):
        """Runs the engine until this coroutine is cancelled."""
        # The tests' reference engine batches all requests that wait. The same batches come again
        # only if the engine is polled after all pending decodes have finished.
        patient = getattr(self.engine, "patient", False)
        while True:
            # A completion wakes an episode, which starts sub-agents, which submit requests: one
            # round of the loop each. Polling after the first round would miss those requests.
            for _ in range(4):
                await asyncio.sleep(0)
            if self.waiting and not (patient and self.loading):
                for done in self.engine.poll():
                    self.waiting.pop(done.id).set_result(done)
            else:
                began = time.monotonic()
                await asyncio.sleep(0.001)  # lets finished decodes wake their episodes
                self.idle_s += time.monotonic() - began


async def in_flight(pump: Pump, episodes, live: int):
    """Runs coroutines (an iterator) on the pump, at most `live` at once -> async iterator of their
    results, in the order in which they finish. Raises the first error of a coroutine or of the
    engine."""
    steps = asyncio.create_task(pump.steps())
    running = []
    try:
        while True:
            while len(running) < live and (work := next(episodes, None)) is not None:
                running.append(asyncio.create_task(work))
            if not running:
                return
            done, _ = await asyncio.wait({steps, *running}, return_when=asyncio.FIRST_COMPLETED)
            if steps in done:
                steps.result()  # raises the engine's error; the episodes would wait for ever
            # In the order in which they began, because `done` is a set without an order.
            for task in [task for task in running if task in done]:
                running.remove(task)
                yield task.result()
    finally:
        # Also if the caller stops early: no coroutine and no thread outlives the iterator.
        for task in (steps, *running):
            task.cancel()
        await asyncio.gather(steps, *running, return_exceptions=True)
        pump.pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------
# vLLM


@dataclass
class Limits:
    """The largest requests that an engine can serve, and the memory that the engine may take."""

    context: int  # tokens
    max_frames: int = 64  # images in one context, or frames of one video
    max_pixels: int = 50176  # of a frame
    max_seqs: int = 64  # requests in a batch
    gpu_memory: float = 0.5  # fraction of the card
    sleeping: bool = False  # give memory back while the trainer works (GPU)
    max_videos: int = 1  # in one context


class VllmEngine:
    """vLLM inside this process, on CPU or GPU. Requests join its continuous batch while others run.

    In this process because the worker then shares the shim, the ranks and the trainer's tensors.
    """

    def __init__(self, ckpt: str, codec: chat.Codec, limits: Limits):
        """ckpt: folder of a whole checkpoint, not of adapters. Collective under torchrun on GPUs.
        """
        import atexit
        import gc

        import torch

        launch.import_shim()
        gpu = torch.cuda.is_available()
        # vLLM takes these switches from the environment alone.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if not gpu:
            # vLLM would bind threads to cores, and the threads of all ranks to the same core.
            os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind")
        threads = torch.get_num_threads()
        from transformers import AutoConfig
        from vllm import LLM, ModelRegistry

        if gpu:
            options = dict(dtype="bfloat16", gpu_memory_utilization=limits.gpu_memory,
                           enable_sleep_mode=limits.sleeping)
            if "RANK" in os.environ:  # one engine per rank, TP 1; building it is collective
                options["distributed_executor_backend"] = "external_launcher"
        else:
            # vLLM compiles a small function that counts ranks, in every process, for seconds.
            torch.compiler.set_stance("force_eager")
            # vLLM would inspect the class in a subprocess, which has no shim.
            inside = importlib.import_module(
                f"vllm.model_executor.models.{codec.base.engine_module}")
            ModelRegistry.register_model(codec.base.model_class,
                                         getattr(inside, codec.base.model_class))
            # vLLM fills the KV cache with zeros at start, 1 to 3 s per GiB, so ask for little.
            text = AutoConfig.from_pretrained(ckpt, trust_remote_code=False).text_config
            heads = text.num_hidden_layers * text.num_key_value_heads
            room = limits.context * heads * text.head_dim * 2 * 4  # bytes of one context
            if codec.base.recurrent:  # a page of keys and values is as large as a layer's state
                state = text.linear_num_value_heads * text.linear_key_head_dim
                room += text.num_hidden_layers * state * text.linear_value_head_dim * 4
            # Chunked prefill rewinds a request's seeded generator, which CPU generators cannot do.
            # And states of gated-delta layers are cached at the ends of chunks only.
            options = dict(dtype=codec.base.cpu_dtype, enforce_eager=True,
                           enable_chunked_prefill=False,
                           enable_prefix_caching=not codec.base.recurrent,
                           kv_cache_memory_bytes=max(2 * room,
                                                     min(limits.max_seqs * room, 2**27)),
                           max_num_batched_tokens=max(limits.context, 8192))
        gc.collect()
        # vLLM runs gc.collect() eight times at start; objects that are frozen now are not searched.
        gc.freeze()
        atexit.register(gc.unfreeze)  # else the interpreter ends on 30 lines of leak warnings
        # The processor bounds the pixels of one image, but of a video all frames together.
        images = limits.max_frames if codec.channel == "image" else 0
        longest = limits.max_pixels * (1 if images else limits.max_frames)
        # Frames arrive at their final size, and these bounds keep the processor from resizing them
        # again. Do not inflate the upper bound: vLLM allocates the encoder for that size. Do not go
        # below two minimal frames: vLLM also computes a video's size, and would divide by zero.
        least = (codec.patch * codec.merge) ** 2
        size = {"shortest_edge": least, "longest_edge": max(longest, 2 * least)}
        self.llm = LLM(
            ckpt, max_model_len=limits.context, max_num_seqs=limits.max_seqs,
            trust_remote_code=False,
            generation_config="vllm",  # ignore top-p and top-k of the checkpoint
            limit_mm_per_prompt={"image": images, "video": limits.max_videos},
            logprobs_mode="processed_logprobs",  # after temperature and bias
            mm_processor_kwargs={"size": size}, disable_log_stats=True, use_tqdm_on_load=False,
            **options)  # fmt: skip
        torch.set_num_threads(threads)  # on CPU vLLM lowers the number for the whole process
        self.engine = self.llm.llm_engine
        self.codec = codec
        self.max_seqs = limits.max_seqs
        self.running = {}  # request id -> Request
        self.prompts = {}  # the latest prompts, see engine_prompt
        self.tied_on_cpu = not gpu and self.engine.model_config.hf_config.tie_word_embeddings
        self.sleeping = gpu and limits.sleeping
        self.sampling = {}  # more SamplingParams (top_p, ..), set by eval.py alone

    def submit(self, request: Request) -> None:
        from vllm import SamplingParams

        prompt = engine_prompt(request, self.codec, self.llm.renderer, self.prompts)
        # Training sets no top-p, top-k or penalty, because the trainer's log-probs are those of the
        # full softmax at this temperature, under this bias.
        params = SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed,
            logprobs=0, detokenize=False, stop_token_ids=[self.codec.eos],
            logit_bias={i: -100.0 for i in self.codec.banned}, **self.sampling)  # fmt: skip
        self.running[request.id] = request
        self.engine.add_request(request.id, prompt, params)

    def poll(self) -> list[Completion]:
        """One step of the engine -> the requests that it finished. Raises RuntimeError if the
        engine saw other ids than the trainer will."""
        finished = []
        for output in self.engine.step() if self.running else ():
            if not output.finished:
                continue
            request = self.running.pop(output.request_id)
            if list(output.prompt_token_ids) != list(request.expanded):
                raise RuntimeError(f"{request.id}: the engine's prompt ids differ from the "
                                   "trainer's (frames resized or placeholders expanded otherwise)")
            sampled = output.outputs[0]
            ids = list(sampled.token_ids)
            logps = [entry[token].logprob for token, entry in zip(ids, sampled.logprobs)]
            text = chat.decode(self.codec, ids)
            ended = ids[-1:] == [self.codec.eos]
            finished.append(Completion(request.id, ids, logps, text, ended))
        return finished

    def sleep(self) -> None:
        """Frees weights and KV cache while the trainer works, if Limits.sleeping is set."""
        if self.sleeping:
            self.llm.sleep(level=2)

    def wake(self, weights) -> None:
        """Takes memory again and loads new weights, see `sync`."""
        # The KV cache comes last: loading needs the memory that the cache then takes.
        if self.sleeping:
            self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc(zero_discarded, args=(("weights", "workspace"),))
        self.sync(weights)
        if self.sleeping:
            self.llm.wake_up(tags=["kv_cache"])
            self.llm.collective_rpc(zero_discarded, args=(("kv_cache",),))

    def sync(self, weights) -> None:
        """Loads new weights and drops every cache that the old ones made. weights: iterator of
        (name, full tensor)."""
        # Without an iterator reload_weights reads the base checkpoint from disk, without a warning.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.tied_on_cpu:
            self.llm.apply_model(repack_head)
        self.llm.reset_mm_cache()
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Stops the engine. Call this while the process group lives: vLLM's own hook at exit comes
        too late."""
        # Freeing memory that is not mapped prints "CUDA Error: invalid argument" per segment.
        if self.sleeping and self.engine.is_sleeping():
            self.llm.wake_up()
        self.engine.engine_core.shutdown()


def engine_prompt(request, codec, renderer, made, most=32):
    """A request -> the prompt that vLLM takes: pixels normalised and cut into patches, hashes, the
    places of the placeholders. made: {keys of the frames: (ids, prompt)}, the latest `most`.

    The samples of a group share one prompt, and a later turn is the prompt of the first turn with
    more text, so the work on pixels is done once.
    """
    key = tuple(f.key for f in request.frames)
    ids, prompt = made.pop(key, ([], None))
    if prompt is None or request.ids[:len(ids)] != ids:
        ids = list(request.ids)
        text = {"prompt_token_ids": ids}
        if request.frames:
            expanded, data, keys = vision_input(codec, request)
            text = {"prompt_token_ids": expanded, "multi_modal_data": data,
                    "multi_modal_uuids": keys}
        # Keep the pixels in the prompt. By default vLLM omits images that its cache has seen, but
        # the cache may have evicted them by the time this prompt is used again.
        (prompt,) = renderer.render_cmpl([text], skip_mm_cache=True)
    made[key] = ids, prompt  # at the end of the dict: used last
    if len(made) > most:
        del made[next(iter(made))]  # used longest ago
    more = request.ids[len(ids):]  # later turns and responses: text alone, as the frames are equal
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"] + more} if more else prompt


def vision_input(codec, request):
    """-> (prompt ids, multi_modal_data, multi_modal_uuids) of a request, as vLLM takes them."""
    # The uuids are the keys of the frames, so a group shares the outputs of the vision encoder.
    ids = list(request.ids)
    if codec.channel == "image":
        from PIL import Image

        images = [Image.fromarray(image) for f in request.frames for image in f.images]
        keys = [key for f in request.frames for key in f.frame_keys]
        return ids, {"image": images}, {"image": keys}
    clips = []
    for f in request.frames:
        images, seconds = f.images, f.seconds
        if len(images) == 1:  # the processor refuses one frame; patchify makes a pair as well
            images, seconds = images.repeat(2, 0), seconds.repeat(2)
        # The processor computes seconds as frames_indices / fps: with fps 1 an index is a second.
        clips.append((images, dict(
            fps=1.0, frames_indices=[float(s) for s in seconds], do_sample_frames=False,
            total_num_frames=len(images), duration=float(seconds[-1]) + 1.0)))
    # vLLM expands the placeholder alone, with markers around every pair of frames. The template's
    # markers around the whole video would stay, a form that Qwen3-VL was not trained on.
    for at in reversed([n for n, i in enumerate(ids) if i == codec.video_pad]):
        ids[at - 1:at + 2] = [codec.video_pad]
    return ids, {"video": clips}, {"video": [f.key for f in request.frames]}


def zero_discarded(worker, tags):
    """Zeroes the memory of vLLM's pool under these tags, after a level-2 sleep has discarded it.
    Runs inside the worker.

    Of these tags vLLM restores the model's buffers alone, and it copies the tag `runtime` to host
    memory and back. (Buffers of a draft model and preserved parameters, too: we have neither.) Its
    Model Runner V2 (the default on GPUs) builds more inside the pool of the weights: rotary
    positions, input embeddings and the sampler's state, whose padding CUDA graphs read, and the
    model has deepstack features, which a text-only prefill adds to the hidden states. torch.zeros
    makes all of them, so zeros are their first state. A level-1 sleep would keep them, but would
    copy all weights to host memory and back in each step.
    """
    import torch
    from vllm.device_allocator import cumem

    with torch.inference_mode():  # some buffers are inference tensors
        restored = [(buffer, buffer.clone()) for buffer in worker.model_runner.model.buffers()]
        for address, data in cumem.CuMemAllocator.get_instance().pointer_to_data.items():
            if data.tag in tags:
                cumem.libcudart.cudaMemset(address, 0, data.handle[1])  # bytes
        worker.synchronize_device()  # torch may use another stream than cudaMemset
        for buffer, values in restored:
            buffer.copy_(values)


def repack_head(engine_model):
    """Packs a tied lm_head again. On CPU vLLM multiplies by a packed copy of each matrix. A reload
    packs every layer that the iterator names, but not a tied lm_head, which has no name of its own.
    The head would stay old, and the log-prob gap would grow step by step."""
    head = engine_model.language_model.lm_head
    head.quant_method.process_weights_after_loading(head)


# ---- below: endpoints, and the judge of open answers (a reader of the step may stop here) -------


@dataclass
class ChatRequest(Request):
    """A Request with the same contents as a chat, for endpoints without ids."""

    messages: list = None
    prefill: str = ""  # forced start of the turn, already part of ids
    tools: list = None  # schema, already part of ids
    stop: tuple = ()  # strings that end the turn and stay in it


@dataclass
class OpenAIEngine:
    """Any OpenAI-compatible chat endpoint, as an engine of rollout.py. For evaluation and judges
    only, because endpoints return text without ids and log-probs."""

    takes_messages = True  # a request needs messages, ids are not sent
    base_url: object  # http://127.0.0.1:8000/v1, or a list: the least busy is asked
    model_name: str
    key_variable: str = None  # environment variable of the key, which is never printed or stored
    workers: int = 8  # requests at once, of each endpoint
    timeout: float = 300.0  # seconds of one request
    retries: int = 3
    prefill: bool = False  # a turn's forced start goes as a begun turn (vLLM and SGLang take it)
    image_cap: int = 0  # images of one request at most, evenly kept; 0 = no cap
    video_item: bool = False  # the overview as one video_url, which vLLM takes
    # Hosted endpoints differ in the name of the limit, and some take no temperature.
    tokens_field: str = "max_tokens"
    send_temperature: bool = True
    sampling: dict = None  # more fields of every request: top_p, .. (see sampling_settings)
    give_up: int = 3  # failed tries in a row, after which all requests wait; 0 = never
    server_wait: float = 120.0  # seconds of that wait, and of Retry-After, at most
    is_judge: bool = False  # error lines then name the flags of the judge

    def __post_init__(self):
        given = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        urls = [url.rstrip("/") + "/chat/completions" for url in given]
        self.busy = dict.fromkeys(urls, 0)  # url -> requests under way
        self.rests = dict.fromkeys(urls, 0.0)  # url -> when it is asked again after an error
        self.lock = threading.Lock()
        self.failed = 0  # tries in a row that no server answered
        self.awake = threading.Event()  # cleared while all requests wait for a server
        self.awake.set()
        self.over = threading.Event()  # set when the run must end, for the reason in `ending`
        self.ending = None
        self.handles = set()  # of open connections
        self.max_seqs = self.workers * len(self.busy)
        self.served = set()  # names of the models that answered
        self.usage = {}  # request id -> (prompt tokens, sampled tokens), as the endpoint counts
        self.pool = ThreadPoolExecutor(self.max_seqs)
        self.done = queue.SimpleQueue()  # futures of Completions

    def key(self):
        """The key, or an empty text."""
        # A file that was read into the variable often ends in a newline.
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    def probe(self, url, seconds):
        """Asks one server for a few tokens of text -> (Completion, status, seconds to wait), as
        `post` does."""
        request = ChatRequest("probe", [], [], [], [], 16, 0.0, 0, probe_messages())
        return self.post(url, request, json.dumps(self.body(request)).encode(), seconds)

    def knock(self):
        """Asks every server for a few tokens. Raises UserError if one does not answer or refuses,
        before any video is decoded and every episode fails after its retries."""
        for url in self.busy:
            try:
                address(url)
            except ValueError as error:
                raise launch.UserError(self.no_server(url, error)) from None
            for attempt in range(self.retries + 1):
                done, status, after = self.probe(url, self.timeout)
                # A server that is busy or still loading is asked again. An address without a
                # server is more often a mistake.
                if not done.error or not passing(status) or status == 0 or attempt == self.retries:
                    break
                self.pause(max(2.0**attempt, after))
            if done.error:
                raise launch.UserError(self.no_server(url, done.error) if status == 0
                                       else self.refusal(url, done.error, status))

    def no_server(self, url, error):
        return f"no server answers at {url} ({error}); expected an OpenAI-compatible endpoint"

    def refusal(self, url, error, status):
        """The line for a server that answers, but not with a completion."""
        judge = "judge-" if self.is_judge else ""
        key = f"--{judge}key-env" if judge else "--api-key-env"
        # Servers answer 404 for an unknown model, too.
        advice = {401: f"is the key in {key} right?", 403: f"may the key in {key} ask this model?",
                  402: "is the account of this key empty?",
                  404: f"is --{judge}model {self.model_name} right, and does the address end in "
                       "/v1?"}.get(status, "see the server's log, or other flags of the endpoint")
        return f"{url} refuses a request ({error}); {advice}"

    def submit(self, request):
        # A thread waits for the answer. The loop goes on with other episodes.
        self.pool.submit(self.call, request).add_done_callback(self.done.put)

    def poll(self):
        """-> Completions that have arrived. Waits 20 ms for the first, so that no core spins.
        Raises UserError if no server answers any more, or if one refuses the key or the model."""
        finished = []
        with contextlib.suppress(queue.Empty):
            finished.append(self.done.get(timeout=0.02).result())
        while not self.done.empty():
            finished.append(self.done.get().result())
        # Looked at last: requests that end with the run would be records of failed items.
        if self.over.is_set():
            raise launch.UserError(f"{self.ending}. Finished records are kept: start the server or "
                                   "give the right flags, and go on with the same command")
        return finished

    def close(self):
        self.pool.shutdown()

    def body(self, request):
        """Request -> JSON to post."""
        body = {"model": self.model_name, "messages": self.wire(request)}
        body[self.tokens_field] = request.max_tokens
        if self.send_temperature:
            body.update(temperature=request.temperature, seed=request.seed)
        body.update(self.sampling or {})
        if request.tools:
            # For the template alone: our own parser reads calls from the text.
            body.update(tools=request.tools, tool_choice="none")
        if request.stop:
            body.update(stop=list(request.stop), include_stop_str_in_output=True)
        clip = self.joined(request)
        if clip:
            body.update(media_io_kwargs={"video": clip_times(clip)})
        if self.prefill and request.prefill:  # the server is told to go on with our turn
            body["messages"].append({"role": "assistant", "content": request.prefill})
            body.update(add_generation_prompt=False, continue_final_message=True)
        return body

    def take(self):
        """-> the endpoint with the fewest requests under way. An endpoint that has failed rests for
        30 seconds, because a server that is down would always be the least busy."""
        with self.lock:
            now = time.monotonic()
            awake = [url for url in self.busy if self.rests[url] <= now] or list(self.busy)
            url = min(awake, key=self.busy.get)
            self.busy[url] += 1
        return url

    def give_back(self, url, failed):
        with self.lock:
            self.busy[url] -= 1
            self.rests[url] = time.monotonic() + 30 if failed else 0.0

    def call(self, request):
        """Posts a request, again after 1, 2, 4, .. seconds or as the server says, if that may help
        -> Completion. A failure becomes the Completion's error, never its text, which would be
        graded."""
        body = json.dumps(self.body(request)).encode()
        for attempt in range(self.retries + 1):
            self.awake.wait()
            if self.over.is_set():
                return Completion(request.id, error=self.ending)
            url = self.take()
            done, status, after = self.post(url, request, body, self.timeout)
            fails = done.error is not None and passing(status)
            self.give_back(url, failed=fails)
            if status in (401, 402, 403, 404):
                self.check_refusal(url)
            self.count(fails, after)
            if not fails or attempt == self.retries:
                return done
            self.pause(max(2.0**attempt, after))

    def check_refusal(self, url):
        """Ends the run if the server refuses a plain request, too: a wrong key would fail every
        item. Some endpoints answer 403 for one text alone."""
        done, status, _ = self.probe(url, self.timeout)
        if status in (401, 402, 403, 404):
            self.end(self.refusal(url, done.error, status))

    def count(self, fails, after):
        """Counts failed tries in a row. After `give_up` of them all requests wait for a server."""
        with self.lock:
            self.failed = self.failed + 1 if fails else 0
            waits = 0 < self.give_up <= self.failed and self.awake.is_set()
            waits = waits and not self.over.is_set()
            if waits:
                self.awake.clear()
        if waits:
            self.wait_for_server(after)

    def wait_for_server(self, pause):
        """Probes all servers, with growing pauses, until one answers. Ends the run if none has
        answered after `server_wait` seconds. pause: seconds before the first probe."""
        until = time.monotonic() + self.server_wait
        said = False
        for attempt in itertools.count():
            if pause:
                self.pause(min(pause, max(0.0, until - time.monotonic())))
            if self.over.is_set():
                return self.awake.set()
            for url in self.busy:
                done, status, after = self.probe(url, min(30.0, self.timeout))
                if not passing(status):  # an answer, also if it is no text
                    with self.lock:
                        self.failed, self.rests[url] = 0, 0.0
                    self.awake.set()
                    return
            if time.monotonic() >= until:
                return self.end(f"no server has answered for {self.server_wait:g} s, at last {url} "
                                f"({done.error})")
            if not said:  # once: a pause without a word looks like a hang
                said = True
                print(f"\n{url}: {launch.printable(done.error)}; waiting at most "
                      f"{self.server_wait:g} s for a server", file=sys.stderr, flush=True)
            pause = max(min(2.0**attempt, 15.0), after)

    def end(self, why):
        """Lets poll() raise UserError, and ends every wait and every open connection."""
        with self.lock:
            self.ending = self.ending or why
        self.over.set()
        self.awake.set()
        for handle in list(self.handles):
            shut(handle)

    def pause(self, seconds):
        self.over.wait(seconds)

    def post(self, url, request, body, seconds):
        """-> (Completion, HTTP status or 0 without a whole answer, seconds that the server asks to
        wait)."""
        import http.client

        headers = {"Content-Type": "application/json"}
        if self.key():
            headers["Authorization"] = f"Bearer {self.key()}"
        began = time.monotonic()
        status = 0
        try:
            status, content, after = fetch(url, body, headers, seconds, self.handles)
            if not 200 <= status < 300:  # a redirect too, as the key goes to no other host
                said = message_of(content, self.key())
                error = f"HTTP {status}" + (f": {said}" if said else "")
                wait = min(waiting_time(after), self.server_wait) if passing(status) else 0.0
                return Completion(request.id, error=error), status, wait
            answer = json.loads(content)
            choice = answer["choices"][0]
            # A hosted name may stand for another model tomorrow.
            self.served.add(str(answer.get("model")))
            said = choice["message"]
            # Some endpoints repeat the begun turn.
            text = (said.get("content") or "").removeprefix(request.prefill)
            # A server with a reasoning parser takes the thought out of the content.
            thought = said.get("reasoning_content") or said.get("reasoning") or ""
            ended = choice.get("finish_reason") == "stop"
            self.note_usage(request.id, answer.get("usage"))
            return Completion(request.id, text=text, ended=ended, reasoning=str(thought)), status, 0
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError,
                AttributeError, RecursionError) as error:
            if time.monotonic() - began >= seconds:
                why = f"no whole answer within {seconds:g} s"
                return Completion(request.id, error=why), 0, 0
            if isinstance(error, (OSError, http.client.HTTPException)):  # refused, cut off halfway
                return Completion(request.id, error=f"{type(error).__name__}: {error}"), 0, 0
            why = f"bad answer: {type(error).__name__}"  # not the promised JSON
            return Completion(request.id, error=why), status or 200, 0

    def note_usage(self, name, usage):
        """Keeps the token counts of a request, if the endpoint reports them."""
        usage = usage if isinstance(usage, dict) else {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if all(type(count) is int for count in counts):
            self.usage[name] = counts

    def joined(self, request):
        """-> Frames of the overview if they go as one video, else None. Windows stay images,
        because a request carries the times of one video alone. So do frames with other stamps."""
        contents = [m["content"] for m in request.messages if isinstance(m["content"], list)]
        videos = [item for content in contents for item in content if item["type"] == "video"]
        if not self.video_item or not videos or videos[0].get("stamp") not in (None, "none"):
            return None
        clip = request.frames[0]
        return clip if len(clip.images) > 1 else None  # processors refuse a video of one frame

    def wire(self, request):
        """Request -> chat messages with frames as JPEGs after their times. Consecutive tool
        messages become one user turn, as in the chat template of the policy."""
        clip = self.joined(request)
        total = sum(len(frames.images) for frames in request.frames if frames is not clip)
        kept = set(evenly(range(total), self.image_cap or total))  # numbers of images
        numbers = itertools.count()
        frames = iter(request.frames)  # in the order of the messages' videos
        turns = []  # [role, parts, holds tool responses]
        for message in request.messages:
            parts = content_parts(message["content"], frames, numbers, kept, clip)
            if message["role"] != "tool":
                turns.append([message["role"], parts, False])
                continue
            follows = turns[-1][2]
            head = "\n<tool_response>\n" if follows else "<tool_response>\n"
            if not follows:
                turns.append(["user", [], True])
            turns[-1][1] += [text_part(head), *parts, text_part("\n</tool_response>")]
        # A message without images is a plain string: some endpoints take no parts.
        messages = []
        for role, parts, _ in turns:
            if all(part["type"] == "text" for part in parts):
                parts = "".join(part["text"] for part in parts)
            messages.append({"role": role, "content": parts})
        return messages


def address(url):
    """-> (host, port, path, whether over TLS). Raises ValueError."""
    from urllib.parse import urlsplit

    place = urlsplit(url)
    secure = place.scheme == "https"
    if not place.hostname or not (secure or place.scheme == "http"):
        raise ValueError("an address begins with http:// or https:// and a host")
    path = place.path + (f"?{place.query}" if place.query else "")
    return place.hostname, place.port or (443 if secure else 80), path, secure


def passing(status):
    """Whether another try may succeed. status: as in OpenAIEngine.post."""
    return status in (0, 429) or status >= 500


def probe_messages():
    return [{"role": "user", "content": "Reply with yes."}]


def message_of(content, key):
    """The body of an error -> its message in one line, 200 characters at most, without the key."""
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the text itself
        found = json.loads(text)
        # {"error": {"message": ..}} or {"error": ..}, and {"detail": ..} of some frameworks
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        text = found if isinstance(found, str) else json.dumps(found)
    if text.lstrip().startswith("<"):  # the page of a proxy
        text = re.sub(r"<[^>]*>", " ", text)
    text = text.replace(key, "***") if key else text
    return launch.printable(" ".join(text.split()))[:200]


def waiting_time(after):
    """The header Retry-After, seconds or an HTTP date -> seconds from now; 0 without a number."""
    import datetime
    import email.utils

    try:
        if after.strip().isdigit():
            return float(after)
        then = email.utils.parsedate_to_datetime(after)
        # A date without a zone is in UTC.
        then = then if then.tzinfo else then.replace(tzinfo=datetime.UTC)
        return max(0.0, then.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # no such header, or neither of the two
        return 0.0


def fetch(url, body, headers, seconds, handles):
    """POSTs to this host alone: no redirect and no proxy may carry the key elsewhere. -> (status,
    content, Retry-After or ""). Raises OSError or HTTPException; both if the whole takes longer
    than `seconds`. handles: set that holds a handle of the connection while it is open."""
    import http.client
    import socket
    import ssl

    host, port, path, secure = address(url)
    until = time.monotonic() + seconds
    # A host that is there takes a connection at once, if it takes one at all.
    sock = socket.create_connection((host, port), min(30.0, seconds))
    # The time-out of a socket bounds each read alone, so a server that drips would never meet it.
    # The timer shuts the connection, by a second handle, since TLS takes over the first.
    left = max(0.001, until - time.monotonic())
    sock.settimeout(left)
    with sock.dup() as handle:
        timer = threading.Timer(left, shut, [handle])
        timer.daemon = True
        timer.start()
        handles.add(handle)
        try:
            if secure:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(host, port)
            connection.sock = sock
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            # A body without a length ends where the timer shuts it, and might pass for whole.
            if time.monotonic() >= until:
                raise TimeoutError("timed out")
            return answer.status, content, answer.getheader("Retry-After", "")
        finally:
            handles.discard(handle)
            timer.cancel()
            sock.close()


def shut(sock):
    """Ends every read and write on a connection, in whatever thread."""
    import socket

    with contextlib.suppress(OSError):  # the server has left
        sock.shutdown(socket.SHUT_RDWR)


def text_part(text):
    return {"type": "text", "text": text}


def content_parts(content, frames, numbers, kept, clip=None):
    """
    A message's content -> parts of an OpenAI message.

    frames: iterator of video.Frames, one for each video. numbers: iterator of the numbers of the
    request's images; images in `kept` are sent. clip: the Frames that go as one video.
    """
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for item in content:
        if item["type"] == "text":
            parts.append(text_part(item["text"]))
            continue
        shown = next(frames)
        if shown is clip:
            pieces = [jpeg_url(image).partition(",")[2] for image in shown.images]
            url = "data:video/jpeg;base64," + ",".join(pieces)
            parts.append({"type": "video_url", "video_url": {"url": url}})
            continue
        for place, (image, seconds) in enumerate(zip(shown.images, shown.seconds)):
            if next(numbers) not in kept:  # without its time too
                continue
            stamp = chat.stamp_text(seconds, place, item.get("stamp"))
            if stamp:
                parts.append(text_part(stamp))
            parts.append({"type": "image_url", "image_url": {"url": jpeg_url(image)}})
    return parts


def clip_times(clip):
    """Frames -> media_io_kwargs, so that vLLM takes all frames (by default 32) and their times:
    indices at 1000 frames a second are milliseconds."""
    times = [round(1000 * float(second)) for second in clip.seconds]
    # As long as the video: from the first to the last, and half a gap on either side.
    total = round((times[-1] - times[0]) * len(times) / (len(times) - 1))
    total = max(total, times[-1] + 1)
    return {"num_frames": -1, "fps": 1000.0, "frames_indices": times, "total_num_frames": total,
            "duration": total / 1000.0}


def evenly(items, n):
    """n of the items, evenly spread; all if there are fewer."""
    if not 0 < n < len(items):
        return items[: max(n, 0)]
    return [items[int((i + 0.5) * len(items) / n)] for i in range(n)]


def jpeg_url(image):
    """uint8 [H, W, 3] -> data URL."""
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# ------------------------------------------------------------------------------------------------
# The judge of open answers


def add_judge_arguments(parser, when, name="the judge's name"):
    """Flags of the judge. when: what it is asked about. name: help of --judge-model."""
    add = parser.add_argument_group("judge of open answers").add_argument
    add("--judge-url", help=f"chat endpoint, asked {when}; default: none")
    add("--judge-model", help=name)
    add("--judge-key-env", help="environment variable that holds the judge's key")


def judge_request(name, question, gold, answer):
    """A question, its reference answer and a given answer -> ChatRequest named `name`."""
    text = (f"Question: {question}\nReference answer: {gold}\nGiven answer: {answer}\n"
            "Does the given answer say the same as the reference answer? Reply with yes or no.")
    return ChatRequest(name, [], [], [], [], 16, 0.0, 0, [{"role": "user", "content": text}])


def read_verdict(text):
    """A judge's reply -> True, False, or None if it is neither yes nor no, or both."""
    # The second word of "yes and no" counts if a sentence ends with it: "Yes, no doubt" is a yes.
    said = re.match(r"\W*(yes|no)\b(?:\W+(?:(?:and|or|but)\W+)?(yes|no)(?=\s*(?:[^\w\s]|$)))?",
                    (text or "").lower())
    return said[1] == "yes" if said and said[2] in (None, said[1]) else None


class Judge:
    """A chat endpoint that decides open answers while rollouts go on. Equal texts are asked about
    once, and verdicts are kept in a file for a run that goes on."""

    def __init__(self, args, path=None):
        """args: the judge's flags. path: JSONL of verdicts, read and appended to; None: no file.
        Raises UserError if no server answers, or if it refuses a plain request."""
        self.args, self.path = args, path
        self.told = False  # of a failure
        self.begin()
        if os.environ.get("RANK", "0") == "0":  # for all ranks: one probe, one line if it fails
            self.engine.knock()
        self.known = {}  # (question, reference answer, given answer) -> Future of its verdict
        content = b""
        if path and os.path.exists(path):
            with open(path, "rb") as f:
                content = f.read()
        for line in content.split(b"\n"):
            # A kill may cut a line off. Its texts are then asked about again.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = launch.parse_json(line)
                if row["model"] == args.judge_model and row["verdict"] in (True, False):
                    texts = row["question"], row["gold"], row["answer"]
                    self.known[texts] = Future()
                    self.known[texts].set_result(row["verdict"])
        if content and not content.endswith(b"\n"):
            self.append(b"\n")  # else the next line would become a part of the torn one

    def begin(self):
        """A client that has not given up. It waits a minute at most for a server that is away."""
        self.engine = OpenAIEngine(
            self.args.judge_url, self.args.judge_model, key_variable=self.args.judge_key_env,
            workers=16, timeout=60.0, retries=2, server_wait=60.0, is_judge=True)

    def ask(self, question, gold, answer):
        """-> (Future of True, False, or None after a failure; whether these texts were asked about
        before). Returns at once. A failure is not kept: the next ask tries again."""
        texts = question, gold, answer
        before = self.known.get(texts)
        if before is not None and not (before.done() and before.result() is None):
            return before, True
        if self.engine.over.is_set():  # no server came back in time; one may be there by now
            self.close()
            self.begin()
        self.known[texts] = self.engine.pool.submit(self.decide, self.engine, texts)
        return self.known[texts], False

    def decide(self, engine, texts):
        """Runs in a thread -> verdict, see ask."""
        done = engine.call(judge_request("judge", *texts))
        verdict = read_verdict(done.text)
        if verdict is None and not self.told:
            self.told = True  # once a run: judge_failed counts all of them
            why = done.error or f"neither yes nor no: {done.text[:100]!r}"
            print(launch.printable(f"no verdict of the judge ({why}); such answers are paid by "
                                   "token F1"), file=sys.stderr, flush=True)
        if verdict is not None and self.path:
            row = dict(zip(("question", "gold", "answer"), texts), model=self.args.judge_model,
                       verdict=verdict)
            self.append(json.dumps(row).encode() + b"\n")
        return verdict

    def append(self, line):
        # One write to the end of the file, so lines of several threads and ranks stay apart.
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as f:
            f.write(line)  # a full disk loses what is kept, not the verdict

    def close(self):
        self.engine.end("the run is over")  # no thread waits for a server any longer
        # Nothing is cancelled: what is queued fails at once, and its episodes read that.
        self.engine.pool.shutdown(wait=False)


def open_judge(args, path=None):
    """Flags -> Judge, or None without --judge-url. Raises as Judge does. path: see Judge."""
    if bool(args.judge_url) != bool(args.judge_model):
        raise launch.UserError("--judge-url and --judge-model belong together")
    return Judge(args, path) if args.judge_url else None
