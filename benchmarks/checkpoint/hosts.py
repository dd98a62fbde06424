"""checkpoint.host-*: one of four hosts is lost with its memory, and replaced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, Deadline, Measured, NotRun
from shoestring.checkpoint.tiers import peer_copies
from shoestring.testing.netlab import netlab, netlab_available
from tests.rigs.checkpointing.lost_hosts import HOSTS, Fleet, lose, resumed


def rows(cache: Path | None = None) -> list[Bar]:
    """The bars."""

    def lost(_: Deadline, how: str, *, replayed: bool = False) -> Measured | NotRun:
        if reason := netlab_available():
            return NotRun(reason)
        with TemporaryDirectory() as place:
            fleet = Fleet.made(Path(place), replayed=replayed)
            expected = fleet.local("local", "--checkpoint.tiered.memory_folder", f"{place}/memory", workers=HOSTS)
            worst, equal = 0, 0
            for host in range(1, HOSTS):  # where the ranks meet is on the first, and goes with it
                with netlab(hosts=HOSTS, rate="1gbit", shared=fleet.shared) as lab:
                    job = lose(lab, fleet, f"{how}-{host}", 10, host, "--checkpoint.tiered.redundancy", how)
                    told = resumed(job)
                most = max(again for _, again in told)
                equal += fleet.losses(f"{how}-{host}") == expected and not (replayed and most)
                worst = max(worst, most)
        return Measured(
            equal / (HOSTS - 1), f"each of {HOSTS - 1} hosts lost once; at most {worst} steps of an interval of 4 again"
        )

    def storage(_: Deadline) -> Measured:
        of = peer_copies.ParitySet((0, 1, 2, 3), (1 << 30,) * 4, (0,) * 4)
        return Measured(1 + of.segment / of.lengths[0], "bytes of a rank's part and of the parity that it keeps")

    what = "a host of four is lost with its memory and disk, and replaced, under FSDP without checkpoints to disk; "
    bars = [
        Bar(
            f"checkpoint.host-{how}",
            f"{what}{words}: share of the hosts after whose loss all losses are those of four local ranks, bit for bit",
            ">=",
            1.0,
            partial(lost, how=how),
            kind="exact",
        )
        for how, words in (("copy", "copies on partners"), ("parity", "parity over the four"))
    ]
    replays = Bar(
        "checkpoint.host-replayed",
        f"{what.replace('FSDP', 'DDP with 4 bits')}differences on partners: share of the hosts after whose loss no "
        "step is repeated and all losses are those of four local ranks, bit for bit",
        ">=",
        1.0,
        partial(lost, how="copy", replayed=True),
        kind="exact",
    )
    return [
        *bars,
        replays,
        Bar(
            "checkpoint.parity-storage",
            "memory under parity over four hosts, times the state",
            "<=",
            1.34,
            storage,
            kind="exact",
        ),
    ]
