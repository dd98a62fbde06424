"""Fusible chains: small operators, each of which reads and writes all elements again, where one operator would do.

Which operator that is, `formulas` knows from the text of the function. Long chains for which it knows none are found,
too: torch.compile makes one operator of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoestring.profile.analyses import costs
from shoestring.profile.analyses.formulas import Formula, spelt_out
from shoestring.profile.analyses.gains import PredictedGain
from shoestring.profile.analyses.reading import MATTERS, OperatorCall, Place, Reading, costliest, milliseconds, named
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
"""Elementwise operators of a chain that no operator of torch is known for, at least."""
UNKNOWN_MATTERS = 0.4
"""Share of the time that the change is expected to save there: compiling has a price, too."""
ALIKE = 8
"""Times as often as another that an operator of a chain is called, at most."""


@dataclass(frozen=True)
class Fused:
    """An operator of torch that does what a chain does."""

    operator: str
    """As `costs` knows it."""
    instead: str
    """How it is called."""


ATTENTION = Fused("aten::scaled_dot_product_attention", "F.scaled_dot_product_attention")


@dataclass
class Chain:
    """Calls of one function that follow each other."""

    calls: list[OperatorCall]

    @property
    def worked(self) -> list[OperatorCall]:
        """Those that compute."""
        return [call for call in self.calls if _plain(call.name) not in VIEWS]

    @property
    def elementwise(self) -> list[OperatorCall]:
        """Those without reductions."""
        return [call for call in self.worked if _plain(call.name) in ELEMENTWISE]

    @property
    def runs(self) -> int:
        """How often the chain runs."""
        return min(call.count for call in self.worked)

    @property
    def each(self) -> float:
        """Operators in one run of it."""
        return sum(call.count for call in self.worked) / self.runs

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(call.place for call in self.worked)


def _plain(name: str) -> str:
    return name.removesuffix("_")


def chains(reading: Reading) -> list[Chain]:
    """Runs of operators that could be one, in the order in which each function called them first."""
    by_frame: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        by_frame.setdefault(call.frame, []).append(call)
    found = []
    for calls in by_frame.values():
        chain: list[OperatorCall] = []
        for call in [*calls, None]:
            plain = _plain(call.name) if call else ""
            if call and plain in ELEMENTWISE | REDUCTIONS | VIEWS | PRODUCTS and call.place[0]:
                far = chain and call.place[1] - chain[-1].place[1] > 6
                unlike = chain and not 1 / ALIKE <= call.count / chain[0].count <= ALIKE
                if far or unlike:
                    found.append(Chain(chain))
                    chain = []
                chain.append(call)
            else:
                found.append(Chain(chain))
                chain = []
    return [part for chain in found for part in _without_products(chain) if len(part.worked)]


def _without_products(chain: Chain) -> list[Chain]:
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
    """Whether it is attention: a softmax between products, and what is done to the scores."""
    if not any(call.name == "aten::softmax" for call in chain.calls):
        return False
    return sum(call.count for call in chain.calls if call.name in PRODUCTS) >= 2 * chain.runs


def spelt_out_in(reading: Reading) -> Iterator[tuple[Chain, Fused]]:
    """Calls of the formulas that functions of the program spell out, and what computes them at once."""
    by_frame: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        if call.place[0] and _plain(call.name) not in VIEWS:
            by_frame.setdefault(call.frame, []).append(call)
    known: dict[Function | ast.Lambda, list[Formula]] = {}
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
    """Attention that is spelt out, and chains so long that compiling them pays."""
    for chain in chains(reading):
        updates = any(call.name.endswith("_") and not call.name.endswith("__") for call in chain.worked)
        if _attends(chain):
            yield chain, ATTENTION
        elif updates and not any(call.backward for call in chain.worked):
            continue  # of what stays, which are the optimizer's
        elif sum(call.count for call in chain.elementwise) >= UNKNOWN * chain.runs:
            yield chain, None


def fusible_chains(reading: Reading) -> Iterator[Finding]:
    """Chains that one operator of torch, or one generated kernel, computes in less time."""
    same: dict[frozenset[Place], list[tuple[Chain, Fused | None, float]]] = {}
    taken = set[Place]()
    for chain, fused in (*spelt_out_in(reading), *long_chains(reading)):
        if fused is not None:
            taken |= chain.places
        elif taken & chain.places:
            continue
        same.setdefault(chain.places, []).append((chain, fused, saved(reading, chain, fused)))
    for places, found in same.items():
        gain = sum(saving for _, _, saving in found)
        calls = [call for chain, _, _ in found for call in chain.worked]
        saves = reading.gain("fusible", gain, [call.node for call in calls])
        if saves.expected >= (MATTERS if found[0][1] else UNKNOWN_MATTERS):
            yield _finding(reading, places, calls, found[0][0].each, found[0][1], saves)


def saved(reading: Reading, chain: Chain, fused: Fused | None) -> float:
    """Nanoseconds that one operator in place of the chain saves, with those of Python's calls."""
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


def _finding(
    reading: Reading,
    places: frozenset[Place],
    calls: Sequence[OperatorCall],
    each: float,
    fused: Fused | None,
    saves: PredictedGain,
) -> Finding:
    worst = costliest(calls)
    numbers = sorted(line for _, line in places)
    lines = f"Lines {numbers[0]} to {numbers[-1]} call" if len(numbers) > 1 else "This line calls"
    names = ", ".join(dict.fromkeys(call.name.removeprefix("aten::") for call in calls))
    forward, backward = (sum(getattr(call, way) for call in calls) for way in ("forward", "backward"))
    instead = f"Call {fused.instead}" if fused else "Compile the function with torch.compile"
    return reading.finding(
        f"{each:.0f} small operators do what one can",
        worst.place,
        f"{lines} {names}: {milliseconds(forward)} forward and {milliseconds(backward)}"
        " backward, and each of them reads and writes all elements again.",
        f"{instead}, which reads and writes them once.",
        saves,
        [call.node for call in calls],
    )
