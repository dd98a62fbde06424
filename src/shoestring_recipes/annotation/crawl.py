"""Crawls a site into the store with Scrapy.

The store holds the known addresses and their states, which are written in the same transactions as the pages. A crawl
that is killed therefore continues where it stopped, and repeats only the requests that were under way. Requests stay on
the host of the first address, follow robots.txt, and are spaced by a delay. The target of a redirect is treated as a
link.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request as PlainRequest
from urllib.request import urlopen

from shoestring.core.errors import ConfigError, DataError, ShoestringError, nearest
from shoestring.storage.foreign import one_line
from shoestring_recipes.annotation.store import AnnotationStore
from shoestring_recipes.annotation.tables import FAILED, REFUSED, SKIPPED, STORED

try:
    import scrapy
    from protego import Protego
    from scrapy.crawler import CrawlerProcess
    from scrapy.exceptions import CloseSpider, IgnoreRequest
    from scrapy.http import HtmlResponse
    from w3lib.url import canonicalize_url
except ImportError as error:
    raise ConfigError("crawling needs Scrapy", hint='pip install "shoestring[annotation]"') from error

AGENT = "shoestring-annotation"
WINDOW = 2
"""Number of addresses that Scrapy holds at a time, as a multiple of the maximum number of requests under way."""
LONGEST = 2000
"""Maximum length of an address; longer ones nearly always come from link loops in a site."""
LARGEST = 8 << 20
"""Maximum size of a page in bytes."""
THIN = 200
"""Number of characters of text below which a page with scripts is assumed to need a browser."""
RENDER = ("never", "thin", "always")


@dataclass(frozen=True)
class CrawlSettings:
    """How a site is crawled."""

    delay: float = 1.0
    """Seconds between two requests; robots.txt may ask for more. A smaller delay is faster and loads the site more."""
    parallel: int = 2
    """Maximum number of requests under way at a time."""
    pages: int = 10_000
    """Maximum number of pages that the store gets from the site."""
    depth: int = 20
    """Maximum number of links from the first page; limits sites whose pages never end."""
    retries: int = 3
    """Number of times that a request is made again after a failure of the server or of the connection."""
    timeout: float = 30.0
    """Seconds after which a request has failed."""
    render: str = "never"
    """Which pages a browser opens as well, to get text that scripts write: `never`, `thin` (pages with scripts and
    little text) or `always`."""
    agent: str = AGENT
    """Name of the crawler in requests and in robots.txt; add an address at which you can be reached."""


def site_of(url: str) -> str:
    """Return the host of an address, with its port unless that is the default of the scheme.

    Raises:
        ConfigError: the address is not that of a web page, or has a name or a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"`{one_line(url)}` is no address of a web page: {error}") from error
    if parts.username or parts.password:
        raise ConfigError("an address with a name or a password is not crawled, as it would be stored")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"`{one_line(url)}` is no address of a web page", hint="it begins with https:// or http://")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host if port in (None, {"http": 80, "https": 443}[parts.scheme]) else f"{host}:{port}"


def read_robots(url: str, settings: CrawlSettings) -> Protego:
    """Read the robots.txt of a site; a missing file allows everything (RFC 9309).

    Raises:
        DataError: the site cannot be reached, or answers with status 429 or 5xx, so its rules are unknown.
    """
    parts = urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc}/robots.txt"
    request = PlainRequest(address, headers={"User-Agent": settings.agent})
    try:
        with urlopen(request, timeout=settings.timeout) as answer:
            text = answer.read(500 << 10).decode("utf-8", "replace")
    except HTTPError as error:
        if error.code >= 500 or error.code == 429:
            reason = f"`{address}` has status {error.code}, so nothing may be crawled"
            raise DataError(reason, hint="try again later") from error
        text = ""
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise DataError(f"cannot read `{address}`: {getattr(error, 'reason', error)}") from error
    return Protego.parse(text)


