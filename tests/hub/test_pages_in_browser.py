"""The hub's pages in a browser: at desktop and phone width, light and dark, by keyboard, and as runs grow."""

import json
from pathlib import Path

import pytest

from shoestring_hub.client.push import push
from tests.browser import Browser, needs_chromium
from tests.hub.conftest import add_person
from tests.rigs.hub.folders import rows, write_run
from tests.rigs.hub.visitor import Visitor

pytestmark = needs_chromium
AXE = Path(__file__).parents[1] / "clients" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"desktop": (1280, 900, False), "phone": (390, 844, True)}
LONG = "a-name-" + "of-a-run-that-a-script-has-made-" * 5


@pytest.fixture
def lab(project, ada, tmp_path):
    """A project with runs; the addresses of its pages."""
    for number, name in enumerate(("small", LONG, "<b>bold</b>")):
        push(write_run(tmp_path / f"{number}", steps=120, name=name, seed=number, files=2), checkpoints=True)
    ada.get(f"/{project}/runs/1")
    ada.post(f"/{project}/runs/1/edit", notes="# Notes\n| a | b |\n|---|---|\n| 1 | 2 |\n" + "x" * 300, tags="a b")
    ada.post(f"/{project}/edit", notes="Runs of a *lab*.")
    link = ada.invite(project, 2)
    wide = "&".join(f"column={kind}" for kind in ("setting.optim.adamw.lr", "setting.run.name", "metric.loss"))
    ways = ("", "?where=nonsense", f"?{wide}", "people", "tokens", "clips", "runs/1", "runs/2")
    ways += ("compare?run=1&run=2&run=3",)
    return ["/", "/account", link, "/nothing", *(f"/{project}/{way}" for way in ways)]


def signed_in(visitor, size="desktop"):
    """A browser with the session of a visitor."""
    browser = Browser(*SIZES[size])
    browser.call("Network.enable")
    for name, value in visitor.cookies.items():
        browser.call("Network.setCookie", name=name, value=value, url=f"http://127.0.0.1:{visitor.port}")
    return browser


def opened(browser, address):
    browser.open(address)
    browser.until("document.documentElement.dataset.ready")


def findings(browser):
    """What axe-core finds to be serious or worse."""
    if not AXE.exists():
        return []
    browser.value(AXE.read_text() + "; true")
    found = browser.value("axe.run().then((answer) => JSON.stringify(answer.violations))")
    return [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in json.loads(found)
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason="npm did not install axe-core")
def test_axe_sees_a_fault(ada, server):
    with signed_in(ada) as browser:
        opened(browser, f"{server.address}/")
        browser.value("document.querySelector('label').remove()")
        assert [name for name, _ in findings(browser)] == ["label"]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_page_fits_in_light_and_dark(lab, ada, server, size):
    with signed_in(ada, size) as browser:
        for dark in (False, True):
            browser.dark(dark)
            for path in lab:
                opened(browser, server.address + path)
                assert browser.cut() == [], path
                assert size == "phone" or findings(browser) == [], path
        problems = [one.get("entry", one) for one in browser.problems]
        assert [one for one in problems if one.get("level") == "error" and "/nothing" not in one.get("url", "")] == []
        browser.call("Network.deleteCookies", name="sessionid", url=server.address)
        opened(browser, f"{server.address}/sign-in")
        assert browser.cut() == [] == findings(browser)


@pytest.mark.slow
def test_the_table_is_sorted_filtered_and_compared_by_keyboard(lab, project, ada, server):
    with signed_in(ada) as browser:
        opened(browser, f"{server.address}/{project}/")
        browser.press("Tab")
        assert browser.value("document.activeElement.textContent") == "Skip to content"
        reached = set()
        for _ in range(40):
            browser.press("Tab")
            reached.add(browser.value("document.activeElement.name || document.activeElement.textContent.trim()"))
        assert {"where", "run", "Show", "Compare the chosen runs", "status", "Columns"} <= reached
        browser.value("document.getElementById('where').focus()")
        browser.write("name = small")
        browser.press("Enter")
        browser.until("document.querySelectorAll('tbody tr').length === 1")
        assert "where=name" in browser.value("location.search")


