"""The command line: parses arguments, runs the verb that they name, and prints errors. Importing this module imports no
torch and no verb."""

from __future__ import annotations

import difflib
import errno
import io
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, NamedTuple, cast, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, subcommand

from shoestring.commands.printing import PrintableFormatter, say
from shoestring.commands.table import ALONE, GROUPS, RENAMED, RENAMED_FLAGS, RUN_IS_IMPLIED, VERBS
from shoestring.core.errors import ConfigError, PeerError, ShoestringError, nearest
from shoestring.processors import share_processors
from shoestring.storage.foreign import printable
from shoestring.storage.whole import DISK_ERRORS

UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)
UNUSABLE += (errno.EINVAL, errno.EFBIG)  # raised by `storage.guarded` for a file that is not regular, or too large


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    A user's mistake prints one line on standard error, or a traceback with `--debug`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version  # takes as long as a fifth of all else that `--help` needs

        print(f"shoestring {version('shoestring')}, torch {version('torch')}, Python {platform.python_version()}")
        return 0
    line = _split(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("shoestring").setLevel(logging.DEBUG if line.debug else logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names may be bytes that are not UTF-8
    try:
        _check_surroundings(arguments)
        share_processors()
        return _run(line)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
    except (ShoestringError, OSError, UnicodeEncodeError) as error:
        user_error = None if line.debug else _as_user_error(error)
        if user_error is None:
            raise
        return _report_error(user_error, line.verb)


class _CommandLine(NamedTuple):
    """A command line, split into its parts."""

    verb: str
    arguments: list[str]
    """Arguments of the verb."""
    command: list[str]
    """The words after `--`, or the program to profile and its arguments."""
    debug: bool


def _split(arguments: list[str]) -> _CommandLine:
    """Split a command line; `--debug` may stand anywhere before the command."""
    if arguments[:1] == ["profile"]:  # `--` and `--debug` after the program to profile belong to the program
        verb, own = find_verb(arguments)
        command: list[str] = []
        if verb == "profile run":
            from shoestring.commands.recordings import split_program

            own, command = split_program(own)
        return _CommandLine(verb, [argument for argument in own if argument != "--debug"], command, "--debug" in own)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = [argument for argument in arguments[:end] if argument != "--debug"]
    return _CommandLine(*find_verb(own), arguments[end + 1 :], len(own) < end)


def _run(line: _CommandLine) -> int:
    """Parse the arguments of a verb and call the verb; if only a group is named, show the help of the group."""
    name, arguments = _rename(line.verb, line.arguments)
    if name not in VERBS:
        return _show_group(name, arguments)
    verb = VERBS[name]
    run_named = verb.rest == "overrides" and arguments and not arguments[0].startswith("-")
    if verb.rest == "overrides" and not run_named:
        _check_run_is_named(name, verb.load(), arguments)
    try:
        parsed, rest = tyro.cli(
            verb.load(),
            prog=f"shoestring {name} {printable(arguments[0])}" if run_named else f"shoestring {name}",
            description=f"{verb.help}\n\nIn Python: {verb.package}.{verb.function.replace(':', '.')}",
            args=arguments,
            return_unknown_args=True,
            config=(OmitArgPrefixes,),
        )
    except SystemExit as ending:
        if ending.code == 0 and verb.rest == "overrides":  # tyro has printed the verb's help
            _show_keys(arguments)
        raise
    if rest and verb.rest != "overrides":
        # Suggest the most similar flag, such as `--data.template` for `--template`.
        flag = rest[0].lstrip("-").partition("=")[0].rpartition(".")[2].replace("_", "-")
        close = "".join(difflib.get_close_matches(f"--{flag}", list(_flags_of(verb.load())), n=1, cutoff=0.75))
        hint = f"did you mean `{close}`?" if close else f"shoestring {name} --help"
        raise ConfigError(f"unknown argument `{rest[0]}`", hint=hint)
    return parsed(rest if verb.rest == "overrides" else line.command) if verb.rest else parsed()


def _check_run_is_named(name: str, verb: type, arguments: list[str]) -> None:
    """Check that the arguments name a run if the verb needs one; the parser's own error would be less clear."""
    from shoestring import recipes
    from shoestring.commands.runs import RunSource

    if not issubclass(verb, RunSource):
        return

    asks = not {"--help", "-h"}.isdisjoint(arguments)
    named = any(a in recipes.find() or a.endswith(".toml") or Path(a, "run.toml").is_file() for a in arguments)
    if not asks and not named:
        hint = f"such as shoestring {name} finetune …; recipes: {', '.join(recipes.find())}"
        raise ConfigError(f"`shoestring {name}` needs the name of a recipe, a run file or a run folder", hint=hint)


def _flags_of(verb: type) -> Iterator[str]:
    for name, kind in get_type_hints(verb).items():
        if is_dataclass(kind):
            yield from _flags_of(cast(type, kind))
        else:
            yield f"--{name.replace('_', '-')}"


def _show_keys(arguments: list[str]) -> None:
    """Print the keys of the run file or recipe that the arguments name, and of the tables that their overrides turn on;
    if the arguments name no run file or recipe, print how to list keys."""
    from shoestring import recipes
    from shoestring.commands.printing import say_lines
    from shoestring.verbs.keys import keys_of_run

    for argument in arguments:
        if argument in recipes.find() or (not argument.startswith("-") and Path(argument).exists()):
            say_lines(keys_of_run(argument, list(_dotted_overrides(arguments))))
            return
    say(f"The keys of a recipe, with their help: shoestring train NAME --help; recipes: {', '.join(recipes.find())}")


def _dotted_overrides(arguments: list[str]) -> Iterator[str]:
    """Yield the arguments that override keys of tables, each with its value; only such arguments have dots. A key
    without a value, as in a request for help on the key, is replaced by its table."""
    for flag, following in pairwise([*arguments, "--"]):
        name, equals, _ = flag.partition("=")
        if not name.startswith("--") or "." not in name:
            continue
        if equals:
            yield flag
        elif not following.startswith("--") and following != "-h":
            yield from (flag, following)
        else:
            yield ".".join(name.split(".")[:2])


def _as_user_error(error: Exception) -> ShoestringError | None:
    """Convert an exception that the user can correct to an error to print; None for a bug, whose traceback is shown."""
    if isinstance(error, ShoestringError):
        return error
    if isinstance(error, OSError):
        where = f"`{_short(os.fsdecode(error.filename))}`" if error.filename is not None else ""
        if error.errno in UNUSABLE and where:
            return ConfigError(f"cannot use {where}: {error.strerror}")
        if error.errno in DISK_ERRORS:
            message = f"cannot write {where or 'a file'}: {error.strerror}"
            return ShoestringError(message, hint="no partial file is left; free disk space, then try again")
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        # Python represents bytes that are not UTF-8 as surrogates.
        return ConfigError(f"{_short(error.object)!r} is not UTF-8", hint="rename the file or folder of that name")
    return None


def find_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into a leading verb or group (empty if there is none) and the remaining arguments."""
    group, following = "".join(arguments[:1]), list(arguments[1:])
    if group not in GROUPS:
        return (group, following) if group in VERBS else ("", list(arguments))
    words = " ".join(arguments[:2])
    if group in ALONE and not following:
        return f"{group} {ALONE[group]}", []
    if words in VERBS or words in RENAMED:
        return words, following[1:]
    if group in RUN_IS_IMPLIED and following[:1] not in (["--help"], ["-h"]) and (following or group == "tune"):
        return f"{group} run", following
    return group, following


def _rename(name: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Replace former names of a verb and its flags by their present names; print a line for each replaced name."""
    if name in RENAMED:
        say(f"`shoestring {name}` is now `shoestring {RENAMED[name]}`", sys.stderr)
        name = RENAMED[name]
    renamed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if new := RENAMED_FLAGS.get(name, {}).get(flag):
            say(f"`{flag}` is now `{new}`", sys.stderr)
        renamed.append(f"{new or flag}{equals}{value}")
    return name, renamed


@dataclass(frozen=True)
class _Listed:
    """Represents a verb, without its arguments, in the help text of a group."""


def _show_group(group: str, arguments: list[str]) -> int:
    """Print the help of a group of verbs, or of all verbs if `group` is empty; an unknown verb raises ConfigError."""
    names = [name.removeprefix(f"{group} ") for name in VERBS if group in ("", name.partition(" ")[0])]
    helps = {name: VERBS[f"{group} {name}".strip()].help for name in names}
    if not group:
        helps = {name.partition(" ")[0]: GROUPS.get(name.partition(" ")[0], line) for name, line in helps.items()}
    if arguments and not arguments[0].startswith("-"):
        words = f"{group} {arguments[0]}".strip()
        from shoestring import recipes

        recipe = f"`{words}` is a recipe: shoestring train {words}" if words in recipes.find() else ""
        raise ConfigError(f"there is no verb `{words}`", hint=recipe or nearest(arguments[0], helps))
    tyro.cli(
        reduce(or_, (Annotated[_Listed, subcommand(name, description=line)] for name, line in helps.items())),
        prog=f"shoestring {group}".strip(),
        description=GROUPS.get(group, "Train, shrink and serve large models on hardware you can afford."),
        args=arguments,
        config=(OmitArgPrefixes,),
    )
    raise AssertionError("a group without a verb is refused")


def _check_surroundings(arguments: list[str]) -> None:
    """Raise ConfigError if the working folder has been removed, or an argument is not UTF-8."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder has been removed", hint="change to a folder that exists") from error
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the argument {argument!r} is not UTF-8") from error


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:40]}…{name[-20:]}"


def _report_error(error: ShoestringError, verb: str = "") -> int:
    """Print an error and return the exit code; under torchrun, write it to a file, so that it is printed only once."""
    message = f"error: {error.parts()[1]}"
    hint = error.hint
    if hint and verb in VERBS and VERBS[verb].rest == "overrides":
        # Add the equivalent flag to every `set key = value` in the hint, such as `set data.form = "chat"`.
        hint = re.sub(
            r'\bset ((?:\w+\.)+\w+) = ("?)([^\s",;]+)\2',
            lambda match: f"{match[0]} (here: --{match[1].removeprefix('run.')} {match[3]})",
            hint,
        )
    if hint:
        message += f"\n\nhint: {hint}"
    agent_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if agent_file:
        # torchrun prints the entry `py_callstack` of the file.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(agent_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if not agent_file or isinstance(error, PeerError):  # each rank may have lost another peer, so all ranks print
        say(message, sys.stderr)
    return error.code
