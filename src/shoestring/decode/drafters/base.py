"""What the engine asks of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from shoestring.decode.adapter import Adapter
    from shoestring.decode.request import Row
    from shoestring.models.cache import KVCache


class DraftTokens(NamedTuple):
    """Tokens proposed to follow a text, in order, at most as many as were asked for."""

    tokens: list[int]
    q: Tensor | None = None
    """The distributions (γ, V) that they were drawn from; None when each was certain, or where verification does not
    ask for them."""


class Drafter(ABC):
    """Proposes tokens. What it proposes has no influence on the distribution of the text, only on its cost.

    A row's `history` is all verified, and grows in place. A drafter that keeps state keeps it by `row.slot`, and finds
    out itself what has changed: tokens that were rejected, a new row in the slot, a new `row.begin`.
    """

    def attach(self, model: Adapter, cache: KVCache) -> None:  # noqa: B027  # most drafters have no use for it
        """Called once, by the engine that verifies, with its model and the cache of its texts.

        A drafter may draft in that cache, behind the texts: a pass overwrites what lies behind a row's length. It must
        leave the lengths as they were.
        """

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """How good a draft each row would get, before anything is drafted: a small number that stands for drafts that
        are about as often accepted, whose acceptance is then measured together; below 0 there is none to offer."""
        return [0] * len(rows)

    @abstractmethod
    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """At most `counts` tokens for each row."""
