"""Comments, the feed and the search in a browser: at desktop and phone width, light and dark, and by keyboard."""

import pytest

from shoestring_hub.client.push import push
from tests.browser import needs_chromium
from tests.hub.test_pages_in_browser import SIZES, findings, opened, signed_in
from tests.rigs.hub.folders import write_run
from tests.rigs.hub.people import commented, newcomer

pytestmark = [pytest.mark.slow, needs_chromium]
WIDE = "# Heading\n" + "x" * 400 + "\n\n```\n" + "code " * 80 + "\n```\n\n| a | b |\n|---|---|\n"
WIDE += "| " + "y" * 200 + " | 2 |\n"


@pytest.fixture
def grace(project, ada, server, tmp_path):
    """A reader of a project in which ada has written what is hard to fit into a page."""
    push(write_run(tmp_path / "run", name="a-name-" + "of-a-run-that-a-script-has-made-" * 5, files=0))
    visitor = newcomer(server, ada, project, 1)
    for text in (WIDE, f"for @grace-{project}", "to hide"):
        commented(ada, project, text)
    ada.post(f"/{project}/runs/1/comments/3/hide", hidden="yes")
    visitor.get("/following")
    visitor.post(f"/{project}/follow", follow="yes")
    visitor.post("/@ada/follow", follow="yes")
    commented(visitor, project, "my own")
    return visitor


@pytest.mark.parametrize("size", SIZES)
def test_pages_of_people_fit_in_light_and_dark(project, grace, ada, server, size):
    run = f"/{project}/runs/1"
    pages = ("/feed", "/following", "/@ada", "/search", f"/search?q=x&project={project}", f"{run}?comment=2#comment-2")
    for visitor, paths in ((grace, pages), (ada, (run,))):
        with signed_in(visitor, size) as browser:
            for dark in (False, True):
                browser.dark(dark)
                for path in paths:
                    opened(browser, server.address + path)
                    browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true })")
                    assert browser.cut() == [], path
                    assert size == "phone" or findings(browser) == [], path
            assert browser.problems == []


def test_commenting_editing_and_following_by_keyboard(project, grace, server):
    with signed_in(grace) as browser:
        opened(browser, f"{server.address}/{project}/runs/1")
        browser.value("document.getElementById('comment-text').focus()")
        browser.write("written **by** keyboard")
        browser.press("Tab")
        assert browser.value("document.activeElement.textContent") == "Comment"
        browser.press("Enter")
        browser.until("location.hash === '#comment-5' && document.documentElement?.dataset.ready")
        assert browser.value("document.querySelector('#comment-5 strong').textContent") == "by"
        browser.value("document.querySelector('#comment-5 summary').focus()")
        browser.press("Enter")
        browser.press("Tab")
        assert browser.value("document.activeElement.value") == "written **by** keyboard"
        browser.write("edited, ")
        browser.press("Tab")
        browser.press("Enter")
        browser.until("document.querySelector('#comment-5')?.textContent.includes('edited, written by keyboard')")
        opened(browser, f"{server.address}/@ada")
        browser.value("document.querySelector('main form button').focus()")
        browser.press("Enter")
        browser.until("document.querySelector('main form button')?.textContent === 'Follow'")
        opened(browser, f"{server.address}/search")
        browser.value("document.getElementById('q').focus()")
        browser.write("keyb")
        browser.press("Enter")
        browser.until("document.querySelector('.feed mark')?.textContent === 'keyboard'")
        assert browser.problems == []
