"""The recipe `retrieval`: the fused ranking beside the best BM25, the embedded engine at size, and communities.

Each seed divides the pairs of dictionary entries anew. Settings of BM25 and of the fused ranking are chosen on pairs
that are neither taught nor judged; the best of three kinds of BM25 is the one that finds most of the judged queries.
Settings of the training were chosen on seeds below 100, which no row uses.

python -m benchmarks.recipes.retrieval [FOLDER]

prints the README's table from the cells that are stored.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Deadline, Measured, run_command, stored
from benchmarks.intervals import of_mean, of_median, of_ratio, of_share
from benchmarks.recipes.cells import Call, made
from benchmarks.rows import RESULTS
from benchmarks.training import ended
from shoestring.models.loading import load_model
from shoestring_recipes.retrieval import communities, dictionaries
from shoestring_recipes.retrieval.dictionaries import Pair
from shoestring_recipes.retrieval.engines import Tantivy, search
from shoestring_recipes.retrieval.fusion import TOP, MethodComparison, Texts, compared
from shoestring_recipes.retrieval.mining import vectors
from shoestring_recipes.retrieval.model import Encoder
from shoestring_recipes.retrieval.task import data

CACHE = Path(".cache/recipes/retrieval")
SEEDS = 3
ROUNDS, QUERIES = 10, 50
"""Rounds in which the engine is timed, and queries of each."""
DOCUMENTS = 100_000
KILLS = 20
OLD, NEW = 60, 90
"""Documents of the two indexes that replace each other while their builder is killed."""
METHODS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "last weights": ("--optim.ema.decay", "0"),
    "BM25's negatives left out": ("--data.arguments.negatives", "0"),
}
"""Flags of the trainings that are compared with the recipe as shipped."""
MINED = "negatives mined twice"


# -- trainings ---------------------------------------------------------------------------------------------------------


def trained(seed: int, method: str = "") -> Path:
    """The run folder of a training, which continues where it stopped."""
    folder = CACHE.absolute() / f"{seed}{'-' if method else ''}{method.replace(' ', '-')}"
    if not ended(folder):
        flags = METHODS.get(method, ())
        if method == MINED:
            flags = ("--data.arguments.miner", str(trained(seed)))
        named = ["--seed", str(seed), "--data.arguments.seed", str(seed), "--folder", str(folder), "--resume", "auto"]
        named += ["--evaluate_every", "0", "--evaluate", ""]  # it is judged here
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # others train beside it
        run_command([sys.executable, "-m", "shoestring", "train", "retrieval", *named, *flags], env=alone)
    return folder


def judged(seed: int, method: str = "") -> dict[str, Any]:
    """The rank of each query's document by each kind of ranking, and what was chosen on the validation pairs."""
    torch.set_num_threads(1)
    model, _ = load_model(trained(seed, method))
    held_out = data(negatives=0, seed=seed)[1]
    asked, tuned = held_out.pairs[: held_out.queries], held_out.validation
    result = compared(sides(model, asked, held_out.pairs), sides(model, tuned, tuned))
    places = {name: ranks.tolist() for name, ranks in result.ranks.items()}
    return {"seed": seed, "method": method, "settings": str(result.settings), "share": result.share, "ranks": places}


def sides(model: Any, asked: Sequence[Pair], searched: Sequence[Pair]) -> Texts:
    """The queries of some pairs and the documents of others, with the vectors of both."""
    queries, documents = [pair.query for pair in asked], [pair.document for pair in searched]
    return queries, documents, vectors(model, queries), vectors(model, documents)


class Study:
    """All that is judged, each made once and stored in a folder."""

    def __init__(self, runs: Path, deadline: Deadline) -> None:
        self.runs, self.deadline = runs, deadline

    def seeds(self) -> list[int]:
        """Seeds that were drawn after all settings were fixed."""
        draw = lambda: {"seeds": [100 + secrets.randbelow(2**30) for _ in range(SEEDS)]}  # noqa: E731
        return stored(self.runs / "seeds.json", self.deadline.check, draw)["seeds"]

    def cells(self, method: str = "") -> list[MethodComparison]:
        """The judged ranks of each seed."""
        if method == MINED:
            self.cells()  # their models look for the negatives
        name = method.replace(" ", "-") or "shipped"
        calls: dict[str, Call] = {f"{name}-{seed}": (judged, seed, method) for seed in self.seeds()}
        return [comparison(row) for row in made(self.runs, self.deadline, calls).values()]

    def belonging(self) -> list[dict[str, Any]]:
        """How well communities are told, for each seed."""
        calls: dict[str, Call] = {f"communities-{seed}": (told, seed) for seed in self.seeds()}
        return list(made(self.runs, self.deadline, calls).values())


def comparison(row: Mapping[str, Any]) -> MethodComparison:
    """The ranks of a stored cell; the settings are not needed any more."""
    from shoestring_recipes.retrieval.lexical import Bm25

    return MethodComparison({name: np.array(ranks) for name, ranks in row["ranks"].items()}, Bm25(), row["share"])


