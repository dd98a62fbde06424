"""Splits messages of a program into tiles, so that they overlap with the operators that feed and follow them.

Tiles are like shards, but one rank computes them one after the other, where several ranks compute shards at the same
time. So the rules that divide operators among ranks also say along which axis operators next to a message can be
computed in tiles: the tiles of a matrix product's rows can be sent one by one while the next rows are computed. A
region is a message together with the operators beside it that are computed in its tiles. Nodes outside the region read
its tiles concatenated or, if the tiles are summands, added up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shoestring.graph.costs import flop_of
from shoestring.graph.lockstep import local_arguments, local_operator
from shoestring.graph.placements import SUM, WHOLE, Placement, ShardingRule
from shoestring.graph.program import RankProgram, add_message, local_value
from shoestring.graph.rules import RuleBook
from shoestring.graph.trace import inputs_of, outputs_of, producer_of

aten = torch.ops.aten
LARGEST = 40
"""Largest number of operators in a region."""


@dataclass(frozen=True)
class Region:
    """A message in tiles, with the operators that are computed in tiles too.

    Args:
        begun: the node that begins the message. axis: dimension of the message's tensor that is tiled.
        rules: operator -> rule by which it is divided into tiles; the message is not included.
    """

    begun: fx.Node
    axis: int
    tiles: int
    rules: Mapping[fx.Node, ShardingRule]


# -- growing regions ---------------------------------------------------------------------------------------------------


def regions_of(begun: fx.Node, book: RuleBook, products: int) -> Iterator[Region]:
    """Yield the regions around a message, one for each axis that can be tiled.

    Args:
        book: rules for as many shards as there are tiles.
        products: number of matrix products that are tiled with the message, on each path before and after it.
    """
    tensor, moved = inputs_of(begun)[0], moved_tensor(begun)
    _, source, target, _ = begun.args
    for axis, size in enumerate(moved.meta["val"].shape):
        if axis not in (source, target) and size and size % book.ranks == 0:
            growing = _Growing(book, moved, axis)
            growing.backward(tensor, axis, products)
            growing.forward(moved, axis, products)
            if growing.rules:
                yield Region(begun, axis, book.ranks, growing.rules)


def moved_tensor(begun: fx.Node) -> fx.Node:
    """The tensor that a message of one tensor delivers."""
    (end,) = begun.users
    (pick,) = end.users
    return pick


class _Growing:
    """Builds a region, starting from its message."""

    def __init__(self, book: RuleBook, moved: fx.Node, axis: int) -> None:
        self.book, self.rules = book, dict[fx.Node, ShardingRule]()
        self._axes = {producer_of(moved): axis}  # output of an operator or of the message -> axis of its tiles

    def backward(self, tensor: fx.Node, axis: int, products: int) -> None:
        """Add the operators that compute a tensor, up to `products` matrix products away."""
        waiting = [(tensor, axis, products)]
        while waiting and len(self.rules) < LARGEST:
            tensor, axis, left = waiting.pop(0)
            node, place = producer_of(tensor)
            if node in self.rules or left <= 0:
                continue
            rule = self._rule(node, lambda rule, place=place, axis=axis: rule.outputs[place] == axis)
            if rule is not None and SUM not in rule.outputs:
                self._add(node, rule)
                left -= flop_of(node) > 0
                pairs = zip(inputs_of(node), rule.inputs, strict=True)
                waiting += [(source, at, left) for source, at in pairs if at >= 0]

    def forward(self, tensor: fx.Node, axis: int, products: int) -> None:
        """Add the operators that read a tensor, up to `products` matrix products away."""
        waiting = [(tensor, products)]
        while waiting and len(self.rules) < LARGEST:
            tensor, left = waiting.pop(0)
            for node in tensor.users if left > 0 else ():
                if node in self.rules:
                    continue
                rule = self._rule(node, lambda rule, node=node: self._reads_tiles(node, rule))
                if rule is not None:
                    self._add(node, rule)
                    after = left - (flop_of(node) > 0)
                    picks = [user for user in node.users if user.target is operator.getitem]
                    waiting += [(output, after) for output in picks or [node]]

    def _add(self, node: fx.Node, rule: ShardingRule) -> None:
        self.rules[node] = rule
        self._axes |= {(node, place): at for place, at in enumerate(rule.outputs)}

    def _reads_tiles(self, node: fx.Node, rule: ShardingRule) -> bool:
        """Whether a rule reads all of the region's tiles among its inputs, at least one, along their own axis."""
        pairs = [(self._axes.get(producer_of(one)), at) for one, at in zip(inputs_of(node), rule.inputs, strict=True)]
        known = [(axis, at) for axis, at in pairs if axis is not None]
        return bool(known) and all(axis == at for axis, at in known)

    def _rule(self, node: fx.Node, fits: Callable[[ShardingRule], bool]) -> ShardingRule | None:
        """Among an operator's rules that fit, the one that splits the most bytes of its inputs into tiles."""
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # tiles would draw other numbers
            return None
        possible = [rule for rule in self.book[node].rules if _makes_tiles(rule, node) and fits(rule)]

        def whole(rule: ShardingRule) -> int:
            pairs = zip(inputs_of(node), rule.inputs, strict=True)
            return sum(source.meta["val"].nbytes for source, at in pairs if at == WHOLE)

        return min(possible, key=whole, default=None)


