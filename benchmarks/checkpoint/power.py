"""checkpoint.power: what a power loss during checkpoints could leave on the disk."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, Deadline, Measured
from tests.rigs.checkpointing.power_loss import recorded, replayed


def rows(cache: Path | None = None) -> list[Bar]:
    """The bar: one rank and two."""

    def measure(deadline: Deadline) -> Measured:
        states, wrong = 0, list[str]()
        for ranks in (1, 2):
            deadline.check()
            with TemporaryDirectory() as folder:
                story = recorded(Path(folder) / "story", ranks)
                found = list(replayed(story, Path(folder) / "states", restore=ranks == 1))
            states, wrong = states + len(found), wrong + [line for lines in found for line in lines]
        return Measured(float(len(wrong)), f"{states} different states{'; ' if wrong else ''}{'; '.join(wrong[:3])}")

    what = (
        "states of the disk that a power loss during four saves could leave (all prefixes; of what is not synced "
        "nothing, all, each act, 64 seeded subsets, pages) in which the newest commit is lost or another one found"
    )
    return [Bar("checkpoint.power", what, "<=", 0.0, measure, kind="exact")]
