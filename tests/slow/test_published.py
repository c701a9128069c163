"""A published Qwen3-VL checkpoint trains end to end: tiny random weights behind the real
vocabulary, templates and configuration.

Two checkpoints stand for all: a tied one with the Instruct template (as 2B and 4B are tied) and an
untied one with the Thinking template (as 8B and 32B are untied). Both like <|endoftext|> best,
everywhere, which nobody may sample. Run: pytest tests/slow/test_published.py
"""
import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Overheard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import ReferenceEngine, forward
from scripted import AGENT, Scripted
from slow import published as layout

import chat
import grpo
import model
import rewards
import rollout
import sft
import toy
import video
from plumbing import checkpoint, data

CPU = torch.device("cpu")
KINDS = {"instruct": (True, False), "thinking": (False, True)}  # tied, thinking
END, IM_START, IM_END, THINK = 151643, 151644, 151645, 151667
OPTIONS = ["red", "green", "blue", "a red square, then a blue one"]
CROP = ('<tool_call>\n{"name": "crop_video", "arguments": {"start_time": %s, "end_time": %s}}\n'
        '</tool_call>')
LOOK = f"<think>look</think>\n{CROP % (8, 16)}\n{CROP % (40, 48.5)}"
RIGHT = "<think>\nI saw it, between 8 and 16.\n</think>\n<answer>B</answer>"

SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>",
        "<tool_code>", "</tool_code>"]
ODD = [*TAGS, "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<tool_response>", "<12.5 seconds>",
       "1234567890", "\u65e5\u672c\u8a9e", "e\u0301", "\u00e9", "\u212b", "\u037e",
       "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufeff", "\u2028", "\u0000", "\r\n",
       "\n\n", "  ", "\t", "'s", "'S", "{{x}}"]
texts = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=6)), max_size=8).map("".join)


# ------------------------------------------------------------------------------------------------
# What there is


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """-> function (tied, thinking) -> folder of a tiny random checkpoint as Qwen3-VL's are
    published: their vocabulary, templates, layout."""
    if not layout.vocabulary_file():
        pytest.skip("the published vocabulary is not installed (dashscope)")
    folder = tmp_path_factory.mktemp("published")
    layout.write_tokenizer(folder)

    @functools.cache
    def write(tied, thinking):
        name = folder / f"{'tied' if tied else 'untied'}-{'thinking' if thinking else 'instruct'}"
        layout.write_checkpoint(name, folder, tied, thinking)
        return str(name)

    return write


