"""The recipe `generation`: the GAN with spatially adaptive normalisation beside a plain one and a regression.

All have the same data, batches and processor time, which is that of the recipe's training as it is shipped. The plain
GAN gets map and texture beside its features instead, and the regression has the recipe's generator and no
discriminator. Two judges of different architecture, taught on real pictures in all styles, say which kind of clothes
and which style the pictures of test images show; the Fréchet distance is that of their features. In each figure the
worse judge counts.

python -m benchmarks.recipes.generation [FOLDER]

prints the README's table from the trainings that are stored.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoestring_recipes.generation as recipe
from benchmarks.harness import Bar, Deadline, Measured, run_command, stored
from benchmarks.intervals import of_mean, of_ratio
from benchmarks.recipes.autocast import faster
from benchmarks.rows import RESULTS
from benchmarks.training import ended
from shoestring.data.images import fashion_mnist
from shoestring.models.loading import load_model
from shoestring_recipes.generation.clothes import Clothes
from shoestring_recipes.generation.measures import frechet
from shoestring_recipes.generation.model import StyledGan
from shoestring_recipes.generation.styles import STYLES, TAUGHT
from shoestring_recipes.generation.task import data, forward, hinge

SEEDS = 3
TEST = 4000
"""Number of test images that are drawn."""
JUDGE_STEPS, JUDGE_BATCH = 600, 64
CACHE = Path(".cache/recipes/generation")
CORNERS = ((0.0, 0.0), (0.4, 0.7))
"""Windows of a swatch for two pictures of one map."""
DEFAULT = "spade"


METHODS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "plain GAN": ("--model.condition", "concatenated"),
    "L1": ("--loss", f"{__name__}:l1", "--forward", f"{__name__}:made_only"),
    "spade, last weights": ("--optim.ema.decay", "0"),
}
"""What the training of each method adds to the command line."""


def made_only(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pictures without the discriminator's scores."""
    return forward(model, {key: batch[key] for key in ("inputs", "swatch")})


