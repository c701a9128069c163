"""
Tests of evaluation/verify.py: python -m pytest tests/test_verify.py -q

The checkouts are made up: invented sentences in files, names and code of the form that the
publishers' have. Each passes as it is. With one thing changed in its code, it must not.
"""
import ast
import json
import sys

import pytest

import eval as evaluation
import launch
from evaluation import verify

READER = '''
FPS = 2.0
FPS_MIN_FRAMES = 4
FPS_MAX_FRAMES = {frames}
VIDEO_MIN_PIXELS = 128 * 28 * 28
VIDEO_MAX_PIXELS = {pixels}
TOTAL = int(float(os.environ.get("X", 3)))
FACTOR = 2

def down(number, factor):
    return math.floor(number / factor) * factor

def smart_nframes(ele, total_frames, video_fps):
    if "nframes" in ele:
        raise ValueError("never")
    most = min(FPS_MAX_FRAMES, total_frames)
    return down(min(max(total_frames / video_fps * FPS, FPS_MIN_FRAMES), most), FACTOR)
'''
BENCH = '''
import os
os.abort()  # nothing of a checkout is run
sampling_params = SamplingParams(temperature=0.1, top_p=0.001, max_tokens=1024)
for dataset_name in ["one"]:
    QUESTION_TEMPLATE = ("{Question}\\n" "Look twice.\\n\\nThen say.")
    TYPE_TEMPLATE = {"multiple choice": " A letter.", "free-form": " Words."}
    for x in data:
        if x["problem_type"] == "multiple choice":
            question = x["problem"] + "Options:\\n"
            for op in x["options"]:
                question += op + "\\n"
        else:
            question = x["problem"]
        msg = [{"role": "user", "content": [
            {"type": x["data_type"], x["data_type"]: os.getcwd() + x["path"][1:]},
            {"type": "text",
             "text": QUESTION_TEMPLATE.format(Question=question) + TYPE_TEMPLATE[x["problem_type"]]}
        ]}]
        messages.append(msg)
'''
VIDEO_R1 = {"src/eval_bench.py": BENCH, "src/qwen-vl-utils/src/qwen_vl_utils/vision_process.py":
            READER.format(frames=16, pixels="128*28*28")}
QWEN_READER = "qwen-vl-utils/src/qwen_vl_utils/vision_process.py"
QWEN = {
    QWEN_READER: READER.format(frames=768, pixels=1),
    "evaluation/VideoMME/dataset_utils.py": '''
def build_videomme_prompt(data, data_dir, use_subtitle=False, sys_prompt=None):
    """A builder."""
    choices, answer = data["options"], data["answer"]
    video_path = os.path.join(data_dir, f"{data['videoID']}.mp4")
    choice_txt = "\\n".join(choices)
    prompt = ""
    if use_subtitle and os.path.exists(video_path):
        prompt = "Words:\\n"
    prompt += "Choose one."
    prompt += f"\\nAsked: {data['question']}\\n{choice_txt}\\nIt is:"
    messages = []
    if sys_prompt:
        messages.append({"role": "system", "content": sys_prompt})
    messages.append({"role": "user", "content": [{"video": video_path}, {"text": prompt}]})
    assert answer in ["A", "B"]
    return messages, {string.ascii_uppercase[i]: choice.split(".", 1)[1].strip()
                      for i, choice in enumerate(choices)}
''',
    "evaluation/VideoMME/infer_instruct.sh": "python x --max-new-tokens 32768 --temperature 0.7 "
    "--top-p 0.8 --top-k 20 --presence-penalty 1.5 --fps 2 --min-pixels 3584 --max-pixels 401408 "
    "--min-frames 4 --max-frames 512 --total-pixels 19267584"}
