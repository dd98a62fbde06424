"""Finds chains of matrix products whose order takes more operations than necessary.

(A B) x and A (B x) are equal, but if x is narrow, (A B) x takes many more operations. Torch multiplies in the order in
which the program is written. The analysis reads the order from the program's source and the sizes from recorded calls.

Two of the 17 hotspots planted in test programs are found by this analysis only: a product with a costly order, and a
low-rank change that is added to its matrix instead of being multiplied separately.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from shoestring.figures import percent
from shoestring.profile.analyses.reading import OperatorCall, Place, Reading, costliest, named
from shoestring.profile.analyses.statements import Function, last_name
from shoestring.profile.findings import Finding
from shoestring.profile.tree import Integers, totals

PRODUCTS = named("matmul mm bmm mv linear addmm")
SCALES, SUMS = named("mul div"), named("add sub")
SAVES = 0.1
"""Another computation is reported if it is expected to save at least this share of the profiled time."""
CHEAPER = 0.7
"""Another computation is reported if it takes at most this fraction of the operations of the program's order."""
_SHAPE = re.compile(r"\[([\d,]+)\]")
_FLIPS = {"t", "transpose", "swapaxes", "adjoint"}


@dataclass(frozen=True)
class Size:
    """Sizes of a batched product of p × q and q × r matrices."""

    batch: int
    p: int
    q: int
    r: int

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.p * self.q * self.r


@dataclass(frozen=True)
class Factor:
    """A factor that is not itself a product; `change` is a product that the factor includes as a summand."""

    node: ast.expr
    flipped: bool
    change: WrittenProduct | None = None

    @property
    def text(self) -> str:
        text = ast.unparse(self.node)
        return (f"({text}).mT" if isinstance(self.node, ast.BinOp) else f"{text}.mT") if self.flipped else text


@dataclass(frozen=True)
class WrittenProduct:
    """A product in the program's source; the transpose of a product is rewritten by (A B)ᵀ = Bᵀ Aᵀ."""

    left: Factor | WrittenProduct
    right: Factor | WrittenProduct
    site: ast.expr
    flipped: bool

    @cached_property
    def factors(self) -> list[Factor]:
        """All factors, from left to right."""
        sides = (self.left, self.right)
        return [factor for side in sides for factor in (side.factors if isinstance(side, WrittenProduct) else [side])]

    @cached_property
    def products(self) -> list[WrittenProduct]:
        """This product and all products inside it, including products added to factors, in the order of computation."""
        sides = (self.right, self.left) if self.flipped else (self.left, self.right)
        inner = [side if isinstance(side, WrittenProduct) else side.change for side in sides]
        return [*(product for part in inner if part for product in part.products), self]


def costly_orders(reading: Reading) -> Iterator[Finding]:
    """Find products that take fewer operations in another order, or with a low-rank change multiplied separately."""
    flops = totals(reading.tree.parent, reading.tree.flops)
    frames: dict[tuple[int, int], list[OperatorCall]] = {}
    for call in reading.calls:
        if call.place[0] and call.direct:
            frames.setdefault(call.frame, []).append(call)
    savings: dict[tuple[Place, str], list[Saving]] = {}
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
                savings.setdefault((saving.place, saving.advice), []).append(saving)
    for (place, advice), equal in savings.items():
        calls = [call for saving in equal for call in saving.calls]
        nodes = [call.node for call in calls]
        saves = reading.gain("hotspot", sum(saving.nanoseconds for saving in equal), nodes)
        taken = sum(call.time for call in calls)
        if saves.expected >= SAVES:
            yield reading.finding(
                "matrices are multiplied in a costly order",
                place,
                f"The products take {reading.spent(taken)}, forward and backward.",
                advice,
                saves,
                nodes,
            )


# -- what is written ---------------------------------------------------------------------------------------------------


