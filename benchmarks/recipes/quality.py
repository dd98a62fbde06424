"""The recipe `quality`: pairs of distorted pictures in the right order, beside classical features with an SVR.

A *cell* is a repetition's seed and a fold: its photos are held out, and so are two kinds of distortion. In each cell
the recipe trains two backbones. Frozen, their features come from a run of as many steps that names kinds of
distortion. All figures are of held-out photos; intervals are bootstrapped over photos.

python -m benchmarks.recipes.quality [FOLDER]

prints the README's table from the cells that are stored.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoestring_recipes.quality as recipe
from benchmarks.harness import Bar, Deadline, Measured
from benchmarks.recipes.cells import made, seeds_of
from benchmarks.rows import RESULTS
from benchmarks.training import train_to_end
from shoestring.models.loading import load_model
from shoestring_recipes.quality.distortions import KINDS
from shoestring_recipes.quality.measures import ordered_pairs, report
from shoestring_recipes.quality.model import ADDED, BACKBONES
from shoestring_recipes.quality.scene_statistics import brisque, features
from shoestring_recipes.quality.task import FOLDS, Ladders, data, forward

REPETITIONS = 2
SVR = {"C": 10.0, "gamma": 0.02, "epsilon": 0.02}
"""The best of eight settings on the folds 0 of the seeds 0 and 100, which no row uses."""
SVR_PICTURES = 6000
"""Pictures that the support vector regression learns from, drawn at random, mirrored ones among them."""
RESAMPLES = 10_000
DEFAULT = "residual trained module"
"""The method that `shoestring train quality` is."""
LAST_WEIGHTS = f"{DEFAULT}, last weights"


@lru_cache(1)
def ladders(fold: int, seed: int) -> tuple[Ladders, Ladders]:
    """The data of a cell, made once."""
    return data(fold, seed)


def settings() -> dict[str, Any]:
    """The recipe's run file, as shipped."""
    return tomllib.loads(Path(recipe.__path__[0], "run.toml").read_text())


# -- what a cell gives -------------------------------------------------------------------------------------------------


def summary(scores: np.ndarray, samples: Ladders) -> dict[str, Any]:
    """The measures of a method's scores (N, 6), and the share of ordered pairs of each photo."""
    kinds, sources, seen = samples.kinds.numpy(), samples.sources.numpy(), samples.seen.numpy()
    right = ordered_pairs(scores)
    numbers = {
        name: round(float(value), 5)
        for name, value in report(scores, kinds, seen, samples.quality.numpy(), tuple(KINDS)).items()
        if name != "kinds"
    }
    photos = {
        name: {int(photo): round(float(right[chosen & (sources == photo)].mean()), 5) for photo in np.unique(sources)}
        for name, chosen in (("seen", seen), ("unseen", ~seen))
    }
    by_kind = {name: round(float(right[kinds == number].mean()), 5) for number, name in enumerate(KINDS)}
    return {"measures": numbers, "photos": photos, "kinds": by_kind}


def classical(seed: int, fold: int) -> dict[str, Any]:
    """Scores by features of natural scenes: a regression to GMSD as the networks have it, and BRISQUE's own."""
    from sklearn import svm
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    taught, held_out = ladders(fold, seed)
    pictures, quality = taught.pictures.flatten(0, 1), taught.quality.flatten()
    draws = np.random.default_rng(seed)
    chosen = draws.permutation(len(pictures))[:SVR_PICTURES]
    mirrored = torch.from_numpy(draws.random(len(chosen)) < 0.5)[:, None, None]
    statistics = features(torch.where(mirrored, pictures[chosen].flip(-1), pictures[chosen]).numpy())
    regression = make_pipeline(StandardScaler(), svm.SVR(**SVR)).fit(statistics, quality[chosen].numpy())
    statistics = features(held_out.pictures.flatten(0, 1).numpy())
    scores = {"svr": np.asarray(regression.predict(statistics)), "brisque": brisque(statistics)}
    return {name: summary(values.reshape(len(held_out), -1), held_out) for name, values in scores.items()}


def networks(backbone: str, seed: int, fold: int) -> dict[str, Any]:
    """One backbone, frozen and trained, with nothing added, with plain parameters, and with the module."""
    held_out = ladders(fold, seed)[1]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        kinds = Path(folder) / "kinds"
        _train(kinds, seed, fold, {"backbone": backbone, "added": "nothing", "kinds": len(KINDS)}, "kind")
        for how in ("frozen", "trained"):
            start = {"start": str(kinds), "frozen": True} if how == "frozen" else {}
            for added in ADDED:
                run = Path(folder) / f"{how}-{added}"
                _train(run, seed, fold, {"backbone": backbone, "added": added, **start}, "ordered")
                results[f"{backbone} {how} {added}"] = summary(_scores(run, held_out), held_out)
        if DEFAULT.startswith(backbone):
            run = Path(folder) / "last"
            _train(run, seed, fold, {"backbone": backbone, "added": "module"}, "ordered", average=False)
            results[LAST_WEIGHTS] = summary(_scores(run, held_out), held_out)
    return results


def _train(folder: Path, seed: int, fold: int, model: Mapping[str, Any], loss: str, *, average: bool = True) -> None:
    """Train the recipe with another model, loss or fold, without evaluations on the way."""
    document = settings()
    document["run"] |= {
        "folder": str(folder), "seed": seed, "data": f"{__name__}:ladders", "loss": f"{recipe.__name__}.task:{loss}",
        "evaluate": "", "evaluate_every": 0, "best_metric": "held_out_loss", "best_mode": "min",
    }  # fmt: skip
    document |= {"model": model, "data": {"arguments": {"fold": fold, "seed": seed}}}
    if not average:
        del document["optim"]["ema"]
    train_to_end(document)


