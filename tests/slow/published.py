"""The layout of a published Qwen3-VL checkpoint, in small: real vocabulary, chat templates and
configuration, random weights.

The ranks of the vocabulary come from the package dashscope (Apache-2.0), of which one file is read
and nothing is imported; its merges follow from the ranks. Everything else is written here, with
what Qwen3-VL-{2B,4B,8B,32B}-{Instruct,Thinking} have in these files.
"""
import base64
import importlib.util
import json
import os
import shutil

import launch

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>",
           "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
           "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>",
           "<|video_pad|>")  # 151643 ..
TAGS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
        "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
        # 151657 ..: added too, but no "special" tokens
        "<tool_response>", "</tool_response>", "<think>", "</think>")
# tokens made of bytes; rows of the embedding, some of which no token has
VOCABULARY, ROWS = 151_643, 151_936

# ------------------------------------------------------------------------------------------------
# Vocabulary


def vocabulary_file():
    """Path of the ranks, or None if the package is not installed."""
    spec = importlib.util.find_spec("dashscope")
    path = (os.path.join(spec.submodule_search_locations[0], "resources", "qwen.tiktoken")
            if spec else "")
    return path if os.path.isfile(path) else None


def parts(token, ranks):
    """The two tokens that byte pair encoding joins into this one: lower ranks join first, and it is
    the last to be made."""
    pieces = [token[i:i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        rank = [ranks.get(a + b, VOCABULARY) for a, b in zip(pieces, pieces[1:])]
        at = rank.index(min(rank))
        pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


def write_tokenizer(folder):
    """tokenizer.json, vocab.json and merges.txt, about 3 s."""
    import tokenizers
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

    with open(vocabulary_file(), "rb") as f:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, f)}
    # stand for themselves in vocab.json; other bytes follow 255
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(others)}}

    def word(token):
        return "".join(map(letter.get, token))

    merges = [tuple(map(word, parts(token, ranks))) for token in ranks if len(token) > 1]
    core = Tokenizer(models.BPE({word(token): rank for token, rank in ranks.items()}, merges,
                                continuing_subword_prefix="", end_of_word_suffix=""))
    core.normalizer = tokenizers.normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(False, trim_offsets=False, use_regex=False)])
    core.decoder = tokenizers.decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                               use_regex=False)
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    text = core.to_str(pretty=True)
    # of the decoder, which ignores them
    flags = '"add_prefix_space": {0},\n    "trim_offsets": {0},\n    "use_regex": {0}\n'
    text = text.replace(flags.format("true"), flags.format("false"))
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        f.write(text)
    core.model.save(str(folder))  # vocab.json, merges.txt


# ------------------------------------------------------------------------------------------------
# Chat templates


