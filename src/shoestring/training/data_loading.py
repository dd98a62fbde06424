"""Open the data of a run: prepare a text corpus, or call the user's function that returns data sets."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from shoestring.core.errors import ConfigError, DataError
from shoestring.core.feature import Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.leases import Priority
from shoestring.core.task import Batch, Collate, Repeated
from shoestring.core.world import World
from shoestring.data import BYTES, Data, ForClients
from shoestring.data.built_in_templates import with_template
from shoestring.data.cache import Cached
from shoestring.data.clients import Clients
from shoestring.data.corpus import Corpus
from shoestring.data.images import mnist
from shoestring.data.loader import stacked
from shoestring.data.piped import is_piped
from shoestring.data.sources import is_mnist, open_source
from shoestring.data.together import prepare
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.data.tokens import read_header
from shoestring.models import hf
from shoestring.models.description import sizes
from shoestring.models.loading import build_model, outline
from shoestring.models.saving import model_folder
from shoestring.models.tokenizer_files import find_tokenizer, missing_tokenizer
from shoestring.naming import harness_tasks, resolve
from shoestring.run import Run, Settings
from shoestring.training.packing import faults_of_layouts, laid_out
from shoestring.training.user_code import UserCode

log = logging.getLogger("shoestring.data")

_SAMPLES = "samples"
"""Name of the host-memory lease of the sample cache."""


@dataclass(frozen=True)
class DataSets:
    """Training and held-out samples; `corpus` is None for data sets that the user's own code returned."""

    train: Dataset[Any]
    held_out: Dataset[Any] | None
    corpus: Corpus | None
    collate: Collate | None = None
    """Function that makes a batch from a list of samples; None stacks the samples."""
    of_ranks: tuple[tuple[int, int], ...] = ()
    """(number of training samples, number of held-out samples) of each rank; empty if all ranks have the same data."""

    def close(self) -> None:
        """Free the memory of the sample cache."""
        if isinstance(self.train, Cached):
            self.train.close()

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of training samples, and number of held-out samples."""
        train, held_out = (0 if part is None else len(cast(Sized, part)) for part in (self.train, self.held_out))
        return train, held_out  # torch leaves `__len__` out of Dataset

    @property
    def epoch(self) -> int:
        """Number of samples that all ranks together train on in an epoch."""
        if self.of_ranks:
            return len(self.of_ranks) * max(samples for samples, _ in self.of_ranks)
        return self.lengths[0]

    def first_batch(self, samples: int) -> Batch:
        """A batch of the first samples of the training data, to learn its shapes."""
        length, _ = self.lengths
        return (self.collate or stacked)([self.train[index % length] for index in range(samples)])

    def answer_calls(self, job: Job) -> None:
        """Free the sample cache after the step in which more urgent uses on this host need its memory (see
        `Priority`)."""
        shared, memory = self.train.shared if isinstance(self.train, Cached) else None, job.world.memory

        def answer() -> None:
            if shared is not None and _SAMPLES in memory.called_back:
                shared.give_back()
                memory.give(_SAMPLES)
                log.warning("other processes need the memory of data.cache_memory: samples are no longer cached in it")

        if _SAMPLES in memory.leases:
            attachments_of(job).at(Phase.CAPTURE, answer)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of the model that follow from the data: `vocab_size` and `context`; empty for user data sets."""
        if self.corpus is None:
            return {}
        return {"vocab_size": self.corpus.vocab_size, "context": self.corpus.train.sequence}

    def bits(self, *, held_out: bool) -> float:
        """Factor that converts nats per token to bits per byte; 0 for data sets that are not text."""
        if self.corpus is None:
            return 0.0
        part = self.corpus.held_out if held_out else self.corpus.train
        return part.targets_per_byte / math.log(2)


