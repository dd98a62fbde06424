"""Passes over the graph that torch.compile traces, and the compiler backend that runs after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shoestring._torch import compile_joint, lookup_backend
from shoestring.core.errors import ConfigError

GraphPass = Callable[[fx.GraphModule], fx.GraphModule | None]
"""A function that changes a graph in place and returns None, or returns a new graph."""


@dataclass(eq=False)
class GraphPasses:
    """How torch.compile treats the model: passes over its graph, then one backend. With neither, it stays eager."""

    backend: str | Callable[..., Any] = ""
    """Backend of torch.compile; if empty, "aot_eager" if there are joint passes, or "eager" if only forward passes."""
    forward: list[GraphPass] = field(default_factory=list)
    joint: list[GraphPass] = field(default_factory=list)

    def compiler(self) -> str | Callable[..., Any]:
        """The backend to give to torch.compile; empty if nothing is to be compiled.

        Raises:
            ConfigError: there are passes over the joint graph, but the backend builds no such graph.
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
    """Run passes over a graph; after each pass, check the graph and regenerate its Python code."""
    for work in passes:
        graph = work(graph) or graph
        graph.graph.lint()
        graph.recompile()
    return graph