class SitePages(scrapy.Spider):
    """Spider that takes the waiting addresses of a site from the store, requests them, and stores their pages."""

    name = "site"

    def __init__(self, store: AnnotationStore, site: str, settings: CrawlSettings, stored: int, render: Any) -> None:
        super().__init__()
        self.store, self.site, self.limits, self.stored, self.render = store, site, settings, stored, render
        self.last = 0
        self.under_way: set[str] = set()
        self.left_out: Counter[str] = Counter()
        self.problem: ShoestringError | None = None

    async def start(self) -> AsyncIterator[Any]:
        """Request the first waiting addresses."""
        for request in self.more():
            yield request

    def more(self) -> Iterator[scrapy.Request]:
        """Yield requests until as many are under way as `WINDOW` and the maximum number of pages allow."""
        room = min(WINDOW * self.limits.parallel, self.limits.pages - self.stored) - len(self.under_way)
        for number, url, depth in self.store.waiting(self.site, self.last, room) if room > 0 else ():
            self.last = number
            self.under_way.add(url)
            meta = {"address": url, "depth_of_page": depth, "dont_redirect": True}
            yield scrapy.Request(url, self.read, errback=self.failed, meta=meta, dont_filter=True)

    async def read(self, response: Any) -> AsyncIterator[Any]:
        """Store the page of a response, and request the next addresses."""
        url, depth = response.meta["address"], response.meta["depth_of_page"]
        try:
            await self.settle(url, depth, response)
            self.under_way.discard(url)
            requests = list(self.more())
        except ShoestringError as error:
            self.problem = error
            raise CloseSpider("the store cannot be used") from error
        for request in requests:
            yield request

    async def settle(self, url: str, depth: int, response: Any) -> None:
        """Store the page of a response, or record in the store why there is none."""
        if 300 <= response.status < 400 and "Location" in response.headers:
            target = urljoin(url, response.headers["Location"].decode("latin-1"))
            self.store.add_addresses(self.site, self.links([target], depth), depth + 1)
            inside = self.belongs(target)
            self.store.settle(url, SKIPPED if inside else REFUSED, "redirect" if inside else "redirect to another host")
        elif response.status != 200:
            self.store.settle(url, FAILED, f"status {response.status}")
        elif not isinstance(response, HtmlResponse):
            self.store.settle(url, SKIPPED, "no HTML")
        else:
            page, reason = await self.rendered(url, response)
            if page is None:
                self.store.settle(url, REFUSED if "host" in reason else FAILED, reason)
                return
            title = " ".join(page.xpath("string(//title)").get("").split())
            text = text_of(page)
            self.store.store_page(self.site, url, title, text, self.links(links_of(page), depth), depth)
            self.stored += bool(text)

    async def rendered(self, url: str, response: Any) -> tuple[Any, str]:
        """Return the page, rendered by a browser if the settings ask for it; or None and the reason of the failure."""
        thin = len(text_of(response)) < THIN and bool(response.xpath("//script"))
        if self.render is None or not (thin or self.limits.render == "always"):
            return response, ""
        place, content = await asyncio.to_thread(self.render, url)
        if not content:
            return None, place
        if not self.belongs(place):
            return None, "redirect to another host"
        return HtmlResponse(place, body=content.encode("utf-8", "replace"), encoding="utf-8"), ""

    def belongs(self, url: str) -> bool:
        """Whether an address belongs to this site."""
        try:
            return site_of(url) == self.site
        except ConfigError:
            return False

    def links(self, urls: list[str], depth: int) -> list[str]:
        """Return the addresses to crawl, in canonical form without duplicates; counts the others in `left_out`."""
        chosen: dict[str, None] = {}
        for url in urls:
            try:
                same = site_of(url) == self.site
                canonical = canonicalize_url(url)
            except (ConfigError, ValueError):
                self.left_out["no address of a page"] += 1
                continue
            if not same:
                self.left_out["another host"] += 1
            elif depth >= self.limits.depth or len(canonical) > LONGEST:
                self.left_out["too deep or too long"] += 1
            else:
                chosen[canonical] = None
        return list(chosen)

    def failed(self, failure: Any) -> Iterator[scrapy.Request]:
        """Record why an address could not be read, and request the next addresses."""
        url = failure.request.meta["address"]
        try:
            if failure.check(IgnoreRequest):
                self.store.settle(url, REFUSED, "robots.txt")
            else:
                self.store.settle(url, FAILED, failure.type.__name__)
            self.under_way.discard(url)
            yield from list(self.more())
        except ShoestringError as error:
            self.problem = error
            raise CloseSpider("the store cannot be used") from error


