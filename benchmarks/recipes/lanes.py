"""The recipe `lanes`: the Hough path on worn markings, and the network that learns from it beside its teacher.

Pictures and trainings have seeds of their own, which are drawn once, after everything else was fixed. Each training is
judged on pictures that nothing else was judged on.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Deadline, Measured, run_command, stored
from benchmarks.intervals import of_mean
from benchmarks.recipes.autocast import faster
from benchmarks.training import ended
from shoestring.models.loading import load_model
from shoestring_recipes.lanes.hough import Lanes, detect
from shoestring_recipes.lanes.matching import compare, matches
from shoestring_recipes.lanes.roads import KINDS, TAUGHT, UNTAUGHT, Scene, render
from shoestring_recipes.lanes.task import Marker, Roads, forward, lanes_of, loss

PROTOTYPE = {0.1: 0.995, 0.4: 0.98, 0.7: 0.72, 0.85: 0.64}
"""F1 of a prototype on clean pictures, by wear; the first was 1.00 to two places."""
WORN = (0.7, 0.85)
PICTURES = 100
"""Pictures of each wear on which the Hough path is judged."""
JUDGED = 40
"""Pictures of each kind and wear on which a training is judged."""
TRAININGS = 4

Cell = list[list[int]]
"""Matched, found and true lanes of each picture."""


def scenes(seed: int, pictures: int, wear: float | None, kind: str) -> list[Scene]:
    """Pictures of one kind with one wear, or with any from 0 to 0.95."""
    rngs = [np.random.default_rng([seed, KINDS.index(kind), number]) for number in range(pictures)]
    return [render(rng, rng.uniform(0, 0.95) if wear is None else wear, kind) for rng in rngs]


def f1(cells: np.ndarray) -> np.ndarray:
    """F1 of pictures (..., n, 3), of which the lanes are added up."""
    matched, found, true = np.moveaxis(cells.sum(-2), -1, 0)
    return 2 * matched / np.maximum(found + true, 1)


def counted(found: Iterable[Lanes], drawn: Sequence[Scene]) -> Cell:
    """The counts of each picture."""
    counts = [compare(lanes.columns, scene.lanes) for lanes, scene in zip(found, drawn, strict=True)]
    return [[one.matched, one.detected, one.true] for one in counts]


def judged_hough(seed: int) -> dict[str, Any]:
    """What the Hough path finds on clean pictures of each wear, and each true lane's quality (0 if lost) and wear."""
    clean = {}
    for number, wear in enumerate(PROTOTYPE):
        drawn = scenes(seed + number, PICTURES, wear, "clean")
        clean[str(wear)] = counted((detect(scene.image) for scene in drawn), drawn)
    return {"clean": clean, "quality": {kind: qualities(seed + 9, kind) for kind in KINDS}}


def qualities(seed: int, kind: str) -> list[list[list[float]]]:
    """For each picture of any wear, the quality and the wear of each true lane."""
    rows = []
    for scene in scenes(seed, PICTURES, None, kind):
        lanes = detect(scene.image)
        found, true = matches(lanes.columns, scene.lanes)
        quality = np.zeros(len(scene.wear))
        quality[true] = lanes.quality[found]
        rows.append(np.stack([quality, scene.wear], 1).tolist())
    return rows


def trained(seed: int) -> Path:
    """The run folder of a training of the recipe, which continues where it stopped."""
    folder = Path(".cache/recipes/lanes").absolute() / str(seed)
    if not ended(folder):
        named = ["--seed", str(seed), "--data.arguments.seed", str(seed), "--folder", str(folder), "--resume", "auto"]
        named += ["--evaluate_every", "0", "--data.arguments.held_out", "8"]  # it is judged here
        run_command([sys.executable, "-m", "shoestring", "train", "lanes", *named])
    return folder


def judged_network(training: int, seed: int) -> dict[str, Any]:
    """What the network of one training and the Hough path find on the same pictures."""
    model, _ = load_model(trained(training))
    counts = {}
    for kind, wear in [
        *(("clean", wear) for wear in PROTOTYPE),
        *((kind, wear) for kind in KINDS[1:] for wear in WORN),
    ]:
        drawn = scenes(seed, JUDGED, wear, kind)
        images = torch.from_numpy(np.stack([scene.image for scene in drawn]))[:, None]
        with torch.no_grad():
            found = [lanes for part in images.split(20) for lanes in lanes_of(part, model.eval()(part))]
        hough = counted((detect(scene.image) for scene in drawn), drawn)
        counts[f"{kind} {wear}"] = {"network": counted(found, drawn), "hough": hough}
    return {"training": training, "seed": seed, "counts": counts}


