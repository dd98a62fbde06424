"""Generation from causal language models: fewer forward passes for the same text."""

from __future__ import annotations

from shoestring.decode.distill import Distill

__all__ = ["Distill"]