def text_of(page: Any) -> str:
    """Return the visible text of a page."""
    hidden = "ancestor::script or ancestor::style or ancestor::noscript or ancestor::template"
    return " ".join(" ".join(page.xpath(f"//body//text()[not({hidden})]").getall()).split())


def links_of(page: Any) -> list[str]:
    """Return the absolute addresses that a page links to; none if the page asks not to follow them."""
    if "nofollow" in " ".join(page.xpath("//meta[@name='robots']/@content").getall()).lower():
        return []
    joined = []
    for link in page.xpath("//a/@href").getall():
        try:
            joined.append(page.urljoin(link.strip()))
        except ValueError:
            joined.append("")
    return joined


def crawl(store: AnnotationStore, url: str, settings: CrawlSettings) -> list[str]:
    """Crawl the site of an address, or continue a crawl; can be called only once in a process.

    Returns:
        Lines with the number of stored pages, and of the site's other addresses by state and reason.

    Raises:
        ConfigError: the address or a setting is wrong, or the store cannot be used.
        DataError: the site cannot be reached, or its robots.txt forbids the address.
    """
    if settings.render not in RENDER:
        raise ConfigError(f"render is `{settings.render}`", hint=nearest(settings.render, RENDER))
    site, first = site_of(url), canonicalize_url(url)
    robots = read_robots(url, settings)
    if not robots.can_fetch(first, settings.agent):
        raise DataError(f"the robots.txt of `{site}` forbids `{one_line(first)}`", hint="ask the site's owner")
    delay = max(settings.delay, robots.crawl_delay(settings.agent) or 0.0)
    store.add_addresses(site, [first])
    stored = sum(count for (state, _), count in store.states(site).items() if state == STORED)
    process = CrawlerProcess(_scrapy_settings(settings, delay))
    crawler = process.create_crawler(SitePages)
    renderer = None
    if settings.render != "never":
        from shoestring_recipes.annotation.browser import PageRenderer

        renderer = PageRenderer(first, settings.agent, settings.timeout, delay)
    try:
        process.crawl(
            crawler, store=store, site=site, settings=settings, stored=stored, render=renderer and renderer.render
        )
        process.start()
    finally:
        if renderer is not None:
            renderer.close()
    spider: Any = crawler.spider
    if spider is not None and spider.problem is not None:
        raise spider.problem
    return report(store.states(site), spider.left_out if spider is not None else Counter())


def report(states: Mapping[tuple[str, str], int], left_out: Mapping[str, int]) -> list[str]:
    """Return lines with the number of a site's addresses by state and reason, and of links that this call left out."""
    lines = [
        f"{count:8} {state}{f' ({reason})' if reason else ''}" for (state, reason), count in sorted(states.items())
    ]
    return [*lines, *(f"{count:8} links left out ({reason})" for reason, count in sorted(left_out.items()))]


def _scrapy_settings(settings: CrawlSettings, delay: float) -> dict[str, Any]:
    return {
        "ROBOTSTXT_OBEY": True,
        "USER_AGENT": settings.agent,
        "DOWNLOAD_DELAY": delay,
        "RANDOMIZE_DOWNLOAD_DELAY": False,
        "CONCURRENT_REQUESTS": settings.parallel,
        "CONCURRENT_REQUESTS_PER_DOMAIN": settings.parallel,
        "RETRY_TIMES": settings.retries,
        "DOWNLOAD_TIMEOUT": settings.timeout,
        "DOWNLOAD_MAXSIZE": LARGEST,
        "HTTPERROR_ALLOW_ALL": True,
        "METAREFRESH_ENABLED": False,
        "COOKIES_ENABLED": False,
        "TELNETCONSOLE_ENABLED": False,
        "LOG_LEVEL": "CRITICAL",
    }
