"""What the analyses read out of a profile: which calls a line of the program makes, and what they take in all."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoestring.profile.analyses import costs, gains
from shoestring.profile.analyses.gains import PredictedGain
from shoestring.profile.analyses.statements import Text
from shoestring.profile.findings import Finding
from shoestring.profile.lines import in_backward, nearest_lines, package_of, without_imports
from shoestring.profile.recording import Profile
from shoestring.profile.tree import ENGINE, CallTree, Integers, NodeKind, totals, without_native

MATTERS = 0.07
"""Share of the time that a change is expected to save, from which on it is worth a finding."""

LARGEST_ENGINE = 0.4
"""Of the time of its functions, what the backward pass takes outside of them at most; beyond that, it waits."""
MOST = 0.85
"""Share of the calls whose counts are multiples of the number of steps, where that is not known otherwise."""

Place = tuple[str, int]

_STEP = "Optimizer.step#"
_TENSOR = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]((?: channels_last\w*| (?:not )?strided)?)( [a-z]+)?")

_TRACING = re.compile(
    r"/torch/_dynamo/convert_frame\.py\t|/torch/jit/_trace\.py\t_?trace|/torch/fx/_symbolic_trace\.py\t|"
    r"/torch/fx/experimental/proxy_tensor\.py\t|/torch/export/|"
    r"/jax/_src/(interpreters/(partial_eval|pxla|mlir)|compiler|pjit)\.py\t.*(trace|lower|compile|infer_params)"
)
_APPLY = {"map", "imap", "imap_unordered", "filter", "starmap"}
_FOR = re.compile(r"\s*(async )?for\b.*\bin\b")
_MODULE = re.compile(r"/torch/nn/modules/\w+\.py\t\w+\.forward$")


@dataclass(frozen=True)
class TensorKind:
    """What a tensor is."""

    dtype: str
    elements: int
    layout: str
    """`channels_last`, `strided` or, where it is contiguous, nothing."""
    device: str = "cpu"


def tensors_of(text: str) -> list[TensorKind]:
    """The tensors in a text such as `float32[8,64], float32[64] strided`."""
    return [
        TensorKind(dtype, math.prod(map(int, filter(None, sizes.split(",")))), layout.strip(), device.strip() or "cpu")
        for dtype, sizes, layout, device in _TENSOR.findall(text)
    ]


@dataclass(frozen=True)
class OperatorCall:
    """An operator that Python calls, with all that it calls; times in nanoseconds."""

    node: int
    name: str
    place: Place
    """The line of the program that it runs for."""
    frame: tuple[int, int]
    """What is the same for all lines of one function that one caller called."""
    count: int
    forward: int
    backward: float
    """Of its gradient, with the engine's part of it."""
    evaluated: int
    """How often its gradient was computed."""
    modules: int
    """Modules of torch.nn between the line and the operator: 1 for `self.linear(x)`, more within nn.Sequential."""
    direct: bool
    """Whether the line itself calls it, and no code of a library that it calls."""
    arguments: str
    """As the tree has them; empty if they are not known."""
    dense: bool
    """Whether it is, or contains, a matrix product, a convolution or attention."""
    graphed: bool
    """Whether it recorded a function for the backward pass."""

    @property
    def given(self) -> list[TensorKind]:
        """The tensors of a call, as far as known."""
        return tensors_of(self.arguments.partition("->")[0])

    @property
    def made(self) -> list[TensorKind]:
        """What it returns."""
        return tensors_of(self.arguments.partition("->")[2])

    @property
    def elements(self) -> int:
        """Of its largest tensor; 0 is not known."""
        return max((kind.elements for kind in tensors_of(self.arguments)), default=0)

    @property
    def time(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class Reading:
    """A profile, read once for all analyses."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tree: CallTree = without_native(profile.tree)
        self._sources: dict[str, list[str]] = {}
        self._syntax: dict[str, Text | None] = {}
        self.total = max(without_imports(self.tree), 1)
        """Nanoseconds."""
        self.lines: Integers = nearest_lines(self.tree, profile.facts.inside)
        """Of each node the line of the program, as a node."""
        self.behind: NDArray[np.bool_] = in_backward(self.tree)

    def names(self, node: int) -> str:
        """The name of an operator or a span."""
        return self.tree.names[self.tree.name[node]]

    def place(self, node: int) -> Place:
        """File and line of the program that a node runs for; ("", 0) where there is none."""
        line = int(self.lines[node])
        return self.tree.place(line) if line >= 0 else ("", 0)

    @cached_property
    def calls(self) -> list[OperatorCall]:
        """Of the forward pass and of all else but the backward pass, in the order of their first call.

        Without those that code makes while it is traced or compiled, or that compiled code makes.
        """
        tree, found = self.tree, []
        inside = tree.kind == NodeKind.OPERATOR
        modules = np.zeros(len(tree), np.int64)
        is_module = self.matching(_MODULE) & (tree.kind == NodeKind.PYTHON)
        for node in range(1, len(tree)):
            above = int(tree.parent[node])
            inside[node] |= inside[above]
            modules[node] = modules[above] + is_module[node]
        evaluated = np.zeros(len(tree), np.int64)
        linked = np.flatnonzero((tree.kind == NodeKind.BACKWARD) & (tree.link[tree.parent] >= 0))
        np.add.at(evaluated, tree.link[tree.parent[linked]], tree.count[linked])
        flops, graphed = totals(tree.parent, tree.flops), totals(tree.parent, tree.graphed)
        outermost = (tree.kind == NodeKind.OPERATOR) & ~inside[tree.parent] & ~self.behind & ~self.traced
        for node in np.flatnonzero(outermost & (tree.count > 0)).tolist():
            line = int(self.lines[node])
            frame = (int(tree.parent[line]), int(tree.name[line])) if line >= 0 else (-1, -1)
            found.append(
                OperatorCall(
                    node=node,
                    name=self.names(node),
                    place=self.place(node),
                    frame=frame,
                    count=int(tree.count[node]),
                    forward=int(tree.inclusive[node]),
                    backward=float(self.gradients[node]),
                    evaluated=int(evaluated[node]),
                    modules=int(modules[node] - modules[line]) if line >= 0 else 0,
                    direct=int(tree.parent[node]) == line,
                    arguments=tree.names[tree.inputs[node]],
                    dense=bool(flops[node]) and not self.names(node).startswith("aten::linalg"),
                    graphed=bool(graphed[node]),
                )
            )
        return found

    @cached_property
    def iterated(self) -> NDArray[np.bool_]:
        """Which nodes a `for` statement of the program calls: generators and iterators."""
        loops = [
            self.lines[node] == node and bool(_FOR.match(self.text(self.place(node)))) for node in range(len(self.tree))
        ]
        called = np.array(loops)[self.tree.parent] & (self.tree.kind == NodeKind.PYTHON)
        called[0] = False
        for node in np.flatnonzero(called).tolist():
            called[node] = self._iterates(node)
        return called

    def _iterates(self, node: int) -> bool:
        """Whether a function that a line with a `for` calls makes what it goes through, and is not of its body."""
        file, _, function = self.names(node).partition("\t")
        name, package = function.rpartition(".")[2], package_of(file)
        if package or name in ("__next__", "__iter__", "<genexpr>"):
            return name == "__next__" or package != "torch"
        text, (caller, line) = self.syntax(file), self.place(int(self.tree.parent[node]))
        around = self.syntax(caller)
        return bool(text and text.generates(name)) or bool(around and around.iterates_by(line) & _APPLY)

    def matching(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Which nodes have a name in which the pattern is found."""
        return np.array([bool(pattern.search(name)) for name in self.tree.names])[self.tree.name]

    def under(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Which nodes are Python lines of functions that the pattern is found in, or below them."""
        found = self.matching(pattern) & (self.tree.kind == NodeKind.PYTHON)
        for node in range(1, len(self.tree)):
            found[node] |= found[self.tree.parent[node]]
        return found

    @cached_property
    def traced(self) -> NDArray[np.bool_]:
        """What runs while code is traced or compiled."""
        return self.under(_TRACING)

    @cached_property
    def slower(self) -> float:
        """This machine's time over that of the table of costs, for the operators that are in it: their median."""
        ratios = [
            call.forward / call.count / costs.nanoseconds(call.name, "forward", call.elements)
            for call in self.calls
            if call.elements and costs.known(call.name)
        ]
        return max(statistics.median(ratios), 1.0) if ratios else 1.0

    @cached_property
    def gradients(self) -> NDArray[np.float64]:
        """Nanoseconds of the gradients of each node and all below, with what the engine spends on them."""
        tree = self.tree
        linked, below = np.zeros(len(tree)), np.zeros(len(tree))
        links = np.flatnonzero((tree.kind == NodeKind.LINK) & (tree.link >= 0))
        np.add.at(below, tree.parent[links], tree.inclusive[links])
        evaluates = np.array([name.startswith(ENGINE) for name in tree.names])[tree.name]
        wrapped = evaluates[tree.parent[links]]
        factor = np.where(wrapped, tree.inclusive[tree.parent[links]] / np.maximum(below[tree.parent[links]], 1), 1.0)
        np.add.at(linked, tree.link[links], tree.inclusive[links] * factor)
        for node in range(len(tree) - 1, 0, -1):
            if not self.behind[node]:
                linked[tree.parent[node]] += linked[node]
        return linked * (1 + self.engine_share)

    @cached_property
    def engine_share(self) -> float:
        """Time of the backward pass outside of its functions over that within them."""
        tree = self.tree
        engine = np.array([name.endswith("\t_engine_run_backward") for name in tree.names])[tree.name]
        evaluates = np.array([name.startswith(ENGINE) for name in tree.names])[tree.name]
        evaluated = tree.inclusive[evaluates & (tree.kind == NodeKind.OPERATOR)].sum()
        return min(float(tree.own[engine].sum() / max(evaluated, 1)), LARGEST_ENGINE)

    @cached_property
    def python(self) -> dict[Place, int]:
        """Nanoseconds of Python itself by line of the program, as sampled."""
        times: dict[Place, int] = {}
        for node in np.flatnonzero((self.tree.kind == NodeKind.PYTHON) & (self.tree.own > 0) & ~self.behind):
            place = self.place(int(node))
            times[place] = times.get(place, 0) + int(self.tree.own[node])
        return times

    @cached_property
    def line_itself(self) -> dict[Place, int]:
        """The same without code of libraries that the line calls."""
        times: dict[Place, int] = {}
        for node in np.flatnonzero((self.lines == np.arange(len(self.tree))) & ~self.behind).tolist():
            times[self.place(node)] = times.get(self.place(node), 0) + int(self.tree.own[node])
        return times

    @cached_property
    def python_per_call(self) -> float:
        """Nanoseconds of Python around a call, over all lines that call operators; within what is usual."""
        calling = {call.place for call in self.calls}
        spent = sum(time for place, time in self.python.items() if place in calling)
        return float(np.clip(spent / max(sum(call.count for call in self.calls), 1), 300, 5000))

    def python_of(self, places: Iterable[Place], calls: float) -> float:
        """Nanoseconds of Python on lines that make so many calls: half as sampled there, half as on all lines."""
        return (sum(self.python.get(place, 0) for place in places) + calls * self.python_per_call) / 2

    @cached_property
    def spans(self) -> list[int]:
        """Nodes of steps of optimizers."""
        named = np.array([name.startswith(_STEP) for name in self.tree.names])
        return np.flatnonzero((self.tree.kind == NodeKind.SPAN) & named[self.tree.name]).tolist()

    @cached_property
    def steps(self) -> int:
        """Of training: as recorded, as optimizers made them, or what the counts of most calls are multiples of."""
        if self.profile.facts.steps:
            return self.profile.facts.steps
        if self.spans:
            return max(1, *(int(self.tree.count[node]) for node in self.spans))
        counts = np.array([call.count for call in self.calls if call.count > 2] or [1])
        multiples = {steps: (counts % steps == 0).mean() for steps in set(counts.tolist())}
        return max((steps for steps, share in multiples.items() if share >= MOST), default=1)

    def text(self, place: Place) -> str:
        """What is written on a line; empty where the profile does not have its file."""
        if place[0] not in self._sources:
            self._sources[place[0]] = self.profile.sources.get(place[0], "").splitlines()
        lines = self._sources[place[0]]
        return lines[place[1] - 1] if 0 < place[1] <= len(lines) else ""

    def syntax(self, file: str) -> Text | None:
        """The statements of a file; None where the profile does not have it."""
        if file not in self._syntax:
            source = self.profile.sources.get(file, "")
            self._syntax[file] = Text.of(source) if source else None
        return self._syntax[file]

    def below(self, node: int) -> NDArray[np.bool_]:
        """Which nodes are a node or below it."""
        inside = np.zeros(len(self.tree), bool)
        inside[node] = True
        for each in range(node + 1, len(self.tree)):
            inside[each] = inside[self.tree.parent[each]]
        return inside

    def topmost(self, wanted: NDArray[np.bool_]) -> list[int]:
        """Nodes that are wanted and have none above them that is."""
        covered, found = wanted.copy(), []
        for node in range(len(self.tree)):
            above = node > 0 and bool(covered[self.tree.parent[node]])
            if wanted[node] and not above:
                found.append(node)
            covered[node] |= above
        return found

    def share(self, nanoseconds: float) -> float:
        """Of the whole time."""
        return nanoseconds / self.total

    def gain(self, analysis: str, saved: float, nodes: Sequence[int] = ()) -> PredictedGain:
        """What a change saves.

        Args:
            saved: nanoseconds, as estimated.
            nodes: those whose times, which are not the same in every run, the estimate is of.
        """
        tree, chosen = self.tree, list(nodes)
        count = np.maximum(tree.count[chosen], 1)
        of_calls = np.maximum(tree.squares[chosen] - tree.inclusive[chosen].astype(float) ** 2 / count, 0).sum()
        spread = math.sqrt(float(of_calls + tree.own_variance[chosen].sum()))
        return gains.gain(analysis, self.share(saved), self.share(min(spread, saved)))

    def finding(
        self,
        title: str,
        place: Place,
        evidence: str,
        advice: str,
        gain: PredictedGain | None,
        nodes: Sequence[int] = (),
    ) -> Finding:
        """A finding whose change saves so much, if that is known."""
        return Finding(
            title=title,
            file=place[0],
            line=place[1],
            evidence=evidence,
            advice=advice,
            gain=gain.figure if gain else None,
            expected=gain.expected if gain else 0.0,
            limit=gain is not None and not gain.told,
            nodes=tuple(nodes),
        )


def milliseconds(nanoseconds: float) -> str:
    """In a sentence."""
    return f"{nanoseconds / 1e6:,.0f} ms" if nanoseconds >= 1e9 else f"{nanoseconds / 1e6:.3g} ms"


def costliest(calls: Iterable[OperatorCall]) -> OperatorCall:
    """The one that takes longest, forward and backward."""
    return max(calls, key=lambda call: call.forward + call.backward)


def named(operators: str) -> frozenset[str]:
    """Names of torch's operators, from a list of words."""
    return frozenset(f"aten::{name}" for name in operators.split())
