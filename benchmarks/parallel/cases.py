"""The map of plans: which split of training pays on which cluster, as the planner predicts it.

    python -m benchmarks.parallel.cases            # prints the table, and writes it into docs/guides/plans.md
    python -m benchmarks.parallel.cases --print    # prints it only

Nothing is measured: costs of models and links are computed from shapes and stated rates (`case_costs`), and the
planner lists and prices the ways to train that give the result of one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from benchmarks.machine import ROOT
from benchmarks.parallel.case_costs import CaseCluster, CaseModel, Processor, links_of, model_costs
from shoestring.core.feature import DATA
from shoestring.core.world import World
from shoestring.memory import Recompute
from shoestring.parallel import Pipeline, Tensor
from shoestring.parallel.pipeline.names import STAGE
from shoestring.parallel.tensor.names import TENSOR
from shoestring.planner.outlook import FILLED, GIB
from shoestring.planner.search import PlanSearch, TrainingPlan, TrainingWay
from shoestring.planning.step import Links, ModelCosts, group_over
from shoestring.run import Run, parse
from shoestring.training.data_loading import DataSets
from shoestring.training.user_code import import_user_code

PAGE = ROOT / "docs" / "guides" / "plans.md"
MARKS = "<!-- begin: python -m benchmarks.parallel.cases -->\n", "<!-- end -->\n"
MOST_MICRO = 64
"""Largest number of micro-batches that is priced."""
NO_GAIN = 1.02
"""A plan that is faster by at most this factor counts as no gain."""
_LETTERS = {(False, False): "", (True, False): "p", (False, True): "s", (True, True): "b"}

# -- processors and clusters -------------------------------------------------------------------------------------------

_SMALL = Processor(name="12 GB", rate=25e12, moved=350e9, gib=12, activation=2, overhead=2e-4)
_LARGE = Processor(name="24 GB", rate=70e12, moved=900e9, gib=24, activation=2, overhead=2e-4)

CLUSTERS = (
    CaseCluster(hosts=2, ranks=1, mbits=1_000, processor=_LARGE),
    CaseCluster(hosts=4, ranks=1, mbits=100, processor=_SMALL),
    CaseCluster(hosts=4, ranks=1, mbits=1_000, processor=_LARGE),
    CaseCluster(hosts=8, ranks=1, mbits=1_000, processor=_SMALL),
    CaseCluster(hosts=8, ranks=1, mbits=10_000, processor=_LARGE),
    CaseCluster(hosts=2, ranks=4, mbits=1_000, processor=_SMALL),
    CaseCluster(hosts=2, ranks=4, mbits=10_000, processor=_LARGE),
    CaseCluster(hosts=4, ranks=4, mbits=25_000, processor=_LARGE),
)

# -- models ------------------------------------------------------------------------------------------------------------

_TEXTS, _IMAGES = (16, 64, 256), (64, 256, 1024)
_LENGTH = 1024


def _gpt(name: str, dim: int, layers: int, heads: int, hidden: int, vocabulary: int = 50_304, **more: Any) -> CaseModel:
    shape = {"vocab_size": vocabulary, "context": _LENGTH, "dim": dim, "layers": layers, "heads": heads}
    arguments = {**shape, "kv_heads": heads, "hidden": hidden, **more}
    model = "shoestring.models.gpt:tiny"
    return CaseModel(name=name, model=model, arguments=arguments, sample=(_LENGTH,), attended=0.5, batches=_TEXTS)


def _images(name: str, function: str, attended: float, **arguments: int) -> CaseModel:
    model, sample = f"benchmarks.parallel.models:{function}", (3, 224, 224)
    return CaseModel(name=name, model=model, arguments=arguments, sample=sample, attended=attended, batches=_IMAGES)


_VIT = {"size": 224, "patch": 16, "classes": 1000}

MODELS = (
    _gpt("GPT", 512, 10, 8, 1408),
    _gpt("GPT", 768, 12, 12, 2048),
    _gpt("GPT, vocabulary of 250,000", 768, 12, 12, 2048, 250_000),
    _gpt("GPT", 1024, 24, 16, 2720),
    _gpt("GPT", 1280, 36, 20, 3424),
    _gpt("Llama", 2048, 22, 32, 5632, 32_000, kv_heads=4, tied=False),
    _gpt("Llama", 3200, 26, 32, 8640, 32_000, tied=False),
    _gpt("Llama", 4096, 32, 32, 11_008, 32_000, tied=False),
    _images("ViT-B/16", "vit", 1.0, width=768, layers=12, heads=12, **_VIT),
    _images("ViT-L/16", "vit", 1.0, width=1024, layers=24, heads=16, **_VIT),
    _images("Wide ResNet-50-2", "resnet50", 0.0, widen=2),
)


# -- prices ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The fastest plans of a case that fit into memory, without stages and split layers (`today`), and of all."""

    today: TrainingPlan | None
    best: TrainingPlan | None

    @property
    def gain(self) -> float:
        """Seconds of a step with today's best plan over those with the best plan; infinite if only the latter fits."""
        if self.best is None:
            return 1.0
        return self.today.seconds / self.best.seconds if self.today else float("inf")

    @property
    def letter(self) -> str:
        """Whether the best plan has stages ("p"), split layers ("s"), both ("b"), or neither or no gain ("")."""
        return _LETTERS[splits(self.best)] if self.best and self.gain > NO_GAIN else ""

    def __str__(self) -> str:
        if self.best is None:
            return "–"
        if self.today is None:
            return f"fits {self.letter}"
        return f"{self.gain:.0f}{self.letter}" if self.gain >= 10 else f"{self.gain:.1f}{self.letter}"


