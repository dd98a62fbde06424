"""Pages open from the browser's stores, and nothing private stays there: in a browser, as people click."""

import json
import re
import zlib

import pytest

from shoestring_hub.client.push import push
from tests.browser import needs_chromium
from tests.hub.test_pages_in_browser import opened, signed_in
from tests.rigs.hub.folders import write_run
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor, add_person
from tests.waiting import until

pytestmark = needs_chromium
STORED = """caches.keys().then(async (names) => {
  const pagesOf = async (name) => (await (await caches.open(name)).keys()).map((page) => new URL(page.url).pathname);
  return (await Promise.all(names.map(pagesOf))).flat();
})"""
TELL = """new Promise((resolve) => {
  navigator.serviceWorker.addEventListener("message", ({ data }) => resolve(data.bytes), { once: true });
  navigator.serviceWorker.controller.postMessage({ address: "ADDRESS", limit: LIMIT });
})"""
OPENED = "performance.getEntriesByType('navigation')[0]"
FIRST = "tbody th a"  # the link to the run at the top of a table


@pytest.fixture
def reader(server, ada, project, tmp_path):
    """A person who may read a project of two runs."""
    for number in range(2):
        push(write_run(tmp_path / f"{number}", steps=60, seed=number, files=0))
    name = f"reader-{project}"
    grace = Visitor(server.port)
    grace.send(ada.invite(project, 1), username=name, password1="of a reader 77", password2="of a reader 77")
    return grace


@pytest.fixture
def browser(reader, server, project):
    """The reader's browser at the table of the project, which the worker has opened."""
    with signed_in(reader) as browser:
        opened(browser, f"{server.address}/{project}/")
        browser.value("navigator.serviceWorker.ready.then(() => true)")
        opened(browser, f"{server.address}/{project}/")
        assert browser.value("navigator.serviceWorker.controller !== null")
        yield browser


def hover(browser, selector):
    """Rest on a link until its page has been fetched ahead."""
    browser.mouse("mouseMoved", *browser.point(selector))
    address = browser.value(f"new URL(document.querySelector('{selector}').href).pathname")
    until(lambda: address in browser.value(STORED))
    return address


def remove(owner, project, name):
    """Take a person out of a project."""
    page = owner.get(f"/{project}/people").text
    form = re.search(rf'(?s)<b>{name}</b>.*?action="([^"]+)"', page)
    assert f"<b>{name}</b>" not in owner.post(form[1], role="").text


@pytest.mark.slow
def test_the_worker_opens_the_same_pages_under_the_same_policy_and_their_forms_are_accepted(browser, server, project):
    read = """fetch(location.href).then((answer) => answer.text()).then((text) => {
      const page = new DOMParser().parseFromString(text, "text/html");
      return page.querySelector("h1").outerHTML + page.title;
    })"""
    for path in (f"/{project}/", f"/{project}/runs/1", "/", f"/{project}/runs/1", f"/{project}/compare?run=1&run=2"):
        opened(browser, server.address + path)
        assert browser.value(f"{OPENED}.workerStart > 0"), path
        assert browser.value("document.querySelector('h1').outerHTML + document.title") == browser.value(read)
    assert browser.value("data.runs.length === 2 && charts.length > 0")
    inline = "const inline = document.createElement('script'); inline.textContent = 'window.ran = 1'"
    browser.value(f"{{ {inline}; document.body.append(inline); }}")
    assert browser.value("window.ran === undefined")  # the policy forbids it
    for address, limit in (("/account", 100), ("/account", 100_000), (f"/{project}/runs.csv", 100_000)):
        took = browser.value(TELL.replace("ADDRESS", server.address + address).replace("LIMIT", str(limit)))
        assert took <= max(limit, 1500)  # headers are counted as 1500 bytes
        if address == "/account" and limit > 1500:
            until(lambda: "/account" in browser.value(STORED))
        else:
            assert address not in browser.value(STORED)
    opened(browser, f"{server.address}/{project}/tokens")
    browser.value("document.getElementById('id_machine').value = 'laptop'")
    browser.click("main .card button")
    browser.until("document.querySelector('.secret')")
    assert [one["exceptionDetails"] for one in browser.problems if "exceptionDetails" in one] == []


