"""
engine.py (tests/test_engine.py): continuations of contexts, sampled by vLLM inside the trainer's
own process.

  request      ids of a context, with decoded frames -> completion: sampled ids and log-probs
  pump         lets many coroutines await one engine, which batches all requests that wait
  new weights  sleep() frees memory for a training step, wake(weights) loads the trainer's tensors
  their check  after each load some columns of every matrix, and every vector, are read back from
               the engine and have to equal what was sent, bit by bit

The check is there because log-probs do not see stale weights: at a rate of 2e-6 an engine that
missed an update differs by 1e-4 nats a token, and a healthy one in bf16 by 1e-3.

Departs from the usual server beside the trainer: no copy of the weights on disk, no network. The
engine's log-probs are those of the distribution that was sampled from: temperature and banned ids
applied, no top-p and no top-k (eval.py, ask.py may set these).

Reads a checkpoint folder; writes nothing. Used by rollout.py, grpo.py and evaluation/. EngineLoop
serves any engine that has submit(request), abort(request id) and poll().
"""
import asyncio
import functools
import gc
import importlib
import itertools
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cachetools

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
    tokens: int = 0  # of prompt and answer, as an endpoint counts them
    error: str = None  # why the request failed; then the other fields are empty


# ------------------------------------------------------------------------------------------------
# The pump


class EngineLoop:
    """Lets coroutines await an engine that only knows submit(request), abort(id) and poll().

    One thread owns the engine. In each turn of `steps`, every episode that can goes on; then the
    engine takes one step on all requests that wait. There is no barrier: a fan-out starts when
    the turn before ends, at whatever point the other episodes are.
    """

    def __init__(self, engine, threads: int):
        """threads: videos that are decoded at once."""
        self.engine = engine
        self.pending = {}  # request id -> Future of its Completion
        self.wakeup = asyncio.Event()  # set if a request was made
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    async def sample(self, request: Request) -> Completion:
        """A coroutine that is cancelled gives up its request: the engine then forgets it."""
        # The future exists before the engine knows the request, so no completion can miss it.
        future = self.pending[request.id] = asyncio.get_running_loop().create_future()
        self.wakeup.set()
        try:
            self.engine.submit(request)
            return await future
        finally:
            if self.pending.pop(request.id, None):  # else the engine has finished the request
                self.engine.abort(request.id)

    def load(self, function, *args):
        """Starts function(*args) in a thread -> Future. Awaiting the Future raises the function's
        error, if there was one."""
        return asyncio.get_running_loop().run_in_executor(self.pool, function, *args)

    async def steps(self):
        """Runs the engine until this coroutine is cancelled."""
        while True:
            await asyncio.sleep(0)  # episodes that can go on do so
            if not self.pending:
                self.wakeup.clear()
                await self.wakeup.wait()
                continue
            for done in self.engine.poll():
                future = self.pending.pop(done.id, None)
                # Some requests were given up a moment ago, or by an earlier run.
                if future and not future.done():
                    future.set_result(done)


async def in_flight(pump: EngineLoop, episodes, max_concurrent: int):
    """Runs coroutines (an iterator) on the pump, at most `max_concurrent` at once -> async iterator
    of their results, in the order in which they finish. Raises the first error of a coroutine or of
    the engine."""
    steps, running = asyncio.create_task(pump.steps()), []
    try:
        while True:
            for coroutine in itertools.islice(episodes, max_concurrent - len(running)):
                running.append(asyncio.create_task(coroutine))
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
class EngineConfig:
    """The largest requests that an engine can serve, and the memory that the engine may take."""

    context: int  # tokens
    max_frames: int = 64  # images in one context
    max_pixels: int = 50176  # of a frame
    max_seqs: int = 64  # requests in a batch
    gpu_memory: float = 0.5  # fraction of the card
    sleeping: bool = False  # give memory back while the trainer works (GPU)
    max_num_batched_tokens: int = None  # of one step; None: vLLM's number, on a CPU no chunks


