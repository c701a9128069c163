"""
Tests of the pages of tools/view.py and tools/draft.py: python -m pytest tests/slow/test_page.py -q
`make test-page` installs the browser.
"""
import json
import shutil
import sys

import pytest
from conftest import ROOT
from test_view import EVIL as MARKUP
from test_view import episode

sys.path.insert(0, ROOT)
from tools import draft, view

EVIL = MARKUP + "<svg onload=window.hacked=1>&lt;\u2028\x00"


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no chromium and chromedriver: `make test-page` installs them")
    options, options.binary_location = webdriver.ChromeOptions(), shutil.which("chromium")
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
                 "disable-background-networking", "disable-component-update", "disable-sync",
                 "disable-dev-shm-usage", "hide-scrollbars", "window-size=1280,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.chrome.service.Service(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
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


<<<<<<< HEAD
=======
@pytest.fixture(scope="module")
def small_run(toy, tmp_path_factory):
    """Folder with a run of grpo.py, of sft.py and an evaluation, all of two steps or tasks."""
    out, start = tmp_path_factory.mktemp("runs"), ("--preset", "toy", "--ckpt", toy / "init")
    agent = ("--max-new-tokens", 40, "--set", "sub_max_new_tokens=6")
    sft = ("--data", toy / "sft.jsonl", "--steps", 3, "--batch-size", 4)
    grpo = ("--data", toy / "rl.jsonl", "--steps", 3, "--prompts", 2, "--num-generations", 3,
            *agent)
    evaluation = ("--data", toy / "eval.jsonl", "--frames", 4, "--tools", "on", "off",
                  "--limit", 3, *agent)
    for name, words in (("sft", sft), ("grpo", grpo), ("eval", evaluation)):
        done = run_script(f"{name}.py", *start, *words, "--out", out / name, reference=True)
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def page(small_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    view.build_page([str(small_run)], None, str(path), 2000, 20.0, None, 6144)
    return path


def data_of(path):
    """What a page embeds."""
    element = r'<script id="data" type="application/json">(.*?)</script>'
    return json.loads(re.search(element, path.read_text(), re.DOTALL)[1])


TURNS = ("I look.\n</think>\n<tool_call>\n{\"name\": \"crop_video\"}\n</tool_call>",
         "So.\n</think>\n<answer>red</answer>")


def episode(task="t0", sample=0, step=0, turns=TURNS, **more):
    """A record as rollout.py writes it, without ids."""
    return {"task": {"id": task, "video": "videos/none.mp4", "question": "Which?", "options": None,
        "answer": "red", "type": "open"}, "group": f"{step}/{task}", "sample": sample, "K": 4,
        "policy_step": step, "status": "ok", "error": None, "vision": [{"seconds": [8.0, 24.0, 40.0,
        56.0]}], "think_open": True, "turns": list(turns), "pieces": [[*t, ""] for t in turns],
        "finish": ["stop"] * len(turns), "calls": [{"turn": 0, "start": 8.0, "end": 16.0,
        "status": "ok", "summary": "a red square", "seconds": 0.1, "frames_seen": 8}],
        "reward": {"total": 2.8, "acc": 1.0, "fmt": 1.0, "tool": 0.8}, "advantage": {"task": 0.5,
        "fmt": 0.25}, "timing": {"video_s": 64.0}, **more}


@pytest.fixture
def made(tmp_path):
    """made(records) -> page of a rollout JSONL that holds them."""
    def made(records, **options):
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        (tmp_path / "r.jsonl").write_text("".join(line + "\n" for line in lines))
        page = tmp_path / "page.html"
        options = {"episodes": 2000, "max_mb": 20.0, "root": None, "pixels": 6144, **options}
        view.build_page([str(tmp_path / "r.jsonl")], None, str(page), **options)
        return page

    return made


# ------------------------------------------------------------------------------------------------
# What is put on the page


def test_a_run_an_evaluation_and_their_frames_are_on_the_page(page, small_run):
    data = data_of(page)
    names = [(s["name"], s["kind"]) for s in data["sources"]]
    assert names == [("sft", "run"), ("grpo", "run"), ("eval", "eval")]
    titles = {c["title"] for c in data["curves"]}
    assert {"Reward", "f_tau", "kappa", "Closure of think", "Accuracy by K",
            "Gradient norm", "Phase times", "Loss"} <= titles
    log = (small_run / "grpo" / "log.jsonl").read_text().splitlines()
    reward = next(c for c in data["curves"] if c["title"] == "Reward")
    drawn = [p[1] for p in reward["series"][0]["points"]]
    assert drawn == pytest.approx([json.loads(line)["total"] for line in log])
    assert len(data["episodes"]) == data["found"] == 3 * 6 + 6
    first = data["episodes"][0]
    assert len(first["times"]) == int(first["K"]) == 4 or len(first["times"]) > 4
    jpegs = [base64.b64decode(data["pictures"][i]) for _, i in first["thumbs"]]
    assert {Image.open(io.BytesIO(jpeg)).size for jpeg in jpegs} == {(32, 32)}
    assert len(first["thumbs"]) == min(8, len(first["times"]))
    assert first["evidence"] and all(a < b for a, b in first["evidence"])  # seconds
    assert any(t["title"] == "eval" and len(t["rows"]) == 2 for t in data["tables"])
    assert not data["troubles"]


def test_a_window_shows_the_frames_that_its_sub_agent_saw(made, tmp_path):
    """A film of 30 frames a second, in which each frame has a grey of its own."""
    greys = 20 + np.arange(600) * 37 % 200
    toy.write_video(tmp_path / "film.mp4", np.broadcast_to(
        greys[:, None, None, None], (600, 32, 32, 3)).astype(np.uint8), fps=30)
    seen = video.crop(str(tmp_path / "film.mp4"), 4.01, 19.77)
    seconds = [float(second) for second in seen.seconds]  # 4.0 4.9 5.9 ..: thirtieths
    assert len(seconds) == 16
    in_sub = {"sub": {"vision": [{"seconds": seconds}]}}
    in_main = {"seconds_seen": [round(second, 3) for second in seconds]}
    for times in (in_sub, in_main, {"sub_seconds": in_main["seconds_seen"]}):
        row = episode()
        row["task"]["video"] = "film.mp4"
        window = {"start": 4.01, "end": 19.77, "frames_seen": 16}
        row["calls"] = [{**row["calls"][0], **window, **times}]
        data = data_of(made([row]))
        (call,) = data["episodes"][0]["calls"]
        places = [min(range(16), key=lambda n: abs(seconds[n] - second))
                  for second, _ in call["thumbs"]]
        assert len(set(places)) == 4
        for place, (second, picture) in zip(places, call["thumbs"]):
            assert second == pytest.approx(seconds[place], abs=0.0006)
            jpeg = base64.b64decode(data["pictures"][picture])
            grey = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")).mean()
            assert abs(grey - seen.images[place].mean()) < 3  # neighbours differ by 37


def test_no_p_is_zero_and_frames_are_whole():
    assert view.cell(0.0, name="p") == "< 0.001" and view.cell(0.25, name="p_holm") == "0.250"
    assert view.cell(12.0, name="frames") == "12" and view.cell(12.0, name="kappa") == "12.000"


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


DAMAGED = ["{", "[]", "null", "{}", '{"task": 3}', '{"a":' * 3000 + "1" + "}" * 3000,
           *({**episode(), **bad} for bad in (
               {"turns": None}, {"turns": 7}, {"vision": [{}]}, {"calls": [3]},
               {"calls": [{"turn": "x"}]}, {"sample": math.inf}, {"task": {"id": "only"}}))]


def test_damaged_records_are_counted_and_the_others_shown(made):
    odd = {**episode(sample=1), "reward": {"total": math.nan, "acc": math.inf, "fmt": 10**400}}
    data = data_of(made([episode(), *DAMAGED, odd]))
    assert [e["sample"] for e in data["episodes"]] == [0, 1]
    assert data["episodes"][1]["reward"] == dict.fromkeys(("total", "acc", "fmt", "tool"))
    counts = [count for why, count in data["troubles"] if "none.mp4" not in why]
    assert sum(counts) == len(DAMAGED)


@pytest.mark.parametrize("flags, why", [
    (["/no/such"], "no such file"), (["{tmp}"], "neither log.jsonl"),
    (["{tmp}", "--names", "a", "b"], "--names"), (["{tmp}", "--max-mb", "0"], "--max-mb")])
def test_bad_input_is_one_line(tmp_path, flags, why):
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    done = run_script("tools/view.py", *flags, "--out", tmp_path / "page.html")
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_command_line(small_run, tmp_path):
    done = run_script("tools/view.py", small_run / "grpo", small_run / "eval", "--names", "a", "b",
                      "--out", tmp_path / "page.html", "--episodes", 8, "--thumb-pixels", 2048)
    assert done.returncode == 0, done.stderr
    assert re.search(r"page.html: \d\.\d MiB, \d+ of 24 episodes, \d+ thumbnails", done.stdout)
    assert {s["name"] for s in data_of(tmp_path / "page.html")["sources"]} == {"a", "b"}


# ------------------------------------------------------------------------------------------------
# In a browser


>>>>>>> 1a51885 (grpo.py in one reading order; --rollouts trains on recorded episodes in the place of tools/replay.py)
def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return browser.execute_script(script, selector)


def test_nothing_hostile_runs_or_breaks_the_page(visit, tmp_path):
    """Every text of a record tries to be markup."""
    row = episode(turns=[EVIL + "</think>" + EVIL] * 2, finish=[EVIL] * 2, status=EVIL, error=EVIL)
    row["task"].update(dict.fromkeys(("question", "answer", "video"), EVIL), options=[EVIL] * 30)
    row["calls"][0].update(summary=EVIL, status=EVIL)
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "page.html").write_text(view.build_page([str(tmp_path / "r.jsonl")])[0])
    browser = visit(tmp_path / "page.html")
    assert texts(browser, "pre span")[1].startswith("</script><script>")
    assert len(texts(browser, "details")) == 2
    # On a phone nothing but tables may be wider than the screen.
    browser.set_window_size(420, 900)
    for part in browser.find_elements("tag name", "details"):
        browser.execute_script("arguments[0].open = true", part)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    browser.set_window_size(1280, 900)


