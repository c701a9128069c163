"""
engine.py: requests in, completions out. The pump, vLLM in this process.
"""
import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import chat
import launch

# ------------------------------------------------------------------------------------------------
# Requests and completions


@dataclass
class Request:
    """One generation: everything any engine needs to continue one context."""

    id: str
    ids: list  # compact ids; the engine expands them
    expanded: list  # what the trainer will see: the engine's prompt must come out as exactly this
    items: list  # [model.VisionItem]
    frames: list  # [video.Frames], one per item
    max_tokens: int
    temperature: float
    seed: int


@dataclass
class Completion:
    id: str
    ids: list = None  # sampled, with the end of turn where it was sampled; None from endpoints
    logps: list = None  # of the distribution sampled from
    text: str = ""
    ended: bool = False  # False: cut off by max_tokens
    error: str = None


# ------------------------------------------------------------------------------------------------
# The pump


class Pump:
    """Lets coroutines await an engine that only knows submit(request) and poll().

    One thread owns the engine. Each turn of `steps`: everybody goes on who can, then the engine
    works a little on all that waits. There is no barrier: a fan-out starts the moment its turn
    ends, whatever the other episodes are doing.
    """

    def __init__(self, engine, threads):
        self.engine = engine
        self.waiting = {}  # request id -> Future of its Completion
        self.loading = 0  # videos being decoded
        self.idle_s = 0.0  # seconds in which the engine could only wait for frames
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    async def sample(self, request):
        """-> Completion."""
        self.waiting[request.id] = asyncio.get_running_loop().create_future()
        self.engine.submit(request)
        return await self.waiting[request.id]

    def load(self, function, *args):
        """function(*args) in a thread, from now on -> Future; raises what it raised."""
        self.loading += 1
        future = asyncio.get_running_loop().run_in_executor(self.pool, function, *args)
        future.add_done_callback(self.loaded)
        return future

    def loaded(self, future):
        self.loading -= 1

    async def steps(self):
        # The reference sampler of the tests batches whatever waits: to repeat itself to the bit it
        # must not poll before all frames are there, however long each of them took.
        patient = getattr(self.engine, "patient", False)
        while True:
            for _ in range(4):  # a completion wakes its episode, which wakes its sub-agents, ..
                await asyncio.sleep(0)
            if self.waiting and not (patient and self.loading):
                for done in self.engine.poll():
                    self.waiting.pop(done.id).set_result(done)
            else:
                began = time.monotonic()
                await asyncio.sleep(0.001)
                self.idle_s += time.monotonic() - began


async def in_flight(pump, episodes, live):
    """Run coroutines on the pump, at most `live` at once -> async iterator of what they return."""
    engine = asyncio.create_task(pump.steps())
    running = []
    try:
        while True:
            while len(running) < live and (work := next(episodes, None)) is not None:
                running.append(asyncio.create_task(work))
            if not running:
                return
            done, _ = await asyncio.wait({engine, *running}, return_when=asyncio.FIRST_COMPLETED)
            if engine in done:
                engine.result()  # raises what the engine raised; else nobody would ever wake
            for task in [task for task in running if task in done]:
                running.remove(task)
                yield task.result()
    finally:
        for task in (engine, *running):
            task.cancel()
        await asyncio.gather(engine, *running, return_exceptions=True)
        pump.pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------
# vLLM


@dataclass
class Limits:
    """The largest requests that an engine is made for, and the memory it may take."""

    context: int  # tokens
    max_frames: int = 64  # images in one context, or frames of one of its videos
    max_pixels: int = 50176  # of a frame
    max_seqs: int = 64  # requests in its batch
    gpu_memory: float = 0.5  # fraction of the card
    sleeping: bool = False  # give memory back while the trainer works (GPU)
    max_videos: int = 1  # in one context


