"""Forward/backward imbalance: gradients that take far longer than those of their operator usually do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, milliseconds, tensors_of
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

_CHECKPOINT = re.compile(r"/torch/utils/checkpoint\.py\t")
_COPY_SLICES = re.compile(r"CopySlices")
_DENSE_TABLE = re.compile(r"embedding\w*_dense_backward$")
_TABLE = re.compile(r"\w+\[(\d+),(\d+)\]")
EMBEDDINGS = frozenset({"aten::embedding", "aten::embedding_bag"})
FEW = 4
"""Rows of a table for each that is taken, from which on a gradient of all rows is a waste."""
UNDISTURBED = 3.0
"""Times the shortest calls that calls take, at most, if nothing disturbs them."""
FAR = 4.0
"""Times what the gradients of an operator usually take."""
ALONE = 12_000.0
"""Nanoseconds of a gradient that need no reason: the engine's, and those of small operators."""
VIEWS = frozenset({"aten::select", "aten::slice", "aten::narrow", "aten::diagonal", "aten::as_strided", "aten::unfold"})
PICKS = frozenset({"aten::gather", "aten::index", "aten::index_select", "aten::take_along_dim", "aten::masked_select"})
EXPANDS = frozenset(
    {"aten::expand", "aten::expand_as", "aten::broadcast_to", "aten::repeat", "aten::repeat_interleave"}
)
SHARE = 0.1
"""Of the time, what the gradients take at least."""


@dataclass(frozen=True)
class Usual:
    """What an operator's gradient usually takes, and what to do about one that takes longer."""

    backward: float
    """Nanoseconds a call."""
    forward: float
    """Nanoseconds a call, of the operator that is better."""
    advice: str
    slower: float = 1.0
    """This machine's time over the table's."""


def imbalances(reading: Reading) -> Iterator[Finding]:
    """Operators whose gradients take at least four times what the table of operators lets expect."""
    yield from _written_slices(reading)
    yield from _copies(reading)
    yield from _tables(reading)
    checkpointed = reading.under(_CHECKPOINT)
    for call in reading.calls:
        if (
            reading.share(call.backward) < (SHARE / 2 if call.name == "aten::index" else SHARE)
            or not call.place[0]
            or checkpointed[call.node]
            or (call.name in EMBEDDINGS and call.given)
        ):
            continue  # the backward pass of checkpointed activations runs the forward pass again
        forward, backward = call.forward / call.count, call.backward / max(call.count, call.evaluated)
        usual = _usual(reading, call, forward)
        far = FAR * usual.backward + ALONE * max(usual.slower, 1.0)
        # Where other programs interrupt many calls, the shortest of them tell that.
        quiet = backward if call.name in VIEWS else min(backward, UNDISTURBED * _shortest(reading, call))
        if call.name != "aten::index" and quiet < far:
            continue
        gain = (backward - usual.backward + max(forward - usual.forward, 0.0)) * call.count
        saves = reading.gain("imbalance", gain, [call.node])
        if saves.expected < MATTERS:
            continue
        yield reading.finding(
            f"the gradient of {call.name.removeprefix('aten::')} takes {backward / max(forward, 1):.1f} times as long"
            " as the operator itself",
            call.place,
            f"{call.count} calls take {milliseconds(call.forward)} forward and {milliseconds(call.backward)} backward;"
            f" {milliseconds(usual.backward * call.count)} backward would be usual.",
            _other_layout(reading, call) or usual.advice,
            saves,
            [call.node],
        )


def _other_layout(reading: Reading, call: OperatorCall) -> str:
    """What to do where a gradient comes in another layout than what the operator was given; empty where it does not."""
    for function in _functions(reading, call):
        for node in np.flatnonzero(reading.below(function) & (reading.tree.kind == NodeKind.OPERATOR)).tolist():
            kinds = tensors_of(reading.tree.names[reading.tree.inputs[node]].partition("->")[0])
            layouts = {kind.layout or "contiguous" for kind in kinds if kind.elements == max(call.elements, 2)}
            if len(layouts) > 1:
                return (
                    f"Gradient and input have different layouts ({' and '.join(sorted(layouts))}), for which"
                    " there is no fast kernel: keep one layout, with contiguous() after what changed it."
                )
    return ""


def _functions(reading: Reading, call: OperatorCall) -> list[int]:
    """The functions of the backward pass that a call recorded."""
    tree = reading.tree
    links = (tree.kind == NodeKind.LINK) & (tree.link >= 0) & reading.below(call.node)[tree.link]
    return np.flatnonzero((tree.kind == NodeKind.BACKWARD) & links[tree.parent]).tolist()


def _shortest(reading: Reading, call: OperatorCall) -> float:
    """Nanoseconds of the gradients of a call, if each of their functions takes as long as it did at best."""
    tree, functions = reading.tree, _functions(reading, call)
    least = float((tree.least * tree.count)[functions].sum()) / max(call.count, call.evaluated)
    return least * (1 + reading.engine_share) if least else math.inf