def splits(plan: TrainingPlan | TrainingWay) -> tuple[bool, bool]:
    """Whether a plan has stages; whether it has split layers."""
    pipeline, tensor = (any(isinstance(feature, kind) for feature in plan.added) for kind in (Pipeline, Tensor))
    return pipeline, tensor


def run_of(model: CaseModel, batch: int) -> Run:
    """The run file of a case, without features that a plan chooses; its data is never opened."""
    settings = {"model": model.model, "data": "benchmarks.parallel.models:token_data", "batch": batch, "steps": 1}
    return parse({"run": settings, "model": dict(model.arguments)})


class _NoSamples(Dataset[Any]):
    """Data of which the search needs nothing."""


def search_of(model: CaseModel, hosts: int, ranks: int, device: str, batch: int) -> PlanSearch:
    """The planner's search for a model on hosts with equal ranks."""
    run, world = run_of(model, batch), World(size=hosts * ranks, local_size=ranks)
    return PlanSearch(run, import_user_code(run), world, DataSets(_NoSamples(), None, None), device)


@cache
def _ways(model: CaseModel, hosts: int, ranks: int, device: str) -> Sequence[TrainingWay]:
    """The ways to train a model on ranks, which depend neither on speeds nor on how many samples a rank has."""
    return search_of(model, hosts, ranks, device, hosts * ranks).ways()


def ways_of(model: CaseModel, cluster: CaseCluster, batch: int) -> list[TrainingWay]:
    """The ways to train a case, each with the powers of two up to `MOST_MICRO` as numbers of micro-batches."""
    ways = list[TrainingWay]()
    for way in _ways(model, cluster.hosts, cluster.ranks, cluster.processor.kind):
        own = batch // way.world.ranks_over(DATA)
        counts = tuple(2**power for power in range(MOST_MICRO.bit_length()) if own and own % 2**power == 0)
        settings = replace(way.run.settings, batch=batch)
        ways.append(replace(way, run=replace(way.run, settings=settings), counts=counts))
    return ways


@dataclass(frozen=True)
class _Case:
    """What the planner needs to price the plans of a case, in the order of the arguments of `PlanSearch.plans`."""

    search: PlanSearch
    costs: ModelCosts
    links: Links
    room: float

    def plan(self, way: TrainingWay, count: int) -> TrainingPlan | None:
        """The plan with `count` micro-batches; None if it does not fit into memory, or no pipeline can be formed."""
        plans = self.search.plans([replace(way, counts=(count,))], {"": self.costs}, self.links, {}, self.room)
        return next((plan for plan in plans if not plan.refused), None)

    def bound(self, way: TrainingWay, count: int) -> float:
        """Seconds that a step of a pipeline takes at least: those of its computations, and those of its messages.

        A stage with w seconds of work in each of m micro-batches ends m w after its first pass began, which waits for
        the earlier stages, as they wait for its last one. So with W seconds of work in a micro-batch and S stages, a
        step takes at least W / (1 - (1 - 1/m)^S), and with several parts in each stage at least m W / S.
        """
        costs, stages, splits = self.costs, way.world.ranks_over([STAGE]), way.world.ranks_over([TENSOR])
        samples = self.search.run.settings.batch / way.world.ranks_over(DATA) / count
        # Tied embeddings may be looked up by the last stage, whose first pass then waits for none.
        parts = (*(() if costs.tied else (costs.before,)), *costs.blocks, costs.behind)
        work = sum(costs.at(part.forward, samples) + costs.at(part.backward, samples) for part in parts)
        work += sum(costs.at(block.forward, samples) for block in costs.blocks[: _recomputed(way, len(costs.blocks))])
        chunks = max(feature.chunks for feature in way.added if isinstance(feature, Pipeline))
        filling = 1 - (1 - 1 / count) ** stages if chunks == 1 else stages / count
        group = group_over(way.world, [STAGE])
        message = self.links.seconds("message", group, min(costs.hidden[1:-1]) * samples)
        # A stage between others sends activations and gradients for each of its parts, the first only activations.
        messages = 2 * chunks - (stages == 2)
        return max(work / splits / filling, count * messages * message)


