"""The recipe `federated`: digits of three domains, clients' shares of them, losses, probes, and pictures from files."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoestring.core.errors import ConfigError, DataError
from shoestring_recipes.federated import augment, codes, contrast, digits, files, probes, task


@pytest.fixture(scope="module", autouse=True)
def few_fonts():
    """A tenth of the rendered digits, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(digits.DOMAINS, "fonts", lambda: digits.fonts(300))
        digits.domain.cache_clear()
        yield
    digits.domain.cache_clear()


@pytest.mark.slow
def test_digits_of_all_domains_fill_the_same_square():
    for name, size in (("scans", 5000), ("uci", 1797), ("fonts", 300)):
        images, labels, groups = digits.domain(name)
        assert images.shape == (size, 1, 16, 16) and images.dtype == torch.uint8 and len(labels) == len(groups) == size
        assert set(labels.tolist()) == set(range(10)) and (images.flatten(1).amax(1) == 255).all()
        assert (images[:, :, 0] == 0).all() and (images[:, :, -1] == 0).all()  # a margin of a pixel
        filled = (images.flatten(1, 2).amax(2) > 0).sum(1).float(), (images.flatten(1, 2).amax(1) > 0).sum(1).float()
        assert torch.maximum(*filled).median() >= digits.BOX - 1
    scans, labels, _ = digits.domain("scans")
    assert (labels.reshape(10, 500) == torch.arange(10)[:, None]).all()
    zeros, ones = scans[:500].float().mean(0)[0], scans[500:1000].float().mean(0)[0]
    assert zeros[8, 8] < 60 < 150 < ones[8, 8]  # a zero is empty in its middle, a one is not
    assert not digits.normalised(np.zeros((20, 20))).any()


@pytest.mark.parametrize("left_out", ["scans", "uci", "fonts", ""])
def test_no_client_has_the_domain_that_is_left_out(left_out):
    parts, held = task.data(left_out, clients=2)
    names = [name for name in digits.DOMAINS if name != left_out]
    assert list(parts) == [f"{name}-{client}" for name in names for client in (1, 2)]
    sizes = {name: len(digits.domain(name).labels) for name in digits.DOMAINS}
    for number, name in enumerate(digits.DOMAINS):
        own = [part for key, part in parts.items() if key.startswith(name)]
        held_of_it = int((held.domains == number).sum())
        assert sum(map(len, own)) + held_of_it == sizes[name]
        assert held_of_it == sizes[name] if name == left_out else 0.1 < held_of_it / sizes[name] < 0.3
        for part in own:
            assert (part.domains == number).all() and len(part.labels.unique()) == 10
            assert 0.35 < len(part) / (sizes[name] - held_of_it) < 0.65
    fonts, groups = digits.domain("fonts").images, digits.domain("fonts").groups
    if left_out != "fonts":  # clients share no font
        own = [{image.numpy().tobytes() for image in parts[key].images} for key in ("fonts-1", "fonts-2")]
        pairs = [(int(group), image.numpy().tobytes()) for group, image in zip(groups, fonts, strict=True)]
        seen = [{group for group, image in pairs if image in images} for images in own]
        assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == len(digits.FONTS) - len(digits.FONTS) // task.HELD
    sample = held[0]
    assert {*sample} == {"inputs", "targets", "domain"} and held.__getitems__([0, 1])[1]["domain"] == held.domains[1]
    assert len(task.data(left_out, most=7)[1]) == 7


def test_wrong_arguments_are_one_line():
    for arguments, message in (({"left_out": "mnist"}, "left_out is `mnist`"), ({"clients": 0}, "clients is 0")):
        with pytest.raises(ConfigError, match=message):
            task.data(**arguments)


