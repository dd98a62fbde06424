"""Check that the files that a run names exist, before torch is imported and ranks are started."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.data.piped import is_piped
from shoestring.data.sources import open_source
from shoestring.run import Run


def check_named_files(run: Run) -> None:
    """Check that the model's folder and the data files exist; models and data that are not paths are checked later.

    Raises:
        ConfigError: the folder does not exist, or a list of data contains more than text (see `Run.has_own_data`).
        DataError: a file does not exist.
    """
    model = run.settings.model
    is_module = "." in model and all(part.isidentifier() for part in model.split("."))  # without `:callable`
    if ":" not in model and not is_module and not Path(model).exists():
        hint = "give the folder of a model, of a run, or hf:NAME"
        raise ConfigError(f"there is no model `{model}`: it is no folder", hint=hint)
    if run.has_own_data:
        return
    for source in run.sources:
        named = ":" in source or source.endswith(".tokens") or is_piped(source) or Path(source).is_dir()
        if not named and not has_magic(source):  # a pattern may match many files, so it is expanded only later
            open_source(source, run.data.record_field)