def _chains(function: ast.AST) -> Iterator[WrittenProduct]:
    """Yield a function's products of at least three factors; left out are products on lines with further products."""
    # Temporaries are names that are assigned once and used once.
    values: dict[str, list[ast.expr]] = {}
    used, written = list[str](), list[str]()
    for node in _inside(function):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else written).append(node.id)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    temporaries = {
        name: assigned[0]
        for name, assigned in values.items()
        if len(assigned) == written.count(name) == used.count(name) == 1
    }
    sites = [node for node in _inside(function) if isinstance(node, ast.expr) and _operands(node)]
    parsed = [_read(site, False, temporaries) for site in sites]
    chains = [product for product in parsed if isinstance(product, WrittenProduct)]
    inner = {product.site for chain in chains for product in chain.products[:-1]}
    lines = Counter(site.lineno for site in sites)
    for chain in chains:
        own = Counter(product.site.lineno for product in chain.products)
        if chain.site not in inner and len(chain.products) > 1 and all(lines[line] == own[line] for line in own):
            yield chain


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function, without the nodes of nested functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield child
            yield from _inside(child)


def _operands(node: ast.expr) -> tuple[ast.expr, ast.expr, bool] | None:
    """The two factors of a product, and whether the second factor is transposed; None for other expressions."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right, False
    if (
        not isinstance(node, ast.Call)
        or node.keywords
        or any(isinstance(argument, ast.Starred) for argument in node.args)
    ):
        return None
    name, arguments = last_name(node), [*node.args]
    if name in ("matmul", "mm", "bmm", "mv") and isinstance(node.func, ast.Attribute):
        arguments = arguments if len(arguments) == 2 else [node.func.value, *arguments]
        return (arguments[0], arguments[1], False) if len(arguments) == 2 else None
    bias = len(arguments) == 3 and not (isinstance(arguments[2], ast.Constant) and arguments[2].value is None)
    return (arguments[0], arguments[1], True) if name == "linear" and len(arguments) in (2, 3) and not bias else None


def _read(node: ast.expr, flipped: bool, temporaries: Mapping[str, ast.expr]) -> Factor | WrittenProduct:
    """Parse an expression, or its transpose if `flipped`, with names replaced by the values in `temporaries`."""
    if operands := _operands(node):
        left = _read(operands[0], flipped, temporaries)
        right = _read(operands[1], flipped != operands[2], temporaries)
        return WrittenProduct(right, left, node, True) if flipped else WrittenProduct(left, right, node, False)
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return _read(node.value, not flipped, temporaries)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FLIPS:
        return _read(node.func.value, not flipped, temporaries)
    if isinstance(node, ast.Name) and node.id in temporaries:
        others = {name: value for name, value in temporaries.items() if name != node.id}
        value = _read(temporaries[node.id], flipped, others)
        return value if isinstance(value, WrittenProduct) or value.change else Factor(node, flipped)
    if isinstance(node, ast.BinOp):
        sides = [_read(side, flipped, temporaries) for side in (node.left, node.right)]
        products = [side for side in sides if isinstance(side, WrittenProduct)]
        if len(products) == 1 and isinstance(node.op, ast.Mult | ast.Div):
            return products[0]
        if len(products) == 1 and isinstance(node.op, ast.Add | ast.Sub):
            return Factor(node, flipped, products[0])
    return Factor(node, flipped)


# -- what is computed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """The saving of a cheaper way to compute the same result."""

    place: Place
    advice: str
    nanoseconds: float
    calls: list[OperatorCall]


@dataclass(frozen=True)
class _Computed:
    """A chain of matrix products with the recorded calls that compute it."""

    chain: WrittenProduct
    sizes: dict[ast.expr, Size]
    """Sizes of the products, by their expressions in the source."""
    calls: dict[ast.expr, OperatorCall]
    """Recorded calls that compute the products; two products on one line may share a call."""
    sums: list[OperatorCall]
    """Recorded additions on the lines of the products."""

    @staticmethod
    def of(chain: WrittenProduct, calls: list[OperatorCall], reading: Reading, flops: Integers) -> _Computed | None:
        """Match a chain with its recorded calls; None if sizes are unknown or other operators run in between."""
        sizes, by_site = dict[ast.expr, Size](), dict[ast.expr, OperatorCall]()
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
                by_site |= dict.fromkeys((first.site, second.site), there[0])
            elif len(there) == len(products):
                for product, call in zip(products, there, strict=True):
                    size = _size(call)
                    if size is None or reading.tree.variants[call.node] > 1:
                        return None
                    sizes[product.site], by_site[product.site] = size, call
            else:
                return None
        runs = {call.count / [*by_site.values()].count(call) for call in by_site.values()}
        scaled = [call for call in near if call.name in SCALES and sum(kind.elements > 1 for kind in call.given) > 1]
        if len(runs) > 1 or len({size.batch for size in sizes.values()}) > 1 or scaled:
            return None
        return _Computed(chain, sizes, by_site, [call for call in near if call.name in SUMS])

    def in_another_order(self) -> Saving | None:
        """Estimate the saving of the chain's cheapest order; None if the order is cheap enough."""
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
            f"Multiply in the order {text[1:-1]}, which takes {percent(2 * batch * after / now)} of the operations;"
            " torch.linalg.multi_dot finds it by itself.",
        )

    def apart(self) -> Saving | None:
        """Estimate the saving of multiplying by a low-rank change's factors instead of adding it to its matrix."""
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
        by_node = {self.calls[product.site].node: self.calls[product.site] for product in products}
        return [*by_node.values()]

    def _time(self, product: WrittenProduct) -> float:
        """Nanoseconds of a product; products that share a call divide its time in proportion to their operations."""
        call = self.calls[product.site]
        alike = [self.sizes[site].operations for site, other in self.calls.items() if other is call]
        return call.time * self.sizes[product.site].operations / sum(alike)

    def _saving(self, calls: list[OperatorCall], nanoseconds: float, advice: str) -> Saving:
        return Saving(costliest(calls).place, advice, nanoseconds, calls)

    def _dims(self, node: WrittenProduct) -> list[int] | None:
        """Number of rows of the first factor and of columns of every factor; None if adjacent sizes do not match."""
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
    """The products of a chain, without products that are added to factors."""
    sides = [side for side in (chain.left, chain.right) if isinstance(side, WrittenProduct)]
    return [*(product for side in sides for product in _nested(side)), chain]


