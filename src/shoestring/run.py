"""The run file, typed: [run], [model], [data], and a table [area.technique] for each feature that is on.

This is the only module that knows every area. It imports no torch, so a run file is checked in milliseconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module, resources
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tomli_w

from shoestring.core.errors import ConfigError, nearest
from shoestring.core.feature import AREAS, DATA, LOCAL, Feature, Seam, area_of, arrange_mesh
from shoestring.data import Data
from shoestring.report import trackers
from shoestring.settings import structure

if TYPE_CHECKING:
    from shoestring.core.world import World

TABLES = ("run", "model", "data")  # beside those of features


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The table [run]: what is trained, on what, for how long, and where results go."""

    model: str = "shoestring.models.gpt:tiny"
    """Model to train: `package.module:callable` that returns an nn.Module, `hf:PATH`, a causal language model that
    transformers loads by that path or name, or the folder of a run or of a model, whose weights training starts from.
    The table [model] holds its arguments."""
    data: str | tuple[str, ...] = "python-stdlib"
    """Source of the data: `python-stdlib`, paths or globs of .txt, .jsonl and .parquet files, a .tokens file,
    `hf:NAME`, a folder with MNIST's files, or `package.module:callable`. A list of sources is mixed in the proportion
    of `data.weights`."""
    loss: str = ""
    """Loss of your own: `package.module:callable` from (output, batch) to (sum, count); defaults to the
    cross-entropy of the next token."""
    steps: int = 400
    """Number of optimizer steps; `minutes` and `epochs` take precedence."""
    epochs: float = 0.0
    """Passes over the training data, in place of `steps`. 0 trains for `steps`."""
    minutes: float = 0.0
    """Training time in minutes, in place of `steps`: the number of steps follows from the pace of the first ones. 0
    trains for `steps`."""
    batch: int = 32
    """Samples per optimizer step, over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches per optimizer step, whose gradients are accumulated; more need less memory."""
    evaluate_every: int = 0
    """Steps between evaluations on part of the held-out data; 0 evaluates at the end only."""
    evaluate: str = ""
    """Evaluation of your own: `package.module:callable` from the model to a dict of numbers, which are metrics. Every
    rank calls it at each evaluation, in evaluation mode and without gradients; the first rank's numbers count."""
    patience: int = 0
    """Evaluations in a row without a lower held-out loss after which training ends (early stopping); 0 never does."""
    keep_best: bool = False
    """Write the model with the lowest held-out loss so far to the folder `best` of the run, at each evaluation."""
    seed: int = 0
    """Seed of all random numbers: initial weights, order of the data, dropout."""
    timeout: float = 600.0
    """Seconds that a rank waits for another one before the run ends with an error."""
    deterministic: bool = False
    """Refuse operations whose results may differ between two runs with the same seed."""
    resume: bool | str = False
    """Checkpoint to resume from: `"auto"` takes the newest and starts afresh where there is none, `true` requires one,
    a path names one."""
    folder: str = ""
    """Folder that the run writes to; defaults to a new one in `runs/`."""
    sinks: tuple[str, ...] = ()
    """Destinations of the metrics besides metrics.jsonl: `tensorboard`, `wandb`, `trackio`, `mlflow` (each an extra),
    or `package.module:callable`, which is called with the folder, the name and the settings of the run."""
    packages: tuple[str, ...] = ()
    """Names of Python packages of your own: `["mypkg"]` opens a table `[mypkg.technique]` for each of its features."""
    prompts: tuple[str, ...] = ()
    """Prompts of the text samples that are generated at the end."""
    baselines: bool = False
    """Compare the held-out bits per byte with gzip, xz and a 5-gram at the end."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One resolved run file."""

    name: str
    settings: Settings = field(default_factory=Settings)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    features: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        trackers.check(self.settings.sinks)
        for name in ("batch", "accumulate", "steps"):
            if getattr(self.settings, name) < 1:
                raise ConfigError(f"`run.{name}` must be at least 1, got {getattr(self.settings, name)}")
        if self.settings.timeout <= 0:
            raise ConfigError(f"`run.timeout` must be positive, got {self.settings.timeout}")
        if self.settings.epochs and self.settings.minutes:
            raise ConfigError("`run.epochs` and `run.minutes` both say how long to train", hint="remove one of them")
        for name in ("minutes", "epochs", "evaluate_every", "patience", "seed"):
            if not 0 <= getattr(self.settings, name) < 2**63:
                raise ConfigError(f"`run.{name}` must be zero or a positive number, got {getattr(self.settings, name)}")
        for name in ("patience", "keep_best"):
            if getattr(self.settings, name) and not self.settings.evaluate_every:
                hint = "set run.evaluate_every to the steps between two"
                raise ConfigError(f"`run.{name}` needs evaluations during the run", hint=hint)
        self.data.check_weights(len(self.sources))

    @property
    def sources(self) -> tuple[str, ...]:
        """What `run.data` lists."""
        return (self.settings.data,) if isinstance(self.settings.data, str) else self.settings.data

    @property
    def document(self) -> dict[str, Any]:
        """The run as a document that `parse` reads back to an equal run."""
        document: dict[str, Any] = {"run": asdict(self.settings), "model": dict(self.model), "data": asdict(self.data)}
        for feature in self.features:
            area, key = feature.name.split(".")
            document.setdefault(area, {})[key] = asdict(feature)
        return document

    def dump(self) -> str:
        return tomli_w.dumps(self.document)

    def completed(self, world: World) -> Run:
        """The run with the default owner of each seam that nobody owns: DDP, AdamW, the checkpoint cache."""
        world = arrange_mesh(world, self.features)
        areas = {area_of(type(feature)) for feature in self.features}
        owned = {seam for feature in self.features for seam in feature.seams}
        resolved = [feature.resolve(world) for feature in self.features]
        sharded = {dim for feature in resolved if Seam.SHARD in feature.seams for dim in feature.over}
        missing = []
        if world.ranks_over(DATA) > 1 and not sharded & set(DATA):
            missing.append(technique("parallel", "ddp")())
        elif world.ranks_over([LOCAL]) > 1 and LOCAL not in sharded:
            missing.append(structure({"hosts": "leave"}, technique("parallel", "ddp"), "parallel.ddp", "this"))
        if Seam.OPTIM not in owned:
            missing.append(technique("optim", "adamw")())
        if "checkpoint" not in areas:
            missing.append(technique("checkpoint", "tiered")())
        return replace(self, features=tuple(sorted((*self.features, *missing), key=_position)))

    def placed(self, folder: Path) -> Run:
        """The run with every folder that a feature writes to inside the run's own."""
        return replace(self, features=tuple(feature.placed(folder) for feature in self.features))


