"""Decoding on a CPU beside llama.cpp, CTranslate2 and transformers: the same weights, each program in its own process.

python -m benchmarks.decode.peers [--only decode.peer-token-8bit …]

The models are Llamas of random weights (60 and 188 M). A token's time is that of 64 tokens after a prompt of one, over
64; a prompt's is that of the prompt and one token. Ratios are ours over the peer's, in alternation, by the clock with
one program computing at a time; processor time, which counts all threads, is in the note. llama.cpp is the wheel
xllamacpp (an AVX2 build) with its own defaults; CTranslate2 has one scale for each row where the others have one for
each 32 weights. Nobody reuses an earlier prompt.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from random import Random

from benchmarks.decode import contestants
from benchmarks.decode.contestants import VOCABULARY, write_models
from benchmarks.harness import Deadline
from benchmarks.machine import ROOT
from benchmarks.rows import Bar, Measured, NotRun
from benchmarks.timing import paired

SHAPES = {188: (12, 1024, 2816, 16), 60: (8, 640, 1728, 10), 0: (2, 64, 192, 2)}
"""Layers, width, inner width and heads of the model of so many million weights."""
PEERS = {"llama.cpp": "xllamacpp", "CTranslate2": "ctranslate2", "transformers": "transformers"}
"""Maps each peer to the package that has it."""
MODELS = ROOT / ".cache" / "decode" / "peers"
TOKENS, ROUNDS = 64, 12
Work = tuple[tuple[tuple[int, ...], ...], int]
"""Prompts of a batch, and the tokens to write behind each."""


@cache
def folder_of(size: int) -> Path:
    """The folder of a model's files."""
    folder = MODELS / str(size)
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder, *SHAPES[size])
    return folder


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = Random(seed)
    return tuple(draw.randrange(32, 127) for _ in range(length))


TOKEN: Work = ((_prompt(1),), TOKENS)
BATCH: Work = (tuple(_prompt(16, seed) for seed in range(8)), TOKENS)


def reading(length: int) -> Work:
    return ((_prompt(length),), 1)


def _missing(peer: str, width: int) -> str:
    """Why a peer cannot take part; empty if it can."""
    if importlib.util.find_spec(PEERS[peer]) is None:
        return f"the package {PEERS[peer]} is not installed"
    kind = {32: "float32", 8: "int8"}.get(width)
    if peer == "CTranslate2" and not (folder_of(188) / str(kind)).is_dir():
        return "the models were written without CTranslate2: delete .cache/decode/peers"
    return ""


def compare(peer: str, width: int, threads: int, work: Work, size: int, _: Deadline) -> Measured | NotRun:
    """Our time over a peer's, by the clock, with the ratio of processor times in the note."""
    if reason := _missing(peer, width):
        return NotRun(reason)
    spent: dict[str, list[float]] = {"ours": [], peer: []}
    with ExitStack() as stack:

        def contestant(name: str) -> Callable[[], None]:
            own = stack.enter_context(contestants.started(name, folder_of(size), width, threads))
            return lambda: spent[name].append(own.ask(*work)["cpu"])

        ratio = paired(contestant("ours"), contestant(peer), rounds=ROUNDS)
    ours, theirs = (statistics.median(seconds) for seconds in spent.values())
    note = f"{1e3 * ratio.a_seconds:.1f} ms over {1e3 * ratio.b_seconds:.1f}; processor time {ours / theirs:.3g}"
    return ratio.measured(f"{note}; {ratio}")


def bandwidth(width: int, _: Deadline) -> Measured:
    """The share of the read bandwidth, measured with prefetch, that a token's weights are read with."""
    with contestants.started("ours", folder_of(188), width, 1) as ours:
        rates = []
        for _round in range(ROUNDS):
            seconds = ours.ask(*TOKEN)["seconds"] / TOKENS
            rates.append(_bytes(width) / seconds / _read_rate())
    low, high = sorted(rates)[2], sorted(rates)[-3]
    return Measured(
        statistics.median(rates), f"one thread, weights in huge pages, of {_read_rate() / 1e9:.1f} GB/s", (low, high)
    )


