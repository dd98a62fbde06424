"""Names of the areas, which are packages of features; imports nothing, so that `import shoestring` is quick."""

from typing import Final

AREAS: Final = (
    "precision",
    "sparse",
    "decode",
    "preference",
    "memory",
    "graph",
    "parallel",
    "comm",
    "optim",
    "checkpoint",
    "profile",
)
"""The areas, in the order in which features at the same seam are applied; the features of users' packages follow."""
