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
    rate: str = ""
    """Of every host's link, each way, as netlab takes it; empty: as fast as the machine is."""
    slow_first: bool = False
    """Whether the links are slow before the models are built, for what measures them at the start."""
    seed: int = 0
    delays: float = 0.0
    """Longest random wait, in seconds, before every exchange of ours is taken as complete."""
    horizon: int = 0
    """Steps of the whole run, where a method wants to know."""
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
        """Equal for launches that do the same."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Spec:
        fields: dict[str, Any] = json.loads(text)
        fields["methods"] = tuple(Method(**method) for method in fields["methods"])
        fields["setting"] = Setting(**fields["setting"])
        return cls(**fields)
