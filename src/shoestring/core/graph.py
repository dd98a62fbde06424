"""How passes over a traced graph compose around the one compiler at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shoestring._torch import compile_joint, lookup_backend
from shoestring.core.errors import ConfigError

GraphPass = Callable[[fx.GraphModule], fx.GraphModule | None]
"""Changes a graph in place, or returns another one."""


@dataclass(eq=False)
class Graph:
    """What torch.compile does to the model: passes in order, then one backend. Eager where there is neither."""

    backend: str | Callable[..., Any] = ""
    """Without one, graphs that passes changed are interpreted ("eager"; "aot_eager" where there are joint passes)."""
    forward: list[GraphPass] = field(default_factory=list)
    joint: list[GraphPass] = field(default_factory=list)

    def compiler(self) -> str | Callable[..., Any]:
        """What torch.compile takes as its backend; empty where nothing is to be compiled.

        Raises:
            ConfigError: there are passes on the joint graph, and the backend builds none.
        """
        backend = self.backend or ("aot_eager" if self.joint else "eager" if self.forward else "")
        if not (self.forward or self.joint):
            return backend
        if self.joint and backend not in ("inductor", "aot_eager"):
            raise ConfigError(f"the backend `{backend}` builds no joint graph, which a pass needs", hint="use inductor")

        def compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            graph = run_passes(self.forward, graph)
            if self.joint:
                return compile_joint(backend, graph, inputs, lambda joint: run_passes(self.joint, joint))
            return lookup_backend(backend)(graph, inputs)

        return compiled


def run_passes(passes: Sequence[GraphPass], graph: fx.GraphModule) -> fx.GraphModule:
    """The graph after all passes, checked and compiled to Python anew after each."""
    for work in passes:
        graph = work(graph) or graph
        graph.graph.lint()
        graph.recompile()
    return graph
