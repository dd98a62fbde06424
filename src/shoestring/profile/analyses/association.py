"""Products of several matrices in an order that takes more operations than another one.

Products are associative: (A B) x takes as many times the operations of A (B x) as x has fewer columns than B. Torch
multiplies in the order that is written. So the order is read from the program's text, and the sizes from its calls.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from shoestring.profile.analyses.reading import OperatorCall, Place, Reading, costliest, milliseconds, named
from shoestring.profile.analyses.statements import Function, last_name
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, totals

PRODUCTS = named("matmul mm bmm mv linear addmm")
SCALES, SUMS = named("mul div"), named("add sub")
SAVES = 0.1
"""Share of the time that another order is expected to save, at least."""
CHEAPER = 0.7
"""Of the operations, what another order takes at most."""
_SHAPE = re.compile(r"\[([\d,]+)\]")
_FLIPS = {"t", "transpose", "swapaxes", "adjoint"}


@dataclass(frozen=True)
class Size:
    """Of a product of p × q and q × r matrices, or of as many pairs of them as `batch`."""

    batch: int
    p: int
    q: int
    r: int

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.p * self.q * self.r


@dataclass(frozen=True)
class Factor:
    """A matrix that other code makes; `change` is a product that is added to it."""

    node: ast.expr
    flipped: bool
    change: WrittenProduct | None = None

    @property
    def text(self) -> str:
        text = ast.unparse(self.node)
        return (f"({text}).mT" if isinstance(self.node, ast.BinOp) else f"{text}.mT") if self.flipped else text


@dataclass(frozen=True)
class WrittenProduct:
    """A product as it is written; flipped, (A B)ᵀ = Bᵀ Aᵀ, where `left` and `right` are those of the right side."""

    left: Factor | WrittenProduct
    right: Factor | WrittenProduct
    site: ast.expr
    flipped: bool

    @cached_property
    def factors(self) -> list[Factor]:
        """From left to right."""
        sides = (self.left, self.right)
        return [each for side in sides for each in (side.factors if isinstance(side, WrittenProduct) else [side])]

    @cached_property
    def products(self) -> list[WrittenProduct]:
        """All in it, changes of factors too, and itself, in the order in which they are computed."""
        sides = (self.right, self.left) if self.flipped else (self.left, self.right)
        inner = [side if isinstance(side, WrittenProduct) else side.change for side in sides]
        return [*(product for each in inner if each for product in each.products), self]


def costly_orders(reading: Reading) -> Iterator[Finding]:
    """Lines whose products take fewer operations in another order, or with a low-rank change apart from its matrix."""
    flops = totals(reading.tree.parent, reading.tree.flops)
    frames: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        if call.place[0] and call.direct:
            frames.setdefault(call.frame, []).append(call)
    found: dict[tuple[Place, str], list[Saving]] = {}
    for calls in frames.values():
        file, line = calls[0].place
        text = reading.syntax(file)
        statement = text.at(line) if text else None
        time = sum(call.time for call in calls if call.name in PRODUCTS)
        if text is None or statement is None or reading.share(time) < SAVES / 4:
            continue
        for chain in _chains(text.function(statement)):
            computed = _Computed.of(chain, [call for call in calls if call.place[0] == file], reading, flops)
            saving = computed.in_another_order() or computed.apart() if computed else None
            if saving:
                found.setdefault((saving.place, saving.advice), []).append(saving)
    for (place, advice), each in found.items():
        calls = [call for saving in each for call in saving.calls]
        nodes = [call.node for call in calls]
        saves = reading.gain("hotspot", sum(saving.nanoseconds for saving in each), nodes)
        taken = sum(call.time for call in calls)
        if saves.expected >= SAVES:
            yield reading.finding(
                "matrices are multiplied in a costly order",
                place,
                f"The products take {milliseconds(taken)}, {reading.share(taken):.0%} of the time, forward and"
                " backward.",
                advice,
                saves,
                nodes,
            )


# -- what is written ---------------------------------------------------------------------------------------------------


def _chains(function: ast.AST) -> Iterator[WrittenProduct]:
    """Products of a function of at least three factors, on lines with no other products."""
    kept = _kept(function)
    sites = [node for node in _inside(function) if isinstance(node, ast.expr) and _operands(node)]
    read = [_read(site, False, kept) for site in sites]
    chains = [each for each in read if isinstance(each, WrittenProduct)]
    inner = {product.site for chain in chains for product in chain.products[:-1]}
    lines = Counter(site.lineno for site in sites)
    for chain in chains:
        own = Counter(product.site.lineno for product in chain.products)
        if chain.site not in inner and len(chain.products) > 1 and all(lines[line] == own[line] for line in own):
            yield chain


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """All of a function but the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from _inside(child)


