"""The output of a run: the report page, the comparison of several runs, console lines and metric sinks.

`write` and `compare` need only the standard library; `report.console` also needs rich, and each tracker in
`report.trackers` needs an extra. Importing this package does not import torch.
"""

from __future__ import annotations

from shoestring.report.comparison import compare
from shoestring.report.page import write

__all__ = ["compare", "write"]
