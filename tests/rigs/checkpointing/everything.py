"""Everything at once: a small run under several faults, and what it may load, lose and wait for.

A plan is plain data: rounds, each a start of the run that is struck while it lives, and what is lost and damaged before
the next one. A start without faults comes last. All states are compared, bit by bit, with those of a run that nothing
disturbs; what must be resumed follows from what was said to be safe, and from which files are whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoestring.testing.fork_server import ForkedProcess
from tests.rigs.checkpointing.known import REFUSALS, RunSetup
from tests.rigs.checkpointing.strikes import Strike, StruckStart, work
from tests.rigs.checkpointing.survivors import Survivors
from tests.rigs.checkpointing.trainee import FaultyRun, fresh, lines

RANKS, STEPS = 2, 9
TIMEOUT, PATIENT = 15.0, 180.0  # seconds that an exchange may take: in a start that is struck, and in the last one
ENDS, BUSY = 6, 60.0  # how many timeouts a start may take without a step, and the seconds that it may take besides
GRACE = 0.03  # seconds until an agent ends the other ranks
REFUSED = (*REFUSALS, "holds no checkpoint of the newest start")
"""Words of a refusal to begin beside checkpoints that cannot be used."""
TURN = 0.02  # seconds between two looks at the processes
LOCKED = 1.0  # seconds that a lock is waited for


@dataclass(frozen=True, kw_only=True)
class Round:
    """One start of the run, and what happens until the next one."""

    strikes: tuple[Strike, ...] = ()
    rival: Literal["", "here", "elsewhere"] = ""
    """A second start at the same time: on the same hosts, or on others, whose locks do not keep out these."""
    agent: bool = True
    """Whether the other ranks are ended as soon as one has failed; otherwise they have to end by themselves."""
    lost: tuple[int, ...] = ()
    """Hosts that are lost after it, with their memory and what disks they have of their own."""
    damages: tuple[tuple[str, int], ...] = ()
    """What is damaged after it, and the seed of where."""

    @property
    def disturbed(self) -> bool:
        return bool(self.strikes or self.rival)


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """A run, and all its faults."""

    under: str = "ddp"
    """As of `FaultyRun`."""
    hosts: int = 1
    shared: bool = True
    """Whether the hosts have one disk."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()

    @property
    def faults(self) -> list[str]:
        """The names of all of them."""
        found = []
        for each in self.rounds:
            found += [strike.kind for strike in each.strikes]
            found += [f"two starts {each.rival}"] if each.rival else []
            found += ["lost host"] * len(each.lost) + [f"damage: {name}" for name, _ in each.damages]
        return found

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> FaultPlan:
        told = json.loads(text)
        rounds = [
            Round(**each | {"strikes": tuple(Strike(**s) for s in each["strikes"]),
                            "lost": tuple(each["lost"]), "damages": tuple(map(tuple, each["damages"]))})
            for each in told.pop("rounds")
        ]  # fmt: skip
        return cls(**told, rounds=tuple(rounds))


@dataclass(frozen=True)
class Outcome:
    """What became of a plan."""

    wrong: tuple[str, ...]
    struck: tuple[str, ...]
    """The faults that happened: of those at named points, the ones that were reached."""
    starts: int
    skipped: tuple[str, ...]
    """The faults that need what this machine lacks."""
    refused: bool
    """Whether it ended by a refusal, because no checkpoint was left whole."""


@dataclass
class Start:
    """A start under way."""

    task: FaultyRun
    ranks: Sequence[ForkedProcess]
    allowed: float
    """Seconds in which it must end, or tell of a step."""
    ends: float = field(init=False)
    told: int = 0
    """The number of its lines then."""
    failed_at: float = 0.0
    hung: bool = False
    seen: dict[int, float] = field(default_factory=dict)
    """When ranks were found stopped."""

    def __post_init__(self) -> None:
        self.ends = time.monotonic() + self.allowed

    @property
    def over(self) -> bool:
        return all(rank.exitcode is not None for rank in self.ranks)

    @property
    def succeeded(self) -> bool:
        return all(rank.exitcode == 0 for rank in self.ranks)

    def attend(self, *, agent: bool) -> None:
        """Continue ranks that were stopped for long enough; and end the others of one that has failed."""
        now = time.monotonic()
        for number, rank in enumerate(self.ranks):
            if rank.exitcode:
                self.failed_at = self.failed_at or now
            elif rank.exitcode is None and _state(rank.pid) == "T":
                told = [strike for start, strike in lines(self.task.place / f"struck-{number}.jsonl")]
                seconds = next((each["amount"] for each in reversed(told) if each["kind"] == "stop"), 0.0)
                if now >= self.seen.setdefault(number, now) + seconds:
                    rank.resume()
                    del self.seen[number]
        if now > self.ends and not self.over:  # on a slow link steps may take nearly a timeout each
            told = [line for path in self.task.place.glob("told-*.jsonl") for line in lines(path)]
            before, self.told = self.told, sum(line[0] == self.task.start for line in told)
            self.ends, self.hung = now + self.allowed, self.told == before
        if (agent and self.failed_at and now > self.failed_at + GRACE) or self.hung:
            for rank in self.ranks:
                rank.kill()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return ""


