"""Analysis of data loading stalls: steps wait for their batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shoestring.figures import nanoseconds
from shoestring.profile.analyses.reading import Place, Reading
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
"""If the ratio of processor time to wall-clock time exceeds this value, loading is assumed to compute rather than to
wait for files."""
LARGE = 0.2
"""Waiting for batches is reported if it takes at least this share of the profiled time."""


def loading_stalls(reading: Reading) -> Iterator[Finding]:
    """Find lines that wait for a batch from a DataLoader or from the program's own loading code."""
    tree = reading.tree
    python = tree.kind == NodeKind.PYTHON
    loader = python & np.array([bool(_LOADER.search(name)) for name in tree.names])[tree.name]
    own = python & np.array([bool(_OWN_LOADER.search(name)) for name in tree.names])[tree.name]
    own &= reading.lines == np.arange(len(tree))  # only nodes that are lines of the program itself
    waits: dict[Place, list[int]] = {}
    trains = totals(tree.parent, tree.graphed) > 0
    generator = python & (reading.lines == np.arange(len(tree))) & reading.iterated & ~trains
    for node in reading.topmost(loader | (own & ~trains) | generator):
        if not reading.behind[node]:
            waits.setdefault(reading.place(int(tree.parent[node])), []).append(node)
    communicates = reading.matching(_COMMUNICATES)
    for place, nodes in waits.items():
        taken = int(sum(tree.inclusive[node] for node in nodes))
        if reading.share(taken) < LARGE or not place[0]:
            continue
        if not any((reading.below(node) & communicates).any() for node in nodes):  # not waiting for a rank
            yield _finding(reading, place, nodes, taken)


def _finding(reading: Reading, place: Place, nodes: list[int], taken: int) -> Finding:
    tree, inside = reading.tree, np.zeros(len(reading.tree), bool)
    for node in nodes:
        inside |= reading.below(node)
    queued = np.array([bool(_WORKERS.search(name)) for name in tree.names])[tree.name]
    waited = int(tree.inclusive[reading.topmost(inside & queued)].sum())
    lines: dict[Place, int] = {}
    for node in np.flatnonzero(inside).tolist():
        if reading.place(node) != place:
            lines[reading.place(node)] = lines.get(reading.place(node), 0) + int(tree.own[node])
    slowest = max(lines, key=lambda line: lines[line], default=None)
    where = ""
    if slowest is not None and slowest[0]:
        where = f"; {nanoseconds(lines[slowest])} of it at {slowest[0].rsplit('/', 1)[-1]}:{slowest[1]}"
    facts = reading.profile.facts
    computes = facts.processor > COMPUTES * facts.seconds  # then the number of cores limits the loader's workers
    saved = taken * (1 - 1 / facts.cores) if computes and facts.cores > 1 else taken
    saves = reading.gain("loading", saved, nodes)
    if waited > 0.5 * taken or (inside & reading.matching(_IN_WORKERS)).any():
        # hide the gain, because more workers need more processors, which may not exist
        saves = replace(saves, told=False)
    if waited > 0.5 * taken:
        how = "More workers, a larger prefetch_factor, or cheaper samples: the workers there are do not keep up."
    else:
        how = "Load in workers (num_workers, persistent_workers), or make whole batches at once, or prepare them ahead."
    return reading.finding(
        "steps wait for their batch",
        place,
        f"{reading.spent(taken)}, passes until the next batch is there{where}.",
        how,
        saves,
        nodes,
    )
