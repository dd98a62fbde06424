"""Data-loader stall: steps wait for their batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shoestring.profile.analyses.reading import Place, Reading, milliseconds
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind, totals

_LOADER = re.compile(r"/torch/utils/data/dataloader\.py\t_\w*DataLoaderIter\.__next__$")
_OWN_LOADER = re.compile(
    r"(\.(__getitem__|__getitems__|__next__|__iter__)|(^|[._])(collate|batches|load\w*|loader\w*))$"
)
_IN_WORKERS = re.compile(r"\t_MultiProcessingDataLoaderIter\.")
_WORKERS = re.compile(r"/multiprocessing/(queues|connection)\.py\t|/queue\.py\t")
_COMMUNICATES = re.compile(r"^(c10d::|_c10d_functional::)|/torch/distributed/distributed_c10d\.py\t")
COMPUTES = 0.7
"""Processor time over time, from which on the program computes and does not wait for files or a network."""
LARGE = 0.2
"""Share of the time that is waited, from which on it is worth a change."""


def loading_stalls(reading: Reading) -> Iterator[Finding]:
    """Lines that wait for a batch: from a DataLoader, or from code of the program's own that makes batches."""
    tree = reading.tree
    python = tree.kind == NodeKind.PYTHON
    loader = python & np.array([bool(_LOADER.search(name)) for name in tree.names])[tree.name]
    own = python & np.array([bool(_OWN_LOADER.search(name)) for name in tree.names])[tree.name]
    own &= reading.lines == np.arange(len(tree))  # of the program itself
    waits: dict[Place, list[int]] = {}
    trains = totals(tree.parent, tree.graphed) > 0
    generator = python & (reading.lines == np.arange(len(tree))) & reading.iterated & ~trains
    for node in reading.topmost(loader | (own & ~trains) | generator):
        if not reading.behind[node]:
            waits.setdefault(reading.place(int(tree.parent[node])), []).append(node)
    for place, nodes in waits.items():
        taken = int(sum(tree.inclusive[node] for node in nodes))
        if reading.share(taken) >= LARGE and place[0] and not _communicates(reading, nodes):
            yield _finding(reading, place, nodes, taken)


def _communicates(reading: Reading, nodes: list[int]) -> bool:
    """Whether another rank makes what is waited for."""
    communicates = reading.matching(_COMMUNICATES)
    return any(bool((reading.below(node) & communicates).any()) for node in nodes)


def _finding(reading: Reading, place: Place, nodes: list[int], taken: int) -> Finding:
    tree, inside = reading.tree, np.zeros(len(reading.tree), bool)
    for node in nodes:
        inside |= reading.below(node)
    queued = np.array([bool(_WORKERS.search(name)) for name in tree.names])[tree.name]
    waited = int(tree.inclusive[reading.topmost(inside & queued)].sum())
    lines: dict[Place, int] = {}
    for each in np.flatnonzero(inside).tolist():
        if reading.place(each) != place:
            lines[reading.place(each)] = lines.get(reading.place(each), 0) + int(tree.own[each])
    slowest = max(lines, key=lambda line: lines[line], default=None)
    where = ""
    if slowest is not None and slowest[0]:
        where = f"; {milliseconds(lines[slowest])} of it at {slowest[0].rsplit('/', 1)[-1]}:{slowest[1]}"
    facts = reading.profile.facts
    computes = facts.processor > COMPUTES * facts.seconds  # workers compute no faster than there are cores
    saved = taken * (1 - 1 / facts.cores) if computes and facts.cores > 1 else taken
    saves = reading.gain("loading", saved, nodes)
    if waited > 0.5 * taken or (inside & reading.matching(_IN_WORKERS)).any():
        saves = replace(saves, told=False)  # more workers need more processors, which may not be there
    if waited > 0.5 * taken:
        how = "More workers, a larger prefetch_factor, or cheaper samples: the workers there are do not keep up."
    else:
        how = "Load in workers (num_workers, persistent_workers), or make whole batches at once, or prepare them ahead."
    return reading.finding(
        "steps wait for their batch",
        place,
        f"{reading.share(taken):.0%} of the time passes until the next batch is there ({milliseconds(taken)}){where}.",
        how,
        saves,
        nodes,
    )
