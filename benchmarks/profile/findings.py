"""How well the analyses of a profile find planted faults, and how well they predict what the fix gains.

Programs of `planted_by_author` were written by the author of the analyses, those of `planted` and of `blind2` by
somebody who had not seen them. The author saw what was found in `planted` and mended the analyses by it; `blind2` was
written after that. `blind3` and `blind4` were written later, each by somebody else who had not seen them, and have bars
of their own; when `blind4` was, the analyses had been mended by what was missed in `blind3`. `blind5` holds programs of
the kind that people post when they ask why training is slow; nothing was mended by it.
Every program and every twin is profiled once; the gain is measured without a profile, program and twin in alternation.
What was found and measured is stored program by program, each in a file of its own, and is measured again only where
that is missing.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Measured, paired, stored
from benchmarks.intervals import of_median, of_share
from benchmarks.timing import FEWEST_ROUNDS

ROOT = Path(__file__).parents[2]
ROUNDS = 6
BLIND_RECALL = "first, before the analyses were mended: 22 of 29 (one of the others by a wrong label)"
BLIND_ALARMS = "first, before the analyses were mended: 8 of 55 (three of them by faulty programs)"
BLIND_COVERAGE = "first, before the analyses were mended: 4 of 19, on a busy machine"
UNSEEN, SEEN = ("blind2",), ("blind", "author")
OWN_BARS = {"third": "blind3", "fourth": "blind4", "fifth": "blind5"}
"""Sets of programs with bars of their own, by the number in the bars' names."""
WHEN_NEW = {
    "third": "0.50 when it was new; mended by it since",
    "fourth": "0.65 when it was new; mended by it since",
    "fifth": "as it was when it was new",
}


@dataclass(frozen=True)
class Found:
    """A finding in a program."""

    analysis: str
    file: str
    line: int
    gain: tuple[float, float] | None


@dataclass(frozen=True)
class Judged:
    """A program with a fault and its twin, or one without."""

    name: str
    kind: str
    """The set of programs that it is in."""
    analysis: str
    """Of the fault; empty for a clean program."""
    lines: list[tuple[str, int]]
    faulty: list[Found]
    clean: list[Found]
    gain: float = 0.0
    """Measured share of the time that the fix saves."""
    gain_interval: tuple[float, float] = (0.0, 0.0)
    """In which it lies with 95% confidence."""

    @property
    def first(self) -> Found | None:
        """What the fault's analysis found first."""
        return next((found for found in self.faulty if found.analysis == self.analysis), None)

    @property
    def right(self) -> bool:
        """Whether that is the fault's line."""
        return self.first is not None and (self.first.file, self.first.line) in self.lines


def statement_lines(places: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """The places, and the other lines of simple statements that they are in."""
    found = set(places)
    for file in {file for file, _ in places}:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Return | ast.Assign | ast.AugAssign | ast.Expr | ast.AnnAssign):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if any((file, line) in places for line in lines):
                    found |= {(file, line) for line in lines}
    return found


def profile_of(run: Callable[[int], object], steps: int) -> list[Found]:
    """What is found in a profile of a program, which has run before."""
    from shoestring.profile import profiled
    from shoestring.profile.analyses import ANALYSES
    from shoestring.profile.analyses.reading import Reading
    from shoestring.profile.findings import by_gain

    with profiled() as result:
        run(steps)
    reading = Reading(result.profile)
    return [
        Found(name, _short(finding.file), finding.line, finding.gain)
        for name, analysis in ANALYSES.items()
        for finding in by_gain(analysis(reading))
    ]


def judge(program: Any) -> dict[str, Any]:
    """What is found in a program and in its twin, in a form that is stored."""
    import torch

    torch.set_num_threads(1)
    analysis = getattr(program, "analysis", "")
    program.run(2)
    faulty = profile_of(program.run, program.steps)
    if not analysis:
        return {"analysis": "", "lines": [], "faulty": [], "clean": [vars(found) for found in faulty]}
    program.fixed(2)
    clean = profile_of(program.fixed, program.steps)
    return {
        "analysis": analysis,
        "lines": sorted(statement_lines([(_short(file), line) for file, line in program.lines])),
        "faulty": [vars(found) for found in faulty],
        "clean": [vars(found) for found in clean],
    }


