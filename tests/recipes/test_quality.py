"""The recipe `quality`: its photos and distortions, its measures, its network, and pictures of one's own."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.spatial.distance import cdist
from scipy.stats import kendalltau, spearmanr

from shoestring.core.errors import ConfigError, DataError
from shoestring.naming import resolve
from shoestring_recipes.quality import distortions, files, measures, photos, scene_statistics, task
from shoestring_recipes.quality.layers import Bottleneck, LocalContrast, LocalGlobalGate
from shoestring_recipes.quality.model import ADDED, BACKBONES, Quality


@pytest.fixture(scope="module")
def ladders():
    """The data of a fold, a crop of each photo."""
    return task.data(fold=1, seed=3, crops_each=1)


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_37_photos_are_split_by_photo_and_two_kinds_are_held_out(ladders):
    assert len(photos.photos()) == 37
    taught, held_out = ladders
    apart, _ = task.partition(1, 3)
    assert set(held_out.sources.tolist()) <= apart and not set(taught.sources.tolist()) & apart
    names = [list(distortions.KINDS)[number] for number in taught.kinds.unique()]
    left_out = distortions.FAMILIES[(1 + 3) % 5]
    assert set(names) == distortions.KINDS.keys() - set(left_out) and taught.seen.all()
    assert held_out.kinds.unique().numel() == 10
    assert {list(distortions.KINDS)[number] for number in held_out.kinds[~held_out.seen].unique()} == set(left_out)
    assert task.data(1, 3, 1)[0].fingerprint == taught.fingerprint


@given(st.integers(0, 2**31))
def test_each_photo_and_each_kind_is_held_out_in_one_fold(seed):
    parts, families = zip(*(task.partition(fold, seed) for fold in range(task.FOLDS)), strict=True)
    assert sorted(photo for part in parts for photo in part) == list(range(37))
    assert sorted(kind for family in families for kind in family) == sorted(distortions.KINDS)


def test_a_missing_package_is_one_line_that_names_it(monkeypatch):
    for package, source in photos.PACKAGES.items():
        monkeypatch.setattr(photos, "PACKAGES", {package: photos.PhotoPackage(source.hint, "/gone", source.files)})
        photos.photos.cache_clear()
        with pytest.raises(ConfigError, match=f"`{package}` is not installed") as caught:
            photos.photos()
        assert caught.value.hint == source.hint
    monkeypatch.setattr(
        photos, "PACKAGES", {"x": photos.PhotoPackage("pip install x", "no_such_package/data", "a.png")}
    )
    with pytest.raises(ConfigError, match="`x` is not installed"):
        photos.photos()
    monkeypatch.undo()
    photos.photos.cache_clear()


@pytest.mark.parametrize("kind", distortions.KINDS)
def test_stronger_levels_are_further_from_the_original(kind):
    draws = np.random.default_rng(0)
    crop = photos.crops(photos.photos()["china.jpg"], 1, draws)[0].numpy()
    made = distortions.ladder(crop, kind, 5)
    assert made.shape == (6, 96, 96) and made.dtype == np.uint8 and (made[0] == crop).all()
    assert (made == distortions.ladder(crop, kind, 5)).all()
    errors = ((made - made[0].astype(float)) ** 2).mean((1, 2))
    assert (np.diff(errors) > 0).all()


def test_a_missing_package_of_python_names_the_extra(monkeypatch):
    for module in ("distortions", "task"):
        monkeypatch.delitem(sys.modules, f"shoestring_recipes.quality.{module}")
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    with pytest.raises(ConfigError, match=r"cannot import `shoestring_recipes\.quality\.task`") as caught:
        resolve("shoestring_recipes.quality.task:data", "run.data")
    assert caught.value.hint == 'pip install "shoestring[quality]"'


def test_flat_and_tiny_photos_have_no_crops():
    assert photos.crops(torch.zeros(200, 300, dtype=torch.uint8), 3, np.random.default_rng(0)).shape == (0, 96, 96)
    assert photos.reduced(torch.zeros(10, 1280, dtype=torch.uint8)).shape == (5, 640)


def test_a_fold_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="fold is 5"):
        task.data(fold=5)


# -- measures ----------------------------------------------------------------------------------------------------------

scores = arrays(
    float, st.tuples(st.integers(1, 5), st.integers(2, 6)), elements=st.floats(-5, 5).map(lambda x: round(x, 1))
)


@given(scores)
def test_ordered_pairs_are_those_counted_one_by_one(rows):
    wanted = []
    for row in rows:
        pairs = [(row[i], row[j]) for i in range(len(row)) for j in range(i + 1, len(row))]
        wanted.append(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))
    assert np.allclose(measures.ordered_pairs(rows), wanted)
    assert np.allclose(measures.ordered_pairs(rows) + measures.ordered_pairs(-rows), 1)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="not a number"):
        measures.ordered_pairs(np.array([[1.0, np.nan]]))


@pytest.mark.slow
@given(arrays(float, st.integers(0, 30), elements=st.floats(-3, 3)), st.integers(0, 99))
def test_agreement_is_bounded_and_that_of_scipy(values, seed):
    quality = np.random.default_rng(seed).normal(size=len(values))
    agreed = measures.agreement(values, quality)
    assert all(-1.0001 <= value <= 1.0001 for value in agreed.values())
    if len(values) < 5 or np.ptp(values) == 0 or values.std() == 0:
        assert set(agreed.values()) == {0.0}
    else:
        assert agreed["srcc"] == spearmanr(values, quality).statistic
        assert agreed["krcc"] == kendalltau(values, quality).statistic


def test_the_logistic_function_undoes_a_saturated_scale():
    score = np.linspace(-3, 3, 50)
    quality = 1 / (1 + np.exp(-4 * score))
    assert measures.agreement(score, quality)["plcc"] > 0.999 > np.corrcoef(score, quality)[0, 1]
    assert measures.agreement(-score, quality)["srcc"] == pytest.approx(-1)


def test_gmsd_is_the_published_formula():
    draws = torch.Generator().manual_seed(0)
    first = torch.randint(256, (3, 20, 24), generator=draws).float()
    second = (first + 40 * torch.randn(3, 20, 24, generator=draws)).clamp(0, 255)
    assert measures.gmsd(first, first).abs().max() == 0

    def by_hand(a, b):
        def gradients(picture):
            small = picture.reshape(10, 2, 12, 2).mean((1, 3)).numpy()
            h = sum(small[k : k + 8, :10] - small[k : k + 8, 2:] for k in range(3)) / 3
            v = sum(small[:8, k : k + 10] - small[2:, k : k + 10] for k in range(3)) / 3
            return np.sqrt(h**2 + v**2)

        m, n = gradients(a), gradients(b)
        return ((2 * m * n + 170) / (m**2 + n**2 + 170)).std()

    assert measures.gmsd(first, second).numpy() == pytest.approx(
        [by_hand(a, b) for a, b in zip(first, second, strict=True)], rel=1e-4
    )


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
def test_what_is_added_begins_as_the_identity_and_is_small(backbone):
    pictures = torch.randint(256, (2, 96, 96), dtype=torch.uint8)
    made, sizes = {}, {}
    for added in ADDED:
        torch.manual_seed(0)
        model = Quality(backbone, added)
        plain = Quality(backbone, "nothing")
        model.load_state_dict(plain.state_dict(), strict=False)
        made[added] = model(pictures) - plain(pictures)
        sizes[added] = sum(parameter.numel() for parameter in model.parameters())
    assert all(torch.allclose(value, torch.zeros(2), atol=1e-5) for value in made.values())
    assert 0 < sizes["module"] - sizes["nothing"] <= 0.05 * sizes["nothing"]
    assert abs(sizes["plain"] - sizes["module"]) <= 0.05 * (sizes["module"] - sizes["nothing"])


@pytest.mark.parametrize("module", [LocalGlobalGate, Bottleneck])
def test_what_is_added_learns_from_the_first_step_on(module):
    added, x = module(16), torch.randn(2, 16, 5, 7)
    added(x).square().sum().backward()
    assert any(parameter.grad.abs().max() > 0 for parameter in added.parameters())
    assert added(torch.zeros(1, 16, 1, 1)).isfinite().all()


def test_local_contrast_is_brisques_and_takes_flat_pictures():
    pictures = torch.randint(256, (3, 20, 31), dtype=torch.uint8)
    found = LocalContrast()(pictures)
    smooth = scene_statistics._smooth
    grey = pictures.numpy().astype(float)
    mean = smooth(grey)
    deviation = np.sqrt(np.abs(smooth(grey**2) - mean**2))
    assert np.allclose(found[:, 1].numpy(), (grey - mean) / (deviation + 1), atol=1e-3)
    flat = LocalContrast()(torch.full((1, 8, 8), 255, dtype=torch.uint8))
    assert flat.isfinite().all() and flat[:, 1].abs().max() < 1e-2


@pytest.mark.slow
def test_a_frozen_backbone_keeps_the_features_of_its_run(tmp_path, ladders):
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.loop import train

    document = {
        "run": {
            "model": "shoestring_recipes.quality.model:Quality", "data": f"{__name__}:_few", "steps": 2, "batch": 2,
            "loss": "shoestring_recipes.quality.task:kind", "forward": "shoestring_recipes.quality.task:forward",
            "folder": str(tmp_path / "kinds"),
        },
        "model": {"backbone": "plain", "added": "nothing", "kinds": 10}, "optim": {"adamw": {}},
    }  # fmt: skip
    train(parse(document), World())
    frozen = Quality("plain", "module", start=str(tmp_path / "kinds"), frozen=True)
    assert not any(parameter.requires_grad for parameter in frozen.stages.parameters())
    assert all(parameter.requires_grad for parameter in frozen.added.parameters())
    from shoestring.models.loading import load_model

    taught, _ = load_model(tmp_path / "kinds")
    pairs = zip(frozen.stages.parameters(), taught.stages.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def _few():
    return torch.utils.data.Subset(task.data(0, 0, 1)[0], range(4))


def test_unknown_parts_of_the_network_are_refused():
    with pytest.raises(ConfigError, match="`resnet`"):
        Quality("resnet")


def test_a_loss_that_knows_the_order_prefers_it():
    batch = {"quality": torch.linspace(1, 0, 6)[None]}
    right, wrong = (task.ordered(batch["quality"].flip(-1) if flip else batch["quality"], batch)[0] for flip in (0, 1))
    assert right < wrong and task.ordered(torch.zeros(2, 6), {"quality": torch.zeros(2, 6)})[1] == 2


# -- classical scores --------------------------------------------------------------------------------------------------


def test_shapes_of_known_distributions_are_found():
    """An asymmetric generalised Gaussian is on a side as often as that side is wide."""
    draws = np.random.default_rng(0)
    for values, shape in ((draws.normal(size=100_000), 2), (draws.laplace(size=100_000), 1)):
        assert scene_statistics._shape(np.abs(values).mean() ** 2 / (values**2).mean()) == pytest.approx(
            shape, rel=0.05
        )
        skewed = np.where(draws.random(100_000) < 2 / 3, 2 * np.abs(values), -np.abs(values))
        found = scene_statistics._products(skewed.reshape(1, 250, 400))[0]
        assert found[0] == pytest.approx(shape, rel=0.05) and found[3] / found[2] == pytest.approx(4, rel=0.05)
        assert found[1] == pytest.approx(skewed.mean(), rel=0.05)


def test_features_are_finite_for_all_pictures():
    for pictures in (np.zeros((1, 14, 15)), np.full((2, 96, 96), 255), np.eye(20)[None] * 255):
        found = scene_statistics.features(pictures.astype(np.uint8))
        assert found.shape == (len(pictures), 40) and np.isfinite(found).all()


def test_brisques_model_ranks_levels(monkeypatch, tmp_path):
    crop = photos.crops(photos.photos()["chelsea.png"], 1, np.random.default_rng(1))[0].numpy()
    for kind in ("blur", "noise", "jpeg"):
        quality = scene_statistics.brisque(scene_statistics.features(distortions.ladder(crop, kind, 0)))
        assert measures.ordered_pairs(quality[None])[0] > 0.7
        assert -150 < quality.min() < quality.max() < 50  # its scores are from 0 to about 100
    model = scene_statistics._published()
    low, high = model["ranges"]
    statistics = np.pad((model["vectors"][:50] + 1) / 2 * (high - low) + low, ((0, 0), (0, 4)))
    kernel = np.exp(-0.05 * cdist(model["vectors"][:50], model["vectors"], "sqeuclidean"))
    assert scene_statistics.brisque(statistics) == pytest.approx(model["rho"] - kernel @ model["alpha"])
    scene_statistics._published.cache_clear()
    monkeypatch.setattr(scene_statistics, "OPENCV", tmp_path)
    with pytest.raises(ConfigError, match="`opencv-data` is not installed"):
        scene_statistics.brisque(np.zeros((1, 40)))
    for name in ("brisque_model_live.yml", "brisque_range_live.yml"):
        (tmp_path / name).write_text("%YAML:1.0\ngamma: 1\n")
    with pytest.raises(DataError, match="no BRISQUE model"):
        scene_statistics.brisque(np.zeros((1, 40)))
    scene_statistics._published.cache_clear()


# -- pictures of one's own ---------------------------------------------------------------------------------------------


def test_all_kinds_of_pictures_are_scored(tmp_path):
    grey = photos.photos()["china.jpg"][:200, :300].numpy()
    deep = grey.astype(np.uint16) * 257
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(grey).convert("CMYK").save(tmp_path / "print.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(grey).save(tmp_path / "turned.jpg", exif=exif)
    made = {path.name: files.read(path)["inputs"] for path in sorted(tmp_path.iterdir())}
    assert all(inputs.shape == (16, 96, 96) and inputs.dtype is torch.uint8 for inputs in made.values())
    assert torch.equal(made["grey.png"], made["deep.png"]) and not torch.equal(made["grey.png"], made["turned.jpg"])
    output = task.forward(Quality().eval(), {"inputs": torch.stack(list(made.values()))})
    rows = files.describe(output.detach(), {})
    assert [set(row) for row in rows] == [{"quality", "lowest", "map"}] * 4
    assert all(row["lowest"] <= row["quality"] for row in rows)
    Image.fromarray(grey[:95]).save(tmp_path / "small.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "grey.png").read_bytes()[:500])
    with pytest.raises(DataError, match="300 × 95 pixels"):
        files.read(tmp_path / "small.png")
    with pytest.raises(DataError, match=r"broken\.png"):
        files.read(tmp_path / "broken.png")
