"""Under FSDP2 masks, scales, searches and losses are those of one process, and only bits of masks travel."""

import pytest
import sharded

from shoestring.sparse import AST, SRSTE, SSTE, STE, TSRSTE
from shoestring.testing.pool import Pool
from shoestring.testing.scenarios import encode

LAYERS = ("blocks.*",)


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    "feature",
    [
        TSRSTE(layers=LAYERS, refresh=2, calibrate=0.0, masked_decay=1e-2, tail=0.2),
        TSRSTE(layers=LAYERS, refresh=2, calibrate=0.5, masked_decay=1e-2, tail=0.0),
        SRSTE(layers=LAYERS, masked_decay=1e-2),
        STE(layers=LAYERS, mask="greedy"),
        SSTE(layers=LAYERS, mvue=True),
        AST(metric="wanda", refresh=2, slorb=8),
    ],
    ids=str,
)
def test_masks_and_losses_are_those_of_one_process(pool, feature):
    arguments = {"model": "tiny", "feature": encode(feature), "steps": 26}
    one = sharded.train(**arguments)
    for rank in pool.call(sharded.train, **arguments):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-9)
        assert rank["masks"] == one["masks"]
        for what in ("scales", "numbers", "kept"):
            assert rank[what] == pytest.approx(one[what], rel=1e-9)
        assert rank["dense"] == {}
        assert rank["most"] <= 16 * 4  # of half of 32 x 32 weights: one bit each
    assert one["kept"]
    assert one["masks"] or one["scales"]


@pytest.mark.slow
def test_on_sparse_units_losses_are_those_of_one_process(pool):
    """Each rank packs what FSDP has gathered for a pass, and forgets it."""
    arguments = {"feature": encode(TSRSTE(layers=LAYERS, refresh=2, calibrate=0.0, tail=0.0)), "steps": 6}
    one = sharded.train_on_units(**arguments)
    assert one["products"] and one["remembered"] == [True]
    for rank in pool.call(sharded.train_on_units, **arguments):
        assert rank["losses"] == pytest.approx(one["losses"], rel=2e-3)
        assert rank["products"] and rank["remembered"] == [False]


def test_layers_whose_shards_are_no_multiple_of_four_stay_dense(pool):
    feature = TSRSTE(layers=("even", "odd", "short"), calibrate=0.0)
    for rank in pool.call(sharded.train, model="uneven", feature=encode(feature), steps=2):
        assert rank["dense"] == {
            "odd": "its shards have 6 rows, which do not divide into groups of four",
            "short": "its shards have 2 rows, which do not divide into groups of four",
        }
        assert list(rank["masks"]) == ["even"]
    one = sharded.train(model="uneven", feature=encode(feature), steps=2)
    assert list(one["masks"]) == ["even", "odd", "short"]


def test_rows_of_uneven_shards_come_back(pool):
    first, second = pool.call(sharded.gather_what_is_uneven)
    assert [one + two for one, two in zip(first, second, strict=True)] == [
        [[2 * row, 2 * row + 1] for row in range(rows)] for rows in (8, 12, 4)
    ]
