"""Finds sharding rules of an operator by trying it: compares its outputs on shards with those on whole tensors.

torch has no rules for operators that a program defines itself (`torch.library.custom_op`). Such an operator is computed
on small tensors of random numbers, on their halves along each axis, and on random summands of them. The outputs of the
halves may make up the whole output when they are concatenated, added or averaged, or each may already be the whole
output. Such a combination is a rule if it holds for several sizes, for two random draws of each, and for several
numbers of shards (Bian et al., *EasyDist*, 2023, call this ShardCombine).

The operator is untrusted code: it may crash, hang or write data. So it is tried in a sandbox process of its own. A
failure there becomes the reason why the operator is not divided.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from shoestring._torch import real_tensors, tree_leaves, tree_map_only, without_data
from shoestring.confined import LimitError
from shoestring.graph._torch import changes_inputs, import_all, is_overload, returns_view
from shoestring.graph.placements import (
    SUM,
    WHOLE,
    InnerExchange,
    Placement,
    ShardingRule,
    difference,
    divide,
    join,
)
from shoestring.sandbox import USUAL, SandboxBounds, described, run_in_sandbox

MEAN: Placement = -3
"""Placement of an output that is the mean of the ranks' outputs; the ranks average it within the operator."""
_MOST = 625  # largest number of combinations of placements tried: all of four 4-d tensors
_LARGEST = 1 << 20  # largest number of entries of all inputs together
_SIZES, _DRAWS = 3, 2  # sets of sizes that are tried, and random draws of each
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
_ROUGH = 1e-2
"""Tolerances, relative to the largest entry of the outputs: `_CLOSE` by data type, `_ROUGH` for all other types. The
largest tolerance of the data types of all inputs and outputs applies."""

Row = tuple[Sequence[Placement], Sequence[Placement]]
"""Placements of an operator's inputs, and of its outputs."""


def discover(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Tensor | None],
    ranks: int,
    bounds: SandboxBounds = USUAL,
) -> tuple[list[ShardingRule], str]:
    """Find rules of an operator by trying it; returns the rules and, if there are none, the reason.

    Args:
        args, kwargs: the operator's arguments, with tensors without data.
        outputs: what the operator returns for these arguments, without data.
    """
    if reason := _not_tried(op):
        return [], reason
    if ranks < 2:
        return [], "there is nothing to divide by"
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    trial = OperatorTrial(op, (tuple(args), dict(kwargs)), len(outputs), parts_of(ranks))
    import_all()
    try:
        reply = run_in_sandbox(_warm_up, trial.answer, bounds)
        answer = json.loads(reply)  # own file: the answer of a process that was started here
        rules = [_checked(row, tensors, outputs) for row in answer["rules"]]
        reason = str(answer["reason"])
    except LimitError as error:
        return [], str(error)
    except (ValueError, TypeError, KeyError, RecursionError):  # the operator wrote into the connection itself
        return [], "its process answered with something else"
    return rules, "" if rules else reason


def parts_of(ranks: int) -> tuple[int, ...]:
    """The numbers of shards with which operators are tried: the two smallest divisors of `ranks` above 1."""
    return tuple(number for number in range(2, ranks + 1) if ranks % number == 0)[:2]


def _not_tried(op: Any) -> str:
    """Why an operator's signature rules out dividing it; empty if it does not."""
    if not is_overload(op):
        return "it is not an operator of torch's dispatcher"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "it draws random numbers"
    if changes_inputs(op):
        return "it changes its inputs"
    return "it returns a view" if returns_view(op) else ""


