"""Reads a window of JAX's profiler: the instructions that ran, and the calls that started the compiled programs."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoestring.profile.jax_calls import ANNOTATION
from shoestring.profile.jax_programs import CompiledProgram, Operation, parse_program
from shoestring.profile.protobuf import fields

_EXECUTE = re.compile(r"LoadedExecutable::Execute(?:HelperOnSingleDevice|$)")
_JITTED = re.compile(r"PjitFunction\((.*)\)$")

_UNWANTED = ("end: ", "Threadpool", "ThunkExecutor", "Wait for", "$")
"""Name prefixes of profiler events that are ignored."""

_RECENT = 64  # number of most recent calls of a function whose call sites are stored

MOST_PROGRAMS = 256
"""Maximum number of compiled programs whose operations are cached; if more run, some programs are parsed again."""


@dataclass(frozen=True)
class Dispatch:
    """A call that started a compiled program."""

    start: float
    name: str
    """Name of the jitted function."""
    site: int
    """Number of the call site; -1 if unknown."""


@dataclass
class Executed:
    """One execution of an instruction; times are in nanoseconds."""

    start: float
    duration: float
    own: float
    """Duration without the durations of instructions that ran inside this instruction."""
    name: str
    module: str
    program: int
    run: int
    device: bool
    """Whether the instruction ran on an accelerator."""


@dataclass
class Window:
    """The executed instructions and the dispatching calls of one profiler window."""

    executed: list[Executed] = field(default_factory=list)
    dispatched: list[Dispatch] = field(default_factory=list)

    def sites(self, usual: dict[str, list[int]]) -> dict[tuple[int, int], int]:
        """Map (program, number of the run) to the number of the call site; -1 if the site is unknown.

        A function's runs are in the order of its calls, but the first runs in a window may come from calls before the
        window. The number of runs from earlier calls is assumed to be the smallest for which no run begins before its
        call. Runs of calls before the window get the sites of recent calls in turn.

        Args:
            usual: maps each function to the call sites of its recent calls; this method adds the calls in this window.
        """
        first: dict[tuple[int, int], Executed] = {}
        for executed in self.executed:
            key = executed.program, executed.run
            if key not in first or executed.start < first[key].start:
                first[key] = executed
        calls: dict[str, list[Dispatch]] = defaultdict(list)
        for call in sorted(self.dispatched, key=lambda call: call.start):
            calls[_comparable(f"jit_{call.name}")].append(call)
        runs: dict[str, list[Executed]] = defaultdict(list)
        for run in sorted(first.values(), key=lambda run: run.start):
            runs[_comparable(run.module)].append(run)
        sites = {}
        for module, module_runs in runs.items():
            called = calls.get(module, [])
            starts = [call.start for call in called]
            before = [bisect.bisect_right(starts, run.start) for run in module_runs]  # number of calls before each run
            earlier = max((n + 1 - count for n, count in enumerate(before) if count < len(called)), default=0)
            recent = usual[module] = [*usual.get(module, ()), *(call.site for call in called)][-_RECENT:]
            for number, run in enumerate(module_runs):
                if 0 <= number - earlier < len(called):
                    sites[run.program, run.run] = called[number - earlier].site
                else:
                    sites[run.program, run.run] = recent[number % len(recent)] if recent else -1
        return sites


def _comparable(name: str) -> str:
    """Convert a function's name to its form in module names: XLA replaces all but letters and digits by underscores."""
    return re.sub(r"\W", "_", name)


def read_window(planes: Iterable[Any]) -> Window:
    """Read a window from the planes of a `jax.profiler.ProfileData`."""
    window = Window()
    for plane in planes:
        device = plane.name.startswith("/device:")
        for line in plane.lines:
            _read_line(line.events, device, window)
    return window


def _read_line(events: Iterable[Any], device: bool, window: Window) -> None:
    """Add the events of a thread, or of a stream of an accelerator, to a window."""
    open_calls: list[tuple[float, str, int]] = []  # end, name, call site
    running: list[Executed] = []
    # most events are unwanted
    wanted = [(name, event) for event in events if not (name := event.name).startswith(_UNWANTED)]
    timed = [(event.start_ns, -event.duration_ns, number) for number, (_, event) in enumerate(wanted)]
    for start, negative, number in sorted(timed):
        name, event = wanted[number]
        duration = -negative
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if jitted := _JITTED.match(name):
            open_calls.append((start + duration, jitted[1], open_calls[-1][2] if open_calls else -1))
            continue
        if _EXECUTE.search(name):
            if open_calls:
                window.dispatched.append(Dispatch(start, *open_calls[-1][1:]))
            continue
        if not duration and not name.startswith(ANNOTATION):
            continue
        facts = dict(event.stats)
        if name.startswith(ANNOTATION):
            open_calls.append((start + duration, "", int(facts.get("site", -1))))
        elif "hlo_op" in facts:
            while running and running[-1].start + running[-1].duration <= start:
                running.pop()
            if running:
                running[-1].own -= min(duration, running[-1].own)
            where = (facts["hlo_op"], str(facts.get("hlo_module", "")), int(facts.get("program_id", -1)))
            run = int(facts.get("run_id", -1)) & 0xFFFFFFFF
            running.append(Executed(start, duration, duration, *where, run, device))
            window.executed.append(running[-1])


@dataclass
class Programs:
    """Cache of compiled programs by their id in the profiler."""

    known: dict[int, CompiledProgram] = field(default_factory=dict)

    def learn(self, executed: Sequence[Executed], executables: Iterable[Any]) -> None:
        """Parse programs that ran and have not been parsed yet, if their executables still exist."""
        wanted: dict[int, tuple[str, set[str]]] = {}
        for instruction in executed:
            program = self.known.get(instruction.program)
            if program is None or instruction.name not in program.operations:
                wanted.setdefault(instruction.program, (instruction.module, set()))[1].add(instruction.name)
        if not wanted:
            return
        modules = [module for executable in executables for module in executable.hlo_modules()]
        for number, (name, ran) in wanted.items():
            named = [module for module in modules if module.name == name]
            # if several modules have this name (lambdas), compare their ids, which takes time because it serializes the
            # modules
            if len(named) > 1:
                own = [module for module in named if _number(module.as_serialized_hlo_module_proto()) == number]
                named = own or named
            parsed = (parse_program(module.to_string(), ran) for module in reversed(named))
            compiled = next((candidate for candidate in parsed if ran <= candidate.operations.keys()), None)
            compiled = compiled or CompiledProgram(name)
            operations = self.known.setdefault(number, compiled).operations
            operations |= {instruction: _unknown(instruction) for instruction in ran} | compiled.operations
        while len(self.known) > MOST_PROGRAMS:
            del self.known[next(iter(self.known))]

    def operation(self, executed: Executed) -> Operation:
        """Look up the operation of an instruction that ran; for an unknown program, make one from its name."""
        program = self.known.get(executed.program)
        return (program.operations.get(executed.name) if program else None) or _unknown(executed.name)


def _unknown(name: str) -> Operation:
    return Operation(re.sub(r"[.\d]+$", "", name), (), -1, backward=False)


def _number(module: bytes) -> int:
    """The id that the profiler uses for a program: field 5 of the serialized HloModuleProto."""
    for number, value in fields(module):
        if number == 5 and isinstance(value, int):
            return value
    return 0
