"""The verbs that start ranks, or say what they would do; importing this module imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from shoestring.core.errors import ConfigError

Workers = int | Literal["auto"]


@dataclass(frozen=True)
class Train:
    """Train as a run file says. Overrides: --area.technique.key VALUE, and --key VALUE for a key of [run]."""

    source: Positional[str]
    """Run file, run folder, or name of a recipe such as quickstart."""
    workers: Workers = 0
    """Ranks to start on this host. 0 starts one for each GPU, or one where there is none; auto starts up to two on a
    CPU. Not used under torchrun, which starts the ranks itself."""
    restarts: int = 0
    """Times that all ranks are started again after one has died; use it with run.resume = "auto". Errors that only the
    user can correct, such as a wrong run file, are final."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        resolved = run.load(self.source, overrides)
        workers = 0 if "RANK" in os.environ else _number_of_workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            return launch([*_debug_flag(), "train", self.source, *overrides], workers, self.restarts)
        from shoestring.distributed.join import join
        from shoestring.report.recorder import Recorder
        from shoestring.training.loop import train

        with Recorder() as record, join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            result = train(resolved, world, record)
        return 0 if result.status == "finished" else 130


@dataclass(frozen=True)
class Check:
    """Print the resolved settings of a run, its features in order, its parameters and its memory; start nothing."""

    source: Positional[str]
    """Run file, run folder, or name of a recipe."""
    workers: int = 1
    """Number of ranks on one host to check the run for."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run
        from shoestring.commands.check import check

        print("\n".join(check(run.load(self.source, overrides), self.workers)))
        return 0


@dataclass(frozen=True)
class Plan:
    """Predict the step time under each gradient exchange from a short trial, and write a run file with the best one."""

    source: Positional[str]
    """Run file, run folder, or name of a recipe. [comm.auto] lists the codecs that may be chosen."""
    workers: Workers = "auto"
    """Ranks to start on this host; auto starts one for each GPU, or up to two on a CPU. Not used under torchrun."""
    out: Path | None = None
    """Path of the run file to write; defaults to plan.toml beside the run file."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        resolved = run.load(self.source, overrides)
        workers = 0 if "RANK" in os.environ else _number_of_workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            given = ["--out", str(self.out)] if self.out else []
            return launch([*_debug_flag(), "plan", self.source, *given, *overrides], workers)
        from shoestring.commands.plan import default_path, describe, plan, write
        from shoestring.distributed.join import join

        with join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            out = self.out or default_path(self.source)
            planned = plan(resolved, world)
            world.decide(lambda: write(planned, out))
            if world.first:
                print("\n".join(describe(planned, world)))
                print(f"written to {out}; start it with: shoestring train {out}")
        return 0


@dataclass(frozen=True)
class DistillDrafter:
    """Train a small model to draft for a large one: first a reference on all tokens, then the draft on those that are
    worth learning."""

    source: Positional[str]
    """Run file with a table [decode.distill], run folder, or name of a recipe. Each stage writes to a folder of its own
    inside the run folder."""
    workers: Workers = 0
    """Ranks to start on this host. 0 starts one for each GPU, or one where there is none; auto starts up to two on a
    CPU. Not used under torchrun."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        resolved = run.load(self.source, overrides)
        workers = 0 if "RANK" in os.environ else _number_of_workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            return launch([*_debug_flag(), "distill", self.source, *overrides], workers)
        from shoestring.commands.distill import distill
        from shoestring.distributed.join import join
        from shoestring.report.recorder import Recorder

        with Recorder() as record, join(timeout=resolved.settings.timeout) as world:
            _silence_other_ranks(world.first)
            status = distill(resolved, world, record, say=print if world.first else len)
        return 0 if status == "finished" else 130


@dataclass(frozen=True)
class Probe:
    """Measure this cluster: arithmetic and memory of each device, disks, and the links between ranks."""

    out: Path = Path("cluster.toml")
    """Path of the file to write; the disk that holds it is the one that is measured."""
    workers: Workers = "auto"
    """Ranks to start on this host, between which links are measured; auto starts one for each GPU, or up to two on a
    CPU. Not used under torchrun."""

    def __call__(self, overrides: Sequence[str]) -> int:
        workers = 0 if "RANK" in os.environ else _number_of_workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            return launch([*_debug_flag(), "probe", "--out", str(self.out)], workers)
        from shoestring.commands.probe import describe, probe, write
        from shoestring.distributed.join import join

        with join() as world:
            _silence_other_ranks(world.first)
            cluster = probe(world, self.out.parent)
            world.decide(lambda: write(cluster, self.out))
            if world.first:
                print("\n".join(describe(cluster)))
                print(f"written to {self.out}")
        return 0


def _debug_flag() -> list[str]:
    """Return --debug for the workers if it was given to this process."""
    return ["--debug"] if logging.getLogger("shoestring").isEnabledFor(logging.DEBUG) else []


def _number_of_workers(asked: Workers) -> int:
    if isinstance(asked, int) and asked < 0:
        raise ConfigError(f"--workers must not be negative, got {asked}")
    if isinstance(asked, int) and asked > 0:
        return asked
    import torch

    on_cpu = min(2, os.cpu_count() or 1) if asked == "auto" else 1
    return torch.cuda.device_count() or on_cpu


def _silence_other_ranks(first: bool) -> None:
    """Let all ranks but the first print warnings and errors only."""
    if not first:
        logging.getLogger("shoestring").setLevel(logging.WARNING)
