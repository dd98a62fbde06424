"""Arguments of the verbs for runs, recipes and clusters."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from shoestring import figures
from shoestring.commands.printing import PrintsResult, say, say_lines
from shoestring.commands.shared import TrainedRun
from shoestring.core.errors import STOPPED, ConfigError
from shoestring.processors import processors

if TYPE_CHECKING:
    from shoestring.run import Run


_RANK_BYTES = 200 << 20
"""Bytes of memory that a rank needs for Python and torch alone."""


@dataclass(frozen=True)
class Ranks:
    """Number of ranks to start on this host."""

    workers: int | Literal["auto"] = 0
    """Number of ranks to start on this host. 0 starts one rank for each GPU, or a single rank if there is no GPU; auto
    starts one rank for each GPU, or up to two ranks if there is no GPU. Ignored under torchrun, which starts the
    ranks."""

    def launch(self, *arguments: str, restarts: int = 0) -> int | None:
        """Start ranks that run the command line with these arguments, and return their exit code.

        Returns None, without starting ranks, if this process is the only rank, or a rank of torchrun.
        """
        number = 0 if "RANK" in os.environ else self._number()
        if number <= 1:
            return None
        from shoestring.distributed.launch import launch
        from shoestring.planning.system import free_memory

        if (needed := number * _RANK_BYTES) > (free := free_memory()):
            message = (
                f"{number} ranks need about {figures.size(needed)} even without a model, and "
                f"{figures.size(free)} is free"
            )
            raise ConfigError(message, hint=f"lower --workers; this host has {processors()} processors")
        debug = ["--debug"] if logging.getLogger("shoestring").isEnabledFor(logging.DEBUG) else []
        return launch([*debug, *arguments], number, restarts)

    def _number(self) -> int:
        if self.workers != "auto" and self.workers < 0:
            raise ConfigError(f"--workers must not be negative, got {self.workers}")
        if self.workers != "auto" and self.workers > 0:
            return self.workers
        import torch

        on_cpu = min(2, processors()) if self.workers == "auto" else 1
        return torch.cuda.device_count() or on_cpu


def _silence_other_ranks(first: bool) -> None:
    """Let ranks other than the first print only warnings and errors."""
    if not first:
        logging.getLogger("shoestring").setLevel(logging.WARNING)


@dataclass(frozen=True)
class RunSource:
    """Arguments that name the settings of a run."""

    source: Positional[Annotated[str, arg(metavar="RUN")]]
    """Run file, run folder, or name of a recipe such as quickstart."""

    def load(self, overrides: Sequence[str], *, trusted: bool = True) -> Run:
        """Read the run in order to start it; raises an error if a file that it names does not exist."""
        from shoestring import run
        from shoestring.training.named_files import check_named_files

        loaded = run.load(self.source, overrides, trusted=trusted)
        check_named_files(loaded)
        return loaded


@dataclass(frozen=True)
class TrainingSource(RunSource):
    """Arguments that name the settings of a run, and the ranks that train it."""

    ranks: Ranks = Ranks()
    """Number of ranks to start."""


@dataclass(frozen=True)
class Train(TrainingSource):
    """Arguments of `shoestring train`."""

    restarts: int = 0
    """Number of times to restart all ranks after one of them has died; use it with run.resume = "auto". Errors that
    only the user can correct, such as a wrong run file, end the run at once."""

    def __call__(self, overrides: Sequence[str]) -> int:
        resolved = self.load(overrides)
        code = self.ranks.launch("train", self.source, *overrides, restarts=self.restarts)
        if code is not None:
            return code
        from shoestring.distributed.join import join
        from shoestring.report.recorder import Recorder
        from shoestring.training.loop import train

        with Recorder() as record, join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            result = train(resolved, world, record)
        return 0 if result.status == "finished" else STOPPED


@dataclass(frozen=True)
class Check:
    """Arguments of `shoestring check`."""

    source: Positional[Annotated[str, arg(metavar="RUN")]] = ""
    """Run file, run folder, or name of a recipe such as quickstart. Without a run, only the model of --model is
    described."""
    model: str | None = None
    """Model that replaces the run's run.model. Without a run, the model to describe: a run folder, a model folder, a
    .gguf file, or hf:NAME."""
    workers: int = 1
    """Number of ranks for which the run is checked, all on one host."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        if self.source:
            from shoestring.verbs.check import check

            model = [] if self.model is None else ["--model", self.model]
            say("\n".join(check(run.look(self.source, [*model, *overrides]), self.workers)))
            return 0
        if not self.model or overrides:
            raise ConfigError(
                f"`{overrides[0]}` is a setting of a run, and no run is named"
                if self.model
                else "there is nothing to check",
                hint="shoestring check RUN for a run, shoestring check --model MODEL for a model",
            )
        from shoestring.verbs.describe import describe

        say("\n".join(describe(self.model)))
        return 0