def _position(feature: Feature) -> int:
    """Where a feature's area stands in the order of application."""
    area = area_of(type(feature))
    return AREAS.index(area) if area in AREAS else len(AREAS)


# -- reading ----------------------------------------------------------------------------------------------------------


def load(source: str, overrides: Sequence[str] = ()) -> Run:
    """Read a run file, or the recipe of that name, with overrides from the command line.

    Raises:
        ConfigError: there is no such file, it is not TOML, or a key or value in it is wrong.
    """
    path = locate(source)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except OSError as error:
        raise ConfigError(f"cannot read `{source}`: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{source}` is not TOML: {error}") from error
    override(document, overrides)
    return parse(document, name=_name(path), source=source)


def _name(path: Path) -> str:
    """Of the run file, or of the folder that it was found in: a plain `run.toml` is named alike wherever it lies."""
    folder = path.parent.name
    return folder if path.name == "run.toml" and folder not in ("", "..") else path.stem


def locate(source: str) -> Path:
    """The run file at a path, in a run folder, or in the packaged recipes."""
    path = Path(source)
    if path.is_dir() and (path / "run.toml").is_file():
        return path / "run.toml"
    if path.exists() or path.suffix or path.name != source:
        if not path.is_file():
            raise ConfigError(f"there is no run file `{source}`", hint=f"recipes: {', '.join(recipes())}")
        return path
    if source not in recipes():
        raise ConfigError(f"there is no run file or recipe `{source}`", hint=nearest(source, recipes()))
    return Path(str(resources.files("shoestring_recipes") / source / "run.toml"))


def recipes() -> list[str]:
    """The names of the recipes in the package."""
    root = Path(str(resources.files("shoestring_recipes")))
    return sorted(path.parent.name for path in root.glob("*/run.toml"))


