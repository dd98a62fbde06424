"""What each rank calls in the tests of verbs that need several."""

from pathlib import Path

from shoestring import run
from shoestring.testing.scenarios import here
from shoestring.verbs.plan import describe, plan


def planned(source: str, out: str) -> list[str]:
    """Plan a run, and describe it."""
    world = here()
    return list(describe(plan(run.load(source, trusted=False), world, Path(out)), world))
