"""The recipe `lanes`: rendered roads, the Hough path, matches, and what the network is taught."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from shoestring.core.errors import DataError
from shoestring_recipes.lanes import hough, roads, task
from shoestring_recipes.lanes.files import describe, describe_marked
from shoestring_recipes.lanes.matching import FIRST_ROW, TOLERANCE, LaneCounts, agreement, compare, matches
from shoestring_recipes.lanes.wearing import spoilt

kinds = st.sampled_from(roads.KINDS)
seeds = st.integers(0, 2**32)


def scene(seed, wear, kind):
    return roads.render(np.random.default_rng(seed), wear, kind)


# -- the renderer ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0, 1), kinds)
def test_a_scene_says_where_its_lanes_are(seed, wear, kind):
    image, lanes, wears = scene(seed, wear, kind)
    assert image.shape == (roads.HEIGHT, roads.WIDTH) and image.dtype == np.uint8
    assert len(lanes) == len(wears) in (2, 3) and ((wears >= 0) & (wears <= 0.97)).all()
    assert np.isfinite(lanes[:, -1]).all() and np.isnan(lanes[:, :40]).all()
    starts = np.isfinite(lanes).argmax(1)
    assert (starts == starts[0]).all() and np.isfinite(lanes[:, starts[0] :]).all()
    assert np.ptp(lanes[:, starts[0]]) < np.ptp(lanes[:, -1])  # they meet in the distance
    again = scene(seed, wear, kind)
    assert np.array_equal(image, again.image)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0, 0.97), st.integers(60, 120))
def test_wear_is_the_share_of_rows_without_fresh_paint(seed, wear, rows):
    surface = np.random.default_rng(seed).normal(size=(2, rows))
    fresh = roads.fresh_paint(surface, np.array([wear, 0.5])).mean(1)
    assert np.abs(fresh - [1 - wear, 0.5]).max() <= 1.01 / rows
    worn, new = (scene(seed, level, "clean").image[100:] > 150 for level in (1.0, 0.0))
    assert worn.sum() < new.sum()


def test_a_film_shows_one_road():
    frames = roads.film(np.random.default_rng(3), 0.3, "rain", 4)
    assert len({frame.image.tobytes() for frame in frames}) == 4
    rows = np.arange(110, roads.HEIGHT)
    painted = [frame.image[rows, frame.lanes[0, rows].round().astype(int).clip(0, roads.WIDTH - 1)] for frame in frames]
    assert ((painted[0] > 150) != (painted[1] > 150)).mean() > 0.1  # the camera has moved on
    bottoms = np.stack([frame.lanes[:, -1] for frame in frames])
    assert np.ptp(bottoms, axis=0).max() < 5 and all(np.array_equal(frame.wear, frames[0].wear) for frame in frames)


def digest():
    hashed = hashlib.sha256(repr(hough.HOUGH).encode())
    for kind in roads.KINDS:
        for wear in (0.1, 0.85):
            hashed.update(scene([11, len(kind)], wear, kind).image.tobytes())
    return hashed.hexdigest()[:16]


def test_the_renderer_and_the_settings_are_as_they_were_when_the_network_was_taught():
    """The benchmark's figures hold for these: whoever changes them measures again (`benchmarks.recipes`)."""
    assert digest() == FROZEN


FROZEN = "8376adc4e4ad1e10"


# -- matches -----------------------------------------------------------------------------------------------------------

straight = st.tuples(st.floats(0, roads.WIDTH - 1), st.floats(0, roads.WIDTH - 1)).map(
    lambda ends: np.linspace(*ends, roads.HEIGHT)
)
lanes_strategy = st.lists(straight, max_size=5).map(lambda rows: np.array(rows).reshape(-1, roads.HEIGHT))


