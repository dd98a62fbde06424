"""Measures errors of gradients during training, and adjusts which operators compute in fewer bits.

In a measured step, the last micro-batch is computed again with the same weights: in 32 bits, in the present bits, and
with the bits of one group of operators changed; each measured step changes another group. Once all groups have been
measured, `choose` decides from their errors and bytes. Ranks add up what they measured, so all of them make the same
decision. These passes run operator by operator, so that nothing has to be compiled for a group.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from shoestring._torch import called_by, compile_call, loss_scale, run_joint, without_hooks
from shoestring.core.attachments import Attachments
from shoestring.core.feature import Phase
from shoestring.core.graph import run_passes
from shoestring.core.task import Batch, Output, sum_and_count
from shoestring.precision.choosing import Effect, choose
from shoestring.precision.graph_pass import OperatorGroup, Rules, count_bytes, groups_of, narrow
from shoestring.precision.narrowed_graphs import NarrowedGraphs
from shoestring.precision.replay import compute, outputs_of

if TYPE_CHECKING:
    from shoestring.precision.settings import Graph

log = logging.getLogger(__name__)
LEAST = 1e-3
"""Minimum fraction of a step's elements that a group must compute to be measured."""


@dataclass
class ErrorRecord:
    """The measurements and decisions that checkpoints store."""

    chosen: dict[str, int] = field(default_factory=dict)
    """Maps a group to its number of bits."""
    effects: dict[str, tuple[float, float, bool]] = field(default_factory=dict)
    """Maps each group measured since the last decision to the fields of its `Effect`."""
    errors: list[float] = field(default_factory=list)
    """Squared errors of gradients in the present bits, measured since the last decision."""
    bounds: list[float] = field(default_factory=list)
    """Squared upper bound of each entry of `errors`."""
    changes: int = 0
    """Number of decisions so far that changed the bits of a group."""