ASKS = '''
from eval_prompts import {name} as TEMPLATE

def inference(video_path, prompt, model, max_new_tokens=2048):
    messages = [{{"role": "user", "content": [{{"type": "text", "text": prompt}},
        {{"video": video_path, "total_pixels": 3584 * 28 * 28, "min_pixels": 16 * 28 * 28}}]}}]

def process_work_items(work_items):
    for item in work_items:
        {body}
'''
CHAT = {
    "src_eval/eval_prompts.py": 'QA_THINK = """Say: "[QUESTION]" of:[OPTION].\n\nThink.\n"""\n'
    'GROUND_TEMPLATE_THINK = """When is "[EVENT]"?\n\nThink."""',
    "src_eval/evaluate_qa.py": ASKS.format(name="QA_THINK", body='''
        example_prompt = TEMPLATE.replace("[QUESTION]", item["problem"]["question"])
        prompt = example_prompt.replace("[OPTION]", str(item["problem"]["options"]))'''),
    "src_eval/evaluate_grounding.py": ASKS.format(
        name="GROUND_TEMPLATE_THINK",
        body='prompt = TEMPLATE.replace("[EVENT]", ann["sentences"][sentence_idx])'),
    "src_eval/my_qwen_utils.py": READER.format(frames=768, pixels="768*28*28"),
    "Annotations/NextGQA/nextgqa_test.json": json.dumps([{"options": ["(A) x", "(B) y"]}])}
PREPROCESS = '''
    def _preprocess(self, itm):
        ele = self.default_ele()
        if "video_start" in itm and itm["video_start"] is not None:
            ele["video_start"] = itm["video_start"]
        messages = [{"role": "system", "content": []}, {"role": "user", "content": []}]
        messages[0]["content"].append({"type": "text", "text": self.sys_prompt})
        messages[1]["content"].append({"type": "video", "video": itm["video"], **ele})
        %s
        messages[1]["content"].append({"type": "text", "text": user_prompt})
        tmp = self._load_video_from_cache(itm["video"], ele)
'''
NOTHINK = '''
class vllm{kind}_nothink({kind}):
    def __getitem__(self, idx):
        inputs = self._preprocess(self.data[idx])
        inputs["text"] = inputs["text"] + "<think>\\n</think>\\n"
'''
TIME = {
    "src/vllm_inference/data/config.py": "DEFAULT_MCQ_PROMPT = {'r1': 'Look.\\n\\nQ: {}\\n{}'}\n"
    "DEFAULT_TG_PROMPT = {'r1': 'When is {}?\\n\\nThink.'}",
    "src/vllm_inference/data/__init__.py": "class MultipleChoiceQADataset:" + PREPROCESS
    % "user_prompt = self._build_user_prompt(itm)" + '''
    def _choice_id_to_letter(self, offset):
        return chr(ord("A") + offset)

    def _build_user_prompt(self, itm):
        lines = []
        for i in range(len(itm["options"])):
            lines.append(f'({self._choice_id_to_letter(i)}) {itm["options"][i]}')
        return self.prompt.format(itm["question"], "\\n".join(lines))

class TemporalGroundingDataset:''' + PREPROCESS
    % 'user_prompt = self.prompt.format(itm["sentence"])'
    + NOTHINK.format(kind="MultipleChoiceQADataset")
    + NOTHINK.format(kind="TemporalGroundingDataset") + '''
def build_dataloader(processor, sys_prompt="You are a helpful assistant.",
                     min_pixels=16 * 28 * 28, total_pixels=3584 * 28 * 28):
    pass
''',
    "src/vllm_inference/vllm_infer.py":
    "class vllmWrapper:\n    def generate(self, inputs, temperature: float = 0.0):\n        pass\n",
    "src/utils/vision_process.py": READER.format(frames=768, pixels="768*28*28"),
    "evaluate.py": "texts = model.generate(batch, answer_prompt=start)",
    "scripts/test.sh": "python evaluate.py \\\n  --max_new_tokens 1024 \\\n  --use_nothink &\n"}
