"""The bits that measured errors choose for a model's operators, measured and decided as a run does it."""

from __future__ import annotations

import copy
from functools import cache

from benchmarks.precision.steps import SEEDS, RoundedProducts, autocast, drawn, plain
from shoestring.graph._torch import nodes_of_joint
from shoestring.graph.trace import JointTrace
from shoestring.precision.choosing import Effect, choose
from shoestring.precision.graph_pass import Rules, count_bytes, groups_of, narrow
from shoestring.precision.measuring import LEAST

DRAWS = range(SEEDS, SEEDS + 2)
"""Weights and batches on which errors are measured for the choice; others are compared with autocast afterwards."""
ROUNDS = 3
"""Changes of the list; as many as a run makes by default."""
BOUND = 1.0
"""Bound on the error of gradients, in errors of autocast, as runs have it by default."""


def _narrowed(step: JointTrace, rules: Rules) -> JointTrace:
    module = copy.deepcopy(step.module)
    narrow(module, rules)
    return JointTrace(module.graph, nodes_of_joint(module.graph), module, 0.0, step.dynamo)


@cache
def chosen(name: str) -> dict[str, int]:
    """Name of a group of operators -> the bits that measured errors choose for it."""
    steps = {seed: plain(name, seed) for seed in DRAWS}
    graph = steps[DRAWS[0]].module.graph

    def squared(narrowed: JointTrace, seed: int) -> float:
        return drawn(name, seed).error(narrowed, RoundedProducts) ** 2

    def measured(rules: Rules) -> tuple[list[float], int]:
        made = {seed: _narrowed(step, rules) for seed, step in steps.items()}
        return [squared(step, seed) for seed, step in made.items()], count_bytes(made[DRAWS[0]].module.graph)

    bound = BOUND**2 * sum(squared(autocast(name, seed).step, seed) for seed in DRAWS) / len(DRAWS)
    bits = dict[str, int]()
    for _ in range(ROUNDS):
        rules, effects = Rules(chosen=bits), dict[str, Effect]()
        groups = groups_of(graph, rules)
        total = sum(group.elements for group in groups.values())
        now, nbytes = measured(rules)
        for group_name, group in groups.items():
            if group.elements < LEAST * total:
                continue
            other, other_bytes = measured(rules._replace(chosen={**bits, group_name: group.other}))
            sign = 1 if group.other == group.few else -1
            error = sum(one - before for one, before in zip(other, now, strict=True)) / len(DRAWS)
            effects[group_name] = Effect(sign * error, sign * float(nbytes - other_bytes), group.product)
        few = {group_name for group_name in effects if groups[group_name].bits == groups[group_name].few}
        fewer = choose(effects, few, sum(now) / len(DRAWS), bound)
        if fewer == few:
            break
        bits |= {
            one: groups[one].few if one in fewer else groups[one].other
            for one in effects
            if (one in fewer) != (one in few)
        }
    return bits
