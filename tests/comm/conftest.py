"""Ranks that all tests of an area share: starting four processes takes as long as a dozen scenarios."""

from collections.abc import Iterator

import pytest

from shoestring.testing.pool import Pool
from shoestring.testing.suite import shared


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Pool:
    """The two ranks of all conformance tests."""
    return shared(request.config)["pool"]


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    with Pool(4) as ranks:
        yield ranks
