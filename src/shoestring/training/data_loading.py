"""What a run trains on: a prepared corpus, or data sets of the user's own."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.task import Batch
from shoestring.core.world import World
from shoestring.data import BYTES, Data
from shoestring.data.corpus import Corpus, prepare
from shoestring.data.mixture import prepare_mixture
from shoestring.data.sources import open_source
from shoestring.data.tokenizer import load_tokenizer
from shoestring.data.tokens import read_header
from shoestring.models import hf
from shoestring.naming import resolve
from shoestring.run import Run


@dataclass(frozen=True)
class Feed:
    """Training and held-out samples; `corpus` is None for data sets of the user's own."""

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    corpus: Corpus | None

    @property
    def offered(self) -> dict[str, Any]:
        """Arguments that models may want to know from the data."""
        if self.corpus is None:
            return {}
        return {"vocab_size": self.corpus.vocab_size, "context": self.corpus.train.sequence}

    def bits(self, *, held_out: bool) -> float:
        """Bits per byte for each nat per token of that part's text; 0 where the bytes are unknown."""
        if self.corpus is None:
            return 0.0
        part = self.corpus.held_out if held_out else self.corpus.train
        return part.targets_per_byte / math.log(2)


def feed(run: Run, world: World, folder: Path) -> Feed:
    """Read the data on every host, prepare it once in every folder, and make sure that all hosts read the same.

    Raises:
        DataError: the data is unusable, or differs between hosts.
    """
    if is_own(run):
        return _own(run, world)
    settings = world.agree(lambda: replace(run.data, tokenizer=tokenizer_of(run)))
    first = _first_there(world, folder)
    prepared = world.agree(lambda: _prepared(run, settings, folder) if first else None)
    corpus = world.agree(lambda: prepared or _prepared(run, settings, folder))
    if len(set(world.gather(corpus.fingerprint.encode()))) > 1:
        raise DataError(
            f"`{run.settings.data}` is not the same on all hosts", hint="use one Python version, or copy the files"
        )
    return Feed(corpus.train, corpus.held_out, corpus)


def _prepared(run: Run, settings: Data, folder: Path) -> Corpus:
    if isinstance(run.settings.data, str):
        return prepare(run.settings.data, settings, folder)
    return prepare_mixture(run.sources, settings, folder)


def offered(run: Run) -> dict[str, Any]:
    """What models will be told of the data, as far as that is known before it is prepared; nothing is downloaded.

    Raises:
        ConfigError: a data set of the user's own, or a tokenizer, cannot be found. DataError: a file cannot.
    """
    if is_own(run):
        resolve(run.sources[0], "run.data")
        return {}
    tokenizer, vocabulary = tokenizer_of(run), run.data.vocabulary
    if tokenizer == "bytes":
        vocabulary = BYTES + 1  # the end of a text is a token, too
    elif tokenizer != "bpe":
        vocabulary = load_tokenizer(Path(tokenizer)).vocab_size
    for source in run.sources:
        if source.endswith(".tokens"):
            vocabulary = read_header(Path(source)).vocab_size
        elif not source.startswith("hf:"):
            open_source(source, run.data.field)
    return {"vocab_size": vocabulary, "context": run.data.sequence}


def sample_bytes(sample: Any) -> int:
    """Bytes of a sample's tensors and arrays."""
    if isinstance(sample, Mapping):
        return sum(map(sample_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(sample_bytes, sample))
    return int(getattr(sample, "nbytes", 8))


def is_own(run: Run) -> bool:
    """Whether `run.data` names a data set of the user's own, `package.module:callable`.

    Raises:
        ConfigError: a mixture lists one, or lists nothing.
    """
    own = [source for source in run.sources if ":" in source and not source.startswith("hf:")]
    if not isinstance(run.settings.data, str) and (own or not run.sources):
        listed = f"`{own[0]}`" if own else "nothing"
        raise ConfigError(f"`run.data` lists {listed}", hint="a mixture takes one source of text or more")
    return bool(own)


def tokenizer_of(run: Run) -> str:
    """`data.tokenizer`, or the path of the model's where it is `model`.

    Raises:
        ConfigError: an `hf:` model, which knows its own tokens only, would be given others.
        DataError: the model's tokenizer cannot be used.
    """
    chosen, target = run.data.tokenizer, run.settings.model
    if not target.startswith(hf.PREFIX):
        if chosen == "model":
            raise ConfigError(f"`{target}` has no tokenizer of its own", hint='set data.tokenizer = "bpe"')
        return chosen
    path = hf.file_of(target.removeprefix(hf.PREFIX), "tokenizer.json")
    if path is None:
        if chosen == "model":
            raise ConfigError(f"`{target}` has no tokenizer.json", hint="write one with AutoTokenizer.save_pretrained")
        return chosen
    if chosen == "model":
        return str(path)
    if chosen in ("bpe", "bytes") or load_tokenizer(Path(chosen)).hash != load_tokenizer(path).hash:
        raise ConfigError(f"`{target}` was made with another tokenizer", hint='set data.tokenizer = "model"')
    return chosen


def _first_there(world: World, folder: Path) -> bool:
    """Whether this rank is the first of all that see this very folder: hosts may share it, or have one each."""
    token = world.decide(lambda: secrets.token_hex(4))
    mark = folder / f".prepares-{token}-{world.rank}"
    if world.local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.barrier()
    seen = [int(each.name.rpartition("-")[2]) for each in folder.glob(f".prepares-{token}-*")]
    world.barrier()
    mark.unlink(missing_ok=True)
    return world.local_rank == 0 and world.rank == min(seen)


def _own(run: Run, world: World) -> Feed:
    """`package.module:callable` returns a map-style data set, or a pair of them: training and held-out."""

    def make() -> Feed:
        made = resolve(run.sources[0], "run.data")()
        train, held_out = made if isinstance(made, tuple) else (made, None)
        for each in (train, held_out):
            if each is not None and not (hasattr(each, "__len__") and hasattr(each, "__getitem__") and len(each)):
                raise DataError(f"`{run.settings.data}` returned no data set with a length and items")
        return Feed(train, held_out, None)

    return world.agree(make)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