class VllmEngine:
    """vLLM inside this process, on CPU or GPU. Requests join its continuous batch while others run.

    In this process because the worker then shares the shim, the ranks and the trainer's tensors.
    """

    def __init__(self, ckpt, codec, limits):
        """ckpt: folder of a whole checkpoint, not of adapters. With torchrun on GPUs collective."""
        import torch

        launch.import_shim()
        self.gpu = torch.cuda.is_available()
        # vLLM takes these switches from the environment alone. On CPU it would bind threads to
        # cores, and the threads of all ranks to the same core. Training samples from the full
        # softmax, so flashinfer's sampler has no work. It would compile with any CUDA it meets.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
                          VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_USE_FLASHINFER_SAMPLER="0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        threads = torch.get_num_threads()
        from vllm import LLM

        options = gpu_options(limits) if self.gpu else cpu_options(codec, limits)
        tied = codec.config.tie_word_embeddings
        gc.collect()
        # vLLM runs gc.collect() eight times at start; objects that are frozen now are not searched.
        gc.freeze()
        # Frames arrive at their final size, and these bounds keep the processor from resizing them
        # again. Do not inflate the upper bound: vLLM allocates the encoder for that size. Do not go
        # below two minimal frames: vLLM also computes a video's size, and would divide by zero.
        min_pixels = (codec.patch * codec.merge) ** 2
        max_pixels = max(limits.max_pixels, 2 * min_pixels)
        # "vllm" ignores the checkpoint's top-p and top-k. Log-probs are those after temperature and
        # bias.
        self.llm = LLM(
            ckpt, max_model_len=limits.context, max_num_seqs=limits.max_seqs, **options,
            trust_remote_code=False, generation_config="vllm", logprobs_mode="processed_logprobs",
            # vLLM looks for the tie in text_config, where transformers does not keep it.
            hf_overrides={"text_config": {"tie_word_embeddings": tied}},
            limit_mm_per_prompt={"image": limits.max_frames, "video": 0},
            mm_processor_kwargs={"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}},
            disable_log_stats=True, use_tqdm_on_load=False)
        gc.unfreeze()
        torch.set_num_threads(threads)  # on CPU vLLM lowers the number for the whole process
        self.engine = self.llm.llm_engine
        if self.gpu:  # vLLM would run its shutdown at the interpreter's exit too, see close
            self.engine.engine_core._finalizer.detach()
        self.codec = codec
        self.max_seqs = limits.max_seqs
        self.sleeping = self.gpu and limits.sleeping
        self.tied_on_cpu = tied and not self.gpu
        self.running = {}  # request id -> Request
        # See engine_prompt. With fewer, the windows of a step push out the prompts that later turns
        # need. 64 frames of 50176 pixels take 77 MB.
        self.prompts = cachetools.LRUCache(64)
        self.sampling = {}  # more SamplingParams (top_p, ..), set by eval.py and ask.py alone
        self.num_syncs = 0
        self.asleep = False  # between sleep() and wake(): weights and cache may be gone

    def submit(self, request):
        from vllm import SamplingParams

        if self.asleep:
            raise RuntimeError("the engine was not woken: it would sample from old weights")
        prompt = engine_prompt(request, self.llm.renderer, self.prompts)
        # Training sets no top-p, top-k or penalty, because the trainer's log-probs are those of the
        # full softmax at this temperature, under this bias.
        params = SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed,
            logprobs=0, detokenize=False, stop_token_ids=[self.codec.eos],
            logit_bias=dict.fromkeys(self.codec.suppress_tokens, -100.0), **self.sampling)
        self.running[request.id] = request
        self.engine.add_request(request.id, prompt, params)

    def abort(self, request_id):
        """Forgets a request."""
        if self.running.pop(request_id, None):
            self.engine.abort_request([request_id])

    def poll(self):
        """One step of the engine -> [Completion] that it finished. Raises RuntimeError if the
        engine saw other ids than the trainer will."""
        if not self.running:
            return []
        finished = []
        for output in self.engine.step():
            if not output.finished:
                continue
            request = self.running.pop(output.request_id)
            # Frames were resized again, or placeholders were expanded in another way.
            if list(output.prompt_token_ids) != request.expanded:
                raise RuntimeError(f"{request.id}: the engine's prompt ids differ from ours")
            sampled = output.outputs[0]
            ids = list(sampled.token_ids)
            logps = [entry[token].logprob for token, entry in zip(ids, sampled.logprobs)]
            finished.append(Completion(request.id, ids, logps, chat.decode(self.codec, ids),
                                       ended=ids[-1:] == [self.codec.eos]))
        return finished

    def sleep(self):
        """Frees weights and KV cache while the trainer works, if EngineConfig.sleeping is set."""
        self.asleep = True
        if self.sleeping:
            self.llm.sleep(level=2)

    def wake(self, weights):
        """Takes memory again and loads new weights, see `sync`."""
        # The KV cache comes last: loading needs the memory that the cache then takes.
        if self.sleeping:
            self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc(zero_discarded, args=(("weights", "workspace"),))
        self.sync(weights)
        if self.sleeping:
            self.llm.wake_up(tags=["kv_cache"])
            self.llm.collective_rpc(zero_discarded, args=(("kv_cache",),))
        self.asleep = False

    def sync(self, weights):
        """Loads new weights, checks that the engine holds them, and drops every cache that the old
        ones made. weights: iterator of (name, full tensor). Raises RunError."""
        self.num_syncs += 1
        # Other columns each time, so that in a run every part of a matrix is looked at.
        draw = random.Random(self.num_syncs)
        fractions = [draw.random() for _ in range(CHECKED_COLUMNS)]
        sent = {}
        weights = keep_columns(weights, fractions, sent)
        # Without an iterator reload_weights reads the base checkpoint from disk, without a warning.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.tied_on_cpu:
            self.llm.apply_model(repack_head)
        check = functools.partial(differing_weights, sent=sent, fractions=fractions)
        (differing,) = self.llm.apply_model(check)
        if differing:
            raise launch.RunError(f"the engine does not hold the weights that were sent to it: "
                                  f"{len(differing)} tensors differ, the first is {differing[0]}")
        self.llm.reset_mm_cache()
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()

    def close(self, code=0):
        """Stops the engine. On a GPU the last act of a process, which ends with `code`: vLLM's own
        shutdown would destroy all process groups, the trainer's too, and the interpreter's exit
        would run what NCCL has registered. Both may hang for ever."""
        if self.gpu:
            sys.stdout.flush()
            os._exit(code)
        self.engine.engine_core.shutdown()


