"""Generation from causal language models: fewer forward passes for the same text."""

from __future__ import annotations

from shoestring.decode.settings import Distill

__all__ = ["Distill"]