def test_augmentation_keeps_images_as_images():
    torch.manual_seed(0)
    x = digits.domain("scans").images[::100].float() / 255
    for changed in (augment.moved(x), augment.restroked(x), augment.restroked(x, always=True)):
        assert changed.shape == x.shape and changed.min() >= -1e-6 and changed.max() <= 1 + 1e-6
    same = (augment.restroked(x) == x).flatten(1).all(1)
    assert 0 < same.sum() < len(x) / 2 and not (augment.restroked(x, always=True) == x).flatten(1).all(1).any()
    moved = augment.moved(x)
    assert (moved != x).flatten(1).any(1).all() and (moved - x).abs().mean() < 0.3


@settings(max_examples=25)
@given(st.integers(2, 8), st.integers(0, 10**6))
def test_losses_are_their_formulas(count, seed):
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randn(count, 5, generator=generator), torch.randn(count, 5, generator=generator)
    labels = torch.randint(3, (count,), generator=generator)
    unit, further = F.normalize(one, dim=1), F.normalize(other, dim=1)
    for i, got in enumerate(contrast.by_class(one, labels).tolist()):
        similar = {j: math.exp(float(unit[i] @ unit[j]) / contrast.TEMPERATURE) for j in range(count) if j != i}
        alike = [j for j in similar if labels[j] == labels[i]]
        right = -sum(math.log(similar[j] / sum(similar.values())) for j in alike) / max(len(alike), 1)
        assert got == pytest.approx(right, abs=1e-4)
    for i, got in enumerate(contrast.by_style(one, other).tolist()):
        near = math.exp(float(unit[i] @ unit[i - 1]) / contrast.TEMPERATURE)
        away = sum(math.exp(float(unit[i] @ further[j]) / contrast.TEMPERATURE) for j in range(count))
        assert got == pytest.approx(-math.log(near / (near + away)), abs=1e-4)
    if count > 2:
        right = torch.corrcoef(torch.cat([one, other], 1).T)[:5, 5:].square().mean()
        assert float(contrast.correlation(one, other)) == pytest.approx(float(right), abs=1e-4)


def test_every_part_of_the_network_learns_and_the_switches_work():
    torch.manual_seed(0)
    images, labels, _ = (column[::300] for column in digits.domain("scans"))
    batch = {"inputs": images, "targets": labels}
    for disentangle, augmented in ((True, True), (True, False), (False, True)):
        model = task.Separated(width=8, disentangle=disentangle, augment=augmented)
        output = task.forward(model, batch)
        total, count = task.loss(output, batch)
        total.backward()
        assert count == len(labels) and output["logits"].shape == (1 + augmented, count, 10)
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
        assert any(name.startswith("style.") for name, _ in model.named_parameters()) == disentangle
        plain = task.forward(model.eval(), batch)
        assert plain.keys() == {"features", "logits"} and plain["logits"].shape == (count, 10)
        right = F.cross_entropy(plain["logits"], labels, reduction="sum")
        assert torch.allclose(task.loss(plain, batch)[0], right)
    with_it = task.Separated(width=8)
    torch.manual_seed(1)
    weighted = task.loss(task.forward(with_it, batch), batch)[0]
    with_it.weights, with_it.bottlenecks = (0.0,) * 5, (0.0, 0.0)
    torch.manual_seed(1)
    assert task.loss(task.forward(with_it, batch), batch)[0] < weighted


@pytest.mark.slow
def test_a_code_holds_the_nats_that_it_says():
    torch.manual_seed(0)
    encoder, x = codes.NoisyDigitEncoder(8, 5, spread=-1.0), torch.rand(6, 1, 16, 16)
    drawn, mean, held = encoder(x)
    spread = encoder.layers(x).chunk(2, 1)[1] - 1.0
    normal = torch.distributions.Normal(mean, (spread / 2).exp())
    right = torch.distributions.kl_divergence(normal, torch.distributions.Normal(torch.zeros(5), torch.ones(5))).sum(1)
    assert torch.allclose(held, right, atol=1e-5) and not torch.equal(encoder(x)[0], drawn)
    many = torch.stack([encoder(x)[0] for _ in range(800)])
    assert torch.allclose(many.mean(0), mean, atol=0.15)
    assert torch.allclose(many.std(0), (spread / 2).exp(), rtol=0.2)
    encoder.eval()
    before = torch.get_rng_state()
    assert torch.equal(encoder(x)[0], encoder(x)[0]) and torch.equal(torch.get_rng_state(), before)
    plain = codes.DigitEncoder(8, 5)(x)
    assert torch.equal(plain[0], plain[1]) and not plain[2].any()