def open_data(run: Run, world: World, folder: Path, code: UserCode) -> DataSets:
    """Open the data, and check that it is equal on all hosts; at first use, prepare it in `folder`. A collective.

    Raises:
        DataError: the data is unusable, or differs between hosts.
    """
    check_form(run)
    if run.has_own_data:
        return replace(_own(run, world), collate=code.collate)
    settings = world.agree(lambda: replace(run.data, tokenizer=tokenizer_of(run)))
    corpus = prepare(run.settings.data, folder, settings, world=world)
    world.agree(lambda: check_teachers(run, corpus.tokenizer))
    own_forward = bool(run.settings.forward)
    corpus = laid_out(corpus, world.decide(lambda: faults_of_layouts(code.model, corpus, own_forward=own_forward)))
    return DataSets(corpus.train, corpus.held_out, corpus, code.collate)


def check_form(run: Run) -> None:
    """Check that the settings of a run suit the form of its data: a text corpus, or the user's own data sets.

    Raises:
        ConfigError, DataError: a setting does not work with the form of the run's data.
    """
    own = run.has_own_data
    if own and run.settings.baselines:
        raise DataError("`run.baselines` works only on text, which this data set is not", hint="remove run.baselines")
    if own and run.settings.prompts:
        raise DataError("`run.prompts` works only with text, which this data set is not", hint="remove run.prompts")
    if own and harness_tasks(run.settings.evaluate) is not None:
        hint = "name a function of your own: `package.module:callable`"
        raise DataError("`run.evaluate` names tasks on text, and this data set has no tokenizer", hint=hint)
    forms = {feature.data_form: feature.name for feature in run.features if feature.data_form}
    if not own and forms and run.data.form not in forms:
        form, name = next(iter(forms.items()))
        raise ConfigError(f'`{name}` does not learn from data.form "{run.data.form}"', hint=f'set data.form = "{form}"')
    if not own and not forms and run.data.form in ("preference", "rated"):
        hint = "add [preference.dpo]" if run.data.form == "preference" else "add [preference.kto]"
        raise ConfigError(f'data.form is "{run.data.form}", and no feature learns from it', hint=hint)
    if run.data.per_rank and (not own or is_mnist(run.sources[0])):
        hint = "let run.data name a function of (rank, number of ranks)"
        raise ConfigError("data.per_rank is only for data sets of your own", hint=hint)
    if run.data.clients and (not own or is_mnist(run.sources[0])):
        hint = "let run.data name a function that returns a dict of clients' names and data sets"
        raise ConfigError("data.clients is only for data sets of your own", hint=hint)
    if run.data.clients and not any(isinstance(feature, ForClients) for feature in run.features):
        raise ConfigError("data.clients is set, and no feature trains clients in turn", hint="add [comm.fedavg]")
    if run.data.arguments and (not own or is_mnist(run.sources[0])):
        raise ConfigError("[data.arguments] is for a function of your own", hint="let run.data name a function")
    if not own and (run.data.cache_memory or run.data.cache_disk):
        raise ConfigError(
            "data.cache_memory and data.cache_disk are only for data sets of your own; prepared text needs no cache"
        )


def model_arguments(run: Run) -> dict[str, Any]:
    """Predict `DataSets.model_arguments` as far as possible before the data is prepared; downloads nothing.

    Raises:
        ConfigError: the user's own data set, or a tokenizer, does not exist.
        DataError: a file does not exist, or there is no chat template of this name.
    """
    if run.has_own_data:
        if not is_mnist(run.sources[0]):
            resolve(run.sources[0], "run.data", run.trusts["run.data"])
        return {}
    tokenizer, vocabulary = tokenizer_of(run), run.data.vocabulary
    if tokenizer == "bytes":
        vocabulary = BYTES + 1  # 256 bytes and the end-of-text token
    elif tokenizer != "bpe":
        loaded = load_tokenizer(Path(tokenizer))
        vocabulary = loaded.vocab_size
        check_teachers(run, loaded)
        if run.data.form != "text":
            with_template(loaded, run.data.template)
        else:
            loaded.check_corpus()
    for source in run.sources:
        if source.endswith(".tokens"):
            vocabulary = read_header(Path(source)).vocab_size
        elif not source.startswith("hf:") and not is_piped(source):
            open_source(source, run.data.record_field)
    return {"vocab_size": vocabulary, "context": run.data.sequence}


