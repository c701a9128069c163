"""
Tests of the page of tools/serve.py in a browser: python -m pytest tests/slow/test_serve_page.py
`make test-page` installs the browser.
"""
import pytest
from scripted import Scripted, calls, turn_of
from slow.test_page import EVIL, browser  # noqa: F401  (a fixture)
from slow.test_serve import FILM, QUESTION, running  # noqa: F401  (a fixture)


@pytest.fixture
def visit(browser):  # noqa: F811
    """visit(server, fragment) opens the page -> the browser."""
    def visit(server, fragment=""):
        browser.get("about:blank")
        browser.get(server.url + "/" + fragment)
        server.until(lambda: browser.execute_script("return document.getElementById('video')"
            ".options.length > 1 || !document.getElementById('locked').hidden"))
        return browser

    yield visit
    # What the server refused is of the network; an error of the page is of the script.
    assert not [entry for entry in browser.get_log("browser")
                if entry["level"] == "SEVERE" and entry["source"] != "network"]


def ask(page, question=QUESTION, film=FILM):
    page.execute_script("document.getElementById('video').value = arguments[0];"
                        "document.getElementById('video').onchange();"
                        "document.getElementById('question').value = arguments[1];"
                        "document.getElementById('form').requestSubmit();", film, question)


def text_of(page, name):
    return page.execute_script(f"return document.getElementById('{name}').innerText")


def count(page, selector):
    return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def test_a_question_shows_windows_summaries_and_the_answer(running, visit):  # noqa: F811
    server = running()
    page = visit(server)
    ask(page)
    server.until(lambda: text_of(page, "answer").startswith("red"))
    assert "answer: 4 frames, 2 windows" in text_of(page, "state")
    page.execute_script("document.querySelector('#examples button:last-child').click()")
    assert page.execute_script("return document.getElementById('question').value"
                               ).startswith("Which colours flash")
    assert count(page, ".time button.ok") == 2 and count(page, ".time i") == 4
    # Each window's card has its number, the times of its frames and its summary.
    cards = page.execute_script(
        "return [...document.querySelectorAll('.windows .card')].map(card => [card.innerText,"
        "card.querySelectorAll('.frames button').length])")
    assert [said.split()[0] for said, _ in cards] == ["1", "2"]
    assert all("a red square" in said and frames == 8 for said, frames in cards)
    # The address opens the episode again.
    link = page.execute_script("return location.hash")
    assert link.startswith("#chatcmpl-") and count(page, "#history a") == 1
    page = visit(server, link)
    server.until(lambda: text_of(page, "answer").startswith("red"))
    assert count(page, ".time button.ok") == 2
    assert page.execute_script("return document.getElementById('question').value") == QUESTION


def test_hostile_texts_stay_text(running, visit, codec):  # noqa: F811
    def main(request):
        if turn_of(request) == 0:
            return EVIL + calls((0, 8))
        return f"</think><answer>{EVIL}</answer>"

    server = running(Scripted(codec, main, sub=EVIL))
    page = visit(server)
    ask(page, EVIL)
    server.until(lambda: "onerror" in text_of(page, "answer"))
    assert page.execute_script("return window.hacked === undefined")
    assert count(page, "#story script") == count(page, "#story svg") == 0
