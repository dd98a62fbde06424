"""One feature with what is declared about it, and the means to run it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from shoestring.core.feature import Feature, Seam
from shoestring.parallel import DDP
from shoestring.testing import scenarios
from shoestring.testing.pool import Pool, RankError


class ViolationError(AssertionError):
    """A feature does not keep to a clause."""


class NotApplicableError(Exception):
    """A clause says nothing about this feature; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A feature under test. `FeatureSuite` documents the declarations."""

    feature: Feature
    pool: Pool
    folder: Path
    model: str = "shoestring.testing.jobs:tiny"
    ranks: tuple[int, ...] = (1, 2)
    exact_across_ranks: bool = True
    reshards: bool = True
    returns_model: bool = True
    stays: Sequence[str] = ()
    tolerance: float = 0.02
    steps: int = 60
    representative: bool = True
    partners: Sequence[Feature] = ()
    companions: Sequence[Feature] = ()
    clashes: Mapping[str, str] = field(default_factory=dict)
    baselines: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def company(self, ranks: int, *features: Feature) -> list[Feature]:
        """The features with those that they need: the declared ones, and one that keeps several ranks equal."""
        several = [*self.companions, *features]
        if ranks > 1 and not any(Seam.SHARD in feature.seams for feature in several):
            several.insert(0, DDP())
        return several

    def run(self, scenario: Callable[..., Any], ranks: int, features: Sequence[Feature], **arguments: Any) -> list[Any]:
        """Each rank's result.

        Raises:
            RankError: the scenario raised.
        """
        arguments |= {"model": self.model, "features": [scenarios.encode(each) for each in features]}
        arguments.setdefault("folder", self.fresh())
        if ranks > 1:
            return self.pool.call(scenario, **arguments)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a pool: threads that spin on shared cores would cost more than they bring
        try:
            return [scenario(**arguments)]
        except Exception as error:
            raise RankError(type(error).__name__, f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(threads)

    def train(self, ranks: int, *features: Feature, **arguments: Any) -> list[dict[str, Any]]:
        """`scenarios.train` in company."""
        return self.run(scenarios.train, ranks, self.company(ranks, *features), **arguments)

    def without(self, ranks: int, **arguments: Any) -> list[dict[str, Any]]:
        """`scenarios.train` without the feature; cases that share `baselines` run it once."""
        companions = [scenarios.encode(each) for each in self.companions]
        key = json.dumps([self.model, ranks, companions, arguments])
        if key not in self.baselines:
            self.baselines[key] = self.train(ranks, **arguments)
        return self.baselines[key]

    def fresh(self) -> str:
        """An empty folder."""
        return mkdtemp(dir=self.folder)


def weights(result: Mapping[str, Any]) -> np.ndarray:
    """All weights of a result as one vector."""
    return np.frombuffer(base64.b64decode(result["weights"]))


def require(condition: object, message: str) -> None:
    if not condition:
        raise ViolationError(message)