def _size(call: OperatorCall) -> Size | None:
    """The size of the first product that a call computes; None if the recorded arguments do not determine the size."""
    shapes = [[*map(int, shape.split(","))] for shape in _SHAPE.findall(call.arguments.partition("->")[0])]
    shapes = shapes[1:] if call.name == "aten::addmm" else shapes
    if len(shapes) < 2:
        return None
    left, right = shapes[:2]
    left, right = [1, *left] if len(left) == 1 else left, [*right, 1] if len(right) == 1 else right
    if call.name == "aten::linear":
        right = right[::-1]
    if left[-1] != right[-2]:
        return None
    if len(right) == 2:
        return Size(1, math.prod(left[:-1]), left[-1], right[1])
    return Size(max(math.prod(left[:-2]), math.prod(right[:-2])), left[-2], left[-1], right[-1])


def _outer(outer: WrittenProduct, inner: WrittenProduct, size: Size, operations: int) -> Size | None:
    """Derive the size of `outer` from the operation count; one factor of `outer` is `inner` or a sum with `inner`."""
    first = outer.right if outer.flipped else outer.left
    p_by_r = size.p * size.r
    free, rest = divmod(operations, 2 * size.batch * p_by_r)
    if rest or not free:
        return None
    if first is inner or (isinstance(first, Factor) and first.change is inner):
        return Size(size.batch, size.p, size.r, free)
    return Size(size.batch, free, size.p, size.r)


def _cheapest(dims: tuple[int, ...], texts: tuple[str, ...]) -> tuple[int, str]:
    """Half of the minimum number of operations to multiply a chain of matrices, and the cheapest order as text."""

    @cache
    def between(first: int, last: int) -> tuple[int, str]:
        if last - first == 1:
            return 0, texts[first]
        ways = []
        for cut in range(first + 1, last):
            (left_cost, left), (right_cost, right) = between(first, cut), between(cut, last)
            ways.append((left_cost + right_cost + dims[first] * dims[cut] * dims[last], f"({left} @ {right})"))
        return min(ways)

    return between(0, len(texts))