class VllmEngine:
    """vLLM inside this process, on CPU or GPU. Requests join its continuous batch while others run.

    In process, since its worker shares our shim, our ranks and our weights.
    """

    def __init__(self, ckpt, codec, limits):
        import atexit
        import gc

        import torch

        launch.import_shim()
        gpu = torch.cuda.is_available()
        # vLLM reads its own switches from the environment; ours never do.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
                          VLLM_NO_USAGE_STATS="1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if not gpu:
            # Bound threads of several ranks land on one core.
            os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind")
        threads = torch.get_num_threads()
        from transformers import AutoConfig
        from vllm import LLM, ModelRegistry
        from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Inside

        if gpu:
            options = dict(dtype="bfloat16", gpu_memory_utilization=limits.gpu_memory,
                           enable_sleep_mode=limits.sleeping)
            if "RANK" in os.environ:  # one engine per rank, TP 1; building it is collective
                options["distributed_executor_backend"] = "external_launcher"
        else:
            # It counts ranks in a function that each process would compile for seconds.
            torch.compiler.set_stance("force_eager")
            # vLLM would inspect the class in a subprocess, which has no shim.
            ModelRegistry.register_model("Qwen3VLForConditionalGeneration", Inside)
            # Room for keys and values is filled with zeros at once, a GiB in one to three seconds.
            text = AutoConfig.from_pretrained(ckpt, trust_remote_code=False).text_config
            heads = text.num_hidden_layers * text.num_key_value_heads
            room = limits.context * heads * text.head_dim * 2 * 4  # bytes of one context
            # A prompt prefilled in chunks rewinds its seeded generator, which CPU's cannot do.
            options = dict(dtype="float32", enforce_eager=True, enable_chunked_prefill=False,
                           kv_cache_memory_bytes=max(2 * room,
                                                     min(limits.max_seqs * room, 2**27)),
                           max_num_batched_tokens=max(limits.context, 8192))
        gc.collect()
        gc.freeze()  # vLLM collects eight times while it starts: not through all that was imported
        atexit.register(gc.unfreeze)  # what is frozen at the end is reported as leaked, on 30 lines
        # The processor bounds an image by itself but a video by all of its frames together.
        images = limits.max_frames if codec.channel == "image" else 0
        longest = limits.max_pixels * (1 if images else limits.max_frames)
        # Frames arrive at their final size: these bounds keep the processor from resizing again.
        # The upper one must be honest: vLLM sizes its encoder for the largest image it allows. It
        # computes a video's size in any case: below two smallest frames it divides by zero.
        least = (codec.patch * codec.merge) ** 2
        size = {"shortest_edge": least, "longest_edge": max(longest, 2 * least)}
        self.llm = LLM(
            ckpt, max_model_len=limits.context, max_num_seqs=limits.max_seqs,
            trust_remote_code=False,
            generation_config="vllm",  # no top-p or top-k of the checkpoint's own
            limit_mm_per_prompt={"image": images, "video": limits.max_videos},
            logprobs_mode="processed_logprobs",  # after temperature: what was sampled from
            mm_processor_kwargs={"size": size}, disable_log_stats=True, use_tqdm_on_load=False,
            **options)  # fmt: skip
        torch.set_num_threads(threads)  # on CPU vLLM lowers it for the whole process
        self.engine = self.llm.llm_engine
        self.codec = codec
        self.max_seqs = limits.max_seqs
        self.running = {}  # request id -> Request
        self.prompts = {}  # the latest ones, see engine_prompt
        self.tied_on_cpu = not gpu and self.engine.model_config.hf_config.tie_word_embeddings
        self.sleeping = gpu and limits.sleeping

    def submit(self, request):
        from vllm import SamplingParams

        prompt = engine_prompt(request, self.codec, self.llm.renderer, self.prompts)
        # No top-p, top-k or min-p: the trainer's log-probs are of the full softmax at this
        # temperature, under this bias.
        params = SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed,
            logprobs=0, detokenize=False, stop_token_ids=[self.codec.eos],
            logit_bias={i: -100.0 for i in self.codec.banned})  # fmt: skip
        self.running[request.id] = request
        self.engine.add_request(request.id, prompt, params)

    def poll(self):
        """One step of the engine -> [Completion] of what it finished."""
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

    def sleep(self):
        """Free weights and KV cache while the trainer works; without Limits.sleeping, nothing."""
        if self.sleeping:
            self.llm.sleep(level=2)

    def wake(self, weights):
        """Load new weights. Order matters: weights get memory, are loaded, and only then does the
        KV cache come back."""
        if self.sleeping:
            self.llm.wake_up(tags=["weights"])
            self.llm.apply_model(zero_deepstack)
        self.sync(weights)
        if self.sleeping:
            self.llm.wake_up(tags=["kv_cache"])

    def sync(self, weights):
        """weights: iterator of (name, full tensor). Loads them, then drops every cache made with
        the old ones."""
        # Without an iterator reload_weights would read the base checkpoint from disk, silently.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.tied_on_cpu:
            self.llm.apply_model(repack_head)
        self.llm.reset_mm_cache()
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()

    def close(self):
        """Stop the engine while the process group lives: its own exit hook would come too late."""
        self.engine.engine_core.shutdown()


