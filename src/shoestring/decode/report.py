"""Statistics of generation and speculation, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoestring import figures

if TYPE_CHECKING:
    from shoestring.decode.engine import Engine
    from shoestring.decode.speculation import DraftCounts, Rounds


def describe(engine: Engine) -> Iterator[str]:
    """Lines with the numbers of tokens and passes and, after speculation, acceptance and the costs by draft length."""
    counts, drafts = engine.counts, engine.counts.drafts
    yield f"{counts.generated} tokens in {counts.passes} passes, and {counts.chunks} passes over prompts"
    if engine.speculator is None or not drafts.drafts:
        return
    drafted, accepted = sum(drafts.drafted), sum(drafts.accepted)
    yield f"{drafted} tokens drafted, {accepted} accepted ({figures.percent(accepted / drafted)})"
    shares = zip(drafts.accepted, drafts.drafted, strict=True)
    yield "accepted, by position in the draft: " + " ".join(f"{stayed / total:.2f}" for stayed, total in shares)
    yield "draft length   passes   tokens per pass, predicted   ms per pass   ms of drafting   tokens/s"
    for length, rounds in sorted(engine.speculator.rounds.items()):
        yield _row(length, rounds, drafts)


def _row(length: int, rounds: Rounds, drafts: DraftCounts) -> str:
    seconds = rounds.drafting + rounds.reading
    return (
        f"{length:12d} {rounds.count:8d} {rounds.tokens / rounds.rows:17.2f} {drafts.expected(length):10.2f} "
        f"{1e3 * rounds.reading / rounds.count:13.2f} {1e3 * rounds.drafting / rounds.count:16.2f} "
        f"{rounds.tokens / seconds:10.1f}"
    )
