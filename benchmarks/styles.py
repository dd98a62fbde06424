"""Lines of pictures that are told apart without colour as well; colours are Okabe and Ito's, for all kinds of sight."""

from __future__ import annotations

STYLES = (
    ("#000000", "-", "o"),
    ("#E69F00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#56B4E9", "--", "v"),
    ("#0072B2", "-", "P"),
    ("#D55E00", "-", "X"),
    ("#F0E442", "-", "h"),
    ("#999999", "-", "s"),
)
"""Colours, dashes and markers."""