@pytest.mark.slow
def test_a_page_that_was_fetched_ahead_is_not_shown_after_the_role_is_lost(browser, ada, project):
    address = hover(browser, FIRST)
    remove(ada, project, f"reader-{project}")
    browser.click(FIRST)
    browser.until(f"location.pathname === '{address}' && document.title.startsWith('Not found')")
    assert browser.value("document.body.innerText.includes('small')") is False
    until(lambda: browser.value(STORED) == [])


@pytest.mark.slow
def test_pressing_asks_again_while_the_answer_to_a_hover_is_on_its_way(browser):
    # The worker is never told, so that its answer stays on its way
    browser.value("{ window.told = []; navigator.serviceWorker.controller.postMessage = (one) => told.push(one); }")
    x, y = browser.point(FIRST)
    for _ in range(2):
        browser.mouse("mouseMoved", 1, 1)
        browser.mouse("mouseMoved", x, y)
    until(lambda: browser.value("told.length") == 1)
    browser.mouse("mousePressed", x, y)
    until(lambda: browser.value("told.length") == 2)
    assert browser.value("told[0].address === told[1].address && told.every(({ limit }) => limit > 0)")


def forged(line):
    """Another line with the same CRC-32, by solving for the letters of a text."""
    texts = ["a" * 40] + ["a" * at + "b" + "a" * (39 - at) for at in range(40)]
    plain, *sums = (zlib.crc32(f'["{text}"]'.encode()) for text in texts)
    basis = {}  # by the highest bit: a sum, and the letters that make it
    for at, one in enumerate(sums):
        value, letters = one ^ plain, 1 << at
        while value and (row := basis.get(value.bit_length())):
            value, letters = value ^ row[0], letters ^ row[1]
        if value:
            basis[value.bit_length()] = value, letters
    value, chosen = zlib.crc32(line.encode()) ^ plain, 0
    while value:
        row = basis[value.bit_length()]
        value, chosen = value ^ row[0], chosen ^ row[1]
    return '["' + "".join("b" if chosen >> at & 1 else "a" for at in range(40)) + '"]'


@pytest.mark.slow
def test_a_stored_line_that_only_seems_to_be_the_right_one_is_not_shown(browser, server):
    opened(browser, f"{server.address}/account")
    until(lambda: "/account" in browser.value(STORED))
    store = "caches.keys().then(([name]) => caches.open(name)).then(async (store) => {{ {} }})"
    lines = browser.value(store.format("return (await store.match('/account')).text();")).split("\n")
    for at, line in enumerate(lines):
        lines[at] = forged(line)
        assert zlib.crc32(lines[at].encode()) == zlib.crc32(line.encode())
    text = json.dumps("\n".join(lines))
    browser.value(
        store.format(f"await store.put('/account', new Response({text}, {{ headers: {{ ETag: '\"x\"' }} }}));")
    )
    opened(browser, f"{server.address}/account")
    assert browser.value("document.querySelector('h1').innerText").startswith("reader-")
    assert "aab" not in browser.value("document.documentElement.outerHTML")


@pytest.mark.slow
def test_nothing_is_shown_after_the_session_was_ended_elsewhere(browser, reader):
    hover(browser, FIRST)
    reader.post("/sign-out")  # the same session
    browser.click(FIRST)
    browser.until("location.pathname === '/sign-in' && document.querySelector('[name=password]')")
    until(lambda: browser.value(STORED) == [])


