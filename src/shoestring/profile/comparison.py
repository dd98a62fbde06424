"""Two profiles compared, and several merged: trees are laid over each other by their call paths.

The program may have been edited between two profiles. Lines of the former source are those of the later one that a
diff of the texts puts in their place; a line that is gone keeps its number, negative.
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
"""Lines of a source beyond which its lines are only compared by number."""


def merged(profiles: Sequence[Profile], labels: Sequence[str] = ()) -> Profile:
    """One profile of those of several ranks or runs, which keeps the times of each.

    Args:
        labels: names for the times of each; those that were merged before keep theirs.
    """
    if not profiles:
        raise ConfigError("there are no profiles to merge")
    builder, rows, names = TreeBuilder(), [], []
    for number, profile in enumerate(profiles):
        places = np.array(builder.graft(profile.tree))
        label = labels[number] if labels else f"rank {number}"
        own = profile.ranks.own if profile.ranks else profile.tree.own[None]
        names += profile.ranks.labels if profile.ranks else [label]
        rows += [(places, each) for each in own]
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
        unseen=list(dict.fromkeys(said for profile in profiles for said in profile.facts.unseen)),
        steps=max(profile.facts.steps for profile in profiles),
    )
    sources: dict[str, str] = {}
    for profile in profiles:
        sources = dict(profile.sources) | sources
    return Profile(tree, facts, sources, RankTimes(_unlike(names), times))


def _unlike(names: Sequence[str]) -> list[str]:
    """The names, each of which stands once."""
    given: dict[str, int] = {}
    unlike = []
    for name in names:
        given[name] = given.get(name, 0) + 1
        unlike.append(name if given[name] == 1 else f"{name} ({given[name]})")
    return unlike


@dataclass(frozen=True)
class Comparison:
    """Two profiles laid over each other."""

    tree: CallTree
    """The call paths of both; its times are those of both together."""
    before: Integers
    """Own nanoseconds of each node: of one step where both profiles know their steps, else of all."""
    after: Integers
    by_step: bool
    facts: tuple[Facts, Facts]
    sources: Mapping[str, str]
    """The later ones."""

    @property
    def total(self) -> tuple[int, int]:
        """Nanoseconds before and after."""
        return int(self.before.sum()), int(self.after.sum())

    def by_line(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Nanoseconds before and after of each line of the program, the largest change first; gone lines negative."""
        inside = self.facts[1].inside
        sides = [
            {place: line.total for place, line in by_line(replace(self.tree, own=own), inside).items()}
            for own in (self.before, self.after)
        ]
        found = {place: (sides[0].get(place, 0), sides[1].get(place, 0)) for place in {**sides[0], **sides[1]}}
        return dict(sorted(found.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def compare(before: Profile, after: Profile) -> Comparison:
    """Lay two profiles over each other."""
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
    """The former tree with the files and lines of the later source."""
    tree, line, names = before.tree, before.tree.line.copy(), []
    files = {file: _same_file(file, before, after) for file in before.sources}
    lines = {
        file: np.array(_counterparts(text.splitlines(), after.sources[files[file]].splitlines()))
        for file, text in before.sources.items()
        if files[file] in after.sources and text != after.sources[files[file]]
    }
    for index, name in enumerate(tree.names):
        file, tab, function = name.partition("\t")
        names.append(f"{files.get(file, file)}{tab}{function}")
        if tab and file in lines:
            those = (tree.name == index) & (tree.kind == NodeKind.PYTHON) & (line > 0) & (line < len(lines[file]))
            line[those] = lines[file][line[those]]
    return replace(tree, names=names, line=line)


def _same_file(file: str, before: Profile, after: Profile) -> str:
    """The later name of a file: its own, else that of the one with its name elsewhere, else the later program's."""
    if file in after.sources:
        return file
    name = PurePath(file).name
    alike = [other for other in after.sources if PurePath(other).name == name]
    if not alike and name == _program(before):
        alike = [other for other in after.sources if PurePath(other).name == _program(after)]
    return alike[0] if len(alike) == 1 else file


def _program(profile: Profile) -> str:
    return PurePath(profile.facts.command[0]).name if profile.facts.command else ""


def _counterparts(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Of each former line, from 1, the later line in its place; -line where it is gone."""
    if max(len(before), len(after)) > _LONGEST:
        return list(range(len(before) + 1))
    lines = [0, *(-line for line in range(1, len(before) + 1))]
    for tag, first, last, begin, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag in ("equal", "replace"):
            for offset in range(last - first):
                lines[first + offset + 1] = min(begin + offset, end - 1) + 1
    return lines