@pytest.mark.slow
def test_the_report_runs_in_a_sandbox_without_cookies_and_network(project, ada, server, tmp_path):
    folder = write_run(tmp_path / "run", files=0)
    (folder / "report.html").write_text(
        "<!doctype html><title>waiting</title><script>let cookie, stored; try { cookie = document.cookie } "
        "catch { cookie = 'none' }"
        "try { localStorage.x = 1; stored = 'some' } catch { stored = 'none' }"
        "fetch('/').then(() => 'some', () => 'none').then((net) => "
        "{ document.title = `${origin} ${cookie} ${stored} ${net}` })</script>"
    )
    push(folder)
    with signed_in(ada) as browser:
        browser.open(f"{server.address}/{project}/runs/1/report")
        browser.until("document.title !== 'waiting'")
        assert browser.value("document.title") == "null none none none"
        opened(browser, f"{server.address}/{project}/runs/1")
        browser.value("document.querySelector('iframe').closest('details').open = true")
        browser.until("document.querySelector('iframe').contentDocument === null")  # of another origin


@pytest.mark.slow
def test_an_open_page_gains_what_a_run_logs(project, ada, server, tmp_path):
    folder = write_run(tmp_path / "run", steps=60, files=0)
    push(folder)
    with signed_in(ada) as browser:
        opened(browser, f"{server.address}/{project}/runs/1")
        assert browser.value("data.runs[0].step.at(-1)") == 60
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(rows(61, 90))
        push(folder)
        browser.value("ask().then(() => true)")
        line = "data.large.find((one) => one.key === 'nats').lines[0]"
        assert browser.value("data.runs[0].step.at(-1)") == 90
        assert browser.value(f"{line}.at.length") == 90 and browser.value(f"{line}.logged") == 90
        opened_later = browser.value("JSON.stringify([data.runs, data.large, data.small])")
        opened(browser, f"{server.address}/{project}/runs/1")
        assert json.loads(browser.value("JSON.stringify([data.runs, data.large, data.small])")) == json.loads(
            opened_later
        )
        (folder / "metrics.jsonl").write_text(rows(1, 30) + rows(31, 200, seed=5))  # resumed from step 30
        push(folder)
        browser.value("ask().then(() => true)")
        assert "reload" in browser.value("document.getElementById('live').textContent")
        assert browser.value("data.runs[0].step.at(-1)") == 90


@pytest.mark.slow
def test_colours_that_were_chosen_stay_on_the_next_page(lab, ada, server):
    with signed_in(ada) as browser:
        opened(browser, f"{server.address}/")
        browser.value("document.getElementById('theme').click()")
        browser.until("document.cookie.includes('theme=dark')")
        opened(browser, f"{server.address}{lab[4]}")
        assert browser.value("document.documentElement.dataset.theme") == "dark"


def test_a_newcomer_joins_by_a_link_and_sees_the_runs(lab, project, ada, server):
    grace = Visitor(server.port)
    name = f"grace-{project}"
    joined = grace.send(ada.invite(project, 1), username=name, password1="of a newcomer 7", password2="of a newcomer 7")
    assert f"<h1>{project}</h1>" in joined.text and "People" not in joined.text
    assert grace.get(f"/{project}/people").status == 403
    assert Visitor(server.port).get(lab[2]).status == 200
    used = ada.invite(project, 1)
    assert grace.send(used).status == 200 and Visitor(server.port).get(used).status == 404
    link = add_person(server.folder, f"turing-{project}")
    turing = Visitor(server.port)
    turing.set_password(link, f"turing-{project}")
    assert turing.get(f"/{project}/").status == 404
