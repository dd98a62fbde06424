"""What sparse training shows: what is sparse and what that can gain, how often masks change, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring.core.feature import Curve, Reduction, Table
from shoestring.sparse import semi_structured
from shoestring.sparse.layers import LinearLayers
from shoestring.sparse.product import unpack
from shoestring.sparse.shards import local, summed

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.sparse.attached import SparseMethod

LOOK = 25
"""Steps between two looks at the masks, which cost a pass over all weights each."""
SMALL = 2048
"""The width up to which sparse products are not expected to be faster: with cuSPARSELt on an H100 in bf16, SlideSparse
(2026) measured 0.97x at 2048 and 1.53x at 4096."""
ADAPTERS = "adapter weights"
FUSED, PRODUCT = "fused feed-forward layers", "sparse product of "
FLIPS, ENERGY, CHANGED = "sparse flip rate of ", "sparse kept energy of ", "sparse dense because "


def explained(choice: LinearLayers, products: int, device: torch.device) -> str:
    """What is sparse, what stays dense, what that can gain at most, and when it hurts."""
    count = len(choice.sparse)
    said = f"{count} linear layer{'s' * (count != 1)}, {choice.share:.0%} of the weights of all, "
    said += f"in {products} of the 3 products of a step"
    if choice.dense:
        name, why = next(iter(choice.dense.items()))
        said += f"; dense: `{name}`" + (f" and {len(choice.dense) - 1} more" if len(choice.dense) > 1 else "")
        said += f" ({why})"
    gain = 1 / (1 - choice.share * products / 3 / 2)
    said += f"; at most {gain:.2f}x in linear layers where products are twice as fast"
    narrow = min((min(layer.weight.shape) for layer in choice.sparse.values()), default=SMALL)
    if device.type != "cuda":
        said += f"; no step is faster here: a {device.type} has no sparse units"
    elif narrow < SMALL:
        said += f"; hurts: a layer is {narrow} wide, and below {SMALL} sparse products are no faster"
    return said


class MaskMetrics:
    """Numbers of a step, now and then: how often masks change, and what they keep of each layer."""

    def __init__(self, job: Job, choice: LinearLayers, method: SparseMethod) -> None:
        self.job, self.choice, self.method = job, choice, method
        self.before: dict[str, Tensor] = {}
        self.step = job.progress.step
        self.facts = job.trace.facts
        self.facts["sparse weights"] = choice.sparse_weights
        self.facts["linear weights"] = choice.weights
        self.facts |= {f"{CHANGED}{name}: {why}": 1.0 for name, why in choice.dense.items()}

    def read(self) -> None:
        """Count the step; at every 25th and the one before, look at the masks that the weights would have."""
        step = self.job.progress.step
        if step == self.step:  # counted already: `Job.finish` ends at the step that was just done
            return
        self.step = step
        self.facts["sparse steps"] = self.facts.get("sparse steps", 0.0) + (not self.method.dense)
        self.facts["steps with sparsity"] = self.facts.get("steps with sparsity", 0.0) + 1
        if (step + 1) % LOOK == 0:
            weights = self._weights()
            self.before = {name: self.method.mask(name, local(weight)) for name, weight in weights.items()}
        elif step % LOOK == 0 and self.before:
            self._look()

    def _weights(self) -> dict[str, Tensor]:
        trained = self.job.trained
        return {name: trained[f"{name}.weight"] for name in self.choice.sparse}

    @torch.no_grad()
    def _look(self) -> None:
        weights, sums = self._weights(), []
        for name, weight in weights.items():
            own = local(weight)
            mask = unpack(self.method.mask(name, own), own.shape[1])
            squares, kept = own.double().square(), (own.double() * mask).square()
            changed = (mask ^ unpack(self.before[name], own.shape[1])).double()
            sums.append(summed(torch.stack([changed.sum(), kept.sum(), squares.sum()]), weight))
        flips = 0.0
        for (name, weight), (changed, kept, whole) in zip(weights.items(), torch.stack(sums).tolist(), strict=True):
            flips += changed
            self.facts[FLIPS + name] = changed / weight.numel()
            self.facts[ENERGY + name] = kept / max(whole, 1e-300)
        self.before = {}
        self.facts |= {PRODUCT + name: speedup for name, speedup in semi_structured.speedups().items()}
        self.job.numbers["flip_rate"] = flips / sum(weight.numel() for weight in weights.values())


def reduction(trace: Trace, products: int) -> Reduction | None:
    """Multiplications of linear layers, over the whole run."""
    facts = trace.facts
    if not facts.get("steps with sparsity"):
        return None
    share = facts["sparse steps"] / facts["steps with sparsity"]
    whole = 3 * facts["linear weights"]
    return Reduction(
        unit="multiplications in linear layers a token",
        used=whole - share * products * facts["sparse weights"] / 2 + 3 * facts.get(ADAPTERS, 0.0),
        without=whole,
        measured=False,
        cost=f"sparse in {share:.0%} of the steps; simulated by dense products on devices without sparse units",
    )


def report_items(trace: Trace) -> Sequence[Table | Curve]:
    """The layers with what their masks keep, and the curves of flips and decay."""
    rows = [
        (name.removeprefix(ENERGY), f"{kept:.3f}", f"{trace.facts[FLIPS + name.removeprefix(ENERGY)]:.2%}", "")
        for name, kept in trace.facts.items()
        if name.startswith(ENERGY)
    ]
    dense = [name.removeprefix(CHANGED).partition(": ") for name in trace.facts if name.startswith(CHANGED)]
    rows += [(name, "", "", why) for name, _, why in dense]
    if not rows:
        return ()
    table = Table(
        title="Sparse layers",
        head=("layer", "kept energy", "flip rate", "dense because"),
        rows=tuple(rows),
        note="Kept energy: the share of a weight's sum of squares that its 2:4 mask keeps. Flip rate: the share of "
        "the mask that one step changed. Both at the last look.",
    )
    return (
        table,
        *_products(trace),
        Curve(title="Masks that change", metrics={"flip_rate": "flip rate"}, unit="share of a mask a step"),
        Curve(title="Decay of masked weights", metrics={"decay": "factor"}),
    )


def _products(trace: Trace) -> Sequence[Table]:
    """What trials found on sparse units; nothing where there are none."""
    found = {name.removeprefix(PRODUCT): value for name, value in trace.facts.items() if name.startswith(PRODUCT)}
    if not found:
        return ()
    fused = int(trace.facts.get(FUSED, 0))
    rows = [
        (name, f"{value:.2f}x" if value else "fails", "sparse" if value >= semi_structured.WORTHWHILE else "dense")
        for name, value in found.items()
    ]
    table = Table(
        title="Products on sparse units",
        head=("product", "speed-up", "runs"),
        rows=tuple(rows),
        note="Speed-up: time of the dense product over that of the sparse one, packing included, at the first product "
        f"of a shape. The activations of {fused} feed-forward layer{'s' * (fused != 1)} are fused.",
    )
    return (table,)
