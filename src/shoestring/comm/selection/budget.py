"""Sends some layers each step, within a budget: the others keep their gradients as residuals.

Which layers are sent is a function of numbers that an earlier exchange made equal on all ranks. So what is sent can be
summed, and choosing needs no exchange of its own: three numbers a layer travel as a mean in the first stage.

A layer that waits gets a gradient of zero, and later its whole residual at once. The optimizer sees this: momentum and
Adam's averages decay meanwhile, and weight decay continues.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm
from shoestring.comm.codecs.codec import Codec, CodecFactory, Coding, ExchangeContext, Grads
from shoestring.comm.codecs.lockstep import LATE, run_alone
from shoestring.comm.codecs.traffic import ring_bytes
from shoestring.comm.codecs.wrapper import Wrapper, average, run_together
from shoestring.core.errors import ConfigError

SUMMARY = 3  # fp32 numbers that each layer sends with every exchange


@dataclass(frozen=True)
class Layers:
    """What a selector may know: fp64 arrays (layers,), one entry a layer, in the natural order of their names.

    Where all ranks choose alike, it is equal on all of them, and norms are means over the ranks of each rank's own.
    """

    step: int
    budget: float  # bytes that may leave a rank in a step
    allowance: float  # bytes that may leave it now
    entries: np.ndarray
    price: np.ndarray  # bytes that leave a rank if the layer is sent
    gradient: np.ndarray  # ‖g‖², averaged over steps
    accumulated: np.ndarray  # ‖M‖ of the newest exchange, where M = g + the residual before it
    gain: np.ndarray  # ⟨g, M before⟩: first-order change of the loss by sending that M, or by having sent it
    waited: np.ndarray  # exchanges since the layer was sent

    @property
    def unsent(self) -> np.ndarray:
        """‖e‖ of the residual."""
        return np.where(self.waited > 0, self.accumulated, 0.0)


Notes = dict[str, Tensor]


class Selector(ABC):
    """Selects layers from its arguments alone, by arithmetic that rounds alike everywhere, so that ranks may agree."""

    learns: ClassVar[bool] = False
    """Whether it needs `Layers.gain`, for which the delivered averages are kept for one step."""

    @abstractmethod
    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        """Choose layers to send, whose prices are together within the allowance, and notes for the next choice.

        Args:
            notes: what the choice before returned; empty at first. They must not be changed, because an exchange may
                be given up.
        """


class Uniform(Selector):
    """Sends every layer equally often: those sent least often first, in random order; none is passed over."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        count = len(layers.price)
        sent = notes["sent"].cpu().numpy().copy() if "sent" in notes else np.zeros(0)
        sent = sent if len(sent) == count else np.zeros(count)
        draws = np.random.default_rng((self.seed, layers.step)).random(count)
        chosen = choose_fitting(np.lexsort((draws, sent)), layers, patience=0)
        sent[chosen] += 1
        return chosen, {"sent": torch.from_numpy(sent)}


def choose_fitting(order: Iterable[int], layers: Layers, *, patience: float) -> list[int]:
    """Take layers in this order as long as they fit, and pass over those that do not.

    A layer that costs more than `patience` is not passed over: nothing after it is sent, so that the allowance grows
    until it fits.
    """
    chosen, left = [], layers.allowance
    for layer in order:
        if layers.price[layer] <= left:
            chosen.append(int(layer))
            left -= layers.price[layer]
        elif layers.price[layer] > patience:
            break
    return chosen


@dataclass
class _StepChoice:
    """One step's choice. It becomes state with the last answers, because an exchange may be given up before."""

    step: int
    known: frozenset[str]
    chosen: frozenset[str]
    notes: Notes

    def sends(self, name: str) -> bool:
        return name in self.chosen or name not in self.known