def price(model: CaseModel, cluster: CaseCluster, batch: int) -> Cell:
    """The cell of a case.

    Plans that cannot be faster than a priced one are not priced: with more recomputed blocks or, without stages, with
    more micro-batches than a plan that fits, and pipelines whose lower bound is not below the fastest plan's time.
    """
    processor = cluster.processor
    search = search_of(model, cluster.hosts, cluster.ranks, processor.kind, batch)
    room = FILLED * processor.gib * GIB
    case = _Case(search, model_costs(model, processor), links_of(cluster), room)
    today: TrainingPlan | None = None
    best: TrainingPlan | None = None
    pipelines = list[tuple[float, int, TrainingWay, int]]()
    for number, alike in enumerate(_alike(ways_of(model, cluster, batch))):
        for way in alike:
            if splits(way)[0]:
                pipelines += [(case.bound(way, count), number, way, count) for count in way.counts]
            elif plan := next(filter(None, (case.plan(way, count) for count in way.counts)), None):
                best = _faster(best, plan)
                today = today if splits(way)[1] else _faster(today, plan)
    fitting = set[tuple[int, int]]()
    for bound, number, way, count in sorted(pipelines, key=lambda one: one[0]):
        if best is not None and bound >= best.seconds:
            break
        if (number, count) not in fitting and (plan := case.plan(way, count)):
            fitting.add((number, count))
            best = _faster(best, plan)
    return Cell(today, best)


def _faster(one: TrainingPlan | None, other: TrainingPlan) -> TrainingPlan:
    return other if one is None or other.seconds < one.seconds else one


def _alike(ways: Sequence[TrainingWay]) -> list[list[TrainingWay]]:
    """The ways in groups that differ only in the number of recomputed blocks."""
    groups = dict[tuple[Any, ...], list[TrainingWay]]()
    for way in ways:
        groups.setdefault(tuple(one for one in way.added if not isinstance(one, Recompute)), []).append(way)
    return [*groups.values()]


def _recomputed(way: TrainingWay, blocks: int) -> int:
    """Number of blocks that are recomputed, of `blocks`."""
    return max((feature.blocks or blocks for feature in way.added if isinstance(feature, Recompute)), default=0)


# -- the table ---------------------------------------------------------------------------------------------------------


def row(model: CaseModel, clusters: Sequence[CaseCluster] = CLUSTERS) -> list[list[Cell]]:
    """The cells of a model: for each cluster, one for each batch."""
    return [[price(model, cluster, batch) for batch in model.batches] for cluster in clusters]


def table(cells: Mapping[CaseModel, Sequence[Sequence[Cell]]], clusters: Sequence[CaseCluster] = CLUSTERS) -> str:
    """The map as a table in Markdown."""
    heads = [f"{one.hosts}x{one.ranks}, {one.processor.name}, {one.bandwidth}" for one in clusters]
    lines = [["model", *heads], ["---"] * (len(clusters) + 1)]
    for model, own in cells.items():
        lines.append([_titled(model), *(" · ".join(map(str, three)) for three in own)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _titled(model: CaseModel) -> str:
    weights = model.weights
    size = f"{weights / 1e9:.1f} B" if weights >= 1e9 else f"{weights / 1e6:.0f} M"
    return f"{model.name}, {size}"


def write(text: str, page: Path = PAGE) -> None:
    """Replace the table on a page, between its marks."""
    start, stop = MARKS
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(stop)
    page.write_text(f"{before}{start}\n{text}\n{stop}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.parallel.cases", description=__doc__.split("\n")[0])
    flags.add_argument("--print", action="store_true", help="print the table, and leave the guide as it is")
    flags.add_argument("--plans", action="store_true", help="also print the best plans of each case")
    arguments = flags.parse_args(argv)
    cells = dict[CaseModel, list[list[Cell]]]()
    for model in MODELS:
        began = time.perf_counter()
        cells[model] = row(model)
        print(f"{_titled(model)}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if arguments.plans:
            for cluster, three in zip(CLUSTERS, cells[model], strict=True):
                for batch, cell in zip(model.batches, three, strict=True):
                    print(f"  {cluster.label}, batch {batch}: {cell}", _told(cell.today), _told(cell.best), sep="; ")
    text = table(cells)
    print(text, end="")
    if not arguments.print:
        write(text)
    return 0


def _told(plan: TrainingPlan | None) -> str:
    return "nothing fits" if plan is None else f"{plan} in {plan.seconds:.3g} s, {plan.predicted.peak / GIB:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
