"""A round of speculation: draft, read, verify, and learn how long the next draft should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from shoestring.decode.draft_length import DraftLength
from shoestring.decode.drafters.base import Drafter, DraftTokens
from shoestring.decode.drawing import Positions, draw
from shoestring.decode.randomness import Purpose, key, race, uniform
from shoestring.decode.sampling import penalize, probabilities
from shoestring.decode.settings import Speculation, Verification
from shoestring.decode.stopwatch import seconds
from shoestring.decode.verification import common_prefix, one_hot, verify_block, verify_tokens

if TYPE_CHECKING:
    from shoestring.decode.request import Row

NOTHING = DraftTokens([])


class Verified(NamedTuple):
    """The tokens that a pass adds to a text: those of its draft that stay, and one more."""

    tokens: list[int]
    accepted: int


@dataclass
class DraftCounts:
    """What was drafted, and what of it stayed; lists are by position in the draft."""

    drafts: int = 0
    drafted: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    """Those before which all drafted tokens stayed."""
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft."""
        self.drafts += drafted > 0
        tried = min(accepted + 1, drafted)
        for counts, count in ((self.drafted, drafted), (self.tried, tried), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for position in range(count):
                counts[position] += 1

    def expected(self, length: int) -> float:
        """Tokens that a pass with `length` drafted ones gives a text, by the measured acceptance of each position."""
        tokens, together = 1.0, 1.0
        for accepted, tried in zip(self.accepted[:length], self.tried, strict=False):
            together *= accepted / max(tried, 1)
            tokens += together
        return tokens


@dataclass
class Rounds:
    """Passes whose longest draft had the same length."""

    count: int = 0
    rows: int = 0
    """Of all passes together."""
    tokens: int = 0
    """Of all rows."""
    drafting: float = 0.0
    """Seconds of the drafter."""
    reading: float = 0.0
    """Seconds of the passes, with verification."""


class Speculator:
    """A drafter with the length of its drafts, and the rounds so far by that length."""

    def __init__(self, drafter: Drafter, speculation: Speculation) -> None:
        self.drafter = drafter
        self.length = DraftLength(speculation.max_draft_length, speculation.draft_length)
        self.rounds: dict[int, Rounds] = {}
        self._grades: Sequence[int] = ()
        self._seconds = self._began = 0.0

    def draft(self, rows: Sequence[Row], rooms: Sequence[int]) -> list[DraftTokens]:
        """A draft for each row, of at most `rooms` tokens."""
        began = seconds()
        self._grades = self.drafter.grades(rows)
        length = self.length.choose(self._grades, max(rooms))
        counts = [min(length, room) if grade >= 0 else 0 for grade, room in zip(self._grades, rooms, strict=True)]
        drafts = self.drafter.draft(rows, counts) if any(counts) else [NOTHING] * len(rows)
        self._began = seconds()
        self._seconds = self._began - began
        return drafts

    def learn(self, drafts: Sequence[DraftTokens], verified: Sequence[Verified]) -> None:
        """What became of the drafts, right after the pass that verified them."""
        drafted, accepted = [len(draft.tokens) for draft in drafts], [row.accepted for row in verified]
        reading = seconds() - self._began
        self.length.learn(self._grades, drafted, accepted, self._seconds, reading)
        rounds = self.rounds.setdefault(max(drafted), Rounds())
        rounds.count += 1
        rounds.rows += len(verified)
        rounds.tokens += sum(len(row.tokens) for row in verified)
        rounds.drafting += self._seconds
        rounds.reading += reading


def verify(
    rows: Sequence[Row], drafts: Sequence[DraftTokens], logits: Sequence[Tensor], verification: Verification
) -> list[Verified]:
    """The tokens that each row gets.

    Args:
        logits: (γ + 1, V) of each row, of the tokens that follow its history and each of its drafted tokens.
    """
    by_comparison = [
        index
        for index, (row, draft) in enumerate(zip(rows, drafts, strict=True))
        if not draft.tokens or verification == "invariant" or row.request.sampling.greedy
    ]
    wanted = [_positions(rows[index], drafts[index].tokens, logits[index]) for index in by_comparison]
    found: dict[int, Verified] = {}
    for index, chosen in zip(by_comparison, draw(wanted), strict=True):
        accepted = common_prefix(drafts[index].tokens, chosen.tokens)
        found[index] = Verified(chosen.tokens[: accepted + 1], accepted)
    for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        if index not in found:
            found[index] = _verify_sampled(row, draft, logits[index], verification)
    return [found[index] for index in range(len(rows))]


def _positions(row: Row, drafted: list[int], logits: Tensor) -> Positions:
    sampling, start = row.request.sampling, len(row.history)
    keys = [key(sampling.seed, Purpose.TEXT, start + step) for step in range(len(drafted) + 1)]
    return Positions(logits, [*row.history, *drafted] if drafted else row.history, sampling, keys)


def _verify_sampled(row: Row, draft: DraftTokens, logits: Tensor, verification: Verification) -> Verified:
    """Token or block verification. Its numbers are of this round alone: a rejection may rest on later positions'."""
    sampling, start, tokens = row.request.sampling, len(row.history), draft.tokens
    p = probabilities(penalize(logits, [*row.history, *tokens], sampling.repetition_penalty), sampling)
    q = one_hot(tokens, p) if draft.q is None else draft.q.to(p)
    coins = [uniform(sampling.seed, Purpose.ACCEPTANCE, start + step, start) for step in range(len(tokens))]
    accepted, following = (verify_block if verification == "block" else verify_tokens)(p, q, tokens, coins)
    (last,) = race(following[None], [key(sampling.seed, Purpose.CORRECTION, start + accepted, start)])
    return Verified([*tokens[:accepted], last], accepted)
