"""The newest rows of metrics, kept in every checkpoint.

A checkpoint of a step is made before the row of that step is written to metrics.jsonl; on an accelerator, whose
numbers are read one step late, before that of the step before as well. A process that is killed in between would
resume after steps whose rows nobody has. So a checkpoint holds the rows that were not written when it was made, one or
two of a few hundred bytes each, and the run that resumes writes those that the file lacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.core.job import Job
from shoestring.report.sinks import JsonLines, newest_step

NAME = "metrics"
"""Of this state in a checkpoint."""


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of one step; tensors where reading them would wait for an accelerator."""

    step: int
    values: Mapping[str, float | Tensor]


class NewestRows:
    """The rows of the first rank that its metrics.jsonl may lack."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.unwritten: Callable[[], Iterable[MetricsRow]] = tuple
        """Gives the rows that are not written yet; the throughput meter sets it."""
        self.unread: Tensor | None = None
        """What nobody has read of the rows that were saved last: (numbers,) on the accelerator, not waited for."""
        self.restored: list[MetricsRow] = []
        job.keep(NAME, self, across="own", merge=_of_the_first_rank)

    def state_dict(self) -> dict[str, Any]:
        rows, unread = [], []
        for row in self.unwritten() if self.job.world.first else ():
            late = {name: value for name, value in row.values.items() if self._is_late(value)}
            known = {name: float(value) for name, value in row.values.items() if name not in late}
            rows.append({"step": row.step, "values": {"time": time.time()} | known, "unread": list(late)})
            unread += late.values()
        self.unread = torch.stack([value.detach().float() for value in unread]) if unread else None
        return {"rows": rows} if self.unread is None else {"rows": rows, "unread": self.unread}

    def _is_late(self, value: float | Tensor) -> bool:
        return isinstance(value, Tensor) and self.job.defers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows; a state that another version wrote differently costs its rows only."""
        self.restored = []
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            unread = iter(state_dict["unread"].tolist() if "unread" in state_dict else ())
            for row in state_dict["rows"]:
                values = row["values"] | {name: next(unread) for name in row["unread"]}
                self.restored.append(
                    MetricsRow(int(row["step"]), {name: float(value) for name, value in values.items()})
                )

    def write_missing(self, file: JsonLines) -> None:
        """Append the restored rows of steps after the last one in the file."""
        written = newest_step(file.path)
        for row in self.restored:
            if row.step > written:
                file.write(row.step, {name: float(value) for name, value in row.values.items()})


def _of_the_first_rank(states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
    return states[0] if rank == 0 else {"rows": []}
