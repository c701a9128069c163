"""
Part 2: tokens a second of rollouts, beside lock-step turns and transformers' generate; share of the card's peaks;
the step model's prediction beside what was measured; seconds of the engine's start.

Weights are random, so the agent acts: the engine samples as many tokens as asked for, then the text of the turn is
replaced by a scripted one of the same length (turn 1: three windows; sub-agents: a summary; turn 2: an answer).
Lengths are drawn (mean --response for turn 1), the same in every side and round.

  pump        rollout.run, as in grpo.py
  lock-step   the same requests, turn by turn: all of a turn must end before the next begins (vLLM's offline chat)
  one by one  the pump, sub-agents of a turn one after another
  generate    transformers' generate(): turn 1 alone, 32 rows at once, beside turn 1 alone by the pump

  python rollouts.py [--dry] [--skip generate] [--engine default|graphs|eager]
"""
import asyncio
import os
import sys
import time
from dataclasses import replace

from common import (BANDWIDTH, PEAK, Result, chat, checkpoint, gc, geometry, launch, make_checkpoint, median, np,
                    parse, parser, rollout, sizes, tasks, timed, torch)
import engine as engine_module
from engine import EngineConfig, VllmEngine

WINDOWS = 3


def is_sub(request_id):
    return request_id.count("/") == 4


class Actor(VllmEngine):
    """vLLM whose sampled ids are replaced by a script of the same length. Notes every engine step."""

    script, response, one_turn = None, 300, False

    def submit(self, request):
        draw = np.random.default_rng(launch.stable_hash(request.id.split("/", 1)[1]) % 2**32)
        mean = self.response / 5 if is_sub(request.id) else self.response
        mean = mean if request.id.split("/")[3] == "0" else mean / 2  # turn 2 is shorter
        request.max_tokens = max(8, min(request.max_tokens, int(mean * draw.lognormal(-0.125, 0.5))))
        self.prompt_tokens += len(request.expanded)
        super().submit(request)

    def poll(self):
        began, running = time.perf_counter(), len(self.running)
        done = super().poll()
        self.steps.append((time.perf_counter() - began, running))
        for completion in done:
            n = len(completion.ids)
            self.sampled += n
            completion.ids = self.words(completion.id, n)
            completion.text, completion.ended = chat.decode(self.codec, completion.ids), True
        return done

    def words(self, name, n):
        sub, turn = is_sub(name), int(name.split("/")[3])
        if sub:
            tail = "the square turned red"
        elif turn == 0 and not self.one_turn:
            digest = launch.stable_hash(name)
            starts = [digest >> shift & 255 for shift in (0, 8, 16)]
            tail = "\n</think>\n" + "\n".join(toy_call(s, s + 10) for s in starts)
        else:
            tail = "\n</think>\n<answer>red</answer>"
        ids = chat.encode(self.codec, tail) + [self.codec.eos]
        return (self.filler * n)[:max(0, n - len(ids))] + ids

    def clear(self):
        self.steps, self.sampled, self.prompt_tokens, self.wave = [], 0, 0, 0
        self.filler = chat.encode(self.codec, "frame ")[:1]
        self.llm.reset_mm_cache()
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()
        self.prompts.clear()


def toy_call(start, end):
    return ('<tool_call>\n{"name": "crop_video", "arguments": '
            f'{{"start_time": {start}, "end_time": {end}}}}}\n</tool_call>')


class LockStep(Actor):
    """Begins when all requests of a turn are there, and answers when all have ended: main turns, then all their
    sub-agents, then main turns again."""

    def poll(self):
        if len(self.running) < self.waves[self.wave]:
            time.sleep(0.0005)  # others still make their prompts
            return []
        self.wave, done = self.wave + 1, []
        while self.running:
            done += super().poll()
        return done


def start(args, ckpt, codec, kind, cls, **more):
    extra = {"graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
             "eager": {"enforce_eager": True}, "default": {}}[kind]
    plain = engine_module.gpu_options
    engine_module.gpu_options = lambda limits: plain(limits) | extra
    try:
        context = args.prompt + 8 * args.response + 1024
        return cls(ckpt, codec, EngineConfig(context, args.frames, max_seqs=64, gpu_memory=0.5, sleeping=True))
    finally:
        engine_module.gpu_options = plain