class Study:
    """All that is judged, each made once and stored in a folder."""

    def __init__(self, runs: Path, deadline: Deadline) -> None:
        self.runs, self.check = runs, deadline.check

    def seeds(self, purpose: str, number: int) -> list[int]:
        draw = lambda: {"seeds": [secrets.randbelow(2**31) for _ in range(number)]}  # noqa: E731
        return stored(self.runs / f"seeds-{purpose}.json", self.check, draw)["seeds"]

    def hough(self) -> dict[str, Any]:
        (seed,) = self.seeds("hough", 1)
        return stored(self.runs / "hough.json", self.check, lambda: judged_hough(seed))

    def networks(self) -> list[dict[str, Any]]:
        def network(number: int, training: int, seed: int) -> dict[str, Any]:
            make = partial(judged_network, training, seed)
            return stored(self.runs / f"network-{number}.json", self.check, make)["counts"]

        trainings, pictures = self.seeds("trainings", TRAININGS), self.seeds("pictures", TRAININGS)
        with ThreadPoolExecutor(2) as pool:  # trainings are processes of their own
            return list(pool.map(network, range(TRAININGS), trainings, pictures))


def resampled(rows: Sequence[Any], statistic: Callable[[list[Any]], float], note: str = "") -> Measured:
    """A statistic of pictures, with the percentile interval of 2,000 bootstrap samples of them."""
    rng = np.random.default_rng(0)
    value = statistic(list(rows))
    draws = [statistic([rows[index] for index in rng.integers(len(rows), size=len(rows))]) for _ in range(2000)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Measured(value, note, (min(float(low), value), max(float(high), value)))


def rank_correlation(pictures: list[list[list[float]]]) -> float:
    """Spearman's correlation of the quality of true lanes and how little they are worn."""
    from scipy import stats

    quality, wear = np.concatenate([np.asarray(rows) for rows in pictures]).T
    return -float(stats.spearmanr(quality, wear).statistic)


def correlated(study: Study, kinds: Sequence[str]) -> Measured:
    """The rank correlation over the pictures of some kinds."""
    quality = study.hough()["quality"]
    by_kind = ", ".join(f"{kind} {rank_correlation(quality[kind]):.2f}" for kind in kinds)
    return resampled([row for kind in kinds for row in quality[kind]], rank_correlation, by_kind)


def precise(study: Study) -> Measured:
    """The least precision of the four wears."""

    def precision(cells: list[list[int]]) -> float:
        matched, found, _ = np.sum(cells, 0)
        return float(matched / max(found, 1))

    return min((resampled(cells, precision) for cells in study.hough()["clean"].values()), key=lambda one: one.value)


def gained(study: Study, kinds: Sequence[str], wears: Iterable[float]) -> Measured:
    """How much higher the network's F1 is than its teacher's: a mean over kinds and wears, by training."""
    names = [f"{kind} {wear}" for kind in kinds for wear in wears]
    both = np.array([
        [[float(f1(np.array(counts[name][which]))) for name in names] for which in ("network", "hough")]
        for counts in study.networks()
    ])  # fmt: skip
    mean = both.mean(0)
    note = "; ".join(f"{name}: {new:.2f}, Hough {old:.2f}" for name, new, old in zip(names, *mean, strict=True))
    return of_mean((both[:, 0] - both[:, 1]).mean(1).tolist(), note)


def faster_in_bf16(deadline: Deadline) -> Measured:
    """What autocast is worth on 16 pictures."""
    torch.manual_seed(0)
    model, roads = Marker(), Roads(16, 0, TAUGHT, True)
    samples = [roads[number] for number in range(16)]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    return faster(model, batch, forward, loss, deadline)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = Study(runs, deadline)
    bar = partial(Bar, kind="drawn", peers=("scikit-image",))
    of = cache(lambda: study.hough()["clean"])
    works = [
        bar(
            f"recipes.lanes-f1-{round(100 * wear)}",
            f"lanes: F1 of the Hough path on clean pictures of wear {wear}",
            ">=",
            least,
            lambda _, wear=wear: resampled(of()[str(wear)], lambda cells: float(f1(np.array(cells)))),
            baseline="a prototype with the same stages",
        )
        for wear, least in PROTOTYPE.items()
    ]
    return [
        *works,
        bar(
            "recipes.lanes-precision",
            "lanes: least precision of the Hough path on clean pictures of the four wears",
            ">=",
            0.9,
            lambda _: precise(study),
        ),
        bar(
            "recipes.lanes-quality-clean",
            "lanes: rank correlation of a lane's quality and how little it is worn, lost lanes at 0, clean pictures",
            ">=",
            0.8,
            lambda _: correlated(study, KINDS[:1]),
        ),
        bar(
            "recipes.lanes-quality-hard",
            "lanes: the same correlation over the pictures of all other kinds together",
            ">=",
            0.7,
            lambda _: correlated(study, KINDS[1:]),
        ),
        bar(
            "recipes.lanes-network-worn",
            "lanes: F1 of the network minus F1 of the Hough path at wear 0.7 and 0.85 on kinds that were not taught",
            ">=",
            0.1,
            lambda _: gained(study, UNTAUGHT, WORN),
            baseline="the Hough path, which taught it",
        ),
        bar(
            "recipes.lanes-network-clean",
            "lanes: F1 of the network minus F1 of the Hough path on clean pictures of the four wears",
            ">=",
            -0.01,
            lambda _: gained(study, KINDS[:1], PROTOTYPE),
            baseline="the Hough path, which taught it",
        ),
        bar(
            "recipes.lanes-autocast",
            "lanes: processor time of a step in float32 over that with [precision.autocast], on a CPU with bf16 units",
            ">=",
            1.2,
            faster_in_bf16,
            kind="timed",
        ),
    ]
