"""What one launch of four ranks does, as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.comm.methods import Method
from benchmarks.comm.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A launch: its methods take turns of `turn` steps, `rounds` times, forwards and backwards in alternation.

    A curve is one method, one round and a look at the held-out loss every `look` steps.
    """

    methods: tuple[Method, ...]
    turn: int
    rounds: int = 1
    warm: int = 0
    """Steps of each method before anything is measured, and before the links are slow."""
    look: int = 0
    """Steps between looks at the held-out loss; 0 looks at the end only."""
    until: float = 0.0
    """Loss, smoothed, at which a curve is long enough; 0 for as many steps as it is given."""
    cool: float = 0.0
    """Part of the horizon in which the rate of learning falls to zero at its end."""
    rate: str = ""
    """Rate of every host's link in each direction, as netlab writes it; empty leaves links unlimited."""
    coalesce: bool = False
    """Whether frames pass by the millisecond, so that the emulation of a fast link takes little from the ranks."""
    slow_first: bool = False
    """Whether the links are slow before the models are built, for methods that measure them at start-up."""
    seed: int = 0
    delays: float = 0.0
    """Longest random delay, in seconds, before each exchange of ours counts as complete."""
    horizon: int = 0
    """Number of steps of the whole run, for methods that need it."""
    setting: Setting = field(default_factory=Setting)
    timeout: float = 6 * 3600.0
    """Seconds after which the launch has failed."""
    trial: int = 0
    """Number of a repetition."""

    @property
    def steps(self) -> int:
        return self.turn * self.rounds

    @property
    def key(self) -> str:
        """Hash that is equal for equal launches."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        fields = asdict(self)
        if not self.coalesce:  # as in what was stored before there was a choice
            del fields["coalesce"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Spec:
        fields: dict[str, Any] = json.loads(text)
        fields["methods"] = tuple(Method(**method) for method in fields["methods"])
        fields["setting"] = Setting(**fields["setting"])
        return cls(**fields)
