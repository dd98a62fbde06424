"""checkpoint.everything: several faults at once, in runs that add up over calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured, stored
from tests.rigs.checkpointing.drawn_plans import smallest
from tests.rigs.checkpointing.everything import FaultPlan, Rig

RUNS, BATCH = 500, 10
MOST = 40  # plans that are tried to find a smaller one


class Batch:
    """Plans of one seed; a file keeps what became of them.

    Args:
        left: tells the seconds that are left; without any the batch ends early.
    """

    def __init__(self, left: Callable[[], float]) -> None:
        self.left = left
        self.runs = self.starts = self.refused = self.tried = 0
        self.struck, self.skipped = Counter[str](), Counter[str]()
        self.wrong: dict[str, list[str]] = {}
        """What was wrong with a plan; the first is the one that was drawn."""
        self._seen: dict[str, bool] = {}
        self._error: Exception | None = None

    def carry_out(self, seed: int) -> dict[str, Any]:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            rig = Rig(Path(folder))
            least = smallest(seed, BATCH, partial(self._fails, rig))
        if self._error is not None:  # of the rig itself, which hypothesis would take for a plan that fails
            raise self._error
        counted = {"runs": self.runs, "starts": self.starts, "refused": self.refused}
        faults = {"struck": dict(sorted(self.struck.items())), "skipped": dict(self.skipped)}
        told: dict[str, Any] = {"seed": seed, **counted, **faults}
        if self.wrong:
            plan, lines = next(iter(self.wrong.items()))
            told |= {"plan": json.loads(plan), "wrong": lines}
            told |= {"smallest": json.loads(least.dumps())} if least else {}
        return told

    def _fails(self, rig: Rig, plan: FaultPlan) -> bool:
        text = plan.dumps()
        if text in self._seen:
            return self._seen[text]
        if self._error is not None or self.tried == MOST or (not self.wrong and self.left() <= 0):
            return False
        try:
            outcome = rig.judge(plan)
        except Exception as error:
            self._error = error
            return False
        self._seen[text] = bool(outcome.wrong)
        if self.wrong:
            self.tried += 1
        else:
            self.runs, self.starts = self.runs + 1, self.starts + outcome.starts
            self.refused += outcome.refused
            self.struck.update(outcome.struck)
            self.skipped.update(outcome.skipped)
        if outcome.wrong:
            self.wrong[text] = list(outcome.wrong)
        return bool(outcome.wrong)


def measure(runs: Path, deadline: Deadline, _: Deadline) -> Measured:
    """How many of all runs went wrong; new seeds are drawn until there are enough runs."""
    seed, done = 0, list[dict[str, Any]]()
    while sum(each["runs"] for each in done) < RUNS:
        path = runs / f"seed-{seed:04d}.json"
        done.append(stored(path, deadline.check, partial(Batch(deadline.left).carry_out, seed)))
        seed += 1
    wrong = [each for each in done if "wrong" in each]
    struck, skipped = (sum((Counter(each[name]) for each in done), Counter[str]()) for name in ("struck", "skipped"))
    faults = ", ".join(f"{count} {name}" for name, count in sorted(struck.items()))
    told = f"{sum(each['runs'] for each in done)} runs, {sum(each['starts'] for each in done)} starts; {faults}"
    told += f"; skipped: {dict(skipped)}" if skipped else ""
    told += "".join(f"; seed {each['seed']}: {each['wrong'][0]}" for each in wrong[:3])
    return Measured(float(len(wrong)), told)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """The bar; what was done is kept in files below `runs`."""
    what = (
        f"{RUNS} runs of two ranks on one or two hosts, each under two to a dozen faults drawn by hypothesis: SIGKILL "
        "and SIGSTOP at named points, full disk, slow and cut connections, lost hosts, damaged files, a clock set back "
        "(skipped where libfaketime is not installed), two starts at the same time: runs that had another state than "
        "the undisturbed run, resumed from before what was safe and not lost since, or did not end in time"
    )
    return [Bar("checkpoint.everything", what, "<=", 0, partial(measure, runs, deadline), kind="exact")]
