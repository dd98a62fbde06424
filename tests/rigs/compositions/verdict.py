"""Whether a composition did what it may do: equal one process, be refused before it takes anything, or be lossy by its
own word; and resume equal on every rank."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from shoestring.comm.settings.local_steps import LocalSteps
from shoestring.core.feature import Feature
from shoestring.testing import scenarios
from shoestring.testing.pool import Pool, RankError
from tests.rigs.compositions.draws import STEPS, Composition
from tests.rigs.compositions.trainee import attempt

EQUAL = 1e-8
"""Largest difference from one process, in double precision."""
RESUMED = 1e-9
"""Largest difference of a resumed run: DDP forms its buckets anew, which changes the order of sums over four ranks."""
SINGLE = 1e-6
"""Largest difference of losses, which are read in single precision."""
NEAR = 4.0
"""Nats a token by which the held-out loss of a lossy composition may end above that of one process."""


@dataclass(frozen=True)
class Judgement:
    """`kind` is "equal", "lossy" or "refused"; or, for a fault, "wrong", "raw", "late", "ranks", "resume" or "hang"."""

    kind: str
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("equal", "lossy", "refused")


def inexact(feature: Feature) -> str:
    """What keeps several ranks from computing what one process does, by the feature's own word."""
    if isinstance(feature, LocalSteps) and feature.start >= STEPS and getattr(feature, "codec", "") == "fp32":
        return feature.inexact if feature.second_moment == "global" else ""  # gradients are averaged to the end
    return feature.inexact


class Judge:
    """Runs compositions on pools of ranks that stay, and in this process."""

    def __init__(self, timeout: float = 180.0) -> None:
        self.pools = {ranks: Pool(ranks, timeout=timeout) for ranks in (2, 4)}

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, composition: Composition) -> Judgement:
        """Run it on its ranks, and on one process where that says more."""
        with TemporaryDirectory(prefix="shoestring-composition-") as folder:
            arguments = {
                "features": [scenarios.encode(each) for each in composition.features],
                "local_size": composition.local_size,
                "model": composition.model,
                "micro_batches": composition.micro_batches,
                "ragged": composition.ragged,
                "steps": STEPS,
                "stop": composition.stop,
            }
            try:
                several = self.pools[composition.ranks].call(attempt, folder=f"{folder}/ranks", **arguments)
            except RankError as error:
                return Judgement("hang" if error.kind in ("Timeout", "Waiting") else "raw", f"{error}"[:6000])
            if failed := [each for each in several if "error" in each]:
                return _refusal(failed, len(several))
            if failed := [each["rest"] for each in several if "error" in each["rest"]]:
                return Judgement("resume", failed[0]["message"] + "\n" + failed[0]["detail"])
            found = _resumed(several) or _alike(several)
            return found or self._compare(composition, several[0]["whole"], Path(folder), arguments)

    def _compare(
        self, composition: Composition, result: Mapping[str, Any], folder: Path, arguments: dict[str, Any]
    ) -> Judgement:
        torch.set_num_threads(1)
        alone = attempt(folder=f"{folder}/alone", parts=composition.readers, resumes=False, **arguments)
        if "error" in alone:
            return Judgement("wrong", f"one process refuses what {composition.ranks} ranks do: {alone['message']}")
        reasons = {each.name: reason for each in composition.features if (reason := inexact(each))}
        one = alone["whole"]
        if reasons:
            worse = result["held_out"] - one["held_out"]
            if not worse < NEAR:
                return Judgement("wrong", f"held-out loss {worse:.2f} above one process's {one['held_out']:.2f}")
            return Judgement("lossy", "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        keys = {"losses": SINGLE, "gains": EQUAL, "weights": EQUAL, "averaged": EQUAL, "held_out": EQUAL}
        if any(each.inexact for each in composition.features):  # whose losses are those of each rank
            del keys["losses"]
        for key, most in keys.items():
            if not (apart := _apart(result[key], one[key])) <= most:
                return Judgement("wrong", f"{key} are {apart:.2g} from one process's")
        return Judgement("equal")


def _refusal(failed: Sequence[Mapping[str, Any]], ranks: int) -> Judgement:
    first = failed[0]
    said = f"{first['error']}: {first['message']}"
    if not all(each["known"] for each in failed):
        first = next(each for each in failed if not each["known"])
        return Judgement("raw", f"{first['error']}: {first['message']} at step {first['step']}\n{first['detail']}")
    if len(failed) < ranks:
        return Judgement("ranks", f"{len(failed)} of {ranks} ranks refuse: {said}")
    if len({(each["error"], each["step"]) for each in failed}) > 1:
        return Judgement("ranks", f"ranks refuse differently: {[(each['error'], each['message']) for each in failed]}")
    if first["step"] >= 0:
        return Judgement("late", f"{said} (at step {first['step'] + 1})\n{first['detail']}")
    if left := [each["left"] for each in failed if each["left"]]:
        return Judgement("late", f"{said}; left: {left[0][:5]}")
    return Judgement("refused", said)


def _resumed(several: Sequence[Mapping[str, Any]]) -> Judgement | None:
    for rank, each in enumerate(several):
        whole, rest = each["whole"], each["rest"]
        for key, most in (("losses", SINGLE), ("gains", RESUMED), ("weights", RESUMED), ("averaged", RESUMED)):
            expected = whole[key] if isinstance(whole[key], str) else whole[key][rest["start"] :]
            if not (apart := _apart(rest[key], expected)) <= most:
                return Judgement("resume", f"rank {rank}: {key} are {apart:.2g} apart, resumed at {rest['start']}")
    return None


def _alike(several: Sequence[Mapping[str, Any]]) -> Judgement | None:
    """Ranks end with one model, and evaluate one."""
    for rank, each in enumerate(several[1:], 1):
        for key in ("weights", "averaged", "held_out", "gains"):
            if each["whole"][key] != several[0]["whole"][key]:
                apart = _apart(each["whole"][key], several[0]["whole"][key])
                return Judgement("ranks", f"rank {rank}: {key} are {apart:.2g} from rank 0's")
    return None


def _apart(one: Any, other: Any) -> float:
    """The largest difference; infinite where shapes differ."""
    pair = [
        np.frombuffer(base64.b64decode(each)) if isinstance(each, str) else np.atleast_1d(each) for each in (one, other)
    ]
    if pair[0].shape != pair[1].shape:
        return float("inf")
    return float(np.abs(pair[0] - pair[1]).max(initial=0.0))
