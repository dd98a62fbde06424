"""The command line: a table of its commands, called verbs. Importing this module imports no torch and no verb."""

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
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, subcommand

from shoestring.commands.printing import PrintableFormatter, say
from shoestring.core.errors import ConfigError, PeerError, ShoestringError, nearest
from shoestring.processors import share_processors
from shoestring.storage.foreign import printable
from shoestring.storage.whole import DISK_ERRORS


class Verb(NamedTuple):
    """A command of the command line: where its code is, and its help text."""

    function: str
    """Function that implements the verb, as `module:function` inside `package`."""
    arguments: str
    """Class that declares the verb's arguments and prints the function's result, as `module:class` inside the package
    `commands` of `package`."""
    help: str
    rest: Literal["", "overrides", "command"] = ""
    """Meaning of the remaining arguments, which the class is called with: empty (none are allowed), overrides of the
    run file, or a command to run."""
    package: str = "shoestring"
    """Name of the package that implements the verb; importing this module does not import that package."""

    def load(self) -> Any:
        """Import the class that declares the verb's arguments."""
        module, _, name = self.arguments.partition(":")
        return getattr(import_module(f"{self.package}.commands.{module}"), name)


# fmt: off
VERBS: dict[str, Verb] = {
    "train": Verb(
        "training.loop:train", "runs:Train",
        "Train as a run file says. Overrides: --area.technique.key VALUE, and --key VALUE for a key of [run].",
        rest="overrides",
    ),
    "check": Verb(
        "verbs.check:check", "runs:Check",
        "Print the resolved settings of a run, its features in order, its parameters and its memory; start nothing. "
        "With --model MODEL and no run: print how texts of a model begin and end, and its defaults of sampling. Code "
        "that the run file names is left out, unless you have trained with that file or vouched for it (shoestring "
        "trust).",
        rest="overrides",
    ),
    "plan": Verb(
        "verbs.plan:plan", "runs:Plan",
        "Measure the model and the links between ranks, predict the step time of each way to train it (exchanges, "
        "shards, stages, split layers, micro-batches, recomputation), try the best ones, and write a run file with the "
        "fastest. [comm.auto] lists codecs that may be chosen as well; code that the run file names needs your word "
        "first, by `train` or `shoestring trust`.",
        rest="overrides",
    ),
    "distill": Verb(
        "verbs.distill:distill", "runs:DistillDrafter",
        "Train a small model to draft for a large one, as [decode.distill] says: first a reference on all tokens, "
        "then the draft on those that are worth learning. Each stage writes to a folder of its own inside the run "
        "folder.",
        rest="overrides",
    ),
    "generate": Verb(
        "verbs.generate:generate", "models:Generate",
        "Continue a prompt with a trained model, token by token; with --chat, answer a question.",
    ),
    "chat": Verb(
        "verbs.chat:converse", "models:Talk",
        "Talk with a trained model in the terminal, by its chat template; /help lists what can be said besides "
        "questions.",
    ),
    "predict": Verb(
        "verbs.predict:predict", "models:Predict",
        "Run the model of a run on your own files, and write what it says to a table and a page.",
    ),
    "evaluate": Verb(
        "verbs.evaluate:evaluate", "models:EvaluateModel",
        "Evaluate a trained model on tasks of lm-evaluation-harness, such as hellaswag, or on tasks of your own.",
    ),
    "skip": Verb(
        "verbs.skip:skip", "models:Skip",
        "Choose the attention and feed-forward sublayers whose skipping costs least, from sample text, for "
        "`generate`.",
    ),
    "prune": Verb(
        "verbs.prune:prune", "models:PruneModel",
        "Make a trained model 2:4 sparse at once, without training, and write it to a new folder.",
    ),
    "quantize": Verb(
        "verbs.quantize:quantize", "models:QuantizeModel",
        "Round the weights of a trained model to 8 or 4 bits, without training, and write it to a new folder.",
    ),
    "probe": Verb(
        "verbs.probe:probe", "runs:Probe",
        "Measure this cluster: arithmetic and memory of each device, disks, and the links between ranks.",
    ),
    "build": Verb(
        "verbs.build:build", "runs:Build",
        "Compile the native kernels for this machine now, so that no run and no first request waits for them.",
    ),
    "compare": Verb(
        "verbs.report:compare", "runs:CompareRuns",
        "Show how runs differ in settings and results, with their curves in the same charts.",
    ),
    "report": Verb(
        "verbs.report:report", "runs:Report",
        "Rewrite the report.html of a run; the run may still be training.",
    ),
    "serve": Verb(
        "verbs.serve:serve", "models:Serve",
        "Serve a trained model over HTTP, with the interface of OpenAI's API and a page to try it in a browser.",
    ),
    "data show": Verb(
        "verbs.data:show", "data:ShowData",
        "Show what training reads of a file, a data set or a run file: the format, the first records as the model sees "
        "them with the tokens that it learns, what is cut or left out, and why.",
    ),
    "profile run": Verb(
        "verbs.profile:profile_program", "recordings:RunProfiled",
        "Run a Python program and show which of its lines take the time.",
        rest="command",
    ),
    "profile view": Verb(
        "verbs.profile:view", "recordings:ViewProfile",
        "Write a profile as one HTML page that works offline, and show its lines here.",
    ),
    "profile diff": Verb(
        "verbs.profile:diff", "recordings:DiffProfiles",
        "Compare two profiles: which lines became slower or faster; also where lines have moved in between.",
    ),
    "profile merge": Verb(
        "verbs.profile:merge", "recordings:MergeProfiles",
        "Merge profiles, such as those of several ranks, into one file that keeps the times of each.",
    ),
    "profile export": Verb(
        "verbs.profile:export", "recordings:ExportProfile",
        "Convert a profile for another tool.",
    ),
    "memory view": Verb(
        "verbs.memory:view", "recordings:ViewMemory",
        "Write a recording of memory as one HTML page that works offline, and show here its peak and what a static "
        "plan of its addresses would take.",
    ),
    "memory diff": Verb(
        "verbs.memory:diff", "recordings:DiffMemory",
        "Compare two recordings: what made the peak of the later one higher, tensor by tensor.",
    ),
    "memory export": Verb(
        "verbs.memory:export", "recordings:ExportMemory",
        "Convert a recording of memory for torch's memory_viz page (pytorch.org/memory_viz).",
    ),
    "memory host": Verb(
        "verbs.memory:list_leases", "recordings:LeasedMemory",
        "Show which processes hold the memory of this host, among those that have agreed on it with [memory.broker].",
    ),
    "tune run": Verb(
        "verbs.tune:tune", "tune:StartStudy",
        "Start or continue a study, and work for it until it is over.",
    ),
    "tune join": Verb(
        "verbs.tune:join", "tune:JoinStudy",
        "Work for a study that another machine has started.",
    ),
    "tune best": Verb(
        "verbs.tune:write_best", "tune:WriteBest",
        "Write the run file of the best trial so far.",
    ),
    "tune page": Verb(
        "verbs.tune:compare_studies", "tune:WritePage",
        "Write the page of a study, beside others that had the same objective.",
    ),
    "lab up": Verb(
        "testing.netlab.by_hand:up", "lab:StartLab",
        "Start virtual hosts and return.",
    ),
    "lab run": Verb(
        "testing.netlab.by_hand:run", "lab:RunInLab",
        "Run the command after -- on the virtual hosts.",
        rest="command",
    ),
    "lab down": Verb(
        "testing.netlab.by_hand:down", "lab:EndLab",
        "End the virtual hosts.",
    ),
    "hub login": Verb(
        "client.logins:log_in", "programs:LogIn",
        "Remember the address of a hub and a token for one of its projects, which a page of the hub has shown.",
        package="shoestring_hub",
    ),
    "hub push": Verb(
        "client.push:push", "programs:Push",
        "Send the folder of a run to the hub; continues where it broke off, and takes the files of a running run as "
        "they are now.",
        package="shoestring_hub",
    ),
    "hub pull": Verb(
        "client.pull:pull", "programs:Pull",
        "Bring the folder of a run from the hub; training resumes from it if its checkpoints were pushed.",
        package="shoestring_hub",
    ),
    "hub serve": Verb(
        "server.serve:serve", "administration:ServeHub",
        "Start the hub: a server for the runs of a lab, with SQLite and a folder, or with PostgreSQL.",
        package="shoestring_hub",
    ),
    "hub person": Verb(
        "server.administration:add_person", "administration:AddPerson",
        "Make a person, the first one included, or a link by which a person sets a new password.",
        package="shoestring_hub",
    ),
    "hub deactivate": Verb(
        "server.administration:deactivate", "administration:Deactivate",
        "End all access of a person at once; the runs of the person stay.",
        package="shoestring_hub",
    ),
    "hub clean": Verb(
        "server.administration:clean", "administration:Clean",
        "Remove deleted runs whose grace period is over, and chunks of files that no run has.",
        package="shoestring_hub",
    ),
    "hub backup": Verb(
        "server.backup:back_up", "administration:BackUp",
        "Copy a hub to a folder while it serves: its database, its key and the chunks that the copy lacks.",
        package="shoestring_hub",
    ),
    "hub restore": Verb(
        "server.backup:restore", "administration:Restore",
        "Make a new hub from a backup, and check every chunk.",
        package="shoestring_hub",
    ),
    "hub check": Verb(
        "server.administration:check", "administration:CheckHub",
        "Check the settings of a hub for deployment, as Django's `check --deploy` does.",
        package="shoestring_hub",
    ),
    "checkpoint ls": Verb(
        "verbs.archive:list_checkpoints", "checkpoint:ListCheckpoints",
        "List the checkpoints of a run, on disk and in this host's shared memory.",
    ),
    "checkpoint verify": Verb(
        "verbs.archive:verify", "checkpoint:VerifyCheckpoints",
        "Read every checkpoint and say what is damaged; the exit code is 1 if anything is.",
    ),
    "checkpoint show": Verb(
        "verbs.archive:show", "checkpoint:ShowCheckpoint",
        "Show the content of a checkpoint: its states, and its tensors with types, shapes and shards.",
    ),
    "checkpoint explain": Verb(
        "verbs.archive:explain", "checkpoint:ExplainResume",
        'Say what `run.resume = "auto"` would resume from, why, and why from nothing newer. Reads that checkpoint, and '
        "writes nothing.",
    ),
    "checkpoint export": Verb(
        "verbs.interchange:export", "checkpoint:ExportCheckpoint",
        "Convert a checkpoint for other programs.",
    ),
    "checkpoint import": Verb(
        "verbs.interchange:import_checkpoint", "checkpoint:ImportCheckpoint",
        "Convert what another program wrote to a checkpoint, from which a run resumes on any number of ranks.",
    ),
    "checkpoint trim": Verb(
        "verbs.trim:trim", "checkpoint:TrimCheckpoints",
        "Delete older checkpoints, and those that the run went back from, once those that are kept have been "
        "verified.",
    ),
    "recipes list": Verb(
        "verbs.recipes:list_recipes", "runs:ListRecipes",
        "List the recipes that are installed: what each is for, which areas it uses, and how long it takes.",
    ),
    "recipes copy": Verb(
        "verbs.recipes:copy", "runs:CopyRecipe",
        "Copy a recipe with its code to a new folder, as a project of your own to change.",
    ),
    "keys": Verb(
        "verbs.keys:search", "runs:SearchKeys",
        "Search the keys of run files by name and help text: `shoestring keys lr`. `shoestring train finetune --help` "
        "lists those of a recipe.",
    ),
    "trust": Verb(
        "verbs.trust:vouch", "runs:TrustPlaces",
        "Trust somebody else's folder or run file: the code that it names may be run from now on, until it or that "
        "code changes. What your own runs write is trusted already.",
    ),
}
# fmt: on
"""Maps the name of each verb to its function, the class of its arguments, and its help text."""
GROUPS = {
    "data": "Look at training data.",
    "profile": "Profile any Python program by its own lines: `shoestring profile script.py [its arguments]`.",
    "memory": "Show what the memory of a run was of, as [memory.tracing] or `memory.traced` has recorded it, and who "
    "holds the memory of this host.",
    "tune": "Search for the settings of a run, on workers that may join, leave or vanish at any time: `shoestring tune "
    "tune.toml`.",
    "recipes": "Ready tasks to run, to copy and to change: `shoestring train NAME` runs one.",
    "lab": "Virtual hosts with slow links on this machine, to try several hosts by hand; needs root.",
    "hub": "Keep the runs of a lab on a server of one's own: push and pull runs, and serve them.",
    "checkpoint": "List, verify, show, explain, export, import and delete the checkpoints of a run.",
}
"""Maps the first word of verbs with two words to the help text of the group."""
RUN_IS_IMPLIED = ("profile", "tune")
"""Groups whose verb `run` is meant if no verb is given: `shoestring tune FILE` is `shoestring tune run FILE`."""
ALONE = {"recipes": "list"}
"""Maps a group to the verb that is meant if nothing follows the group."""
RENAMED = {"checkpoint prune": "checkpoint trim"}
"""Maps the former name of a verb to its present name; former names still work."""
RENAMED_FLAGS = {"generate": {"--tokens": "--max-tokens"}}
"""For each verb with renamed flags, maps the former names of the flags to the present names. Former names still work.
"""

UNUSABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS)
UNUSABLE += (errno.EINVAL, errno.EFBIG)  # raised by `storage.guarded` for a file that is not regular, or too large


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    A user's mistake prints one line on standard error, or a traceback with `--debug`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
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
        _check_working_folder()
        for argument in arguments:
            _check_utf8(argument)
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
        close = _similar_flag(rest[0], verb.load())
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


def _similar_flag(argument: str, verb: type) -> str:
    """The flag of a verb that is most similar to an unknown argument (`--template` for `--data.template`); empty if
    none is similar."""
    flag = argument.lstrip("-").partition("=")[0].rpartition(".")[2].replace("_", "-")
    return "".join(difflib.get_close_matches(f"--{flag}", list(_flags_of(verb)), n=1, cutoff=0.75))


def _flags_of(verb: type) -> Iterator[str]:
    for name, kind in get_type_hints(verb).items():
        if is_dataclass(kind):
            yield from _flags_of(cast(type, kind))
        else:
            yield f"--{name.replace('_', '-')}"


def _show_keys(arguments: list[str]) -> None:
    """Print the keys of the run file or recipe that the arguments name, and of the tables that overrides among them
    turn on; if they name none, print how to list keys."""
    from shoestring import recipes
    from shoestring.commands.printing import say_lines
    from shoestring.verbs.keys import keys_of_run

    for argument in arguments:
        if argument in recipes.find() or (not argument.startswith("-") and Path(argument).exists()):
            say_lines(keys_of_run(argument, list(_dotted_overrides(arguments))))
            return
    say(f"The keys of a recipe, with their help: shoestring train NAME --help; recipes: {', '.join(recipes.find())}")


