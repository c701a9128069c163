"""
Tests of the page of tools/serve.py in a browser: python -m pytest tests/slow/test_serve_page.py
`make test-page` installs the browser.
"""
import threading
import time

import pytest
import uvicorn
from scripted import Scripted, calls, turn_of
from slow.test_page import EVIL, browser  # noqa: F401  (a fixture)
from test_serve import QUESTION, VIDEO, agent_of

from tools import serve


class Running:
    """The application on a free port of this machine."""

    def __init__(self, agent):
        config = uvicorn.Config(serve.make_app(agent), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def until(self, holds, seconds=30):
        """Waits until holds() is true."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)


@pytest.fixture
def running(codec, toy, tmp_path):
    started = []

    def start(engine=None):
        agent, _ = agent_of(codec, toy, tmp_path, engine)
        started.append(Running(agent))
        return started[-1]

    yield start
    for server in started:
        server.server.should_exit = True
        server.thread.join()


@pytest.fixture
def visit(browser):  # noqa: F811
    """visit(server, fragment) opens the page -> the browser."""
    def visit(server):
        browser.get("about:blank")
        browser.get(server.url + "/")
        server.until(lambda: browser.execute_script("return document.getElementById('video')"
            ".options.length > 1 || !document.getElementById('locked').hidden"))
        return browser

    yield visit
    # What the server refused is of the network; an error of the page is of the script.
    assert not [entry for entry in browser.get_log("browser")
                if entry["level"] == "SEVERE" and entry["source"] != "network"]


def ask(page, question=QUESTION, path=VIDEO):
    page.execute_script("document.getElementById('video').value = arguments[0];"
                        "document.getElementById('video').onchange();"
                        "document.getElementById('question').value = arguments[1];"
                        "document.getElementById('form').requestSubmit();", path, question)


def text_of(page, name):
    return page.execute_script(f"return document.getElementById('{name}').innerText")


def count(page, selector):
    return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def test_a_question_shows_windows_summaries_and_the_answer(running, visit):
    server = running()
    page = visit(server)
    ask(page)
    server.until(lambda: text_of(page, "answer").startswith("red"))
    assert "answer: 8 frames, 2 windows" in text_of(page, "state")
    assert count(page, ".line button.ok") == 2 and count(page, ".line i") == 8
    # Each call has its number, its summary and the times of its frames.
    assert count(page, ".call") == 2 and count(page, ".call .frames button") == 16
    assert "a red square" in text_of(page, "story")


def test_hostile_texts_stay_text(running, visit, codec):
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
