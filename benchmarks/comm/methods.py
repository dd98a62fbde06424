"""The methods that are compared: ours, those of other packages, and variants that separate the parts of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoestring.comm import Transport
from shoestring.comm.settings.base import Exchange

Kind = Literal["none", "sync", "ddp", "bf16", "torch", "epfml", "ours", "torch in ours"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train on several ranks, of JSON types only, because it is sent to the ranks."""

    name: str
    kind: Kind
    feature: str = ""
    """Name of the class in shoestring.comm, for our methods."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 3e-3
    ddp: bool = True
    """Whether the model is wrapped in DDP."""
    bucket_mb: float = 25.0
    period: int = 1
    """Number of steps after which the pattern of exchanges repeats."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    horizon: int = 0
    """Steps of the run that its schedule is for, however far it is run; 0 takes the run's own."""

    def build(self, kind: type[Any]) -> Any:
        """The settings as an object of `kind`, a class of shoestring.comm.

        What is stored here is flat, with the names of when the first runs were stored, because their files are named
        by a hash of it.
        """
        named = {"budget_kb": "kb_per_step"} | {name: name for name in ("parts", "channels", "torus", "select")}
        flat = dict(self.settings)
        if issubclass(kind, Exchange):
            transport = {now: flat.pop(stored) for stored, now in named.items() if stored in flat}
            return kind(**flat, transport=Transport(**transport))
        return kind(**flat)

    @property
    def local(self) -> bool:
        """Whether replicas differ between merges."""
        return "every" in self.settings

    @property
    def dense(self) -> bool:
        """Whether it learns as DDP does: all gradients at every step."""
        return self.kind in ("ddp", "bf16")

    @property
    def scheduled(self) -> bool:
        """Whether steps differ along the run."""
        return bool(self.settings.get("start") or self.settings.get("final_every"))

    @property
    def shortened(self) -> Method:
        """A method that sends as many bytes a period, sooner: an optimizer sends none, and whole merges are alike."""
        plain = replace(self.at(3e-3), name=self.name.removesuffix(", Muon"), optimizer="adamw")
        if not self.local or self.scheduled or "fragments" in self.settings:
            return plain
        return replace(plain, settings={**self.settings, "every": 4}, period=4)

    def at(self, lr: float) -> Method:
        """This method with another learning rate."""
        return replace(self, lr=lr)

    def but(self, **settings: Any) -> Method:
        """This method with other settings, which are appended to its name."""
        said = ", ".join(f"{name} {value}" for name, value in settings.items())
        return replace(self, name=f"{self.name}, {said}", settings={**self.settings, **settings})


def ours(name: str, feature: str, *, lr: float = 3e-3, bucket_mb: float = 25.0, **settings: Any) -> Method:
    """A codec of ours at every step, under DDP."""
    period = 2 if settings.get("alternate") else 1
    return Method(name=name, kind="ours", feature=feature, settings=settings, lr=lr, bucket_mb=bucket_mb, period=period)


def local(name: str, feature: str, *, lr: float = 3e-3, horizon: int = 0, **settings: Any) -> Method:
    """Local steps of ours; the pattern repeats once everything has been merged."""
    every = int(settings["every"])
    return Method(
        name=name, kind="ours", feature=feature, settings=settings, lr=lr, ddp=False, period=every, horizon=horizon
    )


def muon(method: Method) -> Method:
    """The same with Muon in the place of AdamW."""
    return replace(method, name=f"{method.name}, Muon", optimizer="muon")


NONE = Method(name="no communication", kind="none", ddp=False)
SYNC = Method(name="barrier a step", kind="sync", ddp=False)
DDP = Method(name="DDP fp32", kind="ddp")
BF16 = Method(name="DDP bf16 hook", kind="bf16")
TORCH = Method(name="torch PowerSGD", kind="torch", settings={"rank": 4}, bucket_mb=1000)
EPFML = Method(name="epfml powersgd", kind="epfml", settings={"rank": 4, "iterations": 2}, ddp=False)