def test_means_of_classes_count_and_few_samples_do_not():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (64,), generator=generator)
    drawn = [float(contrast.class_means(torch.randn(64, 4, generator=generator), labels)) for _ in range(300)]
    assert abs(np.mean(drawn)) < 3 * np.std(drawn) / 300**0.5 + 1 / 64  # the mean of all 64 is subtracted
    assert float(contrast.class_means(F.one_hot(labels, 10).float(), labels)) > 0.8
    one, few = torch.randn(7, 3, generator=generator), torch.tensor([0, 0, 0, 1, 1, 2, 4])
    scaled = (one - one.mean(0)) / (one.std(0, correction=0) + 1e-2)
    pairs = [np.mean([float(scaled[i] @ scaled[j]) for i in own for j in own if i != j]) for own in ([0, 1, 2], [3, 4])]
    assert float(contrast.class_means(one, few)) == pytest.approx(np.mean(pairs) / 3, abs=1e-5)
    assert float(contrast.class_means(one[:1], few[:1])) == 0


def test_probes_tell_what_codes_say_and_what_they_do_not():
    generator = torch.Generator().manual_seed(0)
    drawn, targets = torch.randn(600, 8, generator=generator), torch.arange(600) // 2 % 3
    assert probes.probe(drawn, targets) < 0.45
    assert probes.probe(drawn + 5 * F.one_hot(targets, 8), targets) > 0.95
    assert math.isnan(probes.probe(drawn, torch.zeros(600))) and math.isnan(probes.probe(drawn[:1], targets[:1]))
    shown = probes.sheet([torch.zeros(4, 1, 16, 16), torch.ones(4, 1, 16, 16)])
    assert shown.shape == (1, 3 * 2 * 18, 3 * 4 * 18) and shown[0, 20, 20] == 0 and shown[0, -20, -20] == 255


def test_pictures_of_digits_are_read_on_any_ground(tmp_path):
    scan = np.full((60, 80), 30, np.uint8)
    scan[10:50, 35:42] = 220
    Image.fromarray(scan).save(tmp_path / "dark.png")
    Image.fromarray(255 - scan).save(tmp_path / "paper.png")
    Image.fromarray(np.full((9, 9), 90, np.uint8)).save(tmp_path / "blank.png")
    dark, paper = (files.read(tmp_path / f"{name}.png")["inputs"] for name in ("dark", "paper"))
    assert torch.equal(dark, paper) and dark.shape == (1, 16, 16) and dark[0, 8, 8] == 255 and dark[0, 8, 0] == 0
    with pytest.raises(DataError, match=r"blank.png` shows no digit"):
        files.read(tmp_path / "blank.png")
    output = {"logits": torch.tensor([[0.0, 9.0], [9.0, 0.0]])}
    assert [row["digit"] for row in files.describe(output, {})] == [1, 0]
    assert files.describe(output, {})[0]["probability"] == pytest.approx(1, abs=1e-3)


def test_missing_packages_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(digits, "SCANS", tmp_path / "digits.png")
    with pytest.raises(ConfigError, match=r"digits.png` are missing \(hint: apt install opencv-doc\)"):
        digits.scans()
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    monkeypatch.setattr(digits, "installed", lambda name: False)
    for load, package in ((digits.uci, "scikit-learn"), (digits.fonts, "matplotlib")):
        with pytest.raises(ConfigError, match=rf"{package}, which is not installed .hint: pip install"):
            load()
