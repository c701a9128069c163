"""
Tests of tools/view.py and its page.html: python -m pytest tests/all/test_page.py -q
`make test-page` installs the browser that half of them need.

The page is made from a small run of the real scripts, from 2,000 episodes, and from damaged and
hostile records; a headless Chromium opens it.

  PYTHONPATH=. python tests/all/test_page.py PAGE.html docs   pictures of a demo
"""
import base64
import io
import json
import math
import os
import re
import shutil
import sys
from collections import Counter

import pytest
from conftest import ROOT, run_script

sys.path.insert(0, ROOT)
import launch
from tools import view

EVIL = ("</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
        "\"'><svg onload=window.hacked=1>&lt;\u2028\x00")


def start_browser(width=1280, height=900):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
                 "disable-background-networking", "disable-component-update", "disable-sync",
                 "disable-dev-shm-usage", "hide-scrollbars", f"window-size={width},{height}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, Service(shutil.which("chromedriver")))


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium", reason="selenium is not installed")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver: `make test-page` installs them")
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def visit(browser):
    """visit(page, tab) opens it; at the end nothing may have been logged as an error."""
    def visit(page, tab="curves"):
        browser.get("about:blank")
        browser.get(f"file://{page}#{tab}")
        return browser

    yield visit
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert not browser.execute_script("return window.hacked")


