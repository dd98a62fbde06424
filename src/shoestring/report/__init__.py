"""The output of a run: the report page, the comparison of several runs, console lines and metric sinks.

`write` and `compare` need nothing but the standard library; `report.console` adds rich, and
each tracker in `report.trackers` an extra. Nothing here imports torch at import time.
"""

from __future__ import annotations

from shoestring.report.comparison import compare
from shoestring.report.page import write

__all__ = ["compare", "write"]
