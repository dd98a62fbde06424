"""Classifiers of images: crops and mirror images, what evaluation averages, and the sizes of the networks."""

import pytest
import torch
from torch import nn

from shoestring.core.errors import ConfigError
from shoestring.core.task import cross_entropy
from shoestring.models.images import Classifier, mirrored, moved, resnet50, small, smoothed


def test_moved_images_are_cut_out_of_padded_ones():
    torch.manual_seed(0)
    x = torch.randn(200, 2, 5, 4)
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    found, seen = moved(x, 2), set()
    for image, each in zip(padded, found, strict=True):
        places = [(r, c) for r in range(5) for c in range(5) if torch.equal(image[:, r : r + 5, c : c + 4], each)]
        assert places
        seen.update(places[:1])
    assert len(seen) == 25


def test_half_of_the_images_are_mirrored():
    torch.manual_seed(0)
    x = torch.randn(400, 1, 3, 3)
    found = mirrored(x)
    same = (found == x).flatten(1).all(1)
    flipped = (found == x.flip(-1)).flatten(1).all(1)
    assert (same ^ flipped).all()
    assert 160 < int(same.sum()) < 240


def test_an_image_and_its_mirror_image_are_judged_alike_and_nothing_is_random_then():
    torch.manual_seed(0)
    model = small(widths=(4, 8)).eval()
    images = torch.randint(256, (6, 1, 28, 28), dtype=torch.uint8)
    torch.testing.assert_close(model(images), model(images.flip(-1)))
    assert torch.equal(model(images), model(images))
    assert not torch.equal(model.train()(images), model(images))


def test_bytes_are_scaled_to_mean_zero_and_deviation_one():
    images = torch.tensor([10, 20, 30, 40], dtype=torch.uint8).view(1, 1, 2, 2)
    model = Classifier(nn.Flatten(), (25.0,), (10.0,), 0, False)
    torch.testing.assert_close(model(images), torch.tensor([[-1.5, -0.5, 0.5, 1.5]]))


def test_branches_begin_as_nothing():
    torch.manual_seed(0)
    model = small(widths=(4, 8))
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    assert sum(not each.weight.any() for each in norms) == 2


def test_the_first_convolution_looks_at_every_pixel_whatever_its_stride():
    torch.manual_seed(0)
    for stride in (1, 2, 4):
        images = torch.randn(1, 1, 28, 28, requires_grad=True)
        first = small(widths=(4, 8), stride=stride).network[0](images)
        assert first.shape[-2:] == (28 // stride, 28 // stride)
        first.sum().backward()
        assert (images.grad != 0).all()


def test_resnet_50_has_its_parameters_and_takes_images_of_imagenet():
    with torch.device("meta"):
        model = resnet50()
        logits = model.eval()(torch.empty(2, 3, 224, 224, dtype=torch.uint8))
    assert sum(each.numel() for each in model.parameters()) == 25_557_032
    assert logits.shape == (2, 1000)


def test_smoothed_losses_count_images():
    logits, targets = torch.randn(5, 10), torch.arange(5)
    total, count = smoothed(logits, {"targets": targets})
    assert count == 5
    torch.testing.assert_close(total / 5, nn.functional.cross_entropy(logits, targets, label_smoothing=0.1))


@pytest.mark.parametrize("loss", [cross_entropy, smoothed])
@pytest.mark.parametrize("label", [4, -1])
def test_a_label_that_is_no_class_is_named(loss, label):
    batch = {"targets": torch.tensor([0, 3, label, 1])}
    with pytest.raises(ConfigError) as raised:
        loss(torch.zeros(4, 4), batch)
    said = f"sample 2 of the batch has the target {label}, but the model has only the classes 0 to 3"
    assert raised.value.parts()[1] == said