def outlined_data(run: Run, code: UserCode) -> tuple[dict[str, Any], DataSets | None]:
    """The model's arguments (see `model_arguments`) and the user's own data sets, for predicting a step.

    Text is not prepared, so for text the data sets are None.

    Raises:
        ConfigError, DataError: the data does not exist.
    """
    if run.has_own_data:
        return {}, replace(own_data(run), collate=code.collate)
    return model_arguments(run), None


def sequence_of(settings: Data, model: str, arguments: Mapping[str, Any]) -> int:
    """Number of tokens in a sample: `data.sequence`, or the limit of the model's configuration if the setting is 0.

    Args:
        model: the value of `run.model`; empty if it names code that may not be imported.
        arguments: the table [model].

    Raises:
        ConfigError, CheckpointError: the model does not exist, or its folder is damaged.
    """
    return settings.sequence or settings.longest(context_of(model, arguments))


def context_of(target: str, arguments: Mapping[str, Any]) -> int | None:
    """Context length of `run.model` in tokens, from its configuration after `arguments` have replaced entries in it.

    None if the model sets no limit, if there is no model, or if `target` is a callable, which takes it from the data.

    Raises:
        ConfigError, CheckpointError: the `hf:` model does not exist, or its folder is damaged.
    """
    if not target or (":" not in target and model_folder(target) is None):
        return None
    if not target.startswith(hf.PREFIX):
        return sizes(outline(target))[0]
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return sizes(build_model(target, arguments, {}, weights=False))[0]


def with_steps(settings: Settings, data: DataSets) -> Settings:
    """Return the settings with `steps` computed from `run.epochs` and the number of samples, if `run.epochs` is set."""
    if not settings.epochs:
        return settings
    return replace(settings, steps=max(1, math.ceil(settings.epochs * data.epoch / settings.batch - 1e-6)))


