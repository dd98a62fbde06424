"""The checkpoint cache in somebody else's program on several ranks: what they hold in shards, and each for itself."""

import shutil

import attached_ranks
import pytest

from shoestring.testing.pool import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as ranks:
        yield ranks


@pytest.mark.slow
def test_a_sharded_optimizer_resumes_on_as_many_ranks_and_on_others(pool, tmp_path):
    """A fresh optimizer has no state that says how it is placed: it lies as its parameters do."""

    def trained(name, first, stop):
        return pool.call(attached_ranks.sharded, folder=str(tmp_path / name), first=first, stop=stop)[0]

    through = trained("through", 0, 6)
    saved = trained("struck", 0, 4)["ended"]
    shutil.copytree(tmp_path / "struck", tmp_path / "fewer")
    again = trained("struck", 4, 6)
    assert again["begun"] == saved and again["ended"] == through["ended"]

    alone = attached_ranks.sharded(folder=str(tmp_path / "fewer"), first=4, stop=5)
    assert alone["begun"] == saved
    more = trained("fewer", 5, 6)
    assert more["begun"] == alone["ended"]


@pytest.mark.slow
def test_factors_of_moments_resume_as_a_fresh_optimizer_would_make_them(pool, tmp_path):
    """They have other shapes than their parameters; whole beside a sharded gradient they would end the first step."""

    def trained(name, first, stop):
        return pool.call(attached_ranks.factored, folder=str(tmp_path / name), first=first, stop=stop)[0]

    through = trained("through", 0, 6)
    saved = trained("struck", 0, 4)["ended"]
    again = trained("struck", 4, 6)
    assert any(name.endswith(".rows") for name in saved)
    assert again["begun"] == saved and again["ended"] == through["ended"]


@pytest.mark.parametrize("program", [attached_ranks.replicated, attached_ranks.in_a_job])
def test_buffers_that_differ_between_replicas_are_those_of_each_rank(pool, tmp_path, program):
    """BatchNorm's statistics are of what each rank saw last; DDP broadcasts the first rank's before the next step."""

    def trained(name, first, stop):
        return pool.call(program, folder=str(tmp_path / name), first=first, stop=stop)

    through, saved = trained("through", 0, 6), trained("struck", 0, 4)
    assert saved[0]["ended"]["1.running_mean"] != saved[1]["ended"]["1.running_mean"]
    again = trained("struck", 4, 6)
    assert [each["begun"] for each in again] == [each["ended"] for each in saved]
    assert [each["ended"] for each in again] == [each["ended"] for each in through]
    alone = attached_ranks.replicated(folder=str(tmp_path / "struck"), first=6, stop=7)
    assert alone["begun"] == again[0]["ended"]  # on another number of ranks all resume from the first one's


@pytest.mark.parametrize("sharded", [
    pytest.param(False, id="ddp"), pytest.param(True, id="fsdp", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_checkpoint_in_one_file_holds_the_buffers_of_each_rank(pool, tmp_path, sharded):
    def trained(name, first, stop):
        folder = str(tmp_path / name)
        return pool.call(attached_ranks.in_one_file, folder=folder, first=first, stop=stop, sharded=sharded)

    through, saved = trained("through", 0, 6), trained("struck", 0, 4)
    assert saved[0]["ended"]["1.running_mean"] != saved[1]["ended"]["1.running_mean"]
    again = trained("struck", 4, 6)
    assert [each["begun"] for each in again] == [each["ended"] for each in saved]
    assert [each["ended"] for each in again] == [each["ended"] for each in through]
    if not sharded:
        alone = attached_ranks.in_one_file(folder=str(tmp_path / "struck"), first=6, stop=7, sharded=False)
        assert alone["begun"] == again[0]["ended"]  # on another number of ranks all resume from the first one's