def test_drafts_are_shown_edited_and_saved(visit, toy, tmp_path):
    """The page of tools/draft.py."""
    task = {"id": "a", "video": "a.mp4", "question": EVIL, "options": ["red", "blue"],
            "answer": "B", "type": "mcq", "evidence": [[3, 9]]}
    rows = [{"id": str(n), "task": task, "left_out": reason, "blind": "A", "seen": "B"}
            for n, reason in enumerate((None, "right without the video"))]
    draft.write_page(str(tmp_path / "page.html"), str(tmp_path), rows)
    shutil.copy(toy / "videos" / "rl-0000.mp4", tmp_path / "a.mp4")
    page = visit(tmp_path / "page.html", "")
    assert texts(page, "#count") == ["1 of 2 kept"]
    cards = page.find_elements("tag name", "article")
    assert [card.is_displayed() for card in cards] == [True, False]
    page.execute_script("""
        document.querySelector("textarea").value = "Edited?";
        document.querySelectorAll("[type=checkbox]")[2].click();
        document.querySelectorAll("[type=text]")[1].value = " ";
        URL.createObjectURL = blob => { window.saved = blob; return "#"; };
        document.getElementById("save").click();""")
    saved = page.execute_script("return window.saved.text()")
    assert [json.loads(line) for line in saved.splitlines()] == [{**task, "question": "Edited?"}]
    assert "1 saved; not saved, without a question or an answer: a;" in texts(page, "#count")[0]
