"""Test cases: a feature under test, its declared properties, and methods that train with it."""

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
    """A feature violates a clause."""


class NotApplicableError(Exception):
    """A clause does not apply to this feature; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A feature under test and its declared properties, which `FeatureSuite` documents."""

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
        """Add the declared companions to the features, and DDP if several ranks have no feature at the seam SHARD."""
        several = [*self.companions, *features]
        if ranks > 1 and not any(Seam.SHARD in feature.seams for feature in several):
            several.insert(0, DDP())
        return several

    def run(self, scenario: Callable[..., Any], ranks: int, features: Sequence[Feature], **arguments: Any) -> list[Any]:
        """Run a scenario with features on a number of ranks; returns a list with the result of each rank.

        Raises:
            RankError: the scenario raised an exception.
        """
        arguments |= {"model": self.model, "features": [scenarios.encode(feature) for feature in features]}
        arguments.setdefault("folder", self.fresh())
        if ranks > 1:
            return self.pool.call(scenario, **arguments)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a pool: with one thread per test, cores are not oversubscribed
        try:
            return [scenario(**arguments)]
        except Exception as error:
            raise RankError(type(error).__name__, f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(threads)

    def train(self, ranks: int, *features: Feature, **arguments: Any) -> list[dict[str, Any]]:
        """Run `scenarios.train` with the features and their companions."""
        return self.run(scenarios.train, ranks, self.company(ranks, *features), **arguments)

    def without(self, ranks: int, **arguments: Any) -> list[dict[str, Any]]:
        """Run `scenarios.train` without the feature; the results are stored in `baselines`, which cases may share."""
        companions = [scenarios.encode(companion) for companion in self.companions]
        key = json.dumps([self.model, ranks, companions, arguments])
        if key not in self.baselines:
            self.baselines[key] = self.train(ranks, **arguments)
        return self.baselines[key]

    def fresh(self) -> str:
        """Create a new empty folder, and return its path."""
        return mkdtemp(dir=self.folder)


def weights(result: Mapping[str, Any]) -> np.ndarray:
    """Decode the weights in the result of a training run as one vector of fp64."""
    return np.frombuffer(base64.b64decode(result["weights"]))


def require(condition: object, message: str) -> None:
    """Raise ViolationError with a message unless the condition is true."""
    if not condition:
        raise ViolationError(message)