def override(document: dict[str, Any], flags: Sequence[str]) -> None:
    """Apply `--area.technique.field value` (or `=value`) to a document; a name without dots belongs to [run].

    Values are TOML, or plain strings where they are not. `--area.technique` alone turns the technique on.
    """
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"unexpected argument `{flag}`", hint="overrides look like --area.technique.field value")
        name, equals, value = flag[2:].partition("=")
        *tables, key = name.replace("-", "_").split(".")
        table = document
        for each in tables or ["run"]:
            table = table.setdefault(each, {})
            if not isinstance(table, dict):
                raise ConfigError(f"`{flag}`: `{each}` is a value, not a table")
        if equals:
            table[key] = _literal(value)
        elif rest and not rest[0].startswith("--"):
            table[key] = _literal(rest.pop(0))
        elif len(tables) == 1 and tables[0] not in TABLES:
            table.setdefault(key, {})
        else:
            raise ConfigError(f"`{flag}` needs a value", hint=f"for a switch: {flag} true")


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def parse(document: Mapping[str, Any], *, name: str = "run", source: str = "the run file") -> Run:
    """A document as a Run; a ConfigError says where a table, key or type is wrong, and what is near."""
    settings = structure(document.get("run", {}), Settings, "run", source)
    areas = (*AREAS, *dict.fromkeys(settings.packages))
    known = {*TABLES, *areas}
    for key, table in document.items():
        if key not in known:
            hint = f"{nearest(key, known)} (`run.packages` opens tables of other packages)"
            raise ConfigError(f"{source}: unknown table [{key}]", hint=hint)
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: `{key}` must be a table, got {table!r}", hint=f"write [{key}]")
    for package in settings.packages:  # each is imported, so that an error about it comes at once
        if package in (*TABLES, *AREAS, "shoestring"):
            raise ConfigError(f"{source}: `run.packages` names `{package}`, which is shoestring's own name")
        techniques(package, source)
    return Run(
        name=name,
        settings=settings,
        model=document.get("model", {}),
        data=structure(document.get("data", {}), Data, "data", source),
        features=tuple(
            structure(values, technique(area, key, source), f"{area}.{key}", source)
            for area in areas
            for key, values in document.get(area, {}).items()
        ),
    )


def techniques(area: str, source: str = "the run file") -> dict[str, type[Feature]]:
    """The techniques of an area, or of a package that `run.packages` names, by their names in the run file.

    Raises:
        ConfigError: there is no such package, importing it fails, or it exports no feature.
    """
    module = import_module(f"shoestring.{area}") if area in AREAS else _package(area, source)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    exported = [getattr(module, name) for name in names]
    kinds = [each for each in exported if isinstance(each, type) and issubclass(each, Feature)]
    found = {kind.__name__.lower(): kind for kind in kinds if area_of(kind) == area and not isabstract(kind)}
    if not found and area not in AREAS:
        hint = f"its features are the subclasses of shoestring.Feature that `import {area}` brings"
        raise ConfigError(f"{source}: the package `{area}` of `run.packages` exports no feature", hint=hint)
    return found


def _package(name: str, source: str) -> ModuleType:
    """Import a package of the user's own, whose name is also the name of its tables."""
    if not name.isidentifier():
        hint = f"name the package that it belongs to, `{name.partition('.')[0]}`, and export its features there"
        raise ConfigError(f"{source}: `run.packages` takes names of packages, not `{name}`", hint=hint)
    try:
        return import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        hint = "is it installed, or below the current directory?"
        raise ConfigError(f"{source}: `run.packages`: cannot import `{name}`: {reason}", hint=hint) from error


def technique(area: str, key: str, source: str = "the run file") -> type[Feature]:
    found = techniques(area, source)
    if key not in found:
        raise ConfigError(f"{source}: unknown technique [{area}.{key}]", hint=nearest(key, found))
    return found[key]


def keys(areas: Sequence[str] = AREAS) -> dict[str, type[Feature]]:
    """Every table that features of these areas and packages may have, with the class of its settings."""
    return {f"{area}.{name}": kind for area in areas for name, kind in techniques(area).items()}