class Everything:
    """A plan that is carried out in a folder.

    Args:
        expected: the digest of each rank's state after each step of the undisturbed run.
        planted: see `StruckStart`.
    """

    def __init__(
        self, plan: FaultPlan, folder: Path, expected: Mapping[tuple[int, int], str], planted: str = ""
    ) -> None:
        self.plan, self.expected, self.planted = plan, expected, planted
        peers = plan.settings.get("redundancy", "copy")
        place, local = str(fresh(folder)), RANKS // plan.hosts
        self.setup = RunSetup(folder=place, ranks=RANKS, local=local, peers=peers, shared=plan.shared)
        self.task = FaultyRun(
            folder=place, ranks=RANKS, local=local, steps=STEPS, under=plan.under, settings=plan.settings
        )
        self.wrong, self.struck = list[str](), list[str]()
        self.survivors = Survivors(self.setup, plan.under)
        self.starts = 0

    def judge(self) -> Outcome:
        """Carry it out."""
        refused = False
        for number, each in enumerate((*self.plan.rounds, Round())):
            last = number == len(self.plan.rounds)
            refused, ended = self.run_round(each, last=last)
            harmless = not each.rival and not any(later.lost or later.damages for later in self.plan.rounds[number:])
            if refused or self.wrong or (ended and harmless):
                break
            if ended:
                self.survivors.ended()
            self.survivors.lose(each.lost)
            self.struck += ["lost host"] * len(each.lost)
            self.struck += [f"damage: {name}" for name, seed in each.damages if self.survivors.damage(name, seed)]
        if not refused and not self.wrong:
            left = [path for host in range(self.setup.hosts) for path in self.setup.memory(host).rglob("*")]
            self.wrong += [f"`{path.name}` is left in memory" for path in left if path.is_file()]
        skipped = [] if libfaketime() else [name for name in self.plan.faults if name == "clock"]
        return Outcome(tuple(self.wrong), tuple(self.struck), self.starts, tuple(skipped), refused)

    def run_round(self, each: Round, *, last: bool) -> tuple[bool, bool]:
        """Whether it was refused, as it must be where nothing is left whole; and whether the run came to its end."""
        before = [self.said(rank) for rank in range(RANKS)]
        least = self.survivors.least()
        starts = [self._start(each, last)]
        if each.rival == "here":
            starts.append(self._start(Round(), last))
        try:
            while not all(start.over for start in starts):
                if each.rival == "elsewhere" and len(starts) == 1 and self.told(starts[0].task.start):
                    starts.append(self._start(each, last, elsewhere=True))
                for start in starts:
                    start.attend(agent=each.agent)
                time.sleep(TURN)
        finally:
            for start in starts:
                for rank in start.ranks:
                    rank.kill()
                    rank.join()
        self.wrong += [f"start {s.task.start} hung" for s in starts if s.hung]
        kinds = self._kinds(starts[0])
        self.struck += [*kinds, *([f"two starts {each.rival}"] if len(starts) > 1 else [])]
        words = "".join(self.said(rank)[len(before[rank]) :] for rank in range(RANKS))
        self._judge(each, starts, least, "full" in kinds)
        ended = any(start.succeeded for start in starts)
        refused = any(refusal in words for refusal in REFUSED) and not ended
        if refused and least and "full" not in kinds:
            self.wrong.append(f"start {starts[0].task.start} was refused, step {least} was safe: {_error(words)}")
        elif not ended and not refused and not each.disturbed:
            self.wrong.append(f"start {starts[0].task.start} failed by itself: {_error(words)}")
        return refused, ended

    def _start(self, each: Round, last: bool, *, elsewhere: bool = False) -> Start:
        timeout = PATIENT if last else TIMEOUT
        task = replace(self.task, start=self.starts)
        self.starts += 1
        strikes = () if elsewhere else tuple(s for s in each.strikes if s.kind != "clock" or libfaketime())
        told = StruckStart(
            setup=self.setup, strikes=strikes, timeout=timeout, waits=LOCKED, elsewhere=elsewhere, planted=self.planted
        )
        arguments = [json.dumps(asdict(task)), told.dumps()]
        clocks = {strike.rank for strike in strikes if strike.kind == "clock"}
        ranks = [
            ForkedProcess(work, [*arguments, rank], rank % 2, libfaketime() if rank in clocks else "")
            for rank in range(RANKS)
        ]
        stopped = sum(strike.amount for strike in strikes if strike.kind == "stop")
        return Start(task, ranks, ENDS * timeout + BUSY + stopped)

    def said(self, rank: int) -> str:
        path = self.task.place / f"said-{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def told(self, start: int) -> dict[int, list[list[Any]]]:
        """By rank, what it told of a start, if anything: [when, step, digest, safe] each time."""
        said = {rank: lines(self.task.place / f"told-{rank}.jsonl") for rank in range(RANKS)}
        found = {rank: [line[1:] for line in told if line[0] == start] for rank, told in said.items()}
        return {rank: told for rank, told in found.items() if told}

    def _kinds(self, start: Start) -> list[str]:
        said = [lines(self.task.place / f"struck-{rank}.jsonl") for rank in range(RANKS)]
        return [strike["kind"] for each in said for number, strike in each if number == start.task.start]

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, each: Round, starts: Sequence[Start], least: int, full: bool) -> None:
        """What each start told, in the order in which they began to train."""
        told = [(start.task.start, [*of.values()]) for start in starts if (of := self.told(start.task.start))]
        ended = 0.0
        for number, ranks in sorted(told, key=lambda each: each[1][0][0][0]):
            self.wrong += self._states(number)
            began, step = min(rank[0][0] for rank in ranks), ranks[0][0][1]
            if any(rank[0][1] != step for rank in ranks):
                self.wrong.append(f"start {number}: ranks resumed from different steps")
            if each.rival == "elsewhere" and number != starts[0].task.start:
                least = self.survivors.on_disk()
            elif began < ended:
                self.wrong.append(f"start {number} began while another one trained")
            if step < least:
                self.wrong.append(f"start {number} resumed from step {step}, step {least} was safe")
            if each.rival != "elsewhere":
                self.survivors.resumed(step)
                self.survivors.safe([line[3] for rank in ranks for line in rank], replayed=not full)
                least = self.survivors.intact()
            ended = max(line[0] for rank in ranks for line in rank)
        if each.rival == "elsewhere" and len(starts) > 1:
            self.survivors.forget()

    def _states(self, number: int) -> Iterator[str]:
        for rank, told in self.told(number).items():
            for index, (_, step, digest, _) in enumerate(told):
                if digest != self.expected.get((rank, step)):
                    what = "resumed" if index == 0 else "trained"
                    yield f"start {number}, rank {rank}: step {step}, {what}, is not that of the undisturbed run"
                    break