def sample_bytes(sample: Any) -> int:
    """Size of a sample in bytes: the bytes of its tensors and arrays, and 8 bytes for any other value."""
    if isinstance(sample, Mapping):
        return sum(map(sample_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(sample_bytes, sample))
    return int(getattr(sample, "nbytes", 8))


def tokenizer_of(run: Run) -> str:
    """The tokenizer to use: `data.tokenizer`, or the path of the model's own tokenizer if the setting is "model".

    Raises:
        ConfigError: the model was trained with a different tokenizer, or the setting is "model" but the model
            has no tokenizer.
        DataError: the model's tokenizer cannot be used.
    """
    chosen, target = run.data.tokenizer, run.settings.model
    path = find_tokenizer(target)
    if path is None:
        if chosen == "model":
            if ":" in target and not target.startswith(hf.PREFIX):
                raise ConfigError(f"`{target}` has no tokenizer of its own", hint='set data.tokenizer = "bpe"')
            raise missing_tokenizer(target)
        return chosen
    if chosen == "model":
        return str(path)
    if chosen in ("bpe", "bytes") or load_tokenizer(Path(chosen)).hash != load_tokenizer(path).hash:
        raise ConfigError(f"`{target}` was made with another tokenizer", hint='set data.tokenizer = "model"')
    return chosen


def check_teachers(run: Run, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a feature trains a draft model for a teacher that has another tokenizer."""
    for feature in run.features:
        path = find_tokenizer(feature.tokenizer_of) if feature.tokenizer_of else None
        if path and load_tokenizer(path).hash != tokenizer.hash:
            hint = f'set data.tokenizer = "{path}"'
            raise ConfigError(f"the teacher of `{feature.name}` was made with another tokenizer", hint=hint)


def _own(run: Run, world: World) -> DataSets:
    """Open the user's own data sets with the sample cache on all ranks, and check that all ranks have the same data."""

    def make() -> DataSets:
        data = own_data(run, world.rank, world.size)
        return replace(data, train=_cached(data.train, run.data, world))

    data, source = world.agree(make), run.sources[0]
    if run.data.per_rank:  # each rank has to know the numbers of samples of all ranks
        lengths = world.gather(json.dumps(data.lengths).encode())
        return with_lengths(data, [json.loads(message) for message in lengths])
    parts = {"training": data.train, "held-out": data.held_out}
    facts = {
        name: {"samples": len(cast(Sized, part)), "fingerprint": str(getattr(part, "fingerprint", ""))}
        for name, part in parts.items()
        if part is not None
    }
    hint = "give all ranks the same data, or set data.per_rank if each has data of its own"
    world.alike({f"data of {source}": facts}, hint)
    return data


def with_lengths(data: DataSets, lengths: Sequence[Sequence[int]]) -> DataSets:
    """Return the data sets with `of_ranks` set to `lengths`: each rank's numbers of training and held-out samples.

    Raises:
        DataError: only some ranks have held-out data.
    """
    if len({held_out > 0 for _, held_out in lengths}) > 1:
        lacking = next(rank for rank, (_, held_out) in enumerate(lengths) if not held_out)
        raise DataError(
            f"rank {lacking} has no held-out data, and other ranks have some",
            hint="hold out samples on all ranks or on none",
        )
    return replace(data, of_ranks=tuple((train, held_out) for train, held_out in lengths))


def own_data(run: Run, rank: int = 0, ranks: int = 1) -> DataSets:
    """Call the `package.module:callable` of `run.data`, which returns a data set or a pair (training, held-out).

    Data sets are map-style: they have a length and are indexed. If `data.per_rank` is set, the callable gets `rank` and
    `ranks`. If `data.clients` is set, it returns a dict of clients' data sets in place of the training data set.

    Raises:
        ConfigError, DataError: the callable does not exist, or it returns something else.
    """
    source = run.sources[0]
    if is_mnist(source):
        made: Any = mnist(Path(source))
    else:
        open_own = resolve(source, "run.data", run.trusts["run.data"])
        try:
            made = open_own(*((rank, ranks) if run.data.per_rank else ()), **run.data.arguments)
        except TypeError as error:
            with_arguments = f" with {dict(run.data.arguments)}" if run.data.arguments else ""
            raise ConfigError(f"`{source}` cannot be called{with_arguments}: {error}") from error
    train, held_out = made if isinstance(made, tuple) else (made, None)
    by_name = isinstance(train, Clients) or (
        isinstance(train, Mapping) and all(isinstance(name, str) for name in train)
    )
    if by_name != run.data.clients:
        message = "a dict of clients, and data.clients is not set" if by_name else "no dict of clients"
        hint = "set data.clients = true" if by_name else "return {name: data set}, or remove data.clients"
        raise DataError(f"`{run.settings.data}` returned {message}", hint=hint)
    if isinstance(train, Mapping) and by_name:
        train = Clients(train)
    for part in (train, held_out):
        if part is not None and not (hasattr(part, "__len__") and hasattr(part, "__getitem__") and len(part)):
            message = f"`{run.settings.data}` returned no data set that has a length and items, and is not empty"
            raise DataError(message)
    return DataSets(train, held_out, None)


def _cached(dataset: Dataset[Any], settings: Data, world: World) -> Dataset[Any]:
    """Wrap a data set in a sample cache if `data.cache_memory` or `data.cache_disk` asks for one."""
    memory, disk = (int(gib * 2**30) for gib in (settings.cache_memory, settings.cache_disk))
    if memory and world.local_rank == 0 and not world.memory.take(_SAMPLES, memory, Priority.CACHE):
        log.warning("host memory is too small for data.cache_memory, so no samples are cached there: %s", world.memory)
        memory = 0
    if not (memory or disk):
        return dataset
    folder = Path(settings.cache_folder or "~/.cache/shoestring/samples").expanduser()
    return Cached(dataset, memory=memory, disk=disk, folder=folder)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the device; copies from pinned memory are asynchronous."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Repeated):
        return Repeated(to_device(batch.batch, device))
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [to_device(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # NamedTuple: one value a field
    return batch
