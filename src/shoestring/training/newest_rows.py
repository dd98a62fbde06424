"""Let checkpoints hold the metrics that metrics.jsonl still lacks, so that a resumed run can write them.

The checkpoint of a step is made before the step's row is written to metrics.jsonl. On an accelerator, whose metrics are
read one step late, the previous step's row is not written yet either. If the process were killed at that point, these
rows would still be missing after the run has resumed. So a checkpoint holds the rows that are not written yet (one or
two rows of a few hundred bytes), and the resumed run writes the rows that the file lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.core.job import Job, attachments_of
from shoestring.report.sinks import JsonLines, newest_step

NAME = "metrics"
"""Name of this state in a checkpoint."""


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of one step. Values that an accelerator is still computing are tensors."""

    step: int
    values: Mapping[str, float | Tensor]


class NewestRows:
    """State for checkpoints: the newest rows of metrics, which metrics.jsonl may lack. Only the first rank has rows."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.unwritten: Callable[[], Iterable[MetricsRow]] = tuple
        """Function that returns the rows that are not written yet; the throughput meter sets it."""
        self.unread: Tensor | None = None
        """Values of the saved rows that are still on the accelerator, as a tensor of shape (values,); None if none."""
        self.restored: list[MetricsRow] = []
        job.keep(NAME, self, across="own", merge=_merge_states)

    def state_dict(self) -> dict[str, Any]:
        defers = attachments_of(self.job).defers
        rows, unread = [], []
        for row in self.unwritten() if self.job.world.first else ():
            late = {name: value for name, value in row.values.items() if isinstance(value, Tensor) and defers}
            known = {name: float(value) for name, value in row.values.items() if name not in late}
            rows.append({"step": row.step, "values": {"time": time.time()} | known, "unread": list(late)})
            unread += late.values()
        self.unread = torch.stack([value.detach().float() for value in unread]) if unread else None
        return {"rows": rows} if self.unread is None else {"rows": rows, "unread": self.unread}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows. If another version wrote the state in a different form, ignore it; its rows are lost."""
        self.restored = []
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            unread = iter(state_dict["unread"].tolist() if "unread" in state_dict else ())
            for row in state_dict["rows"]:
                values = row["values"] | {name: next(unread) for name in row["unread"]}
                self.restored.append(
                    MetricsRow(int(row["step"]), {name: float(value) for name, value in values.items()})
                )

    def write_missing(self, file: JsonLines) -> None:
        """Append the restored rows to the file, except for steps that the file already has."""
        written = newest_step(file.path)
        for row in self.restored:
            if row.step > written:
                file.write(row.step, {name: float(value) for name, value in row.values.items()})


def _merge_states(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Give the rows of the former first rank to the new first rank; other ranks have no rows."""
    return states[0] if rank == 0 else {"rows": []}
