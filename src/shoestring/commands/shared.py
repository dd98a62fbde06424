"""Arguments that verbs of several modules share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

RunPath = Positional[Annotated[Path, arg(metavar="RUN")]]
"""Type of an argument that is the path of a run folder; `--help` shows it as RUN."""


@dataclass(frozen=True)
class TrainedRun:
    """Arguments that name the folder of a run."""

    run: RunPath
    """Run folder, as `shoestring train` wrote it."""
