"""A choice of sublayers to skip: made from sample text, kept in a file, applied to every pass or to decoding alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, adapt
from shoestring.decode.skipping.choice import Ratios, Rule, SkipCandidate, Statistics, least_loss, saved_bytes
from shoestring.decode.skipping.cost import Costs, count_bytes
from shoestring.decode.skipping.importance import Observer
from shoestring.models.sublayers import skipping, sublayers
from shoestring.storage.whole import write_atomic

FORMAT = 1


@dataclass(frozen=True)
class SkipPlan:
    """Sublayers to skip, and what that was expected to save."""

    ratios: Ratios
    """r of each: y = r · x."""
    context: int
    """Tokens of context that bytes were counted at."""
    saved: float
    """The share of the bytes moved for a token at that context that is saved."""
    loss_before: float | None = None
    """On the sample text with every sublayer, in nats a token; None where it was not measured."""
    loss_after: float | None = None
    """The same without those that are skipped."""

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode() + b"\n")

    @staticmethod
    def load(path: Path) -> SkipPlan:
        """Raises: ConfigError, the file is missing or no plan."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            assert table.pop("format") == FORMAT
            plan = SkipPlan(**table)
            assert all(isinstance(ratio, float | int) for ratio in plan.ratios.values())
        except (OSError, ValueError, AssertionError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"`{path}` is no skip plan: {error or 'not its format'}",
                hint="write one with `shoestring skip MODEL --out FILE`",
            ) from error
        return plan


def make_plan(
    model: nn.Module | Adapter,
    batches: Sequence[Tensor],
    share: float,
    *,
    context: int,
    measure: bool = True,
    rule: Rule = least_loss,
) -> SkipPlan:
    """The sublayers without which a share of the bytes moved for a token is saved, chosen from sample text.

    Args:
        batches: token ids (B, T), int64, on the model's device.
        share: of the bytes, from 0 to below 1.
        context: tokens of context at which bytes are counted.
        measure: choose by the loss on the text, in two passes over it for each sublayer; otherwise by what sublayers
            do to the stream alone, in one pass.

    Raises:
        ConfigError: the share is out of range, or the sublayers of the model are not known.
    """
    check_share(share)
    adapter = model if isinstance(model, Adapter) else adapt(model)

    def losses(ratios: Ratios) -> list[float]:
        with skipping(adapter.model, ratios), torch.inference_mode():
            return torch.cat([_losses(adapter, batch) for batch in batches]).tolist()

    observer = Observer(adapter.model)
    with observer:
        before = fmean(losses({}))
    statistics = replace(gather(observer, count_bytes(adapter), context), losses=losses if measure else None)
    ratios = rule(statistics, share * statistics.total)
    saved = saved_bytes(statistics, ratios) / statistics.total
    return SkipPlan(ratios, context, saved, before if measure else None, fmean(losses(ratios)) if measure else None)


def _losses(adapter: Adapter, batch: Tensor) -> Tensor:
    """Mean cross-entropy of every token but the first of each text, (B,), in nats."""
    logits = adapter.read(batch[:, :-1], adapter.new_cache(len(batch), batch.shape[1]))
    targets = batch[:, 1:].to(logits.device)
    return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(1)


def check_share(share: float) -> None:
    """Raises: ConfigError, no share of bytes to save."""
    if not 0 <= share < 1:
        raise ConfigError(f"skipping cannot save a share of {share} of the bytes", hint="give a share such as 0.2")


def check_skips(model: Adapter) -> None:
    """Raises: ConfigError, passes of the model are captured, and would go on with every sublayer."""
    if model.captured:
        raise ConfigError("a compiled model cannot skip sublayers", hint="give --passes plain")


def gather(observer: Observer, costs: Costs, context: int) -> Statistics:
    """What rules choose by, of what was observed."""
    known, changes = sublayers(observer.model), observer.changes()
    candidates = [
        SkipCandidate(
            name,
            known[name].kind,
            known[name].layer,
            costs.sublayers[name].at(context),
            change.similarity,
            change.ratio,
            1 - change.similarity,
        )
        for name, change in changes.items()
    ]
    return Statistics(candidates, [each.similarity for each in observer.block_changes()], costs.total(context))