class ErrorMeasurements:
    """Measures the errors of a job's gradients; see the module's docstring."""

    def __init__(self, attachments: Attachments, settings: Graph, graphs: NarrowedGraphs) -> None:
        self.attachments, self.settings, self.graphs = attachments, settings, graphs
        self.record = ErrorRecord()
        self.forward = attachments.forward
        self.batch: Batch = None  # the newest micro-batch, if the step is measured
        self.rules: Rules | None = None  # rules of the pass that is being computed; None for 32 bits
        self.joints: list[fx.GraphModule] = []
        self._ran = dict[int, fx.GraphModule]()  # index in `joints` -> graphs that the measured step ran
        self._narrowed: list[tuple[Rules, dict[int, fx.GraphModule]]] = []
        self._call: Callable[..., Any] | None = None
        self._under_autocast = self._warned = False

    def attach(self) -> None:
        attachments = self.attachments
        attachments.forward = self.remember
        attachments.exits.callback(setattr, attachments, "forward", self.forward)
        attachments.at(Phase.CLIP, self.measure)
        attachments.keep(self.settings.name, self, merged=True)

    def remember(self, model: nn.Module, batch: Batch) -> Output:
        """Run the job's forward pass, and store the micro-batch if the step is measured."""
        if self.due and model.training and torch.is_grad_enabled():
            self.batch = batch
        return self.forward(model, batch)

    @property
    def due(self) -> bool:
        """Whether the current step is measured; no step is, once the bits have changed `changes` times."""
        return self.record.changes < self.settings.changes and not (
            self.attachments.progress.step % self.settings.measure
        )

    def measure(self) -> None:
        """Measure one group, before the optimizer's step; decide if it was the last one."""
        if not self.due:
            return
        if self.batch is None:
            self._warn("this loop does not call `job.step`")
            return
        began, trace = time.perf_counter(), self.attachments.trace
        try:
            with self._apart():
                measured = self._measure()
        finally:
            self.batch = None
        if measured is not None:
            record, groups = self.record, measured["groups"]
            name, (error, other, *autocast) = measured["group"], measured["errors"]
            group: OperatorGroup = groups[name]
            # Effects are those of fewer bits, even if the group is narrow now.
            sign = 1 if group.other == group.few else -1
            record.effects[name] = (sign * (other - error), sign * measured["spared"], group.product)
            record.errors.append(error)
            record.bounds.append(self.settings.error**2 * (autocast[0] if autocast else 1.0))
            self.attachments.numbers["gradient_error"] = math.sqrt(error)
            trace.facts["gradient_error"] = math.sqrt(error)
            trace.facts["gradient_error_bound"] = math.sqrt(record.bounds[-1])
            if groups.keys() <= record.effects.keys():  # all groups have been measured
                self._decide(groups)
        seconds = time.perf_counter() - began
        trace.aside += seconds
        trace.facts["measuring_seconds"] = trace.facts.get("measuring_seconds", 0.0) + seconds
        trace.facts["measured_steps"] = trace.facts.get("measured_steps", 0.0) + 1

    def _warn(self, why: str) -> None:
        if not self._warned:
            log.warning("%s: nothing is measured, because %s", self.settings.name, why)
        self._warned = True

    # -- one measurement ---------------------------------------------------------------------------------------------

    def _measure(self) -> dict[str, Any] | None:
        """Measure the error in the present bits, and with one more group narrowed or widened; None if no group is left,
        or the measurement is unusable."""
        self._ran = {}
        exact = self.gradients(None)
        groups, now = self._groups(), self.graphs.rules
        if not self._ran:  # for example if torch has compiled the module's code too often
            self._warn("torch does not compile the model")
        name = next((name for name in groups if name not in self.record.effects), "")
        own: dict[str, Any] = {"group": name, "spared": 0.0, "squares": [_squares(exact)]}
        if name:
            changed = now._replace(chosen={**now.chosen, name: groups[name].other})
            own["spared"] = float(self._bytes(now) - self._bytes(changed))
            own["squares"] += [_squares(self.gradients(rules), exact) for rules in (now, changed)]
            if self.settings.error_relative_to == "autocast":
                own["squares"].append(_squares(self.gradients(None, autocast=True), exact))
        gathered = self.attachments.world.gather(json.dumps(own).encode())
        ranks = [json.loads(data) for data in gathered]  # own file: sent by ranks of this job
        squares = [sum(parts) for parts in zip(*(rank["squares"] for rank in ranks), strict=False)]
        alike = {rank["group"] for rank in ranks} == {name}
        if not name or not alike or not all(map(math.isfinite, squares)) or not squares[0]:
            return None
        errors = [part / squares[0] for part in squares[1:]]
        return {"group": name, "errors": errors, "spared": ranks[0]["spared"], "groups": groups}

    def gradients(self, rules: Rules | None, *, autocast: bool = False) -> list[Tensor | None]:
        """Compute the gradients of the stored micro-batch by `rules`; in 32 bits if `rules` is None."""
        attachments, batch = self.attachments, self.batch
        self.rules, self._under_autocast = rules, autocast
        inside: AbstractContextManager[Any] = nullcontext()
        if autocast:
            inside = torch.autocast(attachments.world.device.type, dtype=self.graphs.rules.dtype)
        parameters = [parameter for parameter in attachments.module.parameters() if parameter.requires_grad]
        torch.manual_seed(0)
        with torch.enable_grad(), attachments.computing(), without_hooks(parameters):
            with inside:
                output = attachments.forward(attachments.module, batch)
            total, count = sum_and_count(attachments.loss(output, batch))
            loss = total.float() / count * loss_scale(attachments.scaler)
            return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Context in which the model is computed by `self.rules`; afterwards, the state of the job is as before."""
        attachments, module = self.attachments, self.attachments.module
        if self._call is None:
            self._call = compile_call(module, self._compile)
        numbers = dict(attachments.numbers)
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        device = attachments.world.device
        try:
            with called_by(module, self._call), torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            attachments.numbers.clear()
            attachments.numbers.update(numbers)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A torch.compile backend whose functions compute a graph by `self.rules`, which may differ from call to
        call."""
        return run_joint(run_passes(self.attachments.graph.forward, graph), inputs, self._prepare)

    def _prepare(self, joint: fx.GraphModule) -> Callable[[slice, dict[str, Any]], list[Any]]:
        joint.graph.eliminate_dead_code()
        if self._under_autocast:
            return partial(_compute, lambda: joint)
        self.joints.append(joint)
        return partial(_compute, partial(self._variant, len(self.joints) - 1))

    def _variant(self, place: int) -> fx.GraphModule:
        """Return a joint graph as changed by the present rules."""
        self._ran[place] = self.joints[place]
        return self.joints[place] if self.rules is None else self._narrowed_by(self.rules, place)

    def _narrowed_by(self, rules: Rules, place: int) -> fx.GraphModule:
        graphs = next((graphs for own, graphs in self._narrowed if own == rules), None)
        if graphs is None:
            graphs = dict[int, fx.GraphModule]()
            # Keep only the graphs that are used again.
            self._narrowed = [held for held in self._narrowed if held[0] == self.graphs.rules]
            self._narrowed.append((rules, graphs))
        if place not in graphs:
            graphs[place] = copy.deepcopy(self.joints[place])
            narrow(graphs[place], rules)
        return graphs[place]

    def _bytes(self, rules: Rules) -> int:
        return sum(count_bytes(self._narrowed_by(rules, place).graph) for place in self._ran)

    def _groups(self) -> dict[str, OperatorGroup]:
        """Return, by name, the groups of the step's graphs that compute enough elements to be measured."""
        groups = dict[str, OperatorGroup]()
        for joint in self._ran.values():
            for name, group in groups_of(joint.graph, self.graphs.rules).items():
                before = groups.get(name, group._replace(elements=0))
                groups[name] = group._replace(
                    elements=group.elements + before.elements, bits=max(group.bits, before.bits)
                )
        total = sum(group.elements for group in groups.values())
        return {name: groups[name] for name in sorted(groups) if groups[name].elements >= LEAST * total}

    # -- the decision ------------------------------------------------------------------------------------------------

    def _decide(self, groups: dict[str, OperatorGroup]) -> None:
        record = self.record
        effects = {name: Effect(*record.effects[name]) for name in groups}
        few = {name for name, group in groups.items() if group.bits == group.few}
        error, bound = (sum(values) / len(values) for values in (record.errors, record.bounds))
        chosen = choose(effects, few, error, bound)
        changed = {
            name: group.few if name in chosen else group.other
            for name, group in groups.items()
            if (name in chosen) != (name in few)
        }
        record.effects, record.errors, record.bounds = {}, [], []
        if not changed:
            return
        record.chosen |= changed
        record.changes += 1
        fewer = sum(name in chosen for name in changed)
        log.info(
            "%s: gradients had an error of %.2g, %.2g is allowed; %d groups of operators get fewer bits, %d more",
            self.settings.name, math.sqrt(error), math.sqrt(bound), fewer, len(changed) - fewer,
        )  # fmt: skip
        self._adopt()

    def _adopt(self) -> None:
        """Apply the recorded bits from now on."""
        self.joints, self._narrowed, self._call = [], [], None
        self.graphs.choose(self.record.chosen)
        self.attachments.trace.facts["list_changes"] = self.record.changes

    # -- saved state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"record": json.dumps(asdict(self.record), sort_keys=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.record = ErrorRecord(**json.loads(state_dict["record"]))  # own file: from a checkpoint
        self._adopt()


def _compute(variant: Callable[[], fx.GraphModule], part: slice, values: dict[str, Any]) -> list[Any]:
    module = variant()
    return compute(module, outputs_of(module)[part], values)


def _squares(gradients: Sequence[Tensor | None], exact: Sequence[Tensor | None] | None = None) -> float:
    """Squared norm of gradients, or of their differences from `exact`."""
    pairs = [(one, None if exact is None else exact[place]) for place, one in enumerate(gradients) if one is not None]
    norms = [(one.float() if other is None else one.float() - other.float()).norm() for one, other in pairs]
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0
