"""Analysis of fusible chains: several small operators that each read and write all elements, where one would do.

The module `formulas` recognizes, in the source of a function, the torch operator that replaces a chain. Long chains
that no torch operator replaces are findings as well, because torch.compile fuses them.

This analysis finds all 18 faults of this kind that were planted in test programs, by their formulas. No long chains and
no attention implemented by hand were planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.figures import nanoseconds
from shoestring.profile.analyses import costs
from shoestring.profile.analyses.formulas import Formula, spelt_out
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, costliest, named
from shoestring.profile.analyses.statements import Function
from shoestring.profile.findings import Finding

ELEMENTWISE = named(
    "abs add addcdiv addcmul atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos div elu eq"
    " erf erfc exp exp2 expm1 fill floor ge gelu gt hardtanh le leaky_relu lerp log log1p log2 log10 log_sigmoid"
    " logical_and logical_not logical_or lt masked_fill maximum minimum mul multiply ne neg negative pow reciprocal"
    " relu remainder round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub subtract tan tanh true_divide"
    " where xlogy zero"
)
REDUCTIONS = named("sum mean var std amax amin max min norm linalg_vector_norm logsumexp softmax log_softmax")
PRODUCTS = named("matmul bmm mm einsum baddbmm")
VIEWS = named(
    "view reshape transpose t permute unsqueeze squeeze expand expand_as select slice chunk split unbind detach alias"
    " to flatten unflatten narrow view_as type_as tensor_split lift_fresh empty_like ones_like zeros_like arange ones"
    " zeros scalar_tensor resolve_conj resolve_neg"
)
UNKNOWN = 12
"""A chain that no torch operator replaces is reported if it has at least this many elementwise operators."""
UNKNOWN_MATTERS = 0.4
"""Fusion by torch.compile is recommended if it saves at least this share of the profiled time; the share is high,
because compiling takes time."""
ALIKE = 8
"""Maximum ratio of the numbers of calls of two operators in the same chain."""


@dataclass(frozen=True)
class Fused:
    """A torch operator that replaces a chain."""

    operator: str
    """Name of the operator, as in the table of `costs`."""
    instead: str
    """Call that replaces the chain, as source text."""


ATTENTION = Fused("aten::scaled_dot_product_attention", "F.scaled_dot_product_attention")


@dataclass
class Chain:
    """Consecutive calls of operators by one function."""

    calls: list[OperatorCall]

    @property
    def worked(self) -> list[OperatorCall]:
        """The calls of the chain, without calls that only make views."""
        return [call for call in self.calls if _plain(call.name) not in VIEWS]

    @property
    def elementwise(self) -> list[OperatorCall]:
        """The calls of elementwise operators."""
        return [call for call in self.worked if _plain(call.name) in ELEMENTWISE]

    @property
    def runs(self) -> int:
        """Number of times that the chain runs."""
        return min(call.count for call in self.worked)

    @property
    def each(self) -> float:
        """Number of operators in one run of the chain."""
        return sum(call.count for call in self.worked) / self.runs

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(call.place for call in self.worked)


def _plain(name: str) -> str:
    return name.removesuffix("_")


def chains(reading: Reading) -> list[Chain]:
    """Find sequences of operators that one operator could replace, in the order of their first calls."""
    by_frame: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        by_frame.setdefault(call.frame, []).append(call)
    sequences = []
    for calls in by_frame.values():
        chain: list[OperatorCall] = []
        for call in [*calls, None]:
            plain = _plain(call.name) if call else ""
            if call and plain in ELEMENTWISE | REDUCTIONS | VIEWS | PRODUCTS and call.place[0]:
                far = chain and call.place[1] - chain[-1].place[1] > 6
                unlike = chain and not 1 / ALIKE <= call.count / chain[0].count <= ALIKE
                if far or unlike:
                    sequences.append(Chain(chain))
                    chain = []
                chain.append(call)
            else:
                sequences.append(Chain(chain))
                chain = []
    return [part for chain in sequences for part in _without_products(chain) if len(part.worked)]


def _without_products(chain: Chain) -> list[Chain]:
    """Split a chain at its matrix products, unless the chain is attention."""
    if _attends(chain):
        return [chain]
    parts: list[list[OperatorCall]] = [[]]
    for call in chain.calls:
        if call.name in PRODUCTS:
            parts.append([])
        else:
            parts[-1].append(call)
    return [Chain(part) for part in parts]


def _attends(chain: Chain) -> bool:
    """Whether a chain is attention: a softmax and two matrix products in each run."""
    if not any(call.name == "aten::softmax" for call in chain.calls):
        return False
    return sum(call.count for call in chain.calls if call.name in PRODUCTS) >= 2 * chain.runs


def spelt_out_in(reading: Reading) -> Iterator[tuple[Chain, Fused]]:
    """Yield chains that implement a torch operator by a formula, with the operator that replaces the chain."""
    by_frame: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        if call.place[0] and _plain(call.name) not in VIEWS:
            by_frame.setdefault(call.frame, []).append(call)
    known: dict[Function, list[Formula]] = {}
    for calls in by_frame.values():
        text = reading.syntax(calls[0].place[0])
        if text is None:
            continue
        for scope in text.scopes(call.place[1] for call in calls):
            if scope not in known:
                known[scope] = spelt_out(text, scope)
            for formula in known[scope]:
                parts = [call for call in calls if formula.has(_plain(call.name).removeprefix("aten::"), call.place[1])]
                if len(parts) > 1:
                    yield Chain(parts), Fused(formula.operator, formula.instead)


def long_chains(reading: Reading) -> Iterator[tuple[Chain, Fused | None]]:
    """Yield chains that implement attention by hand, and chains so long that compiling them is worthwhile."""
    for chain in chains(reading):
        updates = any(call.name.endswith("_") and not call.name.endswith("__") for call in chain.worked)
        if _attends(chain):
            yield chain, ATTENTION
        elif updates and not any(call.backward for call in chain.worked):
            continue  # in-place updates without gradients belong to an optimizer
        elif sum(call.count for call in chain.elementwise) >= UNKNOWN * chain.runs:
            yield chain, None


def fusible_chains(reading: Reading) -> Iterator[Finding]:
    """Find chains that one torch operator, or one generated kernel, computes in less time."""
    same: dict[frozenset[Place], list[tuple[Chain, Fused | None, float]]] = {}
    taken = set[Place]()
    for chain, fused in (*spelt_out_in(reading), *long_chains(reading)):
        if fused is not None:
            taken |= chain.places
        elif taken & chain.places:
            continue
        same.setdefault(chain.places, []).append((chain, fused, saved(reading, chain, fused)))
    for places, alike in same.items():
        gain = sum(saving for _, _, saving in alike)
        calls = [call for chain, _, _ in alike for call in chain.worked]
        saves = reading.gain("fusible", gain, [call.node for call in calls])
        first, fused, _ = alike[0]
        if saves.expected >= (MATTERS if fused else UNKNOWN_MATTERS):
            worst = costliest(calls)
            numbers = sorted(line for _, line in places)
            lines = f"Lines {numbers[0]} to {numbers[-1]} call" if len(numbers) > 1 else "This line calls"
            names = ", ".join(dict.fromkeys(call.name.removeprefix("aten::") for call in calls))
            forward, backward = (sum(getattr(call, way) for call in calls) for way in ("forward", "backward"))
            instead = f"Call {fused.instead}" if fused else "Compile the function with torch.compile"
            yield reading.finding(
                f"{first.each:.0f} small operators do what one can",
                worst.place,
                f"{lines} {names}: {nanoseconds(forward)} forward and {nanoseconds(backward)}"
                " backward, and each of them reads and writes all elements again.",
                f"{instead}, which reads and writes them once.",
                saves,
                [call.node for call in calls],
            )


def saved(reading: Reading, chain: Chain, fused: Fused | None) -> float:
    """Nanoseconds saved if one operator replaces the chain, including the time in Python for calling operators."""
    calls = [(_plain(call.name), call.count / chain.runs) for call in chain.worked]
    forward = sum(call.forward for call in chain.worked) / chain.runs
    backward = sum(call.backward for call in chain.worked) / chain.runs
    largest = max((call.elements for call in chain.worked), default=0)
    elements, slower = costs.elements_of(calls, forward, largest)
    if fused is not None:
        after = slower * costs.nanoseconds(fused.operator, "forward", elements)
        after_backward = slower * costs.nanoseconds(fused.operator, "backward", elements)
    else:
        passes = costs.nanoseconds("aten::mul", "forward", elements)
        work = [max(costs.total([(name, 1)], "forward", elements) - passes, 0) * count for name, count in calls]
        after = slower * (2 * passes + sum(work))
        after_backward = 1.5 * after
    python = (
        (1 - 1 / chain.each) * reading.python_of(chain.places, sum(call.count for call in chain.worked)) / chain.runs
    )
    saving = forward - after + python
    if backward:
        saving += backward - min(after_backward, backward)
    return max(saving, 0.0) * chain.runs
