"""`shoestring checkpoint export` and `import`: convert checkpoints to and from the formats of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring import run as runs
from shoestring._torch import tree_map_only
from shoestring.checkpoint.format.history import HISTORY
from shoestring.checkpoint.interop import dcp, exports
from shoestring.checkpoint.tiers.disk import Disk
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.core.errors import CheckpointError, ConfigError, ShoestringError
from shoestring.core.feature import Feature, export_weights
from shoestring.data.chat_ends import ends_learnt_in
from shoestring.data.tokenizer import Tokenizer, load_tokenizer
from shoestring.models import hf, saving, slorb
from shoestring.models.beside import Beside
from shoestring.models.gpt import GPT
from shoestring.models.loading import build_model, load_model, origin_of, origin_trust
from shoestring.models.tokenizer_files import find_tokenizer
from shoestring.naming import Trust
from shoestring.storage.whole import made_above, replaced_folder, write_atomic, writing
from shoestring.verbs.archive import Archive
from shoestring.verbs.settings import CheckpointImport, ExportFormat


def export(run: Path, to: Path, step: int | None = None, format: ExportFormat = "safetensors") -> list[Path]:
    """Convert the checkpoint of a step to the format of another program; by default the newest checkpoint on disk.

    Args:
        run: a run folder, the folder of its checkpoints, or one checkpoint.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: there is no checkpoint of this step, it is damaged or incomplete, or `to` is not empty.
    """
    archive = Archive.of(run)
    checkpoint = archive.pick(step)
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]):
        raise CheckpointError(f"`{to}` is not empty", hint="name a new folder")
    content = checkpoint.content()
    try:
        if format == "hf":
            _export_model(archive, content, to)
        else:
            with replaced_folder(to) as new:
                if format == "dcp":
                    own = [name for name in ("model", "optimizer") if name in content.own.get(0, {})]
                    dcp.write(content, [*content.shared, *own], new)
                else:
                    _export_weights(archive, content, new)
    except OSError as error:
        raise CheckpointError(f"cannot write `{to}`: {error.strerror or error}", hint="name another folder") from error
    return sorted(path for path in to.rglob("*") if path.is_file())


@dataclass(frozen=True)
class ModelOrigin:
    """The information needed to build the model of a run folder: its name and arguments, and its tokenizer."""

    origin: Mapping[str, Any]
    tokenizer: Tokenizer | None
    trust: Trust
    """The source of trust in the code that builds the model: who vouches for it."""
    beside: Beside


def read_origin(archive: Archive) -> ModelOrigin:
    """Read how to build the model of a run from its run file.

    Raises:
        CheckpointError: there is no run file.
    """
    if archive.run is None:
        raise CheckpointError(
            f"no run.toml beside `{archive.folder}` names the model", hint="--as safetensors needs no run file"
        )
    run = runs.look(str(archive.run))
    path = find_tokenizer(archive.run)
    tokenizer = None if path is None else load_tokenizer(path)
    offered = {"vocab_size": tokenizer.vocab_size, "context": run.data.sequence} if tokenizer else {}
    target, pretrained = run.settings.model, archive.run / saving.PRETRAINED
    if pretrained.is_dir():
        target = f"{hf.PREFIX}{pretrained}" if target.startswith(hf.PREFIX) else str(pretrained)
    trust = origin_trust(target, run.trusts["run.model"])
    learnt = ends_learnt_in(archive.run, tokenizer) if tokenizer is not None else []
    beside = Beside(pretrained if pretrained.is_dir() else None, learnt)
    return ModelOrigin(origin_of(target, run.model, offered, run.settings.project), tokenizer, trust, beside)


def _export_model(archive: Archive, content: exports.Saved, to: Path) -> None:
    """Write the same model folder that the run would write at its end."""
    source = read_origin(archive)
    origin = source.origin
    model = build_model(origin["model"], origin["arguments"], origin["offered"], weights=False, trust=source.trust)
    state = {name: stored.read() for name, stored in _exported_tensors(archive, content).items()}
    own_format = isinstance(model, GPT) or callable(getattr(model, "save_pretrained", None))
    if not own_format and not slorb.names_in(state):
        raise CheckpointError(f"`{source.origin['model']}` has no Hugging Face layout", hint="use --as safetensors")
    try:
        slorb.fill(model, state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{content.source} does not fit `{source.origin['model']}`: {reason}") from error
    saving.save_model(model, source.tokenizer, to, origin, source.trust, beside=source.beside)


def _export_weights(archive: Archive, content: exports.Saved, to: Path) -> None:
    """Write the weights under their own names; add the configuration and the tokenizer if the run folder has them."""
    tensors, source, model = _exported_tensors(archive, content), None, None
    with suppress(ShoestringError):
        source = read_origin(archive)
        with torch.device("meta"):
            origin = source.origin
            built = origin["model"], origin["arguments"], origin["offered"]
            model = build_model(*built, weights=False, trust=source.trust)
        # Weights with several names (tied embeddings) are written only under their first name.
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in (names - {name for name, _ in model.named_parameters()}) & tensors.keys():
            del tensors[name]
    exports.write_safetensors(tensors, to / "model.safetensors")
    if source is None or slorb.names_in(tensors):  # the configuration of a plain model does not describe adapters
        return
    if model is not None and hf.is_pretrained(model):
        hf.save_config(model, to, saving.TRANSFORMERS)
    else:
        write_atomic(to / "config.json", json.dumps(saving.config_of(source.origin), indent=2).encode())
        saving.pass_on(source.trust, to)
    if source.tokenizer is not None:
        saving.save_tokenizer(source.tokenizer, to, source.origin, source.beside)


def _exported_tensors(archive: Archive, content: exports.Saved) -> dict[str, exports.Stored]:
    """The tensors of the trained model, changed for the export by the features of the run."""
    run = runs.look(str(archive.run)) if archive.run is not None else None
    if run is not None and any(not key.startswith("run.") for key in run.unread):
        run.origin.require()  # features of other packages may change the exported weights
    features = run.features if run is not None else ()
    changing = [feature for feature in features if type(feature).export is not Feature.export]
    if not changing:
        return _model(content)
    weights = {name: stored.read() for name, stored in _model(content).items()}
    exported = export_weights(changing, weights, _LazyStates(content))
    return {name: exports.held(name, weight) for name, weight in exported.items()}


@dataclass(frozen=True)
class _LazyStates(Mapping[str, Any]):
    """The states of a checkpoint by name; a state is read only when it is accessed."""

    content: exports.Saved

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):  # `name in self` would read the state
            raise KeyError(name)
        return tree_map_only(exports.Stored, exports.Stored.read, self.content.state(name))

    def __iter__(self) -> Iterator[str]:
        yield from {**self.content.shared, **self.content.own.get(0, {})}

    def __len__(self) -> int:
        return len({**self.content.shared, **self.content.own.get(0, {})})


def _model(content: exports.Saved) -> dict[str, exports.Stored]:
    """The tensors of the model in a checkpoint.

    Raises:
        CheckpointError: some tensors are frozen, and the checkpoint only refers to them.
    """
    for name in content.shared:
        if name.startswith("frozen.") and (names := content.state(name)["within_model"]):
            raise CheckpointError(
                f"{content.source} only refers to `{names[0]}` and the other tensors of `{name}`, which come from "
                f"`{content.state(name)['source']}`",
                hint="the run writes the whole model at its end: resume it, and use its folder `model`",
            )
    return {name: stored for name, stored in content.state("model").items() if isinstance(stored, exports.Stored)}


def import_checkpoint(source: Path, to: Path, settings: CheckpointImport | None = None) -> Path:
    """Convert a checkpoint or a model that another program wrote into a checkpoint of a run.

    Args:
        source: a folder or file that torch.distributed.checkpoint, safetensors or Hugging Face wrote.
        to: a run folder without checkpoints; it may be a new folder.

    Returns:
        The folder of the checkpoint.

    Raises:
        ConfigError: the step is negative.
        CheckpointError: `source` is damaged or has no model, or the run already has checkpoints.
    """
    settings = settings or CheckpointImport()
    if settings.step is not None and settings.step < 0:
        raise ConfigError(f"--step must not be negative, got {settings.step}")
    archive = Archive.of(to)
    if newest := archive.found()[:1]:
        raise CheckpointError(
            f"the run already has a checkpoint of step {newest[0].step}: `{newest[0].path}`",
            hint="name a new folder with --to",
        )
    if (archive.folder / HISTORY).exists():  # `run.resume = "auto"` would ignore the imported checkpoint
        raise CheckpointError(f"a run was already started in `{archive.folder}`", hint="name a new folder with --to")
    if settings.format == "dcp":
        states = dcp.renamed(dcp.read(source), settings.model, settings.optimizer)
    else:
        states = {"model": _read_model(source)}
    states, done = dcp.with_step(states, settings.step)
    disk = Disk(archive.folder, Files())
    path = archive.folder / "step"
    try:
        with made_above(path), writing(path):
            return exports.commit(states, done, 0, disk)
    except OSError as error:
        raise CheckpointError(
            f"cannot write `{archive.folder}`: {error.strerror or error}", hint="free space, then try again"
        ) from error


def _read_model(source: Path) -> dict[str, torch.Tensor]:
    """Read weights by name. If `source` is a model folder, use the names in the model that it builds; otherwise use the
    names in the files."""
    if (source / "config.json").is_file():
        with suppress(ConfigError):  # a model of another library; use the names in its files
            return load_model(source)[0].state_dict()
    if (source / dcp.METADATA).exists():
        raise CheckpointError(f"`{source}` was written by torch.distributed.checkpoint", hint="add --as dcp")
    return exports.read_safetensors(source)
