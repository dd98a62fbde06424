"""Checkpoints of others, in our format and torch.distributed.checkpoint's: listed, verified, shown and converted."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

from tests.hostile import hostile
from tests.hostile.frame import Act, command


def write_ours(folder: Path) -> None:
    """A run folder with one checkpoint."""
    from shoestring.checkpoint.interop import exports
    from shoestring.checkpoint.tiers.disk import Disk
    from shoestring.checkpoint.tiers.file_acts import Files

    states = {"model": {"a.weight": torch.ones(4, 4), "b": torch.zeros(2)}, "optimizer": {"step": 3, "lr": 0.1}}
    (folder / "checkpoints").mkdir(parents=True)
    exports.commit(states, 3, 0, Disk(folder / "checkpoints", Files()))


def write_dcp(folder: Path) -> None:
    import warnings

    import torch.distributed.checkpoint as torch_dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"a": torch.ones(4, 4)}, "optimizer": {"step": 3}}
        torch_dcp.save(state, checkpoint_id=folder, no_dist=True)


def generate(draw: Random, folder: Path) -> Act:
    if draw.random() < 0.4:
        write_dcp(folder / "theirs")
        act = command("checkpoint", "import", "theirs", "--to", "mine", "--as", "dcp")
    else:
        write_ours(folder / "theirs")
        verb = draw.choice(("ls", "verify", "show", "export", "dcp", "prune"))
        more = {"export": ["--to", "made"], "dcp": ["--to", "made", "--as", "dcp"], "prune": ["--keep", "1"]}
        act = command("checkpoint", "export" if verb == "dcp" else verb, "theirs", *more.get(verb, []))
    files = sorted(path for path in (folder / "theirs").rglob("*") if path.is_file())
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice(files)
        if path.is_file() and not path.is_symlink():
            hostile.tamper_file(draw, path)
    return act
