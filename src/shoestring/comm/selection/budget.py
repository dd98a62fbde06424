"""Sends only some layers in each step, within a budget of bytes; the other layers keep their gradients as residuals.

All ranks choose the same layers, based on numbers that an earlier exchange has made equal on all ranks. The layers can
therefore be summed, and the choice needs no separate exchange: three numbers per layer are averaged in the first stage
of each exchange.

A layer that waits gets a gradient of zero, and later its whole residual at once. Waiting affects the optimizer: while
the gradient is zero, momentum and Adam's averages decay, and weight decay continues.
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

SUMMARY = 3  # number of fp32 values averaged per layer in every exchange


@dataclass(frozen=True)
class Layers:
    """The data from which a selector chooses: fp64 arrays (layers,), one entry per layer, in the natural order of the
    layers' names.

    For selectors whose choice is the same on all ranks, the data are equal on all ranks, and each norm is the mean of
    the ranks' norms.
    """

    step: int
    budget: float  # bytes that a rank may send per step
    allowance: float  # bytes that a rank may send in this step
    entries: np.ndarray
    price: np.ndarray  # bytes that a rank sends if the layer is sent
    gradient: np.ndarray  # ‖g‖², averaged over steps
    accumulated: np.ndarray  # ‖M‖ at the newest exchange, where M = g + residual
    gain: np.ndarray  # ⟨g, previous M⟩: first-order loss reduction by sending the previous M
    waited: np.ndarray  # number of exchanges since the layer was last sent

    @property
    def unsent(self) -> np.ndarray:
        """Norm ‖e‖ of the residual."""
        return np.where(self.waited > 0, self.accumulated, 0.0)


Notes = dict[str, Tensor]
"""State that a selector passes from one choice to the next."""


class Selector(ABC):
    """Selects layers. The choice depends only on the arguments, by arithmetic that rounds the same on all processors,
    so that ranks can make the same choice."""

    learns: ClassVar[bool] = False
    """Whether the selector needs `Layers.gain`, for which delivered averages are stored for one step."""

    @abstractmethod
    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        """Choose layers to send, with a total price within the allowance; returns the layers, and notes for the next
        choice.

        Args:
            notes: notes that the previous choice returned; empty at first. The notes must not be modified, because the
                exchange may fail.
        """


class Uniform(Selector):
    """Sends every layer equally often: the layers sent least often come first, and ties are broken at random. Once a
    layer does not fit, no further layer is sent."""

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
    """Go through the layers in `order`: choose layers that fit into the allowance, and skip layers that do not fit.

    A layer whose price is above `patience` is not skipped: no later layer is sent, so that the allowance grows until
    the layer fits.
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
    """The layers chosen in one step. The choice is stored in the state only after the last stage, because an exchange
    may fail."""

    step: int
    known: frozenset[str]
    chosen: frozenset[str]
    notes: Notes

    def sends(self, name: str) -> bool:
        return name in self.chosen or name not in self.known


