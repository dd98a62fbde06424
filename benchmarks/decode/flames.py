"""Where the processor's time goes in decoding, as flame graphs: for what the peers' benchmark misses.

python -m benchmarks.decode.flames [--out FOLDER] [CASE…]

Linux's `perf` samples a process of `benchmarks.decode.contestants` while it writes. Each box is a function, as wide as
its share of the samples, above its caller; frames without a symbol are left out.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from benchmarks.decode.contestants import VOCABULARY, started
from benchmarks.decode.peers import folder_of

CASES = {
    "token-8bit": (188, 8, 1, 64),
    "token-4bit": (188, 4, 1, 64),
    "token-fp32-60m": (60, 32, 1, 64),
    "prompt-8bit": (188, 8, 512, 1),
}
"""Millions of weights, bits of each, tokens of the prompt and of the answer."""
_SECONDS, _HERTZ = 12.0, 499
_FRAME = re.compile(r"^\s+[0-9a-f]+ (?P<symbol>.+?)(\+0x[0-9a-f]+)? \((?P<library>[^)]*)\)$")
_WIDTH, _ROW = 1200, 18
_COLOURS = ("#f4a582", "#fddbc7", "#d1e5f0", "#92c5de")

Stack = tuple[str, ...]


def sampled(size: int, width: int, prompt: int, tokens: int) -> Counter[Stack]:
    """Stacks of a thread that writes, with the number of samples in which each was seen."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCABULARY) for _ in range(prompt)]
    with started("ours", folder_of(size), width, 1) as contestant, tempfile.TemporaryDirectory() as made:
        contestant.ask([ids], tokens)  # kernels are compiled and weights are read
        data, end = Path(made) / "perf.data", time.monotonic() + _SECONDS
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(_HERTZ), "-g", "-p", str(contestant.pid)]
        with subprocess.Popen([*record, "-o", data, "--", "sleep", str(_SECONDS)]) as perf:
            while time.monotonic() < end:
                contestant.ask([ids], tokens)
            perf.wait()
        script = ["perf", "script", "-i", str(data), "-F", "comm,ip,sym,dso"]
        return Counter(stacks(subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()))


def stacks(lines: Iterable[str]) -> Iterator[Stack]:
    """The stacks of `perf script`, the outermost frame first."""
    stack = list[str]()
    for line in [*lines, ""]:
        frame = _FRAME.match(line)
        if frame and frame["symbol"] != "[unknown]":
            stack.append(frame["symbol"])
        elif not line.strip() and stack:
            yield tuple(reversed(stack))
            stack = []


def drawn(counts: Counter[Stack], title: str) -> str:
    """An SVG of the stacks."""
    total, boxes, deepest = sum(counts.values()), list[str](), 0

    def row(of: Sequence[tuple[Stack, int]], depth: int, at: float) -> None:
        nonlocal deepest
        deepest = max(deepest, depth)
        groups = dict[str, list[tuple[Stack, int]]]()
        for stack, count in of:
            if len(stack) > depth:
                groups.setdefault(stack[depth], []).append((stack, count))
        for name, inside in sorted(groups.items()):
            share = sum(count for _, count in inside) / total
            width = share * _WIDTH
            if width >= 1:
                boxes.append(_box(name, share, depth, at, width))
                row(inside, depth + 1, at)
            at += width

    row([*counts.items()], 0, 0.0)
    height = (deepest + 2) * _ROW
    body = "\n".join(box.format(top=height) for box in boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="monospace" font-size="11">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>\n"
    )


def _box(name: str, share: float, depth: int, at: float, width: float) -> str:
    letters = int(width / 7)
    label = name if len(name) <= letters else name[: letters - 1] + "…" if letters > 3 else ""
    colour = _COLOURS[sum(map(ord, name)) % len(_COLOURS)]
    return (
        f'<g transform="translate({at:.1f},{_ROW * -(depth + 1)})"><g transform="translate(0,{{top}})">'
        f"<title>{_braced(escape(name))}: {share:.1%}</title>"
        f'<rect width="{width:.1f}" height="{_ROW - 1}" fill={quoteattr(colour)}/>'
        f'<text x="3" y="13">{_braced(escape(label))}</text></g></g>'
    )


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def leaves(counts: Counter[Stack], most: int) -> list[tuple[str, float]]:
    """The functions in which most of the time is spent, with their share of it."""
    own = Counter[str]()
    for stack, count in counts.items():
        own[stack[-1]] += count
    return [(name, count / sum(counts.values())) for name, count in own.most_common(most)]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the flame graph of each case, and print the functions that take most of the time."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.decode.flames", description=__doc__)
    flags.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    flags.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures")
    given = flags.parse_args(argv)
    for case in given.cases or CASES:
        counts = sampled(*CASES[case])
        (given.out / f"decode-{case}.svg").write_text(drawn(counts, case), encoding="utf-8")
        print(case, *(f"{share:6.1%}  {name}" for name, share in leaves(counts, 10)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
