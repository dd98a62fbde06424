"""A cache of samples in memory that has less room than it was given keeps less, and says so; it is never a SIGBUS."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoestring.cli import main
from shoestring.data.cache import Cached
from tests.small_disk import needs_root, on_small_disk
from tests.small_runs import write_run_file

pytestmark = needs_root


class Drawn(torch.utils.data.Dataset):
    """Samples of 4 KB that are drawn by number."""

    asked = 0

    def __init__(self, samples=1000):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.asked += 1
        sample = torch.randn(1000, generator=torch.Generator().manual_seed(index))
        return sample, sample[:1]


def drawn():
    return Drawn(4000)


def linear():
    return torch.nn.Linear(1000, 1)


def squares(output, batch):
    return ((output - batch[1]) ** 2).sum(), torch.tensor(float(len(output)))


def write_run(folder, workers, batch):
    here = __name__
    tables = {
        "run": {
            "model": f"{here}:linear", "data": f"{here}:drawn", "loss": f"{here}:squares", "steps": 300, "batch": batch,
            "folder": str(folder / "run"),
        },
        "model": dict.fromkeys(("dim", "layers", "heads", "kv_heads", "hidden")),
        "data": {"tokenizer": None, "sequence": None, "held_out": None, "cache_memory": 0.0625, "workers": workers},
    }  # fmt: skip
    return write_run_file(folder / "run.toml", tables)


@pytest.mark.parametrize("size", [1 << 20, 64 << 10], ids=["some", "little"])
def test_what_fits_is_kept_and_the_rest_is_fetched_again(size, root, caplog):
    def work():
        with caplog.at_level(logging.WARNING):
            cached, plain = Cached(Drawn(), memory=64 << 20), Drawn()
            for index in (*range(1000), *range(1000)):
                assert torch.equal(cached[index][0], plain[index][0])
        assert 1000 < cached.dataset.asked < 2000 - size / 16384
        assert [record.message for record in caplog.records] == [
            f"`{root}`: No space left on device: data.cache_memory keeps {max(0, (size >> 20) - 1)} of 64 MiB"
        ]
        cached.close()
        assert not list(root.glob("*/*"))

    assert on_small_disk(root, size, work) == 0


def test_no_room_for_the_table_is_no_cache(root, caplog):
    def work():
        with caplog.at_level(logging.WARNING):
            cached = Cached(Drawn(100_000), memory=64 << 20)
        assert torch.equal(cached[5][0], Drawn()[5][0]) and cached.shared is None
        assert "data.cache_memory keeps 0 of 64 MiB" in caplog.text
        assert not list(root.glob("*/*"))

    assert on_small_disk(root, 1 << 20, work) == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_trains_with_a_cache_larger_than_the_memory_for_it(workers, tmp_path, capfd):
    file = write_run(tmp_path, workers, batch=8)
    command = [sys.executable, "-m", "shoestring", "train", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*sys.path, Path(__file__).parent]))}
    assert on_small_disk("/dev/shm", 8 << 20, lambda: subprocess.call(command, env=environment)) == 0
    assert capfd.readouterr().err.count("data.cache_memory keeps") == 1


@pytest.mark.slow
def test_batches_of_workers_without_room_in_memory_are_one_line(tmp_path, capfd):
    file = write_run(tmp_path, workers=2, batch=500)
    assert on_small_disk("/dev/shm", 1 << 20, lambda: main(["train", str(file), "--data.cache_memory", "0"])) == 2
    assert capfd.readouterr().err.startswith("error: no room in /dev/shm for the batches of data.workers")
