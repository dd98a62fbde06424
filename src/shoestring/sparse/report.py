"""Report of sparse training: sparse layers and their possible speed-up, flip rates of masks, and energy kept by
masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoestring import figures
from shoestring.core.feature import Curve, Reduction, Table
from shoestring.sharded import local_part
from shoestring.sparse import semi_structured
from shoestring.sparse.layers import LinearLayers
from shoestring.sparse.product import unpack
from shoestring.sparse.shards import summed

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.sparse.attached import SparseMethod

LOOK = 25
"""Steps between two measurements of the masks; a measurement takes two passes over all weights."""
SMALL = 2048
"""Width up to which sparse products are not expected to be faster: with cuSPARSELt on an H100 in bf16, SlideSparse
(2026) measured 0.97x at 2048 and 1.53x at 4096."""
# Keys, and prefixes of keys, in the run's facts (`trace.facts`).
ADAPTERS = "adapter weights"
FUSED, PRODUCT = "fused feed-forward layers", "sparse product of "
FLIPS, ENERGY, CHANGED = "sparse flip rate of ", "sparse kept energy of ", "sparse dense because "


def explained(choice: LinearLayers, products: int, device: torch.device) -> str:
    """A line for `shoestring check`: sparse layers, dense layers, the largest possible speed-up, and when sparsity
    hurts."""
    count = len(choice.sparse)
    line = f"{count} linear layer{'s' * (count != 1)}, {figures.percent(choice.share)} of the weights of all, "
    line += f"in {products} of the 3 products of a step"
    if choice.dense:
        name, why = next(iter(choice.dense.items()))
        line += f"; dense: `{name}`" + (f" and {len(choice.dense) - 1} more" if len(choice.dense) > 1 else "")
        line += f" ({why})"
    gain = 1 / (1 - choice.share * products / 3 / 2)  # a sparse product takes at least half as long as a dense product
    line += f"; at most {gain:.2f}x in linear layers where products are twice as fast"
    narrow = min((min(layer.weight.shape) for layer in choice.sparse.values()), default=SMALL)
    if device.type != "cuda":
        line += f"; no step is faster here: a {device.type} has no sparse units"
    elif narrow < SMALL:
        line += f"; hurts: a layer is {narrow} wide, and below {SMALL} sparse products are no faster"
    return line


class MaskMetrics:
    """Measures, every LOOK steps, the flip rate of each layer's mask and the energy that the mask keeps."""

    def __init__(self, attachments: Attachments, choice: LinearLayers, method: SparseMethod) -> None:
        self.attachments, self.choice, self.method = attachments, choice, method
        self.before: dict[str, Tensor] = {}
        self.step = attachments.progress.step
        self.facts = attachments.trace.facts
        self.facts["sparse weights"] = choice.sparse_weights
        self.facts["linear weights"] = choice.weights
        self.facts |= {f"{CHANGED}{name}: {why}": 1.0 for name, why in choice.dense.items()}

    def read(self) -> None:
        """Count the step; at every LOOK-th step, compare the masks with the masks of the step before.

        Masks are recomputed from the weights, so that flips are seen even if masks are not refreshed in that step.
        """
        step = self.attachments.progress.step
        if step == self.step:  # `Job.finish` runs this phase again for the last step
            return
        self.step = step
        self.facts["sparse steps"] = self.facts.get("sparse steps", 0.0) + (not self.method.dense)
        self.facts["steps with sparsity"] = self.facts.get("steps with sparsity", 0.0) + 1
        if (step + 1) % LOOK == 0:
            weights = self._weights()
            self.before = {name: self.method.mask(name, local_part(weight)) for name, weight in weights.items()}
        elif step % LOOK == 0 and self.before:
            self._look()

    def _weights(self) -> dict[str, Tensor]:
        trained = self.attachments.trained
        return {name: trained[f"{name}.weight"] for name in self.choice.sparse}

    @torch.no_grad()
    def _look(self) -> None:
        weights, sums = self._weights(), []
        for name, weight in weights.items():
            own = local_part(weight)
            mask = unpack(self.method.mask(name, own), own.shape[1])
            squares, masked_squares = own.double().square(), (own.double() * mask).square()
            changed = (mask ^ unpack(self.before[name], own.shape[1])).double()
            sums.append(summed(torch.stack([changed.sum(), masked_squares.sum(), squares.sum()]), weight))
        flips = 0.0
        # The numbers of all layers are copied to the host at once.
        for (name, weight), (changed, masked, whole) in zip(weights.items(), torch.stack(sums).tolist(), strict=True):
            flips += changed
            self.facts[FLIPS + name] = changed / weight.numel()
            self.facts[ENERGY + name] = masked / max(whole, 1e-300)
        self.before = {}
        self.facts |= {PRODUCT + name: speedup for name, speedup in semi_structured.speedups().items()}
        self.attachments.numbers["flip_rate"] = flips / sum(weight.numel() for weight in weights.values())


def reduction(trace: Trace, products: int) -> Reduction | None:
    """Multiplications per token in linear layers, averaged over the run, with sparsity and without."""
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
        cost=f"sparse in {figures.percent(share)} of the steps; simulated by dense products without sparse units",
    )


def report_items(trace: Trace) -> Sequence[Table | Curve]:
    """Tables of the sparse layers and of their products, and curves of flip rate and decay factor."""
    energies = {name.removeprefix(ENERGY): value for name, value in trace.facts.items() if name.startswith(ENERGY)}
    rows = [
        (name, f"{energy:.3f}", figures.percent(trace.facts[FLIPS + name]), "") for name, energy in energies.items()
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
    """The table of products that were tried on sparse units; empty if none were tried."""
    speedups = {name.removeprefix(PRODUCT): value for name, value in trace.facts.items() if name.startswith(PRODUCT)}
    if not speedups:
        return ()
    fused = int(trace.facts.get(FUSED, 0))
    rows = [
        (name, f"{value:.2f}x" if value else "fails", "sparse" if value >= semi_structured.WORTHWHILE else "dense")
        for name, value in speedups.items()
    ]
    table = Table(
        title="Products on sparse units",
        head=("product", "speed-up", "runs"),
        rows=tuple(rows),
        note="Speed-up: time of the dense product over that of the sparse one, packing included, at the first product "
        f"of a shape. The activations of {fused} feed-forward layer{'s' * (fused != 1)} are fused.",
    )
    return (table,)
