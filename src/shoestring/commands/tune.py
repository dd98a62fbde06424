"""Arguments of `shoestring tune`: a search for the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shoestring.commands.printing import say_lines


@dataclass(frozen=True)
class StudyFile:
    """Arguments that name a study file."""

    file: Positional[Path] = Path("tune.toml")
    """Path of the study file."""


@dataclass(frozen=True)
class StudyWorkers:
    """Number of workers of a study on this host."""

    workers: int = 1
    """Number of workers to start on this host; each runs one trial at a time."""


@dataclass(frozen=True)
class StartStudy(StudyWorkers, StudyFile):
    """Arguments of `shoestring tune`."""

    def __call__(self) -> int:
        from shoestring.verbs.tune import tune

        outcome = tune(self.file, self.workers)
        say_lines(outcome.lines)
        return outcome.code


@dataclass(frozen=True, kw_only=True)
class JoinStudy(StudyWorkers):
    """Arguments of `shoestring tune join`."""

    store: Positional[str]
    """URL of the store; env:NAME reads the URL from the environment variable NAME."""
    name: Positional[str] = ""
    """Name of the study; needed only if the store holds several studies."""
    trust: bool = False
    """Run code that the study names, such as your own model. Everybody who can write to the store can make it name any
    code; without this flag, a study that names code is refused."""

    def __call__(self) -> int:
        from shoestring.verbs.tune import join

        outcome = join(self.store, self.name, self.workers, trust=self.trust)
        say_lines(outcome.lines)
        return outcome.code


@dataclass(frozen=True)
class WriteBest(StudyFile):
    """Arguments of `shoestring tune best`."""

    out: Path = Path("run.toml")
    """Path of the run file to write."""

    def __call__(self) -> int:
        from shoestring.verbs.tune import write_best

        say_lines(write_best(self.file, self.out))
        return 0


@dataclass(frozen=True)
class WritePage:
    """Arguments of `shoestring tune page`."""

    files: Positional[tuple[Path, ...]] = (Path("tune.toml"),)
    """Study files: first the study that the page shows, then studies to compare it with."""
    out: Annotated[Path | None, arg(metavar="PATH")] = None
    """Path of the page to write; defaults to study.html in the folder of the study."""

    def __call__(self) -> int:
        from shoestring.verbs.tune import compare_studies

        print(compare_studies(self.files, self.out))
        return 0
