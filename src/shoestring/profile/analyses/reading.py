"""Prepares a profile for analyses: the operators that each line of the program calls, with times and gradients."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoestring.figures import nanoseconds, percent
from shoestring.profile.analyses import costs, gains
from shoestring.profile.analyses.gains import PredictedGain
from shoestring.profile.analyses.statements import Text, waits
from shoestring.profile.findings import Finding
from shoestring.profile.lines import in_backward, nearest_lines, package_of, without_imports
from shoestring.profile.recording import Profile
from shoestring.profile.tree import ENGINE, CallTree, Integers, NodeKind, totals, without_native

MATTERS = 0.07
"""A change is reported if it is expected to save at least this share of the profiled time."""

LARGEST_ENGINE = 0.4
"""Maximum ratio of the backward pass's time outside backward functions to its time inside them; time beyond this ratio
counts as waiting."""
MOST = 0.85
"""If the number of steps is inferred from call counts, at least this fraction of the counts must be multiples of it."""

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
    """Data type, size, layout and device of a tensor."""

    dtype: str
    elements: int
    layout: str
    """Memory layout: `channels_last`, `strided`, or empty if contiguous."""
    device: str = "cpu"


def tensors_of(text: str) -> list[TensorKind]:
    """Parse the tensors in a text such as `float32[8,64], float32[64] strided`."""
    return [
        TensorKind(dtype, math.prod(map(int, filter(None, sizes.split(",")))), layout.strip(), device.strip() or "cpu")
        for dtype, sizes, layout, device in _TENSOR.findall(text)
    ]


@dataclass(frozen=True)
class OperatorCall:
    """All calls of an operator from one Python call path; times are in nanoseconds and include callees."""

    node: int
    name: str
    place: Place
    """The line of the program that the calls are attributed to."""
    frame: tuple[int, int]
    """Identifies the function that contains the line, and the function's caller: the node of the caller, and the
    function's index in `CallTree.names`."""
    count: int
    forward: int
    backward: float
    """Time of the operator's gradient, including a share of the time of autograd's engine."""
    evaluated: int
    """Number of times that the operator's gradient was computed."""
    modules: int
    """Number of torch.nn modules between the line and the operator: 1 for `self.linear(x)`, more within
    nn.Sequential."""
    direct: bool
    """Whether the line calls the operator directly rather than through a library."""
    arguments: str
    """Recorded arguments and results, as in `CallTree.inputs`; empty if unknown."""
    dense: bool
    """Whether the operator is or contains a matrix product, a convolution or attention."""
    graphed: bool
    """Whether the operator recorded a function for the backward pass."""

    @property
    def given(self) -> list[TensorKind]:
        """The tensor arguments of the recorded call; empty if unknown."""
        return tensors_of(self.arguments.partition("->")[0])

    @property
    def made(self) -> list[TensorKind]:
        """The tensors that the recorded call returned; empty if unknown."""
        return tensors_of(self.arguments.partition("->")[2])

    @property
    def elements(self) -> int:
        """Number of elements of the operator's largest tensor; 0 if unknown."""
        return max((kind.elements for kind in tensors_of(self.arguments)), default=0)

    @property
    def time(self) -> float:
        """Nanoseconds of all calls, forward and backward."""
        return self.forward + self.backward


