"""Fewer bytes on the wire between ranks."""

from __future__ import annotations

from shoestring.comm.per_step import BF16, Dense, PowerSGD

__all__ = ["BF16", "Dense", "PowerSGD"]
