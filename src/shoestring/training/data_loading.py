"""What a run trains on: a prepared corpus, or data sets of the user's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.leases import Priority
from shoestring.core.task import Batch
from shoestring.core.world import World
from shoestring.data import BYTES, Data, chats
from shoestring.data.cache import Cached
from shoestring.data.corpus import Corpus
from shoestring.data.images import is_mnist, mnist
from shoestring.data.sources import open_source
from shoestring.data.together import prepare
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.data.tokens import read_header
from shoestring.decode import Distill
from shoestring.models import hf
from shoestring.models.saving import model_folder
from shoestring.naming import resolve
from shoestring.run import Run

log = logging.getLogger("shoestring.data")

_SAMPLES = "samples"
"""Name of the lease of the memory in which samples are kept."""


@dataclass(frozen=True)
class DataSets:
    """Training and held-out samples; `corpus` is None for data sets of the user's own."""

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    corpus: Corpus | None

    def close(self) -> None:
        """Give back the memory of a cache."""
        if isinstance(self.train, Cached):
            self.train.close()

    def answer_calls(self, job: Job) -> None:
        """Give the memory of a cache back between two steps, once others on this host need it; see `Priority`."""
        shared, memory = self.train.shared if isinstance(self.train, Cached) else None, job.world.memory

        def answer() -> None:
            if shared is not None and _SAMPLES in memory.called_back:
                shared.give_back()
                memory.give(_SAMPLES)
                log.warning("others on this host need the memory of data.cache_memory: samples are not kept in it now")

        if _SAMPLES in memory.leases:
            job.at(Phase.CAPTURE, answer)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments for models that follow from the data: `vocab_size` and `context`."""
        if self.corpus is None:
            return {}
        return {"vocab_size": self.corpus.vocab_size, "context": self.corpus.train.sequence}

    def bits(self, *, held_out: bool) -> float:
        """Bits per byte for each nat per token of that part's text; 0 where the bytes are unknown."""
        if self.corpus is None:
            return 0.0
        part = self.corpus.held_out if held_out else self.corpus.train
        return part.targets_per_byte / math.log(2)


def open_data(run: Run, world: World, folder: Path) -> DataSets:
    """Read the data on every host, prepare it once in every folder, and make sure that all hosts read the same.

    Raises:
        DataError: the data is unusable, or differs between hosts.
    """
    if is_own(run):
        return _own(run, world)
    if run.data.cache_memory or run.data.cache_disk:
        raise ConfigError(
            "data.cache_memory and data.cache_disk are for data sets of your own; text lies on disk as it is"
        )
    settings = world.agree(lambda: replace(run.data, tokenizer=tokenizer_of(run)))
    corpus = prepare(run.settings.data, folder, settings, world=world)
    world.agree(lambda: _check_teachers(run, corpus.tokenizer))
    return DataSets(corpus.train, corpus.held_out, corpus)


def model_arguments(run: Run) -> dict[str, Any]:
    """As `DataSets.model_arguments`, as far as that is known before the data is prepared; nothing is downloaded.

    Raises:
        ConfigError: a data set of the user's own, or a tokenizer, cannot be found. DataError: a file cannot, or chats
            are for a model without a chat template.
    """
    if is_own(run):
        if not is_mnist(run.sources[0]):
            resolve(run.sources[0], "run.data")
        return {}
    tokenizer, vocabulary = tokenizer_of(run), run.data.vocabulary
    if tokenizer == "bytes":
        vocabulary = BYTES + 1  # the end of a text is a token, too
    elif tokenizer != "bpe":
        loaded = load_tokenizer(Path(tokenizer))
        vocabulary = loaded.vocab_size
        _check_teachers(run, loaded)
        if run.data.form == "chat":
            chats.template_of(chats.with_template(loaded, run.data))
    for source in run.sources:
        if source.endswith(".tokens"):
            vocabulary = read_header(Path(source)).vocab_size
        elif not source.startswith("hf:"):
            open_source(source, run.data.record_field)
    return {"vocab_size": vocabulary, "context": run.data.sequence}


def with_steps(run: Run, data: DataSets) -> Run:
    """The run with the number of steps that `run.epochs` asks for, where it does."""
    if not run.settings.epochs:
        return run
    samples = run.settings.epochs * len(cast(Sized, data.train))  # torch leaves `__len__` out of Dataset
    steps = max(1, math.ceil(samples / run.settings.batch - 1e-6))
    return replace(run, settings=replace(run.settings, steps=steps))