CONAN = {
    "Conan-Eval/prompt_temp.py": "".join(
        f'Prompt_temp_{part}_{kind}="""\n{part} {kind}.\n\nQ: {{question}}\n{more}\n"""\n'
        for part in ("init", "round", "final")
        for kind, more in (("mc", "O: {options}"), ("gen", "By {type_fix}")))
    + 'TYPE_TEMPLATE = {"free-form": "some words"}',
    "Conan-Eval/videomme.py": '''
from prompt_temp import *

def load_data():
    out = []
    for idx, item in enumerate(raw):
        out.append({"question": item["question"], "options": ', '.join(item["options"])})
    return out

def build_prompt(question, mode, options, init_flag, final_flag):
    if init_flag:
        return Prompt_temp_init_mc.format(question=question, options=options)
    elif final_flag:
        return Prompt_temp_final_mc.format(question=question, options=options)
    return Prompt_temp_round_mc.format(question=question, options=options)

def construct_message(prompt, frames, timestamps=[], insert_timestamp=False):
    content = []
    for ts, frame in zip(timestamps, frames):
        content.append({"type": "text", "text": ts})
        content.append({"type": "image", "image": frame})
    content.append({"type": "text", "text": prompt})
    return [{"role": "user", "content": content}]

def evaluate_example(model, example, mode, max_frames):
    while True:
        if step_idx == 0 or not history_frames:
            prompt = build_prompt(question, mode, options, True, False)
            vr, fps = video_io.load_video(video_path)
        elif step_idx == 2:
            prompt = build_prompt(question, mode, options, False, True)
        else:
            prompt = build_prompt(question, mode, options, False, False)
        replay = clips_to_frame_indices(video_path, timestamps, 8, history_frames)
''',
    "Conan-Eval/video_io.py": '''
def uniform_sample_idx(total, most):
    return []

def idx_to_timestamp(idx, fps):
    sec = idx / fps
    return f"{int(sec // 3600):02d}:{int((sec % 3600) // 60):02d}:{int(sec % 60):02d}"

def save_video_frames(path, max_len: int = 448):
    pass
''',
    "Conan-Eval/utils.py": "def clips_to_frame_indices():\n    pass\n\n\ndef identify_replay(said):"
    "\n    pass\n\n\ndef identify_clip():\n    pass\n",
    "Conan-Eval/run.sh": "python main.py --max_frames 16 --max_steps 3 --max_new_tokens 4000 "
    "--temperature 1.0"}
ROLLOUT = "verl/workers/rollout/vllm_rollout/"
ZOOMER = {
    "scripts/eval_video.sh": "data.max_response_length=4096 data.video_fps=0.5 data.max_pixels="
    "100352 data.min_pixels=25088 data.frames_upbound=64 'data.system_prompt=\"Zoom: {\\\"a\\\": 1}"
    "\"' actor_rollout_ref.rollout.max_generation_round=5 "
    "actor_rollout_ref.rollout.tool_call_max_frames=16",
    "verl/utils/dataset/multimodal_dataset.py": '''
TEMPLATE = "{Question}{post_prompt}"

def make_conversation_multimodal(sources, system_prompt=None, post_prompt=None):
    for source in sources:
        prompt = [{"role": "user", "content": source["problem"]}]
        if system_prompt is not None:
            prompt.insert(0, {"role": "system", "content": system_prompt})
        source["prompt"] = prompt
    return sources

class Data:
    def process_video(self):
        pass

    def __getitem__(self, item):
        raw_prompt = prompt_with_chat_template.replace('<image>', ''.join([
            f'<frame{i}_time{frame_time[i]:.2f}s><|vision_start|><|image_pad|><|vision_end|>'
            for i in range(len(frames))]))
''',
    ROLLOUT + "vllm_rollout_spmd_video.py": '''
def generate(self):
    with self.update_sampling_params(n=1, stop='</video_zoom>'):
        pass
    for tool_call_result_ in results:
        if not isinstance(tool_call_result_, str):
            frame_time = tool_call_result_['frame_time']
            vision_pad = ''.join([f'<frame{i}_time{frame_time[i]:.2f}s><|vision_start|>'
                                  f'<|image_pad|><|vision_end|>' for i in range(len(frame_time))])
            tool_call_prompt_message = ("<|im_start|>user\\n" + "<tool_response>\\nSee:\\n"
                                        + vision_pad + "\\n</tool_response>\\n" + "go on")
            if current_iteration == max_iterations - 2:
                tool_call_prompt_message += "Stop."
            tool_call_prompt_message += "<|im_end|>\\n<|im_start|>assistant\\n"
            next_turn_prompt_ids = self.tokenizer.encode(tool_call_prompt_message)
''',
    ROLLOUT + "function_tools.py": "def extract_video_clip():\n    pass\n\n\n"
    "def prepare_tool_call_inputs_video():\n    pass\n"}