def play(args, sampler, rows, number):
    sampler.engine.clear()
    episodes = list(rollout.run(sampler, rows, args.frames, args.group, number))
    assert all(e.status == "ok" for e in episodes), [e.error for e in episodes if e.error][:2]
    return episodes


def model_seconds(args, engine, prompt, subs, responses, mean_sub):
    """The step model's arithmetic for this card and this model: seconds of prefill and of decoding."""
    body, head, tower = sizes(args)
    text = geometry(args)["text_config"]
    kv = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * 2
    rows, sub_prompt = args.prompts * args.group, 16 * 60 + 250
    tokens = args.prompts * prompt + subs * sub_prompt + subs * mean_sub
    patches = (args.prompts * args.frames + subs * 16) * 196
    prefill = (2 * body * tokens + 2 * tower * patches) / (PEAK * 0.5)

    def step(batch, context):
        return (2 * (body + head) + batch * context * kv) / (BANDWIDTH * 0.75) + 0.0015

    decode = responses * step(rows, prompt + responses / 2) + mean_sub * step(min(64, subs), sub_prompt)
    return prefill, decode, subs * 0.02 + args.prompts * 0.06, kv


def generate(args, ckpt, codec, device, rows, source, result):
    """transformers' generate on the prompts of turn 1, all rollouts in one batch, --response tokens each."""
    from transformers import Qwen3VLForConditionalGeneration
    import model

    hf = Qwen3VLForConditionalGeneration.from_pretrained(
        ckpt, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, attn_implementation="sdpa").to(device).eval()
    from common import prompt_ids
    ids, pixels, grids = [], [], []
    for row in rows:
        prompt, item = prompt_ids(args, codec, row, source)
        patches, _ = model.patchify(codec, source.load(item.spec).images, device)
        side = args.side // 16
        for _ in range(args.group):
            ids.append(prompt)
            pixels.append(patches)
            grids.append(torch.tensor([[1, side, side]] * item.frames, device=device))
    width = max(map(len, ids))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids], device=device)
    ids = torch.tensor([[codec.eos] * (width - len(p)) + p for p in ids], device=device)
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=torch.cat(pixels).to(hf.dtype),
                  image_grid_thw=torch.cat(grids), mm_token_type_ids=(ids == codec.image_pad).int())
    options = dict(do_sample=True, temperature=1.0, top_k=0, min_new_tokens=args.response,
                   max_new_tokens=args.response, pad_token_id=codec.eos)
    with torch.no_grad():
        seconds = [timed(device, lambda: hf.generate(**inputs, **options))[0] for _ in range(2)][-1]
        first = timed(device, lambda: hf.generate(**inputs, **{**options, "max_new_tokens": 1, "min_new_tokens": 1}))[0]
    result.add("generate: s, tokens/s", {"s": round(seconds, 2), "of it the first token": round(first, 2),
                                         "tokens/s": round(len(ids) * args.response / seconds, 1)})


