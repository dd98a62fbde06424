"""Features with one planted fault each, for the clause that must find it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.feature import Feature, Phase, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments


@dataclass(frozen=True, kw_only=True)
class Rounds(Feature):
    """Clips; and rounds the gradients, also in the setting that is said to do nothing."""

    bound: float = 0.5
    """Largest absolute value of a gradient."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        def clip() -> None:
            for gradient in attachments.gradients:
                gradient.clamp_(-self.bound, self.bound).copy_(gradient.half())

        attachments.at(Phase.CLIP, clip)


Rounds.neutral = Rounds(bound=math.inf)


class Momentum:
    """Adds a tenth of the former step's gradients."""

    def __init__(self, attachments: Attachments) -> None:
        self.attachments = attachments
        self.former: list[Any] = []

    def add(self) -> None:
        gradients = self.attachments.gradients
        for gradient, former in zip(gradients, self.former, strict=False):
            gradient.add_(former, alpha=0.1)
        self.former = [gradient.clone() for gradient in gradients]

    def state_dict(self) -> dict[str, Any]:
        return {"former": self.former}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.former = state["former"]


@dataclass(frozen=True, kw_only=True)
class Forgets(Feature):
    """Does not keep its state."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.at(Phase.GRAD, Momentum(attachments).add)


@dataclass(frozen=True, kw_only=True)
class StartsAfresh(Feature):
    """Keeps its state as each rank's own, with nothing to say what becomes of it on other ranks."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        momentum = Momentum(attachments)
        attachments.at(Phase.GRAD, momentum.add)
        attachments.keep("momentum", momentum, across="own")


class Seen:
    """The sum of what this rank's batches cost."""

    def __init__(self, rank: int) -> None:
        self.total = float(rank)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


@dataclass(frozen=True, kw_only=True)
class Mislabels(Feature):
    """Keeps as the same on all ranks what is not."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.keep("seen", Seen(attachments.world.rank), across="same")


@dataclass(frozen=True, kw_only=True)
class Speechless(Feature):
    """Has a field without help."""

    explained: float = 1.0
    """Not used."""
    unexplained: float = 1.0

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Unwritable(Feature):
    """Has a setting for which TOML has no form."""

    bound: float | None = None
    """None is no bound."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Unscaled(Feature):
    """Averages over ranks what is averaged already."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        def average() -> None:
            for gradient in attachments.gradients:
                gradient.div_(attachments.world.size)

        attachments.at(Phase.GRAD, average)


@dataclass(frozen=True, kw_only=True)
class Ascends(Feature):
    """Goes uphill."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        def turn() -> None:
            for gradient in attachments.gradients:
                gradient.neg_()

        attachments.at(Phase.GRAD, turn)


@dataclass(frozen=True, kw_only=True)
class Grabs(Feature):
    """Takes memory in its check."""

    seams: ClassVar = (Seam.STEP,)

    def check(self, attachments: Attachments) -> None:
        import torch

        attachments.reserved = torch.zeros(1000)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Encroaches(Feature):
    """Builds the optimizer without owning OPTIM."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        build = attachments.build_optimizer
        attachments.build_optimizer = lambda parameters: build(parameters)


@dataclass(frozen=True, kw_only=True)
class LeavesHook(Feature):
    """Hooks into a module and never takes the hook back."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.module.register_forward_hook(lambda *_: None)


@dataclass(frozen=True, kw_only=True)
class LeavesPatch(Feature):
    """Patches a forward pass for the time of a step, and takes the patch back where nothing fails."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        forward, module = attachments.forward, next(attachments.module.children())

        def patched(model: Any, batch: Any) -> Any:
            module.forward = module.forward
            output = forward(model, batch)
            del module.forward
            return output

        attachments.forward = patched


@dataclass(frozen=True, kw_only=True)
class LeavesThread(Feature):
    """Starts a thread for the time of a step, and ends it where nothing fails."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        attachments.forward = accompanied(attachments.forward)


def accompanied(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(model: Any, batch: Any) -> Any:
        done = threading.Event()
        thread = threading.Thread(target=done.wait, args=(20,), name="companion", daemon=True)
        thread.start()
        output = forward(model, batch)
        done.set()
        thread.join()
        return output

    return run


@dataclass(frozen=True, kw_only=True)
class Strays(Feature):
    """Writes to its folder wherever the process runs: `placed` does not put the folder into the run's own."""

    folder: str = "notes"
    """Where to write."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        def write() -> None:
            Path(self.folder).mkdir(exist_ok=True)
            (Path(self.folder) / f"{attachments.progress.step}.txt").touch()

        attachments.at(Phase.CAPTURE, write)


@dataclass(frozen=True, kw_only=True)
class NeedsTheJob(Feature):
    """Acts in `Job.step` only: a foreign loop has a loss of its own."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        loss = attachments.loss

        def half(output: Any, batch: Any) -> Any:
            total, count = loss(output, batch)
            return total * 0.5, count

        attachments.loss = half


@dataclass(frozen=True, kw_only=True)
class Whole(Feature):
    """Smooths gradients, in buffers that are as large as the parameters were before they were sharded."""

    seams: ClassVar = (Seam.MODEL, Seam.STEP)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        if seam is Seam.MODEL:
            attachments.trace.facts["largest"] = max(parameter.numel() for parameter in attachments.parameters)
            return

        def smooth() -> None:
            import torch

            room = torch.zeros(int(attachments.trace.facts["largest"]))
            for parameter in attachments.parameters:
                room[: parameter.numel()].copy_(parameter.grad.flatten())

        attachments.at(Phase.GRAD, smooth)


@dataclass(frozen=True, kw_only=True)
class KeepsToItself(Feature):
    """Computes with larger weights than those that it trains, and lets those that it trains leave the run."""

    factor: float = 1.5
    """What the weights of some layers are multiplied by."""

    seams: ClassVar = (Seam.MODEL,)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from functools import partial

        from torch.nn import functional as F

        for block in attachments.module.blocks:
            attachments.patch(block.up, partial(self._forward, F.linear, block.up))

    def _forward(self, linear: Any, layer: Any, inputs: Any) -> Any:
        return linear(inputs, layer.weight * self.factor, layer.bias)
