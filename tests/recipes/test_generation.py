"""The recipe `generation`: styles, maps of edges, the networks and their losses, and folders of photos and masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.linalg import sqrtm
from torch.nn.utils.parametrize import is_parametrized

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring.data.images import Images
from shoestring_recipes.generation import folders, styles, task
from shoestring_recipes.generation.clothes import Clothes
from shoestring_recipes.generation.measures import features, frechet, sheet
from shoestring_recipes.generation.model import StyledGan
from shoestring_recipes.generation.styles import SIDE, STYLES, TAUGHT, UNTAUGHT

seeds = st.integers(0, 2**32)


def rngs(seed, count):
    return [np.random.default_rng([seed, number]) for number in range(count)]


# -- styles ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seeds, st.lists(st.integers(0, len(STYLES) - 1), max_size=6), st.sampled_from([1, 2, 64]))
def test_swatches_follow_from_their_draws(seed, kinds, side):
    drawn = styles.swatches(kinds, rngs(seed, len(kinds)), side)
    assert drawn.shape == (len(kinds), side, side) and drawn.dtype == np.float32
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert np.array_equal(drawn, styles.swatches(kinds, rngs(seed, len(kinds)), side))
    for number, kind in enumerate(kinds):  # a swatch does not depend on its neighbours
        alone = styles.swatches([kind], [rngs(seed, len(kinds))[number]], side)
        assert np.allclose(drawn[number], alone[0], atol=1e-6)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "plain"])
def test_no_place_of_a_texture_can_be_foreseen(style):
    """The mean over windows of one swatch, which is the best that a regression can do, has next to no texture."""
    drawn = torch.from_numpy(styles.swatches([STYLES.index(style)] * 8, rngs(3, 8)))[:, None]
    corners = torch.from_numpy(np.random.default_rng(0).integers(SIDE + 1, size=(60, 2)))
    views = torch.stack([styles.windows(drawn, one.expand(8, 2), SIDE) for one in corners])
    assert views.mean(0).std() < 0.3 * views.std()


def test_textures_differ_in_angle_width_phase_and_grain():
    stripes = styles.swatches([0] * 60, rngs(1, 60))
    spectrum = np.abs(np.fft.fft2(stripes - stripes.mean((1, 2), keepdims=True)))
    rows, columns = np.unravel_index(spectrum.reshape(60, -1)[:, : 32 * 64].argmax(1), (64, 64))
    frequency = np.hypot(np.minimum(rows, 64 - rows), np.minimum(columns, 64 - columns)) / 64
    low, high = styles.WIDTHS
    assert (frequency > 0.9 / high).all() and (frequency < 1.1 / low).all() and np.ptp(1 / frequency) > 2
    assert len(set(zip(rows, columns, strict=True))) > 30
    plain = styles.swatches([STYLES.index("plain")] * 60, rngs(1, 60))
    assert plain.std((1, 2)).min() < 0.03 < 0.1 < plain.std((1, 2)).max()


@settings(max_examples=30)
@given(seeds, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_windows_are_slices(seed, count, channels, side):
    rng = np.random.default_rng(seed)
    pictures = torch.from_numpy(rng.integers(0, 256, (count, channels, 12, 15)).astype(np.uint8))
    corners = torch.from_numpy(rng.integers(0, 4, (count, 2)))
    taken = styles.windows(pictures, corners, side)
    for picture, (top, left), window in zip(pictures, corners.tolist(), taken, strict=True):
        assert torch.equal(window, picture[:, top : top + side, left : left + side])


def test_a_map_has_the_silhouette_and_strong_edges():
    image = torch.zeros(2, 1, 16, 16)
    assert not styles.edge_map(image).any() and styles.edge_map(image).dtype == torch.uint8
    image[0, 0, 4:12, 4:12] = 1
    drawn = styles.edge_map(image)
    assert not drawn[1].any()
    assert (drawn[0, 0, 6:10, 6:10] == 85).all()  # inside, and no edge
    assert (drawn[0, 0, 4, 5:11] == 255).all() and (drawn[0, 0, 3, 5:11] == 170).all()
    image[0, 0, 4:12, 4:12] = 0.2
    assert set(styles.edge_map(image).unique().tolist()) == {0, 85}  # a weak edge is none


# -- data --------------------------------------------------------------------------------------------------------------


def clothes(count=24, names=STYLES, seed=1):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 1, 28, 28), generator=draw, dtype=torch.uint8)
    return Clothes(Images(images, torch.arange(count) % 10), names, seed)


def test_samples_have_all_styles_by_turns_and_do_not_depend_on_their_batch():
    samples = clothes()
    rows = samples.__getitems__(range(24))
    assert [int(row["style"]) for row in rows] == [*range(8)] * 3
    assert [int(row["targets"]) for row in rows] == [number % 10 for number in range(24)]
    for key, value in samples[13].items():
        assert torch.equal(value, rows[13][key]), key
    assert rows[0]["swatch"].shape == (1, 2 * SIDE, 2 * SIDE)
    for key in ("inputs", "image", "again"):
        assert rows[0][key].shape == (1, SIDE, SIDE) and rows[0][key].dtype == torch.uint8
    assert not torch.equal(rows[0]["image"], rows[0]["again"])
    assert samples.fingerprint != clothes(seed=2).fingerprint != clothes(names=TAUGHT, seed=2).fingerprint


def test_an_image_has_the_texture_of_its_swatch_somewhere():
    samples = clothes(8)
    white = Images(torch.full((8, 1, 28, 28), 255, dtype=torch.uint8), torch.zeros(8))
    for row in Clothes(white, STYLES, 1).__getitems__(range(8)):
        texture = (row["image"][0, 2:-2, 2:-2].float() / 255 - 1 + styles.DEPTH) / styles.DEPTH
        views = (row["swatch"].float() / 255).unfold(1, 28, 1).unfold(2, 28, 1)[0]
        assert (views - texture).abs().amax((2, 3)).min() < 0.02
    assert len(samples) == 8


@pytest.mark.slow
def test_two_styles_are_never_taught():
    train, test = task.data(held_out=16)
    assert len(train) == 60_000 and len(test) == 16 and len(UNTAUGHT) == 2
    assert {int(train[index]["style"]) for index in range(12)} == set(range(6))
    assert {int(row["style"]) for row in test.__getitems__(range(16))} == set(range(8))
    assert not torch.equal(train[0]["swatch"], task.data(seed=1)[0][0]["swatch"])


# -- model and losses --------------------------------------------------------------------------------------------------


def batch_of(samples, count):
    return samples.columns(range(count))


@pytest.fixture(params=["spade", "concatenated"])
def gan(request):
    torch.manual_seed(0)
    return StyledGan(condition=request.param, width=16)


def test_pictures_follow_map_swatch_and_window(gan):
    batch = batch_of(clothes(), 6)
    gan.eval()
    made = task.forward(gan, batch)["made"]
    assert made.shape == (6, 1, SIDE, SIDE) and ((made > 0) & (made < 1)).all()
    assert torch.equal(made, task.forward(gan, batch)["made"])
    assert torch.equal(made, task.forward(gan, {key: batch[key] for key in ("inputs", "swatch")})["made"])
    moved = batch | {"corners": torch.tensor([[0.5, 0.5], [1.0, 1.0]])}
    other = batch | {"swatch": batch["swatch"].flip(0)}
    blank = batch | {"inputs": torch.zeros_like(batch["inputs"])}
    for changed in (moved, other, blank):
        assert (task.forward(gan, changed)["made"] - made).abs().mean() > 1e-4
    several = {key: torch.stack([batch[key], batch[key].flip(0)], 1) for key in ("inputs", "swatch")}
    together = task.forward(gan, several)["made"].unflatten(0, (6, 2))
    assert torch.allclose(together[:, 0], made, atol=1e-5) and torch.allclose(together[:, 1].flip(0), made, atol=1e-5)


def test_each_loss_leaves_the_other_network_alone(gan):
    gan.train()
    batch = batch_of(clothes(), 6)

    def gradients(*keys):
        gan.zero_grad()
        output = task.forward(gan, batch)
        sum(output[key].sum() for key in keys).backward()
        parts = {"generator": 0.0, "discriminator": 0.0}
        for name, weight in gan.named_parameters():
            parts[name.split(".")[0]] += 0.0 if weight.grad is None else float(weight.grad.abs().sum())
        return parts

    taught = gradients("real", "fake")
    assert taught["generator"] == 0 < taught["discriminator"]
    taught = gradients("fooled", "means", "light")
    assert taught["discriminator"] == 0 < taught["generator"]
    output = task.forward(gan, batch)
    assert torch.allclose(output["fake"], output["fooled"], atol=0.05)  # the same pictures, one power iteration later


def test_the_discriminators_gain_is_bounded(gan):
    gan.train()
    batch = batch_of(clothes(), 6)
    for _ in range(20):
        task.forward(gan, batch)
    layers = [module for module in gan.discriminator.modules() if is_parametrized(module)]
    assert len(layers) == 6  # all but the last ones
    for layer in layers:
        assert torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() == pytest.approx(1, abs=0.1)


def test_the_loss_is_the_hinge():
    real, fake, fooled = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[-2.0, 0.0]] * 2), torch.ones(2, 2)
    output = {"real": real, "fake": fake, "fooled": fooled}
    output |= {"means": torch.tensor([0.0, 0.05]), "light": torch.tensor([0.1, 0.0])}
    total, count = task.hinge(output, {})
    assert count == 2 and float(total) == pytest.approx(0.5 + 0.5 + 0.5 - 2 + 1 + 1)


def test_light_is_compared_where_textures_average_out(gan):
    batch = batch_of(clothes(), 6) | {"image": torch.full((6, 1, SIDE, SIDE), 128, dtype=torch.uint8)}
    gan.generator.forward = lambda maps, textures: (
        0.502 + 0.3 * ((torch.arange(SIDE) // 2) % 2 * 2 - 1).expand(6, 1, 32, 32)
    )
    assert task.forward(gan.eval(), batch)["light"].max() < 0.001


def test_labels_are_the_nearest_colours():
    gan = StyledGan(colors=["000000", "ff0000", "0000ff"], channels=3, size=8, width=16)
    masks = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    masks[0, 0, :, 8:] = 250
    masks[1, 1] = 200
    labels, unknown = gan.labels(masks)
    assert labels.shape == (2, 3, 8, 8) and (labels.sum(1) == 1).all() and unknown.tolist() == [False, True]
    assert (labels[0, 0, :, :4] == 1).all() and (labels[0, 1, :, 4:] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"condition": "spad"}, "model.condition is `spad`"),
        ({"size": 30}, "model.size is 30"),
        ({"size": 4}, "model.size is 4"),
        ({"colors": ["red"]}, "model.colors is"),
        ({"colors": ["00", "0000ff"]}, "model.colors is"),
        ({"colors": []}, "model.colors is empty"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, said):
    with pytest.raises(ConfigError, match=said):
        StyledGan(**arguments)


# -- measures ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seeds, st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_the_distance_is_frechets(seed, first_count, second_count, width):
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(first_count, width)), rng.normal(1, 2, size=(second_count, width))
    distance = float(frechet(torch.from_numpy(first), torch.from_numpy(second)))
    covariances = [np.cov(one.T, ddof=0).reshape(width, width) for one in (first, second)]
    root = np.real(np.trace(sqrtm(covariances[0] @ covariances[1] + 1e-14 * np.eye(width))))
    reference = ((first.mean(0) - second.mean(0)) ** 2).sum() + sum(map(np.trace, covariances)) - 2 * root
    assert distance == pytest.approx(reference, abs=1e-4)
    assert float(frechet(torch.from_numpy(first), torch.from_numpy(first[::-1].copy()))) == pytest.approx(0, abs=1e-6)


@pytest.mark.filterwarnings("error")
def test_the_distance_of_no_pictures_is_unknown():
    none, one = torch.zeros(0, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    assert frechet(none, one).isnan() and frechet(one, none).isnan() and frechet(one, one + 2) == 12


def test_random_features_tell_styles_apart():
    samples = clothes(64)
    rows = samples.columns(range(64))
    image, again = features(rows["image"] / 255), features(rows["again"] / 255)
    bare = features(rows["inputs"] / 255)
    assert image.shape == (64, 64) and frechet(image, again) < 0.1 * frechet(image, bare)
    assert features(torch.zeros(2, 3, 8, 8)).shape == (2, 64)


def test_a_sheet_holds_pictures_of_any_form():
    row = [torch.zeros(1, 64, 64, dtype=torch.uint8), torch.ones(3, 8, 8), torch.full((1, 16, 16), float("nan"))]
    assert sheet([row, row]).shape == (3, 64, 96) and sheet([row]).dtype == torch.uint8


# -- folders -----------------------------------------------------------------------------------------------------------


def photo(shape=(40, 60)):
    """A photo whose left half is red and whose right is blue, and its mask."""
    pixels = np.zeros((*shape, 3), np.uint8)
    pixels[:, : shape[1] // 2, 0], pixels[:, shape[1] // 2 :, 2] = 200, 200
    return pixels, (pixels > 0).astype(np.uint8) * 255


@pytest.fixture
def pairs(tmp_path):
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    pixels, mask = photo()
    for name in ("a", "b", "c"):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{name}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}.png")
    return tmp_path


def test_pairs_are_the_middle_squares_and_keep_their_colours(pairs):
    train, held_out = folders.data(str(pairs), size=8)
    assert (len(train), len(held_out)) == (2, 1) and set(train.names) | set(held_out.names) == {"a", "b", "c"}
    row = train[0]
    assert {key: tuple(value.shape) for key, value in row.items()} == {
        "inputs": (3, 8, 8), "image": (3, 8, 8), "again": (3, 8, 8), "swatch": (3, 16, 16), "style": (),
    }  # fmt: skip
    assert (row["inputs"][0, :, :4] == 255).all() and (row["inputs"][2, :, 4:] == 255).all()
    assert (row["image"][0, :, :3] == 200).all() and len(row["inputs"].flatten(1).unique(dim=1).T) == 2
    assert train.fingerprint != held_out.fingerprint or train.names == held_out.names


def test_photos_and_masks_of_all_forms_are_right(pairs):
    pixels, mask = photo()
    grey = np.repeat(pixels.max(2, keepdims=True), 3, 2)
    folder, masks = pairs / "photos", pairs / "masks"
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(np.rot90(pixels, -1).copy()).save(folder / "turned.png", exif=exif)
    Image.fromarray(np.rot90(mask, -1).copy()).save(masks / "turned.png", exif=exif)
    Image.fromarray(pixels).convert("CMYK").save(folder / "print.tiff")
    Image.fromarray(mask).convert("CMYK").save(masks / "print.tiff")
    Image.fromarray(pixels.max(2).astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(mask).quantize(4).save(masks / "deep.png")  # a palette
    Image.fromarray(pixels.max(2)).save(folder / "grey.png")
    Image.fromarray(np.repeat(np.repeat(mask, 3, 0), 3, 1)).save(masks / "grey.png")  # another size, the same shape
    (folder / ".hidden.png").write_bytes(b"")
    both = folders.data(str(pairs), size=8)
    rows = {name: part[index] for part in both for index, name in enumerate(part.names)}
    assert set(rows) == {"a", "b", "c", "turned", "print", "deep", "grey"}
    plain = rows["a"]
    for name, row in rows.items():
        assert (row["inputs"].int() - plain["inputs"].int()).abs().max() <= 3, name
        expected = torch.from_numpy(grey[0, 30 - 20 : 30 + 20]) if name in ("deep", "grey") else None
        if expected is None:
            assert (row["image"].int() - plain["image"].int()).abs().max() <= 3, name
        else:
            assert (row["image"].int() - 200).abs().max() <= 3, name


def test_what_cannot_be_used_is_named(pairs):
    Image.fromarray(photo()[1][:20]).save(pairs / "masks" / "a.png")
    (pairs / "photos" / "b.png").write_bytes((pairs / "photos" / "b.png").read_bytes()[:60])
    with pytest.raises(
        DataError,
        match=r"2 of 3 pairs cannot be used: `a.png` has 60 × 40 pixels and its mask 60 × 20; `.*b\.png` is no",
    ):
        folders.data(str(pairs))
    (pairs / "masks" / "b.png").unlink()
    (pairs / "masks" / "c.png").unlink()
    with pytest.raises(DataError, match="has 1 photos with masks, of 3 in `photos` and 1 in `masks`"):
        folders.data(str(pairs))
    with pytest.raises(DataError, match="is no folder"):
        folders.data(str(pairs / "photos"))


def test_a_drawing_is_read_in_every_style(tmp_path):
    (tmp_path / "drawings").mkdir()
    pixels = np.full((56, 56), 255, np.uint8)
    pixels[14:42, 14:42] = 90  # on white paper
    Image.fromarray(pixels).save(tmp_path / "drawings" / "box.png")
    sample = folders.read_drawing(tmp_path / "drawings" / "box.png")
    assert sample["inputs"].shape == (8, 1, SIDE, SIDE) and sample["swatch"].shape == (8, 1, 64, 64)
    assert (sample["inputs"][0, 0, 12:20, 12:20] == 85).all() and not sample["inputs"][0, 0, 2:6].any()
    (tmp_path / "own").mkdir()
    (tmp_path / "styles").mkdir()
    Image.fromarray(pixels).save(tmp_path / "styles" / "mine.png")
    Image.fromarray(pixels).save(tmp_path / "own" / "box.png")
    sample = folders.read_drawing(tmp_path / "own" / "box.png")
    assert sample["swatch"].shape == (1, 1, folders.READ, folders.READ)
    made = task.forward(StyledGan(width=16).eval(), {key: value[None] for key, value in sample.items()})["made"]
    assert made.shape == (1, 1, SIDE, SIDE)


def test_masks_of_a_model_of_colours_need_a_style(tmp_path):
    (tmp_path / "masks").mkdir()
    Image.fromarray(photo()[1]).save(tmp_path / "masks" / "a.png")
    with pytest.raises(ShoestringError, match="there are no pictures in"):
        folders.read_mask(tmp_path / "masks" / "a.png")
    (tmp_path / "two" / "masks").mkdir(parents=True)
    (tmp_path / "two" / "styles").mkdir()
    for name in ("x", "y"):
        Image.fromarray(photo()[0]).save(tmp_path / "two" / "styles" / f"{name}.jpg")
    Image.fromarray(photo()[1]).save(tmp_path / "two" / "masks" / "a.png")
    sample = folders.read_mask(tmp_path / "two" / "masks" / "a.png")
    assert sample["inputs"].shape == (2, 3, 512, 512) and sample["swatch"].shape == (2, 3, 512, 512)
    for colors, errors in ((["ff0000", "0000ff"], False), (["00ff00", "ffffff"], True)):
        gan = StyledGan(colors=colors, channels=3, size=16, width=16).eval()
        batch = {key: value[None] for key, value in sample.items()}
        (rows,) = folders.describe(task.forward(gan, batch), batch)
        assert ("error" in rows[0]) == errors and (errors or [row["style"] for row in rows] == [1, 2])
