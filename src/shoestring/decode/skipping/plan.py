"""A choice of sublayers to skip: made from sample text, kept in a file, applied to every pass or to decoding alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.decode.adapter import Adapter, adapt
from shoestring.decode.skipping.choice import Ratios, Rule, SkipCandidate, Statistics, least_harm, saved_bytes
from shoestring.decode.skipping.cost import Costs, count_bytes
from shoestring.decode.skipping.importance import Observer
from shoestring.models.sublayers import sublayers
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
    model: nn.Module | Adapter, batches: Iterable[Tensor], share: float, *, context: int, rule: Rule = least_harm
) -> SkipPlan:
    """The sublayers that save a share of the bytes moved for a token, by what they do to the stream on sample text.

    Args:
        batches: token ids (B, T), int64.
        share: of the bytes, from 0 to below 1.
        context: tokens of context at which bytes are counted.

    Raises:
        ConfigError: the share is out of range, or the sublayers of the model are not known.
    """
    check_share(share)
    adapter = model if isinstance(model, Adapter) else adapt(model)
    observer = Observer(adapter.model)
    with observer, torch.inference_mode():
        for batch in batches:
            adapter.read(batch, adapter.new_cache(*batch.shape), wanted="last")
    statistics = gather(observer, count_bytes(adapter), context)
    ratios = rule(statistics, share * statistics.total)
    return SkipPlan(ratios, context, saved_bytes(statistics, ratios) / statistics.total)


def check_share(share: float) -> None:
    """Raises: ConfigError, no share of bytes to save."""
    if not 0 <= share < 1:
        raise ConfigError(f"skipping cannot save a share of {share} of the bytes", hint="give a share such as 0.2")


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