@settings(max_examples=60, deadline=None)
@given(lanes_strategy, lanes_strategy)
def test_matches_are_one_to_one_and_as_many_as_there_can_be(found, true):
    mine, theirs = matches(found, true)
    assert len(set(mine)) == len(mine) == len(set(theirs)) == len(theirs)
    close = agreement(found, true)
    assert close.shape == (len(found), len(true)) and (close[mine, theirs] > 0.85).all()
    left = np.delete(np.delete(close, mine, 0), theirs, 1)
    assert not (left > 0.85).any()
    counted = compare(found, true)
    assert (counted.detected, counted.true) == (len(found), len(true))
    assert 0 <= counted.f1 <= 1 and counted.matched <= min(counted.detected, counted.true)
    assert compare(true, true) == LaneCounts(len(true), len(true), len(true))


@pytest.mark.parametrize(
    ("off", "share", "matched"), [(9.9, 1, 1), (10.0, 1, 0), (-9.9, 1, 1), (12, 0.14, 1), (12, 0.17, 0)]
)
def test_a_match_is_ten_columns_in_85_percent_of_the_rows(off, share, matched):
    true = np.full((1, roads.HEIGHT), 100.0)
    found = true.copy()
    rows = roads.HEIGHT - FIRST_ROW
    found[:, roads.HEIGHT - round(share * rows) :] += off
    assert compare(found, true).matched == matched and TOLERANCE == 10


def test_a_double_counts_as_wrong_and_rows_outside_of_the_picture_do_not_count():
    true = np.full((1, roads.HEIGHT), 100.0)
    assert compare(np.repeat(true, 2, 0), true) == LaneCounts(1, 2, 1)
    outside = np.where(np.arange(roads.HEIGHT) < 100, true, roads.WIDTH + 5.0)
    assert compare(np.where(np.arange(roads.HEIGHT) < 100, true, np.nan), outside).matched == 1
    nowhere = np.full((1, roads.HEIGHT), np.nan)
    assert compare(true, nowhere) == LaneCounts(0, 1, 1) and compare(nowhere, true) == LaneCounts(0, 1, 1)
    assert LaneCounts().f1 == LaneCounts().precision == 1 and LaneCounts(0, 0, 2).f1 == 0
    assert LaneCounts(1, 2, 3) + LaneCounts(4, 5, 6) == LaneCounts(5, 7, 9)


# -- the Hough path ----------------------------------------------------------------------------------------------------


def counted(detected):
    total = LaneCounts()
    for lanes, one in detected:
        total += compare(lanes.columns, one.lanes)
    return total


@pytest.mark.parametrize("kind", roads.KINDS)
def test_fresh_lanes_are_found_in_every_kind_of_picture(kind):
    drawn = [scene([seed, 5], 0.1, kind) for seed in range(6)]
    total = counted([(hough.detect(one.image), one) for one in drawn])
    assert total.f1 > (0.8 if kind in ("seams", "glare") else 0.93), total


def test_quality_follows_wear():
    rng = np.random.default_rng(8)
    quality, wear = [], []
    for _ in range(20):
        one = roads.render(rng, rng.uniform(0, 0.95), "clean")
        lanes = hough.detect(one.image)
        mine, theirs = matches(lanes.columns, one.lanes)
        lane_quality = np.zeros(len(one.wear))
        lane_quality[theirs] = lanes.quality[mine]
        quality.extend(lane_quality)
        wear.extend(one.wear)
    assert spearmanr(quality, wear).statistic < -0.8