# -- rankings ----------------------------------------------------------------------------------------------------------


def hits(cells: Sequence[MethodComparison], method: str, top: int) -> np.ndarray:
    """Whether each query's document is among the first `top`, (seeds, queries).

    Args:
        method: the ranking; `best` is the best BM25 of each seed.
    """
    names = [cell.best_lexical(top) if method == "best" else method for cell in cells]
    return np.array([cell.ranks[name] <= top for cell, name in zip(cells, names, strict=True)], float)


def over_both(differences: np.ndarray, note: str) -> Measured:
    """The mean of differences (seeds, queries), with an interval that covers that over the seeds, by Student, and that
    over the queries, by a bootstrap within each seed."""
    mean = float(differences.mean())
    draws = np.random.default_rng(0)
    count = differences.shape[1]
    chosen = draws.integers(count, size=(2000, *differences.shape))
    means = np.take_along_axis(differences[None], chosen, 2).mean((1, 2))
    low, high = np.quantile(means, [0.025, 0.975])
    seeds = of_mean(differences.mean(1).tolist()).interval
    assert seeds is not None
    return Measured(mean, note, (min(float(low), seeds[0], mean), max(float(high), seeds[1], mean)))


def note_of(cells: Sequence[MethodComparison], top: int) -> str:
    """The recall of all methods, over the seeds."""
    means = ((name, hits(cells, name, top).mean()) for name in cells[0].ranks)
    return f"recall at {top}: " + ", ".join(f"{name} {mean:.3f}" for name, mean in means)


def above_best(study: Study, top: int) -> Measured:
    """How much higher the fused ranking's recall is than that of the best BM25."""
    cells = study.cells()
    return over_both(hits(cells, "fused", top) - hits(cells, "best", top), note_of(cells, top))


def over_best(study: Study, top: int) -> Measured:
    """The fused ranking's recall over that of the best BM25."""
    cells = study.cells()
    fused, best = (hits(cells, name, top).mean(1).tolist() for name in ("fused", "best"))
    return of_ratio(fused, best, note_of(cells, top))


def gained(study: Study, method: str, other: str) -> Measured:
    """How much higher the fused recall at 1 is with one training than with another."""
    first, second = (hits(study.cells(name), "fused", 1) for name in (method, other))
    return over_both(
        first - second, f"{method or 'shipped'} {first.mean():.3f}, {other or 'shipped'} {second.mean():.3f}"
    )


# -- the engine --------------------------------------------------------------------------------------------------------


@cache
def many_texts() -> list[str]:
    """Entries of both dictionaries."""
    entries = [
        text for name in dictionaries.PACKAGES for texts in dictionaries.entries(name).values() for text in texts
    ]
    chosen = np.random.default_rng(0).permutation(len(entries))[: DOCUMENTS + ROUNDS * QUERIES]
    return [entries[number][: dictionaries.LONGEST] for number in chosen]


def queries_a_second(deadline: Deadline) -> Measured:
    """Fused searches a second among many documents, with the queries encoded, in batches."""
    torch.manual_seed(0)
    model, texts = Encoder().eval(), many_texts()
    documents, asked = texts[:DOCUMENTS], texts[DOCUMENTS:]
    with tempfile.TemporaryDirectory() as folder:
        engine = Tantivy(Path(folder) / "index")
        began = time.monotonic()
        engine.build(documents, vectors(model, documents))
        seconds = time.monotonic() - began
        rates = []
        for part in range(-1, ROUNDS):  # the first round warms up
            deadline.check()
            queries = asked[max(part, 0) * QUERIES : (max(part, 0) + 1) * QUERIES]
            began = time.monotonic()
            search(engine, queries, vectors(model, queries), 0.5)
            if part >= 0:
                rates.append(len(queries) / (time.monotonic() - began))
    return of_median(rates, f"{len(documents):,} documents, indexed in {seconds:.0f} s")


BUILDER = f"""
import sys
from pathlib import Path
import numpy as np
from shoestring_recipes.retrieval.dictionaries import Pair
from shoestring_recipes.retrieval.engines import Tantivy
engine = Tantivy(Path(sys.argv[1]))
while True:
    for count in ({NEW}, {OLD}):
        engine.build((f"text {{number}}" for number in range(count)), np.ones((count, 4), np.float32))
        print("built", flush=True)
"""