def _kept(function: ast.AST) -> dict[str, ast.expr]:
    """Names that are assigned once and used once: what they are."""
    values: dict[str, list[ast.expr]] = {}
    used, written = list[str](), list[str]()
    for node in _inside(function):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else written).append(node.id)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    return {
        name: found[0] for name, found in values.items() if len(found) == written.count(name) == used.count(name) == 1
    }


def _operands(node: ast.expr) -> tuple[ast.expr, ast.expr, bool] | None:
    """The factors of a product, and whether the second is transposed; None where it is none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right, False
    if not isinstance(node, ast.Call) or node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
        return None
    name, given = last_name(node), [*node.args]
    if name in ("matmul", "mm", "bmm", "mv") and isinstance(node.func, ast.Attribute):
        given = given if len(given) == 2 else [node.func.value, *given]
        return (given[0], given[1], False) if len(given) == 2 else None
    bias = len(given) == 3 and not (isinstance(given[2], ast.Constant) and given[2].value is None)
    return (given[0], given[1], True) if name == "linear" and len(given) in (2, 3) and not bias else None


def _read(node: ast.expr, flipped: bool, kept: Mapping[str, ast.expr]) -> Factor | WrittenProduct:
    """An expression, transposed where it is flipped."""
    if operands := _operands(node):
        left, right = _read(operands[0], flipped, kept), _read(operands[1], flipped != operands[2], kept)
        return WrittenProduct(right, left, node, True) if flipped else WrittenProduct(left, right, node, False)
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return _read(node.value, not flipped, kept)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FLIPS:
        return _read(node.func.value, not flipped, kept)
    if isinstance(node, ast.Name) and node.id in kept:
        found = _read(kept[node.id], flipped, {name: value for name, value in kept.items() if name != node.id})
        return found if isinstance(found, WrittenProduct) or found.change else Factor(node, flipped)
    if isinstance(node, ast.BinOp):
        sides = [_read(side, flipped, kept) for side in (node.left, node.right)]
        products = [side for side in sides if isinstance(side, WrittenProduct)]
        if len(products) == 1 and isinstance(node.op, ast.Mult | ast.Div):
            return products[0]
        if len(products) == 1 and isinstance(node.op, ast.Add | ast.Sub):
            return Factor(node, flipped, products[0])
    return Factor(node, flipped)


# -- what is computed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """What another way to compute the same would save."""

    place: Place
    advice: str
    nanoseconds: float
    calls: list[OperatorCall]


@dataclass(frozen=True)
class _Computed:
    """A chain with the calls that compute it."""

    chain: WrittenProduct
    sizes: dict[ast.expr, Size]
    """Of the products as they are written."""
    calls: dict[ast.expr, OperatorCall]
    """Two products on one line may have one."""
    sums: list[OperatorCall]
    """On the same lines."""

    @staticmethod
    def of(chain: WrittenProduct, calls: list[OperatorCall], reading: Reading, flops: Integers) -> _Computed | None:
        """None where the calls do not tell the sizes, or where something else is computed between the products."""
        sizes, found = dict[ast.expr, Size](), dict[ast.expr, OperatorCall]()
        lines: dict[int, list[WrittenProduct]] = {}
        for product in chain.products:
            lines.setdefault(product.site.lineno, []).append(product)
        near = [call for call in calls if call.place[1] in lines]
        for line, products in lines.items():
            there = [call for call in near if call.place[1] == line and call.name in PRODUCTS]
            if len(there) == 1 and len(products) == 2:
                first, second = products
                size = _size(there[0])
                rest = 2 * int(flops[there[0].node]) // there[0].count - (size.operations if size else 0)
                outer = _outer(second, first, size, rest) if size else None
                if reading.tree.variants[there[0].node] > 2 or size is None or outer is None:
                    return None
                sizes |= {first.site: size, second.site: outer}
                found |= dict.fromkeys((first.site, second.site), there[0])
            elif len(there) == len(products):
                for product, call in zip(products, there, strict=True):
                    size = _size(call)
                    if size is None or reading.tree.variants[call.node] > 1:
                        return None
                    sizes[product.site], found[product.site] = size, call
            else:
                return None
        runs = {call.count / [*found.values()].count(call) for call in found.values()}
        scaled = [call for call in near if call.name in SCALES and sum(kind.elements > 1 for kind in call.given) > 1]
        if len(runs) > 1 or len({size.batch for size in sizes.values()}) > 1 or scaled:
            return None
        return _Computed(chain, sizes, found, [call for call in near if call.name in SUMS])

    def in_another_order(self) -> Saving | None:
        dims = self._dims(self.chain)
        if dims is None or len(dims) < 4:
            return None
        factors, batch = self.chain.factors, self.sizes[self.chain.site].batch
        now = sum(self.sizes[product.site].operations for product in _nested(self.chain))
        after, text = _cheapest(tuple(dims), tuple(factor.text for factor in factors))
        if 2 * batch * after > CHEAPER * now:
            return None
        calls = self._calls(_nested(self.chain))
        return self._saving(
            calls,
            sum(call.time for call in calls) * (1 - 2 * batch * after / now),
            f"Multiply in the order {text[1:-1]}, which takes {2 * batch * after / now:.0%} of the operations;"
            " torch.linalg.multi_dot finds it by itself.",
        )

    def apart(self) -> Saving | None:
        """A low-rank change that is multiplied by itself, and not added to its matrix."""
        for product in _nested(self.chain):
            for side in (product.left, product.right):
                change = side.change if isinstance(side, Factor) else None
                if change is None or len(change.products) > 1:
                    continue
                outer, inner = self.sizes[product.site], self.sizes[change.site]
                rows = outer.p if side is (product.left if product.flipped else product.right) else outer.r
                apart = 2 * outer.batch * rows * inner.q * (inner.p + inner.r)
                if apart > CHEAPER * inner.operations:
                    continue
                sums = [call for call in self.sums if call.elements == inner.p * inner.r]
                after = self._time(product) / outer.operations * apart
                return self._saving(
                    [*self._calls([change]), *sums],
                    self._time(change) + sum(call.time for call in sums) - after,
                    f"{ast.unparse(change.site)} has a rank of {inner.q} only: multiply by one of its factors and then"
                    " by the other, and add the result to that of the matrix.",
                )
        return None

    def _calls(self, products: Iterable[WrittenProduct]) -> list[OperatorCall]:
        found = {self.calls[product.site].node: self.calls[product.site] for product in products}
        return [*found.values()]

    def _time(self, product: WrittenProduct) -> float:
        """Nanoseconds of a product; of two that have one call, by their operations."""
        call = self.calls[product.site]
        alike = [self.sizes[site].operations for site, other in self.calls.items() if other is call]
        return call.time * self.sizes[product.site].operations / sum(alike)

    def _saving(self, calls: list[OperatorCall], nanoseconds: float, advice: str) -> Saving:
        return Saving(costliest(calls).place, advice, nanoseconds, calls)

    def _dims(self, node: WrittenProduct) -> list[int] | None:
        """Rows of the first factor, and columns of each; None where neighbours do not fit."""
        size = self.sizes[node.site]
        rows, between, columns = (size.r, size.q, size.p) if node.flipped else (size.p, size.q, size.r)
        left = self._dims(node.left) if isinstance(node.left, WrittenProduct) else [rows, between]
        right = self._dims(node.right) if isinstance(node.right, WrittenProduct) else [between, columns]
        if (
            left is None
            or right is None
            or [left[0], left[-1], right[0], right[-1]] != [rows, between, between, columns]
        ):
            return None
        return left + right[1:]


def _nested(chain: WrittenProduct) -> list[WrittenProduct]:
    """The products of a chain without those that are added to factors."""
    sides = [side for side in (chain.left, chain.right) if isinstance(side, WrittenProduct)]
    return [*(product for side in sides for product in _nested(side)), chain]


def _size(call: OperatorCall) -> Size | None:
    """Of the product that a call computes first; None where its arguments do not say."""
    shapes = [[*map(int, each.split(","))] for each in _SHAPE.findall(call.arguments.partition("->")[0])]
    shapes = shapes[1:] if call.name == "aten::addmm" else shapes
    if len(shapes) < 2:
        return None
    one, other = shapes[:2]
    one, other = [1, *one] if len(one) == 1 else one, [*other, 1] if len(other) == 1 else other
    if call.name == "aten::linear":
        other = other[::-1]
    if one[-1] != other[-2]:
        return None
    if len(other) == 2:
        return Size(1, math.prod(one[:-1]), one[-1], other[1])
    return Size(max(math.prod(one[:-2]), math.prod(other[:-2])), one[-2], one[-1], other[-1])


def _outer(outer: WrittenProduct, inner: WrittenProduct, size: Size, operations: int) -> Size | None:
    """The size of a product that has another one, or a sum with it, for a factor, from its operations."""
    first = outer.right if outer.flipped else outer.left
    p_by_r = size.p * size.r
    free, rest = divmod(operations, 2 * size.batch * p_by_r)
    if rest or not free:
        return None
    if first is inner or (isinstance(first, Factor) and first.change is inner):
        return Size(size.batch, size.p, size.r, free)
    return Size(size.batch, free, size.p, size.r)


def _cheapest(dims: tuple[int, ...], texts: tuple[str, ...]) -> tuple[int, str]:
    """The least half of the operations to multiply a chain of matrices, and how that is written."""

    @cache
    def between(first: int, last: int) -> tuple[int, str]:
        if last - first == 1:
            return 0, texts[first]
        ways = []
        for cut in range(first + 1, last):
            (one, left), (other, right) = between(first, cut), between(cut, last)
            ways.append((one + other + dims[first] * dims[cut] * dims[last], f"({left} @ {right})"))
        return min(ways)

    return between(0, len(texts))