def _makes_tiles(rule: ShardingRule, node: fx.Node) -> bool:
    """Whether each tile can be computed by itself, and the tiles, joined or added up, are the outputs."""
    used = {place for place, output in enumerate(outputs_of(node)) if output is not None}
    outputs = [at for place, at in enumerate(rule.outputs) if place in used]
    tiled = any(at >= 0 for at in rule.inputs) and SUM not in rule.inputs and WHOLE not in outputs
    return tiled and rule.exchange is None


# -- building ----------------------------------------------------------------------------------------------------------


def tiled(program: RankProgram, regions: Sequence[Region]) -> RankProgram:
    """The program with the messages and operators of regions in tiles; the first region of an operator counts."""
    tiling = _Tiling(regions)
    for node in program.graph.nodes:
        tiling.emit(node)
    return RankProgram(tiling.graph, program.mesh, program.inputs, program.outputs)


class _Tiling:
    """Copies a program, with some nodes in tiles."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.graph = fx.Graph()
        self.regions = {node: region for region in reversed(regions) for node in region.rules}
        self.messages = {region.begun: region for region in regions}
        self._ends = {end for begun in self.messages for end in begun.users}
        self._whole = dict[fx.Node, fx.Node]()  # node -> its copy, or its joined tiles
        self._pieces = dict[fx.Node, tuple[list[fx.Node], tuple[Placement, ...], Region]]()

    def emit(self, node: fx.Node) -> None:
        if node in self.regions:
            self._operator(node, self.regions[node])
        elif node in self.messages:
            self._message(node, self.messages[node])
        elif node.target is operator.getitem and node.args[0] in self._pieces:
            self._pick(node)
        elif node not in self._ends and node not in self._pieces:  # others belong to a message in tiles
            self._whole[node] = self.graph.node_copy(node, self._read)

    def _pick(self, node: fx.Node) -> None:
        """Copy a node that picks one output of an operator in tiles."""
        pieces, outputs, region = self._pieces[node.all_input_nodes[0]]
        place = node.args[1]
        assert isinstance(place, int)
        picks = [self.graph.call_function(operator.getitem, (piece, place)) for piece in pieces]
        for pick in picks:
            pick.meta["val"] = local_value(node.meta["val"], (outputs[place],), region.tiles)
        self._pieces[node] = picks, (outputs[place],), region

    def _operator(self, node: fx.Node, region: Region) -> None:
        rule, pieces = region.rules[node], list[fx.Node]()
        columns = [self._tiles(one, at, region) for one, at in zip(inputs_of(node), rule.inputs, strict=True)]
        for tile in range(region.tiles):
            args, kwargs = local_arguments(node, rule, [column[tile] for column in columns], region.tiles)
            piece = self.graph.call_function(local_operator(node), tuple(args), kwargs)
            piece.meta["val"] = local_value(node.meta["val"], rule.outputs, region.tiles)
            pieces.append(piece)
        self._pieces[node] = pieces, rule.outputs, region

    def _message(self, node: fx.Node, region: Region) -> None:
        pick, tensors = moved_tensor(node), self._tiles(inputs_of(node)[0], region.axis, region)
        value = local_value(pick.meta["val"], (region.axis,), region.tiles)
        pieces = [add_message(self.graph, [tensor], node.args[1:], [value])[0] for tensor in tensors]
        self._pieces[pick] = pieces, (region.axis,), region

    def _tiles(self, tensor: fx.Node, axis: Placement, region: Region) -> list[fx.Node]:
        """The tiles of a tensor along an axis; the whole tensor for each tile if `axis` is WHOLE."""
        if axis != WHOLE and tensor in self._pieces:
            pieces, (own, *_), of = self._pieces[tensor]
            if own == axis and of.tiles == region.tiles:
                return pieces
        whole = self._read(tensor)
        if axis == WHOLE:
            return [whole] * region.tiles
        value = local_value(tensor.meta["val"], (axis,), region.tiles)
        size, slices = value.shape[axis], list[fx.Node]()
        for tile in range(region.tiles):
            slices.append(self.graph.call_function(aten.slice.Tensor, (whole, axis, tile * size, (tile + 1) * size)))
            slices[-1].meta["val"] = value
        return slices

    def _read(self, node: fx.Node) -> fx.Node:
        """The copy of a node; if it is in tiles, the tiles concatenated or added up."""
        if node not in self._whole:
            pieces, (axis, *_), _ = self._pieces[node]
            joined = pieces[0]
            if axis >= 0:
                joined = self.graph.call_function(aten.cat.default, (pieces, axis))
            for piece in pieces[1:] if axis == SUM else ():
                joined.meta["val"] = node.meta["val"]
                joined = self.graph.call_function(aten.add.Tensor, (joined, piece))
            joined.meta["val"] = node.meta["val"]
            self._whole[node] = joined
        return self._whole[node]