def _error(words: str) -> str:
    """The last line of a traceback."""
    return (words.strip().splitlines() or ["nothing was said"])[-1][:300]


class Rig:
    """Carries out plans in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._expected: dict[tuple[str, int], dict[tuple[int, int], str]] = {}

    def judge(self, plan: FaultPlan, planted: str = "") -> Outcome:
        """What becomes of a plan.

        Args:
            planted: see `StruckStart`.
        """
        kind = plan.under, plan.hosts
        if kind not in self._expected:
            self._expected[kind] = self._undisturbed(plan)
        return Everything(plan, self.folder / "struck", self._expected[kind], planted).judge()

    def _undisturbed(self, plan: FaultPlan) -> dict[tuple[int, int], str]:
        """The digests of the states of a plan's run without faults, by rank and step."""
        run = Everything(replace(plan, rounds=()), self.folder / "undisturbed", {})
        run.run_round(Round(), last=True)
        found = {(rank, line[1]): line[2] for rank, told in run.told(0).items() for line in told}
        if len(found) != RANKS * (STEPS + 1):
            raise RuntimeError(f"the undisturbed run in {self.folder} failed: {_error(run.said(0))}")
        return found


def libfaketime() -> str:
    """The library that sets clocks back; empty where it is not installed."""
    return str(next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), ""))
