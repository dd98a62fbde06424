"""Crawls of a loopback site by Scrapy and by a browser, through kills; and a paged interface that asks to wait."""

import json
import shutil
from email.utils import formatdate

import pytest

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.annotation.crawl import CrawlSettings, read_robots, site_of
from shoestring_recipes.annotation.paged import PagedInterface, read_pages
from shoestring_recipes.annotation.store import open_store
from tests.rigs.crawls import QUICK, UNDER_WAY, counts, crawled, kill_and_continue
from tests.rigs.site import LoopbackSite, page, redirect, tree


@pytest.fixture
def odd():
    """A site with one page of each kind of trouble."""
    failures = iter([500, 503, 200])
    links = [
        *("/fine", "/fine#part", "/fine?b=2&a=1", "/fine?a=1&b=2", "/again/0", "/elsewhere", "/flaky", "/broken"),
        *("/missing", "/paper.pdf", "/private/1", "/long", "/empty", "/round", "/nofollow", "http://other.example/x"),
        *("mailto:a@b.c", "http://[", "javascript:void(0)"),
    ]
    answers = {
        "/robots.txt": (200, {"Content-Type": "text/plain"}, b"User-agent: *\nDisallow: /private\n"),
        "/": page(" ".join(f"<a href='{link}'>{link}</a>" for link in links), "start"),
        "/fine": page("<p>Fine.</p><script>var hidden = 1</script><style>p {}</style>", "fine"),
        **{f"/again/{number}": redirect(f"/again/{number + 1}") for number in range(60)},
        "/round": redirect("/round"),
        "/elsewhere": redirect("http://other.example/"),
        "/flaky": lambda *_: (next(failures), *page("better now")[1:]),
        "/broken": (500, {}, b""),
        "/paper.pdf": (200, {"Content-Type": "application/pdf"}, b"%PDF-1.4 not a page"),
        "/private/1": page("secret"),
        "/long": page("word " * 200_000, "long"),
        "/empty": page("<a href='/fine'></a>"),
        "/nofollow": (200, *page("none<a href='/hidden'>x</a>")[1:]),
    }
    status, headers, body = answers["/nofollow"]
    answers["/nofollow"] = status, headers, body.replace(b"<title>", b"<meta name='robots' content='nofollow'><title>")
    with LoopbackSite(answers) as site:
        yield site


@pytest.mark.slow
def test_a_site_with_all_kinds_of_trouble(odd, tmp_path):
    found = counts(crawled(tmp_path / "store.db", odd.url, *QUICK, "--depth", "5"))
    assert found == {
        "stored": 6,  # start, fine twice (with and without a query), flaky, long, nofollow
        "failed (status 404)": 1,
        "failed (status 500)": 1,
        "refused (redirect to another host)": 1,
        "refused (robots.txt)": 1,
        "skipped (no HTML)": 1,
        "skipped (no text)": 1,
        "skipped (redirect)": 6,  # /round, and five of the endless ones
        "links left out (another host)": 2,
        "links left out (no address of a page)": 3,
        "links left out (too deep or too long)": 1,
    }
    assert odd.requests["/broken"] == 4 and odd.requests["/flaky"] == 3  # three retries
    assert odd.requests["/fine?a=1&b=2"] == 1 and odd.requests["/fine"] == 1
    assert not odd.requests["/private/1"] and not odd.requests["/hidden"]
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    assert store.item(f"{odd.url}/fine").size == len("Fine.") and store.item(f"{odd.url}/long").size == 999_999


@pytest.mark.slow
def test_robots_that_forbid_or_fail_end_the_crawl_in_a_line(tmp_path):
    forbids = (200, {"Content-Type": "text/plain"}, b"User-agent: *\nDisallow: /\n")
    with LoopbackSite({"/robots.txt": forbids, "/": page("x")}) as site:
        said = crawled(tmp_path / "store.db", site.url, *QUICK, code=2)
        assert said.splitlines()[0] == f"error: the robots.txt of `{site.url[7:]}` forbids `{site.url}/`"
        site.answers["/robots.txt"] = (503, {}, b"")
        with pytest.raises(DataError, match="has status 503, so nothing may be crawled"):
            read_robots(site.url, CrawlSettings())
        site.answers["/robots.txt"] = (404, {}, b"")
        assert read_robots(site.url, CrawlSettings()).can_fetch(f"{site.url}/", "any")
        assert not site.requests["/"]
    with pytest.raises(DataError, match=r"cannot read .*refused"):
        read_robots(site.url, CrawlSettings())
    for wrong in ("file:///etc/passwd", "http://", "http://a:b@c.example", "http://[", "http://a.example:x"):
        with pytest.raises(ConfigError, match=r"no address of a web page|name or a password"):
            site_of(wrong)
    assert site_of("HTTPS://A.example:443/x") == "a.example" and site_of("http://[::1]:80") == "[::1]"


