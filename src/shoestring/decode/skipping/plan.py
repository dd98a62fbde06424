"""Plans of sublayers to skip: made from sample text, saved to files, and applied to every pass or only to decoding."""

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
from shoestring.storage import foreign
from shoestring.storage.fields import Fields
from shoestring.storage.whole import write_atomic

FORMAT = 1


@dataclass(frozen=True)
class SkipPlan:
    """The sublayers to skip, with the expected savings."""

    ratios: Ratios
    """Factor r of each skipped sublayer: y = r · x."""
    context: int
    """Context length at which bytes were counted."""
    saved: float
    """Fraction of the bytes moved per token that skipping avoids at a context of length `context`."""
    loss_before: float | None = None
    """Loss on the sample text with every sublayer, in nats a token; None if it was not measured."""
    loss_after: float | None = None
    """Loss on the sample text without the skipped sublayers, in nats a token; None if it was not measured."""

    def save(self, path: Path) -> None:
        """Write the plan to a JSON file."""
        write_atomic(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode() + b"\n")

    @staticmethod
    def load(path: Path) -> SkipPlan:
        """Load a plan from a file.

        Raises:
            ConfigError: the file is missing, or is not a plan.
        """
        hint = "write one with `shoestring skip MODEL --out FILE`"
        try:
            table = foreign.read_json_object(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"`{path}` is no skip plan: {reason}", hint=hint) from error
        fields = Fields(table, f"`{path}` is no skip plan", ConfigError, hint)
        if fields.count("format") != FORMAT or set(fields) != {"format", *SkipPlan.__dataclass_fields__}:
            raise ConfigError(f"`{path}` is no skip plan: its format is unknown", hint=hint)
        ratios = fields.entries("ratios")
        return SkipPlan(
            ratios={name: ratios.number(name) for name in ratios},
            context=fields.count("context"),
            saved=fields.number("saved"),
            loss_before=fields.number("loss_before", None),
            loss_after=fields.number("loss_after", None),
        )


def make_plan(
    model: nn.Module | Adapter,
    batches: Sequence[Tensor],
    share: float,
    *,
    context: int,
    measure: bool = True,
    rule: Rule = least_loss,
) -> SkipPlan:
    """Choose from sample text which sublayers to skip, so that a fraction of the bytes moved per token is avoided.

    Args:
        batches: token ids (B, T), int64, on the model's device.
        share: fraction of the bytes to save, from 0 to below 1.
        context: context length at which bytes are counted.
        measure: choose by the loss on the text, which takes two or more passes over the text for each sublayer;
            otherwise choose by the change of the residual stream alone, in one pass.
        rule: function that makes the choice.

    Raises:
        ConfigError: the share is out of range, or the sublayers of the model are not supported.
    """
    check_share(share)
    adapter = model if isinstance(model, Adapter) else adapt(model)

    def losses(ratios: Ratios) -> list[float]:
        """Mean cross-entropy of each text, in nats per token, over all of its tokens but the first."""
        means = []
        with skipping(adapter.model, ratios), torch.inference_mode():
            for batch in batches:
                logits = adapter.read(batch[:, :-1], adapter.new_cache(len(batch), batch.shape[1]))
                targets = batch[:, 1:].to(logits.device)
                means.append(F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(1))
            return torch.cat(means).tolist()

    observer = Observer(adapter.model)
    with observer:
        before = fmean(losses({}))
    statistics = replace(gather(observer, count_bytes(adapter), context), losses=losses if measure else None)
    ratios = rule(statistics, share * statistics.total)
    saved = saved_bytes(statistics, ratios) / statistics.total
    return SkipPlan(ratios, context, saved, before if measure else None, fmean(losses(ratios)) if measure else None)


def check_share(share: float) -> None:
    """Raise ConfigError if a share of bytes to save is out of range."""
    if not 0 <= share < 1:
        raise ConfigError(f"skipping cannot save a share of {share} of the bytes", hint="give a share such as 0.2")


def check_skips(model: Adapter) -> None:
    """Raise ConfigError if the model cannot skip sublayers, because its passes are captured or its cache needs every
    sublayer."""
    if model.captured:
        raise ConfigError("a compiled model cannot skip sublayers", hint="give --passes plain")
    if not model.skips:
        name = type(model.model).__name__
        raise ConfigError(f"{name} cannot skip sublayers, because each of them must update the model's cache")


def gather(observer: Observer, costs: Costs, context: int) -> Statistics:
    """Convert the sums of an observer to the statistics that rules take."""
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
    return Statistics(candidates, [change.similarity for change in observer.block_changes()], costs.total(context))