@dataclass(frozen=True)
class Plan(RunSource):
    """Arguments of `shoestring plan`."""

    ranks: Ranks = Ranks(workers="auto")
    """Number of ranks to start."""
    out: Path | None = None
    """Path of the run file to write; defaults to plan.toml beside the run file. A page with pictures of the plan is
    written beside it, with the suffix .html."""
    tries: int = 3
    """Number of ways to train to try for a few steps before one is chosen, starting with the fastest predicted one; 0
    compares only exchanges of gradients between whole replicas."""
    also: Annotated[tuple[str, ...], UseAppendAction] = ()
    """Feature to try as well, with its default settings, although it changes the result of training, such as
    precision.autocast; can be repeated. The model is measured again with each of them."""
    explain: Path | None = None
    """Cluster file that `shoestring probe` wrote on one host. With it no ranks are started and no run file is written:
    the command traces the operators of a step, and shows how the ranks of that host would divide them, and why."""

    def __call__(self, overrides: Sequence[str]) -> int:
        resolved = self.load(overrides, trusted=False)
        if self.explain is not None:
            for flag, differs in (
                ("workers", self.ranks != Plan.ranks),
                ("out", self.out is not None),
                ("tries", self.tries != Plan.tries),
                ("also", bool(self.also)),
            ):
                if differs:
                    message = f"--{flag} has no effect with --explain, which starts no ranks and writes no run file"
                    raise ConfigError(message, hint="leave out one of the two")
            from shoestring.verbs.explain import explain_operators

            say_lines(explain_operators(resolved, self.explain))
            return 0
        out = ["--tries", str(self.tries), *(["--out", str(self.out)] if self.out else [])]
        out += [word for name in self.also for word in ("--also", name)]
        code = self.ranks.launch("plan", self.source, *out, *overrides)
        if code is not None:
            return code
        from shoestring.distributed.join import join
        from shoestring.verbs.plan import default_path, describe, plan

        with join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            path = self.out or default_path(self.source)
            planned = plan(resolved, world, path, self.tries, self.also)
            if world.first:
                say("\n".join(describe(planned, world)))
                say(f"written to {path}; start it with: shoestring train {path}")
                if planned.page is not None:
                    say(f"the step, and why the other ways lost: {planned.page}")
        return 0


@dataclass(frozen=True)
class SearchKeys(PrintsResult):
    """Arguments of `shoestring keys`."""

    words: Positional[tuple[str, ...]] = ()
    """Words to search for: names of keys or tables, or words of help texts. Without words, all keys are listed."""
    packages: tuple[str, ...] = ()
    """Names of packages of your own whose features are searched too."""

    def __call__(self) -> int:
        from shoestring.verbs.keys import lines_of, search

        keys = search(self.words, self.packages)
        rows = [{"flag": key.flag, **asdict(key)} for key in keys]
        self.output.show(rows, (line for key in keys for line in lines_of(key)))
        return 0


@dataclass(frozen=True)
class DistillDrafter(TrainingSource):
    """Arguments of `shoestring distill`."""

    def __call__(self, overrides: Sequence[str]) -> int:
        resolved = self.load(overrides)
        code = self.ranks.launch("distill", self.source, *overrides)
        if code is not None:
            return code
        from shoestring.distributed.join import join
        from shoestring.report.recorder import Recorder
        from shoestring.verbs.distill import distill

        with Recorder() as record, join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            status = distill(resolved, world, record, say=say if world.first else len)
        return 0 if status == "finished" else STOPPED


@dataclass(frozen=True)
class Probe:
    """Arguments of `shoestring probe`."""

    out: Path = Path("cluster.toml")
    """Path of the file to write; the disk that holds it is measured."""
    ranks: Ranks = Ranks(workers="auto")
    """Number of ranks to start; the links between them are measured."""

    def __call__(self) -> int:
        code = self.ranks.launch("probe", "--out", str(self.out))
        if code is not None:
            return code
        from shoestring.distributed.join import join
        from shoestring.verbs.probe import describe, probe

        with join() as world:
            _silence_other_ranks(world.first)
            cluster = probe(world, self.out)
            if world.first:
                say("\n".join(describe(cluster)))
                say(f"written to {self.out}")
        return 0


@dataclass(frozen=True)
class Build:
    """The verb `shoestring build`, which has no arguments."""

    def __call__(self) -> int:
        from shoestring.verbs.build import build

        for line in build():
            say(line)
        return 0


@dataclass(frozen=True)
class ListRecipes:
    """The verb `shoestring recipes list`, which has no arguments."""

    def __call__(self) -> int:
        from shoestring.verbs.recipes import list_recipes

        say_lines(list_recipes())
        return 0


@dataclass(frozen=True)
class CopyRecipe:
    """Arguments of `shoestring recipes copy`."""

    name: Positional[str]
    """Name of the recipe; `shoestring recipes` lists them."""
    folder: Positional[Path]
    """New or empty folder to copy the recipe to."""

    def __call__(self) -> int:
        from shoestring.verbs.recipes import copy

        say_lines(copy(self.name, self.folder))
        return 0


@dataclass(frozen=True)
class CompareRuns:
    """Arguments of `shoestring compare`."""

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN RUN ...")]]
    """Two or more run folders."""
    out: Path = Path("compare.html")
    """Path of the page to write."""

    def __call__(self) -> int:
        from shoestring.verbs.report import compare

        text, page = compare(self.runs, self.out)
        say(text)
        logging.getLogger("shoestring").info("page: %s", page)
        return 0


@dataclass(frozen=True)
class Report(TrainedRun):
    """Arguments of `shoestring report`."""

    trace: Path | None = None
    """Path of a Chrome trace to write for Perfetto, with the spans of all ranks; by default no trace is written."""

    def __call__(self) -> int:
        from shoestring.verbs.report import report

        for path in report(self.run, self.trace):
            say(path)
        return 0


@dataclass(frozen=True)
class TrustPlaces:
    """Arguments of `shoestring trust`."""

    places: Positional[tuple[Path, ...]]
    """Run folders, model folders, folders of adapters, or run files."""
    forget: bool = False
    """Revoke the trust, so that the code of these places is refused again."""

    def __call__(self) -> int:
        from shoestring.verbs.trust import forget, vouch

        if not self.places:
            raise ConfigError("no folder or file is named", hint="name a folder or a run file")
        for place in self.places:
            print("\n".join(forget(place) if self.forget else vouch(place)), flush=True)
        return 0
