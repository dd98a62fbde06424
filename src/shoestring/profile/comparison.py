"""Compares two profiles, or merges several profiles into one, by matching nodes with equal call paths.

The program may have been edited between two profiles, so a diff of the source texts maps lines of the older source to
lines of the newer source. A removed line keeps its number, negated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import PurePath

import numpy as np

from shoestring.core.errors import ConfigError
from shoestring.profile.lines import by_line
from shoestring.profile.recording import Facts, Profile, RankTimes
from shoestring.profile.tree import CallTree, Integers, NodeKind, TreeBuilder

_LONGEST = 4000
"""Maximum number of lines in a source file that is diffed; in a longer file, lines with equal numbers are matched."""


def merged(profiles: Sequence[Profile], labels: Sequence[str] = ()) -> Profile:
    """Merge the profiles of several ranks or runs into one, which still has the own times of each rank or run.

    Args:
        labels: a name for each profile; ranks or runs inside an already merged profile keep their names.
    """
    if not profiles:
        raise ConfigError("there are no profiles to merge")
    builder, rows, names = TreeBuilder(), [], []
    for number, profile in enumerate(profiles):
        places = np.array(builder.graft(profile.tree))
        label = labels[number] if labels else f"rank {number}"
        own = profile.ranks.own if profile.ranks else profile.tree.own[None]
        names += profile.ranks.labels if profile.ranks else [label]
        rows += [(places, times) for times in own]
    tree = builder.build()
    times = np.zeros((len(rows), len(tree)), np.int64)
    for row, (places, own) in enumerate(rows):
        np.add.at(times[row], places, own)
    first = profiles[0]
    facts = replace(
        first.facts,
        seconds=sum(profile.facts.seconds for profile in profiles),
        overhead=sum(profile.facts.overhead for profile in profiles),
        lost=sum(profile.facts.lost for profile in profiles),
        processor=sum(profile.facts.processor for profile in profiles),
        beside=sum(profile.facts.beside for profile in profiles),
        unseen=list(dict.fromkeys(sentence for profile in profiles for sentence in profile.facts.unseen)),
        steps=max(profile.facts.steps for profile in profiles),
    )
    sources: dict[str, str] = {}
    for profile in profiles:
        sources = dict(profile.sources) | sources
    # A repeated name gets a number appended.
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return Profile(tree, facts, sources, RankTimes(unique, times))


@dataclass(frozen=True)
class Comparison:
    """Two profiles in one tree: nodes with equal call paths are the same node."""

    tree: CallTree
    """The call paths of both profiles; times are sums over both."""
    before: Integers
    """Own nanoseconds of each node in the older profile: per step if both profiles have step counts, otherwise in
    total."""
    after: Integers
    by_step: bool
    facts: tuple[Facts, Facts]
    sources: Mapping[str, str]
    """Source files of the newer profile."""

    @property
    def total(self) -> tuple[int, int]:
        """Sums of the nanoseconds in `before` and in `after`."""
        return int(self.before.sum()), int(self.after.sum())

    def by_line(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Map (file, line) to nanoseconds (before, after), largest change first; removed lines have negative
        numbers."""
        inside = self.facts[1].inside
        sides = [
            {place: line.total for place, line in by_line(replace(self.tree, own=own), inside).items()}
            for own in (self.before, self.after)
        ]
        lines = {place: (sides[0].get(place, 0), sides[1].get(place, 0)) for place in {**sides[0], **sides[1]}}
        return dict(sorted(lines.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def compare(before: Profile, after: Profile) -> Comparison:
    """Match the nodes of two profiles by call path, and return both profiles' times in one tree."""
    builder = TreeBuilder()
    later = np.array(builder.graft(after.tree))
    former = np.array(builder.graft(_moved(before, after)))
    by_step = bool(before.facts.steps and after.facts.steps)
    tree = builder.build()

    def own(profile: Profile, places: Integers) -> Integers:
        times = np.zeros(len(tree), np.int64)
        np.add.at(times, places, profile.tree.own)
        return times // profile.facts.steps if by_step else times

    facts = before.facts, after.facts
    return Comparison(tree, own(before, former), own(after, later), by_step, facts, after.sources)


def _moved(before: Profile, after: Profile) -> CallTree:
    """Return the older profile's tree, with files and lines mapped to the newer source."""
    tree, line, names = before.tree, before.tree.line.copy(), []
    files: dict[str, str] = {}  # path in the newer profile: the same path, the only file of this name, or the main file
    for file in before.sources:
        name = PurePath(file).name
        alike = [other for other in after.sources if PurePath(other).name == name]
        if not alike and name == _program(before):
            alike = [other for other in after.sources if PurePath(other).name == _program(after)]
        files[file] = file if file in after.sources or len(alike) != 1 else alike[0]
    lines = {
        file: np.array(_counterparts(text.splitlines(), after.sources[files[file]].splitlines()))
        for file, text in before.sources.items()
        if files[file] in after.sources and text != after.sources[files[file]]
    }
    for index, name in enumerate(tree.names):
        file, tab, function = name.partition("\t")
        names.append(f"{files.get(file, file)}{tab}{function}")
        if tab and file in lines:
            nodes = (tree.name == index) & (tree.kind == NodeKind.PYTHON) & (line > 0) & (line < len(lines[file]))
            line[nodes] = lines[file][line[nodes]]
    return replace(tree, names=names, line=line)


def _program(profile: Profile) -> str:
    return PurePath(profile.facts.command[0]).name if profile.facts.command else ""


def _counterparts(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Map the older text's line numbers (from 1) to the newer text's; a removed line maps to its negated number."""
    if max(len(before), len(after)) > _LONGEST:
        return list(range(len(before) + 1))
    lines = [0, *(-line for line in range(1, len(before) + 1))]
    for tag, first, last, begin, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag in ("equal", "replace"):
            for offset in range(last - first):
                lines[first + offset + 1] = min(begin + offset, end - 1) + 1
    return lines