@settings(max_examples=12, deadline=None)
@given(seeds, st.sampled_from(["noise", "zeros", "full", "stripes", "edges"]))
def test_any_picture_gives_finite_lanes(seed, what):
    rng = np.random.default_rng(seed)
    image = {
        "noise": rng.integers(0, 256, (roads.HEIGHT, roads.WIDTH)),
        "stripes": np.tile(np.where(np.arange(roads.WIDTH) % int(rng.integers(4, 40)) < 2, 255, 0), (roads.HEIGHT, 1)),
        "full": np.full((roads.HEIGHT, roads.WIDTH), 255),
    }.get(what, np.zeros((roads.HEIGHT, roads.WIDTH)))
    edges = rng.random(image.shape) < rng.random() if what == "edges" else None
    lanes = hough.detect(image.astype(np.uint8), edges)
    assert lanes.columns.shape == (len(lanes.quality), roads.HEIGHT) and lanes.parts.shape == (len(lanes.quality), 5)
    assert np.isnan(lanes.columns[:, : hough.HOUGH.region]).all()
    assert np.isfinite(lanes.columns[:, hough.HOUGH.region :]).all()
    assert ((lanes.quality >= 0) & (lanes.quality <= 1)).all() and ((lanes.parts >= 0) & (lanes.parts <= 1)).all()
    assert (np.diff(lanes.quality) <= 0).all()
    if what in ("zeros", "full"):
        assert not len(lanes.quality)


def test_each_part_of_the_quality_sees_its_fault():
    """A lane that is faded, torn, off the vanishing point, or jumps has a lower part than the same lane without."""
    rows = np.arange(roads.HEIGHT)
    image = np.full((roads.HEIGHT, roads.WIDTH), 80.0)
    truth = np.stack([160 + slope * (rows - 60) for slope in (-0.9, 0.8, -0.3)])

    def drawn(paint, lanes=truth):
        picture = image.copy()
        for columns, strength in zip(lanes, paint, strict=True):
            near = np.abs(np.arange(roads.WIDTH) - columns[:, None]) < 3
            picture += near * (rows > 74)[:, None] * np.broadcast_to(strength, rows.shape)[:, None]
        return picture + np.random.default_rng(0).normal(0, 2, picture.shape)

    def parts(picture, columns, before=None):
        lanes = hough.detect(picture, before=before)
        mine, _ = matches(lanes.columns, columns[None])
        return dict(zip(hough.PARTS, lanes.parts[mine[0]], strict=True))

    whole = parts(drawn([100, 100, 100]), truth[0])
    assert min(whole.values()) > 0.65
    assert parts(drawn([25, 100, 100]), truth[0])["contrast"] < 0.2
    torn = parts(drawn([np.where((rows > 100) & (rows < 150), 0, 100), 100, 100]), truth[0])
    assert torn["continuity"] < 0.65 and torn["support"] < 0.8
    bent = np.stack([truth[0] + 0.12 * (rows - 179), truth[1], truth[2]])
    assert parts(drawn([100, 100, 100], bent), bent[0])["parallelism"] < 0.7 * whole["parallelism"]
    moved = [hough.detect(drawn([100, 100, 100], truth + 6))]
    assert parts(drawn([100, 100, 100]), truth[0], moved)["steadiness"] < 0.7 < whole["steadiness"]


def test_an_unsteady_road_scores_lower_than_a_steady_one():
    frames = roads.film(np.random.default_rng(2), 0.1, "clean", 4)
    steady: list[hough.Lanes] = []
    for frame in frames:
        steady.append(hough.detect(frame.image, before=steady))
    shaken = hough.detect(np.roll(frames[-1].image, 12, 1), before=steady[:-1])
    assert steady[-1].parts[:, 4].min() > 0.85 > shaken.parts[:, 4].max()


# -- what the network is taught ----------------------------------------------------------------------------------------


def test_samples_hold_what_the_hough_transform_found_and_nothing_else():
    train, held_out = task.data(4, 8)
    assert train.kinds == roads.TAUGHT and held_out.kinds == roads.KINDS and train.fingerprint != held_out.fingerprint
    for taught in (train, held_out):
        for index in range(4):
            sample = taught[index]
            lanes = hough.detect(sample["inputs"][0].numpy())
            known = sample["lanes"][: len(lanes.columns)].numpy()
            assert sample.keys() == {"inputs", "lanes"} and sample is taught[index]
            assert np.array_equal(known, lanes.columns.astype(np.float32)[: task.MOST], equal_nan=True)
            assert torch.isnan(sample["lanes"][len(lanes.columns) :]).all()
            assert task.is_sure(lanes) or taught is held_out
    assert torch.equal(held_out[3]["inputs"][0], torch.from_numpy(held_out.scene(3).image))


