"""Fills a hub with runs, in a process of its own: `python -m benchmarks.hub.seeds FOLDER`."""

from __future__ import annotations

import random
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from shoestring_hub.protocol import LOG_PART
from shoestring_hub.server.configure import Place, configure
from tests.rigs.hub.visitor import PASSWORD

SETTINGS, METRICS = 60, 12
LONG, POINTS = 20, 100_000
"""Runs with long logs, and rows of each."""


def seed(folder: Path) -> None:
    """Make the projects `small` of 1,000 runs, `large` of 10,000 and `long` of 20 runs of 100,000 rows."""
    configure(Place(folder))
    from shoestring_hub.server.serve import prepare

    prepare()
    from shoestring_hub.server.access import Access
    from shoestring_hub.server.models import Member, Person, Project, Role

    person: Any = Person.objects.create_user("ada", password=PASSWORD)
    for slug in ("small", "large", "long", "live"):
        project = Project.objects.create(slug=slug)
        Member.objects.create(project=project, person=person, role=Role.OWNER)
        if slug in ("small", "large"):
            _table(project, person, 1_000 if slug == "small" else 10_000)
        if slug == "long":
            _logs(Access(person, project, Role.OWNER))


def _table(project: Any, person: Any, count: int) -> None:
    from shoestring_hub.server.models import HubRun, RunValue, ValueKey

    draw = random.Random(count)
    names = [(ValueKey.SETTING, f"area{n % 9}.technique.key{n}") for n in range(SETTINGS)]
    names += [(ValueKey.METRIC, name) for name in ("loss", "held_out_loss", "tokens_per_second", "lr")]
    names += [(ValueKey.METRIC, f"metric_{n}") for n in range(METRICS - 4)]
    keys = ValueKey.objects.bulk_create(ValueKey(project=project, kind=kind, name=name) for kind, name in names)
    runs = HubRun.objects.bulk_create(
        HubRun(
            project=project, number=n + 1, key=uuid.uuid4().hex, name=f"run {n % 97}", person=person, status="finished"
        )
        for n in range(count)
    )
    for start in range(0, count, 500):
        numbers = ((run, key, draw.random()) for run in runs[start : start + 500] for key in keys)
        RunValue.objects.bulk_create(
            (RunValue(run=run, key=key, text=f"{number:.4g}", number=number) for run, key, number in numbers),
            batch_size=5000,
        )


def _logs(access: Any) -> None:
    from shoestring_hub.server import logs, runs

    for number in range(LONG):
        drawn = np.random.default_rng(number).normal(size=POINTS).tolist()
        lines = (
            f'{{"step": {step}, "time": {1e9 + step}, "loss": {3 + value:.5f}}}\n'
            for step, value in enumerate(drawn, 1)
        )
        run, data, size = runs.open_run(access, uuid.uuid4().hex, f"long {number}"), "".join(lines).encode(), 0
        while size < len(data):
            size = logs.splice(run, data[size : size + LOG_PART], at=size, have=size, attempt=0)


if __name__ == "__main__":
    seed(Path(sys.argv[1]))
