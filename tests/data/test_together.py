"""A corpus is prepared once in each folder, whoever sees it, and errors are raised on all ranks."""

from pathlib import Path

import pytest
import torch.distributed as dist

import shoestring as ss
from shoestring.core.errors import ConfigError, ShoestringError, WorldError
from shoestring.core.world import World
from shoestring.data import together
from shoestring.testing.pool import Pool

TEXT = "\n".join(f"line {number} of {number * number}" for number in range(4000))


def prepared_on(source, folders, size=3):
    """A scenario of hosts of one rank: who is first in its folder, who prepares, what is read, and what is left."""
    rank, missing = dist.get_rank(), []
    settings = ss.Data(tokenizer="bytes", sequence=32)
    world = World(rank=rank, size=size, local_size=1)
    prepare_source = together.prepare_source

    def noted(source, data, folder):
        missing.append(not (folder / "train.tokens").exists())
        return prepare_source(source, data, folder)

    try:
        first = together.is_first_in(Path(folders[rank]), world)
        together.prepare_source = noted
        corpus = ss.prepare(source.replace("FOLDER", folders[rank]), folders[rank], settings, world=world)
        names = sorted(path.name for path in Path(folders[rank]).iterdir())
        return {"first": first, "prepared": missing[0], "tokens": corpus.train.tokens, "names": names}
    except ShoestringError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        together.prepare_source = prepare_source


@pytest.mark.slow
def test_hosts_that_share_a_folder_prepare_it_once(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    files = ["held_out.tokens", "tokenizer.json", "train.tokens"]
    with Pool(3, timeout=60) as pool:
        shared = [str(tmp_path / "shared")] * 2 + [str(tmp_path / "own")]  # the last has a disk of its own
        every = pool.call(prepared_on, source=str(tmp_path / "text.txt"), folders=shared)
        for what in ("first", "prepared"):
            assert [each[what] for each in every] == [True, False, True], what
        assert len({each["tokens"] for each in every}) == 1 and all(each["names"] == files for each in every)

        (tmp_path / "shared" / "text.txt").write_text(TEXT)
        (tmp_path / "own" / "text.txt").write_text(TEXT.replace("7", "8"))
        every = pool.call(prepared_on, source="FOLDER/text.txt", folders=shared)
        assert all("not the same on all hosts" in each["error"] for each in every)

        (tmp_path / "text.txt").unlink()
        every = pool.call(prepared_on, source=str(tmp_path / "text.txt"), folders=shared)
        assert all("text.txt" in each["error"] for each in every)

        (tmp_path / "blocked").write_text("a file, and no folder")
        shared[2] = str(tmp_path / "blocked" / "own")  # of one host only: all hosts hear of it
        every = pool.call(prepared_on, source="text.txt", folders=shared)
        assert all("DataError" in each["error"] and "blocked" in each["error"] for each in every)


def test_a_corpus_in_a_loop_of_ones_own_is_prepared_once_and_read_by_its_position(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    settings = ss.Data(tokenizer="bytes", sequence=32)
    corpus = ss.prepare(str(tmp_path / "text.txt"), tmp_path / "prepared", settings)
    written = (tmp_path / "prepared" / "train.tokens").stat().st_mtime_ns
    again = ss.prepare(str(tmp_path / "text.txt"), str(tmp_path / "prepared"), settings, world=World())
    assert again.fingerprint == corpus.fingerprint
    assert (tmp_path / "prepared" / "train.tokens").stat().st_mtime_ns == written
    (micro,) = next(iter(ss.Loader(corpus.train, batch=4)))
    assert micro["inputs"].shape == micro["targets"].shape == (4, 32)
    mixed = ss.prepare([str(tmp_path / "text.txt"), str(tmp_path / "text.txt")], tmp_path / "mixed", settings)
    assert len(mixed.parts) == 2


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ([], {}, "no source"),
        (["a.txt", "b.txt"], {"weights": (1.0,)}, "1 entries for 2 sources"),
        ("a.txt", {"tokenizer": "model"}, "tokenizer.json"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, source, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ss.prepare(source, tmp_path / "prepared", ss.Data(**arguments))
    assert not list(tmp_path.iterdir())


def test_ranks_that_have_not_joined_prepare_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match=r"with ss.join\(\)"):
        ss.prepare("a.txt", tmp_path)
