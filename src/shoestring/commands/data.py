"""Arguments of `shoestring data show`, and the printing of records."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from tyro.conf import Positional

from shoestring.commands.printing import Output
from shoestring.core.errors import ConfigError
from shoestring.storage.foreign import one_line, printable
from shoestring.verbs.settings import DataView

if TYPE_CHECKING:
    from shoestring.verbs.data import RenderedPiece, ShownData

_GREEN, _BOLD, _DIM, _RESET = "\x1b[32m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class ShowData:
    """Arguments of `shoestring data show`."""

    source: Positional[str]
    """Data source as in run.data (files, globs, hf:NAME or a pipe), or a run file."""
    view: DataView = field(default_factory=DataView)
    """Settings for reading and showing the data."""
    output: Output = field(default_factory=Output)
    """Format of the output; JSON lists every piece of text and whether it is learnt."""

    def __call__(self) -> int:
        from shoestring.verbs.data import show

        shown = show(self.source, self.view)
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        if coloured and not self.output.json:  # the lines are printable already, apart from the colour codes
            sys.stdout.writelines(f"{line}\n" for data in shown for line in _lines(data, coloured))
            sys.stdout.flush()
        else:
            self.output.show([asdict(data) for data in shown], (line for data in shown for line in _lines(data, False)))
        return ConfigError.code if any(data.refusal for data in shown) else 0


def _lines(data: ShownData, coloured: bool) -> Iterator[str]:
    """Yield the lines to print for a data source; control characters in its text are escaped."""
    yield one_line(f"{data.source}: format {data.format or 'unknown'}")
    if data.first:
        legend = f"{_GREEN}learnt{_RESET}, {_BOLD}special token{_RESET}" if coloured else "»learnt«, ⟨special token⟩"
        yield f"  {legend}"
    for record in data.first:
        yield ""
        yield one_line(f"{record.where}{': left out, because ' + record.left_out if record.left_out else ''}")
        for sample in record.samples:
            runs = groupby(sample.pieces, key=lambda piece: piece.learnt)
            text = "".join((_coloured if coloured else _marked)(list(pieces), learnt) for learnt, pieces in runs)
            for line in text.split("\n"):
                yield f"  {line}"
            cut = f", {sample.cut:,} more are cut" if sample.cut else ""
            left_out = f"; left out, because {sample.left_out}" if sample.left_out else ""
            if sample.tokens:
                yield f"  -- {sample.tokens - sample.cut:,} tokens, {sample.learnt:,} of them learnt{cut}{left_out}"
    yield ""
    yield from map(one_line, _summary(data))


def _coloured(pieces: list[RenderedPiece], learnt: bool) -> str:
    """Colour the text of pieces; the colour codes are repeated in each line, so that every line can be shown alone."""
    parts = []
    for piece in pieces:
        style = (_GREEN if learnt else _DIM) + (_BOLD if piece.special else "")
        parts.append(style + f"{_RESET}\n{style}".join(printable(piece.text).split("\n")) + _RESET)
    return "".join(parts)


def _marked(pieces: list[RenderedPiece], learnt: bool) -> str:
    text = "".join(f"⟨{printable(piece.text)}⟩" if piece.special else printable(piece.text) for piece in pieces)
    return f"»{text}«" if learnt else text


def _summary(data: ShownData) -> Iterator[str]:
    numbers = {"records": data.records, "samples": data.samples, "tokens": data.tokens, "learnt tokens": data.learnt}
    counts = ", ".join(f"{name}: {number:,}" for name, number in numbers.items() if number)
    yield f"{counts or 'no records'}{', and there are more' if data.stopped else ''}"
    if data.cut:
        yield f"samples longer than data.sequence, which are cut: {data.cut:,}"
    for reason, count in data.left_out.items():
        yield f"left out, because {reason}: {count:,}"
    if data.ends:
        yield f"answers end with {' or '.join(data.ends)}"
    if data.refusal:
        yield f"training refuses this data: {data.refusal}"
