"""A budget of memory: what is chosen fits, costs little, and is what runs; what cannot fit is refused."""

import copy
import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import shoestring as ss
from shoestring import memory, optim
from shoestring.cli import main
from shoestring.core.errors import ConfigError
from shoestring.core.world import World
from shoestring.memory import Budget, Recompute
from shoestring.memory.settings.budget import BudgetChoice
from shoestring.memory.step_cost import BlockCall, CostedTensors, DeviceRates, levels
from shoestring.models.gpt import tiny
from shoestring.run import load
from shoestring.settings import structure
from shoestring.testing.suite import FeatureSuite
from shoestring.training.budget import GIB, BudgetSearch
from shoestring.training.choices import with_choice
from tests.memory.observed import needs_compiler
from tests.memory.predicted_ranks import batches
from tests.small_runs import write_run_file, write_texts

RATES = DeviceRates(flops=1e11, copied=2e10, slow=5e9, launch=3e-6, chosen=2e-5, host=1e10)


@pytest.mark.slow
class TestSelectiveRecompute(FeatureSuite):
    """Results that are held are the bits that would be computed again."""

    tolerance = 0.0

    @pytest.fixture
    def feature(self):
        return Recompute(saved_operators=("mm", "_scaled_dot_product_flash_attention_for_cpu", "addmm:2"), blocks=1)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    tables = {
        "run": {"steps": 2, "batch": 8, "data": write_texts(folder / "texts"), "folder": str(folder / "run")},
        "model": {"layers": 3},
        "data": {"tokenizer": "bytes", "sequence": 64},
        "memory": {"budget": {"gib": 1.0}},
    }
    return write_run_file(folder / "run.toml", tables)


