"""Records JAX programs with JAX's profiler in short windows, and adds the recorded operations to the call tree.

The collector does nothing before the program imports jax, and little between windows. The collector stores one row of
numbers per operation and call site, regardless of the length of the run. The cost of a window grows with the number of
operations recorded in it, so the collector chooses the length of windows by this number. The next window starts once
the total cost so far is within the budget.
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
from shoestring.profile.jax_windows import Programs, read_window
from shoestring.profile.recording import Profile
from shoestring.profile.tree import NodeKind, TreeBuilder, both_ends

log = logging.getLogger("shoestring")

SHORTEST, LONGEST = 0.02, 4.0
"""Length of the first window and maximum length of later windows, in seconds. After a window without a complete
operation, the next window is twice as long."""

OPERATIONS = 1000
"""Target number of operations in a window."""

FITS = 20.0
"""Minimum length of a window, as a multiple of the duration of a typical operation, because operations that a window's
start or end cuts off are lost."""

PAUSE = 0.1
"""Pause after a window, as a fraction of the time since the first window; windows become rarer as the run
progresses."""

LONGEST_PAUSE = 10.0

BUDGET = 0.03
"""Default fraction of the program's processor time that recording may add; excludes parsing each compiled program
once."""

EVENT = 2e-6
"""Assumed processor seconds that the program's threads spend on recording one operation and its surrounding events."""

_COMPILES = re.compile(r"/jax/_src/(pjit|stages|compiler|compilation_cache)\.py\t|/jax/_src/interpreters/")

Key = tuple[int, Operation, bool]
"""Number of the call site, the operation, and whether the operation ran on an accelerator."""


@dataclass
class Numbers:
    """Statistics of an operation over all windows: the number of executions, and times in nanoseconds."""

    count: int = 0
    own: float = 0.0
    least: float = float("inf")
    most: float = 0.0
    squares: float = 0.0
    square_of_windows: float = 0.0
    """Sum of squares of the operation's time per window."""


