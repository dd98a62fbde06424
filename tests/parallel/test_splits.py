"""Ranks that train shards of parameters, or different parameters: norms, checkpoints, and what is refused in time."""

import shutil
from tempfile import mkdtemp

import pytest
import split_ranks

from shoestring.testing.pool import Pool, RankError


@pytest.fixture(scope="module")
def pools():
    with Pool(2, timeout=120) as two, Pool(4, timeout=120) as four:
        yield {2: two, 4: four}


def same(results, wanted, began=None):
    """Whether all ranks have the losses, norms and weights of one process from a step on."""
    for result in results:
        assert result["began"] == began
        for name in ("losses", "norms"):
            assert result[name] == pytest.approx(wanted[name][began or 0 :], abs=1e-10, rel=1e-7)
        assert result["weights"] == pytest.approx(wanted["weights"], rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beside", sorted(split_ranks.BESIDE))
@pytest.mark.parametrize("kind", ["placed", "parted"])
def test_a_step_is_that_of_one_process(pools, kind, beside, seed):
    wanted = split_ranks.train(beside=beside)
    same(pools[2].call(split_ranks.train, kind=kind, seed=seed, beside=beside), wanted)
    if seed == 0:
        same(pools[4].call(split_ranks.train, kind=kind, seed=seed, beside=beside), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["placed", "parted"])
def test_what_one_split_has_saved_another_resumes(pools, tmp_path, kind, seed):
    """The same split, another one, twice as many ranks, the other kind, and one process."""
    wanted = split_ranks.train()
    pools[2].call(split_ranks.train, kind=kind, seed=seed, folder=str(tmp_path), stop=4)
    other = {"placed": "parted", "parted": "placed"}[kind]
    for ranks, arguments in (
        (2, {"kind": kind, "seed": seed}),
        (2, {"kind": kind, "seed": seed + 10}),
        (4, {"kind": kind, "seed": seed + 20}),
        (2, {"kind": other, "seed": seed}),
        (4, {}),
    ):
        same(pools[ranks].call(split_ranks.train, folder=copied(tmp_path), resume=True, **arguments), wanted, 4)
    same([split_ranks.train(folder=copied(tmp_path), resume=True)], wanted, 4)


def copied(folder):
    """The checkpoints in a folder of their own, so that each resumes from the same step."""
    to = mkdtemp(dir=folder.parent)
    shutil.copytree(folder / "checkpoints", f"{to}/checkpoints")
    return to


def test_what_one_process_has_saved_a_split_resumes(pools, tmp_path):
    wanted = split_ranks.train()
    split_ranks.train(folder=str(tmp_path), stop=4)
    for kind in ("placed", "parted"):
        same(pools[2].call(split_ranks.train, kind=kind, folder=copied(tmp_path), resume=True), wanted, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "unreduced"}, "which no rank has as a value"),
        ({"kind": "placed", "over": "zero"}, "both own what the optimizer steps"),
        ({"kind": "placed", "over": "fsdp"}, "has chosen what the optimizer steps, and `parallel.fsdp` would replace"),
        ({"kind": "parted", "over": "zero"}, "both own what the optimizer steps"),
        ({"kind": "parted", "checkpoint": "plain"}, "saves what the first rank trains, but ranks train different"),
    ],
)
def test_what_does_not_work_together_is_refused_before_training(pools, tmp_path, arguments, message):
    with pytest.raises(RankError, match=message):
        pools[4].call(split_ranks.train, folder=str(tmp_path), **arguments)