TASK = '''
TOOL_PROMPT = ("Crop if you must. " "Then say.")

def {name}_doc_to_text(doc, more):
    {text}
    return f"{{more['pre_prompt']}}{{question}}{{more['post_prompt']}}"

def {name}_tool_doc_to_messages(doc, more=None):
    question = {name}_doc_to_text(doc, more)
    visuals = {name}_doc_to_visual(doc)
    messages = [{{"role": "user", "content": []}}]
    messages[0]["content"].append({{"type": "text", "text": question.strip() + " " + TOOL_PROMPT}})
    return messages
'''
OPTIONS = '''candidates = []
    for i in range(5):
        candidate = doc.get(f"option{i}")
        if candidate != "N/A":
            candidates.append(candidate)
    question = doc["question"] + "\\n" + "\\n".join(
        [". ".join([chr(ord("A") + i), candidate]) for i, candidate in enumerate(candidates)])'''
SCHEMA = {"type": "function", "function": {"name": "crop_video", "description": "It crops.",
          "parameters": {"type": "object", "properties": {
              "video_path": {"type": "string"}, "start_time": {"type": "number"},
              "end_time": {"type": "number"}},
              "required": ["video_path", "start_time", "end_time"]}}}
LONGVT = {
    "lmms_eval_tasks/longvideobench/utils.py": TASK.format(name="longvideobench", text=OPTIONS)
    .replace("doc_to_visual", "doc_to_visual_v"),
    "lmms_eval_tasks/charades_sta/utils.py": TASK.format(
        name="temporal_grounding", text='question = doc["caption"] + ". "'),
    "lmms_eval_tasks/charades_sta/charades_tool.yaml": 'max_new_tokens: 49152\n  temperature: 0\n'
    'pre_prompt: "Find: "\n    post_prompt: "When?"',
    "lmms_eval_tasks/longvideobench/longvideobench_val_v_tool.yaml": "  max_new_tokens: 4096",
    "examples/eval/single_inference.py": f"CROP_VIDEO_TOOL = {SCHEMA}" + '''
def crop_video_local(video_path, start, end):
    ele = {"fps": 1, "max_frames": 128, "max_pixels": 224 * 224}

def encode_video_frames(video_path):
    ele = {"min_pixels": 28 * 28}

def run_inference(video_path, question, fps: int = 1, max_frames: int = 512,
                  max_pixels: int = 50176, max_tool_rounds: int = 5, enable_tool: bool = True):
    user_content = video_contents + [{"type": "text", "text":
        f"{question} {TOOL_PROMPT} The Video path for this video is: {video_path}"
        if enable_tool else question}]
    if enable_tool:
        messages = [{"role": "user", "content": user_content}]
    tool_content = result_images + [
        {"type": "text", "text": f"{func_args['start_time']}s, {len(result_images)} frames"}]
'''}
DRIVER = {
    "paravt/eval/driver.py": f"TOOL_SCHEMA = json.dumps({SCHEMA})" + '''
GENERAL_AGENTIC_SYSTEM = """Tools:
{tool_schema}

Say {{"name": 1}}."""
DIRECT_SYSTEM = "Say it."
DEFAULT_MAX_TOKENS = 2048

def _system_message(prompt_mode):
    if prompt_mode == "direct":
        return DIRECT_SYSTEM
    return GENERAL_AGENTIC_SYSTEM.format(tool_schema=TOOL_SCHEMA)

def _is_agentic(prompt_mode):
    return prompt_mode.startswith("agentic_")

def _video_user_content(vpath, q_text, video_channel, nframes):
    if video_channel == "video_url":
        return [{"type": "video_url", "video_url": {"url": f"file://{os.path.abspath(vpath)}"}},
                {"type": "text", "text": q_text}]
    frames = utils.get_frames(vpath, nframes=nframes)
    content: list = [{"type": "image_url", "image_url": {"url": utils.pil_to_b64(img)}}
                     for img in frames]
    content.append({"type": "text", "text": q_text})
    return content

def _completion_with_retry(client, messages):
    return client.chat.completions.create(messages=messages, temperature=0)

def eval_one(client, sample):
    try:
        vpath = sample["video_path"]
        q_text = sample["question"]
        if _is_agentic(prompt_mode) and "video path" not in q_text.lower():
            q_text = f"{q_text} The video path for this video is: {os.path.basename(vpath)}"
        user_content = _video_user_content(vpath, q_text, video_channel, nframes)
        system_msg = _system_message(prompt_mode)
        base_messages: list = []
        if system_msg is not None:
            base_messages.append({"role": "system", "content": system_msg})
        base_messages.append({"role": "user", "content": user_content})
        for turn in range(max_turns + 1):
            for tc in tcs:
                tool_calls += 1
                args = tc.get("arguments", {})
                st = utils.parse_time_val(args.get("start_time", args.get("start", 0)))
                et = utils.parse_time_val(args.get("end_time", args.get("end", st + 10)))
                cropped = utils.crop_frames(vpath, st, et)
                if cropped:
                    tc_c: list = [{"type": "image_url", "image_url": {"url": "x"}}
                                  for img in cropped]
                    tc_c.append({"type": "text", "text": f"<tool_response>\\n{len(cropped)} frames "
                                 f"from {st:.1f}s to {et:.1f}s.\\n</tool_response>"})
                    messages.append({"role": "user", "content": tc_c})
                else:
                    messages.append({"role": "user", "content": "none"})
            if turn == max_turns - 1:
                if sample["is_mcq"]:
                    force = "Now."
                    force_max = 64
                else:
                    force = "Now, times."
                    force_max = 128
    except Exception:
        pass

def parse():
    parser.add_argument("--main_nframes", type=int, default=64)
    parser.add_argument("--max_turns", type=int, default=3)
    parser.add_argument("--max_parallel", type=int, default=5)
    parser.add_argument("--max_tokens", type=int, default=DEFAULT_MAX_TOKENS)
''',
    "paravt/eval/utils.py": '''
def crop_frames(video_path, st, et, max_frames: int = 16):
    return fetch_video({"fps": 1, "max_frames": max_frames, "max_pixels": 50176})

def load_samples(dataset_name, hf_home, prompt_mode="agentic_general"):
    from datasets import load_dataset as hf_load
    instr = "Now direct." if prompt_mode == "direct" else "A letter."
    if dataset_name == "longvideobench":
        ds = hf_load("it", split="validation")
        samples = []
        for item in ds:
            opts = []
            for i in range(5):
                opt = item.get(f"option{i}", "")
                if opt and opt != "N/A":
                    opts.append(opt)
            opts_str = "\\n".join(f"{chr(65 + i)}. {o}" for i, o in enumerate(opts))
            question = f"Asked: {item['question']}\\nOptions:\\n{opts_str}\\n{instr}"
            samples.append({"question": question})
        return samples
    if dataset_name == "charades":
        samples = []
        for item in hf_load("that"):
            samples.append({"question": f'When is "{item["caption"]}"?'})
        return samples
'''}
PAPER = "--protocol-set paper"
CHECKOUTS = {"video-r1": VIDEO_R1, "qwen3-vl": QWEN, "videochat-r1": CHAT, "time-r1": TIME,
             "conan": CONAN, "videozoomer": ZOOMER, "longvt": LONGVT,
             f"paravt {PAPER}": DRIVER, f"direct {PAPER}": DRIVER}


