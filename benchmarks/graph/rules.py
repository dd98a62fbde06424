"""Rules: whether every operator has one or a reason, and whether what ranks compute by them is what one rank does."""

from __future__ import annotations

import math
import random
from functools import cache

from benchmarks.graph.models import CASES, SMALL_CASES
from benchmarks.harness import Bar, Deadline
from benchmarks.rows import Measured
from shoestring.graph.lockstep import (
    RuleCheck,
    check_rules,
    difference,
    random_plan,
    real_values,
    run_divided,
    run_whole,
)
from shoestring.graph.rules import NO_STRATEGY, RuleBook

RANKS, PLANS = 2, 50
CLOSE = 1e-10
SINGLE = 1e-5
"""Where the model itself rounds to single precision."""


def unexplained(deadline: Deadline) -> Measured:
    """The number of operators that torch and shoestring have no strategy for, so that they can only be whole."""
    missing, different, divided = set[str](), 0, 0
    for name, case in CASES.items():
        deadline.check()
        step, book = case.fake(), RuleBook(4)
        sets = {id(rules): (node, rules) for node in step.operators for rules in [book[node]]}
        different, divided = different + len(sets), divided + sum(len(one.rules) > 1 for _, one in sets.values())
        missing |= {f"{name}: {node.target}" for node, one in sets.values() if one.reason.startswith(NO_STRATEGY)}
    told = f"{different} different operators of {len(CASES)} models, {divided} of them can be divided"
    return Measured(len(missing), f"{told}; without a strategy: {sorted(missing) or 'none'}")


@cache
def checks() -> dict[str, list[RuleCheck]]:
    """The checked rules of each small model."""
    checked = {}
    for name, case in SMALL_CASES.items():
        step, model, batch = case.real(in_double=False)  # as the model is
        checked[name] = check_rules(step, RuleBook(RANKS), real_values(step, model, *batch))
    return checked


def limit(check: RuleCheck) -> float:
    """How far a rule's outputs may be from the whole ones: their types decide."""
    import torch

    types = {tensor.dtype for tensor in check.tensors}
    return SINGLE if torch.float32 in types else CLOSE


def wrong() -> Measured:
    """The number of rules by which ranks compute something else than one rank."""
    every = [(name, check) for name, checked in checks().items() for check in checked]
    failed = [f"{name}: {check}" for name, check in every if not check.error <= limit(check)]
    worst = max((check.error for _, check in every if math.isfinite(check.error)), default=0.0)
    return Measured(len(failed), f"of {len(every)}, largest difference {worst:.1g}; {failed or 'none wrong'}")


def equal(deadline: Deadline) -> Measured:
    """The largest difference of a loss, a gradient or a buffer of drawn plans from those of one rank."""
    off = dict[str, float]()
    for name, case in SMALL_CASES.items():
        step, model, batch = case.real()
        book, values, draw = RuleBook(RANKS), real_values(step, model, *batch), random.Random(0)
        whole = run_whole(step, values)
        for _ in range(PLANS):
            deadline.check()
            divided = run_divided(step, random_plan(step, book, draw), values, RANKS)
            off[name] = max(off.get(name, 0.0), difference(divided, whole))
    return Measured(max(off.values()), "; ".join(f"{name} {value:.1g}" for name, value in off.items()))


def rows() -> list[Bar]:
    """The bars of rules."""
    models = "GPT, Llama, ViT and ResNet-50"
    drawn = f"largest relative difference of {PLANS} drawn plans for each of {models} (small) from one rank, fp64"
    return [
        Bar("graph.plans-equal", drawn, "<=", CLOSE, equal, kind="exact"),
        Bar(
            "graph.rules-missing",
            f"operators of {models} that neither torch nor shoestring has a strategy for",
            "<=",
            0,
            unexplained,
            kind="exact",
        ),
        Bar(
            "graph.rules-wrong",
            f"rules of operators of {models} (small) by which {RANKS} ranks compute something else than one, fp64",
            "<=",
            0,
            lambda deadline: wrong(),
            kind="exact",
        ),
    ]
