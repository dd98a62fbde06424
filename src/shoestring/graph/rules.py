"""Sharding rules of operators: the placements of inputs and outputs with which ranks can share an operator.

The rules are those of torch's DTensor, for one mesh axis. `own_rules` adds what torch lacks. For other operators, such
as those that a program defines itself, rules are found by trying (`discovery`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, fx
from torch.distributed.tensor import Partial, Replicate, Shard

from shoestring._torch import tree_map_only
from shoestring.graph._torch import sharding_strategies
from shoestring.graph.discovery import discover, parts_of
from shoestring.graph.own_rules import OWN
from shoestring.graph.placements import SUM, WHOLE, OwnRules, Placement, RuleSet, ShardingRule, can_be
from shoestring.graph.trace import arguments_of, inputs_of, outputs_of
from shoestring.sandbox import USUAL, SandboxBounds

NO_STRATEGY = "torch has no strategy"
"""Beginning of the reason for an operator without a strategy in torch, or with one that fails."""


class RuleBook:
    """The rules of operators on a number of ranks; operators with the same signature are looked up only once.

    Args:
        own: operator -> rules in addition to torch's.
        bounds: limits of the sandbox in which operators without rules are tried; None to try no operators.
    """

    _tried: ClassVar[dict[object, tuple[list[ShardingRule], str]]] = {}
    """Results of all trials in this process, shared by all books that try the same numbers of shards."""

    def __init__(self, ranks: int, own: Mapping[Any, OwnRules] = OWN, bounds: SandboxBounds | None = USUAL) -> None:
        self.ranks, self.own, self.bounds = ranks, own, bounds
        self._known = dict[object, RuleSet]()

    def __getitem__(self, node: fx.Node) -> RuleSet:
        key = signature(node)
        if key not in self._known:
            self._known[key] = self._find(node)
        return self._known[key]

    def __len__(self) -> int:
        """Number of different operators (with shapes of inputs) that were looked up."""
        return len(self._known)

    def _find(self, node: fx.Node) -> RuleSet:
        outputs, inputs = outputs_of(node), [source.meta["val"] for source in inputs_of(node)]
        whole = ShardingRule((WHOLE,) * len(outputs), (WHOLE,) * len(inputs))
        if not inputs:
            return RuleSet((whole,), "it has no inputs, so every rank makes the whole tensor")
        args, kwargs = arguments_of(node)
        rules, reason = self._of_torch(node.target, args, kwargs, len(outputs), len(inputs))
        if own := self.own.get(node.target):
            rules += own(*args, **kwargs)
        if tried := not own and not rules and bool(reason) and any(tensor.ndim for tensor in inputs):
            rules, why = self._by_trying(node)
            reason = "" if rules else f"{reason}; when tried, {why}" if why else reason
        fitting = [rule for rule in rules if self._fits(rule, outputs, inputs) and rule.inputs + rule.outputs]
        distinct = tuple(dict.fromkeys((whole, *fitting)))
        if not any(tensor.ndim for tensor in inputs):
            reason = "it computes single numbers"
        elif len(distinct) == 1 and not reason:
            reason = f"no rule divides tensors of these shapes by {self.ranks}"
        return RuleSet(distinct, reason if len(distinct) == 1 else "", tried and len(distinct) > 1)

    def _by_trying(self, node: fx.Node) -> tuple[list[ShardingRule], str]:
        """The rules that are found by trying an operator, and the reason if there are none."""
        if self.bounds is None:
            return [], ""
        key = (signature(node), parts_of(self.ranks), self.bounds)
        if key not in self._tried:
            args, kwargs = arguments_of(node)
            self._tried[key] = discover(node.target, args, kwargs, outputs_of(node), self.ranks, self.bounds)
        return self._tried[key]

    def _of_torch(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: int, inputs: int
    ) -> tuple[list[ShardingRule], str]:
        """torch's rules, and the reason if there are none."""
        try:
            rows = sharding_strategies(op, args, kwargs, self.ranks)
        except Exception as error:  # strategies check their arguments by assertions and by reading shapes
            return [], f"{NO_STRATEGY} that works: {type(error).__name__} {error}"[:120]
        if rows is None:
            return [], f"{NO_STRATEGY} for it"
        read = [[_placement(one) for one in row] for row in rows if len(row) == outputs + inputs]
        whole_rows = [row for row in read if None not in row]
        rules = [ShardingRule(tuple(row[:outputs]), tuple(row[outputs:])) for row in whole_rows]  # pyrefly: ignore
        return rules, "" if rules or not rows else "torch's strategy needs placements that shoestring does not have"

    def _fits(self, rule: ShardingRule, outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> bool:
        """Whether all tensors can have the placements of a rule; see `can_be`."""
        pairs = [*zip(rule.outputs, outputs, strict=True), *zip(rule.inputs, inputs, strict=True)]
        return all(tensor is None or can_be(placement, tensor, self.ranks) for placement, tensor in pairs)


def signature(node: fx.Node) -> object:
    """What the rules of an operator depend on: the operator, the shapes of its inputs and its other arguments."""
    args, kwargs = arguments_of(node, lambda source: source.meta["val"])
    described = tree_map_only(Tensor, lambda tensor: (tuple(tensor.shape), tensor.dtype), (args, dict(kwargs)))
    return node.target, str(described)


def _placement(placement: Any) -> Placement | None:
    """Translate a placement of torch; None for a kind that is not supported (averages, strided shards, masked sums)."""
    if placement is None or isinstance(placement, Replicate):
        return WHOLE
    if type(placement) is Shard:
        return placement.dim if placement.dim >= 0 else None
    return SUM if type(placement) is Partial and placement.reduce_op == "sum" else None