def main():
    p = parser(__doc__, 330)
    p.add_argument("--engine", default="default", choices=["default", "graphs", "eager"])
    p.add_argument("--skip", nargs="*", default=[], choices=["generate", "sync", "lockstep", "one"])
    args = parse(p)
    launch.import_shim()
    result = Result(args, "rollouts" if args.engine == "default" else f"rollouts-{args.engine}")
    device = launch.start_process_group()
    ckpt, seconds = make_checkpoint(args, device)
    result.add("checkpoint: seconds", seconds)
    codec = chat.load_codec(ckpt)
    codec = replace(codec, suppress_tokens=(*codec.suppress_tokens, codec.eos))  # every turn has its full length
    rows, source = tasks(args, codec)
    began = time.perf_counter()
    pump = start(args, ckpt, codec, args.engine, Actor)
    result.add(f"engine start, s ({args.engine})", time.perf_counter() - began)
    pump.response, rollouts = args.response, args.prompts * args.group
    pump.waves = rollouts, rollouts * WINDOWS, rollouts
    agent = rollout.AgentConfig(temperature=1.0, max_new_tokens=4 * args.response, sub_max_new_tokens=args.response,
                                max_model_len=args.prompt + 8 * args.response + 1000, max_turns=1)
    sampler = rollout.RolloutWorker(pump, codec, source, agent)
    play(args, sampler, rows, 0)  # warms up

    def side(cls, worker, number):
        pump.__class__ = cls
        try:
            seconds, episodes = timed(device, lambda: play(args, worker, rows, number))
        finally:
            pump.__class__ = Actor
        return seconds, episodes, pump.sampled, pump.prompt_tokens, list(pump.steps)

    # An engine that answers one request of a fan-out before the next is asked.
    class OneByOne(Actor):
        pass

    sides = {"pump": (Actor, sampler)}
    if "lockstep" not in args.skip:
        sides["lock-step"] = LockStep, sampler
    if "one" not in args.skip:
        sides["one by one"] = OneByOne, sampler
    original = rollout.answer_call

    async def in_turn(record, episode, worker):
        # A lock serves those who wait in the order in which they came: that of the calls.
        async with episode.notes.setdefault("lock", asyncio.Lock()):
            return await original(record, episode, worker)

    found = {name: [] for name in sides}
    for number in range(args.rounds):
        for name, (cls, worker) in list(sides.items())[::1 if number % 2 else -1]:
            rollout.answer_call = in_turn if name == "one by one" else original
            found[name].append(side(cls, worker, 1))
    rollout.answer_call = original
    for name, rounds in found.items():
        times, tokens = [r[0] for r in rounds], rounds[0][2]
        result.add(f"{name}: s", median(times))
        result.add(f"{name}: more", {"range": [round(min(times), 3), round(max(times), 3)], "sampled": tokens,
                                     "sampled tokens/s": round(tokens / median(times), 1),
                                     "prompt tokens asked": rounds[0][3], "engine steps": len(rounds[0][4])})
        if name != "pump":
            result.add(f"RATIO {name} / pump", median(times) / median([r[0] for r in found["pump"]]))

    episodes, steps = found["pump"][-1][1], found["pump"][-1][4]
    prompt = median([e.context.mask.index(1) for e in episodes])
    subs = sum(len(e.calls) for e in episodes)
    assert subs == len(episodes) * WINDOWS, f"{subs} windows"
    sampled = [sum(e.context.mask) for e in episodes]
    mean_sub = sum(c["sub_tokens"] for e in episodes for c in e.calls) / max(1, subs)
    prefill, decode, host, kv = model_seconds(args, pump, prompt, subs, sum(sampled) / len(sampled), mean_sub)
    result.add("step model: s", {"prefill": round(prefill, 3), "decode": round(decode, 3), "prompts": round(host, 3),
                                 "sum": round(prefill + decode + host, 3)})
    result.add("measured / model", median([r[0] for r in found["pump"]]) / (prefill + decode + host))

    # Turn 1 alone: a batch whose decoding steps are all alike.
    pump.one_turn = True
    alone = replace(sampler, agent=replace(agent, max_turns=0))
    fixed = pump.response
    Actor.submit, keep = (lambda self, r: (setattr(r, "max_tokens", fixed), VllmEngine.submit(self, r))[1]), Actor.submit
    seconds, episodes, tokens, _, steps = side(Actor, alone, 2)
    Actor.submit = keep
    full = [s for s, running in steps if running == len(episodes)][-fixed // 2:]
    body, head, tower = sizes(args)
    moved = 2 * (body + head) + len(episodes) * (prompt + fixed * 3 / 4) * kv
    result.add("turn 1 alone", {"s": round(seconds, 3), "tokens/s": round(tokens / seconds, 1),
                                "ms of a decoding step": round(1e3 * median(full), 3),
                                "GB a step must read": round(moved / 1e9, 2),
                                "MBU": round(moved / median(full) / BANDWIDTH, 4)})
    pump.one_turn = False
    work = 2 * body * (args.prompts * prompt) + 2 * tower * args.prompts * args.frames * 196
    first = sum(s for s, _ in steps) - fixed * median(full)
    result.add("turn 1 alone: prefill s, MFU", [round(first, 3), round(work / max(first, 1e-9) / PEAK, 4)])

    if "sync" not in args.skip:
        asleep, _ = timed(device, pump.sleep)
        free, total = torch.cuda.mem_get_info() if device.type == "cuda" else (0, 0)
        names = checkpoint.merged_weights(ckpt)
        weights = [(name, w.to(device)) for name, w in names]
        wake, _ = timed(device, lambda: pump.wake(iter(weights)))
        result.add("sleep s, GB in use asleep, wake with new weights s",
                   [round(asleep, 2), round((total - free) / 1e9, 2), round(wake, 2)])
        del weights
    if "generate" not in args.skip:
        pump.sleep()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        generate(args, ckpt, codec, device, rows, source, result)
    result.add("done", True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
