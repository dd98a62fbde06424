"""Some layers each step: the others keep what they owe, and get no gradient.

Which ones is a function of numbers that an exchange before made equal on all ranks, so what is sent stays summable
and choosing costs no exchange: three numbers a layer travel as a mean in the first stage of whatever is sent.

A layer that waits gets a gradient of zero, and later all it is owed at once. The optimizer sees that: momentum and
Adam's averages decay meanwhile, and weight decay goes on.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoestring._torch import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm
from shoestring.comm.auto.probing import coded
from shoestring.comm.codecs.codec import Codec, Coding, Grads, Make, Mean, Turn
from shoestring.core.errors import ConfigError

TOLD = 3  # fp32 numbers that each layer sends with every exchange


@dataclass(frozen=True)
class Layers:
    """What a selector may know: one entry a layer in each array (layers,) of fp64, equal on all ranks.

    They stand in the natural order of their names; norms are means over the ranks of each rank's own.
    """

    step: int
    budget: float  # bytes that may leave a rank in a step
    allowance: float  # bytes that may leave it now
    entries: np.ndarray
    price: np.ndarray  # bytes that leave a rank if it is sent
    gradient: np.ndarray  # ‖g‖², averaged over steps
    owed: np.ndarray  # ‖M‖ of the newest exchange, where M = g + what was unsent before
    gain: np.ndarray  # ⟨g, M before⟩: what sending that, or having sent it, changes the loss by, to first order
    waited: np.ndarray  # exchanges since it was sent

    @property
    def unsent(self) -> np.ndarray:
        """‖e‖ of what was left unsent."""
        return np.where(self.waited > 0, self.owed, 0.0)


Notes = dict[str, Tensor]


class Selector(ABC):
    """Chooses layers. On every rank alike: from its arguments alone, by arithmetic that rounds alike everywhere."""

    learns: ClassVar[bool] = False
    """Whether it needs `Layers.gain`, for which what was delivered is kept for one step."""

    @abstractmethod
    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        """The layers to send, of prices that together are within the allowance; and the notes for the next choice.

        Args:
            notes: what the choice before returned; empty at first. Not to be changed: a choice may be taken back.
        """


class Uniform(Selector):
    """Every layer as often as every other: those sent least often first, in a random order; none is passed over."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def choose(self, layers: Layers, notes: Notes) -> tuple[Sequence[int], Notes]:
        count = len(layers.price)
        sent = notes["sent"].cpu().numpy().copy() if "sent" in notes else np.zeros(0)
        sent = sent if len(sent) == count else np.zeros(count)
        draws = np.random.default_rng((self.seed, layers.step)).random(count)
        chosen = fitting(np.lexsort((draws, sent)), layers, patience=0)
        sent[chosen] += 1
        return chosen, {"sent": torch.from_numpy(sent)}


def fitting(order: Iterable[int], layers: Layers, *, patience: float) -> list[int]:
    """Layers in this order as long as they fit; those that do not are passed over.

    One that costs more than `patience` is not: nothing after it is sent, so that the allowance grows until it fits.
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
class _Plan:
    """One step's choice. It becomes state with the last answers, for an exchange may be given up before."""

    step: int
    known: frozenset[str]
    chosen: frozenset[str]
    notes: Notes

    def sends(self, name: str) -> bool:
        return name in self.chosen or name not in self.known


