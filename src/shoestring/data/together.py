"""Prepares a corpus for several ranks: each folder is prepared once, and the corpus is identical on all hosts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.world import World
from shoestring.data import Data
from shoestring.data.corpus import Corpus, prepare_source
from shoestring.data.mixture import prepare_mixture


def prepare(
    source: str | Sequence[str], folder: str | Path, data: Data | None = None, *, world: World | None = None
) -> Corpus:
    """Read the text at `source`, train or load its tokenizer, and write its tokens to `folder`; a collective.

    Of the ranks that see the same `folder`, the first prepares it while the others wait, so hosts may share a folder or
    use separate folders. Files of an earlier call are reused if the source's files and `data` are unchanged. The
    corpus's `train` and `held_out` are data sets for `Loader`. Their samples are dicts of int64 tensors of shape
    (data.sequence,): `inputs`, and `targets`, which are the inputs shifted by one token.

    Args:
        source: comma-separated paths or globs of files of text or records (.txt, .jsonl, .json, .csv, .parquet; all
            except .parquet also compressed), a pipe, a .tokens file, `hf:NAME` or `python-stdlib`. A list of sources is
            mixed in the proportion of `data.weights`.
        data: defaults to `Data()`: a BPE of 2,048 tokens, samples of 256 tokens, 5% of the documents held out.
        world: the calling ranks; defaults to the ranks that have joined the process group, or this process alone.

    Raises:
        ConfigError: a setting does not fit the sources.
            DataError: a source is missing, empty, too short or not text, or differs between hosts.
            WorldError: several ranks were started but have not joined.
            The same error is raised on all ranks.
    """
    settings, world, folder = data or Data(), world or World.current(), Path(folder)
    sources = [source] if isinstance(source, str) else list(source)
    settings.check_weights(len(sources))
    own = ("tokenizer", "template", "cache_folder")  # these settings are paths, which may differ between hosts
    common = {name: value for name, value in asdict(settings).items() if name not in own}
    world.alike({"data": common, "sources": len(sources)}, "prepare the data with the same settings on all ranks")
    if not sources:
        raise ConfigError("there is no source to prepare", hint="give one source of text or more")
    if settings.tokenizer == "model":
        hint = "give the path of the model's tokenizer.json"
        raise ConfigError('`data.tokenizer = "model"` needs a run file, which names the model', hint=hint)
    if not settings.sequence:
        raise ConfigError("`data.sequence = 0` needs a run file, which names the model", hint="give a number of tokens")

    def prepare_here() -> Corpus:
        if isinstance(source, str):
            return prepare_source(source, settings, folder)
        return prepare_mixture(sources, settings, folder)

    first = is_first_in(folder, world)
    written = world.agree(lambda: prepare_here() if first else None)
    corpus = world.agree(lambda: written or prepare_here())  # other ranks reuse the files that the first has written
    if len(set(world.gather(corpus.fingerprint.encode()))) > 1:
        named = ", ".join(sources)
        hint = "use one Python version, or copy the files"
        raise DataError(f"`{named}` is not the same on all hosts", hint=hint)
    return corpus


def is_first_in(folder: Path, world: World) -> bool:
    """Whether this rank is the first of the ranks that see the same folder; a collective.

    Host names and paths do not show whether a folder is shared, so local rank 0 of each host writes a file and looks
    for the files of the other hosts.
    """
    token = world.decide(lambda: secrets.token_hex(4))
    mark = folder / f".prepares-{token}-{world.rank}"

    def leave_mark() -> None:
        if world.local_rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                raise DataError(f"cannot write `{folder}`: {error.strerror}", hint="choose another folder") from error

    world.agree(leave_mark)
    visible = [int(path.name.rpartition("-")[2]) for path in folder.glob(f".prepares-{token}-*")]
    world.barrier()
    mark.unlink(missing_ok=True)
    return world.local_rank == 0 and world.rank == min(visible)
