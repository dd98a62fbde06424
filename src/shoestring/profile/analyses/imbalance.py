"""Analysis of forward/backward imbalance: gradients that take far longer than usual for their operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses import costs
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, tensors_of
from shoestring.profile.findings import Finding
from shoestring.profile.tree import NodeKind

_CHECKPOINT = re.compile(r"/torch/utils/checkpoint\.py\t")
_COPY_SLICES = re.compile(r"CopySlices")
_DENSE_TABLE = re.compile(r"embedding\w*_dense_backward$")
_TABLE = re.compile(r"\w+\[(\d+),(\d+)\]")
EMBEDDINGS = frozenset({"aten::embedding", "aten::embedding_bag"})
FEW = 4
"""A dense gradient is wasteful if the embedding table has at least this many times as many rows as are looked up."""
UNDISTURBED = 3.0
"""If the mean time of calls exceeds the shortest time by more than this factor, other processes are assumed to have
interrupted calls."""
FAR = 4.0
"""A gradient is reported if it takes at least this many times as long as usual for its operator."""
ALONE = 12_000.0
"""Nanoseconds that any gradient may take: the overhead of autograd's engine and of small operators."""
VIEWS = frozenset({"aten::select", "aten::slice", "aten::narrow", "aten::diagonal", "aten::as_strided", "aten::unfold"})
PICKS = frozenset({"aten::gather", "aten::index", "aten::index_select", "aten::take_along_dim", "aten::masked_select"})
EXPANDS = frozenset(
    {"aten::expand", "aten::expand_as", "aten::broadcast_to", "aten::repeat", "aten::repeat_interleave"}
)
SHARE = 0.1
"""Gradients are reported if they take at least this share of the profiled time."""


@dataclass(frozen=True)
class Usual:
    """The usual time of an operator's gradient, and advice to show if the gradient takes longer."""

    backward: float
    """Usual nanoseconds of the gradient of one call."""
    forward: float
    """Nanoseconds of one forward call of the operator that `advice` recommends."""
    advice: str
    slower: float = 1.0
    """Ratio of times on this machine to times in the table of costs."""


def imbalances(reading: Reading) -> Iterator[Finding]:
    """Find operators whose gradients take at least four times as long as the table of costs predicts."""
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
            continue  # in an activation checkpoint, the backward pass includes a second forward pass
        forward, backward = call.forward / call.count, call.backward / max(call.count, call.evaluated)
        usual = _usual(reading, call, forward)
        far = FAR * usual.backward + ALONE * max(usual.slower, 1.0)
        quiet = backward
        if call.name not in VIEWS:
            # other processes may have interrupted many calls, so the time is bounded by a multiple of the shortest
            # calls
            tree, recorded = reading.tree, _functions(reading, call)
            least = float((tree.least * tree.count)[recorded].sum()) / max(call.count, call.evaluated)
            quiet = min(backward, UNDISTURBED * least * (1 + reading.engine_share)) if least else backward
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
            f"{call.count} calls take {nanoseconds(call.forward)} forward and {nanoseconds(call.backward)} backward;"
            f" {nanoseconds(usual.backward * call.count)} backward would be usual.",
            _other_layout(reading, call) or usual.advice,
            saves,
            [call.node],
        )


def _other_layout(reading: Reading, call: OperatorCall) -> str:
    """Advice if a gradient's layout differs from the layout of the operator's arguments; otherwise empty."""
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
    """Nodes of the backward functions that a call recorded."""
    tree = reading.tree
    links = (tree.kind == NodeKind.LINK) & (tree.link >= 0) & reading.below(call.node)[tree.link]
    return np.flatnonzero((tree.kind == NodeKind.BACKWARD) & links[tree.parent]).tolist()


def _tables(reading: Reading) -> Iterator[Finding]:
    """Find embeddings whose gradients have all rows of the table, although only a few rows were looked up."""
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
        in_place = [update for update in reading.calls if update.name.endswith("_")]
        updates = [update for update in in_place if update.arguments.startswith(shape[0])]
        taken = call.backward + sum(update.forward for update in updates if update.count >= call.count / 2)
        usual, _ = _of_table(reading, "aten::embedding", call.forward / call.count, call.given[1].elements * width)
        saves = reading.gain("imbalance", taken - min(usual * call.count, call.backward), [call.node])
        if reading.share(taken) < SHARE or saves.expected < MATTERS:
            continue
        yield reading.finding(
            f"the gradient of {call.name.removeprefix('aten::')} fills the whole table",
            call.place,
            f"{call.count} calls take {call.given[1].elements} of {rows} rows each. Their gradients have all rows,"
            f" which takes {nanoseconds(taken)} with the updates of the table, {percent(reading.share(taken))} of the"
            " time.",
            "Use sparse=True with an optimizer that takes sparse gradients.",
            saves,
            [call.node],
        )


def _copies(reading: Reading) -> Iterator[Finding]:
    """Find lines that select a few elements of an expanded tensor, so that the gradient covers all of the tensor."""
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
        nodes = [member.node for pair in pairs for member in pair]
        saves = reading.gain("imbalance", taken - min(usual, taken), nodes)
        if reading.share(taken) >= SHARE and saves.expected >= MATTERS:
            yield reading.finding(
                f"the gradient of {call.name.removeprefix('aten::')} covers every copy in an expanded tensor",
                place,
                f"{call.count} calls take {call.made[0].elements} elements each out of {call.given[0].elements}, which"
                f" are copies of {grown.given[0].elements}. Their gradients take {nanoseconds(taken)},"
                f" {percent(reading.share(taken))} of the time.",
                "Take the elements out of the tensor itself (index_select, F.embedding), before it is expanded.",
                saves,
                nodes,
            )


def _written_slices(reading: Reading) -> Iterator[Finding]:
    """Find writes into parts of a tensor; the gradient of each write copies the gradient of the whole tensor."""
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
        f"{count} gradients of writes in place take {reading.spent(taken)}.",
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
        # the table's forward times hold only for rows in the CPU's cache, so a fraction of the measured time is used
        # instead
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
    """Estimate a gradient's nanoseconds on this machine, and the ratio of this machine's times to the table's."""
    elements_there, slower = costs.elements_of([(name, 1)], forward, elements)
    slower = min(slower, 2 * reading.slower)
    return slower * costs.nanoseconds(name, "backward", elements_there), slower
