"""Adapters: eight in one batch against one, and their texts against those of the merged models.

Speeds are of the engine with a model of 188 M random weights, greedily, in runs in alternation. Texts are those of
`shoestring serve` in double precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks.completions import complete
from benchmarks.decode.server import save_small, served
from benchmarks.decode.weights import PROMPT, ROUNDS, model
from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured
from benchmarks.timing import Clock, Paired, paired
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.adapted import AdaptedRows
from shoestring.decode.adapter import adapt
from shoestring.decode.engine import Engine, Request, generate
from shoestring.decode.settings.generation import Sampling
from shoestring.models import adapter_folder
from shoestring.models.adapters import LowRank, shape_of
from shoestring.models.adapters_by_row import AdaptableLayer, LoadedAdapter, adaptable_layers, place
from shoestring.models.loading import load_model
from shoestring.models.rounding import Bits

COUNT, RANK, TOKENS = 8, 16, 16
RANKS = (2, 3, 4, 6, 8, 11, 16, 16)
EACH, LENGTH = 8, 32  # texts of each adapter, and tokens of each


def drawn(layers: dict[str, AdaptableLayer], rank: int, seed: int, strength: float = 1.0) -> dict[str, LowRank]:
    """A random adapter of these layers."""
    generator, adapters = torch.Generator().manual_seed(seed), {}
    for name, site in layers.items():
        rows, columns = shape_of(site.layer)
        a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
        adapters[name] = LowRank(a * columns**-0.5, b * 0.1, strength / rank**0.5)
    return adapters


# -- rate --------------------------------------------------------------------------------------------------------------


def writer(rows: AdaptedRows, adapters: Sequence[LoadedAdapter | None], tokens: int) -> Callable[[], None]:
    """Writes a text for each of these adapters in one batch, behind prompts that are in the cache after the first
    time."""
    engine = Engine(rows, slots=len(adapters))

    def work() -> None:
        for seed, adapter in enumerate(adapters):
            prompt = [(index + seed) % 256 for index in range(PROMPT)]
            engine.submit(Request(tokens=prompt, max_new=tokens, sampling=Sampling(temperature=0.0), adapter=adapter))
        while engine.busy:
            engine.step()

    return work


def compared(
    built: nn.Module, *, tokens: int = TOKENS, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> tuple[Paired, Paired]:
    """Time with one adapter over that with eight, and without any over that with eight."""
    rows = AdaptedRows(adapt(built))
    loaded = [place(drawn(rows.layers, RANK, seed), rows.layers, "it") for seed in range(COUNT)]
    batches = ([None] * COUNT, loaded[:1] * COUNT, loaded)
    none, one, eight = (writer(rows, adapters, tokens) for adapters in batches)
    return paired(one, eight, rounds=rounds, clock=clock), paired(none, eight, rounds=rounds, clock=clock)


def rate(bits: Bits | None, _: Deadline) -> Measured:
    ratio, base = compared(model(bits))
    tokens = COUNT * TOKENS / ratio.b_seconds
    return ratio.measured(f"{tokens:.1f} tokens/s, {base.median:.3f} of the rate without adapters; {ratio}")


# -- texts -------------------------------------------------------------------------------------------------------------


def save(home: Path) -> tuple[Path, list[Path]]:
    """A base of 2 M weights in double precision, and eight adapters with unlike ranks and layers."""
    base = save_small(home)
    built = load_model(base)[0]
    with torch.inference_mode():
        layers = adaptable_layers(built, built)
    folders = []
    for seed, rank in enumerate(RANKS):
        some = {name: site for index, (name, site) in enumerate(layers.items()) if index % 3 != seed % 3}
        folders.append(home / f"adapter-{seed}")
        adapter_folder.write(folders[-1], built, drawn(some, rank, seed, 5.0), base=str(base), fingerprint="")
    return base, folders


def wrong(each: int = EACH, length: int = LENGTH) -> tuple[int, int, int]:
    """Texts of a server with eight adapters that are not those of the merged models; all texts; those that an adapter
    changed."""
    with TemporaryDirectory() as folder:
        base, folders = save(Path(folder))
        names = {"small": base} | {path.name: path for path in folders}
        flags = [flag for path in folders for flag in ("--adapter", f"{path.name}={path}")]
        orders = [(name, seed) for seed in range(each) for name in names]
        with served(base, *flags) as process, ThreadPoolExecutor(2 * COUNT) as clients:
            written = list(clients.map(lambda order: _asked(process.address, order[0], order[1], length), orders))
        models = {name: load_model(path) for name, path in names.items()}
    expected = [_generated(*models[name], seed, length) for name, seed in orders]
    plain = [_generated(*models["small"], seed, length) for _, seed in orders]
    differ = sum(text != other for text, other in zip(written, expected, strict=True))
    return differ, len(orders), sum(text != other for text, other in zip(written, plain, strict=True))


def _prompt(seed: int) -> str:
    return f"def function_{seed}(" * (1 + seed % 3)


def _asked(address: tuple[str, int], name: str, seed: int, length: int) -> str:
    body = {"model": name, "prompt": _prompt(seed), "max_tokens": length, "seed": seed}
    return complete(address, body)["choices"][0]["text"]


def _generated(built: nn.Module, tokenizer: Tokenizer | None, seed: int, length: int) -> str:
    assert tokenizer is not None
    start = tokenizer.encode(_prompt(seed))
    text = tokenizer.stream(start)
    stop = [tokenizer.end_of_text]
    tokens = generate(built, start, max_new=length, sampling=Sampling(seed=seed), stop=stop)
    return "".join(map(text.add, tokens)) + text.rest()


def texts(_: Deadline) -> Measured:
    differ, count, changed = wrong()
    return Measured(differ, f"of {count} texts, {changed} of which differ from the model's without an adapter")


def rows() -> Iterator[Bar]:
    """Every bar of adapters."""
    for bits, name in ((None, ""), (8, "-8bit"), (4, "-4bit")):
        weights = "fp32" if bits is None else f"{bits} bits"
        yield Bar(
            f"serving.adapters-rate{name}",
            f"tokens a second of {COUNT} texts in a batch with {COUNT} adapters of rank {RANK} on all linear layers, "
            f"over those with one adapter; 188 M weights, {weights}",
            ">=",
            0.85,
            measure=partial(rate, bits),
            baseline="the same batch with one adapter",
        )
    yield Bar(
        "serving.adapters-text",
        f"texts of a server with {COUNT} adapters of unlike ranks and layers that differ from those of the merged "
        "models, with the same seeds, in fp64",
        "<=",
        0.0,
        measure=texts,
        baseline="`generate` with the adapter merged",
        kind="exact",
    )
