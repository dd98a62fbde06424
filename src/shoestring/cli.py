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
from shoestring.commands.serve import Serve
from shoestring.commands.shrink import PruneModel, QuantizeModel
from shoestring.core.errors import ConfigError, PeerError, ShoestringError, nearest

Workers = int | Literal["auto"]
UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)


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
class Generate:
    """Continue a prompt with a trained model, token by token."""

    run: Positional[Path]
    """Run folder, or folder with a model in Hugging Face's Llama layout."""
    prompt: str = "def "
    """Text that the model continues."""
    tokens: int = 256
    """Largest number of tokens to generate; an end-of-text token ends the text earlier."""
    temperature: float = 0.8
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = 0.95
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all."""
    min_p: float = 0.0
    """Least probability of a token that may be sampled, as a fraction of the likeliest token's; 0 samples from all."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already holds; 1 is no penalty, larger values repeat less."""
    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""
    draft: str = ""
    """Proposes tokens that the model then verifies several at a time, which is faster: the folder or `hf:NAME` of a
    smaller model with the same vocabulary, `lookup` (continuations of repeated passages) or `skip` (the model itself
    without some sublayers); by default nothing is drafted."""
    draft_length: int = 0
    """Number of tokens to draft before each pass of the model; 0 chooses it from measured acceptance and cost."""
    verification: Literal["token", "block", "invariant"] = "invariant"
    """Rule that decides which drafted tokens stay; each keeps the model's distribution, and `invariant` also the text
    that the seed gives without drafts, while `block` accepts somewhat more."""
    report: bool = False
    """Print, after the text, the tokens per pass, the acceptance of drafts and what passes cost."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.commands.generate import stream
        from shoestring.decode.settings import Sampling, Speculation

        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )
        speculation = Speculation(drafter=self.draft, draft_length=self.draft_length, verification=self.verification)
        lines: list[str] = []
        pieces = stream(
            self.run, self.prompt, self.tokens, sampling, speculation, lines.append if self.report else None
        )
        sys.stdout.write(self.prompt + next(pieces, ""))  # errors are raised before anything is printed
        for piece in pieces:
            sys.stdout.flush()
            sys.stdout.write(piece)
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in lines:
            print(line, file=sys.stderr)
        return 0


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
        print(text)
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
    host: str = ""
    """Host to run the command on, such as host0; defaults to all (run)."""

    def __call__(self, overrides: Sequence[str]) -> int:
        from shoestring.testing.netlab import cli as lab

        if self.action == "up":
            lab.up(self.hosts, self.rate, delay=self.delay)
        elif self.action == "down":
            lab.down()
        else:
            return lab.run(list(overrides), self.host or None)
        return 0


VERBS = {"train": Train, "check": Check, "plan": Plan, "distill": DistillDrafter, "generate": Generate}
VERBS |= {"prune": PruneModel, "quantize": QuantizeModel, "probe": Probe, "compare": Compare, "report": Report}
VERBS |= {"serve": Serve, "lab": VirtualHosts, "checkpoint": Checkpoint}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; a user error is 2 and one line on stderr, with `--debug` a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"shoestring {version('shoestring')}, torch {version('torch')}, Python {platform.python_version()}")
        return 0
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, command = arguments[:end], arguments[end + 1 :]
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
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
            raise ConfigError(f"unknown argument `{rest[0]}`", hint=f"shoestring {arguments[0]} --help")
        return verb(command if isinstance(verb, VirtualHosts) else rest)
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


def _debug_flag() -> list[str]:
    """Return --debug for the workers if it was given to this process."""
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
