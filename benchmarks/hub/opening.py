"""How fast pages open, from the click to the paint, over a connection with a round trip of 100 ms.

A proxy between browser and hub holds all bytes back for half a round trip, and the first bytes of a connection for one
more, as its handshake would take. Bandwidth is not limited. The mouse stays down for `PRESS` seconds, a finger as well.

*Cold* is a link outside of the hub, in a profile that is empty but for the session. All others are clicks on a run in
a table of the hub, whose page was not opened before in this profile.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from unittest.mock import patch

from benchmarks.harness import Deadline
from benchmarks.intervals import of_median
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.timing import FEWEST_ROUNDS
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.push import push
from tests.browser import CHROMIUM, Browser
from tests.rigs.hub import folders
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor, add_person

ROUNDS = 30
TRIP = 0.1
"""Seconds of a round trip."""
PRESS = 0.08
"""Seconds from pressing to releasing a button or a finger, at which the click happens."""
STEPS, GROWN = 300, 5
"""Steps that each run has logged, and steps that the run gains between two visits whose difference is measured."""
HOVERS = {"hover 0 ms": 0.0, "hover 100 ms": 0.1, "hover 300 ms": 0.3}
ALONE = {
    "none": ("--no-keep-templates", "--no-send-differences", "--no-fetch-ahead"),
    "templates": ("--no-send-differences", "--no-fetch-ahead"),
    "differences": ("--no-keep-templates", "--no-fetch-ahead"),
    "ahead": ("--no-keep-templates", "--no-send-differences"),
}
"""Options of hubs that have none of the three measures, or one."""
RESTED_ON = 30
"""Links on which the pointer rests in vain."""
PROFILES = {"desktop": (1280, 900, False), "phone": (390, 844, True)}
SEEN = """(() => {
  if (!location.protocol.startsWith("http")) return;
  const look = () => {
    const { ready, unchecked } = document.documentElement?.dataset ?? {};
    if (!ready || unchecked !== undefined) { requestAnimationFrame(look); return; }
    requestAnimationFrame(() => {
      const channel = new MessageChannel(); // its message arrives after the frame was painted
      channel.port1.onmessage = () => { window.painted = performance.now(); };
      channel.port2.postMessage(0);
    });
  };
  requestAnimationFrame(look);
})()"""
TIMES = """(() => {
  const [page] = performance.getEntriesByType("navigation"), files = performance.getEntriesByType("resource");
  const needed = files.filter((one) => one.initiatorType === "script" || one.initiatorType === "link");
  return {
    painted: performance.timeOrigin + painted, start: performance.timeOrigin + page.fetchStart,
    data: performance.timeOrigin + page.responseEnd,
    files: performance.timeOrigin + Math.max(page.responseEnd, ...needed.map((one) => one.responseEnd)),
    blocking: files.filter((one) => one.renderBlockingStatus === "blocking").map((one) => one.name.split("/").at(-1)),
    prefetched: page.deliveryType, worker: page.workerStart > 0,
  };
})()"""


class DelayingProxy:
    """Passes bytes between a port of its own and the hub's, late by half a round trip in each direction."""

    def __init__(self, target: int, trip: float) -> None:
        self.target, self.trip, self.port = target, trip, 0
        self.received = 0
        """Bytes that the browser has got."""
        self.handshakes: list[float] = []
        """When connections began that had to wait for their handshake."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = self._loop.time()
        hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self.target)
        up = self._pass(reader, hub_writer, opened + self.trip, self._note_handshake)
        with suppress(asyncio.CancelledError):  # the proxy ends
            await asyncio.gather(up, self._pass(hub_reader, writer, opened, self._count))

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, first: float, note: Callable[[int, float], None]
    ) -> None:
        """Pass bytes on, none of which leave the other side before `first`."""
        due = 0.0
        with suppress(OSError):
            while data := await source.read(1 << 16):
                now = self._loop.time()
                note(len(data), first - now)
                due = max(max(now, first) + self.trip / 2, due + 1e-6)  # in order
                self._loop.call_at(due, sink.write, data)
        self._loop.call_at(max(due, self._loop.time() + self.trip / 2) + 1e-6, sink.close)

    def _note_handshake(self, size: int, wait: float) -> None:
        if wait > 0:
            self.handshakes.append(time.time())

    def _count(self, size: int, wait: float) -> None:
        self.received += size

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop.create_task(self._serve(started))
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


# -- one click --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A page that was opened: seconds from the click to the paint, and what they consist of."""

    seconds: float
    connection: float
    data: float
    template: float
    """Seconds for which the page waits for styles and scripts after its data have arrived."""
    blocking: Sequence[str]
    """Files that had to arrive before anything was painted."""
    preloaded: str
    """How the browser came by the page: `worker`, `navigational-prefetch` or empty."""
    received: int
    """Bytes from the hub, those that were fetched ahead included."""

    @property
    def paint(self) -> float:
        return self.seconds - self.connection - self.data - self.template