@torch.no_grad()
def _scores(run: Path, samples: Ladders) -> np.ndarray:
    model, _ = load_model(run)
    parts = (forward(model.eval(), {"inputs": pictures}) for pictures in samples.pictures.split(32))
    return torch.cat(list(parts)).double().numpy()


WORK = {"classical": classical, **{name: partial(networks, name) for name in BACKBONES}}


def work(name: str, seed: int, fold: int) -> dict[str, Any]:
    """What one part of a cell gives, in a process of its own."""
    torch.set_num_threads(1)
    return WORK[name](seed, fold)


# -- all cells ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contest:
    """All cells, each part made once and stored, as many at a time as there are processors.

    Args:
        runs: folder of what they gave.
    """

    runs: Path
    deadline: Deadline

    def seeds(self) -> list[int]:
        """Seeds that were drawn after all settings were fixed: other settings draw others."""
        fixed = [settings(), SVR, SVR_PICTURES, REPETITIONS]
        return seeds_of(self.runs, self.deadline, fixed, REPETITIONS)

    def cells(self) -> list[dict[str, Any]]:
        """Of each cell, what each method gave."""
        parts = [(name, seed, fold) for seed in self.seeds() for fold in range(FOLDS) for name in WORK]
        names = {part: f"{part[1]}-{part[2]}-{part[0]}" for part in parts}
        results = made(self.runs, self.deadline, {names[part]: (work, *part) for part in parts})
        cells: dict[tuple[int, int], dict[str, Any]] = {}
        for part in parts:
            cells.setdefault(part[1:], {}).update(results[names[part]])
        return list(cells.values())

    def by_photo(self, method: str, side: str) -> dict[str, float]:
        """The mean over repetitions of each photo's share of ordered pairs, of taught kinds, of others, or of both."""
        sides = ("seen", "unseen") if side == "all" else (side,)
        found: dict[str, list[float]] = {}
        for cell in self.cells():
            for name in sides:
                for photo, share in cell[method]["photos"][name].items():
                    found.setdefault(str(photo), []).append(share)
        return {photo: float(np.mean(shares)) for photo, shares in found.items()}

    def above(self, method: str, other: str, side: str) -> Measured:
        """How much larger a method's share of ordered pairs is than another's, the mean over photos."""
        first, second = (self.by_photo(name, side) for name in (method, other))
        return over_photos([first[photo] - second[photo] for photo in first], self.described(method, other))

    def described(self, *methods: str) -> str:
        """The mean measures of some methods over all cells."""
        lines = []
        for method in methods:
            measures = [cell[method]["measures"] for cell in self.cells()]
            means = {name: np.mean([one[name] for one in measures]) for name in measures[0]}
            lines.append(f"{method}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
        return "; ".join(lines)


def over_photos(differences: Sequence[float], note: str = "") -> Measured:
    """The mean of a difference over photos, with the bootstrap's interval of 95%."""
    from scipy.stats import bootstrap

    mean = float(np.mean(differences))
    if np.ptp(differences) == 0:  # which has no interval by the bootstrap
        return Measured(mean, note, (mean, mean))
    drawn = bootstrap((differences,), np.mean, n_resamples=RESAMPLES, rng=np.random.default_rng(0)).confidence_interval
    return Measured(mean, note, (float(drawn.low), float(drawn.high)))


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    contest = Contest(runs, deadline)

    def bar(name: str, what: str, method: str, other: str, side: str = "all", peers: tuple[str, ...] = ()) -> Bar:
        """That `method` has a larger share of ordered pairs than `other`."""
        measure, what = (lambda _: contest.above(method, other, side)), f"quality: share of ordered pairs, {what}"
        return Bar(f"recipes.quality-{name}", what, ">", 0.0, measure, baseline=other, peers=peers, kind="drawn")

    bars = []
    for side, where in (("seen", "kinds that were taught"), ("unseen", "kinds that were not taught")):
        bars.append(bar(side, f"above NSS + SVR's on {where}", DEFAULT, "svr", side, ("scikit-learn",)))
        bars.append(bar(f"brisque-{side}", f"above BRISQUE's public model on {where}", DEFAULT, "brisque", side))
    for backbone in BACKBONES:
        for how in ("frozen", "trained"):
            method, what = f"{backbone} {how}", f"with the module above plain parameters, {backbone} backbone {how}"
            bars.append(bar(f"module-{backbone}-{how}", what, f"{method} module", f"{method} plain"))
    bars.append(bar("ema", "with averaged weights above the last ones", DEFAULT, LAST_WEIGHTS))
    return bars


def table(runs: Path) -> str:
    """The means of each method over the cells that are stored, as rows of Markdown."""
    measures: dict[str, list[dict[str, float]]] = {}
    for path in sorted(runs.glob("*-*-*.json")):
        for method, result in json.loads(path.read_text()).items():
            if isinstance(result, dict):
                measures.setdefault(method, []).append(result["measures"])
    names = [f"{measure}_{side}" for side in ("seen", "unseen") for measure in ("pairs", "srcc", "plcc", "krcc")]
    lines = ["| method | cells | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for method, cells in sorted(measures.items()):
        means = (f"{np.mean([cell[name] for cell in cells]):.2f}" for name in names)
        lines.append(f"| {method} | {len(cells)} | " + " | ".join(means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "quality"))
