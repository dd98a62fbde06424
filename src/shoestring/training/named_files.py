"""Check that the files a run names are there, before torch is imported and ranks are started."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path

from shoestring.core.errors import ConfigError
from shoestring.data.piped import is_piped
from shoestring.data.sources import is_mnist, open_source
from shoestring.run import Run


def check_named_files(run: Run) -> None:
    """Check that the model's folder and the files of data exist; what is named in another way is checked later.

    Raises:
        ConfigError: there is no such folder, or a list of data contains more than text (see `is_own`). DataError: there
            is no such file.
    """
    model = run.settings.model
    is_module = "." in model and all(part.isidentifier() for part in model.split("."))  # its callable is missing
    if ":" not in model and not is_module and not Path(model).exists():
        hint = "give the folder of a model, of a run, or hf:NAME"
        raise ConfigError(f"there is no model `{model}`: it is no folder", hint=hint)
    if is_own(run):
        return
    for source in run.sources:
        named = ":" in source or source.endswith(".tokens") or is_piped(source) or Path(source).is_dir()
        if not named and not has_magic(source):  # a pattern may match many files, which are listed once, later
            open_source(source, run.data.record_field)


def is_own(run: Run) -> bool:
    """Whether `run.data` names a data set of the user's own: `package.module:callable`, or a folder with MNIST files.

    Raises:
        ConfigError: `run.data` is a list that contains such a data set, or an empty list.
    """
    named = [source for source in run.sources if ":" in source and not source.startswith("hf:")]
    own = named + [source for source in run.sources if is_mnist(source)]
    if not isinstance(run.settings.data, str) and (own or not run.sources):
        listed = f"`{own[0]}`" if own else "nothing"
        raise ConfigError(f"`run.data` lists {listed}", hint="list one or more sources of text")
    return bool(own)