class Tabs(Browser):
    """A browser whose tabs have a profile each."""

    def open_tab(self, profile: str, cookies: Mapping[str, str], port: int) -> tuple[str, str]:
        """A tab in a new profile that has a session of the hub; the profile and the tab's session."""
        width, height, phone = PROFILES[profile]
        self.session = None
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Preload"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Page.addScriptToEvaluateOnNewDocument", source=SEEN)
        for name, value in cookies.items():
            self.call("Network.setCookie", name=name, value=value, url=f"http://127.0.0.1:{port}")
        return context, self.session

    def close_tab(self, context: str) -> None:
        """Remove a profile and its tab."""
        self.session = None
        self.call("Target.disposeBrowserContext", browserContextId=context)

    def wait_for_paint(self) -> None:
        """Until the page has been painted; while pages change, the browser may refuse to answer."""
        end = time.monotonic() + 20
        while True:
            try:
                if self.value("window.painted > 0"):
                    return
            except AssertionError:
                pass
            assert time.monotonic() < end, f"not painted: {self.problems[-3:]}"
            time.sleep(0.05)


@dataclass
class Reader:
    """A person at a tab, whose browser reaches the hub through a proxy."""

    tabs: Tabs
    proxy: DelayingProxy
    cookies: Mapping[str, str]
    project: str
    profile: str
    context: str = ""
    session: str = ""

    @property
    def _table(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}/{self.project}/"

    def start(self) -> None:
        """Open a tab in an empty profile."""
        self.context, self.session = self.tabs.open_tab(self.profile, self.cookies, self.proxy.port)

    def at_table(self, *, worker: bool) -> int:
        """Open the table of runs, by the worker if the hub has one; the bytes that this takes."""
        if not self.session:
            self.start()
        self.tabs.session = self.session
        before = self.proxy.received
        self._open(self._table)
        if worker and not self.tabs.value("navigator.serviceWorker.controller !== null"):
            self.tabs.value("navigator.serviceWorker.ready.then(() => true)")
            self._open(self._table)
            assert self.tabs.value("navigator.serviceWorker.controller !== null")
        return self.proxy.received - before

    def _open(self, url: str) -> None:
        self.tabs.call("Page.navigate", url=url)
        self.tabs.wait_for_paint()

    def rest(self) -> None:
        """Leave the page, so that it does not ask the hub for news while others are measured."""
        self.tabs.call("Page.navigate", url="about:blank")

    def hover(self, run: int) -> None:
        """Move the mouse to the link to a run, from somewhere else."""
        point = self.tabs.point(f'tbody a[href$="/runs/{run}"]')
        self.tabs.mouse("mouseMoved", 1, 1)
        self.tabs.mouse("mouseMoved", *point)

    def click(self, run: int, hover: float) -> Opened:
        """Open a run by the mouse, which rests on its link before."""
        before = self.proxy.received
        self.hover(run)
        time.sleep(hover)
        return self._press(f'tbody a[href$="/runs/{run}"]', before)

    def _press(self, selector: str, before: int) -> Opened:
        x, y = self.tabs.point(selector)
        self.tabs.mouse("mousePressed", x, y)
        time.sleep(PRESS)
        return self._opened(partial(self.tabs.mouse, "mouseReleased", x, y), before)

    def tap(self, run: int) -> Opened:
        """Open a run by a finger."""
        before = self.proxy.received
        x, y = self.tabs.point(f'tbody a[href$="/runs/{run}"]')
        self.tabs.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        time.sleep(PRESS)
        return self._opened(
            partial(self.tabs.call, "Input.dispatchTouchEvent", type="touchEnd", touchPoints=[]), before
        )

    def arrive(self, run: int) -> Opened:
        """Open a run by a link outside of the hub, in a new profile, which is removed afterwards."""
        self.start()
        self.tabs.call("Page.navigate", url=f"data:text/html,<a href={self._table}runs/{run}>a run</a>")
        self.tabs.until("document.querySelector('a')")
        x, y = self.tabs.point("a")
        self.tabs.mouse("mouseMoved", x, y)
        opened = self._press("a", self.proxy.received)
        self.tabs.close_tab(self.context)
        return opened

    def _opened(self, release: Callable[[], object], before: int) -> Opened:
        self.tabs.value("window.painted = 0")
        clicked = time.time()
        release()
        time.sleep(1.5 * TRIP)  # questions take time of the page
        self.tabs.wait_for_paint()
        times: dict[str, Any] = {**self.tabs.value(TIMES)}
        painted, start, data, files = (times[name] / 1000 - clicked for name in ("painted", "start", "data", "files"))
        new = [moment for moment in self.proxy.handshakes if clicked <= moment < clicked + data]
        connection = self.proxy.trip if new else 0.0
        how = "worker" if times["worker"] else times["prefetched"]
        waited = max(0.0, data - max(start, 0.0) - connection)
        received = self.proxy.received - before
        return Opened(painted, connection, waited, files - data, times["blocking"], how, received)


