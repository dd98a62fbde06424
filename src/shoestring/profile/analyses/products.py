"""Analysis of wasted matrix products: a factor is nearly all zeros, or most of the result is not used.

The recorder samples the share of zeros in factors (`native/zeros.h`). Zeros in the gradient of a product's result do
not prove that the result is unused, because the gradient of a maximum has zeros as well. The operators that use the
result must also select only a small part of the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading, named
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

_ZEROS = re.compile(r"; argument \d is ([\d.e+]+)% zeros, as are ([\d.e+]+)% of its rows or columns")
_FACTOR = re.compile(r"\[([\d,]+)\]")
EMPTY = 0.9
"""If at least this fraction of a factor is zeros, a lookup or a sparse product is assumed to be cheaper."""
UNUSED = 0.6
"""A product is reported if at least this fraction of its rows is unused."""
SAVES = 0.1
"""A change is reported if it is expected to save at least this share of the profiled time."""
PASSES = 3.0
"""Assumed number of passes over the non-zero elements: selecting, weighting and adding take one pass each."""
WITH_ZEROS = "a product of matrices computes with zeros"
NOT_USED = "most of what a product of matrices makes is not used"
ADVICE = {
    WITH_ZEROS: "{share:.4g}% of one factor are zeros: take the rows that count (F.embedding or index_select in place"
    " of a one-hot matrix, index_add or torch.sparse in place of a dense matrix of edges).",
    NOT_USED: "About {share:.0f}% of its rows are left out by what is computed with them: select those that are needed"
    " before the product.",
}
BY_ROWS = named("linear addmm mm matmul bmm")
"""Products in which each row of the result depends on one row of the first factor only; attention is not among them."""
LEAVES_OUT = named(
    "cross_entropy_loss nll_loss nll_loss_nd select slice narrow index index_select masked_select gather"
)
VIEWS = named("view reshape transpose permute unsqueeze squeeze flatten unflatten expand detach alias t to contiguous")


@dataclass(frozen=True)
class Waste:
    """The avoidable work of a matrix product."""

    calls: list[OperatorCall]
    """The product's call, and other calls that the recommended change would avoid or shorten."""
    saved: float
    """Nanoseconds that the recommended change could save."""
    share: float
    """Fraction of the factor's elements that are zero, or of the product's rows that are unused."""


def wasted_products(reading: Reading) -> Iterator[Finding]:
    """Find lines with products that have a factor of nearly all zeros or a result that is mostly unused."""
    waste: dict[tuple[Place, str], list[Waste]] = {}
    for call in reading.calls:
        if call.dense and call.place[0] and reading.share(call.time) >= SAVES / 4:
            shares = [float(zeros) / 100 for text in _texts(reading, call.node) for zeros, _ in _ZEROS.findall(text)]
            zeros, unused = max(shares, default=0.0), _unused(reading, call)
            if zeros >= EMPTY:
                waste.setdefault((call.place, WITH_ZEROS), []).append(_without_zeros(reading, call, zeros))
            elif unused >= UNUSED:
                calls = [call, *_consumers(reading, call)]
                saved = unused * sum(user.time for user in calls)
                waste.setdefault((call.place, NOT_USED), []).append(Waste(calls, saved, unused))
    for (place, title), parts in waste.items():
        calls = [call for part in parts for call in part.calls]
        nodes = [call.node for call in calls]
        saves = reading.gain("hotspot", sum(part.saved for part in parts), nodes)
        taken = sum(call.time for call in calls)
        if saves.expected >= SAVES:
            yield reading.finding(
                title,
                place,
                f"{', '.join(dict.fromkeys(call.name.removeprefix('aten::') for call in calls))} take"
                f" {reading.spent(taken)}, forward and backward.",
                ADVICE[title].format(share=100 * max(part.share for part in parts)),
                saves,
                nodes,
            )


def _texts(reading: Reading, node: int) -> list[str]:
    """Recorded arguments of the operators at and below a node."""
    tree = reading.tree
    operators = np.flatnonzero(reading.below(node) & (tree.inputs > 0)).tolist()
    return [tree.names[tree.inputs[operator]] for operator in operators]


def _unused(reading: Reading, call: OperatorCall) -> float:
    """Fraction of the rows of a product's result that no operator uses; 0 if unknown."""
    consumers = _consumers(reading, call) if call.name in BY_ROWS else []
    if not consumers or any(consumer.name not in LEAVES_OUT for consumer in consumers):
        return 0.0
    if call.backward:
        tree, below = reading.tree, reading.below(call.node)
        links = np.flatnonzero((tree.kind == NodeKind.LINK) & (tree.link >= 0) & below[tree.link]).tolist()
        texts = [text for link in links for text in _texts(reading, link)]
        return max((float(rows) / 100 for text in texts for _, rows in _ZEROS.findall(text)), default=0.0)
    if call.graphed or any(not consumer.made for consumer in consumers):
        return 0.0
    taken = sum(consumer.count * consumer.made[0].elements for consumer in consumers)
    return 1 - min(taken / (call.count * call.made[0].elements), 1.0)


def _consumers(reading: Reading, call: OperatorCall) -> list[OperatorCall]:
    """Calls that may use a product's result: an argument has the result's size, and the call does more than view it.

    Earlier calls are included, because in a loop they may use the result of the previous iteration.
    """
    size = call.made[0].elements if call.made else 0
    return [
        user
        for user in reading.calls
        if user.node != call.node and any(kind.elements == size > 0 for kind in user.given)
        if user.name not in VIEWS and (user.name not in LEAVES_OUT or [kind.elements for kind in user.made] != [size])
    ]


def _without_zeros(reading: Reading, call: OperatorCall, zeros: float) -> Waste:
    """The waste of a product with a sparse factor: its whole time, minus a few passes over the non-zero elements."""
    factor = next((kind.elements for kind in call.given), call.elements)
    makers = [
        maker
        for maker in reading.calls
        if maker.place == call.place and not maker.dense and [kind.elements for kind in maker.made] == [factor]
    ]
    sizes = _FACTOR.search(call.arguments)
    # columns of the first factor, over which the product sums
    columns = float(sizes[1].rpartition(",")[2]) if sizes else 1.0
    width = call.made[0].elements * columns / factor if call.made else 1.0
    left = PASSES * (1 - zeros) * factor * width
    ways: list[costs.Direction] = ["forward", "backward"] if call.backward else ["forward"]
    after = sum(reading.slower * costs.nanoseconds("aten::index_select", way, left) for way in ways)
    taken = call.time + sum(maker.time for maker in makers)
    return Waste([call, *makers], max(taken - after * call.count, 0.0), zeros)