@pytest.fixture(scope="module")
def sent():
    return {}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys, sent):
    """check(flags, (file, old, new), ..) -> exit code and output, of the changed checkout."""
    real = verify.ours

    def ours(args, texts, task, *script, user=None):
        """Episodes of equal texts are played once for all tests."""
        key = json.dumps([args.protocol, args.max_turns, texts, task["id"], script, user])
        if key not in sent:
            sent[key] = real(args, texts, task, *script, user=user)
        return json.loads(json.dumps(sent[key]))

    def check(flags, *changes):
        files = dict(CHECKOUTS[flags])
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        # The made-up code is "the one that was read", before it is changed.
        known = {}
        for name in verify.known_sources():
            for path in files:
                source = verify.opened(tmp_path, path)
                if f"def {name}" in source.text:
                    known[name] = source.digest(f"{name}")
        for path, old, new in changes:
            assert old in files[path], old
            (tmp_path / path).write_text(files[path].replace(old, new))
        monkeypatch.setattr(verify, "ours", ours)
        monkeypatch.setattr(verify, "known_sources", lambda: known)
        argv = f"eval.py --protocol {flags} --verify".split()
        monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            evaluation.main()
        return ended.value.code, capsys.readouterr().out

    return check


@pytest.mark.parametrize("flags", CHECKOUTS)
def test_a_checkout_of_the_form_that_we_know_is_the_same(check, flags):
    code, told = check(flags)
    assert code == 0 and "UNDECLARED" not in told and ", 0 undeclared" in told, told
    assert "same        " in told and "built from the source" in told


