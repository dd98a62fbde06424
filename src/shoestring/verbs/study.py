"""Studies of `shoestring tune`: the study file, the run file whose settings are searched, and the store."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import ConfigError, nearest
from shoestring.naming import TrustError, foreign, names_in
from shoestring.run_code import code_of
from shoestring.storage.foreign import read_toml
from shoestring.tune import Dimension, Halving, Population, Study
from shoestring.tune.space import draw, read_space

if TYPE_CHECKING:
    from shoestring.tune.store import Store
    from shoestring.tune.view.record import StudyRecord

TABLES = ("tune", "space", "halving", "population")
FIXED = ("run.model", "run.data", "run.seed", "model.", "data.")
"""Keys that cannot change during a run, so a population cannot search them."""
ENVIRONMENT = "env:"
"""Prefix that marks the name of an environment variable that holds a store's URL. A password in the URL then does not
show in `ps`."""


@dataclass(frozen=True)
class StudyPlan:
    """A study, and the run file whose settings it searches."""

    study: Study
    space: tuple[Dimension, ...]
    schedule: Halving | Population | None
    tables: Mapping[str, Any]
    """Content of the study file."""
    base: Mapping[str, Any]
    """Content of the run file."""

    @property
    def folder(self) -> Path:
        return Path(self.study.folder or Path("tune") / self.study.name).absolute()

    @property
    def url(self) -> str:
        return self.study.store or f"sqlite:///{self.folder / 'store.db'}"

    @property
    def document(self) -> dict[str, Any]:
        """Content that is saved in the store, so that workers on other hosts can join the study."""
        of_this_host = ("store", "shared_store")  # left out, because the URL of the store may contain a password
        settings = {key: value for key, value in asdict(self.study).items() if key not in of_this_host}
        tables = {**self.tables, "tune": settings | {"folder": str(self.folder)}}
        return {"study": tables, "run": dict(self.base)}

    @property
    def code(self) -> set[str]:
        """Names of callables and packages in the study file and the run file, except names of shoestring itself."""
        searched = foreign(names_in(self.tables.get("space", {})))
        return set(searched).union(*code_of(self.base).values())

    @property
    def total_steps(self) -> float:
        """Number of steps of a trial; infinite if the number is not known before the trial starts."""
        from shoestring import run

        settings = run.parse(self.base, unread=tuple(code_of(self.base))).settings
        searched = any(dimension.key == "run.steps" for dimension in self.space)
        return math.inf if searched or settings.minutes or settings.epochs else settings.steps

    def open_store(self, *, create: bool = False) -> Store:
        """Open the store of the study.

        Raises:
            ConfigError: the store cannot be used, or belongs to another version or study.
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
            store.create(self.document, shared=self.study.shared_store)
        else:
            store.document()  # raises if the study is missing or was made by another version
        return store

    def record(self, store: Store) -> StudyRecord:
        """Read the present state of the study.

        Raises:
            ConfigError: the store cannot be read, or a trial has settings outside the search space.
        """
        from shoestring.tune.view.record import StudyRecord

        trials = store.trials()
        for trial in trials:
            for dimension in self.space:
                value = trial.parameters.get(dimension.key, dimension.ends[0])
                if not dimension.holds(value):
                    raise ConfigError(
                        f"trial {trial.number} in the store is damaged: `{dimension.key}` is {value!r:.40}"
                    )
        return StudyRecord(self.study, self.space, self.schedule, trials, store.all_reports())

    def run_document(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the run file, with the searched settings set to `values`."""
        from shoestring import run

        document = copy.deepcopy(dict(self.base))
        run.override(document, [f"--{key}={json.dumps(value)}" for key, value in values.items()])
        return document


# -- the study file ---------------------------------------------------------------------------------------------------


def read_plan(source: str, *, look: bool = False) -> StudyPlan:
    """Read a study file and the run file that it names, and check that the bounds of each searched setting make valid
    runs.

    Args:
        look: whether to read the files without importing or checking the code that they name.

    Raises:
        ConfigError: a file cannot be read, or a table, key or range is wrong.
    """
    from shoestring import run

    tables = _toml(Path(source), "study file")
    study = _settings(tables, source)
    return _checked(tables, _toml(run.locate(study.run), "run file"), source, look=look)


def _settings(tables: Mapping[str, Any], source: str) -> Study:
    from shoestring.settings import structure

    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{source}: unknown table [{name}]", hint=nearest(name, TABLES))
    table = tables.get("tune", {})
    if isinstance(table, Mapping) and not isinstance(table.get("store", ""), str):
        raise ConfigError(f"{source}: `tune.store` must be a string")  # not shown, because it may contain a password
    return structure(table, Study, "tune", source)


def _checked(
    tables: Mapping[str, Any], base: Mapping[str, Any], source: str, *, look: bool = False, trust: bool = True
) -> StudyPlan:
    from shoestring import run
    from shoestring.renames import renamed
    from shoestring.settings import structure

    study = _settings(tables, source)
    schedules = {"halving": Halving, "population": Population}
    present = [
        structure(renamed(name, tables[name], source), kind, name, source)
        for name, kind in schedules.items()
        if name in tables
    ]
    if len(present) > 1:
        raise ConfigError(f"{source}: [halving] and [population] both pause trials", hint="remove one of the tables")
    plan = StudyPlan(study, read_space(tables.get("space", {}), source), present[0] if present else None, tables, base)
    if plan.code and not trust:
        names = "`, `".join(sorted(plan.code))
        raise TrustError(
            f"{source} names code to run, `{names}`; everybody who can write to the store can choose this code",
            hint="if you trust everybody who can write to the store, add --trust",
        )
    for dimension in plan.space:
        if dimension.key in ("run.folder", "run.resume"):
            raise ConfigError(f"{source}: [space] `{dimension.key}` is set by the study itself")
        if isinstance(plan.schedule, Population) and dimension.key.startswith(FIXED):
            raise ConfigError(
                f"{source}: [space] `{dimension.key}` cannot change within a run, but [population] would change it"
            )
        for value in dimension.ends:
            values = draw(plan.space, lambda other: other.ends[0]) | {dimension.key: value}
            document = plan.run_document(values)
            unread = tuple(code_of(document)) if look else ()
            run.parse(document, name=study.name, source=f"{source}: [space]", unread=unread)
    return plan


def _toml(path: Path, kind: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} `{path}`: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"`{path}` is not TOML: {error}") from error


def join_plan(url: str, name: str, *, trust: bool = False) -> StudyPlan:
    """Read a study from a store that another worker created.

    Args:
        url: URL of the store, or `env:NAME` to take the URL from an environment variable. The variable is then removed,
            so that trials do not inherit it.
        trust: whether to allow code that the study names.

    Raises:
        TrustError: the study names code, and `trust` is False.
    """
    _require_packages()
    from shoestring.tune.store import Store, connect

    if url.startswith(ENVIRONMENT):
        variable = url.removeprefix(ENVIRONMENT)
        if not (url := os.environ.pop(variable, "")):
            raise ConfigError(f"the environment variable `{variable}` is not set", hint="set it to the store's URL")
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
    tables, base = copy.deepcopy(document.get("study")), document.get("run")
    if not (isinstance(tables, dict) and isinstance(tables.get("tune"), dict) and isinstance(base, dict)):
        raise ConfigError(f"the study `{name}` in the store is damaged: it has no tables")
    tables["tune"]["store"] = url  # the URL under which this host reaches the store; hosts may differ
    return _checked(tables, base, f"the study {name}", trust=trust)


def _require_packages() -> None:
    try:
        import optuna
        import scipy  # noqa: F401

        _ = optuna.__version__
    except ImportError as error:
        raise ConfigError(f"tuning needs {error.name}", hint="pip install shoestring[tune]") from error