class Selected(Codec):
    """`make`'s codec, for the layers that `selector` chooses.

    State: "unsent", fp32, of layers that wait; "seen", what `Layers` holds; "delivered", where the selector learns;
    "notes", the selector's; and under "inner" the codec's own.

    Args:
        make: gives the codec; another one, thrown away, tells each layer's price by an exchange of zeros.
        budget: bytes that leave a rank in a step, over all its exchanges. What a step leaves over is kept up to the
            largest layer's price, so in any n steps at most n budgets and one such price are sent.
        warmup: steps that send everything, whatever the budget is. A layer that is new is always sent.
        memory: of the average of ‖g‖² over steps.
    """

    shared = frozenset({"seen", "delivered", "notes"})

    def __init__(self, make: Make, selector: Selector, budget: float, *, warmup: int = 2, memory: float = 0.9) -> None:
        super().__init__()
        self.make, self.inner, self.selector = make, make(), selector
        self.stages = self.inner.stages
        self.budget, self.warmup, self.memory = budget, warmup, memory
        self._plan: _Plan | None = None
        self._lock = threading.Lock()  # several threads may exchange parts of one step

    def code(self, grads: Grads, turn: Turn) -> Coding:
        with self._lock:
            if self._plan is None or self._plan.step != turn.step:
                self._plan = self._decide(turn)
        plan, M = self._plan, self._owed(grads)
        told = self._told(grads, M)
        chosen = {name: M[name] for name in grads if plan.sends(name)}
        with closing(self.inner.code(chosen, turn) if chosen else _nothing()) as inner:
            asked = next(inner, None)
            *answers, told = yield [*(asked or ()), Mean(told)]
            while asked is not None:
                try:
                    asked = inner.send(answers)
                except StopIteration:
                    break
                answers = yield asked
        self._keep(plan, grads, M, told.view(-1, TOLD).double().tolist(), turn)
        self._deliver(grads, chosen)

    def _owed(self, grads: Grads) -> Grads:
        """M = g + e; where nothing is unsent the gradient itself."""
        unsent = self.state.get("unsent", {})
        sums = {name: unsent[name].clone() for name in grads if name in unsent}
        if sums:
            foreach_add_(list(sums.values()), [grads[name] for name in sums])
        return grads | sums

    def _told(self, grads: Grads, M: Grads) -> Tensor:
        """(3 x layers,): ‖g‖, ‖M‖, and ⟨g, M before⟩ for selectors that learn."""
        before = (self.state.get("unsent", {}) | self.state.get("delivered", {})) if self.selector.learns else {}
        zero = torch.zeros((), device=next(iter(grads.values())).device)
        gains = [
            torch.dot(grad.reshape(-1).float(), before[name].reshape(-1).float()) if name in before else zero
            for name, grad in grads.items()
        ]
        norms = [foreach_norm([each.float() for each in tensors]) for tensors in (grads.values(), M.values())]
        return torch.stack([torch.stack(column) for column in (*norms, gains)], dim=1).flatten()

    def _keep(self, plan: _Plan, grads: Grads, M: Grads, told: list[list[float]], turn: Turn) -> None:
        self.state["notes"] = plan.notes
        seen, unsent = self.state.setdefault("seen", {}), self.state.setdefault("unsent", {})
        for (name, grad), (g, owed, gain) in zip(grads.items(), told, strict=True):
            if name in seen:
                _, price, gradient, *_, waited = seen[name].tolist()
            else:
                price, gradient, waited = price_of(self.make, name, grad, turn.size), g**2, 0.0
            gradient = self.memory * gradient + (1 - self.memory) * g**2
            if plan.sends(name):
                unsent.pop(name, None)
                waited = 0.0
            else:
                unsent[name] = M[name] if M[name] is not grad else grad.to(torch.float32, copy=True)
                waited += 1
            row = [float(grad.numel()), price, gradient, owed, gain, waited]
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

    def _decide(self, turn: Turn) -> _Plan:
        seen, notes = self.state.get("seen", {}), self.state.get("notes", {})
        if turn.step < self.warmup or not seen:
            return _Plan(turn.step, frozenset(), frozenset(), notes)
        names = sorted(seen, key=_natural)
        table = torch.stack([seen[name] for name in names]).cpu().numpy().T
        carried = float(notes.get("carried", torch.zeros(())))
        telling = 2 * (turn.size - 1) / turn.size * 4 * TOLD * len(names)
        if telling >= self.budget:
            raise ConfigError(
                f"a budget of {self.budget:.0f} bytes a step does not carry {telling:.0f} about {len(names)} layers",
                hint="raise the budget",
            )
        layers = Layers(turn.step, self.budget, carried + self.budget - telling, *table)
        own = {key: note for key, note in notes.items() if key != "carried"}
        chosen, own = self.selector.choose(layers, own)
        left = layers.allowance - float(layers.price[list(chosen)].sum())
        carried = torch.tensor(min(left, float(layers.price.max())), dtype=torch.float64)
        picked = frozenset(names[layer] for layer in chosen)
        return _Plan(turn.step, frozenset(names), picked, own | {"carried": carried})

    # -- what the codec inside has as well ---------------------------------------------------------------------------

    def norm(self, kind: str) -> float:
        """Of "residual": all that is owed, here and inside."""
        mine = super().norm("unsent" if kind == "residual" else kind)
        return (mine**2 + self.inner.norm(kind) ** 2) ** 0.5

    def take_back(self, name: str, delivered: Tensor) -> None:
        self.kept("unsent", name, delivered).add_(delivered)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({kind: of for kind, of in state_dict.items() if kind != "inner"})
        self.inner.load_state_dict(state_dict.get("inner", {}))
        self._plan = None

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """As of any codec; but prices depend on the number of ranks, so the first step sends all and sees anew."""
        own = [{kind: of for kind, of in state.items() if kind not in ("inner", "seen")} for state in states]
        return super().merged(own) | {"inner": self.inner.merged([state["inner"] for state in states])}


def price_of(make: Make, name: str, grad: Tensor, ranks: int, step: int = 1) -> float:
    """Bytes that leave each of `ranks` ranks round a ring when this layer is sent alone, at a step after the first."""
    stages = coded(make, {name: torch.zeros_like(grad)}, Turn(0, ranks, 0), repeats=step).nbytes
    ring = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": ranks - 1, "all-to-all": (ranks - 1) / ranks}
    return sum(ring[kind] * nbytes for stage in stages for kind, nbytes in stage.items())


def _nothing() -> Coding:
    yield from ()


def _natural(name: str) -> list[tuple[int, str]]:
    """`blocks.2` before `blocks.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