# ------------------------------------------------------------------------------------------------
# The check of new weights
#
# The engine fuses matrices (q, k and v; gate and up), and on a CPU it packs them and throws the
# plain ones away. So a matrix is not read but asked: one-hot rows pass through the engine's own
# kernel, and its output is then some columns of the matrix. All other products are zero, so the
# numbers come back as they are, without rounding, in fp32 and in bf16, whatever the layout.

CHECKED_COLUMNS = 8  # of each matrix, at each load


def columns_of(width, fractions):
    """Fractions of the width -> column numbers."""
    return [int(fraction * width) for fraction in fractions]


def columns_at(tensor, fractions):
    """-> [rows, columns], a copy. A vector is a matrix of one column, a kernel is flattened."""
    flat = tensor.reshape(len(tensor), -1)
    return flat[:, columns_of(flat.shape[1], fractions)]


def keep_columns(weights, fractions, sent):
    """Hands (name, tensor) on, and keeps its columns for the check in sent[name]."""
    for name, tensor in weights:
        sent[name] = columns_at(tensor, fractions)
        yield name, tensor
    # A tied head is not sent under a name of its own.
    sent.setdefault("lm_head.weight", sent["model.language_model.embed_tokens.weight"])


def differing_weights(engine_model, sent, fractions):
    """-> names of the engine's tensors that differ from what was sent. Runs inside the worker."""
    import torch

    renamed = {engine_model.hf_to_vllm_mapper.map_name(name): x for name, x in sent.items()}
    differing = []
    for path, module in engine_model.named_modules():
        parent, _, name = path.rpartition(".")
        # The trainer's names of the parts that are fused here, in their order.
        parts = engine_model.packed_modules_mapping.get(name, [name])
        for leaf, parameter in module.named_parameters(recurse=False):
            expected = torch.cat([renamed[f"{parent}.{part}.{leaf}"] for part in parts])
            for columns in parameter_columns(module, leaf, parameter, fractions):
                # The engine pads its vocabulary with rows of its own.
                if not torch.equal(columns[:len(expected)], expected.to(columns)):
                    differing.append(f"{path}.{leaf}")
    return differing


def parameter_columns(module, leaf, parameter, fractions):
    """A parameter of the engine -> its checked columns [rows, columns]: from the tensor itself if
    the engine kept it, and from the kernel that multiplies by it, which may have a copy."""
    import torch

    copies = []
    if parameter.numel() > 0:
        copies.append(columns_at(parameter, fractions))
    kernel = getattr(module, "quant_method", None)
    # A convolution (3 axes) has no such kernel, a bias has none of its own.
    if kernel is not None and leaf == "weight" and parameter.ndim < 3:
        # A layer knows its width as input_size, an embedding as embedding_dim.
        width = getattr(module, "input_size", None) or module.embedding_dim
        columns = torch.tensor(columns_of(width, fractions), device=parameter.device)
        one_hot = torch.nn.functional.one_hot(columns, width).to(parameter.dtype)  # [n, width]
        copies.append(kernel.apply(module, one_hot).T)
    return copies


