"""Decides from which checkpoint a run resumes, by a pure function of the hosts' files, the history and the user's
request.

`resume` gathers the arguments of `decide` and carries out the plan that it returns. If a part turns out to be damaged,
`decide` is called again with this information, so that all ranks fall back to the same checkpoint. `explain` calls
`decide` in a single process.

The usable checkpoint of the newest step is chosen, no matter where its parts are. A checkpoint is usable if it is part
of the run's history, if the private part of each rank exists or can be rebuilt from parity, if no part is known to be
damaged, and if the last attempts to load the checkpoint did not end the process. If a step has both a checkpoint of
`Tiered` and a single file of `Plain`, the checkpoint of `Tiered` is preferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shoestring.checkpoint.format.history import History
from shoestring.checkpoint.format.layout import PRIVATE
from shoestring.checkpoint.format.manifest import CheckpointId
from shoestring.checkpoint.format.state import unreadable
from shoestring.checkpoint.recovery.attempts import MOST
from shoestring.checkpoint.recovery.offers import DISK, LEVELS, MEMORY, PEERS, Available, Offer, Wish
from shoestring.checkpoint.tiers.disk import MARK
from shoestring.checkpoint.tiers.peer_copies import PARITY, ParitySet, Rebuild, pick_builder
from shoestring.core.errors import CheckpointError

PLACES = {
    MEMORY: "in the memory of the hosts that saved it",
    PEERS: "in memory, with the copies that other hosts hold",
    DISK: "on disk",
}


@dataclass(frozen=True)
class ResumeFacts:
    """The information on which the decision depends, beside the offered files; equal on all ranks."""

    hosts: int = 1
    local_size: int = 1
    """Number of ranks per host."""
    history_damaged: bool = False
    """Whether the run's history exists but cannot be read."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Maps the name of a checkpoint to the number of consecutive attempts to load it that ended the process."""
    damaged: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Maps the key of a damaged offer to a description of the damage."""
    misfits: Mapping[CheckpointId, str] = field(default_factory=dict)
    """Maps a checkpoint without damaged parts to the reason why it still cannot be loaded."""

    def after(self, checkpoint: CheckpointId, damaged: Mapping[tuple[int, str], str], misfit: str) -> ResumeFacts:
        """Return a copy that also contains the results of a failed verification of `checkpoint`."""
        misfits = {**self.misfits, checkpoint: misfit} if misfit else self.misfits
        return replace(self, damaged={**self.damaged, **damaged}, misfits=misfits)


@dataclass(frozen=True)
class NotTaken:
    """Offered files of one checkpoint that are not used, and the reason."""

    checkpoint: CheckpointId
    offers: tuple[Offer, ...]
    reason: str


@dataclass(frozen=True)
class ResumePlan:
    """The plan by which a start of a run will resume, and its reason."""

    wish: Wish
    history: History | None
    """History of the run whose checkpoints may be used; if its file is lost, reconstructed from the checkpoints."""
    not_taken: tuple[NotTaken, ...]
    """All offered files that the plan does not use, starting with the newest checkpoint."""
    warnings: tuple[str, ...] = ()
    action: Literal["load", "load one file", "start anew", "refuse"] = "start anew"
    why: str = "there is no checkpoint"
    step: int = 0
    """Step of the checkpoint to load; 0 if the user named a single file, because the step is then unknown until the
    file is read."""
    checkpoint: CheckpointId | None = None
    offers: tuple[Offer, ...] = ()
    """All undamaged files that hosts offer for the checkpoint."""
    rebuilds: tuple[Rebuild, ...] = ()
    """Parts that must be rebuilt from parity before the checkpoint can be loaded."""
    refusal: CheckpointError | None = None

    @property
    def level(self) -> str:
        """The highest level from which a part must be read: memory, peers or disk."""
        nearest: dict[str, int] = {}
        for offer in self.offers:
            level = LEVELS.index(DISK if offer.level == DISK else PEERS if offer.held else MEMORY)
            nearest[offer.part] = min(level, nearest.get(offer.part, level))
        needed = [level for part, level in nearest.items() if part.startswith(PRIVATE)]
        return LEVELS[max([*needed, LEVELS.index(PEERS if self.rebuilds else MEMORY)])]

    @property
    def on_disk(self) -> bool:
        """Whether the private parts of all ranks are on disk."""
        there = {offer.part for offer in self.offers if offer.level == DISK}
        return self.checkpoint is not None and there >= {f"{PRIVATE}-{rank}" for rank in range(self.checkpoint.ranks)}

    @property
    def ended(self) -> bool:
        """Whether the checkpoint belongs to the run's last step; the run may have been killed before the checkpoint was
        on disk."""
        return _ended(self.offers)

    @property
    def follows_failure(self) -> bool:
        """Whether a failure had ended the run; failures are counted, because their rate determines the intervals
        between checkpoints."""
        return self.wish.auto and not _ended(offer for offer in self.offers if offer.level == DISK)

    @property
    def replays(self) -> bool:
        """Whether to replay the steps after the checkpoint for which differences exist."""
        return self.action == "load" and self.wish.auto and not self.ended and self.history is not None


def decide(available: Available, history: History | None, wish: Wish, facts: ResumeFacts) -> ResumePlan:
    """Decide from which checkpoint a start of a run resumes.

    Args:
        history: the history in the folder of checkpoints; None if it is missing or damaged.
    """
    if history is None and wish.auto:
        # Reconstruct a lost or damaged history from the run's checkpoints. A damaged history shows that a start of the
        # run has begun in this folder and has removed other runs' checkpoints from memory. Without any history,
        # checkpoints in memory are used only if their run also has a checkpoint on disk.
        runs = {offer.checkpoint.run for offer in available.offers if offer.level == DISK}
        own = [offer for offer in available.offers if facts.history_damaged or offer.checkpoint.run in runs]
        if any(offer.level == MEMORY for offer in own):
            history = History.of_what_is_there([offer.checkpoint for offer in own])
    one_file = 0 if available.unseen else max((files.undamaged for files in available.one_files), default=0)
    usable, candidates, left = list[Offer](), dict[CheckpointId, list[Offer]](), list[tuple[Offer, str]]()
    for offer in available.offers:
        if reason := _why_excluded(offer, history, wish):
            left.append((offer, reason))
            continue
        usable.append(offer)
        if offer.key in facts.damaged:
            left.append((offer, f"damaged: {facts.damaged[offer.key]}"))
        else:
            candidates.setdefault(offer.checkpoint, []).append(offer)

    choice = _choose(candidates, one_file, facts)
    left += [(offer, reason) for passed, reason in choice.passed_over.items() for offer in candidates[passed]]
    warnings = [f"skipping the checkpoint of {line}" for line in choice.given_up]
    if wish.only is None and history is None and left and not usable:
        warnings.append(f"`{wish.disk}` does not say of which run it is, so checkpoints in memory are not used")
    # Group unused files by checkpoint and reason, with the newest checkpoint first.
    groups: dict[tuple[CheckpointId, str], list[Offer]] = {}
    for offer, reason in left:
        groups.setdefault((offer.checkpoint, reason), []).append(offer)
    ordered = sorted(groups.items(), key=lambda group: group[0][0], reverse=True)
    plan = ResumePlan(
        wish,
        history,
        tuple(NotTaken(checkpoint, tuple(offers), reason) for (checkpoint, reason), offers in ordered),
        tuple(warnings),
    )
    if choice.newest is None:
        return _without_any(plan, available, usable, one_file, facts, choice.given_up[-1] if choice.given_up else "")
    offers = tuple(candidates[choice.newest])
    plan = replace(plan, action="load", checkpoint=choice.newest, offers=offers, rebuilds=choice.rebuilds)
    return replace(plan, step=choice.newest.step, why=f"it is the newest that is complete, {PLACES[plan.level]}")


def _why_excluded(offer: Offer, history: History | None, wish: Wish) -> str:
    """Return the reason why an offered file must not be used: its checkpoint is not part of the run's history, or the
    user named another checkpoint. The reason is empty if the file may be used.
    """
    checkpoint = offer.checkpoint
    if wish.only is not None:
        return "" if Path(offer.path).parent == wish.only else f"`{wish.only}` was named"
    if history is None:  # checkpoints in memory may belong to another run whose folder had the same name
        return "" if offer.level == DISK else f"`{wish.disk}` does not say of which run it is"
    if history.holds(checkpoint):
        return ""
    if checkpoint.run and checkpoint.run != history.run:
        return "it is of another run"
    for epoch in history.line:
        if (epoch.start, epoch.uid) == (checkpoint.start, checkpoint.uid):
            return f"abandoned: the run went back to step {epoch.last} and continued from there"
    return "abandoned: the run went back to an earlier step, or another start took over"


@dataclass
class _Choice:
    """The newest checkpoint that can be loaded, and the reasons why other checkpoints are not chosen."""

    newest: CheckpointId | None = None
    rebuilds: tuple[Rebuild, ...] = ()
    passed_over: dict[CheckpointId, str] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    """Texts with the step and the reason for each checkpoint that is complete but cannot be loaded."""


def _choose(candidates: Mapping[CheckpointId, Sequence[Offer]], one_file: int, facts: ResumeFacts) -> _Choice:
    choice = _Choice()
    for checkpoint in sorted(candidates, reverse=True):
        if choice.newest is not None:
            choice.passed_over[checkpoint] = f"older than step {choice.newest.step}"
        elif checkpoint.step < one_file:
            choice.passed_over[checkpoint] = f"older than step {one_file}, which is in a single file"
        elif (rebuilds := plan_rebuilds(candidates[checkpoint], checkpoint.ranks, facts)) is None:
            # State only how many parts are missing, not which, because a damaged record may claim a million ranks.
            there = len({offer.part for offer in candidates[checkpoint] if offer.part.startswith(PRIVATE)})
            missing = f"{checkpoint.ranks - there} of {checkpoint.ranks} ranks are missing"
            choice.passed_over[checkpoint] = f"incomplete: the parts of {missing}"
        elif reason := facts.misfits.get(checkpoint) or _exhausted(checkpoint, facts):
            choice.passed_over[checkpoint] = reason
            choice.given_up.append(f"step {checkpoint.step}: {reason}")
        else:
            choice.newest, choice.rebuilds = checkpoint, tuple(rebuilds)
    return choice


def _exhausted(checkpoint: CheckpointId, facts: ResumeFacts) -> str:
    """Return the reason why a checkpoint is not tried again: too many attempts to load it ended the process. The reason
    is empty if the checkpoint may be loaded."""
    tried_often = facts.attempts.get(checkpoint.name, 0) >= MOST
    return f"the last {MOST} attempts to load it ended the process" if tried_often else ""


def _without_any(
    plan: ResumePlan, available: Available, usable: Sequence[Offer], one_file: int, facts: ResumeFacts, given_up: str
) -> ResumePlan:
    """Return the plan if no checkpoint of `Tiered` can be loaded: to load a single file, to refuse, or to begin a new
    run."""
    if one_file:
        why = "it is the newest that is undamaged, in a single file"
        return replace(plan, action="load one file", step=one_file, why=why)
    if (refusal := _refusal(plan, available, usable, facts, given_up)) is not None:
        return replace(plan, action="refuse", why=refusal.parts()[1], refusal=refusal)
    if not plan.wish.auto:
        return replace(plan, action="load one file", why="the path may name a checkpoint in a single file")
    if usable:  # the first checkpoint was interrupted, or hosts were lost
        why = "there is no checkpoint on disk, and those in memory are incomplete"
        return replace(plan, why=why, warnings=(*plan.warnings, f"{why}: starting from step 0"))
    return plan


def _refusal(
    plan: ResumePlan, available: Available, usable: Sequence[Offer], facts: ResumeFacts, given_up: str
) -> CheckpointError | None:
    """Return the error if the folder has checkpoints but none can be used; None if a new run may begin.

    A new run never begins in a folder with checkpoints unless the user asks for it.
    """
    wish, disk = plan.wish, plan.wish.disk
    on_disk = [offer.checkpoint.step for offer in available.offers if offer.level == DISK]
    of_the_run = any(offer.level == DISK for offer in usable)
    if any(_exhausted(offer.checkpoint, facts) for offer in usable):
        hint = f"remove `{disk / MARK}*` to try again"
        return CheckpointError(f"no checkpoint in `{disk}` can be read: {given_up}", hint=hint)
    if wish.only is None and plan.history is not None and on_disk and not of_the_run:
        return CheckpointError(
            f"`{disk}` holds no checkpoint of the newest start, only others up to step {max(on_disk)}",
            hint="name the folder of one of them to resume from it, or choose another folder",
        )
    if available.unseen:
        return CheckpointError(f"nothing to resume from: {available.unseen}")
    if of_the_run:
        count = len({offer.checkpoint for offer in usable})
        return unreadable(disk, f"all {count} are damaged or incomplete{given_up and f': {given_up}'}")
    if available.one_files:
        return unreadable(disk, f"all {max(available.one_files, key=lambda files: files.newest).count} are damaged")
    if available.unusable:
        return CheckpointError(
            f"`{disk}` holds checkpoints, and none of them can be used: {', '.join(available.unusable[-3:])}",
            hint=f"`shoestring checkpoint verify {disk}` says why; or start in another folder (--run.folder NEW)",
        )
    return None


def _ended(offers: Iterable[Offer]) -> bool:
    return any(dict(offer.notes).get("last") for offer in offers)


# -- parts that are rebuilt from parity -------------------------------------------------------------------------------


def plan_rebuilds(offers: Iterable[Offer], ranks: int, facts: ResumeFacts) -> list[Rebuild] | None:
    """Plan how to rebuild the parts of a checkpoint that no host has; returns None if a part cannot be rebuilt.

    The function takes time linear in the number of offers, and returns at the first part that cannot be rebuilt,
    because a damaged record may claim a million ranks.
    """
    by_part: dict[str, list[Offer]] = {}
    parities: dict[int, list[Offer]] = {}
    for offer in offers:
        by_part.setdefault(offer.part, []).append(offer)
        for rank in dict(offer.notes).get("ranks", ()):
            parities.setdefault(rank, []).append(offer)
    rebuilds = []
    for rank in range(ranks):
        if f"{PRIVATE}-{rank}" not in by_part:
            how = _plan_rebuild(by_part, parities.get(rank, ()), rank, facts)
            if how is None:
                return None
            rebuilds.append(how)
    return rebuilds


def _plan_rebuild(
    by_part: Mapping[str, list[Offer]], parities: Iterable[Offer], lost: int, facts: ResumeFacts
) -> Rebuild | None:
    """Plan how to rebuild a lost rank's part; returns None if more than one rank of its parity set is lost."""
    local = facts.local_size
    for offer in parities:
        notes = dict(offer.notes)
        parity = ParitySet(*(tuple(notes[name]) for name in ("ranks", "lengths", "marks")))
        holders = {}
        for rank in parity.ranks:
            hosts = _hosts_with(by_part, f"{PRIVATE}-{rank}", f"{PARITY}-{rank}")
            if rank != lost and hosts:
                holders[rank] = hosts[0] * local + rank % local
        if len(holders) == len(parity.ranks) - 1:
            builder = pick_builder(range(facts.hosts), [rank // local for rank in holders.values()])
            return Rebuild(parity, lost, holders, builder * local + lost % local)
    return None


def _hosts_with(by_part: Mapping[str, list[Offer]], *parts: str) -> list[int]:
    """Return the hosts that have all of these parts. Hosts with the parts in their own slots come first, then hosts
    with copies held for other hosts, then hosts with the parts on disk."""
    offers = [offer for part in parts for offer in by_part.get(part, ())]
    ordered = sorted(offers, key=lambda offer: (offer.level == DISK, offer.held, offer.host))
    hosts = dict.fromkeys(offer.host for offer in ordered)
    return [host for host in hosts if all(any(offer.host == host for offer in by_part.get(part, ())) for part in parts)]