def _dotted_overrides(arguments: list[str]) -> Iterator[str]:
    """The overrides of tables among the arguments, with their values: flags of verbs have no dots. A key without a
    value, whose help somebody asks for, becomes its table."""
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
    """Replace former names of a verb and its flags by the present ones; prints a line for each."""
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


def _check_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder has been removed", hint="change to a folder that exists") from error


def _check_utf8(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the argument {argument!r} is not UTF-8") from error


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:40]}…{name[-20:]}"


def _as_flags(hint: str) -> str:
    """Add the equivalent flag to every `set key = value` in a hint, such as `set data.form = "chat"`."""
    flag = lambda match: f"{match[0]} (here: --{match[1].removeprefix('run.')} {match[3]})"  # noqa: E731
    return re.sub(r'\bset ((?:\w+\.)+\w+) = ("?)([^\s",;]+)\2', flag, hint)


def _report_error(error: ShoestringError, verb: str = "") -> int:
    """Print an error and return the exit code; under torchrun, write it to a file, so that it is printed only once."""
    message = f"error: {error.parts()[1]}"
    if error.hint:
        hint = _as_flags(error.hint) if verb in VERBS and VERBS[verb].rest == "overrides" else error.hint
        message += f"\n\nhint: {hint}"
    agent_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if agent_file:
        # torchrun prints the entry `py_callstack` of the file.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(agent_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if not agent_file or isinstance(error, PeerError):  # each rank may have lost another peer, so all ranks print
        say(message, sys.stderr)
    return error.code