def test_bumps_lie_where_the_lanes_are():
    lanes = torch.full((2, 3, roads.HEIGHT), torch.nan)
    lanes[0, 0], lanes[0, 1] = 101.5, 401.5  # the second lies outside of the picture
    target = task.bumps(lanes)
    assert target.shape == (2, 45, 80) and not target[1].any()
    assert (target[0].argmax(-1) == 25).all() and torch.allclose(target[0].amax(-1), torch.ones(45))
    lanes[0, 0, :90] = torch.nan
    assert not task.bumps(lanes)[0, :22].any()


def test_what_is_marked_perfectly_is_found():
    """Flat lanes too, which cross several columns in a row."""
    drawn = [scene([seed, 9], 0.4, "clean") for seed in range(10)]
    lanes = [torch.from_numpy(one.lanes.astype(np.float32))[None] for one in drawn]
    total = LaneCounts()
    for one, columns in zip(drawn, lanes, strict=True):
        marks = torch.logit(0.7 * task.bumps(columns), eps=1e-4)
        image = torch.from_numpy(one.image)[None, None]
        total += compare(task.lanes_of(image, marks)[0].columns, one.lanes)
        (row,) = describe_marked(torch.full_like(marks, -9), {"inputs": image})
        assert row[0]["lane"] == 0 and row[0].keys() == {"lane", "drawn"}
        assert len(describe(marks, {"inputs": image})[0]) == len(hough.detect(one.image).quality)
    assert total.f1 > 0.97 and any(np.abs(np.diff(one.lanes[-1, -20:])).min() > 1.5 for one in drawn)


def test_a_picture_of_another_size_is_refused():
    with pytest.raises(DataError, match=r"shape \(10, 10\), not \(180, 320\)"):
        hough.detect(np.zeros((10, 10)))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(seeds)
def test_spoiling_takes_paint_from_the_lanes_it_is_given(seed):
    """On the mean of many pictures: a single one may be dimmed, or hardly worn."""
    torch.manual_seed(seed % 2**31)
    images = torch.full((48, 1, roads.HEIGHT, roads.WIDTH), 80, dtype=torch.uint8)
    lanes = torch.full((48, 2, roads.HEIGHT), torch.nan)
    lanes[:, 0] = 160.0
    images[..., 157:164] = 200
    worn = spoilt(images, lanes)
    assert worn.shape == images.shape and worn.dtype is torch.float32
    assert worn.isfinite().all() and worn.min() >= 0 and worn.max() <= 255
    contrast = lambda picture: (picture[..., 160] - picture[..., 120]).mean()  # noqa: E731
    light = spoilt(images, torch.full_like(lanes, torch.nan))  # without lanes, only light and noise
    assert contrast(light) > 40 and contrast(worn) < contrast(light) - 10


def test_the_network_looks_at_contrast_and_not_at_light():
    model = task.Marker().eval()
    image = torch.from_numpy(scene(1, 0.2, "clean").image)[None, None]
    marks = model(image)
    assert marks.shape == (1, 45, 80)
    assert torch.allclose(model(image.float() / 2 + 30), marks, atol=0.3)
    assert task.forward(model.train(), {"inputs": image, "lanes": torch.zeros(1, 6, roads.HEIGHT)}).requires_grad


@pytest.mark.slow
def test_a_missing_package_is_one_line():
    code = (
        "import sys; sys.modules['skimage'] = None\nfrom shoestring.cli import main; sys.exit(main(['check', 'lanes']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and 'pip install "shoestring[lanes]"' in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
