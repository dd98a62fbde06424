"""The thread that runs the engine: receives requests and cancellations through a queue, and sends tokens back to the
event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread

from shoestring.core.errors import NonFiniteError
from shoestring.decode.engine import Engine
from shoestring.decode.request import Ending, Request, Row, TokenLogprob

log = logging.getLogger("shoestring.serve")

PROMPT = 17
"""Number of prompt tokens in the warm-up: more than the native layers accept for a row (`skinny.FEW_ROWS`), so that the
modules themselves run as well."""
BACKLOG = 1 << 17
"""Largest number of tokens that may wait for one client to read them, including tokens listed in log-probabilities;
about 20 MiB of memory."""


@dataclass(frozen=True)
class News:
    """The progress of a text since it was last reported."""

    index: int
    """Index of the text in its batch."""
    tokens: list[int]
    """New tokens."""
    logprobs: list[TokenLogprob]
    """Log-probability of each of `tokens`; empty unless requested."""
    ending: Ending | None = None
    """Why the text ended; None if it continues."""
    error: Exception | None = None
    """Error that made the text fail; None if it has not failed."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the prompt, if requested; only in the first report on the text."""
    reused: int = 0
    """Number of tokens of the prompt that were in the cache."""
    drafted: Sequence[int] = ()
    """Tokens that were drafted for the newest pass."""
    accepted: int = 0
    """Number of tokens in `drafted` that were accepted."""

    @property
    def size(self) -> int:
        """Number of tokens in this report, including tokens listed in log-probabilities."""
        entries = (*self.logprobs, *self.prompt_logprobs)
        return 1 + len(self.tokens) + sum(1 + len(entry.top) for entry in entries)


class Batch:
    """The texts of one HTTP request. The engine's thread owns `rows`; the event loop owns the other attributes."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.rows: list[Row] = []
        self.size = 0
        """Total `size` of the reports in `news`."""
        self.overrun = False
        """Whether more than `BACKLOG` tokens have waited to be taken; the texts are then cancelled, and further reports
        are dropped."""

    async def take(self) -> News:
        """Wait for the next report."""
        news = await self.news.get()
        self.size -= news.size
        return news

    def put(self, news: News) -> None:
        """Add a report."""
        self.size += news.size
        self.news.put_nowait(news)


class EngineThread:
    """Runs an engine in a separate thread. All public methods must be called from the event loop's thread.

    Args:
        engine: the engine, which nothing else may use until `close`.
        warm_up: whether to generate a short text before the first request, so that kernels are loaded and memory is in
            use by then.
    """

    def __init__(self, engine: Engine, *, warm_up: bool = False) -> None:
        self.engine, self._warm_up = engine, warm_up
        self.unfinished = 0
        """Number of texts that are being generated or waiting."""
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._places: dict[Row, tuple[Batch, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warm = Event()
        self._thread = Thread(target=self._run, name="shoestring-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which reports to the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def warm(self) -> None:
        """Wait until the warm-up has ended, so that the first request is as fast as later requests."""
        await asyncio.to_thread(self._warm.wait)

    async def close(self) -> None:
        """End the thread after its current pass; nothing more is reported on unfinished texts."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Queue texts for generation."""
        batch = Batch(requests)
        self.unfinished += len(requests)

        def seat() -> None:  # in the engine's thread
            batch.rows = [self.engine.submit(request) for request in batch.requests]
            self._places |= {row: (batch, index) for index, row in enumerate(batch.rows)}
            self._report([row for row in batch.rows if row.ending is not None])

        self._orders.put(seat)
        return batch

    def cancel(self, batch: Batch, index: int | None = None) -> None:
        """Cancel the unfinished texts of a batch, or only the text `index`; the slots are freed before the next
        pass."""

        def cancel_rows() -> None:  # in the engine's thread
            rows = batch.rows if index is None else [batch.rows[index]]
            self._cut([row for row in rows if row.ending is None])

        self._orders.put(cancel_rows)

    def cancel_all(self) -> None:
        """Cancel every text."""
        self._orders.put(lambda: self._cut(list(self._places)))

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._warm_up:
            try:
                self.engine.submit(Request(tokens=[0] * max(1, min(PROMPT, self.engine.window - 2)), max_new=2))
                while self.engine.busy:
                    self.engine.step()
            except Exception:  # a client whose request causes the same error will see it
                log.exception("a text could not be generated beforehand")
            self.engine.counts.reset()
        self._warm.set()
        while True:
            try:
                order = self._orders.get(block=not self.engine.busy)
            except Empty:
                self._step()
                continue
            if order is None:
                return
            try:
                order()
            except Exception:  # other requests must still be served
                log.exception("the engine could not carry out an order")

    def _step(self) -> None:
        try:
            changed = self.engine.step()
        except Exception:  # the engine itself handles errors of single texts; the server survives all others
            log.exception("a pass of the engine failed")
            self.engine.counts.failed += 1
            changed = list(self._places)
            for row in changed:
                self.engine.cancel(row)
                row.ending = "failed"
        for row in changed:
            if row.error is not None and not isinstance(row.error, NonFiniteError):
                log.error("a pass of the model failed", exc_info=row.error)
        # Texts that end before they get a slot are not in `changed`.
        ended = [row for row in self._places if row.ending is not None and row not in changed]
        self._report([*changed, *ended])

    def _cut(self, running: Sequence[Row]) -> None:
        """Cancel running texts, and report their end."""
        for row in running:
            self.engine.cancel(row)
        self._report(running)

    def _report(self, rows: Iterable[Row]) -> None:
        """Send the progress of some texts to the event loop."""
        news = []
        for row in rows:
            batch, index = self._places[row]
            # A cancelled or failed text has no new tokens: `row.fresh` was already reported after an earlier pass.
            fresh = [] if row.ending in ("cancelled", "failed") else row.fresh
            first = len(row) == len(fresh)
            progress = News(
                index,
                fresh,
                row.logprobs[: len(fresh)],
                row.ending,
                row.error,
                row.prompt_logprobs if first else (),
                row.reused,
                row.drafted,
                row.accepted,
            )
            news.append((batch, progress))
            if row.ending is not None:
                del self._places[row]
        if news and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver, news)

    # -- in the event loop's thread ------------------------------------------------------------------------------------

    def _deliver(self, news: Sequence[tuple[Batch, News]]) -> None:
        for batch, progress in news:
            if progress.ending is not None:
                self.unfinished -= 1
            if batch.size + progress.size > BACKLOG and batch.size and not batch.overrun:
                batch.overrun = True
                self.cancel(batch)
            if not batch.overrun:
                batch.put(progress)