class BudgetedCodec(Wrapper):
    """Applies the codec that `make` creates to the layers that `selector` chooses.

    State: "unsent", the fp32 residuals of layers not sent; "seen", the data of `Layers`; "delivered", the newest
    averages, if the selector learns; "notes" of the selector; and "inner", the state of the inner codec.

    Args:
        make: function that creates the codec, and further codecs that measure each layer's price by an exchange of
            zeros.
        budget: bytes that a rank may send per step, in all exchanges together. Unused bytes are carried over, up to the
            price of the largest layer, so any n steps together send at most n budgets plus this price. A codec that
            sends more in its first steps exceeds the budget in these steps; a codec that alternates keeps the budget on
            average.
        warmup: number of steps that send all layers regardless of the budget. A new layer is always sent.
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
        self._lock = threading.Lock()  # several threads may exchange cohorts of one step

    def code(self, grads: Grads, context: ExchangeContext) -> Coding:
        grads = {name: grad for name, grad in grads.items() if grad.numel()}  # an empty layer has no price
        if not grads:
            return
        with self._lock:
            if self._choice is None or self._choice.step != context.step:  # the first cohort chooses for all cohorts
                self._choice = self._choose(context)
        # M = g + e for each layer; if a layer has no residual, M is the gradient itself, not a copy
        unsent = self.state.get("unsent", {})
        sums = {name: unsent[name].clone() for name in grads if name in unsent}
        if sums:
            foreach_add_(list(sums.values()), [grads[name] for name in sums])
        choice, M = self._choice, grads | sums
        summary = self._summarise(grads, M)
        chosen = {name: M[name] for name in grads if choice.sends(name)}
        coding = [self.inner.code(chosen, context)] if chosen else []
        yield from run_together([*coding, average(summary)])
        self._update_state(choice, grads, M, summary.view(-1, SUMMARY).double().tolist(), context)
        # Write the averages of chosen layers into their gradients, and zeros into all other gradients.
        if chosen:
            foreach_copy_([grads[name] for name in chosen], list(chosen.values()))
        if waiting := [grad for name, grad in grads.items() if name not in chosen]:
            foreach_mul_(waiting, 0.0)
        if self.selector.learns:
            delivered = self.state.setdefault("delivered", {})
            for name in grads:
                delivered.pop(name, None)
            delivered |= {name: grads[name].clone() for name in chosen}

    def _summarise(self, grads: Grads, M: Grads) -> Tensor:
        """Summarise each layer by ‖g‖, ‖M‖ and ⟨g, previous M⟩ (0 unless the selector learns): (3 x layers,)."""
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
                # If M is the gradient itself, it is copied, because the gradient will be overwritten.
                unsent[name] = M[name] if M[name] is not grad else grad.to(torch.float32, copy=True)
                waited += 1
            row = [float(grad.numel()), price, gradient, accumulated, gain, waited]
            seen[name] = torch.tensor(row, dtype=torch.float64)

    # -- the choice --------------------------------------------------------------------------------------------------

    def _choose(self, context: ExchangeContext) -> _StepChoice:
        """Let the selector choose this step's layers; in the warm-up, choose all layers."""
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
        """Bytes that a rank sends per step for the summaries of layers.

        Raises:
            ConfigError: the summaries use up the whole budget.
        """
        overhead = ring_bytes("all-reduce", 4 * SUMMARY * layers, ranks)
        if overhead >= self.budget:
            raise ConfigError(
                f"a budget of {self.budget:.0f} bytes a step is less than the {overhead:.0f} bytes of norms of "
                f"{layers} layers",
                hint="raise `transport.kb_per_step`",
            )
        return overhead

    # -- own state and the inner codec's state ----------------------------------------------------------------------

    def return_to_residual(self, name: str, average: Tensor) -> None:
        self.get_state("unsent", name, average).add_(average)

    def norm(self, kind: str) -> float:
        """The 2-norm of one kind of state; "residual" covers the residuals of unsent layers and of the inner codec."""
        own = Codec.norm(self, "unsent" if kind == "residual" else kind)
        return (own**2 + super().norm(kind) ** 2) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        return Codec.state_dict(self) | {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Codec.load_state_dict(self, {kind: state for kind, state in state_dict.items() if kind != "inner"})
        super().load_state_dict(state_dict.get("inner", {}))
        self._choice = None

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See `Codec.merge_states`. Prices depend on the number of ranks, so they are dropped, and the first step sends
        and measures all layers."""
        dropped = ("inner", "seen")
        own = [{kind: by_name for kind, by_name in state.items() if kind not in dropped} for state in states]
        return Codec.merge_states(self, own) | {"inner": super().merge_states([state["inner"] for state in states])}


def measure_price(make: CodecFactory, name: str, grad: Tensor, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends, by ring collectives, if only this layer is sent; the mean of two steps
    after any warm-up."""
    codec, sent = make(), 0.0
    for step in (LATE, LATE + 1):
        zeros = {name: torch.zeros_like(grad)}
        sent += run_alone(codec.code(zeros, ExchangeContext(0, ranks, step)), ranks).sent(ranks)
    return sent / 2


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts `blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
