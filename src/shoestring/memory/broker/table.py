"""Who holds the memory of this host, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoestring.memory.broker.arbitration import called_back
from shoestring.memory.broker.ledger import close_ledger, open_ledger
from shoestring.memory.broker.tenant import PATIENCE, Sights, Terms, survey

HEAD: tuple[str, ...] = ("tenant", "user", "process", "share", "in memory", "lease", "bytes", "priority", "")
_NUMBERS = frozenset({"process", "share", "in memory", "bytes"})


def table(terms: Terms) -> Iterator[str]:
    """Every lease of every tenant, and what is left, in lines.

    Raises:
        ShoestringError: the folder cannot be used.
    """
    if not terms.folder.is_dir():
        yield f"no process has leased memory in {terms.folder}"
        return
    sights = Sights()
    bounds = list(sights.bounds())
    ledger = open_ledger(terms.folder, shared=terms.shared)
    try:
        with ledger.locked(PATIENCE):
            seen = ledger.scan()
    finally:
        close_ledger(ledger)
    host = survey(seen, bounds, terms, sights, pressure=False)
    called = called_back(host)
    rows = [HEAD]
    for each in seen:
        record = each.record
        if record is None:
            rows.append(("unreadable record", str(each.user), str(each.process), *[""] * 6))
            continue
        about = (record.tenant, str(each.user), str(each.process or "?"), f"{record.share:g}")
        about += (_size(record.resident if each.resident is None else each.resident),)
        held = [
            (
                name,
                _size(lease.nbytes),
                lease.priority.name.lower(),
                "called back" if (each.key, name) in called else "",
            )
            for name, lease in record.leases.items()
        ]
        held += [
            (name, _size(want.nbytes), want.priority.name.lower(), "wanted") for name, want in record.wants.items()
        ]
        for number, lease in enumerate(held or [("", "", "", "")]):
            rows.append((*(about if number == 0 else [""] * len(about)), *lease))
    yield from _aligned(rows)
    for bound in bounds:
        if bound.key in host.room and (bound.key == "host" or bound.total < host.totals["host"]):
            name = "host" if bound.key == "host" else f"cgroup {bound.folder}"
            left = _size(max(0, host.room[bound.key]))
            yield f"{name}: {left} of {_size(bound.total)} left to lease, beside a reserve of {terms.reserve:.0%}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for cell, width, title in zip(row, widths, HEAD, strict=True)
        ]
        yield "  ".join(cells).rstrip()
