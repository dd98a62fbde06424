"""A round of speculative decoding: draft, read, verify, and update the estimates for the next draft's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoestring.decode.changed_logits import changed
from shoestring.decode.draft_length import DraftLength
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drawing import Positions, draw
from shoestring.decode.randomness import Purpose, key, race, uniform
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings.generation import Speculation, Verification
from shoestring.decode.stopwatch import seconds
from shoestring.decode.verification import common_prefix, one_hot, verify_block, verify_tokens

if TYPE_CHECKING:
    from shoestring.decode.request import Row

NOTHING = DraftTokens([])
"""An empty draft."""


class Verified(NamedTuple):
    """The tokens that a pass adds to a text: the accepted tokens of its draft, and one more."""

    tokens: list[int]
    accepted: int
    """Number of accepted tokens."""


class Chosen(NamedTuple):
    """The next tokens of several rows, which have not been appended to the rows yet."""

    logits: Sequence[Tensor]
    """(γ + 1, V) logits of each row."""
    finite: list[bool]
    """Whether the logits of each position are finite, row after row."""
    verified: list[Verified]
    """The next tokens of each row."""


@dataclass
class DraftCounts:
    """Counts of drafted and accepted tokens; lists are by position in the draft."""

    drafts: int = 0
    """Number of drafts."""
    drafted: list[int] = field(default_factory=list)
    """Tokens drafted."""
    tried: list[int] = field(default_factory=list)
    """Tokens drafted after predecessors that were all accepted."""
    accepted: list[int] = field(default_factory=list)
    """Tokens accepted."""

    def add(self, drafted: int, accepted: int) -> None:
        """Add one draft to the counts."""
        self.drafts += drafted > 0
        tried = min(accepted + 1, drafted)
        for counts, count in ((self.drafted, drafted), (self.tried, tried), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for position in range(count):
                counts[position] += 1

    def expected(self, length: int) -> float:
        """Expected number of tokens that a pass adds after a draft of `length` tokens, from the acceptance at each
        position."""
        tokens, together = 1.0, 1.0
        for accepted, tried in zip(self.accepted[:length], self.tried, strict=False):
            together *= accepted / max(tried, 1)
            tokens += together
        return tokens


@dataclass
class Rounds:
    """Totals over the rounds whose longest draft had the same length."""

    count: int = 0
    """Number of rounds."""
    rows: int = 0
    """Number of texts in each round of speculation, summed over all rounds."""
    tokens: int = 0
    """Number of tokens that were added to all rows together."""
    drafting: float = 0.0
    """Time of the drafter in seconds."""
    reading: float = 0.0
    """Time of the model's passes and of verification in seconds."""


class Speculator:
    """A drafter, the automatic choice of its draft length, and totals of the rounds by draft length."""

    def __init__(self, drafter: Drafter, speculation: Speculation) -> None:
        self.drafter = drafter
        self.length = DraftLength(speculation.max_draft_length, speculation.draft_length)
        self.rounds: dict[int, Rounds] = {}
        self._grades: Sequence[int] = ()
        self._seconds = self._began = 0.0

    def draft(self, rows: Sequence[Row], rooms: Sequence[int]) -> list[DraftTokens]:
        """Draft tokens for each row, at most as many as its entry in `rooms`."""
        began = seconds()
        self._grades = self.drafter.grades(rows)
        length = self.length.choose(self._grades, max(rooms))
        counts = [min(length, room) if grade >= 0 else 0 for grade, room in zip(self._grades, rooms, strict=True)]
        drafts = self.drafter.draft(rows, counts) if any(counts) else [NOTHING] * len(rows)
        self._began = seconds()
        self._seconds = self._began - began
        return drafts

    def learn(self, drafts: Sequence[DraftTokens], verified: Sequence[Verified]) -> None:
        """Update the estimates of acceptance and cost; must be called right after the pass that verified the drafts."""
        drafted, accepted = [len(draft.tokens) for draft in drafts], [row.accepted for row in verified]
        reading = seconds() - self._began
        self.length.learn(self._grades, drafted, accepted, self._seconds, reading)
        rounds = self.rounds.setdefault(max(drafted), Rounds())
        rounds.count += 1
        rounds.rows += len(verified)
        rounds.tokens += sum(len(row.tokens) for row in verified)
        rounds.drafting += self._seconds
        rounds.reading += reading


def choose(
    rows: Sequence[Row], drafts: Sequence[DraftTokens], logits: Sequence[Tensor], verification: Verification
) -> Chosen:
    """Run `verify`, and check which logits are finite."""
    # The maximum is NaN if any logit is NaN. A single logit of minus infinity is allowed: it rules a token out.
    finite = torch.cat([own.amax(-1).isfinite() for own in logits]).tolist()
    return Chosen(logits, finite, verify(rows, drafts, logits, verification))


def verify(
    rows: Sequence[Row], drafts: Sequence[DraftTokens], logits: Sequence[Tensor], verification: Verification
) -> list[Verified]:
    """Verify the draft of each row, and return the row's next tokens.

    Args:
        logits: for each row, the logits (γ + 1, V) after its history and after each of its drafted tokens.
    """
    logits = [changed(row, draft.tokens, own) for row, draft, own in zip(rows, drafts, logits, strict=True)]
    by_comparison = [
        index
        for index, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        if not draft.tokens or verification == "invariant" or row.request.sampling.greedy
    ]
    positions = []
    for index in by_comparison:
        row, drafted = rows[index], drafts[index].tokens
        sampling, start = row.request.sampling, len(row.history)
        steps = range(0 if sampling.greedy else len(drafted) + 1)  # the most likely token needs no random numbers
        keys = [key(sampling.seed, Purpose.TEXT, start + step) for step in steps]
        text = [*row.history, *drafted] if drafted else row.history  # without a draft, the history is not copied
        positions.append(Positions(logits[index], text, sampling, keys))
    verified: dict[int, Verified] = {}
    for index, chosen in zip(by_comparison, draw(positions), strict=True):
        accepted = common_prefix(drafts[index].tokens, chosen.tokens)
        verified[index] = Verified(chosen.tokens[: accepted + 1], accepted)
    verify_draft = verify_block if verification == "block" else verify_tokens
    for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        if index in verified:
            continue
        sampling, start, tokens = row.request.sampling, len(row.history), draft.tokens
        p = probabilities(penalize(logits[index], [*row.history, *tokens], sampling.repetition_penalty), sampling)
        q = one_hot(tokens, p) if draft.q is None else draft.q.to(p)
        # These random numbers are used in this round only; see `randomness.key`.
        coins = [uniform(sampling.seed, Purpose.ACCEPTANCE, start + step, start) for step in range(len(tokens))]
        accepted, following = verify_draft(p, q, tokens, coins)
        (last,) = race(following[None], [key(sampling.seed, Purpose.CORRECTION, start + accepted, start)])
        verified[index] = Verified([*tokens[:accepted], last], accepted)
    return [verified[index] for index in range(len(rows))]
