"""L-GreCo (Markov et al., 2022): a setting of the codec for each layer, from what each setting leaves out of it.

Every so many steps each layer is compressed once with each setting on the menu, and the errors, averaged over the
ranks, travel with the exchange. From then on each layer has the setting that a dynamic programme gives it: of all
choices that leave out no more than the codec's own setting does, the one of the fewest bytes; or, within a budget of
bytes, the one that leaves out least. It departs from the paper in what it compresses for this: not the sum of the
gradients since the last time, but what the exchange itself compresses, the newest gradient and what is owed.

For PowerSGD, whose setting is the rank. Top-k needs nothing of the kind: the largest entries of all layers together are
those that leave out least, whatever their number in each layer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.comm.codec import Codec, Coding, Grads, Make, Mean, Turn
from shoestring.comm.rehearsal import rehearse
from shoestring.comm.select import price_of
from shoestring.core.errors import ConfigError

MENU = (0.25, 0.5, 1.0, 2.0, 4.0)  # factors of the codec's own setting
OWN = MENU.index(1.0)
BINS = 10_000  # steps in which the budget is counted, as in the paper


class LGreco(Codec):
    """`make`'s codec, which must be graded, with a factor of its setting for each layer.

    State: "errors", ‖M - C(M)‖² and bytes of each setting for each layer; and under "inner" the codec's own.

    Args:
        budget: bytes that leave a rank in a step at most, but for the numbers this needs itself; 0 for as much left
            out as with the codec's own setting.
        every: steps from one measurement to the next; the first one is at the first step.
    """

    shared = frozenset({"errors"})

    def __init__(self, make: Make, budget: float = 0.0, *, every: int = 200) -> None:
        super().__init__()
        self.make, self.inner, self.budget, self.every = make, make(), budget, every
        self.stages, self.exposes = self.inner.stages, self.inner.exposes
        self._prices: dict[str, list[float]] = {}
        self._planned: int | None = None  # the step for which factors were last looked at
        self._lock = threading.Lock()  # several threads may exchange parts of one step

    def measures(self, step: int) -> bool:
        return step % self.every == 0

    def code(self, grads: Grads, turn: Turn) -> Coding:
        self._plan(turn.step)
        measuring = [Mean(self._errors(grads))] if self.measures(turn.step) and grads else []
        with closing(self.inner.code(grads, turn)) as inner:
            asked = next(inner, None)
            answers = yield [*(asked or ()), *measuring]
            if measuring:
                self._keep(grads, answers.pop(), turn.size)
            while asked is not None:
                try:
                    asked = inner.send(answers)
                except StopIteration:
                    return
                answers = yield asked

    def _plan(self, step: int) -> None:
        """Give layers their settings, from errors that are the same on all ranks."""
        with self._lock:
            fresh = self._planned is None or self.measures(step - 1)
            if fresh and self._planned != step and (known := self.state.get("errors")):
                names = sorted(known)
                table = torch.stack([known[name] for name in names]).cpu().numpy()
                chosen = planned(table[:, 0], table[:, 1], self.budget)
                self.inner.scales = {name: MENU[which] for name, which in zip(names, chosen, strict=True)}
            self._planned = step

    def _errors(self, grads: Grads) -> Tensor:
        """(layers x settings,): the norm of what each setting leaves out of M."""
        owed = self.inner.state.get("residual", {})
        rows = []
        for name, grad in grads.items():
            M = grad.float() + owed[name].view_as(grad) if name in owed else grad.float()
            rows += [torch.linalg.vector_norm(M - self._sent(name, M, scale)) for scale in MENU]
        return torch.stack(rows)

    def _sent(self, name: str, M: Tensor, scale: float) -> Tensor:
        """What a setting makes of M once it is warm: the second time, but with nothing owed from the first."""
        codec, first, second = self._scaled(name, scale), {name: M.clone()}, {name: M.clone()}
        rehearse([codec], [first])
        codec.state.pop("residual", None)
        rehearse([codec], [second], step=1)
        return second[name]

    def _keep(self, grads: Grads, errors: Tensor, ranks: int) -> None:
        kept = self.state.setdefault("errors", {})
        for (name, grad), row in zip(grads.items(), errors.double().cpu().view(-1, len(MENU)), strict=True):
            if name not in self._prices:
                self._prices[name] = [self._price(name, grad, ranks, scale) for scale in MENU]
            kept[name] = torch.stack([row**2, torch.tensor(self._prices[name], dtype=torch.float64)])

    def _price(self, name: str, grad: Tensor, ranks: int, scale: float) -> float:
        """Of two steps, for what travels may alternate."""
        return sum(price_of(partial(self._scaled, name, scale), name, grad, ranks, step) for step in (1, 2)) / 2

    def _scaled(self, name: str, scale: float) -> Codec:
        codec = self.make()
        codec.scales = {name: scale}
        return codec

    # -- what the codec inside has ------------------------------------------------------------------------------------

    def norm(self, kind: str) -> float:
        return self.inner.norm(kind)

    def take_back(self, name: str, delivered: Tensor) -> None:
        self.inner.take_back(name, delivered)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({kind: of for kind, of in state_dict.items() if kind != "inner"})
        self.inner.load_state_dict(state_dict.get("inner", {}))
        self.inner.scales, self._planned, self._prices = {}, None, {}

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """As of the codec; bytes depend on the number of ranks, so errors are measured anew before they count."""
        return {"inner": self.inner.merged([state["inner"] for state in states])}


def planned(errors: np.ndarray, prices: np.ndarray, budget: float) -> list[int]:
    """The setting of each layer, from errors and prices (layers, settings); see `LGreco`.

    Raises:
        ConfigError: the budget does not carry the cheapest settings.
    """
    if budget:
        if (chosen := cheapest(errors, prices, budget)) is None:
            least = prices.min(1).sum()
            raise ConfigError(f"a budget of {budget:.0f} bytes a step does not carry {least:.0f}, the least there is")
        return chosen
    return cheapest(prices, errors, float(errors[:, OWN].sum())) or [OWN] * len(errors)


def cheapest(cost: np.ndarray, weight: np.ndarray, limit: float, bins: int = BINS) -> list[int] | None:
    """One setting for each layer, of the least sum of `cost` for which the sum of `weight` is within `limit`.

    Weights are rounded up to whole parts of the limit, of which there are `bins`: the limit is kept, and the optimum
    missed by no more than if it was lower by one part for each layer. None if nothing is found within it.

    Args:
        cost, weight: (layers, settings), not negative. Ranks that have the same choose the same.
    """
    layers, settings = cost.shape
    parts = np.minimum(np.ceil(weight * (bins / limit)), bins + 1).astype(int) if limit else (weight > 0) * (bins + 1)
    least = np.zeros(bins + 1)  # the least cost of the layers so far, within so many parts
    chosen = np.zeros((layers, bins + 1), dtype=np.int8)
    for layer in range(layers):
        sums = np.full((settings, bins + 1), np.inf)
        for setting, part in enumerate(parts[layer]):
            sums[setting, part:] = least[: bins + 1 - part] + cost[layer, setting]
        chosen[layer] = sums.argmin(0)
        least = sums.min(0)
    if np.isinf(least[bins]):
        return None
    found, left = [], bins
    for layer in reversed(range(layers)):
        found.append(int(chosen[layer, left]))
        left -= parts[layer, found[-1]]
    return found[::-1]
