"""Records shoestring's own spans (`core.trace.span`: communication, checkpoints, offload) as nodes of the tree."""

from __future__ import annotations

import threading
from typing import Any

from shoestring.core.trace import span


class SpanListener:
    """Passes the beginning and end of each span to the native collector."""

    def __init__(self, library: Any) -> None:
        self.library, self.mine = library, threading.local()

    def begin(self, work: span, /) -> None:
        """Begin a span on the thread that runs it."""
        if not hasattr(self.mine, "running"):
            self.mine.running = {}
        self.mine.running[id(work)] = self.library.callpaths_enter(work.name.encode())

    def end(self, work: span, /) -> None:
        """End a span, on the same thread; a span that began before listening started is ignored."""
        running = getattr(self.mine, "running", {})
        if (entered := running.pop(id(work), None)) is not None:
            self.library.callpaths_leave(entered)
