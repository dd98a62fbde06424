"""The study of `shoestring tune`: its file, the run whose settings it searches, and its store."""

from __future__ import annotations

import copy
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import ConfigError, nearest
from shoestring.tune import Dimension, Halving, Population, Study
from shoestring.tune.space import draw, read_space

if TYPE_CHECKING:
    from shoestring.tune.store import Store
    from shoestring.tune.view.record import StudyRecord

TABLES = ("tune", "space", "halving", "population")
FIXED = ("run.model", "run.data", "run.seed", "model.", "data.")
"""Keys that a run cannot change on its way, so a population cannot search them."""
ENVIRONMENT = "env:"
"""Prefix of the name of an environment variable that holds a store's URL, which keeps its password from `ps`."""


@dataclass(frozen=True)
class StudyPlan:
    """A study and the document of the run whose settings it searches."""

    study: Study
    space: tuple[Dimension, ...]
    schedule: Halving | Population | None
    tables: Mapping[str, Any]
    """The study file."""
    base: Mapping[str, Any]
    """The run file."""

    @property
    def folder(self) -> Path:
        return Path(self.study.folder or Path("tune") / self.study.name).absolute()

    @property
    def url(self) -> str:
        return self.study.store or f"sqlite:///{self.folder / 'store.db'}"

    @property
    def document(self) -> dict[str, Any]:
        """What the store keeps, from which a worker on another host begins."""
        settings = {key: value for key, value in asdict(self.study).items() if key != "store"}  # it has a password
        tables = {**self.tables, "tune": settings | {"folder": str(self.folder)}}
        return {"study": tables, "run": dict(self.base)}

    @property
    def total_steps(self) -> float:
        """Steps of a trial; infinite where they are not known before it starts."""
        from shoestring import run

        settings = run.parse(self.base).settings
        searched = any(dimension.key == "run.steps" for dimension in self.space)
        return math.inf if searched or settings.minutes or settings.epochs else settings.steps

    def open_store(self, *, create: bool = False) -> Store:
        """The study's store.

        Raises:
            ConfigError: it cannot be used, or is of another version or study.
        """
        _require_packages()
        from shoestring.tune.store import Store, connect

        try:
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write `{self.folder}`: {error.strerror}", hint="set tune.folder") from error
        store = Store(connect(self.url), self.study.name)
        if create:
            store.create(self.document)
        else:
            store.document()  # it exists, and is of this version
        return store

    def record(self, store: Store) -> StudyRecord:
        """The study as it is now."""
        from shoestring.tune.view.record import StudyRecord

        return StudyRecord(self.study, self.space, self.schedule, store.trials(), store.all_reports())

    def run_document(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The run file with these values of the space."""
        from shoestring import run

        document = copy.deepcopy(dict(self.base))
        run.override(document, [f"--{key}={json.dumps(value)}" for key, value in values.items()])
        return document


# -- the study file ---------------------------------------------------------------------------------------------------


def read_plan(source: str) -> StudyPlan:
    """Read a study file and the run file that it names, and check that every end of the space makes a valid run.

    Raises:
        ConfigError: a file cannot be read, or a table, key or range is wrong.
    """
    from shoestring import run

    tables = _toml(Path(source), "study file")
    study = _settings(tables, source)
    return _checked(tables, _toml(run.locate(study.run), "run file"), source)


def _settings(tables: Mapping[str, Any], source: str) -> Study:
    from shoestring.settings import structure

    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{source}: unknown table [{name}]", hint=nearest(name, TABLES))
    return structure(tables.get("tune", {}), Study, "tune", source)


def _checked(tables: Mapping[str, Any], base: Mapping[str, Any], source: str) -> StudyPlan:
    from shoestring import run
    from shoestring.settings import structure

    study = _settings(tables, source)
    schedules = {"halving": Halving, "population": Population}
    found = [structure(tables[name], kind, name, source) for name, kind in schedules.items() if name in tables]
    if len(found) > 1:
        raise ConfigError(f"{source}: [halving] and [population] both pause trials", hint="remove one of the tables")
    plan = StudyPlan(study, read_space(tables.get("space", {}), source), found[0] if found else None, tables, base)
    for dimension in plan.space:
        if dimension.key in ("run.folder", "run.resume"):
            raise ConfigError(f"{source}: [space] `{dimension.key}` is the study's own to set")
        if isinstance(plan.schedule, Population) and dimension.key.startswith(FIXED):
            raise ConfigError(f"{source}: [space] `{dimension.key}` cannot change within a run, as [population] does")
        for value in dimension.ends:
            given = draw(plan.space, lambda each: each.ends[0]) | {dimension.key: value}
            run.parse(plan.run_document(given), name=study.name, source=f"{source}: [space]")
    return plan


def _toml(path: Path, kind: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} `{path}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error


def join_plan(url: str, name: str) -> StudyPlan:
    """The study of a store that another worker has created.

    Args:
        url: of the store, or `env:NAME` for the value of an environment variable, which trials do not inherit.
    """
    _require_packages()
    from shoestring.tune.store import Store, connect

    if url.startswith(ENVIRONMENT):
        variable = url.removeprefix(ENVIRONMENT)
        if not (url := os.environ.pop(variable, "")):
            raise ConfigError(f"the environment variable `{variable}` is not set", hint="it holds the store's URL")
    engine = connect(url)
    if not name:
        names = Store(engine, "").names()
        if not names:
            raise ConfigError("the store holds no study", hint="start one with `shoestring tune tune.toml`")
        if len(names) > 1:
            held = f"it holds: {', '.join(names)}"
            raise ConfigError("name the study of the store: shoestring tune join URL NAME", hint=held)
        (name,) = names
    document = Store(engine, name).document()
    tables = copy.deepcopy(document["study"])
    tables["tune"]["store"] = url  # as this host reaches it
    return _checked(tables, document["run"], f"the study {name}")


def _require_packages() -> None:
    try:
        import optuna
        import scipy  # noqa: F401

        _ = optuna.__version__
    except ImportError as error:
        raise ConfigError(f"tuning needs {error.name}", hint="pip install shoestring[tune]") from error
