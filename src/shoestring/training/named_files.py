"""Check that the files that a run names exist, before torch is imported and ranks are started."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.data.piped import is_piped
from shoestring.data.sources import is_mnist, open_source
from shoestring.run import Run


def check_named_files(run: Run) -> None:
    """Check that the model's folder and the data files exist; models and data that are not paths are checked later.

    Raises:
        ConfigError: the folder does not exist, or a list of data contains more than text (see `is_own`). DataError: a
            file does not exist.
    """
    model = run.settings.model
    is_module = "." in model and all(part.isidentifier() for part in model.split("."))  # without `:callable`
    if ":" not in model and not is_module and not Path(model).exists():
        hint = "give the folder of a model, of a run, or hf:NAME"
        raise ConfigError(f"there is no model `{model}`: it is no folder", hint=hint)
    if is_own(run):
        return
    for source in run.sources:
        named = ":" in source or source.endswith(".tokens") or is_piped(source) or Path(source).is_dir()
        if not named and not has_magic(source):  # a pattern may match many files, so it is expanded only later
            open_source(source, run.data.record_field)


def is_own(run: Run) -> bool:
    """Whether `run.data` names a user's own data set: `package.module:callable`, or a folder with MNIST files.

    Raises:
        ConfigError: `run.data` is an empty list, or a list that contains such a data set.
    """
    named = [source for source in run.sources if ":" in source and not source.startswith("hf:")]
    own = named + [source for source in run.sources if is_mnist(source)]
    if not isinstance(run.settings.data, str) and (own or not run.sources):
        listed = f"`{own[0]}`" if own else "nothing"
        raise ConfigError(f"`run.data` lists {listed}", hint="list one or more sources of text")
    return bool(own)
