"""Records JAX programs: short windows of JAX's own profiler, folded into the call tree as they come.

Nothing is done before the program imports jax, and little between windows. What is kept is one row of numbers for
each operation of each line, however long the run. What a window costs grows with the operations that run in it, so
their number decides how long windows are, and what they have cost so far when the next may come.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shoestring.profile.jax_calls import CallSites, Compilations
from shoestring.profile.jax_programs import Frames, Operation
from shoestring.profile.jax_windows import Programs, Window, read_window
from shoestring.profile.recording import Profile
from shoestring.profile.tree import NodeKind, TreeBuilder

log = logging.getLogger("shoestring")

SHORTEST, LONGEST = 0.02, 4.0
"""Seconds of a window: of the first, and at most. Windows double where nothing was seen to begin and end."""

OPERATIONS = 1000
"""Operations that run in a window, as it is meant to be."""

FITS = 20.0
"""Seconds of a window for each second of a usual operation: one that is cut off by an end of it is not seen."""

PAUSE = 0.1
"""Seconds between windows at least, as a part of the time since the first: many at first, ever fewer later."""

LONGEST_PAUSE = 10.0

BUDGET = 0.03
"""What recording may add to a program's processor time, where nobody says; reading what was compiled, once, counts
not."""

EVENT = 2e-6
"""Processor seconds that the program itself takes for an operation that is recorded, with the events beside it."""

_COMPILES = re.compile(r"/jax/_src/(pjit|stages|compiler|compilation_cache)\.py\t|/jax/_src/interpreters/")

Key = tuple[int, Operation, bool]
"""Number of the call's place, what was done, and whether on an accelerator."""


@dataclass
class Numbers:
    """What an operation took in all windows; times are nanoseconds."""

    count: int = 0
    own: float = 0.0
    least: float = float("inf")
    most: float = 0.0
    squares: float = 0.0
    square_of_windows: float = 0.0
    """Sum over windows of the square of what it took in each."""


