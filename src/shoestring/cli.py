"""The command line: verbs only. Importing this module imports no torch; each verb imports what it needs."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import OmitArgPrefixes, Positional, subcommand

from shoestring.commands.checkpoint import Checkpoint
from shoestring.core.errors import ConfigError, PeerError, ShoestringError, nearest

Workers = int | Literal["auto"]
UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)


@dataclass(frozen=True)
class Train:
    """Train what a run file says. Overrides: --area.technique.field VALUE, and --field VALUE for [run]."""

    source: Positional[str]
    """A run file, a run folder, or the name of a recipe (quickstart)."""
    workers: Workers = 0
    """Processes on this host: 0 is one a GPU, or one on a CPU; auto is one a GPU, or up to two on a CPU."""
    restarts: int = 0
    """How often to start all workers again after one died; set run.resume to "auto" with it. User errors are final."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        resolved = run.load(self.source, overrides)
        workers = 0 if "RANK" in os.environ else _workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            return launch([*_debugging(), "train", self.source, *overrides], workers, self.restarts)
        from shoestring.distributed.join import join
        from shoestring.report.recorder import Record
        from shoestring.training.loop import train

        with Record() as record, join(timeout=resolved.settings.timeout) as world:
            _quiet(world.first)
            result = train(resolved, world, record)
        return 0 if result.status == "finished" else 130


@dataclass(frozen=True)
class Check:
    """Say what a run file comes to: resolved settings, features in order, parameters, memory. Starts nothing."""

    source: Positional[str]
    """A run file, a run folder, or the name of a recipe."""
    workers: int = 1
    """For how many ranks."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run
        from shoestring.commands.check import check

        print("\n".join(check(run.load(self.source, overrides), self.workers)))
        return 0


@dataclass(frozen=True)
class Plan:
    """Predict a run's step under each exchange of gradients from a short trial, and write a run file with the best."""

    source: Positional[str]
    """A run file, a run folder, or the name of a recipe. [comm.auto] says which codecs may be chosen."""
    workers: Workers = "auto"
    """Processes on this host; under torchrun, its own."""
    out: Path | None = None
    """Where to write the run file with the choice; plan.toml beside the run file where nothing is said."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import run

        resolved = run.load(self.source, overrides)
        workers = 0 if "RANK" in os.environ else _workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            given = ["--out", str(self.out)] if self.out else []
            return launch([*_debugging(), "plan", self.source, *given, *overrides], workers)
        from shoestring.commands.plan import beside, described, plan, write
        from shoestring.distributed.join import join

        with join(timeout=resolved.settings.timeout) as world:
            _quiet(world.first)
            out = self.out or beside(self.source)
            planned = plan(resolved, world)
            world.decide(lambda: write(planned, out))
            if world.first:
                print("\n".join(described(planned, world)))
                print(f"written to {out}; start it with: shoestring train {out}")
        return 0


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained model, token by token."""

    run: Positional[Path]
    """A run folder, or a folder with a model in Hugging Face's Llama layout."""
    prompt: str = "def "
    """What the text begins with."""
    tokens: int = 256
    """How many tokens to write."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0 means all."""
    top_p: float = 0.95
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = 0
    """The same seed gives the same text."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.generate import stream

        pieces = stream(self.run, self.prompt, self.tokens, self.temperature, self.top_k, self.top_p, self.seed)
        sys.stdout.write(self.prompt + next(pieces, ""))  # whatever is wrong shows before anything is printed
        for piece in pieces:
            sys.stdout.flush()
            sys.stdout.write(piece)
        sys.stdout.write("\n")
        return 0


@dataclass(frozen=True)
class Probe:
    """Measure this cluster: devices, arithmetic, memory, disk, and the links between ranks."""

    out: Path = Path("cluster.toml")
    """Where to write what was measured."""
    workers: Workers = "auto"
    """Processes on this host, between which the link is measured; under torchrun, its own."""

    def __call__(self, overrides: Sequence[str]) -> int:
        workers = 0 if "RANK" in os.environ else _workers(self.workers)
        if workers > 1:
            from shoestring.distributed.launch import launch

            return launch([*_debugging(), "probe", "--out", str(self.out)], workers)
        from shoestring.commands.probe import described, probe, write
        from shoestring.distributed.join import join

        with join() as world:
            _quiet(world.first)
            cluster = probe(world, self.out.parent)
            world.decide(lambda: write(cluster, self.out))
            if world.first:
                print("\n".join(described(cluster)))
        return 0


@dataclass(frozen=True)
class Compare:
    """Show how runs differ in settings and results, and draw their curves over each other."""

    runs: Positional[tuple[Path, ...]]
    """Two or more run folders."""
    out: Path = Path("compare.html")
    """The page to write."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import report

        text, page = report.compare(self.runs, self.out)
        print(text)
        logging.getLogger("shoestring").info("page: %s", page)
        return 0