class Reading:
    """A profile with derived data that all analyses share."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tree: CallTree = without_native(profile.tree)
        self._sources: dict[str, list[str]] = {}
        self._syntax: dict[str, Text | None] = {}
        self.total = max(without_imports(self.tree), 1)
        """Profiled nanoseconds without imports of packages."""
        self.lines: Integers = nearest_lines(self.tree, profile.facts.inside)
        """For each node, the node of the program line that its time is attributed to; -1 if there is none."""
        self.behind: NDArray[np.bool_] = in_backward(self.tree)
        """Mask of the nodes in the backward pass."""

    def names(self, node: int) -> str:
        """The name of a node, as in `CallTree.names`."""
        return self.tree.names[self.tree.name[node]]

    def place(self, node: int) -> Place:
        """File and line that a node is attributed to; ("", 0) if there is none."""
        line = int(self.lines[node])
        return self.tree.place(line) if line >= 0 else ("", 0)

    @cached_property
    def calls(self) -> list[OperatorCall]:
        """Calls of operators outside the backward pass, in the order of their first calls.

        Calls during tracing or compilation, and calls inside compiled code, are left out.
        """
        tree, calls = self.tree, []
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
            calls.append(
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
        return calls

    @cached_property
    def iterated(self) -> NDArray[np.bool_]:
        """Mask of the nodes of generators and iterators that `for` statements of the program call."""
        loops = [
            self.lines[node] == node and bool(_FOR.match(self.text(self.place(node)))) for node in range(len(self.tree))
        ]
        called = np.array(loops)[self.tree.parent] & (self.tree.kind == NodeKind.PYTHON)
        called[0] = False
        for node in np.flatnonzero(called).tolist():
            called[node] = self._iterates(node)
        return called

    def _iterates(self, node: int) -> bool:
        """Whether a function called on a line with `for` produces the loop's items, rather than running in its body."""
        file, _, function = self.names(node).partition("\t")
        name, package = function.rpartition(".")[2], package_of(file)
        if package or name in ("__next__", "__iter__", "<genexpr>"):
            return name == "__next__" or package != "torch"
        text, (caller, line) = self.syntax(file), self.place(int(self.tree.parent[node]))
        around = self.syntax(caller)
        return bool(text and text.generates(name)) or bool(around and around.iterates_by(line) & _APPLY)

    def matching(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Mask of the nodes whose name matches the pattern."""
        return np.array([bool(pattern.search(name)) for name in self.tree.names])[self.tree.name]

    def under(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Mask of the Python nodes whose name matches the pattern, and of all nodes below them."""
        mask = self.matching(pattern) & (self.tree.kind == NodeKind.PYTHON)
        for node in range(1, len(self.tree)):
            mask[node] |= mask[self.tree.parent[node]]
        return mask

    @cached_property
    def traced(self) -> NDArray[np.bool_]:
        """Mask of the nodes that ran while code was traced or compiled."""
        return self.under(_TRACING)

    @cached_property
    def slower(self) -> float:
        """Median ratio, over all calls, of times on this machine to times in the table of costs; at least 1."""
        ratios = [
            call.forward / call.count / costs.nanoseconds(call.name, "forward", call.elements)
            for call in self.calls
            if call.elements and costs.known(call.name)
        ]
        return max(statistics.median(ratios), 1.0) if ratios else 1.0

    @cached_property
    def gradients(self) -> NDArray[np.float64]:
        """Nanoseconds of the gradients of each node and all nodes below it, including a share of the engine's time."""
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
        """Ratio of the backward pass's time outside backward functions to its time inside them."""
        tree = self.tree
        engine = np.array([name.endswith("\t_engine_run_backward") for name in tree.names])[tree.name]
        evaluates = np.array([name.startswith(ENGINE) for name in tree.names])[tree.name]
        evaluated = tree.inclusive[evaluates & (tree.kind == NodeKind.OPERATOR)].sum()
        return min(float(tree.own[engine].sum() / max(evaluated, 1)), LARGEST_ENGINE)

    @cached_property
    def python(self) -> dict[Place, int]:
        """Sampled nanoseconds in Python by line of the program, including libraries that the line calls."""
        times: dict[Place, int] = {}
        for node in np.flatnonzero((self.tree.kind == NodeKind.PYTHON) & (self.tree.own > 0) & ~self.behind):
            place = self.place(int(node))
            times[place] = times.get(place, 0) + int(self.tree.own[node])
        return times

    @cached_property
    def line_itself(self) -> dict[Place, int]:
        """Sampled nanoseconds in Python by line of the program, without libraries that the line calls."""
        times: dict[Place, int] = {}
        for node in np.flatnonzero((self.lines == np.arange(len(self.tree))) & ~self.behind).tolist():
            times[self.place(node)] = times.get(self.place(node), 0) + int(self.tree.own[node])
        return times

    @cached_property
    def python_per_call(self) -> float:
        """Mean nanoseconds in Python per operator call, limited to plausible values."""
        calling = {call.place for call in self.calls}
        spent = sum(time for place, time in self.python.items() if place in calling)
        return float(np.clip(spent / max(sum(call.count for call in self.calls), 1), 300, 5000))

    def python_of(self, places: Iterable[Place], calls: float) -> float:
        """Nanoseconds in Python on lines that make `calls` calls: the mean of sampled time and of a typical time."""
        return (sum(self.python.get(place, 0) for place in places) + calls * self.python_per_call) / 2

    @cached_property
    def spans(self) -> list[int]:
        """Nodes of the spans of optimizer steps."""
        named = np.array([name.startswith(_STEP) for name in self.tree.names])
        return np.flatnonzero((self.tree.kind == NodeKind.SPAN) & named[self.tree.name]).tolist()

    @cached_property
    def steps(self) -> int:
        """Number of training steps: as recorded, else counted from optimizer steps, else inferred from call counts."""
        if self.profile.facts.steps:
            return self.profile.facts.steps
        if self.spans:
            return max(1, *(int(self.tree.count[node]) for node in self.spans))
        counts = np.array([call.count for call in self.calls if call.count > 2] or [1])
        multiples = {steps: (counts % steps == 0).mean() for steps in set(counts.tolist())}
        return max((steps for steps, share in multiples.items() if share >= MOST), default=1)

    def waits(self, place: Place) -> bool:
        """Whether a line belongs to a busy wait: a loop that polls a clock or a condition."""
        text = self.syntax(place[0])
        return text is not None and any(
            loop.lineno <= place[1] <= (loop.end_lineno or 0) and waits(loop) for loop in text.loops
        )

    @cached_property
    def waiting(self) -> NDArray[np.bool_]:
        """Mask of the nodes in busy waits and below them; making these nodes faster does not shorten the wait."""
        waiting = np.zeros(len(self.tree), bool)
        for node in range(1, len(self.tree)):
            own = self.lines[node] == node and self.waits(self.place(node))
            waiting[node] = own or waiting[self.tree.parent[node]]
        return waiting

    def text(self, place: Place) -> str:
        """The source text of a line; empty if the profile does not contain the file."""
        if place[0] not in self._sources:
            self._sources[place[0]] = self.profile.sources.get(place[0], "").splitlines()
        lines = self._sources[place[0]]
        return lines[place[1] - 1] if 0 < place[1] <= len(lines) else ""

    def syntax(self, file: str) -> Text | None:
        """The parsed source of a file; None if the profile does not contain the file or the file cannot be parsed."""
        if file not in self._syntax:
            source = self.profile.sources.get(file, "")
            self._syntax[file] = Text.of(source) if source else None
        return self._syntax[file]

    def below(self, node: int) -> NDArray[np.bool_]:
        """Mask of a node and all nodes below it."""
        inside = np.zeros(len(self.tree), bool)
        inside[node] = True
        for inner in range(node + 1, len(self.tree)):
            inside[inner] = inside[self.tree.parent[inner]]
        return inside

    def topmost(self, wanted: NDArray[np.bool_]) -> list[int]:
        """The nodes in the mask `wanted` that have no other node of the mask above them."""
        covered, top = wanted.copy(), []
        for node in range(len(self.tree)):
            above = node > 0 and bool(covered[self.tree.parent[node]])
            if wanted[node] and not above:
                top.append(node)
            covered[node] |= above
        return top

    def spent(self, time: float) -> str:
        """Format nanoseconds as text: "4.2 ms, 31% of the time"."""
        return f"{nanoseconds(time)}, {percent(self.share(time))} of the time"

    def share(self, nanoseconds: float) -> float:
        """Convert nanoseconds to a share of the profiled time."""
        return nanoseconds / self.total

    def gain(self, analysis: str, saved: float, nodes: Sequence[int] = ()) -> PredictedGain:
        """Predict the share of the profiled time that a change saves, as an interval.

        Args:
            saved: estimated saving in nanoseconds.
            nodes: the nodes on whose times the estimate depends; the variance of these times widens the interval.
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
        """Make a finding; `gain` is the predicted gain of the change, or None if unknown."""
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


def costliest(calls: Iterable[OperatorCall]) -> OperatorCall:
    """The call that takes the most time, forward and backward together."""
    return max(calls, key=lambda call: call.forward + call.backward)


def named(operators: str) -> frozenset[str]:
    """Convert a text of short operator names, separated by spaces, to a set of full names such as `aten::add`."""
    return frozenset(f"aten::{name}" for name in operators.split())