@pytest.mark.parametrize("flags, path, old, new, item", [
    ("video-r1", "src/eval_bench.py", 'op + "\\n"', '"- " + op + "\\n"', "four options"),
    ("video-r1", "src/eval_bench.py", "max_tokens=1024", "max_tokens=4096", "new tokens"),
    # declared for 0.1 alone
    ("video-r1", "src/eval_bench.py", "temperature=0.1", "temperature=0.9", "temperature"),
    ("video-r1", "src/qwen-vl-utils/src/qwen_vl_utils/vision_process.py", "FPS = 2.0", "FPS = 1.0",
     "frames a second"),
    ("qwen3-vl", "evaluation/VideoMME/dataset_utils.py", '{"video": video_path}, {"text": prompt}',
     '{"text": prompt}, {"video": video_path}', "five options"),
    ("qwen3-vl", QWEN_READER, "FACTOR = 2", "FACTOR = 4", "frames of 31 s"),
    ("qwen3-vl", "evaluation/VideoMME/infer_instruct.sh", "--top-k 20", "--top-k 40", "top-k"),
    ("videochat-r1", "Annotations/NextGQA/nextgqa_test.json", "(A) x", "A. x", "four options"),
    ("videochat-r1", "src_eval/evaluate_grounding.py", '{"type": "text", "text": prompt},', "",
     "event"),
    ("time-r1", "src/vllm_inference/data/__init__.py", '"<think>\\n</think>\\n"', '"<think>"',
     "event"),
    ("time-r1", "scripts/test.sh", "--use_nothink", "# --use_nothink", "four options"),
    ("time-r1", "src/vllm_inference/vllm_infer.py", "= 0.0", "= 0.5", "temperature"),
    ("conan", "Conan-Eval/videomme.py", "step_idx == 2", "step_idx == 1", "three rounds"),
    ("conan", "Conan-Eval/videomme.py", "', '.join", "'; '.join", "three rounds"),
    ("conan", "Conan-Eval/utils.py", "said", "say", "identify_replay"),
    ("videozoomer", ROLLOUT + "vllm_rollout_spmd_video.py", "max_iterations - 2",
     "max_iterations - 3", "turns whose answer"),
    ("videozoomer", ROLLOUT + "vllm_rollout_spmd_video.py", ":.2f", ":.1f", "frames and tags"),
    ("longvt", "examples/eval/single_inference.py", "The Video path", "The path", "five options"),
    ("longvt", "lmms_eval_tasks/longvideobench/utils.py", '". ".join', '") ".join', "four options"),
    ("longvt", "examples/eval/single_inference.py", "'start_time': {'type': 'number'}",
     "'start_time': {'type': 'string'}", "tool"),
    (f"paravt {PAPER}", "paravt/eval/driver.py", "{len(cropped)} frames", "{len(cropped)} images",
     "answer to a call"),
    (f"paravt {PAPER}", "paravt/eval/driver.py", "force_max = 64", "force_max = 32", "tokens of"),
    (f"direct {PAPER}", "paravt/eval/driver.py", "return DIRECT_SYSTEM", "return None",
     "first message")])
