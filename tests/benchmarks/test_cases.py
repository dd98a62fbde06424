"""The map of plans: its costs follow from shapes, its cells from the planner, and its table is that of the guide."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from benchmarks.parallel import cases
from benchmarks.parallel.case_costs import CaseCluster, CaseModel, Processor, collective, links_of, model_costs
from benchmarks.parallel.cases import (
    CLUSTERS,
    MODELS,
    NO_GAIN,
    Cell,
    price,
    search_of,
    splits,
    table,
    ways_of,
)
from benchmarks.parallel.no_gain import cell_of, largest
from benchmarks.parallel.pairs import NO_GAIN as PAIRS
from shoestring.models.gpt import GPT, GPTConfig
from shoestring.planner.outlook import FILLED, GIB
from shoestring.planning.step import GroupShape

SHAPE = {"vocab_size": 512, "context": 64, "dim": 64, "layers": 4, "heads": 4, "kv_heads": 4, "hidden": 128}
PROCESSOR = Processor(name="small", rate=1e10, moved=1e10, gib=4, activation=2, overhead=1e-5)
MODEL = CaseModel(
    name="small", model="shoestring.models.gpt:tiny", arguments=SHAPE, sample=(64,), attended=0.5, batches=(8, 16, 32)
)
SLOW = CaseCluster(hosts=2, ranks=2, mbits=10, processor=PROCESSOR)


def test_the_map_has_all_its_cases():
    assert (len(MODELS), len(CLUSTERS)) == (11, 8)
    assert len({cluster.label for cluster in CLUSTERS}) == 8
    ranks = max(cluster.hosts * cluster.ranks for cluster in CLUSTERS)
    assert all(batch % ranks == 0 for model in MODELS for batch in model.batches)
    assert all(low < high for model in MODELS for low, high in pairwise(model.batches))


def test_operations_and_bytes_follow_from_the_shapes():
    config = GPTConfig(**SHAPE)
    with torch.device("meta"):
        model = GPT(config)
    shape, length = MODEL.shape, config.context
    matrices = 4 * config.dim**2 + 3 * config.dim * config.hidden
    attention = 4 * 0.5 * length**2 * config.dim
    assert {block.flops for block in shape.blocks} == {2 * length * matrices + attention}
    assert shape.behind.flops == 2 * length * config.dim * config.vocab_size
    assert MODEL.weights == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied == 4 * config.vocab_size * config.dim
    assert shape.hidden == (length * config.dim,) * 5
    # inputs and outputs of two norms, three projections, the output's projection, and three feed-forward layers
    assert {block.elements for block in shape.blocks} == {length * (10 * config.dim + 3 * config.hidden)}


def test_times_are_operations_over_the_rate():
    costs, shape = model_costs(MODEL, PROCESSOR), MODEL.shape
    block = shape.blocks[0]
    assert costs.at(costs.blocks[0].forward, 8) == pytest.approx(1e-5 + 8 * block.flops / 1e10)
    assert costs.at(costs.blocks[0].backward, 8) == pytest.approx(2e-5 + 16 * block.flops / 1e10)
    assert costs.trained == 4 * MODEL.weights


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all-reduce", GroupShape(4, 2), 6 * 50e-6 + 1.5 * 1e6 / 1e6),  # one ring over both hosts
        ("all-reduce", GroupShape(2, 2), 2 * 50e-6 + 1e6 / 0.5e6),  # two rings share each host's link
        ("all-reduce", GroupShape(2, 1), 2 * 10e-6 + 1e6 / 10e9),
        ("all-gather", GroupShape(4, 2), 3 * 50e-6 + 3 * 1e6 / 1e6),
        ("reduce-scatter", GroupShape(4, 2), 3 * 50e-6 + 0.75 * 1e6 / 1e6),
        ("all-to-all", GroupShape(4, 2), 3 * 50e-6 + 1e6 / 1e6),  # half of both ranks' tensors
        ("message", GroupShape(2, 2), 50e-6 + 1e6 / 0.5e6),
    ],
)  # fmt: skip
def test_collectives_share_the_links_of_hosts(kind, group, seconds):
    cluster = replace(SLOW, mbits=8, usable=1.0)  # 1 MB/s
    assert collective(cluster, kind, group).seconds(1e6) == pytest.approx(seconds)


def test_nothing_is_gained_on_links_that_cost_nothing():
    free = replace(SLOW, mbits=math.inf, inside=math.inf, latency=0.0, latency_inside=0.0)
    cell = price(MODEL, free, 16)
    assert cell.gain == 1
    assert str(cell) == "1.0"


def test_slow_links_make_stages_pay():
    cell = price(MODEL, SLOW, 16)
    assert cell.gain > 1.2
    assert cell.letter in ("p", "b")
    assert str(cell) == f"{cell.gain:.1f}{cell.letter}"


@pytest.mark.parametrize("batch", MODEL.batches)
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (2, 2)])
def test_no_bandwidth_makes_it_slower(hosts, ranks, batch):
    previous = Cell(None, None)
    for mbits in (10, 20, 40, 80, 160):
        cell = price(MODEL, replace(SLOW, hosts=hosts, ranks=ranks, mbits=mbits), batch)
        assert cell.gain >= 1
        assert cell.today is not None and cell.best is not None
        if previous.today is not None and previous.best is not None:
            assert cell.today.seconds <= previous.today.seconds * (1 + 1e-9)
            assert cell.best.seconds <= previous.best.seconds * (1 + 1e-9)
        previous = cell


@pytest.mark.slow
def test_what_fits_only_in_parts_says_so():
    def within(gib):
        return price(MODEL, replace(SLOW, processor=replace(PROCESSOR, gib=gib)), 16)

    cell = within(0.0014)
    assert cell.today is None
    assert cell.best is not None and any(splits(cell.best))
    assert cell.gain == math.inf
    assert str(cell) == f"fits {cell.letter}" != "fits "
    nothing = within(1e-5)
    assert (str(nothing), nothing.gain) == ("–", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("mbits", "gib"), [(10, 4.0), (1000, 4.0), (100, 0.0016)])
def test_plans_that_are_not_priced_are_not_faster(mbits, gib):
    """All plans of the planner's own list, beside those that the map prices."""
    cluster = replace(SLOW, mbits=mbits, processor=replace(PROCESSOR, gib=gib))
    search = search_of(MODEL, 2, 2, "cuda", 16)
    ways, room = search.ways(), FILLED * gib * GIB
    assert {(way.added, way.counts) for way in ways} == {(way.added, way.counts) for way in ways_of(MODEL, cluster, 16)}
    plans = search.plans(ways, {"": model_costs(MODEL, PROCESSOR)}, links_of(cluster), {}, room)
    cell = price(MODEL, cluster, 16)
    for found, kinds in ((cell.best, False), (cell.today, True)):
        whole = [plan.seconds for plan in plans if not plan.refused and not (kinds and any(splits(plan)))]
        assert (found and found.seconds) == (min(whole) if whole else None)


