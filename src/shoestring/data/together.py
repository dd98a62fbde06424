"""Corpora that several ranks read: prepared once in every folder, and the same on all hosts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
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

    The first rank of all that see `folder` prepares it while the others wait, so hosts may share the folder or have
    one each. What an earlier call has prepared there is used again while the source's files and `data` are the same.
    `train` and `held_out` of the corpus are data sets for `Loader`. Their samples are dicts of int64 tensors of shape
    (data.sequence,): `inputs`, and `targets`, which are the tokens after them.

    Args:
        source: paths or globs of .txt, .jsonl and .parquet files with commas between them, a .tokens file, `hf:NAME`
            or `python-stdlib`. A list of sources is mixed in the proportion of `data.weights`.
        data: defaults to `Data()`: a BPE of 2,048 tokens, samples of 256 tokens, 5% of the documents held out.
        world: the ranks that call it; defaults to those that have joined, or this process alone.

    Raises:
        ConfigError: a setting does not fit the sources. DataError: a source is missing, empty, too short or not text,
            or differs between hosts. WorldError: several ranks were started, and have not joined. On all ranks alike.
    """
    settings, world, folder = data or Data(), world or World.current(), Path(folder)
    sources = [source] if isinstance(source, str) else list(source)
    settings.check_weights(len(sources))
    if not sources:
        raise ConfigError("there is no source to prepare", hint="give one source of text or more")
    if settings.tokenizer == "model":
        hint = "give the path of the model's tokenizer.json"
        raise ConfigError('`data.tokenizer = "model"` needs a run file, which names the model', hint=hint)

    def prepared() -> Corpus:
        if isinstance(source, str):
            return prepare_source(source, settings, folder)
        return prepare_mixture(sources, settings, folder)

    first = is_first_in(folder, world)
    mine = world.agree(lambda: prepared() if first else None)
    corpus = world.agree(lambda: mine or prepared())
    if len(set(world.gather(corpus.fingerprint.encode()))) > 1:
        named = ", ".join(sources)
        hint = "use one Python version, or copy the files"
        raise DataError(f"`{named}` is not the same on all hosts", hint=hint)
    return corpus


def is_first_in(folder: Path, world: World) -> bool:
    """Whether this rank is the first of all that see this very folder; a collective."""
    token = world.decide(lambda: secrets.token_hex(4))
    mark = folder / f".prepares-{token}-{world.rank}"
    world.agree(lambda: _leave(mark) if world.local_rank == 0 else None)
    seen = [int(path.name.rpartition("-")[2]) for path in folder.glob(f".prepares-{token}-*")]
    world.barrier()
    mark.unlink(missing_ok=True)
    return world.local_rank == 0 and world.rank == min(seen)


def _leave(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise DataError(f"cannot write `{mark.parent}`: {error.strerror}", hint="choose another folder") from error
