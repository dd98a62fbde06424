"""Which ways to train are planned, which one is chosen, and what becomes of the file that the verb writes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from torch import nn

from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Seam, resolve_all
from shoestring.core.world import World
from shoestring.memory import Recompute, Zero
from shoestring.parallel import DDP, FSDP, Pipeline, Planned, Tensor
from shoestring.planner.page import write
from shoestring.planner.reordering import in_tiles, reordered, with_overlap
from shoestring.planner.search import PlanSearch, chosen
from shoestring.planning.cluster import Collective
from shoestring.planning.step import Links, ModelCosts, PartCosts
from shoestring.precision import Autocast
from shoestring.run import load, parse
from shoestring.training.data_loading import own_data
from shoestring.training.user_code import import_user_code
from shoestring.verbs.plan import _check_out, features_to_try

DATA = f"{__name__}:texts"
RUN = {
    "run": {"model": "shoestring.models.gpt:tiny", "data": DATA, "batch": 16, "steps": 2},
    "model": {"vocab_size": 64, "context": 16, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 64},
}
SLOW = Collective(kind="any", over=("hosts",), ranks=2, latency=1e-3, bandwidth=1e6)


def texts():
    import torch

    text = torch.arange(64 * 17).view(64, 17) % 64
    samples = [{"inputs": line[:-1], "targets": line[1:]} for line in text]
    return samples, samples[:4]


class Everywhere(dict):
    def __missing__(self, key):
        return SLOW


def search(world, tables=None):
    run = parse(RUN | (tables or {}))
    return PlanSearch(run, import_user_code(run), world, own_data(run), "cpu")


def costs(blocks=4, trained=1_000_000):
    part = PartCosts(forward=(0.1, 1.6), backward=(0.2, 3.2), held=(1e5, 1.6e6), trained=trained)
    around = replace(part, forward=(0.0, 0.0), backward=(0.0, 0.0))
    return ModelCosts(
        samples=(1, 16), blocks=(part,) * blocks, before=around, behind=around,
        hidden=(2048,) * (blocks + 1), tied=0, scored=4096, optimizer=1e-10, state=2.0, moved=1e10,
    )  # fmt: skip


def kinds(ways):
    return {frozenset(type(feature) for feature in way.added) for way in ways}


def test_ways_follow_from_the_ranks_of_hosts():
    inside = kinds(search(World(size=2, local_size=2)).ways())
    across = kinds(search(World(size=2, local_size=1)).ways())
    for found in (inside, across):
        assert {frozenset({DDP}), frozenset({Zero}), frozenset({FSDP}), frozenset({Pipeline})} <= found
        assert frozenset({DDP, Recompute}) in found
        assert frozenset({Pipeline, Zero}) not in found  # of two ranks, none is left to divide among
    assert frozenset({Tensor}) in inside
    assert not any(Tensor in way for way in across)  # layers are split inside hosts only


def test_both_levels_of_a_mesh_are_used():
    ways = search(World(size=4, local_size=2)).ways()
    assert {frozenset({Pipeline, Tensor}), frozenset({Pipeline, DDP}), frozenset({Tensor, DDP})} <= kinds(ways)
    hybrid = [one for way in ways for one in way.added if isinstance(one, FSDP) and one.hosts == "replicate"]
    assert hybrid
    assert all(way.world.size == 4 for way in ways)


def test_every_plan_keeps_the_models_of_all_ranks_equal():
    ways = search(World(size=4, local_size=2)).ways()
    assert any(DDP(hosts="leave", bucket_mb=4.0) in way.added for way in ways)
    for way in ways:
        owners = [one for one in resolve_all(way.run.features, way.world) if {Seam.SHARD, Seam.WIRE} & {*one.seams}]
        owned = set().union(*(one.over for one in owners))
        assert {axis for axis, ranks in way.world.axes.items() if ranks > 1} <= owned, way.added


def test_what_the_user_has_set_stays():
    ways = search(World(size=4, local_size=2), {"memory": {"zero": {"stage": 1}}}).ways()
    assert all(Zero(stage=1) in way.run.features for way in ways)
    assert not any({DDP, FSDP, Zero} & {*map(type, way.added)} for way in ways)
    stages = search(World(size=4, local_size=2), {"parallel": {"pipeline": {"stages": 2}}}).ways()
    assert all(any(one == Pipeline(stages=2) for one in way.run.features) for way in stages)
    accumulated = search(World(size=2, local_size=2), {"run": RUN["run"] | {"accumulate": 4}}).ways()
    assert {count for way in accumulated for count in way.counts} == {4, 8, 16}


def test_what_does_not_fit_is_said_once():
    found = search(World(size=3, local_size=3), {"model": RUN["model"] | {"heads": 3, "dim": 36, "kv_heads": 3}})
    ways = found.ways()
    assert not ways or all(16 % way.world.ranks_over(("hosts", "local")) == 0 for way in ways)
    assert "16 samples do not divide by 3 ranks" in found.refusals.values()
    assert any("hidden" in why or "outputs" in why or "inputs" in why for why in found.refusals.values())


class Normed(nn.Module):
    """A model whose result depends on which samples share a micro-batch."""

    def __init__(self, vocab_size: int = 64):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab_size, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))


class Experts(Normed):
    """A model with a router, whose balance is that of a micro-batch."""

    def __init__(self, vocab_size: int = 64):
        super().__init__(vocab_size)
        self.norm, self.router = nn.Identity(), nn.Linear(8, 4)


@pytest.mark.parametrize("model", ["Normed", "Experts"])
def test_what_mixes_samples_keeps_the_size_of_micro_batches(model):
    run = RUN["run"] | {"model": f"{__name__}:{model}", "accumulate": 2}
    ways = search(World(size=2, local_size=1), {"run": run, "model": {"vocab_size": 64}}).ways()
    assert {16 // way.world.ranks_over(("hosts", "local")) // count for way in ways for count in way.counts} == {4}


def test_what_the_budget_does_not_allow_is_left_out():
    run = parse(RUN)
    given = run, import_user_code(run), World(size=2, local_size=1), own_data(run), "cpu"
    ways = PlanSearch(*given, ("memory.zero", "run.accumulate")).ways()
    assert not any(Zero in map(type, way.added) for way in ways)
    assert {count for way in ways for count in way.counts} == {1}


def test_without_any_plan_it_is_said_why():
    with pytest.raises(
        ConfigError, match=r"no plan for 7 ranks \(.*whole replicas: 16 samples do not divide by 7 ranks"
    ):
        search(World(size=7, local_size=7)).ways()


@pytest.mark.parametrize("out", ["page.html", "folder", "file/plan.toml"])
def test_where_no_plan_can_be_written_none_is_made(tmp_path, out):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"name of a page|cannot write"):
        _check_out(tmp_path / out)


@pytest.mark.slow
def test_slow_links_make_a_pipeline_and_fast_ones_replicas():
    found, links = search(World(size=2, local_size=1)), Links(Everywhere())
    ways = found.ways()
    best = chosen(found.plans(ways, {"": costs()}, links, {}, float("inf")))
    assert [type(one) for one in best.added] == [Pipeline]
    (pipeline,) = best.added
    assert len(pipeline.cuts) == 2 * pipeline.chunks - 1
    assert best.run.settings.accumulate > 1
    fast = Links(Fast())
    best = chosen(found.plans(ways, {"": costs()}, fast, {}, float("inf")))
    assert [type(one) for one in best.added] == [DDP]


@pytest.mark.parametrize(("bandwidth", "smaller"), [(2e7, True), (1e11, False)])
def test_gradients_leave_in_smaller_buckets_where_that_hides_them(bandwidth, smaller):
    run = parse(RUN)
    data = own_data(run)
    others = ("parallel.pipeline", "parallel.fsdp", "memory.zero", "run.accumulate")
    found = PlanSearch(run, import_user_code(run), World(size=2, local_size=1), data, "cpu", others)
    links = Links(At(replace(SLOW, bandwidth=bandwidth)))
    best = chosen(found.plans(found.ways(), {"": costs()}, links, {}, float("inf")))
    (ddp,) = best.added
    assert isinstance(ddp, DDP)
    assert (ddp.bucket_mb < DDP().bucket_mb) == smaller
    assert parse_again(found.file(best)).features == (ddp,)


class At(dict):
    """The same collective everywhere."""

    def __init__(self, collective):
        super().__init__()
        self.collective = collective

    def __missing__(self, key):
        return self.collective


class Late(dict):
    """Messages that take as long as some passes, however short they are."""

    def __missing__(self, key):
        return replace(SLOW, latency=0.5, bandwidth=1e9)


def test_passes_are_put_in_another_order_where_that_is_faster_and_fits():
    found, links = search(World(size=2, local_size=1), {"model": RUN["model"] | {"tied": False}}), Links(Late())
    plans = found.plans(found.ways(), {"": costs()}, links, {}, float("inf"))

    def is_plain(plan):
        return [one.ahead for one in plan.added if isinstance(one, Pipeline) and one.chunks == 1] == [0]

    plain = next(plan for plan in plans if is_plain(plan) and len(plan.added) == 1 and plan.step.micro == 8)
    better = reordered(plain, links, float("inf"))
    assert better.seconds < 0.95 * plain.seconds
    assert better.predicted.peak > plain.predicted.peak  # more micro-batches are in flight
    assert reordered(better, links, float("inf")) is None
    assert reordered(plain, links, plain.predicted.peak) is None
    run = parse_again(found.file(better))
    (pipeline,) = (feature for feature in run.features if isinstance(feature, Pipeline))
    assert [len(text.split()) for text in pipeline.pass_order] == [16, 16]
    assert found.priced(run, {"": costs()}, links, {}, float("inf")).seconds == pytest.approx(better.seconds)
    every = with_overlap([plain], links, {}, float("inf"))
    assert [plan.seconds for plan in every] == [better.seconds, plain.seconds]
    assert "pass_order" in str(every[0])


def test_split_layers_compute_in_tiles_where_messages_are_worth_it():
    found = search(World(size=2, local_size=2))
    ways = [way for way in found.ways() if [type(one) for one in way.added] == [Tensor]]
    model, links = {"": costs()}, Links(Wide())
    plain = next(plan for plan in found.plans(ways, model, links, {}, float("inf")) if plan.step.micro == 2)
    better = in_tiles(plain, links)
    assert better.seconds < 0.95 * plain.seconds
    run = parse_again(found.file(better))
    assert [one.tiles for one in run.features if isinstance(one, Tensor)] == [better.step.tiles]
    assert found.priced(run, model, links, {}, float("inf")).seconds == pytest.approx(better.seconds)
    assert in_tiles(better, links) is None
    short = next(plan for plan in found.plans(ways, model, Links(Fast()), {}, float("inf")) if plan.step.micro == 2)
    assert in_tiles(short, Links(Fast())) is None  # nothing that counts can be hidden
    assert with_overlap([plain], links, {}, float("inf"))[0].seconds == better.seconds


class Wide(dict):
    """Messages that take about as long as what is computed between them."""

    def __missing__(self, key):
        return replace(SLOW, latency=1e-5, bandwidth=2e4)


class Fast(dict):
    def __missing__(self, key):
        return replace(SLOW, latency=1e-6, bandwidth=1e11)


def test_the_memory_of_a_rank_is_kept():
    found, links = search(World(size=2, local_size=1)), Links(Fast())
    ways, model = found.ways(), {"": costs(trained=100_000_000)}
    plans = found.plans(ways, model, links, {}, 1.5e9)
    best = chosen(plans)
    assert best.predicted.peak <= 1.5e9
    assert any(plan.refused.startswith("needs ") for plan in plans if [*map(type, plan.added)] == [DDP])
    with pytest.raises(ConfigError, match="no plan fits: the smallest needs"):
        chosen(found.plans(ways, model, links, {}, 1e6))


@pytest.mark.slow
@pytest.mark.parametrize("faster", [True, False])
def test_features_that_are_tried_as_well_are_chosen_if_steps_are_faster_with_them(faster):
    also = Autocast(dtype="bf16")
    run = parse(RUN)
    found = PlanSearch(run, import_user_code(run), World(size=2), own_data(run), "cpu", also=(also,))
    ways, plain = found.ways(), costs()
    assert 2 * sum(way.also is None for way in ways) == len(ways)
    cast = replace(plain, blocks=tuple(replace(one, forward=(0.05, 0.8)) for one in plain.blocks)) if faster else plain
    plans = found.plans(ways, {"": plain, also.name: cast}, Links(Fast()), {}, float("inf"))
    best = chosen(plans)
    assert (
        (also in best.added)
        == (also in found.file(best).features)
        == (also in parse_again(best.run).features)
        == faster
    )
    assert len({str(plan) for plan in plans}) == len(plans)
    again = found.priced(found.file(best), {"": plain, also.name: cast}, Links(Fast()), {}, float("inf"))
    assert again.seconds == pytest.approx(best.seconds)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("precision.autocas", "there is no feature"),
        ("optim.adamw", "has .optim.adamw. already"),
        ("memory.recompute", "cannot be tried"),
        ("comm.bf16", "cannot be tried"),
        ("memory.budget", "cannot be tried"),
        ("checkpoint.plain", "cannot be tried"),
    ],
)
def test_what_cannot_be_tried_as_well_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        features_to_try(parse(RUN | {"optim": {"adamw": {}}}), [name])


def test_every_feature_to_try_counts(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a line\n" * 400)
    (tmp_path / "run.toml").write_text(f"[run]\ndata = '{tmp_path}/text.txt'\nsteps = 1\n[data]\ntokenizer = 'bytes'\n")
    flags = ["--workers", "1", "--also", "precision.autocas", "--also", "precision.autocast"]
    assert main(["plan", str(tmp_path / "run.toml"), *flags]) == 2
    assert "there is no feature `precision.autocas`" in capsys.readouterr().err


def test_a_file_says_what_is_not_a_default():
    found, links = search(World(size=2, local_size=1), {"memory": {"recompute": {}}}), Links(Everywhere())
    run = found.file(chosen(found.plans(found.ways(), {"": costs()}, links, {}, float("inf"))))
    assert [type(one) for one in run.features] == [Recompute, Pipeline]
    assert parse_again(run).settings.accumulate == run.settings.accumulate > 1


def parse_again(run):
    import tomllib

    return parse(tomllib.loads(run.toml))


@pytest.mark.slow
def test_the_page_draws_every_pass_and_says_why_others_lost(tmp_path):
    found = search(World(size=4, local_size=2))
    plans = found.plans(found.ways(), {"": costs()}, Links(Everywhere()), {}, 1e7)
    best = next(plan for plan in plans if plan.step.stages == 2)
    others = [plan for plan in plans if plan is not best]
    text = write(best, others, {str(others[0]): 3.0}, best.seconds, tmp_path / "plan.html").read_text()
    assert text.count("<title>forward: ") == text.count("<title>backward: ") == 2 * best.run.settings.accumulate
    assert "needs " in text  # those that do not fit into memory
    assert text.count('<th scope="row">') == len(others) + 2
    assert "NaN" not in text


@pytest.mark.slow
def test_the_verb_writes_a_plan_that_trains_where_it_was_made_for(tmp_path, capsys):
    """Under a limit that whole replicas do not meet."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of {n * n}" for n in range(4000)))
    shape = "[model]\ndim = 256\nlayers = 4\nheads = 4\nkv_heads = 4\n"
    tables = "[data]\ntokenizer = 'bytes'\nsequence = 32\n[memory.budget]\ngib = 0.04\n"
    settings = f"[run]\ndata = '{tmp_path / 'text.txt'}'\nfolder = '{tmp_path / 'run'}'\nbatch = 8\nsteps = 4\n"
    (tmp_path / "run.toml").write_text(f"{settings}{shape}{tables}")
    command = [sys.executable, "-m", "shoestring", "plan", str(tmp_path / "run.toml"), "--workers", "2", "--tries", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "<- chosen" in done.stdout
    plan = tmp_path / "plan.toml"
    (record,) = (feature for feature in load(str(plan)).features if isinstance(feature, Planned))
    assert (record.num_hosts, record.num_ranks) == (1, 2)
    assert 0 < record.peak_gib <= 0.04
    command = [sys.executable, "-m", "shoestring", "train", str(plan), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "plan.html").read_text()
    assert "A plan of" in page and "stage 0" in page and "Why not" in page
    report = (tmp_path / "run" / "report.html").read_text()
    assert "The plan" in report and "tried" in report
    for changed, said in (
        (["--workers", "1"], "planned for 2 ranks, and there are 1"),
        (["--workers", "2", "--model.layers", "5"], "planned for a model that trains"),
    ):
        assert main(["check", str(plan), *changed]) == 2
        assert said in capsys.readouterr().err