@pytest.mark.parametrize("flops", [20e9, 80e9])
@pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])
def test_the_map_says_no_gain_for_the_measured_cells(pair, flops):
    assert cell_of(pair, flops).gain <= NO_GAIN


def test_the_bar_is_the_worst_pair():
    one = {"seconds": {"ddp": [1.0, 2.0, 3.0], "pipeline": [2.0], "split": [4.0], "planned": [0.1]}}
    other = {"seconds": {"ddp": [3.0], "pipeline": [2.0], "planned": [3.0]}}
    assert largest({"one": one}) == 1
    assert largest({"one": one, "other": other}) == 1.5


def test_the_table_is_written_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    start, stop = cases.MARKS
    page.write_text(f"before\n{start}old\n{stop}after\n")
    cell = price(MODEL, SLOW, 16)
    cases.write(table({MODEL: [[cell] * 3]}, [SLOW]), page)
    line = f"| small, 0 M | {cell} · {cell} · {cell} |"
    assert line in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "old" not in page.read_text()


def test_the_guide_has_the_table_of_these_cases():
    start, stop = cases.MARKS
    _, _, rest = cases.PAGE.read_text().partition(start)
    head, written = table({}), rest.partition(stop)[0].strip()
    assert written.startswith(head)
    rows = written.removeprefix(head).splitlines()
    assert all(row.startswith(f"| {model.name}, ") for row, model in zip(rows, MODELS, strict=True))
    assert all(len(cell.split(" · ")) == 3 for row in rows for cell in row.split("|")[2:-1])