@pytest.fixture(scope="module")
def search(run_file):
    """What a run may be changed to; peaks are predicted once for all tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoestring.training.budget.measure_rates", lambda _: RATES)
        return BudgetSearch(load(str(run_file)).completed(World()), World())


def chosen(search, gib, **settings):
    budget = Budget(gib=gib, **settings)
    choice = search.within(budget)
    return with_choice(search.run, search.world, budget, choice), choice


@pytest.mark.slow
def test_what_fits_as_it_is_stays_so(search):
    fitted, budget = chosen(search, 1.0)
    assert fitted.settings.accumulate == 1 and not any(isinstance(each, Recompute) for each in fitted.features)
    assert budget.chosen == "nothing: it fits as it is" and budget.predicted_gib == budget.without_gib


def test_smaller_budgets_cost_more_and_are_kept(search):
    whole = chosen(search, 1.0)[1].without_gib
    before = -1.0
    for part in (0.9, 0.5, 0.3):
        fitted, budget = chosen(search, part * whole)
        assert budget.predicted_gib <= part * whole
        assert budget.added >= before
        before = budget.added
        written = structure(json.loads(json.dumps(asdict(budget))), BudgetChoice, "memory.budget", "choices.json")
        limit = Budget(gib=part * whole)
        again = with_choice(search.run, search.world, limit, written)
        assert again.document == fitted.document and again.settings == fitted.settings


def test_to_hold_some_of_a_block_costs_each_of_its_operators(search):
    free = copy.copy(search)
    free.rates = RATES._replace(chosen=0.0)
    for dear, same in zip(
        *(sorted(each.choices(("recompute",), False), key=repr) for each in (search, free)), strict=True
    ):
        operators = dear.blocks * len(search.step.calls) if dear.level.keep else 0
        assert dear.added - same.added == pytest.approx(operators * RATES.chosen)


@pytest.mark.slow
def test_only_what_is_allowed_is_chosen(search):
    whole = chosen(search, 1.0)[1].without_gib
    fitted, budget = chosen(search, 0.7 * whole, allow=("recompute",))
    (recompute,) = (each for each in fitted.features if isinstance(each, Recompute))
    assert fitted.settings.accumulate == 1 and recompute.blocks >= 1 and "recomputation of" in budget.chosen
    with pytest.raises(ConfigError, match=r"cannot be met: a rank takes at least .* \(hint: gib = "):
        chosen(search, 0.01 * whole, allow=("recompute",))


@pytest.mark.slow
def test_state_is_rounded_only_where_nothing_else_fits(search):
    with pytest.raises(ConfigError, match="cannot be met") as raised:
        chosen(search, 1e-4, allow=("accumulate", "recompute"))
    least = float(re.search(r"gib = ([\d.]+)", str(raised.value))[1])
    fitted, _ = chosen(search, least)
    assert not any(isinstance(each, optim.AdamW8bit) for each in fitted.features)
    with pytest.raises(ConfigError, match=r"optim\.adamw8bit"):
        chosen(search, 1e-4)


@pytest.mark.slow
def test_ranks_divide_the_state(run_file):
    world = World(size=2, local_size=2)
    search = BudgetSearch(load(str(run_file)).completed(world), world)
    without = chosen(search, 1.0)[1].without_gib
    fitted, budget = chosen(search, 0.97 * without, allow=("zero",))
    assert any(isinstance(each, memory.Zero) for each in fitted.features), budget.chosen


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.all_cases), 2])
def test_the_run_stays_below_it(run_file, search, tmp_path, workers):
    budget = 0.5 * chosen(search, 1.0)[1].without_gib
    flags = ["--run.folder", str(tmp_path), "--memory.budget.gib", str(budget), "--memory.tracing"]
    command = [sys.executable, "-m", "shoestring", "train", str(run_file), *flags, "--workers", str(workers)]
    subprocess.run(command, check=True, capture_output=True)  # apart: what other tests keep alive would be traced
    peak = memory.load(tmp_path / "memory.npz").main.peak
    assert peak <= budget * GIB * 1.01
    choice = json.loads((tmp_path / "choices.json").read_text())["memory.budget"]["choice"]
    assert choice["chosen"] and choice["predicted_gib"] * GIB == pytest.approx(peak, rel=0.05)
    assert "GiB at the peak of a rank" in (tmp_path / "summary.json").read_text()


@pytest.mark.slow
def test_the_least_that_would_do_is_said(run_file, capsys):
    assert main(["check", str(run_file), "--memory.budget.gib", "0.0001", "--memory.budget.allow", "[]"]) == 2
    assert "cannot be met: a rank takes at least" in capsys.readouterr().err


def test_a_script_is_told_what_to_do():
    with pytest.raises(ConfigError, match="works only in run files"), ss.Job(tiny(vocab_size=512)) as job:
        ss.compose(job, [Budget(gib=1.0), optim.AdamW()])


# -- the cost of operators -------------------------------------------------------------------------------------------


def test_levels_are_the_best_at_their_bytes():
    """Against every subset, for calls that are not of one kind."""
    calls = [
        BlockCall(f"op:{n}", seconds, nbytes)
        for n, (seconds, nbytes) in enumerate([(5.0, 100), (1.0, 80), (4.0, 300), (0.01, 1), (2.0, 0), (3.0, 30)])
    ]
    whole = sum(call.seconds for call in calls)
    found = levels(calls, most=1000)
    assert found[0].keep == () and found[0].seconds == whole
    for level in found:
        subsets = itertools.chain.from_iterable(itertools.combinations(calls, n) for n in range(len(calls) + 1))
        fitting = (each for each in subsets if sum(call.nbytes for call in each) <= level.nbytes)
        best = min(whole - sum(call.seconds for call in each if call.nbytes and call.seconds > 0.1) for each in fitting)
        assert level.seconds == pytest.approx(best)


@pytest.mark.slow
def test_the_calls_of_a_block_are_those_that_run_again():
    with torch.device("meta"):
        model = tiny(vocab_size=512)
    live = CostedTensors(RATES, "blocks.0")
    memory.predicted.predict(model, [optim.AdamW()], ss.core.task.cross_entropy, (2, 16), ranks=1, live=live)
    names = [call.name for call in live.calls]
    assert sum(name.startswith("mm:") for name in names) == 4
    again = [call.name for call in live.calls[: live.needed]]
    assert "mm:3" in again and "mm:4" not in again, "the last product is not needed for the gradients"
    views = [call for call in live.calls if call.name.startswith(("view", "_unsafe_view", "t:"))]
    assert views and not any(call.nbytes for call in views)
    assert all(call.seconds > 0 for call in live.calls)
    assert not next(call for call in live.calls if call.name == "mean:1").nbytes, "it is written over"


def test_what_is_held_is_not_computed_again():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(*features):
        job = ss.Job(tiny(vocab_size=512))
        with job, ss.compose(job, [*features, optim.AdamW()]), FlopCounterMode(display=False) as counted:
            job.step(*batches(2, 16, 1))
        return counted.get_total_flops()

    without, held, again = (
        flops(),
        flops(Recompute(saved_operators=("mm", "_scaled_dot_product_flash_attention_for_cpu"))),
        flops(Recompute()),
    )
    assert without == held < again


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"saved_operators": ("mm:0",)}, "names no operator"),
        ({"saved_operators": ("adddmm",)}, "names no operator of torch: 'adddmm'"),
        ({"blocks": 9}, "must be at most 4"),
        ({"blocks": 3, "every_nth": 2}, "must be at most 2"),
    ],
)
def test_operators_and_blocks_that_are_not_there_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said), ss.Job(tiny(vocab_size=512)) as job:
        ss.compose(job, [Recompute(**settings), optim.AdamW()])