class JaxCollector(threading.Thread):
    """Records the operations of compiled JAX programs from `begin` to `finish`.

    Args:
        share: fraction of the time that windows may take.
        budget: fraction of the program's processor time that recording may add.
    """

    def __init__(self, share: float = 1.0, budget: float | None = None) -> None:
        super().__init__(name="shoestring-profile-jax", daemon=True)
        self.gap = 1 / min(share, 1.0) - 1  # seconds of pause per second of window
        self.budget = BUDGET if budget is None else budget
        self.ending, self.hurry = threading.Event(), threading.Event()
        self.sites, self.programs = CallSites(), Programs()
        self.compilations: Compilations | None = None
        self.totals: dict[Key, Numbers] = defaultdict(Numbers)
        self.usual: dict[str, list[int]] = {}
        self.windows, self.covered, self.first, self.last = 0, 0.0, 0.0, 0.0
        self.operations, self.learning = 0, 0.0
        """Number of operations in all windows, and processor seconds spent on parsing compiled programs."""
        self.spent = 0.0
        """Processor seconds spent on recording, without `learning`."""
        self.failure = ""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context that catches exceptions and stores the first in `failure`, so that only the JAX recording fails."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def begin(self) -> None:
        """Start the thread; if the system allows no more threads, store the error as `failure`."""
        with self.guarded():
            self.start()

    def run(self) -> None:
        """Wait until jax is initialized, then record windows until `finish`."""
        with self.guarded():
            while True:
                # wait for the program to initialize jax's backends; initializing them here might choose other backends
                bridge: Any = sys.modules.get("jax._src.xla_bridge")
                if bridge is not None and "jax.profiler" in sys.modules and bridge.backends_are_initialized():
                    break
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
            except jax.errors.JaxRuntimeError:  # the program itself has started jax's profiler
                seen = False
            pause = 0.01
            if seen:
                pause = min(PAUSE * (time.perf_counter() - self.first), LONGEST_PAUSE)
                own = sum(numbers.own for numbers in self.totals.values())
                # mean duration of operations, weighted by duration, so that a few long operations outweigh many short
                # operations
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
        """Whether the cost of recording is within the budget.

        Args:
            here: processor seconds that this thread has used.
            everywhere: processor seconds that the process has used. The budget is a fraction of these seconds or of the
                elapsed time, whichever is less; the elapsed time is less in a program with many threads.
        """
        recording, on_events = here - self.learning, self.operations * EVENT
        self.spent = recording + on_events
        passed = time.perf_counter() - self.first
        return self.spent <= self.budget * min(everywhere - self.spent, passed)

    def finish(self) -> None:
        """Stop recording; a window that is being recorded ends now, and its operations count."""
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
        """Record a window of `seconds` seconds and add its operations to the totals; return False if it has none."""
        import jax
        from jax._src import profiler  # jax's public functions write to files, and write every event twice

        if profiler._profile_state.profile_session is not None:  # the program is using jax's profiler
            self.ending.wait(0.25)
            return False
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.enable_hlo_proto = False  # otherwise each window would contain every compiled program
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
        executables = [executable for client in clients for executable in client.live_executables()]
        self.programs.learn(window.executed, executables)
        self.learning += time.thread_time() - began_learning
        sites = window.sites(self.usual)
        took: dict[Key, float] = defaultdict(float)
        for executed in window.executed:
            site = sites.get((executed.program, executed.run), -1)
            key = (site, self.programs.operation(executed), executed.device)
            numbers = self.totals[key]
            numbers.count += 1
            numbers.own += executed.own
            numbers.least, numbers.most = min(numbers.least, executed.duration), max(numbers.most, executed.duration)
            numbers.squares += executed.duration**2
            took[key] += executed.own
        for key, nanoseconds in took.items():
            self.totals[key].square_of_windows += nanoseconds**2
        self.windows += 1
        self.covered += ended - began
        self.operations += len(window.executed)
        return True

    @contextmanager
    def _giving_way(self, module: Any) -> Iterator[Any]:
        """Context that ends the window if the program starts jax's profiler, which allows only one session."""
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

    def added_to(self, profile: Profile) -> Profile:
        """Return the profile with JAX's operations added; after a failure, with the operations so far and a note."""
        with self.guarded():
            profile = self._folded(profile)
        if self.failure:
            message = f"JAX could not be profiled to the end: {self.failure}."
            log.warning("%s", message)
            profile = replace(profile, facts=replace(profile.facts, unseen=[*profile.facts.unseen, message]))
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


@dataclass
class _Fold:
    """Adds operations to a tree, with counts and times scaled up from the windows to the whole run."""

    builder: TreeBuilder
    sites: list[Frames]
    share: float
    windows: int
    total: float = 0.0
    places: dict[tuple[int, Operation], int] = field(default_factory=dict)

    def add(self, key: Key, numbers: Numbers) -> None:
        """Add an operation at its call site; a gradient's operation goes below a link to the forward operation."""
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
        """Estimate the variance of an operation's scaled-up total time, from the differences between windows."""
        if self.windows < 2:
            return 0.0
        between = (numbers.square_of_windows - numbers.own**2 / self.windows) / (self.windows - 1)
        return max(between, 0.0) * self.windows * (1 - self.share) / self.share**2

    def _path(self, site: int, operation: Operation) -> Frames:
        """Return the call path into the jitted function: through the call site or, if unknown, as first traced."""
        if site < 0:
            return operation.frames
        inside = operation.frames[operation.inside :] if operation.inside >= 0 else ()
        return (*self.sites[site], *inside)

    def _python(self, path: Frames) -> int:
        node = 0
        for frame in both_ends(path):
            node = self.builder.line(node, frame)
        return node

    def discount_waiting(self) -> None:
        """Subtract the operations' run time from lines in which Python waited for them, to avoid counting it twice.

        Python waits inside functions of jax that neither trace nor compile. If too many calls are in flight, Python
        also waits in calls of jitted functions.
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
        """Subtract time from nodes in proportion to their own times; return the time that exceeds their sum."""
        own = {node: self.builder.numbers[node]["own"] for node in nodes if self.builder.numbers[node]["own"] > 0}
        part = min(1.0, nanoseconds / max(sum(own.values()), 1.0))
        for node, before in own.items():
            self.builder.add(node, own=-round(before * part))
        return nanoseconds - part * sum(own.values())