class JaxCollector(threading.Thread):
    """Records from `start` to `finish` what compiled JAX programs do.

    Args:
        share: part of the time that windows may take.
        budget: part of the program's processor time that recording may add.
    """

    def __init__(self, share: float = 1.0, budget: float | None = None) -> None:
        super().__init__(name="shoestring-profile-jax", daemon=True)
        self.gap = 1 / min(share, 1.0) - 1  # seconds without a window for each second of one
        self.budget = BUDGET if budget is None else budget
        self.ending, self.hurry = threading.Event(), threading.Event()
        self.sites, self.programs = CallSites(), Programs()
        self.compilations: Compilations | None = None
        self.totals: dict[Key, Numbers] = defaultdict(Numbers)
        self.usual: dict[str, list[int]] = {}
        self.windows, self.covered, self.first, self.last = 0, 0.0, 0.0, 0.0
        self.operations, self.learning = 0, 0.0
        """Operations seen in all windows, and processor seconds in which compiled programs were read."""
        self.spent = 0.0
        """Processor seconds of all that recording took, but for that reading."""
        self.failure = ""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails within becomes `failure`: neither the program nor the profile's other parts suffer from it."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def begin(self) -> None:
        """Start the thread, if there may be one more."""
        with self.guarded():
            self.start()

    def run(self) -> None:
        """Wait for jax, then take windows until the end."""
        with self.guarded():
            while not _ready():
                self._listen()
                if self.ending.wait(0.05):
                    return
            self._listen()
            self._take_windows()
        self.last = time.perf_counter()

    def _take_windows(self) -> None:
        import jax

        self.first = self.last = time.perf_counter()
        length, spent, began = SHORTEST, time.thread_time(), time.process_time()
        while not self.ending.is_set():
            try:
                seen = self._take_window(length)
            except jax.errors.JaxRuntimeError:  # the program's own profiler came in between
                seen = False
            pause = 0.01
            if seen:
                pause = min(PAUSE * (time.perf_counter() - self.first), LONGEST_PAUSE)
                own = sum(numbers.own for numbers in self.totals.values())
                usual = sum(numbers.squares for numbers in self.totals.values()) / max(own, 1.0) / 1e9
                fitting = max(OPERATIONS * self.covered / self.operations, FITS * usual)
                length = min(max(fitting, length / 2, SHORTEST), 2 * length, LONGEST)
            else:
                length = min(2 * length, LONGEST)
            self.ending.wait(max(pause, self.gap * length))
            while not self._affordable(time.thread_time() - spent, time.process_time() - began):
                if self.ending.wait(0.05):
                    return

    def _affordable(self, here: float, everywhere: float) -> bool:
        """Whether what was spent is within the budget.

        Args:
            here: processor seconds of this thread.
            everywhere: of the process, which has waited if they are fewer than have passed, and many threads if more.
        """
        self.spent = here - self.learning + self.operations * EVENT
        return self.spent <= self.budget * min(everywhere - self.spent, time.perf_counter() - self.first)

    def finish(self) -> None:
        """End; the window that is open counts."""
        self.ending.set()
        self.hurry.set()
        with self.guarded():
            if self.ident is not None:
                self.join()
            if self.compilations is not None:
                self.compilations.stop()

    def _listen(self) -> None:
        if self.compilations is None and "jax.monitoring" in sys.modules:
            self.compilations = Compilations()
            self.compilations.start()

    def _take_window(self, seconds: float) -> bool:
        """Record for some time, and fold what was seen; whether there was anything."""
        import jax
        from jax._src import profiler  # the public functions write files, and a second form of all events

        if profiler._profile_state.profile_session is not None:  # the program's own
            self.ending.wait(0.25)
            return False
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False  # every program there is, in each window
        with self.sites.recorded(), self._giving_way(profiler._profiler) as new_session:
            session = new_session(options)
            began = time.perf_counter()
            self.hurry.wait(seconds)
            ended = time.perf_counter()
            data = jax.profiler.ProfileData.from_serialized_xspace(session.stop())
        window = read_window(data.planes)
        if not window.executed:
            if not self.windows:
                self.first = ended
            else:
                self.covered += ended - began
            return False
        clients = {device.client for device in jax.devices()}
        began_learning = time.thread_time()
        self.programs.learn(window.executed, [each for client in clients for each in client.live_executables()])
        self.learning += time.thread_time() - began_learning
        self._add(window)
        self.windows += 1
        self.covered += ended - began
        self.operations += len(window.executed)
        return True

    @contextmanager
    def _giving_way(self, module: Any) -> Iterator[Any]:
        """Within, a program that starts jax's profiler ends this window first: there can be only one at a time."""
        original, closed = module.ProfilerSession, threading.Event()
        self.hurry.clear()
        if self.ending.is_set():
            self.hurry.set()

        def new_session(*arguments: Any) -> Any:
            self.hurry.set()
            closed.wait(10)
            return original(*arguments)

        module.ProfilerSession = new_session
        try:
            yield original
        finally:
            module.ProfilerSession = original
            closed.set()

    def _add(self, window: Window) -> None:
        sites = window.sites(self.usual)
        took: dict[Key, float] = defaultdict(float)
        for each in window.executed:
            key = (sites.get((each.program, each.run), -1), self.programs.operation(each), each.device)
            numbers = self.totals[key]
            numbers.count += 1
            numbers.own += each.own
            numbers.least, numbers.most = min(numbers.least, each.duration), max(numbers.most, each.duration)
            numbers.squares += each.duration**2
            took[key] += each.own
        for key, nanoseconds in took.items():
            self.totals[key].square_of_windows += nanoseconds**2

    def added_to(self, profile: Profile) -> Profile:
        """The profile with what was recorded of JAX; where not all of that could be, it says so, and has the rest."""
        with self.guarded():
            profile = self._folded(profile)
        if self.failure:
            said = f"JAX could not be profiled to the end: {self.failure}."
            log.warning("%s", said)
            profile = replace(profile, facts=replace(profile.facts, unseen=[*profile.facts.unseen, said]))
        return profile

    def _folded(self, profile: Profile) -> Profile:
        facts = profile.facts
        if self.compilations is not None:
            import jax

            facts = replace(
                facts,
                waits=facts.waits | self.compilations.largest(),
                versions=facts.versions | {"jax": jax.__version__},
                beside=facts.beside + self.spent + self.learning,
            )
        if not self.totals:
            return replace(profile, facts=facts)
        builder = TreeBuilder()
        builder.graft(profile.tree)
        share = min(1.0, self.covered / max(self.last - self.first, self.covered, 1e-9))
        fold = _Fold(builder, self.sites.paths, share, self.windows)
        for key, numbers in self.totals.items():
            fold.add(key, numbers)
        fold.discount_waiting()
        return replace(profile, tree=builder.build(), facts=facts)