def _bytes(width: int) -> int:
    """Bytes of the weights that a token reads: all but the embedding, of which it takes a row."""
    layers, dim, hidden, _heads = SHAPES[188]
    weights = layers * (4 * dim * dim + 3 * dim * hidden) + VOCABULARY * dim
    return int(weights * {32: 4, 8: 8.5 / 8, 4: 4.5 / 8}[width])


@cache
def _read_rate() -> float:
    """Bytes a second that one core reads of huge pages: the largest of several ways of reading."""
    import torch

    from shoestring.models import skinny
    from shoestring.models.huge_pages import settle

    torch.set_num_threads(1)
    best = 0.0
    for rows in (1 << 17, 1 << 18):
        layer = torch.nn.Linear(1024, rows // 2, bias=False)
        settle(layer)
        x = torch.randn(1, 1024)
        with torch.inference_mode():
            for _ in range(12):
                began = time.perf_counter()
                skinny.linear(x, layer.weight)
                best = max(best, layer.weight.nbytes / (time.perf_counter() - began))
                began = time.perf_counter()
                layer.weight.sum()
                best = max(best, layer.weight.nbytes / (time.perf_counter() - began))
    return best


def rows() -> Iterator[Bar]:
    """Every bar."""

    def bar(
        name: str, what: str, limit: float, peer: str, width: int, threads: int, work: Work, size: int = 188
    ) -> Bar:
        measure = partial(compare, peer, width, threads, work, size)
        package = PEERS[peer]
        return Bar(f"decode.peer-{name}", what, "<=", limit, measure, baseline=peer, peers=(package,))

    names = {32: "fp32", 8: "8bit", 4: "4bit"}
    for width, name in names.items():
        for threads in (1, 2):
            for size in (188, 60):
                what = f"time of a token over llama.cpp's, {name}, {threads} threads, {size} M weights"
                identity = f"token-{name}-{threads}" + ("" if size == 188 else f"-{size}m")
                yield bar(identity, what, 1.0, "llama.cpp", width, threads, TOKEN, size)
        yield Bar(
            f"decode.peer-bandwidth-{name}",
            f"bytes of weights that a token reads in a second over the read bandwidth of a core, {name}",
            ">=",
            0.85,
            partial(bandwidth, width),
            baseline="reading as many bytes",
        )
        for length in (16, 19, 64, 512):
            what = f"time of a prompt of {length} tokens over llama.cpp's, {name}, 1 thread"
            yield bar(f"prompt-{name}-{length}", what, 1.0, "llama.cpp", width, 1, reading(length))
    for length in (19, 64, 512):
        what = f"time of a prompt of {length} tokens over CTranslate2's, 8bit, 1 thread"
        yield bar(f"prompt-ct2-{length}", what, 1.3, "CTranslate2", 8, 1, reading(length))
        what = f"time of a prompt of {length} tokens over transformers', fp32, 1 thread"
        yield bar(f"prompt-hf-{length}", what, 1.0, "transformers", 32, 1, reading(length))
    for threads in (1, 2):
        what = f"time of 8 texts at a time over CTranslate2's, 8bit, {threads} threads"
        yield bar(f"batch-ct2-{threads}", what, 1 / 1.2, "CTranslate2", 8, threads, BATCH)
    yield bar("token-ct2", "time of a token over CTranslate2's, 8bit, 1 thread", 1.0, "CTranslate2", 8, 1, TOKEN)
    yield bar("token-hf", "time of a token over transformers', fp32, 1 thread", 1.0, "transformers", 32, 1, TOKEN)


if __name__ == "__main__":
    from benchmarks.decode.__main__ import command

    chosen = sys.argv[1:]
    sys.exit(command(chosen if "--only" in chosen else ["--only", "decode.peer", *chosen]))
