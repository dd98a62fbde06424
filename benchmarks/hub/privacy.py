"""Private means private: attempts to reach another project, by every route, as everybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Deadline
from benchmarks.rows import Bar, Measured


def leaks(deadline: Deadline) -> Measured:
    """How many attempts bring something of the other project, or change it."""
    from shoestring_hub.server.configure import Place, configure

    with TemporaryDirectory() as root:
        configure(Place(Path(root) / "hub"))
        from shoestring_hub.server.serve import prepare

        prepare()
        from django.conf import settings

        settings.ALLOWED_HOSTS.append("testserver")
        from tests.rigs.hub.leaks import Side, attack

        attempts = attack(Side("alpha").seed(), Side("beta").seed())
    assert attempts.tried >= 1000
    note = f"{attempts.tried:,} attempts by every route, method and role; {attempts.admitted} controls were admitted"
    return Measured(len(attempts.leaks), note)


def rows() -> Iterator[Bar]:
    what = "attempts to reach a project without the right to it that succeed, of at least 1,000"
    yield Bar("hub.leaks", what, "<=", 0, leaks, kind="exact", peers=("django",))