def _ready() -> bool:
    """Whether the program uses jax: starting its backends is left to the program."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and "jax.profiler" in sys.modules and bridge.backends_are_initialized()


@dataclass
class _Fold:
    """Adds operations to a tree, scaled from the windows to the whole run."""

    builder: TreeBuilder
    sites: list[Frames]
    share: float
    windows: int
    total: float = 0.0
    places: dict[tuple[int, Operation], int] = field(default_factory=dict)

    def add(self, key: Key, numbers: Numbers) -> None:
        """Add an operation where it was called, behind a link if it computes a gradient."""
        site, operation, device = key
        path = self._path(site, operation)
        node = self._python(path)
        if operation.backward:
            forward = self.builder.node(node, NodeKind.OPERATOR, operation.name)
            called = self._python(self.sites[site] if site >= 0 else path[:1])
            link = self.builder.node(called, NodeKind.LINK, "", 0, forward)
            node = self.builder.node(link, NodeKind.BACKWARD, f"transpose({operation.name})")
        else:
            node = self.builder.node(node, NodeKind.OPERATOR, operation.name)
        took = numbers.own / self.share
        if device:
            kernel = self.builder.node(node, NodeKind.KERNEL, operation.name)
            self.builder.add(kernel, count=round(numbers.count / self.share), device=round(took))
            return
        self.total += took
        self.builder.add(
            node,
            count=round(numbers.count / self.share),
            own=round(took),
            least=round(numbers.least),
            most=round(numbers.most),
            squares=numbers.squares / self.share,
            own_variance=self._variance(numbers),
        )

    def _variance(self, numbers: Numbers) -> float:
        """Of what an operation took in all, from how its windows differ."""
        if self.windows < 2:
            return 0.0
        between = (numbers.square_of_windows - numbers.own**2 / self.windows) / (self.windows - 1)
        return max(between, 0.0) * self.windows * (1 - self.share) / self.share**2

    def _path(self, site: int, operation: Operation) -> Frames:
        """From the place of the call into the jitted function; without such a place, as it was traced first."""
        if site < 0:
            return operation.frames
        inside = operation.frames[operation.inside :] if operation.inside >= 0 else ()
        return (*self.sites[site], *inside)

    def _python(self, path: Frames) -> int:
        node = 0
        for name, line in path:
            node = self.builder.node(node, NodeKind.PYTHON, name, line)
        return node

    def discount_waiting(self) -> None:
        """Take from the time that Python waited for compiled programs what they ran, which is there already.

        It waits in functions of jax that neither trace nor compile, and then, where too many calls are under way, in
        calls of jitted functions.
        """
        names = list(self.builder.names)
        compiles, waiting = [False], []
        for number, row in enumerate(self.builder.rows[1:], 1):
            name = names[row[2]] if row[1] == NodeKind.PYTHON else ""
            compiles.append(compiles[row[0]] or bool(_COMPILES.search(name)))
            if "/jax/_src/" in name and not compiles[number]:
                waiting.append(number)
        left = self._discount(waiting, self.total)
        self._discount([self._python(path) for path in dict.fromkeys(self.sites)], left)

    def _discount(self, nodes: list[int], nanoseconds: float) -> float:
        """Take time from these nodes, from each its part; returns what they had too little for."""
        own = {node: self.builder.numbers[node]["own"] for node in nodes if self.builder.numbers[node]["own"] > 0}
        part = min(1.0, nanoseconds / max(sum(own.values()), 1.0))
        for node, had in own.items():
            self.builder.add(node, own=-round(had * part))
        return nanoseconds - part * sum(own.values())