def interrupted(kills: int, deadline: Deadline) -> Measured:
    """Indexes that were neither the old nor the new one after their builder was killed."""
    broken, seen = 0, set[int]()
    draws = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "index"
        for _ in range(kills):
            deadline.check()
            with subprocess.Popen([sys.executable, "-c", BUILDER, str(folder)], stdout=subprocess.PIPE) as builder:
                assert builder.stdout is not None
                builder.stdout.readline()
                time.sleep(draws.uniform(0, 0.1))
                builder.kill()
            engine = Tantivy(folder)
            documents, nearest = len(engine), len(engine.by_vectors(np.ones((1, 4), np.float32), NEW)[0].numbers)
            broken += documents not in (OLD, NEW) or nearest != documents
            seen.add(documents)
    return Measured(broken, f"{kills} kills left indexes of {' and '.join(map(str, sorted(seen)))} documents")


# -- communities -------------------------------------------------------------------------------------------------------


def told(seed: int) -> dict[str, Any]:
    """How well the sections of the kernel's documentation are told."""
    collection = communities.read(communities.linux_documentation())
    _, result, threshold = communities.studied(collection, seed)
    right, sure, posts = result.counts(threshold)
    return {
        "communities": collection.communities, "error": result.calibration_error(), "base_rate": result.base_rate,
        "threshold": threshold, "right": right, "sure": sure, "posts": posts,
    }  # fmt: skip


def miscalibrated(study: Study) -> Measured:
    """The calibration error, over the seeds."""
    cells = study.belonging()
    rate = np.mean([cell["base_rate"] for cell in cells])
    names = cells[0]["communities"]
    note = f"base rate {rate:.3f} among BM25's first ten; {len(names)} communities: {', '.join(names)}"
    return of_mean([cell["error"] for cell in cells], note)


def precise(study: Study) -> Measured:
    """The precision of sure predictions, and how many posts they find."""
    right, sure, posts = (sum(cell[name] for cell in study.belonging()) for name in ("right", "sure", "posts"))
    recall = of_share(right, posts)
    assert recall.interval is not None
    low, high = recall.interval
    return of_share(right, sure, f"recall {recall.value:.3f} ({low:.3f} to {high:.3f}), {posts} posts")


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = Study(runs, deadline)
    bar = partial(Bar, kind="drawn", peers=("tantivy", "scipy", "scikit-learn"))
    best = "the best of BM25 plain, stemmed and tuned"
    bars = []
    for top in TOP:
        what = f"retrieval: share of queries found at {top}, fused"
        above, over = partial(above_best, study, top), partial(over_best, study, top)
        bars += [
            bar(
                f"recipes.retrieval-fused-{top}",
                f"{what}, above the best BM25",
                ">",
                0.0,
                lambda _, do=above: do(),
                baseline=best,
            ),
            bar(
                f"recipes.retrieval-better-{top}",
                f"{what}, over the best BM25's",
                ">=",
                1.1,
                lambda _, do=over: do(),
                baseline=best,
            ),
        ]
    for name, what, method, other in (
        ("mined", "with negatives mined twice above mined once", MINED, ""),
        ("negatives", "with BM25's negatives above none", "", "BM25's negatives left out"),
        ("ema", "with averaged weights above the last ones", "", "last weights"),
    ):
        measure = partial(gained, study, method, other)
        what = f"retrieval: share of queries found at 1, fused, {what}"
        bars.append(bar(f"recipes.retrieval-{name}", what, ">", 0.0, lambda _, do=measure: do(), baseline=other))
    return [
        *bars,
        bar(
            "recipes.retrieval-speed",
            f"retrieval: fused searches a second among {DOCUMENTS:,} documents, on this machine's processors",
            ">=",
            50.0,
            queries_a_second,
            kind="timed",
        ),
        bar(
            "recipes.retrieval-index",
            f"retrieval: indexes of {KILLS} killed builders that are neither old nor new",
            "<=",
            0.0,
            partial(interrupted, KILLS),
            kind="exact",
        ),
        bar(
            "recipes.retrieval-calibration",
            "retrieval: calibration error of the probability that a post belongs to a community of BM25's first ten",
            "<=",
            0.03,
            lambda _: miscalibrated(study),
        ),
        bar(
            "recipes.retrieval-precision",
            "retrieval: precision of sure communities, for the threshold chosen on other pages",
            ">=",
            communities.PRECISE,
            lambda _: precise(study),
        ),
    ]


def table(runs: Path) -> str:
    """The means of each method over the stored cells, as rows of Markdown."""
    cells: dict[str, list[MethodComparison]] = {}
    for path in sorted(runs.glob("*.json")):
        row = json.loads(path.read_text())
        if "ranks" in row:
            cells.setdefault(row["method"] or "shipped", []).append(comparison(row))
    lines = ["| training | method | seeds | recall at 1 | at 10 | mean reciprocal rank |", "|---|---|---|---|---|---|"]
    for training, parts in cells.items():
        for method in parts[0].ranks:
            shares = [f"{hits(parts, method, top).mean():.3f}" for top in TOP]
            mean = np.mean([(1 / part.ranks[method]).mean() for part in parts])
            lines.append(f"| {training} | {method} | {len(parts)} | {' | '.join(shares)} | {mean:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "retrieval"))
