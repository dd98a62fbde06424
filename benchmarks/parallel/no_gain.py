"""Is there no gain where the map says so? DDP beside stages and split layers on virtual hosts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Bar
from benchmarks.parallel.case_costs import CaseCluster, CaseModel, Processor
from benchmarks.parallel.cases import Cell, price
from benchmarks.parallel.pairs import NO_GAIN, Pair
from benchmarks.parallel.planning import BEST, Outcomes, measuring

MOST = 1.05
_MBITS = {"1gbit": 1000.0}
_ATTENDED = {"shoestring.models.gpt:tiny": 0.5, "benchmarks.parallel.models:vit": 1.0}


def cell_of(pair: Pair, flops: float) -> Cell:
    """What the map says of a pair, on hosts whose processors reach `flops` FLOP/s in fp32."""
    share = 1 / pair.ranks  # of a host's processors and of its memory's speed
    cpu = Processor(
        name="CPU", rate=flops * share, moved=5e9 * share, gib=4, activation=4, overhead=2e-4, kind="cpu"
    )  # fmt: skip
    cluster = CaseCluster(
        hosts=pair.hosts,
        ranks=pair.ranks,
        mbits=_MBITS[pair.rate],
        processor=cpu,
        inside=1e9,
        latency=1e-4,
        latency_inside=5e-5,
    )
    name, batch, arguments = pair.run["run"]["model"], pair.run["run"]["batch"], pair.run["data"]["arguments"]
    sample = (arguments["length"],) if "length" in arguments else (3, arguments["size"], arguments["size"])
    attended = _ATTENDED.get(name, 0.0)
    model = CaseModel(
        name=pair.name,
        model=name,
        arguments=pair.run["model"],
        sample=sample,
        attended=attended,
        batches=(batch, batch, batch),
    )
    return price(model, cluster, batch)


def ratio(outcome: Mapping[str, Any]) -> float:
    """Seconds of a step with DDP over those with the best plan that has stages or split layers."""
    seconds = {name: statistics.median(values) for name, values in outcome["seconds"].items()}
    return seconds["ddp"] / min(own for name, own in seconds.items() if name not in ("ddp", BEST))


def largest(outcomes: Outcomes) -> float:
    return max(map(ratio, outcomes.values()))


def _told(outcomes: Outcomes) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{plan} {statistics.median(own):.3g} s" for plan, own in one["seconds"].items())
        for name, one in outcomes.items()
    )


def rows() -> list[Bar]:
    """The bar of the map."""
    what = (
        "seconds of a step with DDP over those with the best plan with stages or split layers, the largest of three "
        "cases for which the map of plans predicts no gain, on virtual hosts at 1 Gbit/s"
    )
    measure = measuring(largest, _told, pairs=NO_GAIN)
    return [Bar("parallel.map-no-gain", what, "<=", MOST, measure, baseline="DDP")]
