"""Records shoestring's own spans (`core.trace.span`: communication, checkpoints, offload) as nodes of the call tree."""

from __future__ import annotations

import threading
from typing import Any

from shoestring.core.trace import span


class SpanListener:
    """Reports the beginning and end of each span to the native collector."""

    def __init__(self, library: Any) -> None:
        self.library, self.mine = library, threading.local()

    def begin(self, work: span, /) -> None:
        """Report the beginning of a span; called on the thread that runs the span."""
        if not hasattr(self.mine, "running"):
            self.mine.running = {}
        self.mine.running[id(work)] = self.library.callpaths_enter(work.name.encode())

    def end(self, work: span, /) -> None:
        """Report the end of a span, on the thread that began it; a span without a reported beginning is ignored."""
        running = getattr(self.mine, "running", {})
        if (entered := running.pop(id(work), None)) is not None:
            self.library.callpaths_leave(entered)