@pytest.fixture(scope="module")
def codecs(published):
    return {kind: chat.load_codec(published(*KINDS[kind])) for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def codec(codecs, kind):
    return codecs[kind]


@pytest.fixture
def ckpt(published, kind):
    return published(*KINDS[kind])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folder of a video, a task and the chats of a cold start, written as published data is:
    `<think>look</think>` on one line."""
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    os.makedirs(folder / "videos")
    toy.write_video(folder / "videos" / "v.mp4",
                    toy.draw_frames(toy.make_scenes(rng)[0], np.random.default_rng(0)))
    task = {"id": "t", "video": "videos/v.mp4", "options": OPTIONS, "answer": "B", "type": "mcq",
            "question": "Which is first? <|im_end|> \u65e5 <|image_pad|> e\u0301"}
    window = {"start": 8.0, "end": 12.0, "fps": 1.0, "max_frames": 4}
    (folder / "rl.jsonl").write_text(json.dumps(task))
    seen = "a red square"
    turns = [{"role": role, "content": text} for role, text in (
        ("assistant", LOOK), ("tool", seen), ("tool", "nothing <|im_end|>"), ("assistant", RIGHT))]
    sub = [*rollout.sub_messages(task, window), {"role": "assistant", "content": seen}]
    chats = [{"id": "main", "tools": rollout.tool_schema(),
              "messages": rollout.main_messages(task, 4) + turns}, {"id": "sub", "messages": sub}]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture(scope="module")
def source(world):
    return rollout.VideoSource(str(world), video.FrameCache())


@pytest.fixture(scope="module")
def tasks(world):
    return data.read_tasks(str(world / "rl.jsonl"))


def said(sample, turn):
    """Sample 0 calls and is right, the others are wrong in ways of their own: every group has
    something to learn."""
    if sample == 0:
        return (LOOK, RIGHT)[turn].removeprefix("<think>")
    return "hm</think>" * (sample % 2) + "<answer>A</answer>"


def played(codec, tasks, source, main=said, agent=AGENT):
    engine = Scripted(codec, lambda request: main(*map(int, request.id.split("/")[2:])))
    sampler = rollout.RolloutWorker(engine, codec, source, agent)
    return next(iter(rollout.run(sampler, tasks[:1], 4)))


# ------------------------------------------------------------------------------------------------
# Vocabulary


def test_the_tokenizer_is_the_published_one_to_the_byte(published):
    """Merges that were derived wrongly, or another release of the ranks, would test a vocabulary
    that nobody has."""
    found = hashlib.sha256(Path(published(True, False), "tokenizer.json").read_bytes()).hexdigest()
    # of every Qwen3
    assert found == "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"


def test_the_codec_reads_a_published_checkpoint(codec, kind):
    one = codec.tokenizer.convert_tokens_to_ids
    assert (codec.image_pad, codec.eos) == (151655, IM_END)
    assert (one("<tool_call>"), one("<think>"), len(codec.token_bytes)) == (151657, THINK, 151669)
    assert {"<think>", "</tool_response>", "<|fim_prefix|>"} < set(codec.special_strings)
    assert len(codec.special_strings) == 26
    assert {END, IM_START} <= set(codec.suppress_tokens) and IM_END not in codec.suppress_tokens
    assert codec.opens_thought == (kind == "thinking")
    assert (codec.patch, codec.merge, codec.temporal, codec.mean,
            codec.std) == (16, 2, 2, (0.5,) * 3, (0.5,) * 3)


@SLOW
@given(text=texts)
def test_bytes_of_tokens_rebuild_any_text(codecs, text):
    """As the tokenizer normalises it: a question in NFD, as file names on a Mac are, is read in
    NFC."""
    codec, wanted = codecs["instruct"], unicodedata.normalize("NFC", text).encode()
    for ids in (codec.tokenizer(text)["input_ids"],
                codec.tokenizer(unicodedata.normalize("NFD", text))["input_ids"]):
        assert b"".join(codec.token_bytes[i] for i in ids) == wanted
    plain = codec.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert chat.decode(codec, ids, keep_end=True) == plain
    assert "".join(chat.text_pieces(chat.token_bytes_of(codec, ids))) == plain


def test_a_letter_shares_its_token_with_the_tag_and_earns_no_format_credit(codec):
    """`>B` is one token: were it structural, a lost tag (A_fmt = -1) would cancel what the right
    letter earned (A_task = +1)."""
    ids = chat.encode(codec, "<answer>B</answer>") + [codec.eos]
    pieces = chat.token_bytes_of(codec, ids)
    assert pieces == [b"<", b"answer", b">B", b"</", b"answer", b">", b"<|im_end|>"]
    assert rewards.structural_mask(pieces) == [True, True, False, True, True, True, True]
    for letter in "ACDEFGHIJ":
        ids = chat.encode(codec, f"x<answer>{letter}</answer>.")
        assert rewards.structural_mask(chat.token_bytes_of(codec, ids))[3] is False


# ------------------------------------------------------------------------------------------------
# Prompts and turns


# A turn that begins with a blank shares a token with the line break before it: no turn of a model's
# does, it is sampled after that break.
words = st.text("ab \n.,7\u65e5\u00e9<>/'", max_size=20).map(lambda s: "x" + s + "x")
shown = st.one_of(words, texts)


@SLOW
@given(question=shown, end=st.tuples(words, words),
       turns=st.lists(st.tuples(words, words, st.lists(shown, min_size=1, max_size=3)), max_size=2))
def test_prompt_turns_and_glue_are_what_the_template_writes_at_once(codecs, question, turns, end):
    """In the form that the Thinking template gives back, with the blank line after the thought."""
    for codec in codecs.values():
        messages = [{"role": "system", "content": "Watch."}, {"role": "user", "content": question}]
        ids = chat.encode_prompt(codec, messages)[0]
        for thought, rest, responses in [*turns, (*end, [])]:
            turn = f"<think>\n{thought}\n</think>\n\n{rest}"
            ids = ids + chat.turn_ids(codec, turn, ids)
            messages.append({"role": "assistant", "content": turn})
            if responses:
                replies = [{"role": "tool", "content": text} for text in responses]
                ids = ids + chat.tool_response_ids(codec, replies, True)
                messages = messages + replies
        guarded = chat.guard_messages(codec, messages)
        # tags in a turn are tags
        whole = [m if m["role"] == "assistant" else g for m, g in zip(messages, guarded)]
        text = chat.apply_template(codec, whole, None, False)
        assert ids == chat.encode(codec, text.removesuffix("\n"))


@SLOW
@given(data=st.data())
def test_image_ids_equal_the_processors(codecs, data):
    """Any question, any times, frames of any size: expanded ids are those of transformers'
    processor, compact ids those of its template."""
    codec, question = codecs[data.draw(st.sampled_from(sorted(codecs)))], data.draw(words)
    count, rows, columns = (data.draw(st.integers(1, 3)) for _ in range(3))
    seconds = sorted(data.draw(st.lists(st.integers(0, 4_000_000).map(lambda n: n / 100),
                                        min_size=count, max_size=count)))
    item = chat.VisionItem({"video": "v"}, "v", count, 32 * rows, 32 * columns, seconds)
    asked = [{"type": "video", "video": "v"}, {"type": "text", "text": question}]
    talk = [{"role": "system", "content": "Watch."}, {"role": "user", "content": asked}]
    ids, compact = chat.encode_prompt(codec, talk, [item], rollout.tool_schema())
    parts = [p for s in seconds for p in ({"type": "text", "text": f"<{s:.1f} seconds>"},
                                          {"type": "image"})]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    text = codec.processor.apply_chat_template([talk[0], asked], tools=rollout.tool_schema(),
                                               add_generation_prompt=True, tokenize=False)
    frames = [np.zeros((32 * rows, 32 * columns, 3), np.uint8)] * count
    made = codec.processor(text=[text], images=frames, do_resize=False)
    assert ids == list(made["input_ids"][0]) and compact == codec.tokenizer(text)["input_ids"]
    assert np.asarray(made["image_grid_thw"]).tolist() == [[1, 2 * rows, 2 * columns]] * count


@pytest.mark.parametrize("first", [
    "\n<think>look</think>B", "<answer>B</answer>", "<think>\n\nlook", "look</think>B", RIGHT, LOOK,
    "<think>\nlook\n</think>\n\n<answer>B</answer>", "<think>look</think>\n<answer>B</answer>"])
def test_a_chat_is_encoded_as_the_ids_that_a_rollout_would_hold(codec, tasks, source, first):
    """Cold start and RL see one form: the forced `<think>` `\\n` as ids of its own, never twice,
    then the rest as sampled."""
    spec = {"video": tasks[0]["video"], "frames": 4}
    opening, tools = rollout.main_messages(tasks[0], 4), rollout.tool_schema()
    item = chat.vision_item(spec, source.load(spec))
    replies = [{"role": "tool", "content": "red <|im_start|>"}]
    told = [*opening, {"role": "assistant", "content": first}, *replies,
            {"role": "assistant", "content": RIGHT}]
    talk = chat.encode_chat(codec, told, [item], tools)
    prompt = chat.encode_prompt(codec, opening, [item], tools)[0]
    forced, ids = chat.encode(codec, "<think>\n"), list(prompt)
    assert forced == [THINK, 198] and (prompt[-2:] == forced) == codec.opens_thought
    for turn, text in enumerate((first.lstrip(), RIGHT)):
        thinks = text.startswith("<think>")
        prefix = forced if thinks and not codec.opens_thought else []
        rest = (text.removeprefix("<think>").removeprefix("\n") if thinks
                else ("</think>\n\n" if codec.opens_thought else "") + text)
        ids += prefix + chat.encode(codec, rest) + [codec.eos]
        ids += chat.tool_response_ids(codec, replies, True) if turn == 0 else []
    assert talk.ids == ids
    assert not any(a == THINK and THINK in talk.ids[n + 1:n + 3] for n, a in enumerate(talk.ids))
    trained = [i for i, m in zip(talk.ids, talk.mask) if m]
    assert trained.count(codec.eos) == 2 and IM_START not in trained
    assert talk.ids.count(IM_START) == prompt.count(IM_START) + 2
    if first.startswith("<think>"):  # the same through the agent loop
        bare = [text.removeprefix("<think>").removeprefix("\n") for text in (LOOK, RIGHT)]
        episode = played(codec, tasks, source, lambda sample, turn: bare[turn])
        assert episode.executed() == 2 and episode.context.ids[:len(prompt)] == prompt
        start, stop = episode.spans[1]
        assert episode.context.ids[start - 2:stop] == talk.ids[-(stop - start) - 2:]


# ------------------------------------------------------------------------------------------------
# Weights


def test_the_trainer_the_reference_and_plain_transformers_agree(
        codec, ckpt, tasks, source, process_group):
    """Weights in bf16 files, some of them tied, read by three ways into fp32: the same
    log-probs."""
    from PIL import Image
    from transformers import Qwen3VLForConditionalGeneration

    spec = {"video": tasks[0]["video"], "frames": 4}
    item = chat.vision_item(spec, source.load(spec))
    talk = chat.encode_chat(codec, [*rollout.main_messages(tasks[0], 4),
                                    {"role": "assistant", "content": RIGHT}], [item])
    policy, reference = (checkpoint.load_policy(ckpt, codec, CPU, frozen=frozen)
                         for frozen in (False, True))
    pack = model.pack_trees(codec, [model.Tree(model.TokenSpan(talk.ids, talk.mask), talk.items)])
    vision = model.VisionFeatures(policy, source.load)
    with torch.no_grad():
        ours, theirs = (forward(p, pack, vision)[0] for p in (policy, reference))
        hf = Qwen3VLForConditionalGeneration.from_pretrained(ckpt, dtype=torch.float32)
        frames = [Image.fromarray(x) for x in source.load(spec).images]
        both = codec.processor.image_processor(images=frames, do_resize=False, return_tensors="pt")
        row = torch.tensor([talk.ids])
        logits = hf(input_ids=row, **both,
                    mm_token_type_ids=(row == codec.image_pad).int()).logits[0, pack.predictor]
    free = logits.log_softmax(-1)
    assert (free[:, END] > -0.1).all()  # left to itself, the model would end every text here
    logits[:, list(codec.suppress_tokens)] -= 100.0
    plain = logits.log_softmax(-1).gather(1, pack.target[:, None])[:, 0]
    assert torch.equal(ours, theirs) and (ours - plain).abs().max() < 1e-4 and plain.std() > 1


# ------------------------------------------------------------------------------------------------
# Engines and scripts


def sampled_ids(codec, row):
    ids = [i for i, m in zip(row["ids"], row["mask"]) if m]
    assert ids and not set(ids) & set(codec.suppress_tokens)
    return ids


def run_script_here(monkeypatch, script, *flags):
    """main() of a script in this process -> rows of its log.jsonl."""
    flags = list(map(str, flags))
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    script.main()
    log = Path(flags[flags.index("--out") + 1]) / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


SFT = ("--steps", 1, "--batch-size", 2, "--max-len", 4096, "--gradient-checkpointing")
UPDATE = ("--max-model-len", 2048, "--temperature", 1.0, "--lr", 1e-3, "--max-pixels", 1024)
GRPO = ("--prompts", 1, "--num-generations", 2, "--frames", 4, "--max-new-tokens", 12,
        "--max-turns", 1, *UPDATE)


@pytest.fixture
def runs(tmp_path):
    """Folder for runs; their checkpoints are large, and pytest would keep them."""
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.fixture
def overheard(monkeypatch):
    """Main agents of scripts are overheard saying `said` -> list of functions that see each engine
    before its script does."""
    real, made, first = rollout.make_engine, [], []

    def make_engine(*args, **more):
        made.append(real(*args, **more))
        for look in first:
            look(made[-1])
        return Overheard(made[-1], said)

    monkeypatch.setattr(rollout, "make_engine", make_engine)
    yield first
    for engine in made:  # none outlives a script that failed
        with contextlib.suppress(Exception):
            engine.close()


def check_ends(engine, codec, ckpt, tasks, source):
    """vLLM and the reference engine. Greedy: the same ids although the model likes <|endoftext|>
    best. Hot: never a banned id, and a turn ends in <|im_end|> or not at all."""
    plain = ReferenceEngine(str(ckpt), codec)
    agent = rollout.AgentConfig(temperature=0.0, max_model_len=2048, max_new_tokens=12, tools=False)
    one, two = (next(rollout.run(rollout.RolloutWorker(e, codec, source, agent), tasks, 4)).context
                for e in (engine, plain))
    assert one.ids == two.ids and sum(one.mask) == 12
    assert np.abs(np.subtract(one.logps, two.logps)).max() < 1e-3
    agent = rollout.AgentConfig(temperature=1.5, max_model_len=2048, max_new_tokens=16, tools=False)
    for episode in [e for some in (engine, plain)
                    for e in rollout.run(rollout.RolloutWorker(some, codec, source, agent), tasks,
                                         4,
                                         group=2)]:
        assert len(sampled_ids(codec, vars(episode.context))) == 16 or episode.finish == ["stop"]


def test_cold_start_rollouts_and_updates_of_a_published_checkpoint(
        codec, kind, ckpt, world, tasks, source, overheard, monkeypatch, runs):
    """sft.py, then two steps of grpo.py with vLLM (the second one samples from synced weights),
    then its first step again from the record."""
    from safetensors.torch import load_file

    (tied, _), cold, out = KINDS[kind], runs / "sft" / "last", runs / "grpo"
    (row,) = run_script_here(monkeypatch, sft, *SFT, "--ckpt", ckpt, "--data", world / "sft.jsonl",
                             "--out", cold.parent)
    assert row["grad_norm"] > 0 and 0 < row["loss"] < 30
    again = chat.load_codec(str(cold))
    for same in (lambda c: chat.encode_prompt(c, [{"role": "user", "content": "n\u00e9 1234"}]),
                 lambda c: (c.suppress_tokens, c.special_strings, c.token_bytes, c.opens_thought)):
        assert same(again) == same(codec)
    ends = json.loads((cold / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {IM_END, END}
    weights = load_file(cold / "model.safetensors")
    assert ("lm_head.weight" in weights) != tied
    assert {w.dtype for w in weights.values()} == {torch.float32}
    # as they were, now and one stage later
    files = checkpoint.small_files(ckpt)
    assert checkpoint.small_files(cold) == files and len(files) == 9

    overheard.append(lambda engine: check_ends(engine, again, cold, tasks, source))
    rows = run_script_here(monkeypatch, grpo, *GRPO, "--steps", 2, "--ckpt", cold, "--data",
                           world / "rl.jsonl", "--out", out)
    for row in rows:
        assert row["gap"] < 1e-4 and row["gap_sub"] < 1e-4 and row["grad_norm"] > 0
        assert row["kappa"] == 1.0
    # the first update moved the policy, and the engine followed: its gap stayed
    assert rows[0]["kl"] < 1e-6 < rows[1]["kl"] and checkpoint.small_files(out / "last") == files
    record = out / "rollouts" / "step_000000.rank0.jsonl"
    for row in map(json.loads, record.read_text().splitlines()):
        for part in (row, *(c["sub"] for c in row["calls"])):
            sampled_ids(codec, part)
    (row,) = run_script_here(monkeypatch, grpo, *UPDATE, "--ckpt", cold, "--rollouts", record,
                             "--video-root", world, "--out", runs / "again")
    for name in ("gap", "loss", "grad_norm", "tokens"):
        assert row[name] == pytest.approx(rows[0][name], rel=1e-4, abs=1e-6)


# ------------------------------------------------------------------------------------------------
# transformers 4.57, which the authors' evaluation pins


OLD = os.path.join(ROOT, ".venv", "transformers-4.57")
OLDER = """
    import sys
    sys.path[:0] = [{old!r}]
    sys.path.append({root!r})
    import torch
    import model, launch
    from plumbing import checkpoint
    launch.import_shim()
    import transformers
    from transformers import AutoProcessor, AutoTokenizer, GenerationConfig
    from transformers import Qwen3VLForConditionalGeneration
    assert transformers.__version__.startswith("4.57."), transformers.__version__
    folder, given, out = sys.argv[1:]
    given = torch.load(given, weights_only=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    hf, found = Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    asked = processor(text=[given["text"]], images=given["images"], do_resize=False,
                      return_tensors="pt")
    with torch.no_grad():
        logits = hf(**asked).logits[0]
    torch.save({{"ids": asked["input_ids"][0].tolist(), "logits": logits,
                "chat": tokenizer.apply_chat_template(given["chat"], tokenize=False),
                "plain": tokenizer(given["odd"])["input_ids"], "kind": type(processor).__name__,
                "ends": GenerationConfig.from_pretrained(folder).eos_token_id}}, out)
"""


def test_transformers_4_loads_what_is_saved_as_the_same_model(
        codec, ckpt, tasks, source, process_group, tmp_path, monkeypatch):
    """Configuration, tokenizer, processor and weights; ids and logits of a prompt with images are
    ours."""
    if not os.path.isdir(OLD):
        pytest.skip("transformers 4.57 is not beside the environment: `make test-compat`")
    policy = checkpoint.load_policy(ckpt, codec, CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.hf.model.language_model.parameters():  # trained: no longer the base
            p.add_(0.1 * p.std() * torch.randn(()) if p.ndim > 1 else 0.05)
            p.copy_(p.bfloat16())
    monkeypatch.setattr(model, "compute_dtype", lambda _: torch.bfloat16)  # as on a GPU
    folder = tmp_path / "step_000001"
    optimizer = model.adamw(model.trained_parameters(policy), 0.1, 0.9, CPU)
    checkpoint.save_run(policy, optimizer, str(tmp_path), 1, {"settings": {}})
    spec = {"video": tasks[0]["video"], "frames": 4}
    frames = source.load(spec)
    item, task = chat.vision_item(spec, frames), {**tasks[0], "question": "Which is first?"}
    ids, compact = chat.encode_prompt(codec, rollout.main_messages(task, 4), [item])
    talk = [{"role": "user", "content": "n\u00e9"}, {"role": "assistant", "content": RIGHT}]
    torch.save({"text": chat.decode(codec, compact, keep_end=True), "chat": talk,
                "images": list(frames.images), "odd": "".join(ODD)}, tmp_path / "given.pt")
    script = tmp_path / "older.py"
    script.write_text(textwrap.dedent(OLDER.format(old=OLD, root=ROOT)))
    done = subprocess.run([sys.executable, script, folder, tmp_path / "given.pt",
                           tmp_path / "found.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert found["ids"] == ids
    assert found["kind"] == "Qwen3VLProcessor" and set(found["ends"]) == {IM_END, END}
    assert found["chat"] == codec.tokenizer.apply_chat_template(talk, tokenize=False)
    assert found["plain"] == codec.tokenizer("".join(ODD))["input_ids"]
    tree = model.Tree(model.TokenSpan(ids, [0] + [1] * (len(ids) - 1)), [item])
    pack = model.pack_trees(codec, [tree])
    vision = model.VisionFeatures(policy, source.load)
    with torch.no_grad():
        ours = forward(policy, pack, vision)[0]
    logits = found["logits"][pack.predictor]
    logits[:, list(codec.suppress_tokens)] -= 100.0
    theirs = logits.log_softmax(-1).gather(1, pack.target[:, None])[:, 0]
    assert len(theirs) == len(ids) - 1 and theirs.std() > 1
    assert (ours - theirs).abs().max() < 1e-3
