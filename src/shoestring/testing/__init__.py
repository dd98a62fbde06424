"""Tools for testing features: a conformance suite, a pool of ranks, and (in `netlab`) virtual hosts on one machine.

    class TestHalve(FeatureSuite):
        feature = Halve(share=0.5)

Each public name is imported when it is first used, because some names need neither pytest nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.testing.case import Case, NotApplicableError, ViolationError
    from shoestring.testing.clauses import CLAUSES
    from shoestring.testing.pool import Pool, RankError
    from shoestring.testing.suite import FeatureSuite

_HOME = {
    "CLAUSES": "clauses",
    "Case": "case",
    "FeatureSuite": "suite",
    "NotApplicableError": "case",
    "Pool": "pool",
    "RankError": "pool",
    "ViolationError": "case",
}

__all__ = ["CLAUSES", "Case", "FeatureSuite", "NotApplicableError", "Pool", "RankError", "ViolationError"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"shoestring.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module `shoestring.testing` has no attribute `{name}`")