@pytest.mark.slow
def test_a_killed_crawl_loses_no_page_and_stores_none_twice(tmp_path):
    pages, kills = 300, 3
    with LoopbackSite(tree(pages), pause=0.002) as site:
        found = kill_and_continue(tmp_path / "store.db", site, kills, 60)
        assert found["stored"] == pages and found.keys() == {"stored"}
        asked = [site.requests[f"/{number}"] for number in range(pages)]
        assert min(asked) == 1 and sum(asked) - pages <= UNDER_WAY * kills
        site.answers["/new"] = lambda *_: (500, {}, b"")
        open_store(f"sqlite:///{tmp_path / 'store.db'}").add_addresses(site.url[7:], [f"{site.url}/new"])
        assert counts(crawled(tmp_path / "store.db", f"{site.url}/0", *QUICK))["failed (status 500)"] == 1
        site.answers["/new"] = page("here now")
        again = counts(crawled(tmp_path / "store.db", f"{site.url}/0", *QUICK, "--again"))
        assert again == {"stored": pages + 1} and site.requests["/1"] == asked[1]


SCRIPTED = """<div id="a"></div><script>
setTimeout(() => { document.getElementById("a").innerHTML = "Written by a script. <a href='/next'>next</a>" }, 50)
</script><img src="http://127.0.0.2:{port}/tracker">"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no chromium-driver on this machine")
def test_pages_that_need_a_browser(tmp_path):
    with LoopbackSite({}) as site:
        scripted = SCRIPTED.replace("{port}", site.url.rpartition(":")[2])
        away = "<script>setTimeout(() => { location = 'http://localhost:1/' }, 10)</script>"
        site.answers |= {"/": page(scripted, "a"), "/next": page("Plain <a href='/away'>x</a>"), "/away": page(away)}
        assert counts(crawled(tmp_path / "plain.db", site.url, *QUICK)) == {"skipped (no text)": 1}
        found = counts(crawled(tmp_path / "store.db", site.url, *QUICK, "--render", "thin"))
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    assert store.item(f"{site.url}/").size == len("Written by a script. next") and found["stored"] == 2
    assert site.requests["/tracker"] == 0 and len(found) == 2


# -- paged interfaces --------------------------------------------------------------------------------------------------


class Interface:
    """A paged interface with a token, which asks to wait before some pages."""

    def __init__(self, pages=4, waits=("2",), token="secret"):
        self.pages, self.waits, self.token = pages, list(waits), token

    def __call__(self, path, headers):
        if headers["Authorization"] != f"Bearer {self.token}":
            return 401, {}, b"{}"
        if self.waits:
            return 429, {"Retry-After": self.waits.pop(0)}, b"{}"
        number = int(path.partition("cursor=")[2] or 0)
        records = [{"id": f"{number}-{one}", "text": f"text {number} {one}", "title": "t"} for one in range(3)]
        records.append({"id": f"{number}-x", "text": " "})
        following = str(number + 1) if number + 1 < self.pages else None
        body = {"data": {"items": records}, "paging": {"next": following}}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


@pytest.fixture
def interface(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    with LoopbackSite({"/api": Interface()}) as site:
        named = {"records": "data.items", "next": "paging.next", "token_variable": "SECRET"}
        yield site, store, PagedInterface(f"{site.url}/api?size=3", "forum", **named)


def test_a_paged_interface_is_read_once_and_waits_as_asked(interface):
    site, store, where = interface
    site.answers["/api"] = Interface(waits=["2", formatdate(0, usegmt=True), "nonsense"])
    waited = []
    assert read_pages(store, where, wait=waited.append)[0].split()[0] == "12"
    assert waited == [2.0, 0.0, 4.0]
    assert store.item(f"{site.url}/api?size=3#2-1").title == "t"
    assert read_pages(store, where)[0].split()[0] == "0" and site.requests["/api?size=3&cursor=3"] == 1


def test_a_paged_interface_continues_where_it_failed(interface):
    site, store, where = interface
    whole = Interface(waits=())
    site.answers["/api"] = lambda path, headers: (500, {}, b"") if "cursor=2" in path else whole(path, headers)
    with pytest.raises(DataError, match="failed 8 times: status 500"):
        read_pages(store, where, wait=lambda seconds: None)
    assert store.cursor("forum") == ("2", False)
    site.answers["/api"] = whole
    assert read_pages(store, where)[0].split()[0] == "6" and site.requests["/api?size=3&cursor=1"] == 1


@pytest.mark.parametrize(
    "answer, message",
    [
        ((401, {}, b""), "refuses access: status 401"),
        ((404, {}, b""), "has status 404"),
        ((302, {"Location": "http://other.example/"}, b""), "has status 302"),
        ((429, {"Retry-After": "5000"}, b""), "asks to wait for 5000 s"),
        ((200, {}, b"<html>"), "is no JSON"),
        ((200, {}, b"[1]"), "no list `data.items`"),
        ((200, {}, b'{"data": {"items": []}, "paging": {"next": "http://other.example/2"}}'), "leads to another host"),
        ((200, {}, b'{"data": {"items": []}, "paging": {"next": "7"}}'), "the position `7` twice"),
    ],
)
def test_interfaces_that_misbehave_are_refused_in_a_line(interface, answer, message):
    site, store, where = interface
    site.answers["/api"] = answer
    with pytest.raises(DataError, match=message):
        read_pages(store, where, wait=lambda seconds: None)


def test_a_token_is_not_sent_unencrypted(interface, monkeypatch):
    _, store, where = interface
    with pytest.raises(ConfigError, match="unencrypted"):
        read_pages(store, PagedInterface("http://other.example/api", "x", token_variable="SECRET"))
    monkeypatch.delenv("SECRET")
    with pytest.raises(ConfigError, match="`SECRET` has no token"):
        read_pages(store, where)
