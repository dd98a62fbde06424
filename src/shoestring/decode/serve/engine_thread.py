"""The thread that owns the engine. Requests and cancellations reach it through a queue, tokens go back to asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from shoestring.core.errors import ShoestringError
from shoestring.decode.engine import Engine
from shoestring.decode.request import Ending, Request, Row, TokenLogprob

log = logging.getLogger("shoestring.serve")


@dataclass(frozen=True)
class News:
    """What became of a text since the last news of it."""

    index: int
    """Which text of its batch."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """As many as `tokens`, where they are wanted."""
    ending: Ending | None = None
    error: ShoestringError | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """With the first news, where they are wanted."""
    reused: int = 0
    """Tokens of the prompt that were in the cache."""
    drafted: Sequence[int] = ()
    """The tokens that were drafted for these."""
    accepted: int = 0
    """How many of them, from the first on, stayed."""


class Batch:
    """The texts that one HTTP request asks for. Its attributes but `rows` belong to asyncio, `rows` to the engine."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.rows: list[Row] = []


class EngineThread:
    """An engine in a thread of its own. All methods are called by the thread of the event loop.

    Args:
        engine: used by nobody else until `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.unfinished = 0
        """Texts that are generated or wait."""
        self.failures = 0
        """Passes that have raised an error."""
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._places: dict[Row, tuple[Batch, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="shoestring-engine", daemon=True)

    def start(self) -> None:
        """Begin; news go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the pass that it is in; texts that are not finished get no more news."""
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    @property
    def alive(self) -> bool:
        """Whether texts can be generated."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Take texts to generate."""
        batch = Batch(requests)
        self.unfinished += len(requests)
        self._orders.put(partial(self._seat, batch))
        return batch

    def cancel(self, batch: Batch, index: int | None = None) -> None:
        """End what is unfinished of it, or one of its texts, which frees slots before the next pass."""
        self._orders.put(partial(self._cancel, batch, index))

    def cancel_all(self) -> None:
        """End every text."""
        self._orders.put(lambda: self._cut(list(self._places)))

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(block=not self.engine.busy)
            except Empty:
                self._step()
                continue
            if order is None:
                return
            order()

    def _step(self) -> None:
        try:
            changed = self.engine.step()
        except Exception:  # whatever a model raises, such as a lack of memory: its texts fail, the server goes on
            log.exception("a pass of the model failed")
            self.failures += 1
            changed = list(self._places)
            for row in changed:
                self.engine.cancel(row)
                row.ending = "failed"
        # Texts that end before they have a slot are not among those that a pass has changed.
        ended = [row for row in self._places if row.ending is not None and row not in changed]
        self._report([*changed, *ended])

    def _seat(self, batch: Batch) -> None:
        batch.rows = [self.engine.submit(request) for request in batch.requests]
        self._places |= {row: (batch, index) for index, row in enumerate(batch.rows)}
        self._report([row for row in batch.rows if row.ending is not None])

    def _cancel(self, batch: Batch, index: int | None) -> None:
        rows = batch.rows if index is None else [batch.rows[index]]
        self._cut([row for row in rows if row.ending is None])

    def _cut(self, running: Sequence[Row]) -> None:
        for row in running:
            self.engine.cancel(row)
        self._report(running)

    def _report(self, rows: Iterable[Row]) -> None:
        news = []
        for row in rows:
            batch, index = self._places[row]
            # What a text was given last is told already where it is cut off.
            fresh = [] if row.ending in ("cancelled", "failed") else row.fresh
            first = len(row) == len(fresh)
            told = News(
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
            news.append((batch, told))
            if row.ending is not None:
                del self._places[row]
        if news and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._deliver, news)

    # ------------------------------------------------------------------------------------------------------------------

    def _deliver(self, news: Sequence[tuple[Batch, News]]) -> None:
        for batch, told in news:
            if told.ending is not None:
                self.unfinished -= 1
            batch.news.put_nowait(told)
