"""How fast pages open, from the click to the paint, over a connection with a round trip of 100 ms.

A proxy between browser and hub holds all bytes back for half a round trip, and the first bytes of a connection for one
more, as its handshake would take. Bandwidth is not limited. The mouse stays down for `PRESS` seconds, a finger as well.

*Cold* is a link outside of the hub, in a profile that is empty but for the session. All others are clicks on a run in
a table of the hub, whose page was not opened before in this profile.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.calm import BusyMachineError, was_calm
from benchmarks.harness import Deadline
from benchmarks.hub.clicking import PRESS, PROFILES, TRIP, DelayingProxy, Opened, Reader, Tabs
from benchmarks.intervals import of_median
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.timing import FEWEST_ROUNDS
from shoestring_hub.client.logins import log_in
from shoestring_hub.client.push import push
from tests.browser import CHROMIUM
from tests.rigs.hub import folders
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor, add_person

ROUNDS, SPARE = 30, 20
"""Rounds that are measured, and runs to open in place of those in whose round the machine was busy."""
STEPS, GROWN = 300, 5
"""Steps that each run has logged, and steps that the run gains between two visits whose difference is measured."""
HOVERS = {"hover 0 ms": 0.0, "hover 100 ms": 0.1, "hover 300 ms": 0.3}
ALONE = {
    "none": ("--no-keep-templates", "--no-send-differences", "--no-fetch-ahead"),
    "templates": ("--no-send-differences", "--no-fetch-ahead"),
    "differences": ("--no-keep-templates", "--no-fetch-ahead"),
    "ahead": ("--no-keep-templates", "--no-send-differences"),
}
"""Options of hubs that have none of the three measures, or one."""
RESTED_ON = 30
"""Links on which the pointer rests in vain."""


# -- all situations ---------------------------------------------------------------------------------------------------


@dataclass
class Clicks:
    """What was measured: clicks by their situation, and bytes that were fetched ahead in vain."""

    opened: dict[str, list[Opened]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of opening the table, with one measure alone or none."""
    one_link: int = 0
    """Bytes of a link on which the pointer rested."""
    many_links: int = 0
    """Bytes of a page on whose links the pointer rested one after the other."""

    def add(self, others: Clicks) -> None:
        """Add the clicks of another round."""
        for situation, opened in others.opened.items():
            self.opened.setdefault(situation, []).extend(opened)
        for situation, sizes in others.tables.items():
            self.tables.setdefault(situation, []).extend(sizes)

    def seconds(self, situation: str) -> list[float]:
        return [one.seconds for one in self.opened[situation]]

    def parts(self, situation: str) -> str:
        """The medians of what the clicks of a situation consist of, in milliseconds."""
        medians = {
            name: round(1000 * statistics.median(getattr(one, name) for one in self.opened[situation]))
            for name in ("seconds", "connection", "template", "data", "paint")
        }
        whole, *parts = medians.items()
        size = self.bytes_of(situation) / 1000
        return f"{situation}: {whole[1]} ms ({', '.join(f'{name} {value}' for name, value in parts)}), {size:.1f} kB"

    def bytes_of(self, situation: str) -> float:
        """The median of the bytes of a click."""
        return statistics.median(one.received for one in self.opened[situation])


@contextmanager
def seeded(count: int) -> Iterator[tuple[Path, Visitor, str, Callable[[int], None]]]:
    """A hub's folder with a project of runs, its person, and a function that lets the first run grow."""
    with TemporaryDirectory(prefix="hub-") as root, patch.dict(os.environ, {"XDG_STATE_HOME": f"{root}/state"}):
        with HubServer(Path(root) / "hub") as server:
            visitor = Visitor(server.port)
            visitor.set_password(add_person(server.folder, "ada"), "ada")
            visitor.make_project("runs")
            token = visitor.make_token("runs")
            log_in(server.address, token)
            for number in range(1, count + 1):
                push(folders.write_run(Path(root) / f"{number}", steps=STEPS, name=f"run {number}", seed=number))

        def grow(port: int) -> None:
            nonlocal steps
            log_in(f"http://127.0.0.1:{port}", token)
            with (Path(root) / "1" / "metrics.jsonl").open("a") as file:
                file.write(folders.rows(steps + 1, steps + GROWN))
            steps += GROWN
            push(Path(root) / "1")

        steps = STEPS
        yield server.folder, visitor, "runs", grow