def sample_bytes(sample: Any) -> int:
    """Bytes of a sample's tensors and arrays."""
    if isinstance(sample, Mapping):
        return sum(map(sample_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(sample_bytes, sample))
    return int(getattr(sample, "nbytes", 8))


def is_own(run: Run) -> bool:
    """Whether `run.data` names a data set of the user's own: `package.module:callable`, or a folder of images.

    Raises:
        ConfigError: a mixture lists one, or lists nothing.
    """
    named = [source for source in run.sources if ":" in source and not source.startswith("hf:")]
    own = named + [source for source in run.sources if is_mnist(source)]
    if not isinstance(run.settings.data, str) and (own or not run.sources):
        listed = f"`{own[0]}`" if own else "nothing"
        raise ConfigError(f"`run.data` lists {listed}", hint="a mixture takes one source of text or more")
    return bool(own)


def tokenizer_of(run: Run) -> str:
    """`data.tokenizer`, or the path of the model's where it is `model`.

    Raises:
        ConfigError: an `hf:` model or one in a folder, which knows its own tokens only, would be given others.
        DataError: the model's tokenizer cannot be used.
    """
    chosen, target = run.data.tokenizer, run.settings.model
    path = _tokenizer_beside(target)
    if path is None:
        if chosen == "model":
            if ":" in target and not target.startswith(hf.PREFIX):
                raise ConfigError(f"`{target}` has no tokenizer of its own", hint='set data.tokenizer = "bpe"')
            if ":" not in target and not Path(target).is_dir():
                hint = "give the folder of a model, of a run, or hf:NAME"
                raise ConfigError(f"there is no model `{target}`: it is no folder", hint=hint)
            raise ConfigError(f"`{target}` has no tokenizer.json", hint="write one with AutoTokenizer.save_pretrained")
        return chosen
    if chosen == "model":
        return str(path)
    if chosen in ("bpe", "bytes") or load_tokenizer(Path(chosen)).hash != load_tokenizer(path).hash:
        raise ConfigError(f"`{target}` was made with another tokenizer", hint='set data.tokenizer = "model"')
    return chosen


def _check_teachers(run: Run, tokenizer: Tokenizer) -> None:
    """ConfigError where a drafter would be given other tokens than the model that it drafts for was made with."""
    for feature in run.features:
        path = _tokenizer_beside(feature.teacher) if isinstance(feature, Distill) else None
        if path and load_tokenizer(path).hash != tokenizer.hash:
            hint = f'set data.tokenizer = "{path}"'
            raise ConfigError(f"the teacher of `{feature.name}` was made with another tokenizer", hint=hint)


def _tokenizer_beside(target: str) -> Path | None:
    """The tokenizer.json of an `hf:` model, or of the folder that a model starts from."""
    if target.startswith(hf.PREFIX):
        return hf.file_of(target.removeprefix(hf.PREFIX), "tokenizer.json")
    folder = model_folder(target) if ":" not in target else None
    return path if folder and (path := folder / "tokenizer.json").is_file() else None


def _own(run: Run, world: World) -> DataSets:
    """`package.module:callable` returns a map-style data set, or a pair of them: training and held-out."""
    source = run.sources[0]

    def make() -> DataSets:
        made = mnist(Path(source)) if is_mnist(source) else resolve(source, "run.data")()
        train, held_out = made if isinstance(made, tuple) else (made, None)
        for each in (train, held_out):
            if each is not None and not (hasattr(each, "__len__") and hasattr(each, "__getitem__") and len(each)):
                raise DataError(f"`{run.settings.data}` returned no data set with a length and items")
        return DataSets(_cached(train, run.data, world), held_out, None)

    return world.agree(make)


def _cached(dataset: Dataset[Any], settings: Data, world: World) -> Dataset[Any]:
    """The data set behind the cache that the run asks for."""
    memory, disk = (int(gib * 2**30) for gib in (settings.cache_memory, settings.cache_disk))
    if memory and world.local_rank == 0 and not world.memory.take(_SAMPLES, memory, Priority.CACHE):
        log.warning("there is no memory for data.cache_memory, so samples are not kept in it: %s", world.memory)
        memory = 0
    if not (memory or disk):
        return dataset
    folder = Path(settings.cache_folder or "~/.cache/shoestring/samples").expanduser()
    return Cached(dataset, memory=memory, disk=disk, folder=folder)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
