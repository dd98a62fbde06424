"""Products of matrices that need not be computed: a factor is nearly all zeros, or nobody uses what they make.

The recorder samples how much of the factors is zero (`native/zeros.h`). Zeros in the gradient that comes to a product
are no waste by themselves, for what computes a maximum has them, too; so what uses its result must leave most of it
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading, milliseconds, named
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

_ZEROS = re.compile(r"; argument \d is ([\d.e+]+)% zeros, as are ([\d.e+]+)% of its rows or columns")
_FACTOR = re.compile(r"\[([\d,]+)\]")
EMPTY = 0.9
"""Share of a factor's elements that are zero, from which on a lookup or a sparse product is cheaper."""
UNUSED = 0.6
"""Share of the rows of a product that nothing uses, at least."""
SAVES = 0.1
"""Share of the time that the change is expected to save, at least."""
PASSES = 3.0
"""Passes over the elements that remain: taken, weighted and added up."""
WITH_ZEROS = "a product of matrices computes with zeros"
NOT_USED = "most of what a product of matrices makes is not used"
ADVICE = {
    WITH_ZEROS: "{share:.4g}% of one factor are zeros: take the rows that count (F.embedding or index_select in place"
    " of a one-hot matrix, index_add or torch.sparse in place of a dense matrix of edges).",
    NOT_USED: "About {share:.0f}% of its rows are left out by what is computed with them: select those that are needed"
    " before the product.",
}
BY_ROWS = named("linear addmm mm matmul bmm")
"""Products of which each row of the result needs one row only of what is given: attention needs all."""
LEAVES_OUT = named(
    "cross_entropy_loss nll_loss nll_loss_nd select slice narrow index index_select masked_select gather"
)
VIEWS = named("view reshape transpose permute unsqueeze squeeze flatten unflatten expand detach alias t to contiguous")


@dataclass(frozen=True)
class Waste:
    """Of a product."""

    calls: list[OperatorCall]
    """It, and what else would not run, or on less."""
    saved: float
    """Nanoseconds."""
    share: float
    """Of its work."""


def wasted_products(reading: Reading) -> Iterator[Finding]:
    """Lines with products of which a factor is nearly all zeros, and with those of whose result little is used."""
    waste: dict[tuple[Place, str], list[Waste]] = {}
    for call in reading.calls:
        if call.dense and call.place[0] and reading.share(call.time) >= SAVES / 4:
            zeros, unused = _zeros(reading, call), _unused(reading, call)
            if zeros >= EMPTY:
                waste.setdefault((call.place, WITH_ZEROS), []).append(_without_zeros(reading, call, zeros))
            elif unused >= UNUSED:
                waste.setdefault((call.place, NOT_USED), []).append(_of_rows(reading, call, unused))
    for (place, title), found in waste.items():
        calls = [call for each in found for call in each.calls]
        nodes = [call.node for call in calls]
        saves = reading.gain("hotspot", sum(each.saved for each in found), nodes)
        taken = sum(call.time for call in calls)
        if saves.expected >= SAVES:
            yield reading.finding(
                title,
                place,
                f"{', '.join(dict.fromkeys(call.name.removeprefix('aten::') for call in calls))} take"
                f" {milliseconds(taken)}, {reading.share(taken):.0%} of the time, forward and backward.",
                ADVICE[title].format(share=100 * max(each.share for each in found)),
                saves,
                nodes,
            )


def _zeros(reading: Reading, call: OperatorCall) -> float:
    """Share of zeros in the emptier factor of a call's product."""
    shares = [float(zeros) / 100 for text in _texts(reading, call.node) for zeros, _ in _ZEROS.findall(text)]
    return max(shares, default=0.0)


def _texts(reading: Reading, node: int) -> list[str]:
    """Arguments of operators below a node."""
    tree = reading.tree
    return [tree.names[tree.inputs[each]] for each in np.flatnonzero(reading.below(node) & (tree.inputs > 0)).tolist()]


def _unused(reading: Reading, call: OperatorCall) -> float:
    """Share of what a product makes that is left out by all that is given it."""
    consumers = _consumers(reading, call) if call.name in BY_ROWS else []
    if not consumers or any(each.name not in LEAVES_OUT for each in consumers):
        return 0.0
    if call.backward:
        tree, below = reading.tree, reading.below(call.node)
        links = np.flatnonzero((tree.kind == NodeKind.LINK) & (tree.link >= 0) & below[tree.link]).tolist()
        texts = [text for link in links for text in _texts(reading, link)]
        return max((float(rows) / 100 for text in texts for _, rows in _ZEROS.findall(text)), default=0.0)
    if call.graphed or any(not each.made for each in consumers):
        return 0.0
    taken = sum(each.count * each.made[0].elements for each in consumers) / (call.count * call.made[0].elements)
    return 1 - min(taken, 1.0)


def _consumers(reading: Reading, call: OperatorCall) -> list[OperatorCall]:
    """Calls that are given as many elements as the product makes, but for those that only view or move them.

    Earlier ones, too: in a loop they may be given what the run before has made.
    """
    size = call.made[0].elements if call.made else 0
    return [
        each
        for each in reading.calls
        if each.node != call.node and any(kind.elements == size > 0 for kind in each.given)
        if each.name not in VIEWS and (each.name not in LEAVES_OUT or [kind.elements for kind in each.made] != [size])
    ]


def _without_zeros(reading: Reading, call: OperatorCall, zeros: float) -> Waste:
    """Of a product, and of making the factor on the same line, all but passes over what is not zero."""
    factor = next((kind.elements for kind in call.given), call.elements)
    made = [
        each
        for each in reading.calls
        if each.place == call.place and not each.dense and [kind.elements for kind in each.made] == [factor]
    ]
    width = call.made[0].elements * _columns(call) / factor if call.made else 1.0
    left = PASSES * (1 - zeros) * factor * width
    ways: list[costs.Direction] = ["forward", "backward"] if call.backward else ["forward"]
    after = sum(reading.slower * costs.nanoseconds("aten::index_select", way, left) for way in ways)
    taken = call.time + sum(each.time for each in made)
    return Waste([call, *made], max(taken - after * call.count, 0.0), zeros)


def _columns(call: OperatorCall) -> float:
    """Last size of the first factor, over which the product adds up."""
    sizes = _FACTOR.search(call.arguments)
    return float(sizes[1].rpartition(",")[2]) if sizes else 1.0


def _of_rows(reading: Reading, call: OperatorCall, unused: float) -> Waste:
    calls = [call, *_consumers(reading, call)]
    return Waste(calls, unused * sum(each.time for each in calls), unused)
