"""Formats the table of a host's memory leases, for `shoestring memory host`."""

from __future__ import annotations

from collections.abc import Iterator

from shoestring.figures import memory, percent
from shoestring.memory.broker.arbitration import called_back
from shoestring.memory.broker.ledger import close_ledger, open_ledger
from shoestring.memory.broker.tenant import PATIENCE, Sights, Terms, survey

HEAD: tuple[str, ...] = ("tenant", "user", "process", "share", "in memory", "lease", "bytes", "priority", "")
_NUMBERS = frozenset({"process", "share", "in memory", "bytes"})


def table(terms: Terms) -> Iterator[str]:
    """Yield the lines of a table of all leases, then one line per bound with the memory left to lease.

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
    for tenant in seen:
        record = tenant.record
        if record is None:
            rows.append(("unreadable record", str(tenant.user), str(tenant.process), *[""] * 6))
            continue
        about = (record.tenant, str(tenant.user), str(tenant.process or "?"), f"{record.share:g}")
        about += (memory(record.resident if tenant.resident is None else tenant.resident),)
        held = [
            (
                name,
                memory(lease.nbytes),
                lease.priority.name.lower(),
                "called back" if (tenant.key, name) in called else "",
            )
            for name, lease in record.leases.items()
        ]
        held += [
            (name, memory(want.nbytes), want.priority.name.lower(), "wanted") for name, want in record.wants.items()
        ]
        for number, lease in enumerate(held or [("", "", "", "")]):
            rows.append((*(about if number == 0 else [""] * len(about)), *lease))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for cell, width, title in zip(row, widths, HEAD, strict=True)
        ]
        yield "  ".join(cells).rstrip()
    for bound in bounds:
        if bound.key in host.room and (bound.key == "host" or bound.total < host.totals["host"]):
            name = "host" if bound.key == "host" else f"cgroup {bound.folder}"
            left = memory(max(0, host.room[bound.key]))
            yield f"{name}: {left} of {memory(bound.total)} left to lease, beside a reserve of {percent(terms.reserve)}"