def chat_template(thinking):
    """Behaves as the published ones do, but for `tool_calls`, which nothing here passes: our calls
    are text.

    Thinking: the generation prompt opens a thought, and of the turns before the last question only
    what follows the thought is shown.
    """
    declaration = ("# Tools\n\n"
                   "You may call one or more functions to assist with the user query.\n\n"
                   "You are provided with function signatures within <tools></tools> XML tags:\n"
                   "<tools>")
    manual = ("\n</tools>\n\nFor each function call, return a json object with function name and "
              "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
              '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    shown = """
        {%- macro shown(m) -%}
            {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string
                             else m.content) -%}
                {%- if part.type in ('image', 'video') -%}
                    {{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' -}}
                {%- else -%} {{- part.text -}} {%- endif -%}
            {%- endfor -%}
        {%- endmacro -%}"""
    system = """
        {%- set first = shown(messages[0]) if messages[0].role == 'system' -%}
        {%- if tools -%}
            {{- '<|im_start|>system\n' -}}
            {{- (first + '\n\n' if messages[0].role == 'system' else '') + DECLARATION -}}
            {%- for tool in tools -%} {{- '\n' + (tool | tojson) -}} {%- endfor -%}
            {{- MANUAL + '<|im_end|>\n' -}}
        {%- elif messages[0].role == 'system' -%}
            {{- '<|im_start|>system\n' + first + '<|im_end|>\n' -}}
        {%- endif -%}"""
    question = """
        {%- set last = namespace(question=messages | length - 1) -%}
        {%- for m in messages -%}
            {%- set text = shown(m) -%}
            {%- if m.role == 'user' and not (text.startswith('<tool_response>')
                                             and text.endswith('</tool_response>')) -%}
                {%- set last.question = loop.index0 -%}
            {%- endif -%}
        {%- endfor -%}""" if thinking else ""
    answer = """
                {%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}
                {%- if m.reasoning_content is not string and '</think>' in text -%}
                    {%- set thought = text.split('</think>')[0].rstrip('\n') -%}
                    {%- set thought = thought.split('<think>')[-1].lstrip('\n') -%}
                    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
                {%- endif -%}
                {%- if loop.index0 > last.question and (loop.last or thought) -%}
                    {%- set text = '<think>\n' + thought.strip('\n') + '\n</think>\n\n'
                                   + text.lstrip('\n') -%}
                {%- endif -%}""" if thinking else ""
    turns = """
        {%- for m in messages -%}
            {%- set text = shown(m) -%}
            {%- if m.role == 'assistant' -%}""" + answer + """
                {{- '<|im_start|>assistant\n' + text + '<|im_end|>\n' -}}
            {%- elif m.role == 'user'
                     or (SYSTEM_LATER and m.role == 'system' and not loop.first) -%}
                {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' -}}
            {%- elif m.role == 'tool' -%}
                {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
                {{- '\n<tool_response>\n' + text + '\n</tool_response>' -}}
                {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
            {%- endif -%}
        {%- endfor -%}
        {{- '<|im_start|>assistant\n' + PREFIX if add_generation_prompt -}}"""
    text = shown + system + question + turns
    for name, value in (("DECLARATION", declaration), ("MANUAL", manual),
                        ("PREFIX", "<think>\n" if thinking else "")):
        text = text.replace(name, json.dumps(value))
    return text.replace("SYSTEM_LATER", "true" if thinking else "false").strip()


# ------------------------------------------------------------------------------------------------
# Configuration


def write_json(folder, name, content):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def configuration(tied, hidden=64, layers=2):
    """config.json. As in the 4B, heads together are wider than the hidden state."""
    text = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
            "dtype": "bfloat16", "eos_token_id": 151645,
            "head_dim": 32, "hidden_act": "silu", "hidden_size": hidden, "initializer_range": 0.02,
            "intermediate_size": 2 * hidden,
            "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
            "num_attention_heads": 4, "num_hidden_layers": layers,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
            "use_cache": True, "vocab_size": ROWS,
            # published: 24, 20, 20 of 64
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5],
                             "rope_type": "default"},
            **({"tie_word_embeddings": True} if tied else {})}
    vision = {"deepstack_visual_indexes": [0, 1], "depth": 2, "hidden_act": "gelu_pytorch_tanh",
              "hidden_size": 64, "in_channels": 3, "initializer_range": 0.02,
              "intermediate_size": 128, "model_type": "qwen3_vl", "num_heads": 2,
              "num_position_embeddings": 2304, "out_hidden_size": hidden, "patch_size": 16,
              "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655,
            "model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": tied,
            "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
            "vision_config": vision, "vision_end_token_id": 151653, "vision_start_token_id": 151652}


def write_settings(folder, tied, thinking):
    """Every small file beside the weights."""
    sampling = ({"top_p": 0.95, "top_k": 20, "temperature": 1.0} if thinking
                else {"top_p": 0.8, "top_k": 20, "temperature": 0.7})
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16,
            "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_json(folder, "config.json", configuration(tied))
    write_json(folder, "generation_config.json", {"bos_token_id": 151643, "pad_token_id": 151643,
        "do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.0, **sampling,
        "transformers_version": "4.56.0"})
    write_json(folder, "preprocessor_config.json", {"size": {"longest_edge": 16777216,
        "shortest_edge": 65536}, **half, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(folder, "video_preprocessor_config.json", {"size": {"longest_edge": 25165824,
        "shortest_edge": 4096}, **half, "fps": 2, "min_frames": 4, "max_frames": 768,
        "do_sample_frames": True, "video_processor_type": "Qwen3VLVideoProcessor"})
    write_json(folder, "chat_template.json", {"chat_template": chat_template(thinking)})
    write_json(folder, "tokenizer_config.json", {"add_bos_token": False, "add_prefix_space": False,
        "additional_special_tokens": list(CONTROL[1:]), "bos_token": None, "added_tokens_decoder": {
            str(VOCABULARY + n): {"content": token, **plain, "special": token in CONTROL}
            for n, token in enumerate((*CONTROL, *TAGS))}, "chat_template": chat_template(thinking),
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 262144, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None})


# ------------------------------------------------------------------------------------------------
# Weights


def write_weights(folder, tied, favoured, seed=0):
    """bf16 safetensors: of a tied checkpoint one file, of an untied one two and their index.

    Larger weights than fresh ones, whose distribution is so flat that little can go wrong in it.
    favoured: an id that the model likes best wherever it stands: one hidden number is always high,
    and that id's row listens to it.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    hf = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if p.ndim > 1:
                p.normal_(0.0, 0.3 if "embed_tokens" in name or "lm_head" in name
                          else 0.8 * p[0].numel() ** -0.5)
        hf.model.language_model.embed_tokens.weight[:, 0] = 2.0
        hf.lm_head.weight[favoured, 0] = 20.0
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in hf.state_dict().items()
               if not (tied and name == "lm_head.weight")}
    files = {name: "model.safetensors" if tied
             else f"model-0000{1 + ('lm_head' in name)}-of-00002.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weights[name] for name in files if files[name] == file},
                  os.path.join(folder, file), metadata={"format": "pt"})
    if not tied:
        size = sum(w.nbytes for w in weights.values())
        write_json(folder, "model.safetensors.index.json",
                   {"metadata": {"total_size": size}, "weight_map": files})


def write_checkpoint(folder, vocabulary, tied, thinking, favoured=151643):
    """vocabulary: a folder that write_tokenizer has filled. favoured: <|endoftext|> by default, the
    end that nobody may sample."""

    launch.import_shim()
    os.makedirs(folder)
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        shutil.copy(os.path.join(vocabulary, name), folder)
    write_settings(folder, tied, thinking)
    write_weights(folder, tied, favoured)