@dataclass
class People:
    """Readers of one project, each with a profile of its own, which lasts from round to round."""

    arriving: dict[str, Reader]
    """By their situation, those whose profile is empty each time."""
    inside: dict[str, Reader]
    touching: Reader
    alone: dict[str, Reader]
    """Readers of hubs that have one of the measures, or none."""
    grow: Callable[[], None]
    """Lets run 1 grow."""

    def click(self, number: int) -> Clicks:
        """Open a run in all situations."""
        clicks = Clicks()
        for situation, person in self.arriving.items():
            clicks.opened[situation] = [person.arrive(number)]
        for situation, person in self.inside.items():
            person.at_table(worker=True)
            clicks.opened[situation] = [person.click(number, HOVERS[situation])]
            person.rest()
        self.touching.at_table(worker=True)
        clicks.opened["touch"] = [self.touching.tap(number)]
        self.touching.rest()
        for name, person in self.alone.items():
            if name == "differences":
                self.grow()
            clicks.tables[f"{name} alone"] = [person.at_table(worker=name in ("templates", "differences"))]
            opened = person.click(1 if name == "differences" else number, HOVERS["hover 300 ms"])
            clicks.opened[f"{name} alone"] = [opened]
            person.rest()
        return clicks


def measure(rounds: int) -> Clicks:
    """Open pages in all situations, in turns, as often as there are rounds in which the machine is calm.

    Raises:
        BusyMachineError: too many rounds were disturbed.
    """
    clicks, runs = Clicks(), max(rounds, RESTED_ON) + SPARE
    with seeded(runs) as (folder, visitor, project, grow), ExitStack() as stack:
        tabs = stack.enter_context(Tabs())

        def reader(port: int, profile: str = "desktop", trip: float = TRIP) -> Reader:
            proxy = stack.enter_context(DelayingProxy(port, trip))
            return Reader(tabs, proxy, visitor.cookies, project, profile)

        hub = stack.enter_context(HubServer(folder, workers=2))
        arriving = {f"cold, {profile}": reader(hub.port, profile) for profile in PROFILES}
        arriving["cold without delay"] = reader(hub.port, trip=0.0)
        others = {name: stack.enter_context(HubServer(folder, *options, workers=2)) for name, options in ALONE.items()}
        people = People(
            arriving,
            {name: reader(hub.port) for name in HOVERS},
            reader(hub.port, "phone"),
            {name: reader(server.port) for name, server in others.items()},
            partial(grow, hub.port),
        )
        person = people.alone["differences"]
        person.at_table(worker=True)
        person.click(1, 0.0)
        done = 0
        for number in range(2, runs):
            opened = people.click(number)
            warming_up = number == 2 and rounds > 1  # profiles are still empty
            if was_calm() and not warming_up:
                clicks.add(opened)
                done += 1
            if done == rounds:
                break
        else:
            raise BusyMachineError(f"only {done} of {rounds} rounds were calm")
        _rest_in_vain(clicks, reader(hub.port))
    return clicks


def _rest_in_vain(clicks: Clicks, person: Reader) -> None:
    """Rest on links without opening them."""
    person.at_table(worker=True)
    time.sleep(5 * TRIP)
    before = person.proxy.received
    for run in range(1, RESTED_ON + 1):
        person.hover(run)
        time.sleep(3 * TRIP)
        if run == 1:
            time.sleep(2 * TRIP)
            clicks.one_link = person.proxy.received - before
    time.sleep(5 * TRIP)
    clicks.many_links = person.proxy.received - before


@cache
def clicks_of(rounds: int) -> Clicks:
    """The measurement, which all bars share."""
    return measure(rounds)


# -- bars -------------------------------------------------------------------------------------------------------------

PRELOADED = {**dict.fromkeys(HOVERS, "cold, desktop"), "touch": "cold, phone"}
"""Situations in which pages are fetched ahead, and the cold one with which each is compared."""


def _median(values: Sequence[float], note: str) -> Measured:
    """The median with its interval; too few values have none, so that no bar holds."""
    return of_median(values, note) if len(values) >= FEWEST_ROUNDS else Measured(statistics.median(values), note)


