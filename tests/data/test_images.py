"""Files of the MNIST family: what is written is read, and broken ones are refused by name."""

import gzip
import struct

import pytest
import torch

from shoestring.core.errors import DataError
from shoestring.data.images import Images, mnist, read_idx, read_mnist
from shoestring.data.loader import Loader
from shoestring.data.sources import is_mnist


def idx(tensor, kind=8):
    return bytes([0, 0, kind, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape) + tensor.numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(256, (20, 5, 4), dtype=torch.uint8, generator=chance)
    labels = torch.arange(20, dtype=torch.uint8) % 10
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path, images, labels


def test_what_was_written_is_read_compressed_or_not(folder):
    path, images, labels = folder
    found = read_mnist(path, "train")
    assert torch.equal(found.images, images[:, None])
    assert torch.equal(found.labels, labels.long())


def test_numbers_of_several_bytes_are_read_in_the_files_order(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes([0, 0, 12, 1]) + struct.pack(">I", 3) + struct.pack(">3i", 1, -2, 70000))
    assert read_idx(path).tolist() == [1, -2, 70000]


def test_a_batch_is_the_samples_one_by_one(folder):
    images = read_mnist(folder[0], "train")
    batch = next(iter(Loader(images, batch=6)))[0]
    assert batch["inputs"].shape == (6, 1, 5, 4)
    for row, number in enumerate(batch["ids"].tolist()):
        assert torch.equal(batch["inputs"][row], images[number]["inputs"])
        assert batch["targets"][row] == images[number]["targets"]
    other = Images(images.images, images.labels.flip(0))
    assert images.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "does not fit its shape"),
        (b"\0\0\x08\x03\0\0", "does not fit"),
        (b"\x7fELF....", "not an IDX file"),
        (b"\0\0\x77\x01\0\0\0\x01a", "not an IDX file"),
    ],
)
def test_a_broken_file_is_named(folder, content, said):
    path = folder[0] / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_mnist(folder[0], "train")
    assert path.name in str(caught.value)


def test_a_truncated_archive_is_named(folder):
    path = folder[0] / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-images.*cannot be read"):
        read_mnist(folder[0], "train")


def test_images_without_their_labels_are_refused(folder):
    with pytest.raises(DataError, match=r"no `.*t10k-images"):
        read_mnist(folder[0], "t10k")
    (folder[0] / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(19, dtype=torch.uint8)))
    with pytest.raises(DataError, match="images and labels"):
        read_mnist(folder[0], "train")


def test_a_folder_of_images_is_told_from_other_sources_and_its_broken_file_is_named(folder):
    path = folder[0]
    assert is_mnist(str(path))
    assert not any(map(is_mnist, ("python-stdlib", str(path / "nowhere"), "package.module:callable", "hf:name")))
    for name in ("images-idx3-ubyte.gz", "labels-idx1-ubyte"):
        (path / f"t10k-{name}").write_bytes((path / f"train-{name}").read_bytes())
    train, test = mnist(path)
    assert torch.equal(train.images, test.images)
    broken = path / "t10k-images-idx3-ubyte.gz"
    raw = bytearray(broken.read_bytes())
    raw[len(raw) // 2] ^= 255
    broken.write_bytes(raw)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz` cannot be read"):
        mnist(path)
    broken.unlink()
    with pytest.raises(DataError, match=r"no `.*t10k-images-idx3-ubyte"):
        mnist(path)
