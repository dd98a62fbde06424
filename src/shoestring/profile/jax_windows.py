"""What JAX's profiler saw in a window of time: operations of compiled programs, by program and by call."""

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
"""How the names of events begin that tell nothing here."""

_RECENT = 64  # calls of a function whose places are remembered

MOST_PROGRAMS = 256
"""Compiled programs whose tables are kept; a program that compiles without end reads tables again."""


@dataclass(frozen=True)
class Dispatch:
    """A call that started a compiled program."""

    start: float
    name: str
    """Of the jitted function."""
    site: int
    """Number of its place; -1 is not known."""


@dataclass
class Executed:
    """An instruction that ran; times are nanoseconds."""

    start: float
    duration: float
    own: float
    """Without the instructions that ran within it."""
    name: str
    module: str
    program: int
    run: int
    device: bool
    """Whether on an accelerator."""


@dataclass
class Window:
    """The events of a window."""

    executed: list[Executed] = field(default_factory=list)
    dispatched: list[Dispatch] = field(default_factory=list)

    def sites(self, usual: dict[str, list[int]]) -> dict[tuple[int, int], int]:
        """The place that each run was called from, by its program and number; -1 is not known.

        Runs of one function are in the order of its calls, but those at first may have been called before the window.
        As few are taken to be such as let no run begin before its call; they are shared out as calls usually are.

        Args:
            usual: places of the last calls of each function; those of this window are added.
        """
        first: dict[tuple[int, int], Executed] = {}
        for each in self.executed:
            key = each.program, each.run
            if key not in first or each.start < first[key].start:
                first[key] = each
        calls: dict[str, list[Dispatch]] = defaultdict(list)
        for call in sorted(self.dispatched, key=lambda call: call.start):
            calls[_comparable(f"jit_{call.name}")].append(call)
        runs: dict[str, list[Executed]] = defaultdict(list)
        for each in sorted(first.values(), key=lambda each: each.start):
            runs[_comparable(each.module)].append(each)
        found = {}
        for module, executed in runs.items():
            called = calls.get(module, [])
            earlier = _called_before([each.start for each in executed], [call.start for call in called])
            recent = usual[module] = [*usual.get(module, ()), *(call.site for call in called)][-_RECENT:]
            for number, each in enumerate(executed):
                if 0 <= number - earlier < len(called):
                    found[each.program, each.run] = called[number - earlier].site
                else:
                    found[each.program, each.run] = recent[number % len(recent)] if recent else -1
        return found


def _called_before(runs: Sequence[float], calls: Sequence[float]) -> int:
    """The fewest of the runs, from the first, that none of these calls can have started."""
    before = [bisect.bisect_right(calls, start) for start in runs]
    return max((n - called + 1 for n, called in enumerate(before) if called < len(calls)), default=0)


def _comparable(name: str) -> str:
    """Names of modules are names of functions in which other characters than letters and digits were replaced."""
    return re.sub(r"\W", "_", name)


def read_window(planes: Iterable[Any]) -> Window:
    """The events of a window, from the planes of a `jax.profiler.ProfileData`."""
    window = Window()
    for plane in planes:
        device = plane.name.startswith("/device:")
        for line in plane.lines:
            _read_line(line.events, device, window)
    return window


def _read_line(events: Iterable[Any], device: bool, window: Window) -> None:
    open_calls: list[tuple[float, str, int]] = []  # end, name, place
    running: list[Executed] = []
    wanted = [(name, event) for event in events if not (name := event.name).startswith(_UNWANTED)]  # most are not
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
    """Compiled programs by the number that the profiler gives them."""

    known: dict[int, CompiledProgram] = field(default_factory=dict)

    def learn(self, executed: Sequence[Executed], executables: Iterable[Any]) -> None:
        """Read the tables of programs that ran and are not known yet, as far as their executables still live."""
        wanted: dict[int, tuple[str, set[str]]] = {}
        for each in executed:
            if each.program not in self.known or each.name not in self.known[each.program].operations:
                wanted.setdefault(each.program, (each.module, set()))[1].add(each.name)
        if not wanted:
            return
        modules = [module for executable in executables for module in executable.hlo_modules()]
        for number, (name, ran) in wanted.items():
            named = [module for module in modules if module.name == name]
            if len(named) > 1:  # such as all that are called lambda
                own = [module for module in named if _number(module.as_serialized_hlo_module_proto()) == number]
                named = own or named
            parsed = (parse_program(module.to_string(), ran) for module in reversed(named))
            found = next((each for each in parsed if ran <= each.operations.keys()), CompiledProgram(name))
            operations = self.known.setdefault(number, found).operations
            operations |= {each: _unknown(each) for each in ran} | found.operations
        while len(self.known) > MOST_PROGRAMS:
            del self.known[next(iter(self.known))]

    def operation(self, each: Executed) -> Operation:
        """What an instruction does; of a program that is gone, what its name says."""
        program = self.known.get(each.program)
        return (program.operations.get(each.name) if program else None) or _unknown(each.name)


def _unknown(name: str) -> Operation:
    return Operation(re.sub(r"[.\d]+$", "", name), (), -1, backward=False)


def _number(module: bytes) -> int:
    """The id of an HloModuleProto, which is what the profiler calls the program by: its field 5."""
    for number, value in fields(module):
        if number == 5 and isinstance(value, int):
            return value
    return 0
