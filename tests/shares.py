"""How much of the generated cases the slow tests run: all of them with SHOESTRING_ALL_CASES in the environment."""

import os

ALL_CASES = "SHOESTRING_ALL_CASES" in os.environ


def share(everything: int, part: int) -> int:
    """The number of cases to draw."""
    return everything if ALL_CASES else part
