"""What a run trains on is prepared once in each folder, whoever sees it."""

import json
from pathlib import Path

import torch.distributed as dist

from shoestring.core.errors import ShoestringError
from shoestring.core.world import World
from shoestring.run import load
from shoestring.testing.pool import Pool
from shoestring.training import data_loading as feeds

TEXT = "\n".join(f"line {number} of {number * number}" for number in range(4000))


def fed(source, folders, size=3):
    """A scenario of hosts of one rank: who is first in its folder, who prepares, what is read, and what is left."""
    rank, prepared = dist.get_rank(), []
    run = load(source, ["--data.tokenizer", "bytes", "--data.sequence", "32"])
    world = World(rank=rank, size=size, local_size=1)
    before = feeds.prepare

    def noted(source, data, folder):
        prepared.append(not (folder / "train.tokens").exists())
        return before(source, data, folder)

    first = feeds._first_there(world, Path(folders[rank]))
    feeds.prepare = noted
    try:
        found = feeds.feed(run, world, Path(folders[rank])).corpus
        assert found is not None
        names = sorted(path.name for path in Path(folders[rank]).iterdir())
        return {"first": first, "prepared": prepared[0], "tokens": found.train.tokens, "names": names}
    except ShoestringError as error:
        return {"error": str(error)}
    finally:
        feeds.prepare = before


def test_hosts_that_share_a_folder_prepare_it_once(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(f"[run]\ndata = {json.dumps(str(tmp_path / 'text.txt'))}\n")
    files = ["held_out.tokens", "tokenizer.json", "train.tokens"]
    with Pool(3, timeout=60) as pool:
        shared = [str(tmp_path / "shared")] * 2 + [str(tmp_path / "own")]  # the last has a disk of its own
        every = pool.call(fed, source=str(tmp_path / "run.toml"), folders=shared)
        for what in ("first", "prepared"):
            assert [each[what] for each in every] == [True, False, True], what
        assert len({each["tokens"] for each in every}) == 1 and all(each["names"] == files for each in every)

        (tmp_path / "text.txt").unlink()
        every = pool.call(fed, source=str(tmp_path / "run.toml"), folders=shared)
        assert all("text.txt" in each["error"] for each in every)