# ---- below: vLLM's options, inputs and memory (a reader of the step may stop here) --------------


def gpu_options(limits):
    """Arguments of vllm.LLM on a GPU. triton: on a Hopper vLLM would compile another kernel."""
    # Under torchrun: one engine per rank, TP 1. Building it is collective.
    executor = "external_launcher" if "RANK" in os.environ else None
    return dict(dtype="bfloat16", enable_flashinfer_autotune=False, gdn_prefill_backend="triton",
                gpu_memory_utilization=limits.gpu_memory, enable_sleep_mode=limits.sleeping,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                distributed_executor_backend=executor)


def cpu_options(codec, limits):
    """Arguments of vllm.LLM on a CPU."""
    import torch
    from vllm import ModelRegistry

    base = codec.base
    # vLLM compiles a small function that counts ranks, in every process, for seconds.
    torch.compiler.set_stance("force_eager")
    # vLLM would inspect the class in a subprocess, which has no shim.
    module = importlib.import_module(f"vllm.model_executor.models.{base.engine_module}")
    ModelRegistry.register_model(base.model_class, getattr(module, base.model_class))
    # vLLM fills the KV cache with zeros at start, 1 to 3 s per GiB, so ask for little.
    text = codec.config.text_config
    # Bytes of one context: keys and values of four bytes.
    room = 8 * limits.context * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    if base.recurrent:  # a page of keys and values is as large as a layer's state
        state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
        room += 4 * text.num_hidden_layers * state
    # Chunked prefill rewinds a request's seeded generator, which CPU generators cannot do: with a
    # chunk given, every request must be greedy. And states of gated-delta layers are cached at the
    # ends of chunks only. Prompts share whole blocks; those of a group differ from turn to turn.
    chunk = limits.max_num_batched_tokens
    return dict(dtype=base.cpu_dtype, enforce_eager=True, block_size=32,
                enable_chunked_prefill=bool(chunk), enable_prefix_caching=not base.recurrent,
                kv_cache_memory_bytes=max(2 * room, min(limits.max_seqs * room, 2**27)),
                max_num_batched_tokens=chunk or max(limits.context, 8192))


def engine_prompt(request, renderer, prompt_cache):
    """A request -> the prompt that vLLM takes: pixels normalised and cut into patches, hashes, the
    places of the placeholders. prompt_cache: {keys of the frames: (ids, prompt)}.

    The samples of a group share one prompt, and a later turn is the prompt of the first turn with
    more text, so the work on pixels is done once.
    """
    key = tuple(frames.key for frames in request.frames)
    ids, prompt = prompt_cache.get(key, ([], None))
    if prompt is None or request.ids[:len(ids)] != ids:
        ids = list(request.ids)
        # Keep the pixels in the prompt. By default vLLM omits images that its cache has seen, but
        # the cache may have evicted them by the time this prompt is used again.
        (prompt,) = renderer.render_cmpl([vision_input(request)], skip_mm_cache=True)
    prompt_cache[key] = ids, prompt
    text = request.ids[len(ids):]  # of later turns and responses, as the frames are equal
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"] + text}


def vision_input(request):
    """-> ids and frames of a request, as vLLM's renderer takes them."""
    from PIL import Image

    images, keys = [], []
    for frames in request.frames:
        images += [Image.fromarray(image) for image in frames.images]
        # A group shares the outputs of the vision encoder by these keys.
        keys += frames.frame_keys
    prompt = {"prompt_token_ids": list(request.ids)}
    if images:
        prompt["multi_modal_data"] = {"image": images}
        prompt["multi_modal_uuids"] = {"image": keys}
    return prompt


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
        worker.synchronize_device()  # torch may use another stream than cudaMemset
        for address, data in cumem.CuMemAllocator.get_instance().pointer_to_data.items():
            if data.tag in tags:
                cumem.libcudart.cudaMemset(address, 0, data.handle[1])  # bytes
        worker.synchronize_device()
        for buffer, values in restored:
            buffer.copy_(values)


def repack_head(engine_model):
    """Packs a tied lm_head again. On CPU vLLM multiplies by a packed copy of each matrix. A reload
    packs every layer that the iterator names, but not a tied lm_head, which has no name of its own.
    The head would stay old, and the log-prob gap would grow step by step."""
    head = engine_model.language_model.lm_head
    head.quant_method.process_weights_after_loading(head)
