"""`shoestring checkpoint export` and `import`: checkpoints in the forms of other programs, and checkpoints made of
those."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoestring import run as runs
from shoestring._torch import tree_map_only
from shoestring.checkpoint.format.history import HISTORY
from shoestring.checkpoint.interop import dcp, exports
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.commands.archive import Archive, FoundCheckpoint
from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError
from shoestring.core.feature import Feature, export_weights
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import hf, saving, slorb
from shoestring.models.gpt import GPT
from shoestring.models.loading import build_model, load_model, origin_of
from shoestring.storage.whole import write_atomic

Way = Literal["safetensors", "dcp", "hf"]


def export(archive: Archive, checkpoint: FoundCheckpoint, to: Path, way: Way) -> list[Path]:
    """Write a checkpoint for other programs; the files.

    Raises:
        CheckpointError: it is damaged or incomplete, or there is something at `to`.
    """
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]):
        raise CheckpointError(f"`{to}` is not empty", hint="name a new folder")
    content = checkpoint.content()
    try:
        if way == "dcp":
            own = [name for name in ("model", "optimizer") if name in content.own.get(0, {})]
            dcp.write(content, [*content.shared, *own], to)
        elif way == "hf":
            _as_the_run_does(archive, content, to)
        else:
            _weights(archive, content, to)
    except OSError as error:
        raise CheckpointError(f"cannot write `{to}`: {error.strerror or error}", hint="name another folder") from error
    return sorted(path for path in to.rglob("*") if path.is_file())


@dataclass(frozen=True)
class ModelOrigin:
    """What a run folder says of its model: the name and arguments that build it, and its tokenizer."""

    origin: Mapping[str, Any]
    tokenizer: Tokenizer | None


def read_origin(archive: Archive) -> ModelOrigin:
    """Read what builds the run's model.

    Raises:
        CheckpointError: no run file says so.
    """
    if archive.run is None:
        raise CheckpointError(
            f"no run.toml beside `{archive.folder}` says what the model is", hint="--as safetensors needs none"
        )
    run = runs.load(str(archive.run))
    path = archive.run / "tokenizer.json"
    tokenizer = load_tokenizer(path) if path.is_file() else None
    offered = {"vocab_size": tokenizer.vocab_size, "context": run.data.sequence} if tokenizer else {}
    target, pretrained = run.settings.model, archive.run / saving.PRETRAINED
    if pretrained.is_dir():
        target = f"{hf.PREFIX}{pretrained}" if target.startswith(hf.PREFIX) else str(pretrained)
    return ModelOrigin(origin_of(target, run.model, offered), tokenizer)


def _as_the_run_does(archive: Archive, content: exports.Saved, to: Path) -> None:
    """The folder that the run itself would write at its end: in Llama's layout, or in the model's own."""
    source = read_origin(archive)
    model = build_model(source.origin["model"], source.origin["arguments"], source.origin["offered"], weights=False)
    state = {name: stored.read() for name, stored in _leaving(archive, content).items()}
    own_format = isinstance(model, GPT) or callable(getattr(model, "save_pretrained", None))
    if not own_format and not slorb.names_in(state):
        raise CheckpointError(
            f"`{source.origin['model']}` has no layout of Hugging Face's", hint="use --as safetensors"
        )
    try:
        slorb.fill(model, state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{content.source} does not fit `{source.origin['model']}`: {reason}") from error
    saving.save_model(model, source.tokenizer, to, source.origin)


def _weights(archive: Archive, content: exports.Saved, to: Path) -> None:
    """Weights under their own names; with what is needed to build the model from them, where the run folder says it."""
    tensors, source, model = _leaving(archive, content), None, None
    with suppress(ShoestringError):
        source = read_origin(archive)
        with torch.device("meta"):
            model = build_model(source.origin["model"], source.origin["arguments"], source.origin["offered"])
        for name in _twins(model) & tensors.keys():
            del tensors[name]
    exports.write_safetensors(tensors, to / "model.safetensors")
    if source is None or slorb.names_in(tensors):  # a plain model has no place for adapters
        return
    if model is not None and hf.is_pretrained(model):
        hf.save_config(model, to, saving.TRANSFORMERS)
    else:
        write_atomic(to / "config.json", json.dumps(saving.config_of(source.origin), indent=2).encode())
    if source.tokenizer is not None:
        saving.save_tokenizer(source.tokenizer, to, source.origin)


def _leaving(archive: Archive, content: exports.Saved) -> dict[str, exports.Stored]:
    """The model as it leaves the run: as it was trained, except where a feature of the run says otherwise."""
    features = runs.load(str(archive.run)).features if archive.run is not None else ()
    changing = [feature for feature in features if type(feature).export is not Feature.export]
    if not changing:
        return _model(content)
    weights = {name: stored.read() for name, stored in _model(content).items()}
    exported = export_weights(changing, weights, _Kept(content))
    return {name: exports.held(name, weight) for name, weight in exported.items()}


@dataclass(frozen=True)
class _Kept(Mapping[str, Any]):
    """The kept states of a checkpoint, each read when it is asked for."""

    content: exports.Saved

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):  # `name in self` would ask for the item
            raise KeyError(name)
        return tree_map_only(exports.Stored, exports.Stored.read, self.content.state(name))

    def __iter__(self) -> Iterator[str]:
        yield from {**self.content.shared, **self.content.own.get(0, {})}

    def __len__(self) -> int:
        return len({**self.content.shared, **self.content.own.get(0, {})})


def _model(content: exports.Saved) -> dict[str, exports.Stored]:
    """The model's tensors.

    Raises:
        CheckpointError: some are frozen, and the checkpoint only refers to them.
    """
    for name in content.shared:
        if name.startswith("frozen.") and (names := content.state(name)["within_model"]):
            raise CheckpointError(
                f"{content.source} only refers to `{names[0]}` and the other tensors of `{name}`, which come from "
                f"`{content.state(name)['source']}`",
                hint="the run writes the whole model at its end: resume it, and use its folder `model`",
            )
    return {name: stored for name, stored in content.state("model").items() if isinstance(stored, exports.Stored)}


def _twins(model: nn.Module) -> set[str]:
    """Names of weights that have another name, too, which comes first."""
    named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return set(named) - {name for name, _ in model.named_parameters()}


def take_in(archive: Archive, source: Path, way: Way, step: int | None, model: str, optimizer: str) -> Path:
    """Make a checkpoint of what another program wrote; its folder.

    Raises:
        CheckpointError: `source` is damaged or lacks a model, or the run has checkpoints already.
    """
    if newest := archive.found()[:1]:
        raise CheckpointError(
            f"the run has a checkpoint of step {newest[0].step} already: `{newest[0].path}`",
            hint="name a new folder by --to",
        )
    if (archive.folder / HISTORY).exists():  # "auto" continues that start, and nothing else
        raise CheckpointError(f"a run was started in `{archive.folder}` already", hint="name a new folder by --to")
    if way == "dcp":
        states = dcp.renamed(dcp.read(source), model, optimizer)
    else:
        states = {"model": _read_model(source)}
    states, done = dcp.with_step(states, step)
    disk = Disk(archive.folder, Files())
    try:
        return exports.commit(states, done, 0, disk)
    except OSError as error:
        raise CheckpointError(f"cannot write `{archive.folder}`: {error.strerror or error}") from error


def _read_model(source: Path) -> dict[str, torch.Tensor]:
    """Weights by their names: of a model folder those of the model that it makes, else those in its files."""
    if (source / "config.json").is_file():
        with suppress(ConfigError):  # of a model of another library, whose names are as they stand
            return load_model(source)[0].state_dict()
    if (source / dcp.METADATA).exists():
        raise CheckpointError(f"`{source}` was written by torch.distributed.checkpoint", hint="add --as dcp")
    return exports.read_safetensors(source)