def test_one_change_in_their_code_is_found(check, flags, path, old, new, item):
    code, told = check(flags, (path, old, new))
    assert code == 1, told
    found = [line for line in told.splitlines() if line.startswith("UNDECLARED")]
    assert found and any(item in line for line in found), told


def test_declared_differences_are_footnotes(check):
    _, told = check("videozoomer")
    assert "declared [1] answer to call 1 (built" in told
    assert "\n[1] the answers to calls are in our words\n" in told
    assert "    -See:" in told  # theirs, as a diff


@pytest.mark.parametrize("flags, path, old, new, why", [
    ("video-r1", "src/eval_bench.py", "for x in data", "for row in data", "loop `for x in data`"),
    ("video-r1", "src/eval_bench.py", "QUESTION_TEMPLATE = ", "Q = ", "QUESTION_TEMPLATE"),
    ("qwen3-vl", "evaluation/VideoMME/infer_instruct.sh", "--fps", "--rate", "does not hold --fps"),
    ("longvt", "lmms_eval_tasks/longvideobench/utils.py", "longvideobench_tool", "tool",
     "the function longvideobench_tool_doc_to_messages")])
def test_a_missing_name_is_told_in_one_line(check, flags, path, old, new, why):
    with pytest.raises(launch.UserError, match=why):
        check(flags, (path, old, new))


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    for flags, why in (("conan", "no file Conan-Eval/prompt_temp.py"), ("sage", "no code"),
                       ("rewatch-r1", "no code"), ("paravt", "--protocol-set paper"),
                       (f"conan {PAPER}", "--protocol-set native")):
        argv = f"eval.py --protocol {flags} --verify".split()
        monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path)])
        with pytest.raises(launch.UserError, match=why):
            evaluation.main()
    monkeypatch.setattr(sys, "argv", "eval.py --protocol conan --verify nowhere".split())
    with pytest.raises(launch.UserError, match="no such folder"):
        evaluation.main()


def test_code_that_is_not_understood_is_a_difference(check):
    code, told = check("video-r1", ("src/eval_bench.py", 'question = x["problem"]\n',
                                    'question = ask(x["problem"])\n'))
    assert code == 1 and "UNDECLARED  the source changed, cannot tell" in told and "ask(" in told


@pytest.mark.parametrize("code", [
    "__import__('os')", "open('/etc/passwd')", "().__class__.__bases__", "x.__class__", "eval('1')",
    "'{0.__class__}'.format(x).encode()", "os.system('true')", "getattr(x, 'pop')", "lambda: 1",
    "x.clear()", "(y := 2)", "globals()", "2 ** 9999999", "exec"])
def test_only_plain_expressions_are_evaluated(code):
    with pytest.raises(verify.Unreadable):
        verify.value(ast.parse(code, mode="eval").body, {"x": [1]})


@pytest.mark.parametrize("code", [
    "f'{a!r:>6}|{n:.2f}|{n:{w}}'", "'{} {b}'.format(a, b=n)", "'-'.join(s.strip() for s in ls)",
    "[f'{chr(65 + i)}. {o}' for i, o in enumerate(ls)]", "d['k'][1:] + ls[::-1][:1]", "n // 2 % 2",
    "{**d, 'z': 1}", "a if n > 2 and not ls == [] else 'x'", "'k' in d or n", "-n + len(a) * 2",
    "a.replace('a', 'b') + str(ls)", "{k: v for k, v in zip(ls, a)}", "n is None", "d.get('q', 3)",
    "ls and a", "max(n, 2) <= 3"])
def test_expressions_have_the_value_that_python_gives(code):
    names = {"a": "abc", "n": 3, "w": 4, "ls": ["x ", "", "y"], "d": {"k": [1, 2]}}
    assert verify.value(ast.parse(code, mode="eval").body, dict(names)) == eval(code, names)
