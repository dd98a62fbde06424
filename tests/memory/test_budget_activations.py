"""[memory.budget] on a device with a host beside it: activations are offloaded where that costs less than to recompute.

No device is there; what is imagined of one is that copies take time.
"""

import copy

import pytest

from shoestring.core.world import World
from shoestring.memory import Budget, OffloadActivations, Recompute
from shoestring.memory.step_cost import DeviceRates
from shoestring.run import load
from shoestring.training.budget import BudgetSearch
from tests.small_runs import write_run_file, write_texts

pytestmark = pytest.mark.slow
RATES = DeviceRates(flops=1e12, copied=1e12, slow=1e11, launch=3e-6, chosen=2e-5, host=1e12)
ALLOW = ("activations", "recompute")


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    tables = {
        "run": {"steps": 2, "batch": 8, "data": write_texts(folder / "texts")},
        "model": {"layers": 4, "dim": 128, "heads": 4, "kv_heads": 4, "hidden": 512},
        "data": {"tokenizer": "bytes", "sequence": 512},
        "memory": {"budget": {"gib": 1.0}},
    }
    path = write_run_file(folder / "run.toml", tables)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoestring.training.budget.measure_rates", lambda _: RATES)
        found = BudgetSearch(load(str(path)).completed(World()), World())
    found.device = "cuda"
    return found


def chosen(search, part, **settings):
    whole = search.peak(search.others, 1)
    choice = search.within(Budget(gib=part * whole / 2**30, allow=ALLOW, **settings))
    names = {"memory.offloadactivations": OffloadActivations, "memory.recompute": Recompute}
    return [kind for name, kind in names.items() if name in choice.added_features], choice


def test_a_fast_link_offloads_and_a_slow_one_recomputes(search):
    kinds, budget = chosen(search, 0.8)
    assert kinds == [OffloadActivations] and "memory.offloadactivations" in budget.chosen
    assert budget.added == 0  # all copies are overlapped
    slow = copy.copy(search)
    slow.rates = RATES._replace(host=1e6)
    kinds, _ = chosen(slow, 0.8)
    assert kinds == [Recompute]


def test_the_least_that_fits_takes_both(search):
    slow = copy.copy(search)
    slow.rates = RATES._replace(host=1e6)
    least = min(each.roughly for each in search.choices(ALLOW, False))
    kinds, budget = chosen(slow, 1.02 * least / search.peak(search.others, 1))
    assert kinds == [OffloadActivations, Recompute] and budget.added > 1


def test_copies_count_only_as_far_as_they_are_exposed(search):
    way = next(way for way in search.ways(ALLOW, False) if way.label)
    micro = search.predicted(way.features, 1).host
    step = search.step.seconds
    for seconds, exposed in ((step / 4, 0.0), (step / 2, step / 6), (step, step)):
        other = copy.copy(search)
        other.rates = RATES._replace(host=micro / seconds)
        assert other._seconds_of_activations(way, 1) == pytest.approx(exposed)


def test_on_a_cpu_nothing_is_offloaded(search):
    here = copy.copy(search)
    here.device = "cpu"
    assert [way.label for way in here.ways(ALLOW, False)] == [""]
