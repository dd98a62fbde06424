"""The page in a real browser: it chats and continues text, by keyboard, under its policy."""

import pytest

from tests.browser import Browser, needs_chromium
from tests.decode.small_server import running
from tests.decode.test_server_limits import KEYS
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs_chromium]

READY = "!document.querySelector('footer').hidden"
DONE = "document.getElementById('stop').hidden && document.querySelector('article:last-child .text')?.textContent"
LAST = "document.querySelector('article:last-child .text').textContent"
MARKUP = "<img src=x onerror='document.title = 1'><b>bold</b>"


@pytest.fixture
def browser():
    with Browser() as browser:
        yield browser


def set_to(browser, **values):
    for name, value in values.items():
        browser.value(f"document.getElementById('{name}').value = '{value}'")


def test_a_chat_by_keyboard_shows_what_the_server_answers(browser):
    with running(slots=1) as server:
        browser.open(server.url)
        browser.until(READY)
        assert browser.value("document.title") == "small – shoestring"
        set_to(browser, seed=3, max_tokens=20, temperature=0.8, top_p=0.95, system="Be brief.")
        talk = [{"role": "system", "content": "Be brief."}]
        for question in (MARKUP, "and then?"):
            browser.write(question)
            browser.press("Enter")
            browser.until(DONE)
            talk.append({"role": "user", "content": question})
            asked = {"messages": talk, "seed": 3, "max_tokens": 20, "temperature": 0.8, "top_p": 0.95}
            answer = server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
            assert browser.value(LAST) == answer["content"]
            talk.append({"role": "assistant", "content": answer["content"]})
        assert browser.value("document.querySelector('article.user .text').textContent") == MARKUP
        assert browser.value("document.querySelectorAll('main img, main b').length") == 0
        assert "20 tokens" in browser.value("document.getElementById('numbers').textContent")
        assert browser.value("document.activeElement.id") == "prompt"
        assert browser.problems == []


def test_text_is_continued_and_shows_what_was_drafted(browser):
    with running(slots=1, template=None, draft_length=3) as server:
        browser.open(server.url)
        browser.until(READY)
        set_to(browser, max_tokens=40, temperature=0, top_p=1)
        browser.write("the the the the")
        browser.press("Enter")
        browser.until(DONE)
        shown = "[...document.querySelectorAll('.text > span')].map((one) => one.textContent).join('')"
        wanted = server.generated("the the the the", 40, temperature=0.0)
        assert browser.value(shown) == "the the the the" + wanted
        accepted = browser.value(
            "[...document.querySelectorAll('.text > .accepted')].map((one) => one.textContent).join('')"
        )
        assert accepted
        assert browser.value("document.querySelectorAll('.text > del').length") > 0
        assert "drafted tokens accepted" in browser.value("document.getElementById('numbers').textContent")
        assert not browser.value("document.getElementById('legend').hidden")
        browser.value("document.getElementById('more').click()")
        browser.until(f"{DONE} && !document.getElementById('more').hidden")
        assert len(browser.value(shown)) > len("the the the the" + wanted)
        browser.value("document.getElementById('clear').click()")
        assert browser.value("document.getElementById('log').childElementCount") == 0
        assert browser.problems == []


def test_escape_frees_the_slot_and_errors_are_shown(browser):
    with running(slots=1, context=30000, endless=True) as server:
        browser.open(server.url)
        browser.until(READY)
        set_to(browser, max_tokens=20000)
        browser.write("a")
        browser.press("Enter")
        browser.until("document.querySelector('article.assistant .text')?.textContent.length > 5")
        browser.press("Escape")
        browser.until("document.getElementById('numbers').textContent === 'Stopped.'")
        until(lambda: server.app.worker.unfinished == 0)
        set_to(browser, max_tokens=99999)
        browser.write("b")
        browser.press("Enter")
        browser.until("document.querySelector('article.failed')")
        assert "max_tokens" in browser.value(LAST)


def test_a_key_is_asked_for_where_one_is_needed(browser):
    with running(slots=1, api_keys=KEYS) as server:
        browser.open(server.url)
        browser.until("!document.getElementById('access').hidden")
        browser.write("wrong")
        browser.press("Enter")
        browser.until("document.getElementById('denied').textContent")
        set_to(browser, key="")
        browser.write(KEYS[1])
        browser.press("Enter")
        browser.until(READY)
        assert browser.value("document.getElementById('name').textContent") == "small"