def _tables(reading: Reading) -> Iterator[Finding]:
    """Embeddings whose gradients have all rows of their tables for the few that were taken."""
    tree = reading.tree
    fills = reading.matching(_DENSE_TABLE)
    for call in reading.calls:
        shape = _TABLE.match(call.arguments)
        if call.name not in EMBEDDINGS or shape is None or len(call.given) < 2 or not call.place[0]:
            continue
        rows, width = int(shape[1]), int(shape[2])
        below = reading.below(call.node)
        links = np.flatnonzero((tree.kind == NodeKind.LINK) & (tree.link >= 0) & below[tree.link])
        if rows < FEW * call.given[1].elements or not any(
            (reading.below(link) & fills).any() for link in links.tolist()
        ):
            continue
        updates = [each for each in reading.calls if each.name.endswith("_") and each.arguments.startswith(shape[0])]
        taken = call.backward + sum(each.forward for each in updates if each.count >= call.count / 2)
        usual, _ = _of_table(reading, "aten::embedding", call.forward / call.count, call.given[1].elements * width)
        saves = reading.gain("imbalance", taken - min(usual * call.count, call.backward), [call.node])
        if reading.share(taken) < SHARE or saves.expected < MATTERS:
            continue
        yield reading.finding(
            f"the gradient of {call.name.removeprefix('aten::')} fills the whole table",
            call.place,
            f"{call.count} calls take {call.given[1].elements} of {rows} rows each. Their gradients have all rows,"
            f" which takes {milliseconds(taken)} with the updates of the table, {reading.share(taken):.0%} of the"
            " time.",
            "Use sparse=True with an optimizer that takes sparse gradients.",
            saves,
            [call.node],
        )


def _copies(reading: Reading) -> Iterator[Finding]:
    """Few elements taken out of an expanded tensor, whose gradient is that of every copy of it."""
    lines: dict[Place, list[tuple[OperatorCall, OperatorCall]]] = {}
    for grown in reading.calls:
        if grown.name in EXPANDS and grown.given and grown.made:
            size, before = grown.made[0].elements, grown.given[0].elements
            for call in reading.calls:
                alike = (call.frame, call.count) == (grown.frame, grown.count) and call.name in PICKS
                if not (alike and call.place[0] and call.given and call.made):
                    continue
                if call.given[0].elements == size >= FEW * max(before, call.made[0].elements):
                    lines.setdefault(call.place, []).append((call, grown))
    for place, pairs in lines.items():
        call, grown = pairs[0]
        taken = sum(pick.backward + copies.time for pick, copies in pairs)
        usual = reading.slower * sum(
            pick.count * costs.nanoseconds("aten::index_select", "backward", pick.made[0].elements) for pick, _ in pairs
        )
        nodes = [each.node for pair in pairs for each in pair]
        saves = reading.gain("imbalance", taken - min(usual, taken), nodes)
        if reading.share(taken) >= SHARE and saves.expected >= MATTERS:
            yield reading.finding(
                f"the gradient of {call.name.removeprefix('aten::')} is that of every copy in an expanded tensor",
                place,
                f"{call.count} calls take {call.made[0].elements} elements each out of {call.given[0].elements}, which"
                f" are copies of {grown.given[0].elements}. Their gradients take {milliseconds(taken)},"
                f" {reading.share(taken):.0%} of the time.",
                "Take the elements out of the tensor itself (index_select, F.embedding), before it is expanded.",
                saves,
                nodes,
            )


def _written_slices(reading: Reading) -> Iterator[Finding]:
    """Writes into parts of a tensor, whose gradients copy the gradient of the whole each time."""
    tree = reading.tree
    copies = (tree.kind == NodeKind.BACKWARD) & reading.matching(_COPY_SLICES)
    count, taken = int(tree.count[copies].sum()), float(tree.inclusive[copies].sum())
    writes = [call for call in reading.calls if call.name.endswith("_") and call.graphed and call.place[0]]
    often = [call for call in writes if call.count >= 2 * reading.steps and call.count <= 1.05 * count]
    if not often or reading.share(taken) < SHARE:
        return
    call = max(often, key=lambda call: call.count)
    gain = taken * (1 + reading.engine_share) + call.time
    yield reading.finding(
        "the gradient of each write into a tensor copies the gradient of the whole tensor",
        call.place,
        f"{count} gradients of writes in place take {milliseconds(taken)}, {reading.share(taken):.0%} of the time.",
        "Collect the parts in a list and join them once, with torch.stack or torch.cat.",
        reading.gain("imbalance", gain, [call.node]),
        [call.node],
    )


def _usual(reading: Reading, call: OperatorCall, forward: float) -> Usual:
    if call.name in VIEWS:
        often = max(call.count / reading.steps, 1.0)
        advice = "Take the parts apart in one call (unbind, split or chunk): each part's gradient fills a whole tensor."
        return Usual(min(call.backward / call.count / often * 2, ALONE), forward, advice)
    made = call.made[0].elements if call.made else 0
    if call.name == "aten::index":
        backward, _ = _of_table(reading, "aten::index_select", forward, made)
        advice = "Take rows by index_select or F.embedding, which look less into the indices, forward and backward."
        # Forward as where the rows are in a cache, which in the table they are where they are few.
        return Usual(min(backward, call.backward / call.count), 0.2 * forward, advice)
    if call.name in ("aten::embedding", "aten::embedding_bag"):
        backward, slower = _of_table(reading, "aten::embedding", forward, made)
        advice = "The gradient fills the whole table for a few rows: use sparse=True with an optimizer that takes it."
        return Usual(backward, forward, advice, slower)
    advice = "Look for a formulation whose gradient is cheaper, or write the gradient in a torch.autograd.Function."
    if costs.known(call.name, "backward"):
        backward, slower = _of_table(reading, call.name, forward, call.elements)
        usual = max(backward, forward * costs.ratio(call.name), 3 * forward if call.dense else 0)
        return Usual(usual, forward, advice, slower)
    return Usual((5 if call.dense else 3) * forward, forward, advice)


def _of_table(reading: Reading, name: str, forward: float, elements: int) -> tuple[float, float]:
    """What the gradient of an operator takes by the table, and this machine's time over the table's."""
    elements_there, slower = costs.elements_of([(name, 1)], forward, elements)
    slower = min(slower, 2 * reading.slower)
    return slower * costs.nanoseconds(name, "backward", elements_there), slower