def engine_prompt(request, codec, renderer, made, most=32):
    """A request's prompt as the engine takes it: pixels normalised and cut into patches, hashes,
    places. Samples of a group share prompts, and so do their sub-agents; a later turn is the first
    one's and more text. `made` holds the latest `most` of them."""
    key = tuple(f.key for f in request.frames)
    ids, prompt = made.pop(key, ([], None))
    if prompt is None or request.ids[:len(ids)] != ids:
        ids = list(request.ids)
        text = {"prompt_token_ids": ids}
        if request.frames:
            expanded, data, keys = vision_input(codec, request)
            text = {"prompt_token_ids": expanded, "multi_modal_data": data,
                    "multi_modal_uuids": keys}
        # With its pixels: by default what vLLM's cache knows is left out, and the engine, asked
        # for it by a prompt that is kept here, may have dropped it.
        (prompt,) = renderer.render_cmpl([text], skip_mm_cache=True)
    made[key] = ids, prompt  # to the end: used last
    if len(made) > most:
        del made[next(iter(made))]
    more = request.ids[len(ids):]  # what was sampled and answered since: text, as frames are equal
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"] + more} if more else prompt


def vision_input(codec, request):
    """-> (prompt ids, multi_modal_data, multi_modal_uuids) of a request, as vLLM takes them. The
    keys let a group share what the vision encoder made of its frames."""
    ids = list(request.ids)
    if codec.channel == "image":
        from PIL import Image

        images = [Image.fromarray(image) for f in request.frames for image in f.images]
        keys = [key for f in request.frames for key in f.frame_keys]
        return ids, {"image": images}, {"image": keys}
    clips = []
    for f in request.frames:
        images, seconds = f.images, f.seconds
        if len(images) == 1:  # the processor refuses one frame: the pair is what patchify makes too
            images, seconds = images.repeat(2, 0), seconds.repeat(2)
        # frames_indices / fps is how the processor gets seconds: with fps 1, indices are seconds.
        clips.append((images, dict(
            fps=1.0, frames_indices=[float(s) for s in seconds], do_sample_frames=False,
            total_num_frames=len(images), duration=float(seconds[-1]) + 1.0)))
    # vLLM expands the bare placeholder only and would leave the template's markers around all of
    # its frames, a form Qwen3-VL was not trained on: every frame pair brings markers of its own.
    for at in reversed([n for n, i in enumerate(ids) if i == codec.video_pad]):
        ids[at - 1:at + 2] = [codec.video_pad]
    return ids, {"video": clips}, {"video": [f.key for f in request.frames]}


def zero_deepstack(engine_model):
    """vLLM keeps the deepstack features of a prefill in a plain list of tensors. A level-2 sleep
    discards their memory and restores buffers alone: a text-only prefill would then add to its
    hidden states whatever lies there."""
    for level in getattr(engine_model, "deepstack_input_embeds", None) or ():
        level.zero_()


def repack_head(engine_model):
    """On CPU vLLM multiplies by a packed copy of each matrix. Reloading repacks every layer that
    the iterator names, but a tied lm_head is not named: it would go on with the old embeddings, and
    the log-prob gap would grow step by step."""
    head = engine_model.language_model.lm_head
    head.quant_method.process_weights_after_loading(head)
