"""Spans of shoestring's own (`core.trace.span`: communication, checkpoints, offload) are nodes as torch's are."""

from __future__ import annotations

import threading
from typing import Any

from shoestring.core.trace import span


class SpanListener:
    """Has the native collector record each span, by its name, where it is."""

    def __init__(self, library: Any) -> None:
        self.library, self.mine = library, threading.local()

    def begin(self, work: span, /) -> None:
        """On the span's own thread."""
        if not hasattr(self.mine, "running"):
            self.mine.running = {}
        self.mine.running[id(work)] = self.library.callpaths_enter(work.name.encode())

    def end(self, work: span, /) -> None:
        """On the same thread, where it began before we listened, too."""
        running = getattr(self.mine, "running", {})
        if (entered := running.pop(id(work), None)) is not None:
            self.library.callpaths_leave(entered)