def _reached(measured: Callable[[Clicks], Measured], rounds: int, deadline: Deadline) -> Measured | NotRun:
    if CHROMIUM is None:
        return NotRun("no Chromium on this machine")
    return measured(clicks_of(rounds))


def _beside(situation: str, other: str, clicks: Clicks) -> Measured:
    """The median over the rounds of how much of the time of another situation one takes."""
    ratios = [a / b for a, b in zip(clicks.seconds(situation), clicks.seconds(other), strict=True)]
    return _median(ratios, f"{clicks.parts(situation)}; {clicks.parts(other)}")


def _slowest(clicks: Clicks) -> Measured:
    situation = max(PRELOADED, key=lambda name: statistics.median(clicks.seconds(name)))
    note = f"{clicks.parts(situation)}, the slowest of {len(PRELOADED)}; the button is down for {PRESS * 1000:.0f} ms"
    return _median(clicks.seconds(situation), note)


def _cold_trips(clicks: Clicks) -> Measured:
    """Round trips of each part of a cold page: how much longer it takes with a delay than without."""

    def trips(part: str) -> int:
        slow, quick = (
            statistics.median(getattr(one, part) for one in clicks.opened[name])
            for name in ("cold, desktop", "cold without delay")
        )
        return round((slow - quick) / TRIP)

    parts = {part: trips(part) for part in ("connection", "data", "template")}
    blocking = sorted({name for one in clicks.opened["cold, desktop"] for name in one.blocking})
    listed = ", ".join(f"{part} {count}" for part, count in parts.items())
    return Measured(sum(parts.values()), f"{listed}; nothing is painted before {', '.join(blocking)}")


def _templates(clicks: Clicks) -> Measured:
    """The bytes of a table with stored templates alone over those with none of the measures."""
    mine, none = (statistics.median(clicks.tables[f"{name} alone"]) for name in ("templates", "none"))
    note = f"tables: {mine:,.0f} of {none:,.0f} bytes; runs: {clicks.parts('templates alone')}"
    return Measured(mine / none, f"{note}; {clicks.parts('none alone')}")


def _differences(clicks: Clicks) -> Measured:
    """The bytes of opening a run again with differences alone over those with none of the measures."""
    mine, none = map(clicks.bytes_of, ("differences alone", "none alone"))
    return Measured(mine / none, f"{clicks.parts('differences alone')}; {clicks.parts('none alone')}")


def _wasted(clicks: Clicks) -> Measured:
    return Measured(clicks.many_links, f"one link: {clicks.one_link:,} bytes; headers are included")


def rows(rounds: int = ROUNDS) -> Iterator[Bar]:
    peers = ("django", "gunicorn")

    def bar(name: str, what: str, most: float, measured: Callable[[Clicks], Measured], **options: Any) -> Bar:
        return Bar(f"hub.open-{name}", what, "<=", most, partial(_reached, measured, rounds), peers=peers, **options)

    for situation, cold in PRELOADED.items():
        name = situation.replace(" ms", "").replace(" ", "-")
        words = "a touch" if situation == "touch" else f"a {situation.replace('hover', 'hover of')}"
        what = f"time from click to paint after {words} over that of a cold page, round trips of 100 ms"
        yield bar(name, what, 0.45, partial(_beside, situation, cold))
    what = "seconds from click to paint after the slowest hover or touch, round trips of 100 ms"
    yield bar("seconds", what, 0.5, _slowest)
    yield bar("trips", "round trips from click to paint of a cold page", 4, _cold_trips, kind="exact")
    what = "bytes of opening a table with stored templates alone over those with none of the three measures"
    yield bar("templates", what, 0.7, _templates, kind="exact")
    what = "bytes of opening a run again after 5 more steps, with differences alone, over those with none"
    yield bar("differences", what, 0.5, _differences, kind="exact")
    what = "time from click to paint with speculation rules alone over that with none of the three measures"
    yield bar("ahead", what, 1.0, partial(_beside, "ahead alone", "none alone"))
    what = f"bytes that a page fetches while the pointer rests on {RESTED_ON} links and opens none"
    yield bar("wasted", what, 400_000, _wasted, kind="exact")
