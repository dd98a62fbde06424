"""Finds the tokenizer.json of a model or of a run."""

from __future__ import annotations

from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.models import hf
from shoestring.models.saving import model_folder


def find_tokenizer(model: Path | str) -> Path | None:
    """Path of the tokenizer.json of a model; None if there is none.

    The file of the model's own folder comes first, because it lies beside the chat template with which the model was
    trained. In the folder of a run that is still training, only the run's own file exists.

    Args:
        model: folder of a run, a model or an adapter, or `hf:NAME`; `module:callable` has no tokenizer.
    """
    name = str(model)
    if name.startswith(hf.PREFIX):
        return hf.tokenizer_of(name.removeprefix(hf.PREFIX))
    if ":" in name and not Path(name).is_dir():
        return None
    folders = [folder for folder in (model_folder(name), Path(name)) if folder is not None]
    return next((path for folder in folders if (path := folder / "tokenizer.json").is_file()), None)


def require_tokenizer(model: Path | str) -> Path:
    """Like `find_tokenizer`, but an error is raised if the model has no tokenizer.json.

    Raises:
        ConfigError: the model has no tokenizer.json, or there is no such model.
    """
    path = find_tokenizer(model)
    if path is None:
        raise missing_tokenizer(model)
    return path


def missing_tokenizer(model: Path | str) -> ConfigError:
    """The error about a model without a tokenizer.json."""
    name = str(model)
    if name.startswith(hf.PREFIX) or Path(name).is_dir():
        return ConfigError(f"`{name}` has no tokenizer.json", hint=hf.tokenizer_hint(name.removeprefix(hf.PREFIX)))
    hint = "name a run folder, a model folder or hf:NAME"
    if Path(name).is_file():
        return ConfigError(f"`{name}` holds no tokenizer", hint=hint)
    return ConfigError(f"there is no model `{name}`: it is no folder", hint=hint)
