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
from functools import reduce
from importlib.metadata import version
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, subcommand

from shoestring.commands.checkpoint import Checkpoint
from shoestring.commands.generation import Generate, Skip
from shoestring.commands.profiling import ProfileProgram, split
from shoestring.commands.ranks import Check, DistillDrafter, Plan, Probe, Train
from shoestring.commands.serve import Serve
from shoestring.commands.shrink import PruneModel, QuantizeModel
from shoestring.commands.tracing import RecordedMemory, of_runs
from shoestring.commands.tune import Tune, with_action
from shoestring.core.errors import ConfigError, PeerError, ShoestringError, nearest

UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)


@dataclass(frozen=True)
class Compare:
    """Show how runs differ in settings and results, with their curves in the same charts."""

    runs: Positional[tuple[Path, ...]]
    """Two or more run folders."""
    out: Path = Path("compare.html")
    """Path of the page to write."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring import report

        text, page = report.compare(self.runs, self.out)
        print("\n".join([text, *of_runs(self.runs)]))
        logging.getLogger("shoestring").info("page: %s", page)
        return 0


@dataclass(frozen=True)
class Report:
    """Rewrite the report.html of a run; the run may still be training."""

    run: Positional[Path]
    """Run folder to report on."""
    trace: Path | None = None
    """Path of a Chrome trace for Perfetto, with the spans of all ranks; without it none is written."""

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
class VirtualHosts:
    """Virtual hosts with slow links on this machine, to try several hosts by hand; needs root."""

    action: Positional[Literal["up", "down", "run"]]
    """Action: up starts the hosts and returns, run runs the command after -- on them, down ends them."""
    hosts: int = 2
    """Number of hosts to start (up)."""
    rate: str = "100mbit"
    """Bandwidth of each host's link in each direction, as tc writes it: 10mbit, 1gbit (up)."""
    delay: float = 0.0
    """Delay of each link in each direction, in seconds; 0.02 is 20 ms (up)."""
    coalesce: bool = False
    """Let frames pass by the millisecond above 12 Mbit/s, so that the emulation of the links takes less processor time
    from what runs on the hosts; changes a setting of the machine until down (up)."""
    host: str = ""
    """Host to run the command on, such as host0; defaults to all (run)."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.testing.netlab import cli as lab

        if self.action == "up":
            lab.up(self.hosts, self.rate, delay=self.delay, coalesce=self.coalesce)
        elif self.action == "down":
            lab.down()
        else:
            return lab.run(list(overrides), self.host or None)
        return 0


VERBS = {"train": Train, "check": Check, "plan": Plan, "distill": DistillDrafter, "generate": Generate, "skip": Skip}
VERBS |= {"prune": PruneModel, "quantize": QuantizeModel, "probe": Probe, "compare": Compare, "report": Report}
VERBS |= {"serve": Serve, "profile": ProfileProgram, "memory": RecordedMemory}
VERBS |= {"tune": Tune, "lab": VirtualHosts, "checkpoint": Checkpoint}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; a user error is 2 and one line on stderr, with `--debug` a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"shoestring {version('shoestring')}, torch {version('torch')}, Python {platform.python_version()}")
        return 0
    if arguments[:1] == ["profile"]:
        own, command = split(arguments[1:])
        arguments = ["profile", *own]
    else:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        arguments, command = arguments[:end], arguments[end + 1 :]
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["tune"]:
        arguments = ["tune", *with_action(arguments[1:])]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("shoestring").setLevel(logging.DEBUG if debug else logging.INFO)
    sys.path.insert(0, str(Path.cwd()))
    try:
        for argument in (*arguments, *command):
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
        if rest and not isinstance(verb, Train | Check | Plan | DistillDrafter):
            action = " run" if isinstance(verb, ProfileProgram) and "run" in arguments[:2] else ""
            raise ConfigError(f"unknown argument `{rest[0]}`", hint=f"shoestring {arguments[0]}{action} --help")
        return verb(command if isinstance(verb, VirtualHosts | ProfileProgram) else rest)
    except ShoestringError as error:
        if debug:
            raise
        return _report_error(error)
    except BrokenPipeError:
        return 1
    except OSError as error:
        if debug or error.errno not in UNUSABLE or error.filename is None:
            raise
        return _report_error(ConfigError(f"cannot use `{_short(str(error.filename))}`: {error.strerror}"))
    except KeyboardInterrupt:
        return 130


def _check_utf8(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the argument {argument!r} is not UTF-8") from error


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:40]}…{name[-20:]}"


def _verbs() -> Any:
    return reduce(or_, (Annotated[verb, subcommand(name)] for name, verb in VERBS.items()))


def _report_error(error: ShoestringError) -> int:
    """Print the error; under an elastic agent hand it to the agent, which prints it once for all ranks."""
    message = f"error: {error.parts()[1]}"
    if error.hint:
        message += f"\n\nhint: {error.hint}"
    agent_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if agent_file:
        # The call stack is what torchrun prints.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(agent_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if not agent_file or isinstance(error, PeerError):  # each rank sees its own side of a loss
        sys.stderr.write(message + "\n")
    return error.code