class BudgetedCodec(Wrapper):
    """The codec that `make` makes, for the layers that `selector` chooses.

    State: "unsent", the fp32 residuals of layers that wait; "seen", what `Layers` holds; "delivered", where the
    selector learns; "notes", the selector's; and under "inner" the inner codec's own state.

    Args:
        make: makes the codec; it also makes codecs that measure each layer's price by an exchange of zeros.
        budget: bytes that leave a rank in a step, over all its exchanges. Unused bytes are carried over up to the
            largest layer's price, so any n steps together send at most n budgets and one such price. A codec that sends
            more in its first steps exceeds it there; one that alternates keeps it on average.
        warmup: steps that send everything, whatever the budget is. A new layer is always sent.
        memory: decay of the average of ‖g‖² over steps.
    """

    shared = frozenset({"seen", "delivered", "notes"})

    def __init__(
        self, make: CodecFactory, selector: Selector, budget: float, *, warmup: int = 2, memory: float = 0.9
    ) -> None:
        super().__init__(make())
        self.make, self.selector = make, selector
        self.budget, self.warmup, self.memory = budget, warmup, memory
        self._choice: _StepChoice | None = None
        self._lock = threading.Lock()  # several threads may exchange parts of one step

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}  # what has no price cannot be weighed
        if not grads:
            return
        with self._lock:
            if self._choice is None or self._choice.step != context.step:
                self._choice = self._choose(context)
        choice, M = self._choice, self._add_residuals(grads)
        summary = self._summarise(grads, M)
        chosen = {name: M[name] for name in grads if choice.sends(name)}
        coding = [self.inner.code(chosen, context)] if chosen else []
        yield from run_together([*coding, average(summary)])
        self._update_state(choice, grads, M, summary.view(-1, SUMMARY).double().tolist(), context)
        self._deliver(grads, chosen)

    def _add_residuals(self, grads: Grads) -> Grads:
        """M = g + e; the gradient itself where there is no residual."""
        unsent = self.state.get("unsent", {})
        sums = {name: unsent[name].clone() for name in grads if name in unsent}
        if sums:
            foreach_add_(list(sums.values()), [grads[name] for name in sums])
        return grads | sums

    def _summarise(self, grads: Grads, M: Grads) -> Tensor:
        """(3 x layers,): ‖g‖, ‖M‖, and ⟨g, M before⟩ for selectors that learn."""
        before = (self.state.get("unsent", {}) | self.state.get("delivered", {})) if self.selector.learns else {}
        zero = torch.zeros((), device=next(iter(grads.values())).device)
        gains = [
            torch.dot(grad.reshape(-1).float(), before[name].reshape(-1).float()) if name in before else zero
            for name, grad in grads.items()
        ]
        norms = [foreach_norm([tensor.float() for tensor in tensors]) for tensors in (grads.values(), M.values())]
        return torch.stack([torch.stack(column) for column in (*norms, gains)], dim=1).flatten()

    def _update_state(
        self, choice: _StepChoice, grads: Grads, M: Grads, summary: list[list[float]], context: ExchangeContext
    ) -> None:
        self.state["notes"] = choice.notes
        seen, unsent = self.state.setdefault("seen", {}), self.state.setdefault("unsent", {})
        for (name, grad), (norm, accumulated, gain) in zip(grads.items(), summary, strict=True):
            if name in seen:
                _, price, gradient, *_, waited = seen[name].tolist()
            else:
                price, gradient, waited = measure_price(self.make, name, grad, context.size), norm**2, 0.0
            gradient = self.memory * gradient + (1 - self.memory) * norm**2
            if choice.sends(name):
                unsent.pop(name, None)
                waited = 0.0
            else:
                unsent[name] = M[name] if M[name] is not grad else grad.to(torch.float32, copy=True)
                waited += 1
            row = [float(grad.numel()), price, gradient, accumulated, gain, waited]
            seen[name] = torch.tensor(row, dtype=torch.float64)

    def _deliver(self, grads: Grads, chosen: Grads) -> None:
        if chosen:
            foreach_copy_([grads[name] for name in chosen], list(chosen.values()))
        if waiting := [grad for name, grad in grads.items() if name not in chosen]:
            foreach_mul_(waiting, 0.0)
        if self.selector.learns:
            delivered = self.state.setdefault("delivered", {})
            for name in grads:
                delivered.pop(name, None)
            delivered |= {name: grads[name].clone() for name in chosen}

    # -- the choice --------------------------------------------------------------------------------------------------

    def _choose(self, context: ExchangeContext) -> _StepChoice:
        seen, notes = self.state.get("seen", {}), self.state.get("notes", {})
        if context.step < self.warmup or not seen:
            return _StepChoice(context.step, frozenset(), frozenset(), notes)
        names = sorted(seen, key=natural_order)
        table = torch.stack([seen[name] for name in names]).cpu().numpy().T
        carried = float(notes.get("carried", torch.zeros(())))
        overhead = self.find_overhead(len(names), context.size)
        layers = Layers(context.step, self.budget, carried + self.budget - overhead, *table)
        own = {key: note for key, note in notes.items() if key != "carried"}
        chosen, own = self.selector.choose(layers, own)
        left = layers.allowance - float(layers.price[list(chosen)].sum())
        carried = torch.tensor(min(left, float(layers.price.max())), dtype=torch.float64)
        chosen_names = frozenset(names[layer] for layer in chosen)
        return _StepChoice(context.step, frozenset(names), chosen_names, own | {"carried": carried})

    def find_overhead(self, layers: int, ranks: int) -> float:
        """Bytes of numbers about layers that leave a rank in a step.

        Raises:
            ConfigError: they take the whole budget.
        """
        overhead = ring_bytes("all-reduce", 4 * SUMMARY * layers, ranks)
        if overhead >= self.budget:
            raise ConfigError(
                f"a budget of {self.budget:.0f} bytes a step is less than the {overhead:.0f} bytes of numbers about "
                f"{layers} layers",
                hint="raise `budget_kb`",
            )
        return overhead

    # -- its own state beside the inner codec's ----------------------------------------------------------------------

    def return_to_residual(self, name: str, average: Tensor) -> None:
        self.get_state("unsent", name, average).add_(average)

    def norm(self, kind: str) -> float:
        """The 2-norm of one kind of state; of "residual", of the residuals here and in the inner codec."""
        own = Codec.norm(self, "unsent" if kind == "residual" else kind)
        return (own**2 + super().norm(kind) ** 2) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        return Codec.state_dict(self) | {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Codec.load_state_dict(self, {kind: state for kind, state in state_dict.items() if kind != "inner"})
        super().load_state_dict(state_dict.get("inner", {}))
        self._choice = None

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """As for any codec, but prices depend on the number of ranks, so the first step sends and measures all."""
        dropped = ("inner", "seen")
        own = [{kind: by_name for kind, by_name in state.items() if kind not in dropped} for state in states]
        return Codec.merge_states(self, own) | {"inner": super().merge_states([state["inner"] for state in states])}


def measure_price(make: CodecFactory, name: str, grad: Tensor, ranks: int) -> float:
    """Bytes that leave each of `ranks` ranks round a ring when this layer alone is sent: the mean of two late steps."""
    codec, sent = make(), 0.0
    for step in (LATE, LATE + 1):
        zeros = {name: torch.zeros_like(grad)}
        sent += run_alone(codec.code(zeros, ExchangeContext(0, ranks, step)), ranks).sent(ranks)
    return sent / 2


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort `blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