# -- all situations ---------------------------------------------------------------------------------------------------


@dataclass
class Clicks:
    """What was measured: clicks by their situation, and bytes that were fetched ahead in vain."""

    opened: dict[str, list[Opened]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of opening the table, with one measure alone or none."""
    one_link: int = 0
    """Bytes of a link on which the pointer rested."""
    many_links: int = 0
    """Bytes of a page on whose links the pointer rested one after the other."""

    def seconds(self, situation: str) -> list[float]:
        return [one.seconds for one in self.opened[situation]]

    def parts(self, situation: str) -> str:
        """The medians of what the clicks of a situation consist of, in milliseconds."""
        medians = {
            name: round(1000 * statistics.median(getattr(one, name) for one in self.opened[situation]))
            for name in ("seconds", "connection", "template", "data", "paint")
        }
        whole, *parts = medians.items()
        size = self.bytes_of(situation) / 1000
        return f"{situation}: {whole[1]} ms ({', '.join(f'{name} {value}' for name, value in parts)}), {size:.1f} kB"

    def bytes_of(self, situation: str) -> float:
        """The median of the bytes of a click."""
        return statistics.median(one.received for one in self.opened[situation])


@contextmanager
def seeded(count: int) -> Iterator[tuple[Path, Visitor, str, Callable[[int], None]]]:
    """A hub's folder with a project of runs, its person, and a function that lets the first run grow."""
    with TemporaryDirectory(prefix="hub-") as root, patch.dict(os.environ, {"XDG_STATE_HOME": f"{root}/state"}):
        with HubServer(Path(root) / "hub") as server:
            visitor = Visitor(server.port)
            visitor.set_password(add_person(server.folder, "ada"), "ada")
            visitor.make_project("runs")
            token = visitor.make_token("runs")
            log_in(server.address, token)
            for number in range(1, count + 1):
                push(folders.write_run(Path(root) / f"{number}", steps=STEPS, name=f"run {number}", seed=number))

        def grow(port: int) -> None:
            nonlocal steps
            log_in(f"http://127.0.0.1:{port}", token)
            with (Path(root) / "1" / "metrics.jsonl").open("a") as file:
                file.write(folders.rows(steps + 1, steps + GROWN))
            steps += GROWN
            push(Path(root) / "1")

        steps = STEPS
        yield server.folder, visitor, "runs", grow


def measure(rounds: int) -> Clicks:
    """Open pages in all situations, in turns."""
    clicks = Clicks()
    with seeded(max(rounds, RESTED_ON) + 2) as (folder, visitor, project, grow), ExitStack() as stack:
        hub = stack.enter_context(HubServer(folder, workers=2))
        slow = stack.enter_context(DelayingProxy(hub.port, TRIP))
        quick = stack.enter_context(DelayingProxy(hub.port, 0.0))
        tabs = stack.enter_context(Tabs())
        reader = partial(Reader, tabs, cookies=visitor.cookies, project=project)
        inside = {name: reader(proxy=slow, profile="desktop") for name in HOVERS}
        touching = reader(proxy=slow, profile="phone")
        alone = {}
        for name, options in ALONE.items():
            server = stack.enter_context(HubServer(folder, *options, workers=2))
            proxy = stack.enter_context(DelayingProxy(server.port, TRIP))
            alone[name] = reader(proxy=proxy, profile="desktop")

        def note(situation: str, opened: Opened) -> None:
            clicks.opened.setdefault(situation, []).append(opened)

        for number in range(2, rounds + 2):
            for profile in PROFILES:
                note(f"cold, {profile}", reader(proxy=slow, profile=profile).arrive(number))
            note("cold without delay", reader(proxy=quick, profile="desktop").arrive(number))
            for name, hover in HOVERS.items():
                inside[name].at_table(worker=True)
                note(name, inside[name].click(number, hover))
                inside[name].rest()
            touching.at_table(worker=True)
            note("touch", touching.tap(number))
            touching.rest()
            for name, person in alone.items():
                differs = name == "differences"
                if differs:
                    if number == 2:
                        person.at_table(worker=True)
                        person.click(1, 0.0)
                    grow(hub.port)
                size = person.at_table(worker=name in ("templates", "differences"))
                clicks.tables.setdefault(f"{name} alone", []).append(size)
                note(f"{name} alone", person.click(1 if differs else number, HOVERS["hover 300 ms"]))
                person.rest()
        _rest_in_vain(clicks, reader(proxy=slow, profile="desktop"))
    return clicks


def _rest_in_vain(clicks: Clicks, person: Reader) -> None:
    """Rest on links without opening them."""
    person.at_table(worker=True)
    time.sleep(5 * TRIP)
    before = person.proxy.received
    for run in range(1, RESTED_ON + 1):
        person.hover(run)
        time.sleep(3 * TRIP)
        if run == 1:
            time.sleep(2 * TRIP)
            clicks.one_link = person.proxy.received - before
    time.sleep(5 * TRIP)
    clicks.many_links = person.proxy.received - before


@cache
def clicks_of(rounds: int) -> Clicks:
    """The measurement, which all bars share."""
    return measure(rounds)


# -- bars -------------------------------------------------------------------------------------------------------------

PRELOADED = {**dict.fromkeys(HOVERS, "cold, desktop"), "touch": "cold, phone"}
"""Situations in which pages are fetched ahead, and the cold one with which each is compared."""


def _median(values: Sequence[float], note: str) -> Measured:
    """The median with its interval; too few values have none, so that no bar holds."""
    return of_median(values, note) if len(values) >= FEWEST_ROUNDS else Measured(statistics.median(values), note)


def _reached(measured: Callable[[Clicks], Measured], rounds: int, deadline: Deadline) -> Measured | NotRun:
    if CHROMIUM is None:
        return NotRun("no Chromium on this machine")
    return measured(clicks_of(rounds))


def _beside(situation: str, other: str, clicks: Clicks) -> Measured:
    """The median over the rounds of how much of the time of another situation one takes."""
    ratios = [a / b for a, b in zip(clicks.seconds(situation), clicks.seconds(other), strict=True)]
    return _median(ratios, f"{clicks.parts(situation)}; {clicks.parts(other)}")


def _slowest(clicks: Clicks) -> Measured:
    situation = max(PRELOADED, key=lambda name: statistics.median(clicks.seconds(name)))
    note = f"{clicks.parts(situation)}, the slowest of {len(PRELOADED)}; the button is down for {PRESS * 1000:.0f} ms"
    return _median(clicks.seconds(situation), note)


def _cold_trips(clicks: Clicks) -> Measured:
    """Round trips of each part of a cold page: how much longer it takes with a delay than without."""

    def trips(part: str) -> int:
        slow, quick = (
            statistics.median(getattr(one, part) for one in clicks.opened[name])
            for name in ("cold, desktop", "cold without delay")
        )
        return round((slow - quick) / TRIP)

    parts = {part: trips(part) for part in ("connection", "data", "template")}
    blocking = sorted({name for one in clicks.opened["cold, desktop"] for name in one.blocking})
    listed = ", ".join(f"{part} {count}" for part, count in parts.items())
    return Measured(sum(parts.values()), f"{listed}; nothing is painted before {', '.join(blocking)}")


def _templates(clicks: Clicks) -> Measured:
    """The bytes of a table with stored templates alone over those with none of the measures."""
    mine, none = (statistics.median(clicks.tables[f"{name} alone"]) for name in ("templates", "none"))
    note = f"tables: {mine:,.0f} of {none:,.0f} bytes; runs: {clicks.parts('templates alone')}"
    return Measured(mine / none, f"{note}; {clicks.parts('none alone')}")


def _differences(clicks: Clicks) -> Measured:
    """The bytes of opening a run again with differences alone over those with none of the measures."""
    mine, none = map(clicks.bytes_of, ("differences alone", "none alone"))
    return Measured(mine / none, f"{clicks.parts('differences alone')}; {clicks.parts('none alone')}")


def _wasted(clicks: Clicks) -> Measured:
    return Measured(clicks.many_links, f"one link: {clicks.one_link:,} bytes; headers are included")


def rows(rounds: int = ROUNDS) -> Iterator[Bar]:
    peers = ("django", "gunicorn")

    def bar(name: str, what: str, most: float, measured: Callable[[Clicks], Measured], **options: Any) -> Bar:
        return Bar(f"hub.open-{name}", what, "<=", most, partial(_reached, measured, rounds), peers=peers, **options)

    for situation, cold in PRELOADED.items():
        name = situation.replace(" ms", "").replace(" ", "-")
        words = "a touch" if situation == "touch" else f"a {situation.replace('hover', 'hover of')}"
        what = f"time from click to paint after {words} over that of a cold page, round trips of 100 ms"
        yield bar(name, what, 0.45, partial(_beside, situation, cold))
    what = "seconds from click to paint after the slowest hover or touch, round trips of 100 ms"
    yield bar("seconds", what, 0.5, _slowest)
    yield bar("trips", "round trips from click to paint of a cold page", 4, _cold_trips, kind="exact")
    what = "bytes of opening a table with stored templates alone over those with none of the three measures"
    yield bar("templates", what, 0.7, _templates, kind="exact")
    what = "bytes of opening a run again after 5 more steps, with differences alone, over those with none"
    yield bar("differences", what, 0.5, _differences, kind="exact")
    what = "time from click to paint with speculation rules alone over that with none of the three measures"
    yield bar("ahead", what, 1.0, partial(_beside, "ahead alone", "none alone"))
    what = f"bytes that a page fetches while the pointer rests on {RESTED_ON} links and opens none"
    yield bar("wasted", what, 400_000, _wasted, kind="exact")
