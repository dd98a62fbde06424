"""Rules that are found by trying: whether poisoned operators are survived, and whether the rules are right."""

from __future__ import annotations

from collections import Counter

from torch import fx

from benchmarks.graph.models import SMALL_CASES
from benchmarks.graph.rules import RANKS, limit
from benchmarks.harness import Bar, Deadline
from benchmarks.rows import Measured
from shoestring.graph.discovery import discover
from shoestring.graph.lockstep import check_rules, real_values
from shoestring.graph.placements import WHOLE, RuleSet, ShardingRule, can_be
from shoestring.graph.rules import NO_STRATEGY, RuleBook, signature
from shoestring.graph.trace import arguments_of, inputs_of, outputs_of
from tests.rigs.poisoned_operators import survived

SEED, POISONED = 1, 200


def poisoned(deadline: Deadline) -> Measured:
    """The number of poisoned operators after which the process lives and that got a reason or right rules."""
    results = list(survived(SEED, POISONED, deadline.check))
    right = [result for result in results if result["right"]]
    wrong = Counter(result["kind"] for result in results if not result["right"])
    ruled = sum(bool(result["rules"]) for result in right)
    told = f"{ruled} got rules, {len(right) - ruled} a reason; {len({result['kind'] for result in results})} kinds"
    return Measured(len(right), f"{told}; {POISONED - len(results)} ended the process; wrong: {dict(wrong) or 'none'}")


class TriedBook(RuleBook):
    """The rules that trying finds, also of operators that torch has rules for."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.tried = dict[object, RuleSet]()

    def __getitem__(self, node: fx.Node) -> RuleSet:
        key = signature(node)
        if key not in self.tried:
            inputs, outputs = [source.meta["val"] for source in inputs_of(node)], outputs_of(node)
            rules, reason = discover(node.target, *arguments_of(node), outputs, self.ranks)

            def fits(rule: ShardingRule) -> bool:
                pairs = zip((*rule.outputs, *rule.inputs), (*outputs, *inputs), strict=True)
                return all(tensor is None or can_be(place, tensor, self.ranks) for place, tensor in pairs)

            whole = ShardingRule((WHOLE,) * len(outputs), (WHOLE,) * len(inputs))
            self.tried[key] = RuleSet((whole, *filter(fits, rules)), reason)
        return self.tried[key]


def wrong(deadline: Deadline) -> Measured:
    """The number of rules, found by trying operators that torch has rules for, that the validator finds wrong."""
    failed, tried, found, known = list[str](), 0, 0, 0
    for name, case in SMALL_CASES.items():
        deadline.check()
        step, model, batch = case.real()
        book, usual = TriedBook(RANKS), RuleBook(RANKS, bounds=None)
        checks = check_rules(step, book, real_values(step, model, *batch))
        failed += [f"{name}: {check}" for check in checks if not check.error <= limit(check)]
        for node in {signature(node): node for node in step.operators}.values():
            rules = {str(rule) for rule in usual[node].rules if rule.divides and rule.exchange is None}
            if rules and signature(node) in book.tried and not usual[node].reason.startswith(NO_STRATEGY):
                tried, known = tried + 1, known + len(rules)
                found += len(rules & {str(rule) for rule in book[node].rules})
    told = f"of {tried} operators; trying finds {found} of the {known} rules by which these are divided"
    return Measured(len(failed), f"{told}; {failed[:5] or 'none wrong'}")


def rows() -> list[Bar]:
    """The bars of rules that are found by trying."""
    return [
        Bar(
            "graph.poisoned-survived",
            f"of {POISONED} generated operators that crash, hang, write or lie: those after which the process that"
            " tried them lives, nothing else has changed, and they have right rules or a reason for none",
            ">=",
            POISONED,
            poisoned,
            seeds=(SEED,),
            kind="exact",
        ),
        Bar(
            "graph.tried-wrong",
            f"rules found by trying operators of GPT, Llama, ViT and ResNet-50 (small) that torch has rules for, by"
            f" which {RANKS} ranks compute something else than one, fp64",
            "<=",
            0,
            wrong,
            kind="exact",
        ),
    ]
