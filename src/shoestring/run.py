"""Reads run files into typed settings: the tables [run], [model] and [data], and [area.technique] for each feature.

This is the only module that imports from all areas. It does not import torch, so that checking a run file takes only
milliseconds.
"""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from shoestring import naming, other_names, precedence, recipes, renames
from shoestring.areas import AREAS
from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import DATA, LOCAL, Feature, Seam, area_of, arrange_mesh, resolve_all
from shoestring.data import Data
from shoestring.naming import USER, Trust, import_package
from shoestring.report import trackers
from shoestring.run_code import CODE_KEYS, TABLES, code_of, entry, trust_of
from shoestring.settings import defaults, structure
from shoestring.storage import foreign

if TYPE_CHECKING:
    from shoestring.core.world import World

DEFAULTS = {"parallel": "ddp", "optim": "adamw", "checkpoint": "tiered"}
"""Maps an area to its default technique, for runs that name no technique of the area (see `Run.completed`)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The table [run]: which model is trained on which data, for how long, and where results are written."""

    model: str = "shoestring.models.gpt:tiny"
    """Model to train: `package.module:callable`, a function that returns an nn.Module; `hf:PATH`, a causal language
    model that transformers loads by a path or name; or the folder of a run or model, whose weights training starts
    from. The table [model] contains the arguments."""
    data: str | tuple[str, ...] = "python-stdlib"
    """Source of the training data: `python-stdlib`, paths or globs of files of text or records (.txt, .jsonl, .json,
    .csv, .parquet, also compressed), `-` for standard input, a .tokens file, `hf:NAME`, a folder with MNIST's files, or
    `package.module:callable`. Several sources are mixed in the proportions of `data.weights`."""
    loss: str = ""
    """Your own loss function, `package.module:callable`: called with (output, batch), it returns (sum of losses, number
    of targets). Defaults to the cross-entropy of the next token."""
    forward: str = ""
    """Your own forward pass, `package.module:callable`: called with (model, batch), it returns the output that the loss
    function gets. It is used wherever the model is called on samples. By default the model is called with the batch's
    `inputs`, or its `input_ids`."""
    collate: str = ""
    """Your own way to make a batch of samples, `package.module:callable`: called with a list of samples, it returns a
    batch. By default the tensors of the samples, which need equal shapes, are stacked."""
    steps: int = 400
    """Number of optimizer steps to train for, unless `epochs` or `minutes` is set."""
    epochs: float = 0.0
    """Number of passes over the training data to train for, in place of `steps`. 0 trains for `steps`."""
    minutes: float = 0.0
    """Time to train for in minutes, in place of `steps`, summed over all starts of the run. The number of steps is
    computed from the speed of the first steps. 0 trains for `steps`."""
    batch: int = 32
    """Batch size: number of samples per optimizer step, over all ranks and micro-batches."""
    accumulate: int = 1
    """Number of micro-batches per optimizer step, whose gradients are accumulated. More micro-batches take less memory
    and more time."""
    evaluate_every: int = 0
    """Number of steps between evaluations on part of the held-out data. 0 evaluates only at the end."""
    evaluate: str = ""
    """Further metrics of each evaluation. `lm-eval:TASK,TASK` runs tasks of lm-evaluation-harness; TASK is a name from
    its list or a task's YAML file. An evaluation during training uses the first documents of each task, the evaluation
    at the end uses all. `package.module:callable` is your own function: called with the model, or with the model and
    the held-out data, it returns a dict of numbers, tables and pictures. All ranks call it, with the model in
    evaluation mode and without gradients; the result of the first rank is recorded."""
    evaluate_samples: int = 64
    """Number of held-out samples, and of documents of each task, that an evaluation during the run uses. More samples
    take longer and give less noisy metrics. 0 uses all samples, as the evaluation at the end does."""
    patience: int = 0
    """Early stopping: number of evaluations in a row without a better value of `best_metric` after which training ends.
    0 turns early stopping off."""
    save_best: bool = False
    """Whether to save the model to the folder `best` of the run whenever an evaluation finds a new best value of
    `best_metric`."""
    best_metric: str = "held_out_loss"
    """Metric by which `patience` and `save_best` compare evaluations: the held-out loss, or a number that `evaluate`
    returns."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the lowest (`min`) or the highest (`max`) value of `best_metric` is the best."""
    read_file: str = ""
    """Your own function that reads an input file of `shoestring predict`, `package.module:callable`: called with the
    path, it returns a sample like the data set's samples, which may lack targets."""
    predict: str = ""
    """Your own function that makes the predictions of `shoestring predict`, `package.module:callable`: called with
    (output, batch), it returns a list with a dict of numbers, texts and pictures for each sample, or a list of such
    dicts. Defaults to the likeliest class and its probability."""
    seed: int = 0
    """Seed of all random numbers: of initial weights, order of the data and dropout."""
    timeout: float = 600.0
    """Time in seconds that a rank waits for another rank before the run ends with an error."""
    deterministic: bool = False
    """Whether to refuse operations whose results may differ between two runs with the same seed."""
    resume: bool | str = False
    """Checkpoint to resume from: `"auto"` takes the newest one, or starts from step 0 if there is none; `true` takes
    the newest one, and fails if there is none; a path names one. `shoestring checkpoint explain RUN` says which one
    "auto" would take, and why."""
    folder: str = ""
    """Folder that the run writes to. Defaults to a new folder in `runs/`."""
    sinks: tuple[str, ...] = ()
    """Further destinations of the metrics, besides metrics.jsonl: `tensorboard`, `wandb`, `trackio` or `mlflow`
    (install the extra of that name), `hub` (after `shoestring hub login`), or `package.module:callable`, which is
    called with the run's folder, name and settings."""
    project: str = ""
    """Folder with code that the run file names, searched after the installed packages and the current folder. Defaults
    to the folder of the run file if such code lies there, so that the run can be started and resumed from any folder.
    """
    packages: tuple[str, ...] = ()
    """Your own Python packages of features: with `["mypkg"]`, the run file may have a table `[mypkg.technique]` for
    each feature of mypkg."""
    prompts: tuple[str, ...] = ()
    """Prompts from which text samples are generated at the end of training."""
    baselines: bool = False
    """Whether to compare the held-out bits per byte with those of gzip, xz and a 5-gram model at the end."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run file, with types and values checked."""

    name: str
    settings: Settings = field(default_factory=Settings)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    features: tuple[Feature, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [run] and tables of features that name untrusted code, with their values. This code was not imported."""
    origin: Trust = USER
    """Whether the user trusts the run file; only then may the code in `unread` be run."""

    def __post_init__(self) -> None:
        for name, what in (("model", "the model to train"), ("data", "what to train on")):
            if getattr(self.settings, name) == "":
                raise ConfigError(f"`--{name}` is missing: {what}", hint=f"add --{name} and its name or path")
        trackers.check(self.settings.sinks)
        for name in ("batch", "accumulate", "steps"):
            if getattr(self.settings, name) < 1:
                raise ConfigError(f"`run.{name}` must be at least 1, got {getattr(self.settings, name)}")
        if self.settings.timeout <= 0:
            raise ConfigError(f"`run.timeout` must be positive, got {self.settings.timeout}")
        if self.settings.epochs and self.settings.minutes:
            raise ConfigError("`run.epochs` and `run.minutes` both say how long to train", hint="remove one of them")
        for name in ("minutes", "epochs", "evaluate_every", "evaluate_samples", "patience", "seed"):
            if not 0 <= getattr(self.settings, name) < 2**63:
                raise ConfigError(f"`run.{name}` must be zero or a positive number, got {getattr(self.settings, name)}")
        for name in ("patience", "save_best"):
            if getattr(self.settings, name) and not self.settings.evaluate_every:
                hint = "set run.evaluate_every to the steps between two"
                raise ConfigError(f"`run.{name}` needs evaluations during the run", hint=hint)
        self.data.check_weights(len(self.sources))

    @property
    def sources(self) -> tuple[str, ...]:
        """The data sources in `run.data`, as a tuple even if there is only one."""
        return (self.settings.data,) if isinstance(self.settings.data, str) else self.settings.data

    @property
    def document(self) -> dict[str, Any]:
        """The run as the content of a run file; `parse` reads an equal run from it."""
        settings = asdict(self.settings)
        length = "minutes" if self.settings.minutes else "epochs" if self.settings.epochs else "steps"
        settings = {name: value for name, value in settings.items() if name == length or name not in precedence.LENGTHS}
        document: dict[str, Any] = {"run": settings, "model": dict(self.model), "data": asdict(self.data)}
        for feature in self.features:
            area, key = feature.name.split(".")
            document.setdefault(area, {})[key] = asdict(getattr(feature, "requested", feature))
        for name, table in self.unread.items():
            area, key = name.split(".")
            document.setdefault(area, {})[key] = table
        return document

    @property
    def has_own_data(self) -> bool:
        """Whether `run.data` names a data set of the user's own: `package.module:callable`, or a folder with MNIST's
        files.

        Raises:
            ConfigError: `run.data` is an empty list, or a list that contains such a data set.
        """
        from shoestring.data.sources import is_mnist

        named = [source for source in self.sources if ":" in source and not source.startswith("hf:")]
        own = named + [source for source in self.sources if is_mnist(source)]
        if not isinstance(self.settings.data, str) and (own or not self.sources):
            listed = f"`{own[0]}`" if own else "nothing"
            raise ConfigError(f"`run.data` lists {listed}", hint="list one or more sources of text")
        return bool(own)

    @property
    def trusts(self) -> dict[str, Trust]:
        """Maps each key of [run] that may name code to the trust in that code."""
        own = Trust(project=self.settings.project)
        return {f"run.{key}": self.origin if f"run.{key}" in self.unread else own for key in CODE_KEYS}

    @property
    def toml(self) -> str:
        """The text of a run file that describes this run."""
        return tomli_w.dumps(self.document)

    def completed(self, world: World) -> Run:
        """Return a copy of the run with missing default features added: DDP, AdamW and tiered checkpoints."""
        world = arrange_mesh(world, self.features)
        areas = {area_of(type(feature)) for feature in self.features}
        owned = {seam for feature in self.features for seam in feature.seams}
        resolved = resolve_all(self.features, world)
        sharded = {dim for feature in resolved if Seam.SHARD in feature.seams for dim in feature.over}
        missing = []

        def default(area: str) -> type[Feature]:
            return technique(area, DEFAULTS[area])

        if world.ranks_over(DATA) > 1 and not sharded & set(DATA):
            missing.append(default("parallel")())
        elif world.ranks_over([LOCAL]) > 1 and LOCAL not in sharded:
            missing.append(structure({"hosts": "leave"}, default("parallel"), "parallel.ddp", "this"))
        if Seam.OPTIM not in owned:
            missing.append(default("optim")())
        if "checkpoint" not in areas:
            missing.append(default("checkpoint")())

        def position(feature: Feature) -> int:
            area = area_of(type(feature))
            return AREAS.index(area) if area in AREAS else len(AREAS)

        return replace(self, features=tuple(sorted((*self.features, *missing), key=position)))


# -- reading ----------------------------------------------------------------------------------------------------------


def load(source: str, overrides: Sequence[str] = (), *, trusted: bool = True) -> Run:
    """Read a run file or a recipe in order to run it, with overrides from the command line.

    Running a run file declares that the user trusts the code that it names; so does running a project, which is a
    folder with a run file that no run has written. A run folder must have been declared trusted before: the user's own
    runs do so for the folders that they write; for other folders, the user has to do so.

    Args:
        source: path of a run file, project or run folder, or name of a recipe.
        trusted: whether running a run file declares that the code in it is trusted.

    Raises:
        ConfigError: there is no such file, it is not TOML, or a key or value in it is wrong.
        TrustError: the file names code that has not been declared trusted.
    """
    path, document = read(source)
    _name_project(path, document, overrides)
    origin = trust_of(path, document)
    written_by_a_run = Path(source).is_dir() and (path.parent / "environment.json").exists()
    if trusted and not written_by_a_run:
        if os.environ.get("RANK", "0") == "0":
            origin.remember()
    elif _unknown(document, overrides):
        origin.require()
    else:
        _forget_project(document, origin)
    override(document, overrides, source)
    return parse(document, name=_name(path), source=source)


def look(source: str, overrides: Sequence[str] = ()) -> Run:
    """Read a run file in order to show it; keys that name untrusted code are put into `Run.unread`.

    Raises:
        ConfigError: as for `load`.
    """
    path, document = read(source)
    _name_project(path, document, overrides)
    origin = trust_of(path, document)
    unread = _unknown(document, overrides)
    if unread and origin.holds:
        unread = ()
    _forget_project(document, origin)
    override(document, overrides, source)
    return parse(document, name=_name(path), source=source, unread=unread, origin=origin)


def _name_project(path: Path, document: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set `run.project` to the folder of a run file if code that the run names lies there."""
    changed = copy.deepcopy(document)
    override(changed, overrides)
    names = [name for names in code_of(changed).values() for name in names]
    table = document.setdefault("run", {})
    if isinstance(table, dict) and "project" not in table and any(naming.lies_in(name, path.parent) for name in names):
        table["project"] = str(path.parent.resolve())


def _forget_project(document: dict[str, Any], origin: Trust) -> None:
    """Remove `run.project` unless the user trusts the file that names it, so that nothing is imported from there."""
    table = document.get("run")
    if isinstance(table, dict) and origin.place is not None and not (origin.names and origin.holds):
        table.pop("project", None)


def vouch(folder: Path) -> None:
    """Record that the user's own run wrote the run file in a folder, so that the code that it names is trusted."""
    trust_of(*read(str(folder))).remember()


def read(source: str) -> tuple[Path, dict[str, Any]]:
    """Read the TOML of a run file, a run folder or a recipe, without checking its keys.

    Returns:
        The path of the file, and its content.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    path = locate(source)
    try:
        return path, foreign.read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read `{source}`: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"`{source}` is not TOML: {error}") from error


def _unknown(document: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, ...]:
    """List the keys and tables of a run file that name code, except code that the command line names as well."""
    typed: dict[str, Any] = {}
    override(typed, overrides)
    known = {name for names in code_of(typed).values() for name in names}
    changed = copy.deepcopy(dict(document))
    override(changed, overrides)
    return tuple(key for key, names in code_of(changed).items() if not known.issuperset(names))


# -- the document -----------------------------------------------------------------------------------------------------


def _name(path: Path) -> str:
    """Return the name of a run: its file's name without suffix, or its folder's name if the file is called
    `run.toml`."""
    folder = path.parent.name
    return folder if path.name == "run.toml" and folder not in ("", "..") else path.stem


def locate(source: str) -> Path:
    """Find the run file that `source` means: the path of a file or of a run folder, or the name of a recipe."""
    path = Path(source)
    if path.is_dir() and (path / "run.toml").is_file():
        return path / "run.toml"
    if path.exists() or path.suffix or path.name != source:
        if path.is_dir():
            raise ConfigError(f"the folder `{source}` holds no run.toml", hint=f"recipes: {', '.join(recipes.find())}")
        if path.exists() and not path.is_file():
            raise ConfigError(f"`{source}` is a pipe or a device, not a file", hint="save it as a file first")
        if not path.is_file():
            raise ConfigError(f"there is no run file `{source}`", hint=f"recipes: {', '.join(recipes.find())}")
        return path
    installed = recipes.find()
    if source not in installed:
        raise ConfigError(f"there is no run file or recipe `{source}`", hint=nearest(source, installed))
    return installed[source].file


def override(document: dict[str, Any], flags: Sequence[str], source: str = "the run file") -> None:
    """Apply flags `--area.technique.key value` (or `=value`) to a document, in place; keys without a dot belong to
    [run].

    A value that is not valid TOML is taken as a string. `--area.technique` without a value turns the technique on. Keys
    of the document that a flag overrules are removed: `--steps` removes `minutes`. Former names of keys are accepted.
    """
    renames.rename(document, source)
    rest, overridden = list(flags), set[str]()
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"unexpected argument `{flag}`", hint="overrides look like --area.technique.field value")
        name, equals, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        if "." not in name and name not in (run_keys := [field.name for field in fields(Settings)]):
            name = renames.new_name(f"run.{name}").removeprefix("run.")
            if name not in run_keys:
                # Suggest keys of this name in other tables. Tables that the document turns on come first, as do the
                # default tables of areas that the document does not name.
                on = {f"{area}.{technique}" for area, technique in DEFAULTS.items() if area not in document}
                on |= {
                    f"{area}.{key}"
                    for area, content in document.items()
                    if isinstance(content, dict)
                    for key in content
                }
                settings_of = {"data": Data, **keys()}
                named = [table for table in settings_of if name in {field.name for field in fields(settings_of[table])}]
                named.sort(key=lambda table: table not in on)
                if same := " or ".join(f"`--{table}.{name}`" for table in named[:3]):
                    raise ConfigError(f"`{flag}` is no key of [run]", hint=f"did you mean {same}?")
                if here := other_names.flags(name):
                    raise ConfigError(f"`{flag}` is no key of [run]", hint=f"here it is {here}: shoestring keys {name}")
        *tables, key = renames.new_name(name if "." in name else f"run.{name}").split(".")
        table = document
        for table_name in tables:
            table = table.setdefault(table_name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"`{flag}`: `{table_name}` is a value, not a table")
        overridden.add(".".join((*tables, key)))
        if equals:
            table[key] = _literal(value)
        elif rest and not rest[0].startswith("--"):
            table[key] = _literal(rest.pop(0))
        elif len(tables) == 1 and tables[0] not in TABLES:
            table.setdefault(key, {})
        else:
            raise ConfigError(f"`{flag}` needs a value", hint=f"for a switch: {flag} true")
    precedence.settle(document, overridden)


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]  # own file: it is a flag of the command line
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def parse(
    document: Mapping[str, Any],
    *,
    name: str = "run",
    source: str = "the run file",
    unread: Collection[str] = (),
    origin: Trust = USER,
) -> Run:
    """Turn the content of a run file into a Run.

    Args:
        name: name of the run.
        source: name of the file, for error messages.
        unread: keys of [run] and tables of features to skip, because they name untrusted code; see `Run.unread`.
        origin: trust in the file, which decides whether the code in `unread` may be run.

    Raises:
        ConfigError: a table, key or type is wrong; the error says where, and suggests the nearest key.
    """
    document = copy.deepcopy(dict(document))
    renames.rename(document, source)
    settings = structure(document.get("run", {}), Settings, "run", source)
    areas = (*AREAS, *dict.fromkeys(settings.packages))
    known = {*TABLES, *areas}
    for key, table in document.items():
        if key not in known:
            hint = f"{nearest(key, known)} (`run.packages` opens tables of other packages)"
            raise ConfigError(f"{source}: unknown table [{key}]", hint=hint)
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: `{key}` must be a table, got {table!r}", hint=f"write [{key}]")
    if settings.project and not unread:
        naming.search(settings.project)
    for package in settings.packages:  # packages are imported here, so that errors are raised at once
        if package in (*TABLES, *AREAS, "shoestring"):
            raise ConfigError(
                f"{source}: `run.packages` names `{package}`, which is a name that shoestring uses itself"
            )
        if "run.packages" not in unread:
            techniques(package, source)
    run = Run(
        name=name,
        settings=settings,
        model=document.get("model", {}),
        data=structure(document.get("data", {}), Data, "data", source),
        features=tuple(
            structure(values, technique(area, key, source), f"{area}.{key}", source)
            for area in areas
            for key, values in document.get(area, {}).items()
            if f"{area}.{key}" not in unread
        ),
        unread={key: entry(document, key) for key in unread},
        origin=origin,
    )
    precedence.check(document, lambda table: defaults(_settings_of(table, source)), source)
    return run


def _settings_of(table: str, source: str) -> type[Any]:
    """Return the dataclass of the settings in a table of a run file."""
    if table in ("run", "data"):
        return Settings if table == "run" else Data
    area, _, key = table.partition(".")
    return technique(area, key, source)


def techniques(area: str, source: str = "the run file") -> dict[str, type[Feature]]:
    """Map the names of techniques in a run file to their classes, for an area or a package in `run.packages`.

    Raises:
        ConfigError: there is no such package, importing it fails, or it exports no feature.
    """
    module = import_module(f"shoestring.{area}") if area in AREAS else _package(area, source)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    exported = [getattr(module, name) for name in names]
    kinds = [value for value in exported if isinstance(value, type) and issubclass(value, Feature)]
    features = {kind.__name__.lower(): kind for kind in kinds if area_of(kind) == area and not isabstract(kind)}
    if not features and area not in AREAS:
        hint = f"its features are the subclasses of shoestring.Feature that `import {area}` brings"
        raise ConfigError(f"{source}: the package `{area}` of `run.packages` exports no feature", hint=hint)
    return features


def _package(name: str, source: str) -> ModuleType:
    """Import a package of the user's own."""
    if not name.isidentifier():
        hint = f"name the package that it belongs to, `{name.partition('.')[0]}`, and export its features there"
        raise ConfigError(f"{source}: `run.packages` takes names of packages, not `{name}`", hint=hint)
    try:
        return import_package(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        hint = "is it installed, or below the current directory?"
        raise ConfigError(f"{source}: `run.packages`: cannot import `{name}`: {reason}", hint=hint) from error


def technique(area: str, key: str, source: str = "the run file") -> type[Feature]:
    """Return the class of the technique of a table [area.key]; raises ConfigError if there is none."""
    features = techniques(area, source)
    if key not in features:
        raise ConfigError(f"{source}: unknown technique [{area}.{key}]", hint=nearest(key, features))
    return features[key]


def keys(areas: Sequence[str] = AREAS) -> dict[str, type[Feature]]:
    """Map the tables of all features in these areas and packages to the classes of their settings."""
    return {f"{area}.{name}": kind for area in areas for name, kind in techniques(area).items()}