def l1(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A regression's loss: the mean difference of each pixel."""
    difference = output["made"] - batch["image"] / 255
    return difference.abs().mean((1, 2, 3)).sum(), len(difference)


# -- judges ------------------------------------------------------------------------------------------------------------


class Judge(nn.Module):
    """Names the kind of clothes and the style of grey pictures (N, 1, 32, 32) from 0 to 1, by 64 features."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.kind, self.style = network, nn.Linear(64, 10), nn.Linear(64, len(STYLES))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.network(pictures)


class Unit(nn.Module):
    """x + convolutions(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.branch = nn.Sequential(nn.BatchNorm2d(width), nn.GELU(), first, nn.BatchNorm2d(width), nn.GELU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def convolutions() -> nn.Sequential:
    """Strided convolutions, and all places in one layer."""
    layers = [
        nn.Sequential(nn.Conv2d(one, other, 3, stride, 1), nn.BatchNorm2d(other), nn.ReLU())
        for one, other, stride in ((1, 24, 1), (24, 32, 2), (32, 64, 2), (64, 64, 2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU())


def residual() -> nn.Sequential:
    """Residual units, of whose features the mean over all places is taken."""
    stem, down = nn.Conv2d(1, 32, 4, 2, 1), nn.Conv2d(32, 64, 4, 2, 1)
    return nn.Sequential(stem, Unit(32), down, Unit(64), Unit(64), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


JUDGES: Mapping[str, Callable[[], nn.Sequential]] = {"convolutions": convolutions, "residual": residual}


@cache
def judge(name: str) -> Judge:
    """A judge, taught on real pictures in all styles; stored with the trainings."""
    path = CACHE / f"judge-{name}-{JUDGE_STEPS}.safetensors"
    torch.manual_seed(1)
    network = Judge(JUDGES[name]())
    if path.exists():
        network.load_state_dict(load_file(path))
        return network.eval().requires_grad_(False)
    train, _ = fashion_mnist()
    samples = Clothes(train, STYLES, seed=10**6)
    order = np.random.default_rng(1).permutation(len(samples))
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, JUDGE_STEPS)
    for step in range(JUDGE_STEPS):
        batch = samples.columns(order[step * JUDGE_BATCH : (step + 1) * JUDGE_BATCH].tolist())
        features = network(batch["image"] / 255)
        kind, style = network.kind(features), network.style(features)
        error = F.cross_entropy(kind, batch["targets"]) + F.cross_entropy(style, batch["style"])
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), path)
    return network.eval().requires_grad_(False)


@cache
def test_samples(seed: int) -> dict[str, Tensor]:
    """The first test images in all styles, as one batch."""
    _, test = fashion_mnist()
    return Clothes(test, STYLES, 2 * seed + 1).columns(range(TEST))


def judged(name: str, pictures: Tensor, samples: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a judge says of pictures of the test images: shares that are right, and the distance to the real ones."""
    network, parts = judge(name), pictures.split(200)
    features = torch.cat([network(part) for part in parts])
    real = torch.cat([network(part) for part in (samples["image"] / 255).split(200)])
    right = network.style(features).argmax(1) == samples["style"]
    taught = samples["style"] < len(TAUGHT)
    return {
        "class": float((network.kind(features).argmax(1) == samples["targets"]).double().mean()),
        "style": float(right.double().mean()),
        "style_taught": float(right[taught].double().mean()),
        "style_untaught": float(right[~taught].double().mean()),
        "distance": float(frechet(features, real)),
    }


# -- trainings ---------------------------------------------------------------------------------------------------------


def step_seconds(method: str) -> float:
    """Processor seconds of a step of a method without the optimizer's, the median of nine, its data among them."""
    torch.manual_seed(0)
    condition = "concatenated" if method == "plain GAN" else DEFAULT
    model, (samples, _), seconds = StyledGan(condition=condition), data(held_out=8), []
    for number in range(9):
        began = time.process_time()
        batch = samples.columns(range(32 * number, 32 * number + 32))
        with torch.autocast("cpu", torch.bfloat16):
            output = (made_only if method == "L1" else forward)(model, batch)
        (l1 if method == "L1" else hinge)(output, batch)[0].backward()
        seconds.append(time.process_time() - began)
    return float(np.median(seconds))


def settings() -> dict[str, Any]:
    """The recipe's run file, as shipped."""
    return tomllib.loads(Path(recipe.__path__[0], "run.toml").read_text())


def folder_of(runs: Path) -> Path:
    """Where trainings with the present settings are stored: others have other seeds, drawn after they are fixed."""
    fixed = json.dumps([settings(), METHODS], sort_keys=True)
    return runs / hashlib.sha256(fixed.encode()).hexdigest()[:8]


def steps_of_all() -> dict[str, Any]:
    """How many steps each method takes in the processor time of the recipe's training as it is shipped."""
    steps = settings()["run"]["steps"]
    seconds = {method: step_seconds(method) for method in METHODS}
    return {method: round(steps * seconds[DEFAULT] / seconds[method]) for method in METHODS}


def trained(method: str, seed: int, steps: int) -> Path:
    """The run folder of a training, which continues where it stopped."""
    folder = CACHE.absolute() / f"{seed}-{method.replace(' ', '-').replace(',', '')}"
    if not ended(folder):
        named = ["--seed", str(seed), "--data.arguments.seed", str(seed), "--folder", str(folder), "--resume", "auto"]
        named += ["--steps", str(steps), "--evaluate_every", "0"]
        named += ["--evaluate", "", "--data.arguments.held_out", "8"]  # it is judged here
        run_command([sys.executable, "-m", "shoestring", "train", "generation", *named, *METHODS[method]])
    return folder


@torch.no_grad()
def drawn(run: Path, samples: Mapping[str, Tensor], corner: Sequence[float]) -> Tensor:
    """Pictures of the test images by the generator of a run, with one window of each swatch."""
    model, _ = load_model(run)
    corners = torch.tensor([corner, corner])
    parts = zip(samples["inputs"].split(100), samples["swatch"].split(100), strict=True)
    batches = ({"inputs": maps, "swatch": swatch, "corners": corners} for maps, swatch in parts)
    return torch.cat([forward(model.eval(), batch)["made"] for batch in batches])


def judged_real(seed: int) -> dict[str, Any]:
    """What the judges say of real pictures, and how much those of one image and swatch differ."""
    samples = test_samples(seed)
    again = samples["again"] / 255
    diversity = float((samples["image"] / 255 - again).abs().mean())
    return {"diversity": diversity, **{name: judged(name, again, samples) for name in JUDGES}}


def judged_method(method: str, seed: int, steps: int) -> dict[str, Any]:
    """What the judges say of a training's pictures, and how much those of one map and swatch differ."""
    samples, run = test_samples(seed), trained(method, seed, steps)
    first, second = (drawn(run, samples, corner) for corner in CORNERS)
    judges = {name: judged(name, first, samples) for name in JUDGES}
    return {"steps": steps, "diversity": float((first - second).abs().mean()), **judges}


class Study:
    """All trainings, each made once and stored in a folder."""

    def __init__(self, runs: Path, deadline: Deadline) -> None:
        self.runs, self.check = folder_of(runs), deadline.check

    def cells(self, method: str) -> list[dict[str, Any]]:
        """What was judged of a method, or of real pictures, for each seed."""
        draw = lambda: {"seeds": [secrets.randbelow(2**20) for _ in range(SEEDS)]}  # noqa: E731
        seeds = stored(self.runs / "seeds.json", self.check, draw)["seeds"]
        steps = stored(self.runs / "steps.json", self.check, steps_of_all)
        paths = {seed: self.runs / f"{seed}-{method}.json" for seed in seeds}
        if not all(path.exists() for path in paths.values()):
            for name in JUDGES:  # before several threads ask for them
                judge(name)

        def cell(seed: int) -> dict[str, Any]:
            make = (
                partial(judged_real, seed) if method == "real" else partial(judged_method, method, seed, steps[method])
            )
            return stored(paths[seed], self.check, make)

        with ThreadPoolExecutor(2) as pool:  # trainings are processes of their own
            return list(pool.map(cell, seeds))

    def values(self, method: str, figure: str, judge_name: str) -> list[float]:
        return [cell[judge_name][figure] for cell in self.cells(method)]

    def note(self, *methods: str) -> str:
        return "; ".join(f"{method}: {described(self.cells(method))}" for method in methods)


def described(cells: Sequence[Mapping[str, Any]]) -> str:
    """The means over seeds of what each judge says, in words."""
    parts = [f"diversity {np.mean([cell['diversity'] for cell in cells]):.3f}"]
    for name in JUDGES:
        means = {figure: np.mean([cell[name][figure] for cell in cells]) for figure in cells[0][name]}
        parts.append(f"{name} " + ", ".join(f"{figure} {value:.3f}" for figure, value in means.items()))
    return "; ".join(parts)


def worse(measure: Callable[[str], Measured]) -> Measured:
    """The lower of the figures by each judge."""
    return min(map(measure, JUDGES), key=lambda one: one.value)


def kept_class(study: Study) -> Measured:
    """How much more of the pictures than of real ones show the right kind of clothes."""

    def measure(name: str) -> Measured:
        pairs = zip(study.values(DEFAULT, "class", name), study.values("real", "class", name), strict=True)
        return of_mean([made - real for made, real in pairs], study.note(DEFAULT, "real"))

    return worse(measure)


def kept_style(study: Study) -> Measured:
    """The share of pictures in the right style, of taught and of untaught styles."""
    note = study.note(DEFAULT, "real")
    return worse(lambda name: of_mean(study.values(DEFAULT, "style", name), note))


def nearer(study: Study, other: str) -> Measured:
    """The distance of another method's pictures over that of the recipe's."""

    def measure(name: str) -> Measured:
        distances = [study.values(method, "distance", name) for method in (other, DEFAULT)]
        return of_ratio(distances[0], distances[1], study.note(DEFAULT, other))

    return worse(measure)


def faster_in_bf16(deadline: Deadline) -> Measured:
    """What autocast is worth on 32 pictures."""
    torch.manual_seed(0)
    model, (samples, _) = StyledGan(), data(held_out=8)
    return faster(model, samples.columns(range(32)), forward, hinge, deadline)


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = Study(runs, deadline)
    bar = partial(Bar, kind="drawn")
    near = "generation: Fréchet distance to real pictures of {}, over that of the recipe's pictures"
    return [
        bar(
            "recipes.generation-class",
            "generation: share of pictures with the right kind of clothes, minus that of real pictures",
            ">=",
            -0.05,
            lambda _: kept_class(study),
            baseline="real pictures",
        ),
        bar(
            "recipes.generation-style",
            "generation: share of pictures in the right style, a quarter of which was never taught",
            ">=",
            0.9,
            lambda _: kept_style(study),
            baseline="real pictures",
        ),
        *(
            bar(
                f"recipes.generation-{word}",
                near.format(what),
                ">",
                1.0,
                lambda _, name=name: nearer(study, name),
                baseline=name,
            )
            for word, name, what in (
                ("plain", "plain GAN", "a plain conditional GAN's pictures"),
                ("l1", "L1", "pictures of a regression with the same generator"),
                ("ema", "spade, last weights", "pictures by the last weights instead of averaged ones"),
            )
        ),
        bar(
            "recipes.generation-autocast",
            "generation: processor time of a step in float32 over that with [precision.autocast], on a CPU with bf16",
            ">=",
            1.2,
            faster_in_bf16,
            kind="timed",
        ),
    ]


def table(runs: Path) -> str:
    """The means of each method over the seeds that are stored for the settings of now, as rows of Markdown."""
    figures = ("class", "style", "style_taught", "style_untaught", "distance")
    head = ["pictures", "seeds", "diversity", *(f"{figure.replace('_', ' ')}" for figure in figures)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for method in ("real", *METHODS):
        cells = [json.loads(path.read_text()) for path in sorted(folder_of(runs).glob(f"*-{method}.json"))]
        if not cells:
            continue
        both = ([np.mean([cell[name][figure] for cell in cells]) for name in JUDGES] for figure in figures)
        means = [" / ".join(f"{value:.2f}" for value in pair) for pair in both]
        diversity = np.mean([cell["diversity"] for cell in cells])
        lines.append(f"| {method} | {len(cells)} | {diversity:.3f} | " + " | ".join(means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "generation"))
