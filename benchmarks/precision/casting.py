"""Casts, narrowed elements and errors of gradients, beside torch's autocast on the same models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from benchmarks.harness import Bar, Deadline
from benchmarks.intervals import of_ratio
from benchmarks.precision.searched import chosen
from benchmarks.precision.steps import MODELS, SEEDS, Cast, autocast, by_graph, drawn
from benchmarks.rows import Measured, Op
from shoestring.precision.graph_pass import Rules

WAYS: dict[str, Callable[[str, int], Cast]] = {
    "autocast": autocast,
    "passes": by_graph,
    "graph": lambda name, seed: by_graph(name, seed, Rules(chosen=chosen(name))),
    "forward": lambda name, seed: by_graph(name, seed, Rules(forward=True)),
}
"""`passes` are the lists and passes alone, and `graph` has the bits that measured errors have chosen."""


@cache
def traced(name: str, way: str) -> Cast:
    """A step with the weights of the first seed: casts and sizes do not depend on numbers."""
    return WAYS[way](name, 0)


@cache
def errors(name: str, way: str) -> list[float]:
    """The relative error of gradients for each draw of weights and batch."""
    return [drawn(name, seed).error(WAYS[way](name, seed).step) for seed in range(SEEDS)]


def casts(name: str) -> Measured:
    """Casts of the pass over those of autocast."""
    ours, theirs, others = (traced(name, way).casts for way in ("graph", "autocast", "passes"))
    note = f"{ours} and {theirs}; without measuring {others}, with forward propagation {traced(name, 'forward').casts}"
    return Measured(ours / theirs, note)


def elements(name: str) -> Measured:
    """The narrowed fraction of elements, with the bits that measured errors chose, over that of autocast."""
    ours, theirs, others = (traced(name, way) for way in ("graph", "autocast", "passes"))
    note = (
        f"{ours.elements:.3f} and {theirs.elements:.3f}; without measuring {others.elements:.3f}; "
        f"{ours.nbytes / theirs.nbytes:.3f} of its bytes, without measuring {others.nbytes / theirs.nbytes:.3f}"
    )
    return Measured(ours.elements / theirs.elements, note)


def ahead(name: str) -> Measured:
    """The narrowed fraction of the forward pass's elements, with forward propagation."""
    return Measured(traced(name, "forward").ahead, f"autocast {traced(name, 'autocast').ahead:.3f}")


def error(name: str, way: str) -> Measured:
    """The error of gradients over that of autocast, for the same weights and batches."""
    ours, theirs = errors(name, way), errors(name, "autocast")
    return of_ratio(ours, theirs, f"{SEEDS} draws; {sum(ours) / SEEDS:.3g} and {sum(theirs) / SEEDS:.3g}")


def rows() -> list[Bar]:
    """The bars of the pass on each model."""

    def bar(kind: str, name: str, what: str, op: Op, limit: float, measure: Callable[[], Measured]) -> Bar:
        def measured(deadline: Deadline) -> Measured:
            deadline.check()
            return measure()

        exact = "exact" if kind in ("casts", "elements", "ahead") else "drawn"
        return Bar(f"precision.{kind}-{name}", f"{name}: {what}", op, limit, measured, "torch's autocast", kind=exact)

    bars = list[Bar]()
    for name in MODELS:
        again = "with forward propagation"
        bars += [
            bar("casts", name, "casts over those of autocast", "<=", 1.0, lambda name=name: casts(name)),
            bar("elements", name, "narrowed elements over autocast's", ">=", 1.05, lambda name=name: elements(name)),
            bar("error", name, "error of gradients over autocast's", "<=", 1.0, lambda name=name: error(name, "graph")),
            bar("ahead", name, f"narrowed part of the forward pass, {again}", ">=", 0.9, lambda name=name: ahead(name)),
            bar(
                "ahead-error", name, f"error of gradients over autocast's, {again}", "<=", 1.5,
                lambda name=name: error(name, "forward"),
            ),
        ]  # fmt: skip
    return bars
