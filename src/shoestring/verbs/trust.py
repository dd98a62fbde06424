"""`shoestring trust`: vouches for the code that a folder or file from somebody else names."""

from __future__ import annotations

from pathlib import Path

from shoestring import run
from shoestring.core.errors import ConfigError
from shoestring.models import adapter_folder, saving
from shoestring.naming import Trust, source_files
from shoestring.storage import trusted
from shoestring.storage.foreign import read_json_object


def vouch(path: Path) -> list[str]:
    """Trust the code that a run folder, a model folder, a folder of adapters or a run file names, until the code
    changes.

    Returns:
        A line for each pair of a place and a name of code that the place may run.

    Raises:
        ConfigError: the run, model or adapter does not exist, or the trust cannot be recorded.
    """
    lines = []
    named = [trust for trust in _places(path) if trust.names]
    for trust in named:
        assert trust.place is not None
        try:
            trusted.remember(trust.digest, trust.place)
        except OSError as error:
            raise ConfigError(f"cannot remember `{trust.place}`: {error}") from error
        for name in trust.names:
            files = source_files(name, trust.project)
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            lines.append(f"{trust.place} may run {name}: {files[0][0] if files else 'not found here'}{more}")
    return lines or [f"{path} names no code: it opens without your word"]


def forget(path: Path) -> list[str]:
    """Revoke the trust in the code that `path` names, and return a line for each place that was trusted.

    Raises:
        ConfigError: the code cannot be read.
    """
    try:
        gone = [trust.place for trust in _places(path) if trust.names and trusted.forget(trust.digest)]
    except OSError as error:  # the code cannot be read, so its trust cannot be looked up
        raise ConfigError(f"cannot read the code that `{path}` names: {error}") from error
    return [f"{place} may run no code" for place in gone] or [f"nobody has vouched for {path}"]


def _places(path: Path, met: tuple[Path, ...] = ()) -> list[Trust]:
    """The `Trust` of every place in a path that may name code: a run file, models, and the base model of adapters."""
    if path.is_file():
        return [run.look(str(path)).origin]
    origins = [run.look(str(path)).origin] if (path / "run.toml").is_file() else []
    for folder in (path, path / "model", path / "best", path / saving.PRETRAINED):
        if (file := folder / "config.json").is_file():
            try:
                origins.append(saving.trust_of(folder, read_json_object(file)))
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read `{file}`: {error}") from error
    adapter = adapter_folder.find(path) if saving.model_folder(path) is None else None
    base = adapter_folder.base_of(adapter) if adapter is not None else ""
    if base and Path(base).is_dir() and Path(base).resolve() not in met:
        origins += _places(Path(base), (*met, path.resolve(), Path(base).resolve()))
    if not origins and adapter is None:
        raise ConfigError(f"`{path}` holds no run and no model", hint="name a run folder, a model folder or a run file")
    return origins