def gain_of(program: Any) -> dict[str, Any]:
    """The share of the time that the fix saves: of CPU time or, where the program waits, of wall time."""
    import torch

    torch.set_num_threads(1)
    work, fixed = (partial(run, program.steps) for run in (program.run, program.fixed))
    ratio = paired(work, fixed, rounds=ROUNDS, warmup=1, order="AB", clock=program.clock)
    return {"gain": 1 - 1 / ratio.median, "interval": [1 - 1 / end for end in ratio.interval]}


def _short(file: str) -> str:
    return str(Path(file).relative_to(ROOT)) if Path(file).is_relative_to(ROOT) else file


class Trial:
    """All programs, judged once."""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        self.folder, self.check = folder, check

    def judged(self, gains: bool = False, kinds: Sequence[str] = (*SEEN, *UNSEEN)) -> list[Judged]:
        """The programs of these kinds; with what the fixes gain, if wanted."""
        from shoestring import native

        native.load("callpaths")  # without it, single steps would be profiled by torch.profiler and judged as ours
        every = [(kind, program) for kind in kinds for program in _programs(kind)]
        found = []
        # Programs of JAX come last: the process has its threads from then on, and others fork.
        for kind, program in sorted(every, key=lambda pair: pair[1].framework == "jax"):
            record = self._stored("findings", kind, program.name, partial(judge, program))
            if record["analysis"] and gains:
                record |= self._stored("gains", kind, program.name, partial(gain_of, program))
            found.append(_judged(program.name, kind, record))
        return found

    def _stored(self, what: str, kind: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return stored(self.folder / what / kind / f"{name}.json", self.check, make)


def _programs(kind: str) -> list[Any]:
    """The programs of a kind that count: all of PyTorch, and those of JAX that are not seen."""
    from benchmarks.profile import blind2, planted, planted_by_author

    if kind == "blind2":
        return [*blind2.PLANTED, *blind2.CLEAN]
    if kind in OWN_BARS.values():
        own = import_module(f"benchmarks.profile.{kind}")
        return [*own.PLANTED, *own.CLEAN]
    seen = {"blind": [*planted.PLANTED, *planted.CLEAN], "author": planted_by_author.PLANTED}
    return [program for program in seen[kind] if _judges(program)]


def _judges(program: Any) -> bool:
    """Whether a program that is seen counts: those of JAX do where the fault is one of JAX."""
    return program.framework == "torch" or getattr(program, "analysis", "") == "unjitted"


def _judged(name: str, kind: str, record: dict[str, Any]) -> Judged:
    def read(twin: str) -> list[Found]:
        return [Found(**(each | {"gain": tuple(each["gain"]) if each["gain"] else None})) for each in record[twin]]

    lines = [(file, line) for file, line in record["lines"]]
    low, high = sorted(record.get("interval", (0.0, 0.0)))
    found = read("faulty"), read("clean")
    return Judged(name, kind, record["analysis"], lines, *found, record.get("gain", 0.0), (low, high))


def recall(judged: Sequence[Judged]) -> Measured:
    """Share of faults whose line is the first that their analysis names."""
    planted = [each for each in judged if each.analysis]
    missed = [each.name for each in planted if not each.right]
    return of_share(len(planted) - len(missed), len(planted), _note(planted, "missed", missed))


def false_alarms(judged: Sequence[Judged]) -> Measured:
    """Share of clean programs and twins in which anything is found."""
    alarmed = [
        f"{each.name} ({', '.join(sorted({found.analysis for found in each.clean}))})" for each in judged if each.clean
    ]
    return of_share(len(alarmed), len(judged), _note(judged, "alarmed", alarmed))


def predicted(judged: Sequence[Judged]) -> list[tuple[Judged, tuple[float, float]]]:
    """Faults that were found with a figure."""
    return [(each, each.first.gain) for each in judged if each.right and each.first and each.first.gain]


def coverage(judged: Sequence[Judged]) -> Measured:
    """Share of predicted intervals that have the measured gain in them."""
    pairs = predicted(judged)
    outside = [
        f"{each.name} {low:.0%} to {high:.0%}, measured {each.gain:.0%}"
        for each, (low, high) in pairs
        if not low <= each.gain <= high
    ]
    everything = [found for each in judged for found in (*each.faulty, *each.clean)]
    share = sum(found.gain is None for found in everything) / max(len(everything), 1)
    note = (
        f"{len(pairs)} intervals; {share:.0%} of all findings have no figure; outside: {'; '.join(outside) or 'none'}"
    )
    return of_share(len(pairs) - len(outside), len(pairs), note) if pairs else Measured(1.0, note)


def width(judged: Sequence[Judged]) -> Measured:
    """Median of upper over lower bound."""
    ratios = [high / low for _, (low, high) in predicted(judged)]
    note = f"{len(ratios)} intervals, widest {max(ratios):.2f}"
    return of_median(ratios, note) if len(ratios) >= FEWEST_ROUNDS else Measured(statistics.median(ratios), note)


def _note(judged: Sequence[Judged], verb: str, names: Iterable[str]) -> str:
    return f"{len(judged)} programs; {verb}: {', '.join(names) or 'none'}"


def in_sets(what: Callable[[Sequence[Judged]], Measured], judged: Sequence[Judged], first: str) -> Measured:
    """What is measured of the programs that the author of the analyses had not seen, with the others in the note."""
    from benchmarks.profile.blind2 import EXAMINATION

    unseen = [program for program in judged if program.kind in UNSEEN]
    last = what([program for program in unseen if program.name in EXAMINATION])
    seen = what([program for program in judged if program.kind in SEEN])
    measured = what(unseen)
    return replace(
        measured,
        note=f"{measured.note}; {first}; of the {len(EXAMINATION)} whose findings nobody was told: {last.value:.3g};"
        f" of programs seen by the author of the analyses: {seen.value:.3g}, {seen.note}",
    )


def rows(folder: Path, check: Callable[[], None]) -> list[Bar]:
    """The bars of the analyses; what is measured of each program is stored in the folder."""
    trial = Trial(folder, check)

    def measure(
        what: Callable[[Sequence[Judged]], Measured], first: str, gains: bool = False
    ) -> Callable[..., Measured]:
        return lambda deadline: in_sets(what, trial.judged(gains), first)

    return [
        Bar(
            "profile.findings-recall",
            "Planted faults found, the fault's line first",
            ">=",
            0.95,
            measure(recall, BLIND_RECALL),
            kind="drawn",
        ),
        Bar(
            *("profile.findings-false-alarms", "Clean programs and twins in which a first analysis finds anything"),
            *("<=", 0.05, measure(false_alarms, BLIND_ALARMS)),
            kind="drawn",
        ),
        Bar(
            *("profile.findings-coverage", "Predicted intervals that have the measured gain of the fix in them"),
            *(">=", 0.80, measure(coverage, BLIND_COVERAGE, gains=True)),
            kind="drawn",
        ),
        Bar(
            *(
                "profile.findings-width",
                "Upper over lower bound of a predicted gain, median",
                "<=",
                1.3,
                measure(width, "as found first"),
            ),
            kind="drawn",
        ),
        *(bar for number, kind in OWN_BARS.items() for bar in rows_of_set(trial, number, kind)),
    ]


def rows_of_set(trial: Trial, number: str, kind: str) -> list[Bar]:
    """The same bars of one set of programs."""

    def of(what: Callable[[Sequence[Judged]], Measured], *, gains: bool = False) -> Callable[..., Measured]:
        return lambda deadline: what(trial.judged(gains, (kind,)))

    name = f"profile.{number}-set"
    return [
        Bar(
            *(f"{name}-recall", f"Faults of the {number} set found, the fault's line first ({WHEN_NEW[number]})"),
            *(">=", 0.95, of(recall)),
            kind="drawn",
        ),
        Bar(
            *(f"{name}-false-alarms", f"Clean programs and twins of the {number} set in which anything is found"),
            *("<=", 0.05, of(false_alarms)),
            kind="drawn",
        ),
        Bar(
            *(f"{name}-coverage", f"Predicted intervals that have the measured gain in them, {number} set"),
            *(">=", 0.80, of(coverage, gains=True)),
            kind="drawn",
        ),
        Bar(
            *(f"{name}-width", f"Upper over lower bound of a predicted gain, median, {number} set"),
            *("<=", 1.3, of(width)),
            kind="drawn",
        ),
    ]