def _checked(row: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> ShardingRule:
    """Convert a row of the sandbox's reply, which is untrusted, to a rule.

    Raises:
        ValueError, TypeError: the row is no rule for these tensors.
    """
    read, computed = row
    for places, tensors in ((read, inputs), (computed, outputs)):
        for place, tensor in zip(places, tensors, strict=True):
            if type(place) is not int or not MEAN <= place < (0 if tensor is None else tensor.ndim):
                raise ValueError(f"no placement: {place!r}")
    if MEAN in read:
        raise ValueError("an input cannot be a mean")
    means = [place == MEAN for place in computed]
    nbytes = sum(tensor.nbytes for tensor, mean in zip(outputs, means, strict=True) if mean and tensor is not None)
    places = tuple(WHOLE if mean else place for place, mean in zip(computed, means, strict=True))
    exchange = InnerExchange(nbytes, partial(_averaging, means)) if any(means) else None
    return ShardingRule(places, tuple(read), exchange)


def _averaging(means: Sequence[bool], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int) -> Any:
    """Compute a rank's outputs; those marked in `means` are averaged over the ranks (see `InnerExchange`)."""
    outputs = list[Any]()
    for output, mean in zip(_rows(op(*args, **kwargs)), means, strict=True):
        outputs.append((yield output / ranks) if mean else output)
    return tuple(outputs)


def _rows(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


# -- in the sandbox ----------------------------------------------------------------------------------------------------


class _NoRulesError(Exception):
    """The operator cannot be divided, whatever its inputs are."""


class _UntakenError(Exception):
    """The operator does not accept the inputs that were tried."""


def _warm_up() -> None:
    torch.set_num_threads(1)  # the threads of the parent process do not exist in its fork
    square = torch.ones(64, 64)
    (square @ square).sum()


@dataclass(frozen=True)
class OperatorTrial:
    """An operator to be tried on shards, with arguments without data."""

    op: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: int
    parts: tuple[int, ...]

    def answer(self) -> bytes:
        """Try the operator; returns as JSON the rules (placements of inputs and outputs) and why there are none."""
        with real_tensors(), torch.no_grad():
            try:
                rules, reason = self._search()
            except _NoRulesError as error:
                rules, reason = [], str(error)
        return json.dumps({"rules": rules, "reason": reason}).encode()

    def _search(self) -> tuple[list[Row], str]:
        samples = self._samples()
        rules, combined = list[Row](), set[str]()
        for placements in self._candidates(samples[0].inputs):
            dims = (0 if output is None else output.ndim for output in samples[0].outputs)
            left = [frozenset((WHOLE, SUM, MEAN, *range(count))) for count in dims]
            for sample in samples:
                left = sample.outcomes(placements, left, combined)
                if not all(left):
                    break
            else:
                rules.append((placements, [min(places, key=_preference) for places in left]))
        for sample in samples:
            sample.check_inputs()
        if combined:
            return rules, f"the outputs of its shards combine by their {min(combined)} only, which is no placement"
        return rules, "its outputs are no shards, sums or means of what it computes of shards"

    def _samples(self) -> list[Sample]:
        """Inputs that the operator accepts: of several sizes, with several random draws of each."""
        tensors = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        floating, why = any(tensor.is_floating_point() for tensor in tensors), "it takes no sizes that were tried"
        for double, positive in product((True, False), (False, True)) if floating else [(True, False)]:
            samples = list[Sample]()
            for sizes in self._sizes(tensors):
                try:
                    drawn = [Sample(self, tensors, sizes, double, positive, seed) for seed in range(_DRAWS)]
                except _UntakenError as error:
                    why = str(error)
                    continue
                samples += drawn
                if len(samples) == _SIZES * _DRAWS:
                    break
            if len(samples) > _DRAWS:
                return samples
            why = "it takes one set of sizes only" if samples else why
        raise _NoRulesError(why)

    def _sizes(self, tensors: Sequence[Tensor]) -> list[dict[int, int]]:
        """Small sizes to replace the tensors' own: equal sizes stay equal, and divisible sizes stay divisible."""
        sizes = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
        unit = math.lcm(*self.parts)
        tried = [{size: 2 * unit * (place + more) for place, size in enumerate(sizes)} for more in (1, 2)]
        for factor in (64, 16, 4, 2, 1):  # mostly keeps which sizes divide which
            tried.append({size: size // factor if size % (factor * unit) == 0 else size for size in sizes})

        def entries(by: dict[int, int]) -> int:
            return sum(math.prod(by.get(size, size) for size in tensor.shape) for tensor in tensors)

        return [by for place, by in enumerate(tried) if by not in tried[:place] and entries(by) <= _LARGEST]

    def _candidates(self, inputs: Sequence[Tensor]) -> Iterator[tuple[Placement, ...]]:
        """Placements of the inputs to try: some inputs in shards, or some as summands."""
        whole = (WHOLE,) * len(inputs)
        options = [[WHOLE, *(dim for dim, size in enumerate(tensor.shape) if size > 1)] for tensor in inputs]
        if math.prod(map(len, options)) <= _MOST:
            yield from (placements for placements in product(*options) if placements != whole)
        else:
            yield from self._some_candidates(inputs, options)
        real = [place for place, tensor in enumerate(inputs) if tensor.is_floating_point()]
        counts = range(1, len(real) + 1) if len(real) <= 4 else (1, len(real))
        for summed in (slots for count in counts for slots in combinations(real, count)):
            yield tuple(SUM if place in summed else WHOLE for place in range(len(inputs)))

    def _some_candidates(
        self, inputs: Sequence[Tensor], options: Sequence[Sequence[Placement]]
    ) -> Iterator[tuple[Placement, ...]]:
        """A selection for many inputs: one or two sharded along any axis, or all along their first axis of one size."""
        tried = dict[tuple[Placement, ...], None]()
        for size in sorted({size for tensor in inputs for size in tensor.shape if size > 1}):
            shapes = [tuple(tensor.shape) for tensor in inputs]
            tried[tuple(shape.index(size) if size in shape else WHOLE for shape in shapes)] = None
        for count in (1, 2):
            for slots in combinations(range(len(inputs)), count):
                for places in product(*(options[slot][1:] for slot in slots)):
                    chosen = dict(zip(slots, places, strict=True))
                    tried[tuple(chosen.get(slot, WHOLE) for slot in range(len(inputs)))] = None
        yield from list(tried)[:_MOST]


def _preference(place: Placement) -> tuple[bool, int]:
    """Sort key of placements: whole, then shards, then those that must be added up or averaged."""
    return place < WHOLE, abs(place - WHOLE)


@dataclass
class Sample:
    """Inputs of an operator, and its outputs for them.

    Args:
        sizes: size in the operator's arguments -> size in this sample.
        double: whether floating-point inputs are in double precision.
        positive: whether floating-point inputs lie between 0 and 1.

    Raises:
        _UntakenError: the operator does not take these inputs.
        _NoRulesError: the operator does something that no rule allows.
    """

    trial: OperatorTrial
    tensors: Sequence[Tensor]
    sizes: Mapping[int, int]
    double: bool
    positive: bool
    seed: int
    inputs: list[Tensor] = field(init=False)
    outputs: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        shapes = [[self.sizes.get(size, size) for size in tensor.shape] for tensor in self.tensors]
        self._below = min((size for shape in shapes for size in shape if size > 1), default=2)
        pairs = zip(self.tensors, shapes, strict=True)
        try:
            self.inputs = [self._drawn(tensor.dtype, shape, draw) for tensor, shape in pairs]
            self._originals = [tensor.clone() for tensor in self.inputs]
            self.outputs = self.call(self.inputs)
            again = self.call(self.inputs)
        except MemoryError:
            raise
        except Exception as error:
            text = described(error)
            if "can't allocate memory" in text:  # torch's own error
                raise MemoryError from error
            raise _UntakenError(text) from error
        self._check(again)

    def _drawn(self, dtype: torch.dtype, shape: Sequence[int], draw: torch.Generator) -> Tensor:
        if dtype.is_complex:
            return torch.randn(shape, dtype=torch.complex128 if self.double else dtype, generator=draw)
        if dtype.is_floating_point:
            wanted = torch.float64 if self.double else dtype
            if self.positive:
                return (0.05 + 0.9 * torch.rand(shape, dtype=torch.float64, generator=draw)).to(wanted)
            return torch.randn(shape, dtype=torch.float64, generator=draw).to(wanted)
        return torch.randint(2 if dtype == torch.bool else self._below, shape, generator=draw).to(dtype)

    def call(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The operator's outputs for these tensors."""
        left = iter(tensors)
        args, kwargs = tree_map_only(Tensor, lambda _: next(left), self.trial.arguments)
        return _rows(self.trial.op(*args, **kwargs))

    def _check(self, again: Sequence[Any]) -> None:
        """Compare the outputs of two calls with each other and with what the operator declares."""
        self.check_inputs()
        if not all(self._well_formed(outputs) for outputs in (self.outputs, again)):
            raise _NoRulesError("it returns something else than the tensors that it declares")
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.inputs} - {0}
        computed = [output for output in self.outputs if output is not None]
        if any(output.untyped_storage().data_ptr() in memory for output in computed):
            raise _NoRulesError("it returns a view")
        if not all(bool(output.isfinite().all()) for output in computed):
            raise _UntakenError("it returns NaN or infinite numbers")
        if difference(again, self.outputs) or [one is None for one in again] != [one is None for one in self.outputs]:
            raise _NoRulesError("it draws random numbers, or its results differ for another reason")
        with without_data() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in self.inputs]
            try:
                declared = self.call(fakes)
            except Exception as error:
                raise _UntakenError(described(error)) from error
        if _forms(declared) != _forms(self.outputs):
            raise _NoRulesError("it returns tensors of other shapes or types than it declares")

    def _well_formed(self, outputs: Sequence[Any]) -> bool:
        """Whether there are as many outputs as the operator declares, all of them tensors or None."""
        return len(outputs) == self.trial.outputs and all(one is None or isinstance(one, Tensor) for one in outputs)

    def check_inputs(self) -> None:
        """Raise _NoRulesError if the operator has changed its inputs."""
        if not all(map(torch.equal, self.inputs, self._originals)):
            raise _NoRulesError("it changes its inputs")

    @cached_property
    def _close(self) -> float:
        """Tolerance of a rule's outputs; that of single precision if the operator rounds float64 inputs to it."""
        types = {tensor.dtype for tensor in (*self.inputs, *self.outputs) if tensor is not None}
        coarsest = max((_CLOSE.get(dtype, _ROUGH) for dtype in types if dtype.is_floating_point), default=1e-9)
        rounded = [one.float().to(one.dtype) if one.dtype == torch.float64 else one for one in self.inputs]
        differs = any(not torch.equal(*pair) for pair in zip(rounded, self.inputs, strict=True))
        same = differs and difference(self.call(rounded), self.outputs) == 0
        return max(coarsest, _CLOSE[torch.float32]) if same else coarsest

    def outcomes(
        self, placements: Sequence[Placement], possible: Sequence[frozenset[Placement]], combined: set[str]
    ) -> list[frozenset[Placement]]:
        """The placements among the `possible` ones that each output has if the inputs have `placements`.

        Args:
            combined: set to which the name of a combination is added that no placement expresses, such as "maximum".
        """
        left = list(possible)
        for parts in self.trial.parts:
            noise = torch.Generator().manual_seed(self.seed)
            placed = list(zip(self.inputs, placements, strict=True))
            if any(place >= 0 and tensor.shape[place] % parts for tensor, place in placed):
                return [frozenset()] * len(left)
            shards = [divide(tensor, place, parts, noise) for tensor, place in placed]
            try:
                rows = [self.call([column[rank] for column in shards]) for rank in range(parts)]
            except MemoryError:
                raise
            except Exception:
                return [frozenset()] * len(left)
            if not all(map(self._well_formed, rows)):
                return [frozenset()] * len(left)
            columns = zip(*rows, strict=True)
            left = [
                frozenset(place for place in places if self._joins(column, place, whole))
                for places, column, whole in zip(left, columns, self.outputs, strict=True)
            ]
            if not all(left):
                if SUM not in placements:
                    combined |= set(self._otherwise(rows))
                break
        return left

    def _joins(self, shards: Sequence[Any], place: Placement, whole: Tensor | None) -> bool:
        """Whether the ranks' outputs, with this placement, make up the whole output."""
        if whole is None or any(shard is None for shard in shards):
            return place == WHOLE and whole is None and all(shard is None for shard in shards)
        if place >= 0:
            shape = list(whole.shape)
            shape[place] //= len(shards)
            return all(list(shard.shape) == shape for shard in shards) and self._equal(join(shards, place), whole)
        if any(shard.shape != whole.shape for shard in shards):
            return False
        if place == WHOLE:
            return all(self._equal(shard, whole) for shard in shards)
        if not whole.is_floating_point():
            return False
        return self._equal(join(shards, SUM) / (len(shards) if place == MEAN else 1), whole)

    def _equal(self, one: Tensor, whole: Tensor) -> bool:
        return difference([one], [whole]) <= self._close

    def _otherwise(self, rows: Sequence[Sequence[Any]]) -> Iterator[str]:
        """Names of combinations that give the whole outputs but are no placements."""
        columns = list(zip(*rows, strict=True))
        for name, combine in (("maximum", torch.amax), ("minimum", torch.amin)):
            if all(
                isinstance(whole, Tensor)
                and all(shard.shape == whole.shape for shard in column)
                and self._equal(combine(torch.stack(column), 0), whole)
                for column, whole in zip(columns, self.outputs, strict=True)
            ):
                yield name


def _forms(outputs: Sequence[Any]) -> list[object]:
    return [(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else None for one in outputs]