@pytest.mark.slow
def test_nothing_stays_after_signing_out_not_even_for_the_back_button(browser, server, project):
    address = hover(browser, FIRST)
    browser.click(FIRST)
    browser.until(f"location.pathname === '{address}' && document.documentElement?.dataset.ready")
    assert browser.value(f"{OPENED}.workerStart > 0 && charts.length > 0")
    browser.value("sessionStorage.setItem('x', 'y')")
    browser.click(".bar form button")
    browser.until("location.pathname === '/sign-in' && document.readyState === 'complete'")
    workers = "navigator.serviceWorker.getRegistrations()"
    for left in (STORED, workers, "Object.keys(sessionStorage)", "Object.keys(localStorage)"):
        until(lambda left=left: browser.value(f"Promise.resolve({left}).then((left) => left.length)") == 0)
    for path in (f"/{project}/", f"/{project}/runs/1"):
        cached = "fetch(path, { cache: 'only-if-cached', mode: 'same-origin' }).then((a) => a.status, () => 'none')"
        assert browser.value(cached.replace("path", json.dumps(path))) in ("none", 504)
    entries = browser.call("Page.getNavigationHistory")["entries"]
    for entry in reversed(entries[1:-1]):
        browser.call("Page.navigateToHistoryEntry", entryId=entry["id"])
        browser.until("location.pathname === '/sign-in' && document.readyState === 'complete'")
        assert browser.value("document.body.innerText.includes('small')") is False


@pytest.mark.slow
def test_without_scripts_pages_are_whole(reader, server, project):
    with signed_in(reader) as browser:
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.call("Page.navigate", url=f"{server.address}/{project}/runs/1")
        browser.until("document.querySelector('h1')")
        assert browser.value("document.querySelector('h1').innerText") == "small"
        assert browser.value("getComputedStyle(document.body).visibility") == "visible"


# -- the browser's own prefetching, where no worker runs --------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A hub whose pages no worker opens, its person, and somebody who reads a project of this person."""
    options = ("--no-keep-templates", "--no-send-differences")
    with HubServer(tmp_path_factory.mktemp("plain") / "hub", *options) as server:
        turing, hopper = Visitor(server.port), Visitor(server.port)
        for name, visitor in (("turing", turing), ("hopper", hopper)):
            visitor.set_password(add_person(server.folder, name), name)
        turing.make_project("first")
        hopper.send(turing.invite("first", 1))
        yield server, turing, hopper


@pytest.mark.slow
def test_speculation_rules_fetch_ahead_and_the_page_asks_before_it_shows_itself(plain):
    server, turing, hopper = plain
    link, address = 'a[href="/first/"]', f"{server.address}/first/"
    with signed_in(hopper) as browser:
        browser.call("Preload.enable")
        for removed in (False, True):
            opened(browser, f"{server.address}/")
            browser.prefetches.clear()
            browser.mouse("mouseMoved", *browser.point(link))
            until(lambda: browser.value("1") and (address, "Ready") in browser.prefetches)
            if removed:
                remove(turing, "first", "hopper")
            browser.click(link)
            browser.until("location.pathname === '/first/' && document.readyState === 'complete'")
            browser.until(
                "document.documentElement?.dataset.unchecked === undefined && document.body?.innerText.trim()"
            )
            shown = browser.value("document.title + document.body.innerText")
            assert ("Runs of first" in shown) is not removed and ("Not found" in shown) is removed
            if not removed:
                assert browser.value(f"{OPENED}.deliveryType") == "navigational-prefetch"
        assert [one["exceptionDetails"] for one in browser.problems if "exceptionDetails" in one] == []


@pytest.mark.slow
def test_without_a_worker_nothing_stays_after_signing_out(plain):
    server, turing, _ = plain
    with signed_in(turing) as browser:
        for path in ("/", "/first/", "/first/people"):
            opened(browser, server.address + path)
        browser.click(".bar form button")
        browser.until("location.pathname === '/sign-in' && document.readyState === 'complete'")
        entries = browser.call("Page.getNavigationHistory")["entries"]
        for entry in reversed(entries[1:-1]):
            browser.call("Page.navigateToHistoryEntry", entryId=entry["id"])
            browser.until("location.pathname === '/sign-in' && document.readyState === 'complete'")
    turing.sign_in("turing")
