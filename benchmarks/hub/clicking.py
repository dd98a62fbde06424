"""Clicks on links of the hub in a browser, over a connection with a long round trip, and what they consist of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from tests.browser import Browser

TRIP = 0.1
"""Seconds of a round trip."""
PRESS = 0.08
"""Seconds from pressing to releasing a button or a finger, at which the click happens."""
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
  const needed = files.filter((one) => /script|link/.test(one.initiatorType) && one.responseEnd < painted);
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
