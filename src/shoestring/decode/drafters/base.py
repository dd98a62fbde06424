"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from shoestring.decode.adapter import Adapter
    from shoestring.decode.request import Row
    from shoestring.models.cache import KVCache


class DraftTokens(NamedTuple):
    """A draft: tokens proposed to follow a text, at most as many as were requested."""

    tokens: list[int]
    q: Tensor | None = None
    """The distributions (γ, V) that the tokens were drawn from; None if each token was chosen with certainty, or if
    verification does not need the distributions."""


class Drafter(ABC):
    """Proposes tokens that may continue a text. The proposals influence only the speed of generation, never the
    distribution of the text.

    A row's `history` holds verified tokens only, and grows in place. A drafter with state stores this state by
    `row.slot`, and must itself detect rejected tokens, a new row in the slot, and a changed `row.begin`.
    """

    def attach(self, model: Adapter, cache: KVCache) -> None:  # noqa: B027  # most drafters have no use for it
        """Connect the drafter with the model and the cache of an engine, which calls this once.

        A drafter may write to the engine's cache after the end of each text, because the next pass overwrites these
        positions; but the drafter must restore the lengths of the rows.
        """

    def grades(self, rows: Sequence[Row]) -> Sequence[int]:
        """The grade of each row's draft, before anything is drafted; a grade below 0 means that the drafter has no
        draft to offer.

        Grades are small integers. Acceptance is measured for each grade, so drafts of one grade should be accepted
        about equally often.
        """
        return [0] * len(rows)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the drafter's present state, for use before a failed round is repeated."""
        return lambda: None

    @abstractmethod
    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[DraftTokens]:
        """Draft tokens for each row, at most as many as its entry in `counts`."""