@dataclass(frozen=True)
class Report:
    """Write a run's report.html again, also while the run is going."""

    run: Positional[Path]
    """A run folder."""
    trace: Path | None = None
    """Also write the spans of all ranks here, as a Chrome trace for Perfetto."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import report
        from shoestring.report.timeline import chrome, read

        print(report.write(self.run))
        if self.trace is not None:
            ranks = [read(path) for path in sorted(self.run.glob("trace-*.jsonl"))]
            self.trace.write_text(json.dumps(chrome(ranks)))
            print(self.trace)
        return 0


@dataclass(frozen=True)
class Lab:
    """Virtual hosts with slow links on this machine, to try things by hand; needs root."""

    action: Positional[Literal["up", "down", "run"]]
    """up starts hosts and leaves them there, run runs the command behind -- on them, down ends them."""
    hosts: int = 2
    """up: how many."""
    rate: str = "100mbit"
    """up: of each link, each way."""
    delay: float = 0.0
    """up: seconds each way; 0.02 is 20 ms."""
    host: str = ""
    """run: on this host only, e.g. host0; empty is all."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.testing.netlab import cli as lab

        if self.action == "up":
            lab.up(self.hosts, self.rate, delay=self.delay)
        elif self.action == "down":
            lab.down()
        else:
            return lab.run(list(overrides), self.host or None)
        return 0


VERBS = {"train": Train, "check": Check, "plan": Plan, "generate": Generate, "probe": Probe, "compare": Compare}
VERBS |= {"report": Report, "lab": Lab, "checkpoint": Checkpoint}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code. User errors are one line on stderr and code 2, with `--debug` a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"shoestring {version('shoestring')}, torch {version('torch')}, Python {platform.python_version()}")
        return 0
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, behind = arguments[:cut], arguments[cut + 1 :]
    debug = "--debug" in arguments
    arguments = [each for each in arguments if each != "--debug"]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("shoestring").setLevel(logging.DEBUG if debug else logging.INFO)
    sys.path.insert(0, str(Path.cwd()))
    try:
        for argument in (*arguments, *behind):
            _check_utf8(argument)
        if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            raise ConfigError(f"there is no verb `{arguments[0]}`", hint=nearest(arguments[0], VERBS))
        verb, rest = tyro.cli(
            _verbs(),
            prog="shoestring",
            description="Train, shrink and serve large models on hardware you can afford.",
            args=arguments,
            return_unknown_args=True,
            config=(OmitArgPrefixes,),
        )
        if rest and not isinstance(verb, Train | Check | Plan):
            raise ConfigError(f"unknown argument `{rest[0]}`", hint=f"shoestring {arguments[0]} --help")
        return verb(behind if isinstance(verb, Lab) else rest)
    except ShoestringError as error:
        if debug:
            raise
        return _fail(error)
    except BrokenPipeError:
        return 1
    except OSError as error:
        if debug or error.errno not in UNUSABLE or error.filename is None:
            raise
        return _fail(ConfigError(f"cannot use `{_short(str(error.filename))}`: {error.strerror}"))
    except KeyboardInterrupt:
        return 130


def _debugging() -> list[str]:
    """The flag for the workers, where it was given here."""
    return ["--debug"] if logging.getLogger("shoestring").isEnabledFor(logging.DEBUG) else []


def _check_utf8(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the argument {argument!r} is not UTF-8") from error


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:40]}…{name[-20:]}"


def _verbs() -> Any:
    return Union[tuple(Annotated[verb, subcommand(name)] for name, verb in VERBS.items())]  # noqa: UP007


def _fail(error: ShoestringError) -> int:
    """Tell the user; under an elastic agent tell the agent, which tells the user once for all ranks."""
    message = f"error: {error.described()[1]}"
    if error.hint:
        message += f"\n\nhint: {error.hint}"
    told = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if told:
        # The call stack is what torchrun prints.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(told).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if not told or isinstance(error, PeerError):  # each rank sees a loss from its own side, and an agent may restart
        sys.stderr.write(message + "\n")
    return error.code


def _workers(asked: Workers) -> int:
    if isinstance(asked, int) and asked < 0:
        raise ConfigError(f"--workers must not be negative, got {asked}")
    if isinstance(asked, int) and asked > 0:
        return asked
    import torch

    on_cpu = min(2, os.cpu_count() or 1) if asked == "auto" else 1
    return torch.cuda.device_count() or on_cpu


def _quiet(first: bool) -> None:
    """Only the first rank speaks, unless something is wrong."""
    if not first:
        logging.getLogger("shoestring").setLevel(logging.WARNING)
