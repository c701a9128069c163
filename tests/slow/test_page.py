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
    draft.write_page(str(tmp_path / "page.html"), rows)
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
