"""The graphs of a job that [precision.graph] narrows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx

from shoestring.core.attachments import Attachments
from shoestring.precision.autocast import TYPES
from shoestring.precision.fact_names import CHOSEN
from shoestring.precision.graph_pass import Rules, narrow

if TYPE_CHECKING:
    from shoestring.precision.settings import Graph


class NarrowedGraphs:
    """Applies the pass to the graphs that torch.compile traces, and adds up its statistics in the trace's facts."""

    def __init__(self, attachments: Attachments, settings: Graph) -> None:
        self.facts, self.elements = attachments.trace.facts, list[tuple[int, int]]()
        self.rules = Rules(TYPES[settings.dtype], settings.forward_propagation, settings.wide, settings.fp8)

    def work(self, graph: fx.GraphModule) -> None:
        """Narrow a graph in place by the present rules."""
        narrowing = narrow(graph, self.rules)
        self.elements.append((narrowing.narrow, narrowing.elements))
        every = sum(count for _, count in self.elements)
        self.facts["narrowed_elements"] = sum(count for count, _ in self.elements) / max(every, 1)
        for name, count in (
            ("narrowed_casts", narrowing.casts),
            ("narrowed_operators", len(narrowing.bits.narrow)),
            ("narrowed_products", narrowing.eight),
        ):
            self.facts[name] = self.facts.get(name, 0) + count

    def choose(self, chosen: Mapping[str, int]) -> None:
        """Change the bits of some groups; all graphs of the program are then recompiled when they run next."""
        if chosen == self.rules.chosen:
            return
        self.rules = self.rules._replace(chosen=dict(chosen))
        self.facts |= {f"{CHOSEN}{name}": bits for name, bits in chosen.items()}
        if self.elements:
            # Recompilations count towards torch's limit for a function. Beyond the limit, torch would silently run the
            # function uncompiled, in 32 bits.
            torch.compiler.reset()
            self.elements.clear()
            self.facts |= dict.fromkeys(("narrowed_casts", "narrowed_operators", "narrowed_products"), 0)