@pytest.fixture(scope="module")
def small_run(toy, tmp_path_factory):
    """Folder with a run of grpo.py, of sft.py and an evaluation, all of two steps or tasks."""
    out = tmp_path_factory.mktemp("runs")
    start = ("--preset", "toy", "--ckpt", toy / "init")
    agent = ("--max-new-tokens", 40, "--set", "sub_max_new_tokens=6")
    sft = ("--data", toy / "sft.jsonl", "--steps", 3, "--batch-size", 4)
    grpo = ("--data", toy / "rl.jsonl", "--steps", 3, "--prompts", 2, "--group", 3,
            "--show-every", 0, *agent)
    evaluation = ("--data", toy / "eval.jsonl", "--frames", 4, "--tools", "on", "off",
                  "--limit", 3, *agent)
    for name, words in (("sft", sft), ("grpo", grpo), ("eval", evaluation)):
        done = run_script(f"{name}.py", *start, *words, "--out", out / name, reference=True)
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def page(small_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    view.build([str(small_run)], None, str(path), 2000, 20.0, None, 6144)
    return path


def data_of(path):
    """What a page embeds."""
    element = r'<script id="data" type="application/json">(.*?)</script>'
    return json.loads(re.search(element, path.read_text(), re.DOTALL)[1])


TURNS = ("I look.\n</think>\n<tool_call>\n{\"name\": \"crop_video\"}\n</tool_call>",
         "So.\n</think>\n<answer>red</answer>")


def episode(task="t0", sample=0, step=0, turns=TURNS, **more):
    """A record as rollout.py writes it, without ids."""
    return {
        "task": {"id": task, "video": "videos/none.mp4", "question": "Which?", "options": None,
                 "answer": "red", "type": "open"},
        "group": f"{step}/{task}", "sample": sample, "K": 4, "version": step, "status": "ok",
        "error": None, "vision": [{"seconds": [8.0, 24.0, 40.0, 56.0]}], "think_open": True,
        "turns": list(turns), "pieces": [[*turn, ""] for turn in turns],
        "finish": ["stop"] * len(turns),
        "calls": [{"turn": 0, "start": 8.0, "end": 16.0, "status": "ok", "summary": "a red square",
                   "seconds": 0.1, "frames_seen": 8}],
        "reward": {"total": 2.8, "acc": 1.0, "fmt": 1.0, "tool": 0.8},
        "advantage": {"task": 0.5, "fmt": 0.25}, "timing": {"video_s": 64.0}, **more}


@pytest.fixture
def made(tmp_path):
    """made(records) -> page of a rollout JSONL that holds them."""
    def made(records, **options):
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        (tmp_path / "r.jsonl").write_text("".join(line + "\n" for line in lines))
        page = tmp_path / "page.html"
        options = {"episodes": 2000, "max_mb": 20.0, "root": None, "pixels": 6144, **options}
        view.build([str(tmp_path / "r.jsonl")], None, str(page), **options)
        return page

    return made


# ------------------------------------------------------------------------------------------------
# What is put on the page


def test_a_run_an_evaluation_and_their_frames_are_on_the_page(page, small_run):
    data = data_of(page)
    names = [(s["name"], s["kind"]) for s in data["sources"]]
    assert names == [("grpo", "run"), ("sft", "run"), ("eval", "eval")]
    titles = {c["title"] for c in data["curves"]}
    assert {"Reward", "f_tau", "kappa", "Closure of think", "Accuracy by K", "Entropy",
            "Log-prob gap", "Gradient norm", "Phase times", "Loss"} <= titles
    log = (small_run / "grpo" / "log.jsonl").read_text().splitlines()
    reward = next(c for c in data["curves"] if c["title"] == "Reward")
    drawn = [p[1] for p in reward["series"][0]["points"]]
    assert drawn == pytest.approx([json.loads(line)["total"] for line in log])
    assert len(data["episodes"]) == data["found"] == 3 * 6 + 6
    from PIL import Image

    first = data["episodes"][0]
    assert len(first["times"]) == int(first["K"]) == 4 or len(first["times"]) > 4
    jpegs = [base64.b64decode(data["pictures"][i]) for _, i in first["thumbs"]]
    assert {Image.open(io.BytesIO(jpeg)).size for jpeg in jpegs} == {(32, 32)}
    assert len(first["thumbs"]) == min(8, len(first["times"]))
    assert first["evidence"] == []  # the tasks of this world have none
    assert any(t["title"] == "eval" and len(t["rows"]) == 2 for t in data["tables"])
    assert not data["troubles"]


def test_the_page_fetches_nothing(page):
    text = page.read_text()
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", text)
    assert "@import" not in text and "url(" not in text


def test_who_wrote_what_and_its_credit(made):
    (shown,) = data_of(made([episode()]))["episodes"]
    first, second = shown["turns"]
    assert first[0] == ["i", "<think>\n", None]
    assert first[1] == ["s", "I look.\n", 0.5]  # A_task
    assert first[2] == ["t", "</think>", 0.75]  # A_task + A_fmt
    assert [p[0] for p in first][-2:] == ["e", "i"] and "a red square" in first[-1][1]
    assert second[-1][0] == "e"
    assert "".join(text for kind, text, _ in second if kind in "st") == episode()["turns"][1]
    (plain,) = data_of(made([{**episode(), "advantage": {}}]))["episodes"]
    assert all(credit is None for turn in plain["turns"] for _, _, credit in turn)


def test_a_call_says_which_tool_it_was(made):
    """Records from before calls had names are shown without one."""
    named = {**episode()["calls"][0], "name": "zoom_region"}
    for calls, name in (([named], "zoom_region"), (episode()["calls"], "")):
        (shown,) = data_of(made([episode(calls=calls)]))["episodes"]
        assert shown["calls"][0]["name"] == name


def test_a_token_has_one_credit_whole(made):
    """As grpo.py trains it: `>B` is a token of answer and tag, and carries no format credit."""
    pieces = [["So.", "</think>", "<", "answer", ">B", "</", "answer", ">", ""]]
    record = {**episode(turns=["".join(pieces[0])]), "pieces": pieces, "calls": []}
    ((turn,),) = [e["turns"] for e in data_of(made([record]))["episodes"]]
    assert [tuple(part) for part in turn[1:]] == [
        ("s", "So.", 0.5), ("t", "</think><answer", 0.75), ("s", ">B", 0.5),
        ("t", "</answer>", 0.75), ("e", "", 0.75)]


def test_an_endpoint_says_no_tokens(made):
    """Then by characters; a turn that was cut off has no end."""
    record = {**episode(turns=["So.</think>R"]), "pieces": [], "finish": ["length"], "calls": []}
    ((turn,),) = [e["turns"] for e in data_of(made([record]))["episodes"]]
    assert [part[:2] for part in turn] == [
        ["i", "<think>\n"], ["s", "So."], ["t", "</think>R"], ["c", ""]]


def test_credit_is_that_of_the_run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rollouts = tmp_path / "rollouts" / "step_000000.rank0.jsonl"
    rollouts.write_text(json.dumps(episode()) + "\n")
    (tmp_path / "log.jsonl").write_text('{"step": 1, "total": 1.0}\n')
    found = {}
    for mode in ("struct", "sequence", "none"):
        arguments = {"format_credit": mode, "think_prefix": True}
        (tmp_path / "args.json").write_text(json.dumps(arguments))
        view.build([str(tmp_path)], None, str(tmp_path / "page.html"), 10, 20.0, None, 6144)
        turn = data_of(tmp_path / "page.html")["episodes"][0]["turns"][1]
        found[mode] = [credit for kind, _, credit in turn if kind in "ste"]
    assert found["sequence"] == [0.75] * len(found["sequence"])
    assert set(found["none"]) == {0.5}
    assert found["struct"].count(0.75) == 4  # </think> <answer> </answer> and the end


def test_whole_groups_are_kept_when_there_are_too_many(made):
    records = [episode(f"t{n % 5}", sample, n) for n in range(50) for sample in range(4)]
    data = data_of(made(records, episodes=40))
    groups = {}
    for e in data["episodes"]:
        groups.setdefault((e["step"], e["group"]), []).append(e["sample"])
    assert len(data["episodes"]) == 40 and data["found"] == 200
    assert all(sorted(group) == [0, 1, 2, 3] for group in groups.values())
    assert max(step for step, _ in groups) > 40 and min(step for step, _ in groups) < 10


def test_thumbnails_stay_within_the_size_that_is_allowed(page, small_run, tmp_path):
    small = tmp_path / "small.html"
    pictures = data_of(page)["pictures"]
    limit = (page.stat().st_size - 0.5 * sum(map(len, pictures))) / 2**20
    view.build([str(small_run)], None, str(small), 2000, limit, None, 6144)
    data = data_of(small)
    assert 0 < len(data["pictures"]) < len(pictures)
    assert small.stat().st_size < (limit + 0.05) * 2**20
    assert any(i == "full" for e in data["episodes"] for _, i in e["thumbs"])


@pytest.mark.parametrize(
    "pixels, size", [(2048, (64, 32)), (20000, (192, 96)), (10**6, (256, 128))])
def test_a_thumbnail_has_the_pixels_that_are_allowed_and_is_never_enlarged(
        made, tmp_path, pixels, size):
    import av
    import numpy as np
    from PIL import Image

    (tmp_path / "videos").mkdir()
    grey = np.full((128, 256, 3), 90, np.uint8)
    with av.open(str(tmp_path / "videos" / "none.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=1)
        stream.width, stream.height, stream.pix_fmt = 256, 128, "yuv420p"
        for _ in range(64):
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    pictures = data_of(made([episode()], root=str(tmp_path), pixels=pixels))["pictures"]
    sizes = {Image.open(io.BytesIO(base64.b64decode(p))).size for p in pictures}
    assert len(pictures) == 8 and sizes == {size}


def test_as_many_thumbnails_as_are_asked_for(page, small_run, tmp_path):
    few, many = tmp_path / "few.html", tmp_path / "many.html"
    for path, thumbs in ((few, 2), (many, 12)):
        view.build([str(small_run)], None, str(path), episodes=2000, max_mb=20.0, root=None,
                   pixels=6144, thumbs=thumbs)
    most = [max(len(e["thumbs"]) for e in data_of(p)["episodes"]) for p in (few, page, many)]
    assert most[0] == 2 and most == sorted(most) and most[2] <= 12


def test_a_missing_video_leaves_a_gap_and_is_counted(made):
    data = data_of(made([episode(), episode(sample=1)]))
    thumbs = [t for e in data["episodes"] for t in e["thumbs"] + e["calls"][0]["thumbs"]]
    assert all(index is None for _, index in thumbs)
    assert len(data["episodes"][0]["thumbs"]) == 4
    assert len(data["troubles"]) == 1 and "none.mp4" in data["troubles"][0][0]


def test_a_video_outside_its_folder_is_not_opened(made, toy, tmp_path):
    (tmp_path / "root").mkdir()
    record = episode()
    record["task"]["video"] = str(toy / "videos" / "rl-0000.mp4")
    data = data_of(made([record], root=str(tmp_path / "root")))
    assert not data["pictures"] and "outside" in data["troubles"][0][0]


DAMAGED = [
    "{", "[]", "null", "{}", '{"task": 3}', '{"a":' * 3000 + "1" + "}" * 3000,
    {**episode(), "turns": None}, {**episode(), "turns": 7}, {**episode(), "vision": [{}]},
    {**episode(), "calls": [3]}, {**episode(), "calls": [{"turn": "x"}]},
    {**episode(), "sample": "x"}, {**episode(), "sample": math.inf},
    {**episode(), "task": {"id": "only"}}]


def test_damaged_records_are_counted_and_the_others_shown(made):
    odd = {**episode(sample=1), "reward": {"total": math.nan, "acc": math.inf, "fmt": 10**400}}
    data = data_of(made([episode(), *DAMAGED, odd]))
    assert [e["sample"] for e in data["episodes"]] == [0, 1]
    assert data["episodes"][1]["reward"] == dict.fromkeys(("total", "acc", "fmt", "tool"))
    counts = [count for why, count in data["troubles"] if "none.mp4" not in why]
    assert sum(counts) == len(DAMAGED)


def test_a_torn_log_is_drawn_as_far_as_it_goes(tmp_path):
    (tmp_path / "log.jsonl").write_text(
        '{"step": 1, "total": 0.5, "by_K": {"4": {"acc": 1.0}}}\n'
        '{"step": 2, "total": NaN, "by_K": 3}\n{"step": 3, "total": 0.7, "by')
    view.build([str(tmp_path)], ["torn"], str(tmp_path / "page.html"), 10, 20.0, None, 6144)
    data = data_of(tmp_path / "page.html")
    reward = next(c for c in data["curves"] if c["title"] == "Reward")
    assert reward["series"] == [{"name": "torn", "run": 0, "points": [[1, 0.5]]}]
    by_budget = next(c for c in data["curves"] if c["title"] == "Accuracy by K")
    assert by_budget["series"] == [{"name": "torn K 4", "run": 0, "points": [[1, 1.0]]}]
    assert data["troubles"] == [[f"{tmp_path}/log.jsonl: the last line is cut off", 1]]


@pytest.mark.parametrize("place, steps, why", [
    (None, [1, 2, 3], None), (5, [2, 3], "the first is line 1"), (75, [1, 2], "cut off"),
    (45, [1, 3], "the first is line 2")])
def test_a_bad_byte_costs_its_line_alone_and_the_line_is_named(tmp_path, place, steps, why):
    """A byte order mark costs none. place: of a byte of 0xFF in the text, None: no such byte."""
    text = "".join(f'{{"step": {n}, "x": "é", "total": 0.5}}\n' for n in (1, 2, 3)).encode()[:-1]
    at = len(text) if place is None else place
    bad = b"" if place is None else b"\xff"
    (tmp_path / "log.jsonl").write_bytes(b"\xef\xbb\xbf" + text[:at] + bad + text[at:])
    view.build([str(tmp_path)], ["run"], str(tmp_path / "page.html"), 10, 20.0, None, 6144)
    assert drawn_on(tmp_path / "page.html") == {"Reward": {"run": [[n, 0.5] for n in steps]}}
    troubles = data_of(tmp_path / "page.html")["troubles"]
    assert [count for _, count in troubles] == [1] * (why is not None)
    assert not why or why in troubles[0][0] and "log.jsonl" in troubles[0][0]


def test_any_byte_of_a_log_may_break_and_the_page_is_made(tmp_path):
    """Each single byte of a run's small files, one after the other."""
    good = b'{"step": 1, "total": 0.5, "by_K": {"4": {"acc": 1.0}}}\n{"step": 2, "val": {"acc": 1}}'
    for name in ("log.jsonl", "summary.json", "args.json"):
        for place in (n for n, byte in enumerate(good) if byte != ord("\n")):
            (tmp_path / "log.jsonl").write_bytes(good)
            (tmp_path / name).write_bytes(good[:place] + b"\xff" + good[place + 1 :])
            troubles = Counter()
            (source,) = view.load_sources([str(tmp_path)], ["run"], troubles, {})
            assert sum(troubles.values()) == 1 and len(source["log"]) == 2 - (name == "log.jsonl")
        (tmp_path / name).unlink()


def page_of_log(folder, *rows, args=None, name="run", **more):
    """Page of one run that logged these rows; a text stands in the log as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "log.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "args.json").write_text(json.dumps(args or {}))
    view.build([str(folder)], [name], str(folder / "page.html"), 10, 20.0, None, 6144)
    return folder / "page.html"


def drawn_on(page):
    """{title: {name of a line: its points}}"""
    return {curve["title"]: {line["name"]: line["points"] for line in curve["series"]}
            for curve in data_of(page)["curves"]}


HELD_OUT = {"acc": 0.5, "acc_without_tools": 0.25,
            "by_K": {"4": {"acc": 0.125}, "16": {"acc": 1.0}},
            "by_type": {"open": {"acc": 0.75, "acc_without_tools": 0.5}}}


def test_each_number_of_the_log_has_its_curve(tmp_path):
    """A null is a missing point and no zero: nothing was ok in step 2."""
    first = {"step": 1, "acc": 0.5, "cut_turns": 0.25, "not_ok": 0, "gap": 1e-6, "f_released": 0.4,
             "by_K": {"16": {"acc": 0.5}, "4": {"acc": 0.25}},
             "by_type": {"mcq": {"acc": 1.0, "n": 2}, "a.b": {"acc": 0.0, "n": 1}}}
    second = {**dict.fromkeys(first), "step": 2, "not_ok": 6, "by_K": {}, "by_type": {}}
    third = {**first, "step": 3, "by_type": {"mcq": {"acc": None}}, "val": HELD_OUT}
    held_out = {"step": 4, "val": {"not_ok": 1}}  # in a row of its own
    drawn = drawn_on(page_of_log(tmp_path, first, second, third, held_out))
    assert drawn["Turns cut off"] == {"run": [[1, 0.25], [3, 0.25]]}
    assert drawn["Rollouts not ok"] == {"run": [[1, 0], [2, 6], [3, 0]], "run held out": [[4, 1]]}
    assert drawn["Accuracy term"] == {"run": [[1, 0.5], [3, 0.5]]}
    assert drawn["Log-prob gap"] == {"run mean": [[1, 1e-6], [3, 1e-6]]}
    assert drawn["Accuracy by type"] == {
        "run a.b": [[1, 0.0]], "run mcq": [[1, 1.0]]}
    assert list(drawn["Accuracy by K"]) == ["run K 4", "run K 16"]
    assert drawn["Held-out accuracy"] == {"run with tools": [[3, 0.5]], "run without": [[3, 0.25]]}
    assert drawn["Held-out accuracy by K"] == {"run K 4": [[3, 0.125]], "run K 16": [[3, 1.0]]}
    assert drawn["Held-out accuracy by type"] == {
        "run open": [[3, 0.75]], "run open without tools": [[3, 0.5]]}
    assert not [title for title in drawn if "released" in title]


def test_a_log_of_old_has_no_panel_for_what_it_lacks(tmp_path):
    drawn = drawn_on(page_of_log(tmp_path, {"step": 1, "total": 0.5, "val": None, "by_type": 3}))
    assert drawn == {"Reward": {"run": [[1, 0.5]]}}


def test_each_stage_has_panels_of_its_own(page, small_run):
    """A loss of SFT and one of GRPO share no axis, and SFT has no empty panel of GRPO."""
    sft = {"Loss", "Learning rate", "Gradient norm", "Tokens", "Speed", "Step time", "Left out"}
    curves = data_of(page)["curves"]
    assert {c["title"] for c in curves if c["stage"] == "sft"} == sft
    for curve in curves:
        assert {line["run"] for line in curve["series"]} == {["grpo", "sft"].index(curve["stage"])}
    lines = (small_run / "sft" / "log.jsonl").read_text().splitlines()
    (loss,) = [c for c in curves if c["title"] == "Loss"]
    assert [point[1] for point in loss["series"][0]["points"]] == pytest.approx(
        [json.loads(line)["loss"] for line in lines])


def test_the_held_out_loss_stands_beside_the_loss_of_sft(tmp_path):
    drawn = drawn_on(page_of_log(tmp_path, {"step": 1, "loss": 2.0, "trained_tokens": 5},
                                 {"step": 1, "val_loss": 3.0}))
    assert drawn == {"Loss": {"run": [[1, 2.0]], "run held out": [[1, 3.0]]},
                     "Tokens": {"run trained": [[1, 5]]}}


def test_the_papers_figures_stand_beside_measured_benchmarks(tmp_path):
    result = {"bench": "mlvu", "K": 64, "tools": "on", "n": 9, "headline": 0.5,
              "interval": [0.4, 0.6], "acc": 0.5, "f_tau": 0.9, "kappa": 1.0,
              "errors": {"decode": 2, "engine": 1}, "no_answer": 0, "truncated": 0,
              "metric": "M-Avg", "by": {}}
    (tmp_path / "summary.json").write_text(json.dumps({"results": [result]}))
    view.build([str(tmp_path)], ["ours"], str(tmp_path / "page.html"), 10, 20.0, None, 6144)
    first, table = data_of(tmp_path / "page.html")["tables"]
    assert first["title"] == "ours" and "0.500 [0.400, 0.600]" in first["rows"][0]
    assert dict(zip(first["head"], first["rows"][0]))["errors"] == "3"
    rows = {row[0]: dict(zip(table["head"], row)) for row in table["rows"]}
    assert rows["ours, K 64, tools on (measured)"]["mlvu"] == "50.0"
    assert rows["ParaVT-8B (the paper's)"]["mlvu"] == "65.0"


def test_a_comparison_is_tabulated(tmp_path):
    summary = {
        "rows": [{"name": "sft", "bench": None, "K": 4, "n": 9, "acc_tools": 0.25,
                  "interval": [0.125, 0.5], "f_tau": 0.5, "kappa": 1.0, "tokens_tools": 90.0}],
        "costs": [{"name": "sft", "bench": None, "K": 4, "tools": "on", "headline": 0.25,
                   "tokens": 90.0, "prompt_tokens": 50.0, "sampled_tokens": 10.0, "frames": 4.0,
                   "sub_prompt_tokens": 20.0, "sub_sampled_tokens": None, "sub_frames": 8.0,
                   "rounds": 2.0, "seconds": 0.5}],
        "differences": [{"name": "sft", "minus": "init", "bench": None, "K": 4, "tools": "on",
                         "n": 9, "difference": 0.0625, "interval": [-0.5, 0.5]}]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    view.build([str(tmp_path)], ["ours"], str(tmp_path / "page.html"), 10, 20.0, None, 6144)
    rows, costs, differences = data_of(tmp_path / "page.html")["tables"]
    assert costs["title"] == "ours: accuracy against what an answer costs"
    assert costs["rows"] == [["sft", "-", "4", "on", "0.250", "90.000", "50.000", "10.000",
                              "20.000 + -", "4.000 + 8.000", "2.000", "0.500"]]
    points = [[90.0, 0.25, "4"]]
    assert costs["lines"] == [{"name": "sft", "mode": "on", "points": points}]
    assert rows["lines"] == differences["lines"] == []
    assert rows["title"] == "ours: side by side"
    assert rows["rows"] == [["sft", "-", "4", "9", "0.250 [0.125, 0.500]", "90.000", "-", "-",
                             "0.500", "1.000"]]
    assert differences["title"] == "ours: differences of the same items"
    assert differences["rows"] == [
        ["sft - init", "-", "4", "on", "+0.062", "[-0.500, +0.500]", "9"]]


def spent(k, tools, tokens, headline, **more):
    return {"K": k, "tools": tools, "headline": headline, "tokens": tokens, **more}


COSTS = [spent(64, "on", 900.0, 0.75, name="grpo"), spent(4, "on", 300.0, 0.5, name="grpo"),
         spent(4, "off", 60.0, 0.25, name="grpo"), spent(64, "off", 400.0, 0.5, name="grpo"),
         spent(4, "on", 310.0, 0.25, name="sft"), spent(8, "on", 310.0, None, name="sft"),
         spent(16, "on", None, 0.5, name="sft"), spent(4, "on", 9.0, 0.5, name="sft", bench="mlvu")]


def page_of_costs(folder):
    (folder / "summary.json").write_text(json.dumps({"costs": COSTS}))
    view.build([str(folder)], ["ours"], str(folder / "page.html"), 10, 20.0, None, 6144)
    return folder / "page.html"


def test_accuracy_is_a_line_against_tokens(tmp_path):
    """One for each folder, benchmark and mode, by tokens; what was refused or is not known is no
    point."""
    (table,) = data_of(page_of_costs(tmp_path))["tables"]
    assert table["lines"] == [
        {"name": "grpo", "mode": "on", "points": [[300.0, 0.5, "4"], [900.0, 0.75, "64"]]},
        {"name": "grpo", "mode": "off", "points": [[60.0, 0.25, "4"], [400.0, 0.5, "64"]]},
        {"name": "sft", "mode": "on", "points": [[310.0, 0.25, "4"]]},
        {"name": "sft mlvu", "mode": "on", "points": [[9.0, 0.5, "4"]]}]


def test_an_evaluation_has_its_line_too(page, small_run):
    (table,) = [t for t in data_of(page)["tables"] if t["title"] == "eval"]
    results = json.loads((small_run / "eval" / "summary.json").read_text())["results"]
    assert [(line["mode"], line["points"]) for line in table["lines"]] == [
        (r["tools"], [[round(r["cost"]["tokens"], 4), round(r["headline"], 4), "4"]])
        for r in results]
    assert len(results) == 2


@pytest.mark.parametrize("flags, why", [
    (["/no/such"], "no such file"), (["{tmp}"], "neither log.jsonl"),
    (["{tmp}", "--names", "a", "b"], "--names"), (["{tmp}", "--max-mb", "0"], "--max-mb")])
def test_bad_input_is_one_line(tmp_path, flags, why):
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    done = run_script("tools/view.py", *flags, "--out", tmp_path / "page.html")
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "text", [None, "<p>no marker", "/*DATA*/ twice /*DATA*/", "no contents /*DATA*/"])
def test_without_its_template_the_script_says_so(tmp_path, monkeypatch, text):
    monkeypatch.setattr(view, "__file__", str(tmp_path / "view.py"))
    if text is not None:
        (tmp_path / "page.html").write_text(text)
    with pytest.raises(launch.UserError, match="page.html"):
        view.build([str(tmp_path)], None, str(tmp_path / "out.html"), 10, 20.0, None, 6144)


def test_command_line(small_run, tmp_path):
    done = run_script("tools/view.py", small_run / "grpo", small_run / "eval", "--names", "a", "b",
                      "--out", tmp_path / "page.html", "--episodes", 8, "--thumb-pixels", 2048)
    assert done.returncode == 0, done.stderr
    assert re.search(r"page.html: \d\.\d MiB, \d+ of 24 episodes, \d+ thumbnails", done.stdout)
    assert {s["name"] for s in data_of(tmp_path / "page.html")["sources"]} == {"a", "b"}


# ------------------------------------------------------------------------------------------------
# While a run goes on


def test_a_growing_run_drops_few_of_the_groups_that_were_shown():
    """And they stay spread over the steps."""
    rows = [{"group": f"{n}/t", "K": 4} for n in range(400) for _ in range(4)]
    before = {row["group"] for row in view.thinned(rows[:800], 400)}
    after = {row["group"] for row in view.thinned(rows[:880], 400)}
    assert len(before) == len(after) == 100 and len(before & after) >= 85
    steps = sorted(int(row["group"].split("/")[0]) for row in view.thinned(rows, 400))
    assert max(b - a for a, b in zip(steps, steps[4:])) <= 8


# ------------------------------------------------------------------------------------------------
# In a browser


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return browser.execute_script(script, selector)


def press(browser, keys):
    from selenium.webdriver.common.by import By

    browser.find_element(By.TAG_NAME, "body").send_keys(keys)


def choose(browser, name, value):
    browser.execute_script("""
        const field = document.getElementById("f-" + arguments[0]);
        field.value = arguments[1];
        field.dispatchEvent(new Event("input", {bubbles: true}));
    """, name, value)


def test_curves_show_values_under_the_pointer_and_explain_themselves(visit, page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    browser = visit(page)
    assert texts(browser, "#plots h3")[0].startswith("Reward")
    assert len(texts(browser, "#plots svg")) > 15
    plot = browser.find_element(By.CSS_SELECTOR, "#plots svg")
    ActionChains(browser).move_to_element_with_offset(plot, 120, 0).perform()
    tip = browser.find_element(By.CSS_SELECTOR, "#plots .tip")
    log = data_of(page)["curves"][0]["series"][0]["points"]
    assert tip.is_displayed() and "step 3" in tip.text and f"{log[-1][1]:.4g}" in tip.text
    definition = browser.find_element(By.CSS_SELECTOR, "#plots .definition")
    assert not definition.is_displayed()
    browser.find_element(By.CSS_SELECTOR, "#plots h3 button").click()
    assert definition.is_displayed() and "R_acc" in definition.text
    line = "return document.querySelector('#plots svg path[stroke-width]').getAttribute('d')"
    before = browser.execute_script(line)
    browser.execute_script(
        "const s = document.getElementById('smooth'); s.value = 0.9; s.oninput()")
    assert browser.execute_script(line) != before


def test_stages_have_a_heading_if_there_are_two(visit, page, tmp_path):
    assert texts(visit(page), "#plots h2") == ["PARA-GRPO", "SFT"]
    lone = page_of_log(tmp_path, {"step": 1, "loss": 2.0, "trained_tokens": 5})
    browser = visit(lone)
    assert texts(browser, "#plots h2") == [] and len(texts(browser, "#plots svg")) == 2


PANEL = """
    const card = [...document.querySelectorAll("#plots .card")].find(
        card => card.querySelector("h3").firstChild.textContent.trim() === arguments[0]);
"""


AXIS = PANEL + """
    const labels = [...card.querySelectorAll("text[text-anchor=end]")];
    const path = card.querySelector("path[stroke-width]").getAttribute("d");
    return [labels.map(label => [label.textContent, +label.getAttribute("y")]),
            path.match(/[0-9.]+ [0-9.]+/g).map(pair => +pair.split(" ")[1])];
"""


def test_held_out_numbers_are_drawn_as_measured(visit, tmp_path):
    """With a dot for each evaluation, whatever the smoothing; lines of every step have none."""
    rows = [{"step": n, "acc": n % 2, "not_ok": n // 10} for n in range(1, 11)]
    for row in rows[4::5]:
        row["val"] = {**HELD_OUT, "acc": row["step"] / 20}
    browser = visit(page_of_log(tmp_path, *rows))
    dots = PANEL + """return [...card.querySelectorAll("circle")].map(
        dot => [+dot.getAttribute("cx"), +dot.getAttribute("cy")]);"""
    low, high, *without = browser.execute_script(dots, "Held-out accuracy")
    assert high[0] - low[0] > 300 and high[1] < low[1] and len(without) == 2
    browser.execute_script(
        "const s = document.getElementById('smooth'); s.value = 0.95; s.oninput()")
    assert browser.execute_script(dots, "Held-out accuracy") == [low, high, *without]
    count = browser.execute_script(AXIS, "Rollouts not ok")[1]  # nor is a count
    assert len(set(count[:9])) == 1 and count[8] - count[9] > 100
    assert browser.execute_script(dots, "Accuracy term") == []


@pytest.mark.parametrize("key, title, values, least", [
    ("closure", "Closure of think", [0.996, 1.0], 0.1), ("acc", "Accuracy term", [0.0, 0.0], 0.1),
    ("acc", "Accuracy term", [0.25, 0.26], 0.1), ("total", "Reward", [-0.3, -0.3], 0.2),
    ("kappa", "kappa", [1.9, 1.95], 0.5), ("not_ok", "Rollouts not ok", [0, 0], 1),
    ("gap", "Log-prob gap", [1.2e-6, 1.21e-6], 1e-7), ("entropy", "Entropy", [0.0, 0.0], 0.05),
    ("train_tokens_per_s", "Speed", [12345.0, 12346.0], 1000),
    ("train_tokens_per_s", "Speed", [123.0, 1.5e7], 1e7)])
def test_an_axis_does_not_blow_up_noise_and_says_its_numbers(
        visit, tmp_path, key, title, values, least):
    """Its ticks are apart and true, it is long enough, and holds no impossible value."""
    rows = [{"step": n, key: {"think": value} if key == "closure" else value}
            for n, value in enumerate(values, 1)]
    labels, drawn = visit(page_of_log(tmp_path, *rows)).execute_script(
        "document.getElementById('smooth').value = 0; document.getElementById('smooth').oninput();"
        + AXIS, title)
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9}
    ticks = [float(said.rstrip("kMG")) * sizes.get(said[-1], 1) for said, _ in labels]
    assert 3 <= len({said for said, _ in labels}) == len(labels) <= 8
    assert max(len(said) for said, _ in labels) <= 7
    (y0, y1), unit = (labels[0][1], labels[-1][1]), ticks[-1] - ticks[0]
    # Where the labels say a value lies, the line is; 4: a label stands on its baseline.
    for value, y in zip(values, drawn):
        said = ticks[0] + (y - (y0 - 4)) / (y1 - y0) * unit
        assert said == pytest.approx(value, abs=unit / 100)
    height = 170 * unit / (y0 - y1)
    assert height >= least
    low, high = ticks[0] - (200 - 22 - y0 + 4) * unit / (y0 - y1), 0
    high = low + height
    assert low >= -1e-6 * unit or min(values) < 0
    assert high <= 1 + 1e-6 or least != 0.1


def test_an_episode_without_a_grade_is_not_called_wrong(visit, made):
    asked = {**episode("asked"), "reward": {}, "advantage": {}}
    asked["task"] = {**asked["task"], "answer": None}
    page = made([asked, episode("right"), {**episode("bad"), "reward": {"acc": 0.0}}])
    browser = visit(page, "episodes")
    shown = texts(browser, "#one .card")[0]
    assert "not graded" in shown and "wrong" not in shown and "gold" not in shown
    assert "R_acc" not in shown and texts(browser, "#matching") == ["3 episodes, 1 correct"]
    for value, names in (("0", ["bad"]), ("1", ["right"])):
        choose(browser, "right", value)
        assert texts(browser, "#rows .name") == names


def test_two_runs_stand_side_by_side_at_one_task(visit, tmp_path):
    for name, said in (("sft", "blue"), ("grpo", "red")):
        turns = [TURNS[0], f"So.\n</think>\n<answer>{said}</answer>"]
        rows = [episode(task, n, turns=turns) for task in ("t0", "t1") for n in (0, 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    view.build([str(tmp_path / "sft.jsonl"), str(tmp_path / "grpo.jsonl")], None, str(page),
               episodes=2000, max_mb=20.0, root=None, pixels=6144)
    browser = visit(page, "episodes")
    assert texts(browser, "#one > .beside") == []
    choose(browser, "source", "0")
    choose(browser, "beside", "1")
    first, second = texts(browser, "#one > .beside > .card")
    assert "blue" in first and "red" in second
    press(browser, "j")
    first, second = texts(browser, "#one > .beside > .card")
    assert "sample 1" in first and "sample 1" in second


def test_a_window_is_a_link_into_the_film(visit, made):
    row = episode()
    row["task"] = {**row["task"], "video": "videos/a film #1.mp4"}
    link = visit(made([row]), "episodes").find_element("css selector", ".call a")
    assert link.get_attribute("href").endswith("/videos/a%20film%20%231.mp4#t=8,16")
    assert link.text == "8 to 16 s"


def test_the_curve_of_costs_is_drawn(visit, tmp_path):
    """Every point where its tokens and its headline put it, its K beside it."""
    browser = visit(page_of_costs(tmp_path), "tables")
    script = """
        const card = document.querySelector(".card.cost");
        const dots = [...card.querySelectorAll("circle")].map(
            dot => [dot.textContent, +dot.getAttribute("cx"), +dot.getAttribute("cy")]);
        const paths = [...card.querySelectorAll("path")].map(
            path => [path.getAttribute("d"), path.getAttribute("stroke-dasharray"),
                     path.getAttribute("stroke")]);
        return [dots, paths, card.getBoundingClientRect().height];
    """
    dots, paths, height = browser.execute_script(script)
    assert [said for said, _, _ in dots] == [
        f"{name} tools {mode}, K {k}: {value:.3f} at {tokens} tokens"
        for name, mode, k, value, tokens in (
            ("grpo", "on", 4, 0.5, 300), ("grpo", "on", 64, 0.75, 900),
            ("grpo", "off", 4, 0.25, 60), ("grpo", "off", 64, 0.5, 400),
            ("sft", "on", 4, 0.25, 310), ("sft mlvu", "on", 4, 0.5, 9))]
    (_, x4, y4), (_, x64, y64), (_, x60, y60), *_ = dots
    assert (x64 - x4) / (x4 - x60) == pytest.approx((900 - 300) / (300 - 60))
    assert y64 < y4 < y60 and y60 - y4 == pytest.approx(y4 - y64)  # up is better
    assert paths[0][0].startswith(f"M{x4:.1f} {y4:.1f}L{x64:.1f} ")
    assert [dashes for _, dashes, _ in paths] == [None, "5 3", None, None]
    assert paths[0][2] == paths[1][2] != paths[2][2] and height > 100
    assert "grpo tools off (dashed)" in texts(browser, ".card.cost .legend span")
    labels = texts(browser, ".card.cost svg text")
    assert labels.count("4") >= 4 and labels.count("64") >= 2 and "200" in labels


def test_filters_and_keys_move_through_the_episodes(visit, page):
    browser, data = visit(page, "episodes"), data_of(page)
    assert f"{len(data['episodes'])} episodes" in texts(browser, "#matching")[0]
    assert len(texts(browser, ".row")) == len(data["episodes"])
    choose(browser, "source", "2")
    assert texts(browser, "#matching")[0].startswith("6 episodes")
    choose(browser, "tools", "off")
    assert texts(browser, "#matching")[0].startswith("3 episodes")
    for name in ("source", "tools"):
        choose(browser, name, "")
    choose(browser, "step", "2")
    assert texts(browser, "#matching")[0].startswith("6 episodes")
    choose(browser, "step", "")
    choose(browser, "text", data["episodes"][-1]["id"])
    assert all(data["episodes"][-1]["id"] in row for row in texts(browser, ".row"))
    choose(browser, "text", "")
    choose(browser, "sort", "total -1")
    rewards = [e["reward"]["total"] for e in data["episodes"]]
    assert f"R {max(rewards):.2f}" in texts(browser, ".row")[0]
    choose(browser, "sort", "")

    def current():
        return browser.execute_script("return +document.querySelector('.row.on').dataset.n")

    browser.execute_script("document.activeElement.blur()")
    start = current()
    press(browser, "j")
    press(browser, "j")
    press(browser, "k")
    assert current() == start + 1
    press(browser, "w")
    assert texts(browser, ".row.on")[0].startswith("✗") and current() != start + 1
    press(browser, "3")
    assert browser.execute_script("return !document.getElementById('tab-tables').hidden")


def test_each_episode_has_a_link_that_opens_it(visit, browser, made):
    """The same one after the page was made anew from more records."""
    records = [episode(f"task {n}/é", s, n) for n in range(40) for s in range(2)]
    page = made(records[20:])
    links = [e["link"] for e in data_of(page)["episodes"]]
    assert len(set(links)) == len(links) == 60
    link = "r.jsonl/step31/task%2030/%C3%A9/K4/1"
    assert link in links
    visit(page, link)
    for _ in range(2):
        assert texts(browser, "#one h3")[0].startswith("task 30/é")
        assert "step 31" in texts(browser, "#one h3")[0]
        assert "sample 1" in texts(browser, "#one h3")[0]
        assert len(texts(browser, ".row.on")) == 1  # in view, in the list
        links = browser.execute_script(
            "return [...document.querySelectorAll('#one h3 a, .row.on a')].map(a => a.hash)")
        assert links.count("#" + link) == 3 and len(links) == 4  # its own, its row's, its group's
        visit(made(records), link)
    address = "return decodeURI(location.hash)"
    assert browser.execute_script(address) == "#r.jsonl/step31/task 30/é/K4/1"
    choose(browser, "text", "task 7/")
    assert browser.execute_script(address) == "#r.jsonl/step8/task 7/é/K4/0"
    browser.execute_script("location.hash = arguments[0]", link)  # which the filter hides
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert texts(browser, "#matching")[0].startswith("80 episodes")
    assert "step 31" in texts(browser, "#one h3")[0]
    press(browser, "k")
    assert browser.execute_script(address) == "#r.jsonl/step31/task 30/é/K4/0"
    browser.execute_script("document.querySelectorAll('.group .card a')[1].click()")
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    assert "sample 1" in texts(browser, "#one h3")[0]
    press(browser, "j")
    wanted = browser.execute_script("""
        const link = document.querySelector(".row a");
        link.click();
        return link.hash;
    """)
    browser.execute_async_script("setTimeout(arguments[0], 50)")
    opened = browser.execute_script(
        "return [location.hash, document.querySelector('#one h3 a').hash]")
    assert opened == [wanted, wanted] and wanted != "#" + link


def test_a_link_to_no_episode_says_so(visit, made):
    for hash in ("r.jsonl/step9/none/K4/0", "%", "r/%E9"):
        browser = visit(made([episode()]), hash)
        assert texts(browser, "#one h3")[0].startswith("t0")
        assert ("not on this page" in texts(browser, "#counts")[0]) == ("/" in hash)


def test_troubles_and_calls_are_filtered(visit, made):
    call = {**episode()["calls"][0], "status": "reversed"}
    browser = visit(made([
        episode(), episode(sample=1, calls=[call]), episode(sample=2, finish=["stop", "length"]),
        episode(sample=3, status="video_error", calls=[])]), "episodes")
    for name, value, samples in (
            ("trouble", "call: reversed", "1"), ("trouble", "cut off", "2"),
            ("trouble", "video_error", "3"), ("called", "1", "02"), ("called", "0", "13")):
        choose(browser, name, value)
        rows = texts(browser, ".row")
        assert [re.search(r"#(\d)", row)[1] for row in rows] == list(samples), value
        choose(browser, name, "")


def test_an_episode_shows_its_frames_its_group_and_who_wrote_what(visit, page):
    browser, data = visit(page, "episodes"), data_of(page)
    first = data["episodes"][0]
    loaded = browser.execute_script("""
        const images = [...document.querySelectorAll("#one .frames img")];
        return images.slice(0, 4).map(image => image.naturalWidth);
    """)
    assert loaded == [32] * min(4, len(first["thumbs"]))
    assert len(texts(browser, "#one .time i")) == len(first["times"])
    assert len(texts(browser, ".group .card")) == 3
    assert texts(browser, "#one .turn .i")[0] == "<think>\n"
    assert first["question"] in texts(browser, "#one p")[0]
    browser.execute_script("document.querySelectorAll('.group .card')[2].click()")
    assert "sample 2" in texts(browser, "#one h3")[0]


def test_credit_is_coloured_by_its_sign(visit, made):
    browser = visit(made([
        episode(advantage={"task": 0.5, "fmt": 0.25}),
        episode(sample=1, advantage={"task": -0.5, "fmt": -0.25})]), "episodes")
    for key, sign in (("k", "good"), ("j", "bad")):
        press(browser, key)
        styles = browser.execute_script("""
            const tags = [...document.querySelectorAll("#one > .card > .turn .t")];
            return tags.map(tag => tag.getAttribute("style"));
        """)
        assert len(styles) >= 5 and all(f"--{sign}" in style for style in styles)
    title = browser.execute_script("return document.querySelector('#one .turn .t').title")
    assert "credit -0.75" in title


def test_both_themes_are_readable(visit, page):
    """Ink on card: a contrast of 7 to 1 and more in both."""
    def luminance(rgb):
        parts = [int(c) / 255 for c in re.findall(r"\d+", rgb)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))

    browser = visit(page)
    found = {}
    for _ in range(2):
        theme = browser.execute_script("return document.documentElement.dataset.theme")
        ink, card = browser.execute_script("""
            const style = getComputedStyle(document.querySelector(".card"));
            return [style.color, style.backgroundColor];
        """)
        high, low = sorted((luminance(ink), luminance(card)), reverse=True)
        found[theme] = (high + 0.05) / (low + 0.05)
        press(browser, "t")
    assert set(found) == {"light", "dark"} and min(found.values()) > 7


def test_nothing_hostile_runs_or_breaks_the_page(visit, made, tmp_path):
    """Every text of a record tries to be markup; names of runs and of K too."""
    evil = {**episode(EVIL, turns=(EVIL + "</think>" + EVIL, EVIL)),
            **dict.fromkeys(("K", "status", "error", "group", "tools"), EVIL),
            "finish": [EVIL, EVIL]}
    evil["task"] = {**evil["task"], "options": [EVIL] * 30,
                    **dict.fromkeys(("question", "answer", "type", "video"), EVIL)}
    evil["calls"] = [
        {"turn": 0, "start": 1e308, "end": -1e308, "status": EVIL, "summary": EVIL},
        {"turn": 1, "start": None, "end": None, "status": EVIL, "summary": None}]
    browser = visit(made([evil, {**evil, "sample": 1}, *DAMAGED, episode()]), "episodes")
    press(browser, "j")  # it sorts after the good one
    assert texts(browser, "#one .turn .s")[0].startswith("</script><script>")
    assert len(texts(browser, ".row")) == 3
    for key in "jjkw123t":
        press(browser, key)
    (tmp_path / "summary.json").write_text(json.dumps({
        "rows": [{"name": EVIL, "bench": EVIL, "K": EVIL, "n": EVIL, "interval": []}],
        "results": [{"bench": EVIL, EVIL: EVIL}, EVIL],
        "costs": [spent(EVIL, EVIL, n, n, name=EVIL, bench=EVIL, cost=EVIL) for n in (1, 2)],
        "differences": [{"name": EVIL, "minus": EVIL}]}))
    (tmp_path / "log.jsonl").write_text(
        json.dumps({"step": 1, "total": 1, "by_K": {EVIL: {"acc": 1}}}) + "\n")
    view.build([str(tmp_path)], [EVIL], str(tmp_path / "evil.html"), 10, 20.0, None, 6144)
    browser = visit(tmp_path / "evil.html", "tables")
    assert EVIL[:20] in "".join(texts(browser, "td"))


def test_thousands_of_episodes_make_few_nodes(visit, made):
    records = [episode(f"task-{n}", s, n) for n in range(500) for s in range(4)]
    browser = visit(made(records), "episodes")
    assert texts(browser, "#matching")[0].startswith("2000 episodes")
    browser.execute_script("document.getElementById('list').scrollTop = 28 * 1500")
    browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    rows = texts(browser, ".row")
    assert len(rows) < 60 and any("task-375" in row for row in rows)


def test_on_a_phone_nothing_is_wider_than_the_screen(page, browser):
    # Windows of this browser get no narrower than 500 pixels: a phone is emulated.
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        for tab in ("curves", "episodes", "tables"):
            browser.get("about:blank")
            browser.get(f"file://{page}#{tab}")
            client, scroll = browser.execute_script("""
                const root = document.documentElement;
                return [root.clientWidth, root.scrollWidth];
            """)
            assert client == 390 and scroll <= client, tab
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_empty_page_says_so_without_an_error(visit, made):
    browser = visit(made(["{}"]), "episodes")
    assert "records that are not episodes" in texts(browser, "#troubles")[0]


# ------------------------------------------------------------------------------------------------


def take_pictures(page, folder):
    """The two pictures in docs/: curves in the light theme, an episode in the dark one."""
    from PIL import Image

    browser = start_browser(1200, 760)
    for tab, dark in (("curves", False), ("episodes", True)):
        browser.get("about:blank")
        browser.get(f"file://{os.path.abspath(page)}#{tab}")
        browser.execute_script("theme(arguments[0])", dark)
        if tab == "episodes":  # the last correct rollout with two calls and some credit
            for name, value in (("called", "1"), ("right", "1"), ("source", "0"), ("K", "8")):
                choose(browser, name, value)
            browser.execute_script("""
                select(shown.findLastIndex(n => data.episodes[n].calls.length > 1
                                           && data.episodes[n].advantage.task > 0))""")
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        # 128 colours keep the file small.
        picture.quantize(128).save(os.path.join(folder, f"page-{tab}.png"), optimize=True)
    browser.quit()


if __name__ == "__main__":
    launch.run_main(lambda: take_pictures(*sys.argv[1:]))
